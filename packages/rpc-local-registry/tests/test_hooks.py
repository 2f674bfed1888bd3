"""Code of the user's that runs in the package's threads: whatever it raises, everybody else's calls go on."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from rpc_local_registry import (
    Loan,
    RpcArgumentError,
    RpcClient,
    RpcConfig,
    RpcEncodeError,
    RpcError,
    RpcProtocolError,
    RpcRemoteError,
    RpcServer,
    StreamSource,
    rpc_method,
)
from rpc_local_registry._hooks import call_hook, text_of
from rpc_local_registry.testing import eventually

#: What user code can raise; the last two are not even exceptions that a program is meant to catch.
RAISED = (RuntimeError("r"), ValueError("already executing"), MemoryError("m"), asyncio.CancelledError("c"), GeneratorExit("g"),
          SystemExit(3), KeyboardInterrupt("k"))  # fmt: skip
_now: list[BaseException] = []


def burst(*_: object) -> None:
    """Raise what the test wants."""
    raise type(_now[0])(*_now[0].args)


class Touchy(msgspec.Struct):
    """Refuses to be made from bytes."""

    value: int

    def __post_init__(self) -> None:
        if self.value < 0:
            burst()


def touchy() -> Touchy:
    """One that was made nevertheless."""
    made = Touchy(0)
    made.value = -1
    return made


class Unshown(Exception):
    """Its text cannot be asked for."""

    def __str__(self) -> str:
        burst()
        return ""


class Offering:
    """Offers itself as an array, and does not keep to it."""

    def __array__(self, *_: object, **__: object) -> Any:
        burst()


class Worker:
    """Every way in which user code gets to run in the server."""

    @rpc_method(non_blocking=True)
    def ok(self) -> int:
        """Still there."""
        return 7

    @rpc_method
    async def ok_async(self) -> int:
        """The loop is still there."""
        return 7

    @rpc_method(concurrency_max=1)
    def take(self, item: Touchy) -> int:
        """On a lane one wide: what breaks in it must not take the lane's only place."""
        return item.value

    @rpc_method(non_blocking=True)
    def take_inline(self, item: Touchy) -> int:
        """On the I/O thread."""
        return item.value

    @rpc_method
    async def take_async(self, item: Touchy) -> int:
        """On the loop."""
        return item.value

    @rpc_method(non_blocking=True)
    def take_each(self, items: Iterator[Touchy]) -> list[str]:
        """Decoded one by one."""
        told = []
        while True:
            try:
                told.append(str(next(items).value))
            except StopIteration:
                return told
            except RpcError as error:
                told.append(type(error).__name__)

    @rpc_method(streaming=True)
    def take_stream(self, item: Touchy) -> Iterator[int]:
        """A generator on a lane."""
        yield item.value

    @rpc_method(non_blocking=True)
    def give(self) -> Touchy:
        """Breaks in the client."""
        return touchy()

    @rpc_method(streaming=True)
    def give_stream(self) -> Iterator[Touchy]:
        """Likewise, as an item."""
        yield touchy()

    @rpc_method(non_blocking=True)
    def give_offering(self) -> Any:
        """Breaks while it is encoded."""
        return Offering()

    @rpc_method(non_blocking=True)
    def fail_unshown(self) -> None:
        """Its error breaks while it is described."""
        raise Unshown

    @rpc_method(streaming=True, non_blocking=True)
    def push(self) -> StreamSource[int]:
        """Its consumer's leaving is told to a function that raises."""
        source: StreamSource[int] = StreamSource(on_cancel=burst)
        source.push(1)
        return source

    @rpc_method(streaming=True)
    def generate(self) -> Iterator[int]:
        """Does not like to be closed."""
        try:
            yield from range(1000)
        finally:
            burst()

    @rpc_method(streaming=True, non_blocking=True)
    def generate_inline(self) -> Iterator[int]:
        """Likewise, on the I/O thread."""
        try:
            yield from range(1000)
        finally:
            burst()

    @rpc_method(streaming=True)
    async def generate_async(self) -> AsyncIterator[int]:
        """Likewise, on the loop."""
        try:
            for value in range(1000):
                yield value
        finally:
            burst()

    @rpc_method
    async def leave_behind(self) -> int:
        """Leaves a task and a callback on the loop that raise."""

        async def raises() -> None:
            burst()

        self.left = asyncio.ensure_future(raises())
        self.left.add_done_callback(lambda task: task.cancelled() or task.exception())
        asyncio.get_running_loop().call_soon(burst)
        return 1

    @rpc_method(non_blocking=True)
    def lend(self) -> np.ndarray:
        """Lends memory to the transport; the word that it is free goes to a function that raises."""
        return Loan(np.zeros(100_000), on_free=burst).view()


@pytest.fixture(params=RAISED, ids=lambda error: type(error).__name__)
def raised(request: pytest.FixtureRequest) -> Iterator[BaseException]:
    """What ``burst`` raises."""
    _now[:] = [request.param]
    yield request.param
    _now.clear()


@pytest.fixture
def open_client(key: bytes, raised: BaseException) -> Iterator[RpcClient]:
    """A client of a served worker; both have hooks that raise."""
    with (
        RpcServer(Worker(), "ipc://", key, on_peer_lost=burst) as server,
        RpcClient(server.address, key, interface=Worker, on_lost=burst, config=RpcConfig(stream_credit=4)) as client,
    ):
        yield client
        # The same session from beginning to end, on the I/O thread, a lane and the loop.
        assert client.ok().remote(timeout_s=20) == 7
        assert client.ok_async().remote(timeout_s=20) == 7
        assert client.take({"value": 7}).remote(timeout_s=20) == 7
        assert client.statistics().sessions == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
class TestNobodyElseSuffers:
    """After each of these, calls of every kind go on in the same session."""

    @pytest.mark.parametrize("method", ["take", "take_inline", "take_async"])
    def test_arguments_that_cannot_be_made(self, open_client: RpcClient, raised: BaseException, method: str) -> None:
        """A Struct's ``__post_init__`` runs while arguments are decoded: its caller gets an argument error that says so."""
        with pytest.raises(RpcArgumentError, match=method):
            open_client.method(method)({"value": -1}).remote(timeout_s=20)
        open_client.method(method)({"value": -1}).remote_oneway()
        eventually(lambda: open_client.statistics().oneway_failed == 1)

    def test_arguments_of_streams_and_single_items(self, open_client: RpcClient, raised: BaseException) -> None:
        """The same where they are decoded later."""
        with pytest.raises(RpcArgumentError):
            list(open_client.take_stream({"value": -1}).remote_streaming(timeout_s=20))
        if isinstance(raised, Exception):
            # Decoded in the handler, whose own interrupt it might be.
            told = open_client.take_each([{"value": 1}, {"value": -1}, {"value": 2}]).remote(timeout_s=20)
            assert told == ["1", "RpcArgumentError", "2"]

    def test_results_that_cannot_be_made(self, open_client: RpcClient, raised: BaseException) -> None:
        """Decoded on the client's I/O thread: this call fails, its session lives."""
        with pytest.raises(RpcProtocolError, match="give"):
            open_client.give().remote(timeout_s=20)
        with pytest.raises(RpcProtocolError, match="give_stream"):
            list(open_client.give_stream().remote_streaming(timeout_s=20))

    def test_results_that_cannot_be_encoded(self, open_client: RpcClient, raised: BaseException) -> None:
        """Encoded on the server's I/O thread."""
        with pytest.raises(RpcEncodeError, match="give_offering"):
            open_client.give_offering().remote(timeout_s=20)

    def test_errors_that_cannot_be_shown(self, open_client: RpcClient, raised: BaseException) -> None:
        """An exception whose text raises still arrives, by its type."""
        with pytest.raises(RpcRemoteError, match=r"Unshown: <message unavailable>"):
            open_client.fail_unshown().remote(timeout_s=20)

    @pytest.mark.parametrize("method", ["push", "generate", "generate_inline", "generate_async"])
    def test_streams_that_do_not_like_to_end(self, open_client: RpcClient, raised: BaseException, method: str) -> None:
        """The consumer leaves early, and the producer raises about it."""
        stream = open_client.method(method)().remote_streaming(timeout_s=20)
        next(stream)
        stream.cancel()

    def test_callbacks_of_futures(self, open_client: RpcClient, raised: BaseException) -> None:
        """They run on the I/O thread; those after one that raises run too."""
        future, told = open_client.ok_async().remote_future(timeout_s=20), threading.Event()
        # It may be done by now: then it runs here, on the main thread, where an interrupt comes out.
        with contextlib.suppress(type(raised)):
            future.add_done_callback(burst)
        future.add_done_callback(lambda _: told.set())
        assert future.result(20) == 7
        assert told.wait(20)

    def test_tasks_left_on_the_loop(self, open_client: RpcClient, raised: BaseException) -> None:
        """They may end themselves, not the loop of everybody's coroutines."""
        assert open_client.leave_behind().remote(timeout_s=20) == 1

    def test_lent_memory(self, open_client: RpcClient, raised: BaseException) -> None:
        """``on_free`` may run on any thread."""
        assert open_client.lend().remote(timeout_s=20).shape == (100_000,)

    def test_a_client_that_leaves(self, open_client: RpcClient, raised: BaseException, key: bytes) -> None:
        """``on_peer_lost`` runs on the server's I/O thread, ``on_lost`` on the client's."""
        with contextlib.closing(RpcClient(open_client.address, key, interface=Worker)) as other:
            assert other.ok().remote(timeout_s=20) == 7


def test_a_server_that_leaves_tells_every_local_client(key: bytes) -> None:
    """Whichever is told first: an ``on_lost`` that interrupts keeps the news from nobody; an interrupt comes out at last."""
    told: list[int] = []
    _now[:] = [KeyboardInterrupt("k")]
    server = RpcServer(Worker(), "ipc://", key).start()

    def tell_and_burst(number: int, _: RpcError) -> None:
        told.append(number)
        burst()

    hooks: list[Callable[[RpcError], None]] = [functools.partial(tell_and_burst, number) for number in range(3)]
    clients = [RpcClient(server.address, key, fast_path=True, interface=Worker, on_lost=hook) for hook in hooks]
    try:
        assert [client.ok().remote() for client in clients] == [7, 7, 7]
        with pytest.raises(KeyboardInterrupt):
            server.shutdown()
        assert sorted(told) == [0, 1, 2]
        for client in clients:
            with pytest.raises(RpcError):
                client.ok().remote()
    finally:
        _now.clear()
        server.shutdown()
        for client in clients:
            client.close()


def test_interrupts_reach_the_main_thread_only(caplog: pytest.LogCaptureFixture) -> None:
    """A hook's SystemExit is logged in a thread of ours, and raised after it was logged in the program's own."""
    _now[:] = [SystemExit(3)]
    thread = threading.Thread(target=call_hook, args=("first hook", burst))
    thread.start()
    thread.join()
    assert "first hook failed" in caplog.text
    with pytest.raises(SystemExit):
        call_hook("second hook", burst)
    assert "second hook failed" in caplog.text
    assert text_of(Unshown()) == "<message unavailable>"


def test_masked_arrays_are_refused(key: bytes) -> None:
    """Their bytes without their mask would be other values."""
    with RpcServer(Worker(), "ipc://", key) as server, RpcClient(server.address, key) as client:
        with pytest.raises(RpcArgumentError, match="mask"):
            client.method("ok")(np.ma.masked_array([1, 2], [0, 1])).remote()
        assert client.statistics().pending_bytes == 0
