"""Bodies: msgpack by msgspec, with arrays taken out into buffers. No class is ever named by the bytes.

An array is the msgpack extension ``EXT_ARRAY`` whose data is msgpack [index, dtype name, shape]; its bytes are buffer
number ``index`` of the same message. Decoders are typed by the method's annotations: a wrong shape is a
``ValidationError``. The only user code that runs is a Struct's or dataclass's ``__post_init__``; what it raises is a
``ValidationError`` too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from rpc_local_registry import _numpy
from rpc_local_registry._errors import RpcArgumentError, RpcError
from rpc_local_registry._hooks import text_of, told

EXT_ARRAY: Final = 1
#: What malformed bytes can raise while decoding; everything else is our bug.
DECODE_ERRORS: Final = (
    msgspec.DecodeError,
    msgspec.ValidationError,
    ValueError,
    RecursionError,
    OverflowError,
    TypeError,
)


class _ArrayRef(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, gc=False):
    index: int
    dtype: str
    shape: tuple[int, ...]


_ref_encode = msgspec.msgpack.Encoder().encode
_ref_decode = msgspec.msgpack.Decoder(_ArrayRef).decode


class _Encoding:
    """One encoder with the buffers of the message that it is busy with."""

    __slots__ = ("buffers", "encoder")

    def __init__(self) -> None:
        self.buffers: list[bytes | memoryview] = []
        self.encoder = msgspec.msgpack.Encoder(enc_hook=self._hook)

    def _hook(self, value: Any) -> Any:
        if _numpy.is_array_like(value):
            name, shape, view = _numpy.export(value)
            self.buffers.append(view)
            return msgspec.msgpack.Ext(EXT_ARRAY, _ref_encode((len(self.buffers) - 1, name, shape)))
        raise RpcArgumentError(f"{type(value).__module__}.{type(value).__qualname__} cannot travel")


_encodings: deque[_Encoding] = deque(maxlen=64)


def encode(value: Any) -> tuple[bytes, Sequence[bytes | memoryview]]:
    """(body, buffers) of a value; thread-safe. The value may be changed afterwards, but for what was lent.

    Raises:
        RpcArgumentError: Something in it cannot travel.
    """
    try:
        encoding = _encodings.pop()
    except IndexError:
        encoding = _Encoding()
    try:
        body = encoding.encoder.encode(value)
    except RpcError:
        encoding.buffers = []
        raise
    except Exception as error:
        encoding.buffers = []
        raise RpcArgumentError(f"cannot be encoded: {text_of(error)}") from error
    buffers: Sequence[bytes | memoryview] = ()
    if encoding.buffers:
        buffers, encoding.buffers = encoding.buffers, []
    _encodings.append(encoding)
    return body, buffers


class _Decoding:
    """One typed decoder with the buffers of the message that it is busy with."""

    __slots__ = ("buffers", "decoder")

    def __init__(self, kind: Any) -> None:
        self.buffers: Sequence[memoryview] = ()
        self.decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
            kind, ext_hook=self._extension, dec_hook=self._custom
        )

    def _extension(self, code: int, data: memoryview) -> Any:
        if code != EXT_ARRAY:
            raise ValueError(f"extension {code} is not known")
        ref = _ref_decode(data)
        if not 0 <= ref.index < len(self.buffers):
            raise ValueError(f"array {ref.index} is named, {len(self.buffers)} came")
        return _numpy.rebuild(ref.dtype, ref.shape, self.buffers[ref.index])

    def _custom(self, kind: Any, value: Any) -> Any:
        _numpy.check_elements(kind, value)
        # msgspec holds what is returned to the declared class, and names both and the place where it does not fit.
        return value


class TypedDecoder:
    """Decodes bodies to one type; thread-safe (a small pool of msgspec decoders)."""

    __slots__ = ("_kind", "_plain", "_pool")

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._pool: deque[_Decoding] = deque(maxlen=16)
        # Built at once, so that a type msgspec cannot handle is a declaration error, not a call's. Shared by all messages
        # without arrays: it has no buffers to mix up.
        self._plain = _Decoding(kind).decoder.decode

    def decode(self, body: bytes | memoryview | msgspec.Raw, buffers: Sequence[memoryview] = ()) -> Any:
        """The value. Raises one of ``DECODE_ERRORS`` for bytes that do not fit."""
        decoding: _Decoding | None = None
        try:
            if not buffers:
                return self._plain(body)
            try:
                decoding = self._pool.pop()
            except IndexError:
                decoding = _Decoding(self._kind)
            decoding.buffers = buffers
            return decoding.decoder.decode(body)
        except DECODE_ERRORS:
            raise
        except Exception as error:
            # A Struct's or dataclass's own ``__post_init__``: it refuses the value, whatever it raises.
            raise msgspec.ValidationError(told(error)) from error
        finally:
            if decoding is not None:
                decoding.buffers = ()
                self._pool.append(decoding)


class LazyItems(Iterator[Any]):
    """Items of an ``Iterator[T]`` parameter: each is decoded when it is asked for, so no single decode grows with the batch.

    A bad item raises ``RpcArgumentError`` from ``next()`` and is passed over; the following ones still come.
    """

    __slots__ = ("_buffers", "_decoder", "_index", "_raws")

    def __init__(self, raws: list[msgspec.Raw], buffers: Sequence[memoryview], decoder: TypedDecoder) -> None:
        self._raws = raws
        self._buffers = buffers
        self._decoder = decoder
        self._index = 0

    def __len__(self) -> int:
        return len(self._raws) - self._index

    def __iter__(self) -> LazyItems:
        return self

    def __next__(self) -> Any:
        index = self._index
        if index >= len(self._raws):
            raise StopIteration
        self._index = index + 1
        try:
            return self._decoder.decode(self._raws[index], self._buffers)
        except DECODE_ERRORS as error:
            raise RpcArgumentError(f"item {index}: {error}") from error
