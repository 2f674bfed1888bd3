"""A generation rank at high concurrency, asked at its door: what arrivals cost a step, what batches and the fast path save.

    python bench_concurrency.py [--at-once 2048 2880] [--rounds N] [--seconds S] [--small]

Per round three trials in turn, the load generator on a core of its own: *still*, as many requests being answered and none
arriving; *on*, prompts of 1,024 tokens, a new request when an old one ends, fast path and batches on; *off*, the same without
them. The device's step is 50 ms up to 2,048 requests and 100 ms above. Rounds that would not end within ``--seconds`` are left
out, and that is said. Two cores that nobody else uses are wanted: the wait for a core is shown, and is the machine's.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench_service import decided, figure, middle

from meta_executor.bench.knobs import knob_of, with_settings
from meta_executor.bench.load import LoadConfig
from meta_executor.bench.loops import LoopFigures
from meta_executor.bench.report import Report
from meta_executor.bench.run import run_trial
from meta_executor.bench.settings import RECORDED_TURNS, base_service, trial_service

PROMPT_TOKENS, ANSWER_TOKENS, STILL_TOKENS = 1024, 64, 160
ARMS = ("still", "on", "off")
#: A round: the loop's figures of each arm.
Round = dict[str, LoopFigures]


def step_ms_of(at_once: int) -> float:
    """Of the device (ms)."""
    return 50.0 if at_once <= 2048 else 100.0


def load_of(arm: str, at_once: int, prompt_tokens: int = PROMPT_TOKENS) -> LoadConfig:
    """What an arm sends."""
    if arm == "still":
        return LoadConfig(at_once, at_once, prompt_tokens, STILL_TOKENS, still=True)
    return LoadConfig(3 * at_once, at_once, prompt_tokens, ANSWER_TOKENS, warm_up=at_once)


def measure(arm: str, at_once: int, prompt_tokens: int) -> Report:
    """One trial.

    Raises:
        RuntimeError: A request failed, the ranks' evidence does not agree, or the arm did not run as it was meant to.
    """
    knob, load = knob_of("all", "proxy"), load_of(arm, at_once, prompt_tokens)
    side = "off" if arm == "off" else "on"
    service = trial_service(
        base_service("proxy", load, {}), requests=load.requests, record_turns_max=RECORDED_TURNS, step_ms=step_ms_of(at_once)
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="bc-") as folder:
        trial = run_trial(
            with_settings(service, knob.settings(side)), load, Path(folder), lambda line: None, drive="proxy", pin=True
        )  # fmt: skip
    if not trial.report.good:
        raise RuntimeError(f"{arm} at {at_once}: {trial.report.text()}")
    as_meant, seen = knob.ran_as(side, trial.report.modes)
    if not as_meant:
        raise RuntimeError(f"{arm} at {at_once} ran as {seen}")
    print(f"{at_once} {arm}\n{trial.report.text()}", flush=True)
    return trial.report


def loop_of(report: Report) -> LoopFigures:
    """The rank's.

    Raises:
        RuntimeError: Its loop shows no steps in the window.
    """
    if len(report.loops) != 1:
        raise RuntimeError(f"{len(report.loops)} loops show steps, expected one")
    return report.loops[0]


def tell(at_once: int, rounds: Sequence[Round]) -> None:
    """The figures of one concurrency."""

    def of(arm: str, read: Callable[[LoopFigures], float]) -> list[float]:
        return [read(one[arm]) for one in rounds]

    def compare(name: str, unit: str, read: Callable[[LoopFigures], float], over: str, arm: str, goal: str) -> None:
        values, base = of(arm, read), of(over, read)
        ratios = [value / before for value, before in zip(values, base)]
        figure(
            f"{name}, {at_once:,} at once", round(middle(values), 4), unit, round(middle(base), 4), round(middle(ratios), 4),
            goal, decided(ratios, goal), spread=[round(min(ratios), 4), round(max(ratios), 4)], rounds=len(rounds),
        )  # fmt: skip

    compare(
        "step with requests arriving over one without, p50",
        "ms",
        lambda loop: loop.step_ms.p50,
        "still",
        "on",
        "<= 1.05",
    )
    compare(
        "step with requests arriving over one without, p99",
        "ms",
        lambda loop: loop.step_ms.p99,
        "still",
        "on",
        "<= 1.2",
    )
    compare("processor time of the loop per step, off over on", "ms", lambda loop: loop.worked_ms, "on", "off", ">= 2")
    shares = of("on", lambda loop: loop.lock_share)
    goal = "<= 0.05"
    told: dict[str, Any] = {"spread": [round(min(shares), 4), round(max(shares), 4)], "rounds": len(rounds)}
    figure(f"wait for the interpreter, share of a step, {at_once:,} at once", round(middle(shares), 4), "share", None, None,
           goal, decided(shares, goal), **told)  # fmt: skip
    waits = of("on", lambda loop: loop.core_wait_ms)
    figure(
        f"wait for a core per step, {at_once:,} at once: the machine's",
        round(middle(waits), 4),
        "ms",
        None,
        None,
        "none",
        None,
    )


def main() -> None:
    """Measure in turn, print, one line per figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at-once", type=int, nargs="+", default=[2048, 2880], help="requests (count)")
    parser.add_argument("--rounds", type=int, default=3, help="of each concurrency (count)")
    parser.add_argument("--seconds", type=float, default=840.0, help="begin no round that would end later")
    parser.add_argument("--small", action="store_true", help="one short round, to see that it runs; no figures to keep")
    options = parser.parse_args()
    prompt_tokens = PROMPT_TOKENS
    if options.small:
        options.at_once, options.rounds, prompt_tokens = [64], 1, 64
    began_s, longest_s = time.monotonic(), 0.0
    found: dict[int, list[Round]] = {at_once: [] for at_once in options.at_once}
    # A round of each concurrency before a second one of any: where time runs out, all have some.
    for number in range(options.rounds):
        for at_once, rounds in found.items():
            round_s = time.monotonic()
            if round_s - began_s + longest_s > options.seconds:
                print(
                    f"no time for round {number + 1} of {options.rounds} at {at_once} in {options.seconds:g} s",
                    flush=True,
                )
                continue
            order = ARMS if number % 2 == 0 else ARMS[::-1]
            rounds.append({arm: loop_of(measure(arm, at_once, prompt_tokens)) for arm in order})
            longest_s = max(longest_s, time.monotonic() - round_s)
    for at_once, rounds in found.items():
        if rounds:
            tell(at_once, rounds)


if __name__ == "__main__":
    main()
