"""libzmq's thread is one for a server and its clients of the same process; it ends with the last of them."""

from __future__ import annotations

import errno
import multiprocessing
import os
from typing import Any

import pytest
import zmq

from rpc_local_registry import (
    RpcAddressError,
    RpcClient,
    RpcConfig,
    RpcConnectionError,
    RpcServer,
    new_key,
    rpc_method,
)
from rpc_local_registry import _zmq as links
from rpc_local_registry._zmq import Link
from rpc_local_registry.testing import eventually

PATIENCE_S = 20.0


class Worker:
    """Answers."""

    @rpc_method(non_blocking=True)
    def ok(self) -> int:
        """Still there."""
        return os.getpid()


def context_of(end: Any) -> Any:
    """Of a started server or client."""
    link = end._link if isinstance(end, RpcServer) else end._core.engine._link
    return link._context


@pytest.mark.parametrize("address", ["ipc://", "tcp://127.0.0.1:0"])
def test_the_last_link_ends_the_context(key: bytes, address: str) -> None:
    """Clients join their server's, and leave it when they close; each server has one of its own."""
    with RpcServer(Worker(), address, key) as server, RpcServer(Worker(), "ipc://", key) as other:
        shared = context_of(server)
        clients = [RpcClient(server.address, key).start() for _ in range(2)]
        assert [context_of(client) for client in clients] == [shared, shared]
        assert context_of(other) is not shared
        for client in clients:
            client.close()
            assert not shared.zmq.closed
        server.shutdown()
        assert shared.zmq.closed
        assert server.address not in links._contexts


@pytest.mark.parametrize("address", ["ipc://", "tcp://127.0.0.1:0"])
def test_a_context_outlives_its_server(key: bytes, address: str) -> None:
    """While a link of a client's is still closing; the server does not wait for it."""
    server = RpcServer(Worker(), address, key).start()
    shared = context_of(server)
    lasting = Link.connect(server.address, RpcConfig())
    with RpcClient(server.address, key) as client:
        server.shutdown()
        assert not shared.zmq.closed
        with pytest.raises(RpcConnectionError):
            client.ok().remote(timeout_s=PATIENCE_S)
    assert not shared.zmq.closed
    lasting.close()
    eventually(lambda: shared.zmq.closed, PATIENCE_S)


def test_a_successor_at_the_address_has_its_own(key: bytes, tmp_path: Any) -> None:
    """A client that outlived its server joins the new one's when it reconnects."""
    tmp_path.chmod(0o700)
    address = f"ipc://{tmp_path}/s"
    with RpcServer(Worker(), address, key) as first:
        client = RpcClient(address, key).start()
        before = context_of(client)
        assert before is context_of(first)
    with RpcServer(Worker(), address, key) as second:
        assert context_of(second) is not before
        client.reconnect()
        assert before.zmq.closed
        assert client.ok().remote(timeout_s=PATIENCE_S) == os.getpid()
        assert context_of(client) is context_of(second)
        client.close()


def test_a_failed_start_leaves_no_context(key: bytes) -> None:
    """Nobody could join what serves nothing, and it is over."""
    with RpcServer(Worker(), "ipc://", key) as server:
        before = dict(links._contexts)
        with pytest.raises(Exception, match="served already"):
            Link.bind(server.address, RpcConfig(), lambda *_: True)
        assert links._contexts == before


def _child(address: str, key: bytes, answers: Any) -> None:
    with RpcClient(address, key) as client:
        answers.put((len(links._contexts), context_of(client) is None, client.ok().remote(timeout_s=PATIENCE_S)))


def test_a_forked_child_joins_nothing_of_its_parent() -> None:
    """Its clients connect as those of any other process."""
    key = new_key()
    fork = multiprocessing.get_context("fork")
    with RpcServer(Worker(), "ipc://", key) as server:
        answers = fork.SimpleQueue()
        child = fork.Process(target=_child, args=(server.address, key, answers))
        child.start()
        assert answers.get() == (0, True, os.getpid())
        child.join(PATIENCE_S)
        assert child.exitcode == 0


def test_a_borrower_is_told_to_hurry_until_the_socket_is_back(key: bytes) -> None:
    """It waits for a message without a limit of its own, and leaves at once when the owner wants the socket."""
    with RpcServer(Worker(), "ipc://", key) as server:
        link = Link.connect(server.address, RpcConfig())
        try:
            assert link.wait_frame(0.01) is None
            link.hurry()
            assert link.wait_frame(None) is None
            assert link.wait_frame(None) is None
            link.calm()
            with pytest.raises(BlockingIOError):
                link.calm()
        finally:
            link.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs a table of descriptors")
@pytest.mark.parametrize("step", ["first", "socket", "second", "option", "gate", "monitor"])
def test_a_link_that_is_half_made_leaves_nothing(key: bytes, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever there is no descriptor for; the server's context ends with its last whole link, and the error is ours."""
    none_left = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    eventfd, made = os.eventfd, iter(range(1 << 20))

    def few(*arguments: int) -> int:
        if next(made) == (step == "second"):
            raise none_left
        return eventfd(*arguments)

    def refuse(*_: object, **__: object) -> Any:
        raise zmq.ZMQError(errno.EMFILE)

    with RpcServer(Worker(), "ipc://", key) as server:
        shared = context_of(server)
        RpcClient(server.address, key).close()
        before, links_before = descriptors(), shared._links

        def attempt() -> None:
            nonlocal made
            for _ in range(3):
                made = iter(range(1 << 20))
                if step != "gate":
                    with pytest.raises(RpcConnectionError, match="Too many open files"):
                        Link.connect(server.address, RpcConfig())
                made = iter(range(1 << 20))
                with pytest.raises(RpcAddressError, match="Too many open files"):
                    Link.bind("ipc://", RpcConfig(), admit=lambda *_: True)

        with monkeypatch.context() as patch:
            if step in ("first", "second"):
                patch.setattr(os, "eventfd", few)
            else:
                owner, name = {
                    "socket": (zmq.Context, "socket"),
                    "option": (Link, "_set_options"),
                    "gate": (Link, "_answer_gate"),
                    "monitor": (zmq.Socket, "get_monitor_socket"),
                }[step]
                patch.setattr(owner, name, refuse)
            attempt()
        assert shared._links == links_before
        eventually(lambda: descriptors() <= before, PATIENCE_S)
        with RpcClient(server.address, key) as client:
            assert client.ok().remote(timeout_s=PATIENCE_S) == os.getpid()
    assert shared.zmq.closed
