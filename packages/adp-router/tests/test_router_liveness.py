"""Liveness: every request that fits somewhere is placed within the bound that docs/design.md states and proves."""

import dataclasses
import random

import pytest

from adp_router import LeftoverReason, RankState, Router, RouterConfig, RouteRequest, Why

POLICIES = ("balanced", "round_robin", "prefix", "conversation")


class World:
    """An engine: ranks with totals, requests that hold what they need for at most ``longest`` calls, and a queue."""

    def __init__(self, rng, policy, totals_known):
        self.rng = rng
        self.size = rng.choice([1, 2, 3, 5])
        self.slots = [rng.randrange(2, 7) for _ in range(self.size)]
        self.blocks = [rng.randrange(10, 41) for _ in range(self.size)]
        self.longest = rng.randrange(1, 5)
        self.rounds = rng.randrange(1, 4)
        self.totals_known = totals_known
        self.router = Router(policy, config=RouterConfig(starvation_rounds=self.rounds))
        self.cached = policy == "prefix"
        self.draining = set()
        self.running, self.waiting = [], []
        self.now = self.serial = self.drain_events = 0
        #: By request: when it came, who was ahead of it then, drain events so far.
        self.story = {}

    def fits_empty(self, request, rank):
        return 1 + request.child_count <= self.slots[rank] and request.kv_block_count <= self.blocks[rank]

    def possible(self, request):
        ranks = [request.target_rank] if request.strict else range(self.size)
        return [rank for rank in ranks if self.fits_empty(request, rank)]

    def arrive(self, count):
        for _ in range(count):
            rng = self.rng
            target = rng.choice([None, None, rng.randrange(self.size)])
            request = RouteRequest(
                self.serial, rng.randrange(1, 2000), target, target is not None and rng.random() < 0.6,
                rng.choice([0, 0, 0, 1, 2, 5, 9]), rng.choice([0, 1, 5, 10, 25, 60]),
                rng.choice([None, f"c{rng.randrange(4)}"]),
                tuple(rng.randrange(500) for _ in range(self.size)) if rng.random() < 0.3 else (),
            )  # fmt: skip
            self.serial += 1
            ahead = sum(bool(self.possible(r)) for r in self.waiting)
            self.waiting.append(request)
            self.story[request.request_id] = (self.now, ahead, self.drain_events)

    def drain(self):
        """Ranks go out of service and come back; one always stays."""
        for rank in range(1, self.size):
            if self.rng.random() < 0.03:
                self.draining ^= {rank}
                self.drain_events += 1

    def states(self):
        found = []
        for rank in range(self.size):
            mine = [r for _, k, r in self.running if k == rank]
            slots = self.slots[rank] - sum(1 + r.child_count for r in mine)
            blocks = self.blocks[rank] - sum(r.kv_block_count for r in mine)
            totals = (self.slots[rank], self.blocks[rank], None) if self.totals_known else (None, None, None)
            found.append(RankState(rank, sum(r.token_count for r in mine), len(mine), slots, blocks, None,
                                   rank in self.draining, *totals))  # fmt: skip
        return found

    def bound(self, request):
        """Calls: the theorem's. Time in which every rank that it could go to drains does not count."""
        _, ahead, drains = self.story[request.request_id]
        return self.rounds + (ahead + 1 + 2 * (self.drain_events - drains)) * (self.longest + 1)

    def step(self):
        self.now += 1
        self.running = [entry for entry in self.running if entry[0] > self.now]
        ranks = self.states()
        result = self.router.route(self.waiting, ranks)
        assert not result.errors
        placed = {i: rank for rank, ids in result.assignments.items() for i in ids}
        left = {x.request_id: x.reason for x in result.leftovers}
        assert placed.keys().isdisjoint(left)
        assert len(placed) + len(left) == len(self.waiting)
        rest = []
        for request in self.waiting:
            ident = request.request_id
            if ident in placed:
                assert placed[ident] in self.possible(request)
                self.running.append((self.now + self.rng.randrange(1, self.longest + 1), placed[ident], request))
                continue
            able = self.possible(request)
            if self.totals_known:
                assert (left[ident] is LeftoverReason.IMPOSSIBLE) == (not able)
            # Drained ones wait with a clock that stands still.
            if able and set(able) <= self.draining:
                came, ahead, drains = self.story[ident]
                self.story[ident] = (came + 1, ahead, drains)
            elif able:
                assert self.now - self.story[ident][0] <= self.bound(request), (ident, self.story[ident], left[ident])
            rest.append(dataclasses.replace(request, waited_rounds=request.waited_rounds + 1))
        self.waiting = rest


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("totals_known", [True, False])
@pytest.mark.parametrize("traces", [12, pytest.param(1250, marks=pytest.mark.slow)])
def test_every_request_that_fits_somewhere_is_placed_within_the_bound(policy, totals_known, traces):
    """Bursts, one at a time, drains, pins, children, wishes, impossible ones, all at once; then the queue empties."""
    for trace in range(traces):
        world = World(random.Random(f"{policy}-{totals_known}-{trace}"), policy, totals_known)
        burst = world.rng.random() < 0.5
        for _ in range(40):
            world.drain()
            if burst:
                world.arrive(world.rng.choice([0, 0, 0, 0, 12]))
            else:
                world.arrive(world.rng.randrange(3))
            world.step()
        world.draining.clear()
        world.drain_events += 1
        while any(world.possible(request) for request in world.waiting):
            world.step()


def test_requests_that_never_fit_stop_nobody():
    """Eight that need twice what an idle rank has, on eight idle ranks: all the small ones are placed."""
    big = [RouteRequest(i, 10, kv_block_count=2000, waited_rounds=16) for i in range(8)]
    small = [RouteRequest(100 + i, 10, kv_block_count=1) for i in range(64)]
    for total in (None, 1000):
        ranks = [RankState(r, free_kv_blocks=1000, total_kv_blocks=total) for r in range(8)]
        result = Router().route(big + small, ranks)
        assert sum(map(len, result.assignments.values())) == 64
        reasons = {x.reason for x in result.leftovers}
        assert reasons == {LeftoverReason.IMPOSSIBLE if total else LeftoverReason.NO_FREE_KV_BLOCKS}
        if total:
            assert "needs 2000 KV blocks; the nearest, rank 0, has 1000 in all" in result.explain(3)


@pytest.mark.parametrize(
    ("total", "most", "over", "text"),
    [
        ({"total_slots": 4}, {"child_count": 3}, {"child_count": 4}, "needs 5 slots"),
        ({"total_kv_blocks": 9}, {"kv_block_count": 9}, {"kv_block_count": 10}, "needs 10 KV blocks"),
        ({"total_tokens": 50}, {"token_count": 50}, {"token_count": 51}, "needs 51 tokens"),
    ],
)
def test_each_total_makes_impossible_what_exceeds_it(total, most, over, text):
    """On every rank: one that needs all of it is possible, however many come at once; one more is not, and is told why."""
    ranks = [RankState(0, 1, 1, 0, **total), RankState(1, 1, 1, 0, **{name: n - 1 for name, n in total.items()})]
    base = {"token_count": 5}
    requests = [RouteRequest(**{"request_id": i, **base, **most}) for i in range(4)]
    result = Router().route(requests, ranks)
    assert {x.reason for x in result.leftovers} == {LeftoverReason.NO_FREE_SLOT}
    result = Router().route([*requests, RouteRequest(**{"request_id": 9, **base, **over})], ranks)
    found = {x.request_id: x for x in result.leftovers}
    assert found[9].reason is LeftoverReason.IMPOSSIBLE
    assert f"{text}; the nearest, rank 0, has" in found[9].detail
    assert {found[i].reason for i in range(4)} == {LeftoverReason.NO_FREE_SLOT}


def test_impossible_on_its_target_alone():
    """A strict request that another rank could take; a wish moves on."""
    ranks = [RankState(0, total_slots=2, free_slots=2), RankState(1, total_slots=9, free_slots=9)]
    strict = RouteRequest(1, 5, 0, strict=True, child_count=4)
    wish = RouteRequest(2, 5, 0, child_count=4)
    result = Router().route([strict, wish], ranks)
    assert result.assignments == {0: (), 1: (2,)}
    assert result.leftovers[0].reason is LeftoverReason.IMPOSSIBLE
    assert "needs 5 slots; its target, rank 0, has 2 in all" in result.explain(1)


def serve(requests_per_call, first, calls):
    """One rank with three slots, each request holds one call's slot for two calls; when ``first`` is placed (call)."""
    router = Router(config=RouterConfig(starvation_rounds=4))
    waiting, running = [first], []
    for call in range(calls):
        waiting += requests_per_call(call)
        running = [(end, r) for end, r in running if end > call]
        free = 3 - sum(1 + r.child_count for _, r in running)
        result = router.route(waiting, [RankState(0, 0, len(running), free, total_slots=3)])
        placed = set(result.assignments[0])
        if first.request_id in placed:
            return call
        running += [(call + 2, r) for r in waiting if r.request_id in placed]
        waiting = [
            dataclasses.replace(r, waited_rounds=r.waited_rounds + 1) for r in waiting if r.request_id not in placed
        ]
    return None


@pytest.mark.parametrize("strict", [True, False])
def test_a_stream_of_small_ones_cannot_starve_a_large_one(strict):
    """A targeted request with children against untargeted small ones, and an untargeted one against strict small ones."""
    big = RouteRequest(-1, 9, 0 if strict else None, strict=strict, child_count=2)
    stream = lambda call: [  # noqa: E731
        RouteRequest(10 * call + i, 1, None if strict else 0, strict=not strict) for i in range(3)
    ]
    assert serve(stream, big, 40) <= 4 + 3


def test_a_rank_is_kept_free_until_its_request_is_placed():
    """It does not hop to whichever rank is nearest at the moment."""
    router = Router(config=RouterConfig(starvation_rounds=1))
    big, small = RouteRequest(0, 9, child_count=3, waited_rounds=1), RouteRequest(1, 1)
    first = router.route([big, small], [RankState(0, 0, 1, 3, total_slots=4), RankState(1, 0, 3, 1, total_slots=4)])
    assert first.assignments == {0: (), 1: (1,)}
    nearer = [RankState(0, 0, 2, 2, total_slots=4), RankState(1, 0, 1, 3, total_slots=4)]
    assert router.route([big, small], nearer).assignments == {0: (), 1: (1,)}
    # Gone from the queue: nothing is kept for it.
    assert router.route([RouteRequest(2, 1), RouteRequest(3, 1)], nearer).assignments[0]
    assert Router(config=RouterConfig(starvation_rounds=1)).route([big, small], nearer).assignments == {0: (1,), 1: ()}


@pytest.mark.parametrize("strict", [True, False])
def test_a_target_does_not_take_the_rank_that_is_kept_free(strict):
    """Strict ones stay over and are told why; wishes go elsewhere; the rank empties."""
    big = RouteRequest(0, 9, child_count=3, waited_rounds=99)
    ranks = [RankState(0, 0, 1, 3, total_slots=4), RankState(1, 50, 3, 1, total_slots=4)]
    result = Router().route([big, RouteRequest(1, 1, 0, strict=strict)], ranks)
    assert result.assignments == {0: (), 1: () if strict else (1,)}
    assert not strict or result.leftovers[1].reason is LeftoverReason.HELD_FOR_STARVING


def test_a_rank_that_is_too_small_when_empty_is_not_kept_free():
    """Nearer now, but never enough: the other one is kept."""
    ranks = [RankState(0, 0, 1, 2, total_slots=3), RankState(1, 0, 3, 1, total_slots=4)]
    result = Router().route([RouteRequest(0, 9, child_count=3, waited_rounds=99), RouteRequest(1, 1)], ranks)
    assert result.assignments == {0: (1,), 1: ()}


def test_a_draining_rank_is_not_kept_free():
    """It will take nothing when it is empty: the other one is kept."""
    ranks = [RankState(0, 0, 1, 3, draining=True), RankState(1, 0, 3, 1), RankState(2, 5, 9, 0)]
    result = Router().route([RouteRequest(0, 9, child_count=3, waited_rounds=99), RouteRequest(1, 1)], ranks)
    assert result.assignments == {0: (), 1: (), 2: ()}


IDLE, BUSY = {"token_count": 0, "request_count": 0}, {"token_count": 5, "request_count": 1}


@pytest.mark.parametrize(
    ("history", "kept"),
    [
        ([], True),
        ([{**IDLE, "free_kv_blocks": 2}], False),
        ([{**IDLE, "free_kv_blocks": 4}], True),
        ([{"token_count": 5, "free_kv_blocks": 2}], True),
        ([{"request_count": 1, "free_kv_blocks": 2}], True),
        ([{**IDLE, "free_kv_blocks": 4}, {**IDLE, "free_kv_blocks": 2}], True),
        ([{**IDLE, "free_kv_blocks": 2}, {**BUSY, "free_kv_blocks": 1}], False),
        ([{**IDLE, "free_kv_blocks": 2}, None], True),
        ([{**IDLE, "free_kv_blocks": 2}, {**IDLE, "free_slots": 9}], True),
        ([{**IDLE, "free_slots": 9}, {**IDLE, "free_kv_blocks": 2}], True),
        ([{**IDLE, "free_kv_blocks": 2}, IDLE], True),
    ],
)
def test_what_a_rank_had_free_when_it_was_idle_says_whether_it_is_kept_free(history, kept):
    """The most of each capacity that it had then; not what it had while it held something; nothing of one that was gone."""
    router = Router(config=RouterConfig(starvation_rounds=1))
    other = RankState(1, 90, 1, free_slots=0)
    for fields in history:
        router.route([], [other] if fields is None else [RankState(0, **fields), other])
    requests = [RouteRequest(0, 9, kv_block_count=4, waited_rounds=1), RouteRequest(1, 1)]
    result = router.route(requests, [RankState(0, **BUSY, free_kv_blocks=1), other])
    assert result.assignments == {0: () if kept else (1,), 1: ()}


def test_a_home_that_is_kept_free_is_not_taken_by_its_conversation():
    """The turn goes elsewhere, the home stays."""
    router = Router("conversation", config=RouterConfig(starvation_rounds=1))
    ranks = [RankState(0, 0, 1, 3), RankState(1, 5, 3, 1)]
    router.route([RouteRequest(0, 1, target_rank=0, conversation_id="c")], ranks)
    big = RouteRequest(1, 9, child_count=3, waited_rounds=1)
    result = router.route([big, RouteRequest(2, 1, conversation_id="c")], ranks)
    assert result.assignments == {0: (), 1: (2,)}
    assert [d.why for d in result.decisions] == [Why.OVERFLOW]
    assert router.home_of("c") == 0


def test_at_most_half_of_the_ranks_are_kept_free():
    """Many large requests do not stop the others; the longest wait comes first."""
    big = [RouteRequest(i, 9, child_count=3, waited_rounds=20 + i) for i in range(4)]
    ranks = [RankState(r, 0, 1, 3, total_slots=4) for r in range(4)]
    result = Router().route([*big, *(RouteRequest(10 + i, 1) for i in range(6))], ranks)
    assert sum(not ids for ids in result.assignments.values()) == 2
    assert sum(map(len, result.assignments.values())) == 6


def test_a_starving_request_goes_where_it_belongs_if_it_can():
    """Its target, or its conversation's home; else the least loaded."""
    router = Router("conversation", config=RouterConfig(starvation_rounds=1))
    ranks = [RankState(r, token_count=100 * (2 - r)) for r in range(3)]
    router.route([RouteRequest(0, 1, target_rank=0, conversation_id="c")], ranks)
    late = [
        RouteRequest(1, 1, conversation_id="c", waited_rounds=2),
        RouteRequest(2, 1, target_rank=1, waited_rounds=2),
        RouteRequest(3, 1, waited_rounds=2),
    ]
    result = router.route(late, ranks)
    assert result.assignments == {0: (1,), 1: (2,), 2: (3,)}
    assert {d.why for d in result.decisions} == {Why.STARVING}
