"""What the two pure cores share: one record per operation, and how events become effects.

Theory. A transfer (receiver) or request (sender) has one record per operation. Its machine says what is physically true of
memory, its evidence what was learned about the peer and about our own agent, its proof why nothing touches the memory any
more. A core takes one event in and returns effects; what follows from the records as they are then (``_advance``) comes
after every event, so no event needs to know what else it decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from kv_bounce_planner.sessions.identity import OperationIdentity, PeerId
from kv_bounce_planner.sessions.proof import Evidence, Proof, ProofKind, _prove
from kv_bounce_planner.sessions.states import Machine
from kv_bounce_planner.transports.interface import JobProgress

# --- events of both sides -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FailAsked:
    """It ends here: by the host, by a time-out, or because a peer is refused."""

    reason: str


@dataclass(frozen=True)
class Resolved:
    """The planner's answer: fragments are known (``reason`` empty), or this operation cannot be served."""

    operation: OperationIdentity
    wants_bounce: bool = False
    reason: str = ""


@dataclass(frozen=True)
class Progressed:
    """News of the transport about a job of ours."""

    progress: JobProgress


@dataclass(frozen=True)
class LinkReturned:
    """That peer, in the same life, is heard again: frames of before may be lost in both directions."""

    peer: PeerId


@dataclass(frozen=True)
class PeerInDoubt:
    """That peer died, or can no longer be heard. Proves nothing."""

    peer: PeerId
    reason: str


@dataclass(frozen=True)
class PeerEvidenced:
    """A fact about that peer or about our agent for it."""

    peer: PeerId
    evidence: Evidence


@dataclass(frozen=True)
class Ticked:
    """Only time passed."""


# --- effects of both sides ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Resolve:
    """Ask the planner for this operation's fragments; answer Resolved."""

    operation: OperationIdentity


@dataclass(frozen=True)
class StopPosting:
    """Begin nothing more of this operation's job; what was begun goes on."""

    operation: OperationIdentity


@dataclass(frozen=True)
class NoteConflict:
    """A peer contradicted the protocol: for counters and logs."""

    operation: OperationIdentity
    reason: str


# --- records --------------------------------------------------------------------------------------------------------

#: Proofs that are made of evidence, which they carry.
_EVIDENCED = frozenset(
    {ProofKind.CLASS, ProofKind.OWN_AGENT_DESTROYED, ProofKind.PEER_DEAD_REGISTERED, ProofKind.READER_DEAD}
)


class Record(Protocol):
    """One operation, at either side."""

    machine: Machine[Any, Any]
    evidence: set[Evidence]
    proof: Proof | None

    @property
    def peer(self) -> PeerId: ...


RecordT = TypeVar("RecordT", bound=Record)
EventT = TypeVar("EventT")
EffectT = TypeVar("EffectT")


class Core(Generic[RecordT, EventT, EffectT]):
    """Base of ``ReceiveTransfer`` and ``SendTransfer``."""

    def __init__(self, records: dict[OperationIdentity, RecordT]) -> None:
        self.settled = False
        self._records = records
        self._effects: list[EffectT] = []

    # -- reading

    def state_of(self, operation: OperationIdentity) -> Any:
        return self._records[operation].machine.state

    def story_of(self, operation: OperationIdentity) -> tuple[str, ...]:
        """Everything that happened to that operation, in order."""
        return self._records[operation].machine.story

    # -- stepping

    def step(self, event: EventT, now_s: float) -> tuple[EffectT, ...]:
        """Take one event in.

        Args:
            event: What happened.
            now_s: The time, for the drain clock only.

        Returns:
            Effects, to be performed in order.

        Raises:
            IllegalTransition: A bug of ours, with the record's story. State is unchanged.
        """
        self._effects = []
        if isinstance(event, PeerEvidenced):
            for record in self._records.values():
                if record.peer == event.peer:
                    record.evidence.add(event.evidence)
        else:
            self._take(event, now_s)
        self._advance(now_s)
        effects, self._effects = tuple(self._effects), []
        return effects

    def _take(self, event: EventT, now_s: float) -> None:
        raise NotImplementedError

    def _advance(self, now_s: float) -> None:
        """What follows from the records as they are now."""
        raise NotImplementedError

    def _proven(self, record: RecordT, operation: OperationIdentity, kind: ProofKind) -> None:
        record.proof = _prove(kind, operation, record.evidence if kind in _EVIDENCED else ())

    def _in_state(self, state: Any) -> tuple[OperationIdentity, ...]:
        return tuple(op for op, record in self._records.items() if record.machine.state is state)

    @property
    def _proofs(self) -> tuple[Proof, ...]:
        return tuple(record.proof for record in self._records.values() if record.proof is not None)
