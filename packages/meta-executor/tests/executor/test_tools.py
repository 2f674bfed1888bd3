"""The long runs, a little of each: they start, find nothing, and find what was planted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=100)


def test_the_explorer_runs_and_says_what_it_saw() -> None:
    """A few states of one scope: exit 0, counts, no violation."""
    done = run(str(TOOLS / "explore_composition.py"), "--scope", "one request, cancelled", "--states", "40",
               "--walks", "1")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 violations" in done.stdout and " transitions" in done.stdout


def test_random_pairs_runs_and_says_what_it_saw() -> None:
    """Three runs of each schedule beyond the seeds of the test."""
    done = run(str(TOOLS / "random_pairs.py"), "--count", "3", "--seed", "1000")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 runs" in done.stdout and "0 failures" in done.stdout


def test_walks_alone_run_and_say_what_they_saw() -> None:
    """The check that planted faults of the composition are tried with."""
    done = run(
        str(TOOLS / "explore_composition.py"), "--walks-only", "--walks", "1", "--scope", "one request, cancelled"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 walks each, 0 violations" in done.stdout


def test_the_simulated_service_does_the_same_again_and_says_what_it_saw() -> None:
    """Seeds with faults: no violation, the same story in two processes. In 1000037 an earlier lifetime of a context instance
    was introduced after the later one, which was then taken for gone for good."""
    one, other = (
        run(str(TOOLS / "simulate_service.py"), "--first", "1000036", "--count", "3", "--trace") for _ in range(2)
    )
    assert one.returncode == 0, one.stdout + one.stderr
    assert "3 seeds, 0 violations" in one.stdout and "dies" in one.stdout
    assert one.stdout.splitlines()[:-1] == other.stdout.splitlines()[:-1]
