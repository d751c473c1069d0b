"""Equal data stored once, checked on ExecuTorch's own runtime with random weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.program_files import lower_add, lower_tied, tied_inputs, tied_model

from staticlm.contract.program import ProgramFacts, read_program
from staticlm.errors import Code, LoweringError, ProgramError
from staticlm.lowering.segments import share_identical_segments

VOCAB, WIDTH = 1000, 24
TABLE = VOCAB * WIDTH * 4
STEPS = {"prefill": 5, "decode": 1}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("segments") / "twice.pte"
    path.write_bytes(lower_tied(tied_model(VOCAB, WIDTH), STEPS, {"get_limit": 7}))
    return path


@pytest.fixture(scope="module")
def shared(stored: Path) -> Path:
    path = stored.with_name("once.pte")
    share_identical_segments(stored, path)
    return path


def blobs(facts: ProgramFacts) -> dict[str, bytes]:
    data = facts.path.read_bytes()
    assert facts.named_segments is not None
    ranges = {key: facts.segment_ranges[index] for key, index in facts.named_segments.items()}
    return {key: data[start : start + size] for key, (start, size) in ranges.items()}


def test_embedding_is_stored_once(stored: Path, shared: Path) -> None:
    table = tied_model(VOCAB, WIDTH).embedding.weight.numpy().tobytes()
    assert stored.read_bytes().count(table) == 2
    assert shared.read_bytes().count(table) == 1
    saved = stored.stat().st_size - shared.stat().st_size
    # All of the table but padding to keep every segment aligned.
    assert TABLE - 1024 <= saved <= TABLE


def test_bytes_saved_are_reported(stored: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.pte"
    saved = share_identical_segments(stored, out)
    assert saved == stored.stat().st_size - out.stat().st_size > 0
    assert os.listdir(tmp_path) == ["model.pte"]


def test_named_data_and_alignment_are_kept(stored: Path, shared: Path) -> None:
    before, after = read_program(stored), read_program(shared)
    assert blobs(before) == blobs(after)
    assert before.constants == after.constants
    assert before.methods == after.methods
    for old, new in zip(before.segment_ranges, after.segment_ranges, strict=True):
        assert new[0] % 128 == old[0] % 128 == 0


def test_sharing_again_changes_nothing(shared: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.pte"
    assert share_identical_segments(shared, again) == 0
    assert again.read_bytes() == shared.read_bytes()


def test_in_place(stored: Path, shared: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.pte"
    path.write_bytes(stored.read_bytes())
    path.chmod(0o640)
    assert share_identical_segments(path, path) > 0
    assert path.read_bytes() == shared.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o640
    assert share_identical_segments(path, path) == 0
    assert path.read_bytes() == shared.read_bytes()


def run_portable(path: Path, method: str, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    from executorch.extension.pybindings.portable_lib import Verification, _load_for_executorch

    module = _load_for_executorch(str(path), program_verification=Verification.InternalConsistency)
    return [out.clone() for out in module.run_method(method, inputs)]


def run_buffer(path: Path, method: str, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    from executorch.extension.pybindings.portable_lib import (
        Verification,
        _load_for_executorch_from_buffer,
    )

    data = path.read_bytes()
    module = _load_for_executorch_from_buffer(
        data, program_verification=Verification.InternalConsistency
    )
    return [out.clone() for out in module.run_method(method, inputs)]


def run_runtime(path: Path, method: str, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    from executorch.runtime import Runtime, Verification

    program = Runtime.get().load_program(path, verification=Verification.InternalConsistency)
    return [out.clone() for out in program.load_method(method).execute(inputs)]


@pytest.mark.parametrize("method", STEPS)
@pytest.mark.parametrize("run", [run_portable, run_buffer, run_runtime])
def test_results_are_the_same_bits(run: Any, method: str, stored: Path, shared: Path) -> None:
    model = tied_model(VOCAB, WIDTH)
    tokens, state = tied_inputs(model, STEPS[method])
    before = run(stored, method, (tokens, state.clone()))
    after = run(shared, method, (tokens, state.clone()))
    expected = model(tokens, state.clone())
    assert torch.equal(before[-1], after[-1])
    torch.testing.assert_close(after[-1], expected, rtol=1e-5, atol=1e-4)


def test_data_that_differs_in_one_bit_is_not_shared(stored: Path, tmp_path: Path) -> None:
    facts = read_program(stored)
    (index,) = {
        facts.named_segments[key] for key, size in facts.named_data.items() if size == TABLE
    }
    start, size = facts.segment_ranges[index]
    data = bytearray(stored.read_bytes())
    # Change the constant: the head's blob is then the only one of its kind.
    first = bytes(data).index(bytes(data[start : start + size]))
    data[first] ^= 1
    path = tmp_path / "changed.pte"
    path.write_bytes(data)
    assert share_identical_segments(path, tmp_path / "out.pte") == 0
    assert (tmp_path / "out.pte").read_bytes() == data


def test_prefixes_padded_and_equal_blobs(tmp_path: Path) -> None:
    """Blobs as other backends might store them, put into a program by ExecuTorch's own writer."""
    from executorch.exir._serialize._named_data_store import NamedDataStoreOutput
    from executorch.exir._serialize._program import (
        PTEFile,
        deserialize_pte_binary,
        serialize_pte_binary,
    )
    from executorch.exir._serialize.data_serializer import DataEntry

    torch.manual_seed(0)
    tables = {f"get_table{i}": torch.randn(1501, 3) for i in range(3)}
    first, second, third = (t.numpy().tobytes() for t in tables.values())
    other = torch.randn(2000).numpy().tobytes()
    wanted = {
        "prefix": first[:4096],
        "padded": second + bytes(640),
        "whole": third,
        "alone": other,
        "alone again": other,
        "unlike": third[:-4] + b"abcd",
        "small": third[:512],
    }
    source = deserialize_pte_binary(lower_add(tables))
    source.named_data = NamedDataStoreOutput(
        buffers=list(wanted.values()),
        pte_data={key: DataEntry(i, 256, None) for i, key in enumerate(wanted)},
        external_data={},
    )
    pte = PTEFile(source.program, source.mutable_data, source.named_data)
    path, out = tmp_path / "model.pte", tmp_path / "out.pte"
    path.write_bytes(bytes(serialize_pte_binary(pte)))

    saved = share_identical_segments(path, out)

    facts = read_program(out)
    assert blobs(facts) == wanted
    assert facts.constants == read_program(path).constants
    assert facts.constants["get_table1"] == tuple(map(tuple, tables["get_table1"].tolist()))
    content = out.read_bytes()
    assert [content.count(x) for x in (first[:4096], second, third, other)] == [1, 1, 1, 1]
    assert all(start % 256 == 0 for start, _ in facts.segment_ranges[1:])
    duplicates = 4096 + len(second) + len(third) + len(other)
    assert abs(saved - duplicates) < 256 * len(wanted)
    assert share_identical_segments(out, tmp_path / "again.pte") == 0
    assert run_portable(out, "forward", (torch.ones(1, 3),))[0].tolist() == [[2.0, 2.0, 2.0]]
    table = run_portable(out, "get_table1", ())[0]
    assert torch.equal(table, tables["get_table1"])


def test_program_without_segments_is_copied(tmp_path: Path) -> None:
    path = tmp_path / "add.pte"
    path.write_bytes(lower_add())
    assert share_identical_segments(path, tmp_path / "out.pte") == 0
    assert (tmp_path / "out.pte").read_bytes() == path.read_bytes()


def test_refusals_leave_nothing_behind(stored: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.pte"
    bad.write_bytes(stored.read_bytes()[:-1])
    with pytest.raises(ProgramError) as malformed:
        share_identical_segments(bad, tmp_path / "out.pte")
    assert malformed.value.code is Code.PROGRAM_MALFORMED
    with pytest.raises(LoweringError) as unwritable:
        share_identical_segments(stored, tmp_path / "absent" / "out.pte")
    assert unwritable.value.code is Code.LOWERING_FAILED
    assert os.listdir(tmp_path) == ["bad.pte"]
