"""A QNN partitioner whose delegates have their outputs in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from executorch.backends.qualcomm.partition.qnn_partitioner import QnnPartitioner
from executorch.exir.backend.backend_details import CompileSpec
from executorch.exir.backend.partitioner import DelegationSpec, PartitionResult
from torch.export import ExportedProgram

from staticlm.lowering.qnn.backend import StaticLMQnnBackend
from staticlm.lowering.qnn.sdk import need_sdk


class OrderedQnnPartitioner(QnnPartitioner):  # type: ignore[misc]
    """`QnnPartitioner` that checks the SDK first and compiles with `StaticLMQnnBackend`.

    Args:
        compiler_specs: As upstream.
        skip_node_id_set: Names of edge nodes that stay on the CPU.
        skip_node_op_set: Names of edge operators that stay on the CPU.
        skip_mutable_buffer: As upstream.
        pass_options: `dep_table`, `passes_job` and `convert_linear_to_conv2d` of the pass manager.
        variant: `htp`, `gpu` or `lpai`.
    """

    runtime_backend_ids: Mapping[str, str] = {StaticLMQnnBackend.__name__: "QnnBackend"}
    """The id that the runtime knows, by the id that a delegate is compiled under."""

    def __init__(
        self,
        compiler_specs: list[CompileSpec],
        skip_node_id_set: set[str] | None = None,
        skip_node_op_set: set[str] | None = None,
        skip_mutable_buffer: bool = False,
        *,
        pass_options: Mapping[str, Any] | None = None,
        variant: str = "htp",
    ) -> None:
        super().__init__(compiler_specs, skip_node_id_set, skip_node_op_set, skip_mutable_buffer)
        self.pass_options = dict(pass_options or {})
        self.variant = variant
        self.delegation_spec = DelegationSpec(
            StaticLMQnnBackend.__name__, self.compiler_specs_snapshot
        )

    def partition(self, edge_program: ExportedProgram) -> PartitionResult:
        """Upstream's partitions.

        Raises:
            LoweringError: `BACKEND_UNAVAILABLE` without a usable SDK.
        """
        need_sdk(self.variant)
        return super().partition(edge_program)
