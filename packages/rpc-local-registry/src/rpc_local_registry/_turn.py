"""Whose turn it is to touch a client's socket: its I/O thread's, or for one exchange a caller's. Pure: no socket, no clock.

A blocking call that goes through the I/O thread costs two wake-ups more than its bytes need. A thread that calls again and
again, with nothing else under way, is therefore lent the socket: it sends its call and takes in the answer itself, while the
I/O thread waits beside the socket for the first sign that somebody else needs it.

The turn is one entry of a dictionary, taken by ``setdefault``: a single step of the interpreter, so an interrupt finds it
taken or not, and ``give`` may be repeated by whoever was interrupted in it.
"""

from __future__ import annotations

import contextlib
import queue
from typing import Final

#: Whoever gives the turn back says so; this is only how soon the I/O thread looks again if it was interrupted before that.
_LOOK_AGAIN_S: Final = 0.01


class Turn:
    """Belongs to the I/O thread at first."""

    __slots__ = ("_given", "_holder", "lent", "wanted")

    def __init__(self) -> None:
        self._holder: dict[int, object] = {0: self}
        #: In C, unlike an event: an interrupt in the middle of it would keep an event's lock.
        self._given: queue.SimpleQueue[None] = queue.SimpleQueue()
        #: Whether callers may take it.
        self.lent = False
        #: Whether the I/O thread waits for it: no caller begins another exchange.
        self.wanted = False

    def take(self, me: object) -> bool:
        """A caller's: True if the turn is now ``me``'s. Never waits."""
        return self.lent and not self.wanted and self._holder.setdefault(0, me) is me

    def give(self, me: object) -> None:
        """A caller's: done, if it had the turn. Harmless if it had not."""
        if self._holder.get(0) is me:
            del self._holder[0]
        if self.wanted:
            self._given.put(None)

    def lend(self) -> None:
        """The I/O thread's: callers may take turns until ``take_back``."""
        self.lent = True
        del self._holder[0]

    def want(self) -> None:
        """The I/O thread's: no caller begins another exchange; whoever is in the middle of one is to be told to hurry."""
        self.wanted = True

    def take_back(self) -> None:
        """The I/O thread's, after ``want``: wait for the end of the exchange under way."""
        while self._holder.setdefault(0, self) is not self:
            with contextlib.suppress(queue.Empty):
                self._given.get(timeout=_LOOK_AGAIN_S)
        self.lent = False
        self.wanted = False
