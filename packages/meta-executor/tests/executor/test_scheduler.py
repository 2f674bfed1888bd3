"""Plans of one step: limits, chunks, order, who is left out."""

from __future__ import annotations

import random

import numpy as np
import pytest

from meta_executor.engine.base import SamplingParams
from meta_executor.executor.ownership import Outcome, Sequence, State
from meta_executor.executor.request import Request
from meta_executor.executor.scheduler import StepLimits, plan_step


def sequence(request_id, prompt, *, launched=0, state=State.COMPUTING, outcome=None) -> Sequence:
    request = Request(
        request_id=request_id, token_ids=np.zeros(prompt, np.int32), sampling=SamplingParams(max_tokens=100)
    )
    return Sequence(request, request_id, state=state, launched=launched, outcome=outcome)


def limits(sequences=4, tokens=16) -> StepLimits:
    return StepLimits(sequences, tokens, 8, 2, 8)


def test_a_long_prompt_is_cut_and_only_its_last_chunk_wants_a_token() -> None:
    """Chunks of at most tokens_max; the last one ends at the last known token."""
    one = sequence(1, 40)
    seen = []
    while plan := plan_step([one], limits()):
        (chunk,) = plan
        seen.append((chunk.start, chunk.count, chunk.wants_token))
        one.launched += chunk.count
    assert seen == [(0, 16, False), (16, 16, False), (32, 8, True)]


def test_a_step_holds_at_most_so_many_sequences_and_tokens_in_order() -> None:
    """Both bounds, whichever comes first; the oldest go first."""
    plan = plan_step([sequence(i, 3) for i in range(1, 10)], limits(sequences=4))
    assert [(c.request_id, c.count, c.wants_token) for c in plan] == [(i, 3, True) for i in range(1, 5)]
    plan = plan_step([sequence(i, 9) for i in range(1, 5)], limits(tokens=16))
    assert [(c.request_id, c.count, c.wants_token) for c in plan] == [(1, 9, True), (2, 7, False)]


@pytest.mark.parametrize(
    "state", sorted(set(State) - {State.ACTIVATED, State.COMPUTING, State.WAITING, State.PREPARED})
)
def test_sequences_in_other_states_are_left_out(state: State) -> None:
    """Aborted, ending, transferring, quiescent and terminal ones compute nothing."""
    assert plan_step([sequence(1, 5, state=state)], limits()) == ()


def test_ended_and_exhausted_ones_are_left_out() -> None:
    """Cancelled ones, and those whose known tokens are all in a step."""
    assert plan_step([sequence(1, 5, outcome=Outcome.CANCELLED), sequence(2, 5, launched=5)], limits()) == ()


def test_limits_of_an_instance_and_their_errors() -> None:
    """The compute cap is one batch per stage; None as window means that cap."""
    made = StepLimits.for_instance(max_batch_size=1, max_num_tokens=64, stage_count=4, pre_active_requests=None)
    assert (made.active_max, made.pre_active_max, made.steps_in_flight_max) == (4, 4, 5)
    assert (
        StepLimits.for_instance(
            max_batch_size=1, max_num_tokens=64, stage_count=4, pre_active_requests=256
        ).pre_active_max
        == 256
    )
    with pytest.raises(ValueError, match="tokens_max must be at least 1"):
        StepLimits(1, 0, 1, 1, 1)


@pytest.mark.parametrize("seed", range(20))
def test_random_plans_cover_every_token_exactly_once(seed: int) -> None:
    """Until nothing is left: chunks of one sequence touch, never overlap, and respect both bounds."""
    chance = random.Random(seed)
    bounds = limits(chance.randrange(1, 6), chance.randrange(1, 20))
    sequences = [sequence(i, chance.randrange(1, 60)) for i in range(1, chance.randrange(2, 9))]
    covered = {s.request_id: 0 for s in sequences}
    while plan := plan_step(sequences, bounds):
        assert len(plan) <= bounds.sequences_max and sum(c.count for c in plan) <= bounds.tokens_max
        assert len({c.request_id for c in plan}) == len(plan)
        for chunk in plan:
            assert chunk.start == covered[chunk.request_id]
            covered[chunk.request_id] += chunk.count
            owner = sequences[chunk.request_id - 1]
            owner.launched += chunk.count
            assert chunk.wants_token == (owner.launched == owner.request.prompt_count)
    assert all(covered[s.request_id] == s.request.prompt_count for s in sequences)
