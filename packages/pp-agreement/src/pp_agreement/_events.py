"""The vocabulary: identities, enumerations, what goes into the core and what comes out.

Inputs (past tense) are what happened: a local call, a frame, a sweep. Effects are what the caller of ``step`` must do:
``Answer`` is the result of a local call, ``SendFrame`` must be given to the transport before the next ``step``, and every
``AgreementEvent`` must be handed to the host in the order of the tuple, once.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

REQUEST_ID_BITS = 63
REQUEST_ID_MAX = 2**REQUEST_ID_BITS - 1


# -- identity and values -------------------------------------------------------------------------------------------------


class Key(NamedTuple):
    """A request's admission: ``incarnation`` counts a domain's admissions 1, 2, 3, …; ``attempt`` its readiness rounds."""

    request_id: int
    incarnation: int
    attempt: int = 0


new = tuple.__new__
"""``new(Key, (7, 1, 0))`` makes a named tuple of a plain one, in half the time of ``Key(7, 1, 0)``."""


class Outcome(IntEnum):
    """Terminal outcomes; the greatest vote wins."""

    COMPLETED = 0
    FAILED = 1
    CANCELLED = 2


class Disposition(IntEnum):
    """What a commit allows to be done with the blocks; the greatest vote wins."""

    RELEASE = 0
    QUARANTINE = 1


class Reason(IntEnum):
    """Why; the greatest one of a round is reported. Only ``NOT_READY`` is transient: it lets another attempt open."""

    NONE = 0
    NOT_READY = 1
    CAPACITY = 2
    DRAIN = 3
    LEASE_EXPIRED = 4
    TIMEOUT = 5
    HOST = 6
    CANCELLED = 7
    FAILED = 8
    PEER_LOST = 9
    DOUBT = 10
    TERMINAL_VOTE = 11

    @property
    def is_transient(self) -> bool:
        """Whether an attempt aborted for this reason may be followed by another."""
        return self <= Reason.NOT_READY


class FinalizeMode(IntEnum):
    """What follows an aborted attempt."""

    REOPEN = 0
    CLOSED = 1
    TERMINAL = 2


class PublishResult(IntEnum):
    """What became of a readiness vote."""

    PUBLISHED = 0
    DEFERRED = 1
    ABORTING = 2
    FINAL = 3


class WithdrawResult(IntEnum):
    """What a withdrawal can promise."""

    WILL_ABORT = 0
    LEASED = 1
    ACTIVATED = 2
    FINAL = 3
    TERMINAL = 4
    NOT_USED = 5


class RevokeResult(IntEnum):
    """What a revocation can promise."""

    WILL_ABORT = 0
    NOT_LEASED = 1
    ACTIVATED = 2
    FINAL = 3


class AdviceKind(IntEnum):
    """Advisory messages; they promise and decide nothing."""

    RECALL = 0
    DOUBT = 1


class FaultCode(IntEnum):
    """Why a domain stopped."""

    PROTOCOL = 1
    BAD_FRAME = 2
    SEQUENCE = 3
    TRANSPORT = 4
    DEATH = 5
    ROUND_TIMEOUT = 6
    BROADCAST_MISMATCH = 7
    DRAIN_MISMATCH = 8
    QUARANTINE_BUDGET = 9
    INTERNAL = 10
    HOST = 11
    POISON = 12


Record = tuple[int, int, int, int, int, int, int]
"""kind, outcome, disposition, reason, attempt, request_id, incarnation"""


class Frame(NamedTuple):
    """One decoded frame of a stream: ``sequence`` counts from 1; ``busy_ms`` extends the sender's silence.

    ``session`` tells one life of the sender from another; ``content`` holds the bytes that came, which a repetition equals.
    """

    sequence: int
    busy_ms: int
    records: tuple[Record, ...]
    session: int = 0
    content: bytes = b""


# -- effects: to the host ------------------------------------------------------------------------------------------------


class AgreementEvent:
    """Something the host must hear, once, in order."""

    __slots__ = ()

    @property
    def ends_request(self) -> bool:
        """Whether nothing more will be said about the request: a COMMIT, or a FINALIZE that closes."""
        return False


@dataclass(frozen=True, slots=True)
class Prepared(AgreementEvent):
    """All ranks voted READY. Keep the request hidden and ``acknowledge_prepare``."""

    key: Key


@dataclass(frozen=True, slots=True)
class Released(AgreementEvent):
    """Scheduling rank only: all ranks granted their lease; the request may be activated, then scheduled."""

    key: Key


@dataclass(frozen=True, slots=True)
class Revoked(AgreementEvent):
    """Scheduling rank only: the agreement revoked a lease on the host's behalf (lease timeout, drain).

    The request must not be activated any more; ``Aborted`` follows.
    """

    key: Key
    reason: Reason


@dataclass(frozen=True, slots=True)
class Completed(AgreementEvent):
    """All ranks activated the request."""

    key: Key


@dataclass(frozen=True, slots=True)
class Aborted(AgreementEvent):
    """The attempt will not complete. Let go of it, then ``acknowledge_abort``."""

    key: Key
    reason: Reason


@dataclass(frozen=True, slots=True)
class Finalized(AgreementEvent):
    """All ranks let go of the attempt; ``mode`` says what may follow."""

    key: Key
    mode: FinalizeMode
    reason: Reason

    @property
    def ends_request(self) -> bool:
        """Where no attempt and no terminal phase follow."""
        return self.mode is FinalizeMode.CLOSED


class _Decision(NamedTuple):
    key: Key
    outcome: Outcome
    disposition: Disposition
    reasons: tuple[Reason, ...]


class Committed(_Decision, AgreementEvent):
    """The terminal decision: memory may be reclaimed (RELEASE) or is retired for ever (QUARANTINE).

    Of every request there is one; as a named tuple it is made in a quarter of the time of a frozen dataclass.
    """

    __slots__ = ()

    @property
    def ends_request(self) -> bool:
        """Always."""
        return True

    def __eq__(self, other: object) -> bool:
        return type(other) is Committed and tuple.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return tuple.__hash__(self)


@dataclass(frozen=True, slots=True)
class Advice(AgreementEvent):
    """Scheduling rank only: a rank asks for a revocation, or lacks proof of quiescence. Nothing is promised."""

    key: Key
    kind: AdviceKind
    source_rank: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class DoubtExpired(AgreementEvent):
    """The deadline of this rank's first ``doubt()`` has passed: a QUARANTINE vote is accepted now."""

    key: Key


@dataclass(frozen=True, slots=True)
class DrainStarted(AgreementEvent):
    """Nothing after ``last_incarnation`` will be admitted."""

    last_incarnation: int


@dataclass(frozen=True, slots=True)
class Drained(AgreementEvent):
    """Every rank reported that it heard and decided all ``last_incarnation`` admissions, with this digest."""

    last_incarnation: int
    digest: str


@dataclass(frozen=True, slots=True)
class SilenceVerdict(AgreementEvent):
    """``observer_rank`` found ``suspect_rank``'s ring empty for ``silent_s``. It frees nothing."""

    observer_rank: int
    suspect_rank: int
    silent_s: float


@dataclass(frozen=True, slots=True)
class SilenceEnded(AgreementEvent):
    """A suspect spoke again."""

    observer_rank: int
    suspect_rank: int


@dataclass(frozen=True, slots=True)
class DeathVerdict(AgreementEvent):
    """Operating-system evidence that ``suspect_rank`` is gone. It frees nothing; the domain stops."""

    observer_rank: int
    suspect_rank: int
    evidence: str


Verdict = SilenceVerdict | SilenceEnded | DeathVerdict


@dataclass(frozen=True, slots=True)
class Fault(AgreementEvent):
    """The domain stopped; the first diagnosis, kept for ever. ``rank`` is where it arose."""

    code: FaultCode
    detail: str
    rank: int
    suspect_rank: int | None = None
    key: Key | None = None
    story: tuple[str, ...] = ()


SURVIVES_FAULT = (
    Committed,
    Completed,
    Finalized,
    Fault,
    DeathVerdict,
    SilenceVerdict,
    SilenceEnded,
    Drained,
    DrainStarted,
)
"""Events that a host still gets in the poll that brings a fault; PREPARE, RELEASE and ABORT are suppressed. Of records that
wait for other ranks: ``KINDS_SURVIVE_FAULT``."""


# -- effects: to the transport and the caller ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendFrame:
    """Give ``frame`` to the transport for member ``peer`` now; a slot was announced for it."""

    peer: int
    frame: Frame


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a local call."""

    value: object


Effect = AgreementEvent | SendFrame | Answer


# -- inputs: local calls ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestAdmitted:
    """The authoritative broadcast named the request."""

    request_id: int
    incarnation: int
    ready: bool


@dataclass(frozen=True, slots=True)
class ReadyPublished:
    """This rank is ready for ``key``."""

    key: Key


@dataclass(frozen=True, slots=True)
class WithdrawRequested:
    """This rank takes its readiness back, or refuses it."""

    key: Key
    reason: Reason


@dataclass(frozen=True, slots=True)
class PrepareAcknowledged:
    """This rank grants its lease."""

    key: Key


@dataclass(frozen=True, slots=True)
class AbortAcknowledged:
    """This rank let go of the attempt."""

    key: Key


@dataclass(frozen=True, slots=True)
class ScheduleActivated:
    """The schedule names these requests, in this order."""

    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class RevokeRequested:
    """The scheduling rank will not schedule a leased request."""

    key: Key
    reason: Reason


@dataclass(frozen=True, slots=True)
class RecallRequested:
    """A leased rank would like a revocation."""

    key: Key
    reason: Reason


@dataclass(frozen=True, slots=True)
class TerminalVoted:
    """This rank is quiescent for the request, with this outcome."""

    key: Key
    outcome: Outcome
    disposition: Disposition
    reason: Reason


@dataclass(frozen=True, slots=True)
class DoubtRaised:
    """This rank has no proof of quiescence."""

    key: Key
    reason: Reason


@dataclass(frozen=True, slots=True)
class BusyDeclared:
    """This rank will not poll for up to ``max_s``."""

    max_s: float


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """Nothing after ``last_incarnation`` was or will be admitted."""

    last_incarnation: int


@dataclass(frozen=True, slots=True)
class CloseRequested:
    """This rank is drained and will send nothing more."""


@dataclass(frozen=True, slots=True)
class HostFailed:
    """The host, or the shell for it, stops the domain."""

    code: FaultCode
    detail: str


# -- inputs: from the transport ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FrameReceived:
    """A frame of member ``peer``, checked and decoded."""

    peer: int
    frame: Frame


@dataclass(frozen=True, slots=True)
class FrameRejected:
    """Bytes of member ``peer`` that are no frame of this domain; discarded whole."""

    peer: int
    detail: str


@dataclass(frozen=True, slots=True)
class SweepCompleted:
    """One receive sweep ended; the rings of the members in the mask ``empty`` were found empty."""

    empty: int


@dataclass(frozen=True, slots=True)
class SlotFreed:
    """Member ``peer`` can take a frame; ``outstanding`` earlier ones are not received yet."""

    peer: int
    outstanding: int


@dataclass(frozen=True, slots=True)
class SendFailed:
    """The transport failed for good towards member ``peer``."""

    peer: int
    detail: str


@dataclass(frozen=True, slots=True)
class PeerDied:
    """The operating system says that member ``peer`` is gone."""

    peer: int
    evidence: str


@dataclass(frozen=True, slots=True)
class ExchangeCompleted:
    """Blocking baseline only: every member's records of one lockstep exchange, in member order.

    None is poison, a text is poison with what the host said.
    """

    contributions: tuple[tuple[Record, ...] | str | None, ...]


Input = (
    RequestAdmitted
    | ReadyPublished
    | WithdrawRequested
    | PrepareAcknowledged
    | AbortAcknowledged
    | ScheduleActivated
    | RevokeRequested
    | RecallRequested
    | TerminalVoted
    | DoubtRaised
    | BusyDeclared
    | DrainRequested
    | CloseRequested
    | HostFailed
    | FrameReceived
    | FrameRejected
    | SweepCompleted
    | SlotFreed
    | SendFailed
    | PeerDied
    | ExchangeCompleted
)
