"""The folder of one run: sockets, key, logs, evidence; 0700, locked while its launcher lives, gone when it ends.

A launcher that was killed leaves its folder behind without the lock. The next start finds it by that and removes it,
together with the shared-memory segments that it had noted. Nothing is removed but what this user's own launchers made: the
base and each run folder are opened without following links, and owner and mode are looked at through the descriptor.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from pathlib import Path

from meta_executor.config import ConfigError
from meta_executor.private_files import NotPrivateError, open_own_file, open_own_folder

_LOCK = "lock"
_SUBFOLDERS = ("ipc", "logs", "evidence", "tmp")
#: Longest path of a Unix socket (bytes); the run folder must leave room for the longest name below it.
_SOCKET_PATH_MAX = 107
_SOCKET_NAME_MAX = 40
_KEY_DIGITS = 64


def default_base() -> Path:
    """Where runs live without a configured folder: the user's runtime folder, or one below the temporary folder."""
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    base = runtime / "meta-executor"
    if runtime.is_absolute() and _fits(base / "run-00000000") and _is_runtime_folder(runtime):
        return base
    return Path(tempfile.gettempdir(), f"meta-executor-{os.getuid()}")


def _is_runtime_folder(path: Path) -> bool:
    """Whether it is what the XDG rule asks for: a folder of the user's, 0700, that can be written."""
    try:
        status = path.lstat()
    except OSError:
        return False
    private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and stat.S_IMODE(status.st_mode) == 0o700
    return private and os.access(path, os.W_OK)


def _fits(path: Path) -> bool:
    return len(os.fsencode(path)) + _SOCKET_NAME_MAX <= _SOCKET_PATH_MAX


def _open_base(base: Path, *, create: bool) -> int:
    try:
        return open_own_folder(base, create=create)
    except NotPrivateError as error:
        raise ConfigError("run_dir", str(error)) from error


def read_key(path: str) -> bytes:
    """A service's key from its file.

    Raises:
        ConfigError: It is not there, another user may read or has written it, or it is no key.
    """
    try:
        with os.fdopen(open_own_file(path), "rb") as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                raise ConfigError("key_file", f"{path} may be read by others; chmod 600 it")
            text = file.read(_KEY_DIGITS + 2).strip()
    except OSError as error:
        raise ConfigError("key_file", f"{path}: {error.strerror}") from error
    except NotPrivateError as error:
        raise ConfigError("key_file", str(error)) from error
    try:
        key = bytes.fromhex(text.decode("ascii"))
    except ValueError:
        key = b""
    if len(key) * 2 != _KEY_DIGITS:
        raise ConfigError("key_file", f"{path}: want {_KEY_DIGITS} hexadecimal digits (openssl rand -hex 32)")
    return key


class RunDirectory:
    """A locked run folder. Use as a context manager; :meth:`remove` at a clean end."""

    def __init__(self, path: Path, lock_descriptor: int) -> None:
        self.path = path
        self._lock_descriptor = lock_descriptor

    @staticmethod
    def create(base: Path, run_id: str, key: bytes | None = None) -> RunDirectory:
        """Make the folder, its key and its lock.

        Args:
            base: Where.
            run_id: Name of the run.
            key: The run's key; None: a new one.

        Raises:
            ConfigError: The folder cannot be made private, or its path is too long for sockets.
        """
        try:
            os.close(_open_base(base, create=True))
        except OSError as error:
            raise ConfigError("run_dir", f"cannot make {base}: {error.strerror}") from error
        path = base / f"run-{run_id}"
        if not _fits(path):
            raise ConfigError(
                "run_dir", f"{path} is too long for sockets; at most {_SOCKET_PATH_MAX - _SOCKET_NAME_MAX} bytes"
            )
        path.mkdir(mode=0o700)
        descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        for name in _SUBFOLDERS:
            (path / name).mkdir(mode=0o700)
        file = os.open(path / "key", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(file, "w") as handle:
            handle.write((key or secrets.token_bytes(32)).hex())
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
    """Remove folders of runs whose launcher is gone. Returns those removed.

    What only looks like one (a link, a folder of another user, one that others may enter) is left alone.

    Raises:
        ConfigError: The base is a link, belongs to another user, or others may write to it.
    """
    try:
        folder = _open_base(base, create=False)
    except OSError:
        return ()
    try:
        names = sorted(name for name in os.listdir(folder) if name.startswith("run-"))
        return tuple(base / name for name in names if _remove_if_stale(folder, name))
    finally:
        os.close(folder)


def _remove_if_stale(base: int, name: str) -> bool:
    """Whether it was the folder of a dead run of ours, and is gone now."""
    try:
        run = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=base)
    except OSError:
        return False
    try:
        status = os.fstat(run)
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) != 0o700:
            return False
        try:
            lock = open_own_file(_LOCK, os.O_RDWR, dir_fd=run)
        except (OSError, NotPrivateError):
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        else:
            # By descriptors from here on: rmtree follows no link below ``base`` either.
            shutil.rmtree(name, ignore_errors=True, dir_fd=base)
            return name not in os.listdir(base)
        finally:
            os.close(lock)
    finally:
        os.close(run)
