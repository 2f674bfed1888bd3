"""One connection and its bounds: uvicorn's protocol over httptools, with what those two leave open.

Uvicorn has one deadline, between requests. Here every state of a connection in which we wait for its client has one, every
buffer that a client can fill has an end, and every refusal is an answer: status, reason as JSON, ``connection: close``.

    state of the connection            ends with                    bound
    first or next head is arriving     408, or closed if nothing    header_timeout_s, header_bytes_max, header_count_max
                                       of it has come
    body is arriving                   408, 413, 429, 503, 400      body_timeout_s, body_bytes_max, the ledger's
    answer is made                     (the route's own deadline)
    answer is taken                    disconnected                 write_timeout_s
    between requests                   closed                       idle_timeout_s
    refused                            closed                       a short time to read the refusal

A refusal must not cut into the answer of an earlier request on the same connection: then that answer is the last one, and
nothing more is read. What follows a refusal is read and thrown away for a moment before the connection is closed, because a
client whose data meets a closed socket never sees the answer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from meta_executor.config import HttpConfig
from meta_executor.listener.bounds import Ledger, Refusal, Worded, client_of
from meta_executor.listener.lingering import LINGER_S

#: Under this key a request's ``scope["state"]`` has a function that ends the account of its body.
BODY_DECODED = "body_decoded"
#: A chunked body may have this many chunks, and one more per so many bytes: each chunk costs a call.
_CHUNKS_MAX, _BYTES_PER_CHUNK = 1024, 256
_MALFORMED = Refusal(400, "malformed", "the request is malformed")


class _Refused(Exception):
    """Ends the parser's work inside a callback."""


class _Outlet:
    """What a request's answer is written to: the transport, except that its end is the connection's to decide."""

    def __init__(self, transport: asyncio.Transport, finish: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = finish


class _Account:
    """Bytes of one request's body that nobody has decoded yet."""

    __slots__ = ("cycle", "held", "keep_alive")

    def __init__(self) -> None:
        self.cycle: RequestResponseCycle | None = None
        self.keep_alive = False
        self.held = 0


class BoundedProtocol(HttpToolsProtocol):
    """See the module.

    Args:
        config, server_state, app_state, _loop: Uvicorn's.
        bounds: Of this listener.
        body_bytes_max: Largest body (bytes).
        ledger: Of this listener.
        worded: How it words an error.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        bounds: HttpConfig,
        body_bytes_max: int,
        ledger: Ledger,
        worded: Worded,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._bounds = bounds
        self._body_bytes_max = body_bytes_max
        self._ledger = ledger
        self._worded = worded
        self._client = ""
        self._counted = False
        self._fresh = True
        #: Requests whose head has come and whose answer has not ended, oldest first.
        self._accounts: deque[_Account] = deque()
        self._in_head = self._in_body = False
        self._head_bytes = self._head_count = 0
        #: Since the head began; what stood before it in the same piece of data may be in it.
        self._fed_bytes = 0
        self._behind = False
        self._chunks = self._body_bytes = 0
        self._refusal: Refusal | None = None
        #: Nothing that comes is looked at any more.
        self._deaf = False
        self._lingers = False
        #: For the one thing that is waited for, and for a client that takes nothing.
        self._timer: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None

    # -- the connection -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Uvicorn's, and: may it come in?"""
        super().connection_made(transport)
        self._client = client_of(self.client[0] if self.client else None)
        refusal = self._ledger.connect(self._client)
        if refusal is not None:
            self._deaf = True
            self._answer(refusal)
            return
        self._counted = True
        self._within(self._bounds.header_timeout_s, self._head_expired)

    def connection_lost(self, exc: Exception | None) -> None:
        """Uvicorn's, and: every request of it hears so, not only the newest."""
        self._no_deadline()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        self._ledger.lingering.leave(self._abort)
        for account in self._accounts:
            self._release(account)
            self._leave(account.cycle)
        self._accounts.clear()
        self.pipeline.clear()
        if self._counted:
            self._counted = False
            self._ledger.disconnect(self._client)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Uvicorn's, within the bounds."""
        if self._deaf:
            return
        self._fed_bytes += len(data)
        self._behind = self._in_body or bool(self._accounts)
        super().data_received(data)
        if self._in_head and not self._deaf and self._fed_bytes > self._bounds.header_bytes_max:
            # The parser tells a line when it has ended.
            self._refuse(self._ledger.refuse(self._head_too_large()))

    def pause_writing(self) -> None:
        """The client does not take its answer."""
        super().pause_writing()
        if self._stall is None:
            self._stall = self.loop.call_later(self._bounds.write_timeout_s, self._write_expired)

    def resume_writing(self) -> None:
        """It does."""
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    # -- what the parser tells ----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = self._head_count = 0
        if self._behind:
            self._fed_bytes = 0
        if not self._fresh:
            # That of a connection's first request began with the connection.
            self._within(self._bounds.header_timeout_s, self._head_expired)
        self._fresh = False

    def on_url(self, url: bytes) -> None:
        """Part of the request line."""
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; one after a chunked body counts and is not looked at: the request was routed without it."""
        self._head_count += 1
        if self._head_count > self._bounds.header_count_max:
            self._stop(Refusal(431, "too_many_headers", f"more than {self._bounds.header_count_max} headers"))
        self._count_head(len(name) + len(value) + 4)
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """A head is whole: the request may begin, if its body may come."""
        self._in_head = False
        self._fed_bytes = 0
        if len(self._accounts) >= self._bounds.requests_pipelined_max:
            self._stop(
                Refusal(429, "pipelined", f"more than {self._bounds.requests_pipelined_max} requests at once", 1)
            )
        for name, value in self.headers:
            if name == b"content-length" and int(value) > self._body_bytes_max:
                self._stop(self._body_too_large())
        account = _Account()
        self.scope["state"][BODY_DECODED] = lambda: self._release(account)
        super().on_headers_complete()
        account.cycle = self.cycle
        # An answer that begins before the body has come is the connection's last: the rest of the body is not read.
        account.keep_alive, self.cycle.keep_alive = self.cycle.keep_alive, False
        self._accounts.append(account)
        self.cycle.transport = _Outlet(self.transport, self._finish)  # type: ignore[assignment]
        self._in_body = True
        self._chunks = self._body_bytes = 0
        self._within(self._bounds.body_timeout_s, self._body_expired)

    def on_chunk_header(self) -> None:
        """A chunk begins."""
        self._chunks += 1
        if self._chunks > _CHUNKS_MAX + self._body_bytes // _BYTES_PER_CHUNK:
            self._stop(Refusal(400, "chunks", "the body's chunks are too small"))

    def on_body(self, body: bytes) -> None:
        """Part of a body."""
        self._body_bytes += len(body)
        if self._body_bytes > self._body_bytes_max:
            self._stop(self._body_too_large())
        account = self._accounts[-1] if self._accounts else None
        if account is None or account.cycle is not self.cycle:
            return  # answered before its body had come
        account.held += len(body)
        refusal = self._ledger.read(self._client, len(body))
        if refusal is not None:
            self._stop(refusal, counted=True)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A body is whole."""
        self._in_body = False
        self._no_deadline()
        account = self._accounts[-1] if self._accounts else None
        if account is not None and account.cycle is self.cycle and not self.cycle.response_started:
            self.cycle.keep_alive = account.keep_alive
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """An answer has ended."""
        if self._accounts:
            self._release(self._accounts.popleft())
        super().on_response_complete()
        if self._refusal is not None and not self._accounts:
            self._answer_last()
        elif not self._deaf and not self._accounts and not self._in_head and not self._in_body:
            self._within(self._bounds.idle_timeout_s, self.transport.close)

    # -- refusing -----------------------------------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        """The parser gave up, by itself or because a callback refused."""
        refusal, self._refusal = self._refusal, None
        self._refuse(refusal or self._ledger.refuse(_MALFORMED))

    def _stop(self, refusal: Refusal, *, counted: bool = False) -> None:
        self._refusal = refusal if counted else self._ledger.refuse(refusal)
        raise _Refused

    def _count_head(self, count: int) -> None:
        self._head_bytes += count
        if self._head_bytes > self._bounds.header_bytes_max:
            self._stop(self._head_too_large())

    def _head_too_large(self) -> Refusal:
        return Refusal(431, "headers_too_large", f"the head is larger than {self._bounds.header_bytes_max} bytes")

    def _body_too_large(self) -> Refusal:
        return Refusal(413, "too_large", f"the body is larger than {self._body_bytes_max} bytes")

    def _refuse(self, refusal: Refusal) -> None:
        """Answer the request that is arriving, after those that came before it."""
        if self.transport.is_closing():
            return
        arriving = None
        if self._in_body and self._accounts:
            arriving = self._accounts.pop()
            self._release(arriving)
        self._in_head = self._in_body = False
        self._deaf = True
        if arriving is not None:
            self.pipeline = deque(waiting for waiting in self.pipeline if waiting[0] is not arriving.cycle)
            begun = arriving.cycle is not None and arriving.cycle.response_started
            self._leave(arriving.cycle)
            if begun:
                # Its answer has begun before its body was whole, and cannot be taken back.
                self._finish()
                return
        if self._accounts:
            self._refusal = refusal
            self._no_deadline()
        else:
            self._answer(refusal)

    def _answer_last(self) -> None:
        refusal, self._refusal = self._refusal, None
        if refusal is not None and not self.transport.is_closing():
            self._answer(refusal)

    def _answer(self, refusal: Refusal) -> None:
        body = self._worded(refusal.status, refusal.code, refusal.message)
        lines = [
            STATUS_LINE[refusal.status],
            b"content-type: application/json\r\n",
            b"content-length: %d\r\n" % len(body),
            b"connection: close\r\n",
        ]
        if refusal.retry_after_s is not None:
            lines.append(b"retry-after: %d\r\n" % refusal.retry_after_s)
        self.transport.write(b"".join([*lines, b"\r\n", body]))
        self._finish()

    @staticmethod
    def _leave(cycle: RequestResponseCycle | None) -> None:
        """A request's route hears that its client has left; what it still says goes nowhere."""
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()

    def _release(self, account: _Account) -> None:
        self._ledger.release(self._client, account.held)
        account.held = 0

    def _finish(self) -> None:
        """The last answer was written: close, but let it be read."""
        whole = not self._in_head and not self._in_body and not self._deaf
        self._deaf = True
        self._refusal = None
        self.pipeline.clear()
        if self.transport.is_closing():
            return
        if whole or not (self._lingers or self._ledger.lingering.enter(self._abort, self.loop.time())):
            self.transport.close()
            self._within(self._bounds.write_timeout_s, self._abort)
            return
        self._lingers = True
        # What the client has still on its way is thrown away, so that it does not meet a closed socket.
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._within(LINGER_S, self._abort)

    # -- deadlines ----------------------------------------------------------------------------------------------------

    def _within(self, seconds: float, expired: Callable[[], None]) -> None:
        """The one thing that is waited for now."""
        self._no_deadline()
        self._timer = self.loop.call_later(seconds, expired)

    def _no_deadline(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _head_expired(self) -> None:
        if not self._in_head:
            self.transport.close()
            return
        within = self._bounds.header_timeout_s
        self._refuse(self._ledger.refuse(Refusal(408, "head_timeout", f"the head was not whole within {within:g} s")))

    def _body_expired(self) -> None:
        within = self._bounds.body_timeout_s
        self._refuse(self._ledger.refuse(Refusal(408, "body_timeout", f"the body was not whole within {within:g} s")))

    def _write_expired(self) -> None:
        self._ledger.refused["write_timeout"] += 1
        self._abort()

    def _abort(self) -> None:
        self.transport.abort()
