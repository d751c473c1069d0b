"""The decoding loop: prefill, sample, detokenise, stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from staticlm.runtime.plan import Call
from staticlm.runtime.sampling import Logits, Sampler
from staticlm.runtime.session import Session
from staticlm.runtime.speculation import Speculation, SpeculationStats
from staticlm.runtime.text import Detokenizer, StopStrings


class FinishReason(str, Enum):
    """Why a text ended."""

    END = "end"
    """The model chose an end token; it is the last of `Generation.tokens` and not in the text."""
    STOP = "stop"
    """A stop string appeared; the text ends before it."""
    LENGTH = "length"
    """`max_new_tokens` were generated."""
    CAPACITY = "capacity"
    """The caches are full: the artifact's context length."""
    CANCELLED = "cancelled"
    """The caller closed the stream."""


@dataclass(frozen=True)
class Generation:
    """A generated text.

    Args:
        text: The new text, without the prompt, special tokens and stop strings.
        tokens: The new token ids, an end token included.
        prompt_tokens: Tokens of the prompt.
        reused_tokens: Those of them that were in the caches already.
        finish_reason: Why it ended.
        prefill_seconds: From the first call to the logits of the last prompt token.
        decode_seconds: From there to the end: sampling, decode steps, detokenising. Time in which
            the caller of a stream holds it is not counted.
        speculation: Figures of speculative decoding; None without it.
    """

    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    reused_tokens: int
    finish_reason: FinishReason
    prefill_seconds: float
    decode_seconds: float
    speculation: SpeculationStats | None = None


@dataclass(frozen=True)
class Request:
    """Everything the loop needs, checked and planned before it starts.

    Args:
        prompt: Token ids of the whole prompt, at least one.
        reused: Leading tokens that the session holds already.
        limit: New tokens at most, at least 1.
        limit_reason: What reaching the limit means.
        sampler: Chooses each token.
        end_ids: Token ids that end the text.
        stops: Stop strings.
        decode: Text of token ids; without it there is no text.
        speculation: Takes the decode steps, when there is one.
    """

    prompt: Sequence[int]
    reused: int
    limit: int
    limit_reason: FinishReason
    sampler: Sampler
    end_ids: frozenset[int]
    stops: StopStrings
    decode: Callable[[Sequence[int]], str] | None
    speculation: Speculation | None = None


CONTEXT = 8
"""Prompt tokens that the detokeniser sees before the text."""


@dataclass
class Stream:
    """Pieces of text as they become certain; iterate once, then read `generation`.

    Closing it early, or dropping it, leaves the session usable: between two calls nothing is lost.
    """

    session: Session
    request: Request
    accepted: Callable[[Sequence[int]], None]
    """Told which tokens the session has taken."""
    finished: Callable[[Generation], None]
    _text: list[str] = field(default_factory=list, init=False)
    _tokens: list[int] = field(default_factory=list, init=False)
    _reason: FinishReason = field(default=FinishReason.CANCELLED, init=False)
    _prefill_seconds: float = field(default=0.0, init=False)
    _decode_seconds: float = field(default=0.0, init=False)
    _pieces: Iterator[str] | None = field(default=None, init=False)
    _done: bool = field(default=False, init=False)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self._done:
            raise StopIteration
        if self._pieces is None:
            self._pieces = self._run()
        begun, before = time.perf_counter(), self._prefill_seconds
        try:
            with self.session.turn():
                piece = next(self._pieces)
        except BaseException as error:
            # A finished text, an error, or an interrupt: in each case nothing more follows.
            self._count(begun, before)
            if isinstance(error, StopIteration):
                self.close()
            else:
                self._done = True
            raise
        self._count(begun, before)
        self._text.append(piece)
        return piece

    def close(self) -> None:
        """End the text here. Idempotent."""
        if not self._done:
            self._done = True
            self._pieces = None
            self.finished(self.generation)

    @property
    def generation(self) -> Generation:
        """The text so far; complete when the iteration has ended."""
        return Generation(
            text="".join(self._text),
            tokens=tuple(self._tokens),
            prompt_tokens=len(self.request.prompt),
            reused_tokens=self.request.reused,
            finish_reason=self._reason,
            prefill_seconds=self._prefill_seconds,
            decode_seconds=self._decode_seconds,
            speculation=None if (one := self.request.speculation) is None else one.stats,
        )

    def _count(self, begun: float, prefill_before: float) -> None:
        spent = time.perf_counter() - begun
        self._decode_seconds += spent - (self._prefill_seconds - prefill_before)

    def _run(self) -> Iterator[str]:
        try:
            yield from self._decode()
        finally:
            # However it ends, the session holds the text and no guesses.
            if self.request.speculation is not None:
                self.request.speculation.settle()

    def _step(self, token: int) -> Logits:
        if self.request.speculation is not None:
            logits = self.request.speculation.step(token)
        else:
            logits = self.session.step(token)
        self.accepted((token,))
        return logits

    def _decode(self) -> Iterator[str]:
        request = self.request
        history = list(request.prompt)
        begun = time.perf_counter()
        taken = request.reused

        def between(call: Call) -> None:
            nonlocal taken
            self.accepted(history[taken : call.start])
            taken = call.start

        logits = self.session.prefill(history[taken:], between)
        self.accepted(history[taken:])
        self._prefill_seconds = time.perf_counter() - begun
        text = None
        if request.decode is not None:
            text = Detokenizer(request.decode, history[-CONTEXT:])
        while True:
            token = request.sampler(logits, history)
            self._tokens.append(token)
            history.append(token)
            if token in request.end_ids:
                self._reason = FinishReason.END
                break
            piece = request.stops.add(text.add(token)) if text is not None else ""
            if piece:
                yield piece
            if request.stops.stopped:
                self._reason = FinishReason.STOP
                break
            if len(self._tokens) == request.limit:
                self._reason = request.limit_reason
                break
            logits = self._step(token)
        if text is not None:
            tail = request.stops.add(text.finish())
            if request.stops.stopped:
                self._reason = FinishReason.STOP
            tail += request.stops.finish()
            if tail:
                yield tail
