"""Small programs of calls on two ranks, all of them, against a deliberately dumb oracle."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from broadcast_values import Poison, Unpicklable

from comm_broadcast import (
    BroadcastConfig,
    Broadcaster,
    BroadcastError,
    BytesCodec,
    CallMismatchError,
    ClosedError,
    LocalProtocolError,
)
from comm_broadcast.testing import FakeWorld

ROUNDS_MAX = 300
BYTES = BytesCodec()
#: What a rank can do in one exchange; a program is a sequence of them.
STEPS = ("broadcast", "gather", "allgather", "bytes", "unpicklable", "poison", "drop", "close")


def oracle(programs: tuple[tuple[str, ...], ...]) -> list[list[str]]:
    """What each rank gets of each of its exchanges, by going through the table."""
    got: list[list[str]] = [[], []]
    closed, untold = False, False
    for calls in itertools.zip_longest(*programs):
        calls = tuple("close" if call is None else call for call in calls)
        if closed:
            row = ["ended" if call == "close" else "local" for call in calls]
        elif "close" in calls:
            closed = True
            # What is not known yet is known when all is closed.
            last = "failed" if untold or calls[0] == "unpicklable" else "ended"
            row = [last if call == "close" else "closed" for call in calls]
        elif len({_kind(call) for call in calls}) > 1:
            row = ["mismatch"] * 2
        elif untold or "unpicklable" in calls[: 1 if _kind(calls[0])[0] == "broadcast" else 2]:
            row, untold = ["failed"] * 2, False
        else:
            row = ["value"] * 2
            # Only a value of rank 0 is decoded on rank 1, which refuses it.
            if calls[0] == "poison":
                row[1], untold = "failed", True
        for rank, call in enumerate(calls):
            got[rank].append("dropped" if call == "drop" else row[rank])
    return got


def oracle_ahead(programs: tuple[tuple[str, ...], ...]) -> list[list[str]]:
    """The same where the root waits for nobody: it learns of what went wrong with rank 1 in its next exchange."""
    left = [list(program) for program in programs]
    got: list[list[str]] = [[], []]
    # What closing was told, and what the root has to tell.
    held, report, closed = ["", ""], "", False
    while any(left):
        if closed:
            for rank in range(2):
                got[rank] += [_seen(call, "ended" if call == "close" else "local") for call in left[rank]]
                left[rank].clear()
            break
        calls = [left[rank][0] for rank in range(2)]
        if report:
            row, closed, report = [report] * 2, report == "closed", ""
        elif calls[0] == "close" or ("close" in calls and _kind(calls[0])[0] != "broadcast"):
            row, closed = ["closed"] * 2, True
        elif _kind(calls[0])[0] != "broadcast":
            row = ["value"] * 2 if _kind(calls[0]) == _kind(calls[1]) else ["mismatch"] * 2
        elif calls[0] == "unpicklable":
            row = ["failed"] * 2
        elif calls[1] == "close":
            row, report = ["value", ""], "closed"
        elif _kind(calls[0]) != _kind(calls[1]):
            row, report = ["value", "mismatch"], "mismatch"
        elif calls[0] == "poison":
            row, report = ["value", "failed"], "failed"
        else:
            row = ["value"] * 2
        for rank, call in enumerate(calls):
            if call == "close":
                # It goes on until all are told, and then says what it was told.
                held[rank] = held[rank] or (row[rank] if row[rank] in ("failed", "mismatch") else "")
                if closed:
                    got[rank].append(held[rank] or "ended")
                    left[rank].pop(0)
            else:
                got[rank].append(_seen(call, row[rank]))
                left[rank].pop(0)
    return got


def _seen(call: str, result: str) -> str:
    return "dropped" if call == "drop" else result


def _kind(call: str) -> tuple[str, bool]:
    return (call if call in ("gather", "allgather") else "broadcast"), call == "bytes"


class Rank:
    """Makes a program's calls, one step at a time."""

    def __init__(self, broadcaster: Broadcaster, program: tuple[str, ...]) -> None:
        self.broadcaster = broadcaster
        self.calls = [*program, *["close"] * (LENGTH_MAX - len(program))]
        self.got: list[str] = []
        self._wait: Callable[[], str | None] | None = None

    def step(self) -> bool:
        """Whether there is nothing left to do."""
        if self._wait is None:
            if not self.calls:
                return True
            self._wait = self._start(self.calls.pop(0))
        result = self._wait()
        if result is not None:
            self.got.append(result)
            self._wait = None
        return False

    def _start(self, call: str) -> Callable[[], str | None]:
        if call == "close":
            return self._close
        value = {"unpicklable": Unpicklable(), "poison": "poison", "bytes": b"bytes"}.get(call, call)
        verb = call if call in ("gather", "allgather") else "broadcast"
        start = getattr(self.broadcaster, f"start_{verb}")
        try:
            handle = start(value, codec=BYTES if call == "bytes" else None)
        except LocalProtocolError:
            return lambda: "dropped" if call == "drop" else "local"
        if call == "drop":
            return lambda: "dropped"

        def wait() -> str | None:
            if not handle.test():
                return None
            try:
                handle.result()
            except BroadcastError:
                return "failed"
            except CallMismatchError:
                return "mismatch"
            except ClosedError:
                return "closed"
            except LocalProtocolError:
                return "local"
            return "value"

        return wait

    def _close(self) -> str | None:
        try:
            self.broadcaster.close(timeout_s=0)
        except TimeoutError:
            return None
        except BroadcastError:
            return "failed"
        except CallMismatchError:
            return "mismatch"
        return "ended"


LENGTH_MAX = 3


def schedules() -> Iterator[Iterator[int]]:
    """Who makes the next step: one first, the other first, in turn."""
    yield itertools.cycle([0, 0, 0, 1])
    yield itertools.cycle([1, 1, 1, 0])
    yield itertools.cycle([0, 1])


def run(form: str, programs: tuple[tuple[str, ...], ...], schedule: Iterator[int]) -> list[list[str]]:
    """One run; what each rank got."""
    world = FakeWorld(2)
    codecs = [Poison(False), Poison(False)]
    codecs[1].refuses = True
    made: list[Any] = world.run(lambda comm: Broadcaster(comm, codec=codecs[comm.rank], config=FORMS[form][0]))
    ranks = [Rank(b, program) for b, program in zip(made, programs, strict=True)]
    idle = [False, False]
    for _, who in zip(range(ROUNDS_MAX), schedule, strict=False):
        idle[who] = ranks[who].step()
        if all(idle):
            return [rank.got for rank in ranks]
    raise AssertionError(f"{programs}: hangs after {[rank.got for rank in ranks]}")


#: Settings, and what is right with them.
FORMS = {"level": (BroadcastConfig(), oracle), "ahead": (BroadcastConfig(ahead_max=1), oracle_ahead)}


def explore(form: str, length: int = 2, stride: int = 1) -> int:
    """All pairs of programs of this length, all schedules; runs (count).

    Raises:
        AssertionError: One came to something else than the oracle says.
    """
    count = 0
    singles = list(itertools.product(STEPS, repeat=length))
    for number, pair in enumerate(itertools.product(singles, singles)):
        # Whether a dropped handle's value was refused before it was dropped is a matter of time.
        if number % stride or ("poison", "drop") in zip(*pair, strict=True):
            continue
        padded = tuple(program + ("close",) * (LENGTH_MAX - length) for program in pair)
        wanted = FORMS[form][1](padded)
        for schedule in schedules():
            got = run(form, pair, schedule)
            if got != wanted:
                raise AssertionError(f"{pair}: {got}, the oracle says {wanted}")
            count += 1
    return count
