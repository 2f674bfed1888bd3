"""The sending session: one per rank process. It owns queues and performs effects; every decision is the core's."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from kv_bounce_planner._errors import (
    CapacityExceeded,
    LocalProtocolError,
)
from kv_bounce_planner.copies.gather import CopyHandle, PacksFragments, PreparedCopy
from kv_bounce_planner.layout.model import read_only
from kv_bounce_planner.sessions import core as shared
from kv_bounce_planner.sessions import send_core as sc
from kv_bounce_planner.sessions.arena import AdvertisedReservation, Reservation
from kv_bounce_planner.sessions.config import SessionConfig, SessionResources
from kv_bounce_planner.sessions.events import (
    CancelReceived,
    DrainReport,
    OperationDone,
    OperationFailed,
    ReceiveRequested,
    RequestServed,
    SourceQuarantined,
    SourceReleased,
)
from kv_bounce_planner.sessions.identity import OperationIdentity, PeerId, RequestKey
from kv_bounce_planner.sessions.messages import (
    AFTER_MAX,
    PAYLOAD_BYTES_MAX,
    BounceGrant,
    BounceRefused,
    BounceWanted,
    Cancel,
    Doubt,
    Drained,
    Message,
    ReadOffer,
    ReadOver,
    ReceiveRequest,
    Sealed,
    WriterResult,
)
from kv_bounce_planner.sessions.proof import OwnedMemory, ProofKind, WriteExecutor, _prove
from kv_bounce_planner.sessions.send_core import TerminalSnapshot
from kv_bounce_planner.sessions.shell import OVER_MAX, RECEIPTS_MAX, PeerLife, Shell, bound
from kv_bounce_planner.sessions.states import SendState
from kv_bounce_planner.transports.interface import Int64Array, TransferJob

if TYPE_CHECKING:
    from kv_bounce_planner.planning.plan import WriterTransfer


@dataclass(frozen=True)
class Loan:
    """A resolver's answer to a request that pulls: what the receiver's planner needs to find the source.

    Args:
        payload: Usually the block table (``encode_blocks``); at most 1 MiB.
    """

    payload: bytes

    def __post_init__(self) -> None:
        if len(self.payload) > PAYLOAD_BYTES_MAX:
            raise ValueError(f"payload of {len(self.payload)} bytes exceeds {PAYLOAD_BYTES_MAX}")


class _Send:
    """Shell state of one request."""

    __slots__ = (
        "agents",
        "begun",
        "claim",
        "core",
        "grants",
        "offers",
        "prepared",
        "reports",
        "resolve",
        "served",
        "slots",
        "transfers",
    )

    def __init__(self, core: sc.SendTransfer) -> None:
        self.core = core
        self.resolve: Callable[[ReceiveRequest], WriterTransfer | Loan] | None = None
        self.claim: Any = None
        self.transfers: dict[OperationIdentity, WriterTransfer] = {}
        self.grants: dict[OperationIdentity, BounceGrant] = {}
        self.offers: dict[OperationIdentity, ReadOffer] = {}
        self.reports: dict[OperationIdentity, WriterResult] = {}  # sent; repeated when a link came back
        self.slots: dict[OperationIdentity, AdvertisedReservation] = {}
        self.prepared: dict[OperationIdentity, tuple[int, PreparedCopy]] = {}  # for a slot at that address
        self.served = False
        self.begun: set[OperationIdentity] = set()
        self.agents: dict[OperationIdentity, str] = {}  # of the life that asked: what reads, if it reads


def _source_bytes(core: sc.SendTransfer) -> int:
    """Of a request's source: receivers of one slice read the same, slices are apart."""
    sizes: dict[int, int] = {}
    for operation in core.operations:
        index = operation.transfer.slice_index
        sizes[index] = max(sizes.get(index, 0), core.request_of(operation).byte_count)
    return sum(sizes.values())


class Sender(Shell[_Send]):
    """Serves receive requests from one rank's memory.

    Args:
        self_id, resources, config, on_memory: As of ``Receiver``; ``on_memory`` gets SourceReleased and SourceQuarantined.
        prefers_bounce: Decides per request whether to ask for an offered region; the default asks whenever one was offered,
            the slot arena could hold it, and there is more than one fragment.
    """

    def __init__(
        self,
        self_id: PeerId,
        resources: SessionResources,
        config: SessionConfig | None = None,
        *,
        prefers_bounce: Callable[[ReceiveRequest, WriterTransfer], bool] | None = None,
        on_memory: Callable[[Any], None] | None = None,
    ) -> None:
        super().__init__(self_id, resources, config, on_memory)
        self._prefers_bounce = prefers_bounce
        self._requests: dict[RequestKey, _Send] = {}
        self._newest: OrderedDict[int, int] = OrderedDict()
        self._over: OrderedDict[RequestKey, None] = OrderedDict()
        #: Per life of a receiver (its peer and session): the newest operation that was heard of.
        self._high_water: dict[tuple[PeerId, bytes], int] = {}
        #: Writes into a receiver's memory that are not known to be over, by its name; whatever session asked for them.
        self._flying: dict[PeerId, set[OperationIdentity]] = {}
        self._expiries: list[tuple[float, int, OperationIdentity]] = []
        self._arrived = 0
        self._settled: OrderedDict[RequestKey, None] = OrderedDict()
        self._gathers: deque[tuple[_Send, OperationIdentity]] = deque()
        self._served: deque[Reservation] = deque()  # slots whose operations were not told of them
        self._asking: deque[tuple[_Send, OperationIdentity]] = deque()
        self._gathering: deque[tuple[_Send, OperationIdentity, CopyHandle]] = deque()
        self._posts: deque[tuple[_Send, OperationIdentity, bool]] = deque()
        self._packs: tuple[Any, bool] = (None, False)  # the copier, and whether it prepares a gather by its sources
        self._ahead: dict[OperationIdentity, _Send] = {}  # operations that hold a slot without a region
        # An idle poll looks at none of the open requests but these: thousands may wait for their prefill.
        self._clocked: dict[RequestKey, _Send] = {}
        self._stepped: dict[RequestKey, _Send] = {}

    # -- the host's calls

    def pending(self) -> tuple[ReceiveRequest, ...]:
        """Receive requests of which not everything is computed that they ask for."""
        with self._lock:
            return tuple(
                record.core.request_of(operation)
                for record in self._requests.values()
                if not record.core.ready and not record.core.sealed
                for operation in record.core.outstanding
                if not record.core.may_begin(operation)
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
        self, request: RequestKey, resolve: Callable[[ReceiveRequest], WriterTransfer | Loan], claim: Any = None
    ) -> None:
        """Prefill is over and its compute step has retired: the source belongs to the transfer from here on.

        Args:
            request: The request.
            resolve: The planner: from a receive request to fragments, or where it ``pulls`` to a ``Loan``. Called once per
                request, inside ``poll``. Raising ends that operation with nothing posted or lent.
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

    def reached(
        self,
        request: RequestKey,
        position: int,
        resolve: Callable[[ReceiveRequest], WriterTransfer | Loan],
        claim: Any = None,
    ) -> None:
        """The source is computed up to ``position`` and its step has retired: what asks for no more (``after``) may begin.

        From the first call on the source belongs to the transfer, as after ``ready``, which follows at the prompt's end.

        Args:
            position: In the count of the receiver's ``ExpectedOperation.after``; it never falls.
            request, resolve, claim: As of ``ready``.

        Raises:
            ValueError: ``position`` is not an integer in 1..2^31-1.
            LocalProtocolError: It was ready, or computed further, before; or it is over.
            CapacityExceeded: Too many requests are open.
        """
        if type(position) is not int or not 1 <= position <= AFTER_MAX:
            raise ValueError(f"position wants an integer in 1..{AFTER_MAX}, got {position!r}")
        with self._lock:
            record = self._record(request)
            if record.core.ready or position < record.core.reached:
                raise LocalProtocolError(f"{request} was computed further before")
            record.resolve = resolve
            record.claim = claim
            self._step(record, sc.SourceReached(position))

    def fail(self, request: RequestKey, reason: str) -> None:
        """Prefill failed or was aborted: what was not posted never will be, and every receiver learns it.

        Nothing happens to a request that is over.
        """
        with self._lock:
            if request in self._over:
                return
            self._step(self._record(request), shared.FailAsked(reason))

    def seal(self, request: RequestKey) -> None:
        """Nothing begins any more for this request. Idempotent, also when it is over and its records were dropped."""
        with self._lock:
            if request in self._over:
                return
            self._step(self._record(request), sc.SealAsked())

    def snapshot(self, request: RequestKey) -> TerminalSnapshot | None:
        """The immutable terminal snapshot; None while unsealed or outstanding, and then nothing was frozen."""
        with self._lock:
            record = self._requests.get(request)
            if record is None:
                raise LocalProtocolError(f"{request} is not known here")
            return record.core.snapshot()

    def forget(self, request: RequestKey) -> None:
        """Drop the records of a settled request now; late messages about it are still answered.

        Not a duty: settled requests do not count against ``transfers_max``, and the oldest are dropped by themselves when
        as many are kept. Until then ``snapshot`` answers.

        Raises:
            LocalProtocolError: Not sealed, or outstanding.
        """
        with self._lock:
            record = self._requests.get(request)
            if record is None:
                return
            if not record.core.settled:
                raise LocalProtocolError(f"{request} still owns memory: {record.core.outstanding}")
            self._drop(request)

    def _drop(self, request: RequestKey) -> None:
        record = self._requests.pop(request)
        self._settled.pop(request, None)
        for operation, report in record.reports.items():
            # A receiver that asks for a lost report later learns at least that nothing lands any more.
            self._receipts.setdefault(
                operation,
                Drained(operation, 1, 1, f"the request is over; its report of {len(report.report)} bytes is gone"),
            )
        bound(self._receipts, RECEIPTS_MAX)
        self._over[request] = None
        bound(self._over, OVER_MAX)

    @property
    def _phases(self) -> tuple[Callable[[], None], ...]:
        return (
            self._receive,
            self._resolve,
            self._slots,
            self._copies,
            self._post_writes,
            self._flush,  # a report travels while its write is posted: the notifications are the proof, not the report
            self._ahead_of_grants,
            self._progress,
            self._tick,
            self._watch_links,
            self._flush,
        )

    def _ahead_of_grants(self) -> None:
        """Gather while the wish for a region travels. Mostly the grant is there by then: the write follows in this poll."""
        if self._prepare():
            self._copies()
            self._receive()
            self._post_writes()
            self._flush()

    def drain(self) -> DrainReport:
        """What is still owned."""
        with self._lock:
            doubtful = tuple(
                operation
                for record in self._requests.values()
                for operation in record.core.operations
                if record.core.state_of(operation).value in ("IN_DOUBT", "SOURCE_IN_DOUBT", "LENT_IN_DOUBT")
            )
            still = (
                *(key for key, record in self._requests.items() if not record.core.settled),
                *(getattr(event, "request", None) for event in self._undelivered),
            )
            return DrainReport(still, doubtful, self._quarantine.byte_count)

    def state_of(self, operation: OperationIdentity) -> str:
        record = self._requests.get(operation.request)
        return record.core.state_of(operation).value if record and record.core.knows(operation) else "ENDED"

    # -- turning events into steps

    def _record(self, request: RequestKey) -> _Send:
        record = self._requests.get(request)
        if record is None:
            if request in self._over:
                raise LocalProtocolError(f"{request} is over")
            if self._open_count() >= self.config.transfers_max:
                raise CapacityExceeded(f"{self._open_count()} requests are open")
            record = _Send(sc.SendTransfer(request, drain_deadline_s=self.config.drain_deadline_s))
            self._requests[request] = record
            self._newest[request.request_id] = max(request.incarnation, self._newest.get(request.request_id, 0))
            bound(self._newest, OVER_MAX)
        return record

    def _open_count(self) -> int:
        return len(self._requests) - len(self._settled)

    def _take(self, life: PeerLife, message: Message) -> None:
        with self._lock:
            match message:
                case ReceiveRequest():
                    self._requested(life, message)
                case Cancel():
                    self._cancel(life, message)
                case BounceGrant() | BounceRefused():
                    self._answered(life, message)
                case ReadOver(operation, complete, reason):
                    self._returned(life, sc.Returned(operation, complete, reason))
                case Doubt(operation, reason):
                    self._returned(life, sc.Returned(operation, False, reason, doubt=True))
                case _:
                    self._counters["unexpected"] += 1

    def _requested(self, life: PeerLife, request: ReceiveRequest) -> None:
        operation, peer = request.operation, life.peer
        if not _is_of(operation, life):
            self._counters["foreign"] += 1
            return
        record = self._requests.get(operation.request)
        if record is not None and record.core.knows(operation):
            if record.core.request_of(operation) == request:
                self._counters["repeated"] += 1
                self._step(record, sc.AskedAgain(operation))
            else:
                self._counters["conflicts"] += 1
            return
        key = (peer, life.session)
        if operation.operation <= self._high_water.get(key, -1):
            self._counters["replayed"] += 1  # a stale copy of a request that was already taken, or cancelled before
            receipt = self._receipts.get(operation)
            if receipt is not None:
                self._queue(peer, receipt)
            return
        refusal = self._objects(life, request)
        if refusal:
            self._counters["requests_refused"] += 1
            self._reply(peer, Sealed(operation, refusal[:500]))
        else:
            record = self._record(operation.request)
            mine = life.transport if life.transport is not None else self._transport.transport_class
            if operation not in record.agents:
                record.agents[operation] = life.agent
                self._counters["requests"] += 1
                self._arrived += 1
                until_s = self._clock() + self.config.operation_timeout_s
                heapq.heappush(self._expiries, (until_s, self._arrived, operation))
                self._events.append(ReceiveRequested(operation.request, operation, peer, request.byte_count))
            self._step(record, sc.RequestArrived(peer, request, mine.required))
        self._high_water[key] = operation.operation  # last: what an interrupt broke off is taken again

    def _objects(self, life: PeerLife, request: ReceiveRequest) -> str:
        """Why a request is not served, or nothing. Whatever it is: nothing was posted for it, and never will be."""
        operation = request.operation
        transfer = operation.transfer
        known = self._requests.get(operation.request)
        if self._closed or self._fatal:
            return "the sender admits nothing"
        if request.sender_generation != self.self_id.generation:
            return "meant for another generation of this sender"
        if operation.writer_rank != self.self_id.rank:
            return f"meant for writer {operation.writer_rank}"
        if any(flying.session != life.session for flying in self._flying.get(life.peer, ())):
            # Into the same process's memory, perhaps to the very addresses: it must be over before anything new lands there.
            return "a write for an earlier session of this receiver is not known to be over"
        if request.pulls and not self.config.serves_reads and _serves(life):
            return "this process would have to serve the reads, and ends with a reader that dies: push, or set serves_reads"
        if operation.request in self._over:
            return "the request is over"
        if transfer.incarnation < self._newest.get(transfer.request_id, 0):
            return "a newer incarnation is known"
        if known is not None and len(known.core.operations) >= self.config.operations_max:
            return "capacity: operations of one request"
        if known is None and self._open_count() >= self.config.transfers_max:
            return "capacity: open requests"
        return ""

    def _cancel(self, life: PeerLife, message: Cancel) -> None:
        operation, peer = message.operation, life.peer
        if not _is_of(operation, life):
            self._counters["foreign"] += 1
            return
        record = self._requests.get(operation.request)
        if record is not None and record.core.knows(operation):
            news = CancelReceived(operation.request, operation, message.reason)
            if not record.core.cancelled(operation) and news not in self._events:
                self._events.append(news)
            self._step(record, sc.CancelArrived(operation, message.reason))
            return
        receipt = self._receipts.get(operation)
        if receipt is not None:
            self._reply(peer, receipt)
        elif operation.operation > self._high_water.get((peer, life.session), -1):
            # The cancel came first, its request perhaps never (it was lost with its link): from here on the request is
            # recognised as stale and never served, and the host hears now what no operation will tell it.
            self._high_water[(peer, life.session)] = operation.operation
            self._events.append(CancelReceived(operation.request, operation, message.reason))
            self._reply(peer, Sealed(operation, "cancelled before it was requested"))
        else:
            self._counters["late"] += 1  # its receipt is gone: say nothing rather than something untrue

    def _answered(self, life: PeerLife, message: BounceGrant | BounceRefused) -> None:
        operation = message.operation
        if not _is_of(operation, life):
            self._counters["foreign"] += 1
            return
        record = self._requests.get(operation.request)
        if record is None or not record.core.knows(operation):
            self._counters["late"] += 1
            return
        if isinstance(message, BounceGrant):
            if message.byte_count < record.core.request_of(operation).byte_count:
                self._step(record, sc.CancelArrived(operation, "the granted region is too small"))
                return
            record.grants.setdefault(operation, message)
            self._ahead.pop(operation, None)
            self._step(record, sc.GrantArrived(operation))
        else:
            self._step(record, sc.RefusalArrived(operation, message.reason))

    def _met(self, life: PeerLife) -> None:
        """Ask a session that was made again over the same agent what became of the loans of its predecessor."""
        for record in self._requests.values():
            for operation in record.core.outstanding:
                if self._reads_on(record, operation, life):
                    self._queue(life.peer, Cancel(operation, "its session is gone"))

    def _reads_on(self, record: _Send, operation: OperationIdentity, life: PeerLife) -> bool:
        """Whether that life has the agent by which an earlier life of its name reads, or has read, this loan."""
        return (
            record.core.peer_of(operation) == life.peer
            and record.core.state_of(operation) is SendState.LENT_IN_DOUBT
            and record.agents.get(operation) == life.agent
        )

    def _returned(self, life: PeerLife, word: sc.Returned) -> None:
        """The receiver's word about a loan, or that of its successor who has its agent."""
        operation = word.operation
        record = self._requests.get(operation.request)
        if record is not None and not record.core.knows(operation):
            record = None
        is_successors = record is not None and not word.doubt and self._reads_on(record, operation, life)
        if not (_is_of(operation, life) or is_successors):
            self._counters["foreign"] += 1
        elif record is None:
            self._counters["late"] += 1
        else:
            self._step(record, word)

    def _plan(self, record: _Send, operation: OperationIdentity) -> bool:
        request = record.core.request_of(operation)
        if record.resolve is None:
            raise LocalProtocolError(f"{operation.request} has no resolver")
        answer = record.resolve(request)
        if isinstance(answer, Loan) != request.pulls:
            wanted = "a Loan" if request.pulls else "a WriterTransfer"
            raise LocalProtocolError(f"{operation} wants {wanted}, the resolver gave a {type(answer).__name__}")
        if isinstance(answer, Loan):
            record.offers[operation] = ReadOffer(operation, self._memory_kind, self._device_id, answer.payload)
            return False
        self._keep_plan(record, request, answer)
        return self._wants_bounce(request, answer)

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
            self._served.extend(self._arena.pump())
            self._each(self._served, len(self._served), self._take_slot)
            if self._ahead and self._arena.waiting_count:
                for operation, record in list(self._ahead.items()):
                    self._step(record, sc.SlotAsked(operation))

    def _take_slot(self, reservation: Reservation) -> None:
        operation: OperationIdentity = reservation.key  # type: ignore[assignment]
        record = self._requests.get(operation.request)
        if record is not None and record.core.state_of(operation) is SendState.GRANTED:
            if operation not in record.slots:
                slot = reservation.advertise()  # a copy is about to write into it
                slot.bind_writer(operation, 0)
                record.slots[operation] = slot
            self._step(record, sc.SlotReserved(operation))
        elif record is None or operation not in record.slots:
            reservation.abandon()  # it ended while an interrupt kept its slot here

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
            try:
                self._step(record, sc.SlotOffered(operation))
            except BaseException:
                if record.core.state_of(operation) is SendState.WANTED:  # not taken: no copy has begun
                    del record.slots[operation], self._ahead[operation]
                    slot.release((_prove(ProofKind.NEVER_POSTED, operation),))
                raise
            self._counters["gathers_ahead"] += 1
        return True

    def _prepare(self) -> bool:
        """While a region is asked for, gather into a slot that is free, or make the list for one that will probably be.

        Returns whether a gather is to begin.
        """
        ahead = False
        for _ in range(min(len(self._asking), self.config.copies_per_poll_max)):
            record, operation = self._asking[0]
            transfer = record.transfers.get(operation)
            begun = transfer is not None and self._gather_ahead(record, operation, transfer)
            self._asking.popleft()
            if begun or transfer is None or self._arena is None:
                ahead = ahead or begun
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
        """Gathers, outside the lock."""
        self._each(self._gathers, self.config.copies_per_poll_max, self._gather)
        for _ in range(len(self._gathering)):
            record, operation, handle = self._gathering[0]
            try:
                done = handle.done()
            except Exception as error:  # noqa: BLE001 - a copier's, in any shape: its memory is in doubt and stays owned
                self._gathered(record, operation, f"{type(error).__name__}: {error}")
                self._gathering.popleft()
                continue
            except BaseException:
                self._gathering.rotate(-1)
                raise
            if not done and operation in record.slots:
                self._gathering.rotate(-1)
                continue
            if done:
                self._gathered(record, operation, "")
            self._gathering.popleft()

    def _gather(self, item: tuple[_Send, OperationIdentity]) -> None:
        record, operation = item
        reserved = record.slots.get(operation)
        if reserved is None:
            return  # given up at the end of the drain clock
        try:
            transfer, slot = record.transfers[operation], reserved.bound[0]
            address, prepared = record.prepared.pop(operation, (0, None))
            if prepared is None or address != slot.address:
                prepared = self._gather_list(transfer, slot.address)
            handle = self._copier.submit(prepared)
        except Exception as error:  # noqa: BLE001 - whatever a copier raises, its memory stays owned
            self._gathered(record, operation, f"{type(error).__name__}: {error}")
            return
        self._gathering.append((record, operation, handle))

    def _gathered(self, record: _Send, operation: OperationIdentity, reason: str) -> None:
        self._counters["gathers" if not reason else "gathers_failed"] += 1
        with self._lock:
            self._step(record, sc.GatherEnded(operation, not reason, self._errors_prove_idle or not reason, reason))

    def _tick(self) -> None:
        now_s = self._clock()
        with self._lock:
            while self._expiries and now_s >= self._expiries[0][0]:
                operation = self._expiries[0][2]
                late = self._requests.get(operation.request)
                if late is not None and late.core.knows(operation):
                    self._step(late, sc.TimedOut(operation, self.config.operation_timeout_s))
                heapq.heappop(self._expiries)  # after its step: an interrupt keeps it due
            for key, record in list(self._clocked.items()):
                due_s = record.core.due_s
                if due_s is None:
                    del self._clocked[key]
                elif now_s >= due_s:
                    self._step(record, shared.Ticked())
            # Each is looked at before it leaves, so that an interrupt keeps it.
            for key, record in list(self._stepped.items()):
                if record.core.due_s is not None:
                    self._clocked[key] = record
                if record.core.served and not record.served:
                    record.served = True
                    self._events.append(RequestServed(key))
                if record.core.settled and key in self._requests:
                    self._settled[key] = None
                    record.core.forget_steps()
                self._stepped.pop(key, None)
            while len(self._settled) > self.config.transfers_max:
                self._drop(next(iter(self._settled)))

    def _peers(self) -> set[PeerId]:
        with self._lock:
            return set(self._lives) | {
                record.core.peer_of(operation)
                for record in self._requests.values()
                for operation in record.core.operations
            }

    def _interested(self) -> set[PeerId]:
        with self._lock:
            return {
                record.core.peer_of(operation)
                for record in self._requests.values()
                for operation in record.core.outstanding
            }

    def _open(self) -> Iterable[_Send]:
        return self._requests.values()

    def _of(self, operation: OperationIdentity) -> _Send | None:
        record = self._requests.get(operation.request)
        return record if record is not None and record.core.knows(operation) else None

    def _peer_retired(self, instance: tuple[str, str]) -> None:
        for key in [each for each in self._high_water if each[0].instance == instance]:
            del self._high_water[key]
        for peer in [each for each in self._flying if each.instance == instance]:
            del self._flying[peer]

    # -- performing effects (under the lock)

    _once = (sc.ReserveSlot, sc.DropSlot, sc.QuarantineSlot)

    def _step(self, record: _Send, event: Any) -> None:
        self._stepped[record.core.request] = record
        super()._step(record, event)

    def _perform(self, record: _Send, effect: Any) -> None:
        request = record.core.request
        match effect:
            case shared.Resolve(operation):
                self._resolves.append((record, operation))
            case sc.SendMessage(peer, message):
                if isinstance(message, BounceWanted):
                    self._queue(peer, message)
                    self._asking.append((record, message.operation))
                elif isinstance(message, Cancel):
                    self._queue(peer, message)
                else:
                    self._reply(peer, message)
            case sc.Lend(operation):
                self._queue(record.core.peer_of(operation), record.offers[operation])
            case sc.ReserveSlot(operation):
                self._reserve(record, operation)
            case sc.DropSlot(operation, proof):
                self._ahead.pop(operation, None)
                slot = record.slots.pop(operation, None)
                if slot is not None:
                    slot.release((proof,))
                elif self._arena is not None:
                    self._arena.withdraw(operation)
            case sc.QuarantineSlot(operation, story):
                self._ahead.pop(operation, None)
                slot = record.slots.pop(operation, None)
                if slot is not None:
                    self._charge(slot.quarantine(), story)
            case sc.Gather(operation):
                if (record, operation) not in self._gathers:
                    self._gathers.append((record, operation))
            case sc.Post(operation, bounce):
                self._posts.append((record, operation, bounce))
            case sc.SendReportAgain(operation):
                report = record.reports.get(operation)
                if report is not None:
                    self._queue(record.core.peer_of(operation), report)
            case shared.StopPosting(operation):
                self._transport.stop(operation)
            case sc.OperationEnded(operation, disposition, bounced, reason):
                self._operation_ended(record, operation, disposition, bounced, reason)
            case sc.ReleaseSource(proofs):
                owned: OwnedMemory[Any] = OwnedMemory(record.claim, record.core.operations)
                self._counters["released"] += 1
                self._settle(SourceReleased(request, record.claim, owned.prove(proofs)))
            case sc.QuarantineSource(reason, story):
                self._counters["quarantined"] += 1
                self._charge(_source_bytes(record.core), story)
                self._settle(SourceQuarantined(request, record.claim, reason))
            case shared.NoteConflict():
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

    def _post_writes(self) -> None:
        """Hand writes to the transport, outside the lock: a report's codec is the user's."""
        self._each(self._posts, len(self._posts), self._post)

    def _post(self, item: tuple[_Send, OperationIdentity, bool]) -> None:
        record, operation, bounce = item

        def build() -> TransferJob:
            job, report = self._job(record, operation, bounce)
            with self._lock:
                if report is not None:
                    self._queue(job.peer, report)
                    record.reports[operation] = report
                self._flying.setdefault(job.peer, set()).add(operation)
            return job

        self._begin(record, operation, SendState.POSTING, build)

    def _job(
        self, record: _Send, operation: OperationIdentity, bounce: bool
    ) -> tuple[TransferJob, WriterResult | None]:
        transfer, request = record.transfers[operation], record.core.request_of(operation)
        peer = record.core.peer_of(operation)
        if not bounce:
            return TransferJob(
                operation,
                peer,
                transfer.source_addresses,
                transfer.target_addresses,
                transfer.sizes,
                self._memory_kind,
                self._device_id,
                request.memory_kind,  # type: ignore[arg-type]
                request.device_id,
            ), None
        slot, grant = record.slots[operation].bound[0], record.grants[operation]
        job = TransferJob(
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
        return job, WriterResult(operation, grant.base_address, report)

    def _landed(self, record: _Send, operation: OperationIdentity) -> None:
        """Nothing of this operation can reach its receiver any more."""
        peer = record.core.peer_of(operation)
        flying = self._flying.get(peer)
        if flying is not None:
            flying.discard(operation)
            if not flying:
                del self._flying[peer]

    def _operation_ended(
        self, record: _Send, operation: OperationIdentity, disposition: sc.Disposition, bounced: bool, reason: str
    ) -> None:
        record.grants.pop(operation, None)
        record.offers.pop(operation, None)
        record.transfers.pop(operation, None)
        record.prepared.pop(operation, None)
        if disposition != "quarantined":
            self._landed(record, operation)
        byte_count = record.core.request_of(operation).byte_count
        if disposition == "done":
            self._counters["operations_done"] += 1
            pulled = record.core.request_of(operation).pulls
            self._counters["operations_" + ("bounced" if bounced else "pulled" if pulled else "direct")] += 1
            tier: Literal["direct", "bounce", "pull"] = "bounce" if bounced else "pull" if pulled else "direct"
            self._events.append(OperationDone(record.core.request, operation, tier, byte_count))
        else:
            self._counters["operations_failed"] += 1
            self._events.append(OperationFailed(record.core.request, operation, disposition, reason))


def _one(value: int) -> Int64Array:
    return np.array([value], np.int64)


def _serves(life: PeerLife) -> bool:
    """Whether a read of that peer is executed by this process alone."""
    return life.transport is not None and life.transport.executors == {WriteExecutor.RECEIVER}


def _is_of(operation: OperationIdentity, life: PeerLife) -> bool:
    """Whether exactly this life of the peer drew that operation."""
    transfer = operation.transfer
    return (operation.session, transfer.endpoint_generation, transfer.rank) == (
        life.session,
        life.peer.generation,
        life.peer.rank,
    )
