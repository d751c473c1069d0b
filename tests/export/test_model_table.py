"""docs/models.md says what is so."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import model_table
from tests.support import families

ROWS = model_table.read_rows(model_table.PAGE.read_text(encoding="utf-8"))


def test_every_family_has_a_row_and_every_refusal_its_reason() -> None:
    page = model_table.PAGE.read_text(encoding="utf-8")
    assert list(ROWS) == list(model_table.EXPORTED)
    assert model_table.write_page(ROWS) == page
    for name in families.REFUSED:
        assert f"| {name} | {model_table.refusal(name)} |" in page


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, row in ROWS.items() if row.lengths != "-"])
def test_a_row_is_what_the_runtime_shows(name: str, tmp_path: Path) -> None:
    model = model_table.EXPORTED[name]()
    assert model_table.measure(name, model, tmp_path / "artifact") == ROWS[name]
