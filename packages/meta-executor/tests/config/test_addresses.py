"""Where an instance's sockets listen and by which address others are told of them: a table for each."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from meta_executor import addresses
from meta_executor.addresses import Place, advertised_url, is_host, is_wildcard, place_of
from meta_executor.api.instance import door_place
from meta_executor.config import ConfigError, InstanceSpec, Role, RunSpec, ServiceConfig, service_config
from meta_executor.executor.control import SenderControl
from meta_executor.preflight import check_service
from meta_executor.rank.assemble import control_place

SOCKET = Path("/run/x")
OWN = Place("ipc:///run/x")


@pytest.mark.parametrize(
    ("hostname", "advertised", "place"),
    [
        ("127.0.0.1", None, OWN),
        ("localhost", None, OWN),
        ("::1", None, OWN),
        ("0.0.0.0", None, OWN),
        ("", None, OWN),
        ("::", None, OWN),
        ("127.0.0.2", None, Place("tcp://127.0.0.2:0", "127.0.0.2")),
        ("10.1.2.3", None, Place("tcp://10.1.2.3:0", "10.1.2.3")),
        ("10.1.2.3", "gpu7.example", Place("tcp://10.1.2.3:0", "gpu7.example")),
        ("0.0.0.0", "10.1.2.3", Place("tcp://0.0.0.0:0", "10.1.2.3")),
        ("", "10.1.2.3", Place("tcp://0.0.0.0:0", "10.1.2.3")),
        ("fd00::7", None, Place("tcp://[fd00::7]:0", "fd00::7")),
        ("::", "fd00::7", Place("tcp://[::]:0", "fd00::7")),
    ],
)
def test_where_a_socket_listens(hostname: str, advertised: str | None, place: Place) -> None:
    """In the run folder where peers are on the same host, else at the hostname alone; announced by what others reach."""
    assert place_of(hostname, advertised, SOCKET) == place


def test_a_name_is_bound_by_its_ipv4_address_and_announced_as_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeroMQ does not bind to names; what others are told stays what was configured."""
    found = [
        (socket.AF_INET6, socket.SOCK_STREAM, 0, "", ("fd00::7", 0, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("10.1.2.3", 0)),
    ]
    monkeypatch.setattr(addresses.socket, "getaddrinfo", lambda *_, **__: found)
    assert place_of("gpu7", None, SOCKET) == Place("tcp://10.1.2.3:0", "gpu7")
    monkeypatch.setattr(addresses.socket, "getaddrinfo", lambda *_, **__: found[:1])
    assert place_of("gpu7", None, SOCKET) == Place("tcp://[fd00::7]:0", "gpu7")


@pytest.mark.parametrize(
    ("place", "bound", "announced"),
    [
        (OWN, "ipc:///run/x", "ipc:///run/x"),
        (Place("tcp://10.1.2.3:0", "10.1.2.3"), "tcp://10.1.2.3:4711", "tcp://10.1.2.3:4711"),
        (Place("tcp://0.0.0.0:0", "gpu7"), "tcp://0.0.0.0:4711", "tcp://gpu7:4711"),
        (Place("tcp://[::]:0", "fd00::7"), "tcp://[::]:4711", "tcp://[fd00::7]:4711"),
    ],
)
def test_what_others_are_told(place: Place, bound: str, announced: str) -> None:
    """The port that was got, at the host that they reach."""
    assert place.announced(bound) == announced


@pytest.mark.parametrize(
    ("hostname", "advertised", "url", "told"),
    [
        ("127.0.0.1", None, "http://127.0.0.1:8101", "http://127.0.0.1:8101"),
        ("0.0.0.0", None, "http://127.0.0.1:8101", "http://127.0.0.1:8101"),
        ("0.0.0.0", "10.1.2.3", "http://127.0.0.1:8101", "http://10.1.2.3:8101"),
        ("", "gpu7", "http://127.0.0.1:8101", "http://gpu7:8101"),
        ("::", "fd00::7", "http://[::1]:8101", "http://[fd00::7]:8101"),
        ("gpu7", None, "http://10.1.2.3:8101", "http://gpu7:8101"),
        ("127.0.0.2", None, "http://127.0.0.2:8101", "http://127.0.0.2:8101"),
    ],
)
def test_what_is_registered(hostname: str, advertised: str | None, url: str, told: str) -> None:
    """Never the loopback of an instance that listens everywhere and has an address."""
    assert advertised_url(hostname, advertised, url) == told


@pytest.mark.parametrize(
    ("hostname", "wildcard"),
    [
        *(
            (name, True)
            for name in ("", "0.0.0.0", "0", "0x0", "0.0", "::", "::0", "0:0::0", "::%lo", "::ffff:0.0.0.0")
        ),
        *((name, False) for name in ("127.0.0.1", "10.0.0.0", "::1", "fd00::", "localhost", "a", "::ffff:1.2.3.4")),
    ],
)
def test_every_spelling_of_every_address(hostname: str, wildcard: bool) -> None:
    """As the system reads it, without looking a name up."""
    assert is_wildcard(hostname) is wildcard


@pytest.mark.parametrize(
    ("text", "host"),
    [
        *((text, True) for text in ("10.1.2.3", "gpu7.example", "a-b_c", "fd00::7", "fe80::1%eth0")),
        *((text, False) for text in ("", "a:1", "[fd00::7]", "http://a", "a b", "a/b", "a\n", "ż", "*")),
    ],
)
def test_what_can_stand_in_an_address(text: str, host: bool) -> None:
    assert is_host(text) is host


KEY = {"key_file": "k"}


@pytest.mark.parametrize("role", ["context_servers", "generation_servers"])
@pytest.mark.parametrize(
    ("section", "whole", "field", "part"),
    [
        ({"hostname": "0.0.0.0"}, KEY, "hostname", "set {role}.advertised_host"),
        ({"hostname": "::"}, KEY, "hostname", "set {role}.advertised_host"),
        ({"hostname": ""}, KEY, "hostname", "set {role}.advertised_host"),
        ({"hostname": "0.0.0.0", "advertised_host": "0"}, KEY, "advertised_host", "'0'"),
        ({"hostname": "10.1.2.3", "advertised_host": "::"}, {}, "advertised_host", "'::'"),
        ({"hostname": "10.1.2.3", "advertised_host": ""}, {}, "advertised_host", "''"),
        ({"hostname": "10.1.2.3", "advertised_host": "a:1"}, {}, "advertised_host", "'a:1'"),
        ({"advertised_host": "10.1.2.3"}, {}, "hostname", "'127.0.0.1' is reached from its own host only"),
    ],
)
def test_an_address_that_nobody_could_call_is_refused(
    role: str, section: dict[str, str], whole: dict[str, str], field: str, part: str
) -> None:
    """By the role's field, before anything starts."""
    with pytest.raises(ConfigError) as error:
        service_config({**whole, role: section})
    assert error.value.field == f"{role}.{field}"
    assert part.format(role=role) in str(error.value)


@pytest.mark.parametrize(
    ("section", "whole"),
    [
        ({"hostname": "0.0.0.0"}, {}),
        ({"hostname": "0.0.0.0", "advertised_host": "gpu7"}, KEY),
        ({"hostname": "10.1.2.3"}, KEY),
        ({"hostname": "0.0.0.0", "urls": ["http://10.0.0.1:1"]}, KEY),
    ],
)
def test_an_address_that_others_could_call_is_taken(section: dict[str, Any], whole: dict[str, str]) -> None:
    """A run that one command starts may listen everywhere; its parts need no address of each other but their own host's."""
    service_config({**whole, "context_servers": section})


def test_an_address_of_an_instance_is_not_one_of_the_whole_service() -> None:
    """Next to the front's ``hostname`` it would look like the front's."""
    with pytest.raises(ConfigError, match="advertised_host: unknown key"):
        service_config({"advertised_host": "gpu7"})


def run_of(service: ServiceConfig, role: Role) -> tuple[RunSpec, InstanceSpec]:
    spec = InstanceSpec(owner_id="o", role=role, index=0, config=service.instance(role), port=0)
    return RunSpec(run_id="r", run_dir="/run", launcher_pid=1, service=service, instances=(spec,)), spec


def test_stream_and_kv_control_follow_one_rule() -> None:
    """Each in a socket of its own; nobody calls a generation rank, so nothing of KV control listens beyond its run folder."""
    apart = {"hostname": "0.0.0.0", "advertised_host": "10.1.2.3"}
    there = service_config({"context_servers": apart, "generation_servers": apart})
    place = Place("tcp://0.0.0.0:0", "10.1.2.3")
    assert door_place(*run_of(there, "context")) == door_place(*run_of(there, "generation")) == place
    assert control_place(*run_of(there, "context"), 1) == place
    assert control_place(*run_of(there, "generation"), 1) == Place("ipc:///run/ipc/o.1.c")
    here = service_config({})
    assert door_place(*run_of(here, "context")) == Place("ipc:///run/ipc/o.s")
    assert control_place(*run_of(here, "context"), 1) == Place("ipc:///run/ipc/o.1.c")


def test_a_listener_is_where_its_place_says_and_nowhere_else() -> None:
    """The same port of another address of the loopback refuses."""
    place = place_of("127.0.0.2", None, SOCKET)
    sender = SenderControl(place.address, bytes(32), lambda: None)
    sender.start()
    try:
        told = place.announced(sender.address)
        assert told == sender.address and told.startswith("tcp://127.0.0.2:")
        port = int(told.rpartition(":")[2])
        socket.create_connection(("127.0.0.2", port), 5.0).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 5.0)
    finally:
        sender.close()


@pytest.mark.parametrize("port", [0, 8101])
def test_only_what_is_started_here_must_be_an_address_of_this_host(port: int) -> None:
    """Hosts share one configuration: the other role's address is another host's (192.0.2.0/24 is nobody's)."""
    service = service_config(
        {"port": 0, "engine": {"kind": "synthetic"}, "generation_servers": {"hostname": "192.0.2.1", "port": port}}
    )
    check_service(service, with_front=False, roles=("context",))
    with pytest.raises(ConfigError, match=r"generation_servers.*192\.0\.2\.1") as error:
        check_service(service, with_front=False, roles=("generation",))
    assert error.value.field == f"generation_servers.{'port' if port else 'hostname'}"


def test_a_name_without_an_address_is_told_by_its_section() -> None:
    service = service_config({"port": 0, "context_servers": {"hostname": "no.such.host.invalid"}})
    with pytest.raises(ConfigError) as error:
        check_service(service, with_front=False, roles=("context",))
    assert error.value.field == "context_servers.hostname"
