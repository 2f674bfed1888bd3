"""What ``poll()`` of a session reports, and what a session answers about its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from kv_bounce_planner.sessions.identity import OperationIdentity, PeerId, RequestKey, TransferIdentity
from kv_bounce_planner.sessions.proof import ProvenMemory


@dataclass(frozen=True)
class TransferSucceeded:
    """KV is in place. ``tiers``: per operation, ``bounce``, ``direct`` or ``pull``, and why."""

    identity: TransferIdentity
    tiers: tuple[tuple[OperationIdentity, Literal["direct", "bounce", "pull"], str], ...]
    byte_count: int


@dataclass(frozen=True)
class SliceLanded:
    """KV of one slice of several is in place (``slice_index`` counts from the transfer's first); the others may not be."""

    identity: TransferIdentity
    slice_index: int


@dataclass(frozen=True)
class TransferFailed:
    """Logical end only: the blocks are still owned."""

    identity: TransferIdentity
    reason: str


@dataclass(frozen=True)
class TransferCancelled:
    """Logical end only: the blocks are still owned."""

    identity: TransferIdentity
    reason: str


@dataclass(frozen=True)
class MemoryReleased:
    """Nothing can land any more: exactly once per transfer, never after MemoryQuarantined.

    ``unfilled``: of the blocks that the operations named (``ExpectedOperation.blocks``), those of which not every byte is in
    its place, in the order named; empty after success. An engine computes them again; the others it may use.
    """

    identity: TransferIdentity
    claim: Any
    proven: ProvenMemory[Any]
    unfilled: tuple[object, ...] = ()


@dataclass(frozen=True)
class MemoryQuarantined:
    """These blocks are never used again in this process."""

    identity: TransferIdentity
    claim: Any
    reason: str


@dataclass(frozen=True)
class FatalDiagnosis:
    """The quarantine budget is spent. Stop the domain; nothing more is released here."""

    reason: str
    story: tuple[str, ...]


@dataclass(frozen=True)
class ReceiveRequested:
    """A receiver published its destination: its metadata is here."""

    request: RequestKey
    operation: OperationIdentity
    peer: PeerId
    byte_count: int


@dataclass(frozen=True)
class OperationDone:
    request: RequestKey
    operation: OperationIdentity
    tier: Literal["direct", "bounce", "pull"]
    byte_count: int


@dataclass(frozen=True)
class OperationFailed:
    """This operation's bytes were not all delivered; ``disposition`` is what is physically true of it."""

    request: RequestKey
    operation: OperationIdentity
    disposition: str
    reason: str


@dataclass(frozen=True)
class CancelReceived:
    request: RequestKey
    operation: OperationIdentity
    reason: str


@dataclass(frozen=True)
class RequestServed:
    """The expected number of operations has ended, well or not."""

    request: RequestKey


@dataclass(frozen=True)
class SourceReleased:
    """Sealed, and no write reads the source any more: exactly once."""

    request: RequestKey
    claim: Any
    proven: ProvenMemory[Any]


@dataclass(frozen=True)
class SourceQuarantined:
    request: RequestKey
    claim: Any
    reason: str


@dataclass(frozen=True)
class PeerIntroduced:
    """Both sides know each other: what is published from here on goes to exactly this life of the peer."""

    peer: PeerId


@dataclass(frozen=True)
class PeerRefused:
    """One side does not talk to the other: version, transport, model, layout or agent. Transfers with it fail by name."""

    peer: PeerId
    reason: str


@dataclass(frozen=True)
class PeerReplaced:
    """Another session lives under this name now. What was published to the earlier one is in doubt.

    If its process has ended, say so (``peer_died``) or retire its instance: then its class's proof is given.
    """

    peer: PeerId
    reason: str


@dataclass(frozen=True)
class LinkLost:
    """The control link broke or went silent. Nothing is concluded from it: open operations wait for its return."""

    peer: PeerId
    reason: str


@dataclass(frozen=True)
class LinkRestored:
    """The same life of the peer is heard again; what was open is being asked for again."""

    peer: PeerId


#: What happened between two sides; no transfer ends by it.
PeerEvent = PeerIntroduced | PeerRefused | PeerReplaced | LinkLost | LinkRestored

SessionEvent = (
    TransferSucceeded
    | SliceLanded
    | TransferFailed
    | TransferCancelled
    | MemoryReleased
    | MemoryQuarantined
    | FatalDiagnosis
    | ReceiveRequested
    | OperationDone
    | OperationFailed
    | CancelReceived
    | RequestServed
    | SourceReleased
    | SourceQuarantined
    | PeerEvent
)


@dataclass(frozen=True)
class DrainReport:
    """What still owns memory: empty means quiescent."""

    open: tuple[object, ...]
    in_doubt: tuple[OperationIdentity, ...]
    quarantined_bytes: int

    @property
    def quiescent(self) -> bool:
        return not self.open


class PeerEvidence:
    """What a host may know of a peer's process."""

    #: It was waited for, or its pidfd reported the end.
    PROCESS_REAPED: Final = "process reaped"
    #: A connection broke, or it is silent. Proves nothing.
    CONNECTION_LOST: Final = "connection lost"
