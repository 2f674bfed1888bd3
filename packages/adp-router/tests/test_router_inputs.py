"""The boundary: any input is either normalised or refused by name and value; what is refused has changed nothing."""

import enum
import itertools
import random
from array import array

import numpy as np
import pytest

from adp_router import (
    DpGate,
    GateConfig,
    GateRank,
    RankState,
    RankStateError,
    RouteBatch,
    RouteBatchError,
    Router,
    RouterConfig,
    RouterConfigError,
    RouteRequest,
    batch_from,
)
from adp_router._check import digest_of

POLICIES = ("balanced", "round_robin", "prefix", "conversation")
RANKS = [RankState(0), RankState(1)]


class Angry:
    """Nothing about it works."""

    def __repr__(self):
        raise RuntimeError("no")

    __index__ = __len__ = __iter__ = __eq__ = __hash__ = __repr__


class Name(str):
    """A string with ideas of its own."""

    def __str__(self):
        return "other"

    def __eq__(self, other):
        raise RuntimeError("no")

    __hash__ = str.__hash__


class Level(enum.IntEnum):
    ONE = 1


NASTY = [
    None, True, False, np.bool_(True), 1.0, float("nan"), float("inf"), -1, 1 << 62, 10**5000, -(10**5000), "7", "\ud800",
    b"x", [], [1], (), {}, {1}, np.int64(3), np.uint64(2**63), np.float32(1.5), np.array([1, 2]), np.array(5), Angry(),
    Level.ONE, Name("c"), object,
]  # fmt: skip


def ids(values):
    return [f"{type(v).__name__}-{i}" for i, v in enumerate(values)]


FIELDS = (
    "request_id", "token_count", "target_rank", "strict", "child_count", "kv_block_count", "conversation_id", "prefix_matches",
    "waited_rounds",
)  # fmt: skip


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", NASTY, ids=ids(NASTY))
def test_any_value_in_any_field_of_a_request_leaves_the_router_able_to_go_on(field, value):
    """It is placed, left over or refused alone; the next calls are those of a router that was given the same."""
    for policy in POLICIES:
        first, second = Router(policy), Router(policy)
        request = RouteRequest(**{"request_id": 7, "token_count": 5, field: value})
        for router in (first, second):
            result = router.route([RouteRequest(1, 5), request], RANKS)
            assert len(result.errors) + len(result.leftovers) + sum(map(len, result.assignments.values())) == 2
            assert all(type(i) is int for placed in result.assignments.values() for i in placed)
            assert result.explain()
        after = [r.route([RouteRequest(2, 5, conversation_id="c")], RANKS) for r in (first, second)]
        assert after[0].assignments == after[1].assignments
        assert after[0].digest == after[1].digest


RANK_FIELDS = (
    "rank", "token_count", "request_count", "free_slots", "free_kv_blocks", "free_tokens", "draining", "total_slots",
    "total_kv_blocks", "total_tokens",
)  # fmt: skip


@pytest.mark.parametrize("field", RANK_FIELDS)
@pytest.mark.parametrize("value", NASTY, ids=ids(NASTY))
def test_any_value_in_any_field_of_a_rank_is_used_or_refused_by_name(field, value):
    """A call that raises has changed nothing."""
    router, untouched = Router("conversation"), Router("conversation")
    states = [RankState(9), RankState(**{"rank": 4, field: value})]
    problem = ""
    try:
        router.route([RouteRequest(1, 5, conversation_id="c")], states)
    except RankStateError as error:
        problem = str(error)
    if not problem:
        assert router.statistics().calls == 1
        return
    assert f"ranks[1].{field}" in problem
    assert len(problem) < 300
    assert router.statistics() == untouched.statistics()
    one, other = (r.route([RouteRequest(2, 5)], RANKS) for r in (router, untouched))
    assert (one.assignments, one.digest) == (other.assignments, other.digest)


def test_free_is_at_most_the_total():
    """Named with both numbers."""
    with pytest.raises(RankStateError, match=r"ranks\[0\].free_kv_blocks: 9 is more than total_kv_blocks, 8"):
        Router().route([], [RankState(0, free_kv_blocks=9, total_kv_blocks=8)])


@pytest.mark.parametrize("requests", [5, None, [None], [RouteRequest(1, 2), "x"], Angry(), {RouteRequest(1, 2)}])
def test_what_is_not_a_list_of_requests_is_refused(requests):
    """By place."""
    with pytest.raises(RouteBatchError, match="requests"):
        Router().route(requests, RANKS)


def test_errors_come_in_the_order_of_the_requests():
    """Whichever field is looked at first; and an id that was refused makes no other one a duplicate."""
    requests = [RouteRequest(3, -1), RouteRequest("x", 5), RouteRequest(0, 5), RouteRequest(4, 5, target_rank=9)]
    result = Router().route(requests, RANKS)
    assert [(e.request_id, e.field) for e in result.errors] == [
        (3, "token_count"), ("x", "request_id"), (4, "target_rank"),
    ]  # fmt: skip
    assert sorted(result.assignments.values()) == [(), (0,)]


@pytest.mark.parametrize("column", [5, None, {1: 2}, {1}, np.array(3), Angry()])
def test_what_is_not_a_column_is_refused(column):
    """By name."""
    with pytest.raises(RouteBatchError, match="token_counts"):
        Router().route(RouteBatch([1], column), RANKS)


@pytest.mark.parametrize("ranks", [5, None, [None], [3], Angry()])
def test_what_is_not_a_list_of_ranks_is_refused(ranks):
    """By place."""
    with pytest.raises(RankStateError, match="ranks"):
        Router().route([], ranks)


@pytest.mark.parametrize("number", [np.int8, np.int32, np.int64, np.uint16, Level])
def test_numbers_of_any_type_are_the_numbers_that_they_are(number):
    """Equal placements, plain integers, no wrapping, equal digests; in ranks, requests and columns."""
    one = number(1)
    plain = RouteRequest(1, 1, 1, True, 1, 1, "c", (1, 1), 1)
    typed = RouteRequest(one, one, one, np.bool_(True), one, one, Name("c"), np.array([1, 1]), one)
    full = RankState(1, 1, 1, 1000, 1000, 1000, False, 1000, 1000, 1000)
    states = [RankState(0), full]
    odd = [RankState(0), RankState(one, one, one, 1000, 1000, 1000, np.bool_(False), 1000, 1000, 1000)]
    for policy in POLICIES:
        first = Router(policy).route([plain, RouteRequest(2, 2**40)], states)
        second = Router(policy).route([typed, RouteRequest(2, 2**40)], odd)
        assert (first.assignments, first.digest) == (second.assignments, second.digest)
        assert all(type(d.load_tokens) is int for d in second.decisions)


def test_small_integers_do_not_wrap():
    """Loads in int8 near their end."""
    ranks = [RankState(0, np.int8(120)), RankState(1, np.int8(125))]
    result = Router().route([RouteRequest(i, np.int8(100)) for i in range(4)], ranks)
    assert sorted(map(len, result.assignments.values())) == [2, 2]


def variants():
    """Calls that all say something else, and the ways to say each."""
    rng = random.Random(3)
    base = {"request_id": 1, "token_count": 5}
    changes = [
        {}, {"request_id": 2}, {"token_count": 6}, {"target_rank": 0}, {"target_rank": 1}, {"target_rank": -2},
        {"child_count": 1}, {"kv_block_count": 1}, {"conversation_id": "c"}, {"conversation_id": "\ud800"},
        {"conversation_id": "\\ud800"}, {"conversation_id": ""}, {"prefix_matches": (1, 0)}, {"prefix_matches": (0, 1)},
        {"waited_rounds": 1}, {"token_count": float("nan")}, {"token_count": "5"}, {"token_count": 5.5}, {"token_count": True},
        {"token_count": 1 << 70}, {"target_rank": 0, "strict": True}, {"conversation_id": 5}, {"conversation_id": "5"},
        {"token_count": []}, {"token_count": [5]}, {"token_count": [6]}, {"token_count": [5, 5]}, {"token_count": [[5]]},
        {"token_count": b"5"}, {"token_count": {}},
    ]  # fmt: skip
    rng.shuffle(changes)
    return [RouteRequest(**{**base, **change}) for change in changes]


def test_digests_are_equal_exactly_where_inputs_are():
    """Every pair of calls; as objects, columns and arrays."""
    digests = [Router().route([request], RANKS).digest for request in variants()]
    assert len(set(digests)) == len(digests)
    for request, digest in zip(variants(), digests, strict=True):
        assert Router().route([request], RANKS).digest == digest
        assert Router().route(RouteBatch.of([request]), RANKS).digest == digest
    two = [("ab", "c"), ("a", "bc"), ("abc", ""), ("abc", None)]
    found = {
        Router().route([RouteRequest(i, 1, conversation_id=c) for i, c in enumerate(pair)], RANKS).digest
        for pair in two
    }
    assert len(found) == 4


def test_every_row_of_every_column_is_in_the_digest():
    """All tables of two requests by the values that could be taken for one another: no two digests are equal."""
    values = {
        "target_rank": (None, 0, 1), "strict": (False, True), "child_count": (0, 1, 256), "kv_block_count": (0, 1, 256),
        "conversation_id": (None, "", "a", "aa"), "prefix_matches": ((), (0, 1), (1, 0)), "waited_rounds": (0, 1),
        "token_count": (1, 256, 2**32, 2**40, 2**61, -1, "1"), "request_id": (1, 2, -1, 2**32, 2**64, 2**65),
    }  # fmt: skip
    found = set()
    count = 0
    for field, options in values.items():
        for first, second in itertools.product(options, repeat=2):
            if (first, second) == (options[0],) * 2 and field != "request_id":
                continue
            pair = [
                RouteRequest(**{"request_id": 10 + row, "token_count": 1, field: value})
                for row, value in enumerate((first, second))
            ]
            found.add(Router().route(pair, RANKS).digest)
            count += 1
    assert len(found) == count


def test_columns_of_unlike_width_do_not_look_alike():
    """Two numbers of 32 bits and one of 64 have the same bytes: they are other calls all the same."""
    two, one = RouteBatch([1, 2], [5, 6]), RouteBatch([1 + (2 << 32)], [5 + (6 << 32)])
    assert Router().route(two, RANKS).digest != Router().route(one, RANKS).digest


def test_parts_of_a_digest_do_not_run_into_each_other():
    """However the same bytes are cut, the digest differs: empty parts, parts that look like lengths."""
    for text in (b"", b"abc", b"1:a2:", b"0:0:0:"):
        cuts = {
            tuple(text[a:b] for a, b in itertools.pairwise((0, *ends, len(text))))
            for n in range(4)
            for ends in itertools.combinations_with_replacement(range(len(text) + 1), n)
        }
        assert len({digest_of(*parts) for parts in cuts}) == len(cuts)


def test_columns_in_which_nothing_is_said_are_as_if_left_out():
    """Zeros, nothing strict, no target: the same call, the same digest."""
    said = RouteBatch(
        [1, 2], [3, 4], [-1, None], [False, 0], [0, 0], np.zeros(2, dtype=int), [None, None], [(), None], [0, 0]
    )
    short = RouteBatch([1, 2], [3, 4])
    first, second = Router().route(said, RANKS), Router().route(short, RANKS)
    assert (first.assignments, first.digest) == (second.assignments, second.digest)


RANK_CHANGES = [
    *({name: 9} for name in RANK_FIELDS if name != "draining"),
    *({f"free_{name}": free} for name in ("slots", "kv_blocks", "tokens") for free in (0, -1)),
    {"draining": True},
]


@pytest.mark.parametrize("change", RANK_CHANGES, ids=str)
def test_the_digest_sees_every_field_of_a_rank(change):
    """One by one."""
    plain = Router().route([], [RankState(1)]).digest
    assert Router().route([], [RankState(**{"rank": 1, **change})]).digest != plain


def remembered(router):
    """What a router remembers, by name; homes by their digest."""
    memory = router._memory.draft()
    return {
        "given": memory.given, "held": memory.held, "idle": memory.idle, "cursor": memory.cursor,
        "homes": memory.homes.digest_part(),
    }  # fmt: skip


BUSY = [RankState(0, 1, 1), RankState(1, 1, 1)]
FULL = RankState(0, 1, 1, free_slots=0)
FIVE = [RouteRequest(1, 5), RouteRequest(2, 5)]


@pytest.mark.parametrize(
    ("name", "policy", "first", "second"),
    [
        ("given", "balanced", [(FIVE[:1], BUSY)], []),
        (
            "held",
            "balanced",
            [([RouteRequest(1, 5, child_count=3, waited_rounds=2)], [RankState(0, 1, 1, 2), RankState(1, 1, 1, 1)])],
            [],
        ),
        ("idle", "balanced", [([], [RankState(0, free_slots=3), RankState(1)])], []),
        ("cursor", "round_robin", [(FIVE, BUSY)], [(FIVE[:1], [FULL, BUSY[1]]), (FIVE[1:], BUSY)]),
        (
            "homes",
            "conversation",
            [([RouteRequest(1, 5, target_rank=0, conversation_id=c)], BUSY) for c in "ab"],
            [([RouteRequest(1, 5, target_rank=0, conversation_id=c)], BUSY) for c in "ba"],
        ),
        (
            "homes",
            "conversation",
            [([RouteRequest(1, 5, target_rank=0, conversation_id="c"), RouteRequest(2, 5, target_rank=1)], BUSY)],
            [([RouteRequest(1, 5, target_rank=1, conversation_id="c"), RouteRequest(2, 5, target_rank=0)], BUSY)],
        ),
    ],
)
def test_the_digest_sees_what_a_router_remembers(name, policy, first, second):
    """Two histories that leave one difference, and no other: what was given, kept free, seen idle, whose turn, homes."""
    routers = [Router(policy, config=RouterConfig(starvation_rounds=1)) for _ in range(2)]
    for router, calls in zip(routers, (first, second), strict=True):
        for call in calls:
            router.route(*call)
    one, other = map(remembered, routers)
    assert [key for key in one if one[key] != other[key]] == [name]
    assert routers[0].route([], BUSY).digest != routers[1].route([], BUSY).digest


@pytest.mark.parametrize("value", [None, float("nan"), "3", True, -1, 0.5, [], Angry(), float("-inf")])
@pytest.mark.parametrize(
    "field", ["count_multiplier", "starvation_rounds", "match_fraction_min", "load_weight", "conversations_max"]
)
def test_settings_that_cannot_be_used_are_refused(field, value):
    """nan, strings, truth values: field and value, never a bare TypeError."""
    fine = {("count_multiplier", None), ("match_fraction_min", 0.5), ("load_weight", 0.5)}
    if any(field == name and (value is good or value == good) for name, good in fine if type(value) is type(good)):
        RouterConfig(**{field: value})
        return
    with pytest.raises(RouterConfigError, match=field):
        RouterConfig(**{field: value})


def test_settings_become_plain():
    """NumPy's numbers are the numbers that they are: the digest does not see their type."""
    odd = RouterConfig(np.float64(2.0), np.int32(3), np.float32(0.5), 1, np.int64(9))
    assert odd == RouterConfig(2.0, 3, 0.5, 1.0, 9)
    assert type(odd.starvation_rounds) is int
    first, second = (Router(config=c).route([], RANKS).digest for c in (odd, RouterConfig(2, 3, 0.5, 1.0, 9)))
    assert first == second


@pytest.mark.parametrize("value", [float("nan"), "3", True, -1, 0.5, None])
@pytest.mark.parametrize("field", ["wait_steps_max", "batching_steps"])
def test_gate_settings_that_cannot_be_used_are_refused(field, value):
    """Field and value."""
    with pytest.raises(RouterConfigError, match=field):
        GateConfig(**{field: value})


@pytest.mark.parametrize("value", [None, "1", 0.5, float("nan"), True])
def test_a_gate_refuses_counts_that_are_none(value):
    """Nothing is counted."""
    gate = DpGate()
    for bad in (GateRank(value, 1, 1), GateRank(1, value, 1), GateRank(1, 1, value), None):
        with pytest.raises(RankStateError, match=r"ranks\[1\]"):
            gate.step([GateRank(1, 1, 1), bad])
    assert gate.statistics() == DpGate().statistics()


@pytest.mark.parametrize("policy", [None, 5, "fastest", ["balanced"], Angry()])
def test_policies_that_are_not_known_are_refused(policy):
    """By value, whatever its type."""
    with pytest.raises(RouterConfigError, match="policy must be one of"):
        Router(policy)
    with pytest.raises(RouterConfigError, match="config must be a RouterConfig"):
        Router(config={"starvation_rounds": 3})


# -- said twice, said otherwise, read twice ----------------------------------------------------------------------------


def test_settings_that_are_equal_have_equal_digests():
    """However they are said: a string with ideas of its own, 1 for True, -0.0; and what cannot be used is refused."""
    pairs = [
        (Router("balanced"), Router(Name("balanced"))),
        (Router(compat=True), Router(compat=1)),
        (Router(compat=False), Router(compat=np.bool_(False))),
        (Router("prefix", config=RouterConfig(load_weight=0)), Router("prefix", config=RouterConfig(load_weight=-0.0))),
    ]
    for first, second in pairs:
        assert first.route([], RANKS).digest == second.route([], RANKS).digest
        assert (first.policy_name, first.compat) == (second.policy_name, second.compat)
        assert type(first.policy_name) is type(second.policy_name) is str
        assert type(first.compat) is type(second.compat) is bool
    for value in (None, "no", 2, [], Angry()):
        with pytest.raises(RouterConfigError, match="compat must be True or False"):
            Router(compat=value)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("value", [1.0, 1e15, 1e300, 1.7e308, float("inf")])
def test_settings_of_any_size_place_requests(policy, value):
    """A multiple of a fair share that no integer or float holds is no limit."""
    weight = min(value, 1.7e308)
    router = Router(policy, config=RouterConfig(count_multiplier=value, load_weight=weight, starvation_rounds=1 << 70))
    requests = [RouteRequest(i, 2**40, prefix_matches=(5, 2**39), conversation_id="c") for i in range(40)]
    for _ in range(3):
        result = router.route(requests, [RankState(0, 2**61), RankState(1, 2**61, 5)])
        assert sum(map(len, result.assignments.values())) == 40
        assert result.explain()


class Parameters:
    def __init__(self, relax):
        self.attention_dp_rank = 0
        self.attention_dp_relax = relax


class Wanting:
    """An engine's request."""

    def __init__(self, identity, relax=None, children=None):
        self.request_id = identity
        self.scheduling_params = Parameters(relax)
        self.child_req_ids = children


@pytest.mark.parametrize(
    ("relax", "strict"),
    [(None, False), (True, False), (False, True), (np.False_, True), (np.True_, False), (0, True), (1, False)],
)
def test_a_relax_of_any_type_is_the_truth_value_that_it_is(relax, strict):
    """NumPy's False is no wish to be relaxed."""
    assert [bool(s) for s in batch_from([Wanting(1, relax)], length=lambda r: 5).strict] == [strict]


@pytest.mark.parametrize("relax", ["no", 2, 0.5, [], Angry()])
def test_a_relax_that_is_no_truth_value_is_that_requests_error(relax):
    """The others are placed."""
    batch = batch_from([Wanting(1, relax), Wanting(2)], length=lambda r: 5)
    result = Router().route(batch, RANKS)
    assert [(e.request_id, e.field) for e in result.errors] == [(1, "strict")]
    assert result.assignments[0] == (2,)


class Loose:
    """Has what it is given, and other names may come."""

    def __init__(self, **given):
        self.__dict__.update(given)


@pytest.mark.parametrize("wrapped", [False, True], ids=["requests", "queue items"])
@pytest.mark.parametrize("among", [None, 1], ids=["all names", "one name"])
@pytest.mark.parametrize("late", ["scheduling_params", "py_scheduling_params", "child_req_ids", "conversation_id"])
def test_what_only_the_last_object_has_is_read(late, among, wrapped):
    """Whichever attribute it is, and however many are asked for: what the others lack is no reason not to look."""
    objects = [Loose(request_id=i) for i in range(20)]
    items = [Loose(id=i, request=r) for i, r in enumerate(objects)] if wrapped else objects
    value = {"child_req_ids": [1, 2], "conversation_id": "c"}.get(late, Loose(attention_dp_rank=1))
    setattr((items if late == "child_req_ids" else objects)[-1], late, value)
    names = {} if among is None else {"attributes": ("request", late)}
    batch = batch_from(items, length=lambda r: 5, **names)
    column = {"child_req_ids": batch.child_counts, "conversation_id": batch.conversation_ids}.get(
        late, batch.target_ranks
    )
    wanted = {"child_req_ids": 2, "conversation_id": "c"}.get(late, 1)
    assert [*batch.request_ids] == [*range(20)]
    assert column[-1] == wanted
    assert not any(column[:-1])


def test_a_request_id_of_the_last_queue_item_counts():
    """The others have an id only, and none has children."""
    items = [Loose(id=i, request=Loose(request_id=100 + i)) for i in range(20)]
    items[-1].request_id = 7
    assert [*batch_from(items, length=lambda r: 5).request_ids] == [*range(19), 7]


def test_minus_one_of_an_engine_is_no_rank():
    """An engine says None where it has no target; and who has none is not strict, whatever it says of relaxing."""
    objects = [Wanting(1, False), Wanting(2, False), Wanting(3, False)]
    objects[0].scheduling_params.attention_dp_rank = -1
    objects[1].scheduling_params.attention_dp_rank = None
    result = Router().route(batch_from(objects, length=lambda r: 5), RANKS)
    assert [(e.request_id, e.field) for e in result.errors] == [(1, "target_rank")]
    assert result.assignments == {0: (3,), 1: (2,)}


@pytest.mark.parametrize("children", [3, 0, True, 1.5, object(), Angry()])
def test_children_without_a_length_are_that_requests_error(children):
    """A number is not a list of ids; an array of ids is."""
    items = [Wanting(1, None, children), Wanting(2, None, np.array([7, 8])), Wanting(3, None, [])]
    batch = batch_from(items, length=lambda r: 5)
    result = Router().route(batch, RANKS)
    assert [(e.request_id, e.field) for e in result.errors] == [(1, "child_count")]
    assert batch.child_counts[1:] == [2, 0]


def test_attributes_are_names_read_once():
    """A generator, one name; what is no name is refused by its value."""
    item = Wanting(1, False)
    for names in (["scheduling_params"], (n for n in ["scheduling_params"]), "scheduling_params"):
        assert batch_from([item], length=lambda r: 5, attributes=names).strict == [True]
    for names in (None, 5, [None], [Angry()], ["nothing"], "conversation"):
        with pytest.raises(RouterConfigError, match="attributes"):
            batch_from([item], length=lambda r: 5, attributes=names)


@pytest.mark.parametrize("objects", [None, 5, {1}, {1: 2}, Angry()])
def test_what_is_not_a_sequence_of_objects_is_refused(objects):
    """A set has no order that is equal on every rank."""
    with pytest.raises(RouteBatchError, match="objects"):
        batch_from(objects, length=lambda r: 5)


def test_a_gate_reads_its_ranks_once():
    """A generator holds as a list does; a rank over its limit has a room below 0; negative counts are refused."""
    ranks = [GateRank(1, 1, -1), GateRank(0, 1, 1)]
    from_list, from_generator = DpGate(GateConfig(3, 3)), DpGate(GateConfig(3, 3))
    held = [(from_list.step(ranks), from_generator.step(r for r in ranks)) for _ in range(5)]
    assert held == [(False, False)] * 3 + [(True, True), (False, False)]
    assert from_list.statistics() == from_generator.statistics()
    for bad in (GateRank(-1, 1, 1), GateRank(1, -1, 1)):
        with pytest.raises(RankStateError, match="must not be negative"):
            from_list.step([bad])
    for bad in (None, 5, Angry()):
        with pytest.raises(RankStateError, match="ranks"):
            from_list.step(bad)
    with pytest.raises(RouterConfigError, match="config must be a GateConfig"):
        DpGate({"wait_steps_max": 3})


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_a_callers_object_raises_ends_the_call_alone(policy, error):
    """Nothing of the call is remembered, whichever value raises: an id, a length, a rank's load."""

    class Bomb:
        def __index__(self):
            raise error

    router, twin = Router(policy), Router(policy)
    good = [RouteRequest(1, 5, conversation_id="c")]
    calls = [
        ([*good, RouteRequest(Bomb(), 5)], RANKS),
        ([*good, RouteRequest(2, Bomb())], RANKS),
        (good, [RankState(0), RankState(1, Bomb())]),
    ]
    for call in calls:
        with pytest.raises(error):
            router.route(*call)
    assert router.statistics() == twin.statistics()
    assert router.route(good, RANKS).digest == twin.route(good, RANKS).digest


@pytest.mark.parametrize("error", [RuntimeError, AttributeError, ValueError])
@pytest.mark.parametrize("field", [*FIELDS, *RANK_FIELDS])
def test_a_field_that_raises_when_it_is_read_is_named(field, error):
    """A subclass that computes it, among good ones; and one that was never filled. Nothing changed."""

    def fail(self):
        raise error("no value")

    router, twin = Router("conversation"), Router("conversation")
    if field in FIELDS:
        odd = type("Odd", (RouteRequest,), {field: property(fail)})
        call, kind = ([RouteRequest(1, 5), odd.__new__(odd)], RANKS), RouteBatchError
        for name in FIELDS:
            if name != field:
                object.__setattr__(call[0][1], name, getattr(RouteRequest(2, 5), name))
        where = rf"requests\[1\].{field}: cannot be read: {error.__name__}\('no value'\)"
    else:
        odd = type("Odd", (RankState,), {field: property(fail)})
        call, kind = ([RouteRequest(1, 5)], [RankState(0), odd.__new__(odd)]), RankStateError
        for name in RANK_FIELDS:
            if name != field:
                object.__setattr__(call[1][1], name, getattr(RankState(1), name))
        where = rf"ranks\[1\].{field}: cannot be read: {error.__name__}\('no value'\)"
    with pytest.raises(kind, match=where):
        router.route(*call)
    with pytest.raises(RouteBatchError, match=r"requests\[0\].request_id: cannot be read"):
        router.route([RouteRequest.__new__(RouteRequest)], RANKS)
    with pytest.raises(RankStateError, match=r"ranks\[0\].rank: cannot be read"):
        router.route([], [RankState.__new__(RankState)])
    good = [RouteRequest(1, 5, conversation_id="c")]
    assert router.route(good, RANKS).digest == twin.route(good, RANKS).digest


@pytest.mark.parametrize("policy", POLICIES)
def test_a_rank_without_limits_takes_any_sum(policy):
    """Each count is below 2**62; together they are far above."""
    requests = [RouteRequest(i, 2**62 - 1 - i, kv_block_count=2**62 - 1, child_count=2**61) for i in range(40)]
    config = RouterConfig(count_multiplier=float("inf"))
    assert len(Router(policy, config=config).route(requests, [RankState(0)]).assignments[0]) == 40


def test_minus_one_means_no_target_or_not():
    """NumPy's truth values and 0 and 1 are truth values; what is not one is refused by name."""
    for flag in (True, 1, np.True_):
        assert not Router().route(RouteBatch([1], [5], [-1], minus_one_is_no_target=flag), RANKS).errors
    for flag in (False, 0, np.False_):
        assert Router().route(RouteBatch([1], [5], [-1], minus_one_is_no_target=flag), RANKS).errors
    for flag in (None, "no", 2, np.array([1, 2]), Angry()):
        with pytest.raises(RouteBatchError, match="minus_one_is_no_target: want True or False"):
            Router().route(RouteBatch([1], [5], minus_one_is_no_target=flag), RANKS)


def test_a_result_is_asked_for_ids_of_any_type():
    """NumPy's number is the number; a truth value is none; what was refused is found by its text. Homes likewise."""
    result = Router().route([RouteRequest(np.int64(1), 5), RouteRequest("1", 5), RouteRequest(Angry(), 5)], RANKS)
    assert result.explain(np.int16(1)) == result.explain(Level.ONE) == result.explain(1)
    assert result.explain(1).startswith("request 1 (5 tokens)")
    assert "refused" in result.explain("1")
    for wanted in (True, 2, 1.0, [1], Angry(), np.array([1, 2])):
        with pytest.raises(KeyError):
            result.explain(wanted)
    router = Router("conversation")
    router.route([RouteRequest(1, 5, conversation_id=Name("c"))], RANKS)
    assert router.home_of(Name("c")) == router.home_of("c") == 0
    assert [router.home_of(key) for key in (None, 5, [], Angry(), b"c")] == [None] * 5


@pytest.mark.parametrize("kind", [np.int8, np.uint64, ">i4", "list", "q", "B"])
def test_arrays_of_integers_are_columns(kind):
    """Of NumPy, of Python, of either byte order: the call that a list makes. Entries of another shape are refused each."""
    values = [1, 2, 3]
    column = (
        values
        if kind == "list"
        else array(kind, values)
        if isinstance(kind, str) and len(kind) == 1
        else np.array(values, kind)
    )
    first = Router().route(RouteBatch(column, column, child_counts=column, waited_rounds=column), RANKS)
    second = Router().route(RouteBatch(values, values, child_counts=values, waited_rounds=values), RANKS)
    assert (first.assignments, first.digest) == (second.assignments, second.digest)
    for odd in (
        np.array([[1, 2], [3, 4], [5, 6]]),
        np.array([True, False, True]),
        np.array([1.0, 2.0, 3.0]),
        array("d", [1, 2, 3]),
    ):
        assert len(Router().route(RouteBatch(values, odd), RANKS).errors) == 3


def test_a_message_shows_truth_values_as_such():
    """Not as integers of so many bits."""
    assert Router().route([RouteRequest(1, True)], RANKS).errors[0].message == "want an integer, got True"
