"""Batches of typed requests: their token ids as one int32 vector, everything else as MessagePack."""

from __future__ import annotations

import inspect
import struct
import types
import typing
from array import array
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, itemgetter
from operator import index as index_of
from typing import Any

import msgspec
import numpy as np

from comm_broadcast._codec import BufferSegment, Segment
from comm_broadcast._errors import BroadcastConfigError, RemoteProtocolError
from comm_broadcast._failure import Failure, shown

_INT32 = np.dtype(np.int32)
_DTYPE, _NDIM = attrgetter("dtype"), attrgetter("ndim")
_NO_VALUE = 0xFFFFFFFF
#: Requests whose other fields are encoded in one call (count): bounds that call, whatever the batch.
_GROUP = 16
_VERSION = 2
#: Whether ``array("I")`` is the vector that is wanted; wherever CPython runs today.
_FAST = array("I").itemsize == 4
#: Small ids above which a list's types are looked at as a whole, not one by one (count).
_FEW = 32
_END = 1 << 31


class _TokensSegment(Segment):
    """Many token lists and arrays that become one int32 vector where it is written.

    Lists are converted one by one in ``prepare``, so that no hold of the interpreter lock grows with the batch; arrays are
    copied one by one in ``copy``, and no part gives the lock away within.
    """

    __slots__ = ("_parts", "_where", "nbytes")

    def __init__(self, parts: list[Any], count: int, where: Callable[[int], str]) -> None:
        self._parts = parts
        self._where = where
        self.nbytes = 4 * count

    def prepare(self, target: memoryview) -> None:
        """Convert the lists.

        Raises:
            ValueError: A token is not an integer of 32 bits; names request and token.
        """
        if set(map(type, self._parts)) <= {np.ndarray}:
            return
        vector = target.cast("I")
        #: Lists that were taken as unsigned: what is in them is still to be looked at. (ordinal, start), runs of them.
        run: list[tuple[int, int]] = []
        start = 0
        for ordinal, part in enumerate(self._parts):
            end = start if part is None else start + len(part)
            if type(part) is np.ndarray:
                self._look(target, run, start)
            elif part:
                try:
                    if not _FAST:
                        raise TypeError("no such array")
                    # The one conversion of a list that neither counts references nor parses each value: half the time of
                    # struct.pack, a quarter of NumPy's.
                    values = array("I")
                    values.fromlist(part if isinstance(part, list) else list(part))
                    vector[start:end] = values
                    run.append((ordinal, start))
                except (TypeError, OverflowError):
                    # A negative value, or no token at all.
                    self._look(target, run, start)
                    target[4 * start : 4 * end] = self._pack(ordinal, part)
            start = end
        self._look(target, run, start)

    def copy(self, target: memoryview) -> Iterator[int]:
        """Copy the arrays."""
        vector = target.cast("i")
        start = 0
        for part in self._parts:
            end = start if part is None else start + len(part)
            if type(part) is np.ndarray:
                vector[start:end] = part  # type: ignore[call-overload]
                yield 4 * end
            start = end
        yield self.nbytes

    def _look(self, target: memoryview, run: list[tuple[int, int]], end: int) -> None:
        """Find what the fast conversion lets pass in a run of lists, and forget the run: 2**31 and more, True and False.

        All are below 2 as signed numbers, which is one look at the whole run; ordinary small ids are told apart afterwards.
        """
        if not run:
            return
        begin = run[0][1]
        whole = np.frombuffer(target, _INT32, end - begin, 4 * begin)
        if whole.min() < 2:
            small = np.flatnonzero(whole < 2) + begin
            ends = np.searchsorted(small, [*(start for _, start in run[1:]), end]).tolist()
            first = 0
            for (ordinal, start), last in zip(run, ends, strict=True):
                part = self._parts[ordinal]
                if last - first > _FEW:
                    # A list full of padding: all its types at once, and its signs.
                    wrong = bool in set(map(type, part)) or whole[start - begin :][: len(part)].min() < 0
                else:
                    found = [part[place - start] for place in small[first:last].tolist()]
                    wrong = any(type(token) is bool or token >= _END for token in found)
                if wrong:
                    raise self._error(ordinal, part)
                first = last
        run.clear()

    def _pack(self, ordinal: int, part: Any) -> bytes:
        """The bytes of a list that may have negative values."""
        try:
            data = struct.pack(f"={len(part)}i", *part)
        except struct.error as error:
            raise self._error(ordinal, part) from error
        if bool in set(map(type, part)):
            raise self._error(ordinal, part)
        return data

    def _error(self, ordinal: int, part: Any) -> ValueError:
        """Names the first value of a list that is no token."""
        index, value = next(((i, v) for i, v in enumerate(part) if not _is_token(v)), (0, part))
        return ValueError(f"{self._where(ordinal)}: token {index}: want a 32-bit integer, got {shown(value)}")


def _is_token(value: Any) -> bool:
    try:
        return not isinstance(value, (bool, np.bool_)) and -_END <= index_of(value) < _END
    except TypeError:
        return False


class TokenBatchCodec:
    """Sequences of one msgspec struct whose token fields travel as int32 vectors; never pickle.

    Peers see token fields as read-only NumPy views (int32, shape ``(tokens,)``) into the received block, which is not reused
    while one of them lives: a view that is kept keeps the whole block. The root packs lists and arrays straight into the
    buffer that is sent, request by request, so no hold of the interpreter lock grows with the batch. Lists and tuples of
    requests arrive as lists, None as None; a token field may be None.

    Args:
        struct_type: The requests' type; its other fields are what msgspec can encode.
        token_fields: Names of its token fields; without: those annotated as ``np.ndarray`` (or None).

    A type that is not a struct, or does not have such a field, is refused by ``Broadcaster``, on every rank.
    """

    views = True
    head_only = True

    def __init__(self, struct_type: type[msgspec.Struct], token_fields: Sequence[str] | None = None) -> None:
        self.name = f"tokens{_VERSION}"
        try:
            self._problem = _struct_problem(struct_type, token_fields)
            if self._problem is None:
                self._prepare(struct_type, token_fields)
        except Exception as error:  # noqa: BLE001 - told by problem(), on every rank
            self._problem = f"struct_type: {Failure.of(error).cause}"

    def _prepare(self, struct_type: type[msgspec.Struct], token_fields: Sequence[str] | None) -> None:
        fields = msgspec.structs.fields(struct_type)
        names = [f.name for f in fields]
        wanted = tuple(f.name for f in fields if _is_array(f.type)) if token_fields is None else tuple(token_fields)
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
        columns = ",".join(f"{f.name}:{'tokens' if f.name in wanted else f.type}" for f in fields)
        self.name = f"tokens{_VERSION}/{struct_type.__name__}({columns})"

    def problem(self) -> str | None:
        """See :class:`Codec`."""
        return self._problem

    def _check(self) -> None:
        if self._problem is not None:
            raise BroadcastConfigError(self._problem)

    def encode(self, value: Any) -> list[Segment]:
        """See :class:`Codec`.

        Raises:
            TypeError: The value is no sequence of the struct; names the item.
            ValueError: A token is not an integer of 32 bits.
            BroadcastConfigError: The codec has a problem.
        """
        self._check()
        if value is None:
            return [BufferSegment(struct.pack("=I", _NO_VALUE))]
        if isinstance(value, (str, bytes, bytearray, memoryview)):
            raise TypeError(f"want a sequence of {self._type.__name__}, got {type(value).__name__}")
        items = list(value)
        count = len(items)
        if set(map(type, items)) - {self._type}:
            index, kind = next((i, k) for i, k in enumerate(map(type, items)) if k is not self._type)
            raise TypeError(f"item {index}: want {self._type.__name__}, got {kind.__name__}")
        parts: list[Any] = []
        lengths: list[int] = []
        for name, read in zip(self._tokens, self._read_tokens, strict=True):
            column = list(map(read, items))
            if not _are_ready(column):
                column = [_as_tokens(tokens, index, name) for index, tokens in enumerate(column)]
            parts += column
            lengths += [_NO_VALUE if tokens is None else len(tokens) for tokens in column]
        total = sum(lengths) - _NO_VALUE * lengths.count(_NO_VALUE)
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
        self._check()
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


def _struct_problem(struct_type: Any, token_fields: Any) -> str | None:
    if not (isinstance(struct_type, type) and issubclass(struct_type, msgspec.Struct)):
        return f"struct_type must be a msgspec.Struct type, got {shown(struct_type)}"
    try:
        names = [f.name for f in msgspec.structs.fields(struct_type)]
    except (TypeError, NameError) as error:
        return f"struct_type: the fields of {struct_type.__name__} cannot be told: {error}"
    if token_fields is None:
        return None
    if isinstance(token_fields, str) or not isinstance(token_fields, Sequence):
        return f"token_fields must be a sequence of names, got {shown(token_fields)}"
    for name in token_fields:
        if name not in names:
            return f"token_fields: {struct_type.__name__} has no field {shown(name)}; it has {names}"
    if len(set(token_fields)) != len(token_fields):
        return f"token_fields must be different names, got {shown(list(token_fields))}"
    return None


def _is_array(annotation: Any) -> bool:
    """Whether an annotation is an array, or perhaps one: ``np.ndarray`` with or without parameters, or a name of it.

    A ``type`` statement's name is an object of its own, from NumPy 2.5 on ``NDArray`` too: what it stands for is looked at.
    """
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return any(map(_is_array, typing.get_args(annotation)))
    if origin is typing.Annotated:
        return _is_array(annotation.__origin__)
    plain = annotation if origin is None else origin
    if hasattr(plain, "__value__"):
        return _is_array(plain.__value__)
    return isinstance(plain, type) and issubclass(plain, np.ndarray)


def _row(getter: Callable[..., Any], keys: list[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Several of a thing's parts as a tuple; attrgetter and itemgetter give one alone as it is."""
    if not keys:
        return lambda _: ()
    if len(keys) == 1:
        one = getter(keys[0])
        return lambda item: (one(item),)
    many: Callable[[Any], tuple[Any, ...]] = getter(*keys)
    return many


def _are_ready(column: list[Any]) -> bool:
    """Whether all are lists, or all are vectors of int32: the common cases, found without a look at each in Python."""
    kinds = set(map(type, column))
    if kinds == {np.ndarray}:
        return set(map(id, map(_DTYPE, column))) == {id(_INT32)} and set(map(_NDIM, column)) == {1}
    return kinds <= {list}


def _as_tokens(tokens: Any, index: int, name: str) -> Any:
    """A field's token ids as a list or tuple, an int32 vector, or None."""
    if tokens is None or isinstance(tokens, (list, tuple)):
        return tokens
    array_ = np.asarray(tokens)
    if array_.ndim != 1 or array_.dtype.kind not in "iu":
        raise TypeError(f"item {index}: {name}: want a vector of integers, got {array_.dtype} of shape {array_.shape}")
    if array_.dtype == _INT32:
        return array_
    if array_.size and (array_.max() >= _END or array_.min() < -_END):
        raise ValueError(f"item {index}: {name}: want 32-bit integers, got values up to {int(array_.max())}")
    return array_.astype(np.int32)
