"""Attacks on a live server and client: refused, counted, and nobody else disturbed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

from rpc_local_registry import (
    RpcAddressError,
    RpcAddressInUse,
    RpcAuthenticationError,
    RpcClient,
    RpcConfig,
    RpcConfigError,
    RpcConnectionError,
    RpcProtocolError,
    RpcProtocolMismatch,
    RpcServer,
    RpcUnreachable,
    new_key,
)
from rpc_local_registry import _session as session
from rpc_local_registry import _wire as wire
from rpc_local_registry._engine import client_terms
from rpc_local_registry._mac import HmacSha256
from rpc_local_registry._server import server_terms
from rpc_local_registry._zmq import READABLE, Link
from rpc_local_registry.testing import RawPeer, eventually

QUICK = RpcConfig(handshake_timeout_s=0.3)
TERMS = client_terms(RpcConfig())
TOUCHED: list[int] = []


class Bomb:
    """Leaves a trace if anything unpickles it."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return TOUCHED.append, (1,)


def test_strangers_are_refused_counted_and_never_answered(server: RpcServer, client: RpcClient, key: bytes) -> None:
    """Without the key nothing gets an answer: noise, pickles, short, empty, reflected and foreign-key messages."""
    sealer = wire.Sealer(wire.handshake_keys(key)[0], wire.TO_SERVER, wire.NO_SESSION)
    back = wire.Sealer(wire.handshake_keys(key)[1], wire.TO_CLIENT, wire.NO_SESSION)
    foreign = session.ClientHandshake(new_key(), bytes(16), "x", TERMS).hello()
    inside = wire.Sealer(HmacSha256(bytes(32)), wire.TO_SERVER, b"s" * 16).seal(
        wire.CALL, 1, 0, wire.prepare(b"echo", b"\x91\x01")
    )
    messages: dict[str, list[Any]] = {
        "truncated": [b""],
        "magic": [pickle.dumps(Bomb()).ljust(100)],
        "mac": foreign,
        "unknown_peer": inside,
        "reflected": back.seal(wire.WELCOME),
        "structure": sealer.seal(wire.HELLO, payload=wire.prepare(b"", pickle.dumps(Bomb()))),
        "oversized": [bytes(70_000)],
    }
    with RawPeer(server.address, key=key) as stranger:
        for frames in messages.values():
            stranger.send(*frames)
        eventually(lambda: sum(server.statistics().refused.values()) == len(messages))
        refused = server.statistics().refused
        assert {reason: refused[reason] for reason in messages} == dict.fromkeys(messages, 1)
        assert stranger.receive(0.05) is None, "a stranger was answered"
    assert client.echo(1).remote() == 1
    assert TOUCHED == []


def test_recorded_messages_do_nothing(server: RpcServer, service: Any, key: bytes) -> None:
    """A whole recorded session, replayed on its own connection and on another, runs nothing a second time."""
    with RawPeer(server.address, key=key) as peer, RawPeer(server.address, key=key) as thief:
        opened = peer.open_session(key)
        note = [bytes(frame) for frame in opened.sealer.seal(wire.ONEWAY, 1, 0, wire.prepare(b"note", b"\x91\x05"))]
        peer.send(*note)
        eventually(lambda: service.log == [5])
        peer.send(*note)
        thief.send(*note)
        eventually(lambda: server.statistics().refused["replayed"] == 1)
        eventually(lambda: server.statistics().refused["unknown_peer"] == 1)
        peer.send(*opened.sealer.seal(wire.ONEWAY, 2, 0, wire.prepare(b"note", b"\x91\x06")))
        eventually(lambda: service.log == [5, 6])


def test_a_replayed_hello_opens_nothing(server: RpcServer, key: bytes) -> None:
    """Counted as a replay, not answered."""
    hello = session.ClientHandshake(key, b"n" * 16, "x", TERMS).hello()
    with RawPeer(server.address, key=key) as first, RawPeer(server.address, key=key) as second:
        first.send(*hello)
        assert first.receive(10) is not None
        second.send(*hello)
        eventually(lambda: server.statistics().refused["replayed"] == 1)
        assert second.receive(0.05) is None


def test_a_holder_of_the_key_who_breaks_the_protocol_ends_only_itself(
    server: RpcServer, client: RpcClient, key: bytes
) -> None:
    """A gap in the sequence or the same call twice ends that session; others go on."""
    with RawPeer(server.address, key=key) as peer:
        opened = peer.open_session(key)
        opened.sealer.seal(wire.PING)
        peer.send(*opened.sealer.seal(wire.PING))
        eventually(lambda: server.statistics().refused["gap"] == 1)
    with RawPeer(server.address, key=key) as peer:
        opened = peer.open_session(key)
        for _ in range(2):
            peer.send(*opened.sealer.seal(wire.CALL, 7, 0, wire.prepare(b"hold_async", b"\x90")))
        eventually(lambda: server.statistics().refused["structure"] == 1)
    assert client.echo(1).remote() == 1
    eventually(lambda: server.statistics().sessions == 1)


def test_pickled_arguments_are_arguments_that_do_not_fit(server: RpcServer, key: bytes) -> None:
    """Even an authentic pickle is never loaded."""
    with RawPeer(server.address, key=key) as peer:
        opened = peer.open_session(key)
        peer.send(*opened.sealer.seal(wire.CALL, 1, 0, wire.prepare(b"submit", pickle.dumps(Bomb()))))
        frames = peer.receive(10)
        assert frames is not None
        answer = opened.opener.open(frames)
        assert answer.kind == wire.ERROR
        assert b"arguments" in bytes(answer.body)
    assert TOUCHED == []


def test_half_open_sessions_are_bounded(server: RpcServer, key: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hellos without a following message cannot fill the server."""
    from rpc_local_registry import _server

    monkeypatch.setattr(_server, "_HALF_OPEN_MAX", 3)
    peers = [RawPeer(server.address, key=key) for _ in range(5)]
    try:
        for peer in peers:
            peer.send(*session.ClientHandshake(key, os.urandom(16), "x", TERMS).hello())
        eventually(lambda: server.statistics().refused["half_open"] == 2)
        assert server.statistics().sessions == 3
    finally:
        for peer in peers:
            peer.close()


def heard(link: Link) -> list[bytes | memoryview]:
    """The next message at a listener of the test's own: the peer's routing id and its frames."""
    found: list[list[bytes | memoryview]] = []

    def look() -> bool:
        if link.poll(0.01) & READABLE:
            found.append(link.receive(1))
        return bool(found)

    eventually(look)
    return found[0]


class TestHandshakeErrors:
    """Wrong key, nobody there, another protocol: clear, and in bounded time."""

    def test_a_wrong_key(self, connect: Callable[..., RpcClient], server: RpcServer) -> None:
        """Every call mode, and ``start``; a later call tries again."""
        client = connect(QUICK, key=new_key())
        with pytest.raises(RpcAuthenticationError, match="another key"):
            client.start()
        future = client.echo(1).remote_future()
        with pytest.raises(RpcAuthenticationError):
            future.result(10)
        with pytest.raises(RpcAuthenticationError):
            next(client.numbers(1).remote_streaming())
        assert server.statistics().refused["no_ticket"] >= 3

    def test_a_wrong_key_found_out_while_the_call_is_made(
        self, connect: Callable[..., RpcClient], server: RpcServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """However late a caller is with its call: the error is the call's outcome, not the call's own."""
        client = connect(QUICK, key=new_key())
        core = client._core
        engine = core.live_engine()
        eventually(lambda: engine.failure is not None)
        monkeypatch.setattr(core, "live_engine", lambda: engine)
        before = client.statistics().oneway_lost
        future = client.echo(1).remote_future()
        with pytest.raises(RpcAuthenticationError):
            future.result(5)
        stream = client.numbers(1).remote_streaming()
        with pytest.raises(RpcAuthenticationError):
            next(stream)
        with pytest.raises(RpcAuthenticationError):
            client.echo(1).remote()

        async def later() -> None:
            with pytest.raises(RpcAuthenticationError):
                await client.echo(1).remote_async()

        asyncio.run(later())
        client.echo(1).remote_oneway()
        assert client.statistics().oneway_lost == before + 1

    @pytest.mark.parametrize("address", ["ipc://{}/none", "tcp://127.0.0.1:1"])
    def test_nobody_there(self, tmp_path: Path, key: bytes, address: str, started: float) -> None:
        """Unreachable, not silence."""
        with pytest.raises(RpcUnreachable, match="nobody listens"):
            RpcClient(address.format(tmp_path), key, config=QUICK).start()
        assert time.monotonic() - started < 10

    def test_not_a_server_of_ours(self, key: bytes) -> None:
        """A ROUTER of somebody else, and one that takes the ticket and talks nonsense."""
        router = zmq.Context.instance().socket(zmq.ROUTER)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        try:
            with pytest.raises(RpcAuthenticationError, match="not an rpc_local_registry server"):
                RpcClient(f"tcp://127.0.0.1:{port}", key, config=QUICK).start()
        finally:
            router.close(0)
        with contextlib.closing(Link.bind("tcp://127.0.0.1:0", QUICK, lambda *_: True)) as link:
            client = RpcClient(link.address, key, config=QUICK)
            future = client.method("x")().remote_future()
            identity, _ = heard(link)
            link.send([b"nonsense"], bytes(identity))
            with pytest.raises(RpcAuthenticationError):
                future.result(10)
            assert client.statistics().refused == {"truncated": 1}

    def test_a_raw_listener(self, key: bytes) -> None:
        """A port that accepts and never speaks."""
        with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(RpcConnectionError):
            RpcClient(f"tcp://127.0.0.1:{listener.getsockname()[1]}", key, config=QUICK).start()

    def test_another_protocol_version(
        self, server: RpcServer, connect: Callable[..., RpcClient], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Told at once."""
        original = session.ClientHandshake.__init__

        def future_version(self: Any, *args: Any, **options: Any) -> None:
            original(self, *args, **{**options, "versions": (2, 2)})

        monkeypatch.setattr(session.ClientHandshake, "__init__", future_version)
        with pytest.raises(RpcProtocolMismatch, match="versions 1 to 1; this client speaks versions 2 to 2"):
            connect().start()

    def test_the_server_may_come_later(self, service: Any, key: bytes, tmp_path: Path) -> None:
        """A client that is started first finds the server within the handshake's time."""
        tmp_path.chmod(0o700)
        client = RpcClient(f"ipc://{tmp_path}/s", key)
        future = client.echo(5).remote_future()
        with RpcServer(service, f"ipc://{tmp_path}/s", key):
            assert future.result(10) == 5
            client.close()

    @pytest.mark.parametrize("key", [b"", b"short", "text" * 10, None, bytearray(32)])
    def test_keys_are_checked(self, key: Any, service: Any) -> None:
        """No key, short keys and wrong types are refused by both sides, and never repeated in the message."""
        for make in (lambda: RpcServer(service, "ipc://", key), lambda: RpcClient("ipc:///x/y", key)):
            with pytest.raises(RpcConfigError) as caught:
                make()
            assert "short" not in str(caught.value)
            assert "text" not in str(caught.value)


def test_an_authentic_server_that_breaks_the_protocol(key: bytes) -> None:
    """A client ends its session with RpcProtocolError, and every pending call hears it."""
    with (
        contextlib.closing(Link.bind("tcp://127.0.0.1:0", RpcConfig(), lambda *_: True)) as link,
        contextlib.closing(RpcClient(link.address, key)) as client,
    ):
        future = client.method("x")().remote_future()
        server = session.ServerHandshake(key, "", server_terms(RpcConfig()))
        identity, hello = heard(link)
        answer, opened = server.answer([hello], bytes(16))
        assert opened is not None
        link.send(answer, bytes(identity))
        opened.sealer.seal(wire.PONG)
        link.send(opened.sealer.seal(wire.PONG), bytes(identity))
        with pytest.raises(RpcProtocolError, match="gap"):
            future.result(10)
        with pytest.raises(RpcProtocolError):
            client.method("x")().remote()


class TestAddresses:
    """Where a socket may be."""

    @pytest.mark.parametrize(
        "address",
        [
            "", "ipc", "ipc:// x", "ipc://relative/path", "ipc://@abstract", "ipc:///" + "x" * 107, "tcp://", "tcp://host",
            "tcp://host:99999", "tcp://h:x", "udp://h:1", "inproc://", "ipc:///a\0b", None, 5,
        ],
    )  # fmt: skip
    def test_malformed(self, address: Any, service: Any, key: bytes) -> None:
        """Refused by both sides with a reason."""
        with pytest.raises(RpcAddressError):
            RpcServer(service, address, key)
        with pytest.raises(RpcAddressError):
            RpcClient(address, key)

    @pytest.mark.parametrize("address", ["ipc://", "tcp://*:5", "tcp://127.0.0.1:0"])
    def test_wildcards_cannot_be_connected_to(self, address: str, key: bytes) -> None:
        """A client wants a real address."""
        with pytest.raises(RpcAddressError):
            RpcClient(address, key)

    def test_the_private_folder(self, server: RpcServer, service: Any) -> None:
        """Made 0700 with a random name, and gone after the shutdown."""
        path = Path(server.address.removeprefix("ipc://"))
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        service.gate.set()
        server.shutdown()
        assert not path.parent.exists()

    def test_shared_folders_are_refused(self, tmp_path: Path, service: Any, key: bytes) -> None:
        """A folder that others may enter holds no socket of ours; a missing one is made 0700."""
        tmp_path.chmod(0o755)
        with pytest.raises(RpcAddressError, match="0755"):
            RpcServer(service, f"ipc://{tmp_path}/s", key).start()
        with RpcServer(service, f"ipc://{tmp_path}/new/s", key):
            assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700

    def test_a_live_address_is_not_stolen(
        self, server: RpcServer, client: RpcClient, service_type: Any, key: bytes
    ) -> None:
        """Neither within one process nor from another; the first server never notices."""
        with pytest.raises(RpcAddressInUse):
            RpcServer(service_type(), server.address, key).start()
        script = (
            "import sys\nfrom rpc_local_registry import *\nclass W: pass\n"
            "try:\n RpcServer(W(), sys.argv[1], b'k'*32).start()\nexcept RpcAddressInUse: sys.exit(7)"
        )
        done = subprocess.run([sys.executable, "-c", script, server.address], timeout=60)
        assert done.returncode == 7
        assert client.echo(1).remote() == 1

    def test_tcp_addresses_too(self, service: Any, service_type: Any, key: bytes) -> None:
        """The port is resolved, and taken ports are refused."""
        with RpcServer(service, "tcp://127.0.0.1:0", key) as server:
            assert not server.address.endswith(":0")
            with pytest.raises(RpcAddressInUse):
                RpcServer(service_type(), server.address, key).start()

    def test_a_dead_socket_file_is_taken_over_and_others_are_not(
        self, tmp_path: Path, service: Any, key: bytes
    ) -> None:
        """What a killed server left behind is replaced; a plain file never is."""
        tmp_path.chmod(0o700)
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(tmp_path / "s"))
        with RpcServer(service, f"ipc://{tmp_path}/s", key) as server, RpcClient(server.address, key) as client:
            assert client.echo(1).remote() == 1
        assert not (tmp_path / "s").exists()
        (tmp_path / "file").write_text("mine")
        with pytest.raises(RpcAddressInUse, match="not a socket"):
            RpcServer(service, f"ipc://{tmp_path}/file", key).start()
        assert (tmp_path / "file").read_text() == "mine"


def test_the_source_holds_no_loader_of_code() -> None:
    """No pickle, eval, exec, marshal or shell anywhere in the package."""
    import rpc_local_registry

    words = ("import pickle", "eval(", "exec(", "marshal", "shell=True", "yaml.load", "__import__")
    for path in Path(rpc_local_registry.__file__).parent.glob("*.py"):
        text = path.read_text()
        assert not [word for word in words if word in text], path.name


def test_python_o_keeps_every_check() -> None:
    """Under ``python -O`` forgeries are refused all the same; no guard is an assertion."""
    import ast

    import rpc_local_registry

    for path in Path(rpc_local_registry.__file__).parent.glob("*.py"):
        found = [node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assert)]
        assert found == [], path.name
    tool = Path(__file__).parents[1] / "tools" / "fuzz.py"
    done = subprocess.run(
        [sys.executable, "-O", str(tool), "--count", "2000", "--seed", "1"], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
