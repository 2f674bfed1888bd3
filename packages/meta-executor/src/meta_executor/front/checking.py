"""From a body to a call that can be served, or to an error that names the field.

Everything that costs time in proportion to a body comes after a bound on it: the body's size, the size of what is only
looked at (a raw slice of it), the least number of tokens that a text of its length can have. A prompt of token ids is
counted before it is read, read by typed code, and is one int32 buffer from then on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from endpoint_lifecycle import RequestIdGenerator
from meta_executor.engine.base import ModelInfo, SamplingParams
from meta_executor.engine.errors import EngineError
from meta_executor.engine.tokenizer import Tokenizer
from meta_executor.executor.request import Request, ScheduleStyle
from meta_executor.front import openai
from meta_executor.front.dispatch import Job
from meta_executor.front.openai import ApiError
from meta_executor.front.servers import TokenLimits
from meta_executor.front.tenants import Tenants
from meta_executor.listener.access import Caller
from meta_executor.listener.reading import BodyDecoder, StructureError

#: Prompts of more characters are encoded in a thread, so that they do not hold up the streams of others.
_ENCODE_INLINE_CHARACTERS = 8192
#: Conversations of more messages are written out in a thread as well.
_ENCODE_INLINE_MESSAGES = 64
#: Members of a body (count): so many for each token that may be asked for, and so many besides.
_ELEMENTS_PER_TOKEN, _ELEMENTS_BESIDES = 4, 1024
#: Fewest tokens that a message of a conversation can have: two that frame it and one between.
_MESSAGE_TOKENS_MIN = 3


_Read = TypeVar("_Read")


@dataclass(frozen=True)
class Call:
    """A checked request."""

    job: Job
    caller: Caller
    stream: bool
    with_usage: bool
    with_ids: bool
    stops: tuple[str, ...]
    end_token_ids: frozenset[int]
    shape: openai.Shape


class Checker:
    """See the module.

    Args:
        model: Shape of the model that is served.
        served_name: Name under which clients ask for it.
        tokenizer: The model's.
        schedule_style: Order of the legs.
        request_timeout_s: Longest time that a request may take.
        limits: What a request may have now.
        tenants: Keep clients apart.
        bodies: Decodes.
    """

    def __init__(
        self,
        *,
        model: ModelInfo,
        served_name: str,
        tokenizer: Tokenizer,
        schedule_style: ScheduleStyle,
        request_timeout_s: float,
        limits: Callable[[], TokenLimits],
        tenants: Tenants,
        bodies: BodyDecoder,
    ) -> None:
        self._model = model
        self._served_name = served_name
        self._tokenizer = tokenizer
        self._schedule_style = schedule_style
        self._request_timeout_s = request_timeout_s
        self._limits = limits
        self._tenants = tenants
        self._bodies = bodies
        self._ids = RequestIdGenerator(node_id=0)

    async def chat(self, body: bytes, accepted: float, caller: Caller) -> Call:
        """A body of ``POST /v1/chat/completions``.

        Raises:
            ApiError: Names the field.
        """
        request = await self._decoded(body, lambda text: openai.decode_request(text, openai.ChatRequest))
        self._check_model(request.model)
        limits = self._limits()
        if len(request.messages) * _MESSAGE_TOKENS_MIN > min(limits.prompt, limits.total):
            raise _too_long("messages", f"{len(request.messages)} messages", limits)
        messages = openai.messages_of(request)
        texts = [message["content"] for message in messages]
        inline = len(messages) <= _ENCODE_INLINE_MESSAGES
        encoded = await self._encoded(
            lambda: self._tokenizer.apply_chat_template(messages), texts, "messages", inline=inline
        )
        named = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        wanted = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        room = self._room("messages", len(encoded))
        if wanted is None:
            wanted = min(room, openai.CHAT_TOKENS_DEFAULT_MAX)
        self._check_wanted(named, wanted, room, len(encoded))
        return self._call(request, encoded, wanted, accepted, caller, chat=True)

    async def completion(self, body: bytes, accepted: float, caller: Caller) -> Call:
        """A body of ``POST /v1/completions``.

        Raises:
            ApiError: Names the field.
        """
        limits = self._limits()

        def read(text: bytes) -> tuple[openai.CompletionRequest, str | npt.NDArray[np.int32]]:
            request = openai.decode_request(text, openai.CompletionRequest)
            self._check_model(request.model)
            return request, openai.prompt_of(request, tokens_max=min(limits.prompt, limits.total))

        request, prompt = await self._decoded(body, read)
        if isinstance(prompt, str):
            text = prompt
            encoded = await self._encoded(lambda: self._tokenizer.encode_user_text(text), [text], "prompt")
        else:
            encoded = prompt
            if len(encoded) and int(encoded.max()) >= self._model.vocab_size:
                raise _invalid("prompt", f"token ids must be in 0..{self._model.vocab_size - 1}")
        wanted = openai.COMPLETION_TOKENS_DEFAULT if request.max_tokens is None else request.max_tokens
        room = self._room("prompt", len(encoded))
        self._check_wanted("max_tokens", wanted, room, len(encoded))
        return self._call(request, encoded, wanted, accepted, caller, chat=False)

    # -- parts of it --------------------------------------------------------------------------------------------------

    async def _decoded(self, body: bytes, decode: Callable[[bytes], _Read]) -> _Read:
        def elements_max() -> int:
            return _ELEMENTS_PER_TOKEN * self._limits().total + _ELEMENTS_BESIDES

        try:
            return await self._bodies.decoded(body, decode, elements_max=elements_max)
        except StructureError as error:
            raise ApiError(400, f"the body is {error}" if str(error).startswith("nested") else f"the body has {error}",
                           code="too_complex") from error  # fmt: skip

    def _check_model(self, name: str) -> None:
        if name != self._served_name:
            raise ApiError(
                404, f"model: {name!r} is not served here, {self._served_name!r} is", param="model",
                code="model_not_found",
            )  # fmt: skip

    async def _encoded(
        self, encode: Callable[[], list[int]], texts: list[str], field: str, *, inline: bool = True
    ) -> npt.NDArray[np.int32]:
        limits = self._limits()
        at_least = sum(self._tokenizer.tokens_at_least(text) for text in texts)
        if at_least > min(limits.total, limits.prompt):
            # Known to be too long by its length alone: a prompt of megabytes is not encoded to find that out.
            raise _too_long(field, f"more than {at_least} tokens", limits)
        try:
            inline = inline and sum(map(len, texts)) <= _ENCODE_INLINE_CHARACTERS
            return np.asarray(encode() if inline else await asyncio.to_thread(encode), np.int32)
        except EngineError as error:
            raise _invalid(field, str(error)) from error

    def _room(self, field: str, prompt_tokens: int) -> int:
        """Tokens that the answer to a prompt of so many may have."""
        limits = self._limits()
        if prompt_tokens == 0:
            raise _invalid(field, "encodes to no token")
        if prompt_tokens > limits.prompt:
            raise ApiError(
                400,
                f"{field}: {prompt_tokens} tokens; a context instance holds {limits.prompt}",
                param=field,
                code="context_length_exceeded",
            )
        if prompt_tokens >= limits.total:
            raise ApiError(
                400, f"{field}: {prompt_tokens} tokens leave no room for an answer; prompt and answer together may "
                f"have {limits.total}", param=field, code="context_length_exceeded",
            )  # fmt: skip
        return limits.total - prompt_tokens

    @staticmethod
    def _check_wanted(field: str, wanted: int, room: int, prompt_tokens: int) -> None:
        if wanted > room:
            raise ApiError(
                400, f"{field}: {wanted} after a prompt of {prompt_tokens} tokens exceeds the {room + prompt_tokens} "
                "that prompt and answer together may have", param=field, code="context_length_exceeded",
            )  # fmt: skip

    def _call(
        self,
        request: openai.ChatRequest | openai.CompletionRequest,
        prompt: npt.NDArray[np.int32],
        wanted: int,
        accepted: float,
        caller: Caller,
        *,
        chat: bool,
    ) -> Call:
        if any(token >= self._model.vocab_size for token in request.stop_token_ids):
            raise _invalid("stop_token_ids", f"must be in 0..{self._model.vocab_size - 1}")
        # End tokens are resolved here, once: behind this point a request stops at its stop tokens and nothing else.
        ends = dict.fromkeys(request.stop_token_ids)
        if not request.ignore_eos:
            ends.update(dict.fromkeys(self._model.eos_token_ids))
        made = Request(
            request_id=self._ids.next_id(),
            token_ids=prompt,
            sampling=SamplingParams(
                max_tokens=wanted,
                temperature=1.0 if request.temperature is None else request.temperature,
                top_p=1.0 if request.top_p is None else request.top_p,
                seed=openai.seed_of(request),
                ignore_eos=True,
                stop_token_ids=tuple(ends),
            ),
            schedule_style=self._schedule_style,
            conversation_id=self._tenants.conversation(caller, request.conversation_id),
            cache_salt=self._tenants.cache_salt(caller),
        )
        options = request.stream_options
        return Call(
            job=Job(made, deadline=accepted + self._request_timeout_s, accepted=accepted),
            caller=caller,
            stream=bool(request.stream),
            with_usage=bool(options is not None and options.include_usage),
            with_ids=bool(request.return_token_ids),
            stops=openai.stop_strings(request),
            end_token_ids=frozenset(ends),
            shape=openai.Shape(
                chat=chat, answer_id=f"{made.request_id:x}", created=int(time.time()), model=self._served_name
            ),
        )


def _invalid(field: str, words: str) -> ApiError:
    return ApiError(400, f"{field}: {words}", param=field, code="invalid_value")


def _too_long(field: str, what: str, limits: TokenLimits) -> ApiError:
    return ApiError(
        400,
        f"{field}: {what}; prompt and answer together may have {limits.total} tokens",
        param=field,
        code="context_length_exceeded",
    )
