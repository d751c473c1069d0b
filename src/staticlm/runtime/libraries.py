"""The shared libraries of the executorch wheel, opened without importing it (or torch).

Kernels and delegates register themselves when their library is opened. A library that is already in
the process (ExecuTorch's own bindings need most of them) is found by its name and not loaded twice.
"""

from __future__ import annotations

import ctypes
import glob
import importlib
import importlib.util
import os
import sys
import warnings
from pathlib import Path

RUNTIME = "executorch"
THREADPOOL = "executorch_threadpool"
KERNELS = "executorch_kernels_optimized"
QUANTIZED_KERNELS = "executorch_kernels_quantized"

BACKEND_LIBRARIES = {
    "XnnpackBackend": "executorch_backend_xnnpack",
    "OpenvinoBackend": "executorch_backend_openvino",
    "QnnBackend": "executorch_backend_qnn",
    "CoreMLBackend": "executorch_backend_coreml",
}
"""Which library of the wheel registers which backend."""

CUSTOM_KERNELS = "executorch.extension.llm.custom_ops.custom_ops"
"""A module whose import registers the `llama::` kernels. Its library needs torch."""

_opened: dict[str, ctypes.CDLL] = {}


def installed_version() -> str | None:
    """The version of the installed executorch, or None. Imports neither ExecuTorch nor torch."""
    try:
        return str(importlib.import_module("executorch.version").__version__)
    except (ImportError, AttributeError):
        return None


def open_library(stem: str) -> bool:
    """Open a library of the wheel for what it registers; False when the wheel has none.

    Raises:
        OSError: The library is there and cannot be loaded.
    """
    if stem in _opened:
        return True
    suffix = "dylib" if sys.platform == "darwin" else "so"
    for root in _roots():
        path = root / "lib" / f"lib{stem}.{suffix}"
        if path.exists():
            _opened[stem] = ctypes.CDLL(os.fspath(path))
            return True
    return False


def open_backend(name: str) -> bool:
    """Open the library that registers a backend; False when the wheel has none or it fails to load.

    Whether the backend can be used here is for the backend to say, after this.
    """
    stem = BACKEND_LIBRARIES.get(name)
    if stem is None:
        return False
    if name == "OpenvinoBackend":
        _point_to_openvino()
    try:
        return open_library(stem)
    except OSError:
        return False


def import_kernels(module: str) -> bool:
    """Import a Python module for the kernels it registers; False when that fails."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(module)
    except (ImportError, OSError, RuntimeError):
        return False
    return True


def _roots() -> list[Path]:
    spec = importlib.util.find_spec("executorch")
    places = spec.submodule_search_locations if spec else None
    return [Path(place) for place in places or ()]


def _point_to_openvino() -> None:
    """Tell ExecuTorch's OpenVINO backend where an installed openvino keeps its C library."""
    if os.environ.get("OPENVINO_LIB_PATH"):
        return
    spec = importlib.util.find_spec("openvino")
    for place in (spec.submodule_search_locations if spec else None) or ():
        found = sorted(glob.glob(os.path.join(place, "libs", "libopenvino_c.so*")))
        if found:
            os.environ["OPENVINO_LIB_PATH"] = found[0]
            return
