"""`staticlm generate` as a user runs it: a process, its output, its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.toy_artifacts import write_artifact

from staticlm import cli as command_line


@pytest.fixture(scope="session")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_artifact(tmp_path_factory.mktemp("cli") / "toy")


def staticlm(
    *arguments: object, stdin: str | None = None, encoding: str = "utf-8"
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "staticlm", *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        env={**os.environ, "PYTHONIOENCODING": encoding},
        check=False,
    )


def test_json_and_stream_agree(artifact: Path) -> None:
    options = ("--prompt", "Hello", "--max-new-tokens", 12, "--temperature", 0.9, "--seed", 4)
    quiet = staticlm("generate", artifact, *options, "--ignore-end", "--json")
    assert quiet.returncode == 0, quiet.stderr
    body = json.loads(quiet.stdout)
    assert (body["prompt_tokens"], len(body["tokens"])) == (5, 12)
    assert body["finish_reason"] == "length"
    assert body["contract"] == {"label": "hf_static", "version": 1}
    loud = staticlm("generate", artifact, *options, "--ignore-end")
    assert loud.returncode == 0
    assert loud.stdout == body["text"] + "\n"
    assert "5 prompt tokens" in loud.stderr
    assert "12 new" in loud.stderr


def test_chat_and_standard_input(artifact: Path) -> None:
    done = staticlm(
        "generate", artifact, "--prompt-file", "-", "--system", "s", "--max-new-tokens", 1,
        "--json", stdin="hé",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # <s>[system]s</s>\n[user]hé</s>\n[assistant] in bytes, special tokens being one each
    assert json.loads(done.stdout)["prompt_tokens"] == 1 + 9 + 2 + 9 + 2 + 11


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("absent", "--prompt", "a"), "program-not-found"),
        (("{artifact}",), "either --prompt or --prompt-file"),
        (("{artifact}", "--prompt", "a", "--prompt-file", "b"), "either --prompt or --prompt-file"),
        (("{artifact}", "--prompt-file", "absent.txt"), "absent.txt cannot be read"),
        (("{artifact}", "--prompt", "a" * 70), "capacity-exceeded"),
        (("{artifact}", "--prompt", "a\udcff"), "not Unicode text"),
        (("{artifact}", "--prompt", "a", "--threads", "2147483648"), "the number of threads"),
        (("x" * 5000, "--prompt", "a"), "program-not-found"),
        (("{artifact}", "--prompt", "a", "--top-p", "7"), "sampling-invalid"),
        (("{artifact}", "--prompt", "a", "--driver", "none"), "no such driver"),
        (("{artifact}", "--prompt", "a", "--allocator", "none"), "no such allocator"),
        (("{artifact}/config.json", "--prompt", "a"), "program-malformed"),
    ],
)
def test_refusals_are_one_message_and_exit_code_2(
    artifact: Path, arguments: tuple[str, ...], part: str
) -> None:
    done = staticlm("generate", *(one.replace("{artifact}", str(artifact)) for one in arguments))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert part in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_terminal_that_cannot_show_the_text_gets_escapes(
    artifact: Path,
) -> None:
    done = staticlm("generate", artifact / "\u00fc", "--prompt", "a", encoding="ascii")
    assert done.returncode == 2
    assert done.stderr.startswith("error: there is no artifact or program at ")
    assert "\\xfc: expected" in done.stderr


def test_an_interrupt_is_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def interrupted(wanted: str | None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "app", interrupted)
    with pytest.raises(SystemExit) as caught:
        command_line.main(["generate"])
    assert caught.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_unknown_command_and_help() -> None:
    assert staticlm("nonsense").returncode == 2
    shown = staticlm("--help")
    assert shown.returncode == 0
    assert "generate" in shown.stdout


def test_importing_the_runtime_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, staticlm.runtime.runner, staticlm.cli.generate\n"
        "print([m for m in ('torch', 'transformers', 'tokenizers', 'jinja2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
