"""A measured KV budget: what one rank measures, what all agree on, what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from endpoint_lifecycle import EndpointOwner
from meta_executor.config import ConfigError, KvCacheConfig, SyntheticConfig
from meta_executor.engine.base import StageSpec
from meta_executor.engine.synthetic import SyntheticEngine
from meta_executor.rank.free_memory import host_free_bytes
from meta_executor.rank.kv_budget import RankBudget, agreed_budget, block_bytes_of, measure_budget

SHAPE = SyntheticConfig(layer_count=6, kv_head_count=2, head_dim=8)
#: Keys and values, 16 tokens, 2 heads of 8 float32, per layer (bytes).
LAYER_BLOCK_BYTES = 2 * 16 * 2 * 8 * 4


class Transport:
    """Says what was done with it, to the same list as everything else."""

    def __init__(self, told: list[str], fail: str = "") -> None:
        self._told = told
        self._fail = fail

    def register(self, regions: list[Any]) -> None:
        self._told.append(f"register {sum(r.byte_count for r in regions)}")
        if self._fail:
            raise RuntimeError(self._fail)

    def agent_info(self, peer: Any) -> bytes:
        self._told.append("agent")
        return b""

    def close(self) -> None:
        self._told.append("close")


def measured(
    config: KvCacheConfig,
    free: int | OSError,
    *,
    layers: tuple[int, int] = (0, 6),
    sharing: int = 1,
    told: list[str] | None = None,
    fail: str = "",
    arena: Any = None,
) -> RankBudget:
    told = [] if told is None else told
    first, count = layers
    engine = SyntheticEngine(SHAPE, StageSpec(0, 1, first, count))
    owner = EndpointOwner("gen-0", "i1", "generation")

    def probe() -> int:
        told.append(f"measure in {owner.state.name}")
        if isinstance(free, OSError):
            raise free
        return free

    try:
        budget = measure_budget(
            owner,
            engine,
            config,
            rank=3,
            sharing_ranks=sharing,
            arena=arena,
            free_bytes=probe,
            together=lambda: told.append("together"),
            open_transport=lambda name: Transport(told, fail),
        )
    finally:
        engine.close()
    owner.finalize()  # refused while an estimation runtime is open
    return budget


def test_a_configured_capacity_is_taken_as_it_is_and_nothing_is_measured() -> None:
    """Rounded up to whole blocks; no agent, no barrier, no probe."""
    told: list[str] = []
    budget = measured(KvCacheConfig(max_tokens=100), 1, told=told)
    assert (budget.block_count, budget.free_bytes, budget.problem) == (7, None, "")
    assert told == []


def test_every_rank_has_opened_before_one_measures_and_measured_before_one_closes() -> None:
    """Agent and arena are open at the probe, the estimation runtime is the one that holds them, and it ends."""
    told: list[str] = []
    measured(KvCacheConfig(max_tokens=None), 1 << 20, told=told, arena=np.zeros(4096, np.uint8))
    assert told == ["register 4096", "agent", "together", "measure in ESTIMATING", "together", "close"]


@pytest.mark.parametrize(
    ("free_blocks", "fraction", "sharing", "want"),
    [(100, None, 1, 50), (100, 1.0, 1, 100), (100, 0.5, 4, 12), (7, 0.5, 1, 3), (2, 0.5, 1, 1)],
)
def test_the_share_is_the_fraction_split_among_the_ranks_in_whole_blocks(
    free_blocks: int, fraction: float | None, sharing: int, want: int
) -> None:
    """Never rounded up: 3.5 blocks are 3."""
    config = KvCacheConfig(max_tokens=None, free_memory_fraction=fraction)
    budget = measured(config, free_blocks * 6 * LAYER_BLOCK_BYTES, sharing=sharing)
    assert (budget.block_count, budget.block_bytes, budget.problem) == (want, 6 * LAYER_BLOCK_BYTES, "")
    assert budget.free_bytes == free_blocks * 6 * LAYER_BLOCK_BYTES


def test_the_fields_usual_name_of_the_fraction_means_the_same() -> None:
    """``free_gpu_memory_fraction`` 0.25 of 100 blocks."""
    config = KvCacheConfig(max_tokens=None, free_gpu_memory_fraction=0.25)
    assert measured(config, 100 * 6 * LAYER_BLOCK_BYTES).block_count == 25
    assert config.fraction_name == "free_gpu_memory_fraction"


def test_a_stage_with_fewer_layers_has_smaller_blocks_and_more_of_them() -> None:
    """Bytes of a block follow the stage's own layers."""
    config = KvCacheConfig(max_tokens=None, free_memory_fraction=1.0)
    free = 60 * LAYER_BLOCK_BYTES
    assert measured(config, free, layers=(0, 4)).block_count == 15
    assert measured(config, free, layers=(4, 2)).block_count == 30


@pytest.mark.parametrize(
    ("free", "fail", "words"),
    [
        (LAYER_BLOCK_BYTES, "", "one block of 16 tokens has"),
        (OSError("no meminfo"), "", "cannot measure free memory: OSError: no meminfo"),
        (1 << 30, "no such device", "cannot open a transfer agent: RuntimeError: no such device"),
    ],
)
def test_a_problem_is_part_of_the_answer_and_nobody_is_left_waiting(free: Any, fail: str, words: str) -> None:
    """Both barriers are passed and the agent is closed, whatever went wrong; the budget is nothing."""
    told: list[str] = []
    config = KvCacheConfig(max_tokens=None, free_memory_fraction=1.0)
    budget = measured(config, free, told=told, fail=fail, arena=np.zeros(16, np.uint8))
    assert budget.block_count == 0 and words in budget.problem
    assert told.count("together") == 2 and told[-1] == "close"


def parts(*counts: int, free: int | None = 1 << 30) -> list[RankBudget]:
    return [RankBudget(rank=r, block_count=c, block_bytes=4096, free_bytes=free) for r, c in enumerate(counts)]


def test_the_smallest_budget_is_everybodys() -> None:
    """Whoever has it is named in the words for the log."""
    agreed = agreed_budget(parts(90, 70, 80), KvCacheConfig(max_tokens=None), "context_servers")
    assert (agreed.block_count, agreed.decided_by) == (70, 1)
    assert "on each of 3 ranks" in agreed.words and "rank 1" in agreed.words and "1024 MiB" in agreed.words
    configured = agreed_budget(parts(64, 64, free=None), KvCacheConfig(), "context_servers")
    assert (configured.block_count, configured.decided_by) == (64, None)


def test_a_rank_without_a_budget_is_refused_by_name() -> None:
    """The field under the name that was used, the rank, and its words; also where only one rank has measured."""
    bad = parts(90, 70)
    bad[1] = RankBudget(rank=1, block_count=0, block_bytes=4096, free_bytes=9, problem="9 bytes are free")
    with pytest.raises(ConfigError) as caught:
        agreed_budget(bad, KvCacheConfig(max_tokens=None), "context_servers")
    assert caught.value.field == "context_servers.kv_cache_config.free_memory_fraction"
    assert "rank 1: 9 bytes are free" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        agreed_budget(bad, KvCacheConfig(max_tokens=None, free_gpu_memory_fraction=0.1), "generation_servers")
    assert caught.value.field == "generation_servers.kv_cache_config.free_gpu_memory_fraction"
    mixed = [*parts(90), RankBudget(rank=1, block_count=64, block_bytes=4096)]
    with pytest.raises(ConfigError, match="rank 1 and rank 0 differ"):
        agreed_budget(mixed, KvCacheConfig(max_tokens=None), "context_servers")


# -- what is free -----------------------------------------------------------------------------------------------------

MIB = 1 << 20


def kernel(folder: Path, *, available_mib: int, groups: str = "") -> tuple[Path, Path]:
    proc, cgroup = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    cgroup.mkdir()
    (proc / "meminfo").write_text(f"MemTotal: 999999 kB\nMemAvailable:   {available_mib * 1024} kB\n")
    (proc / "self" / "cgroup").write_text(groups)
    return proc, cgroup


def group(path: Path, version: int, limit: str, usage_mib: int, cache_mib: int) -> None:
    path.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    (path / names[0]).write_text(limit + "\n")
    (path / names[1]).write_text(f"{usage_mib * MIB}\n")
    (path / "memory.stat").write_text(f"anon 5\n{names[2]} {cache_mib * MIB}\n")


def test_without_limits_it_is_what_the_kernel_has_available(tmp_path: Path) -> None:
    """MemAvailable, in bytes; a kernel that does not say it is an error."""
    proc, groups = kernel(tmp_path, available_mib=300)
    assert host_free_bytes(proc, groups) == 300 * MIB
    (proc / "meminfo").write_text("MemTotal: 1 kB\n")
    with pytest.raises(OSError, match="MemAvailable"):
        host_free_bytes(proc, groups)


def test_the_tightest_limit_on_the_way_up_decides_and_page_cache_is_free(tmp_path: Path) -> None:
    """Version 2: the parent leaves 40 MiB, the group itself 60 of which 10 are cache; unlimited levels say nothing."""
    proc, groups = kernel(tmp_path, available_mib=300, groups="0::/slice/job\n")
    group(groups / "slice" / "job", 2, str(100 * MIB), 50, 10)
    group(groups / "slice", 2, "max", 200, 0)
    assert host_free_bytes(proc, groups) == 60 * MIB
    group(groups / "slice", 2, str(240 * MIB), 200, 0)
    assert host_free_bytes(proc, groups) == 40 * MIB
    group(groups / "slice", 2, str(100 * MIB), 200, 0)
    assert host_free_bytes(proc, groups) == 0


def test_version_one_and_a_container_whose_path_is_the_hosts(tmp_path: Path) -> None:
    """The path is not there; the mounted root is the container's own and limits it."""
    proc, groups = kernel(tmp_path, available_mib=300, groups="4:memory:/docker/abc\n3:cpu:/x\n")
    group(groups / "memory", 1, str(128 * MIB), 28, 0)
    assert host_free_bytes(proc, groups) == 100 * MIB
    group(groups / "memory", 1, "9223372036854771712", 28, 0)
    assert host_free_bytes(proc, groups) == 300 * MIB


# -- real ranks -------------------------------------------------------------------------------------------------------


@pytest.mark.mpi(4)
def test_four_ranks_that_measure_differently_take_the_smallest_or_refuse_alike(world_comm: Any) -> None:
    """Scripted probes: 40, 30, 20, 10 MiB free on stages of 2, 2, 1, 1 layers; then rank 2 can measure nothing."""
    import msgspec

    from meta_executor.rank.startup import barrier, exchange

    rank = world_comm.Get_rank()
    config = KvCacheConfig(max_tokens=None, free_memory_fraction=1.0)
    stages = ((0, 2), (2, 2), (4, 1), (5, 1))

    def agreed(free_bytes: Any) -> Any:
        engine = SyntheticEngine(SHAPE, StageSpec(rank, 4, *stages[rank]))
        try:
            mine = measure_budget(
                EndpointOwner("ctx-0", "i1", "context"),
                engine,
                config,
                rank=rank,
                sharing_ranks=4,
                arena=None,
                free_bytes=free_bytes,
                together=lambda: barrier(world_comm),
                open_transport=lambda name: Transport([]),
            )
        finally:
            engine.close()
        heard = exchange(world_comm, msgspec.json.encode(mine))
        return agreed_budget([msgspec.json.decode(p, type=RankBudget) for p in heard], config, "context_servers")

    found = agreed(lambda: (40 - 10 * rank) * MIB)
    shares = [(40 - 10 * r) * MIB // 4 // (stages[r][1] * LAYER_BLOCK_BYTES) for r in range(4)]
    assert len(set(shares)) > 2 and found.block_count == min(shares)
    assert found.decided_by == shares.index(min(shares))

    def broken() -> int:
        if rank == 2:
            raise OSError("no meminfo here")
        return 40 * MIB

    with pytest.raises(ConfigError, match="rank 2: cannot measure free memory: OSError: no meminfo here"):
        agreed(broken)
    barrier(world_comm)


def test_block_bytes_are_what_the_engine_allocates() -> None:
    """The formula and a real allocation agree."""
    engine = SyntheticEngine(SHAPE, StageSpec(0, 1, 0, 6))
    try:
        memory = engine.allocate_kv(5, 16)
        assert sum(size for _, size in memory.regions) == 5 * block_bytes_of(engine, 16)
    finally:
        engine.close()
