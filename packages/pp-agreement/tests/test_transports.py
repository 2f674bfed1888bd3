"""One conformance suite for all transports, and a whole life over each."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time

import pytest

from pp_agreement import (
    Agreement,
    AgreementConfig,
    Committed,
    ConfigurationError,
    DeathVerdict,
    Domain,
    Fault,
    InProcessNetwork,
    Outcome,
    PidWatch,
    TransportError,
    WouldBlock,
    ZmqTransport,
    verify,
)
from pp_agreement.testing import NotConforming, check_transport

WINDOW = 3


def in_process(domain, _tmp_path):
    network = InProcessNetwork(domain, WINDOW)
    return network.transport, WINDOW


def zmq(domain, tmp_path, **options):
    addresses = {rank: f"ipc://{tmp_path}/{rank}.sock" for rank in domain.ranks}
    # Both high-water marks, and what the kernel's local socket holds of frames this small.
    return (lambda rank: ZmqTransport(domain, rank, addresses, window=WINDOW, **options)), 4000


def zmq_encrypted(domain, tmp_path):
    return zmq(domain, tmp_path, key=b"sixteen bytes...")


MAKERS = [in_process, zmq, zmq_encrypted]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("domain", [Domain(1, (0, 1)), Domain(2, (5, 3, 9), coordinator_rank=5)], ids=["2", "3"])
def test_conformance(make, domain, tmp_path):
    factory, bound = make(domain, tmp_path)
    barrier = threading.Barrier(domain.size, timeout=60)
    failures = []

    def member(rank):
        try:
            check_transport(factory(rank), domain, rank, sync=barrier.wait, frames_outstanding_max=bound)
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=member, args=(rank,)) for rank in domain.ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    broken = [f for f in failures if not isinstance(f, threading.BrokenBarrierError)]
    assert not failures, broken


def test_conformance_notices_a_transport_that_reorders(monkeypatch):
    monkeypatch.setattr("pp_agreement.testing._conformance._LIMIT_S", 2.0)
    domain = Domain(1, (0, 1))
    network = InProcessNetwork(domain, WINDOW)
    barrier = threading.Barrier(2, timeout=20)
    failures = []

    def member(rank):
        transport = network.transport(rank)
        if rank == 1:
            honest = transport.receive
            transport.receive = lambda n: type(honest(0))(honest(n).frames[::-1], 0)
        try:
            check_transport(transport, domain, rank, sync=barrier.wait, frames_outstanding_max=WINDOW)
        except NotConforming as error:
            failures.append(str(error))
            barrier.abort()
        except threading.BrokenBarrierError:
            pass

    threads = [threading.Thread(target=member, args=(rank,), daemon=True) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert any("order" in f for f in failures)


@pytest.mark.parametrize("make", MAKERS)
def test_a_whole_life(make, tmp_path):
    """Flood, drain, clean close; evidence compared."""
    domain = Domain(3, (0, 1, 2))
    factory, _bound = make(domain, tmp_path)
    evidence, clean = {}, []

    def member(rank):
        with Agreement(domain, rank, factory(rank), AgreementConfig(heartbeat_s=0.1)) as agreement:
            for number in range(1, 51):
                key = agreement.admit(number, number, ready=False)
                agreement.vote_terminal(key, Outcome.COMPLETED)
            if agreement.is_scheduler:
                agreement.start_drain(50)
            assert agreement.drain(30).drained
            evidence[rank] = agreement.evidence()
            clean.append(agreement.close(10))

    threads = [threading.Thread(target=member, args=(rank,)) for rank in domain.ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert clean == [True] * 3
    assert verify(evidence.values()) == ()


def _zmq_rank(addresses, rank, ready, votes):
    domain = Domain(3, (0, 1, 2))
    agreement = Agreement(domain, rank, ZmqTransport(domain, rank, addresses))
    agreement.open()
    key = agreement.admit(7, 1, ready=False)
    if votes:
        agreement.vote_terminal(key, Outcome.COMPLETED)
    while True:
        agreement.poll()
        if agreement._core.silence.spoken:
            ready.set()
        time.sleep(0.001)


def test_a_killed_rank_is_dead_over_zmq(tmp_path):
    """SIGKILL of a follower: the coordinator has evidence at once, tells the other follower, and nothing is committed."""
    domain = Domain(3, (0, 1, 2))
    addresses = {0: f"ipc://{tmp_path}/0.sock", 1: f"ipc://{tmp_path}/1.sock"}
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    victim = context.Process(target=_zmq_rank, args=(addresses, 1, ready, False))
    victim.start()
    others = [Agreement(domain, r, ZmqTransport(domain, r, addresses)) for r in (0, 2)]
    try:
        for agreement in others:
            agreement.open()
            agreement.vote_terminal(agreement.admit(7, 1, ready=False), Outcome.COMPLETED)
        until_s = time.monotonic() + 60
        while not ready.is_set():
            assert time.monotonic() < until_s
            for agreement in others:
                assert not any(isinstance(e, Fault) for e in agreement.poll())
            time.sleep(0.001)
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        events = []
        while not all(a.stopped for a in others):
            assert time.monotonic() < until_s
            for agreement in others:
                events.extend(agreement.poll())
        assert not any(isinstance(e, Committed) for e in events)
        verdicts = [e for e in events if isinstance(e, DeathVerdict)]
        assert {v.suspect_rank for v in verdicts} == {1} and len(verdicts) == 2
        assert others[0].open_rounds == 1
    finally:
        for agreement in others:
            agreement.close(0.0)
        if victim.is_alive():
            victim.kill()


def test_pidfd_is_evidence():
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=time.sleep, args=(600,))
    child.start()
    with PidWatch({4: child.pid, 5: os.getpid()}) as watch:
        assert watch.dead() == ()
        child.kill()
        child.join()
        until_s = time.monotonic() + 10
        found = ()
        while not found:
            assert time.monotonic() < until_s
            found = watch.dead()
        assert [rank for rank, _ in found] == [4] and watch.dead() == ()


def test_zmq_addresses_are_checked(tmp_path):
    domain = Domain(1, (0, 1))
    with pytest.raises(ConfigurationError, match="addresses"):
        ZmqTransport(domain, 0, {})
    with pytest.raises(ConfigurationError, match="key"):
        ZmqTransport(domain, 0, {0: "tcp://127.0.0.1:5"})
    with pytest.raises(ConfigurationError, match="window"):
        ZmqTransport(domain, 0, {0: f"ipc://{tmp_path}/x"}, window=0)
    taken = ZmqTransport(domain, 1, {0: f"ipc://{tmp_path}/none/such/folder"})
    with pytest.raises(TransportError, match="rank 0"):
        taken.open((0,), 4096)
    taken.close(False)


@pytest.mark.parametrize("address", ["inproc://x", "udp://x", "", None, 5, b"ipc://x"])
def test_only_addresses_that_two_processes_can_share(address):
    """inproc:// would need a common context: it would never connect, and nobody would be told."""
    with pytest.raises(ConfigurationError, match="addresses"):
        ZmqTransport(Domain(1, (0, 1)), 0, {0: address})


@pytest.mark.parametrize("key", ["sixteen letters.", b"short", 16])
def test_a_key_is_bytes(key, tmp_path):
    with pytest.raises(ConfigurationError, match="key"):
        ZmqTransport(Domain(1, (0, 1)), 0, {0: f"ipc://{tmp_path}/x"}, key=key)


@pytest.mark.parametrize("key", [None, b"sixteen bytes..."])
def test_a_stranger_at_the_socket_is_no_death(key, tmp_path):
    """Only the peer's own end of file is evidence of its death: whoever else connects and leaves, before or after it, stops
    nobody."""
    domain = Domain(1, (0, 1))
    path = f"{tmp_path}/0.sock"
    hub = ZmqTransport(domain, 1, {0: f"ipc://{path}"}, key=key)
    peer = ZmqTransport(domain, 0, {0: f"ipc://{path}"}, key=key)
    hub.open((0,), 4096)

    def visit():
        before = hub._connected[0].copy()
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(path)
            until(lambda: hub.deaths() == () and hub._connected[0] - before)
        until(lambda: hub.deaths() == () and hub._connected[0] == before)

    def until(holds):
        limit_s = time.monotonic() + 10
        while not holds():
            assert time.monotonic() < limit_s
            time.sleep(0.001)

    try:
        visit()
        peer.open((1,), 4096)
        peer.send(1, b"x" * 64)
        until(lambda: hub.receive(4).frames)
        until(lambda: hub.deaths() == () and 0 in hub._greeted)
        visit()
        assert hub.outstanding(0) == 0 and 0 not in hub._gone
        peer.close(False)
        found = []
        until(lambda: found.extend(hub.deaths()) or found)
        assert [member for member, _evidence in found] == [0]
    finally:
        hub.close(False)
        peer.close(False)


def test_one_watch_may_be_shared():
    """``dead`` tells each once, ``all_dead`` tells everyone who asks."""
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=time.sleep, args=(600,))
    child.start()
    with PidWatch({4: child.pid}) as watch:
        assert watch.all_dead() == ()
        child.kill()
        child.join()
        until_s = time.monotonic() + 10
        while not watch.all_dead():
            assert time.monotonic() < until_s
        assert [r for r, _ in watch.all_dead()] == [r for r, _ in watch.all_dead()] == [4]
        assert watch.dead() == ()
    with PidWatch({4: child.pid}) as late:  # gone before anybody looked
        assert [r for r, _ in late.all_dead()] == [4]


def test_a_wrong_key_is_never_heard(tmp_path):
    domain = Domain(1, (0, 1))
    address = {0: f"ipc://{tmp_path}/k.sock"}
    hub = ZmqTransport(domain, 1, address, key=b"a" * 16)
    stranger = ZmqTransport(domain, 0, address, key=b"b" * 16)
    hub.open((0,), 4096)
    stranger.open((1,), 4096)
    try:
        if stranger.can_send(1):
            stranger.send(1, b"x" * 64)
        until_s = time.monotonic() + 0.5
        while time.monotonic() < until_s:
            assert hub.receive(4).frames == []
    finally:
        stranger.close(False)
        hub.close(False)


def test_in_process_backpressure_is_would_block():
    domain = Domain(1, (0, 1))
    transport = InProcessNetwork(domain, 1).transport(0)
    transport.send(1, b"x")
    with pytest.raises(WouldBlock):
        transport.send(1, b"y")
