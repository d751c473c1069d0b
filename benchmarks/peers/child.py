"""Measure one engine in this process: a JSON object on standard input, one on standard output."""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from engines import ENGINES


def main() -> None:
    """Load, answer one short prompt, warm up, then the timed prompts and decode steps."""
    asked: dict[str, Any] = json.load(sys.stdin)
    # Engines and their libraries may print: the answer goes out through a copy of standard output.
    answer = sys.stdout
    sys.stdout = sys.stderr
    engine = ENGINES[asked["engine"]](asked["path"], asked["threads"], asked["options"])
    begun = time.monotonic()
    next(engine)
    loaded = time.monotonic()
    engine.send((_ids(asked, 16), 0))
    answered = time.monotonic()
    engine.send((_ids(asked, 128), 4))
    prefill = {
        str(length): length / median(engine.send((_ids(asked, length), 0))[0] for _ in range(2))
        for length in asked["prompts"]
    }
    _, spent = engine.send((_ids(asked, asked["context"]), asked["steps"]))
    found = {
        "load": loaded - begun,
        "first_token": answered - asked["spawned"],
        "prefill": prefill,
        "decode": asked["steps"] / spent,
        "peak_megabytes": _peak(),
    }
    print(json.dumps(found), file=answer)


def _ids(asked: dict[str, Any], count: int) -> list[int]:
    """Other tokens every time, or a prefix cache would answer."""
    return [random.randrange(10, asked["vocabulary"]) for _ in range(count)]


def _peak() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


if __name__ == "__main__":
    main()
