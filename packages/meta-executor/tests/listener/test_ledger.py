"""Accounts of a listener: bounds in all and per client, and nothing kept of clients that have left."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from meta_executor.config import HttpConfig
from meta_executor.listener.bounds import Ledger, client_of


@pytest.mark.parametrize(
    ("host", "client"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        (None, ""),
        ("nonsense", "nonsense"),
    ],
)
def test_a_client_is_an_address_or_a_network(host: str | None, client: str) -> None:
    """One host can take every address of its IPv6 network."""
    assert client_of(host) == client


def test_refusals_say_whose_bound_it_was() -> None:
    """In all 503, the client's own 429; a refused connection does not count, refused bytes count until they are let go."""
    ledger = Ledger(
        HttpConfig(
            connections_max=3, connections_per_client_max=2, reading_bytes_max=100, reading_bytes_per_client_max=60
        )
    )
    assert ledger.connect("a") is None and ledger.connect("a") is None
    refusal = ledger.connect("a")
    assert refusal is not None and (refusal.status, refusal.code) == (429, "too_many_connections")
    assert ledger.connect("b") is None
    refusal = ledger.connect("b")
    assert refusal is not None and refusal.status == 503 and refusal.retry_after_s
    ledger.disconnect("a")
    assert ledger.connect("b") is None
    assert ledger.read("a", 60) is None
    refusal = ledger.read("a", 1)
    assert refusal is not None and (refusal.status, refusal.code) == (429, "too_many_bytes")
    refusal = ledger.read("b", 50)
    assert refusal is not None and refusal.status == 503
    ledger.release("a", 61)
    assert ledger.read("b", 10) is None
    assert ledger.refused == Counter(too_many_connections=2, too_many_bytes=2)


def test_handshakes_have_the_bounds_of_connections() -> None:
    """In all and per client, beside the connections; one that may not begin does not count."""
    ledger = Ledger(HttpConfig(connections_max=3, connections_per_client_max=2))
    assert ledger.connect("a") is None and ledger.connect("a") is None
    assert [ledger.shake(client) for client in "aaabb"] == [True, True, False, True, False]
    assert (ledger.handshakes, ledger.refused["too_many_handshakes"]) == (3, 2)
    ledger.shaken("a")
    assert ledger.shake("b")
    for client in "abb":
        ledger.shaken(client)
    assert ledger.handshakes == 0 and not ledger._handshakes


@pytest.mark.parametrize("seed", range(10))
def test_nothing_is_kept_of_those_who_left(seed: int) -> None:
    """Random comings and goings: totals agree, and an empty listener remembers no address."""
    draw = random.Random(seed)
    ledger = Ledger(HttpConfig(connections_max=20, connections_per_client_max=8))
    here: list[tuple[str, int]] = []
    for _ in range(500):
        if here and draw.random() < 0.5:
            client, held = here.pop(draw.randrange(len(here)))
            ledger.release(client, held)
            ledger.disconnect(client)
        else:
            client = f"c{draw.randrange(5)}"
            if ledger.connect(client) is None:
                held = draw.randrange(100)
                assert ledger.read(client, held) is None
                here.append((client, held))
        assert ledger.connections == len(here) <= 20
        assert ledger.reading_bytes == sum(held for _, held in here)
    for client, held in here:
        ledger.release(client, held)
        ledger.disconnect(client)
    assert (ledger.connections, ledger.reading_bytes) == (0, 0)
    assert not ledger._connections and not ledger._reading_bytes
