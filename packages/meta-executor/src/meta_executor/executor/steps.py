"""One step on one rank: what the schedule says, what the engine gets, what became of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from meta_executor.engine.base import SamplingParams, SequenceStep, StepHandle, StepInput
from meta_executor.executor.links import Float32Array
from meta_executor.executor.messages import Part, Schedule, pack_blocks
from meta_executor.executor.ownership import Registry, Request, Sequence
from meta_executor.executor.scheduler import Chunk


@dataclass(slots=True)
class Step:
    """A step that this rank has yet to launch or has launched.

    ``handle`` None after the launch: nothing is computed here, because an earlier stage or this one could not.
    """

    schedule: Schedule
    activations: Float32Array | None
    handle: StepHandle | None = None
    failed: str = ""
    #: Its sequences are activated on this rank (mirroring ranks).
    activated: bool = False
    launched_s: float = 0.0

    def done(self) -> bool:
        """Whether the engine has ended it. Never blocks."""
        return self.handle is None or self.handle.done()


def make_schedule(step_id: int, chunks: Iterable[Chunk], registry: Registry) -> Schedule:
    """The schedule of a plan; a sequence's first part carries its whole block table."""
    parts = []
    for chunk in chunks:
        sequence = registry.require(chunk.request_id)
        first = sequence.last_step_id < 0
        parts.append(
            Part(
                request_id=chunk.request_id,
                start=chunk.start,
                count=chunk.count,
                wants_token=chunk.wants_token,
                first=first,
                blocks=pack_blocks(sequence.block_ids) if first else b"",
                shared_count=sequence.shared_blocks if first else 0,
            )
        )
    return Schedule(step_id, tuple(parts))


def sampling_of(request: Request) -> SamplingParams:
    """How the request's tokens are chosen. End tokens were resolved at admission into ``stop_token_ids``."""
    return SamplingParams(
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        seed=request.seed,
        ignore_eos=True,
        stop_token_ids=request.stop_token_ids,
    )


def step_input(step: Step, registry: Registry) -> StepInput:
    """What the engine gets. Only planning and first stages look at the token values; the others carry them along."""
    sequences = []
    for part in step.schedule.parts:
        sequence = registry.require(part.request_id)
        sequences.append(
            SequenceStep(
                request_id=part.request_id,
                token_ids=tokens_of(sequence, part.start, part.count),
                start_position=part.start,
                block_ids=sequence.block_array(),
                sampling=sampling_of(sequence.request) if part.wants_token else None,
            )
        )
    return StepInput.of(step.schedule.step_id, sequences, step.activations)


def tokens_of(sequence: Sequence, start: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Tokens [start, start + count) of a sequence: int32, shape (count,)."""
    prompt_count = sequence.request.prompt_count
    if start >= prompt_count:
        begin = start - prompt_count
        return np.asarray(sequence.generated[begin : begin + count], dtype=np.int32)
    if start + count <= prompt_count:
        return sequence.request.token_ids[start : start + count]
    tail = sequence.generated[: start + count - prompt_count]
    return np.concatenate([sequence.request.token_ids[start:], np.asarray(tail, dtype=np.int32)])
