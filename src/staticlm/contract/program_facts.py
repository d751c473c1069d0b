"""The facts of a `.pte` file as frozen dataclasses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

SCALAR_TYPES: Mapping[int, tuple[str, int]] = {
    0: ("uint8", 1),
    1: ("int8", 1),
    2: ("int16", 2),
    3: ("int32", 4),
    4: ("int64", 8),
    5: ("float16", 2),
    6: ("float32", 4),
    7: ("float64", 8),
    8: ("complex32", 4),
    9: ("complex64", 8),
    10: ("complex128", 16),
    11: ("bool", 1),
    12: ("qint8", 1),
    13: ("quint8", 1),
    14: ("qint32", 4),
    15: ("bfloat16", 2),
    16: ("quint4x2", 1),
    17: ("quint2x4", 1),
    22: ("bits16", 2),
    23: ("float8_e5m2", 1),
    24: ("float8_e4m3fn", 1),
    25: ("float8_e5m2fnuz", 1),
    26: ("float8_e4m3fnuz", 1),
    27: ("uint16", 2),
    28: ("uint32", 4),
    29: ("uint64", 8),
}
"""ExecuTorch's `ScalarType` codes: dtype name (torch's, without the prefix) and element bytes."""

_BYTES = dict(SCALAR_TYPES.values())


@dataclass(frozen=True)
class TensorFacts:
    """A tensor of a method's signature.

    `planned` is True when the program's memory plan places it in an arena; False when the caller
    must (or may) give it memory. `constant` is True when its data is in the file. `dynamic` is True
    when `shape` is only an upper bound.
    """

    dtype: str
    shape: tuple[int, ...]
    dim_order: tuple[int, ...]
    planned: bool
    constant: bool = False
    dynamic: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes at the (largest) shape."""
        return prod(self.shape) * _BYTES[self.dtype]


@dataclass(frozen=True)
class DelegateFacts:
    """One delegate of a method: backend id, its processed bytes, and compile spec keys."""

    backend: str
    nbytes: int
    options: tuple[str, ...]


@dataclass(frozen=True)
class MethodFacts:
    """One method. `inputs` and `outputs` hold None for values that are not tensors.

    `aliases` maps an output index to the input index whose value it is (a mutated input that is
    returned). `operators` counts kernel calls outside delegates by `name.overload`. `arenas` are
    the sizes in bytes of the memory-planned buffers, in the order of the runtime's method metadata.
    """

    name: str
    inputs: tuple[TensorFacts | None, ...]
    outputs: tuple[TensorFacts | None, ...]
    aliases: Mapping[int, int]
    delegates: tuple[DelegateFacts, ...]
    delegate_calls: int
    operators: Mapping[str, int]
    arenas: tuple[int, ...]
    instructions: int


@dataclass(frozen=True)
class ProgramFacts:
    """A whole program.

    Args:
        path: The file.
        nbytes: Its size.
        methods: The methods that compute something; constant methods are not among them.
        constants: The values of the constant methods, by method name. Several outputs make a tuple,
            a tensor a nested tuple of numbers (a bare number when it has no dimensions). A tensor
            of more than 65,536 elements is given as its `TensorFacts` instead.
        constant_bytes: Bytes of constant tensors outside of delegates, padding included.
        named_data: Bytes of every named blob, by name. Names may share a segment.
        segments: Number of data segments.
        segment_ranges: Byte offset in the file and size of every segment. They may overlap.
        named_segments: Segment index of every named blob.
        constant_segment: Index of the segment of the constant tensors, or None.
        external_data: Names of tensors whose data is in another file (`.ptd`).
    """

    path: Path
    nbytes: int
    methods: Mapping[str, MethodFacts]
    constants: Mapping[str, object]
    constant_bytes: int
    named_data: Mapping[str, int]
    segments: int
    segment_ranges: tuple[tuple[int, int], ...] = ()
    named_segments: Mapping[str, int] | None = None
    constant_segment: int | None = None
    external_data: tuple[str, ...] = ()
