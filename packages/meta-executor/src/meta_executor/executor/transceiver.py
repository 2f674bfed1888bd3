"""One per rank, the only owner of transfer state: what it tells the loop, and what travels in a receive request.

The two kinds, :mod:`transceiver_context` (sends) and :mod:`transceiver_generation` (receives), have one interface, so there
is one loop. Nobody else touches a session, an agent, an agreement or a block that a peer may read or write; the loop asks
and is told.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import msgspec

from meta_executor.executor.messages import Peer
from meta_executor.executor.ownership import Outcome, Sequence

# -- what it tells the loop -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PeerReady:
    """Context rank 0: the destination of this request is known here (generation-first admission)."""

    request_id: int


@dataclass(frozen=True, slots=True)
class PeerCancelled:
    """Context: the receiver gave this request up, or has died. Rank 0 stops it on every rank."""

    request_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Expired:
    """Context: nobody fetched this rank's KV in time; others' may have been. It is stopped on every rank; memory follows by
    proof."""

    request_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Revoked:
    """Context rank 0: the agreement has taken this request's lease back before it was scheduled. Its outcome is set; it must
    not be chosen for a step any more, and its client can be told now. Its memory follows when every rank has let go."""

    sequence: Sequence


@dataclass(frozen=True, slots=True)
class Arrived:
    """Generation: the prompt's KV is in place; the sequence may compute. ``first_token``: from the peer, if it sent one."""

    request_id: int
    first_token: int | None


@dataclass(frozen=True, slots=True)
class Owned:
    """Generation: a request without a context leg has its blocks; its prompt is to be computed here."""

    sequence: Sequence


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """The transfer has logically ended without success; memory follows by proof (or has just come back, and the record with
    it is gone from the registry). The client can be told now."""

    sequence: Sequence


@dataclass(frozen=True, slots=True)
class Ended:
    """The request is terminal on this rank: its record is gone, its blocks are free or quarantined."""

    request_id: int
    outcome: Outcome
    quarantined: bool
    #: For a client that was not told yet.
    reason: str = ""
    error_code: str = ""


@dataclass(frozen=True, slots=True)
class Fault:
    """The rank cannot go on: protocol fault, dead peer rank, or too much memory in doubt. Nothing is given back."""

    diagnosis: str


#: Longest wait while bytes move; while they move and the engine has a step, whose end rings, for a rank that sends (each look
#: moves some) and for one that receives (nothing that comes could be used before the step's end); while a peer may begin to
#: move them; while a round of the agreement is open, whose frames ring but whose send slots do not (s).
MOVING_CAP_S = 0.0005
SENDING_STEP_CAP_S = 0.004
RECEIVING_STEP_CAP_S = 0.008
EXPOSED_CAP_S = 0.002
ROUND_CAP_S = 0.01

TransceiverEvent: TypeAlias = (
    PeerReady | PeerCancelled | Expired | Revoked | Arrived | Owned | TransferFailed | Ended | Fault
)


@dataclass(slots=True)
class TransferCounters:
    """What one rank's transfers did (counts and bytes)."""

    opened: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    quarantined: int = 0
    coalesced: int = 0
    direct: int = 0
    merged: int = 0
    ready_votes: int = 0
    leases_expired: int = 0
    bytes_moved: int = 0
    reasons: dict[str, int] | None = None

    def count_reason(self, reason: str) -> None:
        """Count why a transfer took its tier."""
        if self.reasons is None:
            self.reasons = {}
        self.reasons[reason] = self.reasons.get(reason, 0) + 1


class Transceiver(Protocol):
    """What the loop needs of both kinds."""

    counters: TransferCounters

    def admit(self, sequence: Sequence, now_s: float) -> None:
        """A request was heard of in the authoritative broadcast. Idempotent in every state."""
        ...

    def update_readiness(self, now_s: float) -> bool:
        """Vote for waiting requests whose peer metadata is complete (context, generation-first); publish destinations
        for waiting ones that fit (generation). Returns whether anything moved."""
        ...

    def stop(self, sequence: Sequence) -> None:
        """The sequence has ended early or needs no transfer (its outcome is set): seal, withdraw, cancel. Idempotent."""
        ...

    def compute_ended(self, sequence: Sequence) -> None:
        """The last step that held an ending sequence's blocks has retired on this rank."""
        ...

    def progress(self, now_s: float) -> bool:
        """Move transfers; bounded, never blocks more than a few ms. Returns whether anything moved."""
        ...

    def poll(self, now_s: float) -> list[TransceiverEvent]:
        """What has happened since the last poll."""
        ...

    @property
    def poll_cap_s(self) -> float | None:
        """Longest wait until transfers and rounds must be looked at, because their next event tells nobody (s)."""
        ...

    @property
    def drained(self) -> bool:
        """The proof is complete: nothing that was heard of is undecided, no transfer is open."""
        ...

    @property
    def links_away_count(self) -> int:
        """Peers whose control link is away (count)."""
        ...


class SendingTransceiver(Transceiver, Protocol):
    """A context rank's."""

    def candidates(self) -> Iterable[Sequence]:
        """Requests that the scheduling rank may activate, in canonical order."""
        ...

    def activate(self, sequences: Iterable[Sequence]) -> None:
        """The schedule names them: before it becomes visible on the scheduling rank, before it is mirrored on others."""
        ...

    def prompt_computed(self, sequence: Sequence, first_token: int | None) -> None:
        """The last step of the prompt has retired on this rank."""
        ...

    def refuse(self, request_id: int, reason: str) -> None:
        """A request that was never admitted never will be: tell the peer that waits for it, now or when it asks."""
        ...

    def vote_terminal(self, now_s: float) -> bool:
        """Cast the terminal vote of every sequence that is quiescent on this rank. Returns whether one was cast."""
        ...

    def start_drain(self, last_incarnation: int) -> None:
        """No request after this incarnation: begin to prove that everything is over."""
        ...

    @property
    def lockstep(self) -> bool:
        """Every poll is a collective of the instance's ranks (the blocking baseline)."""
        ...


class ReceivingTransceiver(Transceiver, Protocol):
    """A generation rank's."""

    def register_peer(self, peer: Peer) -> None:
        """An instance whose ranks we exchange KV with."""
        ...


# -- what travels in a receive request --------------------------------------------------------------------------------


class ReceivePayload(msgspec.Struct, frozen=True, array_like=True):
    """What a writer needs to re-derive its part of the receiver's plan.

    ``layout``: the receiver rank's encoded ``KVLayout``. ``blocks``: encoded table and token range. ``aux_address``: where the
    first token goes (AUX operations only; 0 else).
    """

    layout: bytes
    blocks: bytes
    aux_address: int = 0


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(ReceivePayload)

#: Bytes of one AUX slot: first token (int64), then a copy of the request id (int64) that makes a wrong slot visible.
AUX_BYTES = 16


def encode_payload(payload: ReceivePayload) -> bytes:
    """Bytes of a receive request's payload."""
    return _ENCODER.encode(payload)


def decode_payload(data: bytes) -> ReceivePayload:
    """The payload.

    Raises:
        msgspec.DecodeError: It is not one.
    """
    return _DECODER.decode(data)
