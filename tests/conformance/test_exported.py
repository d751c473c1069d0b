"""Programs of the package's own exporter, from transformers models, against the same kit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from staticlm.cli import main


def _run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["conformance", *arguments])
    code = caught.value.code
    assert isinstance(code, int)
    return code


@pytest.mark.slow
def test_exported_programs_pass_the_kit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kit = str(tmp_path / "kit")
    assert _run("make", kit, "--exported") == 0
    assert capsys.readouterr().out.splitlines()[-1] == kit
    assert _run("run", kit, "--json") == 0
    body = json.loads(capsys.readouterr().out)
    exported = [case for case in body["cases"] if case["name"].startswith("exported-")]
    assert len(exported) == 6
    assert all(case["failure"] == "" for case in body["cases"])
