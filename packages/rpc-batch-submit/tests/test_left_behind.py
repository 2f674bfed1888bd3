"""What other threads, the parent of a fork or another loop leave behind: nobody waits for it, nothing of it is kept."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import signal
import sys
import threading
from typing import Any

import pytest

from rpc_batch_submit import AsyncioBatchSubmitter, BatchSubmitConfig, BatchUsageError, ThreadBatchSubmitter
from rpc_batch_submit.testing import FakeSender

PATIENCE_S = 5.0
SINGLE = BatchSubmitConfig(batch_max=1)
NEVER = BatchSubmitConfig(batch_max=8, delay_ms=60_000)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("what", ["sender", "lock", "timer"])
def test_a_forked_child_waits_for_no_thread_of_its_parent(what: str) -> None:
    """Threads that send, hold the lock or wait for the delay do not exist there."""
    parent = os.getpid()
    busy, done = threading.Event(), threading.Event()

    def send(_: list[Any]) -> None:
        if os.getpid() == parent and what == "sender":
            busy.set()
            done.wait(PATIENCE_S)

    config = BatchSubmitConfig(batch_max=8, delay_ms=1) if what == "timer" else SINGLE
    submitter = ThreadBatchSubmitter(send, config)

    def hold() -> None:
        with submitter._lock:
            busy.set()
            done.wait(PATIENCE_S)

    if what == "timer":
        submitter.submit(0).result(PATIENCE_S)
    else:
        threading.Thread(target=hold if what == "lock" else lambda: submitter.submit(0), daemon=True).start()
        assert busy.wait(PATIENCE_S)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(5)
        try:
            submitter.submit(1).result(PATIENCE_S)
            os._exit(3)
        finally:
            os._exit(5)
    _, status = os.waitpid(child, 0)
    done.set()
    assert os.waitstatus_to_exitcode(status) == 3
    assert submitter.close(PATIENCE_S)


def test_a_close_hears_of_a_registration_that_raises(eventually: Any) -> None:
    """It waits for the request that is being registered, and for nothing once that is refused."""

    def register(_: int) -> None:
        closing.start()
        # It waits, or it has already gone on.
        eventually(lambda: submitter._news._waiters or answers)  # type: ignore[attr-defined]
        raise ValueError

    answers: list[bool] = []
    submitter = ThreadBatchSubmitter(FakeSender(), SINGLE, register=register)
    closing = threading.Thread(target=lambda: answers.append(submitter.close()), daemon=True)
    with pytest.raises(ValueError, match=r"^$"):
        submitter.submit(1)
    closing.join(PATIENCE_S)
    assert answers == [True]


def test_a_send_that_ends_while_it_is_looked_at_is_not_kept() -> None:
    """Its callback runs before it would be noted as awaited."""

    class Ending(concurrent.futures.Future[None]):
        def done(self) -> bool:
            return False

    ended = Ending()
    ended.set_result(None)
    submitter = ThreadBatchSubmitter(lambda _: ended, SINGLE)
    assert submitter.submit(1).result(PATIENCE_S) is None
    assert submitter._awaited == {}


def test_the_end_of_an_awaited_send_is_not_kept() -> None:
    """Neither the future nor its batch."""
    sender = FakeSender()
    submitter = ThreadBatchSubmitter(sender, SINGLE)
    submitter.submit(1)
    assert len(submitter._awaited) == 1
    sender.accept(0)
    assert submitter._awaited == {}


class TestLoops:
    """Timers and futures of an event loop."""

    def test_a_timer_of_an_older_buffer_sends_no_younger_one(self) -> None:
        """It looks again when that one is due."""

        async def run() -> None:
            sender = FakeSender(immediate=True)
            submitter = AsyncioBatchSubmitter(sender, NEVER)
            submitter.submit(1)
            submitter.flush()
            submitter.submit(2)
            submitter._on_timer()
            assert sender.batches == [[1]]
            assert submitter._timer is not None
            assert await submitter.aclose(PATIENCE_S)
            assert sender.batches == [[1], [2]]

        asyncio.run(run())

    def test_a_closed_submitter_leaves_no_timer(self) -> None:
        """It would keep the submitter for as long as the delay."""

        async def run() -> None:
            submitter = AsyncioBatchSubmitter(FakeSender(immediate=True), NEVER)
            submitter.submit(1)
            timer = submitter._timer
            assert timer is not None
            submitter.close()
            assert timer.cancelled()

        asyncio.run(run())

    def test_a_future_of_another_thread_ends_its_tickets_on_the_loop(self) -> None:
        """A ticket's callbacks, and the caller's hooks, run nowhere else."""
        threads: list[int] = []

        async def run() -> None:
            sender = FakeSender()
            submitter = AsyncioBatchSubmitter(
                sender, SINGLE, rollback=lambda *_: threads.append(threading.get_ident())
            )  # fmt: skip
            ticket = submitter.submit(1)
            await asyncio.to_thread(sender.fail, 0, OSError())
            await asyncio.wait([ticket], timeout=PATIENCE_S)
            assert threads == [threading.get_ident()]

        asyncio.run(run())


@pytest.mark.parametrize("driver", [ThreadBatchSubmitter, AsyncioBatchSubmitter])
def test_the_id_of_a_cancelled_request_is_free(driver: Any) -> None:
    """A caller that gave up waiting may try again at once; the cancelled one is rolled back then, and never sent."""

    async def run() -> None:
        sender = FakeSender(immediate=True)
        rolled_back: list[Any] = []
        submitter = driver(
            sender, NEVER, id_of=lambda request: request[0], rollback=lambda request, _: rolled_back.append(request)
        )
        submitter.submit(("id", 1)).cancel()
        submitter.submit(("id", 2))
        assert rolled_back == [("id", 1)]
        with pytest.raises(BatchUsageError, match="already"):
            submitter.submit(("id", 3))
        submitter.flush()
        assert sender.batches == [[("id", 2)]]

    asyncio.run(run())


def test_an_id_that_was_given_up_may_be_another_threads_by_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads find the same cancelled request: the second one does not take away what the first one submitted."""
    sender = FakeSender(immediate=True)
    submitter = ThreadBatchSubmitter(sender, NEVER, id_of=lambda request: request[0])
    submitter.submit(("id", 1)).cancel()
    buffered = submitter._core.buffered
    quicker: list[Any] = []

    def found(request_id: Any) -> Any:
        entry = buffered(request_id)
        monkeypatch.undo()
        quicker.append(submitter.submit(("id", 2)))
        return entry

    monkeypatch.setattr(submitter._core, "buffered", found)
    with pytest.raises(BatchUsageError, match="already"):
        submitter.submit(("id", 3))
    assert submitter.close(PATIENCE_S)
    assert [ticket.exception() for ticket in quicker] == [None]
    assert sender.batches == [[("id", 2)]]


def test_whoever_closes_is_woken_by_the_last_sender(eventually: Any) -> None:
    """Its requests are settled already, and it is on its way out of the send: nothing else comes that would wake a closer."""
    leaving, go_on = threading.Event(), threading.Event()
    submitter = ThreadBatchSubmitter(lambda batch: None, SINGLE)

    def hold(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name == "_leave":
            leaving.set()
            go_on.wait(PATIENCE_S)

    def send() -> None:
        sys.settrace(hold)
        try:
            submitter.submit(0)
        finally:
            sys.settrace(None)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    assert leaving.wait(PATIENCE_S)
    assert submitter.statistics().outstanding == 0
    assert not submitter.close(0)
    closer = threading.Thread(target=submitter.close, daemon=True)
    closer.start()

    def waits() -> bool:
        frame = sys._current_frames().get(closer.ident or 0)
        return frame is not None and frame.f_code is threading.Condition.wait.__code__

    eventually(waits)
    go_on.set()
    closer.join(PATIENCE_S)
    assert not closer.is_alive()
    sender.join(PATIENCE_S)
