"""What a Hugging Face causal language model needs from us, and what we refuse by name.

Facts come from the configuration; a probe forward then checks that the modelling code agrees with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from staticlm.contract import CacheKind
from staticlm.errors import Code, ExportError
from staticlm.export.attention import AttentionCall, capture_cache, probing
from staticlm.export.static_form import use_static_form

_SLIDING = ("sliding_attention",)
_FULL = ("full_attention",)
_CHUNKED = ("chunked_attention",)
_BLOCK_TYPES = {"attention": "full_attention"}
_STATIC_ROPE = ("default", "linear", "llama3", "yarn", "proportional")
_LENGTH_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True)
class LayerTraits:
    """One decoder layer's attention.

    Args:
        index: Layer index.
        kind: Cache kind.
        window: Visible positions of a sliding layer, the current one included; None for a full one.
        heads: Query heads.
        kv_heads: Key and value heads.
        key_width: Width of a key head.
        value_width: Width of a value head.
        owner: The layer whose caches it reads: itself, or an earlier one that it shares them with.
        chunk: Length of the attention chunks that a layer does not look out of; None for no limit, or
            where the whole capacity is one chunk.
        softcap: Limit of its attention scores; None for no limit.
    """

    index: int
    kind: CacheKind
    window: int | None
    heads: int
    kv_heads: int
    key_width: int
    value_width: int
    owner: int
    chunk: int | None = None
    softcap: float | None = None


@dataclass(frozen=True)
class ModelTraits:
    """What export needs to know of a model."""

    architecture: str
    model_type: str
    vocab_size: int
    layers: tuple[LayerTraits, ...]
    max_positions: int | None
    rope_types: tuple[str, ...]
    tied: bool

    @property
    def capped(self) -> bool:
        """Whether some layer caps its attention scores."""
        return any(layer.softcap is not None for layer in self.layers)


def inspect_model(model: PreTrainedModel, capacity: int) -> ModelTraits:
    """Inspect a model (its weights may be on the meta device) and refuse what is not provably right.

    Args:
        model: A decoder-only causal language model in evaluation mode.
        capacity: Context length that the caches are to hold.

    Raises:
        ExportError: `MODEL_UNSUPPORTED`, naming the layer kind, RoPE type or trait in the way.
    """
    config = model.config.get_text_config(decoder=True)
    _check_causal(model)
    kinds = _layer_kinds(config, capacity)
    _check_attention_backend(model)
    rope_types = _rope_types(config, capacity)
    max_positions = getattr(config, "max_position_embeddings", None)
    _check_learned_positions(model, max_positions, capacity)
    calls = _probe(model, len(kinds))
    layers = []
    for index, ((kind, window, chunk), call) in enumerate(zip(kinds, calls, strict=True)):
        if call.sliding_window is not None and kind is CacheKind.FULL:
            raise _refuse(
                f"layer {index}: the configuration says full attention",
                f"the layer itself asks for a window of {call.sliding_window}",
                "both to agree",
            )
        if call.sliding_window is not None and call.sliding_window != window:
            raise _refuse(
                f"window of layer {index}",
                f"{call.sliding_window} in the layer, {window} in the configuration",
                "one number",
            )
        layers.append(
            LayerTraits(
                index,
                kind,
                window,
                call.heads,
                call.kv_heads,
                call.key_width,
                call.value_width,
                call.owner,
                chunk,
                call.softcap,
            )
        )
        owner = layers[call.owner]
        if (owner.kind, owner.window, owner.chunk) != (kind, window, chunk):
            raise _refuse(
                f"layer {index} shares keys and values with layer {call.owner}",
                f"{kind.value} attention on one, {owner.kind.value} on the other",
                "layers of one kind",
            )
    return ModelTraits(
        architecture=type(model).__name__,
        model_type=str(config.model_type),
        vocab_size=_vocab_size(model, config),
        layers=tuple(layers),
        max_positions=max_positions,
        rope_types=rope_types,
        tied=_is_tied(model),
    )


def _refuse(what: str, found: object, expected: object, remedy: str | None = None) -> ExportError:
    return ExportError(
        Code.MODEL_UNSUPPORTED,
        what,
        found=found,
        expected=expected,
        remedy=remedy or "This model is not exported: its program would not be provably right.",
    )


def _check_causal(model: PreTrainedModel) -> None:
    if model.config.is_encoder_decoder:
        raise _refuse(
            "the architecture", f"encoder-decoder {type(model).__name__}", "a decoder-only model"
        )
    if not model.can_generate():
        raise _refuse("the architecture", type(model).__name__, "a causal language model")
    config = model.config.get_text_config(decoder=True)
    if not getattr(config, "is_causal", True):
        raise _refuse("the attention", "bidirectional", "causal")


def _check_attention_backend(model: PreTrainedModel) -> None:
    if getattr(model, "_supports_attention_backend", False):
        return
    index, name = _first_layer(model)
    raise _refuse(
        f"layer {index}" if index is not None else f"attention of {type(model).__name__}",
        f"{name}, an implementation of its own",
        "attention that goes through transformers' attention interface",
    )


def _first_layer(model: PreTrainedModel) -> tuple[int | None, str]:
    """The first decoder layer's mixing module, by class name."""
    stacks = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) > 0]
    if not stacks:
        return None, type(model).__name__
    for name, child in stacks[0][0].named_children():
        if any(word in name.lower() for word in ("attn", "attention", "mixer", "mamba", "lstm")):
            return 0, type(child).__name__
    return 0, type(stacks[0][0]).__name__


_Kind = tuple[CacheKind, "int | None", "int | None"]


def _layer_kinds(config: Any, capacity: int) -> list[_Kind]:
    """Cache kind, window and attention chunk of every layer."""
    layer_types, kwargs = get_layer_types_and_kwargs(config)
    named = getattr(config, "layers_block_type", None) or getattr(config, "block_types", None)
    if named and getattr(config, "layer_types", None) is None:
        layer_types = [_BLOCK_TYPES.get(str(name), str(name)) for name in named]
        kwargs = [{} for _ in layer_types]
    modes = getattr(config, "kv_sharing_modes", None) or [None] * len(layer_types)
    kinds: list[_Kind] = []
    for index, (name, extra) in enumerate(zip(layer_types, kwargs, strict=True)):
        if name == "dummy" and modes[index] == "reuse":
            name, extra = _own_type(config, index)
        length = extra.get("sliding_window")
        if name in _FULL:
            kinds.append((CacheKind.FULL, None, None))
            continue
        if name not in _SLIDING + _CHUNKED:
            raise _refuse(
                f"layer {index}",
                f"layer type {name!r}",
                f"one of {', '.join(_FULL + _SLIDING + _CHUNKED)}",
                "A layer that keeps another state than keys and values by position is not exported.",
            )
        if not isinstance(length, int) or isinstance(length, bool) or length < 1:
            what = "attention chunk" if name in _CHUNKED else "sliding window"
            raise _refuse(f"{what} of layer {index}", length, "a positive integer")
        if name in _CHUNKED:
            kinds.append((CacheKind.FULL, None, length if length < capacity else None))
        else:
            kinds.append((CacheKind.SLIDING, length, None))
    if not kinds:
        raise _refuse("the decoder", "no layers", "at least one attention layer")
    return kinds


def _own_type(config: Any, index: int) -> tuple[str, dict[str, Any]]:
    """Type and window of a layer that transformers counts as one without a cache."""
    layer = config.per_layer_config[index]
    return config.layer_types[index], {"sliding_window": getattr(layer, "sliding_window", None)}


def _rope_types(config: Any, capacity: int) -> tuple[str, ...]:
    found: list[str] = []
    for rope in _rope_dicts(config):
        rope_type = str(rope.get("rope_type") or rope.get("type") or "default")
        found.append(rope_type)
        if rope_type in _STATIC_ROPE:
            continue
        original = rope.get("original_max_position_embeddings") or getattr(
            config, "max_position_embeddings", None
        )
        if rope_type not in _LENGTH_ROPE:
            raise _refuse(
                "RoPE type", rope_type, f"one of {', '.join(_STATIC_ROPE + _LENGTH_ROPE)}"
            )
        if not isinstance(original, int) or capacity > original:
            raise _refuse(
                f"RoPE type {rope_type!r} at context length {capacity}",
                "frequencies that change with the length of the text, so that cached keys go stale",
                f"a context length of at most {original}, the original length",
                f"Export with --context-length {original} or less.",
            )
    return tuple(dict.fromkeys(found))


def _rope_dicts(config: Any) -> list[dict[str, Any]]:
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(rope, dict):
        return []
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return nested or [rope]


def _check_learned_positions(
    model: PreTrainedModel, max_positions: int | None, capacity: int
) -> None:
    """A learned position table ends where it ends; reading past it aborts or returns garbage."""
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Embedding) or module is model.get_input_embeddings():
            continue
        leaf = name.rsplit(".", 1)[-1]
        is_table = leaf in ("wpe", "embed_positions", "position_embedding", "position_embeddings")
        limit = max_positions or module.num_embeddings
        if is_table and capacity > min(limit, module.num_embeddings):
            raise ExportError(
                Code.EXPORT_OPTION_INVALID,
                f"context length {capacity} is beyond the model's position table {name}",
                found=capacity,
                expected=f"at most {min(limit, module.num_embeddings)}",
                remedy="Export with a smaller --context-length.",
            )


def _probe(model: PreTrainedModel, layers: int) -> list[AttentionCall]:
    """Run two tokens through the model and record what each layer hands to attention."""
    device = next(model.parameters()).device
    tokens = torch.zeros((1, 2), dtype=torch.int64, device=device)
    positions = torch.arange(2, device=device).reshape(1, 2)
    with torch.no_grad(), use_static_form(model), probing() as calls:
        try:
            model(
                input_ids=tokens,
                position_ids=positions,
                cache=capture_cache(layers),
                use_cache=True,
            )
        except ExportError:
            raise
        except Exception as error:
            raise _refuse(
                f"a forward pass of {type(model).__name__} with a per-layer cache",
                f"{type(error).__name__}: {error}",
                "keys and values handed to the cache layer by layer",
            ) from error
    order = [call.layer for call in calls]
    if order != list(range(layers)):
        missing = sorted(set(range(layers)) - set(order))
        raise _refuse(
            "attention layers",
            f"calls from layers {order}" + (f", none from {missing}" if missing else ""),
            f"one call from each of {layers} layers in order",
        )
    return calls


def _vocab_size(model: PreTrainedModel, config: Any) -> int:
    head = model.get_output_embeddings()
    width = (
        getattr(head, "out_features", None)
        or getattr(getattr(head, "weight", None), "shape", [None])[0]
    )
    return int(width if width is not None else config.vocab_size)


def _is_tied(model: PreTrainedModel) -> bool:
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or table is None:
        return False
    return getattr(head, "weight", None) is getattr(table, "weight", 0)
