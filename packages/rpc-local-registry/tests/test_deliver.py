"""``deliver_to``: a stream's items handed over where they arrive, on both paths."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from rpc_local_registry import (
    RpcClient,
    RpcError,
    RpcRemoteError,
    RpcServer,
    RpcServerStopped,
    RpcStreamingError,
    StreamSource,
    rpc_method,
)
from rpc_local_registry.testing import eventually


class Worker:
    def __init__(self) -> None:
        self.left = threading.Event()
        self.source: StreamSource[int] = StreamSource(on_cancel=self.left.set)

    @rpc_method(streaming=True, non_blocking=True)
    def steps(self) -> StreamSource[int]:
        for number in range(3):
            self.source.push(number)
        return self.source

    @rpc_method(streaming=True, non_blocking=True)
    def counted(self) -> Iterator[int]:
        yield from range(3)


class Reader:
    """Remembers what it was told, and on which threads."""

    def __init__(self) -> None:
        self.items: list[int] = []
        self.ends: list[RpcError | None] = []
        self.threads: set[int] = set()

    def on_item(self, item: int) -> None:
        if item < 0:
            raise ValueError("no such step")
        self.items.append(item)
        self.threads.add(threading.get_ident())

    def on_end(self, error: RpcError | None) -> None:
        self.ends.append(error)


@pytest.fixture(params=["local", "remote"])
def parts(request: pytest.FixtureRequest, key: bytes) -> Iterator[tuple[Worker, RpcServer, RpcClient, Reader]]:
    worker, fast_path = Worker(), request.param == "local"
    with RpcServer(worker, "ipc://", key) as server, RpcClient(server.address, key, fast_path=fast_path) as client:
        yield worker, server, client, Reader()


Parts = tuple[Worker, RpcServer, RpcClient, Reader]


def test_items_come_in_order_and_the_end_once(parts: Parts) -> None:
    """What was there before, what comes later from several threads one by one, then the end; more than the stream's credit."""
    worker, _, client, reader = parts
    client.steps().remote_streaming().deliver_to(reader.on_item, reader.on_end)
    eventually(lambda: reader.items == [0, 1, 2])

    def push() -> None:
        for number in range(3, 1003):
            worker.source.push(number)

    pushing = threading.Thread(target=push)
    pushing.start()
    pushing.join()
    worker.source.close()
    eventually(lambda: bool(reader.ends))
    assert reader.items == list(range(1003))
    assert reader.ends == [None]


def test_the_local_path_hands_over_in_the_pushing_thread(key: bytes) -> None:
    """No thread in between: the item is there when ``push`` returns."""
    worker, reader = Worker(), Reader()
    with RpcServer(worker, "ipc://", key) as server, RpcClient(server.address, key, fast_path=True) as client:
        client.steps().remote_streaming().deliver_to(reader.on_item, reader.on_end)
        worker.source.push(3)
        assert reader.items == [0, 1, 2, 3]
        assert reader.threads == {threading.get_ident()}


def test_the_producers_error_and_a_stopped_server_end_it(parts: Parts) -> None:
    """An error given to ``close`` arrives as RpcRemoteError, a shutdown as RpcServerStopped, each once."""
    worker, server, client, reader = parts
    client.steps().remote_streaming().deliver_to(reader.on_item, reader.on_end)
    eventually(lambda: reader.items == [0, 1, 2])
    worker.source.close(ValueError("the loop has ended"))
    eventually(lambda: bool(reader.ends))
    assert isinstance(reader.ends[0], RpcRemoteError)
    worker.source = StreamSource()
    client.steps().remote_streaming().deliver_to(reader.on_item, reader.on_end)
    eventually(lambda: len(reader.items) == 6)
    server.shutdown()
    eventually(lambda: len(reader.ends) == 2)
    assert isinstance(reader.ends[1], RpcServerStopped)


def test_cancel_and_a_consumer_that_raises_end_it_without_an_error(
    parts: Parts, caplog: pytest.LogCaptureFixture
) -> None:
    """The producer is told in both cases; what was raised is logged, and nothing else suffers."""
    worker, _, client, reader = parts
    stream = client.steps().remote_streaming()
    stream.deliver_to(reader.on_item, reader.on_end)
    eventually(lambda: reader.items == [0, 1, 2])
    stream.cancel()
    assert worker.left.wait(20)
    eventually(lambda: reader.ends == [None])
    worker.left.clear()
    worker.source = StreamSource(on_cancel=worker.left.set)
    with caplog.at_level(logging.ERROR):
        client.steps().remote_streaming().deliver_to(reader.on_item, reader.on_end)
        eventually(lambda: len(reader.items) == 6)
        worker.source.push(-1)
        assert worker.left.wait(20)
    eventually(lambda: reader.ends == [None, None])
    assert "on_item failed" in caplog.text


def test_a_local_generator_and_a_stream_that_could_not_open(key: bytes) -> None:
    """The first is refused by name; the second tells its error at the end, as iterating it would."""
    with RpcServer(Worker(), "ipc://", key) as server, RpcClient(server.address, key, fast_path=True) as client:
        reader = Reader()
        with pytest.raises(RpcStreamingError, match="counted"):
            client.counted().remote_streaming().deliver_to(reader.on_item, reader.on_end)
        client.steps(1).remote_streaming().deliver_to(reader.on_item, reader.on_end)
        assert len(reader.ends) == 1 and isinstance(reader.ends[0], RpcError)
