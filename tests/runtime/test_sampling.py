"""Each sampler by the set of tokens it can choose, its frequencies, and its seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from staticlm.errors import Code, RunnerError
from staticlm.runtime.sampling import SamplingOptions, make_sampler

# Probabilities 0.5, 0.25, 0.15, 0.1 at temperature 1, not in order.
PROBABILITIES = np.array([0.15, 0.5, 0.1, 0.25])
LOGITS = np.log(PROBABILITIES).astype(np.float32)


def drawn(count: int = 400, tokens: tuple[int, ...] = (), **options: Any) -> list[int]:
    sampler = make_sampler(SamplingOptions(**{"temperature": 1.0, "seed": 7, **options}))
    return [sampler(LOGITS, tokens) for _ in range(count)]


def test_greedy_takes_the_first_of_equal_maxima() -> None:
    sampler = make_sampler(SamplingOptions(top_k=2, top_p=0.1))
    assert sampler(np.array([0, 3, 3, 1], np.float32), ()) == 1


def test_frequencies_follow_the_probabilities() -> None:
    counts = np.bincount(drawn(8000), minlength=4) / 8000
    np.testing.assert_allclose(counts, PROBABILITIES, atol=0.02)


def test_temperature_sharpens() -> None:
    counts = np.bincount(drawn(8000, temperature=0.5), minlength=4) / 8000
    squared = PROBABILITIES**2 / (PROBABILITIES**2).sum()
    np.testing.assert_allclose(counts, squared, atol=0.02)


def test_tiny_temperature_is_greedy_without_overflow() -> None:
    with np.errstate(all="raise", under="ignore"):
        assert set(drawn(50, temperature=1e-300)) == {1}


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 99}, {0, 1, 2, 3}),
        ({"top_p": 0.4}, {1}),
        ({"top_p": 0.6}, {1, 3}),
        ({"top_p": 0.8}, {0, 1, 3}),
        ({"min_p": 0.4}, {1, 3}),
        ({"min_p": 1.0}, {1}),
        ({"top_k": 3, "min_p": 0.25}, {0, 1, 3}),
    ],
)
def test_only_kept_tokens_are_chosen(options: dict[str, Any], kept: set[int]) -> None:
    assert set(drawn(**options)) == kept


def test_top_k_of_equal_scores_keeps_k() -> None:
    sampler = make_sampler(SamplingOptions(temperature=1.0, top_k=2, seed=1))
    assert {sampler(np.zeros(6, np.float32), ()) for _ in range(100)} == {0, 1}


def test_repetition_penalty_divides_positive_and_multiplies_negative_once() -> None:
    logits = np.array([4.0, 3.0, -1.0, -1.5], np.float32)
    greedy = make_sampler(SamplingOptions(repetition_penalty=2.0))
    assert greedy(logits, [0, 0, 0]) == 1
    # 4 / 2 = 2 beats 3 / 2 = 1.5: the repeats above count once.
    assert greedy(logits, [0, 0, 1]) == 0
    assert greedy(np.array([-1.0, -1.5, -9, -9], np.float32), [0]) == 1
    assert logits[0] == 4.0


def test_seed_repeats_and_no_seed_does_not() -> None:
    assert drawn(60, seed=3) == drawn(60, seed=3)
    assert drawn(60, seed=3) != drawn(60, seed=4)
    assert drawn(60, seed=None) != drawn(60, seed=None)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": True},
        {"temperature": "1"},
        {"top_k": -1},
        {"top_k": 1.5},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"min_p": -0.5},
        {"min_p": 1.5},
        {"repetition_penalty": 0},
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 1e300},
        {"seed": -1},
        {"seed": False},
    ],
)
def test_invalid_options_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(RunnerError) as caught:
        SamplingOptions(**options)
    assert caught.value.code is Code.SAMPLING_INVALID
    assert next(iter(options)) in caught.value.what


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_choose_no_token_are_refused(temperature: float, bad: float) -> None:
    sampler = make_sampler(SamplingOptions(temperature=temperature, seed=1))
    with pytest.raises(RunnerError) as caught:
        sampler(np.array([1.0, bad, 2.0], np.float32), [0])
    assert caught.value.code is Code.EXECUTION_FAILED


def test_the_smallest_temperature_is_greedy_without_a_warning() -> None:
    sampler = make_sampler(SamplingOptions(temperature=5e-324, seed=1))
    with np.errstate(all="raise"):
        assert sampler(np.array([1.0, 3.0, 2.0], np.float32), [0]) == 1
