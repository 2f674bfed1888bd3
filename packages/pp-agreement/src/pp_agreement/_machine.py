"""The agreement of one rank as a pure machine: ``step(event, now_s) -> effects``.

No clock, no I/O, no randomness. A local call that breaks the contract raises and changes nothing; a peer that does stops
the domain and is reported as a ``Fault`` effect. The rooms: ``_member`` (this rank's own part), ``_coordinator`` (the tally),
``_streams`` (what waits and what comes), ``_rounds`` and ``_timers``, ``_silence``, ``_ending``. Here is what joins them: the
one entry, who hears a record, and how a domain stops.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

from pp_agreement import _events as ev
from pp_agreement._config import AgreementConfig, Domain
from pp_agreement._context import JUMP_MAX_S, Context, Violation
from pp_agreement._coordinator import Coordinator
from pp_agreement._ending import Ending
from pp_agreement._errors import (
    ConcurrentCallError,
    DomainStopped,
    LocalProtocolError,
    RemoteProtocolError,
    WouldBlock,
)
from pp_agreement._events import (
    AdviceKind,
    AgreementEvent,
    Answer,
    Effect,
    Fault,
    FaultCode,
    Frame,
    Key,
    Reason,
    Record,
    SendFrame,
)
from pp_agreement._member import Member
from pp_agreement._round import Round
from pp_agreement._rounds import Rounds
from pp_agreement._silence import Silence
from pp_agreement._state import (
    COORDINATOR_SAYS,
    DISPOSITIONS,
    KINDS_SURVIVE_FAULT,
    OUTCOMES,
    REASON_MAX,
    REASONS,
    Kind,
    Phase,
    ReadyInput,
    ReadyState,
    RoundState,
    TerminalState,
    too_great,
)
from pp_agreement._statistics import CoreStatistics
from pp_agreement._streams import EXCHANGE, Streams
from pp_agreement._validate import InvariantViolation, validate
from pp_agreement._words import chunk_of, records_of, text_of

HOST, PEER = range(2)
"""Whose doing a step is; see ``AgreementCore.call``."""
_OPEN, _RUNNING, _FAILING, _STOPPED = range(4)
"""The gate before a step. OPEN: it may begin. RUNNING: another one is on its way. FAILING: the host said meanwhile that it
failed, which comes first. STOPPED: after a fault or the end, when hardly anything may; see ``_may_step``."""

_Came = TypeVar("_Came")
NOTHING: Any = object()
"""In place of an answer: the call was no call, or it stopped the domain."""

# Names the hot path uses; attribute lookups on an Enum class are slow.
_PREPARE, _ADVICE, _VERDICT = int(Kind.PREPARE), int(Kind.ADVICE), int(Kind.VERDICT)
_FAIL_STOP, _TEXT = int(Kind.FAIL_STOP), int(Kind.TEXT)


class AgreementCore:
    """One rank's side of one domain.

    Args:
        domain: Who decides together.
        rank: This rank; a member.
        config: Bounds and timeouts, equal on all ranks.
        replicated: The blocking baseline's variant: every rank runs the coordinator over the same lockstep exchange.
        session: Tells this life of the rank from any other, 0..2**64-1; drawn at random by the shell.

    Raises:
        ConfigurationError: ``rank`` is not a member.
    """

    coordinator_type: type[Coordinator] = Coordinator
    ending_type: type[Ending] = Ending

    def __init__(
        self, domain: Domain, rank: int, config: AgreementConfig, *, replicated: bool = False, session: int = 0
    ) -> None:
        self.domain = domain
        self.config = config
        self.rank = rank
        self.context = Context(domain, rank, config, replicated, session)
        self.me = self.context.me
        self.peers = self.context.peers
        self.is_coordinator = self.context.is_coordinator
        self.is_scheduler = self.context.is_scheduler
        self.streams = Streams(self.context)
        self._said, self._decisions = self.streams.words, self.streams.decisions
        self._unheard: Iterator[Record] = iter(self._decisions)  # those that this rank has still to hear of a step
        self.rounds = Rounds(self.context, self.streams)
        self.member = Member(self.context, self.streams, self.rounds, self._coordinator_on_the_domain, self._heard_late)
        self.coordinator = self.coordinator_type(
            self.context, self.streams, self.rounds, self._end_attempt, self._member_on_the_domain
        )
        self.silence = Silence(self.context, self.streams)
        self.ending = self.ending_type(
            self.context, self.streams, self.rounds, self.member, self.silence, self._deliver_local
        )
        self._words: dict[int, bytes] = {}  # by member: what it said before its FAIL_STOP
        self._gate = self._gate_after = _OPEN
        self._failing = FaultCode.HOST, ""  # what the host said while a step ran
        self._ended = False

    # -- the one entry ----------------------------------------------------------------------------------------------

    def step(self, event: ev.Input, now_s: float) -> tuple[Effect, ...]:
        """Apply one input.

        Args:
            event: What happened.
            now_s: A monotonic clock's reading in seconds; going backwards is harmless.

        Returns:
            The answer of a local call first, then the frame to be sent, then events in the order in which the host must
            hear them.

        Raises:
            LocalProtocolError: A local call broke the contract; nothing changed.
            WouldBlock: An admission without a credit; nothing changed.
            DomainStopped: A local call after a fault; nothing changed.
            ConcurrentCallError: Another step is running (a thread, a signal handler); nothing changed.

        Anything else (a defect, an interrupt) breaks the step off half done: the domain stops, and what still binds, with
        the fault, waits for ``take``.
        """
        effects: list[Effect] = []
        if isinstance(event, ev.SlotFreed):
            self.call(lambda: None, (), now_s, PEER)  # time passes
            self.fill(((event.peer, event.outstanding),))
            frames, self.context.frames = self.context.frames, []
            effects.extend(SendFrame(peer, frame) for peer, frame in frames)
        elif type(event) in _CALLS:
            answer = self.call(_CALLS[type(event)], (self, event), now_s)
            if answer is not NOTHING:
                effects.append(Answer(answer))
        else:
            self.notice(event, now_s)
        return (*effects, *self.take())

    def notice(self, event: ev.Input, now_s: float) -> None:
        """What the transport or the operating system says; events wait for ``take``."""
        self.call(_HANDLERS[type(event)], (self, event), now_s, PEER)

    def fail(self, code: FaultCode, detail: str, now_s: float) -> None:
        """The host, or the shell for it, stops the domain: while a step runs, as soon as the next one is to begin."""
        if self._gate != _RUNNING:
            self.call(self._on_failed, (code, detail), now_s, PEER)
        elif self._gate_after == _OPEN:
            self._failing = code, detail
            self._gate_after = _FAILING

    def settle(self, now_s: float) -> None:
        """Let what the host said while a step ran take effect."""
        if self._gate == _FAILING:
            self._gate = self._gate_after = _OPEN
            self.call(self._on_failed, self._failing, now_s, PEER)

    def end(self) -> None:
        """The host may call nothing more."""
        self._ended = True
        self._gate = self._gate_after = _STOPPED

    def take(self) -> tuple[AgreementEvent, ...]:
        """The events that the host has not been given yet, in their order, each once."""
        context = self.context
        if not context.events:
            return ()
        events, context.events = context.events, []
        context.may_lapse = False
        return tuple(events)

    def call(self, work: Callable[..., Any], given: tuple[Any, ...], now_s: float, who: int = HOST) -> Any:
        """One step: ``work`` of a room with what was given.

        Args:
            who: After a fault the ``HOST`` is refused, and what a ``PEER`` says is without effect.

        Returns:
            The answer; ``NOTHING`` where the step stopped the domain or was without effect.
        """
        if self._gate and not self._may_step(work, now_s, who):
            return NOTHING
        context = self.context
        answer: Any = NOTHING
        self._gate = _RUNNING
        try:
            passed_s = now_s - context.now_s
            if 0.0 < passed_s < JUMP_MAX_S:
                context.elapsed_s += passed_s
                context.now_s = now_s
            elif passed_s and now_s == now_s:  # a NaN is no reading, and nothing can be measured against it
                context.now_s = now_s
            answer = work(*given)
            if self._said or self._decisions:
                self._deliver_local()
            if self.rounds.last is not None:
                self.ending.report()
        except Violation as violation:
            self._stop(violation)
        except (LocalProtocolError, WouldBlock):
            raise
        except BaseException as error:
            self._stop(Violation(FaultCode.INTERNAL, f"broken off: {error!r}"))
            raise
        finally:
            self._gate = self._gate_after
        return answer

    def fill(self, slots: Iterable[tuple[int, int]]) -> None:
        """Slots are free: a step that makes frames, see ``Streams.fill``, at the time of the step before it.

        Also after a fault, since they say why.
        """
        if self._gate == _RUNNING:
            self._refuse_beside(self.fill)
        self._gate = _RUNNING
        try:
            self.streams.fill(slots)
        except Violation as violation:
            self._stop(violation)
        except BaseException as error:
            self._stop(Violation(FaultCode.INTERNAL, f"broken off: {error!r}"))
            raise
        finally:
            self._gate = self._gate_after

    def _refuse_beside(self, work: Callable[..., Any]) -> NoReturn:
        name = getattr(work, "__name__", "a call")
        raise ConcurrentCallError(f"rank {self.rank}: {name} while another call runs")

    def _may_step(self, work: Callable[..., Any], now_s: float, who: int) -> bool:
        """Never in the middle of another step; after a fault only to say so; after its end nothing of the host."""
        if self._gate == _RUNNING:
            self._refuse_beside(work)
        self.settle(now_s)
        fault = self.context.fault
        if who == HOST:
            if self._ended:
                raise LocalProtocolError("after close()", rank=self.rank)
            if fault is not None:
                raise DomainStopped(fault)
        return fault is None

    @property
    def stepping(self) -> bool:
        """Whether a step is running: seen from a signal handler, a callback or another thread."""
        return self._gate == _RUNNING

    def _deliver_local(self) -> None:
        """Have this rank's halves hear each other: never from inside a decision, always in decision order."""
        words, decisions, kinds = self._said, self._decisions, self.streams.local_kinds
        while words or decisions:
            if decisions:
                self.member.hear(self._unheard, kinds)
                decisions.clear()
                self._unheard = iter(decisions)
            else:
                self.coordinator.hear(self.me, (words.popleft(),), kinds, None)

    # -- local calls ------------------------------------------------------------------------------------------------

    def _heard_late(self, round_: Round) -> None:
        """The authoritative broadcast named a request that peers have spoken of before."""
        tally = round_.tally
        if round_.uses_ready and tally is not None and tally.terminal_mask and tally.phase is Phase.GATHERING:
            self._end_attempt(round_)

    def _end_attempt(self, round_: Round) -> None:
        """A terminal vote, and nobody is ready: nobody needs to become it. End the attempt, so that everybody votes terminal.

        Replicas must not decide by what they have heard, which differs: each rank says that it withdraws instead, and all
        decide in the exchange that carries it.
        """
        tally = round_.tally
        if not self.context.replicated and tally is not None:
            self.coordinator.abort(round_, tally, int(Reason.TERMINAL_VOTE))
        elif round_.ready is ReadyState.IDLE and round_.terminal < TerminalState.VOTED:
            self.member.end(round_, ReadyInput.WITHDRAW, int(Reason.TERMINAL_VOTE))

    def busy(self, max_s: float) -> None:
        """This rank will not poll for up to ``max_s``. For ``call``."""
        if type(max_s) not in (int, float) or not 0 <= max_s <= self.config.busy_max_s:
            self.context.refuse(f"busy({max_s!r}): a number in 0..{self.config.busy_max_s} s")
        for peer in self.peers:
            self.streams.busy_pending[peer] = max(1, int(max_s * 1000))

    def _on_failed(self, code: FaultCode, detail: str) -> None:
        raise Violation(code, detail, text=detail)

    # -- who hears a record -----------------------------------------------------------------------------------------

    def _member_on_the_domain(self, source: int, record: Record) -> None:
        """The coordinator hears a member about no round."""
        kind = record[0]
        if kind == _TEXT:
            self._hear_words(source, record)
        elif kind == _FAIL_STOP:
            if record[1] != source and not self.context.replicated:
                self.context.blame(source, "reports another rank's fault")
            self._failed_elsewhere(source, record)
        else:
            self.ending.from_member(source, kind, record[5], record[6])

    def _coordinator_on_the_domain(self, record: Record) -> None:
        """A member hears the coordinator about no decision of a round."""
        kind, outcome, disposition, _reason, attempt, request_id, incarnation = record
        context = self.context
        if not COORDINATOR_SAYS[kind]:
            context.blame_coordinator(f"kind {kind} came from the coordinator")
        wrong = too_great(kind, outcome, disposition)
        if wrong:
            context.blame_coordinator(wrong)
        if kind == _ADVICE:
            self._advised(record)
        elif kind < _VERDICT:
            self.ending.from_coordinator(kind, request_id, incarnation)
        elif kind == _VERDICT:
            self.silence.told(outcome, disposition, attempt)
        elif kind == _TEXT:
            self._hear_words(context.coordinator, record)
        else:
            self._failed_elsewhere(context.coordinator, record)

    def _advised(self, record: Record) -> None:
        _kind, source, kind, reason, attempt, request_id, incarnation = record
        context = self.context
        if not context.is_scheduler or source >= context.size or reason > REASON_MAX:
            context.blame_coordinator("advice for another rank")
        round_ = self.rounds.open.get(incarnation)
        if round_ is None:
            self.rounds.stale += 1
            return
        if round_.request_id != request_id or attempt > round_.attempt:
            context.blame_coordinator(f"ADVICE for request {request_id}, attempt {attempt}", round_)
        key = Key(request_id, incarnation, attempt)
        context.emit(ev.Advice(key, AdviceKind(kind), context.name(source), REASONS[reason]))

    # -- from the transport -----------------------------------------------------------------------------------------

    def hear(self, came: Iterable[tuple[int, _Came]], read: Callable[[int, _Came], Frame]) -> None:
        """Frames came, each as in ``step(FrameReceived(peer, frame))``. For ``call``.

        Args:
            came: By peer, what came of it.
            read: Makes a frame of it; what it refuses stops the domain after everything that was before it.
        """
        streams, silence = self.streams, self.silence
        expected, sessions, kinds = streams.expected, streams.sessions, streams.received_kinds
        counts, heard_s, looked_s = self.is_coordinator, silence.heard_s, silence.looked_s
        for peer, data in came:
            try:
                sequence, busy_ms, records, session, content = read(peer, data)
            except RemoteProtocolError as error:
                raise Violation(FaultCode.BAD_FRAME, str(error), suspect=peer) from error
            if (sequence != expected[peer] or session != sessions[peer]) and not streams.accept(
                peer, sequence, session, content
            ):
                continue
            expected[peer] = sequence + 1
            streams.seen[peer].append(content)
            heard_s[peer] = looked_s
            if busy_ms or silence.awaited >> peer & 1:
                silence.news_of(peer, busy_ms)
            if counts:
                self.coordinator.hear(peer, records, kinds, self._deliver_local)
            else:
                self.member.hear(records, kinds)

    def _on_exchange(self, event: ev.ExchangeCompleted) -> None:
        if len(event.contributions) != self.context.size:
            raise Violation(FaultCode.PROTOCOL, f"an exchange of {len(event.contributions)} contributions")
        kinds = self.streams.received_kinds
        for member, records in enumerate(event.contributions):
            if records is None or isinstance(records, str):
                said = f": {records}" if records else ""
                raise Violation(
                    FaultCode.POISON,
                    f"rank {self.context.name(member)} failed in the exchange{said}",
                    suspect=member,
                )
            self.coordinator.hear(member, records, kinds, self._deliver_local)

    def _on_rejected(self, event: ev.FrameRejected) -> None:
        raise Violation(FaultCode.BAD_FRAME, event.detail, suspect=event.peer)

    def _on_send_failed(self, event: ev.SendFailed) -> None:
        told = f"to rank {self.context.name(event.peer)}: {event.detail}"
        raise Violation(FaultCode.TRANSPORT, told, suspect=event.peer)

    def _on_peer_died(self, event: ev.PeerDied) -> None:
        context, ending = self.context, self.ending
        if ending.closed or event.peer == self.me:
            return  # after the last handshake everybody may leave
        if ending.closing and not context.replicated and event.peer not in self.peers:
            return  # it may have left by the handshake that is still on its way here; the coordinator knows
        context.judge(ev.DeathVerdict(self.rank, context.name(event.peer), event.evidence))
        told = f"rank {context.name(event.peer)} died: {event.evidence}"
        raise Violation(FaultCode.DEATH, told, suspect=event.peer)

    def sweep(self, came: Iterable[tuple[int, _Came]], read: Callable[[int, _Came], Frame], empty: int) -> None:
        """A whole receive sweep: see ``hear``, then what ``step(SweepCompleted(empty))`` does. For ``call``."""
        silence, timers, now_s = self.silence, self.rounds.timers, self.context.elapsed_s
        since_s = silence.pass_time(now_s)
        if came:
            self.hear(came, read)
        if empty != silence.links_mask or silence.looked_s >= silence.due_s:  # else it would find nothing to do
            silence.sweep(empty, since_s)
        if now_s >= timers.due_s:
            self._run_timers(now_s)

    def _run_timers(self, now_s: float) -> None:
        timers = self.rounds.timers
        for incarnation in timers.doubts.due(now_s):
            self.member.doubt_expired(self.rounds.open[incarnation])
        for incarnation in timers.leases.due(now_s):
            self.member.lease_expired(self.rounds.open[incarnation])
        if now_s >= timers.idle_due_s:
            timers.watch(self.context, self.rounds.open, now_s)
        timers.look_ahead()

    # -- failing ----------------------------------------------------------------------------------------------------

    def _hear_words(self, source: int, record: Record) -> None:
        """A piece of what a host said: pieces come in order, and are few."""
        said = self._words.get(source, b"") if record[1] else b""
        piece = chunk_of(record)
        if len(said) != record[1] * len(piece):
            self.context.blame(source, f"sent piece {record[1]} of a text out of order")
        self._words[source] = said + piece

    def _failed_elsewhere(self, source: int, record: Record) -> NoReturn:
        _kind, origin, suspect, code, _attempt, _request_id, _incarnation = record
        context = self.context
        if code not in FaultCode._value2member_map_ or origin >= context.size or suspect > context.size:
            context.blame(source, "sent a malformed FAIL_STOP")
        known, text = FaultCode(code), text_of(self._words.pop(source, b""))
        raise Violation(
            known,
            f"rank {context.name(origin)} reported {known.name}" + (f": {text}" if text else ""),
            suspect=suspect - 1 if suspect else None,
            origin=origin,
            text=text,
        )

    def _stop(self, violation: Violation) -> None:
        """Fail closed: keep the first diagnosis, suppress what no longer binds, tell the others, decide nothing more."""
        context = self.context
        if context.fault is not None:
            return
        if violation.code is not FaultCode.INTERNAL:
            # What was decided ahead of what is wrong, in the same frame: the others will hear it, and so does this rank.
            with contextlib.suppress(Violation):  # the first diagnosis is the one that is kept
                self.member.hear(self._unheard, self.streams.local_kinds)
        suspect, elsewhere = violation.suspect, violation.origin is not None
        origin = self.me if violation.origin is None else violation.origin
        round_ = violation.round
        if elsewhere and violation.code is FaultCode.DEATH and suspect is not None:
            context.judge(ev.DeathVerdict(context.name(origin), context.name(suspect), "reported"))
        self._gate_after = _STOPPED
        context.stop(
            Fault(
                violation.code,
                violation.detail,
                context.name(origin),
                None if suspect is None else context.name(suspect),
                None if round_ is None else round_.key,
                () if round_ is None else context.tell(round_),
            )
        )
        record = (_FAIL_STOP, origin, 0 if suspect is None else suspect + 1, int(violation.code), 0, 0, 0)
        self.streams.stop(
            [*records_of(violation.text), record], KINDS_SURVIVE_FAULT, tell=context.replicated or not elsewhere
        )

    # -- looking at it ----------------------------------------------------------------------------------------------

    @property
    def fault(self) -> Fault | None:
        """The first diagnosis, once the domain has stopped."""
        return self.context.fault

    @property
    def heard(self) -> int:
        """The last admission that this rank heard of."""
        return self.rounds.heard

    @property
    def drained(self) -> bool:
        """Whether the drain is proven."""
        return self.ending.drained

    @property
    def closing(self) -> bool:
        """Whether this rank has said its last word."""
        return self.ending.closing

    @property
    def closed(self) -> bool:
        """Whether every rank has."""
        return self.ending.closed

    def story(self, incarnation: int) -> tuple[str, ...]:
        """What happened to an open round, oldest first; empty when it is not open here."""
        round_ = self.rounds.open.get(incarnation)
        return () if round_ is None else self.context.tell(round_)

    def state(self, incarnation: int) -> RoundState | None:
        """This rank's view of an open round; None when it is not open here."""
        round_ = self.rounds.open.get(incarnation)
        if round_ is None:
            return None
        voted = round_.terminal >= TerminalState.VOTED
        return RoundState(
            round_.ready,
            round_.terminal,
            round_.attempt,
            round_.heard,
            OUTCOMES[round_.vote[0]] if voted else None,
            DISPOSITIONS[round_.vote[1]] if voted else None,
        )

    def undecided(self) -> tuple[Key, ...]:
        """Keys of all rounds open here, oldest first."""
        return tuple(round_.key for _incarnation, round_ in sorted(self.rounds.open.items()))

    def statistics(self) -> CoreStatistics:
        """Counters since construction."""
        rounds, member, streams = self.rounds, self.member, self.streams
        latencies = member.latencies.counted()
        return CoreStatistics(
            admitted=rounds.heard,
            committed=member.committed,
            closed=member.closed_rounds,
            open_rounds=rounds.open_count,
            open_rounds_max=rounds.open_max,
            queue_records_max=streams.queue_max,
            stale=rounds.stale,
            duplicates=streams.duplicates,
            ignored=self.ignored,
            frames_received=streams.frames_received,
            frames_sent=streams.frames_sent,
            heartbeats_sent=streams.heartbeats_sent,
            records_sent=_by_kind(streams.sent_kinds),
            records_received=_by_kind(streams.received_kinds),
            events=self._event_counts(),
            outcomes=(member.outcome_counts[0], member.outcome_counts[1], member.outcome_counts[2]),
            quarantined=member.quarantined,
            activated=member.activated_count,
            digest=member.digest.hex(),
            activation_digest=member.activation_digest.hex(),
            latency_count=sum(latencies.buckets),
            latency_sum_s=latencies.sum_s,
            latency_max_s=latencies.longest_s,
            latency_buckets=tuple(latencies.buckets),
        )

    def _event_counts(self) -> tuple[tuple[str, int], ...]:
        counts = {kind.__name__: count for kind, count in self.context.event_counts.items()}
        if self.member.committed:
            counts[ev.Committed.__name__] = self.member.committed
        return tuple(sorted(counts.items()))

    @property
    def ignored(self) -> int:
        """Records that the tables swallowed."""
        return self.member.ignored + self.coordinator.ignored

    def validate(self) -> None:
        """Check every invariant that one rank can see.

        Raises:
            InvariantViolation: One does not hold, with the round's story.
        """
        validate(self)

    def copy(self) -> AgreementCore:
        """An independent copy, for explorers."""
        twin = AgreementCore.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._words = dict(self._words)
        context = twin.context = self.context.copy()
        streams = twin.streams = self.streams.copy(context)
        twin._said, twin._decisions, twin._unheard = streams.words, streams.decisions, iter(streams.decisions)
        rounds = twin.rounds = self.rounds.copy(context, streams)
        member = twin.member = self.member.copy(
            context, streams, rounds, twin._coordinator_on_the_domain, twin._heard_late
        )
        twin.coordinator = replace(
            self.coordinator,
            context=context,
            streams=streams,
            rounds=rounds,
            end_attempt=twin._end_attempt,
            on_the_domain=twin._member_on_the_domain,
        )
        silence = twin.silence = self.silence.copy(context, streams)
        twin.ending = self.ending.copy(context, streams, rounds, member, silence, twin._deliver_local)
        return twin

    def fingerprint(self, *, digests: bool = True) -> tuple[object, ...]:
        """All that decides the future, without times, counters and stories; equal fingerprints behave alike."""
        fault = self.context.fault
        return (
            self.rounds.fingerprint(), self.member.fingerprint(digests), self.streams.fingerprint(),
            self.ending.fingerprint(), None if fault is None else (fault.code, fault.rank, fault.suspect_rank),
            tuple(sorted(self._words.items())),
        )  # fmt: skip


def as_it_is(_peer: int, frame: Frame) -> Frame:
    """What came is a frame already."""
    return frame


def _by_kind(counts: list[int]) -> tuple[tuple[str, int], ...]:
    return tuple((kind.name, counts[kind]) for kind in Kind if counts[kind])


# What ``step`` makes of an input. Local calls answer; the rest is heard.
_CALLS: dict[type, Callable[[AgreementCore, Any], Any]] = {
    ev.RequestAdmitted: lambda core, event: core.member.admit(event.request_id, event.incarnation, event.ready),
    ev.ReadyPublished: lambda core, event: core.member.publish(event.key),
    ev.WithdrawRequested: lambda core, event: core.member.withdraw(event.key, event.reason),
    ev.PrepareAcknowledged: lambda core, event: core.member.acknowledge_prepare(event.key),
    ev.AbortAcknowledged: lambda core, event: core.member.acknowledge_abort(event.key),
    ev.ScheduleActivated: lambda core, event: core.member.activate(event.keys),
    ev.RevokeRequested: lambda core, event: core.member.revoke(event.key, event.reason),
    ev.RecallRequested: lambda core, event: core.member.recall(event.key, event.reason),
    ev.TerminalVoted: lambda core, event: core.member.vote(event.key, event.outcome, event.disposition, event.reason),
    ev.DoubtRaised: lambda core, event: core.member.doubt(event.key, event.reason),
    ev.BusyDeclared: lambda core, event: core.busy(event.max_s),
    ev.DrainRequested: lambda core, event: core.ending.start(event.last_incarnation),
    ev.CloseRequested: lambda core, _event: core.ending.close(),
}
_HANDLERS: dict[type, Callable[[AgreementCore, Any], None]] = {
    ev.HostFailed: lambda core, event: core._on_failed(event.code, event.detail),
    ev.FrameReceived: lambda core, event: core.hear(((event.peer, event.frame),), as_it_is),
    ev.FrameRejected: AgreementCore._on_rejected,
    ev.SweepCompleted: lambda core, event: core.sweep((), as_it_is, event.empty),
    ev.SendFailed: AgreementCore._on_send_failed,
    ev.PeerDied: AgreementCore._on_peer_died,
    ev.ExchangeCompleted: AgreementCore._on_exchange,
}

__all__ = ["EXCHANGE", "NOTHING", "AgreementCore", "CoreStatistics", "InvariantViolation"]
