"""From a body to a call that can be served, or to an error that names the field.

Everything that costs time in proportion to a body comes after a bound on it: the body's size, the size of what is only
looked at (a raw slice of it), the least number of tokens that a text of its length can have. A prompt of token ids is
counted before it is read, read by typed code, and is one int32 buffer from then on.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from endpoint_lifecycle import RequestIdGenerator
from meta_executor.config import FrontConfig
from meta_executor.engine.base import ModelInfo, SamplingParams
from meta_executor.engine.errors import EngineError
from meta_executor.engine.tokenizer import Tokenizer
from meta_executor.executor.request import Request, ScheduleStyle
from meta_executor.front import openai
from meta_executor.front.dispatch import Job
from meta_executor.front.openai import ApiError
from meta_executor.front.routers import BlockNames
from meta_executor.front.servers import TokenLimits
from meta_executor.front.shapes import Shape
from meta_executor.front.tenants import Tenants
from meta_executor.listener.access import Caller
from meta_executor.listener.reading import BodyDecoder, StructureError

#: Prompts of more characters are encoded in a thread, so that they do not hold up the streams of others; shorter ones take two
#: milliseconds at most, whatever they hold.
_ENCODE_INLINE_CHARACTERS = 2048
#: Longer ones are looked at before they are encoded: every token takes a hundred bytes while it is made.
_LOOK_CHARACTERS = 32 * 1024
#: Conversations of more messages are written out in a thread as well.
_ENCODE_INLINE_MESSAGES = 64
#: More tokens become text in a thread, too.
_DECODE_INLINE_TOKENS = 2048
#: Members of a body (count): so many for each token that may be asked for, and so many besides.
_ELEMENTS_PER_TOKEN, _ELEMENTS_BESIDES = 4, 1024
#: Numbers that are told of one prompt's tokens (count): each token's log probability, and those of the likeliest ones.
_PROMPT_NUMBERS_MAX = 2**16
#: Fewest tokens that a message of a conversation can have: two that frame it and one between.
_MESSAGE_TOKENS_MIN = 3


_Read = TypeVar("_Read")


@dataclass(frozen=True)
class Call:
    """A checked request.

    Attributes:
        jobs: Its answers to be made: those of the first prompt, then those of the second.
        candidates: Answers that are made of each prompt (count), and of which ``wanted`` are given, the best ones.
        wanted: Answers of each prompt that the client gets (count).
        caller: Who asks.
        stream: In pieces as they come.
        with_usage: The stream ends with its counts.
        with_counts: And every piece has those so far.
        with_ids: Tell token ids.
        with_logprobs: Tell log probabilities.
        echoes: What is put before the answers, by prompt; empty: nothing.
        with_prompt_logprobs: And those of the prompt, with the echo.
        no_tokens: The answer has none, and nothing is to be computed.
        tokens_max: Of an answer (count). One is made even where this is 0: the prompt's log probabilities come with it.
        stops: Stop strings.
        end_token_ids: Tokens that end an answer.
        shape: Of what is sent.
        request_id: Under which the client knows it.
        unknown: Names in the body that nobody here knows.
    """

    jobs: tuple[Job, ...]
    candidates: int
    wanted: int
    caller: Caller
    stream: bool
    with_usage: bool
    with_counts: bool
    with_ids: bool
    with_logprobs: bool
    echoes: tuple[str, ...]
    with_prompt_logprobs: bool
    no_tokens: bool
    tokens_max: int
    stops: tuple[str, ...]
    end_token_ids: frozenset[int]
    shape: Shape
    request_id: str
    unknown: tuple[str, ...]

    @property
    def deadline(self) -> float:
        """On the dispatcher's clock (s)."""
        return self.jobs[0].deadline

    @property
    def tokens_min(self) -> int:
        """The first so many tokens do not end an answer (count)."""
        return self.jobs[0].request.sampling.min_tokens


@dataclass(frozen=True)
class Asked:
    """What of a request is no matter of its body.

    Attributes:
        caller: Who sent it.
        accepted: When it came, on the dispatcher's clock (s).
        request_id: Under which the client knows it.
    """

    caller: Caller
    accepted: float
    request_id: str


@dataclass(frozen=True)
class _Wanted:
    """How many answers, how long, and what is told of them."""

    tokens: int
    candidates: int = 1
    answers: int = 1
    logprobs: int | None = None
    echo: bool = False

    @property
    def prompt_logprobs(self) -> int | None:
        """An echoed prompt is told of like the answer."""
        return self.logprobs if self.echo else None


class Checker:
    """See the module.

    Args:
        model: Shape of the model that is served.
        names: Names under which clients may ask for it, the one that is shown first.
        tokenizer: The model's.
        schedule_style: Order of the legs.
        config: Bounds.
        local_prefill_max: Prompts of at most so many tokens have no context leg (tokens).
        limits: What a request may have now.
        tenants: Keep clients apart.
        bodies: Decodes.
    """

    def __init__(
        self,
        *,
        model: ModelInfo,
        names: Sequence[str],
        tokenizer: Tokenizer,
        schedule_style: ScheduleStyle,
        config: FrontConfig,
        local_prefill_max: int,
        limits: Callable[[], TokenLimits],
        tenants: Tenants,
        bodies: BodyDecoder,
    ) -> None:
        self._model = model
        self._names = tuple(names)
        self._tokenizer = tokenizer
        self._schedule_style = schedule_style
        self._config = config
        self._local_prefill_max = local_prefill_max
        self._limits = limits
        self._tenants = tenants
        self._bodies = bodies
        self._ids = RequestIdGenerator(node_id=config.node_id)

    async def chat(self, body: bytes, asked: Asked) -> Call:
        """A body of ``POST /v1/chat/completions``.

        Raises:
            ApiError: Names the field.
        """
        strict = self._config.strict_fields
        request, unknown = await self._decoded(
            body, lambda text: openai.decode_request(text, openai.ChatRequest, strict=strict)
        )
        self._check_model(request.model)
        encoded = await self._conversation(request)
        named = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        room = self._room("messages", len(encoded), tokens == 0)
        if tokens is None:
            tokens = min(room, openai.CHAT_TOKENS_DEFAULT_MAX)
        self._check_tokens(named, tokens, room, len(encoded))
        if request.top_logprobs is not None and not request.logprobs:
            raise _invalid("top_logprobs", "only with logprobs true")
        wanted = _Wanted(
            tokens=tokens,
            candidates=request.n or 1,
            answers=request.n or 1,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        )
        self._check_answers(1, wanted, "n")
        return self._call(request, [encoded], wanted, asked, unknown, chat=True)

    async def completion(self, body: bytes, asked: Asked) -> Call:
        """A body of ``POST /v1/completions``.

        Raises:
            ApiError: Names the field.
        """
        limits = self._limits()

        def read(text: bytes) -> tuple[openai.CompletionRequest, tuple[str, ...], list[openai.Prompt]]:
            request, unknown = openai.decode_request(text, openai.CompletionRequest, strict=self._config.strict_fields)
            self._check_model(request.model)
            prompts_max = self._config.answers_max
            tokens_max = min(limits.prompt, limits.total)
            return request, unknown, openai.prompts_of(request, tokens_max=tokens_max, prompts_max=prompts_max)

        request, unknown, prompts = await self._decoded(body, read)
        answers = request.n or 1
        candidates = request.best_of or answers
        if candidates < answers:
            raise _invalid("best_of", f"must be at least n ({answers}), got {candidates}")
        if candidates > answers and request.stream:
            raise _invalid("best_of", "not with stream true: the best answer is known at the end only")
        wanted = _Wanted(
            tokens=openai.COMPLETION_TOKENS_DEFAULT if request.max_tokens is None else request.max_tokens,
            candidates=candidates,
            answers=answers,
            logprobs=request.logprobs,
            echo=bool(request.echo),
        )
        self._check_answers(len(prompts), wanted, "prompt" if candidates == 1 else "n" if request.n else "best_of")
        encoded = []
        # All of them count: many short ones are as much work as a long one.
        inline = sum(len(prompt) for prompt in prompts if isinstance(prompt, str)) <= _ENCODE_INLINE_CHARACTERS
        for prompt in prompts:
            tokens = await self._prompt(prompt, inline=inline)
            room = self._room("prompt", len(tokens), wanted.tokens == 0 and wanted.prompt_logprobs is None)
            self._check_tokens("max_tokens", wanted.tokens, room, len(tokens))
            numbers = len(tokens) * (1 + (wanted.prompt_logprobs or 0))
            if wanted.prompt_logprobs is not None and numbers > _PROMPT_NUMBERS_MAX:
                words = f"{numbers} log probabilities of one prompt, at most {_PROMPT_NUMBERS_MAX}"
                raise _invalid("logprobs", words)
            encoded.append(tokens)
        echoes: tuple[str, ...] = ()
        if wanted.echo:
            echoes = await made(
                lambda: tuple(self._tokenizer.decode(tokens.tolist()) for tokens in encoded), sum(map(len, encoded))
            )
        return self._call(request, encoded, wanted, asked, unknown, chat=False, echoes=echoes)

    async def tokenized(self, body: bytes) -> tuple[list[int], list[str] | None]:
        """A body of ``POST /tokenize``: the tokens that a completion or a chat would have, and their texts if they are wanted.

        Raises:
            ApiError: Names the field.
        """
        request = await self._decoded(body, lambda text: openai.decoded(text, openai.TokenizeRequest))
        self._check_model_if_given(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise _invalid("prompt", "want either prompt or messages")
        if request.prompt is not None:
            tokens = await self._prompt(request.prompt)
        else:
            conversation = openai.ChatRequest(
                model=self._names[0],
                messages=request.messages or [],
                add_generation_prompt=request.add_generation_prompt,
                chat_template_kwargs=request.chat_template_kwargs,
            )
            tokens = await self._conversation(conversation)
        ids = tokens.tolist()
        if not request.return_token_strs:
            return ids, None
        return ids, await made(lambda: [self._tokenizer.token_text(token)[0] for token in ids], len(ids))

    async def detokenized(self, body: bytes) -> str:
        """A body of ``POST /detokenize``: the text of its tokens.

        Raises:
            ApiError: Names the field.
        """
        limits = self._limits()

        def read(text: bytes) -> str:
            request = openai.decoded(text, openai.DetokenizeRequest)
            self._check_model_if_given(request.model)
            tokens = openai.token_ids_of(request.tokens, "tokens", tokens_max=limits.total)
            self._check_tokens_known("tokens", tokens)
            return self._tokenizer.decode(tokens.tolist())

        return await self._decoded(body, read)

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
        if name not in self._names:
            served = " or ".join(repr(one) for one in self._names)
            raise ApiError(
                404, f"model: {name!r} is not served here, {served} is", param="model", code="model_not_found"
            )

    def _check_model_if_given(self, name: str | None) -> None:
        if name is not None:
            self._check_model(name)

    async def _prompt(self, prompt: openai.Prompt, *, inline: bool = True) -> npt.NDArray[np.int32]:
        """One prompt's tokens."""
        if isinstance(prompt, str):
            return await self._encoded(
                lambda: self._tokenizer.encode_user_text(prompt), [prompt], "prompt", inline=inline
            )
        self._check_tokens_known("prompt", prompt)
        return prompt

    def _check_tokens_known(self, field: str, tokens: npt.NDArray[np.int32]) -> None:
        if len(tokens) and int(tokens.max()) >= self._model.vocab_size:
            raise _invalid(field, f"token ids must be in 0..{self._model.vocab_size - 1}")

    async def _conversation(self, request: openai.ChatRequest) -> npt.NDArray[np.int32]:
        """A conversation's tokens."""
        limits = self._limits()
        if len(request.messages) * _MESSAGE_TOKENS_MIN > min(limits.prompt, limits.total):
            raise _too_long("messages", f"{len(request.messages)} messages", limits)
        messages = openai.messages_of(request)
        variables = openai.template_variables(request)
        begins = request.add_generation_prompt is not False

        def encode() -> list[int]:
            return self._tokenizer.apply_chat_template(messages, add_generation_prompt=begins, variables=variables)

        texts = [message["content"] for message in messages]
        inline = len(messages) <= _ENCODE_INLINE_MESSAGES
        return await self._encoded(encode, texts, "messages", inline=inline)

    def _check_answers(self, prompts: int, wanted: _Wanted, field: str) -> None:
        """All answers of a request are made at once; more than may run are never begun."""
        most = min(self._config.answers_max, self._config.requests_per_client_max, self._config.max_requests)
        count = prompts * wanted.candidates
        if count > most:
            raise _invalid(field, f"{count} answers of one request, at most {most}")

    async def _encoded(
        self, encode: Callable[[], list[int]], texts: list[str], field: str, *, inline: bool = True
    ) -> npt.NDArray[np.int32]:
        limits = self._limits()
        most = min(limits.total, limits.prompt)
        at_least = sum(self._tokenizer.tokens_at_least(text) for text in texts)
        if at_least > most:
            # Known to be too long by its length alone: a prompt of megabytes is not encoded to find that out.
            raise _too_long(field, f"more than {at_least} tokens", limits)
        characters = sum(map(len, texts))

        def looked_at() -> list[int]:
            if characters > _LOOK_CHARACTERS and self._tokenizer.surely_more(texts, most):
                raise _too_long(field, f"more than {most} tokens", limits)
            return encode()

        try:
            inline = inline and characters <= _ENCODE_INLINE_CHARACTERS
            return np.asarray(encode() if inline else await asyncio.to_thread(looked_at), np.int32)
        except EngineError as error:
            raise _invalid(field, str(error)) from error

    def _room(self, field: str, prompt_tokens: int, no_tokens: bool) -> int:
        """Tokens that the answer to a prompt of so many may have; one without tokens needs no room."""
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
        if prompt_tokens >= limits.total + no_tokens:
            raise ApiError(
                400, f"{field}: {prompt_tokens} tokens leave no room for an answer; prompt and answer together may "
                f"have {limits.total}", param=field, code="context_length_exceeded",
            )  # fmt: skip
        return limits.total - prompt_tokens

    @staticmethod
    def _check_tokens(field: str, wanted: int, room: int, prompt_tokens: int) -> None:
        if wanted > room:
            raise ApiError(
                400, f"{field}: {wanted} after a prompt of {prompt_tokens} tokens exceeds the {room + prompt_tokens} "
                "that prompt and answer together may have", param=field, code="context_length_exceeded",
            )  # fmt: skip

    def _call(
        self,
        request: openai.ChatRequest | openai.CompletionRequest,
        prompts: Sequence[npt.NDArray[np.int32]],
        wanted: _Wanted,
        asked: Asked,
        unknown: tuple[str, ...],
        *,
        chat: bool,
        echoes: tuple[str, ...] = (),
    ) -> Call:
        sampling = self._sampling(request, wanted)
        jobs = []
        for prompt in prompts:
            names = BlockNames()
            for candidate in range(wanted.candidates):
                # The first answer is the one that a request for one answer gets.
                seed = (sampling.seed + candidate) % 2**63
                alone = len(prompt) <= self._local_prefill_max
                made = Request(
                    request_id=self._ids.next_id(),
                    token_ids=prompt,
                    sampling=sampling if not candidate else dataclasses.replace(sampling, seed=seed),
                    schedule_style="context_first" if alone else self._schedule_style,
                    prefills_here=alone,
                    conversation_id=self._tenants.conversation(asked.caller, request.conversation_id),
                    cache_salt=self._tenants.cache_salt(asked.caller),
                )
                deadline = asked.accepted + self._config.request_timeout_s
                jobs.append(Job(made, deadline=deadline, accepted=asked.accepted, block_names=names))
        options = request.stream_options
        with_usage = bool(options is not None and options.include_usage)
        return Call(
            jobs=tuple(jobs),
            candidates=wanted.candidates,
            wanted=wanted.answers,
            caller=asked.caller,
            stream=bool(request.stream),
            with_usage=with_usage,
            with_counts=with_usage and bool(options is not None and options.continuous_usage_stats),
            with_ids=bool(request.return_token_ids),
            with_logprobs=wanted.logprobs is not None,
            with_prompt_logprobs=sampling.prompt_logprobs is not None,
            echoes=echoes,
            no_tokens=wanted.tokens == 0 and sampling.prompt_logprobs is None,
            tokens_max=wanted.tokens,
            stops=openai.stop_strings(request),
            end_token_ids=frozenset(sampling.stop_token_ids),
            shape=Shape(chat=chat, answer_id=f"{jobs[0].request_id:x}", created=int(time.time()), model=request.model),
            request_id=asked.request_id,
            unknown=unknown,
        )

    def _sampling(self, request: openai.ChatRequest | openai.CompletionRequest, wanted: _Wanted) -> SamplingParams:
        if any(token >= self._model.vocab_size for token in request.stop_token_ids or ()):
            raise _invalid("stop_token_ids", f"must be in 0..{self._model.vocab_size - 1}")
        tokens = max(wanted.tokens, 1)
        tokens_min = request.min_tokens or 0
        if tokens_min > wanted.tokens:
            raise _invalid("min_tokens", f"must be at most the answer's length ({wanted.tokens}), got {tokens_min}")
        # End tokens are resolved here, once: behind this point a request stops at its stop tokens and nothing else.
        ends = dict.fromkeys(request.stop_token_ids or ())
        if not request.ignore_eos:
            ends.update(dict.fromkeys(self._model.eos_token_ids))
        logprobs = wanted.logprobs
        if logprobs is None and wanted.candidates > wanted.answers:
            # What the best answer is chosen by.
            logprobs = 0
        return SamplingParams(
            max_tokens=tokens,
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=max(request.top_k or 0, 0),
            min_p=request.min_p or 0.0,
            min_tokens=tokens_min,
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
            logit_bias=openai.logit_biases(request, vocab_size=self._model.vocab_size),
            logprobs=logprobs,
            prompt_logprobs=wanted.prompt_logprobs,
            seed=openai.seed_of(request),
            ignore_eos=True,
            stop_token_ids=tuple(ends),
        )


async def made(make: Callable[[], _Read], tokens: int) -> _Read:
    """What is made of so many tokens (count): here, or where that takes long in a thread."""
    return make() if tokens <= _DECODE_INLINE_TOKENS else await asyncio.to_thread(make)


def _invalid(field: str, words: str) -> ApiError:
    return ApiError(400, f"{field}: {words}", param=field, code="invalid_value")


def _too_long(field: str, what: str, limits: TokenLimits) -> ApiError:
    return ApiError(
        400,
        f"{field}: {what}; prompt and answer together may have {limits.total} tokens",
        param=field,
        code="context_length_exceeded",
    )
