"""The contract document: every clause has an error code and a test, and both are there."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from staticlm.conformance.cases import CASES
from staticlm.conformance.malformed import FILES, VARIANTS
from staticlm.contract import Role
from staticlm.errors import Code

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "contract" / "hf-static-v1.md").read_text(encoding="utf-8")
FOOT = re.compile(r"^> error (?:`([a-z-]+)`|(none): (.+?)) · test `([^`]+)`$")
KIT_CASE = re.compile(r"^tests/conformance/test_kit\.py::test_case\[(.+)\]$")


def _clauses() -> dict[str, tuple[str, str]]:
    """Text and last line of every clause."""
    found: dict[str, tuple[str, str]] = {}
    parts = re.split(r"^\*\*(C\d+\.\d+)\*\* ", TEXT, flags=re.M)[1:]
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        assert name not in found
        text, _, rest = body.partition("\n> ")
        found[name] = (text, "> " + rest.split("\n", 1)[0])
    return found


CLAUSES = _clauses()
KIT = {
    **{case.name: case.clauses for case in CASES},
    **{one.name: (one.clause,) for one in (*VARIANTS, *FILES)},
}


def _foot(clause: str) -> re.Match[str]:
    match = FOOT.match(CLAUSES[clause][1])
    assert match is not None, f"{clause} ends with {CLAUSES[clause][1]!r}"
    return match


@pytest.mark.parametrize("clause", CLAUSES)
def test_every_clause_has_an_error_and_a_test(clause: str) -> None:
    code, none, reason, test = _foot(clause).groups()
    assert test.startswith("tests/")
    if code is not None:
        assert code in {member.value for member in Code}
    else:
        assert none == "none"
        assert len(reason) > 10


@pytest.mark.parametrize("clause", CLAUSES)
def test_the_case_that_a_clause_names_is_about_it(clause: str) -> None:
    code, _, _, test = _foot(clause).groups()
    case = KIT_CASE.match(test)
    if case is None:
        assert "test_kit" not in test
        return
    name = case.group(1)
    assert clause in KIT[name] or clause == "C11.3"
    variants = {one.name: one.code.value for one in (*VARIANTS, *FILES)}
    if name in variants:
        assert variants[name] == code


def test_every_clause_of_the_kit_is_in_the_document() -> None:
    named = {clause for clauses in KIT.values() for clause in clauses}
    assert named <= set(CLAUSES)


def test_clauses_are_numbered_without_gaps() -> None:
    numbers = [tuple(map(int, name[1:].split("."))) for name in CLAUSES]
    for before, after in itertools.pairwise(numbers):
        assert after in {(before[0], before[1] + 1), (before[0] + 1, 1)}


def test_every_clause_says_what_is_normative() -> None:
    words = re.compile(r"\b(MUST|SHOULD|MAY)\b")
    silent = [name for name, (text, _) in CLAUSES.items() if not words.search(text)]
    # These state facts of the format rather than duties.
    assert silent == ["C1.2", "C5.1", "C5.2", "C5.3", "C5.4", "C7.3", "C7.5", "C8.1", "C8.2"]


def test_every_code_of_the_contract_family_is_used() -> None:
    used = {match.group(1) for name in CLAUSES if (match := _foot(name)).group(1)}
    family = {code.value for code in Code if code.value.startswith("contract-")}
    # Raised when a caller names another contract than the program states: not a clause of the file.
    assert family - used == {"contract-mismatch"}


def test_roles_are_listed() -> None:
    for role in Role:
        assert f"`{role.value}`" in TEXT


class _Collector:
    """Node ids that pytest would run."""

    def __init__(self) -> None:
        self.found: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Called by pytest."""
        self.found = {item.nodeid for item in session.items}


def test_every_test_exists() -> None:
    wanted = {_foot(clause).group(4) for clause in CLAUSES}
    files = sorted({str(ROOT / test.split("::")[0]) for test in wanted})
    collector = _Collector()
    line = ["--collect-only", "-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}", *files]
    status = pytest.main(line, plugins=[collector])
    assert status is pytest.ExitCode.OK
    # A test with parameters may be named without them.
    found = collector.found | {name.split("[")[0] for name in collector.found}
    assert wanted - found == set()
