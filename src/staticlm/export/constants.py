"""Constants of a traced method, made before tracing.

A tensor created while tracing becomes a lifted constant or a `full` node, which splits delegates. So
every constant is a buffer that an eager run registers first and the trace only reads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Constants(nn.Module):
    """Named constant tensors, filled on first use and read-only once frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = False

    def get(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """The constant `name`, made by `make` when it is not there yet."""
        if name not in self._buffers:
            if self.frozen:
                raise RuntimeError(f"constant {name!r} was not made by the eager run")
            with torch.no_grad():
                self.register_buffer(name, make())
        found = self._buffers[name]
        assert found is not None
        return found
