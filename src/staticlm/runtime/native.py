"""The native driver: our C++ extension over the C++ SDK in the executorch wheel, without torch."""

from __future__ import annotations

from pathlib import Path

from staticlm.errors import Code, RunnerError
from staticlm.runtime.driver import Capabilities, LoadedProgram


class NativeDriver:
    """Zero-copy binding, arenas from the allocator, the GIL released, no torch."""

    name = "native"
    capabilities = Capabilities(
        bind_outputs=True,
        arena_allocator=True,
        releases_gil=True,
        shares_weights=True,
        torch_free=True,
    )
    reason = ""

    def __init__(self) -> None:
        raise RunnerError(
            Code.DRIVER_UNAVAILABLE,
            "the native driver cannot be loaded",
            found="staticlm.runtime._native was not built",
            remedy="Reinstall with a C++ compiler and executorch>=1.5.1,<1.6 present.",
        )

    @property
    def description(self) -> str:
        """One line for `inspect` and `stats`."""
        return "native"

    def load(self, path: Path) -> LoadedProgram:
        """Open a program file."""
        raise NotImplementedError
