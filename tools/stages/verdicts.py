"""Verdicts, and which one wins. Green means: it ran, and it passed."""

from __future__ import annotations

import enum
from collections.abc import Iterable


class Verdict(enum.Enum):
    """What is known about a stage."""

    PASSED = "PASSED"
    REUSED = "REUSED"
    FLAKY = "FLAKY"
    NO_COVERAGE = "NO COVERAGE"
    NOT_RUN = "NOT RUN"
    FAILED = "FAILED"


#: Exit code by verdict. 2 is kept for what is refused before anything runs.
EXIT_CODES = {
    Verdict.PASSED: 0,
    Verdict.REUSED: 0,
    Verdict.FLAKY: 0,
    Verdict.NO_COVERAGE: 3,
    Verdict.NOT_RUN: 3,
    Verdict.FAILED: 1,
}
_SEVERITY = [Verdict.PASSED, Verdict.REUSED, Verdict.FLAKY, Verdict.NO_COVERAGE, Verdict.NOT_RUN, Verdict.FAILED]


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The one that a whole run has; a run without stages did not run."""
    return max(verdicts, key=_SEVERITY.index, default=Verdict.NOT_RUN)


def stage_verdict(*, passed: int, failed: int, flaky: int, interrupted: bool, waived_only: bool = False) -> Verdict:
    """The verdict of a stage that had its hardware.

    A failure counts whatever else happened; a stage that was cut short, or in which no test ran, is not green.
    """
    if failed:
        return Verdict.FAILED
    if interrupted or waived_only or passed + flaky == 0:
        return Verdict.NOT_RUN
    return Verdict.FLAKY if flaky else Verdict.PASSED
