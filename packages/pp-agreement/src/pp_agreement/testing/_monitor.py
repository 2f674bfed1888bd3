"""Group invariants, checked from outside: what ranks did and were told, compared as it happens.

A *row* is one incarnation's history: an integer of flags per member. ``observe`` adds one observation and raises
``PropertyViolation`` when the group's history breaks an invariant. It is a function of the row alone, so the explorer
carries rows inside its states and the simulator inside a dictionary.
"""

from __future__ import annotations

from collections.abc import Sequence

from pp_agreement import _events as ev
from pp_agreement._events import AgreementEvent, FinalizeMode, Key

# per member: terminal part, then twelve bits per attempt
TERMINAL_VOTED = 1
OUTCOME_SHIFT, DISPOSITION_BIT = 1, 8
COMMITTED = 16
COMMIT_SHIFT, COMMIT_DISPOSITION = 5, 128
CLOSED = 256
HEARD = 512
ATTEMPT_BASE, ATTEMPT_BITS = 16, 12
VOTE, PREPARED, ACKED, RELEASED, ACTIVATED, COMPLETE = 1, 2, 4, 8, 16, 32
ABORTED, ABORT_ACKED, FINALIZED, PROMISED, REVOKED, LAST = 64, 128, 256, 512, 1024, 2048

Row = tuple[int, ...]


class PropertyViolation(Exception):
    """The group's history breaks an invariant; the message names it."""


def _at(flags: int, attempt: int) -> int:
    return flags >> (ATTEMPT_BASE + ATTEMPT_BITS * attempt) & 0xFFF


def _put(row: Row, me: int, attempt: int, flag: int) -> Row:
    added = flag << (ATTEMPT_BASE + ATTEMPT_BITS * attempt)
    return (*row[:me], row[me] | added, *row[me + 1 :])


def _raise(row: Row, me: int, what: str) -> Row:
    told = ", ".join(f"{flags:#x}" for flags in row)
    raise PropertyViolation(f"member {me}: {what} [{told}]")


def did(row: Row, me: int, scheduler: int, what: str, attempt: int, extra: tuple[int, ...] = ()) -> Row:
    """A member's accepted call: admit, publish, withdraw, ack, abort_ack, activate, revoke, terminal."""
    mine = _at(row[me], attempt)
    if what == "admit":
        return (*row[:me], row[me] | HEARD, *row[me + 1 :])
    if not row[me] & HEARD:
        _raise(row, me, f"{what} for an unheard incarnation")
    if what == "publish":
        if row[me] & TERMINAL_VOTED:
            _raise(row, me, "readiness after the terminal vote")
        if attempt and not all(_at(flags, attempt - 1) & ABORT_ACKED for flags in row):
            _raise(row, me, "a new attempt before the last one was finalized")
        if mine & (ABORTED | PROMISED):
            _raise(row, me, "a vote for an attempt that is ending")
        return _put(row, me, attempt, VOTE)
    if what == "withdraw":  # it was promised that the attempt aborts
        if mine & ACKED and not mine & (ABORTED | REVOKED):
            _raise(row, me, "a withdrawal was accepted after the lease")
        if any(_at(flags, attempt) & (ACTIVATED | COMPLETE) for flags in row):
            _raise(row, me, "an abort was promised for an activated attempt")
        return _put(row, me, attempt, PROMISED)
    if what == "ack":
        if not mine & PREPARED or mine & (ABORTED | PROMISED):
            _raise(row, me, "a lease without PREPARE, or in an ending attempt")
        return _put(row, me, attempt, ACKED)
    if what == "abort_ack":
        if not mine & ABORTED:
            _raise(row, me, "an acknowledgement without ABORT")
        return _put(row, me, attempt, ABORT_ACKED)
    if what == "activate":
        if not mine & ACKED or mine & (ABORTED | REVOKED) or (me == scheduler and not mine & RELEASED):
            _raise(row, me, "activation without a lease, a release, or of an ending attempt")
        if me != scheduler and not _at(row[scheduler], attempt) & ACTIVATED:
            _raise(row, me, "activation before the scheduling rank's")
        if any(_at(flags, attempt) & (ABORTED | PROMISED | REVOKED) for flags in row):
            _raise(row, me, "activated, yet the attempt aborts")
        if row[me] & (TERMINAL_VOTED | COMMITTED | CLOSED):
            _raise(row, me, "activation after the terminal phase began")
        return _put(row, me, attempt, ACTIVATED)
    if what == "revoke":
        if me != scheduler or not mine & ACKED or mine & ACTIVATED:
            _raise(row, me, "REVOKE by another rank, without a lease, or after activation")
        return _put(row, me, attempt, REVOKED | PROMISED)
    if what == "terminal":
        flags = row[me] >> ATTEMPT_BASE
        last, latest = 0, -1
        while flags:
            last, flags, latest = flags & 0xFFF, flags >> ATTEMPT_BITS, latest + 1
        let_go = latest >= 0 and all(_at(other, latest) & ABORT_ACKED for other in row)
        if last & (VOTE | PROMISED | ABORTED) and not last & (FINALIZED | ACTIVATED) and not let_go:
            _raise(row, me, "a terminal vote beside an open readiness attempt")
        if row[me] & (COMMITTED | CLOSED):
            _raise(row, me, "a vote after the decision")
        outcome, disposition = extra
        vote = TERMINAL_VOTED | outcome << OUTCOME_SHIFT | (DISPOSITION_BIT if disposition else 0)
        if row[me] & TERMINAL_VOTED and row[me] & 0xF != vote:
            _raise(row, me, "a terminal vote was changed")
        return (*row[:me], row[me] | vote, *row[me + 1 :])
    raise ValueError(what)


def told(row: Row, me: int, scheduler: int, event: AgreementEvent) -> Row:
    """A member was handed an event about a round."""
    key: Key = event.key  # type: ignore[attr-defined]
    attempt = key.attempt
    mine = _at(row[me], attempt)
    everyone = [_at(flags, attempt) for flags in row]
    if not row[me] & HEARD:
        _raise(row, me, f"{type(event).__name__} for an unheard incarnation")
    if row[me] & (COMMITTED | CLOSED):
        _raise(row, me, f"{type(event).__name__} after the final decision")
    if isinstance(event, ev.Revoked):
        return row
    if isinstance(event, ev.Prepared):
        if not all(f & VOTE for f in everyone):
            _raise(row, me, "PREPARE without all votes")
        if mine & (PREPARED | ABORTED | PROMISED):
            _raise(row, me, "PREPARE twice, after ABORT, or after the own withdrawal")
        return _put(row, me, attempt, PREPARED)
    if isinstance(event, ev.Released):
        if me != scheduler or not all(f & ACKED for f in everyone):
            _raise(row, me, "RELEASE elsewhere, or without all leases")
        if mine & (RELEASED | ABORTED | REVOKED) or any(f & ABORTED for f in everyone):
            _raise(row, me, "RELEASE twice, after ABORT, or not swallowed after REVOKE")
        return _put(row, me, attempt, RELEASED)
    if isinstance(event, ev.Completed):
        if not all(f & ACTIVATED for f in everyone) or mine & COMPLETE:
            _raise(row, me, "COMPLETE without all activations, or twice")
        if any(f & (ABORTED | FINALIZED | PROMISED) for f in everyone):
            _raise(row, me, "COMPLETE of an attempt that was to abort")
        return _put(row, me, attempt, COMPLETE)
    if isinstance(event, ev.Aborted):
        if any(f & (ACTIVATED | COMPLETE) for f in everyone):
            _raise(row, me, "activated, yet ABORT")
        if everyone[scheduler] & RELEASED and not everyone[scheduler] & REVOKED:
            _raise(row, me, "ABORT after RELEASE without REVOKE")
        if not any(f & PROMISED for f in everyone) and not any(flags & TERMINAL_VOTED for flags in row):
            _raise(row, me, "ABORT although nobody asked for it")
        if mine & ABORTED:
            _raise(row, me, "ABORT twice")
        return _put(row, me, attempt, ABORTED)
    if isinstance(event, ev.Finalized):
        if not all(f & ABORT_ACKED for f in everyone) or mine & FINALIZED:
            _raise(row, me, "FINALIZE without all acknowledgements, or twice")
        for flags in everyone:
            if flags & FINALIZED and bool(flags & LAST) != (event.mode is not FinalizeMode.REOPEN):
                _raise(row, me, "FINALIZE differs between ranks")
        row = _put(row, me, attempt, FINALIZED | (0 if event.mode is FinalizeMode.REOPEN else LAST))
        if event.mode is FinalizeMode.CLOSED:
            if any(flags & (TERMINAL_VOTED | COMMITTED) for flags in row):
                _raise(row, me, "closed although a terminal vote exists")
            return (*row[:me], row[me] | CLOSED, *row[me + 1 :])
        return row
    if isinstance(event, ev.Committed):
        if not all(flags & TERMINAL_VOTED for flags in row):
            _raise(row, me, "COMMIT without all votes")
        outcome = max(flags >> OUTCOME_SHIFT & 3 for flags in row)
        disposition = max(flags >> 3 & 1 for flags in row)
        if (event.outcome, event.disposition) != (outcome, disposition):
            _raise(
                row,
                me,
                f"COMMIT {event.outcome.name}, {event.disposition.name}; votes say {outcome}, {disposition}",
            )
        for flags in row:
            if flags & CLOSED:
                _raise(row, me, "COMMIT here, CLOSED elsewhere")
            last, rest = 0, flags >> ATTEMPT_BASE
            while rest:
                last, rest = rest & 0xFFF, rest >> ATTEMPT_BITS
            if last & ACTIVATED and not all(_at(f, attempt) & ACTIVATED for f in row):
                _raise(row, me, "COMMIT of a request that only some ranks activated")
            if last & VOTE and not last & (ACTIVATED | FINALIZED):
                _raise(row, me, "COMMIT while a rank's readiness attempt is open")
        return (*row[:me], row[me] | COMMITTED, *row[me + 1 :])
    return row


def ended(row: Row) -> str:
    """How a request has ended: its outcome and disposition, "closed", or what the ranks have activated of it at last."""
    if all(flags & COMMITTED for flags in row):
        outcome = max(flags >> OUTCOME_SHIFT & 3 for flags in row)
        return f"committed {outcome} {max(flags >> 3 & 1 for flags in row)}"
    return "closed" if all(flags & CLOSED for flags in row) else "open"


class Monitor:
    """Histories of a whole group, by incarnation; for simulations and hypothesis tests."""

    def __init__(self, size: int, scheduler: int) -> None:
        self.size = size
        self.scheduler = scheduler
        self.rows: dict[int, Row] = {}
        self.finals: list[list[tuple[object, ...]]] = [[] for _ in range(size)]
        self.activations: list[list[Key]] = [[] for _ in range(size)]
        self.stopped = [False] * size

    def did(self, me: int, what: str, key: Key, extra: tuple[int, ...] = ()) -> None:
        """See :func:`did`."""
        if self.stopped[me]:
            raise PropertyViolation(f"member {me}: {what} was accepted after a fault")
        row = self.rows.get(key.incarnation, (0,) * self.size)
        self.rows[key.incarnation] = did(row, me, self.scheduler, what, key.attempt, extra)
        if what == "activate":
            self.activations[me].append(key)
            if me != self.scheduler:
                self._prefix(self.activations[me], self.activations[self.scheduler], me, "activation order")

    def told(self, me: int, event: AgreementEvent) -> None:
        """See :func:`told`; also one order of finals everywhere, and nothing after a fault."""
        if self.stopped[me]:
            raise PropertyViolation(f"member {me}: {event} after a fault")
        if isinstance(event, ev.Fault):
            self.stopped[me] = True
        if not hasattr(event, "key") or isinstance(event, (ev.Fault, ev.Advice, ev.DoubtExpired)):
            return
        key: Key = event.key
        row = self.rows.get(key.incarnation, (0,) * self.size)
        self.rows[key.incarnation] = told(row, me, self.scheduler, event)
        if isinstance(event, (ev.Committed, ev.Finalized)):
            final = (key, event.outcome, event.disposition, event.reasons) if isinstance(event, ev.Committed) else (
                key, event.mode, event.reason,
            )  # fmt: skip
            self.finals[me].append(final)
            longest = max(self.finals, key=len)
            self._prefix(self.finals[me], longest, me, "order of decisions")

    def _prefix(self, mine: Sequence[object], theirs: Sequence[object], me: int, what: str) -> None:
        position = len(mine) - 1
        if position < len(theirs) and mine[position] != theirs[position]:
            raise PropertyViolation(f"member {me}: {what}: {mine[position]} where another rank has {theirs[position]}")
