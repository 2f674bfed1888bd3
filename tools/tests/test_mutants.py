"""The runner of planted faults: what it calls killed, what an error, and that the package itself is never touched."""

import hashlib

import pytest

import mutants

SOURCE = """
def add(a, b):
    if a > 100:
        raise ValueError(a)
    return a + b

def slow(n):
    while n > 0:
        n -= 1
    return n
"""
CHECK = """
import os, sys
import thing
sys.exit(0 if thing.add(1, 2) == 3 and thing.slow(2) == 0 else 1)
"""


@pytest.fixture
def package(tmp_path):
    """A package with one module and one check; returns a function that writes its faults and runs them."""
    folder = tmp_path / "thing"
    (folder / "src" / "thing").mkdir(parents=True)
    (folder / "src" / "thing" / "__init__.py").write_text(SOURCE)
    (folder / "check.py").write_text(CHECK)

    def run(faults, *options):
        (folder / "faults.txt").write_text(f"check it: python check.py\n{faults}")
        return mutants.main([str(folder), *options])

    return run


def test_a_fault_that_the_check_sees_is_killed(package, tmp_path, capsys):
    """One line is a fault; the sources stay as they are."""
    before = hashlib.sha256((tmp_path / "thing/src/thing/__init__.py").read_bytes()).digest()
    assert package("[it]\nminus | add | a + b => a - b\n") == 0
    out = capsys.readouterr().out
    assert "killed   minus: it" in out
    assert "1 of 1 faults killed" in out
    assert hashlib.sha256((tmp_path / "thing/src/thing/__init__.py").read_bytes()).digest() == before


def test_a_fault_that_no_check_sees_survives(package, capsys):
    """Survivors are named, and the run fails."""
    assert package("[it]\nno bound | add | if ... => !drop\nminus | add | a + b => a - b\n") == 1
    assert "SURVIVED no bound" in capsys.readouterr().out


def test_a_check_that_does_not_end_has_noticed(package, capsys, monkeypatch):
    """A loop without an end is killed at the limit, which follows from what the check takes without a fault."""
    monkeypatch.setattr(mutants, "LIMIT_MIN_S", 1.0)
    assert package("[it]\nendless | slow | n -= 1 => pass\n") == 0
    assert "it does not end" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "faults", "message"),
    [
        ("python -c 'import sys; sys.exit(1)'", "[other]\nminus | add | a + b => a - b\n", "fails without a fault"),
        ("python -c 'import sys, thing; sys.exit(2 * (thing.add(1, 2) != 3))'", "[other]\nminus | add | a + b => a - b\n",
         "did not run (exit 2)"),
        ("python check.py", "[other]\ngone | add | a * b => a - b\n", "matches 0 places"),
        ("python check.py", "[other]\nx | add | a + b => 1\nx | add | a + b => 2\n", "two faults are called"),
        ("python check.py", "[other]\nx | add | a + b => 1\nharmless y: because\n", "no generated fault is called"),
    ],
)  # fmt: skip
def test_an_error_is_never_a_kill(package, capsys, command, faults, message):
    """A check that fails by itself or does not run, and a fault that is not planted, fail the run."""
    assert package(f"check other: {command}\n{faults}") == 1
    out = capsys.readouterr().out
    assert message in out
    assert "killed " not in out.replace("0 of 1 faults killed", "") or "gone" in faults or "x |" in faults


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ("minus | add | a + b => a - b\n", "before the first"),
        ("[nothing]\n", "not declared"),
        ("[it]\nminus | add | a + b\n", "want: NAME"),
        ("check b: rm -rf x\n", "does not begin with"),
        ("[it\n", "want: [CHECK"),
        ("[it] needs\n", "want: [CHECK"),
        ("[it] wants os\n", "want: [CHECK"),
        ("[it] needs os.path\n", "whole modules"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(package, capsys, faults, message):
    """By file and line, exit 2."""
    with pytest.raises(SystemExit) as refused:
        package(faults)
    assert refused.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert "thing/faults.txt:" in error


def test_listing_showing_and_checking_run_nothing(package, capsys, monkeypatch):
    """The names, the difference, and whether all can be planted."""
    monkeypatch.setattr(mutants, "_run", None)
    faults = "[it]\nminus | add | a + b => a - b\nno bound | add | if ... => !drop\n"
    assert package(faults, "--list") == package(faults, "--check") == package(faults, "--show", "--only", "minus") == 0
    out = capsys.readouterr().out
    assert "minus  [it]\nno bound  [it]" in out
    assert "2 faults can be planted" in out
    assert "-    return a + b\n+    return a - b" in out
    with pytest.raises(SystemExit):
        package(faults, "--only", "another")


def test_a_fault_whose_check_needs_what_is_not_here_has_no_coverage(package, capsys):
    """It is no survivor and no kill: exit 3, unless there is a survivor too. Where the module is, it is tried."""
    minus, plus = "minus | add | a + b => a - b\n", "no bound | add | if ... => !drop\n"
    assert package(f"[it] needs os\n{minus}") == 0
    assert package(f"[it] needs os no_such_module\n{minus}") == 3
    out = capsys.readouterr().out
    assert "NO COVERAGE minus: needs no_such_module, which is not installed here" in out
    assert "0 of 1 faults killed" in out and "1 faults without coverage here" in out
    assert package(f"[it] needs no_such_module\n{minus}[it]\n{plus}") == 1
    assert package(f"check broken: python -c 1/0\n[broken] needs no_such_module\n{minus}") == 3


def test_a_check_that_only_skips_is_none(package, capsys, tmp_path):
    """Whatever it returns; and of a survivor it is said what was skipped."""
    (tmp_path / "thing" / "test_it.py").write_text(
        "import pytest, thing\n\ndef test_skipped():\n    pytest.skip()\n\ndef test_same():\n    assert thing.add(1, 2) == 3\n"
    )
    checks = "check skips: pytest test_it.py -k skipped\ncheck some: pytest test_it.py\n"
    minus, bound = "minus | add | a + b => a - b\n", "no bound | add | if ... => !drop\n"
    assert package(f"{checks}[skips]\n{minus}") == 3
    assert "NO COVERAGE minus: every test of skips is skipped here" in capsys.readouterr().out
    assert package(f"{checks}[skips some]\n{minus}") == 0
    assert "killed   minus: some" in capsys.readouterr().out
    assert package(f"{checks}[skips some]\n{bound}") == 1
    assert "SURVIVED no bound: tests skipped here: 1 of skips, 1 of some" in capsys.readouterr().out


def test_what_time_did_not_allow_is_said_and_is_no_kill(package, capsys):
    """None tried: no success. A bound that is far: as without."""
    faults = "[it]\nminus | add | a + b => a - b\ntimes | add | a + b => a * b\n"
    assert package(faults, "--seconds", "0") == 1
    out = capsys.readouterr().out
    assert "2 of 2 faults were not tried: the time was over" in out and "no fault was tried" in out
    assert package(faults, "--seconds", "600") == 0
    assert "2 of 2 faults killed" in capsys.readouterr().out


def test_some_may_be_left_when_the_time_is_over(package, capsys, monkeypatch):
    """Those that were tried count."""
    clock = iter(range(1000))
    monkeypatch.setattr(mutants.time, "monotonic", lambda: float(next(clock)))
    faults = "[it]\n" + "".join(f"plus {n} | add | a + b => a + b + {n}\n" for n in range(1, 9))
    assert package(faults, "--seconds", "8", "--jobs", "1") == 0
    out = capsys.readouterr().out
    assert "killed" in out and "of 8 faults were not tried: the time was over" in out


def test_a_word_draws_the_order(package, capsys):
    """The same word the same order, and another word another one; nothing is lost."""
    faults = "[it]\n" + "".join(f"plus {n} | add | a + b => a + b + {n}\n" for n in range(1, 9))

    def order(*options):
        assert package(faults, "--list", *options) == 0
        return capsys.readouterr().out.splitlines()

    plain, monday, again, tuesday = (
        order(*o) for o in ((), ("--shuffle", "a"), ("--shuffle", "a"), ("--shuffle", "b"))
    )
    assert monday == again and monday != tuesday and sorted(monday) == sorted(tuesday) == sorted(plain)
