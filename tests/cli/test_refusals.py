"""Wrong inputs: one error each, exit code 2, no traceback, nothing written."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.models import FAMILIES

from staticlm import build
from staticlm.errors import Code, ExportError

CLI = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("refusals") / "llama"
    FAMILIES["llama"]().save_pretrained(path)
    return path


def refused(done: subprocess.CompletedProcess[str], code: Code) -> str:
    """The one message of a refusal."""
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    assert errors[0].endswith(f"[{code.value}]")
    return errors[0]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["no-such-folder/model"], Code.MODEL_NOT_FOUND, "no-such-folder/model"),
        (["./absent"], Code.MODEL_NOT_FOUND, "no such file or directory"),
        (["{tmp}/text.txt"], Code.MODEL_INVALID, ".txt"),
        (["{tmp}/fake.gguf"], Code.MODEL_INVALID, "no GGUF header"),
        (["{tmp}/empty"], Code.MODEL_INVALID, "no config.json"),
        (["{tmp}/broken"], Code.MODEL_INVALID, "configuration"),
        (["{model}", "--context-length", "4", "--prefill-length", "8"],
         Code.EXPORT_OPTION_INVALID, "context length 4 is shorter than prefill length 8"),
        (["{model}", "--context-length", "0"], Code.EXPORT_OPTION_INVALID, "--context-length"),
        (["{model}", "--dtype", "float8"], Code.EXPORT_OPTION_INVALID, "float32"),
        (["{model}", "--attention", "flash"], Code.EXPORT_OPTION_INVALID, "split"),
        (["{model}", "--logits", "none"], Code.EXPORT_OPTION_INVALID, "last or all"),
        (["{model}", "--backend", "tpu"], Code.BACKEND_UNKNOWN, "xnnpack"),
        (["{model}", "--backend", "prefill=xnnpack"], Code.USAGE, "decode"),
        (["{model}", "--backend-option", "no_such_option=1"],
         Code.BACKEND_OPTION_UNKNOWN, "no_such_option"),
    ],
)  # fmt: skip
def test_export_refuses(
    cli_here: CLI, model: Path, tmp_path: Path, arguments: list[str], code: Code, says: str
) -> None:
    (tmp_path / "text.txt").write_text("not a model")
    (tmp_path / "fake.gguf").write_text("not a model")
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    before = sorted(tmp_path.rglob("*"))
    filled = [a.format(tmp=tmp_path, model=model) for a in arguments]
    done = cli_here("export", *filled, "-o", tmp_path / "out")
    assert says in refused(done, code)
    assert sorted(tmp_path.rglob("*")) == before


def test_export_overwrites_nothing_that_is_not_an_artifact(
    cli_here: CLI, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("precious")
    done = cli_here("export", model, "-o", tmp_path / "out", "--force")
    refused(done, Code.OUTPUT_EXISTS)
    assert (tmp_path / "out" / "thesis.txt").read_text() == "precious"


@pytest.mark.parametrize("output", ["file/out", "file/deeper/out", "x" * 250])
def test_export_refuses_an_output_that_cannot_be_made(
    cli_here: CLI, model: Path, tmp_path: Path, output: str
) -> None:
    (tmp_path / "file").write_text("precious")
    done = cli_here("export", model, "-o", tmp_path / output, "--context-length", 32)
    assert f"in {tmp_path}" in refused(done, Code.EXPORT_FAILED)
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
    assert "load" not in done.stderr.splitlines()


def test_a_failed_replacement_leaves_the_old_artifact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, link = tmp_path / "real", tmp_path / "link"
    output.mkdir()
    (output / "export.json").write_text("old")
    link.symlink_to(output)
    replace = os.replace

    def fails(source: Path, target: Path) -> None:
        if source.name == "new":
            raise OSError("no space")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(ExportError), build._staged(link, True):
        pass
    assert (output / "export.json").read_text() == "old"
    monkeypatch.setattr(os, "replace", replace)
    with build._staged(link, True) as staging:
        (staging / "export.json").write_text("new")
    assert link.is_symlink()
    assert (output / "export.json").read_text() == "new"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["link", "real"]


def test_export_refuses_incomplete_weights(cli_here: CLI, model: Path, tmp_path: Path) -> None:
    """Weights that are missing would be exported as random numbers."""
    broken = tmp_path / "model"
    broken.mkdir()
    for file in model.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    done = cli_here("export", broken, "-o", tmp_path / "out", "--context-length", "32")
    assert "missing" in refused(done, Code.MODEL_INVALID)


@pytest.mark.parametrize("command", ["generate", "inspect", "validate"])
@pytest.mark.parametrize(
    ("content", "code"),
    [
        (None, Code.PROGRAM_NOT_FOUND),
        (b"", Code.PROGRAM_MALFORMED),
        (b"these are not the bytes of a program" * 40, Code.PROGRAM_MALFORMED),
    ],
)
def test_programs_that_are_none(
    cli_here: CLI, tmp_path: Path, command: str, content: bytes | None, code: Code
) -> None:
    path = tmp_path / "model.pte"
    if content is not None:
        path.write_bytes(content)
    extra = {"generate": ["--prompt", "x"], "validate": ["--reference", "x/y"], "inspect": []}
    refused(cli_here(command, path, *extra[command]), code)


def test_a_directory_that_is_no_artifact(cli_here: CLI, tmp_path: Path) -> None:
    refused(cli_here("generate", tmp_path, "--prompt", "x"), Code.ARTIFACT_INVALID)


def test_a_process_exits_with_2_and_no_traceback(cli: CLI, tmp_path: Path) -> None:
    refused(cli("generate", tmp_path / "absent", "--prompt", "x"), Code.PROGRAM_NOT_FOUND)


def test_a_process_says_nothing_but_what_would_be_made(cli: CLI, model: Path) -> None:
    """Libraries that talk while they are imported are silent; only a new process imports them."""
    done = cli("export", model, "--dry-run", "--context-length", 32, "--prefill-length", 8)
    assert done.returncode == 0
    assert done.stderr == ""
    assert "method prefill: 8 tokens per call" in done.stdout
