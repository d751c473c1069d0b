"""`staticlm inspect`: what a program promises and holds, without running it."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from staticlm.contract.check import check_contract
from staticlm.contract.dialects import HF_STATIC, read_dialect
from staticlm.contract.facts import Contract, Method
from staticlm.contract.metadata import read_contract
from staticlm.contract.program import MethodFacts, ProgramFacts, TensorFacts, read_program
from staticlm.errors import Code, ContractError, ProgramError
from staticlm.lowering.segments import repeated_bytes

SCHEMA = 1
"""Version of the JSON object; keys are added, never renamed."""

PROGRAM = "model.pte"
MANIFEST = "export.json"


def run(
    path: Annotated[Path, typer.Argument(help="A .pte file, or an artifact directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    loaded: Annotated[
        bool,
        typer.Option("--loaded", help="Load it too: driver, buffers and who allocated them."),
    ] = False,
) -> None:
    """Show what a .pte program promises and holds."""
    found = describe(path)
    if loaded:
        found["loaded"] = describe_loaded(path)
    if as_json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        from staticlm.cli.inspect_tables import print_tables

        print_tables(found)


def describe(path: str | Path) -> dict[str, Any]:
    """Everything that a program file says, as plain values that JSON can hold.

    Args:
        path: A `.pte` file or a directory that holds `model.pte`.

    Raises:
        ProgramError: There is no program, or it is malformed. A contract that is absent, foreign or
            malformed is no error here: it is part of the description.
    """
    path = Path(path)
    directory = path if os.path.isdir(path) else None
    program = path / PROGRAM if directory else path
    if directory and not program.is_file():
        raise ProgramError(
            Code.PROGRAM_NOT_FOUND,
            f"{path} holds no program",
            expected=PROGRAM,
            remedy="Pass an artifact directory or a .pte file.",
        )
    facts = read_program(program)
    warnings: list[str] = []
    manifest = _manifest(program.parent / MANIFEST, warnings) if program.name == PROGRAM else None
    dialect = read_dialect(facts, manifest)
    warnings.extend(dialect.warnings)
    contract, problem = _contract(facts) if dialect.name == HF_STATIC else (None, None)
    found = {
        "schema": SCHEMA,
        "path": str(program),
        "bytes": facts.nbytes,
        "dialect": dialect.name,
        "metadata": _plain(dialect.facts),
        "warnings": warnings,
        "contract": _describe_contract(contract) if contract else None,
        "contract_problem": problem,
        "methods": [
            _describe_method(method, _role_of(contract, name))
            for name, method in facts.methods.items()
        ],
        "caches": _describe_caches(contract),
        "weights": _describe_weights(facts),
        "producers": _producers(contract, dialect.facts),
        "constants": {name: _brief(value) for name, value in facts.constants.items()},
    }
    return found


def describe_loaded(path: str | Path) -> dict[str, Any]:
    """Load a program and say which driver runs it and which allocator served which buffer.

    Raises:
        StaticLMError: Whatever keeps it from being loaded.
    """
    from staticlm.runtime.runner import load

    with load(path) as runner:
        stats = runner.stats()
    return {
        "driver": stats.driver,
        "label": stats.label,
        "version": stats.version,
        "load_seconds": stats.load_seconds,
        "methods": list(stats.methods_loaded),
        "states": stats.states,
        "buffers": [
            {"name": one.name, "bytes": one.nbytes, "allocator": one.allocator}
            for one in stats.buffers
        ],
        "resident_bytes": stats.resident_bytes,
        "packed_weights": stats.packed_weights,
    }


def _manifest(path: Path, warnings: list[str]) -> Mapping[str, object] | None:
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        warnings.append(f"{MANIFEST} cannot be read: {error}.")
        return None
    if not isinstance(content, dict):
        warnings.append(f"{MANIFEST} is not a JSON object.")
        return None
    return content


def _contract(facts: ProgramFacts) -> tuple[Contract | None, dict[str, str] | None]:
    """The contract as far as it can be read, and what is wrong with it."""
    contract = None
    try:
        contract = read_contract(facts)
        check_contract(contract, facts)
    except ContractError as error:
        return contract, {"code": error.code.value, "message": str(error)}
    return contract, None


def _role_of(contract: Contract | None, name: str) -> Method | None:
    return next((m for m in contract.methods if m.name == name), None) if contract else None


def _describe_contract(contract: Contract) -> dict[str, Any]:
    return {
        "label": contract.label,
        "version": contract.version,
        "max_context_len": contract.max_context_len,
        "max_seq_len": contract.max_seq_len if contract.methods else None,
        "vocab_size": contract.vocab_size,
        "bos_id": contract.bos_id,
        "eos_ids": list(contract.eos_ids),
    }


def _describe_method(method: MethodFacts, promised: Method | None) -> dict[str, Any]:
    backends: dict[str, list[int]] = defaultdict(list)
    for delegate in method.delegates:
        backends[delegate.backend].append(delegate.nbytes)
    return {
        "name": method.name,
        "role": promised.role.value if promised else None,
        "step": promised.step if promised else None,
        "logits_rows": promised.logits_rows.value if promised else None,
        "attention": (promised.attention or None) if promised else None,
        "attention_why": (promised.attention_why or None) if promised else None,
        "max_start": promised.max_start if promised else None,
        "inputs": _slots(method.inputs, promised, "inputs"),
        "outputs": _slots(method.outputs, promised, "outputs"),
        "aliases": {str(output): source for output, source in method.aliases.items()},
        "delegates": [
            {"backend": backend, "count": len(sizes), "bytes": sum(sizes)}
            for backend, sizes in sorted(backends.items())
        ],
        "delegate_calls": method.delegate_calls,
        "operators": dict(sorted(method.operators.items())),
        "instructions": method.instructions,
        "arena_bytes": list(method.arenas),
    }


def _slots(
    tensors: tuple[TensorFacts | None, ...], promised: Method | None, side: str
) -> list[dict[str, Any]]:
    roles = {slot.index: slot for slot in getattr(promised, side)} if promised else {}
    return [
        {
            "index": index,
            "role": roles[index].role.value if index in roles else None,
            "cache": roles[index].cache if index in roles else None,
            "dtype": tensor.dtype if tensor else None,
            "shape": list(tensor.shape) if tensor else None,
            "bytes": tensor.nbytes if tensor else None,
            "planned": tensor.planned if tensor else None,
            "dynamic": tensor.dynamic if tensor else None,
        }
        for index, tensor in enumerate(tensors)
    ]


def _describe_caches(contract: Contract | None) -> dict[str, Any] | None:
    if contract is None:
        return None
    return {
        "bytes": contract.cache_bytes,
        "entries": [
            {
                "layer": cache.layer,
                "part": cache.part.value,
                "kind": cache.kind.value,
                "window": cache.window,
                "dtype": cache.spec.dtype,
                "shape": list(cache.spec.shape),
                "layout": cache.layout,
                "bytes": cache.spec.nbytes,
            }
            for cache in contract.caches
        ],
    }


def _describe_weights(facts: ProgramFacts) -> dict[str, Any]:
    """Bytes by where they are; `stored_bytes` counts bytes that two segments share once."""
    end = stored = 0
    for start, size in sorted(facts.segment_ranges):
        stored += max(0, start + size - max(start, end))
        end = max(end, start + size)
    return {
        "constant_bytes": facts.constant_bytes,
        "named_bytes": sum(facts.named_data.values()),
        "named_blobs": len(facts.named_data),
        "segments": facts.segments,
        "segment_bytes": sum(size for _, size in facts.segment_ranges),
        "stored_bytes": stored,
        "repeated_bytes": repeated_bytes(facts.path),
        "external": list(facts.external_data),
    }


def _producers(contract: Contract | None, metadata: Mapping[str, object]) -> dict[str, str]:
    if contract is not None:
        return dict(contract.producers)
    packages = metadata.get("packages")
    return {str(k): str(v) for k, v in packages.items()} if isinstance(packages, dict) else {}


def _plain(value: object) -> Any:
    """A value that JSON can hold."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value


def _brief(value: object) -> Any:
    """A constant method's value, cut where it is long."""
    plain = _plain(value)
    if isinstance(plain, str) and len(plain) > 200:
        return f"{plain[:200]}... ({len(plain)} characters)"
    if isinstance(plain, list) and len(str(plain)) > 200:
        return f"{str(plain)[:200]}... ({len(plain)} items)"
    return plain
