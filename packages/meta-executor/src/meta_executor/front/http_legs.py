"""Legs over HTTP, for instances that offer no stream; and what is asked of every instance over HTTP: what it is, and why
requests went where they did.

No connection is kept for later: the other side could close an idle one at the very moment it is used, and then nobody could
tell whether the leg was received.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TypeVar

import httpx
import msgspec

from meta_executor import wire
from meta_executor.executor.request import Request
from meta_executor.front.leg import CUT, MALFORMED, UNREACHABLE, Chunk, Condition, LegError, Prefilled

#: Longest answer that is not a stream, and longest line of a stream (bytes).
_ANSWER_BYTES_MAX = 1 << 20
#: A closed port answers at once; this is for hosts that say nothing. A burst of thousands of requests can keep the loop
#: busy for seconds between a connection's two ends, and must not make a healthy server look gone.
_CONNECT_S = 20.0
_ABORT_S = 10.0
#: For questions that an operator waits for (s).
_ASK_S = 3.0


_Told = TypeVar("_Told")
_CONTEXT_RESPONSE = msgspec.json.Decoder(wire.ContextResponse)
_ERROR = msgspec.json.Decoder(wire.ErrorBody)
_HEALTH = msgspec.json.Decoder(wire.Health)
_ROUTING = msgspec.json.Decoder(wire.InstanceRouting)
_STATISTICS = msgspec.json.Decoder(wire.InstanceStatistics)


class HttpLegs:
    """See the module.

    Args:
        key: The run's key, hex.
    """

    def __init__(self, key: str) -> None:
        self._client = httpx.AsyncClient(
            headers={wire.KEY_HEADER: key, "content-type": "application/json"},
            # Deadlines are the caller's; only connecting is bounded here.
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,
            verify=False,  # noqa: S501 - plain HTTP inside the run; building a TLS context costs 20 ms
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._client.aclose()

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
        return await self._asked(server, f"/debug/routing?limit={count_max}", _ROUTING)

    async def statistics(self, server: str) -> wire.InstanceStatistics:
        """An instance's counters. Bounded in time.

        Raises:
            LegError: Unreachable, not 200, or not to be read.
        """
        return await self._asked(server, "/internal/statistics", _STATISTICS)

    async def _asked(self, server: str, path: str, decoder: msgspec.json.Decoder[_Told]) -> _Told:
        try:
            async with asyncio.timeout(_ASK_S):
                response = await self._send("", server, "GET", path)
        except TimeoutError as error:
            raise LegError("", server, CUT, f"no answer within {_ASK_S:g} s", received=True) from error
        if response.status_code != 200:
            raise _refusal("", server, response.status_code, response.content)
        try:
            return decoder.decode(response.content)
        except msgspec.DecodeError as error:
            raise LegError("", server, MALFORMED, str(error), status=200, received=True) from error

    async def condition(self, server: str) -> Condition:
        """What an instance says of its health. Bounded in time."""
        try:
            async with asyncio.timeout(_ASK_S):
                response = await self._send("", server, "GET", "/health")
        except TimeoutError:
            return Condition(f"no answer within {_ASK_S:g} s")
        except LegError as error:
            return Condition(str(error))
        well = response.status_code == 200
        with contextlib.suppress(msgspec.DecodeError):
            health = _HEALTH.decode(response.content)
            return Condition("" if well else health.detail or health.status, health.endpoint_generation)
        return Condition("" if well else f"/health answered {response.status_code}")

    async def context(self, server: str, request: Request, generation: str) -> Prefilled:
        """Run a context leg to its end.

        Raises:
            LegError: See there.
        """
        body = wire.ContextRequest(
            request_id=request.request_id,
            token_ids=request.token_ids.tolist(),
            sampling=_sampling(request),
            schedule_style=request.schedule_style,
            deadline_s=request.deadline_s,
            endpoint_generation=generation,
            conversation_id=request.conversation_id,
            cache_salt=request.cache_salt,
        )
        response = await self._send("context", server, "POST", "/internal/context", wire.encode_json(body))
        if response.status_code != 200:
            raise _refusal("context", server, response.status_code, response.content)
        try:
            answer = _CONTEXT_RESPONSE.decode(response.content)
        except msgspec.DecodeError as error:
            raise LegError("context", server, MALFORMED, str(error), status=200, received=True) from error
        if answer.request_id != request.request_id:
            raise LegError(
                "context",
                server,
                MALFORMED,
                f"the answer is for request {answer.request_id}, not {request.request_id}",
                status=200,
                received=True,
            )
        return Prefilled(
            answer.first_token,
            answer.finish_reason,
            answer.prompt_tokens,
            answer.cached_tokens,
            answer.logprobs,
            answer.prompt_logprobs,
        )

    @contextlib.asynccontextmanager
    async def generation(
        self, server: str, request: Request, generation: str, context: wire.PeerContext | None
    ) -> AsyncIterator[AsyncIterator[Chunk]]:
        """Open a generation leg; inside, its chunks. Leaving closes the connection, which the instance notices.

        Raises:
            LegError: See there; also from the iterator, if the stream is cut or holds an error.
        """
        body = wire.GenerationRequest(
            request_id=request.request_id,
            token_ids=request.token_ids.tolist(),
            sampling=_sampling(request),
            first_token=request.first_token,
            context=context,
            schedule_style=request.schedule_style,
            deadline_s=request.deadline_s,
            endpoint_generation=generation,
            conversation_id=request.conversation_id,
            cache_salt=request.cache_salt,
        )
        data = wire.encode_json(body)
        response = await self._send("generation", server, "POST", "/internal/generation", data, stream=True)
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


async def _chunks(server: str, response: httpx.Response) -> AsyncGenerator[Chunk, None]:
    try:
        async with contextlib.aclosing(_lines(server, response)) as lines:
            async for line in lines:
                chunk = _chunk(server, line)
                yield chunk
                if chunk.finish_reason is not None:
                    return
    except httpx.HTTPError as error:
        raise LegError("generation", server, CUT, _words(error), received=True) from error
    raise LegError("generation", server, CUT, "the stream ended without a finish reason", received=True)


async def _lines(server: str, response: httpx.Response) -> AsyncGenerator[bytes, None]:
    """The stream's lines, each bounded."""
    rest = b""
    async for data in response.aiter_raw():
        rest += data
        *lines, rest = rest.split(b"\n")
        for line in lines:
            if line:
                yield line
        if len(rest) > _ANSWER_BYTES_MAX:
            raise LegError("generation", server, MALFORMED, "a line beyond all bounds", received=True)


def _chunk(server: str, line: bytes) -> Chunk:
    try:
        chunk = wire.decode_chunk(line)
    except msgspec.DecodeError as error:
        raise LegError("generation", server, MALFORMED, str(error), received=True) from error
    if chunk.error is not None or chunk.finish_reason in ("error", "cancelled"):
        code = chunk.error.error if chunk.error else str(chunk.finish_reason).upper()
        message = chunk.error.message if chunk.error else f"ended with {chunk.finish_reason}"
        raise LegError("generation", server, code, message, status=200, received=True)
    return Chunk(chunk.tokens, chunk.finish_reason, chunk.logprobs, chunk.cached_tokens, chunk.prompt_logprobs)


def _refusal(role: str, server: str, status: int, body: bytes) -> LegError:
    try:
        error = _ERROR.decode(body)
    except msgspec.DecodeError:
        error = wire.ErrorBody(error=wire.INTERNAL, message=f"HTTP {status}")
    return LegError.refused(role, server, error, status)


def _sampling(request: Request) -> wire.Sampling:
    """End tokens were resolved into the stop tokens already."""
    sampling = request.sampling
    lists = {"stop_token_ids": list(sampling.stop_token_ids), "logit_bias": list(sampling.logit_bias)}
    return wire.Sampling(**{**vars(sampling), "ignore_eos": True, **lists})


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
