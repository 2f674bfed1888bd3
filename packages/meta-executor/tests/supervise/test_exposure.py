"""A listener that other machines may reach is warned about, and its address is said as it is."""

import socket

import pytest

from meta_executor.config import service_config
from meta_executor.supervise.exposure import beyond_loopback, shown_url, warning
from meta_executor.supervise.launch import Launcher


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
