"""Our runtime as a runner of the kit's protocol: `python -m staticlm.conformance.adapter`.

A driver between the runtime and ExecuTorch records what is bound and executed, so that the kit sees
the calls and the caches from outside and the runtime needs no way to look into itself.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

from staticlm.conformance.protocol import PROTOCOL
from staticlm.contract import Method, Role
from staticlm.contract.program import MethodFacts, ProgramFacts, read_program
from staticlm.errors import StaticLMError
from staticlm.runtime.allocators import get_chain
from staticlm.runtime.buffers import Buffer, BufferAllocator
from staticlm.runtime.driver import BoundMethod, Driver, LoadedProgram
from staticlm.runtime.drivers import get_driver
from staticlm.runtime.io_managers.registry import make_io_manager, select_label
from staticlm.runtime.session import Session
from staticlm.runtime.shared_program import SharedProgram


class RecordingDriver:
    """A driver that notes bindings and executions and passes everything on."""

    def __init__(self, inner: Driver) -> None:
        self.name, self.capabilities, self.reason = inner.name, inner.capabilities, inner.reason
        self.calls: list[tuple[str, dict[int, npt.NDArray[np.int64]]]] = []
        self.bound: dict[tuple[str, int], Buffer] = {}
        self._inner = inner

    @property
    def description(self) -> str:
        """As the inner driver's."""
        return self._inner.description

    @property
    def threads(self) -> int:
        """As the inner driver's."""
        return self._inner.threads

    def set_threads(self, count: int) -> None:
        """As the inner driver's."""
        self._inner.set_threads(count)

    def load(self, path: Path, facts: ProgramFacts | None = None) -> LoadedProgram:
        """As the inner driver's."""
        return _RecordingProgram(self._inner.load(path, facts), self)


class _RecordingProgram:
    def __init__(self, inner: LoadedProgram, driver: RecordingDriver) -> None:
        self.facts: ProgramFacts = inner.facts
        self._inner, self._driver = inner, driver

    def load_method(self, name: str, allocator: BufferAllocator) -> BoundMethod:
        return RecordingMethod(self._inner.load_method(name, allocator), self._driver)

    def close(self) -> None:
        self._inner.close()


class RecordingMethod:
    """A method whose bindings and executions are noted by its driver."""

    def __init__(self, inner: BoundMethod, driver: RecordingDriver) -> None:
        self.name: str = inner.name
        self.facts: MethodFacts = inner.facts
        self._inner, self._driver = inner, driver
        self._bound: dict[int, Buffer] = {}

    def bind_input(
        self, index: int, buffer: Buffer, offset: int = 0, shape: tuple[int, ...] | None = None
    ) -> None:
        """Note the buffer."""
        self._inner.bind_input(index, buffer, offset, shape)
        # A session that ends hands the method over to another one: both need to know.
        self._bound[index] = self._driver.bound[self.name, index] = buffer

    def bind_output(self, index: int, buffer: Buffer, offset: int = 0) -> None:
        """As the inner method's."""
        self._inner.bind_output(index, buffer, offset)

    def execute(self) -> None:
        """Note what the integer inputs hold, then execute."""
        given = {}
        for index, facts in enumerate(self.facts.inputs):
            if facts is not None and facts.dtype == "int64":
                view = self._bound[index].view(np.int64, facts.shape)
                given[index] = view.reshape(-1).copy()
        self._driver.calls.append((self.name, given))
        self._inner.execute()

    def output(self, index: int) -> npt.NDArray[Any]:
        """As the inner method's."""
        return self._inner.output(index)

    def close(self) -> None:
        """As the inner method's."""
        self._inner.close()
        self._bound.clear()


@dataclass
class _Text:
    """A session, and the buffers that were bound while it worked."""

    session: Session
    driver: RecordingDriver
    path: str
    bound: dict[tuple[str, int], Buffer] = field(default_factory=dict)


class Adapter:
    """Answers requests with our own runtime.

    Args:
        driver: Name of the driver to run on.
    """

    def __init__(self, driver: str = "auto") -> None:
        self._driver = driver
        self._texts: dict[int, _Text] = {}
        self._programs: dict[str, tuple[RecordingDriver, SharedProgram]] = {}
        self._ops: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "hello": self._hello,
            "open": self._open,
            "take": self._take,
            "caches": self._caches,
            "reset": self._reset,
            "close": self._close,
        }

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply to a request."""
        body: dict[str, Any]
        text = self._texts.get(request.get("session", -1))
        if text is not None:
            text.driver.calls.clear()
            text.driver.bound = text.bound
        try:
            body = {"ok": True, **self._ops[request["op"]](request)}
        except StaticLMError as error:
            body = {"ok": False, "code": error.code.value, "message": str(error)}
            body["calls"] = [] if text is None else _calls(text)
        return {"id": request.get("id"), **body}

    def _hello(self, request: dict[str, Any]) -> dict[str, Any]:
        driver = get_driver(self._driver)
        return {"protocol": PROTOCOL, "runner": f"staticlm ({driver.name} driver)"}

    def _open(self, request: dict[str, Any]) -> dict[str, Any]:
        path = request["program"]
        if path not in self._programs or self._programs[path][1].closed:
            facts = read_program(path)
            select_label(facts)
            driver = RecordingDriver(get_driver(self._driver))
            self._programs[path] = driver, SharedProgram(driver, Path(path), facts)
        driver, shared = self._programs[path]
        label = select_label(shared.facts)
        manager = make_io_manager(label, shared.facts, shared, get_chain("host"))
        session = Session(manager)
        text = _Text(session, driver, path)
        driver.bound = text.bound
        try:
            session.prepare()
        except BaseException:
            session.close()
            raise
        number = max(self._texts, default=0) + 1
        self._texts[number] = text
        return {
            "session": number,
            "position": 0,
            "capacity": session.capacity,
            "vocab": session.contract.vocab_size,
            "states": session.stats().states,
        }

    def _take(self, request: dict[str, Any]) -> dict[str, Any]:
        text = self._texts[request["session"]]
        if request["rows"] == "all":
            logits = text.session.prefill_all(request["tokens"])
        else:
            logits = text.session.prefill(request["tokens"])
        return {
            "position": text.session.position,
            "logits": base64.b64encode(logits.tobytes()).decode(),
            "calls": _calls(text),
        }

    def _caches(self, request: dict[str, Any]) -> dict[str, Any]:
        text = self._texts[request["session"]]
        found = []
        # Which methods are loaded by now is the runner's affair: any of them has every cache.
        method = next(
            m for m in text.session.contract.methods if (m.name, m.inputs[0].index) in text.bound
        )
        for index, cache in enumerate(text.session.contract.caches):
            slot = next(slot for slot in method.inputs if slot.cache == index)
            buffer = text.bound[method.name, slot.index]
            data = buffer.view(np.uint8, (cache.spec.nbytes,)).tobytes()
            found.append({"address": buffer.address, "data": base64.b64encode(data).decode()})
        return {"position": text.session.position, "caches": found}

    def _reset(self, request: dict[str, Any]) -> dict[str, Any]:
        text = self._texts[request["session"]]
        text.session.reset()
        return {"position": text.session.position}

    def _close(self, request: dict[str, Any]) -> dict[str, Any]:
        text = self._texts.pop(request["session"], None)
        if text is not None:
            text.session.close()
        return {}


def _calls(text: _Text) -> list[list[Any]]:
    """What was executed, as the control inputs said it."""
    methods = {method.name: method for method in text.session.contract.methods}
    return [_call(methods[name], given) for name, given in text.driver.calls]


def _call(method: Method, given: dict[int, npt.NDArray[np.int64]]) -> list[Any]:
    start, length = method.input(Role.START), method.input(Role.LENGTH)
    assert start is not None
    valid = 1 if length is None else int(given[length.index][0])
    return [method.name, int(given[start.index][0]), valid]


def serve(adapter: Adapter, requests: TextIO, replies: TextIO) -> None:
    """Answer every line until the input ends."""
    for line in requests:
        replies.write(json.dumps(adapter.answer(json.loads(line))) + "\n")
        replies.flush()


def main(arguments: list[str]) -> None:
    """Serve on standard input and output; an argument names the driver."""
    # Whatever a library prints goes to standard error: the replies have the pipe to themselves.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(Adapter(*arguments[:1]), sys.stdin, replies)


if __name__ == "__main__":
    main(sys.argv[1:])
