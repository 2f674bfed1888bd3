"""A knob off and on, run in turn on one head: rounds, their order, and what they tell (pure but for the trial it is given).

Round i runs both arms one after the other, every other round the other way round, so that whatever slows a round down meets
both. A figure's effect is told by :func:`~meta_executor.bench.spread.effect_of`, and only where every trial of both arms showed
by its own evidence that it ran as it was meant to, every request was answered, and the load generator was not the limit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from meta_executor.bench.knobs import ARMS, Knob
from meta_executor.bench.report import Figure, Report
from meta_executor.bench.spread import CONFIDENCE, Effect, effect_of


class Run(msgspec.Struct, frozen=True):
    """One trial of one arm.

    Attributes:
        ran_as: What was seen of the knob.
        problems: Why it may not be concluded from; empty: it may.
    """

    knob: str
    round: int
    arm: str
    ran_as: str
    problems: tuple[str, ...]
    figures: tuple[Figure, ...]


def run_of(knob: Knob, number: int, arm: str, report: Report) -> Run:
    """A trial as a run of an arm."""
    as_meant, seen = knob.ran_as(arm, report.modes)
    problems = []
    if not as_meant:
        problems.append(f"{arm} ran as {seen!r}, not as {knob.expected[arm == 'on']!r}")
    if not report.good:
        problems.append(f"{report.requests - report.ok} requests failed or the ranks' evidence does not agree")
    if report.generator_was_limit:
        problems.append("the load generator had no time left")
    return Run(knob.name, number, arm, seen, tuple(problems), report.figures())


def order_of(rounds: int) -> Iterator[tuple[int, str]]:
    """(round, arm) as they are run."""
    for number in range(rounds):
        for arm in ARMS if number % 2 == 0 else ARMS[::-1]:
            yield number, arm


class Kept:
    """Runs that are done, in a file that a later sitting goes on with: a line of what all of them share, then a line per run.

    Args:
        path: The file; None: nothing is kept.
        setting: What all runs share; a file of another setting is refused.

    Raises:
        ValueError: The file is of another setting, or cannot be read.
    """

    def __init__(self, path: Path | None, setting: dict[str, Any]) -> None:
        self._path = path
        self.runs: list[Run] = []
        if path is None:
            return
        head = json.dumps(setting, sort_keys=True)
        if not path.exists():
            path.write_text(head + "\n", "utf-8")
            return
        lines = path.read_text("utf-8").splitlines()
        if not lines or lines[0] != head:
            raise ValueError(f"{path} holds runs of another setting: {lines[0][:300] if lines else 'none'}")
        try:
            self.runs = [msgspec.json.decode(line, type=Run) for line in lines[1:]]
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}: a line is no run: {error}") from error

    def has(self, knob: str, number: int, arm: str) -> bool:
        """It is done."""
        return any((run.knob, run.round, run.arm) == (knob, number, arm) for run in self.runs)

    def add(self, run: Run) -> None:
        """Keep one more."""
        self.runs.append(run)
        if self._path is not None:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(run) + b"\n")


def run_arms(
    knobs: Sequence[Knob], rounds: int, kept: Kept, trial: Callable[[Knob, str], Report], say: Callable[[str], None]
) -> None:
    """Run what is not done yet."""
    for knob in knobs:
        for number, arm in order_of(rounds):
            if kept.has(knob.name, number, arm):
                continue
            run = run_of(knob, number, arm, trial(knob, arm))
            kept.add(run)
            say(f"{knob.name} {arm}, round {number + 1} of {rounds}: ran as {run.ran_as}"
                + "".join(f"; {problem}" for problem in run.problems))  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One figure of one knob."""

    knob: str
    figure: Figure
    rounds: int
    ran_as: tuple[str, str]
    effect: Effect

    @property
    def better(self) -> str:
        """ "better", "worse", or "" where nothing was concluded."""
        if not self.effect.concluded or self.effect.ratio == 1 or not self.figure.better:
            return ""
        return "better" if (self.effect.ratio > 1) == (self.figure.better == "more") else "worse"


def rows_of(runs: Sequence[Run]) -> tuple[Row, ...]:
    """The table: rounds of which both arms are done."""
    rows = []
    for knob in dict.fromkeys(run.knob for run in runs):
        mine = [run for run in runs if run.knob == knob]
        by_place = {(run.round, run.arm): run for run in mine}
        numbers = sorted({run.round for run in mine if all((run.round, arm) in by_place for arm in ARMS)})
        if not numbers:
            continue
        arms = [[by_place[number, arm] for number in numbers] for arm in ARMS]
        ran_as = tuple("; ".join(dict.fromkeys(run.ran_as for run in arm)) for arm in arms)
        problems = list(dict.fromkeys(problem for arm in arms for run in arm for problem in run.problems))
        for figure in arms[0][0].figures:
            values = [[_value(run, figure.name) for run in arm] for arm in arms]
            if any(value is None for arm in values for value in arm):
                continue
            effect = effect_of(*values)  # type: ignore[arg-type]
            if problems:
                effect = Effect(effect.off, effect.on, effect.ratio, effect.interval, f"no conclusion: {problems[0]}")
            rows.append(Row(knob, figure, len(numbers), (ran_as[0], ran_as[1]), effect))
    return tuple(rows)


def _value(run: Run, name: str) -> float | None:
    return next((figure.value for figure in run.figures if figure.name == name), None)


def table_of(rows: Sequence[Row]) -> str:
    """For a person, in Markdown."""
    lines = []
    for knob in dict.fromkeys(row.knob for row in rows):
        mine = [row for row in rows if row.knob == knob]
        lines += [
            f"**{knob}**, {mine[0].rounds} rounds: off ran as {mine[0].ran_as[0]}, on as {mine[0].ran_as[1]}",
            "",
            f"| figure | off | on | on / off, median | {CONFIDENCE:.0%} interval | says |",
            "|---|---|---|---|---|---|",
        ]
        for row in mine:
            effect = row.effect
            interval = "" if effect.interval is None else f"{effect.interval[0]:.3g} to {effect.interval[1]:.3g}"
            says = f"{effect.verdict}{f' ({row.better})' if row.better else ''}"
            cells = [
                f"{row.figure.name} ({row.figure.unit})",
                *(f"{value:.4g}" for value in (effect.off, effect.on)),
                f"{effect.ratio:.3g}",
                interval,
                says,
            ]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def rows_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For a program."""
    return [
        {
            "knob": row.knob,
            "name": row.figure.name,
            "unit": row.figure.unit,
            "off": row.effect.off,
            "on": row.effect.on,
            # JSON has no word for "not a number".
            "ratio": None if math.isnan(row.effect.ratio) else row.effect.ratio,
            "interval": row.effect.interval,
            "rounds": row.rounds,
            "off_ran_as": row.ran_as[0],
            "on_ran_as": row.ran_as[1],
            "verdict": row.effect.verdict,
            "better": row.better,
        }
        for row in rows
    ]
