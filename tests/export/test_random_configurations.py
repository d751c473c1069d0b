"""Random small configurations: chunked == stepwise == the source, on every row, in eager mode."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.support.eager import relative, static
from tests.support.models import build
from transformers import PreTrainedModel

ROUNDING = 5e-6


@dataclass(frozen=True)
class Shape:
    """A random model and the lengths that it is exported with."""

    heads: int
    groups: int
    width: int
    sliding: tuple[bool, ...]
    window: int
    chunk: int
    capacity: int
    counts: tuple[int, ...]
    mode: str
    softcap: float | None
    seed: int

    def model(self) -> PreTrainedModel:
        """A Gemma 2 shaped model: sandwich norms, softcaps, full and sliding layers."""
        hidden = 6 * self.heads * self.groups
        return build(
            "Gemma2",
            seed=self.seed,
            vocab_size=64,
            hidden_size=hidden,
            intermediate_size=32,
            num_hidden_layers=len(self.sliding),
            num_attention_heads=self.heads * self.groups,
            num_key_value_heads=self.heads,
            head_dim=self.width,
            query_pre_attn_scalar=self.width,
            sliding_window=self.window,
            layer_types=["sliding_attention" if s else "full_attention" for s in self.sliding],
            attn_logit_softcapping=None if self.mode == "fused" else self.softcap,
            final_logit_softcapping=self.softcap,
            max_position_embeddings=256,
            # The same activations whatever the width: with larger ones float32 itself rounds by as much.
            initializer_range=0.3 * min(1.0, (32 / hidden) ** 0.5),
        )


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    chunk = draw(st.integers(2, 12))
    capacity = draw(st.integers(chunk, 40))
    counts: list[int] = []
    position = 0
    while position + chunk <= capacity and draw(st.integers(0, 4)):
        counts.append(draw(st.integers(1, chunk)))
        position += counts[-1]
    return Shape(
        heads=draw(st.sampled_from([1, 2, 3, chunk])),
        groups=draw(st.integers(1, 4)),
        width=2 * draw(st.integers(1, 4)),
        sliding=tuple(draw(st.lists(st.booleans(), min_size=1, max_size=3))),
        window=draw(st.integers(1, 48)),
        chunk=chunk,
        capacity=capacity,
        counts=tuple(counts),
        mode=draw(st.sampled_from(["split", "concat", "fused"])),
        softcap=draw(st.sampled_from([None, 5.0])),
        seed=draw(st.integers(0, 9)),
    )


def shape(**changes: object) -> Shape:
    base: dict[str, object] = {
        "heads": 2,
        "groups": 2,
        "width": 8,
        "sliding": (True, False),
        "window": 7,
        "chunk": 5,
        "capacity": 33,
        "counts": (5, 3, 5, 1),
        "mode": "split",
        "softcap": None,
        "seed": 0,
    }
    return Shape(**{**base, **changes})  # type: ignore[arg-type]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(shapes())
@example(shape(window=1))
@example(shape(window=1, sliding=(True, True)))
@example(shape(window=5))
@example(shape(window=3, chunk=8, counts=(8, 8, 2)))
@example(shape(window=40))
@example(shape(window=33))
@example(shape(window=32))
@example(shape(heads=8, groups=1, width=8, chunk=8, counts=(8, 4)))
@example(shape(heads=2, groups=4, chunk=8, counts=(8, 7, 8)))
@example(shape(heads=1, groups=4))
@example(shape(mode="fused"))
@example(
    Shape(12, 3, 4, (False, False, True), 5, 12, 40, (), "split", 5.0, 0),
)
def test_chunked_stepwise_and_source_agree(one: Shape) -> None:
    made = static(one.model(), one.capacity, one.chunk, one.mode)
    tokens = made.tokens(one.seed)
    want = made.source(tokens)
    chunked = made.rows(tokens, one.counts)
    stepwise = made.rows(tokens, [])
    assert relative(chunked, want) < ROUNDING
    assert relative(stepwise, want) < ROUNDING
    assert torch.equal(made.rows(tokens, one.counts, pad=63), chunked)


@pytest.mark.parametrize("window", [1, 4, 5, 6, 9])
def test_padding_at_every_ring_offset(window: int) -> None:
    """A padded call that starts at every slot of the ring, then decode over more than a wrap."""
    chunk, capacity = 5, 40
    one = shape(window=window, sliding=(True,), chunk=chunk, capacity=capacity)
    made = static(one.model(), capacity, chunk)
    slots = made.contract.caches[0].slots
    assert slots == window - 1 + chunk
    tokens = made.tokens()
    want = made.source(tokens)
    for offset in range(slots):
        steps = [chunk] * (offset // chunk) + [offset % chunk] * (offset % chunk > 0)
        assert relative(made.rows(tokens, [*steps, 2, 3]), want) < ROUNDING, offset


@pytest.mark.parametrize(("window", "slots"), [(7, 11), (33, 33), (200, 33), (29, 33), (28, 32)])
def test_a_ring_never_exceeds_the_capacity(window: int, slots: int) -> None:
    made = static(shape(window=window).model(), 33, 5)
    assert made.contract.caches[0].slots == slots
    assert made.contract.caches[0].window == window
    assert made.contract.caches[2].slots == 33
