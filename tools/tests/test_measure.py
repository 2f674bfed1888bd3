"""The verdict of a benchmark: two runs of one program never say met and missed of the same goal."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

import measure


def ratios(draw, rounds, true, noise, shift):
    """The ratios of one run: the program's, times what only this run has, times what each round has."""
    own = true * draw.gauss(1.0, shift)
    return [own * draw.lognormvariate(0.0, noise) for _ in range(rounds)]


@pytest.mark.parametrize("rounds", [11, 15, 60])
@pytest.mark.parametrize("noise", [0.005, 0.05, 0.3])
@pytest.mark.parametrize("true", [0.8, 0.97, 1.0, 1.03, 1.3])
def test_two_runs_do_not_flip(rounds, noise, true):
    """Whatever the noise and however near the goal: a second run says the same, or one of them says undecided."""
    draw = random.Random(f"{rounds} {noise} {true}")
    for _ in range(150):
        verdicts = {
            measure.verdict("<= 1.0", *measure.interval(ratios(draw, rounds, true, noise, 0.02))) for _ in range(2)
        }
        assert verdicts != {True, False}


@pytest.mark.parametrize(("true", "expected"), [(0.5, True), (2.0, False)])
@pytest.mark.parametrize("noise", [0.005, 0.3])
def test_a_clear_case_is_decided(true, noise, expected):
    """Half and twice the goal are told apart from it, also on a noisy machine: the rule does not hide behind undecided."""
    draw = random.Random(1)
    verdicts = [measure.verdict("<= 1.0", *measure.interval(ratios(draw, 15, true, noise, 0.02))) for _ in range(200)]
    assert verdicts.count(expected) >= 198
    assert (not expected) not in verdicts


def test_the_interval_is_by_order_statistics():
    """15 values: the second and the 14th; 11: the whole range, fewer decide nothing; never closer than 5 %."""
    assert measure.interval([float(n) for n in range(1, 16)]) == (2.0, 14.0)
    assert measure.interval([float(n) for n in range(1, 12)]) == (1.0, 11.0)
    with pytest.raises(ValueError, match="at least 11"):
        measure.interval([1.0] * 10)
    assert measure.interval([10.0] * 15) == (9.5, 10.5)
    low, high = measure.interval([float(n) for n in range(1, 402)])
    assert 160 < low < 175 and 227 < high < 242


@pytest.mark.parametrize(
    ("goal", "low", "high", "expected"),
    [
        ("<= 2", 1.0, 2.0, True), ("<= 2", 1.0, 2.1, "undecided"), ("<= 2", 2.1, 3.0, False),
        (">= 2", 2.0, 3.0, True), (">= 2", 1.9, 3.0, "undecided"), (">= 2", 1.0, 1.9, False),
        ("< 2", 1.0, 2.0, "undecided"), ("> 2", 2.0, 3.0, "undecided"),
    ],
)  # fmt: skip
def test_verdicts(goal, low, high, expected):
    """A goal is kept by the whole interval, or broken by the whole interval, or undecided."""
    assert measure.verdict(goal, low, high) == expected
    with pytest.raises(ValueError, match="not like"):
        measure.verdict("about 2", low, high)


def test_sides_are_measured_in_turn_and_backwards():
    """A B, B A, A B: drift over a run does not favour one side; the warm-up does not count."""
    calls = []
    sides = {name: lambda name=name: calls.append(name) or float(len(calls)) for name in "ab"}
    samples = measure.in_turn(sides, rounds=3, warm_up=1)
    assert "".join(calls) == "ba" + "ab" + "ba" + "ab"
    assert samples == {"a": [3.0, 6.0, 7.0], "b": [4.0, 5.0, 8.0]}


def test_a_ratio_is_taken_round_by_round():
    """A round that was slow for both sides does not widen the spread."""
    figure = measure.ratio(
        "x", [2e-6, 20e-6, 2e-6] * 5, [1e-6, 10e-6, 1e-6] * 5, unit="us", scale=1e6, goal="<= 3", against="y"
    )
    assert (figure["ratio"], figure["spread"], figure["value"], figure["baseline"]) == (2.0, 0.0, 2.0, 1.0)
    assert figure["met"] is True
    assert list(figure)[:7] == ["name", "value", "unit", "baseline", "ratio", "goal", "met"]


def test_an_absolute_goal_needs_a_gpu():
    """On a CPU it is refused; with a device the interval decides."""
    with pytest.raises(ValueError, match="needs a GPU"):
        measure.on_device("x", [1.0, 1.0], unit="ms", goal="<= 2", device="cpu")
    assert measure.on_device("x", [1.0, 1.1, 1.0] * 4, unit="ms", goal="<= 2", device="H200")["met"] is True
    assert measure.counted("fetches", 1, "", "<= 1")["met"] is True
    assert measure.word(measure.not_measured("x", "ms", "<= 2", "no GPU")) == "not measured"


def test_samples_and_machine_are_real():
    """The calibration loop takes time, twice as much work about twice as long; the machine has a name and cores."""
    assert 1e-5 < measure.plain_python() < 10
    one = measure.timed(measure.plain_python, 1)
    with measure.pinned():
        figure = measure.compare(
            "two loops", measure.timed(lambda: (one(), one())), one, unit="ms", scale=1e3, goal=">= 1.2", against="one"
        )
    assert figure["ratio"] > 1
    facts = measure.machine()
    assert facts["model"] and facts["cores"] >= 1 and len(facts["load"]) == 3


def test_a_package_without_benchmarks_is_told_before_anything_runs():
    """Also behind one that has some: minutes of figures would end without a table."""
    bench = Path(measure.__file__).with_name("bench.py")
    done = subprocess.run(
        [sys.executable, str(bench), "pp-agreement", "no-such-package"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and done.stderr == "no-such-package has no benchmarks\n" and not done.stdout


def test_the_runner_shows_undecided_and_fails_on_missed_only(tmp_path):
    """A benchmark file of a package, through tools/bench.py's reading."""
    file = tmp_path / "bench_x.py"
    file.write_text(
        "from measure import ratio, run_benchmark\n"
        "run_benchmark(lambda: [ratio('near', [1.0, 1.1, .9] * 5, [1.0] * 15, unit='s', goal='<= 1', against='one')])\n"
    )
    tools = str(Path(measure.__file__).parent)
    done = subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, env={"PYTHONPATH": tools, "PATH": "/usr/bin:/bin"}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("machine: {")
    assert "undecided" in done.stdout
    assert json.loads(done.stdout.splitlines()[-1])["met"] == "undecided"
