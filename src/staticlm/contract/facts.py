"""The facts of an I/O contract as frozen dataclasses.

A `Contract` says, for every method, what each input and output slot is, and for every cache where
it lives. Slots are bound by index, because ExecuTorch programs carry no tensor names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from math import prod

LABEL = "hf_static"
"""Label of our own contract."""

VERSION = 1
"""The version of the `hf_static` contract that this package writes and reads."""

DTYPE_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}
"""Bytes of one element, by dtype name (torch's names without the prefix)."""

FLOAT_DTYPES = ("float32", "float16", "bfloat16")
"""The cache and logits dtypes that version 1 admits."""


class Role(str, Enum):
    """What one input or output slot carries."""

    TOKENS = "tokens"
    """int64 `[1, step]`, token ids; rows from the valid length on are padding."""
    START = "start_position"
    """int64 `[1]`, absolute position of the first row."""
    LENGTH = "valid_length"
    """int64 `[1]`, how many rows are real, 1 to step."""
    POSITIONS = "positions"
    """int64 `[1, step]` or `[step]`, absolute position of every row (programs made elsewhere)."""
    MASK = "mask"
    """An attention mask (programs made elsewhere)."""
    KEY = "key_cache"
    VALUE = "value_cache"
    COUNTER = "counter"
    """A per-layer position counter: state, never the source of truth."""
    LOGITS = "logits"
    STATE = "state"
    """An optional returned state; its `cache` names the cache it must be bound to."""


class MethodRole(str, Enum):
    """What a runner uses a method for."""

    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"
    """A fixed chunk with logits of all rows, for speculative decoding."""


class CacheKind(str, Enum):
    """How a cache maps positions to slots."""

    FULL = "full"
    """Slot = position."""
    SLIDING = "sliding"
    """Slot = position modulo the number of slots; only the last `window` positions are visible."""


class Part(str, Enum):
    """Which of a layer's states a cache holds."""

    KEY = "key"
    VALUE = "value"
    COUNTER = "counter"


class LogitsRows(str, Enum):
    """Which rows of a chunk the logits output holds."""

    LAST = "last"
    """`[1, 1, vocabulary]`: the last valid row."""
    ALL = "all"
    """`[1, step, vocabulary]`; rows from the valid length on are meaningless."""


@dataclass(frozen=True)
class TensorSpec:
    """dtype (torch's name without the prefix) and exact shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the contiguous tensor."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Slot:
    """One input or output of a method.

    Args:
        index: Position among the method's inputs (or outputs).
        role: What it carries.
        spec: Its dtype and shape.
        cache: For key, value, counter and state slots: index into `Contract.caches`; else None.
    """

    index: int
    role: Role
    spec: TensorSpec
    cache: int | None = None


@dataclass(frozen=True)
class Cache:
    """One state tensor that the runner owns and every method reads and writes in place.

    Args:
        layer: Index of the decoder layer that owns it.
        part: key, value or counter.
        kind: full or sliding.
        window: Visible positions of a sliding cache, the current one included; None for a full one.
        spec: dtype and shape; `[kv heads, slots, head width]` in our own programs.
        layout: Names of the dimensions, outer to inner, for example `heads,slots,width`.
    """

    layer: int
    part: Part
    kind: CacheKind
    window: int | None
    spec: TensorSpec
    layout: str = "heads,slots,width"

    @property
    def slots(self) -> int:
        """How many positions the cache holds (1 for a counter)."""
        names = self.layout.split(",")
        return self.spec.shape[names.index("slots")] if "slots" in names else 1


@dataclass(frozen=True)
class Method:
    """One fixed-shape method of a program.

    Args:
        name: Its name in the program.
        role: What a runner uses it for.
        step: Tokens per call.
        logits_rows: Which rows the logits output holds.
        inputs: Every input slot in index order.
        outputs: Every output slot in index order.
        attention: The attention mode it was exported with. Information only, but for the prefix
            `stepwise-` of a verify method: its rows take the sums that decode takes.
        backend: The backend it was lowered to (information only).
        attention_why: Why that attention mode (information only).
        max_start: The largest start position that it may be called with: it reads only the slots of
            positions below that. None where any position will do.
    """

    name: str
    role: MethodRole
    step: int
    logits_rows: LogitsRows
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    attention: str = ""
    backend: str = ""
    max_start: int | None = None
    attention_why: str = ""

    def input(self, role: Role) -> Slot | None:
        """The one input with a role, or None."""
        return next((slot for slot in self.inputs if slot.role is role), None)

    @property
    def logits(self) -> Slot:
        """The logits output."""
        return next(slot for slot in self.outputs if slot.role is Role.LOGITS)


@dataclass(frozen=True)
class Contract:
    """Everything a runner needs to drive a program safely.

    Args:
        label: Contract label, `hf_static` for our own programs.
        version: Contract version.
        max_context_len: Capacity in tokens; positions run from 0 to this minus 1.
        vocab_size: Width of the logits; token ids run from 0 to this minus 1.
        methods: The fixed methods. Decode methods have step 1. Any number of prefill and of verify
            methods. Of each role and step exactly one may be called at any position; others with the
            same step have distinct values of `max_start`.
        caches: All caches of all layers.
        bos_id: Begin-of-text token id, or None.
        eos_ids: All token ids that end a text, without duplicates.
        producers: Package versions that made the program.
    """

    label: str
    version: int
    max_context_len: int
    vocab_size: int
    methods: tuple[Method, ...]
    caches: tuple[Cache, ...]
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    producers: dict[str, str] = field(default_factory=dict)

    @property
    def decode(self) -> Method:
        """The method that takes one token at any position."""
        return next(m for m in self.methods if m.role is MethodRole.DECODE and m.max_start is None)

    @property
    def prefills(self) -> tuple[Method, ...]:
        """The prefill methods that may be called at any position, longest step first."""
        found = [m for m in self.methods if m.role is MethodRole.PREFILL and m.max_start is None]
        return tuple(sorted(found, key=lambda m: -m.step))

    def at(self, method: Method, start: int) -> Method:
        """The method of the same role and step that reads least and may be called at a position."""
        fitting = [
            m
            for m in self.methods
            if m.role is method.role
            and m.step == method.step
            and m.max_start is not None
            and start <= m.max_start
        ]
        return min(fitting, key=lambda m: m.max_start or 0, default=method)

    @property
    def max_seq_len(self) -> int:
        """Tokens per call of the longest method (ExecuTorch's `get_max_seq_len`)."""
        return max(m.step for m in self.methods)

    @property
    def cache_bytes(self) -> int:
        """Bytes of all caches together."""
        return sum(c.spec.nbytes for c in self.caches)
