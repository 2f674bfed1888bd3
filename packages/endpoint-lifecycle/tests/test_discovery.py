"""Discovery: the book, the in-memory store, the reconciler and the publisher, on virtual time."""

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
    EndpointRecord,
    InvalidTransition,
    LocalProtocolError,
    MemoryLeaseStore,
    RecordInvalid,
    Registration,
    RegistryBook,
    ServerStatus,
    Snapshot,
    StaticServers,
    StoreCompacted,
    StoreError,
    StoreEvent,
    decode_registration,
    registration_key,
)
from endpoint_lifecycle.testing import FakeTransport, FakeWorker, check_lease_store, run_virtual, until

MakeRecord = Callable[..., EndpointRecord]
A, B = "http://a", "http://b"


def directory_of(*workers: FakeWorker) -> AsyncEndpointDirectory:
    return AsyncEndpointDirectory(
        FakeTransport(*workers).fetch, DirectoryConfig(probe_ready_s=None), random=lambda: 0.5
    )


# -- registrations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (b"", "$"),
        (b"[]", "$"),
        (b"x" * 70_000, "$"),
        (b'{"server":"","role":"context"}', "server"),
        (b'{"server":"http://a\\n","role":"context"}', "server"),
        (b'{"server":"http://a","role":""}', "role"),
        (b'{"server":"http://a"}', "$"),
    ],
)
def test_bad_registration_names_the_field(value: bytes, field: str) -> None:
    with pytest.raises(RecordInvalid) as caught:
        decode_registration(value)
    assert caught.value.field == field


def test_registration_round_trips(make_record: MakeRecord) -> None:
    registration = Registration(server=A, role="context", record=make_record())
    assert decode_registration(registration.encode()) == registration
    with pytest.raises(RecordInvalid) as caught:
        decode_registration(Registration(server=A, role="generation", record=make_record()).encode())
    assert caught.value.field == "role"
    mutated = bytearray(registration.encode())
    generator = random.Random(3)
    for position in range(len(mutated)):
        changed = bytearray(mutated)
        changed[position] = generator.randrange(256)
        try:
            decode_registration(bytes(changed))
        except RecordInvalid:
            continue


# -- the book -----------------------------------------------------------------------------------------------------------


class Target:
    """A directory that is only a dictionary."""

    def __init__(self) -> None:
        self.have: dict[str, str | None] = {}

    def add_server(self, server: str, role: str, owner_id: str | None = None) -> None:
        self.have.setdefault(server, None)

    def remove_server(self, server: str) -> None:
        del self.have[server]

    def apply_set(self, server: str, record: EndpointRecord) -> None:
        self.have[server] = record.generation

    def apply_delete(self, server: str, generation: str | None) -> None:
        if self.have.get(server) == generation:
            del self.have[server]

    def servers(self, role: str | None = None) -> tuple[str, ...]:
        return tuple(self.have)


def value_of(make_record: MakeRecord, server: str, generation: str) -> bytes:
    return Registration(server=server, role="context", record=make_record(generation)).encode()


def listing(revision: int, **items: bytes) -> Snapshot:
    return Snapshot(revision, items, dict.fromkeys(items, revision))


def test_listing_finds_what_was_missed(make_record: MakeRecord) -> None:
    target = Target()
    book = RegistryBook(target)
    book.list_applied(listing(5, a=value_of(make_record, A, "g1"), b=value_of(make_record, B, "h1")), 0.0)
    assert target.have == {A: "g1", B: "h1"}
    book.list_applied(listing(9, a=value_of(make_record, A, "g2")), 1.0)
    assert target.have == {A: "g2"}


def test_one_bad_entry_stops_no_other_and_keeps_the_last_good(make_record: MakeRecord) -> None:
    errors: list[str] = []
    target = Target()
    book = RegistryBook(target, on_error=lambda key, error: errors.append(key))
    book.list_applied(listing(1, a=value_of(make_record, A, "g1")), 0.0)
    book.list_applied(listing(2, a=b"rubbish", b=value_of(make_record, B, "h1")), 1.0)
    assert target.have == {A: "g1", B: "h1"}
    assert errors == ["a"] and "a" in book.invalid
    book.event_applied(StoreEvent("a", value_of(make_record, A, "g2"), 3), 2.0)
    assert target.have[A] == "g2" and not book.invalid
    book.event_applied(StoreEvent("a", None, 4), 3.0)
    assert target.have == {B: "h1"}
    assert book.statistics().invalid == 1


def test_owner_that_moves_leaves_its_old_address(make_record: MakeRecord) -> None:
    target = Target()
    book = RegistryBook(target)
    book.event_applied(StoreEvent("a", value_of(make_record, A, "g1"), 1), 0.0)
    book.event_applied(StoreEvent("a", value_of(make_record, B, "g2"), 2), 0.0)
    assert target.have == {B: "g2"}


def test_two_owners_at_one_address_do_not_delete_each_other(make_record: MakeRecord) -> None:
    target = Target()
    book = RegistryBook(target)
    book.event_applied(StoreEvent("a", value_of(make_record, A, "g1"), 1), 0.0)
    book.event_applied(StoreEvent("b", value_of(make_record, A, "g2"), 2), 0.0)
    book.event_applied(StoreEvent("a", None, 3), 0.0)
    assert target.have == {A: "g2"}


def test_store_that_lost_its_memory_gets_a_grace(make_record: MakeRecord) -> None:
    """Its revision went back: what it no longer shows is kept until the owners had time to register again."""
    target = Target()
    book = RegistryBook(target, grace_s=30.0)
    items = {"a": value_of(make_record, A, "g1"), "b": value_of(make_record, B, "h1")}
    book.list_applied(listing(100, **items), 0.0)
    book.list_applied(listing(1), 10.0)
    assert target.have == {A: "g1", B: "h1"}
    book.event_applied(StoreEvent("a", items["a"], 2), 15.0)
    assert book.settle_suspects(39.0) == 40.0
    book.settle_suspects(40.0)
    assert target.have == {A: "g1"}


def test_random_events_and_listings_agree_with_a_dictionary(make_record: MakeRecord) -> None:
    """Events may be lost; a listing puts everything right."""
    for seed in range(50):
        chance = random.Random(seed)
        target = Target()
        book = RegistryBook(target)
        truth: dict[str, bytes] = {}
        for revision in range(1, 61):
            key = chance.choice("abcd")
            if chance.random() < 0.3:
                truth.pop(key, None)
                event = StoreEvent(key, None, revision)
            else:
                truth[key] = value_of(make_record, f"http://{key}{chance.randrange(2)}", f"{key}{revision}")
                event = StoreEvent(key, truth[key], revision)
            if chance.random() < 0.8:
                book.event_applied(event, 0.0)
            if chance.random() < 0.1:
                book.list_applied(Snapshot(revision, dict(truth), dict.fromkeys(truth, revision)), 0.0)
                expected = {decode_registration(v).server: decode_registration(v).record for v in truth.values()}
                assert target.have == {s: r.generation for s, r in expected.items() if r is not None}


# -- sources and stores -------------------------------------------------------------------------------------------------


def test_memory_store_conforms() -> None:
    async def make() -> MemoryLeaseStore:
        return MemoryLeaseStore()

    async def wait(ttl_s: float) -> None:
        await asyncio.sleep(ttl_s + 0.1)

    run_virtual(check_lease_store(make, wait))


def test_memory_store_compacts_and_expires_to_watchers() -> None:
    async def main() -> None:
        store = MemoryLeaseStore(history_max=3)
        lease = await store.grant(100)
        for number in range(10):
            await store.put(f"/k/{number}", b"", lease)
        with pytest.raises(StoreCompacted):
            await anext(store.watch("/k/", 0))
        watch = store.watch("/k/", 10)
        short = await store.grant(5)
        await store.put("/k/short", b"x", short)
        assert (await anext(watch))[0].value == b"x"
        (event,) = await anext(watch)  # nobody calls the store: the expiry itself wakes the watcher
        assert (event.key, event.value) == ("/k/short", None)
        with pytest.raises(StoreError, match="is gone"):
            await store.put("/k/late", b"x", short)
        store.down = True
        with pytest.raises(StoreError):
            await store.snapshot("/k/")
        store.drop_watches()
        with pytest.raises(StoreError):
            await anext(watch)

    run_virtual(main())


def test_static_list_feeds_a_directory_and_refuses_duplicates() -> None:
    with pytest.raises(LocalProtocolError):
        StaticServers({"context": [A], "generation": [A]})

    async def main() -> None:
        workers = [FakeWorker(A, "context", "ctx-0"), FakeWorker(B, "generation", "gen-0")]
        directory = directory_of(*workers)
        async with AsyncReconciler(StaticServers({"context": [A], "generation": [B]}), directory) as reconciler:
            await reconciler.wait_synced()
            assert directory.servers() == (A, B)
            await directory.prepare()
            assert directory.ready(context=1, generation=1)
        await directory.aclose()

    run_virtual(main())


# -- reconciler and publisher -------------------------------------------------------------------------------------------


def test_published_owner_is_followed_from_registration_to_withdrawal() -> None:
    async def main() -> None:
        store = MemoryLeaseStore()
        worker = FakeWorker(A, "context", "ctx-0")
        directory = directory_of(worker)
        async with AsyncReconciler(store, directory):
            async with AsyncLeasePublisher(store, worker.owner, A, 9.0, random=lambda: 1.0) as publisher:
                await until(lambda: directory.ready(context=1))
                await asyncio.sleep(60)  # kept alive far beyond the lease
                assert directory.ready(context=1)
                worker.owner.start_draining()
                publisher.update()
                await until(lambda: directory.status(A) is ServerStatus.DRAINING)
                assert directory.resolve(worker.generation).state == "draining"
                assert publisher.statistics().keep_alives >= 18
            await until(lambda: directory.servers() == ())
        await directory.aclose()

    run_virtual(main())


def test_draining_waits_for_what_is_in_flight_and_withdraws() -> None:
    """Seen as draining meanwhile; nothing is abandoned, and the withdrawal does not wait for the publisher's end."""

    async def main() -> None:
        store = MemoryLeaseStore()
        worker = FakeWorker(A, "context", "ctx-0")
        directory = directory_of(worker)
        async with AsyncReconciler(store, directory), AsyncLeasePublisher(store, worker.owner, A, 9.0) as publisher:
            await until(lambda: directory.ready(context=1))
            admission = worker.owner.admit(worker.generation)
            draining = asyncio.create_task(publisher.drain(60.0))
            await until(lambda: directory.status(A) is ServerStatus.DRAINING)
            await asyncio.sleep(5.0)
            assert not draining.done()
            admission.finish()
            assert await draining == 0
            await until(lambda: directory.servers() == ())
        await directory.aclose()

    run_virtual(main())


def test_draining_abandons_what_outlives_its_time() -> None:
    """The caller is told how many admissions it has to fail; nothing that was not published can drain."""

    async def main() -> None:
        store = MemoryLeaseStore()
        worker = FakeWorker(A, "context", "ctx-0")
        async with AsyncLeasePublisher(store, worker.owner, A, 9.0) as publisher:
            await publisher.wait_registered()
            for _ in range(3):
                worker.owner.admit(worker.generation)
            began_s = asyncio.get_running_loop().time()
            assert await publisher.drain(2.0) == 3
            assert asyncio.get_running_loop().time() - began_s == pytest.approx(2.0)
            with pytest.raises(InvalidTransition):
                await publisher.drain(2.0)

    run_virtual(main())


def test_crashed_owner_expires() -> None:
    async def main() -> None:
        store = MemoryLeaseStore()
        worker = FakeWorker(A, "context", "ctx-0")
        directory = directory_of(worker)
        async with AsyncReconciler(store, directory):
            publisher = AsyncLeasePublisher(store, worker.owner, A, 10.0)
            await publisher.__aenter__()
            await until(lambda: directory.ready(context=1))
            assert publisher._task is not None
            publisher._task.cancel()
            await asyncio.sleep(11)
            assert directory.servers() == ()
        await directory.aclose()

    run_virtual(main())


def test_nothing_is_registered_before_publication_or_after_retirement() -> None:
    async def main() -> None:
        from endpoint_lifecycle import EndpointOwner

        store = MemoryLeaseStore()
        owner = EndpointOwner("ctx-0", "i", "context")
        async with AsyncLeasePublisher(store, owner, A, 3.0) as publisher:
            with owner.begin_estimation():
                await asyncio.sleep(5)
                assert not (await store.snapshot("/")).items
            generation = owner.finalize().publish(("tcp://10.0.0.1:1",)).generation
            publisher.update()
            await publisher.wait_registered()
            assert (await store.snapshot("/")).items
            owner.start_draining()
            owner.retire(generation)
            publisher.update()
            await asyncio.sleep(0.1)
            assert not (await store.snapshot("/")).items

    run_virtual(main())


def test_a_publisher_that_is_closed_while_it_registers_leaves_nothing() -> None:
    """The store has the registration, its answer has not come: the lease that it hangs on is given back."""

    class Slow(MemoryLeaseStore):
        async def put(self, key: str, value: bytes, lease_id: int, if_revision: int | None = None) -> int | None:
            revision = await super().put(key, value, lease_id, if_revision)
            await asyncio.sleep(1.0)
            return revision

    async def main() -> None:
        store = Slow()
        publisher = AsyncLeasePublisher(store, FakeWorker(A, "context", "ctx-0").owner, A)
        async with publisher:
            await asyncio.sleep(0.5)
            assert (await store.snapshot("/")).items
        assert not (await store.snapshot("/")).items

    run_virtual(main())


def test_a_publisher_is_closed_whatever_its_store_raises_and_registers_anew() -> None:
    """Closing is not the store's to prevent; entered again, it is waited for again."""

    class Foreign(MemoryLeaseStore):
        broken = False

        async def compare_and_delete(self, key: str, revision: int) -> bool:
            if self.broken:
                raise ZeroDivisionError("no store at all")
            return await super().compare_and_delete(key, revision)

    async def main() -> None:
        store = Foreign()
        publisher = AsyncLeasePublisher(store, FakeWorker(A, "context", "ctx-0").owner, A)
        async with publisher:
            await publisher.wait_registered()
            store.broken = True
        assert isinstance(publisher.last_error, ZeroDivisionError) and publisher.statistics().failures == 1
        store.broken = False
        await asyncio.sleep(60)
        assert not (await store.snapshot("/")).items
        async with publisher:
            await publisher.wait_registered()
            assert (await store.snapshot("/")).items and publisher.statistics().registered

    run_virtual(main())


@pytest.mark.parametrize("leaves_first", [0, 1])
def test_two_names_of_one_address_leave_nothing_when_both_have_left(leaves_first: int) -> None:
    """An instance restarted under another name, inside its lease; then it stops. Nobody is left to be picked."""

    async def main() -> None:
        store = MemoryLeaseStore()
        workers = [FakeWorker(A, "context", name) for name in ("ctx-0", "ctx-1")]
        directory = directory_of()  # nothing answers at the address
        async with AsyncReconciler(store, directory) as reconciler:
            publishers = [AsyncLeasePublisher(store, worker.owner, A) for worker in workers]
            for publisher in publishers:
                await publisher.__aenter__()
                await publisher.wait_registered()
                await asyncio.sleep(0.1)
            assert directory.record(A).generation == workers[1].generation
            await publishers[leaves_first].aclose()
            await asyncio.sleep(0.1)
            assert directory.ready(context=1) is (leaves_first == 0), "the later lifetime is the live one"
            await publishers[1 - leaves_first].aclose()
            await asyncio.sleep(0.1)
            assert directory.servers() == () and reconciler.statistics().failures == 0
        await directory.aclose()

    run_virtual(main())


def test_late_withdrawal_leaves_the_successor_alone() -> None:
    async def main() -> None:
        store = MemoryLeaseStore()
        worker = FakeWorker(A, "context", "ctx-0")
        old = AsyncLeasePublisher(store, worker.owner, A)
        await old.__aenter__()
        await old.wait_registered()
        worker.restart()
        async with AsyncLeasePublisher(store, worker.owner, A) as new:
            await new.wait_registered()
            await old.aclose()
            (value,) = (await store.snapshot("/")).items.values()
            record = decode_registration(value).record
            assert record is not None and record.generation == worker.generation

    run_virtual(main())


def test_publisher_steps_back_for_a_newer_registration() -> None:
    async def main() -> None:
        store = MemoryLeaseStore()
        first = FakeWorker(A, "context", "ctx-0")
        second = FakeWorker(B, "context", "ctx-0")
        second.restart()
        async with AsyncLeasePublisher(store, first.owner, A, 3.0) as old:
            await old.wait_registered()
            told = asyncio.ensure_future(old.wait_superseded())
            async with AsyncLeasePublisher(store, second.owner, B, 3.0) as new:
                await new.wait_registered()
                assert not told.done()
                first.owner.start_draining()  # a change that the old one would want to write
                old.update()
                await asyncio.wait_for(told, 3.0)
                assert old.statistics().superseded and "another instance" in str(old.last_error)
                await asyncio.sleep(10)
                (value,) = (await store.snapshot("/")).items.values()
                assert decode_registration(value).server == B
                assert new.statistics().registered and not old.statistics().registered

    run_virtual(main())


def test_lost_answer_of_a_write_is_no_successor() -> None:
    """The store wrote, the answer was lost: what stands there is ours, and is written over, not stepped back from."""

    class Lossy(MemoryLeaseStore):
        lose = False

        async def put(self, key: str, value: bytes, lease_id: int, if_revision: int | None = None) -> int | None:
            revision = await super().put(key, value, lease_id, if_revision)
            if self.lose:
                self.lose = False
                raise StoreError("answer lost")
            return revision

    async def main() -> None:
        store = Lossy()
        worker = FakeWorker(A, "context", "ctx-0")
        async with AsyncLeasePublisher(store, worker.owner, A, 3.0) as publisher:
            await publisher.wait_registered()
            store.lose = True
            worker.owner.start_draining()
            publisher.update()
            await asyncio.sleep(10)
            statistics = publisher.statistics()
            assert statistics.registered and not statistics.superseded and statistics.failures == 1
            (value,) = (await store.snapshot("/")).items.values()
            assert decode_registration(value).record.state == "draining"  # type: ignore[union-attr]

    run_virtual(main())


def test_watch_that_broke_is_reconciled_by_listing() -> None:
    """A deletion while nobody watched is found by the next listing."""

    async def main() -> None:
        store = MemoryLeaseStore()
        worker = FakeWorker(A, "context", "ctx-0")
        directory = directory_of(worker)
        async with AsyncReconciler(store, directory, random=lambda: 0.5) as reconciler:
            publisher = AsyncLeasePublisher(store, worker.owner, A)
            await publisher.__aenter__()
            await until(lambda: directory.ready(context=1))
            store.drop_watches()
            await publisher.aclose()  # withdrawn in the gap
            await until(lambda: directory.servers() == ())
            assert reconciler.statistics().listings >= 2
        await directory.aclose()

    run_virtual(main())


def test_compaction_is_answered_by_listing_again() -> None:
    class Compacting(MemoryLeaseStore):
        left = 2

        async def watch(self, prefix: str, after_revision: int) -> Any:
            if self.left:
                self.left -= 1
                raise StoreCompacted("gone")
            async for events in super().watch(prefix, after_revision):
                yield events

    async def main() -> None:
        store = Compacting()
        worker = FakeWorker(A, "context", "ctx-0")
        directory = directory_of(worker)
        async with AsyncReconciler(store, directory) as reconciler, AsyncLeasePublisher(store, worker.owner, A):
            await until(lambda: directory.ready(context=1))
            await until(lambda: reconciler.statistics().compactions == 2)
        await directory.aclose()

    run_virtual(main())


def test_retries_back_off_with_jitter_and_a_cap() -> None:
    async def main(seed: int) -> list[float]:
        waits: list[float] = []
        store = MemoryLeaseStore()
        store.down = True
        directory = directory_of()
        chance = random.Random(seed)
        async with AsyncReconciler(
            store, directory, backoff_first_s=0.1, backoff_max_s=2.0, random=chance.random
        ) as reconciler:
            for failures in range(1, 9):
                await until(lambda failures=failures: reconciler.statistics().failures == failures)  # type: ignore[misc]
                waits.append(reconciler.statistics().retry_in_s)
            assert isinstance(reconciler.last_error, StoreError)
        await directory.aclose()
        return waits

    first, second = run_virtual(main(1)), run_virtual(main(2))
    limits = [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0]
    for waits in (first, second):
        assert all(limit / 2 <= wait <= limit for wait, limit in zip(waits, limits, strict=True))
    assert first != second  # two routers do not come back in step


def test_store_that_comes_back_empty_keeps_routes_through_its_grace() -> None:
    async def main() -> None:
        store = MemoryLeaseStore()
        alive, dead = FakeWorker(A, "context", "ctx-0"), FakeWorker(B, "context", "ctx-1")
        directory = directory_of(alive, dead)
        gone = AsyncLeasePublisher(store, dead.owner, B, 9.0)
        async with (
            AsyncReconciler(store, directory, grace_s=20.0) as reconciler,
            AsyncLeasePublisher(store, alive.owner, A, 9.0),
        ):
            await gone.__aenter__()
            await until(lambda: directory.ready(context=2))
            assert gone._task is not None
            gone._task.cancel()
            store.lose_memory()
            await asyncio.sleep(1)
            assert directory.ready(context=2)
            assert reconciler.book.statistics().suspected >= 1
            await asyncio.sleep(25)
            assert directory.servers() == (A,)
        await directory.aclose()

    run_virtual(main())


def test_keys_are_one_per_slot() -> None:
    assert registration_key("context", "ctx-0") == "/endpoint-lifecycle/servers/context/ctx-0"
