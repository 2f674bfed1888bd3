"""Random interleavings of two whole instances against a dumb oracle: whatever the order of steps, cancels and deadlines,

every request ends once, completed ones carry the reference's tokens, every block comes back, and all ranks say the same.
"""

from __future__ import annotations

import random

import pytest

from meta_executor.executor.memory import PlannedBlocks
from meta_executor.executor.testing import Pair, PairConfig


def drive_randomly(seed: int, *, style: str, count: int = 10, leases: bool = False) -> dict[str, int]:
    """One run. Returns how many requests ended how. ``leases``: unscheduled leases expire after some dozens of steps."""
    chance = random.Random(seed)
    patience = random.Random(f"leases {seed}")
    config = PairConfig(
        stages=chance.choice((1, 2, 3, 4)),
        generation_ranks=chance.choice((1, 2, 3)),
        context_blocks=chance.choice((24, 64)),
        generation_blocks=chance.choice((16, 64)),
        max_batch_size=chance.choice((1, 2, 4)),
        max_num_tokens=chance.choice((4, 7, 16)),
        pre_active_requests=chance.choice((None, 1, 4, 64)),
        bounce=chance.random() < 0.5,
        reuse=chance.random() < 0.5,
        credits=chance.choice((2, 8, 64)),
        lease_timeout_s=patience.choice((0.001, 0.003, 0.01)) if leases else None,
    )
    pair = Pair(config)
    try:
        shared = [3 + chance.randrange(900) for _ in range(20)]
        prompts: dict[int, list[int]] = {}
        for request_id in range(1, count + 1):
            own = [3 + chance.randrange(900) for _ in range(chance.randrange(1, 12))]
            prompts[request_id] = (shared[: chance.choice((0, 8, 16, 20))] + own)[:40]
        answers_max = {request_id: chance.randrange(1, 6) for request_id in prompts}
        waiting_context = list(prompts)
        waiting_generation = list(prompts)
        chance.shuffle(waiting_context)
        chance.shuffle(waiting_generation)
        cancels = {r: chance.randrange(1, 400) for r in prompts if chance.random() < 0.3}
        ranks = pair.ranks
        turns = 0
        while True:
            turns += 1
            assert turns < 60_000, "nothing more happens:\n" + pair.story()
            if chance.random() < 0.05 and waiting_context:
                request_id = waiting_context.pop()
                pair.submit_context(request_id, prompts[request_id], max_tokens=answers_max[request_id], style=style)
            if chance.random() < 0.05 and waiting_generation:
                index = next(
                    (
                        i
                        for i, r in enumerate(waiting_generation)
                        if style == "generation_first" or pair.context.answers.get(r)
                    ),
                    None,
                )
                if index is not None:
                    request_id = waiting_generation.pop(index)
                    first = None
                    if style == "context_first":
                        tokens = pair.context.tokens(request_id)
                        if not tokens or pair.context.finish(request_id):
                            continue
                        first = tokens[0]
                    pair.submit_generation(
                        request_id,
                        prompts[request_id],
                        max_tokens=answers_max[request_id],
                        first_token=first,
                        style=style,
                    )
            for request_id, turn in list(cancels.items()):
                if turns >= turn * 10:
                    del cancels[request_id]
                    # As a front does it: both legs, in either order.
                    legs = [pair.context.desk, pair.generation.desk]
                    chance.shuffle(legs)
                    for desk in legs:
                        desk.abort(request_id, "client has gone")
                    waiting_context = [r for r in waiting_context if r != request_id]
                    waiting_generation = [r for r in waiting_generation if r != request_id]
            pair.step(chance.choice(ranks))
            if turns % 50 == 0:
                pair.validate()
                quiet = pair.idle() and pair.context.desk.live_count == 0 and pair.generation.desk.live_count == 0
                # A cancelled sibling leaves its other leg without a peer; the front aborts what is left over.
                if not waiting_context and not waiting_generation and not cancels and quiet:
                    break
                if turns > 40_000:
                    raise AssertionError("stuck:\n" + pair.story())
                if not waiting_context and style == "context_first":
                    waiting_generation = [r for r in waiting_generation if not pair.context.finish(r) and r in prompts]
        pair.settle(20)
        pair.validate()
        counts = {"completed": 0, "cancelled": 0, "expired": 0}
        for request_id, prompt in prompts.items():
            reason = pair.generation.finish(request_id)
            if reason != "length":
                counts["cancelled"] += 1
                codes = [a.error_code for a in pair.context.answers.get(request_id, ())]
                if "LEASE_EXPIRED" in codes:
                    counts["expired"] += 1
                    assert len(codes) == 1, "its client was told more than once, or got a token as well"
                continue
            counts["completed"] += 1
            want = pair.reference(prompt, answers_max[request_id])
            got = pair.generation.tokens(request_id)
            if style == "context_first":
                got = [*pair.context.tokens(request_id), *got]
            assert got == want, (request_id, got, want)
        for rank in pair.ranks:
            assert rank.blocks.free_count == rank.blocks.block_count, "a block did not come back"
        expired = {rank.transceiver.counters.leases_expired for rank in pair.context.ranks}
        assert max(expired) >= counts["expired"] and (leases or expired == {0})
        evidence = [rank.agreement.statistics().core for rank in pair.context.ranks]
        assert len({(c.admitted, c.committed, c.closed, c.digest, c.activation_digest) for c in evidence}) == 1
        for desk in (pair.context.desk, pair.generation.desk):
            desk.drain(pair.now_s + 1000.0)
        pair.run(lambda: all(rank.loop.left for rank in pair.ranks))
        assert all(rank.loop.drained for rank in pair.ranks)
        assert isinstance(pair.context.ranks[0].blocks, PlannedBlocks)
        return counts
    finally:
        pair.close()


@pytest.mark.parametrize("seed", range(12))
def test_context_first_any_interleaving_ends_everything_once(seed: int) -> None:
    """Seeds 0–11; more by ``tools/random_pairs.py``."""
    drive_randomly(seed, style="context_first")


@pytest.mark.parametrize("seed", range(12))
def test_generation_first_any_interleaving_ends_everything_once(seed: int) -> None:
    """Seeds 0–11; more by ``tools/random_pairs.py``."""
    drive_randomly(seed, style="generation_first")


def test_generation_first_with_leases_that_expire_ends_everything_once() -> None:
    """Seeds 0–11 with short leases: some requests are revoked, some of the same runs complete, nothing is lost."""
    totals = {"completed": 0, "cancelled": 0, "expired": 0}
    for seed in range(12):
        for name, number in drive_randomly(seed, style="generation_first", leases=True).items():
            totals[name] += number
    assert totals["expired"] > 5 and totals["completed"] > 20, totals
