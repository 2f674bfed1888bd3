"""Events that come late, names used twice, entries that are set aside: what discovery must not bring back or lose."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from endpoint_lifecycle import (
    AsyncEndpointDirectory,
    AsyncLeasePublisher,
    AsyncReconciler,
    DirectoryConfig,
    EndpointDirectory,
    EndpointRecord,
    EndpointTimeout,
    MemoryLeaseStore,
    ProtocolViolation,
    Registration,
    RegistryBook,
    ServerStatus,
    StoreEvent,
    registration_key,
)
from endpoint_lifecycle.testing import FakeTransport, FakeWorker, run_virtual, until

MakeRecord = Callable[..., EndpointRecord]
A, B = "http://a", "http://b"


@pytest.mark.parametrize("path", ["superseded", "deleted first"])
def test_a_late_set_after_the_successors_end_brings_nobody_back(make_record: MakeRecord, path: str) -> None:
    """SET(old), [DELETE(old),] SET(new), DELETE(new), late SET(old): no server, nothing to probe."""
    directory = EndpointDirectory(DirectoryConfig())
    directory.apply_set(A, make_record("old"), 0.0)
    if path == "deleted first":
        directory.apply_delete(A, "old", 1.0)
    directory.apply_set(A, make_record("new"), 2.0)
    directory.apply_delete(A, "new", 3.0)
    directory.apply_set(A, make_record("old"), 4.0)
    assert directory.servers() == ()
    assert directory.statistics().sets_ignored == 1
    # The one that was removed last may come back: its lease ended while it lived.
    directory.apply_set(A, make_record("new"), 5.0)
    assert directory.status(A) is ServerStatus.READY
    directory.apply_set(A, make_record("old"), 6.0)
    assert directory.record(A) == make_record("new")
    directory.validate()


def test_events_in_any_order_never_bring_back_a_lifetime_that_had_a_successor(make_record: MakeRecord) -> None:
    """Random deliveries with repeats: once a later lifetime was seen, no earlier one is served again."""
    rng = random.Random(5)
    for _ in range(400):
        directory = EndpointDirectory(DirectoryConfig())
        latest = -1
        events = [(kind, number) for number in range(4) for kind in ("set", "delete")] * 2
        events = [event for event in events if rng.random() < 0.8]
        for place in range(len(events) - 1):  # late by a few places at most
            if rng.random() < 0.4:
                events[place], events[place + 1] = events[place + 1], events[place]
        for kind, number in events:
            if kind == "set":
                known = directory.servers() and directory.record(A)
                seen = set(directory._departed[A].superseded) if A in directory._departed else set()
                directory.apply_set(A, make_record(f"g{number}"), 0.0)
                if f"g{number}" in seen:
                    assert (directory.servers() and directory.record(A)) == known
                latest = max(latest, number)
            else:
                directory.apply_delete(A, f"g{number}", 0.0)
            directory.validate()


def test_removed_servers_are_remembered_within_bounds(make_record: MakeRecord) -> None:
    directory = EndpointDirectory(DirectoryConfig())
    for number in range(1500):
        server = f"http://{number}"
        directory.apply_set(server, make_record(f"g{number}"), 0.0)
        directory.apply_delete(server, f"g{number}", 0.0)
    assert len(directory._departed) == 1024
    for number in range(200):
        directory.apply_set(A, make_record(f"h{number}"), 0.0)
        directory.apply_delete(A, f"h{number}", 0.0)
    assert len(directory._departed[A].superseded) <= 64


def test_an_address_that_changes_its_role_is_taken_over_when_it_is_free(make_record: MakeRecord) -> None:
    """The new registration comes before the old one goes: refused then, taken at the next change, not only at a listing."""
    directory = EndpointDirectory(DirectoryConfig())

    class Target:
        def __getattr__(self, name: str) -> Any:
            core = getattr(directory, name)
            return core if name == "servers" else lambda *given: core(*given, 0.0)

    book = RegistryBook(Target())
    old = Registration(server=A, role="context", record=make_record("g1"))
    new = Registration(server=A, role="generation", record=make_record("g2", role="generation", owner_id="gen-0"))
    book.event_applied(StoreEvent("/a", old.encode(), 1), 0.0)
    book.event_applied(StoreEvent("/b", new.encode(), 2), 0.0)
    assert "/b" in book.invalid
    book.event_applied(StoreEvent("/a", None, 3), 0.0)
    assert directory.servers("generation") == (A,)
    assert not book.invalid
    assert book.statistics().invalid == 1


def test_a_callback_that_raises_stops_no_other_registration(make_record: MakeRecord) -> None:
    class Target:
        def __init__(self) -> None:
            self.have: list[str] = []

        def add_server(self, server: str, role: str, owner_id: str | None = None) -> None:
            self.have.append(server)

        def servers(self, role: str | None = None) -> tuple[str, ...]:
            return tuple(self.have)

        remove_server = apply_set = apply_delete = add_server

    def told(key: str, error: Exception) -> None:
        raise RuntimeError("no")

    target = Target()
    book = RegistryBook(target, on_error=told)
    book.event_applied(StoreEvent("/a", b"rubbish", 1), 0.0)
    book.event_applied(StoreEvent("/b", Registration(server=B, role="context").encode(), 2), 0.0)
    assert target.have == [B]
    assert book.callback_failures == 1


def test_keys_of_two_slots_are_never_the_same() -> None:
    names = ["a", "a/b", "b", "/", "%2F", "a%2Fb", "b/c", "c", "a/", "/b"]
    keys = {registration_key(role, owner) for role in names for owner in names}
    assert len(keys) == len(names) ** 2


def publisher_of(
    store: MemoryLeaseStore, server: str, owner_id: str = "ctx-0"
) -> tuple[FakeWorker, AsyncLeasePublisher]:
    worker = FakeWorker(server, "context", owner_id)
    worker.slot = type(worker.slot)(owner_id)
    return worker, AsyncLeasePublisher(store, worker.owner, server, 3.0, random=lambda: 0.5)


def test_two_instances_with_one_name_are_told() -> None:
    """The later one stands; the earlier one finds out within its lease although that lives on, and says why."""

    async def main() -> None:
        store = MemoryLeaseStore()
        first = FakeWorker(A, "context", "ctx-0")
        second = FakeWorker(B, "context", "ctx-0")
        second.restart()  # another generation
        async with (
            AsyncLeasePublisher(store, first.owner, A, 3.0) as one,
            AsyncLeasePublisher(store, second.owner, B, 3.0) as other,
        ):
            await one.wait_registered(5.0)
            await other.wait_registered(5.0)
            await until(lambda: one.statistics().superseded or other.statistics().superseded)
            loser = one if one.statistics().superseded else other
            assert isinstance(loser.last_error, ProtocolViolation)
            with pytest.raises(ProtocolViolation, match="superseded"):
                await loser.wait_registered(1.0)
            await asyncio.sleep(10.0)
            assert len((await store.snapshot("/")).items) == 1

    run_virtual(main())


def test_a_registration_that_somebody_removed_comes_back() -> None:
    """The lease lives, the key is gone: written again within a third of the lease."""

    async def main() -> None:
        store = MemoryLeaseStore()
        worker = FakeWorker(A, "context", "ctx-0")
        async with AsyncLeasePublisher(store, worker.owner, A, 3.0) as publisher:
            await publisher.wait_registered(5.0)
            [(key, revision)] = (await store.snapshot("/")).revisions.items()
            assert await store.compare_and_delete(key, revision)
            await asyncio.sleep(2.0)
            assert key in (await store.snapshot("/")).items

    run_virtual(main())


def test_waits_are_bounded_and_say_what_went_wrong() -> None:
    async def main() -> None:
        store = MemoryLeaseStore()
        store.down = True
        worker = FakeWorker(A, "context", "ctx-0")
        directory = AsyncEndpointDirectory(FakeTransport(worker).fetch)
        async with AsyncReconciler(store, directory) as reconciler:
            with pytest.raises(EndpointTimeout, match="no listing within 2 s; last error: the store is down"):
                await reconciler.wait_synced(2.0)
        async with AsyncLeasePublisher(store, worker.owner, A, 3.0) as publisher:
            with pytest.raises(EndpointTimeout, match="no registration within 2 s; last error: the store is down"):
                await publisher.wait_registered(2.0)
        await directory.aclose()

    run_virtual(main())


def test_a_reconciler_that_was_closed_can_be_used_again() -> None:
    async def main() -> None:
        store = MemoryLeaseStore()
        worker = FakeWorker(A, "context", "ctx-0")
        directory = AsyncEndpointDirectory(FakeTransport(worker).fetch, DirectoryConfig(probe_ready_s=None))
        reconciler = AsyncReconciler(store, directory)
        for _ in range(2):
            async with reconciler:
                await until(lambda: reconciler.statistics().listings >= 1)
        async with reconciler, AsyncLeasePublisher(store, worker.owner, A, 3.0):
            await until(lambda: directory.ready(context=1))
        await directory.aclose()

    run_virtual(main())
