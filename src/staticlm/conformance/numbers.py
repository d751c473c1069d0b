"""Bytes of float tensors, bfloat16 included, without torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_STORED = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}

TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
"""Largest difference that passes, relative to the largest expected value, by the least dtype."""


def encode(values: npt.NDArray[Any], dtype: str) -> bytes:
    """Little-endian bytes of values rounded to the nearest (ties to even)."""
    if dtype != "bfloat16":
        return np.ascontiguousarray(values, dtype=_STORED[dtype]).tobytes()
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return (rounded >> 16).astype(np.uint16).tobytes()


def decode(data: bytes, dtype: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """float32 values of bytes."""
    stored = np.frombuffer(data, dtype=_STORED[dtype]).reshape(shape)
    if dtype == "bfloat16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


def difference(found: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> float:
    """Largest absolute difference relative to the largest wanted value; infinite for NaN."""
    if found.shape != wanted.shape:
        return float("inf")
    scale = max(float(np.abs(wanted).max(initial=0)), 1e-6)
    worst = float(np.abs(found - wanted).max(initial=0)) / scale
    return worst if worst == worst else float("inf")
