"""The protocol that every I/O manager keeps, and the figures that it reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from staticlm.contract.facts import Contract
from staticlm.contract.program import ProgramFacts
from staticlm.runtime.buffers import BufferAllocator
from staticlm.runtime.plan import Call
from staticlm.runtime.shared_program import SharedProgram

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True)
class BufferStats:
    """One buffer of a session: what it holds, its bytes, and the allocator that served it."""

    name: str
    nbytes: int
    allocator: str


@dataclass(frozen=True)
class IOStats:
    """Figures of an I/O manager since it was made.

    Args:
        label: Contract label.
        version: Contract version.
        states: How the caches are kept: `in place`, `bound`, `copied`, `swapped` or
            `inside the program`.
        calls: Executed calls by method.
        execute_seconds: Time inside the driver's `execute`.
        buffers: Every buffer with its allocator.
    """

    label: str
    version: int
    states: str
    calls: Mapping[str, int]
    execute_seconds: float
    buffers: tuple[BufferStats, ...]


@runtime_checkable
class IOManager(Protocol):
    """The inputs, outputs and caches of one session over a program.

    A manager trusts the `Call` it is given: positions are counted and planned above it.
    """

    @property
    def contract(self) -> Contract:
        """The contract it drives, read from the program and checked against it."""
        ...

    def open(self) -> None:
        """Allocate the buffers. Idempotent.

        Raises:
            RunnerError: No memory; what was allocated is given back.
        """
        ...

    def prepare(self, method: str) -> None:
        """Load a method and bind its slots now rather than at its first call."""
        ...

    def step(self, call: Call, tokens: Sequence[int], all_rows: bool = False) -> Logits:
        """Execute one call.

        Args:
            call: Method, position and number of real rows.
            tokens: `call.valid` token ids.
            all_rows: Return the logits of every real row instead of the last.

        Returns:
            float32 `[1, vocabulary]`, or `[call.valid, vocabulary]` with `all_rows`; a copy.

        Raises:
            ExecutionError: ExecuTorch failed; the caches are undefined until `reset`.
            RunnerError: `all_rows` of a method that returns the last row only.
        """
        ...

    def reset(self) -> None:
        """Forget all tokens."""
        ...

    def can_rollback(self, end: int, position: int) -> bool:
        """Whether the caches still hold all that position `position` sees.

        Args:
            end: Position after the last row ever written since the reset, padding included.
            position: Where to continue.
        """
        ...

    def stats(self) -> IOStats:
        """Figures so far."""
        ...

    def close(self) -> None:
        """Unbind and free everything. Idempotent."""
        ...


IOManagerFactory = Callable[[ProgramFacts, SharedProgram, BufferAllocator], IOManager]
"""Reads and checks the contract; allocates and loads nothing, `IOManager.open` does."""


def as_float32(values: npt.NDArray[Any]) -> Logits:
    """A float32 copy of logits; uint16 is bfloat16, which numpy lacks."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)
