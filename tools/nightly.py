"""Everything that is too long for a change's tests, as one run: each part with its time, and what was bounded.

    nox -s nightly                              # all parts, within about an hour and a quarter on two cores
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
import itertools
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from lifeline import Tethered

ROOT = Path(__file__).resolve().parent.parent
#: Seconds for planted faults in one night: about a sixth of the whole.
FAULTS_S = 600
#: Seconds after which a part that has not ended is ended, and has failed.
LIMIT_S = 1800
#: The same for all tests, also the slow ones; each of their groups has its own limit.
TESTS_LIMIT_S = 3600
#: Seconds of a service under faults; what was begun then has to heal, and is looked at, for some minutes more.
SERVICE_FAULTS_S = 1800
#: The same for the READMEs' commands; each has its own limit.
READMES_LIMIT_S = 2700
#: The same for the planted faults of all packages: two hours and more on two cores.
FAULTS_ALL_S = 6 * 3600
#: Parts that keep one core busy run so many at a time (count); the service under faults mostly waits.
LANES = 3
#: What each long check of a package takes at night: every script of packages/*/tools that is a program.
CHECKS: dict[str, tuple[str, ...]] = {
    "comm-broadcast/explore": ("--stride", "10", "--count", "600"),
    "endpoint-lifecycle/explore": ("--nightly",),
    "kv-bounce-planner/explore": (),
    "kv-bounce-planner/fuzz": ("--count", "5000"),
    "meta-executor/explore_composition": ("--states", "10000", "--seconds", "12", "--walks", "15"),
    "meta-executor/fuzz": ("--count", "10000", "--seconds", "10"),
    "meta-executor/random_pairs": ("--count", "200"),
    "meta-executor/simulate_service": ("--count", "1200"),
    "pp-agreement/explore": (),  # the larger worlds are slow tests, which stand beside each other
    "pp-agreement/fuzz": ("--count", "300000"),
    "pp-agreement/simulate": ("--seeds", "15000", "--jobs", "1"),
    "rpc-local-registry/conformance": (),
    "rpc-local-registry/fuzz": ("--count", "1000000"),
    "rpc-local-registry/soak": ("--seconds", "60"),
}


@dataclass(frozen=True)
class Part:
    """One command of the night; its arguments say what of the whole it takes.

    Attributes:
        beside: It keeps one core busy and may run beside others of its kind; what it prints is shown when it has ended.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float = LIMIT_S
    beside: bool = False


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
    found = [Part("tests", ("tools/run_tests.py", "--slow"), TESTS_LIMIT_S)]
    under_faults = ("tools/faults.py", "--seconds", f"{SERVICE_FAULTS_S}", "--seed", f"{day.toordinal()}")
    found.append(Part("service under faults", under_faults, SERVICE_FAULTS_S + 600, beside=True))  # it mostly waits
    # They take longest, each in environments or a clone of its own: first, so that the others end beside them.
    found.append(Part("READMEs", ("tools/printed.py", "--day", day.isoformat()), READMES_LIMIT_S, beside=True))
    found.append(Part("siblings", ("tools/siblings.py",), beside=True))
    for name, arguments in CHECKS.items():
        package, _, script = name.partition("/")
        found.append(Part(name, (f"packages/{package}/tools/{script}.py", *arguments), beside=True))
    faults: tuple[str, ...] = ()
    if not all_faults:
        faults = (whose_turn(day, packages()), "--seconds", f"{FAULTS_S}", "--shuffle", day.isoformat())
    found.append(Part("planted faults", ("tools/mutants.py", *faults), FAULTS_ALL_S if all_faults else LIMIT_S))
    return [*found, Part("distributions", ("tools/build_distributions.py",))]


class Night:
    """Runs parts; nothing that one has started outlives it, or the night."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stopped = False
        self._running: set[Tethered] = set()
        self.ended: list[Ended] = []

    def stop(self) -> None:
        """End what is running, begin nothing more."""
        with self._lock:
            self._stopped = True
            for tethered in self._running:
                tethered.cut()

    def run(self, part: Part) -> None:
        """Run one part to its end; it is among the ``ended`` unless the night was stopped before that."""
        began_s = time.monotonic()
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as kept:
            command = [sys.executable, *part.command]
            output = kept if part.beside else None
            with self._lock:
                if self._stopped:
                    return
                print(f"== {part.name}: {' '.join(part.command)}", flush=True)
                tethered = Tethered(
                    command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
                )
                self._running.add(tethered)
            try:
                code = tethered.process.wait(part.limit_s)
                wrong = f"exit {code}" if code else ""
            except subprocess.TimeoutExpired:
                wrong = f"not ended after {part.limit_s:.0f} s"
            finally:
                with self._lock:
                    tethered.cut()
                    self._running.discard(tethered)
                tethered.process.wait()
            with self._lock:
                kept.seek(0)
                if part.beside:
                    print(f"== {part.name}: {wrong or 'passed'}\n{kept.read()}", end="", flush=True)
                if not self._stopped:
                    self.ended.append(Ended(part, time.monotonic() - began_s, wrong))

    def run_all(self, chosen: list[Part]) -> list[Ended]:
        """Run parts in their order; Ctrl-C ends the night with what is known."""
        try:
            for beside, group in itertools.groupby(chosen, key=lambda part: part.beside):
                with ThreadPoolExecutor(LANES if beside else 1) as lanes:
                    try:
                        for done in as_completed([lanes.submit(self.run, part) for part in group]):
                            done.result()
                    except BaseException:
                        self.stop()
                        raise
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        return self.ended


def report(ended: list[Ended], left: list[Part], seconds: float) -> int:
    """Print each part's time; 0 if all of them ran and passed."""
    for one in ended:
        print(
            f"{one.seconds / 60:6.1f} min  {' '.join(one.part.command)}{'  FAILED: ' if one.wrong else ''}{one.wrong}"
        )
    for part in left:
        print(f"   not run  {' '.join(part.command)}")
    failed = sum(bool(one.wrong) for one in ended)
    passed = len(ended) - failed
    print(f"{seconds / 60:6.1f} min  all: {passed} passed, {failed} failed, {len(left)} not run")
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
    began_s = time.monotonic()
    ended = Night().run_all(chosen)
    known = {one.part for one in ended}
    return report(ended, [part for part in chosen if part not in known], time.monotonic() - began_s)


if __name__ == "__main__":
    sys.exit(main())
