"""Weights as integers: torchao's schemes that XNNPACK has kernels for."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from staticlm.errors import Code, ExportError
from staticlm.export.options import ExportOptions

GROUP = 32
"""Weights that share a scale, for 4-bit schemes."""

BACKENDS = ("xnnpack",)
"""Backends with kernels for these schemes."""


def check_scheme(options: ExportOptions, backends: list[str]) -> None:
    """Refuse a scheme where no kernel computes it. Needs no model.

    Raises:
        ExportError: `EXPORT_OPTION_INVALID`, naming the backend or dtype in the way.
    """
    if options.quantize is None and options.quantize_embedding is None:
        return
    other = [name for name in backends if name not in BACKENDS]
    if other:
        raise ExportError(
            Code.EXPORT_OPTION_INVALID,
            "quantised weights on this backend",
            found=", ".join(other),
            expected=f"one of {', '.join(BACKENDS)}",
            remedy="Leave out --quantize and --quantize-embedding, or choose another --backend.",
        )
    if options.dtype != "float32":
        raise ExportError(
            Code.EXPORT_OPTION_INVALID,
            "the computation dtype beside quantised weights",
            found=options.dtype,
            expected="float32, the dtype of the quantised kernels' activations",
            remedy="Use --dtype float32; --cache-dtype is free.",
        )


def is_quantised(model: nn.Module) -> bool:
    """Whether some weights are integers already."""
    return any(type(p).__module__.startswith("torchao") for p in model.parameters())


def quantize_model(model: PreTrainedModel, options: ExportOptions) -> PreTrainedModel:
    """A copy of `model` with quantised weights; `model` itself when nothing is to be quantised.

    A head that is tied to the embedding table gets weights of its own first.

    Args:
        model: In float32.
        options: `quantize` and `quantize_embedding`.

    Raises:
        ExportError: `MODEL_UNSUPPORTED`: weights that the scheme cannot hold, by name.
    """
    if options.quantize is None and options.quantize_embedding is None:
        return model
    quantizable(model, options)
    made = copy.deepcopy(model)
    _untie(made)
    if options.quantize is not None:
        _linear_layers(made)
        _apply(made, _linear_config(options.quantize), nn.Linear)
    if options.quantize_embedding is not None:
        table = made.get_input_embeddings()
        _apply(made, _table_config(options.quantize_embedding), table)
    return made


def quantizable(model: PreTrainedModel, options: ExportOptions) -> None:
    """Refuse a model whose weights the chosen schemes cannot hold; they may be on the meta device.

    Raises:
        ExportError: `MODEL_UNSUPPORTED`, naming the weight.
    """
    wanted = options.quantize is not None or options.quantize_embedding is not None
    if wanted and is_quantised(model):
        raise ExportError(
            Code.MODEL_UNSUPPORTED,
            "quantising a model",
            found="integer weights already",
            expected="floating point weights",
        )
    if options.quantize is not None:
        _check_linear(model, options.quantize)
    if options.quantize_embedding is not None:
        _check_table(model.get_input_embeddings(), options.quantize_embedding)


def _untie(model: Any) -> None:
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and head.weight is table.weight:
        head.weight = nn.Parameter(table.weight.detach().clone(), requires_grad=False)


def _linear_layers(model: nn.Module) -> None:
    """GPT-2's transposed linear layers as ordinary ones."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Conv1D):
            width, count = module.weight.shape
            linear = nn.Linear(width, count)
            linear.weight = nn.Parameter(module.weight.detach().t().contiguous())
            linear.bias = nn.Parameter(module.bias.detach())
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, linear.eval())


def _check_linear(model: nn.Module, scheme: str) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dim() == 3:
            raise ExportError(
                Code.MODEL_UNSUPPORTED,
                f"quantising {name}",
                found=f"experts in one tensor {list(parameter.shape)}",
                expected="linear layers: the experts' weights would stay float32",
                remedy="Export this model without --quantize.",
            )
    for name, module in model.named_modules():
        width = _input_width(module)
        if scheme == "8da4w" and width is not None and width % GROUP:
            raise ExportError(
                Code.MODEL_UNSUPPORTED,
                f"8da4w weights of {name}",
                found=f"{width} input features",
                expected=f"a multiple of {GROUP}, the group size",
                remedy="Use --quantize int8.",
            )


def _input_width(module: nn.Module) -> int | None:
    if isinstance(module, Conv1D):
        return int(module.weight.shape[0])
    return module.in_features if isinstance(module, nn.Linear) else None


def _check_table(table: Any, bits: int) -> None:
    if bits == 4 and table.embedding_dim % GROUP:
        raise ExportError(
            Code.MODEL_UNSUPPORTED,
            "a 4-bit embedding table",
            found=f"{table.embedding_dim} columns",
            expected=f"a multiple of {GROUP}, the group size",
            remedy="Use --quantize-embedding 8.",
        )


def _linear_config(scheme: str) -> Any:
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig

    bits = 4 if scheme == "8da4w" else 8
    dtype, granularity = _weights(bits)
    return Int8DynamicActivationIntxWeightConfig(
        weight_dtype=dtype,
        weight_granularity=granularity,
        intx_choose_qparams_algorithm=_scales(bits),
        # XNNPACK's 4-bit kernels hold group scales in bfloat16 and would round them silently.
        weight_scale_dtype=torch.bfloat16 if scheme == "8da4w" else None,
    )


def _table_config(bits: int) -> Any:
    from torchao.quantization import IntxWeightOnlyConfig

    dtype, granularity = _weights(bits)
    return IntxWeightOnlyConfig(
        weight_dtype=dtype, granularity=granularity, intx_choose_qparams_algorithm=_scales(bits)
    )


def _weights(bits: int) -> tuple[torch.dtype, Any]:
    from torchao.quantization.granularity import PerAxis, PerGroup

    four: torch.dtype = getattr(torch, "int4")  # noqa: B009  # the stubs do not know it
    return (four, PerGroup(GROUP)) if bits == 4 else (torch.int8, PerAxis(0))


def _scales(bits: int) -> Any:
    """How scales are chosen.

    Four bits: by the half-quadratic search, which weighs errors instead of covering the largest weight
    (perplexity of SmolLM2 26.1 instead of 28.4).
    """
    from torchao.quantization.quantize_.workflows import IntxChooseQParamsAlgorithm

    choices = IntxChooseQParamsAlgorithm
    return choices.HQQ_SCALE_ONLY if bits == 4 else choices.AFFINE


def _apply(model: nn.Module, config: Any, which: Any) -> None:
    """Quantise modules of a class, or one module."""
    try:
        from torchao.quantization import quantize_
    except ImportError as error:
        raise ExportError(
            Code.DEPENDENCY_MISSING,
            "quantised weights need torchao",
            found=str(error),
            remedy="Install staticlm[export].",
        ) from error

    def wanted(module: nn.Module, name: str) -> bool:
        return isinstance(module, which) if isinstance(which, type) else module is which

    quantize_(model, config, filter_fn=wanted)
