"""Legs over the one stream that an instance offers: requests, aborts and errors travel on it, and per step one frame with
the tokens of all requests.

No connection is made per request, and none is kept that the other side might close: a stream ends with its instance, and
then every request on it hears so.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from functools import partial

import msgspec

from meta_executor import wire
from meta_executor.api.proxy import Proxy, ProxyError, Tracked
from meta_executor.api.service import Submit
from meta_executor.api.worker_client import WorkerClient
from meta_executor.executor.request import Notice, Request
from meta_executor.front.leg import CUT, UNREACHABLE, Chunk, LegError, Prefilled, context_is_stale
from rpc_batch_submit import BatchSubmitConfig
from rpc_local_registry import RpcError

#: Requests that arrive together are sent together; a lone one waits for nobody.
_BATCHING = BatchSubmitConfig(batch_max=64, delay_ms=1.0, adaptive=True)


@dataclass(frozen=True)
class Known:
    """What an instance last said of itself: as it came, and read."""

    url: str
    raw: bytes
    info: wire.ServerInfo


class StreamLegs:
    """One instance's lifetime.

    Args:
        known: What it says of itself.
        worker: Reaches it at its service address; closed with this.
    """

    def __init__(self, known: Known, worker: WorkerClient) -> None:
        self._url = known.url
        self.instance_id = known.info.instance_id
        self._worker = worker
        self._proxy = Proxy(self._worker, _BATCHING)
        #: Context instances that the ranks there were told of, by name.
        self._introduced: dict[str, asyncio.Task[wire.ErrorBody | None]] = {}
        #: One is introduced after the other: an earlier lifetime that came late would replace a later one.
        self._introducing = asyncio.Lock()

    @property
    def lost(self) -> bool:
        """The instance is gone."""
        return self._proxy.lost

    @property
    def idle(self) -> bool:
        """Nobody waits for an answer."""
        return self._proxy.tracked_count == 0

    async def close(self) -> None:
        """End the stream; what still runs on it fails."""
        await self._proxy.close()
        await asyncio.to_thread(self._worker.close)

    async def context(self, request: Request, generation: str) -> Prefilled:
        """Run a context leg to its end.

        Raises:
            LegError: See there.
        """
        tracked = await self._sent("context", request, generation)
        try:
            tokens, notices = await tracked.next(whole=True)
        except ProxyError as error:
            raise self._failed("context", error) from error
        finally:
            # The first word is the last one here; whoever leaves before it is told apart by the dispatcher's abort.
            self._proxy.forget(tracked)
        notice = notices[0]
        if notice.failed or not tokens:
            raise LegError.refused("context", self._url, _body_of(notice))
        return Prefilled(
            tokens[0],
            notice.finish_reason or None,
            request.prompt_count,
            notice.cached_tokens,
            notice.logprobs,
            notice.prompt_logprobs,
        )

    @contextlib.asynccontextmanager
    async def generation(
        self, request: Request, generation: str, context: wire.PeerContext | None, source: Known | None
    ) -> AsyncIterator[AsyncIterator[Chunk]]:
        """Open a generation leg; inside, its chunks. Without ``context`` the prompt is computed there.

        Raises:
            LegError: See there; also from the iterator.
        """
        if context is None:
            tracked = await self._sent("generation", request, generation)
        else:
            tracked = await self._sent_introduced(request, generation, context, source)
        try:
            async with contextlib.aclosing(self._chunks(tracked)) as chunks:
                yield chunks
        finally:
            # The dispatcher aborts what has not ended.
            self._proxy.forget(tracked)

    async def _chunks(self, tracked: Tracked) -> AsyncGenerator[Chunk, None]:
        while True:
            try:
                tokens, notices = await tracked.next()
            except ProxyError as error:
                raise self._failed("generation", error) from error
            if not notices:
                yield Chunk(tokens, None)
                continue
            end = next((notice for notice in notices if notice.finish_reason), None)
            logprobs = tuple(told for one in notices for told in one.logprobs)
            cached = sum(one.cached_tokens for one in notices)
            prompt_logprobs = tuple(told for one in notices for told in one.prompt_logprobs)
            if end is None:
                yield Chunk(tokens, None, logprobs, cached, prompt_logprobs)
                continue
            if end.failed:
                if tokens:
                    yield Chunk(tokens, None, logprobs)
                body = _body_of(end)
                raise LegError("generation", self._url, body.error, body.message, status=200, received=True)
            yield Chunk(tokens, end.finish_reason, logprobs, cached, prompt_logprobs)
            return

    def abort(self, request_id: int, reason: str) -> None:
        """Tell the instance that a request is of no use any more: it hears that whenever it listens again, however late."""
        self._proxy.abort(request_id, reason)

    # -- within -------------------------------------------------------------------------------------------------------

    async def _sent(self, role: str, request: Request, generation: str) -> Tracked:
        try:
            return await self._proxy.submit(Submit(request, generation))
        except ProxyError as error:
            raise self._failed(role, error) from error

    async def _sent_introduced(
        self, request: Request, generation: str, context: wire.PeerContext, source: Known | None
    ) -> Tracked:
        """Send a request that needs a context instance, which the ranks are told of before.

        Another front may have replaced it there, with an earlier lifetime that it still took for the present one. The instance
        refuses then and has touched nothing. Who is right is for the dispatcher to find out: the next request tells anew.
        """
        name = f"{context.instance_id}/{context.endpoint_generation}"
        told = await self._introduce(name, source)
        try:
            return await self._sent("generation", msgspec.structs.replace(request, peer=name), generation)
        except LegError as error:
            if context_is_stale(error) and self._introduced.get(name) is told:
                del self._introduced[name]
            raise

    async def _introduce(self, name: str, source: Known | None) -> asyncio.Task[wire.ErrorBody | None]:
        """Let the ranks know the context instance, once per lifetime; requests that need it share the work."""
        if source is None or f"{source.info.instance_id}/{source.info.generation}" != name:
            raise LegError(
                "generation",
                self._url,
                wire.STALE_GENERATION,
                f"context instance {name} is not the one that answers now",
                field=wire.CONTEXT_GENERATION,
                received=False,
            )
        task = self._introduced.get(name)
        if task is None:
            task = asyncio.create_task(self._introduced_in_turn(source))
            self._introduced[name] = task
            task.add_done_callback(partial(self._introduction_ended, name))
        try:
            refused = await asyncio.shield(task)
        except RpcError as error:
            words = f"{type(error).__name__}: {error}"
            raise LegError("generation", self._url, UNREACHABLE, words, received=False) from error
        if refused is not None:
            raise LegError.refused("generation", self._url, refused)
        return task

    async def _introduced_in_turn(self, source: Known) -> wire.ErrorBody | None:
        async with self._introducing:
            return await self._worker.introduce(source.url, source.raw)

    def _introduction_ended(self, name: str, task: asyncio.Task[wire.ErrorBody | None]) -> None:
        """A failure is never remembered, also where whoever wanted it has left meanwhile: the next request tries again."""
        failed = task.cancelled() or task.exception() is not None or task.result() is not None
        if failed and self._introduced.get(name) is task:
            del self._introduced[name]

    def _failed(self, role: str, error: ProxyError) -> LegError:
        if not error.reached:
            return LegError(role, self._url, UNREACHABLE, str(error), received=False)
        if error.received:
            return LegError(role, self._url, CUT, str(error), received=True)
        return LegError.refused(role, self._url, error.body)


def _body_of(notice: Notice) -> wire.ErrorBody:
    code = notice.error_code or (wire.CANCELLED if notice.finish_reason == "cancelled" else wire.INTERNAL)
    return wire.ErrorBody(error=code, message=notice.message, request_id=notice.request_id)
