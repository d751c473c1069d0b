"""Page-aligned memory of this process."""

from __future__ import annotations

import ctypes
import mmap

from staticlm.runtime.buffers import ALIGNMENT, Buffer, Direction

PAD = 128
"""Readable bytes behind the end: XNNPACK's kernels load whole vectors past a tensor's end."""


class HostAllocator:
    """Anonymous private pages: zeroed, aligned to a page at least, with a padded tail."""

    name = "host"

    def allocate(self, nbytes: int, alignment: int = ALIGNMENT) -> Buffer | None:
        """A zeroed buffer, or None when the system has no such memory."""
        slack = alignment if alignment > mmap.PAGESIZE else 0
        try:
            pages = _pages(nbytes + PAD + slack)
        except (OSError, OverflowError, ValueError, MemoryError):
            return None
        first = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        address = -(-first // alignment) * alignment
        return Buffer(address, nbytes, alignment, self, "host", keep=pages, zeroed=True)

    def bind(self, buffer: Buffer, method: str, direction: Direction, index: int) -> None:
        """Nothing to do: every backend can read the heap."""

    def free(self, buffer: Buffer) -> None:
        """Unmap the pages."""
        pages, buffer.keep = buffer.keep, None
        if pages is not None:
            pages.close()


def _pages(nbytes: int) -> mmap.mmap:
    if hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, nbytes)
