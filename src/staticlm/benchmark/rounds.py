"""Rounds of measured processes, and what they add up to."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from staticlm.benchmark.settings import Settings
from staticlm.errors import Code, RunnerError

SCHEMA = 1
"""Version of the report; keys are added, never renamed."""


def run_rounds(
    artifact: str | Path,
    settings: Settings,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure every driver `repeats` times, in turn, each time in a new process.

    Returns:
        `{driver: figures}`: the tree that `measure` returns, with every number replaced by
        `{"median", "low", "high", "values"}`.

    Raises:
        RunnerError: The runner refused, or a process ended without an answer.
    """
    taken: dict[str, list[dict[str, Any]]] = {name: [] for name in settings.drivers}
    for number in range(settings.repeats):
        for driver in settings.drivers:
            progress(f"round {number + 1} of {settings.repeats}, driver {driver}")
            taken[driver].append(_spawn(artifact, driver, settings))
    return {driver: summarise(figures) for driver, figures in taken.items()}


def summarise(trees: Sequence[Any]) -> Any:
    """Equal trees of figures as one tree of medians; other leaves are the first tree's."""
    first = trees[0]
    if isinstance(first, Mapping):
        return {key: summarise([tree[key] for tree in trees]) for key in first}
    if isinstance(first, bool):
        return all(trees)
    if not isinstance(first, (int, float)):
        return first
    return {"median": median(trees), "low": min(trees), "high": max(trees), "values": list(trees)}


def _spawn(artifact: str | Path, driver: str, settings: Settings) -> dict[str, Any]:
    asked: dict[str, Any] = {
        "artifact": str(artifact),
        "driver": driver,
        "settings": asdict(settings),
    }
    command = [sys.executable, "-m", "staticlm.benchmark.child"]
    asked["spawned"] = time.monotonic()
    done = subprocess.run(
        command, input=json.dumps(asked), capture_output=True, text=True, check=False
    )
    lines = done.stdout.strip().splitlines()
    try:
        found: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    except ValueError:
        found = {}
    if "error" in found:
        code, what, value, expected, remedy = found["error"]
        raise RunnerError(Code(code), what, found=value, expected=expected, remedy=remedy)
    if done.returncode or not found:
        raise RunnerError(
            Code.EXECUTION_FAILED,
            f"the measured process of driver {driver!r} ended without an answer",
            found=f"exit status {done.returncode}; {done.stderr.strip()[-300:]}",
            expected="figures",
        )
    return found
