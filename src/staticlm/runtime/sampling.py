"""Choosing the next token from logits: small closures, numpy only.

A sampler maps float32 logits `[vocabulary]` and the tokens so far to one token id.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
import numpy.typing as npt

from staticlm.errors import Code, RunnerError

Logits = npt.NDArray[np.float32]
Sampler = Callable[[Logits, Sequence[int]], int]
"""`(logits [vocabulary] float32, tokens so far) -> token id`; never changes its arguments."""

Filter = Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen; the defaults are greedy.

    Args:
        temperature: Divides the logits; 0 takes the largest logit, whatever the filters below say.
        top_k: Keep this many of the largest logits; 0 keeps all.
        top_p: Keep the fewest tokens whose probabilities reach this sum, in (0, 1].
        min_p: Drop tokens less probable than this fraction of the most probable one, in [0, 1].
        repetition_penalty: Divides positive and multiplies negative logits of tokens that occurred
            in the prompt or the text, 0.01 to 100; 1 is without effect. Applies to greedy choice too.
        seed: Makes the choice repeatable; None draws a new seed.

    Raises:
        RunnerError: A value of the wrong type or outside its range (`SAMPLING_INVALID`).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        _real("temperature", self.temperature, "0 or more", lambda v: v >= 0)
        _real("top_p", self.top_p, "more than 0 and at most 1", lambda v: 0 < v <= 1)
        _real("min_p", self.min_p, "0 to 1", lambda v: 0 <= v <= 1)
        # Beyond this a penalty leaves float32, and what is infinite has no order.
        _real("repetition_penalty", self.repetition_penalty, "0.01 to 100", _in_penalty)
        _whole("top_k", self.top_k)
        if self.seed is not None:
            _whole("seed", self.seed)


def make_sampler(options: SamplingOptions) -> Sampler:
    """A sampler for the options, in the order penalty, temperature, top-k, top-p, min-p, draw.

    The sampler raises `RunnerError` (`EXECUTION_FAILED`) for logits that have no largest number.
    """
    penalty = float(options.repetition_penalty)
    if options.temperature == 0:

        def greedy(logits: Logits, tokens: Sequence[int]) -> int:
            scores = penalised(logits, tokens, penalty)
            best = int(np.argmax(scores))
            _check_finite(scores[best])
            return best

        return greedy
    filters: list[Filter] = []
    if options.top_k:
        filters.append(top_k(options.top_k))
    if options.top_p < 1:
        filters.append(top_p(options.top_p))
    if options.min_p > 0:
        filters.append(min_p(options.min_p))
    generator = np.random.default_rng(options.seed)
    temperature = float(options.temperature)

    def draw(logits: Logits, tokens: Sequence[int]) -> int:
        scores = penalised(logits, tokens, penalty).astype(np.float64)
        best = scores.max()
        _check_finite(best)
        # Shifted first: a tiny temperature then drives the others to -inf, not the best to +inf.
        with np.errstate(over="ignore"):
            scores = (scores - best) / temperature
        for each in filters:
            scores = each(scores)
        cumulative = np.cumsum(softmax(scores))
        point = generator.random() * cumulative[-1]
        return int(np.searchsorted(cumulative, point, side="right"))

    return draw


def penalised(logits: Logits, tokens: Sequence[int], penalty: float) -> Logits:
    """Logits with the repetition penalty applied to every token id that occurs in `tokens`."""
    if penalty == 1 or not len(tokens):
        return logits
    seen = np.unique(np.asarray(tokens, dtype=np.int64))
    out: Logits = logits.copy()
    out[seen] = np.where(out[seen] > 0, out[seen] / penalty, out[seen] * penalty)
    return out


def top_k(count: int) -> Filter:
    """Keep the `count` largest scores; of equal ones the lower token ids."""

    def keep(scores: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        if count >= scores.size:
            return scores
        return _only(scores, np.argsort(-scores, kind="stable")[:count])

    return keep


def top_p(mass: float) -> Filter:
    """Keep the fewest most probable tokens whose probabilities sum to at least `mass`."""

    def keep(scores: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        order = np.argsort(-scores, kind="stable")
        cumulative = np.cumsum(softmax(scores[order]))
        return _only(scores, order[: int(np.searchsorted(cumulative, mass)) + 1])

    return keep


def min_p(fraction: float) -> Filter:
    """Drop tokens less probable than `fraction` of the most probable one."""

    def keep(scores: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.where(scores >= scores.max() + math.log(fraction), scores, -np.inf)

    return keep


def softmax(scores: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Probabilities of scores; `-inf` gives 0."""
    weights: npt.NDArray[np.float64] = np.exp(scores - scores.max())
    weights /= weights.sum()
    return weights


def _only(scores: npt.NDArray[np.float64], kept: npt.NDArray[np.intp]) -> npt.NDArray[np.float64]:
    out: npt.NDArray[np.float64] = np.full_like(scores, -np.inf)
    out[kept] = scores[kept]
    return out


def _check_finite(best: np.floating[Any]) -> None:
    # NaN wins every maximum: one look suffices.
    if not math.isfinite(best):
        raise RunnerError(
            Code.EXECUTION_FAILED,
            "the program computed logits that choose no token",
            found=f"a largest logit of {best}",
            expected="a finite number",
            remedy="Export the model again with --dtype float32, or check its weights.",
        )


def _in_penalty(value: float) -> bool:
    return 0.01 <= value <= 100


def _real(name: str, value: object, wanted: str, fits: Callable[[float], bool]) -> None:
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not fits(float(value)):  # type: ignore[arg-type]
        raise _refused(name, value, f"a number, {wanted}")


def _whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 0:
        raise _refused(name, value, "an integer, 0 or more")


def _refused(name: str, value: Any, wanted: str) -> RunnerError:
    return RunnerError(
        Code.SAMPLING_INVALID, f"the sampling option {name}", found=repr(value), expected=wanted
    )
