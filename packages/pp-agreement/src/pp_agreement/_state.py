"""States, tables and the round record.

Theory of operation
-------------------
One :class:`Round` per admission (incarnation) holds everything this rank knows about it. Two member machines run in it.
*Readiness* may be taken back until the rank grants its lease (ACK); from then on only the scheduling rank can end the
attempt (REVOKE), and only before it activates. *Terminal* is one immutable vote. A fence keeps them apart: a rank whose
readiness attempt is open casts no terminal vote, and a rank that voted terminal publishes no readiness.

The coordinator runs a third machine per round that only counts: sets of members as bit masks, one decision per attempt,
one COMMIT per round. Each decision is appended to all destinations' queues in one step. Members never talk to each other.

Three tables decide everything: ``READY_TRANSITIONS`` and ``TERMINAL_TRANSITIONS`` for a member's own state (no entry: an
illegal transition), ``COORDINATOR_RULES`` for what the coordinator does with a record in a phase. The figures and the
message table in docs/design.md are drawn from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import NamedTuple

from pp_agreement._events import Disposition, FinalizeMode, Outcome, Reason


class ReadyState(IntEnum):
    """A member's readiness of the current attempt."""

    NOT_USED = 0
    IDLE = 1
    VOTED = 2
    PREPARED = 3
    LEASED = 4
    RELEASED = 5
    REVOKED = 6
    ACTIVATED = 7
    COMPLETE = 8
    WITHDRAWN = 9
    ABORTING = 10
    ABORT_ACKED = 11
    FINALIZED = 12


class ReadyInput(IntEnum):
    """What moves a member's readiness; upper half: decisions of the coordinator."""

    PUBLISH = 0
    WITHDRAW = 1
    ACK = 2
    ACTIVATE = 3
    REVOKE = 4
    ABORT_ACK = 5
    PREPARE = 6
    RELEASE = 7
    COMPLETE = 8
    ABORT = 9
    FINALIZE_REOPEN = 10
    FINALIZE_LAST = 11


class TerminalState(IntEnum):
    """A member's terminal phase."""

    OPEN = 0
    DOUBTED = 1
    VOTED = 2
    COMMITTED = 3
    NOT_USED = 4


class TerminalInput(IntEnum):
    """What moves a member's terminal phase."""

    DOUBT = 0
    VOTE = 1
    COMMIT = 2
    CLOSE = 3


class Phase(IntEnum):
    """The coordinator's phase of the current attempt."""

    GATHERING = 0
    GRANTING = 1
    RELEASED = 2
    COMPLETE = 3
    ABORTING = 4
    FINAL = 5


class Kind(IntEnum):
    """Record kinds on the wire. Below 32 members speak, from 32 the coordinator, from 64 both."""

    VOTE = 1
    WITHDRAW = 2
    ACK = 3
    ACTIVATE_ACK = 4
    ABORT_ACK = 5
    REVOKE = 6
    RECALL = 7
    TERMINAL = 8
    DOUBT = 9
    DRAIN = 10
    DRAIN_REPORT = 11
    CLOSE = 12
    PREPARE = 32
    RELEASE = 33
    COMPLETE = 34
    ABORT = 35
    FINALIZE = 36
    COMMIT = 37
    REASONS = 38
    ADVICE = 39
    DRAIN_ALL = 40
    DRAIN_STATUS = 41
    DRAINED = 42
    CLOSE_ACK = 43
    VERDICT = 44
    FAIL_STOP = 64


class Message(NamedTuple):
    """One row of the message table: who may send a kind, and the greatest value of each small field."""

    author: str  # "member", "scheduler", "coordinator", "any"
    to: str  # "coordinator", "members", "scheduler"
    phase: str  # "READY", "TERMINAL", "DOMAIN"
    outcome_max: int
    disposition_max: int
    meaning: str


_R, _T, _D = "READY", "TERMINAL", "DOMAIN"
MESSAGES: Mapping[Kind, Message] = MappingProxyType(
    {
        Kind.VOTE: Message("member", "coordinator", _R, 0, 0, "ready for this attempt"),
        Kind.WITHDRAW: Message("member", "coordinator", _R, 0, 0, "not ready; abort the attempt (reason)"),
        Kind.ACK: Message("member", "coordinator", _R, 0, 0, "lease granted, irrevocable for the sender"),
        Kind.ACTIVATE_ACK: Message("member", "coordinator", _R, 0, 0, "activated by the schedule"),
        Kind.ABORT_ACK: Message("member", "coordinator", _R, 0, 0, "let go of the attempt (own reason)"),
        Kind.REVOKE: Message("scheduler", "coordinator", _R, 0, 0, "the lease will not be scheduled (reason)"),
        Kind.RECALL: Message("member", "coordinator", _R, 0, 0, "advice: please revoke (reason)"),
        Kind.TERMINAL: Message("member", "coordinator", _T, 2, 1, "immutable vote: outcome, disposition, reason"),
        Kind.DOUBT: Message("member", "coordinator", _T, 0, 0, "advice: no proof of quiescence yet (reason)"),
        Kind.DRAIN: Message("scheduler", "coordinator", _D, 0, 0, "incarnation is the last one admitted"),
        Kind.DRAIN_REPORT: Message("member", "coordinator", _D, 0, 0, "heard and decided all; digest in request_id"),
        Kind.CLOSE: Message("member", "coordinator", _D, 0, 0, "sends nothing more"),
        Kind.PREPARE: Message("coordinator", "members", _R, 0, 0, "all voted"),
        Kind.RELEASE: Message("coordinator", "scheduler", _R, 0, 0, "all leases granted"),
        Kind.COMPLETE: Message("coordinator", "members", _R, 0, 0, "all activated"),
        Kind.ABORT: Message("coordinator", "members", _R, 0, 0, "the attempt ends (first reason)"),
        Kind.FINALIZE: Message("coordinator", "members", _R, 2, 0, "all let go; mode in outcome, greatest reason"),
        Kind.COMMIT: Message("coordinator", "members", _T, 2, 1, "the decision: reclaim or retire"),
        Kind.REASONS: Message("coordinator", "members", _T, 7, 0, "eight members' reasons of the COMMIT that follows"),
        Kind.ADVICE: Message("coordinator", "scheduler", _D, 63, 1, "advice of the member in outcome"),
        Kind.DRAIN_ALL: Message("coordinator", "members", _D, 0, 0, "incarnation is the last one admitted"),
        Kind.DRAIN_STATUS: Message("coordinator", "members", _D, 0, 0, "request_id: mask of the members that reported"),
        Kind.DRAINED: Message("coordinator", "members", _D, 0, 0, "every member reported this number and digest"),
        Kind.CLOSE_ACK: Message("coordinator", "members", _D, 0, 0, "every member has closed"),
        Kind.VERDICT: Message("coordinator", "members", _D, 63, 1, "member in outcome is silent (0) or back (1)"),
        Kind.FAIL_STOP: Message("any", "members", _D, 63, 64, "domain stops; origin in outcome, suspect+1 beside it"),
    }
)

_S, _I = ReadyState, ReadyInput
READY_TRANSITIONS: Mapping[ReadyState, Mapping[ReadyInput, ReadyState]] = MappingProxyType(
    {
        _S.NOT_USED: {},
        _S.IDLE: {_I.PUBLISH: _S.VOTED, _I.WITHDRAW: _S.WITHDRAWN, _I.ABORT: _S.ABORTING},
        _S.VOTED: {_I.PREPARE: _S.PREPARED, _I.WITHDRAW: _S.WITHDRAWN, _I.ABORT: _S.ABORTING},
        _S.PREPARED: {_I.ACK: _S.LEASED, _I.WITHDRAW: _S.WITHDRAWN, _I.ABORT: _S.ABORTING},
        _S.LEASED: {
            _I.RELEASE: _S.RELEASED,
            _I.ACTIVATE: _S.ACTIVATED,
            _I.REVOKE: _S.REVOKED,
            _I.ABORT: _S.ABORTING,
        },
        _S.RELEASED: {_I.ACTIVATE: _S.ACTIVATED, _I.REVOKE: _S.REVOKED},
        _S.REVOKED: {_I.RELEASE: _S.REVOKED, _I.WITHDRAW: _S.REVOKED, _I.ABORT: _S.ABORTING},
        _S.ACTIVATED: {_I.COMPLETE: _S.COMPLETE},
        _S.COMPLETE: {},
        _S.WITHDRAWN: {_I.PREPARE: _S.WITHDRAWN, _I.WITHDRAW: _S.WITHDRAWN, _I.ABORT: _S.ABORTING},
        _S.ABORTING: {_I.WITHDRAW: _S.ABORTING, _I.ABORT_ACK: _S.ABORT_ACKED},
        _S.ABORT_ACKED: {
            _I.WITHDRAW: _S.ABORT_ACKED,
            _I.FINALIZE_REOPEN: _S.IDLE,
            _I.FINALIZE_LAST: _S.FINALIZED,
        },
        _S.FINALIZED: {},
    }
)
"""Member readiness. ACTIVATE leaves LEASED at followers and RELEASED at the scheduling rank; RELEASE and REVOKE exist
at the scheduling rank only (checked beside the table). A state that maps to itself swallows the input."""

_TS, _TI = TerminalState, TerminalInput
TERMINAL_TRANSITIONS: Mapping[TerminalState, Mapping[TerminalInput, TerminalState]] = MappingProxyType(
    {
        _TS.OPEN: {_TI.DOUBT: _TS.DOUBTED, _TI.VOTE: _TS.VOTED, _TI.CLOSE: _TS.NOT_USED},
        _TS.DOUBTED: {_TI.DOUBT: _TS.DOUBTED, _TI.VOTE: _TS.VOTED},
        _TS.VOTED: {_TI.COMMIT: _TS.COMMITTED},
        _TS.COMMITTED: {},
        _TS.NOT_USED: {},
    }
)
"""Member terminal phase. CLOSE is a FINALIZE after which nothing remains to be decided."""

TERMINAL_ALLOWED_IN = frozenset({_S.NOT_USED, _S.IDLE, _S.ACTIVATED, _S.COMPLETE, _S.FINALIZED})
"""The fence: readiness states in which a rank may cast its terminal vote (no attempt of its own is open)."""

READY_OPEN = frozenset(
    {_S.VOTED, _S.PREPARED, _S.LEASED, _S.RELEASED, _S.REVOKED, _S.WITHDRAWN, _S.ABORTING, _S.ABORT_ACKED}
)
"""Readiness states in which this rank's attempt is open."""


class Rule(IntEnum):
    """What the coordinator does with a member's record."""

    FAULT = 0
    IGNORE = 1
    COUNT = 2
    ABORT = 3
    NOTE = 4
    ADVISE = 5


_P, _K = Phase, Kind
COORDINATOR_RULES: Mapping[Phase, Mapping[Kind, Rule]] = MappingProxyType(
    {
        _P.GATHERING: {
            _K.VOTE: Rule.COUNT, _K.WITHDRAW: Rule.ABORT, _K.ACK: Rule.FAULT, _K.ACTIVATE_ACK: Rule.FAULT,
            _K.ABORT_ACK: Rule.FAULT, _K.REVOKE: Rule.ABORT, _K.RECALL: Rule.IGNORE,
        },
        _P.GRANTING: {
            _K.VOTE: Rule.IGNORE, _K.WITHDRAW: Rule.ABORT, _K.ACK: Rule.COUNT, _K.ACTIVATE_ACK: Rule.FAULT,
            _K.ABORT_ACK: Rule.FAULT, _K.REVOKE: Rule.ABORT, _K.RECALL: Rule.ADVISE,
        },
        _P.RELEASED: {
            _K.VOTE: Rule.IGNORE, _K.WITHDRAW: Rule.IGNORE, _K.ACK: Rule.IGNORE, _K.ACTIVATE_ACK: Rule.COUNT,
            _K.ABORT_ACK: Rule.FAULT, _K.REVOKE: Rule.ABORT, _K.RECALL: Rule.ADVISE,
        },
        _P.COMPLETE: {
            _K.VOTE: Rule.IGNORE, _K.WITHDRAW: Rule.IGNORE, _K.ACK: Rule.IGNORE, _K.ACTIVATE_ACK: Rule.IGNORE,
            _K.ABORT_ACK: Rule.FAULT, _K.REVOKE: Rule.FAULT, _K.RECALL: Rule.IGNORE,
        },
        _P.ABORTING: {
            _K.VOTE: Rule.IGNORE, _K.WITHDRAW: Rule.NOTE, _K.ACK: Rule.IGNORE, _K.ACTIVATE_ACK: Rule.FAULT,
            _K.ABORT_ACK: Rule.COUNT, _K.REVOKE: Rule.NOTE, _K.RECALL: Rule.IGNORE,
        },
        _P.FINAL: {
            _K.VOTE: Rule.FAULT, _K.WITHDRAW: Rule.IGNORE, _K.ACK: Rule.IGNORE, _K.ACTIVATE_ACK: Rule.FAULT,
            _K.ABORT_ACK: Rule.IGNORE, _K.REVOKE: Rule.IGNORE, _K.RECALL: Rule.IGNORE,
        },
    }
)  # fmt: skip
"""Coordinator, per phase of the record's attempt. Beside the table: a WITHDRAW whose sender's ACK is held is ignored, and
a REVOKE after any ACTIVATE_ACK is a fault. NOTE: only the reason counts."""

REPLACES: Mapping[Kind, frozenset[Kind]] = MappingProxyType(
    {
        Kind.VOTE: frozenset(),
        Kind.WITHDRAW: frozenset({Kind.VOTE, Kind.WITHDRAW}),
        Kind.ACK: frozenset(),
        Kind.REVOKE: frozenset({Kind.ACK, Kind.REVOKE}),
        Kind.ACTIVATE_ACK: frozenset(),
        Kind.ABORT_ACK: frozenset({Kind.VOTE, Kind.WITHDRAW, Kind.ACK, Kind.REVOKE}),
    }
)
"""Which unsent readiness record of the same round a newer one replaces: never an ACTIVATE_ACK."""


# Compiled forms: list lookups by integer are several times faster than enum-keyed dictionaries.
READY_NEXT: list[list[ReadyState | None]] = [
    [READY_TRANSITIONS[state].get(given) for given in ReadyInput] for state in ReadyState
]
TERMINAL_NEXT: list[list[TerminalState | None]] = [
    [TERMINAL_TRANSITIONS[state].get(given) for given in TerminalInput] for state in TerminalState
]
COORDINATOR_RULE: list[list[Rule]] = [
    [
        COORDINATOR_RULES[phase].get(Kind(code), Rule.FAULT) if code in Kind._value2member_map_ else Rule.FAULT
        for code in range(32)
    ]
    for phase in Phase
]
CONTRACT: list[Message | None] = [
    MESSAGES[Kind(code)] if code in Kind._value2member_map_ else None for code in range(256)
]

NEXT_NOTHING, NEXT_PUBLISH, NEXT_WITHDRAW = 0, 1, 2


class Round:
    """Everything one rank knows about one admission."""

    __slots__ = (
        "abort_acks",
        "abort_reason",
        "aborted_for",
        "acks",
        "activated",
        "advised",
        "attempt",
        "blocked",
        "disposition",
        "doubt_at_s",
        "doubt_expired",
        "doubted",
        "heard",
        "held",
        "incarnation",
        "leased_at_s",
        "next_intent",
        "next_reason",
        "outcome",
        "own_reason",
        "phase",
        "phase_attempt",
        "ready",
        "reason",
        "reasons",
        "recalled",
        "request_id",
        "story",
        "terminal",
        "terminal_mask",
        "terminal_votes",
        "uses_ready",
        "voted_at_s",
        "votes",
        "withdrawn",
    )

    def __init__(self, request_id: int, incarnation: int) -> None:
        self.request_id = request_id
        self.incarnation = incarnation
        # member
        self.heard = False
        self.blocked = False  # admitted, but an older round must be decided here first; records are held
        self.uses_ready = True
        self.attempt = 0
        self.ready: ReadyState = ReadyState.IDLE
        self.terminal: TerminalState = TerminalState.OPEN
        self.outcome = 0
        self.disposition = 0
        self.reason = 0
        self.aborted_for = 0  # reason of the ABORT
        self.own_reason = 0  # greatest reason of this rank in this attempt
        self.next_intent = NEXT_NOTHING
        self.next_reason = 0
        self.doubt_at_s: float | None = None
        self.doubt_expired = False
        self.leased_at_s: float | None = None
        self.voted_at_s = 0.0
        self.advised = False
        self.held: list[tuple[int, tuple[int, int, int, int, int, int, int]]] | None = None
        self.reasons: int = 0  # packed, eight bits per member, from REASONS records
        # coordinator
        self.phase: Phase = Phase.GATHERING
        self.phase_attempt = 0  # the attempt that ``phase`` speaks of
        self.votes = 0
        self.withdrawn = 0
        self.acks = 0
        self.activated = 0
        self.abort_acks = 0
        self.abort_reason = 0
        self.doubted = 0  # members whose advice was passed on: of each once
        self.recalled = 0
        self.terminal_mask = 0
        self.terminal_votes: dict[int, tuple[int, int, int]] | None = None
        self.story: list[tuple[float, str, int]] = []

    def copy(self) -> Round:
        """An independent copy, for the explorer."""
        twin = Round.__new__(Round)
        for name in Round.__slots__:
            setattr(twin, name, getattr(self, name))
        twin.story = list(self.story)
        if self.held is not None:
            twin.held = list(self.held)
        if self.terminal_votes is not None:
            twin.terminal_votes = dict(self.terminal_votes)
        return twin

    def fingerprint(self) -> tuple[object, ...]:
        """All that decides the future, without times and stories."""
        votes = tuple(sorted(self.terminal_votes.items())) if self.terminal_votes else ()
        return (
            self.request_id, self.incarnation, self.heard, self.blocked, self.uses_ready, self.attempt, int(self.ready),
            int(self.terminal), self.outcome, self.disposition, self.reason, self.own_reason, self.next_intent,
            self.next_reason, self.aborted_for, self.doubt_expired, self.advised, tuple(self.held or ()), self.reasons,
            int(self.phase), self.phase_attempt, self.votes, self.withdrawn, self.acks, self.activated,
            self.abort_acks, self.abort_reason, self.doubted, self.recalled, self.terminal_mask, votes,
        )  # fmt: skip


class RoundState(NamedTuple):
    """A public, immutable view of a round at this rank."""

    ready: ReadyState
    terminal: TerminalState
    attempt: int
    heard: bool
    outcome: Outcome | None
    disposition: Disposition | None


OUTCOMES = tuple(Outcome)
DISPOSITIONS = tuple(Disposition)
REASONS = tuple(Reason)
MODES = tuple(FinalizeMode)
REASON_MAX = int(max(Reason))
TRANSIENT_MAX = max(int(r) for r in Reason if r.is_transient)
