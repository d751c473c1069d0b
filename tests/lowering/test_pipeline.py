"""From exported programs to a file: in one process and in several, the same program."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from tests.support.models import small_llama

from staticlm.contract.program import MethodFacts
from staticlm.errors import Code, ContractError, LoweringError
from staticlm.export.options import ExportOptions
from staticlm.export.programs import ExportedModel, export_programs
from staticlm.lowering.parallel import can_fork, run_forked
from staticlm.lowering.pipeline import lower_to_file
from staticlm.lowering.provenance import shared_provenance
from staticlm.runtime.runner import load

OPTIONS = ExportOptions(context_length=32, prefill_lengths=(4,))


@pytest.fixture(scope="module")
def exported() -> ExportedModel:
    return export_programs(small_llama(), OPTIONS, bos_id=1, eos_ids=(2, 5))


@pytest.fixture(scope="module")
def one_process(exported: ExportedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pipeline") / "one.pte"
    partitioners = {name: [XnnpackPartitioner()] for name in exported.programs}
    lower_to_file(exported.programs, exported.contract, path, partitioners=partitioners, jobs=1)
    return path


def shape_of(method: MethodFacts) -> dict[str, object]:
    """What must not depend on how a method was lowered."""
    facts = dataclasses.asdict(method)
    return {key: facts[key] for key in ("inputs", "outputs", "aliases", "operators", "arenas")} | {
        "delegates": [(d["backend"], d["options"]) for d in facts["delegates"]]
    }


@pytest.mark.skipif(not can_fork(), reason="processes cannot be forked here")
def test_a_process_for_each_method_gives_the_same_program(
    exported: ExportedModel, one_process: Path, tmp_path: Path
) -> None:
    path = tmp_path / "several.pte"
    partitioners = {name: [XnnpackPartitioner()] for name in exported.programs}
    stages: list[str] = []
    made = lower_to_file(
        exported.programs,
        exported.contract,
        path,
        partitioners=partitioners,
        jobs=2,
        progress=stages.append,
    )
    assert "lower, a process for each method" in stages
    assert sorted(file.name for file in tmp_path.iterdir()) == ["several.pte"]
    with load(one_process) as one, load(path) as several:
        assert one.contract == several.contract
        for name, method in made.facts.methods.items():
            assert shape_of(method) == shape_of(one._program.facts.methods[name])
        prompt = [3, 14, 15, 92, 65, 35]
        np.testing.assert_array_equal(one.session.prefill(prompt), several.session.prefill(prompt))
        np.testing.assert_array_equal(one.session.step(7), several.session.step(7))
    # Weights of both methods once: the merged file is no larger than the other by more than tables.
    assert path.stat().st_size < one_process.stat().st_size + 4096


def test_the_written_program_keeps_the_contract(exported: ExportedModel, tmp_path: Path) -> None:
    """A contract that lists another signature than the program has is not written."""
    decode = exported.contract.methods[-1]
    swapped = dataclasses.replace(decode, inputs=(*decode.inputs[:2], *reversed(decode.inputs[2:])))
    contract = dataclasses.replace(
        exported.contract, methods=(*exported.contract.methods[:-1], swapped)
    )
    with pytest.raises(ContractError) as refused:
        lower_to_file(exported.programs, contract, tmp_path / "x.pte", partitioners={}, jobs=1)
    assert refused.value.code is Code.LAYOUT_INVALID
    assert "decode" in str(refused.value)


def test_equal_segments_are_shared(exported: ExportedModel, one_process: Path) -> None:
    model_bytes = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for p in exported.programs.values()
        for name, t in p.state_dict.items()
        if name.startswith("model.")
    }
    assert "model.lm_head.weight" in next(iter(exported.programs.values())).state_dict
    # A program this small is half tables; the tied table (96 x 32 floats) would show.
    overhead = one_process.stat().st_size - sum(model_bytes.values())
    assert overhead < 70_000


@pytest.mark.skipif(not can_fork(), reason="processes cannot be forked here")
def test_a_task_that_fails_in_its_process_fails_here() -> None:
    def refuse() -> int:
        raise LoweringError(Code.BACKEND_OPTION_INVALID, "an option", found=1, expected=2)

    with pytest.raises(LoweringError) as refused:
        run_forked({"good": lambda: 1, "bad": refuse}, jobs=2)
    assert refused.value.code is Code.BACKEND_OPTION_INVALID
    assert (refused.value.found, refused.value.expected) == (1, 2)


@pytest.mark.skipif(not can_fork(), reason="processes cannot be forked here")
def test_a_process_that_dies_is_named() -> None:
    with pytest.raises(LoweringError, match=r"'prefill'.*exit code 3"):
        run_forked({"prefill": lambda: os._exit(3)}, jobs=2)


def test_shared_provenance_is_undone() -> None:
    from torch.fx.traceback import NodeSource

    with shared_provenance():
        assert "__deepcopy__" in vars(NodeSource)
        with shared_provenance():
            pass
        assert "__deepcopy__" in vars(NodeSource)
    assert "__deepcopy__" not in vars(NodeSource)
