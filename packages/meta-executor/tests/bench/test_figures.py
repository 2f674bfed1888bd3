"""The pure parts of a trial's figures: lengths, percentiles and intervals, effects, loops, use of processors, the report."""

from __future__ import annotations

import json
import os
import random
import statistics
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from meta_executor import preflight
from meta_executor.bench import run
from meta_executor.bench.lengths import LogNormal, Uniform, draw, longest, parse_lengths
from meta_executor.bench.load import LoadConfig, LoadResult, Outcome
from meta_executor.bench.loops import every_loop, loop_figures
from meta_executor.bench.proxy_client import pieces_of
from meta_executor.bench.report import make_report
from meta_executor.bench.sampling import Look, Sampler, ThreadUse, threads_of, usage_between
from meta_executor.bench.spread import Spread, effect_of, median_interval, rounds_min
from meta_executor.bench.trace import trace_of
from meta_executor.cli import cli
from meta_executor.engine.step_recorder import STEP_COLUMNS
from meta_executor.evidence.verify import VerifyResult
from meta_executor.executor.recording import TURN_COLUMNS, LoopRecord

MS = 1_000_000


# -- lengths ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "means"),
    [("64", 64), ("uniform:32-96", Uniform(32, 96)), ("lognormal:64:0.5:512", LogNormal(64, 0.5, 512))],
)
def test_a_length_is_read_as_it_is_written(text: str, means: object) -> None:
    assert parse_lengths(text) == means


@pytest.mark.parametrize(
    "text",
    ["", "0", "-3", "1.5", "uniform:9-3", "uniform:0-3", "uniform:3", "lognormal:64:0:512", "lognormal:64:9:512",
     "lognormal:64:.:512", "lognormal:64:0.5:32", "normal:3:1", "9999999"],
)  # fmt: skip
def test_what_is_no_length_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ValueError, match=f"^'{text}'"):
        parse_lengths(text)


def test_drawn_lengths_depend_on_the_seed_alone_and_keep_their_bounds() -> None:
    for lengths in (Uniform(3, 9), LogNormal(40, 0.8, 100)):
        drawn = draw(lengths, 2000, 7)
        assert drawn == draw(lengths, 2000, 7) != draw(lengths, 2000, 8)
        assert min(drawn) >= 1 and max(drawn) <= longest(lengths)
    assert set(draw(Uniform(3, 9), 2000, 7)) == set(range(3, 10))
    assert 36 <= statistics.median(draw(LogNormal(40, 0.8, 100), 2000, 7)) <= 44
    assert max(draw(LogNormal(40, 0.8, 100), 2000, 7)) == 100


def test_a_loads_lengths_are_drawn_apart_for_prompts_and_answers() -> None:
    """The same seed for both would make long prompts have long answers."""
    lengths = LoadConfig(500, prompt_tokens=Uniform(1, 100), answer_tokens=Uniform(1, 100), seed=3).lengths()
    assert len(lengths) == 500
    assert abs(statistics.correlation(*zip(*lengths))) < 0.2
    assert LoadConfig(2, prompt_tokens=5, answer_tokens=6).lengths() == [(5, 6), (5, 6)]


# -- percentiles, intervals, effects ----------------------------------------------------------------------------------------


def test_percentiles_are_values_that_were_there() -> None:
    assert Spread.of(range(1, 101)) == Spread(100, 25, 50, 90, 99, 100)
    assert Spread.of([3.0], 2.0) == Spread(1, 6, 6, 6, 6, 6)
    assert Spread.of([]) == Spread(0, 0, 0, 0, 0, 0)


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    """By chance alone it misses at most one time in twenty; the fewest rounds are those whose range does."""
    assert rounds_min() == 6
    chance = random.Random(1)
    for count in (6, 9, 17):
        misses = 0
        for _ in range(2000):
            low, high = median_interval([chance.lognormvariate(0, 1) for _ in range(count)])
            misses += not low <= 1 <= high
        assert misses / 2000 < 0.06
    assert median_interval([5, 1, 4, 2, 3, 6]) == (1, 6)
    assert median_interval(list(range(17))) == (4, 12)
    with pytest.raises(ValueError, match="5 rounds"):
        median_interval([1, 2, 3, 4, 5])


def test_an_effect_is_told_only_when_every_round_that_counts_is_on_one_side() -> None:
    off = [10.0, 11.0, 12.0, 10.5, 11.5, 12.5]
    less = effect_of(off, [value * 0.8 for value in off])
    assert less.concluded and less.verdict == "20.0% less" and less.interval == pytest.approx((0.8, 0.8))
    more = effect_of(off, [value * share for value, share in zip(off, (1.1, 1.2, 1.3, 1.2, 1.1, 1.25))])
    assert more.concluded and more.verdict == "20.0% more"


def test_a_spread_wider_than_the_effect_is_no_conclusion() -> None:
    off = [10.0] * 6
    wide = effect_of(off, [8.0, 8.0, 8.0, 8.0, 8.0, 10.5])
    assert (
        not wide.concluded
        and wide.verdict == "no conclusion: the rounds lie between 0.8 and 1.05, which is wider than the effect"
    )
    assert (wide.off, wide.on, wide.ratio) == (10, 8, 0.8)


def test_few_rounds_are_no_conclusion_however_clear_they_look() -> None:
    few = effect_of([10.0] * 5, [5.0] * 5)
    assert not few.concluded and "5 rounds, at least 6" in few.verdict and few.interval is None


def test_a_figure_of_zero_has_no_ratio() -> None:
    assert effect_of([0.0] * 6, [0.0] * 6).verdict == "no difference"
    assert not effect_of([0.0] * 6, [1.0] * 6).concluded


@pytest.mark.parametrize("arms", [([], []), ([1.0], [1.0, 2.0])])
def test_arms_of_different_length_are_refused(arms: tuple[list[float], list[float]]) -> None:
    with pytest.raises(ValueError, match="rounds of one arm"):
        effect_of(*arms)


# -- loops --------------------------------------------------------------------------------------------------------------


def turn(
    began_ms: float,
    spent_ms: float,
    *,
    worked_ms: float = 0.0,
    core_ms: float = 0.0,
    before_ms: float = 0.0,
    core_before_ms: float = 0.0,
    steps: int = 0,
    tokens: int = 0,
    phases: tuple[float, float] = (0.0, 0.0),
) -> list[int]:
    row = [began_ms, began_ms + spent_ms, worked_ms, core_ms, before_ms, core_before_ms]
    return [*(round(value * MS) for value in row), 1, steps, tokens, *(round(value * MS) for value in phases)]


def record_of(turns: list[list[int]], steps: Sequence[list[float]] = (), **more: object) -> LoopRecord:
    columns = (*TURN_COLUMNS, "take", "run")
    return LoopRecord(
        owner_id="gen-0", rank=1, role="generation", pid=77, phases=("take", "run"), threads={78: "loop"},
        turn_columns=columns, step_columns=STEP_COLUMNS,
        turns=np.array(turns, "<i8").reshape(-1, len(columns)).tobytes(),
        steps=(np.array(list(steps), float).reshape(-1, len(STEP_COLUMNS)) * MS).astype("<i8").tobytes(), **more,  # type: ignore[arg-type]
    )  # fmt: skip


WHOLE = (0, 10**15)


def test_a_step_is_from_launch_to_launch_with_the_turns_in_between() -> None:
    record = record_of(
        [
            turn(0, 1, steps=0),
            turn(10, 2, worked_ms=1.5, steps=1, tokens=100, phases=(0.5, 1.5)),
            turn(20, 1, worked_ms=1.0, core_ms=0.0, steps=1, tokens=100, phases=(1.0, 0.0)),
            turn(30, 4, worked_ms=1.0, core_ms=2.0, steps=2, tokens=250, phases=(1.0, 3.0)),
            turn(45, 1, steps=3, tokens=400),
        ]
    )
    loop = loop_figures(record, WHOLE)
    assert loop is not None
    assert (loop.steps, loop.turns, loop.rows) == (2, 3, 150)
    assert (loop.step_ms.p25, loop.step_ms.longest, loop.step_mean_ms) == (15, 20, 17.5)
    assert (loop.host_ms.p25, loop.host_ms.longest) == (3, 4)
    assert loop.worked_ms == pytest.approx(1.75)
    # 0.5 ms of the first turn and 1 ms of the third were neither the processor's nor a core's.
    assert loop.lock_in_turns_ms == pytest.approx(0.75)
    assert loop.core_wait_ms == pytest.approx(1.0)
    assert loop.phases_ms == pytest.approx({"take": 1.25, "run": 2.25})


def test_turns_outside_of_the_window_do_not_count() -> None:
    record = record_of([turn(at, 1, steps=at, tokens=at) for at in range(0, 100, 10)])
    loop = loop_figures(record, (20 * MS, 61 * MS))
    assert loop is not None and (loop.steps, loop.step_mean_ms) == (3, 10)
    assert loop_figures(record, (20 * MS, 31 * MS)) is None
    assert every_loop([record_of([]), record], WHOLE)[0].name == "gen-0.1"


def test_after_the_device_a_loop_that_waited_waits_for_the_lock_and_one_that_was_busy_does_not() -> None:
    turns = [
        turn(0, 1, steps=1),
        # Was waiting since 1 ms; the device was over at 20 ms, its thread went on at 20.5, the loop at 21.
        turn(21, 1, before_ms=20, core_before_ms=0.2, steps=2),
        # Was busy from 39 ms to 45 ms: the second step's end at 40 ms was seen in the turn after.
        turn(39, 6, before_ms=17, steps=3),
        turn(45, 1, before_ms=0, steps=4),
    ]
    loop = loop_figures(record_of(turns, [[1, 20, 20.5, 0.1], [22, 40, 40.25, 0.0]]), WHOLE)
    assert loop is not None
    # 0.5 - 0.1 of the engine's thread and 0.5 - 0.2 of the loop's; 0.25 of the engine's thread alone.
    assert (loop.lock_after_device_ms.p25, loop.lock_after_device_ms.longest) == pytest.approx((0.25, 0.7))
    assert loop.device_ms.p50 == pytest.approx(18)
    assert loop.lock_share == pytest.approx((loop.lock_mean_ms + loop.lock_in_turns_ms) / loop.step_mean_ms)


def test_turns_that_a_window_lacks_are_counted() -> None:
    turns = [turn(at, 1, steps=at) for at in range(50, 100, 10)]
    late = loop_figures(record_of(turns, turns_dropped=9), (0, 10**15))
    early = loop_figures(record_of(turns, turns_dropped=9), (55 * MS, 10**15))
    assert late is not None and early is not None
    assert (late.dropped, early.dropped) == (9, 0)


def test_a_trace_has_every_phase_at_its_time() -> None:
    record = record_of(
        [turn(10, 3, worked_ms=2, steps=1, phases=(1.0, 2.0)), turn(20, 1, steps=2)], [[11, 15, 15.5, 0.25]]
    )
    events = msgspec.json.decode(trace_of([record], (10 * MS, 30 * MS)))["traceEvents"]
    shown = {(e["name"], e["ts"], e.get("dur")) for e in events if e["ph"] in "Xi"}
    assert {("turn", 0, 3000), ("take", 0, 1000), ("run", 1000, 2000), ("launch", 10_000, None)} <= shown
    assert {("step", 1000, 4000), ("wait for the interpreter", 5000, 500)} <= shown
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == {"gen-0 rank 1", "loop", "engine"}


# -- use of processors ------------------------------------------------------------------------------------------------------


def look(at_s: float, worked_s: float, queues: tuple[int, int], more: float = 0.0) -> Look:
    threads = {7: ThreadUse("python", worked_s, 0.5 * worked_s)}
    if more:
        threads[8] = ThreadUse("python", more, 0.0)
    return Look(at_s, {"gen-0/rank0": threads}, {"gen-0": queues}, {"gen-0/rank0": int(at_s + 1) << 20})


def test_use_is_counted_within_the_window_under_the_threads_names() -> None:
    """A thread that was not there at the first look began from nothing; those of one name are counted together."""
    looks = (look(0, 1.0, (99, 99)), look(1, 2.0, (5, 1)), look(2, 3.5, (9, 4), more=0.25), look(3, 9.0, (99, 99)))
    usage = usage_between(looks, (0.5, 2.5), {"gen-0/rank0": {7: "loop"}})
    assert usage.seconds == 1
    assert usage.threads == {"gen-0/rank0": {"loop": (1.5, 0.75), "python": (0.25, 0.0)}}
    assert (usage.live, usage.waiting) == ({"gen-0": 9}, {"gen-0": 4})
    assert usage.resident_bytes == {"gen-0/rank0": (2 << 20, 3 << 20)}
    assert usage.worked_s("gen") == 1.75 and usage.worked_s("ctx") == 0
    assert usage_between(looks, (0.5, 2.5), {}).threads["gen-0/rank0"] == {"python": (1.75, 0.75)}


def test_without_two_looks_in_the_window_the_whole_load_counts() -> None:
    looks = (look(0, 1.0, (0, 0)), look(9, 4.0, (0, 0)))
    assert usage_between(looks, (2, 3), {}).worked_s() == 3.0


def test_the_sampler_looks_before_after_and_at_its_own_threads() -> None:
    with Sampler({"me": os.getpid(), "nobody": 2**30}, lambda: {"gen-0": (3, 1)}, every_s=60) as sampler:
        looks = sampler.looks()
    assert len(looks) == 2 and looks[0].at_s <= looks[1].at_s
    assert os.getpid() in looks[0].threads["me"] and looks[0].threads["nobody"] == {} == threads_of(2**30)
    assert looks[0].queues == {"gen-0": (3, 1)}
    assert looks[0].resident_bytes["me"] > 1 << 20 and looks[0].resident_bytes["nobody"] == 0


def test_what_a_look_meets_is_told_and_not_lost() -> None:
    calls = iter([{}])
    failed = threading.Event()

    def queues() -> dict[str, tuple[int, int]]:
        try:
            return next(calls)
        except StopIteration:
            failed.set()
            raise ConnectionError("the instance is gone") from None

    with Sampler({}, queues, every_s=0.001) as sampler:
        assert failed.wait(10)
    with pytest.raises(ConnectionError, match="gone"):
        sampler.looks()


# -- the report -------------------------------------------------------------------------------------------------------------


def outcome(number: int, sent_s: float, pieces_s: tuple[float, ...], tokens: int | None = None) -> Outcome:
    count = len(pieces_s) if tokens is None else tokens
    return Outcome(number, 200, None, 0.0, pieces_s[0], pieces_s[-1], count, (5,) * count, pieces_s, "length", sent_s)


def test_figures_are_of_the_window_behind_the_warm_up() -> None:
    outcomes = (
        outcome(0, 0.0, (1.0, 2.0)),
        outcome(1, 2.0, (0.5, 1.5, 2.5)),
        outcome(2, 6.0, (0.5, 1.0)),
        outcome(3, 10.0, (1.0, 2.0)),
    )
    result = LoadResult(outcomes, 12.0, 3.0, 0.0, 0, 100.0)
    assert result.window_s(LoadConfig(4, warm_up=1)) == (2.0, 10.0)
    report = make_report(result, {}, VerifyResult(True, (), ()), load=LoadConfig(4, warm_up=1))
    assert report.good and report.seconds == 8
    # At 2.0 (the last of the warm-up), 2.5, 3.5, 4.5, 6.5 and 7.0 s.
    assert report.tokens_per_s == pytest.approx(6 / 8)
    assert report.first_token_s.count == 3 and report.first_token_s.longest == 1.0
    assert report.output_speed.count == 3 and report.output_speed.p25 == pytest.approx(1.0)
    assert {figure.name for figure in report.figures()} >= {"tokens per second", "first token p99"}
    assert "4 of 4 answered" in report.text() and report.to_dict()["result"] == "PASS"


def test_a_load_that_was_sent_at_once_is_reported_to_its_end() -> None:
    result = LoadResult((outcome(0, 0.0, (1.0, 2.0)), outcome(1, 0.0, (1.0, 4.0))), 4.0, 0.1, 0.0, 0)
    assert result.window_s(LoadConfig(2)) == (0.0, 4.0)
    assert make_report(result, {}, VerifyResult(True, (), ())).tokens_per_s == 1.0


def test_a_still_load_is_reported_from_the_last_first_token_to_the_first_end() -> None:
    """Nothing arrives then; where one ended before another began there was no such time."""
    still = LoadConfig(2, still=True)
    result = LoadResult((outcome(0, 0.0, (1.0, 2.0, 3.0)), outcome(1, 0.5, (1.0, 4.0))), 4.5, 0.1, 0.0, 0)
    assert result.window_s(still) == (1.5, 3.0)
    assert make_report(result, {}, VerifyResult(True, (), ()), load=still).tokens_per_s == pytest.approx(3 / 1.5)
    apart = LoadResult((outcome(0, 0.0, (1.0,)), outcome(1, 0.5, (1.0, 4.0))), 4.5, 0.1, 0.0, 0)
    assert apart.window_s(still) == (1.5, 1.5)
    assert make_report(apart, {}, VerifyResult(True, (), ()), load=still).tokens_per_s == 0


@pytest.mark.parametrize(
    "options",
    [
        ["--still", "--warm-up", "3"],
        ["--still", "--rate", "2"],
        ["--still", "--concurrency", "4"],
        ["--warm-up", "256"],
    ],
)
def test_a_load_that_contradicts_itself_is_refused_before_anything_starts(options: list[str]) -> None:
    refused = CliRunner().invoke(cli, ["bench", *options])
    assert refused.exit_code == 2 and options[-2 if "--still" in options else 0] in refused.output


def test_a_report_names_a_thread_without_time_left_and_a_generator_that_was_the_limit() -> None:
    result = LoadResult((outcome(0, 0.0, (1.0, 2.0)),), 2.0, 1.9, 0.0, 0)
    usage = usage_between((look(0, 0.0, (4, 0)), look(2, 1.9, (4, 2))), (0, 2), {"gen-0/rank0": {7: "loop"}})
    report = make_report(result, {}, VerifyResult(False, ("lost",), ()), usage=usage)
    assert not report.good
    text = report.text()
    assert "loop 95%; has no time left" in text and "it was itself the limit" in text
    assert "MiB: gen-0/rank0 1 to 3" in text
    assert "gen-0 2 of 4 there" in text and "finding: lost" in text
    assert report.cpu_us_per_token() == pytest.approx(1.9e6 / 2)


def test_context_ranks_tell_how_long_they_agree() -> None:
    """The longest of them, whatever the slowest one's step is."""
    columns = (*TURN_COLUMNS, "update readiness", "vote terminal", "poll", "retire")
    records = []
    for rank, phases in enumerate([(1, 2, 3, 50), (2, 3, 4, 0)]):
        rows = [
            [at * 10 * MS, at * 10 * MS + MS, 0, 0, 0, 0, 1, at, at, *(ms * MS for ms in phases)] for at in range(4)
        ]
        records.append(
            LoopRecord(
                owner_id="ctx-0",
                rank=rank,
                role="context",
                pid=rank,
                phases=columns[len(TURN_COLUMNS) :],
                threads={},
                turn_columns=columns,
                step_columns=STEP_COLUMNS,
                turns=np.array(rows, "<i8").tobytes(),
                steps=b"",
            )
        )
    report = make_report(
        LoadResult((), 1.0, 0.0, 0.0, 0), {}, VerifyResult(True, (), ()), loops=every_loop(records, WHOLE)
    )
    figures = {figure.name: figure.value for figure in report.figures()}
    assert figures["agreement and transfers per context step, longest rank"] == pytest.approx(9)
    assert figures["context step p50"] == pytest.approx(10)


def test_pieces_are_the_hand_overs_of_each_request() -> None:
    ids = [np.array([2, 1, 2]), np.array([1]), np.array([2])]
    assert pieces_of(zip([1.0, 2.0, 3.0], ids)) == {1: [1.0, 2.0], 2: [1.0, 1.0, 3.0]}
    assert pieces_of([]) == {}


def test_a_trial_is_reported_also_when_its_trace_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What took minutes to measure is not lost to a folder that is not there; what went wrong is told in a line."""
    report = make_report(LoadResult((), 1.0, 0.0, 0.0, 0), {}, VerifyResult(True, (), ()))
    monkeypatch.setattr(preflight, "check_service", lambda *args, **kwargs: None)
    monkeypatch.setattr(run, "run_trial", lambda *args, **kwargs: run.Trial(report, (), (), (0, 1)))
    for target, code, words in (
        (tmp_path / "none" / "trace", 1, f"meta-executor: error: --trace {tmp_path / 'none' / 'trace'}: No such file"),
        (tmp_path / "trace", 0, f"wrote {tmp_path / 'trace'}"),
    ):
        done = CliRunner().invoke(cli, ["bench", "--engine", "synthetic", "--trace", str(target)])
        assert done.exit_code == code and words in done.stderr
        assert json.loads(done.stdout)["requests"] == 0
    assert msgspec.json.decode((tmp_path / "trace").read_bytes())["traceEvents"] == []
