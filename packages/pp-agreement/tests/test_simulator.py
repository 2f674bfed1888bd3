"""Seeded simulations with faults: 2,000 seeds here, as many as wanted by ``tools/simulate.py``."""

from __future__ import annotations

import collections

import pytest

from pp_agreement.testing import SimulationFailure, simulate

BLOCK = 125


@pytest.mark.parametrize("block", range(16))
def test_seeds(block):
    """Every seed holds the group's invariants through its faults and converges afterwards."""
    faults = collections.Counter()
    decided = 0
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        result = simulate(seed)
        faults[result.fault] += 1
        decided += result.committed + result.closed
    assert decided > BLOCK
    assert set(faults) >= {"clean", "malformed", "crash", "death"}


def test_a_seed_replays_exactly():
    assert simulate(4711) == simulate(4711)


def test_a_failure_names_its_seed(monkeypatch):
    from pp_agreement._coordinator import Coordinator

    monkeypatch.setattr(Coordinator, "finalize", lambda self, round_, tally: None)
    with pytest.raises(SimulationFailure, match=r"seed \d+"):
        for seed in range(50):
            simulate(seed)
