"""The client: names to calls, calls to one of two paths.

A call goes local when all of this holds: the fast path is on, this process has a live worker registered under the
address, the method is declared non-blocking and fits the call mode, and nothing that this client sent over the socket
is still unanswered. Otherwise it goes remote and the reason is counted. The choice is made once per call, before
anything ran, and never revised.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Final

from rpc_local_registry import _asyncio as aio
from rpc_local_registry import _nvtx, _registry
from rpc_local_registry import _wire as wire
from rpc_local_registry._codec import TypedDecoder, encode
from rpc_local_registry._config import RpcConfig, check_key
from rpc_local_registry._engine import (
    AsyncPending,
    BlockingPending,
    Engine,
    FuturePending,
    Pending,
    RpcFuture,
    StreamPending,
    again,
)
from rpc_local_registry._errors import (
    RpcCancelled,
    RpcClosed,
    RpcError,
    RpcMethodNotFound,
    RpcServerStopped,
    RpcStreamingError,
    RpcTimeout,
    cause_table,
    describe,
    rebuild,
)
from rpc_local_registry._methods import ASYNC, ASYNC_GENERATOR, GENERATOR, PUSH, SYNC, MethodSpec, methods_of
from rpc_local_registry._streams import _EMPTY, Inbox, StreamSource
from rpc_local_registry._zmq import check_address

#: Why a call that could have gone local did not; each is a counter.
FALLBACK_REASONS: Final = ("no_local_worker", "blocking_method", "remote_in_flight", "unknown_method", "call_mode")
_ANY: Final = TypedDecoder(Any)
_clients: weakref.WeakSet[Core] = weakref.WeakSet()


@dataclasses.dataclass(frozen=True)
class ClientStatistics:
    """What a client did so far. Counts, unless a unit is named."""

    local_calls: int
    remote_calls: int
    fallbacks: Mapping[str, int]
    pending: int
    pending_high_water: int
    oneway_sent: int
    oneway_done: int
    oneway_failed: int
    late_answers: int
    refused: Mapping[str, int]
    sent_bytes: int
    received_bytes: int
    sessions: int


def _value_of(counter: Any) -> int:
    """Value of an ``itertools.count``: incremented atomically by ``next``, read through its text."""
    return int(repr(counter)[6:-1])


class Core:
    """What a client's handles share. Not public."""

    def __init__(
        self,
        address: str,
        key: bytes,
        config: RpcConfig,
        fast_path: bool,
        interface: Mapping[str, MethodSpec] | None,
        name: str,
        on_lost: Callable[[RpcError], None] | None,
    ) -> None:
        self.address = address
        self.config = config
        self.fast_path = fast_path
        self.interface = interface
        self.causes = cause_table(config.exceptions)
        self.engine: Engine | None = None
        self.closed = False
        self.local_calls = itertools.count()
        self.remote_calls = itertools.count()
        self.fallbacks = {reason: itertools.count() for reason in FALLBACK_REASONS}
        self.sessions = 0
        self._key = key
        self._name = name
        self._on_lost = on_lost
        self._lock = threading.Lock()
        _clients.add(self)

    def live_engine(self) -> Engine:
        """The engine, started when there is none or when the last one never got a session."""
        engine = self.engine
        if engine is not None and engine.failure is None:
            return engine
        with self._lock:
            if self.closed:
                raise RpcClosed(f"client of {self.address} was closed")
            engine = self.engine
            if engine is not None and (engine.failure is None or engine.was_open):
                return engine
            engine = Engine(self.address, self._key, self.config, self._name, self.causes, self._on_lost)
            self.sessions += 1
            engine.start()
            self.engine = engine
            return engine

    def reset(self) -> None:
        """Leave a lost session behind."""
        with self._lock:
            engine, self.engine = self.engine, None
        if engine is not None:
            engine.close()

    def close(self) -> None:
        """End for good."""
        with self._lock:
            self.closed = True
            engine = self.engine
        if engine is not None:
            engine.close()

    def after_fork_in_child(self) -> None:
        """The parent's socket and thread stay the parent's; this process opens its own when it needs one."""
        self._lock = threading.Lock()
        self.engine = None

    def local_target(self, name: str, kinds: tuple[str, ...]) -> tuple[_registry.Entry, MethodSpec, object] | None:
        """(entry, method, worker) when the call goes local; else None, with the reason counted."""
        entry = _registry.entries.get(self.address)
        worker = None if entry is None else entry.reference()
        if entry is None or worker is None:
            next(self.fallbacks["no_local_worker"])
            return None
        spec = entry.specs.get(name)
        if spec is None:
            next(self.fallbacks["unknown_method"])
            return None
        if not spec.non_blocking:
            next(self.fallbacks["blocking_method"])
            return None
        if spec.kind not in kinds:
            next(self.fallbacks["call_mode"])
            return None
        engine = self.engine
        if engine is not None and engine.failure is None and engine.busy:
            next(self.fallbacks["remote_in_flight"])
            return None
        next(self.local_calls)
        return entry, spec, worker

    def local_error(self, spec: MethodSpec, call: Call, error: BaseException) -> RpcError:
        """What the remote path would have raised for a handler's exception."""
        if isinstance(error, TypeError):
            try:
                spec.bind(call.args, call.keywords)
            except RpcError as mismatch:
                return mismatch
        if isinstance(error, RpcError):
            return again(error) if type(error).__init__ is Exception.__init__ else rebuild(describe(error), self.causes)
        return rebuild(describe(error), self.causes)


def _after_fork_in_child() -> None:
    for core in list(_clients):
        core.after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)


class Method:
    """``client.name``: call it to get a ``Call``."""

    __slots__ = ("_call_type", "core", "decoder", "name", "wire_name")

    def __init__(self, core: Core, name: str) -> None:
        self.core = core
        self.name = name
        self.wire_name = name.encode("utf-8", "replace")
        spec = None if core.interface is None else core.interface.get(name)
        if core.interface is not None and spec is None:
            raise RpcMethodNotFound(f"{name!r} is not a method of the interface: {', '.join(core.interface) or 'none'}")
        self.decoder = _ANY if spec is None else spec.result
        self._call_type: type[Call] = WarningCall if core.config.warn_unused_calls else Call

    def __call__(self, *args: Any, **keywords: Any) -> Call:
        return self._call_type(self, args, keywords)

    def __repr__(self) -> str:
        return f"<rpc method {self.name} at {self.core.address}>"


class Call:
    """A call that was prepared and not yet made; make it once, with one of the ``remote…`` verbs.

    Every verb takes ``timeout_s``: the time from now to the outcome, on the monotonic clock; None for the client's
    default. The arguments are handed over: change none of them afterwards.
    """

    __slots__ = ("_method", "args", "keywords")

    def __init__(self, method: Method, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._method = method
        self.args = args
        self.keywords = keywords

    # ---- verbs

    def remote(self, timeout_s: float | None = None) -> Any:
        """Call and wait; blocks this thread (inside a coroutine use ``remote_async``).

        Raises:
            RpcRemoteError: The handler raised.
            RpcTimeout: The deadline passed.
            RpcError: Any of the table in the README.
        """
        method = self._method
        core = method.core
        if core.fast_path:
            # Written out rather than shared: this is the path that must cost next to nothing.
            entry = _registry.entries.get(core.address)
            if entry is not None and (timeout_s is None or timeout_s > 0) and not _nvtx.enabled:
                function = entry.direct.get(method.name)
                engine = core.engine
                if function is not None and (engine is None or not engine.busy or engine.failure is not None):
                    worker = entry.reference()
                    if worker is not None:
                        next(core.local_calls)
                        try:
                            result = function(worker, *self.args, **self.keywords)
                        except Exception as error:
                            raise core.local_error(entry.specs[method.name], self, error) from error
                        if entry.closed:
                            raise RpcServerStopped(f"{core.address} stopped")
                        return result
            target = core.local_target(method.name, (SYNC,))
            if target is not None:
                return self._run_local(target, timeout_s)
        timeout_s = self._timeout(timeout_s)
        pending = BlockingPending(method.decoder, method.name)
        handle = _nvtx.push(method.name, "remote") if _nvtx.enabled else None
        try:
            engine = core.live_engine()
            call_id = self._submit(engine, wire.CALL, pending, timeout_s, timed=False)
            try:
                if not pending.gate.acquire(timeout=-1.0 if timeout_s is None else timeout_s):
                    if engine.abandon(call_id):
                        raise RpcTimeout(f"{method.name} after {timeout_s} s: timed out")
                    pending.gate.acquire()
            except BaseException:
                # KeyboardInterrupt lands here; the server hears that nobody waits any more.
                engine.abandon(call_id)
                raise
        finally:
            if handle is not None:
                _nvtx.pop(handle)
        if pending.error is not None:
            raise pending.error
        return pending.value

    async def remote_async(self, timeout_s: float | None = None) -> Any:
        """Call and await. Cancelling the await cancels the call at the server. Same errors as ``remote``."""
        method = self._method
        core = method.core
        if core.fast_path:
            target = core.local_target(method.name, (SYNC, ASYNC))
            if target is not None:
                if target[1].kind == SYNC:
                    return self._run_local(target, timeout_s)
                return await self._await_local(target, timeout_s)
        timeout_s = self._timeout(timeout_s)
        pending = AsyncPending(method.decoder, method.name)
        engine = core.live_engine()
        call_id = self._submit(engine, wire.CALL, pending, timeout_s, timed=True)
        try:
            return await pending.future
        except aio.CancelledError:
            engine.abandon(call_id)
            raise

    def remote_future(self, timeout_s: float | None = None) -> Future[Any]:
        """Call and return a ``concurrent.futures.Future``; its ``cancel`` reaches the server.

        Callbacks of the future run on the client's I/O thread and must not block. On the local path the future is done.
        """
        method = self._method
        core = method.core
        if core.fast_path:
            target = core.local_target(method.name, (SYNC,))
            if target is not None:
                done = RpcFuture()
                try:
                    done.set_result(self._run_local(target, timeout_s))
                except RpcError as error:
                    done.set_exception(error)
                return done
        timeout_s = self._timeout(timeout_s)
        pending = FuturePending(method.decoder, method.name)
        engine = core.live_engine()
        call_id = self._submit(engine, wire.CALL, pending, timeout_s, timed=True)
        pending.future.abandon = lambda: engine.abandon(call_id)
        return pending.future

    def remote_oneway(self) -> None:
        """Call without an answer. One-way calls of one client run one after the other, in this order.

        Returns once the call is queued (remote) or done (local). A handler's exception is counted and logged at the
        server.

        Raises:
            RpcBackpressure: Too many are unacknowledged. Nothing was queued.
        """
        method = self._method
        core = method.core
        if core.fast_path:
            target = core.local_target(method.name, (SYNC,))
            if target is not None:
                try:
                    self._run_local(target, None)
                except RpcServerStopped:
                    raise
                except RpcError as error:
                    _registry.log_oneway_failure(core.address, method.name, error)
                return
        next(core.remote_calls)
        body, buffers, flags = self._encode()
        core.live_engine().submit(wire.ONEWAY, None, method.wire_name, body, buffers, flags, None, timed=False)

    def remote_streaming(self, timeout_s: float | None = None, item_timeout_s: float | None = None) -> RpcStream:
        """Call a streaming method; iterate with ``for`` or ``async for``.

        Args:
            timeout_s: Time from now to the end of the whole stream.
            item_timeout_s: Longest wait for one item. Both raise ``RpcTimeout`` and cancel the stream.
        """
        method = self._method
        core = method.core
        if core.fast_path:
            kinds: tuple[str, ...] = (GENERATOR, PUSH)
            if aio.running_loop() is not None:
                kinds = (GENERATOR, ASYNC_GENERATOR, PUSH)
            target = core.local_target(method.name, kinds)
            if target is not None:
                return self._stream_local(target, timeout_s, item_timeout_s)
        timeout_s = self._timeout(timeout_s)
        pending = StreamPending(method.decoder, method.name)
        engine = core.live_engine()
        self._submit(engine, wire.STREAM, pending, timeout_s, timed=True)
        return RemoteStream(engine, pending, item_timeout_s)

    # ---- shared

    def _timeout(self, timeout_s: float | None) -> float | None:
        if timeout_s is None:
            return self._method.core.config.call_timeout_s
        if timeout_s <= 0:
            raise RpcTimeout(f"{self._method.name}: the deadline had passed before the call")
        return timeout_s

    def _encode(self) -> tuple[bytes, Any, int]:
        if not self.keywords:
            body, buffers = encode(self.args)
            return body, buffers, 0
        body, buffers = encode((self.args, self.keywords))
        return body, buffers, wire.FLAG_KEYWORDS

    def _submit(self, engine: Engine, kind: int, pending: Pending, timeout_s: float | None, *, timed: bool) -> int:
        next(self._method.core.remote_calls)
        body, buffers, flags = self._encode()
        return engine.submit(kind, pending, self._method.wire_name, body, buffers, flags, timeout_s, timed=timed)

    def _run_local(self, target: tuple[_registry.Entry, MethodSpec, object], timeout_s: float | None) -> Any:
        entry, spec, worker = target
        self._timeout(timeout_s)
        handle = _nvtx.push(spec.name, "local") if _nvtx.enabled else None
        try:
            result = spec.function(worker, *self.args, **self.keywords)
        except Exception as error:
            raise self._method.core.local_error(spec, self, error) from error
        finally:
            if handle is not None:
                _nvtx.pop(handle)
        if entry.closed:
            raise RpcServerStopped(f"{entry.address} stopped")
        return result

    async def _await_local(self, target: tuple[_registry.Entry, MethodSpec, object], timeout_s: float | None) -> Any:
        entry, spec, worker = target
        core = self._method.core
        timeout_s = self._timeout(timeout_s)
        try:
            task = aio.ensure_future(spec.function(worker, *self.args, **self.keywords))
        except TypeError as error:
            raise core.local_error(spec, self, error) from error
        guard = LocalTask(aio.get_running_loop(), task)
        entry.attach(guard)
        if entry.closed:
            guard.end_stopped()
        try:
            done, _ = await aio.wait((task,), timeout=timeout_s)
        except aio.CancelledError:
            task.cancel()
            raise
        if not done:
            task.cancel()
            raise RpcTimeout(f"{spec.name} after {timeout_s} s: timed out")
        if guard.stopped or entry.closed:
            if not task.cancelled():
                task.exception()
            raise RpcServerStopped(f"{entry.address} stopped")
        if task.cancelled():
            raise RpcCancelled(f"{spec.name}: cancelled")
        failure = task.exception()
        if failure is not None:
            raise core.local_error(spec, self, failure) from failure
        return task.result()

    def _stream_local(
        self,
        target: tuple[_registry.Entry, MethodSpec, object],
        timeout_s: float | None,
        item_timeout_s: float | None,
    ) -> RpcStream:
        entry, spec, worker = target
        core = self._method.core
        timeout_s = self._timeout(timeout_s)
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            made = spec.function(worker, *self.args, **self.keywords)
            if spec.kind == PUSH and not isinstance(made, StreamSource):
                raise RpcStreamingError(f"{spec.name} returned {type(made).__qualname__}, not a StreamSource")
            stream: RpcStream
            if spec.kind == PUSH:
                stream = PushStream(core, made, deadline_s, item_timeout_s)
            else:
                stream = GeneratorStream(core, made, deadline_s, item_timeout_s)
        except Exception as error:
            raise core.local_error(spec, self, error) from error
        stream.text = spec.name
        entry.attach(stream)
        if entry.closed:
            stream.end_stopped()
        return stream


class WarningCall(Call):
    """A ``Call`` that complains when it was never made (``RpcConfig.warn_unused_calls``)."""

    __slots__ = ("_made",)

    def __init__(self, method: Method, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        super().__init__(method, args, keywords)
        self._made = False

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("remote"):
            self._made = True
        return super().__getattribute__(name)

    def __del__(self) -> None:
        if not self._made:
            warnings.warn(
                f"{self._method!r} was prepared and never called: add .remote()", RuntimeWarning, stacklevel=2
            )


class LocalTask:
    """A coroutine of the worker that runs on the caller's loop; ended when the worker leaves."""

    __slots__ = ("__weakref__", "_loop", "_task", "stopped")

    def __init__(self, loop: aio.AbstractEventLoop, task: aio.Future[Any]) -> None:
        self._loop = loop
        self._task = task
        self.stopped = False

    def end_stopped(self) -> None:
        """From any thread."""
        self.stopped = True
        try:
            self._loop.call_soon_threadsafe(self._task.cancel)
        except RuntimeError:
            if not self._loop.is_closed():
                raise


class RpcStream:
    """Items of a streaming call.

    One consumer, ``for`` or ``async for``; leave early with ``cancel`` or the context manager.
    """

    text = "stream"

    def __iter__(self) -> RpcStream:
        return self

    def __aiter__(self) -> RpcStream:
        return self

    def __next__(self) -> Any:
        raise NotImplementedError

    async def __anext__(self) -> Any:
        raise NotImplementedError

    def cancel(self) -> None:
        """Leave: the producer stops, unread items are dropped. Idempotent; harmless after the end."""
        raise NotImplementedError

    def end_stopped(self) -> None:
        """The worker left (local streams)."""

    def __enter__(self) -> RpcStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    async def __aenter__(self) -> RpcStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class RemoteStream(RpcStream):
    """A stream over the socket."""

    def __init__(self, engine: Engine, pending: StreamPending, item_timeout_s: float | None) -> None:
        self._engine = engine
        self._pending = pending
        self._inbox: Inbox[Any] = pending.inbox
        self._item_timeout_s = item_timeout_s
        self._taken = 0
        self._grant = max(1, engine.config.stream_credit // 2)
        self.text = pending.text

    def _took(self, item: Any) -> Any:
        self._taken += 1
        if self._taken >= self._grant:
            if not self._inbox.closed:
                self._engine.control(wire.CREDIT, self._pending.call_id, self._taken)
            self._taken = 0
        return item

    def _ended(self, stop: type[Exception]) -> Exception:
        error = self._inbox.error
        if error is None:
            return stop()
        # Told once; afterwards the stream is simply over.
        self._inbox.error = None
        return error if isinstance(error, Exception) else RpcError(str(error))

    def __next__(self) -> Any:
        try:
            item = self._inbox.get(self._item_timeout_s)
        except RpcTimeout:
            self.cancel()
            raise
        if item is _EMPTY:
            raise self._ended(StopIteration)
        return self._took(item)

    async def __anext__(self) -> Any:
        try:
            item = await self._inbox.get_async(self._item_timeout_s)
        except (RpcTimeout, aio.CancelledError):
            self.cancel()
            raise
        if item is _EMPTY:
            raise self._ended(StopAsyncIteration)
        return self._took(item)

    def cancel(self) -> None:
        self._engine.abandon(self._pending.call_id)
        self._inbox.close(discard=True)

    def __del__(self) -> None:
        if not self._inbox.closed:
            self.cancel()


class _LocalStream(RpcStream):
    """Shared by the two kinds of local stream: deadlines, the worker's end, errors."""

    def __init__(self, core: Core, deadline_s: float | None, item_timeout_s: float | None) -> None:
        self._core = core
        self._deadline_s = deadline_s
        self._item_timeout_s = item_timeout_s
        self._over = False
        self._stopped = False

    def _error(self, error: BaseException) -> RpcError:
        return error if isinstance(error, RpcError) else rebuild(describe(error), self._core.causes)

    def _wait_s(self) -> float | None:
        if self._deadline_s is None:
            return self._item_timeout_s
        left_s = max(0.0, self._deadline_s - time.monotonic())
        return left_s if self._item_timeout_s is None else min(left_s, self._item_timeout_s)

    def _check(self, stop: type[Exception]) -> None:
        if self._stopped:
            self._stopped = False
            self._over = True
            raise RpcServerStopped(f"{self._core.address} stopped")
        if self._over:
            raise stop
        if self._deadline_s is not None and time.monotonic() >= self._deadline_s:
            self.cancel()
            raise RpcTimeout(f"{self.text}: timed out")


class PushStream(_LocalStream):
    """A worker's ``StreamSource``, read directly: what was pushed is what comes out."""

    def __init__(
        self, core: Core, source: StreamSource[Any], deadline_s: float | None, item_timeout_s: float | None
    ) -> None:
        super().__init__(core, deadline_s, item_timeout_s)
        self._source = source
        self._inbox = source._take()

    def _ended(self, stop: type[Exception]) -> Exception:
        self._over = True
        error, self._inbox.error = self._inbox.error, None
        if self._stopped:
            self._stopped = False
            return RpcServerStopped(f"{self._core.address} stopped")
        return stop() if error is None else self._error(error)

    def __next__(self) -> Any:
        item = self._inbox.take_nowait()
        if item is not _EMPTY:
            return item
        self._check(StopIteration)
        try:
            item = self._inbox.get(self._wait_s())
        except RpcTimeout:
            self.cancel()
            raise
        if item is _EMPTY:
            raise self._ended(StopIteration)
        return item

    async def __anext__(self) -> Any:
        item = self._inbox.take_nowait()
        if item is not _EMPTY:
            return item
        self._check(StopAsyncIteration)
        try:
            item = await self._inbox.get_async(self._wait_s())
        except (RpcTimeout, aio.CancelledError):
            self.cancel()
            raise
        if item is _EMPTY:
            raise self._ended(StopAsyncIteration)
        return item

    def cancel(self) -> None:
        self._over = True
        self._source._cancel()

    def end_stopped(self) -> None:
        self._stopped = True
        self._inbox.close()

    def __del__(self) -> None:
        if not self._over:
            self.cancel()


class GeneratorStream(_LocalStream):
    """A worker's generator, advanced directly by its consumer."""

    def __init__(self, core: Core, generator: Any, deadline_s: float | None, item_timeout_s: float | None) -> None:
        super().__init__(core, deadline_s, item_timeout_s)
        self._generator = generator
        self._loop = aio.running_loop()

    def _advance(self, stop: type[Exception]) -> Any:
        self._check(stop)
        try:
            item = next(self._generator)
        except StopIteration:
            self._over = True
            raise stop from None
        except Exception as error:
            self._over = True
            raise self._error(error) from error
        if self._stopped:
            self.cancel()
            self._check(stop)
        return item

    def __next__(self) -> Any:
        if hasattr(self._generator, "__anext__"):
            raise RpcStreamingError(f"{self.text} is an async generator: use 'async for'")
        return self._advance(StopIteration)

    async def __anext__(self) -> Any:
        if not hasattr(self._generator, "__anext__"):
            return self._advance(StopAsyncIteration)
        self._check(StopAsyncIteration)
        try:
            async with aio.timeout(self._wait_s()):
                item = await anext(self._generator)
        except StopAsyncIteration:
            self._over = True
            raise
        except TimeoutError:
            self.cancel()
            raise RpcTimeout(f"{self.text}: timed out") from None
        except aio.CancelledError:
            self.cancel()
            raise
        except Exception as error:
            self._over = True
            raise self._error(error) from error
        if self._stopped:
            self.cancel()
            self._check(StopAsyncIteration)
        return item

    def cancel(self) -> None:
        if self._over:
            return
        self._over = True
        if hasattr(self._generator, "close"):
            self._generator.close()
        elif self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_close_soon, self._loop, self._generator)

    def end_stopped(self) -> None:
        self._stopped = True


def _close_soon(loop: aio.AbstractEventLoop, generator: Any) -> None:
    task = loop.create_task(generator.aclose())
    # The loop keeps only a weak reference.
    _closing.add(task)
    task.add_done_callback(_closing.discard)


_closing: set[aio.Task[None]] = set()


class RpcClient:
    """Calls the methods of one worker: ``client.method(*args).remote()`` and its sisters.

    Construction does no I/O; the socket and its one thread start with the first call that needs them, ``start`` or
    ``with``. Thread-safe, and usable from any number of event loops. In a forked child the client is as new.

    Args:
        address: The server's ``address``.
        key: The shared key, at least 32 bytes.
        config: Bounds and times.
        fast_path: Take the local path when possible; None for ``config.local_fast_path``.
        interface: The worker's class (or one with the same declared methods): names are checked at once and results
            decoded to their annotated types. Without it results are built-ins and arrays.
        name: Shown to the server's ``on_peer_lost``.
        on_lost: Called once when an open session ends, on the I/O thread; must not block.

    Raises:
        RpcConfigError, RpcAddressError: Wrong key, settings or address.
    """

    def __init__(
        self,
        address: str,
        key: bytes,
        *,
        config: RpcConfig | None = None,
        fast_path: bool | None = None,
        interface: type | None = None,
        name: str = "",
        on_lost: Callable[[RpcError], None] | None = None,
    ) -> None:
        config = config or RpcConfig()
        self._core = Core(
            check_address(address, bind=False),
            check_key(key),
            config,
            config.local_fast_path if fast_path is None else fast_path,
            None if interface is None else methods_of(interface),
            name,
            on_lost,
        )
        self._finalizer = weakref.finalize(self, Core.close, self._core)
        self._finalizer.atexit = False

    def __getattr__(self, name: str) -> Method:
        if name.startswith("_"):
            raise AttributeError(name)
        method = Method(self._core, name)
        # Found as a plain attribute from now on.
        self.__dict__[name] = method
        return method

    def method(self, name: str) -> Method:
        """The method called ``name``."""
        return Method(self._core, name)

    @property
    def address(self) -> str:
        """Where the calls go."""
        return self._core.address

    def path_of(self, name: str) -> str:
        """``"local"`` or ``"remote"``: where a call of ``name`` would go now. Counts nothing."""
        core = self._core
        entry = _registry.entries.get(core.address) if core.fast_path else None
        spec = None if entry is None or entry.reference() is None else entry.specs.get(name)
        engine = core.engine
        busy = engine is not None and engine.failure is None and engine.busy
        return "local" if spec is not None and spec.non_blocking and not busy else "remote"

    def start(self) -> RpcClient:
        """Open the session now and wait for it.

        Raises:
            RpcUnreachable, RpcAuthenticationError, RpcProtocolMismatch: Within ``handshake_timeout_s``.
        """
        self._core.live_engine().wait_open()
        return self

    def reconnect(self) -> None:
        """Leave a lost session behind: the next call opens a new one.

        What was pending has failed and is not repeated.
        """
        self._core.reset()

    def close(self) -> None:
        """End in milliseconds: pending calls fail with ``RpcClosed``, one-way calls are flushed first. Idempotent."""
        self._core.close()

    def statistics(self) -> ClientStatistics:
        """Counters so far; those of sessions, bytes and pending calls belong to the current session."""
        core = self._core
        engine = core.engine
        return ClientStatistics(
            local_calls=_value_of(core.local_calls),
            remote_calls=_value_of(core.remote_calls),
            fallbacks={reason: _value_of(counter) for reason, counter in core.fallbacks.items()},
            pending=0 if engine is None else len(engine.pending),
            pending_high_water=0 if engine is None else engine.pending_high_water,
            oneway_sent=0 if engine is None else engine.oneway_sent,
            oneway_done=0 if engine is None else engine.oneway_done,
            oneway_failed=0 if engine is None else engine.oneway_failed,
            late_answers=0 if engine is None else engine.late_answers,
            refused={} if engine is None else dict(engine.refused),
            sent_bytes=0 if engine is None else engine.bytes_sent,
            received_bytes=0 if engine is None else engine.bytes_received,
            sessions=core.sessions,
        )

    def __enter__(self) -> RpcClient:
        return self if self._core.fast_path and _registry.entries.get(self._core.address) is not None else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        engine = self._core.engine
        state = "idle" if engine is None else "lost" if engine.failure else "open" if engine.was_open else "connecting"
        return f"<RpcClient {self.address} {state}>"
