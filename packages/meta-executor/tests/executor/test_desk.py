"""Rank 0's desk: bounds, order of the broadcast, deadlines, and threads that submit while the loop collects."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from meta_executor.engine.base import SamplingParams
from meta_executor.executor.admission import ContextAdmission, GenerationAdmission
from meta_executor.executor.desk import DECISIONS_KEPT_MAX, Desk, DeskError, RankChoice
from meta_executor.executor.messages import Admit, Peer
from meta_executor.executor.ownership import Outcome
from meta_executor.executor.request import Answers, Notice, Request, make_answers


class Everything:
    policy = "all"

    def waits_for(self, submission):
        return ""

    def place(self, submissions):
        return [RankChoice(-1, "all of them")] * len(submissions)

    def left(self, client):
        pass


def desk(admission=None, requests_max=10, role="context", delivered=None) -> Desk:
    return Desk(
        role=role,
        admission=admission or Everything(),
        requests_max=requests_max,
        deliver=(delivered if delivered is not None else []).append,
        wake=lambda: None,
        clock=lambda: 0.0,
    )


def submission(request_id: int, **fields) -> Request:
    tokens = np.arange(4, dtype=np.int32)
    return Request(request_id=request_id, token_ids=tokens, sampling=SamplingParams(3), **fields)


def test_incarnations_are_dense_in_the_order_of_admission() -> None:
    """1, 2, 3 …; peers go first, so every rank knows a peer before a request that names it."""
    made = desk()
    for request_id in (7, 3, 9):
        made.submit(submission(request_id))
    made.announce_peer(Peer("c/g", b"", ()))
    items, stops = made.collect(0.0)
    assert isinstance(items[0], Peer) and stops == []
    assert [(i.request.request_id, i.incarnation) for i in items[1:] if isinstance(i, Admit)] == [
        (7, 1),
        (3, 2),
        (9, 3),
    ]
    assert made.last_incarnation == 3


def test_beyond_its_bound_and_while_draining_nothing_is_taken() -> None:
    """Codes BACKPRESSURE and DRAINING; what is here goes on."""
    made = desk(requests_max=2)
    made.submit(submission(1))
    made.submit(submission(2))
    with pytest.raises(DeskError) as caught:
        made.submit(submission(3))
    assert caught.value.code == "BACKPRESSURE"
    assert made.drain(5.0) == 2
    with pytest.raises(DeskError) as caught:
        made.submit(submission(4))
    assert caught.value.code == "DRAINING"
    assert made.statistics().refused == 2


def test_a_queued_request_is_stopped_here_and_an_admitted_one_by_the_loop() -> None:
    """The queued one's client hears at once; the admitted one is a stop that the loop authors, once."""
    delivered: list[Answers] = []
    credit = [1]
    admission = ContextAdmission(
        peer_is_ready=lambda r: True, pre_active_count=lambda: 0, pre_active_max=9, credits=lambda: credit[0]
    )
    made = desk(admission, delivered=delivered)
    made.submit(submission(1))
    made.submit(submission(2))
    items, _ = made.collect(0.0)
    assert [i.request.request_id for i in items] == [1], "one credit admits one"
    for request_id in (1, 2, 1):
        made.abort(request_id, "gone")
    _, stops = made.collect(0.0)
    assert stops == [(1, Outcome.CANCELLED, "gone", "CANCELLED")]
    made.hand_out()
    assert [(n.request_id, n.finish_reason) for batch in delivered for n in batch.notices] == [(2, "cancelled")]


def test_deadlines_are_looked_at_when_the_earliest_has_passed() -> None:
    """Only the one that is over is stopped, with code DEADLINE."""
    made = desk()
    made.submit(submission(1, deadline_s=5.0))
    made.submit(submission(2, deadline_s=9.0))
    made.collect(0.0)
    assert made.collect(4.9)[1] == []
    assert [(r, c) for r, _, _, c in made.collect(5.0)[1]] == [(1, "DEADLINE")]
    assert made.collect(6.0)[1] == []


def test_answers_are_handed_out_once_per_call_and_the_last_one_ends_the_request() -> None:
    """Generation: several answers of a step in one delivery; the notice with a finish reason ends the request."""
    delivered: list[Answers] = []
    made = desk(GenerationAdmission(rank_count=2, policy="balanced"), role="generation", delivered=delivered)
    made.submit(submission(1))
    made.submit(submission(2))
    made.collect(0.0)
    made.answer(make_answers([(1, 5), (2, 6)], [Notice(2, "length")]))
    made.answer(make_answers([(1, 8)], [Notice(1, "stop")]))
    assert made.hand_out() and not made.hand_out()
    (handed,) = delivered
    assert list(handed.pairs()) == [(1, 5), (2, 6), (1, 8)]
    assert [(n.request_id, n.finish_reason) for n in handed.notices] == [(2, "length"), (1, "stop")]
    assert made.live_count == 0 and made.statistics().tokens_returned == 3


def test_generation_requests_are_spread_and_their_load_is_given_back() -> None:
    """Four equal requests on two ranks: two each; after their end the loads are zero."""
    admission = GenerationAdmission(rank_count=2, policy="balanced")
    made = desk(admission, role="generation")
    for request_id in range(1, 5):
        made.submit(submission(request_id))
    items, _ = made.collect(0.0)
    assert sorted(i.target_rank for i in items) == [0, 0, 1, 1]
    assert admission.routed == [2, 2]
    decided, decisions = made.routing()
    assert decided == 4 and [d.request_id for d in decisions] == [1, 2, 3, 4]
    assert [d.rank for d in decisions] == [i.target_rank for i in items]
    assert {d.why for d in decisions} == {"least loaded", "least loaded, and its turn among equals"}
    assert {d.tokens for d in decisions} == {4}
    loads = {0: 0, 1: 0}
    for decision in decisions:
        assert decision.load_tokens == loads[decision.rank] and decision.load_requests == loads[decision.rank] // 4
        loads[decision.rank] += 4
    made.answer(make_answers([(r, 1) for r in range(1, 5)], [Notice(r, "length") for r in range(1, 5)]))
    assert [(load.tokens, load.requests) for load in admission._loads] == [(0, 0), (0, 0)]


def test_submitting_from_many_threads_loses_and_doubles_nothing() -> None:
    """400 submissions from four threads while the loop collects: each admitted exactly once."""
    made = desk(requests_max=1000)
    threads = [
        threading.Thread(target=lambda n=n: [made.submit(submission(1 + n * 100 + i)) for i in range(100)])
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    seen: list[int] = []
    while any(t.is_alive() for t in threads) or len(seen) < 400:
        seen.extend(i.request.request_id for i in made.collect(0.0)[0])
    assert sorted(seen) == list(range(1, 401))


def test_a_decision_says_what_the_request_waited_for_and_how_long() -> None:
    """One credit, then a destination: the last thing that held it back is told; the one that did not wait says nothing."""
    now = [10.0]
    credit, here = [1], [False]
    admission = ContextAdmission(
        peer_is_ready=lambda r: here[0], pre_active_count=lambda: 0, pre_active_max=9, credits=lambda: credit[0]
    )
    made = Desk(
        role="context",
        admission=admission,
        requests_max=10,
        deliver=lambda answers: None,
        wake=lambda: None,
        clock=lambda: now[0],
    )
    made.submit(submission(1))
    made.submit(submission(2))
    made.submit(submission(3, schedule_style="generation_first"))
    made.collect(10.0)
    assert [(d.request_id, d.rank, d.waited_for) for d in made.routing()[1]] == [(1, -1, "")]
    credit[0] = 2
    made.admission_may_have_changed()
    made.collect(10.5)
    here[0] = True
    made.admission_may_have_changed()
    made.collect(12.0)
    now[0] = 13.0
    decided, decisions = made.routing()
    assert decided == 3
    assert [(d.request_id, d.waited_ms, d.waited_for, d.age_s) for d in decisions] == [
        (1, 0.0, "", 3.0),
        (2, 500.0, "a credit of the agreement", 2.5),
        (3, 2000.0, "its destination from the generation instance", 1.0),
    ]


def test_decisions_are_bounded_and_a_reader_never_disturbs_the_loop() -> None:
    """Thousands of decisions while another thread looks: never more than are kept, dense, in order, the count right."""
    made = desk(requests_max=10_000)
    seen: list[tuple[int, list[int]]] = []
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            decided, decisions = made.routing()
            seen.append((decided, [d.request_id for d in decisions]))

    reader = threading.Thread(target=look)
    reader.start()
    for request_id in range(1, 3001):
        made.submit(submission(request_id))
        made.collect(0.0)
    stop.set()
    reader.join()
    seen.append((made.routing()[0], [d.request_id for d in made.routing()[1]]))
    assert seen[-1] == (3000, list(range(3001 - DECISIONS_KEPT_MAX, 3001)))
    for decided, ids in seen:
        assert len(ids) == min(decided, DECISIONS_KEPT_MAX)
        # A copy may miss the place that is being written now, never the order.
        assert ids == sorted(ids) and (not ids or ids[-1] == decided)
    assert [d.request_id for d in made.routing(3)[1]] == [2998, 2999, 3000]
