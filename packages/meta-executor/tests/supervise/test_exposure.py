"""A listener that other machines may reach is warned about, and its address is said as it is."""

import socket
import tempfile
from pathlib import Path

import pytest

from meta_executor.config import service_config
from meta_executor.supervise.exposure import beyond_loopback, shown_url, warning
from meta_executor.supervise.launch import Launcher
from meta_executor.supervise.rundir import RunDirectory


@pytest.mark.parametrize(
    ("hostname", "beyond", "shown"),
    [
        ("127.0.0.1", False, "http://127.0.0.1:8000"),
        ("127.8.0.1", False, "http://127.0.0.1:8000"),
        ("::1", False, "http://127.0.0.1:8000"),
        ("0.0.0.0", True, "http://0.0.0.0:8000"),
        ("::", True, "http://[::]:8000"),
        ("", True, "http://0.0.0.0:8000"),
        ("10.1.2.3", True, "http://10.1.2.3:8000"),
        ("name.invalid", True, "http://name.invalid:8000"),
    ],
)
def test_addresses(hostname, beyond, shown):
    """Only the loopback is silent."""
    assert beyond_loopback(hostname) is beyond
    assert (warning("front", hostname) is not None) is beyond
    assert (warning("ctx-0", hostname) is not None) is beyond
    assert shown_url(hostname, "http://127.0.0.1:8000") == shown
    assert shown_url(hostname, "https://127.0.0.1:8000") == shown.replace("http", "https")


def test_what_is_amiss_with_a_front():
    """Keys and TLS are each missed by name; with both nothing is said, and an instance has neither."""
    texts = [
        warning("front", "0.0.0.0", keys=keys, tls=tls) for keys, tls in ((False, False), (False, True), (True, False))
    ]
    assert all("asks for no key" in text for text in texts[:2]) and "without TLS" in texts[2]
    assert warning("front", "0.0.0.0", keys=True, tls=True) is None
    assert "run's key crosses the network in clear" in warning("ctx-0", "0.0.0.0", keys=True, tls=True)


@pytest.mark.parametrize(("hostname", "devices"), [("127.0.0.1", "lo"), ("localhost", "lo"), ("0.0.0.0", None)])
def test_kv_data_stays_on_the_loopback_of_a_run_that_does(monkeypatch, hostname, devices):
    """UCX is told so, unless the person who starts it has said something else."""
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    launcher = Launcher(service_config({"context_servers": {"hostname": hostname}}), say=lambda _: None)
    launcher._directory = RunDirectory.create(Path(tempfile.mkdtemp(prefix="mx")), "1")
    launcher.run = launcher._write_spec()
    monkeypatch.delenv("UCX_TLS", raising=False)
    assert launcher._environment().get("UCX_NET_DEVICES") == devices
    assert launcher._environment()["UCX_TLS"] == "^sysv"
    monkeypatch.setenv("UCX_NET_DEVICES", "eth7")
    assert launcher._environment()["UCX_NET_DEVICES"] == "eth7"
    launcher._directory.remove()


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_no_variable_wins_over_the_transport_that_is_configured(monkeypatch, transport):
    """What a write's end proves depends on it: UCX must use what NIXL's backend is told and nothing else."""
    monkeypatch.setenv("UCX_TLS", "posix,tcp")
    config = {"context_servers": {"cache_transceiver_config": {"transport": transport}}}
    launcher = Launcher(service_config(config), say=lambda _: None)
    launcher._directory = RunDirectory.create(Path(tempfile.mkdtemp(prefix="mx")), "1")
    launcher.run = launcher._write_spec()
    assert launcher._environment().get("UCX_TLS") == ("posix,tcp" if transport == "auto" else None)
    launcher._directory.remove()


def test_a_name_counts_by_every_address(monkeypatch):
    """One address beyond the loopback is enough."""
    answers = [(socket.AF_INET, 1, 6, "", ("127.0.0.1", 0)), (socket.AF_INET, 1, 6, "", ("192.0.2.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answers)
    assert beyond_loopback("both")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answers[:1])
    assert not beyond_loopback("one")


@pytest.mark.parametrize(
    ("roles", "with_front", "warned"),
    [
        (("context", "generation"), True, ["ctx-0", "front"]),
        (("generation",), False, []),
    ],
)
def test_the_launcher_warns_of_what_it_starts(roles, with_front, warned):
    """Each listener beyond the loopback once, by name; nothing about what is not started."""
    lines = []
    service = service_config({"hostname": "0.0.0.0", "context_servers": {"hostname": "0.0.0.0"}})
    Launcher(service, say=lines.append, roles=roles, with_front=with_front)._warn_of_listeners()
    assert [line.split()[1] for line in lines] == warned
    assert all(line.startswith("WARNING") and "0.0.0.0" in line for line in lines)
