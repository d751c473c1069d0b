"""Programs by `transformers.exporters`: a contract from what the exporter recorded, nothing guessed.

The exporter writes one program per component, each with a method `forward`, and a record of the
flattened arguments and results: `export.json` beside the files. Arguments come in the order of the
record's `in_spec`; results are the mutated inputs in order of input, then the leaves of `out_spec`.
A `StaticCache` of `StaticLayer`s is flattened to keys, values and a counter per layer, in the order
its record states. Read from transformers 5.24: `exporters/exporter_dynamo.py`, `runners/base.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from staticlm.contract.facts import (
    FLOAT_DTYPES,
    LABEL,
    VERSION,
    Cache,
    CacheKind,
    Contract,
    LogitsRows,
    Method,
    MethodRole,
    Part,
    Role,
    Slot,
    TensorSpec,
)
from staticlm.contract.metadata import KEY_LABEL
from staticlm.contract.program import MethodFacts, ProgramFacts, TensorFacts, read_program
from staticlm.errors import Code, ContractError

MANIFEST = "export.json"
RECORD = "transformers_export_record:"
"""Prefix under which a component's record is kept among the constants of merged facts."""

_STATIC_CACHE = "transformers.cache_utils:StaticCache"
_STATIC_LAYER = "transformers.cache_utils:StaticLayer"
_PARTS = {"keys": Part.KEY, "values": Part.VALUE, "cumulative_length": Part.COUNTER}
_CONTROL = {
    "input_ids": Role.TOKENS,
    "attention_mask": Role.MASK,
    "position_ids": Role.POSITIONS,
    "cache_position": Role.POSITIONS,
}


@dataclass(frozen=True)
class _State:
    """A leaf of a recorded cache: whose state it is."""

    layer: int
    part: Part


def merge_components(
    path: Path, facts: ProgramFacts
) -> tuple[ProgramFacts, dict[str, tuple[Path, str]]]:
    """The components of an `export.json` as the methods of one program.

    Args:
        path: One of the component files, beside its `export.json`.
        facts: What that file holds.

    Returns:
        Facts with one method per component and the components' records among the constants; and
        where each method comes from. Unchanged facts and no sources if there is no such record.

    Raises:
        ProgramError: A component's file is absent or malformed.
        ContractError: The manifest is malformed.
    """
    # Our own artifacts carry such a manifest too; their program states the whole contract itself.
    components = None if KEY_LABEL in facts.constants else _components(path)
    if components is None:
        return facts, {}
    methods: dict[str, MethodFacts] = {}
    constants: dict[str, object] = dict(facts.constants)
    sources: dict[str, tuple[Path, str]] = {}
    for name, (file, record) in components.items():
        part = facts if file == path else read_program(file)
        if list(part.methods) != ["forward"]:
            raise ContractError(
                Code.METHOD_MISSING,
                f"methods of {file.name}",
                found=", ".join(part.methods),
                expected="forward, as transformers.exporters writes it",
            )
        methods[name] = replace(part.methods["forward"], name=name)
        constants[RECORD + name] = json.dumps(record)
        sources[name] = (file, "forward")
    return replace(facts, methods=methods, constants=constants), sources


def _components(path: Path) -> dict[str, tuple[Path, Mapping[str, Any]]] | None:
    try:
        manifest = json.loads((path.parent / MANIFEST).read_text(encoding="utf-8"))
        if manifest["export_format"] != "executorch":
            return None
        found = {
            name: (path.parent / Path(entry["file"]).name, entry["metadata"])
            for name, entry in manifest["components"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if all(file != path for file, _ in found.values()):
        return None
    return (
        found if all(isinstance(r, dict) and r.get("in_spec") for _, r in found.values()) else None
    )


def recognizes(facts: ProgramFacts) -> bool:
    """Whether every method has a record of the exporter."""
    return bool(facts.methods) and all(RECORD + name in facts.constants for name in facts.methods)


def read_exporter_contract(facts: ProgramFacts) -> Contract:
    """The contract of merged components.

    Components that make their caches themselves (a first prefill without a past) are left out: the
    runner fills the caches through the others.

    Raises:
        ContractError: No component for one token, arguments that no rule covers, another cache than
            full `StaticLayer`s, or components that do not fit together.
    """
    methods: list[Method] = []
    caches: tuple[Cache, ...] | None = None
    for name, method in facts.methods.items():
        record = json.loads(str(facts.constants[RECORD + name]))
        inputs = list(_input_leaves(record, name))
        if not any(isinstance(one, _State) and one.part is Part.KEY for one in inputs):
            continue
        own = _caches(inputs, method, name)
        if caches is not None and own != caches:
            raise _bad(name, "its caches differ from another component's", "the same caches")
        caches = own
        methods.append(_method(name, method, inputs, list(_output_leaves(record, name)), own))
    if caches is None or sum(m.role is MethodRole.DECODE for m in methods) != 1:
        raise ContractError(
            Code.METHOD_MISSING,
            f"{facts.path.parent} has no single component that takes one token and its caches",
            found=", ".join(f"{m.name} (step {m.step})" for m in methods) or "none with caches",
            expected="one with step 1",
            remedy="Export a component with input_ids [1, 1] and an initialised StaticCache.",
        )
    capacity = caches[0].slots
    vocab = methods[0].logits.spec.shape[-1]
    return Contract(LABEL, VERSION, capacity, vocab, tuple(methods), caches)


def _bad(name: str, found: object, expected: object) -> ContractError:
    return ContractError(
        Code.LAYOUT_INVALID,
        f"component {name!r} of {MANIFEST}",
        found=str(found)[:200],
        expected=expected,
    )


def _spec(record: Mapping[str, Any], key: str, name: str) -> Mapping[str, Any]:
    try:
        version, spec = json.loads(record[key])
        if version == 1 and isinstance(spec, dict):
            return spec
    except (KeyError, TypeError, ValueError):
        pass
    raise _bad(name, f"{key} {record.get(key)!r:.60}", "a pytree specification of version 1")


def _input_leaves(record: Mapping[str, Any], name: str) -> Iterator[str | _State]:
    """The arguments in flattened order: a keyword, or a state of the cache."""
    try:
        positional, keywords = _spec(record, "in_spec", name)["children_spec"]
        if positional["children_spec"]:
            raise _bad(name, "positional arguments", "keywords only")
        names = json.loads(keywords["context"])
        for key, child in zip(names, keywords["children_spec"], strict=True):
            yield from _leaves(key, child, name)
    except (KeyError, TypeError, ValueError) as error:
        raise _bad(name, f"in_spec ({error})", "keyword arguments") from None


def _output_leaves(record: Mapping[str, Any], name: str) -> Iterator[str | _State]:
    """The results in flattened order, without those recorded as constants."""
    try:
        constant = {index for index, _ in record.get("out_constants", [])}
        spec = _spec(record, "out_spec", name)
        names = json.loads(spec["context"])
        flat: list[str | _State] = []
        for key, child in zip(names, spec["children_spec"], strict=True):
            flat += _leaves(key, child, name)
    except (KeyError, TypeError, ValueError) as error:
        raise _bad(name, f"out_spec ({error})", "a model output") from None
    yield from (leaf for index, leaf in enumerate(flat) if index not in constant)


def _leaves(key: str, spec: Mapping[str, Any], name: str) -> list[str | _State]:
    if spec["type"] is None:
        return [key]
    if spec["type"] != _STATIC_CACHE:
        raise _bad(name, f"{key} is a {spec['type']}", f"a tensor or a {_STATIC_CACHE}")
    children = spec["children_spec"]
    found: dict[int, _State] = {}
    for layer, body in enumerate(json.loads(spec["context"])["s"]["layers"]):
        if body["p"] != _STATIC_LAYER:
            raise _bad(name, f"layer {layer} is a {body['p']}", f"a {_STATIC_LAYER}")
        for attribute, value in body["s"].items():
            if isinstance(value, dict) and value.get("_t") == "tensor":
                if attribute not in _PARTS or value["i"] in found:
                    raise _bad(name, f"layer {layer} holds {attribute}", f"one of {list(_PARTS)}")
                found[value["i"]] = _State(layer, _PARTS[attribute])
    if sorted(found) != list(range(len(children))):
        raise _bad(name, f"states {sorted(found)}", f"0 to {len(children) - 1}")
    return [found[index] for index in range(len(children))]


def _caches(inputs: list[str | _State], method: MethodFacts, name: str) -> tuple[Cache, ...]:
    """The caches in the order of the arguments."""
    if len(inputs) != len(method.inputs):
        raise _bad(name, f"{len(inputs)} recorded arguments", f"{len(method.inputs)}")
    caches: list[Cache] = []
    for leaf, tensor in zip(inputs, method.inputs, strict=True):
        if not isinstance(leaf, _State):
            continue
        counter = leaf.part is Part.COUNTER
        fine = tensor is not None and (
            (tensor.dtype == "int64" and len(tensor.shape) <= 1)
            if counter
            else (tensor.dtype in FLOAT_DTYPES and len(tensor.shape) == 4 and tensor.shape[0] == 1)
        )
        if tensor is None or not fine or tensor.dynamic:
            raise _bad(
                name,
                f"layer {leaf.layer} {leaf.part.value}: {_show(tensor)}",
                "int64 []" if counter else "float [1, heads, slots, width] of fixed shape",
            )
        layout = "scalar" if counter else "batch,heads,slots,width"
        spec = TensorSpec(tensor.dtype, tensor.shape)
        caches.append(Cache(leaf.layer, leaf.part, CacheKind.FULL, None, spec, layout))
    slots = {cache.slots for cache in caches if cache.part is not Part.COUNTER}
    if len(slots) != 1 or caches[0].part is Part.COUNTER:
        raise _bad(name, f"caches of {sorted(slots)} slots", "full caches of one length")
    return tuple(caches)


def _method(
    name: str,
    facts: MethodFacts,
    inputs: list[str | _State],
    outputs: list[str | _State],
    caches: tuple[Cache, ...],
) -> Method:
    where = {(cache.layer, cache.part): index for index, cache in enumerate(caches)}
    slots: list[Slot] = []
    for index, (leaf, tensor) in enumerate(zip(inputs, facts.inputs, strict=True)):
        if isinstance(leaf, _State):
            at = where[leaf.layer, leaf.part]
            roles = {Part.KEY: Role.KEY, Part.VALUE: Role.VALUE, Part.COUNTER: Role.COUNTER}
            slots.append(Slot(index, roles[leaf.part], caches[at].spec, at))
            continue
        if leaf not in _CONTROL or tensor is None or tensor.dynamic:
            raise _bad(name, f"argument {leaf} {_show(tensor)}", f"one of {', '.join(_CONTROL)}")
        slots.append(Slot(index, _CONTROL[leaf], TensorSpec(tensor.dtype, tensor.shape)))
    step = _check_control(name, slots, caches[0].slots)
    by_input = {slot.index: slot.cache for slot in slots}
    extra = len(facts.outputs) - len(outputs)
    results: list[Slot] = []
    for index, tensor in enumerate(facts.outputs):
        if tensor is None:
            raise _bad(name, f"output {index} is not a tensor", "tensors only")
        spec = TensorSpec(tensor.dtype, tensor.shape)
        if index < extra:
            cache = by_input.get(facts.aliases.get(index, -1))
            if cache is None:
                raise _bad(name, f"output {index} is not in the record", "a mutated cache")
            results.append(Slot(index, Role.STATE, spec, cache))
            continue
        leaf = outputs[index - extra]
        if isinstance(leaf, _State):
            results.append(Slot(index, Role.STATE, spec, where[leaf.layer, leaf.part]))
        elif leaf == "logits" and len(spec.shape) == 3 and spec.shape[1] in (1, step):
            results.append(Slot(index, Role.LOGITS, spec))
        else:
            raise _bad(name, f"result {leaf} {_show(tensor)}", "logits and caches")
    if sum(slot.role is Role.LOGITS for slot in results) != 1:
        raise _bad(name, "no logits", "one output with the logits")
    rows = next(slot.spec.shape[1] for slot in results if slot.role is Role.LOGITS)
    if step > 1 and rows == 1:
        raise _bad(name, "the logits of the last row only", "all rows: a chunk may be padded")
    return Method(
        name=name,
        role=MethodRole.DECODE if step == 1 else MethodRole.PREFILL,
        step=step,
        logits_rows=LogitsRows.ALL if step > 1 else LogitsRows.LAST,
        inputs=tuple(slots),
        outputs=tuple(results),
    )


def _check_control(name: str, slots: list[Slot], capacity: int) -> int:
    """The step of a component whose control inputs have the shapes that the runner can fill."""
    roles = [slot.role for slot in slots if slot.cache is None]
    tokens = next((slot.spec for slot in slots if slot.role is Role.TOKENS), None)
    if tokens is None or tokens.dtype != "int64" or len(tokens.shape) != 2 or tokens.shape[0] != 1:
        raise _bad(name, f"input_ids {tokens}", "int64 [1, step]")
    step = tokens.shape[1]
    wanted: dict[Role, list[tuple[str, tuple[int, ...]]]] = {
        Role.POSITIONS: [("int64", (1, step)), ("int64", (step,))],
        Role.MASK: [(dtype, (1, 1, step, capacity)) for dtype in ("bool", *FLOAT_DTYPES)],
    }
    for slot in slots:
        choices = wanted.get(slot.role)
        if choices is not None and (slot.spec.dtype, slot.spec.shape) not in choices:
            raise _bad(name, f"{slot.role.value} {slot.spec}", f"{choices[-1]}")
    if len(set(roles)) != len(roles):
        raise _bad(name, f"arguments {[role.value for role in roles]}", "each at most once")
    return step


def _show(tensor: TensorFacts | None) -> str:
    return "not a tensor" if tensor is None else f"{tensor.dtype}{list(tensor.shape)}"
