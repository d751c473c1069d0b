"""The kit's programs and oracle: padding bit by bit, and whether wrong masks would be noticed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from executorch.extension.pybindings import portable_lib

from staticlm.conformance.cases import TOYS, text
from staticlm.conformance.kit import Kit
from staticlm.conformance.numbers import TOLERANCE, decode, difference, encode
from staticlm.conformance.oracle import replay, toy_oracle
from staticlm.conformance.toy import weights
from staticlm.contract import Part, Role
from staticlm.contract.metadata import read_contract
from staticlm.contract.program import read_program

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def _prefill(kit: Kit, name: str, pad: int) -> tuple[list[bytes], list[torch.Tensor]]:
    """Bytes of the real logits, and the caches, after a full and a padded chunk."""
    path = kit.directory / "programs" / f"{name}.pte"
    contract = read_contract(read_program(path))
    module = portable_lib._load_for_executorch(str(path))
    caches = [torch.zeros(c.spec.shape, dtype=DTYPES[c.spec.dtype]) for c in contract.caches]
    method = contract.prefills[0]
    found = []
    for start, ids in ((0, text(1, 6)), (6, text(2, 2)), (8, text(3, 3))):
        padded = [*ids, *[pad] * (method.step - len(ids))]
        given = {
            Role.TOKENS: torch.tensor([padded]),
            Role.START: torch.tensor([start]),
            Role.LENGTH: torch.tensor([len(ids)]),
        }
        inputs = [
            given[slot.role] if slot.cache is None else caches[slot.cache] for slot in method.inputs
        ]
        logits = module.run_method(method.name, tuple(inputs), True)[method.logits.index]
        found.append(logits[0, : len(ids)].contiguous().view(torch.uint8).numpy().tobytes())
    return found, caches


@pytest.mark.parametrize("name", ["full", "sliding", "all-rows", "float16", "bfloat16"])
def test_padding_ids_are_without_effect(kit: Kit, name: str) -> None:
    logits, caches = _prefill(kit, name, 0)
    other_logits, other_caches = _prefill(kit, name, 29)
    assert logits == other_logits
    # Equal as numbers: a zero of a padding row may have either sign.
    assert all(torch.equal(a, b) for a, b in zip(caches, other_caches, strict=True))


@pytest.mark.parametrize("window", [4, 6, None])
def test_another_window_would_be_noticed(window: int | None) -> None:
    parts, tokens = weights(TOYS["sliding"][1]), text(1, 24)
    right = toy_oracle(parts, [5], tokens).logits
    wrong = toy_oracle(parts, [window], tokens).logits
    changed = [difference(wrong[p], right[p]) for p in range(6, 24)]
    assert min(changed) > 5 * TOLERANCE["float32"]
    assert np.median(changed) > TOLERANCE["bfloat16"]


def test_the_oracle_sees_exactly_the_window() -> None:
    parts, tokens = weights(TOYS["sliding"][1]), list(text(1, 12))
    right = toy_oracle(parts, [5], tokens).logits[-1]
    inside, outside = list(tokens), list(tokens)
    inside[7] = (tokens[7] + 1) % 30
    outside[6] = (tokens[6] + 1) % 30
    assert difference(toy_oracle(parts, [5], inside).logits[-1], right) > 1e-3
    np.testing.assert_array_equal(toy_oracle(parts, [5], outside).logits[-1], right)


def test_replay_at_the_wrap_is_the_documents_example(kit: Kit) -> None:
    contract = read_contract(read_program(kit.directory / "programs" / "sliding.pte"))
    rows = [np.arange(1, 16, dtype=np.float32).reshape(15, 1, 1).repeat(2, 1).repeat(4, 2)] * 2
    calls = [("prefill_6", 0, 6), ("prefill_6", 6, 6), ("prefill_6", 12, 3)]
    after = [decode(data, "float32", (2, 10, 4))[0, :, 0] for data in replay(contract, rows, calls)]
    # Position p is written as p + 1, zero is padding.
    assert after[0].tolist() == [11, 12, 13, 14, 15, 0, 0, 0, 9, 10]
    assert after[1].tolist() == after[0].tolist()


def test_bfloat16_rounds_to_nearest_even() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -2.5, 3.0e38, 0.0], np.float32)
    expected = torch.from_numpy(values).to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(decode(encode(values, "bfloat16"), "bfloat16", (6,)), expected)


def test_a_toy_has_the_rows_that_it_says(kit: Kit) -> None:
    contract = read_contract(read_program(kit.directory / "programs" / "shuffled.pte"))
    orders = {m.name: [slot.role for slot in m.inputs] for m in contract.methods}
    assert orders["decode"] != [r for r in orders["prefill_6"] if r is not Role.LENGTH]
    assert [c.part for c in contract.caches][:2] == [Part.VALUE, Part.KEY]
    assert {c.layout for c in contract.caches} == {"heads,slots,width", "slots,heads,width"}
