"""Seeded simulations with faults: every failure replays from its seed (``--seed N``)."""

# ruff: noqa: T201, PT
from __future__ import annotations

import argparse
import collections
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from pp_agreement.testing import SimulationFailure, simulate, simulate_groups

BLOCK = 250


def block(first: int, count: int, groups: bool) -> tuple[collections.Counter[str], list[str]]:
    """Counters and failures of a range of seeds."""
    counts: collections.Counter[str] = collections.Counter()
    failures = []
    for seed in range(first, first + count):
        try:
            result = simulate_groups(seed) if groups else simulate(seed)
        except SimulationFailure as failure:
            failures.append(str(failure))
            continue
        counts["seeds"] += 1
        counts[result.fault] += 1
        counts["admitted"] += result.admitted
        counts["committed"] += result.committed
        counts["closed"] += result.closed
        counts["frames"] += result.frames
        counts["refused calls"] += result.refusals
    return counts, failures


def main() -> int:
    """Exit code 0: no seed failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", "--count", type=int, default=100_000)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--seed", type=int, help="replay one")
    parser.add_argument("--groups", action="store_true", help="members are groups of ranks")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    if options.seed is not None:
        print((simulate_groups if options.groups else simulate)(options.seed))
        return 0
    began_s = time.monotonic()
    total: collections.Counter[str] = collections.Counter()
    failures: list[str] = []
    firsts = range(options.start, options.start + options.seeds, BLOCK)
    sizes = [min(BLOCK, options.start + options.seeds - first) for first in firsts]
    with ProcessPoolExecutor(options.jobs) as pool:
        for done, (counts, failed) in enumerate(pool.map(block, firsts, sizes, [options.groups] * len(sizes)), 1):
            total += counts
            failures += failed
            for failure in failed[:3]:
                print(failure, flush=True)
            if done % 40 == 0:
                print(
                    f"{total['seeds']} seeds, {len(failures)} failures, {time.monotonic() - began_s:.0f} s", flush=True
                )
    print(", ".join(f"{name} {value}" for name, value in total.items()))
    print(f"{options.seeds} seeds from {options.start}: {len(failures)} failures in {time.monotonic() - began_s:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
