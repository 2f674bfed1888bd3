"""One line to the launcher: what a process of a run is doing.

Ranks, guards and the front tell the launcher about progress, readiness and deaths by Unix datagrams: one message is one
datagram, so lines are never glued together, order per sender is kept, nobody blocks on a launcher that is slow, and a
process that was started without a launcher simply talks to nobody.
"""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import Any

import msgspec

#: Largest message (bytes). Datagrams beyond it are refused before they are sent.
MESSAGE_BYTES_MAX = 16 * 1024
#: Name of the launcher's socket below the run folder.
SOCKET_NAME = "launcher.sock"


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """What a process says."""

    owner_id: str
    rank: int
    pid: int
    event: str
    #: Which start of the owner speaks; empty where there is only one.
    instance_id: str = ""
    fields: dict[str, Any] = {}


class Reporter:
    """Sends messages of one process. Never blocks and never raises for want of a listener.

    Args:
        run_dir: The run's folder; the launcher listens below it.
        owner_id: Instance (``ctx-0``) or ``front``.
        rank: Rank in the instance, 0 for the front.
        instance_id: Which start of that instance this process belongs to.
    """

    def __init__(self, run_dir: str | os.PathLike[str], owner_id: str, rank: int, instance_id: str = "") -> None:
        self._address = str(Path(run_dir, SOCKET_NAME))
        self._owner_id = owner_id
        self._rank = rank
        self._instance_id = instance_id
        self._socket: socket.socket | None = None
        self.unheard_count = 0

    def send(self, event: str, **fields: Any) -> bool:
        """Tell the launcher. Returns whether it was handed to the operating system.

        Raises:
            ValueError: The message is larger than ``MESSAGE_BYTES_MAX``.
        """
        data = msgspec.json.encode(
            Message(
                owner_id=self._owner_id,
                rank=self._rank,
                pid=os.getpid(),
                event=event,
                instance_id=self._instance_id,
                fields=fields,
            )
        )
        if len(data) > MESSAGE_BYTES_MAX:
            raise ValueError(f"message {event!r} has {len(data)} bytes, at most {MESSAGE_BYTES_MAX}")
        try:
            if self._socket is None:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
                self._socket.setblocking(False)
            self._socket.sendto(data, self._address)
        except OSError as error:
            # No launcher (started by hand, or it is gone), or its queue is full: progress is advisory.
            if error.errno not in (errno.ENOENT, errno.ECONNREFUSED, errno.EAGAIN, errno.ENOBUFS):
                raise
            self.unheard_count += 1
            return False
        return True

    def close(self) -> None:
        """Close the socket; a later ``send`` opens it again."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class Listener:
    """The launcher's end."""

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self._path = Path(run_dir, SOCKET_NAME)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)
        self._socket.bind(str(self._path))

    def fileno(self) -> int:
        """For a selector."""
        return self._socket.fileno()

    def receive(self, limit: int = 256) -> list[Message]:
        """All messages that are there, at most ``limit``. Malformed ones are dropped: any process may write."""
        messages: list[Message] = []
        for _ in range(limit):
            try:
                data = self._socket.recv(MESSAGE_BYTES_MAX)
            except BlockingIOError:
                break
            try:
                messages.append(msgspec.json.decode(data, type=Message))
            except msgspec.DecodeError:
                continue
        return messages

    def close(self) -> None:
        """Close and remove the socket."""
        self._socket.close()
        self._path.unlink(missing_ok=True)
