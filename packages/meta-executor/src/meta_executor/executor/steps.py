"""One pipeline step on one rank: what the schedule says, what the engine gets, what became of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from meta_executor.engine.base import SequenceStep, StepHandle, StepInput, StepOutput, Told
from meta_executor.executor.links import Float32Array
from meta_executor.executor.messages import Part, Schedule, pack_blocks
from meta_executor.executor.ownership import Registry, Sequence
from meta_executor.executor.scheduler import Chunk

#: Steps given to the engine at once on one rank (count): the next one waits ready in its queue while one runs.
LAUNCHED_MAX = 2


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

    def output(self, rank: int) -> StepOutput | None:
        """What the engine made; None, with ``failed`` set, when it could not."""
        if self.handle is None:
            return None
        output, self.failed = output_of(self.handle, rank)
        return output


def output_of(handle: StepHandle, rank: int) -> tuple[StepOutput | None, str]:
    """A step's output, or None and why there is none: whatever the engine met ends the step's requests, with its words."""
    try:
        return handle.result(), ""
    except Exception as error:  # noqa: BLE001 - told to the clients of this step; the engine goes on
        return None, f"rank {rank}: {type(error).__name__}: {error}"


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


def step_input(step: Step, registry: Registry) -> StepInput:
    """What the engine gets. Only first stages look at the token values; the others carry them along."""
    sequences = (prompt_part(registry.require(part.request_id), part) for part in step.schedule.parts)
    return StepInput.of(step.schedule.step_id, sequences, step.activations)


def prompt_part(sequence: Sequence, part: Part | Chunk) -> SequenceStep:
    """What a step computes of one prompt."""
    sampling = sequence.request.sampling
    return SequenceStep(
        request_id=part.request_id,
        token_ids=sequence.request.token_ids[part.start : part.start + part.count],
        start_position=part.start,
        block_ids=sequence.block_array(),
        sampling=sampling if part.wants_token else None,
        # Nothing of the answer is known.
        told=Told(sequence.request.token_ids, []) if part.wants_token or sampling.prompt_logprobs is not None else None,
        scored=sampling.prompt_logprobs,
    )


def first_of(step: Step, output: StepOutput | None, index: int) -> int | None:
    """The token that a step made for its part of that index, if it made one."""
    if output is None or output.token_ids is None or not step.schedule.parts[index].wants_token:
        return None
    return int(np.asarray(output.token_ids)[index])
