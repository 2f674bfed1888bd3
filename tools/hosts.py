"""Hosts of a test on one machine: network namespaces at one bridge, whose links can be slowed, cut and healed.

Each host has an address of its own in 10.77.0.0/24 and nothing else; the bridge stands in one more namespace, so nothing of
it is seen from outside. Wants root and iproute2. What a killed test left is removed by the next one that makes a network.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

_PREFIX = "mx-"
_LIMIT_S = 20.0
#: The interface of a host, by its name in there.
INTERFACE = "eth0"


class Unavailable(Exception):
    """Namespaces cannot be made here, and why."""


def _run(*words: str) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{words[0]}: {error}") from error
    if done.returncode != 0:
        raise Unavailable(f"{' '.join(words)}: {done.stderr.strip() or f'exit {done.returncode}'}")
    return done.stdout


class Network:
    """Hosts that reach each other until something is cut.

    Args:
        names: Of the hosts; each at most nine characters.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._hub = f"{_PREFIX}{os.getpid()}-hub"

    def __enter__(self) -> Network:
        """Make the namespaces.

        Raises:
            Unavailable: This cannot be done here.
        """
        _remove_left_over()
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def address(self, name: str) -> str:
        """Where a host is reached."""
        return f"10.77.0.{1 + self._names.index(name)}"

    def command(self, name: str, *words: str) -> list[str]:
        """The command line that runs something on a host."""
        return ["ip", "netns", "exec", self._namespace(name), *words]

    def slow(self, name: str, megabits_per_s: float) -> None:
        """Bound what a host receives."""
        self._in_hub("tc", "qdisc", "replace", "dev", name, "root", "tbf", "rate", f"{megabits_per_s}mbit",
                     "burst", "64kb", "latency", "200ms")  # fmt: skip

    def fast(self, name: str) -> None:
        """Let a host receive as fast as it can again."""
        self._in_hub("tc", "qdisc", "del", "dev", name, "root")

    def cut(self, one: str, other: str) -> None:
        """Between two hosts nothing passes any more; all others still reach both."""
        for name in (one, other):
            self._port(name, "type", "bridge_slave", "isolated", "on")

    def unplug(self, name: str) -> None:
        """A host reaches nobody any more."""
        self._port(name, "down")

    def heal(self) -> None:
        """Everybody reaches everybody."""
        for name in self._names:
            self._port(name, "up")
            self._port(name, "type", "bridge_slave", "isolated", "off")

    def received_bytes(self, name: str) -> int:
        """What a host has received so far."""
        shown: list[dict[str, Any]] = json.loads(self._in_hub("ip", "-s", "-j", "link", "show", "dev", name))
        return int(shown[0]["stats64"]["tx"]["bytes"])

    # -- within

    def _namespace(self, name: str) -> str:
        return f"{_PREFIX}{os.getpid()}-{name}"

    def _in_hub(self, *words: str) -> str:
        return _run("ip", "netns", "exec", self._hub, *words)

    def _port(self, name: str, *words: str) -> None:
        _run("ip", "-n", self._hub, "link", "set", "dev", name, *words)

    def _make(self) -> None:
        _run("ip", "netns", "add", self._hub)
        _run("ip", "-n", self._hub, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._hub, "link", "set", "bridge", "up")
        for name in self._names:
            space = self._namespace(name)
            _run("ip", "netns", "add", space)
            _run("ip", "-n", self._hub, "link", "add", name, "type", "veth", "peer", "name", INTERFACE, "netns", space)
            self._port(name, "master", "bridge")
            self._port(name, "up")
            _run("ip", "-n", space, "address", "add", f"{self.address(name)}/24", "dev", INTERFACE)
            _run("ip", "-n", space, "link", "set", "lo", "up")
            _run("ip", "-n", space, "link", "set", INTERFACE, "up")

    def _remove(self) -> None:
        for space in (*(self._namespace(name) for name in self._names), self._hub):
            with contextlib.suppress(Unavailable):  # it was not made
                _run("ip", "netns", "delete", space)


def _remove_left_over() -> None:
    """Namespaces of processes that have ended."""
    for line in _run("ip", "netns", "list").splitlines():
        space = line.split()[0] if line.strip() else ""
        owner = space.removeprefix(_PREFIX).partition("-")[0]
        if space.startswith(_PREFIX) and owner.isdigit() and not Path(f"/proc/{owner}").exists():
            with contextlib.suppress(Unavailable):  # somebody else removes it just now
                _run("ip", "netns", "delete", space)
