# ruff: noqa: S311 - the draws are no secrets
"""What comes before a route: bytes of a connection, bodies of an instance's requests, files of keys."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Iterator
from typing import Any

from fuzz_targets.drawing import Refused, Target, json_mutated, mutated


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
def key_file() -> Iterator[Target]:
    """Files of API keys: no message and no name shows one, however the file is damaged."""
    from meta_executor.listener.access import KeyFileError, keys_of

    secrets = ("alice-key-0123456789abcdef", "ops-key-0123456789abcdefgh")
    seeds = [f"# keys\nalice {secrets[0]}\nops {secrets[1]} operator\n".encode()]
    #: What no message may have of a key: so many characters of it in a row.
    pieces = {secret[at : at + 8] for secret in secrets for at in range(len(secret) - 7)}

    def read(data: bytes) -> None:
        try:
            keys = keys_of(data, "file")
        except KeyFileError as error:
            if any(piece in str(error) for piece in pieces):
                raise RuntimeError("part of a key in a message") from error
            raise Refused from None
        if any(secret in key.name for key in keys for secret in secrets):
            raise RuntimeError("a key is a name")

    yield seeds, mutated, read
