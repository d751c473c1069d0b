"""Exported programs to one `.pte` file whose caches are written in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from executorch.exir import EdgeProgramManager, ExecutorchBackendConfig
from executorch.exir.passes import MemoryPlanningPass
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from staticlm.contract import Contract
from staticlm.contract.check import check_contract
from staticlm.contract.metadata import constant_methods, read_contract
from staticlm.contract.program import ProgramFacts, read_program
from staticlm.lowering.lower import lower
from staticlm.lowering.passes import PassRecord
from staticlm.lowering.segments import share_identical_segments


@dataclass(frozen=True)
class LoweredFile:
    """A written program: its facts, what passes ran, and the bytes saved by sharing segments."""

    facts: ProgramFacts
    records: tuple[PassRecord, ...]
    shared_bytes: int


def lower_to_file(
    programs: Mapping[str, ExportedProgram],
    contract: Contract,
    path: Path,
    *,
    partitioners: Mapping[str, Sequence[Any]],
    transform_passes: Mapping[str, Sequence[Any]] | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> LoweredFile:
    """Lower methods that share weights and write them as one file.

    Args:
        programs: Exported programs by method name.
        contract: The contract that they keep; written as constant methods and checked at the end.
        path: File to write; the caller renames it into place.
        partitioners: Partitioners of each method, in order.
        transform_passes: The caller's edge passes of each method.
        progress: Told before every stage.

    Raises:
        LoweringError: A stage failed, or the written program does not keep the contract.
    """
    progress("lower")
    lowered = lower(
        programs,
        partitioners=partitioners,
        transform_passes=transform_passes or (),
        constant_methods=constant_methods(contract),
    )
    edge = lowered.edge
    for name in programs:
        _peel_copies(edge.exported_program(name))
    progress("plan memory")
    executorch = _to_executorch(edge)
    progress("write")
    raw = path.with_name(path.name + ".raw")
    try:
        with raw.open("wb") as file:
            executorch.write_to_file(file)
        saved = share_identical_segments(raw, path)
    finally:
        raw.unlink(missing_ok=True)
    facts = read_program(path)
    check_contract(read_contract(facts), facts)
    return LoweredFile(facts, tuple(lowered.records), saved)


def _to_executorch(edge: EdgeProgramManager) -> Any:
    config = ExecutorchBackendConfig(
        run_reinplace_pass=True,
        memory_planning_pass=_CallerOwnedInputs(),
        do_quant_fusion_and_const_prop=True,
    )
    return edge.to_executorch(config)


class _CallerOwnedInputs(MemoryPlanningPass):  # type: ignore[misc]
    """Plan outputs, leave inputs to the caller, and return no mutated input.

    A mutated input that stays an output makes the stock bindings rebind the caller's tensor to scratch
    memory, so that the write is lost without an error.
    """

    def __init__(self) -> None:
        super().__init__(alloc_graph_input=False, alloc_graph_output=True)

    def run(self, graph_module: torch.fx.GraphModule, graph_signature: Any = None) -> Any:
        result = super().run(graph_module, graph_signature)
        output = graph_module.graph.output_node()
        values: Any = output.args[0]
        keep = [
            value
            for value, spec in zip(values, graph_signature.output_specs, strict=True)
            if spec.kind is not OutputKind.USER_INPUT_MUTATION
        ]
        output.args = (tuple(keep),)
        graph_module.recompile()
        return result


def _peel_copies(program: ExportedProgram) -> None:
    """Replace `copy(cache, x)` by `x` where x already is the written cache.

    Functionalisation leaves that copy around every in-place write; with it the reinplace pass finds
    nothing to do and every call copies every cache.
    """
    graph = program.graph_module.graph
    specs = program.graph_signature.output_specs
    output = graph.output_node()
    values = list(output.args[0])
    for index, spec in enumerate(specs):
        if spec.kind is not OutputKind.USER_INPUT_MUTATION:
            continue
        node = values[index]
        while _is_copy(node) and str(node.args[0]) == spec.target:
            inner = node.args[1]
            if not isinstance(inner, torch.fx.Node) or not _writes(inner, spec.target):
                break
            node.replace_all_uses_with(inner)
            graph.erase_node(node)
            node = inner
        spec.arg.name = node.name
        values[index] = node
    graph.lint()
    program.graph_module.recompile()


def _op_name(node: torch.fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _is_copy(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and _op_name(node).startswith("aten.copy.")


def _writes(node: torch.fx.Node, target: str) -> bool:
    """Is this node a write into `target` (possibly under further copies)?"""
    if node.op != "call_function" or not node.args:
        return False
    return str(node.args[0]) == target and (_is_copy(node) or "index_put" in _op_name(node))

