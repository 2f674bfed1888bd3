"""Which runs are going on below a results folder, and how one is stopped from outside.

A run holds a lock on the file ``running`` in its bundle, with its process id inside. The kernel gives the lock back when the
process dies, however it dies: a process id alone may be another's by now.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path

NAME = "running"


@contextlib.contextmanager
def running(folder: Path) -> Iterator[None]:
    """Say that this process runs that bundle."""
    with (folder / NAME).open("w", encoding="utf-8") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        handle.write(f"{os.getpid()}\n")
        handle.flush()
        try:
            yield
        finally:
            (folder / NAME).unlink(missing_ok=True)


def stop_runs(results: Path) -> list[Path]:
    """Ask every run below to end; each leaves a bundle that says so. Returns the bundles of those that were going on."""
    stopped = []
    for path in sorted(results.glob(f"*/{NAME}")):
        try:
            with path.open("r+", encoding="utf-8") as handle:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.kill(int(path.read_text("utf-8")), signal.SIGTERM)
            stopped.append(path.parent)
        except FileNotFoundError:
            continue
    return stopped
