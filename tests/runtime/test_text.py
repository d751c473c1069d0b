"""Detokenising piece by piece, stop strings, and the check that a tokenizer belongs."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.toy_artifacts import byte_tokenizer, write_texts
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models

from staticlm.errors import ArtifactError, Code, UsageError
from staticlm.runtime.artifact import open_artifact
from staticlm.runtime.text import Detokenizer, StopStrings, Tokenizer, check_vocabulary

BYTES = byte_tokenizer()


def pieces(tokenizer: Fast, ids: list[int], context: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(lambda some: tokenizer.decode(list(some)), context or [])
    return [*(detokenizer.add(one) for one in ids), detokenizer.finish()]


@given(st.text(max_size=40))
def test_pieces_join_to_the_text_and_none_is_broken(text: str) -> None:
    ids = BYTES.encode(text).ids
    parts = pieces(BYTES, ids)
    assert "".join(parts) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in part for part in parts)


@given(st.lists(st.integers(0, 255), max_size=30))
def test_any_bytes_give_what_decoding_all_of_them_gives(ids: list[int]) -> None:
    assert "".join(pieces(BYTES, ids)) == BYTES.decode(ids)


def test_a_character_comes_with_its_last_byte() -> None:
    ids = BYTES.encode("a😀b").ids
    assert pieces(BYTES, ids) == ["a", "", "", "", "😀", "b", ""]


def test_an_unfinished_character_is_shown_at_the_end_only() -> None:
    ids = BYTES.encode("a😀").ids[:3]
    assert pieces(BYTES, ids) == ["a", "", "", "\ufffd"]


def spaced() -> Fast:
    vocab = {"▁the": 0, "▁cat": 1, "s": 2, "<0xE2>": 3, "<0x82>": 4, "<0xAC>": 5, "▁": 6}
    tokenizer = Fast(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    return tokenizer


def test_byte_fallback_holds_back_every_byte_of_a_character() -> None:
    assert pieces(spaced(), [0, 3, 4, 5, 1]) == ["the", "", "", "€", " cat", ""]


def test_the_first_space_is_kept_after_a_prompt_and_stripped_without() -> None:
    assert pieces(spaced(), [1, 2]) == ["cat", "s", ""]
    assert pieces(spaced(), [1, 2], context=[0]) == [" cat", "s", ""]


@pytest.mark.parametrize(
    ("stops", "parts", "out", "stopped"),
    [
        (["END"], ["a EN", "D b"], ["a ", ""], True),
        (["END"], ["a EN", "x"], ["a ", "ENx"], False),
        (["aab"], ["aa", "ab", "c"], ["", "a", ""], True),
        (["x", "bc"], ["abcx"], ["a"], True),
        (["\n\n"], ["a\n", "b\n", "\n"], ["a", "\nb", ""], True),
        ([], ["abc"], ["abc"], False),
        ("ab", ["xa", "b"], ["x", ""], True),
    ],
)
def test_stop_strings(stops: list[str], parts: list[str], out: list[str], stopped: bool) -> None:
    matcher = StopStrings(stops)
    assert [matcher.add(part) for part in parts] == out
    assert matcher.stopped is stopped


def test_what_was_held_back_comes_at_the_end() -> None:
    matcher = StopStrings(["END"])
    assert matcher.add("the EN") == "the "
    assert matcher.finish() == "EN"
    assert matcher.finish() == ""


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=3), max_size=3))
def test_stopping_does_not_depend_on_the_pieces(text: str, stops: list[str]) -> None:
    whole, single = StopStrings(stops), StopStrings(stops)
    expected = whole.add(text) + whole.finish()
    found = ""
    for letter in text:
        found += single.add(letter)
        if single.stopped:
            break
    assert found + single.finish() == expected or single.stopped
    if single.stopped:
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        assert len(found) < min(ends)
        assert text.startswith(found)


@pytest.mark.parametrize("stop", ["", 3, None])
def test_a_stop_string_is_a_string(stop: object) -> None:
    with pytest.raises(UsageError):
        StopStrings([stop])  # type: ignore[list-item]


def directory(path: Path) -> Path:
    path.mkdir()
    (path / "model.pte").write_bytes(b"")
    write_texts(path)
    return path


def test_tokenizer_reads_special_tokens_and_size(tmp_path: Path) -> None:
    tokenizer = Tokenizer(open_artifact(directory(tmp_path / "a")))
    assert tokenizer.size == 258
    assert tokenizer.eos_id == 257
    assert tokenizer.special == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.decode(tokenizer.encode("grüß</s>dich")) == "grüßdich"


@pytest.mark.parametrize(
    ("vocab", "needed", "recorded", "part"),
    [
        (257, [], None, "at most 257"),
        (300, [258], None, "more than 258"),
        (300, [257], 259, "259, as recorded"),
    ],
)
def test_another_models_tokenizer_is_refused_with_path_and_sizes(
    tmp_path: Path, vocab: int, needed: list[int], recorded: int | None, part: str
) -> None:
    tokenizer = Tokenizer(open_artifact(directory(tmp_path / "a")))
    with pytest.raises(ArtifactError) as caught:
        check_vocabulary(tokenizer.path, tokenizer.size, vocab, needed, recorded)
    assert caught.value.code is Code.TOKENIZER_MISMATCH
    for text in (str(tokenizer.path), "258 token ids", str(vocab), part):
        assert text in str(caught.value)


def test_a_padded_vocabulary_is_accepted(tmp_path: Path) -> None:
    tokenizer = Tokenizer(open_artifact(directory(tmp_path / "a")))
    check_vocabulary(tokenizer.path, tokenizer.size, 258, [257], 258)
    check_vocabulary(tokenizer.path, tokenizer.size, 320, [257])


def test_a_malformed_tokenizer(tmp_path: Path) -> None:
    path = directory(tmp_path / "a")
    (path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ArtifactError) as caught:
        Tokenizer(open_artifact(path))
    assert caught.value.code is Code.ARTIFACT_INVALID
    assert "tokenizer.json" in str(caught.value)
