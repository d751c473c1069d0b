"""QNN options: destinations, refusals, and specs equal to upstream's. None of it needs an SDK."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("executorch.backends.qualcomm.serialization.qc_schema")

from executorch.backends.qualcomm.serialization import qc_schema as schema
from executorch.backends.qualcomm.serialization.qc_schema_serialize import (
    flatbuffer_to_option,
    option_to_flatbuffer,
)
from executorch.backends.qualcomm.utils import qnn_sdk_setup
from executorch.backends.qualcomm.utils import utils as upstream

from staticlm.errors import Code, LoweringError
from staticlm.lowering.backends import get_backend
from staticlm.lowering.qnn import from_options
from staticlm.lowering.qnn.table import SOCS, TABLE

HTP = {"soc_model": "SM8750", "use_fp16": True}
GPU = {"backend": "gpu", "soc_model": "SM8750"}


@pytest.fixture(autouse=True)
def no_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No SDK is named, and a download would be seen."""
    monkeypatch.delenv("QNN_SDK_ROOT", raising=False)

    def download() -> bool:
        raise AssertionError("a download was tried")

    monkeypatch.setattr(qnn_sdk_setup, "_install_qnn_sdk", download)


def test_the_table_knows_every_chip_and_option() -> None:
    assert set(SOCS) == {chip.name for chip in schema.QcomChipset} - {"UNKNOWN_SM"}

    builders = {
        "spec": (upstream.generate_qnn_executorch_compiler_spec, {"backend_options"}),
        "htp": (upstream.generate_htp_compiler_spec, set()),
        "gpu": (upstream.generate_gpu_compiler_spec, set()),
        "lpai": (upstream.generate_lpai_compiler_spec, set()),
    }
    for destination, (builder, built) in builders.items():
        ours = {o.name for o in TABLE.options if o.destination == destination}
        assert ours == set(inspect.signature(builder).parameters) - built


@pytest.mark.parametrize("chip", SOCS)
@pytest.mark.parametrize("variant", ["htp", "gpu"])
def test_specs_equal_upstreams_for_every_chip(chip: str, variant: str) -> None:
    extra = {"use_fp16": False} if variant == "htp" else {}
    target = from_options({"backend": variant, "soc_model": chip, **extra})
    builder = {
        "htp": upstream.generate_htp_compiler_spec,
        "gpu": upstream.generate_gpu_compiler_spec,
    }
    expected = upstream.generate_qnn_executorch_compiler_spec(
        schema.QcomChipset[chip], builder[variant](**extra)
    )
    assert target.compile_specs == expected
    (spec,) = target.compile_specs
    assert option_to_flatbuffer(flatbuffer_to_option(spec.value)) == spec.value
    assert flatbuffer_to_option(spec.value).soc_info.soc_model is schema.QcomChipset[chip]
    assert target.partitioner.delegation_spec.compile_specs == expected


def decoded(options: dict[str, Any]) -> schema.QnnExecuTorchOptions:
    return flatbuffer_to_option(from_options(options).compile_specs[0].value)


PACKAGES = schema.QnnExecuTorchOpPackageOptions(
    [schema.QnnExecuTorchOpPackageInfo(op_package_name="mine", op_package_path="/x.so")]
)


@pytest.mark.parametrize(
    ("option", "value", "where", "stored"),
    [
        ("debug", True, "log_level", schema.QnnExecuTorchLogLevel.kLogLevelDebug),
        ("saver", True, "saver", True),
        ("online_prepare", True, "online_prepare", True),
        ("dump_intermediate_outputs", True, "dump_intermediate_outputs", True),
        ("profile_level", 2, "profile_level", schema.QnnExecuTorchProfileLevel.kProfileDetailed),
        ("profile_level", 3, "profile_level", schema.QnnExecuTorchProfileLevel.kProfileOptrace),
        ("shared_buffer", True, "shared_buffer", True),
        ("is_from_context_binary", True, "is_from_context_binary", True),
        ("op_package_options", PACKAGES, "op_package_options", PACKAGES),
        ("use_mha2sha", True, "use_mha2sha", True),
    ],
)
def test_shared_options(option: str, value: Any, where: str, stored: Any) -> None:
    assert getattr(decoded({**HTP, option: value}), where) == stored
    assert getattr(decoded(HTP), where) != stored


@pytest.mark.parametrize(
    ("option", "value", "where", "stored"),
    [
        ("use_fp16", False, "precision", schema.QnnExecuTorchHtpPrecision.kHtpQuantized),
        ("use_dlbc", True, "use_dlbc", True),
        ("use_multi_contexts", True, "use_multi_contexts", True),
        ("use_weight_sharing", True, "use_weight_sharing", True),
        ("use_slc_allocator", True, "use_slc_allocator", True),
        *(
            ("htp_performance_mode", mode.name, "performance_mode", mode)
            for mode in schema.QnnExecuTorchHtpPerformanceMode
            if mode.name != "kHtpBurst"
        ),
    ],
)
def test_htp_options(option: str, value: Any, where: str, stored: Any) -> None:
    assert getattr(decoded({**HTP, option: value}).backend_options.htp_options, where) == stored
    assert getattr(decoded(HTP).backend_options.htp_options, where) != stored


@pytest.mark.parametrize(
    ("option", "value", "where", "stored"),
    [
        ("precision", "Fp16", "precision", schema.QnnExecuTorchGpuPrecision.kGpuPrecisionFp16),
        ("use_memory_optimizations", False, "use_memory_optimizations", False),
        ("use_node_optimizations", False, "use_node_optimizations", False),
        ("use_queue_recording", False, "use_queue_recording", False),
        ("use_weight_sharing", True, "use_weight_sharing", True),
    ],
)
def test_gpu_options(option: str, value: Any, where: str, stored: Any) -> None:
    assert getattr(decoded({**GPU, option: value}).backend_options.gpu_options, where) == stored
    assert getattr(decoded(GPU).backend_options.gpu_options, where) != stored


def test_partitioner_and_pass_options() -> None:
    target = from_options(
        {
            **HTP,
            "skip_node_id_set": {"aten_add_tensor"},
            "skip_node_op_set": [torch.ops.aten.index_put.default, "aten.add.Tensor"],
            "skip_mutable_buffer": True,
            "convert_linear_to_conv2d": True,
            "dep_table": {},
        }
    )
    partitioner = target.partitioner
    assert partitioner.skip_node_id_set == {"aten_add_tensor"}
    assert partitioner.skip_node_op_set == {"aten.index_put.default", "aten.add.Tensor"}
    assert partitioner.skip_mutable_buffer is True
    assert partitioner.pass_options == {
        "dep_table": {},
        "passes_job": None,
        "convert_linear_to_conv2d": True,
    }


def test_an_edge_operator_is_taken_by_its_name() -> None:
    from executorch.exir.dialects._ops import ops as edge_ops

    op = edge_ops.edge.aten.index_put.default
    names = from_options({**HTP, "skip_node_op_set": [op]}).partitioner.skip_node_op_set
    assert names == {op.__name__} == {"aten.index_put.default"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"soc_model": "SM8735", "use_fp16": True}, r"The nearest is SM87[35]0"),
        ({"soc_model": "UNKNOWN_SM", "use_fp16": True}, "cannot have this value"),
        ({"soc_model": 69, "use_fp16": True}, "cannot have this value: found 69"),
        ({"use_fp16": True}, "needs option 'soc_model'"),
        ({"soc_model": "SM8750"}, "needs option 'use_fp16'"),
        ({**HTP, "use_fp16": "yes"}, "found 'yes'; expected true or false"),
        ({**HTP, "use_dlbc": "x"}, "found 'x'; expected true or false"),
        ({**HTP, "htp_performance_mode": 99}, "found 99"),
        ({**HTP, "profile_level": 1}, "expected one of 0, 2, 3"),
        ({**HTP, "profile_level": 7}, "expected one of 0, 2, 3"),
        ({**GPU, "precision": 9}, "found 9"),
        ({"backend": "dsp", "soc_model": "SM8750"}, "expected one of htp, gpu, lpai"),
        ({"backend": "lpai", "soc_model": "SM8850", "fps": -1}, "an integer from 1"),
        ({**HTP, "skip_node_op_set": ["index_put"]}, "names of edge operators"),
        ({**HTP, "online_prepare": True, "use_multi_contexts": True}, "could not function in onl"),
    ],
)
def test_values_that_upstream_accepts_or_breaks_on(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LoweringError, match=message) as caught:
        from_options(options)
    assert caught.value.code is Code.BACKEND_OPTION_INVALID


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("fps", r"It is an option of qnn \(backend=lpai\)"),
        ("precision", r"It is an option of qnn \(backend=gpu\), xnnpack"),
        ("force_fp16", "It is an option of vulkan"),
        ("pd_session", "Upstream knows it, but no builder of it takes this"),
        ("max_sf_buf_size", "Upstream knows it, but it is computed"),
        ("dynamic_shapes", "our methods have fixed shapes"),
        ("soc_modle", "The nearest is 'soc_model'"),
    ],
)
def test_names_that_qnn_does_not_take(name: str, hint: str) -> None:
    with pytest.raises(LoweringError, match=hint) as caught:
        from_options({**HTP, name: 1})
    assert caught.value.code is Code.BACKEND_OPTION_UNKNOWN


def test_lpais_own_refusals_come_through() -> None:
    with pytest.raises(LoweringError) as caught:
        from_options({"backend": "lpai", "soc_model": "SM8650"})
    assert caught.value.code is Code.BACKEND_OPTION_INVALID
    assert str(caught.value.found) == str(caught.value.__cause__)
    assert "Target soc_model(SM8650) doesn't support LPAI backend." in str(caught.value)
    with pytest.raises(LoweringError, match="LPAI does not support online prepare"):
        from_options({"backend": "lpai", "soc_model": "SM8850", "online_prepare": True})
    with pytest.raises(LoweringError) as caught:
        from_options({"backend": "lpai", "soc_model": "SM8850"})
    assert caught.value.code is Code.BACKEND_UNAVAILABLE
    assert "LPAI backend v6 requires QNN SDK version >= 2.39" in str(caught.value)
    assert "unknown, no usable SDK found" in str(caught.value)


@pytest.mark.parametrize("ready", [True, False])
def test_the_environment_is_as_before(ready: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qnn_sdk_setup, "_sdk_ready", ready)
    for chip in ("SM8850", "SM8650"):
        with pytest.raises(LoweringError):
            from_options({"backend": "lpai", "soc_model": chip})
        assert "QNN_SDK_ROOT" not in os.environ
        assert qnn_sdk_setup._sdk_ready is ready


def test_without_an_sdk_nothing_is_downloaded_and_the_remedy_is_said() -> None:
    backend = get_backend("qnn")
    for call in (
        backend.available,
        lambda: backend.partitioners("decode", HTP),
        lambda: from_options(HTP).partitioner.partition(
            torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
        ),
    ):
        with pytest.raises(LoweringError, match="QNN_SDK_ROOT is not set") as caught:
            call()
        assert caught.value.code is Code.BACKEND_UNAVAILABLE
        assert "Set QNN_SDK_ROOT" in str(caught.value.remedy)


WRONG_ROOT = """
import sys
from staticlm.errors import LoweringError
from staticlm.lowering.qnn import from_options
try:
    from_options({"backend": "lpai", "soc_model": "SM8850"})
except LoweringError as error:
    print(error)
    sys.exit(7)
"""


def test_a_wrong_sdk_root_never_reaches_the_library(tmp_path: Path) -> None:
    """The library would end the process: hence a child."""
    child = subprocess.run(
        [sys.executable, "-c", WRONG_ROOT],
        env={**os.environ, "QNN_SDK_ROOT": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert child.returncode == 7, child.stderr[-2000:]
    assert "where there is no lib/x86_64-linux-clang/libQnnHtp.so" in child.stdout
    assert "[backend-unavailable]" in child.stdout


def test_an_empty_sdk_root_needs_the_library_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QNN_SDK_ROOT", "")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    backend = get_backend("qnn")
    with pytest.raises(LoweringError, match=r"libQnnHtp\.so is not in LD_LIBRARY_PATH"):
        backend.available()
    (tmp_path / "libQnnHtp.so").touch()
    backend.available()


def test_text_options_as_the_command_line_gives_them() -> None:
    texts = {"soc_model": "SM8750", "use_fp16": "true", "htp_performance_mode": "balanced"}
    options = get_backend("qnn").typed(texts)
    assert options == {
        "soc_model": schema.QcomChipset.SM8750,
        "use_fp16": True,
        "htp_performance_mode": schema.QnnExecuTorchHtpPerformanceMode.kHtpBalanced,
    }
    with pytest.raises(LoweringError, match="it cannot be given as text"):
        get_backend("qnn").typed({"passes_job": "{}"})
