"""Starts, stops, deaths, leaks, and what the package needs to be imported."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from rpc_local_registry import (
    RpcClient,
    RpcConfig,
    RpcPeerDead,
    RpcServer,
    RpcServerStopped,
    StreamSource,
    _registry,
    rpc_method,
)
from rpc_local_registry._streams import Inbox
from rpc_local_registry.testing import ConformanceWorker, eventually, open_pair, resources

CHILD = textwrap.dedent(
    """
    import sys, threading, time
    from rpc_local_registry import *
    class W:
        @rpc_method(non_blocking=True)
        def echo(self, value: int) -> int: return value
        @rpc_method
        def hold(self) -> None: time.sleep(60)
        @rpc_method(streaming=True, non_blocking=True)
        def responses(self) -> StreamSource[int]:
            self.source = StreamSource()
            self.source.push(1)
            return self.source
    config = RpcConfig(heartbeat_s=0.1, peer_timeout_s=0.5)
    with RpcServer(W(), sys.argv[1], bytes.fromhex(sys.argv[2]), config=config) as server:
        print(server.address, flush=True)
        time.sleep(60)
    """
)
ALERT = RpcConfig(heartbeat_s=0.1, peer_timeout_s=0.5)


@pytest.fixture(params=["ipc://", "tcp://127.0.0.1:0"])
def child(request: pytest.FixtureRequest, key: bytes) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own, and its address."""
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, request.param, key.hex()], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    yield process, process.stdout.readline().strip()
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_server_fails_everything(child: tuple[subprocess.Popen[str], str], key: bytes, how: int) -> None:
    """Killed or frozen: every pending call, stream and one-way window ends with RpcPeerDead; ``on_lost`` is told once."""
    process, address = child
    lost: list[Exception] = []
    with RpcClient(address, key, config=ALERT, on_lost=lost.append) as client:
        futures = [client.hold().remote_future() for _ in range(3)]
        stream = client.responses().remote_streaming()
        assert next(stream) == 1
        os.kill(process.pid, how)
        for future in futures:
            assert isinstance(future.exception(20), RpcPeerDead)
        with pytest.raises(RpcPeerDead):
            next(stream)
        with pytest.raises(RpcPeerDead):
            client.echo(1).remote()

        async def later() -> None:
            with pytest.raises(RpcPeerDead):
                await client.echo(1).remote_async()

        asyncio.run(later())
        assert [type(error) for error in lost] == [RpcPeerDead]
        assert client.statistics().pending == 0


def test_a_dead_client_is_noticed(service: Any, key: bytes) -> None:
    """Its coroutines are cancelled, its streams end, and the server is told who it was."""
    script = textwrap.dedent(
        """
        import sys, time
        from rpc_local_registry import *
        client = RpcClient(sys.argv[1], bytes.fromhex(sys.argv[2]), name="doomed")
        client.hold_async().remote_future()
        stream = client.responses().remote_streaming()
        next(stream)
        print("ready", flush=True)
        time.sleep(60)
        """
    )
    lost = []
    with RpcServer(service, "ipc://", key, config=ALERT, on_peer_lost=lost.append) as server:
        process = subprocess.Popen(
            [sys.executable, "-c", script, server.address, key.hex()], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        eventually(lambda: service.source is not None)
        service.source.push(1)
        assert process.stdout.readline() == "ready\n"
        process.kill()
        process.wait()
        process.stdout.close()
        eventually(lambda: lost)
        eventually(lambda: service.closed == ["hold_async"] and service.source.cancelled)
        assert (lost[0].name, lost[0].reason) == ("doomed", "connection lost")
        assert server.statistics().pending == 0
        assert service.source.push(2) is False


@pytest.mark.parametrize("address", ["ipc://", "tcp://127.0.0.1:0", "inproc://cycles"])
def test_many_cycles_leak_nothing(address: str, key: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 servers and clients made, used and stopped leave no descriptor, thread or socket file."""
    cycles = 340 if address == "ipc://" else 330
    # A folder of its own, with a short name: other processes make and remove theirs in the common one meanwhile.
    own = tempfile.mkdtemp(prefix="c-")
    monkeypatch.setattr(tempfile, "tempdir", own)

    def cycle() -> None:
        with RpcServer(ConformanceWorker(), address, key) as server, RpcClient(server.address, key) as client:
            assert client.add(1, 2).remote() == 3
            client.note(1).remote_oneway()

    cycle()
    gc.collect()
    before = resources()
    for _ in range(cycles):
        cycle()
    gc.collect()

    def settled() -> bool:
        now = resources()
        return now.descriptors <= before.descriptors and now.threads <= before.threads

    eventually(settled)
    left = sorted(path.name for path in Path(own).iterdir())
    assert not left
    os.rmdir(own)


def test_a_port_is_free_after_the_shutdown(key: bytes) -> None:
    """The next server of the same address starts at once."""
    with RpcServer(ConformanceWorker(), "tcp://127.0.0.1:0", key) as server:
        address = server.address
    for _ in range(20):
        with RpcServer(ConformanceWorker(), address, key), RpcClient(address, key) as client:
            assert client.add(1, 2).remote() == 3


def test_all_kinds_of_calls_leak_nothing(no_leaks: None) -> None:
    """Threads, loops, streams and lanes are gone with their server."""
    with open_pair(local=False) as pair:
        list(pair.client.count(10).remote_streaming())
        asyncio.run(_await(pair.client))
        pair.client.responses().remote_streaming().cancel()


async def _await(client: RpcClient) -> None:
    assert await client.later(1).remote_async() == 1
    assert [n async for n in client.count_later(3).remote_streaming()] == [0, 1, 2]


def test_a_forgotten_client_closes_itself(server: RpcServer, key: bytes, no_leaks: None) -> None:
    """Dropped without ``close``: its thread and socket go with it."""
    client = RpcClient(server.address, key)
    client.echo(1).remote()
    del client
    gc.collect()
    eventually(lambda: server.statistics().sessions == 0)


def test_close_fails_what_is_pending(server: RpcServer, service: Any, key: bytes) -> None:
    """Futures and streams of a closed client end; nobody waits for ever; closing twice is quiet."""
    from rpc_local_registry import RpcClosed

    client = RpcClient(server.address, key)
    future = client.hold().remote_future()
    stream = client.responses().remote_streaming()
    assert service.inside.acquire(timeout=10)
    client.close()
    client.close()
    assert isinstance(future.exception(10), RpcClosed)
    with pytest.raises(RpcClosed):
        next(stream)
    with pytest.raises(RpcClosed):
        client.echo(1).remote()


def test_close_does_not_wait_for_an_absent_server(key: bytes, tmp_path: Path, started: float) -> None:
    """With messages unsent and nobody there, ``close`` returns within its drain time."""
    client = RpcClient(f"ipc://{tmp_path}/none", key)
    client.note(1).remote_oneway()
    client.close()
    assert time.monotonic() - started < 5


def test_a_stopped_server_says_so_before_it_leaves(key: bytes) -> None:
    """The client hears RpcServerStopped, not a broken connection, every time."""
    for _ in range(30):
        with RpcServer(ConformanceWorker(), "ipc://", key) as server, RpcClient(server.address, key) as client:
            stream = client.responses().remote_streaming()
            client.add(1, 2).remote()
            server.shutdown()
            with pytest.raises(RpcServerStopped):
                next(stream)


class Speaker:
    """Says a few things from another thread, both ways that a loop has."""

    def __init__(self) -> None:
        self.source: StreamSource[int] = StreamSource()
        self.opened = asyncio.Event()
        self.said = threading.Event()

    @rpc_method(streaming=True, non_blocking=True)
    def pushed(self) -> StreamSource[int]:
        return self.source

    @rpc_method(streaming=True, non_blocking=True)
    async def generated(self) -> AsyncIterator[int]:
        for number in range(20):
            yield number
        self.said.set()
        await self.opened.wait()


def test_what_was_handed_over_before_a_shutdown_arrives_before_the_end(key: bytes) -> None:
    """The items of a push stream and of a generator, then RpcServerStopped; as on the local path, every time."""
    for _ in range(30):
        speaker = Speaker()
        with RpcServer(speaker, "ipc://", key) as server, RpcClient(server.address, key) as client:
            streams = [client.pushed().remote_streaming(), client.generated().remote_streaming()]
            assert speaker.said.wait(20)
            for number in range(20):
                speaker.source.push(number)
            server.shutdown()
            for stream in streams:
                assert [next(stream) for _ in range(20)] == list(range(20))
                with pytest.raises(RpcServerStopped):
                    next(stream)


def test_a_stream_that_was_closed_before_a_shutdown_arrives_whole(key: bytes) -> None:
    """Far more items than the consumer's credit, the end, and at once the shutdown: nothing of it is lost."""
    speaker, config = Speaker(), RpcConfig(drain_s=20.0, stream_credit=8)
    with (
        RpcServer(speaker, "ipc://", key, config=config) as server,
        RpcClient(server.address, key, config=config) as client,
    ):
        got: list[int] = []
        ends: list[object] = []
        client.pushed().remote_streaming().deliver_to(got.append, ends.append)
        eventually(lambda: server.statistics().streams == 1)
        for number in range(500):
            speaker.source.push(number)
        speaker.source.close()
        server.shutdown()
        eventually(lambda: bool(ends))
        assert got == list(range(500))
        assert isinstance(ends[0], RpcServerStopped)


def test_inbox_hands_over_between_threads() -> None:
    """Many items from several threads to one consumer, none lost."""
    inbox: Inbox[int] = Inbox()
    threads = [threading.Thread(target=lambda: [inbox.put(n) for n in range(1000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    got = [inbox.get(10) for _ in range(4000)]
    for thread in threads:
        thread.join()
    assert sorted(got) == sorted(list(range(1000)) * 4)
    assert inbox.close()
    assert not inbox.close()
    assert inbox.put(1) is False


@pytest.mark.parametrize("blocked", ["numpy", "nvtx", "cryptography"])
def test_import_without_optional_libraries(blocked: str) -> None:
    """The package imports and serves without them; arrays then are an error, not a crash."""
    script = textwrap.dedent(
        f"""
        import sys
        sys.modules[{blocked!r}] = None
        from rpc_local_registry import *
        class W:
            @rpc_method(non_blocking=True)
            def echo(self, value: dict[str, list[int]]) -> dict[str, list[int]]: return value
        with RpcServer(W(), "ipc://", b"k" * 32) as s, RpcClient(s.address, b"k" * 32, interface=W) as c:
            assert c.echo({{"a": [1]}}).remote() == {{"a": [1]}}
            try:
                c.echo(object()).remote()
            except RpcArgumentError:
                print("fine")
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "fine\n", done.stderr


def test_the_core_imports_no_socket_library() -> None:
    """Only the adapter files name the library they are named after."""
    import rpc_local_registry

    for path in Path(rpc_local_registry.__file__).parent.glob("*.py"):
        lines = [
            line.split()[1].split(".")[0]
            for line in path.read_text().splitlines()
            if line.lstrip().startswith(("import ", "from "))
        ]
        for library in ("zmq", "numpy", "nvtx", "asyncio", "cryptography"):
            if path.stem != "testing":
                assert (library in lines) == (path.stem == f"_{library}"), (path.name, library)


def test_fuzz_smoke() -> None:
    """The fuzzer runs, holds, and says what it ran."""
    tool = Path(__file__).parents[1] / "tools" / "fuzz.py"
    done = subprocess.run([sys.executable, str(tool), "--count", "100000"], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "100000 messages, seed" in done.stdout
    assert "held" in done.stdout


def test_the_fuzzer_can_fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With the MAC check planted out it finds a forgery."""
    import importlib.util

    tool = Path(__file__).parents[1] / "tools" / "fuzz.py"
    spec = importlib.util.spec_from_file_location("fuzz_tool", tool)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz_tool"] = module
    try:
        spec.loader.exec_module(module)
        monkeypatch.setattr("hmac.compare_digest", lambda left, right: True)
        assert module.main(["--count", "2000", "--seed", "1"]) == 1
    finally:
        del sys.modules["fuzz_tool"]
    assert "accepted" in capsys.readouterr().err


class Echo:
    """Gives back."""

    @rpc_method(non_blocking=True)
    def echo(self, value: int) -> int:
        """The same."""
        return value


class Stop(KeyboardInterrupt):
    """An interrupt."""


def refused(_: threading.Thread) -> None:
    """No thread can be had."""
    raise RuntimeError("can't start new thread")


def interrupted(thread: threading.Thread) -> None:
    """As the standard library's ``start`` when a signal's handler raises while it waits for the thread."""
    START(thread)
    try:
        raise Stop("here")
    except Stop:
        raise RuntimeError("release unlocked lock")  # noqa: B904 - as it comes out of a ``with``


START = threading.Thread.start


def io_threads() -> list[str]:
    """This package's, which run."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(("rpc-client", "rpc-server"))]


@pytest.mark.parametrize("address", ["ipc://", "tcp://127.0.0.1:0"])
def test_a_server_whose_thread_cannot_be_started(key: bytes, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is as if nothing had been tried, and can be tried again."""
    server = RpcServer(Echo(), address, key)
    before, registered = resources(), dict(_registry.entries)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError, match="can't start"):
            server.start()
    assert server.address == address
    assert (resources(), _registry.entries) == (before, registered)
    server.shutdown()
    with RpcServer(Echo(), address, key) as other, RpcClient(other.address, key) as client:
        assert client.echo(1).remote(timeout_s=20) == 1


def test_an_interrupted_start_of_a_server_ends_it(key: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt comes out as it was; neither thread nor address stays."""
    server = RpcServer(Echo(), "ipc://", key)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(Stop, match="here"):
            server.start()
    eventually(lambda: not io_threads())
    assert not Path(server.address.removeprefix("ipc://")).exists()
    with pytest.raises(RpcServerStopped):
        server.start()


@pytest.mark.parametrize(("start", "error"), [(refused, RuntimeError), (interrupted, Stop)])
def test_a_client_whose_thread_does_not_start(
    key: bytes, start: Any, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call raises what happened; no thread and no descriptor stays, and the next call opens a session."""
    with RpcServer(Echo(), "ipc://", key) as server:
        client = RpcClient(server.address, key)
        before = resources()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            with pytest.raises(error):
                client.echo(1).remote()
        eventually(lambda: resources() == before)
        assert client.echo(1).remote(timeout_s=20) == 1
        client.close()
