"""Fair shares are those of the ranks that can take something; inputs of the wrong type fail alone; columns from objects."""

import pytest

from adp_router import (
    LeftoverReason,
    RankState,
    RankStateError,
    RouteBatch,
    RouteBatchError,
    Router,
    RouterConfig,
    RouteRequest,
    Why,
    batch_from,
    requests_from,
)

POLICIES = ["balanced", "round_robin", "prefix", "conversation"]


def counts(result):
    return {rank: len(ids) for rank, ids in result.assignments.items()}


@pytest.mark.parametrize(
    "unable",
    [
        RankState(0, draining=True),
        RankState(0, free_kv_blocks=0),
        RankState(0, free_kv_blocks=1),
        RankState(0, free_tokens=9),
        RankState(0, free_slots=0),
        RankState(0, request_count=2, draining=True),
    ],
)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_rank_that_can_take_nothing_has_no_share(policy, unable):
    """Two ranks, one of them of no use: the other takes all eight, however fair a half would be."""
    requests = [RouteRequest(i, 10, kv_block_count=2) for i in range(8)]
    config = RouterConfig(count_multiplier=1.0)
    result = Router(policy, config=config).route(requests, [unable, RankState(1)])
    assert counts(result) == {0: 0, 1: 8}
    assert not result.leftovers
    assert result.expected_request_count >= 8


@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_rank_fills_up_with_is_shared_by_the_others(policy):
    """A rank with blocks for one request of eight: the others take what its share would have been."""
    requests = [RouteRequest(i, 10, kv_block_count=2) for i in range(9)]
    ranks = [RankState(0, free_kv_blocks=2), RankState(1), RankState(2)]
    result = Router(policy, config=RouterConfig(count_multiplier=1.0)).route(requests, ranks)
    assert counts(result) == {0: 1, 1: 4, 2: 4}


LONG_AND_SHORT = [RouteRequest(0, 9, kv_block_count=0), *(RouteRequest(i, 1, kv_block_count=2) for i in range(1, 6))]


@pytest.mark.parametrize(
    "unable",
    [RankState(0, free_kv_blocks=1, free_tokens=5), RankState(0, 0, 50, draining=True)],
    ids=["full", "drains"],
)
def test_who_can_take_nothing_does_not_change_the_others_shares(unable):
    """One long, five short, two ranks that can take them: three each. The third fits none, or drains with many."""
    result = Router().route(LONG_AND_SHORT, [unable, RankState(1), RankState(2)])
    assert result.assignments == {0: (), 1: (0, 4, 5), 2: (1, 2, 3)}
    assert result.expected_request_count == max(3, unable.request_count)


def test_targets_that_fill_one_rank_leave_the_others_as_many():
    """Six on their target: a rank that holds more from before may take six as well, so all short ones go to the idle one."""
    pinned = [RouteRequest(10 + i, 1, target_rank=0) for i in range(6)]
    ranks = [RankState(0), RankState(1, 0, 10), RankState(2, 0, 10)]
    assert counts(Router().route([*pinned, *LONG_AND_SHORT], ranks)) == {0: 6, 1: 1, 2: 5}


def test_a_multiple_of_a_share_is_rounded_up():
    """1.25 times two and a half: four may go to one rank."""
    config = RouterConfig(count_multiplier=1.25)
    result = Router(config=config).route(LONG_AND_SHORT[:5], [RankState(0), RankState(1)])
    assert counts(result) == {0: 1, 1: 4}


def test_the_compatible_mode_shares_among_all():
    """The seed's router divides by every rank: half stays, by its count limit."""
    result = Router(compat=True).route(
        [RouteRequest(i, 10) for i in range(8)], [RankState(0, draining=True), RankState(1)]
    )
    assert counts(result) == {0: 0, 1: 4}
    assert {x.reason for x in result.leftovers} == {LeftoverReason.COUNT_LIMIT}
    result = Router(compat=True).route(
        [RouteRequest(0, 10)], [RankState(0, 0, 9, draining=True), RankState(1, free_slots=2)]
    )
    assert result.expected_request_count == 9
    result = Router(compat=True).route(
        [RouteRequest(i, 10) for i in range(8)], [RankState(0, draining=True), RankState(1, free_slots=2)]
    )
    assert result.expected_request_count == 4


def test_slots_used_up_by_this_very_batch_are_the_reason():
    """Not the fair share, when both end at the same count."""
    ranks = [RankState(r, 0, c, free_slots=3 - c) for r, c in enumerate((1, 2, 3, 0))]
    for compat in (False, True):
        result = Router(compat=compat).route([RouteRequest(i, 3) for i in range(13)], ranks)
        assert {x.reason for x in result.leftovers} == {LeftoverReason.NO_FREE_SLOT}
        assert len(result.leftovers) == 7


def test_long_batches_meet_the_limit_exactly():
    """Thousands of requests, slots for fewer, ranks at different heights: every slot is used, the rest says why."""
    ranks = [RankState(r, r * 1000, r * 50, free_slots=300 + r) for r in range(8)]
    requests = [RouteRequest(i, 8192 + (i * 7919) % 100) for i in range(4096)]
    result = Router().route(requests, ranks)
    assert counts(result) == {r: 300 + r for r in range(8)}
    assert {x.reason for x in result.leftovers} == {LeftoverReason.NO_FREE_SLOT}
    assert all(decision.why is Why.LEAST_LOADED for decision in result.decisions)


def test_decisions_tell_the_loads_that_decided_not_the_requests_own_tokens():
    """In the seed's order a target loads nobody; a cached part of a prompt loads nobody."""
    pinned = [RouteRequest(1, 100, target_rank=0, strict=True), RouteRequest(2, 7), RouteRequest(3, 5)]
    seed = Router(compat=True).route(pinned, [RankState(0)])
    assert [(d.request_id, d.load_tokens) for d in seed.decisions] == [(1, 0), (2, 0), (3, 7)]
    cached = [RouteRequest(i, 100, prefix_matches=(60,)) for i in range(3)]
    prefix = Router("prefix").route(cached, [RankState(0)])
    assert [d.load_tokens for d in prefix.decisions] == [0, 40, 80]


def test_statistics_count_requests_without_their_children():
    """Children take slots, but they are no requests."""
    router = Router()
    requests = [RouteRequest(1, 5, child_count=3), RouteRequest(2, 3), RouteRequest(3, 1)]
    router.route(requests, [RankState(0), RankState(1)])
    assert router.statistics().placed_by_rank == {0: 1, 1: 2}


@pytest.mark.parametrize("shortest", [8192, 1 << 58], ids=["of doubles", "beyond doubles"])
@pytest.mark.parametrize("refused", [False, True], ids=["all", "all but one"])
def test_batches_of_few_lengths_go_longest_first_in_order_of_arrival(shortest, refused):
    """As a sort and a look at every rank would have it; one length comes late, one request is no request."""
    count, size = 2100, 8
    sizes = [shortest + (i * 7919) % 7 for i in range(count - 3)] + [shortest + 50, shortest + 3, shortest + 50]
    offered = [RouteRequest((i * 31) % count, n) for i, n in enumerate(sizes)]
    if refused:
        offered[500] = RouteRequest(500 * 31 % count, -1)
    order = sorted((i for i in range(count) if not refused or i != 500), key=lambda i: -sizes[i])
    loads, wanted = [(r * 10, 0, r) for r in range(size)], []
    for index in order:
        tokens, held, rank = min(load for load in loads if load[1] < -(-len(order) // size))
        wanted.append((offered[index].request_id, rank, tokens, held))
        loads[rank] = (tokens + sizes[index], held + 1, rank)
    result = Router().route(offered, [RankState(r, r * 10, 0) for r in range(size)])
    assert [(d.request_id, d.rank, d.load_tokens, d.load_requests) for d in result.decisions] == wanted
    assert len(result.errors) == refused


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"request_id": "s"}, "request_id"),
        ({"request_id": None}, "request_id"),
        ({"token_count": 1.5}, "token_count"),
        ({"token_count": "7"}, "token_count"),
        ({"token_count": 1 << 70}, "token_count"),
        ({"child_count": 0.5}, "child_count"),
        ({"kv_block_count": "x"}, "kv_block_count"),
        ({"waited_rounds": -1}, "waited_rounds"),
        ({"waited_rounds": None}, "waited_rounds"),
        ({"target_rank": "a"}, "target_rank"),
        ({"target_rank": -1}, "target_rank"),
        ({"target_rank": 1.5}, "target_rank"),
        ({"target_rank": [1]}, "target_rank"),
        ({"target_rank": 1 << 70}, "target_rank"),
        ({"target_rank": -1, "strict": True}, "target_rank"),
        ({"conversation_id": 5}, "conversation_id"),
        ({"prefix_matches": (1, "a")}, "prefix_matches"),
        ({"prefix_matches": (1, -2)}, "prefix_matches"),
    ],
)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_of_wrong_type_fails_alone(policy, change, field):
    """Whatever is wrong with one request, the batch is routed; the digest is the same on every rank."""
    bad = RouteRequest(**{"request_id": 0, "token_count": 5, **change})
    requests = [bad, RouteRequest(1, 7, conversation_id="c"), RouteRequest(2, 9, child_count=1, kv_block_count=1)]
    results = [Router(policy).route(requests, [RankState(0), RankState(1)]) for _ in range(2)]
    assert [(e.request_id, e.field) for e in results[0].errors] == [(bad.request_id, field)]
    assert sorted(i for ids in results[0].assignments.values() for i in ids) == [1, 2]
    assert results[0].digest == results[1].digest
    assert field in results[0].explain()


def test_ids_may_be_large():
    """Ids of more than 64 bits are ids like any other, and different ones have different digests."""
    results = [Router().route([RouteRequest((1 << 70) + i, 5)], [RankState(0)]) for i in range(2)]
    assert results[0].assignments == {0: (1 << 70,)}
    assert results[0].digest != results[1].digest


def test_minus_one_is_no_target_only_in_columns():
    """A column of integers needs a number for "none"; -1 is it there, None too. A request says None."""
    ranks = [RankState(0), RankState(1)]
    result = Router().route(RouteBatch([1, 2, 3], [9, 8, 7], target_ranks=[-1, 1, None]), ranks)
    assert not result.errors
    assert 2 in result.assignments[1]
    result = Router().route(RouteBatch([1], [9], target_ranks=[-1], minus_one_is_no_target=False), ranks)
    assert [e.field for e in result.errors] == ["target_rank"]


def test_columns_may_be_arrays():
    """The same result as from lists."""
    np = pytest.importorskip("numpy")
    ids, sizes, targets = np.arange(50), np.arange(50) * 10, np.full(50, -1)
    ranks = [RankState(0), RankState(1)]
    first = Router().route(RouteBatch(ids, sizes, target_ranks=targets), ranks)
    second = Router().route(RouteBatch(ids.tolist(), sizes.tolist(), target_ranks=targets.tolist()), ranks)
    assert (first.assignments, first.digest) == (second.assignments, second.digest)


def test_columns_of_unequal_length_are_refused():
    """Nothing is routed; the column is named."""
    router = Router()
    with pytest.raises(RouteBatchError, match=r"kv_block_counts: want one entry per request \(2\), got 1"):
        router.route(RouteBatch([1, 2], [3, 4], kv_block_counts=[1]), [RankState(0)])
    assert router.statistics().calls == 0


@pytest.mark.parametrize(
    "state", [RankState("a"), RankState(-1), RankState(0, 1.5), RankState(0, 0, None), RankState(0, free_slots="x")]
)
def test_ranks_of_wrong_type_are_refused(state):
    """Names position and field."""
    with pytest.raises(RankStateError, match=r"ranks\[1\]"):
        Router().route([], [RankState(5), state])


class Engine:
    """An engine's request; its tokens must not be read."""

    def __init__(self, identity, count, **extra):
        self.request_id = identity
        self.count = count
        self.__dict__.update(extra)

    @property
    def input_token_ids(self):
        raise AssertionError("token list was read")


class Item:
    """A queue item around it."""

    def __init__(self, identity, request, children=None):
        self.id = identity
        self.request = request
        self.child_req_ids = children


class Parameters:
    def __init__(self, rank=None, relax=None):
        self.attention_dp_rank = rank
        self.attention_dp_relax = relax


def test_columns_and_objects_say_the_same():
    """Mixed kinds of objects: queue items, parameters here and there, children, conversations."""
    objects = [
        Engine(1, 10),
        Item(2, Engine(0, 20, scheduling_params=Parameters(1, False))),
        Item(3, Engine(0, 30, py_scheduling_params=Parameters(0, True)), [7, 8]),
        Engine(4, 40, conversation_id="c", scheduling_params=None),
        Engine(5, 50, scheduling_params=Parameters()),
    ]
    batch = batch_from(objects, length=lambda r: r.count, kv_blocks=lambda r: r.count // 10)
    requests = requests_from(objects, length=lambda r: r.count, kv_blocks=lambda r: r.count // 10)
    assert requests == [
        RouteRequest(1, 10, kv_block_count=1),
        RouteRequest(2, 20, 1, strict=True, kv_block_count=2),
        RouteRequest(3, 30, 0, child_count=2, kv_block_count=3),
        RouteRequest(4, 40, conversation_id="c", kv_block_count=4),
        RouteRequest(5, 50, kv_block_count=5),
    ]
    ranks = [RankState(0), RankState(1)]
    for policy in POLICIES:
        first, second = Router(policy).route(batch, ranks), Router(policy).route(requests, ranks)
        assert (first.assignments, first.errors, first.digest) == (second.assignments, second.errors, second.digest)


def test_an_object_without_id_or_length_is_an_error():
    """Named by the attribute."""
    with pytest.raises(AttributeError, match="request_id"):
        batch_from([object()], length=lambda r: 1)
    with pytest.raises(AttributeError, match="input_token_ids"):
        batch_from([Item(1, None)])
    assert len(batch_from([])) == 0


def test_attributes_are_found_wherever_a_class_keeps_them():
    """Slots, properties, ``__getattr__``, a class attribute, one object of many: as if looked for one by one."""

    class Slotted:
        __slots__ = ("conversation_id", "request_id")

        def __init__(self, identity, conversation):
            self.request_id, self.conversation_id = identity, conversation

    class Computed(Engine):
        @property
        def conversation_id(self):
            return "computed"

    class Forwarding:
        def __init__(self, inner):
            self._inner = inner

        def __getattr__(self, name):
            return getattr(self._inner, name)

    class Shared(Engine):
        conversation_id = "shared"

    objects = [Engine(i, 1) for i in range(20)]
    assert batch_from(objects, length=lambda r: 1).conversation_ids is None
    objects[7].conversation_id = "late"
    for extra, wanted in (
        (Slotted(50, "slot"), "slot"), (Computed(51, 1), "computed"), (Shared(52, 1), "shared"),
        (Forwarding(Engine(53, 1, conversation_id="far")), "far"), (Item(54, Engine(0, 1, conversation_id="in")), "in"),
    ):  # fmt: skip
        found = batch_from([*objects, extra], length=lambda r: 1).conversation_ids
        assert (found[7], found[20], set(found)) == ("late", wanted, {"late", wanted, None})
        assert batch_from([extra], length=lambda r: 1).conversation_ids == [wanted]


def test_every_attribute_is_read_at_most_once():
    """Properties and ``__getattr__``, among objects that lack the attribute; both names of parameters, both of ids."""
    reads = []

    def told(name, value):
        return property(lambda self: reads.append((id(self), name)) or value)

    class Computing(Engine):
        conversation_id = told("conversation_id", "c")
        child_req_ids = told("child_req_ids", [1])
        scheduling_params = told("scheduling_params", Parameters(1, False))
        py_scheduling_params = told("py_scheduling_params", Parameters(0, True))

    class Forwarding:
        def __init__(self, **values):
            self._values = values

        def __getattr__(self, name):
            reads.append((id(self), name))
            try:
                return self._values[name]
            except KeyError:
                raise AttributeError(name) from None

    objects = [
        Computing(1, 1), Computing(2, 1), Engine(3, 1), Computing(4, 1), Item(5, Computing(0, 1)), Item(6, Engine(0, 1)),
        Forwarding(request_id=7, count=1, py_scheduling_params=Parameters(0, False)), Forwarding(id=8, count=1, request=None),
    ]  # fmt: skip
    # With and without objects of a class that computes all its attributes: nothing is asked first where there is one.
    for given, ids in (
        (objects, [1, 2, 3, 4, 5, 6, 7, 8]), (objects[::-1], [8, 7, 6, 5, 4, 3, 2, 1]),
        (objects[:6], [1, 2, 3, 4, 5, 6]), (objects[5::-1], [6, 5, 4, 3, 2, 1]),
    ):  # fmt: skip
        reads.clear()
        batch = batch_from(given, length=lambda r: 1)
        assert batch.request_ids == ids
        assert len(reads) == len(set(reads)) > 10
        by_id = dict(
            zip(
                ids,
                zip(batch.target_ranks, batch.strict, batch.conversation_ids, batch.child_counts, strict=True),
                strict=True,
            )
        )
        wanted = {
            1: (1, True, "c", 1), 2: (1, True, "c", 1), 3: (None, False, None, 0), 4: (1, True, "c", 1),
            5: (1, True, "c", 0), 6: (None, False, None, 0), 7: (0, True, None, 0), 8: (None, False, None, 0),
        }  # fmt: skip
        assert by_id == {identity: wanted[identity] for identity in ids}


@pytest.mark.parametrize("name", ["request_id", "id", "request"])
def test_what_a_class_computes_is_read_once_where_others_lack_it(name):
    """Names that are read by code of their own, on plain objects without them and on objects whose class computes them."""
    reads = []
    values = {"request_id": 1, "id": 1, "request": Engine(0, 1)}
    computing = type("Computing", (), {name: property(lambda self: reads.append(name) or values[name]), "count": 1})
    first = computing()
    if name == "request":
        first.request_id = 1
    lacking = Item(2, Engine(0, 1)) if name == "request_id" else Engine(2, 1)
    batch = batch_from([first, lacking], length=lambda r: 1)
    assert list(batch.request_ids) == [1, 2]
    assert reads == [name]


def test_parameters_of_either_name_are_found():
    """``scheduling_params`` where it says something, else the other; all objects of one kind, or some of each."""
    first, second = Parameters(1, False), Parameters(0, False)
    kinds = [
        ({"scheduling_params": first}, 1), ({"py_scheduling_params": second}, 0),
        ({"scheduling_params": first, "py_scheduling_params": second}, 1),
        ({"scheduling_params": None, "py_scheduling_params": second}, 0),
    ]  # fmt: skip
    for extra, target in kinds:
        objects = [Engine(i, 1, **extra) for i in range(3)]
        assert batch_from(objects, length=lambda r: 1).target_ranks == [target] * 3
    mixed = [Engine(i, 1, **extra) for i, (extra, _) in enumerate(kinds)]
    assert batch_from(mixed, length=lambda r: 1).target_ranks == [target for _, target in kinds]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize(
    "name", ["request", "request_id", "child_req_ids", "scheduling_params", "conversation_id", "input_token_ids"]
)
def test_what_an_engines_object_raises_comes_out_as_it_is(name, error):
    """It is the engine's own: nothing was made, and nothing is hidden."""

    def fail(self):
        raise error("mine")

    class Plain:
        pass

    plain = Plain()
    plain.request_id, plain.input_token_ids = 1, [1, 2]
    odd = type("Odd", (Plain,), {"request_id": 2, "input_token_ids": [3], name: property(fail)})()
    with pytest.raises(error, match="mine"):
        batch_from([plain, odd])
    assert batch_from([plain]).token_counts == [2]
