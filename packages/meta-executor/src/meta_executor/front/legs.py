"""The instances of a run: what they say of themselves, and their legs.

Our instances offer a service address in their ``/server_info``: then everything goes over one stream per instance
(:mod:`~meta_executor.front.stream_legs`). An instance that offers none, of whatever make, is asked over HTTP
(:mod:`~meta_executor.front.http_legs`). Either way a failure becomes one :class:`~meta_executor.front.leg.LegError`, and
nothing here tries again.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from functools import partial

import msgspec

from meta_executor import wire
from meta_executor.api.worker_client import WorkerClient
from meta_executor.executor.request import Request
from meta_executor.front.http_legs import HttpLegs
from meta_executor.front.leg import Chunk, Condition, LegError, Prefilled
from meta_executor.front.stream_legs import Known, StreamLegs

_INFO = msgspec.json.Decoder(wire.ServerInfo)


class LegClient:
    """See the module.

    Args:
        key: The run's key, hex.
        http: Asks over HTTP; None: with that key.
        worker_at: Reaches what offers a stream at an address; None: by RPC with that key.
    """

    def __init__(
        self,
        key: str,
        *,
        http: HttpLegs | None = None,
        worker_at: Callable[[str], WorkerClient] | None = None,
    ) -> None:
        self._http = http or HttpLegs(key)
        self._worker_at = worker_at or partial(WorkerClient, key=bytes.fromhex(key), fast_path=False)
        #: By server: what it last said of itself.
        self._known: dict[str, Known] = {}
        self._streams: dict[str, StreamLegs] = {}
        self._closing: list[StreamLegs] = []

    async def close(self) -> None:
        """Close every connection."""
        for stream in [*self._streams.values(), *self._closing]:
            await stream.close()
        await self._http.close()

    async def server_info(self, server: str) -> bytes:
        """The raw answer of ``/server_info``.

        Raises:
            LegError: Unreachable, or not 200.
        """
        raw = await self._http.server_info(server)
        with contextlib.suppress(msgspec.DecodeError):
            # What cannot be read is told by whoever reads the answer; here it only means that nothing new is known.
            self._known[server] = Known(server, raw, _INFO.decode(raw))
        return raw

    async def routing(self, server: str, count_max: int) -> wire.InstanceRouting:
        """An instance's newest decisions. Bounded in time.

        Raises:
            LegError: Unreachable, not 200, or not to be read.
        """
        return await self._http.routing(server, count_max)

    async def statistics(self, server: str) -> wire.InstanceStatistics:
        """An instance's counters. Bounded in time.

        Raises:
            LegError: Unreachable, not 200, or not to be read.
        """
        return await self._http.statistics(server)

    async def condition(self, server: str) -> Condition:
        """What an instance says of its health. Bounded in time."""
        return await self._http.condition(server)

    async def context(self, server: str, request: Request, generation: str) -> Prefilled:
        """Run a context leg to its end.

        Args:
            server: The instance.
            request: What is asked.
            generation: The lifetime of the instance that it is meant for.

        Raises:
            LegError: See there.
        """
        stream = await self._stream(server, generation)
        if stream is not None:
            return await stream.context(request, generation)
        return await self._http.context(server, request, generation)

    @contextlib.asynccontextmanager
    async def generation(
        self, server: str, request: Request, generation: str, context: wire.PeerContext | None
    ) -> AsyncIterator[AsyncIterator[Chunk]]:
        """Open a generation leg; inside, its chunks. Leaving early lets the instance know.

        Raises:
            LegError: See there; also from the iterator, if the stream is cut or holds an error.
        """
        stream = await self._stream(server, generation)
        if stream is None:
            opened = self._http.generation(server, request, generation, context)
        else:
            opened = stream.generation(request, generation, context, self._known.get(context.url if context else ""))
        async with opened as chunks:
            yield chunks

    async def abort(self, server: str, request_id: int, reason: str) -> None:
        """Tell an instance that a request is of no use any more. Bounded in time.

        One whose stream is lost has ended, or stops by itself what came on it.
        """
        stream, known = self._streams.get(server), self._known.get(server)
        if known is None or not known.info.service_address:
            await self._http.abort(server, request_id, reason)
        elif stream is not None and not stream.lost:
            stream.abort(request_id, reason)

    async def _stream(self, server: str, generation: str) -> StreamLegs | None:
        """The one stream to an instance's present lifetime; None where it offers none.

        One that was found by its registration has not said yet where its stream ends: it is asked before its first leg. So is
        one whose stream was lost: who answers there now may be another lifetime, whose stream ends elsewhere.
        """
        known = self._known.get(server)
        lost = (there := self._streams.get(server)) is not None and there.lost
        if known is None or known.info.generation != generation or lost:
            await self.server_info(server)
            known = self._known.get(server)
        if known is None or not known.info.service_address:
            return None
        stream = self._streams.get(server)
        if stream is not None and not stream.lost and stream.instance_id == known.info.instance_id:
            return stream
        if stream is not None:
            # Its requests hear of the loss; the next ones go to whoever answers at that address now.
            self._closing.append(stream)
        made = self._streams[server] = StreamLegs(known, self._worker_at(known.info.service_address))
        for old in self._closing[:]:
            if old.idle:
                self._closing.remove(old)
                await old.close()
        return made


__all__ = ["LegClient", "LegError"]
