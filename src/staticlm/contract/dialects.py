"""Which metadata dialect a program speaks, for people and tools that look at foreign programs.

Tolerant where the strict reader refuses: a value of the wrong type is reported and left out, never
converted or guessed. Nothing here decides whether a program may be run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from staticlm.contract.facts import LABEL
from staticlm.contract.metadata import KEY_LABEL, read_label
from staticlm.contract.program import ProgramFacts
from staticlm.contract.program_facts import SCALAR_TYPES
from staticlm.errors import ContractError

HF_STATIC = "hf_static"
LABELLED = "labelled"
TRANSFORMERS = "transformers.exporters"
OPTIMUM = "optimum-executorch"
EXECUTORCH = "executorch-llm"
NONE = "none"

_OPTIMUM_KEYS = (
    "get_dtype",
    "get_head_dim",
    "get_n_kv_heads",
    "get_max_batch_size",
    "get_max_cache_len",
    "decoder_start_token_id",
)
_QUALCOMM_KEYS = ("get_kv_io_bit_width", "get_ar_len")
_BLOB_KEYS = {"architecture", "export_config", "export_dtype", "in_spec", "out_spec", "kwargs"}
_FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Dialect:
    """What a program's metadata says.

    Args:
        name: `hf_static`, `labelled` (another I/O contract's label), `transformers.exporters`,
            `optimum-executorch`, `executorch-llm` or `none`.
        facts: Well-typed values by the name of the constant method (or of the manifest's entry).
        warnings: What is wrong with the rest, one sentence each.
    """

    name: str
    facts: Mapping[str, object]
    warnings: tuple[str, ...]


def read_dialect(program: ProgramFacts, manifest: Mapping[str, object] | None = None) -> Dialect:
    """Find the dialect of a program.

    Args:
        program: The program.
        manifest: The `export.json` next to it, where there is one: `transformers.exporters` keeps
            what it records there and not in the program.
    """
    constants = program.constants
    facts, warnings = _known_facts(constants)
    label = constants.get(KEY_LABEL)
    if KEY_LABEL in constants:
        try:
            label, facts["get_io_contract_version"] = read_label(constants)
        except ContractError as error:
            warnings.append(str(error))
    if isinstance(label, str) and label:
        facts[KEY_LABEL] = label
        name = HF_STATIC if label == LABEL else LABELLED
        return Dialect(name, facts, tuple(warnings + _contradictions(facts, program)))
    blob = _exporter_record(program, manifest, warnings)
    if blob is not None:
        name, facts = TRANSFORMERS, facts | dict(blob)
    elif any(key in constants for key in _OPTIMUM_KEYS) and not any(
        key in constants for key in _QUALCOMM_KEYS
    ):
        name = OPTIMUM
    elif any(key in constants for key in _KNOWN):
        name = EXECUTORCH
    else:
        name = NONE
    return Dialect(name, facts, tuple(warnings + _contradictions(facts, program)))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _tokens(value: object) -> bool:
    return _token(value) or (isinstance(value, tuple) and bool(value) and all(map(_token, value)))


def _flag(value: object) -> bool:
    return isinstance(value, bool)


def _dtype(value: object) -> bool:
    return _is_int(value) and value in SCALAR_TYPES


_POSITIVE_KEYS = (
    "get_max_seq_len",
    "get_max_context_len",
    "get_max_cache_len",
    "get_max_batch_size",
    "get_vocab_size",
    "get_n_layers",
    "get_n_kv_heads",
    "get_head_dim",
    "sliding_window",
    "get_ar_len",
    "get_kv_io_bit_width",
)
_TOKEN_KEYS = ("get_bos_id", "get_eos_id", "decoder_start_token_id")

_KNOWN: dict[str, tuple[Callable[[object], bool], str]] = {
    **dict.fromkeys(_POSITIVE_KEYS, (_positive, "a positive integer")),
    **dict.fromkeys(_TOKEN_KEYS, (_token, "one token id")),
    "get_eos_ids": (_tokens, "token ids"),
    "get_n_bos": (_token, "a count"),
    "get_n_eos": (_token, "a count"),
    "get_num_kv_shared_layers": (_token, "a count"),
    "use_kv_cache": (_flag, "a boolean"),
    "use_sdpa_with_kv_cache": (_flag, "a boolean"),
    "enable_dynamic_shape": (_flag, "a boolean"),
    "get_dtype": (_dtype, "an ExecuTorch scalar type"),
}
"""Keys that ExecuTorch's and optimum's exporters write -> check of the type, and its name."""


def _known_facts(constants: Mapping[str, object]) -> tuple[dict[str, object], list[str]]:
    facts: dict[str, object] = {}
    warnings: list[str] = []
    for key, value in constants.items():
        if key not in _KNOWN:
            continue
        right, expected = _KNOWN[key]
        if right(value):
            facts[key] = value
        else:
            found = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}..."
            warnings.append(f"{key} holds {found}, expected {expected}; it is not used.")
    return facts, warnings


def _contradictions(facts: Mapping[str, object], program: ProgramFacts) -> list[str]:
    """Well-typed values that cannot be true."""
    found = []
    code = facts.get("get_dtype")
    if isinstance(code, int):
        stated = SCALAR_TYPES[code][0]
        tensors = [
            tensor
            for method in program.methods.values()
            for tensor in (*method.inputs, *method.outputs)
            if tensor is not None and tensor.dtype in _FLOATS
        ]
        dtypes = sorted({tensor.dtype for tensor in tensors})
        if dtypes and stated not in dtypes:
            found.append(
                f"get_dtype says {stated}, but the program's inputs and outputs are "
                f"{', '.join(dtypes)}."
            )
    step, capacity = facts.get("get_max_seq_len"), facts.get("get_max_context_len")
    if isinstance(step, int) and isinstance(capacity, int) and step > capacity:
        found.append(f"get_max_seq_len, {step}, is larger than get_max_context_len, {capacity}.")
    vocab = facts.get("get_vocab_size")
    for key in ("get_bos_id", "get_eos_id", "get_eos_ids", "decoder_start_token_id"):
        value = facts.get(key, ())
        for token in value if isinstance(value, tuple) else (value,):
            if isinstance(vocab, int) and isinstance(token, int) and token >= vocab:
                found.append(f"{key} holds {token}, outside of the vocabulary of {vocab}.")
    return found


def _exporter_record(
    program: ProgramFacts, manifest: Mapping[str, object] | None, warnings: list[str]
) -> Mapping[str, object] | None:
    """What `transformers.exporters` recorded, from the manifest or a JSON constant method."""
    if manifest is not None and manifest.get("export_format") == "executorch":
        components = manifest.get("components")
        for entry in components.values() if isinstance(components, Mapping) else ():
            if isinstance(entry, Mapping) and entry.get("file") == program.path.name:
                record = entry.get("metadata")
                if isinstance(record, Mapping):
                    return _described(record, warnings)
        warnings.append(f"export.json has no record of {program.path.name}.")
    for value in program.constants.values():
        if not isinstance(value, str) or not value.lstrip().startswith("{"):
            continue
        try:
            record = json.loads(value)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and len(_BLOB_KEYS & record.keys()) >= 3:
            return _described(record, warnings)
    return None


def _described(record: Mapping[str, object], warnings: list[str]) -> dict[str, object]:
    """The parts of a record that say something to a reader, by type."""
    wanted: tuple[tuple[str, type, str], ...] = (
        ("architecture", str, "a string"),
        ("export_dtype", str, "a string"),
        ("export_device", str, "a string"),
        ("packages", dict, "an object"),
        ("kwargs", dict, "an object"),
    )
    facts: dict[str, object] = {}
    for key, kind, expected in wanted:
        value = record.get(key)
        if isinstance(value, kind):
            facts[key] = value
        elif value is not None:
            warnings.append(f"{key} holds {value!r:.60}, expected {expected}; it is not used.")
    return facts
