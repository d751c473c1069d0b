"""Memory that outlives the methods it is bound to, and the hook that it comes from.

`allocate` and `free` are the two ways in and out. A buffer that is bound to a method is *pinned*
and cannot be freed; memory under a live numpy view is given back when the last view dies, so that a
view never dangles; a buffer that is simply dropped gives its memory back too.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from staticlm.errors import Code, RunnerError

Direction = Literal["input", "output", "arena"]

ALIGNMENT = 64
"""The alignment of caches and arenas: one cache line, and what XNNPACK's widest kernels like."""


@dataclass(eq=False)
class Buffer:
    """A block of memory from one allocator.

    Args:
        address: First byte.
        nbytes: Usable bytes.
        alignment: What `address` is a multiple of.
        allocator: The allocator that made it and must free it.
        kind: `host`, `shm`, `rpcmem`, ...
        keep: Whatever owns the memory.
        pins: Live bindings; it cannot be freed while there are any.
        freed: Set by `free`: no new views, no new bindings.
        name: How another process finds the memory, where it can.
        tally: Where it is counted while it lives.
        zeroed: Nothing but zeros when it was made, and no memory taken for them yet where the system
            gives it on first use.
    """

    address: int
    nbytes: int
    alignment: int
    allocator: BufferAllocator
    kind: str
    keep: Any = field(default=None, repr=False)
    pins: int = 0
    freed: bool = False
    name: str | None = None
    tally: Tally | None = field(default=None, repr=False)
    zeroed: bool = False
    _views: int = field(default=0, init=False, repr=False)
    _released: bool = field(default=False, init=False, repr=False)

    def view(
        self, dtype: npt.DTypeLike, shape: tuple[int, ...], offset: int = 0
    ) -> npt.NDArray[Any]:
        """A numpy array over this memory (no copy); the array keeps the memory alive.

        Raises:
            RunnerError: `BUFFER_INVALID` when the buffer was freed or the view is out of range.
        """
        kind = np.dtype(dtype)
        self.check_range(offset, prod(shape) * kind.itemsize, f"a view {kind.name}{list(shape)}")
        self._views += 1
        # Weak: the list of finalizers must not keep alive what only a garbage cycle still holds.
        return array_at(self.address + offset, kind, shape, self, _drop_view, weakref.ref(self))

    def check_range(self, offset: int, nbytes: int, purpose: str) -> None:
        """Refuse a use of this memory after `free`, or beyond its end."""
        if self.freed:
            raise RunnerError(
                Code.BUFFER_INVALID,
                f"{purpose} needs memory that was freed",
                remedy="Allocate a new buffer.",
            )
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise RunnerError(
                Code.BUFFER_INVALID,
                f"{purpose} is out of the range of its buffer",
                found=f"bytes {offset} to {offset + nbytes}",
                expected=f"within 0 to {self.nbytes}",
            )

    def _release(self) -> None:
        if not self._released:
            self._released = True
            if self.tally is not None:
                self.tally.remove(self)
            self.allocator.free(self)

    def __del__(self) -> None:
        # Dropped without `free`: nothing refers to the memory any more, or we would not be here.
        if not self._released and "allocator" in self.__dict__:
            if self.tally is not None and not self.freed:
                self.tally.dropped += 1
            self.freed = True
            self._release()


@runtime_checkable
class BufferAllocator(Protocol):
    """Where buffers come from. Backend-neutral: nothing here knows a delegate."""

    name: str

    def allocate(self, nbytes: int, alignment: int = ALIGNMENT) -> Buffer | None:
        """A buffer of at least `nbytes`, or None when it cannot: the next one is asked."""
        ...

    def bind(self, buffer: Buffer, method: str, direction: Direction, index: int) -> None:
        """Told when a buffer is bound to a slot of a method."""
        ...

    def free(self, buffer: Buffer) -> None:
        """Give the memory back. Never called while the buffer is bound; called once per buffer."""
        ...


@dataclass(eq=False)
class Tally:
    """How many buffers of one allocator are alive; what is left after a close is a leak."""

    name: str
    buffers: int = 0
    nbytes: int = 0
    served: int = 0
    """Buffers ever made."""
    dropped: int = 0
    """Buffers that were collected without a `free`."""
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def add(self, buffer: Buffer) -> None:
        """Count a new buffer."""
        with self._lock:
            self.buffers += 1
            self.nbytes += buffer.nbytes
            self.served += 1
        buffer.tally = self

    def remove(self, buffer: Buffer) -> None:
        """Count a buffer whose memory goes back."""
        with self._lock:
            self.buffers -= 1
            self.nbytes -= buffer.nbytes


def allocate(allocator: BufferAllocator, nbytes: int, alignment: int = ALIGNMENT) -> Buffer:
    """A buffer of at least `nbytes`, or an error that says who was asked.

    Raises:
        RunnerError: `BUFFER_INVALID` for a size or an alignment that makes no sense, or for an
            allocator that answered with something else than it was asked for (which is given back);
            `ALLOCATION_FAILED` when it cannot.
    """
    check_request(nbytes, alignment)
    buffer = allocator.allocate(nbytes, alignment)
    if buffer is None:
        raise RunnerError(
            Code.ALLOCATION_FAILED,
            f"allocator {allocator.name!r} has no memory",
            expected=f"{nbytes} bytes aligned to {alignment}",
            remedy="Use a program with a smaller context, or another allocator.",
        )
    check_answer(allocator, buffer, nbytes, alignment)
    return buffer


def free(buffer: Buffer) -> None:
    """Give a buffer back: at once, or when its last numpy view dies.

    Raises:
        RunnerError: `BUFFER_INVALID` when it is still bound to a method, or was freed before.
    """
    if buffer.freed:
        raise RunnerError(Code.BUFFER_INVALID, f"a {buffer.kind} buffer was freed twice")
    if buffer.pins:
        raise RunnerError(
            Code.BUFFER_INVALID,
            f"a {buffer.kind} buffer of {buffer.nbytes} bytes is still bound",
            found=f"{buffer.pins} live bindings",
            expected="none",
            remedy="Close the methods that use it first.",
        )
    buffer.freed = True
    if buffer._views == 0:
        buffer._release()


def check_request(nbytes: int, alignment: int) -> None:
    """Refuse sizes that are not positive and alignments that are not powers of two."""
    if nbytes <= 0:
        raise RunnerError(
            Code.BUFFER_INVALID,
            "a buffer cannot have this size",
            found=nbytes,
            expected="> 0 bytes",
        )
    if alignment <= 0 or alignment & (alignment - 1):
        raise RunnerError(
            Code.BUFFER_INVALID,
            "a buffer cannot have this alignment",
            found=alignment,
            expected="a power of two",
        )


def check_answer(allocator: BufferAllocator, buffer: object, nbytes: int, alignment: int) -> None:
    """Refuse what an allocator answered with if it is not what was asked for, and give it back."""
    if not isinstance(buffer, Buffer):
        raise RunnerError(
            Code.BUFFER_INVALID,
            f"allocator {allocator.name!r} did not return a buffer",
            found=type(buffer).__name__,
            expected="Buffer or None",
        )
    if buffer.nbytes < nbytes:
        found, expected = f"{buffer.nbytes} bytes", f"at least {nbytes}"
    elif buffer.address == 0 or buffer.address % alignment:
        found, expected = f"address {buffer.address:#x}", f"a multiple of {alignment}"
    else:
        return
    if not buffer.freed:
        free(buffer)
    raise RunnerError(
        Code.BUFFER_INVALID,
        f"allocator {allocator.name!r} returned a buffer that does not fit the request",
        found=found,
        expected=expected,
        remedy="This is a fault of the allocator; the buffer was given back.",
    )


def array_at(
    address: int,
    dtype: npt.DTypeLike,
    shape: tuple[int, ...],
    owner: object,
    on_drop: Callable[..., None] | None = None,
    *arguments: object,
) -> npt.NDArray[Any]:
    """A numpy array over foreign memory that holds `owner`; `on_drop` is called when it is gone."""
    kind = np.dtype(dtype)
    count = prod(shape) * kind.itemsize
    block: Any = (ctypes.c_char * count).from_address(address)
    block._owner = owner  # ctypes arrays take attributes
    if on_drop is not None:
        weakref.finalize(block, on_drop, *arguments).atexit = False
    array: npt.NDArray[Any] = np.ndarray(shape, dtype=kind, buffer=block)
    return array


def _drop_view(reference: weakref.ref[Buffer]) -> None:
    buffer = reference()
    if buffer is not None:
        buffer._views -= 1
        if buffer.freed and buffer._views == 0:
            buffer._release()
