"""Names, arguments, results and streams of a client as a static type checker sees them, taken from the worker's own methods."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Coroutine, Iterable, Mapping
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast, overload

from rpc_local_registry._calls import Call, Method, StreamCall
from rpc_local_registry._errors import RpcConfigError
from rpc_local_registry._methods import MethodSpec, spec_of
from rpc_local_registry._streams import StreamSource

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")


class _Remote:
    """A method of a ``TypedClient``."""

    def __init__(self, function: Callable[..., Any], *, streaming: bool) -> None:
        self.spec = spec_of(function)
        if self.spec.streaming is not streaming:
            wanted = "remote_stream" if self.spec.streaming else "remote_method"
            raise RpcConfigError(f"{function.__qualname__} wants {wanted}")

    def __set_name__(self, owner: type, name: str) -> None:
        if name != self.spec.name:
            raise RpcConfigError(f"{owner.__qualname__}.{name} must have the name of its method, {self.spec.name!r}")

    def _of(self, client: Any) -> Method:
        known: Method | None = client.__dict__.get(f"_remote_{self.spec.name}")
        if known is None:
            known = client.__dict__[f"_remote_{self.spec.name}"] = client.method(self.spec.name)
        return known


class RemoteMethod(_Remote, Generic[_P, _R]):
    """A plain method or coroutine; made by ``remote_method``."""

    @overload
    def __get__(self, client: None, owner: type) -> RemoteMethod[_P, _R]: ...
    @overload
    def __get__(self, client: object, owner: type) -> Callable[_P, Call[_R]]: ...
    def __get__(self, client: object | None, owner: type) -> RemoteMethod[_P, _R] | Callable[_P, Call[_R]]:
        """The method of a client."""
        return self if client is None else cast("Callable[_P, Call[_R]]", self._of(client))


class RemoteStreamMethod(_Remote, Generic[_P, _T]):
    """A streaming method; made by ``remote_stream``."""

    @overload
    def __get__(self, client: None, owner: type) -> RemoteStreamMethod[_P, _T]: ...
    @overload
    def __get__(self, client: object, owner: type) -> Callable[_P, StreamCall[_T]]: ...
    def __get__(self, client: object | None, owner: type) -> RemoteStreamMethod[_P, _T] | Callable[_P, StreamCall[_T]]:
        """The method of a client."""
        return self if client is None else cast("Callable[_P, StreamCall[_T]]", self._of(client))


@overload
def remote_method(function: Callable[Concatenate[Any, _P], Coroutine[Any, Any, _R]]) -> RemoteMethod[_P, _R]: ...
@overload
def remote_method(function: Callable[Concatenate[Any, _P], _R]) -> RemoteMethod[_P, _R]: ...
def remote_method(function: Callable[..., Any]) -> RemoteMethod[Any, Any]:
    """A method of a worker's class, as a ``TypedClient`` calls it.

    Raises:
        RpcConfigError: It is not declared with ``rpc_method``, or streams.
    """
    return RemoteMethod(function, streaming=False)


@overload
def remote_stream(function: Callable[Concatenate[Any, _P], StreamSource[_T]]) -> RemoteStreamMethod[_P, _T]: ...
@overload
def remote_stream(function: Callable[Concatenate[Any, _P], Iterable[_T]]) -> RemoteStreamMethod[_P, _T]: ...
@overload
def remote_stream(function: Callable[Concatenate[Any, _P], AsyncIterable[_T]]) -> RemoteStreamMethod[_P, _T]: ...
def remote_stream(function: Callable[..., Any]) -> RemoteStreamMethod[Any, Any]:
    """A streaming method of a worker's class, as a ``TypedClient`` calls it.

    Raises:
        RpcConfigError: It is not declared with ``rpc_method``, or does not stream.
    """
    return RemoteStreamMethod(function, streaming=True)


def remote_specs(owner: type) -> Mapping[str, MethodSpec]:
    """Everything that a ``TypedClient`` names, inherited names included."""
    found: dict[str, MethodSpec] = {}
    for kind in reversed(owner.__mro__):
        for name, value in vars(kind).items():
            if isinstance(value, _Remote):
                found[name] = value.spec
    return found
