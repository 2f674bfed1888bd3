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

from rpc_batch_submit._batcher import Batcher, BatchStatistics, Entry, EntryState, SendBatch, ends_of
from rpc_batch_submit._config import BatchSubmitConfig
from rpc_batch_submit._errors import BatchAborted, BatchSendUnknown, BatchSubmitError, BatchUsageError
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
        #: Batches whose sends have begun and are not over, with the requests that were handed over (the others were cancelled).
        self._under_way: dict[SendBatch[_T], tuple[Entry[_T], ...]] = {}
        #: Those that have a future.
        self._in_flight: dict[asyncio.Future[Any], SendBatch[_T]] = {}
        #: Who sends what is queued.
        self._sender: object = None
        self._idle: list[asyncio.Future[None]] = []
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
        entry: Entry[_T] | None = None
        registered: list[object] = []
        try:
            entry = core.admit(request, request_id=request_id, size_bytes=size_bytes, ticket=ticket)
            if hooks.register is not None:
                # In one step of the interpreter: afterwards it is known whether it was done.
                registered.extend(map(hooks.register, (request,)))
            batches = core.buffer(entry, loop.time(), bypass=bypass)
            self._to_send.extend(batches)
            if batches:
                self._perform(ticket)
            self._arm()
            return ticket
        except BaseException as error:
            if entry is not None or not isinstance(error, BatchSubmitError):
                self._not_taken(ticket, error, registered=bool(registered))
            raise

    def _not_taken(self, ticket: object, error: BaseException, *, registered: bool) -> None:
        """``submit`` raises: what has not left is as if it had never been there."""
        self._mend(ticket)
        entry = self._core.find(ticket)
        buffered = entry is not None and self._core.remove(entry)
        if (
            entry is not None
            and entry.state is EntryState.SETTLED
            and (registered or buffered or not isinstance(error, Exception))
        ):
            # Also if an interrupt came out of ``register``: it may have been done.
            self._end(entry, BatchAborted(f"interrupted before it was sent: {error!r}"))
        self._wake_idle()
        self._perform(ticket)

    def abort(self, request_id: Hashable) -> bool:
        """Remove a request that is still buffered: True, its future raises ``BatchAborted``.

        False: it was sent, abort it there.
        """
        self._leave_closed_loop()
        error = BatchAborted(f"request {request_id!r} was aborted before it was sent")
        entry = self._core.buffered(request_id)
        if entry is None:
            return False
        try:
            self._core.take_back(entry)
            self._end(entry, error)
            self._wake_idle()
        except BaseException:
            self._recover(entry)
            if entry.state is EntryState.SETTLED:
                self._end(entry, error)
            self._wake_idle()
            raise
        return True

    def flush(self) -> None:
        """Send what is buffered now."""
        self._leave_closed_loop()
        me = object()
        try:
            self._to_send.extend(self._core.flush())
            self._perform(me)
        except BaseException:
            self._recover(me)
            raise

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
        me = object()
        try:
            self._to_send.extend(self._core.close())
            self._perform(me)
        except BaseException:
            self._recover(me)
            raise
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

    def _arm(self) -> None:
        """See to it that the buffer is looked at when it is due."""
        due_s = self._core.due_s()
        if due_s is not None and self._timer is None and self._loop is not None:
            self._timer = self._loop.call_at(due_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        loop = self._loop
        due_s = self._core.due_s()
        if loop is None or due_s is None:
            return
        # The loop may call a little early (its clock's resolution); the buffer may also be a younger one.
        if due_s - loop.time() > 1e-4:
            self._arm()
            return
        me = object()
        try:
            self._to_send.extend(self._core.tick(due_s))
            self._perform(me)
        except BaseException:
            self._recover(me)
            raise

    def _perform(self, me: object) -> None:
        """Send what is queued, in order; ``me`` is this call's own object.

        A send that submits again only queues: its batch goes after the ones before it.
        """
        while self._to_send and self._sender is None:
            batch: SendBatch[_T] | None = None
            try:
                self._sender = me
                batch = self._to_send[0]
                self._send(batch)
            except BaseException as error:
                if batch is not None:
                    self._not_sent(batch, error)
                raise
            finally:
                self._leave(me)

    def _not_sent(self, batch: SendBatch[_T], error: BaseException) -> None:
        """An exception came out of the middle of the send, perhaps while another one was dealt with."""
        if batch in self._to_send:
            # Not begun: it is sent next.
            self._under_way.pop(batch, None)
        elif batch not in self._in_flight.values():
            self._failed(batch, error)

    def _leave(self, me: object) -> None:
        if self._sender is me:
            self._sender = None

    def _mend(self, me: object) -> None:
        """After an exception out of the middle of something."""
        self._leave(me)
        self._to_send.extend(self._core.mend((*self._to_send, *self._under_way)))
        self._arm()

    def _recover(self, me: object) -> None:
        """Go on after it: nothing that was queued waits for the next call."""
        self._mend(me)
        self._perform(me)

    def _send(self, batch: SendBatch[_T]) -> None:
        """The first batch of the queue."""
        try:
            self._under_way[batch] = ()
            self._to_send.popleft()
            self._under_way[batch] = entries = tuple(e for e in batch.entries if not e.ticket.cancelled())
            self._withdraw(batch, entries)
            if not entries:
                self._finish(batch, [])
                return
            result = self._hooks.send_batch([entry.request for entry in entries])
            pending: asyncio.Future[Any] | None = None
            if isinstance(result, concurrent.futures.Future):
                pending = asyncio.wrap_future(result, loop=self._loop)
            elif hasattr(result, "__await__"):
                pending = asyncio.ensure_future(result, loop=self._loop)
            if pending is not None:
                pending.add_done_callback(self._on_result)
                self._in_flight[pending] = batch
                return
            self._finish(batch, unpack_outcomes(result, len(entries)))
        except Exception as error:  # noqa: BLE001 - a send's failure is its requests' outcome
            self._not_sent(batch, error)

    def _withdraw(self, batch: SendBatch[_T], handed_over: Sequence[Entry[_T]]) -> None:
        """Requests whose tickets were cancelled while they were buffered end now."""
        if len(handed_over) == len(batch.entries):
            return
        for entry, error in ends_of(batch, handed_over, [None] * len(handed_over)):
            if entry not in handed_over:
                self._core.settle(entry)
                self._end(entry, error)

    def _on_result(self, pending: asyncio.Future[Any]) -> None:
        batch = self._in_flight.get(pending)
        if batch is None:
            return
        try:
            if pending.cancelled():
                self._failed(batch, asyncio.CancelledError("the send was cancelled"))
                return
            error = pending.exception()
            if error is not None:
                self._failed(batch, error)
            else:
                self._finish(batch, unpack_outcomes(pending.result(), len(self._under_way.get(batch, ()))))
        except BaseException as error:
            # Nobody else will end it.
            self._failed(batch, error)
            raise
        finally:
            self._in_flight.pop(pending, None)

    def _failed(self, batch: SendBatch[_T], cause: BaseException) -> None:
        self._finish(batch, self._hooks.send_failures(cause, len(self._under_way.get(batch, ()))))

    def _finish(self, batch: SendBatch[_T], outcomes: list[BaseException | None]) -> None:
        """A send is over, once: settle its requests, tell their callers, go on with what waited behind it."""
        me = object()
        try:
            self._end_batch(batch, outcomes)
            self._perform(me)
            self._wake_idle()
        except BaseException:
            self._end_batch(batch, outcomes)
            self._recover(me)
            self._wake_idle()
            raise

    def _end_batch(self, batch: SendBatch[_T], outcomes: list[BaseException | None]) -> None:
        """May be repeated."""
        handed_over = self._under_way.get(batch)
        if handed_over is None:
            return
        interrupt: BaseException | None = None
        for entry, error in ends_of(batch, handed_over, outcomes):
            self._core.settle(entry, failed=error is not None and entry in handed_over, unknown=is_unknown(error))
            try:
                self._end(entry, error)
            except BaseException as raised:  # noqa: BLE001 - the other requests of the batch come first
                interrupt = first_interrupt(interrupt, raised, "telling a request's outcome")
                self._end(entry, error)
        if self._under_way.pop(batch, None) is not None:
            self._to_send.extend(self._core.send_over())
        if interrupt is not None:
            raise interrupt

    def _leave_closed_loop(self) -> None:
        """Nothing ends any more on a loop that was closed: its buffered requests were never sent, the others perhaps served."""
        loop = self._loop
        if loop is None or not loop.is_closed():
            return
        for entry in self._core.entries:
            error: BaseException = BatchSendUnknown("its event loop was closed before its outcome came")
            if entry.state is not EntryState.SENT:
                error = BatchAborted("its event loop was closed before it was sent")
            self._end(entry, error)
        self._forget_all()

    def _forget_all(self) -> None:
        self._core.drop()
        self._to_send.clear()
        self._under_way.clear()
        self._in_flight.clear()
        self._sender = None
        self._idle.clear()
        self._timer = None
        self._loop = None

    def __del__(self) -> None:
        # The loop's own references are gone once it is closed; whoever registered a request hears of its end all the same.
        if hasattr(self, "_in_flight"):
            self._leave_closed_loop()

    def _wake_idle(self) -> None:
        if not self._core.outstanding and self._idle:
            waiting, self._idle = self._idle, []
            for idle in waiting:
                if not idle.done():
                    idle.set_result(None)

    def _end(self, entry: Entry[_T], error: BaseException | None) -> None:
        """Tell the request's caller, and of a failure the caller's functions too. May be repeated."""
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
                self._hooks.failed(entry, error)

    def _after_fork_in_child(self) -> None:
        # The requests are the parent's, and so is the loop.
        self._forget_all()
