"""NIXL (UCX backend) behind the ``Transport`` protocol. The one file that imports nixl.

Theory. One agent per peer instance and generation: destroying it is the receiver's proof over tcp, and it ends nothing but
that peer's transfers. No progress thread: each ``poll`` progresses every agent. A write is cut into parts, bounded in
descriptors and bytes, because posting can copy synchronously (CMA: about 2.6 us a descriptor, 0.12 ms a MiB); parts are posted
within a time budget per poll, each with a notification of its own, which names operation, part and count exactly.

Descriptors are built here from integers. What a peer sends is only its agent's metadata in NIXL's own length-prefixed
format, which carries no pickle; ``deserialize_descs`` (pickle) is never called. UCX is configured through the backend's own
parameters, never through ``UCX_*`` variables, which MPI libraries read too.

A handle that is in progress is never released, nor is one that ended in an error, whose other descriptors may still be
going on: both live until their agent is destroyed.
"""

from __future__ import annotations

import logging
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from kv_bounce_planner._errors import LocalProtocolError, RemoteProtocolError, TransportError
from kv_bounce_planner._identity import Mark, OperationIdentity, PeerId, decode_mark, encode_mark
from kv_bounce_planner._proof import TransportClass
from kv_bounce_planner._transport import (
    AgentInfo,
    ArrivedMark,
    MemoryRegion,
    TransportCounters,
    TransportProgress,
    WriteJob,
    WriteProgress,
    WriteState,
)

_raise_exceptions = logging.raiseExceptions
from nixl._api import nixl_agent, nixl_agent_config  # noqa: E402 - its import changes global logging, undone below

# Importing nixl turns off logging.raiseExceptions for the whole process and sets its logger to INFO on stdout, two lines
# per agent. Both are put right here.
logging.raiseExceptions = _raise_exceptions
if logging.getLogger("nixl").level == logging.INFO:
    logging.getLogger("nixl").setLevel(logging.WARNING)

_METADATA_MAGIC: Final = b"nixlSerDes|"
_PICKLE_MAGICS: Final = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
#: From how many descriptors on a regular job is handed over as two strided rows, prepared once: below, the two preparation
#: calls cost more than the rows.
STRIDED_COUNT_MIN: Final = 64


@dataclass(frozen=True)
class NixlConfig:
    """Settings of a NixlTransport.

    Args:
        tls: ``"tcp"`` restricts UCX to tcp through the backend's own ``engine_config``; None leaves UCX its choice, whose
            class is then every transport that this host could use.
        transport_class: Overrides the class that was derived; for hosts whose transports were qualified by hand.
        spare_agents: Agents made ahead, count, >= 0: first contact then costs no construction.
        descriptors_per_post_max: Per part, count, >= 1.
        bytes_per_post_max: Per part, bytes, >= 1; larger fragments are cut.
        post_budget_s: Posting within one poll stops when the next post would end later than this, > 0. One post is made in
            any case; asking for states takes at most half of it.
        parts_in_flight_max: Per agent, count, >= 1.
        error_handling: UCX error handling mode of the endpoints: ``peer`` notices a dead peer.
        strided: Hand regular patterns over as prepared strided lists.
    """

    tls: str | None = None
    transport_class: TransportClass | None = None
    spare_agents: int = 0
    descriptors_per_post_max: int = 128
    bytes_per_post_max: int = 4 << 20
    post_budget_s: float = 0.001
    parts_in_flight_max: int = 64
    error_handling: str = "peer"
    strided: bool = True

    def __post_init__(self) -> None:
        for name in ("descriptors_per_post_max", "bytes_per_post_max", "parts_in_flight_max"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} wants >= 1, got {getattr(self, name)}")
        if self.spare_agents < 0 or self.post_budget_s <= 0:
            raise ValueError("spare_agents wants >= 0 and post_budget_s > 0")
        if self.tls is not None and (not self.tls or "," in self.tls):
            raise ValueError(f"tls wants one transport name (the backend's own option takes no list), got {self.tls!r}")


def host_transports() -> tuple[str, ...]:
    """The UCX transports that this host could use: read from the devices that exist, erring towards more."""
    names = ["tcp", "cma", "posix", "sysv", "self"]
    if any(Path("/dev").glob("nvidia[0-9]*")):
        names += ["cuda_ipc", "cuda_copy"]
    infiniband = Path("/sys/class/infiniband")
    if infiniband.is_dir() and any(infiniband.iterdir()):
        names.append("rc")
    return tuple(names)


class Registration:
    """Memory registered with every agent of one transport."""

    def __init__(self, regions: tuple[MemoryRegion, ...]) -> None:
        self.regions = regions


class _Job:
    __slots__ = (
        "bounds",
        "completed",
        "detail",
        "error",
        "failed",
        "handles",
        "job",
        "lists",
        "posted",
        "reported",
        "sizes",
        "sources",
        "stopped",
        "strides",
        "targets",
    )

    def __init__(self, job: WriteJob, config: NixlConfig) -> None:
        self.job = job
        self.sources, self.targets, self.sizes = _cut(job, config.bytes_per_post_max)
        self.bounds = _parts(self.sizes, config.descriptors_per_post_max, config.bytes_per_post_max)
        self.posted = 0
        self.completed = 0
        self.stopped = False
        self.error = False
        self.detail = ""
        self.handles: dict[int, Any] = {}  # of the library, by part: in progress, or ended in an error
        self.failed: set[int] = set()
        self.strides = _strides(self.sources, self.targets, self.sizes) if config.strided else None
        self.lists: tuple[Any, ...] = ()  # prepared for the whole job; they outlive every handle made of them
        self.reported: tuple[int, int, str] | None = None

    @property
    def total(self) -> int:
        return len(self.bounds) - 1

    @property
    def state(self) -> WriteState:
        if self.error:
            return "error"
        if self.completed == self.total:
            return "done"
        if self.stopped and self.completed == self.posted:
            return "stopped"
        return "posted" if self.posted == self.total else "posting"


@dataclass(eq=False)
class _Agent:
    nixl: Any
    name: str
    registered: dict[Registration, list[Any]] = field(default_factory=dict)
    remotes: dict[PeerId, str] = field(default_factory=dict)
    jobs: dict[OperationIdentity, _Job] = field(default_factory=dict)
    queue: deque[OperationIdentity] = field(default_factory=deque)
    in_flight: int = 0
    lost: set[PeerId] = field(default_factory=set)


class NixlTransport:
    """One-sided writes through NIXL.

    Args:
        self_id: This process; part of the agents' names.
        config: Settings.
        clock: Monotonic seconds, for the posting budget.

    Construction opens no network; ``register`` before the first connection. One thread uses it. Errors of the library are
    raised as TransportError with the cause kept; after one raised by ``agent_info``, ``connect`` or ``register`` the
    object is usable.
    """

    def __init__(
        self, self_id: PeerId, *, config: NixlConfig = NixlConfig(), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.self_id = self_id
        self.config = config
        self._clock = clock
        if config.transport_class is not None:
            self._class = config.transport_class
        elif config.tls is not None:
            self._class = TransportClass.of_ucx((config.tls,))
        else:
            self._class = TransportClass.of_ucx(host_transports())
        self._agents: dict[tuple[str, str], _Agent] = {}
        self._spare: list[_Agent] = []
        self._registrations: list[Registration] = []
        self._counters = TransportCounters()
        self._closed = False
        self._ended: list[WriteProgress] = []
        self._post_s = 0.0  # running estimate of one post
        self._turn = 0

    @property
    def transport_class(self) -> TransportClass:
        return self._class

    # -- agents

    def prepare_agents(self) -> None:
        """Make the configured number of spare agents now; each takes tens of milliseconds. For idle moments."""
        while len(self._spare) < self.config.spare_agents:
            self._spare.append(self._make())

    def agent_info(self, peer: PeerId) -> AgentInfo:
        agent = self._agent(peer.instance)
        try:
            return AgentInfo(agent.name, bytes(agent.nixl.get_agent_metadata()))
        except Exception as error:
            raise TransportError(f"agent for {peer}: no metadata: {error}") from error

    def connect(self, peer: PeerId, info: AgentInfo) -> None:
        check_metadata(info.metadata)
        agent = self._agent(peer.instance)
        taken = {name: other for other, name in agent.remotes.items() if other != peer}
        if info.name in taken:
            raise TransportError(f"{peer} claims the agent {info.name!r} of {taken[info.name]}")
        try:
            loaded = agent.nixl.add_remote_agent(info.metadata)
        except Exception as error:
            raise TransportError(f"metadata of {peer} was refused: {error}") from error
        name = loaded.decode() if isinstance(loaded, bytes) else str(loaded)
        if name != info.name:
            raise TransportError(f"metadata of {peer} names the agent {name!r}, its message {info.name!r}")
        agent.remotes[peer] = name

    def destroy_agent(self, instance: tuple[str, str]) -> None:
        agent = self._agents.get(instance)
        if agent is None:
            return
        for job in agent.jobs.values():
            if job.state not in ("done", "stopped"):
                job.error = True
                job.detail = job.detail or "its agent was destroyed"
                self._ended.append(
                    WriteProgress(job.job.operation, job.posted, job.completed, job.total, "error", job.detail)
                )
        self._destroy(agent)
        del self._agents[instance]

    def _agent(self, instance: tuple[str, str]) -> _Agent:
        if self._closed:
            raise TransportError("the transport is closed")
        agent = self._agents.get(instance)
        if agent is None:
            agent = self._spare.pop() if self._spare else self._make()
            self._agents[instance] = agent
        return agent

    def _make(self) -> _Agent:
        name = f"{self.self_id.instance_id}.{self.self_id.rank}.{uuid.uuid4().hex[:16]}"
        parameters = {"ucx_error_handling_mode": self.config.error_handling}
        if self.config.tls is not None:
            parameters["engine_config"] = f"TLS={self.config.tls}"
        try:
            nixl = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[]))
            nixl.create_backend("UCX", parameters)
            agent = _Agent(nixl, name)
            for registration in self._registrations:
                self._register_with(agent, registration)
        except Exception as error:
            raise TransportError(f"no agent with {parameters}: {error}") from error
        self._counters.agents_created += 1
        return agent

    def _destroy(self, agent: _Agent) -> None:
        """Let the library's agent go, and prove that it went."""
        for job in agent.jobs.values():
            for each in (*job.handles.values(), *job.lists):
                each._released = True  # it goes with its agent: no finaliser may touch it afterwards
            job.handles.clear()
            job.lists = ()
        agent.registered.clear()
        wrapper, agent.nixl = agent.nixl, None
        if wrapper is not None:
            inner = wrapper.agent
            del wrapper.agent
            # Ours and getrefcount's own: anything more would keep the C++ agent, and its writes, alive.
            if sys.getrefcount(inner) > 2:
                wrapper.agent = inner
                agent.nixl = wrapper
                raise TransportError(f"agent {agent.name} is still referenced; nothing is proven")
            del inner
        self._counters.agents_destroyed += 1

    # -- memory

    def register(self, regions: Sequence[MemoryRegion]) -> Registration:
        """Register memory with every agent, present and future.

        Raises:
            TransportError: An agent refused; what was registered for this call was rolled back.
        """
        registration = Registration(tuple(regions))
        done: list[_Agent] = []
        try:
            for agent in (*self._agents.values(), *self._spare):
                self._register_with(agent, registration)
                done.append(agent)
        except Exception as error:
            for agent in done:
                self._deregister_from(agent, registration)
            raise TransportError(f"registration of {len(registration.regions)} regions failed: {error}") from error
        self._registrations.append(registration)
        return registration

    def deregister(self, registration: Registration) -> None:
        """Deregister from every agent. It proves nothing about tcp or CMA writes (measured).

        Raises:
            TransportError: Some agent failed; those that succeeded stay deregistered, a retry takes up the others.
        """
        failed = ""
        for agent in (*self._agents.values(), *self._spare):
            try:
                self._deregister_from(agent, registration)
            except Exception as error:  # noqa: BLE001 - every agent is attempted, the first failure is told
                failed = failed or f"{agent.name}: {error}"
        if failed:
            raise TransportError(f"deregistration failed: {failed}")
        if registration in self._registrations:
            self._registrations.remove(registration)

    def _register_with(self, agent: _Agent, registration: Registration) -> None:
        lists: list[Any] = []
        agent.registered[registration] = lists
        for kind in ("DRAM", "VRAM"):
            rows = [
                (region.address, region.byte_count, region.device_id, "")
                for region in registration.regions
                if region.memory_kind == kind
            ]
            if rows:
                lists.append(agent.nixl.register_memory(rows, kind))

    def _deregister_from(self, agent: _Agent, registration: Registration) -> None:
        lists = agent.registered.get(registration, [])
        while lists:
            agent.nixl.deregister_memory(lists[-1])
            lists.pop()
        agent.registered.pop(registration, None)

    # -- writes

    def start_write(self, job: WriteJob) -> None:
        agent = self._agents.get(job.peer.instance)
        if agent is None or job.peer not in agent.remotes:
            raise TransportError(f"{job.peer} is not connected")
        if job.operation in agent.jobs:
            raise LocalProtocolError(f"{job.operation} is being written already")
        agent.jobs[job.operation] = _Job(job, self.config)
        agent.queue.append(job.operation)
        self._counters.jobs += 1

    def stop_write(self, operation: OperationIdentity) -> None:
        for agent in self._agents.values():
            job = agent.jobs.get(operation)
            if job is not None:
                job.stopped = True

    def forget_write(self, operation: OperationIdentity) -> None:
        for agent in self._agents.values():
            job = agent.jobs.get(operation)
            if job is None:
                continue
            if job.state not in ("done", "stopped"):
                raise LocalProtocolError(f"{operation} is {job.state}: its handles stay")
            self._release_lists(job)
            del agent.jobs[operation]

    def poll(self) -> TransportProgress:
        started = self._clock()
        marks: list[ArrivedMark] = []
        writes, self._ended = self._ended, []
        lost: list[PeerId] = []
        malformed = 0
        agents = list(self._agents.values())
        for agent in agents:
            malformed += self._notifications(agent, marks)
        self._check_all(agents, started)
        self._post(agents, started)
        for agent in agents:
            for job in agent.jobs.values():
                report = (job.posted, job.completed, job.state)
                if report != job.reported:
                    job.reported = report
                    writes.append(
                        WriteProgress(job.job.operation, job.posted, job.completed, job.total, job.state, job.detail)
                    )
            lost.extend(agent.lost)
            agent.lost.clear()
        self._counters.marks += len(marks)
        self._counters.malformed += malformed
        self._counters.poll_longest_s = max(self._counters.poll_longest_s, self._clock() - started)
        return TransportProgress(tuple(writes), tuple(marks), malformed, tuple(lost))

    def _notifications(self, agent: _Agent, marks: list[ArrivedMark]) -> int:
        malformed = 0
        try:
            arrived = agent.nixl.get_new_notifs()
        except Exception as error:  # noqa: BLE001 - a broken endpoint surfaces here too; its writes report it themselves
            self._count_error(error)
            return 0
        for name, messages in arrived.items():
            text = name.decode() if isinstance(name, bytes) else str(name)
            for message in messages:
                try:
                    marks.append(ArrivedMark(text, decode_mark(bytes(message))))
                except RemoteProtocolError:
                    malformed += 1
        return malformed

    def _check_all(self, agents: list[_Agent], started: float) -> None:
        """Ask for the state of what is in progress, within half the budget: asking progresses the library, which copies.

        Each poll begins with another job, so one that stands still hides no other.
        """
        jobs = [(agent, job) for agent in agents for job in agent.jobs.values() if len(job.handles) > len(job.failed)]
        if not jobs:
            return
        self._turn = (self._turn + 1) % len(jobs)
        for agent, job in jobs[self._turn :] + jobs[: self._turn]:
            for part, handle in list(job.handles.items()):
                if part not in job.failed:
                    self._check(agent, job, part, handle)
                    if self._clock() - started > self.config.post_budget_s / 2:
                        return

    def _check(self, agent: _Agent, job: _Job, part: int, handle: Any) -> None:
        try:
            state = agent.nixl.check_xfer_state(handle)
        except Exception as error:  # noqa: BLE001 - see agent_info
            self._part_failed(agent, job, part, error)
            return
        if state == "DONE":
            self._finish(agent, job, part, handle)
        elif state != "PROC":
            self._part_failed(agent, job, part, None)

    def _finish(self, agent: _Agent, job: _Job, part: int, handle: Any) -> None:
        job.completed += 1
        agent.in_flight -= 1
        del job.handles[part]
        try:
            handle.release()
        except Exception as error:  # noqa: BLE001 - it is done; a failing release costs memory, not truth
            self._count_error(error)
        if job.completed == job.total:
            self._release_lists(job)

    def _release_lists(self, job: _Job) -> None:
        lists, job.lists = job.lists, ()
        for each in lists:
            try:
                each.release()
            except Exception as error:  # noqa: BLE001 - as above
                self._count_error(error)

    def _part_failed(self, agent: _Agent, job: _Job, part: int, error: Exception | None) -> None:
        """The handle stays: its other descriptors may still be going on."""
        job.failed.add(part)
        agent.in_flight -= 1
        self._fail(agent, job, error)

    def _fail(self, agent: _Agent, job: _Job, error: Exception | None) -> None:
        job.error = True
        job.detail = job.detail or (
            f"{type(error).__name__}: {error}" if error is not None else "the write ended in an error"
        )
        self._counters.errors += 1
        if error is not None:
            self._count_error(error)
            if type(error).__name__ == "nixlRemoteDisconnectError":
                agent.lost.add(job.job.peer)

    def _count_error(self, error: Exception) -> None:
        name = type(error).__name__
        self._counters.lost[name] = self._counters.lost.get(name, 0) + 1

    def _post(self, agents: list[_Agent], started: float) -> None:
        """Post parts round robin over agents and their jobs until the budget would be exceeded."""
        posted_any = False
        progress = True
        while progress:
            progress = False
            for agent in agents:
                if not agent.queue or agent.in_flight >= self.config.parts_in_flight_max:
                    continue
                now = self._clock()
                if posted_any and now - started + self._post_s > self.config.post_budget_s:
                    return
                operation = agent.queue.popleft()
                job = agent.jobs.get(operation)
                if job is None or job.stopped or job.error or job.posted == job.total:
                    progress = True
                    continue
                self._post_part(agent, job)
                posted_any = progress = True
                took = self._clock() - now
                self._post_s = max(took, 0.75 * self._post_s)
                self._counters.post_longest_s = max(self._counters.post_longest_s, took)
                if not job.error and job.posted < job.total:
                    agent.queue.append(operation)

    def _post_part(self, agent: _Agent, job: _Job) -> None:
        part = job.posted
        begin, end = job.bounds[part], job.bounds[part + 1]
        note = encode_mark(Mark(job.job.operation, part, job.total))
        try:
            handle = self._build(agent, job, begin, end, note)
        except Exception as error:  # noqa: BLE001 - see agent_info; nothing of this part was handed over
            self._fail(agent, job, error)
            return
        job.handles[part] = handle
        job.posted += 1  # before the call: from here on this part may be going on
        agent.in_flight += 1
        self._counters.posts += 1
        self._counters.descriptors += end - begin
        self._counters.bytes_posted += int(job.sizes[begin:end].sum())
        try:
            state = agent.nixl.transfer(handle, note)
        except Exception as error:  # noqa: BLE001 - see agent_info
            self._part_failed(agent, job, part, error)
            return
        if state == "DONE":
            self._finish(agent, job, part, handle)
        elif state != "PROC":
            self._part_failed(agent, job, part, None)

    def _build(self, agent: _Agent, job: _Job, begin: int, end: int, note: bytes) -> Any:
        """A handle for rows begin..end: by index into two strided rows where the whole job is regular, else lists."""
        write = job.job
        remote = agent.remotes[write.peer]
        if job.strides is not None:
            if not job.lists:
                job.lists = self._strided_lists(agent, job, remote)
            index = np.arange(begin, end, dtype=np.int32)
            return agent.nixl.make_prepped_xfer("WRITE", job.lists[0], index, job.lists[1], index, note)
        rows = np.empty((2, end - begin, 3), np.uint64)
        rows[0, :, 0], rows[0, :, 2] = job.sources[begin:end], write.source_device
        rows[1, :, 0], rows[1, :, 2] = job.targets[begin:end], write.target_device
        rows[:, :, 1] = job.sizes[begin:end]
        return agent.nixl.initialize_xfer(
            "WRITE",
            agent.nixl.get_xfer_descs(rows[0], write.source_kind),
            agent.nixl.get_xfer_descs(rows[1], write.target_kind),
            remote,
            note,
        )

    def _strided_lists(self, agent: _Agent, job: _Job, remote: str) -> tuple[Any, Any]:
        write, (source_stride, target_stride) = job.job, job.strides or (0, 0)
        count, size = len(job.sizes), int(job.sizes[0])
        local_row = np.array([[int(job.sources[0]), size, write.source_device, source_stride, count]], np.uint64)
        remote_row = np.array([[int(job.targets[0]), size, write.target_device, target_stride, count]], np.uint64)
        local = agent.nixl.prep_xfer_dlist("NIXL_INIT_AGENT", local_row, write.source_kind)
        return local, agent.nixl.prep_xfer_dlist(remote, remote_row, write.target_kind)

    # -- end

    def statistics(self) -> TransportCounters:
        """A copy of the counters; seconds and counts since construction."""
        return replace(self._counters, lost=dict(self._counters.lost))

    def close(self) -> None:
        """Destroy every agent.

        Raises:
            LocalProtocolError: Writes are in progress: their memory is still read. Nothing was closed; retry.
        """
        busy = [job.job.operation for agent in self._agents.values() for job in agent.jobs.values() if job.handles]
        if busy:
            raise LocalProtocolError(f"{len(busy)} writes are in progress or in doubt: {busy[:3]}")
        self._closed = True
        for instance in list(self._agents):
            self._destroy(self._agents[instance])
            del self._agents[instance]
        while self._spare:
            self._destroy(self._spare[-1])
            self._spare.pop()

    def __enter__(self) -> NixlTransport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_metadata(metadata: bytes) -> None:
    """Accept only NIXL's own serialisation of an agent, which is length-prefixed text and bytes.

    Raises:
        TransportError: Anything else; a pickle in particular.
    """
    if metadata[:2] in _PICKLE_MAGICS or not metadata.startswith(_METADATA_MAGIC):
        raise TransportError(f"{len(metadata)} bytes are not an agent's own serialised metadata")


def _cut(job: WriteJob, bytes_max: int) -> tuple[Any, Any, Any]:
    """Cut fragments above ``bytes_max`` into pieces."""
    sizes = job.sizes
    if int(sizes.max()) <= bytes_max:
        return job.source_addresses, job.target_addresses, sizes
    pieces = -(-sizes // bytes_max)
    owner = np.repeat(np.arange(len(sizes)), pieces)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    offset = nth * bytes_max
    return (
        job.source_addresses[owner] + offset,
        job.target_addresses[owner] + offset,
        np.minimum(sizes[owner] - offset, bytes_max),
    )


def _parts(sizes: Any, count_max: int, bytes_max: int) -> list[int]:
    """Row bounds of parts, each within both limits."""
    ends = np.cumsum(sizes)
    bounds, begin, total = [0], 0, len(sizes)
    while begin < total:
        base = int(ends[begin - 1]) if begin else 0
        by_bytes = int(np.searchsorted(ends, base + bytes_max, side="right"))
        begin = min(total, begin + count_max, max(by_bytes, begin + 1))
        bounds.append(begin)
    return bounds


def _strides(sources: Any, targets: Any, sizes: Any) -> tuple[int, int] | None:
    """(source, target) strides if both sides are regular, ascending and not overlapping; else None."""
    count = len(sizes)
    if count < STRIDED_COUNT_MIN:
        return None
    size, source, target = int(sizes[0]), int(sources[1] - sources[0]), int(targets[1] - targets[0])
    if source < size or target < size:
        return None
    if bool((sizes != size).any()):
        return None
    if bool((np.diff(sources) != source).any()) or bool((np.diff(targets) != target).any()):
        return None
    return source, target
