"""What happens when a process of a running service is killed, stopped or started over: real processes, no model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
import yaml

from faults import left_in_shared_memory
from meta_executor.config import apply_environment, service_config
from meta_executor.supervise.launch import Launcher, RunFailed
from meta_executor.supervise.procfs import ProcessIdentity

pytestmark = [pytest.mark.service(seconds=60), pytest.mark.timeout(300)]

#: A process that says that it is ready and drains when it is told: a start that costs nothing.
FAKE_RANK = str(Path(__file__).resolve().parents[2] / "packages/meta-executor/tests/supervise/fake_rank.py")
#: Pieces of an answer after which it mostly needs nothing of its context instance any more (count).
FAR = 64
#: A client learns of a death within this time (s).
TOLD_WITHIN_S = 10.0


def settings(run_dir, **more):
    """A service of four ranks without a model; answers take seconds."""
    pool = {"tokens_per_block": 16, "max_tokens": 8192}
    return {
        "port": 0,
        "run_dir": str(run_dir),
        "engine": {"kind": "synthetic", "synthetic": {"step_ms": 20.0, "layer_count": 8, "context_tokens_max": 4096}},
        "context_servers": {
            "pipeline_parallel_size": 2,
            "kv_cache_config": pool,
            "cache_transceiver_config": {
                "enable_async_terminal_agreement": True,
                "enable_async_readiness_agreement": True,
            },
        },
        "generation_servers": {"tensor_parallel_size": 2, "enable_attention_dp": True, "kv_cache_config": pool},
        **more,
    }


def living(pids):
    """Names of the processes that still run."""
    return sorted(name for name, identity in pids.items() if identity is not None and identity.alive())


def identities(launcher):
    return {name: ProcessIdentity.of(pid) for name, pid in launcher.processes().items() if name != "launcher"}


class Client(threading.Thread):
    """One long streaming request; what came of it, and when."""

    def __init__(self, url):
        super().__init__(daemon=True)
        self.url = url
        self.first = threading.Event()
        self.far = threading.Event()
        self.status = None
        self.error = None
        self.broken = None
        self.done = False
        self.ended_s = None

    def run(self):
        model = httpx.get(f"{self.url}/v1/models", timeout=30, trust_env=False).json()["data"][0]["id"]
        body = {"model": model, "prompt": "abc", "max_tokens": 2000, "stream": True, "ignore_eos": True}
        pieces = 0
        try:
            with httpx.stream(
                "POST", f"{self.url}/v1/completions", json=body, timeout=60.0, trust_env=False
            ) as response:
                self.status = response.status_code
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        self.first.set()
                        pieces += 1
                        if pieces == FAR:
                            self.far.set()
                        if line == "data: [DONE]":
                            self.done = True
                        elif "error" in json.loads(line[6:]):
                            self.error = json.loads(line[6:])["error"]
        except httpx.HTTPError as error:
            self.broken = error
        self.first.set()
        self.ended_s = time.monotonic()


#: Kinds of process; what differs by role or rank only is the nightly's (a context rank is killed by the restart, too).
VICTIMS = [
    *("gen-0/rank0", "gen-0/hydra0", "front"),
    *(pytest.param(v, marks=pytest.mark.slow) for v in ("ctx-0/rank0", "ctx-0/rank1", "gen-0/rank1", "ctx-0/mpiexec")),
]


@pytest.mark.parametrize("victim", VICTIMS)
def test_kill_9_of_each_kind_of_process_mid_request(short_folder, victim):
    """The client is told within ten seconds, the right process is named, the run fails, nothing is left running.

    A death that the running answer does not depend on may let it go on until the run ends; its client is told then, too.
    """
    lines = []
    service = apply_environment(service_config(settings(short_folder / "k")), {})
    launcher = Launcher(service, say=lines.append)
    with pytest.raises(RunFailed) as failure, launcher.started():
        client = Client(launcher.front_url)
        client.start()
        assert (client.far if victim == "ctx-0/mpiexec" else client.first).wait(30)
        pids = identities(launcher)
        killed_s = time.monotonic()
        assert pids[victim].kill()
        launcher.wait()
    client.join(TOLD_WITHIN_S)
    assert not client.is_alive()
    assert client.ended_s - killed_s < TOLD_WITHIN_S
    assert not client.done
    if victim == "front":
        assert client.broken is not None
    else:
        assert client.error is not None or client.status in (502, 503), (client.status, client.broken, lines)
    owner, _, name = victim.partition("/")
    assert str(failure.value).startswith(owner) or f" of {owner} " in str(failure.value), lines
    assert str(pids[victim].pid) in str(failure.value)
    if name.startswith("rank"):
        assert str(failure.value).startswith(f"{owner} rank {name[4:]} ")
    assert living(pids) == []


def test_kill_9_of_the_launcher(short_folder, tmp_path):
    """Every process ends by itself; what is left in the folder goes at the next start, of whatever processes."""
    config = tmp_path / "service.yaml"
    config.write_text(yaml.safe_dump(settings(short_folder / "l")))
    command = [sys.executable, "-m", "meta_executor", "up", str(config)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            if line.startswith("serving "):
                break
        children = {str(pid): ProcessIdentity.of(pid) for pid in descendants(process.pid)}
        assert len(children) > 8
        process.kill()
    end = time.monotonic() + 20
    while living(children):
        assert time.monotonic() < end, living(children)
        time.sleep(0.05)
    assert list((short_folder / "l").glob("run-*"))
    with Launcher(service_of(config), say=lambda _line: None, worker=(FAKE_RANK,), front=(FAKE_RANK,)).started():
        assert len(list((short_folder / "l").glob("run-*"))) == 1
    assert not (short_folder / "l").exists()


def service_of(path):
    return apply_environment(service_config(yaml.safe_load(path.read_text())), {})


def descendants(pid):
    """All processes below one."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = entry.read_text()
        except OSError:
            continue
        if int(text[text.rindex(")") + 2 :].split()[1]) == pid:
            child = int(entry.parent.name)
            found += [child, *descendants(child)]
    return found


def test_a_context_instance_restarted_under_load_serves_again(short_folder):
    """--restart instance under load: within two seconds of its readiness requests succeed on the new generation at the same
    address, none reaches the old one, the other instance and the front go on, and no reservation is left."""
    service = apply_environment(service_config(settings(short_folder / "r")), {})
    lines = []
    launcher = Launcher(service, say=lines.append, restart="instance")
    with launcher.started():
        url, ctx = launcher.front_url, launcher.urls()["ctx-0"]
        model = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"][0]["id"]
        stop, answers = threading.Event(), []

        def load():
            body = {"model": model, "prompt": "abc", "max_tokens": 4, "ignore_eos": True}
            with httpx.Client(timeout=60, trust_env=False) as client:
                while not stop.is_set():
                    begun = time.monotonic()
                    try:
                        status = client.post(f"{url}/v1/completions", json=body).status_code
                    except httpx.HTTPError:
                        status = 0
                    answers.append((begun, time.monotonic(), status))

        clients = [threading.Thread(target=load, daemon=True) for _ in range(4)]
        for thread in clients:
            thread.start()
        end = time.monotonic() + 30
        while not any(status == 200 for _, _, status in answers):
            assert time.monotonic() < end
            launcher.turn(0.1)
        before, generation = identities(launcher), httpx.get(f"{ctx}/server_info", trust_env=False).json()["generation"]
        assert before["ctx-0/rank1"].kill()
        end = time.monotonic() + 60
        while launcher.restarts == 0 or not launcher._components["ctx-0"].ready:
            launcher.turn(0.05)
            assert time.monotonic() < end, lines
        ready_s = time.monotonic()
        assert launcher.urls()["ctx-0"] == ctx
        assert httpx.get(f"{ctx}/server_info", trust_env=False).json()["generation"] not in (None, generation)
        end = ready_s + 30
        while not any(begun > ready_s and status == 200 for begun, _, status in answers):
            assert time.monotonic() < end, (answers[-5:], lines)
            launcher.turn(0.05)
        first_s = min(ended for begun, ended, status in answers if begun > ready_s and status == 200)
        stop.set()
        for thread in clients:
            thread.join(60)
        # Two seconds on a quiet machine; the bound leaves room for a busy one.
        print(f"first success {first_s - ready_s:.2f} s after readiness")
        assert first_s - ready_s < TOLD_WITHIN_S
        after = identities(launcher)
        assert after["gen-0/rank0"] == before["gen-0/rank0"]
        assert after["front"] == before["front"]
        # A worker that took a request meant for the old generation would have counted it: all that it took succeeded.
        held = httpx.get(f"{url}/debug/reservations", headers=launcher.key_header, trust_env=False).json()
        assert held["reservations"] == [], held
    assert living({**before, **after}) == []


def test_a_stopped_rank_is_not_dead(short_folder):
    """SIGSTOP of a rank on each side for five seconds and SIGCONT: the answers go on, nobody is declared dead."""
    service = apply_environment(service_config(settings(short_folder / "s")), {})
    lines = []
    launcher = Launcher(service, say=lines.append)
    with launcher.started():
        url = launcher.front_url
        model = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"][0]["id"]
        victims = [launcher.processes()[name] for name in ("ctx-0/rank1", "gen-0/rank1")]
        for pid in victims:
            os.kill(pid, signal.SIGSTOP)
        stopped_s = time.monotonic()

        def let_go_on():
            for pid in victims:
                os.kill(pid, signal.SIGCONT)

        timer = threading.Timer(5.0, let_go_on)
        timer.start()
        bodies = [{"model": model, "prompt": f"abc{i}", "max_tokens": 4, "ignore_eos": True} for i in range(4)]
        with httpx.Client(timeout=60, trust_env=False) as client:
            assert [client.post(f"{url}/v1/completions", json=b).status_code for b in bodies] == [200] * 4
        assert time.monotonic() - stopped_s > 5.0, "the answers did not need who was stopped"
        timer.join()
        launcher.turn(0.1)
        assert launcher.deaths == []
    assert not [line for line in lines if "died" in line]


@pytest.mark.parametrize("victim", ["gen-0/rank1", pytest.param("ctx-0/rank1", marks=pytest.mark.slow)])
def test_a_rank_that_stands_still_for_good_is_a_death(short_folder, victim):
    """First nobody calls the service well any more, then the rank is named, and its instance is started again."""
    plain = settings(short_folder / "u")
    for section in ("context_servers", "generation_servers"):
        plain[section].setdefault("cache_transceiver_config", {})["silence_s"] = 8.0
    launcher = Launcher(apply_environment(service_config(plain), {}), say=lambda _line: None, restart="instance")
    with launcher.started():
        url = launcher.front_url

        def health():
            return httpx.get(f"{url}/health", timeout=10, trust_env=False)

        def until(condition, limit_s):
            end = time.monotonic() + limit_s
            while not condition():
                assert time.monotonic() < end, (health().text, launcher.deaths)
                launcher.turn(0.1)

        assert health().status_code == 200
        stopped = ProcessIdentity.of(launcher.processes()[victim])
        stopped.kill(signal.SIGSTOP)
        until(lambda: health().status_code == 503, 30)
        owner, number = victim.split("/rank")
        if not launcher.restarts:
            assert f"rank {number}" in health().json()["why"][owner]
        until(lambda: launcher.restarts == 1, 60)
        until(lambda: health().status_code == 200, 60)
        assert not stopped.alive()
        model = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"][0]["id"]
        body = {"model": model, "prompt": "abc", "max_tokens": 4, "ignore_eos": True}
        for _ in range(4):
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False).status_code == 200


@pytest.mark.slow
def test_ten_starts_and_stops_leave_everything_as_it_was(short_folder):
    """Process table, /dev/shm and the temporary folder."""

    def snapshot():
        temporary = sorted(p.name for p in Path(short_folder).iterdir())
        return temporary, len(descendants(os.getpid()))

    before, shared = snapshot(), os.listdir("/dev/shm")
    for _ in range(10):
        with Launcher(
            apply_environment(service_config(settings(short_folder / "t")), {}), say=lambda _l: None
        ).started():
            pass
    assert snapshot() == before
    assert left_in_shared_memory(shared) == []


#: A start of this service takes about so long; signals come at as many moments of it (s, count).
START_S, MOMENTS = 8.0, 20


@pytest.mark.parametrize(
    "moment", [pytest.param(n, marks=() if n in (4, 11) else pytest.mark.slow) for n in range(MOMENTS)]
)
def test_sigterm_at_any_moment_of_the_start_leaves_nothing(short_folder, tmp_path, moment):
    """No process, no socket, key or shared memory; within bounded time; told, or before anything was made."""
    config = tmp_path / "service.yaml"
    run_dir = short_folder / f"m{moment}"
    config.write_text(yaml.safe_dump(settings(run_dir)))
    shared = os.listdir("/dev/shm")
    command = [sys.executable, "-m", "meta_executor", "up", str(config)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        time.sleep(START_S * (moment + 0.5) / MOMENTS)
        children = {str(pid): ProcessIdentity.of(pid) for pid in descendants(process.pid)}
        process.terminate()
        _, told = process.communicate(timeout=60)
    # What was about to start when its parent ended is killed by the kernel, and needs a moment of a processor to be gone.
    end = time.monotonic() + 20
    while living(children):
        assert time.monotonic() < end, living(children)
        time.sleep(0.05)
    # Whoever ends a start that hangs wants to read why: its logs stay until the next one, and that is told.
    secret = [
        path for path in run_dir.rglob("*") if path.name == "key" or path.is_socket() or path.parent.name == "tmp"
    ]
    assert secret == [], told
    assert not run_dir.exists() or "logs stay in" in told
    assert "Traceback" not in told
    assert process.returncode in ((-signal.SIGTERM, 0, 1) if not told else (0, 1)), told
    assert left_in_shared_memory(shared) == []
