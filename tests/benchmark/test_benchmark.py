"""Benchmarks over a toy artifact: structure and sanity, never timing."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.support.contracts import contract
from tests.support.toy_artifacts import BYTE_TOY, write_artifact

from staticlm.benchmark.machine import describe_machine, read_bandwidth
from staticlm.benchmark.measure import peak_bytes
from staticlm.benchmark.rounds import summarise
from staticlm.benchmark.settings import make_settings
from staticlm.errors import CapacityError, UsageError
from staticlm.runtime.stats import resident_bytes

CAPACITY = BYTE_TOY.capacity


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact directory around a toy."""
    return write_artifact(tmp_path_factory.mktemp("bench") / "toy")


def test_defaults_follow_the_capacity() -> None:
    chosen = make_settings(contract(1024, (128,)))
    assert (chosen.prompts, chosen.steps) == ((128, 512, 1023), 32)
    assert chosen.contexts == (128, 480, 990)
    small = make_settings(contract(8, (4,)))
    assert (small.prompts, small.contexts, small.steps) == ((7,), (1, 3, 5), 1)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"prompts": [49]}, "at most 48 of 48"),
        ({"contexts": [37], "steps": 10}, "at most 36 of 48"),
        ({"steps": 46}, "at most 45 of 48"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], part: str) -> None:
    with pytest.raises(CapacityError, match=part):
        make_settings(contract(48, (8,)), **options)


@pytest.mark.parametrize(
    "options",
    [
        {"repeats": 0},
        {"threads": True},
        {"steps": -1},
        {"prompts": [0]},
        {"contexts": [0]},
        {"drivers": []},
    ],
)
def test_numbers_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        make_settings(contract(48, (8,)), **options)


def test_medians_keep_the_tree() -> None:
    trees = [{"a": {"b": n}, "name": "x", "same": n < 9, "none": None} for n in (5, 1, 9)]
    assert summarise(trees) == {
        "a": {"b": {"median": 5, "low": 1, "high": 9, "values": [5, 1, 9]}},
        "name": "x",
        "same": False,
        "none": None,
    }


def test_json_report(artifact: Path, cli: Any) -> None:
    drivers = ("stock", "auto")
    done = cli(
        *("bench", artifact, "--json", "--repeats", 2, "--threads", 1, "--steps", 5),
        *("--prompt", 17, "--context", 30, "--context", 9),
        *(word for name in drivers for word in ("--driver", name)),
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["capacity"] == CAPACITY
    assert report["settings"]["repeats"] == 2
    assert report["machine"]["read_gigabytes_per_second"] > 0.1
    assert set(report["drivers"]) == set(drivers)
    for name, found in report["drivers"].items():
        assert len(found["start"]["load"]["values"]) == 2
        moments = [
            found["start"][key] for key in ("imported", "opened", "first_call", "first_token")
        ]
        for index in range(2):
            times = [moment["values"][index] for moment in moments]
            assert times == sorted(times)
            assert times[0] > 0.01
        assert list(found["prefill"]) == ["17"]
        assert set(found["decode"]) == {"9", "30"}
        for one in found["decode"].values():
            assert one["step_seconds"]["median"] > 0
            assert 0 < one["outside_share"]["low"] <= one["outside_share"]["high"] < 1
        memory = found["memory"]
        assert memory["program"]["median"] == (artifact / "model.pte").stat().st_size
        assert memory["caches"]["median"] == 4 * 16 * (CAPACITY + BYTE_TOY.ring) * 2
        assert memory["peak"]["median"] >= memory["first_call"]["median"] > 10e6
        assert found["driver"].startswith("stock") or name == "auto"


def test_text_report_and_plot(artifact: Path, cli: Any, tmp_path: Path) -> None:
    drawing = ("--plot", tmp_path / "out.png") if find_spec("matplotlib") else ()
    done = cli("bench", artifact, "--repeats", 1, "--threads", 1, "--steps", 3, *drawing)
    assert done.returncode == 0, done.stderr
    assert f"context {CAPACITY}" in done.stdout
    assert "medians of 1 interleaved rounds" in done.stdout
    assert f"prefill, {CAPACITY - 1} tokens" in done.stdout
    assert "1 threads" in done.stdout
    if drawing:
        assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--prompt", CAPACITY + 1), "capacity-exceeded"),
        (("--driver", "fast"), "no such driver"),
        (("--speculate",), "program-unsupported"),
        (("--plot", "/nowhere/at/all.png"), "plot"),
    ],
)
def test_refusals_come_before_the_first_round(
    artifact: Path, cli_here: Any, arguments: tuple[object, ...], part: str
) -> None:
    done = cli_here("bench", artifact, *arguments)
    assert done.returncode == 2
    assert part in done.stderr
    assert "round" not in done.stderr


def test_memory_of_this_process() -> None:
    peak, now = peak_bytes(), resident_bytes()
    assert peak is not None
    assert now is not None
    assert peak >= now * 0.9 > 1e7


def test_machine() -> None:
    found = describe_machine()
    assert 1 <= found["cores"] <= (os.cpu_count() or 1)
    assert found["memory_bytes"] > 2**28
    assert 0.1 < read_bandwidth(1, megabytes=16, repeats=1) < 5000
