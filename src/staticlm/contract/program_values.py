"""The values of an ExecuTorch execution plan: tensors, scalars, lists."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from mmap import mmap

from staticlm.contract.flatbuffer import Malformed, Table
from staticlm.contract.program_facts import SCALAR_TYPES, TensorFacts

MAX_RANK = 16
"""ExecuTorch's own limit of tensor dimensions."""

MAX_CONSTANT_ELEMENTS = 1 << 16
"""Constant methods' tensors with more elements are described, not read."""

MAX_CONSTANTS_TOTAL = 1 << 20
"""More values in all constant methods together are refused."""

_MAX_BYTES = (1 << 63) - 1
_TENSOR_LISTS = (10, 11)
_ELEMENT = {
    "uint8": "B",
    "int8": "b",
    "int16": "h",
    "uint16": "H",
    "int32": "i",
    "uint32": "I",
    "int64": "q",
    "uint64": "Q",
    "float16": "e",
    "bfloat16": "H",
    "float32": "f",
    "float64": "d",
    "bool": "?",
}


@dataclass(frozen=True)
class Null:
    """The value None."""


@dataclass(frozen=True)
class Scalar:
    """An int, float, bool or str, or a list of floats or bools."""

    value: int | float | bool | str | tuple[float, ...] | tuple[bool, ...]


@dataclass(frozen=True)
class References:
    """A list of other values of the plan; an index of -1 stands for None.

    `tensors` tells lists of tensors from lists of integers.
    """

    indexes: tuple[int, ...]
    tensors: bool


@dataclass(frozen=True)
class Tensor:
    """A tensor and where its memory is.

    `buffer` is its index among the constant (or initialised mutable) tensors, 0 for none; `arena`
    is `(arena index, byte offset)` for a planned one; `mutable_segment` selects the initial data;
    `external` names data in another file.
    """

    facts: TensorFacts
    buffer: int
    arena: tuple[int, int] | None
    mutable_segment: int
    external: str | None

    @property
    def placed(self) -> bool:
        """Whether the file says where its memory is, or leaves that to the run."""
        facts = self.facts
        return facts.planned or facts.constant or facts.dynamic or facts.nbytes == 0


Value = Null | Scalar | References | Tensor


class ConstantData:
    """The constant tensors of a program, and how many elements of them may still be read.

    Args:
        data: The file.
        spans: First byte of each constant and where it must end, by buffer index; entry 0 stands
            for "no data".
    """

    def __init__(self, data: mmap, spans: tuple[tuple[int, int], ...]) -> None:
        self.data = data
        self.spans = spans
        self._left = MAX_CONSTANTS_TOTAL

    def check(self, tensor: Tensor) -> int:
        """First byte of a constant tensor, after checking that all of it is there."""
        if tensor.buffer >= len(self.spans):
            raise Malformed(
                f"a tensor refers to constant {tensor.buffer} of {max(0, len(self.spans) - 1)}"
            )
        start, end = self.spans[tensor.buffer]
        if start + tensor.facts.nbytes > end:
            raise Malformed(
                f"constant {tensor.buffer} needs {tensor.facts.nbytes} bytes and has {end - start}"
            )
        return start

    def spend(self, elements: int) -> None:
        """Charge elements that are turned into Python values."""
        self._left -= elements
        if self._left < 0:
            raise Malformed(f"its constant methods return more than {MAX_CONSTANTS_TOTAL} values")


def read_value(entry: Table) -> Value:
    """One entry of a plan's value list."""
    kind = entry.u8(0)
    body = entry.table(1)
    if kind == 1:
        return Null()
    if body is None:
        raise Malformed(f"a value of type {kind} has no content")
    if kind == 2:
        return Scalar(body.i64(0))
    if kind == 3:
        return Scalar(body.boolean(0))
    if kind == 4:
        return Scalar(body.f64(0))
    if kind == 5:
        return _read_tensor(body)
    if kind == 6:
        return Scalar(body.string(0) or "")
    if kind == 7:
        # The runtime treats integer lists as indexes too: their elements may be symbolic.
        return References(body.numbers(0, "q"), tensors=False)
    if kind == 8:
        return Scalar(body.doubles(0))
    if kind == 9:
        return Scalar(tuple(item != 0 for item in body.numbers(0, "B")))
    if kind in _TENSOR_LISTS:
        return References(body.numbers(0, "i"), tensors=True)
    raise Malformed(f"a value has the unknown type {kind}")


def _read_tensor(body: Table) -> Tensor:
    code = body.i8(0)
    if code not in SCALAR_TYPES:
        raise Malformed(f"a tensor has the unknown scalar type {code}")
    shape = body.numbers(2, "i")
    order = body.numbers(3, "B")
    if len(shape) > MAX_RANK or min(shape, default=0) < 0:
        raise Malformed(f"a tensor has the impossible shape {list(shape[: MAX_RANK + 1])}")
    if sorted(order) != list(range(len(shape))):
        raise Malformed(f"a tensor of {len(shape)} dimensions has the order {list(order[:20])}")
    if body.i32(1) != 0:
        raise Malformed(f"a tensor has the storage offset {body.i32(1)}")
    dynamism = body.i8(8)
    if dynamism not in (0, 1, 2):
        raise Malformed(f"a tensor has the unknown shape dynamism {dynamism}")
    buffer = body.u32(5)
    allocation = body.table(6)
    extra = body.table(9)
    external = None
    if extra is not None and extra.i8(2) == 1:
        external = extra.string(1)
        if not external:
            raise Malformed("a tensor with data in another file has no name")
    arena = None
    if allocation is not None:
        arena = (allocation.u32(0), allocation.u32(1) + (allocation.u32(2) << 32))
    facts = TensorFacts(
        dtype=SCALAR_TYPES[code][0],
        shape=shape,
        dim_order=order,
        planned=allocation is not None,
        constant=allocation is None and (buffer > 0 or external is not None),
        dynamic=dynamism != 0,
    )
    if facts.nbytes > _MAX_BYTES:
        raise Malformed(f"a tensor has the impossible shape {list(shape)}")
    return Tensor(facts, buffer, arena, extra.u64(0) if extra is not None else 0, external)


def check_value(
    value: Value,
    values: tuple[Value, ...],
    arenas: tuple[int, ...],
    constants: ConstantData,
) -> None:
    """Refuse a value that refers to values, arenas or constants that are not there."""
    if isinstance(value, References):
        count, low = len(values), -1 if value.tensors else 0
        if value.indexes and not low <= min(value.indexes) <= max(value.indexes) < count:
            raise Malformed(f"a list refers to a value outside of {count} values")
        for index in value.indexes:
            item = values[index] if index >= 0 else Null()
            if not isinstance(item, (Tensor, Null) if value.tensors else Scalar):
                kind = "tensors" if value.tensors else "integers"
                raise Malformed(f"a list of {kind} refers to value {index}, which is none")
    elif isinstance(value, Tensor):
        if value.arena is not None:
            # Arena 0 is reserved for the constants.
            arena, offset = value.arena
            if not 1 <= arena < len(arenas) or offset + value.facts.nbytes > arenas[arena]:
                raise Malformed(
                    f"a tensor of {value.facts.nbytes} bytes is planned at byte {offset} of arena "
                    f"{arena}; arenas are {list(arenas[:20])}"
                )
        elif value.buffer > 0 and value.external is None:
            constants.check(value)


def constant_of(
    value: Value, values: tuple[Value, ...], constants: ConstantData
) -> tuple[bool, object]:
    """`(True, the Python value)` when a value is known without running, else `(False, None)`.

    Tensors become nested tuples of numbers, lists become tuples.
    """
    if isinstance(value, Null):
        return True, None
    if isinstance(value, Scalar):
        return True, value.value
    if isinstance(value, Tensor):
        if not value.facts.constant or value.external is not None:
            return False, None
        return True, _tensor_constant(value, constants)
    items = []
    constants.spend(len(value.indexes))
    for index in value.indexes:
        item = Null() if index < 0 else values[index]
        if isinstance(item, References):
            raise Malformed("a list holds a list")
        known, constant = constant_of(item, values, constants)
        if not known:
            return False, None
        items.append(constant)
    return True, tuple(items)


def _tensor_constant(tensor: Tensor, constants: ConstantData) -> object:
    facts = tensor.facts
    letter = _ELEMENT.get(facts.dtype)
    elements = 1
    for size in facts.shape:
        elements *= max(1, size)
    contiguous = facts.dim_order == tuple(range(len(facts.shape)))
    if letter is None or elements > MAX_CONSTANT_ELEMENTS or not contiguous:
        return facts
    start = constants.check(tensor)
    constants.spend(elements)
    count = 0 if 0 in facts.shape else elements
    raw = bytes(constants.data[start : start + facts.nbytes])
    if facts.dtype == "bool":
        numbers: tuple[object, ...] = tuple(byte != 0 for byte in raw)
    elif facts.dtype == "bfloat16":
        halves = struct.unpack(f"<{count}H", raw)
        numbers = struct.unpack(f"<{count}f", struct.pack(f"<{count}I", *(h << 16 for h in halves)))
    else:
        numbers = struct.unpack(f"<{count}{letter}", raw)
    return _nest(numbers, facts.shape)


def _nest(numbers: tuple[object, ...], shape: tuple[int, ...]) -> object:
    if not shape:
        return numbers[0]
    if len(shape) == 1:
        return numbers
    step = len(numbers) // shape[0] if shape[0] else 0
    rows = (numbers[row * step : (row + 1) * step] for row in range(shape[0]))
    return tuple(_nest(row, shape[1:]) for row in rows)
