"""The fixed-shape methods against their source, in eager mode, before anything is traced.

It is cheap and catches what no configuration tells: an attention variant, a mask or a position rule
that the rewrite does not know. `staticlm validate` later proves the written program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from transformers import PreTrainedModel

from staticlm.contract import CacheKind, Contract, LogitsRows, MethodRole
from staticlm.errors import Code, ExportError
from staticlm.export.decoder import TORCH_DTYPES, StaticDecoder
from staticlm.export.quantize import is_quantised
from staticlm.export.static_form import use_static_form

_LONGEST = 1536
_TOLERANCE = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 2e-1}
# Activations are rounded to 8 bits: a difference in the last place may move one by a whole step, and a
# few logits far. What tells a fault from that is the difference of all logits together.
_QUANTISED = 5e-2


def check_against_source(
    model: PreTrainedModel, decoders: Mapping[str, StaticDecoder], contract: Contract
) -> float:
    """Drive the methods over random tokens and compare with the model's own forward.

    Chunks are full, short and padded, then single tokens; where a window is short enough they cross it.

    Args:
        model: The source model.
        decoders: The methods, by name.
        contract: Their contract.

    Returns:
        The largest logits difference, relative to the largest logit; with quantised weights the
        norm of all differences, relative to that of the logits.

    Raises:
        ExportError: `MODEL_UNSUPPORTED` when they differ by more than rounding.
    """
    runs = [_chunks(contract)] + [
        _early_chunks(contract, limit)
        for limit in sorted({m.max_start for m in contract.methods if m.max_start is not None})
    ]
    total = max(sum(count for _, count in chunks) for chunks in runs)
    generator = torch.Generator().manual_seed(20)
    tokens = torch.randint(0, contract.vocab_size, (1, total), generator=generator)
    difference = 0.0
    quantised = is_quantised(model)
    with torch.no_grad():
        want = model(input_ids=tokens, use_cache=False).logits[0].float()
        scale = want.abs().max().clamp(min=1e-6)
        with use_static_form(model):
            for chunks in runs:
                got, rows = drive_methods(decoders, contract, tokens, chunks)
                if quantised:
                    found = float(((got - want[rows]).norm() / want[rows].norm()).item())
                else:
                    found = float(((got - want[rows]).abs().max() / scale).item())
                # Not `max`: it would lose a NaN.
                difference = found if not found <= difference else difference
    dtypes = {_dtype_name(model), *(cache.spec.dtype for cache in contract.caches)}
    limit = max(_TOLERANCE[dtype] for dtype in dtypes)
    if quantised:
        limit = max(limit, _QUANTISED)
    what = "the logits" if quantised else "the largest logit"
    if not difference <= limit:
        raise ExportError(
            Code.MODEL_UNSUPPORTED,
            f"fixed-shape logits of {type(model).__name__} differ from the model's own",
            found=f"{difference:.2g} of {what} over {total} tokens",
            expected=f"at most {limit:g}",
            remedy="This model does something that the fixed-shape form does not reproduce.",
        )
    return difference


def _dtype_name(model: PreTrainedModel) -> str:
    return str(model.dtype).removeprefix("torch.")


def _chunks(contract: Contract) -> list[tuple[str, int]]:
    """Method and token count of every call."""
    capacity = contract.max_context_len
    prefill = contract.prefills[0]
    windows = [c.window for c in contract.caches if c.kind is CacheKind.SLIDING and c.window]
    crossing = min([w for w in windows if w < capacity], default=0)
    target = min(capacity, max(crossing + prefill.step + 3, prefill.step + 3), _LONGEST)
    chunks: list[tuple[str, int]] = []
    position = 0
    count = prefill.step
    while position + prefill.step <= capacity and position < target:
        take = max(1, min(count, target - position))
        chunks.append((prefill.name, take))
        position += take
        count = prefill.step // 2 + 1 if count == prefill.step else prefill.step
    for verify in contract.methods:
        if verify.role is not MethodRole.VERIFY or verify.max_start is not None:
            continue
        if position + verify.step <= capacity:
            chunks.append((verify.name, verify.step))
            position += verify.step
    for _ in range(min(3, capacity - position)):
        chunks.append((contract.decode.name, 1))
    return chunks


def _early_chunks(contract: Contract, limit: int) -> list[tuple[str, int]]:
    """Calls of the methods that read `limit` slots, as far as they may go."""
    methods = [m for m in contract.methods if m.max_start == limit]
    chunks: list[tuple[str, int]] = []
    position = 0
    # The longest last: a call may start at the limit itself and go beyond it.
    for method in sorted(methods, key=lambda m: (m.step, m.name)):
        last = limit if method.role is not MethodRole.VERIFY else limit - method.step
        if position <= last and position + method.step <= contract.max_context_len:
            chunks.append((method.name, max(1, method.step - 1)))
            position += chunks[-1][1]
    return chunks


def drive_methods(
    decoders: Mapping[str, StaticDecoder],
    contract: Contract,
    tokens: torch.Tensor,
    chunks: Sequence[tuple[str, int]],
    pad: int = 0,
) -> tuple[torch.Tensor, list[int]]:
    """Run tokens through methods in eager mode, from empty caches.

    Call it under `use_static_form`.

    Args:
        decoders: The methods, by name.
        contract: Their contract.
        tokens: int64 `[1, total]`.
        chunks: Method and number of real tokens of every call.
        pad: Token id that fills a short chunk.

    Returns:
        float32 logits `[rows, vocabulary]` and the position of every row.
    """
    caches = [torch.zeros(c.spec.shape, dtype=TORCH_DTYPES[c.spec.dtype]) for c in contract.caches]
    methods = {m.name: m for m in contract.methods}
    out: list[torch.Tensor] = []
    rows: list[int] = []
    position = 0
    for name, count in chunks:
        method = methods[name]
        padded = torch.full((1, method.step), pad, dtype=torch.int64)
        padded[:, :count] = tokens[:, position : position + count]
        inputs = [padded, torch.tensor([position])]
        if method.step > 1:
            inputs.append(torch.tensor([count]))
        logits = decoders[name](*inputs, *caches)[0].float()
        position += count
        if method.logits_rows is LogitsRows.ALL:
            out.append(logits[:count])
            rows.extend(range(position - count, position))
        else:
            out.append(logits)
            rows.append(position - 1)
    return torch.cat(out), rows
