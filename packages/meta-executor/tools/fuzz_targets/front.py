"""Requests to the front, as its application gets them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Iterator
from typing import Any

from fuzz_targets.drawing import Refused, Target, json_mutated, mutated

#: Of the run.
KEY = "ab" * 32


class _Loop:
    """Runs coroutines of one target on one loop."""

    def __init__(self) -> None:
        self.run = asyncio.Runner()

    def ask(
        self, app: Any, path: str, body: bytes, headers: list[tuple[bytes, bytes]], method: str = "POST"
    ) -> tuple[int, bytes]:
        """One request to an ASGI application. Status and body."""
        sent: list[dict[str, Any]] = []
        pieces = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if pieces:
                return pieces.pop()
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        raw, _, query = path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": raw,
            "raw_path": raw.encode("utf-8", "replace"),
            "query_string": query.encode("utf-8", "replace"),
            "root_path": "",
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
            "state": {},
        }
        self.run.run(app(scope, receive, send))
        return sent[0]["status"], b"".join(m.get("body", b"") for m in sent[1:])


def _judged(status: int, body: bytes) -> None:
    if status == 500:
        raise RuntimeError(f"status 500: {body[:200]!r}")
    if status >= 400:
        error = json.loads(body)
        if not (error.get("error") or error.get("status")):
            raise RuntimeError(f"status {status} without an error: {body[:200]!r}")
        if len(body) > 4096:
            raise RuntimeError(f"an error of {len(body)} bytes")
        raise Refused


@contextlib.contextmanager
def _front() -> Iterator[Any]:
    from meta_executor.config import FrontConfig, SyntheticConfig
    from meta_executor.engine.synthetic import synthetic_model_info
    from meta_executor.engine.tokenizer import Tokenizer
    from meta_executor.front.app import FrontService, create_app
    from meta_executor.front.legs import LegClient
    from meta_executor.front.routers import Routers
    from meta_executor.front.servers import make_directory

    loop = _Loop()

    async def make() -> FrontService:
        legs, front = LegClient(KEY), FrontConfig()
        routers = Routers(front.context_router, front.generation_router)
        service = FrontService(
            model=synthetic_model_info(SyntheticConfig(vocab_size=512)),
            served_name="m",
            tokenizer=Tokenizer.synthetic(512),
            config=front,
            schedule_style="context_first",
            servers=[],
            directory=make_directory([], legs, request_timeout_s=600.0, routers=routers),
            routers=routers,
            legs=legs,
            key=KEY,
        )
        service.draining = True  # what passes every check is answered with 503
        return service

    service = loop.run.run(make())
    yield loop, create_app(service)
    service.close()
    loop.run.close()


@contextlib.contextmanager
def chat() -> Iterator[Target]:
    """``POST /v1/chat/completions``."""
    seeds = [
        json.dumps(
            {
                "model": "m",
                "messages": [{"role": "user", "content": "hello"}],
                "max_tokens": 5,
                "temperature": 0.5,
                "top_p": 0.9,
                "stop": ["a", "b"],
                "seed": 7,
                "stream": True,
                "stream_options": {"include_usage": True},
                "user": "u",
            }
        ).encode(),
        json.dumps(
            {
                "model": "m",
                "messages": [
                    {"role": "system", "content": [{"type": "text", "text": "a"}]},
                    {"role": "assistant", "content": None, "tool_calls": []},
                ],
                "tools": [],
                "response_format": {"type": "text"},
                "logit_bias": {},
                "metadata": {"a": [1, {"b": 2}]},
            }
        ).encode(),
    ]
    with _front() as (loop, app):
        headers = [(b"content-type", b"application/json")]
        yield seeds, json_mutated, lambda data: _judged(*loop.ask(app, "/v1/chat/completions", data, headers))


@contextlib.contextmanager
def completions() -> Iterator[Target]:
    """``POST /v1/completions``."""
    seeds = [
        json.dumps(
            {
                "model": "m",
                "prompt": "hello",
                "max_tokens": 5,
                "stop_token_ids": [1, 2],
                "ignore_eos": True,
                "n": 1,
                "best_of": 1,
                "echo": False,
                "suffix": "",
                "conversation_id": "c",
                "return_token_ids": True,
            }
        ).encode(),
        json.dumps({"model": "m", "prompt": [5, 6, 7], "logprobs": None}).encode(),
        json.dumps({"model": "m", "prompt": [[5, 6, 7]], "presence_penalty": 0}).encode(),
        json.dumps({"model": "m", "prompt": ["a"], "frequency_penalty": 0.0}).encode(),
    ]
    with _front() as (loop, app):
        yield seeds, json_mutated, lambda data: _judged(*loop.ask(app, "/v1/completions", data, []))


@contextlib.contextmanager
def tokenizing() -> Iterator[Target]:
    """``POST /tokenize`` and ``POST /detokenize``; the first byte says which."""
    bodies = {
        b"t": ("/tokenize", {"model": "m", "prompt": "hello", "return_token_strs": True}),
        b"c": (
            "/tokenize",
            {
                "messages": [
                    {"role": "user", "content": "a </s> b"},
                    {"role": "assistant", "content": [{"type": "text"}]},
                ],
                "add_generation_prompt": False,
                "chat_template_kwargs": {"a": "b", "c": 1.5},
            },
        ),
        b"d": ("/detokenize", {"model": "m", "tokens": [5, 6, 511]}),
    }

    def mutate(seeds: list[bytes], draw: random.Random) -> bytes:
        which = draw.choice(list(bodies))
        return which + json_mutated([json.dumps(bodies[which][1]).encode()], draw)

    with _front() as (loop, app):
        yield [], mutate, lambda data: _judged(*loop.ask(app, bodies[data[:1]][0], data[1:], []))


@contextlib.contextmanager
def paths() -> Iterator[Target]:
    """Every other path of the front: method, path, query and headers."""
    known = [
        "/v1/models",
        "/v1/models/m",
        "/health",
        "/live",
        "/version",
        "/cluster_info",
        "/load",
        "/ping",
        "/docs",
        "/openapi.json",
        "/perf_metrics",
        "/debug/requests/cmpl-5",
        "/debug/reservations",
        "/debug/routing?limit=5",
        "/server_info",
        "/metrics",
        "/prometheus/metrics",
        "/v1/completions",
        "/nothing",
    ]
    key = f"x-meta-executor-key: {KEY}\n".encode()
    seeds = [f"GET {path}\n".encode() + key + b"authorization: Bearer x\nhost: a" for path in known]

    with _front() as (loop, app):

        def read(data: bytes) -> None:
            first, *lines = data.decode("utf-8", "surrogateescape").encode("utf-8", "replace").split(b"\n")
            method, _, path = first.decode("utf-8", "replace").partition(" ")
            headers = [(a.strip().lower(), b.strip()) for a, _, b in (line.partition(b":") for line in lines)]
            status, body = loop.ask(app, path, b"", headers, method or "GET")
            _judged(status, body)

        yield seeds, mutated, read
