"""Tiny decoders that keep the `hf_static` contract in every way that it allows.

A toy is small enough to lower in seconds with portable kernels only, and takes its slots in any
order and its caches in any layout, so that a runner which assumes either is found out. Weights come
from numpy: `oracle` computes the same decoder without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from staticlm.contract import (
    LABEL,
    VERSION,
    Cache,
    CacheKind,
    Contract,
    LogitsRows,
    Method,
    MethodRole,
    Part,
    Role,
    Slot,
    TensorSpec,
)

HEADS, WIDTH = 2, 4
HIDDEN = HEADS * WIDTH
_HIDDEN_SCORE = 1e30
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Toy:
    """What a toy program is like.

    Args:
        windows: One layer each: None for a full cache, a number for a sliding one.
        prefills: Steps of the prefill methods.
        verify: Step of a verify method, or None.
        prefixes: Values of `max_start` for further prefill and decode methods.
        rows: Logits rows of the prefill methods.
        cache_dtype: Dtype of the caches.
        logits_dtype: Dtype of the logits.
        capacity: Context length.
        vocab: Width of the logits.
        embedded: Rows of the embedding; fewer than `vocab` make the last ids fail when executed.
        shuffled: Slots in an unusual order, and keys of layer 0 laid out slots first.
        states: Whether the caches are also outputs: `none`, `aliased` (the input itself, written in
            place) or `fresh` (another tensor; the input is left as it was).
        seed: Of the weights.
    """

    windows: tuple[int | None, ...] = (None, 5)
    prefills: tuple[int, ...] = (6,)
    verify: int | None = None
    prefixes: tuple[int, ...] = ()
    rows: LogitsRows = LogitsRows.LAST
    cache_dtype: str = "float32"
    logits_dtype: str = "float32"
    capacity: int = 24
    vocab: int = 40
    embedded: int = 40
    shuffled: bool = False
    states: str = "none"
    seed: int = 0


def weights(toy: Toy) -> dict[str, npt.NDArray[np.float32]]:
    """float32 arrays by name; large enough that every visible position changes the logits."""
    rng = np.random.default_rng(toy.seed)

    def draw(*shape: int) -> npt.NDArray[np.float32]:
        return rng.standard_normal(shape).astype(np.float32)

    found = {"embed": draw(toy.embedded, HIDDEN), "place": draw(toy.capacity, HIDDEN)}
    for layer in range(len(toy.windows)):
        for name in ("query", "key", "value"):
            found[f"{name}_{layer}"] = draw(HEADS, HIDDEN, WIDTH) / np.float32(HIDDEN**0.5)
        found[f"out_{layer}"] = draw(HEADS, WIDTH, HIDDEN) / np.float32(HIDDEN**0.5)
    found["head"] = draw(HIDDEN, toy.vocab)
    return found


def toy_contract(toy: Toy, producers: Mapping[str, str]) -> Contract:
    """The contract that a toy keeps."""
    steps = [(f"prefill_{n}", MethodRole.PREFILL, n, toy.rows) for n in toy.prefills]
    if toy.verify is not None:
        steps.append(("verify", MethodRole.VERIFY, toy.verify, LogitsRows.ALL))
    steps.append(("decode", MethodRole.DECODE, 1, LogitsRows.LAST))
    longest = max(step for _, _, step, _ in steps)
    caches = []
    for layer, window in enumerate(toy.windows):
        kind = CacheKind.FULL if window is None else CacheKind.SLIDING
        slots = toy.capacity if window is None else min(toy.capacity, window - 1 + longest)
        for part in (Part.KEY, Part.VALUE):
            turned = toy.shuffled and layer == 0 and part is Part.KEY
            shape = (slots, HEADS, WIDTH) if turned else (HEADS, slots, WIDTH)
            layout = "slots,heads,width" if turned else "heads,slots,width"
            spec = TensorSpec(toy.cache_dtype, shape)
            caches.append(Cache(layer, part, kind, window, spec, layout))
    if toy.shuffled:
        caches.reverse()
    methods = [_method(toy, caches, *step) for step in steps]
    methods += [
        _method(toy, caches, f"{name}_to_{prefix}", role, step, rows, prefix)
        for name, role, step, rows in steps
        for prefix in toy.prefixes
        if prefix > 0 or role is MethodRole.PREFILL
    ]
    return Contract(
        label=LABEL,
        version=VERSION,
        max_context_len=toy.capacity,
        vocab_size=toy.vocab,
        methods=tuple(methods),
        caches=tuple(caches),
        bos_id=1,
        eos_ids=(2, 3),
        producers=dict(producers),
    )


def _method(
    toy: Toy,
    caches: list[Cache],
    name: str,
    role: MethodRole,
    step: int,
    rows: LogitsRows,
    max_start: int | None = None,
) -> Method:
    wanted: list[tuple[Role, TensorSpec, int | None]] = [
        (Role.TOKENS, TensorSpec("int64", (1, step)), None),
        (Role.START, TensorSpec("int64", (1,)), None),
    ]
    if step > 1:
        wanted.append((Role.LENGTH, TensorSpec("int64", (1,)), None))
    for index, cache in enumerate(caches):
        wanted.append((Role(f"{cache.part.value}_cache"), cache.spec, index))
    if toy.shuffled:
        # Another order in every method.
        wanted = wanted[step % 3 + 1 :] + wanted[: step % 3 + 1]
    height = step if rows is LogitsRows.ALL else 1
    results: list[tuple[Role, TensorSpec, int | None]] = [
        (Role.LOGITS, TensorSpec(toy.logits_dtype, (1, height, toy.vocab)), None)
    ]
    if toy.states != "none":
        states = [(Role.STATE, cache.spec, index) for index, cache in enumerate(caches)]
        results = [*states[:1], *results, *states[1:]]
    return Method(
        name=name,
        role=role,
        step=step,
        logits_rows=rows,
        inputs=tuple(Slot(i, *one) for i, one in enumerate(wanted)),
        outputs=tuple(Slot(i, *one) for i, one in enumerate(results)),
        attention="split",
        backend="portable",
        max_start=max_start,
    )


class _ToyMethod(nn.Module):
    """One method of a toy, with its slots where the contract says."""

    def __init__(self, toy: Toy, contract: Contract, method: Method) -> None:
        super().__init__()
        self.toy, self.contract, self.method = toy, contract, method
        for name, array in weights(toy).items():
            self.register_buffer(name, torch.from_numpy(array))
        step = method.step
        self.register_buffer("rows", torch.arange(step))
        gap = torch.arange(step).reshape(-1, 1) - torch.arange(step).reshape(1, -1)
        for layer, window in enumerate(toy.windows):
            seen = (gap >= 0) if window is None else (gap >= 0) & (gap < window)
            self.register_buffer(f"chunk_{layer}", seen)
        for slots in {self._read(cache.slots) for cache in contract.caches}:
            self.register_buffer(f"slots_{slots}", torch.arange(slots).reshape(1, -1))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        step = self.method.step
        given = {slot.role: inputs[slot.index] for slot in self.method.inputs if slot.cache is None}
        caches: dict[int, Tensor] = {
            slot.cache: inputs[slot.index] for slot in self.method.inputs if slot.cache is not None
        }
        start, length = given[Role.START], given.get(Role.LENGTH)
        positions = start + self.get_buffer("rows")
        x = self.get_buffer("embed")[given[Role.TOKENS].reshape(step)]
        x = x + self.get_buffer("place")[positions]
        new: dict[int, Tensor] = {}
        places = {(c.layer, c.part): i for i, c in enumerate(self.contract.caches)}
        for layer in range(len(self.toy.windows)):
            pair = places[layer, Part.KEY], places[layer, Part.VALUE]
            x, new[pair[0]], new[pair[1]] = self._layer(
                layer, x, start, positions, self._past(pair[0], caches), self._past(pair[1], caches)
            )
        states = {
            i: self._write(i, caches[i], new[i], positions, length) for i in caches if i is not None
        }
        if length is not None and self.method.logits_rows is LogitsRows.LAST:
            x = x.index_select(0, length - 1)
        logits = (x @ self.get_buffer("head")).unsqueeze(0).to(_DTYPES[self.toy.logits_dtype])
        return tuple(
            logits if slot.cache is None else states[slot.cache] for slot in self.method.outputs
        )

    def _read(self, slots: int) -> int:
        """How many slots the method reads of so many."""
        limit = self.method.max_start
        return slots if limit is None else min(slots, limit)

    def _past(self, index: int, caches: Mapping[int, Tensor]) -> Tensor:
        """float32 `[heads, slots, width]`."""
        past = caches[index].float()
        if self.contract.caches[index].layout.startswith("slots"):
            past = past.transpose(0, 1)
        return past[:, : self._read(past.shape[1])]

    def _layer(
        self, layer: int, x: Tensor, start: Tensor, positions: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The layer's output, and its new keys and values `[heads, step, width]`."""
        step, slots = x.shape[0], keys.shape[1]
        wide = x.unsqueeze(0).expand(HEADS, step, HIDDEN)
        query, key, value = (
            torch.bmm(wide, self.get_buffer(f"{name}_{layer}"))
            for name in ("query", "key", "value")
        )
        window = self.toy.windows[layer]
        index = self.get_buffer(f"slots_{slots}")
        if window is None:
            seen = (index < start).expand(step, slots)
        else:
            last = start - 1
            # The dividend is never negative: remainder kernels differ there.
            held = last - torch.remainder(last - index + slots, slots)
            seen = torch.logical_and(held >= 0, held > positions.reshape(-1, 1) - window)
        visible = torch.cat([seen, self.get_buffer(f"chunk_{layer}")], 1)
        scores = torch.bmm(query, torch.cat([keys, key], 1).transpose(1, 2))
        scores = scores + (visible.float() - 1) * _HIDDEN_SCORE
        mixed = torch.bmm(torch.softmax(scores, -1), torch.cat([values, value], 1))
        return x + torch.bmm(mixed, self.get_buffer(f"out_{layer}")).sum(0), key, value

    def _write(
        self, index: int, cache: Tensor, new: Tensor, positions: Tensor, length: Tensor | None
    ) -> Tensor:
        """Write the rows, padding as zeros, and return the cache as an output."""
        facts = self.contract.caches[index]
        if length is not None:
            new = new * (self.get_buffer("rows") < length).float().reshape(1, -1, 1)
        where = torch.remainder(positions, facts.slots)
        rows = new.to(cache.dtype)
        place: list[Tensor | None] = [None, where]
        if facts.layout.startswith("slots"):
            place, rows = [where], rows.transpose(0, 1)
        if self.toy.states == "fresh":
            fresh: Tensor = torch.ops.aten.index_put.default(cache, place, rows)
            return fresh
        torch.ops.aten.index_put_.default(cache, place, rows)
        return cache


def toy_programs(toy: Toy, contract: Contract) -> dict[str, ExportedProgram]:
    """Every method of a toy, exported."""
    programs = {}
    for method in contract.methods:
        inputs = tuple(
            torch.zeros(slot.spec.shape, dtype=_DTYPES.get(slot.spec.dtype, torch.int64))
            if slot.role is not Role.LENGTH
            else torch.ones(1, dtype=torch.int64)
            for slot in method.inputs
        )
        module = _ToyMethod(toy, contract, method).eval()
        with torch.no_grad():
            programs[method.name] = torch.export.export(module, inputs, strict=False)
    return programs
