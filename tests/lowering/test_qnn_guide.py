"""The Qualcomm guide: its options are the table's, its code runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("executorch.backends.qualcomm.serialization.qc_schema")

from staticlm.lowering.options import describe, parse_assignments
from staticlm.lowering.qnn import from_options
from staticlm.lowering.qnn.table import TABLE

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "qualcomm.md"


def test_the_options_are_the_tables() -> None:
    section = GUIDE.read_text().partition("<!-- options")[2].partition("<!-- end of options")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    options = [o for o in (TABLE.selector, *TABLE.options) if o is not None]
    assert rows == [
        f"| `{name}` | {option.destination} | {variant} | {kind} | {default} | {doc} |"
        for option, (name, variant, kind, default, doc) in zip(
            options, describe(TABLE), strict=True
        )
    ]


def test_the_python_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S)
    exec(compile(code, str(GUIDE), "exec"), {})
    assert capsys.readouterr().out == (
        "htp qnn_compile_spec ['aten.copy.default', 'aten.index_put.default']\n"
    )


def test_the_command_lines_options_are_accepted() -> None:
    from staticlm.lowering.backends import get_backend

    given = re.findall(r"--backend-option (\S+)", GUIDE.read_text())
    options = get_backend("qnn").typed(parse_assignments(given))
    assert from_options(options).partitioner.skip_node_op_set == {
        "aten.index_put.default",
        "aten.copy.default",
    }
