"""This rank's own half of every round: what its host calls, and what the coordinator's decisions do to it.

Every change of state is looked up in the tables of ``_state``; what a call answers about a state that it does not move is a
table as well. A call either raises with nothing changed, or is done.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import NoReturn

from pp_agreement import _events as ev
from pp_agreement._context import Context, Violation
from pp_agreement._errors import WouldBlock
from pp_agreement._events import (
    REQUEST_ID_BITS,
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
    new,
)
from pp_agreement._round import (
    EXPIRED_S,
    NEXT_NOTHING,
    NEXT_PUBLISH,
    NEXT_WITHDRAW,
    PLAIN_VOTE,
    Round,
)
from pp_agreement._rounds import Rounds
from pp_agreement._state import (
    ACKNOWLEDGE_ANSWERS,
    DECIDES,
    DISPOSITIONS,
    MEMBER_NEXT,
    MODES,
    OUTCOMES,
    PUBLISH_ANSWERS,
    READY_OPEN,
    REASON_MAX,
    REASONS,
    REVOKE_ANSWERS,
    SCHEDULER_NEXT,
    TERMINAL_AFTER,
    TRANSIENT_MAX,
    UNLEASED,
    UNSCHEDULED,
    WITHDRAW_ANSWERS,
    Kind,
    ReadyInput,
    ReadyState,
    TerminalInput,
    TerminalState,
    too_great,
)
from pp_agreement._statistics import Durations
from pp_agreement._streams import DOUBT_SLOT, READY_SLOT, RECALL_SLOT, TERMINAL_SLOT, Streams

NO_DIGEST = bytes(16)
DIGESTED_AT_ONCE = 8192  # bytes of final decisions that are digested together, and their latencies counted
_FINAL_PACK = struct.Struct("<QQIBB").pack
_KEY_PACK = struct.Struct("<QQI").pack
_CLOSED_MARK = 0xC0  # stands where a COMMIT has its outcome
# Names of the hot path: looking a member up on its Enum class, and its name on it, takes as long as ten lines.
_PREPARE, _RELEASE, _ABORT, _FINALIZE = int(Kind.PREPARE), int(Kind.RELEASE), int(Kind.ABORT), int(Kind.FINALIZE)
_COMMIT, _REASONS, _TERMINAL = int(Kind.COMMIT), int(Kind.REASONS), int(Kind.TERMINAL)
_VOTE, _ACK, _ACTIVATE_ACK = int(Kind.VOTE), int(Kind.ACK), int(Kind.ACTIVATE_ACK)
_ABORT_ACK, _REVOKE, _RECALL, _DOUBT = int(Kind.ABORT_ACK), int(Kind.REVOKE), int(Kind.RECALL), int(Kind.DOUBT)
_Committed = ev.Committed
_COMPLETED, _RELEASE_BLOCKS, _NO_REASON = Outcome.COMPLETED, Disposition.RELEASE, Reason.NONE
_VOTED = TerminalState.VOTED
_AFTER_VOTE, _AFTER_COMMIT = TERMINAL_AFTER[TerminalInput.VOTE], TERMINAL_AFTER[TerminalInput.COMMIT]
_DECIDED = {
    _PREPARE: (ReadyInput.PREPARE, "PREPARE"),
    _RELEASE: (ReadyInput.RELEASE, "RELEASE"),
    int(Kind.COMPLETE): (ReadyInput.COMPLETE, "COMPLETE"),
    _ABORT: (ReadyInput.ABORT, "ABORT"),
}
_SAID_WHEN_ENDING = {ReadyState.WITHDRAWN: int(Kind.WITHDRAW), ReadyState.REVOKED: _REVOKE}
_PAST, _NOW, _NEXT = range(3)


class Member:
    """See the module.

    Args:
        on_the_domain: Hears what the coordinator says beside decisions about rounds.
        heard_late: Called when the broadcast has named a request that peers had spoken of.
    """

    def __init__(
        self,
        context: Context,
        streams: Streams,
        rounds: Rounds,
        on_the_domain: Callable[[Record], None],
        heard_late: Callable[[Round], None],
    ) -> None:
        self.context = context
        self.streams = streams
        self.rounds = rounds
        self.on_the_domain = on_the_domain
        self.heard_late = heard_late
        self.ready_next = SCHEDULER_NEXT if context.is_scheduler else MEMBER_NEXT
        not_used = self.ready_next[ReadyState.IDLE][ReadyInput.NOT_USED]
        self.not_used = ReadyState.IDLE if not_used is None else not_used  # looked up here once, not at each admission
        self.notes = not streams.counts_own  # whether stories tell what this rank says: else its own tally does
        self.closed_rounds = 0
        self.quarantined = 0
        self.activated_count = 0
        self._finals = blake2b(digest_size=16)
        self._undigested = bytearray()  # finals that ``_finals`` has not taken up yet
        self._activations = blake2b(digest_size=16)
        self.no_reasons = (REASONS[0],) * context.voices
        self.outcome_counts = [0, 0, 0]
        self.ignored = 0
        self.latencies = Durations()  # from this rank's terminal vote to COMMIT, and from its lease to COMPLETE

    @property
    def committed(self) -> int:
        """How many rounds ended with a COMMIT here."""
        return sum(self.outcome_counts)

    @property
    def digest(self) -> bytes:
        """Of all final decisions, in their order; zeros before the first.

        Looking changes nothing: a signal handler may look in the middle of ``hear``, and a look may be interrupted.
        """
        if not (self.committed or self.closed_rounds):
            return NO_DIGEST
        finals = self._finals.copy()
        finals.update(self._undigested)
        return finals.digest()

    @property
    def activation_digest(self) -> bytes:
        """Of all activations, in their order; zeros before the first."""
        return self._activations.digest() if self.activated_count else NO_DIGEST

    # -- moving -----------------------------------------------------------------------------------------------------

    def _can(self, round_: Round, given: ReadyInput) -> bool:
        return self.ready_next[round_.ready][given] is not None

    def _move(self, round_: Round, given: ReadyInput) -> None:
        after = self.ready_next[round_.ready][given]
        if after is None:
            raise Violation(FaultCode.INTERNAL, f"{given.name} in {round_.ready.name}", round_)
        round_.ready = after

    def _move_terminal(self, round_: Round, given: TerminalInput) -> bool:
        """False: the table or the fence forbids it, and nothing has changed."""
        after = TERMINAL_AFTER[given][round_.terminal][round_.ready]
        if after is None:
            return False
        round_.terminal = after
        return True

    # -- admission --------------------------------------------------------------------------------------------------

    def admit(self, request_id: int, incarnation: int, ready: bool) -> Key:
        """The authoritative broadcast named a request."""
        rounds = self.rounds
        if (
            type(request_id) is not int
            or request_id >> REQUEST_ID_BITS  # also of what is negative
            or type(incarnation) is not int
            or (ready is not False and ready is not True)
            or incarnation != rounds.heard + 1
            or rounds.last is not None
        ):
            repeated = self._check_admission(request_id, incarnation, ready)
            if repeated is not None:
                return repeated.key
        context, opened = self.context, rounds.open
        round_ = opened.get(incarnation)
        unspoken = round_ is None
        if round_ is None:
            waits = request_id in rounds.by_request or len(opened) - len(rounds.held_back) >= rounds.credits
            if waits:
                self._check_waiting(request_id, incarnation)
            round_ = rounds.new(request_id, incarnation, ready, waits)
        else:
            self._check_what_peers_said(round_, request_id, ready)
            if round_.ready is ReadyState.ABORTING:  # the tombstone: aborted before the request existed here
                context.emit(ev.Aborted(round_.key, REASONS[round_.course.aborted_for]))
        round_.heard = True
        if not ready:
            round_.uses_ready = False
            round_.ready = self.not_used  # it was IDLE
        rounds.heard = incarnation
        round_.touched_s = context.elapsed_s
        round_.story.append((context.now_s, "admitted", context.me))
        if not unspoken:
            self.heard_late(round_)
        return round_.key

    def _check_admission(self, request_id: int, incarnation: int, ready: bool) -> Round | None:
        """What is wrong with an admission; the round that was admitted before in the same words; None: it may go on."""
        context, rounds = self.context, self.rounds
        if type(request_id) is not int or not 0 <= request_id <= REQUEST_ID_MAX:
            context.refuse(f"request_id {request_id!r} is not an integer in 0..2**63-1")
        if type(incarnation) is not int or incarnation < 1:
            context.refuse(f"incarnation {incarnation!r} is not an integer >= 1")
        if type(ready) is not bool:
            context.refuse(f"ready={ready!r} is neither True nor False")
        key, heard = Key(request_id, incarnation), rounds.heard
        if incarnation <= heard:
            known = rounds.open.get(incarnation)
            if known is None or known.request_id != request_id or known.uses_ready != ready:
                told = f"incarnation {incarnation} was admitted before, as another request or decided since"
                context.refuse(told, key, known)
            return known
        if incarnation > heard + 1:
            context.refuse(f"incarnation {incarnation} after {heard}: the broadcast order has no gaps", key)
        if rounds.last is not None and incarnation > rounds.last:
            if context.is_scheduler:
                context.refuse(f"admission after the drain at {rounds.last}", key)
            # The broadcast and the drain contradict each other: refusing alone would leave the others waiting.
            raise Violation(FaultCode.DRAIN_MISMATCH, f"admission {incarnation} after the drain at {rounds.last}")
        return None

    def _check_waiting(self, request_id: int, incarnation: int) -> None:
        """An older round has to be decided first: the authority does not admit it yet, others hold it back."""
        context, rounds = self.context, self.rounds
        if context.is_scheduler:
            other = rounds.by_request.get(request_id)
            if other is not None:
                told = f"request is still undecided as incarnation {other.incarnation}"
                context.refuse(told, Key(request_id, incarnation), other)
            raise WouldBlock(f"all {rounds.credits} credits are spent")
        if len(rounds.held_back) >= rounds.credits:
            context.refuse("the authority spent more credits than there are", Key(request_id, incarnation))

    def _check_what_peers_said(self, round_: Round, request_id: int, ready: bool) -> None:
        """Peers have opened the round before its broadcast came."""
        tally = round_.tally
        used = round_.ready is not ReadyState.IDLE or (tally is not None and tally.votes | tally.withdrawn)
        if round_.request_id != request_id or (used and not ready):
            raise Violation(
                FaultCode.BROADCAST_MISMATCH,
                f"broadcast says request {request_id}, ready={ready}; peers spoke of request {round_.request_id}",
                round_,
            )

    def _round_of(self, key: Key) -> Round | None:
        """The open round of ``key``; None when it is decided here. Refuses what was never admitted here."""
        if type(key) is Key and type(key[1]) is int:
            round_ = self.rounds.open.get(key[1])
            if round_ is not None and round_.key is key and round_.heard:  # the very key that this rank gave
                return round_
        return self._round_of_equal(key)

    def _round_of_equal(self, key: Key) -> Round | None:
        """See ``_round_of``, for a key that the host has made itself, or kept for long."""
        refuse = self.context.refuse
        if type(key) is not Key:
            refuse(f"{key!r} is not a Key")
        request_id, incarnation, attempt = key
        round_ = self.rounds.open.get(incarnation) if type(incarnation) is int else None
        if type(incarnation) is not int or type(attempt) is not int or attempt < 0:
            refuse(f"{key!r} holds something else than counts")
        if round_ is None:
            if incarnation > self.rounds.heard or incarnation < 1:
                refuse("unknown incarnation: not admitted here", key)
            return None
        if not round_.heard:
            refuse("not admitted here yet", key, round_)
        if round_.request_id != request_id:
            refuse(f"the incarnation belongs to request {round_.request_id}", key, round_)
        return round_

    def _attempt_of(self, key: Key, round_: Round) -> int:
        """Whether the key's attempt is over, runs, or is the next one after an open one. Refuses any other."""
        distance = key[2] - round_.attempt
        if distance == 0:
            return _NOW
        if distance < 0:
            return _PAST
        if distance > 1:
            self.context.refuse("no such attempt", key, round_)
        if round_.ready is ReadyState.IDLE:
            self.context.refuse("the attempt before this one is not over", key, round_)
        return _NEXT if round_.ready in READY_OPEN else _PAST

    # -- readiness: the host's calls --------------------------------------------------------------------------------

    def publish(self, key: Key) -> PublishResult:
        """The host is ready for an attempt."""
        context = self.context
        round_ = self._round_of(key)
        if round_ is None:
            return PublishResult.FINAL
        if not round_.uses_ready:
            context.refuse("readiness is not used by this admission", key, round_)
        if round_.terminal >= _VOTED:
            context.refuse("readiness after this rank's terminal vote", key, round_)
        when = self._attempt_of(key, round_)
        if when is _PAST:
            answer = PublishResult.FINAL
        elif when is _NEXT:
            answer = PublishResult.DEFERRED
            if round_.course.next_intent != NEXT_WITHDRAW:  # what was promised to end stays so
                round_.course.next_intent = NEXT_PUBLISH
        else:
            answer = PUBLISH_ANSWERS[round_.ready]
            if self._can(round_, ReadyInput.PUBLISH):
                self._vote_ready(round_)
            if round_.held is not None and answer is PublishResult.PUBLISHED:  # also when it is asked again
                answer = PublishResult.DEFERRED
        return answer

    def _vote_ready(self, round_: Round) -> None:
        self._move(round_, ReadyInput.PUBLISH)
        if self.notes:
            self.rounds.note(round_, "vote", self.context.me)
        self.streams.say(round_, READY_SLOT, _VOTE)

    def withdraw(self, key: Key, why: Reason) -> WithdrawResult:
        """The host takes its readiness back, or refuses it."""
        reason = self.context.known(Reason, why)
        round_ = self._round_of(key)
        if round_ is None:
            return WithdrawResult.FINAL
        answer = WITHDRAW_ANSWERS[round_.ready]
        if round_.ready is not ReadyState.NOT_USED:
            when = self._attempt_of(key, round_)
            if when is _PAST:
                answer = WithdrawResult.FINAL
            elif when is _NEXT:
                answer = WithdrawResult.WILL_ABORT
                self._end_next(round_, reason)
            elif round_.ready is ReadyState.IDLE and round_.terminal >= TerminalState.VOTED:
                answer = WithdrawResult.TERMINAL
            elif self._can(round_, ReadyInput.WITHDRAW):
                self.end(round_, ReadyInput.WITHDRAW, reason)
        return answer

    def revoke(self, key: Key, why: Reason) -> RevokeResult:
        """The scheduling rank's host will not schedule a leased request."""
        context = self.context
        if not context.is_scheduler:
            context.refuse("only the scheduling rank revokes", key if type(key) is Key else None)
        reason = context.known(Reason, why)
        round_ = self._round_of(key)
        if round_ is None:
            return RevokeResult.FINAL
        answer = REVOKE_ANSWERS[round_.ready]
        if round_.ready is not ReadyState.NOT_USED:
            when = self._attempt_of(key, round_)
            if when is _PAST:
                answer = RevokeResult.FINAL
            elif when is _NEXT:  # nobody has leased it: there is nothing to revoke, and nothing is promised
                answer = RevokeResult.NOT_LEASED
            elif self._can(round_, ReadyInput.REVOKE):
                self.end(round_, ReadyInput.REVOKE, reason)
        return answer

    def end(self, round_: Round, given: ReadyInput, reason: int) -> None:
        """The one rule of withdrawing and revoking, where the table allows it.

        The first time it is said; afterwards only the reason may grow: it travels with what is still unsent, else with the
        acknowledgement of the ABORT. Once that is given, a lasting reason ends the next attempt instead.
        """
        before = round_.ready
        lasting = reason > TRANSIENT_MAX
        if before is ReadyState.ABORT_ACKED:
            if lasting and round_.terminal < TerminalState.VOTED:
                self._end_next(round_, reason)
            return
        grown = reason > round_.course.told_reason
        round_.course.told_reason = max(round_.course.told_reason, reason)
        if lasting:
            round_.course.next_intent = NEXT_NOTHING
        self._move(round_, given)
        said = _SAID_WHEN_ENDING.get(round_.ready)
        if round_.ready is not before:
            self.rounds.timers.leases.drop(round_.incarnation)
            if self.notes:
                self.rounds.note(round_, "revoke" if said == _REVOKE else "withdraw", self.context.me)
        elif not grown or said is None or not self.streams.is_unsent(round_, READY_SLOT):
            return
        if said is not None:
            self.streams.say(round_, READY_SLOT, said, reason=round_.course.told_reason)

    def _end_next(self, round_: Round, reason: int) -> None:
        round_.course.next_intent = NEXT_WITHDRAW
        round_.course.next_reason = max(round_.course.next_reason, reason)

    def end_unscheduled(self, round_: Round) -> None:
        """The scheduling rank drains: what is not activated will never be."""
        if round_.ready in UNSCHEDULED:
            self._revoke_unasked(round_, Reason.DRAIN)
        elif round_.ready in UNLEASED and round_.terminal < TerminalState.VOTED:
            self.end(round_, ReadyInput.WITHDRAW, int(Reason.DRAIN))

    def _revoke_unasked(self, round_: Round, reason: Reason) -> None:
        self.context.emit(ev.Revoked(round_.key, reason))
        self.end(round_, ReadyInput.REVOKE, int(reason))

    def lease_expired(self, round_: Round) -> None:
        """The scheduling rank's lease has waited for its schedule too long."""
        if round_.ready in UNSCHEDULED:
            self._revoke_unasked(round_, Reason.LEASE_EXPIRED)

    def acknowledge_prepare(self, key: Key) -> bool:
        """The host grants its lease."""
        context = self.context
        round_ = self._round_of(key)
        if round_ is None or key.attempt < round_.attempt:
            return False
        answer = ACKNOWLEDGE_ANSWERS.get(round_.ready)
        if answer is None or key.attempt != round_.attempt:
            context.refuse("acknowledged a PREPARE that did not arrive, or twice", key, round_)
        if answer:
            self._move(round_, ReadyInput.ACK)
            round_.course.leased_at_s = context.elapsed_s
            if context.is_scheduler:
                self.rounds.timers.leased(round_.incarnation, context.elapsed_s)
            if self.notes:
                self.rounds.note(round_, "ack", self.context.me)
            self.streams.say(round_, READY_SLOT, _ACK)
        return answer

    def acknowledge_abort(self, key: Key) -> None:
        """The host let go of an attempt."""
        context = self.context
        round_ = self._round_of(key)
        if round_ is None or key.attempt != round_.attempt or not self._can(round_, ReadyInput.ABORT_ACK):
            context.refuse("acknowledged an ABORT that did not arrive, or twice", key, round_)
        self._move(round_, ReadyInput.ABORT_ACK)
        if self.notes:
            self.rounds.note(round_, "abort ack", self.context.me)
        self.streams.say(round_, READY_SLOT, _ABORT_ACK, reason=round_.course.told_reason)

    def activate(self, keys: tuple[Key, ...]) -> int:
        """The schedule names these requests, in this order: all of them, or none. How many there were."""
        context = self.context
        chosen: list[Round] = []
        for key in keys:
            round_ = self._round_of(key)
            if round_ is None:
                context.refuse("activation of a decided request", key)
            if round_.ready is ReadyState.NOT_USED:
                continue
            if key.attempt != round_.attempt or not self._can(round_, ReadyInput.ACTIVATE) or round_ in chosen:
                wanted = ReadyState.RELEASED if context.is_scheduler else ReadyState.LEASED
                context.refuse(f"activation needs {wanted.name}", key, round_)
            chosen.append(round_)
        for round_ in chosen:
            self._move(round_, ReadyInput.ACTIVATE)
            self.rounds.timers.leases.drop(round_.incarnation)
            self.activated_count += 1
            self._activations.update(_KEY_PACK(*round_.key))
            if self.notes:
                self.rounds.note(round_, "activate", self.context.me)
            self.streams.say(round_, READY_SLOT, _ACTIVATE_ACK)
        return len(chosen)

    def recall(self, key: Key, why: Reason) -> bool:
        """The host advises the scheduling rank to revoke. Whether it is told."""
        context = self.context
        reason = context.known(Reason, why)
        round_ = self._round_of(key)
        if context.is_scheduler:
            context.refuse("the scheduling rank revokes; it does not recall", key, round_)
        sent = False
        if round_ is not None and key.attempt == round_.attempt:
            sent = round_.ready is ReadyState.LEASED and not round_.course.recalled
            if sent:
                round_.course.recalled = True
                self.streams.say(round_, RECALL_SLOT, _RECALL, reason=reason)
        return sent

    # -- terminal: the host's calls ---------------------------------------------------------------------------------

    def vote(self, key: Key, outcome: Outcome, disposition: Disposition, why: Reason) -> bool:
        """The host's one vote. False: the same one was cast before."""
        context = self.context
        plain = outcome is _COMPLETED and disposition is _RELEASE_BLOCKS and why is _NO_REASON
        if not plain:
            context.known(Outcome, outcome)
            context.known(Disposition, disposition)
            context.known(Reason, why)
        round_ = self.rounds.open.get(key[1]) if type(key) is Key and type(key[1]) is int else None
        if round_ is None or round_.key is not key or not round_.heard:  # else it is the very key that this rank gave
            round_ = self._round_of_equal(key)
            if round_ is None:
                context.refuse("terminal vote for a decided request", key)
        after = _AFTER_VOTE[round_.terminal][round_.ready]
        if after is None:
            self._check_same_vote(key, round_, outcome, disposition, why)
            return False
        if disposition:
            self._check_quarantine(key, round_, outcome)
        round_.terminal = after
        if round_.uses_ready:
            round_.course.next_intent = NEXT_NOTHING
        round_.voted_at_s = elapsed_s = context.elapsed_s
        if round_.doubt_at_s is not None:
            self.rounds.timers.doubts.drop(round_.incarnation)
        if self.notes:
            round_.touched_s = elapsed_s
            round_.story.append((context.now_s, "terminal vote", context.me))  # one at most
        if plain:
            self.streams.say(round_, TERMINAL_SLOT, _TERMINAL)
        else:
            round_.vote = int(outcome), int(disposition), int(why)
            self.streams.say(round_, TERMINAL_SLOT, _TERMINAL, *round_.vote)
        return True

    def _check_quarantine(self, key: Key, round_: Round, outcome: Outcome) -> None:
        if not outcome:
            self.context.refuse("COMPLETED with QUARANTINE", key, round_)
        if not self._doubt_is_due(round_):
            self.context.refuse("QUARANTINE before the deadline of a doubt", key, round_)

    def _check_same_vote(
        self, key: Key, round_: Round, outcome: Outcome, disposition: Disposition, why: Reason
    ) -> None:
        """No vote is taken in this state: it is a repetition, or refused."""
        if round_.terminal < _VOTED:
            self.context.refuse("terminal vote while this rank's readiness attempt is open", key, round_)
        if (outcome, disposition, why) != round_.vote:
            self.context.refuse("a terminal vote is immutable", key, round_)

    def _doubt_is_due(self, round_: Round) -> bool:
        since_s = round_.doubt_at_s
        return since_s is not None and self.context.elapsed_s >= since_s + self.context.config.doubt_deadline_s

    def doubt(self, key: Key, why: Reason) -> bool:
        """The host has no proof of quiescence. False: it has said so before."""
        context = self.context
        reason = context.known(Reason, why)
        round_ = self._round_of(key)
        if round_ is None:
            context.refuse("doubt about a decided request", key)
        if round_.terminal >= _VOTED:
            context.refuse("doubt after this rank's terminal vote", key, round_)
        first = self._move_terminal(round_, TerminalInput.DOUBT)
        if not first and round_.terminal is TerminalState.OPEN:
            context.refuse("doubt about a request that never ran here", key, round_)
        if first:
            round_.doubt_at_s = context.elapsed_s
            self.rounds.timers.doubted(round_.incarnation, context.elapsed_s)
            if self.notes:
                self.rounds.note(round_, "doubt", self.context.me)
            self.streams.say(round_, DOUBT_SLOT, _DOUBT, reason=reason)
        return first

    def doubt_expired(self, round_: Round) -> None:
        """The deadline of this rank's first doubt has passed."""
        round_.doubt_at_s = EXPIRED_S
        self.context.emit(ev.DoubtExpired(round_.key))

    # -- the coordinator's decisions --------------------------------------------------------------------------------

    def hear(self, records: Iterable[Record], kinds: list[int]) -> None:
        """The coordinator speaks. One loop: of a COMMIT, reclaim or retire, it is the whole way.

        Args:
            records: What it says, in its order.
            kinds: Where they are counted, by kind.
        """
        context, rounds, undigested, latencies_s = self.context, self.rounds, self._undigested, self.latencies.waiting
        opened = rounds.open
        for record in records:
            kind, outcome, disposition, reason, _attempt, request_id, incarnation = record
            kinds[kind] += 1
            if not DECIDES[kind]:
                self.on_the_domain(record)
                continue
            if outcome or disposition or reason:
                self._check_decision(kind, outcome, disposition, reason)
            round_ = opened.get(incarnation)
            if round_ is None:
                round_ = self._decided_unheard(kind, request_id, incarnation)
                if round_ is None:
                    continue
            if kind != _COMMIT:
                self._readiness_decided(round_, record)
                continue
            if round_.request_id != request_id or round_.held is not None:
                self._contradicts(round_, kind, request_id)
            if outcome or disposition or round_.vote is not PLAIN_VOTE:
                self._check_outcome(round_, outcome, disposition)
            after = _AFTER_COMMIT[round_.terminal][round_.ready]
            if after is None:
                self._impossible(round_, _COMMIT, f"in {round_.terminal.name}, {round_.ready.name}")
            round_.terminal = after
            latencies_s.append(context.elapsed_s - round_.voted_at_s)
            self.outcome_counts[outcome] += 1
            key = round_.key
            undigested += _FINAL_PACK(request_id, incarnation, key[2], outcome, disposition)
            reasons = self._reasons(round_.reasons) if round_.reasons else self.no_reasons
            context.events.append(new(_Committed, (key, OUTCOMES[outcome], DISPOSITIONS[disposition], reasons)))
            rounds.retire(round_)
            if disposition:
                self._quarantine(round_)
        if len(undigested) > DIGESTED_AT_ONCE:
            self._finals.update(undigested)
            undigested.clear()
            self.latencies.count()  # of each final decision there are two at most

    def _check_outcome(self, round_: Round, outcome: int, disposition: int) -> None:
        """A COMMIT is at least what this rank has voted."""
        voted, its_disposition, _reason = round_.vote
        if outcome < voted or disposition < its_disposition or (disposition and not outcome):
            self._impossible(round_, _COMMIT, f"{OUTCOMES[outcome].name} against this rank's {voted}")

    def _hear_reasons(self, round_: Round, first: int, packed: int) -> None:
        """The reasons of eight voices from the ``first`` on, ahead of their COMMIT."""
        for voice, reason in enumerate(packed.to_bytes(8, "little"), first):
            if reason > REASON_MAX or (reason and voice >= self.context.voices):
                self.context.blame_coordinator(f"REASONS with reason {reason} of voice {voice}", round_)
        round_.reasons |= packed << (8 * first)

    def _quarantine(self, round_: Round) -> None:
        context = self.context
        self.quarantined += 1
        if self.quarantined > context.config.quarantine_rounds_max:
            self.rounds.note(round_, "COMMIT", context.coordinator)
            raise Violation(FaultCode.QUARANTINE_BUDGET, f"{self.quarantined} rounds are in quarantine", round_)

    def _check_decision(self, kind: int, outcome: int, disposition: int, reason: int) -> None:
        wrong = too_great(kind, outcome, disposition)
        if wrong:
            self.context.blame_coordinator(wrong)
        if reason > REASON_MAX:
            self.context.blame_coordinator(f"unknown reason {reason}")

    def _decided_unheard(self, kind: int, request_id: int, incarnation: int) -> Round | None:
        """A decision about a round that is not open here: stale, or an ABORT that came before the broadcast."""
        context, rounds = self.context, self.rounds
        if not 1 <= incarnation <= rounds.heard and kind != _ABORT:
            context.blame_coordinator(
                f"{Kind(kind).name} for incarnation {incarnation}, which this rank never heard of"
            )
        return rounds.unheard(context.coordinator, request_id, incarnation)

    def _contradicts(self, round_: Round, kind: int, request_id: int) -> NoReturn:
        """Another request's round, or one that is held back: what that one waits for is decided earlier in this stream."""
        if round_.request_id != request_id:
            self.context.blame_coordinator(
                f"{Kind(kind).name} calls incarnation {round_.incarnation} request {request_id}, "
                f"not {round_.request_id}",
                round_,
            )
        self._impossible(round_, kind, "before an older round was decided here")

    def _readiness_decided(self, round_: Round, record: Record) -> None:
        """Anything but a COMMIT."""
        kind, outcome, _disposition, reason, attempt, request_id, _incarnation = record
        if kind == _REASONS:
            self._hear_reasons(round_, 8 * outcome, request_id)
            return
        if round_.request_id != request_id or round_.held is not None:
            self._contradicts(round_, kind, request_id)
        now = round_.attempt
        if attempt != now:
            if attempt < now:
                self.rounds.stale += 1
                return
            self._impossible(round_, kind, f"for attempt {attempt} during {now}")
        if kind == _FINALIZE:
            self._finalized(round_, MODES[outcome], reason)
        else:
            self._attempt_decided(round_, kind, reason)

    def _impossible(self, round_: Round, kind: int, where: str) -> NoReturn:
        self.context.blame_coordinator(f"{Kind(kind).name} {where}", round_)

    def _attempt_decided(self, round_: Round, kind: int, reason: int) -> None:
        """PREPARE, RELEASE, COMPLETE or ABORT."""
        context = self.context
        given, name = _DECIDED[kind]
        before = round_.ready
        after = self.ready_next[before][given]
        if after is None:
            self._impossible(round_, kind, f"in {before.name}")
        round_.ready = after
        self.rounds.note(round_, name, context.coordinator)
        if kind == _ABORT:
            round_.course.aborted_for = reason
            round_.course.leased_at_s = None
            self.rounds.timers.leases.drop(round_.incarnation)
            if round_.heard:  # else the round is a tombstone until its broadcast, see ``admit``
                context.emit(ev.Aborted(round_.key, REASONS[reason]))
        elif after is before:  # swallowed: PREPARE after a withdrawal, RELEASE after a revocation
            self.ignored += 1
        elif kind == _PREPARE:
            context.emit(ev.Prepared(round_.key))
            context.may_lapse = True
        elif kind == _RELEASE:
            context.emit(ev.Released(round_.key))
            context.may_lapse = True
        else:
            if round_.course.leased_at_s is not None:
                self.latencies.waiting.append(context.elapsed_s - round_.course.leased_at_s)
            context.emit(ev.Completed(round_.key))

    def _finalized(self, round_: Round, mode: FinalizeMode, reason: int) -> None:
        reopened = mode is FinalizeMode.REOPEN
        given = ReadyInput.FINALIZE_REOPEN if reopened else ReadyInput.FINALIZE_LAST
        if not self._can(round_, given):
            self._impossible(round_, Kind.FINALIZE, f"in {round_.ready.name}")
        key = round_.key
        if mode is FinalizeMode.CLOSED and not self._move_terminal(round_, TerminalInput.CLOSE):
            self._impossible(round_, Kind.FINALIZE, f"CLOSED although this rank is {round_.terminal.name}")
        self._move(round_, given)
        self.rounds.note(round_, f"FINALIZE {mode.name}", self.context.coordinator)
        self.context.emit(ev.Finalized(key, mode, REASONS[reason]))
        round_.course.told_reason = 0
        round_.course.aborted_for = 0
        round_.course.recalled = False
        if mode is FinalizeMode.CLOSED:
            self.closed_rounds += 1
            self._undigested += _FINAL_PACK(*round_.key, _CLOSED_MARK, 0)
            self.rounds.retire(round_)
        elif reopened:
            self._reopen(round_)

    def _reopen(self, round_: Round) -> None:
        """The next attempt begins with what the host wanted of it."""
        round_.next_attempt()
        intent, wanted = round_.course.next_intent, round_.course.next_reason
        round_.course.next_intent, round_.course.next_reason = NEXT_NOTHING, 0
        if self.rounds.last is not None and self.context.is_scheduler:
            self.end_unscheduled(round_)
        elif intent == NEXT_PUBLISH:
            self._vote_ready(round_)
        elif intent == NEXT_WITHDRAW:
            self.end(round_, ReadyInput.WITHDRAW, wanted)

    def _reasons(self, packed: int) -> tuple[Reason, ...]:
        return tuple([REASONS[(packed >> (8 * i)) & 0xFF] for i in range(self.context.voices)])

    # -- for explorers ----------------------------------------------------------------------------------------------

    def copy(
        self,
        context: Context,
        streams: Streams,
        rounds: Rounds,
        on_the_domain: Callable[[Record], None],
        heard_late: Callable[[Round], None],
    ) -> Member:
        """An independent copy."""
        twin = Member.__new__(Member)
        twin.__dict__.update(self.__dict__)
        twin.context, twin.streams, twin.rounds = context, streams, rounds
        twin.on_the_domain, twin.heard_late = on_the_domain, heard_late
        twin._finals, twin._activations = self._finals.copy(), self._activations.copy()
        twin._undigested = self._undigested.copy()
        twin.outcome_counts = list(self.outcome_counts)
        twin.latencies = self.latencies.copy()
        return twin

    def fingerprint(self, digests: bool) -> tuple[object, ...]:
        """What was decided."""
        return (
            self.committed, self.closed_rounds, self.quarantined,
            (self.digest, self.activation_digest) if digests else (),
        )  # fmt: skip
