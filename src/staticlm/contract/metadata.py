"""The contract as constant methods of a program: written at lowering, read by every runner.

Plain facts use ExecuTorch's own names, so that stock tools read our files; the layout of slots and
caches is one JSON string. `docs/contract/hf-static-v1.md` states every key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from staticlm.contract.facts import (
    DTYPE_BYTES,
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
from staticlm.contract.program import ProgramFacts
from staticlm.errors import Code, ContractError

KEY_LABEL = "get_io_contract"
KEY_VERSION = "get_io_contract_version"
KEY_LAYOUT = "get_io_layout"
KEY_STEP = "get_max_seq_len"
KEY_CAPACITY = "get_max_context_len"
KEY_VOCAB = "get_vocab_size"
KEY_BOS = "get_bos_id"
KEY_EOS = "get_eos_ids"
KEY_USE_CACHE = "use_kv_cache"
KEY_DYNAMIC = "enable_dynamic_shape"

INT32_MAX = 2**31 - 1
LABEL_MAX = 64
REEXPORT = "Export the model again with this version of staticlm."

_E = TypeVar("_E", CacheKind, LogitsRows, MethodRole, Part, Role)


def constant_methods(contract: Contract) -> dict[str, int | bool | str | list[int]]:
    """The constant methods that carry a contract, by name.

    `get_eos_ids` has one integer output per id (absent when there are none).
    """
    values: dict[str, int | bool | str | list[int]] = {
        KEY_LABEL: contract.label,
        KEY_VERSION: contract.version,
        KEY_LAYOUT: json.dumps(layout(contract), separators=(",", ":"), ensure_ascii=True),
        KEY_STEP: contract.max_seq_len,
        KEY_CAPACITY: contract.max_context_len,
        KEY_VOCAB: contract.vocab_size,
        KEY_USE_CACHE: True,
        KEY_DYNAMIC: False,
    }
    if contract.bos_id is not None:
        values[KEY_BOS] = contract.bos_id
    if contract.eos_ids:
        values[KEY_EOS] = list(contract.eos_ids)
    return values


def layout(contract: Contract) -> dict[str, Any]:
    """The JSON object of methods, slots, caches and producers."""
    return {
        "methods": [
            {
                "name": m.name,
                "role": m.role.value,
                "step": m.step,
                "logits_rows": m.logits_rows.value,
                "attention": m.attention,
                "backend": m.backend,
                **({} if m.max_start is None else {"max_start": m.max_start}),
                **({"attention_why": m.attention_why} if m.attention_why else {}),
                "inputs": [_slot_out(s) for s in m.inputs],
                "outputs": [_slot_out(s) for s in m.outputs],
            }
            for m in contract.methods
        ],
        "caches": [
            {
                "layer": c.layer,
                "part": c.part.value,
                "kind": c.kind.value,
                "window": c.window,
                "dtype": c.spec.dtype,
                "shape": list(c.spec.shape),
                "layout": c.layout,
            }
            for c in contract.caches
        ],
        "producers": dict(contract.producers),
    }


def _slot_out(slot: Slot) -> dict[str, Any]:
    out: dict[str, Any] = {
        "index": slot.index,
        "role": slot.role.value,
        "dtype": slot.spec.dtype,
        "shape": list(slot.spec.shape),
    }
    if slot.cache is not None:
        out["cache"] = slot.cache
    return out


def read_label(constants: Mapping[str, object]) -> tuple[str, int]:
    """Contract label and version of a program.

    Args:
        constants: Values of the program's constant methods.

    Returns:
        The label (1 to 64 printable ASCII characters) and the version (a positive integer).

    Raises:
        ContractError: The label or version is absent or malformed. Whether the label is registered
            is for the caller to say.
    """
    if KEY_LABEL not in constants:
        raise ContractError(
            Code.LABEL_MISSING,
            f"the program does not say which I/O contract it follows ({KEY_LABEL} is absent)",
            expected=f"a label such as {LABEL!r}",
            remedy="Export it with staticlm, or name the contract explicitly if you know it.",
        )
    label = constants[KEY_LABEL]
    ok = isinstance(label, str) and 0 < len(label) <= LABEL_MAX
    if not ok or not isinstance(label, str) or not (label.isascii() and label.isprintable()):
        raise ContractError(
            Code.LABEL_MALFORMED,
            f"the contract label {KEY_LABEL}",
            found=_show(label),
            expected=f"1 to {LABEL_MAX} printable ASCII characters",
            remedy=REEXPORT,
        )
    version = constants.get(KEY_VERSION)
    if version is None:
        raise ContractError(
            Code.VERSION_MALFORMED,
            f"the contract version {KEY_VERSION}",
            found="nothing",
            expected="a positive integer",
            remedy=REEXPORT,
        )
    if isinstance(version, bool) or not isinstance(version, int) or not 1 <= version <= INT32_MAX:
        raise ContractError(
            Code.VERSION_MALFORMED,
            f"the contract version {KEY_VERSION}",
            found=_show(version),
            expected="a positive integer",
            remedy=REEXPORT,
        )
    return label, version


def read_contract(facts: ProgramFacts) -> Contract:
    """The `hf_static` contract that a program states; see `parse_contract`."""
    return parse_contract(facts.constants)


def parse_contract(constants: Mapping[str, object]) -> Contract:
    """The `hf_static` contract that constant methods state.

    Only the metadata itself is checked here; `check_contract` compares it with the program.

    Args:
        constants: Values of the program's constant methods (`ProgramFacts.constants`).

    Raises:
        ContractError: Another label or version, a key that is absent, of the wrong type or out of
            range, or a layout that contradicts itself.
    """
    label, version = read_label(constants)
    if label != LABEL:
        raise ContractError(
            Code.LABEL_UNKNOWN, "the contract label", found=repr(label), expected=repr(LABEL)
        )
    if version != VERSION:
        raise ContractError(
            Code.VERSION_UNKNOWN,
            f"the version of the {LABEL} contract",
            found=version,
            expected=VERSION,
            remedy="Use a staticlm of the program's version, or export the model again.",
        )
    capacity = _positive(constants, KEY_CAPACITY)
    step = _positive(constants, KEY_STEP)
    vocab = _positive(constants, KEY_VOCAB)
    _exactly(constants, KEY_USE_CACHE, True)
    _exactly(constants, KEY_DYNAMIC, False)
    if step > capacity:
        raise ContractError(
            Code.METADATA_INVALID,
            f"{KEY_STEP} is larger than {KEY_CAPACITY}",
            found=f"{step} > {capacity}",
            expected=f"at most {capacity}",
            remedy=REEXPORT,
        )
    bos = constants.get(KEY_BOS)
    bos_id = None if bos is None else _token(bos, KEY_BOS, vocab)
    raw_eos = constants.get(KEY_EOS, ())
    eos_ids = tuple(
        _token(value, KEY_EOS, vocab)
        for value in (raw_eos if isinstance(raw_eos, (tuple, list)) else (raw_eos,))
    )
    body = _parse(constants.get(KEY_LAYOUT))
    caches = tuple(_cache(c, f"caches[{i}]") for i, c in enumerate(_list(body, "caches", "layout")))
    methods = tuple(
        _method(m, f"methods[{i}]") for i, m in enumerate(_list(body, "methods", "layout"))
    )
    producers = body.get("producers", {})
    if not isinstance(producers, dict) or not all(
        isinstance(k, str) and isinstance(v, str) for k, v in producers.items()
    ):
        raise _bad("producers", producers, "an object of version strings")
    contract = Contract(
        label=label,
        version=version,
        max_context_len=capacity,
        vocab_size=vocab,
        methods=methods,
        caches=caches,
        bos_id=bos_id,
        eos_ids=tuple(dict.fromkeys(eos_ids)),
        producers=producers,
    )
    if contract.methods and contract.max_seq_len != step:
        raise ContractError(
            Code.METADATA_INVALID,
            f"{KEY_STEP} and the longest method step disagree",
            found=f"{step} and {contract.max_seq_len}",
            expected="one number",
            remedy=REEXPORT,
        )
    return contract


def _show(value: object) -> str:
    text = repr(value)
    text = text if len(text) <= 80 else text[:77] + "..."
    return f"{text} ({type(value).__name__})"


def _bad(where: str, found: object, expected: str) -> ContractError:
    return ContractError(
        Code.LAYOUT_INVALID,
        f"{KEY_LAYOUT}: {where}",
        found=_show(found),
        expected=expected,
        remedy=REEXPORT,
    )


def _positive(constants: Mapping[str, object], key: str) -> int:
    if key not in constants:
        raise ContractError(
            Code.METADATA_MISSING,
            f"the program lacks {key}",
            expected="a positive integer",
            remedy=REEXPORT,
        )
    value = constants[key]
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= INT32_MAX:
        raise ContractError(
            Code.METADATA_INVALID,
            key,
            found=_show(value),
            expected=f"an integer from 1 to {INT32_MAX}",
            remedy=REEXPORT,
        )
    return value


def _exactly(constants: Mapping[str, object], key: str, wanted: bool) -> None:
    if key not in constants:
        raise ContractError(
            Code.METADATA_MISSING, f"the program lacks {key}", expected=wanted, remedy=REEXPORT
        )
    if constants[key] is not wanted:
        raise ContractError(
            Code.METADATA_INVALID,
            key,
            found=_show(constants[key]),
            expected=wanted,
            remedy=REEXPORT,
        )


def _token(value: object, key: str, vocab: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab:
        raise ContractError(
            Code.METADATA_INVALID,
            key,
            found=_show(value),
            expected=f"token ids from 0 to {vocab - 1}",
            remedy=REEXPORT,
        )
    return value


def _parse(text: object) -> dict[str, Any]:
    if text is None:
        raise ContractError(
            Code.METADATA_MISSING,
            f"the program lacks {KEY_LAYOUT}",
            expected="a JSON object",
            remedy=REEXPORT,
        )
    if not isinstance(text, str):
        raise _bad("the value", text, "a JSON string")
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _bad("the value", text, f"JSON ({error})") from None
    if not isinstance(body, dict):
        raise _bad("the value", body, "a JSON object")
    return body


def _list(body: Mapping[str, Any], key: str, where: str) -> list[Any]:
    value = body.get(key)
    if not isinstance(value, list) or not value:
        raise _bad(f"{where}.{key}", value, "a list that is not empty")
    return value


def _object(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _bad(where, value, "an object")
    return value


def _int(body: Mapping[str, Any], key: str, where: str, low: int = 0) -> int:
    value = body.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= INT32_MAX:
        raise _bad(f"{where}.{key}", value, f"an integer from {low} to {INT32_MAX}")
    return value


def _str(body: Mapping[str, Any], key: str, where: str) -> str:
    value = body.get(key)
    if not isinstance(value, str) or not value:
        raise _bad(f"{where}.{key}", value, "a string that is not empty")
    return value


def _note(body: Mapping[str, Any], key: str, where: str) -> str:
    value = body.get(key, "")
    if not isinstance(value, str):
        raise _bad(f"{where}.{key}", value, "a string")
    return value


def _enum(kind: type[_E], body: Mapping[str, Any], key: str, where: str) -> _E:
    value = body.get(key)
    try:
        return kind(value)
    except ValueError:
        names = ", ".join(member.value for member in kind)
        raise _bad(f"{where}.{key}", value, f"one of {names}") from None


def _spec(body: Mapping[str, Any], where: str) -> TensorSpec:
    dtype = body.get("dtype")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise _bad(f"{where}.dtype", dtype, f"one of {', '.join(DTYPE_BYTES)}")
    shape = body.get("shape")
    if not isinstance(shape, list) or not all(
        isinstance(n, int) and not isinstance(n, bool) and 1 <= n <= INT32_MAX for n in shape
    ):
        raise _bad(f"{where}.shape", shape, "a list of positive integers")
    return TensorSpec(dtype, tuple(shape))


def _slot(value: object, where: str) -> Slot:
    body = _object(value, where)
    cache = None if body.get("cache") is None else _int(body, "cache", where)
    return Slot(
        _int(body, "index", where), _enum(Role, body, "role", where), _spec(body, where), cache
    )


def _cache(value: object, where: str) -> Cache:
    body = _object(value, where)
    window = None if body.get("window") is None else _int(body, "window", where, 1)
    return Cache(
        layer=_int(body, "layer", where),
        part=_enum(Part, body, "part", where),
        kind=_enum(CacheKind, body, "kind", where),
        window=window,
        spec=_spec(body, where),
        layout=_str(body, "layout", where),
    )


def _method(value: object, where: str) -> Method:
    body = _object(value, where)
    inputs = _list(body, "inputs", where)
    outputs = _list(body, "outputs", where)
    return Method(
        name=_str(body, "name", where),
        role=_enum(MethodRole, body, "role", where),
        step=_int(body, "step", where, 1),
        logits_rows=_enum(LogitsRows, body, "logits_rows", where),
        inputs=tuple(_slot(s, f"{where}.inputs[{i}]") for i, s in enumerate(inputs)),
        outputs=tuple(_slot(s, f"{where}.outputs[{i}]") for i, s in enumerate(outputs)),
        attention=_note(body, "attention", where),
        backend=_note(body, "backend", where),
        attention_why=_note(body, "attention_why", where),
        max_start=None if body.get("max_start") is None else _int(body, "max_start", where),
    )
