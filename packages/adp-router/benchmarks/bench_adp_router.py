"""Routing: time per call, reads of token lists, balance over the lower bound."""

from __future__ import annotations

import gc
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from adp_router import RankState, RouteBatch, Router, RouterConfig, RouteRequest, batch_from
from adp_router.testing import lower_bound

RANKS = 8
TOKENS = 8192
ROUNDS = 31


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
    """Three capacities each."""
    return [RankState(r, r * 10, 0, 1000, 10_000_000, 1_000_000_000) for r in range(RANKS)]


def median_ms(body: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Median of several runs (ms)."""
    times = []
    gc.collect()
    for _ in range(rounds):
        start = time.perf_counter()
        body()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def in_turn_ms(bodies: list[Callable[[], object]]) -> list[list[float]]:
    """Sorted times of several bodies, measured in turn (ms)."""
    times: list[list[float]] = [[] for _ in bodies]
    gc.collect()
    for _ in range(ROUNDS):
        for body, column in zip(bodies, times, strict=True):
            start = time.perf_counter()
            body()
            column.append((time.perf_counter() - start) * 1e3)
    return [sorted(column) for column in times]


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


def timings() -> list[dict[str, Any]]:
    """Calls with length, three capacities and the digest."""
    found = []
    states = ranks()
    router = Router()
    for count, goal_ms in ((1, None), (64, None), (512, 0.5), (4096, 2.5)):
        rng = random.Random(count)
        sizes = [TOKENS + rng.randrange(100) for _ in range(count)]
        batch = RouteBatch(list(range(count)), sizes, kv_block_counts=[256] * count)
        objects = [Sealed(i, n) for i, n in enumerate(sizes)]
        requests = [RouteRequest(i, n, kv_block_count=256) for i, n in enumerate(sizes)]
        base = median_ms(lambda count=count: two_reads([Engine(i, TOKENS) for i in range(count)]), 3)
        ways: tuple[tuple[str, Callable[[], object]], ...] = (
            ("columns", lambda batch=batch: router.route(batch, states)),
            (
                "engine objects with a length",
                lambda o=objects: router.route(batch_from(o, length=lambda e: e.count), states),
            ),
            (
                "engine objects with a length, attributes named",
                lambda o=objects: router.route(
                    batch_from(o, length=lambda e: e.count, attributes=("child_req_ids",)), states
                ),
            ),
            ("request objects", lambda requests=requests: router.route(requests, states)),
        )
        for (way, _), times in zip(ways, in_turn_ms([body for _, body in ways]), strict=True):
            took = statistics.median(times)
            met = None if goal_ms is None else took <= goal_ms
            goal = "" if goal_ms is None else f"<= {goal_ms} ms"
            found.append(
                figure(
                    f"{count} requests, {way}",
                    took,
                    "ms",
                    f"two reads {base:.2f} ms; quartiles {times[len(times) // 4]:.3f}..{times[3 * len(times) // 4]:.3f}",
                    base / took,
                    goal,
                    met,
                )
            )
    return found


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
    return timings() + reads() + balance()


if __name__ == "__main__":
    figures = main()
    for one in figures:
        mark = {True: "met", False: "MISSED", None: ""}[one["met"]]
        print(f"{one['name']:<75} {one['value']:>9} {one['unit']:<12} {one['baseline']:<22} {one['goal']:<9} {mark}")
    for one in figures:
        print(json.dumps(one))
