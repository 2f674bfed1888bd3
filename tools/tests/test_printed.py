"""The READMEs' commands: each has somebody who runs it as printed, by day or by night, and what does not end well is named."""

import datetime
import importlib.util
import subprocess
from pathlib import Path
from types import SimpleNamespace

import nox
import pytest

import nightly
import printed

DAY = datetime.date(2026, 12, 1)
ROOT = printed.ROOT
ALL = printed.printed_in(printed.READMES)
PARTS = {part.name: part.command for part in nightly.parts(DAY, all_faults=False)}


@pytest.fixture(scope="session")
def handed_over():
    """What a session hands over: its name and the words behind ``--`` to the tool and its arguments.

    Once in a process, which may run this file's tests in several goes: nox warns of a session that is registered again.
    """
    spec = importlib.util.spec_from_file_location("noxfile_of_the_test", ROOT / "noxfile.py")
    noxfile = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(noxfile)
    told = []
    noxfile.shared_environment = noxfile.bring_etcd = lambda session: None
    noxfile.python = noxfile.hand_over = lambda session, *arguments, **_: told.append(arguments)
    sessions = nox.registry.get()

    def run(name, *behind):
        told.clear()
        sessions[name].func(SimpleNamespace(posargs=list(behind), error=pytest.fail))
        return told

    return run


@pytest.mark.parametrize("one", ALL, ids=str)
def test_every_command_has_somebody_who_runs_it(one, handed_over):
    """Here, by a test, by a part of the night that runs the same program in the same way, or by every change's run."""
    who = printed.run_by(one)
    if who == "here":
        assert PARTS["READMEs"][0] == "tools/printed.py"
    elif who.startswith(("integration/", ".ci/")):
        text = (ROOT / who).read_text("utf-8")
        assert one.command in text if who.startswith(".ci/") else f'"{one.program}"' in text
    elif one.session is not None:
        behind = one.words[one.words.index("--") + 1 :]
        ((tool, *arguments),) = handed_over(one.session, *behind)
        assert PARTS[who][0] == tool and arguments == behind
        turns = {nightly.whose_turn(DAY + datetime.timedelta(n), nightly.packages()) for n in range(8)}
        assert set(behind) <= turns
    else:
        script, *arguments = one.words[1:]
        assert PARTS[who][0] == f"packages/{one.document.parent.name}/{script}"
        assert not arguments or PARTS[who][1:] == tuple(arguments), "the night runs it otherwise than it is printed"


def test_benchmarks_come_round():
    """One each day, each within as many days as there are, and everything else every day."""
    here = [one for one in ALL if printed.run_by(one) == "here"]
    figures = {one.command for one in here if one.is_figure}
    others = [one for one in here if not one.is_figure]
    seen = set()
    for number in range(len(figures)):
        chosen = printed.of_the_day(here, DAY + datetime.timedelta(number))
        assert chosen[:-1] == others and chosen[-1].is_figure
        seen.add(chosen[-1].command)
    assert seen == figures and len(figures) > 5


def test_commands_are_lines_of_shell_and_spans_that_begin_with_a_program(tmp_path):
    """Each once; comments belong to no command, and what stands in other blocks is none."""
    page = tmp_path / "README.md"
    page.write_text(
        "Run `nox -s demo -- now` or `pip\ninstall x`, not `noxious -s x`.\n\n```sh\n# a note\npython3 tools/a.py  # why\n"
        "python3 tools/a.py  # why\n```\n\n```python\nx = `pip install no`\n```\n"
    )
    found = printed.printed_in([page])
    assert [one.command for one in found] == ["python3 tools/a.py  # why", "nox -s demo -- now", "pip install x"]
    assert [one.session for one in found] == [None, "demo", None]
    assert found[0].words == ["python3", "tools/a.py"]


def test_a_clone_is_the_tree_as_it_is(tmp_path, monkeypatch):
    """With what was changed, added and removed since the last commit, staged or not; what git ignores stays away, and nothing
    stays."""
    tree = tmp_path / "tree"
    tree.mkdir()
    once = dict.fromkeys(("kept", "changed", "removed", "staged", "moved"), "1")
    for name, text in (*once.items(), (".gitignore", "ignored\n")):
        (tree / name).write_text(text)
    git = ["git", "-C", str(tree), "-c", "user.name=a", "-c", "user.email=a@b.example"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    (tree / "changed").write_text("2")
    (tree / "removed").unlink()
    (tree / "folder").mkdir()
    (tree / "folder" / "added").write_text("3")
    (tree / "ignored").write_text("4")
    (tree / "staged").write_text("5")
    (tree / "staged-new").write_text("6")
    for command in (["mv", "moved", "moved-there"], ["add", "staged", "staged-new"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setattr(printed, "ROOT", tree)
    with printed.fresh_clone() as clone:
        files = {
            p.relative_to(clone).as_posix(): p.read_text()
            for p in clone.rglob("*")
            if p.is_file() and ".git/" not in str(p)
        }
        assert files == {
            "kept": "1", "changed": "2", "folder/added": "3", "staged": "5", "staged-new": "6", "moved-there": "1",
            ".gitignore": "ignored\n",
        }  # fmt: skip
    assert not clone.parent.exists()


def test_what_does_not_end_as_it_should_is_named(tmp_path, capsys):
    """A command that fails, one that was to fail and does not, and one that does not end: its children end with it."""
    reader, hasty = printed.Reader(tmp_path), printed.Reader(tmp_path, limit_s=2.0)
    assert reader.run("echo fine", []) and reader.run("exit 3", [], fails=True)
    assert not reader.run("echo broken; exit 3", [])
    assert not reader.run("true", [], fails=True)
    assert not hasty.run("echo $$ > pid; sleep 600", [])
    assert reader.failed == ["echo broken; exit 3", "true"] and reader.passed == 2
    assert hasty.failed == ["echo $$ > pid; sleep 600"] and hasty.passed == 0
    said = capsys.readouterr().out
    assert "FAILED: exit 3" in said and "broken" in said and "not ended after 2 s" in said
    pid = (tmp_path / "pid").read_text().strip()
    assert not Path(f"/proc/{pid}").exists()


def test_nothing_to_run_is_no_success():
    """A text that is in no command is an error before anything is cloned."""
    with pytest.raises(SystemExit) as left:
        printed.main(["--only", "in no command at all"])
    assert left.value.code == 2
    assert printed.run_all([]) == 1
