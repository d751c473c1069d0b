"""Opening artifact directories, and the union of end ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.toy_artifacts import byte_tokenizer, write_texts

from staticlm.errors import ArtifactError, Code, StaticLMError
from staticlm.runtime.artifact import Artifact, end_ids, open_artifact


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "artifact"
    path.mkdir()
    (path / "model.pte").write_bytes(b"")
    write_texts(path)
    return path


def test_all_parts_are_found(directory: Path) -> None:
    artifact = open_artifact(directory)
    assert artifact.program == directory / "model.pte"
    assert artifact.tokenizer == directory / "tokenizer.json"
    assert artifact.config["vocab_size"] == 264
    assert artifact.chat_template is not None
    assert artifact.chat_template.startswith("{{ bos_token }}")
    assert open_artifact(directory / "model.pte") == artifact


def test_files_around_a_program_of_another_name_are_not_its_own(directory: Path) -> None:
    other = (directory / "model.pte").rename(directory / "other.pte")
    artifact = open_artifact(other)
    assert (artifact.tokenizer, artifact.chat_template, artifact.config) == (None, None, {})
    named = open_artifact(other, tokenizer=directory)
    assert named.tokenizer == directory / "tokenizer.json"
    assert named.chat_template is not None
    assert open_artifact(other, directory / "tokenizer.json").tokenizer == named.tokenizer


@pytest.mark.parametrize("value", ["T", [{"name": "tools", "template": "x"},
                                         {"name": "default", "template": "T"}]])  # fmt: skip
def test_older_places_of_the_chat_template(directory: Path, value: Any) -> None:
    (directory / "chat_template.jinja").unlink()
    body = {"chat_template": value}
    (directory / "tokenizer_config.json").write_text(json.dumps(body))
    assert open_artifact(directory).chat_template == "T"
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": "older"}))
    assert open_artifact(directory).chat_template == "older"


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(StaticLMError) as caught:
        open_artifact(tmp_path / "absent")
    assert caught.value.code is Code.PROGRAM_NOT_FOUND
    assert "absent" in str(caught.value)


def test_a_directory_without_a_program_is_listed(directory: Path) -> None:
    (directory / "model.pte").unlink()
    with pytest.raises(ArtifactError) as caught:
        open_artifact(directory)
    assert caught.value.code is Code.ARTIFACT_INVALID
    assert "chat_template.jinja, config.json" in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[]", "\x80"])
def test_a_malformed_file_is_named(directory: Path, text: str) -> None:
    (directory / "generation_config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ArtifactError, match=r"generation_config\.json") as caught:
        open_artifact(directory)
    assert caught.value.code is Code.ARTIFACT_INVALID


def test_a_named_tokenizer_must_be_there(directory: Path, tmp_path: Path) -> None:
    for missing in (tmp_path / "no.json", tmp_path):
        with pytest.raises(ArtifactError) as caught:
            open_artifact(directory, tokenizer=missing)
        assert caught.value.code is Code.TOKENIZER_MISSING


def artifact(config: Any = None, generation: Any = None) -> Artifact:
    return Artifact(Path("m.pte"), {"eos_token_id": config}, {"eos_token_id": generation}, {}, {},
                    None, None)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "generation", "program", "tokenizer", "expected"),
    [
        (None, None, (), None, ()),
        (2, None, (), None, (2,)),
        (2, [3, 2, 3], (9,), 4, (9, 3, 2, 4)),
        ([0, None], 0, (0,), 0, (0,)),
    ],
)
def test_end_ids_are_the_union(
    config: Any, generation: Any, program: tuple[int, ...], tokenizer: Any, expected: Any
) -> None:
    assert end_ids(artifact(config, generation), program, tokenizer, 10) == expected


@pytest.mark.parametrize("bad", [True, 10, -1, "2", 2.0, [1, False], [[1]]])
def test_an_end_id_that_is_none_is_refused_with_its_source(bad: Any) -> None:
    with pytest.raises(ArtifactError, match=r"generation_config\.json") as caught:
        end_ids(artifact(1, bad), (), None, 10)
    assert caught.value.code is Code.ARTIFACT_INVALID
    assert "0 to 9" in str(caught.value)


def test_the_byte_tokenizer_of_these_tests_is_reversible() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.decode(tokenizer.encode("grüß 😀").ids) == "grüß 😀"
