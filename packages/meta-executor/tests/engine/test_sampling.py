"""Choosing tokens: greedy, nucleus, and randomness that is a function of (seed, position)."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from meta_executor.engine import SamplingParams, finish_reason
from meta_executor.engine.base import Told
from meta_executor.engine.sampling import change_logits, choose, chosen, logprobs_of, top_two_margin, uniform


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


def test_temperature_near_zero_is_greedy() -> None:
    """The smallest positive number gives the largest logit, not NaN and junk."""
    logits = np.array([1.0, 3.0, 2.0], np.float32)
    assert {choose(logits, SamplingParams(1, temperature=5e-324, seed=s), s) for s in range(20)} == {1}


def _seen(logits: np.ndarray, sampling: SamplingParams, told: Told | None = None) -> set[int]:
    return {choose(logits.copy(), sampling, position, told) for position in range(1500)}


def test_top_k_and_min_p_keep_the_likeliest() -> None:
    """top_k counts, min_p compares with the likeliest; top_p is a share of what they leave."""
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    assert _seen(logits, SamplingParams(1, temperature=1.0, top_k=2)) == {0, 1}
    assert _seen(logits, SamplingParams(1, temperature=1.0, top_k=9)) == {0, 1, 2, 3}
    assert _seen(logits, SamplingParams(1, temperature=1.0, min_p=0.6)) == {0, 1}
    assert _seen(logits, SamplingParams(1, temperature=1.0, min_p=1.0)) == {0}
    # 0.4 of 0.7 is more than 0.55: of the whole it would not be.
    assert _seen(logits, SamplingParams(1, temperature=1.0, top_k=2, top_p=0.55)) == {0}


def test_penalties_and_bias_change_the_choice() -> None:
    """Presence once, frequency per time, repetition by sign and with the prompt; a bias is added."""
    prompt = np.array([2], np.int32)
    logits = np.array([2.0, 1.0, 2.5, -1.0], np.float32)

    def changed(answer: list[int], **fields: object) -> list[float]:
        row = logits.copy()
        change_logits(row, SamplingParams(9, **fields), Told(prompt, answer))  # type: ignore[arg-type]
        return [round(float(value), 6) for value in row]

    assert changed([0, 0, 1], presence_penalty=0.5) == [1.5, 0.5, 2.5, -1.0]
    assert changed([0, 0, 1], frequency_penalty=0.5) == [1.0, 0.5, 2.5, -1.0]
    assert changed([3], repetition_penalty=2.0) == [2.0, 1.0, 1.25, -2.0]
    assert changed([], logit_bias=((1, 5.0), (3, -5.0))) == [2.0, 6.0, 2.5, -6.0]
    assert changed([], presence_penalty=1.0, frequency_penalty=1.0) == [2.0, 1.0, 2.5, -1.0]


def test_min_tokens_bars_what_would_end_the_answer() -> None:
    """For so many tokens no stop token is chosen; behind them it may be, and ends the answer."""
    logits = np.array([0.0, 9.0, 1.0], np.float32)
    sampling = SamplingParams(8, min_tokens=2, stop_token_ids=(1,))
    prompt = np.array([0], np.int32)
    picks = [choose(logits.copy(), sampling, 5, Told(prompt, [2] * count)) for count in range(4)]
    assert picks == [2, 2, 1, 1]
    # An engine that chooses it all the same (a hash) is not believed.
    assert [finish_reason(1, count, sampling, ()) for count in (1, 2, 3)] == [None, None, "stop"]
    assert finish_reason(7, 8, sampling, ()) == "length"


def test_logprobs_are_the_models_own() -> None:
    """Of the logits before bias and temperature; largest first, the lower id first among equals."""
    logits = np.log(np.array([0.1, 0.4, 0.4, 0.1], np.float32)) + 7.0
    sampling = SamplingParams(1, logit_bias=((3, 50.0),), logprobs=3)
    token, told = chosen(logits, sampling, 0, Told(np.array([1], np.int32), []))
    assert token == 3 and told is not None
    assert told.logprob == pytest.approx(math.log(0.1), abs=1e-6)
    assert [one for one, _ in told.top] == [1, 2, 0]
    assert [value for _, value in told.top] == pytest.approx([math.log(p) for p in (0.4, 0.4, 0.1)], abs=1e-6)
    assert logprobs_of(logits, 0, 0).top == ()
    assert chosen(logits, SamplingParams(1), 0, None) == (1, None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -1.0),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_tokens", -1),
        ("min_tokens", 2),
        ("repetition_penalty", 0.0),
        ("presence_penalty", math.inf),
        ("frequency_penalty", math.nan),
        ("logit_bias", ((0, math.inf),)),
        ("logprobs", -1),
        ("logprobs", 21),
    ],
)
def test_ranges(field: str, value: float) -> None:
    """Out of range names the field."""
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{"max_tokens": 1, field: value})  # type: ignore[arg-type]
