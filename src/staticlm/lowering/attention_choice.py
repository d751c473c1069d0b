"""What `--attention auto` stands for: the mode that was faster when it was measured."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """One layer's share of a call, in milliseconds, by attention mode.

    Args:
        step: Tokens per call.
        slots: Cache slots read.
    """

    step: int
    slots: int
    split: float
    concat: float
    fused: float | None = None

    def times(self) -> dict[str, float]:
        """Milliseconds by mode, of those that were measured."""
        found = {"split": self.split, "concat": self.concat, "fused": self.fused}
        return {mode: time for mode, time in found.items() if time is not None}


MACHINE = "AMD EPYC with AVX2, 2 threads; python benchmarks/attention.py"

MEASURED: dict[str, tuple[Timing, ...]] = {
    "xnnpack": (
        Timing(1, 256, 0.164, 0.185),
        Timing(1, 1024, 0.246, 0.336),
        Timing(1, 4096, 0.454, 0.752),
        Timing(128, 256, 3.592, 3.225),
        Timing(128, 1024, 5.170, 5.375),
        Timing(128, 4096, 17.242, 14.243),
    ),
    "openvino": (
        Timing(1, 256, 0.316, 0.255, 0.242),
        Timing(1, 1024, 0.513, 0.383, 0.432),
        Timing(1, 4096, 1.181, 1.587, 1.262),
        Timing(128, 256, 5.092, 3.154, 2.942),
        Timing(128, 1024, 15.933, 5.313, 5.154),
        Timing(128, 4096, 44.871, 16.447, 19.285),
    ),
}
"""By backend. Other backends take their preferred mode."""

_NOISE = 0.95
"""Only what is faster than this share of the preferred mode's time counts as faster."""


def choose_attention(
    backend: str, step: int, slots: int, preferred: str, without: tuple[str, ...] = ()
) -> tuple[str, str]:
    """The attention mode of a method, and why.

    Args:
        backend: Name of the backend.
        step: Tokens per call.
        slots: Slots that the method reads of a full cache.
        preferred: The mode where nothing was measured.
        without: Modes that are ruled out.
    """
    if slots == 0:
        return preferred, "it reads no cache: there is nothing to choose"
    timings = MEASURED.get(backend, ())
    if not timings:
        return preferred, f"preferred by backend {backend}, not measured"
    # The nearest shape: first in tokens per call, then in slots, by their ratio.
    nearest = min(
        timings,
        key=lambda t: (abs(math.log(t.step / step)), abs(math.log(t.slots / slots))),
    )
    times = {mode: time for mode, time in nearest.times().items() if mode not in without}
    mode = min(times, key=lambda m: times[m] * (_NOISE if m == preferred else 1))
    measured = ", ".join(f"{one} {time:g} ms" for one, time in times.items())
    why = f"{measured} a layer for {nearest.step} tokens over {nearest.slots} slots ({MACHINE})"
    return mode, why
