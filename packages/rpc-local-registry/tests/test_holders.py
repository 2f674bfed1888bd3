"""Peers that have the key and keep to nothing: each side's bounds are kept by that side, whatever the other one does."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rpc_local_registry import (
    PeerInfo,
    RpcClient,
    RpcConfig,
    RpcEncodeError,
    RpcError,
    RpcProtocolError,
    RpcServer,
    RpcServerStopped,
    StreamSource,
    rpc_method,
)
from rpc_local_registry import _session as session
from rpc_local_registry import _wire as wire
from rpc_local_registry._codec import TypedDecoder, encode
from rpc_local_registry._engine import client_terms
from rpc_local_registry._server import server_terms
from rpc_local_registry._zmq import READABLE, Link
from rpc_local_registry.testing import RawPeer, eventually

PATIENCE_S = 20.0


class Worker:
    """Waits in every place where a handler can."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.release = threading.Event()
        self.blocking = threading.Event()
        self.ran: list[Any] = []
        self.left: list[str] = []
        self.source: StreamSource[int] = StreamSource(on_cancel=lambda: self.left.append("left"))

    @rpc_method(non_blocking=True)
    def echo(self, value: Any) -> Any:
        """Give back."""
        return value

    @rpc_method(non_blocking=True)
    def note(self, value: int) -> None:
        """Log."""
        self.ran.append(value)

    @rpc_method(concurrency_max=1)
    def wait(self, value: Any) -> None:
        """On a lane one wide, until the gate opens."""
        self.ran.append(value)
        self.gate.wait(PATIENCE_S)

    @rpc_method(concurrency_max=1, streaming=True)
    def push(self, value: int) -> StreamSource[int]:
        """Likewise; then a stream."""
        self.ran.append(value)
        self.entered.set()
        self.gate.wait(PATIENCE_S)
        return self.source

    @rpc_method(non_blocking=True)
    def block(self) -> None:
        """Hold up the server's I/O thread."""
        self.blocking.set()
        self.release.wait(PATIENCE_S)

    @rpc_method(non_blocking=True, streaming=True)
    def count(self) -> Iterator[int]:
        """Without an end."""
        yield from itertools.count()

    @rpc_method(non_blocking=True)
    def arrays(self, count: int) -> Any:
        """So many."""
        return [np.zeros(3)] * count


@pytest.fixture
def worker() -> Iterator[Worker]:
    """One whose waits all end with the test."""
    made = Worker()
    yield made
    made.gate.set()
    made.release.set()


class Raw:
    """A client by hand."""

    def __init__(self, server: RpcServer, key: bytes, config: RpcConfig | None = None) -> None:
        self.peer = RawPeer(server.address, config, key=key)
        self.session = self.peer.open_session(key)

    def send(self, kind: int, call_id: int, name: str, *arguments: Any) -> None:
        body, buffers = encode(arguments)
        payload = wire.prepare(name.encode(), body, buffers, 64)
        self.peer.send(*self.session.sealer.seal(kind, call_id, 0, payload))

    def answers(self, count: int) -> dict[int, int]:
        """Kind by call of the next answers."""
        found: dict[int, int] = {}
        while len(found) < count:
            frames = self.peer.receive(PATIENCE_S)
            assert frames is not None
            message = self.session.opener.open(frames)
            if message.kind in (wire.RESULT, wire.ERROR):
                found[message.call_id] = message.kind
        return found

    def items(self, call_id: int) -> int:
        """Stream items that were sent before the answer to a call that is made now."""
        self.send(wire.CALL, call_id, "echo", 1)
        count = 0
        while True:
            frames = self.peer.receive(PATIENCE_S)
            assert frames is not None
            message = self.session.opener.open(frames)
            if message.kind == wire.RESULT:
                assert message.call_id == call_id
                return count
            count += message.kind == wire.ITEM


@pytest.fixture
def narrow(worker: Worker, key: bytes) -> Iterator[tuple[RpcServer, Raw]]:
    """A server with small bounds, and a client that does not know them."""
    config = RpcConfig(pending_calls_max=4, pending_bytes_max=5000)
    with RpcServer(worker, "ipc://", key, config=config) as server:
        raw = Raw(server, key)
        try:
            yield server, raw
        finally:
            worker.gate.set()
            raw.peer.close()


class TestServersBounds:
    """What a client does not keep to, the server does."""

    def test_calls(self, narrow: tuple[RpcServer, Raw], worker: Worker) -> None:
        """Four wait; the others are refused, and none of them runs."""
        server, raw = narrow
        for call_id in range(1, 7):
            raw.send(wire.CALL, call_id, "wait", call_id)
        assert raw.answers(2) == {5: wire.ERROR, 6: wire.ERROR}
        assert server.statistics().pending_high_water == server.statistics().pending == 4
        worker.gate.set()
        assert raw.answers(4) == dict.fromkeys(range(1, 5), wire.RESULT)
        assert worker.ran == [1, 2, 3, 4]

    def test_one_way_calls(self, narrow: tuple[RpcServer, Raw], worker: Worker) -> None:
        """One runs, four wait behind it, the others are refused."""
        server, raw = narrow
        for call_id in range(1, 8):
            raw.send(wire.ONEWAY, call_id, "wait", call_id)
        eventually(lambda: server.statistics().oneway_failed == 2)
        worker.gate.set()
        eventually(lambda: worker.ran == [1, 2, 3, 4, 5])

    @pytest.mark.parametrize("kind", [wire.CALL, wire.ONEWAY])
    def test_bytes_are_given_back(self, narrow: tuple[RpcServer, Raw], worker: Worker, kind: int) -> None:
        """However much it is in all, one after the other."""
        server, raw = narrow
        worker.gate.set()
        for call_id in range(1, 13):
            raw.send(kind, call_id, "wait", "x" * 1000)
            eventually(lambda wanted=call_id: len(worker.ran) == wanted)
            # Settled on the I/O thread before the next message is looked at.
            raw.send(wire.CALL, 100 + call_id, "echo", 1)
            assert raw.answers(1 + (kind == wire.CALL))[100 + call_id] == wire.RESULT
        eventually(lambda: server.statistics().pending == 0)
        assert (server.statistics().failed, server.statistics().oneway_failed) == (0, 0)

    def test_arrays_of_a_result(self, worker: Worker, key: bytes) -> None:
        """More than the client takes: told by name, and the session lives."""
        with (
            RpcServer(worker, "ipc://", key) as server,
            RpcClient(server.address, key, config=RpcConfig(buffers_max=2)) as client,
        ):
            assert len(client.arrays(2).remote(timeout_s=PATIENCE_S)) == 2
            with pytest.raises(RpcEncodeError, match="3 arrays"):
                client.arrays(3).remote(timeout_s=PATIENCE_S)
            assert client.statistics().sessions == 1

    @pytest.mark.parametrize("bound", [{"stream_credit": 4}, {"stream_bytes": 600}])
    def test_a_consumers_room(self, worker: Worker, key: bytes, bound: dict[str, int]) -> None:
        """It said how much it takes at a time; whatever it allows later, no more is sent than that."""
        with RpcServer(worker, "ipc://", key) as server:
            raw = Raw(server, key, RpcConfig(**bound))
            with contextlib.closing(raw.peer):
                raw.send(wire.STREAM, 1, "count")
                first = raw.items(2)
                assert 0 < first < 64
                credit = wire.pack_credit((1 << 20) - 1, (1 << 40) - 1)
                raw.peer.send(*raw.session.sealer.seal(wire.CREDIT, 1, credit))
                assert raw.items(3) == first

    def test_half_open_sessions_give_way(self, worker: Worker, key: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
        """Once their time is over; nobody is told of the end of a session that never was."""
        from rpc_local_registry import _server

        monkeypatch.setattr(_server, "_HALF_OPEN_MAX", 3)
        told: list[PeerInfo] = []
        config = RpcConfig(handshake_timeout_s=0.2)
        with (
            RpcServer(worker, "ipc://", key, config=config, on_peer_lost=told.append) as server,
            contextlib.ExitStack() as stack,
        ):
            for _ in range(3):
                peer = stack.enter_context(RawPeer(server.address, key=key))
                peer.send(*session.ClientHandshake(key, os.urandom(16), "half", client_terms(RpcConfig())).hello())
            eventually(lambda: server.statistics().sessions == 3)
            over_s = time.monotonic() + config.handshake_timeout_s
            eventually(lambda: time.monotonic() > over_s)
            with RpcClient(server.address, key, name="whole") as client:
                assert client.echo(1).remote(timeout_s=PATIENCE_S) == 1
                assert server.statistics().sessions == 1
            eventually(lambda: server.statistics().sessions == 0)
        assert [info.name for info in told] == ["whole"]


class TestLate:
    """What comes when nobody waits for it any more."""

    @pytest.mark.parametrize("name", ["wait", "push"])
    def test_a_deadline_that_passed_in_the_lane(self, worker: Worker, key: bytes, name: str) -> None:
        """While the I/O thread, which would have told so, is held up: the handler does not begin."""
        with RpcServer(worker, "ipc://", key) as server, RpcClient(server.address, key) as client:

            def begin(value: int, timeout_s: float) -> Any:
                call = client.method(name)(value)
                return (call.remote_future if name == "wait" else call.remote_streaming)(timeout_s=timeout_s)

            first = begin(1, PATIENCE_S)
            eventually(lambda: worker.ran == [1])
            second = begin(2, 0.5)
            over_s = time.monotonic() + 0.5
            held = client.block().remote_future(timeout_s=PATIENCE_S)
            eventually(worker.blocking.is_set)
            eventually(lambda: time.monotonic() > over_s)
            worker.gate.set()
            lane = server._lane_of[name]
            eventually(lambda: not lane.active)
            worker.release.set()
            held.result(PATIENCE_S)
            assert worker.ran == [1]
            with pytest.raises(RpcError):
                second.result(PATIENCE_S) if name == "wait" else next(second)
            del first

    def test_a_source_that_comes_after_its_consumer_left(self, worker: Worker, key: bytes) -> None:
        """Its worker is told at once."""
        with RpcServer(worker, "ipc://", key) as server, RpcClient(server.address, key) as client:
            stream = client.push(1).remote_streaming(timeout_s=PATIENCE_S)
            eventually(worker.entered.is_set)
            stream.cancel()
            eventually(lambda: server.statistics().pending == 0)
            worker.gate.set()
            eventually(lambda: worker.left == ["left"])
            assert not worker.source.push(1)

    def test_a_call_that_was_cancelled_before_there_was_a_session(
        self, worker: Worker, key: bytes, tmp_path: Path
    ) -> None:
        """It is never sent."""
        tmp_path.chmod(0o700)
        address = f"ipc://{tmp_path}/s"
        with contextlib.closing(RpcClient(address, key)) as client:
            first, second = (client.note(value).remote_future(timeout_s=PATIENCE_S) for value in (1, 2))
            assert first.cancel()
            with RpcServer(worker, address, key) as server:
                second.result(PATIENCE_S)
                assert worker.ran == [2]
                assert server.statistics().calls == 1
                client.close()

    def test_a_result_that_comes_after_its_worker_left(self, worker: Worker, key: bytes) -> None:
        """The same answer as on the local path, wherever the method ran."""
        server = RpcServer(worker, "ipc://", key).start()
        with RpcClient(server.address, key) as client:
            waiting = client.wait(1).remote_future(timeout_s=PATIENCE_S)
            eventually(lambda: worker.ran == [1])
            held = client.block().remote_future(timeout_s=PATIENCE_S)
            eventually(worker.blocking.is_set)
            worker.gate.set()
            lane = server._lane_of["wait"]
            eventually(lambda: not lane.active)
            leaving = threading.Thread(target=server.shutdown)
            leaving.start()
            eventually(lambda: server.stopping)
            worker.release.set()
            for future in (waiting, held):
                with pytest.raises(RpcServerStopped):
                    future.result(PATIENCE_S)
            leaving.join(PATIENCE_S)

    def test_callers_have_exceptions_of_their_own(self, worker: Worker, key: bytes) -> None:
        """A traceback belongs to one of them."""
        with RpcServer(worker, "ipc://", key) as server, RpcClient(server.address, key) as client:
            futures = [client.wait(value).remote_future(timeout_s=PATIENCE_S) for value in (1, 2)]
            eventually(lambda: server.statistics().pending == 2)
            client.close()
            one, other = (future.exception(PATIENCE_S) for future in futures)
            assert type(one) is type(other)
            assert one is not other
            with pytest.raises(RpcError) as again:
                client.echo(1).remote()
            assert again.value not in (one, other)


def heard(link: Link) -> tuple[bytes, bytes | memoryview]:
    """Who sent the next message to a listener of the test's own, and its first frame."""
    eventually(lambda: bool(link.poll(0.01) & READABLE))
    identity, first, *_ = link.receive(1)
    return bytes(identity), first


@pytest.mark.parametrize(
    ("kind", "call_id", "argument", "why"),
    [
        (wire.ITEM, 1, 1, "item 1 where 0 was due"),
        (wire.DONE, 0, 2, "2 of 1 one-way calls acknowledged"),
        (wire.DONE, 2, 1, "1 of 1 one-way calls acknowledged, 2 failed"),
    ],
)
def test_a_server_whose_numbers_are_wrong(key: bytes, kind: int, call_id: int, argument: int, why: str) -> None:
    """An item is missing, more is done than was sent, more has failed than is done: the session ends by name."""
    with (
        contextlib.closing(Link.bind("tcp://127.0.0.1:0", RpcConfig(), lambda *_: True)) as link,
        contextlib.closing(RpcClient(link.address, key)) as client,
    ):
        stream = client.method("x")().remote_streaming(timeout_s=PATIENCE_S)
        client.method("x")().remote_oneway()
        identity, hello = heard(link)
        answer, opened = session.ServerHandshake(key, "", server_terms(RpcConfig())).answer([hello], bytes(16))
        assert opened is not None
        link.send(answer, identity)
        payload = wire.prepare(b"", b"\x01") if kind == wire.ITEM else wire.NOTHING
        link.send(opened.sealer.seal(kind, call_id, argument, payload), identity)
        with pytest.raises(RpcProtocolError, match=why):
            next(stream)


def test_a_decoder_lets_go_of_a_message() -> None:
    """Whether it could be decoded or not: the message's memory is free with what was made of it."""
    body, buffers = encode(np.arange(10))
    decoder = TypedDecoder(np.ndarray)
    memory = bytearray(buffers[0])
    value = decoder.decode(body, [memoryview(memory)])
    assert value.tolist() == list(range(10))
    del value
    with pytest.raises(msgspec.ValidationError):
        decoder.decode(b"\x01", [memoryview(memory)])
    memory.clear()


def test_threads_of_lanes_are_used_again(worker: Worker, key: bytes) -> None:
    """One call after the other needs one thread."""
    worker.gate.set()
    with RpcServer(worker, "ipc://", key) as server, RpcClient(server.address, key) as client:
        for value in range(5):
            client.wait(value).remote(timeout_s=PATIENCE_S)
            eventually(lambda: server._lanes._idle == 1)
        assert server.statistics().lane_threads == 1
