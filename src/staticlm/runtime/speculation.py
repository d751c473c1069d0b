"""Speculative decoding on fixed shapes: guess what follows, check all guesses in one call.

Guesses come from the text so far, or from a smaller model.

The output is that of plain decoding, not only its like. A verify method that was exported row by row
computes each row with the sums of the decode method in the same order; whether the kernels of this
machine keep that is proved bit for bit before the first text (`prove`), and refused where they do
not. Every token is then chosen by the same sampler from the same logits: a guess is accepted when it
is the token that the sampler chose. With a guess that is certain (no distribution of its own) this
is rejection sampling, so the distribution is kept too, and with a seed even the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from staticlm.contract.facts import CacheKind, Contract, LogitsRows, Method, MethodRole
from staticlm.errors import Code, RunnerError, UsageError
from staticlm.runtime.session import Session

Logits = npt.NDArray[np.float32]

PROMPT_LOOKUP, DRAFT_MODEL = "prompt-lookup", "draft-model"
WAYS = (PROMPT_LOOKUP, DRAFT_MODEL)
"""Where guesses can come from."""

STEPWISE = "stepwise"
"""Prefix of the attention mode of methods whose rows compute what decode computes."""

_LONGEST, _SHORTEST = 4, 2


@dataclass(frozen=True)
class SpeculationStats:
    """Figures of speculative decoding.

    Args:
        drafted: Tokens that were guessed and checked.
        accepted: Those of them that became part of the text.
        verify_calls: Calls of the verify method.
        decode_calls: Calls of the decode method, where there was no guess or no room.
    """

    drafted: int = 0
    accepted: int = 0
    verify_calls: int = 0
    decode_calls: int = 0

    def __add__(self, other: SpeculationStats) -> SpeculationStats:
        return SpeculationStats(
            self.drafted + other.drafted,
            self.accepted + other.accepted,
            self.verify_calls + other.verify_calls,
            self.decode_calls + other.decode_calls,
        )


class Drafter(Protocol):
    """Where guesses come from. It holds the text so far."""

    def add(self, token: int) -> None:
        """The text got longer."""
        ...

    def draft(self, count: int) -> list[int]:
        """At most `count` tokens that may follow."""
        ...


class PromptLookup:
    """Guesses that the text goes on as it did after the last time its latest tokens occurred.

    Args:
        tokens: The text so far.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        """Tokens -> where the text went on after their last occurrence."""
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        """The text got longer."""
        end = len(self._tokens)
        for length in range(_SHORTEST, min(_LONGEST, end) + 1):
            self._after[tuple(self._tokens[end - length :])] = end
        self._tokens.append(token)

    def draft(self, count: int) -> list[int]:
        """At most `count` tokens that may follow; none when nothing like it was seen."""
        tokens = self._tokens
        for length in range(min(_LONGEST, len(tokens)), _SHORTEST - 1, -1):
            begin = self._after.get(tuple(tokens[-length:]))
            if begin is not None:
                found = tokens[begin : begin + count]
                # A text that repeats itself: what follows is the guess itself again.
                while len(found) < count:
                    found.append(found[len(found) - (len(tokens) - begin)])
                return found
        return []


class DraftModel:
    """Guesses what a smaller model would say, greedily.

    A guess that is wrong costs time and nothing else: the large model checks every one.

    Args:
        session: Of the small model; it is reset here, and whatever it held is forgotten.
        tokens: The text so far.
    """

    def __init__(self, session: Session, tokens: Sequence[int]) -> None:
        session.reset()
        self._session = session
        self._tokens = list(tokens)
        self._held: list[int] = []
        """What the session has taken, guesses included."""

    def add(self, token: int) -> None:
        """The text got longer."""
        self._tokens.append(token)

    def draft(self, count: int) -> list[int]:
        """At most `count` tokens; none when the text is too long for the small model."""
        session, text = self._session, self._tokens
        if len(text) + count > session.capacity:
            return []
        # The last token is always taken again, for its logits.
        same = 0
        for one, other in zip(self._held, text[:-1], strict=False):
            if one != other:
                break
            same += 1
        if not session.rollback(same):
            session.reset()
            same = 0
        logits = session.prefill(text[same:])
        self._held = list(text)
        guesses = [int(logits.argmax())]
        while len(guesses) < count:
            self._held.append(guesses[-1])
            guesses.append(int(session.step(guesses[-1]).argmax()))
        return guesses


class Speculation:
    """Takes the place of `Session.step` in a decoding loop, with the same answers.

    Tokens that were verified ahead stay in the caches until a token that was not guessed comes, then
    the session goes back to the last one that is right.

    Args:
        session: Holds the prompt.
        method: The verify method, from `verify_method`.
        draft_tokens: Guesses per call at most.
        drafter: Guesses; it holds the prompt.
        position: Length of the prompt: what the session will hold before the first step.
    """

    def __init__(
        self,
        session: Session,
        method: Method,
        draft_tokens: int,
        drafter: Drafter,
        position: int,
    ) -> None:
        self._session = session
        self._method = method
        self._count = min(draft_tokens, method.step - 1)
        self._drafter = drafter
        self._position = position
        self._ahead: list[tuple[int, Logits]] = []
        """Guesses that are in the caches, and the logits after each."""
        self.stats = SpeculationStats()

    def step(self, token: int) -> Logits:
        """float32 `[vocabulary]`: the logits after one more token. Errors as `Session.step`."""
        self._drafter.add(token)
        if self._ahead and self._ahead[0][0] == token:
            logits = self._ahead.pop(0)[1]
            self.stats += SpeculationStats(accepted=1)
        else:
            self.settle()
            logits = self._run(token)
        self._position += 1
        return logits

    def settle(self) -> None:
        """Forget the guesses: the session holds what was accepted, and nothing more."""
        self._ahead = []
        session = self._session
        if session.usable and session.position > self._position:
            session.rollback(self._position)

    def _run(self, token: int) -> Logits:
        session, step = self._session, self._method.step
        guesses: list[int] = []
        if session.position + step <= session.verify_limit:
            guesses = self._drafter.draft(self._count)
        if not guesses:
            self.stats += SpeculationStats(decode_calls=1)
            return session.step(token)
        rows = session.verify(self._method, [token, *guesses])
        self.stats += SpeculationStats(drafted=len(guesses), verify_calls=1)
        self._ahead = list(zip(guesses, rows[1:], strict=True))
        first: Logits = rows[0]
        return first


def verify_method(contract: Contract, way: str, draft_tokens: int | None) -> tuple[Method, int]:
    """The method that checks guesses, and how many there are per call.

    Args:
        contract: The program's.
        way: Where guesses come from.
        draft_tokens: Guesses per call; None takes as many as the method holds.

    Raises:
        UsageError: An unknown way or a number that does not fit.
        RunnerError: `PROGRAM_UNSUPPORTED`: the program has no verify method whose rows compute what
            decode computes, or a sliding cache that cannot be rolled back by its length.
    """
    if way not in WAYS:
        raise UsageError(
            Code.USAGE, "speculate", found=repr(way), expected=f"one of {', '.join(WAYS)}"
        )
    export_again = "Export the model again with --verify-length 8, or do without speculation."
    found = [m for m in contract.methods if m.role is MethodRole.VERIFY]
    if not found:
        raise RunnerError(
            Code.PROGRAM_UNSUPPORTED,
            "this program has no method that verifies guesses",
            found=f"methods {', '.join(m.name for m in contract.methods)}",
            expected="a verify method",
            remedy=export_again,
        )
    fitting = [
        m for m in found if m.attention.startswith(STEPWISE) and m.logits_rows is LogitsRows.ALL
    ]
    if not fitting:
        raise RunnerError(
            Code.PROGRAM_UNSUPPORTED,
            f"method {found[0].name!r} rounds otherwise than decode: texts could differ",
            found=f"attention mode {found[0].attention or 'unknown'}",
            expected=f"{STEPWISE} attention and the logits of all rows",
            remedy=export_again,
        )
    method = max((m for m in fitting if m.max_start is None), key=lambda m: m.step)
    _check_alternatives(contract, method)
    if draft_tokens is None:
        draft_tokens = method.step - 1
    whole = isinstance(draft_tokens, int) and not isinstance(draft_tokens, bool)
    if not whole or not 1 <= draft_tokens < method.step:
        raise UsageError(
            Code.USAGE,
            "the number of draft tokens",
            found=draft_tokens,
            expected=f"1 to {method.step - 1}: method {method.name!r} takes {method.step} tokens",
        )
    for cache in contract.caches:
        needed = (cache.window or 0) - 1 + method.step
        if cache.kind is CacheKind.SLIDING and cache.slots < min(needed, contract.max_context_len):
            raise RunnerError(
                Code.PROGRAM_UNSUPPORTED,
                f"the sliding cache of layer {cache.layer} cannot be rolled back over a call of "
                f"method {method.name!r}",
                found=f"{cache.slots} slots",
                expected=f"{needed} for window {cache.window} and {method.step} tokens",
                remedy=export_again,
            )
    return method, draft_tokens


def _check_alternatives(contract: Contract, method: Method) -> None:
    """Wherever a verify method reads less of the caches, decode must read as little, and conversely."""
    verify, decode = (
        sorted(
            m.max_start
            for m in contract.methods
            if m.role is role and m.step == step and m.max_start is not None
        )
        for role, step in ((MethodRole.VERIFY, method.step), (MethodRole.DECODE, 1))
    )
    if verify != decode:
        raise RunnerError(
            Code.PROGRAM_UNSUPPORTED,
            f"methods like {method.name!r} and like decode read different parts of the caches",
            found=f"max_start {verify} and {decode}",
            expected="the same, or texts could differ",
            remedy="Do without speculation.",
        )


def prove(session: Session, method: Method) -> None:
    """`prove_one` for the verify method and those that take its place at early positions.

    Raises:
        RunnerError: `PROGRAM_UNSUPPORTED` when one bit differs.
    """
    for one in session.contract.methods:
        if one.role is MethodRole.VERIFY and one.step == method.step:
            with session.only(one.max_start):
                prove_one(session, replace(one, max_start=None), one.max_start)


def prove_one(session: Session, method: Method, limit: int | None = None) -> None:
    """Compare the rows of the verify method with decode steps, bit for bit, on this machine.

    Which kernels run is chosen by the processor, so this is not known when a model is exported. The
    tokens are fixed; full and padded calls are compared, on an empty and on a filled cache. The
    session is empty afterwards. `limit` is the position before which all rows must be.

    Raises:
        RunnerError: `PROGRAM_UNSUPPORTED` when one bit differs.
    """
    end = session.capacity if limit is None else limit
    session.reset()
    try:
        room = min(2 * method.step + 1, end)
        if room < method.step:
            return
        rng = np.random.default_rng(7)
        ids = [int(one) for one in rng.integers(0, session.contract.vocab_size, room)]
        wanted = np.stack([session.step(one) for one in ids])
        session.reset()
        taken = 0
        # A padded call first, so that the later ones stand on rows that a verify call wrote.
        for count in (max(1, method.step // 2), method.step, room):
            count = min(count, room - taken)
            if count < 1 or count > method.step or taken + method.step > end:
                break
            rows = session.verify(method, ids[taken : taken + count])
            _compare(method, rows, wanted[taken : taken + count])
            taken += count
    finally:
        if session.usable:
            session.reset()


def _compare(method: Method, rows: Logits, wanted: Logits) -> None:
    if np.array_equal(rows, wanted):
        return
    difference = float(np.abs(rows - wanted).max())
    raise RunnerError(
        Code.PROGRAM_UNSUPPORTED,
        f"method {method.name!r} does not compute on this machine what decode computes",
        found=f"logits that differ by {difference:.2g}",
        expected="no difference in any bit, or the text could be another one",
        remedy="Do without speculation here; the kernels for this processor round by chunk size.",
    )
