"""Lower without copying each node's history again in every pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.fx.traceback import NodeSource


@contextmanager
def shared_provenance() -> Iterator[None]:
    """Let nodes share the record of where they came from.

    Every pass that re-interprets a graph gives each new node a deep copy of its predecessor's record,
    which grows with every pass. The records are only read, so a copy may be the record itself. The
    saving is about a seventh of the time of lowering (docs/decisions/0004-lowering-time.md).
    """
    if "__deepcopy__" in vars(NodeSource):
        yield
        return

    def same(self: Any, memo: dict[int, Any]) -> Any:
        return self

    setattr(NodeSource, "__deepcopy__", same)  # noqa: B010
    try:
        yield
    finally:
        delattr(NodeSource, "__deepcopy__")
