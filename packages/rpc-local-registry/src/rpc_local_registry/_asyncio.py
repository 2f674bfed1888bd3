"""The one file that imports asyncio: the server's event loop, hand-offs into callers' loops, and the names that others need."""

from __future__ import annotations

import asyncio
import logging
import threading
from asyncio import AbstractEventLoop as AbstractEventLoop
from asyncio import CancelledError as CancelledError
from asyncio import Event as Event
from asyncio import Future as Future
from asyncio import Task as Task
from asyncio import ensure_future as ensure_future
from asyncio import get_running_loop as get_running_loop
from asyncio import run as run
from asyncio import sleep as sleep
from asyncio import timeout as timeout
from asyncio import wait as wait
from asyncio import wait_for as wait_for
from collections.abc import Callable
from typing import Any

from rpc_local_registry._lanes import join_threads

_logger = logging.getLogger("rpc_local_registry")


def running_loop() -> AbstractEventLoop | None:
    """The loop that runs in this thread, if one does."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def is_being_cancelled() -> bool:
    """Whether somebody cancels the task that runs here (a cancellation may also be what an awaited thing ended with)."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def call_on(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: Any) -> None:
    """Run something on a loop soon, from any thread; a loop that closed meanwhile has nobody left to hear it."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise


def release(loop: asyncio.AbstractEventLoop, gate: asyncio.Future[None]) -> None:
    """Wake a coroutine from any thread; a loop that closed meanwhile has nobody left to wake."""
    call_on(loop, _set, gate)


def _set(gate: asyncio.Future[None]) -> None:
    if not gate.done():
        gate.set_result(None)


def resolve(answers: list[tuple[asyncio.Future[Any], Any, BaseException | None]]) -> None:
    """Hand answers to those who await them; on their loop."""
    for future, value, error in answers:
        if not future.done():
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(value)


class LoopThread:
    """An event loop in a thread of its own, started when the first coroutine needs it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopped = False

    def call(self, function: Callable[[asyncio.AbstractEventLoop], None]) -> bool:
        """Run ``function(loop)`` on the loop soon; False once stopped.

        Raises:
            RuntimeError: The system gives no thread for the loop. Nothing was begun.
        """
        with self._lock:
            if self._stopped:
                return False
            if self._loop is None:
                loop = asyncio.new_event_loop()
                thread = threading.Thread(target=self._run, args=(loop,), name=self._name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    loop.close()
                    raise
                self._loop, self._thread = loop, thread
            loop = self._loop
            loop.call_soon_threadsafe(function, loop)
        return True

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            while not self._stopped:
                try:
                    loop.run_forever()
                except BaseException:
                    # A task or callback that a handler made, and which exits: the others' calls go on.
                    _logger.exception("something on the event loop of the coroutines exits")
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
        return join_threads([thread], timeout_s)
