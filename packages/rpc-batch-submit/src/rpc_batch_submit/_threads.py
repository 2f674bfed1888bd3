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
from collections.abc import Callable, Hashable
from types import TracebackType
from typing import Any, Generic, TypeVar

from rpc_batch_submit._batcher import Batcher, BatchStatistics, Entry, SendBatch
from rpc_batch_submit._config import BatchSubmitConfig
from rpc_batch_submit._errors import BatchAborted, BatchUsageError
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
        # Re-entrant: an interrupt handler or a collection may submit, abort or close inside any of these sections.
        self._changed = threading.Condition(threading.RLock())
        self._timer: threading.Thread | None = None
        self._timer_stop = False
        self._to_send: deque[SendBatch[_T]] = deque()
        self._sending = False
        _submitters.add(self)

    def submit(self, request: _T) -> concurrent.futures.Future[None]:
        """Take a request; same contract as ``AsyncioBatchSubmitter.submit``."""
        hooks, core = self._hooks, self._core
        request_id, size_bytes, bypass = hooks.look_at(request)
        ticket: concurrent.futures.Future[None] = concurrent.futures.Future()
        with self._changed:
            entry = core.admit(request, request_id=request_id, size_bytes=size_bytes, ticket=ticket)
        try:
            if hooks.register is not None:
                hooks.register(request)
            with self._changed:
                was_empty = core.due_s() is None
                batches = core.buffer(entry, time.monotonic(), bypass=bypass)
                self._to_send.extend(batches)
                if was_empty and core.due_s() is not None:
                    self._wake_timer()
        except BaseException:
            with self._changed:
                core.withdraw(entry)
                self._changed.notify_all()
            raise
        if batches:
            self._drain()
        return ticket

    def abort(self, request_id: Hashable) -> bool:
        """Remove a request that is still buffered: True, its future raises ``BatchAborted``.

        False: it was sent, abort it there.
        """
        with self._changed:
            entry = self._core.abort(request_id)
            self._changed.notify_all()
        if entry is None:
            return False
        self._tell(entry, BatchAborted(f"request {request_id!r} was aborted before it was sent"))
        return True

    def flush(self) -> None:
        """Send what is buffered now."""
        with self._changed:
            self._to_send.extend(self._core.flush())
        self._drain()

    def close(self, timeout_s: float | None = None) -> bool:
        """Take nothing more, send what is buffered, wait until everything is settled; True if it was in time.

        Args:
            timeout_s: None waits as long as the sends take; 0 does not wait.
        """
        with self._changed:
            self._to_send.extend(self._core.close())
            self._timer_stop = True
            timer = self._timer
            self._changed.notify_all()
        self._drain()
        if timer is not None and timer is not threading.current_thread():
            timer.join(timeout_s)
        with self._changed:
            return self._changed.wait_for(lambda: not self._core.outstanding and not self._sending, timeout_s)

    def statistics(self) -> BatchStatistics:
        """Counters so far."""
        with self._changed:
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
            self._timer = threading.Thread(
                target=_run_timer, args=(weakref.ref(self), self._changed), name="batch-submit-timer", daemon=True
            )
            self._timer.start()
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

    def _drain(self) -> None:
        """Send what is queued, unless another thread is at it."""
        while True:
            with self._changed:
                if self._sending or not self._to_send:
                    return
                self._sending = True
                batch = self._to_send.popleft()
            try:
                self._send(batch)
            finally:
                with self._changed:
                    self._sending = False
                    self._changed.notify_all()

    def _send(self, batch: SendBatch[_T]) -> None:
        # From here on a ticket is running and cannot be cancelled any more.
        entries = batch.entries
        withdrawn = [entry for entry in entries if not entry.ticket.set_running_or_notify_cancel()]
        if withdrawn:
            self._withdraw(withdrawn)
            entries = tuple(entry for entry in entries if entry not in withdrawn)
        if not entries:
            self._over()
            return
        try:
            result = self._hooks.send_batch([entry.request for entry in entries])
            if isinstance(result, concurrent.futures.Future):
                result.add_done_callback(functools.partial(self._on_result, entries))
                return
            if hasattr(result, "__await__"):
                if inspect.iscoroutine(result):
                    result.close()
                raise BatchUsageError("a thread cannot await: send_batch must return a concurrent future")
        except BaseException as error:
            # Also an interrupt: the batch is over, its requests perhaps served.
            self._failed(entries, error)
            if not isinstance(error, Exception):
                raise
            return
        self._finish(entries, unpack_outcomes(result, len(entries)))

    def _withdraw(self, entries: list[Entry[_T]]) -> None:
        with self._changed:
            for entry in entries:
                self._core.settle(entry)
        for entry in entries:
            self._hooks.failed(entry.request, BatchAborted("cancelled before it was sent"))

    def _on_result(self, entries: tuple[Entry[_T], ...], result: concurrent.futures.Future[Any]) -> None:
        if result.cancelled():
            self._failed(entries, concurrent.futures.CancelledError("the send was cancelled"))
            return
        error = result.exception()
        if error is not None:
            self._failed(entries, error)
        else:
            self._finish(entries, unpack_outcomes(result.result(), len(entries)))

    def _failed(self, entries: tuple[Entry[_T], ...], cause: BaseException) -> None:
        self._finish(entries, self._hooks.send_failures(cause, len(entries)))

    def _finish(self, entries: tuple[Entry[_T], ...], outcomes: list[BaseException | None]) -> None:
        """Tell a batch's callers, then settle it under one lock: whoever waits for ``close`` finds every ticket done."""
        interrupt: BaseException | None = None
        try:
            for entry, error in zip(entries, outcomes):
                try:
                    if error is None:
                        entry.ticket.set_result(None)
                    else:
                        self._tell(entry, error)
                except BaseException as raised:  # noqa: BLE001 - the other requests of the batch come first
                    interrupt = first_interrupt(interrupt, raised, "telling a request's outcome")
        finally:
            with self._changed:
                for entry, error in zip(entries, outcomes):
                    self._core.settle(entry, failed=error is not None, unknown=is_unknown(error))
            self._over()
        if interrupt is not None:
            raise interrupt

    def _over(self) -> None:
        with self._changed:
            self._to_send.extend(self._core.send_over())
            self._changed.notify_all()
        self._drain()

    def _tell(self, entry: Entry[_T], error: BaseException) -> None:
        ticket: concurrent.futures.Future[None] = entry.ticket
        try:
            # An aborted entry's ticket is still pending, a sent one's is running; a cancelled one has told its caller.
            if ticket.running() or (not ticket.done() and ticket.set_running_or_notify_cancel()):
                ticket.set_exception(error)
        finally:
            self._hooks.failed(entry.request, error)

    def _after_fork_in_child(self) -> None:
        # The requests are the parent's; its timer thread and whoever held the lock do not exist here.
        self._changed = threading.Condition(threading.RLock())
        self._timer = None
        self._to_send.clear()
        self._sending = False
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
            submitter._drain()
        except BaseException:  # the timer serves all later requests too; this batch has been settled
            _logger.exception("sending a batch failed")
        submitter = None
