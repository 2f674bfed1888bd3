"""The public wire: what clients send, in the shapes of the OpenAI API.

A wrong type or a value out of range is an error that names the field. What the API knows and this service does not is
refused by name, in words that say why, unless it has the value that changes nothing. A name that nobody here knows is told
and taken, because clients of other servers send what only those know; a strict service refuses it.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from meta_executor.reasons import plain
from meta_executor.wire import LOGPROBS_MAX

#: Tokens of an answer where a completion does not say (the API's own default).
COMPLETION_TOKENS_DEFAULT = 16
#: Longest answer (tokens) where a chat request does not say, so that one of them does not reserve a whole context.
CHAT_TOKENS_DEFAULT_MAX = 2048
STOPS_MAX = 16
_STOP_CHARACTERS_MAX = 256

#: Answers of one request (count), whatever the service's configuration allows.
ANSWERS_MAX = 1024
#: Tokens that a request may give a bias (count).
BIASES_MAX = 1024
#: Variables of a chat template (bytes of their JSON).
_TEMPLATE_BYTES_MAX = 16 * 1024
#: Names that are told of those that nobody knows (count), and what of each is shown (characters).
_UNKNOWN_MAX, _NAME_MAX = 8, 64

Temperature = Annotated[float, msgspec.Meta(ge=0, le=2)]
TopP = Annotated[float, msgspec.Meta(gt=0, le=1)]
TokenCount = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
AnswerCount = Annotated[int, msgspec.Meta(ge=1, le=ANSWERS_MAX)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Stop = str | Annotated[list[str], msgspec.Meta(max_length=STOPS_MAX)] | None
#: What is only looked at stays a slice of the body; this is one that was not sent.
_NOTHING = msgspec.Raw(b"null")


def _unsent() -> Any:
    """The default of a field that is only looked at; not a plain value, which a schema could not show."""
    return msgspec.field(default_factory=lambda: _NOTHING)


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

    def headers(self) -> dict[str, str]:
        """What goes with it: a client that may try again is told when."""
        return {"retry-after": "1"} if self.status in (429, 503) else {}

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


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    """Base: keyword only. Names that are not among the fields are looked for apart."""


class StreamOptions(_Body, frozen=True, kw_only=True):
    """How a stream tells its counts."""

    include_usage: bool | None = None
    #: The counts so far in every chunk; with ``include_usage``.
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class _Common(_Body, frozen=True, kw_only=True):
    """What both endpoints take."""

    model: Name
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    #: -1 and 0: all.
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=100)] | None = None
    #: Token id, as JSON's names are, to what is added to its logit.
    logit_bias: (
        Annotated[dict[str, Annotated[float, msgspec.Meta(ge=-100, le=100)]], msgspec.Meta(max_length=BIASES_MAX)]
        | None
    ) = None
    n: AnswerCount | None = None
    max_tokens: TokenCount | None = None
    #: The first so many tokens of the answer do not end it.
    min_tokens: TokenCount | None = None
    seed: Seed | None = None
    stop: Stop = None
    #: Go on past the model's end token (for measurements).
    ignore_eos: bool | None = None
    stop_token_ids: (
        Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]], msgspec.Meta(max_length=64)] | None
    ) = None
    #: Also give the token ids of prompt and answer, where vLLM gives them.
    return_token_ids: bool | None = None
    #: Keeps the requests of one conversation on one place where a router is set to.
    conversation_id: Name | None = None
    # Known, without effect on the answer.
    user: str | None = None
    metadata: msgspec.Raw = _unsent()
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CompletionRequest(_Common, frozen=True, kw_only=True):
    """Body of ``POST /v1/completions``."""

    prompt: msgspec.Raw
    best_of: AnswerCount | None = None
    echo: bool | None = None
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=LOGPROBS_MAX)] | None = None
    # Known, refused unless it asks for nothing.
    suffix: msgspec.Raw = _unsent()
    response_format: msgspec.Raw = _unsent()


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a message; of one that is not text only its type is looked at."""

    type: str = ""
    text: str | None = None


class Message(_Body, frozen=True, kw_only=True):
    """One message of a conversation. What an earlier answer had besides (its reasoning, say) is not looked at."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[Part], msgspec.Meta(max_length=1024)] | None = None
    name: str | None = None
    refusal: msgspec.Raw = _unsent()
    annotations: msgspec.Raw = _unsent()
    audio: msgspec.Raw = _unsent()
    tool_calls: msgspec.Raw = _unsent()
    function_call: msgspec.Raw = _unsent()


class ChatRequest(_Common, frozen=True, kw_only=True):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1, max_length=4096)]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=LOGPROBS_MAX)] | None = None
    add_generation_prompt: bool | None = None
    #: What else the model's chat template may look at.
    chat_template_kwargs: msgspec.Raw = _unsent()
    # Known, refused unless it asks for nothing.
    continue_final_message: msgspec.Raw = _unsent()
    chat_template: msgspec.Raw = _unsent()
    tools: msgspec.Raw = _unsent()
    tool_choice: msgspec.Raw = _unsent()
    parallel_tool_calls: msgspec.Raw = _unsent()
    functions: msgspec.Raw = _unsent()
    function_call: msgspec.Raw = _unsent()
    response_format: msgspec.Raw = _unsent()
    modalities: msgspec.Raw = _unsent()
    audio: msgspec.Raw = _unsent()
    prediction: msgspec.Raw = _unsent()
    reasoning_effort: msgspec.Raw = _unsent()
    verbosity: msgspec.Raw = _unsent()
    web_search_options: msgspec.Raw = _unsent()


class TokenizeRequest(_Body, frozen=True, kw_only=True):
    """Body of ``POST /tokenize``: a text, or a conversation."""

    model: Name | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], msgspec.Meta(min_length=1, max_length=4096)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: msgspec.Raw = _unsent()
    #: Also give the tokens' texts.
    return_token_strs: bool | None = None


class DetokenizeRequest(_Body, frozen=True, kw_only=True):
    """Body of ``POST /detokenize``."""

    model: Name | None = None
    tokens: msgspec.Raw


_NO_TOOLS = "tool calls are not served here: they need constrained decoding, which this service does not do"
_TEXT_ONLY = "this service takes and gives text only"
_NO_EFFORT = "the model here has no such setting; leave it out"
#: Field -> values besides null that ask for nothing this service lacks, and why others are refused.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "suffix": (("",), "the model here continues texts and does not fill gaps"),
    "tools": (([],), _NO_TOOLS),
    "tool_choice": (("none", "auto"), _NO_TOOLS),
    "parallel_tool_calls": ((True, False), _NO_TOOLS),
    "functions": (([],), _NO_TOOLS),
    "function_call": (("none", "auto"), _NO_TOOLS),
    "response_format": (
        ({"type": "text"},),
        "answers are plain text: a JSON or grammar format needs constrained decoding, which this service does not do",
    ),
    "modalities": ((["text"],), _TEXT_ONLY),
    "audio": ((), _TEXT_ONLY),
    "prediction": ((), "predicted outputs are not used here"),
    "reasoning_effort": ((), _NO_EFFORT),
    "verbosity": ((), _NO_EFFORT),
    "web_search_options": ((), "this service searches nothing"),
    "continue_final_message": ((False,), "a last message is not continued here; /v1/completions continues a text"),
    "chat_template": ((), "only the model's own chat template is used"),
}

_Request = TypeVar("_Request", CompletionRequest, ChatRequest)


def decode_request(body: bytes, kind: type[_Request], *, strict: bool = False) -> tuple[_Request, tuple[str, ...]]:
    """Read a body.

    Args:
        body: JSON.
        kind: Of which endpoint.
        strict: Refuse names that nobody here knows.

    Returns:
        The request, and the names at its top that nobody here knows (some of them, shortened).

    Raises:
        ApiError: 400 that names the field.
    """
    request = decoded(body, kind)
    unknown = [name for name in decoded(body, dict[str, msgspec.Raw]) if name not in kind.__struct_fields__]
    if strict and unknown:
        shown = unknown[0][:_ECHO_MAX]
        raise ApiError(400, f"{shown}: unknown field", param=shown, code="invalid_value")
    for field, (neutral, why) in _REFUSED.items():
        raw = getattr(request, field, _NOTHING)
        if not _is_empty(raw) and not _is_one_of(raw, neutral):
            allowed = " or ".join(json_of(one) for one in neutral)
            words = f"{field}: {why}" + (f"; {allowed} is taken" if allowed else "")
            raise ApiError(400, words, param=field, code="unsupported_value")
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options: only with stream true", param="stream_options", code="invalid_value")
    for stop in stop_strings(request):
        if not 1 <= len(stop) <= _STOP_CHARACTERS_MAX:
            raise ApiError(
                400, f"stop: strings of 1 to {_STOP_CHARACTERS_MAX} characters", param="stop", code="invalid_value"
            )
    return request, tuple(name[:_NAME_MAX] for name in unknown[:_UNKNOWN_MAX])


_Any = TypeVar("_Any")


def decoded(body: bytes, kind: type[_Any]) -> _Any:
    """A body as one of the types here.

    Raises:
        ApiError: 400 that names the field.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        field, reason = _field_of(str(error))
        raise ApiError(400, f"{field}: {reason}" if field else reason, param=field, code="invalid_value") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        what = f"the body is not JSON: {str(error)[:_ECHO_MAX]}" if body.strip() else "the body is empty, want JSON"
        raise ApiError(400, what, code="invalid_json") from error


def json_of(value: Any) -> str:
    """JSON of a small value."""
    return msgspec.json.encode(value).decode()


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
_MISSING = "Object missing required field `"


def _field_of(message: str) -> tuple[str | None, str]:
    """Field and reason of a message such as ``Expected `int`, got `str` - at `$.max_tokens```.

    The message may hold a name that the client chose, of any length: it is cut by position, never searched by expression,
    and what is repeated is bounded.
    """
    at = message.rfind(_AT, max(len(message) - _ECHO_MAX, 0))
    path = ""
    if at >= 0 and message.endswith("`"):
        message, path = message[:at], message[at + len(_AT) : -1].lstrip(".")
    if message.startswith(_MISSING):
        name = message[len(_MISSING) : len(_MISSING) + _ECHO_MAX].removesuffix("`")
        return (f"{path}.{name}" if path else name), "is required"
    reason = message[:_ECHO_MAX]
    return (path or None), plain(reason)


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
_LIST = msgspec.json.Decoder(list[msgspec.Raw])
Prompt = str | npt.NDArray[np.int32]


def prompts_of(request: CompletionRequest, *, tokens_max: int, prompts_max: int) -> list[Prompt]:
    """The prompts of a completion: each a text, or token ids (int32, shape (tokens,)).

    Args:
        request: The body.
        tokens_max: More token ids of one prompt are refused before they are read.
        prompts_max: More prompts are refused (count).

    Raises:
        ApiError: Too many prompts, an empty one, too long a one, or something else.
    """
    data = bytes(request.prompt).strip()
    try:
        inner = data[1:].lstrip()[:1] if data.startswith(b"[") else b""
        if inner not in (b'"', b"["):
            return [_prompt_of(data, tokens_max)]
        several = _LIST.decode(data)
        if len(several) > prompts_max:
            raise ApiError(
                400, f"prompt: {len(several)} prompts, at most {prompts_max} in one request", param="prompt",
                code="invalid_value",
            )  # fmt: skip
        parts = [bytes(part).strip() for part in several]
        if any(part[:1] != inner for part in parts):
            raise ApiError(400, _PROMPT_WANTED, param="prompt", code="invalid_type")
        return [_prompt_of(part, tokens_max) for part in parts]
    except msgspec.ValidationError as error:
        raise ApiError(400, _PROMPT_WANTED, param="prompt", code="invalid_type") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(
            400, f"prompt: is not JSON: {str(error)[:_ECHO_MAX]}", param="prompt", code="invalid_json"
        ) from error


_PROMPT_WANTED = "prompt: want a string, a list of token ids, or a list of either"


def _prompt_of(data: bytes, tokens_max: int) -> Prompt:
    """One prompt."""
    if data.startswith(b"["):
        tokens = _token_ids(data, "prompt", tokens_max)
        if not len(tokens):
            raise _empty()
        return tokens
    if not data.startswith(b'"'):
        raise ApiError(400, _PROMPT_WANTED, param="prompt", code="invalid_type")
    text = _TEXT.decode(data)
    if not text:
        raise _empty()
    return text


def _token_ids(data: bytes, field: str, tokens_max: int) -> npt.NDArray[np.int32]:
    count = data.count(b",") + 1
    if count > tokens_max:
        raise ApiError(
            400, f"{field}: {count} tokens, at most {tokens_max} fit", param=field, code="context_length_exceeded"
        )
    return np.asarray(_TOKENS.decode(data), np.int32)


def token_ids_of(raw: msgspec.Raw, field: str, *, tokens_max: int) -> npt.NDArray[np.int32]:
    """A list of token ids, int32, shape (tokens,); may be empty.

    Raises:
        ApiError: It is something else, or has more (looked at before they are read).
    """
    try:
        return _token_ids(bytes(raw), field, tokens_max)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"{field}: want a list of token ids", param=field, code="invalid_type") from error


def _empty() -> ApiError:
    return ApiError(400, "prompt: is empty", param="prompt", code="invalid_value")


_VARIABLES = msgspec.json.Decoder(dict[str, str | int | float | bool | None])


def template_variables(request: ChatRequest) -> dict[str, str | int | float | bool | None]:
    """``chat_template_kwargs``.

    Raises:
        ApiError: They are large, or have a value that is neither text, number, boolean nor null.
    """
    raw = request.chat_template_kwargs
    if _is_empty(raw):
        return {}
    wanted = f"chat_template_kwargs: want names with texts, numbers, true, false or null, at most {_TEMPLATE_BYTES_MAX} bytes"
    try:
        if len(memoryview(raw)) <= _TEMPLATE_BYTES_MAX:
            variables = _VARIABLES.decode(raw)
            if all(name.isidentifier() for name in variables):
                return variables
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, wanted, param="chat_template_kwargs", code="invalid_value") from error
    raise ApiError(400, wanted, param="chat_template_kwargs", code="invalid_value")


def logit_biases(request: CompletionRequest | ChatRequest, *, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Token ids and what is added to their logits.

    Raises:
        ApiError: A name that is not the id of a token.
    """
    biases = []
    for name, bias in (request.logit_bias or {}).items():
        token = int(name) if len(name) <= 10 and name.isascii() and name.isdecimal() else vocab_size
        if token >= vocab_size:
            words = f"logit_bias: {name[:_NAME_MAX]!r} is not the id of a token, 0..{vocab_size - 1}"
            raise ApiError(400, words, param="logit_bias", code="invalid_value")
        biases.append((token, bias))
    return tuple(biases)


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
        if content is None and message.role == "assistant":
            content = ""
        if content is None:
            raise ApiError(400, f"{at}.content: is required", param=f"{at}.content", code="invalid_value")
        role = "system" if message.role == "developer" else message.role
        messages.append({"role": role, "content": content})
    return messages
