"""Everybody is told, whatever one of them raises; and nobody pays for another's settings, lack of threads or misuse."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from rpc_local_registry import (
    RpcBackpressure,
    RpcClient,
    RpcClosed,
    RpcConfig,
    RpcConfigError,
    RpcError,
    RpcRemoteError,
    RpcServer,
    RpcTimeout,
    RpcUsageError,
    StreamSource,
    rpc_method,
)
from rpc_local_registry.testing import eventually


class Worker:
    def __init__(self) -> None:
        self.gate = threading.Event()
        self.last_gate = threading.Event()
        self.source: StreamSource[int] = StreamSource()

    @rpc_method
    def wait(self) -> bool:
        return self.gate.wait(30)

    @rpc_method
    def wait_longer(self) -> bool:
        return self.last_gate.wait(30)

    @rpc_method(non_blocking=True)
    def echo(self, value: int) -> int:
        return value

    @rpc_method
    async def echo_soon(self, value: int) -> int:
        return value

    @rpc_method(streaming=True)
    def count_slowly(self) -> Iterator[int]:
        yield from range(100)

    @rpc_method(non_blocking=True)
    def fail(self, size: int) -> None:
        raise ValueError("\N{SNOWMAN}" * size)

    @rpc_method(non_blocking=True)
    def large(self, size: int) -> bytes:
        return bytes(size)

    @rpc_method(streaming=True, non_blocking=True)
    def steps(self) -> StreamSource[int]:
        return self.source

    @rpc_method(streaming=True, non_blocking=True)
    async def own_timeout(self) -> AsyncIterator[int]:
        yield 1
        raise TimeoutError("mine")


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.gate.set()
    made.last_gate.set()


@pytest.fixture
def server(worker: Worker, key: bytes) -> Iterator[RpcServer]:
    with RpcServer(worker, "ipc://", key) as started:
        yield started


@pytest.fixture(params=[True, False], ids=["local", "remote"])
def client(request: pytest.FixtureRequest, server: RpcServer, key: bytes) -> Iterator[RpcClient]:
    with RpcClient(server.address, key, fast_path=request.param, interface=Worker) as opened:
        yield opened


def exits(_: object) -> None:
    raise SystemExit("enough")


class TestEverybodyIsTold:
    def test_of_a_close_in_which_a_callback_exits(self, server: RpcServer, key: bytes) -> None:
        """The exit comes out of ``close``, and whoever else waits has the end all the same."""
        client = RpcClient(server.address, key, fast_path=False, interface=Worker)
        futures = [client.wait().remote_future() for _ in range(3)]
        futures[0].add_done_callback(exits)
        with pytest.raises(SystemExit):
            client.close()
        for future in futures:
            assert isinstance(future.exception(timeout=0), RpcClosed)
        eventually(lambda: server.statistics().sessions == 0)

    def test_of_a_close_in_which_on_cancel_exits(self, worker: Worker, server: RpcServer, key: bytes) -> None:
        """The session is closed too, although a stream's producer exits."""
        worker.source = StreamSource(on_cancel=lambda: exits(None))
        client = RpcClient(server.address, key, fast_path=True, interface=Worker)
        with client.steps().remote_streaming():
            future = client.wait().remote_future()
            with pytest.raises(SystemExit):
                client.close()
        assert isinstance(future.exception(timeout=0), RpcClosed)
        eventually(lambda: server.statistics().sessions == 0)

    def test_of_a_delivered_stream_whose_reader_exits(self, worker: Worker, client: RpcClient) -> None:
        """It is cancelled and ends, on the main thread of a worker that pushes too."""
        ends: list[RpcError | None] = []
        stream = client.steps().remote_streaming()
        stream.deliver_to(exits, ends.append)
        try:
            worker.source.push(1)
        except SystemExit:
            assert client.path_of("steps") == "local"
        eventually(lambda: ends == [None])
        eventually(lambda: worker.source.cancelled)
        assert not worker.source.push(2)

    def test_an_outcome_from_elsewhere_costs_nobody(self, worker: Worker, server: RpcServer, key: bytes) -> None:
        """A future that its holder ended by hand ends no session."""
        with RpcClient(server.address, key, fast_path=False, interface=Worker) as client:
            mine, other = client.wait().remote_future(), client.wait().remote_future()
            mine.set_result(False)
            worker.gate.set()
            assert other.result(timeout=30) is True
            assert client.echo(1).remote(timeout_s=30) == 1
            assert client.statistics().sessions == 1


class TestOnTheClientsOwnThread:
    """A callback there waits for nothing that the same thread would have to bring."""

    @pytest.fixture
    def remote(self, server: RpcServer, key: bytes) -> Iterator[RpcClient]:
        with RpcClient(server.address, key, fast_path=False, interface=Worker) as opened:
            yield opened

    def test_a_blocking_call_is_refused(self, worker: Worker, remote: RpcClient) -> None:
        """At once, with a time-out or without; verbs that do not wait are served."""
        refused: list[BaseException] = []
        other: list[Any] = []

        def call(_: object) -> None:
            for timeout_s in (None, 60):
                try:
                    remote.echo(1).remote(timeout_s)
                except RpcError as error:
                    refused.append(error)
            other.append(remote.echo(2).remote_future(timeout_s=60))

        remote.wait().remote_future().add_done_callback(call)
        worker.gate.set()
        eventually(lambda: bool(other))
        assert [(type(error), error.nothing_ran) for error in refused] == [(RpcUsageError, True)] * 2
        assert other[0].result(timeout=30) == 2
        assert remote.echo(3).remote(timeout_s=30) == 3
        assert remote.statistics().pending == 0

    def test_another_futures_outcome_is_refused(self, worker: Worker, remote: RpcClient) -> None:
        """Only while it is not here, and only to who would wait; its call goes on."""
        told: list[Any] = []
        own: list[Any] = []
        other = remote.wait_longer().remote_future(timeout_s=60)

        def look(done: Future[Any]) -> None:
            own.append(done.result())
            for ask in (other.result, other.exception):
                for timeout_s in (None, 60, 0):
                    try:
                        told.append(ask(timeout_s))
                    except RpcUsageError as error:
                        told.append((RpcUsageError, error.nothing_ran))
                    except TimeoutError:
                        told.append(TimeoutError)

        def look_on_io_thread(count: int) -> None:
            worker.gate.clear()
            remote.wait().remote_future().add_done_callback(look)
            worker.gate.set()
            eventually(lambda: len(told) == count)

        look_on_io_thread(6)
        assert told == [(RpcUsageError, False), (RpcUsageError, False), TimeoutError] * 2
        worker.last_gate.set()
        assert other.result(timeout=30) is True
        look_on_io_thread(12)
        assert told[6:] == [True] * 3 + [None] * 3
        assert own == [True] * 2

    def test_a_streams_next_item_is_refused(self, worker: Worker, remote: RpcClient) -> None:
        """Only while there is none; the stream goes on."""
        told: list[Any] = []
        stream = remote.steps().remote_streaming(timeout_s=60)

        def read(_: object) -> None:
            try:
                told.append(next(stream))
            except RpcError as error:
                told.append(type(error))

        def read_on_io_thread(count: int) -> None:
            worker.gate.clear()
            remote.wait().remote_future().add_done_callback(read)
            worker.gate.set()
            eventually(lambda: len(told) == count)

        read_on_io_thread(1)
        worker.source.push(5)
        eventually(lambda: len(stream._inbox) == 1)
        read_on_io_thread(2)
        worker.source.push(6)
        assert [*told, next(stream)] == [RpcUsageError, 5, 6]


class TestBothPathsAgree:
    def test_a_delivered_stream_keeps_its_deadline(self, worker: Worker, client: RpcClient) -> None:
        """``timeout_s`` ends a stream that nobody iterates."""
        ends: list[RpcError | None] = []
        stream = client.steps().remote_streaming(timeout_s=0.05)
        stream.deliver_to(lambda item: None, ends.append)
        eventually(lambda: len(ends) == 1)
        assert isinstance(ends[0], RpcTimeout)
        eventually(lambda: worker.source.cancelled)

    def test_a_handlers_timeout_is_no_timeout_of_the_callers(self, client: RpcClient) -> None:
        """What a handler raises is ``RpcRemoteError``, also where the caller bounds its own wait."""

        async def read() -> list[int]:
            return [item async for item in client.own_timeout().remote_streaming(item_timeout_s=60)]

        with pytest.raises(RpcRemoteError, match="mine"):
            asyncio.run(read())


class TestSettingsOfOneSide:
    @pytest.mark.parametrize("size", [0, 100, 5000])
    @pytest.mark.parametrize("bytes_max", [1024, 2048, 16384])
    def test_errors_fit_the_clients_messages(self, server: RpcServer, key: bytes, bytes_max: int, size: int) -> None:
        """An error is cut to what the client takes; the session lives."""
        config = RpcConfig(message_bytes_max=bytes_max)
        with RpcClient(server.address, key, config=config, fast_path=False) as client:
            for _ in range(2):
                with pytest.raises(RpcRemoteError, match=r"^ValueError: "):
                    client.fail(size).remote(timeout_s=30)
            assert client.echo(1).remote(timeout_s=30) == 1

    def test_one_answer_may_be_larger_than_what_may_be_unread(self, server: RpcServer, key: bytes) -> None:
        """A single answer has no queue before it."""
        with RpcClient(server.address, key, config=RpcConfig(unread_bytes_max=1024), fast_path=False) as client:
            for _ in range(3):
                assert len(client.large(10_000).remote(timeout_s=30)) == 10_000

    def test_times_without_end_are_taken(self, key: bytes) -> None:
        """The longest times that the configuration allows are no overflow at the transport."""
        config = RpcConfig(heartbeat_s=1e9, peer_timeout_s=1e9, handshake_timeout_s=1e9, drain_s=0.2)
        with (
            RpcServer(Worker(), "ipc://", key, config=config) as server,
            RpcClient(server.address, key, fast_path=False) as client,
        ):
            assert client.echo(1).remote(timeout_s=30) == 1

    @pytest.mark.parametrize(
        "make",
        [
            lambda address, key: RpcServer(Worker(), address, key, name=5),
            lambda address, key: RpcServer(Worker(), address, key, name="\ud800"),
            lambda address, key: RpcServer(Worker(), address, key, config={}),
            lambda address, key: RpcClient(address, key, name="\ud800"),
            lambda address, key: RpcClient(address, key, config={}),
            lambda address, key: RpcClient(address, key, fast_path="0"),
        ],
    )
    def test_wrong_kinds_are_told_at_once(self, key: bytes, make: Callable[[str, bytes], Any]) -> None:
        """Not later, by a thread."""
        with pytest.raises(RpcConfigError):
            make("tcp://127.0.0.1:9", key)


def test_a_worker_that_serves_nothing_is_told(key: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """Say, one whose marks were forgotten; a worker with methods is no news."""

    class Unmarked:
        def echo(self, value: int) -> int:
            return value

    with caplog.at_level(logging.WARNING):
        RpcServer(Worker(), "ipc://", key)
        assert caplog.messages == []
        RpcServer(Unmarked(), "ipc://", key)
    assert len(caplog.messages) == 1
    assert "Unmarked has no method that is marked with rpc_method" in caplog.text


class TestWithoutThreads:
    @pytest.mark.parametrize("method", ["wait", "echo_soon", "count_slowly"])
    def test_a_call_fails_and_the_server_lives(
        self, worker: Worker, server: RpcServer, key: bytes, method: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A system without another thread to give costs the calls that need one; they may be tried again."""
        worker.gate.set()
        with RpcClient(server.address, key, fast_path=False) as client:

            def call() -> Any:
                if method == "count_slowly":
                    return len(list(client.count_slowly().remote_streaming(timeout_s=30)))
                return client.method(method)(*([1] if method == "echo_soon" else [])).remote(timeout_s=30)

            def no_thread(thread: threading.Thread) -> None:
                raise RuntimeError("can't start new thread")

            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", no_thread)
                with pytest.raises(RpcBackpressure, match="no thread to run it"):
                    call()
                assert client.echo(1).remote(timeout_s=30) == 1
            assert call() == {"wait": True, "echo_soon": 1, "count_slowly": 100}[method]
            assert server.statistics().pending == 0
