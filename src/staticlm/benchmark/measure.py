"""What one process measures: a start, prefill, decode, memory."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from staticlm.benchmark.settings import WARMUP_STEPS, Settings
from staticlm.runtime.runner import Runner, load
from staticlm.runtime.session import Session
from staticlm.runtime.stats import resident_bytes

_COPY_TASK = (
    "Repeat the following text word for word, but write Maria instead of Anna.\n\n"
    "Anna walked down to the harbour early in the morning, before the boats went out. The harbour was "
    "quiet, and the boats lay still at the wall. Anna counted the boats, as she did every morning, and "
    "wrote the number into a small blue book. The number in the small blue book was the same as the "
    "day before, and Anna was content. Then Anna walked back up to the house on the hill, where the "
    "tea was still warm, and waited for the sun to come over the wall of the harbour."
)
_COPY_TOKENS = 160
_SHORTEST_ANSWER = 16


def measure(artifact: str, driver: str, settings: Settings, spawned: float) -> dict[str, Any]:
    """Measure one driver in this process, which must be a new one.

    Args:
        artifact: Artifact directory or program.
        driver: Driver's name.
        settings: What to measure.
        spawned: `time.monotonic()` of the parent when it started this process.

    Returns:
        Plain values for JSON: `start` (seconds since `spawned`), `memory` (bytes), `prefill` by
        prompt length and `decode` by context.
    """
    imported = time.monotonic()
    runner = load(artifact, driver=driver, threads=settings.threads)
    opened = time.monotonic()
    session = runner.session
    ids = _tokens(runner)
    first = ids[: min(32, len(ids) - 1)]
    session.prepare(len(first))
    ready = time.monotonic()
    at_call = resident_bytes()
    int(np.argmax(session.prefill(first)))
    answered = time.monotonic()
    found: dict[str, Any] = {
        "driver": runner.stats().driver,
        "start": {
            "imported": imported - spawned,
            "opened": opened - spawned,
            "first_call": ready - spawned,
            "first_token": answered - spawned,
            "load": ready - imported,
        },
        "memory": {"first_call": at_call, "first_call_peak": peak_bytes()},
    }
    # Warm-up: every method has run, and every page of the caches was touched.
    session.reset()
    session.prefill(ids[: min(settings.prompts)])
    found["prefill"] = {str(n): _prefill(session, ids[:n]) for n in settings.prompts}
    found["decode"] = _decode(session, ids, settings)
    found["memory"]["peak"] = peak_bytes()
    found["memory"]["caches"] = runner.stats().cache_bytes
    found["memory"]["program"] = Path(runner.artifact.program).stat().st_size
    if settings.speculate:
        found["speculation"] = _speculate(runner, ids)
    runner.close()
    return found


def peak_bytes() -> int | None:
    """The largest resident memory of this process so far, or None where it cannot be read."""
    try:
        # Not getrusage: on Linux its maximum survives exec, so it may be the parent's.
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None


def _tokens(runner: Runner) -> list[int]:
    """Seeded token ids, none of them an end id, as many as the caches hold."""
    contract = runner.contract
    allowed = np.setdiff1d(np.arange(contract.vocab_size), runner.end_ids)
    rng = np.random.default_rng(17)
    return [int(one) for one in rng.choice(allowed, contract.max_context_len)]


def _prefill(session: Session, ids: list[int]) -> dict[str, float]:
    session.reset()
    inside = session.stats().execute_seconds
    begun = time.perf_counter()
    session.prefill(ids)
    seconds = time.perf_counter() - begun
    execute = session.stats().execute_seconds - inside
    return {"seconds": seconds, "tokens_per_second": len(ids) / seconds, "execute": execute}


def _decode(session: Session, ids: list[int], settings: Settings) -> dict[str, Any]:
    """Longest context first: the shorter ones are then reached by rolling back, where that works."""
    session.reset()
    found: dict[str, Any] = {}
    for context in sorted(settings.contexts, reverse=True):
        if session.position < context or not session.rollback(context - 1):
            session.reset()
        logits = session.prefill(ids[session.position : context])
        for _ in range(WARMUP_STEPS):
            logits = session.step(int(np.argmax(logits)))
        inside = session.stats().execute_seconds
        begun = time.perf_counter()
        for _ in range(settings.steps):
            logits = session.step(int(np.argmax(logits)))
        seconds = time.perf_counter() - begun
        outside = seconds - (session.stats().execute_seconds - inside)
        found[str(context)] = {
            "tokens_per_second": settings.steps / seconds,
            "step_seconds": seconds / settings.steps,
            "outside_microseconds": 1e6 * outside / settings.steps,
            "outside_share": outside / seconds,
            "resident": resident_bytes(),
        }
    return dict(reversed(found.items()))


def _speculate(runner: Runner, ids: list[int]) -> dict[str, Any]:
    """Plain decoding and prompt-lookup on a text to copy; raises where the program cannot."""
    capacity = runner.contract.max_context_len
    prompt = _copy_prompt(runner)
    if not prompt or len(prompt) > capacity // 2:
        prompt = (ids[: max(1, capacity // 8)] * 4)[: capacity // 2]
    count = min(_COPY_TOKENS, capacity - len(prompt))
    runner.generate(prompt, 1, speculate="prompt-lookup")  # the proof is not part of the text
    # To the end of the answer: what a model says beyond it is no copy of anything.
    plain = runner.generate(prompt, count)
    whole = len(plain.tokens) < _SHORTEST_ANSWER  # then measure what it would go on with
    if whole:
        plain = runner.generate(prompt, count, ignore_end=True)
    quick = runner.generate(prompt, count, ignore_end=whole, speculate="prompt-lookup")
    assert quick.speculation is not None
    slow = (len(plain.tokens) - 1) / plain.decode_seconds
    fast = (len(quick.tokens) - 1) / quick.decode_seconds
    return {
        "prompt_tokens": len(prompt),
        "tokens": len(plain.tokens),
        "identical": plain.tokens == quick.tokens,
        "plain_tokens_per_second": slow,
        "tokens_per_second": fast,
        "ratio": fast / slow,
        **asdict(quick.speculation),
    }


def _copy_prompt(runner: Runner) -> list[int]:
    if runner.tokenizer is None:
        return []
    if runner.artifact.chat_template is None:
        return runner.encode(_COPY_TASK)
    return runner.encode([{"role": "user", "content": _COPY_TASK}])
