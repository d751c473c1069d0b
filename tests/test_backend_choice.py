"""`--backend auto`: what is measured, what follows from it, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.support.models import _COMMON, FAMILIES, build

import staticlm
from staticlm import backend_choice
from staticlm.backend_choice import BackendChoice, candidates, choose_backend, decide
from staticlm.errors import Code, LoweringError
from staticlm.export.options import ExportOptions

OPTIONS = ExportOptions(context_length=32, prefill_lengths=(8,))


@pytest.mark.parametrize(
    ("prefill", "decode", "spec"),
    [
        ((10.0, 5.0), (10.0, 5.0), "openvino"),
        ((10.0, 5.0), (10.0, 9.0), "prefill=openvino,decode=xnnpack"),
        ((10.0, 9.0), (10.0, 9.0), "xnnpack"),
        ((10.0, 20.0), (10.0, 7.9), "prefill=xnnpack,decode=openvino"),
    ],
)
def test_another_backend_must_be_clearly_faster(
    prefill: tuple[float, float], decode: tuple[float, float], spec: str
) -> None:
    names = ("xnnpack", "openvino")
    times = {
        kind: dict(zip(names, measured, strict=True))
        for kind, measured in (("prefill", prefill), ("decode", decode))
    }
    assert decide(times) == spec


class _Fake:
    name = "fake"
    runs_on_host = True
    dtypes = ("float32",)
    cache_dtypes = ("float32",)

    def __init__(self, precision: str = "float32", missing: bool = False) -> None:
        self._precision, self._missing = precision, missing

    def available(self) -> None:
        if self._missing:
            raise LoweringError(Code.BACKEND_UNAVAILABLE, "backend fake", found="no module")

    attention_modes = ("split",)

    def precision(self, dtype: str, options: Mapping[str, Any]) -> str:
        if self._precision == "unknown":
            raise RuntimeError("no such device")
        return self._precision


def _with(fake: _Fake, patch: pytest.MonkeyPatch) -> None:
    from staticlm.lowering import backends

    real = backends.get_backend
    patch.setattr(backends, "backend_names", lambda: ("fake", "portable", "qnn", "xnnpack"))
    patch.setattr(backends, "get_backend", lambda name: fake if name == "fake" else real(name))


@pytest.mark.parametrize(
    ("fake", "options", "why"),
    [
        (_Fake(missing=True), OPTIONS, "no module"),
        (_Fake(precision="bfloat16"), OPTIONS, "here it computes in bfloat16, not in float32"),
        (
            _Fake(),
            ExportOptions(32, (8,), dtype="float16"),
            "it does not take float16 with caches in float16",
        ),
        (_Fake(), ExportOptions(32, (8,), quantize="int8"), "fake"),
        (_Fake(), ExportOptions(32, (8,), attention="concat"), "it has no concat attention"),
        (_Fake("unknown"), OPTIONS, "no such device"),
    ],
)
def test_what_does_not_compute_as_asked_is_left_out_by_name(
    fake: _Fake, options: ExportOptions, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with(fake, monkeypatch)
    found, left_out = candidates(options, {})
    assert [one.name for one in found] == ["xnnpack"]
    assert why in left_out["fake"]
    assert set(left_out) == {"fake"}  # neither the portable one nor one that does not run here


def test_a_lone_candidate_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    _with(_Fake(missing=True), monkeypatch)
    choice = choose_backend(FAMILIES["llama"](), OPTIONS, {})
    assert (choice.backend, choice.milliseconds) == ("xnnpack", {})
    assert choice.lines()[-1] == "backend xnnpack"


def test_a_further_layer_is_what_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed cost and cost of a layer, from two depths, for the depth of the model."""
    _with(_Fake(), monkeypatch)
    costs = {"xnnpack": (1.0, 2.0), "fake": (9.0, 1.0)}
    asked = []

    def measure(model: object, layers: int, options: object, name: str, own: object) -> object:
        asked.append((name, layers, own))
        fixed, layer = costs[name]
        return dict.fromkeys(("prefill", "decode"), fixed + layers * layer)

    monkeypatch.setattr(backend_choice, "_measure", measure)
    model = build("Llama", **{**_COMMON, "num_hidden_layers": 20})
    choice = choose_backend(model, OPTIONS, {"fake.device": "CPU"})
    assert choice.milliseconds["decode"] == {"xnnpack": 41.0, "fake": 29.0}
    assert choice.backend == "fake"
    assert choice.own_options({"fake.device": "CPU", "xnnpack.verbose": True}) == {
        "fake.device": "CPU"
    }
    assert [one[:2] for one in asked] == [("xnnpack", 1), ("xnnpack", 2), ("fake", 1), ("fake", 2)]
    assert asked[-1][2] == {"device": "CPU"}
    quick = ExportOptions(32, (8,), verify_length=4)
    choice = choose_backend(model, quick, {})
    assert choice.backend == "prefill=fake,decode=xnnpack"


def test_a_backend_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    _with(_Fake(), monkeypatch)

    def measure(model: object, layers: int, options: object, name: str, own: object) -> object:
        if name in broken:
            raise RuntimeError("out of order\nmore")
        return {"prefill": 1.0, "decode": 1.0}

    monkeypatch.setattr(backend_choice, "_measure", measure)
    model = build("Llama", **{**_COMMON, "num_hidden_layers": 4})
    for broken, chosen in (
        (["fake"], "xnnpack"),
        (["xnnpack"], "fake"),
        (["fake", "xnnpack"], "xnnpack"),
    ):
        choice = choose_backend(model, OPTIONS, {})
        assert choice.backend == chosen
        assert {choice.left_out[name] for name in broken} == {"it failed: out of order"}


@pytest.mark.parametrize(
    ("name", "changes", "depths"),
    [
        ("Llama", {"num_hidden_layers": 6}, (1, 2, 6)),
        ("Llama", {"num_hidden_layers": 1}, None),
        # A full layer comes fourth.
        (
            "Gemma3Text",
            {
                "num_hidden_layers": 8,
                "head_dim": 16,
                "sliding_window": 11,
                "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2,
            },
            (4, 8, 8),
        ),
        # Dense layers first, experts after them.
        (
            "Glm4Moe",
            {
                "num_hidden_layers": 5,
                "head_dim": 16,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 24,
                "n_group": 1,
                "topk_group": 1,
                "first_k_dense_replace": 1,
            },
            (2, 4, 5),
        ),
    ],
)
def test_every_kind_of_layer_is_measured(
    name: str, changes: dict[str, Any], depths: tuple[int, int, int] | None
) -> None:
    model = build(name, **{**_COMMON, **changes})
    assert backend_choice._depths(model, OPTIONS) == depths


@pytest.mark.parametrize("key", ["verbose", "nobody.verbose"])
def test_an_option_must_say_whose_it_is(key: str, tmp_path: Path) -> None:
    with pytest.raises(LoweringError) as refused:
        staticlm.export_model(
            FAMILIES["llama"](), tmp_path / "a", OPTIONS, backend="auto", backend_options={key: 1}
        )
    assert refused.value.code is Code.BACKEND_OPTION_UNKNOWN
    assert not (tmp_path / "a").exists()


def test_a_dry_run_does_not_measure() -> None:
    from staticlm.export.dryrun import plan_export

    with pytest.raises(LoweringError, match="only an export measures"):
        plan_export(FAMILIES["llama"](), OPTIONS, backend="auto")


@pytest.mark.slow
def test_a_measurement_is_one_of_programs_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("Llama", **{**_COMMON, "num_hidden_layers": 4})
    found = backend_choice._measure(model, 1, OPTIONS, "xnnpack", {})
    assert set(found) == {"prefill", "decode"}
    assert all(0 < value < 1000 for value in found.values())


def test_what_is_printed() -> None:
    choice = BackendChoice("xnnpack", {"prefill": {"xnnpack": 1.26}}, {"openvino": "absent"})
    assert choice.lines() == [
        "prefill: xnnpack 1.3 ms",
        "openvino was not measured: absent",
        "backend xnnpack",
    ]
