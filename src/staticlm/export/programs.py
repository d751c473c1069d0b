"""A model as one `ExportedProgram` per method, with the contract that they keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.export import ExportedProgram
from transformers import PreTrainedModel

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
from staticlm.errors import Code, ExportError
from staticlm.export.decoder import STEPWISE, TORCH_DTYPES, MethodPlan, StaticDecoder
from staticlm.export.ids import check_ids
from staticlm.export.options import ExportOptions
from staticlm.export.selfcheck import check_against_source
from staticlm.export.static_form import use_static_form
from staticlm.export.traits import ModelTraits, inspect_model

_PREFILL_PREFIX = 1024
"""The shortest prefix, but for 0, that gets prefill methods."""

_INT64_1 = TensorSpec("int64", (1,))


@dataclass(frozen=True)
class ExportedModel:
    """Exported methods by name, their contract, and what was found in the model."""

    programs: dict[str, ExportedProgram]
    contract: Contract
    traits: ModelTraits


def plan_methods(
    options: ExportOptions,
    attention: Callable[[str], str],
    attention_why: Callable[[str], str] = lambda method: "",
    capped: bool = False,
    unfused: Callable[[str], tuple[str, str] | None] | None = None,
) -> tuple[MethodPlan, ...]:
    """The methods that options ask for.

    Args:
        options: Lengths, logits rows and prefixes.
        attention: Attention mode of a method, by its name; a verify method takes decode's.
        attention_why: Why it was chosen.
        capped: Whether some layer caps its scores, which the operator of fused attention cannot; the
            rows of a verify method are not its either.
        unfused: Mode and reason where fused attention is ruled out; None where it was asked for.
    """

    def plan(
        name: str, role: MethodRole, step: int, rows: LogitsRows, max_start: int | None = None
    ) -> MethodPlan:
        verify = role is MethodRole.VERIFY
        like = name.replace("verify", "decode") if verify else name
        mode, why = attention(like), attention_why(like)
        if mode == "fused" and unfused is not None and (capped or options.verify_length):
            mode, why = unfused(like) or (mode, why)
        mode = STEPWISE + mode if verify else mode
        return MethodPlan(name, role, step, rows, mode, max_start, why)

    plans = []
    for position, length in enumerate(sorted(options.prefill_lengths, reverse=True)):
        name = "prefill" if position == 0 else f"prefill_{length}"
        plans.append(plan(name, MethodRole.PREFILL, length, options.logits))
    if options.verify_length is not None:
        plans.append(plan("verify", MethodRole.VERIFY, options.verify_length, LogitsRows.ALL))
    plans.append(plan("decode", MethodRole.DECODE, 1, LogitsRows.LAST))
    narrow = [
        plan(f"{one.name}_to_{prefix}", one.role, one.step, one.logits_rows, prefix)
        for one in plans
        for prefix in sorted(options.prefixes or ())
        # Prefill is bound by arithmetic: a short prefix saves it little, an empty one all reading.
        # One token at position 0 is not worth a method.
        if prefix >= _PREFILL_PREFIX or (one.role is MethodRole.PREFILL) is (prefix == 0)
    ]
    return (*plans, *narrow)


def plan_caches(traits: ModelTraits, options: ExportOptions) -> tuple[Cache, ...]:
    """Key and value cache of every layer that owns some, in slot order."""
    caches = []
    dtype = options.cache_dtype or options.dtype
    for layer in traits.layers:
        if layer.owner != layer.index:
            continue
        slots = options.context_length
        if layer.kind is CacheKind.SLIDING:
            assert layer.window is not None
            slots = min(slots, layer.window - 1 + options.longest_step)
        for part, width in ((Part.KEY, layer.key_width), (Part.VALUE, layer.value_width)):
            spec = TensorSpec(dtype, (layer.kv_heads, slots, width))
            caches.append(Cache(layer.index, part, layer.kind, layer.window, spec))
    return tuple(caches)


def plan_contract(
    traits: ModelTraits,
    options: ExportOptions,
    plans: Sequence[MethodPlan],
    *,
    bos_id: int | None,
    eos_ids: Sequence[int],
    producers: dict[str, str],
    backends: dict[str, str] | None = None,
) -> Contract:
    """The contract that the exported methods will keep.

    Raises:
        ExportError: `MODEL_UNSUPPORTED`: fused attention of a model that caps its scores.
    """
    _check_fused(traits, plans)
    caches = plan_caches(traits, options)
    methods = []
    for plan in plans:
        inputs = [
            (Role.TOKENS, TensorSpec("int64", (1, plan.step)), None),
            (Role.START, _INT64_1, None),
        ]
        if plan.step > 1:
            inputs.append((Role.LENGTH, _INT64_1, None))
        rows = plan.step if plan.logits_rows is LogitsRows.ALL else 1
        slots = [Slot(i, role, spec, cache) for i, (role, spec, cache) in enumerate(inputs)]
        for index, cache in enumerate(caches):
            role = Role.KEY if cache.part is Part.KEY else Role.VALUE
            slots.append(Slot(len(slots), role, cache.spec, index))
        logits = Slot(0, Role.LOGITS, TensorSpec(options.dtype, (1, rows, traits.vocab_size)))
        methods.append(
            Method(
                name=plan.name,
                role=plan.role,
                step=plan.step,
                logits_rows=plan.logits_rows,
                inputs=tuple(slots),
                outputs=(logits,),
                attention=plan.attention,
                backend=(backends or {}).get(plan.name, ""),
                max_start=plan.max_start,
                attention_why=plan.attention_why,
            )
        )
    return Contract(
        label=LABEL,
        version=VERSION,
        max_context_len=options.context_length,
        vocab_size=traits.vocab_size,
        methods=tuple(methods),
        caches=caches,
        bos_id=bos_id,
        eos_ids=tuple(dict.fromkeys(eos_ids)),
        producers=producers,
    )


def _check_fused(traits: ModelTraits, plans: Sequence[MethodPlan]) -> None:
    if traits.capped and any(plan.attention == "fused" for plan in plans):
        first = next(layer for layer in traits.layers if layer.softcap is not None)
        raise ExportError(
            Code.MODEL_UNSUPPORTED,
            f"fused attention of layer {first.index}",
            found=f"scores capped at {first.softcap:g}",
            expected="plain scores: the operator knows no cap",
            remedy="Use --attention split or concat.",
        )


def export_programs(
    model: PreTrainedModel,
    options: ExportOptions,
    *,
    attention: Callable[[str], str] = lambda method: "split",
    attention_why: Callable[[str], str] = lambda method: "",
    unfused: Callable[[str], tuple[str, str] | None] | None = None,
    bos_id: int | None = None,
    eos_ids: Sequence[int] = (),
    producers: dict[str, str] | None = None,
    backends: dict[str, str] | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> ExportedModel:
    """Trace every method of a model.

    Args:
        model: A causal language model in evaluation mode, in the computation dtype.
        options: Lengths, dtypes, logits rows.
        attention: Attention mode of a method, by its name.
        attention_why: Why it was chosen, to be recorded.
        unfused: Mode and reason where fused attention is ruled out; see `plan_methods`.
        bos_id: Begin-of-text id to record.
        eos_ids: End ids to record.
        producers: Versions to record.
        backends: Backend names to record, by method.
        progress: Told before every stage.

    Raises:
        ExportError: The model is not supported, differs from its source when traced, or cannot be traced.
    """
    _refuse_inference_tensors(model)
    model.eval()
    progress("inspect")
    traits = inspect_model(model, options.context_length)
    check_ids([bos_id, *eos_ids], traits.vocab_size)
    plans = plan_methods(options, attention, attention_why, traits.capped, unfused)
    contract = plan_contract(
        traits,
        options,
        plans,
        bos_id=bos_id,
        eos_ids=eos_ids,
        producers=producers or {},
        backends=backends,
    )
    decoders = {
        plan.name: StaticDecoder(
            model, traits, contract.caches, options.context_length, plan
        ).eval()
        for plan in plans
    }
    progress("compare with the source")
    check_against_source(model, decoders, contract)
    programs = {}
    with torch.no_grad(), use_static_form(model):
        for method in contract.methods:
            progress(f"trace {method.name}")
            programs[method.name] = _trace(decoders[method.name], method, contract)
    return ExportedModel(programs, contract, traits)


def example_inputs(method: Method, contract: Contract) -> tuple[torch.Tensor, ...]:
    """Inputs of a method with one valid token at position 0 and empty caches."""
    inputs = []
    for slot in method.inputs:
        if slot.cache is not None:
            cache = contract.caches[slot.cache]
            inputs.append(torch.zeros(cache.spec.shape, dtype=TORCH_DTYPES[cache.spec.dtype]))
        elif slot.role is Role.LENGTH:
            inputs.append(torch.full(slot.spec.shape, method.step, dtype=torch.int64))
        else:
            inputs.append(torch.zeros(slot.spec.shape, dtype=torch.int64))
    return tuple(inputs)


def _trace(decoder: StaticDecoder, method: Method, contract: Contract) -> ExportedProgram:
    inputs = example_inputs(method, contract)
    # The eager run makes the constants; the trace only reads them.
    decoder(*(x.clone() for x in inputs))
    decoder.constants.frozen = True
    try:
        program = torch.export.export(decoder, inputs, strict=False)
    except ExportError:
        raise
    except Exception as error:
        raise ExportError(
            Code.EXPORT_FAILED,
            f"tracing method {method.name!r} with torch.export",
            found=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            remedy="The model's forward is not traceable with fixed shapes.",
        ) from error
    _check_signature(program, method)
    _drop_debug_metadata(program)
    return program


def _check_signature(program: ExportedProgram, method: Method) -> None:
    """Slots are recorded by index, so the traced signature must be the one we planned."""
    signature = program.graph_signature
    # Before functionalisation the signature does not list mutations: read them off the graph. Writes
    # into intermediate values are the model's own affair.
    placeholders = {str(node) for node in program.graph.nodes if node.op == "placeholder"}
    mutated = placeholders & {
        str(node.args[0])
        for node in program.graph.nodes
        if node.op == "call_function" and str(node.target).rsplit(".", 1)[0].endswith("_")
    }
    names = list(signature.user_inputs)
    caches = {str(names[s.index]) for s in method.inputs if s.cache is not None}
    problems = []
    if len(names) != len(method.inputs):
        problems.append(f"{len(names)} inputs instead of {len(method.inputs)}")
    if mutated != caches:
        problems.append(f"{len(mutated)} inputs written instead of {len(caches)} caches")
    if signature.buffers_to_mutate:
        problems.append(f"buffers written: {sorted(signature.buffers_to_mutate.values())[:4]}")
    if len(signature.user_outputs) != 1:
        problems.append(f"{len(signature.user_outputs)} outputs instead of the logits alone")
    if problems:
        raise ExportError(
            Code.EXPORT_FAILED,
            f"the traced signature of method {method.name!r}",
            found="; ".join(problems),
            expected="tokens, positions and caches in; logits out; caches written in place",
        )


def _drop_debug_metadata(program: ExportedProgram) -> None:
    """Stack traces and module stacks are deep-copied by every later pass; nothing of ours reads them."""
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "from_node"):
                    node.meta.pop(key, None)


def _refuse_inference_tensors(model: PreTrainedModel) -> None:
    name = next((n for n, p in model.named_parameters() if p.is_inference()), None)
    if name is not None:
        raise ExportError(
            Code.MODEL_INVALID,
            f"parameter {name} was made under torch.inference_mode and cannot be traced",
            expected="ordinary tensors",
            remedy="Build or load the model outside torch.inference_mode (torch.no_grad is fine).",
        )
