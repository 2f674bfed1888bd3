"""Which methods may be called, and the types of their arguments and results: the allow-list.

A worker's class is read once. Only functions marked with ``rpc_method`` exist for the outside; nothing else is ever
looked up by a name from the wire.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import inspect
import typing
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar, overload

import msgspec

from rpc_local_registry._codec import DECODE_ERRORS, LazyItems, TypedDecoder
from rpc_local_registry._errors import RpcArgumentError, RpcConfigError
from rpc_local_registry._hooks import told
from rpc_local_registry._streams import StreamSource
from rpc_local_registry._wire import FLAG_KEYWORDS, NAME_BYTES_MAX, Message

_F = TypeVar("_F", bound=Callable[..., Any])
_MARK: Final = "__rpc_method__"
#: Names of the client's own API: a worker's method of that name could not be reached.
RESERVED_NAMES: Final = frozenset({"start", "close", "reconnect", "statistics", "method", "path_of", "address"})

SYNC: Final = "sync"
ASYNC: Final = "async"
GENERATOR: Final = "generator"
ASYNC_GENERATOR: Final = "async_generator"
PUSH: Final = "push"


@dataclasses.dataclass(frozen=True)
class _Options:
    non_blocking: bool
    streaming: bool
    concurrency_max: int | None


@overload
def rpc_method(function: _F, /) -> _F: ...
@overload
def rpc_method(
    *, non_blocking: bool = False, streaming: bool = False, concurrency_max: int | None = None
) -> Callable[[_F], _F]: ...


def rpc_method(
    function: Any = None,
    /,
    *,
    non_blocking: bool = False,
    streaming: bool = False,
    concurrency_max: int | None = None,
) -> Any:
    """Allow a method of a worker to be called from outside.

    Args:
        non_blocking: The method promises to return at once. It runs on the server's I/O thread, and directly in the
            caller when the fast path is on. An ``async`` method or generator declared so may run on the caller's own
            event loop.
        streaming: The method is a generator, an async generator, or returns a ``StreamSource``.
        concurrency_max: Threads that calls of this method may occupy at a time; None for ``RpcConfig.lane_threads``.

    Raises:
        RpcConfigError: The options contradict each other or the function.
    """
    if concurrency_max is not None and (non_blocking or concurrency_max < 1):
        raise RpcConfigError("concurrency_max wants a blocking method and a count >= 1")

    def mark(target: _F) -> _F:
        if not inspect.isfunction(target):
            raise RpcConfigError(f"rpc_method decorates functions, got {target!r}")
        generates = inspect.isgeneratorfunction(target) or inspect.isasyncgenfunction(target)
        if generates and not streaming:
            raise RpcConfigError(f"{target.__qualname__} is a generator: declare streaming=True")
        if streaming and inspect.iscoroutinefunction(target):
            raise RpcConfigError(f"{target.__qualname__}: a coroutine cannot stream; make it an async generator")
        setattr(target, _MARK, _Options(non_blocking, streaming, concurrency_max))
        return target

    return mark if function is None else mark(function)


_MISSING: Final = object()


@dataclasses.dataclass(frozen=True)
class MethodSpec:
    """One callable method. ``kind`` is one of SYNC, ASYNC, GENERATOR, ASYNC_GENERATOR, PUSH."""

    name: str
    function: Callable[..., Any]
    kind: str
    non_blocking: bool
    concurrency_max: int | None
    signature: inspect.Signature
    result: TypedDecoder
    _positional: TypedDecoder
    _by_name: Mapping[str, tuple[TypedDecoder, bool]]
    _lazy_indexes: tuple[int, ...]

    @functools.cached_property
    def streaming(self) -> bool:
        """Whether a call gives a stream."""
        return self.kind in (GENERATOR, ASYNC_GENERATOR, PUSH)

    @functools.cached_property
    def inline(self) -> bool:
        """Whether a call is done where it arrives."""
        return self.non_blocking and self.kind == SYNC

    def bind(self, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        """Check that the arguments fit the signature.

        Raises:
            RpcArgumentError: They do not.
        """
        try:
            self.signature.bind(*args, **keywords)
        except TypeError as error:
            unknown = [name for name in keywords if name not in self._by_name]
            text = f"got an unexpected keyword argument {unknown[0]!r}" if unknown else str(error)
            raise RpcArgumentError(f"{self.name}(): {text}") from None

    def decode_arguments(self, message: Message) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(positional, keywords) of a call, typed.

        Raises:
            RpcArgumentError: The bytes do not fit the declaration.
        """
        try:
            if message.flags & FLAG_KEYWORDS:
                return self._decode_keywords(message)
            if self._lazy_indexes:
                raws = _RAWS.decode(message.body)
                return tuple(self._decode_each(raws, message)), {}
            values = msgspec.structs.astuple(self._positional.decode(message.body, message.buffers))
        except RpcArgumentError:
            raise
        except DECODE_ERRORS as error:
            self._name_misfit(message)
            raise RpcArgumentError(f"{self.name}(): {error}") from None
        except BaseException as error:  # noqa: BLE001 - a value's __post_init__ may even exit; it must not end the server's thread
            raise RpcArgumentError(f"{self.name}(): {told(error)}") from None
        while values and values[-1] is _MISSING:
            values = values[:-1]
        return values, {}

    def _name_misfit(self, message: Message) -> None:
        """Look at arguments that were refused as a whole one by one, so that the error names the parameter.

        Raises:
            RpcArgumentError: The one that does not fit; none, if the body is no list of arguments at all.
        """
        try:
            raws = _RAWS.decode(message.body)
        except DECODE_ERRORS:
            return
        self._decode_each(raws, message)

    def _parameter_names(self) -> list[str]:
        return [p.name for p in self.signature.parameters.values() if p.kind is not p.KEYWORD_ONLY]

    def _decode_each(self, raws: list[msgspec.Raw], message: Message) -> list[Any]:
        self.bind(tuple(raws), {})
        return [self._decode_one(name, raw, message) for name, raw in zip(self._parameter_names(), raws)]

    def _decode_one(self, name: str, raw: msgspec.Raw, message: Message) -> Any:
        decoder, lazy = self._by_name[name]
        try:
            if lazy:
                return LazyItems(_RAWS.decode(raw), message.buffers, decoder)
            return decoder.decode(raw, message.buffers)
        except DECODE_ERRORS as error:
            raise RpcArgumentError(f"{self.name}(): {name}: {error}") from None

    def _decode_keywords(self, message: Message) -> tuple[tuple[Any, ...], dict[str, Any]]:
        positional, named = _RAW_CALL.decode(message.body)
        self.bind(tuple(positional), named)
        args = tuple(self._decode_one(name, raw, message) for name, raw in zip(self._parameter_names(), positional))
        keywords = {name: self._decode_one(name, raw, message) for name, raw in named.items()}
        return args, keywords


_RAWS: Final = msgspec.msgpack.Decoder(list[msgspec.Raw])
_RAW_CALL: Final = msgspec.msgpack.Decoder(tuple[list[msgspec.Raw], dict[str, msgspec.Raw]])


def _lazy_item_type(annotation: Any) -> Any:
    """T of ``Iterator[T]`` or ``Iterable[T]``, else None."""
    origin = typing.get_origin(annotation)
    if origin in (collections.abc.Iterator, collections.abc.Iterable):
        return typing.get_args(annotation)[0]
    return None


def _stream_item_type(annotation: Any) -> Any:
    """T of the annotation of a streaming method's result."""
    origin = typing.get_origin(annotation)
    kinds = (
        collections.abc.Iterator, collections.abc.Iterable, collections.abc.Generator,
        collections.abc.AsyncIterator, collections.abc.AsyncIterable, collections.abc.AsyncGenerator, StreamSource,
    )  # fmt: skip
    return typing.get_args(annotation)[0] if origin in kinds else Any


def _typed(owner: str, annotation: Any) -> TypedDecoder:
    try:
        return TypedDecoder(annotation)
    except (TypeError, ValueError) as error:
        raise RpcConfigError(f"{owner}: {annotation!r} cannot be decoded: {error}") from None


def _spec_of(owner: str, name: str, function: Callable[..., Any], options: _Options) -> MethodSpec:
    where = f"{owner}.{name}"
    if name in RESERVED_NAMES or name.startswith("_") or not name.isascii() or len(name) > NAME_BYTES_MAX:
        raise RpcConfigError(f"{where}: this name cannot be called from outside")
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise RpcConfigError(f"{where}: annotations name something undefined at run time: {error}") from None
    parameters = list(inspect.signature(function).parameters.values())[1:]
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise RpcConfigError(f"{where}: *{parameter.name} has no declared shape; name the parameters")
    if inspect.isgeneratorfunction(function):
        kind = GENERATOR
    elif inspect.isasyncgenfunction(function):
        kind = ASYNC_GENERATOR
    elif options.streaming:
        kind = PUSH
    else:
        kind = ASYNC if inspect.iscoroutinefunction(function) else SYNC
    by_name: dict[str, tuple[TypedDecoder, bool]] = {}
    lazy_indexes: list[int] = []
    fields: list[Any] = []
    for index, parameter in enumerate(parameters):
        annotation = hints.get(parameter.name, Any)
        item = _lazy_item_type(annotation)
        if item is not None:
            lazy_indexes.append(index)
        by_name[parameter.name] = (
            _typed(f"{where}({parameter.name})", annotation if item is None else item),
            item is not None,
        )
        if parameter.kind is not parameter.KEYWORD_ONLY:
            shape = list[Any] if item is not None else annotation
            fields.append(
                (parameter.name, shape) if parameter.default is parameter.empty else (parameter.name, shape, _MISSING)
            )
    positional = _typed(
        where,
        msgspec.defstruct(f"{name}_arguments", fields, array_like=True, forbid_unknown_fields=True, frozen=True),
    )
    returned = hints.get("return", Any)
    if kind in (GENERATOR, ASYNC_GENERATOR, PUSH):
        returned = _stream_item_type(returned)
    return MethodSpec(
        name=name,
        function=function,
        kind=kind,
        non_blocking=options.non_blocking,
        concurrency_max=options.concurrency_max,
        signature=inspect.Signature(parameters),
        result=_typed(f"{where} result", returned),
        _positional=positional,
        _by_name=by_name,
        _lazy_indexes=tuple(lazy_indexes),
    )


def spec_of(function: Callable[..., Any]) -> MethodSpec:
    """Declaration of one function that ``rpc_method`` marked.

    Raises:
        RpcConfigError: It is not marked, or cannot be served.
    """
    options = getattr(function, _MARK, None)
    if not isinstance(options, _Options):
        raise RpcConfigError(f"{function!r} is not declared with rpc_method")
    return _spec_of(function.__qualname__.rpartition(".")[0], function.__name__, function, options)


_known: weakref.WeakKeyDictionary[type, Mapping[str, MethodSpec]] = weakref.WeakKeyDictionary()


def methods_of(owner: type) -> Mapping[str, MethodSpec]:
    """Allow-list of a worker's class: name to declaration. Inherited marks count; an unmarked override closes the method.

    Raises:
        RpcConfigError: Not a worker's class, or a declaration that cannot be served.
    """
    if not isinstance(owner, type):
        raise RpcConfigError(f"want the worker's class, got {owner!r}")
    if issubclass(owner, type):
        raise RpcConfigError("want a worker, got a class: make an object of it")
    known = _known.get(owner)
    if known is not None:
        return known
    found: dict[str, MethodSpec] = {}
    for name in dir(owner):
        function = inspect.getattr_static(owner, name, None)
        options = getattr(function, _MARK, None)
        if isinstance(options, _Options) and inspect.isfunction(function):
            found[name] = _spec_of(owner.__qualname__, name, function, options)
    _known[owner] = found
    return found
