"""How many KV blocks the ranks of an instance have: configured, or measured by an estimation runtime that publishes nothing.

Each rank measures; all learn what all have measured; the smallest budget is everybody's, because block tables are the same on
every stage. What one rank cannot do is refused on all of them, in the same words, before any of them allocates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from endpoint_lifecycle import EndpointOwner
from kv_bounce_planner.sessions import MemoryRegion, NixlTransport, PeerId
from meta_executor.config import ConfigError, KvCacheConfig
from meta_executor.engine.base import Engine


class RankBudget(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank could have."""

    rank: int
    block_count: int
    block_bytes: int
    #: Memory that was left beside weights, agents and arenas of all ranks (bytes); None: the capacity is configured.
    free_bytes: int | None = None
    #: Why this rank has no budget; "" when it has one.
    problem: str = ""


class KvBudget(msgspec.Struct, frozen=True, kw_only=True):
    """What every rank has.

    Attributes:
        block_count: Blocks of each rank (count).
        decided_by: The rank with the smallest budget; None: the capacity is configured.
        words: For the log.
    """

    block_count: int
    decided_by: int | None
    words: str


def block_bytes_of(engine: Engine, block_tokens: int) -> int:
    """Bytes of one block on this stage: keys and values of its layers."""
    model = engine.model
    element_bytes = {"float32": 4, "bfloat16": 2, "float16": 2}[model.kv_dtype]
    return 2 * engine.stage.layer_count * block_tokens * model.kv_head_count * model.head_dim * element_bytes


def measure_budget(
    owner: EndpointOwner,
    engine: Engine,
    config: KvCacheConfig,
    *,
    rank: int,
    sharing_ranks: int,
    arena: Any | None,
    free_bytes: Callable[[], int],
    together: Callable[[], None],
    open_transport: Callable[[str], Any] = lambda name: NixlTransport(PeerId("estimation", name, 0)),
) -> RankBudget:
    """What this rank could have. Raises nothing that another rank would wait for: a problem is part of the answer.

    The estimation runtime opens what the final one will hold besides the KV (a transfer agent and the registered bounce
    arenas), so that its memory counts; every rank has opened before one measures, and every rank has measured before one
    closes. The account stays with the owner.

    Args:
        owner: In its estimation state for the duration.
        engine: Loaded; its weights count already.
        config: ``max_tokens`` set: that capacity; None: a share of what is left.
        rank: This rank.
        sharing_ranks: Ranks that take their share of the same memory (count), >= 1.
        arena: Bounce memory as a numpy array; None: there is none, or it counts already.
        free_bytes: Measures what is left (bytes).
        together: Returns when every rank of the instance has called it. Called twice, or not at all where the capacity is
            configured.
        open_transport: Makes the transfer agent.
    """
    block_bytes = block_bytes_of(engine, config.tokens_per_block)
    with owner.begin_estimation() as runtime:
        if config.max_tokens is not None:
            count = -(-config.max_tokens // config.tokens_per_block)
            runtime.opened("kv-blocks", size_bytes=count * block_bytes)
            runtime.closed("kv-blocks")
            return RankBudget(rank=rank, block_count=count, block_bytes=block_bytes)
        problem, left, transport = "", 0, None
        arena_bytes = 0 if arena is None else int(arena.nbytes)
        runtime.opened("bounce-arena", size_bytes=arena_bytes)
        try:
            try:
                transport = open_transport(owner.instance_id[:32])
                if arena is not None:
                    transport.register([MemoryRegion(int(arena.ctypes.data), arena_bytes)])
                transport.agent_info(PeerId("estimation-peer", "0", 0))
            except Exception as error:  # noqa: BLE001 - told to every rank; all of them refuse to start
                problem = f"cannot open a transfer agent: {type(error).__name__}: {error}"
            together()
            try:
                left = free_bytes()
            except Exception as error:  # noqa: BLE001 - as above
                problem = problem or f"cannot measure free memory: {type(error).__name__}: {error}"
            together()
        finally:
            if transport is not None:
                transport.close()
            runtime.closed("bounce-arena")
    share_bytes = int(left * config.memory_fraction / sharing_ranks)
    if not problem and share_bytes < block_bytes:
        problem = (
            f"{left} bytes are free, the share of one of {sharing_ranks} ranks is {share_bytes}, one block of "
            f"{config.tokens_per_block} tokens has {block_bytes}"
        )
    return RankBudget(
        rank=rank,
        block_count=0 if problem else share_bytes // block_bytes,
        block_bytes=block_bytes,
        free_bytes=left,
        problem=problem,
    )


def agreed_budget(parts: Sequence[RankBudget], config: KvCacheConfig, section: str) -> KvBudget:
    """The same for every rank, from what all of them measured.

    Args:
        parts: Of every rank, in rank order.
        config: The pool's.
        section: Where it stands, for messages.

    Raises:
        ConfigError: A rank has no budget, or one has measured and another has not; names the rank and the field.
    """
    field = f"{section}.kv_cache_config.{config.fraction_name}"
    for part in parts:
        if part.problem:
            raise ConfigError(field, f"rank {part.rank}: {part.problem}")
        if (part.free_bytes is None) != (parts[0].free_bytes is None):
            raise ConfigError(
                f"{section}.kv_cache_config.max_tokens",
                f"rank {part.rank} and rank {parts[0].rank} differ: one has it configured, the other has measured",
            )
    smallest = min(parts, key=lambda part: part.block_count)
    count, tokens = smallest.block_count, config.tokens_per_block
    if smallest.free_bytes is None:
        return KvBudget(block_count=count, decided_by=None, words=f"{count} blocks of {tokens} tokens, as configured")
    return KvBudget(
        block_count=count,
        decided_by=smallest.rank,
        words=(
            f"{count} blocks of {tokens} tokens on each of {len(parts)} ranks, as many as rank {smallest.rank} can have: "
            f"{smallest.free_bytes >> 20} MiB were free, {count * smallest.block_bytes >> 20} MiB are taken there"
        ),
    )
