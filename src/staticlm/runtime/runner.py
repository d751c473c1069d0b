"""Text in, text out: an artifact, its tokenizer, and one session over its program."""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any

from staticlm.contract.facts import Contract
from staticlm.contract.program import read_program
from staticlm.errors import CapacityError, Code, RunnerError, UsageError
from staticlm.runtime.allocators import get_chain
from staticlm.runtime.artifact import Artifact, end_ids, open_artifact
from staticlm.runtime.buffers import BufferAllocator
from staticlm.runtime.chain import ChainAllocator
from staticlm.runtime.chat import render_chat
from staticlm.runtime.driver import check_threads
from staticlm.runtime.drivers import get_driver
from staticlm.runtime.generation import FinishReason, Generation, Request, Stream
from staticlm.runtime.guessing import Proof, take_options
from staticlm.runtime.io_managers.exporter_record import merge_components
from staticlm.runtime.io_managers.registry import make_io_manager, select_label
from staticlm.runtime.plan import check_capacity
from staticlm.runtime.sampling import SamplingOptions, make_sampler
from staticlm.runtime.session import Session, check_tokens
from staticlm.runtime.shared_program import SharedProgram
from staticlm.runtime.speculation import SpeculationStats
from staticlm.runtime.stats import RunnerStats, resident_bytes
from staticlm.runtime.text import (
    StopStrings,
    Tokenizer,
    check_files,
    check_tokenizer,
)

_NO_PROMPT = (bytes, bytearray, memoryview, Mapping, Set)
"""Iterables that would pass for token ids, or without an order, and are not meant so."""

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text, token ids, or chat messages with `role` and `content`."""


def load(
    path: str | Path,
    *,
    driver: str = "auto",
    allocator: str | Sequence[str] | BufferAllocator = "host",
    threads: int | None = None,
    tokenizer: str | Path | None = None,
    contract: str | None = None,
) -> Runner:
    """Open an artifact directory or a `.pte` file for generating text.

    Everything is checked before memory is allocated. Methods are loaded at once where they share
    weights, else when they are first needed.

    Args:
        path: Artifact directory, or a program.
        driver: `auto`, or the name of a registered driver.
        allocator: Name, or names asked in turn, of registered allocators; or an allocator.
        threads: Size of ExecuTorch's process-wide thread pool; None leaves it as it is.
        tokenizer: A `tokenizer.json`, or its directory, instead of the artifact's own.
        contract: An I/O contract that the program must state; None takes what it states.

    Raises:
        StaticLMError: What is wrong, by name; see the codes of `ProgramError`, `ContractError`,
            `ArtifactError` and `RunnerError`.
    """
    begun = time.perf_counter()
    if threads is not None:
        threads = check_threads(threads)
    artifact = open_artifact(path, tokenizer)
    facts, sources = merge_components(artifact.program, read_program(artifact.program))
    label = select_label(facts, contract)
    chosen = get_driver(driver)
    if threads is not None:
        chosen.set_threads(threads)
    chain = _chain(allocator)
    shared = SharedProgram(chosen, artifact.program, facts, sources)
    return Runner(artifact, label, shared, chain, begun)


def _chain(allocator: str | Sequence[str] | BufferAllocator) -> ChainAllocator:
    if isinstance(allocator, str):
        return get_chain(allocator)
    if isinstance(allocator, BufferAllocator):
        return ChainAllocator([allocator])
    if not isinstance(allocator, Sequence):
        raise UsageError(
            Code.USAGE,
            "the allocator",
            found=repr(allocator)[:80],
            expected="a name, several names, or an allocator",
        )
    return get_chain(*allocator)


class Runner:
    """Generates text with a program; made by `load`.

    One thread at a time: another one is refused (`DRIVER_UNSAFE`) while a call is under way.
    """

    def __init__(
        self,
        artifact: Artifact,
        label: str,
        program: SharedProgram,
        allocator: ChainAllocator,
        begun: float | None = None,
    ) -> None:
        begun = time.perf_counter() if begun is None else begun
        manager = make_io_manager(label, program.facts, program, allocator)
        self.artifact = artifact
        self.contract: Contract = manager.contract
        self._tokenizer_file = check_files(artifact, self.contract)
        end_ids(artifact, self.contract.eos_ids, None, self.contract.vocab_size)
        if self._tokenizer_file is None:
            _ = self.tokenizer, self.end_ids
        self._label = label
        self._program = program
        self._allocator = allocator
        self._held: list[int] = []
        self._stream: Stream | None = None
        self._figures = [0, 0.0, 0, 0.0]
        self._speculation = SpeculationStats()
        self._proof = Proof()
        # Where every method packs weights of its own, one for each stretch of text is too many.
        shares = program.driver.capabilities.shares_weights
        self.session = Session(manager, narrow=shares)
        try:
            if shares:
                # What the beginning of a text needs; the others come when the text gets there.
                for method in self.contract.methods:
                    if self.contract.at(method, 0) is method:
                        manager.prepare(method.name)
        except BaseException:
            self.session.close()
            raise
        self._open_seconds = time.perf_counter() - begun - program.load_seconds

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The artifact's tokenizer, or None where it has none.

        One that is not known to be the program's own was compared with it by `load`.
        """
        if self.artifact.tokenizer is None:
            return None
        found, self._tokenizer_file = Tokenizer(self.artifact, self._tokenizer_file), None
        check_tokenizer(found, self.artifact, self.contract)
        return found

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """Token ids that end a text: the program's, the configurations' and the tokenizer's."""
        own = None if self.tokenizer is None else self.tokenizer.eos_id
        return end_ids(self.artifact, self.contract.eos_ids, own, self.contract.vocab_size)

    def sibling(self) -> Runner:
        """A second runner over the same program: shared weights, caches of its own."""
        return Runner(self.artifact, self._label, self._program, self._allocator)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, checked against the vocabulary.

        A text gets what the tokenizer puts around one; messages go through the chat template, which
        writes its own special tokens; ids are taken as they are.

        Raises:
            StaticLMError: No tokenizer or chat template, or not a prompt.
        """
        if isinstance(prompt, str):
            ids = self._text_tokenizer().encode(prompt)
        elif isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
            tokenizer = self._text_tokenizer()
            rendered = render_chat(
                self.artifact.chat_template,
                prompt,  # type: ignore[arg-type]  # render_chat checks every message
                tokenizer.special,
            )
            ids = tokenizer.encode(rendered, special=False)
        elif isinstance(prompt, Iterable) and not isinstance(prompt, _NO_PROMPT):
            try:
                ids = list(prompt)  # type: ignore[arg-type]  # check_tokens says what is wrong
            except TypeError:  # an array without dimensions
                raise _no_prompt(prompt) from None
        else:
            raise _no_prompt(prompt)
        if not ids:
            raise RunnerError(
                Code.TOKEN_INVALID, "the prompt is empty", expected="a token at least"
            )
        return check_tokens(ids, self.contract.vocab_size)

    def generate(
        self, prompt: Prompt, max_new_tokens: int | None = None, **options: Any
    ) -> Generation:
        """Generate a text; arguments and errors as `stream`, and no tokenizer needed for ids."""
        with self.session.turn():
            stream = self._start(prompt, max_new_tokens, options, text_needed=False)
            for _ in stream:
                pass
            return stream.generation

    def stream(self, prompt: Prompt, max_new_tokens: int | None = None, **options: Any) -> Stream:
        """Generate a text piece by piece.

        Args:
            prompt: A text, token ids, or chat messages.
            max_new_tokens: New tokens at most; None generates up to the context length.
            **options: `stop` (a string or several), `ignore_end` (go on after end tokens), `reuse`
                (keep what the caches already hold of the prompt), `speculate` (`prompt-lookup`:
                guess from the text so far; `draft-model`: from another runner, `draft_model`, which
                forgets its text; several guesses are checked per call, and the text is that of plain
                decoding) with `draft_tokens` (guesses per call, as many as fit when None), and
                those of `SamplingOptions`: `temperature`, `top_k`, `top_p`, `min_p`,
                `repetition_penalty`, `seed`.

        Returns:
            An iterator of text pieces; its `generation` tells the rest.

        Raises:
            CapacityError: Prompt and `max_new_tokens` are longer than the context length; nothing
                was executed.
            StaticLMError: Invalid options or tokens; no tokenizer; a broken or closed session; a
                program that cannot speculate, see `speculation.verify_method` and `prove`.
        """
        with self.session.turn():
            return self._start(prompt, max_new_tokens, options, text_needed=True)

    def reset(self) -> None:
        """Forget everything; mends a session that an execution error broke."""
        with self.session.turn():
            self._drop_stream()
            self.session.reset()
            self._held = []

    def stats(self) -> RunnerStats:
        """Figures so far."""
        io = self.session.stats()
        calls = Counter(io.calls)
        calls.subtract(self._proof.calls)
        return RunnerStats(
            driver=f"{self._program.driver.name} ({self._program.driver.reason})",
            label=io.label,
            version=io.version,
            load_seconds=self._open_seconds + self._program.load_seconds,
            methods_loaded=self._program.loaded,
            prefill_tokens=int(self._figures[0]),
            prefill_seconds=self._figures[1],
            decode_tokens=int(self._figures[2]),
            decode_seconds=self._figures[3],
            execute_seconds=io.execute_seconds - self._proof.execute_seconds,
            calls={name: count for name, count in calls.items() if count},
            states=io.states,
            buffers=io.buffers,
            resident_bytes=resident_bytes(),
            packed_weights=self._program.packed_weights,
            speculation=self._speculation,
        )

    def close(self) -> None:
        """Free the caches, and the program with its last runner. Idempotent."""
        with self.session.turn():
            self._drop_stream()
            self.session.close()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _start(
        self,
        prompt: Prompt,
        max_new_tokens: int | None,
        options: dict[str, Any],
        text_needed: bool,
    ) -> Stream:
        options = dict(options)
        stop = options.pop("stop", None)
        stops = StopStrings(() if stop is None else stop)
        ignore_end = _switch("ignore_end", options)
        reuse = _switch("reuse", options)
        guesses = take_options(self.contract, self.session, options)
        sampler = make_sampler(_sampling(options))
        if text_needed or stops.any:
            self._text_tokenizer()
        ids = self.encode(prompt)
        limit, reason = self._limit(len(ids), max_new_tokens)
        self._drop_stream()
        if guesses is not None and not self._proof.covers(guesses.method):
            self._forget()
            self._proof.give(self.session, guesses.method)
        reused = self._reuse(ids) if reuse else 0
        if not reused:
            self._forget()
        # Loading is not prefill time.
        self.session.prepare(len(ids) - reused)
        self._stream = Stream(
            self.session,
            Request(
                prompt=ids,
                reused=reused,
                limit=limit,
                limit_reason=reason,
                sampler=sampler,
                end_ids=frozenset() if ignore_end else frozenset(self.end_ids),
                stops=stops,
                decode=None if self.tokenizer is None else self.tokenizer.decode,
                speculation=None if guesses is None else guesses.begin(self.session, ids),
            ),
            accepted=self._held.extend,
            finished=_weakly(self._count),
        )
        return self._stream

    def _limit(self, prompt: int, wanted: int | None) -> tuple[int, FinishReason]:
        """New tokens at most, and what reaching that means."""
        capacity = self.contract.max_context_len
        if wanted is None:
            check_capacity(capacity, 0, prompt + 1)
            return capacity - prompt, FinishReason.CAPACITY
        if isinstance(wanted, bool) or not isinstance(wanted, Integral) or wanted < 1:
            raise UsageError(
                Code.USAGE, "max_new_tokens", found=repr(wanted), expected="an integer, 1 or more"
            )
        wanted = int(wanted)
        if prompt < capacity < prompt + wanted:
            raise CapacityError(
                Code.CAPACITY_EXCEEDED,
                "the prompt and max_new_tokens together are longer than the context length of this "
                "artifact",
                found=f"{prompt} + {wanted} = {prompt + wanted} tokens",
                expected=f"at most {capacity}, fixed when the artifact was exported",
                remedy=(
                    f"Ask for at most {capacity - prompt} new tokens, or export the model again "
                    f"with a context length of at least {prompt + wanted}."
                ),
            )
        check_capacity(capacity, 0, prompt + wanted)
        return wanted, FinishReason.LENGTH

    def _reuse(self, ids: Sequence[int]) -> int:
        """Go back to the longest prefix of `ids` that the caches hold; its length, or 0."""
        common = 0
        # The last token is always taken again: its logits are needed.
        for old, new in zip(self._held, ids[:-1], strict=False):
            if old != new:
                break
            common += 1
        if not common or not self.session.rollback(common):
            return 0
        del self._held[common:]
        return common

    def _forget(self) -> None:
        self.session.check_usable()
        self.session.reset()
        self._held.clear()

    def _drop_stream(self) -> None:
        """End an unfinished stream: its next step would not fit what the caches hold."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _count(self, done: Generation) -> None:
        self._figures[0] += done.prompt_tokens - done.reused_tokens if done.tokens else 0
        self._figures[1] += done.prefill_seconds
        self._figures[2] += max(0, len(done.tokens) - 1)
        self._figures[3] += done.decode_seconds
        if done.speculation is not None:
            self._speculation += done.speculation

    def _text_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            # Raises TOKENIZER_MISSING with the path.
            return Tokenizer(self.artifact)
        return self.tokenizer


def _weakly(method: Callable[[Generation], None]) -> Callable[[Generation], None]:
    """The method while its owner lives: a stream must not keep its runner from being freed."""
    weak = weakref.WeakMethod(method)

    def call(done: Generation) -> None:
        if (bound := weak()) is not None:
            bound(done)

    return call


def _no_prompt(prompt: object) -> UsageError:
    return UsageError(
        Code.USAGE,
        "the prompt",
        found=type(prompt).__name__,
        expected="a text, token ids, or chat messages",
    )


def _switch(name: str, options: dict[str, Any]) -> bool:
    """A switch taken out of the options; only a bool, since "no" is true in Python."""
    value = options.pop(name, False)
    if not isinstance(value, bool):
        raise UsageError(Code.USAGE, name, found=repr(value)[:80], expected="True or False")
    return value


def _sampling(options: dict[str, Any]) -> SamplingOptions:
    names = SamplingOptions.__dataclass_fields__
    for name in options:
        if name not in names:
            raise UsageError(
                Code.USAGE,
                "no such option of generate",
                found=repr(name),
                expected="one of stop, ignore_end, reuse, speculate, draft_tokens, "
                + ", ".join(names),
            )
    return SamplingOptions(**options)
