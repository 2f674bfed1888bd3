"""The receiver's side of one transfer, pure: events and the time in, effects out.

Theory. A transfer has one record per operation (one writer's obligation). Logical outcome and physical state are two axes:
``outcome`` is frozen at the event that decides it; memory leaves by proof of every operation, or not at all. The shell
performs effects in the order given; where a state must change before an address leaves (publish, grant), it has changed
when the effect is returned.

A transfer has one slice or several (the slice is part of an operation's name). A slice has its own bounce region and its own
scatter, and no slice waits for another: its region goes back as soon as its own operations are proven and its scatter has
ended. What slices share is the outcome: the first failure ends the transfer, and memory is released once, for all of them.

Success needs every operation done and, where bounce regions were written, a valid report from each of those writers and
one scatter per slice, begun only when all of the slice's succeeded. A scatter owns source region and destination like any other
writer.

Pull: nothing of ours is exposed. The sender lends its source when its prefill is over; then our own reads are what may still
write our memory, and they end like a sender's writes do: completed, never begun, or by our agent's end. Whatever the end is,
the sender is told (``SayOver``) as soon as it is true, and again whenever it asks by repeating its offer.

The drain clock starts at the first cancel, failure or doubt, and is never reset. When it runs out the memory without proof
is quarantined: it is not released, then or ever.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
from kv_bounce_planner.sessions.identity import MARKS_MAX, OperationIdentity, PeerId, TransferIdentity
from kv_bounce_planner.sessions.messages import (
    BounceRefused,
    BounceWanted,
    Cancel,
    Doubt,
    Drained,
    ReadOffer,
    ReadOver,
    ReceiveRequest,
    Sealed,
    WriterResult,
)
from kv_bounce_planner.sessions.proof import Evidence, Proof, ProofKind
from kv_bounce_planner.sessions.states import RECEIVE_TRANSITIONS, Machine, Outcome, ReceiveState, ReceiveTrigger
from kv_bounce_planner.transports.interface import JobProgress

_S, _T = ReceiveState, ReceiveTrigger
#: Nothing of the record is at risk, or ever will be again.
_SETTLED = (_S.UNEXPOSED, _S.PROVEN, _S.QUARANTINED)
#: Only the transport's class proves anything here.
_DOUBTFUL = (_S.IN_DOUBT, _S.CONFLICTED, _S.READ_IN_DOUBT)


class Region(enum.StrEnum):
    """A slice's bounce region."""

    NONE = "none"
    ASKED = "asked"
    RESERVED = "reserved"
    BOUND = "bound"
    REFUSED = "refused"
    RETURNED = "returned"


class ScatterState(enum.StrEnum):
    """A slice's one scatter. BROKEN: it may go on for ever."""

    NONE = "none"
    RUNNING = "running"
    DONE = "done"
    BROKEN = "broken"


@dataclass(frozen=True)
class OperationSpec:
    """What one writer owes: frozen at open."""

    operation: OperationIdentity
    peer: PeerId
    request: ReceiveRequest

    @property
    def bounce_offered(self) -> bool:
        return self.request.bounce_offered


# --- events: what happened ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Published:
    """The shell is about to hand the receive requests to the channel (called under the publish lock).

    ``required``: per peer, the evidence that proves its writes and our reads from it dead, now that its host is known.
    """

    required: Mapping[PeerId, tuple[frozenset[Evidence], frozenset[Evidence]]] = field(default_factory=dict)


@dataclass(frozen=True)
class CancelAsked:
    reason: str


@dataclass(frozen=True)
class MarkArrived:
    """A notification from the agent that belongs to this operation's writer."""

    operation: OperationIdentity
    index: int
    count: int
    extent: int = 1


@dataclass(frozen=True)
class MessageArrived:
    """A control message about one of our operations, from its writer."""

    message: BounceWanted | WriterResult | Sealed | Drained | Doubt | ReadOffer | Cancel


@dataclass(frozen=True)
class RegionReserved:
    slice_id: TransferIdentity


@dataclass(frozen=True)
class RegionRefused:
    slice_id: TransferIdentity
    reason: str


@dataclass(frozen=True)
class ReportChecked:
    operation: OperationIdentity
    valid: bool
    reason: str = ""


@dataclass(frozen=True)
class ScatterEnded:
    """``idle_proven``: the copier is known to touch nothing any more (always so after success)."""

    slice_id: TransferIdentity
    succeeded: bool
    idle_proven: bool
    reason: str = ""


ReceiveEvent = (
    Published
    | CancelAsked
    | FailAsked
    | LinkReturned
    | MarkArrived
    | MessageArrived
    | RegionReserved
    | RegionRefused
    | ReportChecked
    | ScatterEnded
    | Resolved
    | Progressed
    | PeerInDoubt
    | PeerEvidenced
    | Ticked
)

# --- effects: what to do, in this order -----------------------------------------------------------------------------


@dataclass(frozen=True)
class SendRequest:
    """Queue this receive request. Its operation is already EXPOSED: a failed send leaves it so."""

    peer: PeerId
    request: ReceiveRequest


@dataclass(frozen=True)
class SendCancel:
    """Queue behind every frame for that peer that was queued before."""

    peer: PeerId
    message: Cancel


@dataclass(frozen=True)
class SendRefusal:
    peer: PeerId
    message: BounceRefused


@dataclass(frozen=True)
class ReserveRegion:
    """Reserve one region with these parts (operation number -> bytes); answer RegionReserved or RegionRefused."""

    slice_id: TransferIdentity
    parts: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class BindAndGrant:
    """Bind this operation's part (binding it again changes nothing), then queue the grant. It is already GRANTED."""

    operation: OperationIdentity
    peer: PeerId


@dataclass(frozen=True)
class WithdrawRegion:
    """Leave the queue for a region, or abandon the reservation: no part of it was bound."""

    slice_id: TransferIdentity


@dataclass(frozen=True)
class ReleaseRegion:
    """Nothing is written into this slice's region or read out of it any more: it may go, once, before the memory does."""

    slice_id: TransferIdentity
    proofs: tuple[Proof, ...]


@dataclass(frozen=True)
class CheckReport:
    """Validate the report against the plan bound to exactly this operation; answer ReportChecked."""

    operation: OperationIdentity
    message: WriterResult


@dataclass(frozen=True)
class Scatter:
    """Move every written part of a slice to its place; answer ScatterEnded."""

    slice_id: TransferIdentity
    operations: tuple[OperationIdentity, ...]


@dataclass(frozen=True)
class StartRead:
    """Begin the reads of this operation."""

    operation: OperationIdentity


@dataclass(frozen=True)
class SayOver:
    """Tell the sender what is true of its loan: nothing is read any more, or a doubt. Kept, to be said again."""

    peer: PeerId
    message: ReadOver | Doubt


@dataclass(frozen=True)
class SliceLanded:
    """Every byte of one slice of several is in its place; others may still be missing."""

    slice_id: TransferIdentity


@dataclass(frozen=True)
class EndOutcome:
    """The logical outcome, once."""

    outcome: Outcome
    reason: str


@dataclass(frozen=True)
class Release:
    """Every operation is proven and no scatter runs: the memory may go, once. Its regions went before."""

    proofs: tuple[Proof, ...]


@dataclass(frozen=True)
class Quarantine:
    """An operation has no proof at the end of the drain clock: memory, and regions that did not go, are kept for ever."""

    reason: str
    story: tuple[str, ...]


ReceiveEffect = (
    SendRequest
    | SendCancel
    | SendRefusal
    | ReserveRegion
    | BindAndGrant
    | WithdrawRegion
    | ReleaseRegion
    | CheckReport
    | Scatter
    | Resolve
    | StartRead
    | StopPosting
    | SayOver
    | SliceLanded
    | EndOutcome
    | Release
    | Quarantine
    | NoteConflict
)


@dataclass
class _Record:
    spec: OperationSpec
    machine: Machine[ReceiveState, ReceiveTrigger]
    required: frozenset[Evidence]
    offered: bool = False  # pull: the loan is here
    landed: int = 0  # one bit per grain
    mark_count: int = 0
    wants: bool = False
    refused: bool = False
    report: WriterResult | None = None
    report_valid: bool = False
    succeeded: bool = False
    cancel_sent: bool = False
    evidence: set[Evidence] = field(default_factory=set)
    proof: Proof | None = None

    @property
    def state(self) -> ReceiveState:
        return self.machine.state

    @property
    def peer(self) -> PeerId:
        return self.spec.peer

    @property
    def pulls(self) -> bool:
        return self.spec.request.pulls


@dataclass
class _Slice:
    """What the operations of one slice share."""

    operations: tuple[OperationIdentity, ...]
    region: Region = Region.NONE
    scatter: ScatterState = ScatterState.NONE
    torn: bool = False  # the scatter failed: what it was to fill is not filled
    landed: bool = False

    @property
    def scattered(self) -> bool:
        return self.scatter is ScatterState.DONE and not self.torn


class ReceiveTransfer(Core[_Record, ReceiveEvent, ReceiveEffect]):
    """One transfer at its receiver.

    Args:
        identity: The transfer: its first slice.
        operations: At least one operation, each with its own writer record; of this transfer's slices.
        required: Evidence that proves a doubtful write dead, from the transport's class; ``required_of_reader``: a doubtful
            read of ours. ``Published`` may bring others for each peer.
        drain_deadline_s: Seconds between the first cancel, failure or doubt and quarantine.
    """

    def __init__(
        self,
        identity: TransferIdentity,
        operations: Sequence[OperationSpec],
        *,
        required: frozenset[Evidence],
        required_of_reader: frozenset[Evidence] = frozenset({Evidence.OWN_EXIT}),
        drain_deadline_s: float,
    ) -> None:
        if not operations:
            raise LocalProtocolError(f"{identity} has no operation")
        self.identity = identity
        self.outcome = Outcome.PENDING
        self.reason = ""
        self.drain_until_s: float | None = None
        self._drain_deadline_s = drain_deadline_s
        self._required, self._required_of_reader = required, required_of_reader
        super().__init__(
            {
                spec.operation: _Record(
                    spec,
                    Machine(spec.operation, ReceiveState.UNEXPOSED, RECEIVE_TRANSITIONS),
                    required_of_reader if spec.request.pulls else required,
                )
                for spec in operations
            }
        )
        if len(self._records) != len(operations):
            raise LocalProtocolError(f"{identity} names an operation twice")
        members: dict[TransferIdentity, list[OperationIdentity]] = {}
        for spec in operations:
            members.setdefault(spec.operation.transfer, []).append(spec.operation)
        if any(slice_id.of_slice(identity.slice_index) != identity for slice_id in members):
            raise LocalProtocolError(f"{identity} has an operation of another transfer")
        self._slices = {slice_id: _Slice(tuple(each)) for slice_id, each in members.items()}
        #: Requests were handed out: addresses may have left, or loans been asked for.
        self.published = False

    # -- reading

    @property
    def operations(self) -> tuple[OperationSpec, ...]:
        return tuple(record.spec for record in self._records.values())

    def bounced(self, operation: OperationIdentity) -> bool:
        """Whether this operation's bytes came through a bounce region."""
        return self._records[operation].report_valid

    def refused(self, operation: OperationIdentity) -> bool:
        return self._records[operation].refused

    def asks_for_region(self, slice_id: TransferIdentity) -> bool:
        """Whether a region of this slice is asked for, and is neither there nor withdrawn."""
        return self._slices[slice_id].region is Region.ASKED

    def filled(self, operation: OperationIdentity) -> bool:
        """Whether every byte of this operation is in its place: read, written there, or scattered."""
        record = self._records[operation]
        return record.succeeded and (not record.report_valid or self._slices[operation.transfer].scattered)

    # -- stepping

    def _anew(self) -> ReceiveTransfer:
        return ReceiveTransfer(
            self.identity,
            self.operations,
            required=self._required,
            required_of_reader=self._required_of_reader,
            drain_deadline_s=self._drain_deadline_s,
        )

    def step(self, event: ReceiveEvent, now_s: float) -> tuple[ReceiveEffect, ...]:
        """Take one event in, as ``Core.step``; after the transfer settled nothing follows from anything."""
        return () if self.settled and not self._stepping else super().step(event, now_s)

    def _take(self, event: ReceiveEvent, now_s: float) -> None:
        match event:
            case Published(required):
                self._published(required)
            case CancelAsked(reason):
                self._end(Outcome.CANCELLED, reason, now_s)
            case FailAsked(reason):
                self._end(Outcome.FAILED, reason, now_s)
            case LinkReturned(peer):
                self._ask_again(peer)
            case MarkArrived():
                self._mark(event, now_s)
            case MessageArrived(message):
                record = self._records[message.operation]
                if record.pulls:
                    self._loan_message(record, message, now_s)
                else:
                    self._message(record, message, now_s)
            case RegionReserved(slice_id):
                self._region_reserved(slice_id)
            case RegionRefused(slice_id, reason):
                self._region_refused(slice_id, reason)
            case ReportChecked():
                self._report_checked(event, now_s)
            case ScatterEnded():
                self._scatter_ended(event, now_s)
            case Resolved():
                self._read_resolved(event, now_s)
            case Progressed(progress):
                self._read_progressed(progress, now_s)
            case PeerInDoubt(peer, reason):
                self._peer_in_doubt(peer, reason, now_s)

    # -- one event each

    def _published(self, required: Mapping[PeerId, tuple[frozenset[Evidence], frozenset[Evidence]]]) -> None:
        if self.outcome is not Outcome.PENDING or self.published:
            return
        self.published = True
        for record in self._records.values():
            if record.peer in required:
                record.required = required[record.peer][record.pulls]
            record.machine.fire(_T.ASK if record.pulls else _T.PUBLISH)
            self._effects.append(SendRequest(record.spec.peer, record.spec.request))

    def _ask_again(self, peer: PeerId) -> None:
        """Repeat what that peer may not have heard. It answers with what is true by now; every message may be repeated."""
        for record in self._records.values():
            if record.peer != peer or record.state in _SETTLED or (record.pulls and record.offered):
                continue  # of a loan that was taken, the sender asks
            self._effects.append(SendRequest(peer, record.spec.request))
            if record.cancel_sent:
                self._effects.append(SendCancel(peer, Cancel(record.spec.operation, self.reason[:500])))

    def _mark(self, event: MarkArrived, now_s: float) -> None:
        record = self._records[event.operation]
        if record.pulls or record.state in (_S.PROVEN, _S.QUARANTINED):
            return  # nobody writes into what we read ourselves: such a notification says nothing
        if record.state is _S.UNEXPOSED:
            self._conflict(record, "notification before exposure", now_s)
            return
        end = event.index + event.extent
        if not 0 <= event.index < end <= event.count <= MARKS_MAX or record.mark_count not in (0, event.count):
            what = f"grains {event.index}..{end} of {event.count}, expected {record.mark_count}"
            self._conflict(record, what, now_s)
            return
        grains = ((1 << event.extent) - 1) << event.index
        if record.landed & grains not in (0, grains):
            self._conflict(record, f"grains {event.index}..{end} overlap others", now_s)
            return
        record.mark_count = event.count
        record.landed |= grains
        if record.landed != (1 << event.count) - 1:
            return
        if record.state in (_S.EXPOSED, _S.GRANTED, _S.IN_DOUBT):
            was = record.state
            record.machine.fire(_T.DONE)
            if was is not _S.GRANTED:
                record.succeeded = was is _S.EXPOSED
                self._proven(record, record.spec.operation, ProofKind.DONE)

    def _message(
        self,
        record: _Record,
        message: BounceWanted | WriterResult | Sealed | Drained | Doubt | ReadOffer | Cancel,
        now_s: float,
    ) -> None:
        if record.state in (_S.PROVEN, _S.QUARANTINED):
            return
        if record.state is _S.UNEXPOSED:
            self._conflict(record, f"{type(message).__name__} before exposure", now_s)
            return
        match message:
            case BounceWanted():
                self._wanted(record, message, now_s)
            case WriterResult():
                if message == record.report:
                    return  # repeated after a link came back
                if record.state not in (_S.GRANTED, _S.LANDED) or record.report is not None:
                    if record.state not in (_S.IN_DOUBT, _S.CONFLICTED):
                        self._conflict(record, "a report without a grant, or a second one", now_s)
                    return
                record.report = message
                self._effects.append(CheckReport(message.operation, message))
            case Sealed(reason=reason):
                if record.landed or not record.machine.allows(_T.SEALED):
                    self._conflict(record, "sealed as never posted, after a part of it was done", now_s)
                    return
                record.machine.fire(_T.SEALED, reason)
                self._proven(record, record.spec.operation, ProofKind.SEALED_NEVER_POSTED)
                self._end(Outcome.FAILED, reason, now_s)
            case Drained(posted=posted, completed=completed, reason=reason):
                if posted != completed or not record.machine.allows(_T.DRAINED):
                    self._conflict(record, f"drained with {completed} of {posted} completed", now_s)
                    return
                record.machine.fire(_T.DRAINED, reason)
                self._proven(record, record.spec.operation, ProofKind.DRAINED)
                self._end(Outcome.FAILED, reason, now_s)
            case Doubt(reason=reason):
                self._doubt(record, reason, now_s)
            case ReadOffer() | Cancel():
                self._conflict(record, f"{type(message).__name__} about a write", now_s)

    # -- pull

    def _loan_message(
        self,
        record: _Record,
        message: BounceWanted | WriterResult | Sealed | Drained | Doubt | ReadOffer | Cancel,
        now_s: float,
    ) -> None:
        if record.state in (_S.PROVEN, _S.QUARANTINED):
            if isinstance(message, ReadOffer | Cancel):
                self._say_over(record)  # it did not hear the end
            return
        match message:
            case ReadOffer() if record.state is _S.ASKED and not record.offered:
                record.offered = True
                self._effects.append(Resolve(message.operation))
            case ReadOffer() if record.offered:
                return  # repeated after a link came back; the end is told when it is there
            case Cancel(reason=reason) | Sealed(reason=reason):
                self._stop_reading(record, reason)
                self._end(Outcome.FAILED, reason, now_s)
            case _:
                self._effects.append(NoteConflict(message.operation, f"{type(message).__name__} about a loan"))

    def _read_resolved(self, event: Resolved, now_s: float) -> None:
        record = self._records[event.operation]
        if record.state is not _S.ASKED:
            return
        if event.reason:
            self._stop_reading(record, event.reason)
            self._end(Outcome.FAILED, event.reason, now_s)
            return
        record.machine.fire(_T.READ)
        self._effects.append(StartRead(event.operation))

    def _read_progressed(self, progress: JobProgress, now_s: float) -> None:
        record = self._records[progress.operation]
        if record.state not in (_S.READING, _S.STOPPING):
            return
        if progress.state == "error" and progress.posted:
            record.machine.fire(_T.ERROR, progress.detail)
            self._say(record, Doubt(progress.operation, progress.detail[:500]))
            self._end(Outcome.FAILED, progress.detail or "read error", now_s)
        elif progress.state == "done":
            record.machine.fire(_T.READ_DONE)
            record.succeeded = True
            self._read_over(record, ProofKind.COMPLETED)
        elif progress.state in ("error", "stopped"):
            record.machine.fire(_T.STOPPED, progress.detail)
            self._read_over(record, ProofKind.COMPLETED if progress.posted else ProofKind.NEVER_POSTED)
            self._end(Outcome.FAILED, progress.detail or "reading was stopped", now_s)

    def _stop_reading(self, record: _Record, reason: str) -> None:
        """As early as physics allows; the sender is told when nothing is read any more."""
        if record.state in (_S.UNEXPOSED, _S.ASKED):
            was_asked = record.state is _S.ASKED
            record.machine.fire(_T.WITHDRAW, reason)
            self._proven(record, record.spec.operation, ProofKind.NEVER_POSTED)
            if was_asked:
                self._say_over(record, reason)
        elif record.state is _S.READING:
            record.machine.fire(_T.STOP, reason)
            self._effects.append(StopPosting(record.spec.operation))

    def _read_over(self, record: _Record, kind: ProofKind) -> None:
        self._proven(record, record.spec.operation, kind)
        self._say_over(record)

    def _say_over(self, record: _Record, reason: str = "") -> None:
        if record.state is _S.PROVEN:
            reason = "" if record.succeeded else (reason or self.reason)[:500]
            self._say(record, ReadOver(record.spec.operation, record.succeeded, reason))
        else:
            self._say(record, Doubt(record.spec.operation, self.reason[:500]))

    def _say(self, record: _Record, message: ReadOver | Doubt) -> None:
        self._effects.append(SayOver(record.peer, message))

    # -- bounce regions

    def _wanted(self, record: _Record, message: BounceWanted, now_s: float) -> None:
        request, slice_id = record.spec.request, record.spec.operation.transfer
        shared = self._slices[slice_id]
        if record.wants and (message.byte_count, message.plan_digest) == (request.byte_count, request.plan_digest):
            # Repeated: the answer was lost with a link.
            if record.refused:
                self._effects.append(SendRefusal(record.spec.peer, BounceRefused(message.operation, "no_space")))
            elif record.state in (_S.GRANTED, _S.LANDED) and shared.region is Region.BOUND:
                self._effects.append(BindAndGrant(message.operation, record.spec.peer))
            return
        if record.wants or record.state is not _S.EXPOSED:
            if record.state not in (_S.IN_DOUBT, _S.CONFLICTED):
                self._conflict(record, "asks twice for a region", now_s)
            return
        refusal = ""
        if self.outcome is not Outcome.PENDING:
            refusal = f"transfer is {self.outcome.value.lower()}"
        elif not record.spec.bounce_offered:
            refusal = "disabled"
        elif message.byte_count != request.byte_count or message.plan_digest != request.plan_digest:
            # The two sides derived different plans: nothing this writer would write can be trusted to be ours.
            self._end(Outcome.FAILED, "the writer derived another plan", now_s)
            return
        elif shared.region is Region.REFUSED:
            refusal = "no_space"
        record.wants = True
        if refusal:
            record.refused = True
            self._effects.append(SendRefusal(record.spec.peer, BounceRefused(message.operation, refusal)))
            return
        if shared.region is Region.NONE:
            shared.region = Region.ASKED
            parts = tuple(
                (each.spec.operation.operation, each.spec.request.byte_count)
                for each in self._of(slice_id)
                if each.spec.bounce_offered
            )
            self._effects.append(ReserveRegion(slice_id, parts))
        elif shared.region in (Region.RESERVED, Region.BOUND):
            self._grant(record)

    def _of(self, slice_id: TransferIdentity) -> list[_Record]:
        return [self._records[operation] for operation in self._slices[slice_id].operations]

    def _grant(self, record: _Record) -> None:
        self._slices[record.spec.operation.transfer].region = Region.BOUND
        record.machine.fire(_T.GRANT)
        self._effects.append(BindAndGrant(record.spec.operation, record.spec.peer))

    def _region_reserved(self, slice_id: TransferIdentity) -> None:
        shared = self._slices[slice_id]
        if shared.region in (Region.RESERVED, Region.BOUND):
            return  # said again after an interrupt
        if shared.region is not Region.ASKED:
            raise LocalProtocolError(f"{slice_id}: a region arrived in state {shared.region.value!r}")
        shared.region = Region.RESERVED
        if self.outcome is not Outcome.PENDING:
            return
        for record in self._of(slice_id):
            if record.wants and not record.refused and record.state is _S.EXPOSED:
                self._grant(record)

    def _region_refused(self, slice_id: TransferIdentity, reason: str) -> None:
        shared = self._slices[slice_id]
        if shared.region is not Region.ASKED:
            return
        shared.region = Region.REFUSED
        for record in self._of(slice_id):
            if record.wants and not record.refused and record.state is _S.EXPOSED:
                record.refused = True
                self._effects.append(SendRefusal(record.spec.peer, BounceRefused(record.spec.operation, reason)))

    def _report_checked(self, event: ReportChecked, now_s: float) -> None:
        record = self._records[event.operation]
        if record.state in (_S.PROVEN, _S.QUARANTINED, _S.CONFLICTED):
            return
        if not event.valid:
            self._conflict(record, f"report refused: {event.reason}", now_s)
            return
        record.report_valid = True

    def _scatter_ended(self, event: ScatterEnded, now_s: float) -> None:
        shared = self._slices[event.slice_id]
        if shared.scatter in (ScatterState.BROKEN, ScatterState.DONE):
            return  # it came after the drain clock: what was given up stays so; or it is said again after an interrupt
        if shared.scatter is not ScatterState.RUNNING:
            raise LocalProtocolError(f"{event.slice_id}: a scatter ended that was not running")
        if event.succeeded:
            shared.scatter = ScatterState.DONE
            return
        shared.scatter = ScatterState.DONE if event.idle_proven else ScatterState.BROKEN
        shared.torn = True
        self._end(Outcome.FAILED, f"scatter failed: {event.reason}", now_s)

    def _peer_in_doubt(self, peer: PeerId, reason: str, now_s: float) -> None:
        for record in self._records.values():
            if record.peer == peer and record.pulls:
                self._stop_reading(record, reason)
                if not record.succeeded:
                    self._end(Outcome.FAILED, reason, now_s)
            elif record.peer == peer:
                self._doubt(record, reason, now_s)

    # -- consequences

    def _doubt(self, record: _Record, reason: str, now_s: float) -> None:
        if record.state is _S.UNEXPOSED:
            return  # that peer knows no address; the outcome below withdraws it
        if record.machine.allows(_T.DOUBT):
            was = record.state
            record.machine.fire(_T.DOUBT, reason)
            if was is _S.LANDED:
                self._proven(record, record.spec.operation, ProofKind.DONE)
        if record.state is not _S.PROVEN or not record.succeeded:
            self._end(Outcome.FAILED, reason, now_s)

    def _conflict(self, record: _Record, reason: str, now_s: float) -> None:
        if not record.machine.allows(_T.CONFLICT):
            return
        record.machine.fire(_T.CONFLICT, reason)
        self._effects.append(NoteConflict(record.spec.operation, reason))
        self._end(Outcome.FAILED, f"protocol conflict: {reason}", now_s)

    def _end(self, outcome: Outcome, reason: str, now_s: float) -> None:
        """Freeze the outcome if it is open, and start the drain clock."""
        if self.outcome is not Outcome.PENDING:
            return
        self.outcome = outcome
        self.reason = reason
        self._effects.append(EndOutcome(outcome, reason))
        if outcome is Outcome.SUCCEEDED:
            return
        self.drain_until_s = now_s + self._drain_deadline_s
        for record in self._records.values():
            if record.pulls:
                self._stop_reading(record, reason)
            elif record.state is _S.UNEXPOSED:
                record.machine.fire(_T.WITHDRAW)
                self._proven(record, record.spec.operation, ProofKind.NEVER_EXPOSED)
            elif record.state not in (_S.PROVEN, _S.QUARANTINED) and not record.cancel_sent:
                record.cancel_sent = True
                self._effects.append(SendCancel(record.spec.peer, Cancel(record.spec.operation, reason[:500])))

    def _advance(self, now_s: float) -> None:
        """What follows from the records as they are now."""
        for record in self._records.values():
            state = record.machine.state
            if state is _S.LANDED and record.report_valid:
                record.machine.fire(_T.REPORT_VALID)
                record.succeeded = True
                self._proven(record, record.spec.operation, ProofKind.DONE)
            elif state in _DOUBTFUL and record.required <= record.evidence:
                record.machine.fire(_T.CLASS_PROOF, ", ".join(sorted(e.value for e in record.evidence)))
                self._proven(record, record.spec.operation, ProofKind.CLASS)
                if record.pulls:
                    self._say_over(record)
        if self.outcome is Outcome.PENDING:
            for slice_id, shared in self._slices.items():
                if not shared.landed:
                    self._land(slice_id, shared)
            if all(shared.landed for shared in self._slices.values()):
                self._end(Outcome.SUCCEEDED, "", now_s)
        if self.drain_until_s is not None and now_s >= self.drain_until_s:
            self._deadline()
        for slice_id, shared in self._slices.items():
            if shared.region not in (Region.NONE, Region.REFUSED, Region.RETURNED):
                self._return_region(slice_id, shared)
        self._settle()

    def _land(self, slice_id: TransferIdentity, shared: _Slice) -> None:
        """A slice is scattered when all of its writers succeeded, whatever the other slices do."""
        records = self._of(slice_id)
        if not all(record.succeeded for record in records):
            return
        bounced = tuple(record.spec.operation for record in records if record.report_valid)
        if not bounced or shared.scattered:
            shared.landed = True
            if len(self._slices) > 1:
                self._effects.append(SliceLanded(slice_id))
        elif shared.scatter is ScatterState.NONE:
            shared.scatter = ScatterState.RUNNING
            self._effects.append(Scatter(slice_id, bounced))

    def _return_region(self, slice_id: TransferIdentity, shared: _Slice) -> None:
        over = self.outcome is not Outcome.PENDING
        if shared.region is not Region.BOUND:
            if over:
                shared.region = Region.NONE
                self._effects.append(WithdrawRegion(slice_id))
            return
        records = self._of(slice_id)
        idle = shared.scatter is ScatterState.DONE or (shared.scatter is ScatterState.NONE and over)
        if idle and all(record.state is _S.PROVEN for record in records):
            shared.region = Region.RETURNED
            self._effects.append(
                ReleaseRegion(slice_id, tuple(record.proof for record in records if record.proof is not None))
            )

    def _deadline(self) -> None:
        for shared in self._slices.values():
            if shared.scatter is ScatterState.RUNNING:
                shared.scatter = ScatterState.BROKEN
        for record in self._records.values():
            if record.state is _S.LANDED:
                record.machine.fire(_T.DEADLINE)
                self._proven(record, record.spec.operation, ProofKind.DONE)
            elif record.machine.allows(_T.DEADLINE):
                record.machine.fire(_T.DEADLINE)
                if record.pulls:
                    self._say_over(record)

    def _settle(self) -> None:
        scatters = [shared.scatter for shared in self._slices.values()]
        if self.outcome is Outcome.PENDING or ScatterState.RUNNING in scatters:
            return
        if not all(record.machine.terminal for record in self._records.values()):
            return
        doubtful = self._in_state(_S.QUARANTINED)
        self.settled = True
        if ScatterState.BROKEN in scatters:
            self._effects.append(Quarantine("scatter in doubt", self._stories(self._records)))
        elif doubtful:
            self._effects.append(Quarantine("no proof at the end of the drain clock", self._stories(doubtful)))
        else:
            self._effects.append(Release(self._proofs))
