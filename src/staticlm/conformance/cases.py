"""What the kit asks of a runner: texts to take, and programs to refuse.

Names are fixed here, so that the document and the tests can name them before anything is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from staticlm.conformance.toy import Toy
from staticlm.contract import LogitsRows
from staticlm.errors import Code

EMBEDDED = 30
"""Ids from here on are in every toy's vocabulary; in `full` they have no row of the embedding."""

TOYS: dict[str, tuple[str, Toy]] = {
    "full": (
        "one full layer; ids from 30 on pass every check and fail when executed",
        Toy(windows=(None,), embedded=EMBEDDED),
    ),
    "sliding": ("one sliding layer, window 5, ring of 10", Toy(windows=(5,))),
    "mixed": (
        "a full and a sliding layer, two prefill steps",
        Toy(windows=(None, 5), prefills=(6, 3)),
    ),
    "edges": (
        "windows 1 and 22: the first sees only itself, the second's ring is the whole capacity",
        Toy(windows=(1, 22)),
    ),
    "prefixes": (
        "a full and a sliding layer; methods that read no slot, 4 and 13 of them",
        Toy(windows=(None, 5), prefixes=(0, 4, 13)),
    ),
    "all-rows": ("logits of all rows", Toy(windows=(5,), rows=LogitsRows.ALL)),
    "float16": (
        "float16 caches and logits",
        Toy(windows=(5,), cache_dtype="float16", logits_dtype="float16"),
    ),
    "bfloat16": (
        "bfloat16 caches and logits",
        Toy(windows=(5,), cache_dtype="bfloat16", logits_dtype="bfloat16"),
    ),
    "shuffled": (
        "slots in another order in every method, caches reversed, one laid out slots first",
        Toy(windows=(None, 5), shuffled=True),
    ),
    "states-aliased": (
        "every cache is also an output: the input itself",
        Toy(windows=(5,), states="aliased"),
    ),
    "states-fresh": (
        "every cache is also an output: a new tensor, the input is not written",
        Toy(windows=(5,), states="fresh"),
    ),
}
"""Toy programs by name, with what each is for."""


@dataclass(frozen=True)
class Step:
    """One request of a case.

    Args:
        do: `open`, `take`, `reset` or `close`.
        session: Number of the session within the case.
        tokens: Of a `take`.
        rows: Logits wanted: `last` or `all`.
        codes: Codes of which the runner must answer one; empty: it must succeed.
        same_as: Index of an earlier `take` whose logits must be the same, bit by bit.
        optional: With `codes`: success is right as well, and a refusal ends the case.
    """

    do: str
    session: int = 0
    tokens: tuple[int, ...] = ()
    rows: str = "last"
    codes: tuple[str, ...] = ()
    same_as: int | None = None
    optional: bool = False


@dataclass(frozen=True)
class Case:
    """Steps over one program, and the clauses that they show."""

    name: str
    program: str
    clauses: tuple[str, ...]
    steps: tuple[Step, ...]


def text(seed: int, count: int) -> tuple[int, ...]:
    """Token ids that every toy can embed."""
    drawn = np.random.default_rng(seed).integers(0, EMBEDDED, count)
    return tuple(int(token) for token in drawn)


def takes(seed: int, sizes: Sequence[int], rows: str = "last") -> tuple[Step, ...]:
    """A session that takes a random text in pieces."""
    tokens, steps, done = text(seed, sum(sizes)), [Step("open")], 0
    for size in sizes:
        steps.append(Step("take", tokens=tokens[done : done + size], rows=rows))
        done += size
    return tuple(steps)


def _refusals() -> tuple[Step, ...]:
    tokens = text(7, 24)
    invalid = (Code.TOKEN_INVALID.value,)
    return (
        Step("open"),
        Step("take", tokens=tokens[:5]),
        Step("take", tokens=tokens[:20], codes=(Code.CAPACITY_EXCEEDED.value,)),
        Step("take", tokens=(*tokens[5:8], 40), codes=invalid),
        Step("take", tokens=(-1,), codes=invalid),
        Step("take", tokens=(), codes=invalid),
        Step("take", tokens=tokens[5:24]),
        Step("take", tokens=tokens[:1], codes=(Code.CAPACITY_EXCEEDED.value,)),
    )


def _reset() -> tuple[Step, ...]:
    tokens = text(8, 20)
    return (
        Step("open"),
        Step("take", tokens=tokens[:13]),
        Step("take", tokens=tokens[13:14]),
        Step("reset"),
        Step("take", tokens=tokens[:13], same_as=1),
        Step("take", tokens=tokens[13:14], same_as=2),
    )


def _sessions() -> tuple[Step, ...]:
    one, two = text(9, 20), text(10, 20)
    return (
        Step("open"),
        Step("open", session=1),
        Step("take", tokens=one[:9]),
        Step("take", session=1, tokens=two[:4]),
        Step("take", tokens=one[9:10]),
        Step("take", session=1, tokens=two[4:5]),
        Step("reset"),
        Step("take", session=1, tokens=two[5:12]),
        Step("take", tokens=one[:9], same_as=2),
        Step("close"),
        Step("take", session=1, tokens=two[12:20]),
    )


def _failure() -> tuple[Step, ...]:
    tokens = text(11, 24)
    broken = (Code.SESSION_BROKEN.value,)
    return (
        Step("open"),
        Step("take", tokens=tokens[:8]),
        Step("take", tokens=(*tokens[8:15], EMBEDDED), codes=(Code.EXECUTION_FAILED.value,)),
        Step("take", tokens=tokens[8:9], codes=broken),
        Step("take", tokens=tokens[8:9], codes=broken),
        Step("reset"),
        Step("take", tokens=tokens[:8], same_as=1),
        Step("take", tokens=tokens[8:9]),
    )


def _states(seed: int) -> tuple[Step, ...]:
    opened, *rest = takes(seed, [6, 4, 1, 1, 5])
    refusal = (Code.SLOT_MISMATCH.value,)
    return (Step(opened.do, codes=refusal, optional=True), *rest)


_CHUNKS = ("C6.1", "C7.3", "C9.1")
_PADS = ("C7.1", "C7.2")
_RING = ("C8.1", "C8.2", "C8.3")

CASES: tuple[Case, ...] = (
    Case("full-chunks", "full", (*_CHUNKS, "C5.3"), takes(1, [6, 6, 6, 6])),
    Case("full-padded", "full", _PADS, takes(2, [4, 3, 5, 1, 2, 4])),
    Case("full-stepwise", "full", ("C6.1", "C7.3"), takes(3, [1] * 24)),
    Case("full-near-capacity", "full", ("C6.4", "C6.5", "C6.6"), takes(4, [21, 2, 1])),
    Case("full-refusals", "full", ("C6.2", "C6.3", "C6.5"), _refusals()),
    Case("full-failure", "full", ("C10.1", "C10.2", "C10.3"), _failure()),
    Case("full-sessions", "full", ("C9.4",), _sessions()),
    Case("sliding-chunks", "sliding", (*_CHUNKS, *_RING, "C5.4"), takes(1, [6, 6, 6, 6])),
    Case("sliding-padded", "sliding", (*_PADS, *_RING), takes(2, [4, 3, 5, 1, 2, 4])),
    Case("sliding-stepwise", "sliding", ("C7.3", "C8.1"), takes(3, [1] * 24)),
    Case("sliding-long", "sliding", ("C8.1", "C8.2", "C6.4", "C6.6"), takes(5, [17, 7])),
    Case("sliding-reset", "sliding", ("C9.2", "C10.3"), _reset()),
    Case("mixed-chunks", "mixed", (*_CHUNKS, "C3.3"), takes(1, [6, 3, 6, 2, 3, 1])),
    Case("mixed-near-capacity", "mixed", ("C6.4", "C6.6"), takes(6, [19, 4, 1])),
    Case("mixed-refusals", "mixed", ("C6.2", "C6.3"), _refusals()),
    Case("mixed-sessions", "mixed", ("C9.4",), _sessions()),
    Case("edges-chunks", "edges", ("C5.4", "C7.3", "C8.1"), takes(1, [6, 4, 1, 6, 1])),
    Case("edges-near-capacity", "edges", ("C6.4", "C8.1"), takes(4, [20, 3, 1])),
    Case("prefixes-chunks", "prefixes", ("C3.6", "C7.3"), takes(1, [3, 1, 1, 6, 2, 1, 1, 6])),
    Case("prefixes-stepwise", "prefixes", ("C3.6", "C8.1"), takes(3, [1] * 24)),
    Case("all-rows", "all-rows", ("C4.5", "C7.4"), takes(2, [6, 4, 1, 9], "all")),
    Case("all-rows-last", "all-rows", ("C4.5", "C7.4"), takes(2, [4, 3, 11])),
    Case("float16", "float16", ("C5.1", "C7.5"), takes(2, [6, 4, 1, 9])),
    Case("bfloat16", "bfloat16", ("C5.1", "C7.5"), takes(2, [6, 4, 1, 9])),
    Case("shuffled", "shuffled", ("C4.1", "C4.9", "C5.2"), takes(2, [6, 4, 1, 9])),
    Case("shuffled-reset", "shuffled", ("C9.2",), _reset()),
    Case("states-aliased", "states-aliased", ("C9.5",), _states(2)),
    Case("states-fresh", "states-fresh", ("C9.5",), _states(2)),
)
"""Cases over toy programs."""
