"""Constant names: what the stock path loses, and what ours keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.exir import (
    EdgeProgramManager,
    ExecutorchBackendConfig,
    to_edge_transform_and_lower,
)
from executorch.exir.dialects._ops import ops as edge_ops
from executorch.exir.pass_base import ExportedProgramPassBase, ExportedProgramPassResult
from executorch.exir.passes.constant_prop_pass import constant_prop_pass
from executorch.extension.pybindings.portable_lib import (
    _load_for_executorch,
    _load_for_executorch_from_buffer,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.export import ExportedProgram

from staticlm.lowering.constants import Names, lift_constants
from staticlm.lowering.lower import lower
from staticlm.lowering.programs import clone

X = torch.tensor([1.0, 2.0, 3.0])


def stock(programs: Mapping[str, ExportedProgram], passes: Any = None) -> EdgeProgramManager:
    return to_edge_transform_and_lower(dict(programs), transform_passes=passes)


def ours(programs: Mapping[str, ExportedProgram], passes: Any = None) -> EdgeProgramManager:
    return lower(programs, transform_passes=passes or ()).edge


def execute(edge: EdgeProgramManager, method: str = "forward") -> torch.Tensor:
    buffer = edge.to_executorch().buffer
    module = _load_for_executorch_from_buffer(buffer)
    return module.run_method(method, [X])[0].clone()


class NamedLikeStock(torch.nn.Module):
    """Its one buffer has the name that stock lifting will give to the literal 2.0."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("_lifted_tensor_constant1", torch.tensor(10.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self._lifted_tensor_constant1 * 2.0


def test_stock_lifting_overwrites_a_buffer_and_ours_does_not() -> None:
    programs = {"forward": torch.export.export(NamedLikeStock(), (X,))}
    assert execute(stock(programs)).tolist() == [4.0, 8.0, 12.0]  # eager: 20, 40, 60
    edge = ours(programs)
    assert edge.exported_program().state_dict["_lifted_tensor_constant1"].item() == 10.0
    assert execute(edge).tolist() == [20.0, 40.0, 60.0]


class TwoLiterals(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 2.0 - 0.0) * 5.0


class DropZero(ExportedProgramPassBase):
    """Removes `- 0.0` together with its constant, as a folding pass does."""

    def call(self, exported_program: ExportedProgram) -> ExportedProgramPassResult:
        graph = exported_program.graph
        signature = exported_program.graph_signature
        for node in list(graph.nodes):
            if node.op != "call_function" or node.target != edge_ops.edge.aten.sub.Tensor:
                continue
            node.replace_all_uses_with(node.args[0])
            constant = node.args[1]
            graph.erase_node(node)
            target = signature.inputs_to_buffers[constant.name]
            signature.input_specs = [
                s for s in signature.input_specs if s.arg.name != constant.name
            ]
            del exported_program.state_dict[target]
            graph.erase_node(constant)
        return ExportedProgramPassResult(exported_program, True)


def add_hundred(module: torch.fx.GraphModule) -> torch.fx.passes.infra.pass_base.PassResult:
    """Adds a constant of 100 to the result, as a get_attr node."""
    module.register_buffer("hundred", torch.tensor(100.0))
    output = module.graph.output_node()
    (value,) = output.args[0]
    with module.graph.inserting_before(output):
        constant = module.graph.get_attr("hundred")
        constant.meta["val"] = value.meta["val"].new_empty(())
        total = module.graph.call_function(edge_ops.edge.aten.add.Tensor, (value, constant))
        total.meta = dict(value.meta)
    output.args = ((total,),)
    return torch.fx.passes.infra.pass_base.PassResult(module, True)


def test_a_name_freed_by_a_deleted_constant_is_not_used_for_a_live_one() -> None:
    programs = {"forward": torch.export.export(TwoLiterals(), (X,))}
    eager = (TwoLiterals()(X) + 100).tolist()
    passes = [DropZero(), add_hundred]
    with pytest.raises(SyntaxError, match="duplicate argument '_lifted_tensor_constant2'"):
        stock(programs, passes)
    assert execute(ours(programs, passes)).tolist() == eager == [110.0, 120.0, 130.0]


class Table(torch.nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_buffer("table", torch.full((3,), value))
        self.register_buffer("shared", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.table + self.shared


@pytest.mark.parametrize(
    ("route", "decode", "names"),
    [
        (stock, [3.0, 5.0, 7.0], {"table", "shared"}),
        (ours, [4.0, 7.0, 10.0], {"table", "table_decode_0", "shared"}),
    ],
)
def test_methods_of_one_file_keep_distinct_tables(
    route: Callable[[Mapping[str, ExportedProgram]], EdgeProgramManager],
    decode: list[float],
    names: set[str],
    tmp_path: Path,
) -> None:
    programs = {
        "prefill": torch.export.export(Table(2.0), (X,)),
        "decode": torch.export.export(Table(3.0), (X,)),
    }
    manager = route(programs).to_executorch(ExecutorchBackendConfig(external_constants=True))
    (stored,) = manager._emitter_output.external_constant_map.values()
    assert set(stored) == names
    (tmp_path / "m.pte").write_bytes(manager.buffer)
    manager.write_tensor_data_to_file(str(tmp_path))
    (data,) = tmp_path.glob("*.ptd")
    module = _load_for_executorch(str(tmp_path / "m.pte"), str(data))
    assert module.run_method("prefill", [X])[0].tolist() == [3.0, 5.0, 7.0]
    assert module.run_method("decode", [X])[0].tolist() == decode


def test_equal_tables_keep_one_name_and_one_copy() -> None:
    programs = {
        "prefill": torch.export.export(Table(2.0), (X,)),
        "decode": torch.export.export(Table(2.0), (X,)),
    }
    manager = ours(programs).to_executorch(ExecutorchBackendConfig(external_constants=True))
    (stored,) = manager._emitter_output.external_constant_map.values()
    assert set(stored) == {"table", "shared"}
    assert len(manager._emitter_output.external_constant_buffer) == 2


class Folded(torch.nn.Module):
    """Its table is folded into a new constant, which upstream numbers from 0 in every method."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_buffer("table", torch.full((3,), value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sqrt(self.table)


class Fold(ExportedProgramPassBase):
    def call(self, exported_program: ExportedProgram) -> ExportedProgramPassResult:
        return ExportedProgramPassResult(constant_prop_pass(exported_program), True)


@pytest.mark.parametrize(("route", "decode"), [(stock, 2.0), (ours, 3.0)])
def test_folded_tables_stay_distinct(route: Any, decode: float, tmp_path: Path) -> None:
    programs = {
        "prefill": torch.export.export(Folded(4.0), (X,)),
        "decode": torch.export.export(Folded(9.0), (X,)),
    }
    edge = route(programs, [Fold()])
    manager = edge.to_executorch(ExecutorchBackendConfig(external_constants=True))
    (tmp_path / "m.pte").write_bytes(manager.buffer)
    manager.write_tensor_data_to_file(str(tmp_path))
    (data,) = tmp_path.glob("*.ptd")
    module = _load_for_executorch(str(tmp_path / "m.pte"), str(data))
    assert module.run_method("prefill", [X])[0].tolist() == (X * 2.0).tolist()
    assert module.run_method("decode", [X])[0].tolist() == (X * decode).tolist()


def test_literals_of_two_methods_have_two_names() -> None:
    programs = {m: torch.export.export(TwoLiterals(), (X,)) for m in ("prefill", "decode")}
    edge = ours(programs)
    keys = [set(edge.exported_program(m).state_dict) for m in programs]
    assert keys[0] == {f"_lifted_tensor_prefill_{i}" for i in range(3)}
    assert keys[0].isdisjoint(keys[1])
    assert execute(edge, "decode").tolist() == TwoLiterals()(X).tolist()


class DotsAndUnderscores(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Module()
        self.a.register_buffer("b_c", torch.tensor(2.0))
        self.a_b = torch.nn.Module()
        self.a_b.register_buffer("c", torch.tensor(30.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.a.b_c + self.a_b.c) * 7.0


def test_names_that_differ_by_dot_and_underscore_stay_apart() -> None:
    module = DotsAndUnderscores()
    edge = ours({"forward": torch.export.export(module, (X,))})
    assert {"a.b_c", "a_b.c"} < set(edge.exported_program().state_dict)
    assert execute(edge).tolist() == module(X).tolist() == [224.0, 238.0, 252.0]


class Plain(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x


def with_attributes(count: int) -> ExportedProgram:
    """`x + x`, then one addition per reading of the nested attribute `inner.value`."""
    program = clone(torch.export.export(Plain(), (X,)))
    module = program.graph_module
    module.inner = torch.nn.Module()
    module.inner.register_buffer("value", torch.tensor([1.0, 10.0, 100.0]))
    output = module.graph.output_node()
    (value,) = output.args[0]
    for _ in range(count):
        with module.graph.inserting_before(output):
            constant = module.graph.get_attr("inner.value")
            constant.meta["val"] = value.meta["val"]
            total = module.graph.call_function(torch.ops.aten.add.Tensor, (value, constant))
            total.meta = dict(value.meta)
            value = total
    output.args = ((value,),)
    (spec,) = program.graph_signature.output_specs
    spec.arg.name = value.name
    return program


def test_a_nested_attribute_read_twice_becomes_one_buffer() -> None:
    program = with_attributes(2)
    names = Names(["_lifted_tensor_m_0"])
    assert lift_constants(program, "m", names)
    assert list(program.state_dict) == ["_lifted_tensor_m_1"]
    assert [s.arg.name for s in program.graph_signature.input_specs] == ["_lifted_tensor_m_1", "x"]
    program.validate()
    assert program.module()(X).tolist() == [4.0, 24.0, 206.0]
    assert not lift_constants(program, "m", names)


NAME = st.from_regex(r"[a-c][a-c._0-2]{0,5}", fullmatch=True)


@settings(max_examples=200, deadline=None)
@given(st.lists(NAME), st.lists(NAME, min_size=1, max_size=12))
def test_fresh_names_never_meet_reserved_ones(reserved: list[str], stems: list[str]) -> None:
    names = Names(reserved)
    given_out = [names.fresh(stem) for stem in stems]
    plain = [name.replace(".", "_") for name in given_out]
    assert len(set(plain)) == len(plain)
    assert set(plain).isdisjoint(name.replace(".", "_") for name in reserved)
    assert all(name.isidentifier() for name in given_out)
