"""Options -> compiler specs and a partitioner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from staticlm.errors import Code, LoweringError
from staticlm.lowering.options import Routed, route
from staticlm.lowering.qnn.sdk import check_root, no_download
from staticlm.lowering.qnn.table import TABLE

if TYPE_CHECKING:
    from executorch.exir.backend.compile_spec_schema import CompileSpec

    from staticlm.lowering.qnn.partitioner import OrderedQnnPartitioner


@dataclass(frozen=True)
class QnnTarget:
    """What QNN options come to.

    Args:
        variant: `htp`, `gpu` or `lpai`.
        compile_specs: What upstream's builders make of the options.
        partitioner: A partitioner with those specs, which contributes its passes.
        routed: Every option by destination.
    """

    variant: str
    compile_specs: list[CompileSpec]
    partitioner: OrderedQnnPartitioner
    routed: Routed


def from_options(options: Mapping[str, Any]) -> QnnTarget:
    """Check QNN options, build the compiler specs and a partitioner from them. Needs no SDK.

    Args:
        options: By name, as in `table.TABLE`; enum members may be given by name.

    Raises:
        LoweringError: `BACKEND_OPTION_UNKNOWN` and `BACKEND_OPTION_INVALID` for options that cannot
            be used, with upstream's own words where it refuses; `BACKEND_UNAVAILABLE` when they
            need an SDK (LPAI on some chips) and none is usable.
    """
    from staticlm.lowering.backends.registry import option_tables
    from staticlm.lowering.qnn.partitioner import OrderedQnnPartitioner

    routed = route(TABLE, options, option_tables(without="qnn"))
    specs = _compile_specs(routed)
    partitioner = OrderedQnnPartitioner(
        specs,
        skip_node_id_set=set(routed["partitioner"]["skip_node_id_set"]),
        skip_node_op_set=set(routed["partitioner"]["skip_node_op_set"]),
        skip_mutable_buffer=routed["partitioner"]["skip_mutable_buffer"],
        pass_options=routed["passes"],
        variant=routed.variant,
    )
    return QnnTarget(routed.variant, specs, partitioner, routed)


def _compile_specs(routed: Routed) -> list[CompileSpec]:
    from executorch.backends.qualcomm.utils import utils as upstream

    builders = {
        "htp": upstream.generate_htp_compiler_spec,
        "gpu": upstream.generate_gpu_compiler_spec,
        "lpai": upstream.generate_lpai_compiler_spec,
    }
    if routed.variant == "lpai":
        check_root(routed.variant)  # the builder asks the SDK for its version
    try:
        with no_download():
            specs: list[CompileSpec] = upstream.generate_qnn_executorch_compiler_spec(
                backend_options=builders[routed.variant](**routed[routed.variant]),
                **routed["spec"],
            )
    except ValueError as error:
        needs_sdk = "requires QNN SDK version" in str(error)
        raise LoweringError(
            Code.BACKEND_UNAVAILABLE if needs_sdk else Code.BACKEND_OPTION_INVALID,
            "QNN refuses these options",
            found=str(error),
        ) from error
    return specs
