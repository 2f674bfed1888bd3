"""Verdicts, and which one wins. Green means: it ran, and it passed."""

from __future__ import annotations

import enum
from collections.abc import Iterable


class Verdict(enum.Enum):
    """What is known about a line, a stage or a run, from good to bad; WAIVED is a line's alone: it counts neither way."""

    PASSED = "PASSED"
    REUSED = "REUSED"
    FLAKY = "FLAKY"
    NO_COVERAGE = "NO COVERAGE"
    NOT_RUN = "NOT RUN"
    FAILED = "FAILED"
    WAIVED = "WAIVED"


_SEVERITY = list(Verdict)[:-1]
#: Exit code by verdict. 2 is kept for what is refused before anything runs.
EXIT_CODES = dict(zip(_SEVERITY, (0, 0, 0, 3, 3, 1), strict=True))


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The one that counts for all of them together; of none at all: it did not run."""
    return max(verdicts, key=_SEVERITY.index, default=Verdict.NOT_RUN)
