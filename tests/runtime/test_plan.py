"""Plans against a brute-force search, over lengths, positions, steps, windows and capacities."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.contracts import contract

from staticlm.contract import Contract
from staticlm.errors import CapacityError, Code, RunnerError
from staticlm.runtime.plan import Call, plan


def best(capacity: int, steps: tuple[int, ...], position: int, count: int) -> tuple[int, int]:
    """Fewest calls, then least padding, by trying every step and every number of valid rows."""

    @cache
    def search(start: int, left: int) -> tuple[int, int]:
        if left == 0:
            return (0, 0)
        found = []
        for step in {1, *steps}:
            if start + step > capacity:
                continue
            for valid in range(1, min(step, left) + 1):
                calls, padding = search(start + valid, left - valid)
                found.append((calls + 1, padding + step - valid))
        return min(found, default=(10**9, 0))

    return search(position, count)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Contract, tuple[int, ...], int, int]:
    capacity = draw(st.integers(1, 26))
    sizes = st.integers(2, capacity) if capacity > 1 else st.nothing()
    steps = tuple(sorted(draw(st.sets(sizes, max_size=3)))) if capacity > 1 else ()
    window = draw(st.none() | st.integers(1, capacity + 3))
    position = draw(st.integers(0, capacity))
    count = draw(st.integers(0, capacity - position))
    return contract(capacity, steps, window=window), steps, position, count


@settings(max_examples=600, deadline=None)
@given(cases())
def test_every_token_once_within_capacity_in_the_fewest_calls(
    case: tuple[Contract, tuple[int, ...], int, int],
) -> None:
    facts, steps, position, count = case
    result = plan(facts, position, count)
    capacity = facts.max_context_len
    methods = {m.name: m.step for m in facts.methods}
    taken: list[int] = []
    for call in result.calls:
        assert methods[call.method] == call.step
        assert 1 <= call.valid <= call.step
        assert call.start + call.step <= capacity
        taken += range(call.start, call.end)
    assert taken == list(range(position, position + count))
    assert result.final_position == position + count
    assert (len(result.calls), result.padding) == best(capacity, steps, position, count)


@settings(max_examples=300, deadline=None)
@given(cases(), st.sets(st.integers(0, 25), max_size=3))
def test_the_method_that_reads_least_takes_each_call(
    case: tuple[Contract, tuple[int, ...], int, int], limits: set[int]
) -> None:
    facts, steps, position, count = case
    prefixes = tuple(limit for limit in limits if limit < facts.max_context_len)
    narrow = contract(facts.max_context_len, steps, prefixes=prefixes)
    wide = plan(facts, position, count).calls
    assert [c.method for c in plan(narrow, position, count, narrow=False).calls] == [
        c.method for c in wide
    ]
    methods = {m.name: m for m in narrow.methods}
    for call, like in zip(plan(narrow, position, count).calls, wide, strict=True):
        assert (call.start, call.valid, call.step) == (like.start, like.valid, like.step)
        least = min((limit for limit in prefixes if call.start <= limit), default=None)
        assert methods[call.method].max_start == least
        assert methods[call.method].role is methods[like.method].role


@settings(max_examples=300, deadline=None)
@given(cases())
def test_no_padding_row_reaches_a_row_that_a_window_still_sees(
    case: tuple[Contract, tuple[int, ...], int, int],
) -> None:
    facts, _, position, count = case
    window, slots = facts.caches[0].window, facts.caches[0].slots
    held = {p % slots: p for p in range(position)}
    for call in plan(facts, position, count).calls:
        seen = range(max(0, call.start - (window or call.start + 1) + 1), call.start)
        assert [held[p % slots] for p in seen] == list(seen)
        held.update({p % slots: p for p in range(call.start, call.start + call.step)})


@given(cases(), st.integers(1, 100))
def test_beyond_capacity_names_both_limits(
    case: tuple[Contract, tuple[int, ...], int, int], excess: int
) -> None:
    facts, _, position, _ = case
    capacity = facts.max_context_len
    with pytest.raises(CapacityError) as caught:
        plan(facts, position, capacity - position + excess)
    assert caught.value.code is Code.CAPACITY_EXCEEDED
    assert f"request for {capacity + excess} tokens" in str(caught.value)
    assert f"at most {capacity} tokens" in str(caught.value)
    assert f"context length of at least {capacity + excess}" in str(caught.value)


def test_last_chunk_is_reached_by_cutting_the_one_before() -> None:
    result = plan(contract(200, (128,)), 0, 200)
    assert result.calls == (Call("prefill_128", 0, 72, 128), Call("prefill_128", 72, 128, 128))


def test_tail_too_close_to_the_end_is_decoded() -> None:
    result = plan(contract(64, (16,)), 60, 3)
    assert [(c.method, c.start, c.valid) for c in result.calls] == [
        ("decode", 60, 1),
        ("decode", 61, 1),
        ("decode", 62, 1),
    ]


def test_one_token_left_over_is_decoded_not_padded() -> None:
    calls = plan(contract(64, (16,)), 0, 17).calls
    assert [(c.method, c.valid) for c in calls] == [("prefill_16", 16), ("decode", 1)]


def test_smaller_prefill_steps_save_padding() -> None:
    calls = plan(contract(64, (4, 8, 16)), 0, 21).calls
    assert [(c.method, c.valid) for c in calls] == [("prefill_16", 16), ("prefill_8", 5)]


def test_large_contexts_are_planned_quickly() -> None:
    result = plan(contract(131072, (32, 128, 2048)), 5, 131000)
    assert len(result.calls) == 64
    assert result.final_position == 131005


@pytest.mark.parametrize(("position", "count"), [(-1, 1), (0, -1), (True, 1), (0, 1.0)])
def test_not_a_count(position: int, count: int) -> None:
    with pytest.raises(RunnerError) as caught:
        plan(contract(8, (4,)), position, count)
    assert caught.value.code is Code.TOKEN_INVALID
