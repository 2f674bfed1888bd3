"""The receiving session: one per rank process. It owns queues and performs effects; every decision is the core's.

One lock orders publication against cancellation; it is never held across I/O, validation or copies. Everything is bounded
per poll, in frames and in time; what a poll did not reach, the next one continues.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kv_bounce_planner._errors import (
    CapacityExceeded,
    DuplicateTransfer,
    LocalProtocolError,
    StaleIdentity,
)
from kv_bounce_planner.copies.gather import CopyHandle, PreparedCopy
from kv_bounce_planner.layout.model import read_only
from kv_bounce_planner.planning.report import check_fragments
from kv_bounce_planner.sessions import core as shared
from kv_bounce_planner.sessions import receive_core as rc
from kv_bounce_planner.sessions.arena import AdvertisedReservation, BoundRegion, Reservation
from kv_bounce_planner.sessions.config import ExpectedOperation, SessionConfig, SessionResources
from kv_bounce_planner.sessions.events import (
    DrainReport,
    MemoryQuarantined,
    MemoryReleased,
    SliceLanded,
    TransferCancelled,
    TransferFailed,
    TransferSucceeded,
)
from kv_bounce_planner.sessions.identity import OperationIdentity, PeerId, TransferIdentity
from kv_bounce_planner.sessions.ledgers import ExposureLedger
from kv_bounce_planner.sessions.messages import (
    BounceGrant,
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
from kv_bounce_planner.sessions.proof import OwnedMemory, ProvenMemory
from kv_bounce_planner.sessions.shell import OVER_MAX, PeerLife, PeerState, Shell, bound
from kv_bounce_planner.sessions.states import Outcome, ReceiveState
from kv_bounce_planner.transports.interface import ArrivedMark, Int64Array, TransferJob

if TYPE_CHECKING:
    from kv_bounce_planner.planning.plan import WriterTransfer


class _Receive:
    """Shell state of one transfer."""

    __slots__ = (
        "addresses",
        "advertised",
        "begun",
        "claim",
        "core",
        "expected",
        "exposed",
        "introduced_until_s",
        "lives",
        "offers",
        "owned",
        "prepared",
        "proven",
        "regions",
        "reservations",
        "transfers",
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
        self.addresses: tuple[Any, Any] | None = None
        self.introduced_until_s = 0.0
        #: The life of the peer that each operation was published to: nobody else can say anything about it.
        self.lives: dict[OperationIdentity, PeerLife] = {}
        self.proven: ProvenMemory[Any] | None = None
        #: By slice: reserved and not advertised; advertised; until when its writers wait for one.
        self.reservations: dict[TransferIdentity, Reservation] = {}
        self.advertised: dict[TransferIdentity, AdvertisedReservation] = {}
        self.wait_until_s: dict[TransferIdentity, float] = {}
        self.regions: dict[OperationIdentity, BoundRegion] = {}
        self.prepared: dict[OperationIdentity, PreparedCopy] = {}
        self.offers: dict[OperationIdentity, ReadOffer] = {}
        self.transfers: dict[OperationIdentity, WriterTransfer] = {}  # what is read
        self.begun: set[OperationIdentity] = set()


class Receiver(Shell[_Receive]):
    """Receives KV at one rank.

    Args:
        self_id: This process.
        resources: What it works with.
        config: Bounds.
        ledger: Share one among the generations of a process.
        on_memory: Called with each MemoryReleased and MemoryQuarantined before ``poll`` returns it; if it raises it is called
            again at later polls until it returns, and the memory never goes twice.

    One thread polls; ``cancel`` may come from another. Errors leave the object usable unless they say otherwise.
    """

    def __init__(
        self,
        self_id: PeerId,
        resources: SessionResources,
        config: SessionConfig | None = None,
        *,
        ledger: ExposureLedger | None = None,
        on_memory: Callable[[Any], None] | None = None,
    ) -> None:
        super().__init__(self_id, resources, config, on_memory)
        self._ledger = ledger if ledger is not None else ExposureLedger.of(self_id)
        self._transfers: dict[TransferIdentity, _Receive] = {}
        self._of_slice: dict[TransferIdentity, _Receive] = {}
        self._of_operation: dict[OperationIdentity, _Receive] = {}
        self._incarnations: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._over: OrderedDict[TransferIdentity, None] = OrderedDict()
        self._next_operation = 0
        self._reads: deque[tuple[_Receive, OperationIdentity]] = deque()
        self._checks: deque[tuple[_Receive, rc.CheckReport]] = deque()
        self._scatters: deque[tuple[_Receive, rc.Scatter]] = deque()
        self._served: deque[Reservation] = deque()  # regions whose transfers were not told of them
        self._granted: deque[tuple[_Receive, OperationIdentity]] = deque()
        self._copying: deque[tuple[_Receive, TransferIdentity, list[CopyHandle]]] = deque()
        # An idle poll looks at none of the open transfers but these: thousands may wait for their prefill.
        self._unpublished: deque[_Receive] = deque()
        self._expiries: list[tuple[float, int, TransferIdentity]] = []
        self._opened = 0
        self._draining: dict[TransferIdentity, _Receive] = {}
        #: Reads of an earlier session over our agents that a sender has asked about, until they are over.
        self._owed: dict[OperationIdentity, PeerLife] = {}
        self._waiting: dict[TransferIdentity, _Receive] = {}

    # -- the host's calls

    def open(
        self,
        identity: TransferIdentity,
        operations: Sequence[ExpectedOperation],
        claim: Any = None,
        *,
        blocks: Sequence[object] = (),
        timeout_s: float | None = None,
    ) -> tuple[OperationIdentity, ...]:
        """Own a destination and ask its writers to fill it.

        Args:
            identity: Names the transfer by its first slice: this receiver's generation and rank.
            operations: One per writer, role and slice, at least one. Those of a slice have one bounce region, one scatter and
                ``SliceLanded``; success, failure and memory are the whole transfer's.
            claim: Names the blocks for the host; returned untouched by the physical end.
            blocks: Hashable names of the blocks, for the exposure ledger.
            timeout_s: In place of ``SessionConfig.operation_timeout_s``, > 0.

        Returns:
            The operations' identities, in the order given. The requests leave as soon as every writer is introduced.

        Raises:
            DuplicateTransfer, StaleIdentity, CapacityExceeded, AddressStillExposed, TransportError: Nothing was taken over.
            LocalProtocolError: A plan is another rank's than its peer's, or two writers would write the same byte.
        """
        if timeout_s is not None and not timeout_s > 0:
            raise ValueError(f"timeout_s wants > 0, got {timeout_s}")
        if self._closed or self._fatal:
            raise LocalProtocolError(f"the receiver admits nothing: {self._fatal or 'closed'}")
        if identity.endpoint_generation != self.self_id.generation or identity.rank != self.self_id.rank:
            raise StaleIdentity(f"{identity} is not of {self.self_id}")
        slices = dict.fromkeys(identity.of_slice(identity.slice_index + each.slice_index) for each in operations)
        for slice_id in (identity, *slices):
            if slice_id in self._of_slice or slice_id in self._transfers or slice_id in self._over:
                raise DuplicateTransfer(f"{slice_id} was opened before")
        if not 1 <= len(operations) <= self.config.operations_max:
            raise CapacityExceeded(f"{len(operations)} operations are outside 1..{self.config.operations_max}")
        if len(self._transfers) >= self.config.transfers_max:
            raise CapacityExceeded(f"{len(self._transfers)} transfers are open")
        names = {(identity.request_id, each.slice_index) for each in (identity, *slices)}
        newest = max(self._incarnations.get(name, -1) for name in names)
        if identity.incarnation < newest:
            raise StaleIdentity(f"{identity}: incarnation {newest} is known")
        addresses = _check_plans(operations)
        for peer in dict.fromkeys(each.peer for each in operations):
            self._introduce(peer)
        now_s = self._clock()
        with self._lock:
            specs: list[rc.OperationSpec] = []
            expected: dict[OperationIdentity, ExpectedOperation] = {}
            for each in operations:
                slice_id = identity.of_slice(identity.slice_index + each.slice_index)
                operation = OperationIdentity(slice_id, each.peer.rank, self._next_operation + len(specs), self.session)
                request = ReceiveRequest(
                    operation,
                    each.peer.generation,
                    each.byte_count,
                    each.plan.digest if each.plan is not None else b"",
                    each.tier == "bounce" and self._arena is not None,
                    each.tier == "pull",
                    each.role,
                    self._memory_kind,
                    self._device_id,
                    each.payload,
                    each.after,
                )
                specs.append(rc.OperationSpec(operation, each.peer, request))
                expected[operation] = each
            core = rc.ReceiveTransfer(
                identity,
                specs,
                required=self._transport.transport_class.required,
                required_of_reader=self._transport.transport_class.required_of_reader,
                drain_deadline_s=self.config.drain_deadline_s,
            )
            record = _Receive(core, expected, claim, blocks)
            record.introduced_until_s = now_s + self.config.introduction_timeout_s
            self._next_operation += len(specs)
            self._ledger.enter(identity, blocks, addresses)
            try:
                self._admit(record, now_s + (self.config.operation_timeout_s if timeout_s is None else timeout_s))
            except BaseException:  # an interrupt between two lines: nothing is taken over, the blocks are free again
                self._revoke(record)
                raise
        return tuple(expected)

    def _admit(self, record: _Receive, until_s: float) -> None:
        identity = record.core.identity
        self._opened += 1
        heapq.heappush(self._expiries, (until_s, self._opened, identity))
        self._transfers[identity] = record
        self._incarnations[(identity.request_id, identity.slice_index)] = identity.incarnation
        for operation in record.expected:
            self._of_operation[operation] = record
            self._of_slice[operation.transfer] = record
            self._incarnations[(identity.request_id, operation.transfer.slice_index)] = identity.incarnation
        bound(self._incarnations, OVER_MAX)
        self._unpublished.append(record)
        self._counters["opened"] += 1

    def _revoke(self, record: _Receive) -> None:
        self._transfers.pop(record.core.identity, None)
        for operation in record.expected:
            self._of_operation.pop(operation, None)
            self._of_slice.pop(operation.transfer, None)
        if record in self._unpublished:
            self._unpublished.remove(record)
        self._ledger.leave(record.core.identity, record.exposed)

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

    @property
    def _phases(self) -> tuple[Callable[[], None], ...]:
        return (
            self._receive,
            self._serve_regions,
            self._publish,
            self._flush,  # requests and grants leave before any copy runs
            self._resolve,
            self._begin_reads,
            self._progress,
            self._answer_for_predecessors,
            self._check_reports,
            self._copies,
            self._tick,
            self._watch_links,
            self._flush,
            self._prepare,
        )

    def statistics(self) -> dict[str, int]:
        """As of the base; ``addresses_unchecked``: transfers of this ledger whose places were too many to compare."""
        return super().statistics() | {"addresses_unchecked": self._ledger.unchecked}

    def drain(self) -> DrainReport:
        """What is still owned. Quiescent when nothing is open and every physical end was delivered."""
        with self._lock:
            doubtful = tuple(
                spec.operation
                for record in self._transfers.values()
                for spec in record.core.operations
                if record.core.state_of(spec.operation).value in ("IN_DOUBT", "CONFLICTED", "READ_IN_DOUBT")
            )
            still = (*self._transfers, *(getattr(event, "identity", None) for event in self._undelivered))
            return DrainReport(still, doubtful, self._quarantine.byte_count)

    def state_of(self, operation: OperationIdentity) -> str:
        """The physical state of an open operation, for health pages and tests; ENDED when no longer kept."""
        record = self._of_operation.get(operation)
        return record.core.state_of(operation).value if record is not None else "ENDED"

    # -- turning events into steps

    def _publish(self) -> None:
        """Under the lock each record turns EXPOSED and its request is queued: a cancel comes wholly before or after.

        Nothing leaves before every writer of a transfer is known: what is published is bound to those lives.
        """
        now_s = self._clock()
        leftover = self._leftover_reads() if self._unpublished else False
        for _ in range(len(self._unpublished)):
            with self._lock:
                record = self._unpublished[0]  # it leaves the queue after its step: an interrupt keeps it there
                if record.core.published or record.core.settled or record.core.outcome is not Outcome.PENDING:
                    self._unpublished.popleft()
                    continue
                if leftover:
                    self._step(record, shared.FailAsked("reads of an earlier session of this receiver are not over"))
                    self._unpublished.popleft()
                    continue
                lives = {spec.operation: self._lives.get(spec.peer) for spec in record.core.operations}
                refused = next(
                    (each for each in lives.values() if each is not None and each.state is PeerState.REFUSED), None
                )
                if refused is not None:
                    self._step(record, shared.FailAsked(f"peer {refused.peer} is refused: {refused.reason}"))
                elif (
                    dead := next((each for each in lives.values() if each is not None and each.dead), None)
                ) is not None:
                    self._step(record, shared.FailAsked(f"peer {dead.peer} has died"))
                elif all(each is not None and each.ready for each in lives.values()):
                    record.lives = {operation: each for operation, each in lives.items() if each is not None}
                    required = {
                        each.peer: (each.transport.required, each.transport.required_of_reader)
                        for each in record.lives.values()
                        if each.transport is not None
                    }
                    self._step(record, rc.Published(required))
                elif now_s >= record.introduced_until_s:
                    missing = [str(spec.peer) for spec in record.core.operations if not _ready(lives[spec.operation])]
                    reason = f"not introduced within {self.config.introduction_timeout_s:g} s: {', '.join(missing[:3])}"
                    self._step(record, shared.FailAsked(reason))
                else:
                    self._unpublished.rotate(-1)
                    for spec in record.core.operations:
                        if lives[spec.operation] is None:
                            self._introduce(spec.peer)  # its earlier life was replaced while this transfer waited
                    continue
                self._unpublished.popleft()

    def _leftover_reads(self) -> bool:
        """Whether reads go on that another session object began over this transport, perhaps into the very same memory.

        They are stopped. Nothing is opened until they are over, or their agent is destroyed.
        """
        leftover = [operation for operation in self._transport.active() if operation.session != self.session]
        for operation in leftover:
            self._transport.stop(operation)
        return bool(leftover)

    def _take(self, life: PeerLife, message: Message) -> None:
        if not isinstance(message, BounceWanted | WriterResult | Sealed | Drained | Doubt | ReadOffer | Cancel):
            self._counters["unexpected"] += 1
            return
        with self._lock:
            record = self._of_operation.get(message.operation)
            if record is None:
                self._late(life, message)
                return
            if record.lives.get(message.operation) is not life:
                # Another peer, or another life of it, speaks about an operation that is not its own: nothing changes.
                self._counters["foreign"] += 1
                return
            if isinstance(message, ReadOffer):
                record.offers.setdefault(message.operation, message)
            self._step(record, rc.MessageArrived(message))

    def _late(self, life: PeerLife, message: Message) -> None:
        """About an operation that is over: a sender that asks what became of its loan hears the last word again."""
        operation = message.operation  # type: ignore[union-attr]
        stale = operation.transfer.endpoint_generation != self.self_id.generation
        self._counters["stale" if stale else "late"] += 1
        receipt = self._receipts.get(operation)
        if receipt is not None and isinstance(message, ReadOffer | Cancel):
            self._queue(life.peer, receipt)
        elif isinstance(message, Cancel) and operation.session != self.session:
            self._transport.stop(operation)  # a predecessor's read over this very agent, if it still goes on
            self._owed[operation] = life

    def _answer_for_predecessors(self) -> None:
        """Tell senders that nothing of what an earlier session object read of them is read any more."""
        if not self._owed:
            return
        active = self._transport.active()
        with self._lock:
            for operation in [each for each in self._owed if each not in active]:
                life = self._owed.pop(operation)
                self._queue(life.peer, ReadOver(operation, False, "the session that read it is gone"))

    def _mark(self, arrived: ArrivedMark) -> None:
        operation = arrived.mark.operation
        with self._lock:
            record = self._of_operation.get(operation)
            if record is None:
                self._counters["late"] += 1
                return
            life = record.lives.get(operation)
            if life is None or life.agent != arrived.agent_name:
                self._counters["foreign"] += 1
            else:
                self._step(
                    record, rc.MarkArrived(operation, arrived.mark.index, arrived.mark.count, arrived.mark.extent)
                )

    # -- pull

    def _plan(self, record: _Receive, operation: OperationIdentity) -> bool:
        expected, offer = record.expected[operation], record.offers[operation]
        if expected.resolve is None:
            raise LocalProtocolError(f"{operation} has no resolver")
        request = next(spec.request for spec in record.core.operations if spec.operation == operation)
        transfer = expected.resolve(offer.payload)
        self._keep_plan(record, request, transfer)
        if expected.plan is not None:  # the bytes land in our own memory: exactly where it was said that they do
            check_fragments(expected.plan, transfer.target_addresses, transfer.sizes)
        return False

    def _begin_reads(self) -> None:
        self._each(self._reads, len(self._reads), self._begin_read)

    def _begin_read(self, item: tuple[_Receive, OperationIdentity]) -> None:
        record, operation = item
        transfer, offer = record.transfers[operation], record.offers[operation]

        def job() -> TransferJob:
            return TransferJob(
                operation,
                record.expected[operation].peer,
                transfer.source_addresses,
                transfer.target_addresses,
                transfer.sizes,
                offer.memory_kind,  # type: ignore[arg-type]
                offer.device_id,
                self._memory_kind,
                self._device_id,
                reads=True,
            )

        self._begin(record, operation, ReceiveState.READING, job)

    # -- reports and copies

    def _check_reports(self) -> None:
        """Outside the lock: a report can be long, and its codec is the user's."""
        self._each(self._checks, len(self._checks), self._check_report)

    def _check_report(self, item: tuple[_Receive, rc.CheckReport]) -> None:
        record, check = item
        plan, region = record.expected[check.operation].plan, record.regions.get(check.operation)
        reason = ""
        if plan is None or region is None or check.message.base_address != region.address:
            reason = "the report names another base than the bound one"
        else:
            try:
                self._reports.check(plan, check.message.report, check.operation, region.address)
            except Exception as error:  # noqa: BLE001 - a user's codec may raise anything: this report is refused
                reason = f"{type(error).__name__}: {error}"
        if reason:
            self._counters["reports_refused"] += 1
        with self._lock:
            self._step(record, rc.ReportChecked(check.operation, not reason, reason))

    def _copies(self) -> None:
        """Scatters, outside the lock."""
        self._each(self._scatters, self.config.copies_per_poll_max, self._scatter)
        for _ in range(len(self._copying)):
            record, slice_id, handles = self._copying[0]
            try:
                done = all(handle.done() for handle in handles)
            except Exception as error:  # noqa: BLE001 - a copier's, in any shape: its memory is in doubt and stays owned
                self._scattered(record, slice_id, f"{type(error).__name__}: {error}")
                self._copying.popleft()
                continue
            except BaseException:
                self._copying.rotate(-1)
                raise
            if done or record.core.settled:
                if not record.core.settled:  # else it was given up at the end of the drain clock
                    self._scattered(record, slice_id, "")
                self._copying.popleft()
            else:
                self._copying.rotate(-1)

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

    def _scatter(self, item: tuple[_Receive, rc.Scatter]) -> None:
        record, scatter = item
        if record.core.settled:
            return
        handles: list[CopyHandle] = []
        try:
            for operation in scatter.operations:
                prepared = record.prepared.get(operation)
                if prepared is None:
                    prepared = self._scatter_list(record, operation)
                handles.append(self._copier.submit(prepared))
        except Exception as error:  # noqa: BLE001 - whatever a copier raises, its memory is in doubt and stays owned
            self._scattered(record, scatter.slice_id, f"{type(error).__name__}: {error}")
            return
        self._copying.append((record, scatter.slice_id, handles))

    def _scattered(self, record: _Receive, slice_id: TransferIdentity, reason: str) -> None:
        self._counters["scatters" if not reason else "scatters_failed"] += 1
        with self._lock:
            self._step(record, rc.ScatterEnded(slice_id, not reason, self._errors_prove_idle or not reason, reason))

    def _tick(self) -> None:
        now_s = self._clock()
        with self._lock:
            if self._arena is not None:
                self._served.extend(self._arena.pump())
                self._each(self._served, len(self._served), self._reserved)
            for slice_id, record in list(self._waiting.items()):
                until_s = record.wait_until_s.get(slice_id)
                if until_s is None:
                    del self._waiting[slice_id]
                elif now_s >= until_s:
                    if self._arena is not None:
                        self._counters["bounce_no_space"] += self._arena.withdraw(slice_id)
                    self._step(record, rc.RegionRefused(slice_id, "no_space"))
                    record.wait_until_s.pop(slice_id, None)
                    self._waiting.pop(slice_id, None)
            while self._expiries and now_s >= self._expiries[0][0]:
                identity = self._expiries[0][2]
                late = self._transfers.get(identity)
                if late is not None and late.core.outcome is Outcome.PENDING:
                    states = ", ".join(sorted({late.core.state_of(op).value for op in late.expected}))
                    self._counters["timed_out"] += 1
                    self._step(late, shared.FailAsked(f"timed out in {states}"))
                heapq.heappop(self._expiries)  # after its step: an interrupt keeps it due
            for record in list(self._draining.values()):
                if record.core.drain_until_s is not None and now_s >= record.core.drain_until_s:
                    self._step(record, shared.Ticked())

    def _reserved(self, reservation: Reservation) -> None:
        slice_id: TransferIdentity = reservation.key  # type: ignore[assignment]
        record = self._of_slice.get(slice_id)
        if record is not None and record.core.asks_for_region(slice_id):
            record.reservations[slice_id] = reservation
            self._step(record, rc.RegionReserved(slice_id))
            record.wait_until_s.pop(slice_id, None)
        elif record is None or (slice_id not in record.reservations and slice_id not in record.advertised):
            reservation.abandon()  # the transfer ended between the reservation and this word of it

    def _peer_gone(self, peer: PeerId, reason: str) -> None:
        with self._lock:
            for record in list(self._transfers.values()):
                if not record.core.published and any(spec.peer == peer for spec in record.core.operations):
                    self._step(record, shared.FailAsked(reason))

    def _peers(self) -> set[PeerId]:
        with self._lock:
            return set(self._lives) | {
                spec.peer for record in self._transfers.values() for spec in record.core.operations
            }

    def _interested(self) -> set[PeerId]:
        with self._lock:
            return {life.peer for record in self._transfers.values() for life in record.lives.values()}

    def _open(self) -> Iterable[_Receive]:
        return self._transfers.values()

    def _of(self, operation: OperationIdentity) -> _Receive | None:
        return self._of_operation.get(operation)

    # -- performing effects (under the lock)

    _once = (rc.ReserveRegion, rc.BindAndGrant, rc.WithdrawRegion, rc.ReleaseRegion, rc.Quarantine)

    def _perform(self, record: _Receive, effect: Any) -> None:
        identity = record.core.identity
        match effect:
            case rc.SendRequest(peer, request):
                self._queue(peer, request)
            case rc.SendCancel(peer, message):
                self._queue(peer, message)
            case rc.SendRefusal(peer, refusal):
                self._counters["bounce_refused"] += 1
                self._queue(peer, refusal)
            case rc.ReserveRegion(slice_id, parts):
                self._reserve(record, slice_id, dict(parts))
            case rc.BindAndGrant(operation, peer):
                self._bind(record, operation, peer)
            case rc.WithdrawRegion(slice_id):
                record.wait_until_s.pop(slice_id, None)
                reservation = record.reservations.pop(slice_id, None)
                if reservation is not None:
                    reservation.abandon()
                elif self._arena is not None:
                    self._arena.withdraw(slice_id)
            case rc.ReleaseRegion(slice_id, proofs):
                advertised = record.advertised.get(slice_id)
                if advertised is not None:
                    advertised.release(proofs)
                    del record.advertised[slice_id]
            case rc.SliceLanded(slice_id):
                self._counters["slices_landed"] += 1
                self._events.append(SliceLanded(identity, slice_id.slice_index - identity.slice_index))
            case rc.CheckReport():
                self._checks.append((record, effect))
            case rc.Scatter():
                if (record, effect) not in self._scatters:
                    self._scatters.append((record, effect))
            case shared.Resolve(operation):
                self._resolves.append((record, operation))
            case rc.StartRead(operation):
                self._reads.append((record, operation))
            case shared.StopPosting(operation):
                self._transport.stop(operation)
            case rc.SayOver(peer, word):
                self._reply(peer, word)
            case rc.EndOutcome(outcome, reason):
                self._ended(record, outcome, reason)
            case rc.Release(proofs):
                unfilled = self._unfilled(record)
                if record.proven is None:
                    record.proven = record.owned.prove(proofs)
                self._ledger.leave(identity, record.exposed)
                self._forget(record)
                self._counters["released"] += 1
                self._settle(MemoryReleased(identity, record.claim, record.proven, unfilled))
            case rc.Quarantine(reason, story):
                byte_count = record.owned.byte_count
                byte_count += sum(advertised.quarantine() for advertised in record.advertised.values())
                record.owned.quarantine(reason)
                self._forget(record)
                self._counters["quarantined"] += 1
                self._settle(MemoryQuarantined(identity, record.claim, reason))
                self._charge(byte_count, story)
            case shared.NoteConflict():
                self._counters["conflicts"] += 1

    def _reserve(self, record: _Receive, slice_id: TransferIdentity, parts: dict[int, int]) -> None:
        if self._arena is None:
            self._step(record, rc.RegionRefused(slice_id, "disabled"))
            return
        refusal = self._arena.enqueue(slice_id, parts)
        if refusal is not None:
            self._step(record, rc.RegionRefused(slice_id, refusal.reason.value))
            return
        record.wait_until_s[slice_id] = self._clock() + self.config.bounce_wait_s
        self._waiting[slice_id] = record
        self._served.extend(self._arena.pump())

    def _serve_regions(self) -> None:
        """Grants leave in the poll in which they were wished for, if there is room."""
        with self._lock:
            self._each(self._served, len(self._served), self._reserved)

    def _bind(self, record: _Receive, operation: OperationIdentity, peer: PeerId) -> None:
        slice_id = operation.transfer
        reservation = record.reservations.get(slice_id)
        if reservation is not None:
            record.advertised[slice_id] = reservation.advertise()
            del record.reservations[slice_id]
        advertised = record.advertised.get(slice_id)
        if advertised is None:
            raise LocalProtocolError(f"{operation}: granted without a reservation")
        region = advertised.bind_writer(operation, operation.operation)
        record.regions[operation] = region
        self._granted.append((record, operation))
        self._counters["bounce_granted"] += 1
        self._queue(
            peer, BounceGrant(operation, region.address, region.byte_count, region.memory_kind, region.device_id)
        )

    def _unfilled(self, record: _Receive) -> tuple[object, ...]:
        """Blocks of operations of which not every byte is in its place: what an engine computes again."""
        names = dict.fromkeys(
            block
            for operation, expected in record.expected.items()
            if not record.core.filled(operation)
            for block in expected.blocks
        )
        return tuple(names)

    def _ended(self, record: _Receive, outcome: Outcome, reason: str) -> None:
        identity = record.core.identity
        if outcome is not Outcome.SUCCEEDED:
            self._draining[identity] = record
        if outcome is Outcome.SUCCEEDED:
            self._counters["succeeded"] += 1
            tiers = tuple(
                (
                    operation,
                    _tier(record, operation),
                    "no_space" if record.core.refused(operation) else "ok",
                )
                for operation in record.expected
            )
            self._counters["operations_bounced"] += sum(tier == "bounce" for _, tier, _ in tiers)
            self._counters["operations_direct"] += sum(tier == "direct" for _, tier, _ in tiers)
            self._counters["operations_pulled"] += sum(tier == "pull" for _, tier, _ in tiers)
            self._events.append(
                TransferSucceeded(identity, tiers, sum(each.byte_count for each in record.expected.values()))
            )
        elif outcome is Outcome.CANCELLED:
            self._counters["cancelled"] += 1
            self._events.append(TransferCancelled(identity, reason))
        else:
            self._counters["failed"] += 1
            self._events.append(TransferFailed(identity, reason))

    def _forget(self, record: _Receive) -> None:
        self._transfers.pop(record.core.identity, None)
        self._draining.pop(record.core.identity, None)
        for operation in record.expected:
            self._of_operation.pop(operation, None)
            self._of_slice.pop(operation.transfer, None)
            self._waiting.pop(operation.transfer, None)
            self._over[operation.transfer] = None
        self._over[record.core.identity] = None
        bound(self._over, OVER_MAX)


def _tier(record: _Receive, operation: OperationIdentity) -> Literal["direct", "bounce", "pull"]:
    if record.core.bounced(operation):
        return "bounce"
    return "pull" if record.expected[operation].tier == "pull" else "direct"


def _ready(life: PeerLife | None) -> bool:
    return life is not None and life.ready


def _check_plans(operations: Sequence[ExpectedOperation]) -> tuple[Int64Array, Int64Array] | None:
    """Every writer is the one that its plan names, and no byte has two writers. Returns (starts, ends), ascending."""
    plans = [(each, each.plan) for each in operations if each.plan is not None]
    for each, plan in plans:
        if plan.rank != each.peer.rank:
            raise LocalProtocolError(
                f"the plan is writer {plan.rank}'s, the operation is asked of rank {each.peer.rank}"
            )
    if not plans:
        return None
    starts = np.concatenate([plan.target_addresses for _, plan in plans])
    ends = starts + np.concatenate([plan.sizes for _, plan in plans])
    if len(plans) > 1 or not bool((starts[1:] >= ends[:-1]).all()):
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], ends[order]
        if bool((starts[1:] < ends[:-1]).any()):
            at = int(starts[1:][starts[1:] < ends[:-1]][0])
            raise LocalProtocolError(f"two writers would write the same bytes, at address {at}")
    return starts, ends
