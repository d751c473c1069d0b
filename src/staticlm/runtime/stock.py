"""The stock driver: ExecuTorch's own Python bindings, with their traps avoided.

What the bindings do was read from their source and run (executorch 1.5.1):

- `ExecuTorchMethod.set_inputs` aliases unplanned inputs and copies planned ones; inputs once set
  stay set, so it is called again only after a rebinding, or when an input is planned.
- `ExecuTorchMethod.execute` points every unplanned output at memory of its own *after* the inputs
  were set. An output that is the same value as an unplanned input (a cache that is written in place
  and returned) is thereby torn off its caller: a wrong answer without an error. A program with such
  a method runs through `ExecuTorchModule.run_method` instead, which binds in the other order, at
  the price of one unused zeroed buffer per output and call.
- Outputs cannot be pointed at caller memory and arenas cannot be placed; nothing releases the GIL.
"""

from __future__ import annotations

import importlib
import re
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy.typing as npt

from staticlm.contract.program import MethodFacts, ProgramFacts, TensorFacts, read_program
from staticlm.errors import Code, ExecutionError, RunnerError
from staticlm.runtime import libraries, requirements
from staticlm.runtime.bindings import Bindings, logical, numpy_dtype, storage_shape
from staticlm.runtime.buffers import Buffer, BufferAllocator, array_at
from staticlm.runtime.driver import (
    BoundMethod,
    Capabilities,
    LoadedProgram,
    check_threads,
    closed,
)

_KERNEL_MODULES = ("executorch.kernels.quantized", libraries.CUSTOM_KERNELS)
"""Modules that register further kernels when they are imported."""


class StockDriver:
    """ExecuTorch through `executorch.extension.pybindings`; imports torch when it is made."""

    name = "stock"
    capabilities = Capabilities(
        bind_outputs=False,
        arena_allocator=False,
        releases_gil=False,
        shares_weights=False,
        torch_free=False,
    )
    reason = ""

    def __init__(self) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore"
                )  # the bindings announce on import that they may change
                self._torch: Any = importlib.import_module("torch")
                self._lib: Any = importlib.import_module(
                    "executorch.extension.pybindings.portable_lib"
                )
        except ImportError as error:
            raise RunnerError(
                Code.DRIVER_UNAVAILABLE,
                "the stock driver cannot be loaded",
                found=str(error),
                expected="executorch and torch",
                remedy="Install executorch>=1.5.1,<1.6 with torch.",
            ) from error

    @property
    def description(self) -> str:
        """One line for `inspect` and `stats`."""
        return f"stock bindings of executorch {libraries.installed_version()}"

    def load(self, path: Path, facts: ProgramFacts | None = None) -> LoadedProgram:
        """Open a program file.

        Args:
            path: The file.
            facts: What it holds, where the caller has just read that.

        Raises:
            ProgramError: The file is absent or malformed, or needs backends or operators that are
                not registered; then nothing was loaded.
        """
        facts = facts or read_program(Path(path))
        for module in _KERNEL_MODULES:
            if not requirements.missing_operators(facts, self._lib._get_operator_names()):
                break
            libraries.import_kernels(module)
        requirements.check_requirements(
            facts, self._lib._get_operator_names(), self._backend_available
        )
        return StockProgram(self._torch, self._lib, facts)

    def set_threads(self, count: int) -> None:
        """Size the process-wide thread pool of ExecuTorch's kernels. Not while a method runs."""
        self._lib._unsafe_reset_threadpool(check_threads(count))

    @property
    def threads(self) -> int:
        """Threads of the pool."""
        return int(self._lib._threadpool_get_thread_count())

    def _backend_available(self, name: str) -> bool:
        return bool(self._lib._is_available(name))


class StockProgram:
    """A program opened by the stock bindings."""

    def __init__(self, torch: ModuleType, lib: Any, facts: ProgramFacts) -> None:
        self.facts = facts
        self.packed_weights = "in memory: these bindings pack for each method"
        self._torch = torch
        self.torn = tuple(name for name, method in facts.methods.items() if _torn(method))
        """Methods that plain `execute` would compute wrongly; if any, all run the safe path."""
        checked = lib.Verification.InternalConsistency
        try:
            if self.torn:
                self._handle = lib._load_for_executorch(
                    str(facts.path), program_verification=checked
                )
            else:
                self._handle = lib._load_program(str(facts.path), program_verification=checked)
        except RuntimeError as error:
            raise requirements.malformed(facts.path, error) from error
        self._methods: weakref.WeakSet[StockMethod] = weakref.WeakSet()
        self._closed = False

    def load_method(self, name: str, allocator: BufferAllocator) -> BoundMethod:
        """Load a method. Its arenas are ExecuTorch's own; `allocator` is told of bindings only."""
        if self._closed:
            raise closed(f"program {self.facts.path}")
        method = requirements.check_method(self.facts, name)
        try:
            runner: Any = (
                _ModuleRunner(self._handle, method)
                if self.torn
                else _MethodRunner(self._handle, method)
            )
        except RuntimeError as error:
            raise requirements.unloadable(self.facts.path, name, error) from error
        bound = StockMethod(self._torch, runner, method, self)
        self._methods.add(bound)
        return bound

    def close(self) -> None:
        """Close methods that are still open, then the program. Idempotent."""
        self._closed = True
        for method in list(self._methods):
            method.close()
        self._handle = None


class StockMethod:
    """A method of a `StockProgram` with its bindings."""

    def __init__(
        self, torch: ModuleType, runner: Any, facts: MethodFacts, program: StockProgram
    ) -> None:
        self.name = facts.name
        self.facts = facts
        self._torch = torch
        self._runner = runner
        self._program: StockProgram | None = program
        self._bindings = Bindings(facts)
        self._inputs: list[Any] = [None] * len(facts.inputs)
        self._stale = True
        self._ready = False

    def bind_input(
        self, index: int, buffer: Buffer, offset: int = 0, shape: tuple[int, ...] | None = None
    ) -> None:
        """See `BoundMethod.bind_input`."""
        self._open()
        exact = self._bindings.check("input", index, buffer, offset, shape)
        facts = self._bindings.slot("input", index)
        buffer.allocator.bind(buffer, self.name, "input", index)
        stored = storage_shape(exact, facts.dim_order)
        view = buffer.view(numpy_dtype(facts.dtype), stored, offset)
        tensor = self._torch.from_numpy(logical(view, facts.dim_order))
        if facts.dtype == "bfloat16":
            tensor = tensor.view(self._torch.bfloat16)
        self._inputs[index] = tensor
        self._bindings.pin("input", index, buffer, offset)
        self._stale = True

    def bind_output(self, index: int, buffer: Buffer, offset: int = 0) -> None:
        """Refused: the stock bindings have no way to place an output.

        An output that aliases an input (`facts.aliases`) is where that input is bound; binding it
        to the very same memory is accepted and changes nothing.
        """
        self._open()
        self._bindings.check("output", index, buffer, offset)
        source = self.facts.aliases.get(index)
        bound = None if source is None else self._bindings.address("input", source)
        if bound == buffer.address + offset and not self._bindings.slot("output", index).planned:
            return
        raise RunnerError(
            Code.DRIVER_UNSAFE,
            f"the stock driver cannot point output {index} of method {self.name!r} at a buffer",
            remedy="Copy the output after execute, or use the native driver.",
        )

    def execute(self) -> None:
        """See `BoundMethod.execute`."""
        runner = self._open()
        if not self._ready:
            self._bindings.require_inputs()
            self._ready = True
        try:
            runner.run(self._inputs, self._stale)
        except RuntimeError as error:
            # Inputs may be half set: set them all again before the next run.
            self._stale = True
            raise _execution_error(self.name, error) from error
        self._stale = False

    def output(self, index: int) -> npt.NDArray[Any]:
        """See `BoundMethod.output`."""
        runner = self._open()
        facts = self._bindings.slot("output", index)
        array: npt.NDArray[Any] = runner.output(index, facts)
        return array

    def close(self) -> None:
        """Destroy the method, then release its bindings. Idempotent."""
        self._runner = None
        self._inputs = []
        self._bindings.release()
        self._program = None

    def _open(self) -> Any:
        if self._runner is None:
            raise closed(f"method {self.name!r}")
        return self._runner

    def __del__(self) -> None:
        if "_bindings" in self.__dict__:
            self.close()


class _MethodRunner:
    """`ExecuTorchMethod`: inputs set once, outputs fetched once."""

    def __init__(self, program: Any, facts: MethodFacts) -> None:
        self._method = program.load_method(facts.name)
        self._owner = (self._method, program)
        self._copied = any(one is not None and one.planned for one in facts.inputs)
        self._outputs: list[Any] | None = None
        self._static = not any(one is not None and one.dynamic for one in facts.outputs)
        self._arrays: dict[int, npt.NDArray[Any]] = {}

    def run(self, inputs: list[Any], stale: bool) -> None:
        """Execute once; planned inputs are copied into the arena each time."""
        if stale or self._copied:
            self._method.set_inputs(inputs)
        self._method.execute()
        if not self._static:
            self._outputs = None
            self._arrays.clear()

    def output(self, index: int, facts: TensorFacts) -> npt.NDArray[Any]:
        """A view of the output where ExecuTorch wrote it; holds the method alive."""
        found = self._arrays.get(index)
        if found is None:
            if self._outputs is None:
                self._outputs = self._method.get_outputs(False)
            found = _array(self._outputs[index], facts, self._owner)
            self._arrays[index] = found
        return found


class _ModuleRunner:
    """`ExecuTorchModule.run_method`: the order of binding that keeps mutated inputs right."""

    def __init__(self, module: Any, facts: MethodFacts) -> None:
        self._module = module
        self._facts = facts
        self._arrays: Mapping[int, npt.NDArray[Any]] = {}
        module.method_meta(facts.name)

    def run(self, inputs: list[Any], stale: bool) -> None:
        """Execute once. Unplanned outputs live until the next run only, so they are copied."""
        outputs = self._module.run_method(self._facts.name, tuple(inputs), False)
        arrays = {}
        for index, facts in enumerate(self._facts.outputs):
            if facts is None:
                continue
            source = self._facts.aliases.get(index)
            if source is not None and not facts.planned:
                arrays[index] = _array(outputs[index], facts, inputs[source])
            elif facts.planned:
                arrays[index] = _array(outputs[index], facts, self._module)
            else:
                arrays[index] = _array(outputs[index], facts, outputs[index]).copy()
        self._arrays = arrays

    def output(self, index: int, facts: TensorFacts) -> npt.NDArray[Any]:
        """The output of the last run."""
        if index not in self._arrays:
            raise RunnerError(
                Code.BUFFER_INVALID,
                f"method {self._facts.name!r} has not been executed",
                remedy="Execute it before reading an output.",
            )
        return self._arrays[index]


def _torn(facts: MethodFacts) -> bool:
    """Whether an unplanned output is the same value as an unplanned input."""
    return any(
        (one := facts.outputs[output]) is not None and not one.planned for output in facts.aliases
    )


def _array(tensor: Any, facts: TensorFacts, owner: object) -> npt.NDArray[Any]:
    """A torch tensor's memory as a numpy array that holds `owner`."""
    stored = storage_shape(tuple(tensor.shape), facts.dim_order)
    array = array_at(tensor.data_ptr(), numpy_dtype(facts.dtype), stored, owner)
    if facts.constant:
        array.flags.writeable = False  # it may be in a mapped file
    return logical(array, facts.dim_order)


def _execution_error(method: str, error: RuntimeError) -> ExecutionError:
    text = str(error)
    code = re.search(r"0x:?([0-9a-fA-F]+)", text)
    return ExecutionError(
        Code.EXECUTION_FAILED,
        f"method {method!r} failed",
        found=f"ExecuTorch error 0x{code.group(1)} ({text})" if code else text,
        remedy="ExecuTorch printed the reason to standard error. Reset before going on.",
    )
