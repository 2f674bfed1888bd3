"""Ended means ended: whatever happens to whoever asked for a command, nothing of it stays alive.

What must end would sleep for five minutes; the deadline is one. How long it took is printed (``-s``), not asserted."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lifeline import Tethered
from stage_project import make_project, table_of
from worlds import launcher

TOOLS = Path(__file__).resolve().parents[1]


def alive(token):
    """Processes whose command line or environment holds the token."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if token.encode() in text and state not in "ZX" and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


def wait_until(condition, limit_s=110.0):
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def gone(token):
    """Wait for the last of them, far less long than they would live; prints how long it took."""
    began_s = time.monotonic()
    wait_until(lambda: not alive(token), 60.0)
    print(f"gone after {time.monotonic() - began_s:.2f} s")
    return True


@pytest.fixture
def token():
    """A word that only this test's processes carry."""
    return f"lifeline-token-{os.getpid()}-{time.monotonic_ns()}"


#: Forks twice into sessions of its own, as a daemon does, and a plain child beside it.
DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        time.sleep(300)
    os._exit(0)
if os.fork() == 0:
    time.sleep(300)
print("ready", flush=True)
{end}
"""


@pytest.mark.parametrize(
    ("end", "code"), [("time.sleep(300)", 137), ("sys.exit(4)", 4), ("os.kill(os.getpid(), 15)", 143)]
)
def test_daemons_and_sessions_are_found(token, end, code):
    """Cut, ended or killed: what it started goes with it; the exit code is its own."""
    tethered = Tethered(
        [sys.executable, "-c", DAEMON.format(end=end)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TOKEN": token},
    )
    assert tethered.process.stdout.readline() == "ready\n"
    if code == 137:
        wait_until(lambda: len(alive(token)) >= 4)
        tethered.cut()
    assert tethered.process.wait(60) == code
    assert alive(token) == []
    tethered.cut()
    tethered.process.stdout.close()


def test_a_program_that_is_not_there_is_said(capfd):
    """Exit 127 with its name."""
    tethered = Tethered(["no-such-program-anywhere"])
    assert tethered.process.wait(60) == 127
    tethered.cut()
    assert "no-such-program-anywhere: No such file" in capfd.readouterr().err


SLEEPING = """import pytest
import pathlib
import time


@pytest.mark.mpi(2)
def test_ranks(world_comm):
    pathlib.Path({folder!r}, f"rank{{world_comm.rank}}").touch()
    time.sleep(300)
"""


@pytest.fixture
def world_project(tmp_path):
    """A project whose one test is a world of two ranks that never ends; started with this repository's conftest."""
    pytest.importorskip("mpi4py", reason="NO COVERAGE: mpi4py is not installed")
    try:
        launcher.find_launcher()
    except launcher.LauncherError as error:
        pytest.skip(f"NO COVERAGE: {error}")
    make_project(tmp_path)
    root = TOOLS.parent
    (tmp_path / "conftest.py").write_text(
        f"import sys\nsys.path.insert(0, {str(TOOLS)!r})\n"
        + (root / "conftest.py").read_text().replace("from __future__ import annotations\n", "")
    )
    (tmp_path / "lists" / "stages.yml").write_text(table_of("name: CPU-Generic, hardware: cpu, list: l0_cpu.yml"))
    (tmp_path / "lists" / "l0_cpu.yml").write_text("version: 0.0.1\nl0_cpu:\n- tests: [t/test_world.py TIMEOUT (1)]\n")
    (tmp_path / "t" / "test_world.py").write_text(SLEEPING.format(folder=str(tmp_path / "results")))
    return tmp_path


def alone(token):
    """The environment of a pytest that loads no plugin which it was not asked for."""
    return {**os.environ, "TOKEN": token, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def ranks_run(project):
    return len(list((project / "results").glob("rank*"))) == 2


@pytest.mark.service
@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", ["interrupt", "terminate", "kill", "kill-guard-too"])
def test_no_world_outlives_the_runner(world_project, token, how):
    """Ctrl-C, SIGTERM or kill -9 of the stage runner: every rank, proxy and launcher is gone."""
    process = subprocess.Popen(
        [sys.executable, str(TOOLS / "stages"), "--root", str(world_project), "--lists", str(world_project / "lists"),
         "--results", str(world_project / "results"), "--workers", "1", "--kind", "cpu"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "TOKEN": token}, start_new_session=True,
    )  # fmt: skip
    wait_until(lambda: ranks_run(world_project))
    assert len(alive(token)) >= 6
    if how == "kill-guard-too":
        guard = min(pid for pid in alive(token) if pid != process.pid)
        os.kill(guard, signal.SIGKILL)
    process.send_signal({"interrupt": signal.SIGINT, "terminate": signal.SIGTERM}.get(how, signal.SIGKILL))
    assert gone(token)
    process.wait(60)


@pytest.mark.service
@pytest.mark.timeout(240)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_world_outlives_its_pytest(world_project, token, number):
    """The same without the runner: a pytest that is interrupted or killed takes its world along."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "t/test_world.py"], cwd=world_project, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, env=alone(token), start_new_session=True,
    )  # fmt: skip
    wait_until(lambda: ranks_run(world_project))
    process.send_signal(number)
    assert gone(token)
    process.wait(60)


@pytest.mark.service
@pytest.mark.timeout(240)
def test_no_world_outlives_its_time(world_project, token):
    """A test's own time-out ends its world, too. Where the ranks need longer to start, a second limit."""
    for limit_s in (6, 40):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "timeout", "--timeout", str(limit_s), "--timeout-method",
             "thread", "t/test_world.py"],
            cwd=world_project, capture_output=True, text=True, timeout=200,
            env=alone(token),
        )  # fmt: skip
        assert done.returncode != 0
        assert gone(token)
        if ranks_run(world_project):
            return
    pytest.fail("the ranks never ran")
