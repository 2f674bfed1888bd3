"""Public test tools: group invariants, explorer, simulator, scenario runner, transport conformance."""

from __future__ import annotations

from pp_agreement.testing._conformance import NotConforming, check_transport
from pp_agreement.testing._explorer import CI_WORLDS, NIGHTLY_WORLDS, Exploration, Explorer, World
from pp_agreement.testing._group_simulator import simulate_groups
from pp_agreement.testing._monitor import Monitor, PropertyViolation
from pp_agreement.testing._scenario import ScenarioMismatch, play, run_scenario
from pp_agreement.testing._simulator import SimulationFailure, SimulationResult, mutate, simulate

__all__ = [
    # invariants of a group
    "Monitor",
    "PropertyViolation",
    # every interleaving of a small world
    "World",
    "Explorer",
    "Exploration",
    "CI_WORLDS",
    "NIGHTLY_WORLDS",
    # seeded simulation
    "simulate",
    "simulate_groups",
    "mutate",
    "SimulationResult",
    "SimulationFailure",
    # what a transport owes
    "check_transport",
    "NotConforming",
    # scenario files
    "play",
    "run_scenario",
    "ScenarioMismatch",
]
