"""Which I/O manager drives a program, and every way that this can go wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.toy_programs import Toy, write_toy

import staticlm
from staticlm.contract.program import ProgramFacts, read_program
from staticlm.errors import Code, StaticLMError
from staticlm.runtime.allocators import get_chain
from staticlm.runtime.drivers import get_driver
from staticlm.runtime.io_managers import hf_static, registry
from staticlm.runtime.shared_program import SharedProgram


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    registry.io_manager_labels()
    before = dict(registry._entries)
    yield
    registry._entries.clear()
    registry._entries.update(before)


@pytest.fixture
def facts(toy_path: Path) -> ProgramFacts:
    return read_program(toy_path)


def with_constants(facts: ProgramFacts, **changes: Any) -> ProgramFacts:
    values = {**facts.constants, **changes}
    return replace(facts, constants={k: v for k, v in values.items() if v is not None})


def test_the_programs_label_selects(facts: ProgramFacts) -> None:
    assert registry.select_label(facts) == "hf_static"
    assert registry.select_label(facts, "hf_static") == "hf_static"


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"get_io_contract": None}, Code.LABEL_MISSING),
        ({"get_io_contract": ""}, Code.LABEL_MALFORMED),
        ({"get_io_contract": 3}, Code.LABEL_MALFORMED),
        ({"get_io_contract": "x" * 65}, Code.LABEL_MALFORMED),
        ({"get_io_contract": "hf_stätic"}, Code.LABEL_MALFORMED),
        ({"get_io_contract": "unheard_of"}, Code.LABEL_UNKNOWN),
        ({"get_io_contract_version": None}, Code.VERSION_MALFORMED),
        ({"get_io_contract_version": True}, Code.VERSION_MALFORMED),
        ({"get_io_contract_version": 2}, Code.VERSION_UNKNOWN),
        ({"get_max_context_len": None}, Code.METADATA_MISSING),
        ({"get_max_context_len": 0}, Code.METADATA_INVALID),
        ({"get_max_context_len": -4}, Code.METADATA_INVALID),
        ({"get_max_context_len": True}, Code.METADATA_INVALID),
        ({"get_max_context_len": 2**40}, Code.METADATA_INVALID),
        ({"get_max_context_len": 4}, Code.METADATA_INVALID),
        ({"get_io_layout": "{"}, Code.LAYOUT_INVALID),
    ],
)
def test_each_fault_is_its_own_error_and_nothing_is_loaded(
    facts: ProgramFacts, toy_path: Path, changes: dict[str, Any], code: Code
) -> None:
    changed = with_constants(facts, **changes)
    shared = SharedProgram(get_driver("stock"), toy_path, changed)
    chain = get_chain("host")
    with pytest.raises(StaticLMError) as caught:
        registry.make_io_manager(registry.select_label(changed), changed, shared, chain)
    assert caught.value.code is code
    assert shared.loaded == ()
    assert chain.tallies[0].served == 0


def test_an_unknown_label_lists_what_is_registered(facts: ProgramFacts) -> None:
    with pytest.raises(StaticLMError, match="hf_static"):
        registry.select_label(with_constants(facts, get_io_contract="unheard_of"))


def test_a_named_contract_is_checked_against_the_program(facts: ProgramFacts) -> None:
    registry.register_io_manager("other", hf_static.create)
    with pytest.raises(StaticLMError) as caught:
        registry.select_label(facts, "other")
    assert caught.value.code is Code.CONTRACT_MISMATCH
    with pytest.raises(StaticLMError) as caught:
        registry.select_label(facts, "nobody")
    assert caught.value.code is Code.LABEL_UNKNOWN


def test_unlabelled_programs_go_to_the_one_that_recognizes_them(facts: ProgramFacts) -> None:
    bare = with_constants(facts, get_io_contract=None)
    registry.register_io_manager("one", hf_static.create, recognizes=lambda f: f is bare)
    assert registry.select_label(bare) == "one"
    registry.register_io_manager("two", hf_static.create, recognizes=lambda f: True)
    with pytest.raises(StaticLMError, match="one, two") as caught:
        registry.select_label(bare)
    assert caught.value.code is Code.LABEL_MISSING
    assert registry.select_label(bare, "two") == "two"
    # A label always wins over recognition.
    assert registry.select_label(facts) == "hf_static"


@pytest.mark.parametrize("label", ["", "x" * 65, "ü", "a\nb", 3])
def test_labels_that_cannot_be_registered(label: Any) -> None:
    with pytest.raises(StaticLMError) as caught:
        registry.register_io_manager(label, hf_static.create)
    assert caught.value.code is Code.REGISTRATION_INVALID


def test_registering_twice_or_nonsense() -> None:
    with pytest.raises(StaticLMError) as caught:
        registry.register_io_manager("hf_static", hf_static.create)
    assert caught.value.code is Code.REGISTRATION_DUPLICATE
    with pytest.raises(StaticLMError) as caught:
        registry.register_io_manager("x", 3)  # type: ignore[arg-type]
    assert caught.value.code is Code.REGISTRATION_INVALID


@pytest.mark.parametrize(("made", "part"), [(None, "returned nothing"), (3, "another type")])
def test_factories_that_return_something_else(
    facts: ProgramFacts, toy_path: Path, made: Any, part: str
) -> None:
    registry.register_io_manager("odd", lambda *_: made)
    shared = SharedProgram(get_driver("stock"), toy_path, facts)
    with pytest.raises(StaticLMError, match=part) as caught:
        registry.make_io_manager("odd", facts, shared, get_chain("host"))
    assert caught.value.code is Code.IO_MANAGER_INVALID


def test_a_third_party_manager_drives_a_program_of_its_label(tmp_path: Path) -> None:
    path = tmp_path / "third.pte"
    write_toy(path, Toy(steps=()), {"get_io_contract": "third"})
    with pytest.raises(StaticLMError) as caught:
        staticlm.load(path)
    assert caught.value.code is Code.LABEL_UNKNOWN

    def factory(facts: ProgramFacts, program: SharedProgram, allocator: Any) -> Any:
        return hf_static.create(
            with_constants(facts, get_io_contract="hf_static"), program, allocator
        )

    registry.register_io_manager("third", factory)
    with staticlm.load(path) as runner:
        assert len(runner.generate([1, 2, 3], 4, ignore_end=True).tokens) == 4
