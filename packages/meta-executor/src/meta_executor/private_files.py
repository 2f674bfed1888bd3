"""Files and folders that no other user of this machine can redirect, change or read.

A path is looked at through a descriptor that was opened without following a link at its end, so what was checked is what
is used. Folders are made with mode 0700 and files with 0600, whatever the umask.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


class NotPrivateError(Exception):
    """A path that another user controls, or a link. The message names the path and says why."""


def open_folder(path: str | os.PathLike[str], *, create: bool = False) -> int:
    """Open a folder itself, never what a link of its name leads to.

    Args:
        path: The folder.
        create: Make it (0700), with its parents, if it is not there.

    Returns:
        A descriptor that the caller closes.

    Raises:
        NotPrivateError: The path is a link.
        OSError: It is not there, is no folder, or may not be opened.
    """
    if create:
        Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
    if stat.S_ISLNK(os.lstat(path).st_mode):
        raise NotPrivateError(f"{path} is a symbolic link; name the folder that it leads to")
    return os.open(path, _FOLDER)


def open_own_folder(path: str | os.PathLike[str], *, create: bool = False, root_too: bool = False) -> int:
    """Open a folder in which no other user can rename or replace what is ours.

    Args:
        path: The folder.
        create: Make it (0700), with its parents, if it is not there.
        root_too: A folder of the machine's administrator is good as well.

    Returns:
        A descriptor that the caller closes.

    Raises:
        NotPrivateError: It is a link, belongs to another user, or others may write to it and it is not sticky.
        OSError: It is not there, is no folder, or may not be opened.
    """
    descriptor = open_folder(path, create=create)
    try:
        _check(os.fstat(descriptor), path, root_too=root_too)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_own_file(
    path: str | os.PathLike[str], flags: int = os.O_RDONLY, *, dir_fd: int | None = None, root_too: bool = False
) -> int:
    """Open a file that exists and that nobody else can have written.

    Args:
        path: The file; relative to ``dir_fd`` if that is given.
        flags: As for :func:`os.open`; links are never followed.
        dir_fd: A folder's descriptor.
        root_too: A file of the machine's administrator is good as well.

    Returns:
        A descriptor that the caller closes.

    Raises:
        NotPrivateError: It is not a plain file, belongs to another user, or others may write to it.
        OSError: It is not there, is a link, or may not be opened.
    """
    # Without O_NONBLOCK a named pipe in its place would hold us here.
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise NotPrivateError(f"{path} is not a plain file")
        _check(status, path, root_too=root_too)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check(status: os.stat_result, path: str | os.PathLike[str], *, root_too: bool) -> None:
    if status.st_uid != os.getuid() and not (root_too and status.st_uid == 0):
        raise NotPrivateError(f"{path} belongs to another user (uid {status.st_uid})")
    sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if status.st_mode & _OTHERS_MAY_WRITE and not sticky:
        raise NotPrivateError(
            f"{path} has mode {stat.S_IMODE(status.st_mode):04o}: others may write to it; chmod go-w it"
        )


def write_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Put a whole file (0600) in its place, instead of whatever has that name; a link is replaced, not followed."""
    folder = os.open(Path(path).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with _replacing(folder, Path(path).name) as file:
            file.write(data)
    finally:
        os.close(folder)


def copy_files(source: str | os.PathLike[str], target: int) -> None:
    """Copy the plain files of a folder of ours into another folder, each whole or not at all, with mode 0600.

    Links in the source are left out. A link in the target is replaced, not followed.

    Args:
        source: A folder.
        target: A folder's descriptor.

    Raises:
        NotPrivateError: A file of the source belongs to another user, or others may write to it.
        OSError: One cannot be read or written. Those before it are there.
    """
    folder = open_folder(source)
    try:
        for name in sorted(os.listdir(folder)):
            if not stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                continue
            with os.fdopen(open_own_file(name, dir_fd=folder), "rb") as reading, _replacing(target, name) as writing:
                shutil.copyfileobj(reading, writing, 1 << 20)
    finally:
        os.close(folder)


@contextlib.contextmanager
def _replacing(folder: int, name: str) -> Iterator[BinaryIO]:
    """A new file that takes the name when it was written whole, and is removed otherwise."""
    partial = f".{name}.{secrets.token_hex(8)}.part"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(partial, flags, 0o600, dir_fd=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        os.replace(partial, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        os.unlink(partial, dir_fd=folder)
        raise
