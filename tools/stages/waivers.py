"""Tests that are known to fail, each with a reason: ``<line as in a list> SKIP (reason)``, one per line.

A waiver with ``-k`` or ``-m`` waives exactly that line of a list. One without waives everything at or below its target: a
folder, a file, a class, a test with all its parameters or one of them. What is waived is reported as waived, never as passed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .errors import ListError
from .lists import TestLine, covers, parse_line
from .selecting import prefix_holds
from .table import Stage


@dataclass(frozen=True)
class Waiver:
    """One waiver."""

    test: TestLine
    reason: str
    line: int


def read_waivers(path: Path) -> tuple[Waiver, ...]:
    """Read a waivers file; one that is missing holds none."""
    try:
        return parse_waivers(path.read_text("utf-8"), path) if path.exists() else ()
    except (OSError, UnicodeDecodeError) as error:
        raise ListError(path, 1, str(error)) from error


def parse_waivers(text: str, path: Path | str) -> tuple[Waiver, ...]:
    """Waivers of a text; ``path`` is what messages call it."""
    found: dict[str, Waiver] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        test = parse_line(line, path, number)
        if "SKIP" not in test.markers:
            raise ListError(path, number, f"a waiver says SKIP (reason), got {line!r}")
        reason = test.markers["SKIP"]
        if not reason:
            raise ListError(path, number, f"a waiver has a reason in parentheses, got {line!r}")
        if test.identity in found:
            raise ListError(path, number, f"{test.identity} is also waived in line {found[test.identity].line}")
        found[test.identity] = Waiver(test, reason, number)
    return tuple(found.values())


def waived(waivers: tuple[Waiver, ...], line: TestLine, stage: Stage) -> Waiver | None:
    """The waiver of a whole line in a stage: of this very line, or, without expressions, of what it is or stands below."""
    for waiver in waivers:
        test = waiver.test
        if prefix_holds(test.hardware_prefix, stage) and (
            test.selects == line.selects or (test.bare and covers(test.target, line.target))
        ):
            return waiver
    return None


def waived_tests(waivers: tuple[Waiver, ...], line: TestLine, stage: Stage) -> tuple[Waiver, ...]:
    """Waivers of part of a line in a stage: a folder, file, class or test below it."""
    return tuple(
        waiver
        for waiver in waivers
        if waiver.test.bare
        and waiver.test.target != line.target
        and prefix_holds(waiver.test.hardware_prefix, stage)
        and covers(line.target, waiver.test.target)
    )
