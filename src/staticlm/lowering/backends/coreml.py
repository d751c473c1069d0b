"""Core ML: Apple's neural engine, GPU and CPU. Lowering only, outside of Apple's systems."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from staticlm.lowering.backends.base import Backend, need_module
from staticlm.lowering.option_kinds import Flag, Member, Names
from staticlm.lowering.options import Option, OptionTable

if TYPE_CHECKING:
    from executorch.exir.backend.partitioner import Partitioner


class CoreML(Backend):
    """Partitioned here; compiling and running need coremltools and an Apple system."""

    name = "coreml"
    summary = "Apple's neural engine, GPU and CPU (lowering only)"
    dtypes = ("float32", "float16")
    cache_dtypes = ("float32", "float16")
    options = OptionTable(
        "coreml",
        (
            Option(
                "compute_unit",
                "spec",
                Member("coremltools.ComputeUnit", ("ALL", "CPU_ONLY", "CPU_AND_GPU", "CPU_AND_NE")),
                "ALL",
                "What may run it.",
            ),
            Option(
                "compute_precision",
                "spec",
                Member("coremltools.precision", ("FLOAT16", "FLOAT32")),
                "FLOAT16",
                "Precision of the computation; FLOAT32 keeps the neural engine out.",
            ),
            Option(
                "minimum_deployment_target",
                "spec",
                Member(
                    "coremltools.target",
                    ("iOS16", "iOS17", "iOS18", "macOS13", "macOS14", "macOS15"),
                ),
                None,
                "Oldest system that must run it.",
            ),
            Option(
                "skip_ops_for_coreml_delegation",
                "partitioner",
                Names(),
                frozenset,
                "Operators that stay on the CPU, by name.",
            ),
            Option(
                "lower_full_graph",
                "partitioner",
                Flag(),
                False,
                "Fail when something cannot be delegated.",
            ),
            Option(
                "take_over_constant_data",
                "partitioner",
                Flag(),
                True,
                "Put the weights into the delegate instead of passing them at run time.",
            ),
        ),
        unreachable={
            "take_over_mutable_buffer": "our caches are inputs, never buffers of the program",
            "model_type": "only uncompiled models can be made outside of Apple's systems",
        },
    )

    def available(self) -> None:
        """Needs coremltools."""
        need_module(self.name, "coremltools", "Install coremltools (9.0).")

    def partitioners(self, method: str, options: Mapping[str, Any]) -> list[Partitioner]:
        """One `CoreMLPartitioner`."""
        self.available()
        from executorch.backends.apple.coreml.compiler import CoreMLBackend
        from executorch.backends.apple.coreml.partition import CoreMLPartitioner

        routed = self.route(options)
        values = dict(routed["partitioner"])
        skip = sorted(values.pop("skip_ops_for_coreml_delegation"))
        return [
            CoreMLPartitioner(
                compile_specs=CoreMLBackend.generate_compile_specs(**routed["spec"]),
                skip_ops_for_coreml_delegation=skip or None,
                **values,
            )
        ]
