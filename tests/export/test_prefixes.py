"""Methods that read only the beginning of the caches: every row still equals the source."""

from __future__ import annotations

import pytest
from tests.support import families, models
from tests.support.eager import chunk_counts, relative, static

from staticlm.contract import MethodRole
from staticlm.errors import ExportError
from staticlm.export import programs
from staticlm.export.options import ExportOptions

ROUNDING = 5e-6
# Full, sliding, sinks, attention chunks, shared and latent caches, softcaps.
NAMES = ("llama", "gemma2", "gemma3", "gpt_oss", "llama4", "gemma4", "deepseek_v2")
ALL = {**models.FAMILIES, **families.EXTRA}


@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, "split") for name in NAMES]
    + [("gemma3", "concat"), ("gpt_oss", "concat"), ("gpt_oss", "fused"), ("deepseek_v2", "fused")],
)
def test_every_row_equals_the_source(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # 11 is shorter than the rings of the sliding models, 30 is longer.
    monkeypatch.setattr(programs, "_PREFILL_PREFIX", 1)
    made = static(ALL[name](), 48, 8, mode, prefixes=(0, 11, 30))
    assert sum(m.max_start is not None for m in made.contract.methods) == 5
    tokens = made.tokens()
    want = made.source(tokens)
    for seed in range(3):
        assert relative(made.rows(tokens, chunk_counts(48, 8, seed)), want) < ROUNDING
    assert relative(made.rows(tokens, []), want) < ROUNDING


def test_short_prefixes_get_no_prefill_methods_but_an_empty_one_does() -> None:
    options = ExportOptions(
        context_length=4096, prefill_lengths=(64, 8), verify_length=4, prefixes=(2048, 0, 256)
    )
    plans = programs.plan_methods(options, lambda method: "split")
    narrow = {(p.role, p.step, p.max_start) for p in plans if p.max_start is not None}
    prefills = {(MethodRole.PREFILL, n, limit) for n in (64, 8) for limit in (0, 2048)}
    others = {
        (role, step, limit)
        for role, step in ((MethodRole.DECODE, 1), (MethodRole.VERIFY, 4))
        for limit in (256, 2048)
    }
    assert narrow == prefills | others
    assert {p.name for p in plans} >= {
        "prefill",
        "prefill_8_to_0",
        "decode_to_256",
        "verify_to_256",
    }


@pytest.mark.parametrize("prefixes", [(64,), (-1,), (True,), (8, 8)])
def test_prefixes_out_of_range_are_refused(prefixes: tuple[int, ...]) -> None:
    with pytest.raises(ExportError, match="--prefix"):
        ExportOptions(context_length=64, prefill_lengths=(8,), prefixes=prefixes)
