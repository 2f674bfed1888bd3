"""The client's remote side: one I/O thread, one session, the calls that wait for an answer.

A caller that blocks may borrow the socket from that thread for the length of its exchange (``_turn``). It may be interrupted
anywhere; so what it does to the session is written down before it is done, and the thread finishes what was left.

An engine lives for one session: connecting, open, then failed for good with one error that every waiting and every
later call gets. A call is registered here before its first byte is sent. Whoever removes it from ``pending`` owns its
outcome: the I/O thread with an answer, or the caller with a timeout or a cancellation; so each call ends exactly once.
"""

from __future__ import annotations

import functools
import heapq
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from typing import Any, Final, TypeVar

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
    RpcProtocolMismatch,
    RpcServerStopped,
    RpcTimeout,
    RpcUnreachable,
    RpcUsageError,
    again,
    rebuild,
)
from rpc_local_registry._hooks import call_hook, for_each, told
from rpc_local_registry._lanes import start_thread
from rpc_local_registry._mac import offer
from rpc_local_registry._session import ClientHandshake, ClientTerms, ServerTerms, Session
from rpc_local_registry._streams import Inbox
from rpc_local_registry._tickets import issue
from rpc_local_registry._turn import Turn
from rpc_local_registry._zmq import (
    CONNECTED,
    DISCONNECTED,
    FOREIGN,
    MONITORED,
    READABLE,
    TURNED_AWAY,
    Link,
    clock_id,
)

_logger = logging.getLogger("rpc_local_registry")
_T = TypeVar("_T")
_error_decode: Final = msgspec.msgpack.Decoder(ErrorBody).decode
#: Why there was never a session.
_NEVER_OPEN: Final = (RpcUnreachable, RpcAuthenticationError, RpcProtocolMismatch)
#: Answers collected for one event loop before it is woken, while more are readable.
_RESOLUTIONS_MAX: Final = 64
#: So many blocking calls one after the other, with nothing else under way, and the next one may borrow the socket.
_ALONE_CALLS: Final = 4
#: The I/O thread takes the socket back when nobody borrowed it for so long.
_LEASE_S: Final = 0.004


class Pending:
    """A call that waits for its answer. Who removed it calls ``finish``, and again if an interrupt came out of that."""

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
        if self.gate.locked():
            # Else an interrupt came behind it, and this is the second time.
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


class RpcFuture(Future[_T]):
    """``concurrent.futures.Future`` whose ``cancel`` reaches the server."""

    #: Takes the call out of the client's table; False if somebody else did. None once there is nothing to take.
    abandon: Callable[[], bool] | None = None
    #: Keeps the client alive.
    anchor: object = None
    #: Whether this thread is the one that brings the outcome.
    brought_here: Callable[[], bool] | None = None

    def result(self, timeout: float | None = None) -> _T:
        """See ``concurrent.futures``.

        Raises:
            RpcUsageError: In a callback on the client's I/O thread, and the outcome is not here; the call goes on.
        """
        self._refuse_to_wait(timeout)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """See ``concurrent.futures``; raises as :meth:`result` does."""
        self._refuse_to_wait(timeout)
        return super().exception(timeout)

    def _refuse_to_wait(self, timeout: float | None) -> None:
        brought_here = self.brought_here
        if brought_here is not None and (timeout is None or timeout > 0) and not self.done() and brought_here():
            raise RpcUsageError(
                "a callback on the client's I/O thread cannot wait for a future's outcome: "
                "use add_done_callback, or another thread"
            )

    def add_done_callback(self, fn: Callable[[Future[_T]], object]) -> None:
        """See ``concurrent.futures``; what the callback raises ends nothing but the callback."""
        super().add_done_callback(functools.partial(call_hook, "a future's callback", fn))

    def cancel(self) -> bool:
        """Cancel the call; False if its outcome is already here."""
        abandon = self.abandon
        if abandon is None:
            return self.cancelled() or super().cancel()
        if not abandon():
            return self.cancelled()
        # Ours alone from here on: nobody else will end it. Whoever waits in ``concurrent.futures.wait`` is told as well.
        super().cancel()
        self.set_running_or_notify_cancel()
        self.abandon = self.brought_here = None
        return True


class FuturePending(Pending):
    """A future waits. Its callbacks run on the I/O thread and must not block."""

    __slots__ = ("future",)

    def __init__(self, decoder: TypedDecoder, text: str) -> None:
        super().__init__(decoder, text)
        self.future: RpcFuture[Any] = RpcFuture()

    def finish(self, engine: Engine, value: Any, error: BaseException | None) -> None:
        try:
            if error is not None:
                self.future.set_exception(error)
            else:
                self.future.set_result(value)
        except InvalidStateError:
            # Its holder gave it an outcome, or an interrupt came behind ours: no reason to end the session of all.
            _logger.warning("%s: an answer came to a future that had an outcome already", self.text)
        finally:
            # Not before: who cancels meanwhile must find the call gone. Without it the two would keep each other, and
            # whatever the future's callbacks hold, until a collection.
            self.future.abandon = self.future.brought_here = None


class StreamPending(Pending):
    """A stream's consumer waits.

    Its inbox holds (item, items and bytes on the wire so far, this one included): whatever the consumer loses in an
    interrupt, the next item tells how much room there is again.
    """

    __slots__ = ("inbox", "next_index", "opened", "received_bytes")

    def __init__(self, decoder: TypedDecoder, text: str) -> None:
        super().__init__(decoder, text)
        self.inbox: Inbox[tuple[Any, int, int]] = Inbox()
        self.next_index = 0
        self.received_bytes = 0
        #: The worker's method has been called: what the client does now can no longer overtake it.
        self.opened = False

    def finish(self, engine: Engine, value: Any, error: BaseException | None) -> None:
        self.inbox.close(error)


class Totals:
    """Counts over all sessions of one client."""

    def __init__(self) -> None:
        self.oneway_sent = 0
        self.oneway_done = 0
        self.oneway_failed = 0
        self.oneway_lost = 0
        self.pending_high_water = 0
        self.late_answers = 0
        self.refused: dict[str, int] = {}
        self.bytes_sent = 0
        self.bytes_received = 0

    def refuse(self, reason: str) -> None:
        """Count a message that was not accepted."""
        self.refused[reason] = self.refused.get(reason, 0) + 1


def client_terms(config: RpcConfig) -> ClientTerms:
    """What a client with this configuration says in its HELLO."""
    return ClientTerms(
        message_bytes_max=config.message_bytes_max,
        buffers_max=config.buffers_max,
        stream_items=config.stream_credit,
        stream_bytes=config.stream_bytes,
        unread_bytes_max=config.unread_bytes_max,
        macs=offer(config.macs),
        clock=clock_id(),
    )


def _deadline(session: Session[ServerTerms], deadline_s: float, flags: int) -> tuple[int, int]:
    """(argument, flags) of a call with this deadline on the monotonic clock."""
    if session.shared_clock:
        return int(deadline_s * 1e6), flags | wire.FLAG_SHARED_CLOCK
    return max(1, int((deadline_s - time.monotonic()) * 1e6)), flags


#: Kind, call, argument, deadline on the monotonic clock, payload, flags.
_Outgoing = tuple[int, int, int, float | None, wire.Payload, int]


class Engine:
    """See the module's header. Public to ``_client`` only."""

    def __init__(
        self,
        address: str,
        key: bytes,
        config: RpcConfig,
        name: str,
        causes: Mapping[str, type[Exception]],
        totals: Totals,
        on_lost: Callable[[Engine, RpcError], None],
    ) -> None:
        self.address = address
        self.config = config
        self.pending: dict[int, Pending] = {}
        self.failure: RpcError | None = None
        #: Whether a session was ever open here.
        self.was_open = False
        self.mac_name = ""
        self.totals = totals
        self.pid = os.getpid()
        self._key = key
        self._name = name
        self._causes = causes
        self._on_lost = on_lost
        # Re-entrant: a forgotten stream may be collected, and cancel itself, inside any of these sections.
        self._lock = threading.RLock()
        self._outbox: deque[_Outgoing] = deque()
        self._last_call_id = 0
        self._pending_bytes = 0
        #: This session's one-way calls.
        self._oneway_sent = 0
        self._oneway_done = 0
        self._oneway_failed = 0
        self._oneway_bytes: deque[int] = deque()
        self._opened_streams = 0
        self._unacknowledged_bytes = 0
        # What the server allows is known after the handshake.
        self._message_bytes_max = config.message_bytes_max
        self._buffers_max = config.buffers_max
        self._pending_calls_max = config.pending_calls_max
        self._pending_bytes_max = config.pending_bytes_max
        self._deadlines: list[tuple[float, int, str]] = []
        self._new_deadlines: deque[tuple[float, int, str]] = deque()
        self._closing = False
        self._turn = Turn()
        self._session: Session[ServerTerms] | None = None
        #: Begun by callers who borrowed the socket.
        self._exchanges = 0
        #: Blocking calls answered since anything else was under way.
        self._alone = 0
        #: Number and frames of a message that a borrower is sending: until this is None again, it may have been sent or not.
        self._unsure: tuple[int, list[bytes | memoryview]] | None = None
        #: A borrower waits for a message; interrupted in it, the binding may have received one and dropped it.
        self._receiving = False
        self._resolutions: dict[aio.AbstractEventLoop, list[tuple[aio.Future[Any], Any, Any]]] = {}
        self._opened = threading.Event()
        self._link = Link.connect(address, config, issue(key, secrets.token_bytes(wire.NONCE_BYTES)))
        self._thread = threading.Thread(target=self._run, name=f"rpc-client-{name or address}"[:48], daemon=True)

    # ---- any thread

    def start(self) -> None:
        """Start the I/O thread; the handshake begins."""
        start_thread(self._thread)

    def on_own_thread(self) -> bool:
        """Whether this is the I/O thread: what is waited for here never comes."""
        return self._thread is threading.current_thread()

    @property
    def busy(self) -> bool:
        """Whether something sent could still be overtaken: a call unanswered, a stream not opened, a one-way call not done."""
        return len(self.pending) > self._opened_streams or self._oneway_sent != self._oneway_done

    @property
    def pending_bytes(self) -> int:
        """Bytes of calls that are not answered or done."""
        return self._pending_bytes

    def call(self, pending: BlockingPending, payload: wire.Payload, flags: int, timeout_s: float | None) -> None:
        """Make a call and block until its outcome is in ``pending``.

        Raises:
            RpcTimeout: It is not there in time; the server hears of it.
            RpcUsageError: This is the I/O thread. Nothing was queued.
            RpcArgumentError, RpcBackpressure, RpcError: As ``submit``.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            if self._turn.lent and not payload.external and self._exchange(pending, payload, flags, deadline_s):
                return
            if not pending.call_id:
                # Not before: while the socket is lent no callback runs on that thread.
                if self.on_own_thread():
                    raise RpcUsageError(
                        f"{pending.text}: a callback on the client's I/O thread cannot wait for an answer: "
                        "use remote_future, or another thread",
                        nothing_ran=True,
                    )
                self.submit(wire.CALL, pending, payload, flags, timeout_s, timed=False)
            left_s = -1.0 if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            if not pending.gate.acquire(timeout=left_s):
                if self.abandon(pending.call_id):
                    raise RpcTimeout(f"{pending.text} after {timeout_s} s: timed out")
                pending.gate.acquire()
        except BaseException:
            # KeyboardInterrupt lands here; the server hears that nobody waits any more.
            self.abandon(pending.call_id)
            raise

    def submit(
        self,
        kind: int,
        pending: Pending | None,
        payload: wire.Payload,
        flags: int,
        timeout_s: float | None,
        *,
        timed: bool,
    ) -> int:
        """Register a call and queue it; returns its id. Interrupted, it leaves nothing behind, or the call under way.

        Args:
            timed: The I/O thread watches the deadline (the caller does when it blocks itself).

        Raises:
            RpcArgumentError: It is larger than a message may be. Nothing was queued.
            RpcBackpressure: Too many calls or bytes are unanswered. Nothing was queued.
            RpcClosed: By this client.
            RpcError: For a one-way call, the failure of a session that was open. Every other call has it as its outcome.
        """
        try:
            with self._lock:
                failure = self.failure
                if failure is None:
                    call_id = self._admit(payload)
                    deadline_s = None
                    if timeout_s is not None:
                        deadline_s = time.monotonic() + timeout_s
                        if timed:
                            text = pending.text if pending is not None else ""
                            self._new_deadlines.append((deadline_s, call_id, f"{text} after {timeout_s} s"))
                    self._queue((kind, call_id, 0, deadline_s, payload, flags), pending)
                elif pending is None:
                    self._lose_oneway(failure)
            if failure is not None:
                # Found out while the call was being made: the same as a moment later, at the call's outcome.
                if pending is not None:
                    pending.finish(self, None, again(failure))
                return 0
            self._link.wake()
        except BaseException:
            # An interrupt behind the append: what is queued must not wait for the next one's wake-up.
            self._link.wake()
            raise
        return call_id

    def _lose_oneway(self, failure: RpcError) -> None:
        """A one-way call that met a failed session: counted if there never was one, else refused; with the lock."""
        if self.was_open or not isinstance(failure, _NEVER_OPEN):
            raise again(failure)
        self.totals.oneway_sent += 1
        self.totals.oneway_lost += 1
        _logger.warning("1 one-way call to %s was not confirmed done: %s", self.address, failure)

    def _admit(self, payload: wire.Payload) -> int:
        """The next call's id, if there may be one; with the lock. Changes nothing that matters.

        Raises:
            RpcArgumentError, RpcBackpressure, RpcError: See ``submit``.
        """
        if self._closing:
            raise RpcClosed(f"client of {self.address} was closed")
        self._check_size(payload)
        unanswered = len(self.pending) + self._oneway_sent - self._oneway_done
        if unanswered >= self._pending_calls_max:
            raise RpcBackpressure(f"{unanswered} calls are unanswered")
        if self._pending_bytes + payload.size_bytes > self._pending_bytes_max:
            raise RpcBackpressure(
                f"{self._pending_bytes} bytes of calls are unanswered, and {payload.size_bytes} more would exceed "
                f"{self._pending_bytes_max}"
            )
        if unanswered >= self.totals.pending_high_water:
            self.totals.pending_high_water = unanswered + 1
        self._last_call_id = call_id = self._last_call_id + 1
        return call_id

    def _queue(self, outgoing: _Outgoing, pending: Pending | None) -> None:
        """Register a call and queue it, both or (interrupted) neither; with the lock."""
        call_id, payload = outgoing[1], outgoing[4]
        before = len(self._oneway_bytes), self._oneway_sent, self.totals.oneway_sent
        try:
            if pending is None:
                self._oneway_bytes.append(payload.size_bytes)
                self._pending_bytes += payload.size_bytes
                self._oneway_sent += 1
                self.totals.oneway_sent += 1
            else:
                self._register(call_id, pending, payload)
            self._outbox.append(outgoing)
        except BaseException:
            if outgoing in self._outbox:
                self._outbox.remove(outgoing)
            if pending is None:
                count, self._oneway_sent, self.totals.oneway_sent = before
                while len(self._oneway_bytes) > count:
                    self._oneway_bytes.pop()
                self._recount()
            else:
                self._unregister(pending)
            raise

    def _register(self, call_id: int, pending: Pending, payload: wire.Payload) -> None:
        """With the lock. Interrupted, it leaves the sums to be made anew."""
        pending.size_bytes = payload.size_bytes
        pending.call_id = call_id
        self.pending[call_id] = pending
        self._pending_bytes += payload.size_bytes

    def _unregister(self, pending: Pending) -> None:
        """An interrupted call was never made; with the lock."""
        self.pending.pop(pending.call_id, None)
        pending.call_id = 0
        self._recount()

    def _recount(self) -> None:
        """The sums, from what they are sums of: an interrupt came between the two. With the lock."""
        waiting = self.pending.values()
        self._pending_bytes = sum(each.size_bytes for each in waiting) + sum(self._oneway_bytes)
        self._opened_streams = sum(isinstance(each, StreamPending) and each.opened for each in waiting)

    def _check_size(self, payload: wire.Payload) -> None:
        if payload.size_bytes > self._message_bytes_max:
            raise RpcArgumentError(
                f"a message of {payload.size_bytes} bytes; one holds at most {self._message_bytes_max}"
            )
        if payload.buffer_count > self._buffers_max:
            raise RpcArgumentError(f"{payload.buffer_count} arrays; a message holds at most {self._buffers_max}")

    def control(self, kind: int, call_id: int, argument: int = 0) -> None:
        """Queue a message that expects no answer."""
        if self.failure is None:
            try:
                with self._lock:
                    self._outbox.append((kind, call_id, argument, None, wire.NOTHING, 0))
                self._link.wake()
            except BaseException:
                self._link.wake()
                raise

    def remove(self, call_id: int) -> Pending | None:
        """Take a call out; the caller now owns its outcome. None if another did."""
        with self._lock:
            try:
                pending = self.pending.pop(call_id, None)
                if pending is not None:
                    self._pending_bytes -= pending.size_bytes
                    if isinstance(pending, StreamPending) and pending.opened:
                        self._opened_streams -= 1
            except BaseException:
                self._recount()
                raise
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

    def close(self, *, wait: bool = True) -> None:
        """End: pending calls fail with ``RpcClosed``, one-way calls are flushed for up to ``flush_s``. Idempotent.

        Args:
            wait: Until that is done. Without it the I/O thread does it by itself.
        """
        with self._lock:
            already = self._closing
            self._closing = True
        if self.pid != os.getpid():
            return
        try:
            if not already:
                self._take_all_pending(RpcClosed(f"client of {self.address} was closed"))
        finally:
            # A callback may exit on the main thread: the session ends all the same.
            self._link.wake()
        if self._thread.ident is None:
            self._link.close()
        elif wait and self._thread is not threading.current_thread():
            self._thread.join(self.config.flush_s + self.config.drain_s + 1.0)

    def _take_all_pending(self, error: RpcError) -> None:
        with self._lock:
            taken = list(self.pending.values())
            self.pending.clear()
            self._pending_bytes = sum(self._oneway_bytes)
            self._opened_streams = 0
        for_each(lambda pending: pending.finish(self, None, again(error)), taken)
        if threading.current_thread() is self._thread:
            self._flush_resolutions()

    # ---- the I/O thread

    def _run(self) -> None:
        link = self._link
        try:
            session = self._handshake(link)
            self._agree(session)
            self.mac_name = session.mac_name
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
        """The session is over: every call, waiting or coming, gets this error; one-way calls are counted as lost."""
        with self._lock:
            self.failure = error
            self._outbox.clear()
            lost = self._oneway_sent - self._oneway_done
            self._oneway_done = self._oneway_sent
            self._oneway_bytes.clear()
            self.totals.oneway_lost += lost
        if lost:
            _logger.warning("%d one-way calls to %s were not confirmed done: %s", lost, self.address, error)
        self._take_all_pending(error)
        self._opened.set()
        self._on_lost(self, error)

    def resolve_soon(
        self, loop: aio.AbstractEventLoop, future: aio.Future[Any], value: Any, error: BaseException | None
    ) -> None:
        """Collect an answer for a loop; delivered by ``_flush_resolutions``."""
        if threading.current_thread() is not self._thread:
            aio.call_on(loop, aio.resolve, [(future, value, error)])
            return
        self._resolutions.setdefault(loop, []).append((future, value, error))

    def _flush_resolutions(self) -> None:
        if not self._resolutions:
            return
        resolutions, self._resolutions = self._resolutions, {}
        for loop, answers in resolutions.items():
            aio.call_on(loop, aio.resolve, answers)

    def _handshake(self, link: Link) -> Session[ServerTerms]:
        """Connect and agree, or raise the error that says why not."""
        deadline_s = time.monotonic() + self.config.handshake_timeout_s
        connected = self.address.startswith("inproc://")
        foreign = False
        closing = False
        terms = client_terms(self.config)

        def begin() -> ClientHandshake:
            attempt = ClientHandshake(self._key, secrets.token_bytes(wire.NONCE_BYTES), self._name, terms)
            link.send(attempt.hello())
            return attempt

        attempt = begin()
        while True:
            left_s = deadline_s - time.monotonic()
            if self._closing:
                # Only one-way calls that were sent before ``close`` are worth the wait.
                if not closing:
                    closing = True
                    deadline_s = min(deadline_s, time.monotonic() + (self.config.flush_s if self._outbox else 0.0))
                    left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise RpcClosed(f"client of {self.address} was closed")
            if left_s <= 0:
                within = f"within {self.config.handshake_timeout_s} s"
                if not connected and not foreign:
                    raise RpcUnreachable(f"nobody listens at {self.address} ({within})")
                raise RpcAuthenticationError(
                    f"{self.address} gave no authentic answer {within}: another key, not an rpc_local_registry server, or one "
                    f"that does not run"
                )
            ready = self._poll(link, left_s)
            for event in link.events() if ready & MONITORED else ():
                if event == CONNECTED:
                    connected = True
                elif event == TURNED_AWAY:
                    raise RpcAuthenticationError(f"{self.address} turned this client away: another key")
                elif event == FOREIGN:
                    foreign = True
                elif event == DISCONNECTED:
                    connected = False
                    # What was sent into that connection is lost; a fresh attempt waits for the next one.
                    attempt = begin()
            if ready & READABLE:
                try:
                    return attempt.answer(link.receive(1))
                except wire.Refused as refusal:
                    # Also the answer to an earlier hello of ours, which a listener that died left in the pipe.
                    self.totals.refuse(refusal.reason)
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

    def _agree(self, session: Session[ServerTerms]) -> None:
        """Keep to what the server allows from here on."""
        peer, config = session.peer, self.config
        with self._lock:
            self._message_bytes_max = min(config.message_bytes_max, peer.message_bytes_max)
            self._buffers_max = min(config.buffers_max, peer.buffers_max)
            self._pending_calls_max = min(config.pending_calls_max, peer.pending_calls_max)
            self._pending_bytes_max = min(config.pending_bytes_max, peer.pending_bytes_max)
            self._session = session
            self.was_open = True

    def _send_outbox(self, link: Link, session: Session[ServerTerms]) -> None:
        seal = session.sealer.seal
        while True:
            # With the lock: an interrupted ``submit`` takes out what is still here, and only that.
            with self._lock:
                if not self._outbox:
                    return
                kind, call_id, argument, deadline_s, payload, flags = self._outbox.popleft()
            if kind <= wire.ONEWAY:
                if kind != wire.ONEWAY and call_id not in self.pending:
                    # Nobody waits for it any more; it need not run.
                    continue
                try:
                    self._check_size(payload)
                except RpcArgumentError as error:
                    self._refuse_outgoing(kind, call_id, payload.size_bytes, error)
                    continue
                if deadline_s is not None:
                    argument, flags = _deadline(session, deadline_s, flags)
            frames = seal(kind, call_id, argument, payload, flags)
            self.totals.bytes_sent += payload.size_bytes
            if not link.send(frames):
                raise self._send_failed()

    def _send_failed(self) -> RpcPeerDead:
        return RpcPeerDead(f"{self.address}: the connection takes nothing more")

    def _refuse_outgoing(self, kind: int, call_id: int, size: int, error: RpcArgumentError) -> None:
        """A call that was taken before the server's bounds were known does not fit them."""
        if kind == wire.ONEWAY:
            with self._lock:
                # It was counted as sent; nobody will acknowledge it.
                self._oneway_sent -= 1
                self._oneway_bytes.remove(size)
                self._pending_bytes -= size
                self.totals.oneway_done += 1
                self.totals.oneway_failed += 1
            _logger.warning("a one-way call to %s was not sent: %s", self.address, error)
            return
        pending = self.remove(call_id)
        if pending is not None:
            pending.finish(self, None, error)

    def _mark_opened(self, stream: StreamPending) -> None:
        with self._lock:
            if not stream.opened and stream.call_id in self.pending:
                stream.opened = True
                self._opened_streams += 1

    def _on_message(self, link: Link, session: Session[ServerTerms], message: wire.Message) -> None:
        kind = message.kind
        if kind == wire.RESULT or kind == wire.ERROR:
            pending = self.remove(message.call_id)
            if pending is None:
                self.totals.late_answers += 1
                return
            self._finish(pending, message)
            self._alone = self._alone + 1 if isinstance(pending, BlockingPending) and not self._busy_otherwise() else 0
        elif kind == wire.ITEM:
            stream = self.pending.get(message.call_id)
            if not isinstance(stream, StreamPending):
                self.totals.late_answers += 1
                return
            if not stream.opened:
                self._mark_opened(stream)
            if message.argument != stream.next_index:
                raise RpcProtocolError(f"{stream.text}: item {message.argument} where {stream.next_index} was due")
            stream.next_index += 1
            stream.received_bytes += message.size_bytes
            try:
                item = stream.decoder.decode(message.body, message.buffers)
            except BaseException as error:  # noqa: BLE001 - likewise
                if self.abandon(message.call_id):
                    text = f"{stream.text}: item does not fit its type: {told(error)}"
                    stream.finish(self, None, RpcProtocolError(text))
                return
            stream.inbox.put((item, stream.next_index, stream.received_bytes))
        elif kind == wire.END:
            pending = self.remove(message.call_id)
            if pending is None:
                self.totals.late_answers += 1
            else:
                pending.finish(self, None, None)
        elif kind == wire.OPENED:
            stream = self.pending.get(message.call_id)
            if isinstance(stream, StreamPending):
                self._mark_opened(stream)
        elif kind == wire.DONE:
            self._on_done(message.argument, message.call_id)
        elif kind == wire.GOODBYE:
            link.send(session.sealer.seal(wire.BYE))
            if self._closing:
                raise RpcClosed(f"client of {self.address} was closed")
            if message.body:
                raise again(self._error_of(message))
            raise RpcServerStopped(f"{self.address} stopped")

    def _finish(self, pending: Pending, message: wire.Message) -> None:
        """Hand an answer to whoever waits for it."""
        if message.kind == wire.ERROR:
            pending.finish(self, None, self._error_of(message))
            return
        try:
            value = pending.decoder.decode(message.body, message.buffers)
        except BaseException as error:  # a value's __post_init__ must not end the session of all
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is not self._thread:
                # The borrower's own.
                raise
            pending.finish(self, None, RpcProtocolError(f"{pending.text}: result does not fit its type: {told(error)}"))
            return
        pending.finish(self, value, None)

    def _busy_otherwise(self) -> bool:
        """Whether anything is under way or to be sent."""
        return bool(self.pending or self._outbox or self._closing) or self._oneway_sent != self._oneway_done

    def _on_done(self, done: int, failed: int) -> None:
        """So many one-way calls of this session have ended, so many of them with an exception."""
        with self._lock:
            if not self._oneway_done <= done <= self._oneway_sent or not self._oneway_failed <= failed <= done:
                raise RpcProtocolError(f"{done} of {self._oneway_sent} one-way calls acknowledged, {failed} failed")
            for _ in range(done - self._oneway_done):
                self._pending_bytes -= self._oneway_bytes.popleft()
            self.totals.oneway_done += done - self._oneway_done
            self.totals.oneway_failed += failed - self._oneway_failed
            self._oneway_done = done
            self._oneway_failed = failed

    def _error_of(self, message: wire.Message) -> RpcError:
        try:
            return rebuild(_error_decode(message.body), self._causes)
        except DECODE_ERRORS as error:
            return RpcProtocolError(f"unreadable error: {error}")

    def _receive(self, link: Link, session: Session[ServerTerms], *, seen: bool = False) -> None:
        """One message.

        Args:
            seen: A borrower looked at it; it may have opened it before it was interrupted, and then nobody waits for it.
        """
        frames = link.receive(self.config.buffers_max + 1)
        try:
            message = session.opener.open(frames)
        except wire.Refused as refusal:
            replayed = refusal.authentic and refusal.reason == "replayed"
            if not (replayed and seen):
                self.totals.refuse(refusal.reason)
            if replayed:
                return
            # The transport loses and reorders nothing: whatever else is wrong with a message, the next one could not be
            # accepted either, and its call would wait for ever.
            raise RpcProtocolError(f"{self.address}: refused a message inside the session: {refusal}") from refusal
        self._count_received(message)
        self._on_message(link, session, message)

    def _count_received(self, message: wire.Message) -> None:
        self.totals.bytes_received += message.size_bytes
        self._unacknowledged_bytes += message.size_bytes
        if self._unacknowledged_bytes * 2 >= self.config.unread_bytes_max:
            self.control(wire.CREDIT, 0, wire.pack_credit(0, self._unacknowledged_bytes))
            self._unacknowledged_bytes = 0

    # ---- the borrowed socket

    def _lend(self, link: Link, session: Session[ServerTerms]) -> None:
        """Let callers exchange by themselves until somebody needs this thread, or nobody has borrowed for a while."""
        self._turn.lend()
        while True:
            before = self._exchanges
            if link.wait_woken(_LEASE_S) or self._exchanges == before:
                break
        self._turn.want()
        link.hurry()
        self._turn.take_back()
        link.calm()
        self._alone = 0
        if self._unsure is not None:
            # The same frames, never others under their number: what the server had already, it drops.
            number, frames = self._unsure
            if not link.send(frames):
                raise self._send_failed()
            session.sealer.sequence = number
            self._unsure = None
        if self._receiving:
            self._receiving = False
            if not link.unread:
                # Nobody waits for it: with a borrower nothing but its own call was under way.
                link.drop_rest()
                session.opener.may_miss_one()
        if link.unread:
            self._receive(link, session, seen=True)

    def _exchange(self, pending: BlockingPending, payload: wire.Payload, flags: int, deadline_s: float | None) -> bool:
        """Make a call on the caller's own thread, if the socket can be borrowed.

        Returns:
            Whether its outcome is in ``pending``. If not, ``pending.call_id`` says whether it was made at all.
        """
        turn = self._turn
        try:
            if not turn.take(pending):
                return False
            answer = self._borrow(pending, payload, flags, deadline_s)
            turn.give(pending)
        except BaseException:
            # Perhaps once more: the interrupt may have come in the middle of it.
            turn.give(pending)
            self._link.wake()
            with self._lock:
                self._recount()
            raise
        if answer is None:
            self._link.wake()
            return False
        # Without the turn: what decoding runs of the caller's may call again.
        self._finish(pending, answer)
        return True

    def _borrow(
        self, pending: BlockingPending, payload: wire.Payload, flags: int, deadline_s: float | None
    ) -> wire.Message | None:
        """Send one call and wait for its answer, with the turn; None if the I/O thread must see to the rest.

        Can be interrupted anywhere. What it leaves is a call that was not registered, or one that the I/O thread goes on
        with: sent for sure or not (``_unsure``), its answer perhaps looked at and still unread. Sums may be wrong then.
        """
        link, session = self._link, self._session
        if session is None or self._unsure is not None or link.unread:
            return None
        with self._lock:
            if self.failure is not None or self._busy_otherwise():
                return None
            call_id = self._admit(payload)
            self._register(call_id, pending, payload)
        self._exchanges += 1
        argument = 0
        if deadline_s is not None:
            argument, flags = _deadline(session, deadline_s, flags)
        sealer = session.sealer
        number = sealer.sequence + 1
        frames = sealer.frames(number, wire.CALL, call_id, argument, payload, flags)
        self._unsure = number, frames
        if not link.send(frames):
            return None
        sealer.sequence = number
        self._unsure = None
        self.totals.bytes_sent += payload.size_bytes
        self._receiving = True
        first = link.wait_frame(None if deadline_s is None else deadline_s - time.monotonic())
        self._receiving = False
        if first is None or not wire.is_answer(first, call_id):
            return None
        try:
            message = session.opener.open((first,))
        except wire.Refused:
            # Of several frames, or the I/O thread will find the same and end the session.
            return None
        link.looked()
        self._count_received(message)
        with self._lock:
            if self.pending.pop(call_id, None) is None:
                return None
            self._pending_bytes -= payload.size_bytes
        return message

    def _serve(self, link: Link, session: Session[ServerTerms]) -> None:
        """The open session, until it ends with an exception or by ``close``."""
        link.send(session.sealer.seal(wire.PING))
        close_by_s: float | None = None
        collected = 0
        while True:
            if self._outbox:
                self._send_outbox(link, session)
            if self._alone >= _ALONE_CALLS:
                self._lend(link, session)
                continue
            timeout_s: float | None = None
            if self._closing:
                now_s = time.monotonic()
                if close_by_s is None:
                    flush = self._oneway_sent != self._oneway_done
                    close_by_s = now_s + (self.config.flush_s if flush else self.config.drain_s)
                    # Answered by GOODBYE once every one-way call before it is done.
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
