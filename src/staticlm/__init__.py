"""Hugging Face causal language models as fixed-shape ExecuTorch programs.

The names below are imported when they are first used: importing the package loads nothing heavy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from staticlm.build import export_model
    from staticlm.errors import Code, StaticLMError
    from staticlm.export.options import ExportOptions
    from staticlm.runtime.generation import FinishReason, Generation, Stream
    from staticlm.runtime.runner import Runner, load
    from staticlm.runtime.sampling import SamplingOptions
    from staticlm.validation import validate

__version__ = "0.1.0"

_HOMES = {
    "ExportOptions": "staticlm.export.options",
    "export_model": "staticlm.build",
    "validate": "staticlm.validation",
    "Code": "staticlm.errors",
    "StaticLMError": "staticlm.errors",
    "FinishReason": "staticlm.runtime.generation",
    "Generation": "staticlm.runtime.generation",
    "Stream": "staticlm.runtime.generation",
    "Runner": "staticlm.runtime.runner",
    "load": "staticlm.runtime.runner",
    "SamplingOptions": "staticlm.runtime.sampling",
}

__all__ = [
    "Code",
    "ExportOptions",
    "FinishReason",
    "Generation",
    "Runner",
    "SamplingOptions",
    "StaticLMError",
    "Stream",
    "export_model",
    "load",
    "validate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
