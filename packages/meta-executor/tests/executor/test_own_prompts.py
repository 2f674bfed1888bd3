"""Prompts without a context leg: a generation rank computes them behind the rows of its steps."""

from __future__ import annotations

import pytest

from meta_executor.executor.ownership import State
from meta_executor.executor.testing import Pair, PairConfig

PROMPT = [3 + (11 * i) % 900 for i in range(23)]


def make(pairs: list[Pair], **config: object) -> Pair:
    pairs.append(Pair(PairConfig(stages=2, **config)))  # type: ignore[arg-type]
    return pairs[-1]


@pytest.mark.parametrize(("batch", "tokens"), [(4, 16), (1, 16), (4, 5), (1, 1), (2, 2)])
def test_the_answer_is_that_of_one_engine(pairs: list[Pair], batch: int, tokens: int) -> None:
    """Whatever fits in a step: whole prompts, chunks of a few tokens, one token at a time; many at once and on both ranks."""
    pair = make(pairs, max_batch_size=batch, max_num_tokens=tokens)
    prompts = {i: PROMPT[: 2 + 3 * i] for i in range(1, 7)}
    for request_id, prompt in prompts.items():
        pair.submit_alone(request_id, prompt, max_tokens=5)
    pair.run(lambda: all(pair.generation.finish(r) for r in prompts))
    for request_id, prompt in prompts.items():
        assert pair.generation.tokens(request_id) == pair.reference(prompt, 5)
        assert pair.generation.finish(request_id) == "length"
    pair.run(pair.idle)
    pair.validate()
    assert sum(rank.loop.compute.prompt_count for rank in pair.generation.ranks) == 6
    assert not any(rank.transceiver.counters.opened for rank in pair.generation.ranks)
    assert all(rank.blocks.free_count == rank.blocks.block_count for rank in pair.generation.ranks)


def test_beside_answers_whose_kv_came_from_a_peer(pairs: list[Pair]) -> None:
    """Full steps of rows leave a prompt its place until its first token, and it does not change theirs."""
    pair = make(pairs, max_batch_size=2, generation_ranks=1)
    for request_id in (1, 2):
        pair.submit_context(request_id, PROMPT[:9], max_tokens=24)
    pair.run(lambda: all(pair.context.tokens(r) for r in (1, 2)))
    for request_id in (1, 2):
        pair.submit_generation(request_id, PROMPT[:9], max_tokens=24, first_token=pair.context.tokens(request_id)[0])
    pair.run(lambda: all(len(pair.generation.tokens(r)) > 2 for r in (1, 2)))
    pair.submit_alone(3, PROMPT, max_tokens=3)
    pair.run(lambda: bool(pair.generation.tokens(3)))
    assert not pair.generation.finish(1) and not pair.generation.finish(2)
    pair.run(pair.idle)
    want = pair.reference(PROMPT[:9], 24)
    for request_id in (1, 2):
        assert [*pair.context.tokens(request_id), *pair.generation.tokens(request_id)] == want
    assert pair.generation.tokens(3) == pair.reference(PROMPT, 3)
    pair.validate()


def test_a_first_token_that_ends_the_answer(pairs: list[Pair]) -> None:
    """One token: no row is made of it, and its blocks come back."""
    pair = make(pairs)
    pair.submit_alone(1, PROMPT, max_tokens=1)
    pair.run(lambda: bool(pair.generation.finish(1)))
    assert pair.generation.tokens(1) == pair.reference(PROMPT, 1)
    pair.run(pair.idle)
    pair.validate()


def test_a_prefix_that_is_there_is_not_computed_again(pairs: list[Pair]) -> None:
    """The second prompt computes what is new; its client hears what was found."""
    pair = make(pairs, reuse=True, generation_ranks=1)
    (rank,) = pair.generation.ranks
    for request_id in (1, 2):
        before = rank.loop.compute.token_count
        pair.submit_alone(request_id, PROMPT, max_tokens=2)
        pair.run(lambda r=request_id: bool(pair.generation.finish(r)))
        assert pair.generation.tokens(request_id) == pair.reference(PROMPT, 2)
        computed = rank.loop.compute.token_count - before
        (first, *_) = pair.generation.answers.notices[request_id]
        assert (computed, first.cached_tokens) == ((24, 0) if request_id == 1 else (4, 20))
    pair.run(pair.idle)
    pair.validate()


@pytest.mark.parametrize("rounds", range(9))
def test_a_cancel_at_any_moment_gives_every_block_back(pairs: list[Pair], rounds: int) -> None:
    """Before it has blocks, between its chunks, while one is in flight, as a row: one last word, nothing held."""
    pair = make(pairs, max_num_tokens=6, generation_ranks=1)
    pair.submit_alone(1, PROMPT, max_tokens=6)
    pair.submit_alone(2, PROMPT[:5], max_tokens=3)
    for _ in range(rounds):
        for rank in pair.generation.ranks:
            pair.step(rank)
    pair.generation.desk.abort(1, "its client has gone")
    pair.run(lambda: all(pair.generation.finish(r) for r in (1, 2)))
    pair.run(pair.idle)
    assert pair.generation.finish(1) == "cancelled"
    assert pair.generation.tokens(2) == pair.reference(PROMPT[:5], 3)
    pair.validate()
    (rank,) = pair.generation.ranks
    assert rank.blocks.free_count == rank.blocks.block_count


def test_what_finds_no_blocks_waits_and_is_served(pairs: list[Pair]) -> None:
    """Six prompts, room for one at a time."""
    pair = make(pairs, generation_blocks=7, generation_ranks=1)
    for request_id in range(1, 7):
        pair.submit_alone(request_id, PROMPT, max_tokens=4)
    pair.run(lambda: all(pair.generation.finish(r) for r in range(1, 7)))
    assert {tuple(pair.generation.tokens(r)) for r in range(1, 7)} == {tuple(pair.reference(PROMPT, 4))}
    pair.run(pair.idle)
    pair.validate()


def test_a_step_that_fails_ends_what_was_in_it(pairs: list[Pair]) -> None:
    """The engine's words for the prompt in the step; the next one is served."""
    pair = make(pairs, generation_ranks=1)
    (rank,) = pair.generation.ranks
    rank.engine.fail.add(0)
    pair.submit_alone(1, PROMPT, max_tokens=4)
    pair.run(lambda: bool(pair.generation.finish(1)))
    assert pair.generation.finish(1) == "error"
    pair.submit_alone(2, PROMPT, max_tokens=4)
    pair.run(lambda: bool(pair.generation.finish(2)))
    assert pair.generation.tokens(2) == pair.reference(PROMPT, 4)
    pair.run(pair.idle)
    pair.validate()
    assert not [s for s in rank.registry if s.state is not State.TERMINAL]
