"""Routes of the front: OpenAI endpoints, health, metrics and what an operator asks.

A request's life. It has a name, the client's own or one that is made; the body is read within its bound and checked; its
prompts are encoded; then a :class:`~meta_executor.front.replies.Reply` runs the dispatch while it watches for the client to
leave, so a client that goes away before its first byte, in the middle or between the legs costs what it has cost by then and
no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
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
from meta_executor.front.checking import Asked, Checker
from meta_executor.front.choices import Choices
from meta_executor.front.dispatch import Dispatch, Job, Tokens
from meta_executor.front.document import documentation_page, openapi_document
from meta_executor.front.envelope import REQUEST_ID, Envelope
from meta_executor.front.leg import UNREACHABLE, LegError
from meta_executor.front.legs import LegClient
from meta_executor.front.live import Live, TooManyWatch, WatchResponse, looked_at, page
from meta_executor.front.metrics import FrontMetrics
from meta_executor.front.openai import ApiError
from meta_executor.front.order import LegOrder
from meta_executor.front.replies import UNKNOWN_HEADER, Reply
from meta_executor.front.routers import Routers
from meta_executor.front.servers import FrontServer, Servers, TokenLimits, limits_of
from meta_executor.front.stories import Stories, Story
from meta_executor.front.tenants import Tenants
from meta_executor.front.wellness import Wellness
from meta_executor.listener.access import CALLER, Access, Caller, Guard, KeyFile, Need, table
from meta_executor.listener.bounds import Ledger
from meta_executor.listener.reading import BodyDecoder, BodyTooLarge, body_decoded, read_body

_LOG = logging.getLogger("meta_executor.front")
#: The API's own word for a client that left; nobody reads it.
_CLIENT_LEFT = 499
#: Unknown fields whose first use is logged (count): a client that makes names up does not fill the log.
_UNKNOWN_LOGGED_MAX = 256
#: Requests whose stories are kept (count).
_STORIES_MAX = 1024
#: What of a path is repeated in an error (characters).
_ECHO_MAX = 200
#: What each path wants; every other path a client's key.
NEED_OF = table(
    {
        "/health": Need.OPEN,
        "/": Need.OPEN,
        "/live": Need.OPEN,
        "/live/events": Need.STATISTICS,
        "/ping": Need.OPEN,
        "/perf_metrics": Need.STATISTICS,
        "/load": Need.STATISTICS,
        "/metrics": Need.STATISTICS,
        "/prometheus/metrics": Need.STATISTICS,
        "/server_info": Need.STATISTICS,
        "/cluster_info": Need.STATISTICS,
    },
    prefixes={"/debug/": Need.OPERATOR, "/internal/": Need.RUN},
)

Handler = Callable[[Request], Awaitable[Response]]
_Checked = TypeVar("_Checked")


class FrontService:
    """Everything that the routes need, with the life of the process.

    Args:
        model: Shape of the model that is served.
        served_name: Name under which clients ask for it.
        aliases: Further names that are shown.
        known_as: Further names that are taken and not shown.
        tokenizer: The model's.
        config: Bounds.
        schedule_style: Order of the legs.
        servers: Instances that are listed; others may register.
        directory: Of them; entered by the caller.
        routers: How one of several is chosen.
        legs: To them, over their streams or HTTP.
        key: The run's key (hex).
        keys: API keys of clients; None: none are asked for.
        clock: Monotonic time (s).
        local_prefill_max: Prompts of at most so many tokens are computed by the generation instance itself (tokens).
        wall_clock: Unix time (s), for stories alone.
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
        routers: Routers,
        legs: LegClient,
        key: str,
        keys: KeyFile | None = None,
        aliases: Sequence[str] = (),
        known_as: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
        local_prefill_max: int = 0,
        wall_clock: Callable[[], float] = time.time,
        on_drain: Callable[[], None] | None = None,
    ) -> None:
        self.model = model
        self.served_names = tuple(dict.fromkeys((served_name, *aliases)))
        self.tokenizer = tokenizer
        self.config = config
        self.schedule_style = schedule_style
        self.servers = Servers(directory, servers)
        self.directory = directory
        self.access = Access(key, keys)
        self.ledger = Ledger(config.http)
        self.metrics = FrontMetrics(self.ledger, served_name)
        self.stories = Stories(_STORIES_MAX, config.perf_metrics_max_requests)
        self.wellness = Wellness(directory, legs)
        self.choices = Choices(directory, self.servers, legs, routers, clock)
        self.watching = Live(self._look)
        self._legs = legs
        self.dispatch = Dispatch(
            directory, routers, legs, self.metrics, clock, LegOrder(config.context_leg_group), self.choices,
            instance_wait_s=config.instance_wait_s,
        )  # fmt: skip
        self.running = 0
        self.draining = False
        self.created = int(time.time())
        self._tenants = Tenants(bytes.fromhex(key), config.prefix_sharing)
        self._bodies = BodyDecoder()
        self._clock = clock
        self._wall_clock = wall_clock
        self._on_drain = on_drain
        self._checker = Checker(
            model=model,
            names=tuple(dict.fromkeys((*self.served_names, *known_as))),
            tokenizer=tokenizer,
            schedule_style=schedule_style,
            config=config,
            local_prefill_max=local_prefill_max,
            limits=self.token_limits,
            tenants=self._tenants,
            bodies=self._bodies,
        )
        self._idle = asyncio.Event()
        self._idle.set()
        self.runs: set[asyncio.Task[None]] = set()
        self.cutting = False
        self._unknown_logged: set[str] = set()

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
        self.cutting = True
        for run in self.runs:
            run.cancel()
        return len(self.runs)

    def close(self) -> None:
        """End what runs beside the loop. Idempotent."""
        self._bodies.close()

    def can_serve(self) -> bool:
        """Whether a request that came now would find both its legs."""
        return not self.draining and all(self.wellness.serves(role) for role in ("context", "generation"))

    @contextlib.contextmanager
    def admitted(self, caller: Caller, answers: int) -> Iterator[None]:
        """Count so many answers of a caller while they are made.

        Raises:
            ApiError: There are too many, or the service is draining.
        """
        if self.draining:
            raise ApiError(503, "the service is draining", code="draining")
        if self.running + answers > self.config.max_requests:
            raise ApiError(429, f"{self.running} requests are running, at most {self.config.max_requests}", code="busy")
        if self._tenants.running(caller) + answers > (most := self.config.requests_per_client_max):
            raise ApiError(429, f"{most} requests of this client are running", code="busy")
        self.running += answers
        self._tenants.begin(caller, answers)
        self.metrics.running.set(self.running)
        self._idle.clear()
        try:
            yield
        finally:
            self._tenants.end(caller, answers)
            self.running -= answers
            self.metrics.running.set(self.running)
            if self.running == 0:
                self._idle.set()

    def now_s(self) -> float:
        """On the clock of the deadlines (s)."""
        return self._clock()

    # -- OpenAI endpoints ---------------------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        """``POST /v1/completions``."""
        return await self._endpoint(request, chat=False)

    async def chat_completions(self, request: Request) -> Response:
        """``POST /v1/chat/completions``."""
        return await self._endpoint(request, chat=True)

    async def _endpoint(self, request: Request, *, chat: bool) -> Response:
        self.metrics.total_requests.inc()
        state = request.scope["state"]
        asked = Asked(state[CALLER], self._clock(), state[REQUEST_ID])
        story = Story(asked.request_id, request.scope["path"], asked.caller.account, asked.accepted, self._wall_clock())
        self.stories.begin(story)
        reply = await self._read(request, lambda body: self._reply_to(body, asked, story, chat=chat))
        if not isinstance(reply, Reply):
            story.tell(self._clock(), f"refused with {reply.status_code}")
            self.stories.ended(story)
        return reply

    async def _reply_to(self, body: bytes, asked: Asked, story: Story, *, chat: bool) -> Response:
        call = await (self._checker.chat if chat else self._checker.completion)(body, asked)
        self.stories.answers(story, [job.request_id for job in call.jobs])
        for job in call.jobs:
            job.story = story
        story.tell(
            self._clock(),
            f"read: {len(call.jobs)} answers, {call.jobs[0].request.prompt_count} tokens in the first prompt",
        )
        (self.metrics.stream_requests if call.stream else self.metrics.nonstream_requests).inc()
        self._log_unknown(call.unknown)
        return Reply(self, call, story)

    async def _read(self, request: Request, check: Callable[[bytes], Awaitable[_Checked]]) -> _Checked | Response:
        """Read a request's body and check it; or the answer to what is wrong with it."""
        try:
            body = await read_body(request, self.config.body_bytes_max)
            return await check(body)
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
            _LOG.exception("reading request %s failed in the front", request.scope["state"][REQUEST_ID])
            return _error(ApiError(500, "the front failed; its log says why", code="internal"))
        finally:
            body = b""
            body_decoded(request)

    def _log_unknown(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self._unknown_logged and len(self._unknown_logged) < _UNKNOWN_LOGGED_MAX:
                self._unknown_logged.add(name)
                _LOG.warning("requests have a field %r, which has no effect here", name)

    async def tokenize(self, request: Request) -> Response:
        """``POST /tokenize``: the tokens that a text or a conversation has here."""
        made = await self._read(request, self._checker.tokenized)
        if isinstance(made, Response):
            return made
        ids, texts = made
        return _json(
            {
                "count": len(ids),
                "max_model_len": self.token_limits().total,
                "tokens": ids,
                "token_strs": texts,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        """``POST /detokenize``: the text of tokens."""
        made = await self._read(request, self._checker.detokenized)
        return made if isinstance(made, Response) else _json({"prompt": made})

    def token_limits(self) -> TokenLimits:
        """What a request may have: the model's limit, the instances' and their KV pools'."""
        return limits_of(self.directory, self.model.context_tokens_max)

    async def tokens(self, job: Job) -> AsyncGenerator[Tokens, None]:
        """A job's tokens; every failure as an :class:`ApiError`."""
        try:
            async with contextlib.aclosing(self.dispatch.run(job)) as steps:
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
        return _json({"object": "list", "data": [self._model_card(name) for name in self.served_names]})

    async def one_model(self, request: Request) -> Response:
        """``GET /v1/models/{name}``."""
        name = request.path_params["name"]
        if not name:
            return await self.models(request)
        if name not in self.served_names:
            return _error(ApiError(404, f"model {name[:_ECHO_MAX]!r} is not served here", param="model"))
        return _json(self._model_card(name))

    def _model_card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "meta-executor",
            "root": self.served_names[0],
            "max_model_len": self.token_limits().total,
        }

    async def load(self, request: Request) -> Response:
        """``GET /load``: answers that are being made now."""
        return _json({"server_load": self.running})

    async def document(self, request: Request) -> Response:
        """``GET /openapi.json``."""
        return _json(openapi_document(self.served_names))

    async def documentation(self, request: Request) -> Response:
        """``GET /docs``."""
        return Response(documentation_page(self.served_names), media_type="text/html; charset=utf-8")

    async def health(self, request: Request) -> Response:
        """``GET /health``: 200 means that a request can be served now."""
        if self.can_serve():
            return _json({"status": "ok"})
        status = "draining" if self.draining else "unavailable"
        ready = {role: self.wellness.serves(role) for role in ("context", "generation")}
        why = {self.servers.owner_of(url): why for url, why in self.wellness.unwell.items()}
        return _json({"status": status, "ready": ready, **({"why": why} if why else {})}, 503)

    async def live(self, request: Request) -> Response:
        """``GET /live``: the process answers."""
        return _json({"status": "ok"})

    async def live_page(self, request: Request) -> Response:
        """``GET /``: the page that shows what happens now; what it shows it asks for itself, with a key where one is wanted."""
        text, policy = page()
        headers = {"content-security-policy": policy, "cache-control": "no-store", "x-content-type-options": "nosniff"}
        return Response(text, media_type="text/html", headers=headers)

    async def live_events(self, request: Request) -> Response:
        """``GET /live/events``: what happens now, a look a second, as server-sent events."""
        try:
            watch = self.watching.watch()
        except TooManyWatch:
            return _error(ApiError(503, "as many watch as may at once", code="too_many_watchers"))
        return WatchResponse(watch)

    async def _look(self) -> dict[str, Any]:
        # No ids and no texts: whoever may read the metrics may see this.
        instances = await looked_at(self.servers, self._legs)
        return {
            "at_s": self._clock(),
            "model": self.served_names[0],
            "schedule_style": self.schedule_style,
            "serves": self.can_serve(),
            "draining": self.draining,
            "running": self.running,
            "watchers": self.watching.watchers,
            "values": self.metrics.values(),
            "instances": instances,
        }

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
                "model": self.served_names[0],
                "model_names": list(self.served_names),
                "schedule_style": self.schedule_style,
                "token_limit": self.token_limits().total,
                "running": self.running,
                "servers": [
                    {"owner_id": s.owner_id, "role": s.role, "url": s.url, "status": self.directory.status(s.url).value}
                    for s in self.servers
                ],
            }
        )

    async def one_request(self, request: Request) -> Response:
        """``GET /debug/requests/{id}``: what happened to a request, and where it went inside the instances."""
        story = self.stories.find(request.path_params["id"])
        if story is None:
            return _error(
                ApiError(
                    404, f"no request {request.path_params['id'][:_ECHO_MAX]!r} among the last ones", code="not_found"
                )
            )
        shown = story.shown(self._owner_of)
        routing = await self.choices.shown(wire.ROUTING_SHOWN_MAX)
        shown["decisions"] = [one for one in routing.decisions if one.request_id in story.answers]
        shown["instances"] = {
            instance.owner_id: [one for one in instance.decisions if one.request_id in story.answers]
            for instance in routing.instances
        }
        shown["unknown"] = routing.unknown
        return _json(shown)

    async def perf_metrics(self, request: Request) -> Response:
        """``GET /perf_metrics``: both legs of what has ended since the last call."""
        return _json(self.stories.drain(self._owner_of))

    def _owner_of(self, server: str) -> str:
        return self.servers.owner_of(server)

    async def metrics_text(self, request: Request) -> Response:
        """``GET /metrics`` and ``/prometheus/metrics``."""
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def drain(self, request: Request) -> Response:
        """``POST /internal/drain``: take nothing new, finish what runs, leave."""
        running = self.running
        self.start_draining()
        return _json({"draining": True, "active": running})


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
    response = _json(error.body(), error.status)
    response.headers.update(error.headers())
    return response


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

    guarded: ASGIApp = Guard(app, service.access, NEED_OF, worded, service.ledger)
    if service.config.cors_origins:
        # A browser asks whether it may before it has a key to show.
        guarded = CORSMiddleware(
            guarded,
            allow_origins=service.config.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", UNKNOWN_HEADER.decode()],
        )
    return Envelope(guarded, access_log=service.config.access_log)


def _routes(service: FrontService) -> Starlette:
    """Everything else, and the two with other methods."""

    async def not_found(request: Request, error: Exception) -> Response:
        return _error(ApiError(404, f"no route {request.url.path[:_ECHO_MAX]}", code="not_found"))

    async def wrong_method(request: Request, error: Exception) -> Response:
        response = _error(
            ApiError(405, f"{request.method} is not for {request.url.path[:_ECHO_MAX]}", code="method_not_allowed")
        )
        if isinstance(error, HTTPException) and error.headers:
            # Which methods are.
            response.headers.update(error.headers)
        return response

    def get(path: str, handler: Handler) -> Route:
        return Route(path, handler, methods=["GET"])

    routes = Starlette(
        routes=[
            Route("/v1/completions", service.completions, methods=["POST"]),
            Route("/v1/chat/completions", service.chat_completions, methods=["POST"]),
            get("/v1/models", service.models),
            get("/v1/models/{name:path}", service.one_model),
            get("/health", service.health),
            get("/", service.live_page),
            get("/live", service.live),
            get("/live/events", service.live_events),
            Route("/ping", service.health, methods=["GET", "POST"]),
            get("/load", service.load),
            get("/version", service.version),
            get("/openapi.json", service.document),
            get("/docs", service.documentation),
            Route("/tokenize", service.tokenize, methods=["POST"]),
            Route("/detokenize", service.detokenize, methods=["POST"]),
            get("/perf_metrics", service.perf_metrics),
            get("/debug/requests/{id}", service.one_request),
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
    # A redirection to a path without its slash would lead to whichever host the client's header names.
    routes.router.redirect_slashes = False
    return routes
