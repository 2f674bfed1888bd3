"""Which tokens of which prompts the next step computes. Pure: the same sequences give the same plan.

Of a prompt's tokens, ``launched`` are already in a step. What is left may be computed now, as one chunk; a chunk that reaches
the last token asks for the first token of the answer.

Chunks go in order of activation. A step holds at most ``sequences_max`` sequences and ``tokens_max`` tokens; a prompt that
does not fit is cut into chunks. Rank 0 of a pipeline plans and the plan travels with the activations; the other ranks mirror
it and plan nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from meta_executor.executor.ownership import ACTIVE_STATES, PRE_ACTIVE_STATES, Sequence

_SCHEDULABLE = ACTIVE_STATES | PRE_ACTIVE_STATES


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What fits.

    Attributes:
        sequences_max: Sequences of one step (count), >= 1.
        tokens_max: Tokens of one step (count), >= 1.
        active_max: Activated sequences whose prompt is not computed yet (count): the compute cap.
        steps_in_flight_max: Steps launched whose result has not returned (count); a pipeline needs one per stage and one more.
        pre_active_max: Metadata-only window of the generation-first schedule (count).
    """

    sequences_max: int
    tokens_max: int
    active_max: int
    steps_in_flight_max: int
    pre_active_max: int

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    @staticmethod
    def for_instance(
        *, max_batch_size: int, max_num_tokens: int, stage_count: int, pre_active_requests: int | None
    ) -> StepLimits:
        """Limits of an instance. The compute cap is one batch per pipeline stage; None as window means the compute cap."""
        active_max = max_batch_size * stage_count
        return StepLimits(
            sequences_max=max_batch_size,
            tokens_max=max_num_tokens,
            active_max=active_max,
            steps_in_flight_max=1 if stage_count == 1 else stage_count + 1,
            pre_active_max=active_max if pre_active_requests is None else pre_active_requests,
        )


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, start + count) of one prompt. ``wants_token``: the chunk ends at its last token."""

    request_id: int
    start: int
    count: int
    wants_token: bool


def plan_step(sequences: Iterable[Sequence], limits: StepLimits) -> tuple[Chunk, ...]:
    """Plan one step.

    Args:
        sequences: Sequences that may compute, in order: activated ones, and selected ones that the step would activate.
            Those that ended early, are in another state, or whose prompt is launched as a whole are skipped.

    Returns:
        Chunks in the given order. Empty: nothing to compute now.
    """
    chunks: list[Chunk] = []
    tokens_left = limits.tokens_max
    for sequence in sequences:
        if len(chunks) == limits.sequences_max or tokens_left == 0:
            break
        left = sequence.request.prompt_count - sequence.launched
        if left <= 0 or sequence.state not in _SCHEDULABLE or sequence.ended_early:
            continue
        count = min(left, tokens_left)
        tokens_left -= count
        chunks.append(Chunk(sequence.request_id, sequence.launched, count, wants_token=count == left))
    return tuple(chunks)
