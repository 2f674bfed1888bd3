"""Verdicts, and which one wins. Green means: it ran, and it passed."""

from __future__ import annotations

import enum
from collections.abc import Iterable


class Verdict(enum.Enum):
    """What is known about a line, a stage or a run. WAIVED is a line's alone: it counts neither way."""

    PASSED = "PASSED"
    REUSED = "REUSED"
    FLAKY = "FLAKY"
    NO_COVERAGE = "NO COVERAGE"
    NOT_RUN = "NOT RUN"
    FAILED = "FAILED"
    WAIVED = "WAIVED"


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
    """The one that counts for all of them together; of none at all: it did not run."""
    return max(verdicts, key=_SEVERITY.index, default=Verdict.NOT_RUN)


def line_verdict(*, passed: int, failed: int, flaky: int, stopped: bool, waived: bool) -> Verdict:
    """The verdict of a line whose stage had what it needs.

    A failure counts whatever else happened; a line that was stopped is not green, and one in which no test ran covers nothing.

    Args:
        passed: Tests that passed, at whatever attempt, or failed as expected (count).
        failed: Tests that failed, crashed or ran out of time (count).
        flaky: Tests that passed at a later attempt, or failed and are known to be unstable (count).
        stopped: Not everything of it was begun.
        waived: All that it selects is waived.
    """
    if failed:
        return Verdict.FAILED
    if stopped:
        return Verdict.NOT_RUN
    if waived:
        return Verdict.WAIVED
    if flaky:
        return Verdict.FLAKY
    return Verdict.PASSED if passed else Verdict.NO_COVERAGE
