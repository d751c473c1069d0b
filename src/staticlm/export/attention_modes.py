"""The attention modes: what is computed of rows, caches and the chunk's own keys and values.

Every function is of tensors alone: `[kv heads, rows, width]` queries that are scaled already, keys and
values of a cache and of the chunk, additive masks, and what the model adds (a cap on scores, sinks).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Landing:
    """Where the rows of a chunk will stand in a layer's caches, for rows taken one by one.

    Args:
        places: One-hot `[kv heads, step, slots]`: the slot of each row.
        stays: `[1, slots]`: 0 where a row lands, 1 elsewhere.
        own: `[groups * step, step]`: 1 where a query row meets its own key.
        ones: `[kv heads, step, 1]`.
    """

    places: Tensor
    stays: Tensor
    own: Tensor
    ones: Tensor


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` itself where it already has the dtype, so that no cast is traced."""
    return x if x.dtype == dtype else x.to(dtype)


def first_slots(cache: Tensor, count: int) -> Tensor:
    """The first slots of `[kv heads, slots, width]`: the cache itself where that is all of them."""
    return cache if count == cache.shape[1] else cache[:, :count]


def _cap(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def _softmax(scores: list[Tensor], sinks: Tensor | None) -> Tensor:
    parts = scores if sinks is None else [*scores, sinks.to(scores[0].dtype)]
    joined = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    return torch.softmax(joined, dim=-1)


def alone(
    rows: Tensor,
    new_key: Tensor,
    new_value: Tensor,
    chunk_mask: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """The chunk sees nothing before itself."""
    own = _cap(torch.bmm(rows, new_key.transpose(1, 2)), softcap)
    if chunk_mask is not None:
        own = own + chunk_mask
    weights = _softmax([own], sinks)
    if sinks is not None:
        # Only then: a slice of everything would cut the delegate.
        weights = weights[:, :, : new_key.shape[1]]
    return torch.bmm(weights, new_value)


def _split(
    rows: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    new_key: Tensor,
    new_value: Tensor,
    past_mask: Tensor,
    chunk_mask: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Scores against the cache and the chunk apart, one softmax, two weighted sums."""
    slots, step = key_cache.shape[1], new_key.shape[1]
    past = _cap(torch.bmm(rows, key_cache.transpose(1, 2)), softcap) + past_mask
    own = _cap(torch.bmm(rows, new_key.transpose(1, 2)), softcap)
    if chunk_mask is not None:
        own = own + chunk_mask
    weights = _softmax([past, own], sinks)
    on_cache = torch.bmm(weights[:, :, :slots], value_cache)
    return on_cache + torch.bmm(weights[:, :, slots : slots + step], new_value)


def _joined_mask(count: int, past_mask: Tensor, chunk_mask: Tensor | None) -> Tensor:
    """The mask of `count` rows over the cache and the chunk together."""
    own = past_mask.new_zeros((count, 1)) if chunk_mask is None else chunk_mask
    return torch.cat([past_mask.expand(count, past_mask.shape[1]), own], dim=-1)


def _concat(
    rows: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    new_key: Tensor,
    new_value: Tensor,
    past_mask: Tensor,
    chunk_mask: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Keys and values concatenated with the chunk first, then ordinary attention."""
    total = key_cache.shape[1] + new_key.shape[1]
    keys = torch.cat([key_cache, new_key], dim=1)
    values = torch.cat([value_cache, new_value], dim=1)
    mask = _joined_mask(rows.shape[1], past_mask, chunk_mask)
    scores = _cap(torch.bmm(rows, keys.transpose(1, 2)), softcap) + mask
    weights = _softmax([scores], sinks)
    if sinks is not None:
        weights = weights[:, :, :total]
    return torch.bmm(weights, values)


def _fused(
    rows: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    new_key: Tensor,
    new_value: Tensor,
    past_mask: Tensor,
    chunk_mask: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """One attention operator over the cache and the chunk, for backends that have a kernel for it."""
    keys = torch.cat([key_cache, new_key], dim=1)
    values = torch.cat([value_cache, new_value], dim=1)
    mask = _joined_mask(rows.shape[1], past_mask, chunk_mask)
    return _operator(rows, keys, values, mask, sinks)


def fused_alone(
    rows: Tensor,
    new_key: Tensor,
    new_value: Tensor,
    chunk_mask: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    mask = rows.new_zeros((rows.shape[1], new_key.shape[1])) if chunk_mask is None else chunk_mask
    return _operator(rows, new_key, new_value, mask, sinks)


def _operator(
    rows: Tensor, keys: Tensor, values: Tensor, mask: Tensor, sinks: Tensor | None
) -> Tensor:
    """`scaled_dot_product_attention` of `[kv heads, rows, width]`.

    A sink is one more key of zeros, whose score is its mask, with a value of zeros.
    """
    mask = mask[None, None]
    if sinks is not None:
        keys = torch.nn.functional.pad(keys, (0, 0, 0, 1))
        values = torch.nn.functional.pad(values, (0, 0, 0, 1))
        mask = mask.expand(1, *sinks.shape[:2], mask.shape[-1])
        mask = torch.cat([mask, sinks.to(mask.dtype)[None]], dim=-1)
    out = torch.nn.functional.scaled_dot_product_attention(
        rows[None], keys[None], values[None], attn_mask=mask, scale=1.0
    )
    return out[0]


def stepwise(
    mode: str,
    rows: Tensor,
    caches: tuple[Tensor, Tensor],
    new: tuple[Tensor, Tensor],
    past_mask: Tensor,
    landing: Landing,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """What `mode` computes for each row alone, once the rows before it are in the caches.

    Not only the same values but the same sums: every score is where it would be, so that softmax and
    the weighted sum add the same numbers in the same order. Products with 0 and 1 are exact.
    """
    slots = caches[0].shape[1]
    key_cache, value_cache = (cast(cache, rows.dtype) for cache in caches)
    # The rows before are read back from the caches, in the caches' dtype.
    landed_key, landed_value = (
        cast(cast(row, cache.dtype), rows.dtype) for row, cache in zip(new, caches, strict=True)
    )
    past = _cap(torch.bmm(rows, key_cache.transpose(1, 2)), softcap)
    own = _cap(torch.bmm(rows, new[0].transpose(1, 2)), softcap)
    landed = own
    if landed_key is not new[0]:
        landed = _cap(torch.bmm(rows, landed_key.transpose(1, 2)), softcap)
    past = past * landing.stays + torch.bmm(landed, landing.places) + past_mask
    weights = _softmax([past, torch.bmm(own * landing.own, landing.ones)], sinks)
    values = value_cache * landing.stays.reshape(-1, 1)
    values = values + torch.bmm(landing.places.transpose(1, 2), landed_value)
    on_cache, on_own = weights[:, :, :slots], weights[:, :, slots : slots + 1] * landing.own
    if mode == "concat":
        joined = torch.cat([on_cache, on_own], dim=-1)
        return torch.bmm(joined, torch.cat([values, new[1]], dim=1))
    return torch.bmm(on_cache, values) + torch.bmm(on_own, new[1])


MODE_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "split": _split,
    "concat": _concat,
    "fused": _fused,
}
"""The attention modes that can be traced."""
