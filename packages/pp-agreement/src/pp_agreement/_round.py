"""The record of one admission at one rank: what the rank does itself, and what the coordinator counted."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pp_agreement._events import Key, Record, new
from pp_agreement._state import Phase, ReadyState, TerminalState

Entry = tuple[float, str, int]
"""An entry of a story: when, what, whose."""
PLAIN_VOTE = (0, 0, 0)
"""COMPLETED, RELEASE, without a reason: what nearly all votes are."""
EXPIRED_S = float("-inf")
NO_VOTES: Mapping[int, tuple[int, int, int]] = MappingProxyType({})
NEXT_NOTHING, NEXT_PUBLISH, NEXT_WITHDRAW = 0, 1, 2
_IDLE, _OPEN, _GATHERING = ReadyState.IDLE, TerminalState.OPEN, Phase.GATHERING


ALWAYS_COUNTED = "attempt", "doubted", "phase", "terminal_mask", "terminal_votes"
COUNTED_OF_READINESS = "abort_acks", "abort_reason", "acks", "activated", "recalled", "votes", "withdrawn"


class Tally:
    """The coordinator's half of a round: sets of members as masks. Of a round without readiness; see ``ReadyTally``."""

    __slots__ = ALWAYS_COUNTED

    votes = 0  # for readiness, as all until ``recalled``: there is nothing to be counted, and setting one is an error
    withdrawn = 0
    acks = 0
    activated = 0
    abort_acks = 0
    abort_reason = 0
    recalled = 0

    def __init__(self) -> None:
        self.phase: Phase = _GATHERING
        self.attempt = 0  # the attempt that ``phase`` speaks of
        self.terminal_mask = 0
        self.terminal_votes: Mapping[int, tuple[int, int, int]] = NO_VOTES  # those that are not ``PLAIN_VOTE``
        self.doubted = 0

    def next_attempt(self) -> None:
        """Everything that speaks of one attempt only."""
        self.attempt += 1
        self.votes = self.withdrawn = self.acks = self.activated = self.abort_acks = self.recalled = 0
        self.abort_reason = 0

    def copy(self) -> Tally:
        twin = type(self).__new__(type(self))
        for name in ALWAYS_COUNTED if type(self) is Tally else (*ALWAYS_COUNTED, *COUNTED_OF_READINESS):
            setattr(twin, name, getattr(self, name))
        return twin

    def fingerprint(self) -> tuple[object, ...]:
        return (
            int(self.phase), self.attempt, self.votes, self.withdrawn, self.acks, self.activated, self.abort_acks,
            self.abort_reason, self.doubted, self.recalled, self.terminal_mask,
            tuple(sorted(self.terminal_votes.items())),
        )  # fmt: skip


class ReadyTally(Tally):
    """With readiness."""

    __slots__ = COUNTED_OF_READINESS

    def __init__(self) -> None:
        super().__init__()
        self.votes = 0
        self.withdrawn = 0  # members that ended the attempt, by WITHDRAW or REVOKE
        self.acks = 0
        self.activated = 0
        self.abort_acks = 0
        self.abort_reason = 0  # the greatest one that anybody gave
        self.recalled = 0  # members whose advice was passed on: of each once


class Course:
    """What an attempt has come to at this rank, and what the host wants of the next one."""

    __slots__ = ("aborted_for", "leased_at_s", "next_intent", "next_reason", "recalled", "told_reason")

    def __init__(self) -> None:
        self.aborted_for = 0  # reason of the ABORT
        self.told_reason = 0  # greatest reason that this rank gave in this attempt
        self.recalled = False  # this rank has said RECALL in this attempt
        self.leased_at_s: float | None = None
        self.next_intent = NEXT_NOTHING  # what the host wants of the next attempt
        self.next_reason = 0

    def copy(self) -> Course:
        twin = Course.__new__(Course)
        for name in Course.__slots__:
            setattr(twin, name, getattr(self, name))
        return twin

    def fingerprint(self) -> tuple[object, ...]:
        return self.aborted_for, self.told_reason, self.next_intent, self.next_reason, self.recalled


class _NoCourse(Course):
    """Of all rounds without readiness, which have no attempts: as in ``Tally``, setting one is an error."""

    __slots__ = ()

    aborted_for = 0
    told_reason = 0
    recalled = False
    leased_at_s = None
    next_intent = NEXT_NOTHING
    next_reason = 0

    def __init__(self) -> None:
        """Sets nothing: all of it is the class's."""

    def copy(self) -> Course:
        return self


NO_COURSE = _NoCourse()


class Round:
    """Everything one rank knows about one admission: its own half, and at the coordinator the tally."""

    __slots__ = (
        "course",
        "doubt_at_s",
        "heard",
        "held",
        "incarnation",
        "key",
        "older",
        "ready",
        "reasons",
        "request_id",
        "story",
        "tally",
        "terminal",
        "touched_s",
        "uses_ready",
        "vote",
        "voted_at_s",
    )

    def __init__(self, request_id: int, incarnation: int, tally: Tally | None, course: Course, now_s: float) -> None:
        self.request_id = request_id
        self.incarnation = incarnation
        self.key = new(Key, (request_id, incarnation, 0))  # of the attempt that runs: what hosts are given
        self.older: Round | None = None  # the next older open one of this request
        self.heard = False
        # A list, of the records that wait: the round is held back, since an older one must be decided here first.
        self.held: list[tuple[int, Record]] | None = None
        self.uses_ready = True
        self.tally = tally
        self.touched_s = now_s  # last progress
        self.story: list[Entry] = []  # told when it is read
        # this rank's own half
        self.course = course
        self.ready: ReadyState = _IDLE
        self.terminal: TerminalState = _OPEN
        self.vote = PLAIN_VOTE  # this rank's terminal one: outcome, disposition, reason
        self.voted_at_s = 0.0
        self.doubt_at_s: float | None = None  # EXPIRED_S: as long ago as its deadline
        self.reasons = 0  # packed, eight bits per member, from REASONS records

    @property
    def attempt(self) -> int:
        """The one that runs."""
        return self.key[2]

    @property
    def doubt_expired(self) -> bool:
        """Whether the deadline of this rank's doubt has passed."""
        return self.doubt_at_s == EXPIRED_S

    def next_attempt(self) -> None:
        """This rank's next attempt begins."""
        self.key = new(Key, (self.request_id, self.incarnation, self.attempt + 1))

    def copy(self) -> Round:
        """An independent copy, for the explorer."""
        twin = Round.__new__(Round)
        for name in Round.__slots__:
            setattr(twin, name, getattr(self, name))
        twin.tally = None if self.tally is None else self.tally.copy()
        twin.course = self.course.copy()
        twin.story = list(self.story)
        twin.held = None if self.held is None else list(self.held)
        return twin

    def fingerprint(self) -> tuple[object, ...]:
        """All that decides the future, without times and stories."""
        return (
            self.request_id, self.incarnation, self.heard, self.held is not None, self.uses_ready, tuple(self.held or ()),
            self.attempt, int(self.ready), int(self.terminal), self.vote, self.course.fingerprint(), self.doubt_expired,
            self.reasons, () if self.tally is None else self.tally.fingerprint(),
        )  # fmt: skip
