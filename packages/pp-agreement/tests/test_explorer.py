"""Every interleaving of the small worlds, over the real core."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pp_agreement import Reason
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


ALIKE = {
    "readiness": World(2, withdrawers=(0, 1), revoke=True, terminal=(0, 1)),
    "reopening": World(2, withdrawers=(1,), withdraw_reason=Reason.NOT_READY, terminal=(1, 0), attempts=2, lazy=()),
    "idle voters": World(2, terminal=(0, 2), idle_voters=(0, 1), withdrawers=(0,), lazy=()),
    "doubt": World(2, ready=False, terminal=(0, 0), doubters=(0, 1), ticks=1),
    "drain": World(2, ready=False, terminal=(0, 1), drain=True, lazy=()),
}


@pytest.mark.parametrize("name", ALIKE)
def test_the_same_outcomes_are_possible_in_every_mode(name):
    """The same workload ends in the same ways in one domain, with frames of several records, in groups, and over the blocking
    baseline: none of them loses or adds a decision.
    """
    world = ALIKE[name]
    ways = {
        mode: Explorer(replace(world, **change)).run()
        for mode, change in (
            ("asynchronous", {}),
            ("frames", {"frames": True}),
            ("replicated", {"replicated": True}),
            ("one group", {"groups": (2,)}),
            ("two groups", {"groups": (1, 1)}),
        )
    }
    assert {mode: found.violation for mode, found in ways.items()} == dict.fromkeys(ways)
    outcomes = {mode: found.outcomes for mode, found in ways.items()}
    assert outcomes == dict.fromkeys(ways, outcomes["asynchronous"]) and outcomes["asynchronous"]


def test_a_violation_comes_with_its_trace(monkeypatch):
    """The explorer is only worth what it finds: a core that forgets one activation is caught, with a way to get there."""
    from pp_agreement._coordinator import Coordinator

    def forgetful(self, source, records, kinds, deliver):
        kept = [record for record in records if record[0] != Kind.ACTIVATE_ACK or source != 0]
        original(self, source, kept, kinds, deliver)

    original = Coordinator.hear
    monkeypatch.setattr(Coordinator, "hear", forgetful)
    found = Explorer(World(2, terminal=(0, 0))).run()
    assert found.violation is not None and found.trace
