"""A Llama-like Hugging Face folder as a GGUF file without a tokenizer.

python write_gguf.py FOLDER OUT.gguf F32|Q8_0|Q4_0

As llama.cpp's own quantiser does, Q4_0 keeps a tied embedding, which is the output layer, in Q8_0.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.down_proj": "ffn_down",
    "mlp.up_proj": "ffn_up",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTER = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}


def main() -> None:
    """Write the file."""
    folder, out, kind = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    config = json.loads((folder / "config.json").read_text())
    rope = config.get("rope_parameters") or config
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    width = config.get("head_dim") or config["hidden_size"] // heads["q_proj"]
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads["q_proj"])
    writer.add_head_count_kv(heads["k_proj"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    writer.add_tokenizer_model("none")
    for name, weight in load_file(folder / "model.safetensors").items():
        parts = name.removeprefix("model.").removesuffix(".weight")
        if parts in OUTER:
            new = OUTER[parts]
        else:
            _, layer, rest = parts.split(".", 2)
            new = f"blk.{layer}.{NAMES[rest]}"
            count = heads.get(rest.rsplit(".", 1)[-1])
            if count is not None:  # rotary pairs side by side
                pairs = weight.reshape(count, 2, -1, weight.shape[1]).swapaxes(1, 2)
                weight = np.ascontiguousarray(pairs).reshape(weight.shape)
        weight = weight.astype(np.float32)
        target = "Q8_0" if kind == "Q4_0" and new in ("token_embd", "output") else kind
        if target == "F32" or weight.ndim == 1:
            writer.add_tensor(f"{new}.weight", weight)
            continue
        form = gguf.GGMLQuantizationType[target]
        writer.add_tensor(f"{new}.weight", gguf.quants.quantize(weight, form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
