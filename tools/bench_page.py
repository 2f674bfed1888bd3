"""Figures as a page for a browser and as a Markdown table, with machine, date and commit.

    python tools/bench_page.py FILE... --folder DIR     # DIR/report.html and DIR/README.md
    nox -s bench -- --report DIR                        # the same of a run of all benchmarks

A FILE is what ``tools/bench.py --json`` wrote (a line of the machine, a line per figure), or what ``meta-executor ab --json``
printed (one list of effects). A figure with a goal is drawn as a share of its goal with the interval that its verdict is of:
left of 1 it is kept. An effect is drawn as on over off with its interval. Without matplotlib the page has its tables alone.
"""

from __future__ import annotations

import argparse
import base64
import html
import io
import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measure import word

ROOT = Path(__file__).resolve().parent.parent
_GOAL = re.compile(r"(<=|>=|<|>) ([0-9.]+)$")
#: What is further out is drawn at the edge.
_SHOWN = (0.01, 100.0)
_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
_FINE_TICKS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0)
#: A name, (low, middle, high) and a verdict.
_Drawn = tuple[str, tuple[float, float, float], str]
_COLOURS = {"met": "#2a7d46", "MISSED": "#b3261e", "undecided": "#a86a00"}
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: #1c1c1c;
  background: #fff }
table { border-collapse: collapse; margin: 1rem 0; width: 100% }
th, td { border-bottom: 1px solid #ddd; padding: .3rem .6rem; text-align: left; vertical-align: top }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
.met { color: #2a7d46 } .MISSED { color: #b3261e; font-weight: 600 } .undecided { color: #a86a00 }
img { max-width: 100%; height: auto }
"""


@dataclass
class Found:
    """What the files hold.

    Attributes:
        machines: Facts of each machine that a file names.
        figures: With their package, in order.
        effects: Of knobs, in order.
    """

    machines: list[dict[str, Any]] = field(default_factory=list)
    figures: list[dict[str, Any]] = field(default_factory=list)
    effects: list[dict[str, Any]] = field(default_factory=list)


def read_files(paths: Iterable[Path]) -> Found:
    """Everything in the files.

    Raises:
        ValueError: A line is neither a machine, a figure nor a list of effects; names the file.
    """
    found = Found()
    for path in paths:
        for line in path.read_text("utf-8").splitlines():
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}: a line is not JSON: {error}") from error
            if isinstance(value, list) and all(isinstance(one, dict) and "knob" in one for one in value):
                found.effects += value
            elif isinstance(value, dict) and "machine" in value:
                found.machines.append(value["machine"])
            elif isinstance(value, dict) and {"name", "met", "goal"} <= value.keys():
                found.figures.append({"package": path.stem, **value})
            else:
                raise ValueError(f"{path}: a line is neither a machine, a figure nor a list of effects: {line[:80]}")
    return found


def share_of_goal(figure: dict[str, Any]) -> tuple[float, float, float] | None:
    """(low, middle, high) of a figure over its goal, turned round where more is wanted: below 1 it is kept.

    None: it has no goal that is a number, or was not measured.
    """
    match = _GOAL.match(str(figure["goal"] or ""))
    if match is None or float(match[2]) <= 0:
        return None
    bound, less = float(match[2]), match[1] in ("<=", "<")
    if figure.get("interval") is not None and figure.get("ratio") is not None:
        low, high = figure["interval"]
        middle = figure["ratio"]
    else:
        # A goal without an interval is of the ratio or of the value: of which, its verdict says, and else what lies nearer.
        numbers = [one for one in (figure.get("ratio"), figure["value"]) if one is not None and one > 0]
        told = [
            one for one in numbers if figure["met"] not in (True, False) or (one <= bound) == (less == figure["met"])
        ]
        if not (told or numbers):
            return None
        low = middle = high = min(told or numbers, key=lambda one: abs(math.log(one / bound)))
    if low <= 0:
        return None
    return (low / bound, middle / bound, high / bound) if less else (bound / high, bound / middle, bound / low)


def facts_of(found: Found, commit: str, date: str) -> list[str]:
    """Lines of where and of what."""
    lines = [f"{date}, commit {commit}"]
    apart = {json.dumps({**one, "load": None}, sort_keys=True): one for one in found.machines}
    for facts in apart.values():
        vector = ", ".join(name for name in facts.get("vector", ()) if name in ("avx2", "avx512f", "amx_tile", "sve"))
        cores = facts.get("usable_cores", facts.get("cores"))
        lines.append(
            f"{facts.get('model')}, {cores} cores, {vector or 'no vector units named'}, Python {facts.get('python')}, "
            f"load at the begin of the last run {facts.get('load')}"
        )
    return lines


def _number(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float | int) and not isinstance(value, bool) else str(value)


def figure_cells(figure: dict[str, Any]) -> list[str]:
    """A row of the table."""
    interval = figure.get("interval")
    return [
        figure["package"],
        figure["name"],
        f"{_number(figure['value'])} {figure['unit']}".strip(),
        _number(figure.get("baseline")),
        _number(figure.get("ratio")),
        "" if interval is None else f"{_number(interval[0])} to {_number(interval[1])}",
        _number(figure["goal"]),
        word(figure),
    ]


def effect_cells(effect: dict[str, Any]) -> list[str]:
    """A row of the table of effects."""
    interval = effect.get("interval")
    return [
        effect["knob"],
        f"{effect['name']} ({effect['unit']})",
        _number(effect["off"]),
        _number(effect["on"]),
        _number(effect["ratio"]),
        "" if interval is None else f"{_number(interval[0])} to {_number(interval[1])}",
        effect["verdict"] + (f" ({effect['better']})" if effect.get("better") else ""),
    ]


FIGURE_HEAD = ("package", "figure", "value", "baseline", "ratio", "interval", "goal", "verdict")
EFFECT_HEAD = ("knob", "figure", "off", "on", "on / off", "interval", "says")


def markdown_of(found: Found, commit: str, date: str) -> str:
    """The tables, for a repository."""

    def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
        cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
        return [
            f"| {' | '.join(head)} |",
            f"|{'---|' * len(head)}",
            *(f"| {' | '.join(row)} |" for row in cells),
            "",
        ]

    lines = ["# Figures", "", *(f"{line}  " for line in facts_of(found, commit, date)), ""]
    if found.figures:
        counts = summary_of(found.figures)
        lines += [counts, "", *table(FIGURE_HEAD, map(figure_cells, found.figures))]
    if found.effects:
        ran = dict.fromkeys(f"{e['knob']}: off ran as {e['off_ran_as']}, on as {e['on_ran_as']}" for e in found.effects)
        lines += [
            "## Effects",
            "",
            *(f"{line}  " for line in ran),
            "",
            *table(EFFECT_HEAD, map(effect_cells, found.effects)),
        ]
    return "\n".join(lines).rstrip() + "\n"


def summary_of(figures: Sequence[dict[str, Any]]) -> str:
    """How many of each verdict."""
    words = [word(figure) for figure in figures]
    return ", ".join(f"{words.count(one)} {one}" for one in dict.fromkeys(words))


def html_of(found: Found, commit: str, date: str) -> str:
    """The page, whole in one file."""
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>Figures</title>",
        f"<style>{_STYLE}</style><h1>Figures</h1>",
        *(f"<p>{html.escape(line)}</p>" for line in facts_of(found, commit, date)),
    ]
    if found.figures:
        parts.append(f"<p>{html.escape(summary_of(found.figures))}</p>")
    for package in dict.fromkeys(figure["package"] for figure in found.figures):
        mine = [figure for figure in found.figures if figure["package"] == package]
        parts.append(f"<h2>{html.escape(package)}</h2>")
        drawn = [
            (figure["name"], share, word(figure)) for figure in mine if (share := share_of_goal(figure)) is not None
        ]
        if drawn:
            words = "share of the goal: below 1 it is kept"
            parts.append(_plot(drawn, words, f"{package}: figures over their goals"))
        parts.append(_table(FIGURE_HEAD[1:], [figure_cells(figure)[1:] for figure in mine], number=range(1, 5)))
    if found.effects:
        parts.append("<h2>Effects</h2>")
    for knob in dict.fromkeys(effect["knob"] for effect in found.effects):
        effects = [effect for effect in found.effects if effect["knob"] == knob]
        parts.append(f"<h3>{html.escape(knob)}</h3>")
        parts.append(
            f"<p>{html.escape('off ran as ' + effects[0]['off_ran_as'] + ', on as ' + effects[0]['on_ran_as'])}</p>"
        )
        drawn = [_drawn_effect(one) for one in effects if one["ratio"] == one["ratio"]]
        if drawn:
            parts.append(_plot(drawn, "on over off", f"{knob}: on over off"))
        parts.append(_table(EFFECT_HEAD[1:], [effect_cells(effect)[1:] for effect in effects], number=range(1, 5)))
    return "\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, number: range) -> str:
    lines = ["<table><tr>", *(f"<th>{html.escape(one)}</th>" for one in head), "</tr>"]
    for row in rows:
        lines.append("<tr>")
        for place, cell in enumerate(row):
            kind = "number" if place in number else cell if cell in _COLOURS else ""
            lines.append(f"<td class='{kind}'>{html.escape(cell)}</td>")
        lines.append("</tr>")
    return "".join([*lines, "</table>"])


def _drawn_effect(effect: dict[str, Any]) -> _Drawn:
    low, high = effect["interval"] or (effect["ratio"], effect["ratio"])
    colour = {"better": "met", "worse": "MISSED"}.get(effect["better"], "undecided")
    return effect["name"], (low, effect["ratio"], high), colour


def _plot(drawn: Sequence[_Drawn], title: str, text: str) -> str:
    """An image with a line per figure, its middle and its interval, on a logarithmic axis with a line at 1."""
    try:
        from matplotlib.figure import Figure as Drawing
    except ModuleNotFoundError:
        return "<p>(no plot: matplotlib is not installed)</p>"
    drawing = Drawing(figsize=(9.5, 0.8 + 0.34 * len(drawn)), layout="constrained")
    axes = drawing.subplots()
    for place, (_, values, verdict) in enumerate(drawn):
        low, middle, high = (min(max(value, _SHOWN[0]), _SHOWN[1]) for value in values)
        colour = _COLOURS.get(verdict, "#555555")
        axes.plot([low, high], [place, place], color=colour, linewidth=2)
        axes.plot([middle], [place], "o", color=colour, markersize=6)
    axes.axvline(1.0, color="#1c1c1c", linewidth=1)
    axes.set_xscale("log")
    axes.minorticks_off()
    left, right = axes.get_xlim()
    axes.set_xlim(min(left, 0.9), max(right, 1.1))
    left, right = axes.get_xlim()
    within = [tick for tick in (_TICKS if right > 4 * left else _FINE_TICKS) if left <= tick <= right]
    axes.set_xticks(within, [f"{tick:g}" for tick in within])
    axes.set_yticks(range(len(drawn)), [name if len(name) <= 70 else f"{name[:69]}…" for name, _, _ in drawn])
    axes.set_ylim(len(drawn) - 0.5, -0.5)
    axes.set_xlabel(title)
    axes.grid(axis="x", color="#e2e2e2")
    axes.set_axisbelow(True)
    data = io.BytesIO()
    drawing.savefig(data, format="png", dpi=110)
    return f"<img alt='{html.escape(text)}' src='data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}'>"


def commit_of_tree() -> str:
    """The commit that is checked out, and whether files differ from it."""
    said = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=ROOT, capture_output=True, text=True
    )
    return said.stdout.strip() if said.returncode == 0 else "unknown"


def write_page(found: Found, folder: Path, commit: str, date: str) -> None:
    """Both files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.html").write_text(html_of(found, commit, date), "utf-8")
    (folder / "README.md").write_text(markdown_of(found, commit, date), "utf-8")


def main() -> int:
    """Exit code 0; 2 for a file that cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--folder", type=Path, required=True, help="where the two files go")
    parser.add_argument("--commit", default=None, help="what the figures are of; default: what is checked out")
    options = parser.parse_args()
    try:
        found = read_files(options.files)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    write_page(found, options.folder, options.commit or commit_of_tree(), time.strftime("%Y-%m-%d", time.gmtime()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
