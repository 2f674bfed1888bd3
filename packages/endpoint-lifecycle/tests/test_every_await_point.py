"""Cancel, error, disconnect, timeout, restart, removal and shutdown at every moment of a request's life, enumerated.

The request goes select → refresh → dispatch → stream → release. Whatever is done to it, and when, afterwards: loads 0, no
task left, each reservation left the books exactly once, nothing runs on the workers, nothing was sent twice.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from endpoint_lifecycle import (
    AsyncEndpointDirectory,
    DirectoryConfig,
    EndpointError,
    ReleaseNotice,
    ReservedStream,
    StaleGeneration,
)
from endpoint_lifecycle.testing import (
    Explorer,
    FakeTransport,
    FakeWorker,
    Scenario,
    cancel_target,
    explore,
    explore_faults,
    fire_timer,
)

CTX, GEN = "http://ctx", "http://gen"
CONFIG = DirectoryConfig(probe_ready_s=None, attempts=2, reservation_ttl_s=1000.0)
Request = Callable[[AsyncEndpointDirectory, FakeTransport], Any]


async def send(directory: AsyncEndpointDirectory, transport: FakeTransport, reservation: Any, items: int) -> list[int]:
    """Dispatch and stream; a refusal as stale is answered by one refresh and one more sending."""
    for attempt in range(2):
        try:
            reservation.dispatched()
            got = []
            async for item in transport.stream(
                reservation.server, reservation.generation, reservation.request_id, items
            ):
                reservation.renew()
                got.append(item)
            return got
        except StaleGeneration:
            if attempt:
                raise
            await reservation.prove_stale()
    raise AssertionError("unreachable")


async def one_leg(directory: AsyncEndpointDirectory, transport: FakeTransport) -> None:
    async with directory.reserve("context", 7, weight=3, revalidate=True) as reservation:
        await send(directory, transport, reservation, 2)


async def streamed(directory: AsyncEndpointDirectory, transport: FakeTransport) -> None:
    """The reservation outlives the frame that made it, inside a stream that a web server would iterate."""
    reservation = await directory.reserve("context", 7, weight=3).acquire()
    source = transport.stream(reservation.server, reservation.generation, 7, 2)
    async with ReservedStream(source, reservation) as stream:
        reservation.dispatched()
        async for _ in stream:
            pass


async def client_leaves(directory: AsyncEndpointDirectory, transport: FakeTransport) -> None:
    """The client goes away after the first item."""
    reservation = await directory.reserve("context", 7, weight=3).acquire()
    stream = ReservedStream(transport.stream(reservation.server, reservation.generation, 7, 3), reservation)
    try:
        reservation.dispatched()
        async for _ in stream:
            break
    finally:
        await stream.aclose()


async def two_legs(directory: AsyncEndpointDirectory, transport: FakeTransport) -> None:
    """Generation-first: both legs are claimed, then sent at once; the first failure cancels the other leg."""
    async with (
        directory.reserve("context", 7, weight=2, revalidate=True) as context,
        directory.reserve("generation", 7, weight=2) as generation,
        asyncio.TaskGroup() as group,
    ):
        group.create_task(send(directory, transport, context, 1), name="context leg")
        group.create_task(send(directory, transport, generation, 2), name="generation leg")


def scenario(request_of: Request, *, prepared: bool, hook: bool = False) -> Callable[[], Scenario]:
    def make() -> Scenario:
        workers = [FakeWorker(CTX, "context", "ctx-0"), FakeWorker(GEN, "generation", "gen-0")]
        transport = FakeTransport(*workers)
        notices: list[ReleaseNotice] = []

        async def on_release(notice: ReleaseNotice) -> None:
            notices.append(notice)
            await asyncio.sleep(0.001)

        directory = AsyncEndpointDirectory(
            transport.fetch, CONFIG, on_release=on_release if hook else None, random=lambda: 0.5
        )

        async def main(explorer: Explorer) -> None:
            for worker in workers:
                directory.add_server(worker.server, worker.role)
            if prepared:
                await directory.prepare()
            task = explorer.aim(request_of(directory, transport))
            (outcome,) = await asyncio.gather(task, return_exceptions=True)
            if isinstance(outcome, ExceptionGroup):
                outcome = outcome.exceptions[0]
            assert outcome is None or isinstance(
                outcome, (EndpointError, ConnectionError, asyncio.CancelledError, TimeoutError)
            ), outcome
            # Before anything is cleaned up: the request itself left nothing on the books.
            statistics = directory.statistics()
            assert statistics.reservations == 0 and statistics.load_weight == 0
            for _ in range(400):
                if not directory.task_count:
                    break
                await asyncio.sleep(0.02)
            assert directory.task_count == 0 and directory.statistics().waiters == 0
            await directory.aclose()

        def check(explorer: Explorer) -> None:
            directory.core.validate()
            statistics = directory.statistics()
            left = statistics.reservations_released + statistics.reservations_expired
            assert statistics.reservations_made == left
            if hook:
                assert len(notices) == left
            for worker in workers:
                assert worker.running == 0 and worker.owner.in_flight == 0
                assert len(worker.received) <= 1, f"sent twice: {worker.received}"
            assert explorer.loop.armed_timers() == 0

        def remove(_: Explorer) -> None:
            if CTX in directory.servers() and not directory.core.closed:
                directory.remove_server(CTX)

        def close(explorer: Explorer) -> None:
            explorer.loop.create_task(directory.aclose(), name="close")

        def fetch_hangs(_: Explorer) -> None:
            workers[0].info_mode = "hang"

        def fetch_fails(_: Explorer) -> None:
            workers[0].info_mode = "error"

        def fetch_garbage(_: Explorer) -> None:
            workers[0].info_mode = "garbage"

        def dies(_: Explorer) -> None:
            workers[0].up = False

        def drains(_: Explorer) -> None:
            if workers[0].owner.ready:
                workers[0].owner.start_draining()

        actions = {
            "cancel": cancel_target,
            "timeout": fire_timer,
            "restart": lambda _: workers[0].restart(),
            "remove": remove,
            "close": close,
            "hang": fetch_hangs,
            "fail": fetch_fails,
            "garbage": fetch_garbage,
            "die": dies,
            "drain": drains,
        }
        return Scenario(main, actions, check)

    return make


ACTIONS = ("cancel", "timeout", "restart", "remove", "close", "hang", "fail", "garbage", "die", "drain")
REQUESTS = {"one_leg": one_leg, "streamed": streamed, "client_leaves": client_leaves, "two_legs": two_legs}


@pytest.mark.parametrize("prepared", [False, True], ids=["cold", "prepared"])
@pytest.mark.parametrize("name", sorted(REQUESTS))
def test_every_single_fault_at_every_moment(name: str, prepared: bool) -> None:
    report = explore_faults(scenario(REQUESTS[name], prepared=prepared), [[action] for action in ACTIONS])
    assert report.moments >= 10 * len(ACTIONS)
    assert "(not started)" in report.points


@pytest.mark.parametrize("name", sorted(REQUESTS))
def test_double_cancel_at_every_pair_of_moments(name: str) -> None:
    report = explore_faults(scenario(REQUESTS[name], prepared=False), [["cancel", "cancel"]])
    assert report.runs >= 50


@pytest.mark.parametrize("first", ACTIONS)
def test_every_pair_of_faults_at_every_pair_of_moments(first: str) -> None:
    plans = [[first, second] for second in ACTIONS]
    report = explore_faults(scenario(one_leg, prepared=False), plans)
    assert report.runs >= 500


def test_release_hook_is_told_once_whatever_happens() -> None:
    plans = [["cancel", "cancel"], ["cancel", "die"], ["die", "close"], ["close", "cancel"]]
    explore_faults(scenario(one_leg, prepared=True, hook=True), plans)


def test_await_points_of_the_whole_life_are_covered() -> None:
    """Cancellation met the request in selection, in both kinds of refresh, in the stream, and before its first step."""
    report = explore_faults(scenario(one_leg, prepared=False), [["cancel"], ["restart", "cancel"]])
    everything = "\n".join(report.points)
    for function in ("_reserve_waiting", "_revalidated", "prove_stale", "refresh", "send", "(not started)"):
        assert function in everything, f"{function} was not met:\n{everything}"


@pytest.mark.slow
def test_every_triple_of_faults_at_every_triple_of_moments() -> None:
    plans = [list(plan) for plan in itertools.product(("cancel", "restart", "timeout", "die"), repeat=3)]
    report = explore_faults(scenario(one_leg, prepared=False), plans, runs_max=1_000_000)
    print(report.runs, "runs")


def raced(requests: int, revalidate: bool, prepared: bool) -> Callable[[], Scenario]:
    """Requests and a restart of their server, with nothing but callbacks between them (no hop takes time)."""

    def make() -> Scenario:
        worker = FakeWorker(CTX, "context", "ctx-0")
        transport = FakeTransport(worker, step_s=0.0)
        directory = AsyncEndpointDirectory(transport.fetch, CONFIG, random=lambda: 0.5)
        dispatched: list[tuple[str | None, str]] = []

        async def request(request_id: int) -> None:
            async with directory.reserve("context", request_id, revalidate=revalidate) as reservation:
                reservation.dispatched()
                dispatched.append((reservation.generation, worker.generation))

        async def restart() -> None:
            worker.restart()

        async def main(explorer: Explorer) -> None:
            directory.add_server(CTX, "context")
            if prepared:
                directory.apply_set(CTX, worker.owner.record())  # type: ignore[arg-type]
            tasks = [explorer.loop.create_task(request(n), name=f"request {n}") for n in range(requests)]
            tasks.append(explorer.loop.create_task(restart(), name="restart"))
            for task in tasks:
                await task
            assert directory.statistics().reservations == 0
            await directory.aclose()

        def check(_: Explorer) -> None:
            directory.core.validate()
            assert len(dispatched) == requests
            assert worker.fetches <= requests + (not prepared)
            if revalidate and worker.fetches:
                assert all(asked in ("ctx-0-g1", "ctx-0-g2") for asked, _ in dispatched)

        return Scenario(main, {}, check)

    return make


@pytest.mark.parametrize("revalidate", [False, True])
@pytest.mark.parametrize("prepared", [False, True])
def test_every_interleaving_of_a_request_and_a_restart(revalidate: bool, prepared: bool) -> None:
    report = explore(raced(1, revalidate, prepared))
    assert report.runs >= 2


@pytest.mark.slow
def test_every_interleaving_of_two_revalidating_requests() -> None:
    """Two requests share one refresh in every order of every callback."""
    report = explore(raced(2, True, True))
    assert report.runs >= 100


def test_every_interleaving_of_two_cold_requests() -> None:
    """Two requests wait for one server's first record."""
    report = explore(raced(2, False, False))
    assert report.runs >= 500
