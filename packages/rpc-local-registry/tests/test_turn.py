"""Borrowing the socket: who has the turn, and what nobody notices of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

from rpc_local_registry import (
    RpcClient,
    RpcConfig,
    RpcError,
    RpcServer,
    RpcServerStopped,
    RpcTimeout,
    new_key,
    rpc_method,
)
from rpc_local_registry._codec import TypedDecoder
from rpc_local_registry._turn import Turn
from rpc_local_registry.testing import eventually

PATIENCE_S = 20.0


class TestTurn:
    """The pure part."""

    def test_only_what_is_lent_can_be_taken(self) -> None:
        """By one at a time, until it is given back; giving twice or without having it changes nothing."""
        turn = Turn()
        me, other = object(), object()
        assert not turn.take(me)
        turn.lend()
        assert turn.take(me)
        assert not turn.take(other)
        turn.give(other)
        assert not turn.take(other)
        turn.give(me)
        turn.give(me)
        assert turn.take(other)
        turn.give(other)
        turn.want()
        turn.take_back()
        assert not turn.take(me)

    def test_taking_back_waits_for_the_end_of_the_exchange(self) -> None:
        """And nobody begins another one meanwhile."""
        turn = Turn()
        me, other = object(), object()
        turn.lend()
        assert turn.take(me)
        turn.want()
        back = threading.Thread(target=turn.take_back, daemon=True)
        back.start()
        assert not turn.take(other)
        assert back.is_alive()
        turn.give(me)
        assert not turn.take(other)
        back.join(PATIENCE_S)
        assert not back.is_alive()
        assert not turn.lent


class Worker:
    """Fast, slow and large."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.seen: list[Any] = []

    @rpc_method(non_blocking=True)
    def echo(self, value: Any) -> Any:
        """Give back."""
        return value

    @rpc_method(non_blocking=True)
    def note(self, value: int) -> None:
        """Remember."""
        self.seen.append(value)

    @rpc_method(non_blocking=True)
    def make(self, count: int) -> Any:
        """A large answer to a small call."""
        return np.arange(count)

    @rpc_method
    def wait(self) -> str:
        """Until the gate opens."""
        return "opened" if self.gate.wait(PATIENCE_S) else "never"


class Answer(msgspec.Struct):
    """A result whose making calls the worker again."""

    value: int
    inner: ClassVar[Callable[[int], object]]

    def __post_init__(self) -> None:
        type(self).inner(self.value)


class Lent:
    """A client whose next blocking call borrows the socket."""

    def __init__(self, **config: Any) -> None:
        self.worker = Worker()
        key = new_key()
        self.server = RpcServer(self.worker, "ipc://", key, config=RpcConfig(**config)).start()
        self.lost: list[RpcError] = []
        self.client = RpcClient(self.server.address, key, config=RpcConfig(**config), on_lost=self.lost.append).start()

    @property
    def exchanges(self) -> int:
        engine = self.client._core.engine
        assert engine is not None
        return engine._exchanges

    def __enter__(self) -> Lent:
        self.until_lent()
        return self

    def until_lent(self) -> None:
        """The next call may borrow the socket."""
        engine = self.client._core.engine
        assert engine is not None
        for _ in range(500):
            self.client.echo(0).remote(timeout_s=PATIENCE_S)
            if engine._turn.lent:
                return
        raise AssertionError("never lent")

    def __exit__(self, *_: object) -> None:
        self.worker.gate.set()
        self.client.close()
        self.server.shutdown()


class TestBorrowing:
    """Over a real socket."""

    def test_calls_in_a_row_need_no_other_thread(self) -> None:
        """They are exchanged on the caller's own, errors and counts as ever."""
        with Lent() as lent:
            before = lent.exchanges
            for number in range(50):
                assert lent.client.echo(number).remote(timeout_s=PATIENCE_S) == number
            with pytest.raises(RpcError, match="not found"):
                lent.client.nothing().remote()
            assert lent.exchanges > before
            statistics = lent.client.statistics()
            assert (statistics.pending, statistics.pending_bytes, statistics.late_answers) == (0, 0, 0)

    def test_a_slow_answer_holds_nobody_up(self) -> None:
        """The borrower of the socket waits; every other verb of every thread is served meanwhile."""
        with Lent() as lent, ThreadPoolExecutor(1) as pool:
            slow = pool.submit(lambda: lent.client.wait().remote(timeout_s=PATIENCE_S))
            eventually(lambda: len(lent.client._core.engine.pending) > 0, PATIENCE_S)  # type: ignore[union-attr]
            assert lent.client.echo(1).remote(timeout_s=PATIENCE_S) == 1
            assert lent.client.echo(2).remote_future().result(PATIENCE_S) == 2
            lent.client.note(3).remote_oneway()
            eventually(lambda: lent.worker.seen == [3], PATIENCE_S)
            assert not slow.done()
            lent.worker.gate.set()
            assert slow.result(PATIENCE_S) == "opened"

    def test_nobody_borrows_while_something_else_is_under_way(self) -> None:
        """An answer of another call could come: the I/O thread keeps the socket until that is over."""
        with Lent() as lent:
            slow = lent.client.wait().remote_future(timeout_s=PATIENCE_S)
            before = lent.exchanges
            for number in range(50):
                assert lent.client.echo(number).remote(timeout_s=PATIENCE_S) == number
            assert lent.exchanges == before
            lent.worker.gate.set()
            assert slow.result(PATIENCE_S) == "opened"

    def test_a_borrower_leaves_an_answer_of_several_frames(self) -> None:
        """To the I/O thread, whole; the session goes on."""
        with Lent() as lent:
            borrowed = 0
            while borrowed < 5:
                lent.until_lent()
                before = lent.exchanges
                made = lent.client.make(100_000).remote(timeout_s=PATIENCE_S)
                borrowed += lent.exchanges - before
                assert (made == np.arange(100_000)).all()
            assert lent.client.statistics().sessions == 1
            assert not lent.client.statistics().refused

    def test_deadlines_and_large_messages(self) -> None:
        """A borrower's call ends in time; frames beside the first travel by the I/O thread."""
        with Lent(inline_bytes_max=64) as lent:
            with pytest.raises(RpcTimeout):
                lent.client.wait().remote(timeout_s=0.05)
            for _ in range(20):
                array = np.arange(1000)
                assert (lent.client.echo(array).remote(timeout_s=PATIENCE_S) == array).all()
                assert lent.client.echo("x" * 500).remote(timeout_s=PATIENCE_S) == "x" * 500

    def test_decoding_may_call_again(self) -> None:
        """What a result's ``__post_init__`` does is done without the turn."""
        with Lent() as lent:
            inner: list[int] = []
            method = lent.client.method("echo")
            method.decoder = TypedDecoder(Answer)
            Answer.inner = lambda value: inner.append(lent.client.echo(value).remote(timeout_s=PATIENCE_S))
            before = lent.exchanges
            assert method({"value": 5}).remote(timeout_s=PATIENCE_S).value == 5
            assert (inner, lent.exchanges > before) == ([5], True)

    def test_a_stop_is_noticed_while_nobody_calls(self) -> None:
        """The I/O thread takes the socket back by itself."""
        with Lent() as lent:
            lent.server.shutdown()
            eventually(lambda: [type(error) for error in lent.lost] == [RpcServerStopped], PATIENCE_S)

    def test_many_threads_at_a_time(self) -> None:
        """Whoever has the turn: each gets its own answers, and order of one-way calls holds."""
        with Lent() as lent, ThreadPoolExecutor(4) as pool:

            def work(thread: int) -> None:
                for number in range(200):
                    value = thread * 1000 + number
                    assert lent.client.echo(value).remote(timeout_s=PATIENCE_S) == value
                    if thread == 0:
                        lent.client.note(number).remote_oneway()

            for done in [pool.submit(work, thread) for thread in range(4)]:
                done.result(PATIENCE_S)
            lent.client.close()
            assert lent.worker.seen == list(range(200))
