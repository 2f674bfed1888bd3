"""The folder of a run whose front answers at an address: known from the process of the front, if it is this user's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

#: The launcher writes here where the front answers.
FRONT_URL = "front.url"


def run_folder_of(url: str, *, proc: Path = Path("/proc")) -> Path | None:
    """The folder of this user's run whose front answers at ``url``; None if there is none on this machine."""
    return fronts(proc=proc).get(url.rstrip("/").replace("//localhost:", "//127.0.0.1:"))


def fronts(*, proc: Path = Path("/proc")) -> dict[str, Path]:
    """The addresses of this user's fronts on this machine, each with the folder of its run."""
    found: dict[str, Path] = {}
    for folder in _folders(proc):
        try:
            found.setdefault((folder / FRONT_URL).read_text("ascii"), folder)
        except (OSError, ValueError):
            continue
    return found


def _folders(proc: Path) -> Iterator[Path]:
    for process in sorted(proc.glob("[0-9]*")):
        try:
            if process.stat().st_uid != os.getuid():
                continue
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"meta_executor.front" in words and b"--run-dir" in words[:-1]:
            yield Path(os.fsdecode(words[words.index(b"--run-dir") + 1]))
