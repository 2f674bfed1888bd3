"""Routing: time per call, reads of token lists, balance over the lower bound."""

from __future__ import annotations

import gc
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from adp_router import RankState, RouteBatch, Router, RouterConfig, RouteRequest, batch_from
from adp_router.testing import lower_bound

RANKS = 8
TOKENS = 8192


class Engine:
    """An engine's request whose token list is copied at each look."""

    def __init__(self, identity: int, count: int) -> None:
        self.request_id = identity
        self.count = count
        self.tokens = range(count)
        self.reads = 0

    @property
    def input_token_ids(self) -> list[int]:
        """Copies."""
        self.reads += 1
        return list(self.tokens)


class Sealed(Engine):
    """Its token list must not be looked at."""

    @property
    def input_token_ids(self) -> list[int]:
        """Never."""
        raise AssertionError("token list was read")


def ranks() -> list[RankState]:
    """Three capacities each, free and in all."""
    most = (1000, 10_000_000, 1_000_000_000)
    return [RankState(r, r * 10, 0, *most, False, *most) for r in range(RANKS)]


def in_turn_ms(bodies: Sequence[Callable[[], object]], rounds: int) -> list[list[float]]:
    """Times of several bodies, in turn: processor time of this thread, which holds the interpreter's lock (ms).

    Each is called twice and the second call counts: it finds caches and allocator as it left them, not as the body before did.
    """
    times: list[list[float]] = [[] for _ in bodies]
    gc.collect()
    for _ in range(rounds):
        for body, column in zip(bodies, times, strict=True):
            body()
            start = time.thread_time()
            body()
            column.append((time.thread_time() - start) * 1e3)
    return times


def two_reads(objects: list[Engine]) -> dict[int, list[int]]:
    """The baseline: a heap, and the token list read for the sort and again for the load."""
    import heapq

    heap = [(0, 0, r) for r in range(RANKS)]
    found: dict[int, list[int]] = {r: [] for r in range(RANKS)}
    for item in sorted(objects, key=lambda o: len(o.input_token_ids), reverse=True):
        tokens, count, rank = heapq.heappop(heap)
        found[rank].append(item.request_id)
        heapq.heappush(heap, (tokens + len(item.input_token_ids), count + 1, rank))
    return found


def figure(
    name: str, value: float, unit: str, baseline: Any, ratio: float | None, goal: str, met: bool | None
) -> dict[str, Any]:
    """One line."""
    return {
        "name": f"adp-router: {name}", "value": round(value, 4), "unit": unit, "baseline": baseline,
        "ratio": None if ratio is None else round(ratio, 2), "goal": goal, "met": met,
    }  # fmt: skip


class Item:
    """A queue's item around an engine's request."""

    def __init__(self, request: Engine) -> None:
        self.id = request.request_id
        self.request = request


def input_forms(router: Router, sizes: list[int]) -> dict[str, Callable[[], object]]:
    """Every form in which requests may be given: three capacities, a length where tokens would be read, the digest."""
    count = len(sizes)
    states = ranks()
    columns = RouteBatch(list(range(count)), sizes, kv_block_counts=[256] * count)
    arrays = RouteBatch(np.arange(count), np.array(sizes), kv_block_counts=np.full(count, 256))
    objects = [Sealed(i, n) for i, n in enumerate(sizes)]
    items = [Item(o) for o in objects]
    requests = [RouteRequest(i, n, kv_block_count=256) for i, n in enumerate(sizes)]
    length = attrgetter("count")

    def engine(given: list[Any], *names: str) -> Callable[[], object]:
        if names:
            return lambda: router.route(batch_from(given, length=length, attributes=names), states)
        return lambda: router.route(batch_from(given, length=length), states)

    return {
        "columns": lambda: router.route(columns, states),
        "NumPy columns": lambda: router.route(arrays, states),
        "request objects": lambda: router.route(requests, states),
        "engine objects, attributes named": engine(objects, "child_req_ids"),
        "engine objects": engine(objects),
        "queue items, attributes named": engine(items, "request", "child_req_ids"),
        "queue items": engine(items),
    }


def timings() -> list[dict[str, Any]]:
    """Calls in each form, and the baseline, in turn: the ratio is the median of the rounds'."""
    found = []
    for count, goal, rounds in ((1, None, 101), (64, None, 31), (512, 200, 15), (4096, 350, 5)):
        rng = random.Random(count)
        sizes = [TOKENS + rng.randrange(100) for _ in range(count)]
        forms = input_forms(Router(), sizes)
        engines = [Engine(i, n) for i, n in enumerate(sizes)]
        base, *times = in_turn_ms([lambda engines=engines: two_reads(engines), *forms.values()], rounds)
        for form, column in zip(forms, times, strict=True):
            ratios = sorted(b / took for b, took in zip(base, column, strict=True))
            ratio = statistics.median(ratios)
            found.append(
                figure(
                    f"{count} requests, {form}",
                    statistics.median(column),
                    "ms",
                    f"two reads {statistics.median(base):.2f} ms; 1/{ratios[0]:.0f}..1/{ratios[-1]:.0f}",
                    ratio,
                    "" if goal is None else f"<= 1/{goal}",
                    None if goal is None else ratio >= goal,
                )
            )
    return found


def conversations() -> list[dict[str, Any]]:
    """One call with one turn, at 100 homes and at 65,536, in turn."""
    states = ranks()
    bodies = []
    for homes in (100, 65_536):
        router = Router("conversation")
        for start in range(0, homes, 4096):
            several = range(start, min(start + 4096, homes))
            router.route([RouteRequest(i, 1, conversation_id=f"c{i}") for i in several], states)
        turns = iter(range(homes, 1 << 40))
        bodies.append(
            lambda router=router, turns=turns, homes=homes: router.route(
                [RouteRequest(i := next(turns), 1, conversation_id=f"c{i * 7919 % homes}")], states
            )
        )
    times = in_turn_ms(bodies, 1001)
    few, many = map(statistics.median, times)
    spread = [
        f"{statistics.quantiles(column, n=20)[0]:.3f}..{statistics.quantiles(column, n=20)[-1]:.3f}" for column in times
    ]
    return [
        figure(
            "conversation, a call at 65,536 homes", many, "ms", f"100 homes {few:.3f} ms ({spread[0]}; {spread[1]})",
            many / few, "<= 2", many <= 2 * few,
        )
    ]  # fmt: skip


def reads() -> list[dict[str, Any]]:
    """Token lists read: once each without a length, never with one."""
    objects = [Engine(i, TOKENS) for i in range(512)]
    Router().route(batch_from(objects), ranks())
    sealed = [Sealed(i, TOKENS) for i in range(512)]
    Router().route(batch_from(sealed, length=lambda e: e.count), ranks())
    most = max(o.reads for o in objects)
    return [
        figure(
            "reads per token list without a length", most, "reads", "2", None, "= 1", {o.reads for o in objects} == {1}
        ),
        figure("reads per token list with a length", max(o.reads for o in sealed), "reads", "2", None, "= 0", True),
    ]


def balance() -> list[dict[str, Any]]:
    """64 lognormal requests on 8 ranks: fullest over lower bound, mean of 300; the count limit relaxed and not; half pinned."""
    empty = [RankState(r) for r in range(RANKS)]
    found = []
    for label, multiplier in (("relaxed", float("inf")), ("1.25", 1.25), ("1.0", 1.0)):
        free, pinned = [], []
        for seed in range(300):
            rng = random.Random(seed)
            sizes = [max(1, int(rng.lognormvariate(8, 1))) for _ in range(64)]
            pins = {i: rng.randrange(RANKS) for i in range(64) if rng.random() < 0.5}
            router = Router(config=RouterConfig(count_multiplier=multiplier))
            for targets, ratios in (({}, free), (pins, pinned)):
                requests = [RouteRequest(i, n, target_rank=targets.get(i)) for i, n in enumerate(sizes)]
                result = router.route(requests, empty)
                loads = [sum(sizes[i] for i in ids) for ids in result.assignments.values()]
                initial = [sum(sizes[i] for i, t in targets.items() if t == r) for r in range(RANKS)]
                ratios.append(max(loads) / lower_bound(initial, [n for i, n in enumerate(sizes) if i not in targets]))
        for what, ratios in (("free", free), ("half pinned", pinned)):
            mean = statistics.mean(ratios)
            wanted = label == "relaxed"
            found.append(
                figure(
                    f"balance, 64 lognormal, {what}, multiplier {label}", mean, "of the bound", f"worst {max(ratios):.3f}",
                    None, "<= 1.01" if wanted else "", mean <= 1.01 if wanted else None,
                )
            )  # fmt: skip
    return found


def main() -> list[dict[str, Any]]:
    """All figures."""
    return timings() + conversations() + reads() + balance()


if __name__ == "__main__":
    figures = main()
    for one in figures:
        mark = {True: "met", False: "MISSED", None: ""}[one["met"]]
        print(f"{one['name']:<75} {one['value']:>9} {one['unit']:<12} {one['baseline']:<22} {one['goal']:<9} {mark}")
    for one in figures:
        print(json.dumps(one))
