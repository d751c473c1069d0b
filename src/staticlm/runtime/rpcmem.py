"""Memory that Qualcomm's processors can reach without a copy: the `rpcmem` allocator.

Two ways, chosen by what the machine offers. On Android, the functions that ExecuTorch's QNN
delegate
exports: the delegate then knows the memory and may register it with the NPU. Elsewhere or without
    them, Qualcomm's `libcdsprpc.so`: memory with a file descriptor, which a delegate has to be told
    about. Off a device neither is there, nothing is called, and every request is answered with
    None. What a delegate makes of the memory is decided on the device.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from dataclasses import dataclass
from typing import Any, Protocol

from staticlm.runtime.buffers import ALIGNMENT, Buffer, Direction
from staticlm.runtime.host import PAD

MAX_BYTES = 2**31 - 1
"""The largest block: both interfaces take sizes as 32-bit signed integers, and overflow silently."""

DELEGATE_LIBRARY = "libqnn_executorch_backend.so"
DSP_LIBRARY = "libcdsprpc.so"

_SYSTEM_HEAP = 25
_CACHED = 1
_starting = threading.Lock()


def on_android() -> bool:
    """Whether this Python runs on Android; anywhere else the delegate's functions crash."""
    return sys.platform == "android" or hasattr(sys, "getandroidapilevel")


class Source(Protocol):
    """Where blocks come from."""

    def allocate(self, nbytes: int, alignment: int) -> Block | None:
        """A block whose `address` is aligned, or None."""
        ...

    def bind(self, block: Block) -> None:
        """Told when the block's address becomes that of a tensor."""
        ...

    def free(self, block: Block) -> None:
        """Give a block back."""
        ...


@dataclass(frozen=True)
class Block:
    """One allocation: what the library returned, the aligned address in it, and its descriptor."""

    base: int
    address: int
    fd: int | None = None


class DelegateSource:
    """The functions that the QNN delegate exports. Only on Android.

    Args:
        library: The delegate's library: a path or a name for the loader.
    """

    def __init__(self, library: str = DELEGATE_LIBRARY) -> None:
        lib: Any = ctypes.CDLL(library)
        self._alloc = lib.QnnExecuTorchAllocCustomMem
        self._alloc.argtypes, self._alloc.restype = (ctypes.c_size_t, ctypes.c_size_t), _POINTER
        self._free = lib.QnnExecuTorchFreeCustomMem
        self._free.argtypes, self._free.restype = (_POINTER,), None
        self._add = lib.QnnExecuTorchAddCustomMemTensorAddr
        self._add.argtypes, self._add.restype = (_POINTER, _POINTER), None

    def allocate(self, nbytes: int, alignment: int) -> Block | None:
        """A block of the delegate, aligned by it."""
        if not on_android():
            return None
        address = self._alloc(nbytes, alignment)
        return Block(address, address) if address else None

    def bind(self, block: Block) -> None:
        """Tell the delegate that a tensor lies in the block."""
        self._add(block.address, block.base)

    def free(self, block: Block) -> None:
        """Give the block back; the delegate forgets its tensors."""
        self._free(block.base)


class DspSource:
    """Qualcomm's `libcdsprpc.so`.

    Args:
        library: A path or a name for the loader.
    """

    def __init__(self, library: str = DSP_LIBRARY) -> None:
        lib: Any = ctypes.CDLL(library)
        self._alloc = lib.rpcmem_alloc
        self._alloc.argtypes = (ctypes.c_int, ctypes.c_uint32, ctypes.c_int)
        self._alloc.restype = _POINTER
        self._free = lib.rpcmem_free
        self._free.argtypes, self._free.restype = (_POINTER,), None
        self._to_fd = lib.rpcmem_to_fd
        self._to_fd.argtypes, self._to_fd.restype = (_POINTER,), ctypes.c_int
        if hasattr(lib, "rpcmem_init"):  # newer libraries do that when they are loaded
            lib.rpcmem_init()

    def allocate(self, nbytes: int, alignment: int) -> Block | None:
        """A block with a descriptor; the library aligns to pages at most, so room is left."""
        base = self._alloc(_SYSTEM_HEAP, _CACHED, nbytes + alignment)
        if not base:
            return None
        fd = self._to_fd(base)
        if fd < 0:  # no processor could map it
            self._free(base)
            return None
        return Block(base, -(-base // alignment) * alignment, fd)

    def bind(self, block: Block) -> None:
        """Nothing to do: a delegate asks for the descriptor."""

    def free(self, block: Block) -> None:
        """Give the block back; its descriptor closes with it."""
        self._free(block.base)


class RpcmemAllocator:
    """Buffers that Qualcomm's processors can map.

    Args:
        source: Where blocks come from; None looks for it at the first request.
    """

    name = "rpcmem"

    def __init__(self, source: Source | None = None) -> None:
        self._source = source
        self._looked = source is not None

    def allocate(self, nbytes: int, alignment: int = ALIGNMENT) -> Buffer | None:
        """A zeroed buffer, or None: no library, no memory, or more than 2 GiB."""
        if nbytes + PAD + alignment > MAX_BYTES:
            return None
        source = self._find()
        block = source.allocate(nbytes + PAD, alignment) if source is not None else None
        if block is None:
            return None
        ctypes.memset(block.address, 0, nbytes + PAD)
        return Buffer(block.address, nbytes, alignment, self, "rpcmem", keep=block)

    def bind(self, buffer: Buffer, method: str, direction: Direction, index: int) -> None:
        """Tell the source that a tensor lies in the buffer."""
        if self._source is not None and buffer.keep is not None:
            self._source.bind(buffer.keep)

    def free(self, buffer: Buffer) -> None:
        """Give the block back, once."""
        block, buffer.keep = buffer.keep, None
        if self._source is not None and block is not None:
            self._source.free(block)

    def _find(self) -> Source | None:
        with _starting:
            if not self._looked:
                self._looked = True
                self._source = find_source()
        return self._source


def find_source() -> Source | None:
    """The delegate's functions on Android, else the DSP library where it is, else None."""
    if on_android():
        try:
            return DelegateSource()
        except (OSError, AttributeError):  # no such library, or one without these functions
            pass
    elif not os.path.exists("/dev/fastrpc-cdsp"):
        return None  # a library without the device would fail in ways of its own
    try:
        return DspSource()
    except (OSError, AttributeError):
        return None


def file_descriptor(buffer: Buffer) -> int | None:
    """The descriptor of a buffer of `DspSource`, None for every other one. It is not yours to close."""
    return buffer.keep.fd if isinstance(buffer.keep, Block) else None


_POINTER = ctypes.c_void_p
