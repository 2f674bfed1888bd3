"""The ownership table: every edge, every refusal, idempotent preparation in every state, one owner per id."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest

from meta_executor.engine.base import SamplingParams
from meta_executor.executor.ownership import (
    TRANSITIONS,
    Event,
    IllegalTransition,
    Leg,
    Outcome,
    OwnershipConflict,
    Registry,
    RegistryError,
    State,
    UnknownRequest,
)
from meta_executor.executor.request import Request

#: Shortest way to each state, per (role, style).
PATHS = {
    ("context", "context_first"): [Event.SCHEDULED, Event.LAUNCHED, Event.COMPUTED, Event.QUIESCED, Event.COMMITTED],
    ("context", "generation_first"): [
        Event.LEASED, Event.SCHEDULED, Event.LAUNCHED, Event.COMPUTED, Event.QUIESCED, Event.COMMITTED,
    ],
    ("generation", "context_first"): [
        Event.PUBLISHED, Event.ARRIVED, Event.LAUNCHED, Event.FINISHED, Event.QUIESCED, Event.COMMITTED,
    ],
    ("generation", "generation_first"): [
        Event.PUBLISHED, Event.ARRIVED, Event.LAUNCHED, Event.FINISHED, Event.QUIESCED, Event.COMMITTED,
    ],
}  # fmt: skip


#: What is allowed, written by hand from the header of ownership.py: state | event -> state | roles | styles.
RULES = """
WAITING       LEASED     PREPARED      context             generation_first
WAITING       SCHEDULED  ACTIVATED     context             context_first
PREPARED      SCHEDULED  ACTIVATED     context             generation_first
WAITING       PUBLISHED  TRANSFERRING  generation          context_first,generation_first
WAITING       OWNED      ACTIVATED     generation          context_first
TRANSFERRING  ARRIVED    ACTIVATED     generation          context_first,generation_first
ACTIVATED     LAUNCHED   COMPUTING     context,generation  context_first,generation_first
COMPUTING     LAUNCHED   COMPUTING     context,generation  context_first,generation_first
COMPUTING     COMPUTED   TRANSFERRING  context             context_first,generation_first
COMPUTING     FINISHED   ENDING        generation          context_first,generation_first
ACTIVATED     FINISHED   ENDING        generation          context_first,generation_first
WAITING       ABORTED    ABORTED       context,generation  context_first,generation_first
PREPARED      ABORTED    ABORTED       context             generation_first
ABORTED       REOPENED   WAITING       context             generation_first
ABORTED       QUIESCED   QUIESCENT     context,generation  context_first,generation_first
ABORTED       COMMITTED  TERMINAL      context,generation  context_first,generation_first
ACTIVATED     STOPPED    ENDING        context,generation  context_first,generation_first
COMPUTING     STOPPED    ENDING        context,generation  context_first,generation_first
TRANSFERRING  STOPPED    ENDING        context,generation  context_first,generation_first
ENDING        STOPPED    ENDING        context,generation  context_first,generation_first
ENDING        LAUNCHED   ENDING        context             context_first,generation_first
TRANSFERRING  QUIESCED   QUIESCENT     context             context_first,generation_first
ENDING        QUIESCED   QUIESCENT     context,generation  context_first,generation_first
QUIESCENT     COMMITTED  TERMINAL      context,generation  context_first,generation_first
"""


def make(style="context_first", request_id=1, tokens=3) -> Request:
    return Request(
        request_id=request_id,
        token_ids=np.arange(tokens, dtype=np.int32),
        sampling=SamplingParams(4),
        schedule_style=style,
    )


@pytest.mark.parametrize(("role", "style"), PATHS)
def test_the_whole_way_of_each_role_and_style(role: str, style: str) -> None:
    """Each path of the header ends in TERMINAL, which removes the record and leaves a tombstone."""
    registry = Registry(role)
    sequence, new = registry.prepare(make(style), 1)
    assert new
    for event in PATHS[role, style]:
        registry.apply(sequence, event)
        registry.validate()
    assert registry.get(1) is None and registry.is_finished(1)
    assert registry.statistics().completed == 1


@pytest.mark.parametrize(("role", "style"), PATHS)
def test_every_state_and_event_by_the_rules(role: str, style: str) -> None:
    """All (state, event) pairs: the rules' next state, or a refusal that names both and changes nothing."""
    rules = {
        (state, event): target
        for state, event, target, roles, styles in map(str.split, RULES.strip().splitlines())
        if role in roles.split(",") and style in styles.split(",")
    }
    for state, event in product(State, Event):
        if state is State.TERMINAL:
            continue  # it leaves no record
        registry = Registry(role)
        sequence, _ = registry.prepare(make(style), 1)
        sequence.state = state
        before = tuple(sequence.story)
        target = rules.get((state, event))
        if target is not None:
            assert registry.apply(sequence, event) is State(target), (state, event)
            continue
        with pytest.raises(IllegalTransition, match=event.value) as caught:
            registry.apply(sequence, event)
        assert caught.value.story == before and caught.value.state == state.value
        assert (sequence.state, tuple(sequence.story)) == (state, before)


@pytest.mark.parametrize("depth", range(6))
def test_preparing_the_same_object_again_changes_nothing_in_any_state(depth: int) -> None:
    """waiting, prepared, activated, computing, transferring, quiescent: a no-op that is counted."""
    registry = Registry("context")
    request = make("generation_first")
    sequence, _ = registry.prepare(request, 1)
    for event in PATHS["context", "generation_first"][:depth]:
        registry.apply(sequence, event)
    before = (sequence.state, tuple(sequence.story))
    again, new = registry.prepare(request, 1)
    assert again is sequence and not new
    assert (sequence.state, tuple(sequence.story)) == before
    assert registry.statistics().prepared_again == 1


def test_preparing_an_aborted_request_again_changes_nothing() -> None:
    """ABORTED is a state of ownership like the others; only REOPENED leads back to WAITING."""
    registry = Registry("context")
    request = make("generation_first")
    sequence, _ = registry.prepare(request, 1)
    registry.apply(sequence, Event.ABORTED)
    assert registry.prepare(request, 1) == (sequence, False)
    assert sequence.state is State.ABORTED
    assert registry.apply(sequence, Event.REOPENED) is State.WAITING


@pytest.mark.parametrize("depth", range(7))
def test_another_object_under_the_same_id_fails_closed_and_names_both(depth: int) -> None:
    """In every state, and after the end: the second owner is refused, the first is untouched."""
    registry = Registry("context")
    first = make("generation_first")
    sequence, _ = registry.prepare(first, 1)
    for event in PATHS["context", "generation_first"][:depth]:
        registry.apply(sequence, event)
    before = tuple(sequence.story)
    second = make("generation_first", tokens=9)
    with pytest.raises(OwnershipConflict, match="two owners") as caught:
        registry.prepare(second, 2)
    assert "incarnation 2" in str(caught.value) and "9 tokens" in str(caught.value)
    if depth < 6:
        assert "incarnation 1" in str(caught.value) and "3 tokens" in str(caught.value)
    assert tuple(sequence.story) == before


def test_a_record_that_the_registry_does_not_hold_cannot_act() -> None:
    """A second owner that acts with its own record is named, and so is the one that is held."""
    one, other = Registry("context"), Registry("context")
    held, _ = one.prepare(make(), 1)
    foreign, _ = other.prepare(make(), 1)
    with pytest.raises(OwnershipConflict, match="acts, but this rank holds"):
        one.apply(foreign, Event.SCHEDULED)
    assert held.state is State.WAITING


def test_no_quiescence_while_a_leg_is_open_and_each_leg_has_its_own_owner() -> None:
    """Ending compute's leg twice never ends the schedule's; QUIESCED names the open ones."""
    registry = Registry("context")
    sequence, _ = registry.prepare(make(), 1)
    registry.apply(sequence, Event.SCHEDULED)
    for leg in (Leg.COMPUTE, Leg.TRANSCEIVER, Leg.SCHEDULE):
        registry.open_leg(sequence, leg)
    registry.apply(sequence, Event.STOPPED)
    assert registry.end_leg(sequence, Leg.TRANSCEIVER)
    assert not registry.end_leg(sequence, Leg.TRANSCEIVER)
    with pytest.raises(IllegalTransition, match="compute, schedule"):
        registry.apply(sequence, Event.QUIESCED)
    registry.end_leg(sequence, Leg.COMPUTE)
    with pytest.raises(IllegalTransition, match="open legs: schedule"):
        registry.apply(sequence, Event.QUIESCED)
    registry.end_leg(sequence, Leg.SCHEDULE)
    registry.apply(sequence, Event.QUIESCED)
    with pytest.raises(IllegalTransition, match="nothing may touch"):
        registry.open_leg(sequence, Leg.COMPUTE)


def test_the_first_early_end_wins() -> None:
    """COMPLETED may still become FAILED or CANCELLED; neither of those changes any more."""
    registry = Registry("context")
    sequence, _ = registry.prepare(make(), 1)
    assert registry.end(sequence, Outcome.COMPLETED)
    assert registry.end(sequence, Outcome.FAILED, "step failed", "ENGINE_FAILED")
    assert not registry.end(sequence, Outcome.CANCELLED, "too late")
    assert (sequence.outcome, sequence.reason, sequence.error_code) == (Outcome.FAILED, "step failed", "ENGINE_FAILED")


def test_unknown_and_too_many() -> None:
    """An id that never came and one that ended are told apart; the bound refuses without taking."""
    registry = Registry("context", requests_max=1, tombstones_max=1)
    sequence, _ = registry.prepare(make(), 1)
    with pytest.raises(RegistryError, match="at most 1"):
        registry.prepare(make(request_id=2), 2)
    registry.apply(sequence, Event.ABORTED)
    registry.apply(sequence, Event.COMMITTED)
    with pytest.raises(UnknownRequest, match="already"):
        registry.require(1)
    with pytest.raises(UnknownRequest, match="never admitted"):
        registry.require(5)


@pytest.mark.parametrize("seed", range(5))
def test_random_walks_agree_with_the_table(seed: int) -> None:
    """An oracle that only knows the table predicts every state of 200 requests."""
    chance = random.Random(seed)
    for role in ("context", "generation"):
        registry = Registry(role)  # type: ignore[arg-type]
        model: dict[int, State] = {}
        live = {}
        for turn in range(1500):
            request_id = chance.randrange(1, 100)
            if request_id not in model:
                style = chance.choice(("context_first", "generation_first"))
                live[request_id], _ = registry.prepare(make(style, request_id), request_id)
                model[request_id] = State.WAITING
            sequence = live[request_id]
            if model[request_id] is State.TERMINAL:
                assert registry.get(request_id) is None
                continue
            event = chance.choice(list(Event))
            edge = TRANSITIONS.get((model[request_id], event))
            if edge and role in edge.roles and sequence.request.schedule_style in edge.styles:
                model[request_id] = registry.apply(sequence, event)
            else:
                with pytest.raises(IllegalTransition):
                    registry.apply(sequence, event)
            assert model[request_id] is sequence.state
            if turn % 100 == 0:
                registry.validate()
