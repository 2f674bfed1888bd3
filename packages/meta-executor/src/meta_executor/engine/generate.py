"""One prompt in one process: the reference that a disaggregated answer must equal, token for token.

The same engines, scheduler-free: the prompt in chunks, then one token at a time. Several engines in a row are the
stages of a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from meta_executor.config import EngineConfig
from meta_executor.engine.base import (
    Engine,
    SamplingParams,
    SequenceStep,
    StageSpec,
    StepInput,
    StepOutput,
    Told,
)
from meta_executor.engine.errors import StepError
from meta_executor.engine.factory import create_engine, model_info
from meta_executor.engine.kv_pool import BlockPool
from meta_executor.engine.sampling import FinishReason, finish_reason
from meta_executor.engine.tokenizer import StopStrings, Tokenizer
from meta_executor.wire import TokenLogprobs


@dataclass(frozen=True)
class GenerateResult:
    """An answer.

    Attributes:
        prompt_token_ids: What was asked.
        token_ids: The answer's tokens, an end token included.
        text: The answer's text, cut before a stop string.
        finish_reason: ``stop`` or ``length``.
        margin_min: Smallest difference of the two largest logits over the answer's tokens.
        logprobs: Of each token, where the sampling asks for them.
        prompt_logprobs: Of the prompt's tokens behind the first, where the sampling asks for them.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    margin_min: float
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class Chosen(NamedTuple):
    """A step's token: its id, how far it was from another one, and what is told of it; of a prompt also what is told of its
    tokens."""

    token: int
    margin: float
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class SequenceRunner:
    """Runs single sequences on an engine, or on the stages of a pipeline, with KV memory of its own.

    Args:
        engines: Stages in order; their KV memory is allocated here.
        block_count: KV blocks (count).
        block_tokens: Tokens of one block (count).
        chunk_tokens: Longest prompt chunk (tokens).
    """

    def __init__(
        self, engines: Engine | Sequence[Engine], *, block_count: int, block_tokens: int = 16, chunk_tokens: int = 256
    ) -> None:
        self._engines: tuple[Engine, ...] = tuple(engines) if isinstance(engines, Sequence) else (engines,)
        self.model = self._engines[0].model
        self._chunk_tokens = chunk_tokens
        self.pool = BlockPool(block_count, block_tokens)
        self.memories = tuple(engine.allocate_kv(block_count, block_tokens) for engine in self._engines)
        self._steps = 0

    def step(self, sequences: Sequence[SequenceStep], *, want_logits: bool = False) -> StepOutput:
        """One step through every stage."""
        hidden = None
        output = StepOutput(self._steps)
        for engine in self._engines:
            output = engine.launch(StepInput.of(self._steps, sequences, hidden, want_logits)).result()
            hidden = output.hidden
        self._steps += 1
        return output

    def prefill(self, request_id: int, token_ids: Sequence[int], sampling: SamplingParams) -> Chosen:
        """Run a prompt; gives its first token."""
        tokens = np.asarray(token_ids, dtype=np.int32)
        if len(tokens) == 0:
            raise StepError("an empty prompt")
        capacity = len(tokens) + sampling.max_tokens
        blocks = np.asarray(self.pool.acquire(request_id, tokens.tolist(), capacity).block_ids, dtype=np.int64)
        told: list[TokenLogprobs] = []
        for start in range(0, len(tokens), self._chunk_tokens):
            part = tokens[start : start + self._chunk_tokens]
            wanted = sampling if start + len(part) == len(tokens) else None
            scored = sampling.prompt_logprobs
            output = self.step([SequenceStep(request_id, part, start, blocks, wanted, Told(tokens, []), scored)])
            told += output.prompt_logprobs.get(0, ())
        return _token(output)._replace(prompt_logprobs=tuple(told))

    def decode(
        self, request_id: int, token_id: int, position: int, sampling: SamplingParams, told: Told | None = None
    ) -> Chosen:
        """Add one token.

        Args:
            request_id: As in :meth:`prefill`.
            token_id: The newest token.
            position: Its position.
            sampling: The request's.
            told: Its prompt and answer so far, where the sampling changes logits.
        """
        blocks = np.asarray(self.pool.table(request_id), dtype=np.int64)
        part = np.asarray([token_id], dtype=np.int32)
        return _token(self.step([SequenceStep(request_id, part, position, blocks, sampling, told)]))

    def close(self) -> None:
        """Close the engines."""
        for engine in self._engines:
            engine.close()


def generate(
    engine: Engine | Sequence[Engine] | SequenceRunner,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    sampling: SamplingParams,
    *,
    stop: Sequence[str] = (),
    chunk_tokens: int = 256,
    on_text: Callable[[str], None] | None = None,
) -> GenerateResult:
    """Answer one prompt.

    Args:
        engine: An engine, the stages of a pipeline, or a runner that is reused between prompts.
        tokenizer: The model's.
        prompt: Plain text, or token ids (from a chat template, say).
        sampling: How to choose, when to end.
        stop: Strings that end the answer.
        chunk_tokens: Longest prompt chunk (tokens); ignored with a runner.
        on_text: Called with each piece of text as it comes.

    Raises:
        StepError: The prompt is empty, or with the answer longer than the model's context.
    """
    token_ids = tokenizer.encode_user_text(prompt) if isinstance(prompt, str) else list(prompt)
    if isinstance(engine, SequenceRunner):
        runner = engine
    else:
        capacity = len(token_ids) + sampling.max_tokens
        runner = SequenceRunner(engine, block_count=-(-capacity // 16), chunk_tokens=chunk_tokens)
    model = runner.model
    if len(token_ids) + sampling.max_tokens > model.context_tokens_max:
        raise StepError(
            f"prompt of {len(token_ids)} tokens and max_tokens {sampling.max_tokens} exceed the model's context of "
            f"{model.context_tokens_max}"
        )
    if not sampling.ignore_eos:
        # As an instance does it: end tokens are stop tokens, which min_tokens bars from the choice.
        ends = tuple(dict.fromkeys((*sampling.stop_token_ids, *model.eos_token_ids)))
        sampling = replace(sampling, ignore_eos=True, stop_token_ids=ends)
    detokenizer = tokenizer.detokenizer()
    stops = StopStrings(stop)
    text: list[str] = []

    def tell(piece: str) -> None:
        if piece:
            text.append(piece)
            if on_text is not None:
                on_text(piece)

    request_id = 0
    try:
        chosen = runner.prefill(request_id, token_ids, sampling)
        prompt_logprobs = chosen.prompt_logprobs
        token, margin_min = chosen.token, chosen.margin
        answer, logprobs = [token], [chosen.logprobs]
        told = Told(np.asarray(token_ids, np.int32), answer)
        while True:
            reason = finish_reason(token, len(answer), sampling, ())
            tell(stops.push(detokenizer.push([token]), early=len(answer) <= sampling.min_tokens))
            if stops.hit is not None:
                reason = "stop"
            if reason is not None:
                break
            chosen = runner.decode(request_id, token, len(token_ids) + len(answer) - 1, sampling, told)
            token, margin_min = chosen.token, min(margin_min, chosen.margin)
            answer.append(token)
            logprobs.append(chosen.logprobs)
    finally:
        runner.pool.release(request_id)
    tell(stops.push(detokenizer.finish()))
    tell(stops.finish())
    if stops.hit is not None:
        reason = "stop"
    known = tuple(one for one in logprobs if one is not None)
    return GenerateResult(tuple(token_ids), tuple(answer), "".join(text), reason, margin_min, known, prompt_logprobs)


def _token(output: StepOutput) -> Chosen:
    if output.token_ids is None or output.margins is None:
        return Chosen(-1, 0.0)
    return Chosen(int(output.token_ids[0]), float(output.margins[0]), output.logprobs.get(0))


def generate_text(
    config: EngineConfig, prompt: str, sampling: SamplingParams, *, chat: bool = False, stop: Sequence[str] = ()
) -> GenerateResult:
    """Load a model, answer one prompt, close: what ``meta-executor generate`` does.

    Args:
        config: Engine and model.
        prompt: The user's text.
        sampling: How to choose, when to end.
        chat: Put the prompt into the model's chat template as a user's message.
        stop: Strings that end the answer.

    Raises:
        EngineError: The model cannot be loaded, or the prompt does not fit.
    """
    info = model_info(config)
    synthetic = config.kind == "synthetic"
    tokenizer = Tokenizer.synthetic(info.vocab_size) if synthetic else Tokenizer.for_model(config.model)
    tokens = tokenizer.apply_chat_template([{"role": "user", "content": prompt}]) if chat else prompt
    engine = create_engine(config, StageSpec.split(info.layer_count, 1)[0])
    try:
        return generate(engine, tokenizer, tokens, sampling, stop=stop)
    finally:
        engine.close()
