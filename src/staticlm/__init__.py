"""Hugging Face causal language models as fixed-shape ExecuTorch programs.

The names below are imported when they are first used: importing the package loads nothing heavy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from staticlm.errors import Code, StaticLMError
    from staticlm.runtime.generation import FinishReason, Generation, Stream
    from staticlm.runtime.runner import Runner, load
    from staticlm.runtime.sampling import SamplingOptions

_HOMES = {
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
    "FinishReason",
    "Generation",
    "Runner",
    "SamplingOptions",
    "StaticLMError",
    "Stream",
    "load",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
