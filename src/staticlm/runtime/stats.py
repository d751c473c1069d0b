"""What a runner did, in figures."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from staticlm.runtime.io_managers.base import BufferStats
from staticlm.runtime.speculation import SpeculationStats


@dataclass(frozen=True)
class RunnerStats:
    """Figures of a runner since it was loaded. Times are wall seconds.

    Args:
        driver: The driver that runs the program, and why it was taken.
        label: I/O contract.
        version: Version of the contract.
        load_seconds: From `load` to the first possible call, methods loaded later included.
        methods_loaded: Methods in memory now.
        prefill_tokens: Prompt tokens taken.
        prefill_seconds: Time for them.
        decode_tokens: Tokens generated after the first of each text, which prefill gives.
        decode_seconds: Time for them: sampling, decode steps, detokenising.
        execute_seconds: Time inside ExecuTorch, all sessions' prefill and decode calls together.
        calls: Executed calls by method.
        states: How the caches are kept, see `IOStats.states`.
        buffers: Every buffer of the session with the allocator that served it.
        resident_bytes: Resident memory of this process, or None where it cannot be read.
        packed_weights: Where the weights are kept as they are laid out for this processor.
        speculation: Guesses checked and accepted. The calls that prove a verify method, once per
            runner, are in no figure.
    """

    driver: str
    label: str
    version: int
    load_seconds: float
    methods_loaded: tuple[str, ...]
    prefill_tokens: int
    prefill_seconds: float
    decode_tokens: int
    decode_seconds: float
    execute_seconds: float
    calls: dict[str, int]
    states: str
    # Hundreds of lines in a large model: not part of what `print` shows.
    buffers: tuple[BufferStats, ...] = field(repr=False)
    resident_bytes: int | None
    packed_weights: str = ""
    speculation: SpeculationStats = field(default_factory=SpeculationStats)

    @property
    def prefill_tokens_per_second(self) -> float:
        """0 before the first prompt."""
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """0 before the first generated token."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def outside_seconds(self) -> float:
        """Prefill and decode time that was not spent inside ExecuTorch."""
        return self.prefill_seconds + self.decode_seconds - self.execute_seconds

    @property
    def cache_bytes(self) -> int:
        """Bytes of all caches."""
        return sum(one.nbytes for one in self.buffers if one.name.startswith("layer "))


def resident_bytes() -> int | None:
    """Resident memory of this process, or None where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
