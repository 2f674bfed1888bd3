"""States, and the tables that decide.

Theory of operation
-------------------
One :class:`~pp_agreement._round.Round` per admission (incarnation) holds everything this rank knows about it, in two halves:
what this rank itself does (the member's half) and what the coordinator has counted (the tally; only where the coordinator
runs). Two machines run in the member's half. *Readiness* may be taken back until the rank grants its lease (ACK); from
then on it is up to the ranks that have not granted theirs, and once all have, only the scheduling rank can end the attempt
(REVOKE), and only before it activates. *Terminal* is one immutable vote. A fence keeps them apart: a rank whose readiness
attempt is open casts no terminal vote, and a rank that voted terminal publishes no readiness.

The coordinator's half only counts: sets of members as bit masks, one decision per attempt, one COMMIT per round. Each
decision is appended to all destinations' queues in one step. Members never talk to each other.

No state is ever assigned but by looking it up here: ``MEMBER_TRANSITIONS`` and ``SCHEDULER_TRANSITIONS`` for a rank's
readiness, ``TERMINAL_TRANSITIONS`` and ``FENCE`` for its terminal phase, ``COORDINATOR_RULES`` for what the coordinator does
with a record, ``PHASE_TRANSITIONS`` for what its decisions lead to. What a call answers where it moves nothing stands in the
``..._ANSWERS``. No entry: an illegal transition. The figures and tables in docs/design.md are drawn from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from pp_agreement._events import Disposition, FinalizeMode, Outcome, PublishResult, Reason, RevokeResult, WithdrawResult


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
    """What moves a member's readiness: its host's calls, then the coordinator's decisions, then the broadcast."""

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
    NOT_USED = 12


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


class Decision(IntEnum):
    """What the coordinator decides about a round."""

    PREPARE = 0
    RELEASE = 1
    COMPLETE = 2
    ABORT = 3
    FINALIZE_REOPEN = 4
    FINALIZE_LAST = 5
    COMMIT = 6


class Kind(IntEnum):
    """Record kinds on the wire. Below 32 members speak, from 32 the coordinator, from 64 both: ``MESSAGES`` says who, and
    the order of the numbers only sorts the domain's records."""

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
    TEXT = 65


class Message(NamedTuple):
    """One row of the message table: who may send a kind, and the greatest value of each small field."""

    author: str  # "member", "scheduler", "coordinator", "any"
    to: str  # "coordinator", "members", "scheduler"
    phase: str  # "READY", "TERMINAL", "DOMAIN"
    outcome_max: int
    disposition_max: int
    meaning: str


_R, _T, _X = "READY", "TERMINAL", "DOMAIN"
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
        Kind.DRAIN: Message("scheduler", "coordinator", _X, 0, 0, "incarnation is the last one admitted"),
        Kind.DRAIN_REPORT: Message("member", "coordinator", _X, 0, 0, "heard and decided all; digest in request_id"),
        Kind.CLOSE: Message("member", "coordinator", _X, 0, 0, "sends nothing more"),
        Kind.PREPARE: Message("coordinator", "members", _R, 0, 0, "all voted"),
        Kind.RELEASE: Message("coordinator", "scheduler", _R, 0, 0, "all leases granted"),
        Kind.COMPLETE: Message("coordinator", "members", _R, 0, 0, "all activated"),
        Kind.ABORT: Message("coordinator", "members", _R, 0, 0, "the attempt ends (first reason)"),
        Kind.FINALIZE: Message("coordinator", "members", _R, 2, 0, "all let go; mode in outcome, greatest reason"),
        Kind.COMMIT: Message("coordinator", "members", _T, 2, 1, "the decision: reclaim or retire"),
        Kind.REASONS: Message("coordinator", "members", _T, 7, 0, "eight members' reasons of the COMMIT that follows"),
        Kind.ADVICE: Message("coordinator", "scheduler", _X, 63, 1, "advice of the member in outcome"),
        Kind.DRAIN_ALL: Message("coordinator", "members", _X, 0, 0, "incarnation is the last one admitted"),
        Kind.DRAIN_STATUS: Message("coordinator", "members", _X, 0, 0, "request_id: mask of the members that reported"),
        Kind.DRAINED: Message("coordinator", "members", _X, 0, 0, "every member reported this number and digest"),
        Kind.CLOSE_ACK: Message("coordinator", "members", _X, 0, 0, "every member has closed"),
        Kind.VERDICT: Message("coordinator", "members", _X, 63, 1, "member in outcome is silent (0) or back (1)"),
        Kind.FAIL_STOP: Message("any", "members", _X, 63, 64, "domain stops; origin in outcome, suspect+1 beside it"),
        Kind.TEXT: Message("any", "members", _X, 11, 0, "20 bytes of what the host said, before its FAIL_STOP"),
    }
)

_S, _I = ReadyState, ReadyInput
MEMBER_TRANSITIONS: Mapping[ReadyState, Mapping[ReadyInput, ReadyState]] = MappingProxyType(
    {
        _S.NOT_USED: {},
        _S.IDLE: {
            _I.PUBLISH: _S.VOTED, _I.WITHDRAW: _S.WITHDRAWN, _I.ABORT: _S.ABORTING, _I.NOT_USED: _S.NOT_USED,
        },
        _S.VOTED: {_I.PREPARE: _S.PREPARED, _I.WITHDRAW: _S.WITHDRAWN, _I.ABORT: _S.ABORTING},
        _S.PREPARED: {_I.ACK: _S.LEASED, _I.WITHDRAW: _S.WITHDRAWN, _I.ABORT: _S.ABORTING},
        _S.LEASED: {_I.ACTIVATE: _S.ACTIVATED, _I.ABORT: _S.ABORTING},
        _S.ACTIVATED: {_I.COMPLETE: _S.COMPLETE},
        _S.COMPLETE: {},
        _S.WITHDRAWN: {_I.PREPARE: _S.WITHDRAWN, _I.WITHDRAW: _S.WITHDRAWN, _I.ABORT: _S.ABORTING},
        _S.ABORTING: {_I.WITHDRAW: _S.ABORTING, _I.ABORT_ACK: _S.ABORT_ACKED},
        _S.ABORT_ACKED: {_I.WITHDRAW: _S.ABORT_ACKED, _I.FINALIZE_REOPEN: _S.IDLE, _I.FINALIZE_LAST: _S.FINALIZED},
        _S.FINALIZED: {},
    }
)  # fmt: skip
"""Readiness at every rank but the scheduling one. A state that maps to itself swallows the input."""

SCHEDULER_TRANSITIONS: Mapping[ReadyState, Mapping[ReadyInput, ReadyState]] = MappingProxyType(
    {
        _S.NOT_USED: {},
        _S.IDLE: {
            _I.PUBLISH: _S.VOTED, _I.WITHDRAW: _S.WITHDRAWN, _I.ABORT: _S.ABORTING, _I.NOT_USED: _S.NOT_USED,
        },
        _S.VOTED: {_I.PREPARE: _S.PREPARED, _I.WITHDRAW: _S.WITHDRAWN, _I.ABORT: _S.ABORTING},
        _S.PREPARED: {_I.ACK: _S.LEASED, _I.WITHDRAW: _S.WITHDRAWN, _I.ABORT: _S.ABORTING},
        _S.LEASED: {_I.RELEASE: _S.RELEASED, _I.REVOKE: _S.REVOKED, _I.ABORT: _S.ABORTING},
        _S.RELEASED: {_I.ACTIVATE: _S.ACTIVATED, _I.REVOKE: _S.REVOKED},
        _S.REVOKED: {
            _I.RELEASE: _S.REVOKED, _I.WITHDRAW: _S.REVOKED, _I.REVOKE: _S.REVOKED, _I.ABORT: _S.ABORTING,
        },
        _S.ACTIVATED: {_I.COMPLETE: _S.COMPLETE},
        _S.COMPLETE: {},
        _S.WITHDRAWN: {
            _I.PREPARE: _S.WITHDRAWN, _I.WITHDRAW: _S.WITHDRAWN, _I.REVOKE: _S.WITHDRAWN, _I.ABORT: _S.ABORTING,
        },
        _S.ABORTING: {_I.WITHDRAW: _S.ABORTING, _I.REVOKE: _S.ABORTING, _I.ABORT_ACK: _S.ABORT_ACKED},
        _S.ABORT_ACKED: {
            _I.WITHDRAW: _S.ABORT_ACKED, _I.REVOKE: _S.ABORT_ACKED, _I.FINALIZE_REOPEN: _S.IDLE,
            _I.FINALIZE_LAST: _S.FINALIZED,
        },
        _S.FINALIZED: {},
    }
)  # fmt: skip
"""Readiness at the scheduling rank: it alone is released to and revokes, and it activates only what was released. All else
is as at any other rank."""

_TS, _TI = TerminalState, TerminalInput
TERMINAL_TRANSITIONS: Mapping[TerminalState, Mapping[TerminalInput, TerminalState]] = MappingProxyType(
    {
        _TS.OPEN: {_TI.DOUBT: _TS.DOUBTED, _TI.VOTE: _TS.VOTED, _TI.CLOSE: _TS.NOT_USED},
        _TS.DOUBTED: {_TI.VOTE: _TS.VOTED},
        _TS.VOTED: {_TI.COMMIT: _TS.COMMITTED},
        _TS.COMMITTED: {},
        _TS.NOT_USED: {},
    }
)
"""Member terminal phase. CLOSE is a FINALIZE after which nothing remains to be decided."""

FENCE: Mapping[TerminalInput, frozenset[ReadyState]] = MappingProxyType(
    {
        _TI.DOUBT: frozenset({_S.NOT_USED, _S.ACTIVATED, _S.COMPLETE, _S.FINALIZED}),
        _TI.VOTE: frozenset({_S.NOT_USED, _S.IDLE, _S.ACTIVATED, _S.COMPLETE, _S.FINALIZED}),
        _TI.COMMIT: frozenset({_S.NOT_USED, _S.IDLE, _S.COMPLETE, _S.FINALIZED}),
        _TI.CLOSE: frozenset({_S.ABORT_ACKED}),
    }
)
"""The fence between the machines: readiness states in which an input may move the terminal phase. A vote needs that no
attempt of this rank is open; a doubt, that the request ran here; a commit, that nobody's activation is under way."""

# Readiness states by what they have in common; every room takes them from here.
UNLEASED = (_S.IDLE, _S.VOTED, _S.PREPARED)
"""This rank has granted no lease, and may still withdraw."""
UNSCHEDULED = (_S.LEASED, _S.RELEASED)
"""This rank has granted its lease and not activated: it cannot withdraw any more; the scheduling rank can revoke."""
UNWINDING = (_S.WITHDRAWN, _S.REVOKED, _S.ABORTING, _S.ABORT_ACKED)
"""This rank, or the coordinator, has ended the attempt; FINALIZE has not come."""
READY_OPEN = frozenset({_S.VOTED, _S.PREPARED, *UNSCHEDULED, *UNWINDING})
"""This rank's attempt is open: exactly the states in which ``FENCE`` refuses a terminal vote."""

_PR, _WR, _RR = PublishResult, WithdrawResult, RevokeResult
PUBLISH_ANSWERS: Mapping[ReadyState, PublishResult] = MappingProxyType(
    {
        **dict.fromkeys((*UNLEASED, *UNSCHEDULED, _S.ACTIVATED, _S.COMPLETE), _PR.PUBLISHED),
        **dict.fromkeys(UNWINDING, _PR.ABORTING),
        _S.FINALIZED: _PR.FINAL,
    }
)
WITHDRAW_ANSWERS: Mapping[ReadyState, WithdrawResult] = MappingProxyType(
    {
        **dict.fromkeys((*UNLEASED, *UNWINDING), _WR.WILL_ABORT),
        **dict.fromkeys(UNSCHEDULED, _WR.LEASED),
        **dict.fromkeys((_S.ACTIVATED, _S.COMPLETE), _WR.ACTIVATED),
        _S.FINALIZED: _WR.FINAL,
        _S.NOT_USED: _WR.NOT_USED,
    }
)
REVOKE_ANSWERS: Mapping[ReadyState, RevokeResult] = MappingProxyType(
    {
        **dict.fromkeys((*UNSCHEDULED, *UNWINDING), _RR.WILL_ABORT),
        **dict.fromkeys((_S.NOT_USED, *UNLEASED), _RR.NOT_LEASED),
        **dict.fromkeys((_S.ACTIVATED, _S.COMPLETE), _RR.ACTIVATED),
        _S.FINALIZED: _RR.FINAL,
    }
)
ACKNOWLEDGE_ANSWERS: Mapping[ReadyState, bool] = MappingProxyType(
    {_S.PREPARED: True, **dict.fromkeys((*UNWINDING, _S.FINALIZED), False)}
)
"""What the calls of a host answer about the attempt that runs, by its state before the call. No entry: refused."""


class Rule(IntEnum):
    """What the coordinator does with a member's record."""

    FAULT = 0
    IGNORE = 1
    COUNT = 2
    ABORT = 3
    NOTE = 4
    ADVISE = 5
    ABORT_UNLESS_LEASED = 6
    ABORT_UNLESS_ACTIVATED = 7


_P, _K = Phase, Kind
COORDINATOR_RULES: Mapping[Phase, Mapping[Kind, Rule]] = MappingProxyType(
    {
        _P.GATHERING: {
            _K.VOTE: Rule.COUNT, _K.WITHDRAW: Rule.ABORT, _K.ACK: Rule.FAULT, _K.ACTIVATE_ACK: Rule.FAULT,
            _K.ABORT_ACK: Rule.FAULT, _K.REVOKE: Rule.ABORT, _K.RECALL: Rule.IGNORE,
        },
        _P.GRANTING: {
            _K.VOTE: Rule.IGNORE, _K.WITHDRAW: Rule.ABORT_UNLESS_LEASED, _K.ACK: Rule.COUNT, _K.ACTIVATE_ACK: Rule.FAULT,
            _K.ABORT_ACK: Rule.FAULT, _K.REVOKE: Rule.ABORT, _K.RECALL: Rule.ADVISE,
        },
        _P.RELEASED: {
            _K.VOTE: Rule.IGNORE, _K.WITHDRAW: Rule.IGNORE, _K.ACK: Rule.IGNORE, _K.ACTIVATE_ACK: Rule.COUNT,
            _K.ABORT_ACK: Rule.FAULT, _K.REVOKE: Rule.ABORT_UNLESS_ACTIVATED, _K.RECALL: Rule.ADVISE,
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
"""Coordinator, per phase of the record's attempt. ABORT_UNLESS_LEASED: ignored when the sender's ACK is held (by FIFO it
came first, and a lease is irrevocable). ABORT_UNLESS_ACTIVATED: a fault once anybody activated. NOTE: only the reason
counts."""

_D = Decision
PHASE_TRANSITIONS: Mapping[Phase, Mapping[Decision, Phase]] = MappingProxyType(
    {
        _P.GATHERING: {_D.PREPARE: _P.GRANTING, _D.ABORT: _P.ABORTING, _D.COMMIT: _P.FINAL},
        _P.GRANTING: {_D.RELEASE: _P.RELEASED, _D.ABORT: _P.ABORTING},
        _P.RELEASED: {_D.COMPLETE: _P.COMPLETE, _D.ABORT: _P.ABORTING},
        _P.COMPLETE: {_D.COMMIT: _P.FINAL},
        _P.ABORTING: {_D.FINALIZE_REOPEN: _P.GATHERING, _D.FINALIZE_LAST: _P.FINAL},
        _P.FINAL: {_D.COMMIT: _P.FINAL},
    }
)
"""Coordinator: where each decision leads. COMMIT waits until a phase allows it: no readiness attempt is in progress then.
There is no second one, because this rank hears the first with the frame that brought it, which retires the round."""

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
_State = TypeVar("_State", bound=IntEnum)
_Given = TypeVar("_Given", bound=IntEnum)


def _compiled(
    table: Mapping[_State, Mapping[_Given, _State]], states: type[_State], inputs: type[_Given]
) -> list[list[_State | None]]:
    return [[table.get(state, {}).get(given) for given in inputs] for state in states]


MEMBER_NEXT = _compiled(MEMBER_TRANSITIONS, ReadyState, ReadyInput)
SCHEDULER_NEXT = _compiled(SCHEDULER_TRANSITIONS, ReadyState, ReadyInput)
TERMINAL_AFTER: list[list[list[TerminalState | None]]] = [
    [
        [TERMINAL_TRANSITIONS[state].get(given) if ready in FENCE[given] else None for ready in ReadyState]
        for state in TerminalState
    ]
    for given in TerminalInput
]
"""By input, terminal state and readiness: the table and the fence in one look."""
PHASE_NEXT = _compiled(PHASE_TRANSITIONS, Phase, Decision)
COORDINATOR_RULE: list[list[Rule]] = [
    [
        COORDINATOR_RULES[phase].get(Kind(code), Rule.FAULT) if code in Kind._value2member_map_ else Rule.FAULT
        for code in range(32)
    ]
    for phase in Phase
]
# By the code of a record's kind, which a peer may have made up:
MESSAGE: list[Message | None] = [
    MESSAGES[Kind(code)] if code in Kind._value2member_map_ else None for code in range(256)
]
"""The row of ``MESSAGES``; None: there is no such kind."""
MEMBERS_SAY = [row is not None and row.author != "coordinator" for row in MESSAGE]
SCHEDULER_SAYS = [row is not None and row.author == "scheduler" for row in MESSAGE]
COORDINATOR_SAYS = [row is not None and row.author in ("coordinator", "any") for row in MESSAGE]
_ABOUT_A_ROUND = [row is not None and row.phase != "DOMAIN" for row in MESSAGE]
ABOUT_ROUNDS = [said and about for said, about in zip(MEMBERS_SAY, _ABOUT_A_ROUND)]
"""A member says it, about a round."""
DECIDES = [said and about for said, about in zip(COORDINATOR_SAYS, _ABOUT_A_ROUND)]
"""The coordinator says it, about a round."""
NEEDS_CHECK = [not about or SCHEDULER_SAYS[code] for code, about in enumerate(ABOUT_ROUNDS)]
"""At the coordinator: who says it has to be looked at, or that it may be said at all. Any member may say the others."""


def too_great(kind: int, outcome: int, disposition: int) -> str:
    """A record's small fields, in words, where its row of ``MESSAGES`` forbids them; empty: they are right."""
    row = MESSAGE[kind]
    if row is not None and outcome <= row.outcome_max and disposition <= row.disposition_max:
        return ""
    return f"{kind if row is None else Kind(kind).name} with outcome {outcome}, disposition {disposition}"


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

KINDS_SURVIVE_FAULT = frozenset(
    map(int, (Kind.COMPLETE, Kind.FINALIZE, Kind.COMMIT, Kind.REASONS, Kind.VERDICT, Kind.DRAINED))
)
"""Unsent records that the coordinator still sends after a fault: what other ranks may hold already, as decided before it. What
a host is still told is ``SURVIVES_FAULT``; it has DRAIN_ALL too where that has come, but nobody need begin a drain any more."""
