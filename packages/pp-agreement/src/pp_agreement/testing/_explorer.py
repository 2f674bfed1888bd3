"""Every interleaving of a small world, over the real core.

A state is the cores' fingerprints, the records in flight, the schedule, the histories and what the hosts may still do. A
transition is one local call or one delivered record. Cores with equal fingerprints behave alike, so each (core, input) is
executed once, by the real ``AgreementCore``, and its result is reused: that is what makes millions of transitions cheap.

Besides the group invariants at every transition and ``validate()`` of every distinct core, every state in which nothing
*must* happen any more is required to be finished: all admissions decided everywhere (liveness under fair polling; the
graph is finite and acyclic because every action is bounded).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pp_agreement import _events as ev
from pp_agreement._config import AgreementConfig, Domain
from pp_agreement._errors import DomainStopped, LocalProtocolError, WouldBlock
from pp_agreement._events import AgreementEvent, Answer, Disposition, Key, Outcome, Reason, Record
from pp_agreement._round import Round
from pp_agreement._state import Kind, ReadyState, TerminalState
from pp_agreement._streams import EXCHANGE
from pp_agreement._validate import InvariantViolation
from pp_agreement.testing._monitor import HEARD, PropertyViolation, Row, did, ended, told
from pp_agreement.testing._nodes import DEADLINE_S, HEARTBEAT_S, nodes_of

_SAID = {
    Kind.VOTE: "publish",
    Kind.WITHDRAW: "withdraw",
    Kind.ACK: "ack",
    Kind.ABORT_ACK: "abort_ack",
    Kind.ACTIVATE_ACK: "activate",
    Kind.REVOKE: "revoke",
    Kind.TERMINAL: "terminal",
}


@dataclass(frozen=True)
class World:
    """What is explored.

    Args:
        size: Ranks, 1..5.
        requests: Admissions.
        ready: Whether each uses readiness.
        withdrawers: Members that may withdraw, once per request; reasons in ``withdraw_reason``.
        revoke: Whether the scheduling rank may revoke.
        terminal: Members' terminal outcomes; empty: no terminal phase is voted (readiness only).
        idle_voters: Members that may vote terminal instead of publishing.
        attempts: Attempts that are published, >= 1.
        unheard: Whether members hear of admissions at different times.
        crash: Whether one member (not named in advance) may crash; with ``evidence`` others may learn of it.
        drain: Whether the scheduling rank drains at the end.
        credits: Credits; fewer than ``requests`` makes admissions wait.
        same_request: All admissions have one request id, one after the other.
        reasons: The reason of each withdrawal, by member in turn; ``withdraw_reason`` for all when empty.
        doubters: Members that may raise a doubt, and vote FAILED with QUARANTINE once its deadline has passed.
        recall: Whether members may recall a lease, once per attempt.
        early: Members that may speak of the next attempt, publishing or withdrawing it, while this one ends.
        ticks: Times that all deadlines of a member may pass, each.
        groups: Sizes of the groups that the ranks form, in order; empty: every rank is a member of its own.
        frames: Whether everybody's records wait for a slot, and leave and arrive together, as many as there are.
        replicated: The blocking baseline's cores: what they say waits for an exchange, which is one transition of all.
        round_timeout: Whether a passing deadline may be that of a round that nobody moves; then the domain stops.
        silence: Whether deadlines pass by sweeps that find a member's links empty, which makes verdicts.
        lazy: Record kinds whose sending is a transition of its own (others leave at once).
    """

    size: int
    requests: int = 1
    ready: bool = True
    withdrawers: tuple[int, ...] = ()
    withdraw_reason: Reason = Reason.CANCELLED
    revoke: bool = False
    terminal: tuple[int, ...] = ()
    idle_voters: tuple[int, ...] = ()
    attempts: int = 1
    unheard: bool = False
    crash: bool = False
    evidence: bool = False
    drain: bool = False
    credits: int = 4
    same_request: bool = False
    coordinator: int | None = None
    scheduler: int | None = None
    reasons: tuple[Reason, ...] = ()
    doubters: tuple[int, ...] = ()
    recall: bool = False
    early: tuple[int, ...] = ()
    ticks: int = 0
    lease_timeout: bool = False
    groups: tuple[int, ...] = ()
    frames: bool = False
    replicated: bool = False
    round_timeout: bool = False
    silence: bool = False
    lazy: tuple[Kind, ...] = (Kind.VOTE, Kind.ACK)
    slow_abort_ack: bool = False


@dataclass
class Exploration:
    """What was found."""

    world: World
    states: int = 0
    transitions: int = 0
    cores: int = 0
    executed: int = 0
    finished: int = 0
    complete: bool = True
    violation: str | None = None
    trace: tuple[str, ...] = ()
    outcomes: set[tuple[str, ...]] = field(default_factory=set)
    reached: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Result:
    core: int
    events: tuple[AgreementEvent, ...]
    frames: tuple[tuple[int, _Frame], ...]
    answer: object
    refused: bool
    said: tuple[tuple[str, int, int, tuple[int, ...]], ...] = ()


# A frame is its records. A state: (core ids, channels, rows, schedule, budgets, crashed); all hashable.
_Frame = tuple[Record, ...]
_State = tuple[tuple[int, ...], tuple[tuple[_Frame, ...], ...], tuple[Row, ...], tuple[Key, ...], tuple[int, ...], int]


class Explorer:
    """Explores one world; ``run()`` gives the result."""

    def __init__(self, world: World, *, states_max: int = 5_000_000) -> None:
        self.world = world
        self.states_max = states_max
        self.domain = Domain(
            1,
            tuple(range(world.size)),
            scheduling_rank=world.scheduler,
            coordinator_rank=world.size - world.groups[-1]
            if world.groups and world.coordinator is None
            else world.coordinator,
        )
        self.config = AgreementConfig(
            credits=world.credits,
            round_timeout_s=DEADLINE_S if world.round_timeout else None,
            story_entries_max=0,
            heartbeat_s=HEARTBEAT_S,
            silence_s=DEADLINE_S,
            startup_s=DEADLINE_S,
            doubt_deadline_s=DEADLINE_S,
            lease_timeout_s=DEADLINE_S if world.lease_timeout else None,
        )
        self.digests = world.drain or world.requests > 1
        self.cores: list[Any] = []
        self.ids: dict[object, int] = {}
        self.memo: dict[tuple[int, object], _Result] = {}
        self.links = [(a, b) for a in range(world.size) for b in range(world.size) if a != b]
        self.link_index = {link: i for i, link in enumerate(self.links)}
        self.nodes = nodes_of(self.domain, world.groups, self.config, world.lazy, replicated=world.replicated)
        self.scheduler = self.domain.scheduler_index
        self.exploration = Exploration(world)
        self.keys = [Key(1 if world.same_request else 10 + i, i + 1) for i in range(world.requests)]

    # -- executing the real core, once per distinct (core, input) ------------------------------------------------------

    def _intern(self, core: Any) -> int:
        print_ = (core.me, core.fingerprint(digests=self.digests), core.silence.suspects if self.world.silence else 0)
        known = self.ids.get(print_)
        if known is None:
            known = len(self.cores)
            self.ids[print_] = known
            self.cores.append(core)
            core.validate()
        return known

    def _execute(self, core_id: int, given: object) -> _Result:
        result = self.memo.get((core_id, given))
        if result is not None:
            return result
        self.exploration.executed += 1
        core = self.cores[core_id].copy()
        said: list[tuple[str, int, int, tuple[int, ...]]] = []
        say = core.streams.say

        def listen(
            round_: Round, slot: int, kind: Kind, outcome: int = 0, disposition: int = 0, reason: int = 0
        ) -> None:
            """What a rank says is what it did, also where the core says it on the host's behalf."""
            if kind in _SAID:
                extra = (outcome, disposition) if kind == Kind.TERMINAL else ()
                said.append((_SAID[kind], round_.incarnation - 1, round_.attempt, extra))
            say(round_, slot, kind, outcome, disposition, reason)

        core.streams.say = listen
        refused = False
        effects: list[Any] = []
        try:
            effects.extend(self.nodes.perform(core, given))
        except (LocalProtocolError, WouldBlock, DomainStopped):
            refused = True
            if core.fingerprint() != self.cores[core_id].fingerprint():
                raise PropertyViolation(f"a refused call changed the state: {given}") from None
        frames = self.nodes.sent(core, effects)
        if not self.world.frames:
            frames += self.nodes.flush(core)
            frames = [(target, (record,)) for target, records in frames for record in records]
        del core.streams.say  # the copy's own again
        events = tuple(e for e in effects if isinstance(e, AgreementEvent))
        answer = next((e.value for e in effects if isinstance(e, Answer)), None)
        result = _Result(self._intern(core), events, tuple(frames), answer, refused, tuple(said))
        self.memo[core_id, given] = result
        return result

    # -- states and transitions ---------------------------------------------------------------------------------------

    def _initial(self) -> _State:
        ids = tuple(self._intern(self.nodes.new(rank)) for rank in self.domain.ranks)
        # budgets: per member a bit set of spent optional actions (request index * 4 + {withdraw, revoke, idle vote})
        state: _State = (
            ids, ((),) * len(self.links), ((0,) * self.world.size,) * self.world.requests, (), (0,) * self.world.size, 0,
        )  # fmt: skip
        if not self.world.unheard:
            for index in range(min(self.world.requests, self.world.credits)):
                if self.world.same_request and index:
                    break
                for member in range(self.world.size):
                    state = self._call(state, member, self._admission(index), "admit", index)
        return state

    def _admission(self, index: int) -> ev.RequestAdmitted:
        return ev.RequestAdmitted(self.keys[index].request_id, index + 1, self.world.ready)

    def _call(
        self,
        state: _State,
        member: int,
        given: ev.Input,
        what: str,
        index: int,
        extra: tuple[int, ...] = (),
        spent: int = 0,
    ) -> _State:
        """Apply a local call and record it in the histories when it was accepted."""
        ids, channels, rows, schedule, budgets, crashed = state
        result = self._execute(ids[member], given)
        if result.refused:
            raise PropertyViolation(f"refused: member {member} {given}")
        row_list = list(rows)
        if what:
            key: Key = (
                given.keys[0] if isinstance(given, ev.ScheduleActivated) else getattr(given, "key", self.keys[index])
            )
            accepted = what not in ("withdraw", "revoke") or int(result.answer) == 0  # type: ignore[call-overload]
            if what == "publish" and int(result.answer) not in (0,):  # type: ignore[call-overload]
                accepted = False
            if what == "ack" and not result.answer:
                accepted = False
            if accepted:
                row_list[index] = did(row_list[index], member, self.scheduler, what, key.attempt, extra)
        if what == "activate" and member == self.scheduler:
            schedule = (*schedule, *given.keys)  # type: ignore[union-attr]
        if spent:
            budget_list = list(budgets)
            budget_list[member] |= spent
            budgets = tuple(budget_list)
        return self._settle((ids, channels, tuple(row_list), schedule, budgets, crashed), member, result)

    def _settle(self, state: _State, member: int, result: _Result) -> _State:
        ids, channels, rows, schedule, budgets, crashed = state
        ids = (*ids[:member], result.core, *ids[member + 1 :])
        if result.frames:
            channel_list = list(channels)
            for peer, records in result.frames:
                place = self.link_index[member, peer]
                channel_list[place] = (*channel_list[place], records)
            channels = tuple(channel_list)
        if result.said:
            row_list = list(rows)
            for what, index, attempt, extra in result.said:
                row_list[index] = did(row_list[index], member, self.scheduler, what, attempt, extra)
            rows = tuple(row_list)
        state = (ids, channels, rows, schedule, budgets, crashed)
        for event in result.events:
            state = self._hand_over(state, member, event)
        return state

    def _hand_over(self, state: _State, member: int, event: AgreementEvent) -> _State:
        self.exploration.reached.add(type(event).__name__)
        if isinstance(event, ev.Fault):
            if not self.world.crash and not (self.world.round_timeout and event.code is ev.FaultCode.ROUND_TIMEOUT):
                raise PropertyViolation(f"member {member}: {event}")
            return state
        if isinstance(event, ev.Drained) and not all(self.cores[i].ending.reported for i in state[0]):
            raise PropertyViolation(f"member {member}: drained before every rank has decided everything")
        if not hasattr(event, "key"):
            return state
        index = event.key.incarnation - 1
        ids, channels, rows, schedule, budgets, crashed = state
        row_list = list(rows)
        row_list[index] = told(row_list[index], member, self.scheduler, event)
        state = (ids, channels, tuple(row_list), schedule, budgets, crashed)
        if isinstance(event, ev.Aborted) and not self.world.slow_abort_ack:
            state = self._call(state, member, ev.AbortAcknowledged(event.key), "abort_ack", index)
        return state

    def _successors(self, state: _State) -> Iterator[tuple[bool, str, _State]]:
        """(must happen eventually, label, next state)."""
        ids, channels, rows, schedule, budgets, crashed = state
        world = self.world
        for place, frames in enumerate(channels):
            if not frames:
                continue
            source, target = self.links[place]
            if crashed >> target & 1:
                continue
            result = self._execute(ids[target], ("frame", source, frames[0]))
            moved = (*channels[:place], frames[1:], *channels[place + 1 :])
            label = f"{' '.join(Kind(r[0]).name for r in frames[0])} {source}->{target}"
            yield True, label, self._settle((ids, moved, rows, schedule, budgets, crashed), target, result)
        for member in range(world.size):
            if crashed >> member & 1:
                continue
            core = self.cores[ids[member]]
            if core.fault is not None:
                continue
            for target in self.nodes.waiting(core):
                sent = self._execute(ids[member], ("slot", target))
                yield True, f"send {member}->{target}", self._settle(state, member, sent)
            yield from self._local(state, member, core)
        if world.replicated and any(self.cores[i].streams.intents for i in ids):
            yield True, "exchange", self._exchange(state)
        if world.crash and not crashed:
            for member in range(world.size):
                yield False, f"crash {member}", (ids, channels, rows, schedule, budgets, 1 << member)
        if world.evidence and crashed:
            for member in range(world.size):
                core = self.cores[ids[member]]
                if not crashed >> member & 1 and core.fault is None:
                    died = self._execute(ids[member], ev.PeerDied(crashed.bit_length() - 1, "test"))
                    yield False, f"evidence {member}", self._settle(state, member, died)

    def _exchange(self, state: _State) -> _State:
        """Everybody contributes what waits, and everybody hears all of it."""
        said = [self._execute(core, ("slot", EXCHANGE)) for core in state[0]]
        contributions = tuple(tuple(r for _peer, records in result.frames for r in records) for result in said)
        state = (tuple(result.core for result in said), *state[1:])
        for member in range(self.world.size):
            state = self._settle(state, member, self._execute(state[0][member], ("exchange", contributions)))
        return state

    def _local(self, state: _State, member: int, core: Any) -> Iterator[tuple[bool, str, _State]]:
        world = self.world
        ids, channels, rows, schedule, budgets, _crashed = state
        if core.heard < world.requests:
            index = core.heard
            if self._may_admit(core, member, rows, index):
                yield (
                    True,
                    f"admit {index + 1} @{member}",
                    self._call(state, member, self._admission(index), "admit", index),
                )
        for index, base in enumerate(self.keys):
            round_ = core.rounds.open.get(base.incarnation)
            if round_ is None or not round_.heard:
                continue
            key = Key(base.request_id, base.incarnation, round_.attempt)
            ready = round_.ready
            name = f"{base.incarnation}.{round_.attempt} @{member}"
            spent = budgets[member]
            unit = 1 << 8 * index  # eight bits per request
            withdraw_bit, revoke_bit, idle_bit, recall_bit, early_bit = unit, 2 * unit, 4 * unit, 8 * unit, 16 * unit
            voted = round_.terminal >= TerminalState.VOTED
            if ready is ReadyState.IDLE and not voted:
                if round_.attempt < world.attempts:
                    yield True, f"publish {name}", self._call(state, member, ev.ReadyPublished(key), "publish", index)
                else:  # hosts give up: every further attempt is withdrawn for good
                    give_up = ev.WithdrawRequested(key, Reason.TIMEOUT)
                    yield True, f"give up {name}", self._call(state, member, give_up, "withdraw", index)
                if member in world.idle_voters and not spent & idle_bit:
                    vote, extra = self._vote(member, key)
                    yield (
                        False,
                        f"idle vote {name}",
                        self._call(state, member, vote, "terminal", index, extra, idle_bit),
                    )
            if ready is ReadyState.PREPARED:
                yield True, f"ack {name}", self._call(state, member, ev.PrepareAcknowledged(key), "ack", index)
            if ready is ReadyState.ABORTING and world.slow_abort_ack:
                yield (
                    True,
                    f"abort ack {name}",
                    self._call(state, member, ev.AbortAcknowledged(key), "abort_ack", index),
                )
            if (
                member in world.withdrawers
                and not spent & withdraw_bit
                and ready
                in (ReadyState.IDLE, ReadyState.VOTED, ReadyState.PREPARED, ReadyState.LEASED, ReadyState.ABORTING)
                and not (voted and ready is ReadyState.IDLE)
            ):
                reason = world.reasons[member % len(world.reasons)] if world.reasons else world.withdraw_reason
                call = ev.WithdrawRequested(key, reason)
                yield False, f"withdraw {name}", self._call(state, member, call, "withdraw", index, (), withdraw_bit)
            leased = ready in (ReadyState.LEASED, ReadyState.RELEASED)
            if world.revoke and member == self.scheduler and leased and not spent & revoke_bit:
                revoke = ev.RevokeRequested(key, Reason.CANCELLED)
                yield False, f"revoke {name}", self._call(state, member, revoke, "revoke", index, (), revoke_bit)
            if world.recall and member != self.scheduler and ready is ReadyState.LEASED and not spent & recall_bit:
                recalled = self._execute(ids[member], ev.RecallRequested(key, Reason.CAPACITY))
                yield False, f"recall {name}", self._settle(self._spend(state, member, recall_bit), member, recalled)
            ending = ready in (ReadyState.WITHDRAWN, ReadyState.REVOKED, ReadyState.ABORTING, ReadyState.ABORT_ACKED)
            if member in world.early and ending and not spent & early_bit and key.attempt < world.attempts:
                after = key._replace(attempt=key.attempt + 1)
                early = self._spend(state, member, early_bit)
                published = self._execute(ids[member], ev.ReadyPublished(after))
                yield False, f"publish early {name}", self._settle(early, member, published)
                refusal = ev.WithdrawRequested(after, Reason.NOT_READY)
                promised = self._call(early, member, refusal, "withdraw", index)
                yield False, f"withdraw early {name}", promised
                # What was promised is kept whatever is said of it afterwards.
                changed = self._execute(promised[0][member], ev.ReadyPublished(after))
                yield False, f"withdraw, then publish early {name}", self._settle(promised, member, changed)
            if member == self.scheduler and ready is ReadyState.RELEASED:
                yield (
                    True,
                    f"activate {name}",
                    self._call(state, member, ev.ScheduleActivated((key,)), "activate", index),
                )
            if member != self.scheduler and ready is ReadyState.LEASED and key in schedule:
                earlier = schedule[: schedule.index(key)]
                if all(self._activated(core, rows, k, member) for k in earlier):
                    yield (
                        True,
                        f"activate {name}",
                        self._call(state, member, ev.ScheduleActivated((key,)), "activate", index),
                    )
            over = ready in (ReadyState.NOT_USED, ReadyState.ACTIVATED, ReadyState.COMPLETE, ReadyState.FINALIZED)
            if over and not voted and member in world.doubters and round_.terminal is TerminalState.OPEN:
                doubted = self._execute(ids[member], ev.DoubtRaised(key, Reason.DOUBT))
                yield False, f"doubt {name}", self._settle(state, member, doubted)
            if over and not voted and round_.doubt_expired:
                unproven = ev.TerminalVoted(key, Outcome.FAILED, Disposition.QUARANTINE, Reason.DOUBT)
                extra = (int(Outcome.FAILED), int(Disposition.QUARANTINE))
                yield True, f"quarantine {name}", self._call(state, member, unproven, "terminal", index, extra)
            if over and not voted and world.terminal:
                vote, extra = self._vote(member, key)
                yield True, f"terminal {name}", self._call(state, member, vote, "terminal", index, extra)
        passed = budgets[member] >> 8 * world.requests
        if passed < world.ticks and (world.silence or self.nodes.is_armed(core)):
            empty = sum(1 << a for (a, b), place in self.link_index.items() if b == member and not channels[place])
            late = self._execute(ids[member], ("silence", empty) if world.silence else ev.SweepCompleted(0))
            spent_state = self._spend(state, member, (passed + 1 ^ passed) << 8 * world.requests, replace=True)
            yield False, f"deadlines @{member}", self._settle(spent_state, member, late)
        if world.drain and member == self.scheduler and core.heard == world.requests and core.rounds.last is None:
            drain = self._execute(ids[member], ev.DrainRequested(world.requests))
            row_list = list(rows)
            for index, base in enumerate(self.keys):  # the core withdraws and revokes on the host's behalf
                round_ = core.rounds.open.get(base.incarnation)
                if round_ is not None and round_.ready in (
                    ReadyState.IDLE, ReadyState.VOTED, ReadyState.PREPARED, ReadyState.LEASED, ReadyState.RELEASED,
                ):  # fmt: skip
                    what = "revoke" if round_.ready in (ReadyState.LEASED, ReadyState.RELEASED) else "withdraw"
                    row_list[index] = did(row_list[index], member, self.scheduler, what, round_.attempt)
            drained = (state[0], state[1], tuple(row_list), *state[3:])
            yield True, "drain", self._settle(drained, member, drain)

    def _spend(self, state: _State, member: int, bits: int, *, replace: bool = False) -> _State:
        """With a budget used; ``replace``: the bits are turned over."""
        budgets = list(state[4])
        budgets[member] = budgets[member] ^ bits if replace else budgets[member] | bits
        return (*state[:4], tuple(budgets), state[5])

    def _may_admit(self, core: Any, member: int, rows: tuple[Row, ...], index: int) -> bool:
        if member != self.scheduler:
            return bool(rows[index][self.scheduler] & HEARD)
        if core.rounds.last is not None:
            return False
        if self.world.same_request and core.rounds.open:
            return False
        return bool(core.rounds.open_count < self.world.credits)

    def _activated(self, core: Any, rows: tuple[Row, ...], key: Key, member: int) -> bool:
        round_ = core.rounds.open.get(key.incarnation)
        return round_ is None or round_.ready in (ReadyState.ACTIVATED, ReadyState.COMPLETE)

    def _vote(self, member: int, key: Key) -> tuple[ev.TerminalVoted, tuple[int, int]]:
        outcome = (
            Outcome(self.world.terminal[member % len(self.world.terminal)]) if self.world.terminal else Outcome.FAILED
        )
        return ev.TerminalVoted(key, outcome, Disposition.RELEASE, Reason.NONE), (int(outcome), 0)

    # -- the search ----------------------------------------------------------------------------------------------------

    def run(self) -> Exploration:
        """Breadth first, so that a violation comes with a shortest trace."""
        found = self.exploration
        parents: dict[_State, tuple[_State, str] | None] = {}
        state: _State | None = None
        try:
            state = self._initial()
            parents[state] = None
            queue = deque([state])
            while queue:
                state = queue.popleft()
                must = False
                for required, label, successor in self._successors(state):
                    found.transitions += 1
                    must = must or required
                    if successor not in parents:
                        parents[successor] = (state, label)
                        queue.append(successor)
                if not must:
                    self._finished(state)
                if len(parents) > self.states_max:
                    found.complete = False
                    break
        except (PropertyViolation, InvariantViolation) as violation:
            found.violation = str(violation)
            trace: list[str] = []
            step = parents.get(state) if state is not None else None
            while step is not None:
                trace.append(step[1])
                step = parents[step[0]]
            found.trace = tuple(reversed(trace))
        found.states = len(parents)
        found.cores = len(self.cores)
        return found

    def _finished(self, state: _State) -> None:
        found = self.exploration
        found.finished += 1
        ids, _channels, rows, _schedule, _budgets, crashed = state
        if crashed:
            return
        cores = [self.cores[i] for i in ids]
        if any(core.fault is not None for core in cores):
            if not all(core.fault is not None for core in cores):
                raise PropertyViolation("liveness: one rank has stopped, and another goes on")
            return
        found.outcomes.add(tuple(ended(row) for row in rows))
        for core in cores:
            unfinished = bool(self.world.terminal) or bool(self.world.withdrawers)
            open_rounds = [r for r in core.rounds.open.values() if not self._resting(r.ready)]
            if (
                open_rounds
                or core.heard != self.world.requests
                or (unfinished and self.world.terminal and core.rounds.open)
            ):
                left = [(r.incarnation, r.ready.name, r.terminal.name) for r in core.rounds.open.values()]
                raise PropertyViolation(
                    f"liveness: nothing must happen any more, but rank {core.rank} heard of {core.heard} and has open {left}"
                )
            if self.world.drain and not core.drained:
                raise PropertyViolation(f"liveness: rank {core.rank} never drained")
        if (
            self.digests
            and not self.world.drain
            and len({(c.member.digest, c.member.committed, c.member.closed_rounds) for c in cores}) != 1
        ):
            raise PropertyViolation("digests differ at the end")

    def _resting(self, ready: ReadyState) -> bool:
        """Readiness-only worlds end in COMPLETE; the terminal phase is not voted there."""
        return not self.world.terminal and ready in (ReadyState.COMPLETE, ReadyState.FINALIZED)


CI_WORLDS: dict[str, World] = {
    "1 rank": World(1, withdrawers=(0,), revoke=True, terminal=(0,)),
    "2 ranks, everything": World(
        2, withdrawers=(0, 1), revoke=True, terminal=(0, 1), idle_voters=(0, 1), unheard=True, slow_abort_ack=True,
    ),
    "2 ranks, reopening": World(
        2, withdrawers=(0, 1), withdraw_reason=Reason.NOT_READY, revoke=True, terminal=(0, 2), attempts=2, unheard=True,
    ),
    "2 ranks, drain": World(2, withdrawers=(1,), terminal=(0, 1), drain=True, unheard=True),
    "2 ranks, scheduler coordinates": World(2, withdrawers=(0, 1), revoke=True, terminal=(0, 1), coordinator=0, unheard=True),
    "3 ranks, all withdraw": World(3, withdrawers=(0, 1, 2), revoke=True, terminal=(0, 1, 2)),
    "3 ranks, unheard": World(3, withdrawers=(0, 1), terminal=(0, 1, 0), unheard=True, lazy=(Kind.VOTE,)),
    "3 ranks, crash": World(3, withdrawers=(1,), revoke=True, terminal=(0, 1, 2), crash=True, lazy=()),
    "4 ranks, one withdraws": World(4, withdrawers=(1,), revoke=True, lazy=()),
    "4 ranks, two withdraw": World(4, withdrawers=(1, 3), revoke=True, terminal=(0, 1, 2, 0), lazy=()),
    "4 ranks, terminal": World(4, ready=False, terminal=(0, 1, 2, 0)),
    "2 ranks x 2 requests": World(2, 2, withdrawers=(1,), revoke=True, terminal=(0, 1), lazy=(Kind.VOTE,)),
    "2 ranks x 2, one credit": World(2, 2, withdrawers=(0,), terminal=(1, 0), credits=1, unheard=True, lazy=()),
    "2 ranks x 2, drain, one credit": World(
        2, 2, withdrawers=(1,), terminal=(0, 1), drain=True, credits=1, unheard=True, lazy=(),
    ),
    "3 ranks, drain, scheduler coordinates": World(
        3, withdrawers=(1,), terminal=(0, 1, 0), drain=True, coordinator=0, lazy=(),
    ),
    "2 ranks, doubt and quarantine": World(
        2, withdrawers=(1,), terminal=(0, 0), doubters=(0, 1), ticks=1, lazy=(),
    ),
    "3 ranks, doubt": World(3, ready=False, terminal=(0, 1, 0), doubters=(0, 2), ticks=1, lazy=()),
    "3 ranks, recall": World(3, withdrawers=(1,), terminal=(0,), recall=True, revoke=True, attempts=2, lazy=()),
    "2 ranks, leases expire": World(2, terminal=(0, 1), lease_timeout=True, ticks=2, withdrawers=(1,), lazy=()),
    "2 ranks, the next attempt": World(
        2, withdrawers=(0,), reasons=(Reason.NOT_READY,), revoke=True, terminal=(0, 1), attempts=2, early=(0,), lazy=(),
    ),
    "2 ranks, mixed reasons": World(
        2, withdrawers=(0, 1), reasons=(Reason.NOT_READY, Reason.CANCELLED), revoke=True, terminal=(0,), attempts=2,
        slow_abort_ack=True, lazy=(),
    ),
    "2 ranks, drain with reopening": World(
        2, withdrawers=(0, 1), withdraw_reason=Reason.NOT_READY, terminal=(0, 1), attempts=2, drain=True, lazy=(),
    ),
    "2 ranks, frames": World(2, withdrawers=(0, 1), revoke=True, terminal=(0, 1), frames=True),
    "3 ranks, frames": World(3, withdrawers=(1,), terminal=(0, 1, 2), frames=True),
    "3 ranks x 2, terminal, frames": World(3, 2, ready=False, terminal=(0, 1, 2), frames=True),
    "3 replicas, all withdraw": World(3, withdrawers=(0, 1, 2), revoke=True, terminal=(0, 1, 2), replicated=True),
    "2 replicas x 2, drain, one credit": World(
        2, 2, withdrawers=(1,), terminal=(0, 1), drain=True, credits=1, unheard=True, replicated=True,
    ),
    "2 ranks, round time-outs": World(
        2, withdrawers=(1,), revoke=True, terminal=(0, 1), round_timeout=True, ticks=1, lazy=(),
    ),
    "3 ranks, silence": World(3, ready=False, terminal=(0, 1, 0), silence=True, ticks=1, lazy=()),
    "2 x 2 ranks, all phases": World(4, groups=(2, 2), withdrawers=(3,), revoke=True, terminal=(0, 1, 2, 0), lazy=()),
    "2 x 2 ranks, idle voters": World(4, groups=(2, 2), terminal=(0, 1, 2, 0), idle_voters=(1, 3), lazy=()),
    "2 x 2 ranks, doubt": World(4, groups=(2, 2), ready=False, terminal=(0, 1, 0, 0), doubters=(1, 2), ticks=1, lazy=()),
    "2 x 2 ranks, leases expire": World(4, groups=(2, 2), terminal=(0, 1), lease_timeout=True, ticks=1, lazy=()),
    "2 x 2 ranks x 2, drain, one credit": World(
        4, 2, groups=(2, 2), ready=False, terminal=(0, 1, 0, 0), credits=1, unheard=True, drain=True, lazy=(),
    ),
    "2 + 1 ranks, round time-outs": World(
        3, groups=(2, 1), ready=False, terminal=(0, 1, 0), round_timeout=True, ticks=1, lazy=(),
    ),
    "2 ranks, reused id": World(2, 2, withdrawers=(1,), terminal=(0, 1), same_request=True, unheard=True, lazy=()),
}  # fmt: skip
"""Explored by the tests."""

NIGHTLY_WORLDS: dict[str, World] = {
    "2 ranks, the next attempt, of both": World(
        2, withdrawers=(0, 1), reasons=(Reason.NOT_READY,), revoke=True, terminal=(0, 1), attempts=2, early=(0, 1),
        lazy=(),
    ),
    "3 ranks, mixed reasons": World(
        3, withdrawers=(0, 1, 2), reasons=(Reason.NOT_READY, Reason.CANCELLED, Reason.CAPACITY), terminal=(0,),
        attempts=2, slow_abort_ack=True, lazy=(),
    ),
    "2 ranks x 2, frames": World(2, 2, withdrawers=(1,), terminal=(0, 1), frames=True),
    "2 ranks x 2, drain, frames, one credit": World(
        2, 2, withdrawers=(1,), terminal=(0, 1), credits=1, frames=True, unheard=True, drain=True,
    ),
    "2 replicas, reopening": World(
        2, withdrawers=(0, 1), withdraw_reason=Reason.NOT_READY, revoke=True, terminal=(0, 2), attempts=2, unheard=True,
        replicated=True,
    ),
    "2 replicas, doubt and quarantine": World(
        2, withdrawers=(1,), terminal=(0, 0), doubters=(0, 1), ticks=1, replicated=True,
    ),
    "2 ranks, silence and drain": World(
        2, withdrawers=(1,), terminal=(0, 1), silence=True, ticks=1, drain=True, lazy=(),
    ),
    "2 x 2 ranks, unheard": World(4, groups=(2, 2), withdrawers=(3,), terminal=(0, 1, 2, 0), unheard=True, lazy=()),
    "3 replicas, idle voters": World(
        3, terminal=(0, 1, 2), idle_voters=(0, 1, 2), withdrawers=(1,), unheard=True, replicated=True,
    ),
    "3 ranks, round time-outs": World(
        3, withdrawers=(1,), terminal=(0, 1, 0), round_timeout=True, ticks=1, lazy=(),
    ),
    "2 ranks, silence and quarantine": World(
        2, withdrawers=(1,), terminal=(0, 0), doubters=(0, 1), silence=True, ticks=1, lazy=(),
    ),
    "2 x 2 ranks, round time-outs": World(
        4, groups=(2, 2), ready=False, terminal=(0, 1, 0, 0), round_timeout=True, ticks=1, lazy=(),
    ),
    "2 x 2 ranks, all withdraw": World(4, groups=(2, 2), withdrawers=(0, 1, 2, 3), revoke=True, lazy=()),
    "3 + 1 ranks": World(4, groups=(3, 1), withdrawers=(2,), revoke=True, terminal=(0, 1, 2, 0), lazy=()),
    "2 x 2 ranks, the coordinator's group schedules": World(
        4, groups=(2, 2), withdrawers=(1, 3), revoke=True, coordinator=0, lazy=(),
    ),
    "2 x 2 ranks, the second group schedules": World(
        4, groups=(2, 2), scheduler=2, coordinator=0, withdrawers=(1,), revoke=True, terminal=(0, 1, 2, 0), lazy=(),
    ),
    "2 x 2 ranks, reopening": World(
        4, groups=(2, 2), withdrawers=(1,), withdraw_reason=Reason.NOT_READY, revoke=True, attempts=2, lazy=(),
    ),
    "2 x 2 ranks, mixed reasons": World(
        4, groups=(2, 2), withdrawers=(1, 2), reasons=(Reason.NOT_READY, Reason.NOT_READY, Reason.CANCELLED),
        attempts=2, lazy=(),
    ),
    "2 x 2 ranks, the next attempt": World(
        4, groups=(2, 2), withdrawers=(1,), reasons=(Reason.NOT_READY,), attempts=2, early=(1,), lazy=(),
    ),
    "2 x 2 ranks, idle voters and reopening": World(
        4, groups=(2, 2), terminal=(0, 1, 2, 0), idle_voters=(1, 2), withdrawers=(3,),
        withdraw_reason=Reason.NOT_READY, attempts=2, lazy=(),
    ),
    "2 x 2 ranks, recall": World(
        4, groups=(2, 2), withdrawers=(1,), terminal=(0,), recall=True, revoke=True, lazy=(),
    ),
    "2 x 2 ranks, drain": World(4, groups=(2, 2), terminal=(0, 1), drain=True, lazy=()),
    "2 x 2 ranks, crash": World(4, groups=(2, 2), ready=False, terminal=(0, 1, 0, 0), crash=True, lazy=()),
    "2 x 2 ranks, crash, evidence": World(
        4, groups=(2, 2), ready=False, terminal=(0, 1, 0, 0), crash=True, evidence=True, lazy=(),
    ),
    "2 x 2 ranks, frames": World(4, groups=(2, 2), withdrawers=(3,), terminal=(0, 1, 2, 0), frames=True),
    "4 ranks, all withdraw": World(4, withdrawers=(0, 1, 2, 3), revoke=True, lazy=()),
    "4 ranks, one withdraws, terminal": World(4, withdrawers=(2,), revoke=True, terminal=(0, 1, 2, 0), lazy=()),
    "3 ranks, crash, evidence": World(
        3, withdrawers=(0, 1, 2), revoke=True, terminal=(0, 1, 2), crash=True, evidence=True, lazy=(),
    ),
    "4 ranks, crash": World(4, withdrawers=(1,), crash=True, lazy=()),
    "3 ranks x 2, one withdrawer": World(3, 2, withdrawers=(1,), lazy=()),
    "3 ranks, idle voters": World(3, terminal=(0, 1, 2), idle_voters=(0, 1, 2), withdrawers=(1,), unheard=True),
    "2 ranks x 2, drain": World(2, 2, withdrawers=(1,), terminal=(0, 1), drain=True, lazy=()),
    "3 ranks, reopening": World(
        3, withdrawers=(1, 2), withdraw_reason=Reason.NOT_READY, revoke=True, terminal=(0, 1, 0), attempts=2, lazy=(),
    ),
    "3 ranks, drain": World(3, withdrawers=(1,), terminal=(0, 1, 0), drain=True),
    "2 ranks x 2, all withdraw": World(2, 2, withdrawers=(0, 1), revoke=True, terminal=(0, 1)),
}  # fmt: skip
"""Explored nightly, besides the others."""
