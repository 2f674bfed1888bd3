"""The directory on an event loop, with virtual time: refreshes, waiting, reservations, probes, the release hook."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from endpoint_lifecycle import (
    AsyncEndpointDirectory,
    DirectoryClosed,
    DirectoryConfig,
    EndpointRecord,
    EndpointTimeout,
    Load,
    LocalProtocolError,
    NoServer,
    Overloaded,
    RecordInvalid,
    RefreshFailed,
    ReleaseNotice,
    ReservationError,
    ReservationState,
    ReservedStream,
    ServerGone,
    ServerStatus,
    StaleGeneration,
)
from endpoint_lifecycle.testing import FakeTransport, FakeWorker, run_virtual, until

A, B = "http://a", "http://b"


def cluster(
    *servers: str, role: str = "context", **config: Any
) -> tuple[AsyncEndpointDirectory, dict[str, FakeWorker], FakeTransport]:
    workers = {server: FakeWorker(server, role, server.rpartition("/")[2]) for server in servers}
    transport = FakeTransport(*workers.values())
    directory = AsyncEndpointDirectory(
        transport.fetch, DirectoryConfig(**({"probe_ready_s": None} | config)), random=lambda: 0.5
    )
    return directory, workers, transport


def add_all(directory: AsyncEndpointDirectory, workers: dict[str, FakeWorker]) -> None:
    for worker in workers.values():
        directory.add_server(worker.server, worker.role)


async def finish(directory: AsyncEndpointDirectory) -> None:
    directory.core.validate()
    await directory.aclose()
    directory.core.validate()
    statistics = directory.statistics()
    assert (statistics.reservations, statistics.load_weight, statistics.waiters) == (0, 0, 0)
    assert directory.task_count == 0


def test_fifty_callers_of_one_slow_refresh_make_one_fetch() -> None:
    async def main() -> None:
        directory, workers, _ = cluster(A)
        add_all(directory, workers)
        workers[A].info_delay_s = 0.3
        records = await asyncio.gather(*(directory.refresh(A) for _ in range(50)))
        assert workers[A].fetches == 1
        assert {record.generation for record in records} == {workers[A].generation}
        await directory.refresh(A)
        assert workers[A].fetches == 2
        await finish(directory)

    run_virtual(main())


def test_hundred_picks_of_b_while_a_hangs_are_not_delayed() -> None:
    """The server_info of A never answers; no pick of B waits at all, on the loop's clock. The benchmark has the real time."""

    async def main() -> None:
        directory, workers, _ = cluster(A, B, attempt_timeout_s=0.2, total_timeout_s=0.3, attempts=1)
        add_all(directory, workers)
        await directory.prepare()
        directory.remove_server(A)
        workers[A].info_mode = "hang"
        directory.add_server(A, "context")
        hung = asyncio.create_task(directory.refresh(A))
        await asyncio.sleep(0.01)
        loop = asyncio.get_running_loop()
        for number in range(100):
            started_s = loop.time()
            async with directory.reserve("context", number) as reservation:
                assert loop.time() == started_s
                assert reservation.server == B
            await asyncio.sleep(0)
        assert not hung.done()
        with pytest.raises(RefreshFailed):
            await hung
        await finish(directory)

    run_virtual(main())


def test_waiters_of_a_hung_server_fail_at_the_bound_not_later() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        directory, workers, _ = cluster(A)
        add_all(directory, workers)
        workers[A].info_mode = "hang"
        started_s = loop.time()
        outcomes = await asyncio.gather(*(directory.refresh(A) for _ in range(10)), return_exceptions=True)
        assert all(isinstance(outcome, (RefreshFailed, EndpointTimeout)) for outcome in outcomes)
        assert loop.time() - started_s <= 3.0
        assert workers[A].fetches <= 3
        await until(lambda: directory.task_count == 0)
        await finish(directory)

    run_virtual(main())


def test_own_deadline_of_a_caller_ends_its_wait_only() -> None:
    async def main() -> None:
        directory, workers, _ = cluster(A)
        add_all(directory, workers)
        workers[A].info_delay_s = 0.5
        patient = asyncio.create_task(directory.refresh(A))
        with pytest.raises(EndpointTimeout) as caught:
            await directory.refresh(A, timeout_s=0.1)
        assert isinstance(caught.value, TimeoutError)
        assert (await patient).generation == workers[A].generation
        assert workers[A].fetches == 1
        await finish(directory)

    run_virtual(main())


@pytest.mark.parametrize("cancelled", [0, 1, 25, 49])
def test_cancel_of_one_of_fifty_waiters_leaves_forty_nine(cancelled: int) -> None:
    async def main() -> None:
        directory, workers, _ = cluster(A)
        add_all(directory, workers)
        workers[A].info_delay_s = 0.3
        tasks = [asyncio.create_task(directory.refresh(A)) for _ in range(50)]
        await asyncio.sleep(0.1)
        tasks[cancelled].cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(outcomes.pop(cancelled), asyncio.CancelledError)
        assert all(isinstance(outcome, EndpointRecord) for outcome in outcomes)
        assert workers[A].fetches == 1
        await finish(directory)

    run_virtual(main())


def test_unwatched_fetch_is_cancelled_where_configured() -> None:
    async def main() -> None:
        directory, workers, _ = cluster(A, cancel_unwatched=True)
        add_all(directory, workers)
        workers[A].info_mode = "hang"
        task = asyncio.create_task(directory.refresh(A))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0)
        assert directory.task_count == 0
        workers[A].info_mode = "ok"
        await directory.refresh(A)
        await finish(directory)

    run_virtual(main())


def test_failed_fetches_are_retried_within_bounds_and_the_error_is_shared() -> None:
    async def main() -> None:
        directory, workers, _ = cluster(A)
        add_all(directory, workers)
        workers[A].info_mode = "error"
        outcomes = await asyncio.gather(*(directory.refresh(A) for _ in range(5)), return_exceptions=True)
        assert workers[A].fetches == 3
        assert len({id(outcome) for outcome in outcomes}) == 1
        assert isinstance(outcomes[0], RefreshFailed) and isinstance(outcomes[0].__cause__, ConnectionResetError)
        with pytest.raises(RefreshFailed):
            await directory.refresh(A)
        assert workers[A].fetches == 3  # answered by the cached error
        workers[A].info_mode = "ok"
        await asyncio.sleep(0.1)
        await directory.refresh(A)
        await finish(directory)

    run_virtual(main())


def test_retry_saves_a_flight() -> None:
    async def main() -> None:
        directory, workers, _ = cluster(A)
        add_all(directory, workers)
        workers[A].info_mode = "error"
        task = asyncio.create_task(directory.refresh(A))
        await until(lambda: workers[A].fetches == 2)
        workers[A].info_mode = "ok"
        assert (await task).generation == workers[A].generation
        await finish(directory)

    run_virtual(main())


def test_concurrent_fetches_are_bounded_over_all_servers() -> None:
    async def main() -> None:
        servers = [f"http://s{n}" for n in range(30)]
        directory, workers, _ = cluster(*servers, concurrent_fetches=4)
        add_all(directory, workers)
        running = most = 0
        original = directory._fetch

        async def counted(server: str) -> Any:
            nonlocal running, most
            running += 1
            most = max(most, running)
            try:
                await asyncio.sleep(0.1)
                return await original(server)
            finally:
                running -= 1

        directory._fetch = counted
        outcome = await directory.prepare()
        assert most == 4
        assert all(isinstance(value, EndpointRecord) for value in outcome.values())
        await finish(directory)

    run_virtual(main())


def test_prepare_reports_each_server_and_one_that_hangs_delays_no_other() -> None:
    async def main() -> None:
        directory, workers, _ = cluster(A, B)
        add_all(directory, workers)
        workers[A].info_mode = "hang"
        task = asyncio.create_task(directory.prepare())
        await asyncio.sleep(0.1)
        assert directory.status(B) is ServerStatus.READY
        outcome = await task
        assert isinstance(outcome[B], EndpointRecord)
        assert isinstance(outcome[A], (RefreshFailed, EndpointTimeout))
        await finish(directory)

    run_virtual(main())


def test_fetch_that_raises_anything_is_that_servers_failure() -> None:
    class Odd(Exception):
        pass

    async def main() -> None:
        for error in (Odd("x"), asyncio.CancelledError(), KeyError("y"), asyncio.InvalidStateError()):

            async def fetch(server: str, error: BaseException = error) -> bytes:
                raise error

            directory = AsyncEndpointDirectory(fetch, DirectoryConfig(attempts=2))
            directory.add_server(A, "context")
            with pytest.raises(RefreshFailed) as caught:
                await directory.refresh(A)
            assert type(error).__name__ in caught.value.reason
            await finish(directory)

    run_virtual(main())


def test_oversized_answer_names_the_bound() -> None:
    async def main() -> None:
        async def fetch(server: str) -> bytes:
            return b"{" + b" " * 70000 + b"}"

        directory = AsyncEndpointDirectory(fetch)
        directory.add_server(A, "context")
        with pytest.raises(RecordInvalid, match="65536"):
            await directory.refresh(A)
        await finish(directory)

    run_virtual(main())


# -- reserving ----------------------------------------------------------------------------------------------------------


def test_reservation_waits_for_the_first_record() -> None:
    async def main() -> None:
        directory, workers, _ = cluster(A)
        add_all(directory, workers)
        workers[A].info_delay_s = 0.2
        async with directory.reserve("context", 1) as reservation:
            assert reservation.generation == workers[A].generation
            assert directory.load(A) == Load(1, 1)
        assert directory.load(A) == Load(0, 0)
        await finish(directory)

    run_virtual(main())


def test_reservation_takes_whichever_server_answers_first() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        directory, workers, _ = cluster(A, B)
        add_all(directory, workers)
        workers[A].info_mode = "hang"
        workers[B].info_delay_s = 0.2
        async with directory.reserve("context", 1) as reservation:
            assert reservation.server == B
            assert loop.time() < 0.3
        await until(lambda: directory.task_count == 0)
        await finish(directory)

    run_virtual(main())


def test_reservation_fails_with_the_reason_when_nothing_can_come() -> None:
    async def main() -> None:
        directory, workers, _ = cluster(A)
        with pytest.raises(NoServer, match="none is known"):
            async with directory.reserve("context", 1):
                pass
        add_all(directory, workers)
        workers[A].up = False
        with pytest.raises(NoServer, match="refused"):
            async with directory.reserve("context", 1):
                pass
        workers[A].up = True
        workers[A].info_mode = "hang"
        await asyncio.sleep(0.2)
        with pytest.raises(EndpointTimeout, match=r"0\.5 s"):
            async with directory.reserve("context", 1, timeout_s=0.5):
                pass
        await until(lambda: directory.task_count == 0)
        await finish(directory)

    run_virtual(main())


def test_waiting_for_a_server_is_bounded_in_callers() -> None:
    async def main() -> None:
        directory, workers, _ = cluster(A, waiters_max=2)
        add_all(directory, workers)
        workers[A].info_mode = "hang"

        async def one(number: int) -> None:
            async with directory.reserve("context", number):
                pass

        outcomes = await asyncio.gather(*(one(n) for n in range(3)), return_exceptions=True)
        assert sum(isinstance(outcome, Overloaded) for outcome in outcomes) == 1
        await until(lambda: directory.task_count == 0)
        await finish(directory)

    run_virtual(main())


def test_stale_endpoint_is_replaced_by_exactly_one_refresh() -> None:
    """The cached generation is stale, the live worker says another: one request, one fetch, the new one is used."""

    async def main() -> None:
        directory, workers, _ = cluster(A)
        add_all(directory, workers)
        await directory.prepare()
        fresh = workers[A].restart()
        before = workers[A].fetches
        async with directory.reserve("context", 1, revalidate=True) as reservation:
            assert reservation.generation == fresh
            assert reservation.record.control_addresses == workers[A].owner.record().control_addresses  # type: ignore[union-attr]
            reservation.dispatched()
        assert workers[A].fetches == before + 1
        await finish(directory)

    run_virtual(main())


def test_record_without_generation_causes_no_refresh() -> None:
    async def main() -> None:
        directory, workers, _ = cluster(A, require_generation=False)
        add_all(directory, workers)
        workers[A].info_mode = "legacy"
        await directory.prepare()
        before = workers[A].fetches
        async with directory.reserve("context", 1, revalidate=True) as reservation:
            assert reservation.generation is None
            reservation.dispatched()
        assert workers[A].fetches == before
        await finish(directory)

    run_virtual(main())


def test_refresh_error_reaches_the_caller_and_the_reservation_is_released_once() -> None:
    async def main() -> None:
        notices: list[ReleaseNotice] = []

        async def on_release(notice: ReleaseNotice) -> None:
            notices.append(notice)

        worker = FakeWorker(A, "context", "ctx-0")
        transport = FakeTransport(worker)
        directory = AsyncEndpointDirectory(transport.fetch, DirectoryConfig(probe_ready_s=None), on_release=on_release)
        directory.add_server(A, "context")
        await directory.prepare()
        worker.info_mode = "error"
        with pytest.raises(RefreshFailed):
            async with directory.reserve("context", 1, revalidate=True):
                raise AssertionError("the block was entered")
        await until(lambda: directory.task_count == 0)
        assert [notice.reason for notice in notices] == ["error: RefreshFailed"]
        await finish(directory)

    run_virtual(main())


def test_cancel_while_the_refresh_hangs_is_seen_at_once_and_releases_once() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        directory, workers, _ = cluster(A)
        add_all(directory, workers)
        await directory.prepare()
        workers[A].info_mode = "hang"

        async def request() -> None:
            async with directory.reserve("context", 1, revalidate=True):
                pass

        task = asyncio.create_task(request())
        await asyncio.sleep(0.1)
        assert directory.load(A) == Load(1, 1)
        started_s = loop.time()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert loop.time() == started_s
        assert directory.statistics().reservations_released == 1
        await until(lambda: directory.task_count == 0)
        await finish(directory)

    run_virtual(main())


def test_refusal_as_stale_is_healed_by_one_shared_refresh() -> None:
    """Twenty requests at the old generation are refused before anything is taken in; one fetch serves them all."""

    async def main() -> None:
        directory, workers, transport = cluster(A)
        add_all(directory, workers)
        await directory.prepare()
        before = workers[A].fetches

        async def request(number: int) -> int:
            async with directory.reserve("context", number) as reservation:
                reservation.dispatched()
                if number == 0:
                    workers[A].restart()
                for _ in range(2):
                    try:
                        return len([i async for i in transport.stream(A, reservation.generation, number, 2)])
                    except StaleGeneration:
                        await reservation.prove_stale()
                        reservation.dispatched()
                raise AssertionError("refused twice")

        assert await asyncio.gather(*(request(n) for n in range(20))) == [2] * 20
        assert workers[A].fetches == before + 1
        assert {generation for generation, _ in workers[A].received} == {workers[A].generation}
        assert len(workers[A].refused) == 20
        await finish(directory)

    run_virtual(main())


def test_reservation_is_entered_once_and_used_while_live() -> None:
    async def main() -> None:
        directory, workers, _ = cluster(A)
        add_all(directory, workers)
        context = directory.reserve("context", 1)
        with pytest.raises(ReservationError):
            _ = context.server
        assert not context.release()
        async with context as reservation:
            with pytest.raises(ReservationError):
                await context.acquire()
            assert (reservation.role, reservation.request_id) == ("context", 1)
            assert reservation.state is ReservationState.RESERVED
            reservation.dispatched()
            assert reservation.state is ReservationState.DISPATCHED
            assert reservation.release("early")
            assert not reservation.release()
            with pytest.raises(ReservationError):
                reservation.dispatched()
            assert not reservation.renew()
        await finish(directory)

    run_virtual(main())


def test_expiry_returns_the_load_and_leaves_no_timer() -> None:
    async def main() -> int:
        directory, workers, _ = cluster(A, reservation_ttl_s=0.01)
        add_all(directory, workers)
        await directory.prepare()
        reservation = await directory.reserve("context", 1).acquire()
        await asyncio.sleep(0.02)
        assert directory.load(A) == Load(0, 0)
        assert directory.statistics().reservations_expired == 1
        assert not reservation.release()
        assert directory._expiry is None
        await finish(directory)
        return 0

    run_virtual(main())


def test_renewal_keeps_a_long_stream() -> None:
    async def main() -> None:
        directory, workers, _ = cluster(A, reservation_ttl_s=0.01)
        add_all(directory, workers)
        await directory.prepare()
        async with directory.reserve("context", 1) as reservation:
            for _ in range(200):
                await asyncio.sleep(0.005)
                assert reservation.renew()
        assert directory.statistics().reservations_expired == 0
        await finish(directory)

    run_virtual(main())


def test_transfer_id_of_a_retry_does_not_change_the_key() -> None:
    """The context leg is retried under another transfer id; the generation leg keeps its claim and is released by its own."""

    async def main() -> None:
        directory, workers, _ = cluster(A, role="generation")
        add_all(directory, workers)
        await directory.prepare()
        async with directory.reserve("generation", 101) as reservation:
            sent = {"ctx_request_id": 202}
            assert reservation.request_id == 101
            assert directory.statistics().reservations == 1
        assert directory.statistics().reservations_released == 1
        assert sent["ctx_request_id"] == 202
        await finish(directory)

    run_virtual(main())


# -- streams ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["never started", "half way", "to the end", "error", "dropped", "with"])
def test_stream_releases_however_it_ends(how: str) -> None:
    async def main() -> None:
        directory, workers, transport = cluster(A)
        add_all(directory, workers)
        await directory.prepare()
        reservation = await directory.reserve("context", 1).acquire()
        stream = ReservedStream(transport.stream(A, reservation.generation, 1, 3), reservation)
        if how == "never started":
            await stream.aclose()
            await stream.aclose()
        elif how == "half way":
            assert await anext(stream) == 0
            await stream.aclose()
        elif how == "to the end":
            assert [item async for item in stream] == [0, 1, 2]
            assert [item async for item in stream] == []
        elif how == "error":
            await anext(stream)
            workers[A].up = False
            with pytest.raises(ConnectionResetError):
                await anext(stream)
        elif how == "dropped":
            del stream
        else:
            async with stream:
                await anext(stream)
        assert directory.load(A) == Load(0, 0)
        assert directory.statistics().reservations_released == 1
        await asyncio.sleep(0.1)
        assert workers[A].running == 0
        await finish(directory)

    run_virtual(main())


# -- background ---------------------------------------------------------------------------------------------------------


def test_probes_bring_a_server_in_and_take_it_out() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        directory, workers, _ = cluster(A, probe_ready_s=1.0, attempt_timeout_s=0.2, total_timeout_s=0.2, attempts=1)
        async with directory:
            workers[A].up = False
            add_all(directory, workers)
            await asyncio.sleep(5)
            assert not directory.ready(context=1)
            workers[A].up = True
            back_s = loop.time()
            await until(lambda: directory.ready(context=1))
            assert loop.time() - back_s <= 1.1
            workers[A].up = False
            gone_s = loop.time()
            await until(lambda: not directory.ready(context=1))
            assert loop.time() - gone_s <= 2.0
            assert directory.ready() and directory.ready(generation=0)
        assert not directory.ready()
        with pytest.raises(DirectoryClosed):
            await directory.refresh(A)
        with pytest.raises(DirectoryClosed):
            async with directory:
                pass

    run_virtual(main())


def test_unreachable_server_is_probed_at_once() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        directory, workers, _ = cluster(A, probe_ready_s=100.0)
        async with directory:
            add_all(directory, workers)
            await until(lambda: directory.ready(context=1))
            async with directory.reserve("context", 1) as reservation:
                reservation.unreachable()
                assert not directory.ready(context=1)
            started_s = loop.time()
            await until(lambda: directory.ready(context=1))
            assert loop.time() - started_s < 0.2

    run_virtual(main())


def test_removed_and_returned_server_serves_again() -> None:
    async def main() -> None:
        directory, workers, _ = cluster(A)
        add_all(directory, workers)
        workers[A].info_mode = "hang"
        waiting = asyncio.create_task(directory.refresh(A))
        await asyncio.sleep(0.1)
        directory.remove_server(A)
        with pytest.raises(ServerGone):
            await waiting
        with pytest.raises(ServerGone):
            await directory.refresh(A)
        workers[A].info_mode = "ok"
        add_all(directory, workers)
        async with directory.reserve("context", 1) as reservation:
            assert reservation.server == A
        await finish(directory)

    run_virtual(main())


def test_thousand_servers_are_probed_without_a_stampede() -> None:
    async def main() -> None:
        servers = [f"http://s{n}" for n in range(1000)]
        directory, workers, _ = cluster(*servers, probe_ready_s=5.0, concurrent_fetches=50)
        async with directory:
            add_all(directory, workers)
            await until(lambda: directory.ready(context=1000))
            first = sum(worker.fetches for worker in workers.values())
            assert first == 1000
            await asyncio.sleep(60)
            later = sum(worker.fetches for worker in workers.values())
            assert 8_000 <= later <= 13_500  # one each 5 s, give or take the jitter

    run_virtual(main())


# -- the release hook ---------------------------------------------------------------------------------------------------


def test_release_hook_fails_in_the_background_and_never_replaces_the_users_error() -> None:
    async def main() -> None:
        calls: list[str] = []

        async def on_release(notice: ReleaseNotice) -> None:
            calls.append(notice.reason)
            if len(calls) % 2:
                raise OSError("coordinator down")
            await asyncio.sleep(100)

        worker = FakeWorker(A, "context", "ctx-0")
        directory = AsyncEndpointDirectory(
            FakeTransport(worker).fetch, DirectoryConfig(probe_ready_s=None), on_release=on_release
        )
        directory.add_server(A, "context")
        with pytest.raises(ZeroDivisionError):
            async with directory.reserve("context", 1):
                raise ZeroDivisionError
        assert directory.load(A) == Load(0, 0)
        await until(lambda: directory.task_count == 0)
        assert len(calls) == 3
        assert directory.release_hook_failures == 1
        await finish(directory)

    run_virtual(main())


def test_release_hook_hears_of_every_way_off_the_books() -> None:
    async def main() -> None:
        notices: list[ReleaseNotice] = []

        async def on_release(notice: ReleaseNotice) -> None:
            notices.append(notice)

        worker = FakeWorker(A, "context", "ctx-0")
        directory = AsyncEndpointDirectory(
            FakeTransport(worker).fetch,
            DirectoryConfig(probe_ready_s=None, reservation_ttl_s=1.0),
            on_release=on_release,
        )
        directory.add_server(A, "context")
        async with directory.reserve("context", 1, weight=4):
            pass
        await directory.reserve("context", 2).acquire()
        await asyncio.sleep(2)
        await directory.reserve("context", 3).acquire()
        await directory.reserve("context", 3).acquire()
        await directory.aclose()
        assert [(notice.request_id, notice.reason) for notice in notices] == [
            (1, "completed"),
            (2, "expired"),
            (3, "replaced"),
            (3, "shutdown"),
        ]
        assert notices[0].weight == 4 and notices[0].generation == worker.generation

    run_virtual(main())


@pytest.mark.parametrize("inside", ["fetch", "hook"])
def test_a_directory_can_be_closed_from_inside_its_own_tasks(inside: str) -> None:
    """A host whose fetch or hook finds that all is over closes it there: nobody waits for himself, every waiter is answered."""

    async def main() -> None:
        closed = []

        async def close(_asked: object) -> Any:
            await directory.aclose()
            closed.append(inside)
            raise ConnectionResetError("all is over")

        worker = FakeWorker(A, "context", "a")
        fetch = close if inside == "fetch" else FakeTransport(worker).fetch
        directory = AsyncEndpointDirectory(fetch, DirectoryConfig(probe_ready_s=None), on_release=close)
        directory.add_server(A, "context")
        if inside == "fetch":
            with pytest.raises(DirectoryClosed):
                await directory.refresh(A)
        else:
            await directory.prepare()
            async with directory.reserve("context", request_id=1):
                pass
            await until(lambda: closed == ["hook"])
        await directory.aclose()
        await until(lambda: directory.task_count == 0)
        assert directory.core.closed

    run_virtual(main())


def test_policy_error_reaches_the_caller() -> None:
    async def main() -> None:
        def policy(candidates: Any, request: Any) -> Any:
            raise LocalProtocolError("no idea")

        worker = FakeWorker(A, "context", "ctx-0")
        directory = AsyncEndpointDirectory(FakeTransport(worker).fetch, policy=policy)
        directory.add_server(A, "context")
        await directory.prepare()
        with pytest.raises(LocalProtocolError, match="no idea"):
            async with directory.reserve("context", 1):
                pass
        await finish(directory)

    run_virtual(main())


def test_load_of_a_new_lifetime_starts_at_zero(make_record: Callable[..., EndpointRecord]) -> None:
    async def main() -> None:
        directory, workers, _ = cluster(A)
        add_all(directory, workers)
        await directory.prepare()
        old = workers[A].generation
        async with directory.reserve("context", 1, weight=9):
            workers[A].restart()
            await directory.refresh(A)
            assert directory.load(A) == Load(0, 0)
            assert directory.load(A, old) == Load(1, 9)
        assert directory.load(A) == directory.load(A, old) == Load(0, 0)
        await finish(directory)

    run_virtual(main())
