"""Where the loss of quantised weights comes from, in torchao's eager mode, without a program.

    python benchmarks/quantised.py MODEL [--tokens 1024]

First the perplexity of the text that the package ships, by scheme and by what is left out of it; then how
much a quantised source differs from itself when it is fed in chunks instead of at once, which is what no
program with 8-bit activations can be nearer to. MODEL is what `staticlm export` takes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchao.quantization import (
    Int8DynamicActivationIntxWeightConfig,
    IntxWeightOnlyConfig,
    quantize_,
)
from torchao.quantization.granularity import PerAxis, PerGroup
from torchao.quantization.quantize_.workflows import IntxChooseQParamsAlgorithm
from transformers import DynamicCache

from staticlm.evaluation import evaluation_text
from staticlm.export.options import ExportOptions
from staticlm.export.quantize import GROUP, quantize_model
from staticlm.export.source import load_source

CHUNK = 128
FOUR: dict[str, Any] = {
    "weight_dtype": getattr(torch, "int4"),  # noqa: B009  # the stubs do not know it
    "weight_granularity": PerGroup(GROUP),
}
EIGHT: dict[str, Any] = {"weight_dtype": torch.int8, "weight_granularity": PerAxis(0)}
SEARCH = {"intx_choose_qparams_algorithm": IntxChooseQParamsAlgorithm.HQQ_SCALE_ONLY}


def activations(weights: dict[str, Any]) -> Int8DynamicActivationIntxWeightConfig:
    """Weights and 8-bit activations."""
    return Int8DynamicActivationIntxWeightConfig(**weights)


def weights_only(weights: dict[str, Any]) -> IntxWeightOnlyConfig:
    """Weights alone: activations stay float32."""
    named = {name.removeprefix("weight_"): value for name, value in weights.items()}
    named["weight_dtype"] = named.pop("dtype")
    return IntxWeightOnlyConfig(**named)


def everything(config: Any) -> Callable[[Any], None]:
    """All linear layers, the head included."""
    return lambda model: quantize_(model, config)


def head_in_eight(config: Any) -> Callable[[Any], None]:
    """The head in 8 bits, the rest by `config`."""

    def apply(model: Any) -> None:
        quantize_(model.get_decoder(), config)
        head = model.get_output_embeddings()
        quantize_(model, activations(EIGHT), filter_fn=lambda module, name: module is head)

    return apply


CASES: dict[str, Callable[[Any], None]] = {
    "float32": lambda model: None,
    "8 bits, 8-bit activations": everything(activations(EIGHT)),
    "4 bits, 8-bit activations": everything(activations(FOUR)),
    "4 bits alone": everything(weights_only(FOUR)),
    "4 bits, 8-bit activations, searched scales": everything(activations({**FOUR, **SEARCH})),
    "4 bits alone, searched scales": everything(weights_only({**FOUR, **SEARCH})),
    "4 bits, 8-bit activations, searched scales, head in 8 bits": head_in_eight(
        activations({**FOUR, **SEARCH})
    ),
}


def main() -> None:
    """Measure and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=1024)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    source = load_source(arguments.model, "float32")
    text = torch.tensor([source.tokenizer(evaluation_text()).input_ids[: arguments.tokens]])
    print("| weights | perplexity |\n|---|---:|", flush=True)
    for name, change in CASES.items():
        made = copy_of(arguments.model)
        change(made)
        print(f"| {name} | {perplexity(made, text):.2f} |", flush=True)
    tokens = torch.randint(0, source.model.config.vocab_size, (1, arguments.tokens))
    print(
        "\n| in chunks against at once | median row | nine of ten | largest |\n|---|---:|---:|---:|"
    )
    for scheme in ("int8", "8da4w"):
        options = ExportOptions(quantize=scheme, quantize_embedding=8)
        rows = chunked_difference(quantize_model(source.model, options), tokens)
        nine = float(rows.quantile(0.9))
        print(f"| {scheme} | {rows.median():.3f} | {nine:.3f} | {rows.max():.2f} |", flush=True)


def copy_of(path: str) -> Any:
    """The model, its head apart from the embedding table."""
    model: Any = load_source(path, "float32").model
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is table.weight:
        head.weight = nn.Parameter(table.weight.detach().clone(), requires_grad=False)
    return model


@torch.no_grad()
def perplexity(model: Any, ids: torch.Tensor) -> float:
    """Of `ids`, `[1, length]`, at once."""
    logits = model(input_ids=ids, use_cache=False).logits[0].float()
    return float(nn.functional.cross_entropy(logits[:-1], ids[0, 1:]).exp())


@torch.no_grad()
def chunked_difference(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Norm of the difference of each row relative to its logits, `[length]`."""
    whole = model(input_ids=ids, use_cache=False).logits[0].float()
    cache = DynamicCache(config=model.config)
    parts = [
        model(input_ids=part, cache=cache, use_cache=True).logits[0].float()
        for part in ids.split(CHUNK, dim=1)
    ]
    rows: torch.Tensor = (whole - torch.cat(parts)).norm(dim=-1) / whole.norm(dim=-1)
    return rows


if __name__ == "__main__":
    main()
