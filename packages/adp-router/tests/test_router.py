"""Routing: the seed's vectors, targets, capacities, errors, policies, determinism; nothing lost, nothing placed twice."""

import json
import os
import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adp_router import (
    Exclusion,
    LeftoverReason,
    RankState,
    RankStateError,
    RouteBatch,
    Router,
    RouterConfig,
    RouterConfigError,
    RouteRequest,
    Rule,
    Why,
    batch_from,
    requests_from,
)


def states(active, tokens=(10, 15, 20, 25), cap=3):
    return [RankState(r, t, a, free_slots=cap - a) for r, (a, t) in enumerate(zip(active, tokens, strict=False))]


def free(count, length=3):
    return [RouteRequest(i, length) for i in range(count)]


@pytest.mark.parametrize(
    ("active", "requests", "wanted", "left"),
    [
        ((0, 0, 0, 0), free(7), {0: (0, 1), 1: (2, 3), 2: (4, 5), 3: (6,)}, 0),
        ((1, 2, 3, 0), free(13), {0: (0, 1), 1: (2,), 2: (), 3: (3, 4, 5)}, 7),
        ((0, 0, 0, 0), free(13), {0: (0, 1, 3), 1: (2, 4, 6), 2: (5, 7, 9), 3: (8, 10, 11)}, 1),
        ((3, 3, 3, 0), [], {0: (), 1: (), 2: (), 3: ()}, 0),
    ],
)
@pytest.mark.parametrize("compat", [False, True])
def test_vectors_of_the_router_this_one_grew_from(active, requests, wanted, left, compat):
    """Without pins and children both modes give the original's order."""
    result = Router(compat=compat).route(requests, states(active))
    assert result.assignments == wanted
    assert len(result.leftovers) == left
    assert {x.reason for x in result.leftovers} <= {LeftoverReason.NO_FREE_SLOT}


def test_strict_wins_the_last_slot_over_a_wish():
    """Whichever came first; in compatible mode the one that lost moves on, otherwise a wish moves and strict stays."""
    wish, strict = RouteRequest(0, 3, target_rank=1), RouteRequest(1, 3, target_rank=1, strict=True)
    ranks = states((3, 2, 3, 3))
    for requests in ([wish, strict], [strict, wish]):
        result = Router().route(requests, ranks)
        assert result.assignments[1] == (1,)
        assert [x.request_id for x in result.leftovers] == [0]


@pytest.mark.parametrize(
    ("counts", "tokens", "cap", "lengths", "wanted"),
    [
        ((0, 1, 2, 1), (5, 15, 25, 10), 2, (3, 6, 2), {0: (1, 2), 1: (), 2: (), 3: (0,)}),
        ((0, 0, 0), (0, 0, 0), 2, (1, 5, 3), {0: (1,), 1: (2,), 2: (0,)}),
        ((1, 1, 1, 1), (0, 0, 0, 0), 2, (1, 1, 1, 1), {0: (0,), 1: (1,), 2: (2,), 3: (3,)}),
    ],
)
def test_balance_vectors(counts, tokens, cap, lengths, wanted):
    """Longest first to the least loaded; ties to the lower rank."""
    ranks = [RankState(r, t, c, free_slots=cap - c) for r, (c, t) in enumerate(zip(counts, tokens, strict=True))]
    requests = [RouteRequest(i, n) for i, n in enumerate(lengths)]
    assert Router(compat=True).route(requests, ranks).assignments == wanted


def test_no_rank_exceeds_its_slots():
    """[40, 40, 40, 64] of 64 and eight new ones: none goes where there is no room, the expected count covers all."""
    ranks = [RankState(r, 0, c, free_slots=64 - c) for r, c in enumerate((40, 40, 40, 64))]
    result = Router().route(free(8), ranks)
    assert result.assignments[3] == ()
    finals = [c + len(result.assignments[r]) for r, c in enumerate((40, 40, 40, 64))]
    assert max(finals) <= result.expected_request_count
    over = Router().route(free(2), [RankState(0, 0, 5, free_slots=-1), RankState(1, 0, 0, free_slots=4)])
    assert over.expected_request_count >= 5
    short = Router().route(free(8), [RankState(0, 0, 1, free_slots=2)])
    assert short.expected_request_count == 3


def test_pinned_tokens_count():
    """8000 tokens pinned on rank 0 keep free requests away from it; the compatible mode ignores them, as the original."""
    requests = [RouteRequest(0, 8000, target_rank=0), RouteRequest(1, 10), RouteRequest(2, 10)]
    ranks = [RankState(0, free_slots=9), RankState(1, free_slots=9)]
    config = RouterConfig(count_multiplier=2.0)
    assert Router(config=config).route(requests, ranks).assignments == {0: (0,), 1: (1, 2)}
    assert 2 in Router(compat=True).route(requests, ranks).assignments[0]


def test_children_take_slots():
    """A request with nine children needs ten slots; what follows it is still admitted elsewhere."""
    requests = [RouteRequest(0, 50, child_count=9), RouteRequest(1, 10)]
    result = Router().route(requests, [RankState(0, free_slots=8), RankState(1, free_slots=8)])
    assert [(x.request_id, x.reason) for x in result.leftovers] == [(0, LeftoverReason.NO_FREE_SLOT)]
    assert sum(map(len, result.assignments.values())) == 1


@pytest.mark.parametrize(
    ("state", "request_", "reason"),
    [
        ({"free_slots": 0}, {}, LeftoverReason.NO_FREE_SLOT),
        ({"free_kv_blocks": 3}, {"kv_block_count": 4}, LeftoverReason.NO_FREE_KV_BLOCKS),
        ({"free_tokens": 99}, {}, LeftoverReason.NO_FREE_TOKENS),
        ({"draining": True}, {}, LeftoverReason.ALL_DRAINING),
        ({"free_slots": 0}, {"target_rank": 0, "strict": True}, LeftoverReason.TARGET_FULL),
        ({"draining": True}, {"target_rank": 0, "strict": True}, LeftoverReason.TARGET_DRAINING),
    ],
)
@pytest.mark.parametrize("policy", ["balanced", "round_robin", "prefix", "conversation"])
def test_what_cannot_be_placed_has_a_reason(policy, state, request_, reason):
    """Every capacity, a draining rank, a strict target: a leftover, never an IndexError or a silent drop."""
    result = Router(policy).route([RouteRequest(7, 100, **request_)], [RankState(0, **state)])
    assert [(x.request_id, x.reason) for x in result.leftovers] == [(7, reason)]
    assert reason.value in result.explain(7)


def test_a_full_or_draining_rank_is_skipped_and_thin_requests_pass_fat_ones():
    """A rank without blocks for a long request still takes a short one."""
    ranks = [
        RankState(0, 0, 0, free_kv_blocks=2),
        RankState(1, 5000, 0, free_kv_blocks=100),
        RankState(2, draining=True),
    ]
    requests = [RouteRequest(0, 1600, kv_block_count=100), RouteRequest(1, 16, kv_block_count=1)]
    result = Router(config=RouterConfig(count_multiplier=9.0)).route(requests, ranks)
    assert result.assignments == {0: (1,), 1: (0,), 2: ()}
    fat = RouteRequest(2, 6000, kv_block_count=101)
    result = Router(compat=True).route([fat, *requests], ranks)
    assert result.assignments == {0: (1,), 1: (0,), 2: ()}
    assert [(x.request_id, x.reason) for x in result.leftovers] == [(2, LeftoverReason.NO_FREE_KV_BLOCKS)]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"target_rank": 9}, "target_rank"),
        ({"target_rank": -3}, "target_rank"),
        ({"token_count": -1}, "token_count"),
        ({"child_count": -1}, "child_count"),
        ({"kv_block_count": -1}, "kv_block_count"),
        ({"strict": True}, "strict"),
        ({"prefix_matches": (1, 2, 3)}, "prefix_matches"),
        ({"request_id": 1}, "request_id"),
    ],
)
def test_a_bad_request_is_refused_alone(change, field):
    """An error that names request, field and value; the others are routed."""
    bad = RouteRequest(**{"request_id": 0, "token_count": 5, **change})
    result = Router().route([RouteRequest(1, 5), bad], [RankState(0), RankState(1)])
    assert [(e.request_id, e.field) for e in result.errors] == [(bad.request_id, field)]
    assert sum(map(len, result.assignments.values())) == 1


@pytest.mark.parametrize(
    "ranks", [[], [RankState(0), RankState(0)], [RankState(0, token_count=-1)], [RankState(0, request_count=-1)]]
)
def test_bad_ranks_are_refused_and_change_nothing(ranks):
    """The router's memory stays as it was."""
    router = Router("round_robin")
    before = router._memory.digest_part()
    with pytest.raises(RankStateError, match="ranks"):
        router.route(free(3), ranks)
    assert router._memory.digest_part() == before
    assert router.statistics().calls == 0


@pytest.mark.parametrize(
    "bad",
    [
        {"count_multiplier": 0.5}, {"starvation_rounds": 0}, {"match_fraction_min": 1.5}, {"load_weight": -1.0},
        {"conversations_max": 0},
    ],
)  # fmt: skip
def test_bad_settings_are_refused(bad):
    """Field and value."""
    with pytest.raises(RouterConfigError, match=next(iter(bad))):
        RouterConfig(**bad)


def test_unknown_policies_are_refused():
    """By name; compat goes with the balanced one only."""
    with pytest.raises(RouterConfigError, match="'fastest'"):
        Router("fastest")
    with pytest.raises(RouterConfigError, match="compat"):
        Router("prefix", compat=True)


def test_a_large_request_does_not_starve():
    """Left over often enough, it goes first, and the nearest rank is kept free for it until it fits."""
    big = RouteRequest(0, 100, child_count=7, waited_rounds=16)
    small = [RouteRequest(i, 10) for i in range(1, 7)]
    result = Router().route([*small, big], [RankState(0, 0, 2, free_slots=6), RankState(1, 0, 6, free_slots=2)])
    assert result.assignments[0] == ()
    reasons = {x.request_id: x.reason for x in result.leftovers}
    assert reasons[0] is LeftoverReason.NO_FREE_SLOT
    assert LeftoverReason.HELD_FOR_STARVING in reasons.values()
    result = Router().route([*small, big], [RankState(0, 0, 0, free_slots=8), RankState(1, 0, 6, free_slots=2)])
    assert result.decisions[0].request_id == 0
    assert result.decisions[0].why is Why.STARVING


def test_round_robin_takes_turns_over_calls():
    """The turn goes on where the last call ended; a full rank is passed over."""
    router = Router("round_robin")
    ranks = [RankState(0), RankState(1, free_slots=0), RankState(2)]
    assert router.route(free(3), ranks).assignments == {0: (0, 2), 1: (), 2: (1,)}
    assert router.route(free(1), ranks).assignments == {0: (), 1: (), 2: (0,)}


def test_a_cached_prefix_attracts_above_the_threshold():
    """Half of the prompt cached: there. At 60 %, a threshold of 0.5 attracts and one of 0.7 does not."""
    ranks = [RankState(0, 0), RankState(1, 0)]
    request = RouteRequest(4, 100, prefix_matches=(0, 60))
    for threshold, why in ((0.5, Why.CACHED_PREFIX), (0.7, Why.LEAST_LOADED)):
        decision = (
            Router("prefix", config=RouterConfig(match_fraction_min=threshold)).route([request], ranks).decisions[0]
        )
        assert decision.why is why
        assert why is Why.LEAST_LOADED or decision.rank == 1


@pytest.mark.parametrize(("multiplier", "count"), [(4.0, 8), (1.0, 2)])
def test_affinity_is_bounded_by_the_count_limit(multiplier, count):
    """Eight requests all cached on rank 0 of four: a multiplier of 4 lets all go there, 1 only a fair share."""
    requests = [RouteRequest(i, 100, prefix_matches=(100, 0, 0, 0)) for i in range(8)]
    config = RouterConfig(count_multiplier=multiplier, load_weight=0.0)
    result = Router("prefix", config=config).route(requests, [RankState(r) for r in range(4)])
    assert len(result.assignments[0]) == count
    assert not result.leftovers


def test_conversations_stay_at_home_and_overflow_without_moving():
    """Every turn of a conversation is placed; while its home is full the turn goes elsewhere and the home stays."""
    router = Router("conversation")
    ranks = [RankState(r, free_slots=8) for r in range(3)]
    home = router.route([RouteRequest(0, 9, conversation_id="c")], ranks).decisions[0].rank
    for turn in range(40):
        decision = router.route([RouteRequest(turn, 9, conversation_id="c")], ranks).decisions[0]
        assert (decision.rank, decision.why) == (home, Why.HOME)
    full = [RankState(r, free_slots=0 if r == home else 8) for r in range(3)]
    away = router.route([RouteRequest(99, 9, conversation_id="c")], full).decisions[0]
    assert away.why is Why.OVERFLOW
    assert router.home_of("c") == home


def test_an_overflow_takes_nobodys_turn():
    """Conversations that begin go round; one that is away from its full home does not count."""
    router = Router("conversation")
    ranks = [RankState(r, 1, 1) for r in range(3)]
    assert router.route([RouteRequest(0, 9, conversation_id="c")], ranks).assignments[0] == (0,)
    away = router.route([RouteRequest(1, 9, conversation_id="c")], [RankState(0, 1, 1, free_slots=0), *ranks[1:]])
    assert [(d.rank, d.why) for d in away.decisions] == [(1, Why.OVERFLOW)]
    assert router.route([RouteRequest(2, 9, conversation_id="d")], ranks).assignments[1] == (2,)


def test_homes_are_forgotten_least_recently_used_first():
    """Two homes are remembered of five."""
    router = Router("conversation", config=RouterConfig(conversations_max=2))
    for i in range(5):
        router.route([RouteRequest(i, 1, conversation_id=f"c{i}")], [RankState(0), RankState(1)])
    assert [i for i in range(5) if router.home_of(f"c{i}") is not None] == [3, 4]


def test_a_target_gives_a_new_conversation_its_home():
    """An explicit target binds; a binding that exists beats a later target."""
    router = Router("conversation")
    ranks = [RankState(r) for r in range(3)]
    router.route([RouteRequest(0, 1, target_rank=2, conversation_id="c")], ranks)
    assert router.home_of("c") == 2
    router.route([RouteRequest(1, 1, target_rank=0, conversation_id="c")], ranks)
    assert router.home_of("c") == 2


class Counting:
    """An engine request whose token list is expensive."""

    def __init__(self, identity, tokens, parameters=None):
        self.request_id = identity
        self._tokens = tokens
        self.reads = 0
        self.scheduling_params = parameters

    @property
    def input_token_ids(self):
        self.reads += 1
        return self._tokens


class Untouchable(Counting):
    @property
    def input_token_ids(self):
        raise AssertionError("token list was read")


class Parameters:
    def __init__(self, rank=None, relax=None):
        self.attention_dp_rank = rank
        self.attention_dp_relax = relax


def test_token_lists_are_read_once_or_never():
    """Once per request without a length, not at all with one."""
    objects = [Counting(i, list(range(10 + i))) for i in range(20)]
    Router().route(requests_from(objects), [RankState(0), RankState(1)])
    assert [o.reads for o in objects] == [1] * 20
    objects = [Untouchable(i, []) for i in range(20)]
    result = Router().route(requests_from(objects, length=lambda o: 5), [RankState(0), RankState(1)])
    assert sum(map(len, result.assignments.values())) == 20


class Item:
    """A queue's item around a request; says all that can be said."""

    def __init__(self, identity):
        self.request = Counting(identity, [1, 2])
        self.request_id = identity
        self.child_req_ids = [1, 2]
        self.request.conversation_id = "c"
        self.request.scheduling_params = Parameters(1, False)


def test_attributes_that_are_not_named_are_not_looked_for():
    """Named ones are found, however few; unknown names are refused."""
    items = [Item(i) for i in range(3)]
    batch = batch_from(items)
    assert (batch.child_counts, batch.target_ranks, batch.conversation_ids) == ([2] * 3, [1] * 3, ["c"] * 3)
    batch = batch_from(items, attributes=("request", "conversation_id"))
    assert (batch.child_counts, batch.target_ranks, batch.conversation_ids) == (None, None, ["c"] * 3)
    assert batch.token_counts == [2] * 3
    batch = batch_from(items, length=lambda item: 5, attributes=())
    assert (list(batch.request_ids), batch.token_counts, batch.conversation_ids) == ([0, 1, 2], [5] * 3, None)
    with pytest.raises(RouterConfigError, match=r"attributes: want some of request, .*, got 'requests'"):
        batch_from(items, attributes=("requests",))


def test_ids_are_found_one_by_one_where_they_differ():
    """``request_id`` on some, ``id`` on others, on the item or on its request; an object without is an error."""

    class Bare:
        """Only what it is given."""

        def __init__(self, **values):
            self.__dict__.update(values)

    objects = [Bare(request_id=5), Bare(id=6), Bare(request_id=None, id=7), Bare(request=Bare(request_id=8))]
    assert batch_from(objects, length=lambda o: 1).request_ids == [5, 6, 7, 8]
    with pytest.raises(AttributeError):
        batch_from([Bare(request_id=1), Bare()], length=lambda o: 1)


@pytest.mark.parametrize(
    "said",
    [
        {}, {"target_rank": 0}, {"strict": True, "target_rank": 0}, {"strict": 0}, {"child_count": 2}, {"child_count": None},
        {"kv_block_count": 3}, {"conversation_id": "c"}, {"conversation_id": ""}, {"prefix_matches": (1,)},
        {"prefix_matches": []}, {"waited_rounds": 4},
    ],
)  # fmt: skip
@pytest.mark.parametrize("place", [0, 2])
def test_columns_say_what_the_objects_say(said, place):
    """One request that says something, first or last: its column holds it, the others' defaults beside it."""
    requests = [RouteRequest(i, 5, **(said if i == place else {})) for i in range(3)]
    batch = RouteBatch.of(requests)
    columns = {
        "target_rank": batch.target_ranks, "strict": batch.strict, "child_count": batch.child_counts,
        "kv_block_count": batch.kv_block_counts, "conversation_id": batch.conversation_ids,
        "prefix_matches": batch.prefix_matches, "waited_rounds": batch.waited_rounds,
    }  # fmt: skip
    for name, column in columns.items():
        values = [getattr(request, name) for request in requests]
        assert column == values or (column is None and values == [getattr(RouteRequest(0, 0), name)] * 3)


def test_relax_unset_counts_as_relaxed():
    """None, missing and True are wishes; only False is strict. Several of them do not raise."""
    objects = [Counting(i, [1], Parameters(0, relax)) for i, relax in enumerate([None, True, False])]
    objects.append(Counting(3, [1]))
    assert [r.strict for r in requests_from(objects)] == [False, False, True, False]
    assert [r.target_rank for r in requests_from(objects)] == [0, 0, 0, None]


def random_case(rng):
    size = rng.choice([1, 2, 4, 8])
    ranks = [
        RankState(
            r * 3, rng.randrange(1000), rng.randrange(10), rng.choice([None, rng.randrange(20)]),
            rng.choice([None, rng.randrange(200)]), rng.choice([None, rng.randrange(5000)]), rng.random() < 0.1,
        )
        for r in range(size)
    ]  # fmt: skip
    requests = [
        RouteRequest(
            i, rng.randrange(1000), rng.choice([None, None, rng.randrange(size) * 3, 77]), False, rng.choice([0, 0, 3]),
            rng.randrange(40), rng.choice([None, f"c{rng.randrange(5)}"]),
            rng.choice([(), tuple(rng.randrange(500) for _ in range(size))]), rng.choice([0, 20]),
        )
        for i in range(rng.randrange(40))
    ]  # fmt: skip
    return requests, ranks


def check(requests, ranks, result, cached=False):
    """What must hold of every result, whatever the policy; ``cached``: cached tokens need no room."""

    def computed(r, position):
        return max(r.token_count - r.prefix_matches[position], 0) if cached and r.prefix_matches else r.token_count

    placed = [i for ids in result.assignments.values() for i in ids]
    everything = placed + [x.request_id for x in result.leftovers] + [e.request_id for e in result.errors]
    assert sorted(everything) == sorted(r.request_id for r in requests)
    by_id = {r.request_id: r for r in requests}
    for position, state in enumerate(ranks):
        mine = [by_id[i] for i in result.assignments[state.rank]]
        if mine:
            assert not state.draining
        if state.free_slots is not None:
            assert sum(1 + r.child_count for r in mine) <= max(state.free_slots, 0)
        if state.free_kv_blocks is not None:
            assert sum(r.kv_block_count for r in mine) <= state.free_kv_blocks
        if state.free_tokens is not None:
            assert sum(computed(r, position) for r in mine) <= state.free_tokens
    assert len(result.decisions) == len(placed)
    # Before the shares there is one span; then one for each round.
    assert len(result.log.spans) <= 1 + len(ranks) + 1
    assert all(x.reason is not LeftoverReason.COUNT_LIMIT for x in result.leftovers)
    assert all(e.field == "target_rank" for e in result.errors)


@pytest.mark.parametrize("policy", ["balanced", "round_robin", "prefix", "conversation"])
def test_random_batches_lose_nothing_and_exceed_nothing(policy):
    """Each request once, capacities kept, over many calls of one router; a second router fed the same says the same."""
    rng = random.Random(f"{policy}-1")
    first, second = Router(policy), Router(policy)
    for _ in range(400):
        requests, ranks = random_case(rng)
        result = first.route(requests, ranks)
        check(requests, ranks, result, cached=policy == "prefix")
        again = second.route(RouteBatch.of(requests), ranks)
        assert (again.assignments, again.leftovers, again.digest) == (
            result.assignments,
            result.leftovers,
            result.digest,
        )
        assert first._memory.digest_part() == second._memory.digest_part()
    assert first.statistics() == second.statistics()


def dumb_balanced(requests, ranks):
    """The policy's definition, without a heap: longest first, each to the least loaded rank that can take it; what only the
    fair share kept out is shared again by the ranks that can still take some of it."""
    tokens = {s.rank: s.token_count for s in ranks}
    counts = {s.rank: s.request_count for s in ranks}
    slots = {s.rank: s.free_slots for s in ranks}
    blocks = {s.rank: s.free_kv_blocks for s in ranks}
    found = {s.rank: [] for s in ranks}
    order = [s.rank for s in ranks]

    def room(r, k):
        return slots[k] >= 1 and blocks[k] >= r.kv_block_count

    rest = list(requests)
    for attempt in range(len(ranks) + 1):
        among = [k for k in order if any(room(r, k) for r in rest)] or order
        fullest = max(counts.values())
        most = max(fullest, *(counts[k] + slots[k] for k in among))
        fair = -(-(sum(counts[k] for k in among) + len(rest)) // len(among)) if attempt < len(ranks) else most
        share = (
            -(-(sum(map(len, (found[k] for k in among))) + len(rest)) // len(among)) if attempt < len(ranks) else most
        )
        share = max(share, *map(len, found.values()))
        limits = {s.rank: max(max(fair, fullest), s.request_count + share) for s in ranks}
        again = []
        for r in sorted(rest, key=lambda r: -r.token_count):
            able = [k for k in order if counts[k] < limits[k] and room(r, k)]
            if able:
                best = min(able, key=lambda k: (tokens[k], counts[k], order.index(k)))
                tokens[best] += r.token_count
                counts[best] += 1
                slots[best] -= 1
                blocks[best] -= r.kv_block_count
                found[best].append(r.request_id)
            else:
                again.append(r)
        rest = [r for r in requests if r in again and any(room(r, k) for k in order)]
        if not rest:
            break
    return {k: tuple(v) for k, v in found.items()}


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_balanced_is_what_it_says(data):
    """Against the definition written without a heap, tight and loose capacities, all of the loops."""
    size = data.draw(st.integers(1, 5))
    number = st.integers(0, 60)
    tight = data.draw(st.booleans())
    ranks = [
        RankState(r, data.draw(number), data.draw(st.integers(0, 4)), data.draw(st.integers(0, 12)) if tight else 99,
                  data.draw(st.integers(0, 60)) if tight else 9999)
        for r in range(size)
    ]  # fmt: skip
    lengths = data.draw(st.lists(st.integers(0, 50), max_size=25))
    requests = [RouteRequest(i, n, kv_block_count=n // 4) for i, n in enumerate(lengths)]
    assert Router().route(requests, ranks).assignments == dumb_balanced(requests, ranks)


@pytest.mark.parametrize(("size", "load"), [(3, 1 << 58), (255, 9), (256, 9), (257, 9), (300, 1 << 50)])
def test_many_ranks_and_huge_loads_are_placed_as_few_and_small_ones(size, load):
    """Keys of the heap beyond 64 bits, positions beyond a byte: the definition all the same."""
    rng = random.Random(size)
    ranks = [RankState(r, load + rng.randrange(3), 0, 9999, 999_999) for r in range(size)]  # all fit anywhere
    requests = [RouteRequest(i, 100 + rng.choice([0, 7, rng.randrange(9)])) for i in range(2 * size + 16)]
    router = Router()
    result = router.route(requests, ranks)
    wanted = dumb_balanced(requests, ranks)
    assert result.assignments == wanted
    assert {r: result.ids_on(r) for r in range(size)} == wanted
    assert router.statistics().placed_by_rank == {r: len(ids) for r, ids in wanted.items()}


def counts_of(result):
    return [len(ids) for ids in result.assignments.values()]


LENGTHS = {
    "equal": lambda rng: 100,
    "near": lambda rng: 8192 + rng.randrange(100),
    "factor of two": lambda rng: rng.choice([64, 65, 127, 128]),
    "lognormal": lambda rng: int(rng.lognormvariate(5, 1.5)),
    "unlike": lambda rng: 1 + rng.randrange(3000),
    "few and far": lambda rng: rng.choice([10, 10, 10, 11, 4000, 9000]),
    "mostly nothing": lambda rng: rng.choice([0, 0, 0, 1, 5000]),
}


@pytest.mark.parametrize("lengths", LENGTHS)
def test_stretches_are_placed_as_one_by_one(lengths):
    """Hundreds of requests, ranks at unlike loads and counts, slots that end here and there: the definition all the same."""
    for seed in range(12):
        rng = random.Random(f"{lengths}-{seed}")
        spread = rng.choice([1, 64, 8192, 1 << 50])
        ranks = [
            RankState(r, rng.randrange(spread), rng.randrange(4), rng.choice([9999, 9999, rng.randrange(60)]), 99_999)
            for r in range(rng.choice([1, 2, 3, 8, 9, 13]))
        ]
        if len(ranks) == 9:
            ranks[0] = RankState(0, free_slots=0)
        requests = [
            RouteRequest(i, LENGTHS[lengths](rng), kv_block_count=rng.randrange(3))
            for i in range(rng.choice([15, 16, 17, 250, 600]))
        ]
        router = Router()
        result = router.route(requests, ranks)
        assert result.assignments == dumb_balanced(requests, ranks)
        assert router.statistics().placed_by_rank == {r: len(ids) for r, ids in result.assignments.items()}
        given = {r: (sum(requests[i].token_count for i in ids), len(ids)) for r, ids in result.assignments.items()}
        least = [min(column) for column in zip(*given.values(), strict=True)]
        beyond = {r: (tokens - least[0], count - least[1]) for r, (tokens, count) in given.items()}
        assert router._memory.given == {r: entry for r, entry in beyond.items() if entry != (0, 0)}
        for decision in result.decisions:
            assert decision.rule not in (Rule.NOT_HELD, Rule.NEXT_IN_TURN)
            assert all(p.exclusion in (Exclusion.COUNT_LIMIT, Exclusion.NO_FREE_SLOT) for p in decision.passed_over)


def test_rounds_of_lengths_below_what_loads_differ_by_are_none():
    """Long ones in rounds; the short ones, as like each other as those, go to who holds least."""
    ranks = [RankState(r, r * 70, 0, 9999, 9999) for r in range(8)]
    requests = [RouteRequest(i, 3000 if i < 64 else 100) for i in range(128)]
    result = Router().route(requests, ranks)
    assert result.assignments == dumb_balanced(requests, ranks)


def test_a_rank_may_take_two_in_a_row_and_no_more_than_its_slots():
    """Loads that differ by exactly a length: the one with fewer requests is first again."""
    ranks = [RankState(0, 0, 0, 16, 99), RankState(1, 10, 5, 99, 99)]
    requests = [RouteRequest(i, 10) for i in range(32)]
    result = Router().route(requests, ranks)
    assert result.assignments == dumb_balanced(requests, ranks)
    assert result.assignments[0][:2] == (0, 1)
    assert len(result.assignments[0]) == 16


@pytest.mark.parametrize("capacity", ["free_tokens", "free_kv_blocks"])
def test_many_requests_do_not_overfill_a_rank(capacity):
    """Dozens that do not all fit the tightest rank: it is filled to the brim, whichever capacity it is."""
    ranks = [RankState(0, **{capacity: 70}), RankState(1, **{capacity: 9999})]
    result = Router().route([RouteRequest(i, 7, kv_block_count=7) for i in range(64)], ranks)
    assert counts_of(result) == [10, 54]


def test_what_a_stretch_brought_is_given():
    """A rank that had no slot is behind by what the others were given, at whatever load they stood: its turn comes first."""
    router = Router()
    requests = [RouteRequest(i, 10) for i in range(64)]
    result = router.route(requests, [RankState(r, 1000, 1, free_slots=99 * (r < 2)) for r in range(3)])
    assert counts_of(result) == [32, 32, 0]
    assert counts_of(router.route([RouteRequest(99, 10)], [RankState(r) for r in range(3)])) == [0, 0, 1]


def test_the_digest_notices_every_difference():
    """Settings, memory, any field of any request or rank."""
    request, state = RouteRequest(1, 5), RankState(0)
    base = Router().route([request], [state]).digest
    assert Router().route([request], [state]).digest == base
    others = [
        Router("round_robin").route([request], [state]),
        Router(config=RouterConfig(starvation_rounds=3)).route([request], [state]),
        Router(compat=True).route([request], [state]),
    ]
    changes = [
        {"request_id": 2}, {"token_count": 6}, {"target_rank": 0}, {"child_count": 1}, {"kv_block_count": 1},
        {"conversation_id": "c"}, {"prefix_matches": (1,)}, {"waited_rounds": 1}, {"request_id": 2**64 - 1},
        {"request_id": -1}, {"request_id": 2**32 - 1}, {"request_id": 2**32}, {"request_id": 2**32 + 1},
        {"request_id": 2**63}, {"request_id": -(2**63)}, {"token_count": 2**32 + 5}, {"token_count": -1},
    ]  # fmt: skip
    others += [Router().route([RouteRequest(**{"request_id": 1, "token_count": 5, **c})], [state]) for c in changes]
    for c in ({"token_count": 1}, {"request_count": 1}, {"free_slots": 9}, {"free_kv_blocks": 9}, {"free_tokens": 9}):
        others.append(Router().route([request], [RankState(0, **c)]))
    digests = [r.digest for r in others]
    assert base not in digests
    assert len(set(digests)) == len(digests)


SCRIPT = """
import json, random, sys
sys.path.insert(0, {here!r})
from test_router import random_case
from adp_router import Router
out = []
for policy in ("balanced", "round_robin", "prefix", "conversation"):
    rng, router = random.Random(5), Router(policy)
    for _ in range(30):
        result = router.route(*random_case(rng))
        out.append([sorted(result.assignments.items()), result.digest.hex()])
print(json.dumps(out))
"""


def test_processes_with_other_hash_seeds_agree():
    """Nothing depends on the order of sets or on hash(): equal results in every process."""
    outputs = set()
    for seed in ("0", "1", "4242"):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT.format(here=os.path.dirname(__file__))], capture_output=True, text=True,
            env={**os.environ, "PYTHONHASHSEED": seed}, check=True,
        )  # fmt: skip
        outputs.add(done.stdout)
    assert len(outputs) == 1
    assert len(json.loads(outputs.pop())) == 120


def test_a_rank_asks_for_its_own_ids():
    """Ranks need not be numbered from 0; what was given may change meanwhile; an unknown rank is an error."""
    ids = [5, 6, 7]
    result = Router().route(RouteBatch(ids, [3, 2, 1]), [RankState(7), RankState(2)])
    ids.clear()
    assert (result.ids_on(7), result.ids_on(2)) == ((5,), (6, 7)) == tuple(result.assignments.values())
    assert "assignments={7: (5,), 2: (6, 7)}" in repr(result)
    with pytest.raises(KeyError):
        result.ids_on(0)


def test_explain_says_why():
    """One line per request: where and why, or why not."""
    result = Router().route(
        [RouteRequest(1, 50), RouteRequest(2, 40, target_rank=1), RouteRequest(3, 5, target_rank=8)],
        [RankState(0, 7, 1), RankState(1, free_slots=1)],
    )
    assert result.explain(2) == "request 2 (40 tokens) -> rank 1: its target (0 tokens in 0 requests before it)"
    assert result.explain(1).endswith("rank 0: least loaded (7 tokens in 1 requests before it)")
    assert "request 3 refused: target_rank" in result.explain()
    with pytest.raises(KeyError):
        result.explain(99)


def test_statistics_add_up():
    """Placed, left over, refused; by rank and by reason."""
    router = Router()
    router.route(
        [RouteRequest(0, 1), RouteRequest(1, 1, target_rank=0), RouteRequest(2, 1), RouteRequest(3, -1)],
        [RankState(0, free_slots=2)],
    )
    s = router.statistics()
    assert (s.calls, s.placed, s.left_over, s.refused) == (1, 2, 1, 1)
    assert s.placed_by_rank == {0: 2}
    assert s.placed_by_reason == {"target": 1, "least_loaded": 1}
    assert s.left_over_by_reason == {"no_free_slot": 1}
    s.placed_by_rank[0] = s.placed_by_reason["target"] = s.left_over_by_reason["no_free_slot"] = 99
    assert router.statistics().placed_by_rank == {0: 2}
    assert router.statistics().placed_by_reason == {"target": 1, "least_loaded": 1}
    assert router.statistics().left_over_by_reason == {"no_free_slot": 1}
