"""Which backend each method is lowered to: one for all, or one per method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from staticlm.errors import Code, LoweringError
from staticlm.lowering.backends import Backend, get_backend


@dataclass(frozen=True)
class Target:
    """One method's backend, ready to lower.

    Args:
        backend: The backend.
        label: What the contract records.
        attention: The attention mode chosen.
        attention_why: Why, where it was chosen for the user; else empty.
        unfused: Mode and reason where fused attention is ruled out; None where a mode was asked for.
        partitioners: Partitioners, in order.
        options: The backend's typed options.
    """

    backend: Backend
    label: str
    attention: str
    attention_why: str
    unfused: tuple[str, str] | None
    partitioners: Sequence[Any]
    options: Mapping[str, Any]


def resolve_targets(
    spec: str,
    options: Mapping[str, Any],
    methods: Mapping[str, tuple[int, int]],
    *,
    attention: str = "auto",
    dtype: str = "float32",
    cache_dtype: str = "float32",
) -> dict[str, Target]:
    """Resolve a backend specification for every method.

    Args:
        spec: A backend name, or `prefill=NAME,decode=NAME`; `prefill` covers all prefill methods and
            `decode` the verify method, unless they are named themselves.
        options: Backend options by name; with several backends, `BACKEND.name`.
        methods: Tokens per call, and slots read of a full cache, of every method to lower, by name.
        attention: `auto`, or a mode that the backend must support.
        dtype: Computation dtype.
        cache_dtype: Dtype of the caches.

    Raises:
        LoweringError: An unknown backend, method or option; a mode or dtype that the backend lacks.
    """
    names = assign_backends(spec, list(methods))
    used = {name: get_backend(name) for name in dict.fromkeys(names.values())}
    routed = {name: _own_options(name, options, list(used)) for name in used}
    for name, backend in used.items():
        backend.available()
        routed[name] = _typed(backend, routed[name])
        for kind, value, allowed in (
            ("dtype", dtype, backend.dtypes),
            ("cache dtype", cache_dtype, backend.cache_dtypes),
        ):
            if value not in allowed:
                raise LoweringError(
                    Code.EXPORT_OPTION_INVALID,
                    f"{kind} of backend {name!r}",
                    found=value,
                    expected=f"one of {', '.join(allowed)}",
                    remedy="Choose another --dtype or --backend.",
                )
    targets = {}
    for method, (step, slots) in methods.items():
        backend = used[names[method]]
        mode, why, unfused = attention, "", None
        if attention == "auto":
            mode, why = backend.attention(method, step, slots)
            unfused = backend.attention(method, step, slots, without=("fused",))
        if mode not in backend.attention_modes:
            raise LoweringError(
                Code.EXPORT_OPTION_INVALID,
                f"attention mode of backend {backend.name!r}",
                found=mode,
                expected=f"one of {', '.join(backend.attention_modes)}",
                remedy="Choose another --attention, or a --backend that has it.",
            )
        partitioners = backend.partitioners(method, routed[backend.name])
        options_of = routed[backend.name]
        targets[method] = Target(
            backend, backend.name, mode, why, unfused, partitioners, options_of
        )
    return targets


def assign_backends(spec: str, methods: Sequence[str]) -> dict[str, str]:
    """The name of every method's backend.

    Raises:
        LoweringError: `USAGE`: the specification cannot be read, or does not fit the methods.
    """
    if "=" not in spec:
        return dict.fromkeys(methods, spec.strip())
    given: dict[str, str] = {}
    for part in spec.split(","):
        method, _, name = (piece.strip() for piece in part.partition("="))
        if not method or not name or method in given:
            raise LoweringError(
                Code.USAGE,
                "the backend specification",
                found=spec,
                expected="NAME, or METHOD=NAME,METHOD=NAME with distinct methods",
            )
        given[method] = name
    unknown = sorted(set(given) - set(methods))
    if unknown:
        raise LoweringError(
            Code.USAGE,
            "methods in the backend specification",
            found=", ".join(unknown),
            expected=f"some of {', '.join(methods)}",
        )
    assigned = {}
    for method in methods:
        # A verify method must compute what decode computes; prefill methods are alike.
        plain = method.partition("_to_")[0]
        like = {"decode": "decode", "verify": "decode"}.get(plain, "prefill")
        chosen = given.get(method) or given.get(plain) or given.get(like)
        if chosen is None:
            raise LoweringError(
                Code.USAGE,
                f"the backend of method {method!r}",
                found="none",
                expected="a backend for every method",
                remedy=f"Add {method}=NAME.",
            )
        assigned[method] = chosen
    return assigned


def _own_options(
    backend: str, options: Mapping[str, Any], backends: Sequence[str]
) -> dict[str, Any]:
    """The options of one backend: `name` when there is one backend only, else `backend.name`."""
    own = {}
    for key, value in options.items():
        owner, dot, name = key.partition(".")
        if dot and owner in backends:
            if owner == backend:
                own[name] = value
        elif len(backends) == 1:
            own[key] = value
        else:
            raise LoweringError(
                Code.BACKEND_OPTION_UNKNOWN,
                f"backend option {key!r}",
                expected=f"a prefix, one of {', '.join(f'{b}.' for b in backends)}",
                remedy="With several backends, say whose option it is.",
            )
    return own


def _typed(backend: Backend, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with the texts of the command line turned into values."""
    texts = {name: value for name, value in options.items() if isinstance(value, str)}
    others = {name: value for name, value in options.items() if name not in texts}
    return {**others, **backend.typed(texts)}
