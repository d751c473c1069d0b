"""Programs by transformers' own ExecuTorch exporter, driven by what it recorded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.exporter_artifacts import CAPACITY, export_component, save_components
from tests.support.models import FAMILIES

import staticlm
from staticlm.contract import LogitsRows, Part, Role
from staticlm.contract.program import read_program
from staticlm.errors import CapacityError, Code, StaticLMError
from staticlm.runtime.io_managers.exporter_record import (
    merge_components,
    read_exporter_contract,
    recognizes,
)

TOKENS = [int(t) for t in np.random.default_rng(4).integers(3, 90, CAPACITY)]


@pytest.fixture(scope="module")
def model() -> Any:
    return FAMILIES["llama"]()


@pytest.fixture(scope="module")
def oracle(model: Any) -> Any:
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0].numpy()


@pytest.fixture(scope="module")
def decode(model: Any) -> Any:
    return export_component(model, 1)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, model: Any, decode: Any) -> Path:
    """A chunk of 4 and a single token, as two files."""
    parts = {"prefill": export_component(model, 4), "decode": decode}
    return save_components(tmp_path_factory.mktemp("exporter"), parts)


def test_slots_come_from_the_record(directory: Path) -> None:
    path = directory / "prefill.pte"
    facts, sources = merge_components(path, read_program(path))
    assert recognizes(facts)
    assert sources["decode"] == (directory / "decode.pte", "forward")
    contract = read_exporter_contract(facts)
    assert (contract.max_context_len, contract.vocab_size) == (CAPACITY, 96)
    parts = [(cache.layer, cache.part) for cache in contract.caches]
    assert parts == [(i, p) for i in (0, 1) for p in (Part.KEY, Part.VALUE, Part.COUNTER)]
    prefill = contract.prefills[0]
    assert (prefill.step, prefill.logits_rows) == (4, LogitsRows.ALL)
    assert [slot.role for slot in prefill.inputs[:2]] == [Role.TOKENS, Role.KEY]
    # Mutated inputs come first, then logits and all states once more.
    assert prefill.logits.index == 6
    assert [slot.cache for slot in prefill.outputs] == [0, 1, 2, 3, 4, 5, None, 0, 1, 2, 3, 4, 5]


def test_equal_to_eager_in_padded_chunks_and_steps(
    directory: Path, driver_name: str, oracle: Any
) -> None:
    with staticlm.load(directory, driver=driver_name) as runner:
        session = runner.session
        assert session.stats().states == "in place"
        for begin, end in [(0, 7), (7, 8), (8, 13), (13, 14), (14, 32)]:
            logits = session.prefill(TOKENS[begin:end])
            np.testing.assert_allclose(logits, oracle[end - 1], atol=1e-4)
        with pytest.raises(CapacityError):
            session.step(0)
        first = [session.reset(), session.prefill(TOKENS[:6])][1]
        second = [session.reset(), session.prefill(TOKENS[:6])][1]
        np.testing.assert_array_equal(first, second)


def test_planned_states_are_copied_back_and_it_says_so(
    tmp_path: Path, model: Any, driver_name: str, oracle: Any
) -> None:
    path = save_components(tmp_path, {"decode": export_component(model, 1, planned=True)})
    with staticlm.load(path, driver=driver_name) as runner:
        assert runner.session.stats().states == "copied"
        for position in range(12):
            logits = runner.session.step(TOKENS[position])
            np.testing.assert_allclose(logits, oracle[position], atol=1e-4)


def changed(directory: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    shutil.copytree(directory, target)
    manifest = json.loads((target / "export.json").read_text())
    change(manifest["components"])
    (target / "export.json").write_text(json.dumps(manifest))
    return target


def _text(components: dict[str, Any], key: str, old: str, new: str) -> None:
    record = components["decode"]["metadata"]
    assert old in record[key]
    record[key] = record[key].replace(old, new)


@pytest.mark.parametrize(
    ("change", "code", "part"),
    [
        (lambda c: c.pop("decode"), Code.METHOD_MISSING, "no single component"),
        (
            lambda c: _text(c, "in_spec", "StaticLayer", "StaticSlidingWindowLayer"),
            Code.LAYOUT_INVALID,
            "StaticSlidingWindowLayer",
        ),
        (lambda c: _text(c, "in_spec", "position_ids", "inputs_embeds"), Code.LAYOUT_INVALID,
         "inputs_embeds"),
        (lambda c: _text(c, "in_spec", "cumulative_length", "length"), Code.LAYOUT_INVALID,
         "length"),
        (lambda c: _text(c, "out_spec", "logits", "loss"), Code.LAYOUT_INVALID, "loss"),
        (lambda c: _text(c, "in_spec", "[1, {", "[2, {"), Code.LAYOUT_INVALID, "version 1"),
    ],
)  # fmt: skip
def test_a_record_that_no_rule_covers_is_refused(
    directory: Path, tmp_path: Path, change: Any, code: Code, part: str
) -> None:
    with pytest.raises(StaticLMError, match=part) as caught:
        staticlm.load(changed(directory, tmp_path / "a", change))
    assert caught.value.code is code


def test_without_its_record_a_program_states_no_contract(directory: Path, tmp_path: Path) -> None:
    shutil.copy(directory / "decode.pte", tmp_path / "decode.pte")
    with pytest.raises(StaticLMError) as caught:
        staticlm.load(tmp_path / "decode.pte")
    assert caught.value.code is Code.LABEL_MISSING
