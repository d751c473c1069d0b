"""Metadata dialects, and values that must be reported and not used."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.program_files import lower_add

from staticlm.contract.dialects import read_dialect
from staticlm.contract.program import ProgramFacts, TensorFacts, read_program

EXECUTORCH = {
    "get_max_seq_len": 32,
    "get_max_context_len": 64,
    "get_n_layers": 2,
    "get_vocab_size": 100,
    "get_bos_id": 1,
    "get_eos_ids": [2, 3],
    "use_kv_cache": True,
    "use_sdpa_with_kv_cache": False,
    "enable_dynamic_shape": True,
}
# What optimum-executorch is known to write wrongly: a float head width, a list under a singular key,
# and float32 whatever the dtype is.
OPTIMUM = {
    "get_dtype": 6,
    "get_head_dim": 64.0,
    "get_eos_id": [5, 6],
    "get_n_kv_heads": 3,
    "get_max_batch_size": 1,
    "get_max_seq_len": 128,
    "get_vocab_size": 100,
    "use_kv_cache": True,
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ProgramFacts:
    return written(tmp_path_factory.mktemp("dialects"), {})


def written(directory: Path, constants: dict[str, Any]) -> ProgramFacts:
    path = directory / "model.pte"
    path.write_bytes(lower_add(constants))
    return read_program(path)


def test_program_without_metadata(plain: ProgramFacts) -> None:
    found = read_dialect(replace(plain, constants={"unrelated": 3}))
    assert (found.name, dict(found.facts), found.warnings) == ("none", {}, ())


def test_executorch(tmp_path: Path) -> None:
    found = read_dialect(written(tmp_path, EXECUTORCH))
    assert found.name == "executorch-llm"
    assert found.facts == {**EXECUTORCH, "get_eos_ids": (2, 3)}
    assert found.warnings == ()


def test_optimum_with_its_wrong_values(tmp_path: Path) -> None:
    found = read_dialect(written(tmp_path, OPTIMUM))
    assert found.name == "optimum-executorch"
    assert "get_head_dim" not in found.facts
    assert "get_eos_id" not in found.facts
    assert found.facts["get_n_kv_heads"] == 3
    head, eos = sorted(found.warnings, reverse=True)
    assert head.startswith("get_head_dim holds 64.0, expected a positive integer")
    assert eos.startswith("get_eos_id holds (5, 6), expected one token id")


def test_dtype_that_the_signature_contradicts(plain: ProgramFacts) -> None:
    method = plain.methods["forward"]
    half = TensorFacts("bfloat16", (1, 3), (0, 1), planned=True)
    halves = {"forward": replace(method, inputs=(half,), outputs=(half,))}
    found = read_dialect(replace(plain, methods=halves, constants={"get_dtype": 6}))
    assert len(found.warnings) == 1
    assert "get_dtype says float32" in found.warnings[0]
    assert "bfloat16" in found.warnings[0]
    assert read_dialect(replace(plain, constants={"get_dtype": 6})).warnings == ()


@pytest.mark.parametrize(
    ("constants", "word"),
    [
        ({"use_kv_cache": 1}, "use_kv_cache holds 1"),
        ({"get_max_seq_len": True}, "get_max_seq_len holds True"),
        ({"get_max_seq_len": 0}, "get_max_seq_len holds 0"),
        ({"get_vocab_size": "100"}, "get_vocab_size holds '100'"),
        ({"get_eos_ids": (1, -1)}, "get_eos_ids holds (1, -1)"),
        ({"get_dtype": 99}, "get_dtype holds 99"),
        ({"get_max_seq_len": 9, "get_max_context_len": 8}, "larger than"),
        ({"get_vocab_size": 10, "get_eos_ids": (3, 10)}, "outside of the vocabulary"),
    ],
)
def test_warnings(constants: dict[str, object], word: str, plain: ProgramFacts) -> None:
    found = read_dialect(replace(plain, constants=constants))
    assert len(found.warnings) == 1
    assert word in found.warnings[0]


def test_labels(plain: ProgramFacts) -> None:
    ours = {"get_io_contract": "hf_static", "get_io_contract_version": 1, **EXECUTORCH}
    ours["get_eos_ids"] = (2, 3)
    found = read_dialect(replace(plain, constants=ours))
    assert (found.name, found.warnings) == ("hf_static", ())
    assert found.facts["get_max_context_len"] == 64
    other = {"get_io_contract": "kvcache_io", "get_io_contract_version": 1}
    assert read_dialect(replace(plain, constants=other)).name == "labelled"
    unversioned = read_dialect(replace(plain, constants={"get_io_contract": "hf_static"}))
    assert unversioned.name == "hf_static"
    assert "get_io_contract_version" in unversioned.warnings[0]


@pytest.mark.parametrize("label", [3, "", True, ("hf_static",), None])
def test_malformed_label_is_a_warning(label: object, plain: ProgramFacts) -> None:
    found = read_dialect(replace(plain, constants={"get_io_contract": label, "get_n_layers": 2}))
    assert found.name in {"executorch-llm"}
    assert len(found.warnings) == 1
    assert "get_io_contract" in found.warnings[0]


def test_json_blob(plain: ProgramFacts) -> None:
    record = {"architecture": "LlamaForCausalLM", "export_dtype": 7, "in_spec": "", "kwargs": {}}
    found = read_dialect(replace(plain, constants={"get_record": json.dumps(record)}))
    assert found.name == "transformers.exporters"
    assert found.facts == {"architecture": "LlamaForCausalLM", "kwargs": {}}
    assert "export_dtype holds 7" in found.warnings[0]
    for text in ("{not json", "{}", '{"a": 1}', "[" * 100_000):
        assert read_dialect(replace(plain, constants={"get_record": text})).name == "none"


@pytest.mark.parametrize("components", [None, [], {"model": 3}, {"model": {"file": "other.pte"}}])
def test_manifest_without_a_record(components: object, plain: ProgramFacts) -> None:
    manifest = {"export_format": "executorch", "components": components}
    found = read_dialect(plain, manifest)
    assert found.name == "none"
    assert "no record of model.pte" in found.warnings[0]


def test_program_of_transformers_exporters(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.exporters.exporter_executorch import ExecutorchConfig, ExecutorchExporter

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        use_cache=False,
    )
    inputs = {"input_ids": torch.arange(4)[None], "attention_mask": torch.ones(1, 4).long()}
    exported = ExecutorchExporter().export(
        LlamaForCausalLM(config).eval(), inputs, config=ExecutorchConfig(backend="xnnpack")
    )
    exported.save_pretrained(tmp_path)
    manifest = json.loads((tmp_path / "export.json").read_text())
    found = read_dialect(read_program(tmp_path / "model.pte"), manifest)
    assert found.name == "transformers.exporters"
    assert found.warnings == ()
    assert found.facts["architecture"] == "LlamaForCausalLM"
    assert found.facts["export_dtype"] == "float32"
    assert found.facts["kwargs"]["input_ids"]["shape"] == [1, 4]
    assert "executorch" in found.facts["packages"]
