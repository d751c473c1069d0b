"""Compiles partitions for QNN with their outputs in signature order.

Does what ExecuTorch's `QnnBackend` does, with two steps more between its graph rewrites and its
operator
builders: `order_outputs` and `label_outputs`. The result runs on the stock delegate.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, final

from executorch.backends.qualcomm._passes.qnn_pass_manager import get_qnn_pass_manager_cls
from executorch.backends.qualcomm.builders.node_visitor_manager import get_node_visitors
from executorch.backends.qualcomm.builders.qnn_constants import OpContextLoader
from executorch.backends.qualcomm.qnn_preprocess import QnnBackend, _check_io_binding
from executorch.backends.qualcomm.serialization.qc_schema import QnnExecuTorchOptions
from executorch.backends.qualcomm.serialization.qc_schema_serialize import flatbuffer_to_option
from executorch.backends.qualcomm.utils.constants import QCOM_AXIS_ORDER
from executorch.backends.qualcomm.utils.qnn_manager_lifecycle import get_current_qnn_manager
from executorch.exir.backend.backend_details import BackendDetails, CompileSpec, PreprocessResult
from executorch.exir.dialects._ops import ops as edge_ops
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from staticlm.errors import Code, LoweringError
from staticlm.lowering.qnn.outputs import defined_order, label_outputs, order_outputs


@final
class StaticLMQnnBackend(BackendDetails):  # type: ignore[misc]
    """Used through `OrderedQnnPartitioner`; `lower` gives the delegates the runtime's backend id."""

    @staticmethod
    def preprocess(
        edge_program: ExportedProgram, compile_specs: list[CompileSpec]
    ) -> PreprocessResult:
        """Compile one partition."""
        results = StaticLMQnnBackend.preprocess_multimethod(
            {"forward": [edge_program]}, {"forward": [compile_specs]}
        )
        return results["forward"][0]

    @staticmethod
    def preprocess_multimethod(
        edge_programs: dict[str, list[ExportedProgram]],
        compile_specs: dict[str, list[list[CompileSpec]]],
    ) -> dict[str, list[PreprocessResult]]:
        """Compile the n-th partitions of all methods into one context binary, as upstream does.

        Raises:
            LoweringError: `LOWERING_FAILED` when the methods have different numbers of partitions.
        """
        options = flatbuffer_to_option(next(iter(compile_specs.values()))[0][0].value)
        if options.dump_intermediate_outputs or _wraps_context_binary(edge_programs):
            # Nothing is rewritten there, or tensors are wanted under their own names.
            results: dict[str, list[PreprocessResult]]
            results = QnnBackend.preprocess_multimethod(edge_programs, compile_specs)
            return results
        counts = {method: len(programs) for method, programs in edge_programs.items()}
        if len(set(counts.values())) != 1:
            raise LoweringError(
                Code.LOWERING_FAILED,
                "QNN compiles the partitions of all methods together",
                found=", ".join(
                    f"{method}: {count} partitions" for method, count in counts.items()
                ),
                expected="as many partitions in every method",
                remedy="Lower one of the methods to another backend, or keep operators on the CPU.",
            )
        manager = get_current_qnn_manager(
            options.backend_options.backend_type, next(iter(compile_specs.values()))[0]
        )
        done: dict[str, list[PreprocessResult]] = {method: [] for method in edge_programs}
        for index in range(next(iter(counts.values()))):
            manager.InitContext(list(edge_programs))
            graphs = [
                [op.GetOpWrapper() for op in operators(programs[index], options)]
                for programs in edge_programs.values()
            ]
            binary = bytes(manager.Compile(list(edge_programs), graphs))
            if options.saver or not binary:
                raise LoweringError(
                    Code.LOWERING_FAILED,
                    "QNN made no context binary",
                    found=f"the saver's record in {options.saver_output_dir}"
                    if options.saver
                    else "nothing",
                    remedy="Lower without saver." if options.saver else None,
                )
            manager.DestroyContext()
            for results_of_method in done.values():
                results_of_method.append(PreprocessResult(binary, {}))
        return done


def operators(program: ExportedProgram, options: QnnExecuTorchOptions) -> list[Any]:
    """QNN operators of one partition, outputs in signature order and labelled. Needs no SDK.

    Changes the program in place.
    """
    prepare(program, options)
    wrappers: defaultdict[str, dict[int, Any]] = defaultdict(dict)
    built = build(program, options, wrappers)
    _check_io_binding(program, wrappers)  # upstream's own: as many tensors as the signature has
    return built


def prepare(program: ExportedProgram, options: QnnExecuTorchOptions) -> None:
    """Upstream's rewrites for compilation, then our order and labels, in place."""
    for node in program.graph.nodes:
        node.meta.pop(QCOM_AXIS_ORDER, None)  # stale after partitioning; the rewrites recompute it
    manager = get_qnn_pass_manager_cls(options.backend_options.backend_type)()
    manager.transform_for_preprocess_pipeline(program, use_mha2sha=options.use_mha2sha)
    order_outputs(program, _identity)
    order = defined_order(program)
    if order != sorted(order):
        raise LoweringError(
            Code.LOWERING_FAILED,
            "the outputs of a QNN delegate cannot be put in order",
            found=order,
            expected=sorted(order),
        )
    label_outputs(program)


def build(
    program: ExportedProgram,
    options: QnnExecuTorchOptions,
    wrappers: defaultdict[str, dict[int, Any]],
) -> list[Any]:
    """QNN operators of a prepared program, in graph order; tensors are added to `wrappers`."""
    visitors = get_node_visitors(
        program, op_package_infos=options.op_package_options.op_package_infos
    )
    built: list[Any] = []
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        visitor = visitors.get(node.target.__name__)
        if visitor is None:
            raise LoweringError(
                Code.LOWERING_FAILED,
                f"QNN cannot build operator {node.target.__name__}",
                found=f"node {node.name}",
                remedy="Keep it on the CPU with skip_node_op_set.",
            )
        made = visitor.define_node(node, wrappers)
        if made is not None:
            built += made if isinstance(made, list) else [made]
    return built


def _identity(graph: Graph, node: Node) -> Node:
    value = node.meta["val"]
    copy = graph.call_function(edge_ops.edge.aten.view_copy.default, (node, list(value.shape)))
    copy.meta = dict(node.meta)
    return copy


def _wraps_context_binary(edge_programs: dict[str, list[ExportedProgram]]) -> bool:
    return any(
        getattr(node.target, "namespace", None) == OpContextLoader.namespace
        for programs in edge_programs.values()
        for program in programs
        for node in program.graph.nodes
        if node.op == "call_function"
    )
