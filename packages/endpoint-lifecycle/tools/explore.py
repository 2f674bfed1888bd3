"""The long run of the explorations: triples of faults at every triple of moments, every interleaving of two requests, and
many seeds of random steps against the model.

Run: ``python tools/explore.py [--count SEEDS] [--seed FIRST] [--nightly]``. Prints what was run; exit code 0 if nothing failed.
"""

# ruff: noqa: T201 - a command prints

from __future__ import annotations

import argparse
import importlib.util
import itertools
import sys
import time
from pathlib import Path
from types import ModuleType

from endpoint_lifecycle.testing import explore, explore_faults

TESTS = Path(__file__).resolve().parents[1] / "tests"


def load(name: str) -> ModuleType:
    """A test module, for the scenarios that stand in it."""
    spec = importlib.util.spec_from_file_location(name, TESTS / f"{name}.py")
    if spec is None or spec.loader is None:
        raise SystemExit(f"{name}.py is missing")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def main() -> int:
    """Run everything; 0 if nothing failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="seeds of random steps")
    parser.add_argument("--seed", type=int, default=100_000, help="first seed")
    parser.add_argument("--nightly", action="store_true", help="all requests, all triples, ten times the seeds")
    options = parser.parse_args()
    points, model, conftest = load("test_every_await_point"), load("test_directory_random"), load("conftest")
    requests = sorted(points.REQUESTS) if options.nightly else ["one_leg"]
    actions = ("cancel", "restart", "timeout", "die") if options.nightly else ("cancel", "restart")
    count = options.count * (10 if options.nightly else 1)
    started_s = time.monotonic()
    try:
        for name in requests:
            plans = [list(plan) for plan in itertools.product(actions, repeat=3)]
            make = points.scenario(points.REQUESTS[name], prepared=False)
            report = explore_faults(make, plans, runs_max=20_000_000)
            print(f"{name}: {len(plans)} triples of faults, {report.runs} runs, {len(report.points)} await points")
        for requests_count, revalidate, prepared in ((1, True, False), (2, True, True), (2, False, False)):
            report = explore(points.raced(requests_count, revalidate, prepared), runs_max=20_000_000)
            print(f"{requests_count} requests and a restart: {report.runs} interleavings")
        for seed in range(options.seed, options.seed + count):
            model.run(seed, 300, conftest._make_record)
        print(f"random steps: seeds {options.seed} to {options.seed + count - 1}, 300 steps each, agree with the model")
    except AssertionError as error:
        print(f"FAILED: {error}", file=sys.stderr)
        print(f"cause: {error.__cause__!r}", file=sys.stderr)
        return 1
    print(f"nothing failed in {time.monotonic() - started_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
