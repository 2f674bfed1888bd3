"""Whatever callbacks, answers, interrupts or closed loops do: every ticket ends, once, and the books balance."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rpc_batch_submit import (
    AsyncioBatchSubmitter,
    BatchAborted,
    BatchConfigError,
    BatchItemFailed,
    BatchOutcomeError,
    BatchSendFailed,
    BatchSendUnknown,
    BatchSubmitConfig,
    BatchUsageError,
    ThreadBatchSubmitter,
    take_in,
    unpack_outcomes,
)
from rpc_batch_submit.testing import FakeSender, Tracker

NEVER = BatchSubmitConfig(batch_max=100, delay_ms=60_000)
PAIRS = BatchSubmitConfig(batch_max=2, delay_ms=60_000)
PATIENCE_S = 20.0


class Array:
    """As NumPy's: compared, it gives an array again, which is neither true nor false; it has no hash."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> Any:
        return Array()

    def __bool__(self) -> bool:
        raise ValueError("the truth value of an array is ambiguous")


class NothingRan(Exception):
    """A send that reached nobody."""

    nothing_ran = True


def balanced(submitter: Any) -> None:
    """Nothing is outstanding, and the core's invariants hold."""
    submitter._core.validate()
    statistics = submitter.statistics()
    assert (statistics.outstanding, statistics.buffered) == (0, 0)
    assert statistics.submitted == statistics.settled + statistics.dropped_in_fork


def broken(*_: object) -> None:
    """A callback that fails."""
    raise RuntimeError("the caller's own bug")


class TestCallbacks:
    """Functions of the caller that raise."""

    @pytest.mark.parametrize("hook", ["rollback", "on_unknown", "refused"])
    def test_a_failed_send_with_broken_hooks(self, hook: str, caplog: pytest.LogCaptureFixture) -> None:
        """Later tickets end, the timer lives, close returns; the bug is in the log."""
        sends: list[list[int]] = []

        def send(batch: list[int]) -> None:
            sends.append(batch)
            if 0 in batch:
                raise OSError("gone")

        config = BatchSubmitConfig(batch_max=100, delay_ms=1)
        with caplog.at_level(logging.ERROR):
            submitter = ThreadBatchSubmitter(send, config, **{hook: broken})
            first = submitter.submit(0)
            assert isinstance(first.exception(PATIENCE_S), BatchSendUnknown)
            assert submitter.submit(1).result(PATIENCE_S) is None
            assert submitter.close(PATIENCE_S)
        assert sends == [[0], [1]]
        assert "the caller's own bug" in caplog.text
        balanced(submitter)

    def test_the_same_in_asyncio(self, caplog: pytest.LogCaptureFixture) -> None:
        """``aclose`` returns."""

        async def run() -> None:
            sender = FakeSender()
            submitter = AsyncioBatchSubmitter(sender, PAIRS, rollback=broken, on_unknown=broken)
            tickets = [submitter.submit(n) for n in range(4)]
            sender.fail(0, OSError("gone"))
            sender.accept(1)
            assert await submitter.aclose(PATIENCE_S)
            assert [type(t.exception()) for t in tickets] == [BatchSendUnknown] * 2 + [type(None)] * 2
            balanced(submitter)

        with caplog.at_level(logging.ERROR):
            asyncio.run(run())
        assert caplog.text.count("the caller's own bug") >= 2

    @pytest.mark.parametrize("hook", ["size_of", "id_of", "bypass", "register"])
    def test_what_raises_before_the_send_takes_nothing(self, hook: str) -> None:
        """The error comes out of ``submit``; nothing is registered, buffered or counted, and the next request is served."""
        tracker = Tracker()
        sender = FakeSender(immediate=True)
        calls = iter([broken, None])

        def sometimes(*_: object) -> Any:
            action = next(calls, None)
            return 0 if action is None else action()

        hooks: dict[str, Any] = {"register": tracker.register, "rollback": tracker.rollback, hook: sometimes}
        submitter = ThreadBatchSubmitter(sender, NEVER, **hooks)
        with pytest.raises(RuntimeError):
            submitter.submit(1)
        assert (tracker.tracked, tracker.rolled_back, submitter.statistics().submitted) == ([], [], 0)
        submitter.submit(2)
        assert submitter.close(PATIENCE_S)
        assert sender.requests == [2]
        balanced(submitter)

        async def run() -> None:
            nonlocal calls
            calls = iter([broken])
            inner = AsyncioBatchSubmitter(sender, NEVER, **hooks)
            with pytest.raises(RuntimeError):
                inner.submit(1)
            assert inner.statistics().submitted == 0
            inner._core.validate()

        tracker.tracked.clear()
        asyncio.run(run())

    def test_ids_that_are_none(self) -> None:
        """An id that cannot be one is refused before anything is touched."""
        tracker = Tracker()
        for bad in ([1], {}, Array()):
            submitter = ThreadBatchSubmitter(
                FakeSender(), NEVER, register=tracker.register, rollback=tracker.rollback, id_of=lambda _, bad=bad: bad
            )
            with pytest.raises(BatchUsageError, match="cannot be an id"):
                submitter.submit(1)
            assert not submitter.abort(bad)
            submitter._core.validate()
        assert (tracker.tracked, tracker.rolled_back) == ([], [])

    @pytest.mark.parametrize("size", [-1, 1.5, None, "x"])
    def test_sizes_that_are_none(self, size: Any) -> None:
        """Likewise."""
        submitter = ThreadBatchSubmitter(FakeSender(), NEVER, register=broken, size_of=lambda _: size)
        with pytest.raises(BatchUsageError, match="size_bytes"):
            submitter.submit(1)

    def test_duplicates_from_many_threads(self) -> None:
        """Of many threads that submit one id at once exactly one is registered, and nobody rolls it back."""
        tracker = Tracker()
        refused: list[int] = []
        submitter = ThreadBatchSubmitter(
            FakeSender(immediate=True),
            NEVER,
            register=tracker.register,
            rollback=tracker.rollback,
            id_of=lambda _: "id",
        )
        barrier = threading.Barrier(8)

        def run(number: int) -> None:
            barrier.wait()
            try:
                submitter.submit(number)
            except BatchUsageError:
                refused.append(number)

        threads = [threading.Thread(target=run, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(tracker.tracked), len(refused), tracker.rolled_back) == (1, 7, [])

    @pytest.mark.parametrize("field", ["send_batch", "register", "rollback", "on_unknown", "id_of"])
    def test_what_is_not_callable(self, field: str) -> None:
        """Named at construction."""
        options: dict[str, Any] = {"send_batch": print, field: 5}
        with pytest.raises(BatchConfigError, match=field):
            ThreadBatchSubmitter(options.pop("send_batch"), **options)


class TestInterrupts:
    """KeyboardInterrupt and SystemExit, wherever the caller's code raises them."""

    @pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
    def test_inside_the_send(self, kind: type[BaseException]) -> None:
        """It comes out of ``submit``; the batch has ended as unknown, and the submitter goes on."""
        tracker = Tracker()
        unknown: list[int] = []

        def send(batch: list[int]) -> None:
            if 1 in batch:
                raise kind

        submitter = ThreadBatchSubmitter(
            send, PAIRS, register=tracker.register, rollback=tracker.rollback, on_unknown=lambda r, _: unknown.append(r)
        )
        first = submitter.submit(0)
        with pytest.raises(kind):
            submitter.submit(1)
        assert isinstance(first.exception(0), BatchSendUnknown)
        assert (unknown, tracker.tracked) == ([0, 1], [])
        submitter.submit(2)
        assert submitter.close(PATIENCE_S)
        balanced(submitter)

    @pytest.mark.parametrize("where", ["rollback", "on_unknown", "ticket"])
    def test_inside_a_callback(self, where: str) -> None:
        """The other requests of the batch are told and settled before it is raised."""
        told: list[int] = []

        def interrupt(request: Any, _: object = None) -> None:
            told.append(request)
            if len(told) == 1:
                raise KeyboardInterrupt

        sender = FakeSender()
        hooks = {} if where == "ticket" else {where: interrupt}
        submitter = ThreadBatchSubmitter(sender, PAIRS, **hooks)
        tickets = [submitter.submit(0)]
        if where == "ticket":
            tickets[0].add_done_callback(lambda _: interrupt(0))
        tickets.append(submitter.submit(1))
        if where == "ticket":
            tickets[1].add_done_callback(lambda _: interrupt(1))
        with pytest.raises(KeyboardInterrupt):
            sender.fail(0, OSError("gone"))
        assert told == [0, 1]
        assert all(ticket.done() for ticket in tickets)
        assert submitter.close(PATIENCE_S)
        balanced(submitter)

    def test_inside_every_callback(self) -> None:
        """However many are interrupted: all are told, and the first interrupt is what is raised."""
        sender = FakeSender()
        told: list[int] = []

        def interrupt(number: int) -> None:
            told.append(number)
            raise KeyboardInterrupt(number)

        submitter = ThreadBatchSubmitter(sender, BatchSubmitConfig(batch_max=20, delay_ms=60_000))
        tickets = []
        for number in range(20):
            tickets.append(submitter.submit(number))
            tickets[number].add_done_callback(lambda _, number=number: interrupt(number))
        with pytest.raises(KeyboardInterrupt) as raised:
            sender.accept(0)
        assert raised.value.args == (0,)
        assert told == list(range(20))
        assert all(ticket.exception(0) is None for ticket in tickets)
        assert submitter.close(PATIENCE_S)
        balanced(submitter)

    def test_inside_a_registration(self) -> None:
        """As if the request had never been there."""
        submitter = ThreadBatchSubmitter(FakeSender(), NEVER, register=_interrupt, id_of=lambda r: r)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                submitter.submit(1)
        balanced(submitter)

    def test_inside_the_timer(self, caplog: pytest.LogCaptureFixture) -> None:
        """The timer thread serves on."""
        sends: list[int] = []

        def send(batch: list[int]) -> None:
            sends.extend(batch)
            if 0 in batch:
                raise SystemExit

        with ThreadBatchSubmitter(send, BatchSubmitConfig(batch_max=100, delay_ms=1)) as submitter:
            assert isinstance(submitter.submit(0).exception(PATIENCE_S), BatchSendUnknown)
            assert submitter.submit(1).result(PATIENCE_S) is None
        assert sends == [0, 1]
        balanced(submitter)


def _interrupt(_: object) -> None:
    raise KeyboardInterrupt


class TestOutcomes:
    """Answers that make no sense."""

    @pytest.mark.parametrize("driver", ["threads", "asyncio"])
    def test_arrays_as_outcomes(self, driver: str) -> None:
        """An outcome whose comparison has no truth value is an error of that request alone."""
        outcomes = [Array(), None]
        if driver == "threads":
            submitter = ThreadBatchSubmitter(lambda batch: outcomes, PAIRS)
            tickets: list[Any] = [submitter.submit(n) for n in range(2)]
            got = [ticket.exception(PATIENCE_S) for ticket in tickets]
            assert submitter.close(PATIENCE_S)
        else:

            async def run() -> list[Any]:
                inner = AsyncioBatchSubmitter(lambda batch: outcomes, PAIRS)
                futures = [inner.submit(n) for n in range(2)]
                assert await inner.aclose(PATIENCE_S)
                return [future.exception() for future in futures]

            got = asyncio.run(run())
        assert [type(error) for error in got] == [BatchOutcomeError, type(None)]

    def test_sequences_that_lie(self) -> None:
        """A length or an item that raises, or fewer items than told: an error per request, each of its own."""

        class Lying(list[Any]):
            def __init__(self, length: Any, items: Any) -> None:
                super().__init__()
                self.length, self.items = length, items

            def __len__(self) -> int:
                return int(self.length())

            def __iter__(self) -> Iterator[Any]:
                return iter(self.items())

        for answer in (Lying(broken, list), Lying(lambda: 2, broken), Lying(lambda: 2, lambda: [None])):
            got = unpack_outcomes(answer, 2)
            assert [type(error) for error in got] == [BatchOutcomeError] * 2
            assert got[0] is not got[1]

    def test_three_outcomes(self) -> None:
        """Served, refused and unknown reach ticket, hooks and statistics; a true answer of the hook keeps the registration."""
        tracker = Tracker()
        asked: list[int] = []
        aborted: list[int] = []

        def on_unknown(request: int, error: BaseException) -> bool:
            asked.append(request)
            if request == 6:
                return True
            aborted.append(request)
            return False

        sender = FakeSender()
        submitter = ThreadBatchSubmitter(
            sender, PAIRS, register=tracker.register, rollback=tracker.rollback, on_unknown=on_unknown
        )
        tickets = [submitter.submit(n) for n in range(8)]
        sender.accept(0, [None, "no"])
        sender.fail(1, NothingRan("full"))
        sender.accept(2, [None, 5])
        sender.fail(3, TimeoutError("late"))
        kinds = [type(ticket.exception(PATIENCE_S)) for ticket in tickets]
        none = type(None)
        assert kinds == [
            none, BatchItemFailed, BatchSendFailed, BatchSendFailed, none, BatchOutcomeError, BatchSendUnknown,
            BatchSendUnknown,
        ]  # fmt: skip
        assert (asked, aborted) == ([5, 6, 7], [5, 7])
        assert tracker.tracked == [0, 4, 6]
        assert [request for request, _ in tracker.rolled_back] == [1, 2, 3, 5, 7]
        statistics = submitter.statistics()
        assert (statistics.failed, statistics.unknown) == (6, 3)

    def test_the_caller_may_classify(self) -> None:
        """``refused`` decides instead of the exception's attribute."""
        asked: list[int] = []
        submitter = ThreadBatchSubmitter(
            FakeSender(), refused=lambda error: "before" in str(error), on_unknown=lambda r, e: asked.append(r)
        )
        sender: Any = submitter._hooks.send_batch
        first, second = submitter.submit(1), submitter.submit(2)
        sender.fail(0, OSError("before the send"))
        sender.fail(1, OSError("after the send"))
        assert (type(first.exception(0)), type(second.exception(0))) == (BatchSendFailed, BatchSendUnknown)
        assert asked == [2]


class TestTakeIn:
    """A worker's side that ends."""

    def test_an_iterator_that_always_raises(self) -> None:
        """Without a length it is given up, with one it is asked that often."""

        class Endless(Iterator[int]):
            def __next__(self) -> int:
                raise ValueError("never")

        class Sized(Endless):
            def __len__(self) -> int:
                return 5

        with pytest.raises(BatchOutcomeError, match="in a row"):
            take_in(Endless(), print)
        assert take_in(Sized(), print) == ["ValueError: never"] * 5

    def test_broken_texts(self) -> None:
        """An exception whose text fails is told all the same."""

        class Broken(Exception):
            def __str__(self) -> str:
                raise RuntimeError

        def submit(_: int) -> None:
            raise Broken

        outcomes = take_in([1], submit)
        assert outcomes[0] is not None
        assert "unavailable" in outcomes[0]


class TestForgotten:
    """Owners that are gone and loops that were closed."""

    def test_a_forgotten_thread_submitter_strands_nothing(self) -> None:
        """What it had buffered is sent when it is due."""
        sender = FakeSender(immediate=True)
        submitter = ThreadBatchSubmitter(sender, BatchSubmitConfig(batch_max=100, delay_ms=50))
        # The timer thread is there and waits for something to be buffered when the owner goes.
        submitter.submit(-1).result(PATIENCE_S)
        sender.batches.clear()
        time.sleep(0.05)
        tickets = [submitter.submit(n) for n in range(3)]
        del submitter
        gc.collect()
        assert [ticket.result(PATIENCE_S) for ticket in tickets] == [None] * 3
        assert sender.batches == [[0, 1, 2]]

    @pytest.mark.parametrize("then", ["submit", "close", "flush", "abort", "forget"])
    def test_a_loop_that_closes_with_buffered_requests(self, then: str) -> None:
        """They were never sent: aborted, rolled back; the submitter serves the next loop."""
        tracker = Tracker()
        sender = FakeSender(immediate=True)
        submitter = AsyncioBatchSubmitter(sender, NEVER, register=tracker.register, rollback=tracker.rollback)

        async def submit(number: int) -> Any:
            return submitter.submit(number)

        ticket = asyncio.run(submit(1))
        if then == "submit":
            asyncio.run(submit(2))
            assert tracker.tracked == [2]
        elif then == "forget":
            del submitter, submit
            gc.collect()
            assert tracker.tracked == []
        else:
            getattr(submitter, then)(*([1] if then == "abort" else []))
            assert tracker.tracked == []
            balanced(submitter)
        assert isinstance(ticket.exception(), BatchAborted)
        assert [type(error) for _, error in tracker.rolled_back] == [BatchAborted]
        assert sender.batches == []

    def test_a_loop_that_closes_with_a_send_in_flight(self) -> None:
        """Its requests are unknown; the late answer disturbs nobody; the submitter serves the next loop."""
        tracker = Tracker()
        sender = FakeSender()
        submitter = AsyncioBatchSubmitter(sender, PAIRS, register=tracker.register, rollback=tracker.rollback)

        async def two(first: int) -> list[Any]:
            return [submitter.submit(first), submitter.submit(first + 1)]

        lost = asyncio.run(two(0))

        async def again() -> None:
            tickets = await two(2)
            sender.accept(0)
            sender.accept(1)
            await asyncio.gather(*tickets)
            assert await submitter.aclose(PATIENCE_S)

        asyncio.run(again())
        assert [type(ticket.exception()) for ticket in lost] == [BatchSendUnknown] * 2
        assert tracker.tracked == [2, 3]
        balanced(submitter)


def test_the_environment_counts_where_no_settings_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the README says; given settings win."""
    monkeypatch.setenv("TLLM_RPC_SUBMIT_BATCH_MAX", "3")
    monkeypatch.setenv("TLLM_RPC_SUBMIT_BATCH_DELAY_MS", "60000")
    sender = FakeSender(immediate=True)
    submitter = ThreadBatchSubmitter(sender)
    for number in range(3):
        submitter.submit(number)
    assert sender.batches == [[0, 1, 2]]
    explicit = ThreadBatchSubmitter(sender, BatchSubmitConfig())
    explicit.submit(3)
    assert sender.batches[1:] == [[3]]
    monkeypatch.setenv("TLLM_RPC_SUBMIT_BATCH_MAX", "many")
    with pytest.raises(BatchConfigError, match="TLLM_RPC_SUBMIT_BATCH_MAX"):
        AsyncioBatchSubmitter(sender)


@pytest.mark.parametrize("seed", range(20))
def test_random_faults_balance(seed: int) -> None:
    """Random submits, aborts, cancels, failing hooks and sends from several threads: each ticket ends once, books balance."""
    pick = random.Random(seed)
    tracked: dict[int, int] = {}
    ended: dict[int, int] = {}
    lock = threading.Lock()

    def register(request: int) -> None:
        with lock:
            tracked[request] = 1
        if request % 17 == 0:
            with lock:
                del tracked[request]
            raise ValueError("not this one")

    def rollback(request: int, error: BaseException) -> None:
        with lock:
            tracked.pop(request)
        if request % 5 == 0:
            raise RuntimeError("rollback")

    def send(batch: list[int]) -> Any:
        match sum(batch) % 6:
            case 0:
                raise OSError("now")
            case 1:
                future: concurrent.futures.Future[Any] = concurrent.futures.Future()
                threading.Timer(0.001, _end(future, OSError("later"))).start()
                return future
            case 2:
                future = concurrent.futures.Future()
                threading.Timer(0.001, _end(future, [None] * len(batch))).start()
                return future
            case 3:
                return [None if n % 2 else "odd ones out" for n in batch]
            case 4:
                return "nonsense"
            case _:
                return None

    submitter = ThreadBatchSubmitter(
        send, BatchSubmitConfig(batch_max=5, delay_ms=0.5, adaptive=bool(seed % 2)), register=register, rollback=rollback,
        id_of=lambda request: request,
    )  # fmt: skip

    def ends(request: int) -> Callable[[Any], None]:
        def note(_: Any) -> None:
            with lock:
                ended[request] = ended.get(request, 0) + 1

        return note

    taken: list[Any] = []
    withdrawn: set[int] = set()

    def run(base: int, choices: random.Random) -> None:
        for number in range(base, base + 100):
            try:
                ticket = submitter.submit(number)
            except ValueError:
                continue
            ticket.add_done_callback(ends(number))
            taken.append(number)
            if choices.random() < 0.1 and submitter.abort(number):
                continue
            if choices.random() < 0.1 and ticket.cancel():
                with lock:
                    withdrawn.add(number)
            if choices.random() < 0.05:
                time.sleep(0.001)

    threads = [threading.Thread(target=run, args=(1000 * n, random.Random(pick.random()))) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert submitter.close(PATIENCE_S)
    assert ended == dict.fromkeys(taken, 1)
    balanced(submitter)
    statistics = submitter.statistics()
    # Cancelled tickets are settled without having failed or been aborted, and rolled back.
    assert len(tracked) == statistics.settled - statistics.failed - statistics.aborted - len(withdrawn)


def _end(future: concurrent.futures.Future[Any], outcome: Any) -> Callable[[], None]:
    if isinstance(outcome, BaseException):
        return lambda: future.set_exception(outcome)
    return lambda: future.set_result(outcome)
