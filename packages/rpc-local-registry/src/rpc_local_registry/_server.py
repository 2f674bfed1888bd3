"""The server: one I/O thread that reads, checks, dispatches and answers.

Where a handler runs is its declaration's choice: non-blocking ones inline, coroutines on one event loop, blocking ones
on their method's own lane. Handlers never touch the socket; they post outcomes, and the I/O thread sends them. A call
leaves ``session.calls`` exactly once (answered, cancelled, expired, or its session gone), so nobody is answered twice.

One-way calls of a session form a strand: the next begins when the one before has ended, wherever it ran. A client that
says goodbye is answered when its strand has ended, whether or not it still waits for that; the strand of one that
vanished is dropped and counted.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Final

import msgspec

from rpc_local_registry import _asyncio as aio
from rpc_local_registry import _registry
from rpc_local_registry import _wire as wire
from rpc_local_registry._codec import encode
from rpc_local_registry._config import RpcConfig, check_config, check_key, check_name
from rpc_local_registry._errors import (
    ErrorBody,
    RpcArgumentError,
    RpcBackpressure,
    RpcCancelled,
    RpcEncodeError,
    RpcError,
    RpcMethodNotFound,
    RpcProtocolError,
    RpcServerStopped,
    RpcStreamingError,
    RpcTimeout,
    describe,
    describe_own,
    shorten,
)
from rpc_local_registry._hooks import call_hook, told
from rpc_local_registry._lanes import Lane, Lanes, start_thread
from rpc_local_registry._mac import offer
from rpc_local_registry._methods import ASYNC, ASYNC_GENERATOR, GENERATOR, PUSH, MethodSpec, methods_of
from rpc_local_registry._session import ClientTerms, ServerHandshake, ServerTerms, Session
from rpc_local_registry._streams import _EMPTY, StreamSource, close_generator, take_source
from rpc_local_registry._tickets import TicketCheck
from rpc_local_registry._zmq import DISCONNECTED, MONITORED, READABLE, Link, check_address, clock_id

_logger = logging.getLogger("rpc_local_registry")
_encode_error: Final = msgspec.msgpack.Encoder().encode
_NO_VALUE: Final = wire.prepare(b"", encode(None)[0])
#: One-way calls are acknowledged together: this long after the first of them ended, or when so many have.
_ACKNOWLEDGE_S: Final = 0.005
_ACKNOWLEDGE_COUNT: Final = 256
#: A session that never sent its first message is dropped after the handshake's time; this many may be waiting.
_HALF_OPEN_MAX: Final = 1024
#: After a disconnection the dead peer's route disappears with a delay: look again after these, seconds.
_SWEEPS_S: Final = (0.0, 0.02, 0.2, 1.0)


@dataclasses.dataclass(frozen=True)
class PeerInfo:
    """A client whose session ended."""

    name: str
    session_id: str
    reason: str


@dataclasses.dataclass(frozen=True)
class ServerStatistics:
    """What a server did so far. Counts, unless a unit is named."""

    sessions: int
    sessions_total: int
    calls: int
    oneway_calls: int
    oneway_failed: int
    #: Received and never run: their client vanished, or this server was shut down.
    oneway_dropped: int
    streams: int
    pending: int
    pending_high_water: int
    cancelled: int
    expired: int
    failed: int
    refused: Mapping[str, int]
    sent_bytes: int
    received_bytes: int
    lane_threads: int


def server_terms(config: RpcConfig) -> ServerTerms:
    """What a server with this configuration says in its WELCOME."""
    return ServerTerms(
        message_bytes_max=config.message_bytes_max,
        buffers_max=config.buffers_max,
        pending_calls_max=config.pending_calls_max,
        pending_bytes_max=config.pending_bytes_max,
        macs=offer(config.macs),
        clock=clock_id(),
    )


class _Peer:
    """One client's session at the server."""

    __slots__ = (
        "buffers_max", "calls", "confirmed", "failed_oneways", "finished_oneways", "leaving", "message_bytes_max",
        "opened_s", "pending_bytes", "reported_oneways", "routing_id", "session", "strand", "strand_call", "terms",
        "unread_bytes",
    )  # fmt: skip

    def __init__(self, routing_id: bytes, session: Session[ClientTerms], now_s: float, config: RpcConfig) -> None:
        self.routing_id = routing_id
        self.session = session
        self.terms = session.peer
        self.message_bytes_max = min(config.message_bytes_max, session.peer.message_bytes_max)
        self.buffers_max = min(config.buffers_max, session.peer.buffers_max)
        self.calls: dict[int, _Call] = {}
        self.confirmed = False
        #: It said BYE and waits for its strand.
        self.leaving = False
        self.opened_s = now_s
        self.strand: deque[_Call] = deque()
        self.strand_call: _Call | None = None
        self.finished_oneways = 0
        self.reported_oneways = 0
        self.failed_oneways = 0
        #: Of calls that wait or run here.
        self.pending_bytes = 0
        #: Sent to it and not known to be read.
        self.unread_bytes = 0


class _Call:
    """One call at the server. ``over`` means: its outcome is decided, whatever the handler still does."""

    __slots__ = (
        "credit_bytes", "credit_items", "deadline_s", "generator", "items_sent", "lock", "message", "over", "peer",
        "pumping", "source", "spec", "task",
    )  # fmt: skip

    def __init__(self, peer: _Peer, message: wire.Message, spec: MethodSpec, deadline_s: float | None) -> None:
        self.peer = peer
        self.message = message
        self.spec = spec
        self.over = False
        self.deadline_s = deadline_s
        self.task: aio.Task[None] | None = None
        self.generator: Any = None
        self.source: StreamSource[Any] | None = None
        self.credit_items = peer.terms.stream_items
        self.credit_bytes = peer.terms.stream_bytes
        self.items_sent = 0
        self.pumping = False
        #: Guards credit and pumping of a generator that runs on a lane.
        self.lock: Any = None

    def grant(self, items: int, size_bytes: int) -> None:
        """The consumer took something; never more than it allowed at first."""
        terms = self.peer.terms
        self.credit_items = min(self.credit_items + items, terms.stream_items)
        self.credit_bytes = min(self.credit_bytes + size_bytes, terms.stream_bytes)

    @property
    def may_send(self) -> bool:
        """Whether the consumer has room for an item."""
        return self.credit_items > 0 and self.credit_bytes > 0


class RpcServer:
    """Serves the declared methods of one worker at one address.

    Construction does no I/O; ``start`` (or ``with``) binds, starts the I/O thread and registers the worker in this
    process's registry; ``shutdown`` undoes it in milliseconds and answers everything pending with ``RpcServerStopped``.

    Args:
        worker: Object whose class declares methods with ``rpc_method``. Held strongly here, weakly by the registry.
        address: ``ipc://`` (private folder, random name), ``ipc:///folder/name`` (folder 0700 and yours),
            ``tcp://host:port`` (port 0: chosen by the system), ``inproc://name``.
        key: The shared key, at least 32 bytes.
        config: Bounds and times; None for ``RpcConfig.from_env()``.
        on_peer_lost: Called when a client's session ends, on the I/O thread; must not block.
        name: Shown to clients.

    Raises:
        RpcConfigError, RpcAddressError: Wrong key, address or declarations.
    """

    def __init__(
        self,
        worker: object,
        address: str,
        key: bytes,
        *,
        config: RpcConfig | None = None,
        on_peer_lost: Callable[[PeerInfo], None] | None = None,
        name: str = "",
    ) -> None:
        self._worker = worker
        self._address = check_address(address, bind=True)
        self._key = check_key(key)
        self._config = check_config(config)
        self._specs = {name.encode("ascii"): spec for name, spec in methods_of(type(worker)).items()}
        if not self._specs:
            # Served all the same: a subclass may close its last method.
            _logger.warning(
                "%s has no method that is marked with rpc_method: every call is refused", type(worker).__qualname__
            )
        self._on_peer_lost = on_peer_lost
        self._name = check_name(name)
        self._link: Link | None = None
        self._thread: threading.Thread | None = None
        self._state_lock = threading.Lock()
        self._stopping = False
        self._stopped = False
        self._pid = 0
        self._posted: deque[Callable[[], None]] = deque()
        self._peers: dict[bytes, _Peer] = {}
        self._deadlines: list[tuple[float, int, _Call]] = []
        self._ties = itertools.count()
        self._sweeps: list[float] = []
        self._dirty_oneways: set[_Peer] = set()
        self._acknowledge_by_s: float | None = None
        self._lanes = Lanes("rpc-lane")
        self._lane_of: dict[str, Lane] = {}
        self._loop = aio.LoopThread("rpc-loop")
        self._handshake: ServerHandshake | None = None
        self._tickets = TicketCheck(self._key)
        self._refused = dict.fromkeys((*wire.REFUSALS, "half_open"), 0)
        self._sessions_total = 0
        self._calls = 0
        self._oneway_calls = 0
        self._oneway_failed = 0
        self._oneway_dropped = 0
        self._streams = 0
        self._pending = 0
        self._pending_high_water = 0
        self._cancelled = 0
        self._expired = 0
        self._failed = 0
        self._bytes_sent = 0
        self._bytes_received = 0

    # ---- any thread

    @property
    def address(self) -> str:
        """Where to connect; after ``start`` with the real port or path."""
        return self._address

    @property
    def stopping(self) -> bool:
        """Whether ``shutdown`` was called or the server failed."""
        return self._stopping

    def start(self) -> RpcServer:
        """Bind and serve.

        Raises:
            RpcAddressInUse: Somebody alive has the address; nothing was changed.
            RpcAddressError: It cannot be bound.
            RpcServerStopped: This server was shut down, or was started before a fork; make a new one.
        """
        with self._state_lock:
            if self._stopping:
                raise RpcServerStopped("this server was shut down; make a new one")
            if self._link is not None:
                if self._pid != os.getpid():
                    raise RpcServerStopped("this server serves in the parent process; make a new one")
                return self
            link = Link.bind(self._address, self._config, self._tickets.admits)
            thread = threading.Thread(
                target=self._run, args=(link,), name=f"rpc-server-{self._name or 'io'}"[:48], daemon=True
            )
            before = self._address
            try:
                self._handshake = ServerHandshake(self._key, self._name, server_terms(self._config))
                _registry.register_local_worker(link.address, self._worker, self._key)
                self._address = link.address
                self._pid = os.getpid()
                self._link = link
                self._thread = thread
                start_thread(thread)
            except BaseException:
                if thread.ident is None:
                    # As if nothing had been tried.
                    _registry.unregister_local_worker(link.address, self._worker)
                    link.close()
                    self._address, self._link, self._thread = before, None, None
                else:
                    # An interrupt: the thread sees to the rest.
                    self._stopping = True
                    link.wake()
                raise
        return self

    def shutdown(self) -> None:
        """Stop: no new calls, an answer to every pending one, then release everything. Idempotent; from any thread."""
        with self._state_lock:
            self._stopping = True
            link, thread = self._link, self._thread
        if link is None or thread is None or self._pid != os.getpid():
            self._stopped = True
            return
        _registry.unregister_local_worker(self._address, self._worker)
        link.wake()
        if thread is not threading.current_thread():
            thread.join(self._config.drain_s + 2.0)
            self._lanes.stop(self._config.drain_s)
            self._loop.stop(self._config.drain_s)

    def statistics(self) -> ServerStatistics:
        """Counters so far."""
        return ServerStatistics(
            sessions=len(self._peers),
            sessions_total=self._sessions_total,
            calls=self._calls,
            oneway_calls=self._oneway_calls,
            oneway_failed=self._oneway_failed,
            oneway_dropped=self._oneway_dropped,
            streams=self._streams,
            pending=self._pending,
            pending_high_water=self._pending_high_water,
            cancelled=self._cancelled,
            expired=self._expired,
            failed=self._failed,
            refused={**self._refused, "no_ticket": self._tickets.refused},
            sent_bytes=self._bytes_sent,
            received_bytes=self._bytes_received,
            lane_threads=self._lanes.thread_count,
        )

    def __enter__(self) -> RpcServer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        state = "stopped" if self._stopping else "new" if self._link is None else "serving"
        return f"<RpcServer {self._address} {state}>"

    def _post(self, action: Callable[[], None]) -> None:
        """Have the I/O thread do something; from handlers' threads."""
        self._posted.append(action)
        link = self._link
        if link is not None and not self._stopped:
            link.wake()

    # ---- the I/O thread: the loop

    def _run(self, link: Link) -> None:
        try:
            while not self._stopping:
                self._turn(link, self._next_due_s())
            self._say_goodbye(link)
        except BaseException:  # a fault of ours: say so, stop serving, and let clients see a broken connection
            _logger.exception("server at %s failed", self._address)
            raise
        finally:
            self._stopping = True
            self._stopped = True
            _registry.unregister_local_worker(self._address, self._worker)
            for peer in list(self._peers.values()):
                self._end_peer(peer, "server stopped")
            link.close()

    def _next_due_s(self) -> float | None:
        due_s = self._deadlines[0][0] if self._deadlines else None
        if self._sweeps and (due_s is None or self._sweeps[0] < due_s):
            due_s = self._sweeps[0]
        if self._acknowledge_by_s is not None and (due_s is None or self._acknowledge_by_s < due_s):
            due_s = self._acknowledge_by_s
        return due_s

    def _turn(self, link: Link, due_s: float | None) -> None:
        """Wait, then one bounded round: a message, finished handlers, connection events, timers."""
        timeout_s: float | None = None
        if self._posted:
            timeout_s = 0.0
        elif due_s is not None:
            timeout_s = max(0.0, due_s - time.monotonic())
        ready = link.poll(timeout_s)
        if ready & READABLE:
            self._on_frames(link, link.receive(self._config.buffers_max + 2))
        for _ in range(len(self._posted)):
            self._posted.popleft()()
        if ready & MONITORED and DISCONNECTED in link.events():
            now_s = time.monotonic()
            self._sweeps = [now_s + delay_s for delay_s in _SWEEPS_S]
        if self._deadlines or self._sweeps or self._acknowledge_by_s is not None:
            self._on_time(time.monotonic())

    def _on_time(self, now_s: float) -> None:
        deadlines = self._deadlines
        while deadlines and (deadlines[0][0] <= now_s or deadlines[0][2].over):
            _, _, call = heapq.heappop(deadlines)
            if not call.over:
                self._expired += 1
                self._settle(call, wire.ERROR, _own_error(RpcTimeout(f"{call.spec.name}: timed out")))
                self._abort(call)
        if len(deadlines) > 2 * self._pending + 1024:
            self._deadlines = [entry for entry in deadlines if not entry[2].over]
            heapq.heapify(self._deadlines)
        if self._sweeps and self._sweeps[0] <= now_s:
            while self._sweeps and self._sweeps[0] <= now_s:
                self._sweeps.pop(0)
            for peer in list(self._peers.values()):
                # Found out by whether the socket still knows the way to it.
                self._send(peer, wire.PONG)
        if self._acknowledge_by_s is not None and self._acknowledge_by_s <= now_s:
            self._acknowledge()

    def _say_goodbye(self, link: Link) -> None:
        """Answer everything, tell everybody, wait until they have heard it, at most ``drain_s``."""
        until_s = time.monotonic() + self._config.drain_s
        # What was handed over before the shutdown leaves before its end does, as it does on the local path: at once as far as
        # its consumer has room, and to the end where its producer has ended it.
        for _ in range(len(self._posted)):
            self._posted.popleft()()
        while self._ends_unsent() and time.monotonic() < until_s:
            self._turn(link, until_s)
        for peer in list(self._peers.values()):
            for call in list(peer.calls.values()):
                self._settle(call, wire.ERROR, _own_error(RpcServerStopped(f"{self._address} stopped")))
                self._abort(call)
            self._send(peer, wire.GOODBYE)
        now_s = time.monotonic()
        until_s = now_s + self._config.drain_s
        while self._peers and now_s < until_s:
            self._turn(link, min(until_s, self._next_due_s() or until_s))
            now_s = time.monotonic()

    def _ends_unsent(self) -> bool:
        """Whether a push stream that its worker has closed waits for its consumer to take the rest."""
        return any(
            call.source is not None and call.source._inbox.closed
            for peer in self._peers.values()
            for call in peer.calls.values()
        )

    # ---- the I/O thread: messages

    def _send(
        self, peer: _Peer, kind: int, call_id: int = 0, argument: int = 0, payload: wire.Payload = wire.NOTHING
    ) -> None:
        link = self._link
        if link is None or self._peers.get(peer.routing_id) is not peer:
            return
        if kind == wire.ERROR and payload.size_bytes > peer.message_bytes_max:
            body = msgspec.msgpack.decode(payload.tail, type=ErrorBody)
            payload = wire.prepare(b"", _encode_error(shorten(body, peer.message_bytes_max)))
        frames = peer.session.sealer.seal(kind, call_id, argument, payload)
        size = payload.size_bytes
        self._bytes_sent += size
        peer.unread_bytes += size
        if not link.send(frames, peer.routing_id):
            self._end_peer(peer, "connection lost")
        elif (
            peer.unread_bytes > 2 * peer.terms.unread_bytes_max
            and peer.unread_bytes - size > peer.terms.unread_bytes_max
        ):
            self._dismiss(peer, f"{peer.unread_bytes} bytes of answers are unread")

    def _dismiss(self, peer: _Peer, why: str) -> None:
        """End the session of a client that breaks its rules, and tell it why."""
        link = self._link
        if link is not None and self._peers.get(peer.routing_id) is peer:
            error = RpcProtocolError(f"{self._address} ended the session: {why}")
            # Not by ``_send``: this may be the answer to there being too much to send.
            link.send(peer.session.sealer.seal(wire.GOODBYE, 0, 0, _own_error(error)), peer.routing_id)
        self._end_peer(peer, f"protocol: {why}")

    def _on_frames(self, link: Link, frames: list[bytes | memoryview]) -> None:
        routing_id = frames[0]
        if not isinstance(routing_id, bytes) or len(frames) < 2:
            self._refused["truncated"] += 1
            return
        peer = self._peers.get(routing_id)
        message_frames = frames[1:]
        if peer is None or (not peer.confirmed and wire.is_hello(message_frames[0])):
            # A client may greet twice over one connection, when the listener before this one died without a word: its
            # last hello counts.
            self._on_hello(link, routing_id, message_frames, peer)
            return
        try:
            message = peer.session.opener.open(message_frames)
        except wire.Refused as refusal:
            self._refused[refusal.reason] += 1
            if not (refusal.authentic and refusal.reason == "replayed"):
                # The transport loses and reorders nothing: the next message could not be accepted either.
                self._dismiss(peer, f"refused a message: {refusal}")
            return
        self._bytes_received += message.size_bytes
        peer.confirmed = True
        kind = message.kind
        if kind <= wire.ONEWAY:
            self._on_call(peer, message)
        elif kind == wire.CREDIT:
            items, size_bytes = wire.unpack_credit(message.argument)
            if message.call_id == 0:
                peer.unread_bytes = max(0, peer.unread_bytes - size_bytes)
                return
            call = peer.calls.get(message.call_id)
            if call is not None and call.spec.streaming:
                self._on_credit(call, items, size_bytes)
        elif kind == wire.CANCEL:
            call = peer.calls.get(message.call_id)
            if call is not None:
                self._cancelled += 1
                self._forget(call)
                self._abort(call)
        elif kind == wire.BYE:
            self._on_bye(peer)

    def _on_bye(self, peer: _Peer) -> None:
        """It waits for nothing but its one-way calls."""
        peer.leaving = True
        for call in list(peer.calls.values()):
            self._cancelled += 1
            self._forget(call)
            self._abort(call)
        if peer.strand_call is None:
            self._let_go(peer)

    def _let_go(self, peer: _Peer) -> None:
        self._acknowledge()
        self._send(peer, wire.GOODBYE)
        self._end_peer(peer, "closed by the client")

    def _on_hello(self, link: Link, routing_id: bytes, frames: list[bytes | memoryview], before: _Peer | None) -> None:
        now_s = time.monotonic()
        if len(self._peers) >= _HALF_OPEN_MAX:
            limit_s = now_s - self._config.handshake_timeout_s
            for half in [p for p in self._peers.values() if not p.confirmed and p.opened_s < limit_s]:
                self._end_peer(half, "never confirmed")
            if sum(not p.confirmed for p in self._peers.values()) >= _HALF_OPEN_MAX:
                self._refused["half_open"] += 1
                return
        handshake = self._handshake
        if handshake is None:
            return
        try:
            answer, session = handshake.answer(frames, secrets.token_bytes(wire.NONCE_BYTES))
        except wire.Refused as refusal:
            self._refused["unknown_peer" if refusal.reason == "session" else refusal.reason] += 1
            return
        if before is not None:
            self._end_peer(before, "greeted again")
        if not link.send(answer, routing_id) or session is None:
            return
        self._peers[routing_id] = _Peer(routing_id, session, now_s, self._config)
        self._sessions_total += 1

    def _end_peer(self, peer: _Peer, reason: str) -> None:
        if self._peers.get(peer.routing_id) is not peer:
            return
        del self._peers[peer.routing_id]
        self._dirty_oneways.discard(peer)
        for call in list(peer.calls.values()):
            self._cancelled += 1
            self._forget(call)
            self._abort(call)
        if not peer.leaving or self._stopped:
            self._drop_strand(peer, reason)
        if self._on_peer_lost is not None and peer.confirmed:
            info = PeerInfo(peer.session.peer_name, peer.session.session_id.hex(), reason)
            call_hook("on_peer_lost", self._on_peer_lost, info)

    def _drop_strand(self, peer: _Peer, reason: str) -> None:
        dropped = len(peer.strand)
        if dropped:
            self._oneway_dropped += dropped
            _logger.warning(
                "%d one-way calls of client %r were received and not run: %s", dropped, peer.session.peer_name, reason
            )
            peer.strand.clear()

    # ---- the I/O thread: calls

    def _on_call(self, peer: _Peer, message: wire.Message) -> None:
        kind = message.kind
        spec = self._specs.get(message.name)
        if spec is None or self._stopping or message.call_id in peer.calls or not self._admits(peer, message, spec):
            self._refuse_call(peer, message, spec)
            return
        deadline_s: float | None = None
        if message.argument:
            now_s = time.monotonic()
            span = 0.0 if message.flags & wire.FLAG_SHARED_CLOCK else now_s
            deadline_s = span + message.argument / 1e6
            if deadline_s <= now_s:
                # It waited too long on its way: its caller has given up, and it must not run any more.
                self._expired += 1
                if kind != wire.ONEWAY:
                    error = RpcTimeout(f"{spec.name}: timed out before it began")
                    self._send(peer, wire.ERROR, message.call_id, 0, _own_error(error))
                return
        if kind == wire.ONEWAY:
            self._oneway_calls += 1
            if spec.inline and peer.strand_call is None:
                self._run_oneway_inline(peer, message, spec)
                return
            call = _Call(peer, message, spec, None)
            peer.pending_bytes += message.size_bytes
            if peer.strand_call is not None:
                peer.strand.append(call)
            else:
                peer.strand_call = call
                self._start(call)
            return
        if spec.inline and kind == wire.CALL:
            # Done before anything else can happen to it, so it needs no record.
            self._calls += 1
            answer, payload = self._outcome(peer, message, spec)
            if self.stopping:
                # It ran, but its worker left meanwhile: the same answer as on the local path.
                answer, payload = wire.ERROR, _own_error(RpcServerStopped(f"{self._address} stopped"))
            self._failed += answer == wire.ERROR
            self._send(peer, answer, message.call_id, 0, payload)
            return
        call = _Call(peer, message, spec, deadline_s)
        if deadline_s is not None:
            heapq.heappush(self._deadlines, (deadline_s, next(self._ties), call))
        peer.calls[message.call_id] = call
        peer.pending_bytes += message.size_bytes
        self._pending += 1
        if self._pending > self._pending_high_water:
            self._pending_high_water = self._pending
        if kind == wire.STREAM:
            self._streams += 1
            self._start_stream(call)
        else:
            self._calls += 1
            self._start(call)

    def _admits(self, peer: _Peer, message: wire.Message, spec: MethodSpec) -> bool:
        """Whether the call fits its method and the session's bounds."""
        config = self._config
        return (
            spec.streaming is (message.kind == wire.STREAM)
            and len(peer.calls) + len(peer.strand) < config.pending_calls_max
            and peer.pending_bytes + message.size_bytes <= config.pending_bytes_max
            and peer.unread_bytes <= peer.terms.unread_bytes_max
        )

    def _refuse_call(self, peer: _Peer, message: wire.Message, spec: MethodSpec | None) -> None:
        """Say why it was not taken; nothing ran."""
        name = message.name.decode("ascii", "backslashreplace")
        error: RpcError
        if message.call_id in peer.calls:
            self._refused["structure"] += 1
            self._dismiss(peer, f"call {message.call_id} twice")
            return
        if self._stopping:
            error = RpcServerStopped(f"{self._address} stopped")
        elif spec is None:
            error = RpcMethodNotFound(f"method {name!r} not found")
        elif spec.streaming is not (message.kind == wire.STREAM):
            verb = "remote_streaming()" if spec.streaming else "remote()"
            error = RpcStreamingError(f"{spec.name} wants {verb}")
        elif peer.unread_bytes > peer.terms.unread_bytes_max:
            error = RpcBackpressure(f"{peer.unread_bytes} bytes of answers to this client are unread")
        elif len(peer.calls) + len(peer.strand) >= self._config.pending_calls_max:
            error = RpcBackpressure(f"{len(peer.calls) + len(peer.strand)} calls of this client are unanswered")
        else:
            error = RpcBackpressure(f"{peer.pending_bytes} bytes of this client's calls are unanswered")
        if message.kind == wire.ONEWAY:
            self._oneway_ended(peer, name, error)
        else:
            self._send(peer, wire.ERROR, message.call_id, 0, _own_error(error))

    def _start(self, call: _Call) -> None:
        spec = call.spec
        if spec.kind == ASYNC:
            self._on_loop(call, functools.partial(self._start_task, call))
        elif spec.non_blocking:
            self._settle(call, *self._outcome(call.peer, call.message, spec))
        else:
            self._on_lane(call, functools.partial(self._run_on_lane, call))

    def _on_loop(self, call: _Call, begin: Callable[[aio.AbstractEventLoop], None]) -> None:
        try:
            if not self._loop.call(begin):
                self._settle(call, wire.ERROR, _own_error(RpcServerStopped(f"{self._address} stopped")))
        except RuntimeError as error:
            self._without_thread(call, error)

    def _on_lane(self, call: _Call, job: Callable[[], None]) -> None:
        try:
            self._lanes.submit(self._lane(call.spec), job)
        except RuntimeError as error:
            self._without_thread(call, error)

    def _without_thread(self, call: _Call, error: RuntimeError) -> None:
        """The system gives no thread: this call fails, and the server goes on."""
        text = f"{call.spec.name}: no thread to run it: {error}"
        begun = call.generator is not None
        self._settle(call, wire.ERROR, _own_error(RpcCancelled(text) if begun else RpcBackpressure(text)))

    def _lane(self, spec: MethodSpec) -> Lane:
        lane = self._lane_of.get(spec.name)
        if lane is None:
            lane = self._lane_of[spec.name] = Lane(spec.concurrency_max or self._config.lane_threads)
        return lane

    def _run_oneway_inline(self, peer: _Peer, message: wire.Message, spec: MethodSpec) -> None:
        error: BaseException | None = None
        try:
            args, keywords = spec.decode_arguments(message)
            spec.function(self._worker, *args, **keywords)
        except BaseException as raised:  # noqa: BLE001 - see _outcome
            error = raised
        self._oneway_ended(peer, spec.name, error)

    def _outcome(self, peer: _Peer, message: wire.Message, spec: MethodSpec) -> tuple[int, wire.Payload]:
        """Run a plain method here; (kind, payload) of the answer."""
        try:
            args, keywords = spec.decode_arguments(message)
        except RpcArgumentError as error:
            return wire.ERROR, _own_error(error)
        try:
            value = spec.function(self._worker, *args, **keywords)
        except BaseException as error:  # noqa: BLE001 - a handler's SystemExit must not end the server's thread either
            return wire.ERROR, _handler_error(error)
        if value is None or message.kind == wire.ONEWAY:
            return wire.RESULT, _NO_VALUE
        return self._encode_result(peer, spec, wire.RESULT, value)

    def _encode_result(self, peer: _Peer, spec: MethodSpec, kind: int, value: Any) -> tuple[int, wire.Payload]:
        try:
            body, buffers = encode(value)
        except RpcArgumentError as error:
            return wire.ERROR, _own_error(RpcEncodeError(f"result of {spec.name}: {error}"))
        except BaseException as error:  # noqa: BLE001 - a value's __array__ may even exit
            return wire.ERROR, _own_error(RpcEncodeError(f"result of {spec.name}: {told(error)}"))
        payload = wire.prepare(b"", body, buffers, self._config.inline_bytes_max)
        if payload.size_bytes > peer.message_bytes_max or payload.buffer_count > peer.buffers_max:
            return wire.ERROR, _own_error(
                RpcEncodeError(
                    f"result of {spec.name}: {payload.size_bytes} bytes in {payload.buffer_count} arrays; a message holds at "
                    f"most {peer.message_bytes_max} in {peer.buffers_max}"
                )
            )
        return kind, payload

    def _run_on_lane(self, call: _Call) -> None:
        # A deadline that passed in the queue is answered by the I/O thread; the handler must not begin.
        if call.over or (call.deadline_s is not None and time.monotonic() >= call.deadline_s):
            return
        kind, payload = self._outcome(call.peer, call.message, call.spec)
        self._post(functools.partial(self._settle, call, kind, payload))

    def _start_task(self, call: _Call, loop: aio.AbstractEventLoop) -> None:
        if not call.over:
            call.task = loop.create_task(self._run_task(call))

    async def _run_task(self, call: _Call) -> None:
        kind = wire.ERROR
        try:
            args, keywords = call.spec.decode_arguments(call.message)
        except RpcArgumentError as error:
            payload = _own_error(error)
        else:
            try:
                value = await call.spec.function(self._worker, *args, **keywords)
                kind, payload = self._encode_result(call.peer, call.spec, wire.RESULT, value)
            except BaseException as error:  # noqa: BLE001 - see _outcome; a cancellation is an outcome like any other
                payload = _handler_error(error)
        self._post(functools.partial(self._settle, call, kind, payload))

    def _settle(self, call: _Call, kind: int, payload: wire.Payload) -> None:
        """The call has an outcome: answer it, once."""
        if call.over:
            return
        if call.message.kind == wire.ONEWAY:
            call.over = True
            call.peer.pending_bytes -= call.message.size_bytes
            error = None
            if kind == wire.ERROR:
                error = RpcError(msgspec.msgpack.decode(payload.tail)[2])
            self._oneway_ended(call.peer, call.spec.name, error)
            self._next_in_strand(call.peer)
            return
        self._forget(call)
        if self._stopping and kind != wire.ERROR:
            # It ended well, but its worker left meanwhile: the same answer as on the local path.
            kind, payload = wire.ERROR, _own_error(RpcServerStopped(f"{self._address} stopped"))
        if kind == wire.ERROR:
            self._failed += 1
        self._send(call.peer, kind, call.message.call_id, 0, payload)

    def _forget(self, call: _Call) -> None:
        call.over = True
        if call.peer.calls.pop(call.message.call_id, None) is not None:
            call.peer.pending_bytes -= call.message.size_bytes
            self._pending -= 1

    def _abort(self, call: _Call) -> None:
        """Stop what a decided call still does."""
        task = call.task
        if task is not None:
            aio.call_on(task.get_loop(), task.cancel)
        if call.source is not None:
            call.source._cancel()
        if call.spec.kind == GENERATOR and call.generator is not None:
            self._resume_generator(call)

    # ---- the I/O thread: one-way calls

    def _next_in_strand(self, peer: _Peer) -> None:
        peer.strand_call = None
        if self._stopping:
            self._drop_strand(peer, "server stopped")
        if peer.strand:
            # Posted, not called: a long strand of inline handlers must not become a deep recursion.
            following = peer.strand.popleft()
            peer.strand_call = following
            self._posted.append(functools.partial(self._start, following))
        elif peer.leaving:
            self._let_go(peer)

    def _oneway_ended(self, peer: _Peer, name: str, error: BaseException | None) -> None:
        peer.finished_oneways += 1
        if error is not None:
            peer.failed_oneways += 1
            self._oneway_failed += 1
            _registry.log_oneway_failure(self._address, name, error)
        self._dirty_oneways.add(peer)
        if peer.finished_oneways - peer.reported_oneways >= _ACKNOWLEDGE_COUNT:
            self._acknowledge()
        elif self._acknowledge_by_s is None:
            self._acknowledge_by_s = time.monotonic() + _ACKNOWLEDGE_S

    def _acknowledge(self) -> None:
        """One acknowledgement per client, however many one-way calls ended."""
        for peer in list(self._dirty_oneways):
            if peer.finished_oneways != peer.reported_oneways:
                peer.reported_oneways = peer.finished_oneways
                self._send(peer, wire.DONE, peer.failed_oneways, peer.finished_oneways)
        self._dirty_oneways.clear()
        self._acknowledge_by_s = None

    # ---- streams

    def _start_stream(self, call: _Call) -> None:
        spec = call.spec
        call.lock = threading.Lock()
        if spec.kind == ASYNC_GENERATOR:
            self._on_loop(call, functools.partial(self._start_stream_task, call))
        elif spec.non_blocking:
            self._open_stream(call)
        else:
            self._on_lane(call, functools.partial(self._open_stream, call))

    def _open_stream(self, call: _Call) -> None:
        """Call the method; on the I/O thread or a lane."""
        if call.over or (call.deadline_s is not None and time.monotonic() >= call.deadline_s):
            return
        spec = call.spec
        try:
            args, keywords = spec.decode_arguments(call.message)
        except RpcArgumentError as error:
            self._post(functools.partial(self._settle, call, wire.ERROR, _own_error(error)))
            return
        try:
            made = spec.function(self._worker, *args, **keywords)
        except BaseException as error:  # noqa: BLE001 - see _outcome
            self._post(functools.partial(self._settle, call, wire.ERROR, _handler_error(error)))
            return
        if spec.kind != PUSH:
            call.pumping = True
            call.generator = made
            self._post(functools.partial(self._send_opened, call))
            self._pump_generator(call)
            return
        try:
            inbox = take_source(spec.name, made)
        except RpcStreamingError as error:
            self._post(functools.partial(self._settle, call, wire.ERROR, _own_error(error)))
            return
        call.source = made
        if call.message.call_id not in call.peer.calls:
            made._cancel()
        self._post(functools.partial(self._send_opened, call))
        self._post(functools.partial(self._drain_source, call, inbox))

    def _send_opened(self, call: _Call) -> None:
        if not call.over:
            self._send(call.peer, wire.OPENED, call.message.call_id)

    def _drain_source(self, call: _Call, inbox: Any) -> None:
        """Send what a worker pushed, as far as credit goes; on the I/O thread."""
        while not call.over:
            while call.may_send:
                item = inbox.take_nowait()
                if item is _EMPTY:
                    break
                kind, payload = self._encode_result(call.peer, call.spec, wire.ITEM, item)
                if kind == wire.ERROR:
                    self._settle(call, kind, payload)
                    self._abort(call)
                    return
                call.credit_items -= 1
                call.credit_bytes -= payload.size_bytes
                self._send_item(call, payload)
                if call.message.call_id not in call.peer.calls:
                    return
            if not call.may_send:
                # The next CREDIT calls this again.
                return
            if inbox.watch(functools.partial(self._post, functools.partial(self._drain_source, call, inbox))):
                return
            if inbox.closed and not len(inbox):
                if inbox.error is not None:
                    self._settle(call, wire.ERROR, _handler_error(inbox.error))
                else:
                    self._settle(call, wire.END, wire.NOTHING)
                return

    def _on_credit(self, call: _Call, items: int, size_bytes: int) -> None:
        """The consumer took items."""
        spec = call.spec
        if spec.kind == PUSH:
            stalled = not call.may_send
            call.grant(items, size_bytes)
            if stalled and call.source is not None:
                self._drain_source(call, call.source._inbox)
        elif spec.kind == GENERATOR:
            with call.lock:
                call.grant(items, size_bytes)
            self._resume_generator(call)
        else:
            self._loop.call(functools.partial(self._grant, call, items, size_bytes))

    def _resume_generator(self, call: _Call) -> None:
        with call.lock:
            if call.pumping or call.generator is None or not (call.may_send or call.over):
                return
            call.pumping = True
        if call.spec.non_blocking:
            self._pump_generator(call)
        else:
            self._on_lane(call, functools.partial(self._pump_generator, call))

    def _pump_generator(self, call: _Call) -> None:
        """Advance a generator as far as credit goes; no thread is held while the consumer is slow."""
        generator = call.generator
        while True:
            if call.over:
                call.generator = None
                close_generator(generator)
                return
            with call.lock:
                if not call.may_send:
                    call.pumping = False
                    return
                call.credit_items -= 1
            try:
                item = next(generator)
                kind, payload = self._encode_result(call.peer, call.spec, wire.ITEM, item)
            except StopIteration:
                kind, payload = wire.END, wire.NOTHING
            except BaseException as error:  # noqa: BLE001 - see _outcome
                kind, payload = wire.ERROR, _handler_error(error)
            if kind != wire.ITEM:
                call.generator = None
                close_generator(generator)
                self._post(functools.partial(self._settle, call, kind, payload))
                return
            with call.lock:
                call.credit_bytes -= payload.size_bytes
            if self._stopping:
                continue  # what it says after the shutdown is nobody's any more, as on the local path
            if call.spec.non_blocking:
                # On the I/O thread: sent before the generator is asked again.
                self._send_item(call, payload)
            else:
                self._post(functools.partial(self._send_item, call, payload))

    def _send_item(self, call: _Call, payload: wire.Payload) -> None:
        if not call.over:
            self._send(call.peer, wire.ITEM, call.message.call_id, call.items_sent, payload)
            call.items_sent += 1

    def _start_stream_task(self, call: _Call, loop: aio.AbstractEventLoop) -> None:
        if not call.over:
            call.lock = aio.Event()
            call.task = loop.create_task(self._run_stream_task(call))

    def _grant(self, call: _Call, items: int, size_bytes: int, loop: aio.AbstractEventLoop) -> None:
        call.grant(items, size_bytes)
        if isinstance(call.lock, aio.Event):
            call.lock.set()

    async def _run_stream_task(self, call: _Call) -> None:
        generator = None
        try:
            args, keywords = call.spec.decode_arguments(call.message)
        except RpcArgumentError as error:
            kind, payload = wire.ERROR, _own_error(error)
        else:
            try:
                generator = call.spec.function(self._worker, *args, **keywords)
                self._post(functools.partial(self._send_opened, call))
                kind, payload = wire.END, wire.NOTHING
                async for item in generator:
                    kind, payload = self._encode_result(call.peer, call.spec, wire.ITEM, item)
                    if kind == wire.ERROR:
                        break
                    while not call.may_send:
                        call.lock.clear()
                        await call.lock.wait()
                    call.credit_items -= 1
                    call.credit_bytes -= payload.size_bytes
                    if not self._stopping:
                        self._post(functools.partial(self._send_item, call, payload))
                    kind, payload = wire.END, wire.NOTHING
            except BaseException as error:  # noqa: BLE001 - see _outcome
                kind, payload = wire.ERROR, _handler_error(error)
        if generator is not None:
            try:
                await generator.aclose()
            except BaseException:
                _logger.exception("closing %s failed", call.spec.name)
        self._post(functools.partial(self._settle, call, kind, payload))


def _handler_error(error: BaseException) -> wire.Payload:
    """What a handler raised."""
    return wire.prepare(b"", _encode_error(describe(error)))


def _own_error(error: RpcError) -> wire.Payload:
    """The server's own word about a call."""
    return wire.prepare(b"", _encode_error(describe_own(error)))
