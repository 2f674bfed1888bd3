"""Every README's examples run as they stand: plain ones without extras' help, marked ones on MPI ranks."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from meta_executor.mpi_launcher import find_launcher

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(p.parent.name for p in (ROOT / "packages").glob("*/pyproject.toml"))
BLOCK = re.compile(r"^```python(?P<mark>[^\n]*)\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)
RANKS = {"mpi": 2, "mpi2": 2, "mpi4": 4}


def blocks(package):
    """(mark, code) of each Python program of a package's README: a block marked "continued" goes on with the one before."""
    text = (ROOT / "packages" / package / "README.md").read_text("utf-8")
    found: list[tuple[str, str]] = []
    for m in BLOCK.finditer(text):
        if m["mark"].strip() == "continued":
            mark, code = found.pop()
            found.append((mark, code + m["code"]))
        else:
            found.append((m["mark"].strip(), m["code"]))
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_readme_says_what_it_must(package):
    """Purpose, a runnable example, guarantees, non-guarantees, errors."""
    text = (ROOT / "packages" / package / "README.md").read_text("utf-8").lower()
    assert any(mark == "" for mark, _ in blocks(package)), "no plain example"
    for word in ("guarantee", "not", "error"):
        assert word in text
    code = next(code for mark, code in blocks(package) if mark == "")
    assert len([line for line in code.splitlines() if line.strip()]) <= 40, "the first example is too long to take in"


@pytest.mark.parametrize("package", PACKAGES)
def test_plain_examples_run(package, tmp_path):
    """Each block without a mark is a whole program."""
    for number, (mark, code) in enumerate(blocks(package)):
        if mark == "":
            script = tmp_path / f"example{number}.py"
            script.write_text(code)
            done = subprocess.run(
                [sys.executable, "-W", "error", str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=60
            )
            assert done.returncode == 0, f"{code}\n{done.stdout}{done.stderr}"


@pytest.mark.service
@pytest.mark.parametrize("package", [p for p in PACKAGES if any(m in RANKS for m, _ in blocks(p))])
def test_mpi_examples_run(package, tmp_path):
    """Each block marked mpi runs on that many ranks."""
    for number, (mark, code) in enumerate(blocks(package)):
        if mark in RANKS:
            script = tmp_path / f"example{number}.py"
            script.write_text(code)
            done = subprocess.run(
                find_launcher().command(RANKS[mark], [sys.executable, "-m", "mpi4py", str(script)]),
                cwd=tmp_path, capture_output=True, text=True, timeout=90, stdin=subprocess.DEVNULL,
            )  # fmt: skip
            assert done.returncode == 0, f"{code}\n{done.stdout}{done.stderr}"
