"""The explorer's smaller scopes hold, and it notices what it is there for."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from kv_bounce_planner.sessions import receive_core as _receive_core
from kv_bounce_planner.sessions.proof import ProofKind
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
        "bounce, time-outs",
        "direct, errors and death, NIC-executed",
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
            self._proven(record, ProofKind.DONE)

    monkeypatch.setattr(_receive_core.ReceiveTransfer, "_doubt", careless)
    (scope,) = [scope for scope in tool.SCOPES if scope.name == "direct, errors and death, receiver-executed"]
    with pytest.raises(tool.Violation, match="landed in memory that was released; story: publish"):
        tool.explore(scope)


def test_the_command_reports_and_refuses_unknown_scopes(tool, capsys):
    assert tool.main(["--scope", "direct, cancel"]) == 0
    assert "direct, cancel: " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        tool.main(["--scope", "nothing"])


@pytest.mark.slow
def test_every_scope_is_exhausted(tool):
    assert tool.main([]) == 0
