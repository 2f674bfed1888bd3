"""The client's remote side: one I/O thread, one session, the calls that wait for an answer.

An engine lives for one session: connecting, open, then failed for good with one error that every waiting and every
later call gets. A call is registered here before its first byte is sent. Whoever removes it from ``pending`` owns its
outcome: the I/O thread with an answer, or the caller with a timeout or a cancellation; so each call ends exactly once.
"""

from __future__ import annotations

import heapq
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final

import msgspec

from rpc_local_registry import _asyncio as aio
from rpc_local_registry import _wire as wire
from rpc_local_registry._codec import DECODE_ERRORS, TypedDecoder
from rpc_local_registry._config import RpcConfig
from rpc_local_registry._errors import (
    ErrorBody,
    RpcArgumentError,
    RpcAuthenticationError,
    RpcBackpressure,
    RpcClosed,
    RpcConnectionError,
    RpcError,
    RpcPeerDead,
    RpcProtocolError,
    RpcServerStopped,
    RpcTimeout,
    RpcUnreachable,
    rebuild,
)
from rpc_local_registry._session import ClientHandshake, Session
from rpc_local_registry._streams import Inbox
from rpc_local_registry._zmq import CONNECTED, DISCONNECTED, MONITORED, READABLE, Link

_logger = logging.getLogger("rpc_local_registry")
_error_decode: Final = msgspec.msgpack.Decoder(ErrorBody).decode
#: Answers collected for one event loop before it is woken, while more are readable.
_RESOLUTIONS_MAX: Final = 64


class Pending:
    """A call that waits for its answer. ``finish`` is called exactly once, on whatever thread removed it."""

    __slots__ = ("call_id", "decoder", "size_bytes", "text")

    def __init__(self, decoder: TypedDecoder, text: str) -> None:
        self.decoder = decoder
        self.text = text
        self.size_bytes = 0
        self.call_id = 0

    def finish(self, engine: Engine, value: Any, error: BaseException | None) -> None:
        """Hand the outcome to whoever waits."""
        raise NotImplementedError


class BlockingPending(Pending):
    """A thread waits, on a bare lock: the cheapest hand-off there is."""

    __slots__ = ("error", "gate", "value")

    def __init__(self, decoder: TypedDecoder, text: str) -> None:
        super().__init__(decoder, text)
        self.gate = threading.Lock()
        self.gate.acquire()
        self.value: Any = None
        self.error: BaseException | None = None

    def finish(self, engine: Engine, value: Any, error: BaseException | None) -> None:
        self.value = value
        self.error = error
        self.gate.release()


class AsyncPending(Pending):
    """A coroutine waits; answers of one round wake its loop once."""

    __slots__ = ("future", "loop")

    def __init__(self, decoder: TypedDecoder, text: str) -> None:
        super().__init__(decoder, text)
        self.loop = aio.get_running_loop()
        self.future: aio.Future[Any] = self.loop.create_future()

    def finish(self, engine: Engine, value: Any, error: BaseException | None) -> None:
        engine.resolve_soon(self.loop, self.future, value, error)


class RpcFuture(Future[Any]):
    """``concurrent.futures.Future`` whose ``cancel`` reaches the server."""

    abandon: Callable[[], object] | None = None

    def cancel(self) -> bool:
        """Cancel the call; False if its outcome is already here."""
        if not super().cancel():
            return False
        if self.abandon is not None:
            self.abandon()
        return True


class FuturePending(Pending):
    """A future waits. Its callbacks run on the I/O thread and must not block."""

    __slots__ = ("future",)

    def __init__(self, decoder: TypedDecoder, text: str) -> None:
        super().__init__(decoder, text)
        self.future = RpcFuture()

    def finish(self, engine: Engine, value: Any, error: BaseException | None) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(value)


class StreamPending(Pending):
    """A stream's consumer waits."""

    __slots__ = ("inbox", "next_index")

    def __init__(self, decoder: TypedDecoder, text: str) -> None:
        super().__init__(decoder, text)
        self.inbox: Inbox[Any] = Inbox()
        self.next_index = 0

    def finish(self, engine: Engine, value: Any, error: BaseException | None) -> None:
        self.inbox.close(error)


_Outgoing = tuple[int, int, int, bytes, bytes, Sequence[memoryview], int]


class Engine:
    """See the module's header. Public to ``_client`` only."""

    def __init__(
        self,
        address: str,
        key: bytes,
        config: RpcConfig,
        name: str,
        causes: Mapping[str, type[Exception]],
        on_lost: Callable[[RpcError], None] | None,
    ) -> None:
        self.address = address
        self.config = config
        self.pending: dict[int, Pending] = {}
        self.failure: RpcError | None = None
        #: Whether the failure ended an open session: then it stays until ``reconnect``.
        self.was_open = False
        self.oneway_sent = 0
        self.oneway_done = 0
        self.oneway_failed = 0
        self.pending_high_water = 0
        self.late_answers = 0
        self.refused: dict[str, int] = {}
        self.bytes_sent = 0
        self.bytes_received = 0
        self.pid = os.getpid()
        self._key = key
        self._name = name
        self._causes = causes
        self._on_lost = on_lost
        # Re-entrant: a forgotten stream may be collected, and cancel itself, inside any of these sections.
        self._lock = threading.RLock()
        self._outbox: deque[_Outgoing] = deque()
        self._next_call_id = 1
        self._pending_bytes = 0
        self._oneway_bytes: deque[int] = deque()
        self._deadlines: list[tuple[float, int, str]] = []
        self._new_deadlines: deque[tuple[float, int, str]] = deque()
        self._closing = False
        self._resolutions: dict[aio.AbstractEventLoop, list[tuple[aio.Future[Any], Any, Any]]] = {}
        self._opened = threading.Event()
        self._link = Link.connect(address, config)
        self._thread = threading.Thread(target=self._run, name=f"rpc-client-{name or address}"[:48], daemon=True)

    # ---- any thread

    def start(self) -> None:
        """Start the I/O thread; the handshake begins."""
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether something sent is not yet answered or acknowledged."""
        return bool(self.pending) or self.oneway_sent != self.oneway_done

    def submit(
        self,
        kind: int,
        pending: Pending | None,
        name: bytes,
        body: bytes,
        buffers: Sequence[memoryview],
        flags: int,
        timeout_s: float | None,
        *,
        timed: bool,
    ) -> int:
        """Register a call and queue it; returns its id.

        Args:
            timed: The I/O thread watches the deadline (the caller does when it blocks itself).

        Raises:
            RpcBackpressure: Too many calls or bytes are unanswered. Nothing was queued.
            RpcError: The session's failure.
        """
        size = len(body) + sum(map(len, buffers)) if buffers else len(body)
        config = self.config
        if size + wire.HEADER_BYTES + 512 + 8 * len(buffers) > config.message_bytes_max:
            raise RpcArgumentError(f"arguments of {size} bytes; a message holds at most {config.message_bytes_max}")
        if len(buffers) > config.buffers_max:
            raise RpcArgumentError(f"{len(buffers)} arrays; a message holds at most {config.buffers_max}")
        with self._lock:
            if self.failure is not None:
                raise again(self.failure)
            unanswered = len(self.pending) + self.oneway_sent - self.oneway_done
            if unanswered >= config.pending_calls_max:
                raise RpcBackpressure(f"{unanswered} calls are unanswered")
            if self._pending_bytes + size > config.pending_bytes_max:
                raise RpcBackpressure(f"{self._pending_bytes} bytes of calls are unanswered")
            if unanswered >= self.pending_high_water:
                self.pending_high_water = unanswered + 1
            call_id = self._next_call_id
            self._next_call_id = call_id + 1
            self._pending_bytes += size
            argument = 0
            if timeout_s is not None:
                argument = max(1, int(timeout_s * 1e6))
                if timed:
                    text = pending.text if pending is not None else ""
                    self._new_deadlines.append((time.monotonic() + timeout_s, call_id, f"{text} after {timeout_s} s"))
            if pending is None:
                self.oneway_sent += 1
                self._oneway_bytes.append(size)
            else:
                pending.size_bytes = size
                pending.call_id = call_id
                self.pending[call_id] = pending
            self._outbox.append((kind, call_id, argument, name, body, buffers, flags))
        self._link.wake()
        return call_id

    def control(self, kind: int, call_id: int, argument: int = 0) -> None:
        """Queue a message that expects no answer."""
        if self.failure is None:
            self._outbox.append((kind, call_id, argument, b"", b"", (), 0))
            self._link.wake()

    def remove(self, call_id: int) -> Pending | None:
        """Take a call out; the caller now owns its outcome. None if another did."""
        with self._lock:
            pending = self.pending.pop(call_id, None)
            if pending is not None:
                self._pending_bytes -= pending.size_bytes
        return pending

    def abandon(self, call_id: int) -> bool:
        """Stop waiting for a call and cancel it at the server; False if its outcome is already there."""
        if self.remove(call_id) is None:
            return False
        self.control(wire.CANCEL, call_id)
        return True

    def wait_open(self) -> None:
        """Block until the handshake is over; raises its error."""
        self._opened.wait(self.config.handshake_timeout_s + 1.0)
        if self.failure is not None:
            raise again(self.failure)

    def close(self, error: RpcError | None = None) -> None:
        """End: pending calls fail with ``RpcClosed``, one-way calls are flushed for up to ``drain_s``. Idempotent."""
        with self._lock:
            already = self._closing
            self._closing = True
        if self.pid != os.getpid():
            return
        if not already:
            self._take_all_pending(error or RpcClosed(f"client of {self.address} was closed"))
        self._link.wake()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(self.config.drain_s + 1.0)
        elif self._thread.ident is None:
            self._link.close()

    def _take_all_pending(self, error: RpcError) -> None:
        with self._lock:
            taken = list(self.pending.values())
            self.pending.clear()
            self._pending_bytes = 0
        for pending in taken:
            pending.finish(self, None, again(error))
        self._flush_resolutions()

    # ---- the I/O thread

    def _run(self) -> None:
        link = self._link
        try:
            session = self._handshake(link)
            self.was_open = True
            self._opened.set()
            self._serve(link, session)
        except RpcConnectionError as error:
            self._fail(error)
        except BaseException as error:  # noqa: BLE001 - it must also end everybody who waits
            failure = RpcConnectionError(f"{self.address}: the I/O thread failed: {error!r}")
            failure.__cause__ = error
            self._fail(failure)
        finally:
            link.close()

    def _fail(self, error: RpcError) -> None:
        """The session is over: every call, waiting or coming, gets this error."""
        with self._lock:
            if self.failure is None:
                self.failure = error
            self._outbox.clear()
        self._take_all_pending(error)
        self._opened.set()
        if self._on_lost is not None and self.was_open and not self._closing:
            try:
                self._on_lost(error)
            except Exception:
                _logger.exception("on_lost failed")

    def resolve_soon(
        self, loop: aio.AbstractEventLoop, future: aio.Future[Any], value: Any, error: BaseException | None
    ) -> None:
        """Collect an answer for a loop; delivered by ``_flush_resolutions``."""
        self._resolutions.setdefault(loop, []).append((future, value, error))

    def _flush_resolutions(self) -> None:
        if not self._resolutions:
            return
        resolutions, self._resolutions = self._resolutions, {}
        for loop, answers in resolutions.items():
            try:
                loop.call_soon_threadsafe(aio.resolve, answers)
            except RuntimeError:
                if not loop.is_closed():
                    raise

    def _count_refusal(self, reason: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1

    def _handshake(self, link: Link) -> Session:
        """Connect and agree, or raise the error that says why not."""
        deadline_s = time.monotonic() + self.config.handshake_timeout_s
        connected = self.address.startswith("inproc://")
        closing = False

        def begin() -> ClientHandshake:
            attempt = ClientHandshake(
                self._key,
                secrets.token_bytes(wire.NONCE_BYTES),
                self._name,
                message_bytes_max=self.config.message_bytes_max,
                buffers_max=self.config.buffers_max,
            )
            link.send(attempt.hello())
            return attempt

        attempt = begin()
        while True:
            left_s = deadline_s - time.monotonic()
            if self._closing:
                # Only one-way calls that were sent before ``close`` are worth the wait.
                if not closing:
                    closing = True
                    left_s = min(left_s, self.config.drain_s if self._outbox else 0.0)
                    deadline_s = time.monotonic() + left_s
                if left_s <= 0:
                    raise RpcClosed(f"client of {self.address} was closed")
            if left_s <= 0:
                within = f"within {self.config.handshake_timeout_s} s"
                if not connected:
                    raise RpcUnreachable(f"nobody listens at {self.address} ({within})")
                raise RpcAuthenticationError(
                    f"{self.address} gave no authentic answer {within}: another key, or not an rpc_local_registry server"
                )
            ready = self._poll(link, left_s)
            for event in link.events() if ready & MONITORED else ():
                if event == CONNECTED:
                    connected = True
                elif event == DISCONNECTED:
                    # What was sent into that connection is lost; a fresh attempt waits for the next one.
                    attempt = begin()
            if ready & READABLE:
                try:
                    return attempt.answer(link.receive(1))
                except wire.Refused as refusal:
                    self._count_refusal(refusal.reason)
            self._expire()
            self._flush_resolutions()

    def _poll(self, link: Link, timeout_s: float | None) -> int:
        while self._new_deadlines:
            heapq.heappush(self._deadlines, self._new_deadlines.popleft())
        if self._deadlines:
            left_s = max(0.0, self._deadlines[0][0] - time.monotonic())
            timeout_s = left_s if timeout_s is None else min(timeout_s, left_s)
        return link.poll(timeout_s)

    def _expire(self) -> None:
        """Fail calls whose deadline passed."""
        deadlines = self._deadlines
        if deadlines:
            now_s = time.monotonic()
            while deadlines and deadlines[0][0] <= now_s:
                _, call_id, text = heapq.heappop(deadlines)
                pending = self.remove(call_id)
                if pending is not None:
                    pending.finish(self, None, RpcTimeout(f"{text}: timed out"))
                    self.control(wire.CANCEL, call_id)
            if len(deadlines) > 2 * len(self.pending) + 1024:
                # Most belong to calls that were answered long ago.
                self._deadlines = [entry for entry in deadlines if entry[1] in self.pending]
                heapq.heapify(self._deadlines)

    def _send_outbox(self, link: Link, session: Session) -> None:
        outbox = self._outbox
        seal = session.sealer.seal
        inline_bytes_max = self.config.inline_bytes_max
        while outbox:
            try:
                kind, call_id, argument, name, body, buffers, flags = outbox.popleft()
            except IndexError:
                return
            size = len(body) + sum(map(len, buffers)) if buffers else len(body)
            overhead = wire.HEADER_BYTES + 512 + 16 * len(buffers)
            if size + overhead > session.peer_message_bytes_max or len(buffers) > session.peer_buffers_max:
                self._refuse_outgoing(kind, call_id, size, session)
                continue
            frames = seal(kind, call_id, argument, name, body, buffers, flags=flags, inline_bytes_max=inline_bytes_max)
            self.bytes_sent += size
            if not link.send(frames):
                raise RpcPeerDead(f"{self.address}: the connection takes nothing more")

    def _refuse_outgoing(self, kind: int, call_id: int, size: int, session: Session) -> None:
        error = RpcArgumentError(f"arguments of {size} bytes; the server takes {session.peer_message_bytes_max}")
        if kind == wire.ONEWAY:
            with self._lock:
                # It was counted as sent; nobody will acknowledge it.
                self.oneway_sent -= 1
                self._pending_bytes -= self._oneway_bytes.pop()
                self.oneway_failed += 1
            return
        pending = self.remove(call_id)
        if pending is not None:
            pending.finish(self, None, error)

    def _on_message(self, link: Link, session: Session, message: wire.Message) -> None:
        kind = message.kind
        if kind == wire.RESULT or kind == wire.ERROR:
            pending = self.remove(message.call_id)
            if pending is None:
                self.late_answers += 1
                return
            if kind == wire.ERROR:
                pending.finish(self, None, self._error_of(message))
                return
            try:
                value = pending.decoder.decode(message.body, message.buffers)
            except DECODE_ERRORS as error:
                pending.finish(self, None, RpcProtocolError(f"{pending.text}: result does not fit its type: {error}"))
                return
            pending.finish(self, value, None)
        elif kind == wire.ITEM:
            stream = self.pending.get(message.call_id)
            if not isinstance(stream, StreamPending):
                self.late_answers += 1
                return
            if message.argument != stream.next_index:
                raise RpcProtocolError(f"{stream.text}: item {message.argument} where {stream.next_index} was due")
            stream.next_index += 1
            try:
                item = stream.decoder.decode(message.body, message.buffers)
            except DECODE_ERRORS as error:
                if self.abandon(message.call_id):
                    stream.finish(self, None, RpcProtocolError(f"{stream.text}: item does not fit its type: {error}"))
                return
            stream.inbox.put(item)
        elif kind == wire.END:
            pending = self.remove(message.call_id)
            if pending is None:
                self.late_answers += 1
            else:
                pending.finish(self, None, None)
        elif kind == wire.DONE:
            with self._lock:
                if not self.oneway_done <= message.argument <= self.oneway_sent:
                    raise RpcProtocolError(f"{message.argument} of {self.oneway_sent} one-way calls acknowledged")
                for _ in range(message.argument - self.oneway_done):
                    self._pending_bytes -= self._oneway_bytes.popleft()
                self.oneway_done = message.argument
                self.oneway_failed = message.call_id
        elif kind == wire.GOODBYE:
            link.send(session.sealer.seal(wire.BYE))
            raise RpcServerStopped(f"{self.address} stopped")

    def _error_of(self, message: wire.Message) -> RpcError:
        try:
            return rebuild(_error_decode(message.body), self._causes)
        except DECODE_ERRORS as error:
            return RpcProtocolError(f"unreadable error: {error}")

    def _receive(self, link: Link, session: Session) -> None:
        """One message."""
        frames = link.receive(self.config.buffers_max + 1)
        try:
            message = session.opener.open(frames)
        except wire.Refused as refusal:
            self._count_refusal(refusal.reason)
            if refusal.authentic and refusal.reason != "replayed":
                raise RpcProtocolError(f"{self.address}: {refusal}") from refusal
            return
        self.bytes_received += message.size_bytes
        self._on_message(link, session, message)

    def _serve(self, link: Link, session: Session) -> None:
        """The open session, until it ends with an exception or by ``close``."""
        link.send(session.sealer.seal(wire.PING))
        close_by_s: float | None = None
        collected = 0
        while True:
            if self._outbox:
                self._send_outbox(link, session)
            timeout_s: float | None = None
            if self._closing:
                now_s = time.monotonic()
                if close_by_s is None:
                    close_by_s = now_s + self.config.drain_s
                    # Answered by GOODBYE once everything before it was taken in.
                    link.send(session.sealer.seal(wire.BYE))
                if now_s >= close_by_s:
                    raise RpcClosed(f"client of {self.address} was closed")
                timeout_s = close_by_s - now_s
            if self._resolutions:
                ready = self._poll(link, 0.0)
                collected += 1
                if not ready & READABLE or collected >= _RESOLUTIONS_MAX:
                    self._flush_resolutions()
                    collected = 0
            else:
                ready = self._poll(link, timeout_s)
            if ready & READABLE:
                self._receive(link, session)
            if ready & MONITORED and DISCONNECTED in link.events():
                # Answers that had already arrived come first: a server that stopped says so before it leaves.
                while self._poll(link, 0.0) & READABLE:
                    self._receive(link, session)
                raise RpcPeerDead(f"{self.address}: the connection broke")
            if self._deadlines:
                self._expire()


def again(error: RpcError) -> RpcError:
    """A fresh exception of the same kind, so that tracebacks of several callers do not pile up on one object."""
    fresh = type(error)(*error.args)
    fresh.__cause__ = error.__cause__
    return fresh
