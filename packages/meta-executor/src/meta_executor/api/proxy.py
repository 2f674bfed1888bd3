"""The calling side of an instance's service: submits requests in batches, spreads the one answer stream over them.

The front has one per instance, an instance's API server one for foreign clients. One asyncio loop owns a proxy. A request is
tracked before it is sent, so no answer meets an unknown request; if its send fails, or the worker refuses it, the tracking is
rolled back and the caller learns. How the worker is reached is its :class:`~meta_executor.api.worker_client.WorkerClient`'s
business: same code, same errors.

A reader that is slow costs only itself: its tokens gather in its own record, and what it takes it takes at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets

import numpy as np

from meta_executor import wire
from meta_executor.api.service import Submit
from meta_executor.api.worker_client import WorkerClient
from meta_executor.executor.request import Answers, Notice
from rpc_batch_submit import AsyncioBatchSubmitter, BatchSubmitConfig, BatchSubmitError
from rpc_local_registry import (
    RpcAuthenticationError,
    RpcBackpressure,
    RpcError,
    RpcProtocolMismatch,
    RpcStream,
    RpcUnreachable,
)

#: What is buffered at the end may take so long to be sent (s).
_CLOSE_S = 1.0


class ProxyError(Exception):
    """A request was refused or lost.

    Attributes:
        body: Why, with a code of :mod:`meta_executor.wire`.
        received: Whether the worker may have begun it. False: it certainly has not.
        reached: Whether there was a worker to talk to.
    """

    def __init__(self, body: wire.ErrorBody, *, received: bool = False, reached: bool = True) -> None:
        super().__init__(body.message)
        self.body = body
        self.received = received
        self.reached = reached

    @property
    def code(self) -> str:
        """The body's."""
        return self.body.error


class Tracked:
    """A request on its way, and what has come for it that its reader has not taken."""

    __slots__ = ("_ended", "_error", "_notices", "_only_end", "_tokens", "_waiter", "request_id", "ticket")

    def __init__(self, request_id: int) -> None:
        self.request_id = request_id
        #: Resolves when the worker has taken it, or raises what it was refused with.
        self.ticket: asyncio.Future[None] | None = None
        self._tokens: list[int] = []
        self._notices: list[Notice] = []
        self._error: ProxyError | None = None
        self._ended = False
        self._only_end = False
        self._waiter: asyncio.Future[None] | None = None

    async def next(self, *, whole: bool = False) -> tuple[list[int], list[Notice]]:
        """What has come since the last call; waits for something.

        Args:
            whole: Wait for a notice: whoever wants an answer in one piece is not woken for every token.

        Raises:
            ProxyError: The worker was lost; what had come before was taken already.
        """
        while not (self._notices or (self._tokens and not whole)):
            if self._error is not None:
                raise self._error
            self._only_end = whole
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        tokens, self._tokens = self._tokens, []
        notices, self._notices = self._notices, []
        return tokens, notices

    @property
    def ended(self) -> bool:
        """Its last word has come."""
        return self._ended

    def put_token(self, token: int) -> None:
        """One more token."""
        self._tokens.append(token)
        if not self._only_end:
            self._wake()

    def put_notice(self, notice: Notice) -> None:
        """What is more than a token."""
        self._ended = self._ended or bool(notice.finish_reason)
        self._notices.append(notice)
        self._wake()

    def fail(self, error: ProxyError) -> None:
        """Nothing more will come."""
        self._error = self._error or error
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Proxy:
    """See the module.

    Args:
        worker: Reaches the worker; the caller closes it, after this proxy.
        batching: When a batch is sent.
    """

    def __init__(self, worker: WorkerClient, batching: BatchSubmitConfig) -> None:
        self._worker = worker
        #: Under which the worker knows this proxy.
        self._name = secrets.token_hex(8)
        self._tracked: dict[int, Tracked] = {}
        self._submitter: AsyncioBatchSubmitter[Submit] = AsyncioBatchSubmitter(
            self._send,
            batching,
            register=self._register,
            rollback=self._rollback,
            id_of=lambda submit: submit.request.request_id,
            size_of=lambda submit: int(submit.request.token_ids.nbytes),
        )
        self._reader: asyncio.Task[None] | None = None
        self._lost: ProxyError | None = None

    async def close(self) -> None:
        """Send what is buffered, end the stream, fail what is still tracked."""
        with contextlib.suppress(BatchSubmitError):
            await self._submitter.aclose(timeout_s=_CLOSE_S)
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader
        self._fail_all(_lost("the instance is closing"))

    @property
    def lost(self) -> bool:
        """The worker is gone: nothing can be served any more."""
        return self._lost is not None

    # -- requests -----------------------------------------------------------------------------------------------------

    async def submit(self, submit: Submit) -> Tracked:
        """Track and send; returns when the worker has taken the request.

        Raises:
            ProxyError: It was refused, or could not be sent; it is not tracked.
        """
        request_id = submit.request.request_id
        if self._lost is not None:
            raise _lost(str(self._lost), reached=False)
        if request_id in self._tracked:
            words = f"request {request_id} is here already"
            raise ProxyError(wire.ErrorBody(error=wire.DUPLICATE_REQUEST, message=words, request_id=request_id))
        if self._reader is None:
            # The stream is opened with the first request: who brings none is no subscriber.
            self._open()
        try:
            ticket = self._submitter.submit(submit)
        except BatchSubmitError as error:
            raise ProxyError(wire.ErrorBody(error=wire.BACKPRESSURE, message=str(error))) from error
        ticket.add_done_callback(_retrieve)
        tracked = self._tracked.get(request_id) or Tracked(request_id)
        tracked.ticket = ticket
        try:
            await asyncio.shield(ticket)
        except asyncio.CancelledError:
            self.leave(tracked, "its client has gone")
            raise
        except Exception as error:
            self.forget(tracked)
            raise _refusal(error) from error
        return tracked

    def leave(self, tracked: Tracked, reason: str) -> None:
        """Nobody reads this request's answer any more: stop it, unless its last word has come. Idempotent."""
        known = self._tracked.get(tracked.request_id) is tracked
        self.forget(tracked)
        if known and not tracked.ended:
            self.abort(tracked.request_id, reason)

    def forget(self, tracked: Tracked) -> None:
        """Stop tracking. Idempotent."""
        if self._tracked.get(tracked.request_id) is tracked:
            del self._tracked[tracked.request_id]

    def abort(self, request_id: int, reason: str) -> None:
        """Stop a request: one that is still buffered here is removed, one that was sent is stopped by the worker."""
        if not self._submitter.abort(request_id) and self._lost is None:
            self._worker.stop(request_id, reason)

    async def abort_known(self, request_id: int, reason: str) -> bool:
        """Stop a request that perhaps another client brought. Whether it had an answer to come.

        Raises:
            RpcError: The worker was lost, or did not answer in time: it may not hear of this.
        """
        return self._submitter.abort(request_id) or await self._worker.abort(request_id, reason)

    @property
    def tracked_count(self) -> int:
        """Requests whose answer somebody waits for (count)."""
        return len(self._tracked)

    # -- within -------------------------------------------------------------------------------------------------------

    def _register(self, submit: Submit) -> None:
        self._tracked[submit.request.request_id] = Tracked(submit.request.request_id)

    def _rollback(self, submit: Submit, error: BaseException) -> None:
        tracked = self._tracked.pop(submit.request.request_id, None)
        if tracked is not None:
            tracked.fail(_refusal(error))

    async def _send(self, batch: list[Submit]) -> list[ProxyError | None]:
        outcomes = await self._worker.submit(self._name, batch)
        return [None if body is None else ProxyError(body) for body in outcomes]

    def _open(self) -> None:
        try:
            stream = self._worker.answers(self._name)
        except RpcError as error:
            raise _lost(f"{type(error).__name__}: {error}", reached=False) from error
        self._reader = asyncio.create_task(self._read(stream), name="proxy-answers")

    async def _read(self, stream: RpcStream[Answers]) -> None:
        try:
            async for answers in stream:
                self._spread(answers)
            self._lose("the worker has ended its answer stream")
        except RpcError as error:
            self._lose(f"{type(error).__name__}: {error}", reached=not isinstance(error, _UNREACHED))

    def _spread(self, answers: Answers) -> None:
        """One step's tokens, to the records of their requests."""
        tracked = self._tracked
        for request_id, token in answers.pairs():
            one = tracked.get(request_id)
            # Without a record its reader has left meanwhile.
            if one is not None:
                one.put_token(token)
        for notice in answers.notices:
            one = tracked.get(notice.request_id)
            if one is not None:
                one.put_notice(notice)

    def _lose(self, why: str, *, reached: bool = True) -> None:
        self._lost = _lost(f"the worker is gone: {why}", reached=reached)
        self._fail_all(self._lost)

    def _fail_all(self, error: ProxyError) -> None:
        for tracked in list(self._tracked.values()):
            tracked.fail(error)


#: The worker was never reached: nothing of a request can have arrived.
_UNREACHED = (RpcUnreachable, RpcAuthenticationError, RpcProtocolMismatch)


def _lost(why: str, *, reached: bool = True) -> ProxyError:
    return ProxyError(wire.ErrorBody(error=wire.INTERNAL, message=why), received=reached, reached=reached)


def _refusal(error: BaseException) -> ProxyError:
    """What a failed ticket says."""
    if isinstance(error, ProxyError):
        return error
    cause = error.__cause__ if isinstance(error, BatchSubmitError) and error.__cause__ is not None else error
    if isinstance(cause, RpcBackpressure):
        return ProxyError(wire.ErrorBody(error=wire.BACKPRESSURE, message=str(cause)))
    reached = not isinstance(cause, _UNREACHED)
    return _lost(f"{type(cause).__name__}: {cause}", reached=reached)


def _retrieve(future: object) -> None:
    """Look at a future's error: it has reached its request another way, and asyncio should not complain of it."""
    if isinstance(future, asyncio.Future) and not future.cancelled():
        future.exception()


def int32(token_ids: list[int]) -> np.ndarray:
    """A prompt as the one buffer that it stays: int32, shape (tokens,)."""
    return np.asarray(token_ids, dtype=np.int32)
