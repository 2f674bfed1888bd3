"""The session worker of the vLLM connector on fakes: what an engine is told of its blocks, and when."""

from __future__ import annotations

import dataclasses
import errno
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest

import kv_bounce_planner as kv
from kv_bounce_planner.testing import FakeClock, FakeNetwork, FakeWorld

HERE = Path(__file__).resolve().parents[1] / "vllm"
LAYERS, HEADS, DIM = 2, 2, 8


@pytest.fixture(scope="module")
def glue() -> Any:
    """The module, which lies beside the engine that it is for and is in no package."""
    sys.path.insert(0, str(HERE))
    try:
        import kv_worker
    finally:
        sys.path.remove(str(HERE))
    return kv_worker


class Pair:
    """Producers with blocks of 8 tokens and consumers with blocks of 4, in one thread on fakes; the heads are split evenly."""

    def __init__(self, glue: ModuleType, producers: int = 1, consumers: int = 1, **settings: Any) -> None:
        self.glue = glue
        self.clock, self.network, self.world = FakeClock(), FakeNetwork(), FakeWorld()
        self.settings = glue.Settings(bounce_bytes=1 << 16, **settings)
        self.theirs = [self.pool(8, HEADS // producers) for _ in range(producers)]
        self.mine = [self.pool(4, HEADS // consumers) for _ in range(consumers)]
        for number, pool in enumerate(pool for pools in self.theirs for pool in pools):
            pool[:] = np.random.default_rng(number).random(pool.shape, np.float32)
        self.producers, self.consumers = [], []
        for rank, pools in enumerate(self.theirs):
            me = kv.PeerId("ctx", "c1", rank)
            self.producers.append(glue.Producer(me, *self.side(me, pools, producers), self.settings))
        for rank, pools in enumerate(self.mine):
            me, counts = kv.PeerId("gen", "g1", rank), {"head_total": HEADS, "ranks": consumers}
            self.consumers.append(glue.Consumer(me, *self.side(me, pools, consumers), self.settings, **counts))
        self.producer, self.consumer = self.producers[0], self.consumers[0]
        self.sources = msgspec.json.encode([each.source() for each in self.producers]).decode()

    def pool(self, tokens: int, heads: int) -> list[np.ndarray]:
        pools = [np.zeros((16, heads, tokens, 2 * DIM), np.float32) for _ in range(LAYERS)]
        for pool in pools:
            self.world.add_buffer(pool)
        return pools

    def side(self, me: kv.PeerId, pools: list[np.ndarray], ranks: int) -> tuple[kv.KVLayout, kv.SessionResources]:
        layout = kv.from_vllm(
            rank=me.rank,
            layer_ids=range(LAYERS),
            tensors=pools,
            head_total=HEADS,
            first_head=me.rank * HEADS // ranks,
            attention="cpu_attn",
            memory_kind="DRAM",
        )
        channel: Any = self.network.channel(me, linked=True)
        channel.address, channel.connect = "nowhere", lambda peer, address: None
        bounce = np.zeros(self.settings.bounce_bytes, np.uint8)
        self.world.add_buffer(bounce)
        arena = kv.BounceArena.of(bounce)
        return layout, kv.SessionResources(self.world.transport(me), channel, arena=arena, clock=self.clock)

    def turns(self, count: int = 12) -> None:
        for _ in range(count):
            for each in (*self.consumers, *self.producers):
                each.turn()

    def fetch(self, name: str = "r", transfer_id: int = 7, tokens: int = 13) -> None:
        blocks = tuple(range(3, 3 + -(-tokens // 4)))
        for each in self.consumers:
            each.submit(self.glue.Fetch(name, transfer_id, self.sources, blocks, 0, tokens))

    def serve(self, name: str = "r", transfer_id: int = 7, blocks: tuple[int, ...] = (9, 2)) -> None:
        for each in self.producers:
            each.submit(self.glue.Serve(name, transfer_id, blocks))

    def told(self) -> tuple[set[str], set[str], set[str]]:
        """Sent and received by every rank, and failed on any, since the last call."""
        there, here = [each.results() for each in self.producers], [each.results() for each in self.consumers]
        sent = set.intersection(*(each.sent for each in there))
        received = set.intersection(*(each.received for each in here))
        return sent, received, set().union(*(each.failed for each in here))


def values(ranks: list[list[np.ndarray]], blocks: tuple[int, ...], tokens: int) -> list[np.ndarray]:
    """K and V of a request as the kernel lays them, with the heads of all ranks: (tokens, heads, 2, dim) per layer."""
    found = []
    for layer in range(LAYERS):
        heads = []
        for pool in (pools[layer] for pools in ranks):
            count, held, size, _ = pool.shape
            halves = pool.reshape(count, held, 2, size * DIM)
            keys = halves[:, :, 0].reshape(count, held, DIM, size)
            rows = halves[:, :, 1].reshape(count, held, size, DIM)
            heads.append(
                [(keys[blocks[n // size], :, :, n % size], rows[blocks[n // size], :, n % size]) for n in range(tokens)]
            )
        found.append(np.concatenate([np.asarray(each).swapaxes(1, 2) for each in heads], axis=1))
    return found


def same(pair: Pair) -> bool:
    """Whether the whole prompt is where it belongs."""
    there, here = values(pair.theirs, (9, 2), 13), values(pair.mine, (3, 4, 5, 6), 13)
    return all(np.array_equal(sent, got) for sent, got in zip(there, here, strict=True))


@pytest.mark.parametrize("order", ["the decoding side first", "the prefilling side first"])
def test_each_side_learns_when_its_blocks_are_its_own_again(glue: Any, order: str) -> None:
    """Either may come first; the KV is there, and nothing is told before it is."""
    pair = Pair(glue)
    steps = [pair.fetch, pair.serve] if order == "the decoding side first" else [pair.serve, pair.fetch]
    steps[0]()
    pair.turns()
    assert pair.told() == (set(), set(), set())
    steps[1]()
    pair.turns()
    assert pair.told() == ({"r"}, {"r"}, set())
    assert same(pair)
    assert pair.consumer.timings[0][2] == 16 * LAYERS * HEADS * 2 * DIM * 4, (
        "whole blocks, because both sides have them"
    )


def test_a_source_that_nobody_asks_for_comes_back_at_its_time(glue: Any) -> None:
    """Sealed unposted is the proof; whoever asks later is refused, at once."""
    pair = Pair(glue, lend_timeout_s=5.0)
    pair.serve()
    pair.turns()
    pair.clock.advance(4.999)
    pair.turns()
    assert pair.told() == (set(), set(), set())
    pair.clock.advance(0.001)
    pair.turns()
    assert pair.told() == ({"r"}, set(), set())
    pair.fetch()
    pair.turns()
    assert pair.told() == (set(), {"r"}, {"r"})


def test_an_abandoned_request_gives_both_sides_their_blocks(glue: Any) -> None:
    """Taken back while its prefill runs: the destination comes back by the sender's word, the source when it is served."""
    pair = Pair(glue)
    pair.fetch()
    pair.turns()
    pair.consumer.submit(glue.Abandon("r", 7))
    pair.turns()
    assert pair.told() == (set(), {"r"}, set())
    pair.serve()
    pair.turns()
    pair.clock.advance(pair.settings.lend_timeout_s)
    pair.turns()
    assert pair.told() == ({"r"}, set(), set())


def test_an_abandoned_prefill_fails_who_waits_for_it(glue: Any) -> None:
    """At once, with the destination back."""
    pair = Pair(glue)
    pair.fetch()
    pair.turns()
    pair.producer.submit(glue.Abandon("r", 7))
    pair.turns()
    assert pair.told() == (set(), {"r"}, {"r"})


def test_a_transfer_is_served_once(glue: Any) -> None:
    """A number that is used again lends nothing, and the second request keeps nothing back."""
    pair = Pair(glue)
    pair.serve("one")
    pair.serve("two")
    pair.turns()
    assert pair.told() == ({"two"}, set(), set())


def test_more_than_may_be_open_ends_no_session(glue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes then is not lent, and not remembered when it is abandoned; afterwards all goes on."""
    monkeypatch.setattr(glue.Settings, "session", lambda _: kv.SessionConfig(transfers_max=1))
    pair = Pair(glue, lend_timeout_s=5.0)
    pair.serve("lent", 6)
    pair.serve("more", 8)
    pair.producer.submit(glue.Abandon("other", 9))
    pair.turns()
    assert pair.told() == ({"more"}, set(), set())
    pair.clock.advance(5.0)
    pair.turns()
    assert pair.told() == ({"lent"}, set(), set())
    pair.fetch()
    pair.serve()
    pair.turns()
    assert pair.told() == ({"r"}, {"r"}, set())


@pytest.mark.parametrize(
    "change",
    [{"sources": "nonsense"}, {"sources": "[]"}, {"blocks": (3,)}, {"first": 2}],
    ids=lambda change: next(iter(change)),
)
def test_a_fetch_that_cannot_be_planned_fails_alone(glue: Any, change: dict[str, Any]) -> None:
    """What a caller got wrong is an answer, not the end of the session."""
    pair = Pair(glue)
    wrong = glue.Fetch("w", 8, pair.sources, (3, 4, 5, 6), 0, 13)._replace(**change)
    pair.consumer.submit(wrong)
    pair.fetch()
    pair.serve()
    pair.turns()
    assert pair.told() == ({"r"}, {"r", "w"}, {"w"})


@pytest.mark.parametrize("change", [1 << 40, -1, "no KV"])
def test_a_source_that_is_none_fails_alone(glue: Any, change: int | str) -> None:
    """A client names sources: what nobody could have answered reaches neither the kernel nor the planner."""
    pair = Pair(glue)
    (source,) = msgspec.json.decode(pair.sources, type=list[glue.Source])
    if isinstance(change, int):
        source = msgspec.structs.replace(source, process=msgspec.structs.replace(source.process, pid=change))
    else:
        told = dataclasses.replace(pair.producer.layout, groups=())
        source = msgspec.structs.replace(source, layout=kv.encode_layout(told))
    wrong = msgspec.json.encode([source]).decode()
    pair.consumer.submit(glue.Fetch("w", 8, wrong, (3, 4, 5, 6), 0, 13))
    pair.fetch()
    pair.serve()
    pair.turns()
    assert pair.told() == ({"r"}, {"r", "w"}, {"w"})


def test_a_source_that_cannot_be_watched_fails_alone(glue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptor is left for now: nothing was exposed, and the next fetch is served."""
    pair = Pair(glue)

    def refused(_: int) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as full:
        full.setattr("os.pidfd_open", refused)
        pair.fetch("w", 8)
        pair.consumer.turn()
    assert pair.told() == (set(), {"w"}, {"w"})
    pair.fetch()
    pair.serve()
    pair.turns()
    assert pair.told() == ({"r"}, {"r"}, set())


def test_a_prefill_of_fewer_blocks_than_were_asked_for_fails_the_fetch(glue: Any) -> None:
    """Another prompt under the same number: nothing is written beyond what the source holds."""
    pair = Pair(glue)
    pair.fetch()
    pair.serve(blocks=(9,))
    pair.turns()
    assert pair.told() == ({"r"}, {"r"}, {"r"})
    assert not any(pool.any() for pools in pair.mine for pool in pools)


def test_a_count_that_a_peer_cannot_mean_fails_its_fetch_alone(glue: Any) -> None:
    """Refused as its answer; who asks next is served by the same session."""
    pair = Pair(glue)
    askers, pair.consumer._askers = pair.consumer._askers, lambda source: -1
    pair.fetch("wrong", 8)
    pair.serve("wrong", 8)
    pair.turns()
    assert pair.told() == (set(), {"wrong"}, {"wrong"})
    pair.consumer._askers = askers
    pair.fetch()
    pair.serve()
    pair.turns()
    assert pair.told() == ({"r"}, {"r"}, set())
    pair.clock.advance(pair.settings.lend_timeout_s)
    pair.turns()
    assert pair.told() == ({"wrong"}, set(), set())


def test_a_dead_writer_fails_its_requests_and_gives_their_blocks_back(glue: Any) -> None:
    """The process is not there (it began at another time): told by the first look, with the proof."""
    pair = Pair(glue)
    (source,) = msgspec.json.decode(pair.sources, type=list[glue.Source])
    process = msgspec.structs.replace(source.process, started=0)
    pair.sources = msgspec.json.encode([msgspec.structs.replace(source, process=process)]).decode()
    pair.world.kill(source.peer)
    pair.fetch()
    for _ in range(4):
        pair.consumer.turn()
    assert pair.told() == (set(), {"r"}, {"r"})


@pytest.mark.parametrize(("producers", "consumers"), [(1, 2), (2, 1), (2, 2)])
def test_unlike_numbers_of_ranks(glue: Any, producers: int, consumers: int) -> None:
    """Each rank asks for its heads where they are, and a source comes back when everybody was served who asks for its own."""
    pair = Pair(glue, producers, consumers)
    pair.fetch()
    pair.serve()
    pair.consumers.reverse()
    pair.turns(20)
    assert pair.told() == ({"r"}, {"r"}, set()) and same(pair)


def test_a_source_waits_for_every_rank_that_will_ask(glue: Any) -> None:
    """Served one of two: it is still lent."""
    pair = Pair(glue, 1, 2)
    pair.serve()
    late = pair.consumers.pop()
    pair.fetch()
    pair.turns(20)
    assert pair.told() == (set(), {"r"}, set())
    pair.consumers = [late]
    pair.fetch()
    pair.turns(20)
    assert pair.told() == ({"r"}, {"r"}, set())


def test_waiting_costs_less_than_moving(glue: Any) -> None:
    """Polls follow each other closely while something happens, and at a distance while a prompt is prefilled."""
    pair = Pair(glue)
    assert pair.consumer.pause_s() == glue.IDLE_S
    pair.fetch()
    pair.turns(1)
    assert pair.consumer.pause_s() == glue.BUSY_S
    pair.turns(glue.STILL_TURNS + 8)
    assert pair.consumer.pause_s() == glue.WAITING_S
    pair.world.landing = lambda job, part: "hold"
    pair.serve()
    pair.turns(glue.STILL_TURNS + 8)
    assert pair.producer.pause_s() == glue.BUSY_S, "bytes are under way, however long"
    pair.world.landing = lambda job, part: "land"
    pair.turns()
    assert pair.told() == ({"r"}, {"r"}, set())
    assert pair.producer.pause_s() == pair.consumer.pause_s() == glue.IDLE_S


def test_what_ends_the_thread_is_told_to_the_engine(glue: Any) -> None:
    """An engine whose session is gone must not wait for ever."""
    pair = Pair(glue)
    pair.consumer.submit(object())
    pair.consumer.start()
    pair.consumer._thread.join(30)
    with pytest.raises(RuntimeError, match="has ended"):
        pair.consumer.results()


def test_a_thread_serves_and_stops(glue: Any) -> None:
    """Commands wake it; ``stop`` ends thread and session."""
    pair = Pair(glue)
    pair.producer.start()
    pair.consumer.start()
    pair.fetch()
    pair.serve()
    received: set[str] = set()
    while "r" not in received:
        received |= pair.consumer.results().received
    pair.consumer.stop()
    pair.producer.stop()
    assert not pair.consumer._thread.is_alive() and not pair.producer._thread.is_alive()
