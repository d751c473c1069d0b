"""Programs that return their states: which of them are in place, swapped, or copied back.

An output that is the same value as the cache input it updates is written in place. Another one is
pointed at a second set of buffers and the sets are swapped, where the driver can do that; pointing
it at the buffer that the same call reads would be right only for some orders of execution. Else it
is copied back, and the figures say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from staticlm.contract.check import check_contract
from staticlm.contract.facts import LABEL, Contract, Method, Part, Role, Slot
from staticlm.contract.metadata import KEY_LABEL, parse_contract
from staticlm.contract.program import MethodFacts, ProgramFacts
from staticlm.errors import Code, ContractError
from staticlm.runtime.buffers import Buffer, BufferAllocator, allocate
from staticlm.runtime.driver import BoundMethod
from staticlm.runtime.io_managers import exporter_record
from staticlm.runtime.io_managers.hf_static import Control, HFStaticManager, create
from staticlm.runtime.plan import Call
from staticlm.runtime.shared_program import SharedProgram

KVCACHE_IO = "kvcache_io"
"""Label of programs that take every cache and return it updated, with our layout metadata."""


def create_static(
    facts: ProgramFacts, program: SharedProgram, allocator: BufferAllocator
) -> HFStaticManager:
    """The factory of `hf_static`: our own programs, or those of `transformers.exporters`."""
    if exporter_record.recognizes(facts):
        contract = exporter_record.read_exporter_contract(facts)
        return ReturnedStatesManager(contract, program, allocator)
    return create(facts, program, allocator)


def create_kvcache_io(
    facts: ProgramFacts, program: SharedProgram, allocator: BufferAllocator
) -> ReturnedStatesManager:
    """The factory of `kvcache_io`: metadata as `hf_static`, every cache among the outputs.

    Raises:
        ContractError: The metadata is malformed or the program does not keep it.
    """
    contract = replace(parse_contract({**facts.constants, KEY_LABEL: LABEL}), label=KVCACHE_IO)
    check_contract(contract, facts)
    return ReturnedStatesManager(contract, program, allocator)


class Return(str, Enum):
    """What becomes of one returned state."""

    IN_PLACE = "in place"
    SWAPPED = "swapped"
    COPIED = "copied"
    UNUSED = "unused"
    """A second copy of a state that is in place already."""


def how_returned(
    method: Method, facts: MethodFacts, bind_outputs: bool
) -> dict[int, tuple[Slot, Return]]:
    """How each state output of a method is taken back, by output index.

    Raises:
        ContractError: A cache that the method neither writes in place nor returns.
    """
    inputs = {slot.cache: slot.index for slot in method.inputs if slot.cache is not None}
    ways: dict[int, tuple[Slot, Return]] = {}
    settled: set[int] = set()
    states = [slot for slot in method.outputs if slot.role is Role.STATE]
    for slot in states:
        tensor = facts.outputs[slot.index]
        if slot.cache is None or tensor is None:
            continue
        if facts.aliases.get(slot.index) == inputs[slot.cache] and not tensor.planned:
            ways[slot.index] = (slot, Return.IN_PLACE)
            settled.add(slot.cache)
    for slot in states:
        tensor = facts.outputs[slot.index]
        if slot.index in ways or slot.cache is None:
            continue
        if slot.cache in settled:
            ways[slot.index] = (slot, Return.UNUSED)
            continue
        settled.add(slot.cache)
        bindable = bind_outputs and tensor is not None and not tensor.planned
        aliased = slot.index in facts.aliases
        way = Return.SWAPPED if bindable and not aliased else Return.COPIED
        ways[slot.index] = (slot, way)
    missing = sorted(set(inputs) - settled)
    if missing:
        raise ContractError(
            Code.SLOT_MISMATCH,
            f"method {method.name!r} takes caches that it does not return",
            found=f"caches {missing[:8]}",
            expected="every cache among its outputs",
        )
    return ways


class ReturnedStatesManager(HFStaticManager):
    """A session over a program whose methods return the updated caches."""

    def __init__(
        self,
        contract: Contract,
        program: SharedProgram,
        allocator: BufferAllocator,
    ) -> None:
        super().__init__(contract, program, allocator)
        bind_outputs = program.driver.capabilities.bind_outputs
        self._ways = {
            method.name: how_returned(method, program.facts.methods[method.name], bind_outputs)
            for method in contract.methods
        }
        ways = {way for each in self._ways.values() for _, way in each.values()}
        kinds = [one for one in (Return.COPIED, Return.SWAPPED, Return.IN_PLACE) if one in ways]
        self.states = " and ".join(kind.value for kind in kinds)
        self._swaps = Return.SWAPPED in ways
        self._others: list[Buffer] = []
        self._parity = 0
        self._bound_parity: dict[str, int] = {}

    def open(self) -> None:
        """Allocate, with a second set of caches where they are swapped."""
        if self._open:
            return
        super().open()
        if not self._swaps:
            return
        try:
            for cache in self.contract.caches:
                self._others.append(allocate(self._allocator, cache.spec.nbytes))
            self._clear()
        except BaseException:
            self.close()
            raise

    def bind(self, name: str, method: BoundMethod) -> None:
        """Bind inputs, and outputs that are swapped."""
        super().bind(name, method)
        for index, (slot, way) in self._ways[name].items():
            if way is Return.SWAPPED and slot.cache is not None:
                method.bind_output(index, self._others[slot.cache])
        self._bound_parity[name] = self._parity

    def _fill(self, call: Call, control: Mapping[Role, Control]) -> None:
        positions = call.start + np.arange(call.step)
        if Role.START in control:
            control[Role.START].view[...] = call.start
        if Role.LENGTH in control:
            control[Role.LENGTH].view[...] = call.valid
        if Role.POSITIONS in control:
            control[Role.POSITIONS].view[...] = positions
        if Role.MASK in control:
            mask = control[Role.MASK].view
            visible = np.arange(mask.shape[-1])[None, :] <= positions[:, None]
            mask[...] = _mask_values(visible, control[Role.MASK].slot.spec.dtype)
        for cache, buffer in zip(self.contract.caches, self._caches, strict=True):
            if cache.part is Part.COUNTER:
                # The runner counts; a padded chunk would let the program's own counter run ahead.
                buffer.view(np.int64, cache.spec.shape)[...] = call.start

    def _before(self, call: Call, bound: BoundMethod) -> None:
        if self._swaps and self._bound_parity.get(call.method) != self._parity:
            self.bind(call.method, bound)

    def _after(self, call: Call, bound: BoundMethod) -> None:
        for index, (slot, way) in self._ways[call.method].items():
            if way is Return.COPIED and slot.cache is not None:
                state = bound.output(index)
                self._caches[slot.cache].view(state.dtype, state.shape)[...] = state
        if any(way is Return.SWAPPED for _, way in self._ways[call.method].values()):
            self._swap(call.method)

    def _swap(self, name: str) -> None:
        for slot, way in self._ways[name].values():
            if way is Return.SWAPPED and slot.cache is not None:
                at = slot.cache
                self._caches[at], self._others[at] = self._others[at], self._caches[at]
        self._parity += 1

    def _clear(self, fresh: bool = False) -> None:
        super()._clear(fresh)
        for buffer in self._others:
            buffer.view(np.uint8, (buffer.nbytes,))[:] = 0

    def close(self) -> None:
        """As the base, with the second set of caches."""
        if not self._closed:
            self._caches += self._others
            self._others = []
        super().close()


def _mask_values(visible: npt.NDArray[np.bool_], dtype: str) -> npt.NDArray[Any]:
    """A mask in the program's dtype: true where visible, or 0 and the most negative finite value."""
    if dtype == "bool":
        return visible
    if dtype == "bfloat16":
        # 0xFF7F is the most negative finite bfloat16.
        bits: npt.NDArray[Any] = np.where(visible, np.uint16(0), np.uint16(0xFF7F))
        return bits
    kind = np.dtype(dtype)
    values: npt.NDArray[Any] = np.where(visible, kind.type(0), np.finfo(kind).min).astype(kind)
    return values
