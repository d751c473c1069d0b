"""A partitioner for OpenVINO that leaves out what it was told to leave out, and keeps attention whole.

ExecuTorch's own looks at the operators to skip only after it took every operator that OpenVINO supports,
so that nothing supported can be skipped. Importing this module needs openvino and nncf.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from executorch.backends.openvino.partitioner import OpenvinoOperatorsSupport, OpenvinoPartitioner
from executorch.exir.backend.partitioner import PartitionResult
from executorch.exir.backend.utils import tag_constant_data
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_ATTENTION_NAME = "aten.scaled_dot_product_attention.default"


class _Support(OpenvinoOperatorsSupport):  # type: ignore[misc]
    def is_node_supported(self, submodules: Any, node: Node) -> bool:
        name = getattr(node.target, "__name__", str(node.target))
        if name in self._op_types_to_skip or node.name in self._op_names_to_skip:
            return False
        if node.op == "call_function" and name == _ATTENTION_NAME:
            return True
        return bool(super().is_node_supported(submodules, node))


class SkippingPartitioner(OpenvinoPartitioner):  # type: ignore[misc]
    """Takes `op_types_to_skip` and `op_names_to_skip` at their word."""

    def ops_to_not_decompose(
        self, ep: ExportedProgram
    ) -> tuple[list[torch._ops.OpOverload], Callable[[Node], bool] | None]:
        """What ExecuTorch's keeps, and attention: OpenVINO has a kernel for it."""
        kept, wanted = super().ops_to_not_decompose(ep)
        return [*kept, _ATTENTION], wanted

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        """Tag what OpenVINO is to run."""
        module = exported_program.graph_module
        self.capture_nncf_patterns(module)
        support = _Support(
            self._op_types_to_skip, self._op_names_to_skip, self._enabled_ops_by_name
        )
        partitions = CapabilityBasedPartitioner(
            module, support, allows_single_node_partition=True
        ).propose_partitions()
        tags = {}
        for partition in partitions:
            tag = f"tag{partition.id}"
            tags[tag] = self.delegation_spec
            for node in partition.nodes:
                node.meta["delegation_tag"] = tag
        tag_constant_data(exported_program)
        return PartitionResult(tagged_exported_program=exported_program, partition_tags=tags)
