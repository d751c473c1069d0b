"""Backend options as a table: where each goes, its type, default and range, who else takes it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from staticlm.errors import Code, LoweringError
from staticlm.lowering.option_kinds import Kind, NotOfKind

REQUIRED: Any = object()
"""The default of an option that has none."""


@dataclass(frozen=True)
class Option:
    """One option of a backend.

    Args:
        name: Its name, upstream's where upstream has one.
        destination: What takes it (a constructor, a spec builder, the passes).
        kind: Its type and range.
        default: Its value when it is not given, or `REQUIRED`.
        doc: One sentence.
        variants: The variants of the backend that take it; empty means all.
        text: Whether it can be given as text, on the command line or in a file.
    """

    name: str
    destination: str
    kind: Kind
    default: Any
    doc: str
    variants: tuple[str, ...] = ()
    text: bool = True

    @property
    def required(self) -> bool:
        """Whether it must be given."""
        return self.default is REQUIRED


@dataclass(frozen=True)
class OptionTable:
    """All options of one backend.

    Args:
        backend: Its name.
        options: Every option; a name may occur once per variant.
        selector: The option that chooses the variant, where there are variants.
        unreachable: Names that upstream knows but that nothing here can set, and what to do then.
    """

    backend: str
    options: tuple[Option, ...] = ()
    selector: Option | None = None
    unreachable: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """Every option name, the selector's first."""
        first = [self.selector] if self.selector else []
        return tuple(dict.fromkeys(option.name for option in (*first, *self.options)))

    def takers(self, name: str) -> tuple[str, ...]:
        """Who takes an option: `qnn (backend=htp)`, `xnnpack`, or nobody."""
        if self.selector is not None and name == self.selector.name:
            return (self.backend,)
        found: list[str] = []
        for option in self.options:
            if option.name == name:
                key = self.selector.name if self.selector else ""
                found += [f"{self.backend} ({key}={v})" for v in option.variants] or [self.backend]
        return tuple(found)


@dataclass(frozen=True)
class Routed:
    """Checked options by destination, defaults filled in.

    Args:
        variant: The chosen variant, or an empty string.
        values: Destination -> name -> value.
        given: The names that were given, not defaults.
    """

    variant: str
    values: Mapping[str, Mapping[str, Any]]
    given: tuple[str, ...]

    def __getitem__(self, destination: str) -> Mapping[str, Any]:
        return self.values.get(destination, {})


def route(
    table: OptionTable, given: Mapping[str, Any], others: Iterable[OptionTable] = ()
) -> Routed:
    """Check options against a backend's table and sort them by destination.

    Args:
        table: The backend's options.
        given: Values by name, typed (not text; see `typed`).
        others: Tables of other backends, to say who does take an option.

    Raises:
        LoweringError: `BACKEND_OPTION_UNKNOWN` for a name that this backend or variant does not
            take; `BACKEND_OPTION_INVALID` for a wrong type, a value out of range, or a missing one.
    """
    variant = ""
    if table.selector is not None:
        value = given.get(table.selector.name, table.selector.default)
        variant = str(_checked(table, table.selector, value))
    options = {o.name: o for o in table.options if not o.variants or variant in o.variants}
    values: dict[str, dict[str, Any]] = {}
    if table.selector is not None:
        values[table.selector.destination] = {table.selector.name: variant}
    for name in given:
        known = name in options or (table.selector is not None and name == table.selector.name)
        if not known:
            raise _unknown(table, name, variant, [table, *others])
    for option in options.values():
        if option.name in given:
            value = _checked(table, option, given[option.name])
        elif option.required:
            raise LoweringError(
                Code.BACKEND_OPTION_INVALID,
                f"backend {table.backend!r} needs option {option.name!r}",
                expected=option.kind.expected,
                remedy=f"Give it with --backend-option {option.name}=VALUE. {option.doc}",
            )
        else:
            value = option.default() if callable(option.default) else option.default
            value = value if value is None else option.kind.check(value)
        values.setdefault(option.destination, {})[option.name] = value
    return Routed(variant, values, tuple(given))


def typed(
    table: OptionTable, texts: Mapping[str, str], others: Iterable[OptionTable] = ()
) -> dict[str, Any]:
    """Values from text, each read by its option's type.

    Raises:
        LoweringError: `BACKEND_OPTION_UNKNOWN` or `BACKEND_OPTION_INVALID`, as `route` does.
    """
    result: dict[str, Any] = {}
    for name, text in texts.items():
        known = [o for o in (table.selector, *table.options) if o is not None and o.name == name]
        if not known:
            raise _unknown(table, name, "", [table, *others])
        option = known[0]
        if not option.text:
            raise _invalid(table, option, text, "a Python object; it cannot be given as text")
        try:
            result[name] = option.kind.parse(text)
        except NotOfKind as error:
            raise _invalid(table, option, repr(text), error.expected) from None
    return result


def parse_assignments(assignments: Sequence[str]) -> dict[str, str]:
    """`["soc_model=SM8750", ...]` as names and texts.

    Raises:
        LoweringError: `BACKEND_OPTION_INVALID` for something else than `NAME=VALUE`, or a name that
            is given twice.
    """
    result: dict[str, str] = {}
    for item in assignments:
        name, equals, value = item.partition("=")
        name = name.strip()
        if not equals or not name:
            raise LoweringError(
                Code.BACKEND_OPTION_INVALID,
                "a backend option has no value",
                found=repr(item),
                expected="NAME=VALUE",
            )
        if name in result:
            raise LoweringError(
                Code.BACKEND_OPTION_INVALID,
                f"backend option {name!r} is given twice",
                found=f"{result[name]!r} and {value!r}",
                expected="one value",
            )
        result[name] = value.strip()
    return result


def read_option_file(path: Path) -> dict[str, dict[str, Any]]:
    """Options from a TOML file with one table per backend.

    Values keep TOML's types; enum members and lists of names are given as strings.

    Raises:
        LoweringError: `BACKEND_OPTION_INVALID` when the file cannot be read or is not of that form.
    """
    try:
        content = _toml_loads()(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoweringError(
            Code.BACKEND_OPTION_INVALID,
            f"the option file {path} cannot be read",
            found=str(error),
            expected="a TOML file",
        ) from error
    for name, section in content.items():
        if not isinstance(section, dict):
            raise LoweringError(
                Code.BACKEND_OPTION_INVALID,
                f"the option file {path} has {name!r} outside of a backend's table",
                expected="one table per backend, for example [xnnpack]",
            )
    return content


def describe(table: OptionTable) -> list[tuple[str, str, str, str, str]]:
    """Rows for people: name, variant or backend, type, default, meaning."""
    rows: list[tuple[str, str, str, str, str]] = []
    for option in (table.selector, *table.options):
        if option is None:
            continue
        default = "required" if option.required else _shown(option.default)
        where = ", ".join(option.variants) or "all" if table.selector else table.backend
        rows.append((option.name, where, option.kind.expected, default, option.doc))
    return rows


def _shown(default: Any) -> str:
    if callable(default):
        return str(getattr(default, "__name__", "computed"))
    if default is None or default == frozenset():
        return "none"
    return str(default).lower() if isinstance(default, bool) else str(default)


def _checked(table: OptionTable, option: Option, value: Any) -> Any:
    if value is None and option.default is None:
        return None
    try:
        return option.kind.check(value)
    except NotOfKind as error:
        raise _invalid(table, option, repr(value), error.expected) from None


def _invalid(table: OptionTable, option: Option, found: str, expected: str) -> LoweringError:
    words = expected.removeprefix("one of ").split(", ") if expected.startswith("one of ") else []
    close = difflib.get_close_matches(found.strip("'"), words, n=1)
    nearest = f" The nearest is {close[0]}." if close else ""
    return LoweringError(
        Code.BACKEND_OPTION_INVALID,
        f"option {option.name!r} of backend {table.backend!r} cannot have this value",
        found=found,
        expected=expected,
        remedy=option.doc + nearest,
    )


def _unknown(
    table: OptionTable, name: str, variant: str, tables: Iterable[OptionTable]
) -> LoweringError:
    target = f"{table.backend!r}"
    if variant and table.selector is not None:
        target += f" with {table.selector.name}={variant}"
    remedies: list[str] = []
    if name in table.unreachable:
        remedies.append(f"Upstream knows it, but {table.unreachable[name]}.")
    takers = [taker for each in tables for taker in each.takers(name)]
    if takers:
        remedies.append(f"It is an option of {', '.join(dict.fromkeys(takers))}.")
    available = [
        option.name for option in table.options if not option.variants or variant in option.variants
    ]
    if not remedies:
        names = [n for each in tables for n in each.names]
        close = difflib.get_close_matches(name, [*available, *names], n=1)
        if close:
            owners = [taker for each in tables for taker in each.takers(close[0])]
            owner = f" of {', '.join(dict.fromkeys(owners))}" if close[0] not in available else ""
            remedies.append(f"The nearest is {close[0]!r}{owner}.")
    return LoweringError(
        Code.BACKEND_OPTION_UNKNOWN,
        f"backend {target} has no option {name!r}",
        expected=", ".join(available) if available else "no options",
        remedy=" ".join(remedies) or None,
    )


def _toml_loads() -> Callable[[str], dict[str, Any]]:
    import importlib

    for module in ("tomllib", "tomli"):  # tomllib came with Python 3.11
        try:
            loads: Callable[[str], dict[str, Any]] = importlib.import_module(module).loads
        except ModuleNotFoundError:
            continue
        return loads
    raise LoweringError(
        Code.DEPENDENCY_MISSING,
        "option files need a TOML reader on Python 3.10",
        remedy="Install tomli.",
    )
