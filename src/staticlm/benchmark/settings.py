"""What a benchmark measures, checked against the artifact before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from staticlm.contract.facts import Contract
from staticlm.errors import CapacityError, Code, UsageError

WARMUP_STEPS = 2
"""Decode steps before the timed ones, at every context."""


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Args:
        prompts: Prompt lengths of prefill, in tokens.
        contexts: Tokens in the caches before the timed decode steps.
        steps: Timed decode steps at each context.
        repeats: Rounds; in each one every driver gets a process of its own.
        threads: Size of ExecuTorch's thread pool.
        drivers: Names of drivers, measured in turn.
        speculate: Also compare prompt-lookup with plain decoding on a text to copy.
    """

    prompts: tuple[int, ...]
    contexts: tuple[int, ...]
    steps: int
    repeats: int
    threads: int
    drivers: tuple[str, ...]
    speculate: bool = False


def make_settings(
    contract: Contract,
    *,
    prompts: Sequence[int] | None = None,
    contexts: Sequence[int] | None = None,
    steps: int | None = None,
    repeats: int = 3,
    threads: int = 1,
    drivers: Sequence[str] = ("auto",),
    speculate: bool = False,
) -> Settings:
    """Settings that fit a program; what is None is chosen by its capacity.

    Without `prompts`: 128 and 512 where they fit, and near the capacity. Without `contexts`: a short
    one, the middle, and the last that leaves room for the steps.

    Raises:
        UsageError: A number that makes no sense.
        CapacityError: A prompt or a context with its steps is longer than the capacity.
    """
    capacity = contract.max_context_len
    whole = {"--repeats": repeats, "--threads": threads}
    if steps is None:
        steps = max(1, min(32, capacity // 4 - WARMUP_STEPS))
    whole["--steps"] = steps
    for name, value in whole.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(Code.USAGE, name, found=value, expected="1 or more")
    if not drivers:
        raise UsageError(Code.USAGE, "--driver", found="none", expected="one at least")
    room = capacity - steps - WARMUP_STEPS
    if room < 1:
        raise _too_long("decode steps", steps, capacity, capacity - WARMUP_STEPS - 1)
    if prompts is None:
        chosen_prompts = {length for length in (128, 512) if length < capacity} | {capacity - 1}
        prompts = sorted(max(1, length) for length in chosen_prompts)
    if contexts is None:
        contexts = sorted({min(128, max(1, capacity // 8)), max(1, capacity // 2 - steps), room})
    for name, values, limit in (("prompt", prompts, capacity), ("context", contexts, room)):
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(Code.USAGE, f"a {name} length", found=value, expected="1 or more")
            if value > limit:
                raise _too_long(f"a {name} to measure", value, capacity, limit)
    return Settings(
        prompts=tuple(dict.fromkeys(prompts)),
        contexts=tuple(dict.fromkeys(contexts)),
        steps=steps,
        repeats=repeats,
        threads=threads,
        drivers=tuple(dict.fromkeys(drivers)),
        speculate=speculate,
    )


def _too_long(what: str, found: int, capacity: int, limit: int) -> CapacityError:
    return CapacityError(
        Code.CAPACITY_EXCEEDED,
        f"{what} is longer than the context length of this artifact allows",
        found=f"{found} tokens",
        expected=f"at most {limit} of {capacity}, fixed when the artifact was exported",
        remedy="Measure less, or export the model again with a longer context.",
    )
