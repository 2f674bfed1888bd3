"""Values as segments of bytes, and back. A codec never touches a communicator.

The first segment is always contiguous and small (the description); the others are the value's own buffers, in order. A segment
knows its size and writes itself into a given place, so that a list of numbers is packed straight to where it is sent from.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from comm_broadcast._failure import shown


class Segment(Protocol):
    """A part of a value's bytes, written in two steps: what may fail; then copies, while the first bytes are under way."""

    __slots__ = ()

    nbytes: int

    def prepare(self, target: memoryview) -> None:
        """Convert and write all that the value itself could make fail. ``target`` has exactly ``nbytes`` bytes."""
        return

    def copy(self, target: memoryview) -> Iterator[int]:
        """Write the rest, step by step; after each, up to where the target is complete (bytes). At its end all of it is."""
        raise NotImplementedError

    def write_into(self, target: memoryview) -> None:
        """Both steps at once."""
        self.prepare(target)
        for _ in self.copy(target):
            pass

    def source(self) -> memoryview | None:
        """The bytes where they are, when they lie contiguous in memory already."""
        return None


class BufferSegment(Segment):
    """Bytes that exist already."""

    __slots__ = ("_view", "nbytes")

    def __init__(self, buffer: Any) -> None:
        view = memoryview(buffer)
        # Nothing in several dimensions cannot be cast.
        self._view = view.cast("B") if view.nbytes else memoryview(b"")
        self.nbytes = self._view.nbytes

    def copy(self, target: memoryview) -> Iterator[int]:
        """In one step."""
        if self.nbytes:
            target[:] = self._view
        yield self.nbytes

    def source(self) -> memoryview:
        """In place."""
        return self._view


class Codec(Protocol):
    """Encodes and decodes values. A decoded value may look into the segments for as long as it likes.

    A codec may have a method ``problem()``: why it cannot be used, or None. Its constructor checks nothing by itself: a rank
    that raised there would leave the others in the constructor of ``Broadcaster``, which asks, and raises on every rank.
    """

    #: Says everything that ranks must agree on: kind, version, types.
    name: str
    #: Whether decoding leaves the received bytes as they are, so that they may lie in memory that other ranks read too.
    views: bool
    #: Whether decoding reads the first segment's bytes only and hands out views of the others: then it need not wait for those.
    head_only: bool

    def encode(self, value: Any) -> list[Segment]:
        """Segments of a value, the description first."""

    def decode(self, segments: Sequence[memoryview]) -> Any:
        """The value of received segments."""


class PickleCodec:
    """Any picklable object, by pickle 5 with its buffers out of band.

    For ranks that trust each other as one program does: unpickling runs code. Objects must round-trip, since the root keeps
    its own and the others get what pickle makes of it.

    Args:
        out_of_band_bytes_min: Smaller buffers stay inside the pickle (bytes).
        per_item: Pickle the items of a list one by one, so that the longest hold of the interpreter lock is an item's and not
            the list's; references between items are lost.
    """

    views = False
    head_only = False

    def __init__(self, *, out_of_band_bytes_min: int = 4096, per_item: bool = False) -> None:
        self._minimum = out_of_band_bytes_min
        self._per_item = per_item
        self.name = f"pickle5/{shown(out_of_band_bytes_min)}/{shown(per_item)}"

    def problem(self) -> str | None:
        """See :class:`Codec`."""
        if type(self._minimum) is not int or self._minimum < 0:
            return f"out_of_band_bytes_min must be an integer of at least 0, got {shown(self._minimum)}"
        per_item: object = self._per_item
        if type(per_item) is not bool:
            return f"per_item must be True or False, got {shown(per_item)}"
        return None

    def encode(self, value: Any) -> list[Segment]:
        """See :class:`Codec`."""
        buffers: list[Segment] = []

        def keep_in_band(buffer: pickle.PickleBuffer) -> bool:
            try:
                raw = buffer.raw()
            except BufferError:  # not contiguous: pickle copies it in band
                return True
            if raw.nbytes < self._minimum:
                return True
            buffers.append(BufferSegment(raw))
            return False

        if not (self._per_item and type(value) is list):
            data = pickle.dumps(value, protocol=5, buffer_callback=keep_in_band)
            return [BufferSegment(b"\0" + data), *buffers]
        sink = io.BytesIO()
        sink.write(b"\1" + struct.pack("=Q", len(value)))
        for item in value:
            pickle.Pickler(sink, protocol=5, buffer_callback=keep_in_band).dump(item)
        # No view of the sink itself: a collector that finds both in one cycle would close it under the view.
        return [BufferSegment(memoryview(sink.getvalue())), *buffers]

    def decode(self, segments: Sequence[memoryview]) -> Any:
        """See :class:`Codec`. Trusts the sender."""
        first = segments[0]
        buffers = iter(segments[1:])
        if first[0] == 0:
            return pickle.loads(first[1:], buffers=buffers)  # noqa: S301 - ranks of one program trust each other
        source = io.BytesIO(first[1:])
        (count,) = struct.unpack("=Q", source.read(8))
        return [pickle.Unpickler(source, buffers=buffers).load() for _ in range(count)]  # noqa: S301


class BytesCodec:
    """Bytes of the caller's own making, or None; nothing is encoded. Any contiguous buffer goes in, ``bytes`` come out.

    Args:
        copy: Peers get ``bytes``; False: a read-only ``memoryview`` of the received block, which it keeps from being reused.
    """

    views = True
    name = "bytes"

    def __init__(self, *, copy: bool = True) -> None:
        self._copy = copy
        self.head_only = not copy

    def problem(self) -> str | None:
        """See :class:`Codec`."""
        copy: object = self._copy
        return None if type(copy) is bool else f"copy must be True or False, got {shown(copy)}"

    def encode(self, value: Any) -> list[Segment]:
        """See :class:`Codec`.

        Raises:
            TypeError: The value is no buffer.
        """
        if value is None:
            return [BufferSegment(b"\0")]
        return [BufferSegment(b"\1"), BufferSegment(value)]

    def decode(self, segments: Sequence[memoryview]) -> bytes | memoryview | None:
        """See :class:`Codec`."""
        if bytes(segments[0]) == b"\0":
            return None
        return bytes(segments[1]) if self._copy else segments[1].toreadonly()
