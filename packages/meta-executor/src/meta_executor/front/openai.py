"""The public wire: what clients send and get, in the shapes of the OpenAI API.

Requests are read strictly: a wrong type, a value out of range or an unknown name is an error that names the field. What
the API knows and this service does not is refused by name too, unless it has the value that changes nothing.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec

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
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Known, refused unless it asks for nothing.
    n: Any = None
    logprobs: Any = None
    logit_bias: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None


class CompletionRequest(_Common, frozen=True, kw_only=True):
    """Body of ``POST /v1/completions``."""

    prompt: Any
    best_of: Any = None
    echo: Any = None
    suffix: Any = None


class Message(_Strict, frozen=True, kw_only=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    tool_calls: Any = None
    function_call: Any = None


class ChatRequest(_Common, frozen=True, kw_only=True):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1, max_length=4096)]
    max_completion_tokens: TokenCount | None = None
    top_logprobs: Any = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None


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
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error
    for field, neutral in _NEUTRAL.items():
        value = getattr(request, field, None)
        if value is None:
            continue
        if not any(_same(value, allowed) for allowed in neutral):
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


def _field_of(message: str) -> tuple[str | None, str]:
    """Field and reason of a message such as ``Expected `int`, got `str` - at `$.max_tokens```."""
    match = re.search(r" - at `\$\.?(.*)`$", message)
    path, reason = (match.group(1), message[: match.start()]) if match else ("", message)
    named = re.search(r"(?:unknown|missing required) field `(.*?)`", reason)
    if named:
        path = f"{path}.{named.group(1)}" if path else named.group(1)
        reason = "unknown field" if "unknown" in reason else "is required"
    return (path or None), reason[:1].lower() + reason[1:]


def stop_strings(request: CompletionRequest | ChatRequest) -> tuple[str, ...]:
    """Stop strings as a tuple."""
    if request.stop is None:
        return ()
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)


def seed_of(request: CompletionRequest | ChatRequest) -> int:
    """The request's seed as a number >= 0; a random one where it does not say."""
    return secrets.randbits(63) if request.seed is None else request.seed % 2**63


def prompt_of(request: CompletionRequest) -> str | list[int]:
    """The one prompt of a completion: text, or token ids.

    Raises:
        ApiError: Several prompts, an empty one, or something else.
    """
    prompt = request.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        if not prompt:
            raise ApiError(400, "prompt: is empty", param="prompt", code="invalid_value")
        return prompt
    if isinstance(prompt, list):
        if prompt and all(isinstance(token, int) and not isinstance(token, bool) for token in prompt):
            return prompt
        if len(prompt) > 1 and all(isinstance(part, str | list) for part in prompt):
            raise ApiError(
                400, f"prompt: one prompt per request is supported, got {len(prompt)}", param="prompt",
                code="unsupported_value",
            )  # fmt: skip
    raise ApiError(400, "prompt: want a string or a list of token ids", param="prompt", code="invalid_type")


def messages_of(request: ChatRequest) -> list[dict[str, str]]:
    """Messages as role and text.

    Raises:
        ApiError: Content that is not text; names message and part.
    """
    messages = []
    for index, message in enumerate(request.messages):
        at = f"messages[{index}]"
        for field in ("tool_calls", "function_call", "audio"):
            if getattr(message, field):
                raise ApiError(400, f"{at}.{field}: not supported", param=f"{at}.{field}", code="unsupported_value")
        content = message.content
        if isinstance(content, list):
            parts = []
            for place, part in enumerate(content):
                if part.get("type") != "text" or not isinstance(part.get("text"), str):
                    where = f"{at}.content[{place}]"
                    raise ApiError(
                        400, f"{where}: only text parts are supported", param=where, code="unsupported_value"
                    )
                parts.append(part["text"])
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
    """The two endpoints' answers: same life, different words.

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

    def first(self, *, with_usage: bool) -> dict[str, Any] | None:
        """The chunk that opens a chat stream."""
        if not self._chat:
            return None
        return self._chunk({"delta": {"role": "assistant", "content": ""}, "finish_reason": None}, with_usage)

    def piece(
        self, text: str, finish_reason: str | None, *, with_usage: bool, ids: AnswerIds | None = None
    ) -> dict[str, Any]:
        """A piece of a stream; the last has a finish reason."""
        if self._chat:
            delta = {"content": text} if text or finish_reason is None else {}
            chunk = self._chunk({"delta": delta, "finish_reason": finish_reason}, with_usage)
        else:
            chunk = self._chunk({"text": text, "finish_reason": finish_reason}, with_usage)
        self._add_ids(chunk, ids)
        return chunk

    def last(self, counts: Mapping[str, Any]) -> dict[str, Any]:
        """The chunk with the counts, which has no choices."""
        return {**self._head, "object": self._kind, "choices": [], "usage": dict(counts)}

    def _add_ids(self, answer: dict[str, Any], ids: AnswerIds | None) -> None:
        if ids is not None:
            answer["choices"][0]["token_ids"] = ids.answer
            if ids.prompt is not None:
                # Where vLLM has them: in the choice of a completion, beside the choices of a chat.
                (answer if self._chat else answer["choices"][0])["prompt_token_ids"] = ids.prompt

    @property
    def _kind(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _chunk(self, choice: dict[str, Any], with_usage: bool) -> dict[str, Any]:
        chunk = {**self._head, "object": self._kind, "choices": [{"index": 0, "logprobs": None, **choice}]}
        if with_usage:
            chunk["usage"] = None
        return chunk
