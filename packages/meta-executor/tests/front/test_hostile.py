"""Hostile clients over raw sockets: every wait, size and count has an end, and every refusal is an honest answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
import uvicorn

from meta_executor import wire
from meta_executor.config import HttpConfig
from meta_executor.front.app import worded
from meta_executor.listener.bounds import Ledger
from meta_executor.listener.protocol import BoundedProtocol

pytestmark = pytest.mark.asyncio

#: For what must not be waited for; a test that meets it fails.
LONG = 3600.0
PATIENT = {"header_timeout_s": LONG, "body_timeout_s": LONG, "idle_timeout_s": LONG, "write_timeout_s": LONG}


def bounds(**changed: Any) -> HttpConfig:
    return HttpConfig(**{**PATIENT, **changed})


def post(body: bytes, *headers: str, path: str = "/v1/completions", length: int | None = None) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: x", *headers]
    if length != -1:
        lines.append(f"content-length: {len(body) if length is None else length}")
    return "\r\n".join([*lines, "", ""]).encode() + body


GET = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
BODY = json.dumps({"model": "synthetic", "prompt": "hello", "temperature": 0}).encode()


class Peer:
    """One raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    #: Open ones of this test.
    known: ClassVar[list[Peer]] = []

    @classmethod
    async def of(cls, cluster: Any) -> Peer:
        at = urlsplit(cluster.url)
        peer = cls(*await asyncio.open_connection(at.hostname, at.port))
        cls.known.append(peer)
        return peer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the next answer that has a length."""
        async with asyncio.timeout(20):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            return int(head[0].split()[1]), headers, await self.reader.readexactly(int(headers["content-length"]))

    async def rest(self) -> bytes:
        """All that comes until the other side closes."""
        async with asyncio.timeout(20):
            return await self.reader.read()

    async def ended(self) -> bool:
        """The other side closes without a word; also where it does so while something of ours is on its way."""
        try:
            return await self.rest() == b""
        except ConnectionResetError:
            return True

    async def refused(self, status: int, code: str) -> None:
        """The one answer, in the API's shape, and then the end."""
        got, headers, body = await self.answer()
        error = json.loads(body)["error"]
        assert (got, error["code"], headers["connection"]) == (status, code, "close"), error
        assert ("retry-after" in headers) == (status in (429, 503))
        assert await self.rest() == b""

    def close(self) -> None:
        self.writer.close()


@pytest_asyncio.fixture(autouse=True)
async def closed() -> AsyncIterator[None]:
    """No connection of a test outlives it."""
    yield
    for peer in Peer.known:
        peer.close()
        with contextlib.suppress(OSError):
            await peer.writer.wait_closed()
    Peer.known.clear()


async def told(cluster: Any, code: str, count: int = 1) -> None:
    assert cluster.service.ledger.refused[code] == count
    text = (await cluster.client.get(f"{cluster.url}/metrics")).text
    assert f'http_refusals_total{{code="{code}"}} {count}.0' in text


async def test_a_head_that_does_not_come_to_its_end(make_cluster: Any) -> None:
    """Slow heads get 408, the first and a later one; who has sent nothing is closed without a word; both within the bound."""
    async with make_cluster(http=bounds(header_timeout_s=0.2)) as cluster:
        silent, slow, later, drip = [await Peer.of(cluster) for _ in range(4)]
        slow.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-a: ")
        later.send(GET)
        assert (await later.answer())[0] == 200
        later.send(b"GET /ver")
        dripping = asyncio.create_task(_drip(drip, b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 10_000))
        assert await silent.rest() == b""
        for peer in (slow, later, drip):
            await peer.refused(408, "head_timeout")
        dripping.cancel()
        await told(cluster, "head_timeout", 3)


async def _drip(peer: Peer, data: bytes) -> None:
    for place in range(len(data)):
        peer.send(data[place : place + 1])
        await asyncio.sleep(0.01)


async def test_a_body_that_does_not_come_to_its_end(make_cluster: Any) -> None:
    """408, also where a byte comes now and then; the bytes are given back, and no request is left."""
    async with make_cluster(http=bounds(body_timeout_s=0.2)) as cluster:
        half, drip = await Peer.of(cluster), await Peer.of(cluster)
        half.send(post(b'{"model": ', length=1000))
        drip.send(post(b"", "transfer-encoding: chunked", length=-1))
        dripping = asyncio.create_task(_drip(drip, b"1\r\n \r\n" * 1000))
        for peer in (half, drip):
            await peer.refused(408, "body_timeout")
        dripping.cancel()
        await told(cluster, "body_timeout", 2)
        assert cluster.service.ledger.reading_bytes == 0
        await cluster.settled()


async def test_an_idle_connection_is_closed(make_cluster: Any) -> None:
    """Between requests; empty lines do not keep it open."""
    async with make_cluster(http=bounds(idle_timeout_s=0.2)) as cluster:
        idle, lines = await Peer.of(cluster), await Peer.of(cluster)
        for peer in (idle, lines):
            peer.send(GET)
            assert (await peer.answer())[0] == 200
        dripping = asyncio.create_task(_drip(lines, b"\r\n" * 1000))
        assert await idle.ended() and await lines.ended()
        dripping.cancel()
        assert cluster.service.ledger.connections == 0


async def test_no_answer_leads_to_a_host_that_the_client_names(make_cluster: Any) -> None:
    """A path with a slash too many is one that does not exist, and no redirection to the host of the request's header."""
    async with make_cluster(http=bounds()) as cluster:
        peer = await Peer.of(cluster)
        for path in (b"/version/", b"/metrics/", b"/v1/models//"):
            peer.send(b"GET %b HTTP/1.1\r\nhost: evil.example\r\n\r\n" % path)
            status, headers, body = await peer.answer()
            assert (status, "location" in headers, b"evil" in body) == (404, False, False), path


@pytest.mark.parametrize(
    ("head", "code"),
    [
        (b"x-a: " + b"a" * 70_000 + b"\r\n", "headers_too_large"),
        (b"x-a: " + b"a" * 400_000, "headers_too_large"),
        (b"x-a: " + b"a" * 1000 + b"\r\n" + (b"x-b: " + b"a" * 1000 + b"\r\n") * 80, "headers_too_large"),
        (b"x: y\r\n" * 130, "too_many_headers"),
    ],
    ids=range(4),
)
async def test_a_head_that_is_too_large(make_cluster: Any, head: bytes, code: str) -> None:
    """431 before its end: one long header, one without an end, many, and many small ones."""
    async with make_cluster(http=bounds()) as cluster:
        peer = await Peer.of(cluster)
        peer.send(b"GET /version HTTP/1.1\r\n" + head)
        await peer.refused(431, code)
        path = await Peer.of(cluster)
        path.send(b"GET /" + b"a" * 70_000)
        await path.refused(431, "headers_too_large")


async def test_what_follows_a_chunked_body_is_bounded_and_not_looked_at(make_cluster: Any) -> None:
    """Trailers count as head, and cannot add a header to a request that was let in without it."""
    async with make_cluster(http=bounds()) as cluster:
        chunked = post(b"", "transfer-encoding: chunked", length=-1) + b"%x\r\n%s\r\n0\r\n" % (len(BODY), BODY)
        peer = await Peer.of(cluster)
        peer.send(chunked + b"x-meta-executor-key: " + b"ab" * 32 + b"\r\n\r\n")
        assert (await peer.answer())[0] == 200
        drain = post(b"", "transfer-encoding: chunked", path="/internal/drain", length=-1)
        peer.send(drain + b"0\r\nx-meta-executor-key: " + b"ab" * 32 + b"\r\n\r\n")
        assert (await peer.answer())[0] == 401
        flood = await Peer.of(cluster)
        flood.send(chunked[:-3] + b"0\r\n" + b"x: y\r\n" * 200)
        await flood.refused(431, "too_many_headers")
        await cluster.settled()


async def test_a_body_that_is_too_large(make_cluster: Any) -> None:
    """413: announced, before a byte of it; in chunks, once it is larger. The answer reaches a client that goes on sending."""
    async with make_cluster(body_bytes_max=100_000, http=bounds()) as cluster:
        announced = await Peer.of(cluster)
        announced.send(post(b"", "expect: 100-continue", length=100_001))
        await announced.refused(413, "too_large")
        exact = await Peer.of(cluster)
        exact.send(post(BODY.ljust(100_000)))
        assert (await exact.answer())[0] == 200
        chunks = await Peer.of(cluster)
        chunks.send(post(b"", "transfer-encoding: chunked", length=-1) + (b"8000\r\n" + b" " * 0x8000 + b"\r\n") * 100)
        await chunks.refused(413, "too_large")
        small = await Peer.of(cluster)
        small.send(post(b"", "transfer-encoding: chunked", length=-1) + b"1\r\n \r\n" * 5000)
        await small.refused(400, "chunks")
        await cluster.settled()


async def test_an_answer_before_the_body_is_the_last(make_cluster: Any) -> None:
    """A refusal by a route ends the connection, so that nobody streams into nowhere for ever."""
    async with make_cluster(http=bounds()) as cluster:
        peer = await Peer.of(cluster)
        peer.send(post(b"x" * 10, path="/internal/drain", length=1_000_000))
        status, headers, _ = await peer.answer()
        assert (status, headers["connection"]) == (401, "close")
        peer.send(b"x" * 100_000)
        assert await peer.rest() == b""


async def test_connections_are_counted(make_cluster: Any) -> None:
    """Per client 429, in all 503; one that has ended makes room."""
    for changed, status in (({"connections_per_client_max": 3}, 429), ({"connections_max": 3}, 503)):
        async with make_cluster(http=bounds(**changed)) as cluster:
            peers = [await Peer.of(cluster) for _ in range(3)]
            for peer in peers:
                peer.send(GET)
                assert (await peer.answer())[0] == 200
            more = await Peer.of(cluster)
            more.send(GET)
            await more.refused(status, "too_many_connections")
            peers.pop().close()
            async with asyncio.timeout(10):
                while cluster.service.ledger.connections == 3:
                    await asyncio.sleep(0.01)
            again = await Peer.of(cluster)
            again.send(GET)
            assert (await again.answer())[0] == 200
            for peer in peers:
                peer.close()


async def test_bytes_that_are_being_read_are_counted(make_cluster: Any) -> None:
    """Half-sent bodies hold what has come of them: the next gets 503 (429 by its client's bound); announcing holds none."""
    for changed, status in (({"reading_bytes_max": 100_000}, 503), ({"reading_bytes_per_client_max": 100_000}, 429)):
        async with make_cluster(http=bounds(**changed)) as cluster:
            announcing, first, second = [await Peer.of(cluster) for _ in range(3)]
            announcing.send(post(b"", length=10_000_000))
            first.send(post(b" " * 60_000, length=200_000))
            async with asyncio.timeout(10):
                while cluster.service.ledger.reading_bytes < 60_000:
                    await asyncio.sleep(0.01)
            second.send(post(b" " * 60_000, length=200_000))
            await second.refused(status, "too_many_bytes")
            assert cluster.service.ledger.reading_bytes == 60_000
            first.close()
            announcing.close()
            async with asyncio.timeout(10):
                while cluster.service.ledger.reading_bytes:
                    await asyncio.sleep(0.01)
            third = await Peer.of(cluster)
            third.send(post(BODY.ljust(90_000)))
            assert (await third.answer())[0] == 200
            third.send(post(BODY.ljust(90_000)))
            assert (await third.answer())[0] == 200, "an ended request holds nothing"
            cluster.context.gate = asyncio.Event()
            cluster.context.started.clear()
            third.send(post(BODY.ljust(90_000)))
            await cluster.context.started.wait()
            assert cluster.service.ledger.reading_bytes == 0, "a decoded body holds nothing while its request runs"
            cluster.context.gate.set()
            assert (await third.answer())[0] == 200
            await cluster.settled()


async def test_pipelined_requests_are_answered_in_order_up_to_their_bound(make_cluster: Any) -> None:
    """Sixteen at once; after their answers, in order, 429 for the next, and nothing more is read."""
    async with make_cluster(http=bounds()) as cluster:
        cluster.context.gate = asyncio.Event()
        peer = await Peer.of(cluster)
        peer.send(post(BODY) + GET * 40)
        await cluster.context.started.wait()
        cluster.context.gate.set()
        assert b"Hello" in (await peer.answer())[2]
        for _ in range(15):
            assert b"version" in (await peer.answer())[2]
        await peer.refused(429, "pipelined")
        await cluster.settled()


async def test_garbage_behind_a_stream_does_not_cut_into_it(make_cluster: Any) -> None:
    """The stream ends whole; the refusal comes after it."""
    async with make_cluster(http=bounds()) as cluster:
        cluster.context.gate = asyncio.Event()
        peer = await Peer.of(cluster)
        peer.send(post(json.dumps({**json.loads(BODY), "stream": True}).encode()) + b"\x00\x01garbage\r\n\r\n")
        await cluster.context.started.wait()
        cluster.context.gate.set()
        got = await peer.rest()
        stream, _, refusal = got.partition(b"0\r\n\r\n")
        assert stream.startswith(b"HTTP/1.1 200") and b"[DONE]" in stream and b"malformed" not in stream
        assert refusal.startswith(b"HTTP/1.1 400") and b'"malformed"' in refusal
        await cluster.settled()


async def test_a_client_that_leaves_is_noticed_behind_its_pipelined_requests(make_cluster: Any) -> None:
    """A further request on the connection does not keep the running one alive."""
    async with make_cluster(http=bounds()) as cluster:
        cluster.context.gate = asyncio.Event()
        peer = await Peer.of(cluster)
        peer.send(post(BODY) + post(BODY) + post(b" ", length=100))
        await cluster.context.started.wait()
        peer.close()
        await cluster.settled()
        assert len(cluster.context.received) == 1


@pytest.mark.parametrize(
    "raw",
    [
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
        + GET,
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n"
        + GET,
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nabcdef" + GET,
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: +5\r\n\r\nabcde" + GET,
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999999999999999\r\n\r\nabcde" + GET,
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: xchunked\r\n\r\n0\r\n\r\n" + GET,
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n" + GET,
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding : chunked\r\n\r\n0\r\n\r\n" + GET,
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n\r\n" + GET,
        b"GET /version HTTP/1.1\nhost: x\n\n" + GET,
        b"GET /version HTTP/1.1\r\nhost: x\r\n folded\r\n\r\n" + GET,
        b"GET /version HTTP/9.9\r\nhost: x\r\n\r\n" + GET,
        b"GET http://[ HTTP/1.1\r\nhost: x\r\n\r\n" + GET,
        b"GET /\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n" + GET,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100,
        b"\x00" * 1000,
    ],
    ids=range(17),
)
async def test_what_two_parsers_may_read_differently_ends_the_connection(make_cluster: Any, raw: bytes) -> None:
    """400 (or nothing of it served), and what follows is never a request of its own."""
    async with make_cluster(http=bounds(), contexts=1) as cluster:
        peer = await Peer.of(cluster)
        peer.send(raw)
        await peer.refused(400, "malformed")
        assert not cluster.context.received


async def test_a_reader_that_takes_nothing_is_disconnected() -> None:
    """The write deadline begins when the buffer is full and ends when it drains."""

    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    class Transport(asyncio.Transport):
        aborted = 0

        def abort(self) -> None:
            self.aborted += 1

        def close(self) -> None: ...

        def is_closing(self) -> bool:
            return bool(self.aborted)

        def get_extra_info(self, name: str, default: Any = None) -> Any:
            return ("127.0.0.1", 1) if name in ("peername", "sockname") else default

    config = uvicorn.Config(app, log_config=None)
    config.load()
    ledger = Ledger(bounds())
    made = []
    for _ in range(2):
        protocol = BoundedProtocol(
            config,
            uvicorn.Server(config).server_state,
            {},
            bounds=bounds(write_timeout_s=0.05),
            body_bytes_max=1,
            ledger=ledger,
            worded=worded,
        )
        transport = Transport()
        protocol.connection_made(transport)
        protocol.pause_writing()
        made.append((protocol, transport))
    made[1][0].resume_writing()
    async with asyncio.timeout(10):
        while not made[0][1].aborted:
            await asyncio.sleep(0.01)
    assert ledger.refused["write_timeout"] == 1 and not made[1][1].aborted
    for protocol, _ in made:
        protocol.connection_lost(None)
    assert ledger.connections == 0


async def test_requests_of_one_client_are_bounded(make_cluster: Any) -> None:
    """429 names the bound of the client, while others may come."""
    async with make_cluster(max_requests=10, max_requests_per_client=1) as cluster:
        cluster.context.gate = asyncio.Event()
        first = asyncio.create_task(cluster.complete())
        await cluster.context.started.wait()
        busy = await cluster.complete()
        assert (busy.status_code, busy.json()["error"]["message"]) == (429, "1 requests of this client are running")
        cluster.context.gate.set()
        assert (await first).status_code == 200
        assert (await cluster.complete()).status_code == 200


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"model": "synthetic", "prompt": "a", "metadata": ' + b"[" * 20_000 + b"]" * 20_000 + b"}", "too_complex"),
        (b'{"model": "synthetic", "prompt": "a", "metadata": [' + b"1," * 500_000 + b"1]}", "too_complex"),
        (b'{"model": "synthetic", "prompt": [' + b"1," * 500_000 + b"1]}", "too_complex"),
        (b'{"model": "synthetic", ' + b'"user": "x", ' * 100_000 + b'"prompt": "a"}', "too_complex"),
        (b'{"model": "synthetic", "prompt": "a", "suffix": "' + b"x" * 100_000 + b'"}', "unsupported_value"),
        (b"{" * 30_000, "invalid_json"),
    ],
    ids=range(6),
)
async def test_bodies_that_would_cost_much_to_decode(make_cluster: Any, body: bytes, code: str) -> None:
    """Refused by a look at them, with a reason."""
    async with make_cluster() as cluster:
        answer = await cluster.client.post(f"{cluster.url}/v1/completions", content=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
        spaces = b'{"model": "synthetic", "temperature": 0, "prompt": "hello"' + b" " * 500_000 + b"}"
        answer = await cluster.client.post(f"{cluster.url}/v1/completions", content=spaces)
        assert answer.json()["choices"][0]["text"] == "Hello, world!"
        assert wire.KEY_HEADER not in answer.headers
