"""Every family in eager mode: chunked, stepwise and the source's own forward agree on every row."""

from __future__ import annotations

import pytest
import torch
from tests.support import families, models
from tests.support.eager import chunk_counts, relative, static

from staticlm.contract import CacheKind, Part
from staticlm.errors import Code, ExportError

ALL = {**models.FAMILIES, **families.EXTRA}
ROUNDING = 5e-6
KINDS = ("llama", "gemma2", "gemma3", "gpt_oss", "gemma3n", "llama4", "deepseek_v2", "gpt_bigcode")
"""What attention is handed differs between these: masks, sinks, widths, groups, a softcap."""


@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, "split") for name in ALL]
    + [(name, mode) for name in KINDS for mode in ("concat", "fused")],
)
def test_every_row_equals_the_source(name: str, mode: str) -> None:
    model = ALL[name]()
    if mode == "fused" and getattr(model.config, "attn_logit_softcapping", None) is not None:
        with pytest.raises(ExportError, match="fused attention of layer 0: found scores capped at"):
            static(model, 48, 8, mode)
        return
    made = static(model, 48, 8, mode)
    tokens = made.tokens()
    want = made.source(tokens)
    chunked = made.rows(tokens, chunk_counts(48, 8))
    assert relative(chunked, want) < ROUNDING
    if mode == "split":
        assert relative(made.rows(tokens, []), want) < ROUNDING
        assert torch.equal(made.rows(tokens, chunk_counts(48, 8), pad=17), chunked)


@pytest.mark.parametrize("name", families.REFUSED)
def test_other_kinds_are_refused_by_name(name: str) -> None:
    build, words = families.REFUSED[name]
    with pytest.raises(ExportError) as caught:
        static(build(), 48, 8)
    assert caught.value.code is Code.MODEL_UNSUPPORTED
    assert words in str(caught.value)


def test_layers_that_share_keep_one_cache_per_owner() -> None:
    made = static(families.EXTRA["gemma4"](), 48, 8)
    assert [layer.owner for layer in made.traits.layers] == [0, 1, 1]
    keys = [c for c in made.contract.caches if c.part is Part.KEY]
    assert [(c.layer, c.kind, c.window) for c in keys] == [
        (0, CacheKind.SLIDING, 11),
        (1, CacheKind.FULL, None),
    ]
    assert [c.spec.shape for c in keys] == [(2, 18, 16), (2, 48, 24)]


def test_latent_attention_has_its_own_value_width() -> None:
    made = static(families.EXTRA["deepseek_v2"](), 48, 8)
    assert [c.spec.shape for c in made.contract.caches[:2]] == [(4, 48, 24), (4, 48, 12)]


@pytest.mark.parametrize(("capacity", "chunk"), [(48, 13), (13, None), (12, None)])
def test_attention_chunks_only_where_the_capacity_has_several(
    capacity: int, chunk: int | None
) -> None:
    made = static(families.EXTRA["llama4"](), capacity, 8)
    assert [layer.chunk for layer in made.traits.layers] == [chunk, None]
    tokens = made.tokens()
    assert relative(made.rows(tokens, [8]), made.source(tokens)) < ROUNDING


@pytest.mark.parametrize("name", families.ROPE)
def test_rope_types(name: str) -> None:
    made = static(families.ROPE[name](), 64, 8)
    assert made.traits.rope_types == (name,)
    tokens = made.tokens()
    assert relative(made.rows(tokens, chunk_counts(64, 8)), made.source(tokens)) < ROUNDING


@pytest.mark.parametrize("name", ["longrope", "dynamic"])
def test_rope_that_depends_on_the_length_is_refused_beyond_its_original(name: str) -> None:
    with pytest.raises(ExportError) as caught:
        static(families.ROPE[name](), 65, 8)
    assert caught.value.code is Code.MODEL_UNSUPPORTED
    text = str(caught.value)
    assert f"RoPE type '{name}' at context length 65" in text
    assert "--context-length 64" in text


@pytest.mark.parametrize("name", ["longrope", "dynamic"])
def test_rope_state_left_by_a_longer_text_is_not_exported(name: str) -> None:
    fresh = static(families.ROPE[name](), 64, 8)
    tokens = fresh.tokens()
    model = families.ROPE[name]()
    with torch.no_grad():
        model(input_ids=torch.zeros((1, 100), dtype=torch.int64))
    got = static(model, 64, 8).rows(tokens, [8, 8])
    assert relative(got, fresh.source(tokens)) < ROUNDING


def test_the_model_is_left_as_it_was() -> None:
    model = families.EXTRA["gpt_oss"]()
    before = (model.config._attn_implementation, model.config._experts_implementation)
    tokens = torch.arange(20).reshape(1, -1)
    with torch.no_grad():
        want = model(input_ids=tokens).logits
        made = static(model, 48, 8)
        made.rows(made.tokens(), [8])
        assert torch.equal(model(input_ids=tokens).logits, want)
    assert (model.config._attn_implementation, model.config._experts_implementation) == before
