"""What a text must give: logits, cache rows, and the caches after any sequence of calls.

Computed from the document, not by a program: `toy_oracle` is dense attention in float64 over the
whole text, and `replay` places its rows into caches by the rules of clauses C7 and C8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from staticlm.conformance.numbers import encode
from staticlm.contract import Cache, CacheKind, Contract, Part

Rows = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Text:
    """What tokens give.

    Args:
        logits: float32 `[tokens, vocabulary]`.
        rows: float32 `[tokens, heads, width]` for every `(layer, part)`.
    """

    logits: Rows
    rows: Mapping[tuple[int, Part], Rows]


def toy_oracle(
    parts: Mapping[str, npt.NDArray[np.float32]],
    windows: Sequence[int | None],
    tokens: Sequence[int],
) -> Text:
    """Dense attention with one causal, banded mask per layer.

    Args:
        parts: Weights of the toy (`toy.weights`).
        windows: Window of every layer, None for a full one.
        tokens: The text, from position 0 on.
    """
    wide = {name: array.astype(np.float64) for name, array in parts.items()}
    count = len(tokens)
    x = wide["embed"][list(tokens)] + wide["place"][:count]
    gap = np.arange(count)[:, None] - np.arange(count)[None, :]
    rows: dict[tuple[int, Part], Rows] = {}
    for layer, window in enumerate(windows):
        query, key, value = (
            np.einsum("th,ahw->atw", x, wide[f"{name}_{layer}"])
            for name in ("query", "key", "value")
        )
        seen = (gap >= 0) & (gap < (count if window is None else window))
        scores = np.where(seen, np.einsum("atw,asw->ats", query, key), -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        shares = scores / scores.sum(-1, keepdims=True)
        x = x + np.einsum("ats,asw,awh->th", shares, value, wide[f"out_{layer}"])
        rows[layer, Part.KEY] = key.transpose(1, 0, 2).astype(np.float32)
        rows[layer, Part.VALUE] = value.transpose(1, 0, 2).astype(np.float32)
    return Text((x @ wide["head"]).astype(np.float32), rows)


def replay(
    contract: Contract, rows: Sequence[Rows], calls: Sequence[tuple[str, int, int]]
) -> list[bytes]:
    """Bytes of every cache after calls, from zeroed caches.

    Args:
        contract: Geometry of the caches and steps of the methods.
        rows: `[tokens, heads, width]` of every cache of the contract.
        calls: `(method, start, valid)` in order.
    """
    steps = {method.name: method.step for method in contract.methods}
    found = []
    for cache, row in zip(contract.caches, rows, strict=True):
        held = np.zeros((cache.slots, *row.shape[1:]), np.float32)
        for method, start, valid in calls:
            for offset in range(steps[method]):
                place = slot_of(cache, start + offset)
                held[place] = row[start + offset] if offset < valid else 0
        found.append(encode(to_layout(cache, held), cache.spec.dtype))
    return found


def slot_of(cache: Cache, position: int) -> int:
    """Where a position lives."""
    return position if cache.kind is CacheKind.FULL else position % cache.slots


def to_layout(cache: Cache, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """`[slots, heads, width]` in the order of the cache's own layout."""
    names = cache.layout.split(",")
    order = [("slots", "heads", "width").index(name) for name in names]
    turned: npt.NDArray[Any] = values.transpose(order)
    return turned
