"""`--backend auto`: the backends of this machine, measured on the model's own shapes.

A model of one layer and a model of three are exported with every candidate and timed here; what a
further layer costs, and what the rest costs, gives the time of the whole model. Weights are random:
speed does not depend on them.
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

_DEPTHS = (1, 3)
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
        StaticLMError: The preferred backend cannot export the model.
    """
    found, left_out = candidates(options)
    depth = _depth(model)
    if len(found) == 1 or depth is None:
        if depth is None:
            left_out |= {one.name: "this model cannot be cut to a few layers" for one in found[1:]}
        return BackendChoice(found[0].name, {}, left_out)
    times: dict[str, dict[str, float]] = {"prefill": {}, "decode": {}}
    for one in found:
        progress(f"measure {one.name}")
        own = {k: v for k, v in backend_options.items() if k.startswith(f"{one.name}.")}
        own = {k.partition(".")[2]: v for k, v in own.items()}
        try:
            shallow, deep = (_measure(model, n, options, one.name, own) for n in _DEPTHS)
        except StaticLMError as error:
            if one.name == PREFERRED:
                raise
            left_out[one.name] = f"{error.what}: {error.found}"
            continue
        for kind in times:
            layer = max(0.0, (deep[kind] - shallow[kind]) / (_DEPTHS[1] - _DEPTHS[0]))
            times[kind][one.name] = shallow[kind] + layer * (depth - _DEPTHS[0])
    return BackendChoice(decide(times), times, left_out)


def decide(times: Mapping[str, Mapping[str, float]]) -> str:
    """The backend specification for measured times of `prefill` and `decode`."""
    chosen = {}
    for kind, measured in times.items():
        best = min(measured, key=lambda name: measured[name])
        worth = measured[best] < _WORTH * measured[PREFERRED]
        chosen[kind] = best if worth else PREFERRED
    names = set(chosen.values())
    return (
        names.pop()
        if len(names) == 1
        else ",".join(f"{kind}={name}" for kind, name in chosen.items())
    )


def candidates(options: ExportOptions) -> tuple[list[Backend], dict[str, str]]:
    """Backends to measure, the preferred one first, and why others are left out."""
    from staticlm.export.quantize import check_scheme
    from staticlm.lowering.backends import backend_names, get_backend

    found, left_out = [get_backend(PREFERRED)], {}
    for name in backend_names():
        backend = get_backend(name)
        if name in (PREFERRED, "portable") or not backend.runs_on_host:
            continue
        try:
            backend.available()
            check_scheme(options, [name])
        except StaticLMError as error:
            left_out[name] = f"{error.what}: {error.found}"
            continue
        cache_dtype = options.cache_dtype or options.dtype
        precision = backend.precision(options.dtype)
        if options.dtype not in backend.dtypes or cache_dtype not in backend.cache_dtypes:
            left_out[name] = f"it does not take {options.dtype} with caches in {cache_dtype}"
        elif precision != options.dtype:
            left_out[name] = f"here it computes in {precision}, not in {options.dtype}"
        else:
            found.append(backend)
    return found, left_out


def _depth(model: PreTrainedModel) -> int | None:
    depth = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    if not isinstance(depth, int) or depth <= max(_DEPTHS):
        return None
    try:
        _cut(model, 1, meta=True)
    except Exception:
        return None
    return depth


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
    from staticlm.runtime.runner import load

    step = max(options.prefill_lengths)
    options = replace(options, prefill_lengths=(step,), verify_length=None, prefixes=())
    count = max(step, options.context_length // 2 // step * step)
    with tempfile.TemporaryDirectory() as work:
        path = Path(work) / "cut"
        export_model(
            _cut(model, layers), path, options, backend=backend, backend_options=backend_options
        )
        with load(path) as runner:
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
