"""The tables themselves."""

from __future__ import annotations

import pytest

from pp_agreement._state import (
    ABOUT_ROUNDS,
    COORDINATOR_RULE,
    COORDINATOR_RULES,
    COORDINATOR_SAYS,
    DECIDES,
    FENCE,
    MEMBER_NEXT,
    MEMBER_TRANSITIONS,
    MEMBERS_SAY,
    MESSAGE,
    MESSAGES,
    PHASE_NEXT,
    PHASE_TRANSITIONS,
    READY_OPEN,
    REPLACES,
    SCHEDULER_NEXT,
    SCHEDULER_SAYS,
    SCHEDULER_TRANSITIONS,
    TERMINAL_AFTER,
    TERMINAL_TRANSITIONS,
    WITHDRAW_ANSWERS,
    Decision,
    Kind,
    Phase,
    ReadyInput,
    ReadyState,
    Rule,
    TerminalInput,
    TerminalState,
)

AT_SCHEDULER = {ReadyState.RELEASED, ReadyState.REVOKED}
TABLES = [
    (MEMBER_TRANSITIONS, MEMBER_NEXT, ReadyState, ReadyInput),
    (SCHEDULER_TRANSITIONS, SCHEDULER_NEXT, ReadyState, ReadyInput),
    (PHASE_TRANSITIONS, PHASE_NEXT, Phase, Decision),
]


def test_every_state_has_a_row():
    assert set(SCHEDULER_TRANSITIONS) == set(ReadyState)
    assert set(MEMBER_TRANSITIONS) == set(ReadyState) - AT_SCHEDULER
    assert set(TERMINAL_TRANSITIONS) == set(TerminalState)
    assert set(PHASE_TRANSITIONS) == set(COORDINATOR_RULES) == set(Phase)
    assert set(MESSAGES) == set(Kind)
    assert set(WITHDRAW_ANSWERS) == set(ReadyState)


@pytest.mark.parametrize(("table", "states"), [
    (MEMBER_TRANSITIONS, set(ReadyState) - AT_SCHEDULER), (SCHEDULER_TRANSITIONS, set(ReadyState)),
    (TERMINAL_TRANSITIONS, set(TerminalState)), (PHASE_TRANSITIONS, set(Phase)),
])  # fmt: skip
def test_every_state_is_reachable(table, states):
    start = {ReadyState: ReadyState.IDLE, TerminalState: TerminalState.OPEN, Phase: Phase.GATHERING}[
        type(next(iter(table)))
    ]
    seen, todo = {start}, [start]
    while todo:
        for after in table[todo.pop()].values():
            if after not in seen:
                seen.add(after)
                todo.append(after)
    assert seen == states


def test_final_states_have_no_way_out():
    for state in (ReadyState.NOT_USED, ReadyState.COMPLETE, ReadyState.FINALIZED):
        assert not MEMBER_TRANSITIONS[state] and not SCHEDULER_TRANSITIONS[state]
    for terminal in (TerminalState.COMMITTED, TerminalState.NOT_USED):
        assert not TERMINAL_TRANSITIONS[terminal]


def test_an_activated_attempt_never_aborts():
    """From ACTIVATED only COMPLETE."""
    for table in (MEMBER_TRANSITIONS, SCHEDULER_TRANSITIONS):
        assert dict(table[ReadyState.ACTIVATED]) == {ReadyInput.COMPLETE: ReadyState.COMPLETE}
    assert COORDINATOR_RULES[Phase.COMPLETE][Kind.REVOKE] is Rule.FAULT
    assert Decision.ABORT not in PHASE_TRANSITIONS[Phase.COMPLETE]


def test_a_lease_is_irrevocable_for_its_rank():
    for state in (ReadyState.LEASED, ReadyState.RELEASED, ReadyState.ACTIVATED):
        assert ReadyInput.WITHDRAW not in SCHEDULER_TRANSITIONS[state]


def test_only_the_scheduling_rank_revokes_and_is_released_to():
    for row in MEMBER_TRANSITIONS.values():
        assert not {ReadyInput.REVOKE, ReadyInput.RELEASE} & set(row)
    assert ReadyInput.ACTIVATE not in SCHEDULER_TRANSITIONS[ReadyState.LEASED]


def test_the_fence_has_no_gap():
    """Each state is either open or allows a terminal vote, never both."""
    allowed = FENCE[TerminalInput.VOTE]
    assert set(ReadyState) == READY_OPEN | allowed
    assert not READY_OPEN & allowed
    assert FENCE[TerminalInput.COMMIT] < allowed and FENCE[TerminalInput.DOUBT] < allowed


def test_an_activation_is_never_replaced():
    assert all(Kind.ACTIVATE_ACK not in older for older in REPLACES.values())


@pytest.mark.parametrize(("table", "compiled", "states", "inputs"), TABLES)
def test_compiled_tables_equal_the_tables(table, compiled, states, inputs):
    for state in states:
        for given in inputs:
            assert compiled[state][given] is table.get(state, {}).get(given)


def test_compiled_rules_equal_the_rules():
    for phase in Phase:
        for kind in COORDINATOR_RULES[phase]:
            assert COORDINATOR_RULE[phase][kind] is COORDINATOR_RULES[phase][kind]
    for kind in Kind:
        assert MESSAGE[kind] is MESSAGES[kind]


def test_the_terminal_table_holds_the_fence():
    for given in TerminalInput:
        for state in TerminalState:
            for ready in ReadyState:
                wanted = TERMINAL_TRANSITIONS[state].get(given) if ready in FENCE[given] else None
                assert TERMINAL_AFTER[given][state][ready] is wanted


@pytest.mark.parametrize("code", range(256))
def test_who_may_say_a_kind_is_in_the_table(code):
    author = MESSAGE[code].author if MESSAGE[code] else "nobody"
    assert MEMBERS_SAY[code] == (author in ("member", "scheduler", "any"))
    assert ABOUT_ROUNDS[code] == (code in range(Kind.VOTE, Kind.DRAIN))
    assert DECIDES[code] == (code in range(Kind.PREPARE, Kind.ADVICE))
    assert SCHEDULER_SAYS[code] == (author == "scheduler")
    assert COORDINATOR_SAYS[code] == (author in ("coordinator", "any"))


@pytest.mark.parametrize("kind", Kind)
def test_authors_match_the_kind_ranges(kind):
    author = MESSAGES[kind].author
    assert author == ("any" if kind >= 64 else "coordinator" if kind >= 32 else author)
    assert (author == "coordinator") == (32 <= kind < 64)
