"""The rpcmem allocator against a compiled stand-in of Qualcomm's C interfaces.

The stand-in gives real memory with real file descriptors; no device is involved.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from staticlm.errors import Code, RunnerError
from staticlm.runtime import rpcmem
from staticlm.runtime.allocators import get_allocator
from staticlm.runtime.buffers import Buffer, BufferAllocator, allocate, free
from staticlm.runtime.chain import ChainAllocator
from staticlm.runtime.rpcmem import (
    MAX_BYTES,
    DelegateSource,
    DspSource,
    RpcmemAllocator,
    file_descriptor,
)

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
pytestmark = pytest.mark.skipif(
    COMPILER is None or not sys.platform.startswith("linux"),
    reason="the stand-in of rpcmem needs Linux and a C compiler (cc, gcc or clang)",
)
SOURCE = Path(__file__).parents[1] / "support" / "rpcmem_stub.c"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("stub") / "librpcmem_stub.so"
    assert COMPILER is not None
    subprocess.run(
        [COMPILER, "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(path), str(SOURCE)],
        check=True,
    )
    return str(path)


@pytest.fixture
def stub(library: str) -> Any:
    lib: Any = ctypes.CDLL(library)
    lib.stub_last_alignment.restype = ctypes.c_size_t
    lib.stub_bound_tensor.restype = lib.stub_bound_block.restype = ctypes.c_void_p
    lib.stub_reset()
    before = lib.stub_live()
    yield lib
    gc.collect()
    assert lib.stub_live() == before
    assert lib.stub_bad_frees() == 0


@pytest.fixture
def dsp(library: str, stub: Any) -> RpcmemAllocator:
    return RpcmemAllocator(DspSource(library))


@pytest.fixture
def delegate(library: str, stub: Any, monkeypatch: pytest.MonkeyPatch) -> RpcmemAllocator:
    monkeypatch.setattr(rpcmem, "on_android", lambda: True)
    return RpcmemAllocator(DelegateSource(library))


def test_it_is_an_allocator(dsp: RpcmemAllocator, stub: Any) -> None:
    assert isinstance(dsp, BufferAllocator)
    assert stub.stub_inits() == 1
    assert isinstance(get_allocator("rpcmem"), RpcmemAllocator)


@pytest.mark.parametrize("alignment", [1, 64, 256, 4096, 65536])
def test_alignment_and_arguments(dsp: RpcmemAllocator, stub: Any, alignment: int) -> None:
    buffer = allocate(dsp, 1000, alignment)
    assert buffer.address % alignment == 0
    assert (buffer.nbytes, buffer.alignment, buffer.kind) == (1000, alignment, "rpcmem")
    assert (stub.stub_last_heap(), stub.stub_last_flags()) == (25, 1)
    room = stub.stub_last_size() - (buffer.address - buffer.keep.base)
    assert room >= 1000
    assert not buffer.view(np.uint8, (1000,)).any()
    free(buffer)


def test_the_descriptor_shows_the_same_bytes(dsp: RpcmemAllocator) -> None:
    buffer = allocate(dsp, 8192, 4096)
    view = buffer.view(np.int32, (2048,))
    view[:] = np.arange(2048)
    fd = file_descriptor(buffer)
    assert fd is not None
    with mmap.mmap(fd, 0) as other:
        offset = buffer.address - buffer.keep.base + 64
        seen = np.frombuffer(other, np.int32, 2048, offset)
        assert np.array_equal(seen, np.arange(2048))
        view[7] = -1
        assert seen[7] == -1
        del seen
    del view
    free(buffer)


def test_a_failed_allocation_leaves_the_heap_in_charge(dsp: RpcmemAllocator, stub: Any) -> None:
    stub.stub_fail(1)
    chain = ChainAllocator([dsp])
    first, second = allocate(chain, 64), allocate(chain, 64)
    assert (first.kind, second.kind) == ("host", "rpcmem")
    assert [tally.served for tally in chain.tallies] == [1, 1]
    free(first)
    free(second)


def test_memory_without_a_descriptor_is_given_back(dsp: RpcmemAllocator, stub: Any) -> None:
    live = stub.stub_live()
    stub.stub_fail_fd(1)
    assert dsp.allocate(64) is None
    assert (stub.stub_calls(), stub.stub_live()) == (1, live)


@pytest.mark.parametrize("nbytes", [MAX_BYTES, MAX_BYTES - 64, 2**31, 2**32 + 64, 2**40])
def test_more_than_two_gib_never_reaches_the_library(
    library: str, stub: Any, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpcmem, "on_android", lambda: True)
    for source in (DspSource(library), DelegateSource(library)):
        assert RpcmemAllocator(source).allocate(nbytes) is None
    assert stub.stub_calls() == 0


def test_frees_in_any_order_and_never_twice(dsp: RpcmemAllocator, stub: Any) -> None:
    live = stub.stub_live()
    buffers = [allocate(dsp, 64 * (i + 1)) for i in range(4)]
    assert stub.stub_live() == live + 4
    for index in (2, 0, 3, 1):
        free(buffers[index])
        dsp.free(buffers[index])  # an allocator that is told twice gives back once
        with pytest.raises(RunnerError, match="freed twice") as caught:
            free(buffers[index])
        assert caught.value.code is Code.BUFFER_INVALID
    assert stub.stub_live() == live


def test_a_view_outlives_free_and_a_pinned_buffer_refuses(dsp: RpcmemAllocator, stub: Any) -> None:
    live = stub.stub_live()
    buffer = allocate(dsp, 64)
    view = buffer.view(np.uint8, (64,))
    buffer.pins = 1
    with pytest.raises(RunnerError, match="still bound"):
        free(buffer)
    buffer.pins = 0
    free(buffer)
    view[:] = 7
    assert (int(view.sum()), stub.stub_live()) == (448, live + 1)
    del view
    gc.collect()
    assert stub.stub_live() == live


def test_the_delegate_is_told_of_alignment_binding_and_free(
    delegate: RpcmemAllocator, stub: Any
) -> None:
    live = stub.stub_live()
    buffer = allocate(delegate, 1024, 256)
    assert stub.stub_last_alignment() == 256
    assert file_descriptor(buffer) is None
    chain = ChainAllocator([delegate])
    chain.bind(buffer, "decode", "input", 3)
    assert stub.stub_bound_tensor() == buffer.address
    assert stub.stub_bound_block() == buffer.keep.base
    free(buffer)
    assert stub.stub_live() == live


def test_the_delegate_is_never_called_off_android(library: str, stub: Any) -> None:
    """There its function pointers are null, and the first call ends the process."""
    assert not rpcmem.on_android()
    assert RpcmemAllocator(DelegateSource(library)).allocate(64) is None
    assert stub.stub_calls() == 0


@pytest.mark.parametrize("android", [True, False])
def test_without_a_library_every_answer_is_none(
    android: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpcmem, "on_android", lambda: android)
    allocator = RpcmemAllocator()
    assert allocator.allocate(64) is None
    buffer: Buffer = allocate(ChainAllocator([allocator]), 64)
    assert buffer.kind == "host"
    free(buffer)


def test_what_a_machine_offers_is_chosen(
    library: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rpcmem, "on_android", lambda: True)
    defaults = {DelegateSource: library, DspSource: library}
    for cls, path in defaults.items():
        monkeypatch.setattr(cls.__init__, "__defaults__", (path,))
    assert isinstance(rpcmem.find_source(), DelegateSource)
    monkeypatch.setattr(DelegateSource.__init__, "__defaults__", (str(tmp_path / "absent.so"),))
    assert isinstance(rpcmem.find_source(), DspSource)
    monkeypatch.setattr(DelegateSource.__init__, "__defaults__", ("libc.so.6",))
    assert isinstance(rpcmem.find_source(), DspSource)
