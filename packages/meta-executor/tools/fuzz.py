# ruff: noqa: T201, S311 - the draws are no secrets
"""What comes from outside, mutated: ``python packages/meta-executor/tools/fuzz.py [TARGET ...] --count N``.

Every target reads inputs of one kind and may answer with the errors that its contract names. Anything else is a finding: an
exception, an answer of status 500, an input that takes longer than ``--limit`` seconds, memory that grows. A finding is
printed with its target, seed and bytes (hex), and makes the exit code 1; ``--seed S --count 1`` replays it.

Ends with one JSON line per target: ``target``, ``inputs``, ``refused``, ``findings``, ``seconds``, ``rss_growth_mib``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import json
import logging
import multiprocessing
import random
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

#: Pieces that readers of these formats treat in their own way.
_WORDS = [
    b"",
    b"\x00",
    b"\xff",
    b"\xff" * 8,
    b"\x7f" * 8,
    b"{",
    b"}",
    b"[",
    b"]",
    b'"',
    b"\\",
    b"\\u0000",
    b"\\ud800",
    b",",
    b":",
    b"null",
    b"true",
    b"-1",
    b"0",
    b"1e999",
    b"1.5",
    b"9" * 40,
    b"9223372036854775808",
    b"NaN",
    b"\r\n",
    b"\n",
    b" ",
    b"\xc3\x28",
    b"\xed\xa0\x80",
    b"{{",
    b"}}",
    b"{%",
    b"%}",
    b"a" * 300,
    b"[" * 200,
    b"{}," * 100,
    b"<|im_end|>",
    b"</s>",
    b"\x1b[2J",
    b"../../x",
    b"content-length: 5\r\n",
    b"transfer-encoding: chunked\r\n",
    b"0\r\n\r\n",
]


class Refused(Exception):
    """The target answered as its contract says."""


def mutated(seeds: list[bytes], draw: random.Random) -> bytes:
    """One input: a seed with a few changes, or now and then noise."""
    if draw.random() < 0.02:
        return draw.randbytes(draw.randrange(200))
    data = bytearray(draw.choice(seeds))
    for _ in range(draw.choice((0, 1, 1, 2, 3, 6))):
        at = draw.randrange(len(data) + 1)
        match draw.randrange(7):
            case 0 if data:
                data[at % len(data)] ^= 1 << draw.randrange(8)
            case 1:
                data[at:at] = draw.choice(_WORDS)
            case 2:
                del data[at : at + draw.choice((1, 2, 8, 40))]
            case 3:
                size = draw.choice((1, 4, 16))
                data[at : at + size] = draw.randbytes(size)
            case 4:
                other = draw.choice(seeds)
                start = draw.randrange(len(other) + 1)
                data[at : at + draw.randrange(40)] = other[start : start + draw.randrange(80)]
            case 5:
                piece = bytes(data[at : at + draw.choice((1, 8, 60))])
                data[at:at] = piece * draw.choice((1, 3, 20))
            case _:
                word = draw.choice(_WORDS)
                data[at : at + len(word)] = word
    return bytes(data)


def json_mutated(seeds: list[bytes], draw: random.Random) -> bytes:
    """JSON whose values, types and names changed, or a text that is not JSON any more."""
    if draw.random() < 0.4:
        return mutated(seeds, draw)
    document = json.loads(draw.choice(seeds))
    values = [
        None,
        True,
        0,
        -1,
        1,
        2**31,
        2**63,
        2**70,
        1e308,
        0.5,
        "",
        "x" * 300,
        "\x00",
        "\ud800",
        [],
        {},
        [[]],
        [None] * 3,
        {"a": {}},
    ]
    for _ in range(draw.randrange(1, 4)):
        holder = document
        while isinstance(holder, dict | list) and holder and draw.random() < 0.7:
            key = draw.choice(list(holder)) if isinstance(holder, dict) else draw.randrange(len(holder))
            if not isinstance(holder[key], dict | list) or not holder[key]:
                break
            holder = holder[key]
        if isinstance(holder, dict):
            key = draw.choice([*holder, "extra", ""])
            if draw.random() < 0.3:
                holder.pop(key, None)
            else:
                holder[key] = copy.deepcopy(draw.choice(values))
        elif isinstance(holder, list):
            holder.insert(draw.randrange(len(holder) + 1), copy.deepcopy(draw.choice(values)))
    return json.dumps(document).encode("utf-8", "surrogatepass")


# -- targets: a context manager that gives (seeds, mutate, read) ---------------------------------------------------------

Target = tuple[list[bytes], Callable[[list[bytes], random.Random], bytes], Callable[[bytes], None]]
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
def paths() -> Iterator[Target]:
    """Every other path of the front: method, path, query and headers."""
    known = [
        "/v1/models",
        "/v1/models/m",
        "/health",
        "/live",
        "/version",
        "/cluster_info",
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


@contextlib.contextmanager
def instance() -> Iterator[Target]:
    """Bodies of an instance's ``/internal/*``; the first byte says which."""
    from starlette.requests import Request

    from meta_executor.api import server
    from meta_executor.api.endpoint import Refused as InstanceRefused
    from meta_executor.wire import encode_json

    sampling = {"max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "seed": 7, "ignore_eos": True, "stop_token_ids": [1]}
    common = {"request_id": 5, "token_ids": [1, 2], "sampling": sampling, "endpoint_generation": "g", "deadline_s": 1.5}
    peer = {
        "instance_id": "i",
        "endpoint_generation": "g",
        "control_addresses": ["ipc:///a"],
        "url": "http://127.0.0.1:1",
    }
    bodies = {
        b"c": (
            server._CONTEXT,
            {**common, "conversation_id": "c", "cache_salt": "s", "schedule_style": "generation_first"},
        ),
        b"g": (server._GENERATION, {**common, "first_token": 3, "context": peer}),
        b"a": (server._ABORT, {"request_id": 5, "reason": "r"}),
        b"d": (server._DRAIN, {"deadline_s": 5.0}),
    }
    runner = asyncio.Runner()

    def mutate(seeds: list[bytes], draw: random.Random) -> bytes:
        which = draw.choice(list(bodies))
        return which + json_mutated([json.dumps(bodies[which][1]).encode()], draw)

    async def decode(data: bytes) -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": data[1:], "more_body": False}

        await server._decoded(Request({"type": "http"}, receive), bodies[data[:1]][0])

    def read(data: bytes) -> None:
        try:
            runner.run(decode(data))
        except InstanceRefused as refused:
            if len(encode_json(refused.body)) > 4096:
                raise RuntimeError("a long error") from refused
            raise Refused from None

    yield [], mutate, read
    runner.close()


@contextlib.contextmanager
def wire_bytes() -> Iterator[Target]:
    """Bytes of a connection, in pieces, to the listener's protocol: only answers that are HTTP, and no exception."""
    import uvicorn

    from meta_executor.config import HttpConfig
    from meta_executor.front.app import worded
    from meta_executor.listener.bounds import Ledger
    from meta_executor.listener.protocol import BoundedProtocol

    get = b"GET /health HTTP/1.1\r\nhost: a\r\nuser-agent: b\r\n\r\n"
    seeds = [
        get,
        get * 3,
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 10\r\nexpect: 100-continue\r\n\r\n0123456789"
        + get,
        b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n5;x=y\r\nabcde\r\n0\r\na: b\r\n\r\n" + get,
        b"GET /a?b=%20 HTTP/1.0\r\nconnection: keep-alive\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\nxx",
    ]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            if not message["more_body"]:
                break
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    class Transport(asyncio.Transport):
        def __init__(self) -> None:
            super().__init__()
            self.written = bytearray()
            self.ended = False

        def write(self, data: Any) -> None:
            self.written += data

        def is_closing(self) -> bool:
            return self.ended

        def close(self) -> None:
            self.ended = True

        abort = close

        def can_write_eof(self) -> bool:
            return True

        def write_eof(self) -> None: ...

        def pause_reading(self) -> None: ...

        def resume_reading(self) -> None: ...

        def get_extra_info(self, name: str, default: Any = None) -> Any:
            return ("127.0.0.1", 1) if name in ("peername", "sockname") else default

    runner = asyncio.Runner()
    config = uvicorn.Config(app, log_config=None, lifespan="off", ws="none", access_log=False)
    config.load()
    bounds = HttpConfig(header_bytes_max=2048)
    ledger = Ledger(bounds)
    failures: list[dict[str, Any]] = []

    async def connection(data: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: failures.append(context))
        state = uvicorn.Server(config).server_state
        protocol = BoundedProtocol(config, state, {}, bounds=bounds, body_bytes_max=4096, ledger=ledger, worded=worded)
        transport = Transport()
        protocol.connection_made(transport)
        pieces = random.Random(len(data))
        at = 0
        while at < len(data) and not transport.ended:
            size = pieces.choice((1, 3, 50, 1000))
            protocol.data_received(data[at : at + size])
            at += size
            await asyncio.sleep(0)
        for _ in range(60):
            await asyncio.sleep(0)
        protocol.connection_lost(None)
        for task in list(state.tasks):
            await asyncio.wait_for(task, 1)
        return bytes(transport.written)

    def read(data: bytes) -> None:
        written = runner.run(connection(data))
        if failures:
            raise RuntimeError(str(failures.pop()))
        if ledger.connections or ledger.reading_bytes or ledger.lingering:
            raise RuntimeError(
                f"left: {ledger.connections} connections, {ledger.reading_bytes} bytes, {ledger.lingering} lingering"
            )
        rest = written
        while rest:
            head, separator, rest = rest.partition(b"\r\n\r\n")
            if not separator or not head.startswith(b"HTTP/1.1 "):
                raise RuntimeError(f"an answer that is not HTTP: {written[:300]!r}")
            if head.startswith(b"HTTP/1.1 100"):
                continue
            lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            rest = rest[int(lengths[0].partition(b":")[2]) :]
        if b" 200 " not in written[:20]:
            raise Refused

    yield seeds, mutated, read
    runner.close()


@contextlib.contextmanager
def launcher() -> Iterator[Target]:
    """Datagrams to the launcher's socket."""
    from meta_executor.config import service_config
    from meta_executor.supervise.launch import Launcher
    from meta_executor.supervise.report import understood

    started = {"rank_pid": 4194304, "rank_start_ticks": 1, "guard_start_ticks": 2, "parent_pid": 4194304}
    seeds = [
        json.dumps(
            {"owner_id": owner, "rank": 0, "pid": 4194304, "event": event, "instance_id": "", "fields": fields}
        ).encode()
        for owner in ("ctx-0", "front")
        for event, fields in (
            ("started", started),
            ("status", {"phase": "loading"}),
            ("ready", {"url": "http://127.0.0.1:8000", "instance_id": ""}),
            ("orphaned", {"what": "mpiexec", "gone_pid": 9}),
            ("exited", {"rank_pid": 7, "status": -9, "text": "x"}),
            ("memory", {"rss_bytes": 1, "kv_bytes": 2}),
        )
    ]
    listening = Launcher(service_config({}), say=lambda _: None)

    def read(data: bytes) -> None:
        message = understood(data)
        if isinstance(message, str):
            if len(message) > 1000 or not message.isprintable():
                raise RuntimeError(f"a refusal that cannot be shown: {message!r}")
            raise Refused
        listening._on_message(message)

    yield seeds, json_mutated, read


@contextlib.contextmanager
def etcd_records() -> Iterator[Target]:
    """Values under the registrations' prefix."""
    from endpoint_lifecycle import AsyncEndpointDirectory, EndpointError
    from endpoint_lifecycle._discovery import RegistryBook, StoreEvent, decode_registration

    profile = {
        "layout_fingerprint": "f",
        "dp_size": 1,
        "pp_size": 2,
        "tp_size": 1,
        "limits": {"kv_tokens": 5},
        "details": {"a": "b"},
    }
    record = {
        "ready": True,
        "role": "context",
        "owner_id": "ctx-0",
        "instance_id": "i",
        "generation": "g",
        "state": "published",
        "control_addresses": ["tcp://127.0.0.1:5"],
        "profile": profile,
    }
    seeds = [
        json.dumps({"server": "http://127.0.0.1:8000", "role": "context", "record": record}).encode(),
        json.dumps({"server": "http://[::1]:8000", "role": "generation"}).encode(),
    ]

    async def fetch(server: str) -> Any:
        raise OSError(server)

    runner = asyncio.Runner()

    async def stored(data: bytes) -> None:
        book = RegistryBook(AsyncEndpointDirectory(fetch))
        book.event_applied(StoreEvent("/endpoint-lifecycle/servers/context/ctx-0", data, 1), 0.0)
        book.event_applied(StoreEvent("/endpoint-lifecycle/servers/context/ctx-0", None, 2), 0.0)
        if book._known or book.invalid:
            raise RuntimeError("a deleted entry is still there")

    def read(data: bytes) -> None:
        runner.run(stored(data))
        try:
            decode_registration(data)
        except EndpointError as error:
            _shown(error)
            raise Refused from None

    yield seeds, json_mutated, read
    runner.close()


@contextlib.contextmanager
def etcd_watch() -> Iterator[Target]:
    """Messages of etcd's watch."""
    from endpoint_lifecycle import EndpointError
    from endpoint_lifecycle._etcd import EtcdClient, EtcdWatch

    event = {"kv": {"key": "YQ==", "value": "Yg==", "mod_revision": "5"}, "type": "PUT"}
    seeds = [
        json.dumps(message).encode()
        for message in (
            {"result": {"created": True}},
            {"result": {"events": [event, {**event, "type": "DELETE"}]}},
            {"result": {"compact_revision": "7"}},
            {"result": {"canceled": True, "cancel_reason": "x"}},
            {"error": "no"},
        )
    ]
    client = EtcdClient("http://127.0.0.1:1", 1.0)
    watch = EtcdWatch(client, "a", 1, 1.0, lambda events: None)

    def read(data: bytes) -> None:
        try:
            with client._mapped():
                watch._message(json.loads(data))
        except EndpointError:
            raise Refused from None

    yield seeds, json_mutated, read
    client.close()


def _gguf(entries: dict[str, Any], tensors: dict[str, tuple[tuple[int, ...], int]]) -> bytes:
    def text(value: str) -> bytes:
        data = value.encode()
        return struct.pack("<Q", len(data)) + data

    def value(item: Any) -> bytes:
        if isinstance(item, bool):
            return struct.pack("<I?", 7, item)
        if isinstance(item, int):
            return struct.pack("<IQ", 10, item)
        if isinstance(item, float):
            return struct.pack("<If", 6, item)
        if isinstance(item, str):
            return struct.pack("<I", 8) + text(item)
        if isinstance(item[0], str):
            return struct.pack("<IIQ", 9, 8, len(item)) + b"".join(text(one) for one in item)
        code, kind = ("f", 6) if isinstance(item[0], float) else ("i", 5)
        return struct.pack("<IIQ", 9, kind, len(item)) + struct.pack(f"<{len(item)}{code}", *item)

    made = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries))
    made += b"".join(text(key) + value(item) for key, item in entries.items())
    offset = 0
    for name, (shape, kind) in tensors.items():
        made += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
        offset += 4 * (shape[0] * (shape[1] if len(shape) > 1 else 1))
    return made + b"\x00" * (-len(made) % 32 + min(offset, 4096))


@contextlib.contextmanager
def gguf() -> Iterator[Target]:
    """GGUF files: container, shape of the model, tokenizer."""
    from meta_executor.engine.errors import EngineError
    from meta_executor.engine.tokenizer import Tokenizer
    from meta_executor.engine.weights import ModelSource

    shape = {
        f"llama.{name}": value
        for name, value in (
            ("block_count", 2),
            ("embedding_length", 8),
            ("attention.head_count", 2),
            ("attention.head_count_kv", 1),
            ("context_length", 64),
            ("feed_forward_length", 16),
            ("attention.layer_norm_rms_epsilon", 1e-5),
            ("rope.freq_base", 10000.0),
            ("rope.dimension_count", 4),
        )
    }
    tokens = ["<unk>", "<s>", "</s>", "a", "b", "ab", "Ġ"]
    common = {
        "general.architecture": "llama",
        "general.name": "n",
        **shape,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }
    tensors = {"token_embd.weight": ((8, 7), 0), "rope_freqs.weight": ((2,), 0), "output.weight": ((8, 7), 8)}
    seeds = [
        _gguf(
            {
                **common,
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.merges": ["a b"],
                "tokenizer.ggml.pre": "smollm",
            },
            tensors,
        ),
        _gguf(
            {**common, "tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.0] * 7, "general.alignment": 32},
            tensors,
        ),
    ]
    with _scratch() as folder:
        path = folder / "m.gguf"

        def read(data: bytes) -> None:
            path.write_bytes(data)
            refused = 0
            for attempt in (lambda: ModelSource(path, "gguf").describe(), lambda: _use(Tokenizer.from_gguf(path))):
                try:
                    attempt()
                except EngineError as error:
                    _shown(error)
                    refused += 1
            if refused == 2:
                raise Refused

        yield seeds, mutated, read


def _use(tokenizer: Any) -> None:
    from meta_executor.engine.errors import EngineError

    tokenizer.decode(tokenizer.encode_user_text("ab a"))
    with contextlib.suppress(EngineError):
        tokenizer.apply_chat_template([{"role": "user", "content": "ab"}])


def _shown(error: Exception) -> None:
    if len(str(error)) > 2000:
        raise RuntimeError(f"a message of {len(str(error))} characters")


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mx-fuzz-") as folder:
        yield Path(folder)


_CONFIG = {
    "model_type": "llama",
    "num_attention_heads": 2,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "vocab_size": 7,
    "max_position_embeddings": 64,
    "intermediate_size": 16,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


@contextlib.contextmanager
def safetensors() -> Iterator[Target]:
    """Safetensors files of a model's folder."""
    import numpy as np
    from safetensors.numpy import save

    from meta_executor.engine.base import StageSpec
    from meta_executor.engine.errors import EngineError
    from meta_executor.engine.weights import ModelSource, load_stage_tensors

    layer = {
        "self_attn.q_proj": (8, 8),
        "self_attn.k_proj": (4, 8),
        "self_attn.v_proj": (4, 8),
        "self_attn.o_proj": (8, 8),
        "mlp.gate_proj": (16, 8),
        "mlp.up_proj": (16, 8),
        "mlp.down_proj": (8, 16),
        "input_layernorm": (8,),
        "post_attention_layernorm": (8,),
    }
    arrays = {f"model.layers.0.{name}.weight": np.zeros(shape, np.float32) for name, shape in layer.items()}
    arrays |= {"model.embed_tokens.weight": np.zeros((7, 8), np.float16), "model.norm.weight": np.zeros(8, np.float32)}
    seeds = [save(arrays)]
    with _scratch() as folder:
        (folder / "config.json").write_text(json.dumps(_CONFIG))
        (folder / "model.safetensors").write_bytes(seeds[0])
        source, stage = ModelSource(folder, "folder"), StageSpec(0, 1, 0, 1)
        load_stage_tensors(source, stage)

        def header(seeds: list[bytes], draw: random.Random) -> bytes:
            whole = seeds[0]
            (size,) = struct.unpack_from("<Q", whole)
            if draw.random() < 0.3:
                return mutated(seeds, draw)
            text = json_mutated([whole[8 : 8 + size]], draw)
            return struct.pack("<Q", len(text)) + text + whole[8 + size :]

        def read(data: bytes) -> None:
            (folder / "model.safetensors").write_bytes(data)
            try:
                load_stage_tensors(source, stage)
            except EngineError as error:
                _shown(error)
                raise Refused from None

        yield seeds, header, read


@contextlib.contextmanager
def folder_files() -> Iterator[Target]:
    """``config.json``, ``tokenizer.json`` and ``tokenizer_config.json`` of a model's folder; the first byte says which."""
    from meta_executor.engine.errors import EngineError
    from meta_executor.engine.tokenizer import Tokenizer
    from meta_executor.engine.weights import ModelSource

    config = {
        **_CONFIG,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "rope_theta": 10000.0,
    }
    backend = Tokenizer.synthetic(300)._backend
    files = {
        b"c": ("config.json", json.dumps(config).encode()),
        b"t": ("tokenizer.json", backend.to_str().encode()),
        b"u": (
            "tokenizer_config.json",
            json.dumps(
                {"chat_template": [{"name": "default", "template": "{{ messages }}"}], "add_bos_token": True}
            ).encode(),
        ),
    }
    with _scratch() as folder:

        def mutate(seeds: list[bytes], draw: random.Random) -> bytes:
            which = draw.choice(list(files))
            return which + json_mutated([files[which][1]], draw)

        def read(data: bytes) -> None:
            for name, text in files.values():
                (folder / name).write_bytes(text)
            (folder / files[data[:1]][0]).write_bytes(data[1:])
            refused = 0
            for attempt in (
                lambda: ModelSource(folder, "folder").describe(),
                lambda: _use(Tokenizer.from_folder(folder)),
            ):
                try:
                    attempt()
                except EngineError as error:
                    _shown(error)
                    refused += 1
            if refused:
                raise Refused

        yield [which + text for which, (_, text) in files.items()], mutate, read


@contextlib.contextmanager
def templates() -> Iterator[Target]:
    """Chat templates of a model."""
    from meta_executor.engine.errors import EngineError
    from meta_executor.engine.tokenizer import Tokenizer

    base = Tokenizer.synthetic(300)
    seeds = [
        b"{% for m in messages %}{{ '<s>' + m['role'] + '\n' + m.content | trim + '</s>' }}{% endfor %}{{ bos_token }}",
        b"{% if messages[0].role == 'x' %}{{ raise_exception('no') }}{% else %}{{ messages | length * 2 ** 3 }}{% endif %}",
        b"{% set x = namespace(a=1) %}{% macro f(y) %}{{ y / 0 }}{% endmacro %}{{ f(1) }}{{ messages[5].x.y }}{{ 'a' % 3 }}",
        b"{% macro f(y) %}{{ f(y) }}{% endmacro %}{{ f(1) }}",
        b"{{ ''.__class__.__mro__ }}{{ messages.append(1) }}{{ range(10) | list }}{{ 1.5 | int | string | upper }}",
    ]
    messages = [{"role": "user", "content": "hello </s>"}]

    def read(data: bytes) -> None:
        made = Tokenizer(
            base._backend,
            control_tokens={"<s>": 1, "</s>": 2},
            chat_template=data.decode("utf-8", "replace"),
            bos_token_id=1,
            eos_token_ids=(2,),
            add_bos=False,
        )
        try:
            made.apply_chat_template(messages)
        except EngineError as error:
            _shown(error)
            raise Refused from None

    yield seeds, mutated, read


@contextlib.contextmanager
def key_file() -> Iterator[Target]:
    """Files of API keys."""
    from meta_executor.listener.access import KeyFileError, keys_of

    seeds = [b"# keys\nalice alice-key-0123456789abcdef\nops ops-key-0123456789abcdefgh operator\n"]

    def read(data: bytes) -> None:
        try:
            keys_of(data, "file")
        except KeyFileError as error:
            if b"alice-key-0123456789abcdef" in data and "alice-key-0123456789abcdef" in str(error):
                raise RuntimeError("a key in a message") from error
            raise Refused from None

    yield seeds, mutated, read


TARGETS: dict[str, Callable[[], contextlib.AbstractContextManager[Target]]] = {
    one.__name__: one
    for one in (
        chat,
        completions,
        paths,
        instance,
        wire_bytes,
        launcher,
        etcd_records,
        etcd_watch,
        gguf,
        safetensors,
        folder_files,
        templates,
        key_file,
    )
}


class Hang(BaseException):
    """An input took longer than its limit. No Exception, so that no reader takes it for an error of the input."""


def fuzz(
    name: str,
    *,
    count: int,
    seed: int = 0,
    seconds: float = float("inf"),
    limit_s: float = 5.0,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Run one target. What happened, as the JSON line says it."""

    def rang(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, rang)
    refused = findings = done = 0
    started_s = time.monotonic()
    begun_kib = 0
    try:
        with TARGETS[name]() as (seeds, mutate, read):
            started_s = time.monotonic()
            for number in range(seed, seed + count):
                if time.monotonic() - started_s > seconds:
                    break
                data = mutate(seeds, random.Random(number))
                signal.setitimer(signal.ITIMER_REAL, limit_s)
                try:
                    read(data)
                except Refused:
                    refused += 1
                except (Exception, Hang):  # noqa: BLE001 - whatever it is, it is reported
                    findings += 1
                    if findings <= 5:
                        say(
                            f"FINDING: {name} --seed {number} --count 1\n{data[:400].hex()}\n{traceback.format_exc(limit=-6)}"
                        )
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                done += 1
                if done == min(1000, count):
                    begun_kib = _peak_kib()
    finally:
        signal.signal(signal.SIGALRM, before)
    return {
        "target": name,
        "inputs": done,
        "refused": refused,
        "findings": findings,
        "seconds": round(time.monotonic() - started_s, 1),
        "rss_growth_mib": round((_peak_kib() - begun_kib) / 1024),
    }


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> int:
    """Run them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="*", help=f"of {', '.join(TARGETS)}; all without one")
    parser.add_argument("--count", type=int, default=10_000, help="inputs per target")
    parser.add_argument("--seed", type=int, default=0, help="the first input's seed")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end a target after so long (s)")
    parser.add_argument("--limit", type=float, default=5.0, help="longest time for one input (s)")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    if unknown := sorted(set(options.target) - set(TARGETS)):
        parser.error(f"no target {', '.join(unknown)}; there are {', '.join(TARGETS)}")
    lines = [_in_parts(name, options) for name in options.target or TARGETS]
    return 1 if any(line["findings"] for line in lines) else 0


def _quiet(name: str, **settings: Any) -> dict[str, Any]:
    logging.disable(logging.CRITICAL)
    return fuzz(name, **settings)


def _in_parts(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One target, its inputs spread over processes. Prints and returns the sum."""
    share = -(-options.count // options.jobs)
    parts = [
        {"count": min(share, options.count - begin), "seed": options.seed + begin}
        for begin in range(0, options.count, share)
    ]
    bounds = {"seconds": options.seconds, "limit_s": options.limit}
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        results = [future.result() for future in [pool.submit(_quiet, name, **part, **bounds) for part in parts]]
    line = {"target": name}
    for key in ("inputs", "refused", "findings"):
        line[key] = sum(result[key] for result in results)
    for key in ("seconds", "rss_growth_mib"):
        line[key] = max(result[key] for result in results)
    print(json.dumps(line), flush=True)
    return line


if __name__ == "__main__":
    sys.exit(main())
