"""What the programs of this folder share."""

from __future__ import annotations

import sys


def check(what: str, holds: bool) -> None:
    """Say it, and stop at the first that does not hold."""
    print(f"{'ok' if holds else 'WRONG'}  {what}", flush=True)
    if not holds:
        sys.exit(1)
