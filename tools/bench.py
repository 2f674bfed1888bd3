"""Run the benchmarks of packages: a table each, and at the very end one JSON line per figure.

    nox -s bench -- pp-agreement                  # one package
    nox -s bench -- kv-bounce-planner --json F    # figures also to a file
    nox -s bench -- --report DIR                  # of all packages, and a page and a table of them in a folder

A benchmark is ``packages/NAME/benchmarks/bench_*.py``, which prints what it found and one JSON line per figure: ``name``,
``value``, ``unit``, ``baseline``, ``ratio``, ``goal`` and ``met`` (true, false, "undecided": the spread does not decide it,
null: no goal, or not measurable here; never counted as met), and the spread. ``measure.py`` makes such figures and says how a
goal is stated; it can be imported there. Each file runs in a process of its own.

Exit 1 when a file fails, or prints no figure and does not say NO COVERAGE (hardware that is not here); a
missed goal is printed, and fails with ``--strict``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from measure import machine, word

ROOT = Path(__file__).resolve().parent.parent
KEYS = ("name", "value", "unit", "baseline", "ratio", "goal", "met")


def figures_of(output: str) -> list[dict[str, Any]]:
    """The figures among a benchmark's lines.

    Raises:
        ValueError: A JSON line lacks a key.
    """
    found = []
    for line in output.splitlines():
        if not line.startswith("{"):
            continue
        figure = json.loads(line)
        missing = [key for key in KEYS if key not in figure]
        if missing:
            raise ValueError(f"figure {figure.get('name', line[:60])!r} lacks {', '.join(missing)}")
        found.append(figure)
    return found


def run_file(path: Path, limit_s: float) -> tuple[list[dict[str, Any]], str | None]:
    """Figures of one file, and what went wrong."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "tools"), os.environ.get("PYTHONPATH")])),
    }
    try:
        done = subprocess.run(
            [sys.executable, str(path)], cwd=ROOT, env=environment, timeout=limit_s, stdout=subprocess.PIPE, text=True
        )
    except subprocess.TimeoutExpired:
        return [], f"stopped after {limit_s:.0f} s"
    print("\n".join(line for line in done.stdout.splitlines() if not line.startswith("{")), flush=True)
    if done.returncode != 0:
        return [], f"exit {done.returncode}"
    try:
        figures = figures_of(done.stdout)
    except ValueError as error:
        return [], str(error)
    if not figures and "NO COVERAGE" in done.stdout:
        return [], None
    return figures, None if figures else "no figure"


def main() -> int:
    """Exit code 0 or 1; 2 for a package without benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    parser.add_argument("--report", type=Path, help="write report.html and README.md into this folder")
    parser.add_argument("--strict", action="store_true", help="fail when a goal is missed")
    parser.add_argument("--limit-s", type=float, default=900.0, help="longest time of one file")
    options = parser.parse_args()
    names = options.packages or sorted(p.parent.name for p in (ROOT / "packages").glob("*/benchmarks"))
    files_of = {name: sorted((ROOT / "packages" / name / "benchmarks").glob("bench_*.py")) for name in names}
    for name, files in files_of.items():
        if not files:
            print(f"{name} has no benchmarks", file=sys.stderr)
            return 2
    figures: list[dict[str, Any]] = []
    problems: list[str] = []
    facts = machine()
    print(f"machine: {json.dumps(facts)}", flush=True)
    for name, files in files_of.items():
        for path in files:
            print(f"== {path.relative_to(ROOT)}", flush=True)
            start = time.monotonic()
            found, problem = run_file(path, options.limit_s)
            figures += [{**figure, "package": name} for figure in found]
            if problem:
                problems.append(f"{path.relative_to(ROOT)}: {problem}")
            print(f"== {path.name}: {len(found)} figures, {time.monotonic() - start:.0f} s", flush=True)
    table = Table(title="Figures")
    for column in ("package", *KEYS[:-1], "spread", "met"):
        table.add_column(column)
    for figure in figures:
        cells = ["" if figure.get(k) is None else figure[k] for k in (*KEYS[:-1], "spread")]
        texts = [f"{c:.4g}" if isinstance(c, float) else str(c) for c in cells]
        table.add_row(figure["package"], *texts, word(figure))
    Console(width=200, highlight=False).print(table)
    for problem in problems:
        print(f"FAILED {problem}")
    if options.json:
        options.json.write_text("".join(json.dumps(f) + "\n" for f in ({"machine": facts}, *figures)))
    if options.report:
        import bench_page

        date = time.strftime("%Y-%m-%d", time.gmtime())
        bench_page.write_page(bench_page.Found([facts], figures), options.report, bench_page.commit_of_tree(), date)
    for figure in figures:
        print(json.dumps(figure))
    missed = [f for f in figures if f["met"] is False]
    return 1 if problems or (options.strict and missed) else 0


if __name__ == "__main__":
    sys.exit(main())
