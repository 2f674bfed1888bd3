"""Who waits for an exchange: a handle that a loop polls, or a blocking call."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Generator
from typing import Any, Generic, Protocol, TypeVar

from comm_broadcast._errors import BroadcastTimeoutError, LocalProtocolError
from comm_broadcast._exchange import Exchange
from comm_broadcast._settings import check_waiting

T = TypeVar("T")
#: Called between polls with the longest time to wait (s); may return early.
Wait = Callable[[float], object]

#: Where ranks share cores, polls follow each other without a pause for so long after each step (s), and for each byte of the
#: transfer at hand: twice what a copy takes.
_POLL_S = 10e-6
_POLL_S_PER_BYTE = 0.4e-9
#: Then the processor is given away between two polls for so long (s).
_YIELD_S = 400e-6
_yield: Callable[[], None] = getattr(os, "sched_yield", lambda: None)
#: Giving it away for longer than this (s) means that others compute: they got a time slice for one poll. Then so many waits
#: sleep instead (count), after which a process that does not compute is served sooner.
_SLICE_S = 600e-6
_SLEEPING_WAITS = 50
#: Pauses (s): the shortest that a system makes, 60 us to 0.3 ms; then growing, while nothing comes.
_NAP_S = 1e-6
_PAUSE_S_MIN, _PAUSE_S_MAX = 20e-6, 0.5e-3


class Pace:
    """How the blocking calls of one broadcaster wait between two polls.

    A rank with a core of its own polls without pause at first: whatever else runs there would have the core for a time slice,
    of milliseconds, if it paused for a microsecond. Where ranks share cores, that is what the one that it waits for needs.

    Args:
        spin_s: How long after each step it polls without pause, or makes the shortest pauses (s).
        crowded: Ranks share cores.
    """

    def __init__(self, spin_s: float, *, crowded: bool) -> None:
        self.spin_s = spin_s
        self._poll_s = _POLL_S if crowded else spin_s
        self._yield_s = _YIELD_S if crowded else 0.0
        #: Waits that sleep at once (count), since the machine does other work.
        self._sleeping = 0

    def poll(
        self, test: Callable[[], bool], wait: Wait | None, timeout_s: float | None, exchange: Exchange | None = None
    ) -> None:
        """Test until it is true; between two tests call ``wait(timeout_s)``, or give the processor away.

        Raises:
            BroadcastTimeoutError: It did not come true in time.
        """
        now_s = time.perf_counter()
        end_s = math.inf if timeout_s is None else now_s + timeout_s
        pause_s, seen, poll_end_s, yield_end_s, nap_end_s = _PAUSE_S_MIN, -1, now_s, now_s, now_s + self.spin_s
        while not test():
            now_s = time.perf_counter()
            if exchange is not None and seen != exchange.completed:
                # A step was made: the other ranks are there, and the next step may be a matter of microseconds.
                seen, pause_s = exchange.completed, _PAUSE_S_MIN
                poll_end_s = now_s + self._poll_s + exchange.moving_bytes * _POLL_S_PER_BYTE
                yield_end_s = poll_end_s + (0.0 if self._sleeping else self._yield_s)
                nap_end_s = now_s + self.spin_s
                self._sleeping = max(0, self._sleeping - 1)
            if now_s >= end_s:
                raise BroadcastTimeoutError(f"not every rank joined the exchange within {timeout_s} s")
            if wait is not None:
                wait(min(pause_s, end_s - now_s))
            elif now_s < poll_end_s:
                continue
            elif now_s < yield_end_s:
                _yield()
                if time.perf_counter() - now_s > _SLICE_S:
                    self._sleeping, yield_end_s = _SLEEPING_WAITS, now_s
                continue
            else:
                time.sleep(min(_NAP_S if now_s < nap_end_s else pause_s, end_s - now_s))
                if now_s < nap_end_s:
                    continue
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)


class Owner(Protocol):
    """What a handle uses of its broadcaster."""

    pace: Pace

    def advance(self, exchange: Exchange) -> bool:
        """Make progress until the exchange has ended or something has to be waited for; whether it has ended."""


def result_of(exchange: Exchange) -> Any:
    """What an exchange that has ended came to: its value, or its error raised."""
    ended = exchange.ended
    if ended is None:
        raise LocalProtocolError("result: the exchange has not ended; poll test() or wait()")
    if ended.error is not None:
        raise ended.error
    if exchange.skipped:
        raise LocalProtocolError("result: the exchange had been given up when its value came")
    return ended.value


def blocking(
    owner: Owner, exchange: Exchange, wait: Wait | None, timeout_s: float | None
) -> Generator[tuple[Any, StopIteration | None], None, None]:
    """A blocking call: yields its result once. A generator, since its frame says whether the call is still running.

    What a generator cannot raise, a ``StopIteration`` of whoever is called from here, it yields for :func:`finish` to raise.
    """
    result: tuple[Any, StopIteration | None]
    try:
        owner.pace.poll(lambda: owner.advance(exchange), wait, timeout_s, exchange)
        result = result_of(exchange), None
    except StopIteration as error:
        result = None, error
    yield result


def finish(call: Generator[tuple[Any, StopIteration | None], None, None]) -> Any:
    """Run a blocking call to its end: its value, or its error raised."""
    value, error = next(call)
    if error is not None:
        raise error
    return value


class Handle(Generic[T]):
    """An exchange under way on this rank.

    Poll it with :meth:`test`, or give :meth:`wait` a way to wait. A handle that is dropped or abandoned gives its exchange up:
    the broadcaster's next call finishes it first, without making its value. Until then the others may wait for this rank.
    """

    def __init__(self, owner: Owner, exchange: Exchange) -> None:
        self._owner = owner
        self._exchange = exchange

    def test(self) -> bool:
        """Make progress; whether the exchange has ended on this rank. Never blocks, never raises the exchange's error.

        An exception that comes from outside meanwhile (an interrupt) leaves it where it was: test again.
        """
        return self._owner.advance(self._exchange)

    def result(self) -> T:
        """The exchange's value.

        Raises:
            BroadcastError: Ranks failed; see there.
            LocalProtocolError: It has not ended, or was given up.
        """
        value: T = result_of(self._exchange)
        return value

    def wait(self, wait: Wait | None = None, *, timeout_s: float | None = None) -> T:
        """Poll until the exchange ends; between polls ``wait(timeout_s)`` is called (default: sleep, shortly at first).

        An error of ``wait``, or an interrupt, leaves the exchange given up; another :meth:`wait` takes it up again, if it comes
        before the value does.

        Args:
            wait: How to wait; is given the longest time to do so (s).
            timeout_s: How long (s, at least 0); None: as long as a rank is missing.

        Raises:
            BroadcastTimeoutError: Not every rank joined in time. The exchange is still this handle's: wait or test again.
            BroadcastConfigError: ``wait`` or ``timeout_s`` cannot be used; nothing changed.
        """
        check_waiting(wait, timeout_s)
        exchange = self._exchange
        exchange.given_up = False
        try:
            self._owner.pace.poll(self.test, wait, timeout_s, exchange)
        except BroadcastTimeoutError:
            raise
        except BaseException:
            self.abandon()
            raise
        return self.result()

    def abandon(self) -> None:
        """Its result is not wanted any more; what it still has to do, the next call (or close) does first.

        The other ranks wait until then at most, and no buffer is given back before its operation has completed.
        """
        if self._exchange.ended is None:
            self._exchange.given_up = True
