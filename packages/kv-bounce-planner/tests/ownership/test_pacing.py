"""What a poll may take while it posts: against a library whose costs are scripted, and the estimate by itself."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kv_bounce_planner.sessions import MemoryRegion, NixlConfig, NixlTransport, PeerId, TransferIdentity
from kv_bounce_planner.sessions.identity import OperationIdentity, decode_mark
from kv_bounce_planner.transports import _nixl
from kv_bounce_planner.transports.interface import AgentInfo, TransferJob
from kv_bounce_planner.transports.pacing import PostPace

SELF = PeerId("ctx", "c1", 1)


class Costly:
    """Stands for ``nixl_agent``: each post takes ``overhead + per descriptor + per byte`` of a clock that only it moves."""

    now = 0.0
    terms = (0.0, 0.0, 0.0)
    asking = 0.0
    state = "DONE"
    checked = "PROC"
    posts: list = []

    def __init__(self, name, config):
        self.agent = type("Inner", (), {})()

    def create_backend(self, name, parameters):
        pass

    def register_memory(self, rows, kind):
        return None

    def get_agent_metadata(self):
        return b"nixlSerDes|fake"

    def add_remote_agent(self, data):
        return b"peer-agent"

    def get_new_notifs(self):
        return {}

    def get_xfer_descs(self, rows, kind):
        return rows

    def initialize_xfer(self, operation, local, remote, agent, note):
        return Handle(len(local), int(local[:, 1].sum()))

    def prep_xfer_dlist(self, agent, rows, kind):
        return Handle(int(rows[0, 4]), int(rows[0, 1]))

    def make_prepped_xfer(self, operation, local, index, remote, remote_index, note):
        return Handle(len(index), len(index) * local.bytes)

    def transfer(self, handle, note):
        overhead, per_descriptor, per_byte = Costly.terms
        Costly.now += overhead + per_descriptor * handle.count + per_byte * handle.bytes
        Costly.posts.append((decode_mark(note), handle.count, handle.bytes))
        return Costly.state

    def check_xfer_state(self, handle):
        Costly.now += Costly.asking
        return Costly.checked


class Handle:
    def __init__(self, count, byte_count):
        self.count, self.bytes, self._released = count, byte_count, False

    def release(self):
        self._released = True


@pytest.fixture
def costly(monkeypatch):
    Costly.now, Costly.terms, Costly.asking, Costly.state = 0.0, (0.0, 0.0, 0.0), 0.0, "DONE"
    Costly.checked, Costly.posts = "PROC", []
    monkeypatch.setattr(_nixl, "nixl_agent", Costly)
    monkeypatch.setattr(_nixl, "nixl_agent_config", lambda **settings: settings)
    return Costly


def connected(*peers, **settings):
    transport = NixlTransport(SELF, config=NixlConfig(**settings), clock=lambda: Costly.now)
    transport.register([MemoryRegion(4096, 1 << 40)])
    for peer in peers:
        transport.connect(peer, AgentInfo("peer-agent", b"nixlSerDes|fake"))
    return transport


def job(peer, number, count, size, *, regular=False, seed=0):
    index = np.arange(count, dtype=np.int64)
    if not regular:
        index = np.random.default_rng(seed).permutation(index)
    operation = OperationIdentity(TransferIdentity(1, 0, peer.generation, 0), 1, number)
    return TransferJob(
        operation, peer, 4096 + index * 2 * size, 4096 + index * 3 * size, np.full(count, size, np.int64)
    )


def smallest_post_s(count, size):
    """What one grain costs here: 16 descriptors or 256 KiB, whichever is less."""
    grain = min(count, max(1, min(16, (256 << 10) // size)))
    overhead, per_descriptor, per_byte = Costly.terms
    return overhead + per_descriptor * grain + per_byte * grain * min(size, 256 << 10)


@pytest.mark.parametrize("block", range(4))
def test_a_poll_exceeds_its_budget_by_at_most_one_smallest_post(costly, block):
    """Whatever posts cost, from the first poll on: cold, warm, regular or not, tiny or huge fragments.

    Beyond that, only a write that is one post may take three quarters of a budget more.
    """
    generator = random.Random(block)
    for trial in range(60):
        Costly.terms = tuple(10 ** generator.uniform(*each) for each in ((-7, -3.5), (-7, -4), (-12, -8.5)))
        budget = 10 ** generator.uniform(-3.3, -2)
        peer = PeerId("gen", "g1", 0)
        transport = connected(peer, post_budget_s=budget)
        size = int(2 ** generator.uniform(0, 22))
        count = generator.choice((1, 5, 200, 3000))
        regular = generator.random() < 0.3
        for number in range(2):
            transport.start(job(peer, number, count, size, regular=regular, seed=trial))
        ended = 0
        while ended < 2:
            began, before = Costly.now, len(Costly.posts)
            ended += sum(write.state == "done" for write in transport.poll().jobs)
            posts = Costly.posts[before:]
            whole = len(posts) > 0 and posts[0][0].extent == posts[0][0].count
            allowed = budget * (1.0 + _nixl.WHOLE if whole else 1.0) + smallest_post_s(count, size)
            assert Costly.now - began <= allowed * (1 + 1e-9), (Costly.terms, budget, size, count, posts)
        for number in range(2):
            marks = [mark for mark, _, _ in Costly.posts if mark.operation.operation == number]
            assert sum(mark.extent for mark in marks) == marks[0].count
        Costly.posts.clear()


def test_the_budget_is_used(costly):
    """Bounds could be kept by posting little: at 2.6 us a descriptor a poll posts what fits, and few posts do it."""
    Costly.terms = (60e-6, 2.6e-6, 0.1e-9)
    peer = PeerId("gen", "g1", 0)
    transport = connected(peer, post_budget_s=0.001)
    transport.start(job(peer, 0, 32768, 128))
    took = []
    while not any(write.state == "done" for write in transport.poll().jobs):
        took.append(Costly.now)
    polls = np.diff(took)
    assert np.median(polls) > 0.9e-3
    assert len(Costly.posts) < 140


def test_a_poll_after_costs_rose_is_within_its_budget_again(costly):
    """Ten times dearer from one post to the next: that poll cannot know, the next one does."""
    Costly.terms = (60e-6, 2.6e-6, 0.1e-9)
    peer = PeerId("gen", "g1", 0)
    transport = connected(peer, post_budget_s=0.001)
    transport.start(job(peer, 0, 32768, 128))
    for _ in range(20):
        transport.poll()
    Costly.terms = tuple(10 * term for term in Costly.terms)
    before = len(Costly.posts)
    transport.poll()
    assert len(Costly.posts) == before + 1
    for _ in range(50):
        began = Costly.now
        transport.poll()
        assert Costly.now - began <= 0.001 + smallest_post_s(32768, 128)


def test_a_write_goes_on_even_if_one_grain_costs_more_than_the_budget(costly):
    """One smallest post a poll, never two."""
    Costly.terms = (0.0, 1e-3, 0.0)
    peer = PeerId("gen", "g1", 0)
    transport = connected(peer, post_budget_s=0.001)
    transport.start(job(peer, 0, 64, 128))
    for poll in range(4):
        transport.poll()
        assert [count for _, count, _ in Costly.posts] == [16] * (poll + 1)


def test_asking_counts_and_what_is_left_is_posted(costly):
    """Time spent on asking for states counts: what is left of the budget after it is what a post may take."""
    Costly.terms, Costly.state, Costly.checked = (0.0, 10e-6, 0.0), "PROC", "DONE"
    peer = PeerId("gen", "g1", 0)
    transport = connected(peer, post_budget_s=0.001)
    transport.start(job(peer, 0, 30000, 128))
    for _ in range(20):
        transport.poll()
    Costly.asking = 45e-6
    for _ in range(20):
        began, before = Costly.now, len(Costly.posts)
        transport.poll()
        assert Costly.now - began <= 0.001 + 16 * 10e-6
        assert len(Costly.posts) > before


@pytest.mark.parametrize("agents", [1, 3])
def test_what_was_only_queued_is_bounded_by_the_budget_too(costly, monkeypatch, agents):
    """A full socket: posts return at once and one later call does all of their work. It finds one budget's worth, an agent."""
    Costly.terms, Costly.state, Costly.checked = (20e-6, 8e-6, 0.0), "PROC", "DONE"
    peers = [PeerId("gen", f"g{number}", 0) for number in range(agents)]
    transport = connected(*peers, post_budget_s=0.001)
    for peer in peers:
        transport.start(job(peer, 0, 20000, 128))
    original, pending, full = Costly.transfer, {}, [False]

    def transfer(self, handle, note):
        began = Costly.now
        state = original(self, handle, note)
        if full[0]:
            pending[self] = pending.get(self, 0.0) + Costly.now - began
            Costly.now = began + 1e-6
        return state

    def check(self, handle):
        if full[0]:
            return "PROC"
        Costly.now += pending.pop(self, 0.0)
        return "DONE"

    monkeypatch.setattr(Costly, "transfer", transfer)
    monkeypatch.setattr(Costly, "check_xfer_state", check)
    generator = random.Random(agents)
    ended, polls = 0, 0
    while ended < agents:
        full[0] = generator.random() < 0.5
        began = Costly.now
        ended += sum(write.state == "done" for write in transport.poll().jobs)
        assert Costly.now - began <= 2 * 0.001 + 16 * 8e-6
        polls += 1
    assert polls < agents * 20000 * 8e-6 / 0.001 * 4  # and it goes on


def test_no_peer_is_starved_by_another_with_much_to_write(costly):
    """One post fills a poll's budget here: agents take turns in being first."""
    Costly.terms = (0.0, 1e-4, 0.0)
    peers = [PeerId("gen", f"g{number}", 0) for number in range(5)]
    transport = connected(*peers, post_budget_s=0.001)
    for peer in peers:
        transport.start(job(peer, 0, 3000, 128))
    for _ in range(20):
        transport.poll()
    posts = [mark.operation.transfer.endpoint_generation for mark, _, _ in Costly.posts]
    assert {posts.count(peer.generation) for peer in peers} == {4}


def test_fragments_are_looked_at_in_steps(costly, monkeypatch):
    """A regular job of many rows is found regular over several polls, each within the budget; then it goes as strides."""
    Costly.terms = (0.0, 1e-6, 0.0)
    looked = []
    original = _nixl._Regular.step

    def step(self):
        Costly.now += 0.0009
        looked.append(Costly.now)
        original(self)

    monkeypatch.setattr(_nixl._Regular, "step", step)
    peer = PeerId("gen", "g1", 0)
    transport = connected(peer, post_budget_s=0.001)
    transport.start(job(peer, 0, 3 * _nixl.EXAMINED_PER_STEP, 128, regular=True))
    while not Costly.posts:
        began = Costly.now
        transport.poll()
        assert Costly.now - began <= 0.0019
    assert len(looked) == 4
    (agent,) = transport._agents.values()
    assert next(iter(agent.jobs.values())).lists


@pytest.mark.parametrize("block", range(4))
def test_affine_costs_are_never_underrated(block):
    """The curve against random constant costs: no prediction, at any size, is below the truth."""
    generator = random.Random(block)
    for _ in range(200):
        overhead, per_unit = (10 ** generator.uniform(-7, -3) for _ in range(2))
        pace = PostPace()
        for _ in range(30):
            units = 2 ** generator.uniform(0, 10)
            predicted = pace.predict_s(units)
            assert predicted is None or predicted >= (overhead + per_unit * units) * (1 - 1e-9)
            left = 10 ** generator.uniform(-6, -2)
            fitting = pace.fitting(left, 1.0)
            if predicted is not None and fitting:
                assert overhead + per_unit * fitting <= left * (1 + 1e-9)
            pace.learn(units, overhead + per_unit * units)


def test_cheaper_posts_lower_the_estimate_and_dearer_ones_raise_it_at_once():
    """And a surprise is all that is known from then on; sizes at most double."""
    pace = PostPace()
    assert pace.predict_s(16) is None and pace.fitting(1.0, 16) == 16 and pace.fitting(0.0, 16) == 0
    pace.learn(16, 1e-4)
    assert pace.fitting(1.0, 16) == 32
    pace.learn(32, 1.5e-4)
    pace.learn(64, 2.5e-4)
    assert pace.predict_s(48) == pytest.approx(2.48e-4)  # 1.8 and 3.16 at 32 and 64: each 0.4 nearer to what was seen
    pace.learn(64, 4e-4)
    assert pace.predict_s(64) == pytest.approx(4e-4)
    assert pace.predict_s(32) == pytest.approx(2e-4)
    pace.learn(64, 1.8e-4)
    assert 1.8e-4 < pace.predict_s(64) < 4e-4
    pace.learn(64, 1e-2)
    assert pace.predict_s(16) == pace.predict_s(64) == 1e-2
    assert pace.fitting(5e-3, 16) == 0
