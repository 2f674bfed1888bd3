"""The HTTP API of an instance: the paths of :mod:`meta_executor.wire`. Requests of foreign clients go through a proxy.

Every request is checked before anything is touched: key, body (400 names the field), generation (409), limits. The generation
stream hands over one line per step; a reader that goes away aborts its request.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import httpx
import msgspec
import uvicorn
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from meta_executor import wire
from meta_executor.api.endpoint import Endpoint, Refused
from meta_executor.api.proxy import Proxy, ProxyError, Tracked, int32
from meta_executor.api.service import Submit
from meta_executor.api.worker_client import WorkerClient
from meta_executor.config import InstanceConfig
from meta_executor.engine.base import SamplingParams
from meta_executor.executor.request import Notice
from meta_executor.executor.request import Request as ExecutorRequest
from meta_executor.listener.access import CALLER, Access, Guard, KeyFile, Need, table
from meta_executor.listener.bounds import Ledger
from meta_executor.listener.metrics import ListenerMetrics
from meta_executor.listener.reading import body_decoded
from meta_executor.listener.serving import listen, server_of, url_of
from meta_executor.reasons import plain
from rpc_batch_submit import BatchSubmitConfig
from rpc_local_registry import RpcError

_Body = TypeVar("_Body")
_Result = TypeVar("_Result")
#: What of a body is repeated in an error (characters).
_ECHO_MAX = 300
#: A context instance must say who it is within this time (s).
_PEER_TIMEOUT_S = 5.0
#: What each path wants.
NEED_OF = table(
    {"/health": Need.OPEN, "/server_info": Need.OPEN, "/metrics": Need.STATISTICS},
    prefixes={"/debug/": Need.OPERATOR, "/internal/": Need.RUN},
)

_CONTEXT = msgspec.json.Decoder(wire.ContextRequest)
_GENERATION = msgspec.json.Decoder(wire.GenerationRequest)
_ABORT = msgspec.json.Decoder(wire.AbortRequest)
_DRAIN = msgspec.json.Decoder(wire.DrainRequest)
_INFO = msgspec.json.Decoder(wire.ServerInfo)
_STATISTICS = msgspec.json.Decoder(wire.InstanceStatistics)

#: Name of the thread that serves.
API_THREAD = "api-server"


class ApiServer:
    """See the module.

    Args:
        worker: Reaches the worker.
        batching: When foreign clients' requests are sent to it.
        endpoint: Whether requests may come in.
        key: The run's key, hex.
        config: Bounds of the listener; None: the defaults.
        keys: API keys of operators; None: there are none.
        drain_timeout_s: Longest drain when the request names none.
    """

    def __init__(
        self,
        worker: WorkerClient,
        batching: BatchSubmitConfig,
        endpoint: Endpoint,
        key: str,
        *,
        config: InstanceConfig | None = None,
        keys: KeyFile | None = None,
        drain_timeout_s: float = 60.0,
    ) -> None:
        self._worker = worker
        self._proxy = Proxy(worker, batching)
        self._endpoint = endpoint
        self._key = key
        self._config = config = InstanceConfig() if config is None else config
        self._access = Access(key, keys)
        self._ledger = Ledger(config.http)
        self._drain_timeout_s = drain_timeout_s
        self._http: httpx.AsyncClient | None = None
        self._peers: dict[str, asyncio.Task[None]] = {}
        self._started_s = time.monotonic()

    def listener(self) -> uvicorn.Server:
        """A server of :meth:`app` within the instance's bounds."""
        config = self._config
        return server_of(
            self.app(), config.http, self._ledger, body_bytes_max=config.body_bytes_max, worded=worded, close_s=3
        )

    def app(self) -> ASGIApp:
        """The ASGI application, for those who may."""
        return Guard(self._routes(), self._access, NEED_OF, worded, self._ledger)

    def _routes(self) -> Starlette:
        routes = Starlette(
            routes=[
                Route("/internal/context", self._guarded(self._context), methods=["POST"]),
                Route("/internal/generation", self._guarded(self._generation), methods=["POST"]),
                Route("/internal/abort", self._guarded(self._abort), methods=["POST"]),
                Route("/internal/drain", self._guarded(self._drain), methods=["POST"]),
                Route("/internal/statistics", self._guarded(self._statistics)),
                Route("/server_info", self._server_info),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Route("/debug/routing", self._guarded(self._debug_routing)),
            ]
        )
        # As at the front: no redirection to a host that a client names.
        routes.router.redirect_slashes = False
        return routes

    async def start(self) -> None:
        """Be ready to ask peers."""
        # No connection is kept for later: a peer may close an idle one at the moment it is used.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.AsyncClient(
            headers={wire.KEY_HEADER: self._key}, timeout=_PEER_TIMEOUT_S, trust_env=False, limits=limits
        )

    async def close(self) -> None:
        """Leave the worker."""
        await self._proxy.close()
        if self._http is not None:
            await self._http.aclose()

    # -- serving requests ---------------------------------------------------------------------------------------------

    async def _context(self, request: Request) -> Response:
        body = await _decoded(request, _CONTEXT)
        tracked = await self._submitted(request, self._request_of(body), body.endpoint_generation)
        try:
            tokens, notices = await _unless_left(tracked.next(whole=True), request)
        except BaseException:
            self._proxy.leave(tracked, "the client has gone")
            raise
        # The first word is the last here; the request lives on between the ranks until its KV was fetched.
        self._proxy.forget(tracked)
        notice = notices[0]
        if notice.failed or not tokens:
            raise Refused(_error_of(notice))
        return _json(
            wire.ContextResponse(
                request_id=body.request_id,
                first_token=tokens[0],
                finish_reason=notice.finish_reason or None,  # type: ignore[arg-type]
                prompt_tokens=len(body.token_ids),
                cached_tokens=notice.cached_tokens,
                endpoint_generation=body.endpoint_generation,
                logprobs=notice.logprobs,
                prompt_logprobs=notice.prompt_logprobs,
            )
        )

    async def _generation(self, request: Request) -> Response:
        body = await _decoded(request, _GENERATION)
        made = msgspec.structs.replace(self._request_of(body), first_token=body.first_token)
        if body.context is None:
            made = msgspec.structs.replace(made, prefills_here=True)
        else:
            made = msgspec.structs.replace(made, peer=await self._known_peer(body.context))
        tracked = await self._submitted(request, made, body.endpoint_generation)
        return _Stream(self._lines(tracked), media_type="application/x-ndjson")

    async def _lines(self, tracked: Tracked) -> AsyncIterator[bytes]:
        try:
            while True:
                tokens, notices = await tracked.next()
                notice = next((one for one in notices if one.finish_reason), None)
                chunk = wire.GenerationChunk(
                    tokens=tokens,
                    finish_reason=None if notice is None else notice.finish_reason,  # type: ignore[arg-type]
                    error=_error_of(notice) if notice is not None and notice.failed else None,
                    rank=None if notice is None else notice.rank,
                    logprobs=tuple(told for one in notices for told in one.logprobs),
                    cached_tokens=sum(one.cached_tokens for one in notices),
                    prompt_logprobs=tuple(told for one in notices for told in one.prompt_logprobs),
                )
                yield wire.encode_json(chunk) + b"\n"
                if notice is not None:
                    return
        except ProxyError as error:
            yield wire.encode_json(wire.GenerationChunk(finish_reason="error", error=error.body)) + b"\n"
        finally:
            self._proxy.leave(tracked, "the reader has gone")

    def _request_of(self, body: wire.ContextRequest | wire.GenerationRequest) -> ExecutorRequest:
        """End tokens are resolved here, once: behind this point a request stops at its stop tokens and nothing else."""
        sampling = body.sampling
        if sampling.min_tokens > sampling.max_tokens:
            words = f"sampling.min_tokens: must be in 0..max_tokens ({sampling.max_tokens}), got {sampling.min_tokens}"
            raise Refused(wire.ErrorBody(error=wire.INVALID_REQUEST, message=words, field="sampling.min_tokens"))
        ends = () if sampling.ignore_eos else self._endpoint.info().eos_token_ids
        return ExecutorRequest(
            request_id=body.request_id,
            token_ids=int32(body.token_ids),
            # Both have the same fields; one that only one of them knows is an error here, not a field that gets lost.
            sampling=SamplingParams(
                **{
                    **msgspec.structs.asdict(sampling),
                    "ignore_eos": True,
                    "stop_token_ids": tuple(dict.fromkeys((*sampling.stop_token_ids, *ends))),
                    "logit_bias": tuple(sampling.logit_bias),
                }
            ),
            schedule_style=body.schedule_style,
            conversation_id=body.conversation_id,
            cache_salt=body.cache_salt,
            deadline_s=body.deadline_s,
        )

    async def _submitted(self, http: Request, request: ExecutorRequest, generation: str) -> Tracked:
        """Submit and wait until the worker has taken it, so that a refusal still has a status of its own."""
        try:
            return await _unless_left(self._proxy.submit(Submit(request, generation)), http)
        except ProxyError as error:
            if error.body.field == wire.CONTEXT_GENERATION:
                # The ranks know it no more: the next request introduces it again.
                self._peers.pop(request.peer, None)
            raise Refused(error.body) from error

    # -- peers --------------------------------------------------------------------------------------------------------

    async def _known_peer(self, context: wire.PeerContext) -> str:
        """Make a context instance known to the ranks, once per generation; callers of one peer share the work."""
        name = f"{context.instance_id}/{context.endpoint_generation}"
        task = self._peers.get(name)
        if task is None:
            task = asyncio.create_task(self._introduce(context))
            self._peers[name] = task
        try:
            await asyncio.shield(task)
        except (Refused, RpcError):
            # A failure is never remembered: the next request tries again.
            if self._peers.get(name) is task:
                del self._peers[name]
            raise
        return name

    async def _introduce(self, context: wire.PeerContext) -> None:
        if self._http is None:
            raise Refused(wire.ErrorBody(error=wire.INTERNAL, message="the server is not started"))
        try:
            response = await self._http.get(f"{context.url}/server_info")
            info = _INFO.decode(response.content)
        except (httpx.HTTPError, httpx.InvalidURL, msgspec.DecodeError) as error:
            raise Refused(
                wire.ErrorBody(
                    error=wire.TRANSFER_FAILED,
                    message=f"context instance {context.url}: {type(error).__name__}: {error}",
                    field="context.url",
                )
            ) from error
        if info.generation != context.endpoint_generation or info.instance_id != context.instance_id:
            raise Refused(
                wire.ErrorBody(
                    error=wire.STALE_GENERATION,
                    message=f"context generation {context.endpoint_generation!r} is not the live one of {context.url}",
                    field=wire.CONTEXT_GENERATION,
                    endpoint_generation=info.generation,
                )
            )
        refused = await self._worker.introduce(context.url, response.content)
        if refused is not None:
            raise Refused(refused)

    # -- the rest -----------------------------------------------------------------------------------------------------

    async def _abort(self, request: Request) -> Response:
        body = await _decoded(request, _ABORT)
        known = await self._proxy.abort_known(body.request_id, body.reason)
        return _json(wire.AbortResponse(request_id=body.request_id, known=known))

    async def _drain(self, request: Request) -> Response:
        body = await _decoded(request, _DRAIN, empty=wire.DrainRequest())
        self._endpoint.start_draining()
        active = await self._worker.drain(body.deadline_s or self._drain_timeout_s)
        return _json(wire.DrainResponse(draining=True, active=active))

    async def _statistics(self, request: Request) -> Response:
        return _json(await self.statistics())

    async def statistics(self) -> wire.InstanceStatistics:
        """The worker's counters, with the way that its requests came."""
        counters = _STATISTICS.decode(await self._worker.counters())
        counts = self._worker.counts()
        return msgspec.structs.replace(
            counters,
            uptime_s=time.monotonic() - self._started_s,
            local_submits=counts.local,
            rpc_submits=counts.rpc,
            submit_calls=counts.calls,
        )

    async def _server_info(self, request: Request) -> Response:
        info = self._endpoint.info()
        if not request.scope["state"][CALLER].run:
            # Where to reach the ranks, and which processes they are, is for those who take part in the run.
            info = msgspec.structs.replace(info, control_addresses=[], service_address="", processes=(), layout=None)
        return _json(info)

    async def _health(self, request: Request) -> Response:
        info = self._endpoint.info()
        fault = "the worker is gone" if self._proxy.lost else await self._worker.condition()
        status = "failed" if fault else "draining" if info.state == "DRAINING" else "ok" if info.ready else "starting"
        health = wire.Health(status=status, role=info.role, endpoint_generation=info.generation, detail=fault or None)  # type: ignore[arg-type]
        return _json(health, 200 if status == "ok" else 503)

    async def _metrics(self, request: Request) -> Response:
        statistics = await self.statistics()
        registry = CollectorRegistry()
        registry.register(ListenerMetrics(self._ledger))
        for name, value in msgspec.to_builtins(statistics).items():
            if isinstance(value, int | float):
                Gauge(f"meta_executor_{name}", f"{name} of this instance", registry=registry).set(value)
        gauges: dict[str, Gauge] = {}
        for rank in statistics.ranks:
            for name, value in msgspec.to_builtins(rank).items():
                if isinstance(value, int | float) and name != "rank":
                    gauge = gauges.get(name)
                    if gauge is None:
                        gauge = Gauge(f"meta_executor_rank_{name}", f"{name} of one rank", ["rank"], registry=registry)
                        gauges[name] = gauge
                    gauge.labels(rank=str(rank.rank)).set(value)
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")

    async def _debug_routing(self, request: Request) -> Response:
        """The worker's decisions, whichever process it lives in."""
        data = await self._worker.routing(_count_asked(request))
        return Response(data, media_type="application/json")

    def _guarded(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            try:
                return await handler(request)
            except Refused as refused:
                return _error(refused.body)
            except ProxyError as error:
                return _error(error.body)
            except RpcError as error:
                # The worker is gone or does not answer in time; what it was asked for is unavailable.
                return _error(wire.ErrorBody(error=wire.INTERNAL, message=f"{type(error).__name__}: {error}"))

        return guarded


class _Stream(StreamingResponse):
    """A stream whose iterator is closed even when it was never started (a client that left before the first byte)."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.body_iterator.aclose()  # type: ignore[attr-defined]


def _error_of(notice: Notice) -> wire.ErrorBody:
    return wire.ErrorBody(
        error=notice.error_code or wire.INTERNAL, message=notice.message, request_id=notice.request_id
    )


async def _unless_left(work: Coroutine[Any, Any, _Result], request: Request) -> _Result:
    """The work's result, unless the client leaves before: then the work is cancelled."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Refused(wire.ErrorBody(error=wire.CANCELLED, message="the client has gone"))
        return working.result()
    finally:
        for task in (working, leaving):
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _decoded(request: Request, decoder: msgspec.json.Decoder[_Body], *, empty: _Body | None = None) -> _Body:
    """The body, which the listener has bounded."""
    try:
        data = await request.body()
    except ClientDisconnect:
        raise Refused(wire.ErrorBody(error=wire.CANCELLED, message="the client has gone")) from None
    finally:
        body_decoded(request)
    if not data and empty is not None:
        return empty
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        what, _, path = str(error)[:_ECHO_MAX].partition(" - at `$")
        raise _invalid(path.strip("`.") or _missing(what), plain(what)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _invalid("", f"not JSON: {str(error)[:_ECHO_MAX]}") from error


def _count_asked(request: Request) -> int:
    """``?limit=``: how many decisions at most."""
    text = request.query_params.get("limit", str(wire.ROUTING_SHOWN_DEFAULT))
    if not text.isdecimal() or not 1 <= int(text) <= wire.ROUTING_SHOWN_MAX:
        raise _invalid("limit", f"want 1..{wire.ROUTING_SHOWN_MAX}, got {text[:32]!r}")
    return int(text)


def _missing(what: str) -> str:
    """The field that a message about a missing one names."""
    return what.rsplit("`", 2)[1] if what.count("`") >= 2 else ""


def _invalid(field: str, message: str) -> Refused:
    told = f"{field}: {message}" if field else message
    return Refused(wire.ErrorBody(error=wire.INVALID_REQUEST, message=told, field=field or None))


def _json(body: Any, status: int = 200) -> Response:
    return Response(wire.encode_json(body), status, media_type="application/json")


def _error(body: wire.ErrorBody) -> Response:
    return _json(body, wire.STATUS_OF[body.error])


def worded(status: int, code: str, message: str) -> bytes:
    """An error of the listener in the instance's words."""
    if status == 401:
        error = wire.UNAUTHORIZED
    else:
        error = wire.BACKPRESSURE if status in (429, 503) else wire.INVALID_REQUEST
    return wire.encode_json(wire.ErrorBody(error=error, message=f"{code}: {message}"))


class ServerThread:
    """Uvicorn in a thread with a loop of its own.

    Args:
        server: What to serve.
        hostname, port: Where; port 0 takes any.
    """

    def __init__(self, server: ApiServer, hostname: str, port: int) -> None:
        self._server = server
        self._socket = listen(hostname, port)
        self.port: int = self._socket.getsockname()[1]
        self.url = url_of(self._socket)
        self._uvicorn: uvicorn.Server | None = None
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=API_THREAD, daemon=True)

    def start(self, timeout_s: float = 30.0) -> None:
        """Serve. Returns when requests are accepted.

        Raises:
            RuntimeError: It did not start in time, or failed.
        """
        self._thread.start()
        if not self._ready.wait(timeout_s) or self._error is not None:
            raise RuntimeError(f"the API server did not start: {self._error or 'timeout'}")

    def stop(self, timeout_s: float = 5.0) -> None:
        """Answer what is running, then end. Idempotent."""
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        self._socket.close()

    def _run(self) -> None:
        try:
            asyncio.run(self.serve())
        except BaseException as error:  # noqa: BLE001 - handed to start()
            self._error = error
        finally:
            self._ready.set()

    async def serve(self) -> None:
        """Serve until stopped."""
        await self._server.start()
        self._uvicorn = self._server.listener()
        try:
            serving = asyncio.create_task(self._uvicorn.serve(sockets=[self._socket]))
            while not self._uvicorn.started and not serving.done():
                await asyncio.sleep(0.005)
            self._ready.set()
            await serving
        finally:
            await self._server.close()
