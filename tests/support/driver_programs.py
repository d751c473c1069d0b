"""Tiny real programs that exercise drivers, without any model or contract."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import executorch.kernels.quantized  # noqa: F401  # registers the embedding operator
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge_transform_and_lower
from executorch.exir.passes import MemoryPlanningPass
from torch.export import Dim, export
from torch.export.graph_signature import OutputKind

ROWS = 6
WIDTH = 4


class InPlaceCache(torch.nn.Module):
    """Writes a row `scale * x` into a cache, returns `x @ W` plus the sum of the old cache."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.linear = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        torch.nn.init.eye_(self.linear.weight)

    def forward(self, x: torch.Tensor, position: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """x float32 [1, WIDTH], position int64 [1], cache float32 [ROWS, WIDTH] -> [1, WIDTH]."""
        y = self.linear(x) + cache.sum(0, keepdim=True)
        torch.ops.aten.index_put_.default(cache, [position], x * self.scale)
        return y


class ReturnedCache(InPlaceCache):
    """The same as a function: the full updated cache is an output of its own."""

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, position: torch.Tensor, cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `InPlaceCache`, with the new cache as a second output."""
        y = self.linear(x) + cache.sum(0, keepdim=True)
        return y, torch.ops.aten.index_put.default(cache, [position], x * self.scale)


class Dynamic(torch.nn.Module):
    """Doubles a tensor of up to ROWS rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x float32 [rows <= ROWS, WIDTH] -> the same shape."""
        return x * 2 + 1


class Busy(torch.nn.Module):
    """Enough matrix products for a step to take tens of milliseconds."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = torch.nn.ModuleList()
        for _ in range(layers):
            layer = torch.nn.Linear(width, width, bias=False)
            with torch.no_grad():
                layer.weight.copy_(torch.randn(width, width, generator=generator) / width**0.5)
            self.layers.append(layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x float32 [rows, width] -> the same shape."""
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class Twice(torch.nn.Module):
    """Returns one tensor as two outputs."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x float32 [1, WIDTH] -> `2x` of the same shape, twice."""
        y = x + x
        return y, y


class Int8Lookup(torch.nn.Module):
    """An embedding in 8 bits: needs a kernel of the quantized library."""

    def __init__(self) -> None:
        super().__init__()
        rows = torch.arange(32, dtype=torch.int8).reshape(8, 4)
        self.register_buffer("weight", rows)
        self.register_buffer("scales", torch.full((8,), 0.5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids int64 [1, 3] -> float32 [1, 3, 4], row `i` is `[4i .. 4i + 3] / 2`."""
        return torch.ops.quantized_decomposed.embedding_byte.default(
            self.weight, self.scales, None, -128, 127, ids
        )


class ManyCaches(torch.nn.Module):
    """Writes one row into each of many caches: what a step costs when its compute is nothing."""

    def forward(
        self, x: torch.Tensor, position: torch.Tensor, *caches: torch.Tensor
    ) -> torch.Tensor:
        """x float32 [1, width], position int64 [1], caches float32 [rows, width] -> [1, width]."""
        for cache in caches:
            torch.ops.aten.index_put_.default(cache, [position], x)
        return x + 1


class _Planning(MemoryPlanningPass):
    """Plans memory, then drops mutated inputs from the outputs if asked to."""

    def __init__(self, inputs: bool, outputs: bool, keep_mutated: bool) -> None:
        super().__init__(alloc_graph_input=inputs, alloc_graph_output=outputs)
        self._keep_mutated = keep_mutated

    def run(self, graph_module, graph_signature=None):  # type: ignore[no-untyped-def]
        result = super().run(graph_module, graph_signature)
        if not self._keep_mutated:
            output = graph_module.graph.output_node()
            kept = [
                value
                for value, spec in zip(output.args[0], graph_signature.output_specs, strict=True)
                if spec.kind is not OutputKind.USER_INPUT_MUTATION
            ]
            output.args = (tuple(kept),)
            graph_module.recompile()
        return result


def _peel(program) -> None:  # type: ignore[no-untyped-def]
    """Remove the copies that functionalisation leaves around an in-place write."""
    graph = program.graph_module.graph
    values = list(graph.output_node().args[0])
    for index, spec in enumerate(program.graph_signature.output_specs):
        if spec.kind is not OutputKind.USER_INPUT_MUTATION:
            continue
        while "aten.copy.default" in str(values[index].target):
            values[index] = values[index].args[1]
        spec.arg.name = values[index].name
    graph.output_node().args = (tuple(values),)
    graph.eliminate_dead_code()
    program.graph_module.recompile()


def write_program(
    path: Path,
    methods: dict[str, tuple[torch.nn.Module, tuple[torch.Tensor, ...]]],
    *,
    planned_inputs: bool = False,
    planned_outputs: bool = True,
    keep_mutated: bool = False,
    in_place: bool = True,
    delegate: bool = True,
    dynamic: bool = False,
) -> Path:
    """Export, lower and write methods; returns the path."""
    shapes = {0: Dim("rows", min=1, max=ROWS)} if dynamic else None
    exported = {
        name: export(
            module.eval(), inputs, strict=False, dynamic_shapes=(shapes,) if shapes else None
        )
        for name, (module, inputs) in methods.items()
    }
    edge = to_edge_transform_and_lower(
        exported,
        partitioner=[XnnpackPartitioner()] if delegate else None,
        compile_config=EdgeCompileConfig(_check_ir_validity=False),
        constant_methods={"get_version": 1},
    )
    for name in methods:
        if in_place:
            _peel(edge.exported_program(name))
    program = edge.to_executorch(
        ExecutorchBackendConfig(
            run_reinplace_pass=in_place,
            memory_planning_pass=_Planning(planned_inputs, planned_outputs, keep_mutated),
        )
    )
    path.write_bytes(program.buffer)
    return path


def cache_inputs(rows: int = ROWS, width: int = WIDTH, caches: int = 1) -> tuple[torch.Tensor, ...]:
    """Example inputs of the cache modules."""
    return (
        torch.zeros(1, width),
        torch.zeros(1, dtype=torch.int64),
        *(torch.zeros(rows, width) for _ in range(caches)),
    )


def _both_scales() -> dict[str, tuple[torch.nn.Module, tuple[torch.Tensor, ...]]]:
    return {
        "decode": (InPlaceCache(2.0), cache_inputs()),
        "prefill": (InPlaceCache(3.0), cache_inputs()),
    }


def _busy(rows: int) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    return Busy(768, 6), (torch.zeros(rows, 768),)


WRITERS: dict[str, Callable[[Path], Path]] = {
    "in_place": lambda path: write_program(path, _both_scales()),
    "aliased": lambda path: write_program(
        path, _both_scales(), keep_mutated=True, planned_outputs=False
    ),
    "returned": lambda path: write_program(
        path,
        {"decode": (ReturnedCache(2.0), cache_inputs())},
        in_place=False,
        planned_outputs=False,
    ),
    "planned": lambda path: write_program(
        path,
        {"decode": (InPlaceCache(2.0), cache_inputs())},
        keep_mutated=True,
        planned_inputs=True,
    ),
    "dynamic": lambda path: write_program(
        path,
        {"forward": (Dynamic(), (torch.zeros(3, WIDTH),))},
        dynamic=True,
        delegate=False,
        planned_outputs=False,
    ),
    "busy": lambda path: write_program(path, {"a": _busy(16), "b": _busy(4), "long": _busy(512)}),
    "twice": lambda path: write_program(
        path,
        {"forward": (Twice(), (torch.zeros(1, WIDTH),))},
        in_place=False,
        planned_outputs=False,
        delegate=False,
    ),
    "quantized": lambda path: write_program(
        path,
        {"forward": (Int8Lookup(), (torch.zeros(1, 3, dtype=torch.int64),))},
        in_place=False,
        delegate=False,
    ),
    "many": lambda path: write_program(
        path, {"decode": (ManyCaches(), cache_inputs(512, 512, 60))}
    ),
}
"""How each of the programs that drivers are tested with is made."""


class Writer:
    """Writes a program of `WRITERS` into a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __call__(self, name: str) -> Path:
        return WRITERS[name](self._directory / f"{name}.pte")
