"""The public wire: what clients send and get, in the shapes of the OpenAI API.

Requests are read strictly: a wrong type, a value out of range or an unknown name is an error that names the field. What
the API knows and this service does not is refused by name too, unless it has the value that changes nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

#: Tokens of an answer where a completion does not say (the API's own default).
COMPLETION_TOKENS_DEFAULT = 16
#: Longest answer (tokens) where a chat request does not say, so that one of them does not reserve a whole context.
CHAT_TOKENS_DEFAULT_MAX = 2048
STOPS_MAX = 16
_STOP_CHARACTERS_MAX = 256

Temperature = Annotated[float, msgspec.Meta(ge=0, le=2)]
TopP = Annotated[float, msgspec.Meta(gt=0, le=1)]
TokenCount = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Stop = str | Annotated[list[str], msgspec.Meta(max_length=STOPS_MAX)] | None
#: What is only looked at stays a slice of the body; this is one that was not sent.
_NOTHING = msgspec.Raw(b"null")
#: Slices of more bytes are not read to compare them with what asks for nothing.
_NEUTRAL_BYTES_MAX = 64
#: What of a body is repeated in an error (characters).
_ECHO_MAX = 200
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class ApiError(Exception):
    """An error for the client.

    Attributes:
        status: HTTP status.
        message: What is wrong, for a person.
        param: The field at fault.
        code: A word for programs.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """The error as the API shows it."""
        if self.status in (401, 403):
            kind = "authentication_error"
        elif self.status == 429:
            kind = "rate_limit_error"
        elif self.status < 500:
            kind = "invalid_request_error"
        else:
            kind = "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base: keyword only, closed set of names."""


class StreamOptions(_Strict, frozen=True, kw_only=True):
    """How a stream ends."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _Common(_Strict, frozen=True, kw_only=True):
    """What both endpoints take."""

    model: Name
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    max_tokens: TokenCount | None = None
    seed: Seed | None = None
    stop: Stop = None
    #: Go on past the model's end token (for measurements).
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]], msgspec.Meta(max_length=64)] = []
    #: Also give the token ids of prompt and answer, where vLLM gives them.
    return_token_ids: bool | None = None
    #: Keeps the requests of one conversation on one place where a router is set to.
    conversation_id: Name | None = None
    # Known, without effect on the answer.
    user: str | None = None
    metadata: msgspec.Raw = _NOTHING
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Known, refused unless it asks for nothing.
    n: msgspec.Raw = _NOTHING
    logprobs: msgspec.Raw = _NOTHING
    logit_bias: msgspec.Raw = _NOTHING
    presence_penalty: msgspec.Raw = _NOTHING
    frequency_penalty: msgspec.Raw = _NOTHING


class CompletionRequest(_Common, frozen=True, kw_only=True):
    """Body of ``POST /v1/completions``."""

    prompt: msgspec.Raw
    best_of: msgspec.Raw = _NOTHING
    echo: msgspec.Raw = _NOTHING
    suffix: msgspec.Raw = _NOTHING


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a message; of one that is not text only its type is looked at."""

    type: str = ""
    text: str | None = None


class Message(_Strict, frozen=True, kw_only=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[Part], msgspec.Meta(max_length=1024)] | None = None
    name: str | None = None
    refusal: msgspec.Raw = _NOTHING
    annotations: msgspec.Raw = _NOTHING
    audio: msgspec.Raw = _NOTHING
    tool_calls: msgspec.Raw = _NOTHING
    function_call: msgspec.Raw = _NOTHING


class ChatRequest(_Common, frozen=True, kw_only=True):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1, max_length=4096)]
    max_completion_tokens: TokenCount | None = None
    top_logprobs: msgspec.Raw = _NOTHING
    tools: msgspec.Raw = _NOTHING
    tool_choice: msgspec.Raw = _NOTHING
    parallel_tool_calls: msgspec.Raw = _NOTHING
    functions: msgspec.Raw = _NOTHING
    function_call: msgspec.Raw = _NOTHING
    response_format: msgspec.Raw = _NOTHING
    modalities: msgspec.Raw = _NOTHING
    audio: msgspec.Raw = _NOTHING
    prediction: msgspec.Raw = _NOTHING
    reasoning_effort: msgspec.Raw = _NOTHING
    verbosity: msgspec.Raw = _NOTHING
    web_search_options: msgspec.Raw = _NOTHING


#: Field -> values besides null that ask for nothing this service lacks.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}

_Request = TypeVar("_Request", CompletionRequest, ChatRequest)


def decode_request(body: bytes, kind: type[_Request]) -> _Request:
    """Read a body.

    Raises:
        ApiError: 400 that names the field.
    """
    try:
        request = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        field, reason = _field_of(str(error))
        raise ApiError(400, f"{field}: {reason}" if field else reason, param=field, code="invalid_value") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {str(error)[:_ECHO_MAX]}", code="invalid_json") from error
    for field, neutral in _NEUTRAL.items():
        raw = getattr(request, field, _NOTHING)
        if not _is_empty(raw) and not _is_one_of(raw, neutral):
            allowed = " or ".join(repr(one) for one in neutral) or "null"
            raise ApiError(400, f"{field}: only {allowed} is supported", param=field, code="unsupported_value")
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options: only with stream true", param="stream_options", code="invalid_value")
    for stop in stop_strings(request):
        if not 1 <= len(stop) <= _STOP_CHARACTERS_MAX:
            raise ApiError(
                400, f"stop: strings of 1 to {_STOP_CHARACTERS_MAX} characters", param="stop", code="invalid_value"
            )
    return request


def _same(value: Any, allowed: Any) -> bool:
    """Equality that does not take True for 1."""
    return bool(value == allowed) and isinstance(value, bool) == isinstance(allowed, bool)


def _is_empty(raw: msgspec.Raw) -> bool:
    """The field was not sent, or is null."""
    data = memoryview(raw)
    return len(data) <= _NEUTRAL_BYTES_MAX and bytes(data).strip() == b"null"


def _is_one_of(raw: msgspec.Raw, allowed: tuple[Any, ...]) -> bool:
    data = memoryview(raw)
    if len(data) > _NEUTRAL_BYTES_MAX:
        return False
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False  # a slice is not decoded with its body: its strings may not be UTF-8
    return any(_same(value, one) for one in allowed)


_AT = " - at `$"
_UNKNOWN, _MISSING = "Object contains unknown field `", "Object missing required field `"


def _field_of(message: str) -> tuple[str | None, str]:
    """Field and reason of a message such as ``Expected `int`, got `str` - at `$.max_tokens```.

    The message may hold a name that the client chose, of any length: it is cut by position, never searched by expression,
    and what is repeated is bounded.
    """
    at = message.rfind(_AT, max(len(message) - _ECHO_MAX, 0))
    path = ""
    if at >= 0 and message.endswith("`"):
        message, path = message[:at], message[at + len(_AT) : -1].lstrip(".")
    for start, reason in ((_UNKNOWN, "unknown field"), (_MISSING, "is required")):
        if message.startswith(start):
            name = message[len(start) : len(start) + _ECHO_MAX].removesuffix("`")
            return (f"{path}.{name}" if path else name), reason
    reason = message[:_ECHO_MAX]
    return (path or None), reason[:1].lower() + reason[1:]


def stop_strings(request: CompletionRequest | ChatRequest) -> tuple[str, ...]:
    """Stop strings as a tuple."""
    if request.stop is None:
        return ()
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)


def seed_of(request: CompletionRequest | ChatRequest) -> int:
    """The request's seed as a number >= 0; a random one where it does not say."""
    return secrets.randbits(63) if request.seed is None else request.seed % 2**63


_TEXT = msgspec.json.Decoder(str)
_TOKENS = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]])
_ONE_TEXT = msgspec.json.Decoder(Annotated[list[str], msgspec.Meta(min_length=1, max_length=1)])


def prompt_of(request: CompletionRequest, *, tokens_max: int) -> str | npt.NDArray[np.int32]:
    """The one prompt of a completion: text, or token ids (int32, shape (tokens,)).

    Args:
        request: The body.
        tokens_max: More token ids are refused before they are read.

    Raises:
        ApiError: Several prompts, an empty one, too long a one, or something else.
    """
    data = bytes(request.prompt).strip()
    try:
        if data.startswith(b'"'):
            text = _TEXT.decode(data)
        elif data.startswith(b"[") and data[1:].lstrip().startswith((b'"', b"[")):
            inner = data[1:].lstrip()
            if inner.startswith(b"["):
                return _token_ids(_only_one(inner, tokens_max), tokens_max)
            text = _ONE_TEXT.decode(data)[0]
        elif data.startswith(b"["):
            return _token_ids(data, tokens_max)
        else:
            raise ApiError(400, _PROMPT_WANTED, param="prompt", code="invalid_type")
    except msgspec.ValidationError:
        if data.startswith(b"[") and not data[1:].lstrip().startswith((b'"', b"[")):
            raise ApiError(400, _PROMPT_WANTED, param="prompt", code="invalid_type") from None
        raise _several() from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(
            400, f"prompt: is not JSON: {str(error)[:_ECHO_MAX]}", param="prompt", code="invalid_json"
        ) from error
    if not text:
        raise _empty()
    return text


_PROMPT_WANTED = "prompt: want a string or a list of token ids"


def _only_one(inner: bytes, tokens_max: int) -> bytes:
    """The one list inside a list."""
    end = inner.find(b"]") + 1
    if inner[end:].strip() != b"]":
        raise _several()
    return inner[:end]


def _token_ids(data: bytes, tokens_max: int) -> npt.NDArray[np.int32]:
    count = data.count(b",") + 1
    if count > tokens_max:
        raise ApiError(
            400, f"prompt: {count} tokens, at most {tokens_max} fit", param="prompt", code="context_length_exceeded"
        )
    tokens = _TOKENS.decode(data)
    if not tokens:
        raise _empty()
    return np.asarray(tokens, np.int32)


def _empty() -> ApiError:
    return ApiError(400, "prompt: is empty", param="prompt", code="invalid_value")


def _several() -> ApiError:
    return ApiError(400, "prompt: one prompt per request is supported", param="prompt", code="unsupported_value")


def messages_of(request: ChatRequest) -> list[dict[str, str]]:
    """Messages as role and text.

    Raises:
        ApiError: Content that is not text; names message and part.
    """
    messages = []
    for index, message in enumerate(request.messages):
        at = f"messages[{index}]"
        for field in ("tool_calls", "function_call", "audio"):
            if not _is_empty(getattr(message, field)) and not _is_one_of(getattr(message, field), ([], {}, "")):
                raise ApiError(400, f"{at}.{field}: not supported", param=f"{at}.{field}", code="unsupported_value")
        content = message.content
        if isinstance(content, list):
            parts = []
            for place, part in enumerate(content):
                if part.type != "text" or part.text is None:
                    where = f"{at}.content[{place}]"
                    raise ApiError(
                        400, f"{where}: only text parts are supported", param=where, code="unsupported_value"
                    )
                parts.append(part.text)
            content = "".join(parts)
        if content is None:
            raise ApiError(400, f"{at}.content: is required", param=f"{at}.content", code="invalid_value")
        role = "system" if message.role == "developer" else message.role
        messages.append({"role": role, "content": content})
    return messages


# -- answers ----------------------------------------------------------------------------------------------------------


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """Token counts of one answer."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


class AnswerIds(msgspec.Struct, frozen=True):
    """Token ids for a client that asked for them.

    Attributes:
        answer: Of this piece, an end token included.
        prompt: Of the prompt, with the first piece; else None.
    """

    answer: list[int]
    prompt: list[int] | None


class Shape:
    """The two endpoints' answers: same life, different words. A stream's chunks are made as JSON: what is the same in all of
    them is encoded once.

    Args:
        chat: ``/v1/chat/completions``, else ``/v1/completions``.
        answer_id: Without prefix.
        created: Unix time (s).
        model: Served name.
    """

    def __init__(self, *, chat: bool, answer_id: str, created: int, model: str) -> None:
        self._chat = chat
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{answer_id}",
            "created": created,
            "model": model,
        }
        #: Everything before a chunk's own part of its one choice.
        same = msgspec.json.encode({**self._head, "object": self._kind})
        self._chunk_begin = same[:-1] + b',"choices":[{"index":0,"logprobs":null,'

    def whole(
        self, text: str, finish_reason: str, counts: Mapping[str, Any], ids: AnswerIds | None = None
    ) -> dict[str, Any]:
        """An answer in one piece."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason, "logprobs": None}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        kind = "chat.completion" if self._chat else "text_completion"
        answer = {**self._head, "object": kind, "choices": [choice], "usage": dict(counts)}
        self._add_ids(answer, ids)
        return answer

    def first(self, *, with_usage: bool) -> bytes | None:
        """The chunk that opens a chat stream (JSON)."""
        if not self._chat:
            return None
        return self._chunk({"delta": {"role": "assistant", "content": ""}, "finish_reason": None}, {}, with_usage)

    def piece(self, text: str, finish_reason: str | None, *, with_usage: bool, ids: AnswerIds | None = None) -> bytes:
        """A piece of a stream (JSON); the last has a finish reason."""
        choice: dict[str, Any] = {"finish_reason": finish_reason}
        if self._chat:
            choice["delta"] = {"content": text} if text or finish_reason is None else {}
        else:
            choice["text"] = text
        beside: dict[str, Any] = {}
        if ids is not None:
            choice["token_ids"] = ids.answer
            if ids.prompt is not None:
                # Where vLLM has them: in the choice of a completion, beside the choices of a chat.
                (beside if self._chat else choice)["prompt_token_ids"] = ids.prompt
        return self._chunk(choice, beside, with_usage)

    def last(self, counts: Mapping[str, Any]) -> bytes:
        """The chunk with the counts (JSON), which has no choices."""
        return msgspec.json.encode({**self._head, "object": self._kind, "choices": [], "usage": dict(counts)})

    def _add_ids(self, answer: dict[str, Any], ids: AnswerIds | None) -> None:
        if ids is not None:
            answer["choices"][0]["token_ids"] = ids.answer
            if ids.prompt is not None:
                # Where vLLM has them: in the choice of a completion, beside the choices of a chat.
                (answer if self._chat else answer["choices"][0])["prompt_token_ids"] = ids.prompt

    @property
    def _kind(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _chunk(self, choice: dict[str, Any], beside: dict[str, Any], with_usage: bool) -> bytes:
        """``choice`` completes the one choice, ``beside`` the chunk; neither is empty JSON where it is given."""
        if with_usage:
            beside["usage"] = None
        end = b"]," + msgspec.json.encode(beside)[1:] if beside else b"]}"
        return self._chunk_begin + msgspec.json.encode(choice)[1:] + end
