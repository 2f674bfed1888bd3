"""Settings; validated and compared between the ranks in one exchange at construction, so that all accept or all refuse."""

from __future__ import annotations

from dataclasses import dataclass

from comm_broadcast._failure import shown

#: Bytes of a first frame's header; what is left of the frame carries small payloads.
HEADER_BYTES = 64


@dataclass(frozen=True)
class BroadcastConfig:
    """Settings of a broadcaster.

    Nothing is checked here: a rank that raised by itself would leave the others waiting in the constructor of
    ``Broadcaster``, which checks and raises everywhere.

    Attributes:
        frame_bytes: Size of the first frame, which carries payloads up to ``frame_bytes - 64`` (bytes, 256 to 1 MiB;
            equal on all ranks). Every rank contributes one to every exchange, so each receives ``size`` of them.
        chunk_bytes: Largest single transfer of a payload (bytes, 4 KiB to 2 GiB - 1; the sender's counts). Also what a
            rank that has no memory for a payload needs to stay in step. 16 MiB cost nothing; 64 KiB five times as much.
        gather_bytes_max: Buffers up to this size are copied into one block; larger ones travel from where they are
            (bytes, >= 0).
        agree: Compare everybody's result after each exchange: a rank that cannot decode is known at once, for one more
            small collective (equal on all ranks). Without it the others learn of it in the next exchange.
        ahead_max: 0: an exchange ends on a rank when every rank has begun it. Else the root of a broadcast waits for nobody: it
            may be so many broadcasts ahead of the slowest rank, and learns of calls that do not match and of failures within
            as many exchanges, in which all ranks raise (count, 0 to 64; equal on all ranks; not with ``agree``).
        shared_slot_bytes: Size of each of the two slots of a memory window that the ranks share, who must be on one node
            (bytes, up to 1 TiB; 0: none; equal on all ranks).
        pool_bytes_max: Received and packed blocks are reused; free ones beyond this are given back (bytes, >= 0).
        check_round_trip: The sender decodes its own bytes and compares; for debugging.
        spin_s: A blocking call that waits makes the shortest pauses that the system has for so long after each step, before
            they grow to half a millisecond (s, 0 to 1).
    """

    frame_bytes: int = 4096
    chunk_bytes: int = 64 << 20
    gather_bytes_max: int = 1 << 20
    agree: bool = False
    ahead_max: int = 0
    shared_slot_bytes: int = 0
    pool_bytes_max: int = 256 << 20
    check_round_trip: bool = False
    spin_s: float = 0.002

    def problem(self) -> str | None:
        """What cannot be used, naming field and value; None when all can."""
        ranges = (
            ("frame_bytes", 256, 1 << 20),
            ("chunk_bytes", 4096, (1 << 31) - 1),
            ("gather_bytes_max", 0, None),
            ("ahead_max", 0, 64),
            ("shared_slot_bytes", 0, 1 << 40),
            ("pool_bytes_max", 0, None),
        )
        for name, low, high in ranges:
            value = getattr(self, name)
            if type(value) is not int:
                return f"{name} must be an integer, got {shown(value)}"
            if value < low or (high is not None and value > high):
                return f"{name} must be {f'in {low}..{high}' if high is not None else f'at least {low}'}, got {shown(value)}"
        for name in ("agree", "check_round_trip"):
            if type(getattr(self, name)) is not bool:
                return f"{name} must be True or False, got {shown(getattr(self, name))}"
        if self.agree and self.ahead_max:
            return f"ahead_max must be 0 with agree, which waits for all results, got {shown(self.ahead_max)}"
        if isinstance(self.spin_s, bool) or not isinstance(self.spin_s, (int, float)) or not 0.0 <= self.spin_s <= 1.0:
            return f"spin_s must be in 0..1, got {shown(self.spin_s)}"
        return None

    @property
    def inline_bytes_max(self) -> int:
        """Largest payload that travels in the first frame (bytes)."""
        return self.frame_bytes - HEADER_BYTES
