"""A Llama-like Hugging Face folder as ExecuTorch's own checkpoint and parameter files.

python executorch_checkpoint.py FOLDER OUT.pth OUT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

NAMES = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rotary pairs side by side instead of half a head apart."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def main() -> None:
    """Write both files."""
    folder, checkpoint, params = map(Path, sys.argv[1:])
    config = json.loads((folder / "config.json").read_text())
    rope = config.get("rope_parameters") or config
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    weights = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        parts = name.removeprefix("model.").removesuffix(".weight")
        if parts in ("embed_tokens", "norm", "lm_head"):
            new = {"embed_tokens": "tok_embeddings", "lm_head": "output"}.get(parts, parts)
        else:
            _, layer, rest = parts.split(".", 2)
            new = f"layers.{layer}.{NAMES[rest]}"
            kind = rest.rsplit(".", 1)[-1]
            if kind in heads:
                weight = interleaved(weight, heads[kind])
        weights[f"{new}.weight"] = weight
    weights.setdefault("output.weight", weights["tok_embeddings.weight"])
    torch.save(weights, checkpoint)
    found = {
        "dim": config["hidden_size"],
        "hidden_dim": config["intermediate_size"],
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "n_layers": config["num_hidden_layers"],
        "norm_eps": config["rms_norm_eps"],
        "rope_theta": rope.get("rope_theta", 10000.0),
        "vocab_size": config["vocab_size"],
        "use_scaled_rope": False,
        "use_hf_rope": False,
    }
    params.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
