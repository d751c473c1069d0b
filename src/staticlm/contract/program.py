"""What a `.pte` file holds, read from its flatbuffer without ExecuTorch or torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

Scalar = int | float | bool | str


@dataclass(frozen=True)
class TensorFacts:
    """A tensor of a method's signature.

    `planned` is True when the program's memory plan places it in an arena; False when the caller must
    (or may) give it memory. `constant` is True when its data is in the file.
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
        raise NotImplementedError


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
    returned). `operators` counts kernel calls outside delegates by `name.overload`.
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
    """A whole program. `constants` are the values of its constant methods, by method name.

    A constant method with several outputs has a tuple; a tensor has a nested tuple of numbers.
    """

    path: Path
    nbytes: int
    methods: Mapping[str, MethodFacts]
    constants: Mapping[str, object]
    constant_bytes: int
    named_data: Mapping[str, int]
    segments: int


def read_program(path: str | Path) -> ProgramFacts:
    """Read a program file. Raises `ProgramError` for anything that is not a whole, sane `.pte`."""
    raise NotImplementedError
