"""Who owns which KV block: states, holders, proofs, and the prefix cache. Bookkeeping only; no memory of its own.

Theory of operation. A block has *holders*: a request, a compute step, a transfer, anything hashable. While it has one
it is OWNED. A holder leaves with proof that nothing of its own can touch the block any more (a retired step, an
acknowledged transfer); when the last has left, the block is PROVEN, and :meth:`BlockPool.reclaim` makes it FREE. A
holder that cannot prove it quarantines its blocks: those are never handed out again by this pool. There is no other
way; in particular, time frees nothing.

Prefix cache. A full block whose tokens are known gets the hash of its whole prefix. A FREE block keeps its contents
until it is allocated anew, so a later prompt with the same beginning can own it again instead of computing it. Blocks
are handed out in the order: those without a hash, then the least recently freed; the end of a prefix goes before its
beginning, so what stays is always usable from the start.

Not safe for several threads at once; it belongs to one loop.

Source: docs/design.md, section "KV pool".
"""

from __future__ import annotations

import enum
import hashlib
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meta_executor.engine.errors import KVPoolExhausted, OwnershipError

_STORY_LENGTH = 16
_ROOT = b"\0" * 16


#: A prompt: a list, or int32 of shape (tokens,).
TokenIds = Sequence[int] | npt.NDArray[np.int32]


class BlockState(enum.Enum):
    """Where a block is in its life."""

    FREE = "free"
    OWNED = "owned"
    PROVEN = "proven"
    QUARANTINED = "quarantined"

    #: Members are singletons; the default hashes their names, in Python, several times per block.
    __hash__ = object.__hash__


#: Every edge there is. FREE -> OWNED is the allocation, by a fresh owner or by a prefix hit.
TRANSITIONS: dict[BlockState, frozenset[BlockState]] = {
    BlockState.FREE: frozenset({BlockState.OWNED}),
    BlockState.OWNED: frozenset({BlockState.PROVEN, BlockState.QUARANTINED}),
    BlockState.PROVEN: frozenset({BlockState.FREE}),
    BlockState.QUARANTINED: frozenset(),
}


@dataclass(frozen=True)
class PrefixMatch:
    """Cached blocks that begin a prompt.

    Attributes:
        block_ids: Blocks in order.
        token_count: Prompt tokens that they hold.
    """

    block_ids: tuple[int, ...]
    token_count: int


@dataclass(frozen=True)
class Allocation:
    """What a holder got.

    Attributes:
        block_ids: Its whole table, in order.
        cached_tokens: Leading tokens whose KV is already there.
    """

    block_ids: tuple[int, ...]
    cached_tokens: int


@dataclass(frozen=True)
class Fork:
    """A holder's copy.

    Attributes:
        block_ids: The new holder's table.
        copy_block: (from, to) if the last, partly filled block must be copied by the caller; else None.
    """

    block_ids: tuple[int, ...]
    copy_block: tuple[int, int] | None


@dataclass(frozen=True)
class PoolStatistics:
    """Counts since construction, and the present state (blocks)."""

    block_count: int
    block_tokens: int
    free: int
    owned: int
    proven: int
    quarantined: int
    cached_free: int
    owned_high_water: int
    allocated_total: int
    reclaimed_total: int
    prefix_lookups: int
    prefix_hit_tokens: int
    prefix_evicted_blocks: int
    holders: int


class BlockPool:
    """The blocks of one rank.

    Args:
        block_count: Blocks (count), >= 1.
        block_tokens: Tokens of one block (count), >= 1.
        enable_reuse: Keep finished prefixes and match them.
    """

    def __init__(self, block_count: int, block_tokens: int, *, enable_reuse: bool = False) -> None:
        if block_count < 1 or block_tokens < 1:
            raise ValueError(f"block_count and block_tokens must be >= 1, got {block_count} and {block_tokens}")
        self.block_count = block_count
        self.block_tokens = block_tokens
        self.enable_reuse = enable_reuse
        self._state = [BlockState.FREE] * block_count
        self._holders: list[set[Hashable]] = [set() for _ in range(block_count)]
        self._stories: list[deque[tuple[str, object]]] = [deque(maxlen=_STORY_LENGTH) for _ in range(block_count)]
        self._tables: dict[Hashable, list[int]] = {}
        #: FREE blocks in the order in which they are handed out.
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(block_count))
        self._hash_of: list[bytes | None] = [None] * block_count
        self._by_hash: dict[bytes, int] = {}
        self._counts = dict.fromkeys(BlockState, 0)
        self._counts[BlockState.FREE] = block_count
        #: FREE blocks with a hash (count): kept, so that nobody has to walk the pool to know it.
        self._cached_free = 0
        self._owned_high_water = 0
        self._allocated_total = 0
        self._reclaimed_total = 0
        self._prefix_lookups = 0
        self._prefix_hit_tokens = 0
        self._prefix_evicted = 0

    # -- questions ----------------------------------------------------------------------------------------------------

    @property
    def free_count(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    @property
    def quarantined_count(self) -> int:
        """Blocks that are never handed out again."""
        return self._counts[BlockState.QUARANTINED]

    @property
    def token_capacity(self) -> int:
        """Tokens that all blocks together hold, quarantined ones not counted."""
        return (self.block_count - self._counts[BlockState.QUARANTINED]) * self.block_tokens

    def blocks_for(self, token_count: int) -> int:
        """Blocks that so many tokens need (count)."""
        return -(-token_count // self.block_tokens)

    def state(self, block_id: int) -> BlockState:
        """A block's state."""
        return self._state[block_id]

    def holders(self, block_id: int) -> frozenset[Hashable]:
        """Who holds a block."""
        return frozenset(self._holders[block_id])

    def table(self, holder: Hashable) -> tuple[int, ...]:
        """A holder's blocks in order; empty if it holds none."""
        return tuple(self._tables.get(holder, ()))

    def match_prefix(self, token_ids: TokenIds, *, salt: bytes = b"", tokens_max: int | None = None) -> PrefixMatch:
        """The longest cached run of full blocks that begins these tokens. Changes nothing.

        Args:
            token_ids: The prompt.
            salt: Separates prefixes that must not be shared.
            tokens_max: Match at most so many tokens. None: all but the last, which must be computed to get its logits.
        """
        if not self.enable_reuse:
            return PrefixMatch((), 0)
        limit = len(token_ids) - 1 if tokens_max is None else min(tokens_max, len(token_ids))
        blocks = []
        for key in self._hashes(token_ids, max(limit, 0) // self.block_tokens, salt):
            block = self._by_hash.get(key)
            if block is None:
                break
            blocks.append(block)
        return PrefixMatch(tuple(blocks), len(blocks) * self.block_tokens)

    # -- owning -------------------------------------------------------------------------------------------------------

    def allocate(self, holder: Hashable, block_count: int) -> tuple[int, ...]:
        """Give a holder fresh blocks, appended to its table. All or none.

        Returns:
            The new blocks in order.

        Raises:
            KVPoolExhausted: Not enough free ones; nothing was allocated.
        """
        if block_count > len(self._free):
            raise KVPoolExhausted(block_count, len(self._free))
        taken = [self._free.popitem(last=False)[0] for _ in range(block_count)]
        if self._by_hash:
            for block in taken:
                self._forget_hash(block)
        self._move(taken, BlockState.OWNED, "allocated by", holder)
        for block in taken:
            self._holders[block].add(holder)
        self._tables.setdefault(holder, []).extend(taken)
        self._allocated_total += block_count
        self._owned_high_water = max(self._owned_high_water, self._counts[BlockState.OWNED])
        return tuple(taken)

    def acquire(self, holder: Hashable, token_ids: TokenIds, token_capacity: int, *, salt: bytes = b"") -> Allocation:
        """Give a new holder the cached beginning of a prompt and fresh blocks for the rest. All or none.

        Args:
            holder: Must hold nothing yet.
            token_ids: The prompt.
            token_capacity: Tokens that the whole table must hold, >= the prompt's.
            salt: As in :meth:`match_prefix`.

        Raises:
            KVPoolExhausted: Not enough free blocks; nothing changed.
            ValueError: The holder holds blocks already, or the capacity is below the prompt.
        """
        if holder in self._tables:
            raise ValueError(f"holder {holder!r} holds blocks already")
        if token_capacity < len(token_ids):
            raise ValueError(f"token_capacity {token_capacity} is below the prompt's {len(token_ids)}")
        match = self.match_prefix(token_ids, salt=salt)
        if self.enable_reuse:
            self._prefix_lookups += 1
        fresh = self.blocks_for(token_capacity) - len(match.block_ids)
        cached_free = sum(self._state[block] is BlockState.FREE for block in match.block_ids)
        if fresh > len(self._free) - cached_free:
            raise KVPoolExhausted(fresh, len(self._free) - cached_free)
        self._tables[holder] = []
        for block in match.block_ids:
            self._take_shared(holder, block)
        self._prefix_hit_tokens += match.token_count
        self.allocate(holder, fresh)
        return Allocation(tuple(self._tables[holder]), match.token_count)

    def extend(self, holder: Hashable, token_capacity: int) -> tuple[int, ...]:
        """Let a holder's table hold so many tokens.

        Returns:
            Blocks that were added; empty if the table was large enough.

        Raises:
            KVPoolExhausted: Not enough free ones; nothing was added.
        """
        missing = self.blocks_for(token_capacity) - len(self._tables.get(holder, ()))
        return self.allocate(holder, missing) if missing > 0 else ()

    def hold(self, holder: Hashable, block_ids: Iterable[int]) -> None:
        """Make a further holder of owned blocks: a compute step, a transfer. Appended to its table, once per block.

        Raises:
            OwnershipError: A block is not OWNED; nothing changed.
        """
        blocks = list(dict.fromkeys(block_ids))
        for block in blocks:
            if self._state[block] is not BlockState.OWNED:
                raise OwnershipError(
                    f"block {block} is {self._state[block].value}: {holder!r} cannot hold it", block, self.story(block)
                )
        table = self._tables.setdefault(holder, [])
        for block in blocks:
            if holder not in self._holders[block]:
                self._holders[block].add(holder)
                self._stories[block].append(("held by", holder))
                table.append(block)

    def fork(self, source: Hashable, target: Hashable, token_count: int) -> Fork:
        """Share a holder's filled blocks with a new holder; a partly filled last one becomes a block of its own.

        Args:
            source: Holder whose first ``token_count`` tokens are shared.
            target: Must hold nothing yet.
            token_count: Tokens that the source has filled.

        Raises:
            KVPoolExhausted: No free block for the partly filled one; nothing changed.
            ValueError: The target holds blocks already, or the source does not hold so many tokens.
        """
        table = self._tables.get(source, [])
        if target in self._tables:
            raise ValueError(f"holder {target!r} holds blocks already")
        if token_count > len(table) * self.block_tokens:
            raise ValueError(f"holder {source!r} does not hold {token_count} tokens")
        full, rest = divmod(token_count, self.block_tokens)
        if rest and not self._free:
            raise KVPoolExhausted(1, 0)
        shared = table[:full]
        self._tables[target] = []
        for block in shared:
            self._take_shared(target, block)
        copy_block = None
        if rest:
            copy_block = (table[full], self.allocate(target, 1)[0])
        return Fork(tuple(self._tables[target]), copy_block)

    # -- leaving ------------------------------------------------------------------------------------------------------

    def prove(self, holder: Hashable) -> tuple[int, ...]:
        """A holder leaves, with proof. Idempotent.

        Returns:
            Blocks that had no other holder: they are PROVEN now.
        """
        proven = []
        told = "left by", holder
        holders, states, stories = self._holders, self._state, self._stories
        for block in self._tables.pop(holder, ()):
            left = holders[block]
            left.discard(holder)
            if states[block] is BlockState.OWNED:
                stories[block].append(told)
                if not left:
                    proven.append(block)
        self._move(proven, BlockState.PROVEN, "proven by", holder)
        return tuple(proven)

    def reclaim(self, block_ids: Iterable[int]) -> None:
        """Make PROVEN blocks FREE.

        Raises:
            OwnershipError: A block is not PROVEN; none was reclaimed.
        """
        # The end of a prefix becomes the older one, so that eviction shortens prefixes instead of cutting their heads.
        blocks = list(block_ids)[::-1]
        self._move(blocks, BlockState.FREE, "reclaimed", "")
        self._reclaimed_total += len(blocks)
        free, hash_of = self._free, self._hash_of
        for block in blocks:
            free[block] = None
            if hash_of[block] is None:
                free.move_to_end(block, last=False)
            else:
                self._cached_free += 1

    def release(self, holder: Hashable) -> int:
        """A holder leaves, with proof, and what has no other holder is free at once. Idempotent.

        Returns:
            Blocks that became free (count).
        """
        proven = self.prove(holder)
        self.reclaim(proven)
        return len(proven)

    def quarantine(self, holder: Hashable, reason: str, block_ids: Iterable[int] | None = None) -> tuple[int, ...]:
        """A holder leaves without proof: its blocks (or those named) are never handed out again. Idempotent.

        Blocks that it holds and are not named are left with proof.

        Returns:
            Blocks that are quarantined now and were not before.
        """
        held = self._tables.get(holder, [])
        doubtful = set(held if block_ids is None else block_ids)
        fresh = []
        for block in list(held):
            if block in doubtful and self._state[block] is BlockState.OWNED:
                self._move((block,), BlockState.QUARANTINED, f"quarantined ({reason}) by", holder)
                self._forget_hash(block)
                fresh.append(block)
        self.release(holder)
        return tuple(fresh)

    # -- prefix cache -------------------------------------------------------------------------------------------------

    def store_prefix(self, holder: Hashable, token_ids: TokenIds, *, salt: bytes = b"") -> int:
        """Say which tokens a holder's first blocks hold, once their KV is complete; full blocks become matchable.

        Returns:
            Blocks that are known for the first time (count). 0 with reuse off.
        """
        if not self.enable_reuse:
            return 0
        table = self._tables.get(holder, [])
        full = min(len(token_ids) // self.block_tokens, len(table))
        fresh = 0
        for block, key in zip(table, self._hashes(token_ids, full, salt)):
            if self._hash_of[block] is None and key not in self._by_hash and self._state[block] is BlockState.OWNED:
                self._hash_of[block] = key
                self._by_hash[key] = block
                fresh += 1
        return fresh

    def clear_cache(self) -> None:
        """Forget every cached prefix; owned blocks stay owned."""
        for block in list(self._by_hash.values()):
            self._hash_of[block] = None
        self._by_hash.clear()
        self._cached_free = 0

    # -- account ------------------------------------------------------------------------------------------------------

    def story(self, block_id: int) -> tuple[str, ...]:
        """What happened to a block, oldest first, the last 16 events."""
        return tuple(f"{verb} {who!r}" if who != "" else verb for verb, who in self._stories[block_id])

    def statistics(self) -> PoolStatistics:
        """Counts, as data."""
        return PoolStatistics(
            block_count=self.block_count,
            block_tokens=self.block_tokens,
            free=self._counts[BlockState.FREE],
            owned=self._counts[BlockState.OWNED],
            proven=self._counts[BlockState.PROVEN],
            quarantined=self._counts[BlockState.QUARANTINED],
            cached_free=self._cached_free,
            owned_high_water=self._owned_high_water,
            allocated_total=self._allocated_total,
            reclaimed_total=self._reclaimed_total,
            prefix_lookups=self._prefix_lookups,
            prefix_hit_tokens=self._prefix_hit_tokens,
            prefix_evicted_blocks=self._prefix_evicted,
            holders=len(self._tables),
        )

    def validate(self) -> None:
        """Check every invariant (for tests).

        Raises:
            OwnershipError: Names the block and the invariant.
        """
        counts = dict.fromkeys(BlockState, 0)
        for block in range(self.block_count):
            state = self._state[block]
            counts[state] += 1
            holders = self._holders[block]
            broken = None
            if (state is BlockState.OWNED) != bool(holders) and state is not BlockState.QUARANTINED:
                broken = f"{state.value} with {len(holders)} holders"
            elif (state is BlockState.FREE) != (block in self._free):
                broken = f"{state.value} and in the free list: {block in self._free}"
            elif any(block not in self._tables.get(holder, ()) for holder in holders):
                broken = "held by someone whose table does not name it"
            elif self._hash_of[block] is not None and self._by_hash.get(self._hash_of[block] or b"") != block:
                broken = "its hash leads elsewhere"
            elif state is BlockState.QUARANTINED and self._hash_of[block] is not None:
                broken = "quarantined and matchable"
            if broken:
                raise OwnershipError(f"block {block}: {broken}", block, self.story(block))
        if counts != self._counts:
            raise OwnershipError(f"counts {self._counts} are {counts}", 0, self.story(0))
        cached_free = sum(self._hash_of[block] is not None for block in self._free)
        if cached_free != self._cached_free:
            raise OwnershipError(f"{self._cached_free} free blocks with a hash are {cached_free}", 0, self.story(0))

    # -- within -------------------------------------------------------------------------------------------------------

    def _take_shared(self, holder: Hashable, block: int) -> None:
        if self._state[block] is BlockState.FREE:
            del self._free[block]
            self._cached_free -= 1
            self._move((block,), BlockState.OWNED, "owned again by", holder)
            self._owned_high_water = max(self._owned_high_water, self._counts[BlockState.OWNED])
        elif self._state[block] is not BlockState.OWNED:
            raise OwnershipError(f"block {block} is {self._state[block].value}", block, self.story(block))
        else:
            self._stories[block].append(("shared with", holder))
        self._holders[block].add(holder)
        self._tables[holder].append(block)

    def _move(self, blocks: Sequence[int], state: BlockState, verb: str, who: object) -> None:
        """Move blocks, all or none: a request's are moved together, several times in its life."""
        states, stories, told = self._state, self._stories, (verb, who)
        if len(set(blocks)) != len(blocks):
            twice = next(block for block in blocks if blocks.count(block) > 1)
            raise OwnershipError(f"block {twice} is named twice", twice, self.story(twice))
        before = [states[block] for block in blocks]
        for one in dict.fromkeys(before):
            if state not in TRANSITIONS[one]:
                block = blocks[before.index(one)]
                words = f"block {block}: no way from {one.value} to {state.value}"
                raise OwnershipError(words, block, self.story(block))
        for one in dict.fromkeys(before):
            self._counts[one] -= before.count(one)
        self._counts[state] += len(blocks)
        for block in blocks:
            states[block] = state
            stories[block].append(told)

    def _forget_hash(self, block: int) -> None:
        key = self._hash_of[block]
        if key is not None:
            self._hash_of[block] = None
            del self._by_hash[key]
            self._prefix_evicted += 1
            self._cached_free -= self._state[block] is BlockState.FREE

    def _hashes(self, token_ids: TokenIds, block_count: int, salt: bytes) -> Iterable[bytes]:
        tokens = np.asarray(token_ids[: block_count * self.block_tokens], dtype="<i4")
        parent = hashlib.blake2b(salt, digest_size=16).digest() if salt else _ROOT
        for index in range(block_count):
            part = tokens[index * self.block_tokens : (index + 1) * self.block_tokens]
            parent = hashlib.blake2b(parent + part.tobytes(), digest_size=16).digest()
            yield parent
