"""Gather and scatter in host memory against one memcpy of the same bytes, and against the slow ways of the field.

``python packages/kv-bounce-planner/benchmarks/bench_copies.py``
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Callable

import numpy as np

from kv_bounce_planner.copies.gather import CopyTable

POOL_BYTES = 256 << 20


def best_s(action: Callable[[], object], repeats: int = 7) -> float:
    """Shortest of several runs, seconds."""
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - begin)
    return best


def interleaved_s(actions: dict[str, Callable[[], object]], repeats: int = 7) -> dict[str, float]:
    """Shortest of several runs of each, taken in turn so that noise hits all alike."""
    best = dict.fromkeys(actions, float("inf"))
    for _ in range(repeats):
        for name, action in actions.items():
            begin = time.perf_counter()
            action()
            best[name] = min(best[name], time.perf_counter() - begin)
    return best


def figure(name: str, value_s: float, baseline_s: float | None, goal: float | None = None) -> dict[str, object]:
    ratio = None if baseline_s is None else value_s / baseline_s
    return {
        "name": name,
        "value": round(1e3 * value_s, 4),
        "unit": "ms",
        "baseline": None if baseline_s is None else round(1e3 * baseline_s, 4),
        "ratio": None if ratio is None else round(ratio, 3),
        "goal": goal,
        "met": None if goal is None or ratio is None else ratio <= goal,
    }


def skewed(count: int, total: int, rng: np.random.Generator) -> np.ndarray:
    """Log-normal sizes of 16 B multiples that add up to about ``total``."""
    return np.maximum((rng.lognormal(0, 1.2, count) * total / count / 2 / 16).astype(np.int64), 1) * 16


def main() -> list[dict[str, object]]:
    rng = np.random.default_rng(0)
    pool = np.ones(POOL_BYTES, np.uint8)
    staging = np.ones(64 << 20, np.uint8)
    results: list[dict[str, object]] = []
    for total in (4 << 20, 64 << 20):
        for count in (1, 256, 4096, 32768):
            size = total // count
            places = rng.permutation(POOL_BYTES // (2 * size))[:count] if count > 1 else np.array([0])
            addresses = pool.ctypes.data + np.sort(places).astype(np.int64) * 2 * size
            sizes = np.full(count, size, np.int64)
            out = CopyTable.gather(addresses, sizes, staging.ctypes.data)
            back = CopyTable.scatter(staging.ctypes.data, addresses, sizes)
            rows = addresses.tolist()

            def loop(rows: list[int] = rows, size: int = size) -> None:
                at = staging.ctypes.data
                for address in rows:
                    ctypes.memmove(at, address, size)
                    at += size

            taken = interleaved_s(
                {
                    "memcpy": lambda: staging[:total].__setitem__(slice(None), pool[:total]),  # noqa: B023
                    "gather": out.run,
                    "scatter": back.run,
                    "loop": loop,
                }
            )
            name = f"{total >> 20} MiB x {count}"
            results.append(figure(f"gather {name} (baseline: one memcpy)", taken["gather"], taken["memcpy"]))
            results.append(figure(f"scatter {name} (baseline: one memcpy)", taken["scatter"], taken["memcpy"]))
            if count >= 4096:
                goal = 1.0 if size <= 512 else None
                results.append(
                    figure(f"gather {name} (baseline: a memmove per fragment)", taken["gather"], taken["loop"], goal)
                )
            results.append(
                figure(f"prepare {name}", best_s(lambda: CopyTable.gather(addresses, sizes, 4096), 3), None)  # noqa: B023
            )
    sizes = skewed(32768, 16 << 20, rng)
    offsets = np.cumsum(sizes + 64) - sizes
    order = rng.permutation(len(sizes))
    table = CopyTable.gather(pool.ctypes.data + offsets[order], sizes[order], staging.ctypes.data)
    total = table.total_bytes
    rows = list(zip((pool.ctypes.data + offsets[order]).tolist(), sizes[order].tolist(), strict=True))

    def skewed_loop() -> None:
        at = staging.ctypes.data
        for address, size in rows:
            ctypes.memmove(at, address, size)
            at += size

    taken = interleaved_s({"gather": table.run, "loop": skewed_loop})
    results.append(
        figure(
            f"gather {total >> 20} MiB x 32768 skewed (baseline: a memmove per fragment)",
            taken["gather"],
            taken["loop"],
        )
    )
    return results


def show(results: list[dict[str, object]]) -> None:
    """A table, then one JSON line per figure."""
    width = max(len(str(r["name"])) for r in results)
    for r in results:
        ratio = "" if r["ratio"] is None else f"{r['ratio']}x"
        print(f"{r['name']!s:<{width}}  {r['value']!s:>10} {r['unit']}  {ratio}")
    for r in results:
        print(json.dumps(r))


if __name__ == "__main__":
    show(main())
