"""`--backend auto`: the backends of this machine, measured on the model's own shapes.

Models of a few layers are exported with every candidate and timed here: once with enough layers to have
one of every kind, once with twice as many. What the further layers cost, and what the rest costs, gives
the time of the whole model. Weights are random: speed does not depend on them.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from staticlm.errors import Code, LoweringError, StaticLMError
from staticlm.export.options import ExportOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from staticlm.lowering.backends import Backend

AUTO = "auto"

PREFERRED = "xnnpack"
"""Taken where no other is clearly faster."""

_DEEPEST = 8
"""Layers of the smaller model, at most."""

_ROUNDS = 4
_STEPS = 8
_WORTH = 0.8
"""Another backend is taken when it needs less than this share of the time: with two backends the program
holds the weights twice."""


@dataclass(frozen=True)
class BackendChoice:
    """What `auto` stands for.

    Args:
        backend: A backend specification, as `export_model` takes it.
        milliseconds: Estimated time of a call of the whole model, by kind of method and backend.
        left_out: Backends that were not measured, and why.
    """

    backend: str
    milliseconds: Mapping[str, Mapping[str, float]]
    left_out: Mapping[str, str]

    def own_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Those of `options` that belong to a chosen backend."""
        names = {part.rpartition("=")[2] for part in self.backend.split(",")}
        return {key: value for key, value in options.items() if key.partition(".")[0] in names}

    def lines(self) -> list[str]:
        """For people, a line each."""
        found = [
            f"{kind}: " + ", ".join(f"{name} {value:.1f} ms" for name, value in times.items())
            for kind, times in self.milliseconds.items()
        ]
        found += [f"{name} was not measured: {why}" for name, why in self.left_out.items()]
        return [*found, f"backend {self.backend}"]


def check_auto_options(options: Mapping[str, Any]) -> None:
    """Refuse backend options that do not say whose they are.

    Raises:
        LoweringError: `BACKEND_OPTION_UNKNOWN`.
    """
    from staticlm.lowering.backends import backend_names

    for key in options:
        owner, dot, _ = key.partition(".")
        if not dot or owner not in backend_names():
            raise LoweringError(
                Code.BACKEND_OPTION_UNKNOWN,
                f"backend option {key!r} beside backend {AUTO!r}",
                expected=f"a prefix, one of {', '.join(f'{name}.' for name in backend_names())}",
                remedy="Say whose option it is.",
            )


def choose_backend(
    model: PreTrainedModel,
    options: ExportOptions,
    backend_options: Mapping[str, Any],
    progress: Callable[[str], None] = lambda stage: None,
) -> BackendChoice:
    """Measure every backend that this machine can run and that computes in the wanted precision.

    Args:
        model: The model, before its weights are quantised.
        options: What is to be exported.
        backend_options: As for `export_model`, with a prefix: `BACKEND.name`.
        progress: Told what is measured.

    Raises:
        StaticLMError: No backend does what is asked, or the model is not supported.
    """
    found, left_out = candidates(options, backend_options)
    depths = _depths(model, options)
    if len(found) == 1 or depths is None:
        if depths is None:
            left_out |= {one.name: "this model cannot be cut to a few layers" for one in found[1:]}
        return BackendChoice(found[0].name, {}, left_out)
    shallow, deep, whole = depths
    times: dict[str, dict[str, float]] = {"prefill": {}, "decode": {}}
    for one in found:
        progress(f"measure {one.name}")
        own = _own(one.name, backend_options)
        try:
            few, more = (_measure(model, n, options, one.name, own) for n in (shallow, deep))
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            left_out[one.name] = f"it failed: {reason}"
            continue
        for kind in times:
            layer = max(0.0, (more[kind] - few[kind]) / (deep - shallow))
            times[kind][one.name] = few[kind] + layer * (whole - shallow)
    if not times["prefill"]:
        return BackendChoice(found[0].name, {}, left_out)
    if options.verify_length is not None and PREFERRED in times["decode"]:
        # Verify rows must round as decode does, which is known of the preferred backend alone.
        times["decode"] = {PREFERRED: times["decode"][PREFERRED]}
    return BackendChoice(decide(times), times, left_out)


def _own(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of one backend, without its prefix."""
    found = ((key.partition("."), value) for key, value in options.items())
    return {key: value for (owner, _, key), value in found if owner == name}


def decide(times: Mapping[str, Mapping[str, float]]) -> str:
    """The backend specification for measured times of `prefill` and `decode`."""
    chosen = {}
    for kind, measured in times.items():
        best = min(measured, key=lambda name: measured[name])
        preferred = PREFERRED if PREFERRED in measured else best
        worth = measured[best] < _WORTH * measured[preferred]
        chosen[kind] = best if worth else preferred
    names = set(chosen.values())
    return (
        names.pop()
        if len(names) == 1
        else ",".join(f"{kind}={name}" for kind, name in chosen.items())
    )


def candidates(
    options: ExportOptions, backend_options: Mapping[str, Any]
) -> tuple[list[Backend], dict[str, str]]:
    """Backends to measure, the preferred one first, and why others are left out.

    Raises:
        LoweringError: None is left.
    """
    from staticlm.lowering.backends import backend_names, get_backend

    found, left_out = [], {}
    for name in sorted(backend_names(), key=lambda name: name != PREFERRED):
        backend = get_backend(name)
        if name == "portable" or not backend.runs_on_host:
            continue
        why = _obstacle(backend, options, _own(name, backend_options))
        if why is None:
            found.append(backend)
        else:
            left_out[name] = why
    if not found:
        raise LoweringError(
            Code.EXPORT_OPTION_INVALID,
            "no backend of this machine does what is asked",
            found="; ".join(f"{name}: {why}" for name, why in left_out.items()),
            expected="a backend that takes the dtypes, the attention mode and the weights",
            remedy="Change the options, or name a backend.",
        )
    return found, left_out


def _obstacle(backend: Backend, options: ExportOptions, own: Mapping[str, Any]) -> str | None:
    """Why a backend does not compute what is asked, or None."""
    from staticlm.export.quantize import check_scheme

    cache_dtype = options.cache_dtype or options.dtype
    if options.dtype not in backend.dtypes or cache_dtype not in backend.cache_dtypes:
        return f"it does not take {options.dtype} with caches in {cache_dtype}"
    if options.attention != "auto" and options.attention not in backend.attention_modes:
        return f"it has no {options.attention} attention"
    try:
        backend.available()
        check_scheme(options, [backend.name])
        precision = backend.precision(options.dtype, own)
    except StaticLMError as error:
        return f"{error.what}: {error.found}"
    except Exception as error:  # a library's own, of a device that is not there
        return f"its precision is not known: {error}"
    if precision != options.dtype:
        return f"here it computes in {precision}, not in {options.dtype}"
    return None


def _depths(model: PreTrainedModel, options: ExportOptions) -> tuple[int, int, int] | None:
    """Layers of the two models to measure, and of the whole; None where they would not stand for it."""
    from staticlm.export.traits import inspect_model

    layers = inspect_model(model, options.context_length).layers
    modules = list(getattr(model.get_decoder(), "layers", ()))
    if len(modules) != len(layers):
        return None
    kinds = [
        (
            one.kind,
            one.window,
            one.chunk,
            one.owner == one.index,
            sum(p.numel() for p in m.parameters()),
        )
        for one, m in zip(layers, modules, strict=True)
    ]
    shallow = max(kinds.index(kind) for kind in set(kinds)) + 1
    if shallow > _DEEPEST or 2 * shallow > len(layers):
        return None
    try:
        for depth in (shallow, 2 * shallow):
            _cut(model, depth, meta=True)
    except Exception:
        return None
    return shallow, 2 * shallow, len(layers)


def _cut(model: PreTrainedModel, layers: int, meta: bool = False) -> PreTrainedModel:
    """A model of the same shapes with its first layers, and weights of its own."""
    import torch
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(model.config)
    text = config.get_text_config(decoder=True)
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None) is not None:
        text.layer_types = list(text.layer_types)[:layers]
    with torch.device("meta" if meta else "cpu"):
        cut: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    return cut.eval()


def _measure(
    model: PreTrainedModel,
    layers: int,
    options: ExportOptions,
    backend: str,
    backend_options: Mapping[str, Any],
) -> dict[str, float]:
    """Milliseconds of a prefill and of a decode call, around half the capacity."""
    from staticlm.build import export_model
    from staticlm.runtime.packed_weights import not_kept
    from staticlm.runtime.runner import load

    step = max(options.prefill_lengths)
    options = replace(options, prefill_lengths=(step,), verify_length=None, prefixes=())
    count = max(step, options.context_length // 2 // step * step)
    with tempfile.TemporaryDirectory() as work:
        path = Path(work) / "cut"
        export_model(
            _cut(model, layers), path, options, backend=backend, backend_options=backend_options
        )
        with not_kept(), load(path) as runner:
            session = runner.session
            prefill, decode = [], []
            for _ in range(_ROUNDS):
                session.reset()
                begun = time.perf_counter()
                session.prefill([0] * count)
                prefill.append((time.perf_counter() - begun) * step / count)
            for _ in range(_ROUNDS):
                session.reset()
                session.prefill([0] * max(1, min(count, options.context_length - _STEPS)))
                begun = time.perf_counter()
                steps = min(_STEPS, options.context_length - session.position)
                for _ in range(steps):
                    session.step(0)
                decode.append((time.perf_counter() - begun) / max(1, steps))
    # The first round of each warms up.
    return {
        "prefill": statistics.median(prefill[1:]) * 1000,
        "decode": statistics.median(decode[1:]) * 1000,
    }
