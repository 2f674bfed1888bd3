"""Books that outlive a transfer: what is still exposed, and what was given up."""

from __future__ import annotations

from collections.abc import Sequence

from kv_bounce_planner._errors import AddressStillExposed
from kv_bounce_planner.sessions.identity import TransferIdentity


class ExposureLedger:
    """Blocks that some publication of this process may still expose, across generations (K4).

    Share one per process between a Receiver and its successors of later generations. A block leaves the ledger by the proof
    of the transfer that entered it; a quarantined one never does.
    """

    def __init__(self) -> None:
        self._holder: dict[object, TransferIdentity] = {}

    def enter(self, identity: TransferIdentity, blocks: Sequence[object]) -> None:
        """Raises AddressStillExposed, with nothing entered, if any block is held."""
        for block in blocks:
            held = self._holder.get(block)
            if held is not None:
                raise AddressStillExposed(f"block {block!r} is still exposed by {held}")
        for block in blocks:
            self._holder[block] = identity

    def leave(self, identity: TransferIdentity, blocks: Sequence[object]) -> None:
        for block in blocks:
            if self._holder.get(block) == identity:
                del self._holder[block]

    def __len__(self) -> int:
        return len(self._holder)


class QuarantineLedger:
    """Bytes that are never used again in this process.

    Args:
        bytes_max: Budget. Beyond it the only honest answer is a fatal diagnosis, never a release.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.byte_count = 0
        self.count = 0

    def charge(self, byte_count: int) -> bool:
        """Add to what is given up. False: the budget is exceeded, now and for ever."""
        self.byte_count += byte_count
        self.count += 1
        return self.byte_count <= self.bytes_max
