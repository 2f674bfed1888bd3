"""An interrupt before any bytecode of a verb: the session lives, every account is zero, nothing ran twice, nobody hangs."""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

import rpc_local_registry
from rpc_local_registry import RpcClient, RpcConfig, RpcError, RpcServer, RpcTimeout, new_key, rpc_method
from rpc_local_registry import _wire as wire
from rpc_local_registry.testing import eventually

SOURCES = str(Path(rpc_local_registry.__file__).parent)
PATIENCE_S = 5.0


class Stop(KeyboardInterrupt):
    """An interrupt."""


@functools.cache
def untouched(code: CodeType) -> frozenset[int]:
    """Offsets before which no interrupt can come: NOPs, and what follows the body of a ``with`` up to the call of ``__exit__``.

    CPython looks for signals after a call, where a function begins and where a loop goes back: never between these. (An
    exception there would leave every lock of every program held: no handler covers these places.)
    """
    instructions = list(dis.get_instructions(code))
    found = {each.offset for each in instructions if each.opname == "NOP"}
    for index, first in enumerate(instructions):
        nones = instructions[index : index + 3]
        if not all(each.opname == "LOAD_CONST" and each.argval is None for each in nones) or first.offset in found:
            continue
        rest = instructions[index + 3 : index + 5]
        call = next((each for each in rest if each.opname == "CALL"), None)
        if call is not None and call.arg == 2:
            found.update(each.offset for each in instructions[index : instructions.index(call) + 1])
    return frozenset(found)


class Injector:
    """Raises once, before a chosen bytecode of the package in this thread; of one of its functions, if that is named."""

    def __init__(self, at: int, function: str = "") -> None:
        self._at = at
        self._function = function
        self._count = 0

    @property
    def has_raised(self) -> bool:
        return self._count >= self._at

    def _enter(self, frame: Any, event: str, argument: object) -> Any:
        # What is raised in ``__del__`` is dropped by the interpreter.
        if not frame.f_code.co_filename.startswith(SOURCES) or frame.f_code.co_name == "__del__":
            return None
        if self._function not in ("", frame.f_code.co_qualname):
            return None
        # In this order: Python 3.13 asks for the function first.
        frame.f_trace, frame.f_trace_lines, frame.f_trace_opcodes = self._look, False, True
        return self._look

    def _look(self, frame: Any, event: str, argument: object) -> Any:
        if event == "opcode" and not self.has_raised and frame.f_lasti not in untouched(frame.f_code):
            self._count += 1
            if self.has_raised:
                raise Stop(f"before bytecode {self._at}: {frame.f_code.co_qualname}, line {frame.f_lineno}")
        return self._look

    def call(self, body: Callable[[], Any]) -> tuple[Any, Stop | None]:
        before = sys.gettrace()
        sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for it when tracing begins
        sys.settrace(self._enter)
        try:
            return body(), None
        except Stop as stop:
            return None, stop
        finally:
            sys.settrace(before)


class Worker:
    """Counts what runs, by its number."""

    def __init__(self) -> None:
        self.ran: dict[int, int] = {}
        self.gate = threading.Event()

    @rpc_method(non_blocking=True)
    def run(self, number: int) -> int:
        """Count."""
        self.ran[number] = self.ran.get(number, 0) + 1
        return number

    @rpc_method(non_blocking=True, streaming=True)
    def items(self, number: int) -> Iterator[int]:
        """Count, and three items."""
        self.run(number)
        yield from (number, number + 1, number + 2)

    @rpc_method(streaming=True)
    def count(self, stop: int) -> Iterator[int]:
        """Many items."""
        yield from range(stop)

    @rpc_method
    def wait(self, number: int) -> int:
        """Until the gate opens."""
        self.gate.wait(PATIENCE_S)
        return number


class Bench:
    """One server and one client that go through a whole sweep."""

    def __init__(self) -> None:
        self.worker = Worker()
        key = new_key()
        self.server = RpcServer(self.worker, "ipc://", key).start()
        self.client = RpcClient(self.server.address, key, config=RpcConfig()).start()
        self.number = 0
        #: Numbers that carried two different messages.
        self.twice = 0

    def watch_numbers(self) -> None:
        """From here on no number may carry two different messages: a code's nonce would be used twice."""
        engine = self.client._core.engine
        assert engine is not None
        link, send = engine._link, engine._link.send
        sent: dict[bytes, bytes] = {}

        def watched(frames: Any, routing_id: bytes = b"") -> bool:
            first = bytes(frames[0])
            number = first[wire.MAC_BYTES + 32 : wire.MAC_BYTES + 40]
            self.twice += sent.setdefault(number, first) != first
            return send(frames, routing_id)

        link.send = watched  # type: ignore[method-assign]

    def next_number(self) -> int:
        self.number += 1
        return self.number

    def lend(self) -> None:
        """Until the next call may borrow the socket."""
        engine = self.client._core.engine
        assert engine is not None
        for _ in range(200):
            self.client.run(self.next_number()).remote(timeout_s=PATIENCE_S)
            if engine._turn.lent:
                return
        raise AssertionError("the socket is never lent")

    def check(self, story: object) -> None:
        """Everything as before the call."""
        number = self.next_number()
        try:
            assert self.client.run(number).remote(timeout_s=PATIENCE_S) == number
        except RpcError as error:
            raise AssertionError(f"after an interrupt {story}: {error}") from error

        def settled() -> bool:
            now = self.client.statistics()
            open_now = (now.pending, now.pending_bytes, now.oneway_sent - now.oneway_done, now.oneway_lost)
            return open_now == (0, 0, 0, 0) and self.server.statistics().pending == 0

        eventually(settled, PATIENCE_S)
        engine = self.client._core.engine
        assert engine is not None
        assert not engine.busy, story
        assert self.client.statistics().sessions == 1, story
        assert set(self.client.statistics().refused) == set(), story
        assert max(self.worker.ran.values()) == 1, story
        assert self.twice == 0, story

    def close(self) -> None:
        self.client.close()
        self.server.shutdown()


@contextlib.contextmanager
def bench() -> Iterator[Bench]:
    made = Bench()
    try:
        yield made
    finally:
        made.close()


def remote(bench: Bench) -> Any:
    return bench.client.run(bench.number).remote(timeout_s=PATIENCE_S)


def remote_future(bench: Bench) -> Any:
    future: Future[Any] = bench.client.run(bench.number).remote_future(timeout_s=PATIENCE_S)
    return future


def remote_oneway(bench: Bench) -> Any:
    bench.client.run(bench.number).remote_oneway()


def remote_streaming(bench: Bench) -> Any:
    with bench.client.items(bench.number).remote_streaming(timeout_s=PATIENCE_S) as stream:
        return list(stream)


def cancelled_future(bench: Bench) -> Any:
    bench.client.wait(bench.number).remote_future(timeout_s=PATIENCE_S).cancel()


def timed_out(bench: Bench) -> Any:
    with contextlib.suppress(RpcTimeout):
        bench.client.wait(bench.number).remote(timeout_s=0.003)


VERBS = [remote, remote_future, remote_oneway, remote_streaming, cancelled_future, timed_out]


def sweep(verb: Callable[[Bench], Any], *, borrowed: bool, first: int, stride: int) -> int:
    """How many bytecodes were interrupted."""
    with bench() as made:
        if verb in (cancelled_future, timed_out):
            made.worker.gate.clear()
        made.watch_numbers()
        interrupted = 0
        for at in range(first, 100_000, stride):
            if borrowed:
                made.lend()
            made.next_number()
            injector = Injector(at)
            value, stop = injector.call(lambda: verb(made))
            if isinstance(value, Future):
                assert value.result(PATIENCE_S) == made.number
            if not injector.has_raised:
                break
            interrupted += 1
            made.worker.gate.set()
            made.check(stop)
            made.worker.gate.clear()
        return interrupted


@pytest.mark.parametrize("verb", VERBS)
def test_an_interrupt_costs_one_call(verb: Callable[[Bench], Any]) -> None:
    """By the I/O thread: every 23rd bytecode, and no session is lost, no account open, no call run twice."""
    assert sweep(verb, borrowed=False, first=1, stride=23) > 10


def test_an_interrupt_on_the_borrowed_socket() -> None:
    """The caller itself sends and receives: whatever it was in the middle of, the I/O thread goes on with it."""
    assert sweep(remote, borrowed=True, first=1, stride=7) > 60


def test_what_is_queued_waits_for_nobody() -> None:
    """Interrupted between queueing and the wake-up, a call is sent, or taken back, without the help of another one."""
    with bench() as made:
        for at in range(1, 1000):
            made.next_number()
            before = made.client.statistics().oneway_done
            injector = Injector(at, "Engine.submit")
            _, stop = injector.call(lambda: remote_oneway(made))

            def settled() -> bool:
                now = made.client.statistics()
                return now.oneway_sent == now.oneway_done and now.pending_bytes == 0

            eventually(settled, PATIENCE_S)
            assert made.worker.ran.get(made.number, 0) == made.client.statistics().oneway_done - before, stop
            if not injector.has_raised:
                return
        raise AssertionError("it never ends")


@pytest.mark.parametrize("function", ["Call.remote_streaming", "RemoteStream.__init__"])
def test_a_stream_that_nobody_got_is_over(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted after its call was made: the server hears of it, and what was half made ends without a complaint."""
    complaints: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", complaints.append)
    with bench() as made:
        for at in range(1, 1000):
            injector = Injector(at, function)
            stream, stop = injector.call(lambda: made.client.count(10**9).remote_streaming(timeout_s=600))
            if stream is not None:
                stream.cancel()
            del stream
            eventually(lambda: made.client.statistics().pending == made.server.statistics().pending == 0, PATIENCE_S)
            assert not complaints, stop
            if not injector.has_raised:
                assert at > 5
                return
        raise AssertionError("it never ends")


@pytest.mark.slow
@pytest.mark.parametrize("borrowed", [False, True])
@pytest.mark.parametrize("verb", VERBS)
def test_an_interrupt_before_every_bytecode(verb: Callable[[Bench], Any], borrowed: bool) -> None:
    """The same, without gaps."""
    assert sweep(verb, borrowed=borrowed, first=1, stride=1) > 200


def test_an_interrupt_in_close() -> None:
    """Closing again closes; nothing of the client stays."""
    for at in range(1, 100_000, 31):
        with bench() as made:
            made.client.run(made.next_number()).remote_oneway()
            injector = Injector(at)
            injector.call(made.client.close)
            made.client.close()
            with pytest.raises(RpcError):
                made.client.run(made.next_number()).remote()
            engine = made.client._core.engine
            assert engine is not None
            eventually(lambda engine=engine: not engine._thread.is_alive(), PATIENCE_S)  # type: ignore[misc]
            assert made.client.statistics().oneway_done == 1
        if not injector.has_raised:
            return


@pytest.mark.parametrize("bounds", [{"stream_credit": 4}, {"stream_bytes": 600}])
def test_interrupts_of_a_reader_cost_no_credit(bounds: dict[str, int]) -> None:
    """An item may be lost with each, and all that the server may send by one after the other; the stream goes on to its end."""
    with bench() as made:
        key = made.client._core._key
        with RpcClient(made.server.address, key, config=RpcConfig(**bounds)) as client:
            stream = client.count(300).remote_streaming(timeout_s=60, item_timeout_s=PATIENCE_S)
            got: list[int] = []
            over = False

            def read() -> None:
                nonlocal over
                try:
                    got.append(next(stream))
                except StopIteration:
                    over = True

            at = 1
            while not over:
                # At one place as often as the credit is large: what one reader loses there, nobody tells the server of.
                for _ in range(12):
                    injector = Injector(at)
                    injector.call(read)
                # Without an interrupt, which may hide a time-out.
                if not over:
                    read()
                at = at + 7 if injector.has_raised else 1
            assert stream._pending.next_index == 300  # type: ignore[attr-defined]
            assert got == sorted(set(got))
            assert 0 < len(got) < 300


@pytest.mark.slow
# What is raised in the callback of a weak reference is dropped by the interpreter, whosever set that is.
@pytest.mark.filterwarnings("ignore:.*WeakSet.*:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timer signals")
def test_signals_at_any_time() -> None:
    """Real ones, also inside the binding, which may drop what it has just received."""
    chance = random.Random(7)
    armed = False

    def interrupt(*_: object) -> None:
        if armed:
            raise Stop

    before = signal.signal(signal.SIGALRM, interrupt)
    interrupts = 0
    # What is raised in a finalizer, or where a plugin listens to collections, is dropped by the interpreter.
    gc.disable()
    try:
        with bench() as made:
            client = made.client
            while interrupts < 500:
                for _ in range(chance.randrange(12)):
                    number = made.next_number()
                    assert client.run(number).remote(timeout_s=PATIENCE_S) == number
                verb = chance.choice([remote, remote, remote, remote_oneway, remote_future])
                try:
                    armed = True
                    signal.setitimer(signal.ITIMER_REAL, chance.uniform(5e-6, 4e-4))
                    try:
                        for _ in range(3):
                            made.next_number()
                            verb(made)
                    finally:
                        armed = False
                        signal.setitimer(signal.ITIMER_REAL, 0)
                except (Stop, RuntimeError) as error:
                    # A Condition of the standard library that is interrupted as it wakes leaves with an error of its own.
                    if not isinstance(error, Stop) and not isinstance(error.__context__, Stop):
                        raise
                    interrupts += 1
                    armed = False
            made.check("signals")
    finally:
        gc.enable()
        signal.signal(signal.SIGALRM, before)
