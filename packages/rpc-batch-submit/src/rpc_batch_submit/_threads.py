"""The thread driver: submits from any thread, one timer thread that exists only while batching is on."""

from __future__ import annotations

import concurrent.futures
import functools
import inspect
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
from rpc_batch_submit._errors import BatchAborted, BatchSendFailed, BatchSubmitError, BatchUsageError
from rpc_batch_submit._outcomes import unpack_outcomes

_T = TypeVar("_T")
_submitters: weakref.WeakSet[ThreadBatchSubmitter[Any]] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for submitter in list(_submitters):
        submitter._after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)


class ThreadBatchSubmitter(Generic[_T]):
    """Coalesces submits of any threads into calls of ``send_batch``.

    Batches leave in order, one ``send_batch`` call at a time, on whichever thread completed the first of them; other
    threads queue theirs behind it and go on. No lock is held across ``send_batch``, ``register`` or ``rollback``.
    Arguments as in ``AsyncioBatchSubmitter``; an awaitable result is an error here, a ``concurrent.futures.Future`` is
    what one wants.
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
        self._changed = threading.Condition(threading.Lock())
        self._timer: threading.Thread | None = None
        self._timer_stop = False
        self._to_send: deque[SendBatch[_T]] = deque()
        self._sending = False
        _submitters.add(self)

    def submit(self, request: _T) -> concurrent.futures.Future[None]:
        """Take a request; same contract as ``AsyncioBatchSubmitter.submit``."""
        size_bytes = 0 if self._size_of is None else self._size_of(request)
        request_id = None if self._id_of is None else self._id_of(request)
        if self._register is not None:
            with self._changed:
                self._core.check()
            self._register(request)
        bypass = self._bypass is not None and self._bypass()
        ticket: concurrent.futures.Future[None] = concurrent.futures.Future()
        try:
            with self._changed:
                was_empty = self._core.due_s() is None
                batches = self._core.add(
                    request,
                    time.monotonic(),
                    request_id=request_id,
                    size_bytes=size_bytes,
                    ticket=ticket,
                    bypass=bypass,
                )
                self._to_send.extend(batches)
                if was_empty and self._core.due_s() is not None:
                    self._wake_timer()
        except BatchSubmitError as error:
            if self._rollback is not None and self._register is not None:
                self._rollback(request, error)
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
            result = self._send_batch([entry.request for entry in entries])
        except Exception as error:  # noqa: BLE001 - goes to every caller whose request was in it
            self._failed(entries, error)
            return
        if isinstance(result, concurrent.futures.Future):
            result.add_done_callback(functools.partial(self._on_result, entries))
        elif hasattr(result, "__await__"):
            if inspect.iscoroutine(result):
                result.close()
            self._failed(entries, BatchUsageError("a thread cannot await: send_batch must return a concurrent future"))
        else:
            self._settled(entries, result)

    def _withdraw(self, entries: list[Entry[_T]]) -> None:
        with self._changed:
            for entry in entries:
                self._core.settle(entry)
        if self._rollback is not None:
            for entry in entries:
                self._rollback(entry.request, BatchAborted("cancelled before it was sent"))

    def _on_result(self, entries: tuple[Entry[_T], ...], result: concurrent.futures.Future[Any]) -> None:
        if result.cancelled():
            self._failed(entries, concurrent.futures.CancelledError("the send was cancelled"))
            return
        error = result.exception()
        if error is not None:
            self._failed(entries, error)
        else:
            self._settled(entries, result.result())

    def _failed(self, entries: tuple[Entry[_T], ...], cause: BaseException) -> None:
        errors: list[BaseException | None] = []
        for _ in entries:
            error = BatchSendFailed(f"sending {len(entries)} requests failed: {cause!r}")
            error.__cause__ = cause
            errors.append(error)
        self._finish(entries, errors)

    def _settled(self, entries: tuple[Entry[_T], ...], result: object) -> None:
        self._finish(entries, unpack_outcomes(result, len(entries)))

    def _finish(self, entries: tuple[Entry[_T], ...], outcomes: list[BaseException | None]) -> None:
        """Tell a batch's callers, then settle it under one lock: whoever waits for ``close`` finds every ticket done."""
        try:
            for entry, error in zip(entries, outcomes):
                if error is None:
                    entry.ticket.set_result(None)
                else:
                    self._tell(entry, error)
        finally:
            settle = self._core.settle
            with self._changed:
                for entry, error in zip(entries, outcomes):
                    settle(entry, failed=error is not None)
            self._over()

    def _over(self) -> None:
        with self._changed:
            self._to_send.extend(self._core.send_over())
            self._changed.notify_all()
        self._drain()

    def _tell(self, entry: Entry[_T], error: BaseException) -> None:
        ticket: concurrent.futures.Future[None] = entry.ticket
        # An aborted entry's ticket is still pending, a sent one's is running; a cancelled one has told its caller already.
        if ticket.running() or (not ticket.done() and ticket.set_running_or_notify_cancel()):
            ticket.set_exception(error)
        if self._rollback is not None:
            self._rollback(entry.request, error)

    def _after_fork_in_child(self) -> None:
        # The requests are the parent's; its timer thread and whoever held the lock do not exist here.
        self._changed = threading.Condition(threading.Lock())
        self._timer = None
        self._to_send.clear()
        self._sending = False
        self._core.drop()


def _run_timer(reference: weakref.ref[ThreadBatchSubmitter[Any]], changed: threading.Condition) -> None:
    """Sends what has waited long enough. Holds no strong reference while it waits, so a forgotten submitter can go."""
    while True:
        with changed:
            submitter: ThreadBatchSubmitter[Any] | None = reference()
            if submitter is None:
                return
            going_on, wait_s = submitter._timer_turn()
            if not going_on:
                return
            if wait_s != 0.0:
                submitter = None
                changed.wait(1.0 if wait_s is None else wait_s)
                continue
        submitter._drain()
        submitter = None
