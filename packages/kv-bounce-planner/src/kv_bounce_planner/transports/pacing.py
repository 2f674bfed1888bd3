"""How much the next post may take: what posts cost, learned from each one. Pure.

Theory. A post costs an overhead, something per descriptor and something per byte; which of them counts depends on the
transport (CMA copies inside the call, tcp into a socket's buffer, RDMA only writes a queue). So the cost is kept as a curve
over a post's size in *units*, a descriptor or so many bytes as cost about the same: one point per octave, which a costlier
post raises at once and a cheaper one lowers in part, so that one lucky post does not make the next one late. Between points the
curve is straight; below the first it is level, beyond the last it goes through the origin. Where costs are affine that is never
too low. Sizes at most double, and a post that took more than twice its prediction is all that is known from then on.

Bound. Where costs are affine and constant, a post that was sized to the time left ends in time; what is posted in any case,
the smallest post, is late by at most its own cost.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from math import frexp

#: Bytes that cost about as much as one descriptor: 22 KiB over CMA, 30 KiB over tcp, as measured.
BYTES_PER_UNIT = 24 << 10
#: Share of the difference by which a cheaper post lowers its point.
FALL = 0.4


class PostPace:
    """The curve for posts of one kind: to one agent, of one kind of memory, of large or of small pieces."""

    __slots__ = ("_points",)

    def __init__(self) -> None:
        self._points: list[tuple[float, float]] = []  # (units, seconds), ascending in both, one per octave of units

    @property
    def known(self) -> bool:
        """Whether anything was learned yet."""
        return bool(self._points)

    def predict_s(self, units: float) -> float | None:
        """What a post of this size takes by what is known, or None while nothing is."""
        points = self._points
        if not points:
            return None
        at = bisect_left(points, (units, 0.0))
        if at == 0:
            return points[0][1]
        if at == len(points):
            last, cost = points[-1]
            return cost * units / last
        (below, low), (above, high) = points[at - 1], points[at]
        return low + (high - low) * (units - below) / (above - below)

    def fitting(self, left_s: float, smallest: float) -> float:
        """The largest post (units) that ends within ``left_s``, by what is known; below ``smallest`` if none does."""
        points = self._points
        if not points:
            return smallest if left_s > 0 else 0.0
        if left_s < points[0][1]:
            return 0.0
        for (below, low), (above, high) in pairwise(points):
            if left_s < high:
                return below + (above - below) * (left_s - low) / (high - low)
        last, cost = points[-1]
        return min(2.0, left_s / cost if cost > 0 else 2.0) * last

    def learn(self, units: float, took_s: float) -> None:
        """Take in what a post took (units > 0; seconds)."""
        predicted = self.predict_s(units)
        if predicted is not None and took_s > 2 * predicted:
            self._points = [(units, took_s)]
            return
        cost = took_s if predicted is None or took_s >= predicted else predicted - FALL * (predicted - took_s)
        octave = frexp(units)[1]
        others = [point for point in self._points if frexp(point[0])[1] != octave]
        # Costs rise with size, and at most in proportion: an old point that says otherwise gives way.
        points = [(size, min(cost, max(each, cost * size / units))) for size, each in others if size < units]
        points.append((units, cost))
        for size, each in others[len(points) - 1 :]:
            before, low = points[-1]
            points.append((size, max(low, min(each, low * size / before))))
        self._points = points
