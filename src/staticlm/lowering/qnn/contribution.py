"""QNN's own transforms as contributed passes, for any `QnnPartitioner`.

Upstream runs them only in its private entry point. Its pass managers are asked for the lists, so the
passes and their order are theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.export import ExportedProgram

from staticlm.lowering.passes import PassType, register_pass_contributor

PARTITIONER = "executorch.backends.qualcomm.partition.qnn_partitioner.QnnPartitioner"


def edge_passes(partitioner: Any, method: str, program: ExportedProgram) -> Sequence[PassType]:
    """The edge-stage passes of a QNN partitioner for one method, `ResolveDebugHandle` last."""
    options = dict(getattr(partitioner, "pass_options", {}))
    if options.get("passes_job") is not None:
        # Upstream writes the program into the table that it is given.
        job = options["passes_job"]
        options["passes_job"] = type(job)((p, _copied(entry)) for p, entry in job.items())
    passes: Sequence[PassType] = _manager(partitioner).get_to_edge_transform_passes(
        program,
        compiler_specs=partitioner.compiler_specs_snapshot,
        skip_node_id_set=partitioner.skip_node_id_set,
        skip_node_op_set=partitioner.skip_node_op_set,
        **options,
    )
    return list(passes)


def before_decomposition(
    partitioner: Any, method: str, program: ExportedProgram
) -> ExportedProgram:
    """The export-stage transforms of a QNN partitioner, on a program of their own."""
    result: ExportedProgram = _manager(partitioner).transform_for_export_pipeline(program)
    return result


def _manager(partitioner: Any) -> Any:
    from executorch.backends.qualcomm._passes.qnn_pass_manager import get_qnn_pass_manager_cls

    return get_qnn_pass_manager_cls(partitioner.backend)()


def _copied(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: dict(value) if isinstance(value, dict) else value for key, value in entry.items()}


def register() -> None:
    """Contribute for `QnnPartitioner` and its subclasses."""
    register_pass_contributor(PARTITIONER, edge_passes, pre_decomposition=before_decomposition)
