"""The engine interface: what a rank's executor needs of whatever computes.

A step is a batch of sequences, each with the tokens that it adds and the table of KV blocks that holds it. Prefill
chunks and decode steps are the same thing with different token counts. On the first stage of a pipeline a step starts
from token ids; on the others from the activations of the stage before. ``launch`` returns at once: the caller polls
the handle and does its own work meanwhile.

Source: docs/design.md of this package, section "Engine".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from meta_executor.engine.errors import StepError
from meta_executor.wire import LOGPROBS_MAX, TokenLogprobs

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class ModelInfo:
    """A model's shape.

    Attributes:
        name: Name under which it is served unless configured otherwise.
        layer_count: Decoder layers of the whole model (count).
        hidden_size: Width of an activation row (elements).
        attention_head_count: Query heads (count).
        kv_head_count: Key/value heads (count).
        head_dim: Elements of one head's key (count).
        vocab_size: Logits per row (count).
        context_tokens_max: Longest prompt and answer together that the model was made for (tokens).
        kv_dtype: Element type of the KV memory, such as ``float32``.
        bos_token_id: First token of a text, or None if the model has none.
        eos_token_ids: Tokens that end an answer.
    """

    name: str
    layer_count: int
    hidden_size: int
    attention_head_count: int
    kv_head_count: int
    head_dim: int
    vocab_size: int
    context_tokens_max: int
    kv_dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class StageSpec:
    """The consecutive layers of one pipeline stage.

    Attributes:
        stage_index: Place in the pipeline, 0-based.
        stage_count: Stages of the pipeline (count).
        first_layer: First decoder layer of this stage, 0-based.
        layer_count: Decoder layers of this stage (count).
    """

    stage_index: int
    stage_count: int
    first_layer: int
    layer_count: int

    @property
    def is_first(self) -> bool:
        """Whether this stage starts from token ids."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage makes tokens."""
        return self.stage_index == self.stage_count - 1

    @property
    def layers(self) -> range:
        """Indices of this stage's decoder layers in the whole model."""
        return range(self.first_layer, self.first_layer + self.layer_count)

    @staticmethod
    def split(layer_count: int, stage_count: int) -> tuple[StageSpec, ...]:
        """Split a model's layers as evenly as they go; earlier stages take the remainder.

        The last stage also projects to the vocabulary, so it is right that it is never the larger one.

        Raises:
            ValueError: Fewer layers than stages, or no stage.
        """
        if not 1 <= stage_count <= layer_count:
            raise ValueError(f"stage_count must be in 1..{layer_count} (the layers), got {stage_count}")
        base, extra = divmod(layer_count, stage_count)
        stages = []
        first = 0
        for index in range(stage_count):
            count = base + (index < extra)
            stages.append(StageSpec(index, stage_count, first, count))
            first += count
        return tuple(stages)


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when an answer ends.

    Attributes:
        max_tokens: Longest answer (tokens), >= 1.
        temperature: 0 is greedy; else logits are divided by it.
        top_p: Smallest set of tokens with at least this share of the probability (0–1], of those that ``top_k`` and ``min_p``
            leave.
        seed: With the token's position, the only source of randomness.
        ignore_eos: Go on past the model's end tokens.
        stop_token_ids: Further tokens that end the answer.
        top_k: Only so many of the likeliest tokens (count); 0: all.
        min_p: Only tokens with at least this share of the likeliest one's probability [0–1].
        min_tokens: The first so many tokens of the answer are none that ends it (count).
        presence_penalty: Taken from the logit of every token that the answer has already.
        frequency_penalty: Taken from it once for each time.
        repetition_penalty: Logits of tokens of prompt and answer are divided by it where positive, else multiplied (> 0).
        logit_bias: (token, what is added to its logit).
        logprobs: Tell each token's log probability, and so many of the likeliest ones' (count); None: none.
        prompt_logprobs: The same of the prompt's tokens, the second and those after it; None: none. The prompt is then computed
            whole, whatever of it is cached.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    top_k: int = 0
    min_p: float = 0.0
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be >= 1, got {self.max_tokens}")
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be finite and >= 0, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0, got {self.top_k}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"min_tokens must be in 0..max_tokens ({self.max_tokens}), got {self.min_tokens}")
        if not 0.0 < self.repetition_penalty < float("inf"):
            raise ValueError(f"repetition_penalty must be finite and > 0, got {self.repetition_penalty}")
        numbers = (self.presence_penalty, self.frequency_penalty, *(bias for _, bias in self.logit_bias))
        if not all(-float("inf") < number < float("inf") for number in numbers):
            raise ValueError("presence_penalty, frequency_penalty and logit_bias must be finite")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and not 0 <= count <= LOGPROBS_MAX:
                raise ValueError(f"{name} must be in 0..{LOGPROBS_MAX}, got {count}")

    @property
    def largest_wins(self) -> bool:
        """The token is the largest logit as the model made it, and nothing is told of it."""
        return self.temperature == 0.0 and not self.changes_logits and self.logprobs is None

    @property
    def changes_logits(self) -> bool:
        """Something besides temperature comes between the model's logits and the choice; it wants to know :class:`Told`."""
        return self.penalised or bool(self.logit_bias) or self.min_tokens > 0

    @property
    def penalised(self) -> bool:
        """What the answer has already counts."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


@dataclass(frozen=True)
class Told:
    """What a sequence has before the token that is to be chosen.

    Attributes:
        prompt: Token ids, int32, shape (tokens,).
        answer: Token ids of the answer so far: the caller's own list, which must not change while a step runs.
    """

    prompt: Int32Array
    answer: list[int]


@dataclass(frozen=True)
class SequenceStep:
    """One sequence's part of a step.

    Attributes:
        request_id: Whose tokens these are; the engine only hands it through.
        token_ids: Tokens that are added, int32, shape (tokens,), tokens >= 1.
        start_position: Position of the first of them (tokens already in the KV memory).
        block_ids: KV blocks of the sequence in order, int64, shape (blocks,); they cover every position up to the
            last added one. More blocks than needed are allowed.
        sampling: How to choose the next token; None: no token is wanted (a prompt's chunk that is not its last).
        told: What the sequence has so far, where ``sampling`` changes logits, and the prompt where ``scored`` is set.
        scored: These are tokens of a prompt: tell the log probability of each next token of it, and so many of the likeliest
            ones' (count); None: tell none.
    """

    request_id: int
    token_ids: Int32Array
    start_position: int
    block_ids: Int64Array
    sampling: SamplingParams | None = None
    told: Told | None = None
    scored: int | None = None

    @property
    def end_position(self) -> int:
        """Position after the last added token: that of the token which this step chooses."""
        return self.start_position + len(self.token_ids)


@dataclass(frozen=True)
class StepInput:
    """One step of one stage, in columns: one entry per sequence, in the order of activations and results.

    Attributes:
        step_id: The caller's name of the step; handed through.
        request_ids: Whose sequences these are, int64, shape (sequences,); the engine only names them in errors.
        token_ids: Tokens that are added, sequence after sequence, int32, shape (tokens,).
        counts: Tokens that each sequence adds, int64, shape (sequences,), >= 1.
        starts: Position of each sequence's first added token, int64, shape (sequences,).
        block_tables: KV blocks of each sequence in order, int64, shape (sequences, width). A row's entries behind the last
            position that the step adds are not looked at.
        sampling: How to choose each sequence's next token; None: no token is wanted (a prompt's chunk that is not its last).
        hidden: Activations of the previous stage, float32, shape (tokens, hidden); None on the first stage.
        want_logits: Also return the logits of each sequence's last position (for tests; costs a copy).
        told: What each sequence has so far; only looked at where its sampling changes logits or it is scored.
        scored: See :class:`SequenceStep`; by index of the sequence.
    """

    step_id: int
    request_ids: Int64Array
    token_ids: Int32Array
    counts: Int64Array
    starts: Int64Array
    block_tables: Int64Array
    sampling: tuple[SamplingParams | None, ...]
    hidden: Float32Array | None = None
    want_logits: bool = False
    told: tuple[Told | None, ...] = ()
    scored: Mapping[int, int] = field(default_factory=dict)

    @staticmethod
    def of(
        step_id: int,
        sequences: Iterable[SequenceStep],
        hidden: Float32Array | None = None,
        want_logits: bool = False,
    ) -> StepInput:
        """The columns of sequences that were described one by one."""
        rows = tuple(sequences)
        width = max((len(row.block_ids) for row in rows), default=0)
        tables = np.full((len(rows), width), -1, np.int64)
        for table, row in zip(tables, rows):
            table[: len(row.block_ids)] = row.block_ids
        return StepInput(
            step_id=step_id,
            request_ids=np.array([row.request_id for row in rows], np.int64),
            token_ids=np.concatenate([row.token_ids for row in rows]) if rows else np.empty(0, np.int32),
            counts=np.array([len(row.token_ids) for row in rows], np.int64),
            starts=np.array([row.start_position for row in rows], np.int64),
            block_tables=tables,
            sampling=tuple(row.sampling for row in rows),
            hidden=hidden,
            want_logits=want_logits,
            told=tuple(row.told for row in rows),
            scored={index: row.scored for index, row in enumerate(rows) if row.scored is not None},
        )

    def targets(self, index: int) -> Int32Array:
        """Of a sequence that is scored: the prompt's tokens after each of those that it adds, int32, shape (tokens,).

        One less than it adds where these reach the prompt's end.
        """
        told = self.told[index]
        if told is None:
            raise StepError(
                f"step {self.step_id}, request {self.request_ids[index]}: told, which holds the scored prompt, is missing"
            )
        return told.prompt[int(self.starts[index]) + 1 : int(self.ends[index]) + 1]

    @property
    def sequence_count(self) -> int:
        """Sequences of the step."""
        return len(self.counts)

    @property
    def token_count(self) -> int:
        """Tokens of all sequences."""
        return len(self.token_ids)

    @cached_property
    def ends(self) -> Int64Array:
        """Position after each sequence's last added token: that of the token which the step chooses, shape (sequences,)."""
        return self.starts + self.counts

    @cached_property
    def row_ends(self) -> Int64Array:
        """Row of the step after each sequence's last one, shape (sequences,)."""
        return np.cumsum(self.counts)

    @cached_property
    def positions(self) -> Int64Array:
        """Position of each added token in its own sequence, shape (tokens,)."""
        return np.arange(self.token_count) + np.repeat(self.ends - self.row_ends, self.counts)

    @cached_property
    def owners(self) -> Int64Array:
        """Index of the sequence that each added token belongs to, shape (tokens,)."""
        return np.repeat(np.arange(self.sequence_count), self.counts)


@dataclass(frozen=True)
class StepOutput:
    """What a step made.

    Attributes:
        step_id: The step's.
        hidden: Activations for the next stage, float32, shape (tokens, hidden); None on the last stage.
        token_ids: Chosen tokens, int32, shape (sequences,); -1 where none was wanted; None before the last stage.
        margins: Difference of the two largest logits, float32, shape (sequences,); 0 where no token was wanted.
        logits: float32, shape (sequences, vocabulary), if they were wanted.
        logprobs: By index of the sequence, where its sampling asks for them.
        prompt_logprobs: By index of the sequence, where it is scored: of each token of :meth:`StepInput.targets`.
    """

    step_id: int
    hidden: Float32Array | None = None
    token_ids: Int32Array | None = None
    margins: Float32Array | None = None
    logits: Float32Array | None = None
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)


class StepHandle(Protocol):
    """A launched step."""

    def done(self) -> bool:
        """Whether the step has ended, well or not. Never blocks."""
        ...

    def add_done_callback(self, call: Callable[[], None]) -> None:
        """Call this once the step has ended on the host, from the engine's thread; at once if it has. A step whose end on a
        device comes later is to be polled from then on."""
        ...

    def result(self) -> StepOutput:
        """The step's output; waits for it if need be.

        Raises:
            StepError: The step broke the contract; the engine goes on.
            Exception: Whatever else the step met.
        """
        ...


@dataclass(frozen=True)
class KVMemory:
    """The paged KV memory of one stage, described by addresses and strides.

    The element of (local layer l, block b, key 0 or value 1, token t, head h, element e) lies at
    ``layer_base_addresses[l] + b*block_stride_bytes + kv*kv_stride_bytes + t*token_stride_bytes + h*head_stride_bytes
    + e*element_bytes``.

    Attributes:
        block_count: Blocks of each layer (count).
        block_tokens: Tokens of one block (count).
        layer_base_addresses: One address per local layer (bytes).
        block_stride_bytes: From one block to the next.
        kv_stride_bytes: From a block's keys to its values.
        head_stride_bytes: From one KV head to the next.
        token_stride_bytes: From one token to the next.
        kv_head_count: KV heads (count).
        head_dim: Elements of one head (count).
        element_bytes: Size of one element.
        memory_kind: ``DRAM`` or ``VRAM``.
        device_id: Index of the device; 0 for DRAM.
        regions: (address, bytes) of every allocation, to be registered for transfers.
        owner: Keeps the memory alive; not to be touched otherwise.
    """

    block_count: int
    block_tokens: int
    layer_base_addresses: tuple[int, ...]
    block_stride_bytes: int
    kv_stride_bytes: int
    head_stride_bytes: int
    token_stride_bytes: int
    kv_head_count: int
    head_dim: int
    element_bytes: int
    memory_kind: Literal["DRAM", "VRAM"]
    device_id: int
    regions: tuple[tuple[int, int], ...]
    owner: Any = field(repr=False, compare=False)

    @property
    def total_bytes(self) -> int:
        """Bytes of all regions."""
        return sum(size for _, size in self.regions)


class Engine(Protocol):
    """One stage of one model."""

    model: ModelInfo
    stage: StageSpec

    def allocate_kv(self, block_count: int, block_tokens: int) -> KVMemory:
        """Make the stage's KV memory, zeroed. Once, before the first launch."""
        ...

    def launch(self, step: StepInput) -> StepHandle:
        """Start a step and return at once. Steps run in the order of their launches."""
        ...

    def close(self) -> None:
        """End the engine's threads after the steps that were launched. Idempotent."""
        ...


def check_step(step: StepInput, stage: StageSpec, model: ModelInfo, block_count: int, block_tokens: int) -> None:
    """Refuse a step that would read or write outside the KV memory or the vocabulary.

    Raises:
        StepError: Names the request and the field.
    """
    count = step.sequence_count
    if count == 0:
        raise StepError(f"step {step.step_id}: no sequence")
    _check_shapes(step)

    def refuse(bad: npt.NDArray[np.bool_], say: Callable[[int], str]) -> None:
        if bad.any():
            index = int(np.argmax(bad))
            raise StepError(f"step {step.step_id}, request {step.request_ids[index]}: {say(index)}")

    refuse(step.counts < 1, lambda i: f"token_ids must have shape (tokens,) with tokens >= 1, got {step.counts[i]}")
    if int(step.counts.sum()) != step.token_count:
        raise StepError(f"step {step.step_id}: counts sum to {int(step.counts.sum())}, token_ids {step.token_count}")
    if stage.is_first:
        outside = (step.token_ids < 0) | (step.token_ids >= model.vocab_size)
        if outside.any():
            request_id = step.request_ids[step.owners[int(np.argmax(outside))]]
            raise StepError(f"step {step.step_id}, request {request_id}: token_ids outside 0..{model.vocab_size - 1}")
    refuse(step.starts < 0, lambda i: f"start_position {step.starts[i]} is negative")
    refuse(
        step.ends > model.context_tokens_max,
        lambda i: f"position {step.ends[i]} beyond the model's {model.context_tokens_max}",
    )
    needed = -(-step.ends // block_tokens)
    held = (step.block_tables >= 0).sum(axis=1)
    refuse(
        held < needed,
        lambda i: f"{held[i]} blocks of {block_tokens} do not hold {step.ends[i]} tokens",
    )
    used = np.arange(step.block_tables.shape[1]) < needed[:, None]
    refuse(
        np.any(used & ((step.block_tables < 0) | (step.block_tables >= block_count)), axis=1),
        lambda i: f"block_ids outside 0..{block_count - 1}",
    )
    if stage.is_first:
        if step.hidden is not None:
            raise StepError(f"step {step.step_id}: the first stage takes no activations")
    else:
        want = (step.token_count, model.hidden_size)
        if step.hidden is None or step.hidden.shape != want or step.hidden.dtype != np.float32:
            got = None if step.hidden is None else (step.hidden.shape, str(step.hidden.dtype))
            raise StepError(f"step {step.step_id}: hidden must be float32 {want}, got {got}")


def _check_shapes(step: StepInput) -> None:
    count = step.sequence_count
    if step.token_ids.ndim != 1:
        raise StepError(f"step {step.step_id}: token_ids must have shape (tokens,), got {step.token_ids.shape}")
    for name in ("request_ids", "counts", "starts"):
        if getattr(step, name).shape != (count,):
            raise StepError(f"step {step.step_id}: {name} must have shape ({count},), got {getattr(step, name).shape}")
    if step.block_tables.ndim != 2 or len(step.block_tables) != count:
        raise StepError(
            f"step {step.step_id}: block_tables must have shape ({count}, width), got {step.block_tables.shape}"
        )
    if len(step.sampling) != count:
        raise StepError(f"step {step.step_id}: sampling must have {count} entries, got {len(step.sampling)}")
    for index, one in enumerate(step.sampling):
        wanted = index in step.scored or (one is not None and one.changes_logits)
        if wanted and (len(step.told) != count or step.told[index] is None):
            raise StepError(
                f"step {step.step_id}, request {step.request_ids[index]}: told, which its sampling looks at, is missing"
            )
