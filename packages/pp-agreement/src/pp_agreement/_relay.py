"""A leader joins two cores: inside its group it counts and passes on, outside it is the group's one voice.

Inside, ``GroupCore`` is a core whose coordinator decides nothing: ``Relay`` counts members as every coordinator does, and what
would be a decision is what the group has to say outside. Outside, ``OuterCore`` is an ordinary member of the domain of leaders.
``Bridge`` stands between them: *rising*, it looks at what the group has counted and what its voice may say, and says it;
*falling*, a decision about the domain becomes the group's, one record to each of its ranks in one step. So every rank of every
group sees the states, decisions and order that it would see in one domain of all ranks, and no rank of a group may act on
anything that its group has not been told.

A voice does nothing of its own accord: timers of leases, and a drain's revocations, are the group's, and rise. In the
scheduling rank's group the voice therefore stays released until all its ranks have activated, and nothing takes that lease
back meanwhile: only the scheduling rank may, and its own activation forbids it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

from pp_agreement import _events as ev
from pp_agreement._config import AgreementConfig
from pp_agreement._context import Violation
from pp_agreement._coordinator import Coordinator
from pp_agreement._ending import Ending
from pp_agreement._events import AdviceKind, Disposition, FaultCode, FinalizeMode, Key, Outcome, Reason
from pp_agreement._groups import Groups
from pp_agreement._machine import PEER, AgreementCore
from pp_agreement._round import EXPIRED_S, PLAIN_VOTE, Round, Tally
from pp_agreement._state import (
    DISPOSITIONS,
    FENCE,
    OUTCOMES,
    REASONS,
    UNLEASED,
    UNSCHEDULED,
    Decision,
    Kind,
    Phase,
    ReadyState,
    TerminalInput,
    TerminalState,
)


@dataclass(eq=False, repr=False)
class Relay(Coordinator):
    """The coordinator inside a group: counts, and leaves deciding to the domain of the leaders."""

    unsettled: dict[int, None] = field(default_factory=dict)
    asked: dict[tuple[int, AdviceKind], int] = field(default_factory=dict)
    """Advice that the voice has still to give, and its reason."""

    def __post_init__(self) -> None:
        self.unsettled, self.asked = dict(self.unsettled), dict(self.asked)  # a copy's are its own

    # -- what members say: counted as ever --------------------------------------------------------------------------

    def _advise(self, round_: Round, tally: Tally, source: int, kind: AdviceKind, reason: int) -> None:
        if self.context.is_scheduler:
            super()._advise(round_, tally, source, kind, reason)
        if kind is AdviceKind.DOUBT or not self.context.is_scheduler:
            place = (round_.incarnation, kind)
            self.asked[place] = max(reason, self.asked.get(place, 0))

    def abort(self, round_: Round, tally: Tally, reason: int) -> None:
        """The group wants the attempt to end, and says why."""
        tally.abort_reason = max(tally.abort_reason, reason)
        self.unsettled[round_.incarnation] = None

    def finalize(self, round_: Round, tally: Tally) -> None:
        """Everybody in the group let go; what follows is not decided here."""

    def _commit(self, round_: Round, tally: Tally) -> None:
        """Nor is the outcome."""

    def _decide(
        self,
        round_: Round,
        tally: Tally,
        decision: Decision,
        outcome: int = 0,
        disposition: int = 0,
        reason: int = 0,
    ) -> None:
        """Whoever counts to the end here has something to say, see :class:`Bridge`."""

    # -- what the domain has decided --------------------------------------------------------------------------------

    def pass_on(
        self,
        round_: Round,
        tally: Tally,
        decision: Decision,
        *,
        outcome: int = 0,
        disposition: int = 0,
        reason: int = 0,
    ) -> None:
        """A decision about the domain is one about the group: one record to each of its ranks, in this one step."""
        if decision is Decision.ABORT:
            tally.abort_acks = 0
        elif decision in (Decision.FINALIZE_REOPEN, Decision.FINALIZE_LAST, Decision.COMMIT):
            self.asked.pop((round_.incarnation, AdviceKind.RECALL), None)
            if decision is Decision.COMMIT or outcome == FinalizeMode.CLOSED:
                self.asked.pop((round_.incarnation, AdviceKind.DOUBT), None)
        super()._decide(round_, tally, decision, outcome=outcome, disposition=disposition, reason=reason)
        if decision is Decision.FINALIZE_REOPEN:
            tally.next_attempt()


class GroupEnding(Ending):
    """Drain inside a group: its reports are compared here, the proof comes from the domain of the leaders."""

    proven: int | None = None  # the digest that every rank of the group has reported

    def _conclude(self, digest: int, last: int) -> None:
        self.proven = digest

    def begin(self, last: int) -> None:
        """The domain drains; in the scheduling rank's group that was said here first."""
        if self.declared is None:
            self.from_member(self.context.me, Kind.DRAIN, 0, last)

    def prove(self, last: int) -> None:
        """The domain is drained, and so is the group: its ranks compare with what they reported."""
        if self.proven is None:
            raise Violation(FaultCode.DRAIN_MISMATCH, f"drained at {last} without this group's report")
        super()._conclude(self.proven, last)

    def fingerprint(self) -> tuple[object, ...]:
        """All of it decides the future."""
        return (*super().fingerprint(), self.proven)


class OuterEnding(Ending):
    """Drain among the leaders: one reports when its whole group has."""

    may_report = False

    def _end_unscheduled(self) -> None:
        """The group ends its own attempts, and its voice follows: while it lags behind an activation it may not revoke."""

    def report(self) -> None:
        """See :class:`Ending`."""
        if self.may_report:
            super().report()

    def fingerprint(self) -> tuple[object, ...]:
        """All of it decides the future."""
        return (*super().fingerprint(), self.may_report)


def voice_config(config: AgreementConfig) -> AgreementConfig:
    """The bounds among the leaders: leases expire in the scheduling rank's group, see the module."""
    return replace(config, lease_timeout_s=None)


class OuterCore(AgreementCore):
    """A leader among the leaders."""

    ending_type = OuterEnding
    ending: OuterEnding

    def __init__(self, groups: Groups, rank: int, config: AgreementConfig, *, session: int = 0) -> None:
        super().__init__(groups.outer, rank, voice_config(config), session=session)

    def vouch(self, now_s: float) -> None:
        """Every rank of the group has decided all admissions: this leader may report so."""

        def vouched() -> None:
            self.ending.may_report = True  # the report itself follows at the end of the step, as after any other

        self.call(vouched, (), now_s, PEER)

    def trust(self, round_: Round, now_s: float) -> None:
        """The deadline of a doubt in the group has passed, as the doubting rank's own core has made sure."""

        def trusted() -> None:
            round_.doubt_at_s = EXPIRED_S

        self.call(trusted, (), now_s, PEER)


class GroupCore(AgreementCore):
    """One rank inside its group; the leader's counts and passes on."""

    coordinator_type = Relay
    ending_type = GroupEnding
    coordinator: Relay
    ending: GroupEnding

    def __init__(self, groups: Groups, rank: int, config: AgreementConfig, *, session: int = 0) -> None:
        super().__init__(groups.inner(rank), rank, config, session=session)

    def _heard_late(self, round_: Round) -> None:
        """See :class:`AgreementCore`. What the group said before its leader heard of the request can rise now."""
        super()._heard_late(round_)
        self.coordinator.unsettled[round_.incarnation] = None

    def tell(self, event: ev.AgreementEvent) -> None:
        """At a leader: what it has heard outside and its own host is told as it is."""
        if self.fault is not None:
            return
        if isinstance(event, ev.Verdict):
            self.context.judge(event)
        else:
            self.context.emit(event)

    def fall(self, event: ev.AgreementEvent, reasons: int, now_s: float) -> None:
        """At a leader: a decision about the domain reaches the group.

        Args:
            event: What the voice was told.
            reasons: With ``Committed``: of each group the greatest reason, eight bits each.
            now_s: See ``step``.
        """
        self.call(self._on_fallen, (event, reasons), now_s, PEER)

    def _on_fallen(self, event: ev.AgreementEvent, reasons: int) -> None:
        if isinstance(event, ev.DrainStarted):
            self.ending.begin(event.last_incarnation)
            return
        if isinstance(event, ev.Drained):
            self.ending.prove(event.last_incarnation)
            return
        key: Key = event.key  # type: ignore[attr-defined]
        round_ = self.rounds.open.get(key.incarnation)
        tally = None if round_ is None else round_.tally
        if round_ is None or tally is None:
            raise Violation(FaultCode.INTERNAL, f"{event} of a round that the group has not")
        relay = self.coordinator
        if isinstance(event, ev.Committed):
            relay.tell_reasons(reasons, key.incarnation)
            relay.pass_on(
                round_, tally, Decision.COMMIT, outcome=int(event.outcome), disposition=int(event.disposition)
            )
        elif isinstance(event, ev.Finalized):
            reopened = event.mode is FinalizeMode.REOPEN
            decision = Decision.FINALIZE_REOPEN if reopened else Decision.FINALIZE_LAST
            relay.pass_on(round_, tally, decision, outcome=int(event.mode), reason=int(event.reason))
        elif isinstance(event, ev.Aborted):
            relay.pass_on(round_, tally, Decision.ABORT, reason=int(event.reason))
        else:
            relay.pass_on(round_, tally, _FALLS[type(event)])


_REASON_MAY_GROW = (ReadyState.WITHDRAWN, ReadyState.REVOKED, ReadyState.ABORTING)
"""Those of ``UNWINDING`` in which the voice has not said its last word about the attempt yet."""
_FALLS: dict[type, Decision] = {
    ev.Prepared: Decision.PREPARE,
    ev.Released: Decision.RELEASE,
    ev.Completed: Decision.COMPLETE,
}
_PASSED_ON = (
    ev.Prepared,
    ev.Released,
    ev.Completed,
    ev.Aborted,
    ev.Finalized,
    ev.Committed,
    ev.DrainStarted,
    ev.Drained,
)
FOR_THE_HOST = (ev.Advice, ev.SilenceVerdict, ev.SilenceEnded, ev.DeathVerdict)
"""What a leader hears outside and its own host is told as it is."""


def _told(fault: ev.Fault) -> str:
    """A diagnosis in words that name the suspect: as a number it is known in its own domain only."""
    suspect = fault.suspect_rank
    named = f"rank {suspect} died" if fault.code is FaultCode.DEATH else f"rank {suspect}"
    known = suspect is None or re.search(rf"\b{named}\b", fault.detail)
    return fault.detail if known else f"{fault.detail}: {named}"


class Voice(Protocol):
    """The calls by which a voice is made to speak."""

    def publish_ready(self, key: Key) -> object: ...
    def withdraw(self, key: Key, reason: Reason = ...) -> object: ...
    def acknowledge_prepare(self, key: Key) -> bool: ...
    def acknowledge_abort(self, key: Key) -> None: ...
    def activate(self, keys_in_schedule_order: Iterable[Key]) -> int: ...
    def revoke(self, key: Key, reason: Reason = ...) -> object: ...
    def recall(self, key: Key, reason: Reason = ...) -> bool: ...
    def doubt(self, key: Key, reason: Reason = ...) -> bool: ...
    def vote_terminal(
        self, key: Key, outcome: Outcome, disposition: Disposition = ..., reason: Reason = ...
    ) -> bool: ...
    def fail(self, detail: str, code: FaultCode = ...) -> None: ...


class Bridge:
    """Joins a leader's two cores.

    It holds no protocol state: what the voice has to say is read off the group's tally and the voice's own round, so that
    nothing is lost whenever it is looked at next.

    Args:
        group: The core inside the group.
        voice: The core among the leaders.
        calls: The voice's local calls, by the names that an ``Agreement`` gives them.
        perform: Performs a method of either core: (method, arguments without the time).
    """

    def __init__(self, group: GroupCore, voice: OuterCore, calls: Voice, perform: Callable[..., None]) -> None:
        self.group = group
        self.voice = voice
        self.calls = calls
        self.perform = perform

    def join(self, take: Callable[[], tuple[ev.AgreementEvent, ...]]) -> None:
        """Bring both to the same: after anything that happened to either.

        Args:
            take: What the voice was told since the last time, in order.
        """
        self.speak()
        while events := take():
            for event in events:
                self.hear(event)

    # -- falling ----------------------------------------------------------------------------------------------------

    def hear(self, event: ev.AgreementEvent) -> None:
        """The voice was told something: the group is told, or this rank's host."""
        if isinstance(event, ev.Fault):
            self.perform(self.group.fail, event.code, _told(event))
            return
        if isinstance(event, FOR_THE_HOST):
            if isinstance(event, ev.Advice) and event.source_rank == self.group.rank:
                return  # it came to the host inside the group already
            self.group.tell(event)
            return
        if isinstance(event, _PASSED_ON):
            reasons = 0
            if isinstance(event, ev.Committed):
                for place, reason in enumerate(event.reasons):
                    reasons |= int(reason) << 8 * place
            self.perform(self.group.fall, event, reasons)
        key = getattr(event, "key", None)
        if key is not None:
            self.settle(key.incarnation)
        self.speak()

    # -- rising -----------------------------------------------------------------------------------------------------

    def speak(self) -> None:
        """Say what the group has to say by now."""
        unsettled = self.group.coordinator.unsettled
        while unsettled and self.voice.fault is None:
            incarnation = next(iter(unsettled))
            self.settle(incarnation)
            unsettled.pop(incarnation, None)
        if self.voice.fault is None:
            ending = self.group.ending
            if ending.proven is not None and not self.voice.ending.may_report:
                self.perform(self.voice.vouch)
            if self.group.fault is not None:
                self.calls.fail(_told(self.group.fault), self.group.fault.code)

    def settle(self, incarnation: int) -> None:
        """Compare what the group has counted about a round with what its voice has said, and say what is missing."""
        round_, above = self.group.rounds.open.get(incarnation), self.voice.rounds.open.get(incarnation)
        if round_ is None or above is None or not (round_.heard and above.heard):
            return
        tally = round_.tally
        if tally is None or tally.attempt != above.attempt or self.voice.fault is not None:
            return
        key = Key(above.request_id, incarnation, above.attempt)
        if round_.uses_ready:
            self._settle_readiness(round_, tally, above, key)
        asked = self.group.coordinator.asked
        doubt = asked.get((incarnation, AdviceKind.DOUBT))
        if doubt is not None and above.terminal is TerminalState.OPEN and above.ready in FENCE[TerminalInput.DOUBT]:
            del asked[incarnation, AdviceKind.DOUBT]
            self.calls.doubt(key, REASONS[doubt])
        full = tally.terminal_mask == self.group.context.all_mask
        if full and above.terminal < TerminalState.VOTED and above.ready in FENCE[TerminalInput.VOTE]:
            self._vote(tally, above, key)

    def _settle_readiness(self, round_: Round, tally: Tally, above: Round, key: Key) -> None:
        full = self.group.context.all_mask
        if tally.withdrawn or tally.abort_reason or (tally.terminal_mask and tally.phase is Phase.ABORTING):
            self._end(tally, above, key)
        elif above.ready is ReadyState.IDLE and above.terminal < TerminalState.VOTED and tally.votes == full:
            self.calls.publish_ready(key)
        if above.ready is ReadyState.PREPARED and tally.phase is Phase.GRANTING and tally.acks == full:
            granted = self.calls.acknowledge_prepare(key)
            if granted and not self.group.is_scheduler:  # nobody is told: the schedule may come from now on
                self.perform(self.group.fall, ev.Released(key), 0)
        if above.ready is ReadyState.LEASED:
            reason = self.group.coordinator.asked.pop((key.incarnation, AdviceKind.RECALL), None)
            if reason is not None:
                self.calls.recall(key, REASONS[reason])
        if above.ready in UNSCHEDULED and tally.phase is Phase.RELEASED and tally.activated == full:
            self.calls.activate((key,))
        if above.ready is ReadyState.ABORTING and tally.phase is Phase.ABORTING and tally.abort_acks == full:
            self.calls.acknowledge_abort(key)

    def _end(self, tally: Tally, above: Round, key: Key) -> None:
        """Somebody in the group wants the attempt to end: the voice withdraws or revokes, with the greatest reason."""
        reason = max(tally.abort_reason, int(Reason.TERMINAL_VOTE) if tally.terminal_mask else 0)
        if above.ready in UNSCHEDULED:
            self.calls.revoke(key, REASONS[reason])
        elif (above.ready in UNLEASED and above.terminal < TerminalState.VOTED) or (
            above.ready in _REASON_MAY_GROW and reason > above.course.told_reason
        ):
            self.calls.withdraw(key, REASONS[reason])

    def _vote(self, tally: Tally, above: Round, key: Key) -> None:
        """Every rank of the group has voted: the greatest of each is the group's vote."""
        votes = (PLAIN_VOTE, *tally.terminal_votes.values())
        outcome, disposition = max(vote[0] for vote in votes), max(vote[1] for vote in votes)
        if disposition and not above.doubt_expired:
            self.perform(self.voice.trust, above)
        reason = max(vote[2] for vote in votes)
        self.calls.vote_terminal(key, OUTCOMES[outcome], DISPOSITIONS[disposition], REASONS[reason])
