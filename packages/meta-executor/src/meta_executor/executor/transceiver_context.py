"""The sending transceiver: one per rank of a context instance.

It joins three machines and lets none of them act for another: the sender's sessions (who may read this rank's blocks), the
agreement (when all ranks may activate, when all may give back) and the registry (where the request stands here). Blocks of
a request are given back on COMMIT only, and COMMIT needs this rank's own vote, which it casts when its compute has retired
and its sender has proven every operation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt

from kv_bounce_planner.planning import (
    InstanceLayout,
    KVLayout,
    RequestBlocks,
    WriterTransfer,
    decode_blocks,
    decode_layout,
    plan_writer,
)
from kv_bounce_planner.sessions import PeerEvidence, PeerId, ReceiveRequest, RequestKey, Sender, SessionEvent
from kv_bounce_planner.sessions.events import (
    CancelReceived,
    FatalDiagnosis,
    LinkLost,
    LinkRestored,
    OperationDone,
    OperationFailed,
    ReceiveRequested,
    SourceQuarantined,
    SourceReleased,
)
from meta_executor import wire
from meta_executor.executor.aux_slots import AuxSlots
from meta_executor.executor.memory import Blocks
from meta_executor.executor.ownership import Event, Leg, Outcome, Registry, Sequence, State
from meta_executor.executor.peer_watch import LOOK_EVERY_S, PeerWatch
from meta_executor.executor.transceiver import (
    AUX_BYTES,
    MOVING_CAP_S,
    ROUND_CAP_S,
    Ended,
    Expired,
    Fault,
    PeerCancelled,
    PeerReady,
    Revoked,
    TransceiverEvent,
    TransferCounters,
    decode_payload,
)
from pp_agreement import (
    Aborted,
    Agreement,
    AllgatherAgreement,
    Committed,
    Disposition,
    DomainStopped,
    DoubtExpired,
    Finalized,
    FinalizeMode,
    Key,
    Prepared,
    PublishResult,
    Reason,
    Released,
    WithdrawResult,
)
from pp_agreement import (
    Fault as DomainFault,
)
from pp_agreement import (
    Outcome as AgreedOutcome,
)
from pp_agreement import (
    Revoked as LeaseRevoked,
)

#: Asynchronous, or the blocking baseline.
AnyAgreement: TypeAlias = Agreement | AllgatherAgreement

#: How often a rank looks for KV of its own that nobody fetches (s).
_EXPIRY_SCAN_S = 0.5
#: Refused ids that are remembered (count).
_REFUSED_MAX = 65_536


@dataclass(frozen=True, slots=True)
class _AuxTransfer:
    """The first token's write, in the shape of the planner's ``WriterTransfer``: one range, never a bounce."""

    source_addresses: npt.NDArray[np.int64]
    target_addresses: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    total_bytes: int = AUX_BYTES


class ContextTransceiver:
    """See the module.

    Args:
        rank: This rank; 0 is the scheduling rank.
        registry: The rank's requests.
        blocks: The rank's KV blocks.
        sender: Serves receive requests from this rank's memory.
        agreement: ``pp_agreement.Agreement`` or its blocking baseline, over this instance's ranks.
        source: This instance's layout.
        aux: Slots for first tokens.
        transfer_timeout_s: KV that no peer fetched for so long is given up (sealed; memory follows by proof).
        lease_timeout_s: The agreement's, for the words that a client is told; None: it has none.
        process_of: A receiver's process, by its own word; "" where it is not known.
        process_is_gone: Whether the operating system says that a peer's process has ended (of this host only).
        log: Gets lines for the log.
    """

    def __init__(
        self,
        *,
        rank: int,
        is_last: bool,
        registry: Registry,
        blocks: Blocks,
        sender: Sender,
        agreement: AnyAgreement,
        source: InstanceLayout,
        aux: AuxSlots,
        transfer_timeout_s: float = 60.0,
        lease_timeout_s: float | None = None,
        process_of: Callable[[PeerId], str] = lambda peer: "",
        process_is_gone: Callable[[str], bool] = lambda process: False,
        log: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._process_of = process_of
        self._watch = PeerWatch(process_is_gone, log)
        self._lease_timeout_s = lease_timeout_s
        self._transfer_timeout_s = transfer_timeout_s
        self._next_expiry_s = 0.0
        self._draining = False
        self._rank = rank
        self._is_last = is_last
        self._registry = registry
        self._blocks = blocks
        self._sender = sender
        self._agreement = agreement
        self._source = source
        self._aux = aux
        self._layouts: dict[bytes, KVLayout] = {}
        self._events: list[TransceiverEvent] = []
        #: Sequences whose terminal vote is not cast although they are ending or have been served.
        self._unvoted: dict[int, Sequence] = {}
        #: Generation-first requests that are not activated, in the order of the broadcast.
        self._waiting: dict[int, Sequence] = {}
        #: Scheduling rank: what may be activated, in canonical order.
        self._candidates: dict[int, Sequence] = {}
        #: Destinations that have arrived, one entry per operation, by request: also of requests that this rank has not heard
        #: of yet. Bounded by the sender, which refuses more than its own limit.
        self._metadata: dict[int, list[PeerId]] = {}
        self._refused: OrderedDict[int, None] = OrderedDict()
        #: Requests whose KV is offered and whose destination is known: writes are under way.
        self._moving: set[int] = set()
        self.counters = TransferCounters()

    # -- the loop's calls ---------------------------------------------------------------------------------------------

    def admit(self, sequence: Sequence, now_s: float) -> None:
        """A request of the broadcast. Called again while it waits: no effect."""
        if sequence.admitted:
            return
        sequence.admitted = True
        request = sequence.request
        generation_first = request.generation_first
        try:
            sequence.key = self._agreement.admit(request.request_id, sequence.incarnation, ready=generation_first)
        except DomainStopped:  # the fault is among the events of the next poll
            sequence.key = Key(request.request_id, sequence.incarnation)
        self._sender.expect(self._key(sequence), self._operations_expected(sequence))
        if generation_first:
            self._waiting[request.request_id] = sequence
        elif self._rank == 0:
            self._candidates[request.request_id] = sequence

    def peer_is_ready(self, request_id: int) -> bool:
        """Whether this rank holds the request's destination."""
        return self._pending_operations(request_id) > 0

    def update_readiness(self, now_s: float) -> bool:
        """Vote READY for waiting requests whose destination is known here, every operation of it."""
        moved = False
        for sequence in list(self._waiting.values()):
            if sequence.state is not State.WAITING or sequence.voted_ready or sequence.ended_early:
                continue
            if self._pending_operations(sequence.request_id) < self._operations_expected(sequence):
                continue
            # DEFERRED goes out by itself; ABORTING and FINAL are answered by an event that is on its way.
            sequence.voted_ready = True
            self.counters.ready_votes += 1
            moved |= self._agreement.publish_ready(sequence.agreed_key) is PublishResult.PUBLISHED
        return moved

    def candidates(self) -> Iterable[Sequence]:
        """Context-first: in the order of the broadcast. Generation-first: in the order of RELEASE, one order for all."""
        return tuple(self._candidates.values())

    def activate(self, sequences: Iterable[Sequence]) -> None:
        """Named by the schedule: compute owns the blocks from now on."""
        named = list(sequences)
        # Atomic, in the order of the schedule; a context-first round has no readiness phase and is skipped there.
        self._agreement.activate([sequence.agreed_key for sequence in named])
        for sequence in named:
            self._waiting.pop(sequence.request_id, None)
            self._candidates.pop(sequence.request_id, None)
            self._registry.apply(sequence, Event.SCHEDULED)
            self._registry.open_leg(sequence, Leg.COMPUTE)
            if sequence.ended_early:
                self._registry.apply(sequence, Event.STOPPED)

    def prompt_computed(self, sequence: Sequence, first_token: int | None) -> None:
        """The whole prompt's KV is in this rank's blocks: offer them to the peer, now or when it asks."""
        request_id = sequence.request_id
        self._registry.end_leg(sequence, Leg.COMPUTE)
        if sequence.state is not State.COMPUTING:
            self._consider(sequence)
            return
        self._registry.apply(sequence, Event.COMPUTED)
        if sequence.outcome is not None:
            self._consider(sequence)
            return
        if self._is_last and sequence.request.generation_first:
            if first_token is None:
                raise ValueError(f"{sequence.describe()}: the last stage has no first token")
            self._aux.take(sequence.request_id)
            self._aux.write(sequence.request_id, first_token)
        self._registry.open_leg(sequence, Leg.TRANSCEIVER)
        if request_id in self._metadata:
            self._moving.add(request_id)
        self.counters.opened += 1
        self._sender.ready(self._key(sequence), lambda wanted: self._resolve(sequence, wanted), sequence)

    def refuse(self, request_id: int, reason: str) -> None:
        """Seal it unposted on this rank; a receive request that comes later is answered the same way."""
        if request_id in self._refused:
            return
        self._refused[request_id] = None
        while len(self._refused) > _REFUSED_MAX:
            self._refused.popitem(last=False)
        key = RequestKey(request_id, 0)
        self._metadata.pop(request_id, None)
        self._sender.fail(key, reason)
        self._sender.seal(key)
        self._sender.forget(key)

    def compute_ended(self, sequence: Sequence) -> None:
        """Compute's leg of a stopped sequence has ended."""
        self._consider(sequence)

    def stop(self, sequence: Sequence) -> None:
        """Its outcome is set. Seal what the peer could still begin; take a readiness vote back; vote when quiescent."""
        request_id = sequence.request_id
        self._candidates.pop(request_id, None)
        state = sequence.state
        if state in (State.WAITING, State.PREPARED):
            if sequence.last_step_id >= 0:
                # A schedule that names it is on its way: it will be activated here and end then.
                self._seal(sequence)
                return
            if sequence.request.generation_first:
                self._abort_readiness(sequence)
                return
            self._registry.apply(sequence, Event.ABORTED)
        elif state is State.ABORTED and sequence.request.generation_first:
            # The abort is on its way already; its end settles the rest.
            return
        elif state in (State.ACTIVATED, State.COMPUTING) or (state is State.TRANSFERRING and sequence.ended_early):
            self._registry.apply(sequence, Event.STOPPED)
        self._seal(sequence)
        self._consider(sequence)

    def progress(self, now_s: float) -> bool:
        """Move transfers."""
        events = self._sender.poll()
        for event in events:
            self._take(event)
        self._judge_peers(now_s)
        if now_s >= self._next_expiry_s:
            self._next_expiry_s = now_s + _EXPIRY_SCAN_S
            self._expire(now_s)
        return bool(events)

    def _judge_peers(self, now_s: float) -> None:
        """The end of a receiver's process: nobody fetches what it asked for, and its writes and reads are over by proof.

        Of an instance of which no process is left nothing stays: its agent is destroyed, its links and records go.
        """
        for peer in self._watch.ended(now_s):
            self._sender.peer_died(peer, PeerEvidence.PROCESS_REAPED)
            for request_id in [one for one, asked in self._metadata.items() if peer in asked]:
                self._events.append(PeerCancelled(request_id, f"its generation rank {peer.rank} has died"))
        self._watch.retire_gone(self._sender.retire_peer)

    def _expire(self, now_s: float) -> None:
        """KV that nobody fetches is not held for ever: sealing it proves that nobody will."""
        for sequence in self._registry.in_state(State.TRANSFERRING):
            if sequence.transfer_since_s == 0.0:
                sequence.transfer_since_s = now_s
            elif now_s - sequence.transfer_since_s > self._transfer_timeout_s and not sequence.sealed:
                reason = f"its KV was not fetched within {self._transfer_timeout_s:g} s"
                self._events.append(Expired(sequence.request_id, reason))

    def vote_terminal(self, now_s: float) -> bool:
        """Vote for every sequence that is quiescent here. Without proof there is no vote, only doubt."""
        cast = False
        for sequence in list(self._unvoted.values()):
            if sequence.legs:
                continue
            snapshot = self._sender.snapshot(self._key(sequence))
            if snapshot is None:
                continue
            outcome = sequence.outcome or Outcome(snapshot.outcome)
            quarantined = bool(snapshot.quarantined) or sequence.quarantined
            if quarantined:
                if not sequence.doubt_expired:
                    if not sequence.doubted:
                        sequence.doubted = True
                        self._agreement.doubt(sequence.agreed_key, Reason.DOUBT)
                    continue
                outcome = Outcome.FAILED if outcome is Outcome.COMPLETED else outcome
            self._agreement.vote_terminal(
                sequence.agreed_key,
                AgreedOutcome[outcome.value],
                Disposition.QUARANTINE if quarantined else Disposition.RELEASE,
                _reason(sequence, outcome),
            )
            del self._unvoted[sequence.request_id]
            self._registry.apply(sequence, Event.QUIESCED)
            cast = True
        return cast

    def poll(self, now_s: float) -> list[TransceiverEvent]:
        """Agreement frames in and out; what happened."""
        for event in self._agreement.poll():
            if isinstance(event, DomainFault):
                self._events.append(Fault(f"agreement: {event.code}: {event.detail}"))
                continue
            key = getattr(event, "key", None)
            sequence = self._registry.get(key.request_id) if key is not None else None
            if sequence is not None:
                self._decided(sequence, event)
        events, self._events = self._events, []
        return events

    @property
    def poll_cap_s(self) -> float | None:
        """Writes are under way; or a round is open, as for any live request, or the proof of a drain is under way."""
        if self._moving:
            return MOVING_CAP_S
        if len(self._registry) or self._draining:
            return ROUND_CAP_S
        return LOOK_EVERY_S if self._watch.looking else None

    def start_drain(self, last_incarnation: int) -> None:
        """Begin the proof over all ranks.

        The agreement of the scheduling rank revokes every lease that is not scheduled, now: none of them may be chosen any
        more, although their aborts are still on their way.
        """
        self._draining = True
        for request_id, sequence in list(self._candidates.items()):
            if sequence.request.generation_first:
                del self._candidates[request_id]
        self._agreement.start_drain(last_incarnation)

    @property
    def links_away_count(self) -> int:
        """Peers whose control link is away (count)."""
        return self._watch.away_count

    @property
    def lockstep(self) -> bool:
        """Whether the agreement is the blocking baseline."""
        return bool(self._agreement.mode == "allgather")

    @property
    def drained(self) -> bool:
        """Every rank has heard of every incarnation and decided it, with equal digests."""
        return bool(self._agreement.drain_state().drained)

    @property
    def pre_active_count(self) -> int:
        """Generation-first requests that are admitted and not activated (count)."""
        return len(self._waiting)

    # -- agreement ----------------------------------------------------------------------------------------------------

    def _decided(self, sequence: Sequence, event: object) -> None:
        request_id = sequence.request_id
        if isinstance(event, Prepared):
            if self._agreement.acknowledge_prepare(sequence.agreed_key):
                self._registry.apply(sequence, Event.LEASED)
        elif isinstance(event, Released):
            if sequence.outcome is not None:
                self._agreement.revoke(sequence.agreed_key, Reason.CANCELLED)
            elif not self._draining:
                self._candidates[request_id] = sequence
        elif isinstance(event, LeaseRevoked):
            self._candidates.pop(request_id, None)
            if self._settle_unscheduled(sequence, event.reason):
                self._events.append(Revoked(sequence))
        elif isinstance(event, Aborted):
            self._candidates.pop(request_id, None)
            self._registry.apply(sequence, Event.ABORTED)
            self._agreement.acknowledge_abort(sequence.agreed_key)
        elif isinstance(event, Finalized):
            self._finalized(sequence, event)
        elif isinstance(event, DoubtExpired):
            sequence.doubt_expired = True
        elif isinstance(event, Committed):
            self._committed(sequence, Outcome(event.outcome.name), event.disposition is Disposition.QUARANTINE)

    def _finalized(self, sequence: Sequence, event: Finalized) -> None:
        sequence.voted_ready = False
        if event.mode is FinalizeMode.REOPEN:
            # A transient withdrawal somewhere: the next attempt opens when the ranks vote again.
            sequence.key = Key(sequence.request_id, sequence.incarnation, sequence.agreed_key.attempt + 1)
            self._registry.apply(sequence, Event.REOPENED)
            if sequence.outcome is not None:
                self._abort_readiness(sequence)
            return
        self._waiting.pop(sequence.request_id, None)
        self._settle_unscheduled(sequence, event.reason)
        self._seal(sequence)
        if event.mode is FinalizeMode.TERMINAL:
            self._consider(sequence)
            return
        # Every rank has let go of a request that none has activated, and here it is sealed unposted: nothing of it was
        # computed or exposed, so what rank 0 had set aside for it may be given to another.
        self._leave(sequence, sequence.outcome or Outcome.CANCELLED)

    def _settle_unscheduled(self, sequence: Sequence, reason: Reason) -> bool:
        """How a request ends that was never activated, on every rank by the reason that all of them hear. Returns whether it
        was settled now; one that was stopped before keeps the words of its stop."""
        if reason is Reason.LEASE_EXPIRED:
            words = f"not scheduled within {self._lease_timeout_s or 0.0:g} s after every rank was ready for it"
            settled = self._registry.end(sequence, Outcome.FAILED, words, wire.LEASE_EXPIRED)
            self.counters.leases_expired += settled
            return settled
        if reason is Reason.DRAIN:
            return self._registry.end(sequence, Outcome.FAILED, "this instance is draining", wire.DRAINING)
        return self._registry.end(sequence, Outcome.CANCELLED, "aborted before activation", wire.CANCELLED)

    def _abort_readiness(self, sequence: Sequence) -> None:
        """Before activation: by withdrawal while this rank has not granted its lease, by revocation on rank 0 afterwards."""
        taken = self._agreement.withdraw(sequence.agreed_key, Reason.CANCELLED)
        if taken is WithdrawResult.LEASED and self._rank == 0:
            self._agreement.revoke(sequence.agreed_key, Reason.CANCELLED)

    def _committed(self, sequence: Sequence, outcome: Outcome, quarantined: bool) -> None:
        sequence.outcome = outcome
        sequence.quarantined = quarantined
        self._leave(sequence, outcome)

    def _leave(self, sequence: Sequence, outcome: Outcome) -> None:
        """Every rank agreed: the only place where a context rank gives blocks back."""
        if sequence.quarantined:
            self.counters.quarantined += 1
            self._blocks.quarantine(sequence, sequence.reason or "quarantined by agreement")
            self._aux.quarantine(sequence.request_id)
        else:
            self._blocks.release(sequence)
            self._aux.release(sequence.request_id)
        self._sender.forget(self._key(sequence))
        self._metadata.pop(sequence.request_id, None)
        self._registry.apply(sequence, Event.COMMITTED)
        if outcome is Outcome.COMPLETED:
            self.counters.succeeded += 1
        elif outcome is Outcome.FAILED:
            self.counters.failed += 1
        else:
            self.counters.cancelled += 1
        self._events.append(
            Ended(sequence.request_id, outcome, sequence.quarantined, sequence.reason, sequence.error_code)
        )

    # -- sender -------------------------------------------------------------------------------------------------------

    def _key(self, sequence: Sequence) -> RequestKey:
        return RequestKey(sequence.request_id, 0)

    def _pending_operations(self, request_id: int) -> int:
        return len(self._metadata.get(request_id, ()))

    def _seal(self, sequence: Sequence) -> None:
        if sequence.sealed:
            return
        sequence.sealed = True
        key = self._key(sequence)
        if sequence.ended_early:
            self._sender.fail(key, sequence.reason or "cancelled")
        self._sender.seal(key)

    def _consider(self, sequence: Sequence) -> None:
        """An ending sequence without open legs waits for its vote."""
        if sequence.sealed and sequence.state in (State.ABORTED, State.ENDING, State.TRANSFERRING):
            self._unvoted[sequence.request_id] = sequence

    def _resolve(self, sequence: Sequence, wanted: ReceiveRequest) -> WriterTransfer:
        """Where this rank's share of a receive request is read and written. Called by the sender inside its poll."""
        payload = decode_payload(wanted.payload)
        if wanted.role == "AUX":
            address = self._aux.take(sequence.request_id)
            # The session reads these columns only; it plans nothing for an operation of this role.
            return cast(WriterTransfer, _AuxTransfer(_one(address), _one(payload.aux_address), _one(AUX_BYTES)))
        target = self._layouts.get(payload.layout)
        if target is None:
            target = decode_layout(payload.layout)
            if len(self._layouts) >= 1024:
                self._layouts.clear()
            self._layouts[payload.layout] = target
        target_blocks, tokens = decode_blocks(payload.blocks)
        source_blocks = RequestBlocks.single(sequence.block_ids)
        transfer = plan_writer(self._source, self._rank, source_blocks, target, target_blocks, tokens)
        if transfer is None:
            raise ValueError(f"{sequence.describe()}: rank {self._rank} has nothing to write of tokens {tokens}")
        return transfer

    def _take(self, event: SessionEvent) -> None:
        if isinstance(event, FatalDiagnosis):
            self._events.append(Fault(f"{event.reason}: {event.story}"))
        elif isinstance(event, LinkLost):
            self._watch.know(event.peer, self._process_of(event.peer))
            self._watch.away(event.peer, event.reason)
        elif isinstance(event, LinkRestored):
            self._watch.back(event.peer)
        elif isinstance(event, ReceiveRequested):
            request_id = event.request.request_id
            self._metadata.setdefault(request_id, []).append(event.peer)
            self._watch.know(event.peer, self._process_of(event.peer))
            sequence = self._registry.get(request_id)
            if sequence is not None and Leg.TRANSCEIVER in sequence.legs:
                self._moving.add(request_id)
            self._events.append(PeerReady(request_id))
        elif isinstance(event, CancelReceived):
            self._metadata.pop(event.request.request_id, None)
            self._events.append(PeerCancelled(event.request.request_id, "the generation instance gave it up"))
        elif isinstance(event, OperationDone):
            self.counters.bytes_moved += event.byte_count
            self._served(event.request.request_id)
        elif isinstance(event, OperationFailed):
            self._served(event.request.request_id)
        elif isinstance(event, SourceReleased):
            self._source_settled(event.claim, quarantined=False)
        elif isinstance(event, SourceQuarantined):
            self._source_settled(event.claim, quarantined=True)

    def _served(self, request_id: int) -> None:
        """One operation has ended. After the last one nothing may begin any more."""
        sequence = self._registry.get(request_id)
        if sequence is None:
            return
        sequence.operations_ended += 1
        if sequence.operations_ended >= self._operations_expected(sequence) and sequence.state is State.TRANSFERRING:
            self._seal(sequence)
            self._consider(sequence)

    def _operations_expected(self, sequence: Sequence) -> int:
        """One operation per writer, and the first token from the last stage where the peer waits for it."""
        return 2 if sequence.request.generation_first and self._is_last else 1

    def _source_settled(self, claim: object, *, quarantined: bool) -> None:
        if not isinstance(claim, Sequence):
            raise TypeError(f"the sender returned a claim that is not ours: {claim!r}")
        claim.quarantined = claim.quarantined or quarantined
        self._registry.end_leg(claim, Leg.TRANSCEIVER)
        self._moving.discard(claim.request_id)
        self._consider(claim)


def _reason(sequence: Sequence, outcome: Outcome) -> Reason:
    """The agreement's code for why this rank votes so."""
    if outcome is Outcome.COMPLETED:
        return Reason.NONE
    if sequence.error_code == "DEADLINE":
        return Reason.TIMEOUT
    return Reason.CANCELLED if outcome is Outcome.CANCELLED else Reason.FAILED


def _one(value: int) -> npt.NDArray[np.int64]:
    return np.array([value], np.int64)
