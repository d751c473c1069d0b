"""The conformance suite of drivers: the same real programs on each of them.

The cache programs compute `y = x + sum(cache)` over the rows and write `scale * x` into the row at
`position`; the scale is 2 in `decode` and 3 in `prefill`.
"""

from __future__ import annotations

import functools
import gc
import itertools
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.driver_programs import ROWS, WIDTH, Writer

from staticlm.errors import Code, ExecutionError, ProgramError, RunnerError
from staticlm.runtime import drivers
from staticlm.runtime.allocators import get_chain
from staticlm.runtime.buffers import Buffer, allocate, free
from staticlm.runtime.chain import ChainAllocator
from staticlm.runtime.driver import BoundMethod, Driver, LoadedProgram
from staticlm.runtime.drivers import get_driver, register_driver

Programs = Callable[[str], Path]


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    """Programs by name, each written when it is first asked for."""
    return functools.cache(Writer(tmp_path_factory.mktemp("driver_programs")))


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> Iterator[None]:
    """Collections need not walk all of torch each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def driver(driver_name: str) -> Driver:
    return get_driver(driver_name)


class Rig:
    """A loaded method with a buffer bound to each input."""

    def __init__(self, driver: Driver, path: Path, method: str = "decode") -> None:
        self.chain = get_chain()
        self.program: LoadedProgram = driver.load(path)
        self.method: BoundMethod = self.program.load_method(method, self.chain)
        self.buffers = [
            allocate(self.chain, facts.nbytes) for facts in self.method.facts.inputs if facts
        ]
        for index, buffer in enumerate(self.buffers):
            self.method.bind_input(index, buffer)
        self.views = [
            buffer.view(facts.dtype, facts.shape)
            for buffer, facts in zip(self.buffers, self.method.facts.inputs, strict=True)
            if facts
        ]

    def step(self, x: float, position: int) -> None:
        self.views[0][:] = x
        self.views[1][:] = position
        self.method.execute()

    def close(self) -> None:
        self.program.close()
        self.views.clear()
        for buffer in self.buffers:
            if not buffer.freed:
                free(buffer)


@pytest.fixture
def rig(driver: Driver, programs: Programs) -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(name: str, method: str = "decode") -> Rig:
        made.append(Rig(driver, programs(name), method))
        return made[-1]

    yield make
    for one in made:
        one.close()


# ---- binding and execution -----------------------------------------------------------------------


def test_cache_is_written_in_place_and_read_by_the_next_step(rig: Callable[..., Rig]) -> None:
    one = rig("in_place")
    cache = one.views[2]
    cache[:] = 5.0
    one.step(1.0, 2)
    assert one.method.output(0).tolist() == [[31.0] * WIDTH]  # 1 + 6 rows of 5
    assert cache[:, 0].tolist() == [5.0, 5.0, 2.0, 5.0, 5.0, 5.0]
    one.step(10.0, 3)
    assert one.method.output(0).tolist() == [[37.0] * WIDTH]  # 10 + 5 * 5 + 2
    assert cache[:, 3].tolist() == [5.0, 5.0, 2.0, 20.0, 5.0, 5.0]


def test_two_methods_share_one_cache(
    driver: Driver, programs: Programs, rig: Callable[..., Rig]
) -> None:
    one = rig("in_place")
    other = one.program.load_method("prefill", one.chain)
    for index, buffer in enumerate(one.buffers):
        other.bind_input(index, buffer)
    one.step(1.0, 0)
    one.views[1][:] = 1
    other.execute()
    assert other.output(0).tolist() == [[3.0] * WIDTH]  # 1 + the 2 that decode wrote
    assert one.views[2][:2, 0].tolist() == [2.0, 3.0]


def test_addresses_are_stable(rig: Callable[..., Rig]) -> None:
    one = rig("in_place")
    one.step(1.0, 0)
    output = one.method.output(0)
    address = output.ctypes.data
    for position in range(1, ROWS):
        one.step(1.0, position)
        assert one.method.output(0).ctypes.data == address
    assert [b.view("uint8", (1,)).ctypes.data for b in one.buffers] == [
        b.address for b in one.buffers
    ]
    assert output[0, 0] == 1.0 + 2.0 * (ROWS - 1)  # the same memory, without a copy


def test_rebinding_moves_the_method_to_other_memory(rig: Callable[..., Rig]) -> None:
    one = rig("in_place")
    second = allocate(one.chain, one.buffers[2].nbytes)
    second.view("float32", (ROWS, WIDTH))[:] = 1.0
    one.step(1.0, 0)
    one.method.bind_input(2, second)
    assert (one.buffers[2].pins, second.pins) == (0, 1)
    one.step(1.0, 1)
    assert one.method.output(0)[0, 0] == 1.0 + ROWS
    assert second.view("float32", (ROWS, WIDTH))[:, 0].tolist() == [1.0, 2.0, 1.0, 1.0, 1.0, 1.0]
    assert one.views[2][:, 0].tolist() == [2.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    one.method.close()
    free(second)


def test_binding_at_an_offset(rig: Callable[..., Rig]) -> None:
    one = rig("in_place")
    block = allocate(one.chain, 1024)
    one.method.bind_input(2, block, 256)
    one.step(4.0, 5)
    whole = block.view("float32", (256,))
    assert np.flatnonzero(whole).tolist() == [64 + 5 * WIDTH + i for i in range(WIDTH)]
    assert whole[64 + 5 * WIDTH] == 8.0
    one.method.close()
    free(block)


def test_mutated_inputs_that_are_returned_are_right(rig: Callable[..., Rig]) -> None:
    """The case that stock `execute` gets wrong without an error."""
    one = rig("aliased")
    assert one.method.facts.aliases == {0: 2}
    cache = one.views[2]
    for position in range(3):
        one.step(1.0, position)
    assert cache[:, 0].tolist() == [2.0, 2.0, 2.0, 0.0, 0.0, 0.0]
    assert one.method.output(0).ctypes.data == one.buffers[2].address
    assert one.method.output(1).tolist() == [[5.0] * WIDTH]  # 1 + 2 + 2


def test_returned_caches_are_whole_and_leave_the_input_alone(rig: Callable[..., Rig]) -> None:
    one = rig("returned")
    one.views[2][:] = 1.0
    one.step(7.0, 4)
    assert one.method.output(0)[0, 0] == 13.0
    assert one.method.output(1)[:, 0].tolist() == [1.0, 1.0, 1.0, 1.0, 14.0, 1.0]
    assert one.views[2].tolist() == np.ones((ROWS, WIDTH)).tolist()


def test_outputs_are_placed_or_refused(rig: Callable[..., Rig], driver: Driver) -> None:
    one = rig("returned")
    target = allocate(one.chain, one.buffers[2].nbytes)
    if not driver.capabilities.bind_outputs:
        with pytest.raises(RunnerError, match="cannot point output 1") as error:
            one.method.bind_output(1, target)
        assert error.value.code is Code.DRIVER_UNSAFE
        assert target.pins == 0
        return
    one.method.bind_output(1, target)
    one.step(7.0, 4)
    seen = target.view("float32", (ROWS, WIDTH))
    assert seen[:, 0].tolist() == [0.0, 0.0, 0.0, 0.0, 14.0, 0.0]
    assert one.method.output(1).ctypes.data == target.address
    # Swapped between two sets: the output of one step is the input of the next.
    one.method.bind_input(2, target)
    one.method.bind_output(1, one.buffers[2])
    one.step(1.0, 0)
    assert one.views[2][:, 0].tolist() == [2.0, 0.0, 0.0, 0.0, 14.0, 0.0]
    assert one.method.output(0)[0, 0] == 15.0
    one.method.close()
    free(target)


def test_an_aliased_output_can_only_be_where_its_input_is(rig: Callable[..., Rig]) -> None:
    one = rig("aliased")
    elsewhere = allocate(one.chain, one.buffers[2].nbytes)
    with pytest.raises(RunnerError) as error:
        one.method.bind_output(0, elsewhere)
    assert error.value.code is Code.DRIVER_UNSAFE
    one.method.bind_output(0, one.buffers[2])
    one.step(1.0, 0)
    assert one.views[2][0, 0] == 2.0
    assert elsewhere.view("float32", (ROWS,)).any() == np.False_


def test_planned_outputs_cannot_be_placed(rig: Callable[..., Rig]) -> None:
    one = rig("in_place")
    with pytest.raises(RunnerError) as error:
        one.method.bind_output(0, one.buffers[2])
    assert error.value.code is Code.DRIVER_UNSAFE


def test_planned_inputs_are_copied_at_each_call(rig: Callable[..., Rig]) -> None:
    one = rig("planned")
    one.views[2][:] = 1.0
    one.step(1.0, 0)
    assert one.method.output(1)[0, 0] == 7.0
    assert one.method.output(0)[:2, 0].tolist() == [2.0, 1.0]
    assert one.views[2][0, 0] == 1.0  # the write went to the arena
    one.views[2][:] = 3.0
    one.step(2.0, 1)
    assert one.method.output(1)[0, 0] == 20.0
    assert one.method.output(0)[:2, 0].tolist() == [3.0, 4.0]


def test_dynamic_shapes_shrink_and_grow(rig: Callable[..., Rig]) -> None:
    one = rig("dynamic", "forward")
    one.views[0][:] = np.arange(ROWS)[:, None]
    for rows in (ROWS, 2, 5):
        one.method.bind_input(0, one.buffers[0], shape=(rows, WIDTH))
        one.method.execute()
        assert one.method.output(0).shape == (rows, WIDTH)
        assert one.method.output(0)[:, 1].tolist() == [2.0 * row + 1 for row in range(rows)]
    for shape in [(ROWS + 1, WIDTH), (2, WIDTH - 1, 1), (0, WIDTH)]:
        with pytest.raises(RunnerError, match="does not take this shape"):
            one.method.bind_input(0, one.buffers[0], shape=shape)


def test_a_fixed_shape_is_not_changed(rig: Callable[..., Rig]) -> None:
    one = rig("in_place")
    with pytest.raises(RunnerError, match=r"found \[3, 4\]; expected \[6, 4\]") as error:
        one.method.bind_input(2, one.buffers[2], shape=(3, WIDTH))
    assert error.value.code is Code.BUFFER_INVALID
    one.method.bind_input(2, one.buffers[2], shape=(ROWS, WIDTH))


def test_sessions_over_one_program_are_separate(driver: Driver, programs: Programs) -> None:
    first, second = Rig(driver, programs("in_place")), Rig(driver, programs("in_place"))
    first.step(1.0, 0)
    second.step(5.0, 0)
    first.step(0.0, 1)
    assert first.method.output(0)[0, 0] == 2.0
    assert second.method.output(0)[0, 0] == 5.0
    first.close()
    second.step(0.0, 1)
    assert second.method.output(0)[0, 0] == 10.0
    second.close()


# ---- refusals ------------------------------------------------------------------------------------


def test_buffers_that_do_not_fit_are_refused_and_nothing_changes(rig: Callable[..., Rig]) -> None:
    one = rig("in_place")
    small = allocate(one.chain, one.buffers[2].nbytes - 1)
    with pytest.raises(RunnerError, match="bytes 0 to 96; expected within 0 to 95") as error:
        one.method.bind_input(2, small)
    assert error.value.code is Code.BUFFER_INVALID
    with pytest.raises(RunnerError, match="bytes 1 to 97"):
        one.method.bind_input(2, one.buffers[2], 1)
    large = allocate(one.chain, 1024)
    with pytest.raises(RunnerError, match="not aligned to its dtype"):
        one.method.bind_input(2, large, 2)
    assert (small.pins, large.pins, one.buffers[2].pins) == (0, 0, 1)
    one.step(1.0, 0)
    assert one.views[2][0, 0] == 2.0
    free(small)
    with pytest.raises(RunnerError, match="freed"):
        one.method.bind_input(0, small)


@pytest.mark.parametrize("index", [-1, 3, 99])
def test_slots_that_are_not_there_are_refused(rig: Callable[..., Rig], index: int) -> None:
    one = rig("in_place")
    with pytest.raises(RunnerError, match="no such input") as error:
        one.method.bind_input(index, one.buffers[0])
    assert error.value.code is Code.BUFFER_INVALID
    with pytest.raises(RunnerError, match="no such output"):
        one.method.output(index)


def test_unbound_inputs_are_named(driver: Driver, programs: Programs) -> None:
    program = driver.load(programs("in_place"))
    method = program.load_method("decode", get_chain())
    with pytest.raises(RunnerError, match=r"unbound inputs: found \[0, 1, 2\]") as error:
        method.execute()
    assert error.value.code is Code.BUFFER_INVALID
    program.close()


def test_an_execution_error_has_the_code_and_leaves_the_method_usable(
    rig: Callable[..., Rig],
) -> None:
    one = rig("in_place")
    with pytest.raises(ExecutionError, match=r"'decode' failed.*0x12") as error:
        one.step(1.0, ROWS + 71)
    assert error.value.code is Code.EXECUTION_FAILED
    assert not one.views[2].any()
    one.step(1.0, 0)
    assert one.views[2][0, 0] == 2.0


def test_a_missing_method_lists_the_others(driver: Driver, programs: Programs) -> None:
    program = driver.load(programs("in_place"))
    with pytest.raises(ProgramError, match=r"'verify'; expected.*decode.*prefill") as error:
        program.load_method("verify", get_chain())
    assert error.value.code is Code.PROGRAM_UNSUPPORTED
    program.close()


@pytest.mark.parametrize(
    ("there", "absent"),
    [(b"aten::index_put_", b"aten::index_PUT_"), (b"XnnpackBackend", b"XnnpackBackenX")],
)
def test_what_is_not_registered_is_named_before_anything_is_loaded(
    driver: Driver, programs: Programs, tmp_path: Path, there: bytes, absent: bytes
) -> None:
    data = programs("in_place").read_bytes()
    assert there in data
    path = tmp_path / "needs.pte"
    path.write_bytes(data.replace(there, absent))
    with pytest.raises(ProgramError, match=absent.decode()) as error:
        driver.load(path)
    assert error.value.code is Code.PROGRAM_UNSUPPORTED


def test_absent_files_are_refused(driver: Driver, tmp_path: Path) -> None:
    with pytest.raises(ProgramError) as error:
        driver.load(tmp_path / "absent.pte")
    assert error.value.code is Code.PROGRAM_NOT_FOUND


def test_corrupt_files_never_kill_the_process(
    driver_name: str, programs: Programs, tmp_path: Path
) -> None:
    data = programs("in_place").read_bytes()
    pieces = [data[:size] for size in range(0, len(data), len(data) // 12)]
    for at in range(4, len(data), len(data) // 25):
        pieces.append(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
    for index, piece in enumerate(pieces):
        (tmp_path / f"{index}.pte").write_bytes(piece)
    code = (
        "import sys, pathlib\n"
        "from staticlm.errors import StaticLMError\n"
        "from staticlm.runtime.drivers import get_driver\n"
        "from staticlm.runtime.allocators import get_chain\n"
        "driver = get_driver(sys.argv[1]); seen = [0, 0]\n"
        "for path in sorted(pathlib.Path(sys.argv[2]).glob('*.pte')):\n"
        "    try:\n"
        "        program = driver.load(path)\n"
        "        for name in ('decode', 'prefill'): program.load_method(name, get_chain())\n"
        "        seen[0] += 1\n"
        "    except StaticLMError: seen[1] += 1\n"
        "print(*seen)\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", code, driver_name, str(tmp_path)], capture_output=True, text=True
    )
    assert child.returncode == 0, child.stderr[-2000:]
    loaded, refused = map(int, child.stdout.split()[-2:])
    assert loaded + refused == len(pieces)
    assert refused >= 12  # every truncation


# ---- lifetimes -----------------------------------------------------------------------------------


def test_use_after_close_is_an_error(rig: Callable[..., Rig]) -> None:
    one = rig("in_place")
    one.step(1.0, 0)
    one.method.close()
    one.method.close()
    for use in (
        one.method.execute,
        lambda: one.method.output(0),
        lambda: one.method.bind_input(0, one.buffers[0]),
        lambda: one.method.bind_output(0, one.buffers[0]),
    ):
        with pytest.raises(RunnerError) as error:
            use()
        assert error.value.code is Code.CLOSED
    again = one.program.load_method("decode", one.chain)
    again.close()
    one.program.close()
    one.program.close()
    with pytest.raises(RunnerError) as error:
        one.program.load_method("decode", one.chain)
    assert error.value.code is Code.CLOSED


def test_closing_a_program_closes_its_methods_and_unpins(rig: Callable[..., Rig]) -> None:
    one = rig("in_place")
    assert [buffer.pins for buffer in one.buffers] == [1, 1, 1]
    with pytest.raises(RunnerError, match="still bound"):
        free(one.buffers[2])
    one.program.close()
    assert [buffer.pins for buffer in one.buffers] == [0, 0, 0]
    with pytest.raises(RunnerError) as error:
        one.method.execute()
    assert error.value.code is Code.CLOSED


def test_nothing_is_left_after_a_close(driver: Driver, programs: Programs) -> None:
    for name in ("in_place", "aliased", "returned", "planned"):
        one = Rig(driver, programs(name))
        one.step(1.0, 0)
        for index in range(len(one.method.facts.outputs)):
            one.method.output(index)
        chain = one.chain
        one.close()
        tally = chain.tallies[0]
        assert (tally.buffers, tally.nbytes, tally.dropped) == (0, 0, 0), name


def test_outputs_outlive_their_method(driver: Driver, programs: Programs) -> None:
    one = Rig(driver, programs("in_place"))
    one.step(3.0, 0)
    output = one.method.output(0)
    chain = one.chain
    one.close()
    del one
    gc.collect()
    assert output.tolist() == [[3.0] * WIDTH]
    del output
    gc.collect()
    assert chain.tallies[0].buffers == 0


def test_buffers_live_as_long_as_a_method_is_bound_to_them_and_no_longer(
    driver: Driver, programs: Programs
) -> None:
    one = Rig(driver, programs("in_place"))
    one.step(1.0, 0)
    method, program = one.method, one.program
    watched = [weakref.ref(buffer) for buffer in one.buffers]
    del one
    gc.collect()
    assert all(ref() is not None for ref in watched)
    method.execute()
    assert method.output(0)[0, 0] == 3.0
    method.close()
    gc.collect()
    assert [ref() for ref in watched] == [None, None, None]
    program.close()


def test_a_dropped_method_lets_go(driver: Driver, programs: Programs) -> None:
    one = Rig(driver, programs("in_place"))
    one.step(1.0, 0)
    del one.method
    gc.collect()
    assert [buffer.pins for buffer in one.buffers] == [0, 0, 0]
    one.close()
    assert one.chain.tallies[0].buffers == 0


@pytest.mark.parametrize(
    "order", list(itertools.permutations(["program", "method", "buffers", "output"])), ids="-".join
)
def test_references_may_be_dropped_in_any_order(
    driver: Driver, programs: Programs, order: tuple[str, ...]
) -> None:
    one = Rig(driver, programs("aliased"))
    one.step(1.0, 0)
    held: dict[str, Any] = {
        "program": one.program,
        "method": one.method,
        "buffers": one.buffers,
        "output": [one.method.output(0), one.method.output(1)],
    }
    chain = one.chain
    del one
    for name in order:
        del held[name]
        gc.collect()
        if "output" in held:
            assert held["output"][0][0, 0] == 2.0
        if "method" in held:
            held["method"].execute()
    assert chain.tallies[0].buffers == 0


def test_a_buffer_that_refers_to_its_method_is_collected(
    driver: Driver, programs: Programs
) -> None:
    if not driver.capabilities.torch_free:
        pytest.skip("torch tensors hide from the collector what they hold")
    one = Rig(driver, programs("in_place"))
    one.step(1.0, 0)
    one.method.output(0)
    one.buffers[2].keep = (one.buffers[2].keep, one.method)
    watched = weakref.ref(one.buffers[2])
    one.buffers[2].allocator = _Forgetting(one.buffers[2])
    del one
    gc.collect()
    assert watched() is None


class _Forgetting:
    """Frees nothing itself: the pages die with `Buffer.keep`."""

    name = "forgetting"

    def __init__(self, buffer: Buffer) -> None:
        self.kind = buffer.kind

    def allocate(self, nbytes: int, alignment: int = 64) -> Buffer | None:
        return None

    def bind(self, buffer: Buffer, method: str, direction: str, index: int) -> None: ...

    def free(self, buffer: Buffer) -> None: ...


class _Noting(_Forgetting):
    """Serves from the heap and notes what it is told."""

    name = "noting"

    def __init__(self) -> None:
        self._host = get_chain()
        self.bound: list[tuple[str, str, int]] = []
        self.freed = 0

    def allocate(self, nbytes: int, alignment: int = 64) -> Buffer | None:
        inner = allocate(self._host, nbytes, alignment)
        return Buffer(inner.address, nbytes, alignment, self, "noting", keep=inner)

    def bind(self, buffer: Buffer, method: str, direction: str, index: int) -> None:
        self.bound.append((method, direction, index))

    def free(self, buffer: Buffer) -> None:
        self.freed += 1
        free(buffer.keep)


def test_allocators_are_told_of_bindings_and_serve_arenas(
    driver: Driver, programs: Programs
) -> None:
    noting = _Noting()
    chain = ChainAllocator([noting])
    program = driver.load(programs("in_place"))
    method = program.load_method("decode", chain)
    arenas = len([size for size in method.facts.arenas if size])
    if driver.capabilities.arena_allocator:
        assert noting.bound == [("decode", "arena", index) for index in range(arenas)]
    buffer = allocate(chain, 96)
    method.bind_input(2, buffer)
    assert noting.bound[-1] == ("decode", "input", 2)
    program.close()
    free(buffer)
    assert noting.freed == 1 + (arenas if driver.capabilities.arena_allocator else 0)


# ---- registry and environment --------------------------------------------------------------------


def test_auto_prefers_the_native_driver_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Driver:
        raise RunnerError(Code.DRIVER_UNAVAILABLE, "no", found="it was not built")

    monkeypatch.setattr(drivers, "_factories", {**drivers._factories, "native": refuse})
    chosen = get_driver("auto")
    assert chosen.name == "stock"
    assert chosen.reason == "the native driver is not available: it was not built"
    with pytest.raises(RunnerError, match="auto, native, stock") as error:
        get_driver("other")
    assert error.value.code is Code.REGISTRATION_INVALID
    with pytest.raises(RunnerError) as error:
        register_driver("stock", refuse)
    assert error.value.code is Code.REGISTRATION_DUPLICATE
    with pytest.raises(RunnerError) as error:
        register_driver("auto", refuse)
    assert error.value.code is Code.REGISTRATION_INVALID


def test_threads_can_be_set(driver: Driver) -> None:
    before = driver.threads
    try:
        driver.set_threads(1)
        assert driver.threads == 1
        driver.set_threads(2)
        assert driver.threads == 2
        with pytest.raises(RunnerError):
            driver.set_threads(0)
    finally:
        driver.set_threads(before)
