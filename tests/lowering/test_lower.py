"""`lower` against the standard entry point."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from executorch.exir.backend.partitioner import PartitionResult
from executorch.extension.pybindings.portable_lib import _load_for_executorch_from_buffer
from torch.export import ExportedProgram

from staticlm.errors import Code, LoweringError
from staticlm.lowering.lower import lower


class Block(torch.nn.Module):
    """Delegated and portable operators, every kind of constant, and a mutated buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(8, 8)
        self.register_buffer("scale", torch.randn(8))
        self.register_buffer("offset", torch.randn(8), persistent=False)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.add_(1.0)
        hidden = self.linear(x) * 2.5 + self.scale + torch.arange(8.0) * 0.1 + self.offset
        return torch.softmax(hidden, -1) + self.calls, x > 0.5


INPUTS = {"prefill": torch.linspace(-1, 1, 32).view(4, 8), "decode": torch.ones(1, 8) * 0.7}


@pytest.fixture(scope="module")
def programs() -> dict[str, ExportedProgram]:
    model = Block().eval()
    return {name: torch.export.export(model, (x,)) for name, x in INPUTS.items()}


def test_same_file_as_the_standard_entry_point(programs: dict[str, ExportedProgram]) -> None:
    methods = {"get_vocab_size": 7}
    lowered = lower(programs, partitioners=[XnnpackPartitioner()], constant_methods=methods)
    stock = to_edge_transform_and_lower(
        dict(programs), partitioner=[XnnpackPartitioner()], constant_methods=methods
    )
    buffer = lowered.edge.to_executorch().buffer
    assert buffer == stock.to_executorch().buffer
    module = _load_for_executorch_from_buffer(buffer)
    assert module.run_method("get_vocab_size", []) == [7]
    for name, x in INPUTS.items():
        expected = Block().eval()(x)
        got = module.run_method(name, [x])
        torch.testing.assert_close(got[0], expected[0], rtol=0, atol=2e-6)
        assert torch.equal(got[1], expected[1])


def test_partitioners_by_method(programs: dict[str, ExportedProgram]) -> None:
    edge = lower(programs, partitioners={"prefill": [XnnpackPartitioner()]}).edge
    delegated = {
        m: "executorch_call_delegate" in edge.exported_program(m).graph_module.code
        for m in programs
    }
    assert delegated == {"prefill": True, "decode": False}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"partitioners": {"verify": []}}, "partitioners names a method .* found verify"),
        ({"transform_passes": {"x": [], "a": []}}, "transform_passes names a method .* found a, x"),
        ({"partitioners": XnnpackPartitioner()}, "are not a list: found XnnpackPartitioner"),
        ({"partitioners": [XnnpackPartitioner]}, "cannot be used: found <class"),
        ({"constant_methods": {"decode": 1}}, "has the name of a program: found decode"),
    ],
)
def test_arguments_that_do_not_fit(
    arguments: dict[str, Any], message: str, programs: dict[str, ExportedProgram]
) -> None:
    with pytest.raises(LoweringError, match=message) as caught:
        lower(programs, **arguments)
    assert caught.value.code is Code.LOWERING_FAILED


class TanhGelu(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.nn.functional.gelu(x, approximate="tanh"), torch.nn.functional.gelu(x)


def test_xnnpack_contributes_the_gelu_that_its_delegate_lacks() -> None:
    x = torch.linspace(-4, 4, 101).view(1, 101)
    program = torch.export.export(TanhGelu(), (x,))
    stock = to_edge_transform_and_lower({"m": program}, partitioner=[XnnpackPartitioner()])
    lowered = lower({"m": program}, partitioners=[XnnpackPartitioner()])
    errors = []
    for edge in (stock, lowered.edge):
        assert edge.exported_program("m").graph_module.code.count("executorch_call_delegate(") == 1
        buffer = edge.to_executorch().buffer  # the module reads it in place
        module = _load_for_executorch_from_buffer(buffer)
        got = module.run_method("m", [x])
        errors.append([float((a - b).abs().max()) for a, b in zip(got, TanhGelu()(x), strict=True)])
    assert 4e-4 < errors[0][0] < 5e-4
    assert max(*errors[1], errors[0][1]) < 2e-6
    assert [str(r) for r in lowered.records if r.changed] == [
        "m: pre-decomposition: XnnpackPartitioner: transform_for_pre_decomposition:"
        " changed the graph"
    ]


class Greedy(XnnpackPartitioner):
    """Asks for an operator to be kept whole and then does not take it."""

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        return PartitionResult(exported_program, {})


def test_what_executorch_raises_is_an_error_of_ours(programs: dict[str, ExportedProgram]) -> None:
    with pytest.raises(LoweringError, match="registered by the partitioner Greedy") as caught:
        lower({"decode": programs["decode"]}, partitioners=[Greedy()])
    assert caught.value.code is Code.LOWERING_FAILED
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_nothing_to_lower() -> None:
    with pytest.raises(LoweringError, match="nothing to lower"):
        lower({})
