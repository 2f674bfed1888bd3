"""The benchmark of high concurrency: what its arms send, what it says of rounds, and what it refuses to measure."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        return importlib.import_module("bench_concurrency")


def loop(p50: float, p99: float, worked: float, share: float) -> SimpleNamespace:
    return SimpleNamespace(
        step_ms=SimpleNamespace(p50=p50, p99=p99), worked_ms=worked, lock_share=share, core_wait_ms=0.5
    )


def told(
    bench: ModuleType, rounds: list[dict[str, SimpleNamespace]], capsys: pytest.CaptureFixture[str]
) -> list[dict[str, object]]:
    bench.tell(2048, rounds)
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


STILL, ON, OFF = loop(50.0, 52.0, 4.0, 0.01), loop(51.0, 60.0, 5.0, 0.02), loop(60.0, 90.0, 12.0, 0.2)


def test_goals_are_met_when_every_round_keeps_them(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    figures = told(bench, [{"still": STILL, "on": ON, "off": OFF}] * 3, capsys)
    assert [one["met"] for one in figures] == [True, True, True, True, None]
    assert figures[0]["ratio"] == pytest.approx(1.02) and figures[2]["ratio"] == pytest.approx(2.4)
    assert all("2,048 at once" in str(one["name"]) for one in figures)


def test_one_round_on_the_other_side_decides_nothing(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    worse = {"still": STILL, "on": loop(60.0, 60.0, 9.0, 0.06), "off": OFF}
    figures = told(bench, [{"still": STILL, "on": ON, "off": OFF}, worse], capsys)
    assert [one["met"] for one in figures] == ["undecided", True, "undecided", "undecided", None]
    assert [one["met"] for one in told(bench, [worse], capsys)][:1] == [False]


def test_arms_send_the_load_that_they_are_compared_by(bench: ModuleType) -> None:
    still, on = bench.load_of("still", 2048), bench.load_of("on", 2048)
    assert still.still and still.requests == still.concurrency == 2048
    assert on == bench.load_of("off", 2048) and on.concurrency == on.warm_up == 2048 and on.requests > 2 * on.warm_up
    assert (bench.step_ms_of(2048), bench.step_ms_of(2880)) == (50.0, 100.0)


@pytest.mark.parametrize(("good", "local", "words"), [(False, 5, "a request failed"), (True, 0, "ran as RPC, batches")])
def test_a_trial_that_is_none_stops_the_measurement(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, good: bool, local: int, words: str
) -> None:
    modes = {"gen-0": {"local_submits": local, "rpc_submits": 5 - local, "submits_per_call": 2.0}}
    report = SimpleNamespace(good=good, modes=modes, text=lambda: "a request failed", loops=[])
    monkeypatch.setattr(bench, "run_trial", lambda *args, **kwargs: SimpleNamespace(report=report))
    with pytest.raises(RuntimeError, match=words):
        bench.measure("on", 64, 64)
    with pytest.raises(RuntimeError, match="0 loops"):
        bench.loop_of(report)
