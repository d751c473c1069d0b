"""One kit per test session, and runners that answer inside the test process."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from staticlm.cli import main
from staticlm.conformance.kit import Kit, read_kit
from staticlm.conformance.protocol import Refused, read_calls

ROOT = Path(__file__).parents[2]
MINI_RUNNER = ROOT / "examples" / "mini_runner.py"


@pytest.fixture(scope="session")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    """The kit with toy programs and exported ones, made once for all processes that run tests."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with (base / "kit.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (base / "kit").exists():
            with pytest.raises(SystemExit) as done:
                main(["conformance", "make", str(base / "kit"), "--exported"])
            assert done.value.code == 0
    return read_kit(base / "kit")


class InProcess:
    """Looks like `protocol.Client` and calls a function."""

    def __init__(self, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._answer = answer

    def ask(self, op: str, **arguments: Any) -> dict[str, Any] | Refused:
        """One request, through JSON as in the real protocol."""
        request = json.loads(json.dumps({"id": 1, "op": op, **arguments}))
        body: dict[str, Any] = json.loads(json.dumps(self._answer(request)))
        if body["ok"]:
            return body
        return Refused(body["code"], body["message"], read_calls(body.get("calls", [])))


def load_mini_runner() -> ModuleType:
    """A fresh copy of the example, to be spoilt."""
    spec = importlib.util.spec_from_file_location("mini_runner_copy", MINI_RUNNER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.pop(spec.name, None)
    spec.loader.exec_module(module)
    return module


def in_process_mini(module: ModuleType) -> InProcess:
    """The example as a client."""
    sessions: dict[int, Any] = {}

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"ok": True, **module.answer(request, sessions)}
        except module.Refusal as error:
            return {"ok": False, "code": error.code, "message": str(error), "calls": error.calls}

    return InProcess(answer)
