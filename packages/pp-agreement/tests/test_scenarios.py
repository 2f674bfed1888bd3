"""The protocol as text: every file under ``scenarios/`` prints exactly what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from pp_agreement.testing import ScenarioMismatch, play, run_scenario

FILES = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_scenario(path):
    """``run_scenario(path, rewrite=True)`` regenerates a file after a reviewed change."""
    run_scenario(path)


def test_there_are_scenarios():
    assert len(FILES) >= 55


def test_a_changed_expectation_is_noticed(tmp_path):
    text = FILES[0].read_text()
    changed = tmp_path / "changed.txt"
    changed.write_text(text.replace("Completed", "Committed", 1))
    with pytest.raises(ScenarioMismatch, match="Completed"):
        run_scenario(changed)
    run_scenario(changed, rewrite=True)
    assert changed.read_text() == play(text)
