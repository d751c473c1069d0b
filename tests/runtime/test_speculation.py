"""Speculative decoding against plain decoding: the same tokens, sessions and errors."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.contracts import contract
from tests.support.models import build
from tests.support.toy_artifacts import BYTE_TOY, write_artifact, write_texts
from tests.support.toy_programs import Toy

import staticlm
from staticlm.contract import CacheKind, Contract, LogitsRows, MethodRole
from staticlm.errors import Code, RunnerError, StaticLMError, UsageError
from staticlm.export.options import ExportOptions
from staticlm.runtime.generation import FinishReason
from staticlm.runtime.runner import Runner
from staticlm.runtime.session import Session
from staticlm.runtime.speculation import PromptLookup, Speculation, prove, verify_method

CAPACITY, STEP = 64, 5
SPECULATE = {"speculate": "prompt-lookup"}


@pytest.fixture(scope="session")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sliding and a full layer, softcaps, and a verify method, lowered to XNNPACK."""
    model = build(
        "Gemma2",
        vocab_size=BYTE_TOY.vocab,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=11,
        max_position_embeddings=128,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=0,
        initializer_range=0.3,
    )
    path = tmp_path_factory.mktemp("verify") / "artifact"
    staticlm.export_model(
        model,
        path,
        ExportOptions(
            context_length=CAPACITY, prefill_lengths=(8,), verify_length=STEP, prefixes=(0, 20)
        ),
    )
    write_texts(path)
    return path


@pytest.fixture(scope="module")
def runners(artifact: Path, driver_name: str) -> Iterator[tuple[Runner, Runner]]:
    """One for plain decoding, one to speculate."""
    with (
        staticlm.load(artifact, driver=driver_name) as plain,
        staticlm.load(artifact, driver=driver_name) as guessing,
    ):
        yield plain, guessing


def _prompts() -> Iterator[tuple[int, list[int]]]:
    rng = np.random.default_rng(5)
    for index in range(60):
        length = int(rng.integers(1, CAPACITY - 1))
        ids = [int(one) for one in rng.integers(0, 256, length)]
        yield index, (ids[: max(1, length // 4)] * 4)[:length] if index % 2 else ids


def _caches(runner: Runner) -> list[bytes]:
    manager: Any = runner.session._manager
    position = runner.session.position
    found = []
    for cache, buffer in zip(manager.contract.caches, manager._caches, strict=True):
        rows = buffer.view(np.float32, cache.spec.shape)
        seen = min(position, (cache.window or position + 1) - 1)
        slots = np.arange(position - seen, position) % cache.slots
        found.append(rows[:, slots].tobytes())
    return found


def test_greedy_text_is_that_of_plain_decoding(runners: tuple[Runner, Runner]) -> None:
    plain, guessing = runners
    before = guessing.stats().speculation
    ends = plain.end_ids
    # Ids that some of the texts reach: random weights never choose the real one.
    free = [plain.generate(one, ignore_end=True).tokens for n, one in _prompts() if n % 12 == 0]
    plain.end_ids = guessing.end_ids = tuple(tokens[len(tokens) // 2] for tokens in free)
    reasons = set()
    for index, prompt in _prompts():
        options: dict[str, Any] = {"ignore_end": bool(index % 3)}
        if index % 5 == 4:
            options["repetition_penalty"] = 1.3
        wanted = plain.generate(prompt, **options)
        done = guessing.generate(prompt, **options, **SPECULATE)
        assert done.tokens == wanted.tokens, prompt
        assert (done.text, done.finish_reason) == (wanted.text, wanted.finish_reason)
        # What decode sees next is the same too, bit for bit.
        assert guessing.session.position == plain.session.position
        assert _caches(guessing) == _caches(plain)
        reasons.add(done.finish_reason)
    plain.end_ids = guessing.end_ids = ends
    assert reasons >= {FinishReason.CAPACITY, FinishReason.END}
    figures = guessing.stats().speculation
    accepted = figures.accepted - before.accepted
    assert 100 < accepted <= figures.drafted - before.drafted
    calls = [
        sum(count for name, count in runner.stats().calls.items() if name.startswith("decode"))
        for runner in (guessing, plain)
    ]
    assert calls[0] < calls[1]


def test_sampled_text_is_that_of_plain_decoding_with_the_same_seed(
    runners: tuple[Runner, Runner],
) -> None:
    plain, guessing = runners
    differing = set()
    for seed in range(25):
        options: dict[str, Any] = {"temperature": 0.7, "top_k": 8, "seed": seed}
        prompt = [1, 2, 3, 4] * 5
        wanted = plain.generate(prompt, 40, **options)
        assert guessing.generate(prompt, 40, **options, **SPECULATE).tokens == wanted.tokens
        differing.add(wanted.tokens)
    assert len(differing) > 20


def test_limits_stop_strings_and_draft_tokens(runners: tuple[Runner, Runner]) -> None:
    plain, guessing = runners
    prompt = [7, 8, 9] * 6
    text = plain.generate(prompt, 40, ignore_end=True).text
    middle = text[len(text) // 2 :][:2]
    for options in (
        {"max_new_tokens": 1},
        {"max_new_tokens": 17},
        {"max_new_tokens": 40, "stop": middle},
        {"max_new_tokens": 40, "stop": [middle, text[3:5]]},
    ):
        wanted = plain.generate(prompt, ignore_end=True, **options)  # type: ignore[arg-type]
        for drafts in (1, 2, STEP - 1):
            done = guessing.generate(
                prompt,
                ignore_end=True,
                draft_tokens=drafts,
                **options,  # type: ignore[arg-type]
                **SPECULATE,  # type: ignore[arg-type]
            )
            assert (done.tokens, done.text) == (wanted.tokens, wanted.text)
            assert done.finish_reason is wanted.finish_reason
            assert done.speculation is not None
            assert done.speculation.drafted <= drafts * done.speculation.verify_calls


def test_a_cancelled_stream_leaves_the_session_where_the_text_is(
    runners: tuple[Runner, Runner],
) -> None:
    _, guessing = runners
    stream = guessing.stream([5, 6] * 10, 40, ignore_end=True, **SPECULATE)
    for _ in range(4):
        next(stream)
    stream.close()
    taken = len(stream.generation.tokens)
    # The newest token is chosen, but no step was taken with it.
    assert guessing.session.position == 20 + taken - 1
    again = guessing.generate(
        [5, 6] * 10 + list(stream.generation.tokens), 10, ignore_end=True, reuse=True, **SPECULATE
    )
    assert again.reused_tokens == 20 + taken - 1
    whole = guessing.generate([5, 6] * 10, taken + 10, ignore_end=True)
    assert whole.tokens == stream.generation.tokens + again.tokens


def test_the_proof_forgets_what_was_held_and_is_in_no_figure(artifact: Path) -> None:
    with staticlm.load(artifact) as runner:
        runner.generate([1, 2, 3], 4)
        calls = runner.stats().calls
        again = runner.generate([1, 2, 3, 4], 1, reuse=True, **SPECULATE)
        assert again.reused_tokens == 0
        prefill = "prefill_to_0"
        assert runner.stats().calls == {**calls, prefill: calls[prefill] + 1}


def test_guesses_of_a_draft_model_give_the_text_of_plain_decoding(
    runners: tuple[Runner, Runner], artifact: Path, driver_name: str
) -> None:
    plain, guessing = runners
    with staticlm.load(artifact, driver=driver_name) as small:
        options: dict[str, Any] = {"speculate": "draft-model", "draft_model": small}
        shares = []
        for index, prompt in enumerate(one for n, one in _prompts() if n % 6 == 0):
            sampled: dict[str, Any] = {"temperature": 1.5, "seed": index} if index % 2 else {}
            wanted = plain.generate(prompt, ignore_end=True, **sampled)
            done = guessing.generate(prompt, ignore_end=True, **sampled, **options)
            assert done.tokens == wanted.tokens
            assert _caches(guessing) == _caches(plain)
            assert done.speculation is not None
            if done.speculation.drafted and not sampled:
                shares.append(done.speculation.accepted / done.speculation.drafted)
        # The same model guesses greedily what it will say greedily, but for rounding.
        assert np.mean(shares) > 0.8


def test_a_draft_model_goes_with_its_option_and_its_vocabulary(
    runners: tuple[Runner, Runner], tmp_path: Path
) -> None:
    _, guessing = runners
    other = Toy(capacity=64, steps=(16,), vocab=300, eos=257)
    path = write_artifact(tmp_path / "other", other)
    (path / "config.json").write_text("{}")
    with staticlm.load(path, tokenizer=None) as small:
        for options in (
            {"speculate": "draft-model"},
            {"speculate": "draft-model", "draft_model": guessing},
            {"speculate": "draft-model", "draft_model": str(path)},
            {"speculate": "prompt-lookup", "draft_model": small},
            {"draft_model": small},
            {"speculate": "draft-model", "draft_model": small},
        ):
            with pytest.raises(UsageError) as caught:
                guessing.generate([1, 2], 2, **options)
            assert caught.value.code is Code.USAGE
        assert "another vocabulary" in str(caught.value)


def test_guesses_go_on_as_the_text_did_last_time() -> None:
    lookup = PromptLookup([1, 2, 3, 4, 9, 1, 2, 3, 5, 6, 7, 1, 2, 3])
    assert lookup.draft(2) == [5, 6]
    lookup.add(8)
    assert lookup.draft(4) == []
    for token in (4, 9):
        lookup.add(token)
    assert lookup.draft(3) == [1, 2, 3]


def test_guesses_repeat_a_text_that_repeats() -> None:
    assert PromptLookup([4, 5, 4, 5, 4]).draft(5) == [5, 4, 5, 4, 5]
    assert PromptLookup([3, 3, 3]).draft(3) == [3, 3, 3]
    assert PromptLookup([3]).draft(3) == PromptLookup([]).draft(3) == []


def _verifying(**changes: Any) -> Contract:
    made = contract(48, (8,), window=changes.pop("window", None))
    verify = dataclasses.replace(
        made.prefills[0],
        name="verify",
        role=MethodRole.VERIFY,
        logits_rows=LogitsRows.ALL,
        attention="stepwise-split",
    )
    return dataclasses.replace(
        made, methods=(*made.methods, dataclasses.replace(verify, **changes))
    )


def test_drafts_fill_the_verify_method() -> None:
    method, drafts = verify_method(_verifying(), "prompt-lookup", None)
    assert (method.name, drafts) == ("verify", 7)
    assert verify_method(_verifying(window=6), "prompt-lookup", 3)[1] == 3


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"role": MethodRole.PREFILL, "step": 9}, "has no method that verifies"),
        ({"attention": "split"}, "attention mode split"),
        ({"attention": ""}, "attention mode unknown"),
        ({"logits_rows": LogitsRows.LAST}, "all rows"),
        ({"window": 6, "step": 9}, "cannot be rolled back"),
    ],
)
def test_programs_that_cannot_are_refused_by_name(changes: dict[str, Any], part: str) -> None:
    made = _verifying(**changes)
    with pytest.raises(RunnerError) as caught:
        verify_method(made, "prompt-lookup", None)
    assert caught.value.code is Code.PROGRAM_UNSUPPORTED
    assert part in str(caught.value)
    assert CacheKind.SLIDING not in {c.kind for c in made.caches} or "window" in changes


@pytest.mark.parametrize("drafts", [0, 8, -1, True, 2.0])
def test_draft_tokens_that_do_not_fit_are_refused(drafts: Any) -> None:
    with pytest.raises(UsageError, match="1 to 7"):
        verify_method(_verifying(), "prompt-lookup", drafts)


def test_options_are_refused_before_anything_runs(runners: tuple[Runner, Runner]) -> None:
    _, guessing = runners
    calls = guessing.stats().calls
    for options in ({"speculate": "oracle"}, {"draft_tokens": 2}):
        with pytest.raises(UsageError):
            guessing.generate([1], 2, **options)
    assert guessing.stats().calls == calls


def test_a_program_without_a_verify_method_is_refused(
    tmp_path: Path, cli_here: Any, driver_name: str
) -> None:
    toy = write_artifact(tmp_path / "toy")
    done = cli_here(
        "generate", toy, "--prompt", "x", "--driver", driver_name, "--speculate", "prompt-lookup"
    )
    assert done.returncode == 2
    assert "program-unsupported" in done.stderr
    assert "--verify-length" in done.stderr


def test_rows_that_round_otherwise_are_found(artifact: Path, driver_name: str) -> None:
    # A prefill method of all rows sums in another order; it stands for kernels that do.
    with staticlm.load(artifact, driver=driver_name) as runner:
        session = runner.session
        verify = next(m for m in runner.contract.methods if m.role is MethodRole.VERIFY)
        prove(session, verify)
        wrong = _Perturbed(session)
        with pytest.raises(RunnerError, match="decode computes"):
            prove(wrong, verify)  # type: ignore[arg-type]
        assert session.position == 0


class _Perturbed:
    """A session whose verify calls are off by one bit of one logit."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def verify(self, *arguments: Any) -> Any:
        rows = self._session.verify(*arguments)
        rows[-1, 3] = np.nextafter(rows[-1, 3], np.float32(np.inf))
        return rows


def test_session_verify_checks_before_it_runs(artifact: Path) -> None:
    with staticlm.load(artifact) as runner:
        session = runner.session
        verify = next(m for m in runner.contract.methods if m.role is MethodRole.VERIFY)
        session.prefill([1] * (CAPACITY - STEP + 1))
        for tokens, code in (
            ([1] * (STEP + 1), Code.CAPACITY_EXCEEDED),
            ([1], Code.CAPACITY_EXCEEDED),
            ([], Code.TOKEN_INVALID),
            ([BYTE_TOY.vocab], Code.TOKEN_INVALID),
        ):
            with pytest.raises(StaticLMError) as caught:
                session.verify(verify, tokens)
            assert caught.value.code is code
        assert session.position == CAPACITY - STEP + 1
        session.reset()
        with pytest.raises(RunnerError) as caught:
            session.verify(verify, [1] * (STEP + 1))
        assert caught.value.code is Code.TOKEN_INVALID
        assert session.position == 0


def test_settle_after_an_error_leaves_the_error(artifact: Path) -> None:
    with staticlm.load(artifact) as runner:
        method, drafts = verify_method(runner.contract, "prompt-lookup", None)
        runner.session.prefill([1, 2, 1, 2, 1])
        guess = Speculation(runner.session, method, drafts, PromptLookup([1, 2, 1, 2, 1]), 5)
        guess.step(2)
        assert runner.session.position == 5 + STEP
        guess.settle()
        assert runner.session.position == 6
        runner.session.close()
        guess.settle()


def test_generate_reports_what_was_guessed(artifact: Path, cli_here: Any) -> None:
    arguments = ("generate", artifact, "--prompt", "abcabcabcabc", "--ignore-end", "--json")
    plain = json.loads(cli_here(*arguments).stdout)
    guessed = json.loads(cli_here(*arguments, "--speculate", "prompt-lookup").stdout)
    assert guessed["tokens"] == plain["tokens"]
    assert plain["speculation"] is None
    assert guessed["speculation"]["verify_calls"] > 0
