"""Begin and end token ids as configurations state them: an integer, a list, or nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from staticlm.errors import Code, ExportError

_REMEDY = "Correct bos_token_id and eos_token_id in config.json or generation_config.json."


def end_ids(*values: object) -> tuple[int, ...]:
    """The union of all end ids, in order, without duplicates.

    Raises:
        ExportError: `MODEL_INVALID` for anything that is not a non-negative integer.
    """
    found: dict[int, None] = {}
    for value in values:
        for one in value if isinstance(value, (list, tuple)) else [value]:
            if one is not None:
                found[_checked(one)] = None
    return tuple(found)


def model_ids(model: Any, tokenizer: Any = None) -> tuple[int | None, tuple[int, ...]]:
    """The begin id of a transformers model, or None, and its end ids with those of a tokenizer.

    Raises:
        ExportError: `MODEL_INVALID` for anything that is not a non-negative integer.
    """
    config = model.config.get_text_config(decoder=True)
    generation = getattr(model, "generation_config", None)
    return first_id(getattr(config, "bos_token_id", None)), end_ids(
        getattr(generation, "eos_token_id", None),
        getattr(config, "eos_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
    )


def check_ids(ids: Iterable[int | None], vocab_size: int) -> None:
    """Refuse ids that the vocabulary has not: an artifact with one would not be run.

    Raises:
        ExportError: `MODEL_INVALID`.
    """
    for one in ids:
        if one is not None and one >= vocab_size:
            raise ExportError(
                Code.MODEL_INVALID,
                "a token id in the model's configuration",
                found=one,
                expected=f"less than {vocab_size}, the size of the vocabulary",
                remedy=_REMEDY,
            )


def first_id(value: object) -> int | None:
    """The first id of a value, or None."""
    ids = end_ids(value)
    return ids[0] if ids else None


def _checked(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ExportError(
            Code.MODEL_INVALID,
            "a token id in the model's configuration",
            found=repr(value),
            expected="a non-negative integer",
            remedy=_REMEDY,
        )
    return value
