"""Packed weights in a file: written once, mapped later, and never a reason to fail."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import subprocess
import sys
import textwrap
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.driver_programs import Writer

from staticlm.runtime import packed_weights
from staticlm.runtime.allocators import get_chain
from staticlm.runtime.buffers import allocate
from staticlm.runtime.native import NativeDriver

Row = np.ndarray[Any, Any]
WEIGHTS = 6 * 768 * 768 * 4


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Nothing but a size."""
    path = tmp_path / "model.pte"
    with path.open("wb") as file:
        file.truncate(packed_weights.SMALLEST)
    return path


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(packed_weights.ENVIRONMENT, str(tmp_path / "packed"))
    return tmp_path / "packed"


def _file(program: Path, release: str = "1.5.1") -> Path:
    found = packed_weights.packed_weights(program, release).file
    assert found is not None
    return found


def test_a_program_has_one_file_until_it_changes(program: Path, directory: Path) -> None:
    first = _file(program)
    assert first.parent == directory
    assert directory.stat().st_mode & 0o077 == 0
    assert _file(program) == first
    assert _file(program, "1.5.2") != first
    os.utime(program, ns=(1, 1))
    assert _file(program) != first


def test_old_files_go(program: Path, directory: Path) -> None:
    def use() -> Path:
        found = packed_weights.packed_weights(program, "1.5.1")
        assert found.file is not None
        found.file.write_bytes(b"x")
        found.mark()
        return found.file

    first = use()
    strange = directory / "of-another-program.xnnpack"
    other = directory / "notes.txt"
    for file in (strange, other):
        file.write_bytes(b"x")
    assert _file(program) == first
    assert first.exists()
    os.utime(program, ns=(1, 1))
    second = use()
    assert not first.exists()
    assert strange.exists()
    month_ago = time.time() - 31 * 24 * 3600
    for file in (strange, other, second):
        os.utime(file, (month_ago, month_ago))
    assert _file(program) == second  # used: it is young again
    os.utime(program, ns=(2, 2))
    use()
    assert not strange.exists()
    assert other.exists()
    assert len(list(directory.iterdir())) == 4  # the notes, and a file with its lock and mark


def test_off_small_full_and_unwritable(
    program: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reason() -> str:
        found = packed_weights.packed_weights(program, "1.5.1")
        assert found.file is None
        assert str(found) == f"in memory: {found.reason}"
        return found.reason

    usage = namedtuple("usage", "free")
    with monkeypatch.context() as patch:
        patch.setattr(packed_weights.shutil, "disk_usage", lambda path: usage(10))
        assert "too little space" in reason()
    with monkeypatch.context() as patch:
        patch.setenv(packed_weights.ENVIRONMENT, "off")
        assert "off" in reason()
        patch.setenv(packed_weights.ENVIRONMENT, str(program / "below-a-file"))
        assert "below-a-file" in reason()
        patch.setenv(packed_weights.ENVIRONMENT, str(directory / ("x" * 200) / ("y" * 50)))
        assert "too long" in reason()
    with program.open("r+b") as file:
        file.truncate(packed_weights.SMALLEST - 1)
    assert "small" in reason()


def test_a_program_that_is_only_measured_gets_none(program: Path, directory: Path) -> None:
    with packed_weights.not_kept():
        assert packed_weights.packed_weights(program, "1.5.1").file is None
    assert not directory.exists()


def test_a_lock_is_given_back_with_its_last_holder(program: Path, directory: Path) -> None:
    lock = f"{_file(program)}.lock"

    def free() -> bool:
        with open(lock) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    one = packed_weights.packed_weights(program, "1.5.1")
    two = packed_weights.packed_weights(program, "1.5.1")
    assert one == two
    assert not free()
    del one
    assert not free()
    del two
    assert free()


def test_the_default_is_the_users_cache(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(packed_weights.ENVIRONMENT, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert _file(program).parent == tmp_path / "cache" / "staticlm"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _file(program).parent == tmp_path / ".cache" / "staticlm"


@pytest.fixture(scope="module")
def driver(native_driver: NativeDriver) -> NativeDriver:
    return native_driver


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods over the same six weights of 768 x 768."""
    return functools.cache(Writer(tmp_path_factory.mktemp("packed_programs")))("busy")


@pytest.fixture
def always(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(packed_weights, "SMALLEST", 0)
    return directory


def _rows(driver: NativeDriver, path: Path, *names: str) -> list[Row]:
    """What methods of a fresh program give for the same input."""
    program, chain = driver.load(path), get_chain()
    source = allocate(chain, 16 * 768 * 4)
    rng = np.random.default_rng(0)
    source.view("float32", (16, 768))[:] = rng.standard_normal((16, 768), dtype=np.float32)
    found = []
    for name in names:
        method = program.load_method(name, chain)
        method.bind_input(0, source)
        method.execute()
        found.append(method.output(0).copy())
    program.close()
    return found


def test_what_was_packed_is_mapped_the_next_time(
    driver: NativeDriver, busy: Path, always: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv(packed_weights.ENVIRONMENT, "off")
        want = _rows(driver, busy, "a", "b")
    assert np.abs(want[0]).max() > 0.01
    first = _rows(driver, busy, "a", "b")
    [file] = always.glob("*.xnnpack")
    written = file.read_bytes()
    assert WEIGHTS <= len(written) < 1.1 * WEIGHTS  # once for both methods
    again = _rows(driver, busy, "b", "a")
    assert file.read_bytes() == written
    for got in (first, again[::-1]):
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one, other)
    # It is the file that is computed with: other weights in it, other results.
    file.write_bytes(bytes(4096) + written[4096:])
    assert not np.array_equal(_rows(driver, busy, "a")[0], want[0])


def test_a_file_that_a_killed_process_left_is_made_again(
    driver: NativeDriver, busy: Path, always: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = _rows(driver, busy, "a")[0]
    [file] = always.glob("*.xnnpack")
    written = file.read_bytes()
    file.write_bytes(bytes(4096) + written[4096:])
    mark = file.with_name(file.name + ".whole")
    mark.unlink()
    usage = namedtuple("usage", "free")
    with monkeypatch.context() as patch:
        patch.setattr(packed_weights.shutil, "disk_usage", lambda path: usage(0))
        np.testing.assert_array_equal(_rows(driver, busy, "a")[0], want)  # in memory
        assert not file.exists()
    np.testing.assert_array_equal(_rows(driver, busy, "a")[0], want)
    assert file.stat().st_size == len(written)
    assert mark.exists()


@pytest.mark.parametrize("damage", ["empty", "cut", "noise", "directory"])
def test_a_damaged_file_is_made_again(
    driver: NativeDriver, busy: Path, always: Path, damage: str
) -> None:
    want = _rows(driver, busy, "a")
    [file] = always.glob("*.xnnpack")
    whole = file.read_bytes()
    if damage == "directory":
        file.unlink()
        file.mkdir()
    else:
        file.write_bytes({"empty": b"", "cut": whole[:-9], "noise": os.urandom(5000)}[damage])
    np.testing.assert_array_equal(_rows(driver, busy, "a")[0], want[0])
    if damage != "directory":
        assert file.stat().st_size == len(whole)
    np.testing.assert_array_equal(_rows(driver, busy, "a")[0], want[0])


RUN = """
import json, pathlib, sys
import numpy as np
from staticlm.runtime import packed_weights
from staticlm.runtime.allocators import get_chain
from staticlm.runtime.buffers import allocate
from staticlm.runtime.native import NativeDriver
packed_weights.SMALLEST = 0
chain = get_chain()
program = NativeDriver().load(pathlib.Path(sys.argv[1]))
method = program.load_method("a", chain)
source = allocate(chain, 16 * 768 * 4)
source.view("float32", (16, 768))[:] = 1
method.bind_input(0, source)
method.execute()
print(json.dumps(float(np.abs(method.output(0)).sum())), flush=True)
sys.stdin.readline()
method.execute()
print(json.dumps(float(np.abs(method.output(0)).sum())), flush=True)
"""


def _sum(program: Any) -> float:
    chain = get_chain()
    method = program.load_method("a", chain)
    source = allocate(chain, 16 * 768 * 4)
    source.view("float32", (16, 768))[:] = 1
    method.bind_input(0, source)
    method.execute()
    return float(np.abs(method.output(0)).sum())


def test_processes_at_once_and_a_killed_one(driver: NativeDriver, busy: Path, always: Path) -> None:
    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(RUN), str(busy)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def answer(process: subprocess.Popen[str]) -> float:
        assert process.stdout is not None
        return float(json.loads(process.stdout.readline()))

    one = start()
    want = answer(one)
    two = start()  # the file is in use
    assert answer(two) == want
    [file] = always.glob("*.xnnpack")
    before = file.read_bytes()
    held = driver.load(busy)
    assert held.packed_weights == "in memory: another process uses the file"
    np.testing.assert_array_equal(_sum(held), want)
    held.close()
    assert file.read_bytes() == before
    two.kill()
    two.wait()
    three = start()
    assert answer(three) == want
    for process in (one, three):
        assert process.communicate("\n")[0].strip() == json.dumps(want)
        assert process.returncode == 0
    four = start()
    assert answer(four) == want
    four.communicate("\n")
    assert four.returncode == 0


def test_programs_opened_twice_in_one_process(
    driver: NativeDriver, busy: Path, always: Path
) -> None:
    chain = get_chain()
    source = allocate(chain, 16 * 768 * 4)
    source.view("float32", (16, 768))[:] = 1

    def run(method: Any) -> Row:
        method.bind_input(0, source)
        method.execute()
        return method.output(0).copy()

    first, second = driver.load(busy), driver.load(busy)
    a = first.load_method("a", chain)
    want = run(a)
    b = second.load_method("a", chain)
    np.testing.assert_array_equal(run(b), want)
    first.close()
    np.testing.assert_array_equal(run(b), want)
    third = driver.load(busy)
    np.testing.assert_array_equal(run(third.load_method("a", chain)), want)
    second.close()
    third.close()
    assert "in " in str(third.packed_weights)
    assert third.packed_weights.startswith(f"in {always}")
