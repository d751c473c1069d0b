"""OpenVINO: Intel's runtime for CPUs, GPUs and NPUs, with bf16 and int8 matrix kernels on x86."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from staticlm.errors import Code, LoweringError
from staticlm.lowering.backends.base import Backend, need_module
from staticlm.lowering.option_kinds import Names, Word
from staticlm.lowering.options import Option, OptionTable

if TYPE_CHECKING:
    from executorch.backends.openvino.partitioner import OpenvinoPartitioner

VERSIONS = ("2025.4.",)
"""Releases whose runtime loads what the delegate of ExecuTorch 1.5 compiles, and does not crash."""

CACHE_WRITE = frozenset(("aten.index_put.default", "aten.copy.default"))
"""Left to the CPU: inside the delegate a cache write comes back as a copy of the whole cache."""


class OpenVINO(Backend):
    """Compiled here by the installed openvino; the same version must run it."""

    name = "openvino"
    summary = "Intel CPUs, GPUs and NPUs through OpenVINO"
    dtypes = ("float32", "float16", "bfloat16")
    cache_dtypes = ("float32", "float16", "bfloat16")
    attention_modes = ("concat", "split", "fused")
    runs_on_host = True
    options = OptionTable(
        "openvino",
        (
            Option("device", "spec", Word(("CPU", "GPU", "NPU")), "CPU", "What runs it."),
            Option(
                "op_types_to_skip",
                "partitioner",
                Names(),
                frozenset,
                "Operators that stay on the CPU, by name; cache writes always do.",
            ),
            Option(
                "op_names_to_skip",
                "partitioner",
                Names(),
                frozenset,
                "Nodes that stay on the CPU, by name in the edge graph.",
            ),
        ),
        unreachable={
            "INFERENCE_PRECISION_HINT": "ExecuTorch's delegate passes no configuration on; "
            "OpenVINO computes in the CPU's own preference (bf16 where it has it, else float32)",
            "config": "ExecuTorch's delegate passes no configuration on",
        },
    )

    def available(self) -> None:
        """Needs openvino 2025.4 and a matching nncf."""
        remedy = "Install it: pip install 'staticlm[openvino]'."
        for module in ("openvino", "nncf"):
            need_module(self.name, module, remedy)
        try:
            found = version("openvino")
        except PackageNotFoundError:
            found = "an unknown version"
        if not found.startswith(VERSIONS):
            raise LoweringError(
                Code.BACKEND_UNAVAILABLE,
                "backend 'openvino' cannot be used with this openvino",
                found=found,
                expected=f"a release of {' or '.join(v.rstrip('.') for v in VERSIONS)}",
                remedy=remedy,
            )

    def precision(self, dtype: str, options: Mapping[str, Any]) -> str:
        """The device's own preference: the delegate passes no hint on.

        bfloat16 on processors that have units for it, float16 on others and on GPUs, else `dtype`.
        """
        from openvino import Core

        device = self.route(options)["spec"]["device"]
        hint = str(Core().get_property(device, "INFERENCE_PRECISION_HINT")).lower()
        for name, parts in {
            "bfloat16": ("bf16", "bfloat16"),
            "float16": ("f16", "float16"),
        }.items():
            if any(part in hint for part in parts):
                return name
        return dtype

    def partitioners(self, method: str, options: Mapping[str, Any]) -> list[OpenvinoPartitioner]:
        """One `OpenvinoPartitioner` that leaves out what it was told to."""
        self.available()
        from executorch.exir.backend.compile_spec_schema import CompileSpec

        from staticlm.lowering.openvino import SkippingPartitioner

        routed = self.route(options)
        skip = set(routed["partitioner"]["op_types_to_skip"]) | CACHE_WRITE
        return [
            SkippingPartitioner(
                [CompileSpec("device", routed["spec"]["device"].encode())],
                op_types_to_skip=skip,
                op_names_to_skip=set(routed["partitioner"]["op_names_to_skip"]),
            )
        ]
