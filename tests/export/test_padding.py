"""Padding is without effect, bit for bit, on the runtime: full and sliding layers, XNNPACK."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.extension.pybindings.portable_lib import _load_for_executorch
from tests.support.models import FAMILIES

from staticlm.contract import Contract
from staticlm.export.options import ExportOptions
from staticlm.export.programs import export_programs
from staticlm.lowering.pipeline import lower_to_file

Run = Callable[..., tuple[torch.Tensor, list[torch.Tensor]]]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> tuple[Contract, Path]:
    options = ExportOptions(context_length=40, prefill_lengths=(8,))
    exported = export_programs(FAMILIES["gemma2"](), options)
    path = tmp_path_factory.mktemp("padding") / "model.pte"
    lower_to_file(
        exported.programs,
        exported.contract,
        path,
        partitioners={name: [XnnpackPartitioner()] for name in exported.programs},
    )
    return exported.contract, path


@pytest.fixture
def run(program: tuple[Contract, Path]) -> Run:
    contract, path = program
    module = _load_for_executorch(str(path))

    def run(pad: int, chunks: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        caches = [torch.zeros(c.spec.shape) for c in contract.caches]
        places = [c.data_ptr() for c in caches]
        text = torch.arange(sum(chunks)) * 7 % contract.vocab_size
        position, rows = 0, []
        for count in chunks:
            tokens = torch.full((1, 8), pad)
            tokens[0, :count] = text[position : position + count]
            inputs = [tokens, torch.tensor([position]), torch.tensor([count]), *caches]
            rows.append(module.run_method("prefill", inputs, True)[0].clone())
            position += count
        # The caller's memory is what is written, and it never moves.
        assert [c.data_ptr() for c in caches] == places
        assert all(c.abs().sum() > 0 for c in caches)
        return torch.cat(rows), caches

    return run


@pytest.mark.parametrize("count", range(1, 9))
def test_no_bit_depends_on_the_padding_ids(run: Run, count: int) -> None:
    """The last chunk starts at every offset of the ring, 18 slots for a window of 11."""
    chunks = [8, count, 8, 3, count]
    rows, caches = run(0, chunks)
    other_rows, other_caches = run(93, chunks)
    assert torch.equal(rows.view(torch.int32), other_rows.view(torch.int32))
    for one, other in zip(caches, other_caches, strict=True):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))
