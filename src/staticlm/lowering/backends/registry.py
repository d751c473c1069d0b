"""The registry of backends."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.metadata import entry_points

from staticlm.errors import Code, LoweringError
from staticlm.lowering.backends.base import Backend
from staticlm.lowering.options import OptionTable

GROUP = "staticlm.backends"
"""Entry-point group through which an installed package adds backends: a `Backend` subclass, or an
instance of one. The entry point's name must be the backend's."""

_BUILT_IN = {
    "portable": "Portable",
    "xnnpack": "Xnnpack",
    "qnn": "Qnn",
    "vulkan": "Vulkan",
    "coreml": "CoreML",
    "openvino": "OpenVINO",
}

_backends: dict[str, Backend] = {}
_points: dict[str, Callable[[], object]] | None = None


def register_backend(backend: Backend) -> None:
    """Add a backend under its own name.

    Raises:
        LoweringError: `REGISTRATION_INVALID` for something else than a named backend,
            `REGISTRATION_DUPLICATE` for a name that is taken.
    """
    checked = _checked(backend, None)
    if checked.name in _backends or checked.name in _BUILT_IN or checked.name in _found():
        raise LoweringError(
            Code.REGISTRATION_DUPLICATE,
            f"backend {checked.name!r} is already registered",
            remedy="Choose another name; registrations are never replaced.",
        )
    _backends[checked.name] = checked


def get_backend(name: str) -> Backend:
    """A backend by name.

    Raises:
        LoweringError: `BACKEND_UNKNOWN` lists the known ones; `REGISTRATION_INVALID` when an
            installed package offers something that is none.
    """
    if name in _backends:
        return _backends[name]
    if name in _BUILT_IN:
        module = importlib.import_module(f"staticlm.lowering.backends.{name}")
        made: object = getattr(module, _BUILT_IN[name])
    elif name in _found():
        try:
            made = _found()[name]()
        except Exception as error:
            raise LoweringError(
                Code.REGISTRATION_INVALID,
                f"backend {name!r} of an installed package cannot be loaded",
                found=f"{type(error).__name__}: {error}",
            ) from error
    else:
        raise LoweringError(
            Code.BACKEND_UNKNOWN,
            "no such backend",
            found=repr(name),
            expected=f"one of {', '.join(backend_names())}",
        )
    if isinstance(made, type) and issubclass(made, Backend):
        made = made()
    _backends[name] = _checked(made, name)
    return _backends[name]


def backend_names() -> tuple[str, ...]:
    """What is registered, built-in ones first."""
    return tuple(dict.fromkeys([*_BUILT_IN, *sorted(_found()), *_backends]))


def option_tables(without: str = "") -> list[OptionTable]:
    """The option tables of all other backends that can be loaded."""
    tables: list[OptionTable] = []
    for name in backend_names():
        if name == without:
            continue
        try:
            tables.append(get_backend(name).options)
        except LoweringError:  # a broken package must not hide the message it is asked for
            continue
    return tables


def _found() -> dict[str, Callable[[], object]]:
    global _points
    if _points is None:
        _points = {}
        for point in entry_points(group=GROUP):
            if point.name not in _BUILT_IN:  # what is built in is never replaced
                _points.setdefault(point.name, point.load)
    return _points


def _checked(backend: object, name: str | None) -> Backend:
    if not isinstance(backend, Backend):
        raise LoweringError(
            Code.REGISTRATION_INVALID,
            "a backend cannot be registered" if name is None else f"backend {name!r} is none",
            found=f"a {type(backend).__name__}",
            expected="an instance of staticlm.lowering.backends.Backend",
        )
    own = getattr(backend, "name", None)
    if not isinstance(own, str) or not own or (name is not None and own != name):
        raise LoweringError(
            Code.REGISTRATION_INVALID,
            "a backend has no usable name",
            found=repr(own),
            expected="a non-empty string" if name is None else repr(name),
        )
    if not isinstance(getattr(backend, "options", None), OptionTable):
        raise LoweringError(
            Code.REGISTRATION_INVALID,
            f"backend {own!r} has no option table",
            expected="an OptionTable in `options`",
        )
    return backend
