"""What is registered is given back once, after proof, in order; without proof it stays."""

import pytest

from meta_executor.rank.teardown import TRIES, close_transfers, tell_fault
from pp_agreement import Agreement, AgreementConfig, Domain, Fault, InProcessNetwork

IN_FLIGHT = RuntimeError("a write is in flight")


class Session:
    """Refuses to close the first ``refusals`` times."""

    def __init__(self, refusals, calls, error=IN_FLIGHT):
        self.refusals, self.calls, self.error = refusals, calls, error

    def poll(self):
        self.calls.append("poll")

    def close(self):
        self.calls.append("close")
        if self.refusals > 0:
            self.refusals -= 1
            raise self.error


def run(refusals, **options):
    calls, lines, waits = [], [], []
    release = tuple(lambda name=name: calls.append(name) for name in ("control", "deregister", "transport"))
    proven = close_transfers(Session(refusals, calls, **options), release, lines.append, wait=waits.append)
    return proven, calls, lines, waits


def test_proof_releases_in_order():
    """One try, nothing said, nothing waited for."""
    assert run(0) == (True, ["poll", "close", "control", "deregister", "transport"], [], [])


def test_a_passing_failure_releases_once_after_success():
    """Two refusals, then proof: each try polls first, and the release follows the last."""
    proven, calls, lines, waits = run(2)
    assert proven
    assert calls == ["poll", "close"] * 3 + ["control", "deregister", "transport"]
    assert [line.split(":")[0] for line in lines] == [
        "transfers are open (try 1 of 3)",
        "transfers are open (try 2 of 3)",
    ]
    assert len(waits) == 2


def test_without_proof_everything_stays_registered():
    """Three refusals: told each time with its cause, and nothing is released."""
    proven, calls, lines, waits = run(TRIES)
    assert not proven
    assert calls == ["poll", "close"] * TRIES
    assert all("a write is in flight" in line for line in lines)
    assert (len(lines), len(waits)) == (TRIES, TRIES - 1)


def test_an_interrupt_is_not_a_refusal():
    """It leaves at once, with nothing released."""
    with pytest.raises(KeyboardInterrupt):
        run(1, error=KeyboardInterrupt())


def test_a_failing_release_is_raised_and_stops_there():
    """The agent stays when memory could not be deregistered."""
    calls = []

    def fail():
        raise OSError("deregistration failed")

    with pytest.raises(OSError, match="deregistration"):
        close_transfers(Session(0, calls), (fail, lambda: calls.append("transport")), calls.append)
    assert calls == ["poll", "close"]


def test_the_others_hear_the_cause_of_a_fault_from_the_rank_that_knows_it():
    """In the time that a rank takes to leave; not only that its process has ended."""
    domain = Domain(1, (0, 1, 2))
    network = InProcessNetwork(domain)
    ranks = [Agreement(domain, rank, network.transport(rank), AgreementConfig(credits=4)) for rank in domain.ranks]
    for rank in ranks:
        rank.open()
    heard = []

    def turn(_seconds):
        for rank in ranks[:2]:
            heard.extend((rank.rank, event.detail) for event in rank.poll() if isinstance(event, Fault))

    for _ in range(5):
        turn(0)
        ranks[2].poll()
    tell_fault(ranks[2], "KeyError: 7", wait=turn)
    assert {rank for rank, detail in heard if "KeyError: 7" in detail} == {0, 1}


def test_a_rank_that_leaves_enters_no_collective_to_say_why():
    """The blocking agreement's poll would wait for ranks that may be gone; a rank without agreement has nobody to tell."""

    class Blocking:
        mode = "allgather"

        def fail(self, detail):
            raise AssertionError("told")

        poll = fail

    tell_fault(Blocking(), "why")
    tell_fault(None, "why")
