"""What XNNPACK's partitioner contributes: operators that its delegate computes as something else."""

from __future__ import annotations

from math import pi, sqrt
from typing import Any

import torch
from torch.export import ExportedProgram

from staticlm.lowering.passes import register_pass_contributor

PARTITIONER = "executorch.backends.xnnpack.partition.xnnpack_partitioner.XnnpackPartitioner"


def before_decomposition(
    partitioner: Any, method: str, program: ExportedProgram
) -> ExportedProgram:
    """Spell out GELU by tanh: the delegate has only the one by erf, which is 4.7e-4 off."""
    if not any(_is_tanh_gelu(node) for node in program.graph.nodes):
        return program
    spelled_out: ExportedProgram = program.run_decompositions({torch.ops.aten.gelu.default: _gelu})
    return spelled_out


def register() -> None:
    """Contribute for `XnnpackPartitioner` and its subclasses."""
    register_pass_contributor(PARTITIONER, pre_decomposition=before_decomposition)


def _is_tanh_gelu(node: torch.fx.Node) -> bool:
    return node.target is torch.ops.aten.gelu.default and node.kwargs.get("approximate") == "tanh"


def _gelu(x: torch.Tensor, *, approximate: str = "none") -> Any:
    if approximate != "tanh":
        return NotImplemented  # stays as it is
    inner = (x + x * x * x * 0.044715) * sqrt(2 / pi)
    return x * (torch.tanh(inner) + 1.0) * 0.5
