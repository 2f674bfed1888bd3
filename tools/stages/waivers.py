"""Tests that are known to fail, each with a reason: ``<line as in a list> SKIP (reason)``, one per line.

A waiver applies to a line of a list with the same identity, or to single tests of it by exact node id. What is waived is
reported as waived, never as passed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .errors import ListError
from .lists import TestLine, parse_line


@dataclass(frozen=True)
class Waiver:
    """One waiver."""

    test: TestLine
    reason: str
    line: int


def read_waivers(path: Path) -> tuple[Waiver, ...]:
    """Read a waivers file; one that is missing holds none.

    Raises:
        ListError: A line has no SKIP, no reason, or waives what another line waives.
    """
    if not path.exists():
        return ()
    found: dict[str, Waiver] = {}
    for number, text in enumerate(path.read_text("utf-8").splitlines(), 1):
        if not text.strip() or text.lstrip().startswith("#"):
            continue
        test = parse_line(text, path, number)
        if "SKIP" not in test.markers:
            raise ListError(path, number, f"a waiver says SKIP (reason), got {text!r}")
        reason = test.markers["SKIP"]
        if not reason:
            raise ListError(path, number, f"a waiver has a reason in parentheses, got {text!r}")
        if test.identity in found:
            raise ListError(path, number, f"{test.identity} is waived in line {found[test.identity].line}, too")
        found[test.identity] = Waiver(test, reason, number)
    return tuple(found.values())


def waived(waivers: tuple[Waiver, ...], line: TestLine, gpu_type: str) -> Waiver | None:
    """The waiver of a whole line on that hardware."""
    for waiver in waivers:
        if waiver.test.identity == line.identity and waiver.test.hardware_prefix in (None, gpu_type):
            return waiver
    return None


def waived_tests(waivers: tuple[Waiver, ...], line: TestLine, gpu_type: str) -> tuple[Waiver, ...]:
    """Waivers of single tests below a line: the same file or folder, a node id of its own."""
    return tuple(
        waiver
        for waiver in waivers
        if waiver.test.identity != line.identity
        and waiver.test.hardware_prefix in (None, gpu_type)
        and "::" in waiver.test.target
        and (waiver.test.target.startswith((line.target + "::", line.target.rstrip("/") + "/")))
    )
