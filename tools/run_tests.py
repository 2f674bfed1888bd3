"""Run the test suite and close on one line, ``N passed, N failed``. Exit 0 only if something ran and all of it passed."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

from stages.hardware import usable_cores, workers_of

ROOT = Path(__file__).resolve().parent.parent
#: Seconds that a group may take before it is stopped and counts as failed.
GROUP_LIMIT_S = 1500.0


@dataclass
class Tally:
    """Counts of one pytest run, from its JUnit file: what was collected, not what was printed."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    reasons: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Sum up."""
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped
        self.reasons += other.reasons


def read_junit(path: Path) -> Tally:
    """Counts of a JUnit file; one that is missing or broken is one failure (the run was cut short)."""
    try:
        root = ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError) as error:
        return Tally(failed=1, reasons=[f"no usable result file: {error}"])
    tally = Tally()
    for case in root.iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        if case.find("failure") is not None or case.find("error") is not None:
            tally.failed += 1
            tally.reasons.append(name)
        elif (skip := case.find("skipped")) is not None:
            tally.skipped += 1
            tally.reasons.append(f"not covered: {name}: {skip.get('message', '')}")
        else:
            tally.passed += 1
    return tally


def run_group(title: str, arguments: list[str], junit: Path, *, may_be_empty: bool = False) -> Tally:
    """One pytest process. Where only some paths were asked for, not every group has a test in them."""
    command = [sys.executable, "-m", "pytest", f"--junit-xml={junit}", *arguments]
    print(f"== {title}", flush=True)
    start = time.monotonic()
    try:
        code = subprocess.run(command, cwd=ROOT, timeout=GROUP_LIMIT_S).returncode
    except subprocess.TimeoutExpired:
        return Tally(failed=1, reasons=[f"{title}: stopped after {GROUP_LIMIT_S:.0f} s"])
    tally = read_junit(junit)
    if code == 5 and may_be_empty:
        return Tally()
    if code == 5:
        tally = Tally(failed=1, reasons=[f"{title}: no test was collected"])
    elif code != 0 and tally.failed == 0:
        tally.failed += 1
        tally.reasons.append(f"{title}: pytest exit {code}")
    print(f"== {title}: {tally.passed} passed, {tally.failed} failed, {tally.skipped} skipped, "
          f"{time.monotonic() - start:.0f} s", flush=True)  # fmt: skip
    return tally


def main() -> int:
    """Exit 0: something ran, nothing failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slow", action="store_true", help="also what takes longer than ten seconds a test")
    parser.add_argument("paths", nargs="*", help="only these files or folders")
    options = parser.parse_args()
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    unslow = "" if options.slow else " and not slow"
    total = Tally()
    with tempfile.TemporaryDirectory() as scratch:
        workers = str(workers_of(usable_cores()))
        among = ["-q", "-n", workers, "--dist", "worksteal", "-m", f"not mpi and not service and not gpu{unslow}"]
        # A service mostly waits: its file may have another beside it. Ranks of MPI that wait for each other spin.
        beside = ["-q", "-n", "2", "--dist", "loadfile", "-m", f"service and not mpi and not gpu{unslow}"]
        alone = ["-q", "-m", f"mpi and not gpu{unslow}"]
        groups = [
            ("in parallel", [*among, *options.paths]),
            ("services, two files at a time", [*beside, *options.paths]),
            ("MPI ranks, one world at a time", [*alone, *options.paths]),
        ]
        for index, (title, arguments) in enumerate(groups):
            total.add(run_group(title, arguments, Path(scratch, f"{index}.xml"), may_be_empty=bool(options.paths)))
    for reason in total.reasons:
        print(f"  {reason}")
    print(f"{total.passed} passed, {total.failed} failed, {total.skipped} skipped", flush=True)
    return 0 if total.passed > 0 and total.failed == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
