"""Buffers, their allocators and the chain."""

from __future__ import annotations

import gc
import mmap
import subprocess
import sys
import time

import numpy as np
import pytest

from staticlm.errors import Code, RunnerError
from staticlm.runtime import allocators
from staticlm.runtime.allocators import get_allocator, get_chain, register_allocator
from staticlm.runtime.buffers import Buffer, BufferAllocator, allocate, free
from staticlm.runtime.chain import ChainAllocator
from staticlm.runtime.host import HostAllocator
from staticlm.runtime.shared_memory import SharedMemoryAllocator

BUILT_IN = ["host", "shm"]


class Refusing:
    """An allocator that never can."""

    name = "refusing"

    def allocate(self, nbytes: int, alignment: int = 64) -> Buffer | None:
        return None

    def bind(self, buffer: Buffer, method: str, direction: str, index: int) -> None: ...

    def free(self, buffer: Buffer) -> None: ...


class Faulty(Refusing):
    """An allocator that answers with something else than it was asked for."""

    name = "faulty"

    def __init__(self, *, short: int = 0, shift: int = 0) -> None:
        self._host = HostAllocator()
        self._short, self._shift = short, shift
        self.returned = 0

    def allocate(self, nbytes: int, alignment: int = 64) -> Buffer | None:
        made = self._host.allocate(nbytes, alignment)
        assert made is not None
        return Buffer(
            made.address + self._shift, nbytes - self._short, alignment, self, "faulty", made
        )

    def free(self, buffer: Buffer) -> None:
        self.returned += 1


class Failing(Refusing):
    """An allocator that breaks."""

    name = "failing"

    def allocate(self, nbytes: int, alignment: int = 64) -> Buffer | None:
        raise KeyError("broken allocator")


@pytest.fixture(params=BUILT_IN)
def allocator(request: pytest.FixtureRequest) -> BufferAllocator:
    return get_allocator(request.param)


@pytest.mark.parametrize("alignment", [1, 64, 4096])
def test_memory_is_zeroed_aligned_and_writable_to_its_last_byte(
    allocator: BufferAllocator, alignment: int
) -> None:
    buffer = allocate(allocator, 10_001, alignment)
    assert buffer.address % alignment == 0
    assert buffer.address % mmap.PAGESIZE == 0
    view = buffer.view("uint8", (10_001,))
    assert not view.any()
    view[-1] = 7
    assert buffer.view("uint8", (1,), 10_000)[0] == 7
    free(buffer)


def test_host_memory_honours_alignments_beyond_a_page() -> None:
    buffer = allocate(HostAllocator(), 100, 1 << 20)
    assert buffer.address % (1 << 20) == 0
    buffer.view("uint8", (100,))[:] = 1
    free(buffer)


def test_views_share_memory_and_are_typed() -> None:
    buffer = allocate(HostAllocator(), 64)
    buffer.view("float32", (2, 4), 16)[1, 3] = 1.0
    assert buffer.view("uint32", (16,))[4 + 7] == 0x3F800000
    assert buffer.view("float32", ()).shape == ()


@pytest.mark.parametrize(
    ("dtype", "shape", "offset"),
    [("uint8", (65,), 0), ("uint8", (1,), 64), ("float32", (16,), 4), ("uint8", (1,), -1)],
)
def test_views_beyond_the_buffer_are_refused(dtype: str, shape: tuple[int], offset: int) -> None:
    buffer = allocate(HostAllocator(), 64)
    with pytest.raises(RunnerError, match="out of the range") as error:
        buffer.view(dtype, shape, offset)
    assert error.value.code is Code.BUFFER_INVALID


def test_use_after_free_and_double_free_are_refused(allocator: BufferAllocator) -> None:
    buffer = allocate(allocator, 64)
    free(buffer)
    with pytest.raises(RunnerError, match="freed") as error:
        buffer.view("uint8", (1,))
    assert error.value.code is Code.BUFFER_INVALID
    with pytest.raises(RunnerError, match="twice") as error:
        free(buffer)
    assert error.value.code is Code.BUFFER_INVALID


def test_a_pinned_buffer_is_not_freed() -> None:
    buffer = allocate(HostAllocator(), 64)
    buffer.pins = 2
    with pytest.raises(RunnerError, match="2 live bindings"):
        free(buffer)
    assert not buffer.freed
    buffer.view("uint8", (1,))[0] = 1
    buffer.pins = 0
    free(buffer)


@pytest.mark.parametrize("name", BUILT_IN)
def test_memory_under_a_live_view_survives_free(name: str) -> None:
    chain = get_chain(name)
    buffer = allocate(chain, 1 << 20)
    view = buffer.view("uint8", (1 << 20,))
    part = view[-4:]
    free(buffer)
    del view, buffer
    part[:] = 9  # a dangling view would fault here
    assert part.tolist() == [9, 9, 9, 9]
    assert chain.tallies[0].buffers == 1
    del part
    assert (chain.tallies[0].buffers, chain.tallies[0].nbytes) == (0, 0)


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_dropped_buffer_gives_its_memory_back_and_is_counted(name: str) -> None:
    chain = get_chain(name)
    buffer = allocate(chain, 4096)
    assert (chain.tallies[0].buffers, chain.tallies[0].nbytes) == (1, 4096)
    del buffer
    gc.collect()
    tally = chain.tallies[0]
    assert (tally.buffers, tally.nbytes, tally.served, tally.dropped) == (0, 0, 1, 1)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_sizes_that_make_no_sense_are_refused(nbytes: int) -> None:
    with pytest.raises(RunnerError, match="size") as error:
        allocate(HostAllocator(), nbytes)
    assert error.value.code is Code.BUFFER_INVALID


@pytest.mark.parametrize("alignment", [0, -64, 48])
def test_alignments_that_make_no_sense_are_refused(alignment: int) -> None:
    with pytest.raises(RunnerError, match="alignment") as error:
        allocate(ChainAllocator(), 64, alignment)
    assert error.value.code is Code.BUFFER_INVALID


def test_more_memory_than_there_is_names_the_allocator() -> None:
    with pytest.raises(RunnerError, match="'shm\\+host'") as error:
        allocate(get_chain("shm"), 1 << 62)
    assert error.value.code is Code.ALLOCATION_FAILED


def test_a_refusal_moves_on_and_the_heap_is_last() -> None:
    chain = ChainAllocator([Refusing()])
    buffer = allocate(chain, 64)
    assert chain.name == "refusing+host"
    assert buffer.kind == "host"
    assert [(t.name, t.served) for t in chain.tallies] == [("refusing", 0), ("host", 1)]
    free(buffer)


def test_the_first_that_can_serves_and_frees() -> None:
    chain = get_chain("shm", "host")
    buffer = allocate(chain, 64)
    assert buffer.kind == "shm"
    assert isinstance(buffer.allocator, SharedMemoryAllocator)
    assert [t.buffers for t in chain.tallies] == [1, 0]
    free(buffer)
    assert [t.buffers for t in chain.tallies] == [0, 0]


def test_an_exception_propagates() -> None:
    with pytest.raises(KeyError, match="broken allocator"):
        allocate(ChainAllocator([Failing()]), 64)


@pytest.mark.parametrize("fault", [{"short": 1}, {"shift": 8}])
@pytest.mark.parametrize("chained", [False, True])
def test_a_wrong_answer_is_refused_and_given_back(fault: dict[str, int], chained: bool) -> None:
    faulty = Faulty(**fault)
    chain = ChainAllocator([faulty])
    with pytest.raises(RunnerError, match="'faulty' returned a buffer that does not fit") as error:
        allocate(chain if chained else faulty, 128)
    assert error.value.code is Code.BUFFER_INVALID
    assert faulty.returned == 1
    assert [t.served for t in chain.tallies] == [0, 0]


def test_an_answer_that_is_no_buffer_is_refused() -> None:
    class Wrong(Refusing):
        def allocate(self, nbytes: int, alignment: int = 64) -> Buffer | None:
            return bytearray(nbytes)  # type: ignore[return-value]

    with pytest.raises(RunnerError, match="found bytearray"):
        allocate(Wrong(), 64)


def test_a_second_process_maps_shared_memory_and_writes_into_it() -> None:
    buffer = allocate(SharedMemoryAllocator(), 8192)
    view = buffer.view("int32", (2048,))
    view[:] = np.arange(2048)
    code = (
        "import sys; from staticlm.runtime.shared_memory import SharedMemoryAllocator as A\n"
        "b = A().attach(sys.argv[1], 8192); v = b.view('int32', (2048,))\n"
        "print(int(v.sum())); v[7] = -5\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", code, str(buffer.name)], capture_output=True, text=True, check=True
    )
    assert child.stdout.strip() == str(2047 * 1024)
    assert child.stderr == ""
    assert view[7] == -5
    # The child's exit took neither the memory nor its name.
    again = SharedMemoryAllocator().attach(str(buffer.name), 8192)
    assert again.view("int32", (8,))[7] == -5
    free(again)
    free(buffer)


def test_shared_memory_that_is_gone_or_too_small_is_refused() -> None:
    buffer = allocate(SharedMemoryAllocator(), 4096)
    name = str(buffer.name)
    with pytest.raises(RunnerError, match="too small") as error:
        SharedMemoryAllocator().attach(name, 1 << 20)
    assert error.value.code is Code.BUFFER_INVALID
    free(buffer)
    with pytest.raises(RunnerError, match="cannot be mapped") as error:
        SharedMemoryAllocator().attach(name, 4096)
    assert error.value.code is Code.BUFFER_INVALID


def test_names_left_by_a_process_that_forgets_them_are_removed() -> None:
    code = (
        "from staticlm.runtime.buffers import allocate\n"
        "from staticlm.runtime.shared_memory import SharedMemoryAllocator as A\n"
        "b = allocate(A(), 64); print(b.name, flush=True)\n"
        "import os; os._exit(1)\n"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    for _ in range(200):  # the tracker process cleans up after the death of its parent
        try:
            free(SharedMemoryAllocator().attach(child.stdout.strip(), 64))
            time.sleep(0.05)
        except RunnerError:
            break
    else:
        pytest.fail("the shared memory is still there")


def test_registry_lists_what_it_knows_and_refuses_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(allocators, "_factories", dict(allocators._factories))
    register_allocator("mine", Refusing)
    assert isinstance(get_allocator("mine"), Refusing)
    assert {"host", "shm", "mine"} <= set(allocators.allocator_names())
    with pytest.raises(RunnerError, match=r"host.*mine.*shm") as error:
        get_allocator("other")
    assert error.value.code is Code.REGISTRATION_INVALID
    with pytest.raises(RunnerError) as error:
        register_allocator("host", Refusing)
    assert error.value.code is Code.REGISTRATION_DUPLICATE
    assert isinstance(get_allocator("host"), HostAllocator)
    for name, factory in [("", Refusing), ("none", None)]:
        with pytest.raises(RunnerError) as error:
            register_allocator(name, factory)  # type: ignore[arg-type]
        assert error.value.code is Code.REGISTRATION_INVALID
    register_allocator("hollow", lambda: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(RunnerError, match="found NoneType"):
        get_allocator("hollow")
