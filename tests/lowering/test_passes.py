"""Contributed passes: order, exactly once, recorded, and refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from executorch.exir.backend.partitioner import Partitioner, PartitionResult
from executorch.exir.dialects._ops import ops as edge_ops
from executorch.exir.pass_base import ExportedProgramPassBase, ExportedProgramPassResult
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.fx.passes.infra.pass_base import PassResult

from staticlm.errors import Code, LoweringError
from staticlm.lowering.lower import lower
from staticlm.lowering.passes import (
    PassRecord,
    register_pass_contributor,
    unregister_pass_contributor,
)
from staticlm.lowering.programs import clone, program_digest

ADD = edge_ops.edge.aten.add.Tensor
MUL = edge_ops.edge.aten.mul.Tensor


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight


@pytest.fixture
def programs() -> dict[str, ExportedProgram]:
    """Two methods over one weight."""
    model = Model()
    return {
        "prefill": torch.export.export(model, (torch.ones(4, 3),)),
        "decode": torch.export.export(model, (torch.ones(1, 3),)),
    }


class Doubling:
    """Puts `y + y` in front of the output: running it twice shows in graph and result."""

    def __init__(self, log: list[str], name: str = "") -> None:
        self.log = log
        self.name = name

    def __call__(self, module: GraphModule) -> PassResult:
        self.log.append(self.name)
        output = module.graph.output_node()
        (value,) = output.args[0]
        with module.graph.inserting_before(output):
            total = module.graph.call_function(ADD, (value, value))
            total.meta = dict(value.meta)
        output.args = ((total,),)
        return PassResult(module, True)


class Nothing(ExportedProgramPassBase):
    """A program pass that leaves the program alone."""

    def call(self, exported_program: ExportedProgram) -> ExportedProgramPassResult:
        return ExportedProgramPassResult(exported_program, True)


class Offering(Partitioner):
    """A partitioner that delegates nothing and offers passes."""

    def __init__(self, *passes: Any) -> None:
        super().__init__()
        self.passes = passes
        self.asked: list[str] = []

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        return PartitionResult(exported_program, {})

    def edge_transform_passes(self, method: str, program: ExportedProgram) -> Sequence[Any]:
        self.asked.append(method)
        return list(self.passes)


class Foreign(Partitioner):
    """A partitioner of somebody else: it offers nothing."""

    def __init__(self, label: str = "") -> None:
        super().__init__()
        self.label = label

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        return PartitionResult(exported_program, {})


def count(edge: Any, method: str, target: Any = ADD) -> int:
    nodes = edge.exported_program(method).graph.nodes
    return sum(node.target == target for node in nodes)


def test_stock_drops_contributions_and_ours_runs_each_once(
    programs: dict[str, ExportedProgram],
) -> None:
    log: list[str] = []
    partitioner = Offering(Doubling(log, "a"))
    edge = to_edge_transform_and_lower(dict(programs), partitioner=[partitioner])
    assert (log, count(edge, "decode")) == ([], 1)
    lowered = lower(programs, partitioners=[partitioner])
    assert log == ["a", "a"]
    assert partitioner.asked == ["prefill", "decode"]
    assert [count(lowered.edge, m) for m in programs] == [2, 2]


def test_stock_runs_one_methods_passes_on_the_other_and_ours_does_not(
    programs: dict[str, ExportedProgram],
) -> None:
    """What a caller must do on the stock path for partitioners that differ by method."""
    log: list[str] = []
    by_method = {m: [Offering(Doubling(log, m))] for m in programs}
    passes = [item for group in by_method.values() for p in group for item in p.passes]
    edge = to_edge_transform_and_lower(
        dict(programs), transform_passes=passes, partitioner=by_method
    )
    assert log == ["prefill", "decode", "prefill", "decode"]
    assert [count(edge, m) for m in programs] == [3, 3]
    log.clear()
    lowered = lower(programs, partitioners=by_method)
    assert log == ["prefill", "decode"]
    assert [count(lowered.edge, m) for m in programs] == [2, 2]


def test_order_and_records(programs: dict[str, ExportedProgram]) -> None:
    log: list[str] = []
    lowered = lower(
        {"decode": programs["decode"]},
        partitioners=[
            Offering(Doubling(log, "first"), Nothing()),
            Offering(Doubling(log, "second")),
        ],
        transform_passes={"decode": [Doubling(log, "caller")]},
    )
    assert log == ["caller", "first", "second"]
    assert lowered.records == (
        PassRecord("decode", "edge", "caller", "Doubling", True),
        PassRecord("decode", "edge", "Offering", "Doubling", True),
        PassRecord("decode", "edge", "Offering", "Nothing", False),
        PassRecord("decode", "edge", "Offering", "Doubling", True),
        PassRecord("decode", "edge", "staticlm", "LiftConstants", False),
    )
    assert str(lowered.records[1]) == "decode: edge: Offering: Doubling: changed the graph"


def test_a_partitioner_listed_twice_contributes_once(programs: dict[str, ExportedProgram]) -> None:
    log: list[str] = []
    partitioner = Offering(Doubling(log))
    lower({"decode": programs["decode"]}, partitioners=[partitioner, partitioner])
    assert partitioner.asked == ["decode"]
    assert len(log) == 1


class TakesInput(torch.nn.Module):
    """Its argument has the name of a builtin, which graph copies rename."""

    def forward(self, input: torch.Tensor, relu: torch.Tensor) -> torch.Tensor:
        return torch.relu(input) + torch.relu(relu)


def test_a_clone_keeps_names_and_tensors() -> None:
    program = torch.export.export(TakesInput(), (torch.ones(2), torch.ones(2)))
    copy = clone(program)
    assert [n.name for n in copy.graph.nodes] == [n.name for n in program.graph.nodes]
    assert program_digest(copy) == program_digest(program)
    assert copy.module()(-torch.ones(2), torch.ones(2)).tolist() == [1.0, 1.0]
    before = program_digest(program)
    Doubling([])(copy.graph_module)
    assert program_digest(program) == before != program_digest(copy)


def test_programs_and_results(programs: dict[str, ExportedProgram]) -> None:
    before = [str(p.graph) for p in programs.values()]
    lowered = lower(programs, partitioners=[Offering(Doubling([]))])
    assert [str(p.graph) for p in programs.values()] == before
    module = lowered.edge.exported_program("decode").module()
    assert module(torch.ones(1, 3)).tolist() == [[4.0, 4.0, 4.0]]


@pytest.fixture
def adapter() -> Iterator[list[str]]:
    log: list[str] = []

    def edge(partitioner: Any, method: str, program: ExportedProgram) -> Sequence[Any]:
        return [Doubling(log, f"{partitioner.label} {method}")]

    def early(partitioner: Any, method: str, program: ExportedProgram) -> ExportedProgram:
        log.append(f"{partitioner.label} {method} early")
        for node in program.graph.nodes:
            if node.target == torch.ops.aten.add.Tensor:
                node.target = torch.ops.aten.mul.Tensor
        program.graph_module.recompile()
        return program

    register_pass_contributor(Foreign, edge, pre_decomposition=early)
    yield log
    unregister_pass_contributor(Foreign)


class Derived(Foreign):
    """Inherits the adapter of its base."""


@pytest.mark.parametrize("cls", [Foreign, Derived])
def test_an_adapter_contributes_for_a_class_that_is_not_ours(
    cls: type[Foreign], adapter: list[str], programs: dict[str, ExportedProgram]
) -> None:
    partitioners = {"prefill": [cls("p"), cls("q")], "decode": [cls("d")]}
    lowered = lower(programs, partitioners=partitioners)
    # The standard entry point decomposes every method before it transforms the first.
    assert adapter == [
        *("p prefill early", "q prefill early", "d decode early"),
        *("p prefill", "q prefill", "d decode"),
    ]
    early = [r for r in lowered.records if r.stage == "pre-decomposition"]
    name = "transform_for_pre_decomposition"
    assert early == [
        PassRecord("prefill", "pre-decomposition", cls.__name__, name, True),
        PassRecord("prefill", "pre-decomposition", cls.__name__, name, False),
        PassRecord("decode", "pre-decomposition", cls.__name__, name, True),
    ]
    assert [count(lowered.edge, m, MUL) for m in programs] == [1, 1]
    assert "mul" not in str(programs["decode"].graph)


def test_a_second_adapter_for_one_class_is_refused(adapter: list[str]) -> None:
    with pytest.raises(LoweringError, match="Foreign are registered twice") as caught:
        register_pass_contributor(Foreign, lambda partitioner, method, program: [])
    assert caught.value.code is Code.REGISTRATION_DUPLICATE


class Early(Foreign):
    """Overrides ExecuTorch's own hook."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result

    def transform_for_pre_decomposition(self, exported_program: ExportedProgram) -> Any:
        return self.result(exported_program)


def scale_weight(program: ExportedProgram) -> None:
    with torch.no_grad():
        program.state_dict["weight"].mul_(2.0)


class ScalesWeight(ExportedProgramPassBase):
    """Folds a factor into a weight in place: the other method's weight is the same tensor."""

    def call(self, exported_program: ExportedProgram) -> ExportedProgramPassResult:
        scale_weight(exported_program)
        return ExportedProgramPassResult(exported_program, True)


class Vandal(Foreign):
    """Keeps the programs that it is shown and changes the first one when asked again."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[ExportedProgram] = []

    def edge_transform_passes(self, method: str, program: ExportedProgram) -> Sequence[Any]:
        self.seen.append(program)
        if len(self.seen) == 2:
            Doubling([])(self.seen[0].graph_module)
        return []


class Asked(Foreign):
    """Answers what it was made with, or raises it."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def edge_transform_passes(self, method: str, program: ExportedProgram) -> Any:
        if callable(self.answer):
            return self.answer(program)
        return self.answer


def boom(value: Any) -> Any:
    raise ValueError("boom")


REFUSED = {
    "None": (lambda: Asked(None), "Asked gave None"),
    "a string": (lambda: Asked("passes"), "Asked gave a str"),
    "a number among passes": (lambda: Asked([3]), "Asked gave a int among its passes"),
    "a class": (
        lambda: Asked([Nothing]),
        "Asked gave the class Nothing instead of an instance among its passes",
    ),
    "raises": (lambda: Asked(boom), "Asked raised while giving its passes: ValueError: boom"),
    "a pass raises": (lambda: Asked([boom]), "Asked pass boom raised: ValueError: boom"),
    "changes while giving": (
        lambda: Asked(lambda p: Doubling([])(p.graph_module) and []),
        "Asked changed the program instead of giving passes",
    ),
    "weights of both": (
        lambda: Asked([ScalesWeight()]),
        "Asked changed the program given for method 'prefill', which is not its own",
    ),
    "weights of both while giving": (
        lambda: Asked(lambda p: scale_weight(p) or []),
        "Asked changed the program instead of giving passes",
    ),
    "another method's result": (
        Vandal,
        "Vandal changed the edge program of method 'prefill', which is not its own",
    ),
    "None early": (
        lambda: Early(lambda p: None),
        "Early returned NoneType before decomposition",
    ),
    "raises early": (lambda: Early(boom), "Early raised before decomposition: ValueError: boom"),
    "weights early": (
        lambda: Early(lambda p: scale_weight(p) or p),
        "Early changed the program given for method 'prefill', which is not its own",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_contribution_that_cannot_be_used_is_refused_by_name(
    case: str, programs: dict[str, ExportedProgram]
) -> None:
    make, message = REFUSED[case]
    with pytest.raises(LoweringError) as caught:
        lower(programs, partitioners=[make()])
    assert caught.value.code is Code.PASS_CONTRIBUTION_INVALID
    assert caught.value.found == message


def test_a_callers_pass_that_raises_is_named(programs: dict[str, ExportedProgram]) -> None:
    with pytest.raises(LoweringError, match="the passes of caller for method 'prefill'") as caught:
        lower(programs, transform_passes=[boom])
    assert isinstance(caught.value.__cause__, ValueError)
