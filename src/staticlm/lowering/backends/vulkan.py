"""Vulkan: GPU compute shaders. Lowering only: the stock Python runtime cannot execute it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from staticlm.lowering.backends.base import Backend, need_module
from staticlm.lowering.option_kinds import Flag, Integer, Member, Names
from staticlm.lowering.options import Option, OptionTable

if TYPE_CHECKING:
    from executorch.exir.backend.partitioner import Partitioner

_SCHEMA = "executorch.backends.vulkan.serialization.vulkan_graph_schema"


class Vulkan(Backend):
    """Lowered and partitioned here; nobody has run the result on a device for us."""

    name = "vulkan"
    summary = "GPU compute shaders (lowering only)"
    dtypes = ("float32", "float16")
    options = OptionTable(
        "vulkan",
        (
            Option("force_fp16", "compile", Flag(), False, "Compute in half precision throughout."),
            Option("downcast_64_bit", "compile", Flag(), True, "Store 64-bit values in 32 bits."),
            Option(
                "alias_buffer_mutations",
                "compile",
                Flag(),
                False,
                "Write mutated buffers in place.",
            ),
            Option(
                "small_texture_limits",
                "compile",
                Flag(),
                False,
                "Assume the smallest texture sizes that devices have.",
            ),
            Option(
                "skip_memory_planning",
                "compile",
                Flag(),
                False,
                "Give every tensor its own memory.",
            ),
            Option(
                "skip_tag_memory_metadata",
                "compile",
                Flag(),
                False,
                "Leave storage and layout of tensors to the defaults.",
            ),
            Option(
                "storage_type_override",
                "compile",
                Member(
                    f"{_SCHEMA}.VkStorageType",
                    ("BUFFER", "TEXTURE_3D", "TEXTURE_2D", "DEFAULT_STORAGE"),
                ),
                None,
                "Storage of all tensors.",
            ),
            Option(
                "memory_layout_override",
                "compile",
                Member(
                    f"{_SCHEMA}.VkMemoryLayout",
                    (
                        "TENSOR_WIDTH_PACKED",
                        "TENSOR_HEIGHT_PACKED",
                        "TENSOR_CHANNELS_PACKED",
                        "DEFAULT_LAYOUT",
                    ),
                ),
                None,
                "Layout of all tensors.",
            ),
            Option(
                "external_constants_max_data_bytes",
                "compile",
                Integer(1, 2**64 - 1),
                None,
                "Largest data file when constants are stored outside the program.",
            ),
            Option(
                "nn_module_blocklist",
                "partitioner",
                Names(),
                frozenset,
                "Modules that are not delegated.",
            ),
            Option(
                "nn_module_allowlist",
                "partitioner",
                Names(),
                frozenset,
                "When given, the only modules that are delegated.",
            ),
        ),
        unreachable={
            "texture_limits": "use small_texture_limits",
            "operator_blocklist": "build a VulkanPartitioner yourself and call `lower`",
            "operator_allowlist": "build a VulkanPartitioner yourself and call `lower`",
        },
    )

    def available(self) -> None:
        """The Python parts are in the ExecuTorch wheel."""
        need_module(
            self.name,
            "executorch.backends.vulkan.partitioner.vulkan_partitioner",
            "Install an ExecuTorch wheel that has the Vulkan backend.",
        )

    def partitioners(self, method: str, options: Mapping[str, Any]) -> list[Partitioner]:
        """One `VulkanPartitioner`."""
        self.available()
        from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanPartitioner

        routed = self.route(options)
        compile_options = {k: v for k, v in routed["compile"].items() if v is not None}
        lists = {k: sorted(v) for k, v in routed["partitioner"].items() if v}
        return [VulkanPartitioner(compile_options, **lists)]
