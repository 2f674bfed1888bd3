"""Processor time of every thread of a service, and what waits in its queues, looked at while a load runs."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from meta_executor.supervise.procfs import resident_bytes

#: Between two looks (s).
EVERY_S = 1.0


@dataclass(frozen=True)
class ThreadUse:
    """One thread since its start: processor time, and time that it waited for a core (s)."""

    name: str
    worked_s: float
    core_wait_s: float


@dataclass(frozen=True)
class Look:
    """A service at one moment.

    Attributes:
        at_s: Monotonic time (s).
        threads: By process ("gen-0/rank1") and number in the system.
        queues: Per instance: requests that are there, and those of them that wait to be admitted (count).
        resident_bytes: Memory of each process; 0 when it has ended.
    """

    at_s: float
    threads: Mapping[str, Mapping[int, ThreadUse]]
    queues: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    resident_bytes: Mapping[str, int] = field(default_factory=dict)


def threads_of(pid: int) -> dict[int, ThreadUse]:
    """What the system says of a process's threads; empty when it has ended."""
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/task"):
            # A thread that ends meanwhile is none.
            with contextlib.suppress(OSError, IndexError, ValueError):
                task = Path(f"/proc/{pid}/task/{name}")
                worked_ns, core_wait_ns = (task / "schedstat").read_text("ascii").split()[:2]
                said = (task / "comm").read_text(errors="replace").strip()
                found[int(name)] = ThreadUse(said, int(worked_ns) / 1e9, int(core_wait_ns) / 1e9)
    return found


class Sampler:
    """Looks again and again, in a thread of its own, from entering to leaving.

    Args:
        processes: pid by name.
        queues: Asks each instance for its queues.
        every_s: Between two looks (s).
    """

    def __init__(
        self,
        processes: Mapping[str, int],
        queues: Callable[[], dict[str, tuple[int, int]]],
        *,
        every_s: float = EVERY_S,
    ) -> None:
        self._processes = dict(processes)
        self._queues = queues
        self._every_s = every_s
        self._end = threading.Event()
        self._looks: list[Look] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def __enter__(self) -> Sampler:
        self._looks.append(self._look())
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        self._thread.join()

    def looks(self) -> tuple[Look, ...]:
        """All of them and one more, of now.

        Raises:
            Exception: What a look met.
        """
        if self._error is not None:
            raise self._error
        return (*self._looks, self._look())

    def _run(self) -> None:
        try:
            while not self._end.wait(self._every_s):
                self._looks.append(self._look())
        except Exception as error:  # noqa: BLE001 - told to whoever asks for the looks
            self._error = error

    def _look(self) -> Look:
        threads = {name: threads_of(pid) for name, pid in self._processes.items()}
        sizes = {name: resident_bytes(pid) for name, pid in self._processes.items()}
        return Look(time.monotonic(), threads, self._queues(), sizes)


@dataclass(frozen=True)
class Usage:
    """Between two looks.

    Attributes:
        seconds: Between them.
        threads: (processor time, wait for a core) by process and thread (s); those of one name together.
        live, waiting: Requests per instance that were there, and that waited: largest of all looks (count).
        resident_bytes: Memory of each process at the first look and at the last.
    """

    seconds: float
    threads: Mapping[str, Mapping[str, tuple[float, float]]]
    live: Mapping[str, int]
    waiting: Mapping[str, int]
    resident_bytes: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def worked_s(self, process: str = "") -> float:
        """Processor time of all processes whose name begins so (s)."""
        return sum(
            worked
            for name, threads in self.threads.items()
            if name.startswith(process)
            for worked, _ in threads.values()
        )


def usage_between(
    looks: tuple[Look, ...], window_s: tuple[float, float], names: Mapping[str, Mapping[int, str]]
) -> Usage:
    """From the first look within the window to the last one; where there are not two, from the first to the last of all.

    Args:
        looks: In order of time, at least one.
        window_s: Monotonic time (s).
        names: Better names of threads than the system's, by process and number.
    """
    within = [look for look in looks if window_s[0] <= look.at_s <= window_s[1]]
    first, last = (within[0], within[-1]) if len(within) > 1 else (looks[0], looks[-1])
    used: dict[str, dict[str, tuple[float, float]]] = {}
    for process, threads in last.threads.items():
        mine = used.setdefault(process, {})
        for number, thread in threads.items():
            before = first.threads.get(process, {}).get(number)
            name = names.get(process, {}).get(number, thread.name)
            worked_s, waited_s = mine.get(name, (0.0, 0.0))
            mine[name] = (
                worked_s + thread.worked_s - (before.worked_s if before else 0.0),
                waited_s + thread.core_wait_s - (before.core_wait_s if before else 0.0),
            )
    owners = {owner for look in looks for owner in look.queues}
    inside = [look for look in looks if first.at_s <= look.at_s <= last.at_s]

    def most(owner: str, place: int) -> int:
        return max((look.queues[owner][place] for look in inside if owner in look.queues), default=0)

    return Usage(
        last.at_s - first.at_s,
        used,
        {owner: most(owner, 0) for owner in sorted(owners)},
        {owner: most(owner, 1) for owner in sorted(owners)},
        {name: (first.resident_bytes.get(name, 0), size) for name, size in last.resident_bytes.items()},
    )
