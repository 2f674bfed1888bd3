"""Rank processes for tests, driven step by step."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("nixl_peer.py")
#: The two transports whose classes were measured: name of the class, NixlConfig.tls.
TRANSPORTS = {"tcp": "tcp", "cma": None}


class PeerProcess:
    """One rank process; each method call is one command, answered before the next."""

    def __init__(self, instance: str, generation: str, rank: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.peer: list[Any] = [instance, generation, rank]
        self.address = ""
        self.base = 0

    def start(self, name: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, arguments]) + "\n")
        self.process.stdin.flush()

    def finish(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.peer} ended with {self.process.wait()}")
        good, answer = json.loads(line)
        if not good:
            raise RuntimeError(f"{self.peer}: {answer}")
        return answer

    def __call__(self, name: str, **arguments: Any) -> Any:
        self.start(name, **arguments)
        return self.finish()

    def init(self, tls: str | None, nbytes: int = 1 << 20, arena: int = 0, **nixl: Any) -> None:
        answer = self(
            "init",
            instance=self.peer[0],
            generation=self.peer[1],
            rank=self.peer[2],
            tls=tls,
            nbytes=nbytes,
            arena=arena,
            nixl=nixl,
        )
        self.address, self.base = answer["address"], answer["base"]

    def kill(self) -> None:
        """SIGKILL, and reaped: the process is gone when this returns."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    pass


@pytest.fixture
def make_peer() -> Iterator[Callable[..., PeerProcess]]:
    made: list[PeerProcess] = []

    def make(instance: str, generation: str, rank: int = 0) -> PeerProcess:
        made.append(PeerProcess(instance, generation, rank))
        return made[-1]

    yield make
    for peer in made:
        peer.close()


def both(*started: tuple[PeerProcess, str, dict[str, Any]]) -> list[Any]:
    """Run one command in each process at the same time."""
    for peer, name, arguments in started:
        peer.start(name, **arguments)
    return [peer.finish() for peer, _, _ in started]


@pytest.fixture
def together() -> Callable[..., list[Any]]:
    return both


@pytest.fixture
def session_pair(
    make_peer: Callable[..., PeerProcess],
) -> Callable[..., tuple[PeerProcess, PeerProcess]]:
    """(receiver, sender), introduced to each other."""

    def make(
        transport: str,
        *,
        nbytes: int = 1 << 20,
        arena: int = 0,
        config: dict[str, Any] | None = None,
        nixl: dict[str, Any] | None = None,
    ) -> tuple[PeerProcess, PeerProcess]:
        receiver, sender = make_peer("gen", "g1"), make_peer("ctx", "c1", 1)
        tls = TRANSPORTS[transport]
        for peer, role in ((receiver, "receiver"), (sender, "sender")):
            peer.init(tls, nbytes, arena, **(nixl or {}))
            peer("session", role=role, config=config or {})
        receiver("connect", peer=sender.peer, address=sender.address)
        receiver("introduce", peer=sender.peer)
        for _ in range(20):
            both((receiver, "poll", {"seconds": 0.02}), (sender, "poll", {"seconds": 0.02}))
            if receiver("statistics").get("frames_received", 0):
                break
        return receiver, sender

    return make
