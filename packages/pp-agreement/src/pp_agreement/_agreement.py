"""The shell: a transport and a clock around the pure core. It holds no protocol state of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, cast

from pp_agreement import _events as ev
from pp_agreement._codec import Codec
from pp_agreement._config import AgreementConfig, Domain
from pp_agreement._errors import AgreementError, LocalProtocolError, RemoteProtocolError, TransportError, WouldBlock
from pp_agreement._events import (
    SURVIVES_FAULT,
    AgreementEvent,
    Disposition,
    Fault,
    FaultCode,
    Key,
    Outcome,
    PublishResult,
    Reason,
    RevokeResult,
    SendFrame,
    WithdrawResult,
)
from pp_agreement._machine import AgreementCore, CoreStatistics
from pp_agreement._state import ReadyState, RoundState
from pp_agreement._transport import Transport

BUCKETS = 40
VERDICTS = (ev.SilenceVerdict, ev.SilenceEnded, ev.DeathVerdict)
VERDICTS_MAX = 256


@dataclass(frozen=True, slots=True)
class DrainReport:
    """What a drain has proven, or what it lacks.

    ``missing_ranks``: ranks whose report is not known here; ``undecided``: this rank's open rounds.
    """

    drained: bool
    last_incarnation: int | None
    admitted: int
    committed: int
    closed: int
    digest: str
    undecided: tuple[Key, ...]
    missing_ranks: tuple[int, ...]
    fault: Fault | None


@dataclass(frozen=True, slots=True)
class AgreementStatistics:
    """Counters of the core and the times spent in polls."""

    core: CoreStatistics
    polls: int
    poll_sum_s: float
    poll_max_s: float
    poll_gap_max_s: float
    poll_buckets: tuple[int, ...]
    bytes_sent: int
    bytes_received: int
    refused_slots: int
    outstanding_max: int


class BaseAgreement:
    """Calls that both agreements share; see :class:`Agreement`."""

    mode = "async"

    def __init__(
        self, domain: Domain, rank: int, config: AgreementConfig, clock: Callable[[], float], *, replicated: bool
    ) -> None:
        self.domain = domain
        self.rank = rank
        self.config = config
        self._clock = clock
        self._core = AgreementCore(domain, rank, config, replicated=replicated)
        self._events: list[AgreementEvent] = []
        self._opened = False
        self._ended = False
        self._clean = False
        self.polls = 0
        self.poll_sum_s = 0.0
        self.poll_max_s = 0.0
        self.poll_gap_max_s = 0.0
        self._poll_buckets = [0] * BUCKETS
        self._last_poll_s: float | None = None
        self._opened_at_s = 0.0
        self.busy_reason = ""
        self.verdicts: list[AgreementEvent] = []

    # -- plumbing ----------------------------------------------------------------------------------------------------------

    def _apply(self, event: ev.Input) -> Any:
        """One step; events are kept for the next poll, a frame goes out at once, the answer is returned."""
        if self._ended:
            raise LocalProtocolError("after close()", rank=self.rank)
        try:
            effects = self._core.step(event, self._clock())
        except (AgreementError, WouldBlock):
            raise
        except Exception as error:  # a defect of the core must stop the domain, not go on half done
            self._keep(self._core.step(ev.HostFailed(FaultCode.INTERNAL, repr(error)), self._clock()))
            raise
        return self._keep(effects)

    def _keep(self, effects: tuple[ev.Effect, ...]) -> Any:
        answer: Any = None
        for effect in effects:
            if isinstance(effect, AgreementEvent):
                if isinstance(effect, Fault):  # suppress what was not handed out yet and no longer binds
                    self._events = [e for e in self._events if isinstance(e, SURVIVES_FAULT)]
                elif isinstance(effect, VERDICTS):
                    self.verdicts.append(effect)
                    del self.verdicts[:-VERDICTS_MAX]
                self._events.append(effect)
            elif isinstance(effect, SendFrame):
                self._transmit(effect)
            else:
                answer = effect.value
        return answer

    def _transmit(self, effect: SendFrame) -> None:
        raise NotImplementedError

    def _take(self) -> tuple[AgreementEvent, ...]:
        if not self._events:
            return ()
        events, self._events = self._events, []
        return tuple([e for e in events if not isinstance(e, (ev.Prepared, ev.Released)) or self._binds(e)])

    def _binds(self, event: ev.Prepared | ev.Released) -> bool:
        """Whether the host may still act on it: its own withdrawal or revocation since then swallows it."""
        round_ = self._core.rounds.get(event.key.incarnation)
        wanted = ReadyState.PREPARED if isinstance(event, ev.Prepared) else ReadyState.RELEASED
        return round_ is not None and round_.attempt == event.key.attempt and round_.ready is wanted

    def _begin_poll(self) -> float:
        if not self._opened or self._ended:
            raise LocalProtocolError("poll before open() or after close()", rank=self.rank)
        now_s = self._clock()
        if self._last_poll_s is not None and now_s - self._last_poll_s > self.poll_gap_max_s:
            self.poll_gap_max_s = now_s - self._last_poll_s
        self._last_poll_s = now_s
        self.polls += 1
        return now_s

    def _end_poll(self, began_s: float) -> None:
        spent_s = self._clock() - began_s
        self.poll_sum_s += spent_s
        if spent_s > self.poll_max_s:
            self.poll_max_s = spent_s
        self._poll_buckets[min(int(max(spent_s, 0.0) * 1e6).bit_length(), BUCKETS - 1)] += 1

    # -- admission -----------------------------------------------------------------------------------------------------------

    @property
    def next_incarnation(self) -> int:
        """The number of the next admission: what the authority puts into its broadcast."""
        return self._core.heard + 1

    @property
    def credits_available(self) -> int:
        """Admissions that the authority may make now."""
        return max(0, self.config.credits - self._core.open_count)

    @property
    def open_rounds(self) -> int:
        """Rounds open at this rank, the held-back ones included."""
        return len(self._core.rounds)

    @property
    def stopped(self) -> Fault | None:
        """The first diagnosis, once the domain has stopped."""
        return self._core.fault

    @property
    def is_scheduler(self) -> bool:
        """Whether this is the scheduling rank."""
        return self._core.is_scheduler

    @property
    def is_coordinator(self) -> bool:
        """Whether this is the coordinator."""
        return self.domain.coordinator_index == self._core.me

    def admit(self, request_id: int, incarnation: int, ready: bool = True) -> Key:
        """The authoritative broadcast named a request; call it on every rank, in broadcast order.

        Args:
            request_id: 0..2**63-1.
            incarnation: The domain's admission number: 1, 2, 3, … without gaps.
            ready: False where readiness is not used (context-first).

        Returns:
            The key of the current attempt.

        Raises:
            WouldBlock: On the scheduling rank without a free credit. Nothing changed.
            LocalProtocolError: Out of order, in use, or after the drain. Nothing changed.
            DomainStopped: After a fault.
        """
        answer = self._apply(ev.RequestAdmitted(request_id, incarnation, ready))
        if answer is None:  # the broadcast contradicted what peers said: the domain stopped in this call
            return Key(request_id, incarnation)
        return cast(Key, answer)

    # -- readiness -----------------------------------------------------------------------------------------------------------

    def publish_ready(self, key: Key) -> PublishResult:
        """Vote READY for an attempt. Idempotent.

        Returns:
            PUBLISHED; DEFERRED: goes out by itself when the attempt before, or an older round, is decided here;
            ABORTING: the attempt is ending; FINAL: it is over.

        Raises:
            LocalProtocolError: Not admitted here, readiness not used, or after the terminal vote. Nothing changed.
        """
        return cast(PublishResult, self._apply(ev.ReadyPublished(key)))

    def withdraw(self, key: Key, reason: Reason = Reason.CANCELLED) -> WithdrawResult:
        """Take readiness back, or refuse it without having voted.

        Returns:
            WILL_ABORT is a promise: this attempt ends in ABORT at every rank. LEASED: this rank's lease is irrevocable,
            see ``revoke`` and ``recall``. ACTIVATED, FINAL, TERMINAL, NOT_USED: nothing to withdraw.
        """
        return cast(WithdrawResult, self._apply(ev.WithdrawRequested(key, reason)))

    def acknowledge_prepare(self, key: Key) -> bool:
        """Grant this rank's lease after ``Prepared``. False: the attempt is being aborted meanwhile."""
        return bool(self._apply(ev.PrepareAcknowledged(key)))

    def acknowledge_abort(self, key: Key) -> None:
        """Say that this rank let go of an attempt, after ``Aborted``."""
        self._apply(ev.AbortAcknowledged(key))

    def activate(self, keys_in_schedule_order: Iterable[Key]) -> int:
        """The schedule names these requests: at the scheduling rank call it before anyone can see the schedule.

        All or nothing. Keys of rounds without readiness are skipped. From here on the requests will be committed, never
        aborted.

        Returns:
            How many were activated.

        Raises:
            LocalProtocolError: One is not RELEASED here (scheduling rank) or LEASED (others). Nothing changed.
        """
        return int(self._apply(ev.ScheduleActivated(tuple(keys_in_schedule_order))) or 0)

    def revoke(self, key: Key, reason: Reason = Reason.CANCELLED) -> RevokeResult:
        """Scheduling rank: a leased request will not be scheduled."""
        return cast(RevokeResult, self._apply(ev.RevokeRequested(key, reason)))

    def recall(self, key: Key, reason: Reason = Reason.CANCELLED) -> bool:
        """A leased rank advises the scheduling rank to revoke. Promises nothing."""
        return bool(self._apply(ev.RecallRequested(key, reason)))

    # -- terminal ------------------------------------------------------------------------------------------------------------

    def vote_terminal(
        self,
        key: Key,
        outcome: Outcome,
        disposition: Disposition = Disposition.RELEASE,
        reason: Reason = Reason.NONE,
    ) -> bool:
        """Cast this rank's one vote, after local quiescence (or, with QUARANTINE, after the deadline of a doubt).

        Returns:
            False when the same vote was cast before.

        Raises:
            LocalProtocolError: A different vote was cast, readiness is open here, COMPLETED with QUARANTINE, or
                QUARANTINE too early. Nothing changed.
        """
        return bool(self._apply(ev.TerminalVoted(key, outcome, disposition, reason)))

    def doubt(self, key: Key, reason: Reason = Reason.DOUBT) -> bool:
        """This rank has no proof of quiescence. The first call starts the deadline; later ones do not move it."""
        return bool(self._apply(ev.DoubtRaised(key, reason)))

    # -- domain --------------------------------------------------------------------------------------------------------------

    def fail(self, detail: str, code: FaultCode = FaultCode.HOST) -> None:
        """Stop the domain for a reason of the host's. Without effect when it has stopped already."""
        self._keep(self._core.step(ev.HostFailed(code, detail), self._clock()))

    def start_drain(self, last_incarnation: int) -> None:
        """Nothing after ``last_incarnation`` is admitted. The scheduling rank's call starts the drain for all.

        Its unscheduled leases are revoked, its other undecided attempts withdrawn.
        """
        self._apply(ev.DrainRequested(last_incarnation))

    def drain_state(self) -> DrainReport:
        """What is proven so far."""
        core = self._core
        return DrainReport(
            drained=core.drained and core.fault is None,
            last_incarnation=core.drain_last,
            admitted=core.heard,
            committed=core.committed,
            closed=core.closed_rounds,
            digest=core.digest.hex(),
            undecided=core.undecided(),
            missing_ranks=() if core.drained else core.missing_ranks(),
            fault=core.fault,
        )

    def poll(self) -> tuple[AgreementEvent, ...]:
        """Exchange frames and return what happened."""
        raise NotImplementedError

    def drain(
        self,
        deadline_s: float,
        wait: Callable[[float], object] = time.sleep,
        on_events: Callable[[tuple[AgreementEvent, ...]], None] | None = None,
    ) -> DrainReport:
        """Poll until every rank has reported all admissions decided, a fault, or ``deadline_s`` (a duration).

        Args:
            deadline_s: Seconds from now.
            wait: Called between polls with a duration <= 2 ms; interruptible where the host wants it.
            on_events: Gets each poll's events and must go on voting and acknowledging. Without it they wait for the
                next ``poll()``.
        """
        until_s = self._clock() + deadline_s
        kept: list[AgreementEvent] = []
        try:
            while True:
                events = self.poll()
                if on_events is not None:
                    if events:
                        on_events(events)
                else:
                    kept.extend(events)
                if self._core.drained or self._core.fault is not None or self._clock() >= until_s:
                    return self.drain_state()
                wait(0.002)
        finally:
            self._events[:0] = kept

    # -- looking at it ---------------------------------------------------------------------------------------------------------

    def state(self, key: Key) -> RoundState | None:
        """This rank's view of an open round; None when it is not open here."""
        return self._core.state(key.incarnation)

    def story(self, key: Key) -> str:
        """What happened to an open round, a line each."""
        return "\n".join(self._core.story(key.incarnation))

    def validate(self) -> None:
        """Check the invariants that one rank can see; raises ``InvariantViolation``."""
        self._core.validate()

    def _traffic(self) -> tuple[int, int, int, int]:
        return 0, 0, 0, 0

    def statistics(self) -> AgreementStatistics:
        """Counters since construction; immutable."""
        sent, received, refused, outstanding = self._traffic()
        return AgreementStatistics(
            core=self._core.statistics(),
            polls=self.polls,
            poll_sum_s=self.poll_sum_s,
            poll_max_s=self.poll_max_s,
            poll_gap_max_s=self.poll_gap_max_s,
            poll_buckets=tuple(self._poll_buckets),
            bytes_sent=sent,
            bytes_received=received,
            refused_slots=refused,
            outstanding_max=outstanding,
        )

    def _transport_name(self) -> str:
        raise NotImplementedError

    def evidence(self) -> dict[str, object]:
        """Everything a comparison of ranks needs, as JSON-able data; see ``pp-agreement verify``."""
        from pp_agreement._evidence import evidence_of

        return evidence_of(self)

    def __enter__(self) -> Any:
        raise NotImplementedError

    def close(self, deadline_s: float = 5.0, wait: Callable[[float], object] = time.sleep) -> bool:
        """End this rank's part; see the subclasses."""
        raise NotImplementedError

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(0.0 if kind is not None else 5.0)


class Agreement(BaseAgreement):
    """One rank's side of one domain, without waiting for anybody.

    All calls but ``drain`` and ``close`` return at once; frames leave and arrive in ``poll()`` (at most one frame per
    peer leaves per poll) and leave in ``busy()``. One thread uses an object. Construction does no I/O.

    Args:
        domain: Who decides together.
        rank: This rank.
        transport: Its streams to the others.
        config: Bounds, equal on every rank.
        clock: Monotonic seconds.

    Raises:
        ConfigurationError: ``rank`` is no member.
    """

    mode = "async"

    def __init__(
        self,
        domain: Domain,
        rank: int,
        transport: Transport,
        config: AgreementConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(domain, rank, config or AgreementConfig(), clock, replicated=False)
        self._transport = transport
        self._codec = Codec(domain, rank, self.config.frame_bytes_max)
        self._bytes_sent = 0
        self._bytes_received = 0
        self._refused_slots = 0
        self._outstanding_max = 0
        self._dead: list[tuple[int, str]] = []

    def open(self) -> None:
        """Open the transport. Nothing is exchanged yet."""
        if self._opened:
            raise LocalProtocolError("opened twice", rank=self.rank)
        self._transport.open(self._core.peers, self.config.frame_bytes_max)
        self._opened = True
        self._opened_at_s = self._clock()

    def __enter__(self) -> Agreement:
        self.open()
        return self

    def _transport_name(self) -> str:
        return self._transport.name

    def _traffic(self) -> tuple[int, int, int, int]:
        return self._bytes_sent, self._bytes_received, self._refused_slots, self._outstanding_max

    def _transmit(self, effect: SendFrame) -> None:
        data = self._codec.encode(effect.peer, effect.frame)
        try:
            self._transport.send(effect.peer, data)
        except (WouldBlock, TransportError) as error:
            # The record left its queue and may or may not arrive: nothing may be sent again, so the domain stops.
            self._keep(self._core.step(ev.SendFailed(effect.peer, str(error)), self._clock()))
            return
        self._bytes_sent += len(data)

    def poll(self) -> tuple[AgreementEvent, ...]:
        """Receive what has arrived, send at most one frame to each peer, judge silence; bounded, never blocks.

        Returns:
            Events in order, each once. A ``Fault`` is among them, not raised; afterwards polls return ().

        Raises:
            LocalProtocolError: Not open.
        """
        began_s = self._begin_poll()
        core, transport = self._core, self._transport
        try:
            sweep = transport.receive(self.config.frames_per_poll_max)
        except TransportError as error:
            self.fail(str(error), FaultCode.TRANSPORT)
            sweep = None
        if sweep is not None:
            decode = self._codec.decode
            for peer, data in sweep.frames:
                self._bytes_received += len(data)
                event: ev.Input
                try:
                    event = ev.FrameReceived(peer, decode(peer, data))
                except RemoteProtocolError as error:
                    event = ev.FrameRejected(peer, str(error))
                self._apply(event)
            self._keep(core.step(ev.SweepCompleted(sweep.empty), began_s))
            deaths = transport.deaths()
            if deaths or self._dead:
                self._dead.extend(deaths)
                self._bury(sweep.empty, began_s)
        self._flush(began_s)
        self._end_poll(began_s)
        return self._take()

    def _bury(self, empty: int, now_s: float) -> None:
        """Evidence of death counts once everything that the dead member said has been heard."""
        links = sum(1 << peer for peer in self._core.peers)
        for member, evidence in tuple(self._dead):
            if empty >> member & 1 or not links >> member & 1:
                self._dead.remove((member, evidence))
                self._keep(self._core.step(ev.PeerDied(member, evidence), now_s))

    def _flush(self, now_s: float) -> None:
        core, transport = self._core, self._transport
        for peer in core.peers:
            if core.wants_slot(peer, now_s):
                outstanding = transport.outstanding(peer)
                if outstanding > self._outstanding_max:
                    self._outstanding_max = outstanding
                if transport.can_send(peer):
                    self._keep(core.step(ev.SlotFreed(peer, outstanding), now_s))
                else:
                    self._refused_slots += 1

    def busy(self, max_s: float, reason: str = "") -> bool:
        """Declare that this rank will not poll for up to ``max_s``; its observers extend their patience.

        Returns:
            Whether every frame left now; otherwise it leaves at the next poll.
        """
        self._apply(ev.BusyDeclared(max_s))
        self.busy_reason = reason
        if not self._opened or self._ended:
            raise LocalProtocolError("busy before open() or after close()", rank=self.rank)
        self._flush(self._clock())
        return not self._core.busy_pending

    def peer_died(self, rank: int, evidence: str) -> None:
        """The launcher has operating-system evidence that ``rank`` is gone. Stops the domain; frees nothing."""
        self._keep(self._core.step(ev.PeerDied(self.domain.index_of(rank), evidence), self._clock()))

    def close(self, deadline_s: float = 5.0, wait: Callable[[float], object] = time.sleep) -> bool:
        """End this rank's part. After a proven drain all ranks shake hands, then the transport is freed.

        Args:
            deadline_s: Longest wait for the others (or, after a fault, for the FAIL_STOP to leave), in seconds.
            wait: Called between polls.

        Returns:
            True: clean, every rank has closed. False: left without them; nothing that needs a peer was done.
        """
        if self._ended:
            return self._clean
        core = self._core
        if self._opened:
            until_s = self._clock() + deadline_s
            if core.drained and core.fault is None:
                self._apply(ev.CloseRequested())
                while not self._left(core.closed) and core.fault is None and self._clock() < until_s:
                    self._events[:0] = self.poll()
                    wait(0.0005)
            elif core.fault is not None:
                while not self._left(True) and self._clock() < until_s:
                    self.poll()
                    wait(0.0005)
            self._clean = core.closed and core.fault is None and self._left(True)
            self._transport.close(self._clean)
        self._ended = True
        return self._clean

    def _left(self, closed: bool) -> bool:
        """Whether the last words have been received by the peers."""
        if not closed or self._core.intents or any(self._core.queues.values()):
            return False
        return all(self._transport.outstanding(peer) == 0 for peer in self._core.peers)
