"""Everything that is too long for a change's tests, as one run: each part with its time, and what was bounded.

    nox -s nightly                              # all parts, within about an hour on two cores
    nox -s nightly -- --list                    # the parts and what they run
    nox -s nightly -- --only explore            # parts whose name contains this (repeatable)
    nox -s nightly -- --all-faults              # the planted faults of all packages, to their end
    nox -s nightly -- --day 2026-12-01          # as on that day

Planted faults go by turns: the date says whose turn it is, every package's comes every ``len(packages)`` days, and within
``FAULTS_S`` they are tried in an order that the date draws, so that none is always among those that time did not allow.
``nox -s mutants`` is all of them. A part that fails does not keep the others from running. Exit 0: every part passed; 1: the
named ones failed, or did not end within their limit.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from lifeline import Tethered

ROOT = Path(__file__).resolve().parent.parent
#: Seconds for planted faults in one night: about a quarter of the whole.
FAULTS_S = 900
#: Seconds after which a part that has not ended is ended, and has failed.
LIMIT_S = 1800
#: The same for the planted faults of all packages: two hours and more on two cores.
FAULTS_ALL_S = 6 * 3600
#: What each long check of a package takes at night: every script of packages/*/tools that is a program.
CHECKS: dict[str, tuple[str, ...]] = {
    "comm-broadcast/explore": ("--stride", "3", "--count", "500"),
    "endpoint-lifecycle/explore": ("--count", "2000"),
    "kv-bounce-planner/explore": (),
    "kv-bounce-planner/fuzz": ("--count", "20000"),
    "meta-executor/explore_composition": ("--states", "10000", "--seconds", "15"),
    "meta-executor/fuzz": ("--count", "10000", "--seconds", "30", "--jobs", "2"),
    "meta-executor/random_pairs": ("--count", "200"),
    "pp-agreement/explore": ("--nightly",),
    "pp-agreement/fuzz": ("--count", "300000"),
    "pp-agreement/simulate": ("--seeds", "30000"),
    "rpc-local-registry/conformance": (),
    "rpc-local-registry/fuzz": ("--count", "300000"),
    "rpc-local-registry/soak": ("--seconds", "60"),
}


@dataclass(frozen=True)
class Part:
    """One command of the night; its arguments say what of the whole it takes."""

    name: str
    command: tuple[str, ...]


@dataclass(frozen=True)
class Ended:
    """How a part ended; ``wrong`` is empty when it passed."""

    part: Part
    seconds: float
    wrong: str


def packages() -> list[str]:
    """Those that declare faults."""
    return sorted(path.parent.name for path in (ROOT / "packages").glob("*/faults.txt"))


def whose_turn(day: datetime.date, names: list[str]) -> str:
    """The package whose faults are planted on a day: each in turn."""
    return names[day.toordinal() % len(names)]


def parts(day: datetime.date, *, all_faults: bool) -> list[Part]:
    """The night's parts, in their order."""
    found = [Part("tests", ("tools/run_tests.py", "--slow"))]
    for name, arguments in CHECKS.items():
        package, _, script = name.partition("/")
        found.append(Part(name, (f"packages/{package}/tools/{script}.py", *arguments)))
    faults: tuple[str, ...] = ()
    if not all_faults:
        faults = (whose_turn(day, packages()), "--seconds", f"{FAULTS_S}", "--shuffle", day.isoformat())
    found.append(Part("planted faults", ("tools/mutants.py", *faults)))
    return [*found, Part("distributions", ("tools/build_distributions.py",))]


def run(part: Part, limit_s: float) -> Ended:
    """Run one part to its end; nothing that it started outlives it."""
    began_s = time.monotonic()
    print(f"== {part.name}: {' '.join(part.command)}", flush=True)
    tethered = Tethered([sys.executable, *part.command], cwd=ROOT, stdin=subprocess.DEVNULL)
    try:
        code = tethered.process.wait(limit_s)
        wrong = f"exit {code}" if code else ""
    except subprocess.TimeoutExpired:
        wrong = f"not ended after {limit_s:.0f} s"
    finally:
        tethered.cut()
        tethered.process.wait()
    return Ended(part, time.monotonic() - began_s, wrong)


def report(ended: list[Ended], left: list[Part]) -> int:
    """Print each part's time; 0 if all of them ran and passed."""
    for one in ended:
        print(
            f"{one.seconds / 60:6.1f} min  {' '.join(one.part.command)}{'  FAILED: ' if one.wrong else ''}{one.wrong}"
        )
    for part in left:
        print(f"   not run  {' '.join(part.command)}")
    failed = sum(bool(one.wrong) for one in ended)
    passed = len(ended) - failed
    print(
        f"{sum(one.seconds for one in ended) / 60:6.1f} min  all: {passed} passed, {failed} failed, {len(left)} not run"
    )
    return 0 if passed and not failed and not left else 1


def main(arguments: list[str] | None = None) -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="only parts whose name contains this (repeatable)")
    parser.add_argument("--list", action="store_true", help="the parts, without running anything")
    parser.add_argument("--all-faults", action="store_true", help="the planted faults of all packages, to their end")
    parser.add_argument("--day", type=datetime.date.fromisoformat, default=datetime.date.today(), help="as on that day")
    options = parser.parse_args(arguments)
    chosen = [
        part
        for part in parts(options.day, all_faults=options.all_faults)
        if not options.only or any(text in part.name for text in options.only)
    ]
    if not chosen:
        parser.error("no part has such a name")
    if options.list:
        print("\n".join(f"{part.name:36} {' '.join(part.command)}" for part in chosen))
        return 0
    ended: list[Ended] = []
    try:
        for part in chosen:
            ended.append(run(part, FAULTS_ALL_S if options.all_faults and part.name == "planted faults" else LIMIT_S))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    return report(ended, chosen[len(ended) :])


if __name__ == "__main__":
    sys.exit(main())
