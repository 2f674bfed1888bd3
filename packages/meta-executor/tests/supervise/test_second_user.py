"""A second user of the host, a real one made for the test, beside a service: nothing read, nothing changed, nothing ended."""

from __future__ import annotations

import json
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from meta_executor.config import ConfigError, apply_environment, service_config
from meta_executor.supervise.launch import Launcher
from meta_executor.supervise.rundir import remove_stale_runs

pytestmark = [
    pytest.mark.service,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("useradd") is None, reason="makes a user, which needs root and useradd"
    ),
]

SIDE = {"max_num_tokens": 64, "kv_cache_config": {"max_tokens": 4096}}
BODY = {"model": "synthetic", "prompt": "hello", "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def other() -> Iterator[int]:
    """The second user's id."""
    name = f"mx{secrets.token_hex(4)}"
    subprocess.run(["useradd", "--no-create-home", "--shell", "/bin/false", name], check=True)
    yield pwd.getpwnam(name).pw_uid
    subprocess.run(["userdel", name], check=True)


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder like the temporary one: everybody writes, nobody removes what belongs to others."""
    folder = Path(tempfile.mkdtemp(prefix="mx", dir="/tmp"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def service(base: Path, **more: Any) -> Launcher:
    config = {
        "port": 0,
        "run_dir": str(base),
        "served_model_name": "synthetic",
        "engine": {"kind": "synthetic", "synthetic": {"vocab_size": 997}},
        "context_servers": {**SIDE, "pipeline_parallel_size": 2},
        "generation_servers": {**SIDE, "tensor_parallel_size": 1, "enable_attention_dp": True},
        **more,
    }
    return Launcher(apply_environment(service_config(config), {}), say=lambda _: None)


def as_user(uid: int, work: Callable[[], Any]) -> Any:
    """What ``work`` returns (JSON) in a child that is that user for good."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            os.write(writing, json.dumps(work()).encode())
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    return json.loads(told)


def refused(attempt: Callable[[], Any]) -> bool:
    try:
        attempt()
    except (PermissionError, ProcessLookupError, NotADirectoryError):
        return True
    return False


def attack(run: Path, processes: dict[str, int], key: str, shared: list[str]) -> list[str]:
    """Everything that a second user tries. What succeeded, by name; empty is good."""
    got = []

    def tried(name: str, attempt: Callable[[], Any]) -> None:
        if not refused(attempt):
            got.append(name)

    def connect(kind: socket.SocketKind, path: Path) -> None:
        with socket.socket(socket.AF_UNIX, kind) as peer:
            peer.connect(str(path))

    tried("list the run folder", lambda: os.listdir(run))
    for name in ("key", "run.json", "front.url", "lock", "logs/front.log", "evidence", "ipc", "tmp"):
        tried(f"open {name}", lambda name=name: os.open(run / name, os.O_RDONLY))
        tried(f"replace {name}", lambda name=name: os.rename(run / name, run / "x"))
    tried("plant a file", lambda: (run / "evil").write_text("x"))
    tried("plant a run", lambda: (run.parent / "run-evil").symlink_to("/etc"))
    tried("talk to the launcher", lambda: connect(socket.SOCK_DGRAM, run / "launcher.sock"))
    for name in ("ctx-0.w", "ctx-0.s", "gen-0.w", "gen-0.s"):
        tried(f"talk to {name}", lambda name=name: connect(socket.SOCK_STREAM, run / "ipc" / name))
    for name, pid in processes.items():
        proc = Path(f"/proc/{pid}")
        for file in ("environ", "mem", "maps"):
            tried(f"read {file} of {name}", lambda proc=proc, file=file: (proc / file).open("rb").read(1))
        tried(f"list the files of {name}", lambda proc=proc: os.listdir(proc / "fd"))
        tried(f"signal {name}", lambda pid=pid: os.kill(pid, signal.SIGTERM))
        if key in (proc / "cmdline").read_text():
            got.append(f"the key on the command line of {name}")
    for path in shared:
        tried(f"map {path}", lambda path=path: os.open(path, os.O_RDWR))
    return got


def listening(pids: set[int]) -> dict[int, str]:
    """TCP ports at which these processes listen, and the address of each as the kernel writes it (hex)."""
    inodes = set()
    for pid in pids:
        for handle in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(handle)
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    ports = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                address, _, port = words[1].partition(":")
                ports[int(port, 16)] = address
    return ports


def named_memory(pids: set[int]) -> list[str]:
    """Shared memory of these processes that has a name."""
    lines = {line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/dev/shm/" in line}
    return sorted({line[line.index("/dev/shm/") :] for line in lines if not line.endswith("(deleted)")})


def test_a_running_service(other: int, public: Path) -> None:
    """Files, sockets, processes, shared memory, ports: refused, and the service goes on and drains clean."""
    launcher = service(public / "base")
    own = listening({os.getpid()})  # earlier tests' in this process, which is the launcher here
    with launcher.started():
        run = Path(launcher.run.run_dir)
        key = (run / "key").read_text()
        processes = launcher.processes()
        shared = named_memory(set(processes.values()))
        assert as_user(other, lambda: attack(run, processes, key, shared)) == []

        def over_http() -> dict[str, Any]:
            told: dict[str, Any] = {}
            # This user may not read the interpreter's list of authorities.
            with httpx.Client(trust_env=False, timeout=20, verify=False) as client:
                for path in ("/debug/routing", "/debug/reservations"):
                    told[path] = client.get(launcher.front_url + path).status_code
                told["drain"] = client.post(f"{launcher.front_url}/internal/drain").status_code
                for owner, url in launcher.urls().items():
                    told[owner] = client.get(f"{url}/server_info").json()
                    for path in ("/internal/statistics", "/debug/routing"):
                        told[owner + path] = client.get(url + path).status_code
            return told

        told = as_user(other, over_http)
        for owner in ("ctx-0", "gen-0"):
            info = told.pop(owner)
            assert not (info["control_addresses"] or info["service_address"] or info["processes"] or info["layout"])
        assert set(told.values()) == {401}

        ports = {port: at for port, at in listening(set(processes.values())).items() if port not in own}
        hydra = listening({pid for name, pid in processes.items() if "mpiexec" in name})
        assert {address for port, address in ports.items() if port not in hydra} == {"0100007F"}, "beyond the loopback"

        table = [line.split() for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]]
        made = set(processes.values()) - {os.getpid()}
        segments = {words[1]: words[2] for words in table if int(words[4]) in made}
        assert not {shm for shm, mode in segments.items() if int(mode, 8) & 0o077}, "segments that the group may map"

        def garbage() -> int:
            for port in ports:
                for data in (b"\x00" * 64, b"GET / HTTP/1.0\r\n\r\n", os.urandom(512)):
                    try:
                        with socket.create_connection(("127.0.0.1", port), 2) as peer:
                            peer.settimeout(0.2)
                            peer.sendall(data)
                            peer.recv(1)
                    except OSError:
                        continue
            return len(ports)

        assert as_user(other, garbage) >= 3
        answer = httpx.post(f"{launcher.front_url}/v1/completions", json=BODY, timeout=60, trust_env=False)
        assert answer.status_code == 200, answer.text
        assert launcher.processes() == processes and not launcher.deaths
    assert not run.exists()


ALONE = """
import json, sys
sys.path.insert(0, sys.argv[1])
import httpx, test_second_user as here
with here.service(here.Path(sys.argv[2])).started() as launcher:
    answer = httpx.post(f"{launcher.front_url}/v1/completions", json=here.BODY, timeout=60, trust_env=False)
    print(json.dumps([answer.status_code, sorted(here.listening(set(launcher.processes().values())))]), flush=True)
    sys.stdin.read()
"""


def test_a_loopback_of_its_own(other: int, public: Path) -> None:
    """As docs/security.md says: in a network namespace the service serves, and none of its ports, UCX's and MPI's included, is
    there for the host's other users."""
    if subprocess.run(["unshare", "--net", "ip", "link", "set", "lo", "up"], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("NO COVERAGE: no network namespace can be made here")
    inside = f"ip link set lo up && exec {sys.executable} -c '{ALONE}' {Path(__file__).parent} {public / 'base'}"
    with subprocess.Popen(
        ["unshare", "--net", "sh", "-c", inside], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as service_alone:
        assert service_alone.stdin is not None and service_alone.stdout is not None
        try:
            status, ports = json.loads(service_alone.stdout.readline())

            def reached() -> list[int]:
                found = []
                for port in ports:
                    with socket.socket() as peer:
                        if peer.connect_ex(("127.0.0.1", port)) == 0:
                            found.append(port)
                return found

            assert status == 200 and len(ports) >= 8
            assert as_user(other, reached) == []
        finally:
            service_alone.stdin.close()
    assert service_alone.returncode == 0


def test_what_was_planted_before_the_start(other: int, public: Path) -> None:
    """A base folder of the other user, and a link in its place: refused by name; what it leads to is untouched."""
    treasure = public / "treasure"
    (treasure / "run-1").mkdir(parents=True)
    (treasure / "run-1" / "lock").touch()
    as_user(other, lambda: (public / "theirs").mkdir())
    as_user(other, lambda: (public / "link").symlink_to(treasure))
    for name in ("theirs", "link"):
        with pytest.raises(ConfigError, match="run_dir"):
            remove_stale_runs(public / name)
        with pytest.raises(ConfigError, match="run_dir"), service(public / name).started():
            pass
    assert (treasure / "run-1" / "lock").exists()
    assert not list((public / "theirs").iterdir())


def test_an_evidence_folder_that_leads_elsewhere(other: int, public: Path) -> None:
    """Refused before anything starts."""
    victim = public / "victim"
    victim.mkdir()
    as_user(other, lambda: (public / "evidence").symlink_to(victim))
    with (
        pytest.raises(ConfigError, match="evidence_dir"),
        service(public / "b", evidence_dir=str(public / "evidence")).started(),
    ):
        pass
    assert not list(victim.iterdir())
