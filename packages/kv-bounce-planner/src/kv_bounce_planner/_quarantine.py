"""What was given up: counted, capped, visible. Quarantine has no way back."""

from __future__ import annotations


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
