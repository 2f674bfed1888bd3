"""An exception before any bytecode of a driver: each ticket ends once, nothing is lost or sent twice, close returns."""

from __future__ import annotations

import asyncio
import dis
import functools
import gc
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

import rpc_batch_submit
from rpc_batch_submit import AsyncioBatchSubmitter, BatchSubmitConfig, ThreadBatchSubmitter
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
                out |= {step.offset for step in steps[index : steps.index(calls[0]) + 1]}
    return frozenset(out)


class At:
    """Raises once, before the n-th bytecode of the package in this thread."""

    def __init__(self, at: int, kind: type[BaseException]) -> None:
        self.left, self.kind, self.story = at, kind, ""

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
                except Stop:
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
