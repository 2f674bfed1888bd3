"""Which tokens of which sequences the next step computes. Pure: the same sequences give the same plan.

One rule serves prefill and decode: a sequence has ``known_count`` tokens whose values are known, of which ``launched`` are
already in a step. What lies between may be computed now, as one chunk. A decoding sequence has exactly one such token, a new
prompt has many. A chunk that reaches the last known token asks for the next one.

Decoding sequences go first (their clients see every step), then chunks in order of activation. A step holds at most
``sequences_max`` sequences and ``tokens_max`` tokens; a prompt that does not fit is cut into chunks.

On a pipeline rank 0 plans and the plan travels with the activations; the other ranks mirror it and plan nothing. On an
attention-DP group each rank plans for its own sequences.
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
    """Tokens [start, start + count) of one sequence. ``wants_token``: the chunk ends at the last known token."""

    request_id: int
    start: int
    count: int
    wants_token: bool


def plan_step(sequences: Iterable[Sequence], limits: StepLimits) -> tuple[Chunk, ...]:
    """Plan one step.

    Args:
        sequences: Sequences that may compute, in order: activated ones, and selected ones that the step would activate.
            Those that ended early, are in another state, or have nothing known that is not launched are skipped.

    Returns:
        Chunks, decoding sequences first, then in the given order. Empty: nothing to compute now.
    """
    ready = [s for s in sequences if s.state in _SCHEDULABLE and not s.ended_early and s.launched < s.known_count]
    # Stable: among decoding sequences, and among prompts, the order of activation stays.
    ready.sort(key=lambda s: s.known_count - s.launched > 1)
    chunks: list[Chunk] = []
    tokens_left = limits.tokens_max
    for sequence in ready:
        if len(chunks) == limits.sequences_max or tokens_left == 0:
            break
        count = min(sequence.known_count - sequence.launched, tokens_left)
        tokens_left -= count
        chunks.append(
            Chunk(
                sequence.request_id,
                sequence.launched,
                count,
                wants_token=sequence.launched + count == sequence.known_count,
            )
        )
    return tuple(chunks)


def blocks_needed(token_count: int, block_tokens: int) -> int:
    """Blocks that hold so many tokens (count)."""
    return -(-token_count // block_tokens)
