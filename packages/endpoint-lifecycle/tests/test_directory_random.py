"""Random steps of the pure directory against a model so dumb that it can be believed.

The model keeps lists and counts them again at every question. It knows nothing of heaps, tickets or counters.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest

from endpoint_lifecycle import (
    DirectoryConfig,
    EndpointDirectory,
    EndpointError,
    EndpointRecord,
    Load,
    NoServer,
    NotReady,
    ReservationState,
    ServerStatus,
    StaleGeneration,
    Ticket,
)

SERVERS = ("http://a", "http://b", "http://c")


@dataclasses.dataclass
class Held:
    """The model's view of a reservation."""

    reservation: Any
    server: str
    generation: str
    weight: int
    deadline_s: float
    live: bool = True


@dataclasses.dataclass
class Place:
    """The model's view of a server."""

    generation: str | None = None
    draining: bool = False
    ordered: bool = False  # draining by the operator
    pickable: bool = False
    changes: int = 0
    past: list[str] = dataclasses.field(default_factory=list)
    stale_at: dict[str, int] = dataclasses.field(default_factory=dict)


class Model:
    """Drives one directory and checks every answer."""

    def __init__(self, seed: int, make_record: Callable[..., EndpointRecord]) -> None:
        self.random = random.Random(seed)
        self.make_record = make_record
        self.ttl_s = 20.0
        self.directory = EndpointDirectory(
            DirectoryConfig(reservation_ttl_s=self.ttl_s, attempts=1, negative_ttl_s=0.0, probe_failures_max=1),
            random=self.random.random,
        )
        self.now_s = 0.0
        self.tick = 0
        self.places: dict[str, Place] = {}
        self.held: list[Held] = []
        self.flights: dict[str, dict[str, Any]] = {}
        self.tickets: dict[Any, dict[str, Any]] = {}
        self.generations = 0
        self.released: dict[int, int] = {}
        self.last_epoch: dict[str, int] = {}

    def new_generation(self) -> str:
        self.generations += 1
        return f"g{self.generations}"

    def record(self, generation: str, draining: bool = False) -> EndpointRecord:
        """Addresses are a function of the generation, so a torn mix would show."""
        number = int(generation[1:])
        return self.make_record(
            generation,
            control_addresses=(f"tcp://10.0.0.1:{1000 + number}",),
            state="draining" if draining else "published",
        )

    # -- steps --

    def step(self) -> None:
        self.now_s += self.random.choice((0.0, 0.1, 1.0, 5.0))
        self.tick += 1
        action = self.random.choice(
            ("set", "set", "delete", "drain", "remove", "add", "join", "join", "land", "land", "fail", "leave")
            + ("reserve",) * 6
            + ("release",) * 4
            + ("dispatch", "dispatch", "renew", "rebind", "expire", "unreachable", "release_again")
        )
        getattr(self, "do_" + action)(self.random.choice(SERVERS))

    def do_add(self, server: str) -> None:
        self.perform(self.directory.add_server(server, "context", self.now_s))
        self.places.setdefault(server, Place())

    def do_remove(self, server: str) -> None:
        if server in self.places:
            self.perform(self.directory.remove_server(server, self.now_s))
            del self.places[server]
            self.flights.pop(server, None)

    def do_set(self, server: str) -> None:
        place = self.places.get(server)
        choices = [self.new_generation()]
        if place is not None:
            choices += place.past[-1:] + ([place.generation] if place.generation else [])
        generation = self.random.choice(choices)
        draining = self.random.random() < 0.2
        effects = self.directory.apply_set(server, self.record(generation, draining), self.now_s)
        self.do_add(server)
        place = self.places[server]
        # Late news, and a repetition of what was seen dead, change nothing.
        if generation in place.past or (
            generation == place.generation and generation in place.stale_at and draining == place.draining
        ):
            self.perform(effects)
            return
        self.applied(server, generation, draining)
        self.perform(effects)

    def applied(self, server: str, generation: str, draining: bool) -> None:
        place = self.places[server]
        if place.generation != generation:
            if place.generation is not None:
                place.past.append(place.generation)
            if generation in place.past:
                place.past.remove(generation)
            place.generation, place.draining, place.changes = generation, draining, self.tick
            place.ordered = False
        elif draining and not place.draining:
            place.draining, place.changes = True, self.tick
        place.pickable = not (place.draining or place.ordered)

    def do_delete(self, server: str) -> None:
        place = self.places.get(server)
        generation = self.random.choice([*place.past[-3:], place.generation] if place is not None else ["g0"])
        if generation is None:
            return
        self.perform(self.directory.apply_delete(server, generation, self.now_s))
        if place is not None and place.generation == generation:
            del self.places[server]
            self.flights.pop(server, None)

    def do_drain(self, server: str) -> None:
        place = self.places.get(server)
        if place is not None and place.generation is not None and place.pickable:
            self.perform(self.directory.start_draining(server))
            place.ordered, place.pickable = True, False

    def do_join(self, server: str) -> None:
        place = self.places.get(server)
        if place is None:
            with pytest.raises(EndpointError):
                self.directory.join(server, self.now_s)
            return
        proven = self.random.choice((None, place.generation, *place.past[-1:]))
        live = place.pickable and place.generation not in place.stale_at
        outcome, effects = self.directory.join(server, self.now_s, proven_stale=proven)
        if isinstance(outcome, EndpointRecord):
            assert proven is not None and outcome.generation == place.generation != proven and live
            return
        assert proven is None or proven == place.generation or not live
        assert isinstance(outcome, Ticket)
        if proven is not None and proven == place.generation:
            place.stale_at[proven] = self.tick
            place.pickable = False
        for flight in effects.start:
            assert server not in self.flights, "two flights for one server"
            self.flights[server] = {"flight": flight, "began": None}
        self.tickets[outcome] = {"server": server, "proven": proven, "at": self.tick}
        self.perform(effects, started=True)

    def begin(self, server: str) -> dict[str, Any]:
        entry = self.flights[server]
        if entry["began"] is None:
            self.directory.fetch_began(entry["flight"], self.now_s)
            self.tick += 1
            entry["began"] = self.tick
        return entry

    def do_land(self, server: str) -> None:
        if server not in self.flights:
            return
        fresh = self.flights[server]["began"] is None
        entry = self.begin(server)
        if fresh and self.random.random() < 0.6:
            return  # it is under way; other things happen first
        place = self.places[server]
        generation = self.random.choice(
            (place.generation or self.new_generation(), self.new_generation(), *place.past[-1:])
        )
        del self.flights[server]
        effects = self.directory.fetch_succeeded(entry["flight"], self.record(generation), self.now_s)
        if place.changes > entry["began"]:
            pass  # dropped
        elif place.stale_at.get(generation, -1) > entry["began"]:
            pass  # says nothing about now
        else:
            place.stale_at.pop(generation, None)
            self.applied(server, generation, False)
        self.perform(effects, landed=(entry["began"], generation))

    def do_fail(self, server: str) -> None:
        if server in self.flights:
            entry = self.begin(server)
            del self.flights[server]
            self.places[server].pickable = False
            self.perform(self.directory.fetch_failed(entry["flight"], OSError("x"), self.now_s))

    def do_leave(self, server: str) -> None:
        if self.tickets:
            ticket = self.random.choice(list(self.tickets))
            del self.tickets[ticket]
            self.perform(self.directory.leave(ticket))

    def perform(self, effects: Any, *, started: bool = False, landed: tuple[int, str] | None = None) -> None:
        for ticket, record in effects.resolved:
            info = self.tickets.pop(ticket)
            place = self.places[info["server"]]
            if info["proven"] is not None and record.generation == info["proven"]:
                # Only a fetch that began after the proof, or a change of the slot after it, may bring it back.
                assert (landed is not None and landed[0] > info["at"]) or place.changes > info["at"]
            assert record == self.record(record.generation, record.state == "draining")
        for ticket, _ in effects.failed:
            del self.tickets[ticket]
        if not started:
            for flight in effects.start:
                assert flight.server not in self.flights
                self.flights[flight.server] = {"flight": flight, "began": None}

    def do_reserve(self, server: str) -> None:
        request_id = self.random.randrange(30)
        weight = self.random.randrange(5)
        exclude = {server} if self.random.random() < 0.2 else set()
        pickable = {s for s, p in self.places.items() if p.pickable and s not in exclude}
        try:
            made = self.directory.reserve("context", request_id, self.now_s, weight=weight, exclude=exclude)
        except NoServer:
            assert not pickable
            return
        for held in self.held:
            if held.live and held.reservation.request_id == request_id:
                held.live = False
        assert made.server in pickable
        loads = {s: self.load(s, self.places[s].generation) for s in pickable}
        picked = loads[made.server]
        best = min((load.weight, load.count) for load in loads.values())
        assert (picked.weight, picked.count) == best
        assert made.generation == self.places[made.server].generation
        self.held.append(Held(made, made.server, made.generation or "", weight, self.now_s + self.ttl_s))

    def pick_held(self) -> Held | None:
        return self.random.choice(self.held) if self.held else None

    def do_release(self, server: str) -> None:
        held = self.pick_held()
        if held is not None:
            assert self.directory.release(held.reservation) is held.live
            held.live = False

    do_release_again = do_release

    def do_dispatch(self, server: str) -> None:
        held = self.pick_held()
        if held is None:
            return
        place = self.places.get(held.server)
        allowed = (
            held.live
            and place is not None
            and place.pickable
            and place.generation == held.generation
            and held.generation not in place.stale_at
            and held.reservation._slot.alive
        )
        try:
            self.directory.dispatched(held.reservation, self.now_s)
            done = True
        except EndpointError:
            done = False
        assert done is bool(allowed)
        if done:
            held.deadline_s = self.now_s + self.ttl_s

    def do_renew(self, server: str) -> None:
        held = self.pick_held()
        if held is not None:
            assert self.directory.renew(held.reservation, self.now_s) is held.live
            held.deadline_s = self.now_s + self.ttl_s

    def do_rebind(self, server: str) -> None:
        held = self.pick_held()
        if held is None:
            return
        place = self.places.get(held.server)
        try:
            record = self.directory.rebind(held.reservation, self.now_s)
        except EndpointError:
            assert not (held.live and place is not None and place.pickable)
            return
        assert place is not None and held.live and record.generation == place.generation
        held.generation = record.generation or ""
        held.deadline_s = self.now_s + self.ttl_s

    def do_expire(self, server: str) -> None:
        due = {id(h.reservation) for h in self.held if h.live and h.deadline_s <= self.now_s}
        expired, _ = self.directory.expire(self.now_s)
        assert {id(r) for r in expired} == due
        for held in self.held:
            if id(held.reservation) in due:
                held.live = False
                assert held.reservation.state is ReservationState.EXPIRED

    def do_unreachable(self, server: str) -> None:
        place = self.places.get(server)
        generation = place.generation if place is not None and self.random.random() < 0.7 else "g0"
        self.perform(self.directory.unreachable(server, generation, self.now_s))
        if place is not None and place.generation == generation and generation is not None:
            place.pickable = False

    # -- questions --

    def load(self, server: str, generation: str | None) -> Load:
        mine = [h for h in self.held if h.live and h.server == server and h.generation == generation]
        return Load(len(mine), sum(h.weight for h in mine))

    def check(self) -> None:
        directory = self.directory
        directory.validate()
        assert set(directory.servers()) == set(self.places)
        for server, place in self.places.items():
            record = directory.record(server)
            assert (record.generation if record is not None else None) == place.generation
            if record is not None and place.generation is not None:
                assert record.control_addresses == self.record(place.generation).control_addresses
            assert (directory.status(server) is ServerStatus.READY) is place.pickable
            assert directory.load(server) == self.load(server, place.generation)
        for held in self.held:
            assert directory.load(held.server, held.generation) == self.load(held.server, held.generation)
            assert held.reservation.live is held.live
        for view in directory.audit(self.now_s).servers:
            if view.generation is not None:
                assert view.epoch >= self.last_epoch.get(view.server, 0)
                self.last_epoch[view.server] = view.epoch
        assert directory.reservation_count == sum(h.live for h in self.held)
        self.held = [h for h in self.held if h.live or self.random.random() < 0.9]

    def finish(self) -> None:
        for held in self.held:
            self.directory.release(held.reservation)
            held.live = False
        self.check()
        assert self.directory.statistics().load_weight == 0
        assert all(view.count == view.weight == 0 for view in self.directory.audit(self.now_s).loads)


def run(seed: int, steps: int, make_record: Callable[..., EndpointRecord]) -> None:
    model = Model(seed, make_record)
    for number in range(steps):
        try:
            model.step()
            model.check()
        except (AssertionError, EndpointError, KeyError) as error:
            raise AssertionError(f"seed {seed}, step {number}: {error!r}") from error
    model.finish()


@pytest.mark.parametrize("block", range(8))
def test_random_steps_agree_with_the_model(block: int, make_record: Callable[..., EndpointRecord]) -> None:
    for seed in range(block * 25, block * 25 + 25):
        run(seed, 200, make_record)


@pytest.mark.slow
def test_many_random_steps_agree_with_the_model(make_record: Callable[..., EndpointRecord]) -> None:
    for seed in range(1000, 4000):
        run(seed, 300, make_record)


def test_the_model_notices_a_planted_defect(
    make_record: Callable[..., EndpointRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release that forgets the weight, and a pick that forgets a stale proof, are found within a few seeds."""
    original = EndpointDirectory._uncount

    def forgetful(self: EndpointDirectory, reservation: Any, state: Any, reason: str) -> None:
        original(self, reservation, state, reason)
        if reservation.weight == 3:
            reservation._counter.weight += 1

    with monkeypatch.context() as patch:
        patch.setattr(EndpointDirectory, "_uncount", forgetful)
        with pytest.raises(AssertionError):
            for seed in range(20):
                run(seed, 200, make_record)


__all__ = ["NotReady", "StaleGeneration"]
