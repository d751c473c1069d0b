"""Malformed programs: refused before anything is allocated or loaded."""

from __future__ import annotations

from typing import Any

import pytest

from staticlm.conformance.kit import Kit
from staticlm.conformance.malformed import BASE, VARIANTS, Variant
from staticlm.contract.check import check_contract
from staticlm.contract.metadata import read_contract
from staticlm.contract.program import read_program
from staticlm.errors import Code, ContractError
from staticlm.runtime.allocators import get_chain
from staticlm.runtime.drivers import get_driver
from staticlm.runtime.io_managers.registry import make_io_manager, select_label
from staticlm.runtime.shared_program import SharedProgram


def test_nothing_is_allocated_for_a_refused_program(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = get_driver("stock")
    loaded: list[Any] = []
    monkeypatch.setattr(driver, "load", loaded.append)
    allocator = get_chain("host")
    for variant in VARIANTS:
        path = kit.directory / "malformed" / f"{variant.name}.pte"
        facts = read_program(path)
        with pytest.raises(ContractError) as caught:
            make_io_manager(
                select_label(facts), facts, SharedProgram(driver, path, facts), allocator
            )
        assert caught.value.code is variant.code, variant.name
    assert loaded == []
    assert [tally.served for tally in allocator.tallies] == [0]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_a_message_says_found_and_expected(kit: Kit, variant: Variant) -> None:
    facts = read_program(kit.directory / "malformed" / f"{variant.name}.pte")
    with pytest.raises(ContractError) as caught:
        check_contract(read_contract(facts), facts)
    error = caught.value
    assert error.what
    assert error.expected is not None
    if variant.code not in (Code.LABEL_MISSING, Code.METADATA_MISSING):
        assert error.found is not None


def test_the_base_is_whole(kit: Kit) -> None:
    facts = read_program(kit.directory / "programs" / f"{BASE}.pte")
    check_contract(read_contract(facts), facts)


def test_a_variant_differs_in_one_fact(kit: Kit) -> None:
    base = read_program(kit.directory / "programs" / f"{BASE}.pte")
    variant = read_program(kit.directory / "malformed" / "vocab-negative.pte")
    assert dict(base.constants) | {"get_vocab_size": -40} == dict(variant.constants)
    assert base.methods == variant.methods
    assert base.constant_bytes == variant.constant_bytes
