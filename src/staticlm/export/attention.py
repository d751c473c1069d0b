"""Attention over a caller-owned cache plus the chunk itself, registered as one attention function.

No modelling code is touched: every layer calls `static_attention` through transformers' attention
interface, with the keys and values of the new chunk only, because the cache layers that it is given
store nothing. The running `Chunk` holds the caches, masks and mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin

from staticlm.errors import Code, ExportError
from staticlm.export.attention_modes import (
    MODE_FUNCTIONS,
    Landing,
    alone,
    cast,
    first_slots,
    fused_alone,
    stepwise,
)

NAME = "staticlm"
"""Name under which the attention function is registered with transformers."""

_IGNORED = frozenset(
    # Arguments that layers pass along and that do not change causal attention over one sequence.
    {
        "position_ids", "use_cache", "cache", "past_key_values", "sliding_window", "output_attentions",
        "output_hidden_states", "position_embeddings", "cache_position", "deterministic", "training",
        "layer_idx", "head_mask", "dropout", "logits_to_keep", "return_dict", "is_causal",
        "output_router_logits",
    }
)  # fmt: skip


@dataclass(frozen=True)
class AttentionCall:
    """What one layer handed to attention.

    Args:
        owner: The layer whose keys these are: another one where layers share keys and values.
        softcap: Limit of the scores, or None.
    """

    layer: int
    heads: int
    kv_heads: int
    key_width: int
    value_width: int
    sliding_window: int | None
    owner: int
    softcap: float | None
    key: Tensor = field(repr=False, compare=False)


@dataclass
class Chunk:
    """The state of one trace of one method.

    `owners` gives the layer that owns the caches of a layer. `key_caches` and `value_caches` are
    `[kv heads, slots, width]` by owning layer. `past_mask` (additive, `[1 or groups*step, slots]`) and
    `chunk_mask` (`[groups*step, step]`, None for one token) are functions of the layer and its group
    count. `start` is the position of the first row, `[1]`. `new` collects the owning layers' keys and
    values `[kv heads, step, width]`. Of the caches of an owning layer, the first `read` slots are read;
    with none, a chunk attends to itself alone. `landing`, of layer, groups and kv heads, is there when
    the rows must compute what they would one by one.
    """

    mode: str
    start: Tensor
    owners: list[int]
    key_caches: dict[int, Tensor]
    value_caches: dict[int, Tensor]
    read: dict[int, int]
    past_mask: Callable[[int, int], Tensor]
    chunk_mask: Callable[[int, int], Tensor | None]
    landing: Callable[[int, int, int], Landing] | None = None
    new: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


_chunk: ContextVar[Chunk | None] = ContextVar("chunk", default=None)
_probe: ContextVar[list[AttentionCall] | None] = ContextVar("probe", default=None)


class _CaptureLayer(CacheLayerMixin):  # type: ignore[misc]
    """A cache layer that keeps nothing and hands the new keys and values on."""

    def __init__(self) -> None:
        super().__init__()
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        return None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int | Tensor:
        # Asked for by attention that scales queries by position; elsewhere positions are given.
        chunk = _chunk.get()
        return 0 if chunk is None else chunk.start

    def get_max_length(self) -> int:
        return -1


def capture_cache(layers: int) -> Cache:
    """A transformers cache whose layers store nothing."""
    return Cache(layers=[_CaptureLayer() for _ in range(layers)])


@contextmanager
def running(chunk: Chunk) -> Iterator[Chunk]:
    """Make `chunk` the one that attention works on."""
    token = _chunk.set(chunk)
    try:
        yield chunk
    finally:
        _chunk.reset(token)


@contextmanager
def probing() -> Iterator[list[AttentionCall]]:
    """Record attention calls instead of computing them."""
    calls: list[AttentionCall] = []
    token = _probe.set(calls)
    try:
        yield calls
    finally:
        _probe.reset(token)


def static_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer.

    Args:
        module: The attention module; its `layer_idx` says which caches are its own.
        query: `[1, heads, step, key width]`.
        key: `[1, kv heads, step, key width]`, the chunk's own.
        value: `[1, kv heads, step, value width]`.
        attention_mask: Must be None: masks are ours.
        scaling: Factor on the scores; the inverse square root of the key width when None.
        softcap: Scores become `softcap * tanh(scores / softcap)`.
        s_aux: Attention sinks, one logit per query head.

    Returns:
        `[1, step, heads, value width]` and None.
    """
    layer = int(getattr(module, "layer_idx", -1))
    unknown = {name for name, arg in kwargs.items() if arg is not None} - _IGNORED
    if attention_mask is not None:
        unknown.add("attention_mask")
    if kwargs.get("is_causal") is False:
        unknown.add("is_causal=False")
    if unknown:
        raise ExportError(
            Code.MODEL_UNSUPPORTED,
            f"attention of layer {layer} ({type(module).__name__})",
            found=f"arguments {', '.join(sorted(unknown))}",
            expected="causal or sliding attention, with scaling, softcap and sinks at most",
        )
    _, heads, step, width = query.shape
    kv_heads, value_width = key.shape[1], value.shape[3]
    calls = _probe.get()
    if calls is not None:
        window = kwargs.get("sliding_window")
        owner = next((c.owner for c in calls if c.key is key), layer)
        widths = width, value_width
        calls.append(AttentionCall(layer, heads, kv_heads, *widths, window, owner, softcap, key))
        return query.new_zeros((1, step, heads, value_width)), None
    chunk = _chunk.get()
    if chunk is None:
        raise RuntimeError("static attention runs inside an export only")
    groups = heads // kv_heads
    scale = width**-0.5 if scaling is None else scaling
    # Query groups are rows of their key head: no key or value is ever repeated.
    rows = (query * scale).reshape(kv_heads, groups * step, width)
    new_key = key.reshape(kv_heads, step, width)
    new_value = value.reshape(kv_heads, step, value_width)
    owner = chunk.owners[layer]
    if owner == layer:
        chunk.new[layer] = (new_key, new_value)
    sinks = None if s_aux is None else _sink_rows(s_aux, kv_heads, groups, step)
    read = chunk.read[owner]
    if read == 0:
        own = fused_alone if chunk.mode == "fused" else alone
        out = own(rows, new_key, new_value, chunk.chunk_mask(layer, groups), softcap, sinks)
        out = out.reshape(1, heads, step, value_width).transpose(1, 2)
        return out.contiguous(), None
    caches = (
        first_slots(chunk.key_caches[owner], read),
        first_slots(chunk.value_caches[owner], read),
    )
    past_mask = chunk.past_mask(layer, groups)
    if chunk.landing is None:
        out = MODE_FUNCTIONS[chunk.mode](
            rows,
            *(cast(cache, rows.dtype) for cache in caches),
            new_key,
            new_value,
            past_mask,
            chunk.chunk_mask(layer, groups),
            softcap,
            sinks,
        )
    else:
        landing = chunk.landing(layer, groups, kv_heads)
        new = new_key, new_value
        out = stepwise(chunk.mode, rows, caches, new, past_mask, landing, softcap, sinks)
    out = out.reshape(1, heads, step, value_width).transpose(1, 2)
    return out.contiguous(), None


def _sink_rows(sinks: Tensor, kv_heads: int, groups: int, step: int) -> Tensor:
    rows = sinks.reshape(kv_heads, groups, 1).expand(kv_heads, groups, step)
    return rows.reshape(kv_heads, groups * step, 1)


AttentionInterface.register(NAME, static_attention)
