"""Sessions over real programs: logits, positions, isolation, refusals, and failures."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.runtime.conftest import TOY
from tests.support.toy_programs import eager_logits

from staticlm.contract.program import read_program
from staticlm.errors import CapacityError, Code, ExecutionError, RunnerError
from staticlm.runtime.drivers import get_driver
from staticlm.runtime.plan import Call
from staticlm.runtime.session import Session
from staticlm.runtime.shared_program import SharedProgram

Open = Callable[..., Session]
TOKENS = [int(t) for t in np.random.default_rng(1).integers(0, TOY.vocab, TOY.capacity)]


@pytest.fixture(scope="module")
def oracle() -> Any:
    """float32 `[capacity, vocab]`: logits after each of `TOKENS`."""
    return eager_logits(TOY, TOKENS).numpy()


@pytest.mark.parametrize("count", [1, 7, 8, 9, 20, 33, 47, 48])
def test_prefill_equals_eager(open_session: Open, toy_path: Path, oracle: Any, count: int) -> None:
    session = open_session(toy_path)
    logits = session.prefill(TOKENS[:count])
    assert logits.shape == (TOY.vocab,)
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, oracle[count - 1], atol=2e-5)
    assert session.position == count


def test_every_position_stepwise_up_to_capacity(
    open_session: Open, toy_path: Path, oracle: Any
) -> None:
    session = open_session(toy_path)
    for position, token in enumerate(TOKENS):
        np.testing.assert_allclose(session.step(token), oracle[position], atol=2e-5)
    with pytest.raises(CapacityError):
        session.step(0)
    assert session.position == TOY.capacity


def test_chunks_at_any_position_continue_the_text(
    open_session: Open, toy_path: Path, oracle: Any
) -> None:
    session = open_session(toy_path)
    for begin, end in [(0, 3), (3, 4), (4, 21), (21, 22), (22, 45), (45, 48)]:
        np.testing.assert_allclose(session.prefill(TOKENS[begin:end]), oracle[end - 1], atol=2e-5)


def test_returned_logits_are_not_overwritten_by_the_next_step(
    open_session: Open, toy_path: Path
) -> None:
    session = open_session(toy_path)
    first = session.prefill(TOKENS[:8])
    kept = first.copy()
    session.step(TOKENS[8])
    np.testing.assert_array_equal(first, kept)


def test_reset_repeats_bitwise(open_session: Open, toy_path: Path) -> None:
    session = open_session(toy_path)
    first = [session.prefill(TOKENS[:13]), session.step(5)]
    session.reset()
    assert session.position == 0
    second = [session.prefill(TOKENS[:13]), session.step(5)]
    np.testing.assert_array_equal(first, second)


def test_two_sessions_share_the_methods_and_no_state(
    open_session: Open, toy_path: Path, driver_name: str, oracle: Any
) -> None:
    shared = SharedProgram(get_driver(driver_name), toy_path, read_program(toy_path))
    one, two = open_session(shared=shared), open_session(shared=shared)
    one.prefill(TOKENS[:10])
    two.prefill(TOKENS[5:9])
    for position in range(10, 20):
        np.testing.assert_allclose(one.step(TOKENS[position]), oracle[position], atol=2e-5)
        two.step(0)
    assert shared.loaded == ("decode", "prefill_8")
    one.close()
    assert not shared.closed
    two.reset()
    np.testing.assert_allclose(two.prefill(TOKENS[:30]), oracle[29], atol=2e-5)
    two.close()
    assert shared.closed


def test_closing_the_session_that_ran_last_leaves_the_other_usable(
    open_session: Open, toy_path: Path, driver_name: str, oracle: Any
) -> None:
    shared = SharedProgram(get_driver(driver_name), toy_path, read_program(toy_path))
    one, two = open_session(shared=shared), open_session(shared=shared)
    two.prefill(TOKENS[:9])
    one.prefill(TOKENS[:9])
    one.close()
    gc.collect()
    np.testing.assert_allclose(two.step(TOKENS[9]), oracle[9], atol=2e-5)


def test_methods_are_loaded_when_first_needed(open_session: Open, toy_path: Path) -> None:
    session = open_session(toy_path)
    shared = session._manager._program  # type: ignore[attr-defined]
    assert shared.loaded == ()
    session.step(1)
    assert shared.loaded == ("decode",)
    session.prepare(8)
    assert shared.loaded == ("decode", "prefill_8")


def test_too_long_is_refused_with_nothing_executed(open_session: Open, toy_path: Path) -> None:
    session = open_session(toy_path)
    session.prefill(TOKENS[:40])
    calls = dict(session.stats().calls)
    with pytest.raises(CapacityError) as caught:
        session.prefill(TOKENS[:9])
    assert "40 already taken + 9 more" in str(caught.value)
    assert session.position == 40
    assert session.stats().calls == calls


@pytest.mark.parametrize("token", [-1, TOY.vocab, True, 1.0, "1", None, np.bool_(True)])
def test_what_is_not_a_token_is_refused_by_index(
    open_session: Open, toy_path: Path, token: Any
) -> None:
    session = open_session(toy_path)
    with pytest.raises(RunnerError) as caught:
        session.prefill([1, 2, token])
    assert caught.value.code is Code.TOKEN_INVALID
    assert "token 2 " in str(caught.value)
    assert session.position == 0
    assert session.stats().calls == {}


def test_numpy_integers_are_tokens(open_session: Open, toy_path: Path, oracle: Any) -> None:
    session = open_session(toy_path)
    logits = session.prefill(np.array(TOKENS[:5], np.int32))
    np.testing.assert_allclose(logits, oracle[4], atol=2e-5)


def test_no_tokens(open_session: Open, toy_path: Path) -> None:
    with pytest.raises(RunnerError, match="no tokens"):
        open_session(toy_path).prefill([])


def test_cancelling_between_calls_keeps_what_was_taken(
    open_session: Open, toy_path: Path, oracle: Any
) -> None:
    session = open_session(toy_path)
    seen: list[Call] = []

    def cancel(call: Call) -> None:
        seen.append(call)
        if len(seen) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.prefill(TOKENS[:30], between=cancel)
    assert session.position == 16
    np.testing.assert_allclose(session.prefill(TOKENS[16:30]), oracle[29], atol=2e-5)


def test_an_execution_error_breaks_the_session_until_reset(
    open_session: Open, toy_path: Path, oracle: Any
) -> None:
    session = open_session(toy_path)
    session.prefill(TOKENS[:8])
    session.step(TOKENS[8])
    # Past the checks of the session, a token beyond the embedding makes its kernel fail.
    with pytest.raises(ExecutionError) as caught:
        session._run(Call("decode", 9, 1, 1), [10**6], all_rows=False)
    assert "decode at position 9" in str(caught.value)
    assert "0x" in str(caught.value.found)
    assert session.position == 9
    for use in (lambda: session.step(0), lambda: session.prefill([0]), lambda: session.rollback(0)):
        with pytest.raises(RunnerError) as again:
            use()
        assert again.value.code is Code.SESSION_BROKEN
    assert session.stats().calls == {"prefill_8": 1, "decode": 1}
    session.reset()
    np.testing.assert_allclose(session.prefill(TOKENS[:10]), oracle[9], atol=2e-5)


def test_rollback_within_what_the_ring_still_holds(
    open_session: Open, toy_path: Path, oracle: Any
) -> None:
    session = open_session(toy_path)
    session.prefill(TOKENS[:24])
    # 24 rows written, ring of 13, window 6: rows 11 to 23 are there, position 16 sees from 11 on.
    assert not session.rollback(15)
    assert session.position == 24
    assert session.rollback(16)
    np.testing.assert_allclose(session.prefill(TOKENS[16:30]), oracle[29], atol=2e-5)


@pytest.mark.parametrize("position", [-1, 25, True])
def test_rollback_needs_a_position_of_the_text(
    open_session: Open, toy_path: Path, position: int
) -> None:
    session = open_session(toy_path)
    session.prefill(TOKENS[:24])
    with pytest.raises(RunnerError):
        session.rollback(position)


def test_close_is_idempotent_and_use_after_it_is_an_error(
    open_session: Open, toy_path: Path
) -> None:
    session = open_session(toy_path)
    session.prefill([1])
    session.close()
    session.close()
    for use in (lambda: session.step(0), session.reset, lambda: session.rollback(0)):
        with pytest.raises(RunnerError) as caught:
            use()
        assert caught.value.code is Code.CLOSED


def test_buffers_are_freed_at_close(open_session: Open, toy_path: Path) -> None:
    session = open_session(toy_path)
    session.prefill(TOKENS[:9])
    tally = session._manager._allocator.tallies[0]  # type: ignore[attr-defined]
    assert tally.buffers >= 4 + 5
    session.close()
    gc.collect()
    assert (tally.buffers, tally.nbytes, tally.dropped) == (0, 0, 0)


def test_the_caches_of_the_caller_are_written_and_never_move(
    open_session: Open, toy_path: Path
) -> None:
    session = open_session(toy_path)
    caches = session._manager._caches  # type: ignore[attr-defined]
    addresses = [cache.address for cache in caches]
    session.prefill(TOKENS[:9])
    session.step(1)
    assert [cache.address for cache in caches] == addresses
    keys = caches[0].view(np.float32, (2, TOY.capacity, 8))
    written = np.abs(keys).sum((0, 2)) > 0
    assert written[:10].all()
    # The one token after the chunk was decoded: no padding beyond position 9.
    assert not written[10:].any()


def test_stats_name_buffers_and_allocators(open_session: Open, toy_path: Path) -> None:
    session = open_session(toy_path)
    session.prefill(TOKENS[:17])
    stats = session.stats()
    assert (stats.label, stats.version, stats.states) == ("hf_static", 1, "in place")
    assert stats.calls == {"prefill_8": 2, "decode": 1}
    assert stats.execute_seconds > 0
    by_name = {one.name: one for one in stats.buffers}
    assert by_name["layer 0 key"].nbytes == 2 * TOY.capacity * 8 * 4
    assert by_name["layer 1 value"].nbytes == 2 * TOY.ring * 8 * 4
    assert by_name["prefill_8 tokens"].nbytes == 64
    assert {one.allocator for one in stats.buffers} == {"host"}
