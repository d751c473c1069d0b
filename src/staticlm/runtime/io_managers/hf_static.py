"""`hf_static` version 1: caches are program inputs that every method writes in place."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from staticlm.contract.check import check_contract
from staticlm.contract.facts import CacheKind, Contract, LogitsRows, Method, Role, Slot
from staticlm.contract.metadata import read_contract
from staticlm.contract.program import ProgramFacts
from staticlm.errors import Code, ContractError, RunnerError
from staticlm.runtime.bindings import numpy_dtype
from staticlm.runtime.buffers import Buffer, BufferAllocator, allocate, free
from staticlm.runtime.driver import BoundMethod
from staticlm.runtime.io_managers.base import BufferStats, IOStats, Logits, as_float32
from staticlm.runtime.plan import Call
from staticlm.runtime.shared_program import SharedProgram

_CONTROL = (Role.TOKENS, Role.START, Role.LENGTH, Role.POSITIONS, Role.MASK)


def create(
    facts: ProgramFacts, program: SharedProgram, allocator: BufferAllocator
) -> HFStaticManager:
    """Read and check the contract.

    Raises:
        ContractError: The program's metadata is malformed or the program does not keep it.
    """
    contract = read_contract(facts)
    check_contract(contract, facts)
    for method in contract.methods:
        _refuse_states(method)
    return HFStaticManager(contract, program, allocator)


def _refuse_states(method: Method) -> None:
    """`check_contract` admits returned states; this manager keeps caches in place only."""
    for slot in method.outputs:
        if slot.role is not Role.LOGITS:
            raise ContractError(
                Code.SLOT_MISMATCH,
                f"method {method.name!r}, output {slot.index}",
                found=slot.role.value,
                expected="logits only: caches are written in place",
            )


@dataclass(frozen=True)
class Control:
    """A small integer input of one method, and its memory."""

    slot: Slot
    buffer: Buffer
    view: npt.NDArray[Any]


class HFStaticManager:
    """Caches and control inputs of one session over an `hf_static` program."""

    states = "in place"
    """How the caches are kept, see `IOStats.states`."""

    def __init__(
        self, contract: Contract, program: SharedProgram, allocator: BufferAllocator
    ) -> None:
        self.contract = contract
        self._program = program
        self._allocator = allocator
        self._calls: Counter[str] = Counter()
        self._execute_seconds = 0.0
        self._dirty = False
        self._open = False
        self._closed = False
        self._caches: list[Buffer] = []
        self._control: dict[str, dict[Role, Control]] = {}
        self._methods = {method.name: method for method in contract.methods}

    def open(self) -> None:
        """Allocate the caches and the memory of the small inputs; see `IOManager.open`."""
        if self._open:
            return
        self._check_open(closed_only=True)
        self._program.join(self)
        self._open = True
        try:
            for cache in self.contract.caches:
                self._caches.append(allocate(self._allocator, cache.spec.nbytes))
            self._clear(fresh=True)
            for method in self.contract.methods:
                self._control[method.name] = {
                    slot.role: self._make_control(slot)
                    for slot in method.inputs
                    if slot.role in _CONTROL
                }
        except BaseException:
            self.close()
            raise

    def _make_control(self, slot: Slot) -> Control:
        buffer = allocate(self._allocator, slot.spec.nbytes)
        return Control(slot, buffer, buffer.view(numpy_dtype(slot.spec.dtype), slot.spec.shape))

    def bind(self, name: str, method: BoundMethod) -> None:
        """Bind this session's memory to every input slot of a method."""
        control = self._control[name]
        for slot in self._methods[name].inputs:
            if slot.cache is not None:
                method.bind_input(slot.index, self._caches[slot.cache])
            else:
                method.bind_input(slot.index, control[slot.role].buffer)

    def prepare(self, method: str) -> None:
        """Load a method and bind its slots."""
        self._check_open()
        self._program.method(method, self, self._allocator)

    def step(self, call: Call, tokens: Sequence[int], all_rows: bool = False) -> Logits:
        """Execute one call; see `IOManager.step`."""
        self._check_open()
        method = self._methods[call.method]
        if all_rows and method.logits_rows is not LogitsRows.ALL and call.valid > 1:
            raise RunnerError(
                Code.PROGRAM_UNSUPPORTED,
                f"method {method.name!r} returns the logits of the last row only",
                remedy="Export the model with the logits of all rows.",
            )
        control = self._control[call.method]
        rows = control[Role.TOKENS].view
        rows[0, : call.valid] = tokens
        rows[0, call.valid :] = 0
        self._fill(call, control)
        with self._program.lock:
            bound = self._program.method(call.method, self, self._allocator)
            self._dirty = True
            self._before(call, bound)
            begun = time.perf_counter()
            bound.execute()
            self._execute_seconds += time.perf_counter() - begun
            self._calls[call.method] += 1
            self._after(call, bound)
            return _rows(bound.output(method.logits.index), method, call, all_rows)

    def _fill(self, call: Call, control: Mapping[Role, Control]) -> None:
        """Write the small inputs other than the tokens."""
        control[Role.START].view[0] = call.start
        if Role.LENGTH in control:
            control[Role.LENGTH].view[0] = call.valid

    def _before(self, call: Call, bound: BoundMethod) -> None:
        """Room for managers whose caches need work before a call."""

    def _after(self, call: Call, bound: BoundMethod) -> None:
        """Room for managers whose caches need work after a call."""

    def reset(self) -> None:
        """Zero the caches, so that nothing of an earlier text or a failed call stays."""
        self._check_open()
        if self._dirty:
            self._clear()

    def can_rollback(self, end: int, position: int) -> bool:
        """Full caches keep every row; a ring keeps the last `slots` rows written."""
        for cache in self.contract.caches:
            if cache.kind is CacheKind.SLIDING and end > cache.slots:
                window = cache.window or 0
                if position - window + 1 < end - cache.slots:
                    return False
        return True

    def stats(self) -> IOStats:
        """Figures so far."""
        named = [
            (f"layer {cache.layer} {cache.part.value}", buffer)
            for cache, buffer in zip(self.contract.caches, self._caches, strict=False)
        ]
        for name, control in self._control.items():
            named += [(f"{name} {role.value}", one.buffer) for role, one in control.items()]
        return IOStats(
            label=self.contract.label,
            version=self.contract.version,
            states=self.states,
            calls=dict(self._calls),
            execute_seconds=self._execute_seconds,
            buffers=tuple(BufferStats(n, b.nbytes, b.kind) for n, b in named),
        )

    def close(self) -> None:
        """Unbind from the methods, then free the buffers. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._program.leave(self)
        buffers = self._caches
        for control in self._control.values():
            buffers += [one.buffer for one in control.values()]
        self._caches, self._control = [], {}
        for buffer in buffers:
            free(buffer)

    def _clear(self, fresh: bool = False) -> None:
        for buffer in self._caches:
            # Untouched pages take no memory yet.
            if not (fresh and buffer.zeroed):
                buffer.view(np.uint8, (buffer.nbytes,))[:] = 0
        self._dirty = False

    def _check_open(self, closed_only: bool = False) -> None:
        if self._closed or not (self._open or closed_only):
            state = "closed" if self._closed else "not open"
            raise RunnerError(Code.CLOSED, f"the session is {state}", remedy="Make a new one.")


def _rows(output: npt.NDArray[Any], method: Method, call: Call, all_rows: bool) -> Logits:
    """The wanted rows of a logits output `[1, rows, vocabulary]` as a float32 copy."""
    if method.logits_rows is LogitsRows.LAST:
        return as_float32(output[0])
    first = 0 if all_rows else call.valid - 1
    return as_float32(output[0, first : call.valid])
