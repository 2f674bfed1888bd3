"""The error tree: one base; which rank failed and why is data."""

from __future__ import annotations


class CommBroadcastError(Exception):
    """Base of everything that this package raises."""


class BroadcastConfigError(CommBroadcastError, ValueError):
    """A setting cannot be used, or ranks disagree about one. Raised on every rank, at construction; names field and ranks."""


class LocalProtocolError(CommBroadcastError):
    """The caller broke the contract: a second exchange before the first ended, or use after close. Nothing was sent."""


class RemoteProtocolError(CommBroadcastError):
    """A frame is not what this exchange expects: the ranks' calls do not match. The object is not usable any more."""


class BroadcastError(CommBroadcastError):
    """A rank could not encode, allocate or decode; raised by every rank. The next exchange works.

    Attributes:
        rank: The rank that failed.
        cause: Type and message of its error, as text.
        details: Its traceback, as far as it fitted.
    """

    def __init__(self, rank: int, cause: str, details: str = "", *, earlier: bool = False) -> None:
        when = "in an earlier exchange " if earlier else ""
        super().__init__(f"rank {rank} failed {when}: {cause}".replace("  :", ":").replace(" :", ":"))
        self.rank = rank
        self.cause = cause
        self.details = details
