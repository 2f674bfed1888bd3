"""The table of behaviours in docs/stages.md is true: every row has a verdict and tests that there are, every test has a row."""

import ast
import re
from functools import lru_cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
PAGE = TESTS.parents[1] / "docs" / "stages.md"
WORDS = ("reading", "running", "rules", "runs")
_ROW = re.compile(r"^\| (?P<behaviour>.+?) \| (?P<here>[^|]+) \| (?P<tests>[^|]+) \|$")
_TEST = re.compile(r"`(\w+)::(test_\w+)`")


@lru_cache
def defined_in(word):
    """Names of the tests that a file defines at its top, where pytest collects them."""
    tree = ast.parse((TESTS / f"test_stages_{word}.py").read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def rows():
    """Every row below the heading of the comparison, with its section."""
    section, found = "", []
    for text in PAGE.read_text().split("## The field's behaviour, and ours")[1].splitlines():
        if text.startswith("### "):
            section = text.removeprefix("### ")
        elif text.startswith("| ") and text != "| behaviour | here | test |":
            row = _ROW.match(text)
            assert row, text
            found.append((section, row["behaviour"], row["here"], row["tests"]))
    return found


def test_every_row_says_how_it_is_here():
    """The same, different, or not built: the last two with what instead or why."""
    assert len(rows()) > 120
    for _, behaviour, here, _ in rows():
        assert re.match(r"same\b|different: \w|not built: \w", here), (behaviour, here)


@pytest.mark.parametrize("row", rows(), ids=lambda row: re.sub(r"\W+", "-", row[1])[:60])
def test_every_row_names_tests_that_there_are(row):
    """At least one, and each of them is defined in the file that it names."""
    named = _TEST.findall(row[3])
    assert named
    assert _TEST.sub("", row[3]).strip(" ,") == ""
    for word, name in named:
        assert word in WORDS
        assert name in defined_in(word), f"{word}::{name}"


def test_every_behaviour_stands_once():
    """Two rows for one behaviour would sooner or later say two things."""
    behaviours = [behaviour for _, behaviour, _, _ in rows()]
    assert len(behaviours) == len(set(behaviours))


def test_every_test_has_a_row():
    """A behaviour that is tested and not in the table is a behaviour that nobody can look up."""
    named = {test for row in rows() for test in _TEST.findall(row[3])}
    assert {(word, name) for word in WORDS for name in defined_in(word)} == named


def test_every_option_that_is_refused_is_in_the_table():
    """By its name, so that people find out why."""
    from stages.comment import REFUSED

    text = PAGE.read_text()
    assert [option for option in REFUSED if option not in text] == []
