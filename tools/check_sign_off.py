"""Commit-message hook: the message carries a Signed-off-by line (``git commit -s``)."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def main(path: str) -> int:
    """Exit 0 when the message in the file is signed off."""
    if re.search(r"^Signed-off-by: .+ <.+@.+>$", Path(path).read_text("utf-8"), re.MULTILINE):
        return 0
    print("the message has no Signed-off-by line: commit with -s", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
