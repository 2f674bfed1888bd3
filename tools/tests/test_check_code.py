"""The checks that read code: each finds its fault, and leaves alone what only looks like it."""

import time

import pytest

import check_code


@pytest.mark.parametrize(
    ("pattern", "searched"),
    [
        (r" - at `\$\.?(.*)`$", True),
        (r"missing field `(.*?)`", True),
        (r"(a+)+$", False),
        (r"(a|aa)+$", False),
        (r"(xa?x?)*$", False),
        (r"(\w+\s?)*:", False),
        (r"([a-z]+)*-", False),
        (r"\s*.*:", False),
        (r".*-.*-$", False),
        (r"\d+\d*x", False),
        (r"x*y?x*z", False),
    ],
)
def test_slow_expressions_are_found(pattern, searched):
    """Nested, adjacent and restarting repeats that take the same characters."""
    assert check_code.faults_of(pattern, searched=searched)


@pytest.mark.parametrize(
    ("pattern", "searched"),
    [
        (r"[\x21-\x7e]+", True),
        (r"(\w+\.)*\w{1,5}", False),
        (r"([a-z]+-)+\d", False),
        (r"\d+\.\d+", False),
        (r"\s*\w+\s*=", False),
        (r"\A`(.*)`", True),
        (r"^x.*y", True),
        (r"<([^<>]*)>", True),
        (r"a*+a", False),
        (r"(ab?)+c", False),
        (r"(?>a+)b", False),
        (r".*", True),
        (r"[0-9]{1,3}[0-9]{1,3}", True),
    ],
)
def test_linear_expressions_are_left_alone(pattern, searched):
    """Separated, anchored, possessive and bounded ones."""
    assert check_code.faults_of(pattern, searched=searched) == []


def test_what_is_called_slow_is_slow():
    """The expression that a client could stop a service with: twice the text, much more than twice the time."""
    import re

    def seconds(count):
        text = '" - at `$"' * count + "\n"
        began_s = time.process_time()
        re.search(r" - at `\$\.?(.*)`$", text)
        return time.process_time() - began_s

    assert seconds(2000) > 4 * seconds(400)


def write(root, name, text):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_searching_decides_for_a_compiled_pattern(tmp_path, monkeypatch):
    """One that is only used to match from the beginning may begin with anything; a reason on the line is heard."""
    monkeypatch.setattr(check_code, "SLOW_FILES", frozenset())
    write(
        tmp_path,
        "packages/p/src/p/a.py",
        "import re\n"
        "A = re.compile('x.*y')\nA.fullmatch('')\n"
        "B = re.compile('x.*y')\nB.search('')\n"
        "C = re.compile('x.*y')  # regex-ok: the text is ours\nC.search('')\n"
        "re.sub('x.*y', '', '')\n",
    )
    assert [line.split(":")[1] for line in check_code.check_backtracking(tmp_path)] == ["4", "8"]
    monkeypatch.setattr(check_code, "SLOW_FILES", frozenset({"packages/p/src/p/b.py"}))
    assert "remove it from SLOW_FILES" in list(check_code.check_backtracking(tmp_path))[-1]


def test_circles_are_found_also_when_a_function_hides_them(tmp_path, monkeypatch):
    """a → b → c → a, one step of it in a function; an import for the type checker is none."""
    source = "packages/p/src/p"
    write(tmp_path, f"{source}/__init__.py", "from p.a import x\n")
    write(tmp_path, f"{source}/a.py", "from p import b\nx = 1\n")
    write(tmp_path, f"{source}/b.py", "from . import c\n")
    write(tmp_path, f"{source}/c.py", "def f():\n    from p.a import x\n    return x\n")
    write(tmp_path, f"{source}/d.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import p.e\n")
    write(tmp_path, f"{source}/e.py", "import p.d\n")
    monkeypatch.setattr(check_code, "CIRCLES", frozenset())
    [problem] = check_code.check_import_circles(tmp_path)
    assert problem.endswith("at run time: p.a, p.b, p.c")
    monkeypatch.setattr(check_code, "CIRCLES", frozenset({frozenset({"p.a", "p.b", "p.c"}), frozenset({"p.d", "p.e"})}))
    [problem] = check_code.check_import_circles(tmp_path)
    assert "no circle of p.d, p.e any more" in problem


def test_dead_names_are_found_and_the_list_is_kept_true(tmp_path):
    """Functions, methods, attributes, members of an enumeration; not fields of a record, nor what a test uses."""
    pytest.importorskip("vulture", reason="NO COVERAGE: vulture is not installed")
    write(
        tmp_path,
        "packages/p/src/p/a.py",
        "import enum\n"
        "def gone(): return used()\n"
        "def used(): return Leg.ONE\n"
        "class Leg(enum.Enum):\n    ONE = 1\n    TWO = 2\n"
        "class Box:\n    size: int\n    def lift(self): self.lifted = True\n"
        "def tested(): return Box\n",
    )
    write(tmp_path, "packages/p/tests/test_a.py", "from p.a import tested\ntested()\n")
    write(tmp_path, "tools/dead_names.txt", "# a list\np lift: called by a library\np Box: a class\n")
    (tmp_path / "integration").mkdir()
    problems = list(check_code.check_dead_names(tmp_path))
    assert [p.split(": ", 1)[1] for p in problems[:-1]] == [
        "nothing uses function gone", "nothing uses variable TWO", "nothing uses attribute lifted",
    ]  # fmt: skip
    assert problems[-1] == "tools/dead_names.txt:3: p Box is used, or gone: remove the line"


def test_an_unknown_check_is_refused(capsys):
    """By name, before anything runs."""
    assert check_code.main(["other"]) == 2
    assert "there are dead-names" in capsys.readouterr().err
