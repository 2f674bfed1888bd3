"""The KV pool: every edge of a block's life, the prefix cache against a dumb oracle."""

from __future__ import annotations

import random

import pytest

from meta_executor.engine import BlockPool, BlockState, KVPoolExhausted, OwnershipError
from meta_executor.engine.kv_pool import TRANSITIONS


def test_only_the_edges_of_the_rule_exist() -> None:
    """OWNED -> PROVEN -> FREE, OWNED -> QUARANTINED, and the allocation; nothing leaves quarantine."""
    edges = {(a.value, b.value) for a, targets in TRANSITIONS.items() for b in targets}
    assert edges == {("free", "owned"), ("owned", "proven"), ("proven", "free"), ("owned", "quarantined")}


def test_a_block_is_free_only_after_its_last_holder() -> None:
    """Request gone, step still running: OWNED; step retired: PROVEN; reclaimed: FREE."""
    pool = BlockPool(4, 16)
    blocks = pool.allocate("request", 2)
    pool.hold("step", blocks)
    assert pool.prove("request") == ()
    assert {pool.state(block) for block in blocks} == {BlockState.OWNED}
    assert pool.prove("step") == blocks
    assert {pool.state(block) for block in blocks} == {BlockState.PROVEN}
    assert pool.free_count == 2
    pool.reclaim(blocks)
    assert pool.free_count == 4
    assert pool.release("step") == 0
    pool.validate()


def test_quarantine_is_for_ever() -> None:
    """A holder without proof leaves its blocks behind; they are never handed out, whoever else lets go of them."""
    pool = BlockPool(4, 16, enable_reuse=True)
    blocks = pool.allocate("request", 3)
    pool.store_prefix("request", range(48))
    pool.hold("transfer", blocks[:2])
    assert pool.quarantine("transfer", "no answer", [blocks[0]]) == blocks[:1]
    assert pool.quarantine("transfer", "again") == ()
    assert pool.release("request") == 2
    assert pool.state(blocks[0]) is BlockState.QUARANTINED
    assert pool.match_prefix(list(range(48))).block_ids == ()
    assert pool.token_capacity == 3 * 16
    pool.validate()
    with pytest.raises(KVPoolExhausted):
        pool.allocate("next", 4)
    assert blocks[0] not in pool.allocate("next", 3)
    with pytest.raises(OwnershipError, match="no answer"):
        pool.hold("late", [blocks[0]])


def test_refusals_change_nothing() -> None:
    """All or none: an exhausted pool, a free block held, a holder that has blocks already."""
    pool = BlockPool(3, 4, enable_reuse=True)
    pool.allocate("a", 1)
    before = pool.statistics()
    with pytest.raises(KVPoolExhausted) as caught:
        pool.acquire("b", list(range(9)), 13)
    assert (caught.value.wanted, caught.value.free) == (4, 2)
    with pytest.raises(OwnershipError) as refused:
        pool.hold("b", [0, 2])
    assert refused.value.block_id == 2
    with pytest.raises(ValueError, match="holds blocks already"):
        pool.acquire("a", [1], 4)
    with pytest.raises(ValueError, match="below the prompt"):
        pool.acquire("b", [1, 2], 1)
    with pytest.raises(OwnershipError, match="no way from owned to free"):
        pool.reclaim([0])
    assert pool.table("b") == ()
    after = pool.statistics()
    assert (after.free, after.owned, after.holders) == (before.free, before.owned, before.holders)
    pool.validate()


def test_prefix_hit_shares_and_keeps_the_last_token_for_computing() -> None:
    """A prompt of whole blocks that is all cached still has its last block computed: its logits are needed."""
    pool = BlockPool(8, 4, enable_reuse=True)
    prompt = list(range(100, 108))
    first = pool.acquire("a", prompt, 10)
    assert (len(first.block_ids), first.cached_tokens) == (3, 0)
    assert pool.store_prefix("a", prompt) == 2
    second = pool.acquire("b", prompt, 10)
    assert second.cached_tokens == 4
    assert second.block_ids[0] == first.block_ids[0]
    assert set(second.block_ids[1:]).isdisjoint(first.block_ids)
    assert pool.holders(first.block_ids[0]) == {"a", "b"}
    pool.release("a")
    assert pool.state(first.block_ids[0]) is BlockState.OWNED
    pool.release("b")
    assert pool.acquire("c", [*prompt, 1, 2], 12).cached_tokens == 8
    assert pool.match_prefix(prompt, salt=b"tenant").token_count == 0
    assert pool.match_prefix(prompt, tokens_max=8).token_count == 8
    pool.validate()


def test_fork_shares_full_blocks_and_copies_the_last() -> None:
    """A fork owns the full blocks too, and a block of its own for the partly filled one."""
    pool = BlockPool(6, 4)
    table = pool.allocate("a", 3)
    fork = pool.fork("a", "b", 10)
    assert fork.block_ids[:2] == table[:2]
    assert fork.copy_block == (table[2], fork.block_ids[2])
    assert pool.fork("a", "c", 8).copy_block is None
    pool.release("a")
    assert pool.state(table[0]) is BlockState.OWNED
    assert pool.state(table[2]) is BlockState.FREE
    for holder in "bc":
        pool.release(holder)
    assert pool.free_count == 6
    pool.validate()


def test_eviction_takes_uncached_blocks_first_then_the_ends_of_old_prefixes() -> None:
    """What stays cached is always usable from the start."""
    pool = BlockPool(6, 2, enable_reuse=True)
    for name, start in (("old", 0), ("new", 50)):
        prompt = list(range(start, start + 4))
        pool.acquire(name, prompt, 4)
        pool.store_prefix(name, prompt)
        pool.release(name)
    assert pool.statistics().cached_free == 4
    pool.allocate("x", 3)  # two without a hash, then the end of the old prefix
    assert pool.match_prefix([0, 1, 2, 3, 9]).token_count == 2
    assert pool.match_prefix([50, 51, 52, 53, 9]).token_count == 4
    pool.allocate("y", 1)
    assert pool.match_prefix([0, 1, 2, 3, 9]).token_count == 0
    assert pool.match_prefix([50, 51, 52, 53, 9]).token_count == 4
    assert pool.statistics().prefix_evicted_blocks == 2


class Oracle:
    """What the pool should be, as slowly and plainly as possible: contents per block, holders per block, no hashes."""

    def __init__(self, blocks: int, tokens: int) -> None:
        self.tokens = tokens
        self.holders: list[list[object]] = [[] for _ in range(blocks)]
        self.contents: list[tuple[int, ...] | None] = [None] * blocks  # the whole prefix up to the block's end
        self.quarantined: set[int] = set()

    def known(self, prompt: list[int]) -> int:
        count = 0
        while (count + 1) * self.tokens < len(prompt) and tuple(prompt[: (count + 1) * self.tokens]) in self.contents:
            count += 1
        return count


@pytest.mark.parametrize("seed", range(12))
def test_random_use_against_the_oracle(seed: int) -> None:
    """3,000 random calls: hits equal the oracle's, hit blocks hold exactly that prefix, no block has two contents."""
    rng = random.Random(seed)
    pool = BlockPool(24, 4, enable_reuse=True)
    oracle = Oracle(24, 4)
    prompts: dict[int, list[int]] = {}
    for call in range(3000):
        action = rng.random()
        if action < 0.45:
            prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 30))]
            capacity = len(prompt) + rng.randrange(8)
            want = oracle.known(prompt)
            try:
                got = pool.acquire(call, prompt, capacity)
            except KVPoolExhausted:
                free = sum(not held and b not in oracle.quarantined for b, held in enumerate(oracle.holders))
                shared = sum(not oracle.holders[block] for block in pool.match_prefix(prompt).block_ids)
                assert pool.blocks_for(capacity) - want > free - shared
                continue
            assert got.cached_tokens == want * 4
            for place, block in enumerate(got.block_ids):
                assert block not in oracle.quarantined
                if place < want:
                    assert oracle.contents[block] == tuple(prompt[: (place + 1) * 4])
                else:
                    assert not oracle.holders[block]
                    oracle.contents[block] = None
                oracle.holders[block].append(call)
            prompts[call] = prompt
        elif not prompts:
            continue
        elif action < 0.65:
            holder = rng.choice(list(prompts))
            table = pool.table(holder)
            pool.store_prefix(holder, prompts[holder])
            for place in range(len(prompts[holder]) // 4):
                content = tuple(prompts[holder][: (place + 1) * 4])
                block = table[place]
                if (
                    content not in oracle.contents
                    and oracle.contents[block] is None
                    and block not in oracle.quarantined
                ):
                    oracle.contents[block] = content
        elif action < 0.97:
            holder = rng.choice(list(prompts))
            pool.release(holder)
            prompts.pop(holder)
            for held in oracle.holders:
                if holder in held:
                    held.remove(holder)
        elif len(oracle.quarantined) < 6:
            holder = rng.choice(list(prompts))
            block = rng.choice(pool.table(holder))
            pool.quarantine(holder, "test", [block])
            prompts.pop(holder)
            oracle.quarantined.add(block)
            oracle.contents[block] = None
            for held in oracle.holders:
                if holder in held:
                    held.remove(holder)
        pool.validate()
        for block in range(24):
            assert pool.holders(block) == frozenset(oracle.holders[block]) or block in oracle.quarantined
    assert pool.statistics().prefix_hit_tokens > 0


def test_blocks_go_back_all_or_none() -> None:
    """One that is not PROVEN, or is named twice: an error, and none of the others has moved."""
    pool = BlockPool(8, 4)
    first, second, third = pool.allocate("a", 3)
    pool.prove("a")
    (held,) = pool.allocate("b", 1)
    for wrong in ((first, held), (first, second, first)):
        with pytest.raises(OwnershipError):
            pool.reclaim(wrong)
        assert pool.statistics().proven == 3
        pool.validate()
    pool.reclaim((first, second, third))
    assert pool.statistics().free == 7
    pool.validate()
