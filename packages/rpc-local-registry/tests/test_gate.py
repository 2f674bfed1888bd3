"""Before a client has shown a ticket of the server's key, the transport takes nothing of it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from rpc_local_registry import RpcAuthenticationError, RpcClient, RpcConfig, RpcServer, new_key, rpc_method
from rpc_local_registry._tickets import TICKET_S, TICKETS_MAX, TicketCheck, issue
from rpc_local_registry.testing import eventually

#: ZMTP 3.1's greeting of a client that wants no authentication, and the READY that would follow it.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"
PLAIN_HELLO = b"\x04\x0a\x05HELLO\x01a\x01b"
READY = b"\x04\x1a\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"


class Worker:
    """Answers."""

    @rpc_method(non_blocking=True)
    def ok(self) -> int:
        """Still there."""
        return 7


def greeting(mechanism: bytes) -> bytes:
    """The first 64 bytes of a connection."""
    return GREETING + mechanism.ljust(20, b"\0") + bytes(32)


def dial(address: str) -> socket.socket:
    """A plain connection to a server's socket."""
    if address.startswith("ipc://"):
        made = socket.socket(socket.AF_UNIX)
        made.connect(address.removeprefix("ipc://"))
        return made
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)))


@pytest.fixture(params=["ipc://", "tcp://127.0.0.1:0"])
def server(request: pytest.FixtureRequest, key: bytes) -> Iterator[RpcServer]:
    """A server with a short handshake."""
    with RpcServer(Worker(), request.param, key, config=RpcConfig(handshake_timeout_s=0.5)) as made:
        yield made


def alive(server: RpcServer, key: bytes) -> bool:
    """Whether those who have the key get through."""
    with RpcClient(server.address, key, interface=Worker) as client:
        return bool(client.ok().remote(timeout_s=20) == 7)


class TestTickets:
    """The pure part."""

    def test_a_ticket_proves_the_key(self, key: bytes) -> None:
        """One's own is good, more than once; another key's, altered and malformed ones are not, and are counted."""
        check = TicketCheck(key)
        name, password = (text.encode() for text in issue(key, bytes(16)))
        assert check.admits(name, password, 0.0)
        assert check.admits(name, password, TICKET_S)
        other = [text.encode() for text in issue(new_key(), bytes(16))]
        bad = [(name, other[1]), (name[:-1] + b"1", password), (b"", b""), (name, b""), (name, b"\xff"),
               (b"\xff" * 32, password), (name.upper() + b"0", password), (bytes(32), password)]  # fmt: skip
        assert not any(check.admits(*each, 0.0) for each in bad)
        assert check.refused == len(bad)

    def test_a_ticket_is_of_one_length(self, key: bytes) -> None:
        """Whoever has the key cannot have more remembered than that."""
        check = TicketCheck(key)
        tickets = [[text.encode() for text in issue(key, bytes(size))] for size in (0, 15, 17, 1000)]
        assert not any(check.admits(*ticket, 0.0) for ticket in tickets)
        assert check.refused == len(tickets)

    def test_the_oldest_is_forgotten_first(self, key: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
        """What is remembered has its age; what was forgotten is new again."""
        monkeypatch.setattr("rpc_local_registry._tickets.TICKETS_MAX", 4)
        check = TicketCheck(key)
        tickets = [[text.encode() for text in issue(key, bytes([n]) * 16)] for n in range(5)]
        assert all(check.admits(*ticket, 0.0) for ticket in tickets)
        assert [check.admits(*ticket, TICKET_S + 1.0) for ticket in tickets[1:]] == [False] * 4
        assert check.admits(*tickets[0], TICKET_S + 1.0)

    def test_a_ticket_grows_old(self, key: bytes) -> None:
        """Whoever copied it off the network has it for a minute."""
        check = TicketCheck(key)
        ticket = [text.encode() for text in issue(key, bytes(16))]
        assert check.admits(*ticket, 5.0)
        assert not check.admits(*ticket, 5.1 + TICKET_S)
        assert check.refused == 1

    def test_memory_is_bounded(self, key: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
        """Only good tickets are remembered, and only so many."""
        monkeypatch.setattr("rpc_local_registry._tickets.TICKETS_MAX", 4)
        check = TicketCheck(key)
        for _ in range(9):
            assert check.admits(*(text.encode() for text in issue(key, os.urandom(16))), 0.0)
            check.admits(os.urandom(16).hex().encode(), b"x", 0.0)
        assert len(check._first_seen_s) == 4
        assert TICKETS_MAX >= 1024


#: In a process of its own, so that only the server's memory is measured: prints the address, then the growth of its peak.
SERVE = """
import resource, sys
from rpc_local_registry import RpcConfig, RpcServer, rpc_method
class Worker:
    @rpc_method(non_blocking=True)
    def ok(self) -> int:
        return 7
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
key = bytes.fromhex(sys.argv[2])
with RpcServer(Worker(), sys.argv[1], key, config=RpcConfig(message_bytes_max=1 << 20, handshake_timeout_s=2.0)) as server:
    print(server.address, flush=True)
    before = peak()
    sys.stdin.readline()
    print(peak() - before, server.statistics().refused["no_ticket"], flush=True)
"""


@pytest.mark.parametrize("address", ["ipc://", "tcp://127.0.0.1:0"])
@pytest.mark.parametrize("mechanism", [b"NULL", b"PLAIN"])
def test_strangers_fill_no_memory(key: bytes, address: str, mechanism: bytes) -> None:
    """200 MiB as frames of one message that never ends, then as many messages: less than 4 MiB stays, of 20 connections too."""
    command = [sys.executable, "-c", SERVE, address, key.hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        where = child.stdout.readline().strip()
        frame = b"\x03" + (65536).to_bytes(8, "big") + bytes(65536)
        for more in (frame, b"\x02" + frame[1:]):
            for connection in [dial(where) for _ in range(10)]:
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(5)
                    opening = READY if mechanism == b"NULL" else PLAIN_HELLO
                    connection.sendall(greeting(mechanism) + opening)
                    for _ in range(320):
                        connection.sendall(more)
        with RpcClient(where, key, interface=Worker) as client:
            assert client.ok().remote(timeout_s=20) == 7
        child.stdin.write("\n")
        child.stdin.flush()
        growth_kib, turned_away = map(int, child.stdout.readline().split())
        assert growth_kib < 4096, f"{growth_kib} KiB"
        assert turned_away >= (20 if mechanism == b"PLAIN" else 0)


def test_idle_connections_are_closed(server: RpcServer, key: bytes) -> None:
    """500 that say nothing or stop in the middle are gone after the handshake's time; a client gets in meanwhile."""
    idle = [dial(server.address) for _ in range(500)]
    try:
        for connection in idle[:50]:
            connection.sendall(greeting(b"PLAIN"))
        assert alive(server, key)
        ends = time.monotonic() + 20
        for connection in idle:
            connection.settimeout(max(0.1, ends - time.monotonic()))
            with contextlib.suppress(ConnectionResetError):
                while connection.recv(4096):
                    pass
        assert alive(server, key)
    finally:
        for connection in idle:
            connection.close()


def test_the_wrong_key_is_told_at_once(server: RpcServer) -> None:
    """Not after the handshake's time: the transport says that the ticket is not good."""
    client = RpcClient(server.address, new_key(), interface=Worker, config=RpcConfig(handshake_timeout_s=1e6))
    with pytest.raises(RpcAuthenticationError, match="turned this client away"):
        client.start()
    assert server.statistics().refused["no_ticket"] == 1
    client.close()


def test_somebody_elses_gate_does_not_matter(key: bytes, tmp_path: Path) -> None:
    """A program with a ZAP handler of its own in pyzmq's shared context, which turns everybody away; both work side by side."""
    tmp_path.chmod(0o700)
    context = zmq.Context.instance()
    with contextlib.closing(context.socket(zmq.REP)) as handler:
        handler.bind("inproc://zeromq.zap.01")
        with RpcServer(Worker(), f"ipc://{tmp_path}/s", key) as first, RpcServer(Worker(), "ipc://", key) as second:
            assert alive(first, key)
            assert alive(second, key)
        assert handler.poll(0) == 0
    eventually(lambda: not (tmp_path / "s").exists())
