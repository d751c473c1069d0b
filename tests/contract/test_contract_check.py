"""Checks of a contract that no malformed program of the kit shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.contracts import contract

from staticlm.contract import Cache, Contract, LogitsRows, Method, MethodRole, Part, Role, Slot
from staticlm.contract.check import check_consistency, check_contract
from staticlm.contract.program import MethodFacts, ProgramFacts, TensorFacts
from staticlm.errors import Code, ContractError


def _decode(base: Contract, change: Callable[[Method], Method]) -> Contract:
    methods = tuple(change(m) if m.role is MethodRole.DECODE else m for m in base.methods)
    return replace(base, methods=methods)


def _state(cache: int, index: int, base: Contract) -> Slot:
    return Slot(index, Role.STATE, base.caches[cache].spec, cache)


def _facts(base: Contract, **changes: object) -> ProgramFacts:
    """A program that keeps a contract; `changes` go to the key cache of every method."""

    def tensor(slot: Slot, caller_owned: bool) -> TensorFacts:
        order = tuple(range(len(slot.spec.shape)))
        found = TensorFacts(slot.spec.dtype, slot.spec.shape, order, planned=not caller_owned)
        return replace(found, **changes) if slot.role is Role.KEY else found  # type: ignore[arg-type]

    methods = {
        m.name: MethodFacts(
            name=m.name,
            inputs=tuple(tensor(s, True) for s in m.inputs),
            outputs=tuple(tensor(s, False) for s in m.outputs),
            aliases={},
            delegates=(),
            delegate_calls=0,
            operators={},
            arenas=(),
            instructions=1,
        )
        for m in base.methods
    }
    return ProgramFacts(Path("x.pte"), 1, methods, {}, 0, {}, 0)


def test_a_consistent_contract_passes() -> None:
    base = contract(16, (4,), window=3)
    check_contract(base, _facts(base))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dynamic": True}, "a dynamic shape"),
        ({"dim_order": (1, 0, 2)}, "dimension order (1, 0, 2)"),
        ({"planned": True}, "memory planned by the program"),
        ({"dtype": "float16"}, "float16[1, 16, 2]"),
    ],
)
def test_a_program_that_differs_is_refused(changes: dict[str, object], words: str) -> None:
    base = contract(16, (4,))
    with pytest.raises(ContractError) as caught:
        check_contract(base, _facts(base, **changes))
    assert caught.value.code is Code.SLOT_MISMATCH
    assert words in str(caught.value.found)


def _refused(base: Contract) -> ContractError:
    with pytest.raises(ContractError) as caught:
        check_consistency(base)
    return caught.value


def test_a_layer_has_each_part_once() -> None:
    base = contract(16, (4,))
    caches = (base.caches[0], replace(base.caches[1], part=Part.KEY))
    error = _refused(replace(base, caches=caches))
    assert error.code is Code.CACHE_INVALID
    assert error.what == "cache 1 (layer 0, key)"


def test_keys_and_values_of_a_layer_live_in_the_same_places() -> None:
    base, full = contract(16, (4,), window=3), contract(16, (4,))
    error = _refused(replace(base, caches=(base.caches[0], full.caches[1])))
    assert error.code is Code.CACHE_INVALID
    assert error.found == "('sliding', 3, 6) for keys and ('full', None, 16) for values"


def test_widths_of_keys_and_values_may_differ() -> None:
    base = contract(16, (4,))
    wide: Cache = replace(base.caches[1], spec=replace(base.caches[1].spec, shape=(1, 16, 7)))
    methods = tuple(
        replace(
            m, inputs=tuple(replace(s, spec=wide.spec) if s.cache == 1 else s for s in m.inputs)
        )
        for m in base.methods
    )
    check_consistency(replace(base, caches=(base.caches[0], wide), methods=methods))


def test_decode_has_no_valid_length() -> None:
    base = contract(16, (4,))

    def add(method: Method) -> Method:
        slot = Slot(len(method.inputs), Role.LENGTH, method.inputs[1].spec)
        return replace(method, inputs=(*method.inputs, slot))

    error = _refused(_decode(base, add))
    assert error.code is Code.LAYOUT_INVALID
    assert "valid_length" in error.what


def test_a_cache_is_returned_once() -> None:
    base = contract(16, (4,))

    def states(*caches: int) -> Callable[[Method], Method]:
        added = tuple(_state(cache, index + 1, base) for index, cache in enumerate(caches))
        return lambda method: replace(method, outputs=(*method.outputs, *added))

    check_consistency(_decode(base, states(0, 1)))
    error = _refused(_decode(base, states(0, 0)))
    assert (error.code, error.found) == (Code.LAYOUT_INVALID, [0, 0])


@pytest.mark.parametrize("role", [Role.POSITIONS, Role.MASK, Role.STATE])
def test_version_1_has_no_other_input_roles(role: Role) -> None:
    base = contract(16, (4,))

    def add(method: Method) -> Method:
        slot = Slot(len(method.inputs), role, base.caches[0].spec)
        return replace(method, inputs=(*method.inputs, slot))

    error = _refused(_decode(base, add))
    assert (error.code, error.found) == (Code.LAYOUT_INVALID, role.value)


def test_a_verify_method_counts_for_the_ring() -> None:
    base = contract(16, (4,), window=3, rows=LogitsRows.ALL)
    check_consistency(base)
    longer = tuple(
        replace(m, step=m.step + 1, role=MethodRole.VERIFY) if m.step > 1 else m
        for m in base.methods
    )
    error = _refused(replace(base, methods=longer))
    assert (error.code, error.found) == (Code.CACHE_INVALID, 6)
    assert str(error.expected).startswith("7 = min(capacity 16, window 3 - 1 + longest step 5)")
