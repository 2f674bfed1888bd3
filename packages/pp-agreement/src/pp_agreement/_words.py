"""What a host says when it stops its domain, as records: twenty bytes each, before the FAIL_STOP."""

from __future__ import annotations

import struct

from pp_agreement._events import Record
from pp_agreement._state import Kind

CHUNK_BYTES = 20
CHUNKS_MAX = 12
TEXT_BYTES_MAX = CHUNK_BYTES * CHUNKS_MAX
_CHUNK = struct.Struct("<IQQ")  # the three large fields of a record


def records_of(text: str) -> list[Record]:
    """At most ``TEXT_BYTES_MAX`` bytes of ``text``, in UTF-8 and in order."""
    data = text.encode("utf-8", "replace")[:TEXT_BYTES_MAX]
    found: list[Record] = []
    for number in range(0, len(data), CHUNK_BYTES):
        one, two, three = _CHUNK.unpack(data[number : number + CHUNK_BYTES].ljust(CHUNK_BYTES, b"\0"))
        found.append((int(Kind.TEXT), number // CHUNK_BYTES, 0, 0, one, two, three))
    return found


def chunk_of(record: Record) -> bytes:
    """The bytes that a record carries, padded with zeros."""
    return _CHUNK.pack(*record[4:])


def text_of(data: bytes) -> str:
    """What was said, as far as it came; control characters are shown, not obeyed."""
    text = data.rstrip(b"\0").decode("utf-8", "replace")
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
