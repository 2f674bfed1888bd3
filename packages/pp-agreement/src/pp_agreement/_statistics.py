"""Counters, as frozen data: of a core, of an agreement, and what a drain has proven."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from pp_agreement._events import Fault, Key

BUCKETS = 40
"""Of a histogram of durations, by powers of two of a microsecond; the last one takes what is longer."""
_BOUNDS_S = [2.0**power * 1e-6 for power in range(BUCKETS - 1)] + [float("inf")]
WAITING_MAX = 1024
"""Durations that are counted together."""


class Durations:
    """Durations in seconds: how many, their sum, the longest, and a histogram.

    Whoever measures one appends it to ``waiting``, and calls ``count`` once that has become long. Looking changes nothing: a
    signal handler may look at any moment, and a look may be interrupted.
    """

    __slots__ = ("buckets", "longest_s", "sum_s", "waiting")

    def __init__(self) -> None:
        self.waiting: list[float] = []
        self.sum_s = 0.0
        self.longest_s = 0.0
        self.buckets = [0] * BUCKETS

    def count(self) -> None:
        """Count what waits."""
        waiting, self.waiting = self.waiting, []  # first, so that what an interrupt breaks off is not counted twice
        self._add(waiting)

    def _add(self, found: list[float]) -> None:
        found.sort()
        self.sum_s += sum(found)
        self.longest_s = max(self.longest_s, found[-1] if found else 0.0)
        below = 0
        for bucket, bound_s in enumerate(_BOUNDS_S):
            if below == len(found):
                return
            before, below = below, bisect_left(found, bound_s, below)
            self.buckets[bucket] += below - before

    def copy(self) -> Durations:
        """An independent copy."""
        twin = Durations()
        twin.waiting, twin.buckets = list(self.waiting), list(self.buckets)
        twin.sum_s, twin.longest_s = self.sum_s, self.longest_s
        return twin

    def counted(self) -> Durations:
        """A copy in which nothing waits."""
        twin = self.copy()
        twin.count()
        return twin


@dataclass(frozen=True, slots=True)
class CoreStatistics:
    """Counters of one domain's lifetime at one rank."""

    admitted: int
    committed: int
    closed: int
    open_rounds: int
    open_rounds_max: int
    queue_records_max: int
    stale: int
    duplicates: int
    ignored: int
    frames_received: int
    frames_sent: int
    heartbeats_sent: int
    records_sent: tuple[tuple[str, int], ...]
    records_received: tuple[tuple[str, int], ...]
    events: tuple[tuple[str, int], ...]
    outcomes: tuple[int, int, int]
    quarantined: int
    activated: int
    digest: str
    activation_digest: str
    latency_count: int
    latency_sum_s: float
    latency_max_s: float
    latency_buckets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DrainReport:
    """What a drain has proven, or what it lacks.

    ``missing_ranks``: ranks whose report is not known here; ``undecided``: this rank's open rounds.
    """

    drained: bool
    last_incarnation: int | None
    admitted: int
    committed: int
    closed: int
    digest: str
    undecided: tuple[Key, ...]
    missing_ranks: tuple[int, ...]
    fault: Fault | None


@dataclass(frozen=True, slots=True)
class AgreementStatistics:
    """Counters of the core, the times spent in polls, and what travelled.

    ``bytes_sent``, ``bytes_received``: of the frames that the core made, and of those that it took, without repetitions; in
    an exchange, of this rank's contributions and of everybody's.
    """

    core: CoreStatistics
    polls: int
    poll_sum_s: float
    poll_max_s: float
    poll_gap_max_s: float
    poll_buckets: tuple[int, ...]
    bytes_sent: int
    bytes_received: int
    refused_slots: int
    outstanding_max: int
