"""What the directory and the idle wait cost: picks, reservations, coalesced refreshes, wake-ups.

Each baseline is measured in the same run, in turn with the figure it stands beside. ``goal`` is the bound that the figure
must keep; ``ratio`` is baseline / value for costs and value / baseline for rates.
"""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

from endpoint_lifecycle import (
    AsyncEndpointDirectory,
    AsyncIdleBackoff,
    DirectoryConfig,
    EndpointDirectory,
    EndpointProfile,
    EndpointRecord,
    IdleBackoff,
    RequestIdGenerator,
)

ROUNDS = 5


def record(number: int) -> EndpointRecord:
    return EndpointRecord(
        role="context",
        owner_id=f"ctx-{number}",
        instance_id=f"i{number}",
        generation=f"g{number}",
        state="published",
        control_addresses=(f"tcp://10.0.0.1:{number + 1}",),
        profile=EndpointProfile(),
    )


def directory_of(servers: int) -> EndpointDirectory:
    directory = EndpointDirectory(DirectoryConfig())
    for number in range(servers):
        directory.apply_set(f"http://s{number}", record(number), 0.0)
    return directory


def figure(
    name: str, value: float, unit: str, *, baseline: float | None = None, goal: str, met: bool, rate: bool = False
) -> dict[str, Any]:
    ratio = None
    if baseline is not None and value:
        ratio = value / baseline if rate else baseline / value
    return {
        "name": name,
        "value": round(value, 4),
        "unit": unit,
        "baseline": None if baseline is None else round(baseline, 4),
        "ratio": None if ratio is None else round(ratio, 3),
        "goal": goal,
        "met": met,
    }


def best_rate(work: Callable[[int], None], count: int) -> float:
    """Most per second of one core's processor time over a few rounds: the others were disturbed."""
    best = 0.0
    for _ in range(ROUNDS):
        gc.collect()
        started_s = time.thread_time()
        work(count)
        best = max(best, count / (time.thread_time() - started_s))
    return best


def reserve_release() -> list[dict[str, Any]]:
    """Cycles per second on one core: the pure core, and ``async with`` on a real loop."""
    directory = directory_of(16)

    def cycles(count: int) -> None:
        for number in range(count):
            directory.release(directory.reserve("context", number, 0.0))

    def dictionary(count: int) -> None:
        """What cannot be done without: a key in and out of a dictionary, two counters up and down, an object made."""
        books: dict[tuple[str, int], list[int]] = {}
        load = [0, 0]
        for number in range(count):
            key = ("context", number)
            books[key] = [number]
            load[0] += 1
            load[1] += 1
            del books[key]
            load[0] -= 1
            load[1] -= 1

    core, floor = best_rate(cycles, 50_000), best_rate(dictionary, 50_000)

    async def on_loop() -> float:
        async def fetch(server: str) -> bytes:
            raise OSError

        adapter = AsyncEndpointDirectory(fetch, DirectoryConfig(probe_ready_s=None))
        for number in range(16):
            adapter.apply_set(f"http://s{number}", record(number))
        best = 0.0
        for _ in range(ROUNDS):
            gc.collect()
            started_s = time.thread_time()
            for number in range(50_000):
                async with adapter.reserve("context", number) as reservation:
                    reservation.dispatched()
            best = max(best, 50_000 / (time.thread_time() - started_s))
        await adapter.aclose()
        return best

    adapter = asyncio.run(on_loop())
    return [
        figure(
            "reserve/release, core", core, "cycles/s", baseline=floor, goal=">= 100000", met=core >= 100_000, rate=True
        ),
        figure(
            "reserve/dispatch/release, asyncio",
            adapter,
            "cycles/s",
            baseline=core,
            goal=">= 100000",
            met=adapter >= 100_000,
            rate=True,
        ),
    ]


def picks() -> list[dict[str, Any]]:
    """One pick among 1,000 servers under changing load, beside a scan of the same loads."""
    directory = directory_of(1000)
    held = [directory.reserve("context", number, 0.0, weight=number % 7) for number in range(3000)]
    pick_us, scan_us = [], []
    for number in range(20_000):
        victim = held[number % len(held)]
        directory.release(victim)
        started_s = time.perf_counter()
        made = directory.reserve("context", number + 10_000, 0.0, weight=number % 7)
        pick_us.append((time.perf_counter() - started_s) * 1e6)
        held[number % len(held)] = made
        if number % 200 == 0:
            loads = [slot.load for slot in directory._slots.values()]
            started_s = time.perf_counter()
            min(loads, key=lambda load: (load.weight, load.count))
            scan_us.append((time.perf_counter() - started_s) * 1e6)
    directory.validate()
    median, tail = statistics.median(pick_us), statistics.quantiles(pick_us, n=1000)[989]
    scan = statistics.median(scan_us)
    return [
        figure("pick of 1,000 servers, median", median, "us", baseline=scan, goal="<= 50", met=median <= 50),
        figure("pick of 1,000 servers, p99", tail, "us", baseline=scan, goal="<= 50", met=tail <= 50),
    ]


def coalescing() -> list[dict[str, Any]]:
    """50 callers of one slow refresh; 100 picks of B while A hangs."""

    async def main() -> tuple[int, float]:
        fetches = 0

        async def fetch(server: str) -> EndpointRecord:
            nonlocal fetches
            if server == "http://s0":
                fetches += 1
                await asyncio.sleep(0.3)
                return record(0)
            if server == "http://hung":
                await asyncio.get_running_loop().create_future()
            return record(1)

        directory = AsyncEndpointDirectory(fetch, DirectoryConfig(probe_ready_s=None))
        directory.add_server("http://s0", "context")
        await asyncio.gather(*(directory.refresh("http://s0") for _ in range(50)))
        directory.add_server("http://hung", "context")
        hung = asyncio.create_task(directory.refresh("http://hung"))
        await asyncio.sleep(0.01)
        slowest_s = 0.0
        for number in range(100):
            started_s = time.perf_counter()
            async with directory.reserve("context", number):
                slowest_s = max(slowest_s, time.perf_counter() - started_s)
            await asyncio.sleep(0)
        hung.cancel()
        await asyncio.gather(hung, return_exceptions=True)
        await directory.aclose()
        return fetches, slowest_s

    fetches, slowest_s = asyncio.run(main())
    return [
        figure("50 callers of one slow refresh", fetches, "fetches", baseline=50, goal="== 1", met=fetches == 1),
        figure(
            "slowest of 100 picks of B while A hangs",
            slowest_s * 1e3,
            "ms",
            baseline=300.0,
            goal="<= 50",
            met=slowest_s <= 0.050,
        ),
    ]


def idle() -> list[dict[str, Any]]:
    """Wake-ups of an idle thread, and from a notification to the woken thread, beside a plain 10 ms sleep."""
    backoff = IdleBackoff()
    started_s = time.perf_counter()
    cpu_s = time.thread_time()
    while time.perf_counter() - started_s < 3.0:
        backoff.wait()
    elapsed_s = time.perf_counter() - started_s
    rate = backoff.statistics().waits / elapsed_s
    cpu_percent = 100 * (time.thread_time() - cpu_s) / elapsed_s

    woken, slept = _latencies(400)
    tail = statistics.quantiles(woken, n=100)[98] * 1e3
    slept_tail = statistics.quantiles(slept, n=100)[98] * 1e3
    return [
        figure("idle wake-ups of a thread", rate, "1/s", goal="<= 110", met=rate <= 110),
        figure("processor time of an idle thread", cpu_percent, "%", goal="<= 2", met=cpu_percent <= 2),
        figure("signalled wake of a thread, p99", tail, "ms", baseline=slept_tail, goal="< 5", met=tail < 5),
    ]


def _latencies(count: int) -> tuple[list[float], list[float]]:
    """(by IdleBackoff, by a loop that sleeps 10 ms): seconds from making work known to seeing it, taken in turn."""
    results: tuple[list[float], list[float]] = ([], [])
    for which in range(2):
        backoff = IdleBackoff()
        box: list[float] = []
        done = threading.Event()

        def consume(
            which: int = which, backoff: IdleBackoff = backoff, box: list[float] = box, done: threading.Event = done
        ) -> None:
            while not done.is_set():
                if box:
                    results[which].append(time.perf_counter() - box.pop())
                    backoff.reset()
                elif which == 0:
                    backoff.wait()
                else:
                    time.sleep(0.010)

        thread = threading.Thread(target=consume)
        thread.start()
        for number in range(count if which == 0 else count // 2):
            time.sleep(0.012 + (number % 7) * 0.001)  # long enough to be asleep at the cap
            box.append(time.perf_counter())
            if which == 0:
                backoff.notify()
        time.sleep(0.03)
        done.set()
        backoff.notify()
        thread.join()
    return results


def idle_asyncio() -> list[dict[str, Any]]:
    async def main() -> float:
        backoff = AsyncIdleBackoff()
        seen: list[float] = []
        box: list[float] = []

        async def consume() -> None:
            while len(seen) < 200:
                if box:
                    seen.append(time.perf_counter() - box.pop())
                    backoff.reset()
                else:
                    await backoff.wait()

        task = asyncio.create_task(consume())
        while not task.done():
            await asyncio.sleep(0.013)
            box.append(time.perf_counter())
            backoff.notify()
        await task
        return statistics.quantiles(seen, n=100)[98] * 1e3

    tail = asyncio.run(main())
    return [figure("signalled wake of a coroutine, p99", tail, "ms", goal="< 5", met=tail < 5)]


def ids() -> list[dict[str, Any]]:
    generator = RequestIdGenerator(1, ahead_ms_max=3_600_000)

    def make(count: int) -> None:
        for _ in range(count):
            generator.next_id()

    rate = best_rate(make, 100_000)
    return [figure("request ids", rate, "ids/s", goal=">= 100000", met=rate >= 100_000)]


def main() -> list[dict[str, Any]]:
    """All figures, in order."""
    return [*reserve_release(), *picks(), *coalescing(), *idle(), *idle_asyncio(), *ids()]


if __name__ == "__main__":
    figures = main()
    print(f"{'figure':44} {'value':>14} {'unit':9} {'baseline':>14} {'ratio':>8}  goal")
    for row in figures:
        baseline = "" if row["baseline"] is None else f"{row['baseline']:,.2f}"
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        verdict = "met" if row["met"] else "MISSED"
        print(
            f"{row['name']:44} {row['value']:>14,.2f} {row['unit']:9} {baseline:>14} {ratio:>8}  {row['goal']} {verdict}"
        )
    for row in figures:
        print(json.dumps(row))
