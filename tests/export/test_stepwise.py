"""Rows of a verify method against the decode method, in eager mode: values, caches, cache dtypes."""

from __future__ import annotations

import pytest
import torch
from tests.support import families, models
from tests.support.eager import Static, static

from staticlm.contract import MethodRole
from staticlm.export.decoder import TORCH_DTYPES
from staticlm.export.static_form import use_static_form

STEP = 5


def _caches(made: Static) -> list[torch.Tensor]:
    return [
        torch.zeros(c.spec.shape, dtype=TORCH_DTYPES[c.spec.dtype]) for c in made.contract.caches
    ]


def _both(made: Static) -> tuple[torch.Tensor, torch.Tensor, float, float]:
    """Logits of verify and of decode over one text, and the caches' and own-row differences."""
    tokens = made.tokens(3)[0]
    one, many = _caches(made), _caches(made)
    verify = next(m.name for m in made.contract.methods if m.role is MethodRole.VERIFY)
    want, got = [], []
    with torch.no_grad(), use_static_form(made.model):
        for position, token in enumerate(tokens):
            inputs = token.reshape(1, 1), torch.tensor([position])
            want.append(made.decoders["decode"](*inputs, *one)[0].float())
        position = 0
        # Every other call is padded: the rows after it land on the padding.
        for count in [STEP, 2] * len(tokens):
            if position + STEP > len(tokens):
                break
            padded = torch.zeros((1, STEP), dtype=torch.int64)
            padded[0, :count] = tokens[position : position + count]
            start, length = torch.tensor([position]), torch.tensor([count])
            rows = made.decoders[verify](padded, start, length, *many)[0].float()
            got.append(rows[:count])
            position += count
        for late in range(position, len(tokens)):
            inputs = tokens[late].reshape(1, 1), torch.tensor([late])
            got.append(made.decoders["decode"](*inputs, *many)[0].float())
    difference = max(
        float((a.float() - b.float()).abs().max()) for a, b in zip(one, many, strict=True)
    )
    scale = max(float(a.float().abs().max()) for a in one)
    return torch.cat(got), torch.cat(want), difference, scale


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("llama", "split"),
        ("gemma3", "split"),
        ("gemma3", "concat"),
        ("gpt_oss", "split"),
        ("llama4", "concat"),
        ("gemma4", "split"),
    ],
)
def test_rows_equal_decode_steps(name: str, mode: str) -> None:
    build = {**models.FAMILIES, **families.EXTRA}[name]
    made = static(build(), 26, 7, mode, verify_length=STEP)
    got, want, caches, scale = _both(made)
    assert float((got - want).abs().max() / want.abs().max()) < 1e-5
    assert caches / scale < 1e-5


@pytest.mark.parametrize("mode", ["split", "concat"])
def test_rows_before_are_seen_in_the_dtype_of_the_caches(mode: str) -> None:
    # Without that the difference is 1.3e-4; rounding that falls to the other side makes 2e-5.
    made = static(
        models.FAMILIES["gemma2"](), 26, 7, mode, verify_length=STEP, cache_dtype="float16"
    )
    got, want, _, _ = _both(made)
    assert float((got - want).abs().max() / want.abs().max()) < 6e-5


def test_the_mode_is_that_of_decode() -> None:
    made = static(models.FAMILIES["llama"](), 40, 7, "concat", verify_length=STEP)
    modes = {m.name: m.attention for m in made.contract.methods}
    assert modes == {"prefill": "concat", "verify": "stepwise-concat", "decode": "concat"}
