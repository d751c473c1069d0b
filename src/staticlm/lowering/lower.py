"""Lowering: ExportedPrograms by method name -> one edge program manager, ready for `to_executorch`.

A wrapper of `executorch.exir.to_edge_transform_and_lower` that adds what it lacks: passes
contributed by partitioners, constants with names of their own, and a record of what ran.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from executorch.exir import EdgeCompileConfig, EdgeProgramManager, to_edge_transform_and_lower
from executorch.exir.backend.partitioner import Partitioner
from executorch.exir.lowered_backend_module import LoweredBackendModule
from executorch.exir.pass_base import ExportedProgramPassBase, ExportedProgramPassResult
from torch.export import ExportedProgram

from staticlm.errors import Code, LoweringError
from staticlm.lowering.constants import LiftConstants, Names, restore, shield
from staticlm.lowering.contributors import register_built_in
from staticlm.lowering.passes import (
    CALLER,
    PassRecord,
    PassType,
    Pipeline,
    checked_passes,
    first_refusal,
    hooked,
    is_first,
)
from staticlm.lowering.programs import Witness, clone

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Lowered:
    """The result of `lower`.

    Args:
        edge: Partitioned programs of all methods, ready for `to_executorch`.
        records: Every pass that ran, in the order it ran.
    """

    edge: EdgeProgramManager
    records: tuple[PassRecord, ...]


def lower(
    programs: Mapping[str, ExportedProgram],
    *,
    partitioners: Sequence[Partitioner] | Mapping[str, Sequence[Partitioner]] = (),
    transform_passes: Sequence[PassType] | Mapping[str, Sequence[PassType]] = (),
    constant_methods: Mapping[str, Any] | None = None,
    compile_config: EdgeCompileConfig | None = None,
) -> Lowered:
    """Lower every method to the edge dialect and partition it.

    For every method: transforms before decomposition in partitioner order, decomposition, the
    caller's passes, each partitioner's passes in order, constant lifting, partitioning. A
    partitioner's contribution runs exactly once per method. The programs given are not changed;
    their tensors are shared with the result.

    Args:
        programs: ATen programs by method name.
        partitioners: For all methods, or by method name (a method that is absent is not
            partitioned).
        transform_passes: The caller's edge passes, for all methods or by method name.
        constant_methods: Values of constant methods by name.
        compile_config: ExecuTorch's edge options; its own default when None.

    Raises:
        LoweringError: `PASS_CONTRIBUTION_INVALID` names the contributor whose passes cannot be
            used; `LOWERING_FAILED` for arguments that do not fit each other.
    """
    if not programs:
        raise LoweringError(Code.LOWERING_FAILED, "there is nothing to lower", found="no programs")
    by_method = _per_method(partitioners, programs, "partitioners")
    callers = _per_method(transform_passes, programs, "transform_passes")
    for method, group in by_method.items():
        _check_partitioners(group, method)
    callers = {m: checked_passes(passes, CALLER, m) for m, passes in callers.items()}
    clash = sorted(set(constant_methods or {}) & set(programs))
    if clash:
        raise LoweringError(
            Code.LOWERING_FAILED,
            "a constant method has the name of a program",
            found=", ".join(clash),
            expected="distinct names",
        )

    register_built_in()
    records: list[PassRecord] = []
    witnesses = [Witness.of(f"the program given for method {m!r}", p) for m, p in programs.items()]
    names = Names()
    for program in programs.values():
        names.reserve_program(program)
    own = {method: clone(program) for method, program in programs.items()}
    kept = {method: shield(program, names) for method, program in own.items()}
    stand_ins = {
        method: [
            hooked(
                p,
                method,
                records,
                witnesses,
                is_first(group, i),
                # A transform may end with stock lifting, whose names the next one would reuse.
                partial(restore, method=method, kept={}, names=names),
            )
            for i, p in enumerate(group)
        ]
        for method, group in by_method.items()
    }
    pipelines = {
        method: [
            _Restore(method, kept[method], names),
            Pipeline(
                method,
                callers[method],
                by_method[method],
                [LiftConstants(method, names)],
                records,
                witnesses,
            ),
        ]
        for method in programs
    }
    try:
        edge = to_edge_transform_and_lower(
            own,
            transform_passes=pipelines,
            partitioner=stand_ins,
            constant_methods=dict(constant_methods) if constant_methods else None,
            compile_config=compile_config,
        )
    except SystemExit as error:  # a recording backend ends the process when it is done
        raise LoweringError(
            Code.LOWERING_FAILED, "a backend ended the lowering", found=str(error)
        ) from error
    except Exception as error:
        refusal = first_refusal(error)
        if refusal is error:
            raise
        if refusal is not None:
            raise refusal from refusal.__cause__
        raise LoweringError(
            Code.LOWERING_FAILED,
            f"methods {', '.join(programs)} cannot be lowered",
            found=_root(error),
        ) from error
    _set_runtime_ids(edge, by_method)
    return Lowered(edge, tuple(records))


def _root(error: BaseException) -> str:
    """The first error of a chain, which pass managers wrap in ones of their own."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


def _set_runtime_ids(
    edge: EdgeProgramManager, by_method: Mapping[str, Sequence[Partitioner]]
) -> None:
    """Name delegates as the runtime knows them, where a partitioner compiles under another id."""
    ids: dict[str, str] = {}
    for partitioner in (p for group in by_method.values() for p in group):
        ids.update(getattr(partitioner, "runtime_backend_ids", {}))
    for method in by_method if ids else ():
        for module in edge.exported_program(method).graph_module.modules():
            if isinstance(module, LoweredBackendModule) and module.backend_id in ids:
                module._backend_id = ids[module.backend_id]


class _Restore(ExportedProgramPassBase):  # type: ignore[misc]
    """Undoes `shield` once the edge program exists, before any pass sees it."""

    def __init__(self, method: str, kept: dict[str, str], names: Names) -> None:
        self._method = method
        self._kept = kept
        self._names = names

    def call(self, exported_program: ExportedProgram) -> ExportedProgramPassResult:
        renamed = restore(exported_program, self._method, self._kept, self._names)
        return ExportedProgramPassResult(exported_program, renamed)


def _per_method(
    given: Sequence[_Item] | Mapping[str, Sequence[_Item]],
    programs: Mapping[str, ExportedProgram],
    argument: str,
) -> dict[str, Sequence[_Item]]:
    if not isinstance(given, Mapping):
        return dict.fromkeys(programs, given)
    unknown = sorted(set(given) - set(programs))
    if unknown:
        raise LoweringError(
            Code.LOWERING_FAILED,
            f"{argument} names a method that there is no program for",
            found=", ".join(unknown),
            expected=", ".join(programs),
        )
    return {method: given.get(method, ()) for method in programs}


def _check_partitioners(group: Sequence[Partitioner], method: str) -> None:
    if isinstance(group, Partitioner) or not isinstance(group, Sequence):
        raise LoweringError(
            Code.LOWERING_FAILED,
            f"the partitioners of method {method!r} are not a list",
            found=type(group).__name__,
        )
    for item in group:
        if not isinstance(item, Partitioner):
            raise LoweringError(
                Code.LOWERING_FAILED,
                f"the partitioners of method {method!r} cannot be used",
                found=repr(item),
                expected="instances of ExecuTorch's Partitioner",
            )
