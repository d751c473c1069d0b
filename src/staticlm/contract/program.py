"""What a `.pte` file holds, read from its flatbuffer without ExecuTorch or torch."""

from __future__ import annotations

import mmap
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from staticlm.contract.flatbuffer import Malformed, Region, Table
from staticlm.contract.program_calls import read_calls
from staticlm.contract.program_facts import (
    DelegateFacts,
    MethodFacts,
    ProgramFacts,
    TensorFacts,
)
from staticlm.contract.program_values import (
    ConstantData,
    Tensor,
    Value,
    check_value,
    constant_of,
    read_value,
)
from staticlm.errors import Code, ProgramError

__all__ = [
    "DelegateFacts",
    "Header",
    "MethodFacts",
    "ProgramFacts",
    "TensorFacts",
    "read_header",
    "read_program",
]

IDENTIFIER = b"ET12"
_DATA_IDENTIFIER = b"FT01"
_HEADER_MAGIC = b"eh00"
_HEADER_AT = 8
_HEADER_MIN = 24
_HEADER_FULL = 32
_REMEDY = "Export it again, or copy it again if the copy was cut short."


@dataclass(frozen=True)
class Header:
    """Where the parts of the file lie.

    Args:
        program_size: Bytes of the flatbuffer, the extended header included.
        segment_base: First byte of the segments' area; 0 when there is no extended header.
        segment_bytes: Size of that area as the header states it; 0 when it does not.
    """

    program_size: int
    segment_base: int
    segment_bytes: int


def read_program(path: str | Path) -> ProgramFacts:
    """Read a program file.

    Every table, index, segment, arena and constant that the file refers to is checked; nothing is
    executed and no weight is read.

    Raises:
        ProgramError: `PROGRAM_NOT_FOUND`, or `PROGRAM_MALFORMED` for anything that is not a whole,
            sane `.pte`.
    """
    path = Path(path)
    descriptor = _open(path)
    try:
        size = os.fstat(descriptor).st_size
        if size < _HEADER_AT + _HEADER_FULL:
            raise Malformed(f"it has only {size} bytes")
        with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).facts()
    except Malformed as error:
        raise _malformed(path, str(error)) from None
    except (OSError, ValueError) as error:
        raise _malformed(path, f"it cannot be read ({error})") from None
    finally:
        os.close(descriptor)


def read_header(data: bytes | mmap.mmap) -> Header:
    """The identifier and the extended header of a program. Raises `Malformed`."""
    found = bytes(data[4:8])
    if found == _DATA_IDENTIFIER:
        raise Malformed("it is a data file (.ptd), not a program")
    if found != IDENTIFIER:
        raise Malformed(f"its identifier is {found!r}, not {IDENTIFIER!r}")
    region = Region(data, len(data))
    if bytes(data[_HEADER_AT : _HEADER_AT + 4]) != _HEADER_MAGIC:
        # Finished flatbuffers are padded to whole words.
        if len(data) % 4:
            raise Malformed(f"its size, {len(data)} bytes, is not a whole number of words")
        return Header(len(data), 0, 0)
    length = region.u32(_HEADER_AT + 4)
    if length < _HEADER_MIN:
        raise Malformed(f"its extended header has {length} bytes")
    program_size = region.u64(_HEADER_AT + 8)
    base = region.u64(_HEADER_AT + 16)
    stated = region.u64(_HEADER_AT + 24) if length >= _HEADER_FULL else 0
    if not _HEADER_AT + length <= program_size <= len(data):
        raise Malformed(f"its program has {program_size} bytes, the file {len(data)}")
    if base and base < program_size:
        raise Malformed(f"its segments start at byte {base}, inside the program")
    if base + stated > len(data):
        raise Malformed(f"its segments end at byte {base + stated}, the file at {len(data)}")
    return Header(program_size, base, stated)


def _open(path: Path) -> int:
    try:
        # Opening a pipe would wait for its other end.
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        descriptor = os.open(path, flags)
    except PermissionError as error:
        if path.is_dir():
            raise _malformed(path, "it is a directory", "Pass the .pte file itself.") from None
        raise _malformed(path, f"it cannot be read ({error.strerror})") from None
    except (OSError, ValueError):
        raise ProgramError(
            Code.PROGRAM_NOT_FOUND,
            f"there is no program file {path}",
            remedy="Check the path, or export the model first.",
        ) from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
        raise _malformed(path, f"it is {kind}", "Pass the .pte file itself.")
    return descriptor


def _malformed(path: Path, why: str, remedy: str = _REMEDY) -> ProgramError:
    return ProgramError(
        Code.PROGRAM_MALFORMED,
        f"{path} is not a program that can be run",
        found=why,
        expected="a whole ExecuTorch .pte file",
        remedy=remedy,
    )


class _Reader:
    """One pass over an open file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.header = read_header(data)
        self.region = Region(data, self.header.program_size)
        self.program = Table(self.region, self.region.follow(0))
        self.segments = self._segments()
        self.inline_delegates = [t.vector(0, 1)[1] for t in self.program.tables(3)]
        self.constant_segment, self.constants = self._constants()
        self.mutable = [self._subsegments(table) for table in self.program.tables(6)]
        self.external: dict[str, None] = {}

    def facts(self) -> ProgramFacts:
        methods: dict[str, MethodFacts] = {}
        constants: dict[str, object] = {}
        for plan in self.program.tables(1):
            name = plan.string(0)
            if not name:
                raise Malformed("a method has no name")
            if name in methods or name in constants:
                raise Malformed(f"it has two methods named {name!r}")
            method, (is_constant, value) = self._plan(name, plan)
            if is_constant:
                constants[name] = value
            else:
                methods[name] = method
        if not methods and not constants:
            raise Malformed("it has no methods")
        named = self._named_data()
        return ProgramFacts(
            path=self.path,
            nbytes=len(self.data),
            methods=methods,
            constants=constants,
            constant_bytes=self._constant_bytes(),
            named_data={key: self.segments[index][1] for key, index in named.items()},
            segments=len(self.segments),
            segment_ranges=self.segments,
            named_segments=named,
            constant_segment=self.constant_segment,
            external_data=tuple(self.external),
        )

    def _segments(self) -> tuple[tuple[int, int], ...]:
        base, stated = self.header.segment_base, self.header.segment_bytes
        found = []
        for index, table in enumerate(self.program.tables(4)):
            offset, size = table.u64(0), table.u64(1)
            # A program without any data has one empty segment and no extended header.
            if not base and size:
                raise Malformed("it has segments but no extended header")
            end = base + offset + size
            if end > len(self.data) or (stated and offset + size > stated):
                raise Malformed(f"segment {index} ends at byte {end}, the file at {len(self.data)}")
            found.append((base + offset, size))
        return tuple(found)

    def _segment(self, index: int, what: str) -> tuple[int, int]:
        if index >= len(self.segments):
            raise Malformed(f"{what} refers to segment {index} of {len(self.segments)}")
        return self.segments[index]

    def _subsegments(self, table: Table) -> tuple[tuple[int, int], ...]:
        """First byte and last possible byte of each tensor of a segment."""
        offsets = table.numbers(1, "Q")
        start, size = self._segment(table.u32(0), "a list of tensors")
        if offsets and max(offsets) > size:
            raise Malformed(f"a tensor starts at byte {max(offsets)} of a segment of {size}")
        return tuple((start + offset, start + size) for offset in offsets)

    def _constants(self) -> tuple[int | None, ConstantData]:
        table = self.program.table(5)
        inline = [buffer.vector(0, 1) for buffer in self.program.tables(2)]
        if table is None or not table.vector(1, 8)[1]:
            spans = tuple((start, start + count) for start, count in inline)
            return None, ConstantData(self.data, spans)
        if inline:
            raise Malformed("its constants are both inline and in a segment")
        index = table.u32(0)
        offsets = table.numbers(1, "Q")
        if len(offsets) == 1:
            # Entry 0 stands for "no data": there are no constants.
            return None, ConstantData(self.data, ((0, 0),))
        return index, ConstantData(self.data, self._subsegments(table))

    def _constant_bytes(self) -> int:
        if self.constant_segment is not None:
            return self.segments[self.constant_segment][1]
        return sum(end - start for start, end in self.constants.spans)

    def _named_data(self) -> dict[str, int]:
        named: dict[str, int] = {}
        for table in self.program.tables(7):
            key, index = table.string(0), table.u32(1)
            if not key or key in named:
                raise Malformed(f"named data has no name or the name of another: {key!r}")
            self._segment(index, f"named data {key!r}")
            named[key] = index
        return named

    def _plan(self, name: str, plan: Table) -> tuple[MethodFacts, tuple[bool, object]]:
        arenas = plan.numbers(8, "q")
        if min(arenas, default=0) < 0:
            raise Malformed(f"method {name!r} has an arena of {min(arenas)} bytes")
        values = tuple(read_value(entry) for entry in plan.tables(2))
        for value in values:
            check_value(value, values, arenas, self.constants)
            if isinstance(value, Tensor):
                self._check_initial(value)
        inputs = self._indexes(plan.numbers(3, "i"), len(values), name)
        outputs = self._indexes(plan.numbers(4, "i"), len(values), name)
        first = {value: index for index, value in reversed(list(enumerate(inputs)))}
        delegates = tuple(self._delegate(table) for table in plan.tables(7))
        names = [_operator(table) for table in plan.tables(6)]
        operators, delegate_calls, instructions = read_calls(
            name, plan, names, len(delegates), values, frozenset((*inputs, *outputs))
        )
        self._check_strings(plan)
        method = MethodFacts(
            name=name,
            inputs=tuple(_tensor_facts(values[i]) for i in inputs),
            outputs=tuple(_tensor_facts(values[i]) for i in outputs),
            aliases={out: first[value] for out, value in enumerate(outputs) if value in first},
            delegates=delegates,
            delegate_calls=delegate_calls,
            operators=operators,
            arenas=arenas[1:],
            instructions=instructions,
        )
        if inputs or instructions or not outputs:
            return method, (False, None)
        known, items = [], []
        self.constants.spend(len(outputs))
        for index in outputs:
            is_known, item = constant_of(values[index], values, self.constants)
            known.append(is_known)
            items.append(item)
        return method, (all(known), items[0] if len(items) == 1 else tuple(items))

    def _check_initial(self, tensor: Tensor) -> None:
        """Note a tensor of another file; check where an initialised mutable one comes from."""
        if tensor.external is not None:
            self.external[tensor.external] = None
        elif tensor.arena is not None and tensor.buffer > 0:
            if tensor.mutable_segment >= len(self.mutable):
                raise Malformed("a tensor's initial data is in a segment that is not there")
            ConstantData(self.data, self.mutable[tensor.mutable_segment]).check(tensor)

    @staticmethod
    def _indexes(found: tuple[int, ...], count: int, name: str) -> tuple[int, ...]:
        if found and not 0 <= min(found) <= max(found) < count:
            raise Malformed(f"method {name!r} refers to a value outside of {count} values")
        return found

    def _delegate(self, table: Table) -> DelegateFacts:
        backend = table.string(0)
        processed = table.table(1)
        if not backend or processed is None:
            raise Malformed("a delegate has no backend or no data")
        location, index = processed.i8(0), processed.u32(1)
        if location == 1:
            nbytes = self._segment(index, f"a delegate of {backend}")[1]
        elif location == 0 and index < len(self.inline_delegates):
            nbytes = self.inline_delegates[index]
        else:
            raise Malformed(f"a delegate of {backend} has its data nowhere")
        options = []
        for option in table.tables(2):
            options.append(option.string(0) or "")
            option.vector(1, 1)
        return DelegateFacts(backend, nbytes, tuple(options))

    @staticmethod
    def _check_strings(plan: Table) -> None:
        """Parts that say nothing to us, looked at because a cut file may be cut there."""
        container = plan.table(1)
        if container is not None:
            container.string(0)
            container.string(1)
        for device in plan.tables(9):
            device.i32(0)


def _operator(table: Table) -> str:
    name, overload = table.string(0), table.string(1)
    if not name:
        raise Malformed("an operator has no name")
    return f"{name}.{overload}" if overload else name


def _tensor_facts(value: Value) -> TensorFacts | None:
    return value.facts if isinstance(value, Tensor) else None
