"""Counters, as frozen data: of a core, of an agreement, and what a drain has proven."""

from __future__ import annotations

from dataclasses import dataclass

from pp_agreement._events import Fault, Key


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
