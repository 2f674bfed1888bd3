"""The invariants that one rank can see of itself; a violation is a defect of this package."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pp_agreement._errors import AgreementError
from pp_agreement._round import Round, Tally
from pp_agreement._state import FENCE, Phase, ReadyState, TerminalInput, TerminalState

if TYPE_CHECKING:
    from pp_agreement._machine import AgreementCore

_HOLDS_LEASE = (ReadyState.LEASED, ReadyState.RELEASED, ReadyState.ACTIVATED, ReadyState.COMPLETE)
_AT_SCHEDULER = (ReadyState.RELEASED, ReadyState.REVOKED)
_ABORTED = (ReadyState.ABORTING, ReadyState.ABORT_ACKED)


class InvariantViolation(AgreementError):
    """``validate()`` found the core inconsistent: a defect of this package."""


def validate(core: AgreementCore) -> None:
    """Raises :class:`InvariantViolation` with the round's story."""
    rounds, member, ending, streams = core.rounds, core.member, core.ending, core.streams
    credits = core.config.credits

    def need(holds: bool, what: str, round_: Round | None = None) -> None:
        if not holds:
            story = "" if round_ is None else "\n  " + "\n  ".join(core.context.tell(round_))
            raise InvariantViolation(f"rank {core.rank}: {what}{story}")

    need(sum(r.held is None for r in rounds.open.values()) == rounds.open_count, "open rounds are miscounted")
    need(rounds.open_count <= credits, "more open rounds than credits")
    need(len(rounds.held_back) <= credits, "more held rounds than credits")
    heard_open = sum(r.heard for r in rounds.open.values())
    need(member.committed + member.closed_rounds + heard_open == rounds.heard, "an admission was lost")
    need(not (ending.drained and rounds.open), "drained with open rounds")
    need(not (ending.reported and rounds.open), "reported with open rounds")
    need(not streams.words and not streams.decisions, "what is said inside a rank outlived a step")
    need(len(streams.intents) <= 4 * credits + 32, "too many unsent records")
    for queue in streams.queues.values():
        need(len(queue) <= core.config.queue_records_max, "a destination's queue is too long")
    for incarnation, round_ in rounds.open.items():
        need(round_.incarnation == incarnation <= rounds.heard + credits, "outside the credit window", round_)
        linked, newest = [], rounds.by_request.get(round_.request_id)
        while newest is not None:
            linked.append(newest.incarnation)
            newest = newest.older
        same = [i for i, other in rounds.open.items() if other.request_id == round_.request_id]
        need(sorted(linked) == sorted(same), "the index lost a round", round_)
        need(
            round_.heard or round_.ready in (ReadyState.IDLE, ReadyState.ABORTING), "state before the broadcast", round_
        )
        need(round_.heard or round_.terminal is TerminalState.OPEN, "a vote before the broadcast", round_)
        need((round_.ready is ReadyState.NOT_USED) == (not round_.uses_ready), "NOT_USED against the broadcast", round_)
        need(core.context.is_scheduler or round_.ready not in _AT_SCHEDULER, "RELEASE at another rank", round_)
        fenced = (
            round_.terminal < TerminalState.VOTED
            or round_.ready in FENCE[TerminalInput.VOTE]
            or round_.ready in _ABORTED  # it voted while idle, and the attempt of the others was aborted
        )
        need(fenced, "a terminal vote beside an open readiness attempt", round_)
        need(not (round_.vote[1] and not round_.vote[0]), "COMPLETED with QUARANTINE", round_)
        need((round_.held is not None) == (incarnation in rounds.held_back), "records are held without need", round_)
        need((round_.tally is not None) == core.context.is_coordinator, "a tally at the wrong rank", round_)
        if round_.tally is not None:
            _validate_tally(core, round_, round_.tally, need)


def _validate_tally(core: AgreementCore, round_: Round, tally: Tally, need) -> None:  # type: ignore[no-untyped-def]
    full, phase = core.context.all_mask, tally.phase
    need(tally.acks & ~tally.votes == 0, "a lease without a vote", round_)
    need(tally.activated & ~tally.acks == 0, "an activation without a lease", round_)
    granted = phase in (Phase.GRANTING, Phase.RELEASED, Phase.COMPLETE)
    need(not granted or tally.votes == full, "PREPARE without all votes", round_)
    need(phase not in (Phase.RELEASED, Phase.COMPLETE) or tally.acks == full, "RELEASE without all leases", round_)
    need(phase is not Phase.COMPLETE or tally.activated == full, "COMPLETE without all activations", round_)
    need(phase is not Phase.ABORTING or not tally.activated, "ABORT after an activation", round_)
    need(all(tally.terminal_mask >> m & 1 for m in tally.terminal_votes), "terminal votes are miscounted", round_)
    if not core.context.replicated and round_.attempt == tally.attempt and phase is not Phase.FINAL:
        leased = bool(tally.acks >> core.context.me & 1)
        excused = phase is Phase.ABORTING or round_.ready is ReadyState.REVOKED
        need(excused or leased == (round_.ready in _HOLDS_LEASE), "the own lease and the tally disagree", round_)
    if not core.context.replicated and core.fault is None and round_.held is None:
        voted = bool(tally.terminal_mask >> core.context.me & 1)
        need(voted == (round_.terminal >= TerminalState.VOTED), "the own vote and the tally disagree", round_)
