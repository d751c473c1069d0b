"""The QNN SDK: found and checked before anything of it is loaded. Nothing is ever downloaded."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from staticlm.errors import Code, LoweringError

ROOT = "QNN_SDK_ROOT"

LIBRARIES = {"htp": "libQnnHtp.so", "gpu": "libQnnGpu.so", "lpai": "libQnnLpai.so"}
"""The library that each backend is compiled with."""

_HOST = Path("lib", "x86_64-linux-clang")
_REMEDY = (
    "Set QNN_SDK_ROOT to the folder of an installed Qualcomm AI Engine Direct SDK (the one that holds"
    " lib/x86_64-linux-clang) and add that lib folder to LD_LIBRARY_PATH. The SDK has a licence of its"
    " own; it is neither part of this package nor fetched by it."
)
_environment = threading.Lock()


def need_sdk(variant: str = "htp") -> None:
    """Refuse when no usable SDK is named, before the library is reached.

    The delegate's library ends the process when the SDK's folder is wrong, and ExecuTorch would
    start a download when none is named; neither can happen behind this check.

    Raises:
        LoweringError: `BACKEND_UNAVAILABLE`.
    """
    root = os.environ.get(ROOT)
    if root is None:
        raise _unavailable(f"{ROOT} is not set")
    if root:
        check_root(variant)
    elif not any((folder / LIBRARIES[variant]).is_file() for folder in _library_path()):
        # Set but empty: upstream leaves finding the libraries to the loader.
        raise _unavailable(f"{ROOT} is empty and {LIBRARIES[variant]} is not in LD_LIBRARY_PATH")


def check_root(variant: str = "htp") -> None:
    """Refuse a `QNN_SDK_ROOT` that is set but holds no SDK; an absent or empty one passes.

    Raises:
        LoweringError: `BACKEND_UNAVAILABLE`.
    """
    root = os.environ.get(ROOT)
    if not root:
        return
    # The version is always read from the NPU's library, whatever the backend.
    for name in dict.fromkeys((LIBRARIES["htp"], LIBRARIES[variant])):
        if not (Path(root) / _HOST / name).is_file():
            raise _unavailable(f"{ROOT} is {root!r}, where there is no {_HOST / name}")


@contextmanager
def no_download() -> Iterator[None]:
    """While it lasts, ExecuTorch's lazy SDK set-up cannot download; afterwards all is as before.

    An absent `QNN_SDK_ROOT` becomes an empty one, which upstream takes for "left to the caller".
    """
    from executorch.backends.qualcomm.utils import qnn_sdk_setup

    with _environment:
        before, ready = os.environ.get(ROOT), qnn_sdk_setup._sdk_ready
        if before is None:
            os.environ[ROOT] = ""
        try:
            yield
        finally:
            if before is None:
                os.environ.pop(ROOT, None)
                qnn_sdk_setup._sdk_ready = ready


def _library_path() -> list[Path]:
    return [Path(p) for p in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if p]


def _unavailable(found: str) -> LoweringError:
    return LoweringError(
        Code.BACKEND_UNAVAILABLE, "backend 'qnn' cannot be used here", found=found, remedy=_REMEDY
    )
