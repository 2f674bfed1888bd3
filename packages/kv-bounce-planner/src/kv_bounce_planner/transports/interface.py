"""What a session needs of a transport, and what it may conclude from it. No library is imported here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kv_bounce_planner.sessions.identity import Mark, OperationIdentity, PeerId
from kv_bounce_planner.sessions.proof import Evidence, TransportClass

Int64Array = npt.NDArray[np.int64]
MemoryKind = Literal["DRAM", "VRAM"]


@dataclass(frozen=True)
class MemoryRegion:
    """Memory to register: address and size in bytes, where it lies."""

    address: int
    byte_count: int
    memory_kind: MemoryKind = "DRAM"
    device_id: int = 0

    def __post_init__(self) -> None:
        if self.address <= 0 or self.byte_count <= 0:
            raise ValueError(f"a region wants a positive address and size, got {self.address}, {self.byte_count}")


@dataclass(frozen=True)
class AgentInfo:
    """The agent that we keep for one peer instance: its name and its own serialised metadata (no pickle)."""

    name: str
    metadata: bytes


@dataclass(frozen=True)
class TransferJob:
    """All bytes that one operation moves, always from source to target.

    Args:
        operation: Names the job; a write's marks carry it.
        peer: The other side: a write's target, or with ``reads`` the source.
        source_addresses: int64, shape (fragments,), bytes.
        target_addresses: int64, shape (fragments,).
        sizes: int64, shape (fragments,), > 0.
        reads: This side is the target and reads (READ); by default it is the source and writes (WRITE). Reads leave no marks.
    """

    operation: OperationIdentity
    peer: PeerId
    source_addresses: Int64Array
    target_addresses: Int64Array
    sizes: Int64Array
    source_kind: MemoryKind = "DRAM"
    source_device: int = 0
    target_kind: MemoryKind = "DRAM"
    target_device: int = 0
    reads: bool = False

    def __post_init__(self) -> None:
        shapes = {self.source_addresses.shape, self.target_addresses.shape, self.sizes.shape}
        if len(shapes) != 1 or self.sizes.ndim != 1 or not self.sizes.size:
            raise ValueError(f"a job wants three equal one-dimensional arrays, got shapes {shapes}")
        if int(self.sizes.min()) <= 0:
            raise ValueError("a job wants sizes > 0")


JobState = Literal["posting", "posted", "done", "stopped", "error"]


@dataclass(frozen=True)
class JobProgress:
    """What is physically true of one job after a poll.

    ``posted`` grains of ``total`` were handed to the library, ``completed`` of them ended well. ``done``: all of them.
    ``stopped``: after ``stop``, everything that was posted completed. ``error``: at least one handle ended in an
    error, or died with its agent: parts of the write may still be going on.
    """

    operation: OperationIdentity
    posted: int
    completed: int
    total: int
    state: JobState
    detail: str = ""


@dataclass(frozen=True)
class ArrivedMark:
    """A notification that came in, with the name of the agent that wrote it."""

    agent_name: str
    mark: Mark


@dataclass(frozen=True)
class TransportProgress:
    """One poll's news."""

    jobs: tuple[JobProgress, ...] = ()
    marks: tuple[ArrivedMark, ...] = ()
    #: Notifications that are no mark of ours; counted, never believed.
    malformed: int = 0
    #: Peers whose connection broke. It proves nothing about memory.
    lost: tuple[PeerId, ...] = ()


@runtime_checkable
class Transport(Protocol):
    """Moves bytes by one-sided writes and reads. One agent per peer instance and generation."""

    @property
    def transport_class(self) -> TransportClass: ...

    @property
    def memory_version(self) -> int:
        """Rises whenever memory is registered or given back: peers that know an earlier version are told."""
        ...

    def agent_info(self, peer: PeerId) -> AgentInfo:
        """The agent kept for this peer's instance, made now if need be."""
        ...

    def connect(self, peer: PeerId, info: AgentInfo) -> None:
        """Learn the peer's agent; again with the same name, what is new of its memory.

        Raises:
            TransportError: The metadata was refused. Nothing can be moved to or from the peer.
        """
        ...

    def register(self, regions: Sequence[MemoryRegion]) -> object: ...

    def deregister(self, registration: Any) -> None: ...

    def start(self, job: TransferJob) -> None:
        """Queue a job; posts happen in ``poll``, bounded.

        Raises:
            TransportError: Nothing of it was handed over. A transport that cannot read says so here.
        """
        ...

    def stop(self, operation: OperationIdentity) -> None:
        """Post nothing more of this job; what is posted goes on and is still reported."""
        ...

    def forget(self, operation: OperationIdentity) -> None:
        """Release the job's handles. Only for jobs that are done or stopped."""
        ...

    def poll(self) -> TransportProgress: ...

    def active(self) -> frozenset[OperationIdentity]:
        """Jobs that are neither done nor stopped, whichever session began them: bytes of theirs may still be moving."""
        ...

    def destroy_agent(self, instance: tuple[str, str]) -> frozenset[Evidence]:
        """Destroy the agent kept for one peer instance; its jobs end in error. When this returns, the agent is gone.

        Returns:
            What is true from here on: always AGENT_DESTROYED; DEREGISTERED if every registration that this agent had was
            given back with success before, so that no key of a peer opens this memory any more; QUEUE_PAIRS_GONE if the
            agent's endpoints went with it. The last two together are the proof for RDMA.

        Raises:
            TransportError: It could not be destroyed: nothing is proven.
        """
        ...


@runtime_checkable
class ControlChannel(Protocol):
    """Frames between peers: first in, first out per peer, authenticated by the implementation."""

    def send(self, peer: PeerId, frame: bytes) -> None:
        """Take one frame for ``peer``.

        Raises:
            WouldBlock: Nothing was taken.
            ChannelError: It may or may not have left, or the peer is not known.
        """
        ...

    def poll(self, frames_max: int) -> Sequence[tuple[PeerId, bytes]]:
        """Frames that came in, at most ``frames_max``, with their authenticated sender. Never blocks."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class LinkEvent:
    """A link of a control channel broke (``up`` False: frames may be lost) or is there again (frames go through)."""

    peer: PeerId
    up: bool
    reason: str = ""


@runtime_checkable
class LinkedChannel(ControlChannel, Protocol):
    """A control channel that knows when a link breaks, and brings it back by itself.

    It promises: every loss of frames is reported as a break before any later frame of that peer is returned; a broken link is
    dialled again until it is back or ``disconnect`` is called. Sessions introduce themselves anew on a link that came back.
    """

    def link_events(self) -> Sequence[LinkEvent]:
        """What happened to links since the last call."""
        ...

    def reset(self, peer: PeerId) -> None:
        """Give a link up that seems dead, and dial again where this side dials. Unknown peers are ignored."""
        ...

    def disconnect(self, peer: PeerId) -> None:
        """Close the link to a peer for good and forget it: no socket, no descriptor stays. Unknown peers are ignored."""
        ...


@dataclass
class TransportCounters:
    """Running totals of an adapter; copied out by its ``statistics()``."""

    agents_created: int = 0
    agents_destroyed: int = 0
    jobs: int = 0
    posts: int = 0
    descriptors: int = 0
    bytes_posted: int = 0
    errors: int = 0
    marks: int = 0
    malformed: int = 0
    post_longest_s: float = 0.0
    poll_longest_s: float = 0.0
    lost: dict[str, int] = field(default_factory=dict)
