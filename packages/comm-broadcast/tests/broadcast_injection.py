"""Exceptions at a chosen bytecode of the package's own code, and what must hold afterwards.

One rank is the victim. It makes one call, in which an exception is raised before the n-th bytecode that the package executes;
the other ranks make the same call. Then all make a working exchange. What is looked for: a rank that waits for ever, ranks that
differ in what came of the exchange, a wrong value, an object that does not work afterwards.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import comm_broadcast
from comm_broadcast import (
    BroadcastConfig,
    Broadcaster,
    BroadcastError,
    BroadcastTimeoutError,
    ClosedError,
    Handle,
    LocalProtocolError,
)
from comm_broadcast.testing import FakeWorld

SOURCES = str(Path(comm_broadcast.__file__).parent)
#: Rounds of a world without threads in which every rank is asked once (count): far more than any exchange takes.
ROUNDS_MAX = 400
VERBS = ("broadcast", "gather", "allgather")
#: Whose every exchange waits for all ranks, and whose root waits for nobody.
FORMS = {
    "level": BroadcastConfig(frame_bytes=512, chunk_bytes=4096, gather_bytes_max=16_384),
    "ahead": BroadcastConfig(frame_bytes=512, chunk_bytes=4096, gather_bytes_max=16_384, ahead_max=1),
}


class Stop(BaseException):
    """An interrupt."""


class Fault(Exception):
    """An exception of somebody else's, raised by a signal handler for instance."""


#: ``StopIteration`` is what a generator cannot raise: passing through one it becomes the cause of a ``RuntimeError``.
#: From Python 3.12 on that is bytecode of the generator's own: before and after it nothing tells the two apart.
KINDS: tuple[type[BaseException], ...] = (
    KeyboardInterrupt, Fault, Stop, *((StopIteration,) if sys.version_info < (3, 12) else ()),
)  # fmt: skip


def is_injected(error: BaseException, kind: type[BaseException]) -> bool:
    """Whether an exception is the one that was injected."""
    return isinstance(error, kind) or (isinstance(error, RuntimeError) and isinstance(error.__cause__, kind))


class Injector:
    """Raises once, before a chosen bytecode of the package (or never: then it counts them)."""

    def __init__(self, at: int, kind: type[BaseException] = Stop) -> None:
        self.at, self.kind, self.count = at, kind, 0

    @property
    def has_raised(self) -> bool:
        return 0 < self.at <= self.count

    def _enter(self, frame: Any, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(SOURCES):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._look

    def _look(self, frame: Any, event: str, argument: object) -> Any:
        # Bytecodes without a line are the compiler's own, where no signal is looked for. Python 3.12 also shows those that end
        # a generator which nobody needs any more, and whatever is raised there is printed and goes no further.
        if event == "opcode" and not self.has_raised and frame.f_lineno is not None:
            self.count += 1
            if self.count == self.at:
                raise self.kind(f"before bytecode {self.at}, line {frame.f_lineno} of {frame.f_code.co_name}")
        return self._look

    def call(self, body: Callable[[], Any]) -> Any:
        before = sys.gettrace()
        sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for it when tracing begins
        sys.settrace(self._enter)
        try:
            return body()
        finally:
            sys.settrace(before)


PAYLOADS: dict[str, Callable[[int], Any]] = {
    "small": lambda rank: ("value", rank),
    "pieces": lambda rank: [bytes([rank]) * 9000, list(range(2000))],
    "large": lambda rank: [np.full(3000, rank), "text", np.full(2500, rank + 1), b"y" * 5000],
}


def same(value: Any, other: Any) -> bool:
    if isinstance(value, np.ndarray):
        return np.array_equal(value, other)
    if isinstance(value, list):
        return isinstance(other, list) and len(value) == len(other) and all(map(same, value, other))
    return type(value) is type(other) and bool(value == other)


def expected(verb: str, rank: int, size: int, make: Callable[[int], Any]) -> Any:
    """What the call gives on a rank if nothing goes wrong."""
    if verb == "broadcast":
        return make(0)
    return [make(r) for r in range(size)] if verb == "allgather" or rank == 0 else None


class Broken(AssertionError):
    """What must not happen did."""


def outcome(get: Callable[[], Any]) -> tuple[str, Any]:
    """("value", it) or ("told", which ranks failed)."""
    try:
        return "value", get()
    except BroadcastError as error:
        return "told", [f.rank for f in error.failures]


def judge(story: str, verb: str, make: Callable[[int], Any], got: dict[int, tuple[str, Any]], size: int) -> None:
    """All others were told, or all have the right value, or some have and all are told in the next exchange."""
    for rank, (kind, value) in got.items():
        if kind == "value" and not same(expected(verb, rank, size, make), value):
            raise Broken(f"{story}: rank {rank} got {value!r:.200}")


class Fakes:
    """A world without threads: whoever waits lets the others make a step."""

    def __init__(self, size: int, victim: int, config: BroadcastConfig) -> None:
        self.size, self.victim = size, victim
        made: list[Any] = FakeWorld(size).run(lambda comm: Broadcaster(comm, config=config))
        self.ranks: list[Broadcaster] = made
        self.handles: dict[int, Handle[Any]] = {}
        self._rounds = 0

    def start_others(self, verb: str, make: Callable[[int], Any]) -> None:
        for rank, broadcaster in enumerate(self.ranks):
            if rank != self.victim:
                self.handles[rank] = getattr(broadcaster, f"start_{verb}")(make(rank))

    def pump(self) -> None:
        """One step for each of the others."""
        self._rounds += 1
        if self._rounds > ROUNDS_MAX:
            raise Broken("hangs")
        for handle in self.handles.values():
            handle.test()

    def trial(self, verb: str, make: Callable[[int], Any], at: int, kind: type[BaseException], way: str) -> bool:
        """One injection and what follows; False: the call has fewer bytecodes."""
        broadcaster, injector = self.ranks[self.victim], Injector(at, kind)
        story = f"{verb}, rank {self.victim} of {self.size}, {way}, {kind.__name__} before bytecode {at}"
        self.handles, self._rounds = {}, 0
        if at % 2:
            self.start_others(verb, make)
        before = broadcaster.begun
        mine: list[Handle[Any]] = []

        def pump(timeout_s: float = 0.0) -> None:
            """The others' bytecodes are not meant."""
            tracing = sys.gettrace()
            sys.settrace(None)
            self.pump()
            sys.settrace(tracing)

        def block() -> Any:
            return getattr(broadcaster, verb)(make(self.victim), wait=pump)

        def by_handle() -> Any:
            mine.append(getattr(broadcaster, f"start_{verb}")(make(self.victim)))
            while not mine[0].test():
                pump()
            return mine[0].result()

        try:
            if not at % 2:
                self.start_others(verb, make)
            got = outcome(lambda: injector.call(by_handle if way == "handle" else block))
            if injector.has_raised and got[0] == "value":
                raise Broken(f"{story}: the exception was swallowed")
        except (kind, RuntimeError) as error:
            if not is_injected(error, kind):
                raise
            story += f" ({error})"
            if broadcaster.begun == before:
                # It never began: the others wait for the call, so it is made again.
                got = outcome(block)
            elif mine and way == "handle":
                # The handle is still there: it goes on as if nothing had been, unless the exception was a codec's.
                handle = mine[0]
                while not handle.test():
                    self.pump()
                try:
                    got = outcome(handle.result)
                except kind:
                    got = ("told", [self.victim])
                del handle
            else:
                got = ("value", expected(verb, self.victim, self.size, make))
        mine.clear()
        self.after(story, verb, make, got)
        return injector.has_raised

    def after(self, story: str, verb: str, make: Callable[[int], Any], mine: tuple[str, Any]) -> None:
        """The exchange ends on all ranks, and at most one more that tells, and then one works."""
        first = self.handles
        try:
            rows = self.gather_all()
            got = {rank: outcome(handle.result) for rank, handle in first.items()} | {self.victim: mine}
            judge(story, verb, make, got, self.size)
            if all(kind == "told" for kind, _ in rows):
                rows = self.gather_all()
        except Broken as error:
            raise Broken(f"{story}: {error}") from error
        if rows != [("value", list(range(self.size)))] * self.size:
            raise Broken(f"{story}: the exchange that follows gave {rows}")

    def gather_all(self) -> list[tuple[str, Any]]:
        """An allgather of the ranks' numbers by all; each begins when its exchange before has ended."""
        waiting, self._rounds = dict(self.handles), 0
        self.handles = {}
        started = {self.victim: self.ranks[self.victim].start_allgather(self.victim)}
        while sum(handle.test() for handle in started.values()) < self.size:
            self._rounds += 1
            if self._rounds > ROUNDS_MAX:
                raise Broken(f"hangs; ended: {[r for r, h in started.items() if h.test()]} of {sorted(started)}")
            for rank, handle in list(waiting.items()):
                if handle.test():
                    del waiting[rank]
                    started[rank] = self.ranks[rank].start_allgather(rank)
            for rank in range(self.size):
                if rank not in started and rank not in waiting:
                    started[rank] = self.ranks[rank].start_allgather(rank)
        self.handles = {}
        return [outcome(started[rank].result) for rank in range(self.size)]


def sweep(form: str, size: int, victim: int, verb: str, payload: str, way: str, stride: int = 1, start: int = 1) -> int:
    """Injections before every ``stride``-th bytecode of a call, all with the same objects; how many there were (count)."""
    world, make = Fakes(size, victim, FORMS[form]), PAYLOADS[payload]
    for _ in range(2):
        world.trial(verb, make, 0, Stop, way)
    at, count = start, 0
    while world.trial(verb, make, at, KINDS[count % len(KINDS)], way):
        at, count = at + stride, count + 1
    return count


def on_ranks(comm: Any, form: str, verb: str, payload: str, victim: int, first: int, count: int, stride: int) -> int:
    """The same over MPI, with blocking calls; how many injections hit (count, on the victim).

    Raises:
        Broken: A rank waits for ever, got a wrong value, or the exchange that follows does not work.
    """
    from comm_broadcast import MpiComm

    make, limit_s = PAYLOADS[payload], 30.0
    broadcaster = Broadcaster(MpiComm(comm), config=FORMS[form], timeout_s=60.0)
    rank, size, hits = broadcaster.rank, broadcaster.size, 0
    for turn in range(count):
        kind = KINDS[turn % len(KINDS)]
        injector = Injector(first + turn * stride if rank == victim else 0, kind)
        story = f"{verb}, rank {victim} of {size}, {payload}, {kind.__name__} before bytecode {injector.at}"
        before = broadcaster.begun

        def call() -> Any:
            return getattr(broadcaster, verb)(make(rank), timeout_s=limit_s)

        try:
            try:
                got = outcome(lambda injector=injector: injector.call(call) if rank == victim else call())
            except (kind, RuntimeError) as error:
                if not is_injected(error, kind):
                    raise
                story += f" ({error})"
                got = outcome(call) if broadcaster.begun == before else ("value", expected(verb, rank, size, make))
            judge(story, verb, make, {rank: got}, size)
            follows = outcome(lambda: broadcaster.allgather(rank, timeout_s=limit_s))
            if follows[0] == "told":
                follows = outcome(lambda: broadcaster.allgather(rank, timeout_s=limit_s))
            if follows != ("value", list(range(size))):
                raise Broken(f"{story}: the exchange that follows gave {follows}")
        except BroadcastTimeoutError as error:
            raise Broken(f"{story}: rank {rank} waits for ever") from error
        hits += injector.has_raised
    broadcaster.close(timeout_s=limit_s)
    return hits


def close_once(form: str, size: int, victim: int, at: int, kind: type[BaseException]) -> bool:
    """An injection while one rank closes and the others broadcast; False: closing has fewer bytecodes.

    Raises:
        Broken: A rank waits for ever, or is not closed in the end.
    """

    def body(comm: Any) -> str:
        broadcaster = Broadcaster(comm, config=FORMS[form], timeout_s=10.0)
        broadcaster.broadcast(1, timeout_s=10.0)
        said = ""
        while comm.rank != victim and not said:
            try:
                broadcaster.broadcast(2, timeout_s=10.0)
            except ClosedError as error:
                said = f"told of {error.rank}"
        injector = Injector(at if comm.rank == victim else 0, kind)
        try:
            injector.call(lambda: broadcaster.close(timeout_s=10.0))
        except (kind, RuntimeError) as error:
            if not is_injected(error, kind):
                raise
            broadcaster.close(timeout_s=10.0)
        broadcaster.close(timeout_s=0)
        try:
            broadcaster.broadcast(3)
        except LocalProtocolError:
            return said or ("hit" if injector.has_raised else "missed")
        return "open"

    story = f"close, {form}, rank {victim} of {size}, {kind.__name__} before bytecode {at}"
    try:
        rows = FakeWorld(size).run(body)
    except TimeoutError as error:
        raise Broken(f"{story}: {error}") from error
    if any(row != f"told of {victim}" for rank, row in enumerate(rows) if rank != victim) or rows[victim] not in (
        "hit",
        "missed",
    ):
        raise Broken(f"{story}: {rows}")
    return rows[victim] == "hit"


def sweep_close(form: str, size: int, victim: int, stride: int = 1) -> int:
    """Injections before every ``stride``-th bytecode of closing; how many there were (count)."""
    count = 0
    while close_once(form, size, victim, 1 + count * stride, KINDS[count % len(KINDS)]):
        count += 1
    return count
