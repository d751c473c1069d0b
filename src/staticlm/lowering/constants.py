"""Names for constants: unique in a method and across the methods of a file.

ExecuTorch's own lifting numbers constants by how many buffers there are, so a deleted buffer makes
it use a live name again and overwrite the tensor behind it. Here every name that was ever in use is
reserved first, `.` and `_` counting as equal because placeholders cannot tell them apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from executorch.exir.pass_base import ExportedProgramPassBase, ExportedProgramPassResult
from torch._guards import detect_fake_mode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx import GraphModule, Node

_STOCK_NAME = re.compile(r"_lifted_tensor_constant\d+")
_KEPT = "staticlm_kept"


class Names:
    """Names in use by the constants of all methods of a file; a name is never handed out twice."""

    def __init__(self, reserved: Iterable[str] = ()) -> None:
        self._taken = {_plain(name) for name in reserved}
        self.owners: dict[str, torch.Tensor] = {}
        """The constant that each name belongs to, of the methods seen so far."""

    def reserve_program(self, program: ExportedProgram) -> None:
        """Reserve every key, target and placeholder of a program."""
        names = [*program.state_dict, *program.constants]
        for spec in program.graph_signature.input_specs:
            names += [name for name in (spec.target, spec.arg.name) if isinstance(name, str)]
        names += [node.name for node in program.graph.nodes if node.op == "placeholder"]
        self._taken.update(_plain(name) for name in names)

    def fresh(self, stem: str) -> str:
        """A name that was never in use: `stem_0`, `stem_1`, and so on."""
        stem = re.sub(r"\W", "_", stem)
        number = 0
        while _plain(f"{stem}_{number}") in self._taken:
            number += 1
        self._taken.add(_plain(f"{stem}_{number}"))
        return f"{stem}_{number}"


def shield(program: ExportedProgram, names: Names) -> dict[str, str]:
    """Rename, in place, the buffers and constants that stock lifting could overwrite.

    Stock lifting runs once before any pass of ours can. It writes `_lifted_tensor_constant<n>` into
    the state dict without looking, so names of that form make room until `restore`.

    Args:
        program: An ATen program of our own, see `programs.clone`.
        names: Names in use.

    Returns:
        New names to old ones, for `restore`.
    """
    used = {spec.target for spec in program.graph_signature.input_specs}
    used |= {*program.state_dict, *program.constants}
    kept = {
        name: names.fresh(_KEPT)
        for name in used
        if name is not None and _STOCK_NAME.fullmatch(name)
    }
    _rename(program, kept)
    return {new: old for old, new in kept.items()}


def restore(program: ExportedProgram, method: str, kept: dict[str, str], names: Names) -> bool:
    """Give constants that stock lifting made unique names, then shielded ones their own back.

    Returns whether anything was renamed.
    """
    names.reserve_program(program)
    stock = {
        spec.target: names.fresh(f"_lifted_tensor_{method}")
        for spec in program.graph_signature.input_specs
        if spec.kind is InputKind.BUFFER
        and spec.target is not None
        and _STOCK_NAME.fullmatch(spec.target)
    }
    _rename(program, stock)
    live = {spec.target for spec in program.graph_signature.input_specs}
    _rename(program, {new: old for new, old in kept.items() if new in live})
    return bool(stock or kept)


def separate(program: ExportedProgram, method: str, names: Names) -> bool:
    """Rename, in place, constants that share a name with a different constant of another method.

    A name is a key of the whole file when constants are stored outside the program. The method that
    comes first keeps its names; equal constants keep the one they share. Buffers that a method
    mutates are state, and keep theirs. Returns whether anything was renamed.
    """
    signature = program.graph_signature
    mutated = set(signature.buffers_to_mutate.values())
    renamed: dict[str, str] = {}
    for spec in signature.input_specs:
        name = spec.target
        tensor = None if name is None else program.state_dict.get(name)
        if name is not None and tensor is None:
            tensor = program.constants.get(name)
        if name is None or name in mutated or not isinstance(tensor, torch.Tensor):
            continue
        if not _same(names.owners.setdefault(name, tensor), tensor):
            renamed[name] = names.fresh(f"{name}_{method}")
            names.owners[renamed[name]] = tensor
    _rename(program, renamed)
    return bool(renamed)


class LiftConstants(ExportedProgramPassBase):  # type: ignore[misc]
    """Turns every tensor attribute of the graph into a persistent buffer with a name of its own.

    Does what ExecuTorch's `lift_constant_tensor_pass` does and leaves it nothing to do. A tensor
    read by several nodes becomes one buffer. Subgraphs of control flow keep their attributes, as
    upstream.
    """

    def __init__(self, method: str, names: Names) -> None:
        self._method = method
        self._names = names

    def call(self, exported_program: ExportedProgram) -> ExportedProgramPassResult:
        """Lift and `separate` in place; `modified` says whether there was anything to do."""
        lifted = lift_constants(exported_program, self._method, self._names)
        renamed = separate(exported_program, self._method, self._names)
        return ExportedProgramPassResult(exported_program, lifted or renamed)


def lift_constants(program: ExportedProgram, method: str, names: Names) -> bool:
    """Lift the tensor attributes of a program in place; see `LiftConstants`."""
    module = program.graph_module
    names.reserve_program(program)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    old = program.graph_signature.input_specs
    at = next((i for i, s in enumerate(old) if s.kind is InputKind.USER_INPUT), len(old))
    first_user = placeholders[at] if at < len(placeholders) else None
    fake_mode = detect_fake_mode([node.meta.get("val") for node in placeholders])
    lifted: dict[int, Node] = {}
    specs: list[InputSpec] = []
    for node in list(module.graph.nodes):
        if node.op != "get_attr":
            continue
        tensor = _tensor(module, str(node.target))
        if tensor is None:
            continue
        if id(tensor) not in lifted:
            name = names.fresh(f"_lifted_tensor_{method}")
            if first_user is not None:
                point = module.graph.inserting_before(first_user)
            elif placeholders:
                point = module.graph.inserting_after(placeholders[-1])
            else:
                point = module.graph.inserting_before(next(iter(module.graph.nodes)))
            with point:
                constant = module.graph.placeholder(name)
            constant.target = constant.name  # ExecuTorch looks constants up by target
            constant.meta = dict(node.meta)
            value = fake_mode.from_tensor(tensor, static_shapes=True) if fake_mode else tensor
            value.constant = tensor  # type: ignore[attr-defined]
            constant.meta["val"] = value
            specs.append(
                InputSpec(
                    kind=InputKind.BUFFER,
                    arg=TensorArgument(name=constant.name),
                    target=name,
                    persistent=True,
                )
            )
            program.state_dict[name] = tensor
            lifted[id(tensor)] = constant
            placeholders.append(constant)
        node.replace_all_uses_with(lifted[id(tensor)])
        module.graph.erase_node(node)
    if not specs:
        return False
    program.graph_signature.input_specs = [*old[:at], *specs, *old[at:]]
    outputs = {spec.arg.name for spec in program.graph_signature.output_specs}
    if outputs - {node.name for node in module.graph.nodes}:
        _refresh_outputs(program)
    module.recompile()
    return True


def _refresh_outputs(program: ExportedProgram) -> None:
    # A constant that is returned as it is: its output spec still names the erased attribute node.
    nodes: Any = program.graph.output_node().args[0]
    for spec, node in zip(program.graph_signature.output_specs, nodes, strict=True):
        if isinstance(node, Node) and isinstance(spec.arg, TensorArgument):
            spec.arg = TensorArgument(name=node.name)


def _rename(program: ExportedProgram, new_names: dict[str, str]) -> None:
    if not new_names:
        return
    for table in (program.state_dict, program.constants):
        items = [(new_names.get(key, key), value) for key, value in table.items()]
        table.clear()
        table.update(items)
    signature = program.graph_signature
    for spec in [*signature.input_specs, *signature.output_specs]:
        if spec.target in new_names:
            spec.target = new_names[spec.target]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a is b:
        return True
    plain = {torch.Tensor, torch.nn.Parameter}
    if not {type(a), type(b)} <= plain:  # a subclass may compare in ways of its own
        return False
    if (a.dtype, a.shape, a.device) != (b.dtype, b.shape, b.device):
        return False
    alike = a.data_ptr() == b.data_ptr() and a.stride() == b.stride()
    return alike or bool(torch.equal(a, b))


def _tensor(module: GraphModule, path: str) -> torch.Tensor | None:
    value: object = module
    for part in path.split("."):
        value = getattr(value, part, None)
    return value if isinstance(value, torch.Tensor) else None


def _plain(name: str) -> str:
    return name.replace(".", "_")
