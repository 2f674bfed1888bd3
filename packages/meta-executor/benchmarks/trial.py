"""One service under one load, measured from outside: processor time of every process and of each loop's thread.

A trial knows nothing of the code that it measures: it starts ``meta-executor up`` of a source tree (this one, or an earlier
commit's), finds the processes in ``/proc``, and sends the load from a process of its own. So two trees can be compared.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def sources_of(tree: Path) -> list[str]:
    """Where a tree's packages are imported from."""
    return [str(path) for path in sorted((tree / "packages").glob("*/src"))]


#: Of this interpreter as it was started, without this tree's packages: what else a service needs may stand there.
_INHERITED = [
    path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sources_of(ROOT)
]
# The load generator is this tree's, wherever it is started from and whatever is installed.
sys.path[1:1] = sources_of(ROOT)
os.environ["PYTHONPATH"] = os.pathsep.join(sources_of(ROOT) + _INHERITED)

from meta_executor.bench.load import LoadConfig, LoadResult, run_load  # noqa: E402 - of this tree

_TICKS_S = 1.0 / os.sysconf("SC_CLK_TCK")
_READY = re.compile(r"http://[0-9.]+:[0-9]+")
_TURNS = re.compile(r'^meta_executor_rank_(turns\w*)\{rank="(\d+)"\} ([0-9.e+]+)$', re.MULTILINE)
#: Asks this machine's services, never a proxy.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
START_S, STOP_S = 180.0, 90.0


@dataclass
class Usage:
    """Processor seconds since the start of each process.

    Attributes:
        processes: By "kind pid".
        loops: Main threads of ranks and of the front, by the same names: the threads that iterate.
        threads: Threads of each process now (count).
    """

    processes: dict[str, float] = field(default_factory=dict)
    loops: dict[str, float] = field(default_factory=dict)
    threads: dict[str, int] = field(default_factory=dict)

    def since(self, before: Usage) -> Usage:
        """What was used between two looks."""
        return Usage(
            {name: used - before.processes.get(name, 0.0) for name, used in self.processes.items()},
            {name: used - before.loops.get(name, 0.0) for name, used in self.loops.items()},
            self.threads,
        )

    def total(self, kind: str = "") -> float:
        """Of all processes, or of those of a kind (s)."""
        return sum(used for name, used in self.processes.items() if name.startswith(kind))


def usage_of(root_pid: int) -> Usage:
    """A look at a process and all below it."""
    usage = Usage()
    for pid in _tree(root_pid):
        with contextlib.suppress(OSError, IndexError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            name = f"{_kind(words)} {pid}"
            usage.processes[name] = _cpu_s(Path(f"/proc/{pid}/stat"))
            usage.threads[name] = len(os.listdir(f"/proc/{pid}/task"))
            if name.startswith(("ctx", "gen", "front")):
                usage.loops[name] = int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9
    return usage


def _tree(root_pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                parent = int(Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()[1])
                children.setdefault(parent, []).append(int(entry))
    found, todo = [], [root_pid]
    while todo:
        pid = todo.pop()
        found.append(pid)
        todo.extend(children.get(pid, ()))
    return found


def _cpu_s(stat: Path) -> float:
    words = stat.read_text().rsplit(")", 1)[1].split()
    return (int(words[11]) + int(words[12])) * _TICKS_S


def _kind(words: list[str]) -> str:
    line = " ".join(words)
    if ".worker" in line and ".guard" not in line and "mpiexec" not in words[0] and "hydra" not in words[0]:
        return words[words.index("--owner") + 1].split("-")[0]
    if "meta_executor.front" in line:
        return "front"
    return "other"


@dataclass(frozen=True)
class Service:
    """A service that runs."""

    url: str
    process: subprocess.Popen[str]

    def usage(self) -> Usage:
        """Processor time so far."""
        return usage_of(self.process.pid)

    def turns(self) -> Counter[tuple[str, str]]:
        """Iterations of an instance's loops, and those that took longer than each edge, by (owner, name); empty where the tree
        does not count them."""
        found: Counter[tuple[str, str]] = Counter()
        for server in json.loads(_fetched(f"{self.url}/server_info"))["servers"]:
            for name, _, count in _TURNS.findall(_fetched(f"{server['url']}/metrics")):
                found[server["owner_id"], name] += int(float(count))
        return found


def _fetched(url: str) -> str:
    with _DIRECT.open(url, timeout=30) as answer:
        return str(answer.read().decode())


@contextlib.contextmanager
def running(tree: Path, config: dict[str, object]) -> Iterator[Service]:
    """``meta-executor up`` of a source tree; leaving drains it.

    Raises:
        RuntimeError: It did not become ready, or did not end with 0.
    """
    with tempfile.TemporaryDirectory(prefix="bs-") as folder:
        file = Path(folder) / "service.yaml"
        file.write_text(json.dumps(config), "utf-8")
        process = subprocess.Popen(
            [sys.executable, "-c", "from meta_executor.cli import main; main()", "up", str(file)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sources_of(tree) + _INHERITED), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield Service(_url(process), process)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if process.returncode != 0:
            raise RuntimeError(f"the service ended with exit {process.returncode}")


def _url(process: subprocess.Popen[str]) -> str:
    said = []
    os.set_blocking(process.stdout.fileno(), False)  # type: ignore[union-attr]
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        line = process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            time.sleep(0.05)
            continue
        said.append(line)
        if "serving" in line or "ready: " in line:
            found = _READY.search(line)
            if found:
                return found.group()
    process.kill()
    raise RuntimeError("the service did not become ready:\n" + "".join(said[-30:]))


@dataclass(frozen=True)
class Trial:
    """A load and what it cost."""

    result: LoadResult
    used: Usage
    turns: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def tokens(self) -> int:
        """Tokens that came (count)."""
        return sum(outcome.tokens for outcome in self.result.outcomes)

    @property
    def failures(self) -> list[str]:
        """Why requests failed."""
        return [f"{o.status} {o.error}" for o in self.result.outcomes if not o.ok]

    def per_token_s(self, kind: str = "") -> float:
        """Processor time of all processes, or of a kind, per token of the load (s)."""
        return self.used.total(kind) / max(self.tokens, 1)

    def loop_per_token_s(self) -> float:
        """Processor time of the generation ranks' loops per token (s): each token is made by one of them."""
        loops = sum(used for name, used in self.used.loops.items() if name.startswith("gen"))
        return loops / max(self.tokens, 1)

    def first_s(self) -> float:
        """Time to the first piece, in the middle of all requests (s)."""
        firsts = sorted(outcome.first_s for outcome in self.result.outcomes)
        return firsts[len(firsts) // 2]

    def turns_of(self, kind: str) -> dict[str, int]:
        """Iterations of a kind's loops that took longer, by edge ("2ms"), and all of them ("all")."""
        names: Counter[str] = Counter()
        for (owner, name), count in self.turns.items():
            if owner.startswith(kind):
                names[name.removeprefix("turns").removeprefix("_over_").removeprefix("_") or "all"] += count
        return dict(names)

    def limit(self, device_tokens_per_s: float | None = None) -> str:
        """What had no time left, with numbers: the machine's cores, a thread that can use only one of them, or the device.

        Args:
            device_tokens_per_s: What the steps allow, if that is known.
        """
        seconds, cores = self.result.seconds, len(os.sched_getaffinity(0))
        whole = (self.used.total() + self.result.cpu_s) / seconds
        threads = {name.split()[0] + " main thread": used / seconds for name, used in sorted(self.used.loops.items())}
        threads["load generator"] = self.result.share
        busiest = max(threads, key=lambda name: threads[name])
        kinds = {kind: self.used.total(kind) / seconds for kind in ("front", "ctx", "gen")}
        kinds["load generator"] = self.result.share
        said = f"{whole:.2f} of {cores} cores used: " + ", ".join(f"{kind} {used:.2f}" for kind, used in kinds.items())
        said += f"; busiest thread: {busiest} {100 * threads[busiest]:.0f} % of a core"
        if device_tokens_per_s is not None:
            said += f"; {100 * self.tokens / seconds / device_tokens_per_s:.0f} % of what the device's steps allow"
        if threads[busiest] >= 0.85:
            return f"limit: {busiest} ({said})"
        if whole >= 0.85 * cores:
            return f"limit: the machine's cores ({said})"
        return f"limit: not the host's processor time ({said})"


def load(service: Service, config: LoadConfig, *, vocab_size: int, model: str = "synthetic") -> Trial:
    """Send one load."""
    turns, before = service.turns(), service.usage()
    result = run_load(service.url, model, vocab_size, config)
    used = service.usage().since(before)
    # Ranks tell rank 0 their counters twice a second.
    time.sleep(1.0)
    return Trial(result, used, service.turns() - turns)
