"""Knobs and arms: what is switched, how one sees that it was, in which order arms run, and when nothing may be concluded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from meta_executor.bench.compare import Kept, Run, order_of, rows_json, rows_of, run_arms, run_of, table_of
from meta_executor.bench.knobs import ARMS, KNOBS, Knob, knob_of, with_settings
from meta_executor.bench.load import LoadConfig, LoadResult, Outcome
from meta_executor.bench.report import Figure, Report, make_report
from meta_executor.bench.settings import base_service
from meta_executor.config import ConfigError, ServiceConfig
from meta_executor.evidence.verify import VerifyResult

#: What a trial shows of every knob when it is off, and when it is on.
_SHOWN: Mapping[str, Mapping[str, dict[str, Any]]] = {
    "off": {
        "ctx-0": {
            "local_submits": 0, "rpc_submits": 4, "submits_per_call": 1.0, "transfers_coalesced": 0,
            "transfers_direct": 4, "async_terminal": False, "async_ready": False, "pre_active_requests": 1, "policy": "all",
        },
        "gen-0": {
            "local_submits": 0, "rpc_submits": 4, "submits_per_call": 1.0, "transfers_coalesced": 0,
            "transfers_direct": 4, "policy": "round_robin", "api_in_rank": True,
        },
    },
    "on": {
        "ctx-0": {
            "local_submits": 4, "rpc_submits": 0, "submits_per_call": 2.0, "transfers_coalesced": 4,
            "transfers_direct": 0, "async_terminal": True, "async_ready": True, "pre_active_requests": 64, "policy": "all",
        },
        "gen-0": {
            "local_submits": 4, "rpc_submits": 0, "submits_per_call": 2.0, "transfers_coalesced": 4,
            "transfers_direct": 0, "policy": "balanced", "api_in_rank": False,
        },
    },
}  # fmt: skip


def every_knob() -> list[tuple[Knob, str]]:
    named = [(name, drive) for drive in ("front", "proxy") for name in (*KNOBS, "all")]
    return [(knob_of(name, drive), drive) for name, drive in named if name == "all" or drive in KNOBS[name].drives]


@pytest.mark.parametrize(("knob", "drive"), every_knob(), ids=lambda one: getattr(one, "name", one))
def test_a_knob_changes_the_service_and_is_told_by_what_a_trial_shows(knob: Knob, drive: str) -> None:
    """The two arms are two services; each is recognised by its evidence, and the other's evidence is not taken for it."""
    base = base_service(drive, LoadConfig(8, 4), {}, synthetic=True)
    arms = {arm: with_settings(base, knob.settings(arm)) for arm in ARMS}
    assert arms["off"] != arms["on"]
    shown = {arm: {k: v for k, v in modes.items() if drive == "front" or k == "gen-0"} for arm, modes in _SHOWN.items()}
    for arm, other in (("off", "on"), ("on", "off")):
        assert knob.ran_as(arm, shown[arm]) == (True, knob.expected[arm == "on"])
        assert not knob.ran_as(arm, shown[other])[0]


def test_all_does_not_conclude_from_some() -> None:
    knob = knob_of("all", "front")
    mixed = {"ctx-0": _SHOWN["on"]["ctx-0"], "gen-0": {**_SHOWN["on"]["gen-0"], "local_submits": 0, "rpc_submits": 4}}
    good, seen = knob.ran_as("on", mixed)
    assert not good and "4 submits direct and 4 by RPC" in seen


def test_all_needs_no_load_that_gathering_pays_for() -> None:
    """It is switched on with the rest; that a load's transfers stay direct forbids nothing."""
    knob = knob_of("all", "front")
    direct = {name: {**modes, "transfers_coalesced": 0, "transfers_direct": 4} for name, modes in _SHOWN["on"].items()}
    assert knob.settings("on")["*.cache_transceiver_config.enable_bounce"] is True
    assert knob.ran_as("on", direct)[0] and not KNOBS["bounce"].ran_as("on", direct)[0]


@pytest.mark.parametrize(
    ("name", "drive", "words"),
    [("fastpath", "front", "is no knob; there are fast-path"), ("agreement", "proxy", "wants front")],
)
def test_a_knob_that_is_none_is_refused(name: str, drive: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        knob_of(name, drive)


@pytest.mark.parametrize(
    ("path", "field"), [("engine.size", "engine.size"), ("*.rpcs.local", "context_servers.rpcs.local")]
)
def test_a_setting_that_is_none_is_refused_by_its_name(path: str, field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        with_settings(ServiceConfig(), {path: 1})
    assert refused.value.field == field


def test_arms_run_in_turn_every_other_round_the_other_way_round() -> None:
    assert list(order_of(3)) == [(0, "off"), (0, "on"), (1, "on"), (1, "off"), (2, "off"), (2, "on")]


def report_of(speed: float, modes: Mapping[str, dict[str, Any]], *, failed: bool = False, busy: bool = False) -> Report:
    outcome = Outcome(
        0, 500 if failed else 200, None, 0.0, 0.5, 1 / speed, 2, (5, 5), (0.5 / speed, 1 / speed), "length"
    )
    result = LoadResult((outcome,), 1 / speed, (0.9 if busy else 0.1) / speed, 0.0, 0)
    return make_report(result, {}, VerifyResult(True, (), ()), modes=modes)


FAST_PATH = KNOBS["fast-path"]


def runs_of(off: list[float], on: list[float], **of_last: Any) -> list[Run]:
    runs = []
    for number, pair in enumerate(zip(off, on, strict=True)):
        for arm, speed in zip(ARMS, pair, strict=True):
            more = of_last if arm == "on" and number == len(on) - 1 else {}
            modes = more.get("modes", _SHOWN[arm])
            told = {key: value for key, value in more.items() if key != "modes"}
            runs.append(run_of(FAST_PATH, number, arm, report_of(speed, modes, **told)))
    return runs


def row(runs: list[Run], name: str = "tokens per second") -> Any:
    return next(row for row in rows_of(runs) if row.figure.name == name)


def test_a_clear_effect_is_concluded_with_its_direction() -> None:
    faster = row(runs_of([1.0, 1.1, 1.2, 1.0, 1.1, 1.2], [2.0, 2.2, 2.4, 2.0, 2.2, 2.4]))
    assert faster.effect.concluded and faster.better == "better" and faster.effect.ratio == pytest.approx(2)
    assert faster.ran_as == ("RPC", "direct")
    slower = row(runs_of([1.0] * 6, [0.5] * 6), "request p50")
    assert slower.effect.concluded and slower.better == "worse"


@pytest.mark.parametrize(
    ("of_last", "words"),
    [
        ({"modes": _SHOWN["off"]}, "on ran as 'RPC', not as 'direct'"),
        ({"failed": True}, "1 requests failed"),
        ({"busy": True}, "load generator had no time left"),
    ],
)
def test_one_trial_that_was_not_what_it_should_be_forbids_a_conclusion(of_last: dict[str, Any], words: str) -> None:
    """The figures are shown all the same, with why."""
    one = row(runs_of([1.0] * 6, [2.0] * 6, **of_last))
    assert not one.effect.concluded and words in one.effect.verdict and one.better == ""
    assert words in table_of([one])


def test_rounds_of_which_an_arm_is_missing_do_not_count() -> None:
    runs = runs_of([1.0] * 6, [2.0] * 6)
    assert row(runs[:-1]).rounds == 5 and not row(runs[:-1]).effect.concluded
    assert rows_of(runs[:1]) == ()


def test_the_table_and_the_json_have_each_figure_once() -> None:
    rows = rows_of(runs_of([1.0] * 6, [2.0] * 6))
    assert len({one["name"] for one in rows_json(rows)}) == len(rows) > 4
    table = table_of(rows)
    assert "off ran as RPC, on as direct" in table
    assert table.count("| tokens per second (1/s) | ") == 1 and "100.0% more (better)" in table


def test_where_there_is_no_ratio_the_json_is_still_json() -> None:
    """A figure that was 0 when it was off and not when it was on."""
    runs = [
        msgspec.structs.replace(run, figures=(Figure("waits", float(run.arm == "on"), "ms"),))
        for run in runs_of([1.0] * 6, [2.0] * 6)
    ]
    (told,) = json.loads(json.dumps(rows_json(rows_of(runs)), allow_nan=False))
    assert told["ratio"] is None and (told["off"], told["on"]) == (0.0, 1.0)
    assert told["verdict"] == "no conclusion: a figure was 0, so there is no ratio"


def test_kept_runs_are_gone_on_with_and_another_setting_is_refused(tmp_path: Path) -> None:
    """A second sitting runs what the first did not, and no figure of another load gets among them."""
    file, said, asked = tmp_path / "runs.jsonl", [], []

    def trial(knob: Knob, arm: str) -> Report:
        asked.append(arm)
        if len(asked) == 4:
            raise KeyboardInterrupt
        return report_of(1.0, _SHOWN[arm])

    with pytest.raises(KeyboardInterrupt):
        run_arms([FAST_PATH], 2, Kept(file, {"load": 1}), trial, said.append)
    assert asked == ["off", "on", "on", "off"] and len(said) == 3
    kept = Kept(file, {"load": 1})
    assert [(run.round, run.arm) for run in kept.runs] == [(0, "off"), (0, "on"), (1, "on")]
    run_arms([FAST_PATH], 2, kept, trial, said.append)
    assert asked[4:] == ["off"] and kept.runs[-1].figures[0] == Figure("tokens per second", 2.0, "1/s", "more")
    with pytest.raises(ValueError, match="another setting"):
        Kept(file, {"load": 2})
    with file.open("a") as lines:
        lines.write("{}\n")
    with pytest.raises(ValueError, match="a line is no run"):
        Kept(file, {"load": 1})
