"""HTTP to rank 0 of an instance: the context leg, the generation leg, abort, server info.

Every failure becomes one :class:`LegError` that says whether the leg may have been received. Nothing here tries again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator

import httpx
import msgspec

from meta_executor import wire

#: Longest answer that is not a stream, and longest line of a stream (bytes).
_ANSWER_BYTES_MAX = 1 << 20
#: A closed port answers at once; this is for hosts that say nothing. A burst of thousands of requests can keep the loop
#: busy for seconds between a connection's two ends, and must not make a healthy server look gone.
_CONNECT_S = 20.0
#: Connection pools, taken in turn: one pool looks at all its connections at every request, which at thousands of them
#: takes longer than the request.
_POOLS = 16
_ABORT_S = 2.0
#: For questions that an operator waits for (s).
_ASK_S = 3.0
#: After a stream's last line its end follows at once; waiting longer than this is not worth a connection (s).
_END_OF_BODY_S = 0.05


class LegError(Exception):
    """A leg failed.

    Attributes:
        role: ``context`` or ``generation``.
        server: The instance's address.
        code: One of :mod:`meta_executor.wire`'s codes, or ``UNREACHABLE``, ``CUT``, ``MALFORMED``.
        message: For a person.
        status: HTTP status of the answer, if there was one.
        field: The field at fault, if the instance named one.
        received: Whether the instance may have begun the work. False: it certainly has not.
    """

    def __init__(
        self,
        role: str,
        server: str,
        code: str,
        message: str,
        *,
        status: int | None = None,
        field: str | None = None,
        received: bool,
    ) -> None:
        super().__init__(f"{role} leg at {server}: {code}: {message}")
        self.role = role
        self.server = server
        self.code = code
        self.message = message
        self.status = status
        self.field = field
        self.received = received


UNREACHABLE = "UNREACHABLE"
CUT = "CUT"
MALFORMED = "MALFORMED"

_CONTEXT_RESPONSE = msgspec.json.Decoder(wire.ContextResponse)
_ERROR = msgspec.json.Decoder(wire.ErrorBody)
_ROUTING = msgspec.json.Decoder(wire.InstanceRouting)


class LegClient:
    """Connections to the instances of a run.

    Args:
        key: The run's key, hex.
    """

    def __init__(self, key: str) -> None:
        self._clients = [
            httpx.AsyncClient(
                headers={wire.KEY_HEADER: key, "content-type": "application/json"},
                # Deadlines are the caller's; only connecting is bounded here.
                timeout=httpx.Timeout(None, connect=_CONNECT_S),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
                trust_env=False,
                verify=False,  # noqa: S501 - plain HTTP inside the run; building a TLS context costs 20 ms each  # nosec B501
            )
            for _ in range(_POOLS)
        ]
        self._turn = 0

    @property
    def _client(self) -> httpx.AsyncClient:
        self._turn = (self._turn + 1) % _POOLS
        return self._clients[self._turn]

    async def close(self) -> None:
        """Close every connection."""
        for client in self._clients:
            await client.aclose()

    async def server_info(self, server: str) -> bytes:
        """The raw answer of ``/server_info``.

        Raises:
            LegError: Unreachable, or not 200.
        """
        response = await self._send("", server, "GET", "/server_info")
        if response.status_code != 200:
            raise LegError("", server, MALFORMED, f"/server_info answered {response.status_code}", received=False)
        return response.content

    async def routing(self, server: str, count_max: int) -> wire.InstanceRouting:
        """An instance's newest decisions. Bounded in time.

        Raises:
            LegError: Unreachable, not 200, or not to be read.
        """
        path = f"/debug/routing?limit={count_max}"
        try:
            async with asyncio.timeout(_ASK_S):
                response = await self._send("", server, "GET", path)
        except TimeoutError as error:
            raise LegError("", server, CUT, f"no answer within {_ASK_S:g} s", received=True) from error
        if response.status_code != 200:
            raise _refusal("", server, response.status_code, response.content)
        try:
            return _ROUTING.decode(response.content)
        except msgspec.DecodeError as error:
            raise LegError("", server, MALFORMED, str(error), status=200, received=True) from error

    async def context(self, server: str, request: wire.ContextRequest) -> wire.ContextResponse:
        """Run a context leg to its end.

        Raises:
            LegError: See there.
        """
        response = await self._send("context", server, "POST", "/internal/context", wire.encode_json(request))
        if response.status_code != 200:
            raise _refusal("context", server, response.status_code, response.content)
        try:
            answer = _CONTEXT_RESPONSE.decode(response.content)
        except msgspec.DecodeError as error:
            raise LegError("context", server, MALFORMED, str(error), status=200, received=True) from error
        if answer.request_id != request.request_id:
            raise LegError(
                "context", server, MALFORMED, f"answer for request {answer.request_id}", status=200, received=True
            )
        return answer

    @contextlib.asynccontextmanager
    async def generation(
        self, server: str, request: wire.GenerationRequest
    ) -> AsyncIterator[AsyncIterator[wire.GenerationChunk]]:
        """Open a generation leg; inside, its chunks. Leaving closes the connection, which the instance notices.

        Raises:
            LegError: See there; also from the iterator, if the stream is cut or holds an error.
        """
        body = wire.encode_json(request)
        response = await self._send("generation", server, "POST", "/internal/generation", body, stream=True)
        try:
            if response.status_code != 200:
                try:
                    refusal = await response.aread()
                except httpx.HTTPError:
                    refusal = b""
                raise _refusal("generation", server, response.status_code, refusal)
            async with contextlib.aclosing(_chunks(server, response)) as chunks:
                yield chunks
        finally:
            await response.aclose()

    async def abort(self, server: str, request_id: int, reason: str) -> bool:
        """Tell an instance that a request is of no use any more. Bounded in time; whether it was heard."""
        body = wire.encode_json(wire.AbortRequest(request_id=request_id, reason=reason))
        try:
            response = await self._client.post(f"{server}/internal/abort", content=body, timeout=_ABORT_S)
        except httpx.HTTPError:
            return False
        return response.status_code == 200

    async def _send(
        self, role: str, server: str, method: str, path: str, body: bytes | None = None, *, stream: bool = False
    ) -> httpx.Response:
        client = self._client
        try:
            return await client.send(client.build_request(method, f"{server}{path}", content=body), stream=stream)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            raise LegError(role, server, UNREACHABLE, _words(error), received=False) from error
        except httpx.HTTPError as error:
            raise LegError(role, server, CUT, _words(error), received=True) from error


async def _chunks(server: str, response: httpx.Response) -> AsyncGenerator[wire.GenerationChunk, None]:
    rest = b""
    body = response.aiter_raw()
    try:
        async for data in body:
            rest += data
            if b"\n" not in data:
                if len(rest) > _ANSWER_BYTES_MAX:
                    raise LegError("generation", server, MALFORMED, "a line beyond all bounds", received=True)
                continue
            *lines, rest = rest.split(b"\n")
            for line in lines:
                if not line:
                    continue
                chunk = _chunk(server, line)
                if chunk.finish_reason is not None:
                    # Read to the end of the body, which is at hand, so that the connection can serve the next leg.
                    with contextlib.suppress(TimeoutError, httpx.HTTPError):
                        async with asyncio.timeout(_END_OF_BODY_S):
                            async for _ in body:
                                pass
                    yield chunk
                    return
                yield chunk
    except httpx.HTTPError as error:
        raise LegError("generation", server, CUT, _words(error), received=True) from error
    raise LegError("generation", server, CUT, "the stream ended without a finish reason", received=True)


def _chunk(server: str, line: bytes) -> wire.GenerationChunk:
    try:
        chunk = wire.decode_chunk(line)
    except msgspec.DecodeError as error:
        raise LegError("generation", server, MALFORMED, str(error), received=True) from error
    if chunk.error is not None or chunk.finish_reason in ("error", "cancelled"):
        code = chunk.error.error if chunk.error else str(chunk.finish_reason).upper()
        message = chunk.error.message if chunk.error else f"ended with {chunk.finish_reason}"
        raise LegError("generation", server, code, message, status=200, received=True)
    return chunk


def _refusal(role: str, server: str, status: int, body: bytes) -> LegError:
    try:
        error = _ERROR.decode(body)
        code, message, field = error.error, error.message, error.field
    except msgspec.DecodeError:
        code, message, field = wire.INTERNAL, f"HTTP {status}", None
    # 4xx and DRAINING are refusals before any memory was touched (wire.STATUS_OF).
    untouched = (400 <= status < 500 and status != wire.STATUS_OF[wire.CANCELLED]) or code == wire.DRAINING
    return LegError(role, server, code, message, status=status, field=field, received=not untouched)


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
