"""The error tree: one base; which rank failed and why is data. Every error can be pickled and copied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RankFailure:
    """What went wrong on one rank.

    Attributes:
        rank: The rank that failed.
        cause: Type and message of its error, as text.
        details: Its traceback, as far as it fitted.
        earlier: Whether it failed in an exchange before the one that raises.
    """

    rank: int
    cause: str
    details: str = ""
    earlier: bool = False


class CommBroadcastError(Exception):
    """Base of everything that this package raises."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Message and fields, without a second run of the constructor (whose arguments are not the message)."""
        return _rebuild, (type(self), self.args, self.__dict__.copy())


def _rebuild(kind: type[CommBroadcastError], arguments: tuple[Any, ...], fields: dict[str, Any]) -> CommBroadcastError:
    error = kind.__new__(kind, *arguments)
    error.args = arguments
    error.__dict__.update(fields)
    return error


class BroadcastConfigError(CommBroadcastError, ValueError):
    """A setting cannot be used, or ranks disagree about one; names field, value and rank.

    At construction every rank raises it. For an argument of a later call (``codec``, ``timeout_s``) the caller alone does, and
    nothing was sent.
    """


class MissingLibraryError(CommBroadcastError, ImportError):
    """A library that an adapter needs is not installed, or cannot be loaded; says what to install."""


class LocalProtocolError(CommBroadcastError):
    """The caller broke the contract: a second exchange before the first ended, use after close or failure. Nothing was sent."""


class RemoteProtocolError(CommBroadcastError):
    """What a rank sent is not what this exchange can be. Unless it is a :class:`CallMismatchError`, the object is broken."""


class CallMismatchError(RemoteProtocolError):
    """The ranks' calls of one exchange differ: operation, root, codec or settings. All raise it; the next exchange works.

    Attributes:
        calls: What each rank called, in rank order; "" where this rank does not know it (``ahead_max``).
        earlier: Whether it was an exchange before the one that raises, whose value then was not delivered to anybody.
    """

    def __init__(self, calls: tuple[str, ...], *, earlier: bool = False) -> None:
        known = "; ".join(f"rank {r}: {call}" for r, call in enumerate(calls) if call)
        super().__init__(f"the calls {'of an earlier exchange did' if earlier else 'do'} not match: {known}")
        self.calls = calls
        self.earlier = earlier


class ClosedError(CommBroadcastError):
    """A rank closed the broadcaster instead of taking part in this exchange. Every rank's object is closed now.

    Attributes:
        rank: The lowest rank that did.
        failures: What ranks said in this exchange that failed, in rank order; whoever closed raises it at the end of ``close``.
    """

    def __init__(self, rank: int, failures: tuple[RankFailure, ...] = ()) -> None:
        super().__init__(
            "; ".join([f"rank {rank} closed the broadcaster", *(f"rank {f.rank}: {f.cause}" for f in failures)])
        )
        self.rank = rank
        self.failures = failures


class BroadcastTimeoutError(CommBroadcastError, TimeoutError):
    """Not every rank joined within ``timeout_s``. The exchange goes on: see :meth:`Handle.wait` and the blocking calls."""


class TransportError(CommBroadcastError):
    """The communicator failed; its own error is the cause. The object is not usable any more.

    Attributes:
        operation: What was asked of it.
        rank: The rank that it failed on.
    """

    def __init__(self, operation: str, rank: int, error: object) -> None:
        super().__init__(f"rank {rank}: {operation}: {error}")
        self.operation = operation
        self.rank = rank


class BroadcastError(CommBroadcastError):
    """Ranks could not encode, allocate or decode; raised by every rank. The next exchange works.

    Attributes:
        rank, cause, details, earlier: Of the lowest rank that failed; see :class:`RankFailure`. With ``earlier`` this
            exchange's value was not delivered to anybody.
        failures: Of every rank that failed, in rank order.
    """

    def __init__(
        self,
        rank: int,
        cause: str,
        details: str = "",
        *,
        earlier: bool = False,
        others: tuple[RankFailure, ...] = (),
    ) -> None:
        text = f"rank {rank} failed{' in an earlier exchange' if earlier else ''}: {cause}"
        if others:
            text += "".join(f"; rank {f.rank}{' (earlier)' if f.earlier else ''}: {f.cause}" for f in others)
        super().__init__(text)
        self.rank = rank
        self.cause = cause
        self.details = details
        self.earlier = earlier
        self.failures = (RankFailure(rank, cause, details, earlier), *others)

    @staticmethod
    def of(failures: tuple[RankFailure, ...]) -> BroadcastError:
        """One error for all failures of an exchange (at least one, in rank order)."""
        first, *others = failures
        return BroadcastError(first.rank, first.cause, first.details, earlier=first.earlier, others=tuple(others))
