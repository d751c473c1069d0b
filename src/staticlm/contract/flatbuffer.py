"""Bounds-checked reading of flatbuffer tables.

Only what the ExecuTorch schema needs. Every access is checked against the region and charged to a
budget in proportion to its size, so that a hostile file costs no more time than an honest one of
the same length, even where its offsets make tables share or contain each other.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from mmap import mmap

_U8 = struct.Struct("<B")
_I8 = struct.Struct("<b")
_U16 = struct.Struct("<H")
_I32 = struct.Struct("<i")
_U32 = struct.Struct("<I")
_I64 = struct.Struct("<q")
_U64 = struct.Struct("<Q")
_F64 = struct.Struct("<d")

_TABLE_COST = 8
_BUDGET_FACTOR = 16
_BUDGET_FLOOR = 1 << 16


class Malformed(Exception):
    """The bytes are not what their schema says. Callers turn it into an error for users."""


class Region:
    """The first `end` bytes of a buffer, with a budget of bytes that may be read from it."""

    __slots__ = ("_budget", "data", "end")

    def __init__(self, data: bytes | mmap, end: int) -> None:
        self.data = data
        self.end = end
        self._budget = _BUDGET_FACTOR * end + _BUDGET_FLOOR

    def spend(self, nbytes: int) -> None:
        """Charge `nbytes` to the budget."""
        self._budget -= nbytes
        if self._budget < 0:
            raise Malformed("its tables refer to each other more often than an honest file's would")

    def check(self, at: int, nbytes: int, what: str) -> None:
        """Refuse a range that is not inside the region."""
        if at < 0 or nbytes < 0 or at + nbytes > self.end:
            raise Malformed(f"{what} at byte {at} of {nbytes} bytes is outside of {self.end} bytes")

    def number(self, kind: struct.Struct, at: int) -> int:
        """One integer."""
        self.check(at, kind.size, "a number")
        value: int = kind.unpack_from(self.data, at)[0]
        return value

    def u16(self, at: int) -> int:
        """An unsigned 16-bit number."""
        return self.number(_U16, at)

    def u32(self, at: int) -> int:
        """An unsigned 32-bit number."""
        return self.number(_U32, at)

    def i32(self, at: int) -> int:
        """A signed 32-bit number."""
        return self.number(_I32, at)

    def u64(self, at: int) -> int:
        """An unsigned 64-bit number."""
        return self.number(_U64, at)

    def follow(self, at: int) -> int:
        """Where the unsigned relative offset at `at` points."""
        return at + self.u32(at)


class Table:
    """One table. Fields are numbered in the order of their declaration, from 0.

    A union counts for two fields: its type (`u8`) and its value (`table`).
    """

    __slots__ = ("_inline", "_vtable", "_vtable_size", "at", "region")

    def __init__(self, region: Region, at: int) -> None:
        region.spend(_TABLE_COST)
        self.region = region
        self.at = at
        self._vtable = at - region.i32(at)
        self._vtable_size = region.u16(self._vtable)
        self._inline = region.u16(self._vtable + 2)
        if self._vtable_size < 4 or self._vtable_size % 2 or self._inline < 4:
            raise Malformed(f"the table at byte {at} has an impossible field list")
        region.check(self._vtable, self._vtable_size, "a field list")
        region.check(at, self._inline, "a table")

    def place(self, field: int, width: int) -> int | None:
        """Where a field of `width` bytes is stored, or None when the table has it not."""
        slot = 4 + 2 * field
        if slot >= self._vtable_size:
            return None
        offset = self.region.u16(self._vtable + slot)
        if offset == 0:
            return None
        if offset < 4 or offset + width > self._inline:
            raise Malformed(f"field {field} of the table at byte {self.at} is outside of the table")
        return self.at + offset

    def _integer(self, kind: struct.Struct, field: int, default: int) -> int:
        at = self.place(field, kind.size)
        return default if at is None else self.region.number(kind, at)

    def u8(self, field: int, default: int = 0) -> int:
        """An unsigned byte."""
        return self._integer(_U8, field, default)

    def i8(self, field: int, default: int = 0) -> int:
        """A signed byte."""
        return self._integer(_I8, field, default)

    def i32(self, field: int, default: int = 0) -> int:
        """A signed 32-bit number."""
        return self._integer(_I32, field, default)

    def u32(self, field: int, default: int = 0) -> int:
        """An unsigned 32-bit number."""
        return self._integer(_U32, field, default)

    def i64(self, field: int, default: int = 0) -> int:
        """A signed 64-bit number."""
        return self._integer(_I64, field, default)

    def u64(self, field: int, default: int = 0) -> int:
        """An unsigned 64-bit number."""
        return self._integer(_U64, field, default)

    def boolean(self, field: int) -> bool:
        """A boolean; only 0 and 1 are admitted."""
        value = self.u8(field)
        if value > 1:
            raise Malformed(f"a boolean holds {value}")
        return bool(value)

    def f64(self, field: int) -> float:
        """A double."""
        at = self.place(field, 8)
        if at is None:
            return 0.0
        self.region.check(at, 8, "a number")
        value: float = _F64.unpack_from(self.region.data, at)[0]
        return value

    def has(self, field: int) -> bool:
        """Whether an offset field (string, vector, table) is there."""
        return self.place(field, 4) is not None

    def vector(self, field: int, width: int) -> tuple[int, int]:
        """First byte and number of elements of a vector; `(0, 0)` when it is not there."""
        at = self.place(field, 4)
        if at is None:
            return 0, 0
        start = self.region.follow(at)
        count = self.region.u32(start)
        self.region.check(start + 4, count * width, "a vector")
        return start + 4, count

    def numbers(self, field: int, kind: str) -> tuple[int, ...]:
        """A vector of integers; `kind` is a `struct` letter: `B`, `i`, `q`, `Q`."""
        width = struct.calcsize(f"<{kind}")
        start, count = self.vector(field, width)
        self.region.spend(count * width)
        return struct.unpack_from(f"<{count}{kind}", self.region.data, start)

    def doubles(self, field: int) -> tuple[float, ...]:
        """A vector of doubles."""
        start, count = self.vector(field, 8)
        self.region.spend(count * 8)
        return struct.unpack_from(f"<{count}d", self.region.data, start)

    def string(self, field: int) -> str | None:
        """A string, or None when it is not there."""
        start, count = self.vector(field, 1)
        if not start:
            return None
        self.region.spend(count)
        self.region.check(start, count + 1, "a string")
        if self.region.data[start + count] != 0:
            raise Malformed(f"the string at byte {start} has no end mark")
        try:
            return bytes(self.region.data[start : start + count]).decode("utf-8")
        except UnicodeDecodeError:
            raise Malformed(f"the string at byte {start} is not UTF-8") from None

    def table(self, field: int) -> Table | None:
        """A table, or None when it is not there."""
        at = self.place(field, 4)
        return None if at is None else Table(self.region, self.region.follow(at))

    def tables(self, field: int) -> Iterator[Table]:
        """The tables of a vector of tables, in order."""
        start, count = self.vector(field, 4)
        for at in range(start, start + 4 * count, 4):
            yield Table(self.region, self.region.follow(at))
