"""Blocks by request: planned ones, and those that a mirroring rank follows."""

from __future__ import annotations

import numpy as np
import pytest

from meta_executor.engine.base import SamplingParams
from meta_executor.engine.errors import OwnershipError
from meta_executor.engine.kv_pool import BlockPool
from meta_executor.executor.aux_slots import AuxSlots
from meta_executor.executor.memory import FollowedBlocks, PlannedBlocks
from meta_executor.executor.ownership import Sequence
from meta_executor.executor.request import Request


def sequence(request_id: int, tokens: list[int]) -> Sequence:
    request = Request(
        request_id=request_id, token_ids=np.asarray(tokens, np.int32), sampling=SamplingParams(max_tokens=4)
    )
    return Sequence(request, request_id)


def test_planned_blocks_share_a_stored_prefix_and_come_back() -> None:
    """The second prompt gets the first one's full blocks; all are free at the end."""
    blocks = PlannedBlocks(BlockPool(8, 4, enable_reuse=True))
    first = sequence(1, list(range(10)))
    assert blocks.acquire(first, 10)
    blocks.store_prefix(first)
    second = sequence(2, list(range(9)))
    assert blocks.acquire(second, 9)
    assert (second.cached_count, second.shared_blocks) == (8, 2)
    assert second.block_ids[:2] == first.block_ids[:2]
    for one in (first, second, second):
        blocks.release(one)
    assert blocks.free_count == 8


def test_too_few_blocks_take_nothing() -> None:
    """All or none."""
    blocks = PlannedBlocks(BlockPool(2, 4))
    assert not blocks.acquire(sequence(1, [1] * 9), 9)
    assert blocks.free_count == 2


def test_a_follower_refuses_blocks_that_are_still_held_here() -> None:
    """Rank 0 may hand a block out again before this rank has heard of the COMMIT: the schedule waits."""
    blocks = FollowedBlocks(4, 4)
    first, second = sequence(1, [1] * 8), sequence(2, [1] * 8)
    blocks.take(first, [0, 1], 0)
    assert not blocks.can_take([1, 2], 0)
    assert blocks.can_take([1, 2], 1), "a shared block may have several holders"
    with pytest.raises(OwnershipError, match="block 1 is held by 1"):
        blocks.take(second, [1, 2], 0)
    assert blocks.free_count == 2, "a refusal takes nothing"
    blocks.take(second, [1, 2], 1)
    blocks.release(first)
    assert blocks.free_count == 2
    blocks.release(second)
    blocks.release(second)
    assert blocks.free_count == 4


def test_a_follower_never_uses_a_quarantined_block_again() -> None:
    """Counted once, however many held it."""
    blocks = FollowedBlocks(4, 4)
    first, second = sequence(1, [1]), sequence(2, [1])
    blocks.take(first, [3], 0)
    blocks.quarantine(first, "in doubt")
    assert (blocks.quarantined_count, blocks.free_count) == (1, 3)
    with pytest.raises(OwnershipError, match="quarantined"):
        blocks.take(second, [3], 0)


def test_aux_slots_are_owned_until_released_and_recognise_a_foreign_token() -> None:
    """A slot that does not hold this request's token reads as None."""
    slots = AuxSlots(2)
    address = slots.take(5)
    assert slots.take(5) == address
    assert slots.read(5) is None
    slots.write(5, 77)
    assert slots.read(5) == 77
    slots.take(6)
    with pytest.raises(MemoryError):
        slots.take(7)
    slots.release(5)
    assert slots.take(7) == address and slots.read(7) is None
    slots.quarantine(6)
    assert slots.free_count == 0
