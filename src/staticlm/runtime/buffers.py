"""Memory that outlives the methods it is bound to, and the hook that it comes from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

Direction = Literal["input", "output", "arena"]


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
    """

    address: int
    nbytes: int
    alignment: int
    allocator: BufferAllocator
    kind: str
    keep: Any = field(default=None, repr=False)
    pins: int = 0
    freed: bool = False

    def view(
        self, dtype: npt.DTypeLike, shape: tuple[int, ...], offset: int = 0
    ) -> npt.NDArray[Any]:
        """A numpy array over this memory (no copy); the array keeps the buffer alive."""
        raise NotImplementedError


@runtime_checkable
class BufferAllocator(Protocol):
    """Where buffers come from. Backend-neutral: nothing here knows a delegate."""

    name: str

    def allocate(self, nbytes: int, alignment: int = 64) -> Buffer | None:
        """A buffer of at least `nbytes`, or None when this allocator cannot: the next one is asked."""
        ...

    def bind(self, buffer: Buffer, method: str, direction: Direction, index: int) -> None:
        """Told when a buffer is bound to a slot of a method."""
        ...

    def free(self, buffer: Buffer) -> None:
        """Give the memory back. Never called while the buffer is bound."""
        ...
