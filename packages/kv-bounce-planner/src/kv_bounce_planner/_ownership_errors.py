"""Errors of sessions, channels and arenas: subclasses in the package's one tree."""

from __future__ import annotations

from kv_bounce_planner._errors import KVTransferError, LocalProtocolError, RemoteProtocolError, TransportError


class WouldBlock(Exception):
    """Nothing was taken; try again later."""


class ChannelError(TransportError):
    """A control channel cannot say whether a frame left, or does not know the peer. What was exposed stays exposed."""


class DuplicateTransfer(LocalProtocolError):
    """This identity is open or was open before. Nothing was taken over."""


class StaleIdentity(LocalProtocolError):
    """An identity of an earlier generation or incarnation. The newer one is untouched."""


class CapacityExceeded(KVTransferError):
    """A configured bound is reached. Nothing was taken over; retry when something ended."""


class AddressStillExposed(LocalProtocolError):
    """A block that an earlier publication of this process still exposes. It may not be advertised again."""


class TransfersOutstanding(LocalProtocolError):
    """Memory is still owned by transfers: nothing was closed, retry after they ended."""

    def __init__(self, message: str, outstanding: tuple[object, ...]) -> None:
        super().__init__(message)
        self.outstanding = outstanding


__all__ = [
    "AddressStillExposed",
    "CapacityExceeded",
    "ChannelError",
    "DuplicateTransfer",
    "RemoteProtocolError",
    "StaleIdentity",
    "TransfersOutstanding",
    "WouldBlock",
]
