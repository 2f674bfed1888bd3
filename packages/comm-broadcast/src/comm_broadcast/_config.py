"""Settings, validated once; the ranks compare them at construction."""

from __future__ import annotations

from dataclasses import dataclass

from comm_broadcast._errors import BroadcastConfigError

#: Bytes of a first frame's header; what is left of the frame carries small payloads.
HEADER_BYTES = 64


@dataclass(frozen=True)
class BroadcastConfig:
    """Settings of a broadcaster. The root's count; ranks that differ are refused at construction.

    Attributes:
        frame_bytes: Size of the first frame, which carries payloads up to ``frame_bytes - 64`` (bytes, 256 to 1 MiB). 1 to 4
            KiB is where one message costs no more than an empty one.
        chunk_bytes: Largest single transfer of a payload (bytes, >= 4096). Large chunks are faster; below 2 GiB every
            MPI can count them.
        gather_bytes_max: Buffers up to this size are copied into one block; larger ones travel from where they are (bytes).
        agree: Compare everybody's result after each broadcast: a rank that cannot decode is known at once, for one more
            small collective. Without it the others learn of it in a later exchange.
        shared_slot_bytes: Size of each of the two slots of a memory window that ranks of one node share (bytes); 0: none.
        check_round_trip: The root decodes its own bytes and compares; for debugging.
        spin_s: A blocking call polls this long without pause before it begins to sleep between polls (s).
    """

    frame_bytes: int = 4096
    chunk_bytes: int = 1 << 30
    gather_bytes_max: int = 1 << 20
    agree: bool = False
    shared_slot_bytes: int = 0
    check_round_trip: bool = False
    spin_s: float = 0.002

    def __post_init__(self) -> None:
        if not 256 <= self.frame_bytes <= 1 << 20:
            raise BroadcastConfigError(f"frame_bytes must be in 256..{1 << 20}, got {self.frame_bytes!r}")
        if not 4096 <= self.chunk_bytes <= (1 << 31) - 1:
            raise BroadcastConfigError(f"chunk_bytes must be in 4096..{(1 << 31) - 1}, got {self.chunk_bytes!r}")
        if self.gather_bytes_max < 0:
            raise BroadcastConfigError(f"gather_bytes_max must be at least 0, got {self.gather_bytes_max!r}")
        if self.shared_slot_bytes < 0:
            raise BroadcastConfigError(f"shared_slot_bytes must be at least 0, got {self.shared_slot_bytes!r}")
        if not 0.0 <= self.spin_s <= 1.0:
            raise BroadcastConfigError(f"spin_s must be in 0..1, got {self.spin_s!r}")

    @property
    def inline_bytes_max(self) -> int:
        """Largest payload that travels in the first frame (bytes)."""
        return self.frame_bytes - HEADER_BYTES
