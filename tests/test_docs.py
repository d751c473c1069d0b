"""The documents say what the code does: tables are generated, commands are run."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.models import build
from tests.support.toy_artifacts import write_texts

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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model directory with a tokenizer and a chat template."""
    path = tmp_path_factory.mktemp("readme") / "model"
    build(
        "Llama", vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048,
        bos_token_id=256, eos_token_id=257,
    ).save_pretrained(path)  # fmt: skip
    config = (path / "config.json").read_text(encoding="utf-8")
    write_texts(path)
    (path / "config.json").write_text(config, encoding="utf-8")
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (path / "tokenizer_config.json").write_text(json.dumps(kind), encoding="utf-8")
    return path


@pytest.mark.slow
def test_the_commands_of_the_readme_run(
    model: Path, tmp_path: Path, cli_here: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    section = README.split("## From the command line")[1].split("## From Python")[0]
    blocks = re.findall(r"```sh\n(.*?)```", section, re.S)
    lines = [line for block in blocks for line in block.splitlines() if line]
    assert len(lines) == 8
    places = {"MODEL": str(model)}
    places |= {name: str(tmp_path / name) for name in ("DIR", "QUICK", "MIXED")}
    for line in lines:
        words = [places.get(w, w)
                 for w in shlex.split(line)]  # fmt: skip
        assert words[0] == "staticlm"
        done = cli_here(*words[1:])
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"


@pytest.mark.slow
def test_the_python_of_the_readme_runs(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = README.split("## From Python")[1]
    code = "\n".join(re.findall(r"```python\n(.*?)```", section, re.S))
    monkeypatch.chdir(tmp_path)
    assert "path/to/model" in code
    names: dict[str, object] = {}
    exec(compile(code.replace("path/to/model", str(model)), "README.md", "exec"), names)
    assert type(names["model"]).__name__ == "ExportedModel"
    assert (tmp_path / "artifact" / "model.pte").is_file()
