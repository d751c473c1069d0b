"""A QNN partitioner for machines without the SDK."""

from __future__ import annotations

from typing import Any

from executorch.exir.backend.partitioner import PartitionResult
from torch.export import ExportedProgram

from staticlm.lowering.qnn.partitioner import OrderedQnnPartitioner


class Undelegated(OrderedQnnPartitioner):
    """Contributes everything and delegates nothing, which needs the SDK.

    Operators are kept whole until then, as upstream wants, and not asked for afterwards.
    """

    done = False

    def partition(self, edge_program: ExportedProgram) -> PartitionResult:
        self.done = True
        return PartitionResult(edge_program, {})

    def ops_to_not_decompose(self, ep: ExportedProgram) -> Any:
        return ([], None) if self.done else super().ops_to_not_decompose(ep)
