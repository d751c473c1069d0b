"""Begin and end token ids as configurations state them: an integer, a list, or nothing."""

from __future__ import annotations

from staticlm.errors import Code, ExportError


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
            remedy="Correct bos_token_id and eos_token_id in config.json or generation_config.json.",
        )
    return value
