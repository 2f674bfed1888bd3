"""Values as segments of bytes, and back. A codec never touches a communicator.

The first segment is always contiguous and small (the description); the others are the value's own buffers, in order. A segment
knows its size and writes itself into a given place, so that a list of numbers is packed straight to where it is sent from.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from comm_broadcast._errors import BroadcastConfigError


class Segment(Protocol):
    """A part of a value's bytes."""

    nbytes: int

    def write_into(self, target: memoryview) -> None:
        """Write exactly ``nbytes`` bytes."""

    def source(self) -> memoryview | None:
        """The bytes where they are, when they lie contiguous in memory already."""


class BufferSegment:
    """Bytes that exist already."""

    __slots__ = ("_view", "nbytes")

    def __init__(self, buffer: Any) -> None:
        self._view = memoryview(buffer).cast("B")
        self.nbytes = self._view.nbytes

    def write_into(self, target: memoryview) -> None:
        """Copy."""
        target[:] = self._view

    def source(self) -> memoryview | None:
        """In place."""
        return self._view


class IntListSegment:
    """A list of integers that becomes an int32 vector where it is written: one pass, no temporary."""

    __slots__ = ("_values", "nbytes")

    def __init__(self, values: Sequence[int]) -> None:
        self._values = values
        self.nbytes = 4 * len(values)

    def write_into(self, target: memoryview) -> None:
        """Pack.

        Raises:
            ValueError: A value is not an integer of 32 bits; names it.
        """
        try:
            struct.pack_into(f"={len(self._values)}i", target, 0, *self._values)
        except struct.error as error:
            for index, value in enumerate(self._values):
                if not isinstance(value, int) or not -(2**31) <= value < 2**31:
                    raise ValueError(f"token {index}: want a 32-bit integer, got {value!r}") from error
            raise

    def source(self) -> memoryview | None:
        """There is no such vector yet."""
        return None


class Codec(Protocol):
    """Encodes and decodes values."""

    #: Equal on ranks that use the same codec for the same types.
    name: str
    #: Whether decoded values look into the received block (which is then reused) instead of owning their memory.
    views: bool

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

    def __init__(self, *, out_of_band_bytes_min: int = 4096, per_item: bool = False) -> None:
        if out_of_band_bytes_min < 0:
            raise BroadcastConfigError(f"out_of_band_bytes_min must be at least 0, got {out_of_band_bytes_min!r}")
        self._minimum = out_of_band_bytes_min
        self._per_item = per_item
        self.name = f"pickle5/{out_of_band_bytes_min}/{per_item}"

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

        sink = io.BytesIO()
        whole = not (self._per_item and type(value) is list)
        sink.write(b"\0" if whole else b"\1" + struct.pack("=Q", len(value)))
        for item in [value] if whole else value:
            pickle.Pickler(sink, protocol=5, buffer_callback=keep_in_band).dump(item)
        return [BufferSegment(sink.getbuffer()), *buffers]

    def decode(self, segments: Sequence[memoryview]) -> Any:
        """See :class:`Codec`. Trusts the sender."""
        source = io.BytesIO(segments[0])
        buffers = iter(segments[1:])
        if source.read(1) == b"\0":
            return pickle.Unpickler(source, buffers=buffers).load()  # noqa: S301 - ranks of one program trust each other
        (count,) = struct.unpack("=Q", source.read(8))
        return [pickle.Unpickler(source, buffers=buffers).load() for _ in range(count)]  # noqa: S301


class TokenBatchCodec:
    """Lists of one msgspec struct whose token fields travel as int32 vectors; never pickle.

    Peers see token fields as read-only NumPy views (int32, shape ``(tokens,)``) into the received block: valid until the next
    but one exchange on that broadcaster; copy what must live longer. The root packs lists and arrays straight into the buffer
    that is sent, request by request, so no hold of the interpreter lock grows with the batch.

    Args:
        struct_type: The requests' type; its other fields are what msgspec can encode.
        token_fields: Names of its token fields; without: those annotated as ``np.ndarray``.

    Raises:
        BroadcastConfigError: The type is no struct, or has no such field.
    """

    views = True

    def __init__(self, struct_type: type[msgspec.Struct], token_fields: Sequence[str] | None = None) -> None:
        if not (isinstance(struct_type, type) and issubclass(struct_type, msgspec.Struct)):
            raise BroadcastConfigError(f"struct_type must be a msgspec.Struct type, got {struct_type!r}")
        fields = msgspec.structs.fields(struct_type)
        names = [f.name for f in fields]
        wanted = (
            tuple(f.name for f in fields if "ndarray" in str(f.type)) if token_fields is None else tuple(token_fields)
        )
        for name in wanted:
            if name not in names:
                raise BroadcastConfigError(
                    f"token_fields: {struct_type.__name__} has no field {name!r}; it has {names}"
                )
        self._type = struct_type
        self._tokens = wanted
        self._rest = [f for f in fields if f.name not in wanted]
        shadow = msgspec.defstruct(
            f"{struct_type.__name__}Rest", [(f.name, f.type) for f in self._rest], array_like=True, frozen=True
        )
        self._shadow = shadow
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(shadow)
        self._lengths = msgspec.msgpack.Decoder(list[int])
        self.name = f"tokens/{struct_type.__name__}/{','.join(names)}/{','.join(wanted)}"

    def encode(self, value: Any) -> list[Segment]:
        """See :class:`Codec`.

        Raises:
            TypeError: The value is no sequence of the struct; names the item.
        """
        segments: list[Segment] = []
        parts: list[bytes] = []
        for index, item in enumerate(value):
            if type(item) is not self._type:
                raise TypeError(f"item {index}: want {self._type.__name__}, got {type(item).__name__}")
            parts.append(self._encoder.encode([getattr(item, f.name) for f in self._rest]))
            for name in self._tokens:
                segments.append(_token_segment(getattr(item, name), index, name))
        head = struct.pack(f"=I{len(parts)}I", len(parts), *map(len, parts))
        return [BufferSegment(b"".join((head, *parts))), *segments]

    def decode(self, segments: Sequence[memoryview]) -> list[Any]:
        """See :class:`Codec`."""
        head = segments[0]
        (count,) = struct.unpack_from("=I", head, 0)
        lengths = struct.unpack_from(f"={count}I", head, 4)
        position = 4 + 4 * count
        vectors = iter(segments[1:])
        found = []
        for length in lengths:
            rest = self._decoder.decode(head[position : position + length])
            position += length
            values = {f.name: getattr(rest, f.name) for f in self._rest}
            for name in self._tokens:
                view = np.frombuffer(next(vectors), dtype=np.int32)
                view.flags.writeable = False
                values[name] = view
            found.append(self._type(**values))
        return found


def _token_segment(tokens: Any, index: int, name: str) -> Segment:
    if isinstance(tokens, (list, tuple)):
        return IntListSegment(tokens)
    array = np.asarray(tokens)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(f"item {index}: {name}: want a vector of integers, got {array.dtype} of shape {array.shape}")
    if array.dtype != np.int32:
        if array.size and (array.max() >= 2**31 or array.min() < -(2**31)):
            raise ValueError(f"item {index}: {name}: want 32-bit integers, got values up to {int(array.max())}")
        array = array.astype(np.int32)
    return BufferSegment(np.ascontiguousarray(array)) if array.size else BufferSegment(b"")
