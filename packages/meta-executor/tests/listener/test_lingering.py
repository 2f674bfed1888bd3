"""Places for those who were refused: so many, each for its time, and who waits for one is let in when one has left."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest

from meta_executor.config import HttpConfig
from meta_executor.listener.bounds import Ledger
from meta_executor.listener.entrance import Entrance
from meta_executor.listener.lingering import LINGER_LEAST_S, Lingering
from meta_executor.listener.serving import DEFER_S, listen


class Connections:
    """Ends of refused connections, and which of them were called."""

    def __init__(self) -> None:
        self.ended: list[int] = []

    def end(self, number: int) -> Callable[[], None]:
        return lambda: self.ended.append(number)


def test_a_place_is_taken_from_the_oldest_and_only_after_its_time() -> None:
    """Nobody loses its place before that, nor while there are others."""
    lingering, connections = Lingering(2), Connections()
    assert lingering.enter(connections.end(0), 10.0) and lingering.enter(connections.end(1), 10.1)
    assert not lingering.room(10.0 + LINGER_LEAST_S / 2) and not lingering.enter(connections.end(2), 10.1)
    assert len(lingering) == 2 and connections.ended == []
    assert lingering.enter(connections.end(3), 10.0 + LINGER_LEAST_S)
    assert len(lingering) == 2 and connections.ended == [0]


def test_a_place_is_given_back_once() -> None:
    """Also by one who had none, or whose place was taken from it."""
    lingering, connections = Lingering(1), Connections()
    first, second = connections.end(0), connections.end(1)
    assert lingering.enter(first, 0.0)
    lingering.leave(second)
    assert len(lingering) == 1
    assert lingering.enter(second, LINGER_LEAST_S)
    lingering.leave(first)
    assert len(lingering) == 1 and connections.ended == [0]
    lingering.leave(second)
    lingering.leave(second)
    assert len(lingering) == 0


@pytest.mark.asyncio
async def test_who_waits_for_a_place_goes_on_when_one_leaves() -> None:
    """And not before: here no place can be taken from anybody."""
    lingering, connections = Lingering(1), Connections()
    end = connections.end(0)
    assert lingering.enter(end, asyncio.get_running_loop().time() + 3600.0)
    waiting = asyncio.create_task(lingering.place())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not waiting.done()
    lingering.leave(end)
    await waiting
    assert connections.ended == []


@pytest.mark.asyncio
async def test_who_waits_for_a_place_gets_that_of_one_who_does_not_leave() -> None:
    """After its time, without anything else happening."""
    lingering, connections = Lingering(1), Connections()
    assert lingering.enter(connections.end(0), asyncio.get_running_loop().time())
    await lingering.place()
    assert connections.ended == [0] and len(lingering) == 0


@pytest.mark.asyncio
async def test_a_connection_that_cannot_be_let_in_keeps_nobody_else_out(caplog: pytest.LogCaptureFixture) -> None:
    """Its protocol could not be made: it is closed, that is told, and the next one comes in."""
    let_in = asyncio.Event()
    made: list[asyncio.Protocol] = []

    class Told(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            let_in.set()
            transport.close()  # type: ignore[attr-defined]

    def make() -> asyncio.Protocol:
        made.append(Told())
        if len(made) == 1:
            raise ValueError("no protocol for the first one")
        return made[-1]

    with listen("127.0.0.1", 0) as listener:
        entrance = Entrance(listener, None, make, Ledger(HttpConfig()), handshake_s=60.0)
        for _ in range(2):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(b"x")
            with contextlib.suppress(ConnectionResetError):
                await reader.read()
            writer.close()
        await let_in.wait()
        entrance.close()
        await entrance.wait_closed()
    assert "could not be let in" in caplog.text and "no protocol for the first one" in caplog.text


def test_who_has_said_nothing_waits_in_the_kernel() -> None:
    """Where he costs no descriptor: Linux hands a connection over when its first bytes have come, or after about this time."""
    with listen("127.0.0.1", 0) as listener:
        assert 1 <= listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT) <= 3 * DEFER_S


#: Serves under a limit of descriptors, and answers nobody before a line of its standard input. Where ``left`` is not 0 it opens
#: files until so many descriptors are left, says when that was too few, and closes them with that line.
PROGRAM = """
import asyncio, os, resource, sys, uvloop
limit, left = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
from meta_executor.config import HttpConfig
from meta_executor.listener.bounds import Ledger
from meta_executor.listener.descriptors import within_descriptors
from meta_executor.listener.serving import listen, server_of

def taken():
    files = []
    try:
        while left:
            files.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        for _ in range(left):
            os.close(files.pop())
    return files

async def main():
    http = within_descriptors(HttpConfig())
    go = asyncio.Event()

    async def app(scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        await go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    listener = listen("127.0.0.1", 0)
    worded = lambda status, code, message: code.encode()
    ledger = Ledger(http)
    server = server_of(app, http, ledger, body_bytes_max=10**6, worded=worded, loop="uvloop")
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    files = taken()
    print(listener.getsockname()[1], http.connections_per_client_max, flush=True)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while left and not ledger.refused["not_accepted"]:
        await asyncio.sleep(0.01)
    print("goes on", flush=True)
    await reader.readline()
    for file in files:
        os.close(file)
    go.set()
    await reader.read()
    server.should_exit = True
    await serving

asyncio.Runner(loop_factory=uvloop.new_event_loop).run(main())
"""
REQUEST = b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 3000\r\nconnection: close\r\n\r\n" + b"x" * 3000


def statuses(*, limit: int, left: int, clients: int, answered_first: bool) -> tuple[list[int], int]:
    """Status of what each of many clients is told, and how many of one address are let in at once.

    All of them ask before the first of them is answered; one who is told nothing fails.
    """
    command = [sys.executable, "-c", PROGRAM, str(limit), str(left)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None and server.stdout is not None
        port, let_in = map(int, server.stdout.readline().split())
        asking = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(clients)]
        for one in asking:
            one.sendall(REQUEST)
        told = [answer(one) for one in asking[let_in:]] if answered_first else []
        assert server.stdout.readline() == "goes on\n"
        server.stdin.write("go\n")
        server.stdin.flush()
        told += [answer(one) for one in (asking[:let_in] if answered_first else asking)]
        server.stdin.close()
        assert server.wait(30) == 0
    return told, let_in


def answer(one: socket.socket) -> int:
    """The status of a whole answer, behind which the connection ends."""
    with one:
        got = b""
        while part := one.recv(4096):
            got += part
    head, _, body = got.partition(b"\r\n\r\n")
    assert body in (b"ok", b"too_many_connections") and (b"retry-after: 1" in head) == (body != b"ok"), got
    return int(head.split()[1])


def test_with_few_descriptors_everybody_is_answered_or_told_why_not() -> None:
    """A soft and hard limit of 64, 200 clients of one address at once: as many as are let in are answered, each other one gets
    429 and no cut connection, though there are places for six of them at a time."""
    told, let_in = statuses(limit=64, left=0, clients=200, answered_first=True)
    assert let_in < 20
    assert sorted(told) == [200] * let_in + [429] * (200 - let_in)


def test_who_comes_when_no_descriptor_is_left_is_answered_when_one_is() -> None:
    """Nothing may be opened any more after the first few: those behind them wait, and are not cut."""
    told, let_in = statuses(limit=256, left=8, clients=30, answered_first=False)
    assert let_in > 30
    assert told == [200] * 30
