"""The agreement of one rank as a pure machine: ``step(event, now_s) -> effects``.

No clock, no I/O, no randomness. A local call that breaks the contract raises and changes nothing; a peer that does stops
the domain and is reported as a ``Fault`` effect. Decisions are made in one place (``_decide``), once, and appended in one
step to every destination's queue, this rank's own included. Tables and the theory stand in ``_state``.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b
from typing import Any, NoReturn

from pp_agreement import _events as ev
from pp_agreement._config import AgreementConfig, Domain
from pp_agreement._errors import AgreementError, ConcurrentCallError, DomainStopped, LocalProtocolError, WouldBlock
from pp_agreement._events import (
    SURVIVES_FAULT,
    AdviceKind,
    AgreementEvent,
    Answer,
    Disposition,
    Effect,
    Fault,
    FaultCode,
    FinalizeMode,
    Frame,
    Key,
    Outcome,
    PublishResult,
    Reason,
    Record,
    RevokeResult,
    SendFrame,
    WithdrawResult,
)
from pp_agreement._state import (
    CONTRACT,
    COORDINATOR_RULE,
    DISPOSITIONS,
    MODES,
    NEXT_NOTHING,
    NEXT_PUBLISH,
    NEXT_WITHDRAW,
    OUTCOMES,
    READY_NEXT,
    READY_OPEN,
    REASON_MAX,
    REASONS,
    REPLACES,
    TERMINAL_ALLOWED_IN,
    TERMINAL_NEXT,
    TRANSIENT_MAX,
    Kind,
    Phase,
    ReadyInput,
    ReadyState,
    Round,
    RoundState,
    Rule,
    TerminalInput,
    TerminalState,
)

EXCHANGE = -1
"""The one 'peer' of a replicated core: the lockstep exchange with everybody."""

REQUEST_ID_MAX = 2**63 - 1
LATENCY_BUCKETS = 40  # powers of two of a microsecond

# Slots of unsent records: one per round and slot, so a newer intent replaces an older one in place.
_READY_SLOT, _TERMINAL_SLOT, _RECALL_SLOT, _DOUBT_SLOT, _CONTROL_SLOT = range(5)

# Names the hot path uses; attribute lookups on an Enum class are slow.
_VOTE, _WITHDRAW, _ACK, _ACTIVATE_ACK = int(Kind.VOTE), int(Kind.WITHDRAW), int(Kind.ACK), int(Kind.ACTIVATE_ACK)
_ABORT_ACK, _REVOKE, _RECALL = int(Kind.ABORT_ACK), int(Kind.REVOKE), int(Kind.RECALL)
_TERMINAL, _DOUBT, _DRAIN, _DRAIN_REPORT, _CLOSE = (
    int(Kind.TERMINAL), int(Kind.DOUBT), int(Kind.DRAIN), int(Kind.DRAIN_REPORT), int(Kind.CLOSE),
)  # fmt: skip
_PREPARE, _RELEASE, _COMPLETE, _ABORT = int(Kind.PREPARE), int(Kind.RELEASE), int(Kind.COMPLETE), int(Kind.ABORT)
_FINALIZE, _COMMIT, _REASONS, _ADVICE = int(Kind.FINALIZE), int(Kind.COMMIT), int(Kind.REASONS), int(Kind.ADVICE)
_DRAIN_ALL, _DRAIN_STATUS, _DRAINED = int(Kind.DRAIN_ALL), int(Kind.DRAIN_STATUS), int(Kind.DRAINED)
_CLOSE_ACK, _VERDICT, _FAIL_STOP = int(Kind.CLOSE_ACK), int(Kind.VERDICT), int(Kind.FAIL_STOP)

_FINAL_KINDS = frozenset({_COMPLETE, _FINALIZE, _COMMIT, _REASONS, _VERDICT, _DRAINED})
_MEMBER_INPUT = {
    _PREPARE: ReadyInput.PREPARE,
    _RELEASE: ReadyInput.RELEASE,
    _COMPLETE: ReadyInput.COMPLETE,
    _ABORT: ReadyInput.ABORT,
}
_FINAL_PACK = struct.Struct("<QQIBBBB").pack
_KEY_PACK = struct.Struct("<QQI").pack
_EMPTY_DIGEST = bytes(16)


class InvariantViolation(AgreementError):
    """``validate()`` found the core inconsistent: a defect of this package."""


class _Violation(Exception):
    """A peer (or this package) broke the contract while ``step`` ran; becomes a ``Fault``."""

    def __init__(self, code: FaultCode, detail: str, round_: Round | None = None, suspect: int | None = None) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.round = round_
        self.suspect = suspect


@dataclass(frozen=True, slots=True)
class CoreStatistics:
    """Counters of one domain's lifetime at one rank."""

    admitted: int
    committed: int
    closed: int
    open_rounds: int
    open_rounds_max: int
    queue_records_max: int
    stale: int
    duplicates: int
    ignored: int
    frames_received: int
    frames_sent: int
    heartbeats_sent: int
    records_sent: tuple[tuple[str, int], ...]
    records_received: tuple[tuple[str, int], ...]
    events: tuple[tuple[str, int], ...]
    outcomes: tuple[int, int, int]
    quarantined: int
    activated: int
    digest: str
    activation_digest: str
    latency_count: int
    latency_sum_s: float
    latency_max_s: float
    latency_buckets: tuple[int, ...]


class AgreementCore:
    """One rank's side of one domain.

    Args:
        domain: Who decides together.
        rank: This rank; a member.
        config: Bounds and timeouts, equal on all ranks.
        replicated: The blocking baseline's variant: every rank runs the coordinator over the same lockstep exchange.

    Raises:
        ConfigurationError: ``rank`` is no member.
    """

    def __init__(self, domain: Domain, rank: int, config: AgreementConfig, *, replicated: bool = False) -> None:
        self.domain = domain
        self.config = config
        self.rank = rank
        self.me = domain.index_of(rank)
        self.size = domain.size
        self.all_mask = (1 << self.size) - 1
        self.replicated = replicated
        self.coordinator = self.me if replicated else domain.coordinator_index
        self.scheduler = domain.scheduler_index
        self.is_coordinator = self.me == self.coordinator
        self.is_scheduler = self.me == self.scheduler
        others = tuple(i for i in range(self.size) if i != self.me)
        self.peers: tuple[int, ...] = () if replicated else (others if self.is_coordinator else (self.coordinator,))
        self.rounds: dict[int, Round] = {}
        self.by_request: dict[int, list[int]] = {}  # an index: open incarnations of a request id, oldest first
        self.blocked: list[int] = []
        self.heard = 0
        self.open_count = 0
        self.committed = 0
        self.closed_rounds = 0
        self.quarantined = 0
        self.activated_count = 0
        self.digest = _EMPTY_DIGEST
        self.activation_digest = _EMPTY_DIGEST
        self.intents: dict[tuple[int, int], Record] = {}
        self.queues: dict[int, list[Record]] = {p: [] for p in self.peers} if self.is_coordinator else {}
        self._local: deque[tuple[bool, Record]] = deque()
        self._fx: list[Effect] = []
        self._stepping = False
        self._broken_off: tuple[Effect, ...] = ()
        self._now = 0.0
        self.fault: Fault | None = None
        # drain and close
        self.drain_last: int | None = None
        self.drain_authored: int | None = None
        self.drain_told = False
        self.reported = False
        self.report_mask = 0
        self.reports: dict[int, tuple[int, int]] = {}
        self.drained = False
        self.closing = False
        self.close_mask = 0
        self.closed = False
        # streams and silence, by member index
        self.next_sequence = [1] * self.size
        self.expected = [1] * self.size
        self.last_sent_s = [float("-inf")] * self.size
        self.silent_s = [0.0] * self.size
        self.busy_s = [0.0] * self.size
        self.spoken = 0
        self.suspects = 0
        self.received_mask = 0
        self.last_sweep_s: float | None = None
        self.busy_pending: dict[int, int] = {}
        # timers, each ordered by deadline because its timeout is one constant
        self._idle_timers: dict[int, float] = {}
        self._lease_timers: dict[int, float] = {}
        self._doubt_timers: dict[int, float] = {}
        # counters
        self.sent_kinds = [0] * 128
        self.received_kinds = [0] * 128
        self.event_counts: dict[str, int] = {}
        self.outcome_counts = [0, 0, 0]
        self.stale = 0
        self.duplicates = 0
        self.ignored = 0
        self.frames_received = 0
        self.frames_sent = 0
        self.heartbeats_sent = 0
        self.open_max = 0
        self.queue_max = 0
        self.latency_count = 0
        self.latency_sum_s = 0.0
        self.latency_max_s = 0.0
        self.latency_buckets = [0] * LATENCY_BUCKETS

    # -- the one entry ----------------------------------------------------------------------------------------------

    def step(self, event: ev.Input, now_s: float) -> tuple[Effect, ...]:
        """Apply one input.

        Args:
            event: What happened.
            now_s: A monotonic clock's reading in seconds; going backwards is harmless.

        Returns:
            Effects in the order in which they must be carried out.

        Raises:
            LocalProtocolError: A local call broke the contract; nothing changed.
            WouldBlock: An admission without a credit; nothing changed.
            DomainStopped: A local call after a fault; nothing changed.
            ConcurrentCallError: Another step is running (a thread, a signal handler); nothing changed.

        Anything else (a defect, an interrupt) breaks the step off half done: the domain stops; see ``salvage``.
        """
        kind = type(event)
        handler = _HANDLERS[kind]
        if self._stepping:
            raise ConcurrentCallError(f"rank {self.rank}: {kind.__name__} while another call runs")
        if self.fault is not None:
            if kind in _LOCAL_INPUTS:
                raise DomainStopped(self.fault)
            if kind not in _AFTER_FAULT:
                return ()
        self._now = now_s
        fx: list[Effect] = []
        self._fx = fx
        self._stepping = True
        try:
            handler(self, event)
            if self._local:
                self._deliver_local()
            if self.drain_last is not None and not self.reported and self.fault is None:
                self._report()
        except _Violation as violation:
            self._stop(violation)
        except (LocalProtocolError, WouldBlock):
            raise
        except BaseException as error:
            self._stop(_Violation(FaultCode.INTERNAL, f"broken off: {error!r}"))
            self._broken_off = tuple(fx)
            raise
        finally:
            self._stepping = False
        return tuple(fx)

    @property
    def stepping(self) -> bool:
        """Whether a step is running: seen from a signal handler, a callback or another thread."""
        return self._stepping

    def salvage(self) -> tuple[Effect, ...]:
        """Effects of a step that an exception broke off, once: what still binds, and the fault."""
        effects, self._broken_off = self._broken_off, ()
        return effects

    def _deliver_local(self) -> None:
        """Empty this rank's own queue: never from inside a decision, always in decision order."""
        local = self._local
        while local:
            upward, record = local.popleft()
            if upward:
                self._from_member(self.me, record)
            else:
                self._from_coordinator(record)

    def _emit(self, event: AgreementEvent) -> None:
        self._fx.append(event)
        name = type(event).__name__
        self.event_counts[name] = self.event_counts.get(name, 0) + 1

    # -- local calls: admission -------------------------------------------------------------------------------------

    def _on_admitted(self, event: ev.RequestAdmitted) -> None:
        request_id, incarnation = event.request_id, event.incarnation
        key = Key(request_id, incarnation)
        if type(request_id) is not int or not 0 <= request_id <= REQUEST_ID_MAX:
            self._refuse(f"request_id {request_id!r} is no integer in 0..2**63-1")
        if type(incarnation) is not int or incarnation < 1:
            self._refuse(f"incarnation {incarnation!r} is no integer >= 1")
        if type(event.ready) is not bool:
            self._refuse(f"ready={event.ready!r} is neither True nor False")
        known = self.rounds.get(incarnation)
        if incarnation <= self.heard:
            if known is not None and known.request_id == request_id and known.uses_ready == event.ready:
                self._fx.append(Answer(Key(request_id, incarnation, known.attempt)))
                return
            self._refuse(
                f"incarnation {incarnation} was admitted before, as another request or decided since", key, known
            )
        if incarnation != self.heard + 1:
            self._refuse(f"incarnation {incarnation} after {self.heard}: the broadcast order has no gaps", key)
        if self.drain_last is not None and incarnation > self.drain_last:
            if self.is_scheduler:
                self._refuse(f"admission after the drain at {self.drain_last}", key)
            # The broadcast and the drain contradict each other: refusing alone would leave the others waiting.
            raise _Violation(FaultCode.DRAIN_MISMATCH, f"admission {incarnation} after the drain at {self.drain_last}")
        others = self.by_request.get(request_id)
        if self.is_scheduler:
            if others:
                self._refuse(f"request is still undecided as incarnation {others[0]}", key, self.rounds[others[0]])
            if self.open_count >= self.config.credits:
                raise WouldBlock(f"all {self.config.credits} credits are spent")
        if known is not None:
            used = known.votes | known.withdrawn or known.ready is not ReadyState.IDLE
            if known.request_id != request_id or (used and not event.ready):
                raise _Violation(
                    FaultCode.BROADCAST_MISMATCH,
                    f"broadcast says request {request_id}, ready={event.ready}; peers spoke of request {known.request_id}",
                    known,
                )
            round_ = known
        else:
            if len(self.blocked) >= self.config.credits:
                self._refuse("the authority spent more credits than there are", key)
            round_ = Round(request_id, incarnation)
            round_.blocked = bool(others) or self.open_count >= self.config.credits
            self._open(round_)
        round_.heard = True
        round_.uses_ready = event.ready
        if not event.ready:
            round_.ready = ReadyState.NOT_USED
        self.heard = incarnation
        self._note(round_, "admitted", self.me)
        self._fx.append(Answer(Key(request_id, incarnation, round_.attempt)))
        if event.ready and round_.terminal_mask and round_.phase is Phase.GATHERING:
            self._end_attempt(round_)
        if round_.ready is ReadyState.ABORTING:  # the tombstone: aborted before the request existed here
            self._emit(ev.Aborted(Key(request_id, incarnation, round_.attempt), REASONS[round_.aborted_for]))

    def _open(self, round_: Round) -> None:
        self.rounds[round_.incarnation] = round_
        self.by_request.setdefault(round_.request_id, []).append(round_.incarnation)
        if round_.blocked:
            self.blocked.append(round_.incarnation)
            round_.held = []
        else:
            self.open_count += 1
            if self.open_count > self.open_max:
                self.open_max = self.open_count

    def _retire(self, round_: Round) -> None:
        incarnation = round_.incarnation
        del self.rounds[incarnation]
        siblings = self.by_request[round_.request_id]
        siblings.remove(incarnation)
        if not siblings:
            del self.by_request[round_.request_id]
        self.open_count -= 1
        self._idle_timers.pop(incarnation, None)
        self._lease_timers.pop(incarnation, None)
        self._doubt_timers.pop(incarnation, None)
        if self.blocked:
            self._unblock()

    def _unblock(self) -> None:
        for incarnation in tuple(self.blocked):
            if self.open_count >= self.config.credits:
                return
            round_ = self.rounds[incarnation]
            if self.by_request[round_.request_id][0] != incarnation:
                continue
            self.blocked.remove(incarnation)
            round_.blocked = False
            self.open_count += 1
            self.open_max = max(self.open_max, self.open_count)
            held, round_.held = round_.held or (), None
            for slot, record in held:
                self._queue_up(slot, record)

    # -- local calls: readiness -------------------------------------------------------------------------------------

    def _round_of(self, key: Key) -> Round | None:
        """The open round of ``key``; None when it is decided here.

        Raises:
            LocalProtocolError: No key, never admitted here, or another request's incarnation.
        """
        if type(key) is not Key:
            self._refuse(f"{key!r} is no Key")
        if type(key.incarnation) is not int or type(key.attempt) is not int or key.attempt < 0:
            self._refuse(f"{key!r} holds something else than counts")
        round_ = self.rounds.get(key.incarnation)
        if round_ is None:
            if key.incarnation > self.heard or key.incarnation < 1:
                self._refuse("unknown incarnation: not admitted here", key)
            return None
        if not round_.heard:
            self._refuse("not admitted here yet", key, round_)
        if round_.request_id != key.request_id:
            self._refuse(f"the incarnation belongs to request {round_.request_id}", key, round_)
        return round_

    def _on_published(self, event: ev.ReadyPublished) -> None:
        key = event.key
        round_ = self._round_of(key)
        if round_ is None:
            self._fx.append(Answer(PublishResult.FINAL))
            return
        if not round_.uses_ready:
            self._refuse("readiness is not used by this admission", key, round_)
        if round_.terminal >= TerminalState.VOTED:
            self._refuse("readiness after this rank's terminal vote", key, round_)
        ready = round_.ready
        if key.attempt == round_.attempt:
            if ready is ReadyState.IDLE:
                self._vote_ready(round_)
                answer = PublishResult.DEFERRED if round_.blocked else PublishResult.PUBLISHED
            elif ready in (ReadyState.WITHDRAWN, ReadyState.ABORTING, ReadyState.ABORT_ACKED, ReadyState.REVOKED):
                answer = PublishResult.ABORTING
            elif ready is ReadyState.FINALIZED:
                answer = PublishResult.FINAL
            else:
                answer = PublishResult.PUBLISHED
        elif key.attempt == round_.attempt + 1:
            if ready in READY_OPEN:
                if round_.next_intent != NEXT_WITHDRAW:
                    round_.next_intent = NEXT_PUBLISH
                answer = PublishResult.DEFERRED
            elif ready is ReadyState.IDLE:
                self._refuse("the attempt before this one is not over", key, round_)
            else:
                answer = PublishResult.FINAL
        elif key.attempt < round_.attempt:
            answer = PublishResult.FINAL
        else:
            self._refuse("no such attempt", key, round_)
        self._fx.append(Answer(answer))

    def _vote_ready(self, round_: Round) -> None:
        round_.ready = ReadyState.VOTED
        self._note(round_, "vote", self.me)
        self._say(round_, _READY_SLOT, _VOTE)

    def _on_withdraw(self, event: ev.WithdrawRequested) -> None:
        key, reason = event.key, self._known(Reason, event.reason)
        round_ = self._round_of(key)
        if round_ is None or key.attempt < round_.attempt:
            self._fx.append(Answer(WithdrawResult.FINAL))
            return
        ready = round_.ready
        answer = WithdrawResult.WILL_ABORT
        if ready is ReadyState.NOT_USED:
            answer = WithdrawResult.NOT_USED
        elif key.attempt > round_.attempt + 1:
            self._refuse("no such attempt", key, round_)
        elif key.attempt == round_.attempt + 1:
            if ready in READY_OPEN:
                round_.next_intent = NEXT_WITHDRAW
                round_.next_reason = max(round_.next_reason, reason)
            elif ready is ReadyState.IDLE:
                self._refuse("the attempt before this one is not over", key, round_)
            else:
                answer = WithdrawResult.FINAL
        elif ready in (ReadyState.LEASED, ReadyState.RELEASED):
            answer = WithdrawResult.LEASED
        elif ready in (ReadyState.ACTIVATED, ReadyState.COMPLETE):
            answer = WithdrawResult.ACTIVATED
        elif ready is ReadyState.FINALIZED:
            answer = WithdrawResult.FINAL
        elif ready is ReadyState.IDLE and round_.terminal >= TerminalState.VOTED:
            answer = WithdrawResult.TERMINAL
        elif ready is ReadyState.ABORT_ACKED:
            if reason > TRANSIENT_MAX and round_.terminal < TerminalState.VOTED:  # too late for this attempt's reason
                round_.next_intent = NEXT_WITHDRAW
                round_.next_reason = max(round_.next_reason, reason)
        else:
            self._withdraw(round_, reason)
        self._fx.append(Answer(answer))

    def _withdraw(self, round_: Round, reason: int) -> None:
        """From IDLE, VOTED, PREPARED: say so. From WITHDRAWN, REVOKED, ABORTING: only the reason may grow."""
        ready = round_.ready
        nxt = READY_NEXT[ready][ReadyInput.WITHDRAW]
        if nxt is None:
            raise _Violation(FaultCode.INTERNAL, f"withdrawal in {ready.name}", round_)
        grown = reason > round_.own_reason
        round_.own_reason = max(round_.own_reason, reason)
        round_.ready = nxt
        if reason > TRANSIENT_MAX:
            round_.next_intent = NEXT_NOTHING
        if ready is not ReadyState.ABORTING and ready is not ReadyState.REVOKED:
            if ready is not ReadyState.WITHDRAWN:
                self._note(round_, "withdraw", self.me)
                self._say(round_, _READY_SLOT, _WITHDRAW, reason=round_.own_reason)
            elif (grown and (_READY_SLOT, round_.incarnation) in self.intents) or (grown and round_.blocked):
                self._say(round_, _READY_SLOT, _WITHDRAW, reason=round_.own_reason)

    def _on_prepare_acknowledged(self, event: ev.PrepareAcknowledged) -> None:
        key = event.key
        round_ = self._round_of(key)
        if round_ is None or key.attempt < round_.attempt:
            self._fx.append(Answer(False))
            return
        ready = round_.ready
        if key.attempt == round_.attempt and ready is ReadyState.PREPARED:
            round_.ready = ReadyState.LEASED
            round_.leased_at_s = self._now
            if self.is_scheduler and self.config.lease_timeout_s is not None:
                self._lease_timers[round_.incarnation] = self._now + self.config.lease_timeout_s
            self._note(round_, "ack", self.me)
            self._say(round_, _READY_SLOT, _ACK)
            self._fx.append(Answer(True))
        elif key.attempt == round_.attempt and ready in (
            ReadyState.WITHDRAWN, ReadyState.REVOKED, ReadyState.ABORTING, ReadyState.ABORT_ACKED, ReadyState.FINALIZED,
        ):  # fmt: skip
            self._fx.append(Answer(False))
        else:
            self._refuse("acknowledged a PREPARE that did not arrive, or twice", key, round_)

    def _on_abort_acknowledged(self, event: ev.AbortAcknowledged) -> None:
        key = event.key
        round_ = self._round_of(key)
        if round_ is None or key.attempt != round_.attempt or round_.ready is not ReadyState.ABORTING:
            self._refuse("acknowledged an ABORT that did not arrive, or twice", key, round_)
        round_.ready = ReadyState.ABORT_ACKED
        self._note(round_, "abort ack", self.me)
        self._say(round_, _READY_SLOT, _ABORT_ACK, reason=round_.own_reason)
        self._fx.append(Answer(None))

    def _on_activated(self, event: ev.ScheduleActivated) -> None:
        chosen: list[Round] = []
        wanted = ReadyState.RELEASED if self.is_scheduler else ReadyState.LEASED
        for key in event.keys:
            round_ = self._round_of(key)
            if round_ is None:
                self._refuse("activation of a decided request", key)
            if round_.ready is ReadyState.NOT_USED:
                continue
            if key.attempt != round_.attempt or round_.ready is not wanted or round_ in chosen:
                self._refuse(f"activation needs {wanted.name}", key, round_)
            chosen.append(round_)
        for round_ in chosen:
            round_.ready = ReadyState.ACTIVATED
            self._lease_timers.pop(round_.incarnation, None)
            self.activated_count += 1
            self.activation_digest = blake2b(
                self.activation_digest + _KEY_PACK(round_.request_id, round_.incarnation, round_.attempt),
                digest_size=16,
            ).digest()
            self._note(round_, "activate", self.me)
            self._say(round_, _READY_SLOT, _ACTIVATE_ACK)
        self._fx.append(Answer(len(chosen)))

    def _on_revoke(self, event: ev.RevokeRequested) -> None:
        key = event.key
        if not self.is_scheduler:
            self._refuse("only the scheduling rank revokes", key if type(key) is Key else None)
        reason = self._known(Reason, event.reason)
        round_ = self._round_of(key)
        if round_ is None or key.attempt < round_.attempt:
            self._fx.append(Answer(RevokeResult.FINAL))
            return
        ready = round_.ready
        if ready in (ReadyState.LEASED, ReadyState.RELEASED) and key.attempt == round_.attempt:
            self._revoke(round_, reason)
            answer = RevokeResult.WILL_ABORT
        elif ready in (ReadyState.REVOKED, ReadyState.WITHDRAWN, ReadyState.ABORTING, ReadyState.ABORT_ACKED):
            answer = RevokeResult.WILL_ABORT
        elif ready in (ReadyState.ACTIVATED, ReadyState.COMPLETE):
            answer = RevokeResult.ACTIVATED
        elif ready is ReadyState.FINALIZED:
            answer = RevokeResult.FINAL
        else:
            answer = RevokeResult.NOT_LEASED
        self._fx.append(Answer(answer))

    def _revoke(self, round_: Round, reason: int) -> None:
        round_.ready = ReadyState.REVOKED
        round_.own_reason = max(round_.own_reason, reason)
        self._lease_timers.pop(round_.incarnation, None)
        self._note(round_, "revoke", self.me)
        self._say(round_, _READY_SLOT, _REVOKE, reason=round_.own_reason)

    def _revoke_unasked(self, round_: Round, reason: Reason) -> None:
        self._emit(ev.Revoked(Key(round_.request_id, round_.incarnation, round_.attempt), reason))
        self._revoke(round_, int(reason))

    def _on_recall(self, event: ev.RecallRequested) -> None:
        key, reason = event.key, self._known(Reason, event.reason)
        round_ = self._round_of(key)
        if self.is_scheduler:
            self._refuse("the scheduling rank revokes; it does not recall", key, round_)
        sent = (
            round_ is not None
            and key.attempt == round_.attempt
            and round_.ready is ReadyState.LEASED
            and not round_.advised
        )
        if sent and round_ is not None:
            round_.advised = True
            self._say(round_, _RECALL_SLOT, _RECALL, reason=reason)
        self._fx.append(Answer(sent))

    # -- local calls: terminal --------------------------------------------------------------------------------------

    def _on_terminal_voted(self, event: ev.TerminalVoted) -> None:
        key = event.key
        outcome = self._known(Outcome, event.outcome)
        disposition = self._known(Disposition, event.disposition)
        reason = self._known(Reason, event.reason)
        round_ = self._round_of(key)
        if round_ is None:
            self._refuse("terminal vote for a decided request", key)
        terminal = round_.terminal
        if terminal >= TerminalState.VOTED:
            if (outcome, disposition, reason) == (round_.outcome, round_.disposition, round_.reason):
                self._fx.append(Answer(False))
                return
            self._refuse("a terminal vote is immutable", key, round_)
        if round_.ready not in TERMINAL_ALLOWED_IN:
            self._refuse("terminal vote while this rank's readiness attempt is open", key, round_)
        if disposition and not outcome:
            self._refuse("COMPLETED with QUARANTINE", key, round_)
        if disposition and not round_.doubt_expired and not self._doubt_is_due(round_):
            self._refuse("QUARANTINE before the deadline of a doubt", key, round_)
        round_.terminal = TerminalState.VOTED
        round_.outcome, round_.disposition, round_.reason = outcome, disposition, reason
        round_.next_intent = NEXT_NOTHING
        round_.voted_at_s = self._now
        if self._doubt_timers:
            self._doubt_timers.pop(round_.incarnation, None)
        self._note(round_, "terminal vote", self.me)
        self._say(round_, _TERMINAL_SLOT, _TERMINAL, outcome, disposition, reason)
        self._fx.append(Answer(True))

    def _doubt_is_due(self, round_: Round) -> bool:
        return round_.doubt_at_s is not None and self._now >= round_.doubt_at_s + self.config.doubt_deadline_s

    def _on_doubt(self, event: ev.DoubtRaised) -> None:
        key, reason = event.key, self._known(Reason, event.reason)
        round_ = self._round_of(key)
        if round_ is None:
            self._refuse("doubt about a decided request", key)
        if round_.terminal >= TerminalState.VOTED:
            self._refuse("doubt after this rank's terminal vote", key, round_)
        if round_.ready not in TERMINAL_ALLOWED_IN or round_.ready is ReadyState.IDLE:
            self._refuse("doubt about a request that never ran here", key, round_)
        first = round_.terminal is TerminalState.OPEN
        if first:
            round_.terminal = TerminalState.DOUBTED
            round_.doubt_at_s = self._now
            self._doubt_timers[round_.incarnation] = self._now + self.config.doubt_deadline_s
            self._note(round_, "doubt", self.me)
            self._say(round_, _DOUBT_SLOT, _DOUBT, reason=reason)
        self._fx.append(Answer(first))

    # -- local calls: domain ----------------------------------------------------------------------------------------

    def _on_busy(self, event: ev.BusyDeclared) -> None:
        max_s = event.max_s
        if type(max_s) not in (int, float) or not 0 <= max_s <= self.config.busy_max_s:
            self._refuse(f"busy({max_s!r}): a number in 0..{self.config.busy_max_s} s")
        for peer in self.peers:
            self.busy_pending[peer] = max(1, int(max_s * 1000))
        self._fx.append(Answer(None))

    def _on_drain_requested(self, event: ev.DrainRequested) -> None:
        last = event.last_incarnation
        if type(last) is not int or last < self.heard or (self.is_scheduler and last != self.heard):
            self._refuse(f"drain at {last!r}, but {self.heard} were admitted here")
        if last < max(self.rounds, default=0):
            self._refuse(f"drain at {last}, but peers speak of incarnation {max(self.rounds)}")
        if self.drain_last is not None and self.drain_last != last:
            self._refuse(f"drain at {last}, but it was declared at {self.drain_last}")
        declared = self.drain_last is not None
        self.drain_last = last
        if self.is_scheduler and not declared:
            self._control(_DRAIN, incarnation=last)
            for round_ in tuple(self.rounds.values()):
                self._end_unscheduled(round_)
        self._fx.append(Answer(None))

    def _end_unscheduled(self, round_: Round) -> None:
        """Scheduling rank, draining: what is not activated will never be."""
        if round_.ready in (ReadyState.LEASED, ReadyState.RELEASED):
            self._revoke_unasked(round_, Reason.DRAIN)
        elif round_.ready in (ReadyState.VOTED, ReadyState.PREPARED) or (
            round_.ready is ReadyState.IDLE and round_.terminal < TerminalState.VOTED
        ):
            self._withdraw(round_, int(Reason.DRAIN))

    def _report(self) -> None:
        while not self.reported and self.heard == self.drain_last and not self.rounds:
            self.reported = True
            self._control(_DRAIN_REPORT, request_id=int.from_bytes(self.digest[:8], "little"), incarnation=self.heard)
            self._deliver_local()

    def _on_close_requested(self, _event: ev.CloseRequested) -> None:
        if not self.drained:
            self._refuse("close before the drain is proven")
        if not self.closing:
            self.closing = True
            self._control(_CLOSE)
        self._fx.append(Answer(None))

    def _on_host_failed(self, event: ev.HostFailed) -> None:
        raise _Violation(event.code, event.detail)

    # -- what members say, at the coordinator -----------------------------------------------------------------------

    def _from_member(self, source: int, record: Record) -> None:
        kind, outcome, disposition, reason, attempt, request_id, incarnation = record
        row = CONTRACT[kind]
        if row is None or (row.author == "coordinator"):
            raise _Violation(FaultCode.PROTOCOL, f"rank {self._name(source)} may not send kind {kind}", suspect=source)
        if outcome > row.outcome_max or disposition > row.disposition_max:
            raise _Violation(
                FaultCode.PROTOCOL,
                f"rank {self._name(source)}: {Kind(kind).name} with outcome {outcome}, disposition {disposition}",
                suspect=source,
            )
        if kind == _FAIL_STOP:
            if outcome != source and not self.replicated:
                raise _Violation(
                    FaultCode.PROTOCOL, f"rank {self._name(source)} reports another rank's fault", suspect=source
                )
            self._failed_elsewhere(source, record)
        if reason > REASON_MAX:
            raise _Violation(FaultCode.PROTOCOL, f"rank {self._name(source)}: unknown reason {reason}", suspect=source)
        if row.author == "scheduler" and source != self.scheduler:
            raise _Violation(
                FaultCode.PROTOCOL,
                f"rank {self._name(source)} is no scheduling rank: {Kind(kind).name}",
                suspect=source,
            )
        if kind > _DOUBT:
            self._domain_record(source, kind, request_id, incarnation)
            return
        round_ = self.rounds.get(incarnation)
        if round_ is None:
            round_ = self._unheard(source, request_id, incarnation)
            if round_ is None:
                return
        elif round_.request_id != request_id:
            raise _Violation(
                FaultCode.PROTOCOL,
                f"rank {self._name(source)} calls incarnation {incarnation} request {request_id}, not {round_.request_id}",
                round_,
                source,
            )
        if kind == _TERMINAL:
            self._count_terminal(round_, source, outcome, disposition, reason)
        elif kind == _DOUBT:
            if round_.doubted >> source & 1:
                self.duplicates += 1
                return
            round_.doubted |= 1 << source
            self._note(round_, "doubt", source)
            self._advise(round_, source, AdviceKind.DOUBT, reason)
        else:
            self._count_ready(round_, source, kind, reason, attempt)

    def _unheard(self, source: int, request_id: int, incarnation: int) -> Round | None:
        """A record for a round not open here: stale, inside the credit window, or a fault."""
        if 1 <= incarnation <= self.heard:
            self.stale += 1
            return None
        if self.is_scheduler:
            whose = "which this rank, the authority, never admitted"
            raise _Violation(
                FaultCode.PROTOCOL,
                f"rank {self._name(source)} speaks of incarnation {incarnation}, {whose}",
                suspect=source,
            )
        if incarnation < 1 or incarnation > self.heard + self.config.credits or request_id > REQUEST_ID_MAX:
            raise _Violation(
                FaultCode.PROTOCOL,
                f"rank {self._name(source)} speaks of incarnation {incarnation}, request {request_id}; "
                f"{self.heard} were heard of and {self.config.credits} credits exist",
                suspect=source,
            )
        if self.drain_last is not None and incarnation > self.drain_last:
            raise _Violation(
                FaultCode.DRAIN_MISMATCH,
                f"rank {self._name(source)} speaks of incarnation {incarnation} after the drain at {self.drain_last}",
                suspect=source,
            )
        if self.open_count >= self.config.credits:
            raise _Violation(
                FaultCode.PROTOCOL,
                f"rank {self._name(source)} opens more rounds than there are credits",
                suspect=source,
            )
        round_ = Round(request_id, incarnation)
        self._open(round_)
        return round_

    def _count_ready(self, round_: Round, source: int, kind: int, reason: int, attempt: int) -> None:
        if not round_.uses_ready:
            raise _Violation(
                FaultCode.PROTOCOL,
                f"rank {self._name(source)} uses readiness that this admission has not",
                round_,
                source,
            )
        if attempt != round_.phase_attempt:
            if attempt < round_.phase_attempt:
                self.stale += 1
                return
            raise _Violation(
                FaultCode.PROTOCOL,
                f"rank {self._name(source)} is in attempt {attempt} before {round_.phase_attempt} was finalized",
                round_,
                source,
            )
        bit = 1 << source
        rule = COORDINATOR_RULE[round_.phase][kind]
        if rule == Rule.COUNT:
            if kind == _VOTE:
                if round_.terminal_mask & bit:
                    self._unexpected(round_, source, kind, "after its terminal vote")
                round_.votes |= bit
                self._note(round_, "vote", source)
                if round_.terminal_mask:
                    self._abort(round_, int(Reason.TERMINAL_VOTE))
                elif round_.votes == self.all_mask:
                    round_.phase = Phase.GRANTING
                    self._decide(round_, _PREPARE)
            elif kind == _ACK:
                round_.acks |= bit
                self._note(round_, "ack", source)
                if round_.acks == self.all_mask:
                    round_.phase = Phase.RELEASED
                    self._note(round_, "RELEASE", self.me)
                    self._tell_scheduler((_RELEASE, 0, 0, 0, attempt, round_.request_id, round_.incarnation))
            elif kind == _ACTIVATE_ACK:
                round_.activated |= bit
                self._note(round_, "activate ack", source)
                if round_.activated == self.all_mask:
                    round_.phase = Phase.COMPLETE
                    self._decide(round_, _COMPLETE)
            else:
                round_.abort_acks |= bit
                round_.abort_reason = max(round_.abort_reason, reason)
                self._note(round_, "abort ack", source)
                if round_.abort_acks == self.all_mask:
                    self._finalize(round_)
        elif rule == Rule.IGNORE:
            self.ignored += 1
        elif rule == Rule.ABORT:
            if kind == _WITHDRAW and round_.acks & bit:
                self.ignored += 1  # its lease is irrevocable; by FIFO the ACK came first
                return
            if kind == _REVOKE and round_.activated:
                self._unexpected(round_, source, kind, "after an activation")
            round_.withdrawn |= bit
            self._note(round_, "revoke" if kind == _REVOKE else "withdraw", source)
            self._abort(round_, reason)
        elif rule == Rule.NOTE:
            round_.withdrawn |= bit
            round_.abort_reason = max(round_.abort_reason, reason)
        elif rule == Rule.ADVISE:
            if round_.recalled & bit:
                self.duplicates += 1
                return
            round_.recalled |= bit
            self._advise(round_, source, AdviceKind.RECALL, reason)
        else:
            self._unexpected(round_, source, kind, f"in phase {round_.phase.name}")

    def _unexpected(self, round_: Round, source: int, kind: int, where: str) -> NoReturn:
        raise _Violation(
            FaultCode.PROTOCOL, f"unexpected {Kind(kind).name} of rank {self._name(source)} {where}", round_, source
        )

    def _abort(self, round_: Round, reason: int) -> None:
        round_.phase = Phase.ABORTING
        round_.abort_acks = 0
        round_.abort_reason = max(round_.abort_reason, reason)
        self._decide(round_, _ABORT, reason=round_.abort_reason)

    def _finalize(self, round_: Round) -> None:
        if round_.terminal_mask:
            mode = FinalizeMode.TERMINAL
        elif round_.abort_reason > TRANSIENT_MAX:
            mode = FinalizeMode.CLOSED
        else:
            mode = FinalizeMode.REOPEN
        self._decide(round_, _FINALIZE, outcome=int(mode), reason=round_.abort_reason)
        if mode is FinalizeMode.REOPEN:
            round_.phase = Phase.GATHERING
            round_.phase_attempt += 1
            round_.votes = round_.withdrawn = round_.acks = round_.activated = round_.abort_acks = round_.recalled = 0
            round_.abort_reason = 0
        else:
            round_.phase = Phase.FINAL
            self._maybe_commit(round_)

    def _count_terminal(self, round_: Round, source: int, outcome: int, disposition: int, reason: int) -> None:
        bit = 1 << source
        vote = (outcome, disposition, reason)
        if round_.terminal_mask & bit:
            if round_.terminal_votes is not None and round_.terminal_votes[source] == vote:
                self.duplicates += 1
                return
            raise _Violation(FaultCode.PROTOCOL, f"rank {self._name(source)} changed its terminal vote", round_, source)
        if disposition and not outcome:
            raise _Violation(
                FaultCode.PROTOCOL, f"rank {self._name(source)} voted COMPLETED with QUARANTINE", round_, source
            )
        phase = round_.phase
        own_attempt = round_.votes | round_.withdrawn | round_.abort_acks
        if phase is not Phase.FINAL and not round_.activated & bit and own_attempt & bit:
            raise _Violation(
                FaultCode.PROTOCOL,
                f"rank {self._name(source)} voted terminal while its readiness attempt is open",
                round_,
                source,
            )
        if round_.terminal_votes is None:
            round_.terminal_votes = {}
        round_.terminal_votes[source] = vote
        round_.terminal_mask |= bit
        self._note(round_, "terminal vote", source)
        if phase is Phase.GATHERING and round_.votes:
            self._abort(round_, int(Reason.TERMINAL_VOTE))
        elif phase is Phase.GATHERING and round_.heard and round_.uses_ready and round_.terminal_mask != self.all_mask:
            self._end_attempt(round_)
        else:
            self._maybe_commit(round_)

    def _end_attempt(self, round_: Round) -> None:
        """A terminal vote, and nobody is ready: nobody needs to become it. End the attempt, so that everybody votes terminal.

        Replicas must not decide by what they have heard, which differs: each rank says that it withdraws instead, and all
        decide in the exchange that carries it.
        """
        if not self.replicated:
            self._abort(round_, int(Reason.TERMINAL_VOTE))
        elif round_.ready is ReadyState.IDLE and round_.terminal < TerminalState.VOTED:
            self._withdraw(round_, int(Reason.TERMINAL_VOTE))

    def _maybe_commit(self, round_: Round) -> None:
        """All votes, and no readiness attempt in progress: the decision, once."""
        if round_.terminal_mask != self.all_mask or round_.phase not in (Phase.GATHERING, Phase.COMPLETE, Phase.FINAL):
            return
        outcome = disposition = packed = 0
        for member, (one_outcome, one_disposition, one_reason) in (round_.terminal_votes or {}).items():
            if one_outcome > outcome:
                outcome = one_outcome
            if one_disposition > disposition:
                disposition = one_disposition
            packed |= one_reason << (8 * member)
        round_.phase = Phase.FINAL
        chunk = 0
        while packed:  # eight members' reasons per record, before the COMMIT on every stream alike
            self._fan_out((_REASONS, chunk, 0, 0, 0, packed & (2**64 - 1), round_.incarnation))
            packed >>= 64
            chunk += 1
        self._decide(round_, _COMMIT, outcome=outcome, disposition=disposition)

    def _decide(self, round_: Round, kind: int, *, outcome: int = 0, disposition: int = 0, reason: int = 0) -> None:
        """Make a decision: one record, to every destination's queue, the local one included, in this one step."""
        self._note(round_, Kind(kind).name, self.me)
        self._fan_out((kind, outcome, disposition, reason, round_.phase_attempt, round_.request_id, round_.incarnation))

    def _fan_out(self, record: Record) -> None:
        for queue in self.queues.values():
            queue.append(record)
        self._local.append((False, record))

    def _tell_scheduler(self, record: Record) -> None:
        if self.is_scheduler:
            self._local.append((False, record))
        elif not self.replicated:
            self.queues[self.scheduler].append(record)

    def _advise(self, round_: Round, source: int, kind: AdviceKind, reason: int) -> None:
        self._tell_scheduler(
            (_ADVICE, source, int(kind), reason, round_.phase_attempt, round_.request_id, round_.incarnation)
        )

    def _domain_record(self, source: int, kind: int, request_id: int, incarnation: int) -> None:
        bit = 1 << source
        if kind == _DRAIN:
            if self.drain_authored is None:
                self.drain_authored = incarnation
                self._fan_out((_DRAIN_ALL, 0, 0, 0, 0, 0, incarnation))
                if self.report_mask:
                    self._compare_reports()
            elif self.drain_authored != incarnation:
                raise _Violation(FaultCode.DRAIN_MISMATCH, f"drain at {incarnation} after {self.drain_authored}")
        elif kind == _DRAIN_REPORT:
            if self.report_mask & bit:
                if self.reports[source] != (incarnation, request_id):
                    raise _Violation(
                        FaultCode.DRAIN_MISMATCH, f"rank {self._name(source)} changed its drain report", suspect=source
                    )
                self.duplicates += 1
                return
            self.report_mask |= bit
            self.reports[source] = (incarnation, request_id)
            if self.drain_authored is not None:
                self._compare_reports()
        elif kind == _CLOSE:
            if not self.report_mask & bit:
                raise _Violation(
                    FaultCode.PROTOCOL, f"rank {self._name(source)} closed before it drained", suspect=source
                )
            if self.close_mask & bit:
                self.duplicates += 1
                return
            self.close_mask |= bit
            if self.close_mask == self.all_mask:
                self._fan_out((_CLOSE_ACK, 0, 0, 0, 0, 0, 0))

    def _compare_reports(self) -> None:
        last = self.drain_authored or 0
        for member, (count, _digest) in self.reports.items():
            if count != last:
                raise _Violation(
                    FaultCode.DRAIN_MISMATCH,
                    f"rank {self._name(member)} drained at {count}, not at {last}",
                    suspect=member,
                )
        if self.report_mask != self.all_mask:
            self._fan_out((_DRAIN_STATUS, 0, 0, 0, 0, self.report_mask, last))
            return
        digests = {digest for _count, digest in self.reports.values()}
        if len(digests) != 1:
            told = ", ".join(f"{self._name(m)}: {d:016x}" for m, (_c, d) in sorted(self.reports.items()))
            raise _Violation(FaultCode.DRAIN_MISMATCH, f"digests of {last} decisions differ: {told}")
        self._fan_out((_DRAINED, 0, 0, 0, 0, digests.pop(), last))

    # -- what the coordinator says, at every member -----------------------------------------------------------------

    def _from_coordinator(self, record: Record) -> None:
        kind, outcome, disposition, reason, attempt, request_id, incarnation = record
        row = CONTRACT[kind]
        if row is None or kind < _PREPARE:
            raise _Violation(FaultCode.PROTOCOL, f"kind {kind} came from the coordinator", suspect=self.coordinator)
        if outcome > row.outcome_max or disposition > row.disposition_max:
            raise _Violation(
                FaultCode.PROTOCOL,
                f"{Kind(kind).name} with outcome {outcome}, disposition {disposition}",
                suspect=self.coordinator,
            )
        if kind >= _ADVICE:
            self._domain_decision(record)
            return
        if reason > REASON_MAX:
            raise _Violation(FaultCode.PROTOCOL, f"unknown reason {reason}", suspect=self.coordinator)
        round_ = self.rounds.get(incarnation)
        if round_ is None:
            if 1 <= incarnation <= self.heard:
                self.stale += 1
                return
            if kind != _ABORT:
                raise _Violation(
                    FaultCode.PROTOCOL,
                    f"{Kind(kind).name} for incarnation {incarnation}, which this rank never heard of",
                    suspect=self.coordinator,
                )
            round_ = self._unheard(self.coordinator, request_id, incarnation)
            if round_ is None:
                return
        if kind == _REASONS:
            round_.reasons |= request_id << (64 * outcome)
            return
        if round_.request_id != request_id:
            raise _Violation(
                FaultCode.PROTOCOL,
                f"{Kind(kind).name} calls incarnation {incarnation} request {request_id}, not {round_.request_id}",
                round_,
                self.coordinator,
            )
        if round_.blocked:
            self._impossible(round_, kind, "before an older round was decided here")
        if kind == _COMMIT:
            self._commit(round_, outcome, disposition)
            return
        if attempt != round_.attempt:
            if attempt < round_.attempt:
                self.stale += 1
                return
            self._impossible(round_, kind, f"for attempt {attempt} during {round_.attempt}")
        if kind == _FINALIZE:
            self._finalized(round_, MODES[outcome], reason)
            return
        before = round_.ready
        after = READY_NEXT[before][_MEMBER_INPUT[kind]]
        if after is None or (kind == _RELEASE and not self.is_scheduler):
            self._impossible(round_, kind, f"in {before.name}")
        round_.ready = after
        self._note(round_, Kind(kind).name, self.coordinator)
        key = Key(request_id, incarnation, attempt)
        if kind == _ABORT:
            round_.aborted_for = reason
            round_.leased_at_s = None
            self._lease_timers.pop(incarnation, None)
            if round_.heard:
                self._emit(ev.Aborted(key, REASONS[reason]))
        elif after is before:  # swallowed: PREPARE after a withdrawal, RELEASE after a revocation
            self.ignored += 1
        elif kind == _PREPARE:
            self._emit(ev.Prepared(key))
        elif kind == _RELEASE:
            self._emit(ev.Released(key))
        else:
            self._measure(round_.leased_at_s)
            self._emit(ev.Completed(key))

    def _impossible(self, round_: Round, kind: int, where: str) -> NoReturn:
        raise _Violation(FaultCode.PROTOCOL, f"{Kind(kind).name} {where}", round_, self.coordinator)

    def _finalized(self, round_: Round, mode: FinalizeMode, reason: int) -> None:
        reopened = mode is FinalizeMode.REOPEN
        after = READY_NEXT[round_.ready][ReadyInput.FINALIZE_REOPEN if reopened else ReadyInput.FINALIZE_LAST]
        if after is None:
            self._impossible(round_, _FINALIZE, f"in {round_.ready.name}")
        key = Key(round_.request_id, round_.incarnation, round_.attempt)
        if mode is FinalizeMode.CLOSED:
            closed = TERMINAL_NEXT[round_.terminal][TerminalInput.CLOSE]
            if closed is None:
                self._impossible(round_, _FINALIZE, f"CLOSED although this rank is {round_.terminal.name}")
            round_.terminal = closed
        round_.ready = after
        self._note(round_, f"FINALIZE {mode.name}", self.coordinator)
        self._emit(ev.Finalized(key, mode, REASONS[reason]))
        round_.own_reason = 0
        round_.aborted_for = 0
        round_.advised = False
        if mode is FinalizeMode.CLOSED:
            self.closed_rounds += 1
            self._digest_final(round_, 0xC0, 0)
            self._retire(round_)
        elif reopened:
            round_.attempt += 1
            intent, wanted = round_.next_intent, round_.next_reason
            round_.next_intent, round_.next_reason = NEXT_NOTHING, 0
            if self.drain_last is not None and self.is_scheduler:
                self._end_unscheduled(round_)
            elif intent == NEXT_PUBLISH:
                self._vote_ready(round_)
            elif intent == NEXT_WITHDRAW:
                self._withdraw(round_, wanted)

    def _commit(self, round_: Round, outcome: int, disposition: int) -> None:
        after = TERMINAL_NEXT[round_.terminal][TerminalInput.COMMIT]
        if after is None or round_.ready not in TERMINAL_ALLOWED_IN or round_.ready is ReadyState.ACTIVATED:
            self._impossible(round_, _COMMIT, f"in {round_.terminal.name}, {round_.ready.name}")
        if outcome < round_.outcome or disposition < round_.disposition or (disposition and not outcome):
            self._impossible(round_, _COMMIT, f"{OUTCOMES[outcome].name} against this rank's {round_.outcome}")
        round_.terminal = after
        self._note(round_, "COMMIT", self.coordinator)
        packed = round_.reasons
        reasons = (
            tuple(REASONS[min((packed >> (8 * i)) & 0xFF, REASON_MAX)] for i in range(self.size))
            if packed
            else ((REASONS[0],) * self.size)
        )
        self._measure(round_.voted_at_s)
        self.committed += 1
        self.outcome_counts[outcome] += 1
        self._digest_final(round_, outcome, disposition)
        self._emit(
            ev.Committed(
                Key(round_.request_id, round_.incarnation, round_.attempt),
                OUTCOMES[outcome],
                DISPOSITIONS[disposition],
                reasons,
            )
        )
        self._retire(round_)
        if disposition:
            self.quarantined += 1
            if self.quarantined > self.config.quarantine_rounds_max:
                raise _Violation(FaultCode.QUARANTINE_BUDGET, f"{self.quarantined} rounds are in quarantine", round_)

    def _digest_final(self, round_: Round, outcome: int, disposition: int) -> None:
        self.digest = blake2b(
            self.digest
            + _FINAL_PACK(round_.request_id, round_.incarnation, round_.attempt, outcome, disposition, 0, 0),
            digest_size=16,
        ).digest()

    def _domain_decision(self, record: Record) -> None:
        kind, outcome, disposition, reason, attempt, request_id, incarnation = record
        if kind == _ADVICE:
            if not self.is_scheduler or outcome >= self.size or reason > REASON_MAX:
                raise _Violation(FaultCode.PROTOCOL, "advice for another rank", suspect=self.coordinator)
            round_ = self.rounds.get(incarnation)
            if round_ is not None:
                if round_.request_id != request_id or attempt > round_.attempt:
                    self._impossible(round_, kind, f"for request {request_id}, attempt {attempt}")
                key = Key(request_id, incarnation, attempt)
                self._emit(ev.Advice(key, AdviceKind(disposition), self._name(outcome), REASONS[reason]))
            else:
                self.stale += 1
        elif kind == _DRAIN_ALL:
            known = max(self.heard, max(self.rounds, default=0))
            if (self.drain_last is not None and self.drain_last != incarnation) or known > incarnation:
                raise _Violation(
                    FaultCode.DRAIN_MISMATCH,
                    f"drain at {incarnation}; here {known} is the last one known and it was declared at {self.drain_last}",
                )
            if self.drain_told:
                self.duplicates += 1
                return
            if self.is_scheduler and self.drain_last is None:
                raise _Violation(
                    FaultCode.DRAIN_MISMATCH, "a drain that this rank never began", suspect=self.coordinator
                )
            self.drain_told = True
            self.drain_last = incarnation
            self._emit(ev.DrainStarted(incarnation))
        elif kind == _DRAIN_STATUS:
            self.report_mask |= request_id & self.all_mask
        elif kind == _DRAINED:
            if (
                not self.reported
                or incarnation != self.heard
                or request_id != int.from_bytes(self.digest[:8], "little")
            ):
                raise _Violation(FaultCode.DRAIN_MISMATCH, f"drained at {incarnation} without this rank's report")
            if self.drained:
                self.duplicates += 1
                return
            self.report_mask = self.all_mask
            self.drained = True
            self._emit(ev.Drained(incarnation, self.digest.hex()))
        elif kind == _CLOSE_ACK:
            if not self.closing:
                raise _Violation(FaultCode.PROTOCOL, "closed without this rank", suspect=self.coordinator)
            self.closed = True
        elif kind == _VERDICT:
            if outcome >= self.size:
                raise _Violation(FaultCode.PROTOCOL, "verdict about no member", suspect=self.coordinator)
            if outcome != self.me:
                observer = self._name(self.coordinator)
                if disposition:
                    self._emit(ev.SilenceEnded(observer, self._name(outcome)))
                else:
                    self._emit(ev.SilenceVerdict(observer, self._name(outcome), attempt / 1000))
        else:
            self._failed_elsewhere(self.coordinator, record)

    def _failed_elsewhere(self, source: int, record: Record) -> NoReturn:
        _kind, origin, suspect, code, _attempt, _request_id, _incarnation = record
        if code not in FaultCode._value2member_map_ or origin >= self.size or suspect > self.size:
            raise _Violation(
                FaultCode.PROTOCOL, f"rank {self._name(source)} sent a malformed FAIL_STOP", suspect=source
            )
        raise _Elsewhere(FaultCode(code), origin, suspect - 1 if suspect else None)

    # -- queues -----------------------------------------------------------------------------------------------------

    def _say(
        self, round_: Round, slot: int, kind: int, outcome: int = 0, disposition: int = 0, reason: int = 0
    ) -> None:
        record = (kind, outcome, disposition, reason, round_.attempt, round_.request_id, round_.incarnation)
        if round_.held is not None:
            kept = [(s, r) for s, r in round_.held if s != slot]
            kept.append((slot, record))
            round_.held = kept
        else:
            self._queue_up(slot, record)

    def _queue_up(self, slot: int, record: Record) -> None:
        if self.is_coordinator and not self.replicated:
            self._local.append((True, record))
            return
        place = (slot, record[6])
        older = self.intents.get(place)
        if older is not None and slot == _READY_SLOT and older[0] not in REPLACES[Kind(record[0])]:
            raise _Violation(
                FaultCode.INTERNAL, f"{Kind(record[0]).name} would replace an unsent {Kind(older[0]).name}"
            )
        self.intents[place] = record
        if len(self.intents) > self.queue_max:
            self.queue_max = len(self.intents)

    def _control(self, kind: int, *, request_id: int = 0, incarnation: int = 0) -> None:
        record = (kind, 0, 0, 0, 0, request_id, incarnation)
        if self.is_coordinator and not self.replicated:
            self._local.append((True, record))
        else:
            self.intents[(_CONTROL_SLOT + kind, 0)] = record

    def wants_slot(self, peer: int, now_s: float) -> bool:
        """Whether ``SlotFreed(peer, 0)`` would send something now."""
        waiting: object = self.queues[peer] if self.is_coordinator and not self.replicated else self.intents
        if waiting or peer in self.busy_pending:
            return True
        return self._heartbeat_due(peer, now_s)

    def _heartbeat_due(self, peer: int, now_s: float) -> bool:
        if self.fault is not None or self.closed or peer == EXCHANGE or (self.closing and not self.is_coordinator):
            return False
        since_s = now_s - self.last_sent_s[peer]
        return since_s >= self.config.heartbeat_s or since_s < 0  # a clock that went back must not mute this rank

    def _on_slot_freed(self, event: ev.SlotFreed) -> None:
        peer = event.peer
        limit = self.config.records_per_frame_max
        records: tuple[Record, ...]
        if self.is_coordinator and not self.replicated:
            queue = self.queues[peer]
            if len(queue) > self.queue_max:
                self.queue_max = len(queue)
                if len(queue) > self.config.queue_records_max:
                    raise _Violation(FaultCode.INTERNAL, f"{len(queue)} records wait for rank {self._name(peer)}")
            if len(queue) <= limit:
                records = tuple(queue)
                queue.clear()
            else:
                records = tuple(queue[:limit])
                del queue[:limit]
        elif len(self.intents) <= limit:
            records = tuple(self.intents.values())
            self.intents.clear()
        else:
            places = list(self.intents)[:limit]
            records = tuple(self.intents.pop(place) for place in places)
        busy_ms = self.busy_pending.pop(peer, 0)
        if not records and not busy_ms:
            if event.outstanding or not self._heartbeat_due(peer, self._now):
                return
            self.heartbeats_sent += 1
        kinds = self.sent_kinds
        for record in records:
            kinds[record[0]] += 1
        sequence = self.next_sequence[peer]
        self.next_sequence[peer] = sequence + 1
        self.last_sent_s[peer] = self._now
        self.frames_sent += 1
        self._fx.append(SendFrame(peer, Frame(sequence, busy_ms, records)))

    # -- from the transport -----------------------------------------------------------------------------------------

    def _on_frame(self, event: ev.FrameReceived) -> None:
        peer, frame = event.peer, event.frame
        if peer not in self.peers:
            raise _Violation(
                FaultCode.PROTOCOL, f"a frame from rank {self._name(peer)}, which is not spoken to", suspect=peer
            )
        sequence = frame.sequence
        if sequence != self.expected[peer]:
            if sequence < self.expected[peer]:
                self.duplicates += 1
                return
            raise _Violation(
                FaultCode.SEQUENCE,
                f"frame {sequence} of rank {self._name(peer)} came where {self.expected[peer]} was due",
                suspect=peer,
            )
        self.expected[peer] = sequence + 1
        self.frames_received += 1
        self.silent_s[peer] = 0.0
        self.busy_s[peer] = min(frame.busy_ms / 1000, self.config.busy_max_s)
        bit = 1 << peer
        self.spoken |= bit
        self.received_mask |= bit
        if self.suspects & bit:
            self._clear_suspect(peer, bit)
        kinds = self.received_kinds
        local = self._local
        upward = self.is_coordinator
        for record in frame.records:
            if record[0] < 128:
                kinds[record[0]] += 1
            if upward:
                self._from_member(peer, record)
            else:
                self._from_coordinator(record)
            if local:
                self._deliver_local()

    def _on_exchange(self, event: ev.ExchangeCompleted) -> None:
        if len(event.contributions) != self.size:
            raise _Violation(FaultCode.PROTOCOL, f"an exchange of {len(event.contributions)} contributions")
        for member, records in enumerate(event.contributions):
            if records is None:
                raise _Violation(FaultCode.POISON, f"rank {self._name(member)} failed in the exchange", suspect=member)
            for record in records:
                if record[0] < 128:
                    self.received_kinds[record[0]] += 1
                self._from_member(member, record)
                self._deliver_local()

    def _on_rejected(self, event: ev.FrameRejected) -> None:
        raise _Violation(FaultCode.BAD_FRAME, event.detail, suspect=event.peer)

    def _on_send_failed(self, event: ev.SendFailed) -> None:
        raise _Violation(FaultCode.TRANSPORT, f"to rank {self._name(event.peer)}: {event.detail}", suspect=event.peer)

    def _on_peer_died(self, event: ev.PeerDied) -> None:
        if self.closed or event.peer == self.me:
            return  # after the last handshake everybody may leave
        if self.closing and not self.replicated and event.peer not in self.peers:
            return  # it may have left by the handshake that is still on its way here; the coordinator knows
        self._emit(ev.DeathVerdict(self.rank, self._name(event.peer), event.evidence))
        raise _Violation(FaultCode.DEATH, f"rank {self._name(event.peer)} died: {event.evidence}", suspect=event.peer)

    def _on_sweep(self, event: ev.SweepCompleted) -> None:
        now_s, config = self._now, self.config
        since_s = 0.0 if self.last_sweep_s is None else min(max(0.0, now_s - self.last_sweep_s), config.heartbeat_s)
        self.last_sweep_s = now_s
        received, self.received_mask = self.received_mask, 0
        if not self.closing and not self.closed:
            for peer in self.peers:
                bit = 1 << peer
                # Silence is judged only where this sweep looked and found nothing.
                if received & bit or not event.empty & bit or self.close_mask & bit:
                    continue
                self.silent_s[peer] += since_s
                limit_s = config.silence_s if self.spoken & bit else config.startup_s
                if self.silent_s[peer] >= limit_s + self.busy_s[peer] and not self.suspects & bit:
                    self.suspects |= bit
                    self._emit(ev.SilenceVerdict(self.rank, self._name(peer), self.silent_s[peer]))
                    if self.is_coordinator:
                        self._spread_verdict(peer, 0)
        self._run_timers(now_s)

    def _clear_suspect(self, peer: int, bit: int) -> None:
        self.suspects &= ~bit
        self._emit(ev.SilenceEnded(self.rank, self._name(peer)))
        if self.is_coordinator:
            self._spread_verdict(peer, 1)

    def _spread_verdict(self, suspect: int, ended: int) -> None:
        milliseconds = min(int(self.silent_s[suspect] * 1000), 2**32 - 1)
        for peer, queue in self.queues.items():
            if peer == suspect:
                continue
            unsent = next((r for r in queue if r[0] == _VERDICT and r[1] == suspect), None)
            if unsent is not None:  # the opposite, not told yet: neither needs telling, and the queue stays bounded
                queue.remove(unsent)
            else:
                queue.append((_VERDICT, suspect, ended, 0, milliseconds, 0, 0))

    def _run_timers(self, now_s: float) -> None:
        for incarnation in _due(self._doubt_timers, now_s):
            round_ = self.rounds[incarnation]
            round_.doubt_expired = True
            self._emit(ev.DoubtExpired(Key(round_.request_id, incarnation, round_.attempt)))
        for incarnation in _due(self._lease_timers, now_s):
            round_ = self.rounds[incarnation]
            if round_.ready in (ReadyState.LEASED, ReadyState.RELEASED):
                self._revoke_unasked(round_, Reason.LEASE_EXPIRED)
        for incarnation in _due(self._idle_timers, now_s):
            round_ = self.rounds[incarnation]
            raise _Violation(
                FaultCode.ROUND_TIMEOUT,
                f"no progress for {self.config.round_timeout_s} s: {self._waiting_for(round_)}",
                round_,
            )

    def _waiting_for(self, round_: Round) -> str:
        if not self.is_coordinator:
            return f"{round_.ready.name}, {round_.terminal.name}; who is missing is unknown at this rank"
        done, what = self._progress(round_)
        missing = [str(r) for i, r in enumerate(self.domain.ranks) if not done >> i & 1]
        return f"{what} of rank {', '.join(missing) or 'none'} missing"

    def _progress(self, round_: Round) -> tuple[int, str]:
        if round_.phase is Phase.ABORTING:
            return round_.abort_acks, "READY abort acknowledgement"
        if round_.phase is Phase.GRANTING:
            return round_.acks, "READY acknowledgement"
        if round_.phase is Phase.RELEASED:
            return round_.activated, "READY activation"
        if round_.phase is Phase.GATHERING and round_.votes:
            return round_.votes, "READY vote"
        return round_.terminal_mask, "TERMINAL vote"

    # -- failing ----------------------------------------------------------------------------------------------------

    def _stop(self, violation: _Violation) -> None:
        """Fail closed: keep the first diagnosis, suppress what no longer binds, tell the others, decide nothing more."""
        if isinstance(violation, _Elsewhere):
            origin, suspect = violation.origin, violation.suspect
            detail = f"rank {self._name(origin)} reported {violation.code.name}"
        else:
            origin, suspect, detail = self.me, violation.suspect, violation.detail
        round_ = violation.round
        key = None if round_ is None else Key(round_.request_id, round_.incarnation, round_.attempt)
        self._fx[:] = [e for e in self._fx if isinstance(e, (SURVIVES_FAULT, SendFrame, Answer))]
        if isinstance(violation, _Elsewhere) and violation.code is FaultCode.DEATH and suspect is not None:
            self._emit(ev.DeathVerdict(self._name(origin), self._name(suspect), "reported"))
        self.fault = Fault(
            violation.code,
            detail,
            self._name(origin),
            None if suspect is None else self._name(suspect),
            key,
            self._tell(round_) if round_ is not None else (),
        )
        self._emit(self.fault)
        self._local.clear()
        self.intents.clear()
        record = (_FAIL_STOP, origin, 0 if suspect is None else suspect + 1, int(violation.code), 0, 0, 0)
        if self.replicated:
            self.intents[(_CONTROL_SLOT + _FAIL_STOP, 0)] = record
        elif self.is_coordinator:
            for queue in self.queues.values():
                queue[:] = [r for r in queue if r[0] in _FINAL_KINDS]
                queue.append(record)
        elif not isinstance(violation, _Elsewhere):
            self.intents[(_CONTROL_SLOT + _FAIL_STOP, 0)] = record

    def _known(self, kind: type[IntEnum], value: object) -> int:
        """The number of an enumeration's member; anything else would be found only on the wire."""
        if type(value) is not kind:
            self._refuse(f"{value!r} is no {kind.__name__}")
        return int(value)

    def _refuse(self, message: str, key: Key | None = None, round_: Round | None = None) -> NoReturn:
        raise LocalProtocolError(
            message,
            rank=self.rank,
            key=key,
            state="not open" if round_ is None else f"{round_.ready.name}, {round_.terminal.name}",
            story=() if round_ is None else self._tell(round_),
        )

    def _name(self, member: int) -> int:
        return self.domain.ranks[member]

    # -- stories and timers -----------------------------------------------------------------------------------------

    def _note(self, round_: Round, what: str, source: int) -> None:
        """Progress of a round: a line of its story, and its idle timer starts anew."""
        limit = self.config.story_entries_max
        if limit:
            story = round_.story
            if len(story) >= limit:
                del story[min(4, limit - 1)]
            story.append((self._now, what, source))
        timeout_s = self.config.round_timeout_s
        if timeout_s is not None:
            timers = self._idle_timers
            timers.pop(round_.incarnation, None)
            if self._is_waiting(round_):
                timers[round_.incarnation] = self._now + timeout_s

    def _is_waiting(self, round_: Round) -> bool:
        """Whether others owe this round something; a lease that waits for its schedule is exempt."""
        if round_.terminal is TerminalState.VOTED:
            return True
        if self.is_coordinator:
            phase = round_.phase
            if phase is Phase.RELEASED:
                return round_.activated != 0
            if phase in (Phase.GRANTING, Phase.ABORTING) or round_.terminal_mask or round_.votes:
                return phase is not Phase.COMPLETE or round_.terminal_mask != 0
        ready = round_.ready
        return ready in READY_OPEN and ready not in (ReadyState.LEASED, ReadyState.RELEASED)

    def _tell(self, round_: Round) -> tuple[str, ...]:
        return tuple(f"{at_s:.6f} {what} (rank {self._name(source)})" for at_s, what, source in round_.story)

    def story(self, incarnation: int) -> tuple[str, ...]:
        """What happened to an open round, oldest first; empty when it is not open here."""
        round_ = self.rounds.get(incarnation)
        return () if round_ is None else self._tell(round_)

    def state(self, incarnation: int) -> RoundState | None:
        """This rank's view of an open round; None when it is not open here."""
        round_ = self.rounds.get(incarnation)
        if round_ is None:
            return None
        voted = round_.terminal >= TerminalState.VOTED
        return RoundState(
            round_.ready,
            round_.terminal,
            round_.attempt,
            round_.heard,
            OUTCOMES[round_.outcome] if voted else None,
            DISPOSITIONS[round_.disposition] if voted else None,
        )

    def undecided(self) -> tuple[Key, ...]:
        """Keys of all rounds open here, oldest first."""
        return tuple(Key(r.request_id, r.incarnation, r.attempt) for _i, r in sorted(self.rounds.items()))

    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks whose drain report is not known here."""
        mask = self.report_mask | (1 << self.me if self.reported else 0)
        return tuple(r for i, r in enumerate(self.domain.ranks) if not mask >> i & 1)

    def _measure(self, since_s: float | None) -> None:
        if since_s is None:
            return
        latency_s = self._now - since_s
        if latency_s < 0:
            latency_s = 0.0
        self.latency_count += 1
        self.latency_sum_s += latency_s
        if latency_s > self.latency_max_s:
            self.latency_max_s = latency_s
        self.latency_buckets[min(int(latency_s * 1e6).bit_length(), LATENCY_BUCKETS - 1)] += 1

    def statistics(self) -> CoreStatistics:
        """Counters since construction."""
        return CoreStatistics(
            admitted=self.heard,
            committed=self.committed,
            closed=self.closed_rounds,
            open_rounds=self.open_count,
            open_rounds_max=self.open_max,
            queue_records_max=self.queue_max,
            stale=self.stale,
            duplicates=self.duplicates,
            ignored=self.ignored,
            frames_received=self.frames_received,
            frames_sent=self.frames_sent,
            heartbeats_sent=self.heartbeats_sent,
            records_sent=_by_kind(self.sent_kinds),
            records_received=_by_kind(self.received_kinds),
            events=tuple(sorted(self.event_counts.items())),
            outcomes=(self.outcome_counts[0], self.outcome_counts[1], self.outcome_counts[2]),
            quarantined=self.quarantined,
            activated=self.activated_count,
            digest=self.digest.hex(),
            activation_digest=self.activation_digest.hex(),
            latency_count=self.latency_count,
            latency_sum_s=self.latency_sum_s,
            latency_max_s=self.latency_max_s,
            latency_buckets=tuple(self.latency_buckets),
        )

    # -- checking ---------------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Check every invariant that one rank can see.

        Raises:
            InvariantViolation: One does not hold, with the round's story.
        """
        credits = self.config.credits
        opened = sum(not r.blocked for r in self.rounds.values())
        self._require(opened == self.open_count, "S16: open rounds are miscounted")
        self._require(self.open_count <= credits, "R2: more open rounds than credits")
        self._require(len(self.blocked) <= credits, "S16: more held rounds than credits")
        heard_open = sum(r.heard for r in self.rounds.values())
        self._require(self.committed + self.closed_rounds + heard_open == self.heard, "R10: an admission was lost")
        self._require(not (self.drained and self.rounds), "R10: drained with open rounds")
        self._require(not (self.reported and self.rounds), "R10: reported with open rounds")
        self._require(not self._local, "R3: the local queue outlived a step")
        self._require(len(self.intents) <= 4 * credits + 16, "S16: too many unsent records")
        for queue in self.queues.values():
            self._require(len(queue) <= self.config.queue_records_max, "S16: a destination's queue is too long")
        for incarnation, round_ in self.rounds.items():
            self._validate_round(incarnation, round_)

    def _validate_round(self, incarnation: int, round_: Round) -> None:
        need = self._require
        full = self.all_mask
        need(round_.incarnation == incarnation <= self.heard + self.config.credits, "R1: outside the window", round_)
        need(incarnation in self.by_request.get(round_.request_id, ()), "the index lost a round", round_)
        need(
            round_.heard or round_.ready in (ReadyState.IDLE, ReadyState.ABORTING),
            "R1: state before the broadcast",
            round_,
        )
        need(round_.heard or round_.terminal is TerminalState.OPEN, "R1: a vote before the broadcast", round_)
        need((round_.ready is ReadyState.NOT_USED) == (not round_.uses_ready), "R1: NOT_USED", round_)
        need(
            self.is_scheduler or round_.ready not in (ReadyState.RELEASED, ReadyState.REVOKED),
            "S6: RELEASE elsewhere",
            round_,
        )
        voted = round_.terminal >= TerminalState.VOTED
        need(
            not voted
            or round_.ready in TERMINAL_ALLOWED_IN
            or round_.ready in (ReadyState.ABORTING, ReadyState.ABORT_ACKED),
            "S21: terminal vote beside an open readiness attempt",
            round_,
        )
        need(not (voted and round_.disposition and not round_.outcome), "R9: COMPLETED with QUARANTINE", round_)
        need((round_.held is not None) == round_.blocked, "records are held without need", round_)
        if not self.is_coordinator:
            return
        phase = round_.phase
        need(round_.acks & ~round_.votes == 0, "S6: an ACK without a vote", round_)
        need(round_.activated & ~round_.acks == 0, "S7: an activation without a lease", round_)
        need(
            phase not in (Phase.GRANTING, Phase.RELEASED, Phase.COMPLETE) or round_.votes == full, "S5: PREPARE", round_
        )
        need(phase not in (Phase.RELEASED, Phase.COMPLETE) or round_.acks == full, "S6: RELEASE", round_)
        need(phase is not Phase.COMPLETE or round_.activated == full, "S8: COMPLETE", round_)
        need(phase is not Phase.ABORTING or not round_.activated, "S6: ABORT after an activation", round_)
        need(
            round_.terminal_mask == sum(1 << m for m in round_.terminal_votes or ()), "S2: votes are miscounted", round_
        )
        if not self.replicated and round_.attempt == round_.phase_attempt and phase is not Phase.FINAL:
            bit = 1 << self.me
            need(
                bool(round_.acks & bit)
                == (round_.ready in (ReadyState.LEASED, ReadyState.RELEASED, ReadyState.ACTIVATED, ReadyState.COMPLETE))
                or phase is Phase.ABORTING
                or round_.ready is ReadyState.REVOKED,
                "S10: this rank's lease and its own coordinator disagree",
                round_,
            )

    def _require(self, holds: bool, what: str, round_: Round | None = None) -> None:
        if not holds:
            story = "" if round_ is None else "\n  " + "\n  ".join(self._tell(round_))
            raise InvariantViolation(f"rank {self.rank}: {what}{story}")

    def copy(self) -> AgreementCore:
        """An independent copy, for explorers."""
        twin = AgreementCore.__new__(type(self))
        state = self.__dict__
        mine = dict(state)
        mine["rounds"] = {i: r.copy() for i, r in state["rounds"].items()}
        mine["by_request"] = {i: list(v) for i, v in state["by_request"].items()}
        mine["queues"] = {i: list(v) for i, v in state["queues"].items()}
        mine["_local"] = deque(state["_local"])
        for name in _COPIED:
            value = state[name]
            mine[name] = value.copy()
        mine["_fx"] = []
        twin.__dict__.update(mine)
        return twin

    def fingerprint(self, *, digests: bool = True) -> tuple[object, ...]:
        """All that decides the future, without times, counters and stories; equal fingerprints behave alike."""
        fault = self.fault
        return (
            self.heard, self.open_count, tuple(self.blocked), self.committed, self.closed_rounds, self.quarantined,
            tuple([r.fingerprint() for _i, r in sorted(self.rounds.items())]),
            tuple(sorted(self.intents.items())), tuple([tuple(q) for q in self.queues.values()]),
            None if fault is None else (fault.code, fault.rank, fault.suspect_rank),
            self.drain_last, self.drain_authored, self.reported, self.report_mask, tuple(sorted(self.reports.items())),
            self.drained, self.closing, self.close_mask, self.closed, self.drain_told,
            (self.digest, self.activation_digest) if digests else (),
        )  # fmt: skip


class _Elsewhere(_Violation):
    """Another rank stopped the domain."""

    def __init__(self, code: FaultCode, origin: int, suspect: int | None) -> None:
        super().__init__(code, "reported", None, suspect)
        self.origin = origin


def _due(timers: dict[int, float], now_s: float) -> Iterable[int]:
    """Take the expired ones; O(expired), because each dict is ordered by deadline."""
    expired = []
    for incarnation, deadline_s in timers.items():
        if deadline_s > now_s:
            break
        expired.append(incarnation)
    for incarnation in expired:
        del timers[incarnation]
    return expired


def _by_kind(counts: list[int]) -> tuple[tuple[str, int], ...]:
    return tuple((kind.name, counts[kind]) for kind in Kind if counts[kind])


_COPIED = (
    "blocked", "intents", "reports", "next_sequence", "expected", "last_sent_s", "silent_s", "busy_s", "busy_pending",
    "_idle_timers", "_lease_timers", "_doubt_timers", "sent_kinds", "received_kinds", "event_counts", "outcome_counts",
    "latency_buckets",
)  # fmt: skip

_HANDLERS: dict[type, Callable[[AgreementCore, Any], None]] = {
    ev.RequestAdmitted: AgreementCore._on_admitted,
    ev.ReadyPublished: AgreementCore._on_published,
    ev.WithdrawRequested: AgreementCore._on_withdraw,
    ev.PrepareAcknowledged: AgreementCore._on_prepare_acknowledged,
    ev.AbortAcknowledged: AgreementCore._on_abort_acknowledged,
    ev.ScheduleActivated: AgreementCore._on_activated,
    ev.RevokeRequested: AgreementCore._on_revoke,
    ev.RecallRequested: AgreementCore._on_recall,
    ev.TerminalVoted: AgreementCore._on_terminal_voted,
    ev.DoubtRaised: AgreementCore._on_doubt,
    ev.BusyDeclared: AgreementCore._on_busy,
    ev.DrainRequested: AgreementCore._on_drain_requested,
    ev.CloseRequested: AgreementCore._on_close_requested,
    ev.HostFailed: AgreementCore._on_host_failed,
    ev.FrameReceived: AgreementCore._on_frame,
    ev.FrameRejected: AgreementCore._on_rejected,
    ev.SweepCompleted: AgreementCore._on_sweep,
    ev.SlotFreed: AgreementCore._on_slot_freed,
    ev.SendFailed: AgreementCore._on_send_failed,
    ev.PeerDied: AgreementCore._on_peer_died,
    ev.ExchangeCompleted: AgreementCore._on_exchange,
}
_LOCAL_INPUTS = frozenset(
    {
        ev.RequestAdmitted, ev.ReadyPublished, ev.WithdrawRequested, ev.PrepareAcknowledged, ev.AbortAcknowledged,
        ev.ScheduleActivated, ev.RevokeRequested, ev.RecallRequested, ev.TerminalVoted, ev.DoubtRaised,
        ev.BusyDeclared, ev.DrainRequested, ev.CloseRequested,
    }
)  # fmt: skip
_AFTER_FAULT = frozenset({ev.SlotFreed})

__all__ = [
    "EXCHANGE",
    "REQUEST_ID_MAX",
    "AgreementCore",
    "CoreStatistics",
    "Disposition",
    "InvariantViolation",
    "Outcome",
]
