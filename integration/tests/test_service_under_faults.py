"""The seeded fault driver, for a minute: what it finds fails this test, and its seed does the same again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.service(seconds=62), pytest.mark.timeout(500)]

DRIVER = Path(__file__).resolve().parents[2] / "tools" / "faults.py"
#: How long faults are made (s); the start, the last healing and the audits come on top.
SECONDS = 60
#: Kills of both instances, and a process that stands still for longer than a link may, in the middle of a prompt.
SEED = 6
#: At most so many faults, however fast the machine is: what comes behind them is tried by night.
FAULTS = 8


def test_a_service_under_faults_heals_and_holds_nothing_afterwards() -> None:
    """Processes killed and stopped one after the other; every answer right, everybody told, everything given back."""
    limits = ["--seconds", str(SECONDS), "--seed", str(SEED), "--faults", str(FAULTS)]
    command = [sys.executable, str(DRIVER), *limits]
    done = subprocess.run(command, capture_output=True, text=True, timeout=480)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-4000:]
