"""The native driver: our C++ extension over the C++ SDK in the executorch wheel, without torch.

Inputs and outputs are bound to caller memory without copies, planned arenas come from the allocator
hook, the GIL is released while a method runs, and errors carry ExecuTorch's code and log.
"""

from __future__ import annotations

import importlib
import weakref
from pathlib import Path
from typing import Any

import numpy.typing as npt

from staticlm.contract.program import MethodFacts, ProgramFacts, read_program
from staticlm.errors import Code, ExecutionError, RunnerError
from staticlm.runtime import libraries, packed_weights, requirements
from staticlm.runtime.bindings import Bindings, logical, numpy_dtype, storage_shape
from staticlm.runtime.buffers import Buffer, BufferAllocator, allocate, array_at, free
from staticlm.runtime.driver import (
    BoundMethod,
    Capabilities,
    LoadedProgram,
    check_threads,
    closed,
)

WEIGHT_CACHE = ("XnnpackBackend", "weight_cache_enabled")
"""The XNNPACK option that lets methods share packed weights; read when a method is loaded."""


class NativeDriver:
    """Zero-copy binding, arenas from the allocator, the GIL released, no torch.

    Args:
        weight_cache: Let the methods of a program share XNNPACK's packed weights.
    """

    name = "native"
    capabilities = Capabilities(
        bind_outputs=True,
        arena_allocator=True,
        releases_gil=True,
        shares_weights=True,
        torch_free=True,
    )
    reason = ""

    def __init__(self, weight_cache: bool = True) -> None:
        self._lib = _extension()
        self._weight_cache = weight_cache
        libraries.open_library(libraries.KERNELS)

    @property
    def description(self) -> str:
        """One line for `inspect` and `stats`."""
        return f"native driver built against executorch {self._lib.built_against}"

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
        self._open_kernels(facts)
        for backend in sorted(requirements.needed_backends(facts)):
            self._open_backend(backend)
        requirements.check_requirements(facts, self._lib.operators(), self._lib.backend_available)
        try:
            handle = self._lib.Program(str(facts.path))
        except self._lib.ExecuTorchError as error:
            raise requirements.malformed(facts.path, _reason(error)) from error
        return NativeProgram(self._lib, handle, facts, self._packed_weights(facts))

    def set_backend_option(self, backend: str, key: str, value: bool | int | str) -> None:
        """Set an option of a backend for this process; most take effect on methods loaded later.

        Raises:
            RunnerError: `DRIVER_UNAVAILABLE` when the backend is not here or rejects the option.
        """
        if backend not in self._lib.backends():
            libraries.open_backend(backend)
        try:
            self._lib.set_backend_option(backend, key, value)
        except self._lib.ExecuTorchError as error:
            raise RunnerError(
                Code.DRIVER_UNAVAILABLE,
                f"backend {backend} does not take option {key!r}",
                found=_reason(error),
            ) from error

    def set_threads(self, count: int) -> None:
        """Size the process-wide thread pool of ExecuTorch's kernels. Not while a method runs."""
        if not self._lib.set_threads(check_threads(count)):
            raise RunnerError(
                Code.DRIVER_UNAVAILABLE,
                "the thread pool cannot be resized",
                found="a build without the thread pool library"
                if not self._lib.has_threadpool
                else "ExecuTorch's refusal",
            )

    @property
    def threads(self) -> int:
        """Threads of the pool; 0 when it is out of reach."""
        return int(self._lib.threads())

    def _open_kernels(self, facts: ProgramFacts) -> None:
        if not requirements.missing_operators(facts, self._lib.operators()):
            return
        libraries.open_library(libraries.QUANTIZED_KERNELS)
        missing = requirements.missing_operators(facts, self._lib.operators())
        if any(name.startswith("llama::") for name in missing):
            libraries.import_kernels(libraries.CUSTOM_KERNELS)

    def _packed_weights(self, facts: ProgramFacts) -> packed_weights.PackedWeights:
        if not self._weight_cache or WEIGHT_CACHE[0] not in requirements.needed_backends(facts):
            return packed_weights.PackedWeights(None, "nothing is packed")
        return packed_weights.packed_weights(facts.path, str(self._lib.built_against))

    def _open_backend(self, name: str) -> None:
        if name not in self._lib.backends():
            libraries.open_backend(name)
        if name == WEIGHT_CACHE[0] and name in self._lib.backends():
            self._lib.set_backend_option(*WEIGHT_CACHE, self._weight_cache)


class NativeProgram:
    """A program opened by the extension. Methods hold the C++ program, not this object."""

    def __init__(
        self,
        lib: Any,
        handle: Any,
        facts: ProgramFacts,
        packed: packed_weights.PackedWeights,
    ) -> None:
        self.facts = facts
        self.packed_weights = str(packed)
        self._packed: packed_weights.PackedWeights | None = packed
        self._lib = lib
        self._handle = handle
        self._methods: weakref.WeakSet[NativeMethod] = weakref.WeakSet()

    def load_method(self, name: str, allocator: BufferAllocator) -> BoundMethod:
        """Load one method with its arenas in memory of `allocator`.

        Raises:
            ProgramError: No such method, or ExecuTorch or a delegate cannot initialise it.
            RunnerError: An arena cannot be allocated, or the program is closed.
        """
        if self._handle is None:
            raise closed(f"program {self.facts.path}")
        facts = requirements.check_method(self.facts, name)
        try:
            method = NativeMethod(self._lib, self._handle, facts, allocator, self._packed)
        except self._lib.ExecuTorchError as error:
            raise requirements.unloadable(self.facts.path, name, _reason(error)) from error
        self._methods.add(method)
        return method

    def close(self) -> None:
        """Close methods that are still open, then the program. Idempotent."""
        for method in list(self._methods):
            method.close()
        self._handle = None
        self._packed = None


class NativeMethod:
    """A method with its bindings, its arenas and the outputs that nobody placed."""

    def __init__(
        self,
        lib: Any,
        program: Any,
        facts: MethodFacts,
        allocator: BufferAllocator,
        packed: packed_weights.PackedWeights | None = None,
    ) -> None:
        self.name = facts.name
        self.facts = facts
        self._lib = lib
        self._allocator = allocator
        self._bindings = Bindings(facts)
        self._owned: list[Buffer] = []
        self._arrays: dict[int, npt.NDArray[Any]] = {}
        self._ready = False
        self._native: Any = None
        self._packed = packed
        try:
            file = None if packed is None else packed.file
            options = [] if file is None else [(*packed_weights.OPTION, str(file))]
            self._native = lib.Method(program, facts.name, self._place_arena, options)
            if packed is not None:
                packed.mark()
        except BaseException:
            self._release()
            raise

    def bind_input(
        self, index: int, buffer: Buffer, offset: int = 0, shape: tuple[int, ...] | None = None
    ) -> None:
        """See `BoundMethod.bind_input`."""
        native = self._open()
        exact = self._bindings.check("input", index, buffer, offset, shape)
        buffer.allocator.bind(buffer, self.name, "input", index)
        with _Translated(self):
            native.set_input(index, buffer.address + offset, exact, buffer)
        self._bindings.pin("input", index, buffer, offset)
        for output, source in self.facts.aliases.items():
            if source == index:
                self._arrays.pop(output, None)

    def bind_output(self, index: int, buffer: Buffer, offset: int = 0) -> None:
        """See `BoundMethod.bind_output`.

        Raises:
            RunnerError: `DRIVER_UNSAFE` for an output that is planned, constant, or the same value
                as another output or as an input that is bound elsewhere.
        """
        native = self._open()
        self._bindings.check("output", index, buffer, offset)
        facts = self._bindings.slot("output", index)
        address = buffer.address + offset
        source = self.facts.aliases.get(index)
        bound = None if source is None else self._bindings.address("input", source)
        if bound == address and not facts.planned:
            return
        twin = native.first_twin(index)
        obstacle = (
            "it is memory planned"
            if facts.planned
            else "it is a constant of the program"
            if facts.constant
            else f"it is input {source}, bound elsewhere"
            if source is not None
            else f"it is the same value as output {twin}"
            if twin != index
            else None
        )
        if obstacle is not None:
            raise RunnerError(
                Code.DRIVER_UNSAFE,
                f"output {index} of method {self.name!r} cannot be placed",
                found=obstacle,
                expected="an output with memory of its own that the program leaves to the caller",
            )
        buffer.allocator.bind(buffer, self.name, "output", index)
        with _Translated(self):
            native.set_output(index, address, facts.nbytes, buffer)
        self._bindings.pin("output", index, buffer, offset)
        self._arrays.clear()

    def execute(self) -> None:
        """See `BoundMethod.execute`. The GIL is released meanwhile."""
        native = self._open()
        if not self._ready:
            self._bindings.require_inputs()
            self._place_outputs(native)
            self._ready = True
        with _Translated(self):
            native.execute()

    def output(self, index: int) -> npt.NDArray[Any]:
        """See `BoundMethod.output`."""
        found = self._arrays.get(index)
        if found is not None:
            return found
        native = self._open()
        facts = self._bindings.slot("output", index)
        self._place_outputs(native)
        with _Translated(self):
            address, shape = native.output(index)
        if address == 0:
            raise RunnerError(
                Code.BUFFER_INVALID,
                f"output {index} of method {self.name!r} has no memory",
                remedy="Bind the input that it is the same value as.",
            )
        dtype, stored = numpy_dtype(facts.dtype), storage_shape(shape, facts.dim_order)
        owner = self._bindings.owner_of(address, facts.nbytes)
        if owner is not None:
            array = owner.view(dtype, stored, address - owner.address)
        else:
            # A constant of the program: in a mapped file, not to be written.
            array = array_at(address, dtype, stored, native)
            array.flags.writeable = False
        array = logical(array, facts.dim_order)
        if not facts.dynamic:
            self._arrays[index] = array
        return array

    def close(self) -> None:
        """Destroy the method, then release its bindings. Idempotent.

        Raises:
            RunnerError: `DRIVER_UNSAFE` while it executes on another thread; nothing was released.
        """
        if self._native is None:
            return
        with _Translated(self):
            self._native.close()
        self._native = None
        self._release()

    def _release(self) -> None:
        self._packed = None  # only now: the method is gone, and with it what is mapped
        self._arrays.clear()
        self._bindings.release()
        owned, self._owned = self._owned, []
        for buffer in owned:
            free(buffer)

    def _place_arena(self, index: int, nbytes: int) -> tuple[int, Buffer | None]:
        if nbytes == 0:
            return 0, None
        buffer = allocate(self._allocator, nbytes)
        self._owned.append(buffer)
        buffer.allocator.bind(buffer, self.name, "arena", index)
        self._bindings.pin("arena", index, buffer)
        return buffer.address, buffer

    def _place_outputs(self, native: Any) -> None:
        """Give memory to unplanned outputs that the caller has not bound."""
        for index, facts in enumerate(self.facts.outputs):
            if facts is None or facts.planned or facts.constant or index in self.facts.aliases:
                continue
            if self._bindings.get("output", index) or native.first_twin(index) != index:
                continue
            buffer = allocate(self._allocator, facts.nbytes)
            self._owned.append(buffer)
            self.bind_output(index, buffer)

    def _open(self) -> Any:
        if self._native is None:
            raise closed(f"method {self.name!r}")
        return self._native

    def __del__(self) -> None:
        if "_native" in self.__dict__:
            self.close()


class _Translated:
    """Turns the extension's exceptions into ours."""

    def __init__(self, method: NativeMethod) -> None:
        self._method = method

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        lib, name = self._method._lib, self._method.name
        if isinstance(error, lib.ExecuTorchError):
            raise ExecutionError(
                Code.EXECUTION_FAILED,
                f"method {name!r} failed",
                found=_reason(error),
                remedy="The session is broken; reset it before going on.",
            ) from error
        if isinstance(error, lib.BusyError):
            raise RunnerError(
                Code.DRIVER_UNSAFE,
                f"method {name!r} cannot be used now",
                found=str(error),
                expected="one thread at a time",
            ) from error


def _reason(error: Any) -> str:
    """ExecuTorch's code and what it logged."""
    text = f"ExecuTorch error {error.code_name.removeprefix('Error::')} (0x{error.code:x})"
    return f"{text}: {error.log}" if error.log else f"{text}: {error}"


def _extension() -> Any:
    """The compiled extension, once it is sure to fit the installed executorch."""
    installed = libraries.installed_version()
    if installed is None:
        raise _unavailable("executorch is not installed")
    try:
        if not libraries.open_library(libraries.RUNTIME):
            raise _unavailable(f"executorch {installed} ships no C++ libraries")
        libraries.open_library(libraries.THREADPOOL)
        lib: Any = importlib.import_module("staticlm.runtime._native")
    except (ImportError, OSError) as error:
        missing = isinstance(error, ModuleNotFoundError)
        raise _unavailable("it was not built" if missing else str(error)) from error
    if _release_of(lib.built_against) != _release_of(installed):
        raise _unavailable(f"it was built against executorch {lib.built_against}, not {installed}")
    return lib


def _release_of(version: str) -> str:
    return version.partition("+")[0]


def _unavailable(found: str) -> RunnerError:
    return RunnerError(
        Code.DRIVER_UNAVAILABLE,
        "the native driver cannot be loaded",
        found=found,
        remedy="Reinstall staticlm with a C++ compiler and executorch>=1.5.1,<1.6 present.",
    )
