"""What a group of ranks agrees on before it agrees on anything else: the domain and the bounds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from pp_agreement._errors import ConfigurationError

RANKS_MAX = 64  # a set of ranks travels as one 64-bit mask
U32_MAX = 2**32 - 1
FRAME_BYTES_MIN = 256
RECORD_BYTES = 24
FRAME_BYTES = 44  # without records: header and checksum


@dataclass(frozen=True, slots=True)
class Domain:
    """An ordered subset of a communicator's ranks that decides together; a process may belong to several.

    Args:
        domain_id: Names the domain on the wire, 0..2**32-1; domains that share ranks need different ids.
        ranks: Members in pipeline order, 1..64 distinct ranks of the parent communicator.
        scheduling_rank: The authority: it alone admits, is released to, and revokes. Default: the first member.
        coordinator_rank: The author of decisions. Default: the last member, which reaches terminal points last anyway.
        epoch: Incarnation of the domain, 0..2**32-1; frames of another epoch are foreign.

    Raises:
        ConfigurationError: A field is out of range; its name is in ``field``.
    """

    domain_id: int
    ranks: tuple[int, ...]
    scheduling_rank: int | None = None
    coordinator_rank: int | None = None
    epoch: int = 0

    def __post_init__(self) -> None:
        given: object = self.ranks
        if not isinstance(given, Iterable):
            raise ConfigurationError("ranks", f"{given!r} is not a sequence of ranks")
        object.__setattr__(self, "ranks", tuple(given))
        within("domain_id", self.domain_id, 0, U32_MAX)
        within("epoch", self.epoch, 0, U32_MAX)
        within("ranks", len(self.ranks), 1, RANKS_MAX)
        for rank in self.ranks:
            within("ranks", rank, 0, 65_535)
        if len(set(self.ranks)) != len(self.ranks):
            raise ConfigurationError("ranks", f"a rank stands twice in {self.ranks}")
        if self.scheduling_rank is None:
            object.__setattr__(self, "scheduling_rank", self.ranks[0])
        if self.coordinator_rank is None:
            object.__setattr__(self, "coordinator_rank", self.ranks[-1])
        for name in ("scheduling_rank", "coordinator_rank"):
            within(name, getattr(self, name), 0, 65_535)
            if getattr(self, name) not in self.ranks:
                raise ConfigurationError(name, f"{getattr(self, name)} is not a member of {self.ranks}")

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    @property
    def voices(self) -> int:
        """How many reasons a commit carries: one of each member."""
        return self.size

    @property
    def scheduler_index(self) -> int:
        """Position of the scheduling rank among the members."""
        return self.index_of(self.scheduling_rank if self.scheduling_rank is not None else self.ranks[0])

    @property
    def coordinator_index(self) -> int:
        """Position of the coordinator among the members."""
        return self.index_of(self.coordinator_rank if self.coordinator_rank is not None else self.ranks[-1])

    def index_of(self, rank: int) -> int:
        """Position of ``rank``.

        Raises:
            ConfigurationError: ``rank`` is not a member.
        """
        try:
            return self.ranks.index(rank)
        except ValueError:
            raise ConfigurationError(
                "rank", f"{rank} is not a member of domain {self.domain_id} {self.ranks}"
            ) from None


@dataclass(frozen=True, slots=True)
class AgreementConfig:
    """Every bound and timeout; equal on all ranks of a domain.

    Args:
        credits: Open incarnations at once, 1..65535. Bounds every queue: see ``queue_records_max``.
        frame_bytes_max: Largest frame, 256..1 MiB; 16 KiB carry 680 records.
        frames_per_poll_max: Frames handled by one poll, 1..65536.
        heartbeat_s: A peer without other frames gets an empty one this often, > 0.
        silence_s: Observed silence that makes a verdict, >= 2 heartbeats.
        startup_s: The same before a peer's first frame, >= silence_s (models load).
        busy_max_s: Longest declaration of ``busy()``, 0..4,000,000 (it travels as 32 bits of milliseconds).
        round_timeout_s: Idle time of a started round that stops the domain, > 0; None: never. Declared busy time counts.
        lease_timeout_s: Age of an unscheduled lease at which the scheduling rank revokes it, > 0; None: never.
        doubt_deadline_s: Time from the first ``doubt()`` after which a QUARANTINE vote is accepted, >= 0.
        quarantine_rounds_max: QUARANTINE commits that a domain survives, >= 0; one more stops it.
        story_entries_max: Entries kept per round for diagnosis, 0..1024; the first and the newest stay. An admission and one
            terminal vote of each member may stand beside them.

    Raises:
        ConfigurationError: A value is out of range; ``field`` names it.
    """

    credits: int = 256
    frame_bytes_max: int = 16_384
    frames_per_poll_max: int = 64
    heartbeat_s: float = 0.5
    silence_s: float = 10.0
    startup_s: float = 120.0
    busy_max_s: float = 600.0
    round_timeout_s: float | None = 600.0
    lease_timeout_s: float | None = None
    doubt_deadline_s: float = 30.0
    quarantine_rounds_max: int = 64
    story_entries_max: int = 32

    def __post_init__(self) -> None:
        within("credits", self.credits, 1, 65_535)
        within("frame_bytes_max", self.frame_bytes_max, FRAME_BYTES_MIN, 1 << 20)
        within("frames_per_poll_max", self.frames_per_poll_max, 1, 65_536)
        within("quarantine_rounds_max", self.quarantine_rounds_max, 0, 1 << 31)
        within("story_entries_max", self.story_entries_max, 0, 1024)
        seconds("heartbeat_s", self.heartbeat_s, 1e-3)
        seconds("silence_s", self.silence_s, 2 * self.heartbeat_s)
        seconds("startup_s", self.startup_s, self.silence_s)
        seconds("busy_max_s", self.busy_max_s, 0.0, 4e6)
        seconds("doubt_deadline_s", self.doubt_deadline_s, 0.0)
        for name in ("round_timeout_s", "lease_timeout_s"):
            value = getattr(self, name)
            if value is not None:
                seconds(name, value, 1e-3)

    @property
    def records_per_frame_max(self) -> int:
        """Records that fit into one frame."""
        return (self.frame_bytes_max - FRAME_BYTES) // RECORD_BYTES

    @property
    def queue_records_max(self) -> int:
        """Records that can wait for one destination: the space that admission reserves.

        A destination owes at most ``credits`` open and ``credits`` unheard or undelivered rounds; of each at most four
        records (with eight more for the reasons of a commit) can be undelivered, and to the scheduling rank two pieces of
        advice of each member; control records are few.
        """
        return 2 * self.credits * (12 + RANKS_MAX) + 4 * RANKS_MAX

    def describe(self) -> tuple[tuple[str, int | float | None], ...]:
        """Field names and values, in order: what negotiation compares."""
        return tuple((f.name, getattr(self, f.name)) for f in fields(self))


def within(field: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise ConfigurationError(field, f"{value!r} is not an integer in {low}..{high}")


def seconds(field: str, value: object, low: float, high: float = 1e9) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ConfigurationError(field, f"{value!r} is not a number of seconds in {low}..{high:g}")
