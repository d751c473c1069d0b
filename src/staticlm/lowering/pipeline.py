"""Exported programs to one `.pte` file whose caches are written in place."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from executorch.exir import EdgeProgramManager, ExecutorchBackendConfig
from executorch.exir.passes import MemoryPlanningPass
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from staticlm.contract import Contract
from staticlm.contract.check import check_contract
from staticlm.contract.metadata import constant_methods, read_contract
from staticlm.contract.program import ProgramFacts, read_program
from staticlm.lowering.lower import lower
from staticlm.lowering.merge import merge_programs
from staticlm.lowering.parallel import available_bytes, can_fork, run_forked
from staticlm.lowering.passes import PassRecord
from staticlm.lowering.provenance import shared_provenance
from staticlm.lowering.segments import share_identical_segments
from staticlm.lowering.xnnpack_preprocess import sparing_passes

_WORTH_FORKING = 2000
"""Nodes of all methods together from which processes of their own pay."""

_BYTES_PER_WEIGHT_BYTE = 6
"""Memory that lowering one method takes at its peak, in multiples of the weights (measured: 5)."""


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
    compile_configs: Mapping[str, Any] | None = None,
    jobs: int | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> LoweredFile:
    """Lower methods that share weights and write them as one file.

    Args:
        programs: Exported programs by method name.
        contract: The contract that they keep; written as constant methods and checked at the end.
        path: File to write; the caller renames it into place.
        partitioners: Partitioners of each method, in order.
        transform_passes: The caller's edge passes of each method.
        compile_configs: ExecuTorch's `EdgeCompileConfig` of a method, where it is not the default.
        jobs: 1 lowers all methods in this process; more, each in a process of its own, so many at a
            time. None chooses by their size, the processors and the memory here.
        progress: Told before every stage.

    Raises:
        LoweringError: A stage failed, or the written program does not keep the contract.
    """
    constants = constant_methods(contract)
    passes = transform_passes or {}
    configs = compile_configs or {}
    raw = path.with_name(path.name + ".raw")
    jobs = _choose_jobs(programs) if jobs is None else jobs
    forked = jobs > 1 and len(programs) > 1
    groups = _groups(list(programs), configs, apart=forked)
    parts = [path.with_name(f"{path.name}.{number}.part") for number in range(len(groups))]

    def lower_group(names: Sequence[str], target: Path) -> tuple[PassRecord, ...]:
        return _lower_group(
            {name: programs[name] for name in names},
            {name: partitioners.get(name, ()) for name in names},
            {name: passes[name] for name in names if name in passes},
            constants,
            configs.get(names[0]),
            target,
        )

    tasks = {
        ", ".join(names): partial(lower_group, names, part)
        for names, part in zip(groups, parts, strict=True)
    }
    try:
        progress("lower, a process for each method" if forked else "lower")
        done = run_forked(tasks, jobs) if forked else {name: task() for name, task in tasks.items()}
        progress("write")
        merge_programs(parts, raw)
        saved = share_identical_segments(raw, path)
    finally:
        for leftover in (raw, *parts):
            leftover.unlink(missing_ok=True)
    facts = read_program(path)
    check_contract(read_contract(facts), facts)
    records = tuple(record for name in tasks for record in done[name])
    return LoweredFile(facts, records, saved)


def _groups(names: list[str], configs: Mapping[str, Any], apart: bool) -> list[list[str]]:
    """Methods that are lowered together: each by itself, or all that have one edge configuration."""
    groups: list[list[str]] = []
    for name in names:
        group = next((g for g in groups if configs.get(g[0]) == configs.get(name)), None)
        if apart or group is None:
            groups.append([name])
        else:
            group.append(name)
    return groups


def _choose_jobs(programs: Mapping[str, ExportedProgram]) -> int:
    """A process for each method where that is faster and memory allows it."""
    nodes = sum(len(program.graph.nodes) for program in programs.values())
    processors = os.cpu_count() or 1
    free = available_bytes()
    if nodes < _WORTH_FORKING or processors < 2 or free is None or not can_fork():
        return 1
    weights = {
        plain.untyped_storage().data_ptr(): plain.untyped_storage().nbytes()
        for program in programs.values()
        for tensor in program.state_dict.values()
        for plain in _plain_tensors(tensor)
    }
    needed = _BYTES_PER_WEIGHT_BYTE * sum(weights.values())
    return max(1, min(processors, len(programs), free // max(1, needed)))


def _plain_tensors(tensor: Any) -> Iterator[torch.Tensor]:
    """The tensors that hold the bytes: a quantised one is made of several."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _plain_tensors(getattr(tensor, name))


def _lower_group(
    programs: Mapping[str, ExportedProgram],
    partitioners: Mapping[str, Sequence[Any]],
    transform_passes: Mapping[str, Sequence[Any]],
    constants: Mapping[str, Any],
    compile_config: Any,
    target: Path,
) -> tuple[PassRecord, ...]:
    with shared_provenance(), sparing_passes():
        lowered = lower(
            programs,
            partitioners=partitioners,
            transform_passes=transform_passes,
            constant_methods=constants,
            compile_config=compile_config,
        )
        for name in programs:
            _peel_copies(lowered.edge.exported_program(name))
        executorch = _to_executorch(lowered.edge)
    with target.open("wb") as file:
        executorch.write_to_file(file)
    return tuple(lowered.records)


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
        # Before planning: as outputs they would each get memory in the arena that nothing uses.
        output = graph_module.graph.output_node()
        values: Any = output.args[0]
        keep = [
            index
            for index, spec in enumerate(graph_signature.output_specs)
            if spec.kind is not OutputKind.USER_INPUT_MUTATION
        ]
        output.args = (tuple(values[index] for index in keep),)
        for key in ("val", "spec"):
            found = output.meta.get(key)
            if isinstance(found, (list, tuple)) and len(found) == len(values):
                output.meta[key] = type(found)(found[index] for index in keep)
        graph_module.recompile()
        return super().run(graph_module, graph_signature)


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
