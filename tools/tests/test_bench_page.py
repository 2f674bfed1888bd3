"""The page and the table of figures: nothing is left out, nothing looks kept that is not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TOOLS))
import bench_page  # noqa: E402 - from the tools' own folder

MACHINE = {
    "machine": {"model": "A <CPU>", "cores": 2, "usable_cores": 2, "vector": ["avx2"], "python": "3.11", "load": [0.1]}
}


def figure(name, ratio, goal, met, **more):
    return {
        "name": name,
        "value": ratio,
        "unit": "us",
        "baseline": 1.0,
        "ratio": ratio,
        "goal": goal,
        "met": met,
        **more,
    }


FIGURES = [
    figure("kept", 1.0, "<= 2", True, interval=[0.5, 1.5]),
    figure("missed | badly", 3.0, "<= 2", False),
    figure("more is wanted", 8.0, ">= 4", True, interval=[5.0, 10.0]),
    figure("near", 2.0, "<= 2", "undecided", interval=[1.9, 2.1]),
    figure("shown", None, None, None),
    {**figure("not here", None, "<= 2", None), "value": None},
]
EFFECT = {
    "knob": "fast-path", "name": "step p50", "unit": "ms", "off": 60.0, "on": 54.0, "ratio": 0.9, "interval": [0.85, 0.95],
    "rounds": 6, "off_ran_as": "RPC", "on_ran_as": "direct", "verdict": "10.0% less", "better": "better",
}  # fmt: skip


@pytest.fixture
def files(tmp_path):
    bench, ab = tmp_path / "pp-agreement.json", tmp_path / "ab.json"
    bench.write_text("".join(json.dumps(one) + "\n" for one in [MACHINE, *FIGURES]))
    none = {**EFFECT, "name": "first token p50", "interval": None, "verdict": "no conclusion: 1 rounds", "better": ""}
    ab.write_text(json.dumps([EFFECT, none]) + "\n")
    return [bench, ab]


@pytest.mark.parametrize(
    ("number", "share"), [(0, (0.25, 0.5, 0.75)), (1, (1.5, 1.5, 1.5)), (2, (0.4, 0.5, 0.8)), (4, None), (5, None)]
)
def test_a_figure_is_drawn_as_a_share_of_its_goal(number, share):
    """Left of 1 it is kept, whether less or more is wanted."""
    assert bench_page.share_of_goal(FIGURES[number]) == (None if share is None else pytest.approx(share))


@pytest.mark.parametrize(
    ("more", "middle"),
    [
        ({"value": 121.0, "ratio": 4.0, "goal": "<= 2", "met": False}, 2.0),
        ({"value": 30.0, "ratio": 1.0, "goal": "<= 31", "met": True}, 30 / 31),
        ({"value": 0.5, "ratio": 7.0, "goal": ">= 6", "met": True}, 6 / 7),
        ({"value": 3.0, "ratio": None, "goal": "<= 1", "met": False}, 3.0),
    ],
)
def test_a_goal_without_an_interval_is_of_what_its_verdict_is_of(more, middle):
    """The ratio, or the value where that is what the goal bounds."""
    assert bench_page.share_of_goal({**figure("f", 1.0, None, None), **more})[1] == pytest.approx(middle)


@pytest.mark.parametrize("goal", [None, "none", "0", 0.85])
def test_a_goal_that_bounds_nothing_is_not_drawn(goal):
    """It stands in the table all the same."""
    one = figure("f", 2.0, goal, True)
    assert bench_page.share_of_goal(one) is None
    assert ("0.85" if goal == 0.85 else goal or "") in bench_page.figure_cells({"package": "p", **one})


def test_the_table_has_every_figure_with_its_verdict(files):
    text = bench_page.markdown_of(bench_page.read_files(files), "abc123", "2026-12-01")
    assert "2026-12-01, commit abc123" in text and "A <CPU>, 2 cores, avx2" in text
    assert "2 met, 1 MISSED, 1 undecided, 1 no goal, 1 not measured" in text
    assert "| pp-agreement | missed \\| badly | 3 us | 1 | 3 |  | <= 2 | MISSED |" in text
    assert "| fast-path | step p50 (ms) | 60 | 54 | 0.9 | 0.85 to 0.95 | 10.0% less (better) |" in text
    assert "fast-path: off ran as RPC, on as direct" in text
    rows = [line for line in text.splitlines() if line.startswith(("| pp-agreement", "| fast-path"))]
    assert len(rows) == len(FIGURES) + 2 and len({row.count(" | ") - row.count("\\|") for row in rows}) <= 3


def test_the_page_is_whole_in_one_file(files):
    """Plots are inside of it, foreign text is escaped, every verdict can be seen by its colour."""
    pytest.importorskip("matplotlib")
    page = bench_page.html_of(bench_page.read_files(files), "abc123", "2026-12-01")
    assert page.count("<img ") == 2 and page.count("data:image/png;base64,") == 2
    assert "A &lt;CPU&gt;" in page and "A <CPU>" not in page
    for name in ("met", "MISSED", "undecided"):
        assert f"<td class='{name}'>{name}</td>" in page
    assert all(one["name"] in page for one in FIGURES)


def test_without_plots_the_page_has_its_tables(files, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    page = bench_page.html_of(bench_page.read_files(files), "abc123", "2026-12-01")
    assert "matplotlib is not installed" in page and "<img" not in page and page.count("<table>") == 2


@pytest.mark.parametrize("line", ["{", "[1]", '{"name": "x"}'])
def test_a_file_of_something_else_is_refused_by_its_name(line, tmp_path):
    file = tmp_path / "odd.json"
    file.write_text(line)
    done = subprocess.run(
        [sys.executable, str(TOOLS / "bench_page.py"), str(file), "--folder", str(tmp_path / "out")],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2 and "odd.json: a line is" in done.stderr and not (tmp_path / "out").exists()


def test_the_command_writes_both_files(files, tmp_path):
    command = [
        sys.executable,
        str(TOOLS / "bench_page.py"),
        *map(str, files),
        "--folder",
        str(tmp_path / "out"),
        "--commit",
        "c0ffee",
    ]
    subprocess.run(command, check=True)
    assert "commit c0ffee" in (tmp_path / "out" / "README.md").read_text()
    assert (tmp_path / "out" / "report.html").read_text().startswith("<!doctype html>")
