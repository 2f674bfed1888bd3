"""Who owns which KV block of this rank, by request.

Where a rank plans for itself (rank 0 of a pipeline, every attention-DP rank) a :class:`PlannedBlocks` decides the block
ids, over :class:`meta_executor.engine.kv_pool.BlockPool`. The other ranks of a pipeline follow with
:class:`FollowedBlocks`: the schedule carries the ids, so a block table is the same on every stage and a prefix that is
cached on rank 0 is cached on all of them. A follower may learn later than rank 0 that a block was given back (the COMMIT
reaches each rank in its own poll); until then it refuses a schedule that would overwrite the block, and the schedule waits.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

from meta_executor.engine.errors import KVPoolExhausted, OwnershipError
from meta_executor.engine.kv_pool import BlockPool
from meta_executor.executor.ownership import Sequence


class Blocks(Protocol):
    """The blocks of one rank, held by request."""

    block_count: int
    block_tokens: int

    def release(self, sequence: Sequence) -> None:
        """Give a sequence's blocks back: nothing of anybody touches them any more. Idempotent."""
        ...

    def quarantine(self, sequence: Sequence, reason: str) -> None:
        """Never use a sequence's blocks again in this process. Idempotent."""
        ...

    @property
    def free_count(self) -> int:
        """Blocks that nobody owns (count)."""
        ...

    @property
    def quarantined_count(self) -> int:
        """Blocks that are lost to this process (count)."""
        ...


class PlannedBlocks:
    """Blocks of a rank that plans for itself."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.block_count = pool.block_count
        self.block_tokens = pool.block_tokens

    def acquire(self, sequence: Sequence, token_capacity: int) -> bool:
        """Blocks for so many tokens, the cached beginning of the prompt included. False: not enough free ones now."""
        request = sequence.request
        # What is told of a prompt's tokens is known where they are computed, so none of it may come from the cache.
        findable = request.token_ids if request.sampling.prompt_logprobs is None else request.token_ids[:0]
        try:
            got = self.pool.acquire(sequence.request_id, findable, token_capacity, salt=request.cache_salt.encode())
        except KVPoolExhausted:
            return False
        sequence.block_ids = list(got.block_ids)
        sequence.cached_count = got.cached_tokens
        sequence.shared_blocks = got.cached_tokens // self.block_tokens
        return True

    def store_prefix(self, sequence: Sequence) -> None:
        """The prompt's KV is complete on every rank: its full blocks may be found by later prompts."""
        self.pool.store_prefix(
            sequence.request_id, sequence.request.token_ids, salt=sequence.request.cache_salt.encode()
        )

    def release(self, sequence: Sequence) -> None:
        """Give back."""
        self.pool.release(sequence.request_id)

    def quarantine(self, sequence: Sequence, reason: str) -> None:
        """Never again."""
        self.pool.quarantine(sequence.request_id, reason)

    @property
    def free_count(self) -> int:
        """Free blocks (count)."""
        return self.pool.free_count

    @property
    def quarantined_count(self) -> int:
        """Quarantined blocks (count)."""
        return self.pool.quarantined_count


@dataclass(slots=True)
class _Followed:
    holders: int = 0
    quarantined: bool = False


class FollowedBlocks:
    """Blocks of a rank that mirrors rank 0's schedule."""

    def __init__(self, block_count: int, block_tokens: int) -> None:
        self.block_count = block_count
        self.block_tokens = block_tokens
        self._blocks = [_Followed() for _ in range(block_count)]
        self._tables: dict[int, tuple[int, ...]] = {}
        self._owned = 0
        self._quarantined = 0
        self._free = block_count

    def can_take(self, block_ids: Items[int], shared_count: int) -> bool:
        """Whether nobody on this rank holds the fresh ones any more."""
        return all(self._blocks[block].holders == 0 for block in block_ids[shared_count:])

    def take(self, sequence: Sequence, block_ids: Items[int], shared_count: int) -> None:
        """Own a table that rank 0 chose.

        Raises:
            OwnershipError: A fresh block is still held here, one is quarantined, or the sequence has a table already.
        """
        request_id = sequence.request_id
        if request_id in self._tables:
            raise OwnershipError(f"request {request_id} owns blocks already", block_ids[0] if block_ids else 0, ())
        for index, block in enumerate(block_ids):
            held = self._blocks[block]
            if held.quarantined or (index >= shared_count and held.holders):
                state = "quarantined" if held.quarantined else f"held by {held.holders}"
                raise OwnershipError(f"block {block} is {state}: request {request_id} cannot own it", block, ())
        for block in block_ids:
            held = self._blocks[block]
            if held.holders == 0:
                self._owned += 1
                self._free -= 1
            held.holders += 1
        self._tables[request_id] = tuple(block_ids)
        sequence.block_ids = list(block_ids)
        sequence.shared_blocks = shared_count
        sequence.cached_count = shared_count * self.block_tokens

    def release(self, sequence: Sequence) -> None:
        """Give back."""
        for block in self._tables.pop(sequence.request_id, ()):
            held = self._blocks[block]
            held.holders -= 1
            if held.holders == 0:
                self._owned -= 1
                self._free += not held.quarantined

    def quarantine(self, sequence: Sequence, reason: str) -> None:
        """Never again."""
        for block in self._tables.get(sequence.request_id, ()):
            held = self._blocks[block]
            self._quarantined += not held.quarantined
            held.quarantined = True
        self.release(sequence)

    @property
    def free_count(self) -> int:
        """Blocks that nobody holds and that may be used (count)."""
        return self._free

    @property
    def quarantined_count(self) -> int:
        """Quarantined blocks (count)."""
        return self._quarantined
