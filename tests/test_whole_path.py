"""From a GGUF file to text, on a real model: SmolLM2-135M-Instruct, context 1024, prefill 128."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import staticlm
from staticlm.contract import Role
from staticlm.contract.metadata import read_contract
from staticlm.contract.program import read_program
from staticlm.export.source import load_source
from staticlm.validation import validate

pytestmark = pytest.mark.slow

PROMPT = (
    "The history of the lighthouse begins with fires on hill tops. "
    "Sailors looked for them in the dark, and towns kept them burning through the night. "
) * 8


@pytest.fixture(scope="module")
def source(smollm2_source: Path) -> PreTrainedModel:
    return load_source(smollm2_source, "float32").model


@pytest.fixture(scope="module")
def runner(smollm2: Path) -> Iterator[staticlm.Runner]:
    with staticlm.load(smollm2) as opened:
        yield opened


def test_greedy_tokens_and_logits_equal_the_source(
    runner: staticlm.Runner, source: PreTrainedModel
) -> None:
    prompt = runner.encode(PROMPT)[:200]
    assert len(prompt) == 200
    runner.reset()
    rows = [runner.session.prefill(prompt)]
    text = list(prompt)
    for _ in range(64):
        text.append(int(rows[-1].argmax()))
        rows.append(runner.session.step(text[-1]))
    with torch.no_grad():
        want = source(torch.tensor([text]), use_cache=False).logits[0, 199:].numpy()
        greedy = source.generate(
            torch.tensor([prompt]), max_new_tokens=64, do_sample=False, eos_token_id=None
        )[0, 200:]
    assert text[200:] == greedy.tolist()
    assert np.abs(np.stack(rows) - want).max() <= 1e-3


def test_validate_passes(smollm2: Path, source: PreTrainedModel) -> None:
    result = validate(smollm2, source, max_stepwise=130)
    assert result.passed
    assert result.worst < 1e-4
    lengths = [case.length for case in result.cases]
    assert lengths == [1, 127, 128, 129, 256, 258, 386, 1023, 1024]


def test_weights_are_stored_once(smollm2: Path, source: PreTrainedModel) -> None:
    unique = {p.data_ptr(): p.numel() * p.element_size() for p in source.parameters()}
    size = (smollm2 / "model.pte").stat().st_size
    assert sum(unique.values()) < size < 1.05 * sum(unique.values())


def test_caches_are_inputs_and_never_outputs(smollm2: Path) -> None:
    facts = read_program(smollm2 / "model.pte")
    contract = read_contract(facts)
    for method in contract.methods:
        found = facts.methods[method.name]
        assert len(found.outputs) == 1
        assert not found.aliases
        caches = [s for s in method.inputs if s.role in (Role.KEY, Role.VALUE)]
        assert len(caches) == 60
        assert all(not found.inputs[s.index].planned for s in caches)
        # One in-place write for each cache, and no operator that copies one.
        assert found.operators["aten::index_put_"] == 60
        assert not any(
            "copy_" in name and "dim_order" not in name
            for name in found.operators
            if name not in ("aten::unsqueeze_copy.out",)
        )
        assert found.delegate_calls == 2


def test_generate_streams_text_without_torch(smollm2: Path) -> None:
    code = (
        "import sys\n"
        "from staticlm.cli import main\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "finally:\n"
        "    heavy = {'torch', 'transformers'} & set(sys.modules)\n"
        "    print('heavy:', sorted(heavy), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "generate", str(smollm2), "--driver", "native",
         "--prompt", "The capital of France is", "--max-new-tokens", "8"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(" Paris")
    assert "heavy: []" in done.stderr


def test_both_drivers_generate_the_same_tokens(
    smollm2: Path, runner: staticlm.Runner, cli: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    ours = runner.generate(PROMPT, max_new_tokens=24)
    done = cli("generate", smollm2, "--driver", "stock", "--prompt", PROMPT,
               "--max-new-tokens", 24, "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert tuple(json.loads(done.stdout)["tokens"]) == tuple(ours.tokens)


def test_a_chat_turn_ends_by_itself(runner: staticlm.Runner) -> None:
    runner.reset()
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    done = runner.generate(messages, max_new_tokens=64)
    assert "Paris" in done.text
    assert done.finish_reason is staticlm.FinishReason.END


def test_prompt_beyond_the_capacity_is_refused_before_anything_runs(
    runner: staticlm.Runner,
) -> None:
    runner.reset()
    runner.session.prefill([1, 2, 3])
    calls = dict(runner.session.stats().calls)
    with pytest.raises(staticlm.StaticLMError) as refused:
        runner.session.prefill([5] * 1022)
    assert refused.value.code is staticlm.Code.CAPACITY_EXCEEDED
    assert "1024" in str(refused.value)
    assert runner.session.position == 3
    assert dict(runner.session.stats().calls) == calls
