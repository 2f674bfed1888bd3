"""Routes of the front: OpenAI endpoints, health, metrics and what an operator asks.

A request's life. The body is read within its bound and checked; its prompt is encoded; then one task runs the dispatch
while another waits for the client to leave. Whichever ends first ends the other, so a client that goes away before its
first byte, in the middle or between the legs costs what it has cost by then and no more. A stream's headers are sent with
its first piece, so that what fails earlier still has an honest status.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from endpoint_lifecycle import (
    AsyncEndpointDirectory,
    EndpointError,
    EndpointTimeout,
    StaleGeneration,
    cluster_info_body,
    http_status,
    reservations_body,
)
from meta_executor import __version__, wire
from meta_executor.config import FrontConfig
from meta_executor.engine.base import ModelInfo
from meta_executor.engine.tokenizer import Tokenizer
from meta_executor.front import openai
from meta_executor.front.answers import AnswerText
from meta_executor.front.checking import Call, Checker
from meta_executor.front.choices import Choices
from meta_executor.front.dispatch import Dispatch, Tokens
from meta_executor.front.leg import UNREACHABLE, LegError
from meta_executor.front.legs import LegClient
from meta_executor.front.metrics import FrontMetrics
from meta_executor.front.openai import ApiError
from meta_executor.front.order import LegOrder
from meta_executor.front.servers import FrontServer, TokenLimits, limits_of
from meta_executor.front.tenants import Tenants
from meta_executor.listener.access import CALLER, Access, Caller, Guard, KeyFile, Need, table
from meta_executor.listener.bounds import Ledger
from meta_executor.listener.reading import BodyDecoder, BodyTooLarge, body_decoded, read_body

_LOG = logging.getLogger("meta_executor.front")
#: The API's own word for a client that left; nobody reads it.
_CLIENT_LEFT = 499
#: What of a path is repeated in an error (characters).
_ECHO_MAX = 200
#: What each path wants; every other path a client's key.
NEED_OF = table(
    {
        "/health": Need.OPEN,
        "/live": Need.OPEN,
        "/metrics": Need.STATISTICS,
        "/prometheus/metrics": Need.STATISTICS,
        "/server_info": Need.STATISTICS,
        "/cluster_info": Need.STATISTICS,
    },
    prefixes={"/debug/": Need.OPERATOR, "/internal/": Need.RUN},
)

Handler = Callable[[Request], Awaitable[Response]]


class FrontService:
    """Everything that the routes need, with the life of the process.

    Args:
        model: Shape of the model that is served.
        served_name: Name under which clients ask for it.
        tokenizer: The model's.
        config: Bounds.
        schedule_style: Order of the legs.
        servers: Instances.
        directory: Of them; entered by the caller.
        legs: HTTP to them.
        key: The run's key (hex).
        keys: API keys of clients; None: none are asked for.
        clock: Monotonic time (s).
        on_drain: Called once when a drain begins.
    """

    def __init__(
        self,
        *,
        model: ModelInfo,
        served_name: str,
        tokenizer: Tokenizer,
        config: FrontConfig,
        schedule_style: wire.ScheduleStyle,
        servers: Sequence[FrontServer],
        directory: AsyncEndpointDirectory,
        legs: LegClient,
        key: str,
        keys: KeyFile | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_drain: Callable[[], None] | None = None,
    ) -> None:
        self.model = model
        self.served_name = served_name
        self.tokenizer = tokenizer
        self.config = config
        self.schedule_style = schedule_style
        self.servers = tuple(servers)
        self.directory = directory
        self.access = Access(key, keys)
        self.ledger = Ledger(config.http)
        self.metrics = FrontMetrics(self.ledger)
        self.choices = Choices(directory, self.servers, legs, config.router.type, clock)
        self.dispatch = Dispatch(directory, legs, self.metrics, clock, LegOrder(config.context_leg_group), self.choices)
        self.running = 0
        self.draining = False
        self.created = int(time.time())
        self._tenants = Tenants(bytes.fromhex(key), config.prefix_sharing)
        self._bodies = BodyDecoder()
        self._clock = clock
        self._on_drain = on_drain
        self._checker = Checker(
            model=model,
            served_name=served_name,
            tokenizer=tokenizer,
            schedule_style=schedule_style,
            request_timeout_s=config.request_timeout_s,
            limits=self.token_limits,
            tenants=self._tenants,
            bodies=self._bodies,
        )
        self._idle = asyncio.Event()
        self._idle.set()
        self._runs: set[asyncio.Task[None]] = set()
        self._cutting = False

    # -- life ---------------------------------------------------------------------------------------------------------

    def start_draining(self) -> None:
        """Take nothing new; what runs goes on. Idempotent."""
        if not self.draining:
            self.draining = True
            if self._on_drain is not None:
                self._on_drain()

    async def wait_idle(self) -> None:
        """Wait until no request runs and every abort has been sent."""
        await self._idle.wait()
        await self.dispatch.settle()

    def cut(self) -> int:
        """Stop what runs; its clients are told. Returns how many requests that were."""
        self.start_draining()
        self._cutting = True
        for run in self._runs:
            run.cancel()
        return len(self._runs)

    def close(self) -> None:
        """End what runs beside the loop. Idempotent."""
        self._bodies.close()

    def can_serve(self) -> bool:
        """Whether a request that came now would find both its legs."""
        return not self.draining and self.directory.ready(context=1, generation=1)

    @contextlib.contextmanager
    def _admitted(self, caller: Caller) -> Any:
        if self.draining:
            raise ApiError(503, "the service is draining", code="draining")
        if self.running >= self.config.max_requests:
            raise ApiError(429, f"{self.running} requests are running, at most {self.config.max_requests}", code="busy")
        if self._tenants.running(caller) >= (most := self.config.requests_per_client_max):
            raise ApiError(429, f"{most} requests of this client are running", code="busy")
        self.running += 1
        self._tenants.begin(caller)
        self.metrics.running.set(self.running)
        self._idle.clear()
        try:
            yield
        finally:
            self._tenants.end(caller)
            self.running -= 1
            self.metrics.running.set(self.running)
            if self.running == 0:
                self._idle.set()

    # -- OpenAI endpoints ---------------------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        """``POST /v1/completions``."""
        return await self._endpoint(request, chat=False)

    async def chat_completions(self, request: Request) -> Response:
        """``POST /v1/chat/completions``."""
        return await self._endpoint(request, chat=True)

    async def _endpoint(self, request: Request, *, chat: bool) -> Response:
        self.metrics.total_requests.inc()
        accepted = self._clock()
        caller = request.scope["state"][CALLER]
        try:
            body = await read_body(request, self.config.body_bytes_max)
            call = await (self._checker.chat if chat else self._checker.completion)(body, accepted, caller)
        except BodyTooLarge as error:
            self.metrics.validation_exceptions.inc()
            return _error(ApiError(413, str(error), code="too_large"))
        except ApiError as error:
            self.metrics.validation_exceptions.inc()
            return _error(error)
        except ClientDisconnect:
            self.metrics.client_disconnects.inc()
            return Response(status_code=_CLIENT_LEFT)
        except Exception:  # noqa: BLE001 - logged and answered: a client must never see a bare failure
            self.metrics.internal_errors.inc()
            _LOG.exception("reading a request failed in the front")
            return _error(ApiError(500, "the front failed; its log says why", code="internal"))
        finally:
            body = b""
            body_decoded(request)
        (self.metrics.stream_requests if call.stream else self.metrics.nonstream_requests).inc()
        return _Answer(self, call)

    def token_limits(self) -> TokenLimits:
        """What a request may have: the model's limit, the instances' and their KV pools'."""
        return limits_of(self.directory, self.servers, self.model.context_tokens_max)

    async def tokens(self, call: Call) -> AsyncGenerator[Tokens, None]:
        """A call's tokens; every failure as an :class:`ApiError`."""
        try:
            async with contextlib.aclosing(self.dispatch.run(call.job)) as steps:
                async for tokens in steps:
                    yield tokens
        except LegError as error:
            raise _leg_failed(error) from error
        except StaleGeneration as error:
            raise ApiError(
                503, "the instance was replaced while the request was sent; try again", code="stale"
            ) from error
        except EndpointError as error:
            # A wait for an instance that ended without one is a 503, not a 504: nothing was sent.
            status = 503 if isinstance(error, EndpointTimeout) else http_status(error)
            raise ApiError(status, error.message, code="unavailable") from error

    # -- what else is asked -------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        """``GET /v1/models``."""
        return _json({"object": "list", "data": [self._model_card()]})

    async def one_model(self, request: Request) -> Response:
        """``GET /v1/models/{name}``."""
        if request.path_params["name"] != self.served_name:
            return _error(
                ApiError(404, f"model {request.path_params['name'][:_ECHO_MAX]!r} is not served here", param="model")
            )
        return _json(self._model_card())

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self.served_name,
            "object": "model",
            "created": self.created,
            "owned_by": "meta-executor",
            "max_model_len": self.token_limits().total,
        }

    async def health(self, request: Request) -> Response:
        """``GET /health``: 200 means that a request can be served now."""
        if self.can_serve():
            return _json({"status": "ok"})
        status = "draining" if self.draining else "unavailable"
        ready = {role: self.directory.ready(**{role: 1}) for role in ("context", "generation")}
        return _json({"status": status, "ready": ready}, 503)

    async def live(self, request: Request) -> Response:
        """``GET /live``: the process answers."""
        return _json({"status": "ok"})

    async def version(self, request: Request) -> Response:
        """``GET /version``."""
        return _json({"version": __version__, "wire_version": wire.WIRE_VERSION})

    async def cluster_info(self, request: Request) -> Response:
        """``GET /cluster_info``."""
        return _json(cluster_info_body(self.directory))

    async def reservations(self, request: Request) -> Response:
        """``GET /debug/reservations``."""
        return _json(reservations_body(self.directory))

    async def routing(self, request: Request) -> Response:
        """``GET /debug/routing?limit=n``: why the last requests went where they did, here and in every instance."""
        text = request.query_params.get("limit", str(wire.ROUTING_SHOWN_DEFAULT))
        if not text.isdecimal() or not 1 <= int(text) <= wire.ROUTING_SHOWN_MAX:
            return _error(
                ApiError(
                    400,
                    f"limit: want 1..{wire.ROUTING_SHOWN_MAX}, got {text[:32]!r}",
                    param="limit",
                    code="invalid_value",
                )
            )
        return _json(await self.choices.shown(int(text)))

    async def server_info(self, request: Request) -> Response:
        """``GET /server_info``."""
        return _json(
            {
                "role": "front",
                "ready": self.can_serve(),
                "state": "draining" if self.draining else "serving",
                "version": __version__,
                "model": self.served_name,
                "schedule_style": self.schedule_style,
                "token_limit": self.token_limits().total,
                "running": self.running,
                "servers": [
                    {"owner_id": s.owner_id, "role": s.role, "url": s.url, "status": self.directory.status(s.url).value}
                    for s in self.servers
                ],
            }
        )

    async def metrics_text(self, request: Request) -> Response:
        """``GET /metrics`` and ``/prometheus/metrics``."""
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def drain(self, request: Request) -> Response:
        """``POST /internal/drain``: take nothing new, finish what runs, leave."""
        running = self.running
        self.start_draining()
        return _json({"draining": True, "active": running})


class _Answer(Response):
    """Runs a call and sends its answer, in one piece or as a stream, while watching for the client to leave."""

    def __init__(self, service: FrontService, call: Call) -> None:
        self._service = service
        self._call = call
        self._started = False
        self._ids_told = 0
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        metrics = self._service.metrics
        run = asyncio.create_task(self._run(send), name=f"request {self._call.job.request_id}")
        watch = asyncio.create_task(_client_left(receive))
        self._service._runs.add(run)
        run.add_done_callback(self._service._runs.discard)
        try:
            await asyncio.wait((run, watch), return_when=asyncio.FIRST_COMPLETED)
            if not run.done():
                metrics.client_disconnects.inc()
        finally:
            watch.cancel()
            if not run.done():
                run.cancel()
            # Its cleanup is short and bounded; a second cancellation of this task does not cut it.
            await asyncio.wait((run, watch))
        if run.cancelled():
            return
        error = run.exception()
        if isinstance(error, OSError):
            # The connection broke while sending: the client has left.
            metrics.client_disconnects.inc()
        elif error is not None:
            raise error

    async def _run(self, send: Send) -> None:
        service = self._service
        try:
            try:
                with service._admitted(self._call.caller):
                    async with asyncio.timeout(max(self._call.job.deadline - service._clock(), 0.0)):
                        await (self._stream(send) if self._call.stream else self._whole(send))
            except ApiError:
                raise
            except TimeoutError as error:
                limit_s = service.config.request_timeout_s
                raise ApiError(504, f"no complete answer within {limit_s:g} s", code="deadline_exceeded") from error
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not service._cutting or task is None:
                    raise
                task.uncancel()
                raise ApiError(503, "the service was stopped", code="stopped") from None
            except OSError:
                raise
            except Exception as error:
                service.metrics.internal_errors.inc()
                _LOG.exception(
                    "request %x of %s failed in the front", self._call.job.request_id, self._call.caller.account
                )
                raise ApiError(500, "the front failed; its log says why", code="internal") from error
        except ApiError as error:
            service.metrics.http_exceptions.inc()
            if not self._started:
                await self._send_json(send, error.status, error.body())
            else:
                # After the first piece there is no status any more: the API's clients know an error event.
                await self._send_event(send, msgspec.json.encode(error.body()))
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            service.metrics.total_responses.inc()

    async def _pieces(self) -> AsyncGenerator[tuple[str, AnswerText], None]:
        service, call = self._service, self._call
        answer = AnswerText(service.tokenizer, call.stops, call.end_token_ids)
        async with contextlib.aclosing(service.tokens(call)) as batches:
            async for tokens in batches:
                text = answer.push(tokens.token_ids, tokens.finish_reason)
                if answer.finish_reason is not None:
                    # After a stop string the rest is of no use; leaving here stops the leg.
                    call.job.satisfied = True
                yield text, answer
                if answer.finish_reason is not None:
                    return

    async def _whole(self, send: Send) -> None:
        text: list[str] = []
        answer: AnswerText | None = None
        async with contextlib.aclosing(self._pieces()) as pieces:
            async for piece, progress in pieces:
                text.append(piece)
                answer = progress
        if answer is None or answer.finish_reason is None:
            raise ApiError(502, "the answer ended without a finish reason", code="incomplete")
        body = self._call.shape.whole("".join(text), answer.finish_reason, self._usage(answer), self._new_ids(answer))
        await self._send_json(send, 200, body)

    async def _stream(self, send: Send) -> None:
        shape, with_usage = self._call.shape, self._call.with_usage
        answer = None
        async with contextlib.aclosing(self._pieces()) as pieces:
            async for text, answer in pieces:
                if not self._started:
                    await self._start_stream(send)
                    first = shape.first(with_usage=with_usage)
                    if first is not None:
                        await self._send_event(send, first)
                if text or answer.finish_reason is not None:
                    ids = self._new_ids(answer)
                    piece = shape.piece(text, answer.finish_reason, with_usage=with_usage, ids=ids)
                    await self._send_event(send, piece)
        if answer is None or answer.finish_reason is None:
            raise ApiError(502, "the answer ended without a finish reason", code="incomplete")
        if with_usage:
            await self._send_event(send, shape.last(self._usage(answer)))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    def _new_ids(self, answer: AnswerText) -> openai.AnswerIds | None:
        """Ids of the answer's tokens since the last piece, if the client asked for them."""
        if not self._call.with_ids:
            return None
        begun, self._ids_told = self._ids_told, len(answer.token_ids)
        prompt = self._call.job.request.token_ids.tolist() if begun == 0 else None
        return openai.AnswerIds(answer.token_ids[begun:], prompt)

    def _usage(self, answer: AnswerText) -> dict[str, Any]:
        job = self._call.job
        return openai.usage(job.prompt_tokens or job.request.prompt_count, answer.completion_tokens, job.cached_tokens)

    def _head(self, kind: bytes) -> list[tuple[bytes, bytes]]:
        return [(b"content-type", kind), (b"x-request-id", f"{self._call.job.request_id:x}".encode())]

    async def _start_stream(self, send: Send) -> None:
        headers = [*self._head(b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._started = True

    async def _send_event(self, send: Send, data: bytes) -> None:
        await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})

    async def _send_json(self, send: Send, status: int, data: Mapping[str, Any]) -> None:
        body = msgspec.json.encode(data)
        headers = [*self._head(b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        self._started = True
        await send({"type": "http.response.body", "body": body, "more_body": False})


async def _client_left(receive: Receive) -> None:
    """Returns when the client has left; the body was read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _leg_failed(error: LegError) -> ApiError:
    """What the client is told of a failed leg: refusals as they are, everything else as a bad gateway."""
    words = f"{error.role} instance: {error.message}"
    if error.code == wire.STALE_GENERATION:
        return ApiError(503, "the instance was replaced while the request was sent; try again", code="stale")
    if error.code == wire.LEASE_EXPIRED:
        # Nothing was computed; what the generation instance had set aside is given back by its abort.
        return ApiError(503, words, code="lease_expired")
    if error.code == wire.DEADLINE:
        return ApiError(504, words, code="deadline_exceeded")
    if error.code == UNREACHABLE:
        return ApiError(502, f"{error.role} instance cannot be reached", code="unreachable")
    if error.status in (400, 429, 503) and not error.received:
        return ApiError(error.status, words, param=error.field, code=error.code.lower())
    return ApiError(502, words, code=error.code.lower())


def _json(data: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(data), status_code=status, media_type="application/json")


def _error(error: ApiError) -> Response:
    return _json(error.body(), error.status)


def worded(status: int, code: str, message: str) -> bytes:
    """An error in the API's shape."""
    return msgspec.json.encode(ApiError(status, message, code=code).body())


def create_app(service: FrontService) -> ASGIApp:
    """The routes over a service, for those who may.

    The two endpoints that answer token by token are called without a framework in between: they tell every failure
    themselves, and each layer would be paid for by each token.
    """
    direct = {"/v1/completions": service.completions, "/v1/chat/completions": service.chat_completions}
    routes = _routes(service)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        handler = direct.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if handler is None:
            await routes(scope, receive, send)
            return
        response = await handler(Request(scope, receive, send))
        await response(scope, receive, send)

    return Guard(app, service.access, NEED_OF, worded, service.ledger)


def _routes(service: FrontService) -> Starlette:
    """Everything else, and the two with other methods."""

    async def not_found(request: Request, error: Exception) -> Response:
        return _error(ApiError(404, f"no route {request.url.path[:_ECHO_MAX]}", code="not_found"))

    async def wrong_method(request: Request, error: Exception) -> Response:
        return _error(
            ApiError(405, f"{request.method} is not for {request.url.path[:_ECHO_MAX]}", code="method_not_allowed")
        )

    def get(path: str, handler: Handler) -> Route:
        return Route(path, handler, methods=["GET"])

    return Starlette(
        routes=[
            Route("/v1/completions", service.completions, methods=["POST"]),
            Route("/v1/chat/completions", service.chat_completions, methods=["POST"]),
            get("/v1/models", service.models),
            get("/v1/models/{name:path}", service.one_model),
            get("/health", service.health),
            get("/live", service.live),
            get("/version", service.version),
            get("/cluster_info", service.cluster_info),
            get("/debug/reservations", service.reservations),
            get("/debug/routing", service.routing),
            get("/server_info", service.server_info),
            get("/metrics", service.metrics_text),
            get("/prometheus/metrics", service.metrics_text),
            Route("/internal/drain", service.drain, methods=["POST"]),
        ],
        exception_handlers={404: not_found, 405: wrong_method},
    )
