"""``docs/checked.md`` names tests that exist, and every scenario."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pp_agreement.testing import CI_WORLDS, NIGHTLY_WORLDS

ROOT = Path(__file__).parent.parent
ROWS = [
    [cell.strip() for cell in line.strip("| ").split(" | ")]
    for line in (ROOT / "docs" / "checked.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| behaviour ")
]
NAMES = sorted({name for row in ROWS for name in re.findall(r"`([^`]+)`", row[-1])})


def mutants():
    lines = (ROOT / "faults.txt").read_text().splitlines()
    return {line.split(" | ")[0].strip() for line in lines if " => " in line and not line.startswith("#")}


def test_every_row_has_a_behaviour_and_a_test():
    assert len(ROWS) > 60
    for row in ROWS:
        assert len(row) == 2 and len(row[0]) > 20 and "`" in row[1], row


@pytest.mark.parametrize("name", NAMES)
def test_it_exists(name):
    if name.endswith(".txt"):
        assert (ROOT / "tests" / "scenarios" / name).is_file()
    elif name.startswith("world: "):
        assert name.removeprefix("world: ") in {**CI_WORLDS, **NIGHTLY_WORLDS}
    elif name.startswith("mutant: "):
        assert name.removeprefix("mutant: ") in mutants()
    else:
        file, _, function = name.partition("::")
        text = (ROOT / "tests" / file).read_text()
        assert re.search(rf"^ *def {function}\(", text, re.MULTILINE)
        if function.startswith("check_"):  # a behaviour that real ranks run by name
            assert re.search(rf'"{function}"|self\.{function}\(', text)


def test_every_scenario_has_a_row():
    assert {path.name for path in (ROOT / "tests" / "scenarios").glob("*.txt")} <= set(NAMES)
