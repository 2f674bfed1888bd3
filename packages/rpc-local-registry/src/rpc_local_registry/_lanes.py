"""Where handlers run that may block: one bounded lane of threads per method.

A lane belongs to a method, so calls of a slow method queue behind each other and never before another method's. Threads
are made on demand, shared by all lanes, and leave when the server stops; a handler that never returns costs its own
lane one thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

Job = Callable[[], None]


class Lane:
    """Jobs of one method; at most ``width`` run at a time."""

    __slots__ = ("active", "jobs", "width")

    def __init__(self, width: int) -> None:
        self.width = width
        self.active = 0
        self.jobs: deque[Job] = deque()


class Lanes:
    """Runs jobs on threads. Jobs must not raise; they report by themselves."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._condition = threading.Condition(threading.Lock())
        self._ready: deque[tuple[Lane, Job]] = deque()
        self._idle = 0
        self._threads: list[threading.Thread] = []
        self._busy: set[threading.Thread] = set()
        self._stopped = False

    @property
    def thread_count(self) -> int:
        """Threads made so far."""
        return len(self._threads)

    def submit(self, lane: Lane, job: Job) -> None:
        """Queue a job; returns at once.

        Raises:
            RuntimeError: It needs another thread, and the system gives none. Nothing was queued.
        """
        with self._condition:
            if self._stopped:
                return
            if lane.active >= lane.width:
                lane.jobs.append(job)
                return
            lane.active += 1
            self._ready.append((lane, job))
            if self._idle >= len(self._ready):
                self._condition.notify()
                return
            thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
        try:
            thread.start()
        except RuntimeError:
            if self._take_back(lane, job, thread):
                raise

    def _take_back(self, lane: Lane, job: Job, thread: threading.Thread) -> bool:
        """As if the job had never come; False if another thread took it meanwhile."""
        with self._condition:
            self._threads.remove(thread)
            if (lane, job) not in self._ready:
                return False
            self._ready.remove((lane, job))
            lane.active -= 1
            return True

    def _run(self) -> None:
        this = threading.current_thread()
        while True:
            with self._condition:
                self._busy.discard(this)
                while not self._ready:
                    if self._stopped:
                        return
                    self._idle += 1
                    self._condition.wait()
                    self._idle -= 1
                lane, job = self._ready.popleft()
                self._busy.add(this)
            job()
            # Not kept alive while the thread waits: it holds the call's arguments.
            del job
            with self._condition:
                if lane.jobs and not self._stopped:
                    self._ready.append((lane, lane.jobs.popleft()))
                else:
                    lane.active -= 1

    def stop(self, timeout_s: float) -> bool:
        """Drop queued jobs, let threads leave; True if all had left in time.

        A handler that never returns keeps its thread.
        """
        with self._condition:
            self._stopped = True
            self._ready.clear()
            self._condition.notify_all()
            busy = set(self._busy)
            threads = list(self._threads)
        # Told apart here: an interrupt in a loop that passes things over leaves CPython 3.12 with the lock held.
        idle = [thread for thread in threads if thread not in busy]
        return join_threads(idle, timeout_s) and not busy


def start_thread(thread: threading.Thread) -> None:
    """Start it, and give an interrupt as it came.

    ``start`` waits for the thread in a condition, which an interrupt can break: that one's error then stands in its place.
    (rpc-batch-submit has the same few lines: neither package needs the other, and there is no third that both need.)
    """
    try:
        thread.start()
    except RuntimeError as error:
        if thread.ident is None or error.__context__ is None:
            raise
        raise error.__context__ from None


def join_threads(threads: list[threading.Thread], timeout_s: float) -> bool:
    """Wait for threads, except the calling one; True if all have ended."""
    deadline_s = time.monotonic() + timeout_s
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline_s - time.monotonic()))
    return not any(thread.is_alive() for thread in threads if thread is not threading.current_thread())
