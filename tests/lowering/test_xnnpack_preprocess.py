"""Passes that have nothing to do are left out, and the program is the same byte for byte."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from executorch.backends.xnnpack._passes import XNNPACKPassManager
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from executorch.exir.backend.backend_details import BackendDetails
from tests.support.models import _COMMON, build
from torch import nn
from transformers import PreTrainedModel

from staticlm.export.options import ExportOptions
from staticlm.export.programs import export_programs
from staticlm.export.quantize import quantize_model
from staticlm.lowering import pipeline, xnnpack_preprocess
from staticlm.lowering.pipeline import lower_to_file
from staticlm.lowering.xnnpack_preprocess import sparing_passes

MODELS: dict[str, tuple[Callable[[], PreTrainedModel], str | None]] = {
    "gemma2": (
        lambda: build("Gemma2", **{**_COMMON, "num_hidden_layers": 1}, head_dim=16),
        None,
    ),
    "qwen2-int8": (lambda: build("Qwen2", **{**_COMMON, "num_hidden_layers": 1}), "int8"),
}


@pytest.mark.parametrize("name", MODELS)
def test_programs_of_models_are_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, scheme = MODELS[name]
    options = ExportOptions(context_length=32, prefill_lengths=(4,), quantize=scheme)
    exported = export_programs(quantize_model(build(), options), options)
    partitioners = {method: [XnnpackPartitioner()] for method in exported.programs}
    files = []
    for number, how in enumerate((sparing_passes, contextlib.nullcontext)):
        monkeypatch.setattr(pipeline, "sparing_passes", how)
        files.append(tmp_path / f"{number}.pte")
        lower_to_file(
            exported.programs, exported.contract, files[-1], partitioners=partitioners, jobs=1
        )
    assert files[0].read_bytes() == files[1].read_bytes()


class _Images(nn.Module):
    """What most of the passes are for."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Conv1d(3, 4, 3)
        self.one = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.slope = nn.PReLU()
        self.apart = nn.BatchNorm2d(3)

    def forward(self, image: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.slope(torch.relu(self.norm(self.one(image))))
        x = torch.cat([x, x * 2, x + 1, x - 1, x * x, x * 3, x + 4], 1).mean((2, 3), keepdim=True)
        lone = torch.nn.functional.pad(self.apart(image).clone(), (1, 1)) + 1
        return x, lone, torch.nn.functional.hardtanh(self.flat(row) + 1)


def test_whatever_a_pass_is_for_still_meets_it() -> None:
    torch.manual_seed(0)
    inputs = (torch.randn(1, 3, 8, 8), torch.randn(1, 3, 9))
    program = torch.export.export(_Images().eval(), inputs)
    blobs = []
    for how in (sparing_passes, contextlib.nullcontext):
        with how():
            edge = to_edge_transform_and_lower(
                {"forward": program}, partitioner={"forward": [XnnpackPartitioner()]}
            )
        blobs.append(edge.to_executorch().buffer)
    assert blobs[0] == blobs[1]


def test_every_pass_that_is_named_exists() -> None:
    program = torch.export.export(nn.Identity(), (torch.ones(1),))
    known = {one.__name__ for one in XNNPACKPassManager(program).passes}
    assert set(xnnpack_preprocess._NEEDED) <= known


def test_the_name_is_given_back() -> None:
    def count() -> int:
        return [c.__name__ for c in BackendDetails.__subclasses__()].count("XnnpackBackend")

    with sparing_passes():
        assert count() == 2
    assert count() == 1
