"""The package's one error tree.

Two families never mix. *Fail open*: :class:`LayoutError` and :class:`PlanRefused` happen before anything was reserved or
advertised; the caller falls back to direct writes or tries again. *Fail closed*: :class:`ReportRefused` and the protocol
errors happen after an address left the process; nothing may be released because of them.
"""

from __future__ import annotations

from kv_bounce_planner._reasons import Reason


class KVTransferError(Exception):
    """Root of every error that this package raises on purpose.

    Attributes:
        reason: A stable code, or None where the class says it all.
    """

    reason: Reason | None

    def __init__(self, message: str, *, reason: Reason | None = None) -> None:
        super().__init__(message)
        self.reason = reason


class LayoutError(KVTransferError, ValueError):
    """A layout, block table or token range is not one: the caller's mistake. Nothing was planned; the objects stay usable."""


class PlanRefused(KVTransferError):
    """These two layouts cannot be planned, or not yet. Fail open: nothing was reserved.

    Attributes:
        detail: What was found, for people.
    """

    reason: Reason

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason.value}: {detail}", reason=reason)
        self.detail = detail


class ReportRefused(KVTransferError):
    """A writer's report does not describe exactly the bytes that were bound to that writer. Fail closed: nothing is released.

    Attributes:
        rank: The writer that reported, or None when even that could not be read.
        detail: What was found, for people.
    """

    reason: Reason

    def __init__(self, reason: Reason, detail: str, *, rank: int | None) -> None:
        super().__init__(f"writer {rank}: {reason.value}: {detail}", reason=reason)
        self.rank = rank
        self.detail = detail


class CodecError(KVTransferError, ValueError):
    """Bytes are not a canonical message of this version. Nothing was applied."""


class LocalProtocolError(KVTransferError):
    """The caller broke a contract: wrong order, foreign capability, use after release. No state changed."""


class RemoteProtocolError(KVTransferError):
    """A peer broke the protocol."""


class TransportError(KVTransferError):
    """A foreign library failed; the cause is kept."""


class TransferTimeout(KVTransferError, TimeoutError):
    """A wait ended. It says nothing about memory: time is never proof."""


# --- sessions, channels, arenas --------------------------------------------------------------------------------------


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
