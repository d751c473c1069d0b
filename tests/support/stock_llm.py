"""A tiny random Llama, exported by ExecuTorch's own `export_llm`."""

from __future__ import annotations

import json
import logging
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VOCABULARY = 96
CONTEXT = 48
CHUNK = 16
SIZES: dict[str, Any] = {
    "dim": 32,
    "n_layers": 1,
    "n_heads": 4,
    "n_kv_heads": 2,
    "vocab_size": VOCABULARY,
    "hidden_dim": 48,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
}


@dataclass(frozen=True)
class StockLLM:
    """What the export made, and the weights it was made from."""

    program: Path
    tokenizer: Path
    weights: dict[str, torch.Tensor]


def ascii_tokenizer() -> Tokenizer:
    """One token per printable ASCII character (id = code - 32), and `</s>` as id 95."""
    vocab = {"Ġ" if code == 32 else chr(code): code - 32 for code in range(32, 127)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("</s>")])
    return tokenizer


def export_stock(directory: Path, dynamic: bool = True) -> StockLLM:
    """Export with a KV cache through XNNPACK; `dynamic` takes several tokens per call."""
    from executorch.examples.models.llama.export_llama_lib import export_llama
    from executorch.examples.models.llama.llama_transformer import construct_transformer
    from executorch.examples.models.llama.model_args import ModelArgs
    from executorch.extension.llm.export.config.llm_config import LlmConfig

    directory.mkdir(parents=True, exist_ok=True)
    model = construct_transformer(
        ModelArgs(**SIZES, max_seq_len=CONTEXT, max_context_len=CONTEXT, use_kv_cache=False)
    )
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(value.shape, generator=generator) * 0.4
        for name, value in model.state_dict().items()
    }
    torch.save(weights, directory / "weights.pth")
    (directory / "params.json").write_text(json.dumps(SIZES))
    config = LlmConfig()
    config.base.checkpoint = str(directory / "weights.pth")
    config.base.params = str(directory / "params.json")
    config.base.metadata = json.dumps({"get_bos_id": 95, "get_eos_ids": [95]})
    config.model.use_kv_cache = True
    config.model.enable_dynamic_shape = dynamic
    config.export.max_seq_length = CHUNK
    config.export.max_context_length = CONTEXT
    config.export.output_name = str(directory / "stock.pte")
    config.backend.xnnpack.enabled = True
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            export_llama(config)
    finally:
        logging.disable(logging.NOTSET)
    ascii_tokenizer().save(str(directory / "tokenizer.json"))
    return StockLLM(directory / "stock.pte", directory / "tokenizer.json", weights)


def eager_stock(weights: dict[str, torch.Tensor], tokens: list[int]) -> torch.Tensor:
    """float32 `[len(tokens), VOCABULARY]` of the model without a cache."""
    from executorch.examples.models.llama.llama_transformer import construct_transformer
    from executorch.examples.models.llama.model_args import ModelArgs

    model = construct_transformer(
        ModelArgs(
            **SIZES,
            max_seq_len=CONTEXT,
            max_context_len=CONTEXT,
            use_kv_cache=False,
            generate_full_logits=True,
        )
    )
    model.load_state_dict(weights)
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([tokens]))
    return logits[0]
