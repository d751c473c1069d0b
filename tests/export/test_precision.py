"""Half precision models and caches against the float32 model, in eager mode."""

from __future__ import annotations

import pytest
import torch
from tests.support import models
from tests.support.eager import chunk_counts, relative, static

from staticlm.export.source import load_source

# Relative steps of the formats, with room for two layers of rounding.
STEP = {"float32": 5e-6, "float16": 1e-2, "bfloat16": 8e-2}


@pytest.mark.parametrize("cache", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_model_and_cache_dtypes(dtype: str, cache: str) -> None:
    float_model = models.FAMILIES["llama"]()
    model = load_source(float_model, dtype).model
    made = static(model, 48, 8, dtype=dtype, cache_dtype=cache)
    assert {c.spec.dtype for c in made.contract.caches} == {cache}
    assert made.contract.decode.logits.spec.dtype == dtype
    tokens = made.tokens()
    got = made.rows(tokens, chunk_counts(48, 8))
    with torch.no_grad():
        want = float_model(input_ids=tokens, use_cache=False).logits[0]
    assert relative(got, want) < max(STEP[dtype], STEP[cache])
    # A coarser cache is seen: it must not be widened silently.
    if STEP[cache] > STEP[dtype]:
        assert relative(got, want) > STEP[dtype] / 10


def test_a_row_that_sees_nothing_stays_finite_in_float16() -> None:
    model = load_source(models.FAMILIES["gemma2"](), "float16").model
    made = static(model, 48, 8, dtype="float16")
    assert torch.isfinite(made.rows(made.tokens(), [1, 8, 3])).all()
