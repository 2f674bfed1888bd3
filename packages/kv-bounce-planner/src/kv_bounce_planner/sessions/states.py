"""State tables of one operation, at the receiver and at the sender.

Theory. One writer's operation is one record on each side. Its state says only what is physically true of memory; whether
the request succeeded is another axis (``Outcome``), frozen once. A state changes through the tables below and nowhere
else; a trigger that the table does not list raises ``IllegalTransition`` with the record's story.

Receiver: UNEXPOSED and PROVEN are the only states in which memory is not at risk. EXPOSED means that an address left
(the direct destination); GRANTED that a bounce region's did too: up to EXPOSED every doubt about bouncing falls back to a
direct write, from GRANTED on nothing falls back. LANDED: every part of a bounce write is there, the report is not yet
checked. CONFLICTED: the sender contradicted the protocol, so its words prove nothing; only the transport class does.

Sender: HELD → … → IN_FLIGHT. Sealing a record that posted nothing ends in SEALED at once; one that posted stops and
waits (STOPPING) for what it posted. A handle in progress is never released.

Pull turns the roles around: the sender lends its source (LENT: its addresses left) and the receiver reads. At the receiver no
address ever leaves; from READING on its own reads may land, until they ended or their agent is gone. At the sender a loan ends
with the reader's word that nothing of it is read any more, or with a proof that no read can be used: never with time.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final, Generic, TypeVar

from kv_bounce_planner._errors import LocalProtocolError


class Outcome(enum.StrEnum):
    """The logical end of a transfer or request; frozen when it leaves PENDING."""

    PENDING = "PENDING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class ReceiveState(enum.StrEnum):
    UNEXPOSED = "UNEXPOSED"
    EXPOSED = "EXPOSED"
    GRANTED = "GRANTED"
    LANDED = "LANDED"
    IN_DOUBT = "IN_DOUBT"
    CONFLICTED = "CONFLICTED"
    ASKED = "ASKED"
    READING = "READING"
    STOPPING = "STOPPING"
    READ_IN_DOUBT = "READ_IN_DOUBT"
    PROVEN = "PROVEN"
    QUARANTINED = "QUARANTINED"


class ReceiveTrigger(enum.StrEnum):
    PUBLISH = "publish"
    WITHDRAW = "withdraw"
    GRANT = "grant"
    DONE = "every part done"
    REPORT_VALID = "report valid"
    SEALED = "sealed"
    DRAINED = "drained"
    DOUBT = "doubt"
    CONFLICT = "conflict"
    CLASS_PROOF = "class proof"
    DEADLINE = "deadline"
    ASK = "ask for a loan"
    READ = "read begins"
    READ_DONE = "everything read"
    STOP = "stop reading"
    STOPPED = "all that was begun completed"
    ERROR = "read error"


_RS, _RT = ReceiveState, ReceiveTrigger
RECEIVE_TRANSITIONS: Final[Mapping[ReceiveState, Mapping[ReceiveTrigger, ReceiveState]]] = {
    _RS.UNEXPOSED: {
        _RT.PUBLISH: _RS.EXPOSED,
        _RT.WITHDRAW: _RS.PROVEN,
        _RT.CONFLICT: _RS.CONFLICTED,
        _RT.ASK: _RS.ASKED,
    },
    _RS.EXPOSED: {
        _RT.GRANT: _RS.GRANTED,
        _RT.DONE: _RS.PROVEN,
        _RT.SEALED: _RS.PROVEN,
        _RT.DRAINED: _RS.PROVEN,
        _RT.DOUBT: _RS.IN_DOUBT,
        _RT.CONFLICT: _RS.CONFLICTED,
        _RT.DEADLINE: _RS.QUARANTINED,
    },
    _RS.GRANTED: {
        _RT.DONE: _RS.LANDED,
        _RT.SEALED: _RS.PROVEN,
        _RT.DRAINED: _RS.PROVEN,
        _RT.DOUBT: _RS.IN_DOUBT,
        _RT.CONFLICT: _RS.CONFLICTED,
        _RT.DEADLINE: _RS.QUARANTINED,
    },
    _RS.LANDED: {
        _RT.REPORT_VALID: _RS.PROVEN,
        _RT.DRAINED: _RS.PROVEN,
        _RT.DOUBT: _RS.PROVEN,
        _RT.CONFLICT: _RS.CONFLICTED,
        _RT.DEADLINE: _RS.PROVEN,
    },
    _RS.IN_DOUBT: {
        _RT.DONE: _RS.PROVEN,
        _RT.SEALED: _RS.PROVEN,
        _RT.DRAINED: _RS.PROVEN,
        _RT.CONFLICT: _RS.CONFLICTED,
        _RT.CLASS_PROOF: _RS.PROVEN,
        _RT.DEADLINE: _RS.QUARANTINED,
    },
    _RS.CONFLICTED: {
        _RT.CLASS_PROOF: _RS.PROVEN,
        _RT.DEADLINE: _RS.QUARANTINED,
    },
    _RS.ASKED: {_RT.READ: _RS.READING, _RT.WITHDRAW: _RS.PROVEN},
    _RS.READING: {
        _RT.READ_DONE: _RS.PROVEN,
        _RT.STOP: _RS.STOPPING,
        _RT.STOPPED: _RS.PROVEN,
        _RT.ERROR: _RS.READ_IN_DOUBT,
    },
    _RS.STOPPING: {
        _RT.READ_DONE: _RS.PROVEN,
        _RT.STOPPED: _RS.PROVEN,
        _RT.ERROR: _RS.READ_IN_DOUBT,
        _RT.DEADLINE: _RS.QUARANTINED,
    },
    _RS.READ_IN_DOUBT: {_RT.DEADLINE: _RS.QUARANTINED, _RT.CLASS_PROOF: _RS.PROVEN},
    _RS.PROVEN: {},
    _RS.QUARANTINED: {},
}


class SendState(enum.StrEnum):
    HELD = "HELD"
    WANTED = "WANTED"
    AHEAD = "AHEAD"
    STAGED = "STAGED"
    GRANTED = "GRANTED"
    GATHERING = "GATHERING"
    SEALING = "SEALING"
    POSTING = "POSTING"
    IN_FLIGHT = "IN_FLIGHT"
    STOPPING = "STOPPING"
    IN_DOUBT = "IN_DOUBT"
    SOURCE_IN_DOUBT = "SOURCE_IN_DOUBT"
    LENT = "LENT"
    RECALLED = "RECALLED"
    LENT_IN_DOUBT = "LENT_IN_DOUBT"
    DONE = "DONE"
    SEALED = "SEALED"
    DRAINED = "DRAINED"
    RESOLVED = "RESOLVED"
    QUARANTINED = "QUARANTINED"


class SendTrigger(enum.StrEnum):
    WANT = "want a region"
    GRANT = "region granted"
    GATHER = "gather begins"
    POST = "post begins"
    POSTED_ALL = "all posted"
    COMPLETED = "all that was posted completed"
    SEAL = "seal"
    GATHERED = "gather ended"
    GATHER_BROKEN = "gather broken"
    YIELD = "slot given back"
    ERROR = "write error"
    LEND = "lend"
    READ = "everything was read"
    RETURNED = "read no more"
    RECALL = "recall"
    DOUBT = "doubt"
    CLASS_PROOF = "class proof"
    DEADLINE = "deadline"


_SS, _ST = SendState, SendTrigger
SEND_TRANSITIONS: Final[Mapping[SendState, Mapping[SendTrigger, SendState]]] = {
    _SS.HELD: {_ST.WANT: _SS.WANTED, _ST.POST: _SS.POSTING, _ST.SEAL: _SS.SEALED, _ST.LEND: _SS.LENT},
    _SS.WANTED: {_ST.GRANT: _SS.GRANTED, _ST.GATHER: _SS.AHEAD, _ST.POST: _SS.POSTING, _ST.SEAL: _SS.SEALED},
    _SS.AHEAD: {
        _ST.GRANT: _SS.GATHERING,
        _ST.GATHERED: _SS.STAGED,
        _ST.YIELD: _SS.WANTED,
        _ST.SEAL: _SS.SEALING,
        _ST.GATHER_BROKEN: _SS.SOURCE_IN_DOUBT,
    },
    _SS.STAGED: {_ST.POST: _SS.POSTING, _ST.YIELD: _SS.WANTED, _ST.SEAL: _SS.SEALED},
    _SS.GRANTED: {_ST.GATHER: _SS.GATHERING, _ST.SEAL: _SS.SEALED},
    _SS.GATHERING: {_ST.POST: _SS.POSTING, _ST.SEAL: _SS.SEALING, _ST.GATHER_BROKEN: _SS.SOURCE_IN_DOUBT},
    _SS.SEALING: {_ST.GATHERED: _SS.SEALED, _ST.GATHER_BROKEN: _SS.SOURCE_IN_DOUBT, _ST.DEADLINE: _SS.QUARANTINED},
    _SS.POSTING: {_ST.POSTED_ALL: _SS.IN_FLIGHT, _ST.SEAL: _SS.STOPPING, _ST.ERROR: _SS.IN_DOUBT},
    _SS.IN_FLIGHT: {_ST.COMPLETED: _SS.DONE, _ST.ERROR: _SS.IN_DOUBT, _ST.DEADLINE: _SS.QUARANTINED},
    _SS.STOPPING: {_ST.COMPLETED: _SS.DRAINED, _ST.ERROR: _SS.IN_DOUBT, _ST.DEADLINE: _SS.QUARANTINED},
    _SS.IN_DOUBT: {_ST.CLASS_PROOF: _SS.RESOLVED, _ST.DEADLINE: _SS.QUARANTINED},
    _SS.SOURCE_IN_DOUBT: {_ST.DEADLINE: _SS.QUARANTINED},
    _SS.LENT: {
        _ST.READ: _SS.DONE,
        _ST.RETURNED: _SS.DRAINED,
        _ST.RECALL: _SS.RECALLED,
        _ST.DOUBT: _SS.LENT_IN_DOUBT,
        _ST.DEADLINE: _SS.QUARANTINED,
    },
    _SS.RECALLED: {
        _ST.READ: _SS.DONE,
        _ST.RETURNED: _SS.DRAINED,
        _ST.DOUBT: _SS.LENT_IN_DOUBT,
        _ST.DEADLINE: _SS.QUARANTINED,
    },
    _SS.LENT_IN_DOUBT: {
        _ST.READ: _SS.DONE,
        _ST.RETURNED: _SS.DRAINED,
        _ST.CLASS_PROOF: _SS.RESOLVED,
        _ST.DEADLINE: _SS.QUARANTINED,
    },
    _SS.DONE: {},
    _SS.SEALED: {},
    _SS.DRAINED: {},
    _SS.RESOLVED: {},
    _SS.QUARANTINED: {},
}

StateT = TypeVar("StateT", bound=enum.StrEnum)
TriggerT = TypeVar("TriggerT", bound=enum.StrEnum)


class IllegalTransition(LocalProtocolError):
    """A trigger that the table does not allow. ``story`` is everything that happened to that record."""

    def __init__(self, subject: object, state: str, trigger: str, story: tuple[str, ...]) -> None:
        super().__init__(f"{subject}: {trigger!r} is illegal in {state}; story: " + " | ".join(story))
        self.subject = subject
        self.state = state
        self.trigger = trigger
        self.story = story


#: Entries kept per record's story: enough for every edge of a run through either table, twice.
STORY_MAX: Final = 32


class Machine(Generic[StateT, TriggerT]):
    """One record's state, its table and its story. The only place where such a state is assigned."""

    __slots__ = ("_table", "state", "story", "subject")

    def __init__(self, subject: object, initial: StateT, table: Mapping[StateT, Mapping[TriggerT, StateT]]) -> None:
        self.subject = subject
        self.state: StateT = initial
        self.story: tuple[str, ...] = (initial.value,)
        self._table = table

    def allows(self, trigger: TriggerT) -> bool:
        return trigger in self._table[self.state]

    def fire(self, trigger: TriggerT, note: str = "") -> StateT:
        """Take one edge.

        Raises:
            IllegalTransition: The table has no such edge; the state is unchanged.
        """
        target = self._table[self.state].get(trigger)
        if target is None:
            raise IllegalTransition(self.subject, self.state.value, trigger.value, self.story)
        self.state = target
        # Members are text themselves: asking for their values takes a call each, several times in every operation's life.
        entry = f"{trigger} → {target}" + (f" ({note[:80]})" if note else "")
        self.story = (*self.story[-STORY_MAX + 1 :], entry)
        return target

    @property
    def terminal(self) -> bool:
        return not self._table[self.state]


def render_table(table: Mapping[StateT, Mapping[TriggerT, StateT]], *, initial: StateT) -> str:
    """A Mermaid state figure drawn from a table; docs/design.md holds exactly this text and a test compares."""
    lines = ["stateDiagram-v2", f"    [*] --> {initial.value}"]
    for state, edges in table.items():
        lines.extend(f"    {state.value} --> {target.value}: {trigger.value}" for trigger, target in edges.items())
        if not edges:
            lines.append(f"    {state.value} --> [*]")
    return "\n".join(lines)
