"""Hold a runner against a kit, and say by clause what it kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from staticlm.conformance.cases import Step
from staticlm.conformance.kit import Kit, KitCase
from staticlm.conformance.numbers import decode, difference
from staticlm.conformance.oracle import replay
from staticlm.conformance.protocol import (
    PROTOCOL,
    Broken,
    Client,
    Refused,
    read_bytes,
    read_calls,
    read_logits,
)
from staticlm.contract import Contract
from staticlm.contract.metadata import read_contract
from staticlm.contract.program import read_program


@dataclass(frozen=True)
class Outcome:
    """A case and why it failed; `failure` is empty when it passed. `note` says what was optional."""

    case: str
    clauses: tuple[str, ...]
    failure: str = ""
    note: str = ""


@dataclass(frozen=True)
class Report:
    """What a runner did with a kit."""

    runner: str
    outcomes: tuple[Outcome, ...]

    @property
    def passed(self) -> bool:
        """Whether every case passed."""
        return all(not outcome.failure for outcome in self.outcomes)

    def clauses(self) -> dict[str, tuple[int, int]]:
        """Cases passed and cases in all, by clause, in the order of the document."""
        found: dict[str, tuple[int, int]] = {}
        for outcome in self.outcomes:
            for clause in outcome.clauses:
                good, total = found.get(clause, (0, 0))
                found[clause] = good + (not outcome.failure), total + 1
        return dict(sorted(found.items(), key=lambda item: _number(item[0])))


def _number(clause: str) -> tuple[int, ...]:
    return tuple(int(part) for part in clause.removeprefix("C").split("."))


class _Failed(Exception):
    """A case did not go as it must."""


def run_kit(
    kit: Kit,
    command: Sequence[str],
    *,
    only: Sequence[str] = (),
    progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Run every case.

    Args:
        kit: The kit.
        command: Program and arguments of a runner that speaks the protocol.
        only: Names of cases; empty for all.
        progress: Told the name of every case.
    """
    outcomes = []
    with Client(command) as client:
        runner = _hello(client)
        for case in kit.cases:
            if only and case.name not in only:
                continue
            progress(case.name)
            outcomes.append(run_case(client, case))
    return Report(runner, tuple(outcomes))


def _hello(client: Client) -> str:
    try:
        reply = client.ask("hello", protocol=PROTOCOL)
    except Broken as error:
        return f"unknown ({error})"
    return "unknown" if isinstance(reply, Refused) else str(reply.get("runner", "unnamed"))


def run_case(client: Client, case: KitCase) -> Outcome:
    """Run one case; a runner that dies fails it and is started again for the next."""
    run = _Run(client, case)
    failure = ""
    try:
        if case.refusal is not None:
            run.refused_open(case.refusal)
        else:
            run.steps()
    except (_Failed, Broken) as error:
        failure = str(error)
    try:
        run.close()
    except Broken as error:
        failure = failure or str(error)
    return Outcome(case.name, case.clauses, failure, run.note)


@dataclass
class _Session:
    """What the kit knows of one open session."""

    number: int
    position: int = 0
    calls: list[tuple[str, int, int]] = field(default_factory=list)
    caches: list[bytes] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    broken: bool = False


class _Run:
    """One case in progress."""

    def __init__(self, client: Client, case: KitCase) -> None:
        self.note = ""
        self._client = client
        self._case = case
        self._sessions: dict[int, _Session] = {}
        self._logits: dict[int, npt.NDArray[np.float32]] = {}

    def refused_open(self, code: str) -> None:
        """A program that must be refused."""
        reply = self._client.ask("open", program=str(self._case.program))
        if not isinstance(reply, Refused):
            self._sessions[0] = _Session(reply.get("session", -1))
            raise _Failed(f"opened a program that must be refused with {code}")
        if reply.code != code:
            raise _Failed(f"refused with {reply.code}, not {code}: {reply.message}")

    def steps(self) -> None:
        """A program that must run."""
        self._values = self._case.values()
        self._contract: Contract = read_contract(read_program(self._case.program))
        for index, step in enumerate(self._case.steps):
            try:
                if not self._step(index, step):
                    return
            except (_Failed, Broken) as error:
                raise _Failed(f"step {index} ({step.do}): {error}") from None

    def close(self) -> None:
        """Close what is open."""
        for session in self._sessions.values():
            self._client.ask("close", session=session.number)
        self._sessions.clear()

    def _step(self, index: int, step: Step) -> bool:
        if step.do == "open":
            return self._open(index, step)
        session = self._sessions[step.session]
        if step.do == "close":
            self._ask("close", session=session.number)
            del self._sessions[step.session]
        elif step.do == "reset":
            reply = self._ask("reset", session=session.number)
            session.position, session.calls, session.broken = 0, [], False
            _same("position", reply.get("position"), 0)
            self._look(index, session)
        elif step.codes:
            self._refused_take(step, session)
        else:
            self._take(index, step, session)
        return True

    def _ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        reply = self._client.ask(op, **arguments)
        if isinstance(reply, Refused):
            raise _Failed(f"refused with {reply.code}: {reply.message}")
        return reply

    def _open(self, index: int, step: Step) -> bool:
        reply = self._client.ask("open", program=str(self._case.program))
        if isinstance(reply, Refused):
            if step.optional and reply.code in step.codes:
                self.note = f"refused with {reply.code}"
                return False
            raise _Failed(f"refused with {reply.code}: {reply.message}")
        session = _Session(reply.get("session", -1))
        self._sessions[step.session] = session
        if step.optional:
            self.note = f"served, states {reply.get('states', 'not said')}"
        _same("position", reply.get("position"), 0)
        _same("capacity", reply.get("capacity"), self._contract.max_context_len)
        _same("vocab", reply.get("vocab"), self._contract.vocab_size)
        self._look(index, session)
        return True

    def _take(self, index: int, step: Step, session: _Session) -> None:
        tokens = list(step.tokens)
        reply = self._ask("take", session=session.number, tokens=tokens, rows=step.rows)
        calls = read_calls(reply.get("calls"))
        self._check_calls(calls, session.position, len(tokens), whole=True)
        session.position += len(tokens)
        session.calls += calls
        _same("position", reply.get("position"), session.position)
        logits = read_logits(reply, self._contract.vocab_size)
        worst = difference(logits, self._values[f"{index}.logits"])
        if worst > self._case.tolerance:
            raise _Failed(
                f"logits differ by {worst:.2g} of the largest; at most {self._case.tolerance:g}"
            )
        if step.same_as is not None and not np.array_equal(logits, self._logits[step.same_as]):
            raise _Failed(f"logits are not those of step {step.same_as}, bit by bit")
        self._logits[index] = logits
        self._look(index, session)

    def _refused_take(self, step: Step, session: _Session) -> None:
        tokens = list(step.tokens)
        reply = self._client.ask("take", session=session.number, tokens=tokens, rows=step.rows)
        if not isinstance(reply, Refused):
            raise _Failed(f"accepted what must be refused with {' or '.join(step.codes)}")
        if reply.code not in step.codes:
            raise _Failed(f"refused with {reply.code}, not {' or '.join(step.codes)}")
        if reply.code == "execution-failed":
            session.broken = True
            self._check_calls(reply.calls, session.position, len(tokens), whole=False)
            return
        if reply.calls:
            raise _Failed(f"executed {list(reply.calls)} before refusing")
        if not session.broken:
            before = session.caches
            self._fetch(session)
            if session.caches != before:
                raise _Failed("the caches changed although the request was refused")

    def _check_calls(
        self, calls: Sequence[tuple[str, int, int]], position: int, count: int, whole: bool
    ) -> None:
        """Clauses C6.4 and C6.6, and no call twice."""
        steps = {method.name: method.step for method in self._contract.methods}
        at = position
        for method, start, valid in calls:
            if method not in steps:
                raise _Failed(f"called {method!r}, which is no method of the contract")
            if not 1 <= valid <= steps[method]:
                raise _Failed(f"called {method} with {valid} valid rows of {steps[method]}")
            if start + steps[method] > self._contract.max_context_len:
                raise _Failed(
                    f"called {method} at {start}: its {steps[method]} rows pass the capacity "
                    f"{self._contract.max_context_len}"
                )
            _same(f"start of {method}", start, at)
            at += valid
        if not calls or at > position + count or (whole and at != position + count):
            raise _Failed(f"calls {list(calls)} do not take {count} tokens from {position}")

    def _look(self, index: int, session: _Session) -> None:
        """Compare the caches with the rows of the text, placed where the runner's calls put them."""
        self._fetch(session)
        key = f"{index}.rows.0"
        if key in self._values:
            rows = [self._values[f"{index}.rows.{i}"] for i in range(len(session.caches))]
            wanted = replay(self._contract, rows, session.calls)
        else:
            wanted = [
                self._values[f"{index}.cache.{i}"].tobytes() for i in range(len(session.caches))
            ]
        for number, (data, want) in enumerate(zip(session.caches, wanted, strict=True)):
            self._compare_cache(number, data, want)

    def _compare_cache(self, number: int, data: bytes, want: bytes) -> None:
        cache = self._contract.caches[number]
        name = f"cache {number} (layer {cache.layer}, {cache.part.value})"
        found = decode(data, cache.spec.dtype, cache.spec.shape)
        wanted = decode(want, cache.spec.dtype, cache.spec.shape)
        if np.any(found[wanted == 0] != 0):
            raise _Failed(f"{name} is not zero where nothing, or padding, was written")
        worst = difference(found, wanted)
        if worst > self._case.tolerance:
            raise _Failed(f"{name} differs by {worst:.2g} of its largest value")

    def _fetch(self, session: _Session) -> None:
        reply = self._ask("caches", session=session.number)
        _same("position", reply.get("position"), session.position)
        caches = reply.get("caches")
        if not isinstance(caches, list) or len(caches) != len(self._contract.caches):
            raise _Failed(f"'caches' is not a list of {len(self._contract.caches)}")
        session.caches = [read_bytes(one.get("data")) for one in caches]
        for cache, data in zip(self._contract.caches, session.caches, strict=True):
            _same(f"bytes of layer {cache.layer} {cache.part.value}", len(data), cache.spec.nbytes)
        addresses = [one.get("address") for one in caches]
        if session.addresses and addresses != session.addresses:
            raise _Failed("the caches moved to other memory")
        session.addresses = addresses


def _same(what: str, found: object, wanted: object) -> None:
    if isinstance(found, bool) or found != wanted:
        raise _Failed(f"{what} is {found!r}, not {wanted!r}")


def failures(report: Report) -> Mapping[str, str]:
    """Why cases failed, by name."""
    return {one.case: one.failure for one in report.outcomes if one.failure}


def default_command(driver: str = "auto") -> list[str]:
    """The command that runs our own runtime as a child process."""
    import sys

    return [sys.executable, "-m", "staticlm.conformance.adapter", driver]


def kit_path(path: str | Path) -> Path:
    """A kit's directory as an absolute path: runners have their own working directory."""
    return Path(path).resolve()
