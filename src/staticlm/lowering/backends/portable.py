"""No delegate: ExecuTorch's portable kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from staticlm.lowering.backends.base import Backend
from staticlm.lowering.options import OptionTable

if TYPE_CHECKING:
    from executorch.exir.backend.partitioner import Partitioner


class Portable(Backend):
    """Slow, and right on every machine: the reference for the others."""

    name = "portable"
    summary = "ExecuTorch's portable kernels; slow, runs everywhere"
    options = OptionTable("portable")
    dtypes = ("float32", "float16", "bfloat16")
    cache_dtypes = ("float32", "float16", "bfloat16")
    runs_on_host = True
    shares_weights = True

    def partitioners(self, method: str, options: Mapping[str, Any]) -> list[Partitioner]:
        """None."""
        self.route(options)
        return []
