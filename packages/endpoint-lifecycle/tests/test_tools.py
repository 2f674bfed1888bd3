"""The long runs start and find something: one small round of each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[1] / "tools"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True)


@pytest.mark.slow
def test_explorations_run_from_the_command_line() -> None:
    done = run(str(TOOLS / "explore.py"), "--count", "20")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing failed" in done.stdout
