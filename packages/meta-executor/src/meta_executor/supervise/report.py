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
from typing import Annotated, Any

import msgspec

#: Largest message (bytes). Datagrams beyond it are refused before they are sent.
MESSAGE_BYTES_MAX = 16 * 1024
#: Name of the launcher's socket below the run folder.
SOCKET_NAME = "launcher.sock"


#: Refused messages of which the reason is kept (count); the others are only counted.
REFUSALS_KEPT_MAX = 16

_Pid = Annotated[int, msgspec.Meta(ge=1, le=2**22)]
_Ticks = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Word = Annotated[str, msgspec.Meta(max_length=256)]
_Rank = Annotated[int, msgspec.Meta(ge=0, le=2**20)]
# Matched by msgspec, against bounded words of a datagram; no repetition inside a repetition.
_Url = Annotated[str, msgspec.Meta(max_length=512, pattern=r"^https?://[^\s/?#@]+:[0-9]{1,5}$")]


class Status(msgspec.Struct, frozen=True):
    """Which part of its start a process is in."""

    phase: _Word = ""


class Started(msgspec.Struct, frozen=True):
    """A guard has started its rank."""

    rank_pid: _Pid
    rank_start_ticks: _Ticks
    guard_start_ticks: _Ticks
    parent_pid: Annotated[int, msgspec.Meta(ge=0, le=2**22)] = 0


class Ready(msgspec.Struct, frozen=True):
    """Requests are taken."""

    url: _Url
    instance_id: _Word = ""


class Orphaned(msgspec.Struct, frozen=True):
    """What a guard depends on is gone."""

    what: _Word
    gone_pid: _Pid


class Exited(msgspec.Struct, frozen=True):
    """A rank has ended."""

    rank_pid: _Pid
    status: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
    text: _Word


class Memory(msgspec.Struct, frozen=True):
    """What a rank holds (bytes)."""

    rss_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    kv_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


Event = Status | Started | Ready | Orphaned | Exited | Memory
_EVENTS: dict[str, type[Event]] = {
    "status": Status,
    "started": Started,
    "ready": Ready,
    "orphaned": Orphaned,
    "exited": Exited,
    "memory": Memory,
}


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """What a process says."""

    owner_id: _Word
    rank: _Rank
    pid: _Pid
    event: _Word
    #: Which start of the owner speaks; empty where there is only one.
    instance_id: _Word = ""
    fields: dict[str, Any] = {}

    def told(self) -> Event:
        """The event's fields.

        Raises:
            msgspec.ValidationError: A field is missing or wrong, or there is no such event. Names the field.
        """
        kind = _EVENTS.get(self.event)
        if kind is None:
            raise msgspec.ValidationError(f"no event {self.event[:64]!r}")
        return msgspec.convert(self.fields, type=kind)


def understood(data: bytes) -> Message | str:
    """A datagram's message with every field checked, or why it is refused (one line that can be shown)."""
    sender = "a message"
    try:
        message = msgspec.json.decode(data, type=Message)
        sender = f"message {message.event!r} of {message.owner_id!r} rank {message.rank}"
        message.told()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return f"{sender[:400]} was refused: {str(error)[:200]!r}"
    return message


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
        #: Messages that were not understood (count).
        self.refused_count = 0
        self._refusals: list[str] = []

    def refusals(self) -> list[str]:
        """Why messages were refused since this was asked last."""
        told, self._refusals = self._refusals, []
        return told

    def fileno(self) -> int:
        """For a selector."""
        return self._socket.fileno()

    def receive(self, limit: int = 256) -> list[Message]:
        """All messages that are there and understood, at most ``limit``; see :meth:`refusals` for the others."""
        messages: list[Message] = []
        for _ in range(limit):
            try:
                data = self._socket.recv(MESSAGE_BYTES_MAX)
            except BlockingIOError:
                break
            message = understood(data)
            if isinstance(message, Message):
                messages.append(message)
                continue
            self.refused_count += 1
            if self.refused_count <= REFUSALS_KEPT_MAX:
                self._refusals.append(message)
        return messages

    def close(self) -> None:
        """Close and remove the socket."""
        self._socket.close()
        self._path.unlink(missing_ok=True)
