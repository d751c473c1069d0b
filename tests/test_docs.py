"""The documents say what the code does: tables are generated, links and command names are checked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import staticlm
from staticlm.cli import COMMANDS
from staticlm.lowering.backends import backend_names, get_backend

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def backend_table() -> str:
    """The README's table of backends."""
    rows = ["| backend | what it is | runs here | dtypes |", "|---|---|---|---|"]
    for name in backend_names():
        backend = get_backend(name)
        runs = "yes" if backend.runs_on_host else "no: lowering only"
        rows.append(f"| `{name}` | {backend.summary} | {runs} | {', '.join(backend.dtypes)} |")
    return "\n".join(rows)


def test_the_table_of_backends_is_true() -> None:
    found = README.split("<!-- backends: begin -->\n")[1].split("\n<!-- backends: end -->")[0]
    assert found == backend_table()


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), f"{path.name} links to {target}"


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_that_documents_name_exist(path: Path) -> None:
    for name in re.findall(r"`staticlm ([a-z]+)", path.read_text(encoding="utf-8")):
        assert name in COMMANDS, f"{path.name} names staticlm {name}"


def test_the_version_is_one() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{staticlm.__version__}"' in pyproject
    assert f"## {staticlm.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
