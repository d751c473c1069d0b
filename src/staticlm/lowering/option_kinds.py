"""Types of backend options: each checks a Python value and reads one from text."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol


class NotOfKind(ValueError):
    """A value that an option does not take; `expected` says what it does take."""

    def __init__(self, expected: str) -> None:
        super().__init__(expected)
        self.expected = expected


class Kind(Protocol):
    """The type and range of an option."""

    @property
    def expected(self) -> str:
        """What a value must be, for messages and documentation."""
        ...

    def check(self, value: Any) -> Any:
        """The value as its destination takes it, or `NotOfKind`."""
        ...

    def parse(self, text: str) -> Any:
        """A value from text that `check` accepts, or `NotOfKind`."""
        ...


@dataclass(frozen=True)
class Flag:
    """`true` or `false`; nothing else is taken for one."""

    expected: str = "true or false"

    def check(self, value: Any) -> bool:
        """Only `bool`: numbers and strings are mistakes."""
        if not isinstance(value, bool):
            raise NotOfKind(self.expected)
        return value

    def parse(self, text: str) -> bool:
        """`true` or `false`, in any case."""
        try:
            return {"true": True, "false": False}[text.strip().lower()]
        except KeyError:
            raise NotOfKind(self.expected) from None


@dataclass(frozen=True)
class Integer:
    """An integer in a closed range, or one of some values."""

    low: int = 0
    high: int = 2**31 - 1
    values: tuple[int, ...] = ()

    @property
    def expected(self) -> str:
        """The range in words."""
        if self.values:
            return f"one of {', '.join(map(str, self.values))}"
        return f"an integer from {self.low} to {self.high}"

    def check(self, value: Any) -> int:
        """Only `int`, and `bool` is none."""
        good = isinstance(value, int) and not isinstance(value, (bool, Enum))
        if not good or (value not in self.values if self.values else not self._within(value)):
            raise NotOfKind(self.expected)
        return int(value)

    def parse(self, text: str) -> int:
        """Decimal, or with a prefix such as `0x`."""
        try:
            return self.check(int(text.strip(), 0))
        except ValueError:
            raise NotOfKind(self.expected) from None

    def _within(self, value: int) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Word:
    """One of some words."""

    words: tuple[str, ...]

    @property
    def expected(self) -> str:
        """The words."""
        return f"one of {', '.join(self.words)}"

    def check(self, value: Any) -> str:
        """Exactly one of the words."""
        if not isinstance(value, str) or value not in self.words:
            raise NotOfKind(self.expected)
        return value

    def parse(self, text: str) -> str:
        """The text itself."""
        return self.check(text.strip())


@dataclass(frozen=True)
class Names:
    """A set of names: text is separated by commas. `convert` may turn other objects into names."""

    expected: str = "names, separated by commas"
    convert: Callable[[Any], str | None] | None = None

    def check(self, value: Any) -> frozenset[str]:
        """A list, tuple or set of non-empty strings (or of what `convert` understands)."""
        if not isinstance(value, (list, tuple, set, frozenset)):
            raise NotOfKind(self.expected)
        return frozenset(self._name(item) for item in value)

    def parse(self, text: str) -> frozenset[str]:
        """`a,b,c`; empty text is an empty set."""
        return self.check([item.strip() for item in text.split(",") if item.strip()])

    def _name(self, item: Any) -> str:
        name = item if isinstance(item, str) else self.convert(item) if self.convert else None
        if not name:
            raise NotOfKind(self.expected)
        return name


@dataclass(frozen=True)
class Member:
    """A member of an enum of an optional package, or its name.

    Args:
        enum: Dotted path of the enum; imported when a value is checked.
        names: The members that are taken, for messages without the package; empty means all.
        prefix: What upstream puts in front of every name; may be left out.
    """

    enum: str
    names: tuple[str, ...]
    prefix: str = ""

    @property
    def expected(self) -> str:
        """The names, with what may be left out in parentheses."""
        lead = f"({self.prefix})" if self.prefix else ""
        return f"one of {', '.join(lead + name for name in self.names)}"

    def check(self, value: Any) -> Any:
        """A member, or its name with or without the prefix. Plain numbers are not members."""
        try:
            members = self._members()
        except ModuleNotFoundError:  # the package is not here: the name stands for the member
            members = {self.prefix + name: self.prefix + name for name in self.names}
        if isinstance(value, str):
            lowered = {key.lower(): member for key, member in members.items()}
            member = lowered.get(value.lower(), lowered.get((self.prefix + value).lower()))
            if member is not None:
                return member
        elif any(value is member for member in members.values()):
            return value
        raise NotOfKind(self.expected)

    def parse(self, text: str) -> Any:
        """A name."""
        return self.check(text.strip())

    def _members(self) -> Mapping[str, Any]:
        module, _, name = self.enum.rpartition(".")
        enum: Iterable[Any] = getattr(importlib.import_module(module), name)
        taken = {self.prefix + name for name in self.names}
        return {m.name: m for m in enum if not self.names or m.name in taken}


@dataclass(frozen=True)
class Instance:
    """A Python object of a class of an optional package; there is no text for it."""

    cls: str

    @property
    def expected(self) -> str:
        """The class."""
        return f"an instance of {self.cls.rpartition('.')[2]}"

    def check(self, value: Any) -> Any:
        """An instance of the class."""
        module, _, name = self.cls.rpartition(".")
        wanted = dict if self.cls == "dict" else getattr(importlib.import_module(module), name)
        if not isinstance(value, wanted):
            raise NotOfKind(self.expected)
        return value

    def parse(self, text: str) -> Any:
        """Always `NotOfKind`."""
        raise NotOfKind(self.expected)
