"""Scenarios over the socket: call modes, errors, deadlines, cancellation, order, isolation, lanes, streams, shutdown."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from rpc_local_registry import (
    RpcArgumentError,
    RpcBackpressure,
    RpcCancelled,
    RpcClient,
    RpcClosed,
    RpcConfig,
    RpcConfigError,
    RpcEncodeError,
    RpcMethodNotFound,
    RpcProtocolError,
    RpcRemoteError,
    RpcServer,
    RpcServerStopped,
    RpcStreamingError,
    RpcTimeout,
    StreamSource,
    rpc_method,
)
from rpc_local_registry.testing import eventually

Connect = Callable[..., RpcClient]


class TestCalls:
    """Arguments and results."""

    def test_arrays_travel_typed_and_read_only(self, client: RpcClient, service: Any, request_type: Any) -> None:
        """Small arrays inline, large ones in frames of their own; read-only and equal at the worker."""
        for size in (0, 1, 1024, 100_000):
            tokens = np.arange(size, dtype=np.int32)
            assert client.submit(request_type(size, tokens)).remote() == int(tokens.sum())
            got = service.submitted[-1].token_ids
            assert got.dtype == np.int32
            assert not got.flags.writeable
            np.testing.assert_array_equal(got, tokens)

    @pytest.mark.parametrize(
        "array",
        [
            np.zeros((0, 3), np.float32),
            np.float64(2.5),
            np.arange(24, dtype=np.int64).reshape(2, 3, 4),
            np.arange(20, dtype=np.uint8)[::2],
            np.arange(12, dtype=np.float16).reshape(3, 4).T,
            np.array([True, False]),
            np.array([1 + 2j], dtype=np.complex64),
        ],
        ids=["empty", "scalar", "3d", "strided", "transposed", "bool", "complex"],
    )
    def test_arrays_of_all_shapes(self, client: RpcClient, array: Any) -> None:
        """Empty, scalar, non-contiguous and multi-dimensional arrays come back equal."""
        np.testing.assert_array_equal(client.echo(array).remote(), array)

    def test_objects_cannot_travel(self, client: RpcClient) -> None:
        """No object arrays, no arbitrary objects: nothing is sent."""
        for value in (np.array([object()]), object(), {"a": {1, (2, object())}}):
            with pytest.raises(RpcArgumentError):
                client.echo(value).remote()
        assert client.statistics().pending == 0

    def test_torch_memory_travels(self, client: RpcClient) -> None:
        """A CPU tensor is memory like any other."""
        torch = pytest.importorskip("torch")
        np.testing.assert_array_equal(client.echo(torch.arange(5, dtype=torch.int32)).remote(), np.arange(5))

    def test_keywords_and_mixtures(self, client: RpcClient, request_type: Any) -> None:
        """Keyword arguments are typed as positional ones are, arrays included."""
        request = request_type(1, np.arange(4, dtype=np.int32))
        assert client.submit(request=request).remote() == 6
        assert client.divide(1.0, right=4.0).remote() == 0.25
        with pytest.raises(RpcArgumentError, match="wrong"):
            client.divide(1.0, wrong=2.0).remote()

    def test_wrong_types_are_refused_before_the_handler(self, client: RpcClient, service: Any) -> None:
        """A call that does not fit the annotations runs nothing, and says where it does not fit."""
        with pytest.raises(RpcArgumentError, match="submit"):
            client.submit({"request_id": "x", "token_ids": 3}).remote()
        with pytest.raises(RpcArgumentError, match="divide"):
            client.divide("one", 2.0).remote()
        assert service.submitted == []

    @pytest.mark.parametrize(
        ("arguments", "keywords", "text"),
        [
            ((1.0,), {}, "divide(): missing a required argument: 'right'"),
            ((1.0, 2.0, 3.0), {}, "divide(): too many positional arguments"),
            ((1.0,), {"wrong": 2.0}, "divide(): got an unexpected keyword argument 'wrong'"),
            ((1.0,), {"left": 2.0}, "divide(): multiple values for argument 'left'"),
        ],
    )
    @pytest.mark.parametrize("fast_path", [False, True])
    def test_arguments_that_do_not_fit_the_method_are_told_alike_on_both_paths(
        self, connect: Connect, arguments: Any, keywords: Any, text: str, fast_path: bool
    ) -> None:
        """As Python tells it, with the parameter's name."""
        with pytest.raises(RpcArgumentError) as caught:
            connect(fast_path=fast_path).divide(*arguments, **keywords).remote()
        assert str(caught.value) == text

    @pytest.mark.parametrize(
        ("call", "text"),
        [
            (lambda c: c.divide("one", 2.0), "divide(): left: Expected `float`, got `str`"),
            (lambda c: c.divide(1.0, right="two"), "divide(): right: Expected `float`, got `str`"),
            (
                lambda c: c.submit({"request_id": 1, "token_ids": 3}),
                "submit(): request: Expected `numpy.ndarray`, got `int` - at `$.token_ids`",
            ),
        ],
        ids=["positional", "keyword", "inner"],
    )
    def test_a_value_of_another_type_is_told_with_its_parameter(self, client: RpcClient, call: Any, text: str) -> None:
        """And with its place inside the value."""
        with pytest.raises(RpcArgumentError) as caught:
            call(client).remote()
        assert str(caught.value) == text

    def test_without_an_interface(self, connect: Connect) -> None:
        """Results are built-ins; an unknown name is the server's error, with the name in it."""
        client = connect(interface=None)
        assert client.echo({"a": [1, None, "x", b"y"]}).remote() == {"a": [1, None, "x", b"y"]}
        with pytest.raises(RpcMethodNotFound, match=r"no_such_method.* not found"):
            client.no_such_method().remote()
        with pytest.raises(RpcStreamingError):
            next(client.fast().remote_streaming())

    @pytest.mark.parametrize("name", ["undeclared", "__init__", "submitted", "echo.__call__", "shutdown"])
    def test_only_declared_methods_exist(self, connect: Connect, name: str) -> None:
        """Public attributes, private ones, attribute paths and the server's own methods cannot be reached."""
        with pytest.raises(RpcMethodNotFound):
            connect(interface=None).method(name)().remote()

    def test_a_typo_is_caught_at_once(self, client: RpcClient) -> None:
        """With an interface a wrong name raises before any call."""
        with pytest.raises(RpcMethodNotFound, match="ecoh"):
            _ = client.ecoh

    def test_a_forgotten_verb_is_told(self, connect: Connect) -> None:
        """A prepared call that is dropped warns, when asked to."""
        client = connect(RpcConfig(warn_unused_calls=True))
        with pytest.warns(RuntimeWarning, match=r"add \.remote"):
            client.echo(1)
        assert client.echo(2).remote() == 2

    def test_one_call_after_another_from_many_threads(self, client: RpcClient) -> None:
        """100 threads × 100 calls get their own answers."""
        wrong: list[object] = []

        def run(base: int) -> None:
            for offset in range(100):
                got = client.echo(base + offset).remote()
                if got != base + offset:
                    wrong.append(got)

        threads = [threading.Thread(target=run, args=(1000 * n,)) for n in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert client.statistics().pending == 0

    def test_counts_are_exact(self, client: RpcClient, service: Any) -> None:
        """Every call runs once."""
        futures = [client.increment().remote_future() for _ in range(500)]
        for future in futures:
            future.result(20)
        assert service.count == 500

    def test_results_that_cannot_travel(self, client: RpcClient) -> None:
        """An unencodable result or item is an error of that call only."""
        with pytest.raises(RpcEncodeError, match="local_function"):
            client.local_function().remote()
        stream = client.local_functions().remote_streaming()
        assert next(stream) == 1
        with pytest.raises(RpcEncodeError):
            next(stream)
        assert client.fast().remote() == "fast"

    def test_a_result_of_another_type(self, server: RpcServer, key: bytes) -> None:
        """A worker that breaks its own annotation gives the caller an error, not a wrong type."""

        class Interface:
            @rpc_method(non_blocking=True)
            def echo(self, value: str) -> int:
                """Declared otherwise than at the server."""
                return 0

        with (
            RpcClient(server.address, key, interface=Interface) as client,
            pytest.raises(RpcProtocolError, match="echo"),
        ):
            client.echo("text").remote()


class TestErrors:
    """What a handler raises."""

    def test_arithmetic(self, client: RpcClient) -> None:
        """Message, type, traceback text and a cause of the built-in type."""
        with pytest.raises(RpcRemoteError) as caught:
            client.divide(1.0, 0.0).remote()
        assert caught.value.type_name == "ZeroDivisionError"
        assert isinstance(caught.value.cause, ZeroDivisionError)
        assert "left / right" in caught.value.remote_traceback

    def test_exceptions_that_do_not_rebuild(self, connect: Connect) -> None:
        """A class whose constructor wants two arguments still arrives, by name; nobody hangs."""
        for exceptions in ((), (KeyError,)):
            with pytest.raises(RpcRemoteError, match="1 and 2") as caught:
                connect(RpcConfig(exceptions=exceptions)).fail_two_arguments().remote(timeout_s=10)
            assert caught.value.cause is None
            assert caught.value.type_name.endswith("TwoArguments")

    def test_broken_str_and_surrogates(self, key: bytes) -> None:
        """An exception whose text fails or cannot be encoded is told all the same."""

        class Broken(Exception):
            def __str__(self) -> str:
                raise RuntimeError("no text")

        class Worker:
            @rpc_method(non_blocking=True)
            def broken(self) -> None:
                """Raise."""
                raise Broken

            @rpc_method(non_blocking=True)
            def surrogate(self) -> None:
                """Raise."""
                raise ValueError("\udc80 " + "x" * 100_000)

        with RpcServer(Worker(), "ipc://", key) as server, RpcClient(server.address, key) as client:
            with pytest.raises(RpcRemoteError, match="message unavailable"):
                client.broken().remote()
            with pytest.raises(RpcRemoteError) as caught:
                client.surrogate().remote()
            assert len(caught.value.message) < 5000

    def test_system_exit_in_a_handler(self, key: bytes) -> None:
        """A handler's SystemExit is an error of the call; the server goes on."""

        class Worker:
            @rpc_method(non_blocking=True)
            def leave(self) -> None:
                """Raise."""
                raise SystemExit(3)

        with RpcServer(Worker(), "ipc://", key) as server, RpcClient(server.address, key) as client:
            for _ in range(2):
                with pytest.raises(RpcRemoteError, match="SystemExit"):
                    client.leave().remote()


class TestDeadlines:
    """One meaning of a timeout, on the monotonic clock."""

    def test_a_slow_call_times_out_and_the_next_succeeds(self, client: RpcClient) -> None:
        """The caller is free at its deadline; the lane's other threads serve on."""
        with pytest.raises(RpcTimeout, match="timed out"):
            client.hold().remote(timeout_s=0.05)
        assert client.fast().remote(timeout_s=10) == "fast"

        async def run() -> None:
            with pytest.raises(RpcTimeout):
                await client.hold_async().remote_async(timeout_s=0.05)

        asyncio.run(run())
        with pytest.raises(RpcTimeout):
            client.hold().remote_future(timeout_s=0.05).result(10)

    def test_the_default_deadline(self, connect: Connect) -> None:
        """``call_timeout_s`` holds where a call names none."""
        with pytest.raises(RpcTimeout):
            connect(RpcConfig(call_timeout_s=0.05)).hold().remote()

    def test_the_server_cancels_at_the_deadline(self, client: RpcClient, service: Any, server: RpcServer) -> None:
        """The deadline travels: a coroutine is cancelled, and a queued call never starts."""
        with pytest.raises(RpcTimeout):
            client.hold_async().remote(timeout_s=0.05)
        eventually(lambda: service.closed == ["hold_async"])
        first = client.hold_alone().remote_future()
        assert service.inside.acquire(timeout=10)
        assert service.inside.acquire(timeout=10)
        with pytest.raises(RpcTimeout):
            client.hold_alone().remote(timeout_s=0.05)
        eventually(lambda: server.statistics().pending == 1)
        service.gate.set()
        first.result(10)
        assert client.fast().remote() == "fast"
        eventually(lambda: server.statistics().pending == 0)
        assert not service.inside.acquire(blocking=False), "the expired call was started"

    def test_a_late_answer_disturbs_nobody(self, client: RpcClient, service: Any) -> None:
        """An answer after the deadline is counted and dropped."""
        with pytest.raises(RpcTimeout):
            client.hold().remote(timeout_s=0.05)
        service.gate.set()
        assert client.echo(1).remote() == 1


class TestCancellation:
    """It reaches the server."""

    def test_cancelling_a_future(self, client: RpcClient, service: Any, server: RpcServer) -> None:
        """The coroutine at the server is cancelled."""
        future = client.hold_async().remote_future()
        assert service.inside.acquire(timeout=10)
        assert future.cancel()
        eventually(lambda: service.closed == ["hold_async"])
        assert server.statistics().cancelled == 1
        assert client.statistics().pending == 0

    def test_cancelling_an_await(self, client: RpcClient, service: Any) -> None:
        """The same from asyncio."""

        async def run() -> None:
            task = asyncio.create_task(client.hold_async().remote_async())
            while not service.inside.acquire(blocking=False):
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(run())
        eventually(lambda: service.closed == ["hold_async"])

    def test_a_queued_call_never_starts(self, client: RpcClient, service: Any, server: RpcServer) -> None:
        """Cancelled while it waits for its lane."""
        running = client.hold_alone().remote_future()
        assert service.inside.acquire(timeout=10)
        queued = client.hold_alone().remote_future()
        eventually(lambda: server.statistics().pending == 2)
        assert queued.cancel()
        eventually(lambda: server.statistics().pending == 1)
        service.gate.set()
        running.result(10)
        assert client.fast().remote() == "fast"
        assert not service.inside.acquire(blocking=False)

    def test_a_worker_that_cancels_itself(self, key: bytes) -> None:
        """A coroutine that ends by cancellation gives RpcCancelled."""

        class Worker:
            @rpc_method
            async def give_up(self) -> None:
                """Cancel."""
                raise asyncio.CancelledError

        with RpcServer(Worker(), "ipc://", key) as server, RpcClient(server.address, key) as client:
            error = client.give_up().remote_future().exception(10)
        assert isinstance(error, RpcCancelled)


class TestOneway:
    """Order and bounds of one-way calls."""

    def test_effect_is_seen_by_a_later_call(self, client: RpcClient) -> None:
        """A flag set one-way is seen by the next call."""
        client.set_flag().remote_oneway()
        assert client.get_flag().remote() is True

    def test_order_across_lanes_loop_and_inline(self, client: RpcClient, service: Any) -> None:
        """One-way calls of one client run one after the other, wherever each runs."""
        wanted = []
        for step in range(20):
            client.note_slowly(3 * step).remote_oneway()
            client.note(3 * step + 1).remote_oneway()
            client.note_async(3 * step + 2).remote_oneway()
            wanted += [3 * step, 3 * step + 1, 3 * step + 2]
        assert service.log == []
        service.gate.set()
        eventually(lambda: len(service.log) == 60)
        assert service.log == wanted

    def test_failures_are_counted_on_both_sides(self, client: RpcClient, server: RpcServer) -> None:
        """Nobody is raised to; statistics tell."""
        client.divide(1.0, 0.0).remote_oneway()
        client.echo(1).remote_oneway()
        eventually(lambda: client.statistics().oneway_done == 2)
        assert client.statistics().oneway_failed == 1
        assert server.statistics().oneway_failed == 1

    def test_the_window_is_bounded(self, connect: Connect, service: Any) -> None:
        """Unacknowledged one-way calls count against the bound; the refusal sends nothing."""
        client = connect(RpcConfig(pending_calls_max=3))
        for value in range(3):
            client.note_slowly(value).remote_oneway()
        with pytest.raises(RpcBackpressure):
            client.note_slowly(3).remote_oneway()
        service.gate.set()
        eventually(lambda: client.statistics().oneway_done == 3)
        client.note_slowly(4).remote_oneway()
        eventually(lambda: service.log == [0, 1, 2, 4])

    def test_close_flushes(self, connect: Connect, service: Any) -> None:
        """What was sent one-way before ``close`` arrives."""
        client = connect()
        for value in range(500):
            client.note(value).remote_oneway()
        client.close()
        eventually(lambda: service.log == list(range(500)))
        with pytest.raises(RpcClosed):
            client.note(1).remote_oneway()


class TestBounds:
    """Every queue has one."""

    def test_pending_calls(self, connect: Connect, service: Any) -> None:
        """A client with too many unanswered calls is refused at once, and can retry later."""
        client = connect(RpcConfig(pending_calls_max=2))
        futures = [client.hold().remote_future() for _ in range(2)]
        with pytest.raises(RpcBackpressure, match="2 calls"):
            client.echo(1).remote()
        service.gate.set()
        assert [future.result(10) for future in futures] == ["held", "held"]
        assert client.echo(1).remote() == 1
        assert client.statistics().pending_high_water == 2

    def test_pending_bytes(self, connect: Connect, service: Any) -> None:
        """The same for bytes."""
        client = connect(RpcConfig(pending_bytes_max=1000))
        future = client.hold("x" * 600).remote_future()
        with pytest.raises(RpcBackpressure, match="bytes"):
            client.hold("x" * 600).remote()
        service.gate.set()
        future.result(10)

    def test_a_server_with_a_lower_bound_refuses(self, service: Any, key: bytes) -> None:
        """The server keeps its own bound, whatever the client's configuration says."""
        with (
            RpcServer(service, "ipc://", key, config=RpcConfig(pending_calls_max=1)) as server,
            RpcClient(server.address, key) as client,
        ):
            first = client.hold().remote_future()
            with pytest.raises(RpcBackpressure):
                client.hold().remote(timeout_s=10)
            service.gate.set()
            assert first.result(10) == "held"

    def test_message_size_both_ways(self, service: Any, key: bytes) -> None:
        """Arguments and results beyond the limit of either side are errors of the call; the session lives on."""
        small = RpcConfig(message_bytes_max=10_000)
        with RpcServer(service, "ipc://", key, config=small) as server, RpcClient(server.address, key) as client:
            with pytest.raises(RpcArgumentError, match="one holds at most 10000"):
                client.echo(b"x" * 20_000).remote()
            with pytest.raises(RpcArgumentError, match="one holds at most 10000"):
                client.echo(b"x" * 20_000).remote_oneway()
            assert client.echo(b"ok").remote() == b"ok"
        with (
            RpcServer(service, "ipc://", key) as server,
            RpcClient(server.address, key, config=small) as client,
            RpcClient(server.address, key) as big,
        ):
            with pytest.raises(RpcArgumentError, match="one holds at most 10000"):
                client.echo(b"x" * 20_000).remote()
            with pytest.raises(RpcEncodeError, match="at most 10000"):
                client.repeat("x" * 990, 10).remote()
            assert len(big.echo(b"x" * 20_000).remote()) == 20_000


class TestClients:
    """Several of them."""

    def test_answers_go_to_their_askers(self, connect: Connect, service: Any) -> None:
        """A slow call of A and a fast one of B: each gets its own answer."""
        slow, fast = connect(), connect()
        future = slow.hold("slow").remote_future()
        assert service.inside.acquire(timeout=10)
        assert fast.echo("fast").remote() == "fast"
        service.gate.set()
        assert future.result(10) == "slow"

    def test_many_clients(self, connect: Connect) -> None:
        """20 clients × 50 calls in flight each get their own."""
        clients = [connect() for _ in range(20)]
        futures = [(n, i, c.echo([n, i]).remote_future()) for i in range(50) for n, c in enumerate(clients)]
        assert all(future.result(20) == [n, i] for n, i, future in futures)

    def test_peer_lost_is_told(self, service: Any, key: bytes) -> None:
        """The server hears of a client's leaving, with its name."""
        lost = []

        def note(peer: Any) -> None:
            lost.append(peer)
            raise RuntimeError("a callback's own failure is logged and harms nobody")

        with RpcServer(service, "ipc://", key, on_peer_lost=note) as server:
            with RpcClient(server.address, key, name="proxy") as client:
                client.echo(1).remote()
            eventually(lambda: lost)
            with RpcClient(server.address, key) as client:
                assert client.echo(2).remote() == 2
        assert lost[0].name == "proxy"
        assert lost[0].reason == "closed by the client"


class TestLanes:
    """Slow handlers cannot starve fast ones."""

    def test_stuck_methods_leave_the_others_alone(self, client: RpcClient, service: Any) -> None:
        """With one method's lane full and its queue long, every other method answers."""
        stuck = [client.hold().remote_future() for _ in range(50)]
        for _ in range(4):
            assert service.inside.acquire(timeout=10)
        assert client.fast().remote(timeout_s=10) == "fast"
        assert client.echo(1).remote(timeout_s=10) == 1
        assert client.increment().remote(timeout_s=10) == 1
        assert list(client.numbers(3).remote_streaming(timeout_s=10)) == [0, 1, 2]
        assert not service.inside.acquire(blocking=False), "more threads than the lane is wide"
        service.gate.set()
        assert all(future.result(10) == "held" for future in stuck)

    def test_abandoned_streams_hold_no_thread(self, client: RpcClient, service: Any) -> None:
        """More unread streams than the lane is wide: the next one still runs."""
        streams = [client.numbers(10**9).remote_streaming() for _ in range(10)]
        assert [next(stream) for stream in streams] == [0] * 10
        assert list(client.numbers(3).remote_streaming(timeout_s=10)) == [0, 1, 2]
        for stream in streams:
            stream.cancel()
        eventually(lambda: service.closed.count("numbers") == 11)


class TestBatch:
    """A batch is taken in item by item."""

    def test_items_are_decoded_one_by_one(self, key: bytes, request_type: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """When the handler sees item n, item n + 1 has not been decoded: no decode grows with the batch."""
        from rpc_local_registry import _codec

        decoded: list[int] = []
        seen: list[int] = []
        original = _codec.LazyItems.__next__

        def counted(self: Any) -> Any:
            item = original(self)
            decoded.append(item.request_id)
            return item

        monkeypatch.setattr(_codec.LazyItems, "__next__", counted)

        class Worker:
            @rpc_method(non_blocking=True)
            def submit_batch(self, requests: Any) -> None:
                """Watch."""
                for request in requests:
                    assert decoded == [*seen, request.request_id]
                    seen.append(request.request_id)

        Worker.submit_batch.__annotations__["requests"] = Iterator[request_type]
        with RpcServer(Worker(), "ipc://", key) as server, RpcClient(server.address, key) as client:
            client.submit_batch([request_type(n, np.arange(3, dtype=np.int32)) for n in range(50)]).remote()
        assert seen == list(range(50))

    def test_a_bad_item_fails_alone(self, key: bytes) -> None:
        """An unreadable item raises from ``next`` and the following ones still come."""

        class Worker:
            @rpc_method(non_blocking=True)
            def take(self, items: Iterator[int]) -> list[str]:
                """Collect."""
                found: list[str] = []
                while len(items):  # type: ignore[arg-type]
                    try:
                        found.append(str(next(items)))
                    except RpcArgumentError as error:
                        found.append(str(error)[:6])
                return found

        with RpcServer(Worker(), "ipc://", key) as server, RpcClient(server.address, key) as client:
            assert client.take([1, "two", 3]).remote() == ["1", "item 1", "3"]


class TestStreams:
    """Credit, interleaving, deadlines."""

    def test_several_at_once_do_not_mix(self, client: RpcClient) -> None:
        """Three streams read in turn keep their own items."""
        streams = {stop: client.numbers_async(stop).remote_streaming() for stop in (3, 4, 5)}
        got: dict[int, list[int]] = {stop: [] for stop in streams}
        for _ in range(5):
            for stop, stream in streams.items():
                got[stop] += [item for item in [next(stream, None)] if item is not None]
        assert got == {stop: list(range(stop)) for stop in (3, 4, 5)}

    @pytest.mark.parametrize("name", ["numbers", "numbers_async"])
    def test_credit_stops_the_producer(self, connect: Connect, service: Any, name: str) -> None:
        """A consumer that reads nothing lets the producer run ahead by the credit, no further; later it gets everything."""
        client = connect()
        stream = client.method(name)(1000).remote_streaming()
        # The credit, and at most one item made and not yet sent.
        eventually(lambda: len(service.log) >= 64)
        assert client.echo(1).remote() == 1
        assert len(service.log) <= 65
        assert list(stream) == list(range(1000))

    def test_push_credit(self, client: RpcClient, service: Any) -> None:
        """A push stream that is not read fills up to its bound, then refuses; nothing is lost."""
        stream = client.responses().remote_streaming()
        eventually(lambda: service.source is not None)
        pushed = 0
        with pytest.raises(RpcBackpressure):
            while True:
                service.source.push(pushed)
                pushed += 1
                if pushed > 164:
                    raise AssertionError("no bound")
                if pushed == 64:
                    eventually(lambda: len(service.source) == 0)
        assert pushed == 164
        service.source.close()
        assert list(stream) == list(range(164))

    def test_whole_and_item_deadlines(self, client: RpcClient, service: Any) -> None:
        """10 items of 30 ms fit an item deadline of 10 s and not a whole deadline of 100 ms; the producer is told."""
        assert list(client.numbers_async(5, 0.03).remote_streaming(item_timeout_s=10)) == list(range(5))
        with pytest.raises(RpcTimeout):
            list(client.numbers_async(1000, 0.03).remote_streaming(timeout_s=0.1))
        eventually(lambda: service.closed.count("numbers_async") == 2)

    def test_an_endless_stream_is_dropped_with_its_object(self, client: RpcClient, service: Any) -> None:
        """Forgetting the stream cancels it."""
        stream = client.numbers(10**9).remote_streaming()
        assert [next(stream), next(stream), next(stream)] == [0, 1, 2]
        del stream
        eventually(lambda: service.closed == ["numbers"])

    def test_async_cancellation_inside_a_stream(self, client: RpcClient, service: Any) -> None:
        """Cancelling the task that reads ends the stream at the server."""

        async def read() -> None:
            async for _ in client.numbers_async(10**9, 0.001).remote_streaming():
                service.inside.release()

        async def run() -> None:
            task = asyncio.create_task(read())
            while not service.inside.acquire(blocking=False):
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(run())
        eventually(lambda: service.closed == ["numbers_async"])

    def test_one_source_has_one_consumer(self) -> None:
        """A worker that returns the same source twice hears about it."""
        source: StreamSource[int] = StreamSource()
        source._take()
        with pytest.raises(RpcStreamingError, match="fresh one"):
            source._take()

    @pytest.mark.parametrize("fast_path", [False, True])
    @pytest.mark.parametrize("leave", ["cancel", "forget", "read"])
    def test_a_source_hears_that_its_consumer_left(self, key: bytes, fast_path: bool, leave: str) -> None:
        """Once, whatever made it leave; never after a stream that was read to its end."""
        left: list[str] = []
        source: StreamSource[int] = StreamSource(on_cancel=lambda: left.append("left"))

        class Worker:
            @rpc_method(streaming=True, non_blocking=True)
            def pushed(self) -> StreamSource[int]:
                return source

        with (
            RpcServer(Worker(), "ipc://", key) as server,
            RpcClient(server.address, key, fast_path=fast_path, interface=Worker) as client,
        ):
            stream = client.pushed().remote_streaming(timeout_s=60)
            source.push(1)
            assert next(stream) == 1
            if leave == "read":
                source.close()
                assert list(stream) == []
            if leave != "forget":
                stream.cancel()
                stream.cancel()
            del stream
            eventually(lambda: not source.push(2))
            eventually(lambda: len(left) == (leave != "read"))
            assert source.cancelled == (leave != "read")
        assert left == ["left"] * (leave != "read")

    def test_a_source_wants_room(self) -> None:
        """A bound below one is an error."""
        with pytest.raises(ValueError, match="items_max"):
            StreamSource(0)


class TestShutdown:
    """What is pending is answered."""

    def test_everything_pending_is_answered(self, service: Any, key: bytes) -> None:
        """Running, queued and streaming calls of two clients all end with RpcServerStopped, promptly; later calls too."""
        server = RpcServer(service, "ipc://", key).start()
        with RpcClient(server.address, key) as one, RpcClient(server.address, key) as two:
            futures = [c.hold_alone().remote_future() for c in (one, two) for _ in range(5)]
            futures.append(one.hold_async().remote_future())
            stream = two.responses().remote_streaming()
            eventually(lambda: server.statistics().pending == 12)
            # One of the lane and the coroutine have begun: what has not begun when it is cancelled never sees it.
            for _ in range(2):
                assert service.inside.acquire(timeout=10)
            begun_s = time.monotonic()
            server.shutdown()
            for future in futures:
                assert isinstance(future.exception(10), RpcServerStopped)
            with pytest.raises(RpcServerStopped):
                next(stream)
            with pytest.raises(RpcServerStopped):
                one.echo(1).remote()
            assert time.monotonic() - begun_s < 10
            eventually(lambda: service.closed == ["hold_async"])

    def test_repeated_and_early(self, service: Any, key: bytes) -> None:
        """Shutting down ten times, or before a start, is quiet; a stopped server does not start again."""
        server = RpcServer(service, "ipc://", key)
        server.shutdown()
        with pytest.raises(RpcServerStopped):
            server.start()
        server = RpcServer(service, "ipc://", key).start()
        for _ in range(10):
            server.shutdown()

    def test_from_inside_a_handler(self, key: bytes) -> None:
        """A handler may stop its own server; the caller hears it."""

        class Worker:
            server: RpcServer

            @rpc_method
            def stop(self) -> None:
                """Stop."""
                self.server.shutdown()

            @rpc_method(non_blocking=True)
            def stop_inline(self) -> None:
                """Stop."""
                self.server.shutdown()

        for name in ("stop", "stop_inline"):
            worker = Worker()
            worker.server = RpcServer(worker, "ipc://", key).start()
            with RpcClient(worker.server.address, key) as client, pytest.raises(RpcServerStopped):
                client.method(name)().remote(timeout_s=10)

    def test_shutdown_is_not_remote(self, connect: Connect) -> None:
        """No client can stop a server."""
        with pytest.raises(RpcMethodNotFound):
            connect(interface=None).shutdown().remote()

    def test_on_lost_and_reconnect(self, service: Any, key: bytes, tmp_path: Any) -> None:
        """A lost session is told once and stays lost until ``reconnect``; then a restarted server is found."""
        address = f"ipc://{tmp_path}/s"
        tmp_path.chmod(0o700)
        lost: list[Exception] = []
        server = RpcServer(service, address, key).start()
        with RpcClient(address, key, on_lost=lost.append) as client:
            assert client.echo(1).remote() == 1
            server.shutdown()
            eventually(lambda: lost)
            with RpcServer(service, address, key):
                with pytest.raises(RpcServerStopped):
                    client.echo(1).remote()
                client.reconnect()
                assert client.echo(2).remote() == 2
                assert client.statistics().sessions == 2
        assert [type(error) for error in lost[:1]] == [RpcServerStopped]


def test_declarations_are_checked() -> None:
    """What cannot be served is an error at declaration, naming the method."""
    with pytest.raises(RpcConfigError, match="generator"):

        @rpc_method
        def items(self: Any) -> Any:
            yield 1

    with pytest.raises(RpcConfigError, match="cannot stream"):

        @rpc_method(streaming=True)
        async def coroutine(self: Any) -> Any:
            return 1

    with pytest.raises(RpcConfigError, match="concurrency_max"):
        rpc_method(non_blocking=True, concurrency_max=2)

    class Variadic:
        @rpc_method
        def call(self, *args: int) -> None:
            """No declared shape."""

    class Reserved:
        @rpc_method
        def close(self) -> None:
            """The client's own name."""

    class Undefined:
        @rpc_method
        def call(self, value: NoSuchType) -> None:  # noqa: F821
            """An annotation of nothing."""

    for worker, text in ((Variadic, "args"), (Reserved, "close"), (Undefined, "NoSuchType")):
        with pytest.raises(RpcConfigError, match=text):
            RpcServer(worker(), "ipc://", b"k" * 32)


def test_an_unmarked_override_closes_a_method(key: bytes) -> None:
    """A subclass that overrides without the mark takes the method off the list."""

    class Base:
        @rpc_method(non_blocking=True)
        def call(self) -> int:
            """Open."""
            return 1

    class Closed(Base):
        def call(self) -> int:
            return 2

    with RpcServer(Closed(), "ipc://", key) as server, RpcClient(server.address, key) as client:
        error = client.call().remote_future().exception(10)
    assert isinstance(error, RpcMethodNotFound)


class TestArrayAnnotations:
    """``NDArray[T]``, as a strict type checker wants it, in parameters, results and within other types."""

    class Arrays:
        """Each way to write it."""

        @rpc_method
        def plain(self, value: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
            """Of one element type."""
            return value.astype(np.int64)

        @rpc_method
        def inner(self, values: list[npt.NDArray[Any]] | None) -> dict[str, npt.NDArray[np.floating]]:
            """Of any element type; of several."""
            return {str(index): value.astype(np.float32) for index, value in enumerate(values or ())}

        @rpc_method
        def wrong(self) -> npt.NDArray[np.int64]:
            """A result that is not what it says."""
            return np.zeros(2, np.int8)  # type: ignore[return-value]

    @pytest.fixture
    def arrays(self, key: bytes) -> Iterator[RpcClient]:
        """A client that knows the annotations."""
        with (
            RpcServer(self.Arrays(), "ipc://", key) as server,
            RpcClient(server.address, key, interface=self.Arrays) as client,
        ):
            yield client

    def test_they_travel(self, arrays: RpcClient) -> None:
        """There and back."""
        got = arrays.plain(np.arange(3, dtype=np.int32)).remote()
        assert (got.dtype, got.tolist()) == (np.int64, [0, 1, 2])
        assert arrays.inner(None).remote() == {}
        got = arrays.inner([np.arange(2), np.zeros(1, bool)]).remote()
        assert {name: (value.dtype, value.tolist()) for name, value in got.items()} == {
            "0": (np.float32, [0.0, 1.0]),
            "1": (np.float32, [0.0]),
        }

    def test_another_element_type_is_refused(self, arrays: RpcClient) -> None:
        """Named with its place; the handler does not run. A result's is the answer's fault."""
        with pytest.raises(RpcArgumentError, match=r"plain\(\): value: Expected an array of int32, got one of int64"):
            arrays.plain(np.arange(3)).remote()
        with pytest.raises(RpcArgumentError, match=r"Expected `numpy.ndarray`, got `int` - at `\$\[1\]`"):
            arrays.inner([np.arange(3), 4]).remote()
        with pytest.raises(RpcProtocolError, match="Expected an array of int64, got one of int8"):
            arrays.wrong().remote()


def test_a_class_in_the_place_of_a_worker_is_told(key: bytes) -> None:
    """And a worker in the place of a class, by the error that the table promises."""
    with pytest.raises(RpcConfigError, match="want a worker, got a class"):
        RpcServer(TestArrayAnnotations.Arrays, "ipc://", key)
    with pytest.raises(RpcConfigError, match="want the worker's class, got <"):
        RpcClient("ipc:///nowhere/s", key, interface=TestArrayAnnotations.Arrays())  # type: ignore[arg-type]
