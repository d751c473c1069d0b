"""A model in the form that is traced: our attention, experts as batched matmuls, fixed frequencies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from staticlm.export.attention import NAME

EXPERTS = "batched_mm"
"""transformers' experts implementation whose graph does not depend on the routing."""


@contextmanager
def use_static_form(model: PreTrainedModel) -> Iterator[None]:
    """Put the model into its static form, and back at the end.

    RoPE types that depend on the length of the text keep their short frequencies: `inspect_model` has
    refused them by then where the capacity goes beyond their original length.
    """
    with ExitStack() as stack:
        before = model.config._attn_implementation
        model.set_attn_implementation(NAME)
        stack.callback(model.set_attn_implementation, before or "eager")
        if model._can_set_experts_implementation():
            experts = getattr(model.config, "_experts_implementation", None)
            model.set_experts_implementation(EXPERTS)
            stack.callback(model.set_experts_implementation, experts or "eager")
        for module in model.modules():
            if _changes_with_length(module):
                _fix_frequencies(module, stack)
        yield


def _changes_with_length(module: torch.nn.Module) -> bool:
    found = getattr(module, "rope_type", None)
    types = found.values() if isinstance(found, dict) else [found]
    return any(_by_length(t) for t in types)


def _by_length(rope_type: Any) -> bool:
    return isinstance(rope_type, str) and (rope_type == "longrope" or "dynamic" in rope_type)


def _fix_frequencies(module: Any, stack: ExitStack) -> None:
    """Show transformers a RoPE type that it does not update inside the forward pass."""
    found = module.rope_type
    if isinstance(found, dict):
        prefixes = [f"{layer}_" for layer, t in found.items() if _by_length(t)]
        fixed: Any = {layer: "default" if _by_length(t) else t for layer, t in found.items()}
    else:
        prefixes, fixed = [""], "default"
    for prefix in prefixes:
        name = f"{prefix}inv_freq"
        # Another tensor, not a copy into it: a text beyond the original length may have changed it.
        stack.callback(setattr, module, name, getattr(module, name))
        original = getattr(module, f"{prefix}original_inv_freq")
        setattr(module, name, original.to(getattr(module, name).device))
    module.rope_type = fixed
    stack.callback(setattr, module, "rope_type", found)
