"""Batches of typed requests: their token ids as one int32 vector, everything else as MessagePack."""

from __future__ import annotations

import inspect
import struct
from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter
from typing import Any

import msgspec
import numpy as np

from comm_broadcast._codec import BufferSegment, Segment
from comm_broadcast._errors import BroadcastConfigError, RemoteProtocolError

_INT32 = np.dtype(np.int32)
_NO_VALUE = 0xFFFFFFFF
#: Requests whose other fields are encoded in one call (count): bounds that call, whatever the batch.
_GROUP = 16
_VERSION = 2


class _TokensSegment:
    """Many token lists and arrays that become one int32 vector where it is written: one pass, no temporary."""

    __slots__ = ("_parts", "_where", "nbytes")

    def __init__(self, parts: list[Any], count: int, where: Callable[[int], str]) -> None:
        self._parts = parts
        self._where = where
        self.nbytes = 4 * count

    def write_into(self, target: memoryview) -> None:
        """Part by part: another thread gets its turn between two, and no part gives the lock away within.

        Raises:
            ValueError: A token is not an integer of 32 bits; names request and token.
        """
        vector = target.cast("i")
        start = 0
        for ordinal, part in enumerate(self._parts):
            end = start + len(part)
            if type(part) is np.ndarray:
                vector[start:end] = part  # type: ignore[call-overload]
            elif part:
                try:
                    # As one argument list and a copy of the result: a fifth faster than packing in place.
                    target[4 * start : 4 * end] = struct.pack(f"={len(part)}i", *part)
                except struct.error as error:
                    for index, value in enumerate(part):
                        if not isinstance(value, int) or not -(2**31) <= value < 2**31:
                            raise ValueError(
                                f"{self._where(ordinal)}: token {index}: want a 32-bit integer, got {value!r}"
                            ) from error
                    raise
            start = end

    def source(self) -> memoryview | None:
        """There is no such vector yet."""
        return None


class TokenBatchCodec:
    """Sequences of one msgspec struct whose token fields travel as int32 vectors; never pickle.

    Peers see token fields as read-only NumPy views (int32, shape ``(tokens,)``) into the received block, which is not reused
    while one of them lives: a view that is kept keeps the whole block. The root packs lists and arrays straight into the
    buffer that is sent, request by request, so no hold of the interpreter lock grows with the batch. Lists and tuples of
    requests arrive as lists, None as None; a token field may be None.

    Args:
        struct_type: The requests' type; its other fields are what msgspec can encode.
        token_fields: Names of its token fields; without: those annotated as ``np.ndarray`` (or None).

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
        rest = [f for f in fields if f.name not in wanted]
        self._type = struct_type
        self._tokens = wanted
        self._read_tokens = [attrgetter(name) for name in wanted]
        self._read_rest = _row(attrgetter, [f.name for f in rest])
        self._encoder = msgspec.msgpack.Encoder()
        row: Any = tuple[tuple(f.type for f in rest)] if rest else tuple[()]  # type: ignore[misc]
        self._decoder: msgspec.msgpack.Decoder[list[tuple[Any, ...]]] = msgspec.msgpack.Decoder(list[row])
        found_in = [f.name for f in rest] + list(wanted)
        parameters = inspect.signature(struct_type).parameters.values()
        if any(p.kind is p.KEYWORD_ONLY for p in parameters):
            self._make: Callable[[tuple[Any, ...]], Any] = lambda row: struct_type(
                **dict(zip(found_in, row, strict=True))
            )
        else:
            order = _row(itemgetter, [found_in.index(name) for name in names])
            self._make = lambda row: struct_type(*order(row))
        types = ",".join(f"{f.name}:{'tokens' if f.name in wanted else f.type}" for f in fields)
        self.name = f"tokens{_VERSION}/{struct_type.__name__}({types})"

    def encode(self, value: Any) -> list[Segment]:
        """See :class:`Codec`.

        Raises:
            TypeError: The value is no sequence of the struct; names the item.
            ValueError: A token is not an integer of 32 bits.
        """
        if value is None:
            return [BufferSegment(struct.pack("=I", _NO_VALUE))]
        if isinstance(value, (str, bytes, bytearray, memoryview)):
            raise TypeError(f"want a sequence of {self._type.__name__}, got {type(value).__name__}")
        items = list(value)
        count = len(items)
        for index, kind in enumerate(map(type, items)):
            if kind is not self._type:
                raise TypeError(f"item {index}: want {self._type.__name__}, got {kind.__name__}")
        parts: list[Any] = []
        lengths: list[int] = []
        total = 0
        for name, read in zip(self._tokens, self._read_tokens, strict=True):
            for index, tokens in enumerate(map(read, items)):
                kind = type(tokens)
                if kind is list or (kind is np.ndarray and tokens.dtype == _INT32 and tokens.ndim == 1):
                    size = len(tokens)
                elif tokens is None:
                    lengths.append(_NO_VALUE)
                    parts.append(())
                    continue
                else:
                    tokens = _as_tokens(tokens, index, name)
                    size = len(tokens)
                lengths.append(size)
                parts.append(tokens)
                total += size
        encode, read_rest = self._encoder.encode, self._read_rest
        groups = [encode(list(map(read_rest, items[start : start + _GROUP]))) for start in range(0, count, _GROUP)]
        head = struct.pack(f"=I{len(lengths)}I{len(groups)}I", count, *lengths, *map(len, groups))
        segments: list[Segment] = [BufferSegment(b"".join((head, *groups)))]
        if self._tokens:
            segments.append(_TokensSegment(parts, total, self._where(count)))
        return segments

    def _where(self, count: int) -> Callable[[int], str]:
        return lambda ordinal: f"item {ordinal % count}: {self._tokens[ordinal // count]}"

    def decode(self, segments: Sequence[memoryview]) -> list[Any] | None:
        """See :class:`Codec`.

        Raises:
            RemoteProtocolError: The description does not fit the bytes.
        """
        head = segments[0]
        (count,) = struct.unpack_from("=I", head, 0)
        if count == _NO_VALUE:
            return None
        numbers = count * len(self._tokens)
        groups = -(-count // _GROUP)
        position = 4 + 4 * (numbers + groups)
        if position > len(head):
            raise RemoteProtocolError(f"description of {len(head)} bytes cannot hold {count} requests")
        lengths = struct.unpack_from(f"={numbers}I", head, 4)
        rows: list[tuple[Any, ...]] = []
        for size in struct.unpack_from(f"={groups}I", head, 4 + 4 * numbers):
            rows += self._decoder.decode(head[position : position + size])
            position += size
        if len(rows) != count:
            raise RemoteProtocolError(f"description of {count} requests holds {len(rows)}")
        make = self._make
        if not self._tokens:
            return list(map(make, rows))
        whole = np.frombuffer(segments[1], _INT32) if segments[1].nbytes else np.empty(0, _INT32)
        whole.flags.writeable = False
        views: list[Any] = []
        start = 0
        for length in lengths:
            if length == _NO_VALUE:
                views.append(None)
            else:
                views.append(whole[start : start + length])
                start += length
        if start != whole.size:
            raise RemoteProtocolError(f"token lists of {start} tokens in all, {whole.size} came")
        if len(self._tokens) == 1:
            return [make((*row, view)) for row, view in zip(rows, views, strict=True)]
        return [make((*row, *views[index::count])) for index, row in enumerate(rows)]


def _row(getter: Callable[..., Any], keys: list[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Several of a thing's parts as a tuple; attrgetter and itemgetter give one alone as it is."""
    if not keys:
        return lambda _: ()
    if len(keys) == 1:
        one = getter(keys[0])
        return lambda item: (one(item),)
    many: Callable[[Any], tuple[Any, ...]] = getter(*keys)
    return many


def _as_tokens(tokens: Any, index: int, name: str) -> Any:
    """Anything else that holds token ids, as a list or an int32 vector."""
    if isinstance(tokens, (list, tuple)):
        return tokens
    array = np.asarray(tokens)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(f"item {index}: {name}: want a vector of integers, got {array.dtype} of shape {array.shape}")
    if array.size and (array.max() >= 2**31 or array.min() < -(2**31)):
        raise ValueError(f"item {index}: {name}: want 32-bit integers, got values up to {int(array.max())}")
    return array.astype(np.int32)
