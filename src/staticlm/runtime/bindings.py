"""Which buffer is bound to which slot of a method, checked and kept alive."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from staticlm.contract.facts import DTYPE_BYTES
from staticlm.contract.program import MethodFacts, TensorFacts
from staticlm.errors import Code, RunnerError
from staticlm.runtime.buffers import Buffer, Direction

_NUMPY_NAMES = {"bfloat16": "uint16"}


def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """The numpy dtype that holds a torch dtype: the same one, or uint16 for bfloat16."""
    return np.dtype(_NUMPY_NAMES.get(name, name))


def storage_shape(shape: tuple[int, ...], dim_order: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes in the order that they are laid out in memory, outer to inner."""
    return tuple(shape[dim] for dim in dim_order)


def logical(array: npt.NDArray[Any], dim_order: tuple[int, ...]) -> npt.NDArray[Any]:
    """A view of `storage_shape` seen with the tensor's own order of dimensions."""
    if dim_order == tuple(range(array.ndim)):
        return array
    turned: npt.NDArray[Any] = array.transpose([dim_order.index(d) for d in range(array.ndim)])
    return turned


class Bindings:
    """The pinned buffers of one method, by direction and index."""

    def __init__(self, facts: MethodFacts) -> None:
        self._facts = facts
        self._pinned: dict[tuple[Direction, int], Buffer] = {}
        self._offsets: dict[tuple[Direction, int], int] = {}

    def slot(self, direction: Direction, index: int) -> TensorFacts:
        """The tensor of a slot. Raises `BUFFER_INVALID` when there is none."""
        slots = self._facts.inputs if direction == "input" else self._facts.outputs
        if not 0 <= index < len(slots):
            raise RunnerError(
                Code.BUFFER_INVALID,
                f"method {self._facts.name!r} has no such {direction}",
                found=index,
                expected=f"0 to {len(slots) - 1}" if slots else "none at all",
            )
        facts = slots[index]
        if facts is None:
            raise RunnerError(
                Code.BUFFER_INVALID,
                f"{direction} {index} of method {self._facts.name!r} is not a tensor",
                remedy="Only tensors can be bound or read.",
            )
        return facts

    def check(
        self,
        direction: Direction,
        index: int,
        buffer: Buffer,
        offset: int,
        shape: tuple[int, ...] | None = None,
    ) -> tuple[int, ...]:
        """The shape to bind with, once the slot, the shape and the memory fit each other."""
        facts = self.slot(direction, index)
        purpose = f"{direction} {index} of method {self._facts.name!r}"
        exact = facts.shape if shape is None else tuple(shape)
        fits = len(exact) == len(facts.shape) and all(
            0 < size <= bound for size, bound in zip(exact, facts.shape, strict=True)
        )
        if exact != facts.shape and not (facts.dynamic and fits):
            raise RunnerError(
                Code.BUFFER_INVALID,
                f"{purpose} does not take this shape",
                found=list(exact),
                expected=f"{'at most ' if facts.dynamic else ''}{list(facts.shape)}",
            )
        width = DTYPE_BYTES[facts.dtype]
        buffer.check_range(offset, prod(exact) * width, purpose)
        if (buffer.address + offset) % width:
            raise RunnerError(
                Code.BUFFER_INVALID,
                f"{purpose} is not aligned to its dtype",
                found=f"offset {offset}",
                expected=f"an address that {width} divides ({facts.dtype})",
            )
        return exact

    def pin(self, direction: Direction, index: int, buffer: Buffer, offset: int = 0) -> None:
        """Keep a buffer until it is replaced or the method is closed."""
        buffer.pins += 1
        old = self._pinned.get((direction, index))
        self._pinned[direction, index] = buffer
        self._offsets[direction, index] = offset
        if old is not None:
            old.pins -= 1

    def get(self, direction: Direction, index: int) -> Buffer | None:
        """What is bound to a slot."""
        return self._pinned.get((direction, index))

    def address(self, direction: Direction, index: int) -> int | None:
        """The address that is bound to a slot."""
        buffer = self._pinned.get((direction, index))
        return None if buffer is None else buffer.address + self._offsets[direction, index]

    def owner_of(self, address: int, nbytes: int) -> Buffer | None:
        """The pinned buffer that holds a range of memory."""
        for buffer in self._pinned.values():
            if buffer.address <= address and address + nbytes <= buffer.address + buffer.nbytes:
                return buffer
        return None

    def require_inputs(self) -> None:
        """Refuse to run with an input that was never bound."""
        missing = [
            index
            for index in range(len(self._facts.inputs))
            if ("input", index) not in self._pinned
        ]
        if missing:
            raise RunnerError(
                Code.BUFFER_INVALID,
                f"method {self._facts.name!r} has unbound inputs",
                found=missing,
                expected="every input bound",
                remedy="Call bind_input for each of them before execute.",
            )

    def release(self) -> None:
        """Unpin everything. Only after the method is destroyed: it uses its memory until then."""
        pinned, self._pinned = self._pinned, {}
        for buffer in pinned.values():
            buffer.pins -= 1
