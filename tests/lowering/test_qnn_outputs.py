"""Output order of QNN delegates: the stock swap, our order, labels, and the decoder."""

from __future__ import annotations

import copy
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("executorch.backends.qualcomm.serialization.qc_schema")

import executorch.backends.qualcomm.python.PyQnnManagerAdaptor as PyQnn
from executorch.backends.qualcomm._passes.qnn_pass_manager import get_qnn_pass_manager_cls
from executorch.backends.qualcomm.serialization.qc_schema_serialize import flatbuffer_to_option
from tests.support.qnn import Undelegated
from torch.export import ExportedProgram

from staticlm.lowering.backends import get_backend
from staticlm.lowering.lower import lower
from staticlm.lowering.programs import clone
from staticlm.lowering.qnn import backend, from_options
from staticlm.lowering.qnn.outputs import defined_order, order_outputs, restored_order

SPECS = from_options({"soc_model": "SM8750", "use_fp16": True}).compile_specs
OPTIONS = flatbuffer_to_option(SPECS[0].value)


class Swapped(torch.nn.Module):
    """Two outputs of one shape. Two transpositions of the second are fused to the front."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        turned = (x + 1).permute(0, 2, 1)
        first = torch.relu(x) * 5 - 1
        return first, turned.permute(0, 2, 1)


class Four(torch.nn.Module):
    """Four outputs of one shape, two of them fused transpositions."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = (x + 1).permute(0, 2, 1)
        b = (x * 3).permute(0, 2, 1)
        c, d = torch.relu(x) - 2, torch.abs(x) * 4
        return c, b.permute(0, 2, 1), d, a.permute(0, 2, 1)


class Inner(torch.nn.Module):
    """The second output is needed to make the first."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inner = torch.relu(x)
        return inner * 3, inner, torch.abs(x)


X = torch.linspace(-2, 2, 12).view(1, 3, 4)


def edge_program(model: torch.nn.Module) -> ExportedProgram:
    program = torch.export.export(model, (X,))
    return lower({"m": program}, partitioners=[Undelegated(SPECS)]).edge.exported_program("m")


def stock_rewrites(program: ExportedProgram) -> ExportedProgram:
    """A copy after upstream's rewrites for compilation."""
    program = copy.deepcopy(program)
    manager = get_qnn_pass_manager_cls(OPTIONS.backend_options.backend_type)()
    manager.transform_for_preprocess_pipeline(program)
    return program


def published(program: ExportedProgram) -> list[str]:
    """Names of the output tensors in the order in which QNN gets to know them."""
    wrappers: defaultdict[str, dict[int, Any]] = defaultdict(dict)
    backend.build(program, OPTIONS, wrappers)
    tensors = [t for by_index in wrappers.values() for t in by_index.values()]
    all_names = [PyQnn.PyQnnTensorWrapper(tensor).GetName() for tensor in tensors]
    return [name for name in all_names if name.startswith("output_")]


@pytest.mark.parametrize(
    ("model", "stock"), [(Swapped(), [1, 0]), (Four(), [3, 1, 0, 2]), (Inner(), [1, 0, 2])]
)
def test_stock_swaps_outputs_and_ours_does_not(model: torch.nn.Module, stock: list[int]) -> None:
    edge = edge_program(model)
    rewritten = stock_rewrites(edge)
    signature = list(rewritten.graph_signature.user_outputs)
    assert defined_order(rewritten) == stock
    stock_names = [re.sub(r"^output_|@0$", "", name) for name in published(rewritten)]
    assert [signature.index(name) for name in stock_names] == stock

    ordered = copy.deepcopy(edge)
    backend.prepare(ordered, OPTIONS)
    assert defined_order(ordered) == list(range(len(stock)))
    labels = [int(name.split("_")[1]) for name in published(ordered)]
    assert labels == list(range(len(stock)))
    assert restored_order(published(ordered)) == labels
    # The stock runtime binds what begins with "output_" and belongs to no mutable buffer.
    assert all("mutbuf_" not in name for name in published(ordered))


@pytest.mark.parametrize("model", [Swapped(), Four(), Inner()])
def test_ordering_keeps_values(model: torch.nn.Module) -> None:
    program = stock_rewrites(edge_program(model))
    assert order_outputs(program, backend._identity)
    assert not order_outputs(program, backend._identity)
    program.validate()
    for got, expected in zip(program.module()(X), model(X), strict=True):
        torch.testing.assert_close(got, expected)


def test_operators_are_checked_against_the_signature() -> None:
    """One tensor published for two outputs is upstream's own refusal, not a misread at run time."""

    class Twice(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = torch.relu(x)
            return y, y

    program = copy.deepcopy(edge_program(Twice()))
    with pytest.raises(RuntimeError, match="does not match the delegated program signature"):
        backend.operators(program, OPTIONS)


class Random(torch.nn.Module):
    """Outputs in any order over a chain of nodes that read each other."""

    def __init__(self, reads: Sequence[int], outputs: Sequence[int]) -> None:
        super().__init__()
        self.reads = reads
        self.outputs = outputs

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = [x]
        for step, read in enumerate(self.reads):
            values.append(values[read % len(values)] * 0.5 + float(step + 1))
        return tuple(values[1 + o] for o in self.outputs)


def plus_zero(graph: torch.fx.Graph, node: torch.fx.Node) -> torch.fx.Node:
    made = graph.call_function(torch.ops.aten.clone.default, (node,))
    made.meta = dict(node.meta)
    return made


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_graph_is_put_in_order_without_changing_values(data: st.DataObject) -> None:
    reads = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=5))
    count = len(reads)
    outputs = data.draw(
        st.lists(st.integers(0, count - 1), min_size=1, max_size=count, unique=True)
    )
    model = Random(reads, outputs)
    program = clone(torch.export.export(model, (X,)))
    order_outputs(program, plus_zero)
    assert defined_order(program) == list(range(len(outputs)))
    program.validate()
    for got, expected in zip(program.module()(X), model(X), strict=True):
        assert torch.equal(got, expected)


def reference(names: Sequence[str], from_context_binary: bool) -> list[int]:
    """The rules of `restored_order`, written down once more in another way."""
    result = list(range(len(names)))
    if from_context_binary:
        return result
    table: dict[int, int] = {}
    slots: list[int] = []
    for index, name in enumerate(names):
        if not name.startswith("output_") or "mutbuf_" in name:
            continue
        slots.append(index)
        digits = name[len("output_") :].split("_", 1)[0]
        rest = name[len("output_") + len(digits) :]
        good = digits and all("0" <= c <= "9" for c in digits) and len(digits) <= 9
        if not good or not rest.startswith("_") or int(digits) in table:
            return result
        table[int(digits)] = index
    if any(number not in table for number in range(len(slots))):
        return result
    for number, slot in enumerate(slots):
        result[slot] = table[number]
    return result


LABEL = st.one_of(
    st.integers(0, 4).map(str),
    st.sampled_from(["", "00", "01", "-1", "x", "9999999999", "123456789", "٣", " 1", "1.0"]),
)
NAME = st.one_of(
    st.tuples(LABEL, st.sampled_from(["_add@0", "_mul@1", "@0", "", "_"])).map(
        lambda t: f"output_{t[0]}{t[1]}"
    ),
    st.sampled_from(["output_add@0", "output_mutbuf_0_add@0", "input_0_x@0", "sub@0", ""]),
)


@settings(max_examples=500)
@given(st.lists(NAME, max_size=6), st.booleans())
def test_the_decoder_equals_the_reference(names: list[str], context_binary: bool) -> None:
    got = restored_order(names, from_context_binary=context_binary)
    assert got == reference(names, context_binary)
    assert sorted(got) == list(range(len(names)))


@settings(max_examples=200)
@given(st.permutations(range(5)), st.integers(0, 5))
def test_the_decoder_restores_any_permutation(labels: list[int], at: int) -> None:
    names = [f"output_{label}_node@0" for label in labels]
    names.insert(at, "output_mutbuf_0_cache@0")
    order = restored_order(names)
    restored = [names[i] for i in order]
    assert restored[at] == "output_mutbuf_0_cache@0"
    del restored[at]
    assert restored == [f"output_{i}_node@0" for i in range(5)]


@pytest.mark.parametrize(
    "names",
    [
        ["output_1_a@0", "output_1_b@0"],
        ["output_1_a@0", "output_2_b@0"],
        ["output_1_a@0", "output_b@0"],
        ["output_1_a@0", "output_0000000000_b@0"],
        ["output_b@0", "output_a@0"],
    ],
)
def test_lists_that_keep_their_order(names: list[str]) -> None:
    assert restored_order(names) == [0, 1]


SDK = os.environ.get("QNN_SDK_ROOT")


@pytest.mark.skipif(
    not SDK or not Path(SDK, "lib/x86_64-linux-clang/libQnnHtp.so").is_file(),
    reason="needs a Qualcomm SDK: QNN_SDK_ROOT names none",
)
@pytest.mark.parametrize("model", [Swapped(), Four(), Inner()])
def test_outputs_of_a_context_binary_are_in_order(model: torch.nn.Module) -> None:
    """Compiles with the SDK and reads the names back from the context binary."""
    target = from_options({"soc_model": "SM8750", "use_fp16": True})
    program = torch.export.export(model, (X,))
    edge = lower(
        {"forward": program},
        partitioners=[target.partitioner],
        compile_config=get_backend("qnn").compile_config(),
    ).edge
    buffer = edge.to_executorch().buffer
    assert b"QnnBackend" in buffer
    assert b"StaticLMQnnBackend" not in buffer
    labels = [int(m) for m in re.findall(rb"output_(\d+)_\w+@\d", buffer)]
    assert list(dict.fromkeys(labels)) == sorted(set(labels))
