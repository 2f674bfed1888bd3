"""Decisions of the front and of instances as one story per request, and its words."""

from __future__ import annotations

from typing import Any

from meta_executor import wire
from meta_executor.observe import stories, text_of
from meta_executor.observe.explain import chosen


def choice(request_id: int, role: str, owner_id: str, age_s: float = 1.0, **more: Any) -> wire.LegDecision:
    return wire.LegDecision(
        request_id=request_id, role=role, owner_id=owner_id, age_s=age_s,
        **{"why": "least loaded of 2", "weight": 7, "load_weight": 30, "load_requests": 1, **more},
    )  # fmt: skip


def inside(request_id: int, rank: int, age_s: float = 0.5, **more: Any) -> wire.RoutingDecision:
    return wire.RoutingDecision(
        request_id=request_id, rank=rank, age_s=age_s, **{"why": "least loaded", "tokens": 5, **more}
    )


def instance(owner_id: str, role: str, *decisions: wire.RoutingDecision) -> wire.InstanceRouting:
    return wire.InstanceRouting(
        role=role, owner_id=owner_id, policy="p", decided=len(decisions), decisions=list(decisions)
    )


def routing(*decisions: wire.LegDecision, instances: Any = (), unknown: Any = None) -> wire.ServiceRouting:
    return wire.ServiceRouting(
        policy="balanced",
        decided=len(decisions),
        decisions=list(decisions),
        instances=list(instances),
        unknown=unknown or {},
    )


def test_a_story_joins_both_legs_with_what_happened_inside() -> None:
    """By request id and instance; the newest request is last whatever the order of the lists."""
    told = stories(
        routing(
            choice(0x2B, "context", "ctx-0", 3.0),
            choice(0x1A, "context", "ctx-0", 2.0),
            choice(0x2B, "generation", "gen-1", 1.0),
            instances=[
                instance("ctx-0", "context", inside(0x1A, -1, 1.9), inside(0x2B, -1, 2.9)),
                instance("gen-0", "generation"),
                instance("gen-1", "generation", inside(0x2B, 1, 0.9)),
            ],
        )
    )
    assert [(s.request_id, s.age_s) for s in told] == [("1a", 1.9), ("2b", 0.9)]
    assert [(leg.role, leg.owner_id, leg.inside and leg.inside.rank) for leg in told[1].legs] == [
        ("context", "ctx-0", -1),
        ("generation", "gen-1", 1),
    ]


def test_what_is_missing_says_why() -> None:
    """Not admitted or forgotten, an instance that cannot be asked, a choice that the front has forgotten."""
    (one,) = stories(
        routing(
            choice(5, "context", "ctx-0"),
            choice(5, "generation", "gen-0"),
            instances=[instance("ctx-0", "context")],
            unknown={"gen-0": "UNREACHABLE: refused"},
        )
    )
    assert [leg.missing for leg in one.legs] == [
        "has not let it in, or has forgotten it",
        "cannot be asked: UNREACHABLE: refused",
    ]
    (alone,) = stories(routing(instances=[instance("gen-0", "generation", inside(9, 1))]))
    assert (alone.legs[0].choice, alone.legs[0].missing, alone.request_id) == (None, "", "9")


def test_the_words_name_instance_rank_reason_load_and_wait() -> None:
    """The whole text of one story."""
    (story,) = stories(
        routing(
            choice(
                0xABC, "context", "ctx-0", 2.0, why="the only one that can be picked", load_weight=0, load_requests=0
            ),
            choice(0xABC, "generation", "gen-1", 1.9),
            instances=[
                instance(
                    "ctx-0", "context", inside(0xABC, -1, 1.8, why="every stage", waited_ms=12.34, waited_for="a place")
                ),
                instance("gen-1", "generation", inside(0xABC, 1, 1.25, load_tokens=34, load_requests=2, tokens=1)),
            ],
        )
    )
    assert text_of(story).splitlines() == [
        "request abc, 1.2 s ago",
        "  context     ctx-0: the only one that can be picked (it had 0 tokens in 0 requests)",
        "                all ranks: every stage; 5 tokens of prompt; waited 12.3 ms, last for a place",
        "  generation  gen-1: least loaded of 2 (it had 30 tokens in 1 request)",
        "                rank 1: least loaded (it had 34 tokens in 2 requests); 1 token of prompt",
    ]


def test_the_last_ones_or_the_ones_asked_for() -> None:
    """Ids in hexadecimal, in either case, with or without what stands before them; unknown ones come back."""
    told = stories(routing(*(choice(n, "context", "ctx-0", 100.0 - n) for n in range(1, 31))))
    assert [s.request_id for s in chosen(told, (), 2)[0]] == ["1d", "1e"]
    found, missing = chosen(told, ("0x1D", "cmpl-a", "ff"), 1)
    assert ([s.request_id for s in found], missing) == (["a", "1d"], ["ff"])
