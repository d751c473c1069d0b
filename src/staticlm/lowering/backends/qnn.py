"""Qualcomm's QNN: the Hexagon NPU, the Adreno GPU and the low-power AI island."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from staticlm.lowering.backends.base import Backend, need_module
from staticlm.lowering.qnn.table import TABLE

if TYPE_CHECKING:
    from executorch.exir import EdgeCompileConfig
    from executorch.exir.backend.partitioner import Partitioner


class Qnn(Backend):
    """Needs Qualcomm's SDK, which is neither shipped nor fetched; see `docs/guides/qualcomm.md`."""

    name = "qnn"
    summary = "Qualcomm Hexagon NPU, Adreno GPU and low-power AI (needs QNN_SDK_ROOT)"
    options = TABLE
    attention_modes = ("split", "concat")  # neither is measured on a device
    dtypes = ("float32", "float16")
    cache_dtypes = ("float32", "float16")

    def available(self) -> None:
        """Needs the Python parts of the wheel and a usable SDK."""
        from staticlm.lowering.qnn.sdk import need_sdk

        need_module(
            self.name,
            "executorch.backends.qualcomm.partition",
            "Install an ExecuTorch wheel that has the Qualcomm backend (Linux x86-64).",
        )
        need_sdk()

    def partitioners(self, method: str, options: Mapping[str, Any]) -> list[Partitioner]:
        """One QNN partitioner that contributes its passes."""
        from staticlm.lowering.qnn import from_options

        self.available()
        return [from_options(options).partitioner]

    def compile_config(self) -> EdgeCompileConfig:
        """QNN keeps operators that the edge dialect's check would refuse."""
        from executorch.backends.qualcomm.utils.utils import qnn_edge_config

        return qnn_edge_config()  # type: ignore[no-any-return]
