"""Text to tokens and back, without transformers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from staticlm.contract.facts import Contract
from staticlm.errors import ArtifactError, Code, UsageError
from staticlm.runtime.artifact import Artifact, special_token

REPLACEMENT = "\ufffd"
HELD_REPLACEMENTS = 3
"""An unfinished UTF-8 sequence has up to three bytes; byte-fallback decoders show each."""


class Tokenizer:
    """A `tokenizer.json` and what its configuration says of special tokens."""

    def __init__(self, artifact: Artifact, content: bytes | None = None) -> None:
        """Read the artifact's tokenizer.

        Args:
            artifact: The artifact.
            content: What the file held when it was looked at; None reads it now.

        Raises:
            ArtifactError: There is none, or it cannot be read.
        """
        if artifact.tokenizer is None:
            raise ArtifactError(
                Code.TOKENIZER_MISSING,
                f"there is no tokenizer for {artifact.program}",
                expected="tokenizer.json beside model.pte",
                remedy="Name one, or pass token ids instead of text.",
            )
        from tokenizers import Tokenizer as Fast

        self.path: Path = artifact.tokenizer
        try:
            self._fast: Any = Fast.from_buffer(content or artifact.tokenizer.read_bytes())
        except Exception as error:  # the library raises no narrower type
            raise ArtifactError(
                Code.ARTIFACT_INVALID,
                f"the tokenizer {artifact.tokenizer} cannot be read",
                found=str(error)[:200],
                expected="a tokenizer.json of the tokenizers library",
                remedy="Restore the file, name another one, or export the model again.",
            ) from None
        self.special = {
            name: token
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if (token := special_token(artifact.tokenizer_config, name)) is not None
        }
        ids = self._fast.get_vocab(with_added_tokens=True).values()
        self.size: int = max(ids, default=-1) + 1
        """One more than the largest token id."""

    @property
    def eos_id(self) -> int | None:
        """Id of the end token that the tokenizer's configuration names."""
        token = self.special.get("eos_token")
        return None if token is None else self.token_id(token)

    def token_id(self, token: str) -> int | None:
        """Id of a token, or None when the vocabulary lacks it."""
        found: int | None = self._fast.token_to_id(token)
        return found

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a text; `special` adds what belongs around one (a begin token).

        Raises:
            UsageError: The text holds what UTF-8 cannot, such as undecoded bytes.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UsageError(
                Code.USAGE,
                "the prompt is not Unicode text",
                found=f"{text[error.start]!r} at character {error.start}",
                expected="text without lone surrogates",
                remedy="Check the encoding of the input.",
            ) from None
        ids: list[int] = self._fast.encode(text, add_special_tokens=special).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        text: str = self._fast.decode(list(ids), skip_special_tokens=True)
        return text


def check_vocabulary(
    path: Path, size: int, vocab_size: int, needed: Sequence[int], recorded: object = None
) -> None:
    """Refuse a tokenizer that is not the program's.

    Args:
        path: The tokenizer's file.
        size: One more than its largest token id.
        vocab_size: Width of the program's logits. It may be padded beyond the tokenizer's ids.
        needed: Ids that the program itself names (begin and end tokens).
        recorded: Size of the tokenizer that the program was exported with, where it is recorded.

    Raises:
        ArtifactError: `TOKENIZER_MISMATCH` with the path and both sizes.
    """
    missing = [one for one in needed if one >= size]
    if size > vocab_size:
        expected = f"at most {vocab_size}, the width of the program's logits"
    elif missing:
        expected = f"more than {max(missing)}, an id that the program names"
    elif isinstance(recorded, int) and recorded != size:
        expected = f"{recorded}, as recorded when the program was exported"
    else:
        return
    raise ArtifactError(
        Code.TOKENIZER_MISMATCH,
        f"the tokenizer {path} does not belong to this program (vocabulary {vocab_size})",
        found=f"{size} token ids",
        expected=expected,
        remedy="Use the tokenizer of the model that was exported.",
    )


class Detokenizer:
    """Turns token ids into text piece by piece, never ending a piece inside a character.

    Args:
        decode: Text of token ids.
        context: The last tokens before the text, so that a decoder that strips the space before
            its first word does not strip one in the middle of a sentence.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(context)
        self._from = 0
        """First token that is decoded again: one piece back, for decoders that look behind."""
        self._whole = len(self._ids)
        """Tokens up to here are whole characters and were shown."""
        self._shown = len(decode(self._ids))
        """Characters shown of the text of the tokens from `_from` on."""

    def add(self, token: int) -> str:
        """The text that is certain after one more token; may be empty."""
        self._ids.append(token)
        return self._advance(final=False)

    def finish(self) -> str:
        """What was held back, as it is."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        text = self._decode(self._ids[self._from :])
        unsure = len(text) - len(text.rstrip(REPLACEMENT))
        held = 0 if final else min(unsure, HELD_REPLACEMENTS)
        piece = text[self._shown : len(text) - held]
        self._shown += len(piece)
        if piece and not unsure:
            self._from, self._whole = self._whole, len(self._ids)
            self._shown = len(self._decode(self._ids[self._from :]))
        return piece


class StopStrings:
    """Passes text on up to the first stop string, holding back what may become one.

    Raises:
        UsageError: A stop string is empty or not a string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not isinstance(stops, (str, Sequence)):
            raise UsageError(
                Code.USAGE, "stop", found=repr(stops)[:80], expected="a string or several"
            )
        self._stops = (stops,) if isinstance(stops, str) else tuple(stops)
        for stop in self._stops:
            if not isinstance(stop, str) or not stop:
                raise UsageError(
                    Code.USAGE,
                    "a stop string",
                    found=repr(stop),
                    expected="a string that is not empty",
                )
        self._held = ""
        self.stopped = False
        self.any = bool(self._stops)

    def add(self, piece: str) -> str:
        """The text that is certain to lie before a stop string."""
        if self.stopped:
            return ""
        text = self._held + piece
        starts = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if starts:
            self.stopped = True
            self._held = ""
            return text[: min(starts)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back; no stop string came of it."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def check_files(artifact: Artifact, contract: Contract) -> bytes | None:
    """Compare the files beside a program with it, as far as that goes without parsing the tokenizer.

    Returns:
        The tokenizer's file, where it is the one that the model was exported with and its recorded size
        fits: it need not be parsed before a text needs it. None where that is not known.

    Raises:
        ArtifactError: The tokenizer, or `config.json`, belongs to another model.
    """
    if artifact.tokenizer is None:
        return None
    recorded = artifact.config.get("vocab_size")
    if isinstance(recorded, int) and recorded != contract.vocab_size:
        raise ArtifactError(
            Code.ARTIFACT_INVALID,
            f"config.json beside {artifact.program} is of another model",
            found=f"vocab_size {recorded}",
            expected=f"{contract.vocab_size}, the width of the program's logits",
            remedy="Export the model again.",
        )
    size = artifact.manifest.get("tokenizer_size")
    content = _same_file(artifact)
    if content is None or not isinstance(size, int):
        return None
    check_vocabulary(artifact.tokenizer, size, contract.vocab_size, _needed(contract))
    return content


def _needed(contract: Contract) -> list[int]:
    """Ids that the program itself names."""
    return [*contract.eos_ids, *(() if contract.bos_id is None else (contract.bos_id,))]


def check_tokenizer(tokenizer: Tokenizer, artifact: Artifact, contract: Contract) -> None:
    """Refuse a tokenizer whose vocabulary is not the program's.

    Raises:
        ArtifactError: `TOKENIZER_MISMATCH`.
    """
    recorded = artifact.manifest.get("tokenizer_size")
    check_vocabulary(
        tokenizer.path, tokenizer.size, contract.vocab_size, _needed(contract), recorded
    )


def _same_file(artifact: Artifact) -> bytes | None:
    """Another tokenizer of the same size makes nonsense of every text, and no id is out of range.

    One that the user named is taken as meant.
    """
    recorded = artifact.manifest.get("tokenizer_sha256")
    own = artifact.tokenizer
    if not isinstance(recorded, str) or own is None or artifact.tokenizer_named:
        return None
    try:
        content = own.read_bytes()
    except OSError as error:
        raise ArtifactError(
            Code.ARTIFACT_INVALID,
            f"the tokenizer {own} cannot be read",
            found=error.strerror or str(error),
            expected="the file that export.json records",
            remedy="Restore the file or its permissions, or export the model again.",
        ) from None
    found = hashlib.sha256(content).hexdigest()
    if found != recorded:
        raise ArtifactError(
            Code.TOKENIZER_MISMATCH,
            f"{own} is not the tokenizer that the model was exported with",
            found=f"sha256 {found[:12]}...",
            expected=f"{recorded[:12]}..., as export.json says",
            remedy="Restore the file, or name this one on purpose (tokenizer=..., --tokenizer).",
        )
    return content
