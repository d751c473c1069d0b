"""Does a contract hold together, and does the program keep it? Checked before loading."""

from __future__ import annotations

from collections.abc import Sequence

from staticlm.contract.facts import (
    FLOAT_DTYPES,
    LABEL,
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
from staticlm.contract.metadata import REEXPORT
from staticlm.contract.program import MethodFacts, ProgramFacts, TensorFacts
from staticlm.errors import Code, ContractError

_INPUT_ROLES = (Role.TOKENS, Role.START, Role.LENGTH, Role.KEY, Role.VALUE)
_OUTPUT_ROLES = (Role.LOGITS, Role.STATE)
_PART_ROLE = {Part.KEY: Role.KEY, Part.VALUE: Role.VALUE, Part.COUNTER: Role.COUNTER}


def check_contract(contract: Contract, facts: ProgramFacts) -> None:
    """Check a contract for consistency and against the program that states it.

    Raises:
        ContractError: With the slot, what was found, what was expected and what to do.
    """
    check_consistency(contract)
    for method in contract.methods:
        found = facts.methods.get(method.name)
        if found is None:
            raise _error(
                Code.METHOD_MISSING,
                f"method {method.name!r}",
                "nothing",
                f"one of {', '.join(sorted(facts.methods)) or 'no methods at all'}",
            )
        _check_signature(method, found)


def check_consistency(contract: Contract) -> None:
    """Check a contract on its own: methods, steps, slots and cache geometry."""
    _check_methods(contract)
    for index, cache in enumerate(contract.caches):
        _check_cache(contract, index)
        if cache.part is not Part.COUNTER and cache.spec.dtype not in FLOAT_DTYPES:
            raise _error(
                Code.CACHE_INVALID,
                f"dtype of cache {index} (layer {cache.layer}, {cache.part.value})",
                cache.spec.dtype,
                f"one of {', '.join(FLOAT_DTYPES)}: version 1 has float caches only",
            )
    _check_layers(contract)
    for method in contract.methods:
        _check_slots(contract, method)


def _error(code: Code, what: str, found: object, expected: object) -> ContractError:
    return ContractError(code, what, found=found, expected=expected, remedy=REEXPORT)


def _check_methods(contract: Contract) -> None:
    names = [m.name for m in contract.methods]
    if len(set(names)) != len(names):
        raise _error(Code.LAYOUT_INVALID, "method names", names, "distinct names")
    decodes = [m for m in contract.methods if m.role is MethodRole.DECODE]
    if not decodes or any(m.step != 1 for m in decodes):
        raise _error(
            Code.LAYOUT_INVALID,
            "decode methods",
            [(m.name, m.step) for m in decodes],
            "at least one, all with step 1",
        )
    for role in MethodRole:
        _check_alternatives(role, [m for m in contract.methods if m.role is role])
    for method in contract.methods:
        if method.max_start is not None and method.max_start >= contract.max_context_len:
            raise _error(
                Code.LAYOUT_INVALID,
                f"max_start of method {method.name!r}",
                method.max_start,
                f"less than the capacity {contract.max_context_len}",
            )
        if method.step > contract.max_context_len:
            raise _error(
                Code.METADATA_INVALID,
                f"step of method {method.name!r}",
                method.step,
                f"at most the capacity {contract.max_context_len}",
            )
        if method.role is MethodRole.VERIFY and method.logits_rows is not LogitsRows.ALL:
            raise _error(
                Code.LAYOUT_INVALID, f"logits rows of verify method {method.name!r}", "last", "all"
            )


def _check_alternatives(role: MethodRole, methods: Sequence[Method]) -> None:
    """Of each step one method for any position, and others that differ in how far they go."""
    for step in sorted({m.step for m in methods}):
        found = [m.max_start for m in methods if m.step == step]
        if found.count(None) != 1 or len(set(found)) != len(found):
            raise _error(
                Code.LAYOUT_INVALID,
                f"max_start of the {role.value} methods of step {step}",
                found,
                "exactly one without, the others distinct",
            )


def _check_cache(contract: Contract, index: int) -> None:
    cache = contract.caches[index]
    where = f"cache {index} (layer {cache.layer}, {cache.part.value})"
    if cache.part is Part.COUNTER:
        return
    dims = cache.layout.split(",")
    if len(dims) != len(cache.spec.shape) or dims.count("slots") != 1:
        raise _error(
            Code.CACHE_INVALID,
            f"layout of {where}",
            f"{cache.layout!r} for shape {list(cache.spec.shape)}",
            "one name per dimension and exactly one 'slots'",
        )
    capacity = contract.max_context_len
    if cache.kind is CacheKind.FULL:
        if cache.window is not None:
            raise _error(Code.CACHE_INVALID, f"window of {where}", cache.window, "none: it is full")
        if cache.slots != capacity:
            raise _error(Code.CACHE_INVALID, f"slots of {where}", cache.slots, capacity)
        return
    if cache.window is None:
        raise _error(Code.CACHE_INVALID, f"window of {where}", "none", "a positive integer")
    needed = min(capacity, cache.window - 1 + contract.max_seq_len)
    if cache.slots != needed:
        raise _error(
            Code.CACHE_INVALID,
            f"slots of {where}",
            cache.slots,
            f"{needed} = min(capacity {capacity}, window {cache.window} - 1 + longest step "
            f"{contract.max_seq_len})",
        )


def _check_layers(contract: Contract) -> None:
    """A layer has each part once, and its keys and values live in the same places."""
    found: dict[tuple[int, Part], Cache] = {}
    for index, cache in enumerate(contract.caches):
        where = f"cache {index} (layer {cache.layer}, {cache.part.value})"
        if (cache.layer, cache.part) in found:
            raise _error(
                Code.CACHE_INVALID, where, "a second one", "one cache for each part of a layer"
            )
        found[cache.layer, cache.part] = cache
    for (layer, part), key in found.items():
        value = found.get((layer, Part.VALUE))
        if part is not Part.KEY or value is None:
            continue
        places = [(c.kind.value, c.window, c.slots) for c in (key, value)]
        if places[0] != places[1]:
            raise _error(
                Code.CACHE_INVALID,
                f"kind, window and slots of layer {layer}",
                f"{places[0]} for keys and {places[1]} for values",
                "the same for both",
            )


def _check_slots(contract: Contract, method: Method) -> None:
    where = f"method {method.name!r}"
    for direction, slots in (("input", method.inputs), ("output", method.outputs)):
        indexes = [slot.index for slot in slots]
        if indexes != list(range(len(slots))):
            raise _error(
                Code.LAYOUT_INVALID,
                f"{direction} indexes of {where}",
                indexes[:12],
                f"0 to {len(slots) - 1} in order",
            )
    if contract.label == LABEL:
        _check_roles(method, where)
    wanted = {Role.TOKENS: TensorSpec("int64", (1, method.step)), Role.START: _INT64_1}
    if method.step > 1:
        wanted[Role.LENGTH] = _INT64_1
    for role, spec in wanted.items():
        slot = _single(method, method.inputs, role, where)
        if slot.spec != spec:
            raise _error(Code.SLOT_MISMATCH, f"{where}, input {role.value}", slot.spec, spec)
    if method.step == 1 and method.input(Role.LENGTH) is not None:
        raise _error(
            Code.LAYOUT_INVALID, f"{where}, input {Role.LENGTH.value}", "one", "none: its step is 1"
        )
    _check_cache_slots(contract, method, where)
    logits = _single(method, method.outputs, Role.LOGITS, where)
    rows = method.step if method.logits_rows is LogitsRows.ALL else 1
    shape = (1, rows, contract.vocab_size)
    if logits.spec.shape != shape or logits.spec.dtype not in FLOAT_DTYPES:
        raise _error(
            Code.SLOT_MISMATCH,
            f"{where}, output logits",
            logits.spec,
            f"one of {', '.join(FLOAT_DTYPES)} with shape {list(shape)}",
        )


def _check_roles(method: Method, where: str) -> None:
    """The roles of version 1; other contracts may use others."""
    for direction, slots, roles in (
        ("input", method.inputs, _INPUT_ROLES),
        ("output", method.outputs, _OUTPUT_ROLES),
    ):
        for slot in slots:
            if slot.role not in roles:
                raise _error(
                    Code.LAYOUT_INVALID,
                    f"role of {direction} {slot.index} of {where}",
                    slot.role.value,
                    f"one of {', '.join(role.value for role in roles)}",
                )


_INT64_1 = TensorSpec("int64", (1,))


def _single(method: Method, slots: Sequence[Slot], role: Role, where: str) -> Slot:
    found = [slot for slot in slots if slot.role is role]
    if len(found) != 1:
        raise _error(Code.LAYOUT_INVALID, f"{where}, slots with role {role.value}", len(found), 1)
    return found[0]


def _check_cache_slots(contract: Contract, method: Method, where: str) -> None:
    seen: list[int] = []
    for direction, slots in (("input", method.inputs), ("output", method.outputs)):
        for slot in slots:
            stateful = slot.role in (Role.KEY, Role.VALUE, Role.COUNTER, Role.STATE)
            label = f"{where}, {direction} {slot.index} ({slot.role.value})"
            if not stateful:
                if slot.cache is not None:
                    raise _error(Code.LAYOUT_INVALID, label, f"cache {slot.cache}", "no cache")
                continue
            if slot.cache is None or slot.cache >= len(contract.caches):
                raise _error(
                    Code.LAYOUT_INVALID,
                    label,
                    f"cache {slot.cache}",
                    f"0 to {len(contract.caches) - 1}",
                )
            cache = contract.caches[slot.cache]
            if slot.role is not Role.STATE and slot.role is not _PART_ROLE[cache.part]:
                raise _error(Code.LAYOUT_INVALID, label, slot.role.value, cache.part.value)
            if slot.spec != cache.spec:
                raise _error(Code.SLOT_MISMATCH, label, slot.spec, cache.spec)
            if direction == "input":
                seen.append(slot.cache)
    if sorted(seen) != list(range(len(contract.caches))):
        raise _error(
            Code.LAYOUT_INVALID,
            f"{where}, caches among its inputs",
            sorted(seen)[:12],
            f"each of 0 to {len(contract.caches) - 1} exactly once",
        )
    states = [slot.cache for slot in method.outputs if slot.role is Role.STATE]
    if len(set(states)) != len(states):
        raise _error(
            Code.LAYOUT_INVALID, f"{where}, caches returned as states", states, "each at most once"
        )


def _check_signature(method: Method, facts: MethodFacts) -> None:
    for direction, slots, found in (
        ("input", method.inputs, facts.inputs),
        ("output", method.outputs, facts.outputs),
    ):
        if len(slots) != len(found):
            raise _error(
                Code.SLOT_MISMATCH,
                f"{direction}s of method {method.name!r}",
                f"{len(found)} in the program",
                f"{len(slots)} as the contract lists",
            )
        for slot, tensor in zip(slots, found, strict=True):
            _check_tensor(f"method {method.name!r}, {direction} {slot.index}", slot, tensor)
    for slot in method.inputs:
        tensor = facts.inputs[slot.index]
        if slot.cache is not None and tensor is not None and tensor.planned:
            raise _error(
                Code.SLOT_MISMATCH,
                f"method {method.name!r}, input {slot.index} ({slot.role.value})",
                "memory planned by the program",
                "memory given by the runner: a planned cache is copied on every call",
            )


def _check_tensor(where: str, slot: Slot, tensor: TensorFacts | None) -> None:
    label = f"{where} ({slot.role.value})"
    if tensor is None:
        raise _error(Code.SLOT_MISMATCH, label, "not a tensor", slot.spec)
    found = TensorSpec(tensor.dtype, tensor.shape)
    if found != slot.spec:
        raise _error(Code.SLOT_MISMATCH, label, found, slot.spec)
    if tensor.dynamic:
        raise _error(Code.SLOT_MISMATCH, label, "a dynamic shape", "a fixed shape")
    if tensor.dim_order != tuple(range(len(tensor.shape))):
        raise _error(Code.SLOT_MISMATCH, label, f"dimension order {tensor.dim_order}", "contiguous")
