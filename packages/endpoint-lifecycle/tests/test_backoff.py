"""Idle waiting: no lost wake-up, bounded wake-ups, no busy loop."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from endpoint_lifecycle import AsyncIdleBackoff, BackoffSchedule, ConfigError, IdleBackoff, LocalProtocolError
from endpoint_lifecycle.testing import run_virtual


@pytest.mark.parametrize(("first_s", "cap_s"), [(0, 0.01), (-1, 0.01), (0.01, 0.001), (1e-5, 0.02), (1e-5, 0)])
def test_bounds_are_checked(first_s: float, cap_s: float) -> None:
    for kind in (BackoffSchedule, IdleBackoff, AsyncIdleBackoff):
        with pytest.raises(ConfigError):
            kind(first_s, cap_s)


def test_schedule_is_zero_then_fifty_microseconds_doubling_to_ten_milliseconds() -> None:
    schedule = BackoffSchedule()
    waits = [schedule.next_s() for _ in range(11)]
    assert waits[:4] == [0.0, 50e-6, 100e-6, 200e-6]
    assert waits[-2:] == [0.010, 0.010]


def test_notification_before_the_wait_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classical race: work arrives after the poll and before the sleep. A thousand times, never a wait."""
    backoff = IdleBackoff(first_s=0.010, cap_s=0.010)
    slept: list[float] = []
    monkeypatch.setattr(backoff._condition, "wait", slept.append)
    for _ in range(3):
        backoff.wait()
    assert slept == [0.010, 0.010]
    slept.clear()
    for _ in range(1000):
        backoff.notify()
        assert backoff.wait()
    statistics = backoff.statistics()
    assert (statistics.notified, statistics.notifications) == (1000, 1000)
    for _ in range(3):
        backoff.wait()  # the schedule is past its first step, which does not sleep
    slept.clear()
    backoff.notify()
    backoff.notify()
    assert backoff.wait()
    assert slept == []
    assert not backoff.wait()


def test_every_notification_from_many_threads_is_followed_by_a_poll() -> None:
    """Producers append and notify; the consumer polls after each wait. Nothing is left lying, whatever the race."""
    backoff = IdleBackoff()
    box: list[int] = []
    taken: list[int] = []
    lock = threading.Lock()

    def produce(base: int) -> None:
        for number in range(500):
            with lock:
                box.append(base + number)
            backoff.notify()

    threads = [threading.Thread(target=produce, args=(n * 1000,)) for n in range(4)]
    for thread in threads:
        thread.start()
    while len(taken) < 2000:
        with lock:
            found = box[:]
            box.clear()
        taken += found
        if found:
            backoff.reset()
        else:
            backoff.wait()
    for thread in threads:
        thread.join()
    assert len(set(taken)) == 2000


def test_idle_thread_wakes_at_most_a_hundred_and_ten_times_a_second() -> None:
    """Counted, not timed: the number of waits that fit into the time that passed."""
    backoff = IdleBackoff()
    started_s = time.monotonic()
    while time.monotonic() - started_s < 0.5:
        backoff.wait()
    elapsed_s = time.monotonic() - started_s
    ramp = 9  # waits before the cap is reached
    assert backoff.statistics().waits <= ramp + 100 * elapsed_s + 1


def test_callers_own_bound_shortens_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    backoff = IdleBackoff()
    for _ in range(20):
        backoff.wait(timeout_s=0.0)
    asked: list[float] = []
    monkeypatch.setattr(backoff._condition, "wait", asked.append)
    for bound_s in (0.0005, 1.0, None, -1.0):
        assert not backoff.wait(timeout_s=bound_s)
    assert asked == [0.0005, 0.010, 0.010]  # a bound below zero does not wait at all


def test_async_wait_is_interruptible_and_single() -> None:
    async def main() -> None:
        backoff = AsyncIdleBackoff()
        await backoff.wait()
        await backoff.wait(timeout_s=0.0)
        waiting = asyncio.create_task(backoff.wait())
        await asyncio.sleep(0)
        with pytest.raises(LocalProtocolError):
            await backoff.wait()
        backoff.notify()
        backoff.notify()
        assert await waiting
        cancelled = asyncio.create_task(backoff.wait(0.001))
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        for _ in range(10):
            await backoff.wait()
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        backoff.notify()  # before the wait: it must not sleep
        assert await backoff.wait()
        assert loop.time() == started_s
        backoff.reset()
        statistics = backoff.statistics()
        assert (statistics.notified, statistics.notifications) == (2, 3)

    run_virtual(main())


def test_async_idle_wakes_a_hundred_times_a_second() -> None:
    async def main() -> int:
        loop = asyncio.get_running_loop()
        backoff = AsyncIdleBackoff()
        while loop.time() < 10.0:
            await backoff.wait()
        return backoff.statistics().waits

    assert run_virtual(main()) <= 9 + 1000 + 1


def test_thread_wakes_an_async_waiter() -> None:
    async def main() -> None:
        backoff = AsyncIdleBackoff(first_s=0.01, cap_s=0.01)
        backoff.notify_threadsafe()  # before anybody waited
        assert await backoff.wait()
        await backoff.wait()
        thread = threading.Thread(target=backoff.notify_threadsafe)
        waiting = asyncio.create_task(backoff.wait())
        await asyncio.sleep(0)
        thread.start()
        await waiting
        thread.join()
        await asyncio.sleep(0)
        assert backoff.statistics().notifications == 2
        return backoff

    backoff = asyncio.run(main())
    backoff.notify_threadsafe()  # the loop is closed: nobody waits, nothing is raised
