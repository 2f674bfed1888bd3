"""Shells around the pure cores: one ``Receiver`` and one ``Sender`` per rank process.

A shell owns queues, performs effects and knows no protocol: every decision is the core's. One lock orders publication
against cancellation; it is never held across I/O, validation or copies. Everything is bounded per poll, in frames and in
time; what a poll did not reach, the next one continues.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, cast

import numpy as np

from kv_bounce_planner import _receive_core as rc
from kv_bounce_planner import _send_core as sc
from kv_bounce_planner._arena import AdvertisedReservation, BounceArena, BoundRegion, Reservation
from kv_bounce_planner._errors import KVTransferError, LocalProtocolError, RemoteProtocolError, TransportError
from kv_bounce_planner._gather import Copier, CopyHandle, HostCopier, PacksFragments, PreparedCopy
from kv_bounce_planner._identity import (
    OperationIdentity,
    PeerId,
    RequestKey,
    TransferIdentity,
)
from kv_bounce_planner._layout import read_only
from kv_bounce_planner._messages import (
    PAYLOAD_BYTES_MAX,
    PROTOCOL_VERSION,
    BounceGrant,
    BounceRefused,
    BounceWanted,
    Cancel,
    Doubt,
    Drained,
    Hello,
    Message,
    ReceiveRequest,
    Sealed,
    WriterResult,
    decode_message,
    encode_message,
)
from kv_bounce_planner._ownership_errors import (
    AddressStillExposed,
    CapacityExceeded,
    ChannelError,
    DuplicateTransfer,
    StaleIdentity,
    TransfersOutstanding,
    WouldBlock,
)
from kv_bounce_planner._proof import Evidence, OwnedMemory, ProvenMemory
from kv_bounce_planner._quarantine import QuarantineLedger
from kv_bounce_planner._send_core import TerminalSnapshot
from kv_bounce_planner._states import Outcome, SendState
from kv_bounce_planner._transport import (
    AgentInfo,
    ArrivedMark,
    ControlChannel,
    Int64Array,
    MemoryKind,
    Transport,
    WriteJob,
)

if TYPE_CHECKING:
    from kv_bounce_planner._plan import WriterPlan, WriterTransfer

#: Notifications kept while the writer's Hello is still under way, and receipts kept for repeated cancels (counts).
UNMATCHED_MARKS_MAX: Final = 4096
RECEIPTS_MAX: Final = 262_144
OVER_MAX: Final = 262_144


@dataclass(frozen=True)
class SessionConfig:
    """Bounds of a Receiver or Sender.

    Args:
        transfers_max: Open transfers (receiver) or requests (sender), count, >= 1. Beyond: CapacityExceeded, or Sealed.
        operations_max: Operations per transfer or request, count, >= 1.
        frames_per_poll_max: Control frames taken in one poll, count, >= 1.
        frames_queued_max: Frames waiting for one peer's channel, count, >= 1. Beyond, that peer is in doubt.
        drain_deadline_s: From the first cancel, failure or doubt to quarantine, > 0.
        bounce_wait_s: How long a writer waits for a region before it is told to write in place, >= 0.
        quarantine_bytes_max: Memory that may be quarantined before the diagnosis is fatal, bytes, >= 0.
        copies_per_poll_max: Gathers or scatters submitted in one poll, count, >= 1.
        gathers_ahead_max: Slots that may be used at once to gather while a region is still asked for, count, >= 0. Each
            is given back when a granted operation waits for one.
    """

    transfers_max: int = 4096
    operations_max: int = 1024
    frames_per_poll_max: int = 64
    frames_queued_max: int = 65536
    drain_deadline_s: float = 30.0
    bounce_wait_s: float = 0.2
    quarantine_bytes_max: int = 1 << 30
    copies_per_poll_max: int = 4
    gathers_ahead_max: int = 1

    def __post_init__(self) -> None:
        for name in (
            "transfers_max",
            "operations_max",
            "frames_per_poll_max",
            "frames_queued_max",
            "copies_per_poll_max",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} wants >= 1, got {getattr(self, name)}")
        if self.drain_deadline_s <= 0:
            raise ValueError(f"drain_deadline_s wants > 0, got {self.drain_deadline_s}")
        for name in ("bounce_wait_s", "quarantine_bytes_max", "gathers_ahead_max"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} wants >= 0, got {getattr(self, name)}")


# --- what poll() reports --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TransferSucceeded:
    """KV is in place. ``tiers``: per operation, ``bounce`` or ``direct`` and why."""

    identity: TransferIdentity
    tiers: tuple[tuple[OperationIdentity, Literal["direct", "bounce"], str], ...]
    byte_count: int


@dataclass(frozen=True)
class TransferFailed:
    """Logical end only: the blocks are still owned."""

    identity: TransferIdentity
    reason: str


@dataclass(frozen=True)
class TransferCancelled:
    """Logical end only: the blocks are still owned."""

    identity: TransferIdentity
    reason: str


@dataclass(frozen=True)
class MemoryReleased:
    """Nothing can land any more: exactly once per transfer, never after MemoryQuarantined."""

    identity: TransferIdentity
    claim: Any
    proven: ProvenMemory[Any]


@dataclass(frozen=True)
class MemoryQuarantined:
    """These blocks are never used again in this process."""

    identity: TransferIdentity
    claim: Any
    reason: str


@dataclass(frozen=True)
class FatalDiagnosis:
    """The quarantine budget is spent. Stop the domain; nothing more is released here."""

    reason: str
    story: tuple[str, ...]


@dataclass(frozen=True)
class ReceiveRequested:
    """A receiver published its destination: its metadata is here."""

    request: RequestKey
    operation: OperationIdentity
    peer: PeerId
    byte_count: int


@dataclass(frozen=True)
class OperationDone:
    request: RequestKey
    operation: OperationIdentity
    tier: Literal["direct", "bounce"]
    byte_count: int


@dataclass(frozen=True)
class OperationFailed:
    """This operation's bytes were not all delivered; ``disposition`` is what is physically true of it."""

    request: RequestKey
    operation: OperationIdentity
    disposition: str
    reason: str


@dataclass(frozen=True)
class CancelReceived:
    request: RequestKey
    operation: OperationIdentity
    reason: str


@dataclass(frozen=True)
class RequestServed:
    """The expected number of operations has ended, well or not."""

    request: RequestKey


@dataclass(frozen=True)
class SourceReleased:
    """Sealed, and no write reads the source any more: exactly once."""

    request: RequestKey
    claim: Any
    proven: ProvenMemory[Any]


@dataclass(frozen=True)
class SourceQuarantined:
    request: RequestKey
    claim: Any
    reason: str


SessionEvent = (
    TransferSucceeded
    | TransferFailed
    | TransferCancelled
    | MemoryReleased
    | MemoryQuarantined
    | FatalDiagnosis
    | ReceiveRequested
    | OperationDone
    | OperationFailed
    | CancelReceived
    | RequestServed
    | SourceReleased
    | SourceQuarantined
)


@dataclass(frozen=True)
class DrainReport:
    """What still owns memory: empty means quiescent."""

    open: tuple[object, ...]
    in_doubt: tuple[OperationIdentity, ...]
    quarantined_bytes: int

    @property
    def quiescent(self) -> bool:
        return not self.open


class PeerEvidence:
    """What a host may know of a peer's process."""

    #: It was waited for, or its pidfd reported the end.
    PROCESS_REAPED: Final = "process reaped"
    #: A connection broke, or it is silent. Proves nothing.
    CONNECTION_LOST: Final = "connection lost"


class Reports(Protocol):
    """How a bounce write is described to the receiver, and checked there."""

    def encode(self, transfer: WriterTransfer, operation: OperationIdentity, base_address: int) -> bytes: ...

    def check(self, plan: WriterPlan, report: bytes, operation: OperationIdentity, base_address: int) -> None:
        """Raise a KVTransferError unless the report describes exactly the plan's bytes at this base."""
        ...


class PlannerReports:
    """The planner's reports: the plan's digest, or with ``explicit`` every fragment."""

    def __init__(self, *, explicit: bool = False) -> None:
        # Imported here, once: sessions need no planner unless they bounce.
        from kv_bounce_planner import _codec, _report

        self._explicit, self._codec, self._report = explicit, _codec, _report

    def encode(self, transfer: WriterTransfer, operation: OperationIdentity, base_address: int) -> bytes:
        return self._codec.encode_report(
            self._report.WriterReport.for_transfer(
                transfer.writer, operation_id=operation.digest(), bound_base=base_address, explicit=self._explicit
            )
        )

    def check(self, plan: WriterPlan, report: bytes, operation: OperationIdentity, base_address: int) -> None:
        decoded = self._codec.decode_report(report)
        self._report.validate_report(plan, decoded, bound_base=base_address, operation_id=operation.digest())


@dataclass(frozen=True)
class ExpectedOperation:
    """One writer's obligation, as the receiver asks for it.

    Args:
        peer: The writer rank's process.
        byte_count: Bytes it will write, >= 1.
        payload: What the sender's ``resolve`` needs, opaque here, at most 1 MiB.
        plan: The destination derived for this writer. Needed for bounce (validation and scatter); its digest, where
            given, is what the sender's own plan must equal.
        tier: ``bounce`` offers a region; the sender decides when prefill ends.
        role: ``KV`` or ``AUX``: for people; both are owned alike.
    """

    peer: PeerId
    byte_count: int
    payload: bytes = b""
    plan: WriterPlan | None = None
    tier: Literal["direct", "bounce"] = "direct"
    role: Literal["KV", "AUX"] = "KV"

    def __post_init__(self) -> None:
        if type(self.byte_count) is not int or self.byte_count < 1:
            raise ValueError(f"byte_count wants an integer >= 1, got {self.byte_count!r}")
        if len(self.payload) > PAYLOAD_BYTES_MAX:
            raise ValueError(f"payload of {len(self.payload)} bytes exceeds {PAYLOAD_BYTES_MAX}")
        if self.tier == "bounce" and self.plan is None:
            raise ValueError("a bounce offer needs the plan that its report is checked against")
        if self.plan is not None and self.plan.total_bytes != self.byte_count:
            raise ValueError(f"the plan moves {self.plan.total_bytes} bytes, byte_count says {self.byte_count}")


class ExposureLedger:
    """Blocks that some publication of this process may still expose, across generations (K4).

    Share one per process between a Receiver and its successors of later generations. A block leaves the ledger by the proof
    of the transfer that entered it; a quarantined one never does.
    """

    def __init__(self) -> None:
        self._holder: dict[object, TransferIdentity] = {}

    def enter(self, identity: TransferIdentity, blocks: Sequence[object]) -> None:
        """Raises AddressStillExposed, with nothing entered, if any block is held."""
        for block in blocks:
            held = self._holder.get(block)
            if held is not None:
                raise AddressStillExposed(f"block {block!r} is still exposed by {held}")
        for block in blocks:
            self._holder[block] = identity

    def leave(self, identity: TransferIdentity, blocks: Sequence[object]) -> None:
        for block in blocks:
            if self._holder.get(block) == identity:
                del self._holder[block]

    def __len__(self) -> int:
        return len(self._holder)


Clock = Callable[[], float]


class _Shell:
    """What Receiver and Sender share: the channel's queues, introductions, quarantine, callbacks."""

    def __init__(
        self,
        self_id: PeerId,
        transport: Transport,
        channel: ControlChannel,
        config: SessionConfig,
        clock: Clock,
        on_memory: Callable[[Any], None] | None,
    ) -> None:
        self.self_id = self_id
        self.config = config
        self._transport = transport
        self._channel = channel
        self._clock = clock
        self._on_memory = on_memory
        self._lock = threading.RLock()
        self._outbox: dict[PeerId, deque[Message]] = {}
        self._introduced: set[PeerId] = set()
        self._agents: dict[PeerId, str] = {}
        self._incompatible: dict[PeerId, str] = {}
        self._events: list[SessionEvent] = []
        self._undelivered: deque[SessionEvent] = deque()
        self._quarantine = QuarantineLedger(config.quarantine_bytes_max)
        self._counters: Counter[str] = Counter()
        self._fatal = ""
        self._closed = False

    # -- introductions

    def introduce(self, peers: Sequence[PeerId]) -> None:
        """Make agents and queue the first frame for these peers now, rather than at the first transfer.

        Making an agent can take tens of milliseconds: call it at startup.
        """
        for peer in peers:
            self._introduce(peer, is_reply=False)

    def _introduce(self, peer: PeerId, *, is_reply: bool) -> None:
        if peer in self._introduced and not is_reply:
            return
        info = self._transport.agent_info(peer)
        self._introduced.add(peer)
        hello = Hello(
            PROTOCOL_VERSION,
            PROTOCOL_VERSION,
            self.self_id,
            self._transport.transport_class.key,
            info.name,
            info.metadata,
            is_reply,
        )
        with self._lock:
            self._queue(peer, hello)

    def _hello(self, peer: PeerId, hello: Hello) -> None:
        if hello.peer != peer:
            self._counters["foreign"] += 1
            return
        if not hello.version_min <= PROTOCOL_VERSION <= hello.version_max:
            self._incompatible[peer] = f"peer speaks versions {hello.version_min}..{hello.version_max}"
        elif hello.transport_key != self._transport.transport_class.key:
            self._incompatible[peer] = (
                f"peer's transport is {hello.transport_key!r}, ours {self._transport.transport_class.key!r}"
            )
        else:
            self._incompatible.pop(peer, None)
            try:
                self._transport.connect(peer, AgentInfo(hello.agent_name, hello.agent_metadata))
            except KVTransferError as error:
                self._incompatible[peer] = f"peer's agent was refused: {error}"
            else:
                self._agents[peer] = hello.agent_name
        if not hello.is_reply:
            self._introduce(peer, is_reply=True)

    # -- frames

    def _queue(self, peer: PeerId, message: Message) -> None:
        self._outbox.setdefault(peer, deque()).append(message)

    def _flush(self) -> None:
        """Hand queued frames to the channel; the lock is not held while it sends."""
        for peer in list(self._outbox):
            while True:
                with self._lock:
                    queue = self._outbox.get(peer)
                    if not queue:
                        self._outbox.pop(peer, None)
                        break
                    message = queue[0]
                try:
                    self._channel.send(peer, encode_message(message))
                except WouldBlock:
                    self._counters["blocked"] += 1
                    if len(queue) > self.config.frames_queued_max:
                        self._unreachable(peer, f"{len(queue)} frames wait for it")
                    break
                except ChannelError as error:
                    # It may have left: whatever it exposed stays exposed.
                    self._counters["channel_errors"] += 1
                    with self._lock:
                        if queue and queue[0] is message:
                            queue.popleft()
                    self._unreachable(peer, str(error))
                    break
                with self._lock:
                    if queue and queue[0] is message:
                        queue.popleft()
                self._counters["frames_sent"] += 1

    def _unreachable(self, peer: PeerId, reason: str) -> None:
        with self._lock:
            queue = self._outbox.pop(peer, None)
            self._introduced.discard(peer)
            if queue:
                self._counters["frames_dropped"] += len(queue)
        self._peer_in_doubt(peer, f"control channel: {reason}")

    def _receive(self) -> None:
        for peer, frame in self._channel.poll(self.config.frames_per_poll_max):
            self._counters["frames_received"] += 1
            try:
                message = decode_message(frame)
            except RemoteProtocolError:
                self._counters["malformed"] += 1
                continue
            if isinstance(message, Hello):
                self._hello(peer, message)
            else:
                self._take(peer, message)

    # -- memory

    def _charge(self, byte_count: int, story: tuple[str, ...]) -> None:
        if not self._quarantine.charge(byte_count) and not self._fatal:
            self._fatal = (
                f"{self._quarantine.byte_count} bytes are quarantined, the budget is {self._quarantine.bytes_max}"
            )
            self._events.append(FatalDiagnosis(self._fatal, story))

    def _settle(self, event: SessionEvent) -> None:
        """Queue a physical end; it is delivered once, retried until the callback took it."""
        self._undelivered.append(event)

    def _deliver(self) -> None:
        """Deliver physical ends in order; one that its callback refuses does not hold up the others."""
        for _ in range(len(self._undelivered)):
            event = self._undelivered.popleft()
            if self._fatal and isinstance(event, MemoryReleased | SourceReleased):
                # Nothing more is released after a fatal diagnosis: the event stays undelivered, the memory owned.
                self._undelivered.append(event)
                continue
            if self._on_memory is not None:
                try:
                    self._on_memory(event)
                except Exception as error:  # noqa: BLE001 - a user's callback may raise anything; it is retried, never lost
                    self._counters["callback_retries"] += 1
                    self._last_callback_error = error
                    self._undelivered.append(event)
                    continue
            self._events.append(event)

    # -- to be provided

    def _take(self, peer: PeerId, message: Message) -> None:
        raise NotImplementedError

    def _peer_in_doubt(self, peer: PeerId, reason: str) -> None:
        raise NotImplementedError

    def _evidence(self, peer: PeerId, evidence: Evidence) -> None:
        raise NotImplementedError

    def _peers(self) -> set[PeerId]:
        raise NotImplementedError

    # -- peers

    def peer_died(self, peer: PeerId, evidence: str) -> None:
        """A peer's process ended, or can no longer be heard.

        Its operations are in doubt. ``PROCESS_REAPED`` is recorded as evidence: whether it proves anything depends on the
        transport's class (K2, K3).
        """
        if evidence not in (PeerEvidence.PROCESS_REAPED, PeerEvidence.CONNECTION_LOST):
            raise ValueError(f"unknown evidence {evidence!r}")
        with self._lock:
            self._outbox.pop(peer, None)
        self._peer_in_doubt(peer, f"peer {peer}: {evidence}")
        if evidence == PeerEvidence.PROCESS_REAPED:
            self._evidence(peer, Evidence.PEER_REAPED)

    def retire_peer(self, instance_id: str, generation: str) -> None:
        """Destroy the agent kept for that instance: every operation with it ends, and what its class allows is proven.

        Raises:
            TransportError: The agent could not be destroyed; nothing is proven, retry.
        """
        instance = (instance_id, generation)
        peers = [peer for peer in self._peers() if peer.instance == instance]
        for peer in peers:
            self._peer_in_doubt(peer, "peer retired")
        self._transport.destroy_agent(instance)
        for peer in peers:
            self._evidence(peer, Evidence.AGENT_DESTROYED)
        for peer in [each for each in self._introduced if each.instance == instance]:
            self._introduced.discard(peer)
            self._agents.pop(peer, None)

    def statistics(self) -> dict[str, int]:
        """Counters since construction; a copy."""
        with self._lock:
            return dict(self._counters) | {
                "quarantined_bytes": self._quarantine.byte_count,
                "quarantined_count": self._quarantine.count,
                "undelivered": len(self._undelivered),
                "frames_waiting": sum(len(queue) for queue in self._outbox.values()),
                "fatal": int(bool(self._fatal)),
            }

    @property
    def healthy(self) -> bool:
        return not self._fatal


class _Receive:
    """Shell state of one transfer."""

    __slots__ = (
        "advertised",
        "claim",
        "core",
        "expected",
        "exposed",
        "owned",
        "prepared",
        "published",
        "regions",
        "reservation",
        "wait_until_s",
    )

    def __init__(
        self,
        core: rc.ReceiveTransfer,
        expected: dict[OperationIdentity, ExpectedOperation],
        claim: Any,
        exposed: Sequence[object],
    ) -> None:
        self.core = core
        self.expected = expected
        self.claim = claim
        self.exposed = exposed
        self.owned: OwnedMemory[Any] = OwnedMemory(claim, expected, sum(each.byte_count for each in expected.values()))
        self.published = False
        self.reservation: Reservation | None = None
        self.advertised: AdvertisedReservation | None = None
        self.regions: dict[OperationIdentity, BoundRegion] = {}
        self.prepared: dict[OperationIdentity, PreparedCopy] = {}
        self.wait_until_s: float | None = None


class Receiver(_Shell):
    """Receives KV at one rank.

    Args:
        self_id: This process.
        transport: Its memory is registered before the first ``introduce`` or ``open``.
        channel: Control channel to the writers.
        config: Bounds.
        arena: Bounce memory, registered with the transport; None refuses every bounce wish.
        copier: Scatters bounce regions; ``HostCopier`` for DRAM.
        copier_errors_prove_idle: Whether a copier's error means that it touches nothing any more. True for copies in this
            thread; never for a device.
        reports: How writers' reports are checked.
        ledger: Share one among the generations of a process.
        memory_kind, device_id: Of the destination.
        on_memory: Called with each MemoryReleased and MemoryQuarantined before ``poll`` returns it; if it raises it is called
            again at later polls until it returns, and the memory never goes twice.
        clock: Monotonic seconds.

    One thread polls; ``cancel`` may come from another. Errors leave the object usable unless they say otherwise.
    """

    def __init__(
        self,
        self_id: PeerId,
        transport: Transport,
        channel: ControlChannel,
        *,
        config: SessionConfig = SessionConfig(),
        arena: BounceArena | None = None,
        copier: Copier | None = None,
        copier_errors_prove_idle: bool | None = None,
        reports: Reports | None = None,
        ledger: ExposureLedger | None = None,
        memory_kind: MemoryKind = "DRAM",
        device_id: int = 0,
        on_memory: Callable[[Any], None] | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(self_id, transport, channel, config, clock, on_memory)
        self._arena = arena
        self._copier: Copier = copier if copier is not None else HostCopier()
        self._errors_prove_idle = copier is None if copier_errors_prove_idle is None else copier_errors_prove_idle
        self._reports: Reports = reports if reports is not None else PlannerReports()
        self._ledger = ledger if ledger is not None else ExposureLedger()
        self._memory_kind: MemoryKind = memory_kind
        self._device_id = device_id
        self._transfers: dict[TransferIdentity, _Receive] = {}
        self._of_operation: dict[OperationIdentity, _Receive] = {}
        self._incarnations: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._over: OrderedDict[TransferIdentity, None] = OrderedDict()
        self._next_operation = 0
        self._unmatched: deque[ArrivedMark] = deque(maxlen=UNMATCHED_MARKS_MAX)
        self._checks: deque[tuple[_Receive, rc.CheckReport]] = deque()
        self._scatters: deque[tuple[_Receive, rc.Scatter]] = deque()
        self._granted: deque[tuple[_Receive, OperationIdentity]] = deque()
        self._copying: list[tuple[_Receive, list[CopyHandle]]] = []
        # An idle poll looks at none of the open transfers but these: thousands may wait for their prefill.
        self._unpublished: deque[_Receive] = deque()
        self._draining: dict[TransferIdentity, _Receive] = {}
        self._waiting: dict[TransferIdentity, _Receive] = {}

    # -- the host's calls

    def open(
        self,
        identity: TransferIdentity,
        operations: Sequence[ExpectedOperation],
        claim: Any = None,
        *,
        blocks: Sequence[object] = (),
    ) -> tuple[OperationIdentity, ...]:
        """Own a destination and ask its writers to fill it.

        Args:
            identity: Names the transfer: this receiver's generation and rank.
            operations: One per writer and role, at least one.
            claim: Names the blocks for the host; returned untouched by the physical end.
            blocks: Hashable names of the blocks, for the exposure ledger.

        Returns:
            The operations' identities, in the order given. The requests leave at the next poll.

        Raises:
            DuplicateTransfer, StaleIdentity, CapacityExceeded, AddressStillExposed, TransportError: Nothing was taken over.
        """
        if self._closed or self._fatal:
            raise LocalProtocolError(f"the receiver admits nothing: {self._fatal or 'closed'}")
        if identity.endpoint_generation != self.self_id.generation or identity.rank != self.self_id.rank:
            raise StaleIdentity(f"{identity} is not of {self.self_id}")
        if identity in self._transfers or identity in self._over:
            raise DuplicateTransfer(f"{identity} was opened before")
        if not 1 <= len(operations) <= self.config.operations_max:
            raise CapacityExceeded(f"{len(operations)} operations are outside 1..{self.config.operations_max}")
        if len(self._transfers) >= self.config.transfers_max:
            raise CapacityExceeded(f"{len(self._transfers)} transfers are open")
        newest = self._incarnations.get((identity.request_id, identity.slice_index), -1)
        if identity.incarnation < newest:
            raise StaleIdentity(f"{identity}: incarnation {newest} is known")
        for peer in dict.fromkeys(each.peer for each in operations):
            self._introduce(peer, is_reply=False)
        with self._lock:
            specs: list[rc.OperationSpec] = []
            expected: dict[OperationIdentity, ExpectedOperation] = {}
            for each in operations:
                operation = OperationIdentity(identity, each.peer.rank, self._next_operation + len(specs))
                request = ReceiveRequest(
                    operation,
                    each.peer.generation,
                    each.byte_count,
                    each.plan.digest if each.plan is not None else b"",
                    each.tier == "bounce" and self._arena is not None,
                    each.role,
                    self._memory_kind,
                    self._device_id,
                    each.payload,
                )
                specs.append(rc.OperationSpec(operation, each.peer, request))
                expected[operation] = each
            core = rc.ReceiveTransfer(
                identity,
                specs,
                required=self._transport.transport_class.required,
                drain_deadline_s=self.config.drain_deadline_s,
            )
            self._ledger.enter(identity, blocks)
            self._next_operation += len(specs)
            record = _Receive(core, expected, claim, blocks)
            self._transfers[identity] = record
            self._unpublished.append(record)
            self._incarnations[(identity.request_id, identity.slice_index)] = identity.incarnation
            _bound(self._incarnations, OVER_MAX)
            for operation in expected:
                self._of_operation[operation] = record
            self._counters["opened"] += 1
        return tuple(expected)

    def cancel(self, identity: TransferIdentity, reason: str = "cancelled") -> bool:
        """End a transfer logically; its memory follows by proof only. Any thread.

        Returns:
            False if it is unknown or had already ended logically.
        """
        with self._lock:
            record = self._transfers.get(identity)
            if record is None or record.core.outcome is not Outcome.PENDING:
                return False
            self._step(record, rc.CancelAsked(reason))
            return True

    def poll(self) -> tuple[SessionEvent, ...]:
        """Progress everything, within bounds. Call it in every turn of the loop."""
        self._publish()
        self._receive()
        self._flush()  # requests and grants leave before any copy runs
        self._progress()
        self._copies()
        self._tick()
        self._flush()
        self._prepare()
        with self._lock:
            self._deliver()
            events, self._events = tuple(self._events), []
        return events

    def drain(self) -> DrainReport:
        """What is still owned. Quiescent when nothing is open and every physical end was delivered."""
        with self._lock:
            doubtful = tuple(
                spec.operation
                for record in self._transfers.values()
                for spec in record.core.operations
                if record.core.state_of(spec.operation).value in ("IN_DOUBT", "CONFLICTED")
            )
            still = (*self._transfers, *(getattr(event, "identity", None) for event in self._undelivered))
            return DrainReport(still, doubtful, self._quarantine.byte_count)

    def close(self) -> None:
        """Admit nothing more and leave the channel.

        Raises:
            TransfersOutstanding: Memory is still owned; admission stays closed, everything else goes on; retry.
        """
        self._closed = True
        report = self.drain()
        if report.open:
            raise TransfersOutstanding(f"{len(report.open)} transfers own memory", report.open)
        self._channel.close()

    def state_of(self, operation: OperationIdentity) -> str:
        """The physical state of an open operation, for health pages and tests; ENDED when no longer kept."""
        record = self._of_operation.get(operation)
        return record.core.state_of(operation).value if record is not None else "ENDED"

    # -- turning events into steps

    def _publish(self) -> None:
        """Under the lock each record turns EXPOSED and its request is queued: a cancel comes wholly before or after."""
        while self._unpublished:
            with self._lock:
                record = self._unpublished.popleft()
                record.published = True
                self._step(record, rc.Published())

    def _take(self, peer: PeerId, message: Message) -> None:
        if not isinstance(message, BounceWanted | WriterResult | Sealed | Drained | Doubt):
            self._counters["unexpected"] += 1
            return
        with self._lock:
            record = self._of_operation.get(message.operation)
            if record is None:
                stale = message.operation.transfer.endpoint_generation != self.self_id.generation
                self._counters["stale" if stale else "late"] += 1
                return
            if record.expected[message.operation].peer != peer:
                # Another peer speaks about an operation that is not its own: it changes nothing of it.
                self._counters["foreign"] += 1
                return
            self._step(record, rc.MessageArrived(message))

    def _progress(self) -> None:
        progress = self._transport.poll()
        self._counters["malformed"] += progress.malformed
        waiting = [self._unmatched.popleft() for _ in range(len(self._unmatched))]
        for arrived in (*waiting, *progress.marks):
            self._mark(arrived)
        for peer in progress.lost:
            self._peer_in_doubt(peer, "transport lost the peer")

    def _mark(self, arrived: ArrivedMark) -> None:
        operation = arrived.mark.operation
        with self._lock:
            record = self._of_operation.get(operation)
            if record is None:
                self._counters["late"] += 1
                return
            agent = self._agents.get(record.expected[operation].peer)
            if agent is None:
                self._unmatched.append(arrived)  # its Hello is still under way
            elif agent != arrived.agent_name:
                self._counters["foreign"] += 1
            else:
                self._step(
                    record, rc.MarkArrived(operation, arrived.mark.index, arrived.mark.count, arrived.mark.extent)
                )

    def _copies(self) -> None:
        """Checks and scatters, outside the lock."""
        for _ in range(len(self._checks)):
            record, check = self._checks.popleft()
            plan, region = record.expected[check.operation].plan, record.regions.get(check.operation)
            reason = ""
            if plan is None or region is None or check.message.base_address != region.address:
                reason = "the report names another base than the bound one"
            else:
                try:
                    self._reports.check(plan, check.message.report, check.operation, region.address)
                except KVTransferError as error:
                    reason = str(error)
            if reason:
                self._counters["reports_refused"] += 1
            with self._lock:
                self._step(record, rc.ReportChecked(check.operation, not reason, reason))
        for _ in range(min(len(self._scatters), self.config.copies_per_poll_max)):
            record, scatter = self._scatters.popleft()
            self._scatter(record, scatter)
        still: list[tuple[_Receive, list[CopyHandle]]] = []
        for record, handles in self._copying:
            try:
                done = all(handle.done() for handle in handles)
            except KVTransferError as error:
                self._scattered(record, str(error))
                continue
            if done:
                self._scattered(record, "")
            else:
                still.append((record, handles))
        self._copying = still

    def _prepare(self) -> None:
        """Make the copy lists of granted regions while their writers gather and write."""
        for _ in range(min(len(self._granted), self.config.copies_per_poll_max)):
            record, operation = self._granted.popleft()
            if operation not in record.prepared and not record.core.settled:
                try:
                    record.prepared[operation] = self._scatter_list(record, operation)
                except Exception:  # noqa: BLE001 - the scatter itself tries again, and its failure is told there
                    self._counters["prepare_failed"] += 1

    def _scatter_list(self, record: _Receive, operation: OperationIdentity) -> PreparedCopy:
        plan, region = record.expected[operation].plan, record.regions[operation]
        if plan is None:
            raise LocalProtocolError(f"{operation} has no plan to scatter by")
        sources = read_only(plan.staging_offsets + region.address)
        return self._copier.prepare(sources, plan.target_addresses, plan.sizes)

    def _scatter(self, record: _Receive, scatter: rc.Scatter) -> None:
        handles: list[CopyHandle] = []
        try:
            for operation in scatter.operations:
                prepared = record.prepared.get(operation)
                if prepared is None:
                    prepared = self._scatter_list(record, operation)
                handles.append(self._copier.submit(prepared))
        except Exception as error:  # noqa: BLE001 - whatever a copier raises, its memory is in doubt and stays owned
            self._scattered(record, f"{type(error).__name__}: {error}")
            return
        self._copying.append((record, handles))

    def _scattered(self, record: _Receive, reason: str) -> None:
        self._counters["scatters" if not reason else "scatters_failed"] += 1
        with self._lock:
            self._step(record, rc.ScatterEnded(not reason, self._errors_prove_idle or not reason, reason))

    def _tick(self) -> None:
        now_s = self._clock()
        with self._lock:
            if self._arena is not None:
                for reservation in self._arena.pump():
                    self._reserved(reservation)
            for identity, record in list(self._waiting.items()):
                if record.wait_until_s is None:
                    del self._waiting[identity]
                elif now_s >= record.wait_until_s:
                    del self._waiting[identity]
                    record.wait_until_s = None
                    if self._arena is not None and self._arena.withdraw(identity):
                        self._counters["bounce_no_space"] += 1
                        self._step(record, rc.RegionRefused("no_space"))
            for record in list(self._draining.values()):
                if record.core.drain_until_s is not None and now_s >= record.core.drain_until_s:
                    self._step(record, rc.Ticked())

    def _reserved(self, reservation: Reservation) -> None:
        record = self._transfers.get(reservation.key)  # type: ignore[call-overload]
        if record is None:
            reservation.abandon()
            return
        record.reservation = reservation
        record.wait_until_s = None
        self._step(record, rc.RegionReserved())

    def _peer_in_doubt(self, peer: PeerId, reason: str) -> None:
        with self._lock:
            self._counters["peers_in_doubt"] += 1
            for record in list(self._transfers.values()):
                self._step(record, rc.PeerInDoubt(peer, reason))

    def _evidence(self, peer: PeerId, evidence: Evidence) -> None:
        with self._lock:
            for record in list(self._transfers.values()):
                self._step(record, rc.PeerEvidenced(peer, evidence))

    def _peers(self) -> set[PeerId]:
        with self._lock:
            return self._introduced | {
                spec.peer for record in self._transfers.values() for spec in record.core.operations
            }

    # -- performing effects (under the lock)

    def _step(self, record: _Receive, event: rc.ReceiveEvent) -> None:
        for effect in record.core.step(event, self._clock()):
            self._perform(record, effect)

    def _perform(self, record: _Receive, effect: rc.ReceiveEffect) -> None:
        identity = record.core.identity
        match effect:
            case rc.SendRequest(peer, request):
                self._queue(peer, request)
            case rc.SendCancel(peer, message):
                self._queue(peer, message)
            case rc.SendRefusal(peer, refusal):
                self._counters["bounce_refused"] += 1
                self._queue(peer, refusal)
            case rc.ReserveRegion(parts):
                self._reserve(record, dict(parts))
            case rc.BindAndGrant(operation, peer):
                self._bind(record, operation, peer)
            case rc.WithdrawRegion():
                record.wait_until_s = None
                if record.reservation is not None:
                    record.reservation.abandon()
                    record.reservation = None
                elif self._arena is not None:
                    self._arena.withdraw(identity)
            case rc.CheckReport():
                self._checks.append((record, effect))
            case rc.Scatter():
                self._scatters.append((record, effect))
            case rc.EndOutcome(outcome, reason):
                self._ended(record, outcome, reason)
            case rc.Release(proofs):
                if record.advertised is not None:
                    record.advertised.release(proofs)
                proven = record.owned.prove(proofs)
                self._ledger.leave(identity, record.exposed)
                self._forget(record)
                self._counters["released"] += 1
                self._settle(MemoryReleased(identity, record.claim, proven))
            case rc.Quarantine(reason, operations):
                byte_count = record.owned.byte_count
                if record.advertised is not None:
                    byte_count += record.advertised.quarantine()
                record.owned.quarantine(reason)
                story = tuple(line for operation in operations for line in record.core.story_of(operation))
                self._forget(record)
                self._counters["quarantined"] += 1
                self._settle(MemoryQuarantined(identity, record.claim, reason))
                self._charge(byte_count, story)
            case rc.NoteConflict():
                self._counters["conflicts"] += 1

    def _reserve(self, record: _Receive, parts: dict[int, int]) -> None:
        if self._arena is None:
            self._step(record, rc.RegionRefused("disabled"))
            return
        refusal = self._arena.enqueue(record.core.identity, parts)
        if refusal is not None:
            self._step(record, rc.RegionRefused(refusal.reason.value))
            return
        record.wait_until_s = self._clock() + self.config.bounce_wait_s
        self._waiting[record.core.identity] = record
        for reservation in self._arena.pump():
            self._reserved(reservation)

    def _bind(self, record: _Receive, operation: OperationIdentity, peer: PeerId) -> None:
        if record.reservation is not None:
            record.advertised = record.reservation.advertise()
            record.reservation = None
        if record.advertised is None:
            raise LocalProtocolError(f"{operation}: granted without a reservation")
        region = record.advertised.bind_writer(operation, operation.operation)
        record.regions[operation] = region
        self._granted.append((record, operation))
        self._counters["bounce_granted"] += 1
        self._queue(
            peer, BounceGrant(operation, region.address, region.byte_count, region.memory_kind, region.device_id)
        )

    def _ended(self, record: _Receive, outcome: Outcome, reason: str) -> None:
        identity = record.core.identity
        if outcome is not Outcome.SUCCEEDED:
            self._draining[identity] = record
        if outcome is Outcome.SUCCEEDED:
            self._counters["succeeded"] += 1
            tiers = tuple(
                (
                    operation,
                    "bounce" if record.core.bounced(operation) else "direct",
                    "no_space" if record.core.refused(operation) else "ok",
                )
                for operation in record.expected
            )
            self._counters["operations_bounced"] += sum(tier == "bounce" for _, tier, _ in tiers)
            self._counters["operations_direct"] += sum(tier == "direct" for _, tier, _ in tiers)
            self._events.append(
                TransferSucceeded(identity, tiers, sum(each.byte_count for each in record.expected.values()))  # type: ignore[arg-type]
            )
        elif outcome is Outcome.CANCELLED:
            self._counters["cancelled"] += 1
            self._events.append(TransferCancelled(identity, reason))
        else:
            self._counters["failed"] += 1
            self._events.append(TransferFailed(identity, reason))

    def _forget(self, record: _Receive) -> None:
        del self._transfers[record.core.identity]
        self._draining.pop(record.core.identity, None)
        self._waiting.pop(record.core.identity, None)
        for operation in record.expected:
            del self._of_operation[operation]
        self._over[record.core.identity] = None
        _bound(self._over, OVER_MAX)


class _Send:
    """Shell state of one request."""

    __slots__ = ("claim", "core", "grants", "prepared", "resolve", "served", "slots", "transfers")

    def __init__(self, core: sc.SendTransfer) -> None:
        self.core = core
        self.resolve: Callable[[ReceiveRequest], WriterTransfer] | None = None
        self.claim: Any = None
        self.transfers: dict[OperationIdentity, WriterTransfer] = {}
        self.grants: dict[OperationIdentity, BounceGrant] = {}
        self.slots: dict[OperationIdentity, AdvertisedReservation] = {}
        self.prepared: dict[OperationIdentity, tuple[int, PreparedCopy]] = {}  # for a slot at that address
        self.served = False


class Sender(_Shell):
    """Serves receive requests from one rank's memory.

    Args:
        self_id, transport, channel, config, copier, copier_errors_prove_idle, reports, on_memory, clock: As of ``Receiver``;
            ``on_memory`` gets SourceReleased and SourceQuarantined.
        arena: Send slots for bounce writes, registered with the transport; None never asks for a region.
        memory_kind, device_id: Of the source.
        prefers_bounce: Decides per request whether to ask for an offered region; the default asks whenever one was offered,
            the slot arena could hold it, and there is more than one fragment.
    """

    def __init__(
        self,
        self_id: PeerId,
        transport: Transport,
        channel: ControlChannel,
        *,
        config: SessionConfig = SessionConfig(),
        arena: BounceArena | None = None,
        copier: Copier | None = None,
        copier_errors_prove_idle: bool | None = None,
        reports: Reports | None = None,
        memory_kind: MemoryKind = "DRAM",
        device_id: int = 0,
        prefers_bounce: Callable[[ReceiveRequest, WriterTransfer], bool] | None = None,
        on_memory: Callable[[Any], None] | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(self_id, transport, channel, config, clock, on_memory)
        self._arena = arena
        self._copier: Copier = copier if copier is not None else HostCopier()
        self._errors_prove_idle = copier is None if copier_errors_prove_idle is None else copier_errors_prove_idle
        self._reports: Reports = reports if reports is not None else PlannerReports()
        self._memory_kind: MemoryKind = memory_kind
        self._device_id = device_id
        self._prefers_bounce = prefers_bounce
        self._requests: dict[RequestKey, _Send] = {}
        self._newest: OrderedDict[int, int] = OrderedDict()
        self._over: OrderedDict[RequestKey, None] = OrderedDict()
        self._high_water: dict[PeerId, int] = {}
        self._receipts: OrderedDict[OperationIdentity, Sealed | Drained | Doubt] = OrderedDict()
        self._resolves: deque[tuple[_Send, OperationIdentity]] = deque()
        self._gathers: deque[tuple[_Send, OperationIdentity]] = deque()
        self._asking: deque[tuple[_Send, OperationIdentity]] = deque()
        self._gathering: list[tuple[_Send, OperationIdentity, CopyHandle]] = []
        self._packs: tuple[Any, bool] = (None, False)  # the copier, and whether it prepares a gather by its sources
        self._ahead: dict[OperationIdentity, _Send] = {}  # operations that hold a slot without a region
        # An idle poll looks at none of the open requests but these: thousands may wait for their prefill.
        self._clocked: dict[RequestKey, _Send] = {}
        self._stepped: dict[RequestKey, _Send] = {}

    # -- the host's calls

    def pending(self) -> tuple[ReceiveRequest, ...]:
        """Receive requests whose prefill is not over."""
        with self._lock:
            return tuple(
                record.core.request_of(operation)
                for record in self._requests.values()
                if not record.core.ready and not record.core.sealed
                for operation in record.core.operations
            )

    def expect(self, request: RequestKey, operation_count: int | None = None) -> None:
        """Say how many operations this rank will serve for ``request``; RequestServed follows when they ended."""
        if operation_count is not None and operation_count < 0:
            raise ValueError(f"operation_count wants >= 0, got {operation_count}")
        with self._lock:
            record = self._record(request)
            record.core.expected = operation_count
            self._stepped[request] = record

    def ready(
        self, request: RequestKey, resolve: Callable[[ReceiveRequest], WriterTransfer], claim: Any = None
    ) -> None:
        """Prefill is over and its compute step has retired: the source belongs to the transfer from here on.

        Args:
            request: The request.
            resolve: The planner: from a receive request to fragments. Called once per request, inside ``poll``. Raising
                ends that operation unposted.
            claim: Names the source blocks for the host.

        Raises:
            LocalProtocolError: It was ready before, or is over.
            CapacityExceeded: Too many requests are open.
        """
        with self._lock:
            record = self._record(request)
            if record.core.ready:
                raise LocalProtocolError(f"{request} was ready before")
            record.resolve = resolve
            record.claim = claim
            self._step(record, sc.SourceReady())

    def fail(self, request: RequestKey, reason: str) -> None:
        """Prefill failed or was aborted: what was not posted never will be, and every receiver learns it."""
        with self._lock:
            self._step(self._record(request), sc.FailAsked(reason))

    def seal(self, request: RequestKey) -> None:
        """Nothing begins any more for this request. Idempotent."""
        with self._lock:
            self._step(self._record(request), sc.SealAsked())

    def snapshot(self, request: RequestKey) -> TerminalSnapshot | None:
        """The immutable terminal snapshot; None while unsealed or outstanding, and then nothing was frozen."""
        with self._lock:
            record = self._requests.get(request)
            if record is None:
                raise LocalProtocolError(f"{request} is not known here")
            return record.core.snapshot()

    def forget(self, request: RequestKey) -> None:
        """Drop the records of a settled request; late messages about it are still answered.

        Raises:
            LocalProtocolError: Not sealed, or outstanding.
        """
        with self._lock:
            record = self._requests.get(request)
            if record is None:
                return
            if not record.core.settled:
                raise LocalProtocolError(f"{request} still owns memory: {record.core.outstanding}")
            del self._requests[request]
            self._over[request] = None
            _bound(self._over, OVER_MAX)

    def poll(self) -> tuple[SessionEvent, ...]:
        """Progress everything, within bounds. Call it in every turn of the loop."""
        self._receive()
        self._resolve()
        self._slots()
        self._copies()
        self._flush()  # a report travels while its write is posted: the notifications are the proof, not the report
        self._progress()
        self._tick()
        self._flush()
        if self._prepare():
            self._copies()  # ahead of the grant, so now: the grant is under way
        with self._lock:
            self._deliver()
            events, self._events = tuple(self._events), []
        return events

    def drain(self) -> DrainReport:
        """What is still owned."""
        with self._lock:
            doubtful = tuple(
                operation
                for record in self._requests.values()
                for operation in record.core.operations
                if record.core.state_of(operation).value in ("IN_DOUBT", "SOURCE_IN_DOUBT")
            )
            still = (
                *(key for key, record in self._requests.items() if not record.core.settled),
                *(getattr(event, "request", None) for event in self._undelivered),
            )
            return DrainReport(still, doubtful, self._quarantine.byte_count)

    def close(self) -> None:
        """Refuse new requests and leave the channel.

        Raises:
            TransfersOutstanding: Sources are still owned; retry.
        """
        self._closed = True
        report = self.drain()
        if report.open:
            raise TransfersOutstanding(f"{len(report.open)} requests own memory", report.open)
        self._channel.close()

    def state_of(self, operation: OperationIdentity) -> str:
        record = self._requests.get(operation.request)
        return record.core.state_of(operation).value if record and record.core.knows(operation) else "ENDED"

    # -- turning events into steps

    def _record(self, request: RequestKey) -> _Send:
        record = self._requests.get(request)
        if record is None:
            if request in self._over:
                raise LocalProtocolError(f"{request} is over")
            if len(self._requests) >= self.config.transfers_max:
                raise CapacityExceeded(f"{len(self._requests)} requests are open")
            record = _Send(sc.SendTransfer(request, drain_deadline_s=self.config.drain_deadline_s))
            self._requests[request] = record
            self._newest[request.request_id] = max(request.incarnation, self._newest.get(request.request_id, 0))
            _bound(self._newest, OVER_MAX)
        return record

    def _take(self, peer: PeerId, message: Message) -> None:
        with self._lock:
            match message:
                case ReceiveRequest():
                    self._requested(peer, message)
                case Cancel():
                    self._cancel(peer, message)
                case BounceGrant() | BounceRefused():
                    self._answered(peer, message)
                case _:
                    self._counters["unexpected"] += 1

    def _requested(self, peer: PeerId, request: ReceiveRequest) -> None:
        operation = request.operation
        transfer = operation.transfer
        if transfer.endpoint_generation != peer.generation or transfer.rank != peer.rank:
            self._counters["foreign"] += 1
            return
        if operation.operation <= self._high_water.get(peer, -1):
            self._counters["replayed"] += 1  # a stale copy of a request that was already taken, or cancelled before
            return
        self._high_water[peer] = operation.operation
        refusal = ""
        if self._closed or self._fatal:
            refusal = "the sender admits nothing"
        elif request.sender_generation != self.self_id.generation:
            refusal = "meant for another generation of this sender"
        elif operation.writer_rank != self.self_id.rank:
            refusal = f"meant for writer {operation.writer_rank}"
        elif peer in self._incompatible:
            refusal = self._incompatible[peer]
        elif peer not in self._agents:
            refusal = "no introduction came before it"
        elif operation.request in self._over:
            refusal = "the request is over"
        elif transfer.incarnation < self._newest.get(transfer.request_id, 0):
            refusal = "a newer incarnation is known"
        elif (
            operation.request in self._requests
            and len(self._requests[operation.request].core.operations) >= self.config.operations_max
        ) or (operation.request not in self._requests and len(self._requests) >= self.config.transfers_max):
            refusal = "capacity"
        if refusal:
            self._counters["requests_refused"] += 1
            self._reply(peer, Sealed(operation, refusal[:500]))
            return
        self._counters["requests"] += 1
        record = self._record(operation.request)
        self._events.append(ReceiveRequested(operation.request, operation, peer, request.byte_count))
        self._step(record, sc.RequestArrived(peer, request))

    def _cancel(self, peer: PeerId, message: Cancel) -> None:
        operation = message.operation
        record = self._requests.get(operation.request)
        if record is not None and record.core.knows(operation):
            if record.core.peer_of(operation) != peer:
                self._counters["foreign"] += 1
                return
            self._events.append(CancelReceived(operation.request, operation, message.reason))
            self._step(record, sc.CancelArrived(operation, message.reason))
            return
        if operation.transfer.endpoint_generation != peer.generation or operation.transfer.rank != peer.rank:
            self._counters["foreign"] += 1
            return
        receipt = self._receipts.get(operation)
        if receipt is not None:
            self._reply(peer, receipt)
        elif operation.operation > self._high_water.get(peer, -1):
            # The cancel came first: from here on its request is recognised as stale and never served (K5).
            self._high_water[peer] = operation.operation
            self._reply(peer, Sealed(operation, "cancelled before it was requested"))
        else:
            self._counters["late"] += 1  # its receipt is gone: say nothing rather than something untrue

    def _answered(self, peer: PeerId, message: BounceGrant | BounceRefused) -> None:
        record = self._requests.get(message.operation.request)
        if record is None or not record.core.knows(message.operation):
            self._counters["late"] += 1
            return
        if record.core.peer_of(message.operation) != peer:
            self._counters["foreign"] += 1
            return
        if isinstance(message, BounceGrant):
            if message.byte_count < record.core.request_of(message.operation).byte_count:
                self._step(record, sc.CancelArrived(message.operation, "the granted region is too small"))
                return
            record.grants.setdefault(message.operation, message)
            self._ahead.pop(message.operation, None)
            self._step(record, sc.GrantArrived(message.operation))
        else:
            self._step(record, sc.RefusalArrived(message.operation, message.reason))

    def _reply(self, peer: PeerId, message: Sealed | Drained | Doubt) -> None:
        self._receipts[message.operation] = message
        _bound(self._receipts, RECEIPTS_MAX)
        self._queue(peer, message)

    def _resolve(self) -> None:
        for _ in range(len(self._resolves)):
            record, operation = self._resolves.popleft()
            request = record.core.request_of(operation)
            reason, wants = "", False
            try:
                if record.resolve is None:
                    raise LocalProtocolError(f"{operation.request} has no resolver")
                transfer = record.resolve(request)
                reason = _mismatch(request, transfer)
                if not reason:
                    record.transfers[operation] = transfer
                    wants = self._wants_bounce(request, transfer)
            except Exception as error:  # noqa: BLE001 - a planner's failure of any kind ends this operation, unposted
                reason = f"{type(error).__name__}: {error}"
                self._counters["resolve_failed"] += 1
            with self._lock:
                self._step(record, sc.Resolved(operation, wants, reason))

    def _wants_bounce(self, request: ReceiveRequest, transfer: WriterTransfer) -> bool:
        if self._arena is None or not request.bounce_offered:
            return False
        if transfer.total_bytes > self._arena.largest_region_bytes():
            self._counters["bounce_oversize"] += 1
            return False
        if self._prefers_bounce is not None:
            return self._prefers_bounce(request, transfer)
        return len(transfer.sizes) > 1

    def _slots(self) -> None:
        if self._arena is None:
            return
        with self._lock:
            for reservation in self._arena.pump():
                operation = reservation.key
                record = self._requests.get(operation.request)  # type: ignore[attr-defined]
                if record is None:
                    reservation.abandon()
                    continue
                slot = reservation.advertise()  # a copy is about to write into it
                slot.bind_writer(operation, 0)  # type: ignore[arg-type]
                record.slots[operation] = slot  # type: ignore[index]
                self._step(record, sc.SlotReserved(operation))  # type: ignore[arg-type]
            if self._ahead and self._arena.waiting_count:
                for operation, record in list(self._ahead.items()):
                    self._step(record, sc.SlotAsked(operation))

    def _gather_ahead(self, record: _Send, operation: OperationIdentity, transfer: WriterTransfer) -> bool:
        """Use a slot that nobody waits for while the region is still asked for. Returns whether there was one."""
        if self._arena is None or len(self._ahead) >= self.config.gathers_ahead_max:
            return False
        with self._lock:
            if record.core.state_of(operation) is not SendState.WANTED:
                return False
            reservation = self._arena.reserve(operation, {0: transfer.total_bytes})
            if not isinstance(reservation, Reservation):
                return False
            slot = reservation.advertise()
            slot.bind_writer(operation, 0)
            record.slots[operation] = slot
            self._ahead[operation] = record
            self._counters["gathers_ahead"] += 1
            self._step(record, sc.SlotOffered(operation))
        return True

    def _prepare(self) -> bool:
        """While a region is asked for, gather into a slot that is free, or make the list for one that will probably be.

        Returns whether a gather is to begin.
        """
        ahead = False
        for _ in range(min(len(self._asking), self.config.copies_per_poll_max)):
            record, operation = self._asking.popleft()
            transfer = record.transfers.get(operation)
            if transfer is None or self._arena is None:
                continue
            if self._gather_ahead(record, operation, transfer):
                ahead = True
                continue
            address = self._arena.peek(transfer.total_bytes)
            if address is not None:
                try:
                    record.prepared[operation] = (address, self._gather_list(transfer, address))
                except Exception:  # noqa: BLE001 - the gather itself tries again, and its failure is told there
                    self._counters["prepare_failed"] += 1
        return ahead

    def _gather_list(self, transfer: WriterTransfer, address: int) -> PreparedCopy:
        copier, packs = self._packs
        if copier is not self._copier:  # asked once: the check walks the protocol's members
            self._packs = copier, packs = self._copier, isinstance(self._copier, PacksFragments)
        if packs:
            return cast(PacksFragments, copier).prepare_gather(transfer.source_addresses, transfer.sizes, address)
        targets = read_only(transfer.staging_offsets + address)
        return self._copier.prepare(transfer.source_addresses, targets, transfer.sizes)

    def _copies(self) -> None:
        for _ in range(min(len(self._gathers), self.config.copies_per_poll_max)):
            record, operation = self._gathers.popleft()
            transfer, slot = record.transfers[operation], record.slots[operation].bound[0]
            try:
                address, prepared = record.prepared.pop(operation, (0, None))
                if prepared is None or address != slot.address:
                    prepared = self._gather_list(transfer, slot.address)
                self._gathering.append((record, operation, self._copier.submit(prepared)))
            except Exception as error:  # noqa: BLE001 - whatever a copier raises, its memory stays owned
                self._gathered(record, operation, f"{type(error).__name__}: {error}")
        still: list[tuple[_Send, OperationIdentity, CopyHandle]] = []
        for record, operation, handle in self._gathering:
            try:
                done = handle.done()
            except KVTransferError as error:
                self._gathered(record, operation, str(error))
                continue
            if done:
                self._gathered(record, operation, "")
            else:
                still.append((record, operation, handle))
        self._gathering = still

    def _gathered(self, record: _Send, operation: OperationIdentity, reason: str) -> None:
        self._counters["gathers" if not reason else "gathers_failed"] += 1
        with self._lock:
            self._step(record, sc.GatherEnded(operation, not reason, self._errors_prove_idle or not reason, reason))

    def _progress(self) -> None:
        progress = self._transport.poll()
        self._counters["malformed"] += progress.malformed
        with self._lock:
            for write in progress.writes:
                record = self._requests.get(write.operation.request)
                if record is not None and record.core.knows(write.operation):
                    self._step(record, sc.WriteProgressed(write))
        for peer in progress.lost:
            self._peer_in_doubt(peer, "transport lost the peer")

    def _tick(self) -> None:
        with self._lock:
            for key, record in list(self._clocked.items()):
                self._step(record, sc.Ticked())
                if not record.core.clock_runs:
                    del self._clocked[key]
            stepped, self._stepped = self._stepped, {}
            for record in stepped.values():
                if record.core.clock_runs:
                    self._clocked[record.core.request] = record
                if record.core.served and not record.served:
                    record.served = True
                    self._events.append(RequestServed(record.core.request))

    def _peer_in_doubt(self, peer: PeerId, reason: str) -> None:
        with self._lock:
            self._counters["peers_in_doubt"] += 1
            for record in list(self._requests.values()):
                self._step(record, sc.PeerInDoubt(peer, reason))

    def _evidence(self, peer: PeerId, evidence: Evidence) -> None:
        self._progress()  # an error that the agent's end caused comes before the proof that it is over
        with self._lock:
            for record in list(self._requests.values()):
                self._step(record, sc.PeerEvidenced(peer, evidence))

    def _peers(self) -> set[PeerId]:
        with self._lock:
            return self._introduced | {
                record.core.peer_of(operation)
                for record in self._requests.values()
                for operation in record.core.operations
            }

    # -- performing effects (under the lock)

    def _step(self, record: _Send, event: sc.SendEvent) -> None:
        self._stepped[record.core.request] = record
        for effect in record.core.step(event, self._clock()):
            self._perform(record, effect)

    def _perform(self, record: _Send, effect: sc.SendEffect) -> None:
        request = record.core.request
        match effect:
            case sc.Resolve(operation):
                self._resolves.append((record, operation))
            case sc.SendMessage(peer, message):
                if isinstance(message, BounceWanted):
                    self._queue(peer, message)
                    self._asking.append((record, message.operation))
                else:
                    self._reply(peer, message)
            case sc.ReserveSlot(operation):
                self._reserve(record, operation)
            case sc.DropSlot(operation, proof):
                self._ahead.pop(operation, None)
                slot = record.slots.pop(operation, None)
                if slot is not None:
                    slot.release((proof,))
                elif self._arena is not None:
                    self._arena.withdraw(operation)
            case sc.QuarantineSlot(operation):
                self._ahead.pop(operation, None)
                slot = record.slots.pop(operation, None)
                if slot is not None:
                    self._charge(slot.quarantine(), record.core.story_of(operation))
            case sc.Gather(operation):
                self._gathers.append((record, operation))
            case sc.Post(operation, bounce):
                self._post(record, operation, bounce)
            case sc.StopPosting(operation):
                self._transport.stop_write(operation)
            case sc.OperationEnded(operation, disposition, bounced, reason):
                self._operation_ended(record, operation, disposition, bounced, reason)
            case sc.ReleaseSource(proofs):
                owned: OwnedMemory[Any] = OwnedMemory(record.claim, record.core.operations)
                self._counters["released"] += 1
                self._settle(SourceReleased(request, record.claim, owned.prove(proofs)))
            case sc.QuarantineSource(reason, operations):
                self._counters["quarantined"] += 1
                self._settle(SourceQuarantined(request, record.claim, reason))
                byte_count = max(
                    (record.core.request_of(operation).byte_count for operation in record.core.operations), default=0
                )
                self._charge(byte_count, tuple(line for op in operations for line in record.core.story_of(op)))
            case sc.NoteConflict():
                self._counters["conflicts"] += 1

    def _reserve(self, record: _Send, operation: OperationIdentity) -> None:
        refusal = (
            self._arena.enqueue(operation, {0: record.transfers[operation].total_bytes})
            if self._arena is not None
            else "no arena"
        )
        if refusal is not None:
            # The region was granted, so falling back is over: the operation fails, unposted.
            self._step(record, sc.CancelArrived(operation, f"no send slot: {refusal}"))

    def _post(self, record: _Send, operation: OperationIdentity, bounce: bool) -> None:
        transfer, request = record.transfers[operation], record.core.request_of(operation)
        peer = record.core.peer_of(operation)
        if bounce:
            slot, grant = record.slots[operation].bound[0], record.grants[operation]
            job = WriteJob(
                operation,
                peer,
                _one(slot.address),
                _one(grant.base_address),
                _one(transfer.total_bytes),
                slot.memory_kind,
                slot.device_id,
                grant.memory_kind,  # type: ignore[arg-type]
                grant.device_id,
            )
            report = self._reports.encode(transfer, operation, grant.base_address)
            self._queue(peer, WriterResult(operation, grant.base_address, report))
        else:
            job = WriteJob(
                operation,
                peer,
                transfer.source_addresses,
                transfer.target_addresses,
                transfer.sizes,
                self._memory_kind,
                self._device_id,
                request.memory_kind,  # type: ignore[arg-type]
                request.device_id,
            )
        try:
            self._transport.start_write(job)
        except TransportError as error:
            self._step(record, sc.CancelArrived(operation, str(error)))
            self._step(record, sc.WriteProgressed(_never_posted(operation, str(error))))

    def _operation_ended(
        self, record: _Send, operation: OperationIdentity, disposition: sc.Disposition, bounced: bool, reason: str
    ) -> None:
        record.grants.pop(operation, None)
        record.transfers.pop(operation, None)
        record.prepared.pop(operation, None)
        if disposition in ("done", "drained"):
            self._transport.forget_write(operation)
        byte_count = record.core.request_of(operation).byte_count
        if disposition == "done":
            self._counters["operations_done"] += 1
            self._counters["operations_bounced" if bounced else "operations_direct"] += 1
            self._events.append(
                OperationDone(record.core.request, operation, "bounce" if bounced else "direct", byte_count)
            )
        else:
            self._counters["operations_failed"] += 1
            self._events.append(OperationFailed(record.core.request, operation, disposition, reason))


def _one(value: int) -> Int64Array:
    return np.array([value], np.int64)


def _bound(records: OrderedDict[Any, Any], maximum: int) -> None:
    while len(records) > maximum:
        records.popitem(last=False)


def _never_posted(operation: OperationIdentity, detail: str) -> Any:
    from kv_bounce_planner._transport import WriteProgress

    return WriteProgress(operation, 0, 0, 1, "stopped", detail)


def _mismatch(request: ReceiveRequest, transfer: WriterTransfer) -> str:
    """Why this plan is not the one the receiver asked for, or nothing. After publication a doubt fails, never adapts."""
    if transfer.total_bytes != request.byte_count:
        return f"the plan moves {transfer.total_bytes} bytes, the receiver expects {request.byte_count}"
    if request.plan_digest and transfer.writer.digest != request.plan_digest:
        return "the two sides derived different plans"
    return ""
