"""QNN's transforms through the hook equal those of upstream's private entry point, pass for pass.

Only the hardware is replaced: the SDK set-up, the SDK's manager, and the partition itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

pytest.importorskip("executorch.backends.qualcomm.serialization.qc_schema")

from executorch.backends.qualcomm._passes import DecomposeTan, ResolveDebugHandle
from executorch.backends.qualcomm._passes.qnn_pass_manager import get_qnn_pass_manager_cls
from executorch.backends.qualcomm.partition.qnn_partitioner import QnnPartitioner
from executorch.backends.qualcomm.serialization import qc_schema as schema
from executorch.backends.qualcomm.serialization.qc_schema_serialize import option_to_flatbuffer
from executorch.backends.qualcomm.utils import utils as upstream
from executorch.exir.backend.compile_spec_schema import CompileSpec
from tests.support.qnn import Undelegated
from torch.export import ExportedProgram

from staticlm.lowering.lower import lower
from staticlm.lowering.qnn import contribution, from_options
from staticlm.lowering.qnn.table import SOCS

KIND = schema.QnnExecuTorchBackendType
TYPES = {"htp": KIND.kHtpBackend, "gpu": KIND.kGpuBackend, "lpai": KIND.kLpaiBackend}
LPAI_SOCS = ("SM8850", "SAR2230P")
TARGETS = [(v, chip) for v in ("htp", "gpu") for chip in SOCS] + [("lpai", c) for c in LPAI_SOCS]


class Model(torch.nn.Module):
    """Operators that QNN rewrites before decomposition and after it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.hardsigmoid(self.linear(x) * 2.0)
        return torch.floor_divide(torch.tan(y), 0.5) + torch.reciprocal(y + 1.0)


def specs(variant: str, chip: str) -> list[CompileSpec]:
    """What upstream's builders make; LPAI's asks the SDK for its version, so it is put together."""
    if variant != "lpai":
        extra = {"use_fp16": True} if variant == "htp" else {}
        return from_options({"backend": variant, "soc_model": chip, **extra}).compile_specs
    options = schema.QnnExecuTorchOptions(
        schema._soc_info_table[schema.QcomChipset[chip]], upstream.generate_lpai_compiler_spec()
    )
    return [CompileSpec("qnn_compile_spec", option_to_flatbuffer(options))]


@pytest.fixture(scope="module")
def program() -> ExportedProgram:
    return torch.export.export(Model().eval(), (torch.ones(2, 8),), strict=True)


def names(passes: Sequence[Any]) -> list[str]:
    return [type(p).__name__ for p in passes]


@pytest.mark.parametrize(("variant", "chip"), TARGETS)
def test_lists_equal_upstreams_for_every_chip(
    variant: str, chip: str, program: ExportedProgram
) -> None:
    compile_specs = specs(variant, chip)
    partitioner = QnnPartitioner(compile_specs, skip_node_id_set={"n"})
    manager = get_qnn_pass_manager_cls(TYPES[variant])()
    expected = manager.get_to_edge_transform_passes(program, compiler_specs=compile_specs)
    passes = contribution.edge_passes(partitioner, "decode", program)
    assert names(passes) == names(expected)
    assert names(passes)[-1] == "ResolveDebugHandle"
    if variant == "lpai":
        assert names(passes)[-2] == "LpaiPartitionFallbackSupport"
        assert passes[-2].compiler_specs == compile_specs
        assert passes[-2].skip_node_id_set == {"n"}


def test_lists_differ_between_backends(program: ExportedProgram) -> None:
    lists = {
        v: names(contribution.edge_passes(QnnPartitioner(specs(v, "SM8850")), "m", program))
        for v in TYPES
    }
    assert set(lists["lpai"]) - set(lists["htp"]) == {
        "DecomposeHardsigmoid",
        "LpaiPartitionFallbackSupport",
    }
    assert len(lists["htp"]) == len(lists["gpu"]) == 35


@pytest.fixture
def entry(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What upstream's entry point hands to the standard one."""
    seen: dict[str, Any] = {}

    def standard(programs: Any, **arguments: Any) -> None:
        seen.update(arguments, programs=programs)

    @contextmanager
    def no_manager(compile_specs: Any) -> Any:
        yield

    monkeypatch.setenv("QNN_SDK_ROOT", "")
    monkeypatch.setattr(upstream, "to_edge_transform_and_lower", standard)
    monkeypatch.setattr(upstream, "QnnManagerContext", no_manager)
    return seen


@pytest.mark.parametrize("variant", ["htp", "gpu"])
@pytest.mark.parametrize("options", [{}, {"convert_linear_to_conv2d": True}])
def test_the_generic_path_equals_the_private_entry_point(
    variant: str, options: dict[str, Any], program: ExportedProgram, entry: dict[str, Any]
) -> None:
    compile_specs = specs(variant, "SM8750")
    upstream.to_edge_transform_and_lower_to_qnn(
        {"decode": Model().eval()},
        {"decode": (torch.ones(2, 8),)},
        {"decode": compile_specs},
        **options,
    )
    early: list[str] = []

    class Spy(Undelegated):
        def ops_to_not_decompose(self, ep: ExportedProgram) -> Any:
            early.append(ep.graph_module.code)
            return super().ops_to_not_decompose(ep)

    spy = Spy(compile_specs)
    spy.pass_options = options
    lowered = lower(
        {"decode": program}, partitioners=[spy], compile_config=upstream.qnn_edge_config()
    )
    ran = [r.name for r in lowered.records if r.contributor == "Spy"]
    passes = entry["transform_passes"]["decode"]
    assert ran == ["transform_for_pre_decomposition", *names(passes)]
    assert ("ConvertLinearToConv2d" in ran) is bool(options)
    # The transform before decomposition left upstream's program, but for the names of constants.
    reference = entry["programs"]["decode"].run_decompositions({})
    ours = early[0].replace("_lifted_tensor_decode_", "_lifted_tensor_constant")
    assert ours == reference.graph_module.code
    assert ours.count("_lifted_tensor_constant0") > 1
    changed = {r.name for r in lowered.records if r.changed}
    assert {"transform_for_pre_decomposition", "DecomposeTan"} <= changed


def test_the_callers_pass_table_is_not_written_into(program: ExportedProgram) -> None:
    job = get_qnn_pass_manager_cls(KIND.kHtpBackend).get_capture_program_passes()
    job[DecomposeTan]["activate"] = False
    before = str(job)
    options = {"soc_model": "SM8750", "use_fp16": True, "passes_job": job}
    partitioner = from_options({**options, "convert_linear_to_conv2d": True}).partitioner
    ran = names(contribution.edge_passes(partitioner, "decode", program))
    assert "DecomposeTan" not in ran
    assert "ConvertLinearToConv2d" in ran
    assert ran[-1] == ResolveDebugHandle.__name__
    assert str(job) == before


def test_two_methods_run_their_own_passes_once(program: ExportedProgram) -> None:
    other = torch.export.export(Model().eval(), (torch.ones(1, 8),))
    partitioners = {
        "prefill": [Undelegated(specs("htp", "SM8750"))],
        "decode": [Undelegated(specs("gpu", "SM8750"))],
    }
    lowered = lower(
        {"prefill": program, "decode": other},
        partitioners=partitioners,
        compile_config=upstream.qnn_edge_config(),
    )
    for method in partitioners:
        ran = [r.name for r in lowered.records if r.method == method]
        assert ran.count("ResolveDebugHandle") == 1
        assert len(ran) == len(set(ran)) == 37
    x = torch.linspace(-1, 1, 8).view(1, 8)
    got = lowered.edge.exported_program("decode").module()(x)
    torch.testing.assert_close(got, Model().eval()(x), rtol=1e-5, atol=1e-5)
