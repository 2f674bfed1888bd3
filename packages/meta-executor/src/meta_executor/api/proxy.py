"""Between the API server and rank 0's worker: tracks requests, submits them in batches, spreads the response stream.

One asyncio loop owns a proxy. A request is tracked before it is sent, in every mode, so no answer meets an unknown request;
if its send fails, or the worker refuses it, the tracking is rolled back and the caller learns. The worker is reached through
one ``RpcClient``: directly when it lives in this process and the fast path is on, else by RPC. Same code, same errors.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from meta_executor import wire
from meta_executor.api.service import ExecutorService, SubmitRequest, split_error
from meta_executor.executor.messages import Answer
from rpc_batch_submit import AsyncioBatchSubmitter, BatchSubmitConfig, BatchSubmitError
from rpc_local_registry import RpcBackpressure, RpcClient, RpcError


class ProxyError(Exception):
    """A request was refused or lost; ``code`` is one of :mod:`meta_executor.wire`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True)
class Tracked:
    """A request on its way."""

    request_id: int
    answers: asyncio.Queue[Answer | ProxyError] = field(default_factory=asyncio.Queue)
    #: Resolves when the worker has taken it, or raises what it was refused with.
    ticket: asyncio.Future[None] | None = None
    ended: bool = False


@dataclass(frozen=True, slots=True)
class ProxyStatistics:
    """Counts since start."""

    submitted: int
    batches: int
    local_submits: int
    rpc_submits: int
    tracked: int
    unknown_answers: int


class Proxy:
    """See the module.

    Args:
        address: The worker's RPC address.
        key: The run's key.
        fast_path: Call the worker directly when it lives in this process.
        batching: When a batch is sent.
    """

    def __init__(self, address: str, key: bytes, *, fast_path: bool, batching: BatchSubmitConfig) -> None:
        self._client = RpcClient(address, key, fast_path=fast_path, interface=ExecutorService, name="proxy")
        self._fast_path = fast_path
        self._tracked: dict[int, Tracked] = {}
        self._submitter: AsyncioBatchSubmitter[SubmitRequest] = AsyncioBatchSubmitter(
            self._send,
            batching,
            register=self._register,
            rollback=self._rollback,
            id_of=lambda request: request.request_id,
            size_of=lambda request: int(request.token_ids.nbytes),
        )
        self._reader: asyncio.Task[None] | None = None
        self._lost: ProxyError | None = None
        self._local_count = 0
        self._rpc_count = 0
        self._batch_count = 0
        self._unknown_count = 0

    async def start(self) -> None:
        """Open the response stream."""
        opened = asyncio.Event()
        self._reader = asyncio.create_task(self._read(opened), name="proxy-responses")
        await opened.wait()

    async def close(self) -> None:
        """Send what is buffered, end the stream, fail what is still tracked."""
        with contextlib.suppress(BatchSubmitError):
            await self._submitter.aclose(timeout_s=1.0)
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader
        self._fail_all(ProxyError(wire.INTERNAL, "the instance is closing"))
        self._client.close()

    @property
    def lost(self) -> bool:
        """The worker is gone: nothing can be served any more."""
        return self._lost is not None

    # -- requests -----------------------------------------------------------------------------------------------------

    def submit(self, request: SubmitRequest) -> Tracked:
        """Track and send. Returns at once; refusals arrive as an answer of the request.

        Raises:
            ProxyError: Not taken: a request of that id is here, or the worker is gone, or too many are buffered.
        """
        if self._lost is not None:
            raise self._lost
        if request.request_id in self._tracked:
            raise ProxyError(wire.DUPLICATE_REQUEST, f"request {request.request_id} is here already")
        try:
            ticket = self._submitter.submit(request)
        except BatchSubmitError as error:
            raise ProxyError(wire.BACKPRESSURE, str(error)) from error
        ticket.add_done_callback(_retrieve)
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            # Refused before this call returned: the ticket says why.
            tracked = Tracked(request.request_id)
        tracked.ticket = ticket
        return tracked

    async def taken(self, tracked: Tracked) -> None:
        """Wait until the worker has taken the request.

        Raises:
            ProxyError: It was refused; it is not tracked any more.
        """
        if tracked.ticket is None:
            return
        try:
            await asyncio.shield(tracked.ticket)
        except Exception as error:
            tracked.ended = True
            self.forget(tracked)
            raise _refusal(error) from error

    async def answers(self, tracked: Tracked, *, single: bool = False) -> AsyncIterator[Answer]:
        """Answers of one request, the last one included; stopping early aborts it.

        Args:
            tracked: The request.
            single: The first answer is the last (context): the request then lives on between the ranks.

        Raises:
            ProxyError: It was refused, or the worker was lost.
        """
        try:
            while True:
                answer = await tracked.answers.get()
                if isinstance(answer, ProxyError):
                    tracked.ended = True
                    raise answer
                tracked.ended = single or bool(answer.finish_reason)
                yield answer
                if tracked.ended:
                    return
        finally:
            self.forget(tracked)
            if not tracked.ended:
                self.abort(tracked.request_id, "the reader has gone")

    def forget(self, tracked: Tracked) -> None:
        """Stop tracking. Idempotent."""
        if self._tracked.get(tracked.request_id) is tracked:
            del self._tracked[tracked.request_id]

    def knows(self, request_id: int) -> bool:
        """Whether the request is tracked here."""
        return request_id in self._tracked

    def abort(self, request_id: int, reason: str) -> None:
        """Stop a request: one that is still buffered here is removed, one that was sent is stopped by the worker."""
        if self._submitter.abort(request_id):
            return
        with contextlib.suppress(RpcError):
            self._client.abort(request_id, reason).remote_future().add_done_callback(_retrieve)

    async def announce_peer(
        self,
        name: str,
        layout: bytes,
        control_addresses: tuple[str, ...],
        processes: tuple[str, ...],
        replaces: str,
    ) -> None:
        """Tell the ranks of a context instance, before the first request that names it."""
        call = self._client.announce_peer(name, layout, control_addresses, processes, replaces)
        await call.remote_async(timeout_s=10.0)

    async def drain(self, deadline_s: float) -> int:
        """Begin to drain."""
        return int(await self._client.drain(deadline_s).remote_async(timeout_s=10.0))

    async def worker_counters(self) -> bytes:
        """The worker's part of the instance's statistics (JSON)."""
        return bytes(await self._client.counters().remote_async(timeout_s=5.0))

    async def worker_routing(self, count_max: int) -> bytes:
        """Why the last requests went where they did (JSON of :class:`meta_executor.wire.InstanceRouting`)."""
        return bytes(await self._client.routing(count_max).remote_async(timeout_s=5.0))

    async def worker_record(self) -> bytes:
        """The endpoint record (JSON)."""
        return bytes(await self._client.record().remote_async(timeout_s=30.0))

    def statistics(self) -> ProxyStatistics:
        """Counters."""
        return ProxyStatistics(
            submitted=self._local_count + self._rpc_count,
            batches=self._batch_count,
            local_submits=self._local_count,
            rpc_submits=self._rpc_count,
            tracked=len(self._tracked),
            unknown_answers=self._unknown_count,
        )

    # -- within -------------------------------------------------------------------------------------------------------

    def _register(self, request: SubmitRequest) -> None:
        self._tracked[request.request_id] = Tracked(request.request_id)

    def _rollback(self, request: SubmitRequest, error: BaseException) -> None:
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return
        tracked.answers.put_nowait(_refusal(error))

    async def _send(self, batch: list[SubmitRequest]) -> list[str | None] | None:
        self._batch_count += 1
        local = self._client.path_of("submit_batch") == "local"
        if local:
            self._local_count += len(batch)
        else:
            self._rpc_count += len(batch)
        outcomes: list[str | None] = await self._client.submit_batch(batch).remote_async(timeout_s=30.0)
        return outcomes

    async def _read(self, opened: asyncio.Event) -> None:
        try:
            stream = self._client.responses().remote_streaming()
            opened.set()
            async for batch in stream:
                for answer in batch.answers:
                    tracked = self._tracked.get(answer.request_id)
                    if tracked is None:
                        # Aborted by its reader meanwhile, or answered by a context instance that still holds its KV.
                        self._unknown_count += 1
                        continue
                    tracked.answers.put_nowait(answer)
            self._lose("the worker has ended its response stream")
        except RpcError as error:
            opened.set()
            self._lose(f"{type(error).__name__}: {error}")

    def _lose(self, why: str) -> None:
        self._lost = ProxyError(wire.INTERNAL, f"the worker is gone: {why}")
        self._fail_all(self._lost)

    def _fail_all(self, error: ProxyError) -> None:
        for tracked in list(self._tracked.values()):
            tracked.answers.put_nowait(error)


def _refusal(error: BaseException) -> ProxyError:
    code, message = split_error(str(error))
    return ProxyError(wire.BACKPRESSURE if isinstance(error, RpcBackpressure) else code, message)


def _retrieve(future: object) -> None:
    """Look at a future's error: it has reached its request another way, and asyncio should not complain of it."""
    if isinstance(future, asyncio.Future) and not future.cancelled():
        future.exception()
