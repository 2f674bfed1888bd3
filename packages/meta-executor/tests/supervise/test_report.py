"""The launcher's socket: what is not understood is refused by name, and ends nothing."""

from __future__ import annotations

import json
import random
import socket
from pathlib import Path

import pytest

from meta_executor.config import service_config
from meta_executor.supervise.launch import Launcher
from meta_executor.supervise.report import REFUSALS_KEPT_MAX, SOCKET_NAME, Listener, Reporter, Started

GOOD = {
    "status": {"phase": "loading"},
    "started": {"rank_pid": 7, "rank_start_ticks": 1, "guard_start_ticks": 2, "parent_pid": 3},
    "ready": {"url": "http://[::1]:8000", "instance_id": "a"},
    "orphaned": {"what": "mpiexec", "gone_pid": 9},
    "exited": {"rank_pid": 7, "status": -9, "text": "signal SIGKILL"},
    "memory": {"rss_bytes": 1, "kv_bytes": 2},
}


class Wire:
    def __init__(self, folder: Path) -> None:
        self.listener = Listener(folder)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.connect(str(folder / SOCKET_NAME))

    def tell(self, data: object) -> list[str]:
        """Send; nothing of it is understood. Why."""
        self.socket.send(data if isinstance(data, bytes) else json.dumps(data).encode())
        assert self.listener.receive() == []
        return self.listener.refusals()


@pytest.fixture
def wire(tmp_path: Path):
    made = Wire(tmp_path)
    yield made
    made.socket.close()
    made.listener.close()


def message(event: str, fields: object, **changed: object) -> dict[str, object]:
    return {"owner_id": "ctx-0", "rank": 1, "pid": 5, "event": event, "fields": fields, **changed}


def test_every_event_is_understood(tmp_path: Path) -> None:
    """As the reporter sends it."""
    listener, reporter = Listener(tmp_path), Reporter(tmp_path, "ctx-0", 1)
    for event, fields in GOOD.items():
        assert reporter.send(event, **fields)
    got = listener.receive()
    assert [one.event for one in got] == list(GOOD)
    assert isinstance(got[1].told(), Started) and not listener.refusals()
    reporter.close()
    listener.close()


@pytest.mark.parametrize("event", ["started", "ready", "orphaned", "exited", "memory"])
def test_a_missing_or_wrong_field_is_refused_by_name(wire: Wire, event: str) -> None:
    """Each field of each event: left out (where it is needed), of another type, and beyond its bound."""
    for name in GOOD[event]:
        if name not in ("parent_pid", "instance_id"):
            (why,) = wire.tell(message(event, {k: v for k, v in GOOD[event].items() if k != name}))
            assert f"'{event}' of 'ctx-0' rank 1 was refused" in why and name in why
        for wrong in ({}, None, 2**70, -(2**70), "x" * 600):
            (why,) = wire.tell(message(event, {**GOOD[event], name: wrong}))
            assert name in why, why
            wire.listener.refused_count = 0


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\xff", b"{", b"[" * 16000, b"7", b"[]", {}, message("what", {}), message("status", []),
        message("status", {}, pid=0),
        message("status", {}, rank="x"), message("status", {}, pid=2**80), message("status", {}, owner_id="o" * 1000),
        message("ready", {"url": "http://user@host:1"}), message("ready", {"url": "file:///etc"}),
        message("ready", {"url": "http://h:1\x1b[2J"}), message("status", {"phase": 1}),
    ],
)  # fmt: skip
def test_what_is_no_message_is_refused(wire: Wire, data: object) -> None:
    """One bounded line without control characters."""
    (why,) = wire.tell(data)
    assert why.isprintable() and len(why) < 700


def test_a_flood_is_counted_and_not_kept(wire: Wire) -> None:
    """The first reasons are kept, the number of all."""
    for _ in range(50):
        wire.socket.send(b"?")
        wire.listener.receive()
    assert (len(wire.listener.refusals()), wire.listener.refused_count) == (REFUSALS_KEPT_MAX, 50)


def test_the_launcher_outlives_any_datagram(wire: Wire) -> None:
    """Random events with random fields for every owner: nothing raises in the launcher, and nobody is signalled."""
    draw = random.Random(7)
    lines: list[str] = []
    launcher = Launcher(service_config({}), say=lines.append)
    values = [0, 1, -1, 2**22, 2**70, "", "x", "http://a:1", None, True, 1.5, [], {}, "\x00\n"]
    for _ in range(500):
        event = draw.choice([*GOOD, "other"])
        fields = {
            name: draw.choice([good, *values]) for name, good in GOOD.get(event, {}).items() if draw.random() < 0.9
        }
        owner = draw.choice(["ctx-0", "front", "gen-0", ""])
        wire.socket.send(json.dumps(message(event, fields, owner_id=owner)).encode())
        for one in wire.listener.receive():
            launcher._on_message(one)
    assert wire.listener.refused_count > 100
