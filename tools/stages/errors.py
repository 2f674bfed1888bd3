"""What is refused before anything runs: every reader, parser and choice here raises one of these, and nothing else does.

The message names file and line, or the option, with the value, and the nearest one that would do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class StageError(Exception):
    """A stage name, list, option or selection cannot be used. Nothing was run; exit code 2."""


class ListError(StageError):
    """A test list, waiver file or table is not what its format says; the message starts with ``file:line:``."""

    def __init__(self, file: object, line: int, message: str) -> None:
        super().__init__(f"{file}:{line}: {message}")
        self.file = str(file)
        self.line = line


def nearest(name: str, known: Iterable[str], count: int = 3, cutoff: float = 0.5) -> str:
    """``; did you mean a, b?`` or, without a near one, nothing."""
    near = difflib.get_close_matches(name, list(known), n=count, cutoff=cutoff)
    return f"; did you mean {', '.join(near)}?" if near else ""
