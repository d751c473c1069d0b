"""The kit's side of the runner protocol: one JSON object a line, to and from a child process.

`docs/contract/hf-static-v1.md`, appendix A, is its text.
"""

from __future__ import annotations

import base64
import binascii
import json
import queue
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

PROTOCOL = 1
TIMEOUT = 120.0
"""Seconds that a reply may take: loading the runtime is part of the first one."""


class Broken(Exception):
    """The runner does not speak the protocol, died, or does not answer."""


@dataclass(frozen=True)
class Refused:
    """A reply with `"ok": false`."""

    code: str
    message: str
    calls: tuple[tuple[str, int, int], ...]


class Client:
    """One runner process; it is started again after it died.

    Args:
        command: Program and arguments.
    """

    def __init__(self, command: Sequence[str], timeout: float = TIMEOUT) -> None:
        self._command = list(command)
        self._timeout = timeout
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._count = 0

    def ask(self, op: str, **arguments: Any) -> dict[str, Any] | Refused:
        """Send one request and wait for its reply.

        Raises:
            Broken: No reply, or not one that the protocol knows.
        """
        process = self._start()
        self._count += 1
        request = {"id": self._count, "op": op, **arguments}
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = self._lines.get(timeout=self._timeout)
        except (OSError, ValueError):
            line = None
        except queue.Empty:
            process.kill()
            self.close()
            raise Broken(f"no reply to {op!r} within {self._timeout:g} s") from None
        if line is None:
            self.close()
            raise Broken(f"the runner ended at {op!r} with status {process.returncode}")
        return self._reply(line, op)

    def close(self) -> None:
        """End the process. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _start(self) -> subprocess.Popen[str]:
        if self._process is None:
            try:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    encoding="utf-8",
                )
            except OSError as error:
                raise Broken(f"the runner cannot be started: {error}") from None
            self._lines = queue.Queue()
            threading.Thread(target=_pump, args=(self._process, self._lines), daemon=True).start()
        return self._process

    def _reply(self, line: str, op: str) -> dict[str, Any] | Refused:
        try:
            body = json.loads(line)
        except ValueError:
            body = None
        if not isinstance(body, dict) or not isinstance(body.get("ok"), bool):
            self.close()
            raise Broken(f"the reply to {op!r} is not an object with 'ok': {line[:80]!r}")
        if body.get("id") != self._count:
            self.close()
            raise Broken(f"the reply to {op!r} has the id {body.get('id')!r}, not {self._count}")
        if body["ok"]:
            return body
        code = body.get("code")
        if not isinstance(code, str):
            raise Broken(f"the refusal of {op!r} has no code")
        return Refused(code, str(body.get("message", "")), read_calls(body.get("calls", [])))


def _pump(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    try:
        for line in process.stdout:
            lines.put(line)
    except (OSError, ValueError):
        pass
    lines.put(None)


def read_calls(value: object) -> tuple[tuple[str, int, int], ...]:
    """`calls` of a reply: `(method, start, valid)` each."""
    if not isinstance(value, list):
        raise Broken("'calls' is not a list")
    found = []
    for item in value:
        if not (
            isinstance(item, list)
            and len(item) == 3
            and isinstance(item[0], str)
            and all(isinstance(n, int) and not isinstance(n, bool) for n in item[1:])
        ):
            raise Broken(f"a call is not [method, start, valid]: {item!r}")
        found.append((item[0], item[1], item[2]))
    return tuple(found)


def read_bytes(value: object) -> bytes:
    """A base64 string."""
    try:
        return base64.b64decode(value, validate=True)  # type: ignore[arg-type]
    except (TypeError, ValueError, binascii.Error):
        raise Broken("binary data is not base64") from None


def read_logits(body: Mapping[str, Any], vocab: int) -> npt.NDArray[np.float32]:
    """float32 `[rows, vocab]` of a `take` reply."""
    data = read_bytes(body.get("logits"))
    if not data or len(data) % (4 * vocab):
        raise Broken(f"{len(data)} bytes of logits are not rows of {vocab} float32 numbers")
    return np.frombuffer(data, np.float32).reshape(-1, vocab)
