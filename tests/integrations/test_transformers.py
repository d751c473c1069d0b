"""The transformers.exporters door: export, save, load, call."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import models
from transformers.exporters import AutoHfExporter, ExportedModel
from transformers.exporters.auto import AutoExportConfig, get_runner_class

from staticlm.build import export_model
from staticlm.contract import LogitsRows
from staticlm.errors import Code, StaticLMError
from staticlm.export.options import ExportOptions
from staticlm.integrations import transformers as door

SETTINGS: dict[str, Any] = {"context_length": 32, "prefill_lengths": [4]}


@pytest.fixture(scope="module")
def source() -> Any:
    return models.build(
        "Llama", **{**models._COMMON, "num_hidden_layers": 1}, tie_word_embeddings=True
    )


@pytest.fixture(scope="module")
def exported(source: Any) -> ExportedModel:
    config = door.HfStaticConfig(**SETTINGS)
    exporter = AutoHfExporter.from_config(config)
    return exporter.export(source, {"input_ids": torch.zeros((1, 3), dtype=torch.int64)}, config)


@pytest.fixture(scope="module")
def artifact(source: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact directory as our own command writes it: prefill returns its last row only."""
    path = tmp_path_factory.mktemp("door") / "artifact"
    options = ExportOptions(context_length=32, prefill_lengths=(4,), logits=LogitsRows.LAST)
    return export_model(source, path, options).path


def tokens(length: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, models.VOCABULARY, (batch, length), generator=generator)


def test_export_is_called_like_the_source(source: Any, exported: ExportedModel) -> None:
    ids = tokens(11)
    with torch.no_grad():
        want = source(input_ids=ids)
    got = exported(input_ids=ids)
    assert type(got) is type(want)
    assert got.logits.shape == want.logits.shape
    torch.testing.assert_close(got.logits, want.logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("keep", [1, 3])
def test_logits_to_keep(source: Any, artifact: Path, keep: int) -> None:
    ids = tokens(9, seed=3)
    with torch.no_grad():
        want = source(input_ids=ids).logits[:, -keep:]
    got = ExportedModel.from_pretrained(artifact)(input_ids=ids, logits_to_keep=keep).logits
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_our_directory_loads_and_gives_every_row(source: Any, artifact: Path) -> None:
    loaded = ExportedModel.from_pretrained(artifact)
    assert loaded.config.model_type == "llama"
    assert loaded.dtype is torch.float32
    ids = tokens(13, batch=2, seed=1)
    with torch.no_grad():
        want = source(input_ids=ids).logits
    torch.testing.assert_close(loaded(input_ids=ids).logits, want, atol=1e-5, rtol=1e-5)


def test_right_padding_leaves_real_rows_alone(source: Any, artifact: Path) -> None:
    ids = tokens(8, batch=2, seed=2)
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    with torch.no_grad():
        want = source(input_ids=ids, attention_mask=mask).logits
    got = ExportedModel.from_pretrained(artifact)(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(got[0], want[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got[1, :5], want[1, :5], atol=1e-5, rtol=1e-5)
    assert not got[1, 5:].any()


@pytest.mark.parametrize(
    "pattern", [[0, 1, 1, 1], [1, 0, 1, 1], [0, 0, 0, 0]], ids=["left", "hole", "nothing"]
)
def test_other_masks_are_refused(artifact: Path, pattern: list[int]) -> None:
    loaded = ExportedModel.from_pretrained(artifact)
    with pytest.raises(StaticLMError, match="attention_mask") as caught:
        loaded(input_ids=tokens(4), attention_mask=torch.tensor([pattern]))
    assert caught.value.code is Code.TOKEN_INVALID


def test_save_pretrained_round_trips(exported: ExportedModel, tmp_path: Path) -> None:
    ids = tokens(10, seed=4)
    first = exported(input_ids=ids).logits
    exported.save_pretrained(tmp_path / "one")
    again = ExportedModel.from_pretrained(tmp_path / "one")
    again.save_pretrained(tmp_path / "two")
    names = {path.name for path in (tmp_path / "two").iterdir()}
    assert {"model.pte", "export.json", "config.json", "generation_config.json"} <= names
    assert torch.equal(again(input_ids=ids).logits, first)
    one, two = (json.loads((tmp_path / n / "export.json").read_text()) for n in ("one", "two"))
    assert one == two
    assert one["components"]["model"]["metadata"]["export_config"]["context_length"] == 32
    assert (tmp_path / "one/model.pte").read_bytes() == (tmp_path / "two/model.pte").read_bytes()


def test_tokenizer_files_go_along(artifact: Path, tmp_path: Path) -> None:
    copied = tmp_path / "with tokenizer"
    copied.mkdir()
    for file in artifact.iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    (copied / "chat_template.jinja").write_text("{{ messages }}")
    ExportedModel.from_pretrained(copied).save_pretrained(tmp_path / "out")
    assert (tmp_path / "out/chat_template.jinja").read_text() == "{{ messages }}"


def test_configuration_by_name() -> None:
    config = AutoExportConfig.from_dict({"export_format": "hf_static", **SETTINGS})
    assert isinstance(config, door.HfStaticConfig)
    assert config.options("bfloat16").dtype == "bfloat16"
    assert config.options("bfloat16").logits is LogitsRows.ALL
    assert isinstance(AutoHfExporter.from_config(config.to_dict()), door.HfStaticExporter)
    assert get_runner_class("hf_static").version == 1


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"context_length": 0}, Code.EXPORT_OPTION_INVALID),
        ({"logits": "first"}, Code.EXPORT_OPTION_INVALID),
        ({"export_format": "onnx"}, Code.EXPORT_OPTION_INVALID),
    ],
)
def test_bad_configurations(settings: dict[str, Any], code: Code) -> None:
    with pytest.raises(StaticLMError) as caught:
        door.HfStaticConfig(**settings)
    assert caught.value.code is code


def test_sample_inputs_with_a_cache_are_refused(source: Any) -> None:
    config = door.HfStaticConfig(**SETTINGS)
    with pytest.raises(StaticLMError, match="past_key_values"):
        AutoHfExporter.from_config(config).export(
            source, {"input_ids": tokens(2), "past_key_values": None}, config
        )


def test_another_device_is_refused(artifact: Path) -> None:
    with pytest.raises(StaticLMError, match="cuda"):
        ExportedModel.from_pretrained(artifact, device="cuda")


def test_beyond_the_capacity_nothing_runs(artifact: Path) -> None:
    loaded = ExportedModel.from_pretrained(artifact)
    with pytest.raises(StaticLMError) as caught:
        loaded(input_ids=tokens(33))
    assert caught.value.code is Code.CAPACITY_EXCEEDED
    assert loaded.runners["model"].runner.session.position == 0


def test_untested_versions_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        door.warn_untested()
    monkeypatch.setitem(door.TESTED, "transformers", "5.99.0")
    with pytest.warns(UserWarning, match=r"tested with transformers 5\.99\.0, not with 5\.24\.0"):
        door.warn_untested()
