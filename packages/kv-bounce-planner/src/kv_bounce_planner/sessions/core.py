"""What the two pure cores share: one record per operation, and how events become effects.

Theory. A transfer (receiver) or request (sender) has one record per operation. Its machine says what is physically true of
memory, its evidence what was learned about the peer and about our own agent, its proof why nothing touches the memory any
more. A core takes one event in and returns effects; what follows from the records as they are then (``_advance``) comes
after every event, so no event needs to know what else it decides.

A step is taken whole or not at all. A core is a function of its events, so it keeps them, and its one commit is one assignment:
the event, the time and the effects, in front of the earlier ones. What an interrupt or an error broke off before that is undone
by making the records again from what was committed; what was committed is performed, though an interrupt came right after it,
because the core also knows which of its effects were handed out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
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


#: The steps of a core, the latest first: (the earlier ones, event, time, effects).
_Log = tuple[Any, Any, float, tuple[Any, ...]]


class Core(ABC, Generic[RecordT, EventT, EffectT]):
    """Base of ``ReceiveTransfer`` and ``SendTransfer``."""

    def __init__(self, records: dict[OperationIdentity, RecordT]) -> None:
        self.settled = False
        self._records = records
        self._effects: list[EffectT] = []
        self._stepping = False
        self._log: _Log | None = None
        self._over = False
        #: The step whose effects are handed out, and how many of them were.
        self.told: tuple[_Log | None, int] = (None, 0)

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
            IllegalTransition: A bug of ours, with the record's story. State is unchanged, as after whatever else is raised.
        """
        if self._stepping:
            self._undo()
        self._stepping = True
        try:
            self._effects = []
            if isinstance(event, PeerEvidenced):
                for record in self._records.values():
                    if record.peer == event.peer:
                        record.evidence.add(event.evidence)
            else:
                self._take(event, now_s)
            self._advance(now_s)
            effects, self._effects = tuple(self._effects), []
            self._log = (self._earlier(event, effects), event, now_s, effects)
            self._stepping = False
        except BaseException:
            self._undo()
            raise
        return effects

    def _earlier(self, event: object, effects: tuple[EffectT, ...]) -> _Log | None:
        """The steps that are kept before this one: without the last if this one says all that it said, and none at the end."""
        last = self._log
        if last is None or self._over:
            return None
        earlier: _Log | None = last[0]
        before = last[1]
        if not isinstance(event, Progressed) or not isinstance(before, Progressed) or effects or last[3]:
            return last
        if event.progress.operation != before.progress.operation or self.next_effect() is not None:
            return last
        self.told = (earlier, len(earlier[3]) if earlier is not None else 0)
        return earlier

    def forget_steps(self) -> None:
        """It is settled, and its effects were performed: nothing is undone any more, and no step is kept for it."""
        if self.settled and self.next_effect() is None:
            self._over, self._log, self.told = True, None, (None, 0)

    def _undo(self) -> None:
        """Back to what was committed."""
        if self._over:
            self._stepping = False
            return
        steps, entry = [], self._log
        while entry is not None:
            steps.append(entry)
            entry = entry[0]
        again = self._anew()
        for _, event, now_s, _ in reversed(steps):
            again.step(event, now_s)
        again._log, again.told = self._log, self.told
        self.__dict__.update(again.__dict__)

    def next_effect(self) -> tuple[EffectT, tuple[_Log, int]] | None:
        """The oldest effect that was not handed out yet, and what to assign to ``told`` when it is."""
        step, count = self.told
        while step is None or count == len(step[3]):
            if step is self._log:
                return None
            entry = self._log
            while entry is not None and entry[0] is not step:
                entry = entry[0]
            step, count = entry, 0
        return step[3][count], (step, count + 1)

    @abstractmethod
    def _anew(self) -> Core[RecordT, EventT, EffectT]:
        """This core as it was made."""

    @abstractmethod
    def _take(self, event: EventT, now_s: float) -> None:
        """What this event says about the records."""

    @abstractmethod
    def _advance(self, now_s: float) -> None:
        """What follows from the records as they are now."""

    def _proven(self, record: RecordT, operation: OperationIdentity, kind: ProofKind) -> None:
        record.proof = _prove(kind, operation, record.evidence if kind in _EVIDENCED else ())

    def _stories(self, operations: Iterable[OperationIdentity]) -> tuple[str, ...]:
        return tuple(line for operation in operations for line in self.story_of(operation))

    def _in_state(self, state: Any) -> tuple[OperationIdentity, ...]:
        return tuple(op for op, record in self._records.items() if record.machine.state is state)

    @property
    def _proofs(self) -> tuple[Proof, ...]:
        return tuple(record.proof for record in self._records.values() if record.proof is not None)
