"""Frames: bytes <-> :class:`Frame`. Versioned, checksummed, bounded; a frame that is not exactly right is no frame.

A frame is a 44-byte header and ``count`` records of 24 bytes, little-endian::

    magic  version  flags  count  domain_id  epoch  source  target  sequence  busy_ms  session  crc32
    4s     u8       u8     u16    u32        u32    u16     u16     u64       u32      u64      u32
    record: kind u8, outcome u8, disposition u8, reason u8, attempt u32, request_id u64, incarnation u64

The checksum covers everything but itself. Meaning (who may say what, when) is the core's business.
"""

from __future__ import annotations

import struct
from typing import NoReturn
from zlib import crc32

from pp_agreement._config import HEADER_BYTES, RECORD_BYTES, Domain
from pp_agreement._errors import RemoteProtocolError
from pp_agreement._events import Frame, Record, frame_of

MAGIC = b"PPAG"
WIRE_VERSION = 3
_HEADER = struct.Struct("<4sBBHIIHHQIQ")
_RECORD = struct.Struct("<BBBBIQQ")
_COUNT = struct.Struct("<H")
_COUNT_OFFSET = 6
_DOMAIN = struct.Struct("<I")
_DOMAIN_OFFSET = 8
_HEAD = _HEADER.size
# A stream's header is the same in every frame up to the target's rank, but for the count: two runs of bytes around it.
_IDENTITY = struct.Struct("<IIHH")
_FIXED = struct.Struct("<6sH12sQIQ")
_VARYING = struct.Struct("<6xH12xQIQI")
_FIRST = MAGIC + bytes((WIRE_VERSION, 0))
_FIRST_END, _SECOND, _SECOND_END = 6, 8, 20


class Codec:
    """Encodes and decodes one member's frames of one domain.

    Args:
        domain: The domain whose frames these are.
        rank: This member.
        frame_bytes_max: Longest frame accepted or made, in bytes.
    """

    def __init__(self, domain: Domain, rank: int, frame_bytes_max: int) -> None:
        self._domain_id = domain.domain_id
        self._epoch = domain.epoch
        self._ranks = domain.ranks
        self._rank = rank
        self._count_max = (frame_bytes_max - HEADER_BYTES) // RECORD_BYTES
        self._size_max = HEADER_BYTES + self._count_max * RECORD_BYTES
        identity, epoch = domain.domain_id, domain.epoch
        self._sent = [_IDENTITY.pack(identity, epoch, rank, other) for other in domain.ranks]
        self._received = [_IDENTITY.pack(identity, epoch, other, rank) for other in domain.ranks]
        # What was encoded last: a decision goes to every follower in the same words.
        self._packed: tuple[Record, ...] = ()
        self._payload = b""

    def encode(self, target: int, frame: Frame) -> bytes:
        """The bytes of ``frame`` for member ``target`` (an index); at most ``frame_bytes_max`` long."""
        sequence, busy_ms, records, session, _content = frame
        if records == self._packed:
            payload = self._payload
        else:
            pack = _RECORD.pack
            payload = b"".join([pack(*record) for record in records])
            self._packed, self._payload = records, payload
        header = _FIXED.pack(_FIRST, len(records), self._sent[target], sequence, busy_ms, session)
        return header + crc32(payload, crc32(header)).to_bytes(4, "little") + payload

    def decode(self, source: int, data: bytes | bytearray | memoryview) -> Frame:
        """The frame in ``data``, which member ``source`` (an index) sent to this rank.

        Raises:
            RemoteProtocolError: ``data`` is not exactly one valid frame of this stream. Discard it whole.
        """
        if type(data) is not bytes:
            data = bytes(data)
        size = len(data)
        if size < HEADER_BYTES:
            raise RemoteProtocolError(f"{size} bytes are shorter than a header", rank=self._ranks[source])
        count, sequence, busy_ms, session, checksum = _VARYING.unpack_from(data)
        payload = data[HEADER_BYTES:]
        if (
            data[:_FIRST_END] != _FIRST
            or data[_SECOND:_SECOND_END] != self._received[source]
            or size != HEADER_BYTES + count * RECORD_BYTES
            or size > self._size_max
            or checksum != crc32(payload, crc32(data[:_HEAD]))
            or sequence < 1
        ):
            self._reject(source, data)
        return frame_of((sequence, busy_ms, tuple(_RECORD.iter_unpack(payload)), session, data))

    def _reject(self, source: int, data: bytes) -> NoReturn:
        """Say what is wrong with a frame."""
        magic, version, flags, count, domain_id, epoch, origin, target, sequence, _busy_ms, _session = (
            _HEADER.unpack_from(data)
        )
        size, whole = len(data), data[:_HEAD] + data[HEADER_BYTES:]
        if magic != MAGIC or version != WIRE_VERSION:
            told = f"magic {magic!r}, version {version}; this is version {WIRE_VERSION}"
        elif count > self._count_max or size != HEADER_BYTES + count * RECORD_BYTES:
            told = f"{count} records in {size} bytes; at most {self._count_max}"
        elif data[_HEAD:HEADER_BYTES] != crc32(whole).to_bytes(4, "little"):
            told = "checksum does not match"
        elif domain_id != self._domain_id or epoch != self._epoch:
            told = f"domain {domain_id} epoch {epoch}; this is {self._domain_id} epoch {self._epoch}"
        elif origin != self._ranks[source] or target != self._rank:
            told = f"from rank {origin} to rank {target}; this is rank {self._rank}"
        else:
            told = f"flags {flags}, sequence {sequence}"
        raise RemoteProtocolError(told, rank=self._ranks[source])


def frame_domain(frame: bytes | bytearray | memoryview) -> int:
    """The domain that a frame claims to be of; -1 where it is too short to say."""
    return int(_DOMAIN.unpack_from(frame, _DOMAIN_OFFSET)[0]) if len(frame) >= HEADER_BYTES else -1


def frame_length(buffer: bytes | bytearray | memoryview) -> int:
    """Bytes that the frame at the start of a padded ``buffer`` claims; at most the buffer's length."""
    if len(buffer) < HEADER_BYTES:
        return len(buffer)
    claimed = HEADER_BYTES + int(_COUNT.unpack_from(buffer, _COUNT_OFFSET)[0]) * RECORD_BYTES
    return min(claimed, len(buffer))
