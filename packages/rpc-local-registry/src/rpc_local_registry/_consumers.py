"""The consuming ends of streams: over the socket, from a worker's ``StreamSource``, from a worker's generator."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, TypeVar

from rpc_local_registry import _asyncio as aio
from rpc_local_registry import _wire as wire
from rpc_local_registry._core import Core, Handle
from rpc_local_registry._engine import Engine, StreamPending
from rpc_local_registry._errors import RpcError, RpcStreamingError, RpcTimeout, RpcUsageError, again, describe, rebuild
from rpc_local_registry._hooks import call_hook
from rpc_local_registry._streams import _EMPTY, Inbox, StreamSource, close_generator

_T = TypeVar("_T")


class RpcStream(Generic[_T]):
    """Items of a streaming call.

    One consumer, ``for`` or ``async for``; leave early with ``cancel`` or the context manager. It is open once the worker's
    method was called; a method that is declared non-blocking is called before any later call of this client.
    """

    text = "stream"

    def __iter__(self) -> RpcStream[_T]:
        return self

    def __aiter__(self) -> RpcStream[_T]:
        return self

    def __next__(self) -> _T:
        raise NotImplementedError

    async def __anext__(self) -> _T:
        raise NotImplementedError

    def deliver_to(self, on_item: Callable[[_T], object], on_end: Callable[[RpcError | None], object]) -> None:
        """Have each item handed over where it arrives, instead of iterating; no thread or task waits for them.

        Both are called one after the other, in order, first here for what has come already, then on the thread that brings
        the item: the client's I/O thread, or on the local path the worker's own that pushes (the end by ``timeout_s`` comes on
        a timer's). They must not block. What ``on_item`` raises cancels the stream and is logged. ``item_timeout_s`` bounds
        nothing here, because nobody waits.

        Args:
            on_item: Gets each item.
            on_end: Told once, after the last item: None, or what ended the stream.

        Raises:
            RpcStreamingError: The stream is a generator of this process, which only its consumer advances.
        """
        raise RpcStreamingError(f"{self.text}: a generator of this process is advanced by its consumer: iterate")

    def cancel(self) -> None:
        """Leave: the producer stops, unread items are dropped. Idempotent; harmless after the end."""
        raise NotImplementedError

    def __enter__(self) -> RpcStream[_T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    async def __aenter__(self) -> RpcStream[_T]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


def _pass_on(
    stream: RemoteStream | PushStream, on_item: Callable[[Any], object], on_end: Callable[[RpcError | None], object]
) -> None:
    """Hand over what has come, and come again with the next item or the end."""
    inbox = stream._inbox
    come_again = functools.partial(_pass_on, stream, on_item, on_end)
    try:
        while True:
            item = inbox.take_nowait()
            if item is not _EMPTY:
                if not call_hook("on_item", on_item, stream._took(item)):
                    stream.cancel()
            elif inbox.watch(come_again):
                return
            elif not len(inbox):
                break
    except Exception:
        # Another consumer has it, and goes on.
        raise
    except BaseException:
        # An interrupt, or ``on_item`` exits on the main thread: nobody would come again.
        inbox.unwatch(come_again)
        stream.cancel()
        _tell_end(stream, on_end)
        raise
    _tell_end(stream, on_end)


def _tell_end(stream: RemoteStream | PushStream, on_end: Callable[[RpcError | None], object]) -> None:
    ended = stream._ended(StopIteration)
    call_hook("on_end", on_end, ended if isinstance(ended, RpcError) else None)


class RemoteStream(RpcStream[Any]):
    """A stream over the socket."""

    def __init__(self, engine: Engine, pending: StreamPending, item_timeout_s: float | None, handle: Handle) -> None:
        self._engine = engine
        self._pending = pending
        self._inbox: Inbox[tuple[Any, int, int]] = pending.inbox
        self._item_timeout_s = item_timeout_s
        #: Of items and bytes so far, what the server knows to be taken.
        self._granted = 0
        self._granted_bytes = 0
        self._grant = max(1, engine.config.stream_credit // 2)
        self._grant_bytes = max(1, engine.config.stream_bytes // 2)
        self._handle = handle
        self.text = pending.text

    def _took(self, item: tuple[Any, int, int]) -> Any:
        value, items, size_bytes = item
        self._make_room(items, size_bytes)
        return value

    def _make_room(self, items: int, size_bytes: int) -> None:
        """So many items and bytes are taken by now; the server hears of it once it is half of what it may send."""
        if items - self._granted >= self._grant or size_bytes - self._granted_bytes >= self._grant_bytes:
            if not self._inbox.closed:
                credit = wire.pack_credit(items - self._granted, size_bytes - self._granted_bytes)
                self._engine.control(wire.CREDIT, self._pending.call_id, credit)
            self._granted = items
            self._granted_bytes = size_bytes

    def _before_waiting(self) -> None:
        """With nothing unread everything that came is taken, what was lost in an interrupt too.

        Raises:
            RpcUsageError: This is the client's I/O thread, which would have to bring the next item. The stream goes on.
        """
        if not len(self._inbox):
            self._make_room(self._pending.next_index, self._pending.received_bytes)
            if self._engine.on_own_thread() and not self._inbox.closed:
                raise RpcUsageError(
                    f"{self.text}: a callback on the client's I/O thread cannot wait for an item: "
                    "use deliver_to, or another thread"
                )

    def _ended(self, stop: type[Exception]) -> Exception:
        error = self._inbox.error
        if error is None:
            return stop()
        # Told once; afterwards the stream is simply over.
        self._inbox.error = None
        return error if isinstance(error, Exception) else RpcError(str(error))

    def __next__(self) -> Any:
        self._before_waiting()
        try:
            item = self._inbox.get(self._item_timeout_s)
        except RpcTimeout:
            self.cancel()
            raise
        if item is _EMPTY:
            raise self._ended(StopIteration)
        return self._took(item)

    async def __anext__(self) -> Any:
        self._before_waiting()
        try:
            item = await self._inbox.get_async(self._item_timeout_s)
        except (RpcTimeout, aio.CancelledError):
            self.cancel()
            raise
        if item is _EMPTY:
            raise self._ended(StopAsyncIteration)
        return self._took(item)

    def deliver_to(self, on_item: Callable[[Any], object], on_end: Callable[[RpcError | None], object]) -> None:
        _pass_on(self, on_item, on_end)

    def cancel(self) -> None:
        self._engine.abandon(self._pending.call_id)
        self._inbox.close(discard=True)

    def __del__(self) -> None:
        # An interrupt may have come before it was complete.
        if hasattr(self, "_inbox") and not self._inbox.closed:
            self.cancel()


class LocalStream(RpcStream[Any]):
    """Shared by the kinds of local stream: deadlines, the worker's and the client's end, errors."""

    def __init__(self, handle: Handle, text: str, deadline_s: float | None, item_timeout_s: float | None) -> None:
        self._handle = handle
        self._core: Core = handle.core
        self._deadline_s = deadline_s
        self._item_timeout_s = item_timeout_s
        self._over = False
        #: Why worker or client ended it; told once.
        self._ended_by: RpcError | None = None
        self.text = text

    def end_with(self, error: RpcError) -> None:
        """The worker or the client left."""
        self._ended_by = error

    def _error(self, error: BaseException) -> RpcError:
        return rebuild(describe(error), self._core.causes)

    def _wait_s(self) -> float | None:
        if self._deadline_s is None:
            return self._item_timeout_s
        left_s = max(0.0, self._deadline_s - time.monotonic())
        return left_s if self._item_timeout_s is None else min(left_s, self._item_timeout_s)

    def _check(self, stop: type[Exception]) -> None:
        ended_by, self._ended_by = self._ended_by, None
        if ended_by is not None and not self._over:
            self.cancel()
            raise again(ended_by)
        if self._over:
            raise stop
        if self._deadline_s is not None and time.monotonic() >= self._deadline_s:
            self.cancel()
            raise RpcTimeout(f"{self.text}: timed out")

    def __del__(self) -> None:
        if hasattr(self, "_over") and not self._over:
            self.cancel()


class FailedStream(LocalStream):
    """A stream that could not be opened: told with the first item, as over the socket."""

    def __init__(self, handle: Handle, text: str, error: RpcError) -> None:
        super().__init__(handle, text, None, None)
        self._ended_by = error

    def end_with(self, error: RpcError) -> None:
        """It has its error already."""

    def __next__(self) -> Any:
        self._check(StopIteration)
        raise StopIteration

    async def __anext__(self) -> Any:
        self._check(StopAsyncIteration)
        raise StopAsyncIteration

    def deliver_to(self, on_item: Callable[[Any], object], on_end: Callable[[RpcError | None], object]) -> None:
        ended_by, self._ended_by, self._over = self._ended_by, None, True
        call_hook("on_end", on_end, None if ended_by is None else again(ended_by))

    def cancel(self) -> None:
        self._over = True


class PushStream(LocalStream):
    """A worker's ``StreamSource``, read directly: what was pushed is what comes out."""

    def __init__(
        self,
        handle: Handle,
        text: str,
        source: StreamSource[Any],
        inbox: Inbox[Any],
        deadline_s: float | None,
        item_timeout_s: float | None,
    ) -> None:
        # First: an interrupted one is cancelled when it goes.
        self._source = source
        self._inbox = inbox
        super().__init__(handle, text, deadline_s, item_timeout_s)

    @staticmethod
    def _took(item: Any) -> Any:
        return item

    def _ended(self, stop: type[Exception]) -> Exception:
        error, self._inbox.error = self._inbox.error, None
        ended_by, self._ended_by = self._ended_by, None
        over, self._over = self._over, True
        if ended_by is not None and not over:
            return again(ended_by)
        return stop() if error is None else self._error(error)

    def __next__(self) -> Any:
        item = self._inbox.take_nowait()
        if item is not _EMPTY:
            return item
        self._check(StopIteration)
        try:
            item = self._inbox.get(self._wait_s())
        except RpcTimeout:
            self.cancel()
            raise
        if item is _EMPTY:
            raise self._ended(StopIteration)
        return item

    async def __anext__(self) -> Any:
        item = self._inbox.take_nowait()
        if item is not _EMPTY:
            return item
        self._check(StopAsyncIteration)
        try:
            item = await self._inbox.get_async(self._wait_s())
        except (RpcTimeout, aio.CancelledError):
            self.cancel()
            raise
        if item is _EMPTY:
            raise self._ended(StopAsyncIteration)
        return item

    def deliver_to(self, on_item: Callable[[Any], object], on_end: Callable[[RpcError | None], object]) -> None:
        if self._deadline_s is None:
            _pass_on(self, on_item, on_end)
            return
        # There is no thread of ours here that could watch the time.
        left_s = max(0.0, self._deadline_s - time.monotonic())
        timer = threading.Timer(left_s, self.end_with, (RpcTimeout(f"{self.text}: timed out"),))
        timer.daemon = True

        def ended(error: RpcError | None) -> None:
            timer.cancel()
            on_end(error)

        timer.start()
        try:
            _pass_on(self, on_item, ended)
        except BaseException:
            timer.cancel()
            raise

    def cancel(self) -> None:
        self._over = True
        self._source._cancel()

    def end_with(self, error: RpcError) -> None:
        super().end_with(error)
        self._source._cancel(discard=False)


class GeneratorStream(LocalStream):
    """A worker's generator, advanced directly by its consumer."""

    def __init__(
        self, handle: Handle, text: str, generator: Any, deadline_s: float | None, item_timeout_s: float | None
    ) -> None:
        self._generator = generator
        self._loop = aio.running_loop()
        super().__init__(handle, text, deadline_s, item_timeout_s)

    def _advance(self, stop: type[Exception]) -> Any:
        self._check(stop)
        try:
            item = next(self._generator)
        except StopIteration:
            self._over = True
            raise stop from None
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            self._over = True
            raise self._error(error) from error
        if self._over:
            # Cancelled by another thread while the generator ran: it could not be closed then.
            close_generator(self._generator)
            raise stop
        if self._ended_by is not None:
            self._check(stop)
        return item

    def __next__(self) -> Any:
        if hasattr(self._generator, "__anext__"):
            raise RpcStreamingError(f"{self.text} is an async generator: use 'async for'")
        return self._advance(StopIteration)

    async def __anext__(self) -> Any:
        if not hasattr(self._generator, "__anext__"):
            return self._advance(StopAsyncIteration)
        self._check(StopAsyncIteration)
        limit = aio.timeout(self._wait_s())
        try:
            async with limit:
                item = await anext(self._generator)
        except StopAsyncIteration:
            self._over = True
            raise
        except TimeoutError as error:
            if limit.expired():
                self.cancel()
                raise RpcTimeout(f"{self.text}: timed out") from None
            self._over = True
            raise self._error(error) from error
        except aio.CancelledError as error:
            if aio.is_being_cancelled():
                self.cancel()
                raise
            self._over = True
            raise self._error(error) from error
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            self._over = True
            raise self._error(error) from error
        if self._ended_by is not None:
            self._check(StopAsyncIteration)
        return item

    def cancel(self) -> None:
        if self._over:
            return
        self._over = True
        if hasattr(self._generator, "close"):
            close_generator(self._generator)
        elif self._loop is not None:
            aio.call_on(self._loop, _close_soon, self._loop, self._generator)


def _close_soon(loop: aio.AbstractEventLoop, generator: Any) -> None:
    task = loop.create_task(generator.aclose())
    # The loop keeps only a weak reference.
    _closing.add(task)
    task.add_done_callback(_closing.discard)


_closing: set[aio.Task[None]] = set()
