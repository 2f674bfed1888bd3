"""The folder of one run: sockets, key, logs, evidence; 0700, locked while its launcher lives, gone when it ends.

A launcher that was killed leaves its folder behind without the lock. The next start finds it by that and removes it,
together with the shared-memory segments that it had noted.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
from pathlib import Path

from meta_executor.config import ConfigError

_LOCK = "lock"
_SUBFOLDERS = ("ipc", "logs", "evidence", "tmp")
#: Longest path of a Unix socket (bytes); the run folder must leave room for the longest name below it.
_SOCKET_PATH_MAX = 107
_SOCKET_NAME_MAX = 40


def default_base() -> Path:
    """Where runs live without a configured folder."""
    return Path(tempfile.gettempdir(), f"meta-executor-{os.getuid()}")


class RunDirectory:
    """A locked run folder. Use as a context manager; :meth:`remove` at a clean end."""

    def __init__(self, path: Path, lock_descriptor: int) -> None:
        self.path = path
        self._lock_descriptor = lock_descriptor

    @staticmethod
    def create(base: Path, run_id: str) -> RunDirectory:
        """Make the folder, its key and its lock.

        Raises:
            ConfigError: The folder cannot be made private, or its path is too long for sockets.
        """
        try:
            base.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = base.stat()
        except OSError as error:
            raise ConfigError("run_dir", f"cannot make {base}: {error.strerror}") from error
        if status.st_uid != os.getuid():
            raise ConfigError("run_dir", f"{base} belongs to another user")
        path = base / f"run-{run_id}"
        if len(os.fsencode(path)) + _SOCKET_NAME_MAX > _SOCKET_PATH_MAX:
            raise ConfigError(
                "run_dir", f"{path} is too long for sockets; at most {_SOCKET_PATH_MAX - _SOCKET_NAME_MAX} bytes"
            )
        path.mkdir(mode=0o700)
        descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        for name in _SUBFOLDERS:
            (path / name).mkdir(mode=0o700)
        key = os.open(path / "key", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(key, "w") as handle:
            handle.write(secrets.token_hex(32))
        return RunDirectory(path, descriptor)

    def remove(self) -> None:
        """Remove the folder and everything in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock_descriptor)
        # The base goes with its last run; another run's folder in it keeps it.
        try:
            self.path.parent.rmdir()
        except OSError:
            return

    def keep_logs(self) -> Path:
        """Remove secrets and sockets, keep logs and evidence for the reader. The next start removes the rest."""
        for name in ("key", "launcher.sock"):
            (self.path / name).unlink(missing_ok=True)
        for name in ("ipc", "tmp"):
            shutil.rmtree(self.path / name, ignore_errors=True)
        os.close(self._lock_descriptor)
        return self.path / "logs"


def remove_stale_runs(base: Path) -> tuple[Path, ...]:
    """Remove folders of runs whose launcher is gone. Returns those removed."""
    removed = []
    for path in sorted(base.glob("run-*")) if base.is_dir() else []:
        try:
            descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
        finally:
            os.close(descriptor)
    return tuple(removed)
