"""The server: one I/O thread that reads, checks, dispatches and answers.

Where a handler runs is its declaration's choice: non-blocking ones inline, coroutines on one event loop, blocking ones
on their method's own lane. Handlers never touch the socket; they post outcomes, and the I/O thread sends them. A call
leaves ``session.calls`` exactly once (answered, cancelled, expired, or its session gone), so nobody is answered twice.

One-way calls of a session form a strand: the next begins when the one before has ended, wherever it ran.
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
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final

import msgspec

from rpc_local_registry import _asyncio as aio
from rpc_local_registry import _registry
from rpc_local_registry import _wire as wire
from rpc_local_registry._codec import encode
from rpc_local_registry._config import RpcConfig, check_key
from rpc_local_registry._errors import (
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
)
from rpc_local_registry._lanes import Lane, Lanes
from rpc_local_registry._methods import ASYNC, ASYNC_GENERATOR, GENERATOR, PUSH, SYNC, MethodSpec, methods_of
from rpc_local_registry._session import ServerHandshake, Session
from rpc_local_registry._streams import _EMPTY, StreamSource
from rpc_local_registry._zmq import DISCONNECTED, MONITORED, READABLE, Link, check_address

_logger = logging.getLogger("rpc_local_registry")
_encode_error: Final = msgspec.msgpack.Encoder().encode
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


class _Peer:
    """One client's session at the server."""

    __slots__ = (
        "calls", "confirmed", "failed_oneways", "finished_oneways", "opened_s", "reported_oneways", "routing_id", "session",
        "strand", "strand_call",
    )  # fmt: skip

    def __init__(self, routing_id: bytes, session: Session, now_s: float) -> None:
        self.routing_id = routing_id
        self.session = session
        self.calls: dict[int, _Call] = {}
        self.confirmed = False
        self.opened_s = now_s
        self.strand: deque[_Call] = deque()
        self.strand_call: _Call | None = None
        self.finished_oneways = 0
        self.reported_oneways = 0
        self.failed_oneways = 0


class _Call:
    """One call at the server. ``over`` means: its outcome is decided, whatever the handler still does."""

    __slots__ = (
        "credit", "deadline_s", "generator", "items_sent", "lock", "message", "over", "peer", "pumping", "source", "spec",
        "task",
    )  # fmt: skip

    def __init__(self, peer: _Peer, message: wire.Message, spec: MethodSpec, credit: int) -> None:
        self.peer = peer
        self.message = message
        self.spec = spec
        self.over = False
        self.deadline_s: float | None = None
        self.task: aio.Task[None] | None = None
        self.generator: Any = None
        self.source: StreamSource[Any] | None = None
        self.credit = credit
        self.items_sent = 0
        self.pumping = False
        #: Guards credit and pumping of a generator that runs on a lane.
        self.lock: Any = None


class RpcServer:
    """Serves the declared methods of one worker at one address.

    Construction does no I/O; ``start`` (or ``with``) binds, starts the I/O thread and registers the worker in this
    process's registry; ``shutdown`` undoes it in milliseconds and answers everything pending with ``RpcServerStopped``.

    Args:
        worker: Object whose class declares methods with ``rpc_method``. Held strongly here, weakly by the registry.
        address: ``ipc://`` (private folder, random name), ``ipc:///folder/name`` (folder 0700 and yours),
            ``tcp://host:port`` (port 0: chosen by the system), ``inproc://name``.
        key: The shared key, at least 32 bytes.
        config: Bounds and times.
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
        self._config = config or RpcConfig()
        self._specs = {name.encode("ascii"): spec for name, spec in methods_of(type(worker)).items()}
        self._on_peer_lost = on_peer_lost
        self._name = name
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
        self._handshake = ServerHandshake(
            self._key,
            name,
            message_bytes_max=self._config.message_bytes_max,
            buffers_max=self._config.buffers_max,
        )
        self._refused = dict.fromkeys((*wire.REFUSALS, "half_open"), 0)
        self._sessions_total = 0
        self._calls = 0
        self._oneway_calls = 0
        self._oneway_failed = 0
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
            RpcServerStopped: This server was shut down; make a new one.
        """
        with self._state_lock:
            if self._stopping:
                raise RpcServerStopped("this server was shut down; make a new one")
            if self._link is not None:
                return self
            link = Link.bind(self._address, self._config)
            try:
                _registry.register_local_worker(link.address, self._worker)
            except BaseException:
                link.close()
                raise
            self._link = link
            self._address = link.address
            self._pid = os.getpid()
            self._thread = threading.Thread(
                target=self._run, args=(link,), name=f"rpc-server-{self._name or 'io'}"[:48], daemon=True
            )
            self._thread.start()
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
            streams=self._streams,
            pending=self._pending,
            pending_high_water=self._pending_high_water,
            cancelled=self._cancelled,
            expired=self._expired,
            failed=self._failed,
            refused=dict(self._refused),
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
                self._settle(call, wire.ERROR, *_error_frames(RpcTimeout(f"{call.spec.name}: timed out")))
                self._abort(call)
        if len(deadlines) > 2 * self._pending + 1024:
            self._deadlines = [entry for entry in deadlines if not entry[2].over]
            heapq.heapify(self._deadlines)
        if self._sweeps and self._sweeps[0] <= now_s:
            while self._sweeps and self._sweeps[0] <= now_s:
                self._sweeps.pop(0)
            for peer in list(self._peers.values()):
                self._send(peer, wire.PONG)
        if self._acknowledge_by_s is not None and self._acknowledge_by_s <= now_s:
            self._acknowledge()

    def _say_goodbye(self, link: Link) -> None:
        """Answer everything, tell everybody, wait until they have heard it, at most ``drain_s``."""
        for peer in list(self._peers.values()):
            for call in list(peer.calls.values()):
                self._settle(call, wire.ERROR, *_error_frames(RpcServerStopped(f"{self._address} stopped")))
                self._abort(call)
            self._send(peer, wire.GOODBYE)
        now_s = time.monotonic()
        until_s = now_s + self._config.drain_s
        while self._peers and now_s < until_s:
            self._turn(link, min(until_s, self._next_due_s() or until_s))
            now_s = time.monotonic()

    # ---- the I/O thread: messages

    def _send(
        self,
        peer: _Peer,
        kind: int,
        call_id: int = 0,
        argument: int = 0,
        body: bytes = b"",
        buffers: Sequence[memoryview] = (),
    ) -> None:
        link = self._link
        if link is None or self._peers.get(peer.routing_id) is not peer:
            return
        frames = peer.session.sealer.seal(
            kind, call_id, argument, b"", body, buffers, inline_bytes_max=self._config.inline_bytes_max
        )
        self._bytes_sent += len(frames[0])
        if not link.send(frames, peer.routing_id):
            self._end_peer(peer, "connection lost")

    def _on_frames(self, link: Link, frames: list[bytes | memoryview]) -> None:
        routing_id = bytes(frames[0])
        if len(frames) < 2:
            self._refused["truncated"] += 1
            return
        peer = self._peers.get(routing_id)
        if peer is None:
            self._on_hello(link, routing_id, frames[1:])
            return
        try:
            message = peer.session.opener.open(frames[1:])
        except wire.Refused as refusal:
            self._refused[refusal.reason] += 1
            if refusal.authentic and refusal.reason != "replayed":
                self._send(peer, wire.GOODBYE)
                self._end_peer(peer, f"protocol: {refusal}")
            return
        self._bytes_received += message.size_bytes
        peer.confirmed = True
        kind = message.kind
        if kind == wire.CALL or kind == wire.ONEWAY or kind == wire.STREAM:
            self._on_call(peer, message)
        elif kind == wire.CREDIT:
            call = peer.calls.get(message.call_id)
            if call is not None:
                self._on_credit(call, message.argument)
        elif kind == wire.CANCEL:
            call = peer.calls.get(message.call_id)
            if call is not None:
                self._cancelled += 1
                self._forget(call)
                self._abort(call)
        elif kind == wire.BYE:
            self._acknowledge()
            self._send(peer, wire.GOODBYE)
            self._end_peer(peer, "closed by the client")

    def _on_hello(self, link: Link, routing_id: bytes, frames: list[bytes | memoryview]) -> None:
        now_s = time.monotonic()
        if len(self._peers) >= _HALF_OPEN_MAX:
            limit_s = now_s - self._config.handshake_timeout_s
            for half in [p for p in self._peers.values() if not p.confirmed and p.opened_s < limit_s]:
                self._end_peer(half, "never confirmed")
            if sum(not p.confirmed for p in self._peers.values()) >= _HALF_OPEN_MAX:
                self._refused["half_open"] += 1
                return
        try:
            answer, session = self._handshake.answer(frames, secrets.token_bytes(wire.NONCE_BYTES))
        except wire.Refused as refusal:
            self._refused["unknown_peer" if refusal.reason == "session" else refusal.reason] += 1
            return
        if not link.send(answer, routing_id) or session is None:
            return
        self._peers[routing_id] = _Peer(routing_id, session, now_s)
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
        peer.strand.clear()
        if self._on_peer_lost is not None and peer.confirmed:
            try:
                self._on_peer_lost(PeerInfo(peer.session.peer_name, peer.session.session_id.hex(), reason))
            except Exception:
                _logger.exception("on_peer_lost failed")

    # ---- the I/O thread: calls

    def _on_call(self, peer: _Peer, message: wire.Message) -> None:
        kind = message.kind
        spec = self._specs.get(message.name)
        error: RpcError | None = None
        if self._stopping:
            error = RpcServerStopped(f"{self._address} stopped")
        elif message.call_id in peer.calls:
            self._refused["structure"] += 1
            self._send(peer, wire.GOODBYE)
            self._end_peer(peer, f"protocol: call {message.call_id} twice")
            return
        elif len(peer.calls) + len(peer.strand) >= self._config.pending_calls_max:
            error = RpcBackpressure(f"{len(peer.calls)} calls of this client are unanswered")
        elif spec is None:
            name = message.name.decode("ascii", "backslashreplace")
            error = RpcMethodNotFound(f"method {name!r} not found")
        elif spec.streaming is not (kind == wire.STREAM):
            verb = "remote_streaming()" if spec.streaming else "remote()"
            error = RpcStreamingError(f"{spec.name} wants {verb}")
        if error is not None or spec is None:
            if kind == wire.ONEWAY:
                self._oneway_ended(peer, message.name.decode("ascii", "backslashreplace"), error)
            else:
                body, buffers = _error_frames(error or RpcError())
                self._send(peer, wire.ERROR, message.call_id, 0, body, buffers)
            return
        if kind == wire.CALL and spec.non_blocking and spec.kind == SYNC:
            # Done before anything else can happen to it, so it needs no record.
            self._calls += 1
            answer, body, buffers = self._outcome(peer, message, spec)
            if self._stopping:
                # It ran, but its worker left meanwhile: the same answer as on the local path.
                answer, (body, buffers) = wire.ERROR, _error_frames(RpcServerStopped(f"{self._address} stopped"))
            self._failed += answer == wire.ERROR
            self._send(peer, answer, message.call_id, 0, body, buffers)
            return
        call = _Call(peer, message, spec, self._config.stream_credit)
        if message.argument:
            call.deadline_s = time.monotonic() + message.argument / 1e6
            heapq.heappush(self._deadlines, (call.deadline_s, next(self._ties), call))
        if kind == wire.ONEWAY:
            self._oneway_calls += 1
            if peer.strand_call is not None:
                peer.strand.append(call)
            else:
                self._start_strand(peer, call)
            return
        peer.calls[message.call_id] = call
        self._pending += 1
        self._pending_high_water = max(self._pending_high_water, self._pending)
        if kind == wire.STREAM:
            self._streams += 1
            self._start_stream(call)
        else:
            self._calls += 1
            self._start(call)

    def _start(self, call: _Call) -> None:
        spec = call.spec
        if spec.kind == ASYNC:
            if not self._loop.call(functools.partial(self._start_task, call)):
                self._settle(call, wire.ERROR, *_error_frames(RpcServerStopped(f"{self._address} stopped")))
        elif spec.non_blocking:
            self._settle(call, *self._outcome(call.peer, call.message, spec))
        else:
            self._lanes.submit(self._lane(spec), functools.partial(self._run_on_lane, call))

    def _lane(self, spec: MethodSpec) -> Lane:
        lane = self._lane_of.get(spec.name)
        if lane is None:
            lane = self._lane_of[spec.name] = Lane(spec.concurrency_max or self._config.lane_threads)
        return lane

    def _outcome(self, peer: _Peer, message: wire.Message, spec: MethodSpec) -> tuple[int, bytes, Sequence[memoryview]]:
        """Run a plain method here; (kind, body, buffers) of the answer."""
        try:
            args, keywords = spec.decode_arguments(message)
            value = spec.function(self._worker, *args, **keywords)
        except BaseException as error:  # noqa: BLE001 - a handler's SystemExit must not end the server's thread either
            return wire.ERROR, *_error_frames(error)
        if message.kind == wire.ONEWAY:
            return wire.RESULT, b"", ()
        return self._encode_result(peer, spec, wire.RESULT, value)

    def _encode_result(
        self, peer: _Peer, spec: MethodSpec, kind: int, value: Any
    ) -> tuple[int, bytes, Sequence[memoryview]]:
        try:
            body, buffers = encode(value)
        except RpcArgumentError as error:
            return wire.ERROR, *_error_frames(RpcEncodeError(f"result of {spec.name}: {error}"))
        size = len(body) + wire.HEADER_BYTES
        if buffers:
            size += sum(map(len, buffers)) + 16 * len(buffers)
        session = peer.session
        if size > session.peer_message_bytes_max or len(buffers) > session.peer_buffers_max:
            return wire.ERROR, *_error_frames(
                RpcEncodeError(f"result of {spec.name}: {size} bytes; at most {session.peer_message_bytes_max} fit")
            )
        return kind, body, buffers

    def _run_on_lane(self, call: _Call) -> None:
        # A deadline that passed in the queue is answered by the I/O thread; the handler must not begin.
        if call.over or (call.deadline_s is not None and time.monotonic() >= call.deadline_s):
            return
        kind, body, buffers = self._outcome(call.peer, call.message, call.spec)
        self._post(lambda: self._settle(call, kind, body, buffers))

    def _start_task(self, call: _Call, loop: aio.AbstractEventLoop) -> None:
        if not call.over:
            call.task = loop.create_task(self._run_task(call))

    async def _run_task(self, call: _Call) -> None:
        kind: int
        body: bytes
        buffers: Sequence[memoryview]
        try:
            args, keywords = call.spec.decode_arguments(call.message)
            value = await call.spec.function(self._worker, *args, **keywords)
            kind, body, buffers = self._encode_result(call.peer, call.spec, wire.RESULT, value)
        except aio.CancelledError:
            kind, (body, buffers) = wire.ERROR, _error_frames(RpcCancelled(f"{call.spec.name}: cancelled"))
        except BaseException as error:  # noqa: BLE001 - see _outcome
            kind, (body, buffers) = wire.ERROR, _error_frames(error)
        self._post(lambda: self._settle(call, kind, body, buffers))

    def _settle(self, call: _Call, kind: int, body: bytes, buffers: Sequence[memoryview]) -> None:
        """The call has an outcome: answer it, once."""
        if call.message.kind == wire.ONEWAY:
            if not call.over:
                call.over = True
                error = None
                if kind == wire.ERROR:
                    error = RpcError(msgspec.msgpack.decode(body)[2])
                self._oneway_ended(call.peer, call.spec.name, error)
                self._next_in_strand(call.peer)
            return
        if call.over:
            return
        self._forget(call)
        if kind == wire.ERROR:
            self._failed += 1
        self._send(call.peer, kind, call.message.call_id, 0, body, buffers)

    def _forget(self, call: _Call) -> None:
        call.over = True
        if call.peer.calls.pop(call.message.call_id, None) is not None:
            self._pending -= 1

    def _abort(self, call: _Call) -> None:
        """Stop what a decided call still does."""
        task = call.task
        if task is not None:
            loop = task.get_loop()
            try:
                loop.call_soon_threadsafe(task.cancel)
            except RuntimeError:
                if not loop.is_closed():
                    raise
        if call.source is not None:
            call.source._cancel()
        if call.spec.kind == GENERATOR and call.generator is not None:
            self._resume_generator(call)

    # ---- the I/O thread: one-way calls

    def _start_strand(self, peer: _Peer, call: _Call) -> None:
        peer.strand_call = call
        self._start(call)

    def _next_in_strand(self, peer: _Peer) -> None:
        peer.strand_call = None
        if peer.strand:
            # Posted, not called: a long strand of inline handlers must not become a deep recursion.
            following = peer.strand.popleft()
            peer.strand_call = following
            self._posted.append(lambda: self._start(following))

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
            self._loop.call(functools.partial(self._start_stream_task, call))
        elif spec.non_blocking:
            self._open_stream(call)
        else:
            self._lanes.submit(self._lane(spec), functools.partial(self._open_stream, call))

    def _open_stream(self, call: _Call) -> None:
        """Call the method; on the I/O thread or a lane."""
        if call.over:
            return
        spec = call.spec
        try:
            args, keywords = spec.decode_arguments(call.message)
            made = spec.function(self._worker, *args, **keywords)
            if spec.kind == PUSH:
                if not isinstance(made, StreamSource):
                    raise RpcStreamingError(f"{spec.name} returned {type(made).__qualname__}, not a StreamSource")
                call.source = made
                inbox = made._take()
                if call.message.call_id not in call.peer.calls:
                    made._cancel()
                self._post(lambda: self._drain_source(call, inbox))
                return
        except BaseException as error:  # noqa: BLE001 - see _outcome
            frames = _error_frames(error)
            self._post(lambda: self._settle(call, wire.ERROR, *frames))
            return
        call.pumping = True
        call.generator = made
        self._pump_generator(call)

    def _drain_source(self, call: _Call, inbox: Any) -> None:
        """Send what a worker pushed, as far as credit goes; on the I/O thread."""
        while not call.over:
            while call.credit > 0:
                item = inbox.take_nowait()
                if item is _EMPTY:
                    break
                kind, body, buffers = self._encode_result(call.peer, call.spec, wire.ITEM, item)
                if kind == wire.ERROR:
                    self._settle(call, kind, body, buffers)
                    self._abort(call)
                    return
                call.credit -= 1
                self._send(call.peer, wire.ITEM, call.message.call_id, call.items_sent, body, buffers)
                call.items_sent += 1
                if call.message.call_id not in call.peer.calls:
                    return
            if call.credit <= 0:
                # The next CREDIT calls this again.
                return
            if inbox.watch(lambda: self._post(lambda: self._drain_source(call, inbox))):
                return
            if inbox.closed and not len(inbox):
                if inbox.error is not None:
                    self._settle(call, wire.ERROR, *_error_frames(inbox.error))
                else:
                    self._settle(call, wire.END, b"", ())
                return

    def _on_credit(self, call: _Call, count: int) -> None:
        """The consumer took items."""
        limit = self._config.stream_credit
        spec = call.spec
        if spec.kind == PUSH:
            stalled = call.credit <= 0
            call.credit = min(call.credit + count, limit)
            if stalled and call.source is not None:
                self._drain_source(call, call.source._inbox)
        elif spec.kind == GENERATOR:
            with call.lock:
                call.credit = min(call.credit + count, limit)
            self._resume_generator(call)
        else:
            self._loop.call(functools.partial(self._grant, call, count))

    def _resume_generator(self, call: _Call) -> None:
        with call.lock:
            if call.pumping or call.generator is None or (call.credit <= 0 and not call.over):
                return
            call.pumping = True
        if call.spec.non_blocking:
            self._pump_generator(call)
        else:
            self._lanes.submit(self._lane(call.spec), functools.partial(self._pump_generator, call))

    def _pump_generator(self, call: _Call) -> None:
        """Advance a generator as far as credit goes; no thread is held while the consumer is slow."""
        generator = call.generator
        while True:
            if call.over:
                call.generator = None
                _close_generator(generator)
                return
            with call.lock:
                if call.credit <= 0:
                    call.pumping = False
                    return
                call.credit -= 1
            kind: int
            body: bytes
            buffers: Sequence[memoryview]
            try:
                item = next(generator)
                kind, body, buffers = self._encode_result(call.peer, call.spec, wire.ITEM, item)
            except StopIteration:
                kind, body, buffers = wire.END, b"", ()
            except BaseException as error:  # noqa: BLE001 - see _outcome
                kind, (body, buffers) = wire.ERROR, _error_frames(error)
            if kind != wire.ITEM:
                call.generator = None
                _close_generator(generator)
                self._post(functools.partial(self._settle, call, kind, body, buffers))
                return
            self._post(functools.partial(self._send_item, call, body, buffers))

    def _send_item(self, call: _Call, body: bytes, buffers: Sequence[memoryview]) -> None:
        if not call.over:
            self._send(call.peer, wire.ITEM, call.message.call_id, call.items_sent, body, buffers)
            call.items_sent += 1

    def _start_stream_task(self, call: _Call, loop: aio.AbstractEventLoop) -> None:
        if not call.over:
            call.lock = aio.Event()
            call.task = loop.create_task(self._run_stream_task(call))

    def _grant(self, call: _Call, count: int, loop: aio.AbstractEventLoop) -> None:
        call.credit = min(call.credit + count, self._config.stream_credit)
        if isinstance(call.lock, aio.Event):
            call.lock.set()

    async def _run_stream_task(self, call: _Call) -> None:
        kind: int
        body: bytes
        buffers: Sequence[memoryview]
        generator = None
        try:
            args, keywords = call.spec.decode_arguments(call.message)
            generator = call.spec.function(self._worker, *args, **keywords)
            kind, body, buffers = wire.END, b"", ()
            async for item in generator:
                kind, body, buffers = self._encode_result(call.peer, call.spec, wire.ITEM, item)
                if kind == wire.ERROR:
                    break
                while call.credit <= 0:
                    call.lock.clear()
                    await call.lock.wait()
                call.credit -= 1
                self._post(functools.partial(self._send_item, call, body, buffers))
                kind, body, buffers = wire.END, b"", ()
        except aio.CancelledError:
            kind, (body, buffers) = wire.ERROR, _error_frames(RpcCancelled(f"{call.spec.name}: cancelled"))
        except BaseException as error:  # noqa: BLE001 - see _outcome
            kind, (body, buffers) = wire.ERROR, _error_frames(error)
        if generator is not None:
            try:
                await generator.aclose()
            except Exception:
                _logger.exception("closing %s failed", call.spec.name)
        self._post(lambda: self._settle(call, kind, body, buffers))


def _close_generator(generator: Any) -> None:
    try:
        generator.close()
    except Exception:
        _logger.exception("closing a stream's generator failed")


def _error_frames(error: BaseException) -> tuple[bytes, Sequence[memoryview]]:
    if isinstance(error, RpcProtocolError):
        error = RpcError(str(error))
    return _encode_error(describe(error)), ()
