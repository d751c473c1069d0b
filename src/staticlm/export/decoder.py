"""One fixed-shape method of a model as a module that `torch.export` can trace."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from staticlm.contract import Cache, CacheKind, LogitsRows, MethodRole, Part
from staticlm.export.attention import Chunk, capture_cache, running
from staticlm.export.attention_modes import Landing, cast
from staticlm.export.constants import Constants
from staticlm.export.rewrites import Rewrites
from staticlm.export.traits import LayerTraits, ModelTraits

TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


STEPWISE = "stepwise-"
"""Prefix of an attention mode whose rows compute, sum by sum, what they would one by one."""


@dataclass(frozen=True)
class MethodPlan:
    """A method to be exported. A verify method has decode's attention mode, prefixed `STEPWISE`.

    A method with `max_start` reads only the slots of the positions before that.
    """

    name: str
    role: MethodRole
    step: int
    logits_rows: LogitsRows
    attention: str
    max_start: int | None = None
    attention_why: str = ""


def masked_value(dtype: torch.dtype) -> float:
    """A large finite negative number: an all-masked row must not become NaN."""
    return -3e4 if dtype is torch.float16 else -1e30


class StaticDecoder(nn.Module):
    """A model driven through caches that belong to the caller.

    Call it with tokens int64 `[1, step]`, start position int64 `[1]`, valid length int64 `[1]` (absent
    when the step is 1), then every cache `[kv heads, slots, width]`: all keys and values, layer by
    layer. It returns logits `[1, 1, vocabulary]` or `[1, step, vocabulary]` and writes the caches in
    place after the whole model ran. Rows from the valid length on are padding: they write zeros.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        traits: ModelTraits,
        caches: tuple[Cache, ...],
        capacity: int,
        plan: MethodPlan,
    ) -> None:
        super().__init__()
        self.model = model
        self.constants = Constants()
        self.traits = traits
        self.plan = plan
        self._capacity = capacity
        self._slots = {c.layer: c.slots for c in caches if c.part is Part.KEY}
        self._dtype = model.dtype

    def forward(self, tokens: Tensor, start: Tensor, *rest: Tensor) -> Tensor:
        step = self.plan.step
        length, caches = (None, rest) if step == 1 else (rest[0], rest[1:])
        layers = self.traits.layers
        owning = [layer.index for layer in layers if layer.owner == layer.index]
        keys = dict(zip(owning, caches[0::2], strict=True))
        values = dict(zip(owning, caches[1::2], strict=True))
        rows = self.constants.get("rows", lambda: torch.arange(step))
        positions = start + rows
        mode = self.plan.attention.removeprefix(STEPWISE)
        stepwise = mode != self.plan.attention
        limit = self.plan.max_start
        read = {
            layer: slots if limit is None else min(slots, limit)
            for layer, slots in self._slots.items()
        }
        masks = _Masks(
            self.constants, self._dtype, step, start, positions, self.traits, read, stepwise
        )
        owners = [layer.owner for layer in layers]
        landing = masks.landing if stepwise else None
        chunk = Chunk(mode, start, owners, keys, values, read, masks.past, masks.chunk, landing)
        keep: int | Tensor = 0
        if length is not None and self.plan.logits_rows is LogitsRows.LAST:
            keep = length - 1
        with running(chunk), Rewrites(self.constants):
            out = self.model(
                input_ids=tokens,
                position_ids=positions.reshape(1, step),
                cache=capture_cache(len(layers)),
                use_cache=True,
                logits_to_keep=keep,
            )
        real = None
        zero = self.constants.get("zero", lambda: torch.zeros((1, 1, 1), dtype=self._dtype))
        if length is not None:
            real = (rows < length).to(self._dtype).reshape(1, step, 1)
        # All writes come after the whole model: a write inside a layer would split the delegate.
        wrapped: dict[int, Tensor] = {}
        for layer in (layers[index] for index in owning):
            slots = self._slots[layer.index]
            where = positions
            if layer.kind is CacheKind.SLIDING and slots < self._capacity:
                if slots not in wrapped:
                    wrapped[slots] = torch.remainder(positions, slots)
                where = wrapped[slots]
            pair = (keys[layer.index], values[layer.index])
            for cache, new in zip(pair, chunk.new[layer.index], strict=True):
                # The sum turns -0.0 into 0.0, so that no bit of a cache depends on padding ids.
                row = new if real is None else new * real + zero
                torch.ops.aten.index_put_.default(cache, [None, where], cast(row, cache.dtype))
        logits: Tensor = out.logits
        return logits


class _Masks:
    """Additive masks of one chunk, made once per kind and shared by the layers."""

    def __init__(
        self,
        constants: Constants,
        dtype: torch.dtype,
        step: int,
        start: Tensor,
        positions: Tensor,
        traits: ModelTraits,
        read: dict[int, int],
        stepwise: bool,
    ) -> None:
        self._constants = constants
        self._dtype = dtype
        self._step = step
        self._stepwise = stepwise
        # The position from which on a row sees nothing in the caches.
        self._start = positions.reshape(-1, 1) if stepwise else start
        self._positions = positions
        self._layers = traits.layers
        self._read = read
        """How many slots are read of the caches of a layer that owns some."""
        self._made: dict[tuple[object, ...], Tensor] = {}

    def past(self, layer: int, groups: int) -> Tensor:
        """`[1, slots]` where all rows see the same, else `[groups * step, slots]`; of slots read."""
        facts = self._layers[layer]
        slots = self._read[facts.owner]
        plain = facts.kind is CacheKind.FULL and facts.chunk is None and not self._stepwise
        repeat = 1 if plain or self._step == 1 else groups
        key = ("past", facts.window, facts.chunk, slots, repeat)
        if key not in self._made:
            visible = (
                self._full(facts, slots)
                if facts.kind is CacheKind.FULL
                else self._ring(facts, slots)
            )
            mask = (visible.to(self._dtype) - 1.0) * -masked_value(self._dtype)
            self._made[key] = mask if repeat == 1 else self._repeat(mask, repeat)
        return self._made[key]

    def chunk(self, layer: int, groups: int) -> Tensor | None:
        """`[groups * step, step]`, or None for one token: it always sees itself."""
        if self._step == 1:
            return None
        window, chunk = self._layers[layer].window, self._layers[layer].chunk
        mask = self._constants.get(
            f"chunk_mask_{window or 0}_{groups}", lambda: self._chunk_mask(window).repeat(groups, 1)
        )
        if chunk is None:
            return mask
        key = ("chunk", chunk, groups)
        if key not in self._made:
            begin = self._chunk_begin(chunk)
            together = begin == begin.reshape(1, -1)
            apart = (together.to(self._dtype) - 1.0) * -masked_value(self._dtype)
            self._made[key] = torch.minimum(self._repeat(apart, groups), mask)
        return self._made[key]

    def landing(self, layer: int, groups: int, heads: int) -> Landing:
        """Where the rows land in the caches of a layer."""
        step, slots = self._step, self._read[self._layers[layer].owner]
        key = ("landing", slots, heads)
        if key not in self._made:
            where = torch.remainder(self._positions, slots).reshape(-1, 1)
            places = (self._index(slots) == where).to(self._dtype)
            one = self._constants.get("landing_rows", lambda: self._ones(1, step))
            self._made["stays", slots] = 1.0 - one @ places
            wide = self._constants.get(f"landing_heads_{heads}", lambda: self._ones(heads, 1, 1))
            self._made[key] = places.reshape(1, *places.shape) * wide
        return Landing(
            places=self._made[key],
            stays=self._made["stays", slots],
            own=self._constants.get(
                f"own_{groups}", lambda: torch.eye(step, dtype=self._dtype).repeat(groups, 1)
            ),
            ones=self._constants.get(f"own_sum_{heads}", lambda: self._ones(heads, step, 1)),
        )

    def _ones(self, *shape: int) -> Tensor:
        return torch.ones(shape, dtype=self._dtype)

    def _chunk_begin(self, chunk: int) -> Tensor:
        """`[step, 1]`: the first position of the attention chunk that each row is in."""
        positions = self._positions.reshape(-1, 1)
        return positions - torch.remainder(positions, chunk)

    def _chunk_mask(self, window: int | None) -> Tensor:
        row = torch.arange(self._step).reshape(-1, 1)
        column = torch.arange(self._step).reshape(1, -1)
        visible = column <= row
        if window is not None:
            visible &= column > row - window
        mask = torch.zeros((self._step, self._step), dtype=self._dtype)
        return mask.masked_fill(~visible, masked_value(self._dtype))

    def _index(self, slots: int) -> Tensor:
        return self._constants.get(f"slots_{slots}", lambda: torch.arange(slots).reshape(1, -1))

    def _full(self, facts: LayerTraits, slots: int) -> Tensor:
        before = self._index(slots) < self._start
        if facts.chunk is None:
            return before
        return torch.logical_and(before, self._index(slots) >= self._chunk_begin(facts.chunk))

    def _ring(self, facts: LayerTraits, slots: int) -> Tensor:
        """Slot j holds the last position before the chunk that is congruent to j."""
        assert facts.window is not None
        last = self._start - 1
        # The dividend is kept non-negative: ExecuTorch's portable remainder truncates.
        held = last - torch.remainder(last - self._index(slots) + slots, slots)
        oldest = self._positions.reshape(-1, 1) - facts.window
        return torch.logical_and(held >= 0, held > oldest)

    def _repeat(self, mask: Tensor, groups: int) -> Tensor:
        # A product with ones: XNNPACK takes no concatenation of a tensor with itself.
        ones = self._constants.get(
            f"ones_{groups}", lambda: torch.ones((groups, 1, 1), dtype=self._dtype)
        )
        return (mask.reshape(1, *mask.shape) * ones).reshape(groups * mask.shape[0], -1)
