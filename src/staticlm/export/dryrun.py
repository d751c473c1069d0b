"""What an export would do, in seconds and without weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from staticlm.contract import DTYPE_BYTES, Contract
from staticlm.export.ids import check_ids, model_ids
from staticlm.export.options import ExportOptions
from staticlm.export.programs import plan_contract, plan_methods
from staticlm.export.quantize import GROUP, check_scheme, quantizable
from staticlm.export.source import meta_source
from staticlm.export.traits import ModelTraits, inspect_model


@dataclass(frozen=True)
class DryRun:
    """What an export would make.

    Args:
        traits: What was found in the model: layers, RoPE types.
        contract: Methods and caches of the program.
        parameters: Weights, a tied one counted once.
        source_bytes: Bytes of the weights in the computation dtype: what loading the model takes.
        program_bytes: Bytes of the weights as the program holds them; the file is a little larger.
        kept_twice: Names of weights that the program stores in two forms.
    """

    traits: ModelTraits
    contract: Contract
    parameters: int
    source_bytes: int
    program_bytes: int
    kept_twice: tuple[str, ...]

    @property
    def export_bytes(self) -> int:
        """A lower bound of the memory that exporting takes: the model and the program together."""
        return self.source_bytes + self.program_bytes

    @property
    def run_bytes(self) -> int:
        """Memory that one session takes: weights and caches."""
        return self.program_bytes + self.contract.cache_bytes

    def layer_lines(self) -> list[str]:
        """Layers of one kind in one line each, with their caches."""
        groups: Counter[str] = Counter()
        for layer in self.traits.layers:
            own = [c for c in self.contract.caches if c.layer == layer.index]
            what = f"{layer.kind.value} attention"
            if layer.window is not None:
                what += f", window {layer.window}"
            if layer.chunk is not None:
                what += f", chunks of {layer.chunk}"
            what += f", {layer.heads} heads on {layer.kv_heads}"
            if own:
                shapes = " and ".join(str(c.spec) for c in own)
                what += f", caches {shapes}, {sum(c.spec.nbytes for c in own):,} bytes"
            else:
                what += f", caches of layer {layer.owner}"
            groups[what] += 1
        return [f"{count} x {what}" for what, count in groups.items()]


def plan_export(
    model: str | Path | PreTrainedModel,
    options: ExportOptions,
    *,
    backend: str = "xnnpack",
    backend_options: Mapping[str, Any] | None = None,
) -> DryRun:
    """Check options and model as an export would, and say what it would make.

    Nothing of the weights is read: the model is built on the meta device from its configuration.

    Args:
        model: A model directory, a GGUF file, a hub id, or a transformers model.
        options: Lengths, dtypes, attention mode, quantisation.
        backend: As for `export_model`.
        backend_options: As for `export_model`.

    Raises:
        ExportError: What an export would refuse.
        LoweringError: What lowering would refuse before it starts.
    """
    from staticlm.build import settle

    options, targets = settle(options, backend, backend_options or {})
    check_scheme(options, [target.label for target in targets.values()])
    empty = model if isinstance(model, PreTrainedModel) else meta_source(model).model
    traits = inspect_model(empty, options.context_length)
    bos_id, eos_ids = model_ids(empty)
    check_ids([bos_id, *eos_ids], traits.vocab_size)
    contract = plan_contract(
        traits,
        options,
        plan_methods(
            options,
            lambda method: targets[method].attention,
            capped=traits.capped,
            unfused=lambda method: targets[method].unfused,
        ),
        bos_id=bos_id,
        eos_ids=eos_ids,
        producers={},
        backends={name: target.label for name, target in targets.items()},
    )
    quantizable(empty, options)
    stored, twice = _stored_bytes(empty, options)
    parameters = sum(p.numel() for p in empty.parameters())
    return DryRun(
        traits=traits,
        contract=contract,
        parameters=parameters,
        source_bytes=parameters * DTYPE_BYTES[options.dtype],
        program_bytes=stored,
        kept_twice=twice,
    )


def _stored_bytes(model: Any, options: ExportOptions) -> tuple[int, tuple[str, ...]]:
    """Bytes of all weights in the program, and those that are there in two forms."""
    plain = DTYPE_BYTES[options.dtype]
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is table.weight
    quantised = options.quantize is not None or options.quantize_embedding is not None
    total = 0
    seen: set[tuple[int, int | None]] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            scheme = _bits(module, parameter, table, options)
            # A tied weight is stored once, unless its two uses have different forms.
            form = (id(parameter), scheme if quantised else None)
            if form in seen and not (tied and quantised and module is head):
                continue
            seen.add(form)
            total += _parameter_bytes(parameter, scheme, plain)
    return total, ("the tied embedding table",) if tied and quantised else ()


def _bits(module: nn.Module, parameter: Any, table: Any, options: ExportOptions) -> int | None:
    if parameter.dim() != 2:
        return None
    if module is table:
        return options.quantize_embedding
    if isinstance(module, (nn.Linear, Conv1D)) and options.quantize is not None:
        return 4 if options.quantize == "8da4w" else 8
    return None


def _parameter_bytes(parameter: torch.Tensor, bits: int | None, plain: int) -> int:
    if bits is None:
        return parameter.numel() * plain
    # Scales: bfloat16 for groups of 4-bit weights, float32 for rows of 8-bit ones.
    scales = 2 * (parameter.numel() // GROUP) if bits == 4 else 4 * parameter.shape[0]
    return parameter.numel() * bits // 8 + scales
