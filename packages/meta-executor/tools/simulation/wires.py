"""The front's way to an instance: calls and streams that take their time, and end with the instance."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from meta_executor import wire
from meta_executor.api.service import ExecutorService, Submit
from meta_executor.executor.request import Answers
from meta_executor.front.leg import UNREACHABLE, LegError
from rpc_local_registry import RpcPeerDead, RpcUnreachable
from simulation.instance import Instance

if TYPE_CHECKING:
    from simulation.site import Site


class _Stream:
    """Answers of an instance on their way to the front."""

    def __init__(self, worker: Worker, subscriber: str) -> None:
        self._worker = worker
        self._broken = False
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._pump = asyncio.create_task(self._carry(subscriber), name=f"stream {worker.instance.name}")

    async def _carry(self, subscriber: str) -> None:
        site, instance = self._worker.site, self._worker.instance
        if not await self._worker.reached():
            self._worker.open.set()
            self._inbox.put_nowait(RpcUnreachable("nobody listens there"))
            return
        instance.streams.append(self)
        source = instance.service.answers(subscriber)
        self._worker.open.set()
        inbox = source._take()
        try:
            while not self._broken:
                item = await inbox.get_async(None)
                if not isinstance(item, Answers):
                    break
                await asyncio.sleep(site.delay())
                self._inbox.put_nowait(item)
        finally:
            source._cancel()
            self._inbox.put_nowait(RpcPeerDead("the stream broke") if self._broken or not instance.alive else None)

    def break_off(self) -> None:
        self._broken = True
        self._pump.cancel()

    def __aiter__(self) -> AsyncIterator[Answers]:
        return self._read()

    async def _read(self) -> AsyncIterator[Answers]:
        try:
            while (item := await self._inbox.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self._pump.cancel()


class Worker:
    """``WorkerClient`` over simulated wires."""

    def __init__(self, site: Site, instance: Instance) -> None:
        self.site = site
        self.instance = instance
        self.open = asyncio.Event()

    async def reached(self) -> bool:
        await asyncio.sleep(self.site.delay())
        return self.instance.alive

    async def _there(self) -> ExecutorService:
        if not await self.reached():
            raise RpcUnreachable("nobody listens there")
        return self.instance.service

    async def _back(self) -> None:
        await asyncio.sleep(self.site.delay())
        if not self.instance.alive:
            raise RpcPeerDead("it died before it answered")

    async def submit(self, subscriber: str, batch: Sequence[Submit]) -> list[wire.ErrorBody | None]:
        service = await self._there()
        if not self.open.is_set():
            await self.open.wait()  # a stream is open before any later call of the same client
            if not self.instance.alive:
                raise RpcUnreachable("nobody listens there")
        outcomes = service.submit_batch(subscriber, iter(batch))
        await self._back()
        return outcomes

    def answers(self, subscriber: str) -> Any:
        return _Stream(self, subscriber)

    def stop(self, request_id: int, reason: str) -> None:
        self.site.after(
            self.site.delay(), lambda: self.instance.alive and self.instance.service.abort(request_id, reason)
        )

    async def introduce(self, url: str, server_info: bytes) -> wire.ErrorBody | None:
        refused = (await self._there()).introduce(url, server_info)
        await self._back()
        return refused

    def close(self) -> None:
        """Nothing is held."""


class Http:
    """What is asked of instances beside their streams."""

    def __init__(self, site: Site) -> None:
        self._site = site

    async def server_info(self, server: str) -> bytes:
        await asyncio.sleep(self._site.delay())
        instance = self._site.at[server]
        if not instance.alive:
            raise LegError("", server, UNREACHABLE, "nobody listens there", received=False)
        told = wire.encode_json(instance.endpoint.info())
        await asyncio.sleep(self._site.delay())
        return told

    async def abort(self, server: str, request_id: int, reason: str) -> bool:
        return False

    async def close(self) -> None:
        """Nothing is held."""
