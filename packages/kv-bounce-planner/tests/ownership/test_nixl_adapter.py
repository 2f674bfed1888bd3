"""The NIXL adapter: conformance on the real library, and its error paths against a scripted one."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from kv_bounce_planner._errors import LocalProtocolError
from kv_bounce_planner.planning import TransportError
from kv_bounce_planner.sessions import (
    MemoryRegion,
    NixlConfig,
    NixlTransport,
    OperationIdentity,
    PeerId,
    TransferIdentity,
    TransportClass,
)
from kv_bounce_planner.sessions.identity import decode_mark
from kv_bounce_planner.sessions.proof import Evidence
from kv_bounce_planner.testing import FakeWorld, check_transport
from kv_bounce_planner.transports import _nixl
from kv_bounce_planner.transports.interface import AgentInfo, TransferJob

SELF, PEER = PeerId("ctx", "c1", 1), PeerId("gen", "g1", 0)
METADATA = b"nixlSerDes|fake"


# --- the real library -----------------------------------------------------------------------------------------------


def register(transport, array):
    transport.register([MemoryRegion(array.ctypes.data, array.nbytes)])
    return array.ctypes.data


@pytest.mark.parametrize("tls", ["tcp", None], ids=["tcp", "any"])
@pytest.mark.parametrize("strided", [True, False], ids=["strided", "lists"])
def test_nixl_transport_conforms(tls, strided):
    """Exact bytes and marks over the real library."""

    def make(left, right):
        config = NixlConfig(tls=tls, strided=strided, descriptors_per_post_max=700, spare_agents=1)
        pair = NixlTransport(left, config=config), NixlTransport(right, config=config)
        for transport in pair:
            transport.prepare_agents()
        return pair

    check_transport(make, register=register)


def test_importing_the_adapter_leaves_torch_and_nixls_own_choice_alone():
    """No torch for an engine that has none, and nothing of nixl stays changed."""
    program = (
        "import sys, kv_bounce_planner, nixl_meta_utils; kv_bounce_planner.NixlTransport\n"
        "print('nixl' in sys.modules, 'torch' in sys.modules, nixl_meta_utils.detect_cuda_major.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.stdout.split() == ["True", "False", "detect_cuda_major"], done.stdout + done.stderr


def test_fake_transport_conforms():
    """The fake is a transport too."""
    world = FakeWorld(parts_max=700)

    def register(transport, array):
        address = world.add_buffer(array)
        transport.register([MemoryRegion(address, array.nbytes)])
        return address

    check_transport(lambda left, right: (world.transport(left), world.transport(right)), register=register)


def test_the_version_of_our_memory_rises_with_every_change_of_it():
    """Peers that know an earlier one are told: whatever is registered or given back, once; not what failed."""
    transport, array = NixlTransport(SELF), np.zeros(4096, np.uint8)
    versions = [transport.memory_version]
    registrations = []
    for part in (array[:2048], array[2048:]):
        registrations.append(transport.register([MemoryRegion(part.ctypes.data, part.nbytes)]))
        versions.append(transport.memory_version)
    for registration in registrations:
        transport.deregister(registration)
        versions.append(transport.memory_version)
    assert versions == sorted(set(versions))
    transport.deregister(registrations[0])
    assert transport.memory_version == versions[-1]


def test_regular_patterns_go_as_strided_rows_and_land_exactly():
    """A block list with one stride on both sides; a large fragment is cut; a mixed list falls back to rows."""
    left, right = NixlTransport(SELF), NixlTransport(PEER)
    source = np.random.default_rng(1).integers(0, 256, 1 << 20, dtype=np.uint8)
    target = np.zeros(1 << 20, np.uint8)
    register(left, source), register(right, target)
    left.connect(PEER, right.agent_info(SELF))
    index = np.arange(256, dtype=np.int64)
    cases = [
        (source.ctypes.data + index * 2048, target.ctypes.data + index * 4096, np.full(256, 1024, np.int64)),
        (source.ctypes.data + index[:1] + 7, target.ctypes.data + index[:1] + 13, np.array([900_001])),
        (
            source.ctypes.data + index * 3000,
            target.ctypes.data + index * 4096,
            np.where(index % 2, 1000, 999).astype(np.int64),
        ),
    ]
    left.config = NixlConfig(bytes_per_post_max=100_000)
    for number, (sources, targets, sizes) in enumerate(cases):
        target[:] = 0
        operation = OperationIdentity(TransferIdentity(1, 0, "g1", 0), 1, number)
        job = TransferJob(operation, PEER, sources, targets, sizes)
        left.start(job)
        planned = next(iter(left._agents.values())).jobs[operation]
        parts: set[int] = set()
        count, state = 1, ""
        while state != "done" or len(parts) < count:
            for write in left.poll().jobs:
                state = write.state
            for arrived in right.poll().marks:
                parts.update(range(arrived.mark.index, arrived.mark.index + arrived.mark.extent))
                count = arrived.mark.count
        assert (planned.regular is not None and planned.regular.strides is not None) == (number == 0)
        left.forget(operation)
        expected = np.zeros_like(target)
        for at, to, size in zip(sources - source.ctypes.data, targets - target.ctypes.data, sizes):
            expected[to : to + size] = source[at : at + size]
        assert (expected == target).all()
    left.close()
    right.close()


def test_pickled_or_foreign_metadata_is_refused_before_the_library_sees_it():
    """Nothing of a peer is ever unpickled; the agent's own format is length-prefixed text."""
    transport = NixlTransport(SELF)

    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("unpickled",))

    for data in (pickle.dumps(Bomb()), b"", b"nixlSerDe|", b"x" * 100):
        with pytest.raises(TransportError, match="not an agent's own"):
            transport.connect(PEER, AgentInfo("a", data))
    with pytest.raises(TransportError, match="refused"):
        transport.connect(PEER, AgentInfo("a", b"nixlSerDes|garbage follows"))
    transport.close()


def test_an_address_outside_every_registration_is_refused_unposted():
    """The library says not found; nothing was handed over, so the job is as good as never posted."""
    left, right = NixlTransport(SELF), NixlTransport(PEER)
    source, target = np.ones(4096, np.uint8), np.zeros(4096, np.uint8)
    register(left, source), register(right, target)
    left.connect(PEER, right.agent_info(SELF))
    outside = np.zeros(4096, np.uint8)
    operation = OperationIdentity(TransferIdentity(1, 0, "g1", 0), 1, 0)
    one = np.array([4096], np.int64)
    left.start(TransferJob(operation, PEER, np.array([source.ctypes.data]), np.array([outside.ctypes.data]), one))
    (write,) = left.poll().jobs
    assert (write.state, write.posted) == ("error", 0)
    assert "NotFound" in write.detail
    left.destroy_agent(PEER.instance)
    left.close()
    right.close()


def test_the_class_is_that_of_what_the_host_could_use():
    """tcp alone needs our agent's end; an unrestricted backend needs the proofs of every transport of this host."""
    assert NixlTransport(SELF, config=NixlConfig(tls="tcp")).transport_class.required == {Evidence.AGENT_DESTROYED}
    unrestricted = NixlTransport(SELF).transport_class
    assert unrestricted.required >= {Evidence.AGENT_DESTROYED, Evidence.PEER_REAPED}
    assert unrestricted.key.startswith("ucx:tcp,cma,")
    fixed = TransportClass.of_ucx(["cma"])
    assert NixlTransport(SELF, config=NixlConfig(transport_class=fixed)).transport_class is fixed


@pytest.mark.parametrize("variable", ["cma", "tcp,cma", "all", "^sysv", ""])
def test_a_variable_that_would_win_over_the_transport_is_refused(variable, monkeypatch):
    """NIXL leaves ``tls`` out where the environment names transports; with the same, or without ``tls``, all is well."""
    monkeypatch.setenv("UCX_TLS", variable)
    with pytest.raises(TransportError, match=f"^UCX_TLS={re.escape(variable)} in the environment would win"):
        NixlTransport(SELF, config=NixlConfig(tls="tcp"))
    assert len(NixlTransport(SELF).transport_class.required) > 1
    monkeypatch.setenv("UCX_TLS", "tcp")
    assert NixlTransport(SELF, config=NixlConfig(tls="tcp")).transport_class.required == {Evidence.AGENT_DESTROYED}


@pytest.mark.parametrize(
    "arguments",
    [
        {"descriptors_per_post_max": 0},
        {"bytes_per_post_max": 0},
        {"parts_in_flight_max": 0},
        {"spare_agents": -1},
        {"post_budget_s": 0},
        {"tls": "tcp,cma"},
        {"tls": ""},
    ],
)
def test_settings_are_validated(arguments):
    with pytest.raises(ValueError, match="want"):
        NixlConfig(**arguments)


# --- a scripted library ---------------------------------------------------------------------------------------------


class NixlError(Exception):
    pass


nixlRemoteDisconnectError = type("nixlRemoteDisconnectError", (Exception,), {})


class Handle:
    def __init__(self, log, name):
        self.log, self.name, self._released = log, name, False

    def release(self):
        self.log.append(f"release {self.name}")
        self._released = True


class Library:
    """Stands for ``nixl_agent``; ``script`` answers per call, ``log`` is what was asked."""

    log: list[str] = []
    script: dict[str, list] = {}
    kept: list = []
    sink: list | None = None

    def __init__(self, name, config):
        self.agent = type("Inner", (), {})()
        self.name, self.number = name, 0

    @classmethod
    def reset(cls):
        cls.log, cls.script, cls.kept, cls.sink = [], {}, [], None

    def answer(self, call, default):
        self.log.append(call)
        queue = self.script.get(call)
        value = queue.pop(0) if queue else default
        if isinstance(value, Exception):
            raise value
        return value

    def create_backend(self, name, parameters):
        self.answer(f"create_backend {parameters}", None)

    def register_memory(self, rows, kind):
        return self.answer(f"register {kind}", Handle(self.log, "registration"))

    def deregister_memory(self, handle):
        self.answer("deregister", None)

    def get_agent_metadata(self):
        return METADATA

    def add_remote_agent(self, data):
        return self.answer("add_remote_agent", b"peer-agent")

    def get_new_notifs(self):
        return self.answer("notifs", {})

    def get_xfer_descs(self, rows, kind):
        return (kind, rows)

    def initialize_xfer(self, operation, local, remote, agent, note):
        self.number += 1
        self.note = note
        self.answer("initialize", None)
        if self.sink is not None:
            self.sink.append((decode_mark(note), (local[1], remote[1])))
        return Handle(self.log, f"handle {self.number}")

    def prep_xfer_dlist(self, agent, rows, kind):
        self.answer("prep", None)
        return Handle(self.log, f"list of {agent or 'us'}")

    def make_prepped_xfer(self, operation, local, local_index, remote, remote_index, note):
        self.number += 1
        return Handle(self.log, f"handle {self.number}")

    def transfer(self, handle, note):
        return self.answer("transfer", "DONE")

    def check_xfer_state(self, handle):
        return self.answer("check", "PROC")


@pytest.fixture
def library(monkeypatch):
    Library.reset()
    monkeypatch.setattr(_nixl, "nixl_agent", Library)
    monkeypatch.setattr(_nixl, "nixl_agent_config", lambda **settings: settings)
    return Library


def job(number=0, count=4, size=64, stride=128):
    index = np.arange(count, dtype=np.int64)
    operation = OperationIdentity(TransferIdentity(1, 0, "g1", 0), 1, number)
    order = index[::-1] if stride < 0 else index
    return TransferJob(
        operation, PEER, 4096 + index * abs(stride), (1 << 20) + order * abs(stride), np.full(count, size, np.int64)
    )


def connected(**settings):
    transport = NixlTransport(SELF, config=NixlConfig(**settings))
    transport.register([MemoryRegion(4096, 1 << 20)])
    transport.connect(PEER, AgentInfo("peer-agent", METADATA))
    return transport


def test_backend_settings_go_to_the_backend_and_not_to_the_environment(library, monkeypatch):
    """engine_config and error handling are parameters; no UCX_ variable is set."""
    import os

    before = {name for name in os.environ if name.startswith("UCX")}
    connected(tls="tcp")
    assert library.log[0] == "create_backend {'ucx_error_handling_mode': 'peer', 'engine_config': 'TLS=tcp'}"
    assert {name for name in os.environ if name.startswith("UCX")} == before


def test_one_agent_per_peer_instance_and_generation(library):
    """Two ranks of one instance share it, a restarted instance gets another; destroying one leaves the other."""
    transport = connected()
    names = {transport.agent_info(PeerId(*peer)).name for peer in (("gen", "g1", 0), ("gen", "g1", 1))}
    other = transport.agent_info(PeerId("gen", "g2", 0)).name
    assert len(names) == 1 and other not in names
    transport.destroy_agent(("gen", "g1"))
    assert transport.agent_info(PeerId("gen", "g2", 0)).name == other
    assert transport.statistics().agents_destroyed == 1


def test_metadata_must_name_the_agent_that_the_message_names(library):
    """And no two ranks may claim one agent."""
    transport = connected()
    library.script["add_remote_agent"] = [b"somebody else"]
    with pytest.raises(TransportError, match="names the agent"):
        transport.connect(PeerId("gen", "g1", 1), AgentInfo("peer-agent-1", METADATA))
    with pytest.raises(TransportError, match="claims the agent"):
        transport.connect(PeerId("gen", "g1", 1), AgentInfo("peer-agent", METADATA))


def test_a_handle_in_progress_is_never_released(library):
    """Not by stop, not by forget, not by poll; only after DONE."""
    library.script["transfer"] = ["PROC"]
    transport = connected()
    write = job()
    transport.start(write)
    transport.poll()
    transport.stop(write.operation)
    for _ in range(5):
        transport.poll()
    with pytest.raises(LocalProtocolError, match="its handles stay"):
        transport.forget(write.operation)
    with pytest.raises(LocalProtocolError, match="in progress"):
        transport.close()
    assert not any(line.startswith("release") for line in library.log)
    library.script["check"] = ["DONE"]
    (progress,) = transport.poll().jobs
    assert progress.state == "done"
    assert library.log.count("release handle 1") == 1
    transport.forget(write.operation)
    transport.close()


@pytest.mark.parametrize("where", ["transfer returns ERR", "transfer raises", "check returns ERR", "check raises"])
def test_a_handle_that_ended_in_an_error_is_kept_and_the_job_is_in_error(library, where):
    """Its other descriptors may still be going on: error is no proof, so nothing is given back."""
    error = nixlRemoteDisconnectError("gone")
    step, _, how = where.partition(" ")
    failure = "ERR" if how.endswith("ERR") else error
    library.script["transfer"] = ["PROC"] if step == "check" else [failure]
    library.script["check"] = [failure] if step == "check" else []
    transport = connected()
    write = job()
    transport.start(write)
    updates = [update for _ in range(3) for update in (transport.poll(),)]
    progress = [each for update in updates for each in update.jobs][-1]
    assert (progress.state, progress.posted, progress.completed) == ("error", 1, 0)
    assert not any(line.startswith("release") for line in library.log)
    lost = [peer for update in updates for peer in update.lost]
    assert lost == ([PEER] if how == "raises" else [])
    with pytest.raises(LocalProtocolError):
        transport.forget(write.operation)


def test_siblings_of_an_error_go_on_and_nothing_more_is_posted(library):
    """Three parts: the second errs, the first completes later, the third is never posted."""
    library.script["transfer"] = ["DONE", "PROC", "ERR"]
    transport = connected(descriptors_per_post_max=2, post_budget_s=10)
    transport.start(job(1, count=2))  # so that the cost of a post is known
    transport.poll()
    write = job(count=6)
    transport.start(write)
    (progress,) = transport.poll().jobs
    assert (progress.posted, progress.total, progress.state) == (2, 3, "error")
    library.script["check"] = ["DONE"]
    (progress,) = transport.poll().jobs
    assert (progress.posted, progress.completed, progress.state) == (2, 1, "error")
    assert library.log.count("transfer") == 3


def test_a_part_that_could_not_be_built_was_not_posted(library):
    """initialize raised: posted stays 0, so a session may say never posted."""
    library.script["initialize"] = [NixlError("NIXL_ERR_NOT_FOUND")]
    transport = connected()
    transport.start(job())
    (progress,) = transport.poll().jobs
    assert (progress.posted, progress.state) == (0, "error")
    assert "NOT_FOUND" in progress.detail


@pytest.mark.parametrize("strided", [False, True])
def test_a_read_has_our_side_first_and_leaves_no_note(library, strided, monkeypatch):
    """The same rows, exchanged; whoever lent the source learns of the end by the session."""
    asked = []

    def initialize(self, verb, local, far, agent, note):
        asked.append((verb, local, far, note))
        return Handle(self.log, "read")

    def prepare(self, agent, rows, kind):
        asked.append((agent, kind, int(rows[0, 0])))
        return Handle(self.log, "list")

    def make(self, verb, local, local_index, far, far_index, note):
        asked.append((verb, note))
        return Handle(self.log, "read")

    monkeypatch.setattr(Library, "initialize_xfer", initialize)
    monkeypatch.setattr(Library, "prep_xfer_dlist", prepare)
    monkeypatch.setattr(Library, "make_prepped_xfer", make)
    transport = connected()
    move = replace(job(count=200 if strided else 3), reads=True, source_kind="VRAM", source_device=2)
    transport.start(move)
    while not asked:
        transport.poll()
    if strided:
        assert asked[:2] == [("NIXL_INIT_AGENT", "DRAM", 1 << 20), ("peer-agent", "VRAM", 4096)]
        assert asked[2] == ("READ", b"")
    else:
        ((verb, local, far, note),) = asked
        assert (verb, note) == ("READ", b"")
        assert local[0] == "DRAM" and local[1][:, 0].tolist() == move.target_addresses.tolist()
        assert far[0] == "VRAM" and far[1][:, 0].tolist() == move.source_addresses.tolist() and set(far[1][:, 2]) == {2}


def test_notes_name_operation_part_and_count_and_foreign_ones_are_counted(library):
    """Exact-match notifications; what is none of ours is malformed, never believed."""
    transport = connected(descriptors_per_post_max=2, post_budget_s=10)
    agent = next(iter(transport._agents.values())).nixl
    write = job(count=4)
    transport.start(write)
    transport.poll()
    assert decode_mark(agent.note) == decode_mark(_nixl.encode_mark(_nixl.Mark(write.operation, 1, 2)))
    library.script["notifs"] = [{b"peer-agent": [agent.note, b"garbage", agent.note[:-1]]}]
    progress = transport.poll()
    assert [arrived.agent_name for arrived in progress.marks] == ["peer-agent"]
    assert progress.malformed == 2


def test_posting_stops_at_its_budget_and_goes_on_round_robin(library):
    """Each poll posts until the next post would end too late; every job gets its turn."""
    now = [0.0]

    def clock():
        return now[0]

    original = Library.transfer

    def slow(self, handle, note):
        now[0] += 0.001
        return original(self, handle, note)

    Library.transfer = slow
    try:
        transport = connected(descriptors_per_post_max=1, post_budget_s=0.0015)
        transport._clock = clock
        for number in range(3):
            transport.start(job(number, count=3))
        posted = []
        for _ in range(9):
            before = library.log.count("transfer")
            began = now[0]
            transport.poll()
            posted.append(library.log.count("transfer") - before)
            assert now[0] - began <= 0.002
        assert sum(posted) == 9
        assert max(posted) == 1
        assert transport.statistics().post_longest_s == pytest.approx(0.001)
    finally:
        Library.transfer = original


def test_asking_for_states_is_bounded_and_hides_no_job(library):
    """Each question costs 0.2 ms here: a poll asks a few, and over some polls every job is asked."""
    now = [0.0]
    original = Library.check_xfer_state
    asked = []

    def slow(self, handle):
        now[0] += 0.0002
        asked.append(handle.name)
        return original(self, handle)

    library.script["transfer"] = ["DONE"] + ["PROC"] * 12
    Library.check_xfer_state = slow
    try:
        transport = connected(descriptors_per_post_max=1, post_budget_s=0.001)
        transport._clock = lambda: now[0]
        transport.start(job(9, count=1))  # so that the cost of a post is known
        transport.poll()
        for number in range(6):
            transport.start(job(number, count=2))
        transport.poll()
        for _ in range(12):
            began, before = now[0], len(asked)
            transport.poll()
            assert now[0] - began <= 0.0008
            assert 1 <= len(asked) - before <= 4
        assert len(set(asked)) == 12
    finally:
        Library.check_xfer_state = original


def test_prepared_lists_are_released_after_their_handle(library):
    """Order: the handle, then the lists it uses."""
    transport = connected(post_budget_s=10)
    transport.start(job(count=100))
    transport.poll()
    assert [line for line in library.log if line.startswith("release")] == [
        "release handle 1",  # 16 descriptors, then at most twice as many each time
        "release handle 2",
        "release handle 3",
        "release list of NIXL_INIT_AGENT",
        "release list of peer-agent",
    ]


def test_a_failed_registration_is_rolled_back_everywhere(library):
    """d13: the second agent refuses; what the first took is given back, and the call can be repeated."""
    transport = NixlTransport(SELF)
    for generation in ("g1", "g2"):
        transport.agent_info(PeerId("gen", generation, 0))
    registration = Handle(library.log, "first")
    library.script["register DRAM"] = [registration, NixlError("no memory")]
    with pytest.raises(TransportError, match="no memory"):
        transport.register([MemoryRegion(4096, 4096)])
    assert library.log.count("deregister") == 1
    transport.register([MemoryRegion(4096, 4096)])
    assert len(transport._registrations) == 1


def test_deregistration_attempts_every_agent_and_repeats_only_the_failed(library):
    """d14: one failure does not keep the others; the retry takes up what is left."""
    transport = NixlTransport(SELF)
    for generation in ("g1", "g2"):
        transport.agent_info(PeerId("gen", generation, 0))
    registration = transport.register([MemoryRegion(4096, 4096)])
    library.script["deregister"] = [NixlError("busy")]
    with pytest.raises(TransportError, match="busy"):
        transport.deregister(registration)
    assert library.log.count("deregister") == 2
    transport.deregister(registration)
    assert library.log.count("deregister") == 3


def test_an_agent_that_something_still_refers_to_is_not_called_destroyed(library):
    """Proof needs the library's object gone: a stray reference refuses, and the retry succeeds without it."""
    transport = connected()
    stray = next(iter(transport._agents.values())).nixl.agent
    with pytest.raises(TransportError, match="still referenced"):
        transport.destroy_agent(PEER.instance)
    assert transport.statistics().agents_destroyed == 0
    del stray
    transport.destroy_agent(PEER.instance)
    assert transport.statistics().agents_destroyed == 1
    transport.destroy_agent(PEER.instance)


def test_destroying_an_agent_ends_its_jobs_in_error(library):
    """In progress and queued alike; finished ones stay finished."""
    library.script["transfer"] = ["DONE", "PROC"]
    transport = connected(post_budget_s=10)
    for number in range(2):
        transport.start(job(number))
        transport.poll()
    transport.destroy_agent(PEER.instance)
    (progress,) = transport.poll().jobs
    assert (progress.operation.operation, progress.state, progress.posted) == (1, "error", 1)
    with pytest.raises(TransportError, match="not connected"):
        transport.start(job(2))


def test_an_agent_that_cannot_be_made_is_a_mapped_error(library):
    """The cause is kept, the transport stays usable."""
    library.script["create_backend {'ucx_error_handling_mode': 'peer'}"] = [NixlError("no plugin")]
    transport = NixlTransport(SELF)
    with pytest.raises(TransportError, match="no plugin") as raised:
        transport.agent_info(PEER)
    assert isinstance(raised.value.__cause__, NixlError)
    assert transport.agent_info(PEER).metadata == METADATA
    transport.close()
    with pytest.raises(TransportError, match="closed"):
        transport.agent_info(PEER)


def test_posts_keep_every_limit(library):
    """Random jobs and limits: grains and posts stay within descriptors and bytes, marks tile the write, every byte once."""
    generator = np.random.default_rng(5)
    posts: list = []
    library.sink = posts
    for number in range(200):
        count = int(generator.integers(1, 90))
        sizes = generator.integers(1, int(generator.choice([50, 5000])), count).astype(np.int64)
        sources, targets = np.cumsum(sizes) - sizes + 7, np.cumsum(sizes + 3) - sizes
        write = TransferJob(
            OperationIdentity(TransferIdentity(1, 0, "g1", 0), 0, number), PEER, sources, targets, sizes
        )
        limits = {
            "bytes_per_post_max": int(generator.integers(1, 20000)),
            "descriptors_per_post_max": int(generator.integers(1, 40)),
            "bytes_per_grain": int(generator.integers(1, 6000)),
            "descriptors_per_grain": int(generator.integers(1, 20)),
        }
        transport = connected(**limits, strided=False)
        transport.start(write)
        posts.clear()
        state = ""
        while state != "done":
            for progress in transport.poll().jobs:
                state = progress.state
        at = 0
        for mark, (local, remote) in posts:
            assert mark.index == at
            at += mark.extent
            assert 1 <= len(local) <= limits["descriptors_per_post_max"]
            assert local[:, 1].sum() <= limits["bytes_per_post_max"]
            assert (local[:, 1] == remote[:, 1]).all()
            if mark.extent == 1:
                assert len(local) <= limits["descriptors_per_grain"]
                assert local[:, 1].sum() <= limits["bytes_per_grain"]
        assert at == posts[0][0].count == progress.total
        rows = np.concatenate([np.stack([local[:, 0], remote[:, 0], local[:, 1]]) for _, (local, remote) in posts], 1)
        bytes_of = lambda at, size: np.concatenate([np.arange(a, a + s) for a, s in zip(at, size)])  # noqa: E731
        rows = rows.astype(np.int64)
        assert (bytes_of(rows[0], rows[2]) == bytes_of(sources, sizes)).all()
        assert (bytes_of(rows[1], rows[2]) == bytes_of(targets, sizes)).all()
        transport.forget(write.operation)
