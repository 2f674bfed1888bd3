"""README's examples, as they stand, in an empty folder: they run, print what they should, and pass strict typing."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import comm_broadcast
from comm_broadcast import CommBroadcastError

README = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
EXAMPLES = re.findall(r"```python( mpi)?\n(.*?)```", README, re.S)
BATCH = [f"1 [({step}, [0, 1, 2, 3])]" for step in range(3)]
PRINTED = [
    ["[({'id': 7, 'prompt': [1, 2, 3]}, [0, 1, 2]), ({'id': 7, 'prompt': [1, 2, 3]}, [0, 1, 2]), "
     "({'id': 7, 'prompt': [1, 2, 3]}, [0, 1, 2])]"],
    ["0 [0, 10]", "1 [0, 10]", *BATCH],
    ["tokens2/Message(body:__main__.Admit | __main__.Cancel,tokens:tokens) 2"],
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_the_examples_run(number, tmp_path):
    """With the launcher where MPI is asked for."""
    mpi, text = EXAMPLES[number]
    script = tmp_path / "example.py"
    script.write_text(text, "utf-8")
    command = [sys.executable, str(script)]
    if mpi:
        pytest.importorskip("mpi4py")
        # A world of its own, not within the world that this test may run in; a rank's lines in one write, or they are glued.
        command = [str(Path(sys.executable).with_name("mpiexec")), "-n", "2", *command]
    environment = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("PMI", "HYD", "MPI", "OMPI", "PRTE", "PYTHONUNBUFFERED"))
    }
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(PRINTED[number])
    assert [path.name for path in tmp_path.iterdir()] == ["example.py"]


WRONG = """
import comm_broadcast
from comm_broadcast import Brodcaster
from comm_broadcast.testing import FakeWorld

comm_broadcast.Broadcaster("comm")
comm_broadcast.BroadcastConfig(ahead="1")
comm_broadcast.no_such_name
"""


@pytest.mark.slow
def test_the_examples_pass_strict_typing(tmp_path):
    """And what is wrong does not: a name that is not there, an argument of another type."""
    pytest.importorskip("mypy")
    for number, (_, text) in enumerate(EXAMPLES):
        (tmp_path / f"example_{number}.py").write_text(text, "utf-8")
    (tmp_path / "wrong.py").write_text(WRONG, "utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"),
         *sorted(p.name for p in tmp_path.glob("*.py"))],
        capture_output=True, text=True, timeout=170, cwd=tmp_path,
    )  # fmt: skip
    lines = re.findall(r"(?m)^(\w+)\.py:(\d+): error", done.stdout)
    assert sorted(set(lines)) == [("wrong", n) for n in ("3", "6", "7", "8")], done.stdout


def test_every_error_is_in_the_table():
    """README's table names each public error."""
    text = README.split("## Errors")[1]
    names = [n for n, v in vars(comm_broadcast).items() if isinstance(v, type) and issubclass(v, CommBroadcastError)]
    assert [name for name in names if f"`{name}" not in text and name != "CommBroadcastError"] == []
