"""The parts that the directory keeps its books in: slots, pools, loads, flights, tickets, reservations, effects."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from endpoint_lifecycle._errors import EndpointError, LocalProtocolError, StoryEntry
from endpoint_lifecycle._record import EndpointRecord
from endpoint_lifecycle._views import ReservationState, ServerStatus

#: Story entries kept per server.
STORY_MAX = 32
#: Generations remembered per server as superseded or proven stale.
SUPERSEDED_MAX = 64
#: Removed servers whose generations are remembered.
DEPARTED_MAX = 1024


@dataclass(slots=True)
class Departed:
    """Generations of a server that was removed: those that had a successor, and those that were live at its removal."""

    superseded: OrderedDict[str, None] = field(default_factory=OrderedDict)
    last: OrderedDict[str, None] = field(default_factory=OrderedDict)

    def trim(self) -> None:
        """Keep the latest."""
        for generations in (self.superseded, self.last):
            while len(generations) > SUPERSEDED_MAX:
                generations.popitem(last=False)


@dataclass(frozen=True, slots=True)
class PickRequest:
    """What a policy may look at."""

    role: str
    request_id: int
    weight: int
    affinity: Any = None


class Counter:
    __slots__ = ("count", "generation", "server", "weight")

    def __init__(self, server: str, generation: str | None) -> None:
        self.server = server
        self.generation = generation
        self.count = 0
        self.weight = 0


class Candidate:
    """A server that can be picked, as a policy sees it: read only, valid during the call."""

    __slots__ = ("_slot",)

    def __init__(self, slot: Slot) -> None:
        self._slot = slot

    @property
    def server(self) -> str:
        """Key of the server."""
        return self._slot.server

    @property
    def record(self) -> EndpointRecord:
        """Its record."""
        record = self._slot.record
        if record is None:
            raise LocalProtocolError(f"{self._slot.server} has no record: a candidate is valid during the pick only")
        return record

    @property
    def count(self) -> int:
        """Live reservations of its present generation."""
        return self._slot.load.count

    @property
    def weight(self) -> int:
        """Their summed weight."""
        return self._slot.load.weight


PickPolicy = Callable[[Sequence[Candidate], PickRequest], Candidate]


class Slot:
    __slots__ = (
        "alive", "candidate", "draining", "entry", "epoch", "error", "error_until_s", "failures", "flight", "load",
        "next_probe_s", "owner_id", "pool", "probe_delay_s", "record", "role", "server", "stale", "status", "story",
        "superseded", "version",
    )  # fmt: skip

    def __init__(self, server: str, role: str, owner_id: str | None, pool: Pool, load: Counter) -> None:
        self.server = server
        self.role = role
        self.owner_id = owner_id
        self.pool = pool
        self.load = load
        self.alive = True
        self.draining = False
        self.record: EndpointRecord | None = None
        self.status = ServerStatus.UNPREPARED
        self.version = 0
        self.epoch = 0
        self.flight: Flight | None = None
        self.error: EndpointError | None = None
        self.error_until_s = float("-inf")
        self.failures = 0
        self.next_probe_s = float("-inf")
        self.probe_delay_s = 0.0
        self.stale: OrderedDict[str, int] = OrderedDict()  # generation -> sequence number of the latest proof
        self.superseded: OrderedDict[str, None] = OrderedDict()
        self.entry: tuple[int, int, int, Slot] | None = None
        self.candidate = Candidate(self)
        self.story: list[StoryEntry] = []

    @property
    def generation(self) -> str | None:
        return self.record.generation if self.record is not None else None

    def note(self, sequence: int, event: str, detail: str = "") -> None:
        self.story.append(StoryEntry(sequence, event, self.status.value, detail))
        if len(self.story) > STORY_MAX:
            del self.story[: STORY_MAX // 2]


class Pool:
    """The pickable servers of one role, least loaded first.

    A heap of (weight, count, turn, slot) with lazy deletion: an entry counts while its slot points at it. ``turn`` grows
    with every entry, so equal loads take turns and two slots are never compared.
    """

    __slots__ = ("_candidates", "_heap", "_turn", "slots")

    def __init__(self) -> None:
        self.slots: dict[str, Slot] = {}
        self._heap: list[tuple[int, int, int, Slot]] = []
        self._turn = 0
        self._candidates: tuple[Candidate, ...] | None = None

    def add(self, slot: Slot) -> None:
        self.slots[slot.server] = slot
        self._candidates = None
        self.changed(slot)

    def discard(self, slot: Slot) -> None:
        if self.slots.pop(slot.server, None) is not None:
            slot.entry = None
            self._candidates = None

    def changed(self, slot: Slot) -> None:
        """The slot's load changed: give it a new place."""
        self._turn += 1
        load = slot.load
        slot.entry = entry = (load.weight, load.count, self._turn, slot)
        heap = self._heap
        if heap and heap[0][3].entry is not heap[0]:
            heapq.heapreplace(heap, entry)
        else:
            heapq.heappush(heap, entry)
            if len(heap) > 64 + 2 * len(self.slots):
                self._heap = [e for e in heap if e[3].entry is e]
                heapq.heapify(self._heap)

    def least(self, exclude: Collection[str]) -> Slot | None:
        heap = self._heap
        passed = []
        found = None
        while heap:
            entry = heap[0]
            slot = entry[3]
            if slot.entry is not entry:
                heapq.heappop(heap)
            elif exclude and slot.server in exclude:
                passed.append(heapq.heappop(heap))
            else:
                found = slot
                break
        for entry in passed:
            heapq.heappush(heap, entry)
        return found

    def candidates(self, exclude: Collection[str]) -> tuple[Candidate, ...]:
        if self._candidates is None:
            self._candidates = tuple(slot.candidate for slot in self.slots.values())
        if exclude:
            return tuple(c for c in self._candidates if c.server not in exclude)
        return self._candidates


class Flight:
    """One bounded fetch of one server's record. The adapter runs it; only the directory changes it.

    Attributes:
        server: What to fetch.
        deadline_s: When the flight ends at the latest.
        attempts: Attempts begun.
    """

    __slots__ = ("_began", "_ended", "_slot", "_tickets", "_version", "attempts", "deadline_s", "server")

    def __init__(self, slot: Slot, deadline_s: float) -> None:
        self._slot = slot
        self.server = slot.server
        self.deadline_s = deadline_s
        self.attempts = 0
        self._began = -1
        self._version = -1
        self._tickets: dict[Ticket, None] = {}
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether its outcome is known; a later result is ignored."""
        return self._ended


class Ticket:
    """One caller's wait for a refresh.

    Attributes:
        waiter: The adapter's handle (a future), opaque here.
    """

    __slots__ = ("_flight", "_proof", "proven_stale", "server", "waiter")

    def __init__(self, server: str, proven_stale: str | None, proof: int) -> None:
        self.server = server
        self.proven_stale = proven_stale
        self._proof = proof
        self._flight: Flight | None = None
        self.waiter: Any = None

    def _accepts(self, record: EndpointRecord, began: int) -> bool:
        return self.proven_stale is None or record.generation != self.proven_stale or began > self._proof


class Reservation:
    """One request's claim on one server: made, dispatched, and taken off the books once.

    Attributes:
        role, request_id: Its key; a second reservation under the key replaces this one.
        server, record, generation: What was picked. They change only by rebinding.
        weight: What it adds to the load, integer >= 0.
        state: See ReservationState.
        reason: Why it left the books; empty while it is on them.
        created_s, deadline_s: On the directory's clock.
    """

    __slots__ = (
        "_counter", "_slot", "created_s", "deadline_s", "key", "reason", "record", "state", "weight",
    )  # fmt: skip

    def __init__(
        self, key: tuple[str, int], slot: Slot, record: EndpointRecord, weight: int, now_s: float, deadline_s: float
    ) -> None:
        self.key = key
        self._slot = slot
        self._counter = slot.load
        self.record = record
        self.weight = weight
        self.created_s = now_s
        self.deadline_s = deadline_s
        self.state = ReservationState.RESERVED
        self.reason = ""

    @property
    def role(self) -> str:
        """First part of the key."""
        return self.key[0]

    @property
    def request_id(self) -> int:
        """Second part of the key."""
        return self.key[1]

    @property
    def server(self) -> str:
        """The server that was picked."""
        return self._slot.server

    @property
    def generation(self) -> str | None:
        """The generation that it is bound to."""
        return self._counter.generation

    @property
    def live(self) -> bool:
        """Whether it is on the books."""
        return self.state is ReservationState.RESERVED or self.state is ReservationState.DISPATCHED


@dataclass(slots=True)
class Effects:
    """What the adapter performs after a step, in this order: cancel, settle, start.

    Attributes:
        cancel: Flights whose task is to be cancelled.
        resolved: Tickets with the record that answers them.
        failed: Tickets with the error that answers them.
        start: Flights to run.
        retry_in_s: The flight of this step goes on after so long; None: it has ended.
        roles: Roles whose pickable servers or running flights changed; whoever waits for a server looks again.
        released: Reservations that left the books in this step.
    """

    cancel: list[Flight] = field(default_factory=list)
    resolved: list[tuple[Ticket, EndpointRecord]] = field(default_factory=list)
    failed: list[tuple[Ticket, EndpointError]] = field(default_factory=list)
    start: list[Flight] = field(default_factory=list)
    retry_in_s: float | None = None
    roles: set[str] = field(default_factory=set)
    released: list[Reservation] = field(default_factory=list)
