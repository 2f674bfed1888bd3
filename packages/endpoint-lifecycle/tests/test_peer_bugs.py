"""Bugs that peers had with endpoints, refreshes, reservations and registries: each one re-created, by its name.

The names are public issue numbers. Where the bug was in a scheduler or a transfer, only the part that a directory can get
wrong is here.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from endpoint_lifecycle import (
    AsyncEndpointDirectory,
    AsyncLeasePublisher,
    AsyncReconciler,
    DirectoryConfig,
    EndpointError,
    EndpointOwner,
    EndpointRecord,
    Load,
    MemoryLeaseStore,
    NoServer,
    RecordInvalid,
    Registration,
    RequestIdGenerator,
    ServerStatus,
    StaleGeneration,
    registration_key,
)
from endpoint_lifecycle.testing import FakeTransport, FakeWorker, run_virtual, until

A, B = "http://a:1", "http://b:1"


def setup(*roles: str, **config: Any) -> tuple[AsyncEndpointDirectory, list[FakeWorker], FakeTransport]:
    workers = [FakeWorker(f"http://{'abcdef'[n]}:1", role, f"{role[:3]}-{n}") for n, role in enumerate(roles)]
    transport = FakeTransport(*workers)
    directory = AsyncEndpointDirectory(
        transport.fetch, DirectoryConfig(**({"probe_ready_s": None} | config)), random=lambda: 0.5
    )
    for worker in workers:
        directory.add_server(worker.server, worker.role)
    return directory, workers, transport


def test_trtllm_16645_temporary_endpoint_is_never_served() -> None:
    """/server_info polled at every step of a start never shows the estimation's address; two lifetimes differ."""
    generations = set()
    for _ in range(2):
        owner = EndpointOwner("ctx-0", "i", "context")
        seen: list[dict[str, Any]] = []
        from endpoint_lifecycle import server_info_body

        def poll(owner: EndpointOwner = owner, seen: list[dict[str, Any]] = seen) -> None:
            seen.append(server_info_body(owner))

        poll()
        with owner.begin_estimation() as runtime:
            runtime.opened("tcp://127.0.0.1:1000", 7)
            poll()
            runtime.closed("tcp://127.0.0.1:1000")
            poll()
        poll()
        capability = owner.finalize()
        poll()
        capability.publish(("tcp://127.0.0.1:2000",))
        poll()
        assert all("1000" not in str(body) for body in seen)
        assert [body["ready"] for body in seen] == [False] * 5 + [True]
        generations.add(seen[-1]["generation"])
    assert len(generations) == 2


def test_vllm_49238_restart_of_prefill_is_seen_before_anything_is_sent_to_the_old_one() -> None:
    async def main() -> None:
        directory, workers, transport = setup("context")
        await directory.prepare()
        old = workers[0].generation
        workers[0].restart()
        async with directory.reserve("context", 1) as reservation:
            reservation.dispatched()
            with pytest.raises(StaleGeneration) as caught:
                await anext(transport.stream(A, reservation.generation, 1, 1))
            assert caught.value.expected == old
            await reservation.prove_stale()
            reservation.dispatched()
            assert await anext(transport.stream(A, reservation.generation, 1, 1)) == 0
        assert [generation for generation, _ in workers[0].received] == [workers[0].generation]
        await directory.aclose()

    run_virtual(main())


def test_sglang_34289_swap_behind_a_stable_address_heals_without_a_restart() -> None:
    """Before: passes. The first after the swap is refused. Then: passes, and nothing was restarted."""

    async def main() -> None:
        directory, workers, transport = setup("context")
        await directory.prepare()
        outcomes = []
        for number in range(6):
            if number == 2:
                workers[0].restart()
            async with directory.reserve("context", number) as reservation:
                try:
                    reservation.dispatched()
                    await anext(transport.stream(A, reservation.generation, number, 1))
                    outcomes.append("ok")
                except StaleGeneration:
                    outcomes.append("refused")
                    await reservation.prove_stale()
        assert outcomes == ["ok", "ok", "refused", "ok", "ok", "ok"]
        await directory.aclose()

    run_virtual(main())


def test_production_stack_1008_evicted_pod_with_an_empty_address_is_no_server() -> None:
    async def main() -> None:
        store = MemoryLeaseStore()
        directory, workers, _ = setup("context")
        directory.remove_server(A)
        async with (
            AsyncReconciler(store, directory) as reconciler,
            AsyncLeasePublisher(store, workers[0].owner, A) as publisher,
        ):
            await until(lambda: directory.ready(context=1))
            lease = await store.grant(100)
            for server in ("", "   \n"):
                value = Registration(server=server, role="context").encode()
                await store.put(registration_key("context", "evicted"), value, lease)
            await asyncio.sleep(0.1)
            assert directory.servers() == (A,)
            assert reconciler.book.statistics().invalid == 2
            assert publisher.statistics().registered
        await directory.aclose()

    run_virtual(main())


def test_production_stack_656_error_in_one_probe_kills_no_watcher() -> None:
    """A server whose probe raises is out; discovery and the other servers go on, and it is dropped when it is deleted."""

    async def main() -> None:
        store = MemoryLeaseStore()
        directory, workers, _ = setup("context", "context")
        for worker in workers:
            directory.remove_server(worker.server)
        workers[0].info_mode = "garbage"
        async with directory, AsyncReconciler(store, directory) as reconciler:
            zombie = AsyncLeasePublisher(store, workers[0].owner, A)
            async with zombie, AsyncLeasePublisher(store, workers[1].owner, B):
                await until(lambda: len(directory.servers()) == 2)
                with pytest.raises(EndpointError):
                    await directory.refresh(A)
                assert directory.status(A) is ServerStatus.UNPREPARED
                await zombie.aclose()
                await until(lambda: directory.servers() == (B,))
                assert reconciler.statistics().failures == 0

    run_virtual(main())


def test_production_stack_601_terminating_server_is_not_picked() -> None:
    async def main() -> None:
        directory, workers, _ = setup("context", "context")
        await directory.prepare()
        workers[0].owner.start_draining()
        await directory.refresh(A)
        for number in range(20):
            async with directory.reserve("context", number) as reservation:
                assert reservation.server == B
        assert directory.resolve(workers[0].generation).state == "draining"
        await directory.aclose()

    run_virtual(main())


def test_production_stack_619_unready_server_is_not_picked() -> None:
    async def main() -> None:
        directory, workers, _ = setup("context")
        workers[0].owner.fail("loading weights")
        with pytest.raises(NoServer, match="not ready"):
            async with directory.reserve("context", 1):
                pass
        assert not directory.ready(context=1)
        await directory.aclose()

    run_virtual(main())


def test_production_stack_1091_deletion_during_a_watch_gap_is_found() -> None:
    async def main() -> None:
        store = MemoryLeaseStore()
        directory, workers, _ = setup("context", "context")
        for worker in workers:
            directory.remove_server(worker.server)
        async with AsyncReconciler(store, directory), AsyncLeasePublisher(store, workers[1].owner, B):
            leaver = AsyncLeasePublisher(store, workers[0].owner, A)
            await leaver.__aenter__()
            await until(lambda: directory.ready(context=2))
            store.drop_watches()
            await leaver.aclose()
            await until(lambda: directory.servers() == (B,))
        await directory.aclose()

    run_virtual(main())


def test_dynamo_732_first_requests_after_a_kill_do_not_fail() -> None:
    """One instance of two is killed: the request that meets it reports it and takes the other; no later one meets it."""

    async def main() -> None:
        directory, workers, transport = setup("context", "context")
        await directory.prepare()
        workers[0].up = False
        refused = 0
        for number in range(20):
            exclude: set[str] = set()
            for _ in range(2):
                async with directory.reserve("context", number, exclude=exclude) as reservation:
                    try:
                        reservation.dispatched()
                        await anext(transport.stream(reservation.server, reservation.generation, number, 1))
                        break
                    except ConnectionRefusedError:
                        refused += 1
                        reservation.unreachable()
                        exclude.add(reservation.server)
            else:
                raise AssertionError(f"request {number} failed")
        assert refused == 1
        await directory.aclose()

    run_virtual(main())


def test_dynamo_3493_registry_outage_of_thirty_seconds_heals_by_itself() -> None:
    """Existing routes work throughout; the workers are registered again without anybody's help."""

    async def main() -> None:
        store = MemoryLeaseStore()
        directory, workers, _ = setup("context")
        directory.remove_server(A)
        async with (
            AsyncReconciler(store, directory) as reconciler,
            AsyncLeasePublisher(store, workers[0].owner, A, 10.0) as p,
        ):
            await until(lambda: directory.ready(context=1))
            store.down = True
            store.drop_watches()
            for number in range(30):
                await asyncio.sleep(1)
                async with directory.reserve("context", number) as reservation:
                    assert reservation.server == A
            store.down = False
            await until(lambda: p.statistics().lease_losses == 1 and p.statistics().registered)
            await until(lambda: directory.ready(context=1))
            await asyncio.sleep(30)
            assert directory.ready(context=1)
            assert reconciler.statistics().failures > 3
            assert (await store.snapshot("/")).items
        await directory.aclose()

    run_virtual(main())


def test_dynamo_7932_routers_do_not_reconnect_in_step() -> None:
    async def main() -> None:
        import random

        store = MemoryLeaseStore()
        store.down = True
        directories = [setup()[0] for _ in range(20)]
        reconcilers = [
            AsyncReconciler(store, directory, random=random.Random(n).random) for n, directory in enumerate(directories)
        ]
        for reconciler in reconcilers:
            await reconciler.__aenter__()
        await asyncio.sleep(10)
        waits = {round(reconciler.statistics().retry_in_s, 6) for reconciler in reconcilers}
        assert len(waits) == 20
        for reconciler, directory in zip(reconcilers, directories, strict=True):
            await reconciler.aclose()
            await directory.aclose()

    run_virtual(main())


def test_dynamo_8965_prefill_router_works_after_the_decode_side_was_rebuilt() -> None:
    """Every server of a role goes and comes back; requests of the other role and of the new ones go through."""

    async def main() -> None:
        directory, workers, _ = setup("context", "generation")
        await directory.prepare()
        directory.remove_server(B)
        async with directory.reserve("context", 1):
            pass
        with pytest.raises(NoServer):
            async with directory.reserve("generation", 1):
                pass
        workers[1].restart()
        directory.add_server(B, "generation")
        async with directory.reserve("context", 2), directory.reserve("generation", 2) as generation:
            assert generation.generation == workers[1].generation
        await directory.aclose()

    run_virtual(main())


def test_dynamo_7131_model_is_not_ready_after_its_only_prefill_died() -> None:
    async def main() -> None:
        directory, workers, _ = setup(
            "context", "generation", probe_ready_s=1.0, attempts=1, total_timeout_s=0.5, attempt_timeout_s=0.5
        )
        async with directory:
            await until(lambda: directory.ready(context=1, generation=1))
            workers[0].up = False
            await until(lambda: not directory.ready(context=1, generation=1))
            assert directory.ready(generation=1)

    run_virtual(main())


def test_dynamo_13855_disconnect_during_prefill_reaches_the_decode_side() -> None:
    """The client goes while the context leg runs: the claim on the generation side goes with it, in the same moment."""

    async def main() -> None:
        directory, workers, transport = setup("context", "generation")
        await directory.prepare()

        async def request() -> None:
            async with directory.reserve("generation", 1), directory.reserve("context", 1) as context:
                context.dispatched()
                async for _ in transport.stream(A, context.generation, 1, 1000):
                    pass

        task = asyncio.create_task(request())
        await until(lambda: workers[0].running == 1)
        assert directory.load(B) == Load(1, 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert directory.load(A) == directory.load(B) == Load(0, 0)
        await asyncio.sleep(0.01)
        assert workers[0].running == 0
        await directory.aclose()

    run_virtual(main())


def test_opensandbox_1133_leaders_cancel_kills_no_coalesced_waiter() -> None:
    async def main() -> None:
        directory, workers, _ = setup("context")
        workers[0].info_delay_s = 0.3
        leader = asyncio.create_task(directory.refresh(A))
        await asyncio.sleep(0.1)
        followers = [asyncio.create_task(directory.refresh(A)) for _ in range(9)]
        await asyncio.sleep(0)
        leader.cancel()
        outcomes = await asyncio.gather(*followers)
        assert all(isinstance(outcome, EndpointRecord) for outcome in outcomes)
        assert workers[0].fetches == 1
        await directory.aclose()

    run_virtual(main())


def test_sglang_40125_and_kthena_1423_ids_are_never_used_twice() -> None:
    """A retry takes a new id; no two of a million ids of two fronts are equal."""
    fronts = [RequestIdGenerator(n) for n in range(2)]
    made = [front.next_id() for front in fronts for _ in range(200_000)]
    assert len(set(made)) == len(made)


def test_trtllm_12313_expiry_runs_without_new_work() -> None:
    """The cleanup of a timed-out claim needs no further request to happen."""

    async def main() -> None:
        directory, _, _ = setup("context", reservation_ttl_s=5.0)
        await directory.prepare()
        await directory.reserve("context", 1).acquire()
        await asyncio.sleep(6)  # nobody calls anything
        assert directory.load(A) == Load(0, 0)
        assert directory.statistics().reservations_expired == 1
        await directory.aclose()

    run_virtual(main())


def test_sglang_8177_timeouts_of_clients_pile_nothing_up() -> None:
    async def main() -> None:
        directory, workers, _ = setup("context")
        workers[0].info_mode = "hang"
        for _ in range(50):
            with pytest.raises(EndpointError):
                await directory.refresh(A, timeout_s=0.01)
        assert directory.statistics().waiters == 0
        await until(lambda: directory.task_count == 0)
        await directory.aclose()

    run_virtual(main())


def test_sglang_9726_failure_of_prefill_ends_the_decode_leg_first_or_last() -> None:
    async def main() -> None:
        for decode_started in (False, True):
            directory, workers, transport = setup("context", "generation")
            await directory.prepare()

            async def decode(claim: Any, transport: FakeTransport = transport) -> None:
                async for _ in transport.stream(B, claim.generation, 1, 10_000):
                    pass

            async def prefill(workers: list[FakeWorker] = workers, decode_started: bool = decode_started) -> None:
                if decode_started:
                    await until(lambda: workers[1].running == 1)
                raise ConnectionResetError

            async def request(
                directory: AsyncEndpointDirectory = directory, prefill: Any = prefill, decode: Any = decode
            ) -> None:
                async with (
                    directory.reserve("context", 1),
                    directory.reserve("generation", 1) as claim,
                    asyncio.TaskGroup() as group,
                ):
                    group.create_task(decode(claim))
                    group.create_task(prefill())

            (outcome,) = await asyncio.gather(request(), return_exceptions=True)
            assert isinstance(outcome, ExceptionGroup)
            await asyncio.sleep(0.01)
            assert workers[1].running == 0
            assert directory.load(A) == directory.load(B) == Load(0, 0)
            await directory.aclose()

    run_virtual(main())


def test_trtllm_17460_port_that_is_not_bound_yet_is_not_published() -> None:
    """A listener asked for port 0 must be asked for the port it got: 0 itself is refused and publishes nothing."""
    owner = EndpointOwner("ctx-0", "i", "context")
    capability = owner.finalize()
    with pytest.raises(RecordInvalid) as caught:
        capability.publish(("tcp://127.0.0.1:0",))
    assert caught.value.field == "control_addresses[0]"
    assert owner.record() is None
    assert capability.publish(("tcp://127.0.0.1:40123",)).generation
