"""The coordinator: counts what members say about a round, and decides each thing once.

It knows sets of members, not what they mean. A decision is one record, appended in one step to every destination's queue,
this rank's own included; nothing is ever decided twice, whatever a destination does with its queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NoReturn

from pp_agreement._context import Context, Violation
from pp_agreement._events import AdviceKind, FaultCode, FinalizeMode, Reason, Record
from pp_agreement._round import PLAIN_VOTE, Round, Tally
from pp_agreement._rounds import Rounds
from pp_agreement._state import (
    ABOUT_ROUNDS,
    COORDINATOR_RULE,
    MEMBERS_SAY,
    NEEDS_CHECK,
    PHASE_NEXT,
    REASON_MAX,
    SCHEDULER_SAYS,
    TRANSIENT_MAX,
    Decision,
    Kind,
    Phase,
    Rule,
    too_great,
)
from pp_agreement._streams import Streams

# Names of the hot path: looking a member up on its Enum class, and its name on it, takes as long as ten lines.
_VOTE, _REVOKE, _REASONS, _TERMINAL_VOTE = (
    int(Kind.VOTE),
    int(Kind.REVOKE),
    int(Kind.REASONS),
    int(Reason.TERMINAL_VOTE),
)
_TERMINAL, _DOUBT, _COMMITS = int(Kind.TERMINAL), int(Kind.DOUBT), int(Kind.COMMIT)
_PREPARE, _RELEASE, _COMPLETE, _ABORT = Decision.PREPARE, Decision.RELEASE, Decision.COMPLETE, Decision.ABORT
_COMMIT = Decision.COMMIT
_GATHERING, _FINAL = Phase.GATHERING, Phase.FINAL
_FAULT, _IGNORE, _COUNT_IT, _ADVISE, _NOTE = Rule.FAULT, Rule.IGNORE, Rule.COUNT, Rule.ADVISE, Rule.NOTE
_ABORT_UNLESS_LEASED, _ABORT_UNLESS_ACTIVATED = Rule.ABORT_UNLESS_LEASED, Rule.ABORT_UNLESS_ACTIVATED
_KIND_OF = [
    (int(kind), kind.name)
    for kind in (Kind.PREPARE, Kind.RELEASE, Kind.COMPLETE, Kind.ABORT, Kind.FINALIZE, Kind.FINALIZE, Kind.COMMIT)
]
"""By decision: the kind that tells it, and its name."""


@dataclass(eq=False, repr=False)
class Coordinator:
    """See the module.

    Args:
        end_attempt: Called for a round in which somebody voted terminal and nobody is ready: nobody needs to become it.
        on_the_domain: Hears what a member says about no round.
    """

    context: Context
    streams: Streams
    rounds: Rounds
    end_attempt: Callable[[Round], None]
    on_the_domain: Callable[[int, Record], None]
    ignored: int = 0
    unsettled: dict[int, None] | None = None
    """In a group: rounds about which its ranks have said something that its voice may have to say; see ``Bridge.settle``."""

    # -- what members say -------------------------------------------------------------------------------------------

    def hear(
        self, source: int, records: Iterable[Record], kinds: list[int], deliver: Callable[[], None] | None
    ) -> None:
        """A member speaks, this rank's own half included. One loop: of a terminal vote it is the whole way.

        Args:
            source: The member.
            records: What it says, in its order.
            kinds: Where they are counted, by kind.
            deliver: Has this rank hear its own decisions; None: the caller is about to.
        """
        context, unsettled, decisions = self.context, self.unsettled, self.streams.decisions
        opened, all_mask, bit = self.rounds.open, context.all_mask, 1 << source
        elapsed_s, voted_then = context.elapsed_s, (context.now_s, "terminal vote", source)
        for record in records:
            kind, outcome, disposition, reason, _attempt, request_id, incarnation = record
            kinds[kind] += 1
            if kind != _TERMINAL:
                self._hear_other(source, record)
                if decisions and deliver is not None:
                    deliver()
                continue
            round_ = opened.get(incarnation)
            if round_ is None or round_.request_id != request_id:
                round_ = self._round_named(source, request_id, incarnation)
                if round_ is None:
                    continue
            tally = round_.tally or self._no_tally(round_)
            if unsettled is not None:
                unsettled[incarnation] = None
            voted = tally.terminal_mask
            if voted & bit:
                self._repeat_terminal(round_, tally, source, outcome, disposition, reason)
                continue
            if outcome or disposition or reason:
                self.check(source, record)
                if disposition and not outcome:
                    context.blame(source, "voted COMPLETED with QUARANTINE", round_)
                tally.terminal_votes = {**tally.terminal_votes, source: (outcome, disposition, reason)}
            tally.terminal_mask = voted = voted | bit
            round_.touched_s = elapsed_s
            round_.story.append(voted_then)  # one of each member: bounded as it is
            if round_.uses_ready and self._ends_attempt(round_, tally, source):
                continue
            if voted == all_mask:
                self._commit(round_, tally)
        if decisions and deliver is not None:
            deliver()

    def _hear_other(self, source: int, record: Record) -> None:
        """Anything but a terminal vote."""
        kind, outcome, disposition, reason, attempt, request_id, incarnation = record
        if NEEDS_CHECK[kind] or outcome or disposition or reason:
            self.check(source, record)
            if not ABOUT_ROUNDS[kind]:
                self.on_the_domain(source, record)
                return
        round_ = self._round_named(source, request_id, incarnation)
        if round_ is None:
            return
        tally = round_.tally or self._no_tally(round_)
        if self.unsettled is not None:
            self.unsettled[incarnation] = None
        if kind == _DOUBT:
            self._count_doubt(round_, tally, source, reason)
        else:
            self._count_ready(round_, tally, source, kind, reason, attempt)

    def _round_named(self, source: int, request_id: int, incarnation: int) -> Round | None:
        """The round of a record, which may open with it; None: it is over."""
        round_ = self.rounds.open.get(incarnation)
        if round_ is None:
            return self.rounds.unheard(source, request_id, incarnation)
        if round_.request_id != request_id:
            told = f"calls incarnation {incarnation} request {request_id}, not {round_.request_id}"
            self.context.blame(source, told, round_)
        return round_

    @staticmethod
    def _no_tally(round_: Round) -> NoReturn:
        raise Violation(FaultCode.INTERNAL, "a member's record at a rank that does not count", round_)

    def _ends_attempt(self, round_: Round, tally: Tally, source: int) -> bool:
        """A terminal vote beside readiness: where the attempt gathers votes it ends, and those who voted for it must let go."""
        phase = tally.phase
        # The fence, as the coordinator sees it: whoever takes part in an attempt has activated, or it is over.
        part = (tally.votes | tally.withdrawn | tally.abort_acks) & ~tally.activated
        if phase is not _FINAL and part >> source & 1:
            self.context.blame(source, "voted terminal while its readiness attempt is open", round_)
        if phase is not _GATHERING:
            return False
        if tally.votes:
            self.abort(round_, tally, _TERMINAL_VOTE)
        elif tally.terminal_mask != self.context.all_mask and round_.heard:
            self.end_attempt(round_)  # nobody need join it
        else:
            return False
        return True

    def check(self, source: int, record: Record) -> None:
        """Whether this member may say so: the kind, its author and its small fields."""
        kind, outcome, disposition, reason = record[:4]
        if not MEMBERS_SAY[kind]:
            self.context.blame(source, f"may not send kind {kind}")
        wrong = too_great(kind, outcome, disposition)
        if wrong:
            self.context.blame(source, f"sent {wrong}")
        if reason > REASON_MAX and kind < Kind.FAIL_STOP:  # whose code stands in this field
            self.context.blame(source, f"sent the unknown reason {reason}")
        if SCHEDULER_SAYS[kind] and source != self.context.scheduler:
            self.context.blame(source, f"is not the scheduling rank: {Kind(kind).name}")

    def _count_ready(self, round_: Round, tally: Tally, source: int, kind: int, reason: int, attempt: int) -> None:
        """A member's record about readiness."""
        context = self.context
        if not round_.uses_ready:
            context.blame(source, "uses readiness that this admission has not", round_)
        if attempt != tally.attempt:
            if attempt < tally.attempt:
                self.rounds.stale += 1
                return
            context.blame(source, f"is in attempt {attempt} before {tally.attempt} was finalized", round_)
        rule = COORDINATOR_RULE[tally.phase][kind]
        if rule is _COUNT_IT:
            _COUNT[kind](self, round_, tally, source, reason)
        elif rule is _IGNORE:
            self.ignored += 1
        elif rule is _ADVISE:
            if tally.recalled >> source & 1:
                self.streams.duplicates += 1
            else:
                tally.recalled |= 1 << source
                self._advise(round_, tally, source, AdviceKind.RECALL, reason)
        elif rule is _NOTE:
            tally.withdrawn |= 1 << source
            tally.abort_reason = max(tally.abort_reason, reason)
        elif rule is _ABORT_UNLESS_LEASED and tally.acks >> source & 1:
            self.ignored += 1
        elif rule is _FAULT:
            self._unexpected(round_, source, kind, f"in phase {tally.phase.name}")
        elif rule is _ABORT_UNLESS_ACTIVATED and tally.activated:
            self._unexpected(round_, source, kind, "after an activation")
        else:  # ABORT, or one of its conditional forms whose condition does not hold
            tally.withdrawn |= 1 << source
            self.rounds.note(round_, "revoke" if kind == _REVOKE else "withdraw", source)
            self.abort(round_, tally, reason)

    def _count_vote(self, round_: Round, tally: Tally, source: int, _reason: int) -> None:
        if tally.terminal_mask >> source & 1:
            self._unexpected(round_, source, _VOTE, "after its terminal vote")
        tally.votes |= 1 << source
        self.rounds.note(round_, "vote", source)
        if tally.terminal_mask:
            self.abort(round_, tally, _TERMINAL_VOTE)
        elif tally.votes == self.context.all_mask:
            self._decide(round_, tally, _PREPARE)

    def _count_ack(self, round_: Round, tally: Tally, source: int, _reason: int) -> None:
        tally.acks |= 1 << source
        self.rounds.note(round_, "ack", source)
        if tally.acks == self.context.all_mask:
            self._decide(round_, tally, _RELEASE)

    def _count_activation(self, round_: Round, tally: Tally, source: int, _reason: int) -> None:
        tally.activated |= 1 << source
        self.rounds.note(round_, "activate ack", source)
        if tally.activated == self.context.all_mask:
            self._decide(round_, tally, _COMPLETE)

    def _count_abort_ack(self, round_: Round, tally: Tally, source: int, reason: int) -> None:
        tally.abort_acks |= 1 << source
        tally.abort_reason = max(tally.abort_reason, reason)
        self.rounds.note(round_, "abort ack", source)
        if tally.abort_acks == self.context.all_mask:
            self.finalize(round_, tally)

    def _repeat_terminal(
        self, round_: Round, tally: Tally, source: int, outcome: int, disposition: int, reason: int
    ) -> None:
        """A vote of a member that has voted."""
        if tally.terminal_votes.get(source, PLAIN_VOTE) != (outcome, disposition, reason):
            self.context.blame(source, "changed its terminal vote", round_)
        self.streams.duplicates += 1

    def _count_doubt(self, round_: Round, tally: Tally, source: int, reason: int) -> None:
        """A member lacks proof: passed on once."""
        if tally.doubted >> source & 1:
            self.streams.duplicates += 1
            return
        tally.doubted |= 1 << source
        self.rounds.note(round_, "doubt", source)
        self._advise(round_, tally, source, AdviceKind.DOUBT, reason)

    def _advise(self, round_: Round, tally: Tally, source: int, kind: AdviceKind, reason: int) -> None:
        self.streams.tell_scheduler(
            (int(Kind.ADVICE), source, int(kind), reason, tally.attempt, round_.request_id, round_.incarnation)
        )

    def _unexpected(self, round_: Round, source: int, kind: int, where: str) -> NoReturn:
        raise Violation(
            FaultCode.PROTOCOL,
            f"unexpected {Kind(kind).name} of rank {self.context.name(source)} {where}",
            round_,
            source,
        )

    # -- decisions --------------------------------------------------------------------------------------------------

    def abort(self, round_: Round, tally: Tally, reason: int) -> None:
        """The attempt ends."""
        tally.abort_acks = 0
        tally.abort_reason = max(tally.abort_reason, reason)
        self._decide(round_, tally, _ABORT, reason=tally.abort_reason)

    def finalize(self, round_: Round, tally: Tally) -> None:
        """Everybody let go of the attempt: what follows depends on the greatest reason."""
        reason = tally.abort_reason
        if tally.terminal_mask or reason == Reason.TERMINAL_VOTE:  # a group may hold a vote that is not cast here yet
            mode = FinalizeMode.TERMINAL
        elif reason > TRANSIENT_MAX:
            mode = FinalizeMode.CLOSED
        else:
            mode = FinalizeMode.REOPEN
        if mode is FinalizeMode.REOPEN:
            self._decide(round_, tally, Decision.FINALIZE_REOPEN, outcome=int(mode), reason=reason)
            tally.next_attempt()
        else:
            self._decide(round_, tally, Decision.FINALIZE_LAST, outcome=int(mode), reason=reason)
            if tally.terminal_mask == self.context.all_mask:
                self._commit(round_, tally)

    def _commit(self, round_: Round, tally: Tally) -> None:
        """All have voted: the decision, once, as soon as no readiness attempt is in progress.

        Not by way of ``_decide``: here a phase without COMMIT is no defect, and the round ends with its story.
        """
        after = PHASE_NEXT[tally.phase][_COMMIT]
        if after is None:
            return
        outcome, disposition = self._reduce(round_, tally) if tally.terminal_votes else (0, 0)
        tally.phase = after
        self.streams.fan_out((_COMMITS, outcome, disposition, 0, tally.attempt, round_.request_id, round_.incarnation))

    def _reduce(self, round_: Round, tally: Tally) -> tuple[int, int]:
        """The greatest outcome and disposition; the reasons are told first."""
        outcome = disposition = packed = 0
        for member, (one_outcome, one_disposition, one_reason) in tally.terminal_votes.items():
            if one_outcome > outcome:
                outcome = one_outcome
            if one_disposition > disposition:
                disposition = one_disposition
            packed |= one_reason << (8 * member)
        self.tell_reasons(packed, round_.incarnation)
        return outcome, disposition

    def tell_reasons(self, packed: int, incarnation: int) -> None:
        """Reasons, eight bits each: eight of them per record, before the COMMIT on every stream alike."""
        chunk = 0
        while packed:
            self.streams.fan_out((_REASONS, chunk, 0, 0, 0, packed & (2**64 - 1), incarnation))
            packed >>= 64
            chunk += 1

    def _decide(
        self, round_: Round, tally: Tally, decision: Decision, outcome: int = 0, disposition: int = 0, reason: int = 0
    ) -> None:
        """Make a decision, where the table allows it: one record to everybody whom it concerns, in this one step."""
        after = PHASE_NEXT[tally.phase][decision]
        kind, name = _KIND_OF[decision]
        if after is None:
            raise Violation(FaultCode.INTERNAL, f"{decision.name} decided in phase {tally.phase.name}", round_)
        tally.phase = after
        self.rounds.note(round_, name, self.context.me)
        record = (kind, outcome, disposition, reason, tally.attempt, round_.request_id, round_.incarnation)
        if decision is _RELEASE:
            self.streams.tell_scheduler(record)
        else:
            self.streams.fan_out(record)


_COUNT = {
    _VOTE: Coordinator._count_vote,
    int(Kind.ACK): Coordinator._count_ack,
    int(Kind.ACTIVATE_ACK): Coordinator._count_activation,
    int(Kind.ABORT_ACK): Coordinator._count_abort_ack,
}
