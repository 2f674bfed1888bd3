"""The error tree: one base; which rank failed and why is data."""

from __future__ import annotations


class CommBroadcastError(Exception):
    """Base of everything that this package raises."""


class BroadcastConfigError(CommBroadcastError, ValueError):
    """A setting cannot be used, or ranks disagree about one. Raised by every rank, at construction; names field and rank."""


class LocalProtocolError(CommBroadcastError):
    """The caller broke the contract: a second exchange before the first ended, use after close or failure. Nothing was sent."""


class RemoteProtocolError(CommBroadcastError):
    """A frame is not what this exchange expects: the ranks' calls do not match. The object is not usable any more."""


class TransportError(CommBroadcastError):
    """The communicator failed; its own error is the cause. The object is not usable any more.

    Attributes:
        operation: What was asked of it.
        rank: The rank that it failed on.
    """

    def __init__(self, operation: str, rank: int, error: BaseException) -> None:
        super().__init__(f"rank {rank}: {operation}: {error}")
        self.operation = operation
        self.rank = rank


class BroadcastError(CommBroadcastError):
    """A rank could not encode, allocate or decode; raised by every rank. The next exchange works.

    Attributes:
        rank: The rank that failed.
        cause: Type and message of its error, as text.
        details: Its traceback, as far as it fitted.
        earlier: Whether it failed in an exchange before this one: this one's value was not delivered to anybody.
    """

    def __init__(self, rank: int, cause: str, details: str = "", *, earlier: bool = False) -> None:
        super().__init__(f"rank {rank} failed{' in an earlier exchange' if earlier else ''}: {cause}")
        self.rank = rank
        self.cause = cause
        self.details = details
        self.earlier = earlier
