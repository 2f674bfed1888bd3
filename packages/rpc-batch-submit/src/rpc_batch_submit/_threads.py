"""The thread driver: submits from any thread, one timer thread that exists only while batching is on."""

from __future__ import annotations

import concurrent.futures
import inspect
import logging
import threading
import time
import weakref
from collections.abc import Callable, Hashable
from types import TracebackType
from typing import Any, TypeVar

from rpc_batch_submit._config import BatchSubmitConfig
from rpc_batch_submit._driver import Driver, Outcome
from rpc_batch_submit._errors import BatchUsageError
from rpc_batch_submit._hooks import Hooks

_T = TypeVar("_T")
_logger = logging.getLogger("rpc_batch_submit")
#: Submitters with something in their buffer: alive until their timer has sent it, whoever has forgotten them.
_waiting: set[ThreadBatchSubmitter[Any]] = set()


class ThreadBatchSubmitter(Driver[_T]):
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
        hooks = Hooks(send_batch, register, rollback, on_unknown, refused, size_of, id_of, bypass)
        super().__init__(hooks, config)
        # Entered and left by the lock itself: the condition's own ``__exit__`` is Python, and an interrupt at its beginning
        # would keep it locked.
        self._news = threading.Condition(self._lock)
        self._timer: threading.Thread | None = None
        #: When the timer was last told to look.
        self._armed_s: float | None = None

    def submit(self, request: _T) -> concurrent.futures.Future[None]:
        """Take a request; same contract as ``AsyncioBatchSubmitter.submit``."""
        self._enter()
        looked_at = self._hooks.look_at(request)
        ticket: concurrent.futures.Future[None] = concurrent.futures.Future()
        return self._take(request, looked_at, ticket)  # type: ignore[no-any-return]

    def close(self, timeout_s: float | None = None) -> bool:
        """Take nothing more, send what is buffered, wait until everything is settled; True if it was in time.

        Args:
            timeout_s: None waits as long as the sends take; 0 does not wait. Nor does a call from inside one of the caller's
                functions that this submitter calls (``send_batch``, ``rollback``, a ticket's callback): it would wait for
                itself.
        """
        self._enter()
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._shut()
        if self._inside():
            deadline_s = 0.0
        timer = self._timer
        if timer is not None and timer is not threading.current_thread():
            timer.join(_left_s(deadline_s))
        with self._lock:
            return self._news.wait_for(
                lambda: not self._core.outstanding and self._sender is None, _left_s(deadline_s)
            )  # fmt: skip

    def __enter__(self) -> ThreadBatchSubmitter[_T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- the timer

    def _now_s(self) -> float:
        return time.monotonic()

    def _arm(self) -> None:
        due_s = self._core.due_s()
        if due_s is not None and due_s != self._armed_s:
            self._wake_timer()
            self._armed_s = due_s

    def _wake_timer(self) -> None:
        """Another request is the oldest of the buffer."""
        _waiting.add(self)
        if self._timer is None:
            timer = threading.Thread(
                target=_run_timer, args=(weakref.ref(self), self._news), name="batch-submit-timer", daemon=True
            )
            _start(timer)
            # Interrupted before this, the next one makes another: two of them do what one does.
            self._timer = timer
        else:
            self._news.notify_all()

    def _timer_turn(self) -> tuple[bool, float | None]:
        """(go on, seconds to wait); called with the lock."""
        due_s = self._core.due_s()
        if due_s is None:
            _waiting.discard(self)
            self._armed_s = None
        if self._core.closed and due_s is None:
            return False, None
        if due_s is None:
            return True, None
        left_s = due_s - time.monotonic()
        if left_s > 0:
            return True, left_s
        self._to_send.extend(self._core.tick(due_s))
        return True, 0.0

    # ---- tickets

    def _changed(self) -> None:
        self._news.notify_all()

    def _begin(self, ticket: concurrent.futures.Future[None]) -> bool:
        # From here on it is running and cannot be cancelled any more.
        return ticket.set_running_or_notify_cancel()

    def _tell(self, ticket: concurrent.futures.Future[None], error: BaseException | None) -> None:
        # An aborted entry's ticket is still pending, a sent one's is running; a cancelled one has told its caller, and so has
        # one that is told again. To ask first costs as much as to try.
        try:
            if error is None:
                ticket.set_result(None)
            else:
                ticket.set_exception(error)
        except concurrent.futures.InvalidStateError:
            pass

    def _future_of(self, result: object) -> Outcome | None:
        if isinstance(result, concurrent.futures.Future):
            return result
        if hasattr(result, "__await__"):
            if inspect.iscoroutine(result):
                result.close()
            raise BatchUsageError("a thread cannot await: send_batch must return a concurrent future")
        return None

    def _cancelled(self) -> BaseException:
        return concurrent.futures.CancelledError("the send was cancelled")

    def _forget_all(self) -> None:
        super()._forget_all()
        self._news = threading.Condition(self._lock)
        self._timer = None
        self._armed_s = None


def _left_s(deadline_s: float | None) -> float | None:
    return None if deadline_s is None else min(max(deadline_s - time.monotonic(), 0.0), threading.TIMEOUT_MAX)


def _start(thread: threading.Thread) -> None:
    """Start it, and give an interrupt as it came.

    ``start`` waits for the thread in a condition, which an interrupt can break: that one's error then stands in its place.
    (rpc-local-registry has the same few lines: neither package needs the other, and there is no third that both need.)
    """
    try:
        thread.start()
    except RuntimeError as error:
        if thread.ident is None or error.__context__ is None:
            raise
        raise error.__context__ from None


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
