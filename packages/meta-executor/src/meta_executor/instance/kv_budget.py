"""How many KV blocks a rank can have: configured, or measured by an estimation runtime that never publishes anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from endpoint_lifecycle import EndpointOwner
from kv_bounce_planner import MemoryRegion, NixlTransport, PeerId
from meta_executor.config import KvCacheConfig
from meta_executor.engine.base import Engine


def block_bytes_of(engine: Engine, block_tokens: int) -> int:
    """Bytes of one block on this stage: keys and values of its layers."""
    model = engine.model
    element_bytes = {"float32": 4, "bfloat16": 2, "float16": 2}[model.kv_dtype]
    return 2 * engine.stage.layer_count * block_tokens * model.kv_head_count * model.head_dim * element_bytes


def available_bytes(device: str) -> int:
    """Memory that one could still take: of the host, or of the rank's CUDA device."""
    if device == "cuda":
        import torch

        return int(torch.cuda.mem_get_info()[0])
    for line in Path("/proc/meminfo").read_text("ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("MemAvailable is missing from /proc/meminfo")


def estimate_blocks(
    owner: EndpointOwner,
    engine: Engine,
    config: KvCacheConfig,
    *,
    device: str,
    ranks_on_node: int,
    arena: Any | None,
) -> int:
    """Blocks of this rank (count, >= 1).

    The estimation runtime opens what the final one will hold besides the KV (a transfer agent and the registered bounce
    arenas), so that its memory counts, measures what is left, and closes everything; the account stays with the owner.

    Args:
        owner: In its estimation state for the duration.
        engine: Loaded; its weights count already.
        config: ``max_tokens`` set: that capacity; None: ``free_memory_fraction`` of what is left, shared by the node's ranks.
        device: ``cpu`` or ``cuda``.
        ranks_on_node: Ranks that share the memory (count).
        arena: Bounce memory as a numpy array, or None.
    """
    block_bytes = block_bytes_of(engine, config.tokens_per_block)
    with owner.begin_estimation() as runtime:
        if config.max_tokens is not None:
            count = -(-config.max_tokens // config.tokens_per_block)
            runtime.opened("kv-blocks", size_bytes=count * block_bytes)
            runtime.closed("kv-blocks")
            return count
        transport = NixlTransport(PeerId("estimation", owner.instance_id[:32], 0))
        try:
            arena_bytes = 0 if arena is None else int(arena.nbytes)
            runtime.opened("bounce-arena", size_bytes=arena_bytes)
            if arena is not None:
                transport.register([MemoryRegion(int(arena.ctypes.data), arena_bytes)])
            transport.agent_info(PeerId("estimation-peer", "0", 0))
            left = available_bytes(device)
        finally:
            transport.close()
            runtime.closed("bounce-arena")
    return max(1, int(left * config.free_memory_fraction / ranks_on_node) // block_bytes)
