"""Every option of the QNN delegate: what takes it, its type, default and range.

Destinations: `partitioner` (QnnPartitioner), `spec` (the shared compiler spec), `htp`, `gpu` and
    `lpai` (the spec of one backend), `passes` (the pass manager).
"""

from __future__ import annotations

import re
from typing import Any

from staticlm.lowering.option_kinds import Flag, Instance, Integer, Member, Names, Word
from staticlm.lowering.options import REQUIRED, Option, OptionTable

SCHEMA = "executorch.backends.qualcomm.serialization.qc_schema"

# fmt: off
SOCS = (
    "SA8295", "SA8797", "SC8380XP", "SM8350", "SM8450", "SM8475", "SM8550", "SM8650",
    "SM8750", "SM8850", "SSG2115P", "SSG2125P", "SXR1230P", "SXR2230P", "SXR2330P",
    "QCS9100", "SAR2230P", "SA8255", "SW6100", "QCM6490", "SM8845",
)
# fmt: on
"""The chips that ExecuTorch 1.5.1 knows."""

_FLAG = Flag()
_HTP, _GPU, _LPAI = ("htp",), ("gpu",), ("lpai",)
_OP_NAME = re.compile(r"\w+(\.\w+){2}")


def edge_op_name(op: Any) -> str | None:
    """An operator as QNN's partitioner compares it: `aten.index_put.default`.

    Upstream documents operator overloads but compares strings, so an overload would silently do
    nothing: it is converted here.
    """
    if isinstance(op, str):
        return op if _OP_NAME.fullmatch(op) else None
    name = getattr(op, "__name__", None)
    if not isinstance(name, str):
        return None
    namespace = getattr(op, "namespace", None)
    if isinstance(namespace, str) and not name.startswith(namespace + "."):
        name = f"{namespace}.{name}"
    return name if _OP_NAME.fullmatch(name) else None


class OpNames(Names):
    """Names of edge operators; operator overloads are taken too."""

    def _name(self, item: Any) -> str:
        name = edge_op_name(item)
        return super()._name(name if name is not None else object())


def _flag(name: str, destination: str, default: Any, doc: str, *variants: str) -> Option:
    return Option(name, destination, _FLAG, default, doc, variants)


_SPEC = (
    Option(
        "soc_model", "spec", Member(f"{SCHEMA}.QcomChipset", SOCS), REQUIRED, "The target chip."
    ),
    _flag("debug", "spec", False, "Log at debug level instead of errors only."),
    _flag(
        "saver", "spec", False, "Record the SDK calls; this ends the lowering without a program."
    ),
    _flag("online_prepare", "spec", False, "Compile on the device; not with use_multi_contexts."),
    _flag("dump_intermediate_outputs", "spec", False, "Publish every tensor; one method only."),
    Option(
        "profile_level",
        "spec",
        Integer(values=(0, 2, 3)),
        0,
        "0: off, 2: per operator, 3: op trace. Upstream turns every other value off silently.",
    ),
    _flag("shared_buffer", "spec", False, "Inputs and outputs may lie in rpcmem."),
    _flag("is_from_context_binary", "spec", False, "The graph wraps a context binary made before."),
    Option(
        "op_package_options",
        "spec",
        Instance(f"{SCHEMA}.QnnExecuTorchOpPackageOptions"),
        None,
        "Operator packages to load.",
        text=False,
    ),
    _flag("use_mha2sha", "spec", False, "Split attention heads (upstream calls it experimental)."),
)

_HTP_OPTIONS = (
    _flag("use_fp16", "htp", REQUIRED, "Half precision (true) or quantised (false).", *_HTP),
    _flag("use_dlbc", "htp", False, "Compress bandwidth of inputs.", *_HTP),
    _flag("use_multi_contexts", "htp", False, "Share spill memory between contexts.", *_HTP),
    _flag("use_weight_sharing", "htp", False, "Store weights that graphs share once.", *_HTP),
    _flag("use_slc_allocator", "htp", False, "Use the system level cache; few chips can.", *_HTP),
    Option(
        "htp_performance_mode",
        "htp",
        Member(
            f"{SCHEMA}.QnnExecuTorchHtpPerformanceMode",
            (
                "Default",
                "SustainedHighPerformance",
                "Burst",
                "HighPerformance",
                "PowerSaver",
                "LowPowerSaver",
                "HighPowerSaver",
                "LowBalanced",
                "Balanced",
            ),
            "kHtp",
        ),
        "Burst",
        "Power and clock of the NPU.",
        _HTP,
    ),
)

_GPU_OPTIONS = (
    Option(
        "precision",
        "gpu",
        Member(
            f"{SCHEMA}.QnnExecuTorchGpuPrecision",
            ("Fp32", "Fp16", "Hybrid", "UserProvided"),
            "kGpuPrecision",
        ),
        "UserProvided",
        "Precision of the computation.",
        _GPU,
    ),
    _flag("use_memory_optimizations", "gpu", True, "Share memory of tensors.", *_GPU),
    _flag("use_node_optimizations", "gpu", True, "Fuse operators.", *_GPU),
    _flag("use_queue_recording", "gpu", True, "Record the command queue.", *_GPU),
    _flag("use_weight_sharing", "gpu", False, "Store weights that graphs share once.", *_GPU),
)

_LPAI_OPTIONS = (
    Option("fps", "lpai", Integer(1), 1, "Inferences per second that must be met.", _LPAI),
    Option("ftrt_ratio", "lpai", Integer(1), 10, "Ten times the factor on the clock.", _LPAI),
    Option(
        "client_perf_type",
        "lpai",
        Member(
            f"{SCHEMA}.QnnExecuTorchLpaiClientPerf", ("Undefined", "RealTime", "NonRealTime"), "k"
        ),
        "RealTime",
        "Whether missing the rate is an error.",
        _LPAI,
    ),
    Option(
        "affinity",
        "lpai",
        Member(f"{SCHEMA}.QnnExecuTorchLpaiCoreAffinity", ("Undefined", "Soft", "Hard"), "k"),
        "Soft",
        "Whether the chosen cores are a wish or an order.",
        _LPAI,
    ),
    Option("core_selection", "lpai", Integer(0), 0, "Bit mask of cores; 0 is any.", _LPAI),
    Option(
        "target_env",
        "lpai",
        Member(f"{SCHEMA}.QnnExecuTorchLpaiTargetEnv", ("X86", "Arm", "Adsp"), "k"),
        "Arm",
        "Where it runs.",
        _LPAI,
    ),
)

_PARTITIONER = (
    Option(
        "skip_node_id_set",
        "partitioner",
        Names("names of edge nodes, separated by commas"),
        frozenset,
        "Nodes that stay on the CPU.",
    ),
    Option(
        "skip_node_op_set",
        "partitioner",
        OpNames("names of edge operators such as aten.index_put.default, separated by commas"),
        frozenset,
        "Operators that stay on the CPU.",
    ),
    _flag("skip_mutable_buffer", "partitioner", False, "Keep mutable buffers out of the delegate."),
)

_PASSES = (
    Option(
        "dep_table",
        "passes",
        Instance("dict"),
        None,
        "Replaces upstream's table of which pass comes before which.",
        text=False,
    ),
    Option(
        "passes_job",
        "passes",
        Instance("dict"),
        None,
        "Replaces upstream's list of active passes.",
        text=False,
    ),
    _flag("convert_linear_to_conv2d", "passes", False, "Turn linear layers into convolutions."),
)

_COMPUTED = "it is computed while lowering"
_NO_BUILDER = "no builder of it takes this, so it keeps its default"
_ARGUMENT = "it is no option of the delegate: give it to `lower` or to the export"

TABLE = OptionTable(
    "qnn",
    _SPEC + _HTP_OPTIONS + _GPU_OPTIONS + _LPAI_OPTIONS + _PARTITIONER + _PASSES,
    selector=Option(
        "backend", "backend", Word(("htp", "gpu", "lpai")), "htp", "NPU, GPU or low-power AI."
    ),
    unreachable={
        "max_sf_buf_size": _COMPUTED,
        "pd_session": _NO_BUILDER,
        "use_conv_hmx": _NO_BUILDER,
        "use_fold_relu": _NO_BUILDER,
        "performance_mode": "the GPU's is taken by no builder; the NPU's is htp_performance_mode",
        "library_path": _COMPUTED,
        "saver_output_dir": _COMPUTED,
        "log_level": "it is chosen by debug",
        "compiler_specs": "it is what these options build",
        "constant_methods": _ARGUMENT,
        "dynamic_shapes": "our methods have fixed shapes",
        "generate_etrecord": _ARGUMENT,
    },
)
