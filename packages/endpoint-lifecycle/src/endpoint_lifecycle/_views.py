"""Configuration, statuses and what can be read of a directory: plain frozen data."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from endpoint_lifecycle._record import check_field, check_number


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryConfig:
    """Bounds of a directory. Durations in seconds.

    Attributes:
        attempt_timeout_s: One fetch attempt, (0, 600].
        total_timeout_s: One flight with its retries, and the default wait of a caller, (0, 3600].
        attempts: Attempts per flight, [1, 100].
        concurrent_fetches: Fetches at one time over all servers, [1, 10000].
        waiters_max: Callers waiting for one server's refresh; one more gets Overloaded.
        payload_bytes_max: Longest record accepted, bytes.
        negative_ttl_s: How long a failed refresh answers later callers at once, [0, 0.1]; shortened by up to half, randomly.
        cancel_unwatched: Cancel a fetch when its last waiter leaves. Otherwise it runs to its bound and its result counts.
        reservation_ttl_s: A reservation that is not renewed for so long is taken off the books and counted as a defect.
        reservations_max: Live reservations; one more gets Overloaded.
        probe_first_s, probe_max_s: Wait between probes of a server that cannot be picked: doubling, randomly shortened.
        probe_ready_s: Interval between checks of a server that can be picked; None: no checks.
        probe_failures_max: Failed fetches in a row after which a server cannot be picked.
        require_generation: Refuse records without a generation.
        protocol_version, layout_fingerprint: What records must say; None accepts any.
    """

    attempt_timeout_s: float = 1.0
    total_timeout_s: float = 3.0
    attempts: int = 3
    concurrent_fetches: int = 8
    waiters_max: int = 1024
    payload_bytes_max: int = 65536
    negative_ttl_s: float = 0.1
    cancel_unwatched: bool = False
    reservation_ttl_s: float = 180.0
    reservations_max: int = 1_000_000
    probe_first_s: float = 0.1
    probe_max_s: float = 1.0
    probe_ready_s: float | None = 5.0
    probe_failures_max: int = 2
    require_generation: bool = True
    protocol_version: int | None = None
    layout_fingerprint: str | None = None

    def __post_init__(self) -> None:
        for name in (
            "attempts",
            "concurrent_fetches",
            "waiters_max",
            "payload_bytes_max",
            "reservations_max",
            "probe_failures_max",
        ):
            check_number(getattr(self, name), name, whole=True)
        for name in (
            "attempt_timeout_s",
            "total_timeout_s",
            "negative_ttl_s",
            "reservation_ttl_s",
            "probe_first_s",
            "probe_max_s",
        ):
            check_number(getattr(self, name), name)
        if self.probe_ready_s is not None:
            check_number(self.probe_ready_s, "probe_ready_s")
        check_field(0 < self.attempt_timeout_s <= 600, "attempt_timeout_s", "must be in (0, 600]")
        check_field(0 < self.total_timeout_s <= 3600, "total_timeout_s", "must be in (0, 3600]")
        check_field(1 <= self.attempts <= 100, "attempts", "must be in [1, 100]")
        check_field(1 <= self.concurrent_fetches <= 10_000, "concurrent_fetches", "must be in [1, 10000]")
        check_field(self.waiters_max >= 1, "waiters_max", "must be >= 1")
        check_field(self.payload_bytes_max >= 256, "payload_bytes_max", "must be >= 256")
        check_field(0 <= self.negative_ttl_s <= 0.1, "negative_ttl_s", "must be in [0, 0.1]")
        check_field(self.reservation_ttl_s > 0, "reservation_ttl_s", "must be > 0")
        check_field(self.reservations_max >= 1, "reservations_max", "must be >= 1")
        check_field(0 < self.probe_first_s <= self.probe_max_s, "probe_first_s", "must be in (0, probe_max_s]")
        check_field(self.probe_ready_s is None or self.probe_ready_s > 0, "probe_ready_s", "must be > 0 or None")
        check_field(self.probe_failures_max >= 1, "probe_failures_max", "must be >= 1")


class ServerStatus(enum.StrEnum):
    """Whether a server can be picked."""

    UNPREPARED = "unprepared"  # no record yet, or it stopped answering
    READY = "ready"
    DRAINING = "draining"  # resolvable for in-flight peers only


class ReservationState(enum.StrEnum):
    """Where a reservation stands."""

    RESERVED = "reserved"
    DISPATCHED = "dispatched"
    RELEASED = "released"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class Load:
    """Live reservations of one generation of one server."""

    count: int
    weight: int


@dataclass(frozen=True, slots=True)
class ServerView:
    """One server in an audit."""

    server: str
    role: str
    owner_id: str | None
    status: ServerStatus
    generation: str | None
    epoch: int
    version: int
    count: int
    weight: int
    refreshing: bool
    waiters: int
    failures: int
    error: str | None


@dataclass(frozen=True, slots=True)
class ReservationView:
    """One live reservation in an audit."""

    role: str
    request_id: int
    server: str
    generation: str | None
    weight: int
    state: ReservationState
    age_s: float
    expires_in_s: float


@dataclass(frozen=True, slots=True)
class LoadView:
    """Load of one generation; ``current`` is False for a lifetime that was superseded or removed."""

    server: str
    generation: str | None
    count: int
    weight: int
    current: bool


@dataclass(frozen=True, slots=True)
class DirectoryStatistics:
    """Counters since the start. ``reservations_expired`` above 0 is a defect of some caller."""

    servers: int
    servers_ready: int
    servers_draining: int
    flights: int
    waiters: int
    reservations: int
    load_weight: int
    fetches: int
    fetch_failures: int
    results_applied: int
    results_dropped: int
    stale_joins_refused: int
    joins: int
    negative_hits: int
    deletes_ignored: int
    sets_ignored: int
    reservations_made: int
    reservations_released: int
    reservations_expired: int
    reservations_replaced: int
    reservations_rebound: int
    releases_repeated: int


@dataclass(frozen=True, slots=True)
class DirectoryAudit:
    """Everything a person needs to see why a counter is what it is. ``faults`` is empty in a correct program."""

    servers: tuple[ServerView, ...]
    reservations: tuple[ReservationView, ...]
    loads: tuple[LoadView, ...]
    faults: tuple[str, ...]
    statistics: DirectoryStatistics
