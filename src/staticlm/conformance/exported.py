"""Programs that the package's own exporter makes of tiny transformers models, for the same clauses.

The oracle is the model's own eager forward with a cache that keeps every row.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from staticlm.build import export_model
from staticlm.conformance.cases import Case, takes
from staticlm.conformance.make import Made
from staticlm.conformance.oracle import Text
from staticlm.contract import Part
from staticlm.export.options import ExportOptions

MODELS = {
    "exported-full": ("a transformers model with full attention", ("full_attention",)),
    "exported-mixed": (
        "a transformers model with a full and a sliding layer, window 5",
        ("full_attention", "sliding_attention"),
    ),
}

_CLAUSES = ("C6.1", "C7.2", "C7.3", "C8.1", "C9.1")

EXPORTED_CASES: tuple[Case, ...] = tuple(
    case
    for name in MODELS
    for case in (
        Case(f"{name}-chunks", name, _CLAUSES, takes(1, [6, 6, 6, 6])),
        Case(f"{name}-padded", name, _CLAUSES, takes(2, [4, 3, 5, 1, 2, 4])),
        Case(f"{name}-near-capacity", name, (*_CLAUSES, "C6.4"), takes(4, [21, 2, 1])),
    )
)


def make_exported(root: Path, progress: Callable[[str], None]) -> dict[str, Made]:
    """Export every model into the kit that is being made at `root`."""
    made = {}
    for name, (about, kinds) in MODELS.items():
        progress(f"program {name}")
        model = tiny_model(kinds)
        report = export_model(
            model,
            root / f"{name}.artifact",
            ExportOptions(context_length=24, prefill_lengths=(6,)),
            backend="portable",
        )
        file = f"programs/{name}.pte"
        shutil.move(report.path / "model.pte", root / file)
        shutil.rmtree(report.path)
        made[name] = Made(about, report.contract, _oracle(model), file)
    return made


def tiny_model(kinds: Sequence[str]) -> PreTrainedModel:
    """A seeded model whose logits depend on every visible position."""
    config = Qwen2Config(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=len(kinds),
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        use_sliding_window=True,
        sliding_window=5,
        layer_types=list(kinds),
        initializer_range=0.3,
        attn_implementation="eager",
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Qwen2ForCausalLM(config).eval()


def _oracle(model: PreTrainedModel) -> Callable[[Sequence[int]], Text]:
    def text(tokens: Sequence[int]) -> Text:
        # Without a configuration every layer keeps all rows; masks come from the model all the same.
        cache = DynamicCache()
        with torch.no_grad():
            out: Any = model(input_ids=torch.tensor([list(tokens)]), cache=cache, use_cache=True)
        rows = {}
        for index, layer in enumerate(cache.layers):
            for part, kept in ((Part.KEY, layer.keys), (Part.VALUE, layer.values)):
                rows[index, part] = kept[0].transpose(0, 1).float().numpy()
        return Text(out.logits[0].float().numpy(), rows)

    return text
