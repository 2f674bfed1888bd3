"""Hazards H1 to H15, found by reading serving code of the field: each one re-created and shown not to happen here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from endpoint_lifecycle import (
    AsyncEndpointDirectory,
    AsyncLeasePublisher,
    AsyncReconciler,
    DirectoryConfig,
    DurableRequestIds,
    EndpointDirectory,
    EndpointRecord,
    EndpointTimeout,
    Load,
    MemoryLeaseStore,
    NoServer,
    RefreshFailed,
    RequestIdGenerator,
    ReservedStream,
    StoreError,
    split_request_id,
)
from endpoint_lifecycle.testing import FakeTransport, FakeWorker, run_virtual, until

A, B = "http://a:1", "http://b:1"
MakeRecord = Callable[..., EndpointRecord]


def pair(*servers: str, **config: Any) -> tuple[AsyncEndpointDirectory, dict[str, FakeWorker], FakeTransport]:
    workers = {s: FakeWorker(s, "context", f"ctx-{n}") for n, s in enumerate(servers)}
    transport = FakeTransport(*workers.values())
    directory = AsyncEndpointDirectory(
        transport.fetch, DirectoryConfig(**({"probe_ready_s": None} | config)), random=lambda: 0.5
    )
    for worker in workers.values():
        directory.add_server(worker.server, worker.role)
    return directory, workers, transport


def test_h01_restart_at_the_same_address_inside_the_lease(make_record: MakeRecord) -> None:
    """The new registration replaces the old one at once; the old one's late expiry leaves the live worker routable."""

    async def main() -> None:
        store = MemoryLeaseStore()
        worker = FakeWorker(A, "context", "ctx-0")
        directory = AsyncEndpointDirectory(FakeTransport(worker).fetch, DirectoryConfig(probe_ready_s=None))
        async with AsyncReconciler(store, directory, random=lambda: 0.5) as reconciler:
            crashed = AsyncLeasePublisher(store, worker.owner, A, 10.0)
            await crashed.__aenter__()
            await crashed.wait_registered()
            assert crashed._task is not None
            crashed._task.cancel()  # killed: no withdrawal
            old = worker.generation
            await reconciler.wait_synced()
            await until(lambda: directory.ready(context=1))
            new = worker.restart()
            async with AsyncLeasePublisher(store, worker.owner, A, 10.0) as publisher:
                await publisher.wait_registered()
                await until(lambda: directory.record(A).generation == new)  # type: ignore[union-attr]
                await asyncio.sleep(20)  # the old lease runs out
                assert directory.record(A).generation == new  # type: ignore[union-attr]
                directory.apply_delete(A, old)
                assert directory.servers() == (A,)
        await directory.aclose()

    run_virtual(main())


def test_h02_hung_server_info_stalls_no_pick() -> None:
    async def main() -> None:
        directory, workers, _ = pair(A, B)
        await directory.refresh(B)
        workers[A].info_mode = "hang"
        waiting = asyncio.create_task(directory.refresh(A))
        await asyncio.sleep(0.01)
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        for number in range(100):
            async with directory.reserve("context", number) as reservation:
                assert reservation.server == B
        assert loop.time() == started_s  # not one of them waited
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await directory.aclose()

    run_virtual(main())


def test_h03_reconciler_survives_every_error_and_an_empty_list() -> None:
    class Flaky(MemoryLeaseStore):
        fail_with: list[BaseException]

        async def snapshot(self, prefix: str) -> Any:
            if self.fail_with:
                raise self.fail_with.pop(0)
            return await super().snapshot(prefix)

    async def main() -> None:
        store = Flaky()
        store.fail_with = [StoreError("x"), ValueError("y"), RuntimeError("z"), KeyError("k")]
        worker = FakeWorker(A, "context", "ctx-0")
        directory = AsyncEndpointDirectory(FakeTransport(worker).fetch, DirectoryConfig(probe_ready_s=None))
        async with AsyncReconciler(store, directory) as reconciler:
            await reconciler.wait_synced()  # the list is empty
            assert reconciler.statistics().failures == 4
            async with AsyncLeasePublisher(store, worker.owner, A):
                await until(lambda: directory.ready(context=1))
        await directory.aclose()

    run_virtual(main())


def test_h04_every_fetch_has_a_bound_and_servers_are_prepared_at_once() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        directory, workers, _ = pair(*(f"http://s{n}:1" for n in range(6)))
        for worker in list(workers.values())[:3]:
            worker.info_mode = "hang"
        outcome = await directory.prepare()
        assert loop.time() <= 3.0
        assert sum(isinstance(value, EndpointRecord) for value in outcome.values()) == 3
        assert sum(isinstance(value, (RefreshFailed, EndpointTimeout)) for value in outcome.values()) == 3
        await directory.aclose()

    run_virtual(main())


@pytest.mark.parametrize("error", [asyncio.CancelledError, KeyboardInterrupt, GeneratorExit, ValueError])
def test_h05_release_happens_for_errors_that_are_no_exception(error: type[BaseException]) -> None:
    """CancelledError and its like pass ``except Exception``; the reservation is released all the same."""

    async def main() -> None:
        directory, _, _ = pair(A)
        await directory.prepare()
        context = directory.reserve("context", 1)
        await context.__aenter__()
        await context.__aexit__(error, error(), None)
        assert directory.load(A) == Load(0, 0)
        assert directory.statistics().reservations_released == 1
        await directory.aclose()

    run_virtual(main())


def test_h06_stream_that_was_never_started_releases() -> None:
    """A generator's finally never runs if the client left before the first read; this stream's aclose does the work."""

    async def main() -> None:
        directory, _, transport = pair(A)
        await directory.prepare()
        ran: list[str] = []

        async def naive(reservation: Any) -> Any:
            try:
                yield 1
            finally:
                ran.append("finally")
                reservation.release()

        lost = await directory.reserve("context", 1).acquire()
        await naive(lost).aclose()
        assert ran == [] and directory.load(A) == Load(1, 1)  # the hazard, as it is
        lost.release()

        kept = await directory.reserve("context", 2).acquire()
        await ReservedStream(transport.stream(A, kept.generation, 2, 1), kept).aclose()
        assert directory.load(A) == Load(0, 0)
        await directory.aclose()

    run_virtual(main())


@pytest.mark.parametrize("ending", ["context error", "early end"])
def test_h07_generation_leg_reserved_first_is_released_when_the_context_leg_ends_it(ending: str) -> None:
    async def main() -> None:
        workers = [FakeWorker(A, "context", "ctx-0"), FakeWorker(B, "generation", "gen-0")]
        directory = AsyncEndpointDirectory(FakeTransport(*workers).fetch, DirectoryConfig(probe_ready_s=None))
        for worker in workers:
            directory.add_server(worker.server, worker.role)

        async def conditional() -> str:
            async with directory.reserve("generation", 1), directory.reserve("context", 1):
                if ending == "context error":
                    raise ConnectionResetError
                return "finished at the first token"

        await asyncio.gather(conditional(), return_exceptions=True)
        assert directory.load(A) == directory.load(B) == Load(0, 0)
        await directory.aclose()

    run_virtual(main())


def test_h08_old_release_never_reaches_the_counter_of_a_server_that_came_back(make_record: MakeRecord) -> None:
    directory = EndpointDirectory(DirectoryConfig())
    directory.apply_set(A, make_record("g1"), 0.0)
    directory.apply_set(B, make_record("gb"), 0.0)
    old = directory.reserve("context", 1, 0.0, exclude={B})
    directory.remove_server(A, 1.0)
    directory.apply_set(A, make_record("g2"), 2.0)
    fresh = directory.reserve("context", 2, 2.0, exclude={B})
    directory.release(old)
    assert directory.load(A) == Load(1, 1)
    directory.release(fresh)
    assert directory.load(A) == Load(0, 0)
    # A counter at -1 would make A look least loaded for ever; picks alternate instead.
    picks = [directory.reserve("context", 10 + n, 3.0).server for n in range(10)]
    assert picks.count(A) == picks.count(B) == 5
    directory.validate()


def test_h09_failure_of_one_leg_cancels_its_sibling() -> None:
    """Both legs in one task group under their reservations: the generation leg does not run on until a timeout."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        workers = [FakeWorker(A, "context", "ctx-0"), FakeWorker(B, "generation", "gen-0")]
        transport = FakeTransport(*workers)
        directory = AsyncEndpointDirectory(transport.fetch, DirectoryConfig(probe_ready_s=None))
        for worker in workers:
            directory.add_server(worker.server, worker.role)

        async def leg(reservation: Any, items: int, fail: bool) -> None:
            reservation.dispatched()
            async for _ in transport.stream(reservation.server, reservation.generation, 1, items):
                if fail:
                    raise ConnectionResetError

        async def request() -> None:
            async with (
                directory.reserve("context", 1) as context,
                directory.reserve("generation", 1) as generation,
                asyncio.TaskGroup() as group,
            ):
                group.create_task(leg(context, 1, True))
                group.create_task(leg(generation, 180_000, False))

        await asyncio.gather(request(), return_exceptions=True)
        assert loop.time() < 1.0
        await asyncio.sleep(0.01)
        assert workers[1].running == 0
        assert directory.load(A) == directory.load(B) == Load(0, 0)
        await directory.aclose()

    run_virtual(main())


def test_h10_disconnect_before_the_first_read_leaves_no_consumer_and_no_decode() -> None:
    async def main() -> None:
        directory, workers, transport = pair(A)
        reservation = await directory.reserve("context", 1).acquire()
        queue: asyncio.Queue[int] = asyncio.Queue(maxsize=4)

        async def consume(stream: ReservedStream[int]) -> None:
            async with stream:
                async for item in stream:
                    await queue.put(item)

        task = asyncio.create_task(
            consume(ReservedStream(transport.stream(A, reservation.generation, 1, 1000), reservation))
        )
        await until(lambda: queue.full())
        assert workers[A].running == 1  # the bounded queue holds it back
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert workers[A].running == 0
        assert directory.load(A) == Load(0, 0)
        await directory.aclose()

    run_virtual(main())


def test_h11_last_item_and_end_arrive_together() -> None:
    """A stream that ends with its first item delivers it: nothing is swallowed between the item and the release."""

    async def main() -> None:
        directory, _, transport = pair(A)
        reservation = await directory.reserve("context", 1).acquire()
        stream = ReservedStream(transport.stream(A, reservation.generation, 1, 1), reservation)
        assert [item async for item in stream] == [0]
        assert directory.load(A) == Load(0, 0)
        await directory.aclose()

    run_virtual(main())


def test_h12_request_ids_outlive_reboots_clock_steps_and_bursts(tmp_path: Any) -> None:
    """Wall time, an explicit node and a 12-bit counter that borrows from the future instead of repeating."""
    now_ms = time.time_ns() // 1_000_000
    clock = {"ms": now_ms}
    first = RequestIdGenerator(3, now_ms=lambda: clock["ms"])
    seen = {first.next_id() for _ in range(10_000)}  # more than a counter holds in one millisecond
    assert len(seen) == 10_000
    clock["ms"] += 10_000
    rebooted = RequestIdGenerator(3, now_ms=lambda: clock["ms"])
    seen |= {rebooted.next_id() for _ in range(10_000)}
    other_node = RequestIdGenerator(4, now_ms=lambda: clock["ms"])
    seen |= {other_node.next_id() for _ in range(10_000)}
    assert len(seen) == 30_000
    assert {split_request_id(i)[1] for i in seen} == {3, 4}
    with DurableRequestIds(tmp_path / "ids", 3, now_ms=lambda: clock["ms"]) as durable:
        kept = {durable.next_id() for _ in range(10_000)}
    clock["ms"] -= 86_400_000  # the clock of the next boot is a day behind
    with DurableRequestIds(tmp_path / "ids", 3, now_ms=lambda: clock["ms"]) as durable:
        kept |= {durable.next_id() for _ in range(10_000)}
    assert len(kept) == 20_000


def test_h13_registration_between_listing_and_watch_is_not_lost() -> None:
    class Gap(MemoryLeaseStore):
        in_gap: Any = None

        async def snapshot(self, prefix: str) -> Any:
            shown = await super().snapshot(prefix)
            if self.in_gap is not None:
                action, self.in_gap = self.in_gap, None
                await action()
            return shown

    async def main() -> None:
        store = Gap()
        worker = FakeWorker(A, "context", "ctx-0")
        directory = AsyncEndpointDirectory(FakeTransport(worker).fetch, DirectoryConfig(probe_ready_s=None))
        publisher = AsyncLeasePublisher(store, worker.owner, A)

        async def register() -> None:
            await publisher.__aenter__()
            await publisher.wait_registered()

        store.in_gap = register
        async with AsyncReconciler(store, directory):
            await until(lambda: directory.ready(context=1))
        await publisher.aclose()
        await directory.aclose()

    run_virtual(main())


def test_h14_registering_again_after_a_false_expiry_overwrites() -> None:
    async def main() -> None:
        store = MemoryLeaseStore()
        worker = FakeWorker(A, "context", "ctx-0")
        directory = AsyncEndpointDirectory(FakeTransport(worker).fetch, DirectoryConfig(probe_ready_s=None))
        async with (
            AsyncReconciler(store, directory) as reconciler,
            AsyncLeasePublisher(store, worker.owner, A, 9.0) as publisher,
        ):
            await publisher.wait_registered()
            await until(lambda: directory.ready(context=1))
            await store.revoke(publisher._lease)  # the store believes that we died
            await until(lambda: not directory.ready(context=1))
            await until(lambda: directory.ready(context=1))
            assert publisher.statistics().lease_losses == 1
            assert directory.record(A).generation == worker.generation  # type: ignore[union-attr]
            assert reconciler.statistics().failures == 0
        await directory.aclose()

    run_virtual(main())


def test_h15_selecting_again_under_the_same_key_never_loses_the_claim(make_record: MakeRecord) -> None:
    """The old claim is replaced in the step that makes the new one; where nothing can be picked it stays whole."""
    directory = EndpointDirectory(DirectoryConfig())
    directory.apply_set(A, make_record("g1"), 0.0)
    first = directory.reserve("context", 1, 0.0, weight=2)
    with pytest.raises(NoServer):
        directory.reserve("context", 1, 0.0, exclude={A})
    assert first.live and directory.load(A) == Load(1, 2)
    second = directory.reserve("context", 1, 0.0, weight=3)
    assert not first.live and directory.load(A) == Load(1, 3)
    assert directory.release(second)
    directory.validate()
