"""Allocators asked in turn, the heap last, with a count of what each one has out."""

from __future__ import annotations

from collections.abc import Sequence

from staticlm.runtime.buffers import (
    ALIGNMENT,
    Buffer,
    BufferAllocator,
    Direction,
    Tally,
    check_answer,
    check_request,
)
from staticlm.runtime.host import HostAllocator


class ChainAllocator:
    """The first allocator that can serves; the heap is always the last one.

    A refusal (None) moves on to the next; an exception propagates; a buffer that is too small or
    misaligned is given back and refused by name. `Buffer.allocator` is the allocator that served,
    so that a buffer is always freed by its maker.
    """

    def __init__(self, allocators: Sequence[BufferAllocator] = ()) -> None:
        chain = list(allocators)
        if not any(isinstance(one, HostAllocator) for one in chain[-1:]):
            chain.append(HostAllocator())
        self._links = [(one, Tally(one.name)) for one in chain]
        self.name = "+".join(one.name for one in chain)

    def allocate(self, nbytes: int, alignment: int = ALIGNMENT) -> Buffer | None:
        """A buffer of the first allocator that can, or None when even the heap cannot."""
        check_request(nbytes, alignment)
        for allocator, tally in self._links:
            buffer = allocator.allocate(nbytes, alignment)
            if buffer is not None:
                check_answer(allocator, buffer, nbytes, alignment)
                tally.add(buffer)
                return buffer
        return None

    def bind(self, buffer: Buffer, method: str, direction: Direction, index: int) -> None:
        """Pass on to the allocator that made the buffer."""
        buffer.allocator.bind(buffer, method, direction, index)

    def free(self, buffer: Buffer) -> None:
        """Pass on to the allocator that made the buffer."""
        buffer.allocator.free(buffer)

    @property
    def tallies(self) -> tuple[Tally, ...]:
        """Live and served buffers of each allocator, in the order they are asked."""
        return tuple(tally for _, tally in self._links)
