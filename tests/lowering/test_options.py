"""The option table and its router."""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest

from staticlm.errors import Code, LoweringError
from staticlm.lowering.option_kinds import Flag, Integer, Member, Names, NotOfKind, Word
from staticlm.lowering.options import (
    REQUIRED,
    Option,
    OptionTable,
    describe,
    parse_assignments,
    read_option_file,
    route,
    typed,
)


class Colour(IntEnum):
    kRed = 1
    kDarkBlue = 2
    kUnknown = 3


COLOUR = Member(f"{__name__}.Colour", ("Red", "DarkBlue"), "k")
OTHER = OptionTable("other", (Option("tiles", "spec", Integer(1, 8), 4, "Tiles."),))
TABLE = OptionTable(
    "mine",
    (
        Option("colour", "spec", COLOUR, REQUIRED, "Paint."),
        Option("fast", "spec", Flag(), False, "Hurry."),
        Option("depth", "engine", Integer(1, 64), 8, "How deep.", ("deep",)),
        Option("level", "engine", Integer(values=(0, 2, 3)), 0, "Which level.", ("deep",)),
        Option("wide", "engine", Flag(), True, "How wide.", ("wide",)),
        Option("skip", "partitioner", Names(), frozenset, "What to skip."),
    ),
    selector=Option("mode", "backend", Word(("deep", "wide")), "deep", "The mode."),
    unreachable={"hidden": "it is computed"},
)


def refusal(given: dict[str, Any]) -> LoweringError:
    with pytest.raises(LoweringError) as caught:
        route(TABLE, given, [OTHER])
    return caught.value


def test_options_reach_their_destinations_with_defaults() -> None:
    routed = route(TABLE, {"colour": "DarkBlue", "skip": ["b", "a"], "depth": 64})
    assert routed.values == {
        "backend": {"mode": "deep"},
        "spec": {"colour": Colour.kDarkBlue, "fast": False},
        "engine": {"depth": 64, "level": 0},
        "partitioner": {"skip": frozenset({"a", "b"})},
    }
    assert routed["spec"]["colour"] is Colour.kDarkBlue
    assert routed.given == ("colour", "skip", "depth")
    assert route(TABLE, {"mode": "wide", "colour": "red"})["engine"] == {"wide": True}


@pytest.mark.parametrize("value", ["kRed", "Red", "red", "KRED", Colour.kRed])
def test_members_by_name_or_themselves(value: Any) -> None:
    assert route(TABLE, {"colour": value})["spec"]["colour"] is Colour.kRed


@pytest.mark.parametrize(
    ("given", "found", "expected"),
    [
        ({"colour": 1}, "1", "one of (k)Red, (k)DarkBlue"),
        ({"colour": "kUnknown"}, "'kUnknown'", "one of (k)Red, (k)DarkBlue"),
        ({"colour": None}, "None", "one of (k)Red, (k)DarkBlue"),
        ({"colour": "Red", "fast": 1}, "1", "true or false"),
        ({"colour": "Red", "fast": "true"}, "'true'", "true or false"),
        ({"colour": "Red", "depth": 0}, "0", "an integer from 1 to 64"),
        ({"colour": "Red", "depth": 65}, "65", "an integer from 1 to 64"),
        ({"colour": "Red", "depth": True}, "True", "an integer from 1 to 64"),
        ({"colour": "Red", "depth": 8.0}, "8.0", "an integer from 1 to 64"),
        ({"colour": "Red", "depth": Colour.kRed}, "<Colour.kRed: 1>", "an integer from 1 to 64"),
        ({"colour": "Red", "level": 1}, "1", "one of 0, 2, 3"),
        ({"colour": "Red", "skip": "a"}, "'a'", "names, separated by commas"),
        ({"colour": "Red", "skip": [1]}, "[1]", "names, separated by commas"),
        ({"colour": "Red", "mode": "flat"}, "'flat'", "one of deep, wide"),
    ],
)
def test_wrong_values(given: dict[str, Any], found: str, expected: str) -> None:
    error = refusal(given)
    assert (error.code, error.found) == (Code.BACKEND_OPTION_INVALID, found)
    assert error.expected == expected


def test_a_missing_option_is_asked_for() -> None:
    error = refusal({})
    assert error.code is Code.BACKEND_OPTION_INVALID
    assert str(error).startswith("backend 'mine' needs option 'colour'")
    assert "--backend-option colour=VALUE" in str(error)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("wide", "It is an option of mine (mode=wide)."),
        ("tiles", "It is an option of other."),
        ("hidden", "Upstream knows it, but it is computed."),
        ("dept", "The nearest is 'depth'."),
        ("tile", "The nearest is 'tiles' of other."),
        ("zzz", None),
    ],
)
def test_unknown_names_say_who_takes_them(name: str, hint: str | None) -> None:
    error = refusal({"colour": "Red", name: 1})
    assert (error.code, error.remedy) == (Code.BACKEND_OPTION_UNKNOWN, hint)
    assert error.what == f"backend 'mine' with mode=deep has no option {name!r}"
    assert error.expected == "colour, fast, depth, level, skip"


def test_text_is_read_by_type() -> None:
    texts = parse_assignments(
        ["colour=darkblue", "fast=True", "depth=0x10", "skip=a, b,", "mode = wide"]
    )
    assert typed(TABLE, texts) == {
        "colour": Colour.kDarkBlue,
        "fast": True,
        "depth": 16,
        "skip": frozenset({"a", "b"}),
        "mode": "wide",
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fast=1", "true or false"),
        ("fast=", "true or false"),
        ("depth=eight", "an integer from 1 to 64"),
        ("level=1", "one of 0, 2, 3"),
        ("colour=Reed", "one of (k)Red, (k)DarkBlue"),
    ],
)
def test_text_that_is_no_value(text: str, expected: str) -> None:
    with pytest.raises(LoweringError) as caught:
        typed(TABLE, parse_assignments([text]))
    assert (caught.value.code, caught.value.expected) == (Code.BACKEND_OPTION_INVALID, expected)


@pytest.mark.parametrize(
    ("items", "message"),
    [(["fast"], "has no value"), (["=1"], "has no value"), (["a=1", "a=2"], "'a' is given twice")],
)
def test_assignments_that_are_none(items: list[str], message: str) -> None:
    with pytest.raises(LoweringError, match=message):
        parse_assignments(items)


def test_an_option_file(tmp_path: Path) -> None:
    path = tmp_path / "options.toml"
    path.write_text('[mine]\ncolour = "Red"\nfast = true\nskip = ["a"]\n[other]\ntiles = 2\n')
    content = read_option_file(path)
    assert route(TABLE, content["mine"])["spec"] == {"colour": Colour.kRed, "fast": True}
    assert route(OTHER, content["other"])["spec"] == {"tiles": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [("fast = true\n", "'fast' outside of a backend's table"), ("[mine\n", "cannot be read")],
)
def test_option_files_that_cannot_be_used(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "options.toml"
    path.write_text(text)
    with pytest.raises(LoweringError, match=message):
        read_option_file(path)
    with pytest.raises(LoweringError, match="cannot be read"):
        read_option_file(tmp_path / "absent.toml")


def test_rows_for_people() -> None:
    assert describe(TABLE)[0] == ("mode", "all", "one of deep, wide", "deep", "The mode.")
    assert describe(TABLE)[1][3] == "required"
    assert describe(TABLE)[3] == ("depth", "deep", "an integer from 1 to 64", "8", "How deep.")


def test_a_member_of_an_absent_package_is_known_by_name() -> None:
    kind = Member("absent_package.Colour", ("Red",), "k")
    assert kind.check("red") == "kRed"
    with pytest.raises(NotOfKind):
        kind.check("blue")
