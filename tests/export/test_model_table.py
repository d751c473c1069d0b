"""docs/models.md says what is so."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from benchmarks import model_table
from tests.support import families
from tests.support.sources import source_stamp

KINDS = ("gpt_oss", "deepseek_v2")
"""Always measured: rings with sinks and experts, latent caches."""

MORE = 1
"""Further rows, which change whenever a source of the export does."""

ROWS = model_table.read_rows(model_table.PAGE.read_text(encoding="utf-8"))


def test_every_family_has_a_row_and_every_refusal_its_reason() -> None:
    page = model_table.PAGE.read_text(encoding="utf-8")
    assert list(ROWS) == list(model_table.EXPORTED)
    assert model_table.write_page(ROWS) == page
    for name in families.REFUSED:
        assert f"| {name} | {model_table.refusal(name)} |" in page


def _sample() -> list[str]:
    def place(name: str) -> str:
        return hashlib.sha256(f"{source_stamp()} {name}".encode()).hexdigest()

    return [*KINDS, *sorted(set(ROWS) - set(KINDS), key=place)[:MORE]]


@pytest.mark.slow
@pytest.mark.parametrize("name", _sample())
def test_a_row_is_what_the_runtime_shows(name: str, tmp_path: Path) -> None:
    """A sample: `python -m benchmarks.model_table --check` measures every row, some ten minutes."""
    model = model_table.EXPORTED[name]()
    assert model_table.measure(name, model, tmp_path / "artifact") == ROWS[name]
