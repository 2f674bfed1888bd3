"""What a host owes to its session's peers, done by ``PeerKeeper``: deaths, links that stay away, errors, whoever comes back."""

from __future__ import annotations

import contextlib

import msgspec
import pytest

from kv_bounce_planner.planning import TransportError
from kv_bounce_planner.sessions import PeerId, PeerKeeper, ProcessIdentity, SessionConfig, events
from kv_bounce_planner.sessions.proof import WriteExecutor
from kv_bounce_planner.testing import FakeClock

#: A process of this machine that has ended: this one's number, but it began earlier.
ENDED = msgspec.structs.replace(ProcessIdentity.own(), started=0)


class Dialler:
    """Says whom it dialled."""

    def __init__(self) -> None:
        self.dialled = []

    def connect(self, peer, address):
        self.dialled.append((peer, address))


@pytest.fixture
def held(make_lab):
    """One write that stays in flight over a transport of the given class, with the receiver's keeper."""

    def make(executor: WriteExecutor):
        lab = make_lab(1, executor=executor, linked=True, parts_max=1, landing=lambda job, part: "hold")
        lab.open()
        lab.ready()
        lab.run(8)
        dialler = Dialler()
        return lab, PeerKeeper(lab.receiver, dialler, lab.clock), dialler

    return make


def kinds(told):
    return [type(event) for event in told]


@pytest.mark.parametrize("executor", [WriteExecutor.SENDER, WriteExecutor.RECEIVER])
def test_a_process_that_ended_gives_the_memory_back(held, executor):
    """Whatever the class wants (the process's end, or the agent's), both are brought in the same poll."""
    lab, keeper, _ = held(executor)
    peer = lab.senders[0].self_id
    assert keeper.poll() == ()
    lab.world.kill(peer)
    assert keeper.watch(peer, ENDED)
    told = keeper.poll()
    assert events.TransferFailed in kinds(told) and kinds(told)[-1] is events.MemoryReleased
    assert peer not in lab.receiver.peers()


def test_a_link_that_stays_away_is_retired_at_its_time_and_not_before(held):
    """Over tcp the agent's end is the proof: the memory comes back without anybody's word."""
    lab, keeper, _ = held(WriteExecutor.RECEIVER)
    lab.network.sever(lab.peer, lab.senders[0].self_id)
    assert events.LinkLost in kinds(keeper.poll())
    lab.clock.advance(lab.config.link_timeout_s - 0.001)
    assert events.MemoryReleased not in kinds(keeper.poll())
    lab.clock.advance(0.001)
    assert events.MemoryReleased in kinds(keeper.poll())


def test_a_link_that_comes_back_is_not_retired(held):
    """Restored within its time: the peer and its agent stay."""
    lab, keeper, _ = held(WriteExecutor.RECEIVER)
    peer = lab.senders[0].self_id
    lab.network.sever(lab.peer, peer)
    keeper.poll()
    lab.network.heal(lab.peer, peer)
    told = []
    for _ in range(8):
        told += keeper.poll()
        lab.senders[0].poll()
    assert events.LinkRestored in kinds(told)
    lab.clock.advance(lab.config.link_timeout_s)
    keeper.poll()
    assert lab.receiver.peers()[peer] == "ready"


def test_a_retirement_that_fails_is_tried_again(held, monkeypatch):
    """Nothing was proven by the failed one, so nothing is released by it either."""
    lab, keeper, _ = held(WriteExecutor.RECEIVER)
    destroy = lab.receiver._transport.destroy_agent

    def refuse(instance):
        monkeypatch.setattr(lab.receiver._transport, "destroy_agent", destroy)
        raise TransportError("still referenced")

    monkeypatch.setattr(lab.receiver._transport, "destroy_agent", refuse)
    keeper.watch(lab.senders[0].self_id, ENDED)
    assert events.MemoryReleased not in kinds(keeper.poll()) and keeper.retirements_repeated == 1
    assert events.MemoryReleased in kinds(keeper.poll()) and keeper.retirements_repeated == 1


def test_a_peer_is_dialled_once_in_each_of_its_lives_here(held):
    """Again only after it was retired."""
    lab, keeper, dialler = held(WriteExecutor.RECEIVER)
    peer = lab.senders[0].self_id
    for _ in range(2):
        keeper.meet(peer, "tcp://one")
    assert dialler.dialled == [(peer, "tcp://one")]
    keeper.meet(peer, "tcp://one", ENDED)
    keeper.poll()
    keeper.meet(peer, "tcp://two")
    assert dialler.dialled[1:] == [(peer, "tcp://two")]


def test_a_side_that_only_listens_dials_nobody(make_lab):
    """Without a channel to dial on, meeting is watching."""
    lab = make_lab(1)
    keeper = PeerKeeper(lab.senders[0], None, lab.clock)
    keeper.meet(lab.peer, "", ENDED)
    keeper.poll()
    assert lab.peer not in lab.senders[0].peers()
    with contextlib.closing(keeper):
        assert keeper.poll() == ()


class Session:
    """Notes what it is told, and tells what it was given, a poll each."""

    def __init__(self, *told):
        self.config, self.told = SessionConfig(link_timeout_s=5.0), list(told)
        self.died, self.retired, self.interrupted = [], [], False

    def peer_died(self, peer, _evidence):
        if not self.interrupted:
            self.interrupted = True
            raise KeyboardInterrupt
        self.died.append(peer)

    def peers(self):
        return dict.fromkeys(RANKS, "ready")

    def retire_peer(self, *instance):
        self.retired.append(instance)

    def poll(self):
        return self.told.pop(0) if self.told else ()


RANKS = [PeerId("ctx", "c1", rank) for rank in range(2)]


def test_ranks_that_go_with_their_instance_are_dialled_again():
    """One rank's retirement ends the links of all of its instance's: none of them counts as met, or as lost, after that."""
    clock, dialler = FakeClock(), Dialler()
    session = Session(tuple(events.LinkLost(peer, "cut") for peer in RANKS))
    keeper = PeerKeeper(session, dialler, clock)
    for peer in RANKS:
        keeper.meet(peer, "tcp://one")
    keeper.poll()
    clock.advance(5.0)
    keeper.poll()
    keeper.poll()
    assert session.retired == [("ctx", "c1")]
    for peer in RANKS:
        keeper.meet(peer, "tcp://two")
    assert dialler.dialled[2:] == [(peer, "tcp://two") for peer in RANKS]


def test_a_peer_that_is_introduced_anew_is_not_retired():
    """Its link came back to another session of the same process: no ``LinkRestored``, and nothing to retire."""
    clock, peer = FakeClock(), RANKS[0]
    session = Session(
        (events.LinkLost(peer, "cut"),), (events.PeerReplaced(peer, "made again"), events.PeerIntroduced(peer))
    )
    keeper = PeerKeeper(session, None, clock)
    keeper.poll()
    keeper.poll()
    clock.advance(5.0)
    keeper.poll()
    assert session.retired == []


def test_a_death_is_told_although_an_interrupt_came_between():
    """The watch tells it once; the session hears of it at the next poll."""
    session = Session()
    keeper = PeerKeeper(session, None, FakeClock())
    keeper.watch(RANKS[0], ENDED)
    with pytest.raises(KeyboardInterrupt):
        keeper.poll()
    keeper.poll()
    assert session.died == [RANKS[0]] and session.retired == [("ctx", "c1")]
