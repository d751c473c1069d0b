"""Exported programs as values: clones that share tensors, and digests that show a change."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

Digest = int


def clone(program: ExportedProgram) -> ExportedProgram:
    """A program with its own graph, signature and tables over the same tensors.

    Passes may rewrite the clone's graph and replace entries of its tables; the original keeps its
    own. The tensors are shared, so a pass that writes into one is seen by both.
    """
    graph = Graph()
    values: dict[Node, Node] = {}
    output = graph.graph_copy(program.graph, values)
    source = program.graph.output_node()
    if output is not None:
        graph.output(output, getattr(source, "type", None)).meta = copy.copy(source.meta)
    for old, new in values.items():
        new.name = old.name  # copying renames what shadows a builtin, such as `input`
    graph._codegen = copy.copy(program.graph._codegen)
    module = GraphModule(program.graph_module, graph)
    module.meta.update(program.graph_module.meta)
    return ExportedProgram(
        root=module,
        graph=module.graph,
        graph_signature=copy.deepcopy(program.graph_signature),
        state_dict=dict(program.state_dict),
        range_constraints=dict(program.range_constraints),
        module_call_graph=program.module_call_graph,
        example_inputs=program.example_inputs,
        constants=dict(program.constants),
        verifiers=program.verifiers,
    )


def graph_digest(module: GraphModule) -> Digest:
    """A number that changes with operators, their order, their arguments or a subgraph.

    Node names and metadata do not count: re-tracing a graph without changing it gives the same
    number.
    """
    return hash(tuple(_graph_entries(module)))


def tables_digest(program: ExportedProgram) -> Digest:
    """A number that changes when a constant is added, removed, replaced, or written into."""
    state: Mapping[str, Any] = program.state_dict
    constants: Mapping[str, Any] = program.constants
    entries = [(0, key, *_identity(value)) for key, value in state.items()]
    entries += [(1, key, *_identity(value)) for key, value in constants.items()]
    return hash(tuple(entries))


def program_digest(program: ExportedProgram) -> Digest:
    """A number that changes when anything of a program does, its tensors' contents included."""
    names = tuple(node.name for node in program.graph.nodes)
    signature = str(program.graph_signature)
    return hash((graph_digest(program.graph_module), names, signature, tables_digest(program)))


@dataclass(frozen=True)
class Witness:
    """A program and what it looked like, to find out who changed it."""

    name: str
    program: ExportedProgram
    digest: Digest

    @classmethod
    def of(cls, name: str, program: ExportedProgram) -> Witness:
        """A witness of a program as it is now."""
        return cls(name, program, program_digest(program))

    @property
    def intact(self) -> bool:
        """Whether the program is as it was."""
        return program_digest(self.program) == self.digest


def _identity(value: Any) -> tuple[int, int]:
    try:
        version = value._version
    except (
        AttributeError,
        RuntimeError,
    ):  # no tensor, or an inference tensor: not counted by torch
        version = 0
    return id(value), version


def _graph_entries(module: GraphModule) -> Iterator[tuple[Any, ...]]:
    index = {node: position for position, node in enumerate(module.graph.nodes)}

    def plain(value: Any) -> Any:
        if isinstance(value, Node):
            return ("node", index[value])
        if isinstance(value, (list, tuple)):
            return tuple(plain(item) for item in value)
        if isinstance(value, dict):
            return tuple((key, plain(item)) for key, item in value.items())
        if isinstance(value, torch.SymInt):
            return str(value)
        return repr(value)

    for node in module.graph.nodes:
        if node.op == "placeholder":
            yield ("placeholder",)
        elif node.op == "get_attr":
            value = _attribute(module, str(node.target))
            if isinstance(value, GraphModule):
                yield ("graph", *_graph_entries(value))
            else:
                yield ("get_attr", id(value))
        else:
            target = "" if node.op == "output" else str(node.target)
            yield (node.op, target, plain(node.args), plain(node.kwargs))


def _attribute(module: GraphModule, path: str) -> Any:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part, None)
    return value
