"""Contracts made up for tests of pure functions."""

from __future__ import annotations

from dataclasses import replace

from staticlm.contract import (
    LABEL,
    VERSION,
    Cache,
    CacheKind,
    Contract,
    LogitsRows,
    Method,
    MethodRole,
    Part,
    Role,
    Slot,
    TensorSpec,
)


def contract(
    capacity: int,
    steps: tuple[int, ...],
    vocab: int = 64,
    window: int | None = None,
    rows: LogitsRows = LogitsRows.LAST,
    prefixes: tuple[int, ...] = (),
) -> Contract:
    """A consistent one-layer contract with a decode method and prefill methods of `steps`.

    Each of them is there again for every `max_start` in `prefixes`.
    """
    slots = capacity
    if window is not None:
        slots = min(capacity, window - 1 + max((1, *steps)))
    spec = TensorSpec("float32", (1, slots, 2))
    kind = CacheKind.FULL if window is None else CacheKind.SLIDING
    caches = tuple(Cache(0, part, kind, window, spec) for part in (Part.KEY, Part.VALUE))
    methods = [_method("decode", MethodRole.DECODE, 1, vocab, spec, LogitsRows.LAST)]
    methods += [_method(f"prefill_{n}", MethodRole.PREFILL, n, vocab, spec, rows) for n in steps]
    methods += [
        replace(m, name=f"{m.name}_to_{limit}", max_start=limit)
        for limit in prefixes
        for m in tuple(methods)
        if m.max_start is None
    ]
    return Contract(LABEL, VERSION, capacity, vocab, tuple(methods), caches)


def _method(
    name: str, role: MethodRole, step: int, vocab: int, cache: TensorSpec, rows: LogitsRows
) -> Method:
    inputs = [
        Slot(0, Role.TOKENS, TensorSpec("int64", (1, step))),
        Slot(1, Role.START, TensorSpec("int64", (1,))),
    ]
    if step > 1:
        inputs.append(Slot(2, Role.LENGTH, TensorSpec("int64", (1,))))
    for index, part in enumerate((Role.KEY, Role.VALUE)):
        inputs.append(Slot(len(inputs), part, cache, index))
    shape = (1, step if rows is LogitsRows.ALL else 1, vocab)
    logits = Slot(0, Role.LOGITS, TensorSpec("float32", shape))
    return Method(name, role, step, rows, tuple(inputs), (logits,))
