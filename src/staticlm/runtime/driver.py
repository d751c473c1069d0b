"""What a driver of ExecuTorch programs can do, whatever bindings it uses.

A driver loads a program, loads methods from it, binds buffers to input and output slots, and
executes. It never looks at contracts. Destruction order: method, bindings, buffers, allocator,
program.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt

from staticlm.contract.program import MethodFacts, ProgramFacts
from staticlm.errors import Code, RunnerError
from staticlm.runtime.buffers import Buffer, BufferAllocator


@dataclass(frozen=True)
class Capabilities:
    """What a driver does without copies, and what it does not need."""

    bind_outputs: bool
    """Outputs can be pointed at caller memory."""
    arena_allocator: bool
    """Planned arenas come from the allocator hook."""
    releases_gil: bool
    shares_weights: bool
    """Packed weights are shared by the methods of a program."""
    torch_free: bool


class BoundMethod(Protocol):
    """A loaded method with its bindings."""

    name: str
    facts: MethodFacts

    def bind_input(
        self, index: int, buffer: Buffer, offset: int = 0, shape: tuple[int, ...] | None = None
    ) -> None:
        """Alias an unplanned input to caller memory until rebound; a planned one is copied per run.

        `shape` is for inputs of dynamic shape only, where it may be smaller than the recorded one.
        """
        ...

    def bind_output(self, index: int, buffer: Buffer, offset: int = 0) -> None:
        """Point an unplanned output at caller memory. Raises `DRIVER_UNSAFE` where it cannot."""
        ...

    def execute(self) -> None:
        """Run once. Raises `ExecutionError` with ExecuTorch's code and log; never retries."""
        ...

    def output(self, index: int) -> npt.NDArray[Any]:
        """The output's memory as a numpy array without a copy (bfloat16 as uint16), valid until the
        next `execute` of any method of the program."""
        ...

    def close(self) -> None:
        """Destroy the method, then release its bindings. Idempotent."""
        ...


class LoadedProgram(Protocol):
    """An open program; its methods share it."""

    facts: ProgramFacts

    def load_method(self, name: str, allocator: BufferAllocator) -> BoundMethod:
        """Load one method; arenas come from `allocator` where the driver can."""
        ...

    def close(self) -> None:
        """Close methods that are still open, then the program. Idempotent."""
        ...


class Driver(Protocol):
    """A set of bindings to ExecuTorch."""

    name: str
    capabilities: Capabilities
    reason: str
    """Why this driver was taken."""

    def load(self, path: Path, facts: ProgramFacts | None = None) -> LoadedProgram:
        """Open a program file; `facts` is what it holds, where the caller has just read that."""
        ...

    def set_threads(self, count: int) -> None:
        """Size the process-wide thread pool of ExecuTorch's kernels. Not while a method runs."""
        ...

    @property
    def threads(self) -> int:
        """Threads of the pool; 0 when it is out of reach."""
        ...

    @property
    def description(self) -> str:
        """One line for `inspect` and `stats`: which bindings, of which version."""
        ...


def check_threads(count: object) -> int:
    """A size for the thread pool; ExecuTorch ends the process over one that cannot be made.

    Raises:
        RunnerError: Not an integer, below 1, or far more threads than this machine has processors.
    """
    most = max(64, 4 * (os.cpu_count() or 1))
    whole = isinstance(count, Integral) and not isinstance(count, bool)
    if not whole or not 1 <= int(count) <= most:  # type: ignore[call-overload]
        raise RunnerError(
            Code.USAGE,
            "the number of threads",
            found=repr(count)[:80],
            expected=f"an integer from 1 to {most}",
        )
    return int(count)  # type: ignore[call-overload, no-any-return]


def closed(what: str) -> RunnerError:
    """The error for a use after `close`."""
    return RunnerError(Code.CLOSED, f"{what} is closed", remedy="Load it again.")
