"""Routing: time per call, reads of token lists, balance over the lower bound."""

from __future__ import annotations

import functools
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from adp_router import RankState, RouteBatch, Router, RouterConfig, RouteRequest, batch_from
from adp_router.testing import lower_bound

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
from measure import Figure, Sample, counted, in_turn, ratio, run_benchmark, shown, timed

RANKS = 8
TOKENS = 8192
#: As many tokens on the average, but lengths that hardly repeat; the others are of 100 lengths.
UNLIKE = "requests of unlike lengths"


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


def second_call(body: Callable[[], object]) -> Sample:
    """Processor time of this thread, which holds the interpreter's lock (s), of a call that finds caches and allocator as the
    same call left them, not as another body did."""

    def sample() -> float:
        body()
        began_s = time.thread_time()
        body()
        return time.thread_time() - began_s

    return sample


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


class Item:
    """A queue's item around an engine's request."""

    def __init__(self, request: Engine) -> None:
        self.id = request.request_id
        self.request = request


def input_forms(router: Router, sizes: list[int]) -> dict[str, Callable[[], object]]:
    """Every form in which requests may be given: three capacities, a length where tokens would be read, the digest; and what a
    rank needs of the result, its own requests."""
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
            return lambda: router.route(batch_from(given, length=length, attributes=names), states).ids_on(0)
        return lambda: router.route(batch_from(given, length=length), states).ids_on(0)

    return {
        "columns": lambda: router.route(columns, states).ids_on(0),
        "NumPy columns": lambda: router.route(arrays, states).ids_on(0),
        "request objects": lambda: router.route(requests, states).ids_on(0),
        "engine objects, attributes named": engine(objects, "child_req_ids"),
        "engine objects": engine(objects),
        "queue items, attributes named": engine(items, "request", "child_req_ids"),
        "queue items": engine(items),
    }


def timings() -> list[Figure]:
    """Calls in each form, and the baseline, in turn."""
    found = []
    alike = "requests"
    for count, what, goal, rounds in (
        (1, alike, None, 101), (64, alike, None, 31), (512, alike, 200, 41), (4096, alike, 350, 41),
        (4096, UNLIKE, None, 11),
    ):  # fmt: skip
        rng = random.Random(count)
        sizes = [1 + rng.randrange(2 * TOKENS) if what == UNLIKE else TOKENS + rng.randrange(100) for _ in range(count)]
        engines = [Engine(i, n) for i, n in enumerate(sizes)]
        baseline = "the same with two reads"
        # It makes gigabytes of its own: a call before the one that counts would make rounds twice as long, and it no faster.
        subjects = {baseline: timed(functools.partial(two_reads, engines), clock=time.thread_time)}
        subjects |= {form: second_call(body) for form, body in input_forms(Router(), sizes).items()}
        gc.collect()
        samples = in_turn(subjects, rounds)
        base = samples.pop(baseline)
        found += [
            ratio(
                f"{count} {what}, {form}, times less than {baseline}", base, column, unit="ms", scale=1e3,
                goal=None if goal is None else f">= {goal}", against=form,
            )
            for form, column in samples.items()
        ]  # fmt: skip
    return found


def conversations() -> list[Figure]:
    """One call with one turn, at 100 homes and at 65,536, in turn."""
    states = ranks()
    bodies = {}
    for homes in (65_536, 100):
        router = Router("conversation")
        for start in range(0, homes, 4096):
            several = range(start, min(start + 4096, homes))
            router.route([RouteRequest(i, 1, conversation_id=f"c{i}") for i in several], states)
        turns = iter(range(homes, 1 << 40))
        bodies[homes] = second_call(
            lambda router=router, turns=turns, homes=homes: router.route(
                [RouteRequest(i := next(turns), 1, conversation_id=f"c{i * 7919 % homes}")], states
            )
        )
    samples = in_turn(bodies, 1001)
    return [
        ratio("conversation, a call at 65,536 homes", samples[65_536], samples[100], unit="ms", scale=1e3, goal="<= 2.0",
              against="the same at 100 homes")
    ]  # fmt: skip


def reads() -> list[Figure]:
    """Token lists read: once each without a length, never with one."""
    objects = [Engine(i, TOKENS) for i in range(512)]
    Router().route(batch_from(objects), ranks())
    sealed = [Sealed(i, TOKENS) for i in range(512)]
    Router().route(batch_from(sealed, length=lambda e: e.count), ranks())
    return [
        counted("reads per token list without a length", max(o.reads for o in objects), "reads", "<= 1"),
        counted("reads per token list with a length", max(o.reads for o in sealed), "reads", "<= 0"),
    ]


def balance() -> list[Figure]:
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
            name = f"balance, 64 lognormal, {what}, multiplier {label}, fullest over lower bound"
            if label == "relaxed":
                found.append(counted(f"{name}, mean", statistics.mean(ratios), "share", "<= 1.01"))
            found.append(shown(name, ratios, unit="share"))
    return found


if __name__ == "__main__":
    run_benchmark(timings, conversations, reads, balance)
