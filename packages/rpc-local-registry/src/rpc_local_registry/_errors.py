"""The one error tree, and the translation between exceptions and their wire form.

User exceptions never travel as objects: whatever a handler raises becomes (code, type name, message, traceback text) and is
rebuilt on the other side as ``RpcRemoteError``; its ``cause`` is rebuilt only for types on an allow-list. That holds for a
handler's own ``RpcError`` too: its troubles with *its* peers must not look like the caller's transport. Codes other than
``remote`` are the server's own words. The local path goes through the same functions, so both paths raise the same thing.
"""

from __future__ import annotations

import builtins
import traceback
from collections.abc import Iterable, Mapping

import msgspec

from rpc_local_registry._asyncio import CancelledError
from rpc_local_registry._hooks import text_of

#: Bounds on what a remote error may carry; longer text is cut in the middle.
MESSAGE_CHARS_MAX = 4096
TRACEBACK_CHARS_MAX = 16384


class RpcError(Exception):
    """Base of everything that this package raises on purpose.

    Attributes:
        nothing_ran: Whether the call certainly did not reach its handler, so that making it again cannot run it twice.
    """

    nothing_ran: bool = False


class RpcConfigError(RpcError, ValueError):
    """A setting, key, environment variable or method declaration is wrong. Names the culprit."""

    nothing_ran = True


class RpcAddressError(RpcError, ValueError):
    """The address cannot be used: malformed, too long, or in a folder that others can enter."""

    nothing_ran = True


class RpcAddressInUse(RpcError):
    """Somebody alive already serves this address; it was not touched."""


class RpcMethodNotFound(RpcError, AttributeError):
    """No such method, or it is not declared with ``rpc_method``."""

    nothing_ran = True


class RpcArgumentError(RpcError, TypeError):
    """The arguments do not fit the method's signature or annotations, or cannot be encoded. Nothing ran."""

    nothing_ran = True


class RpcEncodeError(RpcError):
    """The method ran but its result cannot travel. Never retried."""


class RpcStreamingError(RpcError):
    """A stream was asked of a plain method, a single result of a streaming one, or a stream was misused."""


class RpcUsageError(RpcError, RuntimeError):
    """A callback on the client's I/O thread would wait for what that thread brings: an answer, an item, a future's outcome.

    Of a call nothing was sent; that of a future goes on, and so does a stream.
    """

    def __init__(self, message: str, *, nothing_ran: bool = False) -> None:
        super().__init__(message)
        self.nothing_ran = nothing_ran


class RpcRemoteError(RpcError):
    """The handler raised.

    Attributes:
        type_name: Qualified name of the exception's class on the worker's side.
        message: ``str()`` of the exception.
        remote_traceback: Text of the worker's traceback (bounded).
        cause: The exception rebuilt from its message when its type is on the allow-list (plain built-in exceptions and
            ``RpcConfig.exceptions``, and this package's own errors), else None.
    """

    def __init__(
        self, type_name: str, message: str, remote_traceback: str = "", cause: BaseException | None = None
    ) -> None:
        super().__init__(f"{type_name}: {message}")
        self.type_name = type_name
        self.message = message
        self.remote_traceback = remote_traceback
        self.cause = cause


class RpcTimeout(RpcError, TimeoutError):
    """The call's deadline passed. The call is cancelled at the server; it may have run."""


class RpcCancelled(RpcError):
    """The call was cancelled before it finished."""


class RpcBackpressure(RpcError):
    """A bound is reached (pending calls, pending bytes, unread items). Nothing was sent: the one retryable refusal."""

    nothing_ran = True


class RpcConnectionError(RpcError, ConnectionError):
    """There is no usable session."""


class RpcUnreachable(RpcConnectionError):
    """Nobody listens at the address (within the handshake's time)."""

    nothing_ran = True


class RpcAuthenticationError(RpcConnectionError):
    """Somebody listens but gave no answer under our key: wrong key, or not a server of this kind."""

    nothing_ran = True


class RpcProtocolMismatch(RpcConnectionError):
    """The peer shares the key but speaks other protocol versions."""

    nothing_ran = True


class RpcPeerDead(RpcConnectionError):
    """The connection to the peer broke, or the peer fell silent at the transport."""


class RpcServerStopped(RpcConnectionError):
    """The server shut down and said so."""


class RpcClosed(RpcConnectionError):
    """This client was closed."""


class RpcProtocolError(RpcConnectionError):
    """An authenticated peer broke the protocol; the session is over."""


class ErrorBody(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, gc=False):
    """An error on the wire."""

    code: str
    type_name: str
    message: str
    remote_traceback: str = ""


_BY_CODE: dict[str, type[RpcError]] = {
    "not_found": RpcMethodNotFound,
    "arguments": RpcArgumentError,
    "encode": RpcEncodeError,
    "streaming": RpcStreamingError,
    "timeout": RpcTimeout,
    "cancelled": RpcCancelled,
    "busy": RpcBackpressure,
    "stopped": RpcServerStopped,
    "protocol": RpcProtocolError,
}
_CODES: dict[type, str] = {kind: code for code, kind in _BY_CODE.items()}

#: Built-in exceptions that may be rebuilt from a message: plain constructors, no effect beyond holding text.
_SAFE_CAUSES: dict[str, type[Exception]] = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type)
    and issubclass(kind, Exception)
    and kind not in (UnicodeDecodeError, UnicodeEncodeError, UnicodeTranslateError)
    and not issubclass(kind, (BaseExceptionGroup, StopIteration, StopAsyncIteration, Warning))
}


def _own_causes() -> dict[str, type[Exception]]:
    kinds: list[type[Exception]] = [RpcError]
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
    return {type_name_of(kind): kind for kind in kinds if kind.__module__ == __name__ and kind is not RpcRemoteError}


def cause_table(extra: Iterable[type[Exception]]) -> Mapping[str, type[Exception]]:
    """Allow-list of exception types by qualified name: safe built-ins, this package's errors, and the user's own."""
    table = {**_SAFE_CAUSES, **_own_causes()}
    for kind in extra:
        table[type_name_of(kind)] = kind
    return table


def type_name_of(kind: type) -> str:
    """Name used on the wire: plain for built-ins, else module and qualified name."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _cut(text: str, chars_max: int) -> str:
    if len(text) <= chars_max:
        return text
    half = chars_max // 2 - 8
    return f"{text[:half]}\n[...]\n{text[-half:]}"


def _text_of(error: BaseException) -> str:
    return _cut(text_of(error), MESSAGE_CHARS_MAX).encode("utf-8", "backslashreplace").decode("utf-8")


def describe(error: BaseException) -> ErrorBody:
    """Wire form of what a handler raised. Never raises, whatever ``str(error)`` does."""
    message = _text_of(error)
    if issubclass(type(error), CancelledError):
        return ErrorBody("cancelled", type_name_of(type(error)), message or "the handler was cancelled")
    try:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except BaseException:  # noqa: BLE001 - an exception class may break what is asked of it
        text = "<traceback unavailable>"
    text = _cut(text, TRACEBACK_CHARS_MAX).encode("utf-8", "backslashreplace").decode("utf-8")
    return ErrorBody("remote", type_name_of(type(error)), message, text)


def describe_own(error: RpcError) -> ErrorBody:
    """Wire form of the server's own word about a call: the caller gets this very kind of error."""
    return ErrorBody(_CODES[type(error)], type_name_of(type(error)), _text_of(error))


def shorten(body: ErrorBody, bytes_max: int) -> ErrorBody:
    """The same error, cut so that a message of ``bytes_max`` (at least 1,024) holds it: its traceback goes first."""
    # A character takes up to four bytes; the header and the type's name take the rest.
    chars = (bytes_max - 512) // 4
    message = _cut(body.message, chars)
    left = chars - len(message)
    trace = _cut(body.remote_traceback, left) if left >= 64 else ""
    return ErrorBody(body.code, body.type_name[:48], message, trace)


def again(error: RpcError) -> RpcError:
    """A fresh exception of the same kind, so that tracebacks of several callers do not pile up on one object."""
    fresh = type(error)(*error.args)
    fresh.__cause__ = error.__cause__
    return fresh


def rebuild(body: ErrorBody, causes: Mapping[str, type[Exception]]) -> RpcError:
    """Exception for a wire error. Unknown codes become a plain ``RpcRemoteError``; no name is ever imported."""
    kind = _BY_CODE.get(body.code)
    if kind is not None:
        return kind(body.message)
    cause: BaseException | None = None
    cause_kind = causes.get(body.type_name)
    if cause_kind is not None:
        try:
            cause = cause_kind(body.message)
        except BaseException:  # noqa: BLE001 - a class whose constructor wants more than a message stays unbuilt
            cause = None
    return RpcRemoteError(body.type_name, body.message, body.remote_traceback, cause)
