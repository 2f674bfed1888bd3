"""A seeded simulation of a whole group: real shells, real frames, a clock of its own, and everything that goes wrong.

Each seed draws its own world ("swarm"): size, bounds, delays, how lazily ranks poll, what hosts do, which faults. A failure
is a :class:`SimulationFailure` whose message holds the seed; ``simulate(seed)`` replays it exactly. After the faults comes a
healing phase that must converge: every admission decided on every live rank, a proven drain, equal evidence.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from pp_agreement import _events as ev
from pp_agreement._agreement import Agreement
from pp_agreement._config import AgreementConfig, Domain
from pp_agreement._errors import DomainStopped, LocalProtocolError, WouldBlock
from pp_agreement._events import (
    AgreementEvent,
    Disposition,
    FinalizeMode,
    Key,
    Outcome,
    Reason,
    RevokeResult,
    WithdrawResult,
)
from pp_agreement._inprocess import InProcessNetwork
from pp_agreement._round import Round
from pp_agreement._state import Kind, ReadyState, TerminalState
from pp_agreement._verify import verify
from pp_agreement.testing._monitor import Monitor, PropertyViolation

CLEAN, MALFORMED, CRASH, DEATH, HOST_FAILURE = "clean", "malformed", "crash", "death", "host failure"
INTERRUPT = "interrupt"
_SAID = {
    int(Kind.VOTE): "publish",
    int(Kind.WITHDRAW): "withdraw",
    int(Kind.ACK): "ack",
    int(Kind.ABORT_ACK): "abort_ack",
    int(Kind.ACTIVATE_ACK): "activate",
    int(Kind.REVOKE): "revoke",
    int(Kind.TERMINAL): "terminal",
}
_TICK_S = 0.02
_HEAL_TICKS = 1500


class _Interrupt(BaseException):
    """What a KeyboardInterrupt does: it comes between any two lines."""


class SimulationFailure(Exception):
    """A seed broke a property."""


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """What one seed did."""

    seed: int
    fault: str
    size: int
    admitted: int
    committed: int
    closed: int
    frames: int
    ticks: int
    refusals: int


class _Host:
    """A rank's host: does what events oblige it to, in any order, when it likes to."""

    def __init__(self, simulation: _Simulation, agreement: Agreement) -> None:
        self.simulation = simulation
        self.agreement = agreement
        self.me = simulation.domain.index_of(agreement.rank)
        self.todo: list[tuple[str, Key]] = []
        self.admitted = 0
        self.scheduled = 0  # entries of the schedule log that this follower has activated
        self.offset_s = 0.0
        self.leased: list[Key] = []
        self.released: list[Key] = []
        self.open_keys: dict[int, Key] = {}
        self.polls = 0

        core = agreement._core
        said = core.streams.say

        def listen(
            round_: Round, slot: int, kind: int, outcome: int = 0, disposition: int = 0, reason: int = 0
        ) -> None:
            """What a rank says is what it did, also where the core says it on the host's behalf."""
            what = _SAID.get(Kind(kind))
            if what is not None:
                key = Key(round_.request_id, round_.incarnation, round_.attempt)
                self.did(what, key, (outcome, disposition) if what == "terminal" else ())
            said(round_, slot, kind, outcome, disposition, reason)

        core.streams.say = listen  # type: ignore[method-assign]

    def did(self, what: str, key: Key, extra: tuple[int, ...] = ()) -> None:
        self.simulation.monitor.did(self.me, what, key, extra)

    def poll(self) -> None:
        self.polls += 1
        for event in self.agreement.poll():
            self.simulation.monitor.told(self.me, event)
            self.react(event)

    def react(self, event: AgreementEvent) -> None:
        if isinstance(event, ev.Prepared):
            self.todo.append(("ack", event.key))
        elif isinstance(event, ev.Released):
            self.released.append(event.key)
        elif isinstance(event, ev.Revoked):
            self.released = [k for k in self.released if k.incarnation != event.key.incarnation]
        elif isinstance(event, ev.Aborted):
            self.todo.append(("abort_ack", event.key))
            self.released = [k for k in self.released if k.incarnation != event.key.incarnation]
        elif isinstance(event, ev.Finalized):
            if event.mode is FinalizeMode.CLOSED:
                self.open_keys.pop(event.key.incarnation, None)
            elif event.mode is FinalizeMode.TERMINAL:
                self.todo.append(("terminal", event.key))
            else:
                again = event.key._replace(attempt=event.key.attempt + 1)
                self.open_keys[again.incarnation] = again
                self.todo.append(("publish" if event.key.attempt < 3 else "give_up", again))
        elif isinstance(event, ev.Committed):
            self.open_keys.pop(event.key.incarnation, None)
        elif isinstance(event, ev.Fault):
            self.simulation.saw_fault(self, event)
        elif isinstance(event, ev.DoubtExpired):
            self.todo.append(("terminal", event.key))

    def admit_next(self) -> bool:
        log = self.simulation.log
        if self.agreement.is_scheduler:
            if self.simulation.healing or self.simulation.planned == len(log):
                return False
            request_id, ready = self.simulation.plan[len(log)]
            number = self.agreement.next_incarnation
            try:
                key = self.agreement.admit(request_id, number, ready)
            except WouldBlock:
                return False
            except LocalProtocolError as error:
                if "still undecided" not in str(error):
                    raise
                return False
            log.append((request_id, number, ready))
        else:
            if self.admitted >= len(log):
                return False
            request_id, number, ready = log[self.admitted]
            try:
                key = self.agreement.admit(request_id, number, ready)
            except DomainStopped:  # the broadcast contradicts what a malformed frame said
                return True
        self.admitted += 1
        if self.agreement.stopped is not None:
            return True
        self.did("admit", key)
        self.open_keys[number] = key
        self.todo.append(("publish" if ready else "terminal", key))
        return True

    def act(self, what: str, key: Key) -> bool:
        """One obligation; False: not possible yet."""
        agreement = self.agreement
        if what == "publish":
            state = agreement.state(key)
            if (
                state is None or state.terminal < TerminalState.VOTED
            ):  # a host that voted terminal publishes nothing more
                agreement.publish_ready(key)
        elif what == "give_up":
            self.withdraw(key, Reason.TIMEOUT)
        elif what == "ack":
            agreement.acknowledge_prepare(key)
        elif what == "abort_ack":
            agreement.acknowledge_abort(key)
        elif what == "terminal":
            return self.vote(key)
        return True

    def vote(self, key: Key) -> bool:
        state = self.agreement.state(key)
        if state is None or state.terminal >= TerminalState.VOTED:
            return True
        draw = self.simulation.random
        disposition = Disposition.RELEASE
        if state.terminal is TerminalState.DOUBTED and draw.random() < 0.5:
            outcome, disposition = Outcome.FAILED, Disposition.QUARANTINE
        else:
            outcome = draw.choice((Outcome.COMPLETED, Outcome.COMPLETED, Outcome.FAILED, Outcome.CANCELLED))
        try:
            self.agreement.vote_terminal(key, outcome, disposition, draw.choice((Reason.NONE, Reason.HOST)))
        except LocalProtocolError as error:
            if "before the deadline" in str(error) or "attempt is open" in str(error):
                return False
            raise
        return True

    def withdraw(self, key: Key, reason: Reason) -> None:
        result = self.agreement.withdraw(key, reason)
        if result is WithdrawResult.WILL_ABORT:
            state = self.agreement.state(key)
            if state is not None and state.attempt == key.attempt:
                self.did("withdraw", key)

    def whim(self) -> None:
        """Something that nobody obliged the host to do."""
        draw, agreement = self.simulation.random, self.agreement
        if not self.open_keys:
            return
        key = draw.choice(list(self.open_keys.values()))
        state = agreement.state(key)
        if state is None or not state.heard:
            return
        key = key._replace(attempt=state.attempt)
        choice = draw.random()
        if choice < 0.35:
            if state.ready is not ReadyState.NOT_USED:
                self.withdraw(key, draw.choice((Reason.CANCELLED, Reason.NOT_READY, Reason.NOT_READY)))
        elif choice < 0.55 and agreement.is_scheduler:
            result = agreement.revoke(key, draw.choice((Reason.CANCELLED, Reason.NOT_READY)))
            leased = state.ready in (ReadyState.LEASED, ReadyState.RELEASED)
            if leased and result is RevokeResult.WILL_ABORT:
                self.released = [k for k in self.released if k.incarnation != key.incarnation]
        elif choice < 0.65 and not agreement.is_scheduler:
            agreement.recall(key)
        elif choice < 0.8:
            if state.ready in (ReadyState.NOT_USED, ReadyState.ACTIVATED, ReadyState.COMPLETE) and state.terminal < 2:
                agreement.doubt(key)
        elif choice < 0.9:
            if state.ready is ReadyState.IDLE and state.terminal is TerminalState.OPEN:
                self.todo = [(w, k) for w, k in self.todo if not (w == "publish" and k.incarnation == key.incarnation)]
                self.vote(key)
        else:
            agreement.busy(draw.uniform(0, 1))

    def schedule(self) -> None:
        """The scheduling rank picks among the released; followers follow its log."""
        simulation, draw = self.simulation, self.simulation.random
        if self.agreement.is_scheduler:
            if self.released and not self.agreement._core.rounds.last:
                picked = draw.sample(self.released, draw.randint(1, len(self.released)))
                self.released = [k for k in self.released if k not in picked]
                self.agreement.activate(picked)
                for key in picked:
                    self.todo.append(("terminal", key))
                simulation.schedule.extend(picked)
            return
        upto = draw.randint(self.scheduled, len(simulation.schedule))
        keys = simulation.schedule[self.scheduled : upto]
        if keys:
            self.agreement.activate(keys)
            for key in keys:
                self.todo.append(("terminal", key))
            self.scheduled = upto

    def misuse(self) -> None:
        """A call that must be refused, and must change nothing."""
        draw, agreement, log = self.simulation.random, self.agreement, self.simulation.log
        calls: list[Callable[[], object]] = [
            lambda: agreement.admit(1, agreement.next_incarnation + 1 + draw.randint(0, 3)),
            lambda: agreement.admit(2**63, agreement.next_incarnation),
            lambda: agreement.publish_ready(Key(1, len(log) + 1000)),
            lambda: agreement.acknowledge_abort(Key(1, len(log) + 1)),
            lambda: agreement.activate([Key(1, len(log) + 7)]),
            lambda: agreement.vote_terminal(Key(1, len(log) + 9), Outcome.COMPLETED),
            lambda: agreement.start_drain(-1),
            lambda: agreement.busy(1e9),
            lambda: agreement.busy("long"),  # type: ignore[arg-type]
            lambda: agreement.publish_ready((1, 1, 0)),  # type: ignore[arg-type]
            lambda: agreement.activate([None]),  # type: ignore[list-item]
            lambda: agreement.admit("1", agreement.next_incarnation),  # type: ignore[arg-type]
            lambda: agreement.admit(1, agreement.next_incarnation, 1),  # type: ignore[arg-type]
        ]
        if self.open_keys:
            key = draw.choice(list(self.open_keys.values()))
            state = agreement.state(key)
            if state is not None and state.heard:
                foreign = key._replace(request_id=key.request_id + 1)
                calls = [
                    lambda: (
                        agreement.publish_ready(key._replace(attempt=state.attempt + 7))
                        if state.ready is not ReadyState.NOT_USED
                        else agreement.publish_ready(key)
                    ),
                    lambda: agreement.vote_terminal(foreign, Outcome.COMPLETED),
                    lambda: agreement.vote_terminal(key, Outcome.COMPLETED, Disposition.QUARANTINE),
                    lambda: agreement.withdraw(foreign),
                    lambda: agreement.withdraw(key, 7),  # type: ignore[arg-type]
                    lambda: agreement.vote_terminal(key, 1),  # type: ignore[arg-type]
                    lambda: agreement.doubt(key, 99),  # type: ignore[arg-type]
                    lambda: agreement.publish_ready(key._replace(attempt=-1)),
                ]
        before = agreement._core.fingerprint()
        try:
            draw.choice(calls)()
        except (LocalProtocolError, DomainStopped):
            self.simulation.refusals += 1
        else:
            raise PropertyViolation(f"member {self.me}: a misuse was accepted")
        if agreement._core.fingerprint() != before:
            raise PropertyViolation(f"member {self.me}: a refused call changed the state")


class _Simulation:
    def __init__(self, seed: int) -> None:
        draw = self.random = random.Random(seed)  # noqa: S311 - a simulation must be repeatable
        self.seed = seed
        self.domain = self.draw_domain()
        self.size = self.domain.size
        self.config = AgreementConfig(
            credits=draw.choice((1, 2, 3, 8)),
            frame_bytes_max=draw.choice((256, 256, 1024, 16_384)),
            frames_per_poll_max=draw.choice((1, 2, 64)),
            heartbeat_s=0.2,
            silence_s=draw.choice((1.0, 3.0)),
            startup_s=5.0,
            lease_timeout_s=draw.choice((None, None, 0.3)),
            doubt_deadline_s=draw.choice((0.0, 0.5)),
            round_timeout_s=None,
            quarantine_rounds_max=1000,
            story_entries_max=draw.choice((0, 8, 64)),
        )
        self.now_s = 1000.0
        mean_s = draw.choice((0.0, 0.01, 0.05, 0.2))
        self.network = InProcessNetwork(
            self.domain,
            window=draw.choice((1, 2, 4)),
            clock=lambda: self.now_s,
            delay_s=(lambda _a, _b: draw.expovariate(1 / mean_s)) if mean_s else None,
        )
        self.monitor = Monitor(self.size, self.domain.scheduler_index)
        self.hosts: list[_Host] = []
        for rank in self.domain.ranks:
            agreement = self.agreement(rank, self._clock_of(len(self.hosts)))
            agreement.open()
            self.hosts.append(_Host(self, agreement))
        reuse = draw.random() < 0.3
        only_terminal = draw.random() < 0.25
        self.planned = draw.randint(1, 10)
        self.plan = [
            (draw.randint(1, 3) if reuse else 100 + i, not only_terminal and draw.random() < 0.7)
            for i in range(self.planned)
        ]
        self.log: list[tuple[int, int, bool]] = []
        self.schedule: list[Key] = []
        self.healing = False
        self.refusals = 0
        self.fault = draw.choices((CLEAN, MALFORMED, CRASH, DEATH, HOST_FAILURE, INTERRUPT), (60, 12, 10, 12, 6, 6))[0]
        if self.size == 1:
            self.fault = CLEAN
        self.fault_tick = draw.randint(2, 60)
        self.ticks = draw.randint(30, 90)
        self.poll_chance = {h.me: draw.choice((1.0, 0.7, 0.3, 0.1)) for h in self.hosts}
        self.act_chance = draw.choice((1.0, 0.5, 0.2))
        self.whim_chance = draw.choice((0.0, 0.02, 0.15))
        self.clog_chance = draw.choice((0.0, 0.0, 0.05))
        self.jump_chance = draw.choice((0.0, 0.0, 0.02))
        self.dead: set[int] = set()
        self.stopped: set[int] = set()

    def draw_domain(self) -> Domain:
        """Who takes part, in which roles."""
        draw = self.random
        ranks = draw.sample(range(10), draw.choice((1, 2, 2, 3, 3, 4, 4, 6)))
        return Domain(
            draw.randint(0, 5),
            tuple(ranks),
            scheduling_rank=draw.choice(ranks) if draw.random() < 0.3 else None,
            coordinator_rank=draw.choice(ranks) if draw.random() < 0.3 else None,
            epoch=draw.randint(0, 3),
        )

    def agreement(self, rank: int, clock: Callable[[], float]) -> Agreement:
        """One rank's shell."""
        return Agreement(self.domain, rank, self.network.transport(rank), self.config, clock)

    def link_to_spoil(self) -> tuple[int, int]:
        """A link on which frames travel."""
        coordinator = self.domain.coordinator_index
        other = self.random.choice([h.me for h in self.hosts if h.me != coordinator])
        return self.random.choice(((other, coordinator), (coordinator, other)))

    def places(self, agreement: Agreement) -> tuple[tuple[object, str], ...]:
        """Where an interrupt may come: (object, method)."""
        core = agreement._core
        return (
            (core.rounds, "note"), (core.streams, "fan_out"), (core, "_deliver_local"), (core.member, "hear"),
            (core.coordinator, "hear"), (core.rounds, "retire"), (core.streams, "queue_up"), (core.streams, "fill"),
        )  # fmt: skip

    def is_between_steps(self, _place: object) -> bool:
        """Whether the place does not run inside a step of the core."""
        return False

    def observers(self, gone: int) -> list[_Host]:
        """Who has to notice the silence of a rank."""
        coordinator = self.domain.coordinator_index
        live = [h for h in self.hosts if h.me not in self.dead]
        return [h for h in live if h.me == coordinator or gone == coordinator or coordinator not in self.dead]

    def is_named(self, agreement: Agreement, _gone: int) -> bool:
        """Whether a rank that has stopped for a death says whose it was."""
        return any(isinstance(v, ev.DeathVerdict) for v in agreement.verdicts)

    def _clock_of(self, index: int) -> Callable[[], float]:
        return lambda: self.now_s + (self.hosts[index].offset_s if index < len(self.hosts) else 0.0)

    def saw_fault(self, host: _Host, fault: ev.Fault) -> None:
        self.stopped.add(host.me)
        if self.fault in (CLEAN, CRASH):
            raise PropertyViolation(f"member {host.me}: a fault without a cause: {fault}")

    def run(self) -> SimulationResult:
        for tick in range(self.ticks):
            self.now_s += _TICK_S
            if self.fault != CLEAN and tick == self.fault_tick:
                self.strike()
            self.weather()
            order = [h for h in self.hosts if h.me not in self.dead]
            self.random.shuffle(order)
            for host in order:
                try:
                    self.turn(host)
                except _Interrupt:
                    self.interrupted(host)
        self.heal()
        leader = self.hosts[self.domain.scheduler_index].agreement.drain_state()
        return SimulationResult(
            self.seed, self.fault, self.size, len(self.log), leader.committed, leader.closed, self.network.frames,
            self.ticks, self.refusals,
        )  # fmt: skip

    def turn(self, host: _Host) -> None:
        draw = self.random
        if draw.random() < self.poll_chance[host.me]:
            host.poll()
        if host.agreement.stopped is not None:
            return
        if draw.random() < 0.5:
            host.admit_next()
        self.work(host, self.act_chance)
        if draw.random() < 0.5:
            self.guarded(host, host.schedule)
        if draw.random() < self.whim_chance:
            self.guarded(host, host.whim)
        if draw.random() < 0.02:
            host.misuse()
        if draw.random() < 0.1:
            host.agreement.validate()

    def interrupted(self, host: _Host) -> None:
        """A step was broken off half done: this rank decides nothing more, whatever its host does next."""
        if host.agreement.stopped is None:
            raise PropertyViolation(f"member {host.me}: goes on after a step that was broken off")

    def guarded(self, host: _Host, action: Callable[[], None]) -> None:
        if host.agreement.stopped is None:
            action()

    def work(self, host: _Host, chance: float) -> None:
        todo, host.todo = host.todo, []
        self.random.shuffle(todo)
        for what, key in todo:
            if host.agreement.stopped is not None:
                return
            if self.random.random() >= chance or not host.act(what, key):
                host.todo.append((what, key))

    def weather(self) -> None:
        """Clogged and refusing links, replayed frames, jumping clocks."""
        draw = self.random
        if self.clog_chance and self.size > 1:
            links = list(self.network.links)
            if draw.random() < self.clog_chance:
                self.network.held.add(draw.choice(links))
            if draw.random() < self.clog_chance:
                self.network.refusing.add(draw.choice(links))
            if draw.random() < 2 * self.clog_chance and self.network.held:
                self.network.held.discard(draw.choice(sorted(self.network.held)))
            if draw.random() < 2 * self.clog_chance and self.network.refusing:
                self.network.refusing.discard(draw.choice(sorted(self.network.refusing)))
        if self.size > 1 and draw.random() < 0.03:
            a, b = draw.choice(list(self.network.links))
            self.network.replay(self.domain.ranks[a], self.domain.ranks[b])
        if draw.random() < self.jump_chance:
            draw.choice(self.hosts).offset_s += draw.choice((-5.0, 0.5, 30.0))

    def strike(self) -> None:
        draw = self.random
        victim = draw.choice(self.hosts)
        if self.fault in (CRASH, DEATH):
            self.dead.add(victim.me)
            if self.fault == DEATH:
                self.network.kill(victim.agreement.rank)
        elif self.fault == HOST_FAILURE:
            victim.agreement.fail("the host says so")
        elif self.fault == INTERRUPT:
            core = victim.agreement._core
            (place, name), countdown = draw.choice(self.places(victim.agreement)), draw.randint(0, 3)
            honest, after = getattr(place, name), draw.random() < 0.5

            def breaking(*arguments: object, **options: object) -> object:
                nonlocal countdown
                countdown -= 1
                if countdown >= 0 or not (core.stepping or self.is_between_steps(place)):
                    return honest(*arguments, **options)
                setattr(place, name, honest)
                if after:
                    honest(*arguments, **options)
                raise _Interrupt

            setattr(place, name, breaking)
        else:
            link = self.link_to_spoil()
            good = self.network.delivered.get(link)
            self.network.links[link].append((self.now_s, mutate(draw, good or draw.randbytes(64))))

    def heal(self) -> None:
        """No more faults: everybody polls and does what it must; the group must converge, or be stopped everywhere."""
        self.healing = True
        if self.fault != CLEAN and self.fault_tick >= self.ticks:
            self.strike()
        self.network.held.clear()
        self.network.refusing.clear()
        live = [h for h in self.hosts if h.me not in self.dead]
        leader = self.hosts[self.domain.scheduler_index]
        began = False
        for _ in range(_HEAL_TICKS):
            self.now_s += _TICK_S
            for host in live:
                try:
                    self.nurse(host)
                except _Interrupt:
                    self.interrupted(host)
            if not began and leader in live and leader.agreement.stopped is None:
                began = True
                try:
                    leader.agreement.start_drain(len(self.log))
                except _Interrupt:
                    self.interrupted(leader)
                leader.released.clear()
            if self.converged(live):
                return
        reports = [h.agreement.drain_state() for h in live]
        raise PropertyViolation(f"did not converge: {reports}")

    def nurse(self, host: _Host) -> None:
        host.poll()
        if host.agreement.stopped is not None:
            return
        while host.admit_next():
            pass
        self.work(host, 1.0)
        self.guarded(host, host.schedule)

    def converged(self, live: list[_Host]) -> bool:
        if self.fault == CLEAN:
            if not all(h.agreement.drain_state().drained for h in live):
                return False
            for host in live:
                host.agreement.validate()
            differing = [d for d in verify([h.agreement.evidence() for h in live]) if d.field != "verdict"]
            if differing:
                raise PropertyViolation(f"drained, but {'; '.join(map(str, differing))}")
            return True
        if self.fault == CRASH:  # whoever observes the dead one has a verdict, and nobody stops for silence
            (gone,) = self.dead
            observers = self.observers(gone)
            named = self.domain.ranks[gone]
            return all(
                any(isinstance(v, ev.SilenceVerdict) and v.suspect_rank == named for v in h.agreement.verdicts)
                for h in observers
            )
        if self.fault == DEATH:
            (gone,) = self.dead
            for host in live:
                if host.agreement.stopped is None:
                    return False
                if not self.is_named(host.agreement, gone):
                    raise PropertyViolation(f"member {host.me} stopped without naming the dead rank")
            return True
        if self.fault == HOST_FAILURE:
            return all(h.agreement.stopped is not None for h in live)
        # A malformed frame stops everybody, unless it happened to be a replay of something already processed; an
        # interrupt does, unless its line was never reached again.
        stopped = [h.agreement.stopped is not None for h in live]
        return all(stopped) or (not any(stopped) and all(h.agreement.drain_state().drained for h in live))


def mutate(draw: random.Random, frame: bytes) -> bytes:
    """A frame that is wrong in a way that a peer, a cable or an attacker could make it."""
    data = bytearray(frame)
    choice = draw.randrange(6)
    if choice == 0 and data:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif choice == 1:
        del data[draw.randrange(len(data) + 1) :]
    elif choice == 2:
        data += draw.randbytes(draw.randint(1, 48))
    elif choice == 3:
        data = bytearray(draw.randbytes(draw.randint(0, 400)))
    elif choice == 4 and data:
        start = draw.randrange(len(data))
        data[start : start + 8] = draw.randbytes(8)
    elif data:
        data[draw.randrange(len(data))] = draw.randrange(256)
    return bytes(data)


def simulate(seed: int) -> SimulationResult:
    """Run one seed.

    Raises:
        SimulationFailure: A property broke; the message names the seed, which replays it.
    """
    return run_seed(_Simulation(seed))


def run_seed(simulation: _Simulation) -> SimulationResult:
    """Run what a seed has drawn; see :func:`simulate`."""
    try:
        return simulation.run()
    except Exception as error:
        stories = [
            s for h in simulation.hosts for i in h.agreement._core.rounds.open for s in h.agreement._core.story(i)
        ]
        raise SimulationFailure(
            f"seed {simulation.seed} ({simulation.fault}, {simulation.size} ranks): {type(error).__name__}: {error}\n"
            + "\n".join(stories[-40:])
        ) from error
