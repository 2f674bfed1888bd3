"""The block: a table of segment sizes, then the segments that are copied into it, each at a multiple of 64 bytes.

Segments above a threshold that lie contiguous in memory are *large*: they stay where they are and travel after the block.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from comm_broadcast._codec import Segment
from comm_broadcast._config import BroadcastConfig
from comm_broadcast._errors import RemoteProtocolError

ALIGNMENT = 64
_COUNT = struct.Struct("<I")
_LARGE = 1 << 63


def _aligned(value: int) -> int:
    return -(-value // ALIGNMENT) * ALIGNMENT


def plan(segments: Sequence[Segment], config: BroadcastConfig) -> tuple[int, list[int], list[int]]:
    """Size of the block (bytes), table entries, and indices of the large segments.

    The first frame lists the large segments' sizes: what it has no room for goes into the block, too.
    """
    large = [i for i, s in enumerate(segments) if i and s.nbytes > config.gather_bytes_max and s.source() is not None]
    large = large[: config.inline_bytes_max // 8]
    is_large = set(large)
    entries = [s.nbytes | (_LARGE if i in is_large else 0) for i, s in enumerate(segments)]
    position = _COUNT.size + 8 * len(entries)
    for i, segment in enumerate(segments):
        if i not in is_large:
            position = _aligned(position) + segment.nbytes
    return position, entries, large


def write(target: memoryview, segments: Sequence[Segment], entries: Sequence[int]) -> None:
    """Fill a block of the planned size; segment by segment, so that other threads get their turn between them."""
    _COUNT.pack_into(target, 0, len(entries))
    struct.pack_into(f"<{len(entries)}Q", target, _COUNT.size, *entries)
    position = _COUNT.size + 8 * len(entries)
    for segment, entry in zip(segments, entries, strict=True):
        if not entry & _LARGE:
            position = _aligned(position)
            if segment.nbytes:
                segment.write_into(target[position : position + segment.nbytes])
            position += segment.nbytes


def write_sizes(target: memoryview, sizes: Sequence[int]) -> None:
    """Sizes of the large segments, where the first frame's payload would be (bytes each)."""
    struct.pack_into(f"<{len(sizes)}Q", target, 0, *sizes)


def read_sizes(source: memoryview, count: int) -> tuple[int, ...]:
    """Sizes of the large segments that follow.

    Raises:
        RemoteProtocolError: The frame cannot hold so many.
    """
    if 8 * count > len(source):
        raise RemoteProtocolError(f"first frame cannot list {count} buffers")
    return struct.unpack_from(f"<{count}Q", source, 0)


def _entries(block: memoryview) -> tuple[int, ...]:
    if len(block) < _COUNT.size:
        raise RemoteProtocolError(f"block of {len(block)} bytes holds no table")
    (count,) = _COUNT.unpack_from(block, 0)
    if _COUNT.size + 8 * count > len(block):
        raise RemoteProtocolError(f"block of {len(block)} bytes cannot hold a table of {count} entries")
    return struct.unpack_from(f"<{count}Q", block, _COUNT.size)


def split(block: memoryview, large: Sequence[memoryview]) -> list[memoryview]:
    """All segments of a block and of the buffers that followed it, in order.

    Raises:
        RemoteProtocolError: The table does not fit the block.
    """
    entries = _entries(block)
    position = _COUNT.size + 8 * len(entries)
    count_large = sum(entry >> 63 for entry in entries)
    if count_large != len(large):
        raise RemoteProtocolError(f"table of {count_large} large segments, {len(large)} came")
    follow = iter(large)
    found = []
    for entry in entries:
        if entry & _LARGE:
            buffer = next(follow)
            if buffer.nbytes != entry & ~_LARGE:
                raise RemoteProtocolError(f"large segment of {entry & ~_LARGE} bytes, {buffer.nbytes} came")
            found.append(buffer)
            continue
        position = _aligned(position)
        if position + entry > len(block):
            raise RemoteProtocolError(f"segment of {entry} bytes at {position} leaves the block of {len(block)} bytes")
        found.append(block[position : position + entry])
        position += entry
    return found
