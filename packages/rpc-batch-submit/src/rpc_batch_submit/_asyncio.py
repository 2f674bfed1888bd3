"""The asyncio driver: submits from one event loop, timer by the loop, never blocking it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import os
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from types import TracebackType
from typing import Any, Generic, TypeVar

from rpc_batch_submit._batcher import Batcher, BatchStatistics, Entry, SendBatch
from rpc_batch_submit._config import BatchSubmitConfig
from rpc_batch_submit._errors import BatchAborted, BatchSendFailed, BatchSubmitError, BatchUsageError
from rpc_batch_submit._outcomes import unpack_outcomes

_T = TypeVar("_T")
_submitters: weakref.WeakSet[AsyncioBatchSubmitter[Any]] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for submitter in list(_submitters):
        submitter._after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)


class AsyncioBatchSubmitter(Generic[_T]):
    """Coalesces submits of one event loop into calls of ``send_batch``.

    Args:
        send_batch: Takes the list of requests; returns None, one outcome per request (``unpack_outcomes``), or an
            awaitable or ``concurrent.futures.Future`` of either. Must not block: it is called on the loop.
        config: When to send.
        register: Called with each request before it is sent, in order of submission, in every mode, so that an answer
            never meets an unknown request. If it raises, ``submit`` raises and nothing was taken.
        rollback: Called with (request, error) when a registered request will not be served: its send or the request
            itself failed, or it was aborted while buffered.
        size_of: Bytes of a request, for ``bytes_max``; None counts nothing.
        id_of: Id of a request, for ``abort``; None: no aborts.
        bypass: While it returns True nothing waits for company (say, because the worker is in this process and a send
            costs nothing); order is kept.
    """

    def __init__(
        self,
        send_batch: Callable[[list[_T]], Any],
        config: BatchSubmitConfig | None = None,
        *,
        register: Callable[[_T], object] | None = None,
        rollback: Callable[[_T, BaseException], object] | None = None,
        size_of: Callable[[_T], int] | None = None,
        id_of: Callable[[_T], Hashable] | None = None,
        bypass: Callable[[], bool] | None = None,
    ) -> None:
        self._send_batch = send_batch
        self._config = config or BatchSubmitConfig()
        self._core: Batcher[_T] = Batcher(self._config)
        self._register = register
        self._rollback = rollback
        self._size_of = size_of
        self._id_of = id_of
        self._bypass = bypass
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._to_send: deque[SendBatch[_T]] = deque()
        self._sending = False
        self._idle: list[asyncio.Future[None]] = []
        self._tasks: set[asyncio.Future[Any]] = set()
        _submitters.add(self)

    def submit(self, request: _T) -> asyncio.Future[None]:
        """Take a request; returns at once.

        Returns:
            A future: None once the batch was accepted, or this request's error. Ignoring it is fine: errors reach
            ``rollback`` too. Cancelling it while the request is buffered removes the request.

        Raises:
            BatchClosed, BatchBackpressure, BatchUsageError: Not taken, not registered.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None and self._core.outstanding:
                raise BatchUsageError("this submitter has requests on another event loop")
            self._loop = loop
            self._timer = None
        core = self._core
        core.check()
        size_bytes = 0 if self._size_of is None else self._size_of(request)
        request_id = None if self._id_of is None else self._id_of(request)
        if self._register is not None:
            self._register(request)
        ticket: asyncio.Future[None] = loop.create_future()
        try:
            batches = core.add(
                request,
                loop.time(),
                request_id=request_id,
                size_bytes=size_bytes,
                ticket=ticket,
                bypass=self._bypass is not None and self._bypass(),
            )
        except BatchSubmitError as error:
            if self._rollback is not None and self._register is not None:
                self._rollback(request, error)
            raise
        if batches:
            self._perform(batches)
        due_s = core.due_s()
        if due_s is not None and self._timer is None:
            self._timer = loop.call_at(due_s, self._on_timer)
        return ticket

    def abort(self, request_id: Hashable) -> bool:
        """Remove a request that is still buffered: True, its future raises ``BatchAborted``.

        False: it was sent, abort it there.
        """
        entry = self._core.abort(request_id)
        if entry is None:
            return False
        self._tell(entry, BatchAborted(f"request {request_id!r} was aborted before it was sent"))
        self._wake_idle()
        return True

    def flush(self) -> None:
        """Send what is buffered now."""
        self._perform(self._core.flush())

    async def aclose(self, timeout_s: float | None = None) -> bool:
        """Take nothing more, send what is buffered, wait until everything is settled; True if it was in time."""
        self._perform(self._core.close())
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._core.outstanding:
            return True
        idle: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._idle.append(idle)
        done, _ = await asyncio.wait((idle,), timeout=timeout_s)
        return bool(done)

    def close(self) -> None:
        """Take nothing more and send what is buffered, without waiting."""
        self._perform(self._core.close())
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def statistics(self) -> BatchStatistics:
        """Counters so far."""
        return self._core.statistics()

    async def __aenter__(self) -> AsyncioBatchSubmitter[_T]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _on_timer(self) -> None:
        self._timer = None
        loop = self._loop
        due_s = self._core.due_s()
        if loop is None or due_s is None:
            return
        # The loop may call a little early (its clock's resolution); the buffer may also be a younger one.
        if due_s - loop.time() > 1e-4:
            self._timer = loop.call_at(due_s, self._on_timer)
            return
        self._perform(self._core.tick(due_s))

    def _perform(self, batches: Sequence[SendBatch[_T]]) -> None:
        """Send in order. A send that submits again only queues: its batch goes after the ones before it."""
        self._to_send.extend(batches)
        if self._sending:
            return
        self._sending = True
        try:
            while self._to_send:
                self._send(self._to_send.popleft())
        finally:
            self._sending = False

    def _send(self, batch: SendBatch[_T]) -> None:
        entries = tuple(e for e in batch.entries if not self._withdrawn(e))
        if not entries:
            self._over()
            return
        try:
            result = self._send_batch([entry.request for entry in entries])
        except Exception as error:  # noqa: BLE001 - goes to every caller whose request was in it
            self._failed(entries, error)
            return
        if isinstance(result, concurrent.futures.Future):
            pending: asyncio.Future[Any] = asyncio.wrap_future(result, loop=self._loop)
        elif hasattr(result, "__await__"):
            pending = asyncio.ensure_future(result, loop=self._loop)
        else:
            self._settled(entries, result)
            return
        self._tasks.add(pending)
        pending.add_done_callback(functools.partial(self._on_result, entries))

    def _withdrawn(self, entry: Entry[_T]) -> bool:
        if not entry.ticket.cancelled():
            return False
        self._core.settle(entry)
        self._tell(entry, BatchAborted("cancelled before it was sent"))
        return True

    def _on_result(self, entries: tuple[Entry[_T], ...], pending: asyncio.Future[Any]) -> None:
        self._tasks.discard(pending)
        if pending.cancelled():
            self._failed(entries, asyncio.CancelledError("the send was cancelled"))
            return
        error = pending.exception()
        if error is not None:
            self._failed(entries, error)
        else:
            self._settled(entries, pending.result())

    def _failed(self, entries: tuple[Entry[_T], ...], cause: BaseException) -> None:
        for entry in entries:
            if self._core.settle(entry, failed=True):
                error = BatchSendFailed(f"sending {len(entries)} requests failed: {cause!r}")
                error.__cause__ = cause
                self._tell(entry, error)
        self._over()

    def _settled(self, entries: tuple[Entry[_T], ...], result: object) -> None:
        for entry, error in zip(entries, unpack_outcomes(result, len(entries))):
            if self._core.settle(entry, failed=error is not None):
                self._tell(entry, error)
        self._over()

    def _over(self) -> None:
        self._perform(self._core.send_over())
        self._wake_idle()

    def _wake_idle(self) -> None:
        if not self._core.outstanding and self._idle:
            waiting, self._idle = self._idle, []
            for idle in waiting:
                if not idle.done():
                    idle.set_result(None)

    def _tell(self, entry: Entry[_T], error: BaseException | None) -> None:
        ticket: asyncio.Future[None] = entry.ticket
        if not ticket.done():
            if error is None:
                ticket.set_result(None)
            else:
                ticket.set_exception(error)
                # Read once, so that an ignored ticket is not reported as forgotten; ``rollback`` has the error as well.
                ticket.exception()
        if error is not None and self._rollback is not None:
            self._rollback(entry.request, error)

    def _after_fork_in_child(self) -> None:
        # The requests are the parent's, and so is the loop.
        self._core.drop()
        self._loop = None
        self._timer = None
        self._to_send.clear()
        self._sending = False
        self._idle.clear()
        self._tasks.clear()
