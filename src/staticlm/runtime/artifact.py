"""An artifact directory: a program and what makes it useful."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from staticlm.errors import ArtifactError, Code, ProgramError, UsageError

PROGRAM = "model.pte"
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class Artifact:
    """The files of an artifact, read but not yet compared with its program.

    Args:
        program: The `.pte` file.
        config: `config.json`, empty when there is none.
        generation_config: `generation_config.json`, empty when there is none.
        tokenizer_config: `tokenizer_config.json`, empty when there is none.
        manifest: `export.json`, empty when there is none.
        tokenizer: The `tokenizer.json` file, or None.
        chat_template: Source of the chat template, or None.
        tokenizer_named: The user named the tokenizer instead of taking the artifact's own.
    """

    program: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    tokenizer_config: Mapping[str, Any]
    manifest: Mapping[str, Any]
    tokenizer: Path | None
    chat_template: str | None
    tokenizer_named: bool = False


def open_artifact(path: str | Path, tokenizer: str | Path | None = None) -> Artifact:
    """Read an artifact directory, or a program file.

    The files around a program belong to it only when it is named `model.pte`; for another `.pte`
    name the tokenizer.

    Args:
        path: A directory with `model.pte`, or a `.pte` file.
        tokenizer: A `tokenizer.json` or a directory that holds one, instead of the artifact's own.

    Raises:
        ProgramError: There is nothing at `path` (`PROGRAM_NOT_FOUND`).
        ArtifactError: It is not an artifact, a file in it is malformed, or no tokenizer is there.
    """
    path = _path("the path of the artifact", path)
    # Unlike those of Path, the questions of os.path have an answer for impossible names too.
    if not os.path.exists(path):
        raise ProgramError(
            Code.PROGRAM_NOT_FOUND,
            f"there is no artifact or program at {path}",
            expected=f"a directory with {PROGRAM}, or a .pte file",
            remedy="Check the path, or export the model first: staticlm export MODEL -o DIR.",
        )
    program = _program(path) if path.is_dir() else path
    if not program.is_file():
        raise ArtifactError(
            Code.ARTIFACT_INVALID,
            f"{path} is not an artifact",
            found=_listing(path) if path.is_dir() else "not a regular file",
            expected=f"a directory that holds {PROGRAM}",
            remedy="Export the model first: staticlm export MODEL -o DIR.",
        )
    own = program.parent if path.is_dir() or program.name == PROGRAM else None
    texts = (
        own
        if tokenizer is None
        else _tokenizer_directory(_path("the path of the tokenizer", tokenizer))
    )
    tokenizer_config = _json(texts, "tokenizer_config.json")
    return Artifact(
        program=program,
        config=_json(own, "config.json"),
        generation_config=_json(own, "generation_config.json"),
        tokenizer_config=tokenizer_config,
        manifest=_json(own, "export.json"),
        tokenizer=_tokenizer_file(texts, tokenizer),
        tokenizer_named=tokenizer is not None,
        chat_template=_chat_template(texts, tokenizer_config),
    )


def end_ids(
    artifact: Artifact,
    program_ids: tuple[int, ...],
    tokenizer_id: int | None,
    vocab_size: int,
) -> tuple[int, ...]:
    """All token ids that end a text: the union of every source that names some.

    Args:
        artifact: Its `config.json` and `generation_config.json` hold an id, a list, or nothing.
        program_ids: Ids that the program states.
        tokenizer_id: Id of the tokenizer's own end token, or None.
        vocab_size: Width of the logits.

    Returns:
        Distinct ids, in the order program, generation config, config, tokenizer.

    Raises:
        ArtifactError: An id is not an integer of the vocabulary.
    """
    sources: list[tuple[str, object]] = [
        ("the program's end ids", program_ids),
        ("eos_token_id of generation_config.json", artifact.generation_config.get("eos_token_id")),
        ("eos_token_id of config.json", artifact.config.get("eos_token_id")),
        ("the tokenizer's end token", tokenizer_id),
    ]
    found: dict[int, None] = {}
    for name, value in sources:
        for one in value if isinstance(value, (list, tuple)) else (value,):
            if one is None:
                continue
            if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one < vocab_size:
                raise ArtifactError(
                    Code.ARTIFACT_INVALID,
                    f"{name} cannot end a text",
                    found=repr(one)[:80],
                    expected=f"token ids from 0 to {vocab_size - 1}",
                    remedy="Correct the file, or export the model again.",
                )
            found[one] = None
    return tuple(found)


def _program(directory: Path) -> Path:
    """The program of a directory: `model.pte`, else the first file that its manifest names."""
    if (directory / PROGRAM).is_file():
        return directory / PROGRAM
    components = _json(directory, "export.json").get("components")
    for entry in components.values() if isinstance(components, dict) else ():
        name = entry.get("file") if isinstance(entry, dict) else None
        if isinstance(name, str) and (directory / Path(name).name).is_file():
            return directory / Path(name).name
    return directory / PROGRAM


def special_token(tokenizer_config: Mapping[str, Any], name: str) -> str | None:
    """A special token of `tokenizer_config.json`, which holds it as a string or as an object."""
    value = tokenizer_config.get(name)
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _tokenizer_directory(path: Path) -> Path:
    directory = path if os.path.isdir(path) else path.parent
    if not os.path.isfile(path / TOKENIZER if os.path.isdir(path) else path):
        raise ArtifactError(
            Code.TOKENIZER_MISSING,
            f"there is no tokenizer at {path}",
            expected=f"a {TOKENIZER}, or a directory that holds one",
        )
    return directory


def _tokenizer_file(directory: Path | None, named: str | Path | None) -> Path | None:
    if named is not None and not Path(named).is_dir():
        return Path(named)
    file = None if directory is None else directory / TOKENIZER
    return file if file is not None and file.is_file() else None


def _chat_template(directory: Path | None, tokenizer_config: Mapping[str, Any]) -> str | None:
    if directory is None:
        return None
    file = directory / "chat_template.jinja"
    if file.is_file():
        return _text(file)
    # Older checkpoints: a file of its own, or a key of the tokenizer's configuration.
    value = _json(directory, "chat_template.json").get(
        "chat_template", tokenizer_config.get("chat_template")
    )
    if isinstance(value, list):
        named = {one.get("name"): one.get("template") for one in value if isinstance(one, Mapping)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _path(what: str, path: object) -> Path:
    if isinstance(path, (str, os.PathLike)):
        name = os.fspath(path)
        if isinstance(name, str) and name:
            return Path(name)
    raise UsageError(
        Code.USAGE, what, found=repr(path)[:80], expected="a string that is not empty, or a Path"
    )


def _json(directory: Path | None, name: str) -> Mapping[str, Any]:
    file = None if directory is None else directory / name
    if file is None or not file.is_file():
        return {}
    try:
        body = json.loads(_text(file))
    except (ValueError, RecursionError) as error:
        raise ArtifactError(
            Code.ARTIFACT_INVALID, f"{file} is not JSON", found=str(error)[:200]
        ) from None
    if not isinstance(body, dict):
        raise ArtifactError(
            Code.ARTIFACT_INVALID,
            f"{file}",
            found=f"JSON {type(body).__name__}",
            expected="a JSON object",
        )
    return body


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(
            Code.ARTIFACT_INVALID, f"{file} cannot be read", found=str(error)[:200]
        ) from None


def _listing(directory: Path) -> str:
    names = sorted(one.name for one in directory.iterdir())
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "nothing in it"
