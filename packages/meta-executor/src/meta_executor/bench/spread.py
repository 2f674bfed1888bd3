"""Percentiles, and what a median of few runs is worth: no distribution is assumed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

#: With what probability the interval holds the median of all runs that could have been made (0–1).
CONFIDENCE = 0.95


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` (0–1) of the sorted values do not exceed; 0 without values."""
    if not ordered:
        return 0.0
    return ordered[min(max(math.ceil(share * len(ordered)) - 1, 0), len(ordered) - 1)]


@dataclass(frozen=True)
class Spread:
    """Of many values: how many, and the 25th, 50th, 90th and 99th percentile and the largest."""

    count: int
    p25: float
    p50: float
    p90: float
    p99: float
    longest: float

    @staticmethod
    def of(values: Sequence[float], scale: float = 1.0) -> Spread:
        """Of these, each times ``scale``; zeros without values."""
        ordered = sorted(value * scale for value in values)
        at = [percentile(ordered, share) for share in (0.25, 0.50, 0.90, 0.99, 1.0)]
        return Spread(len(ordered), *at)


def rounds_min(confidence: float = CONFIDENCE) -> int:
    """The fewest values whose whole range holds the median with that probability."""
    return 1 + math.ceil(math.log2(1 / (1 - confidence)))


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Where the median lies, by order statistics.

    Of n values so many at each end are left out that the chance of a median beyond the rest stays below ``1 - confidence``.

    Raises:
        ValueError: Too few: not even their whole range holds the median with that probability.
    """
    ordered, n = sorted(values), len(values)
    if n < rounds_min(confidence):
        raise ValueError(f"{n} rounds do not tell where a median lies: {rounds_min(confidence)} do")
    tail, left_out = 0.5**n, 0
    while tail + math.comb(n, left_out + 1) * 0.5**n <= (1 - confidence) / 2:
        left_out += 1
        tail += math.comb(n, left_out) * 0.5**n
    return ordered[left_out], ordered[n - 1 - left_out]


@dataclass(frozen=True)
class Effect:
    """What switching something on did to one figure, over rounds that ran it off and on in turn.

    Attributes:
        off, on: Medians of the two arms.
        ratio: Median of on over off, round by round.
        interval: Where that median lies, with ``CONFIDENCE``; None: too few rounds.
        verdict: In words; begins with "no conclusion" where the rounds do not tell.
    """

    off: float
    on: float
    ratio: float
    interval: tuple[float, float] | None
    verdict: str

    @property
    def concluded(self) -> bool:
        """The rounds tell a direction."""
        return not self.verdict.startswith(_NONE)


_NONE = "no conclusion"


def effect_of(off: Sequence[float], on: Sequence[float], *, confidence: float = CONFIDENCE) -> Effect:
    """Compare two arms, of which round i ran one after the other.

    A direction is told only when the whole interval lies on one side of 1: a spread that is larger than the effect decides
    nothing.

    Raises:
        ValueError: The arms have not as many rounds, or none.
    """
    if len(off) != len(on) or not off:
        raise ValueError(f"{len(off)} rounds of one arm and {len(on)} of the other")
    medians = statistics.median(off), statistics.median(on)
    if min(off) <= 0 or min(on) < 0:
        same = all(a == b for a, b in zip(off, on))
        words = "no difference" if same else f"{_NONE}: a figure was 0, so there is no ratio"
        return Effect(*medians, 1.0 if same else math.nan, None, words)
    ratios = [b / a for a, b in zip(off, on)]
    ratio = statistics.median(ratios)
    if len(ratios) < rounds_min(confidence):
        return Effect(
            *medians, ratio, None, f"{_NONE}: {len(ratios)} rounds, at least {rounds_min(confidence)} are needed"
        )
    low, high = median_interval(ratios, confidence)
    if low <= 1 <= high:
        words = f"{_NONE}: the rounds lie between {low:.3g} and {high:.3g}, which is wider than the effect"
    else:
        words = f"{abs(ratio - 1):.1%} {'more' if ratio > 1 else 'less'}"
    return Effect(*medians, ratio, (low, high), words)
