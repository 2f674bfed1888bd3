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

_PAUSE_S_MIN = 20e-6
_PAUSE_S_MAX = 1e-3
#: Time allowed for each byte of the transfer at hand before a poll may sleep (s): ten times what a slow copy takes.
_S_PER_BYTE = 10e-9
#: Polls between two looks at the clock (count).
_POLLS_PER_LOOK = 16
#: Lets whoever else could run on this core, another rank for instance, before the next poll; where the system can.
_give_way: Callable[[], None] = getattr(os, "sched_yield", lambda: None)


class Owner(Protocol):
    """What a handle uses of its broadcaster."""

    #: How long a blocking call polls without pause (s).
    spin_s: float

    def advance(self, exchange: Exchange) -> bool:
        """Make progress until the exchange has ended or something has to be waited for; whether it has ended."""


def poll(
    test: Callable[[], bool], wait: Wait | None, timeout_s: float | None, spin_s: float, exchange: Exchange | None
) -> None:
    """Test until it is true; between two tests call ``wait(timeout_s)`` (default: spin shortly, then sleep).

    Raises:
        BroadcastTimeoutError: It did not come true in time.
    """
    begun_s = time.perf_counter()
    end_s = math.inf if timeout_s is None else begun_s + timeout_s
    pause_s, polls, seen, spin_end_s = _PAUSE_S_MIN, 0, -1, begun_s + spin_s
    while not test():
        completed = 0 if exchange is None else exchange.completed
        if wait is None and seen != completed:
            # A step was made: the other ranks are there, and the next step may be a matter of microseconds.
            moving = 0 if exchange is None else exchange.moving_bytes
            seen, polls, pause_s = completed, 0, _PAUSE_S_MIN
            spin_end_s = time.perf_counter() + spin_s + moving * _S_PER_BYTE
            continue
        polls += 1
        if wait is None and polls % _POLLS_PER_LOOK:
            _give_way()
            continue
        now_s = time.perf_counter()
        if now_s >= end_s:
            raise BroadcastTimeoutError(f"not every rank joined the exchange within {timeout_s} s")
        if wait is not None:
            wait(min(pause_s, end_s - now_s))
        elif now_s < spin_end_s:
            _give_way()
        else:
            polls = _POLLS_PER_LOOK - 1
            time.sleep(min(pause_s, end_s - now_s))
        pause_s = min(2 * pause_s, _PAUSE_S_MAX)


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
        poll(lambda: owner.advance(exchange), wait, timeout_s, owner.spin_s, exchange)
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
        """Poll until the exchange ends; between polls ``wait(timeout_s)`` is called (default: spin shortly, then sleep).

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
            poll(self.test, wait, timeout_s, self._owner.spin_s, exchange)
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
