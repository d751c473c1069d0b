"""A two-layer toy transformer that keeps the `hf_static` signature, lowered with portable kernels.

Layer 0 has a full cache, layer 1 a sliding one. Small enough to lower in seconds, so that the
runtime is tested without the exporter; the eager module is the oracle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge_transform_and_lower
from executorch.exir.passes import MemoryPlanningPass
from torch.export import export
from torch.export.graph_signature import OutputKind

from staticlm.contract import (
    LABEL,
    VERSION,
    Cache,
    CacheKind,
    Contract,
    LogitsRows,
    Method,
    MethodRole,
    Part,
    Role,
    Slot,
    TensorSpec,
)
from staticlm.contract.metadata import constant_methods

HEADS, WIDTH = 2, 8
HIDDEN = HEADS * WIDTH
NEGATIVE = -1e30


@dataclass(frozen=True)
class Toy:
    """Sizes of a toy program."""

    capacity: int = 48
    steps: tuple[int, ...] = (8,)
    window: int = 6
    vocab: int = 61
    rows: LogitsRows = LogitsRows.LAST
    seed: int = 0
    eos: int | None = None

    @property
    def ring(self) -> int:
        """Slots of the sliding cache."""
        return min(self.capacity, self.window - 1 + max((1, *self.steps)))


class Layer(torch.nn.Module):
    """Attention over a cache `[HEADS, slots, WIDTH]` and the chunk itself."""

    def __init__(self, slots: int, window: int | None) -> None:
        super().__init__()
        self.slots, self.window = slots, window
        self.qkv = torch.nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = torch.nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.register_buffer("slot", torch.arange(slots))

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x `[n, HIDDEN]`, positions `[n]` -> the new x, keys and values `[HEADS, n, WIDTH]`."""
        n = x.shape[0]
        q, k, v = (
            t.reshape(n, HEADS, WIDTH).transpose(0, 1)
            for t in torch.tanh(self.qkv(x)).split(HIDDEN, 1)
        )
        first = positions[:1]
        held = first - 1 - (first - 1 - self.slot + self.slots) % self.slots
        row = positions.reshape(n, 1)
        everything = torch.cat([held.reshape(1, -1).expand(n, -1), positions.expand(n, n)], 1)
        hidden = (everything < 0) | (everything > row)
        if self.window is not None:
            hidden = hidden | (everything <= row - self.window)
        scores = q @ torch.cat([keys, k], 1).transpose(1, 2) * 2.0
        weights = torch.softmax(torch.where(hidden, NEGATIVE, scores), -1)
        mixed = (weights @ torch.cat([values, v], 1)).transpose(0, 1).reshape(n, HIDDEN)
        return x + self.out(mixed), k, v


class ToyModel(torch.nn.Module):
    """The whole model; `step` and `rows` make it one method."""

    def __init__(self, toy: Toy, returns: bool = False) -> None:
        super().__init__()
        self.returns = returns
        with torch.random.fork_rng():
            torch.manual_seed(toy.seed)
            self.embed = torch.nn.Embedding(toy.vocab, HIDDEN)
            self.place = torch.nn.Embedding(toy.capacity, HIDDEN)
            self.layers = torch.nn.ModuleList(
                [Layer(toy.capacity, None), Layer(toy.ring, toy.window)]
            )
            self.head = torch.nn.Linear(HIDDEN, toy.vocab, bias=False)

    def forward(
        self,
        tokens: torch.Tensor,
        start: torch.Tensor,
        length: torch.Tensor | None,
        caches: list[torch.Tensor],
        last_only: bool,
    ) -> torch.Tensor:
        """tokens int64 `[1, n]` -> logits; the caches are written at the end."""
        n = tokens.shape[1]
        positions = start + torch.arange(n)
        x = self.embed(tokens[0]) + self.place(positions)
        writes: list[torch.Tensor] = []
        for index, layer in enumerate(self.layers):
            x, k, v = layer(x, positions, caches[2 * index], caches[2 * index + 1])
            writes += [k, v]
        for index, (cache, new) in enumerate(zip(caches, writes, strict=True)):
            slots = [None, positions % cache.shape[1]]
            if self.returns:
                caches[index] = torch.ops.aten.index_put.default(cache, slots, new)
            else:
                torch.ops.aten.index_put_.default(cache, slots, new)
        if last_only and length is not None:
            x = x.index_select(0, length - 1)
        return self.head(x).unsqueeze(0)

    def call(
        self, tokens: Any, start: Any, length: Any, caches: list[torch.Tensor], last_only: bool
    ) -> Any:
        """The logits; with the new caches before them, the last first, if they are returned."""
        logits = self(tokens, start, length, caches, last_only)
        return (*reversed(caches), logits) if self.returns else logits


class _Prefill(torch.nn.Module):
    def __init__(self, model: ToyModel, last_only: bool) -> None:
        super().__init__()
        self.model, self.last_only = model, last_only

    def forward(self, tokens: Any, start: Any, length: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        return self.model.call(tokens, start, length, [a, b, c, d], self.last_only)


class _Decode(torch.nn.Module):
    def __init__(self, model: ToyModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Any, start: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        return self.model.call(tokens, start, None, [a, b, c, d], False)


class DropMutated(MemoryPlanningPass):
    """Mutated inputs are written in place and must not be outputs of the program."""

    def run(self, graph_module: Any, graph_signature: Any = None) -> Any:
        """Plan, then drop them."""
        result = super().run(graph_module, graph_signature)
        output = graph_module.graph.output_node()
        output.args = (
            tuple(
                value
                for value, spec in zip(output.args[0], graph_signature.output_specs, strict=True)
                if spec.kind is not OutputKind.USER_INPUT_MUTATION
            ),
        )
        graph_module.recompile()
        return result


def toy_contract(toy: Toy, returns: bool = False) -> Contract:
    """The contract of a toy program.

    A program that returns its caches does so in an order of its own, so that only the recorded
    indexes lead to them.
    """
    caches = tuple(
        Cache(layer, part, kind, window, TensorSpec("float32", (HEADS, slots, WIDTH)))
        for layer, (kind, window, slots) in enumerate(
            [
                (CacheKind.FULL, None, toy.capacity),
                (CacheKind.SLIDING, toy.window, toy.ring),
            ]
        )
        for part in (Part.KEY, Part.VALUE)
    )
    methods = []
    for step in (*toy.steps, 1):
        control = [Role.TOKENS, Role.START] + ([Role.LENGTH] if step > 1 else [])
        inputs = [
            Slot(i, role, TensorSpec("int64", (1, step) if role is Role.TOKENS else (1,)))
            for i, role in enumerate(control)
        ]
        for index, cache in enumerate(caches):
            role = Role.KEY if cache.part is Part.KEY else Role.VALUE
            inputs.append(Slot(len(inputs), role, cache.spec, index))
        rows = toy.rows if step > 1 else LogitsRows.LAST
        shape = (1, step if rows is LogitsRows.ALL else 1, toy.vocab)
        methods.append(
            Method(
                name="decode" if step == 1 else f"prefill_{step}",
                role=MethodRole.DECODE if step == 1 else MethodRole.PREFILL,
                step=step,
                logits_rows=rows,
                inputs=tuple(inputs),
                outputs=(
                    *(
                        Slot(at, Role.STATE, caches[index].spec, index)
                        for at, index in enumerate(reversed(range(len(caches) * returns)))
                    ),
                    Slot(len(caches) * returns, Role.LOGITS, TensorSpec("float32", shape)),
                ),
            )
        )
    eos = () if toy.eos is None else (toy.eos,)
    return Contract(LABEL, VERSION, toy.capacity, toy.vocab, tuple(methods), caches, eos_ids=eos)


def write_toy(
    path: Path,
    toy: Toy | None = None,
    constants: Mapping[str, Any] | None = None,
    returns: bool = False,
    plan_outputs: bool = True,
) -> Contract:
    """Lower a toy and write it to `path`.

    Args:
        path: The `.pte` to write.
        toy: Sizes.
        constants: Constant methods to add or replace; None as a value removes one.
        returns: Return the updated caches (`kvcache_io`) instead of writing them in place.
        plan_outputs: Keep outputs in the program's arena.
    """
    toy = toy or Toy()
    model = ToyModel(toy, returns).eval().requires_grad_(False)
    contract = toy_contract(toy, returns)
    caches = [torch.zeros(cache.spec.shape) for cache in contract.caches]
    programs = {}
    for method in contract.methods:
        step = method.step
        tokens, start = torch.zeros(1, step, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        if step == 1:
            module: torch.nn.Module = _Decode(model)
            inputs = (tokens, start, *caches)
        else:
            module = _Prefill(model, method.logits_rows is LogitsRows.LAST)
            inputs = (tokens, start, torch.ones(1, dtype=torch.int64), *caches)
        programs[method.name] = export(module, inputs, strict=False)
    values = {
        name: value[0] if isinstance(value, list) else value
        for name, value in constant_methods(contract).items()
    }
    values.update(constants or {})
    edge = to_edge_transform_and_lower(
        programs,
        constant_methods={k: v for k, v in values.items() if v is not None},
        compile_config=EdgeCompileConfig(_check_ir_validity=False),
    )
    lowered = edge.to_executorch(
        ExecutorchBackendConfig(
            run_reinplace_pass=True,
            memory_planning_pass=DropMutated(
                alloc_graph_input=False, alloc_graph_output=plan_outputs
            ),
        )
    )
    path.write_bytes(lowered.buffer)
    return contract


def eager_logits(toy: Toy, tokens: list[int]) -> torch.Tensor:
    """float32 `[len(tokens), vocab]`: all tokens as one chunk of an eager model without padding."""
    wide = replace(toy, steps=(len(tokens),))
    model = ToyModel(toy).eval().requires_grad_(False)
    caches = [torch.zeros(cache.spec.shape) for cache in toy_contract(wide).caches]
    layers = [Layer(toy.capacity, None), Layer(wide.ring, toy.window)]
    for layer, old in zip(layers, model.layers, strict=True):
        layer.qkv, layer.out = old.qkv, old.out  # type: ignore[assignment]
    model.layers = torch.nn.ModuleList(layers)
    with torch.no_grad():
        ids = torch.tensor([tokens])
        logits: torch.Tensor = model(ids, torch.zeros(1, dtype=torch.int64), None, caches, False)
    return logits[0]
