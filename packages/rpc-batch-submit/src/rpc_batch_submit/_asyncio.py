"""The asyncio driver: submits from one event loop, timer by the loop, never blocking it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from types import TracebackType
from typing import Any, Generic, TypeVar

from rpc_batch_submit._batcher import Batcher, BatchStatistics, Entry, SendBatch
from rpc_batch_submit._config import BatchSubmitConfig
from rpc_batch_submit._errors import BatchAborted, BatchSendUnknown, BatchUsageError
from rpc_batch_submit._hooks import Hooks, first_interrupt
from rpc_batch_submit._outcomes import is_unknown, unpack_outcomes

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
        config: When to send; None for ``BatchSubmitConfig.from_env()``.
        register: Called with each request that was checked, before it is sent, in order of submission, in every mode, so that
            an answer never meets an unknown request. If it raises, ``submit`` raises and nothing was taken.
        rollback: Called with (request, error) when a registered request is not to be tracked any more: it was refused, its send
            failed, or it was aborted while buffered. What it raises is logged.
        on_unknown: Called with (request, error) before ``rollback`` when the request may have been served all the same: the
            send timed out, its peer died, the worker's answer made no sense. Here the caller aborts it at the worker. A true
            result keeps the registration (an answer may still come) and skips ``rollback``.
        refused: Whether the exception of a failed send says that nothing was served; None for ``never_ran``.
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
        on_unknown: Callable[[_T, BaseException], object] | None = None,
        refused: Callable[[BaseException], bool] | None = None,
        size_of: Callable[[_T], int] | None = None,
        id_of: Callable[[_T], Hashable] | None = None,
        bypass: Callable[[], bool] | None = None,
    ) -> None:
        self._hooks = Hooks(send_batch, register, rollback, on_unknown, refused, size_of, id_of, bypass)
        self._config = BatchSubmitConfig.from_env() if config is None else config
        self._core: Batcher[_T] = Batcher(self._config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._to_send: deque[SendBatch[_T]] = deque()
        self._sending = False
        self._idle: list[asyncio.Future[None]] = []
        #: Sends under way, with their requests.
        self._in_flight: dict[asyncio.Future[Any], tuple[Entry[_T], ...]] = {}
        #: Everything that was buffered and not settled, for the day its loop is closed.
        self._open: dict[Entry[_T], None] = {}
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
            self._leave_closed_loop()
            if self._loop is not None and self._core.outstanding:
                raise BatchUsageError("this submitter has requests on another event loop")
            self._loop = loop
            self._timer = None
        hooks, core = self._hooks, self._core
        request_id, size_bytes, bypass = hooks.look_at(request)
        ticket: asyncio.Future[None] = loop.create_future()
        entry = core.admit(request, request_id=request_id, size_bytes=size_bytes, ticket=ticket)
        try:
            if hooks.register is not None:
                hooks.register(request)
            self._open[entry] = None
            batches = core.buffer(entry, loop.time(), bypass=bypass)
        except BaseException:
            core.withdraw(entry)
            self._open.pop(entry, None)
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
        self._leave_closed_loop()
        entry = self._core.abort(request_id)
        if entry is None:
            return False
        self._open.pop(entry, None)
        self._tell(entry, BatchAborted(f"request {request_id!r} was aborted before it was sent"))
        self._wake_idle()
        return True

    def flush(self) -> None:
        """Send what is buffered now."""
        self._leave_closed_loop()
        self._perform(self._core.flush())

    async def aclose(self, timeout_s: float | None = None) -> bool:
        """Take nothing more, send what is buffered, wait until everything is settled; True if it was in time."""
        self.close()
        if not self._core.outstanding:
            return True
        idle: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._idle.append(idle)
        done, _ = await asyncio.wait((idle,), timeout=timeout_s)
        return bool(done)

    def close(self) -> None:
        """Take nothing more and send what is buffered, without waiting for the outcomes (``aclose`` does)."""
        self._leave_closed_loop()
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
            result = self._hooks.send_batch([entry.request for entry in entries])
            pending: asyncio.Future[Any] | None = None
            if isinstance(result, concurrent.futures.Future):
                pending = asyncio.wrap_future(result, loop=self._loop)
            elif hasattr(result, "__await__"):
                pending = asyncio.ensure_future(result, loop=self._loop)
            if pending is not None:
                self._in_flight[pending] = entries
                pending.add_done_callback(self._on_result)
                return
        except BaseException as error:
            # Also an interrupt: the batch is over, its requests perhaps served.
            self._failed(entries, error)
            if not isinstance(error, Exception):
                raise
            return
        self._finish(entries, unpack_outcomes(result, len(entries)))

    def _withdrawn(self, entry: Entry[_T]) -> bool:
        if not entry.ticket.cancelled():
            return False
        self._core.settle(entry)
        self._open.pop(entry, None)
        self._tell(entry, BatchAborted("cancelled before it was sent"))
        return True

    def _on_result(self, pending: asyncio.Future[Any]) -> None:
        entries = self._in_flight.pop(pending, None)
        if entries is None:
            return
        if pending.cancelled():
            self._failed(entries, asyncio.CancelledError("the send was cancelled"))
            return
        error = pending.exception()
        if error is not None:
            self._failed(entries, error)
        else:
            self._finish(entries, unpack_outcomes(pending.result(), len(entries)))

    def _failed(self, entries: tuple[Entry[_T], ...], cause: BaseException) -> None:
        self._finish(entries, self._hooks.send_failures(cause, len(entries)))

    def _finish(self, entries: tuple[Entry[_T], ...], outcomes: list[BaseException | None]) -> None:
        """A send is over: settle its requests, tell their callers, go on with what waited behind it."""
        interrupt: BaseException | None = None
        try:
            for entry, error in zip(entries, outcomes):
                self._open.pop(entry, None)
                if not self._core.settle(entry, failed=error is not None, unknown=is_unknown(error)):
                    continue
                try:
                    self._tell(entry, error)
                except BaseException as raised:  # noqa: BLE001 - the other requests of the batch come first
                    interrupt = first_interrupt(interrupt, raised, "telling a request's outcome")
        finally:
            self._over()
        if interrupt is not None:
            raise interrupt

    def _leave_closed_loop(self) -> None:
        """Nothing ends any more on a loop that was closed: its buffered requests were never sent, the others perhaps served."""
        loop = self._loop
        if loop is None or not loop.is_closed():
            return
        self._loop = None
        self._timer = None
        self._to_send.clear()
        self._sending = False
        self._idle.clear()
        self._in_flight.clear()
        stranded = list(self._open)
        self._open.clear()
        buffered = set(self._core.drop())
        for entry in stranded:
            if entry in buffered:
                error: BaseException = BatchAborted("its event loop was closed before it was sent")
            else:
                error = BatchSendUnknown("its event loop was closed before its outcome came")
            self._tell(entry, error)

    def __del__(self) -> None:
        # The loop's own references are gone once it is closed; whoever registered a request hears of its end all the same.
        if hasattr(self, "_in_flight"):
            self._leave_closed_loop()

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
        try:
            if not ticket.done():
                if error is None:
                    ticket.set_result(None)
                else:
                    ticket.set_exception(error)
                    # Read once, so that an ignored ticket is not reported as forgotten; ``rollback`` has the error as well.
                    ticket.exception()
        except RuntimeError:
            # A closed loop cannot run the ticket's callbacks; the ticket itself has its outcome.
            if not ticket.get_loop().is_closed():
                raise
        finally:
            if error is not None:
                self._hooks.failed(entry.request, error)

    def _after_fork_in_child(self) -> None:
        # The requests are the parent's, and so is the loop.
        self._core.drop()
        self._loop = None
        self._timer = None
        self._to_send.clear()
        self._sending = False
        self._idle.clear()
        self._in_flight.clear()
        self._open.clear()
