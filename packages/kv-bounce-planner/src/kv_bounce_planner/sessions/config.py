"""Bounds of a session, what it works with, and what a receiver asks of a writer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kv_bounce_planner.copies.gather import Copier
from kv_bounce_planner.sessions.arena import BounceArena
from kv_bounce_planner.sessions.identity import SLICE_MAX, PeerId
from kv_bounce_planner.sessions.messages import AFTER_MAX, PAYLOAD_BYTES_MAX
from kv_bounce_planner.sessions.reports import Reports
from kv_bounce_planner.transports.interface import ControlChannel, MemoryKind, Transport

if TYPE_CHECKING:
    from kv_bounce_planner.planning.plan import WriterPlan, WriterTransfer


@dataclass(frozen=True)
class SessionConfig:
    """Bounds of a Receiver or Sender.

    Args:
        transfers_max: Open transfers (receiver) or requests (sender), count, >= 1. Beyond: CapacityExceeded, or Sealed.
        operations_max: Operations per transfer or request, count, >= 1.
        frames_per_poll_max: Control frames taken in one poll, count, >= 1.
        frames_queued_max: Frames waiting for one peer's channel, count, >= 1. Beyond, that peer is in doubt.
        drain_deadline_s: From the first cancel, failure or doubt to quarantine, > 0.
        bounce_wait_s: How long a writer waits for a region before it is told to write in place, >= 0.
        quarantine_bytes_max: Memory that may be quarantined before the diagnosis is fatal, bytes, >= 0.
        copies_per_poll_max: Gathers or scatters submitted in one poll, count, >= 1.
        introduction_timeout_s: How long a transfer waits for its peers to be introduced before it fails, unexposed, > 0.
        operation_timeout_s: From ``open`` (receiver) or arrival (sender) to an operation's end, whatever it waits for, > 0.
            Beyond, it is failed with the state it was in; its memory follows by proof, or into quarantine.
        link_timeout_s: How long a control link that says when it is back (``LinkedChannel``) may stay away before what is open
            on it is in doubt, > 0.
        heartbeat_s: Between two signs of life asked of a peer whose answer is awaited, > 0.
        lease_s: How long such a peer may be silent before its link counts as lost, > heartbeat_s; None: for ever. A peer in a
            long step does not answer: more than the longest step of either side.
        serves_reads: Whether this side lends its source where its own process would have to serve the reads (a transport whose
            transfers only the agent at the memory executes: tcp). UCX ends the process that serves a read when the reader
            dies in the middle of it, so by default such a pull is refused by name; push there.
        gathers_ahead_max: Slots that may be used at once to gather while a region is still asked for, count, >= 0. Each
            is given back when a granted operation waits for one.
    """

    transfers_max: int = 4096
    operations_max: int = 1024
    frames_per_poll_max: int = 64
    frames_queued_max: int = 65536
    drain_deadline_s: float = 30.0
    bounce_wait_s: float = 0.2
    quarantine_bytes_max: int = 1 << 30
    copies_per_poll_max: int = 4
    gathers_ahead_max: int = 1
    introduction_timeout_s: float = 60.0
    operation_timeout_s: float = 600.0
    link_timeout_s: float = 30.0
    heartbeat_s: float = 1.0
    lease_s: float | None = None
    serves_reads: bool = False

    def __post_init__(self) -> None:
        for name in (
            "transfers_max",
            "operations_max",
            "frames_per_poll_max",
            "frames_queued_max",
            "copies_per_poll_max",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} wants >= 1, got {getattr(self, name)}")
        for name in (
            "drain_deadline_s",
            "introduction_timeout_s",
            "operation_timeout_s",
            "link_timeout_s",
            "heartbeat_s",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} wants > 0, got {getattr(self, name)}")
        if self.lease_s is not None and not self.lease_s > self.heartbeat_s:
            raise ValueError(f"lease_s wants more than heartbeat_s ({self.heartbeat_s}), got {self.lease_s}")
        for name in ("bounce_wait_s", "quarantine_bytes_max", "gathers_ahead_max"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} wants >= 0, got {getattr(self, name)}")


@dataclass(frozen=True)
class Handshake:
    """What both sides show in their first message; where both name a field and differ, neither talks to the other.

    Args:
        model: The model's identity, at most 512 characters: name and revision, or a hash of its configuration.
        dtype: Element type of the KV cache.
        layer_total: Layers of the whole model, count; 0 does not say.
        layout: Fingerprint of the layout that this side's memory has (``KVLayout.fingerprint``), at most 32 bytes.
        layouts: The fingerprint that this side plans with for a peer, or None where it does not know one.
    """

    model: str = ""
    dtype: str = ""
    layer_total: int = 0
    layout: bytes = b""
    layouts: Callable[[PeerId], bytes | None] | None = None

    def __post_init__(self) -> None:
        if len(self.model) > 512 or len(self.dtype) > 512:
            raise ValueError("model and dtype want at most 512 characters")
        if type(self.layer_total) is not int or not 0 <= self.layer_total <= 1 << 20:
            raise ValueError(f"layer_total wants an integer in 0..{1 << 20}, got {self.layer_total!r}")
        if len(self.layout) > 32:
            raise ValueError(f"layout wants at most 32 bytes, got {len(self.layout)}")


@dataclass(frozen=True)
class SessionResources:
    """What one session works with.

    Args:
        transport: Its memory is registered before the first ``introduce`` or ``open``.
        channel: Control channel to the peers.
        arena: Bounce memory, registered with the transport: regions of a receiver, send slots of a sender. None refuses,
            or never asks for, a region.
        copier: Gathers or scatters; ``HostCopier`` by default, for DRAM.
        copier_errors_prove_idle: Whether a copier's error means that it touches nothing any more. True for copies in this
            thread; never for a device. By default True for the default copier only.
        reports: How bounce writes are described and checked; ``PlannerReports`` by default.
        memory_kind, device_id: Of the destination or the source.
        handshake: What both sides show in their first message.
        clock: Monotonic seconds.
    """

    transport: Transport
    channel: ControlChannel
    arena: BounceArena | None = None
    copier: Copier | None = None
    copier_errors_prove_idle: bool | None = None
    reports: Reports | None = None
    memory_kind: MemoryKind = "DRAM"
    device_id: int = 0
    handshake: Handshake = Handshake()
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True)
class ExpectedOperation:
    """One writer's obligation, as the receiver asks for it.

    Args:
        peer: The writer rank's process.
        byte_count: Bytes it will write, >= 1.
        payload: What the sender's ``resolve`` needs, opaque here, at most 1 MiB.
        plan: The destination derived for this writer. Needed for bounce (validation and scatter) and for pull (what is read
            must land exactly there); its digest, where given, is what the sender's own plan must equal.
        tier: ``bounce`` offers a region; the sender decides when prefill ends. ``pull``: the sender lends its source, and this
            side reads it; no address of this side leaves.
        resolve: ``pull`` only: the planner here, from the offer's payload (the sender's block table) to fragments. Called once,
            inside ``poll``; raising ends the operation with nothing read.
        blocks: Hashable names of the blocks that this operation fills, each perhaps with others: ``MemoryReleased.unfilled``
            names those that it did not.
        role: ``KV`` or ``AUX``: for people; both are owned alike.
        slice_index: Which slice of the transfer this writer's part is of, from 0. A slice has its own region and scatter.
        after: How far the source must be computed before the sender may begin, in a count of the host's that rises (a position
            of the prompt), >= 1; 0: wholly.
    """

    peer: PeerId
    byte_count: int
    payload: bytes = b""
    plan: WriterPlan | None = None
    tier: Literal["direct", "bounce", "pull"] = "direct"
    role: Literal["KV", "AUX"] = "KV"
    resolve: Callable[[bytes], WriterTransfer] | None = None
    blocks: Sequence[object] = ()
    slice_index: int = 0
    after: int = 0

    def __post_init__(self) -> None:
        if type(self.byte_count) is not int or self.byte_count < 1:
            raise ValueError(f"byte_count wants an integer >= 1, got {self.byte_count!r}")
        if type(self.slice_index) is not int or not 0 <= self.slice_index <= SLICE_MAX:
            raise ValueError(f"slice_index wants an integer in 0..{SLICE_MAX}, got {self.slice_index!r}")
        if type(self.after) is not int or not 0 <= self.after <= AFTER_MAX:
            raise ValueError(f"after wants an integer in 0..{AFTER_MAX}, got {self.after!r}")
        if len(self.payload) > PAYLOAD_BYTES_MAX:
            raise ValueError(f"payload of {len(self.payload)} bytes exceeds {PAYLOAD_BYTES_MAX}")
        if self.tier == "bounce" and self.plan is None:
            raise ValueError("a bounce offer needs the plan that its report is checked against")
        if self.tier == "pull" and self.plan is None:
            raise ValueError("a pull needs the plan of where its bytes land")
        if self.tier not in ("direct", "bounce", "pull"):
            raise ValueError(f"tier wants direct, bounce or pull, got {self.tier!r}")
        if (self.tier == "pull") != (self.resolve is not None):
            raise ValueError(f"a pull needs resolve and nothing else takes it; tier is {self.tier!r}")
        if self.plan is not None and self.plan.total_bytes != self.byte_count:
            raise ValueError(f"the plan moves {self.plan.total_bytes} bytes, byte_count says {self.byte_count}")
