"""Planning and validation of 32,768 fragments; encodings; a quadratic scan for comparison.

``python packages/kv-bounce-planner/benchmarks/bench_planning.py``
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import numpy as np

from kv_bounce_planner.planning import (
    InstanceLayout,
    KVLayout,
    RequestBlocks,
    TokenRange,
    WriterReport,
    decode_plan,
    decode_report,
    encode_plan,
    encode_report,
    plan_destination,
    plan_writer,
    validate_report,
)
from kv_bounce_planner.planning.report import check_fragments

FRAGMENTS = 32768
LAYERS, BLOCKS = 16, 1024


def best_s(action: Callable[[], object], repeats: int = 15) -> float:
    """Shortest of several runs, seconds."""
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - begin)
    return best


def layout(rank: int, base: int, layers: range, block_count: int, *, interleaved: bool = False) -> KVLayout:
    """128 B blocks: 16 layers x K, V x 1,024 blocks are 4 MiB in 32,768 fragments, none touching.

    ``interleaved``: all layers of a block lie inside it, so that ascending addresses mix layers.
    """
    run = 128
    if interleaved:
        stride = 2 * run * 2 * LAYERS
        keys = [base + 2 * run * i for i in range(len(layers))]
        values = [base + 2 * run * (i + LAYERS) for i in range(len(layers))]
    else:
        stride = 2 * run
        keys = [base + 2 * i * block_count * stride for i in range(len(layers))]
        values = [base + (2 * i + 1) * block_count * stride for i in range(len(layers))]
    return KVLayout.uniform(
        rank=rank,
        first_layer=layers.start,
        layer_count=len(layers),
        head_total=1,
        head_dim=64,
        element_bytes=2,
        block_tokens=1,
        block_count=block_count,
        key_bases=keys,
        value_bases=values,
        block_stride_bytes=stride,
    )


def quadratic_scan_s(count: int) -> float:
    """The naive check: for each fragment, is it inside any allowed range and does it overlap any other."""
    addresses = np.arange(count, dtype=np.int64) * 256
    sizes = np.full(count, 128, np.int64)
    begin = time.perf_counter()
    for i in range(count):
        inside = (addresses[i] >= addresses) & (addresses[i] + sizes[i] <= addresses + sizes)
        clash = (addresses[i] < addresses + sizes) & (addresses < addresses[i] + sizes[i])
        if not inside.any() or clash.sum() != 1:
            raise AssertionError
    return time.perf_counter() - begin


def figure(name: str, value: float, unit: str, baseline: float | None, goal: float | None) -> dict[str, object]:
    """One line of the report; for times lower is better."""
    return {
        "name": name,
        "value": round(value, 4),
        "unit": unit,
        "baseline": None if baseline is None else round(baseline, 4),
        "ratio": None if baseline is None else round(value / baseline, 4),
        "goal": goal,
        "met": None if goal is None else value <= goal,
    }


def main() -> list[dict[str, object]]:
    rng = np.random.default_rng(0)
    tokens = TokenRange(0, BLOCKS)
    blocks = RequestBlocks.single(rng.permutation(2 * BLOCKS)[:BLOCKS])
    theirs = RequestBlocks.single(rng.permutation(2 * BLOCKS)[:BLOCKS])
    results: list[dict[str, object]] = []
    shapes = {
        "one writer": (1, False, False),
        "four pipeline writers": (4, False, False),
        "four pipeline writers, layers inside blocks": (4, False, True),
    }
    for name, (stages, source_interleaved, target_interleaved) in shapes.items():
        share = LAYERS // stages
        source = InstanceLayout(
            "bench",
            tuple(
                layout(
                    rank,
                    (1 << 40) + rank * (1 << 32),
                    range(rank * share, (rank + 1) * share),
                    2 * BLOCKS,
                    interleaved=source_interleaved,
                )
                for rank in range(stages)
            ),
            pp_size=stages,
        )
        target = layout(0, 1 << 41, range(LAYERS), 2 * BLOCKS, interleaved=target_interleaved)
        plan = plan_destination(source, target, blocks, tokens)
        transfers = [plan_writer(source, rank, theirs, target, blocks, tokens) for rank in range(stages)]
        if sum(len(t.sizes) for t in transfers if t) != FRAGMENTS:
            raise AssertionError(f"{sum(len(t.sizes) for t in transfers if t)} fragments")
        digest = [
            encode_report(WriterReport.for_transfer(t.writer, operation_id=bytes(16), bound_base=64))
            for t in transfers
            if t
        ]
        explicit = [
            encode_report(WriterReport.for_transfer(t.writer, operation_id=bytes(16), bound_base=64, explicit=True))
            for t in transfers
            if t
        ]

        def plan_and_verify(reports: list[bytes]) -> None:
            fresh = plan_destination(source, target, blocks, tokens)  # noqa: B023
            for writer, data in zip(fresh.writers.values(), reports, strict=True):
                validate_report(writer, decode_report(data), bound_base=64)

        plan_s = best_s(lambda: plan_destination(source, target, blocks, tokens))  # noqa: B023
        whole_s = best_s(lambda: plan_and_verify(digest))  # noqa: B023
        explicit_s = best_s(lambda: plan_and_verify(explicit))  # noqa: B023
        sender_s = best_s(lambda: plan_writer(source, 0, theirs, target, blocks, tokens))  # noqa: B023
        results.append(figure(f"{name}: plan and verify, digest reports", 1e3 * whole_s, "ms", None, 4.0))
        results.append(figure(f"{name}: plan and verify, explicit reports", 1e3 * explicit_s, "ms", None, 4.0))
        results.append(figure(f"{name}: plan at the receiver", 1e3 * plan_s, "ms", None, None))
        results.append(figure(f"{name}: plan at one sender", 1e3 * sender_s, "ms", None, None))
        if stages == 1:
            writer = plan.writers[0]
            order = rng.permutation(FRAGMENTS)
            shuffled = writer.target_addresses[order], writer.sizes[order]
            sorted_s = best_s(lambda: check_fragments(writer, *shuffled))  # noqa: B023
            scan_s = quadratic_scan_s(4096)
            results.append(
                figure(
                    "verify 32,768 shuffled fragments (baseline: a quadratic scan of 4,096)",
                    1e3 * sorted_s,
                    "ms",
                    1e3 * scan_s,
                    4.0,
                )
            )
            data = encode_plan(plan)
            results.append(figure("plan encoded", len(data) / FRAGMENTS, "B/fragment", 16.0, 16.0))
            results.append(figure("encode plan", 1e3 * best_s(lambda: encode_plan(plan)), "ms", None, None))  # noqa: B023
            results.append(figure("decode plan", 1e3 * best_s(lambda: decode_plan(data)), "ms", None, None))  # noqa: B023
    return results


def show(results: list[dict[str, object]]) -> None:
    """A table, then one JSON line per figure."""
    width = max(len(str(r["name"])) for r in results)
    for r in results:
        verdict = {True: "met", False: "MISSED", None: ""}[r["met"]]  # type: ignore[index]
        goal = "" if r["goal"] is None else f"goal {r['goal']}"
        ratio = "" if r["ratio"] is None else f"{r['ratio']}x"
        print(f"{r['name']!s:<{width}}  {r['value']!s:>10} {r['unit']!s:<10} {ratio:>10} {goal:>10} {verdict}")
    for r in results:
        print(json.dumps(r))


if __name__ == "__main__":
    show(main())
