"""Text in and text out over a toy artifact, with the eager toy as the oracle."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.toy_artifacts import BYTE_TOY, write_artifact, write_texts
from tests.support.toy_programs import eager_logits

import staticlm
from staticlm.errors import (
    ArtifactError,
    CapacityError,
    Code,
    RunnerError,
    StaticLMError,
    UsageError,
)
from staticlm.runtime.generation import FinishReason
from staticlm.runtime.runner import Runner
from staticlm.runtime.text import Tokenizer


@pytest.fixture(scope="session")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact directory around a toy."""
    return write_artifact(tmp_path_factory.mktemp("artifact") / "toy")


@pytest.fixture(scope="module")
def shared_runner(artifact: Path, driver_name: str) -> Iterator[Runner]:
    with staticlm.load(artifact, driver=driver_name) as runner:
        yield runner


@pytest.fixture
def runner(shared_runner: Runner) -> Runner:
    """A runner as good as new."""
    shared_runner.reset()
    return shared_runner


def greedy(prompt: list[int], count: int) -> list[int]:
    """What the eager model would write, end tokens ignored."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(np.argmax(eager_logits(BYTE_TOY, tokens)[-1].numpy())))
    return tokens[len(prompt) :]


def test_greedy_tokens_equal_eager(runner: Runner) -> None:
    prompt = list(b"Hello, world! Chunked?")
    done = runner.generate(prompt, 20, ignore_end=True)
    assert list(done.tokens) == greedy(prompt, 20)
    assert (done.prompt_tokens, done.finish_reason) == (22, FinishReason.LENGTH)
    assert runner.tokenizer is not None
    assert done.text == runner.tokenizer.decode(done.tokens)


def test_stream_joins_to_generate_and_the_second_run_is_the_same(runner: Runner) -> None:
    options: dict[str, Any] = {"temperature": 1.5, "seed": 3, "ignore_end": True}
    stream = runner.stream("Hi", 30, **options)
    pieces = list(stream)
    assert len(pieces) > 2
    done = runner.generate("Hi", 30, **options)
    assert "".join(pieces) == done.text == stream.generation.text
    assert stream.generation.tokens == done.tokens
    assert runner.generate("Hi", 30, **{**options, "seed": 4}).tokens != done.tokens


def test_it_goes_on_to_the_context_length(runner: Runner) -> None:
    done = runner.generate(list(range(50)), ignore_end=True)
    assert done.finish_reason is FinishReason.CAPACITY
    assert len(done.tokens) == BYTE_TOY.capacity - 50
    assert list(done.tokens) == greedy(list(range(50)), 14)


def test_end_token_ends_and_is_not_in_the_text(runner: Runner) -> None:
    prompt = list(b"Some text")
    free = runner.generate(prompt, 25, ignore_end=True)
    runner.end_ids = (*runner.end_ids, free.tokens[3])
    try:
        done = runner.generate(prompt, 25)
    finally:
        runner.end_ids = runner.end_ids[:-1]
    assert done.finish_reason is FinishReason.END
    assert done.tokens == free.tokens[: free.tokens.index(free.tokens[3]) + 1]
    assert done.text == runner.tokenizer.decode(done.tokens[:-1])  # type: ignore[union-attr]


def test_stop_string_cuts_the_text(runner: Runner) -> None:
    free = runner.generate("Another", 30, ignore_end=True, temperature=1.0, seed=1).text
    stop = free[4:6]
    done = runner.generate("Another", 30, ignore_end=True, temperature=1.0, seed=1, stop=stop)
    assert done.finish_reason is FinishReason.STOP
    assert done.text == free[: free.index(stop)]


def test_messages_go_through_the_template(runner: Runner) -> None:
    ids = runner.encode([{"role": "user", "content": "hé"}])
    assert ids[0] == 256
    assert runner.tokenizer is not None
    assert runner.tokenizer.decode(ids) == "[user]hé\n[assistant]"
    assert ids.count(257) == 1


def test_a_chat_reuses_what_the_caches_hold(runner: Runner) -> None:
    first = runner.generate(list(b"abcdef"), 6, ignore_end=True)
    longer = [*b"abcdef", *first.tokens, *b"xyz"]
    again = runner.generate(longer, 8, ignore_end=True, reuse=True)
    # The last generated token was never taken by the model.
    assert again.reused_tokens == 11
    assert runner.session.position == len(longer) + 7
    fresh = runner.generate(longer, 8, ignore_end=True)
    assert (fresh.reused_tokens, fresh.tokens) == (0, again.tokens)


def test_reuse_goes_back_to_the_common_beginning(runner: Runner) -> None:
    runner.generate(list(b"abcdef"), 2, ignore_end=True)
    done = runner.generate(list(b"abcxyz"), 5, ignore_end=True, reuse=True)
    assert done.reused_tokens == 3
    assert list(done.tokens) == greedy(list(b"abcxyz"), 5)


def test_closing_a_stream_early_leaves_the_runner_usable(runner: Runner) -> None:
    stream = runner.stream("Hello", ignore_end=True, temperature=1.0, seed=5)
    next(stream)
    stream.close()
    assert stream.generation.finish_reason is FinishReason.CANCELLED
    assert list(stream) == []
    prompt = list(b"Next")
    assert list(runner.generate(prompt, 5, ignore_end=True).tokens) == greedy(prompt, 5)


def test_a_new_text_ends_an_unfinished_stream(runner: Runner) -> None:
    stream = runner.stream("Hello", ignore_end=True, temperature=1.0, seed=5)
    next(stream)
    runner.generate("other", 3)
    assert list(stream) == []


def test_siblings_share_the_program_and_no_text(runner: Runner) -> None:
    prompt = list(b"One text and")
    with runner.sibling() as other:
        stream = runner.stream(prompt, 12, ignore_end=True)
        other_tokens = other.generate(list(b"two"), 9, ignore_end=True).tokens
        for _ in stream:
            other.generate(list(b"noise"), 2, ignore_end=True)
        assert other.stats().methods_loaded == runner.stats().methods_loaded
    assert list(stream.generation.tokens) == greedy(prompt, 12)
    assert list(other_tokens) == greedy(list(b"two"), 9)


@pytest.mark.parametrize(
    ("prompt", "new", "parts"),
    [
        (60, 5, ("60 + 5 = 65", "at most 64", "at most 4 new tokens")),
        (64, None, ("request for 65", "at most 64 tokens")),
        (80, 1, ("request for 81", "at most 64 tokens", "context length of at least 81")),
    ],
)
def test_too_long_names_both_limits_and_executes_nothing(
    runner: Runner, prompt: int, new: int | None, parts: tuple[str, ...]
) -> None:
    before = runner.stats().calls
    with pytest.raises(CapacityError) as caught:
        runner.generate([1] * prompt, new)
    for part in parts:
        assert part in str(caught.value)
    assert runner.stats().calls == before


@pytest.mark.parametrize(
    ("prompt", "options", "code"),
    [
        ("", {}, Code.TOKEN_INVALID),
        ([], {}, Code.TOKEN_INVALID),
        ([1, 264], {}, Code.TOKEN_INVALID),
        (["a"], {}, Code.TOKEN_INVALID),
        (3, {}, Code.USAGE),
        ("a", {"max_new_tokens": 0}, Code.USAGE),
        ("a", {"max_new_tokens": True}, Code.USAGE),
        ("a", {"temprature": 1.0}, Code.USAGE),
        ("a", {"stop": [""]}, Code.USAGE),
        ("a", {"top_p": 0}, Code.SAMPLING_INVALID),
        ([{"role": "user"}], {}, Code.USAGE),
    ],
)
def test_wrong_requests(runner: Runner, prompt: Any, options: dict[str, Any], code: Code) -> None:
    with pytest.raises(StaticLMError) as caught:
        runner.generate(prompt, **options)
    assert caught.value.code is code


def test_stats(artifact: Path, driver_name: str) -> None:
    with staticlm.load(artifact, driver=driver_name) as runner:
        runner.generate("a" * 20, 6, ignore_end=True)
        stats = runner.stats()
    assert stats.calls == {"prefill_16": 2, "decode": 5}
    assert (stats.prefill_tokens, stats.decode_tokens) == (20, 5)
    assert stats.methods_loaded == ("decode", "prefill_16")
    assert stats.driver.startswith(driver_name)
    assert 0 < stats.execute_seconds < stats.prefill_seconds + stats.decode_seconds
    assert stats.cache_bytes == runner.contract.cache_bytes
    assert stats.prefill_tokens_per_second == pytest.approx(20 / stats.prefill_seconds)
    assert {one.allocator for one in stats.buffers} == {"host"}


def test_allocators_by_name(artifact: Path) -> None:
    with staticlm.load(artifact, allocator=["shm"]) as runner:
        runner.generate("ab", 2)
        assert {one.allocator for one in runner.stats().buffers} == {"shm"}


def test_ids_need_no_tokenizer_and_text_does(artifact: Path, tmp_path: Path) -> None:
    shutil.copy(artifact / "model.pte", tmp_path / "bare.pte")
    with staticlm.load(tmp_path / "bare.pte") as runner:
        prompt = list(b"abc")
        done = runner.generate(prompt, 4, ignore_end=True)
        assert (done.text, list(done.tokens)) == ("", greedy(prompt, 4))
        for use in (lambda: runner.generate("abc"), lambda: runner.stream(prompt)):
            with pytest.raises(ArtifactError) as caught:
                use()
            assert caught.value.code is Code.TOKENIZER_MISSING
    with staticlm.load(tmp_path / "bare.pte", tokenizer=artifact) as runner:
        done = runner.generate("abc", 4, ignore_end=True)
        assert list(done.tokens) == greedy(runner.encode("abc"), 4)


def changed(artifact: Path, target: Path, name: str, body: Any) -> Path:
    shutil.copytree(artifact, target)
    (target / name).write_text(json.dumps(body))
    return target


def test_a_tokenizer_of_another_vocabulary_is_refused_before_loading(
    artifact: Path, tmp_path: Path
) -> None:
    from tests.support.toy_artifacts import byte_tokenizer
    from tokenizers import AddedToken

    wide = byte_tokenizer()
    wide.add_tokens([AddedToken(f"<{i}>") for i in range(10)])
    target = tmp_path / "a"
    shutil.copytree(artifact, target)
    write_texts(target, wide)
    with pytest.raises(ArtifactError) as caught:
        staticlm.load(target)
    assert caught.value.code is Code.TOKENIZER_MISMATCH
    for part in ("tokenizer.json", "268 token ids", "264"):
        assert part in str(caught.value)


def test_another_tokenizer_of_the_same_size_is_refused_unless_it_was_named(
    artifact: Path, tmp_path: Path
) -> None:
    from tests.support.toy_artifacts import byte_tokenizer

    from staticlm.export.manifest import write_manifest

    target = tmp_path / "a"
    shutil.copytree(artifact, target)
    write_manifest(target, {})
    with staticlm.load(target) as runner:
        ids = runner.encode("abc")
    vocab = byte_tokenizer().get_vocab()
    turned = {token: (index + 1) % 256 for token, index in vocab.items() if index < 256}
    body = json.loads((target / "tokenizer.json").read_text())
    body["model"]["vocab"] = turned
    (target / "tokenizer.json").write_text(json.dumps(body))
    with pytest.raises(ArtifactError) as caught:
        staticlm.load(target)
    assert caught.value.code is Code.TOKENIZER_MISMATCH
    with staticlm.load(target, tokenizer=target) as runner:
        assert runner.encode("abc") == [one + 1 for one in ids]


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("config.json", {"vocab_size": 99}),
        ("generation_config.json", {"eos_token_id": 264}),
        ("generation_config.json", {"eos_token_id": [True]}),
    ],
)
def test_configurations_that_contradict_the_program(
    artifact: Path, tmp_path: Path, name: str, body: Any
) -> None:
    with pytest.raises(ArtifactError) as caught:
        staticlm.load(changed(artifact, tmp_path / "a", name, body))
    assert caught.value.code is Code.ARTIFACT_INVALID
    assert name in str(caught.value)


def test_the_union_of_end_ids_is_used(artifact: Path, tmp_path: Path) -> None:
    body = {"eos_token_id": [5, 257, 6]}
    with staticlm.load(changed(artifact, tmp_path / "a", "generation_config.json", body)) as runner:
        assert runner.end_ids == (257, 5, 6)


@pytest.mark.parametrize("threads", [0, True, 1.5, "2", 2**31, 2**64])
def test_threads(artifact: Path, threads: Any) -> None:
    with pytest.raises(StaticLMError) as caught:
        staticlm.load(artifact, threads=threads)
    assert caught.value.code is Code.USAGE


def test_use_after_close(artifact: Path) -> None:
    runner = staticlm.load(artifact)
    runner.close()
    runner.close()
    with pytest.raises(StaticLMError) as caught:
        runner.generate("a")
    assert caught.value.code is Code.CLOSED


@pytest.mark.parametrize(
    "prompt",
    [b"abc", bytearray(b"abc"), {97, 98}, {"role": "user", "content": "a"}, np.array(97), 97, None],
)
def test_what_only_looks_like_a_prompt(runner: Runner, prompt: Any) -> None:
    with pytest.raises(UsageError, match=type(prompt).__name__):
        runner.generate(prompt, 1)
    assert runner.session.position == 0


def test_undecoded_bytes_are_no_text(runner: Runner) -> None:
    with pytest.raises(UsageError, match=r"not Unicode text: found .* at character 1"):
        runner.generate("a\udcff", 1)


@pytest.mark.parametrize(
    "options",
    [{"stop": 5}, {"stop": ""}, {"stop": b"a"}, {"ignore_end": "no"}, {"reuse": 1}],
)
def test_options_of_another_type(runner: Runner, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        runner.generate(list(b"ab"), 1, **options)


def test_numpy_integers_are_integers(runner: Runner) -> None:
    done = runner.generate(np.array([97, 98]), np.int64(3), ignore_end=True)  # type: ignore[arg-type]
    assert list(done.tokens) == greedy([97, 98], 3)


@pytest.mark.parametrize(
    "arguments",
    [
        {"path": None},
        {"path": 5},
        {"path": b"a"},
        {"path": ""},
        {"path": "x" * 5000},
        {"tokenizer": 5},
        {"tokenizer": "x" * 5000},
        {"allocator": None},
    ],
)
def test_load_refuses_what_is_not_a_path_or_a_name(artifact: Path, arguments: Any) -> None:
    with pytest.raises(StaticLMError):
        staticlm.load(**{"path": artifact, **arguments})


def test_another_thread_is_refused_while_a_text_is_made(runner: Runner) -> None:
    prompt = list(b"Hello")
    seen: list[object] = []

    def intrude() -> None:
        for use in (lambda: runner.generate(prompt, 2), runner.reset, runner.close):
            try:
                seen.append(use())
            except RunnerError as error:
                seen.append(error.code)

    with runner.session.turn():
        other = threading.Thread(target=intrude)
        other.start()
        other.join()
        assert seen == [Code.DRIVER_UNSAFE] * 3
        assert list(runner.generate(prompt, 5, ignore_end=True).tokens) == greedy(prompt, 5)


def _recorded(directory: Path, **changes: object) -> Path:
    """An artifact whose manifest records its tokenizer."""
    path = write_artifact(directory)
    content = (path / "tokenizer.json").read_bytes()
    manifest = {
        "schema_version": 1,
        "export_format": "hf_static",
        "components": {},
        "tokenizer_size": 258,
        "tokenizer_sha256": hashlib.sha256(content).hexdigest(),
    }
    (path / "export.json").write_text(json.dumps(manifest | changes), encoding="utf-8")
    return path


def test_a_recorded_tokenizer_is_parsed_when_it_is_needed_and_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _recorded(tmp_path / "a")
    with staticlm.load(path, driver="stock") as runner:
        want = runner.generate("abc", 4).text
    parsed = []
    real = Tokenizer.__init__

    def counted(self: Tokenizer, *arguments: Any) -> None:
        parsed.append(arguments)
        real(self, *arguments)

    monkeypatch.setattr(Tokenizer, "__init__", counted)
    with staticlm.load(path, driver="stock") as runner:
        runner.session.prefill([1, 2, 3])
        assert parsed == []
        # Another export into the same directory does not reach a runner that is open.
        (path / "tokenizer.json").write_text("{}", encoding="utf-8")
        assert runner.generate("abc", 4).text == want
        assert len(parsed) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer_size": 265}, "265 token ids"),
        ({"tokenizer_sha256": "0" * 64}, "is not the tokenizer that the model was exported with"),
        ({"tokenizer_size": 257}, "257 token ids"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused_by_load(
    changes: dict[str, object], words: str, tmp_path: Path
) -> None:
    path = _recorded(tmp_path / "a", **changes)
    with pytest.raises(StaticLMError, match=words) as refused:
        staticlm.load(path, driver="stock")
    assert refused.value.code is Code.TOKENIZER_MISMATCH
