"""Programs that keep every clause but one; a runner must refuse each with the clause's code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from staticlm.conformance.rewrite import Editor
from staticlm.contract.metadata import (
    KEY_BOS,
    KEY_CAPACITY,
    KEY_DYNAMIC,
    KEY_EOS,
    KEY_LABEL,
    KEY_LAYOUT,
    KEY_STEP,
    KEY_USE_CACHE,
    KEY_VERSION,
    KEY_VOCAB,
)
from staticlm.errors import Code

BASE = "mixed"
"""The toy that variants are made of: layer 0 full, layer 1 sliding, prefill steps 6 and 3."""

Edit = Callable[[Editor], None]
Layout = Callable[[dict[str, Any]], object]


@dataclass(frozen=True)
class Variant:
    """A malformed program.

    Args:
        name: Of the case and the file.
        clause: The one that it breaks.
        code: What a runner must answer.
        edit: How it differs from `BASE`.
    """

    name: str
    clause: str
    code: Code
    edit: Edit


@dataclass(frozen=True)
class BadFile:
    """A file that is not a program; `keep` bytes of `BASE`, or other content, or no file."""

    name: str
    clause: str
    code: Code
    keep: int | None = None
    content: bytes | None = None


FILES: tuple[BadFile, ...] = (
    BadFile("file-absent", "C0.1", Code.PROGRAM_NOT_FOUND),
    BadFile("file-empty", "C0.2", Code.PROGRAM_MALFORMED, content=b""),
    BadFile("file-text", "C0.2", Code.PROGRAM_MALFORMED, content=b"no program\n" * 20),
    BadFile("file-cut", "C0.2", Code.PROGRAM_MALFORMED, keep=4096),
)


def _put(key: str, *values: int | bool | str) -> Edit:
    return lambda editor: editor.put(key, *values)


def _drop(key: str) -> Edit:
    return lambda editor: editor.drop(key)


def _layout(change: Layout) -> Edit:
    return lambda editor: editor.layout(change)


def _method(body: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(m for m in body["methods"] if m["name"] == name)
    return found


def _set(name: str, key: str, value: object) -> Edit:
    """Change a field of one method's entry."""
    return _layout(lambda body: _method(body, name).update({key: value}))


def _slot(name: str, direction: str, at: int, /, **fields: object) -> Edit:
    """Change fields of one slot; None removes one."""

    def change(body: dict[str, Any]) -> None:
        slot = _method(body, name)[direction][at]
        for key, value in fields.items():
            if value is None:
                del slot[key]
            else:
                slot[key] = value

    return _layout(change)


def _cache(index: int, **fields: object) -> Edit:
    """Change fields of one cache, and dtype and shape of its slots with it."""

    def change(body: dict[str, Any]) -> None:
        body["caches"][index].update(fields)
        shared = {key: value for key, value in fields.items() if key in ("dtype", "shape")}
        for method in body["methods"]:
            for slot in method["inputs"]:
                if slot.get("cache") == index:
                    slot.update(shared)

    return _layout(change)


def _rename(body: dict[str, Any]) -> None:
    _method(body, "prefill_6")["name"] = "prefill_7"


def _twice(body: dict[str, Any]) -> None:
    body["methods"].append(dict(_method(body, "decode"), role="prefill"))


def _second_decode(body: dict[str, Any]) -> None:
    body["methods"].append(dict(_method(body, "decode"), name="decode_2"))


def _same_step(body: dict[str, Any]) -> None:
    body["methods"].append(dict(_method(body, "prefill_6"), name="prefill_b"))


def _narrow(*limits: int) -> Callable[[dict[str, Any]], None]:
    """Further decode methods, each with a `max_start`."""

    def change(body: dict[str, Any]) -> None:
        for number, limit in enumerate(limits):
            entry = dict(_method(body, "decode"), name=f"decode_{number}", max_start=limit)
            body["methods"].append(entry)

    return change


def _without_decode(body: dict[str, Any]) -> None:
    body["methods"].remove(_method(body, "decode"))


def _without_length(body: dict[str, Any]) -> None:
    slots = _method(body, "prefill_6")["inputs"]
    del slots[2]
    for index, slot in enumerate(slots):
        slot["index"] = index


def _length_at_decode(body: dict[str, Any]) -> None:
    slots = _method(body, "decode")["inputs"]
    slots.append(dict(slots[1], role="valid_length", index=len(slots)))


def _extra_mask(body: dict[str, Any]) -> None:
    slots = _method(body, "decode")["inputs"]
    slots.append({"index": len(slots), "role": "mask", "dtype": "float32", "shape": [1, 24]})


def _exchanged_indexes(body: dict[str, Any]) -> None:
    slots = _method(body, "prefill_6")["inputs"]
    slots[3]["index"], slots[4]["index"] = slots[4]["index"], slots[3]["index"]


def _two_logits(body: dict[str, Any]) -> None:
    slots = _method(body, "decode")["outputs"]
    slots.append(dict(slots[0], index=1))


def _other_vocab(editor: Editor) -> None:
    editor.put(KEY_VOCAB, 41)

    def change(body: dict[str, Any]) -> None:
        for method in body["methods"]:
            method["outputs"][0]["shape"][2] = 41

    editor.layout(change)


def _half_caches(body: dict[str, Any]) -> None:
    for cache in body["caches"]:
        cache["dtype"] = "float16"
    for method in body["methods"]:
        for slot in method["inputs"]:
            if "cache" in slot:
                slot["dtype"] = "float16"


def _same_layer(body: dict[str, Any]) -> None:
    body["caches"][2]["layer"] = body["caches"][3]["layer"] = 0


def _other_window(body: dict[str, Any]) -> None:
    body["caches"][3].update(kind="full", window=None, shape=[2, 24, 4])
    for method in body["methods"]:
        for slot in method["inputs"]:
            if slot.get("cache") == 3:
                slot["shape"] = [2, 24, 4]


_L, _M, _S, _C = (
    Code.LAYOUT_INVALID,
    Code.METADATA_INVALID,
    Code.SLOT_MISMATCH,
    Code.CACHE_INVALID,
)
_MISSING = Code.METADATA_MISSING

VARIANTS: tuple[Variant, ...] = (
    Variant("label-missing", "C1.1", Code.LABEL_MISSING, _drop(KEY_LABEL)),
    Variant("label-empty", "C1.2", Code.LABEL_MALFORMED, _put(KEY_LABEL, "")),
    Variant("label-number", "C1.2", Code.LABEL_MALFORMED, _put(KEY_LABEL, 1)),
    Variant("label-control", "C1.2", Code.LABEL_MALFORMED, _put(KEY_LABEL, "hf_static\n")),
    Variant("label-long", "C1.2", Code.LABEL_MALFORMED, _put(KEY_LABEL, "a" * 65)),
    Variant("label-unknown", "C1.3", Code.LABEL_UNKNOWN, _put(KEY_LABEL, "hf_static_other")),
    Variant("label-case", "C1.3", Code.LABEL_UNKNOWN, _put(KEY_LABEL, "HF_STATIC")),
    Variant("version-missing", "C1.4", Code.VERSION_MALFORMED, _drop(KEY_VERSION)),
    Variant("version-text", "C1.4", Code.VERSION_MALFORMED, _put(KEY_VERSION, "1")),
    Variant("version-true", "C1.4", Code.VERSION_MALFORMED, _put(KEY_VERSION, True)),
    Variant("version-zero", "C1.4", Code.VERSION_MALFORMED, _put(KEY_VERSION, 0)),
    Variant("version-next", "C1.5", Code.VERSION_UNKNOWN, _put(KEY_VERSION, 2)),
    Variant("capacity-missing", "C2.1", _MISSING, _drop(KEY_CAPACITY)),
    Variant("capacity-zero", "C2.2", _M, _put(KEY_CAPACITY, 0)),
    Variant("capacity-text", "C2.2", _M, _put(KEY_CAPACITY, "24")),
    Variant("capacity-true", "C2.2", _M, _put(KEY_CAPACITY, True)),
    Variant("step-missing", "C2.1", _MISSING, _drop(KEY_STEP)),
    Variant("step-other", "C2.3", _M, _put(KEY_STEP, 5)),
    Variant("step-over-capacity", "C2.3", _M, _put(KEY_STEP, 25)),
    Variant("vocab-missing", "C2.1", _MISSING, _drop(KEY_VOCAB)),
    Variant("vocab-negative", "C2.2", _M, _put(KEY_VOCAB, -40)),
    Variant("use-cache-missing", "C2.1", _MISSING, _drop(KEY_USE_CACHE)),
    Variant("use-cache-false", "C2.4", _M, _put(KEY_USE_CACHE, False)),
    Variant("dynamic-missing", "C2.1", _MISSING, _drop(KEY_DYNAMIC)),
    Variant("dynamic-true", "C2.4", _M, _put(KEY_DYNAMIC, True)),
    Variant("dynamic-number", "C2.4", _M, _put(KEY_DYNAMIC, 0)),
    Variant("bos-outside", "C2.5", _M, _put(KEY_BOS, 40)),
    Variant("eos-outside", "C2.5", _M, _put(KEY_EOS, 2, 40)),
    Variant("eos-true", "C2.5", _M, _put(KEY_EOS, True)),
    Variant("layout-missing", "C2.1", _MISSING, _drop(KEY_LAYOUT)),
    Variant("layout-number", "C2.6", _L, _put(KEY_LAYOUT, 1)),
    Variant("layout-cut", "C2.6", _L, _put(KEY_LAYOUT, '{"methods":[')),
    Variant("layout-list", "C2.6", _L, _put(KEY_LAYOUT, "[]")),
    Variant("methods-empty", "C2.6", _L, _layout(lambda body: body["methods"].clear())),
    Variant("caches-absent", "C2.6", _L, _layout(lambda body: body.pop("caches"))),
    Variant("shape-text", "C2.6", _L, _slot("decode", "inputs", 0, shape="1,1")),
    Variant("dtype-unknown", "C2.6", _L, _slot("decode", "inputs", 0, dtype="int63")),
    Variant("method-absent", "C3.1", Code.METHOD_MISSING, _layout(_rename)),
    Variant("method-twice", "C3.2", _L, _layout(_twice)),
    Variant("decode-absent", "C3.2", _L, _layout(_without_decode)),
    Variant("decode-twice", "C3.2", _L, _layout(_second_decode)),
    Variant("prefill-step-twice", "C3.3", _L, _layout(_same_step)),
    Variant("max-start-text", "C2.6", _L, _set("prefill_3", "max_start", "6")),
    Variant("max-start-negative", "C2.6", _L, _set("prefill_3", "max_start", -1)),
    Variant("max-start-alone", "C3.6", _L, _set("prefill_3", "max_start", 6)),
    Variant("max-start-capacity", "C3.6", _L, _layout(_narrow(24))),
    Variant("max-start-twice", "C3.6", _L, _layout(_narrow(6, 6))),
    Variant("method-role-unknown", "C3.4", _L, _set("prefill_3", "role", "encode")),
    Variant("rows-unknown", "C3.4", _L, _set("prefill_3", "logits_rows", "first")),
    Variant("verify-last-row", "C3.5", _L, _set("prefill_3", "role", "verify")),
    Variant("index-exchanged", "C4.1", _L, _layout(_exchanged_indexes)),
    Variant("index-gap", "C4.1", _L, _slot("decode", "inputs", 5, index=9)),
    Variant("role-unknown", "C4.2", _L, _slot("decode", "inputs", 1, role="offset")),
    Variant("role-mask", "C4.2", _L, _slot("prefill_6", "inputs", 1, role="mask")),
    Variant("role-extra", "C4.2", _L, _layout(_extra_mask)),
    Variant("tokens-int32", "C4.3", _S, _slot("prefill_6", "inputs", 0, dtype="int32")),
    Variant("tokens-shape", "C4.3", _S, _slot("prefill_6", "inputs", 0, shape=[6])),
    Variant("start-shape", "C4.3", _S, _slot("decode", "inputs", 1, shape=[1, 1])),
    Variant("length-absent", "C4.4", _L, _layout(_without_length)),
    Variant("length-at-decode", "C4.4", _L, _layout(_length_at_decode)),
    Variant("logits-twice", "C4.2", _L, _layout(_two_logits)),
    Variant("logits-rows", "C4.5", _S, _slot("prefill_6", "outputs", 0, shape=[1, 6, 40])),
    Variant("logits-int32", "C4.5", _S, _slot("decode", "outputs", 0, dtype="int32")),
    Variant("cache-unknown", "C4.6", _L, _slot("decode", "inputs", 3, cache=4)),
    Variant("cache-unnamed", "C4.6", _L, _slot("decode", "inputs", 3, cache=None)),
    Variant("cache-at-tokens", "C4.6", _L, _slot("decode", "inputs", 0, cache=0)),
    Variant("cache-twice", "C4.6", _L, _slot("decode", "inputs", 2, cache=2, shape=[2, 10, 4])),
    Variant("cache-role", "C4.6", _L, _slot("decode", "inputs", 2, role="value_cache")),
    Variant("cache-slot-shape", "C4.6", _S, _slot("decode", "inputs", 2, shape=[2, 4, 24])),
    Variant("program-vocab", "C4.7", _S, _other_vocab),
    Variant("program-dtype", "C4.7", _S, _layout(_half_caches)),
    Variant("program-shape", "C4.7", _S, lambda e: e.retype_input("decode", 2, [2, 4, 24])),
    Variant("program-inputs", "C4.7", _S, lambda e: e.repeat_input("decode", 5)),
    Variant("cache-planned", "C4.8", _S, lambda e: e.plan_input("decode", 2)),
    Variant("cache-int8", "C5.1", _C, _cache(0, dtype="int8")),
    Variant("layout-without-slots", "C5.2", _C, _cache(0, layout="heads,rows,width")),
    Variant("layout-rank", "C5.2", _C, _cache(0, layout="slots,width")),
    Variant("full-with-window", "C5.3", _C, _cache(0, window=5)),
    Variant("full-short", "C5.3", _C, _cache(0, shape=[2, 23, 4])),
    Variant("sliding-without-window", "C5.4", _C, _cache(2, window=None)),
    Variant("sliding-short", "C5.4", _C, _cache(2, shape=[2, 9, 4])),
    Variant("sliding-roomy", "C5.4", _C, _cache(2, shape=[2, 24, 4])),
    Variant("window-zero", "C5.4", _L, _cache(2, window=0)),
    Variant("kind-unknown", "C5.5", _L, _cache(2, kind="ring")),
    Variant("layer-twice", "C5.5", _C, _layout(_same_layer)),
    Variant("halves-differ", "C5.5", _C, _layout(_other_window)),
)
"""Variants of `BASE`, by clause."""
