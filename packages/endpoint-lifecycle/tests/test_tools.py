"""The long runs start and find something: one small round of each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[1] / "tools"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True)


@pytest.mark.parametrize("name", ["wildcard host", "counter wraps into the same millisecond"])
def test_a_planted_defect_is_killed(name: str) -> None:
    done = run(str(TOOLS / "mutants.py"), "--only", name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 killed" in done.stdout


def test_every_mutants_text_stands_in_the_source_once() -> None:
    """A mutant that no longer fits the source would be a check that checks nothing."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("endpoint_mutants", TOOLS / "mutants.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["endpoint_mutants"] = module
    spec.loader.exec_module(module)
    for mutant in module.MUTANTS:
        text = (TOOLS.parent / "src" / "endpoint_lifecycle" / mutant.file).read_text()
        assert text.count(mutant.old) == 1, f"{mutant.name}: {text.count(mutant.old)} times"
    assert len({mutant.name for mutant in module.MUTANTS}) == len(module.MUTANTS)


@pytest.mark.slow
def test_explorations_run_from_the_command_line() -> None:
    done = run(str(TOOLS / "explore.py"), "--count", "20")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing failed" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_planted_defect_is_killed() -> None:
    done = run(str(TOOLS / "mutants.py"))
    assert done.returncode == 0, done.stdout + done.stderr
