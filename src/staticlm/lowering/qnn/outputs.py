"""The order of a QNN delegate's outputs.

ExecuTorch binds a delegate's outputs by position: the order of the signature. QNN lists a graph's
outputs in the order in which they are defined, and QNN's own rewrites move definitions, so outputs
of one shape can be swapped without an error. Ahead of time the graph is put into signature order
and every output's tensor name says its position; `restored_order` reads that from a list of names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, TensorArgument
from torch.fx import Graph, Node

_LABEL = re.compile(r"output_(\d{1,9})_")
_BINDABLE = "output_"
_MUTABLE = "mutbuf_"


def defined_order(program: ExportedProgram) -> list[int]:
    """Positions in the signature of the user outputs, in the order in which the graph defines them.

    This is the order in which QNN lists them; it should be 0, 1, 2, and so on.
    """
    index = {node: i for i, node in enumerate(program.graph.nodes)}
    defined = [(index[node], position) for position, node in _user_outputs(program)]
    return [position for _, position in sorted(defined)]


def order_outputs(program: ExportedProgram, identity: Callable[[Graph, Node], Node]) -> bool:
    """Move nodes, in place, so that user outputs are defined in the order of the signature.

    An output that a later one's definition needs comes first anyway; where the signature wants it
    later, `identity` (graph, node) makes a copy of it that can come later. Returns whether anything
    changed.
    """
    if defined_order(program) == sorted(defined_order(program)):
        return False
    graph = program.graph
    output = graph.output_node()
    values: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    placed: set[Node] = {node for node in graph.nodes if node.op in ("placeholder", "get_attr")}
    plan: list[Node] = []
    copies: list[int] = []
    for slot in _output_slots(program):
        node = values[slot]
        if not isinstance(node, Node):
            continue
        if node in placed:
            copies.append(slot)  # defined too early: by an earlier output, or it is an input
        _place(node, placed, plan)
    for node in graph.nodes:  # what no user output needs: written states
        if node.op == "call_function":
            _place(node, placed, plan)
    anchor = output
    for node in reversed(plan):
        anchor.prepend(node)
        anchor = node
    if copies:
        _copy_outputs(program, values, copies, identity)
    graph.lint()
    program.graph_module.recompile()
    return True


def label_outputs(program: ExportedProgram) -> list[str]:
    """Rename, in place, the nodes of user outputs so that QNN's tensor names carry their positions.

    QNN names an output `output_<node name>@<n>`; a node named `3_add` makes that `output_3_add@0`.
    Such names are no Python identifiers: nothing may recompile the graph afterwards. Returns the
    new names.
    """
    seen: dict[Node, str] = {}
    for position, node in _user_outputs(program):
        source = _source(node)
        if source.op == "placeholder" or source in seen:
            continue
        seen[source] = f"{position}_{source.name}"
    for node, name in seen.items():
        node.name = name
    values: Any = program.graph.output_node().args[0]
    for spec, node in zip(program.graph_signature.output_specs, values, strict=True):
        if isinstance(spec.arg, TensorArgument) and isinstance(node, Node):
            spec.arg = TensorArgument(name=node.name)
    return list(seen.values())


def restored_order(names: Sequence[str], *, from_context_binary: bool = False) -> list[int]:
    """Indices into a list of output tensor names that put it into signature order.

    Only names that bind an output count: those that begin with `output_` and belong to no mutable
    buffer; every other entry keeps its place. Unless the labels of all of them are exactly 0, 1, 2,
    ... (an older program has none; a damaged list has duplicates, gaps, or numbers of more than
    nine digits) the list keeps its order, and so does the list of a context binary made elsewhere.
    Never raises.
    """
    keep = list(range(len(names)))
    if from_context_binary:
        return keep
    slots = [i for i, n in enumerate(names) if n.startswith(_BINDABLE) and _MUTABLE not in n]
    labels = [_LABEL.match(names[i]) for i in slots]
    numbers = [int(label.group(1)) for label in labels if label is not None]
    if sorted(numbers) != list(range(len(slots))):
        return keep
    for slot, number in zip(slots, numbers, strict=True):
        keep[slots[number]] = slot
    return keep


def _output_slots(program: ExportedProgram) -> list[int]:
    specs = program.graph_signature.output_specs
    return [i for i, spec in enumerate(specs) if spec.kind is OutputKind.USER_OUTPUT]


def _user_outputs(program: ExportedProgram) -> list[tuple[int, Node]]:
    values: Any = program.graph.output_node().args[0]
    slots = enumerate(_output_slots(program))
    found = ((position, values[slot]) for position, slot in slots)
    return [(position, node) for position, node in found if isinstance(node, Node)]


def _place(node: Node, placed: set[Node], plan: list[Node]) -> None:
    """Append a node behind its ancestors, without recursion: graphs are deep."""
    stack = [node]
    while stack:
        top = stack[-1]
        waiting = [n for n in top.all_input_nodes if n not in placed]
        if top in placed:
            stack.pop()
        elif waiting:
            stack.extend(reversed(waiting))
        else:
            placed.add(top)
            plan.append(top)
            stack.pop()


def _copy_outputs(
    program: ExportedProgram,
    values: list[Node],
    copies: list[int],
    identity: Callable[[Graph, Node], Node],
) -> None:
    # One copy pulls all later outputs behind it, so every output from there on is copied.
    graph = program.graph
    output = graph.output_node()
    specs = program.graph_signature.output_specs
    for slot in _output_slots(program):
        if slot < copies[0] or not isinstance(values[slot], Node):
            continue
        with graph.inserting_before(output):
            values[slot] = identity(graph, values[slot])
        specs[slot].arg = TensorArgument(name=values[slot].name)
    output.args = (tuple(values),)


def _source(node: Node) -> Node:
    if getattr(node.target, "__name__", "") == "getitem":
        return node.all_input_nodes[0]
    return node
