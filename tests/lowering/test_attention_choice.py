"""The attention mode that `auto` takes, and the reason that is recorded."""

from __future__ import annotations

import pytest

from staticlm.build import settle
from staticlm.export.options import ExportOptions, default_prefixes
from staticlm.lowering import attention_choice
from staticlm.lowering.attention_choice import MEASURED, Timing, choose_attention

TIMINGS = {"xnnpack": (Timing(1, 256, 2.0, 1.0), Timing(1, 4096, 1.0, 2.0), Timing(128, 256, 3, 3))}


@pytest.mark.parametrize(
    ("step", "slots", "mode", "nearest"),
    [
        (1, 200, "concat", "256 slots"),
        (1, 9000, "split", "4096"),
        (64, 4096, "split", "128 tokens"),
    ],
)
def test_the_nearest_shape_decides(
    step: int, slots: int, mode: str, nearest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_choice, "MEASURED", TIMINGS)
    chosen, why = choose_attention("xnnpack", step, slots, "split")
    assert chosen == mode
    assert nearest in why


def test_what_was_not_measured_is_said_so() -> None:
    assert choose_attention("elsewhere", 1, 512, "concat")[0] == "concat"
    assert "not measured" in choose_attention("elsewhere", 1, 512, "concat")[1]
    assert "reads no cache" in choose_attention("xnnpack", 128, 0, "split")[1]


def test_xnnpack_was_measured_for_one_token_and_for_chunks() -> None:
    assert {t.step for t in MEASURED["xnnpack"]} == {1, 128}
    assert all(t.split > 0 and t.concat > 0 for t in MEASURED["xnnpack"])


def test_methods_get_a_reason_only_where_the_mode_was_chosen_for_the_user() -> None:
    options, targets = settle(ExportOptions(context_length=4096), "xnnpack", {})
    assert options.prefixes == (0, 256, 1024)
    assert set(targets) == {
        *("prefill", "decode", "prefill_to_0", "decode_to_256"),
        *("prefill_to_1024", "decode_to_1024"),
    }
    assert all(target.attention_why for target in targets.values())
    _, targets = settle(ExportOptions(attention="concat"), "xnnpack", {})
    assert {(t.attention, t.attention_why) for t in targets.values()} == {("concat", "")}


def test_further_methods_are_a_default_only_where_methods_share_weights() -> None:
    pytest.importorskip("openvino")
    options, targets = settle(ExportOptions(), "prefill=openvino,decode=xnnpack", {})
    assert options.prefixes == ()
    assert set(targets) == {"prefill", "decode"}


@pytest.mark.parametrize(
    ("capacity", "prefixes"),
    [(512, ()), (1023, ()), (1024, (0, 256)), (4096, (0, 256, 1024)), (5000, (0, 256, 1024))],
)
def test_default_prefixes(capacity: int, prefixes: tuple[int, ...]) -> None:
    assert default_prefixes(capacity) == prefixes
