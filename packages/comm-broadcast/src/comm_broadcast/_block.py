"""The block: a table of segment sizes, then the segments that are copied into it, each at a multiple of 64 bytes.

Segments above a threshold that lie contiguous in memory are *large*: they stay where they are and travel after the block.

A block that is streamed travels in pieces while the rest of it is still being copied. Its head, the table and the first
segment, goes in the first frame where that has room; after the last piece, and in the same transfer, comes a trailer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from operator import index as index_of

from comm_broadcast._codec import Segment
from comm_broadcast._config import BroadcastConfig
from comm_broadcast._errors import RemoteProtocolError

ALIGNMENT = 64
_COUNT = struct.Struct("<I")
#: The table of one segment, up to where that begins.
_SINGLE = struct.Struct(f"<IQ{ALIGNMENT - 12}x")
_LARGE = 1 << 63
#: What follows a streamed block: a frame that says whether all of it was written (bytes).
TRAILER_BYTES = 512
#: Pieces of a streamed block: so many, but none smaller and none larger than this (count, bytes). A piece of half a mebibyte
#: costs next to nothing more than its share of the whole, and fits beside its source in a core's own cache.
_PIECES = 16
_PIECE_BYTES_MIN = 512 << 10
_PIECE_BYTES_MAX = 1 << 30


def _aligned(value: int) -> int:
    return -(-value // ALIGNMENT) * ALIGNMENT


def plan(segments: Sequence[Segment], config: BroadcastConfig) -> tuple[int, list[int], dict[int, memoryview]]:
    """Size of the block (bytes), table entries, and the large segments' bytes by index.

    The first frame lists the large segments' sizes: what it has no room for goes into the block, too. Each segment is asked
    for its bytes here and never again: nothing that it does may fail once others rely on it.

    Raises:
        ValueError: A segment's bytes are not as many as it says.
    """
    large: dict[int, memoryview] = {}
    sizes = [index_of(segment.nbytes) for segment in segments]
    for i, size in enumerate(sizes):
        if i and size > config.gather_bytes_max and len(large) < config.inline_bytes_max // 8:
            source = segments[i].source()
            if source is not None:
                large[i] = memoryview(source).cast("B")
                if large[i].nbytes != size:
                    raise ValueError(f"segment {i} has {large[i].nbytes} bytes where it is, and says {size}")
    entries = [size | (_LARGE if i in large else 0) for i, size in enumerate(sizes)]
    position = _COUNT.size + 8 * len(entries)
    for i, size in enumerate(sizes):
        if i not in large:
            position = _aligned(position) + size
    return position, entries, large


def head_bytes(entries: Sequence[int], room: int) -> int:
    """Size of a block's beginning that travels in the first frame: table and first segment; 0 when they do not fit there."""
    size = _aligned(_COUNT.size + 8 * len(entries)) + entries[0]
    return size if size <= room else 0


def piece_ends(start: int, end: int, chunk_bytes: int) -> list[int]:
    """Where the pieces of a streamed block end that did not fit in the first frame; the trailer follows the last of them."""
    if start == end:
        return []
    count = max(1, min(_PIECES, (end - start) // _PIECE_BYTES_MIN))
    size = min(_aligned(-(-(end - start) // count)), chunk_bytes, _PIECE_BYTES_MAX)
    return [*range(start + size, end, size), end]


def prepare(target: memoryview, segments: Sequence[Segment], entries: Sequence[int]) -> None:
    """Begin a block of the planned size: its table, and whatever of the segments could fail."""
    _COUNT.pack_into(target, 0, len(entries))
    struct.pack_into(f"<{len(entries)}Q", target, _COUNT.size, *entries)
    for segment, start, end in _places(segments, entries):
        segment.prepare(target[start:end])


def copy(target: memoryview, segments: Sequence[Segment], entries: Sequence[int]) -> Iterator[int]:
    """Fill a prepared block, step by step, so that other threads get their turn; up to where it is complete (bytes)."""
    for segment, start, end in _places(segments, entries):
        for done in segment.copy(target[start:end]):
            yield start + index_of(done)


def _places(segments: Sequence[Segment], entries: Sequence[int]) -> Iterator[tuple[Segment, int, int]]:
    """The segments that are copied, and where (from, up to)."""
    position = _COUNT.size + 8 * len(entries)
    for segment, entry in zip(segments, entries, strict=True):
        if not entry & _LARGE:
            position = _aligned(position)
            yield segment, position, position + entry
            position += entry


def write(target: memoryview, segments: Sequence[Segment], entries: Sequence[int]) -> None:
    """A whole block at once."""
    prepare(target, segments, entries)
    for _ in copy(target, segments, entries):
        pass


def single_bytes(source: memoryview) -> int:
    """Size of a block of one segment."""
    return _SINGLE.size + len(source)


def write_single(target: memoryview, source: memoryview) -> None:
    """The same bytes as :func:`write` gives for one segment that exists already."""
    target[: _SINGLE.size] = _SINGLE.pack(1, len(source))
    target[_SINGLE.size :] = source


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
