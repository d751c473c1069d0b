"""One text over one program: the position, and what may happen next."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from numbers import Integral

import numpy as np
import numpy.typing as npt

from staticlm.contract.facts import Contract, Method
from staticlm.errors import Code, ExecutionError, RunnerError
from staticlm.runtime.io_managers.base import IOManager, IOStats
from staticlm.runtime.plan import Call, Plan, check_capacity, plan

Logits = npt.NDArray[np.float32]


class Session:
    """Counts positions, checks tokens, plans calls, and runs them through an I/O manager.

    The position counted here is the only authority. An execution error breaks the session: every
    use but `reset` and `close` is refused afterwards. Anything that interrupts between two calls
    leaves it usable at the position it had reached. Not for use by two threads at once.
    """

    def __init__(self, manager: IOManager, narrow: bool = True) -> None:
        """Open the manager: this allocates the caches. The session closes it.

        Args:
            manager: Runs the calls.
            narrow: Use methods that read only the beginning of the caches where they will do.
        """
        self._closed = True
        self._narrow = narrow
        manager.open()
        self._manager = manager
        self._contract = manager.contract
        self._position = 0
        self._written = 0
        self._broken: str | None = None
        self._turn = threading.RLock()
        self._closed = False

    @property
    def contract(self) -> Contract:
        """The contract of the program, or what `only` leaves of it."""
        return self._contract

    @property
    def position(self) -> int:
        """Tokens accepted so far: the absolute position of the next one."""
        return self._position

    @property
    def capacity(self) -> int:
        """Tokens that the caches hold."""
        return self._manager.contract.max_context_len

    @property
    def broken(self) -> bool:
        """Whether an execution error made the caches undefined."""
        return self._broken is not None

    @property
    def usable(self) -> bool:
        """Whether it is neither closed nor broken."""
        return not self._closed and self._broken is None

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Keep other threads out of several calls that belong together.

        Raises:
            RunnerError: `DRIVER_UNSAFE` when another thread has its turn; nothing was done.
        """
        if not self._turn.acquire(blocking=False):
            raise RunnerError(
                Code.DRIVER_UNSAFE,
                "this runner is in use by another thread",
                expected="one thread at a time",
                remedy="Give every thread a runner of its own: runner.sibling() shares the weights.",
            )
        try:
            yield
        finally:
            self._turn.release()

    def plan(self, count: int) -> Plan:
        """The calls that would take `count` more tokens; raises `CapacityError`."""
        return plan(self.contract, self._position, count, self._narrow)

    def prepare(self, count: int = 1) -> None:
        """Load the methods that `count` more tokens need, and decode."""
        self.check_usable()
        planned = self.plan(count)
        names = {call.method for call in planned.calls}
        for name in names | {self._at(self.contract.decode, planned.final_position).name}:
            self._manager.prepare(name)

    def prefill(
        self, tokens: Sequence[int], between: Callable[[Call], None] | None = None
    ) -> Logits:
        """Take tokens at the current position.

        Args:
            tokens: At least one token id.
            between: Called after every call that is not the last. What it raises is passed on; the
                tokens of the calls before are taken then, see `position`.

        Returns:
            float32 `[vocabulary]`: logits of the last token.

        Raises:
            RunnerError: No tokens, not token ids, closed, or broken; nothing was executed.
            CapacityError: More tokens than fit; nothing was executed.
            ExecutionError: ExecuTorch failed; the session is broken until `reset`.
        """
        ids, planned = self._checked(tokens)
        taken = 0
        for call in planned.calls:
            if taken and between is not None:
                between(call)
            logits = self._run(call, ids[taken : taken + call.valid], all_rows=False)
            taken += call.valid
        last: Logits = logits[-1]
        return last

    def prefill_all(self, tokens: Sequence[int]) -> Logits:
        """Take tokens and return float32 `[len(tokens), vocabulary]`, the logits of each.

        Raises:
            RunnerError: As `prefill`; or a method in the plan returns only its last row.
        """
        ids, planned = self._checked(tokens)
        rows: list[Logits] = []
        taken = 0
        for call in planned.calls:
            rows.append(self._run(call, ids[taken : taken + call.valid], all_rows=True))
            taken += call.valid
        return np.concatenate(rows)

    def step(self, token: int) -> Logits:
        """Take one token through the decode method; float32 `[vocabulary]`, its logits.

        Raises:
            StaticLMError: As `prefill`.
        """
        return self.prefill((token,))

    def verify(self, method: Method, tokens: Sequence[int]) -> Logits:
        """Take tokens in one call of a method that returns all rows; any may be rolled back later.

        Returns:
            float32 `[len(tokens), vocabulary]`.

        Raises:
            RunnerError: As `prefill`; more tokens than the method takes; or a sliding cache that
                could not be rolled back afterwards. Nothing was executed.
            CapacityError: The call does not fit into the caches; nothing was executed.
            ExecutionError: ExecuTorch failed; the session is broken until `reset`.
        """
        ids, _ = self._checked(tokens)
        if len(ids) > method.step:
            raise RunnerError(
                Code.TOKEN_INVALID,
                f"the tokens for one call of method {method.name!r}",
                found=len(ids),
                expected=f"at most {method.step}",
            )
        check_capacity(self.capacity, self._position, method.step)
        method = self._at(method, self._position)
        end = max(self._written, self._position + method.step)
        if not self._manager.can_rollback(end, self._position):
            raise RunnerError(
                Code.PROGRAM_UNSUPPORTED,
                f"the caches of this program cannot be rolled back over method {method.name!r}",
                remedy="Do without speculation.",
            )
        call = Call(method.name, self._position, len(ids), method.step)
        return self._run(call, ids, all_rows=True)

    @property
    def verify_limit(self) -> int:
        """The position before which all rows of a verify call that starts here must be.

        They compute what decode computes; at positions from this one on, another method decodes.
        """
        found = self._at(self.contract.decode, self._position).max_start
        return self.capacity if found is None else found

    @contextmanager
    def only(self, max_start: int | None) -> Iterator[None]:
        """Use the methods with this `max_start` alone while it lasts, at positions that they allow."""
        before = self._contract
        methods = tuple(
            replace(m, max_start=None) for m in before.methods if m.max_start == max_start
        )
        self._contract = replace(before, methods=methods)
        try:
            yield
        finally:
            self._contract = before

    def _at(self, method: Method, start: int) -> Method:
        return self.contract.at(method, start) if self._narrow else method

    def rollback(self, position: int) -> bool:
        """Forget the tokens from `position` on, if the caches still hold all it sees.

        Returns:
            False when they do not (a sliding window moved on); nothing changed then.
        """
        self.check_usable()
        if isinstance(position, bool) or not 0 <= position <= self._position:
            raise RunnerError(
                Code.TOKEN_INVALID,
                "the position to go back to",
                found=position,
                expected=f"0 to {self._position}",
            )
        if position < self._position and not self._manager.can_rollback(self._written, position):
            return False
        self._position = position
        return True

    def reset(self) -> None:
        """Forget everything; mends a broken session."""
        self._check_open()
        self._manager.reset()
        self._position = 0
        self._written = 0
        self._broken = None

    def stats(self) -> IOStats:
        """Figures of the I/O manager."""
        return self._manager.stats()

    def close(self) -> None:
        """Free the caches; the program closes with its last session. Idempotent."""
        self._closed = True
        self._manager.close()

    def __del__(self) -> None:
        # Dropped without `close`: method, bindings, buffers and program still go in this order.
        if not self.__dict__.get("_closed", True) and not sys.is_finalizing():
            self.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _checked(self, tokens: Sequence[int]) -> tuple[list[int], Plan]:
        self.check_usable()
        ids = check_tokens(tokens, self.contract.vocab_size)
        if not ids:
            raise RunnerError(
                Code.TOKEN_INVALID, "there are no tokens to take", expected="at least one"
            )
        return ids, self.plan(len(ids))

    def _run(self, call: Call, tokens: Sequence[int], all_rows: bool) -> Logits:
        try:
            logits = self._manager.step(call, tokens, all_rows)
        except ExecutionError as error:
            where = f"{call.method} at position {call.start}"
            self._broken = where
            raise ExecutionError(
                error.code,
                f"ExecuTorch failed to execute {where} ({call.valid} tokens): {error.what}",
                found=error.found,
                expected=error.expected,
                remedy="Reset the session before using it again.",
            ) from error
        self._written = max(self._written, call.start + call.step)
        self._position = call.end
        return logits

    def _check_open(self) -> None:
        if self._closed:
            raise RunnerError(Code.CLOSED, "the session is closed", remedy="Make a new one.")

    def check_usable(self) -> None:
        """Refuse a closed or broken session."""
        self._check_open()
        if self._broken is not None:
            raise RunnerError(
                Code.SESSION_BROKEN,
                f"the session is broken since {self._broken} failed",
                remedy="Reset it first; the text so far is lost.",
            )


def check_tokens(tokens: Sequence[int], vocab_size: int) -> list[int]:
    """Token ids as plain integers.

    Raises:
        RunnerError: `TOKEN_INVALID` naming the first one that is not an integer of the vocabulary.
    """
    ids: list[int] = []
    for index, token in enumerate(tokens):
        whole = isinstance(token, Integral) and not isinstance(token, (bool, np.bool_))
        if not whole or not 0 <= token < vocab_size:
            raise RunnerError(
                Code.TOKEN_INVALID,
                f"token {index} is not in the vocabulary of the program",
                found=repr(token)[:80],
                expected=f"an integer from 0 to {vocab_size - 1}",
            )
        ids.append(int(token))
    return ids
