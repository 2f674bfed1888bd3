"""README and design say what the code does: the example runs, reason codes and names are complete."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from kv_bounce_planner.planning import Reason

PACKAGE = Path(__file__).resolve().parents[1]


def test_the_readme_examples_run_as_they_stand(tmp_path: Path) -> None:
    """In an empty folder: the planner's in at most 20 lines, and the sessions' with what follows from it."""
    blocks = re.findall(r"^```python(?: continued)?\n(.*?)^```", (PACKAGE / "README.md").read_text(), re.M | re.S)
    assert len(blocks) == 4 and len([line for line in blocks[0].splitlines() if line.strip()]) <= 20
    for block in (blocks[0], blocks[1] + blocks[2] + blocks[3]):
        done = subprocess.run(
            [sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr


def test_the_design_lists_every_reason_on_its_side() -> None:
    """The table of codes cannot fall behind the code."""
    rows = re.findall(r"^\| (`.*?`) \| (.*?) \|$", (PACKAGE / "docs" / "design.md").read_text(), re.M)
    listed = {code: when for codes, when in rows for code in re.findall(r"`([a-z_]+)`", codes)}
    for reason in Reason:
        side = {"choice": "a choice", "fail_open": "fail open", "fail_closed": "fail closed"}[reason.when]
        assert listed.get(reason.value, "").startswith(side), reason


def test_files_named_in_the_documents_exist() -> None:
    """A reader should find what is named."""
    for document in (PACKAGE / "README.md", PACKAGE / "docs" / "design.md"):
        for name in re.findall(r"`((?:tests|tools|benchmarks|examples|src)/[\w/.]+\.py)", document.read_text()):
            assert (PACKAGE / name).exists(), (document.name, name)
        for name in re.findall(r"`(test_\w+\.py|bench_\w+\.py)`", document.read_text()):
            assert list(PACKAGE.rglob(name)), (document.name, name)
