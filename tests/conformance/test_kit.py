"""Runners against the kit: ours over both drivers, the independent example, and spoilt ones."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from tests.conformance.conftest import MINI_RUNNER, InProcess, in_process_mini, load_mini_runner

from staticlm.conformance.adapter import Adapter
from staticlm.conformance.cases import CASES
from staticlm.conformance.exported import EXPORTED_CASES
from staticlm.conformance.kit import Kit
from staticlm.conformance.malformed import FILES, VARIANTS
from staticlm.conformance.run import Report, default_command, failures, run_case, run_kit

NAMES = [
    *(c.name for c in (*CASES, *EXPORTED_CASES)),
    *(v.name for v in VARIANTS),
    *(f.name for f in FILES),
]


@pytest.fixture(scope="session")
def report(kit: Kit) -> Report:
    """Our runtime with the driver that it takes by itself, in a process of its own."""
    return run_kit(kit, default_command())


def test_case_names_are_distinct() -> None:
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_case(report: Report, name: str) -> None:
    (outcome,) = [one for one in report.outcomes if one.case == name]
    assert outcome.failure == ""


def test_the_report_counts_cases_by_clause(report: Report, kit: Kit) -> None:
    counts = report.clauses()
    assert counts["C1.1"] == (1, 1)
    assert counts["C1.2"] == (4, 4)
    assert list(counts)[:2] == ["C0.1", "C0.2"]
    assert list(counts).index("C10.1") > list(counts).index("C9.5")
    assert report.passed
    assert report.runner.startswith("staticlm (")
    assert len(report.outcomes) == len(kit.cases) == len(NAMES)


def test_the_stock_driver_passes(kit: Kit) -> None:
    client = InProcess(Adapter("stock").answer)
    outcomes = [run_case(client, case) for case in kit.cases]  # type: ignore[arg-type]
    assert failures(Report("", tuple(outcomes))) == {}


def test_the_independent_runner_passes(kit: Kit) -> None:
    report = run_kit(kit, [sys.executable, "-W", "ignore", str(MINI_RUNNER)])
    assert report.runner == "mini_runner"
    assert failures(report) == {}
    assert len(report.outcomes) == len(NAMES)
    notes = {one.case: one.note for one in report.outcomes if one.note}
    assert set(notes) == {"states-aliased", "states-fresh"}
    assert all(note.startswith("served") for note in notes.values())


def test_the_independent_runner_imports_nothing_of_ours() -> None:
    text = MINI_RUNNER.read_text(encoding="utf-8")
    imports = [line for line in text.splitlines() if line.startswith(("import ", "from "))]
    assert len(imports) == 7
    assert not any("staticlm" in line for line in imports)


def _ignore_padding(module: ModuleType) -> None:
    """Pass the whole step as valid."""
    call = module.Session.call

    def spoilt(self: Any, method: Any, start: int, ids: list[int], made: Any) -> Any:
        padded = [*ids, *[0] * (method["step"] - len(ids))]
        return call(self, method, start, padded, made)[: len(ids)]

    module.Session.call = spoilt


def _count_padding(module: ModuleType) -> None:
    """Count whole chunks as positions taken."""
    call = module.Session.call

    def spoilt(self: Any, method: Any, start: int, ids: list[int], made: Any) -> Any:
        if start:
            made[-1][1] = start + 1
            start += 1
        return call(self, method, start, ids, made)

    module.Session.call = spoilt


def _assume_order(module: ModuleType) -> None:
    """Take keys to come before values where shapes do not tell them apart."""
    init = module.Session.__init__

    def spoilt(self: Any, path: str) -> None:
        init(self, path)
        for method in self.contract["methods"]:
            for slot in method["inputs"]:
                if slot.get("cache") in (0, 1):
                    slot["cache"] = 1 - slot["cache"]

    module.Session.__init__ = spoilt


def _forget_to_clear(module: ModuleType) -> None:
    """Reset the position only."""

    def spoilt(self: Any) -> None:
        self.position, self.broken = 0, False

    module.Session.reset = spoilt


def _run_past_the_end(module: ModuleType) -> None:
    """Plan without the capacity."""

    def spoilt(self: Any, count: int) -> Any:
        by_step = {m["step"]: m for m in self.contract["methods"]}
        calls, at, end = [], self.position, self.position + count
        while at < end:
            step = next((s for s in sorted(by_step) if s >= end - at), max(by_step))
            calls.append((by_step[step], at, min(step, end - at)))
            at += calls[-1][2]
        return calls

    module.Session.plan = spoilt


def _go_on_after_a_failure(module: ModuleType) -> None:
    """Never call a session broken."""
    module.Session.broken = property(lambda self: False, lambda self, value: None)


def _drop_states(module: ModuleType) -> None:
    """Run a program that returns its states and ignore them."""
    call = module.Session.call

    def spoilt(self: Any, method: Any, start: int, ids: list[int], made: Any) -> Any:
        outputs = [slot for slot in method["outputs"] if slot["role"] == "logits"]
        return call(self, {**method, "outputs": outputs}, start, ids, made)

    module.Session.call = spoilt


def _move_the_caches(module: ModuleType) -> None:
    """Keep right values in new memory."""
    call = module.Session.call

    def spoilt(self: Any, *arguments: Any) -> Any:
        self.old, self.caches = self.caches, [cache.clone() for cache in self.caches]
        return call(self, *arguments)

    module.Session.call = spoilt


@pytest.mark.parametrize(
    ("spoil", "case", "words"),
    [
        (_ignore_padding, "all-rows-last", "is not zero where nothing, or padding, was written"),
        (_count_padding, "full-chunks", "start of"),
        (_assume_order, "shuffled", "cache 0 (layer 1, value) differs"),
        (_forget_to_clear, "sliding-reset", "is not zero"),
        (_run_past_the_end, "full-near-capacity", "refused with execution-failed"),
        (_go_on_after_a_failure, "full-failure", "accepted what must be refused"),
        (_drop_states, "states-fresh", "differ"),
        (_move_the_caches, "mixed-chunks", "moved"),
    ],
)
def test_a_spoilt_runner_fails(
    kit: Kit, spoil: Callable[[ModuleType], None], case: str, words: str
) -> None:
    (found,) = [one for one in kit.cases if one.name == case]
    assert run_case(in_process_mini(load_mini_runner()), found).failure == ""  # type: ignore[arg-type]
    module = load_mini_runner()
    spoil(module)
    failure = run_case(in_process_mini(module), found).failure  # type: ignore[arg-type]
    assert words in failure


@pytest.mark.parametrize("code", ["contract-layout-invalid", None])
def test_a_wrong_code_or_none_fails(kit: Kit, code: str | None) -> None:
    (found,) = [one for one in kit.cases if one.name == "cache-int8"]

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        if request["op"] == "open" and code is not None:
            return {"ok": False, "code": code, "message": ""}
        return {"ok": True, "session": 1}

    failure = run_case(InProcess(answer), found).failure  # type: ignore[arg-type]
    assert "contract-cache-invalid" in failure


def test_the_description_is_plain_json(kit: Kit) -> None:
    body = json.loads((kit.directory / "kit.json").read_text(encoding="utf-8"))
    assert body["contract"] == {"label": "hf_static", "version": 1}
    cases = {case["name"]: case for case in body["cases"]}
    assert cases["label-missing"] == {
        "name": "label-missing",
        "clauses": ["C1.1"],
        "program": "label-missing",
        "code": "contract-label-missing",
    }
    take = cases["full-stepwise"]["steps"][1]
    assert take["do"] == "take"
    assert len(take["tokens"]) == 1
    assert body["programs"]["label-missing"]["file"] == "malformed/label-missing.pte"
