"""A front over fake instances: small HTTP servers that speak meta_executor.wire and remember what they were told."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import msgspec
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from meta_executor import wire
from meta_executor.config import FrontConfig, SyntheticConfig
from meta_executor.engine.synthetic import synthetic_model_info
from meta_executor.engine.tokenizer import Tokenizer
from meta_executor.front.app import FrontService, create_app, worded
from meta_executor.front.legs import LegClient
from meta_executor.front.routers import Routers
from meta_executor.front.servers import FrontServer, make_directory
from meta_executor.listener.access import KeyFile
from meta_executor.listener.serving import listen, server_of, url_of
from meta_executor.wire import TokenLogprobs

KEY = "ab" * 32
VOCABULARY = 512


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Servers:
    """HTTP servers of one test, stopped all at once."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[uvicorn.Server, asyncio.Task[None]]] = {}

    def start(self, app: Starlette, port: int = 0) -> str:
        listener = socket.socket(proto=socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(512)
        server = _Server(
            uvicorn.Config(
                app, log_config=None, access_log=False, lifespan="off", ws="none", timeout_graceful_shutdown=1
            )
        )
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._running[url] = (server, asyncio.create_task(server.serve(sockets=[listener])))
        return url

    def start_front(self, service: FrontService, hostname: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> str:
        """As the front's process does."""
        listener = listen(hostname, 0)
        server = server_of(
            create_app(service),
            service.config.http,
            service.ledger,
            body_bytes_max=service.config.body_bytes_max,
            worded=worded,
            tls=tls,
        )
        url = url_of(listener, tls=tls is not None)
        self._running[url] = (server, asyncio.create_task(server.serve(sockets=[listener])))
        return url

    async def stop(self, *urls: str) -> None:
        chosen = [self._running.pop(url) for url in (urls or tuple(self._running))]
        for server, task in chosen:
            # As a killed process would: no graceful end, which would cost a fifth of a second per test.
            for listener in getattr(server, "servers", ()):
                listener.close()
            for connection in list(server.server_state.connections):
                connection.transport.abort()
            for running in list(server.server_state.tasks):
                running.cancel()
            task.cancel()
        await asyncio.gather(*(task for _, task in chosen), return_exceptions=True)
        left = [running for server, _ in chosen for running in server.server_state.tasks]
        await asyncio.gather(*left, return_exceptions=True)


class FakeInstance:
    """One instance. Its answer is ``answer``'s text, byte by byte; knobs are plain attributes, read at each request."""

    def __init__(self, role: str, owner_id: str, tokenizer: Tokenizer) -> None:
        self.role = role
        self.owner_id = owner_id
        self.tokenizer = tokenizer
        self.generation = f"{owner_id}-g1"
        self.url = ""
        self.limits = wire.Limits(
            max_seq_len=400,
            kv_tokens=1000,
            max_batch_size=8,
            max_num_tokens=256,
            max_queue_size=64,
            pre_active_requests=8,
        )
        self.answer = "Hello, world!"
        self.received: list[Any] = []
        self.aborts: list[int] = []
        self.disconnects: list[int] = []
        self.info_calls = 0
        self.ready = True
        self.info_status = 200
        #: What it says of itself when it is asked for its health; "": it is well.
        self.unwell = ""
        #: Wait for this before answering.
        self.gate: asyncio.Event | None = None
        #: Wait for this before each line after the first.
        self.line_gate: asyncio.Event | None = None
        #: Refuse the next requests with these (code, message[, field]), one each.
        self.refusals: list[tuple[str, ...]] = []
        #: Break the stream after so many lines; "error" sends an error line, "cut" ends the connection.
        self.break_after: int | None = None
        self.break_how = "error"
        #: Answer ``/debug/routing`` with what is none.
        self.routing_broken = False
        #: Log probabilities: taken from each for every seed, and whether none are told although they are asked for.
        self.malus = 0.0
        self.tells_nothing = False
        self.tells_nothing_of_prompts = False
        self.statistics_asked = 0
        self.started = asyncio.Event()
        #: Generation-first: the other role's fake; its context leg ends only after this one was asked.
        self.peer: FakeInstance | None = None
        self.app = Starlette(
            routes=[
                Route("/server_info", self._info),
                Route("/health", self._health),
                Route("/internal/context", self._context, methods=["POST"]),
                Route("/internal/generation", self._generation, methods=["POST"]),
                Route("/internal/abort", self._abort, methods=["POST"]),
                Route("/debug/routing", self._routing),
                Route("/internal/statistics", self._statistics),
            ]
        )

    def tokens(self, sampling: wire.Sampling) -> tuple[list[int], str]:
        ids = self.tokenizer.encode_user_text(self.answer)
        for place, token in enumerate(ids):
            if token in sampling.stop_token_ids and place < sampling.max_tokens:
                return ids[: place + 1], "stop"
        if sampling.max_tokens <= len(ids):
            return ids[: sampling.max_tokens], "length"
        return [*ids, 2], "stop"

    def logprobs(self, sampling: wire.Sampling, tokens: list[int]) -> tuple[TokenLogprobs, ...]:
        """Of each token its id, and as many of those after it as are wanted."""
        if sampling.logprobs is None or self.tells_nothing:
            return ()
        return tuple(
            TokenLogprobs(
                -token / 100 - self.malus * (sampling.seed % 10),
                tuple((token + i, -(token + i) / 100) for i in range(sampling.logprobs)),
            )
            for token in tokens
        )

    def prompt_logprobs(self, sampling: wire.Sampling, prompt: list[int]) -> tuple[TokenLogprobs, ...]:
        """Of each token behind the first a hundredth of its id and position, and as many others as are wanted."""
        if sampling.prompt_logprobs is None or self.tells_nothing_of_prompts:
            return ()
        return tuple(
            TokenLogprobs(
                -(token + place) / 100,
                tuple((token + i, -(token + place + i) / 100) for i in range(sampling.prompt_logprobs)),
            )
            for place, token in enumerate(prompt[1:], 1)
        )

    async def _info(self, request: Request) -> Response:
        self.info_calls += 1
        return _json(
            wire.ServerInfo(
                ready=self.ready,
                state="PUBLISHED" if self.ready else "FINAL",
                role=self.role,
                owner_id=self.owner_id,
                instance_id=f"{self.generation}-process",
                generation=self.generation if self.ready else None,
                world_size=2,
                pipeline_parallel_size=2 if self.role == "context" else 1,
                attention_dp_size=1 if self.role == "context" else 2,
                control_addresses=[f"ipc:///tmp/{self.owner_id}-{rank}" for rank in range(2)] if self.ready else [],
                model="synthetic",
                vocab_size=VOCABULARY,
                limits=self.limits,
            ),
            self.info_status,
        )

    async def _health(self, request: Request) -> Response:
        status = "failed" if self.unwell else "ok" if self.ready else "starting"
        generation = self.generation if self.ready else None
        health = wire.Health(status=status, role=self.role, endpoint_generation=generation, detail=self.unwell or None)
        return _json(health, 200 if status == "ok" else 503)

    def _refused(self, request: Request, body: Any) -> Response | None:
        assert request.headers[wire.KEY_HEADER] == KEY
        code = message = field = None
        if self.refusals:
            code, message, *rest = self.refusals.pop(0)
            field = rest[0] if rest else None
        elif body.endpoint_generation != self.generation:
            code, message = wire.STALE_GENERATION, "another generation is live"
        if code is None:
            self.received.append(body)
            self.started.set()
            return None
        return _json(wire.ErrorBody(error=code, message=str(message), field=field), wire.STATUS_OF[code])

    async def _context(self, request: Request) -> Response:
        try:
            body = msgspec.json.decode(await request.body(), type=wire.ContextRequest)
        except ClientDisconnect:
            return Response(status_code=499)
        refused = self._refused(request, body)
        if refused is not None:
            return refused
        try:
            if self.gate is not None:
                await self._gate_or_gone(request, body.request_id)
            if self.peer is not None:
                await self.peer.started.wait()
        except asyncio.CancelledError:
            self.disconnects.append(body.request_id)
            raise
        tokens, reason = self.tokens(body.sampling)
        return _json(
            wire.ContextResponse(
                request_id=body.request_id,
                first_token=tokens[0],
                finish_reason=reason if len(tokens) == 1 else None,
                prompt_tokens=len(body.token_ids),
                cached_tokens=1,
                endpoint_generation=self.generation,
                logprobs=self.logprobs(body.sampling, tokens[:1]),
                prompt_logprobs=self.prompt_logprobs(body.sampling, body.token_ids),
            )
        )

    async def _gate_or_gone(self, request: Request, request_id: int) -> None:
        gate = asyncio.create_task(self.gate.wait())
        while not gate.done():
            await asyncio.wait((gate,), timeout=0.02)
            if not gate.done() and await request.is_disconnected():
                gate.cancel()
                self.disconnects.append(request_id)
                return

    async def _generation(self, request: Request) -> Response:
        try:
            body = msgspec.json.decode(await request.body(), type=wire.GenerationRequest)
        except ClientDisconnect:
            return Response(status_code=499)
        refused = self._refused(request, body)
        if refused is not None:
            return refused
        return StreamingResponse(self._lines(body), media_type="application/x-ndjson")

    async def _lines(self, body: wire.GenerationRequest) -> AsyncIterator[bytes]:
        if self.gate is not None:
            await self.gate.wait()
        tokens, reason = self.tokens(body.sampling)
        alone = body.context is None
        if alone:
            assert body.first_token is None and body.schedule_style == "context_first"
        elif body.schedule_style == "context_first":
            assert body.first_token == tokens[0]
            tokens = tokens[1:]
        else:
            assert body.first_token is None
        for place, start in enumerate(range(0, len(tokens), 3)):
            if place == self.break_after:
                if self.break_how == "cut":
                    return
                error = wire.ErrorBody(error=wire.TRANSFER_FAILED, message="the peer died")
                yield wire.encode_json(wire.GenerationChunk(finish_reason="error", error=error)) + b"\n"
                return
            if place and self.line_gate is not None:
                await self.line_gate.wait()
            part = tokens[start : start + 3]
            last = start + 3 >= len(tokens)
            told = part
            if body.schedule_style == "generation_first" and place == 0:
                # What is told of the first token comes with the context leg.
                told = part[1:]
            chunk = wire.GenerationChunk(
                tokens=part,
                finish_reason=reason if last else None,
                logprobs=self.logprobs(body.sampling, told),
                cached_tokens=2 if alone and place == 0 else 0,
                prompt_logprobs=self.prompt_logprobs(body.sampling, body.token_ids) if alone and place == 0 else (),
            )
            yield wire.encode_json(chunk) + b"\n"

    async def _routing(self, request: Request) -> Response:
        assert request.headers[wire.KEY_HEADER] == KEY
        if self.routing_broken:
            return Response(b"{", media_type="application/json")
        limit = int(request.query_params["limit"])
        decisions = [
            wire.RoutingDecision(request_id=body.request_id, rank=0, why="by the fake", tokens=len(body.token_ids))
            for body in self.received
        ]
        return _json(
            wire.InstanceRouting(
                role=self.role,
                owner_id=self.owner_id,
                policy="fake",
                decided=len(decisions),
                decisions=decisions[-limit:],
            )
        )

    async def _statistics(self, request: Request) -> Response:
        assert request.headers[wire.KEY_HEADER] == KEY
        self.statistics_asked += 1
        rank = wire.RankStatistics(rank=0, steps=3, tokens_computed=40, kv_blocks_total=64, tier_reasons={"ok": 2})
        return _json(
            wire.InstanceStatistics(
                role=self.role,
                owner_id=self.owner_id,
                instance_id="i",
                generation=self.generation,
                uptime_s=1.0,
                ranks=[rank],
                tokens_returned=7,
            )
        )

    async def _abort(self, request: Request) -> Response:
        body = msgspec.json.decode(await request.body(), type=wire.AbortRequest)
        self.aborts.append(body.request_id)
        return _json(wire.AbortResponse(request_id=body.request_id, known=True))


def _json(value: Any, status: int = 200) -> Response:
    return Response(wire.encode_json(value), status_code=status, media_type="application/json")


class Cluster:
    """A front, its fakes, and a client for it."""

    def __init__(
        self,
        service: FrontService,
        url: str,
        client: httpx.AsyncClient,
        instances: list[FakeInstance],
        servers: Servers,
    ) -> None:
        self.servers = servers
        self.service = service
        self.url = url
        self.client = client
        self.instances = instances
        self.context = next(i for i in instances if i.role == "context")
        self.generation = next(i for i in instances if i.role == "generation")

    async def settled(self) -> None:
        """Nothing runs, nothing is reserved, every count agrees, no task of a request is left."""
        await asyncio.wait_for(self.service.wait_idle(), 5)
        audit = self.service.directory.audit()
        assert audit.statistics.reservations == 0
        assert not audit.faults
        for instance in self.instances:
            load = self.service.directory.load(instance.url)
            assert (load.count, load.weight) == (0, 0)
        left = [
            t.get_name()
            for t in asyncio.all_tasks()
            if t.get_name().startswith(("request ", "context ", "generation "))
        ]
        assert not left

    async def complete(self, prompt: str = "Say hello", **fields: Any) -> httpx.Response:
        body = {"model": "synthetic", "prompt": prompt, "max_tokens": 64, "temperature": 0, **fields}
        return await self.client.post(f"{self.url}/v1/completions", json=body)


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    return Tokenizer.synthetic(VOCABULARY)


@pytest.fixture
def make_cluster(byte_tokenizer: Tokenizer) -> Callable[..., contextlib.AbstractAsyncContextManager[Cluster]]:
    @contextlib.asynccontextmanager
    async def make(
        style: str = "context_first",
        contexts: int = 1,
        generations: int = 1,
        prepare: bool = True,
        keys: KeyFile | None = None,
        tls: ssl.SSLContext | None = None,
        hostname: str = "127.0.0.1",
        names: dict[str, Any] | None = None,
        local_prefill_max: int = 0,
        elsewhere: bool = False,
        **config: Any,
    ) -> AsyncIterator[Cluster]:
        instances = [FakeInstance("context", f"ctx-{i}", byte_tokenizer) for i in range(contexts)]
        instances += [FakeInstance("generation", f"gen-{i}", byte_tokenizer) for i in range(generations)]
        names_here = [instance.owner_id for instance in instances]
        if elsewhere:
            for instance in instances:
                # Each was started alone: it is the first one of its own run.
                instance.owner_id = "ctx-0" if instance.role == "context" else "gen-0"
        if style == "generation_first":
            for instance in instances:
                if instance.role == "context":
                    instance.peer = next(i for i in instances if i.role == "generation")
        async with contextlib.AsyncExitStack() as stack:
            running = Servers()
            stack.push_async_callback(running.stop)
            for instance in instances:
                instance.url = running.start(instance.app)
            servers = [FrontServer(name, i.role, i.url, elsewhere) for name, i in zip(names_here, instances)]
            legs = LegClient(KEY)
            stack.push_async_callback(legs.close)
            front = FrontConfig(**config)
            routers = Routers(front.context_router, front.generation_router)
            directory = make_directory(servers, legs, request_timeout_s=front.request_timeout_s, routers=routers)
            if prepare:
                await stack.enter_async_context(directory)
                await directory.prepare()
            service = FrontService(
                model=synthetic_model_info(SyntheticConfig(vocab_size=VOCABULARY)),
                served_name="synthetic",
                tokenizer=byte_tokenizer,
                config=front,
                schedule_style=style,  # type: ignore[arg-type]
                servers=servers,
                directory=directory,
                routers=routers,
                legs=legs,
                key=KEY,
                keys=keys,
                local_prefill_max=local_prefill_max,
                **(names or {}),
            )
            stack.callback(service.close)
            url = running.start_front(service, hostname, tls)
            client = await stack.enter_async_context(
                httpx.AsyncClient(timeout=20, trust_env=False, verify=False, headers={wire.KEY_HEADER: KEY})
            )
            yield Cluster(service, url, client, instances, running)

    return make
