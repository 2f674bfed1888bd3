"""Fakes and conformance checks for users of this package: no process, no library, no clock of its own.

``FakeNetwork`` carries control frames, ``FakeWorld`` moves bytes between numpy buffers by address, with writes that can be
delayed, held for ever, broken, or land long after they were given up: exactly what sessions have to survive.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kv_bounce_planner._errors import ChannelError, TransportError, WouldBlock
from kv_bounce_planner.sessions.identity import (
    Mark,
    OperationIdentity,
    PeerId,
    TransferIdentity,
    decode_mark,
    encode_mark,
)
from kv_bounce_planner.sessions.proof import Evidence, TransportClass, WriteExecutor
from kv_bounce_planner.transports.interface import (
    AgentInfo,
    ArrivedMark,
    ControlChannel,
    JobProgress,
    JobState,
    LinkedChannel,
    LinkEvent,
    MemoryRegion,
    TransferJob,
    Transport,
    TransportProgress,
)

__all__ = [
    "FakeChannel",
    "FakeClock",
    "FakeLinkedChannel",
    "FakeNetwork",
    "FakeTransport",
    "FakeWorld",
    "check_control_channel",
    "check_linked_channel",
    "check_transport",
]


class FakeClock:
    """Seconds that pass when told to."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"time does not run backwards: {seconds}")
        self.now_s += seconds


class FakeNetwork:
    """Control channels within one process: first in, first out per pair of peers.

    ``hold(a, b)`` keeps the frames from a to b back until ``let(a, b)``; ``cut(a, b)`` makes sends raise ChannelError.
    Channels that are ``linked`` know their links: ``sever(a, b)`` breaks the link between two peers, with every frame under
    way, and both are told; ``heal(a, b)`` makes a new one, and both are told.
    """

    def __init__(self, *, frames_max: int = 1 << 16) -> None:
        self.frames_max = frames_max
        self._queues: dict[tuple[PeerId, PeerId], deque[bytes]] = {}
        self._channels: dict[PeerId, FakeChannel] = {}
        self._held: set[tuple[PeerId, PeerId]] = set()
        self._cut: set[tuple[PeerId, PeerId]] = set()
        #: Every frame ever sent, in order: (source, target, frame).
        self.log: list[tuple[PeerId, PeerId, bytes]] = []

    def channel(self, self_id: PeerId, *, linked: bool = False) -> FakeChannel:
        """The channel of a peer. One made again under the same name takes the earlier one's place."""
        channel = FakeLinkedChannel(self, self_id) if linked else FakeChannel(self, self_id)
        self._channels[self_id] = channel
        return channel

    def sever(self, one: PeerId, other: PeerId) -> int:
        """Break the link between two peers. Returns how many frames were lost."""
        lost = 0
        for pair in ((one, other), (other, one)):
            lost += len(self._queues.pop(pair, ()))
            self._cut.add(pair)
            self._tell(pair[0], LinkEvent(pair[1], False, "severed"))
        return lost

    def heal(self, one: PeerId, other: PeerId) -> None:
        for pair in ((one, other), (other, one)):
            self._cut.discard(pair)
            self._tell(pair[0], LinkEvent(pair[1], True))

    def _tell(self, peer: PeerId, event: LinkEvent) -> None:
        channel = self._channels.get(peer)
        if isinstance(channel, FakeLinkedChannel):
            channel.events.append(event)

    def hold(self, source: PeerId, target: PeerId) -> None:
        self._held.add((source, target))

    def let(self, source: PeerId, target: PeerId) -> None:
        self._held.discard((source, target))

    def cut(self, source: PeerId, target: PeerId) -> None:
        self._cut.add((source, target))

    def waiting(self, source: PeerId, target: PeerId) -> int:
        return len(self._queues.get((source, target), ()))

    def inject(self, source: PeerId, target: PeerId, frame: bytes) -> None:
        """A frame as if ``source`` had sent it: replays and corruptions for tests."""
        self._queues.setdefault((source, target), deque()).append(frame)

    def _send(self, source: PeerId, target: PeerId, frame: bytes) -> None:
        if (source, target) in self._cut:
            raise ChannelError(f"the link from {source} to {target} is cut")
        if target not in self._channels:
            raise ChannelError(f"no channel of {target}")
        queue = self._queues.setdefault((source, target), deque())
        if len(queue) >= self.frames_max:
            raise WouldBlock
        queue.append(bytes(frame))
        self.log.append((source, target, bytes(frame)))

    def _poll(self, target: PeerId, frames_max: int) -> list[tuple[PeerId, bytes]]:
        taken: list[tuple[PeerId, bytes]] = []
        for (source, to), queue in self._queues.items():
            if to != target or (source, to) in self._held:
                continue
            while queue and len(taken) < frames_max:
                taken.append((source, queue.popleft()))
        return taken


class FakeChannel:
    """One end of a ``FakeNetwork``."""

    def __init__(self, network: FakeNetwork, self_id: PeerId) -> None:
        self._network = network
        self._self_id = self_id
        self._closed = False

    def send(self, peer: PeerId, frame: bytes) -> None:
        if self._closed:
            raise ChannelError("the channel is closed")
        self._network._send(self._self_id, peer, frame)

    def poll(self, frames_max: int) -> Sequence[tuple[PeerId, bytes]]:
        return [] if self._closed else self._network._poll(self._self_id, frames_max)

    def close(self) -> None:
        self._closed = True


class FakeLinkedChannel(FakeChannel):
    """One end of a ``FakeNetwork`` that is told when a link breaks and when it is there again."""

    def __init__(self, network: FakeNetwork, self_id: PeerId) -> None:
        super().__init__(network, self_id)
        self.events: deque[LinkEvent] = deque()
        #: Peers whose link a session gave up or closed for good.
        self.resets: list[PeerId] = []
        self.disconnected: list[PeerId] = []

    def link_events(self) -> Sequence[LinkEvent]:
        events = tuple(self.events)
        self.events.clear()
        return events

    def reset(self, peer: PeerId) -> None:
        self.resets.append(peer)

    def disconnect(self, peer: PeerId) -> None:
        self.disconnected.append(peer)


@dataclass
class _FakeWrite:
    job: TransferJob
    agent: _FakeAgent
    posted: int = 0
    completed: int = 0
    stopped: bool = False
    error: str = ""
    reported: tuple[int, int, str] | None = None
    #: Parts that were posted and have not landed: (part index).
    flying: list[int] = field(default_factory=list)
    #: A read's parts that left the source before an error: what would land, later.
    sampled: dict[int, list[bytes]] = field(default_factory=dict)


@dataclass(eq=False)
class _FakeAgent:
    name: str
    owner: PeerId
    instance: tuple[str, str]
    alive: bool = True
    remotes: dict[PeerId, str] = field(default_factory=dict)


class FakeWorld:
    """Memory and wires of all fake transports of one test.

    Switches:
        landing: Called per part before it lands, with the job and the part; returns what happens: ``land``, ``hold`` (stays in
            progress; asked again at each step), or ``error`` (the handle ends in an error but the part stays in flight: it
            lands when ``land_everything`` says so, which is what errors of real transports leave open).
        parts_max: Fragments per posted part.
        executor: Who executes writes. Receiver-executed parts land only while the target's agent lives and polls. NIC-executed
            ones (RDMA's semantics: the adapter goes on with what was posted, whatever becomes of the sender's process) land
            while the target's agent has its memory registered and its queue pairs, and nobody needs to poll. Reads: the
            source's agent (receiver-executed) or process answers, and what it answered lands while the reader's agent lives.
        sticky_keys: NIC-executed only: deregistration at the target fails, as a library's may.
    """

    def __init__(
        self,
        *,
        executor: WriteExecutor = WriteExecutor.RECEIVER,
        parts_max: int = 64,
        landing: Callable[[TransferJob, int], str] | None = None,
        sticky_keys: bool = False,
    ) -> None:
        self.sticky_keys = sticky_keys
        self.executor = executor
        self.parts_max = parts_max
        self.landing = landing or (lambda _job, _part: "land")
        self.agents: dict[str, _FakeAgent] = {}
        self.writes: list[_FakeWrite] = []
        self.inbox: dict[str, deque[tuple[str, bytes]]] = {}
        self.killed: set[PeerId] = set()
        self._buffers: list[tuple[int, int, np.ndarray[Any, Any]]] = []
        self._number = 0
        #: Bytes that landed, in order, for audits: (address, bytes, operation).
        self.landed: list[tuple[int, int, OperationIdentity]] = []

    def add_buffer(self, array: np.ndarray[Any, Any]) -> int:
        """Make an array's memory writable by address. Returns its address."""
        address = int(array.__array_interface__["data"][0])
        self._buffers.append((address, array.nbytes, array))
        return address

    def transport(self, self_id: PeerId) -> FakeTransport:
        return FakeTransport(self, self_id)

    def kill(self, peer: PeerId) -> None:
        """The process ends: its agents vanish, what it executes stops."""
        self.killed.add(peer)
        for agent in self.agents.values():
            if agent.owner == peer:
                agent.alive = False

    def land_everything(self) -> int:
        """Let every part in flight land whose executor still exists. Returns parts landed: the late writes."""
        landed = 0
        for write in self.writes:
            for part in list(write.flying):
                if self._can_land(write):
                    self._land(write, part)
                    landed += 1
        return landed

    def _can_land(self, write: _FakeWrite) -> bool:
        target = self.agents.get(write.agent.remotes.get(write.job.peer, ""))
        if write.job.reads:
            if write.error:
                return write.agent.alive and bool(write.sampled)
            served = target is not None and target.owner not in self.killed
            if self.executor is not WriteExecutor.SENDER:
                served = target is not None and target.alive
            return write.agent.alive and served
        if self.executor is WriteExecutor.RECEIVER:
            return target is not None and target.alive
        if self.executor is WriteExecutor.NIC:
            return target is not None and (target.alive or self.sticky_keys)
        return write.agent.alive

    def _parts(self, job: TransferJob) -> int:
        return -(-len(job.sizes) // self.parts_max)

    def _land(self, write: _FakeWrite, part: int) -> None:
        job = write.job
        sampled = iter(write.sampled.pop(part, ()))
        rows = slice(part * self.parts_max, (part + 1) * self.parts_max)
        for source, target, size in zip(
            job.source_addresses[rows].tolist(), job.target_addresses[rows].tolist(), job.sizes[rows].tolist()
        ):
            self._check(source, size)
            self._check(target, size)
            ctypes.memmove(target, next(sampled, source), size)
            self.landed.append((target, size, job.operation))
        write.flying.remove(part)

    def _sample(self, write: _FakeWrite) -> None:
        for part in write.flying:
            rows = slice(part * self.parts_max, (part + 1) * self.parts_max)
            places = zip(write.job.source_addresses[rows].tolist(), write.job.sizes[rows].tolist(), strict=True)
            write.sampled[part] = [ctypes.string_at(address, size) for address, size in places]

    def _check(self, address: int, size: int) -> None:
        if not any(start <= address and address + size <= start + length for start, length, _ in self._buffers):
            raise TransportError(f"{size} bytes at {address:#x} are outside every buffer")

    def _step(self, transport: FakeTransport) -> None:
        for write in self.writes:
            mine = write.agent.owner == transport.self_id
            total = self._parts(write.job)
            if mine and write.agent.alive and not write.error and not write.stopped and write.posted < total:
                write.flying.append(write.posted)
                write.posted += 1
            target = self.agents.get(write.agent.remotes.get(write.job.peer, ""))
            by_peer = self.executor is WriteExecutor.RECEIVER  # a write's target copies, a read's source answers
            owner = target.owner if by_peer and target else write.agent.owner
            executes = self.executor is WriteExecutor.NIC or transport.self_id == owner
            if write.error or not executes or not self._can_land(write):
                continue
            for part in list(write.flying):
                verdict = self.landing(write.job, part)
                if verdict == "error":
                    if write.job.reads:
                        self._sample(write)
                    write.error = "the transport reports an error"
                    break
                if verdict != "land":
                    continue
                self._land(write, part)
                write.completed += 1
                if target is not None and target.alive and not write.job.reads:
                    mark = encode_mark(Mark(write.job.operation, part, total))
                    self.inbox[target.name].append((write.agent.name, mark))


class FakeTransport:
    """A ``Transport`` in a ``FakeWorld``: one part is posted per poll and write."""

    def __init__(self, world: FakeWorld, self_id: PeerId) -> None:
        self.world = world
        self.self_id = self_id
        self._class = TransportClass(f"fake:{world.executor.value}", frozenset({world.executor}))
        self._agents: dict[tuple[str, str], _FakeAgent] = {}
        self._lost: list[PeerId] = []
        self.registered: list[MemoryRegion] = []
        #: Per peer, the metadata that it was connected with, in order.
        self.connected: list[tuple[PeerId, bytes]] = []
        self._version = 0

    @property
    def transport_class(self) -> TransportClass:
        return self._class

    @property
    def memory_version(self) -> int:
        return self._version

    def agent_info(self, peer: PeerId) -> AgentInfo:
        agent = self._agents.get(peer.instance)
        if agent is None:
            self.world._number += 1
            agent = _FakeAgent(f"agent-{self.world._number}", self.self_id, peer.instance)
            self._agents[peer.instance] = agent
            self.world.agents[agent.name] = agent
            self.world.inbox[agent.name] = deque()
        return AgentInfo(agent.name, f"fake metadata {self._version}".encode())

    def connect(self, peer: PeerId, info: AgentInfo) -> None:
        if info.name not in self.world.agents:
            raise TransportError(f"{info.name!r} is no agent of this world")
        self.agent_info(peer)
        self.connected.append((peer, info.metadata))
        self._agents[peer.instance].remotes[peer] = info.name

    def register(self, regions: Sequence[MemoryRegion]) -> object:
        self.registered.extend(regions)
        self._version += 1
        return tuple(regions)

    def deregister(self, registration: Any) -> None:
        for region in registration:
            self.registered.remove(region)
        self._version += 1

    def start(self, job: TransferJob) -> None:
        agent = self._agents.get(job.peer.instance)
        if agent is None or job.peer not in agent.remotes:
            raise TransportError(f"{job.peer} was not connected")
        self.world.writes.append(_FakeWrite(job, agent))

    def stop(self, operation: OperationIdentity) -> None:
        for write in self.world.writes:
            if write.job.operation == operation and write.agent.owner == self.self_id:
                write.stopped = True

    def forget(self, operation: OperationIdentity) -> None:
        self.world.writes = [
            write
            for write in self.world.writes
            if write.job.operation != operation or write.agent.owner != self.self_id or write.flying
        ]

    def _state(self, write: _FakeWrite) -> JobState:
        total = self.world._parts(write.job)
        if write.error or not write.agent.alive:
            return "error"
        if write.completed == total:
            return "done"
        if write.stopped and write.completed == write.posted:
            return "stopped"
        return "posted" if write.posted == total else "posting"

    def active(self) -> frozenset[OperationIdentity]:
        return frozenset(
            write.job.operation
            for write in self.world.writes
            if write.agent in self._agents.values() and self._state(write) not in ("done", "stopped")
        )

    def poll(self) -> TransportProgress:
        self.world._step(self)
        writes: list[JobProgress] = []
        for write in self.world.writes:
            if write.agent.owner != self.self_id:
                continue
            total, state = self.world._parts(write.job), self._state(write)
            report = (write.posted, write.completed, state)
            if report != write.reported:
                write.reported = report
                writes.append(
                    JobProgress(
                        write.job.operation, write.posted, write.completed, total, state, write.error or "agent gone"
                    )
                )
        marks: list[ArrivedMark] = []
        for agent in self._agents.values():
            inbox = self.world.inbox[agent.name]
            while inbox:
                name, data = inbox.popleft()
                marks.append(ArrivedMark(name, decode_mark(data)))
        lost, self._lost = tuple(self._lost), []
        return TransportProgress(tuple(writes), tuple(marks), 0, lost)

    def lose(self, peer: PeerId) -> None:
        """Report at the next poll that the connection to ``peer`` broke."""
        self._lost.append(peer)

    def destroy_agent(self, instance: tuple[str, str]) -> frozenset[Evidence]:
        agent = self._agents.pop(instance, None)
        if agent is not None:
            agent.alive = False
        evidence = {Evidence.AGENT_DESTROYED, Evidence.QUEUE_PAIRS_GONE}
        return frozenset(evidence if self.world.sticky_keys else {*evidence, Evidence.DEREGISTERED})


def _peer(name: str, rank: int) -> PeerId:
    return PeerId(name, f"{name}-generation", rank)


def check_control_channel(
    make_pair: Callable[[PeerId, PeerId], tuple[ControlChannel, ControlChannel]],
    *,
    settle: Callable[[], None] = lambda: None,
    polls_max: int = 200_000,
) -> None:
    """Conformance of a ControlChannel: order, identity, bounds, binary safety, refusal of the unknown, close.

    Args:
        make_pair: Two connected channels for two peers.
        settle: Called between polls while frames are awaited (a short wait for channels with a real wire).
        polls_max: Polls before a missing frame is a failure.

    Raises:
        AssertionError: With what was violated.
    """
    left_id, right_id = _peer("left", 0), _peer("right", 3)
    left, right = make_pair(left_id, right_id)

    def receive(channel: ControlChannel, count: int) -> list[tuple[PeerId, bytes]]:
        frames: list[tuple[PeerId, bytes]] = []
        for _ in range(polls_max):
            taken = channel.poll(7)
            _expect(len(taken) <= 7, f"poll(7) returned {len(taken)} frames")
            frames.extend((peer, bytes(frame)) for peer, frame in taken)
            if len(frames) >= count:
                return frames
            settle()
        raise AssertionError(f"{len(frames)} of {count} frames arrived")

    try:
        _expect(list(left.poll(8)) == [] and list(right.poll(8)) == [], "frames out of nothing")
        sizes = (0, 1, 2, 255, 256, 65_536, 1 << 20)
        sent = [bytes((index * 7 + k) % 256 for k in range(min(size, 97))) * 1 for index, size in enumerate(sizes)]
        sent += [index.to_bytes(4, "big") + b"\x00\xff" * 10 for index in range(200)]
        sent.append(bytes(range(256)) * 4096)
        for frame in sent:
            _send(left, right_id, frame, settle, polls_max)
        arrived = receive(right, len(sent))
        _expect([frame for _, frame in arrived] == sent, "frames were changed, lost, doubled or reordered")
        _expect({peer for peer, _ in arrived} == {left_id}, "frames carry the wrong sender")
        for index in range(50):
            _send(right, left_id, b"right %d" % index, settle, polls_max)
            _send(left, right_id, b"left %d" % index, settle, polls_max)
        _expect(receive(left, 50) == [(right_id, b"right %d" % index) for index in range(50)], "replies out of order")
        _expect(receive(right, 50) == [(left_id, b"left %d" % index) for index in range(50)], "requests out of order")
        try:
            left.send(_peer("nobody", 9), b"x")
        except ChannelError:
            pass
        else:
            raise AssertionError("a frame for an unknown peer was taken")
    finally:
        left.close()
        right.close()
    try:
        left.send(right_id, b"x")
    except ChannelError:
        return
    raise AssertionError("a closed channel took a frame")


def check_linked_channel(
    make_pair: Callable[[PeerId, PeerId], tuple[LinkedChannel, LinkedChannel]],
    *,
    make_again: Callable[[PeerId], LinkedChannel],
    settle: Callable[[], None] = lambda: None,
    polls_max: int = 200_000,
) -> None:
    """Conformance of a LinkedChannel: breaks are events, links come back, a second life of a name is noticed.

    Args:
        make_pair: (dialling, listening) channels, connected.
        make_again: Another channel under the dialling one's name, connected to the same listener, while the first lives.
        settle, polls_max: As of ``check_control_channel``.

    Raises:
        AssertionError: With what was violated.
    """
    left_id, right_id = _peer("left", 0), _peer("right", 3)
    left, right = make_pair(left_id, right_id)
    again: LinkedChannel | None = None
    seen: dict[str, list[LinkEvent]] = {"left": [], "right": []}

    def turn() -> list[bytes]:
        frames = [bytes(frame) for peer, frame in right.poll(7) if peer == left_id]
        seen["right"].extend(right.link_events())
        left.poll(7)
        seen["left"].extend(left.link_events())
        settle()
        return frames

    def until(condition: Callable[[], bool], what: str) -> list[bytes]:
        frames: list[bytes] = []
        for _ in range(polls_max):
            frames += turn()
            if condition():
                return frames
        raise AssertionError(what)

    def ask(channel: LinkedChannel, frame: bytes) -> None:
        arrived: list[bytes] = []
        for _ in range(polls_max):
            try:
                channel.send(right_id, frame)
            except (WouldBlock, ChannelError):
                channel.link_events()
                settle()
                continue
            break
        for _ in range(polls_max):
            arrived += turn()
            if channel is not left:
                channel.poll(7)
                channel.link_events()
            if frame in arrived:
                return
        raise AssertionError(f"{frame!r} never arrived")

    try:
        ask(left, b"first")
        _expect(not any(not event.up for events in seen.values() for event in events), "a link broke by itself")
        left.reset(right_id)
        until(lambda: any(event.up for event in seen["left"]), "a link that was given up never came back")
        _expect([event.up for event in seen["left"]][:2] == [False, True], f"events: {seen['left']}")
        ask(left, b"second")
        _expect(any(not event.up and event.peer == left_id for event in seen["right"]), "the other side was not told")
        again = make_again(left_id)
        before = len(seen["left"])
        ask(again, b"of another life")
        until(
            lambda: any(not event.up for event in seen["left"][before:]),
            "the first life was not told of the second one",
        )
        right.disconnect(left_id)
        left.disconnect(right_id)
        try:
            left.send(right_id, b"x")
        except ChannelError:
            pass
        else:
            raise AssertionError("a frame was taken for a peer that was disconnected")
    finally:
        for channel in (left, right, again):
            if channel is not None:
                channel.close()


def _send(channel: ControlChannel, peer: PeerId, frame: bytes, settle: Callable[[], None], polls_max: int) -> None:
    for _ in range(polls_max):
        try:
            channel.send(peer, frame)
        except WouldBlock:
            settle()
            continue
        return
    raise AssertionError("the channel never takes the frame")


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def check_transport(
    make_pair: Callable[[PeerId, PeerId], tuple[Transport, Transport]],
    *,
    register: Callable[[Transport, np.ndarray[Any, Any]], int],
    reads: bool = True,
    polls_max: int = 200_000,
) -> None:
    """Conformance of a Transport: exact bytes, exact marks, reads, memory that comes late, destroyed agents, bounded progress.

    Args:
        make_pair: A sending and a receiving transport in this process.
        register: Registers an array with a transport; returns its address. Called before connections are made, and once after.
        reads: Whether it can read; one that cannot must refuse the job.
        polls_max: Polls before missing progress is a failure.

    Raises:
        AssertionError: With what was violated.
    """
    sender_id, receiver_id = _peer("writer", 1), _peer("reader", 0)
    sender, receiver = make_pair(sender_id, receiver_id)
    generator = np.random.default_rng(7)
    source = generator.integers(0, 256, 1 << 20, dtype=np.uint8)
    target = np.zeros(1 << 20, np.uint8)
    source_at, target_at = register(sender, source), register(receiver, target)
    sender.connect(receiver_id, receiver.agent_info(sender_id))
    writer_agent = sender.agent_info(receiver_id).name
    count, size = 3000, 64
    rows = generator.permutation(len(target) // size)[:count].astype(np.int64)
    columns = generator.permutation(len(source) // size)[:count].astype(np.int64)
    operation = OperationIdentity(TransferIdentity(1, 0, receiver_id.generation, 0), 1, 5)
    job = TransferJob(
        operation, receiver_id, source_at + columns * size, target_at + rows * size, np.full(count, size, np.int64)
    )
    sender.start(job)
    seen: set[int] = set()
    total, state, posted = 0, "posting", 0
    for _ in range(polls_max):
        for write in sender.poll().jobs:
            _expect(write.operation == operation, "progress of another operation")
            _expect(write.completed <= write.posted <= write.total and write.posted >= posted, "progress ran backwards")
            posted, state = write.posted, write.state
            _expect(state != "error", f"error: {write.detail}")
        for arrived in receiver.poll().marks:
            _expect(arrived.agent_name == writer_agent, f"mark by {arrived.agent_name!r}")
            _expect(arrived.mark.operation == operation, "mark of another operation")
            grains = set(range(arrived.mark.index, arrived.mark.index + arrived.mark.extent))
            _expect(bool(grains) and not grains & seen, "a grain was marked twice")
            seen |= grains
            _expect(total in (0, arrived.mark.count), "marks of one operation differ in their count")
            total = arrived.mark.count
        if state == "done" and total and len(seen) == total:
            break
    else:
        raise AssertionError(f"no end: {state}, {len(seen)} of {total} marks")
    sender.forget(operation)
    expected = np.zeros_like(target).reshape(-1, size)
    expected[rows] = source.reshape(-1, size)[columns]
    _expect(bool((expected.reshape(-1) == target).all()), "bytes differ, or bytes landed elsewhere")
    _expect(sender.poll().jobs == (), "progress of a forgotten write")
    stranger = _peer("stranger", 0)
    try:
        sender.start(TransferJob(operation, stranger, job.source_addresses, job.target_addresses, job.sizes))
    except TransportError:
        pass
    else:
        raise AssertionError("a write to a peer that was never connected was taken")
    _check_reads(sender, receiver, register, reads, polls_max)
    sender.destroy_agent(receiver_id.instance)
    receiver.destroy_agent(sender_id.instance)


def _check_reads(
    sender: Transport,
    receiver: Transport,
    register: Callable[[Transport, np.ndarray[Any, Any]], int],
    reads: bool,
    polls_max: int,
) -> None:
    """The receiver reads what the sender registered only now, after both were connected."""
    sender_id, receiver_id = _peer("writer", 1), _peer("reader", 0)
    before = sender.memory_version
    source, target = np.random.default_rng(8).integers(0, 256, 1 << 18, dtype=np.uint8), np.zeros(1 << 18, np.uint8)
    source_at, target_at = register(sender, source), register(receiver, target)
    _expect(sender.memory_version > before, "memory was registered and the version stands still")
    receiver.connect(sender_id, sender.agent_info(receiver_id))
    operation = OperationIdentity(TransferIdentity(2, 0, receiver_id.generation, 0), 1, 6)
    rows = np.random.default_rng(9).permutation(256).astype(np.int64)[:200] * 1024
    job = TransferJob(
        operation, sender_id, source_at + rows[::-1], target_at + rows, np.full(200, 1000, np.int64), reads=True
    )
    try:
        receiver.start(job)
    except TransportError:
        _expect(not reads, "a read was refused")
        return
    state = ""
    for _ in range(polls_max):
        for progress in receiver.poll().jobs:
            state = progress.state
            _expect(state != "error", f"error: {progress.detail}")
        _expect(not sender.poll().marks, "a read left a mark")
        if state == "done":
            break
    _expect(state == "done", f"a read never ended: {state}")
    receiver.forget(operation)
    expected = np.zeros_like(target).reshape(-1, 1024)
    expected[rows // 1024, :1000] = source.reshape(-1, 1024)[rows[::-1] // 1024, :1000]
    _expect(bool((expected.reshape(-1) == target).all()), "bytes read differ, or landed elsewhere")
