"""What a user chooses about an export, checked before any model is read."""

from __future__ import annotations

from dataclasses import dataclass

from staticlm.contract import FLOAT_DTYPES, LogitsRows
from staticlm.errors import Code, ExportError

ATTENTION = ("auto", "split", "concat", "fused")

QUANTIZE = ("8da4w", "int8")
"""Schemes for linear weights."""

_WORTH_PREFIXES = 1024

QUANTIZE_EMBEDDING = (8, 4)
"""Bits of a quantised embedding table."""


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export.

    Args:
        context_length: Capacity of the caches in tokens.
        prefill_lengths: Tokens per call of each prefill method.
        dtype: Computation dtype of the model (`float32`, `float16`, `bfloat16`).
        cache_dtype: Dtype of the caches; the computation dtype when None.
        attention: `split`, `concat`, `fused` (one attention operator, for backends that have a kernel
            for it), or `auto` (chosen per backend and method).
        logits: Rows of logits of the prefill methods: `last` or `all`.
        verify_length: Tokens per call of a verify method with all rows of logits; None for no method.
        quantize: `8da4w` (int4 weights in groups of 32) or `int8` (int8 weights per channel), both
            with int8 dynamic activations; None keeps linear weights as they are.
        prefixes: Numbers of leading cache slots for which there are methods of their own, which read
            no more than that: the cost of a step follows the text, not the capacity. 0 gives prefill
            methods for the beginning of a text, which read no cache. None chooses by the capacity
            (`default_prefixes`) where the backend lets methods share weights.
        quantize_embedding: Bits of the embedding table, 8 or 4; None keeps it as it is.
    """

    context_length: int = 1024
    prefill_lengths: tuple[int, ...] = (128,)
    dtype: str = "float32"
    cache_dtype: str | None = None
    attention: str = "auto"
    logits: LogitsRows = LogitsRows.LAST
    verify_length: int | None = None
    quantize: str | None = None
    quantize_embedding: int | None = None
    prefixes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _integer("--context-length", self.context_length)
        if not self.prefill_lengths:
            raise _invalid("--prefill-length", "none", "at least one length")
        for length in self.prefill_lengths:
            _integer("--prefill-length", length, low=2)
            if length > self.context_length:
                raise _invalid(
                    f"context length {self.context_length} is shorter than prefill length {length}",
                    self.context_length,
                    f"at least {length}",
                )
        if len(set(self.prefill_lengths)) != len(self.prefill_lengths):
            raise _invalid("--prefill-length", list(self.prefill_lengths), "distinct lengths")
        if self.verify_length is not None:
            _integer("--verify-length", self.verify_length, low=2)
            if self.verify_length > self.context_length:
                raise _invalid(
                    "--verify-length", self.verify_length, f"at most {self.context_length}"
                )
            if self.attention == "fused":
                # Its rows must sum what a step sums, in the same order: the operator's own is unknown.
                raise _invalid(
                    "--attention of a program with --verify-length",
                    "fused",
                    "auto, split or concat",
                )
        prefixes = self.prefixes or ()
        for prefix in prefixes:
            _integer("--prefix", prefix, low=0)
            if prefix >= self.context_length:
                raise _invalid("--prefix", prefix, f"less than {self.context_length}")
        if len(set(prefixes)) != len(prefixes):
            raise _invalid("--prefix", list(prefixes), "distinct numbers")
        for name, dtype in (("--dtype", self.dtype), ("--cache-dtype", self.cache_dtype)):
            if dtype is not None and dtype not in FLOAT_DTYPES:
                raise _invalid(name, dtype, f"one of {', '.join(FLOAT_DTYPES)}")
        if self.attention not in ATTENTION:
            raise _invalid("--attention", self.attention, f"one of {', '.join(ATTENTION)}")
        if self.quantize is not None and self.quantize not in QUANTIZE:
            raise _invalid("--quantize", self.quantize, f"one of {', '.join(QUANTIZE)}")
        bits = self.quantize_embedding
        if bits is not None and (isinstance(bits, bool) or bits not in QUANTIZE_EMBEDDING):
            raise _invalid("--quantize-embedding", bits, "8 or 4")

    @property
    def longest_step(self) -> int:
        """Tokens per call of the longest method."""
        return max(*self.prefill_lengths, self.verify_length or 1)


def default_prefixes(context_length: int) -> tuple[int, ...]:
    """Prefixes worth methods of their own: 0, then 256 and its multiples by 4 up to a quarter.

    Reading the beginning of a cache copies it, which costs about as much as reading twice as many
    slots in place; beyond a quarter little is won. Below 1024 slots nothing is.
    """
    if context_length < _WORTH_PREFIXES:
        return ()
    found, prefix = [0], 256
    while 4 * prefix <= context_length:
        found.append(prefix)
        prefix *= 4
    return tuple(found)


def _invalid(what: str, found: object, expected: object) -> ExportError:
    return ExportError(
        Code.EXPORT_OPTION_INVALID,
        what,
        found=found,
        expected=expected,
        remedy="Change the option.",
    )


def _integer(name: str, value: object, low: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**31:
        raise _invalid(name, value, f"an integer from {low} to {2**31 - 1}")
