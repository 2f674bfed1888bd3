"""Frames: bytes <-> :class:`Frame`. Versioned, checksummed, bounded; a frame that is not exactly right is no frame.

A frame is a 44-byte header and ``count`` records of 24 bytes, little-endian::

    magic  version  flags  count  domain_id  epoch  source  target  sequence  busy_ms  session  crc32
    4s     u8       u8     u16    u32        u32    u16     u16     u64       u32      u64      u32
    record: kind u8, outcome u8, disposition u8, reason u8, attempt u32, request_id u64, incarnation u64

The checksum covers everything but itself. Meaning (who may say what, when) is the core's business.
"""

from __future__ import annotations

import struct
from zlib import crc32

from pp_agreement._config import HEADER_BYTES, RECORD_BYTES, Domain
from pp_agreement._errors import RemoteProtocolError
from pp_agreement._events import Frame

MAGIC = b"PPAG"
WIRE_VERSION = 2
_HEADER = struct.Struct("<4sBBHIIHHQIQ")
_CRC = struct.Struct("<I")
_RECORD = struct.Struct("<BBBBIQQ")
_COUNT = struct.Struct("<H")
_COUNT_OFFSET = 6
_HEAD = _HEADER.size


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

    def encode(self, target: int, frame: Frame) -> bytes:
        """The bytes of ``frame`` for member ``target`` (an index); at most ``frame_bytes_max`` long."""
        sequence, busy_ms, records, session, _checksum = frame
        header = _HEADER.pack(
            MAGIC, WIRE_VERSION, 0, len(records), self._domain_id, self._epoch, self._rank, self._ranks[target],
            sequence, busy_ms, session,
        )  # fmt: skip
        pack = _RECORD.pack
        payload = b"".join([pack(*record) for record in records])
        return b"%b%b%b" % (header, _CRC.pack(crc32(payload, crc32(header))), payload)

    def decode(self, source: int, data: bytes | bytearray | memoryview) -> Frame:
        """The frame in ``data``, which member ``source`` (an index) sent to this rank.

        Raises:
            RemoteProtocolError: ``data`` is not exactly one valid frame of this stream. Discard it whole.
        """
        size = len(data)
        if size < HEADER_BYTES:
            raise RemoteProtocolError(f"{size} bytes are shorter than a header", rank=self._ranks[source])
        magic, version, flags, count, domain_id, epoch, origin, target, sequence, busy_ms, session = (
            _HEADER.unpack_from(data)
        )
        if magic != MAGIC or version != WIRE_VERSION:
            self._reject(source, f"magic {magic!r}, version {version}; this is version {WIRE_VERSION}")
        if count > self._count_max or size != HEADER_BYTES + count * RECORD_BYTES:
            self._reject(source, f"{count} records in {size} bytes; at most {self._count_max}")
        view = memoryview(data)
        payload = view[HEADER_BYTES:]
        checksum = crc32(payload, crc32(view[:_HEAD]))
        if _CRC.unpack_from(data, _HEAD)[0] != checksum:
            self._reject(source, "checksum does not match")
        if domain_id != self._domain_id or epoch != self._epoch:
            self._reject(source, f"domain {domain_id} epoch {epoch}; this is {self._domain_id} epoch {self._epoch}")
        if origin != self._ranks[source] or target != self._rank:
            self._reject(source, f"from rank {origin} to rank {target}; this is rank {self._rank}")
        if flags or sequence < 1:
            self._reject(source, f"flags {flags}, sequence {sequence}")
        return Frame(sequence, busy_ms, tuple(_RECORD.iter_unpack(payload)), session, checksum)

    def _reject(self, source: int, message: str) -> None:
        raise RemoteProtocolError(message, rank=self._ranks[source])


def frame_length(buffer: bytes | bytearray | memoryview) -> int:
    """Bytes that the frame at the start of a padded ``buffer`` claims; at most the buffer's length."""
    if len(buffer) < HEADER_BYTES:
        return len(buffer)
    claimed = HEADER_BYTES + int(_COUNT.unpack_from(buffer, _COUNT_OFFSET)[0]) * RECORD_BYTES
    return min(claimed, len(buffer))
