"""The shell: a transport and a clock around the pure core. It holds no protocol state of its own."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, cast

from pp_agreement import _events as ev
from pp_agreement._codec import Codec
from pp_agreement._config import FRAME_BYTES, RECORD_BYTES, AgreementConfig, Domain
from pp_agreement._errors import (
    ConcurrentCallError,
    ConfigurationError,
    DomainStopped,
    LocalProtocolError,
    TransportError,
    WouldBlock,
)
from pp_agreement._events import (
    SURVIVES_FAULT,
    AgreementEvent,
    Disposition,
    Fault,
    FaultCode,
    Frame,
    Key,
    Outcome,
    PublishResult,
    Reason,
    RevokeResult,
    Verdict,
    WithdrawResult,
)
from pp_agreement._evidence import evidence_of
from pp_agreement._machine import NOTHING, PEER, AgreementCore
from pp_agreement._state import ReadyState, RoundState
from pp_agreement._statistics import WAITING_MAX, AgreementStatistics, DrainReport, Durations
from pp_agreement._transport import Transport

_REVOCABLE = (ev.Prepared, ev.Released)


class BaseAgreement:
    """Calls that both agreements share; see :class:`Agreement`."""

    mode = "async"

    def __init__(
        self, domain: Domain, rank: int, config: AgreementConfig, clock: Callable[[], float], *, replicated: bool
    ) -> None:
        if not isinstance(domain, Domain):
            raise ConfigurationError("domain", f"{domain!r} is not a Domain")
        if not isinstance(config, AgreementConfig):
            raise ConfigurationError("config", f"{config!r} is not an AgreementConfig")
        self.domain = domain
        self.rank = rank
        self.config = config
        self._clock = clock
        session = secrets.randbits(64) or 1
        self._adopt(AgreementCore(domain, rank, config, replicated=replicated, session=session))
        self._events: list[AgreementEvent] = []  # what drain() and close() kept for the next poll
        self._opened = False
        self._ended = False
        self._clean = False
        self._polling = False
        self.poll_gap_max_s = 0.0
        self._spent = Durations()  # in polls that ended
        self._last_poll_s = math.inf  # the first poll follows none
        self._opened_at_s = 0.0
        self.busy_reason = ""

    # -- plumbing ----------------------------------------------------------------------------------------------------------

    def _adopt(self, core: AgreementCore) -> None:
        """This is the core from now on."""
        self._core = core
        self._step: Callable[..., Any] = core.call  # a local call; its events wait in the core for the next poll
        self._admit, self._vote = core.member.admit, core.member.vote

    def _take(self) -> tuple[AgreementEvent, ...]:
        """What the host has not been given yet, as far as it still binds."""
        core = self._core
        events = core.take()
        if self._events:
            events, self._events = (*self._events, *events), []
        if core.fault is not None:  # also what drain() and close() kept from before the fault
            return tuple([event for event in events if isinstance(event, SURVIVES_FAULT)])
        return tuple([event for event in events if type(event) not in _REVOCABLE or self._binds(event)])

    def _binds(self, event: Any) -> bool:
        """Whether the host may still act on it: its own withdrawal or revocation since then swallows it."""
        round_ = self._core.rounds.open.get(event.key.incarnation)
        wanted = ReadyState.PREPARED if type(event) is ev.Prepared else ReadyState.RELEASED
        return round_ is not None and round_.attempt == event.key.attempt and round_.ready is wanted

    def _may_poll(self) -> bool:
        """False: only what is kept from before the end is told."""
        if self._polling:
            raise ConcurrentCallError(f"rank {self.rank}: poll while another poll runs")
        if self._opened and not self._ended:
            return True
        if self._ended and (self._events or self._core.context.events):
            return False
        raise LocalProtocolError("poll before open() or after close()", rank=self.rank)

    # -- admission -----------------------------------------------------------------------------------------------------------

    @property
    def next_incarnation(self) -> int:
        """The number of the next admission: what the authority puts into its broadcast."""
        return self._core.heard + 1

    @property
    def credits_available(self) -> int:
        """Admissions that the authority may make now."""
        return max(0, self.config.credits - self._core.rounds.open_count)

    @property
    def open_rounds(self) -> int:
        """Rounds open at this rank, the held-back ones included."""
        return len(self._core.rounds.open)

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

        The scheduling rank, the authority, calls it before it broadcasts: nobody may speak of what it has not admitted.

        Args:
            request_id: 0..2**63-1.
            incarnation: The domain's admission number: 1, 2, 3, … without gaps.
            ready: False where readiness is not used (context-first).

        Returns:
            The key of the current attempt.

        Raises:
            WouldBlock: On the scheduling rank without a free credit. Nothing changed.
            LocalProtocolError: Out of order, in use, after the drain, or of a wrong type. Nothing changed.
            DomainStopped: After a fault, or by this call: the broadcast contradicts what peers said, or the drain.
        """
        answer = self._step(self._admit, (request_id, incarnation, ready), self._clock())
        if answer is NOTHING:  # the broadcast contradicts what peers said, or the drain
            raise DomainStopped(cast(Fault, self._core.fault))
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
        answer = self._step(self._core.member.publish, (key,), self._clock())
        return cast(PublishResult, None if answer is NOTHING else answer)

    def withdraw(self, key: Key, reason: Reason = Reason.CANCELLED) -> WithdrawResult:
        """Take readiness back, or refuse it without having voted.

        Returns:
            WILL_ABORT is a promise: this attempt ends in ABORT at every rank. LEASED: this rank's lease is irrevocable,
            see ``revoke`` and ``recall``. ACTIVATED, FINAL, TERMINAL, NOT_USED: nothing to withdraw.
        """
        answer = self._step(self._core.member.withdraw, (key, reason), self._clock())
        return cast(WithdrawResult, None if answer is NOTHING else answer)

    def acknowledge_prepare(self, key: Key) -> bool:
        """Grant this rank's lease after ``Prepared``. False: the attempt is being aborted meanwhile."""
        return self._step(self._core.member.acknowledge_prepare, (key,), self._clock()) is True

    def acknowledge_abort(self, key: Key) -> None:
        """Say that this rank let go of an attempt, after ``Aborted``."""
        self._step(self._core.member.acknowledge_abort, (key,), self._clock())

    def activate(self, keys_in_schedule_order: Iterable[Key]) -> int:
        """The schedule names these requests: at the scheduling rank call it before anyone can see the schedule.

        All or nothing. Keys of rounds without readiness are skipped. From here on the requests will be committed, never
        aborted.

        Returns:
            How many were activated.

        Raises:
            LocalProtocolError: One is not RELEASED here (scheduling rank) or LEASED (others). Nothing changed.
        """
        if not isinstance(keys_in_schedule_order, Iterable) or isinstance(keys_in_schedule_order, Key):
            raise LocalProtocolError(f"{keys_in_schedule_order!r} is not a sequence of keys", rank=self.rank)
        answer = self._step(self._core.member.activate, (tuple(keys_in_schedule_order),), self._clock())
        return 0 if answer is NOTHING else int(answer)

    def revoke(self, key: Key, reason: Reason = Reason.CANCELLED) -> RevokeResult:
        """Scheduling rank: a leased request will not be scheduled."""
        answer = self._step(self._core.member.revoke, (key, reason), self._clock())
        return cast(RevokeResult, None if answer is NOTHING else answer)

    def recall(self, key: Key, reason: Reason = Reason.CANCELLED) -> bool:
        """A leased rank advises the scheduling rank to revoke. Promises nothing."""
        return self._step(self._core.member.recall, (key, reason), self._clock()) is True

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
        return self._step(self._vote, (key, outcome, disposition, reason), self._clock()) is True

    def doubt(self, key: Key, reason: Reason = Reason.DOUBT) -> bool:
        """This rank has no proof of quiescence. The first call starts the deadline; later ones do not move it."""
        return self._step(self._core.member.doubt, (key, reason), self._clock()) is True

    # -- domain --------------------------------------------------------------------------------------------------------------

    def fail(self, detail: str, code: FaultCode = FaultCode.HOST) -> None:
        """Stop the domain for a reason of the host's. Without effect when it has stopped already.

        The one call that may come at any moment, from a signal handler or a callback: while another call runs it is noted,
        and takes effect with the next call or poll.
        """
        if type(code) is not FaultCode:
            raise LocalProtocolError(f"{code!r} is not a FaultCode", rank=self.rank)
        self._core.fail(code, str(detail)[:1000], self._clock())

    def start_drain(self, last_incarnation: int) -> None:
        """Nothing after ``last_incarnation`` is admitted. The scheduling rank's call starts the drain for all.

        Its unscheduled leases are revoked, its other undecided attempts withdrawn.
        """
        self._step(self._core.ending.start, (last_incarnation,), self._clock())

    def drain_state(self) -> DrainReport:
        """What is proven so far."""
        core = self._core
        return DrainReport(
            drained=core.drained and core.fault is None,
            last_incarnation=core.rounds.last,
            admitted=core.heard,
            committed=core.member.committed,
            closed=core.member.closed_rounds,
            digest=core.member.digest.hex(),
            undecided=core.undecided(),
            missing_ranks=() if core.drained else core.ending.missing_ranks(),
            fault=core.fault,
        )

    def poll(self) -> tuple[AgreementEvent, ...]:
        """Exchange frames and return what happened; see the subclasses.

        Returns:
            Events in order, each once. A ``Fault`` is among them, not raised; afterwards polls return (). After ``close``:
            what ``drain`` and ``close`` kept, once.

        Raises:
            LocalProtocolError: Not open.
            ConcurrentCallError: Another poll of this agreement runs.
        """
        if (self._polling or self._ended or not self._opened) and not self._may_poll():
            return self._take()
        self._polling = True
        core = self._core
        try:
            began_s = self._clock()
            gap_s = began_s - self._last_poll_s
            if gap_s > self.poll_gap_max_s:
                self.poll_gap_max_s = gap_s
            self._last_poll_s = began_s
            self._turn(began_s)
            spent_s = self._spent.waiting
            spent_s.append(self._clock() - began_s)
            if len(spent_s) > WAITING_MAX:
                self._spent.count()
        except BaseException as error:  # a defect or an interrupt, with a frame in hand perhaps: nothing may follow it
            core.fail(FaultCode.INTERNAL, f"broken off: {error!r}", self._last_poll_s)
            raise
        finally:
            self._polling = False
        context = core.context
        if self._events or context.may_lapse or context.fault is not None:
            return self._take()
        return core.take() if context.events else ()

    def _turn(self, now_s: float) -> None:
        """One exchange with the others."""
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

        Raises:
            LocalProtocolError: Not open, or ``deadline_s`` is not a number.
        """
        until_s = self._clock() + self._duration(deadline_s)
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

    def _duration(self, deadline_s: float) -> float:
        if type(deadline_s) not in (int, float) or math.isnan(deadline_s):  # a wait until NaN would never end
            raise LocalProtocolError(f"deadline_s={deadline_s!r} is not a number of seconds", rank=self.rank)
        return deadline_s

    # -- looking at it ---------------------------------------------------------------------------------------------------------

    def state(self, key: Key) -> RoundState | None:
        """This rank's view of an open round; None when it is not open here."""
        return self._core.state(self._number(key))

    def story(self, key: Key) -> str:
        """What happened to an open round, a line each."""
        return "\n".join(self._core.story(self._number(key)))

    def _number(self, key: Key) -> int:
        if type(key) is not Key or type(key.incarnation) is not int:
            raise LocalProtocolError(f"{key!r} is not a Key", rank=self.rank)
        return key.incarnation

    def validate(self) -> None:
        """Check the invariants that one rank can see; raises ``InvariantViolation``."""
        self._core.validate()

    @property
    def polls(self) -> int:
        """Polls that ended."""
        return sum(self._spent.buckets) + len(self._spent.waiting)

    @property
    def verdicts(self) -> list[Verdict]:
        """The last verdicts about silence and death, oldest first."""
        return self._core.context.verdicts

    def _traffic(self) -> tuple[int, int, int, int]:
        return 0, 0, 0, 0

    def statistics(self) -> AgreementStatistics:
        """Counters since construction; immutable."""
        sent, received, refused, outstanding = self._traffic()
        spent = self._spent.counted()
        return AgreementStatistics(
            core=self._core.statistics(),
            polls=sum(spent.buckets),
            poll_sum_s=spent.sum_s,
            poll_max_s=spent.longest_s,
            poll_gap_max_s=self.poll_gap_max_s,
            poll_buckets=tuple(spent.buckets),
            bytes_sent=sent,
            bytes_received=received,
            refused_slots=refused,
            outstanding_max=outstanding,
        )

    def _transport_name(self) -> str:
        raise NotImplementedError

    def evidence(self) -> dict[str, object]:
        """Everything a comparison of ranks needs, as JSON-able data; see ``pp-agreement verify``."""
        return evidence_of(
            mode=self.mode,
            transport=self._transport_name(),
            rank=self.rank,
            domain=self.domain,
            config=self.config,
            statistics=self.statistics(),
            drain=self.drain_state(),
            busy_reason=self.busy_reason,
            verdicts=self.verdicts,
        )

    def __enter__(self) -> Any:
        raise NotImplementedError

    def close(self, deadline_s: float = 5.0, wait: Callable[[float], object] = time.sleep) -> bool:
        """End this rank's part; see the subclasses."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Leave now, without waiting for anybody: what ``close`` did not come to, or was not called for.

        A rank that leaves while the others still close tells them, as far as that needs no waiting, so that nobody
        takes this end for a clean one. Without effect after ``close`` has ended this rank's part.
        """
        if self._ended:
            return
        try:
            if self._opened and self._core.closing and not self._core.closed and self._core.fault is None:
                self.fail("left before everybody had closed")
                self._last_words()
        finally:
            self._end(False)

    def _end(self, clean: bool) -> None:
        """The last thing that happens to an agreement, once."""
        if not self._ended:
            self._ended = True
            self._core.end()
            self._clean = clean
            if self._opened:
                self._let_go(clean)

    def _let_go(self, clean: bool) -> None:
        raise NotImplementedError

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            if not self.close(5.0):
                self.abandon()
            return
        try:  # the others would wait for this rank's votes: tell them, as far as that needs no waiting
            if self._opened and not self._ended and not self._core.drained:
                self.fail(f"left by {kind.__name__}: {error}")
                self._last_words()
        finally:
            if not self.close(0.0):
                self.abandon()

    def _last_words(self) -> None:
        """After a failure, before leaving."""
        self._events[:0] = self.poll()


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
        ConfigurationError: ``rank`` is not a member.
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
        super().__init__(domain, rank, AgreementConfig() if config is None else config, clock, replicated=False)
        self._transport = transport
        self._codec = Codec(domain, rank, self.config.frame_bytes_max)
        self._frames_max = self.config.frames_per_poll_max
        self._refused_slots = 0
        self._outstanding_max = 0
        self._dead: dict[int, str] = {}  # evidence that waits for the member's ring to be empty
        self._buried: set[int] = set()

    def open(self) -> None:
        """Open the transport. Nothing is exchanged yet."""
        if self._opened or self._ended:
            raise LocalProtocolError("opened twice, or after close()", rank=self.rank)
        try:
            self._transport.open(self._core.peers, self.config.frame_bytes_max)
        except BaseException:
            self._transport.close(False)  # what a failed opening has made must not stay
            raise
        self._opened = True
        self._opened_at_s = self._clock()

    def __enter__(self) -> Agreement:
        self.open()
        return self

    def _transport_name(self) -> str:
        return self._transport.name

    def _traffic(self) -> tuple[int, int, int, int]:
        streams = self._core.streams
        sent = FRAME_BYTES * streams.frames_sent + RECORD_BYTES * sum(streams.sent_kinds)
        received = FRAME_BYTES * streams.frames_received + RECORD_BYTES * sum(streams.received_kinds)
        return sent, received, self._refused_slots, self._outstanding_max

    def _turn(self, now_s: float) -> None:
        """Receive what has arrived, send at most one frame to each peer, judge silence; bounded, never blocks."""
        core, transport = self._core, self._transport
        try:
            frames, empty = transport.receive(self._frames_max)
            core.call(core.sweep, (frames, self._codec.decode, empty), now_s, PEER)
            deaths = transport.deaths()
            if deaths or self._dead:
                self._bury(deaths, empty, now_s)
        except TransportError as error:
            self.fail(str(error), FaultCode.TRANSPORT)
        core.settle(now_s)
        speaking, beating = core.streams.wanting()
        if speaking or beating or core.context.frames:  # frames: of a poll that was broken off
            self._flush(speaking, beating, now_s)

    def _bury(self, deaths: Iterable[tuple[int, str]], empty: int, now_s: float) -> None:
        """Evidence of death counts once everything that the dead member said has been heard."""
        for member, evidence in deaths:
            if member not in self._buried:
                self._dead.setdefault(member, evidence)
        links = sum(1 << peer for peer in self._core.peers)
        for member, evidence in tuple(self._dead.items()):
            if empty >> member & 1 or not links >> member & 1:
                del self._dead[member]
                self._buried.add(member)
                self._core.notice(ev.PeerDied(member, evidence), now_s)

    def _flush(self, speaking: Iterable[int], beating: Iterable[int], now_s: float) -> None:
        """One frame to each of these peers that can take one; also what a poll that was broken off has left.

        Args:
            speaking: For whom something waits.
            beating: Those for whom only a heartbeat is due, which needs that nothing is under way to them.
        """
        core, transport = self._core, self._transport
        frames = core.context.frames
        if frames:
            before = self._send_left(frames, now_s)
            speaking = [peer for peer in speaking if peer not in before]
            beating = [peer for peer in beating if peer not in before]
        left = len(frames)
        slots: list[tuple[int, int]] = []
        for peer in speaking:
            try:
                if transport.can_send(peer):
                    slots.append((peer, 0))
                else:
                    self._refused_slots += 1
                    self._count_outstanding(peer)
            except TransportError as error:
                core.notice(ev.SendFailed(peer, str(error)), now_s)
        for peer in beating:
            try:
                outstanding = self._count_outstanding(peer)
                if transport.can_send(peer):
                    slots.append((peer, outstanding))
            except TransportError as error:
                core.notice(ev.SendFailed(peer, str(error)), now_s)
        if slots:
            core.fill(slots)
        while len(frames) > left:
            peer, frame = frames.pop(left)
            self._send(peer, frame)

    def _send(self, peer: int, frame: Frame) -> None:
        try:
            self._transport.send(peer, self._codec.encode(peer, frame))
        except BaseException as error:
            # The records left their queue and may or may not arrive: nothing may be sent again, so the domain stops.
            self._core.notice(ev.SendFailed(peer, str(error) or repr(error)), self._clock())
            if not isinstance(error, (WouldBlock, TransportError)):
                raise  # a defect, or an interrupt

    def _count_outstanding(self, peer: int) -> int:
        """How many frames the peer has not received yet, and the most of them that were ever found."""
        outstanding = self._transport.outstanding(peer)
        self._outstanding_max = max(self._outstanding_max, outstanding)
        return outstanding

    def _send_left(self, frames: list[tuple[int, Frame]], now_s: float) -> set[int]:
        """What a poll that was broken off had made leaves first, and takes the slots of these peers."""
        before = {peer for peer, _frame in frames}
        for entry in tuple(frames):
            peer, frame = entry
            try:
                free = self._transport.can_send(peer)
            except TransportError as error:
                self._core.notice(ev.SendFailed(peer, str(error)), now_s)
                free = True  # it cannot leave any more: sending fails as well
            if free:
                frames.remove(entry)
                self._send(peer, frame)
        return before

    def busy(self, max_s: float, reason: str = "") -> bool:
        """Declare that this rank will not poll for up to ``max_s``; its observers extend their patience.

        Returns:
            Whether every frame left now; otherwise it leaves at the next poll.
        """
        if not self._opened or self._ended:
            raise LocalProtocolError("busy before open() or after close()", rank=self.rank)
        self._step(self._core.busy, (max_s,), self._clock())
        self.busy_reason = str(reason)[:200]
        self._flush(*self._core.streams.wanting(), self._clock())
        return not self._core.streams.busy_pending

    def peer_died(self, rank: int, evidence: str) -> None:
        """The launcher has operating-system evidence that ``rank`` is gone. Stops the domain; frees nothing.

        What the rank had sent is heard first: its death counts in the poll that finds nothing more of it to read.
        """
        member = self.domain.index_of(rank)
        if self._opened and not self._ended and member in self._core.peers:
            if member not in self._buried:
                self._dead.setdefault(member, str(evidence)[:1000])
            return
        self._core.notice(ev.PeerDied(member, str(evidence)[:1000]), self._clock())

    def close(self, deadline_s: float = 5.0, wait: Callable[[float], object] = time.sleep) -> bool:
        """End this rank's part. After a proven drain all ranks shake hands, then the transport is freed.

        Until every rank has closed nothing is ended: a call whose time is over answers False and may be made again, and
        comes to True on every rank as long as every rank goes on calling. ``abandon`` leaves without the others. Without a
        proven drain, or after a fault, this rank's part ends with this call.

        Args:
            deadline_s: Longest wait for the others (or, after a fault, for the FAIL_STOP to leave), in seconds.
            wait: Called between polls.

        Returns:
            True: clean, every rank has closed. False: not everybody has yet, try again; or, without a drain or after a
            fault, left without them: nothing that needs a peer was done. Events that came while closing wait for a
            ``poll()`` after it.

        Raises:
            LocalProtocolError: ``deadline_s`` is not a number.
            ConcurrentCallError: A poll or another call runs.
        """
        if self._ended:
            return self._clean
        until_s = self._clock() + self._duration(deadline_s)
        if self._polling or self._core.stepping:
            raise ConcurrentCallError(f"rank {self.rank}: close while another call runs")
        core = self._core
        try:
            core.settle(self._clock())
            if self._opened:
                if core.drained and core.fault is None:
                    self._step(self._core.ending.close, (), self._clock())
                self._shake_hands(until_s, wait)
        except BaseException:  # an interrupt ends the waiting for good: nothing stays open
            self._end(False)
            raise
        clean = self._opened and core.closed and core.fault is None and self._left(True)
        if clean or not core.closing or core.fault is not None:
            self._end(clean)
        return clean

    def _shake_hands(self, until_s: float, wait: Callable[[float], object]) -> None:
        """Without a drain nobody is waited for; after a fault only for the FAIL_STOP to leave."""
        core = self._core
        while core.closing or core.fault is not None:
            if self._left(core.closed or core.fault is not None) or self._clock() >= until_s:
                return
            self._events[:0] = self.poll()
            wait(0.0005)

    def _let_go(self, clean: bool) -> None:
        self._transport.close(clean)

    def _left(self, said: bool) -> bool:
        """Whether the last words have been received by the peers."""
        core = self._core
        if not said or core.context.frames or core.streams.intents or any(core.streams.queues.values()):
            return False
        try:
            return all(self._transport.outstanding(peer) == 0 for peer in self._core.peers)
        except TransportError:
            return False
