"""What the ranks of an instance tell one another before the first request: measured memory, layouts, addresses, flags.

These are the only collectives of an instance, and they do not spin: each is started, tested, and slept on in between, so a
rank that still loads weights keeps its core. Everything that can be refused is refused here, on every rank alike, after all
ranks have entered every exchange: a mixed group fails, none hangs.
"""

from __future__ import annotations

import functools
import hashlib
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from mpi4py import MPI

from kv_bounce_planner.planning import InstanceLayout, KVLayout
from meta_executor.config import ConfigError, InstanceConfig, Role
from meta_executor.engine.base import ModelInfo
from meta_executor.supervise.procfs import ProcessIdentity

#: Pause between two tests of a start-up exchange (s).
_POLL_S = 0.002


class RankFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's contribution to the exchange."""

    rank: int
    layout: dict[str, Any]
    control_address: str
    block_count: int
    process: str
    #: ``pp_agreement.contribution`` of this rank; None with both flags off.
    agreement: Any = None
    #: First thing that this rank refuses, as (field, message); "" when nothing.
    refused_field: str = ""
    refused: str = ""


def this_process() -> str:
    """This process as "host/pid/start": unique on every host at any time."""
    identity = ProcessIdentity.of(os.getpid())
    ticks = identity.start_ticks if identity is not None else 0
    return f"{_host()}/{os.getpid()}/{ticks}"


def process_is_gone(process: str) -> bool:
    """Whether the process has ended, as far as this host can know: False for processes of another host.

    A name that is none says nothing: it may come from a peer.
    """
    host, _, numbers = process.partition("/")
    pid, _, ticks = numbers.partition("/")
    if host != _host() or not (pid.isdecimal() and ticks.isdecimal()):
        return False
    return not ProcessIdentity(int(pid), int(ticks)).alive()


@functools.cache
def _host() -> str:
    """Where numbers of processes mean the same: a kernel by its boot identifier, and in it a namespace of processes.

    Containers of one kernel have one boot identifier and cannot see each other's processes: that one is not seen there does
    not say that it has ended.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return f"{boot}:{os.readlink('/proc/self/ns/pid')}"


def wait_request(request: Any) -> None:
    """Wait for an MPI request without spinning."""
    while not request.Test():
        time.sleep(_POLL_S)


def barrier(comm: Any) -> None:
    """All ranks are here."""
    wait_request(comm.Ibarrier())


def exchange(comm: Any, data: bytes) -> list[bytes]:
    """Every rank's bytes, in rank order, on every rank."""
    size = comm.Get_size()
    mine = np.array([len(data)], np.int64)
    lengths = np.empty(size, np.int64)
    wait_request(comm.Iallgather([mine, MPI.INT64_T], [lengths, MPI.INT64_T]))
    counts = [int(length) for length in lengths]
    offsets = [sum(counts[:rank]) for rank in range(size)]
    whole = bytearray(sum(counts))
    wait_request(comm.Iallgatherv([data, MPI.BYTE], [whole, counts, offsets, MPI.BYTE]))
    return [bytes(whole[offset : offset + count]) for offset, count in zip(offsets, counts)]


def check_world(size: int, config: InstanceConfig) -> None:
    """The world has the configured size (a wrong launcher makes worlds of one).

    Raises:
        ConfigError: It has not.
    """
    if size != config.world_size:
        raise ConfigError(
            "mpiexec",
            f"this world has {size} ranks, the configuration wants {config.world_size}: another MPI's mpiexec?",
        )


def check_qualified(role: Role, config: InstanceConfig, *, generation_first: bool) -> None:
    """The topology is one that the executor is qualified for.

    Raises:
        ConfigError: It is not; names the field.
    """
    section = "context_servers" if role == "context" else "generation_servers"
    if role == "context" and config.tensor_parallel_size != 1:
        raise ConfigError(
            f"{section}.tensor_parallel_size", f"a context instance is one pipeline, got {config.tensor_parallel_size}"
        )
    if role == "generation" and config.pipeline_parallel_size != 1:
        raise ConfigError(
            f"{section}.pipeline_parallel_size",
            f"a generation instance is one attention-DP group, got {config.pipeline_parallel_size}",
        )
    transceiver = config.cache_transceiver_config
    terminal, ready = transceiver.enable_async_terminal_agreement, transceiver.enable_async_readiness_agreement
    if role == "generation" and (terminal or ready):
        raise ConfigError(
            f"{section}.cache_transceiver_config", "asynchronous agreement applies to context_servers only"
        )
    if role == "context" and (terminal or ready) and config.pipeline_parallel_size < 2:
        raise ConfigError(
            f"{section}.pipeline_parallel_size", "asynchronous agreement needs more than one stage, got 1"
        )
    if role == "context" and generation_first and terminal != ready:
        field = "enable_async_readiness_agreement" if terminal else "enable_async_terminal_agreement"
        raise ConfigError(
            f"{section}.cache_transceiver_config.{field}",
            "generation_first uses one agreement for both phases (the fence between them is part of it): set both or none",
        )


def kv_profile(model: ModelInfo) -> str:
    """What two instances must share for KV to move between them (hex)."""
    text = f"{model.name}|{model.layer_count}|{model.kv_head_count}|{model.head_dim}|{model.kv_dtype}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def agreed_facts(parts: list[bytes]) -> list[RankFacts]:
    """The exchange's facts, checked.

    Raises:
        ConfigError: A rank refused something, or ranks differ; names the rank and the field.
    """
    facts = [msgspec.json.decode(part, type=RankFacts) for part in parts]
    for rank, fact in enumerate(facts):
        if fact.rank != rank:
            raise ConfigError("rank", f"rank {rank} says that it is rank {fact.rank}")
        if fact.refused:
            raise ConfigError(fact.refused_field, f"rank {rank}: {fact.refused}")
        if fact.block_count != facts[0].block_count:
            raise ConfigError(
                "kv_cache_config", f"rank {rank} has {fact.block_count} blocks, rank 0 has {facts[0].block_count}"
            )
    return facts


def instance_layout(instance_id: str, role: Role, facts: list[RankFacts]) -> InstanceLayout:
    """How the whole instance lays its KV out."""
    ranks = tuple(KVLayout.from_json(msgspec.json.encode(fact.layout)) for fact in facts)
    if role == "context":
        return InstanceLayout(instance_id, ranks, pp_size=len(ranks))
    return InstanceLayout(instance_id, ranks, adp_size=len(ranks))
