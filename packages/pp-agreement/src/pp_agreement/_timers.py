"""Deadlines of rounds, and the three kinds of them: a doubt's, a lease's, and the one of a round that nobody moves.

Each kind knows the earliest time at which anything of it can be due, and ``Timers`` the earliest of all, so a poll in which
nothing is due makes one comparison.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from pp_agreement._config import AgreementConfig
from pp_agreement._context import Context, Violation
from pp_agreement._events import FaultCode
from pp_agreement._round import Round
from pp_agreement._state import READY_OPEN, UNSCHEDULED, Phase, TerminalState

NEVER_S = float("inf")


class Deadlines:
    """One deadline per round; whether any is due is one comparison with ``earliest_s``."""

    __slots__ = ("_heap", "earliest_s", "live")

    def __init__(self) -> None:
        self.live: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []
        self.earliest_s = NEVER_S  # may be one that was dropped: a look too early costs a look

    def set(self, incarnation: int, deadline_s: float) -> None:
        """Set or move a deadline."""
        self.live[incarnation] = deadline_s
        heapq.heappush(self._heap, (deadline_s, incarnation))
        self.earliest_s = self._heap[0][0]
        if len(self._heap) > 2 * len(self.live) + 64:  # what was dropped or moved must not pile up
            self._heap = [(at_s, number) for number, at_s in self.live.items()]
            heapq.heapify(self._heap)
            self.earliest_s = self._heap[0][0]

    def drop(self, incarnation: int) -> None:
        """No deadline any more, if there was one."""
        self.live.pop(incarnation, None)

    def due(self, now_s: float) -> Iterator[int]:
        """Take those that have passed, in their order."""
        heap, live = self._heap, self.live
        while heap and heap[0][0] <= now_s:
            deadline_s, incarnation = heapq.heappop(heap)
            self.earliest_s = heap[0][0] if heap else NEVER_S
            if live.get(incarnation) == deadline_s:
                del live[incarnation]
                yield incarnation

    def copy(self) -> Deadlines:
        twin = Deadlines()
        twin.live = dict(self.live)
        twin._heap = list(self._heap)
        twin.earliest_s = self.earliest_s
        return twin


class Timers:
    """All deadlines of one core."""

    def __init__(self, config: AgreementConfig) -> None:
        self._lease_timeout_s = config.lease_timeout_s
        self._doubt_deadline_s = config.doubt_deadline_s
        self._round_timeout_s = config.round_timeout_s
        self.doubts = Deadlines()
        self.leases = Deadlines()
        self.idle_due_s = NEVER_S  # before this time no open round can have been idle for its timeout
        self.due_s = NEVER_S  # before this time nothing of any kind is due

    def opened(self, now_s: float) -> None:
        """A round is open, and none was watched."""
        if self._round_timeout_s is not None:
            self.idle_due_s = now_s + self._round_timeout_s
            self.look_ahead()

    def leased(self, incarnation: int, now_s: float) -> None:
        """The scheduling rank granted its lease."""
        if self._lease_timeout_s is not None:
            self.leases.set(incarnation, now_s + self._lease_timeout_s)
            self.look_ahead()

    def doubted(self, incarnation: int, now_s: float) -> None:
        """A rank's first doubt."""
        self.doubts.set(incarnation, now_s + self._doubt_deadline_s)
        self.look_ahead()

    def look_ahead(self) -> None:
        """Note when the first of all kinds can be due."""
        self.due_s = min(self.idle_due_s, self.doubts.earliest_s, self.leases.earliest_s)

    def retired(self, incarnation: int) -> None:
        """The round is decided."""
        self.doubts.drop(incarnation)
        self.leases.drop(incarnation)

    def watch(self, context: Context, rounds: dict[int, Round], now_s: float) -> None:
        """Stop the domain for a round that others owe something and that nothing has moved for the timeout.

        Progress moves only a round's ``touched_s``; when the earliest may be due, all are looked at: once per timeout where
        rounds are decided sooner than that.
        """
        timeout_s, due_s = self._round_timeout_s, NEVER_S
        if timeout_s is None:
            return
        for round_ in rounds.values():
            if round_.touched_s + timeout_s <= now_s:
                if is_waiting(round_):
                    what = waiting_for(context, round_)
                    raise Violation(FaultCode.ROUND_TIMEOUT, f"no progress for {timeout_s} s: {what}", round_)
                round_.touched_s = now_s  # nobody owes it anything: its time starts anew
            due_s = min(due_s, round_.touched_s + timeout_s)
        self.idle_due_s = due_s

    def armed(self) -> tuple[object, ...]:
        """What can become due, without when; for explorers."""
        return tuple(sorted(self.doubts.live)), tuple(sorted(self.leases.live))

    def copy(self) -> Timers:
        twin = Timers.__new__(Timers)
        twin.__dict__.update(self.__dict__)
        twin.doubts, twin.leases = self.doubts.copy(), self.leases.copy()
        return twin


def is_waiting(round_: Round) -> bool:
    """Whether others owe this round something; a lease that waits for its schedule is exempt."""
    tally = round_.tally
    if round_.terminal is TerminalState.VOTED:
        return True
    if tally is not None:
        phase = tally.phase
        if phase is Phase.RELEASED:  # the first activation shows that the schedule has come
            return tally.activated != 0
        if tally.terminal_mask or phase in (Phase.GRANTING, Phase.ABORTING):
            return True
        if tally.votes and phase is not Phase.COMPLETE:
            return True
    return round_.ready in READY_OPEN and round_.ready not in UNSCHEDULED


def waiting_for(context: Context, round_: Round) -> str:
    """Who is missing, where that is known."""
    tally = round_.tally
    if tally is None:
        return f"{round_.ready.name}, {round_.terminal.name}; who is missing is unknown at this rank"
    if tally.phase is Phase.ABORTING:
        done, what = tally.abort_acks, "READY abort acknowledgement"
    elif tally.phase is Phase.GRANTING:
        done, what = tally.acks, "READY acknowledgement"
    elif tally.phase is Phase.RELEASED:
        done, what = tally.activated, "READY activation"
    elif tally.phase is Phase.GATHERING and tally.votes:
        done, what = tally.votes, "READY vote"
    else:
        done, what = tally.terminal_mask, "TERMINAL vote"
    missing = [str(r) for i, r in enumerate(context.domain.ranks) if not done >> i & 1]
    if not missing:  # inside a group, whose leader has spoken
        return f"every {what} of this group is here; another group's is missing"
    return f"{what} of rank {', '.join(missing)} missing"
