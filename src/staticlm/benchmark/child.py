"""One measured process: `python -m staticlm.benchmark.child`, a JSON object in, one out."""

from __future__ import annotations

import json
import sys
from typing import Any

# What `staticlm generate` imports before it does anything: a start is measured as a user sees it.
import staticlm.cli.generate  # noqa: F401
from staticlm.benchmark.measure import measure
from staticlm.benchmark.settings import Settings
from staticlm.errors import StaticLMError

REFUSED = 2


def main() -> None:
    """Read standard input, measure, and print the figures; a refusal is printed as JSON too."""
    asked: dict[str, Any] = json.load(sys.stdin)
    given: dict[str, Any] = asked["settings"]
    chosen: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    settings = Settings(**chosen)
    try:
        found = measure(asked["artifact"], asked["driver"], settings, asked["spawned"])
    except StaticLMError as error:
        fields = [error.code.value, error.what, error.found, error.expected, error.remedy]
        print(json.dumps({"error": [None if f is None else str(f) for f in fields]}))
        sys.exit(REFUSED)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
