"""The tables themselves: drawn in the docs, complete, and with no way around a proof."""

from __future__ import annotations

from pathlib import Path

import pytest

from kv_bounce_planner.sessions.states import (
    RECEIVE_TRANSITIONS,
    SEND_TRANSITIONS,
    IllegalTransition,
    Machine,
    ReceiveState,
    ReceiveTrigger,
    SendState,
    SendTrigger,
    render_table,
)

DESIGN = Path(__file__).parents[2] / "docs" / "design.md"


@pytest.mark.parametrize(
    ("table", "initial"), [(RECEIVE_TRANSITIONS, ReceiveState.UNEXPOSED), (SEND_TRANSITIONS, SendState.HELD)]
)
def test_the_figures_in_the_docs_are_drawn_from_the_tables(table, initial):
    """docs/design.md holds exactly what render_table draws."""
    assert render_table(table, initial=initial) in DESIGN.read_text()


@pytest.mark.parametrize(
    ("table", "initial", "triggers"),
    [
        (RECEIVE_TRANSITIONS, ReceiveState.UNEXPOSED, ReceiveTrigger),
        (SEND_TRANSITIONS, SendState.HELD, SendTrigger),
    ],
)
def test_every_state_is_reachable_and_can_end_and_every_trigger_is_used(table, initial, triggers):
    """No dead state, no state without an end."""
    assert set(table) == set(type(initial))
    reached, frontier = {initial}, [initial]
    while frontier:
        for target in table[frontier.pop()].values():
            if target not in reached:
                reached.add(target)
                frontier.append(target)
    assert reached == set(table)
    assert {trigger for edges in table.values() for trigger in edges} == set(triggers)
    ends = {state for state, edges in table.items() if not edges}
    for state in table:
        seen, frontier = {state}, [state]
        while frontier:
            for target in table[frontier.pop()].values():
                if target not in seen:
                    seen.add(target)
                    frontier.append(target)
        assert seen & ends, f"{state} never ends"


def test_only_proofs_lead_to_proven():
    """Receiver: the triggers into PROVEN are proofs; a deadline leads there only from LANDED, whose DONE is the proof."""
    into = {
        (state, trigger)
        for state, edges in RECEIVE_TRANSITIONS.items()
        for trigger, target in edges.items()
        if target is ReceiveState.PROVEN
    }
    proofs = {
        ReceiveTrigger.WITHDRAW,
        ReceiveTrigger.DONE,
        ReceiveTrigger.SEALED,
        ReceiveTrigger.DRAINED,
        ReceiveTrigger.CLASS_PROOF,
        ReceiveTrigger.REPORT_VALID,
        ReceiveTrigger.READ_DONE,
        ReceiveTrigger.STOPPED,
    }
    assert {(s, t) for s, t in into if t not in proofs} == {
        (ReceiveState.LANDED, ReceiveTrigger.DOUBT),
        (ReceiveState.LANDED, ReceiveTrigger.DEADLINE),
    }
    at_no_risk = {ReceiveState.UNEXPOSED, ReceiveState.ASKED}
    assert {s for s, t in into if t is ReceiveTrigger.WITHDRAW} == at_no_risk
    assert RECEIVE_TRANSITIONS[ReceiveState.QUARANTINED] == {}
    for doubtful in (ReceiveState.CONFLICTED, ReceiveState.READ_IN_DOUBT):
        assert set(RECEIVE_TRANSITIONS[doubtful]) == {ReceiveTrigger.CLASS_PROOF, ReceiveTrigger.DEADLINE}


def test_an_illegal_transition_tells_the_story_and_changes_nothing():
    machine = Machine("operation 7", ReceiveState.UNEXPOSED, RECEIVE_TRANSITIONS)
    machine.fire(ReceiveTrigger.PUBLISH, "to rank 3")
    with pytest.raises(IllegalTransition) as raised:
        machine.fire(ReceiveTrigger.WITHDRAW)
    assert machine.state is ReceiveState.EXPOSED
    assert raised.value.state == "EXPOSED"
    assert raised.value.story == ("UNEXPOSED", "publish → EXPOSED (to rank 3)")
    assert "operation 7" in str(raised.value)
