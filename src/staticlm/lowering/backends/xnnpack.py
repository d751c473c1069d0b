"""XNNPACK: optimised CPU kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from staticlm.lowering.backends.base import Backend
from staticlm.lowering.option_kinds import Flag, Word
from staticlm.lowering.options import Option, OptionTable

if TYPE_CHECKING:
    from executorch.exir.backend.partitioner import Partitioner

_AT_RUN_TIME = "it is set when a program is loaded, not when it is lowered"

_PRECISIONS = {"float": "FP32", "static": "STATIC_QUANT", "dynamic": "DYNAMIC_QUANT"}


class Xnnpack(Backend):
    """The default: fast on ARM and x86 CPUs."""

    name = "xnnpack"
    summary = "optimised CPU kernels for ARM and x86"
    dtypes = ("float32", "float16", "bfloat16")
    cache_dtypes = ("float32", "float16", "bfloat16")
    runs_on_host = True
    shares_weights = True
    options = OptionTable(
        "xnnpack",
        (
            Option(
                "precision",
                "partitioner",
                Word(("any", *_PRECISIONS)),
                "any",
                "Which operators are delegated: by default float and quantised ones alike.",
            ),
            Option(
                "per_op_mode",
                "partitioner",
                Flag(),
                False,
                "One delegate per operator: for finding a faulty one.",
            ),
            Option(
                "enable_bf16",
                "partitioner",
                Flag(),
                False,
                "Delegate bfloat16 linear layers, which few CPUs run fast.",
            ),
            Option(
                "force_non_static_weights_for_f32_linear",
                "partitioner",
                Flag(),
                False,
                "Pass weights of float linear layers at run time instead of packing them.",
            ),
            Option("verbose", "partitioner", Flag(), False, "Log why operators are not taken."),
        ),
        unreachable={
            "weight_cache_enabled": _AT_RUN_TIME,
            "packed_cache_path": _AT_RUN_TIME,
            "save_weight_cache_on_disk": _AT_RUN_TIME,
            "workspace_sharing_mode": _AT_RUN_TIME,
            "config_precisions": "here it is called 'precision'",
            "configs": "it takes classes; build an XnnpackPartitioner yourself and call `lower`",
        },
    )

    def partitioners(self, method: str, options: Mapping[str, Any]) -> list[Partitioner]:
        """One `XnnpackPartitioner`."""
        from executorch.backends.xnnpack.partition.config.xnnpack_config import ConfigPrecisionType
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

        values = dict(self.route(options)["partitioner"])
        precision = values.pop("precision")
        if precision != "any":
            values["config_precisions"] = ConfigPrecisionType[_PRECISIONS[precision]]
        return [XnnpackPartitioner(**values)]
