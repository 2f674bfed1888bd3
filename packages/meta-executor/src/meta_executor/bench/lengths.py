"""How long prompts and answers are: one length, or a distribution that is drawn from with a seed."""

from __future__ import annotations

import math
import random
import re

import msgspec

#: Longest that may be asked for (tokens).
LENGTH_MAX = 1 << 20


class Uniform(msgspec.Struct, frozen=True, tag="uniform"):
    """Every length from ``low`` to ``high`` is as likely (tokens)."""

    low: int
    high: int


class LogNormal(msgspec.Struct, frozen=True, tag="lognormal"):
    """The logarithm is normal: half of the lengths are below ``median``, two thirds within a factor of e**sigma of it; none is
    above ``high`` (tokens)."""

    median: int
    sigma: float
    high: int


Lengths = int | Uniform | LogNormal

_UNIFORM = re.compile(r"uniform:([0-9]{1,7})-([0-9]{1,7})")
_LOGNORMAL = re.compile(r"lognormal:([0-9]{1,7}):([0-9.]{1,8}):([0-9]{1,7})")


def parse_lengths(text: str) -> Lengths:
    """``64``, ``uniform:32-96`` or ``lognormal:64:0.5:512`` (median, sigma, longest).

    Raises:
        ValueError: It is none of these; says what is wrong with which.
    """
    if re.fullmatch(r"[0-9]{1,7}", text):
        return _checked(text, int(text), int(text), int(text))
    if match := _UNIFORM.fullmatch(text):
        low, high = int(match[1]), int(match[2])
        return _checked(text, Uniform(low, high), low, high)
    if match := _LOGNORMAL.fullmatch(text):
        try:
            sigma = float(match[2])
        except ValueError:
            raise ValueError(f"{text!r}: {match[2]!r} is not a number") from None
        if not 0 < sigma <= 4:
            raise ValueError(f"{text!r}: sigma is {sigma:g}, want above 0 and at most 4")
        return _checked(text, LogNormal(int(match[1]), sigma, int(match[3])), int(match[1]), int(match[3]))
    raise ValueError(f"{text!r} is not a length, like 64, uniform:32-96 or lognormal:64:0.5:512")


def _checked(text: str, lengths: Lengths, low: int, high: int) -> Lengths:
    if not 1 <= low <= high <= LENGTH_MAX:
        raise ValueError(f"{text!r}: lengths run from {low} to {high}, want 1 to {LENGTH_MAX} in rising order")
    return lengths


def longest(lengths: Lengths) -> int:
    """What none exceeds (tokens)."""
    return lengths if isinstance(lengths, int) else lengths.high


def draw(lengths: Lengths, count: int, seed: int) -> list[int]:
    """So many lengths (tokens), the same for the same seed."""
    if isinstance(lengths, int):
        return [lengths] * count
    chance = random.Random(seed)  # noqa: S311 - lengths, not secrets
    if isinstance(lengths, Uniform):
        return [chance.randint(lengths.low, lengths.high) for _ in range(count)]
    mean = math.log(lengths.median)
    drawn = (round(chance.lognormvariate(mean, lengths.sigma)) for _ in range(count))
    return [min(max(length, 1), lengths.high) for length in drawn]
