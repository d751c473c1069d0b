"""Is a written program right? stepwise == chunked == eager, on the runtime, against its source model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from staticlm.contract import CacheKind, Contract
from staticlm.errors import Code, StaticLMError, UsageError
from staticlm.runtime.runner import Runner, load
from staticlm.runtime.session import Session

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Rows = npt.NDArray[np.float32]

TOLERANCE = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 2e-1}
"""Largest logits difference that passes, relative to the largest logit, by the coarsest dtype."""

TOLERANCE_QUANTISED = 5e-2
"""Norm of all differences that the median run may have, relative to that of the logits, for quantised
weights; nine runs of ten may have four times as much.

Their activations are rounded to 8 bits: a difference in the last place may move one by a whole step. The
source itself, fed in chunks of 128 instead of at once, differs by as much (SmolLM2, int8 and 8da4w, 1,024
random tokens: median of a row 0.02, nine of ten within 0.04, the largest 1.9). A fault moves most rows by
more than that.
"""

_MOST_QUANTISED = 4


@dataclass(frozen=True)
class Case:
    """One prompt length.

    Args:
        name: Why this length: `one`, `chunk`, `window+1`, `last`, ...
        length: Tokens.
        chunked: Largest logits difference of the chunked run from the source, relative.
        stepwise: The same of the token-by-token run; None when it was not run at this length.
        between: Largest difference of the two runs, relative; None as before.
        argmax: Share of compared rows whose most likely token is the source's.
    """

    name: str
    length: int
    chunked: float
    stepwise: float | None
    between: float | None
    argmax: float


@dataclass(frozen=True)
class Validation:
    """The result of `validate`.

    Args:
        cases: Prompt lengths.
        greedy_tokens: Tokens generated greedily after a prompt.
        greedy_equal: How many agree with the source before the first difference.
        tolerance: Largest relative difference that passes.
        repeat: Largest absolute difference of a run after `reset` from the first one.
        measure: `largest`: differences are the largest one, relative to the largest logit; `norm`: the
            norm of all, relative to that of the logits (quantised weights).
    """

    cases: tuple[Case, ...]
    greedy_tokens: int
    greedy_equal: int
    greedy_margin: float
    tolerance: float
    repeat: float
    measure: str = "largest"

    @property
    def worst(self) -> float:
        """The largest relative difference of all runs."""
        found = [0.0]
        for case in self.cases:
            found += [d for d in (case.chunked, case.stepwise, case.between) if d is not None]
        return max(found, key=lambda d: np.inf if np.isnan(d) else d)

    def share(self, part: float) -> float:
        """The relative difference from the source that this share of all runs does not exceed."""
        found = [d for case in self.cases for d in (case.chunked, case.stepwise) if d is not None]
        return float(np.quantile(found, part)) if found else 0.0

    @property
    def passed(self) -> bool:
        """Differences within the tolerance, a repeatable run, and equal greedy tokens.

        Every difference counts, but with quantised weights most of them (`TOLERANCE_QUANTISED`), and not
        the tokens. A greedy token may differ where the source's own two best logits are closer than
        the tolerance: such a tie is decided by rounding.
        """
        if self.measure == "norm":
            near = self.share(0.5) <= self.tolerance
            near = near and self.share(0.9) <= _MOST_QUANTISED * self.tolerance
            return bool(near) and self.repeat == 0.0
        greedy = self.greedy_equal == self.greedy_tokens or self.greedy_margin <= self.tolerance
        return bool(self.worst <= self.tolerance) and self.repeat == 0.0 and greedy

    def summary(self) -> str:
        """What was found, and what would have been right, in one line."""
        if self.measure == "norm":
            text = (
                f"relative difference of half of the runs {self.share(0.5):.1e} (at most "
                f"{self.tolerance:g}), of nine tenths {self.share(0.9):.1e} (at most "
                f"{_MOST_QUANTISED * self.tolerance:g})"
            )
        else:
            text = f"largest relative difference {self.worst:.1e} (at most {self.tolerance:g})"
        return (
            f"{text}, greedy tokens equal {self.greedy_equal} of {self.greedy_tokens}, repeat after "
            f"reset differs by {self.repeat:g}"
        )


def validate(
    artifact: str | Path,
    reference: str | Path | PreTrainedModel,
    *,
    driver: str = "auto",
    greedy_tokens: int = 32,
    max_stepwise: int = 256,
    seed: int = 7,
    tolerance: float | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Validation:
    """Compare a program with the model it was exported from.

    Args:
        artifact: Artifact directory or program.
        reference: The source: directory, GGUF file, hub id, or a loaded model. Its weights are quantised
            as the artifact's manifest says.
        driver: Driver to run it on.
        greedy_tokens: Tokens to generate greedily on both sides.
        max_stepwise: Longest prompt that is also run token by token.
        seed: Seed of the random prompt.
        tolerance: Relative difference that passes; by the program's dtype when None.
        progress: Told the name of every case.

    Raises:
        StaticLMError: The artifact or the reference cannot be used, or they do not fit each other.
    """
    _check_options(greedy_tokens, max_stepwise, seed, tolerance)
    from staticlm.export.quantize import is_quantised
    from staticlm.export.source import load_source

    with load(artifact, driver=driver) as runner:
        contract = runner.contract
        dtype = contract.decode.logits.spec.dtype
        source = _as_exported(load_source(reference, dtype).model, runner.artifact.manifest)
        _check_reference(contract, source)
        dtypes = {dtype, *(c.spec.dtype for c in contract.caches if c.spec.dtype in TOLERANCE)}
        limit = max(TOLERANCE[d] for d in dtypes)
        measure = _relative
        if is_quantised(source):
            limit, measure = max(limit, TOLERANCE_QUANTISED), _relative_norm
        limit = limit if tolerance is None else tolerance
        lengths = plan_lengths(contract)
        rng = np.random.default_rng(seed)
        tokens = rng.integers(0, contract.vocab_size, contract.max_context_len).tolist()
        progress("eager")
        want = eager_logits(source, tokens)
        cases = []
        repeat = 0.0
        for name, length in lengths:
            progress(f"{name}: {length} tokens")
            step_by_step = length <= max_stepwise
            prompt = tokens[:length]
            cases.append(_run_case(runner.session, name, prompt, want, step_by_step, measure))
        progress("reset and repeat")
        repeat = _repeat(runner.session, tokens[: lengths[min(1, len(lengths) - 1)][1]])
        progress("greedy")
        count, equal, margin = _greedy(runner, source, tokens, greedy_tokens)
    name = "norm" if measure is _relative_norm else "largest"
    return Validation(tuple(cases), count, equal, margin, limit, repeat, name)


def _check_options(
    greedy_tokens: object, max_stepwise: object, seed: object, tolerance: float | None
) -> None:
    """Refuse numbers with which nothing would be compared, or everything would pass."""
    for name, value, low in (
        ("greedy_tokens", greedy_tokens, 1),
        ("max_stepwise", max_stepwise, 0),
        ("seed", seed, 0),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise UsageError(
                Code.USAGE, name, found=repr(value)[:80], expected=f"an integer, {low} or more"
            )
    if tolerance is not None and not 0 <= tolerance < np.inf:
        raise UsageError(
            Code.USAGE, "tolerance", found=tolerance, expected="a finite number, 0 or more"
        )


def plan_lengths(contract: Contract) -> list[tuple[str, int]]:
    """Prompt lengths worth testing: chunk and window edges and the end of the capacity."""
    capacity = contract.max_context_len
    wanted: list[tuple[str, int]] = [("one", 1)]
    for method in contract.prefills:
        c = method.step
        label = "chunk" if method is contract.prefills[0] else f"chunk {c}"
        wanted += [(f"{label}-1", c - 1), (label, c), (f"{label}+1", c + 1)]
        wanted.append((f"three times {label}+2", 3 * c + 2))
    for m in sorted({m.max_start for m in contract.methods if m.max_start}):
        wanted += [(f"prefix {m}", m), (f"prefix {m}+2", m + 2)]
    windows = {c.window for c in contract.caches if c.kind is CacheKind.SLIDING and c.window}
    for w in sorted(windows):
        wanted += [(f"window {w}-1", w - 1), (f"window {w}", w), (f"window {w}+1", w + 1)]
        wanted.append((f"twice window {w}+3", 2 * w + 3))
    wanted += [("last-1", capacity - 1), ("last", capacity)]
    found: dict[int, str] = {}
    for name, length in wanted:
        if 1 <= length <= capacity:
            found.setdefault(length, name)
    return [(name, length) for length, name in sorted(found.items())]


def eager_logits(model: PreTrainedModel, tokens: Sequence[int]) -> Rows:
    """float32 `[len(tokens), vocabulary]`: one eager forward of the source model."""
    import torch

    with torch.no_grad():
        out = model(input_ids=torch.tensor([list(tokens)]), use_cache=False)
    rows: Rows = out.logits[0].float().numpy()
    return rows


def _as_exported(source: PreTrainedModel, manifest: Mapping[str, Any]) -> PreTrainedModel:
    """The source with its weights quantised as the artifact's were: that is what the program computes.

    What quantisation itself costs is for `eval` to say.
    """
    from staticlm.export.options import ExportOptions
    from staticlm.export.quantize import is_quantised, quantize_model

    if is_quantised(source):
        return source
    metadata = manifest.get("components", {}).get("model", {}).get("metadata", {})
    recorded = metadata.get("export_config", {})
    options = ExportOptions(
        context_length=128,
        quantize=recorded.get("quantize"),
        quantize_embedding=recorded.get("quantize_embedding"),
    )
    return quantize_model(source, options)


def _check_reference(contract: Contract, source: Any) -> None:
    head = source.get_output_embeddings()
    width = getattr(getattr(head, "weight", None), "shape", [None])[0]
    if width is not None and width != contract.vocab_size:
        raise UsageError(
            Code.USAGE,
            "the reference model has another vocabulary than the program",
            found=width,
            expected=contract.vocab_size,
            remedy="Name the model that the program was exported from.",
        )


def _relative(got: Rows, want: Rows) -> float:
    scale = max(float(np.abs(want).max()), 1e-6)
    return float(np.abs(got - want).max()) / scale


def _relative_norm(got: Rows, want: Rows) -> float:
    norm = max(float(np.linalg.norm(want)), 1e-6)
    return float(np.linalg.norm(got - want)) / norm


def _run_case(
    session: Session,
    name: str,
    tokens: Sequence[int],
    want: Rows,
    step_by_step: bool,
    measure: Callable[[Rows, Rows], float],
) -> Case:
    session.reset()
    got, rows = chunked_logits(session, tokens)
    target = want[rows]
    agree = float((got.argmax(-1) == target.argmax(-1)).mean())
    stepwise = between = None
    if step_by_step:
        session.reset()
        steps = np.stack([session.step(token) for token in tokens])
        stepwise = measure(steps, want[: len(tokens)])
        between = measure(got, steps[rows])
    return Case(name, len(tokens), measure(got, target), stepwise, between, agree)


def chunked_logits(session: Session, tokens: Sequence[int]) -> tuple[Rows, list[int]]:
    """Run tokens through the plan, and give the logits after every call with their row indexes."""
    planned = session.plan(len(tokens))
    out, rows, taken = [], [], 0
    for call in planned.calls:
        # One call at a time is the same plan: a suffix of a fewest-calls plan is one.
        out.append(session.prefill(tokens[taken : taken + call.valid]))
        taken += call.valid
        rows.append(taken - 1)
    return np.stack(out), rows


def _repeat(session: Session, tokens: Sequence[int]) -> float:
    session.reset()
    first = session.prefill(tokens)
    session.reset()
    second = session.prefill(tokens)
    return float(np.abs(first - second).max())


def _greedy(
    runner: Runner, source: Any, tokens: Sequence[int], count: int
) -> tuple[int, int, float]:
    """Tokens generated, how many agree, and the source's margin at the first difference."""
    capacity = runner.contract.max_context_len
    prompt = list(tokens[: max(1, min(capacity // 2, runner.contract.max_seq_len + 1))])
    count = max(0, min(count, capacity - len(prompt)))
    runner.session.reset()
    logits = runner.session.prefill(prompt)
    text = list(prompt)
    for index in range(count):
        text.append(int(logits.argmax()))
        if index + 1 < count:
            logits = runner.session.step(text[-1])
    # Teacher forcing: one eager forward says what the source would have chosen at every place.
    want = eager_logits(source, text)[len(prompt) - 1 : -1]
    scale = max(float(np.abs(want).max()), 1e-6)
    for index, row in enumerate(want):
        chosen = text[len(prompt) + index]
        if int(row.argmax()) != chosen:
            return count, index, float(row.max() - row[chosen]) / scale
    return count, count, 0.0


def require(validation: Validation) -> None:
    """Raise `VALIDATION_FAILED` when a validation did not pass."""
    if not validation.passed:
        raise StaticLMError(
            Code.VALIDATION_FAILED,
            "the program differs from its source",
            found=validation.summary(),
            expected="differences within their bounds, equal tokens, a repeatable run",
            remedy="Export the model again; if it stays so, report the model and the command.",
        )
