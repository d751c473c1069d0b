"""Where an artifact is written before it takes its place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from staticlm.build import _staged


def _dead_process() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


@pytest.mark.parametrize(
    ("number", "old", "stays"),
    [
        (str(_dead_process()), True, False),
        (str(_dead_process()), False, True),
        (str(os.getpid()), True, True),
        ("abc", True, True),
        ("9" * 40, True, True),
    ],
    ids=["dead", "dead but recent", "alive", "not a number", "beyond all numbers"],
)
def test_what_a_killed_export_left_is_removed(
    number: str, old: bool, stays: bool, tmp_path: Path
) -> None:
    left = tmp_path / f".artifact.partial-{number}-x1y2" / "new"
    left.mkdir(parents=True)
    (left / "model.pte").write_bytes(b"part")
    other = tmp_path / f".artifact2.partial-{number}-x1y2"
    other.mkdir()
    if old:
        for one in (left / "model.pte", left, left.parent, other):
            os.utime(one, (0, 0))
    with _staged(tmp_path / "artifact", overwrite=False) as staging:
        (staging / "export.json").write_text("{}")
    assert left.exists() is stays
    assert other.exists()
    assert (tmp_path / "artifact" / "export.json").is_file()
    assert sum("partial" in one.name for one in tmp_path.iterdir()) == 1 + stays
