"""Yardsticks for tests of routing: a lower bound on the fullest rank's load, and the exact optimum of small cases."""

from __future__ import annotations

from collections.abc import Sequence


def lower_bound(initial: Sequence[int], lengths: Sequence[int]) -> float:
    """No placement has a fullest rank below this (tokens).

    The largest of: the fullest rank already, the water-filled mean, the least loaded rank plus the longest request, and the
    two shortest of the ``ranks + 1`` longest requests, which must share a rank when all start empty.
    """
    loads = sorted(initial)
    total = float(sum(lengths))
    filled = 0.0
    for count in range(1, len(loads) + 1):
        level = (sum(loads[:count]) + total) / count
        if count == len(loads) or level <= loads[count]:
            filled = max(level, loads[count - 1]) if total else loads[-1]
            break
    bound = max(float(loads[-1]), filled)
    ordered = sorted(lengths, reverse=True)
    if ordered:
        bound = max(bound, loads[0] + ordered[0])
    if len(ordered) > len(loads):
        bound = max(bound, loads[0] + ordered[len(loads) - 1] + ordered[len(loads)])
    return bound


def optimum(initial: Sequence[int], lengths: Sequence[int]) -> int:
    """The fullest rank of the best placement (tokens), by branch and bound; for about a dozen requests."""
    ordered = sorted(lengths, reverse=True)
    loads = list(initial)
    best = max([max(loads) + sum(ordered)] if ordered else [max(loads)])

    def descend(index: int) -> None:
        nonlocal best
        if index == len(ordered):
            best = min(best, max(loads))
            return
        tried: set[int] = set()
        for position, load in enumerate(loads):
            if load in tried or load + ordered[index] >= best:
                continue
            tried.add(load)
            loads[position] += ordered[index]
            descend(index + 1)
            loads[position] = load

    descend(0)
    return best
