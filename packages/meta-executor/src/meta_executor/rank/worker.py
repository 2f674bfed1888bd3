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

import msgspec
from mpi4py import MPI

from meta_executor import wire
from meta_executor.addresses import advertised_url
from meta_executor.api.endpoint import OwnedEndpoint
from meta_executor.api.instance import InstanceApi, worker_address
from meta_executor.api.service import ExecutorService
from meta_executor.api.spawned import SpawnedServer
from meta_executor.api.worker_client import PEER_TIMEOUT_S
from meta_executor.config import ConfigError, InstanceSpec, RunSpec
from meta_executor.discovery import Registration
from meta_executor.executor.account import Lifetime, rank_evidence, rank_statistics
from meta_executor.executor.admission import GenerationAdmission
from meta_executor.executor.desk import Desk
from meta_executor.executor.drive import IDLE_CAP_S, SCATTERED_CAP_S, TURN_EDGES_S, Turns, drive
from meta_executor.executor.liveness import BEAT_S, SILENT_S, Liveness
from meta_executor.executor.messages import Status
from meta_executor.executor.recording import RECORD_SUFFIX, LoopRecorder
from meta_executor.executor.request import Answers
from meta_executor.rank.assemble import Rank, assemble, log, modes_of
from meta_executor.rank.startup import barrier
from meta_executor.rank.teardown import close_transfers, tell_fault
from meta_executor.supervise.lasting import set_apart_what_lasts
from meta_executor.supervise.procfs import resident_bytes
from meta_executor.supervise.report import Reporter
from meta_executor.supervise.shm import unlink_mpich_segments
from pp_agreement import NegotiationError
from rpc_local_registry import RpcConfig, RpcServer

#: How often a rank's counters are brought up to date for rank 0 (s).
STATISTICS_EVERY_S = 0.5


class _Doorway:
    """Takes rank 0's hand-overs from the loop to the service, which is made after the loop."""

    def __init__(self) -> None:
        self.service: ExecutorService | None = None

    def deliver(self, answers: Answers) -> None:
        """One hand-over (the loop's thread)."""
        if self.service is not None:
            self.service.deliver(answers)


class InstanceServers:
    """What only rank 0 has: the worker's service, and the instance's API as a thread here or as a process of its own."""

    def __init__(self, rank: Rank, service: ExecutorService, endpoint: OwnedEndpoint) -> None:
        spec, instance = rank.identity.spec, rank.identity.instance
        self.service = service
        self.endpoint = endpoint
        self._rpc = RpcServer(
            service,
            worker_address(spec, instance),
            spec.key(),
            config=RpcConfig(peer_timeout_s=PEER_TIMEOUT_S),
            name=instance.owner_id,
        )
        self._rpc.start()
        address = str(self._rpc.address)
        self._api: SpawnedServer | InstanceApi
        if instance.config.proxy == "spawn":
            self._api = SpawnedServer(spec, instance, address)
        else:
            self._api = InstanceApi(spec, instance, address, endpoint)
        self.url = self._api.url
        self._registration: Registration | None = None

    def register(self, rank: Rank) -> None:
        """Let fronts find this instance, where the run has a store for that."""
        if rank.identity.spec.service.discovery.store is not None:
            config = rank.identity.instance.config
            url = advertised_url(config.hostname, config.advertised_host, self.url)
            self._registration = Registration(rank.identity.spec, rank.owner, url)
            self.endpoint.on_draining = self._registration.update

    def close(self) -> None:
        """Be found no more, answer what is pending, then end."""
        if self._registration is not None:
            self._registration.close()
        self.service.close()
        self._api.close()
        self._rpc.shutdown()


def run_worker(spec: RunSpec, instance: InstanceSpec, instance_id: str) -> int:
    """Build this rank, serve, drain, take apart. Returns the exit code."""
    comm = MPI.COMM_WORLD
    number = comm.Get_rank()
    reporter = Reporter(spec.run_dir, instance.owner_id, number, instance_id)
    barrier(comm)
    if number == 0:
        unlink_mpich_segments()
    doorway = _Doorway()
    rank = assemble(
        spec,
        instance,
        instance_id,
        comm,
        deliver=doorway.deliver,
        phase=lambda text: _told(reporter, text),
    )
    statistics = _Statistics(rank)
    servers = None
    if rank.desk is not None:
        endpoint = OwnedEndpoint(rank.owner, rank.agreed.info)
        doorway.service = ExecutorService(
            rank.desk,
            role=instance.role,
            endpoint=endpoint,
            statistics=statistics.instance_json,
            routing=lambda count_max: _routing_json(rank, count_max),
            condition=statistics.condition,
        )
        servers = InstanceServers(rank, doorway.service, endpoint)
    _install_signals(rank, servers)
    reporter.send("memory", rss_bytes=resident_bytes(os.getpid()), kv_bytes=rank.storage.memory.total_bytes)
    barrier(comm)
    if servers is not None:
        servers.register(rank)
        reporter.send("ready", url=servers.url, instance_id=instance_id)
        log(
            f"{instance.owner_id}: ready at {servers.url}, {rank.identity.size} ranks, generation {rank.agreed.generation}"
        )
    record_max = spec.service.record_turns_max
    recorder = LoopRecorder(rank.loop, record_max) if record_max else None
    set_apart_what_lasts()
    try:
        idle_s = IDLE_CAP_S if rank.together else SCATTERED_CAP_S
        drive(
            rank.loop,
            rank.bell,
            idle_s=idle_s,
            every_s=STATISTICS_EVERY_S,
            periodically=statistics.update,
            turns=statistics.turns,
            recorder=recorder,
        )
        if rank.loop.fault:
            log(f"{rank.identity.name}: fault: {rank.loop.fault}")
    except BaseException as error:  # noqa: BLE001 - the diagnosis goes to evidence and log, then the rank leaves
        rank.loop.fault = f"{type(error).__name__}: {error}"
        log(f"{rank.identity.name}: fault: {rank.loop.fault}\n{traceback.format_exc()}")
    if recorder is not None:
        _write_record(rank, recorder)
    return _leave(rank, servers, statistics, reporter)


def _routing_json(rank: Rank, count_max: int) -> bytes:
    """The newest decisions of rank 0's desk (any thread)."""
    admission = rank.made.admission
    if rank.desk is None or admission is None:
        raise ValueError("decisions are made on rank 0")
    decided, decisions = rank.desk.routing(count_max)
    return wire.encode_json(
        wire.InstanceRouting(
            role=rank.identity.role,
            owner_id=rank.identity.instance.owner_id,
            policy=admission.policy,
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
        self._stamp: tuple[object, ...] = ()
        identity = rank.identity
        self._liveness = Liveness(range(1, identity.size) if identity.rank == 0 else (0,))
        self._silence_s = max(identity.instance.config.cache_transceiver_config.silence_s, SILENT_S)
        self._looked_s = time.monotonic()
        self._said_s = 0.0
        self.turns = Turns()
        self.latest = wire.RankStatistics(rank=rank.identity.rank)

    def update(self, now_s: float) -> None:
        """Look again; where nothing has moved since the last look, nothing is made."""
        rank = self._rank
        if rank.watch is not None and not rank.loop.left:
            for dead, evidence in rank.watch.dead():
                rank.loop.fault = rank.loop.fault or f"rank {dead} has died: {evidence}"
        self._look(now_s)
        made = rank.made
        blocks, counters = made.blocks, made.transceiver.counters
        stamp = (
            made.loop.compute.step_count,
            made.loop.taken_count,
            len(made.registry),
            blocks.free_count,
            blocks.quarantined_count,
            counters.opened,
            counters.succeeded,
            counters.ready_votes,
            made.transceiver.links_away_count,
        )
        if stamp == self._stamp and not rank.loop.left:
            self._beat(now_s)
            return
        self._stamp = stamp
        self.latest = msgspec.structs.replace(
            rank_statistics(made, rank.agreement, rank.storage.block_bytes),
            turns=self.turns.count,
            **self._turns_longer("turns_over", self.turns.longer),
            **self._turns_longer("turns_worked_over", self.turns.worked_longer),
        )
        data = wire.encode_json(self.latest)
        if rank.desk is not None:
            rank.desk.take_statistics(0, data)
        else:
            self._said_s = now_s
            rank.link.send(0, Status(rank.identity.rank, data))
        self._beat(now_s)

    def _beat(self, now_s: float) -> None:
        """Say something to whoever counts this rank's silence: the others to rank 0, rank 0 to the others."""
        rank = self._rank
        if now_s - self._said_s < BEAT_S or rank.loop.left:
            return
        self._said_s = now_s
        number = rank.identity.rank
        for target in range(1, rank.identity.size) if number == 0 else (0,):
            rank.link.send(target, Status(number, b""))

    def _look(self, now_s: float) -> None:
        """Whom this rank has heard: rank 0 the others, they rank 0. Silence for too long is a fault like a death.

        An asynchronous agreement judges silence, too, where it waits for somebody; here it is judged at rest as well.
        """
        loop = self._rank.loop
        self._liveness.look(now_s, loop.heard)
        loop.heard = set()
        self._looked_s = now_s
        silent, silent_s = self._liveness.longest()
        if silent_s > self._silence_s and not loop.left:
            loop.fault = loop.fault or f"rank {silent} was not heard for {silent_s:.0f} s"

    def condition(self) -> str:
        """Why this instance cannot serve now, as rank 0 can tell (any thread); "" while it can."""
        rank = self._rank
        if rank.loop.fault:
            return rank.loop.fault
        silent, silent_s = self._liveness.longest()
        stood_s = time.monotonic() - self._looked_s
        if stood_s > SILENT_S:
            return f"the loop of rank 0 has not turned for {stood_s:.0f} s"
        if silent_s > SILENT_S:
            return f"rank {silent} was not heard for {silent_s:.0f} s"
        away = {
            number: statistics.links_away_now
            for number, statistics in self._ranks().items()
            if statistics.links_away_now > 0
        }
        if away:
            return ", ".join(f"rank {number}: {count} control links are away" for number, count in away.items())
        return ""

    def _ranks(self) -> dict[int, wire.RankStatistics]:
        """What each rank said last (any thread)."""
        known = dict(self._rank.desk.rank_statistics) if self._rank.desk is not None else {}
        return {number: msgspec.json.decode(data, type=wire.RankStatistics) for number, data in known.items()}

    @staticmethod
    def _turns_longer(name: str, counts: list[int]) -> dict[str, int]:
        return {f"{name}_{1000 * edge_s:g}ms": n for edge_s, n in zip(TURN_EDGES_S, counts, strict=True)}

    def instance_json(self) -> bytes:
        """The instance's counters (any thread)."""
        rank, identity = self._rank, self._rank.identity
        desk = rank.desk
        if desk is None:
            return b"{}"
        known = self._ranks()
        ranks = [known.get(number) or wire.RankStatistics(rank=number) for number in range(identity.size)]
        counts = desk.statistics()
        steps_ms = sorted(1000.0 * s for s in list(rank.loop.compute.step_times_s))
        admission = rank.made.admission
        return wire.encode_json(
            wire.InstanceStatistics(
                role=identity.role,
                owner_id=identity.instance.owner_id,
                instance_id=identity.instance_id,
                generation=rank.agreed.generation,
                uptime_s=0.0,
                ranks=ranks,
                routed_per_rank=list(admission.routed) if isinstance(admission, GenerationAdmission) else [],
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


def _install_signals(rank: Rank, servers: InstanceServers | None) -> None:
    """SIGTERM and SIGINT reach every rank through the guards: rank 0 drains, the others wait to be told."""
    desk = rank.desk
    if desk is None or servers is None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        return

    def drain(received: int, frame: object) -> None:
        _begin_drain(desk, servers, rank.identity.spec.service.drain_timeout_s)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, drain)


def _begin_drain(desk: Desk, servers: InstanceServers, timeout_s: float) -> None:
    servers.endpoint.start_draining()
    desk.drain(time.monotonic() + timeout_s)


def _leave(rank: Rank, servers: InstanceServers | None, statistics: _Statistics, reporter: Reporter) -> int:
    """Write evidence, then take apart in the order that proof allows."""
    loop = rank.loop
    if loop.fault:
        tell_fault(rank.agreement, loop.fault)
    deadline = time.monotonic() + 5.0
    while not loop.fault and rank.link.unsent_count and time.monotonic() < deadline:
        # The last frame (Leave, on its way down the pipeline) must be out before its link goes.
        rank.link.poll()
        rank.bell.wait(0.001)
    statistics.update(time.monotonic())
    _write_evidence(rank, statistics.latest)
    if servers is not None:
        servers.close()
    if loop.fault or not loop.drained:
        reporter.send("status", phase="fault" if loop.fault else "undrained")
        log(f"{rank.identity.name}: leaves without proof: {loop.fault or 'not drained in time'}")
        return 1
    proven = close_transfers(
        rank.transfers.session,
        rank.transfers.release,
        lambda line: log(f"{rank.identity.name}: {line}"),
    )
    closed = rank.agreement.close(5.0) if rank.agreement is not None else True
    if rank.agreement is not None and not closed:
        rank.agreement.abandon()
    rank.listening.close()
    rank.engine.close()
    if rank.owner.generation is not None:
        if rank.owner.state.name == "PUBLISHED":
            rank.owner.start_draining()
        rank.owner.retire(rank.owner.generation, abandon=True)
    rank.work.close()
    rank.link.free()
    rank.bell.close()
    return 0 if proven and closed else 1


def _write_evidence(rank: Rank, statistics: wire.RankStatistics) -> None:
    identity = rank.identity
    lifetime = Lifetime(
        owner_id=identity.instance.owner_id,
        instance_id=identity.instance_id,
        generation=rank.agreed.generation,
        world_size=identity.size,
        modes=modes_of(rank),
    )
    evidence = rank_evidence(rank.made, statistics, rank.agreement, lifetime)
    target = identity.spec.path("evidence", f"{identity.instance.owner_id}.{identity.rank}.json")
    partial = target.with_suffix(".partial")
    partial.write_text(json.dumps(evidence, indent=1, default=str), encoding="utf-8")
    partial.replace(target)


def _write_record(rank: Rank, recorder: LoopRecorder) -> None:
    """What the loop did with its time, beside the evidence."""
    identity = rank.identity
    owner = identity.instance.owner_id
    record = recorder.record(owner, identity.rank, identity.role, rank.step_recorder)
    target = identity.spec.path("evidence", f"{owner}.{identity.rank}{RECORD_SUFFIX}")
    partial = target.with_suffix(".partial")
    partial.write_bytes(msgspec.msgpack.encode(record))
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
        named = isinstance(error, NegotiationError)
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
