# ruff: noqa: T201, S311 - a program; the draws are no secrets
"""What comes from outside, mutated: ``python packages/meta-executor/tools/fuzz.py [TARGET ...] --count N``.

Every target reads inputs of one kind and may answer with the errors that its contract names. Anything else is a finding: an
exception, an answer of status 500, an input that takes longer than ``--limit`` seconds, memory that grows. A finding is
printed with its target, seed and bytes (hex), and makes the exit code 1; ``--seed S --count 1`` replays it.

Ends with one JSON line per target: ``target``, ``inputs``, ``refused``, ``findings``, ``seconds``, ``rss_growth_mib``.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from fuzz_targets import TARGETS, Refused

#: From here on memory should not grow any more (count); of a shorter run only the first input is left out.
_WARM_INPUTS = 1000


class Hang(BaseException):
    """An input took longer than its limit. No Exception, so that no reader takes it for an error of the input."""


def fuzz(
    name: str,
    *,
    count: int,
    seed: int = 0,
    seconds: float = float("inf"),
    limit_s: float = 5.0,
    growth_max_mib: float = 256.0,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Run one target. What happened, as the JSON line says it."""

    def rang(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, rang)
    refused = findings = done = 0
    started_s = time.monotonic()
    begun_kib = _peak_kib()
    try:
        with TARGETS[name]() as (seeds, mutate, read):
            started_s = time.monotonic()
            for number in range(seed, seed + count):
                if time.monotonic() - started_s > seconds:
                    break
                data = mutate(seeds, random.Random(number))
                signal.setitimer(signal.ITIMER_REAL, limit_s)
                try:
                    read(data)
                except Refused:
                    refused += 1
                except (Exception, Hang):  # noqa: BLE001 - whatever it is, it is reported
                    findings += 1
                    if findings <= 5:
                        say(
                            f"FINDING: {name} --seed {number} --count 1\n{data[:400].hex()}\n{traceback.format_exc(limit=-6)}"
                        )
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                done += 1
                if done in (1, _WARM_INPUTS):
                    # What the first inputs load and allocate is no growth.
                    begun_kib = _peak_kib()
    finally:
        signal.signal(signal.SIGALRM, before)
    growth_mib = round((_peak_kib() - begun_kib) / 1024)
    if growth_mib > growth_max_mib:
        findings += 1
        say(f"FINDING: {name} --seed {seed} --count {done}: memory grew by {growth_mib} MiB")
    return {
        "target": name,
        "inputs": done,
        "refused": refused,
        "findings": findings,
        "seconds": round(time.monotonic() - started_s, 1),
        "rss_growth_mib": growth_mib,
    }


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> int:
    """Run them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="*", help=f"of {', '.join(TARGETS)}; all without one")
    parser.add_argument("--count", type=int, default=10_000, help="inputs per target")
    parser.add_argument("--seed", type=int, default=0, help="the first input's seed")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end a target after so long (s)")
    parser.add_argument("--limit", type=float, default=5.0, help="longest time for one input (s)")
    parser.add_argument("--growth", type=float, default=256.0, help="largest growth of a process's memory (MiB)")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    if unknown := sorted(set(options.target) - set(TARGETS)):
        parser.error(f"no target {', '.join(unknown)}; there are {', '.join(TARGETS)}")
    lines = [_in_parts(name, options) for name in options.target or TARGETS]
    return 1 if any(line["findings"] for line in lines) else 0


def _quiet(name: str, **settings: Any) -> dict[str, Any]:
    logging.disable(logging.CRITICAL)
    return fuzz(name, **settings)


def _in_parts(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One target, its inputs spread over processes. Prints and returns the sum."""
    share = -(-options.count // options.jobs)
    parts = [
        {"count": min(share, options.count - begin), "seed": options.seed + begin}
        for begin in range(0, options.count, share)
    ]
    bounds = {"seconds": options.seconds, "limit_s": options.limit, "growth_max_mib": options.growth}
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        results = [future.result() for future in [pool.submit(_quiet, name, **part, **bounds) for part in parts]]
    line = {"target": name}
    for key in ("inputs", "refused", "findings"):
        line[key] = sum(result[key] for result in results)
    for key in ("seconds", "rss_growth_mib"):
        line[key] = max(result[key] for result in results)
    print(json.dumps(line), flush=True)
    return line


if __name__ == "__main__":
    sys.exit(main())
