"""What the benchmarks of all packages share: measuring in turn, ratios with their spread, and a verdict that can be believed.

    from measure import compare, plain_python, run_benchmark, timed

    def codec() -> list[Figure]:
        return [compare("encode", timed(encode, 1000), timed(json_encode, 1000), unit="us", scale=1e6, goal="<= 0.5",
                        against="json.dumps of the same record")]

    if __name__ == "__main__":
        run_benchmark(codec, ...)

Rules:

- A goal on a CPU is a *ratio* to something measured in the same run: another implementation, a bare exchange, a copy of
  the same bytes, or, where there is nothing nearer, a loop of plain Python (``plain_python``). Microseconds of one machine say
  nothing about another. Absolute goals are for a GPU whose name is in the figure (``on_device``). Counts are exact.
- Both sides are measured in turn, A B then B A, after a warm-up that does not count; each round gives one ratio, so what slows
  a whole round down (another process, a clock that falls) slows both sides.
- The figure is the median of the rounds' ratios, with quartiles. The *interval* is the one in which the median lies with
  99.9 % (by order statistics: no distribution is assumed), and at least 5 % to both sides, because two runs of one program
  differ by about so much in ways that one run cannot see (addresses, hash seeds, placement).
- The goal is met when the whole interval keeps it, missed when the whole interval breaks it, and "undecided" otherwise. So two
  runs do not say met and missed of one goal. Who wants a decision takes more rounds, a quieter machine, or a goal with room.

How to restate a goal that one machine meets and another misses: find what the time consists of, measure that in the same run,
and state the factor. "Added latency at most 1.3 ms" becomes "p99 at most 1.5 times that of a bare timer of the same delay";
"51 us per decision" becomes "at most 40 times a bare exchange of one frame between the same two threads"; "faster by 4x" stays
what it is, a ratio, with the reason why the factor is not higher if it has to be lowered.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Figure = dict[str, Any]
Sample = Callable[[], float]
#: One run of a program differs from the next by about this much, whatever the spread within one (share).
RUNS_DIFFER = 0.05
#: Two-sided chance that the median is outside of the interval.
CHANCE = 0.001
ROUNDS, ROUNDS_MIN = 15, 11
_GOAL = re.compile(r"(<=|>=|<|>) ([0-9.]+)")


# -- samples ------------------------------------------------------------------------------------------------------------


def timed(function: Callable[[], object], number: int = 1, clock: Callable[[], float] = time.perf_counter) -> Sample:
    """A sample of seconds per call: ``function`` called ``number`` times between two looks at the clock.

    ``time.process_time`` as the clock counts the processor time of all threads, ``time.thread_time`` that of this one.
    """

    def sample() -> float:
        calls = range(number)
        began_s = clock()
        for _ in calls:
            function()
        return (clock() - began_s) / number

    return sample


def plain_python() -> float:
    """Seconds of a fixed piece of plain Python: calls, attributes, dictionaries, small integers (about 2 ms)."""

    class Box:
        __slots__ = ("n",)

        def add(self, by: int) -> int:
            self.n += by
            return self.n

    box, table = Box(), {}
    box.n = 0
    began_s = time.perf_counter()
    for number in range(10_000):
        table[number & 255] = box.add(number)
    return time.perf_counter() - began_s


def in_turn(subjects: Mapping[str, Sample], rounds: int = ROUNDS, warm_up: int = 1) -> dict[str, list[float]]:
    """Measure all subjects once per round, every other round backwards; the first ``warm_up`` rounds do not count."""
    samples: dict[str, list[float]] = {name: [] for name in subjects}
    for number in range(-warm_up, rounds):
        for name in reversed(subjects) if number % 2 else subjects:
            value = subjects[name]()
            if number >= 0:
                samples[name].append(value)
    return samples


@contextlib.contextmanager
def pinned(cpus: int = 1) -> Iterator[None]:
    """Keep this process on its first ``cpus`` processors meanwhile, where the system lets it: for what has one thread."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, sorted(before)[-cpus:])
    except OSError:
        yield
        return
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


# -- figures ------------------------------------------------------------------------------------------------------------


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Where the median lies: by order statistics with 99.9 %, and never closer than 5 % to both sides.

    Raises:
        ValueError: Fewer than 11 values: not even their whole range holds the median with 99.9 %.
    """
    if len(values) < ROUNDS_MIN:
        raise ValueError(f"{len(values)} rounds decide nothing: a goal needs at least {ROUNDS_MIN}")
    ordered, n = sorted(values), len(values)
    tail, rank = 0.5**n, 0  # chance that at most `rank` of n values lie below the median
    while rank + 1 < n // 2 and tail + math.comb(n, rank + 1) * 0.5**n <= CHANCE / 2:
        rank += 1
        tail += math.comb(n, rank) * 0.5**n
    middle = statistics.median(ordered)
    return min(ordered[rank], middle * (1 - RUNS_DIFFER)), max(ordered[n - 1 - rank], middle * (1 + RUNS_DIFFER))


def verdict(goal: str, low: float, high: float) -> bool | str:
    """True: all of [low, high] keeps the goal (``<= 1.5``); False: all of it breaks it; else "undecided".

    Raises:
        ValueError: The goal is not an operator and a number.
    """
    match = _GOAL.fullmatch(goal)
    if match is None:
        raise ValueError(f"goal is {goal!r}, not like '<= 1.5'")
    bound = float(match[2])
    keeps = {"<=": bound.__ge__, "<": bound.__gt__, ">=": bound.__le__, ">": bound.__lt__}[match[1]]
    if keeps(low) and keeps(high):
        return True
    return "undecided" if keeps(low) or keeps(high) else False


def _figure(name: str, value: float, unit: str, **more: Any) -> Figure:
    keys = {"baseline": None, "ratio": None, "goal": None, "met": None}
    return {"name": name, "value": _short(value), "unit": unit, **keys, **more}


def _short(value: Any) -> Any:
    if isinstance(value, list):
        return [_short(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def ratio(
    name: str, samples: Sequence[float], reference: Sequence[float], *, unit: str, scale: float = 1.0, goal: str | None,
    against: str = "",
) -> Figure:  # fmt: skip
    """The figure of two sides that were measured in turn (same length): value, baseline and their ratio, round by round.

    Args:
        name: Of the figure.
        samples, reference: One number per round.
        unit: Of ``samples * scale`` and of ``reference * scale``.
        scale: Into the unit (1e6: seconds are shown as microseconds).
        goal: ``<= 1.5`` or ``>= 6`` of the ratio; None: shown without a goal.
        against: What the reference is.
    """
    ratios = [a / b for a, b in zip(samples, reference, strict=True)]
    decided: dict[str, Any] = {"goal": None, "met": None}
    if goal is not None:
        low, high = interval(ratios)
        decided = {"goal": goal, "met": verdict(goal, low, high), "interval": _short([low, high])}
    q1, middle, q3 = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return _figure(
        name, statistics.median(samples) * scale, unit, baseline=_short(statistics.median(reference) * scale),
        ratio=_short(middle), **decided, quartiles=_short([q1, q3]), rounds=len(ratios),
        spread=_short((q3 - q1) / middle), against=against,
    )  # fmt: skip


def compare(
    name: str, subject: Sample, reference: Sample, *, unit: str, scale: float = 1.0, goal: str | None, against: str,
    rounds: int = ROUNDS, warm_up: int = 1,
) -> Figure:  # fmt: skip
    """``in_turn`` and ``ratio`` for two sides."""
    samples = in_turn({"subject": subject, "reference": reference}, rounds, warm_up)
    return ratio(
        name, samples["subject"], samples["reference"], unit=unit, scale=scale, goal=goal, against=against
    )  # fmt: skip


def counted(name: str, value: float, unit: str, goal: str) -> Figure:
    """A number that does not depend on the machine (``<= 1`` fetches): exact, without a spread."""
    return _figure(name, value, unit, goal=goal, met=verdict(goal, value, value))


def shown(name: str, samples: Sequence[float], *, unit: str, scale: float = 1.0) -> Figure:
    """A number without a goal: it belongs to this machine."""
    values = [value * scale for value in samples]
    q1, middle, q3 = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return _figure(
        name, middle, unit, quartiles=_short([q1, q3]), rounds=len(values), spread=_short((q3 - q1) / middle)
    )


def on_device(name: str, samples: Sequence[float], *, unit: str, scale: float = 1.0, goal: str, device: str) -> Figure:
    """A figure with an absolute goal, on the GPU that it names.

    Raises:
        ValueError: No device is named: on a CPU a goal is a ratio.
    """
    if not device or device.lower() == "cpu":
        raise ValueError(f"{name}: an absolute goal needs a GPU; on a CPU a goal is a ratio")
    figure = shown(name, samples, unit=unit, scale=scale)
    low, high = interval([value * scale for value in samples])
    return {**figure, "goal": goal, "met": verdict(goal, low, high), "interval": _short([low, high]), "device": device}


def not_measured(name: str, unit: str, goal: str, why: str) -> Figure:
    """A figure that this machine cannot give: never counted as met."""
    return {**_figure(name, 0.0, unit), "value": None, "goal": goal, "why": why}


# -- the report ---------------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """What a report says of where it was made: processor, vector units, cores, load, interpreter."""
    facts: dict[str, Any] = {"model": platform.processor() or platform.machine(), "vector": [], "cores": os.cpu_count()}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        text = subprocess.run(
            ["lscpu"], capture_output=True, text=True, timeout=10, env={**os.environ, "LC_ALL": "C"}
        ).stdout
        found = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        flags = set(found.get("Flags", "").split())
        facts["model"] = found.get("Model name", facts["model"]).strip()
        facts["vector"] = sorted(flag for flag in flags if re.fullmatch(r"(avx|amx|sve|asimd)\w*", flag))
    with contextlib.suppress(OSError):
        facts["load"] = [round(value, 1) for value in os.getloadavg()]
        facts["usable_cores"] = len(os.sched_getaffinity(0))
    return {**facts, "python": platform.python_version()}


WORDS = {True: "met", False: "MISSED", "undecided": "undecided", None: "no goal"}


def word(figure: Figure) -> str:
    """The verdict as the table says it."""
    if figure["met"] is None and figure["goal"] is not None:
        return "not measured"
    return WORDS[figure["met"]]


def run_benchmark(*parts: Callable[[], list[Figure]]) -> None:
    """Run the parts of a benchmark file, print its table and then one JSON line per figure."""
    print(f"machine: {json.dumps(machine())}")
    figures: list[Figure] = []
    for part in parts:
        figures += part()
        sys.stdout.flush()
    width = max((len(f["name"]) for f in figures), default=10)
    print(f"{'figure':{width}} {'value':>12} {'unit':9} {'baseline':>12} {'ratio':>8} {'quartiles':>15}  goal")
    for f in figures:
        quartiles = "-".join(f"{q:.3g}" for q in f.get("quartiles", ()))
        cells = ["" if f[key] is None else f"{f[key]:,.4g}" for key in ("value", "baseline", "ratio")]
        print(f"{f['name']:{width}} {cells[0]:>12} {f['unit']:9} {cells[1]:>12} {cells[2]:>8} {quartiles:>15}  "
              f"{f['goal'] or ''} {word(f)}{', against ' + f['against'] if f.get('against') else ''}")  # fmt: skip
    for f in figures:
        print(json.dumps(f))
