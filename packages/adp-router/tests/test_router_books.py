"""What ranks hold, by what was placed and what ended; and the check of those who keep such books."""

import sys
from dataclasses import replace

import pytest

from adp_router import RankBooks, RankState, RankStateError, RouteBatch, RouteBatchError, Router, RouteRequest
from adp_router.testing import check_balancer

RANKS = (RankState(3, total_slots=3, total_kv_blocks=9), RankState(1, total_tokens=500), RankState(7))


def loads(books):
    return [
        (s.rank, s.token_count, s.request_count, s.free_slots, s.free_kv_blocks, s.free_tokens) for s in books.states()
    ]


def test_what_is_placed_is_held_until_it_ends():
    """Tokens, sequences with children, blocks; what is free follows from the totals."""
    books = RankBooks(RANKS)
    assert loads(books) == [(3, 0, 0, 3, 9, None), (1, 0, 0, None, None, 500), (7, 0, 0, None, None, None)]
    asked = [
        RouteRequest(10, 400, target_rank=3, strict=True, child_count=1, kv_block_count=4),
        RouteRequest(11, 100, target_rank=1, strict=True, kv_block_count=2),
    ]
    books.route(Router(), asked)
    held = [(3, 400, 2, 1, 5, None), (1, 100, 1, None, None, 400), (7, 0, 0, None, None, None)]
    assert loads(books) == held
    assert books.held_by(3) == (10,)
    assert len(books) == 2
    assert books.ended(10) == 3
    assert loads(books)[0] == (3, 0, 0, 3, 9, None)
    with pytest.raises(KeyError):
        books.ended(10)
    with pytest.raises(KeyError):
        books.held_by(2)


def test_columns_are_entered_as_objects_are():
    """A batch of columns, one of whose requests is left over and one of whose is bad."""
    books = RankBooks([RankState(0, total_slots=2)])
    result = books.route(Router(), RouteBatch([5, 6, 7, 8], [10, 20, -1, 30]))
    assert [e.request_id for e in result.errors] == [7]
    assert len(result.leftovers) == 1
    assert loads(books) == [(0, 50, 2, 0, None, None)]


def test_a_request_that_is_held_is_not_routed_again():
    """Its end would otherwise end both; nothing of the batch is placed."""
    books, router = RankBooks([RankState(0), RankState(1)]), Router()
    books.route(router, [RouteRequest(1, 10)])
    before = (loads(books), router.statistics())
    with pytest.raises(RouteBatchError, match="request_id: 1 is held by rank 0 already"):
        books.route(router, [RouteRequest(2, 10), RouteRequest(1, 10)])
    assert (loads(books), router.statistics()) == before


def test_a_draining_rank_takes_nothing_and_keeps_what_it_has():
    """Until it is told that it drains no more."""
    books, router = RankBooks([RankState(0), RankState(1)]), Router()
    books.route(router, [RouteRequest(i, 10) for i in range(2)])
    books.drain(0)
    assert books.route(router, [RouteRequest(5, 10)]).assignments == {0: (), 1: (5,)}
    assert books.held_by(0)
    books.drain(0, False)
    assert books.route(router, [RouteRequest(6, 10)]).assignments == {0: (6,), 1: ()}
    with pytest.raises(KeyError):
        books.drain(2)


@pytest.mark.parametrize(
    "state", [RankState(0, 1), RankState(0, 0, 1), RankState(0, free_slots=4), RankState(0, free_tokens=4)]
)
def test_books_begin_with_empty_ranks(state):
    """A load that nobody placed would never end; what is free follows from totals alone."""
    with pytest.raises(RankStateError, match="want a rank that holds nothing"):
        RankBooks([state])


def test_ranks_are_checked_as_the_router_checks_them():
    """None, or one twice."""
    with pytest.raises(RankStateError, match="at least one"):
        RankBooks([])
    with pytest.raises(RankStateError, match="twice"):
        RankBooks([RankState(0), RankState(0)])


class Host:
    """A balancer as a front writes one."""

    def __init__(self, policy="balanced"):
        self.books = RankBooks([RankState(rank, total_slots=4, total_tokens=5000) for rank in range(3)])
        self.router = Router(policy)

    def offer(self, request):
        result = self.books.route(self.router, [request])
        return next((rank for rank, ids in result.assignments.items() if ids), None)

    def ended(self, request_id):
        self.books.ended(request_id)

    def states(self):
        return self.books.states()


@pytest.mark.parametrize("policy", ["balanced", "round_robin", "prefix", "conversation"])
def test_a_balancer_with_books_conforms(policy):
    """Whatever the policy and the order of ends."""
    for seed in range(3):
        check_balancer(Host(policy), count=80, seed=seed)


class Forgets(Host):
    def ended(self, request_id):
        if request_id % 50:
            super().ended(request_id)


class RefusesAll(Host):
    def offer(self, request):
        return None


class Elsewhere(Host):
    def offer(self, request):
        rank = super().offer(request)
        return None if rank is None else (rank + 1) % 3


class Nowhere(Host):
    def offer(self, request):
        rank = super().offer(request)
        return None if rank is None else rank + 3


class Busy(Host):
    def __init__(self):
        super().__init__()
        self.offer(RouteRequest(-1, 1))


class Miscounts(Host):
    def states(self):
        return [replace(state, token_count=state.token_count - state.request_count) for state in super().states()]


class Negative(Host):
    def states(self):
        return [replace(state, free_tokens=-1) if state.token_count else state for state in super().states()]


class LosesSlots(Host):
    def states(self):
        return [replace(state, free_slots=min(state.free_slots, 3)) for state in super().states()]


class EndsInADrain(Host):
    def states(self):
        return [replace(state, draining=self.router.statistics().placed > 100) for state in super().states()]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Forgets, "holds . requests"),
        (Elsewhere, "holds 0 requests"),
        (Miscounts, "holds .* tokens"),
        (RefusesAll, "not placed though every rank is empty"),
        (Nowhere, "not among the states"),
        (Busy, "the balancer is not at rest"),
        (Negative, "more than it may"),
        (LosesSlots, "free slots"),
        (EndsInADrain, "not at rest after everything"),
    ],
)
def test_a_balancer_that_does_not_conform_is_found(kind, said):
    """Each mistake that such a host makes, by its name."""
    with pytest.raises(AssertionError, match=said):
        check_balancer(kind())


def test_an_interrupt_leaves_the_books_as_before_or_as_after():
    """At any bytecode of a placement and of an end: the loads are those of what is held."""
    for step in ("route", "end"):
        point, done = 0, False
        while not done:
            point += 1
            books, router = RankBooks(RANKS), Router()
            books.route(router, [RouteRequest(i, 10 + i) for i in range(3)])
            count = 0

            def trace(frame, event, arg, point=point):
                nonlocal count
                if "adp_router/_books" not in frame.f_code.co_filename:
                    return None
                frame.f_trace_opcodes = True
                if event == "opcode":
                    count += 1
                    if count == point:
                        raise KeyboardInterrupt
                return trace

            sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for it when tracing begins
            sys.settrace(trace)
            try:
                books.route(router, [RouteRequest(9, 50)]) if step == "route" else books.ended(1)
                done = True
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(None)
            ids = {i for state in RANKS for i in books.held_by(state.rank)}
            tokens = sum(50 if i == 9 else 10 + i for i in ids)
            assert ids in ({0, 1, 2}, {0, 1, 2, 9}, {0, 2})
            assert sum(s.token_count for s in books.states()) == tokens
            assert sum(s.request_count for s in books.states()) == len(ids) == len(books)
