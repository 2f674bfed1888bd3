"""The asyncio and thread drivers: register before send, order, failures, rollback, abort, delay, close, fork."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import os
import threading
import weakref
from typing import Any

import pytest

from rpc_batch_submit import (
    AsyncioBatchSubmitter,
    BatchAborted,
    BatchBackpressure,
    BatchClosed,
    BatchItemFailed,
    BatchOutcomeError,
    BatchSendFailed,
    BatchSubmitConfig,
    BatchUsageError,
    ThreadBatchSubmitter,
)
from rpc_batch_submit.testing import FakeSender, Tracker

NEVER = BatchSubmitConfig(batch_max=100, delay_ms=60_000)
PATIENCE_S = 20.0


class TestThreads:
    """``ThreadBatchSubmitter``."""

    @pytest.mark.parametrize("batch_max", [1, 4])
    def test_registered_before_the_send_in_every_mode(self, batch_max: int) -> None:
        """When ``send_batch`` sees a request it is tracked already: an answer can never meet an unknown id."""
        tracker = Tracker()
        untracked: list[int] = []

        def send(batch: list[int]) -> None:
            untracked.extend(request for request in batch if request not in tracker.tracked)

        config = BatchSubmitConfig(batch_max=batch_max)
        with ThreadBatchSubmitter(send, config, register=tracker.register, rollback=tracker.rollback) as submitter:
            for number in range(10):
                submitter.submit(number)
        assert untracked == []
        assert tracker.tracked == list(range(10))

    def test_a_failed_send_rolls_back_and_tells_everybody(self) -> None:
        """Raised at once or later: each ticket has the cause, each registration is taken back."""
        tracker = Tracker()
        sender = FakeSender()

        def send(batch: list[int]) -> Any:
            if 0 in batch:
                raise ConnectionError("gone")
            return sender(batch)

        submitter = ThreadBatchSubmitter(
            send, BatchSubmitConfig(batch_max=2, delay_ms=60_000), register=tracker.register, rollback=tracker.rollback
        )
        tickets = [submitter.submit(number) for number in range(4)]
        sender.fail(0, OSError("later"))
        for ticket, kind in zip(tickets, (ConnectionError, ConnectionError, OSError, OSError)):
            error = ticket.exception(PATIENCE_S)
            assert isinstance(error, BatchSendFailed)
            assert isinstance(error.__cause__, kind)
        assert tracker.tracked == []
        assert [request for request, _ in tracker.rolled_back] == [0, 1, 2, 3]
        assert submitter.statistics().failed == 4
        assert submitter.close(PATIENCE_S)

    def test_one_bad_request_fails_alone(self) -> None:
        """The worker's outcome per request reaches its ticket; the others are accepted."""
        tracker = Tracker()
        sender = FakeSender()
        submitter = ThreadBatchSubmitter(
            sender,
            BatchSubmitConfig(batch_max=3, delay_ms=60_000),
            register=tracker.register,
            rollback=tracker.rollback,
        )
        tickets = [submitter.submit(number) for number in range(3)]
        sender.accept(0, [None, "too long", None])
        assert [ticket.exception(PATIENCE_S) is None for ticket in tickets] == [True, False, True]
        assert isinstance(tickets[1].exception(), BatchItemFailed)
        assert str(tickets[1].exception()) == "too long"
        assert tracker.tracked == [0, 2]

    @pytest.mark.parametrize("result", [[None], "text", 5, {"a": 1}])
    def test_an_answer_of_another_form(self, result: Any) -> None:
        """Not one outcome per request: an error for all of them, not a guess."""
        submitter = ThreadBatchSubmitter(lambda batch: result, BatchSubmitConfig(batch_max=2, delay_ms=60_000))
        tickets = [submitter.submit(number) for number in range(2)]
        assert all(isinstance(ticket.exception(PATIENCE_S), BatchOutcomeError) for ticket in tickets)

    def test_abort_of_a_buffered_request(self) -> None:
        """It is never sent, its ticket says so, its registration is gone; a sent one is not ours to abort."""
        tracker = Tracker()
        sender = FakeSender(immediate=True)
        submitter = ThreadBatchSubmitter(
            sender, NEVER, register=tracker.register, rollback=tracker.rollback, id_of=lambda request: request
        )
        tickets = [submitter.submit(number) for number in range(3)]
        assert submitter.abort(1)
        assert not submitter.abort(1)
        assert isinstance(tickets[1].exception(0), BatchAborted)
        submitter.flush()
        assert not submitter.abort(0)
        assert sender.requests == [0, 2]
        assert tracker.tracked == [0, 2]

    def test_cancelling_a_ticket_aborts(self) -> None:
        """A cancelled ticket's request is not sent; after the send it cannot be cancelled."""
        tracker = Tracker()
        sender = FakeSender()
        submitter = ThreadBatchSubmitter(sender, NEVER, register=tracker.register, rollback=tracker.rollback)
        first, second = submitter.submit(1), submitter.submit(2)
        assert first.cancel()
        submitter.flush()
        assert sender.requests == [2]
        assert not second.cancel()
        assert tracker.tracked == [2]
        sender.accept(0)
        assert submitter.close(PATIENCE_S)

    def test_all_cancelled(self) -> None:
        """A batch of which nothing is left is not sent at all."""
        sender = FakeSender()
        submitter = ThreadBatchSubmitter(sender, NEVER)
        submitter.submit(1).cancel()
        assert submitter.close(PATIENCE_S)
        assert sender.batches == []

    def test_the_delay_needs_no_event_loop(self) -> None:
        """A straggler leaves by the timer thread."""
        sender = FakeSender(immediate=True)
        with ThreadBatchSubmitter(sender, BatchSubmitConfig(batch_max=100, delay_ms=1)) as submitter:
            submitter.submit(1).result(PATIENCE_S)
            submitter.submit(2).result(PATIENCE_S)
            assert submitter.statistics().flushes["delay"] == 2

    def test_off_means_no_thread(self) -> None:
        """With ``batch_max`` 1 each submit is a send of its own, on the caller's thread."""
        before = threading.active_count()
        threads: list[Any] = []
        with ThreadBatchSubmitter(lambda batch: threads.append(threading.current_thread())) as submitter:
            submitter.submit(1)
            submitter.submit(2)
            assert threading.active_count() == before
        assert threads == [threading.current_thread()] * 2

    def test_order_from_many_threads(self) -> None:
        """Each thread's requests leave in its own order, each exactly once, one send at a time."""
        sent: list[tuple[int, int]] = []
        inside = threading.Lock()
        overlaps: list[int] = []

        def send(batch: list[tuple[int, int]]) -> None:
            if not inside.acquire(blocking=False):
                overlaps.append(1)
                return
            sent.extend(batch)
            inside.release()

        with ThreadBatchSubmitter(send, BatchSubmitConfig(batch_max=7, delay_ms=0.1)) as submitter:

            def run(thread: int) -> None:
                for number in range(500):
                    submitter.submit((thread, number))

            threads = [threading.Thread(target=run, args=(n,)) for n in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert overlaps == []
        assert len(sent) == 3000
        for number in range(6):
            assert [n for thread, n in sent if thread == number] == list(range(500))

    def test_a_slow_send_does_not_hold_others_up(self) -> None:
        """While one thread is inside ``send_batch``, others submit and go on; their batches follow in order."""
        entered, gate = threading.Event(), threading.Event()
        sent: list[int] = []

        def send(batch: list[int]) -> None:
            if batch[0] == 0:
                entered.set()
                gate.wait(PATIENCE_S)
            sent.extend(batch)

        submitter = ThreadBatchSubmitter(send)
        thread = threading.Thread(target=submitter.submit, args=(0,))
        thread.start()
        assert entered.wait(PATIENCE_S)
        tickets = [submitter.submit(number) for number in (1, 2)]
        assert sent == []
        assert not any(ticket.done() for ticket in tickets)
        gate.set()
        thread.join()
        assert submitter.close(PATIENCE_S)
        assert sent == [0, 1, 2]

    def test_a_send_that_submits_again(self) -> None:
        """Its request goes after the batches before it; no deadlock, no deep recursion."""
        sent: list[int] = []

        def send(batch: list[int]) -> None:
            sent.extend(batch)
            if batch[-1] < 3000:
                submitter.submit(batch[-1] + 1)

        submitter = ThreadBatchSubmitter(send)
        submitter.submit(0)
        assert sent == list(range(3001))

    def test_close_flushes_and_refuses(self) -> None:
        """What is buffered is sent and waited for; then nothing more is taken or registered."""
        tracker = Tracker()
        sender = FakeSender()
        submitter = ThreadBatchSubmitter(sender, NEVER, register=tracker.register, rollback=tracker.rollback)
        ticket = submitter.submit(1)
        assert not submitter.close(0.01)
        assert sender.requests == [1]
        sender.accept(0)
        assert ticket.result(PATIENCE_S) is None
        assert submitter.close(PATIENCE_S)
        with pytest.raises(BatchClosed):
            submitter.submit(2)
        assert tracker.tracked == [1]

    def test_backpressure_registers_nothing(self) -> None:
        """Refused before the registration."""
        tracker = Tracker()
        sender = FakeSender()
        submitter = ThreadBatchSubmitter(
            sender, BatchSubmitConfig(outstanding_max=1), register=tracker.register, rollback=tracker.rollback
        )
        submitter.submit(1)
        with pytest.raises(BatchBackpressure):
            submitter.submit(2)
        assert tracker.tracked == [1]
        sender.accept(0)
        submitter.submit(2)

    def test_a_failing_registration_takes_nothing(self) -> None:
        """The caller's own error comes out; nothing is sent."""
        sender = FakeSender()

        def register(request: int) -> None:
            raise KeyError(request)

        submitter = ThreadBatchSubmitter(sender, register=register)
        with pytest.raises(KeyError):
            submitter.submit(1)
        assert sender.batches == []
        assert submitter.statistics().submitted == 0

    def test_a_duplicate_id_touches_nothing(self) -> None:
        """Refused before it is registered: the first request's registration stays, and it is served."""
        tracker = Tracker()
        sender = FakeSender(immediate=True)
        submitter = ThreadBatchSubmitter(
            sender, NEVER, register=tracker.register, rollback=tracker.rollback, id_of=lambda request: request % 10
        )
        ticket = submitter.submit(1)
        with pytest.raises(BatchUsageError, match="buffered already"):
            submitter.submit(11)
        assert (tracker.tracked, tracker.rolled_back) == ([1], [])
        submitter.flush()
        assert ticket.result(PATIENCE_S) is None
        assert sender.requests == [1]

    def test_an_awaitable_is_an_error_here(self) -> None:
        """A thread cannot await; said, not ignored."""

        async def send(batch: list[int]) -> None:
            raise AssertionError("never awaited")

        error = ThreadBatchSubmitter(send).submit(1).exception(PATIENCE_S)
        assert isinstance(error, BatchSendFailed)
        assert isinstance(error.__cause__, BatchUsageError)

    def test_adaptive_sends_at_once_when_idle(self) -> None:
        """The first leaves alone; those behind a send under way leave together when it ends."""
        sender = FakeSender()
        submitter = ThreadBatchSubmitter(sender, BatchSubmitConfig(batch_max=100, delay_ms=60_000, adaptive=True))
        for number in range(4):
            submitter.submit(number)
        assert sender.batches == [[0]]
        sender.accept(0)
        assert sender.batches == [[0], [1, 2, 3]]

    def test_bypass(self) -> None:
        """Nothing waits while the caller says that a send costs nothing; order is kept."""
        local = False
        sender = FakeSender(immediate=True)
        submitter = ThreadBatchSubmitter(sender, NEVER, bypass=lambda: local)
        submitter.submit(1)
        local = True
        submitter.submit(2)
        submitter.submit(3)
        assert sender.batches == [[1, 2], [3]]

    def test_bytes(self) -> None:
        """``size_of`` counts against the cap."""
        sender = FakeSender(immediate=True)
        submitter = ThreadBatchSubmitter(
            sender, BatchSubmitConfig(batch_max=100, delay_ms=60_000, bytes_max=10), size_of=len
        )
        for text in ("aaaa", "bbbb", "cccc", "d" * 50):
            submitter.submit(text)
        assert sender.batches == [["aaaa", "bbbb"], ["cccc"], ["d" * 50]]

    @pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
    def test_a_forked_child_sends_nothing_of_the_parents(self) -> None:
        """Buffered requests leave once, from the parent; the child starts empty and works."""
        sender = FakeSender(immediate=True)
        submitter = ThreadBatchSubmitter(sender, BatchSubmitConfig(batch_max=3, delay_ms=60_000))
        submitter.submit(1)
        submitter.submit(2)
        child = os.fork()
        if child == 0:
            try:
                submitter.flush()
                nothing = sender.requests == []
                for number in (7, 8, 9):
                    submitter.submit(number)
                works = sender.requests == [7, 8, 9] and submitter.statistics().dropped_in_fork == 2
                os._exit(3 if nothing and works else 4)
            finally:
                os._exit(5)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 3
        submitter.submit(3)
        assert sender.requests == [1, 2, 3]
        submitter.close(PATIENCE_S)

    def test_a_forgotten_submitter_lets_its_timer_go(self, eventually: Any) -> None:
        """The timer thread holds no strong reference."""
        submitter = ThreadBatchSubmitter(FakeSender(immediate=True), BatchSubmitConfig(batch_max=10, delay_ms=1))
        submitter.submit(1).result(PATIENCE_S)
        reference = weakref.ref(submitter)
        timer = submitter._timer
        assert timer is not None
        del submitter
        gc.collect()
        eventually(lambda: gc.collect() is not None and reference() is None)
        timer.join(PATIENCE_S)
        assert not timer.is_alive()


class TestAsyncio:
    """``AsyncioBatchSubmitter``; what is shared with the thread driver is tested once, what differs here."""

    def test_batches_by_size_and_delay(self) -> None:
        """Full ones at once, the straggler by the loop's timer, in order."""

        async def run() -> None:
            sender = FakeSender(immediate=True)
            async with AsyncioBatchSubmitter(sender, BatchSubmitConfig(batch_max=4, delay_ms=1)) as submitter:
                await asyncio.gather(*(submitter.submit(number) for number in range(10)))
                assert sender.batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
                assert submitter.statistics().flushes["delay"] == 1

        asyncio.run(run())

    @pytest.mark.parametrize("form", ["coroutine", "future", "concurrent", "list", "none"])
    def test_every_form_of_result(self, form: str) -> None:
        """Coroutine, asyncio future, concurrent future, list or nothing."""

        async def run() -> None:

            def send(batch: list[int]) -> Any:
                outcomes = [None, "bad"]
                if form == "coroutine":
                    return _later(outcomes)
                if form == "future":
                    return asyncio.ensure_future(_later(outcomes))
                if form == "concurrent":
                    return _thread(outcomes)
                return outcomes if form == "list" else None

            submitter = AsyncioBatchSubmitter(send, BatchSubmitConfig(batch_max=2))
            results = await asyncio.gather(submitter.submit(1), submitter.submit(2), return_exceptions=True)
            assert results[0] is None
            assert (results[1] is None) if form == "none" else isinstance(results[1], BatchItemFailed)
            assert await submitter.aclose(PATIENCE_S)

        asyncio.run(run())

    def test_failures_roll_back_and_an_ignored_ticket_is_quiet(self) -> None:
        """Also for callers that never look at their ticket: no 'exception was never retrieved'."""

        async def run() -> list[str]:
            complaints: list[str] = []
            asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))
            tracker = Tracker()

            async def send(batch: list[int]) -> None:
                raise ConnectionError("gone")

            submitter = AsyncioBatchSubmitter(send, register=tracker.register, rollback=tracker.rollback)
            submitter.submit(1)
            assert await submitter.aclose(PATIENCE_S)
            assert tracker.tracked == []
            assert isinstance(tracker.rolled_back[0][1].__cause__, ConnectionError)
            gc.collect()
            return complaints

        assert asyncio.run(run()) == []

    def test_the_loop_is_never_blocked(self) -> None:
        """A send under way leaves the loop and later submits free."""

        async def run() -> None:
            sender = FakeSender()
            submitter = AsyncioBatchSubmitter(sender, BatchSubmitConfig(batch_max=2))
            first = [submitter.submit(number) for number in range(2)]
            second = [submitter.submit(number) for number in range(2, 4)]
            assert sender.batches == [[0, 1], [2, 3]]
            sender.accept(1)
            await asyncio.gather(*second)
            assert not any(ticket.done() for ticket in first)
            sender.accept(0)
            await asyncio.gather(*first)

        asyncio.run(run())

    def test_abort_and_cancel(self) -> None:
        """By id and by the ticket; ``aclose`` does not wait for what is gone."""

        async def run() -> None:
            tracker = Tracker()
            sender = FakeSender()
            submitter = AsyncioBatchSubmitter(
                sender, NEVER, register=tracker.register, rollback=tracker.rollback, id_of=lambda request: request
            )
            tickets = [submitter.submit(number) for number in range(3)]
            tickets[0].cancel()
            assert submitter.abort(1)
            assert not submitter.abort(1)
            with pytest.raises(BatchAborted):
                await tickets[1]
            closing = asyncio.ensure_future(submitter.aclose(PATIENCE_S))
            await asyncio.sleep(0)
            assert sender.batches == [[2]]
            sender.accept(0)
            assert await closing
            assert tracker.tracked == [2]
            with pytest.raises(BatchClosed):
                submitter.submit(4)

        asyncio.run(run())

    def test_close_in_time(self) -> None:
        """``aclose`` reports whether everything was settled."""

        async def run() -> None:
            sender = FakeSender()
            submitter = AsyncioBatchSubmitter(sender, NEVER)
            submitter.submit(1)
            assert not await submitter.aclose(0.01)
            sender.accept(0)
            assert await submitter.aclose(PATIENCE_S)

        asyncio.run(run())

    def test_outside_a_loop(self) -> None:
        """Needs a running loop, and says so by asyncio's own error; another loop with requests open is refused."""
        submitter = AsyncioBatchSubmitter(FakeSender(), NEVER)
        with pytest.raises(RuntimeError):
            submitter.submit(1)

        async def one() -> None:
            submitter.submit(1)

        async def two() -> None:
            with pytest.raises(BatchUsageError, match="another event loop"):
                submitter.submit(2)

        first = asyncio.new_event_loop()
        first.run_until_complete(one())
        asyncio.run(two())
        first.close()

    def test_a_submitter_serves_one_loop_after_another(self) -> None:
        """Once nothing is open it may be used from a new loop."""
        sender = FakeSender(immediate=True)
        submitter = AsyncioBatchSubmitter(sender, BatchSubmitConfig(batch_max=10, delay_ms=1))

        async def run(number: int) -> None:
            await submitter.submit(number)

        asyncio.run(run(1))
        asyncio.run(run(2))
        assert sender.batches == [[1], [2]]

    def test_delay_of_the_oldest(self) -> None:
        """The timer follows the oldest request, also after the older buffer has left by size."""

        async def run() -> None:
            sender = FakeSender(immediate=True)
            submitter = AsyncioBatchSubmitter(sender, BatchSubmitConfig(batch_max=2, delay_ms=20))
            submitter.submit(1)
            submitter.submit(2)
            begun_s = asyncio.get_running_loop().time()
            await submitter.submit(3)
            assert asyncio.get_running_loop().time() - begun_s >= 0.0199
            assert sender.batches == [[1, 2], [3]]

        asyncio.run(run())

    @pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
    def test_a_forked_child_is_empty(self) -> None:
        """The loop and the requests are the parent's."""

        async def run() -> None:
            sender = FakeSender(immediate=True)
            submitter = AsyncioBatchSubmitter(sender, NEVER)
            ticket = submitter.submit(1)
            child = os.fork()
            if child == 0:
                submitter.flush()
                os._exit(3 if sender.batches == [] and submitter.statistics().outstanding == 0 else 4)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 3
            submitter.flush()
            await ticket

        asyncio.run(run())


async def _later(value: Any) -> Any:
    await asyncio.sleep(0)
    return value


def _thread(value: Any) -> concurrent.futures.Future[Any]:
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    threading.Thread(target=future.set_result, args=(value,)).start()
    return future
