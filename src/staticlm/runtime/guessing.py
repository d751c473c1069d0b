"""How a runner is asked to speculate: the options, and the proof that a text will not change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from staticlm.contract.facts import Contract, Method
from staticlm.errors import Code, UsageError
from staticlm.runtime.session import Session
from staticlm.runtime.speculation import (
    DRAFT_MODEL,
    Drafter,
    DraftModel,
    PromptLookup,
    Speculation,
    prove,
    verify_method,
)


@dataclass(frozen=True)
class Guesses:
    """What was asked for.

    Args:
        method: The verify method.
        count: Guesses per call.
        small: Session of the model that guesses; None guesses from the text.
    """

    method: Method
    count: int
    small: Session | None

    def begin(self, session: Session, prompt: Sequence[int]) -> Speculation:
        """Speculation for a text that begins with a prompt."""
        drafter: Drafter = (
            PromptLookup(prompt) if self.small is None else DraftModel(self.small, prompt)
        )
        return Speculation(session, self.method, self.count, drafter, len(prompt))


def take_options(contract: Contract, session: Session, options: dict[str, Any]) -> Guesses | None:
    """Take `speculate`, `draft_tokens` and `draft_model` out of the options of a text.

    Args:
        contract: Of the program that checks guesses.
        session: Its session.
        options: What is left stays in it.

    Raises:
        UsageError: An option without the one that it belongs to, or of the wrong kind.
        RunnerError: The program cannot check guesses.
    """
    way, drafts = options.pop("speculate", None), options.pop("draft_tokens", None)
    model = options.pop("draft_model", None)
    small = _session(model)
    if (way == DRAFT_MODEL) is not (small is not None) or (model is not None and small is None):
        raise UsageError(
            Code.USAGE,
            "draft_model",
            found=type(model).__name__,
            expected=f"a runner with speculate={DRAFT_MODEL!r}, nothing otherwise",
            remedy="Name both (--speculate draft-model --draft-model DIR) or neither.",
        )
    if way is None:
        if drafts is not None:
            raise UsageError(
                Code.USAGE,
                "draft_tokens",
                found=f"{drafts} without speculation",
                expected="speculate too",
            )
        return None
    method, count = verify_method(contract, way, drafts)
    if small is session:
        raise UsageError(
            Code.USAGE,
            "draft_model",
            found="the runner itself",
            expected="another runner: a sibling of the same model, or a smaller model",
            remedy="Load the model that guesses on its own.",
        )
    if small is not None and small.contract.vocab_size != contract.vocab_size:
        raise UsageError(
            Code.USAGE,
            "the draft model has another vocabulary",
            found=small.contract.vocab_size,
            expected=contract.vocab_size,
            remedy="Take a smaller model of the same family.",
        )
    return Guesses(method, count, small)


def _session(runner: object) -> Session | None:
    found = getattr(runner, "session", None)
    return found if isinstance(found, Session) else None


class Proof:
    """That verify methods compute what decode computes here, given once for each.

    Args:
        calls: Calls that it took, by method.
        execute_seconds: Time in ExecuTorch that it took.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.execute_seconds = 0.0
        self._methods: set[str] = set()

    def covers(self, method: Method) -> bool:
        """Whether it was given for a method."""
        return method.name in self._methods

    def give(self, session: Session, method: Method) -> None:
        """Prove it; the session is empty afterwards. Errors as `speculation.prove`."""
        before = session.stats()
        prove(session, method)
        after = session.stats()
        self.calls.update(after.calls)
        self.calls.subtract(before.calls)
        self.execute_seconds += after.execute_seconds - before.execute_seconds
        self._methods.add(method.name)
