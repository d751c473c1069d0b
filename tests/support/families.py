"""Tiny seeded models beyond the first twelve families, and the ones that are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.models import _COMMON, POSITIONS, VOCABULARY, build
from transformers import PreTrainedModel

WINDOW = 11

Build = Callable[[], PreTrainedModel]


def of(prefix: str, **extra: Any) -> Build:
    """A model of `{prefix}Config` with the common sizes."""
    return lambda: build(prefix, **{**_COMMON, **extra})


def rope(kind: str, **extra: Any) -> dict[str, Any]:
    """RoPE parameters of a type."""
    return {"rope_theta": 10000.0, "rope_type": kind, **extra}


_MIXED = ["sliding_attention", "full_attention"]
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 8,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "topk_group": 1,
}
_SHARED_KV: dict[str, Any] = {
    "head_dim": 16,
    "sliding_window": WINDOW,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "num_kv_shared_layers": 1,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
}

EXTRA: dict[str, Build] = {
    "mixtral": of("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": of(
        "Qwen2Moe", **_EXPERTS, moe_intermediate_size=24, shared_expert_intermediate_size=24
    ),
    "qwen3_moe": of("Qwen3Moe", head_dim=16, **_EXPERTS, moe_intermediate_size=24),
    "olmoe": of("Olmoe", **_EXPERTS),
    "granitemoe": of("GraniteMoe", num_local_experts=4, num_experts_per_tok=2),
    "gpt_oss": of(
        "GptOss", head_dim=16, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2
    ),
    "phi4": of("Phi3", sliding_window=None, tie_word_embeddings=False),
    "phi": of("Phi", partial_rotary_factor=0.5),
    "cohere": of("Cohere", logit_scale=0.25),
    "cohere2": of("Cohere2", sliding_window=WINDOW, layer_types=_MIXED, logit_scale=0.25),
    "falcon3": of("Llama", head_dim=16, rope_theta=1000042.0),
    "starcoder2": of("Starcoder2", sliding_window=WINDOW, use_bias=True),
    "olmo3": of("Olmo3", sliding_window=WINDOW, layer_types=_MIXED),
    "gemma": of("Gemma", head_dim=16, num_key_value_heads=1),
    "gemma3n": of(
        "Gemma3nText",
        **_SHARED_KV,
        intermediate_size=[48] * 3,
        laurel_rank=4,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.0] * 3,
    ),
    "gemma4": of("Gemma4Text", **_SHARED_KV, global_head_dim=24),
    "llama4": of(
        "Llama4Text",
        head_dim=16,
        attention_chunk_size=13,
        layer_types=["chunked_attention", "full_attention"],
        no_rope_layers=[1, 0],
        intermediate_size_mlp=48,
        num_local_experts=2,
        interleave_moe_layer_step=2,
        floor_scale=4,
    ),
    "deepseek_v2": of("DeepseekV2", **_LATENT, n_group=1, n_shared_experts=1),
    "deepseek_v3": of("DeepseekV3", **_LATENT, n_group=2),
    "exaone4": of("Exaone4", sliding_window=WINDOW, sliding_window_pattern=2),
    "glm4": of("Glm4", head_dim=16),
    "glm4_moe": of(
        "Glm4Moe",
        head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    "ernie4_5": of("Ernie4_5", head_dim=16),
    "seed_oss": of("SeedOss", head_dim=16),
    "ministral": of("Ministral", sliding_window=WINDOW, head_dim=16),
    "nemotron": of("Nemotron"),
    "vaultgemma": of("VaultGemma", head_dim=16, sliding_window=WINDOW),
    "opt": lambda: build(
        "OPT",
        vocab_size=VOCABULARY,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=POSITIONS,
        word_embed_proj_dim=32,
        init_std=0.3,
    ),
    "gptj": lambda: build(
        "GPTJ",
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=POSITIONS,
        rotary_dim=4,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.3,
    ),
    "gpt_bigcode": lambda: build(
        "GPTBigCode",
        vocab_size=VOCABULARY,
        n_positions=POSITIONS,
        n_embd=32,
        n_layer=2,
        n_head=4,
        multi_query=True,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.3,
    ),
}
"""Families that export, by the name that the documentation uses."""

ROPE: dict[str, Build] = {
    "linear": of("Llama", rope_parameters=rope("linear", factor=4.0)),
    "llama3": of(
        "Llama",
        rope_parameters=rope(
            "llama3",
            factor=4.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=16,
        ),
    ),
    "yarn": of(
        "Llama", rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=16)
    ),
    "longrope": of(
        "Phi3",
        sliding_window=None,
        max_position_embeddings=256,
        original_max_position_embeddings=64,
        rope_parameters=rope(
            "longrope", short_factor=[1.1, 1.2, 1.3, 1.4], long_factor=[2.0, 3.0, 4.0, 5.0]
        ),
    ),
    "dynamic": of("Llama", max_position_embeddings=64, rope_parameters=rope("dynamic", factor=2.0)),
}
"""RoPE types; the original length of the first three is 16, of the last two 64."""

_HYBRID: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_n_groups": 1}

REFUSED: dict[str, tuple[Build, str]] = {
    "qwen3_next": (
        of(
            "Qwen3Next",
            head_dim=16,
            layer_types=["full_attention", "linear_attention"],
            **_EXPERTS,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=24,
        ),
        "layer 1: found layer type 'linear_attention'",
    ),
    "lfm2": (
        of("Lfm2", layer_types=["full_attention", "conv"]),
        "layer 1: found layer type 'conv'",
    ),
    "mamba": (
        lambda: build("Mamba", vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2),
        "layer 0: found layer type 'linear_attention'",
    ),
    "falcon_h1": (
        of("FalconH1", mamba_d_ssm=32, mamba_d_head=8, **_HYBRID),
        "layer 0: found layer type 'hybrid'",
    ),
    "bamba": (
        of("Bamba", attn_layer_indices=[0], mamba_d_head=16, **_HYBRID),
        "layer 1: found layer type 'linear_attention'",
    ),
    "jamba": (
        of("Jamba", attn_layer_offset=1, attn_layer_period=2, num_experts=2, mamba_d_state=8),
        "layer 0: found layer type 'linear_attention'",
    ),
    "recurrent_gemma": (
        of("RecurrentGemma", num_hidden_layers=3, lru_width=32, attention_window_size=WINDOW),
        "layer 0: found layer type 'linear_attention'",
    ),
    "falcon": (
        lambda: build(
            "Falcon",
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
        ),
        "layer 0: found FalconAttention",
    ),
    "bloom": (
        lambda: build("Bloom", vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4),
        "layer 0: found BloomAttention",
    ),
    "mpt": (
        lambda: build("Mpt", vocab_size=VOCABULARY, d_model=32, n_layers=2, n_heads=4),
        "layer 0: found MptAttention",
    ),
    "stablelm": (of("StableLm"), "layer 0: found StableLmAttention"),
    "diffllama": (of("DiffLlama"), "calls from layers [0, 0, 1, 1]"),
    "bart": (
        lambda: build(
            "Bart", vocab_size=VOCABULARY, d_model=32, decoder_layers=2, encoder_layers=1
        ),
        "layer 0: found BartAttention",
    ),
}
"""Families that are refused, with the words that say why."""
