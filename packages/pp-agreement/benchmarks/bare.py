"""What the figures are compared with: the least Python that does the visible part of the job, written plainly.

``Exchange`` is a bare exchange of frames: as many as the agreement sends, of the same size, over the same transport. Each is
packed and unpacked with header, checksum and records, and its number is checked; nothing is agreed. A frame has the layout of
the agreement's, since a checksum at the end costs one look and not three: a baseline that packs more slowly than what is
measured against it would flatter.

``Counter`` is a bare vote count with the agreement's interface: ``admit`` and ``vote`` are calls, frames come in and go out, a
decision is a tuple for the host. Votes are counted and the greatest outcome wins; there is no identity of rounds, no order, no
phase, no bound and no check of anything but the checksum. ``counting_loop`` is the same count once more, as one loop without
calls or objects.
"""

from __future__ import annotations

import struct
from zlib import crc32

HEADER = struct.Struct("<4sBBHIIHHQIQ")
RECORD = struct.Struct("<BBBBIQQ")
MAGIC = b"BARE"
START, CHECKSUM = HEADER.size, 4
WHOLE = 0x2144DF1C  # the crc32 of anything that ends with its own
VOTE, COMMIT = 8, 37
Record = tuple[int, int, int, int, int, int, int]


def pack(sequence: int, records: list[Record] | tuple[Record, ...]) -> bytes:
    """A frame."""
    payload = b"".join([RECORD.pack(*record) for record in records])
    body = HEADER.pack(MAGIC, 1, 0, len(records), 0, 0, 0, 0, sequence, 0, 0) + payload
    return body + crc32(body).to_bytes(CHECKSUM, "little")


def unpack(data: bytes) -> tuple[int, tuple[Record, ...]]:
    """The number and the records of a frame."""
    magic, _version, _flags, count, _domain, _epoch, _source, _target, sequence, _busy, _session = HEADER.unpack_from(
        data
    )
    if magic != MAGIC or len(data) != START + count * RECORD.size + CHECKSUM:
        raise ValueError("not a frame")
    if crc32(data) != WHOLE:
        raise ValueError("checksum")
    return sequence, tuple(RECORD.iter_unpack(data[START:-CHECKSUM]))


class Exchange:
    """One end: what a poll of it receives and sends.

    Args:
        transport: As an agreement's; opened here.
        peers: Members that one frame goes to in each turn.
    """

    def __init__(self, transport, peers: tuple[int, ...]) -> None:  # type: ignore[no-untyped-def]
        self.transport = transport
        self.peers = peers
        self.number = dict.fromkeys(peers, 1)
        self.expected = dict.fromkeys(peers, 1)
        self.records = 0
        transport.open(peers, 16_384)

    def turn(self, number: int) -> None:
        """Take what has come, send one frame with one record to each peer."""
        for peer, data in self.transport.receive(64).frames:
            sequence, records = unpack(data)
            if sequence != self.expected[peer]:
                raise ValueError("order")
            self.expected[peer] = sequence + 1
            for _record in records:
                self.records += 1
        for peer in self.peers:
            if self.transport.can_send(peer):
                self.transport.send(peer, pack(self.number[peer], ((VOTE, 0, 0, 0, 0, number, number),)))
                self.number[peer] += 1


class Counter:
    """A coordinator that only counts; see the module."""

    def __init__(self, followers: int) -> None:
        self.me = followers
        self.all = (1 << (followers + 1)) - 1
        self.open: dict[int, list[int]] = {}  # number: request, voters, greatest outcome
        self.queues: list[list[Record]] = [[] for _ in range(followers)]
        self.decided: list[tuple[int, int, int]] = []
        self.sequence = 0

    def admit(self, request_id: int, number: int) -> int:
        """Open a round."""
        self.open[number] = [request_id, 0, 0]
        return number

    def vote(self, number: int, outcome: int) -> None:
        """The coordinator's own vote."""
        self.count(self.me, number, outcome)

    def count(self, member: int, number: int, outcome: int) -> None:
        """One vote; the last one decides."""
        entry = self.open[number]
        entry[1] |= 1 << member
        if outcome > entry[2]:
            entry[2] = outcome
        if entry[1] == self.all:
            del self.open[number]
            for queue in self.queues:
                queue.append((COMMIT, entry[2], 0, 0, 0, entry[0], number))
            self.decided.append((entry[0], number, entry[2]))

    def receive(self, member: int, data: bytes) -> None:
        """A follower's frame."""
        for _kind, outcome, _disposition, _reason, _attempt, _request_id, number in unpack(data)[1]:
            self.count(member, number, outcome)

    def frames(self) -> list[bytes]:
        """What goes to each follower."""
        self.sequence += 1
        frames = [pack(self.sequence, queue) for queue in self.queues]
        for queue in self.queues:
            queue.clear()
        return frames


def counting_loop(frames: list[bytes], requests: int) -> list[bytes]:
    """The same count as one loop: masks in a dict, nothing called."""
    followers = len(frames)
    full = (1 << (followers + 1)) - 1
    masks = dict.fromkeys(range(1, requests + 1), 1 << followers)
    queues: list[list[Record]] = [[] for _ in range(followers)]
    for member, data in enumerate(frames):
        for _kind, outcome, _disposition, _reason, _attempt, request_id, number in RECORD.iter_unpack(
            data[START:-CHECKSUM]
        ):
            mask = masks[number] | 1 << member
            masks[number] = mask
            if mask == full:
                for queue in queues:
                    queue.append((COMMIT, outcome, 0, 0, 0, request_id, number))
    return [b"".join([RECORD.pack(*record) for record in queue]) for queue in queues]
