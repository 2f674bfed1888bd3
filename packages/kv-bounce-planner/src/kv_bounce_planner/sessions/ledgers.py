"""Books that outlive a transfer: what is still exposed, and what was given up."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

import numpy as np

from kv_bounce_planner._errors import AddressStillExposed
from kv_bounce_planner.sessions.identity import PeerId, TransferIdentity
from kv_bounce_planner.transports.interface import Int64Array

#: Ranges of open destinations that are compared with every new one (count): beyond, names of blocks alone decide.
RANGES_MAX: Final = 1 << 20


class ExposureLedger:
    """Blocks that some publication of this process may still expose, across generations.

    A Receiver and its successors share one per process (``of``). A block leaves the ledger by the proof of the transfer that
    entered it; a quarantined one never does. The same holds for the addresses of a transfer's plans.
    """

    def __init__(self) -> None:
        self._holder: dict[object, TransferIdentity] = {}
        #: Rows: start, end, number of the transfer; a column for each range, ascending.
        self._ranges = np.empty((3, 0), np.int64)
        self._numbers: dict[TransferIdentity, int] = {}
        self._left: set[int] = set()  # transfers that left; their ranges go with the next one that enters
        self._drawn = 0
        #: Transfers whose addresses were not looked at because too many ranges are open.
        self.unchecked = 0

    @staticmethod
    def of(peer: PeerId) -> ExposureLedger:
        """This process's ledger for that instance and rank, whatever generation it has: made once, never dropped."""
        with _LEDGERS_LOCK:
            return _LEDGERS.setdefault((peer.instance_id, peer.rank), ExposureLedger())

    def enter(
        self,
        identity: TransferIdentity,
        blocks: Sequence[object],
        addresses: tuple[Int64Array, Int64Array] | None = None,
    ) -> None:
        """Enter a transfer.

        Args:
            identity: The transfer.
            blocks: Hashable names.
            addresses: (starts, ends) of its destination, ascending and disjoint, where its plans name it.

        Raises:
            AddressStillExposed: A block or a byte is held. Nothing was entered.
        """
        if addresses is not None:
            self._enter_addresses(identity, blocks, *addresses)
        else:
            self._enter_blocks(identity, blocks)

    def _enter_addresses(
        self, identity: TransferIdentity, blocks: Sequence[object], starts: Int64Array, ends: Int64Array
    ) -> None:
        self._drop_left()
        held_starts, held_ends, _ = self._ranges
        if len(held_starts) + len(starts) > RANGES_MAX:
            self.unchecked += 1
            self._enter_blocks(identity, blocks)
            return
        at = np.searchsorted(held_starts, starts, side="right")
        before = at > 0
        clash = bool((held_ends[at[before] - 1] > starts[before]).any())
        after = at < len(held_starts)
        if clash or bool((held_starts[at[after]] < ends[after]).any()):
            raise AddressStillExposed(f"{identity}: addresses that an earlier transfer of this process still exposes")
        self._enter_blocks(identity, blocks)
        self._drawn += 1
        self._numbers[identity] = self._drawn
        fresh = np.empty((3, len(starts)), np.int64)
        fresh[0], fresh[1], fresh[2] = starts, ends, self._drawn
        ranges = np.concatenate((self._ranges, fresh), axis=1)
        self._ranges = ranges.take(ranges[0].argsort(kind="stable"), axis=1)

    def _enter_blocks(self, identity: TransferIdentity, blocks: Sequence[object]) -> None:
        for block in blocks:
            held = self._holder.get(block)
            if held is not None:
                raise AddressStillExposed(f"block {block!r} is still exposed by {held}")
        for block in blocks:
            self._holder[block] = identity

    def leave(self, identity: TransferIdentity, blocks: Sequence[object]) -> None:
        """Take a proven transfer out. In constant time, as far as addresses go: somebody waits for this memory."""
        number = self._numbers.pop(identity, None)
        if number is not None:
            self._left.add(number)
        for block in blocks:
            if self._holder.get(block) == identity:
                del self._holder[block]

    def _drop_left(self) -> None:
        if not self._left:
            return
        owners = self._ranges[2]
        if len(self._left) == 1:  # mostly, and much faster
            keep = owners != next(iter(self._left))
        else:
            keep = ~np.isin(owners, list(self._left))
        self._ranges = self._ranges.compress(keep, axis=1)
        self._left.clear()

    def __len__(self) -> int:
        return len(self._holder)


_LEDGERS: dict[tuple[str, int], ExposureLedger] = {}
_LEDGERS_LOCK = threading.Lock()


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
