"""Tiny seeded models of the families that people deploy: 2 to 4 layers, float32, random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCABULARY = 96
POSITIONS = 128

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}


def build(prefix: str, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """The causal language model of `{prefix}Config`, with random weights of a visible size."""
    config = getattr(transformers, f"{prefix}Config")(**settings)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    _perturb_norms(model)
    return model.eval()


def _perturb_norms(model: PreTrainedModel) -> None:
    """Norm weights of exactly 1, biases and sinks of exactly 0 would hide a forgotten factor."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))


def _simple(prefix: str, **extra: Any) -> Callable[[], PreTrainedModel]:
    return lambda: build(prefix, **{**_COMMON, **extra})


def small_llama() -> PreTrainedModel:
    """One layer, tied embeddings: for what does not depend on the number of layers."""
    return build("Llama", **{**_COMMON, "num_hidden_layers": 1}, tie_word_embeddings=True)


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": _simple("Llama", tie_word_embeddings=True),
    "qwen2": _simple("Qwen2"),
    "qwen3": _simple("Qwen3", head_dim=16),
    "mistral": _simple("Mistral", sliding_window=11),
    "gemma2": _simple("Gemma2", head_dim=16, sliding_window=11, query_pre_attn_scalar=16),
    "gemma3": _simple(
        "Gemma3Text",
        head_dim=16,
        sliding_window=11,
        query_pre_attn_scalar=16,
        num_hidden_layers=4,
        layer_types=["sliding_attention"] * 2 + ["full_attention", "sliding_attention"],
    ),
    "phi3": _simple("Phi3", sliding_window=None),
    "smollm3": _simple("SmolLM3", num_hidden_layers=4),
    "olmo2": _simple("Olmo2"),
    "granite": _simple(
        "Granite", embedding_multiplier=2.0, logits_scaling=3.0, residual_multiplier=0.7
    ),
    "gpt2": lambda: build(
        "GPT2",
        vocab_size=VOCABULARY,
        n_positions=POSITIONS,
        n_embd=32,
        n_layer=2,
        n_head=4,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.3,
    ),
    "gpt_neox": lambda: build(
        "GPTNeoX",
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=POSITIONS,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.3,
    ),
}
