"""The sender's side of one request, pure: events and the time in, effects out.

Theory. A request has one record per receive request (one operation). An operation begins when as much of the source is
computed as it asks for: a slice goes while the rest is computed, everything else waits for ``SourceReady``. Source memory is
owned from the first such word until the request is sealed *and* every record ended with a proof: a later receive request could
still need the source, and a write in progress still reads it. Sealing comes before the terminal snapshot, and what is not yet
posted then is never posted. Every cancel is answered with what is physically true: sealed, drained, or in doubt.

Pull: the source is lent (``Lend``: its addresses leave), and the receiver reads. A loan ends with the receiver's word
(``Returned``), or, where the receiver cannot be heard, with its death (nobody uses what a dead reader read) or with what the
transport's class allows. Whoever exposed memory asks: after a link came back the offer is repeated, and answered with what is
true. A loan that is wanted back is recalled; it stays a loan until the answer.

Order against exhaustion: a sender waits for a bounce slot only after the receiver granted its region, and whoever holds a
slot then waits for nothing but its own copy and write. A slot that is free may be used before, to gather while the region is
asked for; it is given back as soon as a granted operation waits for one. So regions wait for slots, and slots never wait
for regions: no cycle.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

from kv_bounce_planner._errors import LocalProtocolError
from kv_bounce_planner.sessions.core import (
    Core,
    FailAsked,
    LinkReturned,
    NoteConflict,
    PeerEvidenced,
    PeerInDoubt,
    Progressed,
    Resolve,
    Resolved,
    StopPosting,
    Ticked,
)
from kv_bounce_planner.sessions.identity import Mark, OperationIdentity, PeerId, RequestKey, encode_mark
from kv_bounce_planner.sessions.messages import BounceWanted, Cancel, Doubt, Drained, ReceiveRequest, Sealed
from kv_bounce_planner.sessions.proof import Evidence, Proof, ProofKind, _prove
from kv_bounce_planner.sessions.states import SEND_TRANSITIONS, Machine, SendState, SendTrigger
from kv_bounce_planner.transports.interface import JobProgress

_S, _T = SendState, SendTrigger
Disposition = Literal["done", "drained", "sealed", "resolved", "quarantined"]
TerminalOutcome = Literal["COMPLETED", "FAILED", "CANCELLED"]


@dataclass(frozen=True)
class TerminalSnapshot:
    """What is for ever true of a sealed request: an immutable vote's content.

    ``digest`` is over request, outcome and every operation's disposition; equal digests are equal snapshots.
    """

    request: RequestKey
    outcome: TerminalOutcome
    reason: str
    operations: tuple[tuple[OperationIdentity, Disposition], ...]
    quarantined: bool
    digest: bytes


# --- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RequestArrived:
    """``required``: what proves that this peer cannot read a loan of ours any more, by its transport's class."""

    peer: PeerId
    request: ReceiveRequest
    required: frozenset[Evidence] = frozenset({Evidence.OWN_EXIT})


@dataclass(frozen=True)
class SourceReady:
    """Prefill is over and its step has retired: the source may be read."""


@dataclass(frozen=True)
class SourceReached:
    """The step that computed the source up to here has retired: so much of it may be read."""

    position: int


@dataclass(frozen=True)
class GrantArrived:
    operation: OperationIdentity


@dataclass(frozen=True)
class RefusalArrived:
    operation: OperationIdentity
    reason: str


@dataclass(frozen=True)
class SlotReserved:
    operation: OperationIdentity


@dataclass(frozen=True)
class SlotOffered:
    """A slot was free and is this operation's, though its region is not granted yet."""

    operation: OperationIdentity


@dataclass(frozen=True)
class SlotAsked:
    """A granted operation waits for a slot: whoever only gathered ahead gives its own back."""

    operation: OperationIdentity


@dataclass(frozen=True)
class GatherEnded:
    operation: OperationIdentity
    succeeded: bool
    idle_proven: bool
    reason: str = ""


@dataclass(frozen=True)
class CancelArrived:
    operation: OperationIdentity
    reason: str


@dataclass(frozen=True)
class Returned:
    """The receiver's word about its loan: nothing of it is read any more; or with ``doubt``, that it cannot tell."""

    operation: OperationIdentity
    complete: bool
    reason: str = ""
    doubt: bool = False


@dataclass(frozen=True)
class AskedAgain:
    """The receive request was repeated: answers may be lost. Say again what the receiver may not have heard."""

    operation: OperationIdentity


@dataclass(frozen=True)
class TimedOut:
    """An operation's whole time is over, whatever it waits for."""

    operation: OperationIdentity
    after_s: float


@dataclass(frozen=True)
class SealAsked:
    pass


SendEvent = (
    RequestArrived
    | SourceReady
    | SourceReached
    | Resolved
    | GrantArrived
    | RefusalArrived
    | SlotReserved
    | SlotOffered
    | SlotAsked
    | GatherEnded
    | Progressed
    | CancelArrived
    | Returned
    | LinkReturned
    | AskedAgain
    | TimedOut
    | FailAsked
    | SealAsked
    | PeerInDoubt
    | PeerEvidenced
    | Ticked
)

# --- effects, to be performed in order ------------------------------------------------------------------------------


@dataclass(frozen=True)
class SendMessage:
    peer: PeerId
    message: BounceWanted | Sealed | Drained | Doubt | Cancel


@dataclass(frozen=True)
class Lend:
    """Send the offer with the source's places. The operation is already LENT: a failed send leaves it so."""

    operation: OperationIdentity


@dataclass(frozen=True)
class ReserveSlot:
    """Wait for a send slot of this operation's size; answer SlotReserved."""

    operation: OperationIdentity


@dataclass(frozen=True)
class DropSlot:
    """The slot (or the place in the queue for one) is not needed any more; nothing can read it."""

    operation: OperationIdentity
    proof: Proof


@dataclass(frozen=True)
class QuarantineSlot:
    operation: OperationIdentity
    story: tuple[str, ...]


@dataclass(frozen=True)
class Gather:
    operation: OperationIdentity


@dataclass(frozen=True)
class Post:
    """Start the write: in place, or from the slot to the granted region (then the report follows at once)."""

    operation: OperationIdentity
    bounce: bool


@dataclass(frozen=True)
class SendReportAgain:
    """The report of this bounce write, once more."""

    operation: OperationIdentity


@dataclass(frozen=True)
class OperationEnded:
    operation: OperationIdentity
    disposition: Disposition
    bounced: bool
    reason: str


@dataclass(frozen=True)
class ReleaseSource:
    proofs: tuple[Proof, ...]


@dataclass(frozen=True)
class QuarantineSource:
    reason: str
    story: tuple[str, ...]


SendEffect = (
    Resolve
    | SendMessage
    | Lend
    | ReserveSlot
    | DropSlot
    | QuarantineSlot
    | Gather
    | Post
    | SendReportAgain
    | StopPosting
    | OperationEnded
    | ReleaseSource
    | QuarantineSource
    | NoteConflict
)

_DISPOSITIONS: dict[SendState, Disposition] = {
    _S.DONE: "done",
    _S.SEALED: "sealed",
    _S.DRAINED: "drained",
    _S.RESOLVED: "resolved",
    _S.QUARANTINED: "quarantined",
}


#: The receiver's reads may be going on.
_LENT = (_S.LENT, _S.RECALLED)
_LENDING = (*_LENT, _S.LENT_IN_DOUBT)
_BEFORE_POSTING = (_S.HELD, _S.WANTED, _S.AHEAD, _S.STAGED, _S.GRANTED, _S.GATHERING)


class _Record:
    __slots__ = (
        "answered",
        "bounced",
        "cancelled",
        "completed",
        "declined",
        "drain_until_s",
        "ended",
        "evidence",
        "granted",
        "machine",
        "peer",
        "posted",
        "proof",
        "reason",
        "refused",
        "request",
        "required",
        "resolving",
        "slot",
    )

    def __init__(self, peer: PeerId, request: ReceiveRequest, required: frozenset[Evidence]) -> None:
        self.peer = peer
        self.request = request
        self.required = required
        self.machine: Machine[SendState, SendTrigger] = Machine(request.operation, SendState.HELD, SEND_TRANSITIONS)
        self.resolving = False
        self.answered = False
        self.bounced = False
        self.granted = False
        self.declined = False
        self.cancelled = False
        self.refused = False
        self.slot = False
        self.posted = 0
        self.completed = 0
        self.reason = ""
        self.ended = False
        self.drain_until_s: float | None = None
        self.evidence: set[Evidence] = set()
        self.proof: Proof | None = None

    @property
    def state(self) -> SendState:
        return self.machine.state


class SendTransfer(Core[_Record, SendEvent, SendEffect]):
    """One request at one of its senders.

    Args:
        request: The request.
        drain_deadline_s: Seconds between seal, cancel or error and quarantine of what is not proven by then.
    """

    def __init__(self, request: RequestKey, *, drain_deadline_s: float) -> None:
        self.request = request
        self.ready = False
        #: How far the source is computed; operations that ask for no more may begin.
        self.reached = 0
        self.sealed = False
        self.failure = ""
        self.expected: int | None = None
        self._drain_deadline_s = drain_deadline_s
        super().__init__({})
        self._snapshot: TerminalSnapshot | None = None

    # -- reading

    @property
    def operations(self) -> tuple[OperationIdentity, ...]:
        return tuple(self._records)

    def request_of(self, operation: OperationIdentity) -> ReceiveRequest:
        return self._records[operation].request

    def peer_of(self, operation: OperationIdentity) -> PeerId:
        return self._records[operation].peer

    def cancelled(self, operation: OperationIdentity) -> bool:
        return self._records[operation].cancelled

    @property
    def owned(self) -> bool:
        """Whether the source, or the part of it that is computed, belongs to the transfer."""
        return self.ready or self.reached > 0

    def may_begin(self, operation: OperationIdentity) -> bool:
        """Whether what this operation moves is computed."""
        return self.ready or 0 < self._records[operation].request.after <= self.reached

    def knows(self, operation: OperationIdentity) -> bool:
        return operation in self._records

    @property
    def outstanding(self) -> tuple[OperationIdentity, ...]:
        return tuple(op for op, record in self._records.items() if not record.machine.terminal)

    @property
    def due_s(self) -> float | None:
        """When time alone decides next: some operation is quarantined then unless a proof comes. None: never."""
        clocks = (record.drain_until_s for record in self._records.values() if not record.machine.terminal)
        return min((until_s for until_s in clocks if until_s is not None), default=None)

    @property
    def served(self) -> bool:
        """Whether the expected number of operations has ended."""
        return self.expected is not None and len(self._records) >= self.expected and not self.outstanding

    def snapshot(self) -> TerminalSnapshot | None:
        """The terminal snapshot, or None while unsealed or outstanding: then nothing was frozen by asking."""
        if self._snapshot is None and self.sealed and not self.outstanding:
            operations = tuple(sorted((op, _DISPOSITIONS[record.state]) for op, record in self._records.items()))
            quarantined = any(disposition == "quarantined" for _, disposition in operations)
            done = all(disposition == "done" for _, disposition in operations)
            enough = len(operations) >= (1 if self.expected is None else self.expected)
            outcome: TerminalOutcome
            if self.failure or quarantined:
                outcome = "FAILED"
            elif done and enough:
                outcome = "COMPLETED"
            elif not operations or any(record.cancelled for record in self._records.values()):
                outcome = "CANCELLED"
            else:
                outcome = "FAILED"
            reason = self.failure or next((record.reason for record in self._records.values() if record.reason), "")
            text = hashlib.blake2b(digest_size=16, person=b"kv-terminal")
            text.update(f"{self.request.request_id} {self.request.incarnation} {outcome}".encode())
            for operation, disposition in operations:
                text.update(encode_mark(Mark(operation, 0, 1)) + disposition.encode())
            self._snapshot = TerminalSnapshot(self.request, outcome, reason, operations, quarantined, text.digest())
        return self._snapshot

    # -- stepping

    def _anew(self) -> SendTransfer:
        core = SendTransfer(self.request, drain_deadline_s=self._drain_deadline_s)
        core.expected = self.expected
        return core

    def _take(self, event: SendEvent, now_s: float) -> None:
        match event:
            case RequestArrived():
                self._arrived(event, now_s)
            case SourceReady():
                if self.ready:
                    raise LocalProtocolError(f"{self.request} was ready before")
                self.ready = True
            case SourceReached(position):
                if self.ready or position < self.reached:
                    raise LocalProtocolError(f"{self.request} was computed further before")
                self.reached = position
            case Resolved():
                self._resolved(event, now_s)
            case GrantArrived(operation):
                self._granted(operation)
            case RefusalArrived(operation, reason):
                self._refused(operation, reason)
            case SlotReserved(operation):
                record = self._records[operation]
                record.machine.fire(_T.GATHER)
                self._effects.append(Gather(operation))
            case SlotOffered(operation):
                record = self._records[operation]
                record.machine.fire(_T.GATHER, "ahead")
                record.slot = True
                self._effects.append(Gather(operation))
            case SlotAsked(operation):
                record = self._records[operation]
                if record.state is _S.STAGED:
                    self._yield(record)
            case GatherEnded():
                self._gathered(event, now_s)
            case Progressed(progress):
                self._progressed(progress, now_s)
            case CancelArrived(operation, reason):
                self._cancelled(operation, reason, now_s)
            case Returned():
                self._returned(event, now_s)
            case LinkReturned(peer):
                self._ask_again(peer)
            case AskedAgain(operation):
                self._asked_again(operation)
            case TimedOut(operation, after_s):
                record = self._records[operation]
                if not record.machine.terminal:
                    self._seal_record(record, f"timed out in {record.state.value} after {after_s:g} s", now_s)
            case FailAsked(reason):
                self._fail(reason, now_s)
            case SealAsked():
                self._seal(now_s)
            case PeerInDoubt(peer, reason):
                for record in self._records.values():
                    if record.peer == peer and record.state in _BEFORE_POSTING:
                        self._seal_record(record, reason, now_s)
                    elif record.peer == peer and record.state in _LENT:
                        self._loan_in_doubt(record, reason, now_s)

    # -- one event each

    def _arrived(self, event: RequestArrived, now_s: float) -> None:
        request = event.request
        if request.operation in self._records:
            raise LocalProtocolError(f"{request.operation} arrived before")
        record = _Record(event.peer, request, event.required)
        self._records[request.operation] = record
        if self.sealed:
            self._seal_record(record, self.failure or "the request is sealed", now_s)

    def _asked_again(self, operation: OperationIdentity) -> None:
        record = self._records[operation]
        if record.state in (_S.WANTED, _S.AHEAD, _S.STAGED) and not record.refused:
            self._effects.append(self._wish(record))
        elif record.state in _LENDING:
            self._repeat_offer(record)
        elif record.bounced and record.state in (_S.POSTING, _S.IN_FLIGHT, _S.DONE):
            self._effects.append(SendReportAgain(operation))
        elif record.state is not _S.DONE and (record.machine.terminal or record.answered):
            self._answer(record)

    def _wish(self, record: _Record) -> SendMessage:
        request = record.request
        return SendMessage(record.peer, BounceWanted(request.operation, request.byte_count, request.plan_digest))

    def _resolved(self, event: Resolved, now_s: float) -> None:
        record = self._records[event.operation]
        record.resolving = False
        if record.state is not _S.HELD:
            return
        if event.reason:
            self._seal_record(record, event.reason, now_s)
        elif record.request.pulls:
            record.machine.fire(_T.LEND)
            self._effects.append(Lend(event.operation))
        elif event.wants_bounce and record.request.bounce_offered:
            record.machine.fire(_T.WANT)
            self._effects.append(self._wish(record))
        else:
            self._post(record, bounce=False)

    # -- loans

    def _repeat_offer(self, record: _Record) -> None:
        """The receiver answers with what is true by now."""
        operation = record.request.operation
        self._effects.append(Lend(operation))
        if record.state is not _S.LENT:
            self._effects.append(SendMessage(record.peer, Cancel(operation, record.reason[:500])))

    def _ask_again(self, peer: PeerId) -> None:
        for record in self._records.values():
            if record.peer == peer and record.state in _LENDING:
                self._repeat_offer(record)

    def _returned(self, event: Returned, now_s: float) -> None:
        record = self._records[event.operation]
        if not record.request.pulls:
            self._effects.append(NoteConflict(event.operation, "the end of a loan, about a write"))
        elif record.state in _LENDING and event.doubt:
            self._loan_in_doubt(record, event.reason, now_s)
        elif record.state in _LENDING:
            record.reason = "" if event.complete else record.reason or event.reason
            record.cancelled = not event.complete and record.state is _S.LENT  # its own wish, not our recall
            record.machine.fire(_T.READ if event.complete else _T.RETURNED, event.reason)
            self._proven(record, event.operation, ProofKind.READ_OVER)
        elif not record.machine.terminal and not event.doubt:
            record.cancelled = True  # it does not want the loan any more that it never had
            self._seal_record(record, event.reason, now_s)

    def _loan_in_doubt(self, record: _Record, reason: str, now_s: float) -> None:
        self._clock(record, now_s)
        record.reason = record.reason or reason
        if record.machine.allows(_T.DOUBT):
            record.machine.fire(_T.DOUBT, reason)

    def _loan_proven(self, record: _Record) -> None:
        if Evidence.PEER_REAPED in record.evidence:
            record.machine.fire(_T.CLASS_PROOF, "reader reaped")
            self._proven(record, record.request.operation, ProofKind.READER_DEAD)
        elif record.required <= record.evidence:
            record.machine.fire(_T.CLASS_PROOF, ", ".join(sorted(each.value for each in record.evidence)))
            self._proven(record, record.request.operation, ProofKind.CLASS)

    # -- bounce regions

    def _granted(self, operation: OperationIdentity) -> None:
        record = self._records[operation]
        if record.state is _S.WANTED:
            record.machine.fire(_T.GRANT)
            record.slot = True
            self._effects.append(ReserveSlot(operation))
        elif record.state is _S.AHEAD and not record.refused:
            record.machine.fire(_T.GRANT)
        elif record.state is _S.STAGED:
            self._post(record, bounce=True)
        elif record.granted or record.machine.terminal or record.state is _S.SEALING:
            return  # repeated after a link came back, or too late
        else:
            self._effects.append(NoteConflict(operation, f"a grant in {record.state.value}"))
        record.granted = True

    def _refused(self, operation: OperationIdentity, reason: str) -> None:
        record = self._records[operation]
        if record.state is _S.WANTED:
            record.reason = ""
            self._post(record, bounce=False)
        elif record.state is _S.AHEAD and not record.refused:
            record.refused = True  # the gather ends first: it still writes the slot
        elif record.state is _S.STAGED:
            self._yield(record)
            self._post(record, bounce=False)
        elif record.declined or record.machine.terminal or record.state is _S.SEALING:
            return
        else:
            self._effects.append(NoteConflict(operation, f"a refusal in {record.state.value}: {reason}"))
        record.declined = True

    def _post(self, record: _Record, *, bounce: bool) -> None:
        record.machine.fire(_T.POST, "bounce" if bounce else "direct")
        record.bounced = bounce
        self._effects.append(Post(record.request.operation, bounce))

    def _yield(self, record: _Record) -> None:
        """Give a slot back that was used ahead: nothing of it was posted."""
        operation = record.request.operation
        record.machine.fire(_T.YIELD)
        record.slot = False
        self._effects.append(DropSlot(operation, _prove(ProofKind.NEVER_POSTED, operation)))

    def _gathered(self, event: GatherEnded, now_s: float) -> None:
        record = self._records[event.operation]
        if record.state not in (_S.AHEAD, _S.GATHERING, _S.SEALING):
            return  # said again after an interrupt, or it came after the drain clock: what was quarantined stays so
        if not event.succeeded and not event.idle_proven:
            # The copy may go on reading the source and writing the slot: both stay owned until quarantine.
            record.machine.fire(_T.GATHER_BROKEN, event.reason)
            record.reason = record.reason or event.reason
            self._clock(record, now_s)
            self._answer(record)
            return
        if record.state is _S.AHEAD:
            # Nothing is lost yet by a gather that failed: the region is not granted, and another one may succeed.
            if event.succeeded:
                record.machine.fire(_T.GATHERED)
            if not event.succeeded or record.refused:
                self._yield(record)
            if record.refused:
                self._post(record, bounce=False)
        elif record.state is _S.SEALING:
            record.machine.fire(_T.GATHERED)
            self._proven(record, record.request.operation, ProofKind.NEVER_POSTED)
            self._answer(record)
        elif not event.succeeded:
            record.machine.fire(_T.SEAL, event.reason)
            record.machine.fire(_T.GATHERED)
            record.reason = event.reason
            self._proven(record, record.request.operation, ProofKind.NEVER_POSTED)
            self._answer(record)
        else:
            self._post(record, bounce=True)

    def _progressed(self, progress: JobProgress, now_s: float) -> None:
        record = self._records[progress.operation]
        if record.machine.terminal or record.state is _S.IN_DOUBT:
            return
        record.posted, record.completed = progress.posted, progress.completed
        if progress.state == "error":
            record.reason = progress.detail or "write error"
            if progress.posted == 0:
                # Refused before anything was handed to the library: the same as never posted.
                if record.state is _S.POSTING:
                    record.machine.fire(_T.SEAL)
                record.machine.fire(_T.COMPLETED, "nothing was posted")
                self._proven(record, record.request.operation, ProofKind.NEVER_POSTED)
            else:
                record.machine.fire(_T.ERROR, record.reason)
                self._clock(record, now_s)
            self._answer(record)
            return
        if progress.state in ("posted", "done") and record.state is _S.POSTING:
            record.machine.fire(_T.POSTED_ALL)
        if progress.state in ("done", "stopped") and record.state in (_S.IN_FLIGHT, _S.STOPPING):
            after = record.machine.fire(_T.COMPLETED)
            self._proven(
                record, record.request.operation, ProofKind.COMPLETED if progress.posted else ProofKind.NEVER_POSTED
            )
            if record.cancelled or after is _S.DRAINED:
                self._answer(record)

    def _cancelled(self, operation: OperationIdentity, reason: str, now_s: float) -> None:
        record = self._records[operation]
        record.cancelled = True
        if record.request.pulls and record.state in _LENDING:
            return  # it says so itself when nothing of the loan is read any more
        if record.machine.terminal or record.state in (_S.IN_DOUBT, _S.SOURCE_IN_DOUBT):
            self._answer(record)
            return
        self._seal_record(record, reason, now_s)

    def _fail(self, reason: str, now_s: float) -> None:
        self.failure = self.failure or reason or "failed"
        self.sealed = True
        for record in self._records.values():
            if not record.machine.terminal:
                self._seal_record(record, self.failure, now_s)

    def _seal(self, now_s: float) -> None:
        """Nothing begins any more; what holds a slot or was posted runs to its end."""
        self.sealed = True
        for record in self._records.values():
            if record.state in (_S.HELD, _S.WANTED, _S.AHEAD, _S.STAGED, _S.GRANTED):
                self._seal_record(record, "the request is sealed", now_s)
            elif not record.machine.terminal:
                self._clock(record, now_s)

    # -- consequences

    def _seal_record(self, record: _Record, reason: str, now_s: float) -> None:
        """Stop one record as early as physics allows; the answer follows when it is true."""
        self._clock(record, now_s)
        record.reason = record.reason or reason
        if record.state in (_S.HELD, _S.WANTED, _S.STAGED, _S.GRANTED):
            record.machine.fire(_T.SEAL, reason)
            self._proven(record, record.request.operation, ProofKind.NEVER_POSTED)
            self._answer(record)
        elif record.state in (_S.AHEAD, _S.GATHERING):
            record.machine.fire(_T.SEAL, reason)
        elif record.state is _S.POSTING:
            record.machine.fire(_T.SEAL, reason)
            self._effects.append(StopPosting(record.request.operation))
        elif record.state is _S.LENT:
            record.machine.fire(_T.RECALL, reason)
            self._effects.append(SendMessage(record.peer, Cancel(record.request.operation, reason[:500])))

    def _clock(self, record: _Record, now_s: float) -> None:
        if record.drain_until_s is None:
            record.drain_until_s = now_s + self._drain_deadline_s

    def _answer(self, record: _Record) -> None:
        """Tell the receiver what is physically true of its destination."""
        operation, reason = record.request.operation, record.reason[:500]
        record.answered = True
        message: Sealed | Drained | Doubt
        if record.state is _S.SEALED or record.state is _S.SOURCE_IN_DOUBT or record.posted == 0:
            message = Sealed(operation, reason)
        elif record.state in (_S.DONE, _S.DRAINED):
            message = Drained(operation, record.posted, record.completed, reason)
        else:
            message = Doubt(operation, reason)
        self._effects.append(SendMessage(record.peer, message))

    def _advance(self, now_s: float) -> None:
        for operation, record in self._records.items():
            if record.state is _S.HELD and not self.sealed and not record.resolving and self.may_begin(operation):
                record.resolving = True
                self._effects.append(Resolve(operation))
            if record.state is _S.LENT_IN_DOUBT:
                self._loan_proven(record)
            if record.state is _S.IN_DOUBT:
                # The error is seen, so a dead receiver (with the source still registered) or our own agent's end is proof.
                if Evidence.AGENT_DESTROYED in record.evidence:
                    record.machine.fire(_T.CLASS_PROOF, "own agent destroyed")
                    self._proven(record, record.request.operation, ProofKind.OWN_AGENT_DESTROYED)
                elif Evidence.PEER_REAPED in record.evidence:
                    record.machine.fire(_T.CLASS_PROOF, "receiver reaped, source registered")
                    self._proven(record, record.request.operation, ProofKind.PEER_DEAD_REGISTERED)
            if record.drain_until_s is not None and now_s >= record.drain_until_s:
                if record.machine.allows(_T.DEADLINE):
                    record.machine.fire(_T.DEADLINE)
                    if not record.reason:
                        record.reason = "no proof at the end of the drain clock"
                    if record.posted:
                        self._answer(record)
                elif record.state in (_S.POSTING, _S.GATHERING):
                    self._seal_record(record, "drain deadline", now_s)
            if record.machine.terminal and not record.ended:
                record.ended = True
                self._end_record(record)
        self._settle()

    def _end_record(self, record: _Record) -> None:
        operation = record.request.operation
        if record.slot:
            if record.proof is not None:
                self._effects.append(DropSlot(operation, record.proof))
            else:
                self._effects.append(QuarantineSlot(operation, self.story_of(operation)))
            record.slot = False
        self._effects.append(OperationEnded(operation, _DISPOSITIONS[record.state], record.bounced, record.reason))

    def _settle(self) -> None:
        if self.settled or not self.sealed or self.outstanding:
            return
        self.settled = True
        if not self.owned:
            return
        doubtful = self._in_state(_S.QUARANTINED)
        if doubtful:
            self._effects.append(QuarantineSource("no proof at the end of the drain clock", self._stories(doubtful)))
        else:
            self._effects.append(ReleaseSource(self._proofs))
