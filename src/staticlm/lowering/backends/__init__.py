"""Backends by name: what they take, what they support, and the partitioners they give."""

from staticlm.lowering.backends.base import Backend
from staticlm.lowering.backends.registry import (
    GROUP,
    backend_names,
    get_backend,
    option_tables,
    register_backend,
)

__all__ = [
    "GROUP",
    "Backend",
    "backend_names",
    "get_backend",
    "option_tables",
    "register_backend",
]
