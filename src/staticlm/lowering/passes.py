"""Passes that partitioners contribute: who offers which, and what ran.

A partitioner offers edge passes by a method `edge_transform_passes(method, program)`. For a
partitioner class that belongs to somebody else, `register_pass_contributor` adds the same from
outside. Passes before decomposition use ExecuTorch's own hook `transform_for_pre_decomposition`, or
the adapter's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from inspect import isclass, isfunction
from typing import Any, Literal, TypeAlias

from executorch.exir.backend.partitioner import Partitioner, PartitionResult
from executorch.exir.pass_base import ExportedProgramPassBase, ExportedProgramPassResult
from executorch.exir.pass_manager import ExportedProgramPassManager
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassResult
from torch.fx.passes.infra.pass_manager import pass_result_wrapper

from staticlm.errors import Code, LoweringError
from staticlm.lowering.programs import (
    Witness,
    clone,
    graph_digest,
    program_digest,
    tables_digest,
)

PassType: TypeAlias = "ExportedProgramPassBase | Callable[[GraphModule], PassResult | None]"
EdgePasses: TypeAlias = Callable[[Any, str, ExportedProgram], Sequence[PassType]]
"""(partitioner, method, edge program) -> passes; must not touch the program."""
Transform: TypeAlias = Callable[[Any, str, ExportedProgram], ExportedProgram]
"""(partitioner, method, ATen program) -> ATen program; the program is the transform's own."""
Stage = Literal["pre-decomposition", "edge"]

CALLER = "caller"
"""The contributor of passes that were handed to `lower`."""


@dataclass(frozen=True)
class PassRecord:
    """One pass that ran.

    Args:
        method: The method whose program it ran on.
        stage: Before decomposition (ATen) or after it (edge dialect).
        contributor: `caller`, the class name of a partitioner, or `staticlm`.
        name: The pass.
        changed: Whether operators, arguments or constants differ after it. A pass that only writes
            metadata does not count.
    """

    method: str
    stage: Stage
    contributor: str
    name: str
    changed: bool

    def __str__(self) -> str:
        effect = "changed the graph" if self.changed else "no change"
        return f"{self.method}: {self.stage}: {self.contributor}: {self.name}: {effect}"


@dataclass(frozen=True)
class _Contributor:
    edge_passes: EdgePasses | None
    pre_decomposition: Transform | None


_contributors: dict[str, _Contributor] = {}


def register_pass_contributor(
    partitioner_class: type | str,
    edge_passes: EdgePasses | None = None,
    *,
    pre_decomposition: Transform | None = None,
) -> None:
    """Contribute passes for a partitioner class that is not yours.

    Args:
        partitioner_class: The class, or its dotted name so that it need not be imported. Subclasses
            inherit the contribution unless they define `edge_transform_passes` (or override
            `transform_for_pre_decomposition`) themselves.
        edge_passes: Gives the edge passes of one partitioner for one method.
        pre_decomposition: Transforms one method's ATen program before decomposition.

    Raises:
        LoweringError: `REGISTRATION_DUPLICATE` when the class has a contributor already.
    """
    name = partitioner_class if isinstance(partitioner_class, str) else _dotted(partitioner_class)
    if name in _contributors:
        raise LoweringError(
            Code.REGISTRATION_DUPLICATE,
            f"passes for the partitioner {name} are registered twice",
            expected="one contributor per partitioner class",
        )
    _contributors[name] = _Contributor(edge_passes, pre_decomposition)


def unregister_pass_contributor(partitioner_class: type | str) -> None:
    """Remove a contribution; nothing happens when there is none."""
    name = partitioner_class if isinstance(partitioner_class, str) else _dotted(partitioner_class)
    _contributors.pop(name, None)


class Pipeline(ExportedProgramPassBase):  # type: ignore[misc]
    """All edge passes of one method, in order, as one pass for the standard entry point.

    The caller's passes, then each partitioner's in partitioner order, then ours. Contributions are
    asked for here because only now is there an edge program to show to them.

    Args:
        method: The method's name.
        caller: The caller's passes for it.
        partitioners: Its partitioners.
        own: Our own passes, which run last.
        records: Filled as passes run.
        witnesses: Programs that nobody may change; grows by this method's result.
    """

    def __init__(
        self,
        method: str,
        caller: Sequence[PassType],
        partitioners: Sequence[Partitioner],
        own: Sequence[ExportedProgramPassBase],
        records: list[PassRecord],
        witnesses: list[Witness],
    ) -> None:
        self._method = method
        self._caller = caller
        self._partitioners = partitioners
        self._own = own
        self._records = records
        self._witnesses = witnesses

    def call(self, exported_program: ExportedProgram) -> ExportedProgramPassResult:
        """Run everything on one edge program."""
        program, modified = self._run(exported_program, CALLER, self._caller)
        for partitioner in _distinct(self._partitioners):
            passes = self._ask(partitioner, program)
            if passes is not None:
                program, m = self._run(program, type(partitioner).__name__, passes)
                modified |= m
        program, m = self._run(program, "staticlm", self._own)
        self._witnesses.append(Witness.of(f"the edge program of method {self._method!r}", program))
        return ExportedProgramPassResult(program, modified or m)

    def _ask(self, partitioner: Partitioner, program: ExportedProgram) -> Sequence[PassType] | None:
        offer = _edge_offer(partitioner)
        if offer is None:
            return None
        who = type(partitioner).__name__
        before = program_digest(program)
        try:
            passes = offer(self._method, program)
        except Exception as error:
            raise _invalid(who, self._method, "raised while giving its passes", error) from error
        if program_digest(program) != before:
            raise _invalid(who, self._method, "changed the program instead of giving passes")
        _blame(self._witnesses, who, self._method)
        return checked_passes(passes, who, self._method)

    def _run(
        self, program: ExportedProgram, contributor: str, passes: Sequence[PassType]
    ) -> tuple[ExportedProgram, bool]:
        if not passes:
            return program, False
        recorded = [self._recorded(p, program, contributor) for p in passes]
        result = ExportedProgramPassManager(recorded)(program)
        _blame(self._witnesses, contributor, self._method)
        return result.exported_program, result.modified

    def _recorded(self, inner: PassType, program: ExportedProgram, who: str) -> PassType:
        def note(changed: bool) -> None:
            self._records.append(PassRecord(self._method, "edge", who, pass_name(inner), changed))

        def failed(error: Exception) -> LoweringError:
            return _invalid(who, self._method, f"pass {pass_name(inner)} raised", error)

        if isinstance(inner, ExportedProgramPassBase):
            return _RecordedProgramPass(inner, note, failed)
        run = pass_result_wrapper(inner)

        def recorded(module: GraphModule) -> PassResult:
            before = (graph_digest(module), tables_digest(program))
            try:
                result = run(module)
            except Exception as error:
                raise failed(error) from error
            if result is None:
                raise failed(TypeError("returned None"))
            note((graph_digest(result.graph_module), tables_digest(program)) != before)
            return result

        return recorded


class _RecordedProgramPass(ExportedProgramPassBase):  # type: ignore[misc]
    def __init__(
        self,
        inner: ExportedProgramPassBase,
        note: Callable[[bool], None],
        failed: Callable[[Exception], LoweringError],
    ) -> None:
        self._inner = inner
        self._note = note
        self._failed = failed

    def call(self, exported_program: ExportedProgram) -> ExportedProgramPassResult:
        before = program_digest(exported_program)
        try:
            result = self._inner(exported_program)
        except Exception as error:
            raise self._failed(error) from error
        if not isinstance(result, ExportedProgramPassResult):
            raise self._failed(TypeError(f"returned {type(result).__name__}"))
        self._note(program_digest(result.exported_program) != before)
        return result


class HookedPartitioner(Partitioner):  # type: ignore[misc]
    """Stands in for one partitioner of one method: same partitions, recorded contributions.

    ExecuTorch's entry point calls `transform_for_pre_decomposition` on it, whether the
    partitioner's own or its adapter's.

    Args:
        inner: The partitioner.
        method: The method.
        records: Filled as transforms run.
        witnesses: Programs that nobody may change.
        first: Whether the partitioner is not listed before for this method.
        settle: Called with the transformed program.
    """

    def __init__(
        self,
        inner: Partitioner,
        method: str,
        records: list[PassRecord],
        witnesses: list[Witness],
        first: bool,
        settle: Callable[[ExportedProgram], object] = lambda program: None,
    ) -> None:
        super().__init__(inner.spec if hasattr(inner, "_spec") else {})
        self.inner = inner
        self._method = method
        self._records = records
        self._witnesses = witnesses
        self._first = first
        self._settle = settle

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        """The inner partitioner's partitions."""
        return self.inner(exported_program)

    def ops_to_not_decompose(
        self, ep: ExportedProgram
    ) -> tuple[list[OpOverload], Callable[[Node], bool] | None]:
        """The inner partitioner's choice."""
        result: tuple[list[OpOverload], Callable[[Node], bool] | None]
        result = self.inner.ops_to_not_decompose(ep)
        return result

    def transform_for_pre_decomposition(self, exported_program: ExportedProgram) -> ExportedProgram:
        """Run the contribution for this stage, if there is one, on a program of its own."""
        transform = _pre_decomposition_offer(self.inner, self._method)
        if transform is None or not self._first:
            return exported_program
        who = type(self.inner).__name__
        program = clone(exported_program)
        before = program_digest(program)
        try:
            result = transform(program)
        except Exception as error:
            raise _invalid(who, self._method, "raised before decomposition", error) from error
        if not isinstance(result, ExportedProgram):
            raise _invalid(
                who, self._method, f"returned {type(result).__name__} before decomposition"
            )
        _blame(self._witnesses, who, self._method)
        changed = program_digest(result) != before
        name = "transform_for_pre_decomposition"
        self._records.append(PassRecord(self._method, "pre-decomposition", who, name, changed))
        self._settle(result)
        return result


def hooked(inner: Partitioner, *arguments: Any) -> HookedPartitioner:
    """A `HookedPartitioner` under the name of its partitioner, which ExecuTorch's messages give."""
    cls = type(type(inner).__name__, (HookedPartitioner,), {})
    made: HookedPartitioner = cls(inner, *arguments)
    return made


def checked_passes(passes: object, who: str, method: str) -> Sequence[PassType]:
    """A contribution that is a sequence of passes, or an error that names the contributor.

    Raises:
        LoweringError: `PASS_CONTRIBUTION_INVALID`.
    """
    if not isinstance(passes, (list, tuple)):
        raise _invalid(who, method, f"gave {_kind(passes)}")
    for item in passes:
        if isclass(item) or not (isinstance(item, ExportedProgramPassBase) or callable(item)):
            raise _invalid(who, method, f"gave {_kind(item)} among its passes")
    return list(passes)


def pass_name(item: Any) -> str:
    """What to call a pass."""
    return str(item.__name__) if isfunction(item) else type(item).__name__


def first_refusal(error: BaseException) -> LoweringError | None:
    """The error of ours that pass managers wrapped in errors of their own, or None."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, LoweringError):
            return cause
        cause = cause.__cause__
    return None


def is_first(partitioners: Sequence[Partitioner], position: int) -> bool:
    """Whether a partitioner is not listed before: the same object contributes once per method."""
    return all(p is not partitioners[position] for p in partitioners[:position])


def _distinct(partitioners: Sequence[Partitioner]) -> Iterable[Partitioner]:
    return (p for i, p in enumerate(partitioners) if is_first(partitioners, i))


def _edge_offer(
    partitioner: Partitioner,
) -> Callable[[str, ExportedProgram], Sequence[PassType]] | None:
    for cls in type(partitioner).__mro__:
        if "edge_transform_passes" in vars(cls):
            return partitioner.edge_transform_passes  # type: ignore[no-any-return]
        contributor = _contributors.get(_dotted(cls))
        if contributor is not None and contributor.edge_passes is not None:
            function = contributor.edge_passes
            return lambda method, program: function(partitioner, method, program)
    return None


def _pre_decomposition_offer(
    partitioner: Partitioner, method: str
) -> Callable[[ExportedProgram], ExportedProgram] | None:
    for cls in type(partitioner).__mro__:
        if cls is Partitioner:
            return None
        if "transform_for_pre_decomposition" in vars(cls):
            return partitioner.transform_for_pre_decomposition  # type: ignore[no-any-return]
        contributor = _contributors.get(_dotted(cls))
        if contributor is not None and contributor.pre_decomposition is not None:
            function = contributor.pre_decomposition
            return lambda program: function(partitioner, method, program)
    return None


def _blame(witnesses: Sequence[Witness], who: str, method: str) -> None:
    for witness in witnesses:
        if not witness.intact:
            raise _invalid(who, method, f"changed {witness.name}, which is not its own")


def _invalid(who: str, method: str, problem: str, error: Exception | None = None) -> LoweringError:
    detail = f": {type(error).__name__}: {error}" if error is not None else ""
    return LoweringError(
        Code.PASS_CONTRIBUTION_INVALID,
        f"the passes of {who} for method {method!r} cannot be used",
        found=f"{who} {problem}{detail}",
        expected="a list of passes that change only the program they are given",
    )


def _kind(value: object) -> str:
    if isclass(value):
        return f"the class {value.__name__} instead of an instance"
    return "None" if value is None else f"a {type(value).__name__}"


def _dotted(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
