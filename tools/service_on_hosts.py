"""A service on three hosts that meet in an etcd, for tests: the network, the etcd in it, and the parts with what they say."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from hosts import INTERFACE, Network
from meta_executor import wire

#: Requests sent from a host: (address, bodies on stdin) to what came of each, on stdout.
CLIENT = """
import concurrent.futures, json, sys, time
import httpx

def ask(body):
    began = time.monotonic()
    try:
        answer = httpx.post(sys.argv[1] + "/v1/completions", json=body, timeout=120.0, trust_env=False)
        told = {"status": answer.status_code, **answer.json()}
    except httpx.HTTPError as error:
        told = {"status": 0, "error": repr(error)}
    return told | {"took_s": time.monotonic() - began}

bodies = json.load(sys.stdin)
with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
    json.dump(list(pool.map(ask, bodies)), sys.stdout)
"""

#: What an instance shows to who has the key: (address, name of the header, key), on stdout.
LOOK = """
import sys
import httpx

address, name, key = sys.argv[1:]
sys.stdout.write(httpx.get(address, headers={name: key}, timeout=30.0, trust_env=False).raise_for_status().text)
"""


def body(prompt: str, max_tokens: int = 16) -> dict[str, Any]:
    """A request."""
    return {"model": "any", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0}


class Part:
    """A command on a host, and what it says."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **environment},
        )  # fmt: skip
        self.said: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as told:
            for line in told:
                with self._news:
                    self.said.append(line)
                    self._news.notify_all()
        with self._news:
            self.said.append("")
            self._news.notify_all()

    def address(self, owner: str) -> str:
        """Where it answers, as soon as it does."""
        words = f"{owner}: ready at "
        with self._news:
            while True:
                for line in self.said:
                    if line.startswith(words):
                        return line.split()[3]
                if self.said[-1:] == [""]:
                    raise RuntimeError("it ended before it was ready:\n" + "".join(self.said))
                self._news.wait()

    def end(self) -> int:
        """Ctrl-C; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        code = self.process.wait()
        self._reader.join()
        return code


class Site:
    """A network, an etcd in it, and the parts of a service.

    Args:
        network: Of the hosts ``ctx``, ``gen`` and ``front``.
        folder: For everything that is written, with a short path.
        etcd: The program.
    """

    def __init__(self, network: Network, folder: Path, etcd: str) -> None:
        self.network = network
        self.folder = folder
        self.parts: list[Part] = []
        self._program = etcd
        self._etcd: subprocess.Popen[bytes] | None = None
        key = folder / "key"
        key.write_text(secrets.token_hex(32))
        key.chmod(0o600)
        self._key = key.read_text()

    def start_etcd(self) -> str:
        """On the front's host. Returns its address; there may be some time until it answers."""
        client, peer = (f"http://{self.network.address('front')}:{port}" for port in (2379, 2380))
        with (self.folder / "etcd.log").open("ab") as log:
            self._etcd = subprocess.Popen(
                self.network.command(
                    "front", self._program, "--data-dir", str(self.folder / "etcd"), "--listen-client-urls", client,
                    "--advertise-client-urls", client, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                    "--initial-cluster", f"default={peer}",
                ),
                stdout=log, stderr=log,
            )  # fmt: skip
        return client

    def kill_etcd(self) -> None:
        """With SIGKILL; its data stays."""
        if self._etcd is not None:
            self._etcd.kill()
            self._etcd.wait()
            self._etcd = None

    def configured(self, transceiver: dict[str, Any] | None = None, **more: Any) -> None:
        """One configuration for all parts; starts the etcd that it names."""
        pool = {"tokens_per_block": 16, "max_tokens": 16384}
        transceiver = {"transport": "tcp", **(transceiver or {})}
        settings = {
            "port": 0,
            "key_file": str(self.folder / "key"),
            "served_model_name": "any",
            "discovery": {"store": self.start_etcd(), "lease_s": 3.0},
            "context_servers": {
                "hostname": self.network.address("ctx"),
                "pipeline_parallel_size": 2,
                "kv_cache_config": pool,
                "cache_transceiver_config": {
                    **transceiver,
                    "enable_async_terminal_agreement": True,
                    "enable_async_readiness_agreement": True,
                },
            },
            "generation_servers": {
                "hostname": self.network.address("gen"),
                "tensor_parallel_size": 1,
                "kv_cache_config": pool,
                "cache_transceiver_config": transceiver,
            },
            **more,
        }
        for name in ("ctx", "gen", "front"):
            text = yaml.safe_dump(settings | {"run_dir": str(self.folder / name)})
            (self.folder / f"{name}.yaml").write_text(text)

    def start(self, name: str, *words: str) -> Part:
        """A command of the service on a host."""
        command = self.network.command(
            name, sys.executable, "-m", "meta_executor", *words, str(self.folder / f"{name}.yaml")
        )
        self.parts.append(Part(command, {"UCX_NET_DEVICES": INTERFACE}))
        return self.parts[-1]

    def serve(self) -> str:
        """Start everything. Returns where the front answers, on its own host."""
        instances = [self.start("ctx", "serve", "context"), self.start("gen", "serve", "generation")]
        self.urls = [part.address(owner) for part, owner in zip(instances, ("ctx-0", "gen-0"), strict=True)]
        self.front = self.start("front", "front").address("front")
        return self.front

    def ask(self, *bodies: dict[str, Any]) -> list[dict[str, Any]]:
        """What came of these requests, all sent at once from the front's host."""
        return self.asking(*bodies)()

    def asking(self, *bodies: dict[str, Any]) -> Callable[[], list[dict[str, Any]]]:
        """Send these requests. Returns what waits for what came of them."""
        client = subprocess.Popen(
            self.network.command("front", sys.executable, "-c", CLIENT, self.front), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert client.stdin is not None and client.stdout is not None
        with client.stdin as asked:
            json.dump(bodies, asked)
        answers = client.stdout

        def result() -> list[dict[str, Any]]:
            with answers:
                told = answers.read()
            if client.wait() != 0:
                raise RuntimeError(f"the client left with exit {client.returncode}")
            found: list[dict[str, Any]] = json.loads(told)
            return found

        return result

    def blocks_used(self) -> list[int]:
        """KV blocks of each rank that are not free."""
        return [rank["kv_blocks_used_now"] for url in self.urls for rank in self.statistics(url)["ranks"]]

    def statistics(self, url: str) -> Any:
        """An instance's counters."""
        words = (sys.executable, "-c", LOOK, f"{url}/internal/statistics", wire.KEY_HEADER, self._key)
        told = subprocess.run(self.network.command("front", *words), capture_output=True, text=True, check=True)
        return json.loads(told.stdout)

    def wait_unused(self, until_s: float) -> None:
        """Blocks are counted now and then: right after an answer some may still be called used.

        Raises:
            TimeoutError: Some still are.
        """
        while any(used := self.blocks_used()):
            if time.monotonic() > until_s:
                raise TimeoutError(f"KV blocks in use, by rank: {used}")
            time.sleep(0.1)

    def end(self) -> None:
        """Everything leaves by itself, the newest first.

        Raises:
            RuntimeError: Something left with another exit code than 0.
        """
        codes = [part.end() for part in reversed(self.parts)]
        if any(codes):
            raise RuntimeError(
                f"exit codes {codes}:\n" + "\n".join("".join(part.said) for part in reversed(self.parts))
            )
        self.parts.clear()

    def remove(self) -> None:
        """What a failed test has left."""
        for part in self.parts:
            part.process.kill()
            part.end()
        self.kill_etcd()
