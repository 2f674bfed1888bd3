"""What a transport owes the agreement. ``pp_agreement.testing.check_transport`` is the conformance suite."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Sweep(NamedTuple):
    """One receive sweep: frames in stream order per member, and the mask of members whose ring was found empty."""

    frames: list[tuple[int, bytes]]
    empty: int


class Transport(Protocol):
    """One FIFO stream per (domain, member pair). Members are indexes into ``domain.ranks``.

    Nothing here blocks. Receiving never depends on send space. A slot is free again only when its frame was received by
    the peer's transport (synchronous mode), so at most ``window`` frames of a stream are ever outstanding.
    """

    name: str

    def open(self, peers: tuple[int, ...], frame_bytes_max: int) -> None:
        """Connect to the members this rank talks to. Called once, before anything else."""

    def outstanding(self, peer: int) -> int:
        """Frames to ``peer`` that it has not received yet; asked before a heartbeat and where a slot was refused."""

    def can_send(self, peer: int) -> bool:
        """Whether a slot towards ``peer`` is free."""

    def send(self, peer: int, frame: bytes) -> None:
        """Hand over one frame.

        Raises:
            WouldBlock: No slot is free; nothing was sent.
            TransportError: The stream is broken for good.
        """

    def receive(self, frames_max: int) -> Sweep:
        """Take up to ``frames_max`` frames, fairly among members, and let sends that are under way go on.

        Raises:
            TransportError: The transport is broken for good; no frame was in hand (else the next call raises).
        """

    def deaths(self) -> tuple[tuple[int, str], ...]:
        """New operating-system evidence of dead members: (member, evidence). Cheap; asked in every poll."""

    def close(self, clean: bool) -> None:
        """Let go. ``clean``: every member has closed; otherwise nothing that needs a peer may be done."""
