"""Programs that return every cache: swapped where outputs can be placed, else copied, never wrong."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.runtime.conftest import TOY
from tests.support.toy_programs import eager_logits, write_toy

from staticlm.contract.program import read_program
from staticlm.errors import Code, StaticLMError
from staticlm.runtime.allocators import get_chain
from staticlm.runtime.drivers import get_driver
from staticlm.runtime.io_managers.registry import make_io_manager, select_label
from staticlm.runtime.session import Session
from staticlm.runtime.shared_program import SharedProgram

Open = Callable[..., Session]
TOKENS = [int(t) for t in np.random.default_rng(3).integers(0, TOY.vocab, TOY.capacity)]
LABEL = {"get_io_contract": "kvcache_io"}


@pytest.fixture(scope="module", params=[True, False], ids=["planned", "unplanned"])
def returning(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program whose outputs are its caches, last first, and then the logits."""
    path = tmp_path_factory.mktemp("kvcache") / f"{request.param}.pte"
    write_toy(path, TOY, LABEL, returns=True, plan_outputs=request.param)
    return path


@pytest.fixture(scope="module")
def oracle() -> Any:
    return eager_logits(TOY, TOKENS).numpy()


def expected_states(path: Path, driver: str) -> str:
    return "swapped" if driver == "native" and path.stem == "False" else "copied"


def test_equal_to_eager_in_chunks_and_steps(
    open_session: Open, returning: Path, driver_name: str, oracle: Any
) -> None:
    session = open_session(returning)
    stats = session.stats()
    assert (stats.label, stats.states) == ("kvcache_io", expected_states(returning, driver_name))
    for begin, end in [(0, 11), (11, 12), (12, 13), (13, 30), (30, 31), (31, 48)]:
        np.testing.assert_allclose(session.prefill(TOKENS[begin:end]), oracle[end - 1], atol=2e-5)


def test_reset_repeats_bitwise(open_session: Open, returning: Path) -> None:
    session = open_session(returning)
    first = [session.prefill(TOKENS[:13]), session.step(5)]
    session.reset()
    np.testing.assert_array_equal([session.prefill(TOKENS[:13]), session.step(5)], first)


def test_sessions_in_turn(
    open_session: Open, returning: Path, driver_name: str, oracle: Any
) -> None:
    shared = SharedProgram(get_driver(driver_name), returning, read_program(returning))
    one, two = open_session(shared=shared), open_session(shared=shared)
    one.prefill(TOKENS[:10])
    two.prefill(TOKENS[5:9])
    for position in range(10, 17):
        np.testing.assert_allclose(one.step(TOKENS[position]), oracle[position], atol=2e-5)
        two.step(0)
    two.close()
    np.testing.assert_allclose(one.step(TOKENS[17]), oracle[17], atol=2e-5)


def test_all_buffers_are_freed(returning: Path, driver_name: str) -> None:
    shared = SharedProgram(get_driver(driver_name), returning, read_program(returning))
    chain = get_chain("host")
    session = Session(make_io_manager("kvcache_io", shared.facts, shared, chain))
    session.prefill(TOKENS[:9])
    sets = 2 if expected_states(returning, driver_name) == "swapped" else 1
    assert chain.tallies[0].buffers >= 4 * sets + 5
    session.close()
    gc.collect()
    assert (chain.tallies[0].buffers, chain.tallies[0].dropped) == (0, 0)


def test_a_program_that_keeps_its_caches_to_itself_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "in_place.pte"
    write_toy(path, TOY, LABEL)
    facts = read_program(path)
    shared = SharedProgram(get_driver("stock"), path, facts)
    with pytest.raises(StaticLMError, match="does not return") as caught:
        make_io_manager(select_label(facts), facts, shared, get_chain("host"))
    assert caught.value.code is Code.SLOT_MISMATCH
    assert shared.loaded == ()
