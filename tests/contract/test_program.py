"""Reading program files, against ExecuTorch's own reader."""

from __future__ import annotations

import os
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flatbuffers
import pytest
from executorch.exir import schema
from tests.support.program_files import CONSTANT_METHODS, lower_add, lower_tied, tied_model

from staticlm.contract.program import ProgramFacts, read_program
from staticlm.errors import Code, ProgramError


@pytest.fixture(scope="module")
def data() -> bytes:
    return lower_tied(tied_model(), {"prefill": 4, "decode": 1}, CONSTANT_METHODS)


@pytest.fixture(scope="module")
def plain() -> bytes:
    return lower_add()


@pytest.fixture(scope="module")
def facts(data: bytes, tmp_path_factory: pytest.TempPathFactory) -> ProgramFacts:
    path = tmp_path_factory.mktemp("program") / "model.pte"
    path.write_bytes(data)
    return read_program(path)


@pytest.fixture(scope="module")
def reference(data: bytes):
    from executorch.exir._serialize._program import deserialize_pte_binary

    return deserialize_pte_binary(data)


def refused(path: Path) -> ProgramError:
    with pytest.raises(ProgramError) as caught:
        read_program(path)
    return caught.value


def test_methods_are_those_that_compute(facts: ProgramFacts) -> None:
    assert set(facts.methods) == {"prefill", "decode"}
    assert set(facts.constants) == set(CONSTANT_METHODS)


def test_signature(facts: ProgramFacts) -> None:
    method = facts.methods["prefill"]
    tokens, state = method.inputs
    assert (tokens.dtype, tokens.shape, tokens.nbytes) == ("int64", (4,), 32)
    assert (state.dtype, state.shape, state.dim_order) == ("float32", (8, 24), (0, 1))
    # The mutated state comes back as the first output and is the input's own value.
    assert [(o.dtype, o.shape) for o in method.outputs] == [
        ("float32", (8, 24)),
        ("float32", (4, 61)),
    ]
    assert method.aliases == {0: 1}
    assert all(t.planned and not t.constant and not t.dynamic for t in method.inputs)


def test_plans_agree_with_executorch(facts: ProgramFacts, reference) -> None:
    from executorch.exir.schema import DelegateCall, KernelCall, Tensor

    for plan in reference.program.execution_plan:
        if plan.name in facts.constants:
            continue
        method = facts.methods[plan.name]
        calls = [i.instr_args for chain in plan.chains for i in chain.instructions]
        kernels: dict[str, int] = {}
        for call in calls:
            if isinstance(call, KernelCall):
                operator = plan.operators[call.op_index]
                name = f"{operator.name}.{operator.overload}".rstrip(".")
                kernels[name] = kernels.get(name, 0) + 1
        assert kernels
        assert method.operators == kernels
        assert method.instructions == len(calls)
        assert method.delegate_calls == sum(isinstance(c, DelegateCall) for c in calls) > 0
        assert list(method.arenas) == plan.non_const_buffer_sizes[1:]
        blobs = reference.program.backend_delegate_data
        assert [(d.backend, d.nbytes) for d in method.delegates] == [
            (d.id, len(blobs[d.processed.index].data)) for d in plan.delegates
        ]
        for found, indexes in ((method.inputs, plan.inputs), (method.outputs, plan.outputs)):
            tensors = [plan.values[i].val for i in indexes]
            assert all(isinstance(t, Tensor) for t in tensors)
            assert [f.shape for f in found] == [tuple(t.sizes) for t in tensors]
            assert [f.planned for f in found] == [t.allocation_info is not None for t in tensors]


def test_data_agrees_with_executorch(facts: ProgramFacts, reference) -> None:
    named = {
        key: len(reference.named_data.buffers[entry.buffer_index])
        for key, entry in reference.named_data.pte_data.items()
    }
    assert named
    assert facts.named_data == named
    stored = sum(len(b.storage) for b in reference.program.constant_buffer)
    assert facts.constant_bytes == stored


def test_values_of_constant_methods(facts: ProgramFacts) -> None:
    values = dict(facts.constants)
    assert values["get_io_contract"] == "hf_static"
    assert values["get_number"] == -3
    assert values["get_large"] == 1 << 40
    assert values["get_ratio"] == 1.5
    assert values["get_flag"] is True
    assert values["get_unset_flag"] is False
    assert values["get_empty"] == ""
    assert values["get_ids"] == (1, 2, 3)
    assert values["get_matrix"] == ((0.0, 1.0, 2.0), (3.0, 4.0, 5.0))
    assert values["get_half"] == (1.5, -2.0)
    assert values["get_zero_dim"] == 7
    assert values["get_bools"] == (True, False, True)
    assert type(values["get_number"]) is int
    assert type(values["get_ratio"]) is float


def test_program_without_data(plain: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.pte"
    path.write_bytes(plain)
    facts = read_program(str(path))
    assert facts.methods["forward"].operators == {"aten::add.out": 1}
    assert (facts.constant_bytes, facts.named_data, facts.constants) == (0, {}, {})


def test_absent_file(tmp_path: Path) -> None:
    assert refused(tmp_path / "absent.pte").code is Code.PROGRAM_NOT_FOUND
    assert refused(tmp_path / "a\0b").code is Code.PROGRAM_NOT_FOUND
    assert refused(tmp_path / ("x" * 5000)).code is Code.PROGRAM_NOT_FOUND


def test_what_is_not_a_file(tmp_path: Path) -> None:
    error = refused(tmp_path)
    assert error.code is Code.PROGRAM_MALFORMED
    assert "directory" in str(error)
    os.mkfifo(tmp_path / "pipe")
    assert refused(tmp_path / "pipe").code is Code.PROGRAM_MALFORMED


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "0 bytes"),
        (b"just some text, long enough to hold a header and more\n", "identifier"),
        (b"\0" * 4096, "identifier"),
        (struct.pack("<I", 8) + b"ET13" + b"\0" * 64, "ET13"),
        (struct.pack("<I", 8) + b"FT01" + b"\0" * 64, ".ptd"),
        (struct.pack("<I", 2**32 - 1) + b"ET12" + b"\0" * 64, "outside"),
    ],
    ids=["empty", "text", "zeros", "other version", "data file", "root outside"],
)
def test_other_content(content: bytes, word: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pte"
    path.write_bytes(content)
    error = refused(path)
    assert error.code is Code.PROGRAM_MALFORMED
    assert word in str(error)
    assert str(path) in str(error)


def test_truncation_anywhere(data: bytes, plain: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.pte"
    for whole, step in ((data, 64), (plain, 1)):
        for length in (*range(0, len(whole), step), len(whole) - 1):
            path.write_bytes(whole[:length])
            assert refused(path).code is Code.PROGRAM_MALFORMED, length


@pytest.mark.parametrize("seed", range(4))
def test_flipped_bits_give_facts_or_one_error(seed: int, data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.pte"
    dice = random.Random(seed)
    tables = struct.unpack_from("<Q", data, 16)[0]
    refusals = 0
    start = time.process_time()
    for _ in range(500):
        bad = bytearray(data)
        for _ in range(dice.choice((1, 1, 2, 8, 64))):
            bad[dice.randrange(tables)] ^= 1 << dice.randrange(8)
        path.write_bytes(bad)
        try:
            assert read_program(path).nbytes == len(bad)
        except ProgramError as error:
            refusals += error.code is Code.PROGRAM_MALFORMED
    assert refusals > 100
    assert time.process_time() - start < 30


def _nothing_to_write_to(plan: Any) -> None:
    call = next(
        one for one in _kernel_calls(plan) if plan.operators[one.op_index].overload == "out"
    )
    plan.values[call.args[-1]].val = schema.Null()


def _list_of_wrong_kind(plan: Any) -> None:
    kinds = [type(one.val) for one in plan.values]
    plan.values[-1].val = schema.IntList([kinds.index(schema.Tensor)])


def _without_memory(plan: Any) -> None:
    used = {index for call in _kernel_calls(plan) for index in call.args}
    free = used - {*plan.inputs, *plan.outputs}
    tensor = next(
        value.val
        for index, value in enumerate(plan.values)
        if index in free and isinstance(value.val, schema.Tensor)
    )
    tensor.allocation_info, tensor.data_buffer_idx = None, 0


def _kernel_calls(plan: Any) -> list[Any]:
    found = [one.instr_args for one in plan.chains[0].instructions]
    return [one for one in found if isinstance(one, schema.KernelCall)]


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (_nothing_to_write_to, "no tensor to write to"),
        (_list_of_wrong_kind, "a list of integers refers to value"),
        (_without_memory, "a tensor without memory"),
    ],
)
def test_calls_over_which_the_runtime_would_abort(
    data: bytes, tmp_path: Path, spoil: Callable[[Any], None], word: str
) -> None:
    from executorch.exir._serialize._program import deserialize_pte_binary, serialize_pte_binary

    file = deserialize_pte_binary(data)
    spoil(next(plan for plan in file.program.execution_plan if plan.name == "prefill"))
    path = tmp_path / "model.pte"
    path.write_bytes(bytes(serialize_pte_binary(file)))
    error = refused(path)
    assert error.code is Code.PROGRAM_MALFORMED
    assert word in str(error)


def test_shared_tables_cost_no_more_than_the_file(tmp_path: Path) -> None:
    """1,000 methods that share 20,000 values, which are one table: 20 million visits if walked."""
    builder = flatbuffers.Builder()
    builder.StartObject(0)
    null = builder.EndObject()
    builder.StartObject(2)
    builder.PrependUint8Slot(0, 1, 0)
    builder.PrependUOffsetTRelativeSlot(1, null, 0)
    value = builder.EndObject()
    values = _vector(builder, [value] * 20_000)
    plans = []
    for index in range(1_000):
        name = builder.CreateString(f"method{index}")
        builder.StartObject(10)
        builder.PrependUOffsetTRelativeSlot(0, name, 0)
        builder.PrependUOffsetTRelativeSlot(2, values, 0)
        plans.append(builder.EndObject())
    shared = _vector(builder, plans)
    builder.StartObject(8)
    builder.PrependUOffsetTRelativeSlot(1, shared, 0)
    builder.Finish(builder.EndObject(), file_identifier=b"ET12")
    path = tmp_path / "model.pte"
    path.write_bytes(builder.Output())
    start = time.process_time()
    assert "more often" in str(refused(path))
    assert time.process_time() - start < 10


def _vector(builder: flatbuffers.Builder, tables: list[int]) -> int:
    builder.StartVector(4, len(tables), 4)
    for table in reversed(tables):
        builder.PrependUOffsetTRelative(table)
    return int(builder.EndVector())
