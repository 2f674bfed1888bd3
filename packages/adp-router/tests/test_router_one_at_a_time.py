"""Requests that come one at a time, as at a service: turns, the rule that decided, prefixes, conversations."""

import heapq
import random
import statistics
from collections import OrderedDict

import pytest

from adp_router import Exclusion, RankState, Router, RouterConfig, RouteRequest, Rule, Why
from adp_router._homes import Homes


def place(router, request, ranks):
    """The decision for one request."""
    return router.route([request], ranks).decisions[0]


def test_ties_rotate():
    """Idle ranks that finish before the next request comes: each gets a quarter, and is told that it was its turn."""
    router = Router()
    decisions = [place(router, RouteRequest(i, 100), [RankState(r) for r in range(4)]) for i in range(100)]
    found = [decision.rank for decision in decisions]
    assert [found.count(r) for r in range(4)] == [25] * 4
    assert found[:4] == [0, 1, 2, 3]
    assert {decision.rule for decision in decisions} == {Rule.ITS_TURN}
    assert "least loaded, and its turn among equals" in str(decisions[-1])


def test_ties_of_nothing_to_compute_rotate_by_sequences():
    """Loads of 0 tokens (requests decide, then turns): a request with three children is four of them."""
    router = Router()
    sizes = [3, 0, 0, 0, 0, 0, 0, 0]
    idle = [RankState(0), RankState(1)]
    found = [place(router, RouteRequest(i, 0, child_count=n), idle).rank for i, n in enumerate(sizes)]
    assert found == [0, 1, 1, 1, 1, 0, 1, 0]


def test_tokens_decide_for_one_request_not_counts():
    """10,000 tokens in one request against 2,000 in two: the second, and explain says the rule that decided."""
    result = Router().route([RouteRequest(7, 100)], [RankState(0, 10_000, 1), RankState(1, 2_000, 2)])
    assert result.assignments == {0: (), 1: (7,)}
    assert result.explain() == "request 7 (100 tokens) -> rank 1: least loaded (2000 tokens in 2 requests before it)"
    router, loads = Router(), [RankState(0, 10_000, 1), RankState(1, 2_000, 2)]
    for number in range(100):
        rank = place(router, RouteRequest(number, 100), loads).rank
        loads[rank] = RankState(rank, loads[rank].token_count + 100, loads[rank].request_count + 1)
    assert [state.token_count for state in loads] == [11_000, 11_000]


@pytest.mark.parametrize(
    ("requests", "ranks", "rule", "passed"),
    [
        ([RouteRequest(1, 5)], [RankState(0, 9, 1), RankState(1, 3, 1)], Rule.LEAST_LOADED, ()),
        ([RouteRequest(1, 5)], [RankState(0, 3, 2), RankState(1, 3, 1)], Rule.FEWEST_REQUESTS, ()),
        ([RouteRequest(1, 5)], [RankState(0, 3, 1), RankState(1, 3, 1)], Rule.ITS_TURN, ()),
        ([RouteRequest(1, 5)], [RankState(0, 3, draining=True), RankState(1, 9)], Rule.WITH_ROOM, (Exclusion.DRAINING,)),
        ([RouteRequest(1, 5)], [RankState(0, 3, free_slots=0), RankState(1, 9)], Rule.WITH_ROOM, (Exclusion.NO_FREE_SLOT,)),
        (
            [RouteRequest(1, 5, kv_block_count=3)], [RankState(0, 3, free_kv_blocks=2), RankState(1, 9)], Rule.WITH_ROOM,
            (Exclusion.NO_FREE_KV_BLOCKS,),
        ),
        ([RouteRequest(1, 5)], [RankState(0, 3, free_tokens=4), RankState(1, 9)], Rule.WITH_ROOM, (Exclusion.NO_FREE_TOKENS,)),
        (
            [RouteRequest(2, 9, 0, True), RouteRequest(3, 8, 0, True), RouteRequest(1, 5)], [RankState(0), RankState(1, 90)],
            Rule.IN_SHARE, (Exclusion.COUNT_LIMIT,),
        ),
        (
            [RouteRequest(2, 9, 0, True, 3, waited_rounds=99), RouteRequest(1, 5)],
            [RankState(0, 3, 1, 2), RankState(1, 90, 1, 2)], Rule.NOT_HELD, (Exclusion.HELD_FOR_STARVING,),
        ),
    ],
)  # fmt: skip
def test_the_rule_that_decided_is_named(requests, ranks, rule, passed):
    """With the ranks that had less load and why each was passed over."""
    result = Router().route(requests, ranks)
    decision = next(d for d in result.decisions if d.request_id == 1)
    assert decision.rule is rule
    assert tuple(p.exclusion for p in decision.passed_over) == passed
    line = result.explain(1)
    assert rule.value in line
    assert all(e.value in line for e in passed)


def test_an_explanation_counts_as_the_call_did():
    """Children and KV blocks of those before it: load in sequences, and a rank that they left without room."""
    requests = [
        RouteRequest(1, 50, child_count=3, kv_block_count=2),
        RouteRequest(2, 30),
        RouteRequest(3, 20, kv_block_count=3),
    ]
    ranks = [RankState(0, free_kv_blocks=4), RankState(1, 100, free_kv_blocks=9)]
    first, second, third = Router(config=RouterConfig(count_multiplier=9.0)).route(requests, ranks).decisions
    assert (first.rank, second.rank, third.rank) == (0, 0, 1)
    assert (second.load_tokens, second.load_requests) == (50, 4)
    assert [(p.rank, p.load_tokens, p.load_requests, p.exclusion) for p in third.passed_over] == [
        (0, 80, 5, Exclusion.NO_FREE_KV_BLOCKS)
    ]


def test_an_explanation_is_true_of_every_decision():
    """Random calls: who is called least loaded has no less loaded rank beside it that could take the request."""
    rng = random.Random(4)
    router = Router()
    rules = set()
    for _ in range(300):
        ranks = [
            RankState(r, rng.randrange(6), rng.randrange(3), rng.choice([None, 0, 1, 3]), rng.choice([None, 4]),
                      draining=rng.random() < 0.1)
            for r in range(4)
        ]  # fmt: skip
        requests = [
            RouteRequest(i, rng.randrange(1, 4), child_count=rng.choice([0, 0, 1]), kv_block_count=rng.randrange(3),
                         waited_rounds=rng.choice([0, 0, 20]))
            for i in range(rng.randrange(1, 7))
        ]  # fmt: skip
        for decision in router.route(requests, ranks).decisions:
            rules.add(decision.rule)
            less = {p.rank for p in decision.passed_over}
            assert decision.rank not in less
            assert [p.load_tokens for p in decision.passed_over] == sorted(p.load_tokens for p in decision.passed_over)
            assert all(p.load_tokens < decision.load_tokens for p in decision.passed_over)
            assert bool(less) == (decision.rule in (Rule.WITH_ROOM, Rule.IN_SHARE, Rule.NOT_HELD))
    assert {Rule.LEAST_LOADED, Rule.ITS_TURN, Rule.FEWEST_REQUESTS, Rule.WITH_ROOM, Rule.IN_SHARE} <= rules


def test_a_result_is_frozen():
    """Lists that a caller changes afterwards change no decision."""
    from adp_router import RouteBatch

    identities, lengths = [1, 2], [10, 20]
    result = Router().route(RouteBatch(identities, lengths), [RankState(0), RankState(1)])
    before = result.explain()
    identities[:], lengths[:] = [7, 8], [1, 1]
    assert result.explain() == before
    with pytest.raises(AttributeError):
        result.log.index = ()


def simulate(load, service, *, by_given=False, in_turn=False, ranks=8, count=3000, seed=1):
    """One at a time: lognormal lengths, exponential gaps, service times.

    Args:
        load: Requests in flight per rank (mean); with ``in_turn`` the part of its time that a rank is busy.
        in_turn: A rank serves its requests one after the other, not all at once.
        by_given: Instead of the router: whoever was given least.

    Returns:
        Fullest over mean of the tokens that each rank served, and of the load averaged over time.
    """
    rng, router = random.Random(seed), Router()
    tokens, counts, served = [0] * ranks, [0] * ranks, [0] * ranks
    now, ends, free_at = 0.0, [], [0.0] * ranks
    last = most = mean = 0.0

    def until(moment):
        nonlocal last, most, mean
        most += max(tokens) * (moment - last)
        mean += statistics.fmean(tokens) * (moment - last)
        last = moment

    for number in range(count):
        now += rng.expovariate(load * ranks)
        while ends and ends[0][0] <= now:
            end, rank, length = heapq.heappop(ends)
            until(end)
            tokens[rank] -= length
            counts[rank] -= 1
        length = max(1, int(rng.lognormvariate(7, 1)))
        until(now)
        if by_given:
            rank = served.index(min(served))
        else:
            rank = place(
                router, RouteRequest(number, length), [RankState(r, tokens[r], counts[r]) for r in range(ranks)]
            ).rank
            assert tokens[rank] == min(tokens)
        tokens[rank] += length
        counts[rank] += 1
        served[rank] += length
        free_at[rank] = (max(now, free_at[rank]) if in_turn else now) + service(rng, length)
        heapq.heappush(ends, (free_at[rank], rank, length))
    return max(served) / statistics.mean(served), most / mean


SERVICES = {
    "by length": lambda rng, length: length / 1808,
    "exponential": lambda rng, length: rng.expovariate(1.0),
    "constant": lambda rng, length: 1.0,
}


@pytest.mark.parametrize("service", SERVICES)
def test_at_low_load_every_rank_serves_as_much(service):
    """A service's low load, lognormal lengths with service times: fullest over mean at most 1.10."""
    assert simulate(0.3, SERVICES[service], count=1500)[0] <= 1.10


@pytest.mark.parametrize("utilisation", [0.7, 0.8, 0.9])
def test_ranks_that_serve_in_turn_serve_as_much_at_any_utilisation(utilisation):
    """Lognormal lengths, service by length, one after the other on each rank: fullest over mean at most 1.10."""
    assert simulate(utilisation, SERVICES["by length"], in_turn=True, count=1500)[0] <= 1.10


@pytest.mark.parametrize("service", ["by length", "exponential"])
def test_at_higher_load_the_fullest_rank_is_kept_low(service):
    """At each moment, for that is what a step takes; those who are given least would serve as much and wait longer."""
    for load in (2, 8):
        ours = simulate(load, SERVICES[service], count=1000)[1]
        assert ours <= 0.95 * simulate(load, SERVICES[service], count=1000, by_given=True)[1]


def test_a_rank_that_returns_is_not_flooded():
    """It is level with the rank that was given least, not behind by all that it missed."""
    router = Router()
    open_ranks = [RankState(0), RankState(1)]
    for i in range(50):
        place(router, RouteRequest(i, 10), [RankState(0), RankState(1, draining=True)])
    found = [place(router, RouteRequest(i, 10), open_ranks).rank for i in range(100, 140)]
    assert found.count(1) <= 21


# -- prefix ------------------------------------------------------------------------------------------------------------


def test_what_is_cached_is_not_load_and_needs_no_room():
    """Pinned or free: a rank's load grows by what it computes; free_tokens is room to compute."""
    ranks = [RankState(0, free_tokens=20), RankState(1, free_tokens=20)]
    requests = [
        RouteRequest(1, 100, 0, True, prefix_matches=(90, 0)),
        RouteRequest(2, 100, prefix_matches=(95, 0)),
        RouteRequest(3, 100, 1, True, prefix_matches=(90, 0)),
    ]
    result = Router("prefix").route(requests, ranks)
    assert result.assignments == {0: (1, 2), 1: ()}
    assert [d.load_tokens for d in result.decisions] == [0, 10]
    assert [x.request_id for x in result.leftovers] == [3]


def test_other_policies_do_not_read_matches():
    """They count whole prompts."""
    ranks = [RankState(0, free_tokens=20)]
    result = Router().route([RouteRequest(1, 100, prefix_matches=(90,))], ranks)
    assert not result.assignments[0]


@pytest.mark.parametrize("idle", [True, False])
@pytest.mark.parametrize("shared", [300, 900])
def test_one_shared_prefix_spreads_over_all_ranks(idle, shared):
    """256 requests of one shared prefix, one at a time: all eight ranks come to have it, and each serves its part."""
    router = Router("prefix")
    has, loads, served = set(), [0] * 8, [0] * 8
    for i in range(256):
        matches = tuple(shared if r in has else 0 for r in range(8))
        ranks = [RankState(r, 0 if idle else loads[r]) for r in range(8)]
        decision = place(router, RouteRequest(i, 1000, prefix_matches=matches), ranks)
        computed = 1000 - matches[decision.rank]
        loads[decision.rank] += computed
        served[decision.rank] += 1
        has.add(decision.rank)
    assert has == set(range(8))
    assert max(loads) / statistics.mean(loads) <= 1.5
    assert max(served) <= 3 * 256 / 8


def test_a_prefix_stays_where_it_is_while_the_rest_is_even():
    """Two prefixes on two ranks, taking turns: everybody goes to its own."""
    router = Router("prefix")
    ranks = [RankState(0), RankState(1)]
    for i in range(40):
        matches = (900, 0) if i % 2 else (0, 900)
        decision = place(router, RouteRequest(i, 1000, prefix_matches=matches), ranks)
        assert (decision.rank, decision.why, decision.rule) == ((i + 1) % 2, Why.CACHED_PREFIX, Rule.CACHED_PREFIX)


def test_a_busy_rank_is_not_worth_its_cache():
    """And the explanation says so."""
    decision = place(
        Router("prefix"), RouteRequest(1, 1000, prefix_matches=(500, 0)), [RankState(0, 600), RankState(1)]
    )
    assert (decision.rank, decision.rule) == (1, Rule.CACHE_OUTWEIGHED)
    decision = place(
        Router("prefix"), RouteRequest(1, 1000, prefix_matches=(500, 0)), [RankState(0, 400), RankState(1)]
    )
    assert (decision.rank, decision.rule) == (0, Rule.CACHED_PREFIX)
    config = RouterConfig(load_weight=2.0)
    decision = place(
        Router("prefix", config=config),
        RouteRequest(1, 1000, prefix_matches=(500, 0)),
        [RankState(0, 400), RankState(1)],
    )
    assert decision.rank == 1


def test_what_a_call_gave_counts_for_its_next_prefix():
    """Load and half of what was given: six of eight fill up the rank with the cache, one goes elsewhere, one comes back."""
    requests = [RouteRequest(i, 1000, prefix_matches=(900, 0)) for i in range(8)]
    result = Router("prefix").route(requests, [RankState(0), RankState(1)])
    assert result.assignments == {0: (0, 1, 2, 3, 4, 5, 7), 1: (6,)}


def test_a_cache_on_a_full_rank_attracts_nobody():
    """What nobody can use decides nothing, and is not said to."""
    request = RouteRequest(1, 1000, prefix_matches=(900, 0, 0))
    decision = place(Router("prefix"), request, [RankState(0, free_slots=0), RankState(1, 5), RankState(2, 9)])
    assert (decision.rank, decision.why) == (1, Why.LEAST_LOADED)


# -- conversations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gone", ["draining", "absent"])
def test_a_conversation_leaves_a_home_that_drains(gone):
    """Once, to a new home, and stays there after the old one is back."""
    router = Router("conversation")
    ranks = [RankState(r) for r in range(3)]
    home = place(router, RouteRequest(0, 9, conversation_id="c"), ranks).rank
    without = [RankState(r, draining=r == home) for r in range(3) if gone == "draining" or r != home]
    moved = place(router, RouteRequest(1, 9, conversation_id="c"), without)
    assert moved.why is Why.REHOMED
    assert moved.rank != home
    for turn in range(5):
        decision = place(router, RouteRequest(turn, 9, conversation_id="c"), without if turn < 3 else ranks)
        assert (decision.rank, decision.why) == (moved.rank, Why.HOME)


def test_a_target_gives_a_new_home_where_the_old_one_drains():
    """A home that is open stays."""
    router = Router("conversation")
    ranks = [RankState(r) for r in range(3)]
    router.route([RouteRequest(0, 1, target_rank=2, conversation_id="c")], ranks)
    router.route([RouteRequest(1, 1, target_rank=0, conversation_id="c")], [*ranks[:2], RankState(2, draining=True)])
    assert router.home_of("c") == 0


def test_a_turn_that_finds_no_room_does_not_lose_its_home():
    """Left over, and home the next time."""
    router = Router("conversation")
    home = place(router, RouteRequest(0, 1, conversation_id="c"), [RankState(0), RankState(1)]).rank
    assert router.route(
        [RouteRequest(1, 1, conversation_id="c")], [RankState(r, free_slots=0) for r in range(2)]
    ).leftovers
    assert place(router, RouteRequest(2, 1, conversation_id="c"), [RankState(0), RankState(1)]).rank == home


@pytest.mark.parametrize("use", [{}, {"target_rank": 1}, {"waited_rounds": 99}])
def test_the_home_that_was_not_used_for_longest_is_forgotten(use):
    """Any use renews: by the policy, by a target, by starving; not the order in which conversations began."""
    router = Router("conversation", config=RouterConfig(conversations_max=2))
    ranks = [RankState(0), RankState(1)]
    for i, (name, how) in enumerate((("a", {}), ("b", {}), ("a", use), ("c", {}))):
        router.route([RouteRequest(i, 1, conversation_id=name, **how)], ranks)
    assert router.home_of("b") is None
    assert router.home_of("a") is not None


def test_the_table_is_never_read_whole():
    """A call looks at as many homes as it uses or forgets: it costs the same at any size."""

    class Watched(OrderedDict):
        looks = 0

        def _no(self, *args):
            raise AssertionError("the table was walked over")

        __iter__ = keys = values = copy = __reversed__ = _no

        def items(self):
            for item in super().items():
                Watched.looks += 1
                yield item

    router = Router("conversation", config=RouterConfig(conversations_max=50))
    router._memory.homes = Homes(Watched())
    ranks = [RankState(0), RankState(1)]
    for i in range(120):
        Watched.looks = 0
        router.route([RouteRequest(i, 1, conversation_id=f"c{i % 70}")], ranks)
        assert Watched.looks <= 2
    assert len(router._memory.homes) == 50


def test_homes_are_those_of_a_plain_list():
    """Versions of a table, some of them dropped, against a list in order of use; the digest is that of the marks."""
    rng = random.Random(2)
    homes, plain = Homes(), []
    for _ in range(400):
        draft, after = homes.draft(), list(plain)
        # A call may use more homes than are kept: some come and go in it.
        for _ in range(rng.choice((0, 1, 2, 3, 12))):
            key, rank = f"c{rng.randrange(9)}", rng.randrange(3)
            draft.use(key, rank)
            after = [entry for entry in after if entry[0] != key] + [(key, rank)]
            assert all(draft.rank_of(k) == r for k, r in after[-5:])
        after = after[-5:]
        draft.trim(5)
        if rng.random() < 0.3:
            continue  # an interrupt: the draft is dropped
        homes, plain = draft, after
        assert len(homes) == len(plain)
        assert [(key, home.rank) for key, home in homes._table.items()] == plain
        assert homes.digest_part()[1] == sum(home.mark for home in homes._table.values()) % (1 << 128)
