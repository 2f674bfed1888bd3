"""What people relied on and did not get elsewhere: shared settings, memory, farewells, states, forks, names, clocks, bounds."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rpc_local_registry import (
    Loan,
    RpcAddressError,
    RpcArgumentError,
    RpcAuthenticationError,
    RpcBackpressure,
    RpcClient,
    RpcClosed,
    RpcConfig,
    RpcConfigError,
    RpcConnectionError,
    RpcMethodNotFound,
    RpcProtocolError,
    RpcProtocolMismatch,
    RpcRemoteError,
    RpcServer,
    RpcServerStopped,
    RpcTimeout,
    RpcUnreachable,
    StreamSource,
    new_key,
    rpc_method,
)
from rpc_local_registry import _wire as wire
from rpc_local_registry._mac import AES_GMAC, BLAKE2B, HMAC_SHA256, MACS
from rpc_local_registry.testing import RawPeer, eventually

Connect = Callable[..., RpcClient]


class TestSharedSettings:
    """What both sides use is agreed."""

    @pytest.mark.parametrize(("ours", "theirs"), [(256, 64), (64, 256), (1, 1000), (1000, 1)])
    @pytest.mark.parametrize("name", ["numbers", "numbers_async"])
    def test_stream_credit(self, service: Any, key: bytes, name: str, ours: int, theirs: int) -> None:
        """Whatever each side says, a stream arrives whole; the client's number alone counts."""
        with (
            RpcServer(service, "ipc://", key, config=RpcConfig(stream_credit=theirs)) as server,
            RpcClient(server.address, key, config=RpcConfig(stream_credit=ours)) as client,
        ):
            stream = client.method(name)(600).remote_streaming(timeout_s=20)
            eventually(lambda: len(service.log) >= min(ours, 600))
            assert len(service.log) <= ours + 1
            assert list(stream) == list(range(600))

    @pytest.mark.parametrize("name", ["blobs", "blobs_async", "blobs_pushed"])
    def test_stream_bytes(self, key: bytes, name: str) -> None:
        """A stream of large items stops at the consumer's bytes, not only at its items; an item above it still comes."""

        class Worker:
            def __init__(self) -> None:
                self.made = 0

            @rpc_method(streaming=True)
            def blobs(self, count: int) -> Iterator[bytes]:
                """Generator."""
                for self.made in range(1, count + 1):
                    yield bytes(100_000)

            @rpc_method(streaming=True)
            async def blobs_async(self, count: int) -> Any:
                """Async generator."""
                for self.made in range(1, count + 1):
                    yield bytes(100_000)

            @rpc_method(streaming=True, non_blocking=True)
            def blobs_pushed(self, count: int) -> StreamSource[bytes]:
                """Push."""
                source: StreamSource[bytes] = StreamSource()
                for self.made in range(1, count + 1):
                    source.push(bytes(100_000))
                source.close()
                return source

        for window, in_flight in ((350_000, 4), (1, 1)):
            worker = Worker()
            with (
                RpcServer(worker, "ipc://", key) as server,
                RpcClient(server.address, key, config=RpcConfig(stream_bytes=window)) as client,
            ):
                stream = client.method(name)(40).remote_streaming(timeout_s=20)
                inbox: Any = stream._inbox  # type: ignore[attr-defined]
                eventually(lambda inbox=inbox, wanted=in_flight: len(inbox) >= wanted)
                time.sleep(0.05)
                assert len(inbox) == in_flight
                assert len(list(stream)) == 40

    def test_pending_bounds_are_the_smaller_ones(self, service: Any, key: bytes) -> None:
        """A client learns the server's bounds and refuses in its own process, before anything is sent."""
        limits = RpcConfig(pending_calls_max=2, pending_bytes_max=5000)
        with RpcServer(service, "ipc://", key, config=limits) as server, RpcClient(server.address, key) as client:
            futures = [client.hold().remote_future() for _ in range(2)]
            with pytest.raises(RpcBackpressure, match="2 calls"):
                client.echo(1).remote()
            service.gate.set()
            for future in futures:
                future.result(10)
            with pytest.raises(RpcBackpressure, match="exceed 5000"):
                client.echo(b"x" * 6000).remote()
            assert server.statistics().refused["structure"] == 0
            assert client.echo(1).remote() == 1

    def test_a_server_bounds_bytes_by_itself(self, service: Any, key: bytes) -> None:
        """Also against a client that does not keep to what it was told."""
        config = RpcConfig(pending_bytes_max=5000)
        with RpcServer(service, "ipc://", key, config=config) as server, RawPeer(server.address, key=key) as peer:
            opened = peer.open_session(key)
            for call_id in range(1, 4):
                peer.send(
                    *opened.sealer.seal(wire.CALL, call_id, 0, wire.prepare(b"hold", b"\x91\xda\x07\xd0" + b"x" * 2000))
                )
            frames = peer.receive(10)
            assert frames is not None
            answer = opened.opener.open(frames)
            assert (answer.kind, answer.call_id) == (wire.ERROR, 3)
            assert b"busy" in bytes(answer.body)
            service.gate.set()

    @pytest.mark.parametrize(
        ("ours", "theirs", "chosen"),
        [
            ((HMAC_SHA256,), (BLAKE2B, HMAC_SHA256), HMAC_SHA256),
            ((BLAKE2B,), (AES_GMAC, BLAKE2B, HMAC_SHA256), BLAKE2B),
            ((AES_GMAC, HMAC_SHA256), (AES_GMAC,), AES_GMAC),
        ],
    )
    def test_codes(self, service: Any, key: bytes, ours: Any, theirs: Any, chosen: str) -> None:
        """The session's code is one that both allow; arrays, streams and one-way calls work under each."""
        if AES_GMAC not in MACS and chosen == AES_GMAC:
            pytest.skip("cryptography is not installed")
        with (
            RpcServer(service, "ipc://", key, config=RpcConfig(macs=theirs)) as server,
            RpcClient(server.address, key, config=RpcConfig(macs=ours)) as client,
        ):
            assert client.statistics().mac == chosen
            for size in (1, 1000, 100_000):
                np.testing.assert_array_equal(client.echo(np.arange(size)).remote(), np.arange(size))
            assert list(client.numbers(100).remote_streaming()) == list(range(100))
            client.note(1).remote_oneway()
            assert client.echo(1).remote() == 1

    def test_no_common_code(self, service: Any, key: bytes) -> None:
        """Told at once, with both sides' names."""
        with (
            RpcServer(service, "ipc://", key, config=RpcConfig(macs=(HMAC_SHA256,))) as server,
            contextlib.closing(RpcClient(server.address, key, config=RpcConfig(macs=(BLAKE2B,)))) as client,
            pytest.raises(RpcProtocolMismatch, match=r"hmac-sha256; this client .* blake2b"),
        ):
            client.start()

    @pytest.mark.parametrize("macs", [(), ("rot13",), [HMAC_SHA256]])
    def test_codes_are_checked(self, macs: Any) -> None:
        """Named at construction."""
        with pytest.raises(RpcConfigError, match="macs"):
            RpcConfig(macs=macs)

    def test_without_cryptography(self) -> None:
        """The package works without the library; the floor or BLAKE2b is taken."""
        script = textwrap.dedent(
            """
            import sys
            sys.modules["cryptography"] = None
            from rpc_local_registry import *
            class W:
                @rpc_method(non_blocking=True)
                def echo(self, value: int) -> int: return value
            with RpcServer(W(), "ipc://", b"k" * 32) as s, RpcClient(s.address, b"k" * 32) as c:
                print(c.echo(1).remote(), c.statistics().mac)
            """
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
        assert done.stdout.split()[0] == "1", done.stderr
        assert done.stdout.split()[1] in (HMAC_SHA256, BLAKE2B)


class TestMemory:
    """A call owns its bytes when it returns."""

    @pytest.mark.parametrize("elements", [10, 1000, 20_000])
    def test_one_array_for_many_oneway_calls(
        self, client: RpcClient, service: Any, request_type: Any, elements: int
    ) -> None:
        """Each call arrives with the values it was made with, whatever is written into the array afterwards."""
        array = np.zeros(elements, np.int64)
        for number in range(300):
            array[:] = number
            client.submit(request_type(number, array)).remote_oneway()
        array[:] = -1
        eventually(lambda: len(service.submitted) == 300)
        assert [(r.request_id, int(r.token_ids[0]), int(r.token_ids[-1])) for r in service.submitted] == [
            (n, n, n) for n in range(300)
        ]

    def test_every_verb(self, client: RpcClient) -> None:
        """Futures, coroutines and streams likewise."""
        array = np.arange(50_000)
        future = client.echo(array).remote_future()
        array[:] = 0
        np.testing.assert_array_equal(future.result(20), np.arange(50_000))

        async def run() -> None:
            array[:] = 7
            task = asyncio.create_task(client.echo(array).remote_async())
            await asyncio.sleep(0)
            array[:] = 8
            assert set(await task) == {7}

        asyncio.run(run())

    @pytest.mark.parametrize("kind", ["inline", "lane", "coroutine", "generator"])
    def test_results_of_a_handler_that_goes_on_writing(self, key: bytes, kind: str) -> None:
        """What a handler returned is what arrives."""
        array = np.zeros(30_000, np.int64)

        class Worker:
            @rpc_method(non_blocking=True)
            def inline(self, value: int) -> Any:
                """Plain."""
                array[:] = value
                return array

            @rpc_method(concurrency_max=1)
            def lane(self, value: int) -> Any:
                """On a lane."""
                array[:] = value
                return array

            @rpc_method
            async def coroutine(self, value: int) -> Any:
                """On the loop."""
                array[:] = value
                return array

            @rpc_method(streaming=True)
            def generator(self, stop: int) -> Iterator[Any]:
                """Items of one memory."""
                for value in range(stop):
                    array[:] = value
                    yield array

        with RpcServer(Worker(), "ipc://", key) as server, RpcClient(server.address, key) as client:
            if kind == "generator":
                got = list(client.generator(50).remote_streaming())
            else:
                futures = [client.method(kind)(n).remote_future() for n in range(50)]
                got = [future.result(20) for future in futures]
        assert [set(item.tolist()) for item in got] == [{n} for n in range(50)]

    @pytest.mark.parametrize("verb", ["remote", "remote_oneway", "remote_future"])
    @pytest.mark.parametrize("elements", [10, 100_000])
    def test_lent_memory(self, client: RpcClient, service: Any, request_type: Any, verb: str, elements: int) -> None:
        """Travels uncopied; the loan is told free when nobody, the transport included, holds it any more."""
        freed = threading.Event()
        array = np.arange(elements)
        loan = Loan(array, on_free=freed.set)
        assert loan.free
        outcome = getattr(client.submit(request_type(1, loan.view())), verb)()
        if verb == "remote_future":
            outcome.result(10)
            del outcome
        eventually(lambda: service.submitted)
        assert loan.wait_free(20)
        assert freed.wait(20)
        array[:] = 0
        np.testing.assert_array_equal(service.submitted[0].token_ids, np.arange(elements))

    def test_a_loan_is_kept_by_whatever_was_made_from_it(self) -> None:
        """Slices and reshapes of a view count; arithmetic has memory of its own."""
        loan = Loan(np.arange(12))
        view = loan.view()
        piece = view.reshape(3, 4)[1, 1:3]
        total = view + 1
        del view
        assert not loan.free
        assert not loan.wait_free(0.01)
        del piece
        assert loan.wait_free(10)
        assert total.sum() == 78
        assert not loan.view().flags.writeable

    def test_a_loan_of_a_result(self, key: bytes) -> None:
        """A handler lends its result; it hears when the memory is free."""
        freed = threading.Event()
        memory = np.arange(100_000)

        class Worker:
            @rpc_method(non_blocking=True)
            def get(self) -> Any:
                """Lend."""
                return Loan(memory, on_free=freed.set).view()

        with RpcServer(Worker(), "ipc://", key) as server, RpcClient(server.address, key) as client:
            np.testing.assert_array_equal(client.get().remote(), memory)
            assert freed.wait(20)

    def test_on_the_local_path_a_loan_is_the_worker_s(self, connect: Connect, service: Any, request_type: Any) -> None:
        """The worker keeps the view: the loan is free when it lets go."""
        client = connect(fast_path=True)
        loan = Loan(np.arange(10))
        client.submit(request_type(1, loan.view())).remote()
        assert not loan.free
        service.submitted.clear()
        gc.collect()
        assert loan.wait_free(10)

    @pytest.mark.parametrize("bad", [np.array([object()]), np.arange(20)[::2], np.zeros((3, 4)).T])
    def test_what_cannot_be_lent(self, bad: Any) -> None:
        """Said at once."""
        with pytest.raises(RpcArgumentError):
            Loan(bad)

    def test_lent_memory_that_changes_in_flight_ends_the_session_by_name(
        self, server: RpcServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A failed code inside a session is fatal at once, counted, and told to everybody who waits; no call hangs."""
        client = connect()
        waiting = client.hold().remote_future()
        array = np.arange(100_000)
        loan = Loan(array)
        view = loan.view()
        real_send = type(client._core.engine._link).send  # type: ignore[union-attr]

        def late_change(link: Any, frames: Any, routing_id: bytes = b"") -> bool:
            if len(frames) > 1:
                array[0] += 1
            return bool(real_send(link, frames, routing_id))

        monkeypatch.setattr(type(client._core.engine._link), "send", late_change)  # type: ignore[union-attr]
        with pytest.raises(RpcProtocolError, match="mac"):
            client.echo(view).remote(timeout_s=20)
        with pytest.raises(RpcProtocolError, match="mac"):
            waiting.result(20)
        assert server.statistics().refused["mac"] == 1

    def test_a_result_that_changes_in_flight(self, key: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
        """The same the other way: the client names it, counts it and leaves."""
        memory = np.arange(100_000)

        class Worker:
            @rpc_method(non_blocking=True)
            def get(self) -> Any:
                """Lend."""
                return Loan(memory).view()

        from rpc_local_registry._zmq import Link

        real_send = Link.send

        def late_change(link: Any, frames: Any, routing_id: bytes = b"") -> bool:
            if len(frames) > 1:
                memory[0] += 1
            return real_send(link, frames, routing_id)

        with RpcServer(Worker(), "ipc://", key) as server, RpcClient(server.address, key) as client:
            monkeypatch.setattr(Link, "send", late_change)
            with pytest.raises(RpcProtocolError, match="mac"):
                client.get().remote(timeout_s=20)
            with pytest.raises(RpcProtocolError, match="mac"):
                client.get().remote(timeout_s=20)
            assert client.statistics().refused["mac"] == 1


class TestFarewell:
    """``close`` says what became of everything."""

    def test_what_was_sent_is_done(self, key: bytes) -> None:
        """Slow one-way calls on a lane run before the client leaves."""
        ran: list[int] = []

        class Worker:
            @rpc_method
            def note(self, value: int) -> None:
                """Slow."""
                time.sleep(0.02)
                ran.append(value)

        with RpcServer(Worker(), "ipc://", key) as server:
            client = RpcClient(server.address, key)
            for value in range(20):
                client.note(value).remote_oneway()
            client.close()
            assert ran == list(range(20))
            statistics = client.statistics()
            assert (statistics.oneway_done, statistics.oneway_lost, statistics.pending_bytes) == (20, 0, 0)

    def test_what_was_not_done_in_time_is_counted(
        self, key: bytes, service: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        """``close`` returns within its bound, counts and logs; the server still runs what it has received."""
        with RpcServer(service, "ipc://", key) as server:
            client = RpcClient(server.address, key, config=RpcConfig(flush_s=0.1))
            for value in range(5):
                client.note_slowly(value).remote_oneway()
            eventually(lambda: server.statistics().oneway_calls == 5)
            with caplog.at_level(logging.WARNING):
                client.close()
            assert client.statistics().oneway_lost == 5
            assert "5 one-way calls" in caplog.text
            service.gate.set()
            eventually(lambda: service.log == list(range(5)))
            eventually(lambda: server.statistics().sessions == 0)
            assert server.statistics().oneway_dropped == 0

    def test_a_client_that_vanishes_leaves_its_queue_behind_counted(
        self, key: bytes, service: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        """No goodbye: what waits is dropped, counted and logged."""
        with RpcServer(service, "ipc://", key) as server:
            with RawPeer(server.address, key=key) as peer:
                opened = peer.open_session(key)
                for call_id in range(1, 5):
                    peer.send(*opened.sealer.seal(wire.ONEWAY, call_id, 0, wire.prepare(b"note_slowly", b"\x91\x01")))
                eventually(lambda: server.statistics().oneway_calls == 4)
            with caplog.at_level(logging.WARNING):
                eventually(lambda: server.statistics().oneway_dropped == 3)
            assert "3 one-way calls" in caplog.text
            service.gate.set()

    def test_unreachable_oneway_calls_are_counted(
        self, key: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Nobody listens: every call is counted as lost and the log says why."""
        client = RpcClient(f"ipc://{tmp_path}/none", key, config=RpcConfig(handshake_timeout_s=0.2))
        with caplog.at_level(logging.WARNING):
            for value in range(29):
                client.note(value).remote_oneway()
            eventually(lambda: client.statistics().oneway_lost == 29)
        assert "29 one-way calls" in caplog.text
        assert client.statistics().pending_bytes == 0
        client.close()

    def test_refused_oneway_calls_stay_counted(self, service: Any, key: bytes, tmp_path: Path) -> None:
        """One that is too big for the server is counted, and later successes do not erase it."""
        config = RpcConfig(message_bytes_max=5000)
        tmp_path.chmod(0o700)
        client = RpcClient(f"ipc://{tmp_path}/s", key)
        # Before the server's bounds can be known.
        client.echo(b"x" * 20_000).remote_oneway()
        client.echo(b"x").remote_oneway()
        with RpcServer(service, f"ipc://{tmp_path}/s", key, config=config):
            eventually(lambda: client.statistics().oneway_done == 2)
            assert client.statistics().oneway_failed == 1
            client.echo(b"x").remote_oneway()
            eventually(lambda: client.statistics().oneway_done == 3)
            assert client.statistics().oneway_failed == 1
            assert client.statistics().pending_bytes == 0
            client.close()

    def test_counts_survive_a_reconnect(self, service: Any, key: bytes, tmp_path: Path) -> None:
        """Statistics are over all sessions."""
        tmp_path.chmod(0o700)
        address = f"ipc://{tmp_path}/s"
        client = RpcClient(address, key)
        for _ in range(3):
            with RpcServer(service, address, key):
                client.divide(1.0, 0.0).remote_oneway()
                eventually(lambda: client.statistics().oneway_done == client.statistics().oneway_sent)
            eventually(lambda: "lost" in repr(client))
            client.reconnect()
        assert (client.statistics().oneway_sent, client.statistics().oneway_failed, client.statistics().sessions) == (
            3,
            3,
            3,
        )
        client.close()

    def test_calls_that_race_close_hear_closed(self, service: Any, key: bytes) -> None:
        """Never that the server had stopped."""
        with RpcServer(service, "ipc://", key) as server:
            for _ in range(20):
                client = RpcClient(server.address, key).start()
                told: list[Exception] = []

                threads = [threading.Thread(target=_call_until_it_ends, args=(client, told)) for _ in range(3)]
                for thread in threads:
                    thread.start()
                client.close()
                for thread in threads:
                    thread.join(20)
                assert [type(error) for error in told] == [RpcClosed] * 3


def _call_until_it_ends(client: RpcClient, told: list[Exception]) -> None:
    try:
        while True:
            client.echo(1).remote()
    except RpcConnectionError as error:
        told.append(error)


BAD_TIMES = [1e10, math.inf, math.nan, "1", True, [1]]


class TestArguments:
    """Input of a call is checked in the caller, on both paths alike, before anything is touched."""

    @pytest.mark.parametrize("fast_path", [False, True])
    @pytest.mark.parametrize("bad", BAD_TIMES, ids=repr)
    def test_times(self, connect: Connect, bad: Any, fast_path: bool) -> None:
        """Named with their value; other callers' calls are not disturbed and nothing is accounted."""
        client, other = connect(fast_path=fast_path), connect()
        waiting = other.hold().remote_future()
        for make in (
            lambda: client.echo(1).remote(bad),
            lambda: client.echo(1).remote_future(bad),
            lambda: asyncio.run(client.echo(1).remote_async(bad)),
            lambda: client.numbers(1).remote_streaming(bad),
            lambda: client.numbers(1).remote_streaming(item_timeout_s=bad),
            lambda: client.responses().remote_streaming(item_timeout_s=bad),
        ):
            with pytest.raises(RpcArgumentError, match="timeout_s"):
                make()
        assert (client.statistics().pending, client.statistics().pending_bytes) == (0, 0)
        assert client.echo(1).remote(timeout_s=1e9) == 1
        assert not waiting.done()

    @pytest.mark.parametrize("fast_path", [False, True])
    @pytest.mark.parametrize("name", ["n" * 256, "n" * 5000, "é", "", "a b", "a.b", "\udc80", "__init__"])
    def test_names(self, connect: Connect, name: str, fast_path: bool) -> None:
        """What cannot be a method's name is refused here; the session lives on."""
        client = connect(fast_path=fast_path, interface=None)
        with pytest.raises(RpcMethodNotFound):
            client.method(name)().remote()
        assert client.echo(1).remote() == 1

    def test_names_that_are_not_text(self, client: RpcClient) -> None:
        """Likewise."""
        for name in (None, 5, b"echo"):
            with pytest.raises(RpcMethodNotFound):
                client.method(name)  # type: ignore[arg-type]

    def test_arguments_beyond_all_bounds(self, client: RpcClient) -> None:
        """Too large numbers, too deep nesting, too many arrays: errors of the call."""
        deep: Any = []
        for _ in range(100_000):  # beyond the recursion limit of every supported version
            deep = [deep]
        for bad in (2**70, deep, [np.zeros(1)] * 5000, {object(): 1}):
            with pytest.raises(RpcArgumentError):
                client.echo(bad).remote()
        assert client.statistics().pending_bytes == 0
        assert client.echo(1).remote() == 1


class TestDeadlines:
    """No call begins after its caller has given up."""

    def test_an_inline_call_that_waited_too_long(self, connect: Connect, service: Any, key: bytes) -> None:
        """Behind a long inline handler in the server's queue: its deadline passed there, so it does not run."""

        class Worker:
            def __init__(self) -> None:
                self.ran: list[str] = []
                self.gate = threading.Event()
                self.entered = threading.Event()

            @rpc_method(non_blocking=True)
            def block(self) -> None:
                """Breaks its promise."""
                self.entered.set()
                self.gate.wait(20)

            @rpc_method(non_blocking=True)
            def run(self, name: str) -> None:
                """Log."""
                self.ran.append(name)

        worker = Worker()
        for address in ("ipc://", "tcp://127.0.0.1:0"):
            worker.ran.clear()
            worker.gate.clear()
            worker.entered.clear()
            with RpcServer(worker, address, key) as server, RpcClient(server.address, key) as client:
                blocked = client.block().remote_future()
                assert worker.entered.wait(10)
                with pytest.raises(RpcTimeout):
                    client.run("late").remote(timeout_s=0.05)
                with pytest.raises(RpcTimeout):
                    client.run("late too").remote_future(timeout_s=0.05).result(10)
                worker.gate.set()
                blocked.result(10)
                client.run("in time").remote(timeout_s=10)
                assert worker.ran == ["in time"]
                assert server.statistics().expired >= 1

    def test_a_call_that_expires_before_it_is_sent(self, key: bytes, service: Any, tmp_path: Path) -> None:
        """While the client still connects: it is never sent."""
        tmp_path.chmod(0o700)
        client = RpcClient(f"ipc://{tmp_path}/s", key)
        with pytest.raises(RpcTimeout):
            client.note(1).remote(timeout_s=0.05)
        later = client.echo(2).remote_future(timeout_s=20)
        with RpcServer(service, f"ipc://{tmp_path}/s", key):
            assert later.result(20) == 2
            assert service.log == []
            client.close()

    def test_without_a_shared_clock(self, key: bytes, service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Another machine: deadlines travel as spans, and still end calls."""
        from rpc_local_registry import _engine

        monkeypatch.setattr(_engine, "clock_id", lambda: b"another machine")
        with RpcServer(service, "ipc://", key) as server, RpcClient(server.address, key) as client:
            assert client.echo(1).remote(timeout_s=10) == 1
            with pytest.raises(RpcTimeout):
                client.hold_async().remote(timeout_s=0.05)
            eventually(lambda: service.closed == ["hold_async"])


class TestState:
    """One state for both paths."""

    def test_a_restarted_server_wants_a_reconnect_locally_too(self, service_type: Any, key: bytes) -> None:
        """The local path is lost with the worker it was bound to: the same error until ``reconnect``, told once, at once."""
        lost: list[Exception] = []
        first, second = service_type(), service_type()
        with RpcServer(first, "tcp://127.0.0.1:0", key) as server:
            client = RpcClient(server.address, key, fast_path=True, on_lost=lost.append)
            assert client.echo(1).remote() == 1
            stream = client.responses().remote_streaming()
            address = server.address
            server.shutdown()
            with pytest.raises(RpcServerStopped):
                next(stream)
            begun_s = time.monotonic()
            for _ in range(3):
                with pytest.raises(RpcServerStopped):
                    client.echo(1).remote()
            assert time.monotonic() - begun_s < 1
            with RpcServer(second, address, key):
                with pytest.raises(RpcServerStopped):
                    client.note(1).remote_oneway()
                assert client.path_of("note") == "remote"
                client.reconnect()
                client.note(2).remote()
                assert second.log == [2]
                client.close()
        assert [type(error) for error in lost] == [RpcServerStopped]
        with pytest.raises(RpcClosed):
            client.reconnect()

    def test_a_closed_client_is_closed_locally(self, connect: Connect, service: Any) -> None:
        """Every verb; and its open local streams end."""
        client = connect(fast_path=True)
        assert client.echo(1).remote() == 1
        stream = client.responses().remote_streaming()
        client.close()
        for make in (
            lambda: client.echo(1).remote(),
            lambda: client.echo(1).remote_future(),
            lambda: client.echo(1).remote_oneway(),
            lambda: client.responses().remote_streaming(),
            lambda: next(stream),
        ):
            with pytest.raises(RpcClosed):
                make()
        eventually(lambda: service.source.cancelled)

    def test_a_wrong_key_is_wrong_locally(self, server: RpcServer) -> None:
        """No direct call without the server's key."""
        client = RpcClient(server.address, new_key(), fast_path=True)
        with pytest.raises(RpcAuthenticationError, match="another key"):
            client.echo(1).remote()
        assert client.path_of("echo") == "remote"
        assert client.statistics().local_calls == 0

    def test_an_open_stream_leaves_the_fast_path_on(self, connect: Connect, service: Any) -> None:
        """A remote stream stops local calls only until its method has been called, items or not."""
        client = connect(fast_path=True)
        streams = [client.numbers(1000).remote_streaming(), client.numbers_async(1000, 0.001).remote_streaming()]
        assert next(streams[0]) == 0
        eventually(lambda: client.path_of("echo") == "local")
        before = client.statistics().local_calls
        for _ in range(10):
            assert client.echo(1).remote() == 1
        assert client.statistics().local_calls == before + 10
        for stream in streams:
            stream.cancel()
        assert client.path_of("echo") == "local"

    def test_a_push_stream_is_open_before_its_first_item(self, connect: Connect, service: Any) -> None:
        """A remote stream that says nothing for long does not stop the fast path either."""
        client = connect(fast_path=True)
        holder = client.hold().remote_future()
        assert service.inside.acquire(timeout=10)
        stream = client.responses().remote_streaming()
        service.gate.set()
        holder.result(10)
        eventually(lambda: client.path_of("echo") == "local")
        assert service.source is not None
        stream.cancel()

    @pytest.mark.parametrize(
        ("bound", "called"),
        [
            ("tcp://*:0", "127.0.0.1"), ("tcp://0.0.0.0:0", "localhost"), ("tcp://0.0.0.0:0", "127.0.0.2"),
            ("tcp://127.0.0.1:0", "localhost"), ("tcp://localhost:0", "127.0.0.1"),
        ],
    )  # fmt: skip
    def test_names_of_one_server(self, service: Any, key: bytes, bound: str, called: str) -> None:
        """Wildcard, localhost and 127.0.0.1 are found where they are the same server, and only there."""
        with RpcServer(service, bound, key) as server:
            port = server.address.rpartition(":")[2]
            client = RpcClient(f"tcp://{called}:{port}", key, fast_path=True)
            assert client.echo(1).remote() == 1
            assert (client.statistics().local_calls, client.statistics().sessions) == (1, 0)
            client.close()

    def test_names_of_other_servers(self, service: Any, key: bytes) -> None:
        """A server on one loopback address is not what listens on another; another port never is."""
        with RpcServer(service, "tcp://127.0.0.1:0", key) as server:
            port = int(server.address.rpartition(":")[2])
            for address in (f"tcp://127.0.0.2:{port}", f"tcp://127.0.0.1:{port + 1 if port < 65535 else 1}"):
                client = RpcClient(address, key, fast_path=True)
                assert client.path_of("echo") == "remote"
                client.close()

    def test_the_environment_counts_where_no_settings_are_given(
        self, server: RpcServer, key: bytes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """``TLLM_RPC_LOCAL_FASTPATH``: settings win over it, ``fast_path`` over both; a bad value is an error."""
        monkeypatch.setenv("TLLM_RPC_LOCAL_FASTPATH", "1")
        assert RpcClient(server.address, key).path_of("echo") == "local"
        assert RpcClient(server.address, key, config=RpcConfig()).path_of("echo") == "remote"
        assert RpcClient(server.address, key, fast_path=False).path_of("echo") == "remote"
        monkeypatch.setenv("TLLM_RPC_LOCAL_FASTPATH", "yes")
        with pytest.raises(RpcConfigError, match="TLLM_RPC_LOCAL_FASTPATH"):
            RpcClient(server.address, key)
        with pytest.raises(RpcConfigError, match="TLLM_RPC_LOCAL_FASTPATH"):
            RpcServer(object(), "ipc://", key)


class TestFutures:
    """``concurrent.futures`` as people use them."""

    def test_waiting_for_a_cancelled_future(self, client: RpcClient, service: Any) -> None:
        """``wait`` and ``as_completed`` see it; cancelling twice is quiet; callbacks run once."""
        told: list[object] = []
        future = client.hold_async().remote_future()
        future.add_done_callback(told.append)
        assert service.inside.acquire(timeout=10)
        waiting: list[Any] = []
        thread = threading.Thread(target=lambda: waiting.append(concurrent.futures.wait([future], timeout=20)))
        thread.start()
        assert future.cancel()
        assert future.cancel()
        thread.join(20)
        assert future in waiting[0].done
        assert list(concurrent.futures.as_completed([future], timeout=10)) == [future]
        assert told == [future]
        eventually(lambda: service.closed == ["hold_async"])

    def test_cancel_races_the_answer(self, client: RpcClient) -> None:
        """Whatever comes first is the outcome, once; the client goes on."""
        for _ in range(300):
            future = client.echo(1).remote_future()
            if not future.cancel():
                assert future.result(10) == 1
            else:
                assert future.cancelled()
        assert client.echo(2).remote() == 2
        assert client.statistics().pending == 0

    @pytest.mark.parametrize("how", ["answer", "error", "cancel"])
    def test_a_future_that_has_ended_is_freed_at_once(self, how: str, client: RpcClient) -> None:
        """With whatever its callbacks hold, and without a collection."""
        gc.disable()
        try:
            call = {"answer": client.echo(1), "error": client.divide(1, 0), "cancel": client.hold_async()}[how]
            future = call.remote_future()
            gone = weakref.ref(future)
            if how == "cancel":
                assert future.cancel()
            else:
                assert (future.exception(20) is None) == (how == "answer")
            del future, call
            eventually(lambda: gone() is None)
        finally:
            gc.enable()

    def test_an_error_of_a_blocking_call_is_freed_at_once(self, client: RpcClient) -> None:
        """With the arguments that its traceback holds."""
        gc.disable()
        try:
            try:
                client.divide(1, 0).remote()
            except RpcRemoteError as error:
                gone = weakref.ref(error)
            eventually(lambda: gone() is None)
        finally:
            gc.enable()

    def test_a_temporary_client(self, server: RpcServer, key: bytes) -> None:
        """Lives as long as anything made from it: a call, a future, a stream."""
        assert RpcClient(server.address, key).echo(1).remote() == 1
        assert RpcClient(server.address, key).fast().remote_future().result(10) == "fast"
        assert list(RpcClient(server.address, key).numbers(5).remote_streaming()) == list(range(5))
        assert asyncio.run(RpcClient(server.address, key).echo(2).remote_async()) == 2
        gc.collect()
        eventually(lambda: server.statistics().sessions == 0)


class TestStreams:
    """One consumer, and what may happen to it."""

    def test_an_interrupted_reader_leaves_no_trace(self, client: RpcClient, service: Any) -> None:
        """After exceptions inside a blocking ``next`` the stream can be read on. One may come before its wait."""
        stream = client.responses().remote_streaming()
        eventually(lambda: service.source is not None)

        class Interrupted(Exception):
            pass

        def interrupt(*_: object) -> None:
            raise Interrupted

        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            for after_s in (0.05, 0.1, 0.2):
                signal.setitimer(signal.ITIMER_REAL, after_s)
                with pytest.raises(Interrupted):
                    next(stream)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        service.source.push(5)
        assert next(stream) == 5

    @pytest.mark.parametrize("fast_path", [False, True])
    def test_cancel_from_another_thread_while_it_runs(self, key: bytes, fast_path: bool) -> None:
        """No ValueError; the generator is closed when it comes back."""
        entered, gate, closed = threading.Event(), threading.Event(), threading.Event()

        class Worker:
            @rpc_method(streaming=True, non_blocking=True)
            def items(self) -> Iterator[int]:
                """Waits inside."""
                try:
                    entered.set()
                    gate.wait(20)
                    yield 1
                    yield 2
                finally:
                    closed.set()

        with (
            RpcServer(Worker(), "ipc://", key) as server,
            RpcClient(server.address, key, fast_path=fast_path) as client,
        ):
            stream = client.items().remote_streaming()
            got: list[object] = []
            reader = threading.Thread(target=lambda: got.extend(stream))
            reader.start()
            assert entered.wait(10)
            stream.cancel()
            gate.set()
            reader.join(20)
            assert not reader.is_alive()
            assert got == []
            assert closed.wait(20)

    @pytest.mark.parametrize("fast_path", [False, True])
    def test_errors_of_the_call_come_with_the_first_item(self, connect: Connect, fast_path: bool) -> None:
        """On both paths, for generators and push streams."""
        client = connect(fast_path=fast_path)
        for name in ("numbers", "responses"):
            stream = client.method(name)(1, 2, 3, 4).remote_streaming()
            with pytest.raises(RpcArgumentError):
                next(stream)
            assert list(stream) == []


class TestSlowReaders:
    """Every queue has a bound in bytes."""

    def test_answers_that_nobody_reads(self, service: Any, key: bytes) -> None:
        """A session whose answers pile up is refused more calls, then ended; the server's memory is bounded, others go on."""
        config = RpcConfig(unread_bytes_max=200_000)
        with (
            RpcServer(service, "ipc://", key) as server,
            RawPeer(server.address, config, key=key) as peer,
            RpcClient(server.address, key) as other,
        ):
            opened = peer.open_session(key)
            for call_id in range(1, 31):
                peer.send(*opened.sealer.seal(wire.CALL, call_id, 0, wire.prepare(b"repeat", b"\x92\xa1x\xcd\xc3\x50")))
            eventually(lambda: server.statistics().received_bytes > 30 * 90)
            kinds = []
            while len(kinds) < 30:
                frames = peer.receive(10)
                assert frames is not None
                message = opened.opener.open(frames)
                kinds.append(message.kind)
            served = kinds.count(wire.RESULT)
            assert served == 200_000 // 100_000 + 1 or 2 <= served <= 4
            assert kinds.count(wire.ERROR) == 30 - served
            peer.send(*opened.sealer.seal(wire.CREDIT, 0, wire.pack_credit(0, 10_000_000)))
            peer.send(*opened.sealer.seal(wire.CALL, 99, 0, wire.prepare(b"fast", b"\x90")))
            frames = peer.receive(10)
            assert frames is not None
            assert opened.opener.open(frames).kind == wire.RESULT
            assert other.echo(1).remote() == 1

    def test_running_calls_of_a_client_that_never_reads(self, service: Any, key: bytes) -> None:
        """Their answers end the session at twice the bound, by name."""
        config = RpcConfig(unread_bytes_max=100_000)
        lost: list[Any] = []
        with (
            RpcServer(service, "ipc://", key, on_peer_lost=lost.append) as server,
            RawPeer(server.address, config, key=key) as peer,
        ):
            opened = peer.open_session(key)
            text = b"\x91\xdb\x00\x00\xea\x60" + b"x" * 60_000
            for call_id in range(1, 5):
                peer.send(*opened.sealer.seal(wire.CALL, call_id, 0, wire.prepare(b"hold", text)))
            for _ in range(4):
                assert service.inside.acquire(timeout=10)
            service.gate.set()
            eventually(lambda: lost)
            assert "unread" in lost[0].reason
            kinds = [opened.opener.open(frames).kind for frames in iter(lambda: peer.receive(0.3), None)]
            assert kinds[-1] == wire.GOODBYE

    def test_a_client_that_reads_may_go_on_for_ever(self, service: Any, key: bytes) -> None:
        """Far more than the bound passes when it is read."""
        config = RpcConfig(unread_bytes_max=50_000)
        with RpcServer(service, "ipc://", key) as server, RpcClient(server.address, key, config=config) as client:
            for _ in range(100):
                assert len(client.echo(b"x" * 10_000).remote()) == 10_000
            assert client.statistics().received_bytes > 1_000_000


class TestRestart:
    """Listeners that come and go."""

    def test_a_listener_that_dies_before_the_handshake(self, service: Any, key: bytes, tmp_path: Path) -> None:
        """The client greets again; the real server that comes then is not taken for one with another key."""
        tmp_path.chmod(0o700)
        path = tmp_path / "s"
        raw = socket.socket(socket.AF_UNIX)
        raw.bind(str(path))
        raw.listen()
        client = RpcClient(f"ipc://{path}", key, config=RpcConfig(handshake_timeout_s=10))
        future = client.echo(3).remote_future()
        accepted, _ = raw.accept()
        time.sleep(0.05)
        raw.close()
        path.unlink()
        accepted.close()
        with RpcServer(service, f"ipc://{path}", key):
            assert future.result(20) == 3
            assert client.echo(4).remote() == 4
            client.close()

    def test_two_hellos_over_one_connection(self, server: RpcServer, key: bytes) -> None:
        """The last one counts, until the session is confirmed."""
        with RawPeer(server.address, key=key) as peer:
            first = peer.open_session(key)
            second = peer.open_session(key)
            peer.send(*second.sealer.seal(wire.PING))
            peer.send(*second.sealer.seal(wire.CALL, 1, 0, wire.prepare(b"fast", b"\x90")))
            frames = peer.receive(10)
            assert frames is not None
            assert second.opener.open(frames).kind == wire.RESULT
            assert server.statistics().sessions == 1
            assert first.session_id != second.session_id

    @pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
    @pytest.mark.parametrize("transport", ["ipc", "tcp"])
    def test_a_forked_child_keeps_no_listener(self, transport: str, tmp_path: Path) -> None:
        """The parent is killed, its child lives: the address can be served again at once."""
        tmp_path.chmod(0o700)
        script = textwrap.dedent(
            """
            import os, sys, time
            from rpc_local_registry import *
            class W: pass
            server = RpcServer(W(), sys.argv[1], b"k" * 32).start()
            if os.fork() == 0:
                # Told by the child: what it closes is closed once ``fork`` returns in it, not once it does in the parent.
                print(server.address, os.getpid(), flush=True)
            time.sleep(60)
            """
        )
        address = f"ipc://{tmp_path}/s" if transport == "ipc" else "tcp://127.0.0.1:0"
        parent = subprocess.Popen([sys.executable, "-c", script, address], stdout=subprocess.PIPE, text=True)
        assert parent.stdout is not None
        address, child = parent.stdout.readline().split()
        try:
            parent.send_signal(signal.SIGKILL)
            parent.wait()
            with RpcServer(object.__new__(type("W", (), {})), address, b"k" * 32) as server:
                assert server.address == address
            os.kill(int(child), 0)
        finally:
            os.kill(int(child), signal.SIGKILL)
            parent.stdout.close()

    def test_errors_of_the_folder_are_ours(self, tmp_path: Path, service: Any, key: bytes) -> None:
        """A file in the way, a folder that does not let us in: an address error with the path, not a raw one."""
        (tmp_path / "file").write_text("x")
        with pytest.raises(RpcAddressError, match="file"):
            RpcServer(service, f"ipc://{tmp_path}/file/s", key).start()
        with pytest.raises(RpcAddressError):
            RpcServer(service, "ipc:///proc/nothing/s", key).start()

    def test_the_temporary_folder_is_missing(self, service: Any, key: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
        """Likewise."""
        import tempfile

        monkeypatch.setattr(tempfile, "tempdir", "/nowhere/at/all")
        with pytest.raises(RpcAddressError, match="folder"):
            RpcServer(service, "ipc://", key).start()


def test_errors_say_whether_anything_ran() -> None:
    """For those who decide about a retry."""
    for kind in (RpcBackpressure, RpcArgumentError, RpcMethodNotFound, RpcUnreachable, RpcAuthenticationError):
        assert kind("x").nothing_ran
    for kind in (RpcTimeout, RpcServerStopped, RpcProtocolError, RpcClosed, RpcConnectionError):
        assert not kind("x").nothing_ran
