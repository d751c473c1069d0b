"""`plan_export`: what an export would make, from shapes alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.support import families, models
from typer.testing import CliRunner

from staticlm.build import export_model
from staticlm.cli import app
from staticlm.errors import Code, ExportError, LoweringError
from staticlm.export.dryrun import plan_export
from staticlm.export.options import ExportOptions
from staticlm.export.programs import plan_methods
from staticlm.lowering.backends import get_backend

TIED = "the tied embedding table"
OPTIONS = ExportOptions(context_length=48, prefill_lengths=(8,))


def config_only(model: Any, path: Path) -> Path:
    """A model directory with a configuration and no weights."""
    model.config.save_pretrained(path)
    return path


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma4", "gpt_oss", "deepseek_v2", "gpt2"])
def test_counts_without_weights(name: str, tmp_path: Path) -> None:
    model = {**models.FAMILIES, **families.EXTRA}[name]()
    planned = plan_export(config_only(model, tmp_path), OPTIONS)
    weights = sum(p.numel() for p in model.parameters())
    assert planned.parameters == weights
    assert planned.source_bytes == planned.program_bytes == 4 * weights
    assert planned.contract.cache_bytes == sum(c.spec.nbytes for c in planned.contract.caches)
    assert planned.run_bytes == 4 * weights + planned.contract.cache_bytes
    assert {m.name for m in planned.contract.methods} == {"prefill", "decode"}


def test_layer_lines() -> None:
    planned = plan_export(families.EXTRA["gemma4"](), OPTIONS)
    assert planned.layer_lines() == [
        "1 x sliding attention, window 11, 4 heads on 2, caches float32[2, 18, 16] and "
        "float32[2, 18, 16], 4,608 bytes",
        "1 x full attention, 4 heads on 2, caches float32[2, 48, 24] and float32[2, 48, 24], "
        "18,432 bytes",
        "1 x full attention, 4 heads on 2, caches of layer 1",
    ]


@pytest.mark.parametrize(
    ("quantize", "embedding", "twice"),
    [(None, None, ()), ("int8", None, (TIED,)), (None, 8, (TIED,)), ("int8", 8, (TIED,))],
)
def test_bytes_of_quantised_weights(
    quantize: str | None, embedding: int | None, twice: tuple[str, ...]
) -> None:
    model = models.FAMILIES["llama"]()
    options = ExportOptions(
        context_length=48, prefill_lengths=(8,), quantize=quantize, quantize_embedding=embedding
    )
    planned = plan_export(model, options)
    table = 96 * 32
    norms = 5 * 32
    linear = sum(p.numel() for n, p in model.named_parameters() if "proj" in n)
    rows = sum(p.shape[0] for n, p in model.named_parameters() if "proj" in n)
    body = 4 * linear if quantize is None else linear + 4 * rows
    # Head and table are one tensor until one of them is quantised.
    head = {None: 0 if embedding is None else 4 * table, "int8": table + 4 * 96}[quantize]
    lookup = 4 * table if embedding is None else table + 4 * 96
    assert planned.program_bytes == body + head + lookup + 4 * norms
    assert planned.kept_twice == twice


@pytest.mark.parametrize(
    ("options", "backend", "words"),
    [
        ({"quantize": "int8"}, "portable", "quantised weights on this backend: found portable"),
        ({"quantize": "8da4w", "dtype": "bfloat16"}, "xnnpack", "found bfloat16; expected float32"),
    ],
)
def test_schemes_without_a_kernel_are_refused(
    options: dict[str, Any], backend: str, words: str
) -> None:
    with pytest.raises(ExportError, match=re.escape(words)) as caught:
        plan_export(
            models.FAMILIES["llama"](),
            ExportOptions(context_length=48, prefill_lengths=(8,), **options),
            backend=backend,
        )
    assert caught.value.code is Code.EXPORT_OPTION_INVALID


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (
            "qwen3_moe",
            {"quantize": "int8"},
            "mlp.experts.gate_up_proj: found experts in one tensor",
        ),
        ("llama", {"quantize": "8da4w"}, "mlp.down_proj: found 48 input features"),
        ("gpt_bigcode", {"quantize_embedding": 4}, None),
    ],
)
def test_weights_that_a_scheme_cannot_hold(
    name: str, options: dict[str, Any], words: str | None
) -> None:
    model = {**models.FAMILIES, **families.EXTRA}[name]()
    chosen = ExportOptions(context_length=48, prefill_lengths=(8,), **options)
    if words is None:
        assert plan_export(model, chosen).parameters > 0
        return
    with pytest.raises(ExportError, match=re.escape(words)) as caught:
        plan_export(model, chosen)
    assert caught.value.code is Code.MODEL_UNSUPPORTED


def test_refusals_are_those_of_an_export(tmp_path: Path) -> None:
    build, words = families.REFUSED["lfm2"]
    with pytest.raises(ExportError, match=words):
        plan_export(config_only(build(), tmp_path), OPTIONS)
    with pytest.raises(LoweringError) as caught:
        plan_export(models.FAMILIES["llama"](), OPTIONS, backend="nothing")
    assert caught.value.code is Code.BACKEND_UNKNOWN


def test_the_command(tmp_path: Path) -> None:
    source = config_only(models.FAMILIES["gemma3"](), tmp_path / "model")
    line = ["export", str(source), "--dry-run", "--context-length", "48", "--prefill-length", "8"]
    result = CliRunner().invoke(app("export"), [*line, "--json"])
    assert result.exit_code == 0, result.output
    body = json.loads(result.stdout)
    assert body["methods"]["prefill"]["step"] == 8
    assert body["cache_bytes"] == 4 * 2 * 2 * 16 * (3 * 18 + 48)
    assert sum(int(line.split(" ")[0]) for line in body["layers"]) == 4
    text = CliRunner().invoke(app("export"), line).stdout
    assert "3 x sliding attention, window 11" in text
    assert not list(tmp_path.glob("**/*.pte"))


@pytest.mark.parametrize("name", ["bos_token_id", "eos_token_id"])
def test_ids_that_the_vocabulary_has_not_are_refused(name: str, tmp_path: Path) -> None:
    model = models.build("Llama", **{**models._COMMON, name: models.VOCABULARY})
    for refuse in (
        lambda: plan_export(model, OPTIONS),
        lambda: export_model(model, tmp_path / "a", OPTIONS),
    ):
        with pytest.raises(ExportError, match="found 96; expected less than 96") as refused:
            refuse()
        assert refused.value.code is Code.MODEL_INVALID
    assert not (tmp_path / "a").exists()


def test_auto_does_not_choose_what_a_model_or_a_verify_method_rules_out() -> None:
    def mode(capped: bool, asked: bool = False, **options: Any) -> set[str]:
        chosen = ExportOptions(context_length=48, prefill_lengths=(8,), **options)
        rest = None if asked else (lambda method: ("concat", "the best of the rest"))
        plans = plan_methods(chosen, lambda method: "fused", capped=capped, unfused=rest)
        return {plan.attention.removeprefix("stepwise-") for plan in plans}

    assert mode(False) == {"fused"}
    assert mode(True) == {"concat"}
    assert mode(False, verify_length=4) == {"concat"}
    assert mode(True, asked=True) == {"fused"}  # refused where it is planned
    assert get_backend("openvino").attention("decode", 1, 1024)[0] == "concat"
    assert get_backend("openvino").attention("prefill", 128, 256)[0] == "fused"
    assert get_backend("openvino").attention("prefill", 128, 256, ("fused",))[0] == "concat"
