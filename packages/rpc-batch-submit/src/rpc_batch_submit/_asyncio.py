"""The asyncio driver: submits from one event loop, timer by the loop, never blocking it."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Hashable
from types import TracebackType
from typing import Any, TypeVar

from rpc_batch_submit._batcher import EntryState
from rpc_batch_submit._config import BatchSubmitConfig
from rpc_batch_submit._driver import Driver, Outcome
from rpc_batch_submit._errors import BatchAborted, BatchSendUnknown, BatchUsageError
from rpc_batch_submit._hooks import Hooks

_T = TypeVar("_T")


class AsyncioBatchSubmitter(Driver[_T]):
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
            send timed out, its peer died, the worker's answer made no sense. Here the caller aborts it at the worker. Only
            ``True`` keeps the registration (an answer may still come) and skips ``rollback``.
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
        hooks = Hooks(send_batch, register, rollback, on_unknown, refused, size_of, id_of, bypass)
        super().__init__(hooks, config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        #: Of those that wait for everything to be settled.
        self._idle: list[asyncio.Future[None]] = []

    def submit(self, request: _T) -> asyncio.Future[None]:
        """Take a request; returns at once.

        Returns:
            A future: None once the batch was accepted, or this request's error. Ignoring it is fine: errors reach
            ``rollback`` too. Cancelling it while the request is buffered removes the request.

        Raises:
            BatchClosed, BatchBackpressure, BatchUsageError: Not taken, not registered.
        """
        super()._enter()
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._leave_closed_loop()
        # Not if a hook has submitted from here meanwhile.
        if self._loop is not loop:
            if self._loop is not None and self._core.outstanding:
                raise BatchUsageError("this submitter has requests on another event loop")
            self._loop = loop
            self._timer = None
        looked_at = self._hooks.look_at(request)
        ticket: asyncio.Future[None] = loop.create_future()
        return self._take(request, looked_at, ticket)  # type: ignore[no-any-return]

    async def aclose(self, timeout_s: float | None = None) -> bool:
        """Take nothing more, send what is buffered, wait until everything is settled; True if it was in time.

        It does not wait in the task of a send of its own, which would wait for itself.
        """
        self.close()
        if not self._core.outstanding:
            return True
        if asyncio.current_task() in self._awaited.values():
            return False
        idle: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._idle.append(idle)
        try:
            done, _ = await asyncio.wait((idle,), timeout=timeout_s)
        finally:
            self._idle.remove(idle)
        return bool(done)

    def close(self) -> None:
        """Take nothing more and send what is buffered, without waiting for the outcomes (``aclose`` does)."""
        self._enter()
        self._shut()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def __aenter__(self) -> AsyncioBatchSubmitter[_T]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _enter(self) -> None:
        super()._enter()
        if self._loop is not None and self._loop.is_running() and asyncio._get_running_loop() is not self._loop:
            raise BatchUsageError("this submitter's event loop runs in another thread: call_soon_threadsafe")
        self._leave_closed_loop()

    # ---- the timer

    def _now_s(self) -> float:
        return 0.0 if self._loop is None else self._loop.time()

    def _arm(self) -> None:
        due_s = self._core.due_s()
        if due_s is not None and self._timer is None and self._loop is not None:
            self._timer = self._loop.call_at(due_s, self._on_timer)

    def _on_timer(self) -> None:
        me = object()
        try:
            # Nobody contends for the lock, but whoever breaks into this is refused.
            with self._lock:
                self._timer = None
                due_s = self._core.due_s()
                if due_s is None or self._loop is None:
                    return
                # The loop may call a little early (its clock's resolution); the buffer may also be a younger one.
                if due_s - self._loop.time() > 1e-4:
                    self._arm()
                    return
                self._to_send.extend(self._core.tick(due_s))
            self._drain(me)
        except BaseException:
            self._recover(me)
            raise

    # ---- tickets

    def _changed(self) -> None:
        if not self._core.outstanding:
            for idle in self._idle:
                if not idle.done():
                    idle.set_result(None)

    def _begin(self, ticket: asyncio.Future[None]) -> bool:
        return not ticket.cancelled()

    def _tell(self, ticket: asyncio.Future[None], error: BaseException | None) -> None:
        try:
            if ticket.done():
                return
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

    def _future_of(self, result: Any) -> Outcome | None:
        if isinstance(result, concurrent.futures.Future):
            return asyncio.wrap_future(result, loop=self._loop)
        if not hasattr(result, "__await__"):
            return None
        made: asyncio.Future[Any] = asyncio.ensure_future(result, loop=self._loop)
        return made

    def _cancelled(self) -> BaseException:
        return asyncio.CancelledError("the send was cancelled")

    # ---- a loop that was closed

    def _leave_closed_loop(self) -> None:
        """Nothing ends any more on a loop that was closed: its buffered requests were never sent, the others perhaps served."""
        loop = self._loop
        if loop is None or not loop.is_closed():
            return
        for entry in self._core.entries:
            sent = entry.state is EntryState.SENT
            error: BaseException = BatchSendUnknown("its event loop was closed before its outcome came")
            if not sent:
                error = BatchAborted("its event loop was closed before it was sent")
            self._end(entry, error)
            with self._lock:
                self._core.settle(entry, failed=sent, unknown=sent)
        # A hook that submits again has done all this already, and its new request belongs to the loop that runs now.
        if self._loop is loop:
            self._forget_all()

    def _forget_all(self) -> None:
        # In a forked child the loop is the parent's, too.
        super()._forget_all()
        self._idle.clear()
        self._loop = None

    def __del__(self) -> None:
        # The loop's own references are gone once it is closed; whoever registered a request hears of its end all the same.
        if hasattr(self, "_idle"):
            self._leave_closed_loop()
