"""The thread driver: submits from any thread, one timer thread that exists only while batching is on."""

from __future__ import annotations

import concurrent.futures
import functools
import inspect
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from types import TracebackType
from typing import Any, Generic, TypeVar

from rpc_batch_submit._batcher import Batcher, BatchStatistics, Entry, EntryState, SendBatch, ends_of
from rpc_batch_submit._config import BatchSubmitConfig
from rpc_batch_submit._errors import BatchAborted, BatchSubmitError, BatchUsageError
from rpc_batch_submit._hooks import Hooks, first_interrupt
from rpc_batch_submit._outcomes import is_unknown, unpack_outcomes

_T = TypeVar("_T")
_logger = logging.getLogger("rpc_batch_submit")
_submitters: weakref.WeakSet[ThreadBatchSubmitter[Any]] = weakref.WeakSet()
#: Submitters with something in their buffer: alive until their timer has sent it, whoever has forgotten them.
_waiting: set[ThreadBatchSubmitter[Any]] = set()


def _after_fork_in_child() -> None:
    for submitter in list(_submitters):
        submitter._after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)


class ThreadBatchSubmitter(Generic[_T]):
    """Coalesces submits of any threads into calls of ``send_batch``.

    Batches leave in order, one ``send_batch`` call at a time, on whichever thread completed the first of them; other
    threads queue theirs behind it and go on. No lock is held across the caller's own functions.
    Arguments as in ``AsyncioBatchSubmitter``; an awaitable result is an error here, a ``concurrent.futures.Future`` is
    what one wants. A submitter that is forgotten with requests in its buffer lives until they have been sent.
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
        # Re-entrant: an interrupt handler or a collection may submit, abort or close inside any of these sections. Entered and
        # left by itself: the condition's own ``__exit__`` is Python, and an interrupt at its beginning would keep it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._timer: threading.Thread | None = None
        self._timer_stop = False
        self._to_send: deque[SendBatch[_T]] = deque()
        #: Batches whose sends have begun and are not over, with the requests that were handed over (the others were cancelled).
        self._under_way: dict[SendBatch[_T], tuple[Entry[_T], ...]] = {}
        #: Those whose futures will tell their end.
        self._awaited: dict[SendBatch[_T], None] = {}
        #: Who sends what is queued.
        self._sender: object = None
        _submitters.add(self)

    def submit(self, request: _T) -> concurrent.futures.Future[None]:
        """Take a request; same contract as ``AsyncioBatchSubmitter.submit``."""
        hooks, core = self._hooks, self._core
        request_id, size_bytes, bypass = hooks.look_at(request)
        ticket: concurrent.futures.Future[None] = concurrent.futures.Future()
        entry: Entry[_T] | None = None
        registered: list[object] = []
        try:
            with self._lock:
                entry = core.admit(request, request_id=request_id, size_bytes=size_bytes, ticket=ticket)
            if hooks.register is not None:
                # In one step of the interpreter: afterwards it is known whether it was done.
                registered.extend(map(hooks.register, (request,)))
            with self._lock:
                was_empty = core.due_s() is None
                batches = core.buffer(entry, time.monotonic(), bypass=bypass)
                self._to_send.extend(batches)
                if was_empty and core.due_s() is not None:
                    self._wake_timer()
            if batches:
                self._drain(ticket)
            return ticket
        except BaseException as error:
            if entry is not None or not isinstance(error, BatchSubmitError):
                self._not_taken(ticket, error, registered=bool(registered))
            raise

    def _not_taken(self, ticket: object, error: BaseException, *, registered: bool) -> None:
        """``submit`` raises: what has not left is as if it had never been there."""
        with self._lock:
            self._mend(ticket)
            entry = self._core.find(ticket)
            buffered = entry is not None and self._core.remove(entry)
            self._changed.notify_all()
        if (
            entry is not None
            and entry.state is EntryState.SETTLED
            and (registered or buffered or not isinstance(error, Exception))
        ):
            # Also if an interrupt came out of ``register``: it may have been done.
            self._end(entry, BatchAborted(f"interrupted before it was sent: {error!r}"))
        self._drain(ticket)

    def abort(self, request_id: Hashable) -> bool:
        """Remove a request that is still buffered: True, its future raises ``BatchAborted``.

        False: it was sent, abort it there.
        """
        entry: Entry[_T] | None = None
        error = BatchAborted(f"request {request_id!r} was aborted before it was sent")
        try:
            with self._lock:
                entry = self._core.buffered(request_id)
                if entry is None:
                    return False
                self._core.take_back(entry)
                self._changed.notify_all()
            self._end(entry, error)
        except BaseException:
            self._recover(None)
            if entry is not None and entry.state is EntryState.SETTLED:
                self._end(entry, error)
            raise
        return True

    def flush(self) -> None:
        """Send what is buffered now."""
        me = object()
        try:
            with self._lock:
                self._to_send.extend(self._core.flush())
            self._drain(me)
        except BaseException:
            self._recover(me)
            raise

    def close(self, timeout_s: float | None = None) -> bool:
        """Take nothing more, send what is buffered, wait until everything is settled; True if it was in time.

        Args:
            timeout_s: None waits as long as the sends take; 0 does not wait.
        """
        me = object()
        try:
            with self._lock:
                self._timer_stop = True
                self._to_send.extend(self._core.close())
                timer = self._timer
                self._changed.notify_all()
            self._drain(me)
        except BaseException:
            self._recover(me)
            raise
        if timer is not None and timer is not threading.current_thread():
            timer.join(timeout_s)
        with self._lock:
            return self._changed.wait_for(lambda: not self._core.outstanding and self._sender is None, timeout_s)

    def statistics(self) -> BatchStatistics:
        """Counters so far."""
        with self._lock:
            return self._core.statistics()

    def __enter__(self) -> ThreadBatchSubmitter[_T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- the timer

    def _wake_timer(self) -> None:
        """The buffer has become non-empty; called with the lock."""
        _waiting.add(self)
        if self._timer is None:
            timer = threading.Thread(
                target=_run_timer, args=(weakref.ref(self), self._changed), name="batch-submit-timer", daemon=True
            )
            timer.start()
            # Interrupted before this, the next one makes another: two of them do what one does.
            self._timer = timer
        else:
            self._changed.notify_all()

    def _timer_turn(self) -> tuple[bool, float | None]:
        """(go on, seconds to wait); called with the lock."""
        due_s = self._core.due_s()
        if due_s is None:
            _waiting.discard(self)
        if self._timer_stop and due_s is None:
            return False, None
        if due_s is None:
            return True, None
        left_s = due_s - time.monotonic()
        if left_s > 0:
            return True, left_s
        self._to_send.extend(self._core.tick(due_s))
        return True, 0.0

    # ---- sending

    def _drain(self, me: object) -> None:
        """Send what is queued, unless another one is at it; ``me`` is this call's own object."""
        while True:
            batch: SendBatch[_T] | None = None
            try:
                with self._lock:
                    if self._sender is not None or not self._to_send:
                        return
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
        with self._lock:
            if batch in self._to_send:
                # Not begun: it is sent next.
                self._under_way.pop(batch, None)
                return
        if batch not in self._awaited:
            self._failed(batch, error)

    def _leave(self, me: object) -> None:
        with self._lock:
            if self._sender is me:
                self._sender = None
                self._changed.notify_all()

    def _mend(self, me: object) -> None:
        """After an exception out of the middle of something; with the lock."""
        self._leave(me)
        self._to_send.extend(self._core.mend((*self._to_send, *self._under_way)))
        if self._core.due_s() is not None:
            self._wake_timer()
        self._changed.notify_all()

    def _recover(self, me: object) -> None:
        """Go on after it: nothing that was queued waits for the next call."""
        with self._lock:
            self._mend(me)
        self._drain(me)

    def _send(self, batch: SendBatch[_T]) -> None:
        """The first batch of the queue."""
        try:
            with self._lock:
                self._under_way[batch] = ()
                self._to_send.popleft()
            # From here on a ticket is running and cannot be cancelled any more.
            entries = tuple(e for e in batch.entries if e.ticket.set_running_or_notify_cancel())
            self._under_way[batch] = entries
            self._withdraw(batch, entries)
            if not entries:
                self._finish(batch, [])
                return
            result = self._hooks.send_batch([entry.request for entry in entries])
            if isinstance(result, concurrent.futures.Future):
                if result.done():
                    self._on_result(batch, result)
                else:
                    result.add_done_callback(functools.partial(self._on_result, batch))
                    with self._lock:
                        if batch in self._under_way:
                            self._awaited[batch] = None
                return
            if hasattr(result, "__await__"):
                if inspect.iscoroutine(result):
                    result.close()
                raise BatchUsageError("a thread cannot await: send_batch must return a concurrent future")
            self._finish(batch, unpack_outcomes(result, len(entries)))
        except Exception as error:  # noqa: BLE001 - a send's failure is its requests' outcome
            self._not_sent(batch, error)

    def _withdraw(self, batch: SendBatch[_T], handed_over: Sequence[Entry[_T]]) -> None:
        """Requests whose tickets were cancelled while they were buffered end now."""
        if len(handed_over) == len(batch.entries):
            return
        for entry, error in ends_of(batch, handed_over, [None] * len(handed_over)):
            if entry not in handed_over:
                self._end(entry, error)
                with self._lock:
                    self._core.settle(entry)

    def _on_result(self, batch: SendBatch[_T], result: concurrent.futures.Future[Any]) -> None:
        try:
            if result.cancelled():
                raise concurrent.futures.CancelledError("the send was cancelled")
            error = result.exception()
            if error is not None:
                self._failed(batch, error)
            else:
                self._finish(batch, unpack_outcomes(result.result(), len(self._under_way.get(batch, ()))))
        except concurrent.futures.CancelledError as error:
            self._failed(batch, error)
        except BaseException as error:
            # Nobody else will end it.
            self._failed(batch, error)
            raise

    def _failed(self, batch: SendBatch[_T], cause: BaseException) -> None:
        self._finish(batch, self._hooks.send_failures(cause, len(self._under_way.get(batch, ()))))

    def _finish(self, batch: SendBatch[_T], outcomes: list[BaseException | None]) -> None:
        """A send is over, once: tell its callers, settle its requests, go on with what waited behind it."""
        me = object()
        try:
            self._end_batch(batch, outcomes)
            self._drain(me)
        except BaseException:
            self._end_batch(batch, outcomes)
            self._recover(me)
            raise

    def _end_batch(self, batch: SendBatch[_T], outcomes: list[BaseException | None]) -> None:
        """Tell, then settle under one lock: whoever waits for ``close`` finds every ticket done. May be repeated."""
        handed_over = self._under_way.get(batch)
        if handed_over is None:
            return
        interrupt: BaseException | None = None
        ends = ends_of(batch, handed_over, outcomes)
        for entry, error in ends:
            try:
                self._end(entry, error)
            except BaseException as raised:  # noqa: BLE001 - the other requests of the batch come first
                interrupt = first_interrupt(interrupt, raised, "telling a request's outcome")
                self._end(entry, error)
        with self._lock:
            for entry, error in ends:
                self._core.settle(entry, failed=error is not None and entry in handed_over, unknown=is_unknown(error))
            self._awaited.pop(batch, None)
            if self._under_way.pop(batch, None) is not None:
                self._to_send.extend(self._core.send_over())
            self._changed.notify_all()
        if interrupt is not None:
            raise interrupt

    def _end(self, entry: Entry[_T], error: BaseException | None) -> None:
        """Tell the request's caller, and of a failure the caller's functions too. May be repeated."""
        ticket: concurrent.futures.Future[None] = entry.ticket
        try:
            # An aborted entry's ticket is still pending, a sent one's is running; a cancelled one has told its caller.
            if ticket.running() or (not ticket.done() and ticket.set_running_or_notify_cancel()):
                if error is None:
                    ticket.set_result(None)
                else:
                    ticket.set_exception(error)
        finally:
            if error is not None:
                self._hooks.failed(entry, error)

    def _after_fork_in_child(self) -> None:
        # The requests are the parent's; its timer thread and whoever held the lock do not exist here.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._timer = None
        self._to_send.clear()
        self._under_way.clear()
        self._awaited.clear()
        self._sender = None
        self._core.drop()


def _run_timer(reference: weakref.ref[ThreadBatchSubmitter[Any]], changed: threading.Condition) -> None:
    """Sends what has waited long enough.

    Holds no strong reference while it waits for something to be buffered, so a forgotten submitter can go.
    """
    while True:
        with changed:
            submitter: ThreadBatchSubmitter[Any] | None = reference()
            if submitter is None:
                return
            going_on, wait_s = submitter._timer_turn()
            if not going_on:
                return
            if wait_s is None:
                submitter = None
                changed.wait(1.0)
                continue
            if wait_s > 0.0:
                changed.wait(wait_s)
                continue
        try:
            submitter._drain(object())
        except BaseException:  # the timer serves all later requests too; this batch has been settled
            _logger.exception("sending a batch failed")
        submitter = None
