"""Calls out of the caller's own functions, signal handlers and other threads; functions and answers that nobody means."""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

import rpc_batch_submit._driver
from rpc_batch_submit import (
    AsyncioBatchSubmitter,
    BatchAborted,
    BatchConfigError,
    BatchItemFailed,
    BatchOutcomeError,
    BatchSendUnknown,
    BatchSubmitConfig,
    BatchUsageError,
    ThreadBatchSubmitter,
    take_in,
    unpack_outcomes,
)
from rpc_batch_submit.testing import FakeSender, Tracker

PATIENCE_S = 5.0
NEVER = BatchSubmitConfig(batch_max=8, delay_ms=60_000)
SINGLE = BatchSubmitConfig(batch_max=1)
SOURCES = rpc_batch_submit._driver.__file__.removesuffix("_driver.py")


def in_time(body: Callable[[], Any]) -> Any:
    """Its result; an error if it waits for ever."""
    done: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        try:
            done.set_result(body())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done.result(PATIENCE_S)


def failing(_: list[Any]) -> None:
    raise OSError


class TestCloseFromInside:
    """Whoever waits in there for the submitter's requests waits for itself."""

    @pytest.mark.parametrize("where", ["register", "send_batch", "callback", "rollback", "on_unknown", "timer"])
    def test_it_does_not_wait(self, where: str) -> None:
        """It sends what is buffered, takes nothing more, and says that not everything has ended."""
        answers: list[bool] = []

        def close(*_: object) -> None:
            answers.append(submitter.close())

        hooks: dict[str, Any] = {"send_batch": failing if where in ("rollback", "on_unknown") else lambda _: None}
        if where != "callback":
            hooks["send_batch" if where == "timer" else where] = close
        config = BatchSubmitConfig(batch_max=8, delay_ms=1) if where == "timer" else SINGLE
        if where == "callback":
            config = NEVER
        submitter = ThreadBatchSubmitter(hooks.pop("send_batch"), config, **hooks)

        def run() -> bool:
            ticket = submitter.submit(1)
            if where == "callback":
                ticket.add_done_callback(close)
                submitter.flush()
            concurrent.futures.wait([ticket])
            return submitter.close()

        assert in_time(run)
        assert answers == [False]

    def test_in_the_task_of_a_send(self) -> None:
        """``aclose`` in there does not wait either; from outside it does."""
        answers: list[bool] = []

        async def send(_: list[Any]) -> None:
            answers.append(await submitter.aclose())

        submitter = AsyncioBatchSubmitter(send, SINGLE)

        async def run() -> None:
            await asyncio.wait_for(submitter.submit(1), PATIENCE_S)
            assert await submitter.aclose(PATIENCE_S)

        asyncio.run(run())
        assert answers == [False]

    def test_the_time_is_for_all_of_it(self) -> None:
        """A time too long for the platform is for ever; the wait for the timer and the one for the sends share theirs."""
        waited: list[float | None] = []

        class Timer:
            def join(self, timeout_s: float | None) -> None:
                waited.append(timeout_s)

        for timeout_s in (None, math.inf, 0.0):
            submitter = ThreadBatchSubmitter(FakeSender(immediate=True), NEVER)
            submitter._timer = Timer()  # type: ignore[assignment]
            assert submitter.close(timeout_s)
        assert waited == [None, threading.TIMEOUT_MAX, 0.0]

    def test_an_interrupted_close_leaves_the_timer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As long as requests are taken, the time-triggered flush is there."""
        submitter = ThreadBatchSubmitter(FakeSender(immediate=True), BatchSubmitConfig(batch_max=8, delay_ms=1))
        submitter.submit(1).result(PATIENCE_S)

        def interrupted() -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(submitter, "_shut", interrupted)
            with pytest.raises(KeyboardInterrupt):
                submitter.close()
        with submitter._lock:
            submitter._changed()
        for number in range(3):
            submitter.submit(number).result(PATIENCE_S)
        assert submitter._timer_turn() == (True, None)
        assert submitter.close(PATIENCE_S)
        assert submitter._timer_turn() == (False, None)


class Break:
    """Calls before the n-th bytecode of the package, as a signal handler would; what it is refused with is kept."""

    def __init__(self, at: int, call: Callable[[], Any]) -> None:
        self.left, self.call = at, call
        self.refused: list[BatchUsageError] = []

    def __call__(self, frame: Any, event: str, _: object) -> Any:
        if event == "call":
            if not frame.f_code.co_filename.startswith(SOURCES):
                return None
            frame.f_trace, frame.f_trace_lines, frame.f_trace_opcodes = self, False, True
        elif event == "opcode" and self.left:
            self.left -= 1
            if not self.left:
                try:
                    self.call()
                except BatchUsageError as error:
                    self.refused.append(error)
        return self

    def run(self, body: Callable[[], Any]) -> Any:
        """The body's result."""
        before = sys.gettrace()
        sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for it when tracing begins
        sys.settrace(self)
        try:
            return body()
        finally:
            sys.settrace(before)


def hooks(tracker: Tracker) -> dict[str, Callable[[Any], Any]]:
    """Of a submitter whose requests are their own ids."""
    return {"register": tracker.register, "rollback": tracker.rollback, "id_of": lambda request: request}


CALLS: dict[str, Callable[[Any], Any]] = {
    "submit": lambda submitter: submitter.submit("inner"),
    "flush": lambda submitter: submitter.flush(),
    "abort": lambda submitter: submitter.abort("first"),
    "close": lambda submitter: submitter.close(0),
}


@pytest.mark.parametrize("inner", CALLS)
@pytest.mark.parametrize("outer", ["submit", "flush", "abort"])
def test_a_call_before_every_bytecode_of_another(outer: str, inner: str) -> None:
    """It is done or refused whole; nothing is lost, sent twice or open."""
    at, refused, last = 1, 0, False
    while not last:
        tracker, sender = Tracker(), FakeSender(immediate=True)
        submitter = ThreadBatchSubmitter(sender, BatchSubmitConfig(batch_max=2, delay_ms=60_000), **hooks(tracker))
        tickets = [submitter.submit("first")]

        def call(submitter: Any = submitter, tickets: list[Any] = tickets) -> None:
            result = CALLS[inner](submitter)
            if inner == "submit":
                tickets.append(result)

        breaking = Break(at, call)
        try:
            result = breaking.run(
                lambda submitter=submitter: submitter.submit("outer") if outer == "submit" else CALLS[outer](submitter)
            )
        except rpc_batch_submit.BatchClosed:
            assert inner == "close"
        else:
            if outer == "submit":
                tickets.append(result)
        assert submitter.close(PATIENCE_S), at
        assert all(ticket.done() for ticket in tickets), at
        assert sorted(sender.requests) == sorted(set(sender.requests)) == sorted(tracker.tracked), at
        assert len(sender.requests) == sum(ticket.exception() is None for ticket in tickets), at
        submitter._core.validate()
        refused += len(breaking.refused)
        last = bool(breaking.left)
        at += 1
    assert refused > 0


@pytest.mark.parametrize("outer", ["submit", "flush", "abort"])
def test_a_send_that_ends_before_every_bytecode_of_a_call(outer: str) -> None:
    """What waited behind it leaves, once, and every ticket ends."""
    at, last = 1, False
    while not last:
        tracker, sender = Tracker(), FakeSender()
        submitter = ThreadBatchSubmitter(
            sender, BatchSubmitConfig(batch_max=3, delay_ms=60_000, adaptive=True), **hooks(tracker)
        )
        tickets = [submitter.submit("under way"), submitter.submit("first")]

        waiting: list[Any] = []

        def end(sender: FakeSender = sender, waiting: list[Any] = waiting) -> None:
            # Later ones end at once, on whatever thread they are made.
            sender.immediate = True
            waiting.extend(sender.futures[1:])
            sender.accept(0)

        breaking = Break(at, end)
        result = breaking.run(
            lambda submitter=submitter: submitter.submit("outer") if outer == "submit" else CALLS[outer](submitter)
        )
        if outer == "submit":
            tickets.append(result)
        last = bool(breaking.left)
        if last:
            end()
        for future in waiting:
            if not future.done():
                future.set_result(None)
        assert submitter.close(PATIENCE_S), at
        assert all(ticket.done() for ticket in tickets), at
        assert sorted(sender.requests) == sorted(set(sender.requests)) == sorted(tracker.tracked), at
        submitter._core.validate()
        at += 1


@pytest.mark.parametrize("inner", CALLS)
def test_a_call_before_every_bytecode_of_a_loops_timer(inner: str) -> None:
    """It belongs to the bookkeeping as any caller does."""

    async def run(at: int) -> tuple[bool, int]:
        tracker, sender = Tracker(), FakeSender(immediate=True)
        submitter = AsyncioBatchSubmitter(sender, BatchSubmitConfig(batch_max=8, delay_ms=0), **hooks(tracker))
        tickets = [submitter.submit("first")]

        def call() -> None:
            result = submitter.close() if inner == "close" else CALLS[inner](submitter)
            if inner == "submit":
                tickets.append(result)

        breaking = Break(at, call)
        breaking.run(submitter._on_timer)
        assert await submitter.aclose(PATIENCE_S), at
        assert all(ticket.done() for ticket in tickets), at
        assert sorted(sender.requests) == sorted(set(sender.requests)) == sorted(tracker.tracked), at
        assert len(sender.requests) == sum(ticket.exception() is None for ticket in tickets), at
        submitter._core.validate()
        return bool(breaking.left), len(breaking.refused)

    at, refused, last = 1, 0, False
    while not last:
        last, count = asyncio.run(run(at))
        refused += count
        at += 1
    assert refused > 0


class TestOtherThreads:
    """An asyncio submitter belongs to its loop's thread."""

    @pytest.mark.parametrize("call", ["flush", "abort", "close"])
    def test_a_call_from_another_thread_is_refused(self, call: str) -> None:
        """And does nothing: the loop would not notice before something else wakes it."""
        sender = FakeSender(immediate=True)

        async def run() -> None:
            submitter = AsyncioBatchSubmitter(sender, NEVER, id_of=lambda request: request)
            ticket = submitter.submit(1)
            with pytest.raises(BatchUsageError, match="another thread"):
                await asyncio.to_thread(getattr(submitter, call), *([1] if call == "abort" else []))
            assert sender.batches == []
            assert not ticket.done()
            assert await submitter.aclose(PATIENCE_S)
            assert ticket.done()

        asyncio.run(run())


def test_a_rollback_that_submits_again_after_its_loop_was_closed() -> None:
    """What it submits belongs to the new loop; the old loop's requests are counted as what they were."""
    again: list[Any] = []

    def rollback(request: int, _: BaseException) -> None:
        again.append(submitter.submit(request + 10))

    sender = FakeSender()
    submitter = AsyncioBatchSubmitter(sender, BatchSubmitConfig(batch_max=2, delay_ms=60_000), rollback=rollback)

    async def three() -> list[Any]:
        return [submitter.submit(number) for number in (1, 2, 3)]

    old = asyncio.run(three())

    async def go_on() -> None:
        ticket = submitter.submit(4)
        submitter.flush()
        for index in range(1, len(sender.futures)):
            sender.accept(index)
        await asyncio.wait_for(asyncio.gather(ticket, *again), PATIENCE_S)

    asyncio.run(go_on())
    assert [type(ticket.exception()) for ticket in old] == [BatchSendUnknown, BatchSendUnknown, BatchAborted]
    assert sorted(sender.requests) == [1, 2, 4, 11, 12, 13]
    statistics = submitter.statistics()
    assert (statistics.failed, statistics.unknown, statistics.settled, statistics.dropped_in_fork) == (2, 2, 7, 0)


def test_an_abort_tells_those_who_wait_for_a_cancelled_ticket() -> None:
    """``concurrent.futures.wait`` hears of a cancellation only when the ticket is told."""
    submitter = ThreadBatchSubmitter(FakeSender(), NEVER, id_of=lambda request: request)
    ticket = submitter.submit(1)
    assert ticket.cancel()
    assert submitter.abort(1)
    assert concurrent.futures.wait([ticket], PATIENCE_S).done == {ticket}


def test_a_registration_that_raises_stop_iteration_takes_nothing() -> None:
    """Say, ``next`` of the free places."""
    places: Iterator[int] = iter([])
    sender = FakeSender()
    submitter = ThreadBatchSubmitter(sender, SINGLE, register=lambda _: next(places))
    with pytest.raises(BatchUsageError, match="StopIteration"):
        submitter.submit(1)
    assert sender.batches == []
    assert submitter.statistics().outstanding == 0


class Unreadable(Exception):
    """Its text cannot be had."""

    def __repr__(self) -> str:
        raise ValueError("no text")


class TestFailuresWithoutText:
    """An error's text may itself raise, or be a whole prompt."""

    def test_of_a_send(self) -> None:
        """Its requests end, with the cause."""
        cause = Unreadable()

        def send(_: list[Any]) -> None:
            raise cause

        submitter = ThreadBatchSubmitter(send, SINGLE)
        error = submitter.submit(1).exception(PATIENCE_S)
        assert isinstance(error, BatchSendUnknown)
        assert error.__cause__ is cause
        assert "Unreadable" in str(error)

    def test_of_an_answer(self) -> None:
        """Never raised."""

        class Answer(list[Any]):
            def __iter__(self) -> Iterator[Any]:
                raise Unreadable

        [error] = unpack_outcomes(Answer([None]), 1)
        assert isinstance(error, BatchOutcomeError)

    def test_a_long_one(self) -> None:
        """A batch of many requests does not carry it many times."""

        def send(_: list[Any]) -> None:
            raise ValueError("x" * 100_000)

        error = ThreadBatchSubmitter(send, SINGLE).submit(1).exception(PATIENCE_S)
        assert len(str(error)) < 3000


class TestOutcomesThatNoTicketCarries:
    """An outcome is the worker's word about a request, not an interrupt of whoever reads it."""

    @pytest.mark.parametrize("outcome", [asyncio.CancelledError(), SystemExit(3), StopIteration(3)], ids=repr)
    def test_it_is_the_cause_of_a_refusal(self, outcome: BaseException) -> None:
        """Say, of ``gather(return_exceptions=True)``."""

        async def run() -> tuple[BaseException, Any]:
            submitter = AsyncioBatchSubmitter(lambda _: [outcome, None], BatchSubmitConfig(batch_max=2))
            refused, served = submitter.submit(1), submitter.submit(2)
            with pytest.raises(BatchItemFailed) as caught:
                await refused
            return caught.value, await served

        error, served = asyncio.run(run())
        assert error.__cause__ is outcome
        assert served is None

    def test_an_answer_without_an_end(self) -> None:
        """A length is no bound on what comes."""

        class Endless(Sequence[None]):
            reads = 0

            def __len__(self) -> int:
                return 1

            def __getitem__(self, _: Any) -> Any:
                self.reads += 1
                if self.reads == 100:
                    raise IndexError

        answer = Endless()
        [error] = unpack_outcomes(answer, 1)
        assert isinstance(error, BatchOutcomeError)
        assert answer.reads == 2


async def nothing(*_: object) -> None:
    """What nobody awaits."""


class TestArguments:
    """What can never work is refused where it is given."""

    @pytest.mark.parametrize("hook", ["register", "rollback", "on_unknown", "refused", "size_of", "id_of", "bypass"])
    def test_an_async_hook(self, hook: str) -> None:
        """It would seem to work and never run."""
        with pytest.raises(BatchConfigError, match=hook):
            AsyncioBatchSubmitter(nothing, **{hook: nothing})

    def test_an_async_submit_at_the_worker(self) -> None:
        """Every request would seem accepted."""
        with pytest.raises(BatchUsageError, match="async"):
            take_in([1], nothing)

    def test_settings_of_another_kind(self) -> None:
        """Say, the batch size alone."""
        with pytest.raises(BatchConfigError, match="BatchSubmitConfig"):
            ThreadBatchSubmitter(failing, 8)  # type: ignore[arg-type]

    def test_only_true_keeps_a_registration(self) -> None:
        """A future that aborts the request at the worker is true as well."""
        tracker = Tracker()
        submitter = ThreadBatchSubmitter(
            failing,
            SINGLE,
            register=tracker.register,
            rollback=tracker.rollback,
            on_unknown=lambda *_: concurrent.futures.Future(),
        )
        submitter.submit(1)
        assert tracker.tracked == []


def test_the_lock_is_offered_between_requests_that_cannot_be_read() -> None:
    """They take their time as well."""

    class Lazy:
        def __iter__(self) -> Lazy:
            return self

        def __len__(self) -> int:
            return 6

        def __next__(self) -> int:
            raise ValueError

    now_s = iter(range(100))
    offers: list[None] = []
    take_in(Lazy(), failing, hold_s=2, clock=lambda: float(next(now_s)), offer=lambda: offers.append(None))
    assert len(offers) == 3
