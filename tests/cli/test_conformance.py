"""`staticlm conformance`: its options, its table, and its exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from staticlm.cli import main

STUB = """
import json, sys
for line in sys.stdin:
    r = json.loads(line)
    ok = r["op"] != "open"
    print(json.dumps({"id": r["id"], "ok": ok, "code": "program-not-found", "runner": "stub"}))
    sys.stdout.flush()
"""


@pytest.fixture
def stub_kit(tmp_path: Path) -> Path:
    """Two programs to refuse, and a runner that says the same of every program."""
    (tmp_path / "stub.py").write_text(STUB, encoding="utf-8")
    cases = [
        {"name": "absent", "clauses": ["C0.1"], "program": "p", "code": "program-not-found"},
        {"name": "label", "clauses": ["C1.1"], "program": "p", "code": "contract-label-missing"},
    ]
    body = {"format": 1, "programs": {"p": {"file": "p.pte"}}, "cases": cases}
    (tmp_path / "kit.json").write_text(json.dumps(body), encoding="utf-8")
    return tmp_path


def _run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["conformance", *arguments])
    code = caught.value.code
    assert isinstance(code, int)
    return code


def _stub(kit: Path) -> str:
    return f"{sys.executable} {kit / 'stub.py'}"


def test_the_table_has_a_row_for_each_clause(
    stub_kit: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run("run", str(stub_kit), "--runner", _stub(stub_kit)) == 1
    out = capsys.readouterr().out
    rows = {line.split("│")[1].strip(): line for line in out.splitlines() if "│" in line}
    assert "kept" in rows["C0.1"]
    assert "BROKEN" in rows["C1.1"]
    assert "refused with program-not-found, not contract-label-missing" in out
    assert "FAILED: 1 of 2 cases, stub" in out


def test_one_case_and_json(stub_kit: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ("run", str(stub_kit), "--runner", _stub(stub_kit), "--case", "absent", "--json")
    assert _run(*line) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["passed"] is True
    assert body["runner"] == "stub"
    assert body["clauses"] == {"C0.1": {"passed": 1, "cases": 1}}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["run", "{kit}", "--case", "nothing"], "no case 'nothing'"),
        (["run", "{kit}", "--runner", ""], "command is empty"),
        (["run", "{kit}", "--runner", "'"], "the runner's command"),
        (["run", "{kit}", "--exported"], "takes no --exported"),
        (["run", "{kit}/none"], "is not a conformance kit"),
        (["make", "{kit}"], "exists"),
        (["make", "{kit}/new", "--json"], "takes no --json"),
        (["make", "{kit}/new", "--runner", "x"], "takes no --runner"),
    ],
)
def test_misuse_is_refused(
    stub_kit: Path, capsys: pytest.CaptureFixture[str], line: list[str], words: str
) -> None:
    assert _run(*(word.replace("{kit}", str(stub_kit)) for word in line)) == 2
    assert words in capsys.readouterr().err
    assert not (stub_kit / "new").exists()
