"""What the directory, the idle waits and the ids cost, each beside something measured in turn in the same run.

Every goal is a factor: of a bare dictionary, of a scan, of a plain sleep, of a bare event. Costs are
processor time, waits and wakes are time on the clock. Run: ``nox -s bench -- endpoint-lifecycle``.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))

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
from measure import Figure, compare, counted, in_turn, pinned, ratio, run_benchmark, timed


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


def reserve_release() -> list[Figure]:
    """A cycle of the core beside what cannot be done without, and a cycle on a loop beside the core's."""
    directory, adapter = directory_of(16), AsyncEndpointDirectory(_refuse, DirectoryConfig(probe_ready_s=None))
    books: dict[tuple[str, int], list[int]] = {}
    load, numbers = [0, 0], itertools.count()

    def dictionary() -> None:
        """A key in and out of a dictionary, two counters up and down, an object made."""
        number = next(numbers)
        key = ("context", number)
        books[key] = [number]
        load[0] += 1
        load[1] += 1
        del books[key]
        load[0] -= 1
        load[1] -= 1

    def cycle() -> None:
        directory.release(directory.reserve("context", next(numbers), 0.0))

    async def prepare() -> None:
        for number in range(16):
            adapter.apply_set(f"http://s{number}", record(number))

    async def cycles(count: int) -> float:
        began_s = time.thread_time()
        for _ in range(count):
            async with adapter.reserve("context", next(numbers)) as reservation:
                reservation.dispatched()
        return (time.thread_time() - began_s) / count

    with asyncio.Runner() as runner, pinned():
        runner.run(prepare())
        sides = {
            "dictionary": timed(dictionary, 20_000, time.thread_time),
            "core": timed(cycle, 5_000, time.thread_time),
            "loop": lambda: runner.run(cycles(3_000)),
        }
        samples = in_turn(sides)
        runner.run(adapter.aclose())
    return [
        ratio("reserve and release, core", samples["core"], samples["dictionary"], unit="us", scale=1e6, goal="<= 15",
              against="a dictionary and two counters"),
        ratio("reserve, dispatch and release, asyncio", samples["loop"], samples["core"], unit="us", scale=1e6,
              goal="<= 3.5", against="the core's cycle"),
    ]  # fmt: skip


async def _refuse(server: str) -> bytes:
    raise OSError(server)


def picks() -> list[Figure]:
    """One pick among 1,000 servers under changing load, beside a pick among ten and a scan of the thousand loads."""

    def sample_of(servers: int) -> Callable[[], float]:
        directory = directory_of(servers)
        held = [directory.reserve("context", number, 0.0, weight=number % 7) for number in range(3 * servers)]
        numbers = itertools.count(10_000)

        def pick() -> None:
            number = next(numbers)
            at = number % len(held)
            directory.release(held[at])
            held[at] = directory.reserve("context", number, 0.0, weight=number % 7)

        return timed(pick, 2_000, time.thread_time)

    loads = [slot.load for slot in directory_of(1000)._slots.values()]
    scan = timed(lambda: min(loads, key=lambda load: (load.weight, load.count)), 20, time.thread_time)
    with pinned():
        samples = in_turn({"thousand": sample_of(1000), "ten": sample_of(10), "scan": scan})
    return [
        ratio("pick among 1,000 servers", samples["thousand"], samples["scan"], unit="us", scale=1e6, goal="<= 0.15",
              against="one scan of their loads"),
        ratio("pick among 1,000 servers, growth", samples["thousand"], samples["ten"], unit="us", scale=1e6,
              goal="<= 3", against="a pick among 10"),
    ]  # fmt: skip


def coalescing() -> list[Figure]:
    """50 callers of one slow refresh; picks of one server while another one's fetch hangs, and while none does."""
    fetches = 0

    async def fetch(server: str) -> EndpointRecord:
        nonlocal fetches
        if server == "http://hung":
            await asyncio.get_running_loop().create_future()
        fetches += 1
        await asyncio.sleep(0.05)
        return record(0)

    async def main() -> tuple[int, dict[bool, list[float]]]:
        directory = AsyncEndpointDirectory(fetch, DirectoryConfig(probe_ready_s=None))
        directory.add_server("http://s0", "context")
        await asyncio.gather(*(directory.refresh("http://s0") for _ in range(50)))
        once = fetches

        async def picks(hanging: bool) -> float:
            hung = None
            if hanging:
                directory.add_server("http://hung", "context")
                hung = asyncio.create_task(directory.refresh("http://hung"))
                await asyncio.sleep(0)
            began_s = time.thread_time()
            for number in range(2_000):
                async with directory.reserve("context", number):
                    await asyncio.sleep(0)
            took_s = time.thread_time() - began_s
            if hung is not None:
                hung.cancel()
                await asyncio.gather(hung, return_exceptions=True)
                directory.remove_server("http://hung")
            return took_s / 2_000

        samples: dict[bool, list[float]] = {True: [], False: []}
        for number in range(-1, 15):
            for hanging in (True, False) if number % 2 else (False, True):
                took_s = await picks(hanging)
                if number >= 0:
                    samples[hanging].append(took_s)
        await directory.aclose()
        return once, samples

    once, samples = asyncio.run(main())
    return [
        counted("fetches for 50 callers of one slow refresh", once, "fetches", "<= 1"),
        ratio("pick while another server hangs", samples[True], samples[False], unit="us", scale=1e6, goal="<= 1.5",
              against="the same while none hangs"),
    ]  # fmt: skip


def idle() -> list[Figure]:
    """Wake-ups and processor time of an idle thread, beside a plain loop of 10 ms sleeps."""

    def looping(wait: Callable[[], object], look: Callable[[], float]) -> Callable[[], tuple[float, float]]:
        def sample() -> tuple[float, float]:
            count, began_s, used_s = 0, time.perf_counter(), look()
            while time.perf_counter() - began_s < 0.4:
                wait()
                count += 1
            return count / 0.4, look() - used_s

        return sample

    sides = {
        "backoff": looping(IdleBackoff().wait, time.thread_time),
        "sleep": looping(lambda: time.sleep(0.010), time.thread_time),
    }
    waits: dict[str, list[float]] = {"backoff": [], "sleep": []}
    used: dict[str, list[float]] = {"backoff": [], "sleep": []}
    for number in range(-1, 15):
        for name in reversed(sides) if number % 2 else sides:
            rate, used_s = sides[name]()
            if number >= 0:
                waits[name].append(rate)
                used[name].append(used_s)
    plain = "a loop of 10 ms sleeps"
    return [
        ratio("wake-ups of an idle thread", waits["backoff"], waits["sleep"], unit="1/s", goal="<= 1.2", against=plain),
        ratio("processor time of an idle thread", used["backoff"], used["sleep"], unit="ms", scale=1e3, goal="<= 4",
              against=plain),
    ]  # fmt: skip


def wakes() -> list[Figure]:
    """From making work known to seeing it, asleep at the cap: a thread and a coroutine, beside a bare event of their kind."""

    def thread_wakes(make: Callable[[], tuple[Callable[[], object], Callable[[], object]]]) -> Callable[[], float]:
        def sample() -> float:
            wait, notify = make()
            box: list[float] = []
            seen: list[float] = []
            done = threading.Event()

            def consume() -> None:
                while not done.is_set():
                    if box:
                        seen.append(time.perf_counter() - box.pop())
                    wait()

            thread = threading.Thread(target=consume)
            thread.start()
            for _ in range(12):
                time.sleep(0.013)
                box.append(time.perf_counter())
                notify()
            time.sleep(0.02)
            done.set()
            notify()
            thread.join()
            return statistics.median(seen)

        return sample

    def bare_thread() -> tuple[Callable[[], object], Callable[[], object]]:
        event = threading.Event()

        def wait() -> None:
            event.wait(1.0)
            event.clear()

        return wait, event.set

    def backoff_thread() -> tuple[Callable[[], object], Callable[[], object]]:
        backoff = IdleBackoff()
        return backoff.wait, backoff.notify

    async def loop_wakes(bare: bool) -> float:
        backoff, event = AsyncIdleBackoff(), asyncio.Event()
        box: list[float] = []
        seen: list[float] = []

        async def consume() -> None:
            while len(seen) < 12:
                if box:
                    seen.append(time.perf_counter() - box.pop())
                elif bare:
                    await event.wait()
                    event.clear()
                else:
                    await backoff.wait()

        task = asyncio.create_task(consume())
        while not task.done():
            await asyncio.sleep(0.013)
            box.append(time.perf_counter())
            event.set() if bare else backoff.notify()
            await asyncio.sleep(0)
        await task
        return statistics.median(seen)

    return [
        compare("signalled wake of a thread", thread_wakes(backoff_thread), thread_wakes(bare_thread), unit="us",
                scale=1e6, goal="<= 1.5", against="a bare threading.Event"),
        compare("signalled wake of a coroutine", lambda: asyncio.run(loop_wakes(False)),
                lambda: asyncio.run(loop_wakes(True)), unit="us", scale=1e6, goal="<= 1.5", against="a bare asyncio.Event"),
    ]  # fmt: skip


def ids() -> list[Figure]:
    """A request id, beside a counter under a lock."""
    generator, numbers, lock = RequestIdGenerator(1, ahead_ms_max=3_600_000), itertools.count(), threading.Lock()

    def plain() -> int:
        with lock:
            return next(numbers)

    with pinned():
        return [
            compare("request id", timed(generator.next_id, 10_000, time.thread_time),
                    timed(plain, 30_000, time.thread_time), unit="us", scale=1e6, goal="<= 5",
                    against="a counter under a lock"),
        ]  # fmt: skip


if __name__ == "__main__":
    run_benchmark(reserve_release, picks, coalescing, idle, wakes, ids)
