"""An exception before any bytecode of a driver: each ticket ends once, nothing is lost or sent twice, close returns."""

from __future__ import annotations

import asyncio
import dis
import functools
import gc
import random
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

import rpc_batch_submit
from rpc_batch_submit import (
    AsyncioBatchSubmitter,
    Batcher,
    BatchSubmitConfig,
    BatchUsageError,
    EntryState,
    SendBatch,
    ThreadBatchSubmitter,
)
from rpc_batch_submit.testing import FakeSender

SOURCES = str(Path(rpc_batch_submit.__file__).parent)
PATIENCE_S = 5.0


class Stop(KeyboardInterrupt):
    """An interrupt."""


class Fault(Exception):
    """What a signal handler may raise as well."""


@functools.cache
def unreachable(code: CodeType) -> frozenset[int]:
    """Offsets where CPython never looks for a signal and no handler reaches.

    These are NOPs, the return itself, and the way out of a ``with`` to ``__exit__``.
    """
    steps = list(dis.get_instructions(code))
    out = {step.offset for step in steps if step.opname in ("NOP", "RETURN_VALUE")}
    for index in range(len(steps) - 4):
        loads, rest = steps[index : index + 3], steps[index + 3 : index + 5]
        if {(step.opname, step.argval) for step in loads} == {("LOAD_CONST", None)}:
            calls = [step for step in rest if step.opname == "CALL" and step.arg == 2]
            if calls:
                # A value to be returned is put below what the exit needs first.
                begin = index - 1 if index and steps[index - 1].opname == "SWAP" else index
                out |= {step.offset for step in steps[begin : steps.index(calls[0]) + 1]}
    return frozenset(out)


class At:
    """Raises once, before the n-th bytecode of the package in this thread."""

    def __init__(self, at: int, kind: type[BaseException]) -> None:
        self.left, self.kind, self.story = at, kind, ""
        #: The functions of the package that were under way, by their plain names.
        self.inside: set[str] = set()

    def __call__(self, frame: Any, event: str, _: object) -> Any:
        if event == "call":
            if not frame.f_code.co_filename.startswith(SOURCES):
                return None
            # In this order: Python 3.13 asks for the function first.
            frame.f_trace, frame.f_trace_lines, frame.f_trace_opcodes = self, False, True
        elif event == "opcode" and self.left and frame.f_lasti not in unreachable(frame.f_code):
            self.left -= 1
            if not self.left:
                self.story = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
                caller = frame
                while caller is not None:
                    if caller.f_code.co_filename.startswith(SOURCES):
                        self.inside.add(caller.f_code.co_name)
                    caller = caller.f_back
                raise self.kind(self.story)
        return self

    def run(self, body: Callable[[], Any]) -> tuple[Any, bool]:
        """(result, whether the exception came out)."""
        before = sys.gettrace()
        # What is raised in ``__del__`` is dropped by the interpreter: nothing older must be collected meanwhile.
        gc.disable()
        sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for it when tracing begins
        sys.settrace(self)
        try:
            return body(), False
        except self.kind:
            return None, True
        finally:
            sys.settrace(before)
            gc.enable()


class Books:
    """The caller's own table of requests, and what the sender got."""

    def __init__(self) -> None:
        self.registered: Counter[int] = Counter()
        self.rolled_back: Counter[int] = Counter()
        self.sender = FakeSender(immediate=True)

    def hooks(self) -> dict[str, Any]:
        return {
            "register": lambda request: self.registered.update([request]),
            "rollback": lambda request, _: self.rolled_back.update([request]),
            "id_of": lambda request: request,
            "size_of": lambda _: 1,
        }

    def check(self, submitter: Any, tickets: dict[int, Any], story: str) -> None:
        """After ``close``."""
        sent = Counter(self.sender.requests)
        assert max(sent.values(), default=1) == 1, f"{story}: sent twice"
        for request, ticket in tickets.items():
            assert ticket.done(), f"{story}: the ticket of {request} never ends"
            error = None if ticket.cancelled() else ticket.exception()
            assert (error is None) <= (sent[request] == 1), f"{story}: {request} is served and was not sent"
            # At the very call of the hook it counts as raised by the hook.
            told = self.rolled_back[request] == 1 or story.startswith("Hooks.failed")
            assert (error is not None) <= told, f"{story}: {request} failed untold"
        for request in set(self.registered) - set(tickets) - set(sent):
            assert self.rolled_back[request] >= 1, f"{story}: {request} stays registered and was never taken"
        assert max(self.rolled_back.values(), default=1) == 1, f"{story}: rolled back twice"
        submitter._core.validate()
        statistics = submitter.statistics()
        assert (statistics.outstanding, statistics.buffered) == (0, 0), story


CONFIGS = {
    "pairs": BatchSubmitConfig(batch_max=2, delay_ms=60_000),
    "full": BatchSubmitConfig(batch_max=3, delay_ms=60_000),
    "adaptive": BatchSubmitConfig(batch_max=8, delay_ms=60_000, adaptive=True),
    "bytes": BatchSubmitConfig(batch_max=8, bytes_max=2, delay_ms=60_000),
}
#: What is interrupted, after two requests were submitted.
ACTIONS: dict[str, Callable[[Any], Any]] = {
    "submit": lambda submitter: submitter.submit(2),
    "flush": lambda submitter: submitter.flush(),
    "abort": lambda submitter: submitter.abort(1),
}


def in_threads(at: int, kind: type[BaseException], action: str, config: BatchSubmitConfig) -> bool:
    """False: the action has fewer bytecodes."""
    books = Books()
    submitter = ThreadBatchSubmitter(books.sender, config, **books.hooks())
    tickets = {number: submitter.submit(number) for number in range(2)}
    injector = At(at, kind)
    if action == "close":
        injector.run(lambda: submitter.close(PATIENCE_S))
    else:
        result, _ = injector.run(lambda: ACTIONS[action](submitter))
        if action == "submit" and result is not None:
            tickets[2] = result
        statistics = submitter.statistics()
        assert statistics.outstanding == statistics.buffered, f"{injector.story}: what was queued is not sent"
        tickets[3] = submitter.submit(3)
    assert submitter.close(PATIENCE_S), f"{injector.story}: close does not return"
    books.check(submitter, tickets, injector.story)
    return not injector.left


def in_asyncio(at: int, kind: type[BaseException], action: str, config: BatchSubmitConfig) -> bool:
    """Likewise."""
    injector = At(at, kind)

    async def run() -> None:
        books = Books()
        submitter = AsyncioBatchSubmitter(books.sender, config, **books.hooks())
        tickets = {number: submitter.submit(number) for number in range(2)}
        if action == "close":
            injector.run(submitter.close)
        else:
            result, _ = injector.run(lambda: ACTIONS[action](submitter))
            if action == "submit" and result is not None:
                tickets[2] = result
            tickets[3] = submitter.submit(3)
        assert await submitter.aclose(PATIENCE_S), f"{injector.story}: aclose does not return"
        books.check(submitter, tickets, injector.story)

    asyncio.run(run())
    return not injector.left


def sweep(
    driver: Callable[..., bool], kind: type[BaseException], action: str, config: BatchSubmitConfig, step: int
) -> int:
    """How many bytecodes raised."""
    at = 1
    while driver(at, kind, action, config):
        at += step
    return at


#: A core in the middle of things: full but for one, by number or by bytes, with a batch under way.
CORES = {
    "pairs": BatchSubmitConfig(batch_max=2, delay_ms=60_000),
    "adaptive": BatchSubmitConfig(batch_max=8, delay_ms=60_000, adaptive=True),
    "bytes": BatchSubmitConfig(batch_max=8, bytes_max=2, delay_ms=60_000),
}
Core = Batcher[int]
#: What is interrupted: a method of the core, given the batch that is under way.
STEPS: dict[str, Callable[[Core, SendBatch[int]], Any]] = {
    "add": lambda core, _: core.add(3, 3.0, request_id=3, size_bytes=1),
    "flush": lambda core, _: core.flush(),
    "close": lambda core, _: core.close(),
    "abort": lambda core, _: core.abort(2),
    "settle": lambda core, batch: core.settle(batch.entries[0]),
    "over": lambda core, _: core.send_over(),
}


@pytest.mark.parametrize("config", CORES.values(), ids=CORES)
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_core_is_mended_after_an_exception_before_every_bytecode(
    step: Callable[[Core, SendBatch[int]], Any], config: BatchSubmitConfig
) -> None:
    """Whatever was half done: each request is settled, with the driver or buffered, under its id; nothing else is left."""
    for at in range(1, 10_000):
        core = Core(config)
        for number in range(2):
            batches = core.add(number, float(number), request_id=number, size_bytes=1)
            if batches:
                break
        (batch,) = batches or core.flush()
        core.add(2, 2.0, request_id=2, size_bytes=1)
        injector = At(at, Stop)
        injector.run(lambda core=core, batch=batch: step(core, batch))
        if injector.left:
            assert at > 10
            return
        held = [batch, *core.mend([batch])]
        story = injector.story
        core.validate()
        statistics = core.statistics()
        assert statistics.outstanding == len(core.entries)
        assert not core.closed or not statistics.buffered, f"{story}: buffered after closing"
        sent = {entry.request for each in held for entry in each.entries}
        # Those that are admitted and not buffered keep their ids until the driver withdraws them.
        for entry in core.entries:
            assert entry.state is not EntryState.SENT or entry.request in sent, story
            if entry.state is EntryState.BUFFERED:
                assert core.buffered(entry.request) is entry, f"{story}: buffered under no id"
            if entry.request in sent:
                core.settle(entry)
            else:
                core.remove(entry)
        assert core.statistics().outstanding == 0, story
        for _ in held:
            core.send_over()
        with pytest.raises(BatchUsageError):
            core.send_over()
        if not core.closed:
            for number in range(4):
                core.admit(number, request_id=number)
    raise AssertionError("the step never ends")


def test_ids_of_requests_that_left_are_free_after_an_interrupt() -> None:
    """While their batch is under way: an id is taken as long as its request can be aborted, not longer."""
    for at in range(1, 10_000):
        core = Core(CORES["bytes"])
        core.add(1, 0.0, request_id=1, size_bytes=1)
        injector = At(at, Stop)
        injector.run(core.flush)
        if injector.left:
            break
        (batch,) = core.mend([]) or core.flush()
        assert core.abort(1) is None
        core.mend([batch])
        core.admit(1, request_id=1)
    assert at > 10


@pytest.mark.parametrize("driver", [ThreadBatchSubmitter, AsyncioBatchSubmitter])
@pytest.mark.parametrize("kind", [Stop, Fault])
def test_the_end_of_a_send_is_told_as_it_was(driver: Any, kind: type[BaseException]) -> None:
    """An exception while a send's outcomes are told changes none of them."""

    async def run(at: int) -> At:
        submitter = driver(lambda batch: None, CONFIGS["pairs"])
        tickets = [submitter.submit(0)]
        injector = At(at, kind)
        injector.run(lambda: submitter.submit(1))
        if "_end_batch" in injector.inside:
            assert tickets[0].done(), injector.story
            assert tickets[0].exception() is None, f"{injector.story}: {tickets[0].exception()!r}"
            assert submitter.statistics().failed == 0, injector.story
        submitter.close()
        return injector

    places = set()
    for at in range(1, 10_000, 3):
        injector = asyncio.run(run(at))
        if injector.left:
            break
        places |= {injector.story} if "_end_batch" in injector.inside else set()
    assert len(places) > 10


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("action", [*ACTIONS, "close"])
@pytest.mark.parametrize("driver", [in_threads, in_asyncio])
def test_an_exception_before_any_bytecode(driver: Any, action: str, config: BatchSubmitConfig) -> None:
    """Every seventh, as an interrupt and as an ``Exception``."""
    assert sweep(driver, Stop, action, config, 7) > 20
    assert sweep(driver, Fault, action, config, 11) > 20


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Stop, Fault])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("action", [*ACTIONS, "close"])
@pytest.mark.parametrize("driver", [in_threads, in_asyncio])
def test_an_exception_before_every_bytecode(
    driver: Any, action: str, config: BatchSubmitConfig, kind: type[BaseException]
) -> None:
    """Without gaps."""
    assert sweep(driver, kind, action, config, 1) > 20


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timer signals")
def test_signals_at_any_time() -> None:
    """Real ones, also inside the standard library's futures and locks, and while another error is dealt with."""
    chance = random.Random(7)
    armed = False

    def interrupt(*_: object) -> None:
        if armed:
            raise Stop

    def send(batch: list[int]) -> None:
        sent.update(batch)
        if chance.random() < 0.1:
            raise OSError("gone")

    before = signal.signal(signal.SIGALRM, interrupt)
    interrupts, number = 0, 0
    # Older submitters are not collected in the middle: what is raised in a finalizer is dropped by the interpreter.
    gc.disable()
    try:
        while interrupts < 1000:
            sent: Counter[int] = Counter()
            rolled_back: dict[int, BaseException] = {}
            # Hooks in C: a hook in Python can be interrupted before its first line.
            submitter = ThreadBatchSubmitter(
                send,
                chance.choice(list(CONFIGS.values())),
                rollback=rolled_back.setdefault,
                id_of=lambda request: request,
            )
            tickets: dict[int, Any] = {}
            for _ in range(40):
                try:
                    armed = True
                    signal.setitimer(signal.ITIMER_REAL, chance.uniform(5e-6, 2e-4))
                    try:
                        for _ in range(4):
                            number += 1
                            tickets[number] = submitter.submit(number)
                        submitter.flush()
                        submitter.abort(number)
                    finally:
                        armed = False
                        signal.setitimer(signal.ITIMER_REAL, 0)
                except (Stop, RuntimeError) as error:
                    # A Condition of the standard library that is interrupted as it wakes leaves with an error of its own.
                    if not isinstance(error, Stop) and not isinstance(error.__context__, Stop):
                        raise
                    interrupts += 1
                    armed = False
            assert submitter.close(PATIENCE_S)
            submitter._core.validate()
            assert max(sent.values(), default=1) == 1
            for request, ticket in tickets.items():
                assert ticket.done()
                assert (ticket.exception() is not None) == (request in rolled_back)
                assert sent[request] == 1 or request in rolled_back
    finally:
        gc.enable()
        signal.signal(signal.SIGALRM, before)


def test_an_interrupted_submit_is_taken_back() -> None:
    """Buffered and not sent: the caller has no ticket, so the request goes, and its registration with it."""
    books = Books()
    config = CONFIGS["full"]
    gone = 0
    for at in range(1, 10_000):
        submitter = ThreadBatchSubmitter(books.sender, config, **books.hooks())
        injector = At(at, Stop)
        _, raised = injector.run(lambda submitter=submitter, at=at: submitter.submit(at))
        assert submitter.statistics().buffered == (not raised), injector.story
        if books.registered[at] and raised:
            gone += 1
            assert books.rolled_back[at] == 1 or injector.story.startswith("Hooks.failed"), injector.story
        submitter.close(PATIENCE_S)
        if injector.left:
            break
    assert gone > 20


def test_an_interrupt_while_the_timer_starts_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """The standard library's ``start`` can turn it into an error of its own lock; the request is taken back all the same."""
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        try:
            raise Stop("here")
        except Stop:
            raise RuntimeError("release unlocked lock")  # noqa: B904 - as it comes out of a ``with``

    books = Books()
    submitter = ThreadBatchSubmitter(books.sender, CONFIGS["full"], **books.hooks())
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(Stop, match="here"):
        submitter.submit(1)
    monkeypatch.undo()
    tickets = {2: submitter.submit(2)}
    assert submitter.close(PATIENCE_S)
    books.check(submitter, tickets, "an interrupted start")


def test_a_thread_that_cannot_be_started_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is no interrupt."""

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    books = Books()
    submitter = ThreadBatchSubmitter(books.sender, CONFIGS["full"], **books.hooks())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError, match="can't start"):
            submitter.submit(1)
    assert submitter.close(PATIENCE_S)
    assert books.sender.requests == []
