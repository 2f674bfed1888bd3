"""The explorer's smaller scopes hold, and it notices what it is there for."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from kv_bounce_planner.sessions import receive_core as _receive_core
from kv_bounce_planner.sessions import send_core as _send_core
from kv_bounce_planner.sessions.proof import Evidence, ProofKind, WriteExecutor
from kv_bounce_planner.sessions.states import RECEIVE_TRANSITIONS, ReceiveState, ReceiveTrigger

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("kv_explore", TOOLS / "explore.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["kv_explore"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "name",
    [
        "direct, cancel",
        "direct, errors and death, receiver-executed",
        "direct, errors and death, sender-executed",
        "direct, time",
        "bounce, cancel",
        "bounce, cancel and abort, two parts",
        "bounce, gathered ahead",
        "direct, a link breaks",
        "bounce, a link breaks",
        "direct, errors and death, NIC-executed",
        "slices, cancel and abort",
        "pull, cancel and abort",
        "pull, errors and death, receiver-executed",
        "pull, errors and death, sender-executed",
        "pull, errors and death, NIC-executed",
        "pull, errors and death, two parts",
        "pull, the reader dies",
        "pull, a link breaks",
    ],
)
def test_every_interleaving_of_a_small_scope_keeps_the_invariants(tool, name):
    """No late byte, no early release, no double release, no stuck memory, in any order of events."""
    (scope,) = [scope for scope in tool.SCOPES if scope.name == name]
    states, transitions = tool.explore(scope, states_max=20_000)
    assert states > 50
    assert transitions > states


def test_the_explorer_finds_a_doubt_that_is_taken_as_proof(tool, monkeypatch):
    """With the planted fault a part lands in released memory, and the story says how."""
    edges = dict(RECEIVE_TRANSITIONS[ReceiveState.EXPOSED])
    edges[ReceiveTrigger.DOUBT] = ReceiveState.PROVEN
    monkeypatch.setitem(RECEIVE_TRANSITIONS, ReceiveState.EXPOSED, edges)
    original = _receive_core.ReceiveTransfer._doubt

    def careless(self, record, reason, now_s):
        original(self, record, reason, now_s)
        if record.proof is None:
            self._proven(record, record.spec.operation, ProofKind.DONE)

    monkeypatch.setattr(_receive_core.ReceiveTransfer, "_doubt", careless)
    (scope,) = [scope for scope in tool.SCOPES if scope.name == "direct, errors and death, receiver-executed"]
    with pytest.raises(tool.Violation, match="landed in memory that was released; story: publish"):
        tool.explore(scope)


def test_the_explorer_finds_a_slice_that_moves_before_it_is_computed(tool, monkeypatch):
    """With the planted fault the second slice is written when the first is computed, and the story says how."""
    monkeypatch.setattr(_send_core.SendTransfer, "may_begin", lambda self, operation: self.owned)
    scope = tool.Scope("slices, planted", parts=1, slices=2)
    with pytest.raises(tool.Violation, match="a write of what is not computed; story: publish"):
        tool.explore(scope)


def test_the_explorer_finds_a_region_that_goes_back_before_its_scatter(tool, monkeypatch):
    """With the planted fault a region is another transfer's while it is still read."""
    original = _receive_core.ReceiveTransfer._return_region

    def careless(self, slice_id, shared):
        was, shared.scatter = shared.scatter, _receive_core.ScatterState.DONE
        original(self, slice_id, shared)
        shared.scatter = was

    monkeypatch.setattr(_receive_core.ReceiveTransfer, "_return_region", careless)
    scope = tool.Scope("slices, planted", parts=1, slices=2, bounce=True, cancel=False)
    with pytest.raises(tool.Violation, match="a scatter ran in memory that was released"):
        tool.explore(scope)


def test_the_explorer_finds_a_source_that_comes_back_by_its_agents_end_over_cma(tool, monkeypatch):
    """A living reader needs no agent of the source there; with the planted fault it succeeds with foreign bytes."""
    original = _send_core.SendTransfer._loan_proven

    def careless(self, record):
        record.required = frozenset({Evidence.AGENT_DESTROYED})
        original(self, record)

    monkeypatch.setattr(_send_core.SendTransfer, "_loan_proven", careless)
    scope = tool.Scope(
        "pull, planted", pull=True, parts=1, fail=True, retire_sources=True, executor=WriteExecutor.SENDER
    )
    with pytest.raises(tool.Violation, match="success with a part of a source that was released"):
        tool.explore(scope)
    monkeypatch.setattr(_send_core.SendTransfer, "_loan_proven", original)
    states, _ = tool.explore(scope)
    assert states > 50


def test_the_command_reports_and_refuses_unknown_scopes(tool, capsys):
    assert tool.main(["--scope", "direct, cancel"]) == 0
    assert "direct, cancel: " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        tool.main(["--scope", "nothing"])
