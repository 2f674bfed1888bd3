"""Frames: bytes <-> :class:`Frame`. Versioned, checksummed, bounded; a frame that is not exactly right is no frame.

A frame is a header of 40 bytes, ``count`` records of 24 and a checksum of 4, little-endian::

    magic  version  flags  count  domain_id  epoch  source  target  sequence  busy_ms  session
    4s     u8       u8     u16    u32        u32    u16     u16     u64       u32      u64
    record: kind u8, outcome u8, disposition u8, reason u8, attempt u32, request_id u64, incarnation u64
    checksum: crc32 of all that is before it

The checksum comes last, so that one look at the whole frame checks it: a CRC over data and its own CRC is a constant. Meaning
(who may say what, when) is the core's business.
"""

from __future__ import annotations

import struct
from typing import NoReturn
from zlib import crc32

from pp_agreement._config import FRAME_BYTES, RECORD_BYTES, Domain
from pp_agreement._errors import RemoteProtocolError
from pp_agreement._events import Frame, Record, new

MAGIC = b"PPAG"
WIRE_VERSION = 4
_HEADER = struct.Struct("<4sBBHIIHHQIQ")
_RECORD = struct.Struct("<BBBBIQQ")
_COUNT_OFFSET = 6
_DOMAIN = struct.Struct("<I")
_DOMAIN_OFFSET = 8
_HEAD = _HEADER.size
_CHECKSUM = 4
_WHOLE = 0x2144DF1C
"""The crc32 of anything that ends with its own crc32."""
# A stream's header is the same in every frame up to the target's rank, but for the count: two runs of bytes around it.
_IDENTITY = struct.Struct("<IIHH")
_PARTS = struct.Struct("<6sH12sQIQ")
_FIRST = MAGIC + bytes((WIRE_VERSION, 0))
_pack_head, _unpack_head = _PARTS.pack, _PARTS.unpack_from
_pack_record, _unpack_record, _unpack_records = _RECORD.pack, _RECORD.unpack_from, _RECORD.iter_unpack


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
        self._count_max = (frame_bytes_max - FRAME_BYTES) // RECORD_BYTES
        identity, epoch = domain.domain_id, domain.epoch
        self._sent = [_IDENTITY.pack(identity, epoch, rank, other) for other in domain.ranks]
        self._received = [_IDENTITY.pack(identity, epoch, other, rank) for other in domain.ranks]
        # What was encoded last: a decision goes to every follower in the same words. One value, so that an interrupt leaves
        # no records beside the bytes of others: frames that were made before it are still sent.
        self._packed: tuple[tuple[Record, ...], bytes] = (), b""

    def encode(self, target: int, frame: Frame) -> bytes:
        """The bytes of ``frame`` for member ``target`` (an index); at most ``frame_bytes_max`` long."""
        sequence, busy_ms, records, session, _content = frame
        packed, payload = self._packed
        if records != packed:
            if len(records) == 1:
                payload = _pack_record(*records[0])
            else:
                payload = b"".join([_pack_record(*record) for record in records])
            self._packed = records, payload
        body = _pack_head(_FIRST, len(records), self._sent[target], sequence, busy_ms, session) + payload
        return body + crc32(body).to_bytes(_CHECKSUM, "little")

    def decode(self, source: int, data: bytes | bytearray | memoryview) -> Frame:
        """The frame in ``data``, which member ``source`` (an index) sent to this rank.

        Raises:
            RemoteProtocolError: ``data`` is not exactly one valid frame of this stream. Discard it whole.
        """
        if type(data) is not bytes:
            data = bytes(data)
        if len(data) < FRAME_BYTES:
            raise RemoteProtocolError(f"{len(data)} bytes are shorter than a frame", rank=self._ranks[source])
        first, count, identity, sequence, busy_ms, session = _unpack_head(data)
        if (
            first != _FIRST
            or identity != self._received[source]
            or len(data) != FRAME_BYTES + count * RECORD_BYTES
            or count > self._count_max
            or crc32(data) != _WHOLE
            or sequence < 1
        ):
            self._reject(source, data)
        records: tuple[Record, ...] = (
            (_unpack_record(data, _HEAD),) if count == 1 else tuple(_unpack_records(data[_HEAD:-_CHECKSUM]))
        )
        return new(Frame, (sequence, busy_ms, records, session, data))

    def _reject(self, source: int, data: bytes) -> NoReturn:
        """Say what is wrong with a frame."""
        magic, version, flags, count, domain_id, epoch, origin, target, sequence, _busy_ms, _session = (
            _HEADER.unpack_from(data)
        )
        size = len(data)
        if magic != MAGIC or version != WIRE_VERSION:
            told = f"magic {magic!r}, version {version}; this is version {WIRE_VERSION}"
        elif count > self._count_max or size != FRAME_BYTES + count * RECORD_BYTES:
            told = f"{count} records in {size} bytes; at most {self._count_max}"
        elif crc32(data) != _WHOLE:
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
    return int(_DOMAIN.unpack_from(frame, _DOMAIN_OFFSET)[0]) if len(frame) >= FRAME_BYTES else -1


def frame_length(buffer: bytes | bytearray | memoryview) -> int:
    """Bytes that the frame at the start of a padded ``buffer`` of at least ``FRAME_BYTES`` claims; maybe more than it has."""
    return FRAME_BYTES + RECORD_BYTES * (buffer[_COUNT_OFFSET] | buffer[_COUNT_OFFSET + 1] << 8)
