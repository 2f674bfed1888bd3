"""This rank's own half of every round: what its host calls, and what the coordinator's decisions do to it.

Every change of state is looked up in the tables of ``_state``; what a call answers about a state that it does not move is a
table as well. A call either raises with nothing changed, or is done.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import NoReturn

from pp_agreement import _events as ev
from pp_agreement._context import Context, Violation
from pp_agreement._errors import WouldBlock
from pp_agreement._events import (
    REQUEST_ID_MAX,
    Disposition,
    FaultCode,
    FinalizeMode,
    Key,
    Outcome,
    PublishResult,
    Reason,
    Record,
    RevokeResult,
    WithdrawResult,
)
from pp_agreement._round import NEXT_NOTHING, NEXT_PUBLISH, NEXT_WITHDRAW, Round
from pp_agreement._rounds import Rounds
from pp_agreement._state import (
    ACKNOWLEDGE_ANSWERS,
    DISPOSITIONS,
    FENCE,
    MEMBER_NEXT,
    MODES,
    OUTCOMES,
    PUBLISH_ANSWERS,
    READY_OPEN,
    REASON_MAX,
    REASONS,
    REVOKE_ANSWERS,
    SCHEDULER_NEXT,
    TERMINAL_NEXT,
    TRANSIENT_MAX,
    WITHDRAW_ANSWERS,
    Kind,
    ReadyInput,
    ReadyState,
    TerminalInput,
    TerminalState,
)
from pp_agreement._streams import DOUBT_SLOT, READY_SLOT, RECALL_SLOT, TERMINAL_SLOT, Streams
from pp_agreement._timers import LEASED

EMPTY_DIGEST = bytes(16)
LATENCY_BUCKETS = 40  # powers of two of a microsecond
_FINAL_PACK = struct.Struct("<QQIBBBB").pack
_KEY_PACK = struct.Struct("<QQI").pack
_CLOSED_MARK = 0xC0  # stands where a COMMIT has its outcome
_DECIDED = {
    int(Kind.PREPARE): ReadyInput.PREPARE,
    int(Kind.RELEASE): ReadyInput.RELEASE,
    int(Kind.COMPLETE): ReadyInput.COMPLETE,
    int(Kind.ABORT): ReadyInput.ABORT,
}
_SAID_WHEN_ENDING = {ReadyState.WITHDRAWN: Kind.WITHDRAW, ReadyState.REVOKED: Kind.REVOKE}
_UNLEASED = (ReadyState.IDLE, ReadyState.VOTED, ReadyState.PREPARED)
_PAST, _NOW, _NEXT = range(3)


class Member:
    """See the module."""

    def __init__(self, context: Context, streams: Streams, rounds: Rounds) -> None:
        self.context = context
        self.streams = streams
        self.rounds = rounds
        self.ready_next = SCHEDULER_NEXT if context.is_scheduler else MEMBER_NEXT
        self.committed = 0
        self.closed_rounds = 0
        self.quarantined = 0
        self.activated_count = 0
        self.digest = EMPTY_DIGEST
        self.activation_digest = EMPTY_DIGEST
        self.outcome_counts = [0, 0, 0]
        self.ignored = 0
        self.latency_count = 0
        self.latency_sum_s = 0.0
        self.latency_max_s = 0.0
        self.latency_buckets = [0] * LATENCY_BUCKETS

    # -- moving -----------------------------------------------------------------------------------------------------

    def _can(self, round_: Round, given: ReadyInput) -> bool:
        return self.ready_next[round_.own.ready][given] is not None

    def _move(self, round_: Round, given: ReadyInput) -> None:
        after = self.ready_next[round_.own.ready][given]
        if after is None:
            raise Violation(FaultCode.INTERNAL, f"{given.name} in {round_.own.ready.name}", round_)
        round_.own.ready = after

    def _move_terminal(self, round_: Round, given: TerminalInput) -> bool:
        """False: the table or the fence forbids it, and nothing has changed."""
        own = round_.own
        after = TERMINAL_NEXT[own.terminal][given]
        if after is None or own.ready not in FENCE[given]:
            return False
        own.terminal = after
        return True

    # -- admission --------------------------------------------------------------------------------------------------

    def admit(self, request_id: int, incarnation: int, ready: bool) -> Round:
        """The authoritative broadcast named a request."""
        context, rounds = self.context, self.rounds
        known = self._check_admission(request_id, incarnation, ready)
        if known is not None and known.heard:
            context.answer(_key(known))
            return known
        if known is None:
            if len(rounds.blocked) >= context.config.credits:
                context.refuse("the authority spent more credits than there are", Key(request_id, incarnation))
            waits = request_id in rounds.by_request or rounds.open_count >= context.config.credits
            known = rounds.new(request_id, incarnation, blocked=waits)
        known.heard = True
        known.uses_ready = ready
        if not ready:
            self._move(known, ReadyInput.NOT_USED)
        rounds.heard = incarnation
        rounds.note(known, "admitted", context.me)
        context.answer(_key(known))
        return known

    def _check_admission(self, request_id: int, incarnation: int, ready: bool) -> Round | None:
        """The round that peers have opened already, or that was admitted before in the same words."""
        context, rounds = self.context, self.rounds
        key = Key(request_id, incarnation)
        if type(request_id) is not int or not 0 <= request_id <= REQUEST_ID_MAX:
            context.refuse(f"request_id {request_id!r} is not an integer in 0..2**63-1")
        if type(incarnation) is not int or incarnation < 1:
            context.refuse(f"incarnation {incarnation!r} is not an integer >= 1")
        if type(ready) is not bool:
            context.refuse(f"ready={ready!r} is neither True nor False")
        known = rounds.open.get(incarnation)
        if incarnation <= rounds.heard:
            if known is not None and known.request_id == request_id and known.uses_ready == ready:
                return known
            context.refuse(
                f"incarnation {incarnation} was admitted before, as another request or decided since", key, known
            )
        if incarnation != rounds.heard + 1:
            context.refuse(f"incarnation {incarnation} after {rounds.heard}: the broadcast order has no gaps", key)
        if rounds.last is not None and incarnation > rounds.last:
            if context.is_scheduler:
                context.refuse(f"admission after the drain at {rounds.last}", key)
            # The broadcast and the drain contradict each other: refusing alone would leave the others waiting.
            raise Violation(FaultCode.DRAIN_MISMATCH, f"admission {incarnation} after the drain at {rounds.last}")
        if context.is_scheduler:
            others = rounds.by_request.get(request_id)
            if others:
                context.refuse(f"request is still undecided as incarnation {others[0]}", key, rounds.open[others[0]])
            if rounds.open_count >= context.config.credits:
                raise WouldBlock(f"all {context.config.credits} credits are spent")
        if known is not None:
            tally = known.tally
            used = known.own.ready is not ReadyState.IDLE or (tally is not None and tally.votes | tally.withdrawn)
            if known.request_id != request_id or (used and not ready):
                raise Violation(
                    FaultCode.BROADCAST_MISMATCH,
                    f"broadcast says request {request_id}, ready={ready}; peers spoke of request {known.request_id}",
                    known,
                )
        return known

    def _round_of(self, key: Key) -> Round | None:
        """The open round of ``key``; None when it is decided here. Refuses what was never admitted here."""
        refuse = self.context.refuse
        if type(key) is not Key:
            refuse(f"{key!r} is not a Key")
        if type(key.incarnation) is not int or type(key.attempt) is not int or key.attempt < 0:
            refuse(f"{key!r} holds something else than counts")
        round_ = self.rounds.open.get(key.incarnation)
        if round_ is None:
            if key.incarnation > self.rounds.heard or key.incarnation < 1:
                refuse("unknown incarnation: not admitted here", key)
            return None
        if not round_.heard:
            refuse("not admitted here yet", key, round_)
        if round_.request_id != key.request_id:
            refuse(f"the incarnation belongs to request {round_.request_id}", key, round_)
        return round_

    def _attempt_of(self, key: Key, round_: Round) -> int:
        """Whether the key's attempt is over, runs, or is the next one after an open one. Refuses any other."""
        distance = key.attempt - round_.own.attempt
        if distance == 0:
            return _NOW
        if distance < 0:
            return _PAST
        if distance > 1:
            self.context.refuse("no such attempt", key, round_)
        if round_.own.ready is ReadyState.IDLE:
            self.context.refuse("the attempt before this one is not over", key, round_)
        return _NEXT if round_.own.ready in READY_OPEN else _PAST

    # -- readiness: the host's calls --------------------------------------------------------------------------------

    def publish(self, event: ev.ReadyPublished) -> None:
        """The host is ready for an attempt."""
        key, context = event.key, self.context
        round_ = self._round_of(key)
        if round_ is None:
            context.answer(PublishResult.FINAL)
            return
        if not round_.uses_ready:
            context.refuse("readiness is not used by this admission", key, round_)
        own = round_.own
        if own.terminal >= TerminalState.VOTED:
            context.refuse("readiness after this rank's terminal vote", key, round_)
        when = self._attempt_of(key, round_)
        if when is _PAST:
            answer = PublishResult.FINAL
        elif when is _NEXT:
            answer = PublishResult.DEFERRED
            if own.next_intent != NEXT_WITHDRAW:  # what was promised to end stays so
                own.next_intent = NEXT_PUBLISH
        else:
            answer = PUBLISH_ANSWERS[own.ready]
            if self._can(round_, ReadyInput.PUBLISH):
                self._vote_ready(round_)
                if round_.blocked:
                    answer = PublishResult.DEFERRED
        context.answer(answer)

    def _vote_ready(self, round_: Round) -> None:
        self._move(round_, ReadyInput.PUBLISH)
        self.rounds.note(round_, "vote", self.context.me)
        self.streams.say(round_, READY_SLOT, Kind.VOTE)

    def withdraw(self, event: ev.WithdrawRequested) -> None:
        """The host takes its readiness back, or refuses it."""
        key, context = event.key, self.context
        reason = context.known(Reason, event.reason)
        round_ = self._round_of(key)
        if round_ is None or key.attempt < round_.own.attempt:
            context.answer(WithdrawResult.FINAL)
            return
        own = round_.own
        answer = WITHDRAW_ANSWERS[own.ready]
        if own.ready is not ReadyState.NOT_USED:
            when = self._attempt_of(key, round_)
            if when is _PAST:
                answer = WithdrawResult.FINAL
            elif when is _NEXT:
                answer = WithdrawResult.WILL_ABORT
                self._end_next(round_, reason)
            elif own.ready is ReadyState.IDLE and own.terminal >= TerminalState.VOTED:
                answer = WithdrawResult.TERMINAL
            elif self._can(round_, ReadyInput.WITHDRAW):
                self.end(round_, ReadyInput.WITHDRAW, reason)
        context.answer(answer)

    def revoke(self, event: ev.RevokeRequested) -> None:
        """The scheduling rank's host will not schedule a leased request."""
        key, context = event.key, self.context
        if not context.is_scheduler:
            context.refuse("only the scheduling rank revokes", key if type(key) is Key else None)
        reason = context.known(Reason, event.reason)
        round_ = self._round_of(key)
        if round_ is None or key.attempt < round_.own.attempt:
            context.answer(RevokeResult.FINAL)
            return
        answer = REVOKE_ANSWERS[round_.own.ready]
        if round_.own.ready is not ReadyState.NOT_USED:
            when = self._attempt_of(key, round_)
            if when is _PAST:
                answer = RevokeResult.FINAL
            elif when is _NEXT:  # nobody has leased it: there is nothing to revoke, and nothing is promised
                answer = RevokeResult.NOT_LEASED
            elif self._can(round_, ReadyInput.REVOKE):
                self.end(round_, ReadyInput.REVOKE, reason)
        context.answer(answer)

    def end(self, round_: Round, given: ReadyInput, reason: int) -> None:
        """The one rule of withdrawing and revoking, where the table allows it.

        The first time it is said; afterwards only the reason may grow: it travels with what is still unsent, else with the
        acknowledgement of the ABORT. Once that is given, a lasting reason ends the next attempt instead.
        """
        own = round_.own
        before = own.ready
        lasting = reason > TRANSIENT_MAX
        if before is ReadyState.ABORT_ACKED:
            if lasting and own.terminal < TerminalState.VOTED:
                self._end_next(round_, reason)
            return
        grown = reason > own.told_reason
        own.told_reason = max(own.told_reason, reason)
        if lasting:
            own.next_intent = NEXT_NOTHING
        self._move(round_, given)
        said = _SAID_WHEN_ENDING.get(own.ready)
        if own.ready is not before:
            self.rounds.timers.leases.drop(round_.incarnation)
            self.rounds.note(round_, "revoke" if said is Kind.REVOKE else "withdraw", self.context.me)
        elif not grown or said is None or not self.streams.is_unsent(round_, READY_SLOT):
            return
        if said is not None:
            self.streams.say(round_, READY_SLOT, said, reason=own.told_reason)

    def _end_next(self, round_: Round, reason: int) -> None:
        round_.own.next_intent = NEXT_WITHDRAW
        round_.own.next_reason = max(round_.own.next_reason, reason)

    def end_unscheduled(self, round_: Round) -> None:
        """The scheduling rank drains: what is not activated will never be."""
        own = round_.own
        if own.ready in LEASED:
            self._revoke_unasked(round_, Reason.DRAIN)
        elif own.ready in _UNLEASED and own.terminal < TerminalState.VOTED:
            self.end(round_, ReadyInput.WITHDRAW, int(Reason.DRAIN))

    def _revoke_unasked(self, round_: Round, reason: Reason) -> None:
        self.context.emit(ev.Revoked(_key(round_), reason))
        self.end(round_, ReadyInput.REVOKE, int(reason))

    def lease_expired(self, round_: Round) -> None:
        """The scheduling rank's lease has waited for its schedule too long."""
        if round_.own.ready in LEASED:
            self._revoke_unasked(round_, Reason.LEASE_EXPIRED)

    def acknowledge_prepare(self, event: ev.PrepareAcknowledged) -> None:
        """The host grants its lease."""
        key, context = event.key, self.context
        round_ = self._round_of(key)
        if round_ is None or key.attempt < round_.own.attempt:
            context.answer(False)
            return
        own = round_.own
        answer = ACKNOWLEDGE_ANSWERS.get(own.ready)
        if answer is None or key.attempt != own.attempt:
            context.refuse("acknowledged a PREPARE that did not arrive, or twice", key, round_)
        if answer:
            self._move(round_, ReadyInput.ACK)
            own.leased_at_s = context.elapsed_s
            if context.is_scheduler:
                self.rounds.timers.leased(round_.incarnation, context.elapsed_s)
            self.rounds.note(round_, "ack", context.me)
            self.streams.say(round_, READY_SLOT, Kind.ACK)
        context.answer(answer)

    def acknowledge_abort(self, event: ev.AbortAcknowledged) -> None:
        """The host let go of an attempt."""
        key, context = event.key, self.context
        round_ = self._round_of(key)
        if round_ is None or key.attempt != round_.own.attempt or not self._can(round_, ReadyInput.ABORT_ACK):
            context.refuse("acknowledged an ABORT that did not arrive, or twice", key, round_)
        self._move(round_, ReadyInput.ABORT_ACK)
        self.rounds.note(round_, "abort ack", context.me)
        self.streams.say(round_, READY_SLOT, Kind.ABORT_ACK, reason=round_.own.told_reason)
        context.answer(None)

    def activate(self, event: ev.ScheduleActivated) -> None:
        """The schedule names these requests, in this order: all of them, or none."""
        context = self.context
        chosen: list[Round] = []
        for key in event.keys:
            round_ = self._round_of(key)
            if round_ is None:
                context.refuse("activation of a decided request", key)
            own = round_.own
            if own.ready is ReadyState.NOT_USED:
                continue
            if key.attempt != own.attempt or not self._can(round_, ReadyInput.ACTIVATE) or round_ in chosen:
                wanted = ReadyState.RELEASED if context.is_scheduler else ReadyState.LEASED
                context.refuse(f"activation needs {wanted.name}", key, round_)
            chosen.append(round_)
        for round_ in chosen:
            self._move(round_, ReadyInput.ACTIVATE)
            self.rounds.timers.leases.drop(round_.incarnation)
            self.activated_count += 1
            packed = _KEY_PACK(round_.request_id, round_.incarnation, round_.own.attempt)
            self.activation_digest = blake2b(self.activation_digest + packed, digest_size=16).digest()
            self.rounds.note(round_, "activate", context.me)
            self.streams.say(round_, READY_SLOT, Kind.ACTIVATE_ACK)
        context.answer(len(chosen))

    def recall(self, event: ev.RecallRequested) -> None:
        """The host advises the scheduling rank to revoke."""
        key, context = event.key, self.context
        reason = context.known(Reason, event.reason)
        round_ = self._round_of(key)
        if context.is_scheduler:
            context.refuse("the scheduling rank revokes; it does not recall", key, round_)
        sent = False
        if round_ is not None and key.attempt == round_.own.attempt:
            own = round_.own
            sent = own.ready is ReadyState.LEASED and not own.advised
            if sent:
                own.advised = True
                self.streams.say(round_, RECALL_SLOT, Kind.RECALL, reason=reason)
        context.answer(sent)

    # -- terminal: the host's calls ---------------------------------------------------------------------------------

    def vote(self, event: ev.TerminalVoted) -> None:
        """The host's one vote."""
        key, context = event.key, self.context
        outcome = context.known(Outcome, event.outcome)
        disposition = context.known(Disposition, event.disposition)
        reason = context.known(Reason, event.reason)
        round_ = self._round_of(key)
        if round_ is None:
            context.refuse("terminal vote for a decided request", key)
        own = round_.own
        if own.terminal >= TerminalState.VOTED:
            if (outcome, disposition, reason) == (own.outcome, own.disposition, own.reason):
                context.answer(False)
                return
            context.refuse("a terminal vote is immutable", key, round_)
        if own.ready not in FENCE[TerminalInput.VOTE]:
            context.refuse("terminal vote while this rank's readiness attempt is open", key, round_)
        if disposition and not outcome:
            context.refuse("COMPLETED with QUARANTINE", key, round_)
        if disposition and not own.doubt_expired and not self._doubt_is_due(round_):
            context.refuse("QUARANTINE before the deadline of a doubt", key, round_)
        self._move_terminal(round_, TerminalInput.VOTE)
        own.outcome, own.disposition, own.reason = outcome, disposition, reason
        own.next_intent = NEXT_NOTHING
        own.voted_at_s = context.elapsed_s
        self.rounds.timers.doubts.drop(round_.incarnation)
        self.rounds.note(round_, "terminal vote", context.me)
        self.streams.say(round_, TERMINAL_SLOT, Kind.TERMINAL, outcome, disposition, reason)
        context.answer(True)

    def _doubt_is_due(self, round_: Round) -> bool:
        since_s = round_.own.doubt_at_s
        return since_s is not None and self.context.elapsed_s >= since_s + self.context.config.doubt_deadline_s

    def doubt(self, event: ev.DoubtRaised) -> None:
        """The host has no proof of quiescence."""
        key, context = event.key, self.context
        reason = context.known(Reason, event.reason)
        round_ = self._round_of(key)
        if round_ is None:
            context.refuse("doubt about a decided request", key)
        own = round_.own
        if own.terminal >= TerminalState.VOTED:
            context.refuse("doubt after this rank's terminal vote", key, round_)
        if own.ready not in FENCE[TerminalInput.DOUBT]:
            context.refuse("doubt about a request that never ran here", key, round_)
        first = self._move_terminal(round_, TerminalInput.DOUBT)
        if first:
            own.doubt_at_s = context.elapsed_s
            self.rounds.timers.doubted(round_.incarnation, context.elapsed_s)
            self.rounds.note(round_, "doubt", context.me)
            self.streams.say(round_, DOUBT_SLOT, Kind.DOUBT, reason=reason)
        context.answer(first)

    def doubt_expired(self, round_: Round) -> None:
        """The deadline of this rank's first doubt has passed."""
        round_.own.doubt_expired = True
        self.context.emit(ev.DoubtExpired(_key(round_)))

    # -- the coordinator's decisions --------------------------------------------------------------------------------

    def decided(self, record: Record) -> None:
        """A decision about a round."""
        kind, outcome, disposition, reason, attempt, request_id, incarnation = record
        context, rounds = self.context, self.rounds
        if reason > REASON_MAX:
            context.blame_coordinator(f"unknown reason {reason}")
        round_ = rounds.open.get(incarnation)
        if round_ is None:
            if not 1 <= incarnation <= rounds.heard and kind != Kind.ABORT:
                context.blame_coordinator(
                    f"{Kind(kind).name} for incarnation {incarnation}, which this rank never heard of"
                )
            round_ = rounds.unheard(context.coordinator, request_id, incarnation)
            if round_ is None:
                return
        own = round_.own
        if kind == Kind.REASONS:
            own.reasons |= request_id << (64 * outcome)
            return
        if round_.request_id != request_id:
            context.blame_coordinator(
                f"{Kind(kind).name} calls incarnation {incarnation} request {request_id}, not {round_.request_id}",
                round_,
            )
        if round_.blocked:
            self._impossible(round_, kind, "before an older round was decided here")
        if kind == Kind.COMMIT:
            self.commit(round_, outcome, disposition)
            return
        if attempt != own.attempt:
            if attempt < own.attempt:
                rounds.stale += 1
                return
            self._impossible(round_, kind, f"for attempt {attempt} during {own.attempt}")
        if kind == Kind.FINALIZE:
            self._finalized(round_, MODES[outcome], reason)
        else:
            self._attempt_decided(round_, kind, reason)

    def _impossible(self, round_: Round, kind: int, where: str) -> NoReturn:
        self.context.blame_coordinator(f"{Kind(kind).name} {where}", round_)

    def _attempt_decided(self, round_: Round, kind: int, reason: int) -> None:
        """PREPARE, RELEASE, COMPLETE or ABORT."""
        own, context = round_.own, self.context
        before = own.ready
        after = self.ready_next[before][_DECIDED[kind]]
        if after is None:
            self._impossible(round_, kind, f"in {before.name}")
        own.ready = after
        self.rounds.note(round_, Kind(kind).name, context.coordinator)
        if kind == Kind.ABORT:
            own.aborted_for = reason
            own.leased_at_s = None
            self.rounds.timers.leases.drop(round_.incarnation)
            if round_.heard:
                context.emit(ev.Aborted(_key(round_), REASONS[reason]))
        elif after is before:  # swallowed: PREPARE after a withdrawal, RELEASE after a revocation
            self.ignored += 1
        elif kind == Kind.PREPARE:
            context.emit(ev.Prepared(_key(round_)))
        elif kind == Kind.RELEASE:
            context.emit(ev.Released(_key(round_)))
        else:
            self._measure(own.leased_at_s)
            context.emit(ev.Completed(_key(round_)))

    def _finalized(self, round_: Round, mode: FinalizeMode, reason: int) -> None:
        own = round_.own
        reopened = mode is FinalizeMode.REOPEN
        given = ReadyInput.FINALIZE_REOPEN if reopened else ReadyInput.FINALIZE_LAST
        if not self._can(round_, given):
            self._impossible(round_, Kind.FINALIZE, f"in {own.ready.name}")
        key = _key(round_)
        if mode is FinalizeMode.CLOSED and not self._move_terminal(round_, TerminalInput.CLOSE):
            self._impossible(round_, Kind.FINALIZE, f"CLOSED although this rank is {own.terminal.name}")
        self._move(round_, given)
        self.rounds.note(round_, f"FINALIZE {mode.name}", self.context.coordinator)
        self.context.emit(ev.Finalized(key, mode, REASONS[reason]))
        own.told_reason = 0
        own.aborted_for = 0
        own.advised = False
        if mode is FinalizeMode.CLOSED:
            self.closed_rounds += 1
            self._digest_final(round_, _CLOSED_MARK, 0)
            self.rounds.retire(round_)
        elif reopened:
            self._reopen(round_)

    def _reopen(self, round_: Round) -> None:
        """The next attempt begins with what the host wanted of it."""
        own = round_.own
        own.attempt += 1
        intent, wanted = own.next_intent, own.next_reason
        own.next_intent, own.next_reason = NEXT_NOTHING, 0
        if self.rounds.last is not None and self.context.is_scheduler:
            self.end_unscheduled(round_)
        elif intent == NEXT_PUBLISH:
            self._vote_ready(round_)
        elif intent == NEXT_WITHDRAW:
            self.end(round_, ReadyInput.WITHDRAW, wanted)

    def commit(self, round_: Round, outcome: int, disposition: int) -> None:
        """The decision: reclaim, or retire."""
        own, context = round_.own, self.context
        if outcome < own.outcome or disposition < own.disposition or (disposition and not outcome):
            self._impossible(round_, Kind.COMMIT, f"{OUTCOMES[outcome].name} against this rank's {own.outcome}")
        if not self._move_terminal(round_, TerminalInput.COMMIT):
            self._impossible(round_, Kind.COMMIT, f"in {own.terminal.name}, {own.ready.name}")
        self.rounds.note(round_, "COMMIT", context.coordinator)
        packed = own.reasons
        reasons = (
            tuple(REASONS[min((packed >> (8 * i)) & 0xFF, REASON_MAX)] for i in range(context.size))
            if packed
            else (REASONS[0],) * context.size
        )
        self._measure(own.voted_at_s)
        self.committed += 1
        self.outcome_counts[outcome] += 1
        self._digest_final(round_, outcome, disposition)
        context.emit(ev.Committed(_key(round_), OUTCOMES[outcome], DISPOSITIONS[disposition], reasons))
        self.rounds.retire(round_)
        if disposition:
            self.quarantined += 1
            if self.quarantined > context.config.quarantine_rounds_max:
                raise Violation(FaultCode.QUARANTINE_BUDGET, f"{self.quarantined} rounds are in quarantine", round_)

    def _digest_final(self, round_: Round, outcome: int, disposition: int) -> None:
        packed = _FINAL_PACK(round_.request_id, round_.incarnation, round_.own.attempt, outcome, disposition, 0, 0)
        self.digest = blake2b(self.digest + packed, digest_size=16).digest()

    def _measure(self, since_s: float | None) -> None:
        if since_s is None:
            return
        latency_s = self.context.elapsed_s - since_s
        self.latency_count += 1
        self.latency_sum_s += latency_s
        if latency_s > self.latency_max_s:
            self.latency_max_s = latency_s
        self.latency_buckets[min(int(latency_s * 1e6).bit_length(), LATENCY_BUCKETS - 1)] += 1

    # -- for explorers ----------------------------------------------------------------------------------------------

    def copy(self, context: Context, streams: Streams, rounds: Rounds) -> Member:
        """An independent copy."""
        twin = Member.__new__(Member)
        twin.__dict__.update(self.__dict__)
        twin.context, twin.streams, twin.rounds = context, streams, rounds
        twin.outcome_counts = list(self.outcome_counts)
        twin.latency_buckets = list(self.latency_buckets)
        return twin

    def fingerprint(self, digests: bool) -> tuple[object, ...]:
        """What was decided."""
        return (
            self.committed, self.closed_rounds, self.quarantined,
            (self.digest, self.activation_digest) if digests else (),
        )  # fmt: skip


def _key(round_: Round) -> Key:
    return Key(round_.request_id, round_.incarnation, round_.own.attempt)
