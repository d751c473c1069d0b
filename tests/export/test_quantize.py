"""Quantised weights: what is made of the model, and what the program computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import models
from tests.support.eager import chunk_counts, relative, static

from staticlm.build import export_model
from staticlm.export.dryrun import plan_export
from staticlm.export.options import ExportOptions
from staticlm.export.quantize import _linear_config, quantize_model
from staticlm.validation import validate

COMMON: dict[str, Any] = {"context_length": 32, "prefill_lengths": (8,)}


def source(prefix: str = "Llama") -> Any:
    settings = {**models._COMMON, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96}
    return models.build(prefix, **settings, tie_word_embeddings=True)


def options(quantize: str | None, embedding: int | None) -> ExportOptions:
    return ExportOptions(**COMMON, quantize=quantize, quantize_embedding=embedding)


@pytest.mark.parametrize(("quantize", "embedding"), [("8da4w", 4), ("int8", 8), ("int8", None)])
def test_methods_compute_what_the_quantised_model_computes(
    quantize: str | None, embedding: int | None
) -> None:
    model = source()
    made = quantize_model(model, options(quantize, embedding))
    assert made is not model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    methods = static(made, 32, 8)
    tokens = methods.tokens()
    want = methods.source(tokens)
    assert relative(methods.rows(tokens, chunk_counts(32, 8)), want) < 1e-3
    # The scheme is there at all: another result than the float model's.
    assert relative(want, static(model, 32, 8).source(tokens)) > 1e-3


def test_transposed_linear_layers_are_quantised_too() -> None:
    model = models.FAMILIES["gpt2"]()
    made = quantize_model(model, options("int8", None))
    linear = [m for m in made.modules() if isinstance(m, torch.nn.Linear)]
    assert len(linear) == 2 * 4 + 1
    assert all(type(m.weight).__module__.startswith("torchao") for m in linear)
    methods = static(made, 32, 8)
    tokens = methods.tokens()
    assert relative(methods.rows(tokens, [8, 3]), static(model, 32, 8).source(tokens)) < 0.1


def test_nothing_to_quantise_is_the_model_itself() -> None:
    model = source()
    assert quantize_model(model, options(None, None)) is model


@pytest.mark.slow
@pytest.mark.parametrize(("quantize", "embedding"), [("8da4w", 4), ("int8", 8)])
def test_every_linear_layer_is_in_a_delegate(quantize: str, embedding: int, tmp_path: Path) -> None:
    model, chosen = source(), options(quantize, embedding)
    made = export_model(model, tmp_path / "artifact", chosen)
    lookup = {4: "embedding_4bit", 8: "embedding_byte"}[embedding]
    for method in made.facts.methods.values():
        assert {d.backend for d in method.delegates} == {"XnnpackBackend"}
        names = set(method.operators)
        assert not [
            n for n in names if any(w in n for w in ("linear", "mm", "quantize_", "choose"))
        ]
        assert method.operators[f"quantized_decomposed::{lookup}.out"] == 1
    planned = plan_export(model, chosen)
    assert sum(made.facts.named_data.values()) < 1.25 * planned.program_bytes
    # The manifest says how the source's weights are to be quantised.
    result = validate(made.path, model)
    assert result.passed
    assert result.worst < 5e-3


@pytest.mark.parametrize("sign", [1, -1])
def test_xnnpack_takes_no_negative_scale(sign: int) -> None:
    """Half of the scales of a GGUF file's Q4_0 weights are negative: see decision 6."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from executorch.extension.pybindings import portable_lib
    from torchao.quantization import quantize_

    model = torch.nn.Sequential(torch.nn.Linear(32, 8, bias=False)).eval()
    quantize_(model, _linear_config("8da4w"))
    weight: Any = model[0].weight
    weight = getattr(weight, "original_weight_tensor", weight)
    with torch.no_grad():
        weight.qdata.clamp_(-7, 7).mul_(sign)
        weight.scale.mul_(sign)
    inputs = (torch.randn(2, 32),)
    want = model(*inputs)
    edge = to_edge_transform_and_lower(
        torch.export.export(model, inputs), partitioner=[XnnpackPartitioner()]
    )
    module = portable_lib._load_for_executorch_from_buffer(edge.to_executorch().buffer)
    if sign > 0:
        torch.testing.assert_close(module.forward(inputs)[0], want, atol=1e-5, rtol=1e-5)
    else:
        with pytest.raises(RuntimeError):
            module.forward(inputs)
