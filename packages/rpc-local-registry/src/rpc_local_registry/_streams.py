"""Streams without a socket: the queue between a producer and one consumer, and the source that a worker pushes into."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from rpc_local_registry import _asyncio as aio
from rpc_local_registry._errors import RpcBackpressure, RpcStreamingError, RpcTimeout
from rpc_local_registry._hooks import call_hook

_logger = logging.getLogger("rpc_local_registry")
_T = TypeVar("_T")
_EMPTY: Any = object()


class Inbox(Generic[_T]):
    """Queue with one consumer, which may be a thread or a coroutine. ``put`` wakes it once, however many items follow.

    The lock is held for a few instructions only, never across I/O or user code.
    """

    __slots__ = ("_items", "_lock", "_waiter", "closed", "error")

    def __init__(self) -> None:
        self._items: deque[_T] = deque()
        # Re-entrant: a forgotten stream may be collected, and cancel itself, inside any of these sections.
        self._lock = threading.RLock()
        self._waiter: Callable[[], None] | None = None
        self.closed = False
        self.error: BaseException | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: _T) -> bool:
        """Append and wake the consumer. False after ``close``: the item is dropped."""
        with self._lock:
            if self.closed:
                return False
            self._items.append(item)
            waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter()
        return True

    def close(self, error: BaseException | None = None, *, discard: bool = False) -> bool:
        """End the queue; what is queued is still delivered unless ``discard``. True the first time."""
        with self._lock:
            if discard:
                self._items.clear()
            if self.closed:
                return False
            self.closed = True
            self.error = error
            waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter()
        return True

    def take_nowait(self) -> Any:
        """The next item, or ``_EMPTY``."""
        try:
            return self._items.popleft()
        except IndexError:
            return _EMPTY

    def watch(self, waiter: Callable[[], None]) -> bool:
        """Call ``waiter`` once at the next item or at the end. False if there is something already: not registered."""
        with self._lock:
            if self._items or self.closed:
                return False
            if self._waiter is not None:
                raise RpcStreamingError("a stream has one consumer, and another one is waiting")
            self._waiter = waiter
            return True

    def unwatch(self, waiter: Callable[[], None]) -> None:
        """Forget this waiter, if it is the one that waits."""
        with self._lock:
            if self._waiter is waiter:
                self._waiter = None

    def get(self, timeout_s: float | None) -> Any:
        """The next item, blocking; ``_EMPTY`` at the end.

        Raises:
            RpcTimeout: Nothing came in time.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            item = self.take_nowait()
            if item is not _EMPTY:
                return item
            gate = threading.Lock()
            gate.acquire()
            waiter = gate.release
            try:
                if not self.watch(waiter):
                    if self._items:
                        continue
                    return _EMPTY
                left_s = -1.0 if deadline_s is None else max(0.0, deadline_s - time.monotonic())
                woken = gate.acquire(timeout=left_s)
                if not woken:
                    self.unwatch(waiter)
            except BaseException:
                # An interrupt, usually: the next reader must not find this one still waiting.
                self.unwatch(waiter)
                raise
            if not woken:
                item = self.take_nowait()
                if item is not _EMPTY:
                    return item
                if self.closed:
                    return _EMPTY
                raise RpcTimeout(f"no item within {timeout_s} s")

    async def get_async(self, timeout_s: float | None) -> Any:
        """The next item; ``_EMPTY`` at the end. Same errors as ``get``."""
        while True:
            item = self.take_nowait()
            if item is not _EMPTY:
                return item
            loop = aio.get_running_loop()
            gate: aio.Future[None] = loop.create_future()
            waiter = functools.partial(aio.release, loop, gate)
            try:
                if not self.watch(waiter):
                    if self._items:
                        continue
                    return _EMPTY
                if timeout_s is None:
                    await gate
                else:
                    async with aio.timeout(timeout_s):
                        await gate
            except TimeoutError:
                self.unwatch(waiter)
                item = self.take_nowait()
                if item is not _EMPTY:
                    return item
                if self.closed:
                    return _EMPTY
                raise RpcTimeout(f"no item within {timeout_s} s") from None
            except BaseException:
                # A cancellation or an interrupt.
                self.unwatch(waiter)
                raise


class StreamSource(Generic[_T]):
    """The producing end of a push stream: a worker's loop pushes, one caller consumes.

    A streaming method returns a fresh source per call and keeps it; its loop then calls ``push(batch)`` once per step.
    Nothing is serialised by ``push``: on the local path the very object reaches the consumer, on the remote path the
    server's I/O thread encodes it. Neither side changes an item after it was pushed.

    Args:
        items_max: Items pushed and not yet taken (count, >= 1); beyond it ``push`` raises ``RpcBackpressure``.
        on_cancel: Called once when the consumer leaves before the end, on the consumer's or I/O thread; must not block.
    """

    __slots__ = ("_inbox", "_items_max", "_on_cancel", "_taken", "cancelled")

    def __init__(self, items_max: int = 1024, *, on_cancel: Callable[[], None] | None = None) -> None:
        if items_max < 1:
            raise ValueError(f"items_max must be >= 1, got {items_max}")
        self._inbox: Inbox[_T] = Inbox()
        self._items_max = items_max
        self._on_cancel = on_cancel
        self._taken = False
        #: Whether the consumer left.
        self.cancelled = False

    def push(self, item: _T) -> bool:
        """Hand an item over, from any thread, without blocking.

        Returns:
            False when the stream is over (consumer gone or ``close`` called): the item was not taken.

        Raises:
            RpcBackpressure: ``items_max`` items wait unread. The item was not taken; a retry is safe.
        """
        inbox = self._inbox
        if inbox.closed:
            return False
        if len(inbox) >= self._items_max:
            raise RpcBackpressure(f"{self._items_max} items are unread")
        return inbox.put(item)

    def close(self, error: BaseException | None = None) -> None:
        """End the stream after what was pushed; with ``error`` the consumer gets it as an exception."""
        self._inbox.close(error)

    def __len__(self) -> int:
        return len(self._inbox)

    def _take(self) -> Inbox[_T]:
        """The consumer's end; once."""
        if self._taken:
            raise RpcStreamingError("this StreamSource already has its consumer; return a fresh one per call")
        self._taken = True
        return self._inbox

    def _cancel(self, *, discard: bool = True) -> None:
        """The consumer leaves; what it has not read is dropped unless it still may."""
        if self._inbox.close(discard=discard):
            self.cancelled = True
            if self._on_cancel is not None:
                call_hook("on_cancel", self._on_cancel)


def take_source(name: str, made: object) -> Inbox[Any]:
    """The consumer's end of what a push method returned.

    Raises:
        RpcStreamingError: It is not a fresh ``StreamSource``.
    """
    if not isinstance(made, StreamSource):
        raise RpcStreamingError(f"{name} returned {type(made).__qualname__}, not a StreamSource")
    return made._take()


def close_generator(generator: Any) -> bool:
    """Close a generator, whatever it does about it; False if it is running just now and must be closed after that."""
    try:
        generator.close()
    except ValueError as error:
        if "already executing" in str(error):
            return False
        _logger.exception("closing a stream's generator failed")
    except BaseException:
        _logger.exception("closing a stream's generator failed")
        if threading.current_thread() is threading.main_thread():
            raise
    return True
