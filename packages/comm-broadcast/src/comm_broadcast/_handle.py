"""An exchange under way on one rank: steps that yield the request they wait for, and whoever drives them."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import Any, Generic, Protocol, TypeVar

from comm_broadcast._comm import Request
from comm_broadcast._errors import BroadcastError, CommBroadcastError, LocalProtocolError

T = TypeVar("T")
Steps = Generator[Request, None, T]
#: Called between polls with the longest time to wait (s); may return early.
Wait = Callable[[float], object]

_PAUSE_S_MIN = 20e-6
_PAUSE_S_MAX = 1e-3
#: Time allowed for each byte of the transfer at hand before a poll may sleep (s): ten times what a slow copy takes.
_S_PER_BYTE = 10e-9
#: Polls between two looks at the clock (count).
_POLLS_PER_LOOK = 16


class Owner(Protocol):
    """What a handle tells its broadcaster."""

    #: Bytes of the transfer at hand.
    moving_bytes: int
    #: How long a blocking call polls without pause (s).
    spin_s: float

    def ended(self, handle: Handle[Any], error: BaseException | None) -> None:
        """The exchange has ended on this rank."""


class Handle(Generic[T]):
    """An exchange under way on this rank.

    Poll it with :meth:`test`, or give :meth:`wait` a way to wait. Its buffers live until it has ended, whoever forgets it.
    """

    def __init__(self, owner: Owner, steps: Steps[T]) -> None:
        self._owner = owner
        self._steps = steps
        self._request: Request | None = None
        self._completed = 0
        self._done = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self.abandoned = False

    def test(self) -> bool:
        """Make progress; whether the exchange has ended on this rank. Never blocks, never raises the exchange's error."""
        while not self._done:
            if self._request is not None:
                try:
                    if not self._request.test():
                        return False
                except CommBroadcastError as error:
                    self._steps.close()
                    self._finish(None, error)
                    return True
            self._completed += 1
            try:
                self._request = next(self._steps)
            except StopIteration as stop:
                self._finish(stop.value, None)
            except BaseException as error:  # noqa: BLE001 - kept for result(), where it is raised
                self._finish(None, error)
        return True

    def _finish(self, value: T | None, error: BaseException | None) -> None:
        self._done, self._value, self._error = True, value, error
        self._request = None
        self._owner.ended(self, error)

    def result(self) -> T:
        """The exchange's value.

        Raises:
            BroadcastError: A rank failed; see there.
            LocalProtocolError: It has not ended.
        """
        if not self._done:
            raise LocalProtocolError("result: the exchange has not ended; poll test() or wait()")
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def wait(self, wait: Wait | None = None) -> T:
        """Poll until the exchange ends; between polls ``wait(timeout_s)`` is called (default: spin shortly, then sleep).

        An error of ``wait``, a KeyboardInterrupt for one, leaves the exchange abandoned: the next one finishes it first.
        """
        try:
            pause_s = _PAUSE_S_MIN
            seen, polls, spin_end_s = -1, 0, 0.0
            while not self.test():
                if wait is not None:
                    wait(pause_s)
                elif seen != self._completed:
                    # A step was made: the other ranks are there, and the next step may be a matter of microseconds.
                    seen, polls, pause_s = self._completed, 0, _PAUSE_S_MIN
                    spin_end_s = time.perf_counter() + self._owner.spin_s + self._owner.moving_bytes * _S_PER_BYTE
                    continue
                else:
                    polls += 1
                    if polls % _POLLS_PER_LOOK or time.perf_counter() < spin_end_s:
                        continue
                    polls = _POLLS_PER_LOOK - 1
                    time.sleep(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_S_MAX)
        except BaseException:
            self.abandon()
            raise
        return self.result()

    def abandon(self) -> None:
        """Its result is not wanted any more; what it still has to do, the next exchange (or close) does first.

        The other ranks wait until then at most, and no buffer is given back before its request has completed.
        """
        if not self._done:
            self.abandoned = True


class FinishFirst:
    """A request that is complete when another exchange has ended."""

    def __init__(self, handle: Handle[Any]) -> None:
        self._handle = handle

    def test(self) -> bool:
        """See :class:`Request`."""
        return self._handle.test()


def after(handle: Handle[Any], steps: Steps[T]) -> Steps[T]:
    """The steps of an exchange that is to follow an abandoned one.

    Raises:
        CommBroadcastError: The abandoned one broke the object; a ``BroadcastError`` of it was raised elsewhere and is past.
    """
    yield FinishFirst(handle)
    try:
        handle.result()
    except BroadcastError:
        pass
    return (yield from steps)
