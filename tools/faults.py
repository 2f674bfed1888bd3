"""A running service under faults drawn from a seed: real processes, then healing, and an audit of all that could be left.

    nox -s faults                                 # 60 s, seed 1
    nox -s faults -- --seconds 1800 --seed 7      # longer
    nox -s faults -- --seed 7 --schedule 20       # what seed 7 does, without doing it

A service of two context stages and two generation ranks (synthetic engine, ``--restart instance``) answers eight clients, some
of which leave, read slowly, or send what is no request. One after the other its processes are killed or made to stand still: at
rest, in the middle of a prompt, of a transfer, of an answer. After each the service must serve again within ``HEAL_S``, and
whoever waited must have been told within ``TOLD_S``. Every ``AUDIT_EVERY`` faults, and at the end, the clients pause and
everything is looked at: requests, reservations, KV blocks, quarantine, control links, each surviving process's descriptors,
threads and memory, processes of ended lifetimes; after the drain also evidence, shared memory and files. Every answer is
compared with the first one to the same prompt.

The seed says what is done to whom, when, and for how long; the machine's timing is its own. Exit 1: something was found.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from lifeline import descendants
from meta_executor.config import apply_environment, service_config
from meta_executor.evidence.verify import verify_folder
from meta_executor.supervise.launch import Launcher, RunFailed
from meta_executor.supervise.procfs import ProcessIdentity, resident_bytes

#: After a fault the service serves again within this time (s); an instance's start is most of it.
HEAL_S = 90.0
#: Who waits for an answer when a process dies is told within this time (s).
TOLD_S = 10.0
#: Longer than this nobody waits for anything, a process that stands still included (s).
HUNG_S = 150.0
#: At rest everything is given back within this time (s).
QUIET_S = 40.0
#: A process that stands still is noticed by ``/health`` within this time (s).
NOTICED_S = 12.0
#: Faults between two audits (count).
AUDIT_EVERY = 4
#: Clients at once (count).
CLIENTS = 8
#: A process may have grown by so much since it was first looked at (MiB): allocators keep some of what they have had.
MEMORY_MIB = 96.0
#: Descriptors and threads that a process may have more than when it was first looked at (count): connections that stay open.
DESCRIPTORS, THREADS = 12, 4
#: A request that could not be served may say so: refused, cut by a death, unavailable, too late.
TOLD = frozenset({429, 502, 503, 504})

MOMENTS = ("at rest", "in a prompt", "in a transfer", "in an answer")
KILLED = ("rank0", "rank1", "guard1", "hydra0", "mpiexec")
STOPPED = ("ctx-0/rank0", "ctx-0/rank1", "gen-0/rank0", "gen-0/rank1", "front")
STOPS_S = (1.0, 5.0, 8.0, 20.0)


@dataclass(frozen=True)
class Fault:
    """What is done.

    Attributes:
        what: ``kill``, ``stop`` or ``both``: two processes of different instances killed at once.
        victims: Names of processes.
        moment: One of ``MOMENTS``.
        part: Where in that moment (0 to 1).
        stop_s: How long a victim stands still (s).
    """

    what: str
    victims: tuple[str, ...]
    moment: str
    part: float
    stop_s: float = 0.0

    def __str__(self) -> str:
        for_s = f" for {self.stop_s:g} s" if self.stop_s else ""
        return f"{self.what} {' and '.join(self.victims)}{for_s}, {self.moment} ({self.part:.2f})"


def schedule(seed: int) -> Iterator[Fault]:
    """What a seed does, without end: the same each time."""
    rng = random.Random(f"faults {seed}")
    while True:
        moment, part = rng.choice(MOMENTS), rng.random()
        what = rng.choices(("kill", "stop", "both"), (10, 8, 2))[0]
        owners = ["ctx-0", "gen-0"]
        if what == "stop":
            yield Fault(what, (rng.choice(STOPPED),), moment, part, rng.choices(STOPS_S, (4, 3, 2, 1))[0])
        elif what == "kill":
            yield Fault(what, (f"{rng.choice(owners)}/{rng.choice(KILLED)}",), moment, part)
        else:
            yield Fault(what, tuple(f"{owner}/{rng.choice(KILLED)}" for owner in owners), moment, part)


def settings(seed: int, folder: Path) -> dict[str, Any]:
    """A service; the seed chooses its schedule, where its API lives, and how KV moves."""
    rng = random.Random(f"settings {seed}")
    style = rng.choice(("generation_first", "context_first"))
    agreement = rng.random() < 0.75 or style == "generation_first"
    transceiver = {"enable_bounce": rng.random() < 0.5, "bounce_arena_mib": 8}
    pool = {"tokens_per_block": 16, "max_tokens": 16384, "enable_block_reuse": rng.random() < 0.3}
    return {
        "port": 0,
        "run_dir": str(folder / "r"),
        "evidence_dir": str(folder / "evidence"),
        "schedule_style": style,
        "engine": {"kind": "synthetic", "synthetic": {"step_ms": 10.0, "layer_count": 8, "context_tokens_max": 4096}},
        "context_servers": {
            "pipeline_parallel_size": 2,
            "max_num_tokens": 64,
            "proxy": rng.choice(("thread", "spawn")),
            "kv_cache_config": pool,
            "cache_transceiver_config": {
                **transceiver,
                "enable_async_terminal_agreement": agreement,
                "enable_async_readiness_agreement": agreement,
            },
        },
        "generation_servers": {
            "tensor_parallel_size": 2,
            "enable_attention_dp": True,
            "proxy": rng.choice(("thread", "spawn")),
            "kv_cache_config": pool,
            "cache_transceiver_config": transceiver,
        },
    }


# -- clients ------------------------------------------------------------------------------------------------------------

#: What is no request; each must be refused with 4xx.
MALFORMED: tuple[bytes, ...] = (
    b"",
    b"{",
    b"[]",
    b'{"model": 3}',
    b'{"model": "MODEL", "prompt": {"a": 1}, "max_tokens": 1}',
    b'{"model": "MODEL", "prompt": "a", "max_tokens": -1}',
    b'{"model": "MODEL", "prompt": [-1], "max_tokens": 1}',
    b'{"model": "MODEL", "prompt": "a", "max_tokens": 1e9}',
    b'{"model": "MODEL", "prompt": "a", "temperature": "hot"}',
    b'{"model": "another", "prompt": "a"}',
    b"\xff\xfe\x00",
    b'{"model": "MODEL", "prompt": "a", "stop": [' + b'"x",' * 500 + b'"x"]}',
)


class Clients(threading.Thread):
    """Clients of all kinds, in a thread of their own; what came of their requests.

    Args:
        url, model: The service.
        seed: Of what they ask.
    """

    def __init__(self, url: str, model: str, seed: int) -> None:
        super().__init__(name="clients", daemon=True)
        self._url, self._model, self._seed = url, model, seed
        self._go = threading.Event()
        self._over = threading.Event()
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        #: Begun and not ended: number to (when (s), what).
        self.running: dict[int, tuple[float, str]] = {}
        self._first_answers: dict[tuple[int, int], list[int]] = {}
        self._number = 0

    def run(self) -> None:
        asyncio.run(self._all())

    def resume(self) -> None:
        """Ask."""
        self._go.set()

    def pause(self) -> None:
        """Ask nothing more; what runs goes on."""
        self._go.clear()

    def end(self) -> None:
        """Leave."""
        self._over.set()
        self._go.set()
        self.join(30.0)

    def waiting_since(self, before_s: float) -> list[str]:
        """Requests that were begun before a time and have not ended: what each is, and its age."""
        now_s = time.monotonic()
        return [f"{what} for {now_s - begun:.0f} s" for begun, what in list(self.running.values()) if begun < before_s]

    async def _all(self) -> None:
        await asyncio.gather(*(self._client(index) for index in range(CLIENTS)))

    async def _client(self, index: int) -> None:
        rng = random.Random(f"client {self._seed}/{index}")
        kinds = ("whole", "stream", "leave", "slow", "malformed", "stop")
        limits = httpx.Limits(max_connections=4)
        async with httpx.AsyncClient(timeout=HUNG_S + 30.0, trust_env=False, limits=limits) as client:
            while not self._over.is_set():
                if not self._go.is_set():
                    await asyncio.sleep(0.02)
                    continue
                kind = rng.choices(kinds, (5, 6, 4, 1, 1, 2))[0]
                self._number += 1
                number = self._number
                self.running[number] = (time.monotonic(), kind)
                try:
                    outcome = await self._one(client, kind, rng)
                except httpx.HTTPError as error:
                    outcome = f"{type(error).__name__}"
                    self.wrong.append(f"{kind}: {type(error).__name__}: {error}")
                finally:
                    del self.running[number]
                self.outcomes[f"{kind}: {outcome}"] += 1
                if outcome != "answered":
                    await asyncio.sleep(0.05)

    async def _one(self, client: httpx.AsyncClient, kind: str, rng: random.Random) -> str:
        if kind == "malformed":
            return await self._malformed(client, rng.choice(MALFORMED))
        length, tokens = rng.choice((3, 40, 150)), rng.choice((1, 4, 12, 40))
        body = {
            "model": self._model, "prompt": [3 + (7 * i + length) % 900 for i in range(length)], "max_tokens": tokens,
            "ignore_eos": True, "return_token_ids": True, "temperature": 0,
        }  # fmt: skip
        if kind == "stop":
            body["stop"] = ["zzzz"]
        if kind in ("whole", "stop"):
            answer = await client.post(f"{self._url}/v1/completions", json=body)
            if answer.status_code != 200:
                return self._refused(kind, answer.status_code, answer.text)
            self._compare((length, tokens), answer.json()["choices"][0]["token_ids"])
            return "answered"
        leaves_after = rng.random() * tokens if kind == "leave" else None
        leave_s = rng.choice((None, 0.0, 0.02, 0.1)) if kind == "leave" else None
        try:
            async with asyncio.timeout(leave_s):
                return await self._stream(client, {**body, "stream": True}, (length, tokens), kind, leaves_after)
        except TimeoutError:
            return "left"

    async def _malformed(self, client: httpx.AsyncClient, body: bytes) -> str:
        content = body.replace(b"MODEL", self._model.encode())
        headers = {"content-type": "application/json"}
        answer = await client.post(f"{self._url}/v1/completions", content=content, headers=headers)
        if not 400 <= answer.status_code < 500:
            self.wrong.append(f"{body[:40]!r} was answered with {answer.status_code}")
        return f"{answer.status_code}"

    async def _stream(
        self,
        client: httpx.AsyncClient,
        body: dict[str, Any],
        key: tuple[int, int],
        kind: str,
        leaves_after: float | None,
    ) -> str:
        async with client.stream("POST", f"{self._url}/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                return self._refused(kind, answer.status_code, (await answer.aread()).decode("utf-8", "replace"))
            got: list[int] = []
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    self._compare(key, got)
                    return "answered"
                event = json.loads(line[6:])
                if "error" in event:
                    return f"told in the stream: {event['error'].get('code')}"
                for choice in event["choices"]:
                    got += choice.get("token_ids") or []
                if leaves_after is not None and len(got) > leaves_after:
                    return "left"
                if kind == "slow":
                    await asyncio.sleep(0.1)
        self.wrong.append(f"{kind}: a stream ended without its end")
        return "no end"

    def _refused(self, kind: str, status: int, text: str) -> str:
        if status not in TOLD:
            self.wrong.append(f"{kind}: {status} {text[:200]}")
        return f"{status}"

    def _compare(self, key: tuple[int, int], tokens: list[int]) -> None:
        first = self._first_answers.setdefault(key, tokens)
        if first != tokens or len(tokens) != key[1]:
            self.wrong.append(f"prompt of {key[0]} tokens, {key[1]} wanted: {tokens[:8]}…, first time {first[:8]}…")


class Probe(threading.Thread):
    """One request whose progress is looked at."""

    def __init__(self, url: str, model: str, *, prompt_tokens: int = 400, tokens: int = 60) -> None:
        super().__init__(name="probe", daemon=True)
        self._url = url
        prompt = [3 + 11 * i % 900 for i in range(prompt_tokens)]
        self._body = {"model": model, "prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True}
        self.pieces = 0
        self.begun_s = time.monotonic()
        self.first_s: float | None = None
        self.outcome = ""

    def run(self) -> None:
        try:
            with httpx.stream(
                "POST", f"{self._url}/v1/completions", json=self._body, timeout=HUNG_S, trust_env=False
            ) as answer:
                if answer.status_code != 200:
                    self.outcome = str(answer.status_code)
                    return
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        if '"error"' in line:
                            self.outcome = "told in the stream"
                            return
                        self.pieces += 1
                        self.first_s = self.first_s or time.monotonic() - self.begun_s
                    elif line == "data: [DONE]":
                        self.outcome = "answered"
        except httpx.HTTPError as error:
            self.outcome = f"{type(error).__name__}: {error}"


# -- the audit ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """What a process holds."""

    descriptors: int
    threads: int
    resident_mib: float

    @classmethod
    def of(cls, pid: int) -> Held | None:
        """Now; None where the process has ended."""
        try:
            descriptors = len(os.listdir(f"/proc/{pid}/fd"))
            threads = len(os.listdir(f"/proc/{pid}/task"))
        except OSError:
            return None
        return cls(descriptors, threads, resident_bytes(pid) / 2**20)


@dataclass
class Driver:
    """One service and what is done to it."""

    seed: int
    say: Callable[[str], None]
    findings: list[str] = field(default_factory=list)
    #: The first look at each process.
    first: dict[tuple[str, ProcessIdentity], Held] = field(default_factory=dict)
    faults: int = 0
    #: Time to the first piece of a probe, undisturbed (s).
    first_s: float = 0.3

    def run(self, seconds: float, folder: Path, faults_max: int | None = None) -> None:
        """Faults for so long, then healing, an audit, the drain, and a look at what is left."""
        shared = os.listdir("/dev/shm")
        before = set(descendants(os.getpid()))
        service = apply_environment(service_config(settings(self.seed, folder)), {})
        self.launcher = Launcher(service, say=lambda line: self.say(f"  {line}"), restart="instance")
        try:
            with self.launcher.started():
                self._disturb(seconds, faults_max)
        except RunFailed as error:
            self._found(f"the run ended by itself, or was not drained: {error}")
        else:
            result = verify_folder(folder / "evidence")
            # That lifetimes which were ended by a fault are not drained is as it should be.
            wrong = [finding for finding in result.findings if "a lifetime of it was not drained" not in finding]
            if wrong or len(result.findings) - len(wrong) != self.launcher.restarts:
                self._found(f"evidence, after {self.launcher.restarts} restarts: {'; '.join(result.findings)}")
        left = [pid for pid in descendants(os.getpid()) if pid not in before]
        if left:
            self._found(f"{len(left)} processes are left: {[_command(pid)[:120] for pid in left]}")
        if new := left_in_shared_memory(shared):
            self._found(f"left in /dev/shm: {new}")
        if (folder / "r").exists():
            self._found(f"left in the run's folder: {sorted(str(p) for p in (folder / 'r').rglob('*'))[:10]}")

    def _disturb(self, seconds: float, faults_max: int | None) -> None:
        self.url = self.launcher.front_url
        self.model = httpx.get(f"{self.url}/v1/models", timeout=30.0, trust_env=False).json()["data"][0]["id"]
        self.clients = Clients(self.url, self.model, self.seed)
        self.clients.start()
        try:
            self.clients.resume()
            self._turn_until(lambda: sum(self.clients.outcomes.values()) >= 4 * CLIENTS, 30.0)
            self._audit("before any fault")
            end_s = time.monotonic() + seconds
            for fault in schedule(self.seed):
                if time.monotonic() >= end_s or self.faults == faults_max:
                    break
                self.faults += 1
                self.say(f"{self.faults}. {fault}")
                self._perform(fault)
                if self.faults % AUDIT_EVERY == 0:
                    self._audit(f"after {self.faults} faults")
            self._audit("at the end")
        finally:
            self.clients.end()
            self.say(f"clients: {dict(sorted(self.clients.outcomes.items()))}")
            for wrong in self.clients.wrong[:20]:
                self._found(f"client: {wrong}")
            if len(self.clients.wrong) > 20:
                self._found(f"client: {len(self.clients.wrong) - 20} more")

    # -- one fault

    def _perform(self, fault: Fault) -> None:
        restarts = self.launcher.restarts
        probe = self._wait_for(fault)
        pids = [ProcessIdentity.of(self.launcher.processes().get(name, 0)) for name in fault.victims]
        begun_s = time.monotonic()
        if fault.what == "stop":
            self._stand_still(fault, [pid for pid in pids if pid is not None])
        else:
            for pid in pids:
                if pid is not None:
                    pid.kill()
            self.clients.resume()
            self._turn_until(lambda: self.launcher.restarts > restarts or not self._alive(pids), 30.0)
            told = self._turn_until(lambda: not self.clients.waiting_since(begun_s), TOLD_S)
            if not told:
                self._found(f"{fault}: not told within {TOLD_S:g} s: {self.clients.waiting_since(begun_s)}")
        self.clients.resume()
        self._heal(fault, begun_s)
        if probe is not None:
            probe.join(HUNG_S)
            if probe.is_alive() or not (
                probe.outcome in ("answered", "told in the stream") or probe.outcome.isdecimal()
            ):
                self._found(f"{fault}: the probe {probe.outcome or 'hangs'}")

    def _wait_for(self, fault: Fault) -> Probe | None:
        """Come to the moment."""
        if fault.moment == "at rest":
            self.clients.pause()
            self._turn_until(lambda: not self.clients.running, HUNG_S)
            return None
        self.clients.resume()
        probe = Probe(self.url, self.model)
        probe.start()
        if fault.moment == "in an answer":
            pieces = 1 + int(40 * fault.part)
            self._turn_until(lambda: probe.pieces >= pieces or bool(probe.outcome), 20.0, every_s=0.001)
        else:
            share = 0.6 * fault.part if fault.moment == "in a prompt" else 0.7 + 0.3 * fault.part
            self._turn_until(lambda: False, share * self.first_s, every_s=0.001)
        return probe

    def _stand_still(self, fault: Fault, pids: list[ProcessIdentity]) -> None:
        began_s = time.monotonic()
        for pid in pids:
            pid.kill(signal.SIGSTOP)
        try:
            if fault.stop_s > NOTICED_S and fault.victims != ("front",):
                self._turn_until(lambda: False, NOTICED_S)
                if all(pid.alive() for pid in pids) and self._healthy():
                    self._found(f"{fault}: /health says that it can serve")
            self._turn_until(lambda: False, fault.stop_s - (time.monotonic() - began_s))
        finally:
            for pid in pids:
                pid.kill(signal.SIGCONT)

    def _heal(self, fault: Fault, begun_s: float) -> None:
        served = 0

        def serves() -> bool:
            nonlocal served
            if not self._healthy():
                return False
            probe = Probe(self.url, self.model, prompt_tokens=100, tokens=4)
            probe.start()
            self._turn_until(lambda: not probe.is_alive(), HUNG_S)
            served = served + 1 if probe.outcome == "answered" else 0
            if probe.outcome == "answered" and not self.clients.running:
                self.first_s = probe.first_s or self.first_s
            return served >= 4  # each rank of the group has had its turn

        if not self._turn_until(serves, HEAL_S + fault.stop_s, every_s=0.1):
            self._found(f"{fault}: does not serve again after {time.monotonic() - begun_s:.0f} s")
        else:
            self.say(f"   serves after {time.monotonic() - begun_s:.1f} s")
        hung = self.clients.waiting_since(time.monotonic() - HUNG_S)
        if hung:
            self._found(f"{fault}: hang: {hung}")

    def _healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5.0, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    # -- at rest

    def _audit(self, when: str) -> None:
        self.clients.pause()
        problems: list[str] = ["nothing was looked at"]

        def quiet() -> bool:
            problems[:] = list(self._not_at_rest())
            return not problems

        if not self._turn_until(quiet, QUIET_S, every_s=0.25):
            for problem in problems:
                self._found(f"{when}: {problem}")
        for name, pid in self.launcher.processes().items():
            identity, held = ProcessIdentity.of(pid), Held.of(pid)
            if name == "launcher" or identity is None or held is None:
                continue
            first = self.first.setdefault((name, identity), held)
            more = (held.descriptors - first.descriptors, held.threads - first.threads)
            grown_mib = held.resident_mib - first.resident_mib
            if more[0] > DESCRIPTORS or more[1] > THREADS or grown_mib > MEMORY_MIB:
                self._found(f"{when}: {name} has {more[0]} descriptors, {more[1]} threads, {grown_mib:.0f} MiB more")
        for text in self._of_ended_lifetimes():
            self._found(f"{when}: a process of an ended lifetime: {text}")
        self.clients.resume()

    def _not_at_rest(self) -> Iterator[str]:
        """What is held although nobody asks for anything."""
        if self.clients.running:
            yield f"clients wait: {self.clients.waiting_since(time.monotonic())}"
        yield from not_at_rest(self.launcher)

    def _of_ended_lifetimes(self) -> Iterator[str]:
        present = {c.instance_id for c in self.launcher._components.values() if c.instance_id}
        for pid in descendants(os.getpid()):
            words = _command(pid).split()
            if "--instance-id" in words and words[words.index("--instance-id") + 1] not in present:
                yield " ".join(words)[:200]

    # -- within

    @staticmethod
    def _alive(pids: list[ProcessIdentity | None]) -> bool:
        return any(pid is not None and pid.alive() for pid in pids)

    def _turn_until(self, condition: Callable[[], bool], limit_s: float, *, every_s: float = 0.02) -> bool:
        """Let the launcher do its work until something holds; whether it did within the time."""
        end_s = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() >= end_s:
                return False
            self.launcher.turn(min(every_s, max(end_s - time.monotonic(), 0.0)))
        return True

    def _found(self, text: str) -> None:
        self.findings.append(text)
        self.say(f"FOUND: {text}")


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    return ""


def not_at_rest(launcher: Launcher) -> Iterator[str]:
    """What a service holds that is asked for nothing."""

    def get(url: str) -> Any:
        answer = httpx.get(url, headers=launcher.key_header, timeout=10.0, trust_env=False)
        return answer.raise_for_status().json()

    try:
        held = get(f"{launcher.front_url}/debug/reservations")
        if held["reservations"]:
            yield f"{len(held['reservations'])} reservations"
        for owner, url in launcher.urls().items():
            statistics = get(f"{url}/internal/statistics")
            if statistics["requests_live_now"]:
                yield f"{owner}: {statistics['requests_live_now']} requests live"
            for rank in statistics["ranks"]:
                for name in ("active_now", "quarantined_bytes_now", "links_away_now", "kv_blocks_used_now"):
                    if rank[name]:
                        yield f"{owner} rank {rank['rank']}: {name} {rank[name]}"
    except httpx.HTTPError as error:
        yield f"cannot be asked: {type(error).__name__}: {error}"


def left_in_shared_memory(before: Collection[str], within_s: float = 5.0) -> list[str]:
    """Names in /dev/shm that were not there before, that no process of the machine maps, and that nobody takes away.

    Others use the folder, too: what they map is theirs, and what they have only just made, or are about to remove, is so for
    a moment only. A folder is no shared memory.
    """
    end_s = time.monotonic() + within_s
    while (left := _unmapped(set(os.listdir("/dev/shm")) - set(before))) and time.monotonic() < end_s:
        time.sleep(0.05)
    return left


def _unmapped(names: set[str]) -> list[str]:
    for entry in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            maps = entry.read_text("utf-8", errors="replace")
            names = {name for name in names if name not in maps}
    return sorted(name for name in names if Path("/dev/shm", name).is_file())


def drive(
    seed: int, seconds: float, *, faults_max: int | None = None, say: Callable[[str], None] = print
) -> tuple[int, list[str]]:
    """A service under the faults of a seed. Returns how many there were, and what was found."""
    folder = Path(tempfile.mkdtemp(prefix="mf"))
    driver = Driver(seed, say)
    try:
        driver.run(seconds, folder, faults_max)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return driver.faults, driver.findings


def main(arguments: list[str] | None = None) -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long faults are made (s)")
    parser.add_argument("--seed", type=int, default=1, help="what is done to whom")
    parser.add_argument("--faults", type=int, help="at most so many")
    parser.add_argument("--schedule", type=int, metavar="N", help="only say what the first N faults of the seed are")
    options = parser.parse_args(arguments)
    if options.schedule is not None:
        for number, fault in zip(range(1, options.schedule + 1), schedule(options.seed)):
            print(f"{number}. {fault}")
        return 0
    began_s = time.monotonic()
    faults, findings = drive(
        options.seed, options.seconds, faults_max=options.faults, say=lambda line: print(line, flush=True)
    )
    print(f"seed {options.seed}: {faults} faults in {time.monotonic() - began_s:.0f} s, {len(findings)} findings")
    for finding in findings:
        print(f"  {finding}")
    return 1 if findings or not faults else 0


if __name__ == "__main__":
    sys.exit(main())
