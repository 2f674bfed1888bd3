"""The documents say what the code does."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from pp_agreement.__main__ import main

ROOT = Path(__file__).parent.parent


def test_design_holds_the_generated_figures(capsys):
    """``pp-agreement figures`` between the markers; a changed table must change the document."""
    assert main(["figures"]) == 0
    printed = capsys.readouterr().out.strip()
    text = (ROOT / "docs" / "design.md").read_text()
    held = text.split("<!-- figures: begin -->")[1].split("<!-- figures: end -->")[0].strip()
    assert held == printed


def test_design_names_what_exists():
    """The table of rules and their places: a place that was renamed must be renamed there."""
    text = (ROOT / "docs" / "design.md").read_text()
    table = text.split("| rule | its one place |")[1].split("\n## ")[0]
    sources = {path.stem: path.read_text() for path in (ROOT / "src" / "pp_agreement").glob("*.py")}
    names = [name for row in table.splitlines()[2:] if row for name in re.findall(r"`([^`]+)`", row.split(" | ")[1])]
    assert len(names) > 20
    for name in names:
        owner, _, own = name.rpartition(".")
        if owner.startswith("_") or (not owner and name in sources):
            assert owner in sources or name in sources, name
        found = [text for stem, text in sources.items() if not owner.startswith("_") or stem == owner]
        pattern = rf"^( *def {own}|{own}\b.*=|class {own}\b)" if not own.endswith("_") else rf"^ *def {own}"
        assert name in sources or any(re.search(pattern, text, re.MULTILINE) for text in found), name


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_readme_example_runs():
    (code,) = blocks("python")
    assert len(code.splitlines()) <= 20
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Committed") == 4 and "drained=True" in done.stdout


def test_readme_groups_example_runs():
    (code,) = blocks("python groups")
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Committed") == 4 and done.stdout.count("Drained") == 4


@pytest.mark.mpi(4)
def test_readme_mpi_example_runs(world_comm):
    (code,) = blocks("python mpi4")
    exec(compile(code, "README.md", "exec"), {})
    world_comm.Barrier()


def test_groups_example_runs():
    """Of three requests one is cancelled and two commit, told alike by all four ranks."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / "stages_with_tp.py")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (done.stdout.count("Committed"), done.stdout.count("CLOSED")) == (8, 4)


@pytest.mark.mpi(4)
def test_groups_example_runs_over_mpi(world_comm, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["stages_with_tp.py", "--mpi"])
    assert runpy.run_path(str(ROOT / "examples" / "stages_with_tp.py"))["main"]() == 0
    world_comm.Barrier()


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("explore", ["2 ranks, drain", "1 rank"]),
        ("simulate", ["--seeds", "20", "--jobs", "1"]),
        ("simulate", ["--seed", "7"]),
        ("simulate", ["--groups", "--seeds", "4", "--jobs", "1"]),
        ("fuzz", ["--count", "2000"]),
    ],
)
def test_tools_run(tool, arguments):
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / f"{tool}.py"), *arguments], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
