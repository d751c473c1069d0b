"""`validate` on written programs: half precisions, quantised weights, and random shapes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.export.test_random_configurations import Shape
from tests.support.models import _COMMON, build

import staticlm
from staticlm.export.options import ExportOptions
from staticlm.validation import validate

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("dtype", "cache"),
    [("float16", "float16"), ("bfloat16", "bfloat16"), ("float32", "float16")],
)
def test_half_precision_models_and_caches(dtype: str, cache: str, tmp_path: Path) -> None:
    model = build("Llama", **{**_COMMON, "num_hidden_layers": 1})
    options = ExportOptions(context_length=40, prefill_lengths=(8,), dtype=dtype, cache_dtype=cache)
    staticlm.export_model(model, tmp_path / "a", options)
    found = validate(tmp_path / "a", model, greedy_tokens=8)
    assert found.passed
    assert found.measure == "largest"
    # Rounding is seen, and no more than that.
    assert 1e-6 < found.worst < {"float16": 1e-2, "bfloat16": 1e-1, "float32": 5e-3}[dtype]


def test_quantised_weights_equal_the_quantised_source(tmp_path: Path) -> None:
    model = build(
        "Llama",
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.3,
    )
    options = ExportOptions(
        context_length=40, prefill_lengths=(8,), quantize="8da4w", quantize_embedding=8
    )
    staticlm.export_model(model, tmp_path / "a", options)
    found = validate(tmp_path / "a", model, greedy_tokens=8)
    assert found.passed
    assert found.measure == "norm"
    assert found.worst < 1e-2
    # Against the weights before they were rounded it is not the same model.
    plain = build("Llama", seed=1, **{k: getattr(model.config, k) for k in _COPIED})
    assert not validate(tmp_path / "a", plain, greedy_tokens=8).passed


_COPIED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "bos_token_id", "eos_token_id"),
    "initializer_range",
)

SHAPES = (
    Shape(3, 2, 4, (True, False), 5, 7, 31, (), "split", 5.0, 1),
    Shape(1, 4, 8, (True,), 37, 5, 33, (), "concat", None, 2),
)


@pytest.mark.parametrize("shape", SHAPES, ids=range(len(SHAPES)))
def test_random_shapes(shape: Shape, tmp_path: Path) -> None:
    model = shape.model()
    options = ExportOptions(
        context_length=shape.capacity,
        prefill_lengths=(shape.chunk,),
        attention=shape.mode,
        prefixes=(0,),
    )
    staticlm.export_model(model, tmp_path / "a", options)
    found = validate(tmp_path / "a", model, greedy_tokens=8)
    assert found.passed
    assert found.worst < 2e-5
