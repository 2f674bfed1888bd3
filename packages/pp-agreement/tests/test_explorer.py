"""Every interleaving of the small worlds, over the real core."""

from __future__ import annotations

import pytest

from pp_agreement._state import Kind
from pp_agreement.testing import CI_WORLDS, NIGHTLY_WORLDS, Explorer, World


@pytest.mark.parametrize("name", CI_WORLDS)
def test_every_interleaving(name):
    """The group's invariants at every transition, ``validate()`` of every core; decided where nothing must happen."""
    found = Explorer(CI_WORLDS[name]).run()
    assert found.violation is None, f"{found.violation}\n" + "\n".join(found.trace)
    assert found.complete and found.finished > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NIGHTLY_WORLDS)
def test_every_interleaving_nightly(name):
    found = Explorer(NIGHTLY_WORLDS[name]).run()
    assert found.violation is None, f"{found.violation}\n" + "\n".join(found.trace)
    assert found.complete


def test_the_state_space_has_the_size_that_it_had():
    """A change of the protocol, or of its checking, shows as another number of states; then look, and change it here."""
    found = Explorer(World(3, withdrawers=(0, 1, 2), lazy=())).run()
    assert (found.states, found.transitions, found.finished) == (SIZE_STATES, SIZE_TRANSITIONS, SIZE_FINISHED)


SIZE_STATES, SIZE_TRANSITIONS, SIZE_FINISHED = 5015, 11025, 137


def test_worlds_reach_every_event():
    """An exploration that never aborts, or never completes, would prove nothing about it."""
    reached = set()
    for name in ("2 ranks, everything", "2 ranks, drain", "2 ranks, reopening"):
        reached |= Explorer(CI_WORLDS[name]).run().reached
    assert reached >= {
        "Prepared",
        "Released",
        "Completed",
        "Aborted",
        "Finalized",
        "Committed",
        "Drained",
        "DrainStarted",
    }


def test_a_violation_comes_with_its_trace(monkeypatch):
    """The explorer is only worth what it finds: a core that forgets one activation is caught, with a way to get there."""
    from pp_agreement._machine import AgreementCore

    def forgetful(self, source, record):
        kind = record[0]
        if kind == Kind.ACTIVATE_ACK and source == 0:
            return
        original(self, source, record)

    original = AgreementCore._from_member
    monkeypatch.setattr(AgreementCore, "_from_member", forgetful)
    found = Explorer(World(2, terminal=(0, 0))).run()
    assert found.violation is not None and found.trace
