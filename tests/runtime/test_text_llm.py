"""Programs of ExecuTorch's own exporter: the same logits as eager, the same text as its runner."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.stock_llm import CHUNK, CONTEXT, StockLLM, eager_stock, export_stock

import staticlm
from staticlm.contract import LogitsRows, MethodRole, Role
from staticlm.contract.program import ProgramFacts, read_program
from staticlm.errors import CapacityError, Code, StaticLMError
from staticlm.runtime.io_managers.registry import select_label
from staticlm.runtime.io_managers.text_llm import read_text_llm
from staticlm.runtime.runner import Runner

TOKENS = [int(t) for t in np.random.default_rng(2).integers(0, 95, CONTEXT)]


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> StockLLM:
    """A stock program that takes several tokens per call."""
    return export_stock(tmp_path_factory.mktemp("stock"))


@pytest.fixture(scope="module")
def oracle(stock: StockLLM) -> Any:
    """float32 `[CONTEXT, VOCABULARY]`: logits after each of `TOKENS`."""
    return eager_stock(stock.weights, TOKENS).numpy()


@pytest.fixture
def runner(stock: StockLLM, driver_name: str) -> Iterator[Runner]:
    with staticlm.load(stock.program, driver=driver_name, tokenizer=stock.tokenizer) as runner:
        yield runner


def test_the_contract_is_read_from_the_program(stock: StockLLM) -> None:
    facts = read_program(stock.program)
    assert select_label(facts) == "text_llm"
    contract = read_text_llm(facts)
    assert (contract.max_context_len, contract.vocab_size) == (CONTEXT, 96)
    assert (contract.bos_id, contract.eos_ids, contract.caches) == (95, (95,), ())
    # The exporter's bound on the tokens is one less than the step that its metadata states.
    (prefill,) = contract.prefills
    assert prefill.step == CHUNK - 1
    assert prefill.logits_rows is LogitsRows.LAST
    assert contract.decode.role is MethodRole.DECODE
    assert contract.decode.inputs[1].role is Role.START


@pytest.mark.parametrize("count", [1, 2, 14, 15, 16, 17, 31, 46, 48])
def test_prefill_equals_eager(runner: Runner, oracle: Any, count: int) -> None:
    logits = runner.session.prefill(TOKENS[:count])
    np.testing.assert_allclose(logits, oracle[count - 1], atol=1e-4, rtol=1e-4)


def test_stepwise_to_the_end_and_no_further(runner: Runner, oracle: Any) -> None:
    session = runner.session
    session.prefill(TOKENS[:20])
    for position in range(20, CONTEXT):
        np.testing.assert_allclose(
            session.step(TOKENS[position]), oracle[position], atol=1e-4, rtol=1e-4
        )
    with pytest.raises(CapacityError):
        session.step(0)


def test_reset_and_a_second_text(runner: Runner) -> None:
    first = runner.session.prefill(TOKENS[:18])
    runner.reset()
    runner.session.prefill(TOKENS[5:30])
    runner.reset()
    np.testing.assert_array_equal(runner.session.prefill(TOKENS[:18]), first)


def test_siblings_keep_their_caches_apart(runner: Runner, oracle: Any) -> None:
    with runner.sibling() as other:
        runner.session.prefill(TOKENS[:10])
        other.session.prefill(TOKENS[20:40])
        for position in range(10, 16):
            np.testing.assert_allclose(
                runner.session.step(TOKENS[position]), oracle[position], atol=1e-4, rtol=1e-4
            )
            other.session.step(1)


def test_stats_say_where_the_caches_are(runner: Runner) -> None:
    runner.generate("Hello, stock program", 4, ignore_end=True)
    stats = runner.stats()
    assert (stats.label, stats.states) == ("text_llm", "inside the program")
    assert stats.calls == {"forward[n]": 2, "forward[1]": 3}
    assert stats.methods_loaded == ("forward",)


# Not longer than the bound of the exported shape: there its own runner fails.
PROMPT = "An odd prompt"
THEIRS = """
import sys
from executorch.extension.llm.runner import GenerationConfig, TextLLMRunner
runner = TextLLMRunner(sys.argv[1], sys.argv[2])
config = GenerationConfig(echo=False, max_new_tokens=20, temperature=0.0)
pieces = []
runner.generate(sys.argv[3], config, pieces.append)
print("TEXT:" + "".join(pieces) + ":END")
"""


def test_the_same_text_as_executorchs_own_runner(runner: Runner, stock: StockLLM) -> None:
    command = [sys.executable, "-W", "ignore", "-c", THEIRS, stock.program, stock.tokenizer, PROMPT]
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=True
    )
    theirs = done.stdout.partition("TEXT:")[2].rpartition(":END")[0]
    ours = runner.generate(PROMPT, 20)
    assert len(theirs) > 5
    assert ours.text == theirs


def with_constants(facts: ProgramFacts, **changes: Any) -> ProgramFacts:
    values = {**facts.constants, **changes}
    return replace(facts, constants={k: v for k, v in values.items() if v is not None})


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"use_kv_cache": False}, Code.PROGRAM_UNSUPPORTED),
        ({"use_kv_cache": None}, Code.PROGRAM_UNSUPPORTED),
        ({"get_max_context_len": None}, Code.METADATA_MISSING),
        ({"get_max_seq_len": None}, Code.METADATA_MISSING),
        ({"get_vocab_size": None}, Code.METADATA_MISSING),
        ({"get_max_context_len": 0}, Code.METADATA_INVALID),
        ({"get_max_seq_len": 1.5}, Code.METADATA_INVALID),
        ({"get_vocab_size": 97}, Code.SLOT_MISMATCH),
        ({"get_eos_ids": (2, 96)}, Code.METADATA_INVALID),
        ({"get_bos_id": True}, Code.METADATA_INVALID),
    ],
)
def test_metadata_that_is_needed_has_no_default(
    stock: StockLLM, changes: dict[str, Any], code: Code
) -> None:
    facts = read_program(stock.program)
    with pytest.raises(StaticLMError) as caught:
        read_text_llm(with_constants(facts, **changes))
    assert caught.value.code is code


def test_a_fixed_chunk_without_a_decode_method_is_refused(stock: StockLLM, tmp_path: Path) -> None:
    facts = read_program(stock.program)
    method = facts.methods["forward"]
    first = method.inputs[0]
    assert first is not None
    fixed = replace(method, inputs=(replace(first, dynamic=False), *method.inputs[1:]))
    with pytest.raises(StaticLMError) as caught:
        read_text_llm(replace(facts, methods={"forward": fixed}))
    assert caught.value.code is Code.PROGRAM_UNSUPPORTED
