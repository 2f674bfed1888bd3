"""The night's run: nothing is left out unsaid, nothing that did not run is green, and the turns come round."""

import ast
import datetime
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import nightly

DAY = datetime.date(2026, 12, 1)
ROOT = nightly.ROOT


def test_every_program_of_a_package_has_its_place():
    """A script that somebody adds to packages/NAME/tools is run at night, or this says that it is not."""
    programs = set()
    for path in ROOT.glob("packages/*/tools/*.py"):
        tests = [node.test for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.If)]
        if any(ast.unparse(test) == "__name__ == '__main__'" for test in tests):
            programs.add(f"{path.parents[1].name}/{path.stem}")
    assert programs == set(nightly.CHECKS)


@pytest.mark.parametrize("name", sorted(nightly.CHECKS))
def test_every_program_takes_what_it_is_given(name):
    """Its parser knows each option: a part that ends with exit 2 would have checked nothing."""
    package, _, script = name.partition("/")
    text = (ROOT / "packages" / package / "tools" / f"{script}.py").read_text("utf-8")
    for word in nightly.CHECKS[name]:
        if word.startswith("--"):
            assert f'"{word}"' in text, f"{script}.py knows no {word}"


def test_each_package_has_its_turn_and_the_turns_come_round():
    """As many days as packages: each once."""
    names = nightly.packages()
    assert len(names) == 8
    turns = [nightly.whose_turn(DAY + datetime.timedelta(n), names) for n in range(2 * len(names))]
    assert sorted(turns[: len(names)]) == names
    assert turns[: len(names)] == turns[len(names) :]


def test_a_day_says_which_faults_and_in_which_order():
    """The same day is the same run; all faults are everybody's, without a bound."""

    def planted(day, **more):
        return next(p.command for p in nightly.parts(day, **more) if p.name == "planted faults")

    assert planted(DAY, all_faults=False) == planted(DAY, all_faults=False)
    one, other = (planted(DAY + datetime.timedelta(n), all_faults=False) for n in (0, 1))
    assert one[1] != other[1] and one[-1] != other[-1]
    assert planted(DAY, all_faults=True) == ("tools/mutants.py",)


def program(folder, name, text, **more):
    path = folder / f"{name}.py"
    path.write_text(text)
    return nightly.Part(name, (str(path),), **more)


@pytest.fixture
def night(tmp_path, monkeypatch):
    """Runs a night of these programs: name → text."""

    def run(*arguments, limit_s=60.0, beside=False, **texts):
        found = [program(tmp_path, name, text, limit_s=limit_s, beside=beside) for name, text in texts.items()]
        monkeypatch.setattr(nightly, "parts", lambda _day, *, all_faults: found)
        return nightly.main([*arguments])

    return run


@pytest.mark.parametrize("beside", [False, True])
def test_a_part_that_fails_is_named_and_keeps_none_from_running(night, capfd, beside):
    """Exit 1 at the end, after the others."""
    assert night(beside=beside, bad="raise SystemExit(3)", good="print('good has run')") == 1
    said = capfd.readouterr().out
    assert "good has run" in said and "bad.py  FAILED: exit 3" in said and "all: 1 passed, 1 failed, 0 not run" in said


def test_a_part_that_does_not_end_is_ended_with_what_it_started(night, capfd, tmp_path):
    """Its process is gone, too."""
    child = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    assert night(limit_s=3.0, hung=f"{child}open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid))\np.wait()") == 1
    assert "FAILED: not ended after 3 s" in capfd.readouterr().out
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()


def test_what_is_asked_for_runs_alone_and_nothing_is_no_success(night, capfd):
    """A name that fits no part is an error before anything runs."""
    assert night("--only", "oo", bad="raise SystemExit(3)", good="") == 0
    assert "1 passed, 0 failed" in capfd.readouterr().out
    with pytest.raises(SystemExit) as left:
        night("--only", "nothing", good="")
    assert left.value.code == 2
    assert nightly.report([], [], 0.0) == 1


def test_the_nights_time_is_not_the_sum_of_its_parts(capsys):
    """Some of them ran beside each other."""
    part = nightly.Part("a", ("a.py",))
    assert nightly.report([nightly.Ended(part, 60.0, "")] * 2, [], 66.0) == 0
    assert "   1.1 min  all: 2 passed, 0 failed, 0 not run" in capsys.readouterr().out


def test_two_parts_that_may_run_beside_each_other_do(night, capfd, tmp_path):
    """Each waits for the other's file: one after the other would never end. What they print is not mixed."""
    text = (
        "import pathlib, time\nhere = pathlib.Path(__file__)\nprint('one of', here.stem, flush=True)\n"
        "here.with_suffix('.begun').touch()\n"
        "while len(list(here.parent.glob('*.begun'))) < 2: time.sleep(0.01)\n"
        "print('two of', here.stem)\n"
    )
    assert night(beside=True, left=text, right=text) == 0
    said = capfd.readouterr().out
    assert "one of left\ntwo of left\n" in said and "one of right\ntwo of right\n" in said


@pytest.mark.parametrize("beside", [False, True])
def test_an_interrupted_night_says_what_is_known(tmp_path, beside):
    """Ctrl-C: the part that was running and those behind it were not run, and the night is not green."""
    script = tmp_path / "night.py"
    script.write_text(
        "import nightly\n"
        f"parts = [nightly.Part(n, ({str(tmp_path)!r} + f'/{{n}}.py',), beside={beside} and n != 'first') "
        "for n in ('first', 'second', 'third')]\n"
        "nightly.parts = lambda day, *, all_faults: parts\n"
        "raise SystemExit(nightly.main([]))\n"
    )
    (tmp_path / "first.py").write_text("")
    for name in ("second", "third"):
        (tmp_path / f"{name}.py").write_text("import time\ntime.sleep(600)\n")
    process = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tools")},
    )  # fmt: skip
    for line in process.stdout:
        if line.startswith("== second"):
            break
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "all: 1 passed, 0 failed, 2 not run" in said
