"""NIXL (UCX backend) behind the ``Transport`` protocol. The one file that imports nixl.

Theory. One agent per peer instance and generation: destroying it is the receiver's proof over tcp, and it ends nothing but
that peer's transfers. No progress thread: each ``poll`` progresses every agent. Posting can copy synchronously (CMA: about
2.6 us a descriptor, 0.12 ms a MiB), so a write is posted in parts within a time budget per poll. A write's grains, the
smallest parts that are posted, are fixed when it begins; each post takes as many as fit into what is left of the budget, by
what posts cost so far (``pacing.py``), and its notification names operation, grains and their number exactly. Nothing is
done for a whole write in one call: descriptors are built for the part that is posted, regularity is looked for in steps.

A read goes the same way with the sides exchanged, and without a notification: its owner is told by the session when nothing
is read any more.

Descriptors are built here from integers. What a peer sends is only its agent's metadata in NIXL's own length-prefixed
format, which carries no pickle; ``deserialize_descs`` (pickle) is never called. UCX is configured through the backend's own
parameters, never through ``UCX_*`` variables, which MPI libraries read too.

A handle that is in progress is never released, nor is one that ended in an error, whose other descriptors may still be
going on: both live until their agent is destroyed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from kv_bounce_planner._errors import LocalProtocolError, RemoteProtocolError, TransportError
from kv_bounce_planner.sessions.identity import MARKS_MAX, Mark, OperationIdentity, PeerId, decode_mark, encode_mark
from kv_bounce_planner.sessions.proof import Evidence, TransportClass, WriteExecutor
from kv_bounce_planner.transports.interface import (
    AgentInfo,
    ArrivedMark,
    JobProgress,
    JobState,
    MemoryRegion,
    TransferJob,
    TransportCounters,
    TransportProgress,
)
from kv_bounce_planner.transports.pacing import BYTES_PER_UNIT, PostPace


@contextlib.contextmanager
def _torch_is_not_asked() -> Iterator[None]:
    """Importing nixl leaves torch alone where torch can add nothing.

    nixl chooses its CUDA variant by what the process has imported, then by torch's version on the disk; where that names no
    CUDA (a CPU build) it imports torch, seconds of processor time, to hear the same again. Its answer is given here.
    """
    try:
        chooser: Any = importlib.import_module("nixl_meta_utils")
        asked, on_disk = chooser.detect_cuda_major, chooser._torch_cuda_version_from_disk
    except (ImportError, AttributeError):
        yield  # another version of nixl: it does as it likes
        return
    if {"torch", "cuda.bindings", "cupy"} & set(sys.modules) or on_disk() is not None:
        yield
        return
    chooser.detect_cuda_major = lambda: None
    try:
        yield
    finally:
        chooser.detect_cuda_major = asked


_raise_exceptions = logging.raiseExceptions
with _torch_is_not_asked():
    from nixl._api import nixl_agent, nixl_agent_config  # its import changes global logging, undone below

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
#: Rows that are looked at in one step for being regular (count): about 0.1 ms.
EXAMINED_PER_STEP: Final = 16384
#: A call that progresses the library and takes longer did the work of posts; shorter ones only asked (seconds).
WORK_S: Final = 50e-6
#: What a poll's first post may take beyond the budget, as a share of it, if it is a whole write: a rest would cost another
#: post, another notification and another poll.
WHOLE: Final = 0.75


@dataclass(frozen=True)
class NixlConfig:
    """Settings of a NixlTransport.

    Args:
        tls: ``"tcp"`` restricts UCX to tcp through the backend's own ``engine_config``; None leaves UCX its choice, whose
            class is then every transport that this host could use. NIXL lets ``UCX_TLS`` of the environment win over it, so
            with a variable that says something else there is no transport.
        transport_class: Overrides the class that was derived; for hosts whose transports were qualified by hand.
        spare_agents: Agents made ahead, count, >= 0: first contact then costs no construction.
        descriptors_per_post_max: Per post, count, >= 1.
        bytes_per_post_max: Per post, bytes, >= 1.
        descriptors_per_grain: The smallest post, count, >= 1: what is posted in any case, whatever it costs.
        bytes_per_grain: The smallest post, bytes, >= 1; larger fragments are cut.
        post_budget_s: Posting within one poll stops when the next post would end later than this, counted from the poll's
            beginning, > 0; one that is a whole write may take 1.75 times as much. One grain is posted in any case; asking
            for states takes at most half of it.
        parts_in_flight_max: Per agent, count, >= 1.
        error_handling: UCX error handling mode of the endpoints: ``peer`` notices a dead peer.
        strided: Hand regular patterns over as prepared strided lists.
    """

    tls: str | None = None
    transport_class: TransportClass | None = None
    spare_agents: int = 0
    descriptors_per_post_max: int = 512
    bytes_per_post_max: int = 4 << 20
    descriptors_per_grain: int = 16
    bytes_per_grain: int = 256 << 10
    post_budget_s: float = 0.0008
    parts_in_flight_max: int = 64
    error_handling: str = "peer"
    strided: bool = True

    def __post_init__(self) -> None:
        for name in (
            "descriptors_per_post_max",
            "bytes_per_post_max",
            "descriptors_per_grain",
            "bytes_per_grain",
            "parts_in_flight_max",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} wants >= 1, got {getattr(self, name)}")
        if self.spare_agents < 0 or self.post_budget_s <= 0:
            raise ValueError("spare_agents wants >= 0 and post_budget_s > 0")
        if self.tls is not None and (not self.tls or "," in self.tls):
            raise ValueError(f"tls wants one transport name (the backend's own option takes no list), got {self.tls!r}")


def host_identity() -> str:
    """The kernel that this process runs on, by its boot identifier (Linux); empty where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:64]
    except OSError:
        return ""


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


@dataclass(slots=True)
class _Flight:
    """A post in progress: what it was predicted to take, and what it took so far, in its call and in later ones."""

    pace: PostPace
    units: float
    predicted_s: float
    took_s: float


class _Pieces:
    """A job's fragments, the large ones cut into pieces; cut only where they are asked for.

    ``ends(begin, end)`` are the running sums of the bytes of these pieces, ``rows(begin, end)`` their sources, targets and
    sizes, pieces of one fragment joined again.
    """

    __slots__ = ("_cut_bytes", "_ends", "_job", "count", "cut")

    def __init__(self, job: TransferJob, bytes_max: int, largest: int) -> None:
        self._job, self._cut_bytes = job, bytes_max
        self.cut = largest > bytes_max
        self.count = len(job.sizes)
        self._ends: Any = None
        if self.cut and self.count > 1:
            self._ends = np.cumsum(-(-job.sizes // bytes_max))
            self.count = int(self._ends[-1])
        elif self.cut:
            self.count = -(-largest // bytes_max)

    def ends(self, begin: int, end: int) -> Any:
        if not self.cut:
            return np.cumsum(self._job.sizes[begin:end])
        if self._ends is None:
            ends = np.arange(1, end - begin + 1) * self._cut_bytes
            if end == self.count:
                ends[-1] = int(self._job.sizes[0]) - begin * self._cut_bytes
            return ends
        return np.cumsum(self._cut(begin, end)[2])

    def rows(self, begin: int, end: int) -> tuple[Any, Any, Any]:
        job = self._job
        if not self.cut:
            return job.source_addresses[begin:end], job.target_addresses[begin:end], job.sizes[begin:end]
        if self._ends is None:
            at = begin * self._cut_bytes
            size = min(end * self._cut_bytes, int(job.sizes[0])) - at
            return job.source_addresses + at, job.target_addresses + at, size
        owner, offset, sizes = self._cut(begin, end)
        first = np.flatnonzero(np.diff(owner, prepend=-1))
        sources, targets = job.source_addresses[owner] + offset, job.target_addresses[owner] + offset
        return sources[first], targets[first], np.add.reduceat(sizes, first)

    def _cut(self, begin: int, end: int) -> tuple[Any, Any, Any]:
        """Per piece: its fragment, its place in it, its size."""
        piece = np.arange(begin, end)
        owner = np.searchsorted(self._ends, piece, side="right")
        sizes = self._job.sizes[owner]
        offset = (piece - self._ends[owner] - (-sizes // self._cut_bytes)) * self._cut_bytes
        return owner, offset, np.minimum(sizes - offset, self._cut_bytes)


class _Job:
    """One write. ``posted``, ``completed`` and ``total`` count grains."""

    __slots__ = (
        "bulk",
        "completed",
        "detail",
        "error",
        "extents",
        "failed",
        "flights",
        "grain",
        "handles",
        "job",
        "lists",
        "pieces",
        "posted",
        "regular",
        "reported",
        "stopped",
        "total",
    )

    def __init__(self, job: TransferJob, config: NixlConfig) -> None:
        self.job = job
        bytes_max, largest = min(config.bytes_per_grain, config.bytes_per_post_max), int(job.sizes.max())
        self.pieces = _Pieces(job, bytes_max, largest)
        self.bulk = largest >= BYTES_PER_UNIT
        by_bytes = bytes_max // min(bytes_max, largest)
        smallest = min(config.descriptors_per_grain, config.descriptors_per_post_max, by_bytes)
        self.grain = max(1, smallest, -(-self.pieces.count // MARKS_MAX))  # pieces
        self.total = -(-self.pieces.count // self.grain)
        self.posted = 0
        self.completed = 0
        self.stopped = False
        self.error = False
        self.detail = ""
        self.handles: dict[int, Any] = {}  # of the library, by first grain: in progress, or ended in an error
        self.extents: dict[int, int] = {}  # grains of each
        self.flights: dict[int, _Flight] = {}  # of each that is in progress
        self.failed: set[int] = set()
        self.regular = _Regular(job) if config.strided and not self.pieces.cut else None
        self.lists: tuple[Any, ...] = ()  # prepared for the whole job; they outlive every handle made of them
        self.reported: tuple[int, int, str] | None = None

    @property
    def state(self) -> JobState:
        if self.error:
            return "error"
        if self.completed == self.total:
            return "done"
        if self.stopped and self.completed == self.posted:
            return "stopped"
        return "posted" if self.posted == self.total else "posting"


class _Regular:
    """Whether a job's rows have one size and one stride on each side, ascending and not overlapping; found out in steps."""

    __slots__ = ("_job", "_rows", "known", "strides")

    def __init__(self, job: TransferJob) -> None:
        self._job, self._rows = job, 0
        #: Whether the answer stands in ``strides``: (source, target), or None.
        self.known = False
        self.strides: tuple[int, int] | None = None
        count, sources, targets = len(job.sizes), job.source_addresses, job.target_addresses
        if count >= STRIDED_COUNT_MIN:
            size = int(job.sizes[0])
            self.strides = int(sources[1]) - int(sources[0]), int(targets[1]) - int(targets[0])
            if min(self.strides) < size:
                self.strides = None
        self.known = self.strides is None

    def step(self) -> None:
        """Look at some more rows."""
        if self.known or self.strides is None:
            return
        job, begin = self._job, self._rows
        # The first step looks at few rows: a list that is not regular mostly shows it there.
        end = min(len(job.sizes), begin + (EXAMINED_PER_STEP if begin else STRIDED_COUNT_MIN))
        sources, targets = (a[max(0, begin - 1) : end] for a in (job.source_addresses, job.target_addresses))
        if (
            bool((job.sizes[begin:end] != job.sizes[0]).any())
            or bool((sources[1:] - sources[:-1] != self.strides[0]).any())
            or bool((targets[1:] - targets[:-1] != self.strides[1]).any())
        ):
            self.strides = None
        self._rows = end
        self.known = self.strides is None or end == len(job.sizes)


@dataclass(eq=False)
class _Agent:
    nixl: Any
    name: str
    registered: dict[Registration, list[Any]] = field(default_factory=dict)
    remotes: dict[PeerId, str] = field(default_factory=dict)
    jobs: dict[OperationIdentity, _Job] = field(default_factory=dict)
    queue: deque[OperationIdentity] = field(default_factory=deque)
    paces: dict[tuple[str, str, bool, bool], PostPace] = field(default_factory=dict)
    #: Jobs of which something may have changed since a poll told of them.
    news: dict[OperationIdentity, _Job] = field(default_factory=dict)
    in_flight: int = 0
    in_flight_s: float = 0.0  # what these posts were predicted to take: what progressing them may take at once
    progressed_s: float = 0.0  # spent on work of posts in flight, not yet ascribed to one of them
    lost: set[PeerId] = field(default_factory=set)


class NixlTransport:
    """One-sided writes and reads through NIXL.

    Args:
        self_id: This process; part of the agents' names.
        config: Settings.
        clock: Monotonic seconds, for the posting budget.

    Construction opens no network; ``register`` before the first connection. One thread uses it. Errors of the library are
    raised as TransportError with the cause kept; after one raised by ``agent_info``, ``connect`` or ``register`` the
    object is usable.

    Raises:
        TransportError: ``UCX_TLS`` of the environment names other transports than ``config.tls``: what a write's end proves
            would be taken for another transport's.
    """

    def __init__(
        self, self_id: PeerId, *, config: NixlConfig = NixlConfig(), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.self_id = self_id
        self.config = config
        self._clock = clock
        variable = os.environ.get("UCX_TLS")
        if config.tls is not None and variable is not None and variable != config.tls:
            raise TransportError(
                f"UCX_TLS={variable[:100]} in the environment would win over tls={config.tls!r}: unset the variable, or leave "
                "tls out (the transports are then taken to be any that this host has)"
            )
        if config.transport_class is not None:
            self._class = config.transport_class
        elif config.tls is not None:
            self._class = TransportClass.of_ucx((config.tls,), host_identity())
        else:
            self._class = TransportClass.of_ucx(host_transports(), host_identity())
        self._agents: dict[tuple[str, str], _Agent] = {}
        self._spare: list[_Agent] = []
        self._registrations: list[Registration] = []
        self._memory_version = 0
        self._counters = TransportCounters()
        self._closed = False
        self._ended: list[JobProgress] = []
        self._turn = 0
        self._post_turn = 0

    @property
    def transport_class(self) -> TransportClass:
        return self._class

    @property
    def memory_version(self) -> int:
        return self._memory_version

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
        before = agent.remotes.get(peer)
        if before is not None and before != name:
            # Another life of the peer: nothing is written to the earlier one any more, and its connection goes.
            try:
                agent.nixl.remove_remote_agent(before)
            except Exception as error:  # noqa: BLE001 - it may be gone already; the new one is what counts
                self._count_error(error)
        agent.remotes[peer] = name

    def destroy_agent(self, instance: tuple[str, str]) -> frozenset[Evidence]:
        agent = self._agents.get(instance)
        if agent is None:
            return frozenset({Evidence.AGENT_DESTROYED, Evidence.DEREGISTERED, Evidence.QUEUE_PAIRS_GONE})
        for job in agent.jobs.values():
            if job.state not in ("done", "stopped"):
                job.error = True
                job.detail = job.detail or "its agent was destroyed"
                self._ended.append(
                    JobProgress(job.job.operation, job.posted, job.completed, job.total, "error", job.detail)
                )
        evidence = {Evidence.AGENT_DESTROYED, Evidence.QUEUE_PAIRS_GONE}
        if WriteExecutor.NIC not in self._class.executors or self._deregister_all(agent):
            evidence.add(Evidence.DEREGISTERED)
        self._destroy(agent)
        del self._agents[instance]
        return frozenset(evidence)

    def _deregister_all(self, agent: _Agent) -> bool:
        """Give back what this agent registered, so that no key of its peer opens memory any more. Whether all of it went."""
        good = True
        for registration in list(agent.registered):
            try:
                self._deregister_from(agent, registration)
            except Exception as error:  # noqa: BLE001 - then there is no proof, whatever the reason
                self._count_error(error)
                good = False
        return good

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
            while job.handles:
                _let_go(job.handles.popitem()[1])
            for each in job.lists:
                _let_go(each)
            job.lists = ()
        each = None  # a name that keeps a handle keeps its agent
        agent.registered.clear()
        wrapper, agent.nixl = agent.nixl, None
        if wrapper is not None:
            inner = wrapper.agent
            del wrapper.agent
            # Ours and getrefcount's own: anything more would keep the C++ agent, and its writes, alive.
            if sys.getrefcount(inner) > 2:
                gc.collect()  # tracebacks of contained errors form circles
            if sys.getrefcount(inner) > 2:
                wrapper.agent = inner
                agent.nixl = wrapper
                raise TransportError(f"agent {agent.name} is still referenced; nothing is proven")
            del inner
        self._counters.agents_destroyed += 1

    # -- memory

    def register(self, regions: Sequence[MemoryRegion]) -> Registration:
        """Register memory with every agent, present and future. Peers that are known already learn of it by the session.

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
        self._memory_version += 1
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
            self._memory_version += 1

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

    # -- jobs

    def start(self, job: TransferJob) -> None:
        agent = self._agents.get(job.peer.instance)
        if agent is None or job.peer not in agent.remotes:
            raise TransportError(f"{job.peer} is not connected")
        if job.operation in agent.jobs:
            raise LocalProtocolError(f"{job.operation} has a job already")
        agent.jobs[job.operation] = agent.news[job.operation] = _Job(job, self.config)
        agent.queue.append(job.operation)
        self._counters.jobs += 1

    def stop(self, operation: OperationIdentity) -> None:
        for agent in self._agents.values():
            job = agent.jobs.get(operation)
            if job is not None:
                job.stopped = True
                agent.news[operation] = job

    def forget(self, operation: OperationIdentity) -> None:
        for agent in self._agents.values():
            job = agent.jobs.get(operation)
            if job is None:
                continue
            if job.state not in ("done", "stopped"):
                raise LocalProtocolError(f"{operation} is {job.state}: its handles stay")
            self._release_lists(job)
            del agent.jobs[operation]
            agent.news.pop(operation, None)

    def active(self) -> frozenset[OperationIdentity]:
        return frozenset(
            operation
            for agent in self._agents.values()
            for operation, job in agent.jobs.items()
            if job.state not in ("done", "stopped")
        )

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
        before = self._counters.posts
        self._post(agents, started)
        if self._counters.posts != before and self._clock() - started < self.config.post_budget_s:
            # A post may only have begun: its notification leaves when the library is asked, now rather than a poll later.
            self._check_all(agents, started)
        for agent in agents:
            for job in agent.news.values():
                report = (job.posted, job.completed, job.state)
                if report != job.reported:
                    job.reported = report
                    writes.append(
                        JobProgress(job.job.operation, job.posted, job.completed, job.total, job.state, job.detail)
                    )
            agent.news.clear()
            lost.extend(agent.lost)
            agent.lost.clear()
        self._counters.marks += len(marks)
        self._counters.malformed += malformed
        self._counters.poll_longest_s = max(self._counters.poll_longest_s, self._clock() - started)
        return TransportProgress(tuple(writes), tuple(marks), malformed, tuple(lost))

    def _notifications(self, agent: _Agent, marks: list[ArrivedMark]) -> int:
        malformed = 0
        began = self._clock()
        try:
            arrived = agent.nixl.get_new_notifs()
        except Exception as error:  # noqa: BLE001 - a broken endpoint surfaces here too; its writes report it themselves
            self._count_error(error)
            return 0
        if agent.in_flight:
            self._progressed(agent, self._clock() - began)
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
        jobs = [
            (agent, job)
            for agent in agents
            if agent.in_flight
            for job in agent.jobs.values()
            if len(job.handles) > len(job.failed)
        ]
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
        began = self._clock()
        try:
            state = agent.nixl.check_xfer_state(handle)
        except Exception as error:  # noqa: BLE001 - see agent_info
            self._part_failed(agent, job, part, error)
            return
        self._progressed(agent, self._clock() - began)
        flight = job.flights.get(part)
        if flight is not None:
            flight.took_s += agent.progressed_s
            agent.progressed_s = 0.0
            if state == "DONE":
                flight.pace.learn(flight.units, flight.took_s)
        if state == "DONE":
            self._finish(agent, job, part, handle)
        elif state != "PROC":
            self._part_failed(agent, job, part, None)

    def _finish(self, agent: _Agent, job: _Job, part: int, handle: Any) -> None:
        job.completed += job.extents.pop(part)
        agent.news[job.job.operation] = job
        self._landed(agent, job, part)
        del job.handles[part]
        try:
            handle.release()
        except Exception as error:  # noqa: BLE001 - it is done; a failing release costs memory, not truth
            self._count_error(error)
        if job.completed == job.total:
            self._release_lists(job)

    def _landed(self, agent: _Agent, job: _Job, part: int) -> None:
        agent.in_flight -= 1
        flight = job.flights.pop(part, None)
        if flight is not None:
            agent.in_flight_s -= flight.predicted_s
        if not agent.in_flight:
            agent.in_flight_s = agent.progressed_s = 0.0

    def _progressed(self, agent: _Agent, took_s: float) -> None:
        if took_s > WORK_S:
            agent.progressed_s += took_s

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
        self._landed(agent, job, part)
        self._fail(agent, job, error)

    def _fail(self, agent: _Agent, job: _Job, error: Exception | None) -> None:
        job.error = True
        agent.news[job.job.operation] = job
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
        """Post round robin over agents and their jobs, each time as much as fits into what is left of the budget.

        Agents take turns in being first: one with much to write does not use up every poll's budget. What one agent has in
        flight is bounded by the budget too: a post may only have been queued (tcp, a full socket), and then a later poll
        does its work, all of it in one call.
        """
        if not any(agent.queue for agent in agents):
            return
        self._post_turn = (self._post_turn + 1) % len(agents)
        order = agents[self._post_turn :] + agents[: self._post_turn]
        begun = False
        progress = True
        while progress:
            progress = False
            for agent in order:
                if not agent.queue or agent.in_flight >= self.config.parts_in_flight_max:
                    continue
                job = agent.jobs.get(agent.queue[0])
                if job is None or job.stopped or job.error or job.posted == job.total:
                    agent.queue.popleft()
                    progress = True
                    continue
                now = self._clock()
                left = self.config.post_budget_s - (now - started)
                if begun and left <= 0:
                    return
                if agent.in_flight:
                    left = min(left, self.config.post_budget_s - agent.in_flight_s)
                    if left <= 0 or not self._pace(agent, job).known:
                        continue  # nor is anything sent after a first post whose cost is not known yet
                if job.regular is not None and not job.regular.known:
                    job.regular.step()
                    begun = progress = True
                    continue
                pace = self._pace(agent, job)
                begin = job.posted * job.grain
                window = max(1, self.config.descriptors_per_post_max // job.grain) * job.grain
                ends = job.pieces.ends(begin, min(job.pieces.count, begin + window))
                units = ends / BYTES_PER_UNIT + np.arange(1, len(ends) + 1)
                grain = min(job.grain, len(ends))
                count = int(np.searchsorted(ends, self.config.bytes_per_post_max, side="right"))
                whole = not begun and not agent.in_flight and begin == 0 and count == job.pieces.count
                extra = WHOLE * self.config.post_budget_s
                if not whole or units[count - 1] > pace.fitting(left + extra, float(units[grain - 1])):
                    fitting = pace.fitting(left, float(units[grain - 1]))
                    count = min(count, int(np.searchsorted(units, fitting, side="right")))
                    if begin + count < job.pieces.count:
                        count -= count % job.grain
                if count == 0:
                    if agent.in_flight:
                        continue
                    if begun:
                        return
                    count = grain  # so that a write goes on whatever a grain costs
                agent.queue.rotate(-1)
                first, size = job.posted, float(units[count - 1])
                if self._post_part(agent, job, begin, begin + count, int(ends[count - 1])):
                    took = self._clock() - now
                    self._counters.post_longest_s = max(self._counters.post_longest_s, took)
                    if first in job.handles:
                        flight = _Flight(pace, size, max(took, pace.predict_s(size) or 0.0), took)
                        job.flights[first] = flight
                        agent.in_flight_s += flight.predicted_s
                    else:
                        pace.learn(size, took)
                begun = progress = True

    def _pace(self, agent: _Agent, job: _Job) -> PostPace:
        kind = (job.job.source_kind, job.job.target_kind, job.bulk, job.job.reads)
        pace = agent.paces.get(kind)
        if pace is None:
            pace = agent.paces[kind] = PostPace()
        return pace

    def _post_part(self, agent: _Agent, job: _Job, begin: int, end: int, byte_count: int) -> bool:
        """Post pieces ``begin`` to ``end``, the job's next. Returns whether the library took them."""
        first, extent = job.posted, -(-(end - begin) // job.grain)
        note = b"" if job.job.reads else encode_mark(Mark(job.job.operation, first, job.total, extent))
        try:
            handle = self._build(agent, job, begin, end, note)
        except Exception as error:  # noqa: BLE001 - see agent_info; nothing of this part was handed over
            self._fail(agent, job, error)
            return False
        job.handles[first] = handle
        job.extents[first] = extent
        agent.news[job.job.operation] = job
        job.posted += extent  # before the call: from here on this part may be going on
        agent.in_flight += 1
        self._counters.posts += 1
        self._counters.descriptors += end - begin
        self._counters.bytes_posted += byte_count
        try:
            state = agent.nixl.transfer(handle, note)
        except Exception as error:  # noqa: BLE001 - see agent_info
            self._part_failed(agent, job, first, error)
            return False
        if state == "DONE":
            self._finish(agent, job, first, handle)
        elif state != "PROC":
            self._part_failed(agent, job, first, None)
            return False
        return True

    def _build(self, agent: _Agent, job: _Job, begin: int, end: int, note: bytes) -> Any:
        """A handle for pieces begin..end: by index into two strided rows where the whole job is regular, else lists."""
        move = job.job
        remote = agent.remotes[move.peer]
        verb = "READ" if move.reads else "WRITE"
        if job.regular is not None and job.regular.strides is not None:
            if not job.lists:
                job.lists = self._strided_lists(agent, move, remote, job.regular.strides)
            index = np.arange(begin, end, dtype=np.int32)
            return agent.nixl.make_prepped_xfer(verb, job.lists[0], index, job.lists[1], index, note)
        sources, targets, sizes = job.pieces.rows(begin, end)
        rows = np.empty((2, len(sources), 3), np.uint64)
        rows[0, :, 0], rows[0, :, 2] = sources, move.source_device
        rows[1, :, 0], rows[1, :, 2] = targets, move.target_device
        rows[:, :, 1] = sizes
        local, far = _local_first(
            move,
            agent.nixl.get_xfer_descs(rows[0], move.source_kind),
            agent.nixl.get_xfer_descs(rows[1], move.target_kind),
        )
        return agent.nixl.initialize_xfer(verb, local, far, remote, note)

    def _strided_lists(
        self, agent: _Agent, move: TransferJob, remote: str, strides: tuple[int, int]
    ) -> tuple[Any, Any]:
        count, size = len(move.sizes), int(move.sizes[0])
        rows = [
            (np.array([[int(addresses[0]), size, device, stride, count]], np.uint64), kind)
            for addresses, device, kind, stride in (
                (move.source_addresses, move.source_device, move.source_kind, strides[0]),
                (move.target_addresses, move.target_device, move.target_kind, strides[1]),
            )
        ]
        local, far = _local_first(move, *rows)
        return agent.nixl.prep_xfer_dlist("NIXL_INIT_AGENT", *local), agent.nixl.prep_xfer_dlist(remote, *far)

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


def _local_first(job: TransferJob, source: Any, target: Any) -> tuple[Any, Any]:
    """The library wants this side's descriptors first, whichever way the bytes go."""
    return (target, source) if job.reads else (source, target)


def _let_go(handle: Any) -> None:
    """Separate a handle from its agent, with which it goes: who still holds it keeps nothing alive, no finaliser acts."""
    handle._released = True
    if hasattr(handle, "_agent"):
        handle._agent = None


def check_metadata(metadata: bytes) -> None:
    """Accept only NIXL's own serialisation of an agent, which is length-prefixed text and bytes.

    Raises:
        TransportError: Anything else; a pickle in particular.
    """
    if metadata[:2] in _PICKLE_MAGICS or not metadata.startswith(_METADATA_MAGIC):
        raise TransportError(f"{len(metadata)} bytes are not an agent's own serialised metadata")
