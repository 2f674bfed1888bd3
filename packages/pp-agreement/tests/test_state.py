"""The tables themselves."""

from __future__ import annotations

import pytest

from pp_agreement._state import (
    CONTRACT,
    COORDINATOR_RULE,
    COORDINATOR_RULES,
    MESSAGES,
    READY_NEXT,
    READY_OPEN,
    READY_TRANSITIONS,
    REPLACES,
    TERMINAL_ALLOWED_IN,
    TERMINAL_NEXT,
    TERMINAL_TRANSITIONS,
    Kind,
    Phase,
    ReadyInput,
    ReadyState,
    Rule,
    TerminalInput,
    TerminalState,
)


def test_every_state_has_a_row():
    assert set(READY_TRANSITIONS) == set(ReadyState)
    assert set(TERMINAL_TRANSITIONS) == set(TerminalState)
    assert set(COORDINATOR_RULES) == set(Phase)
    assert set(MESSAGES) == set(Kind)


def test_every_state_is_reachable_from_idle():
    seen, todo = {ReadyState.IDLE}, [ReadyState.IDLE]
    while todo:
        for after in READY_TRANSITIONS[todo.pop()].values():
            if after not in seen:
                seen.add(after)
                todo.append(after)
    assert seen == set(ReadyState) - {ReadyState.NOT_USED}


def test_final_states_have_no_way_out():
    for state in (ReadyState.NOT_USED, ReadyState.COMPLETE, ReadyState.FINALIZED):
        assert not READY_TRANSITIONS[state]
    for terminal in (TerminalState.COMMITTED, TerminalState.NOT_USED):
        assert not TERMINAL_TRANSITIONS[terminal]


def test_an_activated_attempt_never_aborts():
    """S6, S11: from ACTIVATED only COMPLETE."""
    assert dict(READY_TRANSITIONS[ReadyState.ACTIVATED]) == {ReadyInput.COMPLETE: ReadyState.COMPLETE}
    assert COORDINATOR_RULES[Phase.COMPLETE][Kind.REVOKE] is Rule.FAULT


def test_a_lease_is_irrevocable_for_its_rank():
    for state in (ReadyState.LEASED, ReadyState.RELEASED, ReadyState.ACTIVATED):
        assert ReadyInput.WITHDRAW not in READY_TRANSITIONS[state]


def test_the_fence_has_no_gap():
    """S21: each state is either open or allows a terminal vote, never both."""
    assert set(ReadyState) == READY_OPEN | TERMINAL_ALLOWED_IN
    assert not READY_OPEN & TERMINAL_ALLOWED_IN


def test_an_activation_is_never_replaced():
    assert all(Kind.ACTIVATE_ACK not in older for older in REPLACES.values())


def test_compiled_tables_equal_the_tables():
    for state in ReadyState:
        for given in ReadyInput:
            assert READY_NEXT[state][given] is READY_TRANSITIONS[state].get(given)
    for terminal in TerminalState:
        for cause in TerminalInput:
            assert TERMINAL_NEXT[terminal][cause] is TERMINAL_TRANSITIONS[terminal].get(cause)
    for phase in Phase:
        for kind in COORDINATOR_RULES[phase]:
            assert COORDINATOR_RULE[phase][kind] is COORDINATOR_RULES[phase][kind]
    for kind in Kind:
        assert CONTRACT[kind] is MESSAGES[kind]


@pytest.mark.parametrize("kind", Kind)
def test_authors_match_the_kind_ranges(kind):
    author = MESSAGES[kind].author
    assert author == ("any" if kind >= 64 else "coordinator" if kind >= 32 else author)
    assert (author == "coordinator") == (32 <= kind < 64)
