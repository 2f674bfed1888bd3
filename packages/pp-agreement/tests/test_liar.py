"""One member lies, in frames that are right in every other way: the honest ones never decide differently, and stop together."""

from __future__ import annotations

import contextlib
import random

import pytest

from pp_agreement import (
    Aborted,
    Agreement,
    AgreementConfig,
    Committed,
    Completed,
    Domain,
    DomainStopped,
    Drained,
    Fault,
    FaultCode,
    Finalized,
    InProcessNetwork,
    LocalProtocolError,
    Outcome,
    Prepared,
    ReadyState,
    Released,
    WouldBlock,
)
from pp_agreement._codec import Codec
from pp_agreement._events import Frame
from pp_agreement._state import MESSAGES, Kind

LIAR = 1
FINAL = (Committed, Completed, Finalized)


def record(draw, kinds, heard):
    """Often nearly right: a kind that the liar may send, small fields in range, a number near what is open."""
    kind = draw.choice(kinds) if draw.random() < 0.97 else draw.randrange(256)
    row = MESSAGES.get(kind)
    small = draw.random() < 0.97 and row is not None
    number = max(0, heard + draw.choice((-2, -1, 0, 0, 0, 0, 1)))
    return (
        int(kind),
        draw.randint(0, min(row.outcome_max, 3)) if small else draw.randrange(256),
        draw.randint(0, row.disposition_max % 2) if small else draw.randrange(256),
        draw.choice((0, 0, 1, 7)) if small else draw.randrange(256),
        draw.choice((0, 0, 0, 0, 1)),
        100 + number if draw.random() < 0.97 else draw.randrange(200),
        number,
    )


def life(seed, liar_coordinates):
    """All three behave; now and then the liar's stream holds a frame that its core never made."""
    draw = random.Random(seed)
    ranks = (0, 1, 2)
    domain = Domain(1, ranks, coordinator_rank=LIAR if liar_coordinates else 2)
    network = InProcessNetwork(domain, 8)
    everybody = [
        Agreement(domain, rank, network.transport(rank), AgreementConfig(credits=3), lambda: 0.0) for rank in ranks
    ]
    for agreement in everybody:
        agreement.open()
    liar = everybody[LIAR]
    codec = Codec(domain, LIAR, 16_384)
    kinds = [k for k in Kind if (k >= 32) == liar_coordinates and k not in (Kind.FAIL_STOP, Kind.DRAIN_ALL)]
    finals = {rank: [] for rank in ranks}
    log, released, schedule, done = [], [], [], dict.fromkeys(ranks, 0)
    lies = draw.choice((0.0, 0.003, 0.01, 0.05))
    heard_of = {rank: [] for rank in ranks}
    for turn in range(180):
        if turn == 110 and everybody[0].stopped is None:
            everybody[0].start_drain(len(log))
        for victim in (0, 2) if liar_coordinates else (2,):
            if draw.random() < lies:
                sequence = liar._core.streams.next_sequence[victim]
                liar._core.streams.next_sequence[victim] += 1
                said = tuple(record(draw, kinds, len(log)) for _ in range(draw.randint(0, 2)))
                network.inject(LIAR, victim, codec.encode(victim, Frame(sequence, 0, said, liar._core.context.session)))
        for rank, agreement in enumerate(everybody):
            for event in agreement.poll():
                heard_of[rank].append(type(event))
                if isinstance(event, Drained):
                    report = agreement.drain_state()
                    assert not report.undecided and report.admitted == event.last_incarnation == len(log)
                if isinstance(event, FINAL):
                    finals[rank].append(event)
                if agreement.stopped is not None:
                    continue
                if isinstance(event, Prepared):
                    agreement.acknowledge_prepare(event.key)
                elif isinstance(event, Aborted):
                    agreement.acknowledge_abort(event.key)
                elif isinstance(event, Released):
                    released.append(event.key)
            agreement.validate()
            if agreement.stopped is None:
                act(draw, agreement, log, released, schedule, done)
    for _ in range(10):
        for rank, agreement in enumerate(everybody):
            for event in agreement.poll():
                heard_of[rank].append(type(event))
                if isinstance(event, FINAL):
                    finals[rank].append(event)
    for told in heard_of.values():
        assert Fault not in told[:-1], f"after a fault: {told[told.index(Fault) :]}"
    del finals[LIAR], everybody[LIAR]
    return everybody, finals, sum(Drained in told for told in heard_of.values())


def act(draw, agreement, log, released, schedule, done):
    try:
        if agreement.is_scheduler and draw.random() < 0.4 and agreement.drain_state().last_incarnation is None:
            number = agreement.next_incarnation
            key = agreement.admit(100 + number, number, draw.random() < 0.6)
            log.append((key.request_id, key.incarnation, agreement.state(key).ready.name != "NOT_USED"))
        elif agreement.next_incarnation <= len(log):
            with contextlib.suppress(DomainStopped):  # the liar spoke of another request, or of readiness
                agreement.admit(*log[agreement.next_incarnation - 1])
        for key in agreement.drain_state().undecided:
            state = agreement.state(key)
            if not state.heard or draw.random() < 0.5 or agreement.stopped is not None:
                continue
            if state.ready.name == "IDLE" and state.terminal.name == "OPEN":
                agreement.publish_ready(key)
            elif (
                state.ready.name in ("NOT_USED", "ACTIVATED", "COMPLETE", "FINALIZED") and state.terminal.name == "OPEN"
            ):
                agreement.vote_terminal(key, draw.choice(list(Outcome)))
        if agreement.is_scheduler:
            while released:
                key = released.pop()
                state = agreement.state(key)
                if state is not None and state.ready is ReadyState.RELEASED:  # else the drain has revoked it
                    agreement.activate([key])
                    schedule.append(key)
        elif done[agreement.rank] < len(schedule):
            agreement.activate([schedule[done[agreement.rank]]])
            done[agreement.rank] += 1
    except WouldBlock:
        pass
    except LocalProtocolError as error:  # the liar may have made the request something else meanwhile
        if "activation needs" not in str(error):
            raise


@pytest.mark.parametrize("block", range(4))
def test_a_lying_follower_cannot_split_the_honest(block):
    """the honest see one order of decisions; a lie that is found stops all of them; never an internal error."""
    stopped = decided = proven = 0
    for seed in range(block * 60, block * 60 + 60):
        honest, finals, drained = life(seed, liar_coordinates=False)
        short, long = sorted(finals.values(), key=len)
        assert long[: len(short)] == short, f"seed {seed}"
        assert len({a.stopped is None for a in honest}) == 1, f"seed {seed}"
        for agreement in honest:
            assert agreement.stopped is None or agreement.stopped.code is not FaultCode.INTERNAL, f"seed {seed}"
        stopped += honest[0].stopped is not None
        decided += len(short)
        proven += drained == 3
    assert stopped > 10 and decided > 200 and proven > 5


@pytest.mark.parametrize("block", range(2))
def test_a_lying_coordinator_is_found_or_obeyed(block):
    """It may decide what it likes and differ in it; what contradicts a rank's own state, and what no core could, stops it."""
    stopped = decided = 0
    for seed in range(block * 60, block * 60 + 60):
        honest, finals, _drained = life(seed, liar_coordinates=True)
        for agreement in honest:
            assert agreement.stopped is None or agreement.stopped.code is not FaultCode.INTERNAL, f"seed {seed}"
            keys = [(type(e), e.key) for e in finals[agreement.rank]]
            assert len(keys) == len(set(keys)), f"seed {seed}: an event twice"
            stopped += agreement.stopped is not None
            decided += len(keys)
    assert stopped > 20 and decided > 200
