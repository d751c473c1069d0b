"""Toy programs, lowered once per test session, and sessions over them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.toy_programs import Toy, write_toy

from staticlm.contract.program import read_program
from staticlm.errors import Code, RunnerError
from staticlm.runtime.allocators import get_chain
from staticlm.runtime.drivers import get_driver
from staticlm.runtime.io_managers.registry import make_io_manager, select_label
from staticlm.runtime.native import NativeDriver
from staticlm.runtime.session import Session
from staticlm.runtime.shared_program import SharedProgram

TOY = Toy()


@pytest.fixture(scope="session")
def toy_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy program with the default sizes."""
    path = tmp_path_factory.mktemp("toy") / "toy.pte"
    write_toy(path, TOY)
    return path


@pytest.fixture(scope="session", params=["stock", "native"])
def driver_name(request: pytest.FixtureRequest) -> str:
    """Each driver that can be loaded here."""
    try:
        get_driver(request.param)
    except RunnerError as error:
        if error.code is not Code.DRIVER_UNAVAILABLE:
            raise
        pytest.skip(str(error))
    return str(request.param)


@pytest.fixture(scope="session")
def native_driver() -> NativeDriver:
    """The native driver; skips where it was not built, unless it must have been."""
    try:
        return NativeDriver()
    except RunnerError as error:
        # Continuous integration sets this: there it must have been built.
        if error.code is not Code.DRIVER_UNAVAILABLE or os.environ.get("STATICLM_REQUIRE_NATIVE"):
            raise
        pytest.skip(str(error))


@pytest.fixture
def open_session(driver_name: str) -> Iterator[Callable[..., Session]]:
    """Makes sessions over a program file; several over one `SharedProgram` if it is passed."""
    made: list[Session] = []

    def make(path: Path | None = None, shared: SharedProgram | None = None) -> Session:
        if shared is None:
            assert path is not None
            shared = SharedProgram(get_driver(driver_name), path, read_program(path))
        label = select_label(shared.facts)
        manager = make_io_manager(label, shared.facts, shared, get_chain("host"))
        made.append(Session(manager))
        return made[-1]

    yield make
    for session in made:
        session.close()
