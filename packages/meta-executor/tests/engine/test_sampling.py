"""Choosing tokens: greedy, nucleus, and randomness that is a function of (seed, position)."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from meta_executor.engine import SamplingParams
from meta_executor.engine.sampling import choose, top_two_margin, uniform


def test_uniform_is_a_fixed_function() -> None:
    """Known values: a request that moves to another process or version must go on as it began."""
    assert [uniform(0, 0), uniform(1, 0), uniform(0, 1), uniform(2**63 - 1, 8191)] == KNOWN_UNIFORM
    values = [uniform(seed, position) for seed in range(40) for position in range(50)]
    assert all(0.0 <= value < 1.0 for value in values)
    assert len(set(values)) == 2000
    assert abs(sum(values) / 2000 - 0.5) < 0.03


KNOWN_UNIFORM = [0.008886287364602286, 0.30330152402630584, 0.580326914092881, 0.4592962447659491]


def test_greedy_takes_the_first_of_the_largest() -> None:
    """Ties go to the lower id, at any seed and position."""
    logits = np.array([1.0, 3.0, 3.0, 2.0], np.float32)
    assert {choose(logits, SamplingParams(1, seed=seed), seed) for seed in range(20)} == {1}
    assert top_two_margin(logits) == 0.0
    assert top_two_margin(logits[[0, 1, 3]]) == 1.0


def test_frequencies_follow_the_softmax() -> None:
    """Over many positions the shares are those of the distribution, temperature included."""
    logits = np.array([0.0, 1.0, 2.0], np.float32)
    for temperature in (0.5, 1.0, 2.0):
        sampling = SamplingParams(1, temperature=temperature, seed=3)
        counts = Counter(choose(logits, sampling, position) for position in range(6000))
        total = sum(math.exp(value / temperature) for value in logits)
        for token, value in enumerate(logits):
            assert abs(counts[token] / 6000 - math.exp(value / temperature) / total) < 0.025


def test_top_p_keeps_the_smallest_set() -> None:
    """Tokens outside the nucleus never come; the one that crosses the bound still does."""
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    for top_p, allowed in ((0.4, {0}), (0.6, {0, 1}), (0.81, {0, 1, 2}), (1.0, {0, 1, 2, 3})):
        sampling = SamplingParams(1, temperature=1.0, top_p=top_p, seed=1)
        assert {choose(logits, sampling, position) for position in range(800)} == allowed


def test_extreme_logits() -> None:
    """Huge values and tiny temperatures neither overflow nor divide by zero."""
    logits = np.array([1e30, -1e30, 1e30, 0], np.float32)
    picks = {choose(logits, SamplingParams(1, temperature=1e-3, seed=5), position) for position in range(100)}
    assert picks == {0, 2}


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_tokens", 0), ("temperature", -1.0), ("temperature", math.inf), ("top_p", 0.0), ("top_p", 1.5)],
)
def test_ranges(field: str, value: float) -> None:
    """Out of range names the field."""
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{"max_tokens": 1, field: value})  # type: ignore[arg-type]
