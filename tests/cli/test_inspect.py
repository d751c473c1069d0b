"""`staticlm inspect` on toy artifacts, foreign programs and broken files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.program_files import lower_add, lower_tied, tied_model
from tests.support.toy_artifacts import BYTE_TOY, write_artifact
from tests.support.toy_programs import write_toy

from staticlm.cli import main
from staticlm.cli.inspect import describe
from staticlm.cli.inspect_tables import size
from staticlm.contract.program import read_program
from staticlm.lowering.segments import share_identical_segments


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_artifact(tmp_path_factory.mktemp("inspect") / "toy")


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("inspect") / "tied.pte"
    path.write_bytes(lower_tied(tied_model(500), {"forward": 4}, {"get_n_layers": 2}))
    return path


def inspect(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    try:
        main(["inspect", *words])
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def test_contract_of_an_artifact(artifact: Path) -> None:
    found = describe(artifact)
    assert found["dialect"] == "hf_static"
    assert found["contract_problem"] is None
    assert found["contract"]["version"] == 1
    assert found["contract"]["max_context_len"] == BYTE_TOY.capacity
    assert found["contract"]["vocab_size"] == BYTE_TOY.vocab
    assert found["bytes"] == (artifact / "model.pte").stat().st_size
    assert {m["name"]: (m["role"], m["step"]) for m in found["methods"]} == {
        "decode": ("decode", 1),
        "prefill_16": ("prefill", 16),
    }
    assert found == describe(artifact / "model.pte")


def test_slots_and_caches(artifact: Path) -> None:
    found = describe(artifact)
    decode = next(m for m in found["methods"] if m["name"] == "decode")
    assert decode["inputs"][0]["role"] == "tokens"
    assert decode["inputs"][0]["shape"] == [1, 1]
    held = {s["cache"]: s["bytes"] for s in decode["inputs"] if s["cache"] is not None}
    entries = found["caches"]["entries"]
    assert held == {index: entry["bytes"] for index, entry in enumerate(entries)}
    assert found["caches"]["bytes"] == sum(held.values())
    assert {(e["layer"], e["kind"], e["window"]) for e in entries} == {
        (0, "full", None),
        (1, "sliding", BYTE_TOY.window),
    }
    assert [s["role"] for s in decode["outputs"]] == ["logits"]


def test_delegates_and_weights(tied: Path, tmp_path: Path) -> None:
    found = describe(tied)
    facts = read_program(tied)
    assert found["dialect"] == "executorch-llm"
    assert found["metadata"] == {"get_n_layers": 2}
    assert found["contract"] is None
    (method,) = found["methods"]
    (delegate,) = method["delegates"]
    assert delegate["backend"] == "XnnpackBackend"
    assert delegate["count"] == len(facts.methods["forward"].delegates)
    assert method["operators"]["aten::embedding.out"] == 1
    assert method["aliases"] == {"0": 1}
    table = 500 * 24 * 4
    assert found["weights"]["repeated_bytes"] == pytest.approx(table, abs=1024)
    once = tmp_path / "once.pte"
    saved = share_identical_segments(tied, once)
    weights = describe(once)["weights"]
    assert found["weights"]["repeated_bytes"] == saved
    assert weights["repeated_bytes"] == 0
    assert weights["segment_bytes"] - weights["stored_bytes"] == table
    assert weights["named_bytes"] == found["weights"]["named_bytes"]


def test_json_is_what_describe_says(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = inspect(capsys, str(artifact), "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == describe(artifact)
    assert json.loads(out)["schema"] == 1


def test_tables(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = inspect(capsys, str(artifact))
    assert (code, err) == (0, "")
    for word in ("hf_static version 1", "prefill", "key_cache", "sliding", "aten::embedding.out"):
        assert word in out
    assert size(describe(artifact)["caches"]["bytes"]) in out


def test_loaded(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = inspect(capsys, str(artifact), "--loaded", "--json")
    assert code == 0
    loaded = json.loads(out)["loaded"]
    caches = [b for b in loaded["buffers"] if b["name"].startswith("layer ")]
    assert sum(b["bytes"] for b in caches) == describe(artifact)["caches"]["bytes"]
    assert all(b["allocator"] for b in loaded["buffers"])


def test_contract_that_the_program_contradicts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.pte"
    write_toy(path, BYTE_TOY, {"get_max_context_len": -1})
    found = describe(path)
    assert found["dialect"] == "hf_static"
    assert found["contract"] is None
    assert found["contract_problem"]["code"] == "contract-metadata-invalid"
    assert any("get_max_context_len holds -1" in warning for warning in found["warnings"])
    code, out, _ = inspect(capsys, str(path))
    assert code == 0
    assert "contract:" in out


@pytest.mark.parametrize("content", [None, b"", b"text, and quite a lot of it" * 10, "directory"])
def test_what_is_no_program(
    content: bytes | str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.pte"
    if content == "directory":
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    code, out, err = inspect(capsys, str(path))
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_manifest_that_is_not_json(tmp_path: Path) -> None:
    (tmp_path / "model.pte").write_bytes(lower_add())
    (tmp_path / "export.json").write_text("{")
    assert "export.json cannot be read" in describe(tmp_path)["warnings"][0]
    (tmp_path / "export.json").write_text("[]")
    assert describe(tmp_path)["warnings"] == ["export.json is not a JSON object."]


def test_neither_torch_nor_executorch_is_imported(artifact: Path) -> None:
    script = (
        "import sys; from staticlm.cli import main\n"
        "try: main(['inspect', sys.argv[1]])\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "print('heavy:', [m for m in ('torch', 'executorch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(artifact)], capture_output=True, text=True, check=True
    )
    assert "heavy: []" in done.stdout


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_999, "1.0 MB"), (2_500_000_000, "2.5 GB")],
)
def test_sizes(nbytes: int, text: str) -> None:
    assert size(nbytes) == text
