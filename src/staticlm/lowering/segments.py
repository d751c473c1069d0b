"""Store equal data of a program file once.

ExecuTorch keeps a tied embedding twice: as a constant tensor for the lookup and as a named blob for
the delegate that holds the head. Data segments are only (offset, size) pairs, so the second one can
point into the first. This is a pass over the finished file: numbers in its tables are changed in
place, and segments are moved; no table is rebuilt.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from mmap import ACCESS_READ, mmap
from pathlib import Path

from staticlm.contract.flatbuffer import Region, Table
from staticlm.contract.program import Header, read_header, read_program
from staticlm.errors import Code, LoweringError

_MIN_BYTES = 1024
"""Smaller data is not worth the padding that sharing it may cost."""

_CHUNK = 1 << 22
_MAX_ALIGNMENT = 4096
_BASE_ALIGNMENT = 128


class _Fixed(Exception):
    """The file's tables have no room for the numbers that would have to change."""


@dataclass
class _Piece:
    """Bytes that are stored once: where they come from, how they are aligned, where they go.

    Offsets are relative to the start of the segments, except `source`, which is in the input file.
    """

    source: int
    size: int
    alignment: int
    target: int = 0


@dataclass
class _Segment:
    """A data segment: its place in the input and the pieces it is made of in the output.

    An own segment has one piece; the constant segment one for each tensor; a shared one refers to a
    piece of another.
    """

    start: int
    size: int
    table: Table
    pieces: list[_Piece]
    shared: _Piece | None = None


def share_identical_segments(path_in: str | Path, path_out: str | Path) -> int:
    """Write a copy of a program in which equal data segments are stored once.

    Named data that equals another segment, or the start of a constant tensor, becomes a view of it;
    so does named data that is a constant tensor and zeros after it. The alignment of every segment
    and tensor stays what it was or gets larger. The copy is written under a temporary name and renamed;
    `path_out` may be `path_in`. Where nothing can be shared the copy is the same bytes.

    Returns:
        How many bytes the copy is smaller.

    Raises:
        ProgramError: `path_in` is not a whole program.
        LoweringError: `LOWERING_FAILED` when the copy cannot be written.
    """
    path_in, path_out = Path(path_in), Path(path_out)
    read_program(path_in)
    with path_in.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        mode = os.fstat(file.fileno()).st_mode & 0o777
        header = read_header(data)
        try:
            plan = _Plan(data, header)
            end = plan.arrange()
            saved = len(data) - (header.segment_base + end)
            tables = plan.tables(end) if saved > 0 else None
        except _Fixed:
            tables = None
        if tables is None:
            if path_out.exists() and path_out.samefile(path_in):
                return 0
            _write(path_out, mode, _chunks(data, 0, len(data)))
            return 0
        _write(path_out, mode, plan.stream(tables))
    return saved


def repeated_bytes(path: str | Path) -> int:
    """How many bytes `share_identical_segments` would save; nothing is written.

    Raises:
        ProgramError: `path` is not a whole program.
    """
    read_program(path)
    with Path(path).open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        header = read_header(data)
        try:
            return max(0, len(data) - header.segment_base - _Plan(data, header).arrange())
        except _Fixed:
            return 0


class _Plan:
    """Which segment shares which bytes, and where everything goes."""

    def __init__(self, data: mmap, header: Header) -> None:
        self.data = data
        self.header = header
        region = Region(data, header.program_size)
        program = Table(region, region.follow(0))
        self.segments: list[_Segment] = []
        for table in program.tables(4):
            start, size = header.segment_base + table.u64(0), table.u64(1)
            piece = _Piece(start, size, _alignment(table.u64(0)))
            self.segments.append(_Segment(start, size, table, [piece]))
        if not header.segment_base or len({s.table.at for s in self.segments}) < len(self.segments):
            raise _Fixed
        self._split_constants(program)
        named = {table.u32(1) for table in program.tables(7)}
        self._share_whole()
        self._share_constants(named)

    def _split_constants(self, program: Table) -> None:
        """Cut the constant segment at the start of each tensor."""
        self.constants: _Segment | None = None
        self.offsets_at = 0
        self.offsets: tuple[int, ...] = ()
        self.cuts: list[int] = []
        table = program.table(5)
        if table is None or table.vector(1, 8)[1] < 2:
            return
        constants = self.segments[table.u32(0)]
        if not constants.size:
            return
        self.constants = constants
        self.offsets_at = table.vector(1, 8)[0]
        self.offsets = table.numbers(1, "Q")
        self.cuts = sorted({0, *self.offsets, constants.size})
        constants.pieces = [
            _Piece(constants.start + cut, after - cut, min(_alignment(cut), _BASE_ALIGNMENT))
            for cut, after in pairwise(self.cuts)
        ]
        # Tensors are aligned from the start of their segment: that must not be less aligned.
        first = constants.pieces[0]
        first.alignment = max(_alignment(constants.start - self._base), _BASE_ALIGNMENT)

    @property
    def _base(self) -> int:
        return self.header.segment_base

    def _share_whole(self) -> None:
        """Let every segment that equals an earlier one refer to that one."""
        seen: dict[tuple[int, bytes], list[_Segment]] = {}
        for segment in self.segments:
            if segment.size < _MIN_BYTES or segment is self.constants:
                continue
            group = seen.setdefault((segment.size, self._prefix(segment.start)), [])
            for earlier in group:
                if self._equal(earlier.start, segment.start, segment.size):
                    segment.shared = earlier.pieces[0]
                    earlier.pieces[0].alignment = max(
                        earlier.pieces[0].alignment, segment.pieces[0].alignment
                    )
                    break
            else:
                group.append(segment)

    def _share_constants(self, named: set[int]) -> None:
        """Let named data that equals the start of a constant tensor refer to the tensor."""
        if self.constants is None:
            return
        tensors: dict[bytes, list[_Piece]] = {}
        for piece in self.constants.pieces:
            if piece.size >= _MIN_BYTES:
                tensors.setdefault(self._prefix(piece.source), []).append(piece)
        moved: dict[int, _Piece] = {}
        for index in sorted(named):
            segment = self.segments[index]
            own = segment.pieces[0]
            if segment is self.constants or segment.size < _MIN_BYTES or segment.shared is not None:
                continue
            for piece in tensors.get(self._prefix(segment.start), ()):
                if self._equal(piece.source, segment.start, min(piece.size, segment.size)):
                    if segment.size > piece.size:
                        # The blob is the tensor and its padding and more: the tensor moves into it.
                        piece.source, piece.size = segment.start, segment.size
                    piece.alignment = max(piece.alignment, own.alignment)
                    segment.shared = moved[id(own)] = piece
                    break
        for segment in self.segments:
            if segment.shared is not None:
                segment.shared = moved.get(id(segment.shared), segment.shared)

    def arrange(self) -> int:
        """Give every piece its place; returns the end of the last one."""
        end = 0
        for segment in sorted(self.segments, key=lambda s: s.start):
            if segment.shared is None and segment.size:
                for piece in segment.pieces:
                    piece.target = _align(end, piece.alignment)
                    end = piece.target + piece.size
        return end

    def tables(self, end: int) -> bytearray:
        """The program's tables with the new numbers."""
        tables = bytearray(self.data[: self.header.program_size])
        for segment in self.segments:
            home = segment.shared or segment.pieces[0]
            last = segment.pieces[-1]
            size = segment.size if segment.shared else last.target + last.size - home.target
            _put(tables, segment.table.place(0, 8), home.target if segment.size else 0)
            _put(tables, segment.table.place(1, 8), size if segment.size else 0)
        if self.constants is not None:
            first, last = self.constants.pieces[0], self.constants.pieces[-1]
            places = [piece.target - first.target for piece in self.constants.pieces]
            places.append(last.target + last.size - first.target)
            where = dict(zip(self.cuts, places, strict=True))
            for index, offset in enumerate(self.offsets):
                _put(tables, self.offsets_at + 8 * index, where[offset])
        if self.header.segment_bytes:
            _put(tables, 32, end)
        return tables

    def stream(self, tables: bytearray) -> Iterator[bytes]:
        """The whole new file, in chunks."""
        yield bytes(tables)
        at = len(tables)
        pieces = {
            id(piece): piece
            for segment in self.segments
            if segment.shared is None and segment.size
            for piece in segment.pieces
        }
        for piece in sorted(pieces.values(), key=lambda p: p.target):
            yield bytes(self._base + piece.target - at)
            yield from _chunks(self.data, piece.source, piece.size)
            at = self._base + piece.target + piece.size

    def _prefix(self, start: int) -> bytes:
        return blake2b(self.data[start : start + _MIN_BYTES], digest_size=16).digest()

    def _equal(self, first: int, second: int, size: int) -> bool:
        return all(
            one == other
            for one, other in zip(
                _chunks(self.data, first, size), _chunks(self.data, second, size), strict=True
            )
        )


def _alignment(offset: int) -> int:
    """The largest power of two that divides an offset, within reason."""
    return min(offset & -offset, _MAX_ALIGNMENT) if offset else _BASE_ALIGNMENT


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _put(tables: bytearray, at: int | None, value: int) -> None:
    """Store a 64-bit number; a field that is left out of its table can only stay zero."""
    if at is None:
        if value:
            raise _Fixed
        return
    tables[at : at + 8] = value.to_bytes(8, "little")


def _chunks(data: mmap, start: int, size: int) -> Iterator[bytes]:
    for at in range(start, start + size, _CHUNK):
        yield data[at : min(at + _CHUNK, start + size)]


def _write(path: Path, mode: int, chunks: Iterator[bytes]) -> None:
    """Write a file under a temporary name next to it, then rename it."""
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            temporary = file.name
            file.writelines(chunks)
        read_program(temporary)
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except OSError as error:
        raise LoweringError(
            Code.LOWERING_FAILED,
            f"the program {path} cannot be written",
            found=error.strerror or str(error),
            remedy="Check that the directory is there, may be written, and has room.",
        ) from None
    finally:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
