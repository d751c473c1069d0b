"""The kit's side of the pipe, with runners that misbehave."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from staticlm.conformance.kit import Kit, KitCase, read_kit
from staticlm.conformance.protocol import (
    Broken,
    Client,
    Refused,
    read_bytes,
    read_calls,
    read_logits,
)
from staticlm.conformance.run import run_kit
from staticlm.errors import Code, UsageError

ECHO = """
import json, sys
for line in sys.stdin:
    r = json.loads(line)
    print(json.dumps({"id": r["id"], "ok": r["op"] != "no", "code": "c", "calls": [["m", 0, 1]]}))
    sys.stdout.flush()
"""


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_requests_are_answered_in_order() -> None:
    with Client(_python(ECHO)) as client:
        assert client.ask("a") == {"id": 1, "ok": True, "code": "c", "calls": [["m", 0, 1]]}
        assert client.ask("no") == Refused("c", "", (("m", 0, 1),))


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import sys; sys.exit(3)", "ended at 'hello' with status 3"),
        ("input(); print('no json')", "not an object with 'ok'"),
        ("input(); print('{\"id\": 1}')", "not an object with 'ok'"),
        ('input(); print(\'{"id": 9, "ok": true}\')', "the id 9, not 1"),
        ('input(); print(\'{"id": 1, "ok": false}\')', "has no code"),
        ("import time; time.sleep(30)", "no reply to 'hello' within 0.5 s"),
    ],
)
def test_what_is_not_the_protocol_is_named(code: str, words: str) -> None:
    limit = 0.5 if "sleep" in code else 30.0
    client = Client(_python(code), timeout=limit)
    with pytest.raises(Broken) as caught:
        client.ask("hello")
    assert words in str(caught.value)
    client.close()


def test_a_command_that_is_not_there_is_named() -> None:
    with pytest.raises(Broken, match="cannot be started"):
        Client(["./no-such-runner"]).ask("hello")


def test_a_runner_that_dies_fails_its_case_and_the_next_one_runs(tmp_path: Path) -> None:
    code = ECHO.replace("    r = ", "    if 'first' in line: sys.exit(1)\n    r = ")
    cases = tuple(
        KitCase(name, ("C0.1",), tmp_path / name, refusal, (), None, 0.0)
        for name, refusal in (("first", "c"), ("second", "d"), ("no", "c"))
    )
    report = run_kit(Kit(tmp_path, cases), _python(code))
    assert not report.passed
    assert ["ended" in o.failure for o in report.outcomes] == [True, False, False]
    assert "opened a program" in report.outcomes[1].failure


@pytest.mark.parametrize("value", [None, "x", [["m", 0]], [["m", 0, True]], [[1, 0, 1]]])
def test_calls_are_checked(value: object) -> None:
    with pytest.raises(Broken):
        read_calls(value)


def test_binary_data_is_checked() -> None:
    with pytest.raises(Broken, match="base64"):
        read_bytes("*")
    with pytest.raises(Broken, match="base64"):
        read_bytes(None)
    with pytest.raises(Broken, match="rows of 2"):
        read_logits({"logits": "AAAAAA=="}, 2)
    assert read_logits({"logits": "AACAPwAAAEA="}, 2).tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize("content", [None, "{", '{"format": 2}', '{"format": 1}', "[]"])
def test_what_is_not_a_kit_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "kit.json").write_text(content, encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        read_kit(tmp_path)
    assert caught.value.code is Code.USAGE
    assert "staticlm conformance make" in str(caught.value)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([("take", 0)], r"step 0 \(take\): session 0 is not open"),
        ([("open", 0), ("close", 0), ("take", 0)], r"step 2 \(take\): session 0 is not open"),
        ([("open", 0), ("reset", 1)], r"step 1 \(reset\): session 1 is not open"),
        ([("open", 0), ("open", 0)], r"step 1 \(open\): session 0 is already open"),
    ],
)
def test_a_kit_that_asks_a_session_that_is_not_open_is_refused(
    tmp_path: Path, steps: list[tuple[str, int]], words: str
) -> None:
    case = {
        "name": "one",
        "clauses": ["C0.1"],
        "program": "p",
        "steps": [{"do": do, "session": session} for do, session in steps],
    }
    body = {"format": 1, "programs": {"p": {"file": "p.pte"}}, "cases": [case]}
    (tmp_path / "kit.json").write_text(json.dumps(body), encoding="utf-8")
    with pytest.raises(UsageError, match=words):
        read_kit(tmp_path)
