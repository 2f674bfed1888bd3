"""A request on its way in and its answer on the way out: the two forms that every room between front and engine knows.

One :class:`Request` is made where a request enters the service (front, or an instance's API server) and is the same object
or the same bytes down to the engine: its token ids stay one int32 buffer, its sampling one nested record. Each rank keeps
its own notes about it in a :class:`~meta_executor.executor.ownership.Sequence`, which refers to it.

:class:`Answers` is one hand-over: the tokens of all requests in two arrays, and what is more than a token as a list of
notices. The same frame goes from a rank to rank 0, to the front and to an instance's own API server.

msgpack carries arrays as bytes; :func:`encoder` and :func:`decoder` make the two ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from meta_executor.engine.base import SamplingParams
from meta_executor.wire import TokenLogprobs

ScheduleStyle = Literal["context_first", "generation_first"]
Role = Literal["context", "generation"]

_Body = TypeVar("_Body")


class Request(msgspec.Struct, frozen=True, kw_only=True, eq=False, omit_defaults=True):
    """One request: immutable, compared by identity.

    Attributes:
        request_id: Unique, below 2**63; used once.
        token_ids: The prompt, int32, shape (tokens,), not changed afterwards.
        sampling: How tokens are chosen; end tokens were resolved into ``stop_token_ids`` where it was made.
        schedule_style: Which instance begins.
        first_token: Generation, context-first: the token that the context instance computed.
        peer: Generation: the context instance to pull from, as "instance_id/generation".
        prefills_here: Generation: there is no context leg; the prompt is computed here.
        conversation_id: Keeps the requests of a conversation on one rank where the router is set to.
        cache_salt: Cached prefixes are shared among requests with the same one.
        deadline_s: It is of no use so long after its arrival at an instance (s); None: no deadline.
    """

    request_id: int
    token_ids: np.ndarray
    sampling: SamplingParams
    schedule_style: ScheduleStyle = "context_first"
    first_token: int | None = None
    peer: str = ""
    prefills_here: bool = False
    conversation_id: str | None = None
    cache_salt: str = ""
    deadline_s: float | None = None

    @property
    def prompt_count(self) -> int:
        """Tokens of the prompt (count)."""
        return len(self.token_ids)

    @property
    def generation_first(self) -> bool:
        """Whether both instances begin at once."""
        return self.schedule_style == "generation_first"

    def describe(self) -> str:
        """Names it in a diagnosis."""
        return f"request {self.request_id} ({self.schedule_style}, {self.prompt_count} tokens)"


class Notice(msgspec.Struct, frozen=True, array_like=True):
    """What a hand-over says of one request beside its tokens.

    ``finish_reason``: "" while it goes on; the notice that sets it is the request's last word. ``error_code``: a code of
    :mod:`meta_executor.wire` when that is "error" or "cancelled". ``cached_tokens``: of the prompt, found in the prefix cache
    (context). ``rank``: who generates it. ``logprobs``: of the tokens of the same hand-over, in order, where the request asks
    for them; of the first token the context instance alone tells them. ``prompt_logprobs``: of the prompt's tokens behind the
    first, from where it is computed, with the first token.
    """

    request_id: int
    finish_reason: str = ""
    error_code: str = ""
    message: str = ""
    cached_tokens: int = 0
    rank: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def failed(self) -> bool:
        """It ended without a whole answer."""
        return self.finish_reason in ("error", "cancelled")


class Answers(msgspec.Struct, frozen=True, array_like=True):
    """One hand-over. A request's tokens come before the notice that ends it.

    ``request_ids`` is int64 and ``token_ids`` int32, both shape (tokens,): whose token, and which, in order.
    """

    request_ids: np.ndarray
    token_ids: np.ndarray
    notices: tuple[Notice, ...] = ()

    def pairs(self) -> Iterable[tuple[int, int]]:
        """(request id, token) in order."""
        return zip(self.request_ids.tolist(), self.token_ids.tolist())

    def __len__(self) -> int:
        return len(self.token_ids)

    def __bool__(self) -> bool:
        return bool(len(self.token_ids) or self.notices)


_NO_IDS: npt.NDArray[np.int64] = np.empty(0, np.int64)
_NO_TOKENS: npt.NDArray[np.int32] = np.empty(0, np.int32)


def make_answers(pairs: Iterable[tuple[int, int]] = (), notices: Iterable[Notice] = ()) -> Answers:
    """A hand-over from (request id, token) pairs."""
    listed = list(pairs)
    if not listed:
        return Answers(_NO_IDS, _NO_TOKENS, tuple(notices))
    ids, tokens = zip(*listed)
    return Answers(np.array(ids, np.int64), np.array(tokens, np.int32), tuple(notices))


def join_answers(parts: list[Answers]) -> Answers:
    """One hand-over of several, in order."""
    if len(parts) == 1:
        return parts[0]
    return Answers(
        np.concatenate([part.request_ids for part in parts]) if parts else _NO_IDS,
        np.concatenate([part.token_ids for part in parts]) if parts else _NO_TOKENS,
        tuple(notice for part in parts for notice in part.notices),
    )


# -- bytes ------------------------------------------------------------------------------------------------------------

#: An array travels as its kind's letter and its bytes, little-endian.
_KINDS: dict[bytes, np.dtype[Any]] = {b"i": np.dtype("<i4"), b"q": np.dtype("<i8")}
_LETTERS: dict[np.dtype[Any], bytes] = {np.dtype(np.int32): b"i", np.dtype(np.int64): b"q"}


def _array_out(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype in _LETTERS:
        return _LETTERS[value.dtype] + value.astype(_KINDS[_LETTERS[value.dtype]], copy=False).tobytes()
    raise NotImplementedError(f"cannot send {type(value).__name__} {getattr(value, 'dtype', '')}")


def _array_in(kind: type, value: Any) -> Any:
    if kind is np.ndarray and isinstance(value, bytes) and value[:1] in _KINDS:
        dtype = _KINDS[value[:1]]
        if (len(value) - 1) % dtype.itemsize == 0:
            return np.frombuffer(value, dtype, offset=1)
    raise ValueError(f"want an array of int32 or int64, got {type(value).__name__}")


def encoder() -> msgspec.msgpack.Encoder:
    """Bytes of structs with arrays."""
    return msgspec.msgpack.Encoder(enc_hook=_array_out)


def decoder(kind: type[_Body]) -> msgspec.msgpack.Decoder[_Body]:
    """Structs with arrays from bytes; the arrays are read-only views."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_array_in)


# -- collecting -------------------------------------------------------------------------------------------------------


class AnswerBook:
    """Collects one iteration's hand-over: single tokens, whole steps, notices. Not thread-safe."""

    def __init__(self) -> None:
        self._parts: list[Answers] = []
        self._pairs: list[tuple[int, int]] = []
        self._notices: list[Notice] = []

    def token(self, request_id: int, token: int) -> None:
        """One token of one request."""
        self._pairs.append((request_id, token))

    def step(self, request_ids: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int32]) -> None:
        """One token each of many requests; the arrays are not changed afterwards."""
        self._parts.append(Answers(request_ids, token_ids))

    def notice(self, notice: Notice) -> None:
        """What is more than a token."""
        self._notices.append(notice)

    def take(self) -> Answers | None:
        """What was collected since the last call; None: nothing."""
        if not (self._parts or self._pairs or self._notices):
            return None
        if self._pairs or self._notices:
            self._parts.append(make_answers(self._pairs, self._notices))
            self._pairs, self._notices = [], []
        parts, self._parts = self._parts, []
        return join_answers(parts)
