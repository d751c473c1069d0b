"""The plain ExecuTorch text contract: tokens and positions in, logits out, caches inside the program.

What ExecuTorch's own `export_llm` and optimum-executorch write. The facts are constant methods with
ExecuTorch's names; whether the second input is a start position or one position per row is told by
its shape. Contract names and their meaning: ExecuTorch's `extension/llm/runner` constants.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from staticlm.contract.dialects import EXECUTORCH, OPTIMUM, read_dialect
from staticlm.contract.facts import (
    FLOAT_DTYPES,
    Contract,
    LogitsRows,
    Method,
    MethodRole,
    Role,
    Slot,
    TensorSpec,
)
from staticlm.contract.program import MethodFacts, ProgramFacts, TensorFacts
from staticlm.errors import Code, ContractError, ProgramError, RunnerError
from staticlm.runtime.buffers import Buffer, BufferAllocator, allocate, free
from staticlm.runtime.driver import BoundMethod, LoadedProgram
from staticlm.runtime.io_managers.base import BufferStats, IOStats, Logits, as_float32
from staticlm.runtime.plan import Call
from staticlm.runtime.shared_program import SharedProgram

LABEL = "text_llm"
METHOD = "forward"


def recognizes(facts: ProgramFacts) -> bool:
    """Whether a program without a label carries ExecuTorch's text metadata."""
    return METHOD in facts.methods and read_dialect(facts).name in (EXECUTORCH, OPTIMUM)


def create(
    facts: ProgramFacts, program: SharedProgram, allocator: BufferAllocator
) -> TextLLMManager:
    """Read and check the facts.

    Raises:
        ContractError: Metadata that is needed is absent or malformed, or the method is another.
        ProgramError: The program keeps no cache (`PROGRAM_UNSUPPORTED`).
    """
    return TextLLMManager(read_text_llm(facts), program, allocator)


def read_text_llm(facts: ProgramFacts) -> Contract:
    """The contract of a stock text program.

    The decode method is `forward` with one token. A program of dynamic shape takes any number of
    tokens up to its bound, so that it has a prefill step too, and no row of it is ever padding.
    """
    constants = facts.constants
    if constants.get("use_kv_cache") is not True:
        raise ProgramError(
            Code.PROGRAM_UNSUPPORTED,
            f"{facts.path} has no KV cache",
            found=f"use_kv_cache = {constants.get('use_kv_cache')!r}",
            expected=True,
            remedy="Export it with a KV cache.",
        )
    # optimum-executorch states the capacity under the name that ExecuTorch uses for the step.
    optimum = read_dialect(facts).name == OPTIMUM and "get_max_context_len" not in constants
    capacity = _positive(constants, "get_max_seq_len" if optimum else "get_max_context_len")
    longest = _positive(constants, "get_max_seq_len")
    vocab = _positive(constants, "get_vocab_size")
    method = facts.methods.get(METHOD)
    if method is None:
        raise ContractError(
            Code.METHOD_MISSING,
            f"method {METHOD!r}",
            found=", ".join(sorted(facts.methods)),
            expected=METHOD,
        )
    tokens, positions, logits = _signature(method, vocab)
    last_only = len(logits.shape) == 2
    rows = LogitsRows.LAST if last_only else LogitsRows.ALL
    steps = [(MethodRole.DECODE, 1)]
    step = min(longest, capacity, tokens.shape[1])
    if tokens.dynamic and step > 1:
        steps.append((MethodRole.PREFILL, step))
    elif tokens.shape[1] != 1:
        raise ProgramError(
            Code.PROGRAM_UNSUPPORTED,
            f"{facts.path} takes a fixed chunk and has no method for one token",
            found=f"tokens {list(tokens.shape)}",
            expected="tokens [1, 1], or a dynamic shape",
            remedy="Export it with staticlm, or with a dynamic shape.",
        )
    return Contract(
        label=LABEL,
        version=1,
        max_context_len=capacity,
        vocab_size=vocab,
        methods=tuple(
            _method(role, n, rows if n > 1 else LogitsRows.LAST, positions, logits, vocab)
            for role, n in steps
        ),
        caches=(),
        bos_id=_token_ids(constants, "get_bos_id", vocab)[0] if "get_bos_id" in constants else None,
        eos_ids=tuple(
            dict.fromkeys(
                one
                for key in ("get_eos_ids", "get_eos_id")
                if key in constants
                for one in _token_ids(constants, key, vocab)
            )
        ),
    )


def _method(
    role: MethodRole,
    step: int,
    rows: LogitsRows,
    positions: TensorFacts,
    logits: TensorFacts,
    vocab: int,
) -> Method:
    each = Role.POSITIONS if positions.dynamic or positions.shape[0] > 1 else Role.START
    width = step if each is Role.POSITIONS else 1
    shape = (1, step if rows is LogitsRows.ALL else 1, vocab)
    return Method(
        name=METHOD,
        role=role,
        step=step,
        logits_rows=rows,
        inputs=(
            Slot(0, Role.TOKENS, TensorSpec("int64", (1, step))),
            Slot(1, each, TensorSpec("int64", (width,))),
        ),
        outputs=(Slot(0, Role.LOGITS, TensorSpec(logits.dtype, shape)),),
    )


def _signature(method: MethodFacts, vocab: int) -> tuple[TensorFacts, TensorFacts, TensorFacts]:
    """Tokens, positions and logits of the method."""
    where = f"method {method.name!r}"
    if len(method.inputs) != 2 or len(method.outputs) != 1:
        raise _mismatch(
            where,
            f"{len(method.inputs)} inputs and {len(method.outputs)} outputs",
            "tokens and positions, and logits",
        )
    tokens, positions, logits = method.inputs[0], method.inputs[1], method.outputs[0]
    if tokens is None or tokens.dtype != "int64" or len(tokens.shape) != 2 or tokens.shape[0] != 1:
        raise _mismatch(f"{where}, input 0 (tokens)", _show(tokens), "int64 [1, step]")
    if positions is None or positions.dtype != "int64" or len(positions.shape) != 1:
        raise _mismatch(f"{where}, input 1 (positions)", _show(positions), "int64 [1] or [step]")
    if positions.shape[0] not in (1, tokens.shape[1]):
        raise _mismatch(
            f"{where}, input 1 (positions)", _show(positions), f"int64 [1] or [{tokens.shape[1]}]"
        )
    if (
        logits is None
        or logits.dtype not in FLOAT_DTYPES
        or logits.shape[0] != 1
        or logits.shape[-1] != vocab
        or len(logits.shape) not in (2, 3)
    ):
        raise _mismatch(
            f"{where}, output 0 (logits)", _show(logits), f"[1, {vocab}] or [1, step, {vocab}]"
        )
    return tokens, positions, logits


def _show(tensor: TensorFacts | None) -> str:
    return "not a tensor" if tensor is None else f"{tensor.dtype}{list(tensor.shape)}"


def _mismatch(what: str, found: object, expected: object) -> ContractError:
    return ContractError(Code.SLOT_MISMATCH, what, found=found, expected=expected)


def _positive(constants: Mapping[str, object], key: str) -> int:
    value = constants.get(key)
    if value is None:
        raise ContractError(
            Code.METADATA_MISSING, f"the program lacks {key}", expected="a positive integer"
        )
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        raise ContractError(
            Code.METADATA_INVALID, key, found=repr(value)[:80], expected="a positive integer"
        )
    return value


def _token_ids(constants: Mapping[str, object], key: str, vocab: int) -> tuple[int, ...]:
    value = constants[key]
    ids = value if isinstance(value, (tuple, list)) else (value,)
    for one in ids:
        if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one < vocab:
            raise ContractError(
                Code.METADATA_INVALID,
                key,
                found=repr(one)[:80],
                expected=f"token ids from 0 to {vocab - 1}",
            )
    return tuple(ids)


class TextLLMManager:
    """One session over a program that keeps its caches inside.

    The caches live in the method's arena, which the stock bindings share among all methods of an
    open program: every session therefore opens the program for itself.
    """

    def __init__(
        self, contract: Contract, program: SharedProgram, allocator: BufferAllocator
    ) -> None:
        self.contract = contract
        self._shared = program
        self._allocator = allocator
        self._calls: Counter[str] = Counter()
        self._execute_seconds = 0.0
        self._open = False
        self._closed = False
        self._program: LoadedProgram | None = None
        self._bound: BoundMethod | None = None
        self._rows = 0
        self._buffers: list[Buffer] = []
        self._views: list[npt.NDArray[np.int64]] = []
        self._methods = {method.step: method for method in contract.methods}

    def bind(self, name: str, method: BoundMethod) -> None:
        """Nothing is shared with other sessions."""

    def open(self) -> None:
        """Allocate the inputs; see `IOManager.open`."""
        if self._open:
            return
        self._check_open(closed_only=True)
        self._shared.join(self)
        self._open = True
        try:
            longest = self._methods[max(self._methods)]
            for slot in longest.inputs:
                buffer = allocate(self._allocator, slot.spec.nbytes)
                self._buffers.append(buffer)
                self._views.append(buffer.view(np.int64, (slot.spec.shape[-1],)))
        except BaseException:
            self.close()
            raise

    def prepare(self, method: str) -> None:
        """Load the method."""
        self._check_open()
        self._method()

    def step(self, call: Call, tokens: Sequence[int], all_rows: bool = False) -> Logits:
        """Execute one call; see `IOManager.step`."""
        self._check_open()
        facts = self._methods[call.step]
        if all_rows and facts.logits_rows is LogitsRows.LAST and call.valid > 1:
            raise RunnerError(
                Code.PROGRAM_UNSUPPORTED,
                "the program returns the logits of the last row only",
                remedy="Export it with the logits of all rows.",
            )
        rows = call.valid
        self._views[0][:rows] = tokens
        positions = self._views[1]
        positions[:rows] = np.arange(call.start, call.end)[: len(positions)]
        with self._shared.lock:
            bound = self._method()
            if rows != self._rows:
                self._rows = 0
                each = facts.inputs[1].role is Role.POSITIONS
                bound.bind_input(0, self._buffers[0], shape=(1, rows))
                bound.bind_input(1, self._buffers[1], shape=(rows if each else 1,))
                self._rows = rows
            begun = time.perf_counter()
            bound.execute()
            self._execute_seconds += time.perf_counter() - begun
            self._calls[f"{METHOD}[{'1' if rows == 1 else 'n'}]"] += 1
            output: npt.NDArray[Any] = bound.output(0)
            if output.ndim == 3:
                output = output[0]
            return as_float32(output[: rows if all_rows else None][-rows if all_rows else -1 :])

    def reset(self) -> None:
        """Nothing to do: positions restart at 0, and rows beyond a position are never seen."""
        self._check_open()

    def can_rollback(self, end: int, position: int) -> bool:
        """Not known: the program may hold windows that moved on."""
        return position == 0

    def stats(self) -> IOStats:
        """Figures so far."""
        names = [slot.role.value for slot in self.contract.decode.inputs]
        return IOStats(
            label=self.contract.label,
            version=self.contract.version,
            states="inside the program",
            calls=dict(self._calls),
            execute_seconds=self._execute_seconds,
            buffers=tuple(
                BufferStats(name, one.nbytes, one.kind)
                for name, one in zip(names, self._buffers, strict=False)
            ),
        )

    def close(self) -> None:
        """Close the method and the program, then free the buffers. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._program is not None:
            self._shared.close_own(self._program)
        self._program = self._bound = None
        self._shared.leave(self)
        buffers, self._buffers, self._views = self._buffers, [], []
        for buffer in buffers:
            free(buffer)

    def _method(self) -> BoundMethod:
        if self._bound is None:
            self._program, self._bound = self._shared.own_method(METHOD, self._allocator)
        return self._bound

    def _check_open(self, closed_only: bool = False) -> None:
        if self._closed or not (self._open or closed_only):
            state = "closed" if self._closed else "not open"
            raise RunnerError(Code.CLOSED, f"the session is {state}", remedy="Make a new one.")
