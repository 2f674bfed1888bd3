"""Calls: a method's name, a call that was prepared, and the verbs that make it."""

from __future__ import annotations

import time
import warnings
from concurrent.futures import Future
from typing import Any, Final, Generic, Protocol, TypeVar

from rpc_local_registry import _asyncio as aio
from rpc_local_registry import _nvtx, _registry
from rpc_local_registry import _wire as wire
from rpc_local_registry._codec import TypedDecoder, encode
from rpc_local_registry._config import check_method_name, check_timeout
from rpc_local_registry._consumers import FailedStream, GeneratorStream, PushStream, RemoteStream, RpcStream
from rpc_local_registry._core import Handle, Target
from rpc_local_registry._engine import (
    AsyncPending,
    BlockingPending,
    Engine,
    FuturePending,
    Pending,
    RpcFuture,
    StreamPending,
)
from rpc_local_registry._errors import RpcError, RpcMethodNotFound, RpcTimeout, again
from rpc_local_registry._methods import ASYNC, ASYNC_GENERATOR, GENERATOR, PUSH, SYNC, MethodSpec
from rpc_local_registry._streams import take_source

_R = TypeVar("_R")
_T = TypeVar("_T")
_ANY: Final = TypedDecoder(Any)
_ENDS_ITSELF: Final = (KeyboardInterrupt, GeneratorExit)


class Method:
    """``client.name``: call it to get a ``Call``."""

    __slots__ = ("_call_type", "core", "decoder", "handle", "inline_bytes_max", "name", "wire_name")

    def __init__(self, handle: Handle, name: str) -> None:
        core = handle.core
        spec = None if core.interface is None else core.interface.get(name)
        if core.interface is not None and spec is None:
            raise RpcMethodNotFound(
                f"{name!r:.80} is not a method of the interface: {', '.join(core.interface) or 'none'}"
            )
        self.handle = handle
        self.core = core
        self.name = check_method_name(name)
        self.wire_name = name.encode("ascii")
        self.decoder = _ANY if spec is None else spec.result
        self.inline_bytes_max = core.config.inline_bytes_max
        self._call_type: type[Call[Any]] = WarningCall if core.config.warn_unused_calls else Call

    def __call__(self, *args: Any, **keywords: Any) -> Call[Any]:
        return self._call_type(self, args, keywords)

    def __repr__(self) -> str:
        return f"<rpc method {self.name} at {self.core.address}>"


class StreamCall(Protocol[_T]):
    """A prepared call of a streaming method, as type checkers see it."""

    def remote_streaming(self, timeout_s: float | None = None, item_timeout_s: float | None = None) -> RpcStream[_T]:
        """See ``Call.remote_streaming``."""


class Call(Generic[_R]):
    """A call that was prepared and not yet made; make it once, with one of the ``remote…`` verbs.

    Every verb takes ``timeout_s``: the time from now to the outcome, on the monotonic clock; None for the client's
    default. Over the socket the call owns its bytes when the verb returns (but for lent memory, see ``Loan``); on the local
    path the worker gets the very objects.
    """

    __slots__ = ("_method", "args", "keywords")

    def __init__(self, method: Method, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._method = method
        self.args = args
        self.keywords = keywords

    # ---- verbs

    def remote(self, timeout_s: float | None = None) -> _R:
        """Call and wait; blocks this thread (inside a coroutine use ``remote_async``).

        Raises:
            RpcRemoteError: The handler raised.
            RpcTimeout: The deadline passed.
            RpcUsageError: In a callback on the client's I/O thread. Nothing was sent.
            RpcError: Any of the table in the README.
        """
        method = self._method
        core = method.core
        if core.fast_path:
            # Written out rather than shared: this is the path that must cost next to nothing.
            entry = core.local
            if entry is not None and timeout_s is None and core.failure is None and not _nvtx.enabled:
                function = entry.direct.get(method.name)
                engine = core.engine
                if function is not None and (engine is None or not engine.busy):
                    worker = entry.reference()
                    if worker is not None:
                        next(core.local_calls)
                        try:
                            result: _R = function(worker, *self.args, **self.keywords)
                        except _ENDS_ITSELF:
                            raise
                        except BaseException as error:
                            raise self._error(entry.specs[method.name], error) from error
                        if core.failure is not None:
                            raise again(core.failure)
                        return result
            target = core.local_target(method.name, (SYNC,))
            if target is not None:
                return self._run_local(target, timeout_s)  # type: ignore[no-any-return]
        timeout_s = self._timeout(timeout_s)
        pending = BlockingPending(method.decoder, method.name)
        handle = _nvtx.push(method.name, "remote") if _nvtx.enabled else None
        try:
            engine = core.live_engine()
            next(core.remote_calls)
            payload, flags = self._encode()
            engine.call(pending, payload, flags, timeout_s)
        finally:
            if handle is not None:
                _nvtx.pop(handle)
        if pending.error is not None:
            # Its traceback holds this frame: held from here as well it would live until a collection.
            failure, pending.error = pending.error, None
            try:
                raise failure
            finally:
                del failure
        value: _R = pending.value
        return value

    async def remote_async(self, timeout_s: float | None = None) -> _R:
        """Call and await. Cancelling the await cancels the call at the server. Same errors as ``remote``."""
        method = self._method
        core = method.core
        if core.fast_path:
            target = core.local_target(method.name, (SYNC, ASYNC))
            if target is not None:
                if target[1].kind == SYNC:
                    return self._run_local(target, timeout_s)  # type: ignore[no-any-return]
                return await self._await_local(target, timeout_s)  # type: ignore[no-any-return]
        timeout_s = self._timeout(timeout_s)
        pending = AsyncPending(method.decoder, method.name)
        engine = core.live_engine()
        try:
            self._submit(engine, wire.CALL, pending, timeout_s)
            value: _R = await pending.future
        except BaseException:
            # A cancellation or an interrupt; with the call's own error there is nothing left to abandon.
            engine.abandon(pending.call_id)
            raise
        return value

    def remote_future(self, timeout_s: float | None = None) -> Future[_R]:
        """Call and return a ``concurrent.futures.Future``; its ``cancel`` reaches the server.

        Callbacks of the future run on the client's I/O thread and must not block: what waits there for another future's outcome
        is refused. On the local path the future is done.
        """
        method = self._method
        core = method.core
        if core.fast_path:
            target = core.local_target(method.name, (SYNC,))
            if target is not None:
                limit_s = self._timeout(timeout_s)
                done: RpcFuture[_R] = RpcFuture()
                try:
                    done.set_result(self._run_local(target, limit_s))
                except RpcError as error:
                    done.set_exception(error)
                return done
        timeout_s = self._timeout(timeout_s)
        pending = FuturePending(method.decoder, method.name)
        engine = core.live_engine()
        pending.future.anchor = method.handle
        pending.future.brought_here = engine.on_own_thread
        pending.future.abandon = lambda: engine.abandon(pending.call_id)
        try:
            self._submit(engine, wire.CALL, pending, timeout_s)
            return pending.future
        except BaseException:
            engine.abandon(pending.call_id)
            raise

    def remote_oneway(self) -> None:
        """Call without an answer. One-way calls of one client run one after the other, in this order.

        Returns once the call is queued (remote) or done (local). A handler's exception is counted at both ends and logged at
        the server; a call that was lost with its session is counted and logged here.

        Raises:
            RpcBackpressure: Too many are unacknowledged. Nothing was queued.
        """
        method = self._method
        core = method.core
        if core.fast_path:
            target = core.local_target(method.name, (SYNC,))
            if target is not None:
                self._run_local_oneway(target)
                return
        next(core.remote_calls)
        payload, flags = self._encode()
        core.live_engine().submit(wire.ONEWAY, None, payload, flags, None, timed=False)

    def remote_streaming(self, timeout_s: float | None = None, item_timeout_s: float | None = None) -> RpcStream[Any]:
        """Call a streaming method; iterate with ``for`` or ``async for``. Errors of the call come with the first item.

        Args:
            timeout_s: Time from now to the end of the whole stream.
            item_timeout_s: Longest wait for one item. Both raise ``RpcTimeout`` and cancel the stream.
        """
        method = self._method
        core = method.core
        item_timeout_s = check_timeout("item_timeout_s", item_timeout_s, method.name)
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
        try:
            self._submit(engine, wire.STREAM, pending, timeout_s)
            return RemoteStream(engine, pending, item_timeout_s, method.handle)
        except BaseException:
            engine.abandon(pending.call_id)
            raise

    # ---- shared

    def _timeout(self, timeout_s: float | None) -> float | None:
        if timeout_s is None:
            return self._method.core.config.call_timeout_s
        return check_timeout("timeout_s", timeout_s, self._method.name)

    def _encode(self) -> tuple[wire.Payload, int]:
        method = self._method
        if not self.keywords:
            body, buffers = encode(self.args)
            return wire.prepare(method.wire_name, body, buffers, method.inline_bytes_max), 0
        body, buffers = encode((self.args, self.keywords))
        return wire.prepare(method.wire_name, body, buffers, method.inline_bytes_max), wire.FLAG_KEYWORDS

    def _submit(self, engine: Engine, kind: int, pending: Pending, timeout_s: float | None) -> None:
        next(self._method.core.remote_calls)
        payload, flags = self._encode()
        engine.submit(kind, pending, payload, flags, timeout_s, timed=True)

    # ---- the local path

    def _error(self, spec: MethodSpec, error: BaseException) -> RpcError:
        return self._method.core.handler_error(spec, self.args, self.keywords, error)

    def _run_local(self, target: Target, timeout_s: float | None) -> Any:
        _, spec, worker = target
        core = self._method.core
        self._timeout(timeout_s)
        handle = _nvtx.push(spec.name, "local") if _nvtx.enabled else None
        try:
            result = spec.function(worker, *self.args, **self.keywords)
        except _ENDS_ITSELF:
            raise
        except BaseException as error:
            raise self._error(spec, error) from error
        finally:
            if handle is not None:
                _nvtx.pop(handle)
        if core.failure is not None:
            raise again(core.failure)
        return result

    def _run_local_oneway(self, target: Target) -> None:
        _, spec, worker = target
        core = self._method.core
        next(core.local_oneways)
        try:
            spec.function(worker, *self.args, **self.keywords)
        except _ENDS_ITSELF:
            raise
        except BaseException as error:  # noqa: BLE001 - a one-way call has nobody to raise to
            next(core.local_oneways_failed)
            _registry.log_oneway_failure(core.address, spec.name, self._error(spec, error))

    async def _await_local(self, target: Target, timeout_s: float | None) -> Any:
        entry, spec, worker = target
        core = self._method.core
        timeout_s = self._timeout(timeout_s)
        try:
            task = aio.ensure_future(_caught(spec.function(worker, *self.args, **self.keywords)))
        except TypeError as error:
            raise self._error(spec, error) from error
        guard = LocalTask(aio.get_running_loop(), task)
        core.attach(entry, guard)
        try:
            done, _ = await aio.wait((task,), timeout=timeout_s)
        except aio.CancelledError:
            task.cancel()
            raise
        if not done:
            task.cancel()
            raise RpcTimeout(f"{spec.name} after {timeout_s} s: timed out")
        value: Any = None
        failure: BaseException | None
        if task.cancelled():
            failure = aio.CancelledError(f"{spec.name}: cancelled")
        else:
            value, failure = task.result()
        if guard.ended_by is not None:
            raise again(guard.ended_by)
        if failure is not None:
            raise self._error(spec, failure) from failure
        return value

    def _stream_local(self, target: Target, timeout_s: float | None, item_timeout_s: float | None) -> RpcStream[Any]:
        entry, spec, worker = target
        core, handle = self._method.core, self._method.handle
        timeout_s = self._timeout(timeout_s)
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        stream: PushStream | GeneratorStream
        try:
            made = spec.function(worker, *self.args, **self.keywords)
        except _ENDS_ITSELF:
            raise
        except BaseException as error:  # noqa: BLE001 - told with the first item, as over the socket
            return FailedStream(handle, spec.name, self._error(spec, error))
        if spec.kind == PUSH:
            try:
                inbox = take_source(spec.name, made)
            except RpcError as error:
                return FailedStream(handle, spec.name, error)
            stream = PushStream(handle, spec.name, made, inbox, deadline_s, item_timeout_s)
        else:
            stream = GeneratorStream(handle, spec.name, made, deadline_s, item_timeout_s)
        core.attach(entry, stream)
        return stream


async def _caught(awaitable: Any) -> tuple[Any, BaseException | None]:
    """(value, exception) of a worker's coroutine; its SystemExit must not end the caller's event loop."""
    try:
        return await awaitable, None
    except (aio.CancelledError, *_ENDS_ITSELF):
        raise
    except BaseException as error:  # noqa: BLE001 - becomes the call's error
        return None, error


class WarningCall(Call[Any]):
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
    """A coroutine of the worker that runs on the caller's loop; ended when the worker or the client leaves."""

    __slots__ = ("__weakref__", "_loop", "_task", "ended_by")

    def __init__(self, loop: aio.AbstractEventLoop, task: aio.Future[Any]) -> None:
        self._loop = loop
        self._task = task
        self.ended_by: RpcError | None = None

    def end_with(self, error: RpcError) -> None:
        """From any thread."""
        self.ended_by = error
        aio.call_on(self._loop, self._task.cancel)
