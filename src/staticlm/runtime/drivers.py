"""The registry of drivers, and which one is taken."""

from __future__ import annotations

import logging
from collections.abc import Callable

from staticlm.errors import Code, RunnerError
from staticlm.runtime.driver import Driver

AUTO = "auto"
"""The native driver if it can be loaded, else the stock one; `Driver.reason` says why."""

DriverFactory = Callable[[], Driver]

_factories: dict[str, DriverFactory] = {}
_log = logging.getLogger(__name__)


def register_driver(name: str, factory: DriverFactory) -> None:
    """Add a driver under a name.

    Raises:
        RunnerError: `REGISTRATION_INVALID` for an empty or reserved name, `REGISTRATION_DUPLICATE`
            for a name that is taken.
    """
    if not name or name == AUTO:
        raise RunnerError(
            Code.REGISTRATION_INVALID,
            "a driver cannot have this name",
            found=repr(name),
            expected=f"a non-empty string other than {AUTO!r}",
        )
    if name in _factories:
        raise RunnerError(
            Code.REGISTRATION_DUPLICATE,
            f"driver {name!r} is already registered",
            remedy="Choose another name; registrations are never replaced.",
        )
    _factories[name] = factory


def get_driver(name: str = AUTO) -> Driver:
    """A driver by name. Its `reason` says why it was taken.

    Raises:
        RunnerError: `REGISTRATION_INVALID` for an unknown name (the message lists the known ones),
            `DRIVER_UNAVAILABLE` when the one asked for cannot be loaded.
    """
    if name == AUTO:
        return _choose()
    factory = _factories.get(name)
    if factory is None:
        raise RunnerError(
            Code.REGISTRATION_INVALID,
            "no such driver",
            found=repr(name),
            expected=f"one of {', '.join((AUTO, *driver_names()))}",
        )
    driver = factory()
    driver.reason = "asked for by name"
    return driver


def driver_names() -> tuple[str, ...]:
    """What is registered, sorted."""
    return tuple(sorted(_factories))


def _choose() -> Driver:
    try:
        driver = get_driver("native")
    except RunnerError as error:
        if error.code is not Code.DRIVER_UNAVAILABLE:
            raise
        driver = get_driver("stock")
        driver.reason = f"the native driver is not available: {error.found or error.what}"
    else:
        driver.reason = "the native driver is available"
    _log.info("driver %s: %s", driver.name, driver.reason)
    return driver


def _native() -> Driver:
    from staticlm.runtime.native import NativeDriver

    return NativeDriver()


def _stock() -> Driver:
    from staticlm.runtime.stock import StockDriver

    return StockDriver()


register_driver("native", _native)
register_driver("stock", _stock)
