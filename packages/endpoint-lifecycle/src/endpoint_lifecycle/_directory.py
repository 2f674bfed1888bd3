"""The router side, pure: which servers there are, which generation each one is, and who has reserved what.

Theory of operation. A *slot* is one server's place. It has a record or none, a status (UNPREPARED, READY, DRAINING), a
version that every change of its record raises, and an epoch that the directory hands out in one total order. A *flight*
is one bounded fetch of a server's record, at most one per slot; *tickets* are the callers that wait for it. A *load* is
what live reservations put on one generation of one server; it is counted under (server, generation), so what an old
lifetime's requests release can never be subtracted from a new one's counter.

Every method is one atomic step: it is given the time, changes the state, and returns effects (flights to start or cancel,
tickets to settle) that the adapter performs afterwards. Nothing here waits, so no pick can wait for a fetch. The object
belongs to one event loop or one lock of the caller's.

Rules, each checked by a test of that name:
- Joining. A caller that proved generation g stale accepts g only from a fetch that began after its proof.
- Applying. A result is dropped when the slot changed after its fetch began; waiting tickets are judged anew.
- Superseding. A registration with a new generation replaces the old one at once; a deletion or expiry names the
  generation that it means and is a no-op for another one.
- Releasing. A reservation leaves the books once, whoever comes first: release, expiry, replacement, shutdown.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from endpoint_lifecycle._errors import (
    DirectoryClosed,
    Draining,
    EndpointError,
    LocalProtocolError,
    NoServer,
    NotReady,
    Overloaded,
    RecordInvalid,
    RefreshFailed,
    ReservationError,
    ServerGone,
    StaleGeneration,
    StoryEntry,
)
from endpoint_lifecycle._record import DRAINING, EndpointRecord, check_id, parse_record
from endpoint_lifecycle._slots import (
    DEPARTED_MAX,
    SUPERSEDED_MAX,
    Counter,
    Departed,
    Effects,
    Flight,
    PickPolicy,
    PickRequest,
    Pool,
    Reservation,
    Slot,
    Ticket,
)
from endpoint_lifecycle._views import (
    DirectoryAudit,
    DirectoryConfig,
    DirectoryStatistics,
    Load,
    LoadView,
    ReservationState,
    ReservationView,
    ServerStatus,
    ServerView,
)


class EndpointDirectory:
    """The pure directory; see the module's head for the rules.

    Args:
        config: Bounds.
        policy: Picks among candidates; None: least loaded by (weight, count), equal ones in turn.
        random: Uniform in [0, 1), for jitter.
    """

    def __init__(
        self,
        config: DirectoryConfig | None = None,
        *,
        policy: PickPolicy | None = None,
        random: Callable[[], float] = lambda: 0.5,
    ) -> None:
        self.config = config if config is not None else DirectoryConfig()
        self._policy = policy
        self._random = random
        self._slots: dict[str, Slot] = {}
        self._pools: dict[str, Pool] = {}
        self._counters: dict[tuple[str, str | None], Counter] = {}
        self._by_generation: dict[str, Slot] = {}
        #: By server that was removed: generations that it had moved on from, and those that were live when it was removed.
        self._departed: OrderedDict[str, Departed] = OrderedDict()
        self._reservations: OrderedDict[tuple[str, int], Reservation] = OrderedDict()  # in order of deadline
        self._sequence = 0
        self._epoch = 0
        self._closed = False
        self._now_s = float("-inf")
        self._n = dict.fromkeys(
            (
                "fetches", "fetch_failures", "results_applied", "results_dropped", "stale_joins_refused", "joins",
                "negative_hits", "deletes_ignored", "sets_ignored", "reservations_rebound", "releases_repeated",
            ),
            0,
        )  # fmt: skip
        self._made = 0
        self._released = 0
        self._expired = 0
        self._replaced = 0

    # -- servers --------------------------------------------------------------------------------------------------------

    def add_server(self, server: str, role: str, now_s: float, *, owner_id: str | None = None) -> Effects:
        """Add a server that is still to be fetched. Adding it again changes nothing.

        Raises:
            LocalProtocolError: It is known under another role.
            DirectoryClosed: The directory was closed.
        """
        self._check_open()
        if not isinstance(server, str) or not server:
            raise LocalProtocolError(f"server is {server!r}, not a non-empty string")
        check_id("role", role)
        effects = Effects()
        slot = self._slots.get(server)
        if slot is not None:
            if slot.role != role:
                raise LocalProtocolError(f"{server} is known as {slot.role}, not {role}", story=tuple(slot.story))
            if owner_id is not None:
                slot.owner_id = owner_id
            return effects
        pool = self._pools.setdefault(role, Pool())
        slot = Slot(server, role, owner_id, pool, self._counter(server, None))
        slot.next_probe_s = now_s
        departed = self._departed.get(server)
        if departed is not None:
            slot.superseded.update(departed.superseded)
        slot.note(self._next(), "added")
        self._slots[server] = slot
        effects.roles.add(role)
        return effects

    def remove_server(self, server: str, now_s: float) -> Effects:
        """Forget a server. Its fetch is cancelled, who waits gets ServerGone, its reservations stay until released."""
        slot = self._slots.get(server)
        if slot is None:
            raise ServerGone(server)
        return self._remove(slot)

    def _remove(self, slot: Slot) -> Effects:
        effects = Effects()
        slot.alive = False
        slot.version += 1
        self._drop_from_pool(slot)
        self._forget_generation(slot)
        del self._slots[slot.server]
        self._remember_departed(slot)
        self._collect(slot.load)
        self._end_flight(slot, effects, ServerGone(slot.server))
        effects.roles.add(slot.role)
        return effects

    def _remember_departed(self, slot: Slot) -> None:
        """What a late event may still name: a registration of a lifetime that had a successor must not come back.

        The lifetime that was removed itself may: an owner whose lease expired while it lived registers again.
        """
        departed = self._departed.setdefault(slot.server, Departed())
        self._departed.move_to_end(slot.server)
        departed.superseded.update(slot.superseded)
        if slot.generation is not None:
            departed.last[slot.generation] = None
        departed.trim()
        while len(self._departed) > DEPARTED_MAX:
            self._departed.popitem(last=False)

    def _end_flight(self, slot: Slot, effects: Effects, error: EndpointError) -> None:
        flight = slot.flight
        if flight is None:
            return
        flight._ended = True
        slot.flight = None
        effects.cancel.append(flight)
        self._fail_all(flight, error, effects)

    def apply_set(self, server: str, record: EndpointRecord, now_s: float) -> Effects:
        """Take a registration from discovery. A new generation replaces the old one at once.

        An event that names a generation which this slot has already moved on from is late and is ignored.

        Raises:
            RecordInvalid: As parse_record; nothing changed.
        """
        self._check_open()
        known = self._slots.get(server)
        record = self._parse(record, server, known.role if known is not None else record.role, None)
        departed = self._departed.get(server) if known is None else None
        if departed is not None and record.generation is not None and record.generation in departed.superseded:
            self._n["sets_ignored"] += 1
            return Effects()
        effects = self.add_server(server, record.role, now_s, owner_id=record.owner_id)
        slot = self._slots[server]
        if record.generation is not None and record.generation in slot.superseded:
            self._n["sets_ignored"] += 1
            slot.note(self._next(), "late set ignored", record.generation)
            return effects
        if record.generation is not None and record.generation in slot.stale and record == slot.record:
            return effects
        self._apply(slot, record, now_s, effects, "set")
        if slot.flight is not None:
            for ticket in [t for t in slot.flight._tickets if t.proven_stale is not None]:
                if record.generation != ticket.proven_stale:
                    self._resolve_ticket(slot.flight, ticket, record, effects)
        return effects

    def apply_delete(self, server: str, generation: str | None, now_s: float) -> Effects:
        """Take a withdrawal or expiry from discovery: removes the server if exactly that generation is its present one."""
        slot = self._slots.get(server)
        if slot is None or (generation is not None and slot.generation != generation):
            self._n["deletes_ignored"] += 1
            if slot is not None:
                slot.note(self._next(), "late delete ignored", str(generation))
            return Effects()
        return self._remove(slot)

    def start_draining(self, server: str, generation: str | None = None) -> Effects:
        """Stop picking a server for the rest of its present lifetime; in-flight peers still resolve it.

        Args:
            server: Which.
            generation: Only if this is its present one; None: whichever it is.
        """
        slot = self._slot(server)
        effects = Effects()
        if generation is not None and slot.generation != generation:
            return effects
        slot.draining = True
        if slot.status is ServerStatus.READY:
            self._set_status(slot, ServerStatus.DRAINING, effects)
            slot.note(self._next(), "draining")
        return effects

    def unreachable(self, server: str, generation: str | None, now_s: float) -> Effects:
        """A dispatch to this generation could not connect: do not pick the server until a probe answers."""
        effects = Effects()
        slot = self._slots.get(server)
        if slot is None or slot.generation != generation or slot.status is ServerStatus.UNPREPARED:
            return effects
        self._set_status(slot, ServerStatus.UNPREPARED, effects)
        slot.probe_delay_s = 0.0
        slot.next_probe_s = now_s
        slot.note(self._next(), "unreachable")
        return effects

    # -- refreshing -----------------------------------------------------------------------------------------------------

    def join(
        self, server: str, now_s: float, *, proven_stale: str | None = None
    ) -> tuple[EndpointRecord | Ticket, Effects]:
        """Ask for a server's record as of now.

        Args:
            server: Whose.
            now_s: The time.
            proven_stale: A generation that the caller saw refused. Where the slot has moved on already, its record is
                the answer and nothing is fetched.

        Returns:
            The record, or a ticket that a later step settles; and the effects to perform.

        Raises:
            ServerGone: Not in the directory.
            Overloaded: ``waiters_max`` callers wait already.
            RefreshFailed, RecordInvalid, NotReady: A fetch failed within the last ``negative_ttl_s``.
        """
        self._check_open()
        slot = self._slot(server)
        effects = Effects()
        if proven_stale is not None:
            record = slot.record
            if record is not None and record.generation != proven_stale and slot.status is ServerStatus.READY:
                stale = record.generation is not None and record.generation in slot.stale
                if not stale:
                    return record, effects
            if proven_stale == slot.generation:
                slot.stale[proven_stale] = self._sequence
                slot.stale.move_to_end(proven_stale)
                while len(slot.stale) > SUPERSEDED_MAX:
                    slot.stale.popitem(last=False)
                # Nobody is sent to a generation that was seen dead; the fetch decides what takes its place.
                self._set_status(slot, ServerStatus.UNPREPARED, effects)
                slot.note(self._next(), "proven stale", proven_stale)
        if slot.flight is None and slot.error is not None and now_s < slot.error_until_s:
            self._n["negative_hits"] += 1
            raise slot.error.with_traceback(None)
        flight = slot.flight
        if flight is None:
            flight = self._new_flight(slot, now_s, effects)
        else:
            self._n["joins"] += 1
        if len(flight._tickets) >= self.config.waiters_max:
            raise Overloaded(f"{server}: {len(flight._tickets)} callers wait for its refresh")
        ticket = Ticket(server, proven_stale, self._sequence)
        ticket._flight = flight
        flight._tickets[ticket] = None
        return ticket, effects

    def leave(self, ticket: Ticket) -> Effects:
        """A caller stopped waiting. Others are not touched."""
        effects = Effects()
        flight = ticket._flight
        ticket._flight = None
        if flight is None or flight._tickets.pop(ticket, 0) == 0:
            return effects
        slot = flight._slot
        if self.config.cancel_unwatched and not flight._tickets and slot.flight is flight:
            flight._ended = True
            slot.flight = None
            effects.cancel.append(flight)
            effects.roles.add(slot.role)
        return effects

    def probe(self, server: str, now_s: float) -> Effects:
        """Begin a fetch that nobody waits for, unless one is running or has just failed."""
        effects = Effects()
        slot = self._slots.get(server)
        if slot is None or slot.flight is not None or self._closed:
            return effects
        if slot.error is not None and now_s < slot.error_until_s:
            return effects
        self._new_flight(slot, now_s, effects)
        return effects

    def probe_role(self, role: str, now_s: float, exclude: Collection[str] = ()) -> tuple[int, Effects]:
        """Begin fetches of the role's servers that cannot be picked.

        Returns:
            How many such fetches are running now, and the effects.
        """
        effects = Effects()
        running = 0
        for slot in self._slots.values():
            if slot.role != role or slot.status is not ServerStatus.UNPREPARED or slot.server in exclude:
                continue
            if slot.flight is None and (slot.error is None or now_s >= slot.error_until_s):
                self._new_flight(slot, now_s, effects)
            if slot.flight is not None:
                running += 1
        return running, effects

    def due_probes(self, now_s: float) -> tuple[tuple[str, ...], float]:
        """Servers whose next check is due, and when to ask again at the latest (infinity: never by itself)."""
        due = []
        next_s = float("inf")
        for slot in self._slots.values():
            if slot.flight is not None:
                continue
            if slot.next_probe_s <= now_s:
                due.append(slot.server)
            elif slot.next_probe_s < next_s:
                next_s = slot.next_probe_s
        return tuple(due), next_s

    def _new_flight(self, slot: Slot, now_s: float, effects: Effects) -> Flight:
        slot.flight = flight = Flight(slot, now_s + self.config.total_timeout_s)
        effects.start.append(flight)
        return flight

    def fetch_began(self, flight: Flight, now_s: float) -> None:
        """An attempt leaves now; results are judged by what was true at this moment."""
        flight.attempts += 1
        flight._began = self._next()
        flight._version = flight._slot.version
        self._n["fetches"] += 1

    def fetch_succeeded(
        self, flight: Flight, payload: bytes | Mapping[str, Any] | EndpointRecord, now_s: float
    ) -> Effects:
        """An attempt brought an answer. It is validated, applied if nothing changed meanwhile, and settles tickets.

        An answer that is not valid, or says "not ready", ends the flight: asking again at once would not help.
        """
        effects = Effects()
        slot = flight._slot
        if flight._ended:
            return effects
        try:
            record = self._parse(payload, slot.server, slot.role, slot.owner_id)
        except (RecordInvalid, NotReady) as error:
            self._n["fetch_failures"] += 1
            if slot.version == flight._version:
                slot.failures += 1
                self._set_status(slot, ServerStatus.UNPREPARED, effects)
            self._fail_flight(flight, error, now_s, effects)
            return effects
        self._close_flight(flight, effects)
        if slot.version != flight._version:
            self._n["results_dropped"] += 1
            slot.note(self._next(), "result dropped", f"{record.generation}: the slot changed during the fetch")
            # What changed it is newer than this answer; whoever it satisfies need not wait for another fetch.
            self._settle(flight, slot.record, -1, now_s, effects)
            return effects
        proof = slot.stale.get(record.generation) if record.generation is not None else None
        if proof is not None and proof >= flight._began:
            # Proven stale while the fetch was under way: this answer says nothing about now.
            self._n["stale_joins_refused"] += 1
            self._settle(flight, record, flight._began, now_s, effects)
            return effects
        if record.generation is not None:
            slot.stale.pop(record.generation, None)
        try:
            self._apply(slot, record, now_s, effects, "fetch")
        except RecordInvalid as error:
            self._n["fetch_failures"] += 1
            self._fail_flight(flight, error, now_s, effects)
            return effects
        self._settle(flight, record, flight._began, now_s, effects)
        return effects

    def fetch_failed(self, flight: Flight, error: BaseException, now_s: float) -> Effects:
        """An attempt failed. ``retry_in_s`` is set while the flight may go on."""
        effects = Effects()
        if flight._ended:
            return effects
        slot = flight._slot
        self._n["fetch_failures"] += 1
        remaining_s = flight.deadline_s - now_s
        delay_s = min(0.05 * 2 ** min(flight.attempts, 10), 1.0) * (0.5 + 0.5 * self._random())
        if flight.attempts < self.config.attempts and delay_s < remaining_s:
            effects.retry_in_s = delay_s
            return effects
        slot.failures += 1
        if slot.failures >= self.config.probe_failures_max:
            self._set_status(slot, ServerStatus.UNPREPARED, effects)
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        failure = RefreshFailed(slot.server, flight.attempts, reason)
        failure.__cause__ = error
        self._fail_flight(flight, failure, now_s, effects)
        return effects

    def flight_lost(self, flight: Flight, error: BaseException, now_s: float) -> Effects:
        """Whoever ran the flight ended without an outcome (cancelled, or by what is not an Exception): it failed."""
        flight.attempts = max(flight.attempts, self.config.attempts)
        return self.fetch_failed(flight, error, now_s)

    def flight_expired(self, flight: Flight, now_s: float) -> Effects:
        """The flight's deadline passed while it waited for its turn or for a retry."""
        flight.attempts = max(flight.attempts, self.config.attempts)
        return self.fetch_failed(flight, TimeoutError(f"no answer within {self.config.total_timeout_s:g} s"), now_s)

    def _settle(
        self, flight: Flight, record: EndpointRecord | None, began: int, now_s: float, effects: Effects
    ) -> None:
        """Answer whom the record satisfies; the others wait for one new flight together."""
        slot = flight._slot
        rest = []
        for ticket in list(flight._tickets):
            if record is not None and ticket._accepts(record, began):
                self._resolve_ticket(flight, ticket, record, effects)
            else:
                rest.append(ticket)
        if not rest:
            return
        following = slot.flight if slot.flight is not None else self._new_flight(slot, now_s, effects)
        for ticket in rest:
            del flight._tickets[ticket]
            ticket._flight = following
            following._tickets[ticket] = None

    def _resolve_ticket(self, flight: Flight, ticket: Ticket, record: EndpointRecord, effects: Effects) -> None:
        del flight._tickets[ticket]
        ticket._flight = None
        effects.resolved.append((ticket, record))

    def _close_flight(self, flight: Flight, effects: Effects) -> None:
        flight._ended = True
        slot = flight._slot
        if slot.flight is flight:
            slot.flight = None
        effects.roles.add(slot.role)

    def _fail_flight(self, flight: Flight, error: EndpointError, now_s: float, effects: Effects) -> None:
        slot = flight._slot
        self._close_flight(flight, effects)
        slot.error = error
        slot.error_until_s = now_s + self.config.negative_ttl_s * (1.0 - 0.5 * self._random())
        slot.note(self._next(), "refresh failed", error.message)
        self._schedule_probe(slot, now_s)
        self._fail_all(flight, error, effects)

    def _fail_all(self, flight: Flight, error: EndpointError, effects: Effects) -> None:
        for ticket in flight._tickets:
            ticket._flight = None
            effects.failed.append((ticket, error))
        flight._tickets.clear()

    def _schedule_probe(self, slot: Slot, now_s: float) -> None:
        config = self.config
        if slot.status is ServerStatus.UNPREPARED:
            slot.probe_delay_s = min(max(2 * slot.probe_delay_s, config.probe_first_s), config.probe_max_s)
            slot.next_probe_s = now_s + slot.probe_delay_s * (0.5 + 0.5 * self._random())
        elif config.probe_ready_s is None:
            slot.next_probe_s = float("inf")
        elif slot.failures:
            slot.next_probe_s = now_s + min(config.probe_first_s, config.probe_ready_s)
        else:
            slot.next_probe_s = now_s + config.probe_ready_s * (0.9 + 0.2 * self._random())

    def _parse(
        self, payload: bytes | Mapping[str, Any] | EndpointRecord, server: str, role: str, owner_id: str | None
    ) -> EndpointRecord:
        return parse_record(
            payload,
            server=server,
            role=role,
            owner_id=owner_id,
            protocol_version=self.config.protocol_version,
            layout_fingerprint=self.config.layout_fingerprint,
            payload_bytes_max=self.config.payload_bytes_max,
            require_generation=self.config.require_generation,
        )

    def _apply(self, slot: Slot, record: EndpointRecord, now_s: float, effects: Effects, source: str) -> None:
        old = slot.record
        if old is not None and record.generation is not None and old.generation == record.generation:
            if msgspec.structs.replace(old, state=record.state) != record:
                raise RecordInvalid(
                    "generation", f"{record.generation!r} has two different records", server=slot.server
                )
            if old.state == DRAINING:
                record = old  # draining is one way; a late "published" of the same lifetime does not undo it
        slot.error = None
        slot.failures = 0
        slot.probe_delay_s = 0.0
        if old != record:
            slot.version += 1
            if old is None or old.generation != record.generation or record.generation is None:
                slot.draining = False
                if record.generation is not None:
                    holder = self._by_generation.get(record.generation)
                    if holder is not None and holder is not slot:
                        # A process that moved to another address keeps its generation: the newer place counts.
                        self._forget_generation(holder)
                self._drop_from_pool(slot)
                if old is not None and old.generation is not None:
                    self._forget_generation(slot)
                    slot.superseded[old.generation] = None
                    while len(slot.superseded) > SUPERSEDED_MAX:
                        slot.superseded.popitem(last=False)
                self._supersede_departed(slot, record.generation)
                if record.generation is not None:
                    slot.superseded.pop(record.generation, None)
                    self._by_generation[record.generation] = slot
                self._epoch += 1
                slot.epoch = self._epoch
                before = slot.load
                slot.load = self._counter(slot.server, record.generation)
                self._collect(before)
            slot.record = record
            slot.note(self._next(), f"applied ({source})", f"generation {record.generation}, epoch {slot.epoch}")
        self._n["results_applied"] += 1
        draining = record.state == DRAINING or slot.draining
        self._set_status(slot, ServerStatus.DRAINING if draining else ServerStatus.READY, effects)
        self._schedule_probe(slot, now_s)

    def _supersede_departed(self, slot: Slot, generation: str | None) -> None:
        """Another lifetime follows those that were live here when the server was removed: they will not come back either."""
        departed = self._departed.get(slot.server)
        if departed is None:
            return
        departed.superseded.update((old, None) for old in departed.last if old != generation)
        departed.last.clear()
        departed.superseded.pop(generation or "", None)
        departed.trim()
        slot.superseded.update(departed.superseded)
        while len(slot.superseded) > SUPERSEDED_MAX:
            slot.superseded.popitem(last=False)

    def _set_status(self, slot: Slot, status: ServerStatus, effects: Effects) -> None:
        in_pool = slot.server in slot.pool.slots
        if slot.status is not status:
            slot.status = status
            effects.roles.add(slot.role)
        if status is ServerStatus.READY and not in_pool and slot.alive:
            slot.pool.add(slot)
            effects.roles.add(slot.role)
        elif status is not ServerStatus.READY and in_pool:
            slot.pool.discard(slot)

    def _drop_from_pool(self, slot: Slot) -> None:
        slot.pool.discard(slot)

    def _forget_generation(self, slot: Slot) -> None:
        generation = slot.generation
        if generation is not None and self._by_generation.get(generation) is slot:
            del self._by_generation[generation]

    def _counter(self, server: str, generation: str | None) -> Counter:
        key = (server, generation)
        counter = self._counters.get(key)
        if counter is None:
            counter = self._counters[key] = Counter(server, generation)
        return counter

    def _collect(self, counter: Counter) -> None:
        """Drop a counter that no slot shows and no reservation holds."""
        if counter.count == 0:
            holder = self._slots.get(counter.server)
            if holder is None or holder.load is not counter:
                self._counters.pop((counter.server, counter.generation), None)

    # -- reserving ------------------------------------------------------------------------------------------------------

    def reserve(
        self,
        role: str,
        request_id: int,
        now_s: float,
        *,
        weight: int = 1,
        exclude: Collection[str] = (),
        affinity: Any = None,
    ) -> Reservation:
        """Pick a server of the role and claim it. One step: there is no moment with the pick and without the claim.

        A live reservation under the same (role, request_id) is replaced in the same step.

        Args:
            role, request_id: The key.
            now_s: The time.
            weight: Integer >= 0 that is added to the server's load (floats would drift).
            exclude: Servers not to pick.
            affinity: Handed to the policy.

        Raises:
            NoServer: None of the role can be picked; the message says how many are known and why.
            Overloaded: ``reservations_max`` are live.
        """
        if self._closed:
            raise DirectoryClosed("the directory is closed")
        if type(weight) is not int or weight < 0:
            raise LocalProtocolError(f"weight is {weight!r}, must be an integer >= 0")
        reservations = self._reservations
        key = (role, request_id)
        replaced = reservations.get(key)
        if replaced is not None:
            # The choice is made as though the old claim were gone, which stays whole if there is nothing to choose.
            with self._discounted(replaced):
                slot = self._select(role, request_id, weight, exclude, affinity)
        else:
            slot = self._select(role, request_id, weight, exclude, affinity)
        if slot is None:
            raise NoServer(role, self._why_none(role, exclude))
        if replaced is not None:
            self._replaced += 1
            self._take_off(replaced, ReservationState.RELEASED, "replaced")
        elif len(reservations) >= self.config.reservations_max:
            raise Overloaded(f"{len(reservations)} reservations are live")
        record = slot.record
        if record is None:
            raise LocalProtocolError(f"{slot.server} is pickable without a record", story=tuple(slot.story))
        reservation = Reservation(key, slot, record, weight, now_s, now_s + self.config.reservation_ttl_s)
        reservations[key] = reservation
        counter = slot.load
        counter.count += 1
        counter.weight += weight
        slot.pool.changed(slot)
        self._made += 1
        return reservation

    def _select(self, role: str, request_id: int, weight: int, exclude: Collection[str], affinity: Any) -> Slot | None:
        pool = self._pools.get(role)
        if pool is None:
            return None
        if self._policy is None:
            return pool.least(exclude)
        return self._pick(pool, PickRequest(role, request_id, weight, affinity), exclude)

    @contextlib.contextmanager
    def _discounted(self, reservation: Reservation) -> Iterator[None]:
        counter = reservation._counter
        holder = self._slots.get(counter.server)
        slot = holder if holder is not None and holder.load is counter and holder.entry is not None else None
        counter.count -= 1
        counter.weight -= reservation.weight
        if slot is not None:
            slot.pool.changed(slot)
        try:
            yield
        finally:
            counter.count += 1
            counter.weight += reservation.weight
            if slot is not None:
                slot.pool.changed(slot)

    def _pick(self, pool: Pool, request: PickRequest, exclude: Collection[str]) -> Slot | None:
        candidates = pool.candidates(exclude)
        if not candidates:
            return None
        picked = self._policy(candidates, request) if self._policy is not None else candidates[0]
        slot = getattr(picked, "_slot", None)
        if not isinstance(slot, Slot) or pool.slots.get(slot.server) is not slot or slot.server in exclude:
            raise LocalProtocolError(f"the policy returned {picked!r}, which is none of its candidates")
        return slot

    def _why_none(self, role: str, exclude: Collection[str]) -> str:
        slots = [slot for slot in self._slots.values() if slot.role == role]
        if not slots:
            others = sorted({slot.role for slot in self._slots.values()})
            return "none is known" + (f" (roles that are: {', '.join(others)})" if others else "")
        parts = [f"{len(slots)} known"]
        for status in (ServerStatus.UNPREPARED, ServerStatus.DRAINING):
            count = sum(slot.status is status for slot in slots)
            if count:
                parts.append(f"{count} {status.value}")
        if exclude:
            parts.append(f"{sum(slot.server in exclude for slot in slots)} excluded")
        errors = [slot.error.message for slot in slots if slot.error is not None]
        if errors:
            parts.append(f"last error: {errors[-1]}")
        return ", ".join(parts)

    def dispatched(self, reservation: Reservation, now_s: float) -> None:
        """The first byte is about to leave: allowed only if the generation is still the live one.

        Raises:
            StaleGeneration: The server is another lifetime now; prove it stale or reserve again.
            Draining: It takes nothing new.
            NotReady: It stopped answering.
            ServerGone: It was removed.
            ReservationError: The reservation is off the books.
        """
        self._check_live(reservation)
        slot = reservation._slot
        if not slot.alive:
            raise ServerGone(slot.server)
        if slot.load is not reservation._counter or slot.generation in slot.stale:
            raise StaleGeneration(reservation.generation, slot.generation, story=tuple(slot.story))
        if slot.status is ServerStatus.DRAINING:
            raise Draining(f"{slot.server} is draining", story=tuple(slot.story))
        if slot.status is not ServerStatus.READY:
            raise NotReady(f"{slot.server} is {slot.status.value}", story=tuple(slot.story))
        reservation.state = ReservationState.DISPATCHED
        self.renew(reservation, now_s)

    def renew(self, reservation: Reservation, now_s: float) -> bool:
        """Put the expiry off. False when the reservation is off the books (it expired: a defect that is counted)."""
        reservations = self._reservations
        if reservations.get(reservation.key) is not reservation:
            return False
        reservation.deadline_s = now_s + self.config.reservation_ttl_s
        reservations.move_to_end(reservation.key)
        return True

    def rebind(self, reservation: Reservation, now_s: float) -> EndpointRecord:
        """Move a live reservation to its server's present generation, in one step. The dispatch state begins anew.

        Raises:
            ServerGone, Draining, NotReady: The server cannot take it. The reservation stays as it was.
            ReservationError: It is off the books.
        """
        self._check_live(reservation)
        slot = self._slots.get(reservation.server)
        if slot is None:
            raise ServerGone(reservation.server)
        if slot.status is ServerStatus.DRAINING:
            raise Draining(f"{slot.server} is draining", story=tuple(slot.story))
        if slot.status is not ServerStatus.READY or slot.record is None:
            raise NotReady(f"{slot.server} is {slot.status.value}", story=tuple(slot.story))
        old = reservation._counter
        if slot.load is not old:
            old.count -= 1
            old.weight -= reservation.weight
            self._collect(old)
            slot.load.count += 1
            slot.load.weight += reservation.weight
            reservation._counter = slot.load
            slot.pool.changed(slot)
            self._n["reservations_rebound"] += 1
        reservation._slot = slot
        reservation.record = slot.record
        reservation.state = ReservationState.RESERVED
        self.renew(reservation, now_s)
        return slot.record

    def release(self, reservation: Reservation, reason: str = "released") -> bool:
        """Take a reservation off the books.

        Returns:
            True when this call did it; False when it had left before.
        """
        if self._reservations.get(reservation.key) is not reservation:
            self._n["releases_repeated"] += 1
            return False
        del self._reservations[reservation.key]
        self._released += 1
        self._uncount(reservation, ReservationState.RELEASED, reason)
        return True

    def _take_off(self, reservation: Reservation, state: ReservationState, reason: str) -> None:
        del self._reservations[reservation.key]
        self._uncount(reservation, state, reason)

    def _uncount(self, reservation: Reservation, state: ReservationState, reason: str) -> None:
        reservation.state = state
        reservation.reason = reason
        counter = reservation._counter
        counter.count -= 1
        counter.weight -= reservation.weight
        slot = reservation._slot
        if slot.load is counter and slot.entry is not None:
            slot.pool.changed(slot)
            return
        # The server is not pickable now, or another lifetime, or was removed and perhaps came back.
        current = self._slots.get(counter.server)
        if current is not None and current.load is counter:
            if current.entry is not None:
                current.pool.changed(current)
        elif counter.count == 0:
            self._counters.pop((counter.server, counter.generation), None)

    def expire(self, now_s: float) -> tuple[list[Reservation], float]:
        """Take off what was not renewed in time.

        Returns:
            The expired reservations, and when the next one is due (infinity: none is live).
        """
        expired: list[Reservation] = []
        reservations = self._reservations
        while reservations:
            reservation = next(iter(reservations.values()))
            if reservation.deadline_s > now_s:
                return expired, reservation.deadline_s
            self._expired += 1
            self._take_off(reservation, ReservationState.EXPIRED, "expired")
            expired.append(reservation)
        return expired, float("inf")

    # -- reading --------------------------------------------------------------------------------------------------------

    def resolve(self, generation: str) -> EndpointRecord:
        """The record of a generation that is still served, draining included: for peers of requests in flight.

        Raises:
            StaleGeneration: No server has it any more.
        """
        slot = self._by_generation.get(generation)
        if slot is None or slot.record is None:
            raise StaleGeneration(generation, None)
        return slot.record

    def server_of(self, generation: str) -> str:
        """Key of the server that a generation lives on.

        Raises:
            StaleGeneration: No server has it any more.
        """
        slot = self._by_generation.get(generation)
        if slot is None:
            raise StaleGeneration(generation, None)
        return slot.server

    def record(self, server: str) -> EndpointRecord | None:
        """The cached record, or None."""
        return self._slot(server).record

    def status(self, server: str) -> ServerStatus:
        """Whether it can be picked."""
        return self._slot(server).status

    def story(self, server: str) -> tuple[StoryEntry, ...]:
        """What happened to a server's slot, the latest entries."""
        return tuple(self._slot(server).story)

    def servers(self, role: str | None = None) -> tuple[str, ...]:
        """Keys of the known servers, in order of addition."""
        return tuple(slot.server for slot in self._slots.values() if role is None or slot.role == role)

    def load(self, server: str, generation: str | None = None) -> Load:
        """Load of a server's present generation, or of the one named."""
        if generation is None:
            slot = self._slots.get(server)
            counter = slot.load if slot is not None else None
        else:
            counter = self._counters.get((server, generation))
        return Load(counter.count, counter.weight) if counter is not None else Load(0, 0)

    def ready_count(self, role: str) -> int:
        """How many servers of the role can be picked."""
        pool = self._pools.get(role)
        return len(pool.slots) if pool is not None else 0

    @property
    def reservation_count(self) -> int:
        """Live reservations."""
        return len(self._reservations)

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def close(self) -> Effects:
        """End everything: waiting callers get DirectoryClosed, live reservations leave the books as ``shutdown``."""
        effects = Effects()
        if self._closed:
            return effects
        self._closed = True
        for slot in self._slots.values():
            self._end_flight(slot, effects, DirectoryClosed("the directory was closed"))
            effects.roles.add(slot.role)
        for reservation in list(self._reservations.values()):
            self._released += 1
            self._take_off(reservation, ReservationState.RELEASED, "shutdown")
            effects.released.append(reservation)
        return effects

    def statistics(self) -> DirectoryStatistics:
        """Counters of one moment."""
        flights = [slot.flight for slot in self._slots.values() if slot.flight is not None]
        statuses = [slot.status for slot in self._slots.values()]
        return DirectoryStatistics(
            servers=len(self._slots),
            servers_ready=statuses.count(ServerStatus.READY),
            servers_draining=statuses.count(ServerStatus.DRAINING),
            flights=len(flights),
            waiters=sum(len(flight._tickets) for flight in flights),
            reservations=len(self._reservations),
            load_weight=sum(counter.weight for counter in self._counters.values()),
            reservations_made=self._made,
            reservations_released=self._released,
            reservations_expired=self._expired,
            reservations_replaced=self._replaced,
            **self._n,
        )

    def audit(self, now_s: float) -> DirectoryAudit:
        """Servers, reservations and loads, recounted from scratch, with every disagreement named."""
        current = {id(slot.load) for slot in self._slots.values()}
        return DirectoryAudit(
            servers=tuple(
                ServerView(
                    server=slot.server,
                    role=slot.role,
                    owner_id=slot.owner_id,
                    status=slot.status,
                    generation=slot.generation,
                    epoch=slot.epoch,
                    version=slot.version,
                    count=slot.load.count,
                    weight=slot.load.weight,
                    refreshing=slot.flight is not None,
                    waiters=len(slot.flight._tickets) if slot.flight is not None else 0,
                    failures=slot.failures,
                    error=slot.error.message if slot.error is not None else None,
                )
                for slot in self._slots.values()
            ),
            reservations=tuple(
                ReservationView(
                    role=r.role,
                    request_id=r.request_id,
                    server=r.server,
                    generation=r.generation,
                    weight=r.weight,
                    state=r.state,
                    age_s=now_s - r.created_s,
                    expires_in_s=r.deadline_s - now_s,
                )
                for r in self._reservations.values()
            ),
            loads=tuple(
                LoadView(c.server, c.generation, c.count, c.weight, id(c) in current)
                for c in self._counters.values()
                if c.count or id(c) in current
            ),
            faults=tuple(self._faults()),
            statistics=self.statistics(),
        )

    def validate(self) -> None:
        """Check the invariants; a failure is a defect of this package.

        Raises:
            AssertionError: With every broken one.
        """
        faults = list(self._faults())
        if faults:
            raise AssertionError("; ".join(faults))

    def _faults(self) -> Iterable[str]:
        sums: dict[tuple[str, str | None], list[int]] = {}
        for key, reservation in self._reservations.items():
            if not reservation.live or reservation.key != key:
                yield f"reservation {key} is {reservation.state.value} on the books"
            counter = reservation._counter
            total = sums.setdefault((counter.server, counter.generation), [0, 0])
            total[0] += 1
            total[1] += reservation.weight
            if self._counters.get((counter.server, counter.generation)) is not counter:
                yield f"reservation {key} counts on a load that is not on the books"
        for pair, counter in self._counters.items():
            count, weight = sums.pop(pair, [0, 0])
            if (counter.count, counter.weight) != (count, weight):
                yield f"load of {pair} is {counter.count}/{counter.weight}, reservations sum to {count}/{weight}"
        for pair in sums:
            yield f"reservations on {pair} without a load"
        generations: dict[str, str] = {}
        for server, slot in self._slots.items():
            if not slot.alive:
                yield f"{server} is dead in the directory"
            if (slot.status is ServerStatus.READY) != (slot.pool.slots.get(server) is slot):
                yield f"{server} is {slot.status.value} but its place in the pool says otherwise"
            if slot.status is not ServerStatus.UNPREPARED and slot.record is None:
                yield f"{server} is {slot.status.value} without a record"
            if self._counters.get((server, slot.generation)) is not slot.load:
                yield f"{server} shows a load that is not on the books"
            entry = slot.entry
            if entry is not None and (entry[0], entry[1]) != (slot.load.weight, slot.load.count):
                yield f"{server} stands in the heap with {entry[:2]}"
            if slot.generation is not None and self._by_generation.get(slot.generation) is slot:
                generations[slot.generation] = server
        if len(generations) != len(self._by_generation):
            yield "the index of generations has entries that no slot holds"
        made = self._released + self._expired + self._replaced + len(self._reservations)
        if made != self._made:
            yield f"{self._made} reservations made, {made} accounted for"

    # -- small ----------------------------------------------------------------------------------------------------------

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence

    def _slot(self, server: str) -> Slot:
        slot = self._slots.get(server)
        if slot is None:
            raise ServerGone(server)
        return slot

    def _check_open(self) -> None:
        if self._closed:
            raise DirectoryClosed("the directory is closed")

    def _check_live(self, reservation: Reservation) -> None:
        if self._reservations.get(reservation.key) is not reservation:
            raise ReservationError(
                f"reservation {reservation.key} is {reservation.state.value} ({reservation.reason or 'unknown here'})"
            )
