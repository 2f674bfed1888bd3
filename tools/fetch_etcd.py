"""Bring the etcd server of the distribution's packages into the cache, for the tests that need a real one.

    python tools/fetch_etcd.py FOLDER        # prints the folder of the binary; exit 3 when it cannot be had, with the reason

Where ``etcd`` is on PATH, or in FOLDER already, nothing is brought. Otherwise the package ``etcd-server`` is downloaded by
the system's own package client (which checks its signature) and unpacked into FOLDER: nothing is installed, no rights are
needed. As root the client's lists are refreshed when they are empty. ``META_EXECUTOR_OFFLINE=1`` forbids the download.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

PACKAGE = "etcd-server"
LIMIT_S = 120.0


class Unavailable(Exception):
    """There is no etcd, and why."""


def find(folder: Path) -> Path | None:
    """The binary that is here already: on PATH, or brought before."""
    found = shutil.which("etcd") or shutil.which("etcd", path=str(folder / "usr" / "bin"))
    return Path(found) if found else None


def _run(*command: str, folder: Path) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{command[0]} did not end within {LIMIT_S:.0f} s") from None
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines() or [f"exit {done.returncode}"]
        raise Unavailable(f"{' '.join(command[:2])}: {lines[-1]}")


def bring(folder: Path) -> Path:
    """The binary, downloaded if it must and may be.

    Raises:
        Unavailable: It is not here and cannot be brought.
    """
    found = find(folder)
    if found is not None:
        return found
    if os.environ.get("META_EXECUTOR_OFFLINE") == "1":
        raise Unavailable("META_EXECUTOR_OFFLINE=1 forbids the download")
    for program in ("apt-get", "dpkg"):
        if shutil.which(program) is None:
            raise Unavailable(f"{program} is not here: install etcd by the means of this system")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = find(folder)
        if found is not None:
            return found
        try:
            _run("apt-get", "download", PACKAGE, folder=folder)
        except Unavailable:
            if os.geteuid() != 0:
                raise
            _run("apt-get", "update", folder=folder)
            _run("apt-get", "download", PACKAGE, folder=folder)
        for package in folder.glob(f"{PACKAGE}_*.deb"):
            _run("dpkg", "-x", str(package), str(folder), folder=folder)
            package.unlink()
    found = find(folder)
    if found is None:
        raise Unavailable(f"the package {PACKAGE} holds no etcd")
    return found


def main() -> int:
    """Exit 0 with the folder on the last line, or 3 with the reason."""
    folder = Path(sys.argv[1]).resolve()
    try:
        print(bring(folder).parent)
    except Unavailable as reason:
        print(f"no etcd: {reason}")
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
