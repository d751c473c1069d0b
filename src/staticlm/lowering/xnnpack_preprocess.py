"""XNNPACK's own lowering of a delegate, without the passes that have nothing to do.

XNNPACK runs 17 passes over every delegate, and each re-interprets the whole graph through fake tensors
even where it finds nothing to change: most of the time of lowering a large model. A subclass of
`BackendDetails` runs those passes that can find something, and hands the rest of the work to the stock
backend. ExecuTorch finds backends by class name, the latest definition first, so the subclass carries
XNNPACK's name while we lower and another one otherwise. Tests show that the delegates are the stock
ones byte for byte.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from executorch.backends.xnnpack._passes import XNNPACKPassManager
from executorch.backends.xnnpack.utils.configs import get_xnnpack_edge_compile_config
from executorch.backends.xnnpack.xnnpack_preprocess import XnnpackBackend
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.verification.verifier import EXIREdgeDialectVerifier
from torch.export import ExportedProgram

_LINEAR_ONLY = "dqlinear_partitioner"
"""The compile spec with which the stock backend runs `ConvertToLinearPass` and no other pass."""

_RANKS_OF_IMAGES = (4, 5)


def _has(*names: str) -> Callable[[list[torch.fx.Node]], bool]:
    """Is there an operator whose name contains one of these?"""
    return lambda nodes: any(name in str(node.target) for node in nodes for name in names)


def _long_concatenation(nodes: list[torch.fx.Node]) -> bool:
    return any("aten.cat" in str(n.target) and len(n.args[0]) > 5 for n in nodes)  # type: ignore[arg-type]


def _custom(nodes: list[torch.fx.Node]) -> bool:
    return any("custom" in node.meta for node in nodes)


def _images(nodes: list[torch.fx.Node]) -> bool:
    """Operators on images, or tensors that are laid out like them."""
    if _has("conv", "upsample", "pool", "aten.mean", "aten.amax", "aten.max", "prelu")(nodes):
        return True
    values = (node.meta.get("val") for node in nodes)
    return any(
        isinstance(value, torch.Tensor)
        and value.dim() in _RANKS_OF_IMAGES
        and not value.is_contiguous()
        for value in values
    )


_NEEDED: dict[str, Callable[[list[torch.fx.Node]], bool]] = {
    "XNNPACKRemoveCloneOpsTransform": _has("clone"),
    "DimOrderOpsRevertPass": _has("dim_order"),
    "ConvertToUpsampleBilinear2d": _has("index", "upsample"),
    "ConvertToSDPAPass": _has("expand", "scaled_dot_product", "where"),
    "PropagateCustomMetaPass": _custom,
    "FuseBatchNormPass": _has("batch_norm"),
    "DecomposeBatchNorm": _has("batch_norm"),
    "FuseActivationPass": _has("relu", "hardtanh"),
    "DecomposeConcatenate": _long_concatenation,
    "RemoveGetItemPass": _has("getitem"),
    "InsertPadQDQPass": _has("pad"),
    "Conv1dUnsqueezePass": _has("conv"),
    "PReLUReshapePass": _has("prelu"),
    "ChannelsLastTaggedReshapePass": _images,
    "RemoveRedundantCopyPass": _has("_to_copy", "_to_dim_order_copy"),
}
"""By name of a pass: can it find anything in these nodes? Passes that are not named here run."""


class _Sparing(BackendDetails):  # type: ignore[misc]
    @classmethod
    def copy_exported_program_for_preprocess(
        cls, edge_program: ExportedProgram, compile_specs: list[CompileSpec]
    ) -> ExportedProgram:
        """A copy whose graph may be changed; the weights, which nothing writes, are shared."""
        tensors = [*edge_program.state_dict.values(), *edge_program.constants.values()]
        memo = {id(one): one for one in tensors if isinstance(one, torch.Tensor)}
        return copy.deepcopy(edge_program, memo)

    @staticmethod
    def preprocess(
        edge_program: ExportedProgram, compile_specs: list[CompileSpec]
    ) -> PreprocessResult:
        program = _relaxed(edge_program)
        # The order is XNNPACK's own: its manager makes the list.
        for one in XNNPACKPassManager(program).passes:
            nodes = [n for n in program.graph.nodes if n.op == "call_function"]
            needed = _NEEDED.get(one.__name__)
            if needed is None or needed(nodes):
                program = XNNPACKPassManager(program, [one]).transform()
        specs = [*compile_specs, CompileSpec(_LINEAR_ONLY, b"")]
        return XnnpackBackend.preprocess(program, specs)


def _relaxed(program: ExportedProgram) -> ExportedProgram:
    """The program under a verifier that takes XNNPACK's own operators."""
    config = get_xnnpack_edge_compile_config()
    return ExportedProgram(
        root=program.graph_module,
        graph=program.graph,
        graph_signature=program.graph_signature,
        state_dict=program.state_dict,
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        example_inputs=program.example_inputs,
        constants=program.constants,
        verifiers=[EXIREdgeDialectVerifier(edge_compile_config=config, class_only=True)],
    )


@contextmanager
def sparing_passes() -> Iterator[None]:
    """Lower XNNPACK delegates this way while it lasts."""
    before = _Sparing.__name__
    _Sparing.__name__ = XnnpackBackend.__name__
    try:
        yield
    finally:
        _Sparing.__name__ = before
