"""How well does a program predict a text? Perplexity, alone or beside its source model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from staticlm.contract import LogitsRows
from staticlm.errors import Code, UsageError
from staticlm.runtime.runner import load
from staticlm.runtime.session import Session

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Rows = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Evaluation:
    """Perplexity of a text.

    Args:
        tokens: Tokens that were predicted.
        perplexity: Of the program: the exponential of the mean negative log-likelihood.
        reference: Of the source model over the same windows; None without one.
        argmax: Share of tokens whose most likely successor is the source's; None without one.
        divergence: Mean Kullback-Leibler divergence of the program from the source in nats; None
            without one.
    """

    tokens: int
    perplexity: float
    reference: float | None = None
    argmax: float | None = None
    divergence: float | None = None

    @property
    def loss(self) -> float | None:
        """Relative increase of the perplexity over the source's."""
        return None if self.reference is None else self.perplexity / self.reference - 1.0


def evaluation_text() -> str:
    """The text that the package ships: some 900 words of plain English prose."""
    return files("staticlm").joinpath("data/evaluation.txt").read_text(encoding="utf-8")


def evaluate(
    artifact: str | Path,
    reference: str | Path | PreTrainedModel | None = None,
    *,
    text: str | Sequence[int] | None = None,
    max_tokens: int | None = None,
    driver: str = "auto",
    progress: Callable[[str], None] = lambda stage: None,
) -> Evaluation:
    """Measure the perplexity of a text.

    The text is cut into windows of the context length; each starts from empty caches, and its first
    token is not counted.

    Args:
        artifact: Artifact directory or program.
        reference: The source model: directory, GGUF file, hub id, or a loaded model.
        text: A text, or token ids; the package's own text when None.
        max_tokens: Take this many tokens of the text at most.
        driver: Driver to run it on.
        progress: Told the name of every window.

    Raises:
        StaticLMError: The artifact, its tokenizer or the reference cannot be used, or the text has
            less than two tokens.
    """
    with load(artifact, driver=driver) as runner:
        ids = runner.encode(evaluation_text() if text is None else text)[:max_tokens]
        if len(ids) < 2:
            raise UsageError(
                Code.USAGE, "the text", found=f"{len(ids)} tokens", expected="two or more"
            )
        source = None if reference is None else _source(reference)
        size = runner.contract.max_context_len
        # A last window of one token would predict nothing.
        windows = [ids[i : i + size] for i in range(0, len(ids), size)]
        sums = np.zeros(4)
        count = 0
        for index, window in enumerate(w for w in windows if len(w) > 1):
            progress(f"window {index + 1} of {len(windows)}")
            got = log_softmax(all_rows(runner.session, window))[:-1]
            targets = np.array(window[1:])
            sums[0] -= got[np.arange(len(targets)), targets].sum()
            count += len(targets)
            if source is not None:
                want = log_softmax(_source_rows(source, window))[:-1]
                sums[1] -= want[np.arange(len(targets)), targets].sum()
                sums[2] += (got.argmax(-1) == want.argmax(-1)).sum()
                sums[3] += (np.exp(want) * (want - got)).sum()
    perplexity = math.exp(sums[0] / count)
    if source is None:
        return Evaluation(count, perplexity)
    return Evaluation(
        count,
        perplexity,
        math.exp(sums[1] / count),
        float(sums[2] / count),
        float(sums[3] / count),
    )


def all_rows(session: Session, tokens: Sequence[int]) -> Rows:
    """float32 `[len(tokens), vocabulary]` from empty caches: by chunks where they return all rows."""
    session.reset()
    rows = {m.name: m.logits_rows for m in session.contract.methods}
    calls = session.plan(len(tokens)).calls
    chunked = all(c.valid == 1 or rows[c.method] is LogitsRows.ALL for c in calls)
    if chunked:
        return session.prefill_all(tokens)
    return np.stack([session.step(token) for token in tokens])


def log_softmax(rows: Rows) -> npt.NDArray[np.float64]:
    """Log-probabilities in float64."""
    shifted = rows.astype(np.float64) - rows.max(axis=-1, keepdims=True)
    out: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return out


def _source(reference: Any) -> Any:
    from staticlm.export.source import load_source

    return load_source(reference, "float32").model


def _source_rows(source: Any, tokens: Sequence[int]) -> Rows:
    from staticlm.validation import eager_logits

    return eager_logits(source, tokens)
