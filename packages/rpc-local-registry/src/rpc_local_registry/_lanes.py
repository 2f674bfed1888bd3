"""Where handlers run that may block: one bounded lane of threads per method, and one event loop for coroutines.

A lane belongs to a method, so calls of a slow method queue behind each other and never before another method's. Threads
are made on demand, shared by all lanes, and leave when the server stops; a handler that never returns costs its own
lane one thread.
"""

from __future__ import annotations

import asyncio
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
        """Queue a job; returns at once."""
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
        thread.start()

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
            busy = len(self._busy)
            idle = [thread for thread in self._threads if thread not in self._busy]
        return _join(idle, timeout_s) and not busy


def _join(threads: list[threading.Thread], timeout_s: float) -> bool:
    deadline_s = time.monotonic() + timeout_s
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline_s - time.monotonic()))
    return not any(thread.is_alive() for thread in threads if thread is not threading.current_thread())


class LoopThread:
    """An event loop in a thread of its own, started when the first coroutine needs it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopped = False

    def call(self, function: Callable[[asyncio.AbstractEventLoop], None]) -> bool:
        """Run ``function(loop)`` on the loop soon; False once stopped."""
        with self._lock:
            if self._stopped:
                return False
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._run, args=(self._loop,), name=self._name, daemon=True)
                self._thread.start()
            loop = self._loop
            loop.call_soon_threadsafe(function, loop)
        return True

    @staticmethod
    def _run(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            if tasks:
                loop.run_until_complete(asyncio.wait(tasks, timeout=1.0))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            asyncio.set_event_loop(None)
            loop.close()

    def stop(self, timeout_s: float) -> bool:
        """Cancel what runs and end the loop; True if it had ended in time."""
        with self._lock:
            self._stopped = True
            loop, thread = self._loop, self._thread
            if loop is None or thread is None:
                return True
            if not loop.is_closed():
                loop.call_soon_threadsafe(loop.stop)
        return _join([thread], timeout_s)
