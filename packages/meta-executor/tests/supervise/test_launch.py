"""The launcher over real mpiexec worlds of small fake ranks: starting, naming deaths, restarting, draining, cleaning up."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
import msgspec
import pytest

from meta_executor.config import service_config
from meta_executor.supervise import launch
from meta_executor.supervise.launch import Death, Launcher, RunFailed, _first_cause
from meta_executor.supervise.procfs import ProcessIdentity
from meta_executor.supervise.report import Reporter
from meta_executor.supervise.rundir import RunDirectory, remove_stale_runs

FAKE = str(Path(__file__).with_name("fake_rank.py"))


@pytest.fixture
def tmp_path():
    """A short folder: socket paths have 107 bytes, pytest's own folders use most of them."""
    folder = Path(tempfile.mkdtemp(prefix="mx"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def service(tmp_path):
    return service_config(
        {
            "port": 0,
            "run_dir": str(tmp_path / "r"),
            "drain_timeout_s": 20.0,
            "start_timeout_s": 60.0,
            "context_servers": {"pipeline_parallel_size": 2},
            "generation_servers": {"tensor_parallel_size": 2, "enable_attention_dp": True},
        }
    )


@pytest.fixture(autouse=True)
def survivors_know_nothing(monkeypatch):
    """Fake ranks write no evidence when another one dies: nothing is waited for."""
    monkeypatch.setattr(launch, "_SURVIVOR_GRACE_S", 0.1)


def make(service, **more):
    lines = []
    launcher = Launcher(service, say=lines.append, worker=(FAKE,), front=(FAKE,), **more)
    return launcher, lines


def all_gone(pids):
    return [name for name, identity in pids.items() if identity is not None and identity.alive()]


def identities(launcher):
    return {name: ProcessIdentity.of(pid) for name, pid in launcher.processes().items() if name != "launcher"}


def run_until(launcher, predicate, limit_s=30.0):
    end = time.monotonic() + limit_s
    while not predicate():
        assert time.monotonic() < end, "did not happen in time"
        launcher.turn(0.1)


@pytest.mark.service(seconds=30)  # of all here
def test_start_and_drain_leave_nothing_behind(service, tmp_path):
    """A clean life: every component says once that it is ready, everything ends by itself, every file is gone."""
    launcher, lines = make(service)
    with launcher.started():
        assert set(launcher.urls()) == {"ctx-0", "gen-0"}
        pids = identities(launcher)
        assert len([n for n in pids if "rank" in n]) == 4
        run = launcher._directory.path
        modes = {path: path.lstat().st_mode & 0o777 for path in (run, *run.rglob("*")) if not path.is_socket()}
        assert {path: mode for path, mode in modes.items() if mode != (0o700 if path.is_dir() else 0o600)} == {}
        assert run / "logs" / "ctx-0.log" in modes
    assert all_gone(pids) == []
    assert not (tmp_path / "r").exists()
    assert sum("ready at" in line for line in lines) == 3
    assert next(line for line in lines if line.endswith("drained")) == "front: drained"


@pytest.mark.service
@pytest.mark.parametrize(
    "victim",
    [
        *("ctx-0/rank1", "gen-0/mpiexec", "front"),
        # The integration's tests kill these two by day, with real ranks.
        *(pytest.param(v, marks=pytest.mark.slow) for v in ("gen-0/rank0", "ctx-0/hydra0")),
    ],
)
def test_a_killed_process_is_named_and_ends_the_run(service, victim):
    """Kill -9 of each kind of process: the run fails, the right one is named, nothing is left running."""
    launcher, lines = make(service)
    with pytest.raises(RunFailed) as failure, launcher.started():
        pids = identities(launcher)
        target = pids[victim]
        assert target.kill()
        launcher.wait()
    owner, _, name = victim.partition("/")
    assert owner in str(failure.value), lines
    assert str(target.pid) in str(failure.value), lines
    if name.startswith("rank"):
        assert f"rank {name[4:]}" in str(failure.value)
        assert "SIGKILL" in str(failure.value)
    assert all_gone(pids) == []


@pytest.mark.service
@pytest.mark.parametrize("stays", ["until it is told", "deaf"])
def test_a_front_whose_answers_do_not_end_is_told_to_cut_them_before_it_is_killed(service, monkeypatch, stays):
    """After a death: a drain first, then the signal at which a front tells its clients, and only then SIGKILL."""
    monkeypatch.setenv("FAKE_STAYS", stays)
    monkeypatch.setattr(launch, "_FRONT_GRACE_S", 0.3)
    monkeypatch.setattr(launch, "_FRONT_CUT_S", 0.3 if stays == "deaf" else 60.0)
    launcher, _ = make(service)
    with pytest.raises(RunFailed, match="ctx-0 rank 1"), launcher.started():
        pids = identities(launcher)
        front = launcher._components["front"].process
        log = launcher._directory.path / "logs" / "front.log"
        assert pids["ctx-0/rank1"].kill()
        launcher.wait()
    assert log.read_text() == "told to cut\n"
    assert front.returncode == (-signal.SIGKILL if stays == "deaf" else 0)
    assert all_gone(pids) == []


@pytest.mark.service
def test_a_dead_instance_comes_back_at_its_address_under_a_new_identity(service):
    """With restart=instance only the instance that lost a rank is started again, at the same port."""
    launcher, _ = make(service, restart="instance")
    with launcher.started():
        before, urls = identities(launcher), launcher.urls()
        old_id = launcher._components["ctx-0"].instance_id
        assert before["ctx-0/rank0"].kill()
        run_until(launcher, lambda: launcher.restarts == 1 and launcher._components["ctx-0"].ready)
        assert launcher.urls() == urls
        assert launcher._components["ctx-0"].instance_id != old_id
        after = identities(launcher)
        assert after["gen-0/rank0"] == before["gen-0/rank0"]
        assert after["front"] == before["front"]
        assert after["ctx-0/rank0"] != before["ctx-0/rank0"]
        # What the ended start had still to say arrives late: it is nobody's death.
        late = Reporter(launcher._directory.path, "ctx-0", 0, old_id)
        assert late.send("orphaned", what="hydra_pmi_proxy", gone_pid=1)
        assert late.send("exited", rank_pid=1, status=9, text="signal SIGKILL")
        late.close()
        assert launcher._collect(1.0) == []
        assert identities(launcher) == after
    assert all_gone({**{f"old {k}": v for k, v in before.items()}, **after}) == []


@pytest.mark.service
def test_nobody_else_is_given_the_port_of_an_instance_that_is_away(service):
    """The front was told of it: taken by a stranger meanwhile, it would keep the instance from ever starting again."""
    launcher, _ = make(service, restart="instance")
    with launcher.started():
        port = int(launcher.urls()["ctx-0"].rpartition(":")[2])
        victim = identities(launcher)["ctx-0/rank0"]
        assert victim.kill()
        end = time.monotonic() + 30.0
        while victim.alive():
            assert time.monotonic() < end, "it was killed"
            time.sleep(0.01)
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))
        run_until(launcher, lambda: launcher.restarts == 1 and launcher._components["ctx-0"].ready)
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind(("127.0.0.1", port))


@pytest.mark.service
def test_a_death_while_an_instance_starts_again_is_one_more_try(service, monkeypatch):
    """Its second start dies, its third one serves: at the same address, and the others never noticed."""
    launcher, _ = make(service, restart="instance")
    with launcher.started():
        before, urls = identities(launcher), launcher.urls()
        monkeypatch.setenv("FAKE_EXIT", "ctx-0/0")
        assert before["ctx-0/rank1"].kill()
        run_until(launcher, lambda: launcher.restarts == 2)
        monkeypatch.delenv("FAKE_EXIT")
        run_until(launcher, lambda: launcher._components["ctx-0"].ready)
        assert launcher.urls() == urls and launcher.restarts in (2, 3)
        assert identities(launcher)["gen-0/rank0"] == before["gen-0/rank0"]


@pytest.mark.service
def test_starts_that_fail_in_a_row_end_the_run(service, monkeypatch):
    """A bounded number of them; the line that is quoted is the last start's own."""
    launcher, _ = make(service, restart="instance")
    with (
        pytest.raises(RunFailed, match=r"ctx-0 rank 0 .*in 3 starts in a row.*dies while it starts"),
        launcher.started(),
    ):
        monkeypatch.setenv("FAKE_EXIT", "ctx-0/0")
        assert identities(launcher)["ctx-0/rank1"].kill()
        run_until(launcher, lambda: launcher.restarts > 3)
    assert launcher.restarts == 3


@pytest.mark.service
def test_a_hint_quotes_nothing_of_an_earlier_start(service):
    """What an earlier lifetime said last explains nothing of this one's end."""
    launcher, _ = make(service, restart="instance")
    with launcher.started():
        component = launcher._components["ctx-0"]
        with (launcher._directory.path / "logs" / "ctx-0.log").open("a") as log:
            log.write("the first start's last words\n")
        assert "first start's last words" in launcher._log_hint(component)
        assert identities(launcher)["ctx-0/rank1"].kill()
        run_until(launcher, lambda: launcher.restarts == 1 and launcher._components["ctx-0"].ready)
        assert launcher._log_hint(launcher._components["ctx-0"]) == ""


@pytest.mark.service
def test_two_instances_that_die_at_once_both_come_back(service):
    """What is learnt of one while the other's end is acted on is not lost."""
    launcher, _ = make(service, restart="instance")
    with launcher.started():
        before = identities(launcher)
        assert before["ctx-0/rank0"].kill() and before["gen-0/rank1"].kill()
        run_until(launcher, lambda: launcher.restarts == 2 and all(c.ready for c in launcher._components.values()))
        after = identities(launcher)
        for name in before:
            assert (after[name] == before[name]) is (name == "front"), name
        assert {death.owner_id for death in launcher.deaths} == {"ctx-0", "gen-0"}


@pytest.mark.service
def test_a_start_again_that_hangs_is_ended_like_a_death(service, monkeypatch):
    """Nobody waits for ever for an instance that was started again."""
    launcher, _ = make(service, restart="instance")
    with launcher.started():
        launcher._service = msgspec.structs.replace(service, start_timeout_s=2.0)
        monkeypatch.setenv("FAKE_HANGS", "ctx-0")
        assert identities(launcher)["ctx-0/rank0"].kill()
        run_until(launcher, lambda: launcher.restarts == 2)
        monkeypatch.delenv("FAKE_HANGS")
        run_until(launcher, lambda: launcher._components["ctx-0"].ready)
        assert any("not ready within 2 s" in str(death) for death in launcher.deaths)


@pytest.mark.service
def test_a_drain_while_an_instance_starts_again_does_not_wait_for_it(service, monkeypatch):
    """It has nothing to drain: it is ended at once, and said; the drain was not clean, the others drained."""
    launcher, lines = make(service, restart="instance")
    with pytest.raises(RunFailed, match="not clean"), launcher.started():
        monkeypatch.setenv("FAKE_HANGS", "ctx-0")
        assert identities(launcher)["ctx-0/rank0"].kill()
        run_until(launcher, lambda: launcher.restarts == 1)
        pids = identities(launcher)
    assert "ctx-0: ended while it was starting" in lines and "gen-0: drained" in lines
    assert all_gone(pids) == []


@pytest.mark.service
def test_an_orphan_that_names_who_adopted_it_has_nobody_ended(service):
    """A guard whose world ended under it may read its adopter (init, a session's manager, a tool) as its parent."""
    launcher, _ = make(service)
    with (
        pytest.raises(RunFailed, match="not clean"),
        launcher.started(),
        subprocess.Popen(["sleep", "60"]) as stranger,
    ):
        component = launcher._components["ctx-0"]
        guard = component.members[0].guard
        true_proxy = component.members[1].proxy
        assert true_proxy is not None and true_proxy.alive()
        orphan = Reporter(launcher._directory.path, "ctx-0", 0, component.instance_id)
        rank = component.members[0].rank
        for adopter in (stranger.pid, os.getpid()):
            assert orphan.send(
                "started",
                rank_pid=rank.pid,
                rank_start_ticks=rank.start_ticks,
                guard_start_ticks=guard.start_ticks,
                parent_pid=adopter,
            )
            launcher._collect(1.0)
            assert component.members[0].proxy is None
        orphan.close()
        launcher._kill(component)
        assert stranger.poll() is None and not true_proxy.alive()
        stranger.kill()


@pytest.mark.service
def test_who_has_not_reported_yet_is_ended_too(service):
    """Guards and ranks that the launcher has not heard of are gone when the instance has been ended, not some time later."""
    launcher, _ = make(service)
    with pytest.raises(RunFailed, match="not clean"), launcher.started():
        component = launcher._components["ctx-0"]
        pids = {name: identity for name, identity in identities(launcher).items() if name.startswith("ctx-0")}
        component.members.clear()
        launcher._kill(component)
        assert len(pids) > 4 and all_gone(pids) == []


def test_a_guard_that_was_orphaned_before_it_began_starts_nothing(tmp_path):
    """Its launcher lives, but its parent hangs below somebody else: the rank is never started."""
    run = RunDirectory.create(tmp_path, "orphan")
    left = tmp_path / "started"
    with subprocess.Popen(["sleep", "60"]) as launcher:
        guard = [sys.executable, "-m", "meta_executor.supervise.guard", "--run-dir", str(run.path), "--owner", "ctx-0"]
        rank = [sys.executable, "-c", f"open({str(left)!r}, 'w')"]
        environment = {**os.environ, "PMI_RANK": "0"}
        ended = subprocess.run([*guard, "--launcher-pid", str(launcher.pid), "--", *rank], env=environment, check=False)
        assert ended.returncode == 128 + signal.SIGKILL and not left.exists()
        mine = subprocess.run([*guard, "--launcher-pid", str(os.getpid()), "--", *rank], env=environment, check=False)
        assert mine.returncode == 0 and left.exists()
        launcher.kill()


@pytest.mark.service
def test_a_rank_that_dies_while_starting_fails_the_start(service, monkeypatch):
    """Exit 3 of one rank during the start is that rank's death, with its status."""
    monkeypatch.setenv("FAKE_EXIT", "ctx-0/1")
    launcher, _ = make(service)
    with pytest.raises(RunFailed, match=r"ctx-0 rank 1 .*exit 3"), launcher.started():
        launcher.wait()


@pytest.mark.service
def test_a_killed_launcher_leaves_no_process_and_its_files_go_at_the_next_start(service, tmp_path):
    """Kill -9 of the launcher: everything ends by itself; the next start removes the run's folder."""
    script = tmp_path / "up.py"
    script.write_text(
        "import sys, msgspec, json\n"
        "from meta_executor.config import ServiceConfig\n"
        "from meta_executor.supervise.launch import Launcher\n"
        f"service = msgspec.json.decode({msgspec.json.encode(service)!r}, type=ServiceConfig)\n"
        f"launcher = Launcher(service, say=lambda line: None, worker=({FAKE!r},), front=({FAKE!r},))\n"
        "with launcher.started():\n"
        "    print(json.dumps(launcher.processes()), flush=True)\n"
        "    launcher.wait()\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as process:
        pids = {n: ProcessIdentity.of(p) for n, p in msgspec.json.decode(process.stdout.readline()).items()}
        process.kill()
    end = time.monotonic() + 20
    while all_gone(pids):
        assert time.monotonic() < end, all_gone(pids)
        time.sleep(0.02)
    base = tmp_path / "r"
    assert len(list(base.glob("run-*"))) == 1
    assert len(remove_stale_runs(base)) == 1
    assert not list(base.glob("run-*"))


@pytest.mark.service
def test_sigterm_drains_once(service):
    """A signal to the launcher is a drain, said in one line."""
    launcher, lines = make(service)
    with launcher.started():
        os.kill(os.getpid(), signal.SIGTERM)
        launcher.wait()
    assert any("draining" in line for line in lines)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_live_run_is_never_removed(tmp_path):
    """The lock tells a live run from a dead one."""
    live = RunDirectory.create(tmp_path, "live")
    assert remove_stale_runs(tmp_path) == ()
    live.keep_logs()
    assert remove_stale_runs(tmp_path) == (live.path,)


def test_key_is_private(tmp_path):
    """The run's key is readable by its owner only, and so is the folder."""
    run = RunDirectory.create(tmp_path / "base", "k")
    assert (run.path / "key").stat().st_mode & 0o777 == 0o600
    assert run.path.stat().st_mode & 0o777 == 0o700
    run.remove()
    assert not run.path.exists()


def death(rank, what, text):
    return Death("ctx-0", rank, what, 1, text)


@pytest.mark.parametrize(
    ("suspects", "index"),
    [
        ([death(1, "rank", "signal SIGKILL"), death(0, "rank", "signal SIGKILL")], 0),
        ([death(1, "rank", "signal SIGKILL"), death(None, "mpiexec", "signal SIGKILL")], 1),
        ([death(1, "rank", "signal SIGKILL"), death(None, "hydra_pmi_proxy", "gone")], 1),
        ([death(None, "mpiexec", "exit 9"), death(2, "rank", "exit 1")], 1),
    ],
)
def test_the_cause_is_chosen_among_what_came_together(suspects, index):
    """A killed launcher of the world explains its ranks; a dead rank explains the launcher's exit."""
    assert _first_cause(suspects) is suspects[index]


# -- every command in every state ---------------------------------------------------------------------------------------

#: What an operator or the system does, and what comes of it by state: how the run ends ("clean", or words of its failure),
#: and how often an instance was started again. The table of docs/design.md is this one.
COMMANDS = {
    "starting": {
        "a signal": ("interrupted while starting", 0),
        "two signals": ("interrupted while starting", 0),
        "a rank dies": ("interrupted while starting", 1),
        "an instance is drained": ("interrupted while starting", 1),
    },
    "running": {
        "a signal": ("clean", 0),
        "two signals": ("the drain was not clean", 0),
        "a rank dies": ("clean", 1),
        "an instance is drained": ("clean", 1),
    },
    "starting again": {
        "a signal": ("the drain was not clean", 1),
        "two signals": ("the drain was not clean", 1),
        "a rank dies": ("the drain was not clean", 2),
        "an instance is drained": ("the drain was not clean", 2),
    },
    "draining": {
        "a signal": ("clean", 0),
        "two signals": ("the drain was not clean", 0),
        "a rank dies": ("the drain was not clean", 0),
        "an instance is drained": ("clean", 0),
    },
}


@pytest.fixture
def late_signals_are_nothing():
    """A second signal may come when the launcher has ended and given its handlers back: it must not end the tests."""
    before = {number: signal.signal(number, lambda _number, _frame: None) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def perform(launcher, command):
    """On the generation instance, or on the launcher itself."""
    if command.endswith("signal"):
        os.kill(os.getpid(), signal.SIGTERM)
    elif command.endswith("signals"):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)  # two signals that wait together are one
        os.kill(os.getpid(), signal.SIGINT)
    elif command == "a rank dies":
        assert identities(launcher)["gen-0/rank1"].kill()
    else:
        url = launcher.urls()["gen-0"]
        assert httpx.post(f"{url}/internal/drain", headers=launcher.key_header, trust_env=False).status_code == 202


def done(launcher, command):
    """Whether what was done while the launcher drains has happened."""
    if "signal" in command:
        return launcher._interrupts > 0
    members = launcher._components["gen-0"].members.values()
    return any(not member.rank.alive() for member in members)


def as_soon_as(condition, act):
    """From another thread, while the launcher is inside a call."""

    def wait():
        end = time.monotonic() + 60
        while not condition():
            if time.monotonic() > end:
                return
            time.sleep(0.01)
        act()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


@pytest.mark.service
@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("state", "command"),
    [
        # By day those whose end no other test sees.
        pytest.param(state, command, marks=() if state == "draining" or command == "two signals" else pytest.mark.slow)
        for state, cells in COMMANDS.items()
        for command in cells
    ],
)
def test_every_command_in_every_state(late_signals_are_nothing, service, monkeypatch, tmp_path, state, command):
    """It ends as the table says, long before a time-out, and no process or folder is left."""
    ends, restarts = COMMANDS[state][command]
    launcher, lines = make(service, restart="instance")
    helpers, pids = [], {}
    if state == "starting":
        monkeypatch.setenv("FAKE_HANGS", "ctx-0")
        begun = lambda: "gen-0" in launcher._components and launcher._components["gen-0"].ready  # noqa: E731
        helpers.append(as_soon_as(begun, lambda: perform(launcher, command)))
        if "signal" not in command:
            again = lambda: launcher.restarts == 1 and launcher._components["gen-0"].ready  # noqa: E731
            helpers.append(as_soon_as(again, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    elif state == "draining":
        monkeypatch.setenv("FAKE_STAYS", "until it is told")
        heard = lambda: launcher._draining and (launcher._directory.path / "tmp" / "front.over").exists()  # noqa: E731
        helpers.append(as_soon_as(heard, lambda: perform(launcher, command)))
        if command != "two signals":  # after those nobody waits for the front
            acted = lambda: heard() and done(launcher, command)  # noqa: E731
            helpers.append(as_soon_as(acted, lambda: pids["front"].kill(signal.SIGTERM)))
    ended = "clean"
    try:
        with launcher.started():
            pids.update(identities(launcher))
            if state == "starting again":
                monkeypatch.setenv("FAKE_HANGS", "ctx-0")
                assert pids["ctx-0/rank0"].kill()
                run_until(launcher, lambda: launcher.restarts == 1)
            if state != "draining":
                perform(launcher, command)
                if "signal" in command:
                    launcher.wait()
                else:
                    run_until(launcher, lambda: launcher.restarts == restarts and launcher._components["gen-0"].ready)
            pids.update({f"{name} now": identity for name, identity in identities(launcher).items()})
    except RunFailed as error:
        ended = str(error)
    finally:
        for helper in helpers:
            helper.join(60)
    assert ended == ends if ends == "clean" else ends in ended, (ended, lines)
    assert launcher.restarts == restarts, lines
    assert all_gone(pids) == []
    if ends == "clean":
        assert not (tmp_path / "r").exists()
    if state == "draining" and command == "two signals":
        assert "front: did not leave in time, killed" in lines
    if state == "draining" and command == "a rank dies":
        assert "gen-0: lost a rank while it drained, killed" in lines
