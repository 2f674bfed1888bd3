"""Whole trials of small services: what is reported was there."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import msgspec
import pytest

from meta_executor.bench.lengths import Uniform
from meta_executor.bench.load import LoadConfig
from meta_executor.bench.run import Drive, run_trial
from meta_executor.bench.settings import base_service, trial_service
from meta_executor.bench.trace import trace_of
from meta_executor.config import ServiceConfig

pytestmark = pytest.mark.slow
STEP_MS = 4.0


def service_of(drive: Drive, load: LoadConfig) -> ServiceConfig:
    return trial_service(base_service(drive, load, {}), engine="synthetic", record_turns_max=10_000, step_ms=STEP_MS)


@pytest.mark.parametrize("drive", get_args(Drive))
def test_a_trial_reports_what_its_ranks_recorded(drive: Drive, tmp_path: Path) -> None:
    """Every request answered; steps are no shorter than the device's; threads have their names; the trace has all
    ranks."""
    load = LoadConfig(48, 8, prompt_tokens=Uniform(16, 48), answer_tokens=Uniform(8, 24), warm_up=8, seed=1)
    trial = run_trial(service_of(drive, load), load, tmp_path / "evidence", lambda line: None, drive=drive)
    report = trial.report
    assert report.good, report.text()
    assert [outcome.tokens for outcome in trial.outcomes] == [answer for _, answer in load.lengths()]
    ranks = {"gen-0.0"} if drive == "proxy" else {f"gen-0.{n}" for n in range(2)} | {f"ctx-0.{n}" for n in range(4)}
    assert {f"{one.owner_id}.{one.rank}" for one in trial.records} == ranks
    assert {loop.name for loop in report.loops} <= ranks and report.loops
    for loop in report.loops:
        assert loop.device_ms.p25 >= STEP_MS and loop.step_ms.p50 >= STEP_MS
        assert loop.worked_ms > 0 and loop.dropped == 0
    assert report.usage is not None and "MainThread" in report.usage.threads["gen-0/rank0"]
    assert report.first_token_s.count == 40 and report.first_token_s.p25 > 0
    assert report.modes["gen-0"]["local_submits"] + report.modes["gen-0"]["rpc_submits"] == 48
    events = msgspec.json.decode(trace_of(trial.records, trial.window_ns))["traceEvents"]
    assert len({event["pid"] for event in events}) == len(ranks)


def test_a_folder_with_another_runs_evidence_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "ctx-0.0.json").write_text("{}")
    load = LoadConfig(1)
    with pytest.raises(FileExistsError, match="another run"):
        run_trial(service_of("proxy", load), load, tmp_path, lambda line: None, drive="proxy")
