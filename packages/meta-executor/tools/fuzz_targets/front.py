# ruff: noqa: S311 - the draws are no secrets
"""Requests to the front, as its application gets them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncGenerator, Callable, Iterator
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


def _answered(status: int, body: bytes) -> None:
    """As :func:`_judged`, and an answer is a whole one: an object with choices, or events up to the last."""
    _judged(status, body)
    if not body.startswith(b"data: "):
        if not json.loads(body)["choices"]:
            raise RuntimeError(f"an answer without choices: {body[:200]!r}")
        return
    *events, last, rest = body.split(b"\n\n")
    if last != b"data: [DONE]" or rest:
        raise RuntimeError(f"a stream that ends with {body[-300:]!r}")
    for event in events:
        if not isinstance(json.loads(event.removeprefix(b"data: "))["choices"], list):
            raise RuntimeError(f"an event without choices: {event[:200]!r}")


#: Most tokens that an answer has here (count).
_ANSWER_TOKENS_MAX = 12


@contextlib.contextmanager
def _front(*, draining: bool) -> Iterator[Any]:
    """A front without instances: it drains, or every request that passes its checks gets drawn tokens for an answer."""
    from meta_executor.config import FrontConfig, SyntheticConfig
    from meta_executor.engine.synthetic import synthetic_model_info
    from meta_executor.engine.tokenizer import Tokenizer
    from meta_executor.front.app import FrontService, create_app
    from meta_executor.front.dispatch import Job, Tokens
    from meta_executor.front.legs import LegClient
    from meta_executor.front.routers import Routers
    from meta_executor.front.servers import make_directory
    from meta_executor.wire import TokenLogprobs

    loop = _Loop()
    vocab_size = 512

    class Answering(FrontService):
        async def tokens(self, job: Job) -> AsyncGenerator[Tokens, None]:
            sampling = job.request.sampling
            draw = random.Random(sampling.seed)

            def told(likeliest: int | None, count: int) -> tuple[TokenLogprobs, ...]:
                if likeliest is None:
                    return ()
                top = tuple((draw.randrange(vocab_size), -float(place)) for place in range(likeliest))
                return tuple(TokenLogprobs(-draw.random(), top) for _ in range(count))

            job.prompt_logprobs = told(sampling.prompt_logprobs, job.request.prompt_count - 1)
            left = min(sampling.max_tokens, _ANSWER_TOKENS_MAX)
            while left:
                count = draw.randint(1, left)
                left -= count
                ids = [draw.randrange(vocab_size) for _ in range(count)]
                end = "length" if sampling.max_tokens <= _ANSWER_TOKENS_MAX else "stop"
                yield Tokens(ids, None if left else end, told(sampling.logprobs, count))
                await asyncio.sleep(0)

    async def make() -> FrontService:
        legs, front = LegClient(KEY), FrontConfig()
        routers = Routers(front.context_router, front.generation_router)
        service = Answering(
            model=synthetic_model_info(SyntheticConfig(vocab_size=vocab_size)),
            served_name="m",
            tokenizer=Tokenizer.synthetic(vocab_size),
            config=front,
            schedule_style="context_first",
            servers=[],
            directory=make_directory([], legs, request_timeout_s=600.0, routers=routers),
            routers=routers,
            legs=legs,
            key=KEY,
        )
        service.draining = draining
        return service

    service = loop.run.run(make())
    yield loop, create_app(service)
    service.close()
    loop.run.close()


#: What clients send in either endpoint, by field; the last ones of a list are refused.
_COMMON: dict[str, list[Any]] = {
    "max_tokens": [1, 2, 5, 12, 300, 10**9],
    "temperature": [0, 0.5, 2, 2.5],
    "top_p": [0.1, 1, 0],
    "top_k": [0, 1, 40],
    "min_p": [0.0, 0.5],
    "min_tokens": [0, 2, 5],
    "seed": [0, 1, 2, 3, 4, 5, 2**31],
    "n": [1, 2, 3, 9999],
    "stop": ["a", ["a", "b"], [], None, "w300", "\ufffd", [""]],
    "stop_token_ids": [[], [1, 300], [511]],
    "ignore_eos": [True, False],
    "stream": [True, False, None],
    "stream_options": [{"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}, {}],
    "logit_bias": [{}, {"5": 1.5, "511": -100}, {"512": 1}],
    "presence_penalty": [0, 1.5, -2],
    "frequency_penalty": [0.0, 0.1],
    "repetition_penalty": [1.0, 1.3],
    "return_token_ids": [True, False],
    "user": ["u", None],
    "conversation_id": ["c", None],
    "of no use": ["x", {"a": [1]}],
}


def _varied(fields: dict[str, list[Any]]) -> Callable[[list[bytes], random.Random], bytes]:
    """Half the inputs as clients send them, with other values of a few fields; the others are mutated."""

    def mutate(seeds: list[bytes], draw: random.Random) -> bytes:
        if draw.random() < 0.5:
            return json_mutated(seeds, draw)
        document = json.loads(draw.choice(seeds))
        for _ in range(draw.randrange(6)):
            name = draw.choice(list(fields))
            document[name] = draw.choice(fields[name])
        return json.dumps(document).encode()

    return mutate


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
    fields = _COMMON | {
        "messages": [
            [{"role": "user", "content": "a </s> b"}],
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "\ue000"}]}],
            [{"role": role, "content": role} for role in ("system", "user", "assistant", "user")],
            [],
        ],
        "logprobs": [True, False],
        "top_logprobs": [0, 2, 20],
        "max_completion_tokens": [1, 7],
        "chat_template_kwargs": [{"a": "b"}, {}],
    }
    with _front(draining=False) as (loop, app):
        headers = [(b"content-type", b"application/json")]
        yield seeds, _varied(fields), lambda data: _answered(*loop.ask(app, "/v1/chat/completions", data, headers))


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
    fields = _COMMON | {
        "prompt": ["hello", "\u00e9\ud83d\ude80", ["a", "b"], [5, 6, 7], [[5], [6, 7]], "</s>", "", [], [512]],
        "echo": [True, False],
        "logprobs": [None, 0, 2, 5],
        "best_of": [1, 2, 3],
    }
    with _front(draining=False) as (loop, app):
        yield seeds, _varied(fields), lambda data: _answered(*loop.ask(app, "/v1/completions", data, []))


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

    with _front(draining=True) as (loop, app):
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

    with _front(draining=True) as (loop, app):

        def read(data: bytes) -> None:
            first, *lines = data.decode("utf-8", "surrogateescape").encode("utf-8", "replace").split(b"\n")
            method, _, path = first.decode("utf-8", "replace").partition(" ")
            headers = [(a.strip().lower(), b.strip()) for a, _, b in (line.partition(b":") for line in lines)]
            status, body = loop.ask(app, path, b"", headers, method or "GET")
            _judged(status, body)

        yield seeds, mutated, read
