"""Planting by syntax: what a pattern finds, what a replacement makes of it, and what is refused."""

import ast

import pytest

from planting import Edit, PlantingError, Sources, plant, plant_row, rows_of

MODULE = """
import enum

class Owner:
    def stop(self, generation, *, now=0):
        # a comment
        with self.lock:
            if generation is None or generation != self.generation:
                self.note("ignored",
                          generation)
                return False
            try:
                self.slot.delete(generation)
            except BaseException as error:
                self.note(error)
                raise
            for item in self.items:
                item.end(now, reason="stop")
            self.count += 1
            return True

    def again(self):
        self.count += 1
        return self.count if self.count else None

class Other:
    def again(self):
        return f"{self.count + 1}"
"""
TABLE = """
TABLE = Proxy({
    (S.A, E.X): S.B,
    (S.B, E.X): S.C,
})
NESTED = {S.A: {E.X: S.B, E.Y: S.C}, S.B: {}}
SETS = {S.A: frozenset({S.B, S.C}), S.B: frozenset({S.C}), S.C: frozenset()}
"""


def planted(place, pattern, replacement, source=MODULE):
    """The changed module as normalised text."""
    return plant(Sources({"_owner": source}), (Edit(place, pattern, replacement),))["_owner"]


@pytest.mark.parametrize(
    ("place", "pattern", "replacement", "gone", "there"),
    [
        ("stop", "generation != self.generation", "!drop", "or generation", "if generation is None:"),
        ("stop", "generation != self.generation", "generation == self.generation", "!=", "=="),
        ("stop", "if generation is None or ...", "if False", "is None", "if False:\n                self.note('ignored'"),
        ("stop", "if ...", "!drop", "ignored", "try:"),
        ("stop", "if ...", "!negate", "if generation is", "if not (generation is None"),
        ("stop", "if ...", "!swap", "if generation is None or generation != self.generation:\n                self", "else:"),
        ("stop", "with self.lock", "!body", "with", "def stop(self, generation, *, now=0):\n        if"),
        ("stop", "try", "!body", "try:", "self.slot.delete(generation)"),
        ("stop", "except BaseException", "except ValueError", "BaseException", "except ValueError as error"),
        ("stop", "except BaseException", "!drop", "except", "self.slot.delete(generation)"),
        ("stop", "self.slot.delete(...)", "!drop", "delete", "try:\n                pass"),
        ("stop", "self.slot.delete($x)", "self.slot.add($x, $x)", "delete", "add(generation, generation)"),
        ("stop", "item.end(...)", "item.finish()", "item.end", "item.finish()"),
        ("stop", "item.end(..., reason='stop')", "item.end()", "reason", "item.end()"),
        ("stop", "self.count += 1", "return False", "count", "return False\n            return True"),
        ("stop", "self.count += 1 ;; return True", "return 0 ;; self.n()", "True", "return 0\n            self.n()"),
        ("stop", "for item in ...", "self.n() ;; for item in self.all", "items", "in self.all:\n                item.end"),
        ("Owner.again", "... if self.count else None", "!swap", "self.count if", "None if self.count else self.count"),
        ("Owner.again", "self.count if ... else None", "self.count", "None", "return self.count"),
        ("Other", "self.count + 1", "self.count", "+ 1", "{self.count}"),
        ("_owner.Other.again", "1", "2", "count + 1", "count + 2"),
        ("_owner", "'stop'", "'halt'", "'stop'", "'halt'"),
        ("stop", "for item in self.items", "for item in ()", "self.items", "for item in ():\n                item.end"),
    ],
)  # fmt: skip
def test_a_fault_is_found_by_what_it_is(place, pattern, replacement, gone, there):
    """Layout and comments do not matter; the replacement stands where the pattern was and nothing else moved."""
    before = planted("Other", "self.count + 1", "self.count + 1 + 0").replace(" + 0", "")  # the module, normalised
    after = planted(place, pattern, replacement)
    changed = "\n".join(line for line in after.splitlines() if line not in before.splitlines())
    assert there in after, after
    assert gone not in changed or gone in there, after


def test_the_rest_of_the_function_may_change():
    """A refactoring that keeps the statement keeps the fault: it moved to another module, into an inner block."""
    moved = "class Owner:\n  def stop(self, generation):\n    while True:\n      if (generation != self.generation): return 5\n"
    texts = plant(Sources({"a": "", "room.b": moved}), (Edit("Owner.stop", "generation != self.generation", "False"),))
    assert list(texts) == ["room.b"]
    assert "if False" in texts["room.b"]


def test_two_edits_are_one_fault():
    """Edits are applied in turn, in one module or several."""
    texts = plant(
        Sources({"a": "def f():\n    return 1\n", "b": "def g():\n    return 1\n"}),
        (Edit("f", "1", "2"), Edit("g", "1", "3"), Edit("f", "2", "4")),
    )
    assert texts == {"a": "def f():\n    return 4", "b": "def g():\n    return 3"}


@pytest.mark.parametrize(
    ("place", "pattern", "replacement", "why"),
    [
        ("again", "self.count", "1", "names 2 places"),
        ("nobody", "self.count", "1", "names 0 places"),
        ("Owner", "self.count += 1", "!drop", "matches 2 places"),
        ("stop", "self.count -= 1", "!drop", "matches 0 places"),
        ("stop", "self.count += ", "!drop", "not Python"),
        ("stop", "return True", "return (", "not Python"),
        ("stop", "return True", "return True", "stays as it was"),
        ("stop", "generation is None", "return True", "cannot stand for an expression"),
        ("stop", "generation is None", "$other", "not in the pattern"),
        ("stop", "return True", "!body", "does not fit"),
        ("stop", "return True", "!negate", "does not fit"),
        ("stop", "return True", "!turn", "operators"),
        ("stop", "self.generation", "!drop", "takes away"),
        ("stop", "with self.lock", "break", "not valid Python"),
    ],
)  # fmt: skip
def test_what_cannot_be_planted_is_refused(place, pattern, replacement, why):
    """Nothing is guessed: a place or pattern that is there twice, or not, is an error."""
    with pytest.raises(PlantingError, match=why):
        planted(place, pattern, replacement)


def test_a_variable_that_stands_twice_stands_for_the_same():
    """``$x + $x`` is not ``a + b``."""
    source = "def f(a, b):\n    return a + b, b + b\n"
    assert "b * 2" in planted("f", "$x + $x", "$x * 2", source)


def test_the_rows_of_a_table_are_faults():
    """Each row removed, each row with another target; tables by pair, nested, and of sets; the table itself stays."""
    sources = Sources({"t": TABLE})
    before = ast.dump(sources.trees["t"])
    assert rows_of(sources, "TABLE") == [
        "(S.A, E.X) -> S.C", "(S.A, E.X) removed", "(S.B, E.X) -> S.B", "(S.B, E.X) removed",
    ]  # fmt: skip
    assert rows_of(sources, "NESTED") == [
        "S.A E.X -> S.C", "S.A E.X removed", "S.A E.Y -> S.B", "S.A E.Y removed",
    ]  # fmt: skip
    assert rows_of(sources, "SETS") == ["S.A S.B removed", "S.A S.C removed", "S.B S.C -> S.B"]
    assert ast.dump(sources.trees["t"]) == before
    assert rows_of(sources, "TABLE", "S.C")[-1] == "(S.B, E.X) -> S.B"
    texts = {plant_row(sources, "TABLE", name)["t"] for name in rows_of(sources, "TABLE")}
    assert len({*texts, ast.unparse(sources.trees["t"])}) == 5
    assert "{(S.B, E.X): S.C}" in plant_row(sources, "TABLE", "(S.A, E.X) removed")["t"]
    assert "{S.A: {E.Y: S.C}, S.B: {}}" in plant_row(sources, "NESTED", "S.A E.X removed")["t"]
    assert "S.B: frozenset({S.B})" in plant_row(sources, "SETS", "S.B S.C -> S.B")["t"]
    with pytest.raises(PlantingError, match="not a table"):
        rows_of(Sources({"t": "TABLE = 5"}), "TABLE")
