"""How a model was built: under which mode, in which dtype, and what export leaves of it."""

from __future__ import annotations

import pytest
import torch
from tests.support import models

from staticlm.errors import Code, ExportError
from staticlm.export.options import ExportOptions
from staticlm.export.programs import export_programs
from staticlm.export.source import load_source

OPTIONS = ExportOptions(context_length=16, prefill_lengths=(4,))


def test_built_under_no_grad_it_traces() -> None:
    with torch.no_grad():
        model = models.FAMILIES["llama"]()
    exported = export_programs(model, OPTIONS)
    assert list(exported.programs) == ["prefill", "decode"]
    # Caches belong to the caller: no buffer of the program is ever written.
    for program in exported.programs.values():
        assert not program.graph_signature.buffers_to_mutate


def test_built_under_inference_mode_it_is_refused() -> None:
    with torch.inference_mode():
        model = models.FAMILIES["llama"]()
    with pytest.raises(ExportError, match="inference_mode") as caught:
        export_programs(model, OPTIONS)
    assert caught.value.code is Code.MODEL_INVALID


def test_another_dtype_does_not_change_the_callers_model() -> None:
    model = models.FAMILIES["llama"]()
    source = load_source(model, "bfloat16")
    assert source.model.dtype is torch.bfloat16
    assert model.dtype is torch.float32
    assert load_source(model, "float32").model is model
