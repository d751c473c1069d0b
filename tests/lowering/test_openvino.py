"""OpenVINO for real, alone and as the prefill half of a mix with XNNPACK over one set of caches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.models import _COMMON, build
from transformers import PreTrainedModel

import staticlm
from staticlm.contract.program import read_program
from staticlm.lowering.backends import get_backend
from staticlm.validation import validate


def _missing() -> str | None:
    try:
        get_backend("openvino").available()
    except staticlm.StaticLMError as error:
        return str(error)
    return None


needs_openvino = pytest.mark.skipif(_missing() is not None, reason=str(_missing()))


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build("Mistral", **{**_COMMON, "num_hidden_layers": 1}, sliding_window=11)


@pytest.fixture(scope="module")
def artifact(
    model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Path]:
    def make(backend: str, attention: str) -> Path:
        path = tmp_path_factory.mktemp("openvino") / "artifact"
        options = staticlm.ExportOptions(
            context_length=40, prefill_lengths=(8,), attention=attention
        )
        staticlm.export_model(model, path, options, backend=backend)
        return path

    return make


@needs_openvino
@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "attention", "delegates"),
    [
        ("openvino", "fused", {"prefill": "OpenvinoBackend", "decode": "OpenvinoBackend"}),
        (
            "prefill=openvino,decode=xnnpack",
            "auto",
            {"prefill": "OpenvinoBackend", "decode": "XnnpackBackend"},
        ),
    ],
)
def test_validates_on_its_runtime(
    model: PreTrainedModel,
    artifact: Callable[[str, str], Path],
    backend: str,
    attention: str,
    delegates: dict[str, str],
) -> None:
    path = artifact(backend, attention)
    facts = read_program(path / "model.pte")
    for name, method in facts.methods.items():
        assert {d.backend for d in method.delegates} == {delegates[name]}
        # The writes stay outside and in place: a chunk of rows, not a copy of the cache.
        assert method.operators["aten::index_put_"] == 2
        assert not any(op.startswith("aten::copy") for op in method.operators)
        if attention == "fused":
            # Whole, inside the delegate: nothing of attention is left outside.
            assert not any("softmax" in op or "bmm" in op for op in method.operators)
    result = validate(path, model)
    assert result.passed, result


def test_an_unsuitable_openvino_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from staticlm.lowering.backends import openvino

    monkeypatch.setattr(openvino, "need_module", lambda *arguments: None)
    monkeypatch.setattr(openvino, "version", lambda name: "2026.4.1")
    with pytest.raises(staticlm.StaticLMError) as refused:
        get_backend("openvino").available()
    assert refused.value.code is staticlm.Code.BACKEND_UNAVAILABLE
    assert "2026.4.1" in str(refused.value)
    assert "2025.4" in str(refused.value)
