"""The receiving transceiver: one per attention-DP rank of a generation instance.

It owns blocks from the moment it allocates them for a request until the transfer is proven: a destination is published with
the blocks already owned, and they go on to compute (success) or back (failure) only with the receiver's proof.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kv_bounce_planner.planning import (
    InstanceLayout,
    KVLayout,
    KVTransferError,
    RequestBlocks,
    Tier,
    TokenRange,
    coalesced_marker,
    decode_instance,
    encode_blocks,
    encode_layout,
    plan_destination,
)
from kv_bounce_planner.sessions import (
    ExpectedOperation,
    PeerEvidence,
    PeerId,
    Receiver,
    SessionEvent,
    TransferIdentity,
)
from kv_bounce_planner.sessions.events import (
    FatalDiagnosis,
    LinkLost,
    LinkRestored,
    MemoryQuarantined,
    MemoryReleased,
    TransferCancelled,
    TransferSucceeded,
)
from kv_bounce_planner.sessions.events import TransferFailed as SessionFailed
from meta_executor.executor.aux_slots import AuxSlots
from meta_executor.executor.memory import PlannedBlocks
from meta_executor.executor.messages import Peer
from meta_executor.executor.ownership import Event, Leg, Outcome, Registry, Sequence, State
from meta_executor.executor.peer_watch import LOOK_EVERY_S, PeerWatch
from meta_executor.executor.tiers import TierPolicy
from meta_executor.executor.transceiver import (
    AUX_BYTES,
    EXPOSED_CAP_S,
    MOVING_CAP_S,
    Arrived,
    Ended,
    Fault,
    Owned,
    ReceivePayload,
    TransceiverEvent,
    TransferCounters,
    TransferFailed,
    encode_payload,
)

#: Session events that belong to one transfer of ours.
_OfTransfer = (TransferSucceeded, SessionFailed, TransferCancelled, MemoryReleased, MemoryQuarantined)
#: Destinations that an iteration publishes (count): one costs about 0.2 ms, and a step that ends meanwhile waits; an iteration
#: for each would cost as much again.
PUBLISHED_PER_TURN_MAX = 2


class GenerationTransceiver:
    """See the module.

    Args:
        self_id: This rank's process; ``generation`` is the instance's endpoint generation.
        registry: The rank's requests.
        blocks: The rank's KV blocks.
        receiver: Publishes destinations and proves what has come.
        connect: Opens the control channel to a peer rank: (peer, address).
        layout: How this rank lays its KV out.
        aux: Slots for first tokens.
        tiers: Chooses direct or bounce.
        open_transfers_max: Transfers at once (count); more requests wait without owning anything.
        transfer_timeout_s: A transfer older than this is failed (logically; its memory follows by proof).
        log: Gets the marker of the first coalesced transfer.
        process_is_gone: Whether the operating system says that a peer's process has ended (of this host only).
    """

    def __init__(
        self,
        *,
        self_id: PeerId,
        registry: Registry,
        blocks: PlannedBlocks,
        receiver: Receiver,
        connect: Callable[[PeerId, str], None],
        layout: KVLayout,
        aux: AuxSlots,
        tiers: TierPolicy,
        open_transfers_max: int = 256,
        transfer_timeout_s: float = 60.0,
        log: Callable[[str], None] = lambda text: None,
        process_is_gone: Callable[[str], bool] = lambda process: False,
    ) -> None:
        self._log = log
        self._watch = PeerWatch(process_is_gone, log)
        self._self_id = self_id
        self._registry = registry
        self._blocks = blocks
        self._receiver = receiver
        self._connect = connect
        self._layout = layout
        self._layout_bytes = encode_layout(layout)
        self._aux = aux
        self._tiers = tiers
        self._open_transfers_max = open_transfers_max
        self._transfer_timeout_s = transfer_timeout_s
        self._peers: dict[str, InstanceLayout] = {}
        self._waiting: deque[Sequence] = deque()
        self._open: dict[TransferIdentity, Sequence] = {}
        #: Of them, in the context-first schedule (count).
        self._begun = 0
        #: Ended without any transfer, or with the last proof: reported by the next poll.
        self._ended: list[TransceiverEvent] = []
        self._released: list[Sequence] = []
        self.counters = TransferCounters()

    # -- the loop's calls ---------------------------------------------------------------------------------------------

    def register_peer(self, peer: Peer) -> None:
        """Connect to every rank of a context instance. A peer that is known already is left as it is."""
        if peer.name in self._peers:
            return
        if peer.replaces:
            before, _, its_generation = peer.replaces.partition("/")
            self.retire_peer(before, its_generation)
        layout = decode_instance(peer.layout)
        instance_id, generation = peer.name.split("/", 1)
        for rank, address in enumerate(peer.control_addresses):
            self._connect(PeerId(instance_id, generation, rank), address)
            if rank < len(peer.processes):
                self._watch.know(PeerId(instance_id, generation, rank), peer.processes[rank])
        # Agents are introduced now, not when the first request waits for them.
        self._receiver.introduce([PeerId(instance_id, generation, rank) for rank in range(len(peer.control_addresses))])
        self._peers[peer.name] = layout

    def retire_peer(self, instance_id: str, generation: str) -> None:
        """A context instance is gone for good: its operations fail, and what the transport class proves is proven.

        Its processes are judged by their own end first: writes that a sender executes are over only with it.
        """
        name = f"{instance_id}/{generation}"
        if name in self._peers:
            self._receiver.retire_peer(instance_id, generation)
            self._watch.forget((instance_id, generation))
            del self._peers[name]

    def admit(self, sequence: Sequence, now_s: float) -> None:
        """Queue for blocks. Idempotent."""
        if sequence.state is State.WAITING and not sequence.admitted:
            sequence.admitted = True
            self._waiting.append(sequence)

    def update_readiness(self, now_s: float) -> bool:
        """Publish the destinations of the first waiting requests, if there are blocks; of more in the next iteration."""
        published = 0
        while self._waiting and published < PUBLISHED_PER_TURN_MAX and len(self._open) < self._open_transfers_max:
            sequence = self._waiting[0]
            if sequence.state is State.WAITING and not sequence.ended_early:
                if not self._publish(sequence, now_s):
                    break
                published += 1
            self._waiting.popleft()
        return published > 0

    def stop(self, sequence: Sequence) -> None:
        """End early (or after the last token): what is not exposed goes back at once, the rest follows by proof."""
        state = sequence.state
        if state is State.WAITING:
            self._registry.apply(sequence, Event.ABORTED)
            self._release(sequence)
        elif state is State.TRANSFERRING:
            self._registry.apply(sequence, Event.STOPPED)
            self._receiver.cancel(self._identity(sequence), sequence.reason or "cancelled")
        elif state in (State.ACTIVATED, State.COMPUTING):
            self._registry.apply(sequence, Event.STOPPED)
        self._settle(sequence)

    def compute_ended(self, sequence: Sequence) -> None:
        """Compute's leg of an ending sequence has ended: give back what nobody else touches."""
        self._settle(sequence)

    def progress(self, now_s: float) -> bool:
        """Move transfers."""
        events = self._receiver.poll()
        for event in events:
            self._take(event)
        self._judge_peers(now_s)  # what a peer said before its link ended has been heard by now
        self._end_late(now_s)
        return bool(events)

    def _end_late(self, now_s: float) -> None:
        """They stand in the order in which they were opened: most calls look at one of hundreds."""
        late = []
        for sequence in self._open.values():
            if now_s - sequence.transfer_since_s <= self._transfer_timeout_s:
                break
            if sequence.state is State.TRANSFERRING:
                late.append(sequence)
        for sequence in late:
            self._fail(sequence, f"the transfer did not end within {self._transfer_timeout_s:g} s")
            self._receiver.cancel(self._identity(sequence), "timeout")

    def _judge_peers(self, now_s: float) -> None:
        """A link that is away proves nothing about memory; the end of the process that executes writes may.

        An instance of which no process is left does not come back under this name: its agent is destroyed, which proves the
        rest where the receiver's own agent executes the writes.
        """
        for peer in self._watch.ended(now_s):
            self._receiver.peer_died(peer, PeerEvidence.PROCESS_REAPED)
        self._watch.retire_gone(self.retire_peer)

    def poll(self, now_s: float) -> list[TransceiverEvent]:
        """What has happened."""
        events, self._ended = self._ended, []
        return events

    @property
    def poll_cap_s(self) -> float | None:
        """Destinations are published: in the context-first schedule the writers begin at once."""
        if not self._open:
            return LOOK_EVERY_S if self._watch.looking else None
        return MOVING_CAP_S if self._begun else EXPOSED_CAP_S

    @property
    def drained(self) -> bool:
        """No transfer's memory is in anybody's hands but ours."""
        return not self._open and not self._waiting

    @property
    def links_away_count(self) -> int:
        """Peers whose control link is away (count)."""
        return self._watch.away_count

    @property
    def open_count(self) -> int:
        """Transfers whose memory is not proven yet (count)."""
        return len(self._open)

    # -- within -------------------------------------------------------------------------------------------------------

    def _identity(self, sequence: Sequence) -> TransferIdentity:
        return TransferIdentity(sequence.request_id, 0, self._self_id.generation, self._self_id.rank)

    def _publish(self, sequence: Sequence, now_s: float) -> bool:
        """Own blocks and tell every writer. False: no room now, nothing changed."""
        request = sequence.request
        if request.prefills_here:
            return self._own(sequence)
        source = self._peers.get(request.peer)
        if source is None:
            # The item that names a peer comes before the request in the same broadcast: this one has gone since.
            self._fail(sequence, f"peer {request.peer} is gone")
            self._registry.apply(sequence, Event.ABORTED)
            self._release(sequence)
            return True
        if self._aux.free_count == 0:
            return False
        if not self._acquire(sequence):
            return False
        self._registry.open_leg(sequence, Leg.TRANSCEIVER)
        self._registry.apply(sequence, Event.PUBLISHED)
        sequence.transfer_since_s = now_s
        sequence.launched = sequence.retired = request.prompt_count
        try:
            operations = self._operations(sequence, source)
            identity = self._identity(sequence)
            self._receiver.open(identity, operations, sequence)
        except KVTransferError as error:
            # Nothing has left this process: the blocks are ours alone.
            self._fail(sequence, f"no plan: {error}")
            self._registry.end_leg(sequence, Leg.TRANSCEIVER)
            self._aux.release(sequence.request_id)
            self._settle(sequence)
            return True
        self._open[identity] = sequence
        self._begun += not request.generation_first
        self.counters.opened += 1
        return True

    def _acquire(self, sequence: Sequence) -> bool:
        """Blocks for prompt and answer; the last token's own KV is never needed."""
        request = sequence.request
        return self._blocks.acquire(sequence, request.prompt_count + request.sampling.max_tokens - 1)

    def _own(self, sequence: Sequence) -> bool:
        """Own blocks for a prompt that is computed here: no peer ever hears of them. False: no room now."""
        if not self._acquire(sequence):
            return False
        self._registry.apply(sequence, Event.OWNED)
        sequence.launched = sequence.retired = sequence.cached_count
        self._ended.append(Owned(sequence))
        return True

    def _operations(self, sequence: Sequence, source: InstanceLayout) -> list[ExpectedOperation]:
        request = sequence.request
        tables = RequestBlocks.single(sequence.block_ids)
        tokens = TokenRange(sequence.cached_count, request.prompt_count)
        plan = plan_destination(source, self._layout, tables, tokens)
        instance_id, generation = request.peer.split("/", 1)
        blocks = encode_blocks(tables, tokens)
        payload = encode_payload(ReceivePayload(self._layout_bytes, blocks))
        operations = []
        for rank, writer in plan.writers.items():
            tier, reason = self._tiers.choose(writer)
            if tier is not Tier.BOUNCE:
                # An offered bounce is settled by the writer when its prefill ends; the session says why then.
                self.counters.count_reason(reason)
            operations.append(
                ExpectedOperation(
                    peer=PeerId(instance_id, generation, rank),
                    byte_count=writer.total_bytes,
                    payload=payload,
                    plan=writer,
                    tier="bounce" if tier is Tier.BOUNCE else "direct",
                )
            )
        if request.generation_first:
            address = self._aux.take(request.request_id)
            last_rank = len(source.ranks) - 1
            operations.append(
                ExpectedOperation(
                    peer=PeerId(instance_id, generation, last_rank),
                    byte_count=AUX_BYTES,
                    payload=encode_payload(ReceivePayload(b"", b"", address)),
                    role="AUX",
                )
            )
        return operations

    def _take(self, event: SessionEvent) -> None:
        if isinstance(event, FatalDiagnosis):
            self._ended.append(Fault(f"{event.reason}: {event.story}"))
            return
        if isinstance(event, LinkLost):
            self._watch.away(event.peer, event.reason)
        elif isinstance(event, LinkRestored):
            self._watch.back(event.peer)
        if not isinstance(event, _OfTransfer):
            return
        sequence = self._open.get(event.identity)
        if sequence is None:
            return
        if isinstance(event, TransferSucceeded):
            self.counters.succeeded += 1
            self._count_tiers(event)
            if sequence.ended_early or sequence.state is not State.TRANSFERRING:
                return
            sequence.arrived = True
        elif isinstance(event, SessionFailed):
            self.counters.failed += 1
            self._fail(sequence, event.reason)
        elif isinstance(event, TransferCancelled):
            self.counters.cancelled += 1
            self._fail(sequence, event.reason, Outcome.CANCELLED)
        elif isinstance(event, MemoryReleased):
            self._closed(event.identity)
            self._registry.end_leg(sequence, Leg.TRANSCEIVER)
            self._memory_proven(sequence)
        elif isinstance(event, MemoryQuarantined):
            self._closed(event.identity)
            self.counters.quarantined += 1
            sequence.quarantined = True
            self._aux.quarantine(sequence.request_id)
            self._registry.end_leg(sequence, Leg.TRANSCEIVER)
            self._fail(sequence, event.reason)
            self._settle(sequence)

    def _closed(self, identity: TransferIdentity) -> None:
        self._begun -= not self._open.pop(identity).request.generation_first

    def _count_tiers(self, event: TransferSucceeded) -> None:
        self.counters.bytes_moved += event.byte_count
        bounced = [reason for _, tier, reason in event.tiers if tier == "bounce"]
        if bounced:
            if self.counters.coalesced == 0:
                self._mark(event, len(bounced))
            self.counters.coalesced += 1
        else:
            self.counters.direct += 1
        for reason in bounced:
            self.counters.count_reason(reason)

    def _mark(self, event: TransferSucceeded, writer_count: int) -> None:
        sequence = self._open[event.identity]
        self._log(coalesced_marker(len(sequence.block_ids), event.byte_count, writer_count))

    def _memory_proven(self, sequence: Sequence) -> None:
        if not sequence.arrived or sequence.ended_early or sequence.state is not State.TRANSFERRING:
            self._aux.release(sequence.request_id)
            self._settle(sequence)
            return
        first_token = sequence.request.first_token
        if sequence.request.generation_first:
            first_token = self._aux.read(sequence.request_id)
            if first_token is None:
                self._aux.release(sequence.request_id)
                self._fail(sequence, "the first token did not arrive with the KV")
                self._settle(sequence)
                return
        self._aux.release(sequence.request_id)
        self._registry.apply(sequence, Event.ARRIVED)
        self._ended.append(Arrived(sequence.request_id, first_token))

    def _fail(self, sequence: Sequence, reason: str, outcome: Outcome = Outcome.FAILED) -> None:
        if self._registry.end(sequence, outcome, reason, "TRANSFER_FAILED"):
            self._ended.append(TransferFailed(sequence))
        if sequence.state is State.TRANSFERRING:
            self._registry.apply(sequence, Event.STOPPED)

    def _settle(self, sequence: Sequence) -> None:
        """Make an ending sequence terminal when no leg is open."""
        if sequence.state is State.ENDING and not sequence.legs:
            self._registry.apply(sequence, Event.QUIESCED)
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        if sequence.quarantined:
            self._blocks.quarantine(sequence, sequence.reason)
        else:
            self._blocks.release(sequence)
        self._registry.apply(sequence, Event.COMMITTED)
        self._ended.append(Ended(sequence.request_id, sequence.outcome or Outcome.COMPLETED, sequence.quarantined))
