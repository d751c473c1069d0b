"""The kit as files: `kit.json`, programs, and what each step must give.

`kit.json` is all that a harness in another language needs; its form is appendix B of the document.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

from staticlm.conformance.cases import Step
from staticlm.errors import Code, UsageError

FORMAT = 1
DESCRIPTION = "kit.json"


@dataclass(frozen=True)
class KitCase:
    """One case of a kit on disk.

    Args:
        name: Of the case.
        clauses: What it shows.
        program: Path of the program.
        refusal: Code with which `open` must be refused, or None.
        steps: Requests of a case that runs.
        expected: Path of the expected values, or None.
        tolerance: Largest relative difference that passes.
    """

    name: str
    clauses: tuple[str, ...]
    program: Path
    refusal: str | None
    steps: tuple[Step, ...]
    expected: Path | None
    tolerance: float

    def values(self) -> dict[str, npt.NDArray[Any]]:
        """Expected values: `<step>.logits`, `<step>.cache.<index>`, `rows.<session>.<index>`."""
        found: dict[str, npt.NDArray[Any]] = (
            {} if self.expected is None else load_file(self.expected)
        )
        return found


@dataclass(frozen=True)
class Kit:
    """A kit on disk."""

    directory: Path
    cases: tuple[KitCase, ...]


def write_description(directory: Path, body: Mapping[str, Any]) -> None:
    """Write `kit.json`."""
    text = json.dumps({"format": FORMAT, **body}, indent=1)
    (directory / DESCRIPTION).write_text(text + "\n", encoding="utf-8")


def step_out(step: Step) -> dict[str, Any]:
    """A step for `kit.json`; fields that say nothing are left out."""
    out: dict[str, Any] = {"do": step.do, "session": step.session}
    if step.do == "take":
        out.update(tokens=list(step.tokens), rows=step.rows)
    if step.codes:
        out.update(codes=list(step.codes), optional=step.optional)
    if step.same_as is not None:
        out["same_as"] = step.same_as
    return out


def read_kit(directory: Path) -> Kit:
    """Open a kit.

    Raises:
        UsageError: There is no kit of this format.
    """
    path = Path(directory) / DESCRIPTION
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        if body["format"] != FORMAT:
            raise ValueError(f"format {body['format']}")
        cases = tuple(_case(path.parent, case, body["programs"]) for case in body["cases"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            Code.USAGE,
            f"{directory} is not a conformance kit of format {FORMAT}",
            found=f"{type(error).__name__}: {error}",
            remedy="Make one with `staticlm conformance make`.",
        ) from None
    return Kit(path.parent, cases)


def _case(directory: Path, body: Mapping[str, Any], programs: Mapping[str, Any]) -> KitCase:
    expected = body.get("expected")
    return KitCase(
        name=body["name"],
        clauses=tuple(body["clauses"]),
        program=(directory / programs[body["program"]]["file"]).resolve(),
        refusal=body.get("code"),
        steps=_steps([_step(step) for step in body.get("steps", ())]),
        expected=None if expected is None else directory / expected,
        tolerance=float(body.get("tolerance", 0.0)),
    )


def _steps(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Steps, once each is known to ask an open session."""
    opened: set[int] = set()
    for index, step in enumerate(steps):
        if (step.session in opened) is (step.do == "open"):
            state = "already open" if step.do == "open" else "not open"
            raise ValueError(f"step {index} ({step.do}): session {step.session} is {state}")
        if step.do == "open":
            opened.add(step.session)
        elif step.do == "close":
            opened.discard(step.session)
    return tuple(steps)


def _step(body: Mapping[str, Any]) -> Step:
    return Step(
        do=body["do"],
        session=body["session"],
        tokens=tuple(body.get("tokens", ())),
        rows=body.get("rows", "last"),
        codes=tuple(body.get("codes", ())),
        same_as=body.get("same_as"),
        optional=body.get("optional", False),
    )


def as_bytes(data: bytes) -> npt.NDArray[np.uint8]:
    """Cache bytes as a uint8 tensor."""
    return np.frombuffer(data, np.uint8)
