"""Memory that a second process can map by name."""

from __future__ import annotations

import ctypes
import mmap
import sys
from multiprocessing import resource_tracker, shared_memory

from staticlm.errors import Code, RunnerError
from staticlm.runtime.buffers import ALIGNMENT, Buffer, Direction
from staticlm.runtime.host import PAD


class SharedMemoryAllocator:
    """POSIX shared memory (`shm_open`); `Buffer.name` is what `attach` takes in another process.

    The name is removed when the buffer is freed; a process that has it mapped keeps the memory. If
    this process dies, Python's resource tracker removes the names it left.
    """

    name = "shm"

    def allocate(self, nbytes: int, alignment: int = ALIGNMENT) -> Buffer | None:
        """A zeroed buffer, or None when there is no room or the alignment exceeds a page."""
        if alignment > mmap.PAGESIZE:
            return None
        try:
            block = shared_memory.SharedMemory(create=True, size=nbytes + PAD)
        except (OSError, OverflowError, ValueError, MemoryError):
            return None
        return Buffer(
            _address(block), nbytes, alignment, self, "shm", keep=(block, True), name=block.name
        )

    def attach(self, name: str, nbytes: int) -> Buffer:
        """Map a buffer that another process made. Freeing it leaves the maker's memory alone.

        Raises:
            RunnerError: `BUFFER_INVALID` when there is no such memory or it is too small.
        """
        try:
            block = _open(name)
        except (OSError, ValueError) as error:
            raise RunnerError(
                Code.BUFFER_INVALID,
                f"shared memory {name!r} cannot be mapped",
                found=str(error),
                remedy="The process that made it may have freed it.",
            ) from error
        if block.size < nbytes:
            found = block.size
            block.close()
            raise RunnerError(
                Code.BUFFER_INVALID,
                f"shared memory {name!r} is too small",
                found=f"{found} bytes",
                expected=f"at least {nbytes}",
            )
        return Buffer(
            _address(block), nbytes, ALIGNMENT, self, "shm", keep=(block, False), name=block.name
        )

    def bind(self, buffer: Buffer, method: str, direction: Direction, index: int) -> None:
        """Nothing to do: the pages are ordinary memory to every backend."""

    def free(self, buffer: Buffer) -> None:
        """Unmap the pages, and remove the name if this process made it."""
        if buffer.keep is None:
            return
        (block, made_here), buffer.keep = buffer.keep, None
        block.close()
        if made_here:
            block.unlink()


def _address(block: shared_memory.SharedMemory) -> int:
    assert block.buf is not None  # set until close()
    return ctypes.addressof(ctypes.c_char.from_buffer(block.buf))


def _open(name: str) -> shared_memory.SharedMemory:
    """Open by name without making this process responsible for removing it."""
    if sys.version_info >= (3, 13):
        return shared_memory.SharedMemory(name=name, track=False)
    block = shared_memory.SharedMemory(name=name)
    # Before 3.13 an attached block is registered for removal at exit, under its POSIX name.
    resource_tracker.unregister(f"/{block.name}", "shared_memory")
    return block
