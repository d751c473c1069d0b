"""Nothing outlives its user, whatever order references are dropped in, and nothing goes too early."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.runtime.conftest import TOY

import staticlm
from staticlm.contract.program import read_program
from staticlm.errors import Code, StaticLMError
from staticlm.runtime.chain import ChainAllocator
from staticlm.runtime.drivers import get_driver
from staticlm.runtime.host import HostAllocator
from staticlm.runtime.io_managers.registry import make_io_manager
from staticlm.runtime.session import Session
from staticlm.runtime.shared_program import SharedProgram
from staticlm.runtime.stats import resident_bytes

PROMPT = list(range(20))


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    """Reference counts alone must do it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Refusing(HostAllocator):
    """The heap until `left` buffers were served."""

    def __init__(self, left: int) -> None:
        self.left = left

    def allocate(self, nbytes: int, alignment: int = 64) -> Any:
        """A buffer, or an error at the end."""
        self.left -= 1
        if self.left < 0:
            raise MemoryError("no more")
        return super().allocate(nbytes, alignment)


def parts(path: Path, driver: str, allocator: ChainAllocator) -> tuple[SharedProgram, Session]:
    shared = SharedProgram(get_driver(driver), path, read_program(path))
    manager = make_io_manager("hf_static", shared.facts, shared, allocator)
    return shared, Session(manager)


def test_a_dropped_runner_frees_everything(toy_path: Path, driver_name: str) -> None:
    chain = ChainAllocator()
    runner = staticlm.load(toy_path, driver=driver_name, allocator=chain)
    runner.generate(PROMPT, 5, ignore_end=True)
    tally = runner._allocator.tallies[0]
    assert tally.buffers > 0
    del runner
    assert (tally.buffers, tally.dropped) == (0, 0)


def test_a_stream_keeps_what_it_needs_and_no_longer(toy_path: Path, driver_name: str) -> None:
    chain = ChainAllocator()
    runner = staticlm.load(toy_path, driver=driver_name, allocator=chain)
    tally = runner._allocator.tallies[0]
    stream = runner._start(PROMPT, 5, {"ignore_end": True}, text_needed=False)
    del runner
    for _ in stream:
        pass
    assert len(stream.generation.tokens) == 5
    del stream
    assert (tally.buffers, tally.dropped) == (0, 0)


@pytest.mark.parametrize("order", ["program first", "session first"])
def test_any_order_of_dropping(toy_path: Path, driver_name: str, order: str) -> None:
    chain = ChainAllocator()
    tally = chain.tallies[0]
    shared, session = parts(toy_path, driver_name, chain)
    session.prefill(PROMPT)
    if order == "program first":
        del shared, chain
        before = session.step(3)
        assert before.shape == (TOY.vocab,)
        del session
    else:
        del session
        assert shared.closed
        del shared, chain
    assert (tally.buffers, tally.dropped) == (0, 0)


def test_buffers_live_while_a_method_is_bound(toy_path: Path, driver_name: str) -> None:
    chain = ChainAllocator()
    _, session = parts(toy_path, driver_name, chain)
    session.prefill(PROMPT)
    caches = session._manager._caches  # type: ignore[attr-defined]
    assert all(cache.pins > 0 for cache in caches)
    with pytest.raises(StaticLMError, match="still bound") as caught:
        staticlm.runtime.buffers.free(caches[0])  # type: ignore[attr-defined]
    assert caught.value.code is Code.BUFFER_INVALID
    held = list(caches)
    session.close()
    assert all(cache.pins == 0 and cache.freed for cache in held)


@pytest.mark.parametrize("left", [0, 1, 3, 5, 8])
def test_a_failed_allocation_leaves_nothing_behind(toy_path: Path, left: int) -> None:
    chain = ChainAllocator([Refusing(left)])
    shared = SharedProgram(get_driver("stock"), toy_path, read_program(toy_path))
    manager = make_io_manager("hf_static", shared.facts, shared, chain)
    with pytest.raises(MemoryError):
        Session(manager)
    assert chain.tallies[0].buffers == 0
    assert shared.loaded == ()
    with pytest.raises(StaticLMError):
        manager.prepare("decode")


def test_memory_is_flat_over_many_texts(toy_path: Path, driver_name: str) -> None:
    with staticlm.load(toy_path, driver=driver_name) as runner:
        for _ in range(3):
            runner.generate(PROMPT, 20, ignore_end=True)
        before = resident_bytes()
        for _ in range(15):
            runner.generate(PROMPT, 20, ignore_end=True)
        after = resident_bytes()
    if before is None or after is None:
        pytest.skip("the system does not tell the resident size")
    assert after - before < 2_000_000


def test_two_loads_of_one_file_are_independent(toy_path: Path, driver_name: str) -> None:
    with staticlm.load(toy_path, driver=driver_name) as one:
        first = one.session.prefill(PROMPT)
        with staticlm.load(toy_path, driver=driver_name) as two:
            two.session.prefill(PROMPT[5:])
        np.testing.assert_array_equal(
            [one.reset(), one.session.prefill(PROMPT)][1],
            first,
        )
