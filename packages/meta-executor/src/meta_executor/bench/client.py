"""The load generator's process: one thread, one selector, a connection per request that is under way.

It must cost far less per token than what it measures. So bytes that come are only counted, timed and kept; they are parsed
when the load has ended. Requests are written out before the first is sent.

Reads a :class:`~meta_executor.bench.load.LoadSpec` as JSON from standard input, writes a
:class:`~meta_executor.bench.load.LoadResult` as MessagePack to standard output.
"""

from __future__ import annotations

import errno
import gc
import os
import selectors
import socket
import sys
import time
from collections import deque
from urllib.parse import urlsplit

import msgspec

from meta_executor.bench.load import LoadConfig, LoadResult, LoadSpec, Outcome, prompt_of

_READ_BYTES = 1 << 18
_EVENT = b"data: {"
_CHUNKS_END = b"0\r\n\r\n"


class _Choice(msgspec.Struct):
    token_ids: tuple[int, ...] | None = None
    finish_reason: str | None = None


class _Error(msgspec.Struct):
    message: str = ""


class _Event(msgspec.Struct):
    choices: tuple[_Choice, ...] = ()
    error: _Error | None = None


_decode_event = msgspec.json.Decoder(_Event).decode


class Exchange:
    """One request on one connection, and what came of it."""

    __slots__ = ("body", "due_s", "error", "number", "parts", "resent", "reused", "sent_s", "times", "unsent")

    def __init__(self, number: int, due_s: float, body: bytes) -> None:
        self.number = number
        self.due_s = due_s
        self.body = body
        self.unsent = memoryview(body)
        self.sent_s = 0.0
        self.parts: list[bytes] = []
        #: (time, pieces so far) of each read that brought pieces.
        self.times: list[tuple[float, int]] = []
        self.error: str | None = None
        #: Sent on a connection that an earlier answer came over; sent a second time, over a new one.
        self.reused = False
        self.resent = False

    def take(self, data: bytes, now_s: float) -> bool:
        """Keep what came. Returns whether the answer may be complete now."""
        self.parts.append(data)
        if count := data.count(_EVENT):
            self.times.append((now_s, count))
        if data.endswith(_CHUNKS_END) or len(self.parts) == 1 or not self.times:
            return self._complete()
        return len(data) < len(_CHUNKS_END) and self._complete()

    def _complete(self) -> bool:
        head, gap, body = b"".join(self.parts).partition(b"\r\n\r\n")
        if not gap:
            return False
        length = _content_length(head)
        return len(body) >= length if length is not None else body.endswith(_CHUNKS_END)

    def keeps_connection(self) -> bool:
        """Whether the connection can carry another request."""
        head = b"".join(self.parts).partition(b"\r\n\r\n")[0].lower()
        return not self.unsent and b"\r\nconnection: close" not in head

    def outcome(self, end_s: float, start_s: float) -> Outcome:
        """Parse what was kept; the load began at ``start_s``."""
        head, _, body = b"".join(self.parts).partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1]) if head.startswith(b"HTTP/1.") else 0
        if _content_length(head) is None:
            body = _without_chunks(body)
        error, reason = self.error, None
        ids: list[int] = []
        if status != 200:
            error = error or body[:500].decode(errors="replace")
        else:
            for line in body.split(b"\n"):
                if not line.startswith(_EVENT):
                    continue
                try:
                    event = _decode_event(line[6:])
                except msgspec.DecodeError as broken:
                    error = error or f"an event cannot be read: {broken}"
                    break
                error = error or (event.error.message if event.error is not None else None)
                for choice in event.choices:
                    ids += choice.token_ids or ()
                    reason = choice.finish_reason or reason
        pieces = tuple(at_s - self.sent_s for at_s, count in self.times for _ in range(count))
        return Outcome(
            number=self.number,
            status=status,
            error=error,
            late_s=max(self.sent_s - self.due_s, 0.0) if self.due_s else 0.0,
            first_s=pieces[0] if pieces else 0.0,
            total_s=end_s - self.sent_s,
            tokens=len(ids),
            token_ids=tuple(ids),
            pieces_s=pieces,
            finish_reason=reason,
            sent_s=self.sent_s - start_s,
        )


def _content_length(head: bytes) -> int | None:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            return int(value)
    return None


def _without_chunks(body: bytes) -> bytes:
    """The content of a chunked body; what cannot be read as chunks is left out."""
    parts, place = [], 0
    while (end := body.find(b"\r\n", place)) >= 0:
        digits = body[place:end].split(b";")[0].strip()
        size = int(digits, 16) if digits and not digits.strip(b"0123456789abcdefABCDEF") else 0
        if size == 0:
            break
        parts.append(body[end + 2 : end + 2 + size])
        place = end + 2 + size + 2
    return b"".join(parts)


class Generator:
    """Sends a load.

    Args:
        address: (host, port) of the front.
        requests: Whole HTTP requests, in order.
        load: The rest of what is asked.
    """

    def __init__(self, address: tuple[str, int], requests: list[bytes], load: LoadConfig) -> None:
        self._address = address
        self._load = load
        self._waiting = deque(enumerate(requests))
        self._selector = selectors.DefaultSelector()
        self._idle: list[socket.socket] = []
        self._ended: list[tuple[Exchange, float]] = []
        self._open: dict[socket.socket, Exchange] = {}
        self._reconnects = 0
        self._longest_pause_s = 0.0
        #: When to look for requests whose time is over.
        self._look_s = 0.0

    def run(self) -> LoadResult:
        """Send everything, wait for the last end."""
        start_s = woke_s = time.monotonic()
        start_cpu_s = time.process_time()
        limit = self._load.concurrency or len(self._waiting)
        while self._waiting or self._open:
            now_s = time.monotonic()
            self._longest_pause_s = max(self._longest_pause_s, now_s - woke_s)
            wait_s = self._send_due(start_s, now_s, limit)
            events = self._selector.select(wait_s)
            woke_s = time.monotonic()
            for key, mask in events:
                self._move(key.fileobj, mask)  # type: ignore[arg-type]
            self._expire(woke_s)
        seconds, cpu_s = time.monotonic() - start_s, time.process_time() - start_cpu_s
        for connection in self._idle:
            connection.close()
        outcomes = sorted(
            (one.outcome(end_s, start_s) for one, end_s in self._ended), key=lambda outcome: outcome.number
        )
        return LoadResult(tuple(outcomes), seconds, cpu_s, self._longest_pause_s, self._reconnects, start_s)

    def _send_due(self, start_s: float, now_s: float, limit: int) -> float:
        """Send what is due. Returns how long to wait for anything to come (s)."""
        rate = self._load.rate_per_s
        while self._waiting and len(self._open) < limit:
            number, body = self._waiting[0]
            due_s = start_s + number / rate if rate else 0.0
            if due_s > now_s:
                return due_s - now_s
            self._waiting.popleft()
            self._begin(Exchange(number, due_s, body))
        return min(1.0, self._load.request_timeout_s / 2)

    def _begin(self, exchange: Exchange) -> None:
        exchange.sent_s = exchange.sent_s or time.monotonic()
        exchange.unsent = memoryview(exchange.body)
        exchange.reused = bool(self._idle) and not exchange.resent
        try:
            connection = self._idle.pop() if exchange.reused else self._connect()
        except OSError as failure:
            self._end(exchange, f"cannot connect: {failure}")
            return
        self._open[connection] = exchange
        self._selector.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE)

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET)
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = connection.connect_ex(self._address)
        if code not in (0, errno.EINPROGRESS):
            connection.close()
            raise OSError(code, os.strerror(code))
        return connection

    def _move(self, connection: socket.socket, mask: int) -> None:
        exchange = self._open[connection]
        try:
            if mask & selectors.EVENT_WRITE and exchange.unsent:
                exchange.unsent = exchange.unsent[connection.send(exchange.unsent) :]
                if not exchange.unsent:
                    self._selector.modify(connection, selectors.EVENT_READ)
            if mask & selectors.EVENT_READ:
                self._read(connection, exchange)
        except BlockingIOError:
            return
        except OSError as failure:
            self._cut(connection, exchange, f"{type(failure).__name__}: {failure}")

    def _read(self, connection: socket.socket, exchange: Exchange) -> None:
        data = connection.recv(_READ_BYTES)
        if not data:
            self._cut(connection, exchange, "the connection was closed before the answer's end")
        elif exchange.take(data, time.monotonic()):
            self._release(connection)
            if exchange.keeps_connection():
                self._idle.append(connection)
            else:
                connection.close()
            self._end(exchange, None)

    def _cut(self, connection: socket.socket, exchange: Exchange, why: str) -> None:
        self._release(connection)
        connection.close()
        # A kept connection may be closed by the server at any time: a request that met nothing but that is sent once more.
        if exchange.reused and not exchange.parts:
            exchange.resent = True
            self._reconnects += 1
            self._begin(exchange)
        else:
            self._end(exchange, why)

    def _expire(self, now_s: float) -> None:
        if now_s < self._look_s:
            return
        self._look_s = now_s + min(1.0, self._load.request_timeout_s / 2)
        late_s = now_s - self._load.request_timeout_s
        for connection, exchange in [pair for pair in self._open.items() if pair[1].sent_s < late_s]:
            self._release(connection)
            connection.close()
            self._end(exchange, f"no end after {self._load.request_timeout_s:g} s")

    def _release(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._open[connection]

    def _end(self, exchange: Exchange, error: str | None) -> None:
        exchange.error = error
        self._ended.append((exchange, time.monotonic()))


def request_bytes(spec: LoadSpec, number: int, lengths: tuple[int, int], host: str) -> bytes:
    """One streaming completion with a prompt and an answer of these lengths (tokens), as HTTP/1.1."""
    prompt_tokens, answer_tokens = lengths
    body = msgspec.json.encode(
        {
            "model": spec.model, "prompt": prompt_of(number, prompt_tokens, spec.vocab_size),
            "max_tokens": answer_tokens, "temperature": 0.0, "stream": True, "ignore_eos": True,
            "return_token_ids": True,
        }
    )  # fmt: skip
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n%b" % (len(body), body)


def main() -> None:
    """Read the spec, send the load, write the result."""
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=LoadSpec)
    parts = urlsplit(spec.url)
    if parts.scheme != "http" or parts.hostname is None:
        raise SystemExit(f"the load generator speaks http only, not {spec.url}")
    requests = [request_bytes(spec, number, one, parts.netloc) for number, one in enumerate(spec.load.lengths())]
    gc.freeze()
    gc.disable()
    result = Generator((parts.hostname, parts.port or 80), requests, spec.load).run()
    sys.stdout.buffer.write(msgspec.msgpack.encode(result))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
