"""One rank of an instance, under mpiexec:
``python -m meta_executor.rank.worker --run-dir DIR --owner ctx-0 --instance-id HEX``.

Rank 0 also runs the API server, in a thread of its own or as a process of its own. SIGTERM (or ``/internal/drain``) drains;
the other ranks are told by rank 0. Exit code 0: drained, everything proven and taken apart. 1: a fault or an unproven rest;
then evidence says what, and memory that a peer may still touch is not released but left to the end of the process.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import traceback
from typing import Any

import msgspec
from mpi4py import MPI

from meta_executor import wire
from meta_executor.api.batching import batching_of
from meta_executor.api.endpoint import OwnedEndpoint, info_json
from meta_executor.api.proxy import Proxy
from meta_executor.api.server import ApiServer, ServerThread
from meta_executor.api.service import ExecutorService
from meta_executor.config import ConfigError, InstanceSpec, RunSpec
from meta_executor.executor.account import rank_evidence, rank_statistics
from meta_executor.executor.desk import Desk
from meta_executor.executor.drive import drive
from meta_executor.executor.messages import Status
from meta_executor.rank.assemble import Rank, assemble, log
from meta_executor.rank.startup import barrier
from meta_executor.rank.teardown import close_transfers
from meta_executor.supervise.procfs import resident_bytes
from meta_executor.supervise.report import Reporter
from meta_executor.supervise.shm import unlink_mpich_segments
from rpc_local_registry import RpcServer

#: How often a rank's counters are brought up to date for rank 0 (s).
STATISTICS_EVERY_S = 0.1


class FrontOfHouse:
    """What only rank 0 has: the worker's service, and the API server."""

    def __init__(self, rank: Rank, service: ExecutorService, endpoint: OwnedEndpoint) -> None:
        spec, config = rank.spec, rank.instance.config
        self.service = service
        self.endpoint = endpoint
        self._rpc = RpcServer(
            service, f"ipc://{spec.path('ipc', f'{rank.instance.owner_id}.w')}", spec.key(), name=rank.instance.owner_id
        )
        self._rpc.start()
        self._spawned: Any = None
        self._server: ServerThread | None = None
        self.url = ""
        if config.proxy == "spawn":
            from meta_executor.api.spawned import SpawnedServer

            self._spawned = SpawnedServer(spec, rank.instance, str(self._rpc.address))
            self.url = self._spawned.url
            return
        proxy = Proxy(
            str(self._rpc.address),
            spec.key(),
            fast_path=bool(config.rpc.local_fastpath),
            batching=batching_of(rank.instance),
        )
        api = ApiServer(
            proxy,
            self.endpoint,
            spec.key().hex(),
            fault=lambda: rank.loop.fault,
            drain_timeout_s=spec.service.drain_timeout_s,
        )
        self._server = ServerThread(api, config.hostname, rank.instance.port)
        self._server.start()
        self.url = self._server.url

    def close(self) -> None:
        """Answer what is pending, then end."""
        self.service.close()
        if self._server is not None:
            self._server.stop()
        if self._spawned is not None:
            self._spawned.stop()
        self._rpc.shutdown()


def run_worker(spec: RunSpec, instance: InstanceSpec, instance_id: str) -> int:
    """Build this rank, serve, drain, take apart. Returns the exit code."""
    comm = MPI.COMM_WORLD
    number = comm.Get_rank()
    reporter = Reporter(spec.run_dir, instance.owner_id, number, instance_id)
    barrier(comm)
    if number == 0:
        unlink_mpich_segments()

    holder: dict[str, Any] = {}

    def deliver(answers: list[Any]) -> None:
        holder["service"].deliver(answers)

    rank = assemble(
        spec,
        instance,
        instance_id,
        comm,
        deliver=deliver,
        phase=lambda text: _told(reporter, text),
    )
    statistics = _Statistics(rank)
    house = None
    if rank.desk is not None:
        endpoint = OwnedEndpoint(rank.owner, rank.info)
        holder["service"] = ExecutorService(
            rank.desk,
            statistics=statistics.instance_json,
            info=info_json(endpoint),
            routing=lambda count_max: _routing_json(rank, count_max),
        )
        house = FrontOfHouse(rank, holder["service"], endpoint)
    _install_signals(rank, house)
    reporter.send("memory", rss_bytes=resident_bytes(os.getpid()), kv_bytes=rank.memory.total_bytes)
    barrier(comm)
    if house is not None:
        reporter.send("ready", url=house.url, instance_id=instance_id)
        log(f"{instance.owner_id}: ready at {house.url}, {rank.size} ranks, generation {rank.generation}")
    try:
        drive(rank.loop, rank.backoff, every_s=STATISTICS_EVERY_S, periodically=statistics.update)
        if rank.loop.fault:
            log(f"{instance.owner_id} rank {number}: fault: {rank.loop.fault}")
    except BaseException as error:  # noqa: BLE001 - the diagnosis goes to evidence and log, then the rank leaves
        rank.loop.fault = f"{type(error).__name__}: {error}"
        log(f"{instance.owner_id} rank {number}: fault: {rank.loop.fault}\n{traceback.format_exc()}")
    return _leave(rank, house, statistics, reporter)


def _routing_json(rank: Rank, count_max: int) -> bytes:
    """The newest decisions of rank 0's desk (any thread)."""
    if rank.desk is None:
        raise ValueError("decisions are made on rank 0")
    decided, decisions = rank.desk.routing(count_max)
    return wire.encode_json(
        wire.InstanceRouting(
            role=rank.instance.role,
            owner_id=rank.instance.owner_id,
            policy=rank.admission.policy,
            decided=decided,
            decisions=decisions,
        )
    )


def _told(reporter: Reporter, phase: str) -> None:
    reporter.send("status", phase=phase)


class _Statistics:
    """This rank's counters, sent to rank 0 when they have changed; rank 0 keeps everybody's."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._last = b""
        self.latest = wire.RankStatistics(rank=rank.rank)

    def update(self, now_s: float) -> None:
        """Look again."""
        rank = self._rank
        if rank.watch is not None and not rank.loop.left:
            for dead, evidence in rank.watch.dead():
                rank.loop.fault = rank.loop.fault or f"rank {dead} has died: {evidence}"
        self.latest = rank_statistics(rank.loop, rank.transceiver, rank.blocks, rank.agreement, rank.block_bytes)
        data = wire.encode_json(self.latest)
        if data == self._last:
            return
        self._last = data
        if rank.desk is not None:
            rank.desk.take_statistics(0, data)
        else:
            rank.link.send(0, Status(rank.rank, data))

    def instance_json(self) -> bytes:
        """The instance's counters (any thread)."""
        rank = self._rank
        desk = rank.desk
        if desk is None:
            return b"{}"
        known = dict(desk.rank_statistics)
        ranks = [
            msgspec.json.decode(known[number], type=wire.RankStatistics)
            if number in known
            else wire.RankStatistics(rank=number)
            for number in range(rank.size)
        ]
        counts = desk.statistics()
        steps_ms = sorted(1000.0 * s for s in list(rank.loop.step_times_s))
        return wire.encode_json(
            wire.InstanceStatistics(
                role=rank.instance.role,
                owner_id=rank.instance.owner_id,
                instance_id=rank.instance_id,
                generation=rank.generation,
                uptime_s=0.0,
                ranks=ranks,
                routed_per_rank=list(getattr(rank.admission, "routed", [])),
                requests_live_now=counts.live,
                requests_waiting_now=counts.waiting,
                requests_ok=counts.completed,
                requests_failed=counts.failed,
                requests_cancelled=counts.cancelled,
                tokens_returned=counts.tokens_returned,
                step_p50_ms=steps_ms[len(steps_ms) // 2] if steps_ms else 0.0,
                step_p99_ms=steps_ms[int(len(steps_ms) * 0.99)] if steps_ms else 0.0,
            )
        )


def _install_signals(rank: Rank, house: FrontOfHouse | None) -> None:
    """SIGTERM and SIGINT reach every rank through the guards: rank 0 drains, the others wait to be told."""
    desk = rank.desk
    if desk is None or house is None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        return

    def drain(received: int, frame: object) -> None:
        _begin_drain(desk, house, rank.spec.service.drain_timeout_s)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, drain)


def _begin_drain(desk: Desk, house: FrontOfHouse, timeout_s: float) -> None:
    house.endpoint.start_draining()
    desk.drain(time.monotonic() + timeout_s)


def _leave(rank: Rank, house: FrontOfHouse | None, statistics: _Statistics, reporter: Reporter) -> int:
    """Write evidence, then take apart in the order that proof allows."""
    loop = rank.loop
    deadline = time.monotonic() + 5.0
    while not loop.fault and rank.link.unsent_count and time.monotonic() < deadline:
        # The last frame (Leave, on its way down the pipeline) must be out before its link goes.
        rank.link.poll()
        time.sleep(0.001)
    statistics.update(time.monotonic())
    _write_evidence(rank, statistics.latest)
    if house is not None:
        house.close()
    if loop.fault or not loop.drained:
        reporter.send("status", phase="fault" if loop.fault else "undrained")
        log(f"{rank.instance.owner_id} rank {rank.rank}: leaves without proof: {loop.fault or 'not drained in time'}")
        return 1
    proven = close_transfers(
        rank.session,
        (rank.control.close, lambda: rank.transport.deregister(rank.registration), rank.transport.close),
        lambda line: log(f"{rank.instance.owner_id} rank {rank.rank}: {line}"),
    )
    closed = rank.agreement.close(5.0) if rank.agreement is not None else True
    rank.listening.close()
    rank.engine.close()
    if rank.owner.generation is not None:
        rank.owner.start_draining() if rank.owner.state.name == "PUBLISHED" else None
        rank.owner.retire(rank.owner.generation, abandon=True)
    rank.work.close()
    rank.link.free()
    return 0 if proven and closed else 1


def _write_evidence(rank: Rank, statistics: wire.RankStatistics) -> None:
    evidence = rank_evidence(
        rank.loop,
        statistics,
        rank.transceiver,
        rank.agreement,
        owner_id=rank.instance.owner_id,
        instance_id=rank.instance_id,
        generation=rank.generation,
        world_size=rank.size,
        modes=rank.modes,
    )
    target = rank.spec.path("evidence", f"{rank.instance.owner_id}.{rank.rank}.json")
    partial = target.with_suffix(".partial")
    partial.write_text(json.dumps(evidence, indent=1, default=str), encoding="utf-8")
    partial.replace(target)


def main(arguments: list[str] | None = None) -> int:
    """Run one rank. Never returns to a half-finished MPI: an error ends the process at once."""
    parser = argparse.ArgumentParser(prog="meta_executor.rank.worker")
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--owner", required=True)
    parser.add_argument("--instance-id", required=True)
    options = parser.parse_args(arguments)
    spec = RunSpec.load(options.run_dir)
    code = 1
    try:
        code = run_worker(spec, spec.instance(options.owner), options.instance_id)
    except ConfigError as error:
        log(f"{options.owner} rank {MPI.COMM_WORLD.Get_rank()}: {error}")
        code = 2
    except Exception as error:  # noqa: BLE001 - told in full, then the process leaves
        named = type(error).__name__ == "NegotiationError"
        log(f"{options.owner} rank {MPI.COMM_WORLD.Get_rank()}: {type(error).__name__}: {error}")
        if not named:
            log(traceback.format_exc())
        code = 2 if named else 1
    if code == 0:
        return 0
    # No Free, no Finalize: peers may be gone, and a collective would wait for them for ever.
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
