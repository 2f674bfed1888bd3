"""One trial: start a service, load it, take its counters, drain it, judge its evidence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec

from meta_executor.bench.load import LoadConfig, Outcome, run_load
from meta_executor.bench.report import Report, make_report
from meta_executor.config import ServiceConfig
from meta_executor.evidence.verify import verify_folder
from meta_executor.supervise.launch import Launcher
from meta_executor.wire import InstanceStatistics


@dataclass(frozen=True)
class Trial:
    """What a trial left: its report, and every request's outcome."""

    report: Report
    outcomes: tuple[Outcome, ...]


def run_trial(service: ServiceConfig, load: LoadConfig, evidence: Path, say: Callable[[str], None]) -> Trial:
    """Run one trial.

    Args:
        service: What to start; its evidence folder is replaced.
        load: What to ask.
        evidence: Folder for the evidence files; it must be empty or missing, lifetimes are not mixed.
        say: Takes a line for the person.

    Raises:
        FileExistsError: The folder holds evidence already.
        ConfigError, RunFailed: The service could not be started, or died.
    """
    if evidence.is_dir() and any(evidence.glob("*.json")):
        raise FileExistsError(f"{evidence} holds evidence of another run")
    service = msgspec.structs.replace(service, evidence_dir=str(evidence))
    launcher = Launcher(service, say=say)
    with launcher.started():
        url = launcher.front_url
        model = httpx.get(f"{url}/v1/models", timeout=60.0, trust_env=False).raise_for_status().json()["data"][0]["id"]
        vocab_size = min(
            int(httpx.get(f"{one}/server_info", timeout=60.0, trust_env=False).raise_for_status().json()["vocab_size"])
            for one in launcher.urls().values()
        )
        say(f"{load.requests} requests of {load.prompt_tokens} + {load.answer_tokens} tokens to {url}")
        result = run_load(url, model, vocab_size, load)
        counted = {}
        for owner, one in launcher.urls().items():
            answer = httpx.get(f"{one}/internal/statistics", headers=launcher.key_header, timeout=60.0, trust_env=False)
            counted[owner] = msgspec.json.decode(answer.raise_for_status().content, type=InstanceStatistics)
    return Trial(make_report(result, counted, verify_folder(evidence)), result.outcomes)
