"""The passes that built-in adapters contribute for partitioners of ExecuTorch."""

from __future__ import annotations

from staticlm.lowering import xnnpack
from staticlm.lowering.qnn import contribution as qnn

_registered = False


def register_built_in() -> None:
    """Register them, once. Imports no backend."""
    global _registered
    if not _registered:
        _registered = True
        xnnpack.register()
        qnn.register()
