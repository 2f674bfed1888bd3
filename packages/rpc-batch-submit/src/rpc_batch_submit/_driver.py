"""What both drivers do with a request: take it, send its batch, tell its outcome. They differ in what their callers wait on.

An exception may come at any bytecode (an interrupt, which the caller's own signal handler raises): whatever was half done is
then mended (``Batcher.mend``), what ends a request may be repeated, and nothing that was queued waits for the next call.
"""

from __future__ import annotations

import abc
import functools
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Hashable, Sequence
from types import FrameType
from typing import Any, Generic, Protocol, TypeVar

from rpc_batch_submit._batcher import Batcher, BatchStatistics, Entry, EntryState, SendBatch, ends_of
from rpc_batch_submit._config import BatchSubmitConfig
from rpc_batch_submit._errors import BatchAborted, BatchConfigError, BatchSubmitError, BatchUsageError
from rpc_batch_submit._hooks import Hooks, first_interrupt
from rpc_batch_submit._outcomes import is_unknown, told, unpack_outcomes

_T = TypeVar("_T")
_drivers: weakref.WeakSet[Driver[Any]] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for driver in list(_drivers):
        driver._forget_all()


os.register_at_fork(after_in_child=_after_fork_in_child)


class Outcome(Protocol):
    """A future of either kind, as a send gives it."""

    def done(self) -> bool:
        """Whether it has ended."""

    def cancelled(self) -> bool:
        """Whether it was cancelled."""

    def exception(self) -> BaseException | None:
        """Its error."""

    def result(self) -> Any:
        """Its value."""

    def add_done_callback(self, fn: Any, /) -> None:
        """Call when it has ended."""


class Driver(abc.ABC, Generic[_T]):
    """Batches leave in order, one ``send_batch`` at a time, sent by whoever finds nobody sending."""

    def __init__(self, hooks: Hooks[_T], config: BatchSubmitConfig | None) -> None:
        self._hooks = hooks
        self._config = BatchSubmitConfig.from_env() if config is None else config
        if not isinstance(self._config, BatchSubmitConfig):
            raise BatchConfigError(f"config must be a BatchSubmitConfig or None, got {config!r}")
        self._core: Batcher[_T] = Batcher(self._config)
        # Re-entrant, so that a signal handler or a finalizer that calls in here from inside a section does not wait for itself:
        # ``_enter`` refuses it.
        self._lock = threading.RLock()
        self._to_send: deque[SendBatch[_T]] = deque()
        #: Batches whose sends have begun and are not over, with the requests that were handed over (the others were cancelled).
        self._under_way: dict[SendBatch[_T], tuple[Entry[_T], ...]] = {}
        #: Those whose futures will tell their end.
        self._awaited: dict[SendBatch[_T], Outcome] = {}
        #: Who sends what is queued.
        self._sender: object = None
        _drivers.add(self)

    # ---- what differs

    @abc.abstractmethod
    def _now_s(self) -> float:
        """The clock of the delay."""

    @abc.abstractmethod
    def _arm(self) -> None:
        """See to it that the buffer is looked at when it is due; with the lock, and again after an exception out of it."""

    @abc.abstractmethod
    def _changed(self) -> None:
        """Something has ended: whoever waits for all of it looks again; with the lock."""

    @abc.abstractmethod
    def _begin(self, ticket: Any) -> bool:
        """The ticket's request leaves now; False if it was cancelled before."""

    @abc.abstractmethod
    def _tell(self, ticket: Any, error: BaseException | None) -> None:
        """The ticket's outcome, once: whatever has one already keeps it."""

    @abc.abstractmethod
    def _future_of(self, result: object) -> Outcome | None:
        """What the send gave back as a future, if it is one or can be made one."""

    @abc.abstractmethod
    def _cancelled(self) -> BaseException:
        """The error of a send whose future was cancelled."""

    # ---- callers

    def abort(self, request_id: Hashable) -> bool:
        """Remove a request that is still buffered: True, its future raises ``BatchAborted``.

        False: it was sent, abort it there.
        """
        self._enter()
        return self._abort(request_id)

    def _abort(self, request_id: Hashable, *, given_up: bool = False) -> bool:
        """``abort``; with ``given_up`` only if its ticket was cancelled."""
        entry: Entry[_T] | None = None
        error = BatchAborted(f"request {request_id!r} was aborted before it was sent")
        try:
            with self._lock:
                entry = self._core.buffered(request_id)
                if entry is None or (given_up and not entry.ticket.cancelled()):
                    return False
                self._core.take_back(entry)
            # As if it left now: a ticket that was cancelled tells those who wait for it only then.
            self._begin(entry.ticket)
            self._end(entry, error)
        except BaseException:
            self._recover(None)
            if entry is not None and entry.state is EntryState.SETTLED:
                self._end(entry, error)
            raise
        return True

    def flush(self) -> None:
        """Send what is buffered now."""
        self._enter()
        me = object()
        try:
            with self._lock:
                self._to_send.extend(self._core.flush())
            self._drain(me)
        except BaseException:
            self._recover(me)
            raise

    def statistics(self) -> BatchStatistics:
        """Counters so far."""
        with self._lock:
            return self._core.statistics()

    def _enter(self) -> None:
        """A caller comes in. Whoever is in the middle of the bookkeeping must not begin another piece of it.

        Raises:
            BatchUsageError: A signal handler or a finalizer broke into one of this submitter's calls; nothing was done.
        """
        if self._busy():
            raise BatchUsageError(
                "a signal handler or finalizer broke into this submitter's bookkeeping; call from another thread or the loop"
            )

    def _busy(self) -> bool:
        """Whether this thread is in the middle of the bookkeeping: then a signal handler or a finalizer has broken into it."""
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]

    def _inside(self) -> bool:
        """Whether this thread is in a function that this submitter called: to wait for its requests there has no end."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code in _CALLS_OUT and frame.f_locals.get("self") is self:
                return True
            frame = frame.f_back
        return False

    def _take(self, request: _T, looked_at: tuple[Hashable, int, bool], ticket: Any) -> Any:
        """``submit``, with a ticket that nobody else has yet; returns it.

        From in here, and the caller returns it at once: an interrupt between the two would leave a request without a ticket.
        """
        core, register = self._core, self._hooks.register
        request_id, size_bytes, bypass = looked_at
        entry: Entry[_T] | None = None
        registered: list[object] = []
        known = None if request_id is None else core.buffered(request_id)
        if known is not None and known.ticket.cancelled():
            # Its caller gave it up: it need not keep its id until its batch leaves. Asked again with the lock: by then the id
            # may be another thread's, whose request is not given up.
            self._abort(request_id, given_up=True)
        try:
            with self._lock:
                entry = core.admit(request, request_id=request_id, size_bytes=size_bytes, ticket=ticket)
                if register is None:
                    queued = self._put(entry, bypass)
            if register is not None:
                # In one step of the interpreter: afterwards it is known whether it was done.
                registered.extend(map(register, (request,)))
                if not registered:
                    # ``map`` takes it for its own end.
                    raise BatchUsageError("register raised StopIteration")
                with self._lock:
                    queued = self._put(entry, bypass)
            if queued:
                self._drain(ticket)
            return ticket
        except BaseException as error:
            if entry is not None or not isinstance(error, BatchSubmitError):
                self._not_taken(ticket, error, registered=bool(registered))
            raise

    def _put(self, entry: Entry[_T], bypass: bool) -> bool:
        """Buffer an admitted request; whether there is something to send now. With the lock."""
        core = self._core
        batches = core.buffer(entry, self._now_s(), bypass=bypass)
        if core.oldest is entry:
            self._arm()
        self._to_send.extend(batches)
        return bool(batches)

    def _not_taken(self, ticket: object, error: BaseException, *, registered: bool) -> None:
        """``submit`` raises: what has not left is as if it had never been there."""
        with self._lock:
            self._mend(ticket)
            entry = self._core.find(ticket)
            buffered = entry is not None and self._core.remove(entry)
        if (
            entry is not None
            and entry.state is EntryState.SETTLED
            and (registered or buffered or not isinstance(error, Exception))
        ):
            # Also if an interrupt came out of ``register``: it may have been done.
            self._end(entry, BatchAborted(f"interrupted before it was sent: {told(error)}"))
        self._go_on(ticket)

    def _shut(self) -> None:
        """Take nothing more, send what is buffered."""
        me = object()
        try:
            with self._lock:
                self._to_send.extend(self._core.close())
                self._changed()
            self._drain(me)
        except BaseException:
            self._recover(me)
            raise

    # ---- sending

    def _drain(self, me: object) -> None:
        """Send what is queued, in order, unless another one is at it; ``me`` is this call's own object.

        A send that submits again only queues: its batch goes after the ones before it.
        """
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
                self._changed()

    def _mend(self, me: object) -> None:
        """After an exception out of the middle of something; with the lock."""
        self._leave(me)
        self._to_send.extend(self._core.mend((*self._to_send, *self._under_way)))
        self._changed()

    def _go_on(self, me: object) -> None:
        """After it was mended: nothing that was queued waits for the next call."""
        with self._lock:
            self._arm()
        self._drain(me)

    def _recover(self, me: object) -> None:
        with self._lock:
            self._mend(me)
        self._go_on(me)

    def _send(self, batch: SendBatch[_T]) -> None:
        """The first batch of the queue."""
        begin = self._begin
        try:
            with self._lock:
                self._under_way[batch] = ()
                self._to_send.popleft()
            entries = tuple(entry for entry in batch.entries if begin(entry.ticket))
            self._under_way[batch] = entries
            self._withdraw(batch, entries)
            if not entries:
                self._finish(batch, [])
                return
            result = self._hooks.send_batch([entry.request for entry in entries])
            pending = self._future_of(result)
            if pending is None:
                self._finish(batch, unpack_outcomes(result, len(entries)))
            elif pending.done():
                self._on_result(batch, pending)
            else:
                pending.add_done_callback(functools.partial(self._on_result, batch))
                with self._lock:
                    if batch in self._under_way:
                        self._awaited[batch] = pending
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

    def _on_result(self, batch: SendBatch[_T], result: Outcome) -> None:
        if self._busy():
            # A signal handler or a finalizer ended the send in the middle of the bookkeeping; another thread waits its turn.
            threading.Thread(target=self._on_result, args=(batch, result), name="batch-submit-end", daemon=True).start()
            return
        try:
            error = self._cancelled() if result.cancelled() else result.exception()
            if error is not None:
                self._failed(batch, error)
            else:
                self._finish(batch, unpack_outcomes(result.result(), len(self._under_way.get(batch, ()))))
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
        """Tell, then settle under one lock: whoever waits for the end finds every ticket done. May be repeated."""
        handed_over = self._under_way.get(batch)
        if handed_over is None:
            return
        interrupt: BaseException | None = None
        ends = ends_of(batch, handed_over, outcomes)
        tell = self._tell
        for entry, error in ends:
            try:
                if error is None:
                    tell(entry.ticket, None)
                else:
                    self._end(entry, error)
            except BaseException as raised:  # noqa: BLE001 - the other requests of the batch come first
                interrupt = first_interrupt(interrupt, raised, "telling a request's outcome")
                self._end(entry, error)
        # Told apart here: an interrupt in a loop that passes things over leaves CPython 3.12 with the lock held.
        served = [entry for entry, error in ends if error is None]
        failed = [(entry, error) for entry, error in ends if error is not None]
        with self._lock:
            for entry, error in failed:
                self._core.settle(entry, failed=entry in handed_over, unknown=is_unknown(error))
            self._core.settle_served(served)
            self._awaited.pop(batch, None)
            if self._under_way.pop(batch, None) is not None:
                self._to_send.extend(self._core.send_over())
            self._changed()
        if interrupt is not None:
            raise interrupt

    def _end(self, entry: Entry[_T], error: BaseException | None) -> None:
        """Tell the request's caller, and of a failure the caller's functions too. May be repeated."""
        try:
            self._tell(entry.ticket, error)
        finally:
            if error is not None:
                self._hooks.failed(entry, error)

    def _forget_all(self) -> None:
        """In a forked child the requests are the parent's, and whoever held the lock does not exist."""
        self._lock = threading.RLock()
        self._core.drop()
        self._to_send.clear()
        self._under_way.clear()
        self._awaited.clear()
        self._sender = None


#: The functions from which the caller's own are called: ``register``, ``send_batch``, a ticket's callbacks, the other hooks.
_CALLS_OUT = frozenset(
    function.__code__ for function in (Driver._take, Driver._send, Driver._end_batch, Driver._end)
)  # fmt: skip
