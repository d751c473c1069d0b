"""The recipe that keeps the cache update on the CPU, and what is then partitioned.

Upstream's own partitioner and operator builders run; only the SDK's verdict on each operator is
replaced, by "yes".
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("executorch.backends.qualcomm.serialization.qc_schema")

from executorch.backends.qualcomm.partition import qnn_partitioner
from tests.support.qnn import Undelegated
from torch.export import ExportedProgram

from staticlm.lowering.backends import get_backend
from staticlm.lowering.lower import lower
from staticlm.lowering.qnn import from_options

HTP = {"soc_model": "SM8750", "use_fp16": True}


class WillingManager:
    """In the SDK's place: takes every operator."""

    def IsNodeSupportedByBackend(self, wrappers: Any) -> bool:
        return True


class Step(torch.nn.Module):
    """One attention step over caches that are inputs; both writes come last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = torch.nn.Linear(8, 24)

    def forward(
        self, x: torch.Tensor, key: torch.Tensor, value: torch.Tensor, position: torch.Tensor
    ) -> torch.Tensor:
        q, k, v = self.project(x).view(3, 2, 1, 4).unbind(0)
        scores = torch.matmul(q, key.transpose(1, 2)) * 0.5
        y = torch.matmul(torch.softmax(scores, -1), value)
        torch.ops.aten.index_put_(key, [None, position], k)
        torch.ops.aten.index_put_(value, [None, position], v)
        return y


@pytest.fixture(scope="module")
def edge() -> ExportedProgram:
    inputs = (torch.ones(1, 8), torch.zeros(2, 16, 4), torch.zeros(2, 16, 4), torch.tensor([3]))
    program = torch.export.export(Step().eval(), inputs)
    lowered = lower(
        {"m": program},
        partitioners=[Undelegated(from_options(HTP).compile_specs)],
        compile_config=get_backend("qnn").compile_config(),
    )
    return lowered.edge.exported_program("m")


@pytest.fixture(autouse=True)
def willing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        qnn_partitioner, "get_current_qnn_manager", lambda kind, specs: WillingManager()
    )
    (tmp_path / "libQnnHtp.so").touch()
    monkeypatch.setenv("QNN_SDK_ROOT", "")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))


def partitioned(edge: ExportedProgram, **skip: Any) -> tuple[set[str], set[str]]:
    """Names of the operators inside and outside of partitions, and how many partitions."""
    for node in edge.graph.nodes:
        node.meta.pop("delegation_tag", None)
    from_options({**HTP, **skip}).partitioner.partition(edge)
    inside: set[str] = set()
    outside: set[str] = set()
    for node in edge.graph.nodes:
        if node.op == "call_function":
            (inside if "delegation_tag" in node.meta else outside).add(node.target.__name__)
    return inside, outside


def test_without_the_recipe_the_update_is_delegated(edge: ExportedProgram) -> None:
    inside, outside = partitioned(edge)
    assert "aten.index_put.default" in inside
    assert outside <= {"aten.copy.default"}


@pytest.mark.parametrize(
    "skip",
    [
        {"skip_node_op_set": ["aten.index_put.default", "aten.copy.default"]},
        {"skip_node_op_set": [torch.ops.aten.index_put.default, torch.ops.aten.copy.default]},
    ],
)
def test_the_update_stays_on_the_cpu_by_operator(
    edge: ExportedProgram, skip: dict[str, Any]
) -> None:
    inside, outside = partitioned(edge, **skip)
    assert "aten.index_put.default" in outside
    assert outside <= {"aten.index_put.default", "aten.copy.default"}
    assert {"aten._softmax.default", "aten.linear.default"} <= inside


def test_the_update_stays_on_the_cpu_by_node(edge: ExportedProgram) -> None:
    writes = [
        n.name
        for n in edge.graph.nodes
        if getattr(n.target, "__name__", "").startswith("aten.index_put")
    ]
    assert len(writes) == 2
    inside, outside = partitioned(edge, skip_node_id_set=writes[:1])
    assert "aten.index_put.default" in inside & outside


def test_upstream_ignores_overloads_silently(edge: ExportedProgram) -> None:
    """Why the router turns operators into names."""
    for node in edge.graph.nodes:
        node.meta.pop("delegation_tag", None)
    stock = qnn_partitioner.QnnPartitioner(
        from_options(HTP).compile_specs, skip_node_op_set={torch.ops.aten.index_put.default}
    )
    stock.partition(edge)
    tagged = {
        n.target.__name__
        for n in edge.graph.nodes
        if n.op == "call_function" and "delegation_tag" in n.meta
    }
    assert "aten.index_put.default" in tagged
