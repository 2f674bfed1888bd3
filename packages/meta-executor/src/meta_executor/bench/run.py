"""One trial: start a service, load it, take its counters, drain it, judge its evidence."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import msgspec

from meta_executor.api.server import API_THREAD
from meta_executor.bench.load import LoadConfig, LoadResult, Outcome, run_generator, run_load
from meta_executor.bench.loops import every_loop
from meta_executor.bench.proxy_client import ProxySpec
from meta_executor.bench.report import Report, make_report
from meta_executor.bench.sampling import Sampler, usage_between
from meta_executor.config import ConfigError, ServiceConfig
from meta_executor.evidence.records import read_folder
from meta_executor.evidence.verify import verify_folder
from meta_executor.executor.recording import RECORD_SUFFIX, LoopRecord
from meta_executor.supervise.launch import Launcher
from meta_executor.wire import InstanceRouting, InstanceStatistics, ServerInfo

#: Who is asked: the front, as clients do, or a generation instance's own door, as a front's proxy does.
Drive = Literal["front", "proxy"]


@dataclass(frozen=True)
class Trial:
    """What a trial left: its report, every request's outcome, the ranks' records, and the window of the figures (monotonic
    time, ns)."""

    report: Report
    outcomes: tuple[Outcome, ...]
    records: tuple[LoopRecord, ...]
    window_ns: tuple[int, int]


def run_trial(
    service: ServiceConfig,
    load: LoadConfig,
    evidence: Path,
    say: Callable[[str], None],
    *,
    drive: Drive = "front",
    pin: bool = False,
) -> Trial:
    """Run one trial.

    Args:
        service: What to start; its evidence folder is replaced.
        load: What to ask.
        evidence: Folder for the evidence files; it must be empty or missing, lifetimes are not mixed.
        say: Takes a line for the person.
        drive: Who is asked. At the proxy's API there is a generation instance alone, which computes the prompts itself.
        pin: The load generator has this machine's first core for itself, the service the others.

    Raises:
        FileExistsError: The folder holds evidence already.
        ConfigError, RunFailed: The service could not be started, or died; or there is no second core to pin to.
    """
    if evidence.is_dir() and any(evidence.glob("*.json")):
        raise FileExistsError(f"{evidence} holds evidence of another run")
    service = msgspec.structs.replace(service, evidence_dir=str(evidence))
    cores = sorted(os.sched_getaffinity(0))
    if pin and len(cores) < 2:
        raise ConfigError("pin", "there is one core only: nothing can be pinned apart")
    if drive == "front":
        launcher = Launcher(service, say=say)
    else:
        launcher = Launcher(service, say=say, roles=("generation",), with_front=False)
    with _on_cores(cores[1:] if pin else cores), launcher.started():
        asked = _Asked(launcher)
        processes = {name: pid for name, pid in launcher.processes().items() if "/rank" in name or name == "front"}
        say(f"{load.requests} requests to {launcher.front_url if drive == 'front' else 'the door of gen-0'}")
        with Sampler(processes, asked.queues) as sampler:
            result = asked.load(service, load, drive, (cores[0],) if pin else ())
        looks = sampler.looks()
        counted = {owner: asked.statistics(owner) for owner in launcher.urls()}
        policies = {owner: asked.policy(owner) for owner in launcher.urls()}
    window_s = tuple(result.began_s + at_s for at_s in result.window_s(load))
    window_ns = int(window_s[0] * 1e9), int(window_s[1] * 1e9)
    records = read_records(evidence)
    names = {f"{one.owner_id}/rank{one.rank}": one.threads for one in records}
    report = make_report(
        result,
        counted,
        verify_folder(evidence),
        load=load,
        loops=every_loop(records, window_ns),
        usage=usage_between(looks, (window_s[0], window_s[1]), names),
        modes=modes_seen(evidence, counted, policies, records),
    )
    return Trial(report, result.outcomes, records, window_ns)


@contextlib.contextmanager
def _on_cores(cores: list[int]) -> Iterator[None]:
    """This process, and what it starts, on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class _Asked:
    """What a trial asks a running service."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    def _get(self, url: str) -> bytes:
        answer = httpx.get(url, headers=self._launcher.key_header, timeout=60.0, trust_env=False)
        return answer.raise_for_status().content

    def statistics(self, owner: str) -> InstanceStatistics:
        """An instance's counters."""
        url = f"{self._launcher.urls()[owner]}/internal/statistics"
        return msgspec.json.decode(self._get(url), type=InstanceStatistics)

    def queues(self) -> dict[str, tuple[int, int]]:
        """Requests of each instance, and those of them that wait to be admitted (count)."""
        every = {owner: self.statistics(owner) for owner in self._launcher.urls()}
        return {owner: (one.requests_live_now, one.requests_waiting_now) for owner, one in every.items()}

    def policy(self, owner: str) -> str:
        """How an instance chooses a rank."""
        url = f"{self._launcher.urls()[owner]}/debug/routing?limit=1"
        return msgspec.json.decode(self._get(url), type=InstanceRouting).policy

    def info(self, owner: str) -> ServerInfo:
        """An instance's endpoint record."""
        return msgspec.json.decode(self._get(f"{self._launcher.urls()[owner]}/server_info"), type=ServerInfo)

    def load(self, service: ServiceConfig, load: LoadConfig, drive: Drive, cores: tuple[int, ...]) -> LoadResult:
        """Send it."""
        infos = {owner: self.info(owner) for owner in self._launcher.urls()}
        vocab_size = min(info.vocab_size for info in infos.values())
        if drive == "front":
            models: dict[str, Any] = msgspec.json.decode(self._get(f"{self._launcher.front_url}/v1/models"))
            return run_load(self._launcher.front_url, models["data"][0]["id"], vocab_size, load, cpus=cores)
        info, rpc = infos["gen-0"], service.generation_servers.rpc
        spec = ProxySpec(
            address=info.service_address,
            key=next(iter(self._launcher.key_header.values())),
            endpoint_generation=info.generation or "",
            vocab_size=vocab_size,
            load=load,
            batch_max=rpc.submit_batch_max or 1,
            batch_delay_ms=0.5 if rpc.submit_batch_delay_ms is None else rpc.submit_batch_delay_ms,
        )
        return run_generator("meta_executor.bench.proxy_client", msgspec.json.encode(spec), cores)


def read_records(folder: Path) -> tuple[LoopRecord, ...]:
    """What the ranks' loops left beside the evidence."""
    decode = msgspec.msgpack.Decoder(LoopRecord).decode
    return tuple(decode(path.read_bytes()) for path in sorted(folder.glob(f"*{RECORD_SUFFIX}")))


def modes_seen(
    folder: Path,
    counted: dict[str, InstanceStatistics],
    policies: dict[str, str],
    loops: tuple[LoopRecord, ...],
) -> dict[str, dict[str, Any]]:
    """How each instance really ran: what its ranks negotiated, what its counters show, which threads it had."""
    records, _ = read_folder(folder)
    seen: dict[str, dict[str, Any]] = {record.owner_id: dict(record.modes) for record in records if record.rank == 0}
    threads = {loop.owner_id: set(loop.threads.values()) for loop in loops if loop.rank == 0}
    for owner, one in counted.items():
        submits = one.local_submits + one.rpc_submits
        seen.setdefault(owner, {}).update(
            local_submits=one.local_submits,
            rpc_submits=one.rpc_submits,
            submits_per_call=round(submits / one.submit_calls, 2) if one.submit_calls else 0.0,
            transfers_coalesced=sum(rank.transfers_coalesced for rank in one.ranks),
            transfers_direct=sum(rank.transfers_direct for rank in one.ranks),
            routed_per_rank=list(one.routed_per_rank),
            policy=policies.get(owner, ""),
            api_in_rank=API_THREAD in threads[owner] if owner in threads else None,
        )
    return seen
