"""Several program files as one: the methods of all, equal constants and blobs once."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from executorch.exir._serialize._named_data_store import NamedDataStore
from executorch.exir._serialize._program import (
    PTEFile,
    deserialize_pte_binary,
    serialize_pte_binary,
)
from executorch.exir.schema import DataLocation, Tensor

from staticlm.errors import Code, LoweringError


def merge_programs(parts: Sequence[Path], output: Path) -> None:
    """Write one program with the methods of several.

    A method that an earlier part has already (a constant method) is taken from there.

    Args:
        parts: Program files, none with initial values of mutable tensors.
        output: The file to write.

    Raises:
        LoweringError: Two parts name different data alike, or a part is not of this kind.
    """
    if len(parts) == 1:
        parts[0].replace(output)
        return
    merged = deserialize_pte_binary(parts[0].read_bytes())
    known: dict[bytes, int] = {}
    for index, buffer in enumerate(merged.program.constant_buffer):
        known.setdefault(_digest(buffer.storage), index)
    store = NamedDataStore()
    _take_blobs(store, merged)
    for path in parts[1:]:
        part = deserialize_pte_binary(path.read_bytes())
        _take_blobs(store, part)
        _take_methods(merged, part, known)
    merged.named_data = store.get_named_data_store_output()
    merged.program.execution_plan.sort(key=lambda plan: str(plan.name))
    data = serialize_pte_binary(merged, extract_delegate_segments=True)
    with output.open("wb") as file:
        data.write_to_file(file)


def _digest(storage: bytes) -> bytes:
    return hashlib.sha256(storage).digest()


def _take_blobs(store: NamedDataStore, part: PTEFile) -> None:
    if part.mutable_data:
        raise LoweringError(
            Code.LOWERING_FAILED,
            "a method's program",
            found="initial values of mutable tensors",
            expected="caches and constants only",
        )
    if part.named_data is None:
        return
    try:
        store.merge_named_data_store(part.named_data)
    except ValueError as error:
        raise LoweringError(
            Code.LOWERING_FAILED,
            "named data of two methods",
            found=str(error),
            expected="distinct names for distinct data",
        ) from error


def _take_methods(merged: PTEFile, part: PTEFile, known: dict[bytes, int]) -> None:
    """Append the methods that are new, with their constants and delegate data."""
    constants = merged.program.constant_buffer
    place = {0: 0}  # index 0 stands for no data
    for index, buffer in enumerate(part.program.constant_buffer[1:], start=1):
        digest = _digest(buffer.storage)
        if digest not in known:
            known[digest] = len(constants)
            constants.append(buffer)
        place[index] = known[digest]
    present = {plan.name for plan in merged.program.execution_plan}
    delegates = merged.program.backend_delegate_data
    first = len(delegates)
    delegates.extend(part.program.backend_delegate_data)
    for plan in part.program.execution_plan:
        if plan.name in present:
            continue
        for value in plan.values:
            if isinstance(value.val, Tensor):
                value.val.data_buffer_idx = place[value.val.data_buffer_idx]
        for delegate in plan.delegates:
            if delegate.processed.location is DataLocation.INLINE:
                delegate.processed.index += first
        merged.program.execution_plan.append(plan)
