"""Public test helpers: a conformance suite for both paths, a guard for the hand-off rule, raw peers, leak counting.

The conformance checks need no test framework: each is a function of a ``Pair`` that raises ``AssertionError``. Run them
with ``run_conformance`` or parametrize over ``CONFORMANCE_CHECKS``.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final

import msgspec

from rpc_local_registry import _wire as wire
from rpc_local_registry._client import RpcClient
from rpc_local_registry._codec import encode
from rpc_local_registry._config import RpcConfig, new_key
from rpc_local_registry._engine import client_terms
from rpc_local_registry._errors import (
    RpcArgumentError,
    RpcCancelled,
    RpcError,
    RpcMethodNotFound,
    RpcRemoteError,
    RpcServerStopped,
    RpcStreamingError,
    RpcTimeout,
)
from rpc_local_registry._matrix import DIFFERENCES, OUTCOMES, PATHS, VERBS, matrix_table, run_cell, run_matrix
from rpc_local_registry._matrix import differences as matrix_differences
from rpc_local_registry._methods import rpc_method
from rpc_local_registry._server import RpcServer
from rpc_local_registry._session import ClientHandshake, ServerTerms, Session
from rpc_local_registry._streams import StreamSource
from rpc_local_registry._tickets import issue
from rpc_local_registry._zmq import READABLE, Link

#: No check waits longer for something that must happen.
PATIENCE_S: Final = 10.0


def eventually(condition: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    """Wait until a condition holds; AssertionError if it never does."""
    deadline_s = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"did not become true within {patience_s} s: {condition}")
        time.sleep(0.001)


# ---- the hand-off rule


class HandOffViolation(AssertionError):
    """An object was changed after it had been handed over."""


def fingerprint(value: Any) -> bytes:
    """Digest of everything that would travel: arrays by content, structs by fields."""
    body, buffers = encode(value)
    digest = hashlib.sha256(body)
    for buffer in buffers:
        digest.update(buffer)
    return digest.digest()


class HandOffGuard:
    """Remembers objects as they were handed over and tells whether anybody changed one since.

    The remote path copies, the local path shares; code that changes a request after the hand-off works on one and
    breaks on the other. A test hands its requests through ``give`` and ends with ``verify``. Arrays are also made
    read-only, so a write to one fails where it happens.
    """

    def __init__(self) -> None:
        self._given: list[tuple[Any, bytes]] = []

    def give(self, value: Any) -> Any:
        """Remember a value; returns it."""
        self._freeze_arrays(value)
        self._given.append((value, fingerprint(value)))
        return value

    def verify(self) -> None:
        """Compare everything given with what it was.

        Raises:
            HandOffViolation: Names the first that changed.
        """
        for value, before in self._given:
            if fingerprint(value) != before:
                raise HandOffViolation(f"changed after the hand-off: {value!r:.200}")

    def _freeze_arrays(self, value: Any) -> None:
        setflags = getattr(value, "setflags", None)
        if setflags is not None:
            setflags(write=False)
        elif isinstance(value, msgspec.Struct):
            for name in value.__struct_fields__:
                self._freeze_arrays(getattr(value, name))
        elif isinstance(value, (list, tuple)):
            for item in value:
                self._freeze_arrays(item)
        elif isinstance(value, dict):
            for item in value.values():
                self._freeze_arrays(item)


# ---- resources


@dataclasses.dataclass(frozen=True)
class Resources:
    """What this process holds."""

    descriptors: int
    threads: int


def resources() -> Resources:
    """Open file descriptors and live Python threads, now."""
    return Resources(len(os.listdir("/proc/self/fd")), threading.active_count())


# ---- raw peers


class RawPeer:
    """A bare DEALER: sends any frames and sees what comes back. For attacks and fuzzing.

    Args:
        key: Key of the ticket with which it gets through the server's gate; None for a stranger, who does not.
    """

    def __init__(self, address: str, config: RpcConfig | None = None, *, key: bytes | None = None) -> None:
        self.config = config or RpcConfig()
        ticket = None if key is None else issue(key, os.urandom(wire.NONCE_BYTES))
        self._link = Link.connect(address, self.config, ticket)

    def send(self, *frames: bytes | memoryview) -> None:
        """Send one message."""
        self._link.send(frames)

    def receive(self, timeout_s: float) -> list[bytes | memoryview] | None:
        """The next message, or None."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return None
            if self._link.poll(left_s) & READABLE:
                return self._link.receive(self.config.buffers_max + 1)

    def open_session(self, key: bytes, nonce: bytes | None = None) -> Session[ServerTerms]:
        """Do the client's handshake by hand."""
        handshake = ClientHandshake(
            key, os.urandom(wire.NONCE_BYTES) if nonce is None else nonce, "raw", client_terms(self.config)
        )
        self._link.send(handshake.hello())
        answer = self.receive(PATIENCE_S)
        if answer is None:
            raise AssertionError("no answer to the hello")
        return handshake.answer(answer)

    def close(self) -> None:
        """Release the socket."""
        self._link.close()

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ---- conformance


class Item(msgspec.Struct):
    """A request of the conformance worker."""

    item_id: int
    values: list[int] = []
    note: str = ""


class ConformanceError(Exception):
    """An exception of the worker's own."""


class ConformanceWorker:
    """Every call mode, all non-blocking, so that each can take either path."""

    def __init__(self) -> None:
        self.log: list[int] = []
        self.runs = 0
        self.sources: list[StreamSource[list[int]]] = []
        self.closed_generators = 0
        self.cancelled_tasks = 0
        self.gate = threading.Event()
        self.entered = threading.Event()

    @rpc_method(non_blocking=True)
    def add(self, left: int, right: int = 10) -> int:
        """Sum."""
        self.runs += 1
        return left + right

    @rpc_method(non_blocking=True)
    def swap(self, item: Item) -> Item:
        """A struct in, a struct out."""
        return Item(item.item_id + 1, list(reversed(item.values)), item.note.upper())

    @rpc_method(non_blocking=True)
    def mean(self, items: Iterator[Item]) -> list[int]:
        """A lazily decoded batch."""
        return [item.item_id for item in items]

    @rpc_method(non_blocking=True)
    def fail(self, message: str) -> None:
        """Raise a built-in exception."""
        self.runs += 1
        raise ValueError(message)

    @rpc_method(non_blocking=True)
    def fail_own(self) -> None:
        """Raise a class of one's own."""
        raise ConformanceError("own", 7)

    @rpc_method(non_blocking=True)
    def fail_type(self) -> None:
        """A TypeError of the handler's own, not of the call."""
        raise TypeError("inside")

    @rpc_method(non_blocking=True)
    def note(self, value: int) -> None:
        """Remember."""
        self.log.append(value)

    @rpc_method(non_blocking=True)
    def notes(self) -> list[int]:
        """What was remembered."""
        return list(self.log)

    @rpc_method(non_blocking=True)
    def hold(self) -> str:
        """Stay inside until the gate opens (breaks its promise, for the check of a shutdown in mid-call)."""
        self.entered.set()
        self.gate.wait(PATIENCE_S)
        return "held"

    @rpc_method(non_blocking=True)
    async def later(self, value: int) -> int:
        """A coroutine."""
        await asyncio.sleep(0)
        return value

    @rpc_method(non_blocking=True)
    async def never(self) -> None:
        """A coroutine that only a cancellation ends."""
        self.entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled_tasks += 1
            raise

    @rpc_method(non_blocking=True)
    async def give_up(self) -> None:
        """A coroutine that ends by cancellation."""
        raise asyncio.CancelledError

    @rpc_method(non_blocking=True)
    async def fail_later(self) -> None:
        """A coroutine that raises."""
        raise KeyError("later")

    @rpc_method(non_blocking=True, streaming=True)
    def count(self, stop: int) -> Iterator[int]:
        """A generator."""
        try:
            yield from range(stop)
        finally:
            self.closed_generators += 1

    @rpc_method(non_blocking=True, streaming=True)
    def count_fail(self, stop: int) -> Iterator[int | None]:
        """A generator with empty items, which then raises."""
        yield None
        yield from range(stop)
        raise ValueError("after items")

    @rpc_method(non_blocking=True, streaming=True)
    async def count_later(self, stop: int) -> AsyncIterator[int]:
        """An async generator."""
        for value in range(stop):
            await asyncio.sleep(0)
            yield value

    @rpc_method(non_blocking=True, streaming=True)
    def responses(self) -> StreamSource[list[int]]:
        """A push stream."""
        source: StreamSource[list[int]] = StreamSource()
        self.sources.append(source)
        return source


@dataclasses.dataclass
class Pair:
    """A served worker and a client of it on one path."""

    worker: ConformanceWorker
    server: RpcServer
    client: RpcClient
    local: bool


@contextlib.contextmanager
def open_pair(*, local: bool, address: str = "ipc://", config: RpcConfig | None = None) -> Iterator[Pair]:
    """A fresh pair; ``local`` turns the client's fast path on."""
    worker = ConformanceWorker()
    key = new_key()
    config = config or RpcConfig()
    with (
        RpcServer(worker, address, key, config=config) as server,
        RpcClient(server.address, key, config=config, fast_path=local, interface=ConformanceWorker) as client,
    ):
        yield Pair(worker, server, client, local)


def _raises(kind: type[RpcError], action: Callable[[], object]) -> RpcError:
    try:
        result = action()
    except RpcError as error:
        if type(error) is not kind:
            raise AssertionError(f"raised {error!r}, wanted {kind.__name__}") from error
        return error
    raise AssertionError(f"returned {result!r}, wanted {kind.__name__}")


def _equal(got: object, wanted: object) -> None:
    if got != wanted:
        raise AssertionError(f"got {got!r}, wanted {wanted!r}")


def check_results(pair: Pair) -> None:
    """Positional, keyword, default, struct, None and lazy arguments give equal results."""
    client = pair.client
    _equal(client.add(1, 2).remote(), 3)
    _equal(client.add(1).remote(), 11)
    _equal(client.add(right=5, left=1).remote(timeout_s=PATIENCE_S), 6)
    _equal(client.swap(Item(1, [1, 2], "x")).remote(), Item(2, [2, 1], "X"))
    _equal(client.mean([Item(3), Item(4)]).remote(), [3, 4])
    _equal(client.note(1).remote(), None)
    _equal(client.add(2, 2).remote_future().result(PATIENCE_S), 4)


def check_ran_once(pair: Pair) -> None:
    """However it ends, a call runs once."""
    pair.client.add(1, 1).remote()
    _raises(RpcRemoteError, lambda: pair.client.fail("x").remote())
    _equal(pair.worker.runs, 2)


def check_errors(pair: Pair) -> None:
    """The same exception type, name, message, cause and traceback text."""
    for error in (
        _raises(RpcRemoteError, lambda: pair.client.fail("told").remote()),
        pair.client.fail("told").remote_future().exception(PATIENCE_S),
    ):
        if not isinstance(error, RpcRemoteError):
            raise AssertionError(f"got {error!r}")
        _equal((error.type_name, error.message, type(error.cause)), ("ValueError", "told", ValueError))
        if "in fail" not in error.remote_traceback or "ValueError: told" not in error.remote_traceback:
            raise AssertionError(f"no traceback: {error.remote_traceback!r}")
    own = _raises(RpcRemoteError, lambda: pair.client.fail_own().remote())
    if not isinstance(own, RpcRemoteError) or own.cause is not None or not own.type_name.endswith("ConformanceError"):
        raise AssertionError(f"got {own!r} with {own.__dict__}")
    inside = _raises(RpcRemoteError, lambda: pair.client.fail_type().remote())
    _equal(getattr(inside, "message", None), "inside")


def check_argument_errors(pair: Pair) -> None:
    """A call that does not fit the signature is refused, and nothing runs."""
    _raises(RpcArgumentError, lambda: pair.client.add().remote())
    _raises(RpcArgumentError, lambda: pair.client.add(1, 2, 3).remote())
    _raises(RpcArgumentError, lambda: pair.client.add(1, wrong=2).remote())
    _equal(pair.worker.runs, 0)


def check_unknown_method(pair: Pair) -> None:
    """A name outside the interface is an error at once; a wrong verb is an error of the call."""
    _raises(RpcMethodNotFound, lambda: pair.client.log)
    _raises(RpcStreamingError, lambda: list(pair.client.add(1, 2).remote_streaming()))
    _raises(RpcStreamingError, lambda: pair.client.count(3).remote())


def check_deadline_on_entry(pair: Pair) -> None:
    """A deadline that has passed stops the call before it runs."""
    _raises(RpcTimeout, lambda: pair.client.add(1, 1).remote(timeout_s=0.0))
    _raises(RpcTimeout, lambda: pair.client.add(1, 1).remote(timeout_s=-1.0))
    _equal(pair.worker.runs, 0)


def check_oneway_order(pair: Pair) -> None:
    """One-way calls run in order, before a later call sees their effect; their failures disturb nobody."""
    for value in range(200):
        pair.client.note(value).remote_oneway()
    pair.client.fail("nobody hears this").remote_oneway()
    pair.client.note(200).remote_oneway()
    eventually(lambda: len(pair.worker.log) == 201)
    _equal(pair.client.notes().remote(), list(range(201)))


def check_streams(pair: Pair) -> None:
    """Generators deliver everything in order, empty items too, and their error after the items."""
    _equal(list(pair.client.count(300).remote_streaming()), list(range(300)))
    _equal(list(pair.client.count(0).remote_streaming()), [])
    stream = pair.client.count_fail(2).remote_streaming()
    _equal([next(stream), next(stream), next(stream)], [None, 0, 1])
    error = _raises(RpcRemoteError, lambda: next(stream))
    _equal(getattr(error, "message", None), "after items")
    _equal(list(stream), [])


def check_stream_abort(pair: Pair) -> None:
    """Leaving a generator early closes it at the worker."""
    with pair.client.count(10**9).remote_streaming() as stream:
        _equal([next(stream), next(stream)], [0, 1])
    eventually(lambda: pair.worker.closed_generators == 1)
    _equal(list(stream), [])


def check_push_stream(pair: Pair) -> None:
    """A worker's loop hands over once per step; the consumer gets every step in order, then the end."""
    stream = pair.client.responses().remote_streaming()
    eventually(lambda: pair.worker.sources)
    source = pair.worker.sources[0]

    def steps() -> None:
        for step in range(200):
            source.push([step, step])
        source.close()

    thread = threading.Thread(target=steps)
    thread.start()
    got = list(stream)
    thread.join()
    _equal(got, [[step, step] for step in range(200)])
    _equal(source.push([0]), False)


def check_push_error_and_abort(pair: Pair) -> None:
    """An error ends a push stream after its items; leaving tells the worker."""
    stream = pair.client.responses().remote_streaming()
    eventually(lambda: pair.worker.sources)
    pair.worker.sources[0].push([1])
    pair.worker.sources[0].close(ValueError("broken"))
    _equal(next(stream), [1])
    _equal(getattr(_raises(RpcRemoteError, lambda: next(stream)), "message", None), "broken")
    second = pair.client.responses().remote_streaming()
    eventually(lambda: len(pair.worker.sources) == 2)
    second.cancel()
    eventually(lambda: pair.worker.sources[1].cancelled)
    _equal(pair.worker.sources[1].push([1]), False)


def check_stream_timeout(pair: Pair) -> None:
    """A stream that stays silent is an RpcTimeout, and its producer is told."""
    stream = pair.client.responses().remote_streaming(item_timeout_s=0.05)
    eventually(lambda: pair.worker.sources)
    _raises(RpcTimeout, lambda: next(stream))
    eventually(lambda: pair.worker.sources[0].cancelled)
    whole = pair.client.responses().remote_streaming(timeout_s=0.05)
    _raises(RpcTimeout, lambda: next(whole))
    eventually(lambda: pair.worker.sources[1].cancelled)


def check_asyncio(pair: Pair) -> None:
    """The same from an event loop: plain methods, coroutines, their errors, cancellation, all kinds of streams."""

    async def run() -> None:
        client = pair.client
        _equal(await client.add(1, 2).remote_async(), 3)
        _equal(await asyncio.gather(*(client.later(n).remote_async() for n in range(20))), list(range(20)))
        _equal([n async for n in client.count(50).remote_streaming()], list(range(50)))
        _equal([n async for n in client.count_later(50).remote_streaming()], list(range(50)))
        try:
            await client.fail_later().remote_async()
        except RpcRemoteError as error:
            _equal((error.type_name, type(error.cause)), ("KeyError", KeyError))
        else:
            raise AssertionError("fail_later did not raise")
        try:
            await client.give_up().remote_async()
        except RpcCancelled:
            pass
        else:
            raise AssertionError("give_up did not raise")
        try:
            await client.never().remote_async(timeout_s=0.05)
        except RpcTimeout:
            pass
        else:
            raise AssertionError("never did not time out")
        pair.worker.entered.clear()
        task = asyncio.create_task(client.never().remote_async())
        while not pair.worker.entered.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        while pair.worker.cancelled_tasks < 2:
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


def check_hand_off(pair: Pair) -> None:
    """Neither side changes what was handed over."""
    guard = HandOffGuard()
    for number in range(10):
        pair.client.swap(guard.give(Item(number, [1, 2, 3]))).remote()
    pair.client.mean(guard.give([Item(1), Item(2)])).remote()
    guard.verify()


def check_shutdown_in_call(pair: Pair) -> None:
    """A worker that shuts down under a call gives RpcServerStopped, on both paths."""
    outcome: list[BaseException | str] = []

    def call() -> None:
        try:
            outcome.append(pair.client.hold().remote(timeout_s=PATIENCE_S))
        except RpcError as error:
            outcome.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    pair.worker.entered.wait(PATIENCE_S)
    stopper = threading.Thread(target=pair.server.shutdown)
    stopper.start()
    eventually(lambda: pair.server.stopping)
    pair.worker.gate.set()
    thread.join(PATIENCE_S)
    stopper.join(PATIENCE_S)
    _equal([type(item) for item in outcome], [RpcServerStopped])


def check_shutdown_under_stream(pair: Pair) -> None:
    """A worker that shuts down under an open stream ends it with RpcServerStopped, after what was delivered."""
    stream = pair.client.responses().remote_streaming()
    eventually(lambda: pair.worker.sources)
    pair.worker.sources[0].push([1])
    _equal(next(stream), [1])
    pair.server.shutdown()
    _raises(RpcServerStopped, lambda: next(stream))


def check_cancelled_future(pair: Pair) -> None:
    """A future of a finished call cannot be cancelled; one of a pending call can."""
    done = pair.client.add(1, 1).remote_future()
    _equal(done.result(PATIENCE_S), 2)
    _equal(done.cancel(), False)


#: Every check, by name.
CONFORMANCE_CHECKS: Final[dict[str, Callable[[Pair], None]]] = {
    check.__name__.removeprefix("check_"): check
    for check in (
        check_results, check_ran_once, check_errors, check_argument_errors, check_unknown_method,
        check_deadline_on_entry, check_oneway_order, check_streams, check_stream_abort, check_push_stream,
        check_push_error_and_abort, check_stream_timeout, check_asyncio, check_hand_off, check_shutdown_in_call,
        check_shutdown_under_stream, check_cancelled_future,
    )
}  # fmt: skip


def run_conformance(*, local: bool, address: str = "ipc://", config: RpcConfig | None = None) -> tuple[str, ...]:
    """Run every check on a fresh pair each; returns their names.

    Raises:
        AssertionError: From the first check that fails, with its name as a note.
    """
    for name, check in CONFORMANCE_CHECKS.items():
        with open_pair(local=local, address=address, config=config) as pair:
            try:
                check(pair)
            except AssertionError as error:
                error.add_note(f"conformance check {name}, {'local' if local else 'remote'} path")
                raise
    return tuple(CONFORMANCE_CHECKS)


__all__ = [
    "CONFORMANCE_CHECKS",
    "ConformanceError",
    "ConformanceWorker",
    "DIFFERENCES",
    "HandOffGuard",
    "HandOffViolation",
    "Item",
    "OUTCOMES",
    "PATHS",
    "Pair",
    "RawPeer",
    "Resources",
    "VERBS",
    "eventually",
    "fingerprint",
    "matrix_differences",
    "matrix_table",
    "open_pair",
    "resources",
    "run_cell",
    "run_conformance",
    "run_matrix",
]
