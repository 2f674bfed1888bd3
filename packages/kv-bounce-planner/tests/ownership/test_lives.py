"""One life of a peer is never taken for another, and a broken link is not the end of a life."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from kv_bounce_planner import _errors
from kv_bounce_planner._errors import LocalProtocolError
from kv_bounce_planner.sessions import (
    AddressStillExposed,
    ExpectedOperation,
    ExposureLedger,
    MemoryRegion,
    PeerEvidence,
    PeerId,
    Receiver,
    RequestKey,
    Sender,
    SessionConfig,
    SessionResources,
    TransferIdentity,
    TransportClass,
)
from kv_bounce_planner.sessions.config import Handshake
from kv_bounce_planner.sessions.core import Progressed
from kv_bounce_planner.sessions.messages import Beat, Sealed, WriterResult, decode_frame, encode_message
from kv_bounce_planner.sessions.proof import Evidence, WriteExecutor

KEY = RequestKey(1, 0)


def rebuilt_receiver(lab, transport=None, **options):
    """The receiver made again in this process: same name, transport and channel object, as an engine would after an error."""
    resources = SessionResources(
        transport or lab.receiver._transport,
        lab.network.channel(lab.peer, linked=lab.linked),
        arena=lab.arena,
        clock=lab.clock,
    )
    return Receiver(lab.peer, resources, lab.config, **options)


def rebuilt_sender(lab, rank=0):
    peer = lab.senders[rank].self_id
    resources = SessionResources(
        lab.senders[rank]._transport, lab.network.channel(peer, linked=lab.linked), clock=lab.clock
    )
    return Sender(peer, resources, lab.config)


# --- identity -------------------------------------------------------------------------------------------------------


def test_no_two_session_objects_share_a_number_or_an_operation(make_lab):
    """Same process, same name, same request: the operations differ all the same."""
    lab = make_lab(1)
    (first,) = lab.open()
    again = make_lab(1)
    (second,) = again.open()
    assert first.operation == second.operation and first.transfer == second.transfer
    assert first != second and first.digest() != second.digest()
    assert len({lab.receiver.session, again.receiver.session, lab.senders[0].session}) == 3


@pytest.mark.parametrize("tier", ["direct", "bounce"])
def test_a_rebuilt_receiver_never_succeeds_by_an_earlier_write(make_lab, tier):
    """A write in flight, the receiver made again, the request opened elsewhere: what lands belongs to the old life."""
    lab = make_lab(1, parts_max=1, landing=lambda job, part: "hold")
    lab.open(tier=tier)
    lab.ready()
    lab.run(8)
    assert any(write.flying for write in lab.world.writes)
    lab.receiver = rebuilt_receiver(lab, ledger=ExposureLedger())
    lab.events.clear()
    plan = lab.plan(0, request=2)
    lab.receiver.open(lab.identity(1), [ExpectedOperation(lab.senders[0].self_id, 512, b"", plan.writer)])
    lab.run(10)
    lab.world.landing = lambda job, part: "land"
    lab.run(20)
    assert "TransferSucceeded" not in lab.names()
    # Refused by name while the earlier write was not known to be over, so the new memory was never exposed to a late byte.
    (failed,) = [event for event in lab.events if type(event).__name__ == "TransferFailed"]
    assert "earlier session" in failed.reason
    assert lab.names()[-1] == "MemoryReleased"
    assert "PeerReplaced" in lab.sent_names()


def test_a_rebuilt_receiver_is_served_once_the_earlier_write_is_over(make_lab):
    """The fence opens with the fact it waits for: then the same name works again, exactly."""
    lab = make_lab(1)
    lab.open()
    lab.ready()
    lab.run()
    lab.senders[0].seal(KEY)
    lab.run(2)
    lab.target[:] = 0
    lab.receiver = rebuilt_receiver(lab, ledger=ExposureLedger())
    lab.events.clear()
    lab.open(2)
    lab.ready(2)
    lab.run()
    assert lab.names() == ["PeerIntroduced", "TransferSucceeded", "MemoryReleased"]
    assert lab.in_place()


def test_a_rebuilt_receiver_may_not_expose_what_its_predecessor_exposed(make_lab):
    """The ledger of a name outlives the session object: same block or same address, refused before anything leaves."""
    lab = make_lab(1, ledger=None, landing=lambda job, part: "hold")
    lab.receiver._ledger = ExposureLedger.of(PeerId("ledger-of-a-test", "g1", 0))
    lab.open(blocks=["b7"])
    lab.ready()
    lab.run(5)
    again = rebuilt_receiver(lab, ledger=ExposureLedger.of(PeerId("ledger-of-a-test", "g2", 0)))
    peer = lab.senders[0].self_id
    with pytest.raises(AddressStillExposed, match="b7"):
        again.open(lab.identity(9), [ExpectedOperation(peer, 64)], blocks=["b7"])
    with pytest.raises(AddressStillExposed, match="addresses"):
        again.open(lab.identity(9), [ExpectedOperation(peer, 512, b"", lab.plan(0).writer)])


def test_a_rebuilt_sender_says_nothing_about_its_predecessors_writes(make_lab):
    """It never posted anything, so its word would be "sealed, never posted": not about an operation of another life."""
    lab = make_lab(1, parts_max=1, landing=lambda job, part: "hold")
    (operation,) = lab.open()
    lab.ready()
    lab.run(8)
    lab.senders[0] = rebuilt_sender(lab)
    lab.receiver.cancel(lab.identity())
    lab.run(10)
    assert "MemoryReleased" not in lab.names()
    assert "PeerReplaced" in lab.names()
    assert lab.state(operation) == "IN_DOUBT"
    lab.target[:] = 0
    assert lab.world.land_everything() > 0, "the write was not under way: the test shows nothing"
    assert lab.target.any() and not lab.receiver.drain().quiescent
    lab.receiver.retire_peer("ctx", "c1")
    lab.run(3)
    assert lab.names()[-1] == "MemoryReleased"
    lab.target[:] = 7
    assert lab.world.land_everything() == 0 and (lab.target == 7).all()


def test_both_sides_find_out_at_the_first_message(make_lab):
    """Whichever side was made again: its peer's first frame to the old life, or its own first frame, tells both."""
    lab = make_lab(1, landing=lambda job, part: "hold")
    lab.open()
    lab.run(3)
    lab.senders[0] = rebuilt_sender(lab)
    lab.receiver.cancel(lab.identity())
    lab.run(2)
    assert [type(e).__name__ for e in lab.events if "Peer" in type(e).__name__] == ["PeerReplaced"]
    lab.open(2)
    lab.ready(2)
    lab.world.landing = lambda job, part: "land"
    lab.run()
    assert {"PeerIntroduced", "TransferSucceeded"} <= set(lab.names())


def test_two_receivers_of_one_name_at_once_are_told_apart(make_lab):
    """The later one takes the name; the earlier one's operations are in doubt, never ended by the other's messages."""
    lab = make_lab(1, landing=lambda job, part: "hold")
    lab.open()
    lab.ready()
    lab.run(6)
    first = lab.receiver
    (operation,) = first._of_operation
    lab.receiver = rebuilt_receiver(lab, lab.world.transport(lab.peer), ledger=ExposureLedger())
    lab.receiver.introduce([lab.senders[0].self_id])
    lab.run(3)
    # The network gives frames to whoever polls: the first one now sees what is meant for the second.
    lab.inject(lab.senders[0].self_id, lab.peer, Beat(False))
    first.poll()
    assert first.state_of(operation) in ("EXPOSED", "IN_DOUBT")
    assert first.statistics()["other_session"] >= 1
    assert not first.drain().quiescent


@pytest.mark.parametrize("what", ["FakeTransport", "FakeChannel"])
def test_a_session_whose_transport_or_channel_another_one_polls_says_so(make_lab, what):
    """What one of two sessions takes from them, the other never sees: an error by name, not a transfer that never ends."""
    lab = make_lab(1)
    shared = {"FakeTransport": lab.receiver._transport, "FakeChannel": lab.receiver._channel}[what]
    other = SessionResources(
        shared if what == "FakeTransport" else lab.world.transport(lab.peer),
        shared if what == "FakeChannel" else lab.network.channel(PeerId("gen", "g2", 0)),
    )
    sender = Sender(lab.peer, other)
    with pytest.raises(LocalProtocolError, match=f"works with the same {what}"):
        lab.receiver.poll()
    sender.poll()


@pytest.mark.parametrize(
    ("theirs", "ours", "word"),
    [
        (Handshake(model="llama-1b@1"), Handshake(model="llama-1b@2"), "model"),
        (Handshake(dtype="bfloat16"), Handshake(dtype="float16"), "dtype"),
        (Handshake(layer_total=32), Handshake(layer_total=30), "layer_total"),
        (Handshake(layout=b"a" * 16), Handshake(layouts=lambda peer: b"b" * 16), "layout"),
    ],
)
@pytest.mark.parametrize("side", ["receiver", "sender"])
def test_what_differs_in_the_handshake_is_refused_on_both_sides(make_lab, theirs, ours, word, side):
    """Before anything is published; both sides learn the field and both values; memory was never exposed."""
    lab = make_lab(1, introduced=False)
    lab.receiver._handshake, lab.senders[0]._handshake = (ours, theirs) if side == "receiver" else (theirs, ours)
    lab.open()
    lab.ready()
    lab.run()
    assert lab.names() == ["PeerRefused", "TransferFailed", "MemoryReleased"]
    assert word in lab.events[0].reason and word in lab.events[1].reason
    (refused,) = [event for event in lab.sent[0] if type(event).__name__ == "PeerRefused"]
    assert word in refused.reason
    assert not lab.world.writes


def test_a_second_agent_of_a_known_life_is_refused(make_lab):
    """An agent belongs to a life: the same session with another agent is not believed."""
    lab = make_lab(1)
    receiver = lab.receiver
    lab.receiver._transport._agents.clear()
    frame = receiver._hello_frame(receiver._lives[lab.senders[0].self_id], lab.senders[0].session, is_reply=False)
    lab.network.inject(lab.peer, lab.senders[0].self_id, frame)
    lab.run(2)
    assert any("agent" in event.reason for event in lab.sent[0] if type(event).__name__ == "PeerRefused")


def test_an_agent_that_cannot_be_connected_is_told_to_both(make_lab, monkeypatch):
    """A receiver that cannot learn the writer's agent would never see a notification: nothing is published to it."""
    lab = make_lab(1, introduced=False)

    def refuse(peer, info):
        raise RuntimeError("no route to that fabric")

    monkeypatch.setattr(lab.receiver._transport, "connect", refuse)
    lab.open()
    lab.ready()
    lab.run()
    assert lab.names() == ["PeerRefused", "TransferFailed", "MemoryReleased"]
    assert "no route to that fabric" in lab.events[0].reason
    assert "PeerRefused" in lab.sent_names() and not lab.world.writes


# --- links ----------------------------------------------------------------------------------------------------------

POINTS = 12


@pytest.mark.parametrize("tier", ["direct", "bounce", "pull"])
@pytest.mark.parametrize("point", range(POINTS))
def test_a_link_that_breaks_at_any_point_loses_nothing(make_lab, tier, point):
    """Severed after that many turns with every frame under way, then healed: success, exact bytes, no quarantine."""
    lab = make_lab(2, linked=True, parts_max=1)
    lab.open(tier=tier)
    if point % 2:
        lab.ready()
    lab.run(point // 2)
    for sender in lab.senders:
        lab.network.sever(lab.peer, sender.self_id)
    lab.run(3)
    if not point % 2:
        lab.ready()
    lab.run(2)
    for sender in lab.senders:
        lab.network.heal(lab.peer, sender.self_id)
    lab.run(30)
    assert [name for name in lab.names() if "Link" not in name] == ["TransferSucceeded", "MemoryReleased"]
    assert lab.in_place()
    assert lab.names().count("LinkLost") == lab.names().count("LinkRestored") == 2
    assert lab.receiver.statistics()["quarantined_count"] == 0
    for sender in lab.senders:
        sender.seal(KEY)
    lab.run(3)
    assert all("SourceReleased" in lab.sent_names(rank) for rank in (0, 1))
    assert lab.arena.statistics().held_bytes == 0


@pytest.mark.parametrize("point", range(POINTS))
def test_a_cancel_across_a_broken_link_frees_the_memory(make_lab, point):
    """Cancelled while the link is away: the cancel is said again when it is back, and answered."""
    lab = make_lab(1, linked=True, parts_max=1)
    lab.open(tier=("direct", "bounce", "pull")[point % 3])
    lab.ready()
    lab.run(point // 2)
    lab.network.sever(lab.peer, lab.senders[0].self_id)
    lab.receiver.cancel(lab.identity())
    lab.run(3)
    lab.network.heal(lab.peer, lab.senders[0].self_id)
    lab.run(20)
    ends = [name for name in lab.names() if "Link" not in name]
    assert ends in (["TransferCancelled", "MemoryReleased"], ["TransferSucceeded", "MemoryReleased"])
    assert lab.receiver.drain().quiescent and lab.receiver.statistics()["quarantined_count"] == 0


def test_nothing_goes_ahead_of_what_is_asked_again(make_lab):
    """Two requests are lost with the link; the later one is cancelled before the sender has shown itself again: both end."""
    lab = make_lab(1, linked=True)
    lab.open()
    lab.run(3)  # introduced, and heard
    sender = lab.senders[0].self_id
    lab.open(2)
    lab.open(3)
    lab.run(1, senders=())
    assert lab.network.sever(lab.peer, sender) == 2
    lab.network.heal(lab.peer, sender)
    lab.run(1, senders=())
    lab.receiver.cancel(lab.identity(3), "gone")
    lab.run(2, senders=())
    lab.receiver.cancel(lab.identity(2), "gone")
    lab.run(10)
    lab.receiver.cancel(lab.identity())
    lab.run(10)
    assert lab.names().count("MemoryReleased") == 3 and lab.receiver.drain().quiescent
    assert lab.senders[0].statistics().get("late", 0) == 0, "a cancel of a request that it never saw"


@pytest.mark.parametrize("tier", ["bounce", "pull"])
def test_every_message_may_be_repeated(make_lab, tier):
    """All frames of a whole transfer, each twice in a row: the same end, no conflict on either side."""
    lab = make_lab(1)
    original = lab.network._send

    def twice(source, target, frame):
        original(source, target, frame)
        original(source, target, frame)

    lab.network._send = twice
    lab.open(tier=tier)
    lab.ready()
    lab.run(30)
    assert lab.names() == ["TransferSucceeded", "MemoryReleased"] and lab.in_place()
    assert lab.receiver.statistics().get("conflicts", 0) == lab.senders[0].statistics().get("conflicts", 0) == 0


def test_a_link_that_stays_away_puts_its_operations_in_doubt_by_name(make_lab):
    """Not before its time; and if it comes back afterwards, what is true is learnt and nothing is quarantined."""
    lab = make_lab(1, linked=True, config=SessionConfig(link_timeout_s=5.0, drain_deadline_s=100.0))
    (operation,) = lab.open()
    lab.run(3)
    lab.network.sever(lab.peer, lab.senders[0].self_id)
    lab.run(2)
    lab.clock.advance(4.9)
    lab.run(2)
    assert lab.names() == ["LinkLost"] and lab.state(operation) == "EXPOSED"
    lab.clock.advance(0.2)
    lab.run(2)
    assert lab.names() == ["LinkLost", "TransferFailed"] and "5 s" in lab.events[1].reason
    assert lab.state(operation) == "IN_DOUBT"
    lab.network.heal(lab.peer, lab.senders[0].self_id)
    lab.run(5)
    assert lab.names()[2:] == ["LinkRestored", "MemoryReleased"]


def test_a_channel_without_link_events_heals_too(make_lab):
    """A send that failed puts operations in doubt at once; when frames go through again the peer's word ends the doubt."""
    lab = make_lab(1)
    lab.open()
    lab.run(3)
    lab.network.cut(lab.peer, lab.senders[0].self_id)
    lab.receiver.cancel(lab.identity())
    lab.run(3)
    assert lab.names() == ["TransferCancelled", "LinkLost"]
    lab.network._cut.clear()
    for _ in range(4):
        lab.clock.advance(1.1)
        lab.run(2)
    assert lab.names()[-2:] == ["LinkRestored", "MemoryReleased"]
    lab.open(2)
    lab.ready(2)
    lab.run()
    assert lab.names()[-2:] == ["TransferSucceeded", "MemoryReleased"]


def test_a_silent_peer_loses_its_lease_and_gets_it_back(make_lab):
    """Black hole: frames leave and nothing comes. The link is given up after the lease, and comes back with the peer."""
    lab = make_lab(1, linked=True, config=SessionConfig(lease_s=5.0, heartbeat_s=1.0, link_timeout_s=60.0))
    lab.open()
    lab.run(3)
    for _ in range(4):
        lab.clock.advance(1.0)
        lab.run(1, senders=[])
    assert lab.names() == []
    for _ in range(4):
        lab.clock.advance(1.0)
        lab.run(1, senders=[])
    assert lab.names() == ["LinkLost"] and lab.receiver._channel.resets == [lab.senders[0].self_id]
    lab.network.sever(lab.peer, lab.senders[0].self_id)
    lab.network.heal(lab.peer, lab.senders[0].self_id)
    lab.ready()
    lab.run()
    assert lab.names() == ["LinkLost", "LinkRestored", "TransferSucceeded", "MemoryReleased"]


def test_a_peer_that_answers_keeps_its_lease_however_long_it_takes(make_lab):
    """A prefill of minutes is not silence: signs of life are asked for and given."""
    lab = make_lab(1, config=SessionConfig(lease_s=5.0, heartbeat_s=1.0))
    lab.open()
    for _ in range(60):
        lab.clock.advance(1.0)
        lab.run(1)
    assert lab.names() == []


def test_our_own_pause_is_not_the_peers_silence(make_lab):
    """A process that stood still for a minute (SIGSTOP) finds its peers where it left them."""
    lab = make_lab(1, config=SessionConfig(lease_s=5.0, heartbeat_s=1.0))
    lab.open()
    lab.run(3)
    lab.clock.advance(60.0)
    lab.ready()
    lab.run()
    assert lab.names() == ["TransferSucceeded", "MemoryReleased"]


def test_retiring_a_peer_leaves_nothing_of_it(make_lab):
    """Agent, link, queues, numbers: fifty peers that came and died leave the session as it was."""
    lab = make_lab(1, linked=True)
    before = (len(lab.receiver._lives), len(lab.receiver._transport._agents))
    for life in range(50):
        peer = PeerId("ctx", f"life{life}", 0)
        sender = Sender(
            peer, SessionResources(lab.world.transport(peer), lab.network.channel(peer, linked=True), clock=lab.clock)
        )
        plan = lab.plan(0, request=3).writer
        identity = TransferIdentity(100 + life, 0, "g1", 0)
        lab.receiver.open(identity, [ExpectedOperation(peer, 512, b"", plan)])
        for _ in range(4):
            lab.receiver.poll()
            sender.poll()
        lab.world.kill(peer)
        lab.receiver.peer_died(peer, PeerEvidence.PROCESS_REAPED)
        lab.receiver.retire_peer("ctx", f"life{life}")
        names = [type(event).__name__ for event in lab.receiver.poll()]
        assert "MemoryReleased" in names
    assert (len(lab.receiver._lives), len(lab.receiver._transport._agents)) == before
    assert len(lab.receiver._channel.disconnected) == 50
    assert lab.receiver.statistics()["quarantined_count"] == 0 and lab.receiver.drain().quiescent


def test_a_sender_retires_a_dead_receiver_too(make_lab):
    """The sender has a life of its peers as well: what was in flight to a dead receiver is proven over, nothing stays."""
    lab = make_lab(1, landing=lambda job, part: "hold")
    lab.open()
    lab.ready()
    lab.run(6)
    sender = lab.senders[0]
    sender.seal(KEY)
    sender.peer_died(lab.peer, PeerEvidence.PROCESS_REAPED)
    sender.retire_peer("gen", "g1")
    lab.run(2, receiver=False)
    assert lab.sent_names()[-1] == "SourceReleased"
    assert not sender._lives and not sender._flying and not sender._high_water


def other_of(lab, name="c9", **more):
    """Another sender's process over the lab's fakes."""
    peer = PeerId("ctx", name, 0)
    resources = SessionResources(
        lab.world.transport(peer), lab.network.channel(peer, linked=lab.linked), clock=lab.clock, **more
    )
    return Sender(peer, resources, lab.config)


def bury(lab, peer):
    lab.receiver.peer_died(peer, PeerEvidence.PROCESS_REAPED)
    lab.receiver.retire_peer(*peer.instance)


@pytest.mark.parametrize("heard", [True, False])
def test_the_last_frames_of_a_dead_process_bring_nothing_of_it_back(make_lab, heard):
    """It introduced itself and died; its hello comes after its records went, whether it was ever heard before or not."""
    lab = make_lab(1, linked=True)
    dead = other_of(lab)
    dead.introduce([lab.peer])
    dead.poll()
    (hello,) = lab.network._queues[(dead.self_id, lab.peer)]
    if not heard:
        lab.network._queues.pop((dead.self_id, lab.peer))
    lab.run(1)
    bury(lab, dead.self_id)
    before = (set(lab.receiver._lives), len(lab.receiver._transport._agents))
    lab.network.inject(dead.self_id, lab.peer, hello)
    assert lab.run(3, senders=[]) == []
    assert (set(lab.receiver._lives), len(lab.receiver._transport._agents)) == before
    assert lab.receiver.statistics()["of_the_dead"] == 1
    if heard:  # of a session that is known to be dead nothing counts, whatever it names
        answer = dead._hello_frame(dead._lives[lab.peer], lab.receiver.session, is_reply=True)
        lab.network.inject(dead.self_id, lab.peer, answer)
        lab.network.inject(dead.self_id, lab.peer, answer)
        assert lab.run(3, senders=[]) == [] and lab.receiver.statistics()["of_the_dead"] == 3
    lab.clock.advance(lab.config.introduction_timeout_s + 1)
    lab.run(2, senders=[])
    assert not lab.receiver._strangers and lab.receiver._channel.disconnected[-1] == dead.self_id


def test_a_dead_process_that_cannot_be_answered_is_forgotten_at_once(make_lab):
    """Its connection is gone when its last hello is read: there is nobody to wait for, and nothing stays of its link."""
    lab = make_lab(1, linked=True)
    dead = other_of(lab)
    dead.introduce([lab.peer])
    dead.poll()
    bury(lab, dead.self_id)
    lab.network.cut(lab.peer, dead.self_id)
    assert lab.run(1, senders=[]) == [] and lab.receiver.statistics()["of_the_dead"] == 1
    assert not lab.receiver._strangers and lab.receiver._channel.disconnected == [dead.self_id]


def test_an_answer_that_a_dead_process_sent_before_is_no_sign_of_life(make_lab):
    """It names our session, which it heard of while it lived: only what it says after it was asked again counts."""
    lab = make_lab(1)
    dead = other_of(lab)
    lab.receiver.introduce([dead.self_id])
    lab.receiver.poll()
    lab.network.hold(dead.self_id, lab.peer)
    dead.poll()
    bury(lab, dead.self_id)
    lab.network.let(dead.self_id, lab.peer)
    lab.run(3, senders=[])
    assert dead.self_id not in lab.receiver._lives and lab.receiver.statistics()["of_the_dead"] == 1


@pytest.mark.parametrize("first", ["it", "we", "both"])
@pytest.mark.parametrize("retired", [True, False])
def test_a_process_under_a_dead_ones_name_is_another_life(make_lab, first, retired):
    """Restored under the same name and generation: known as soon as it shows that it hears us, whoever speaks first."""
    lab = make_lab(1, linked=True)
    dead = other_of(lab)
    lab.receiver.introduce([dead.self_id])
    for _ in range(3):
        lab.receiver.poll()
        dead.poll()
    lab.world.kill(dead.self_id)
    lab.receiver.peer_died(dead.self_id, PeerEvidence.PROCESS_REAPED)
    if retired:
        lab.receiver.retire_peer(*dead.self_id.instance)
    lab.world.killed.discard(dead.self_id)
    again = other_of(lab)
    again.peer_died(lab.peer, PeerEvidence.PROCESS_REAPED)  # each side takes the other for dead
    if first != "it":
        lab.receiver.introduce([again.self_id])
    if first != "we":
        again.introduce([lab.peer])
    for _ in range(8):
        lab.receiver.poll()
        again.poll()
    if first == "we" and not retired:  # a dead life is not spoken to before it was retired
        assert lab.receiver._lives[again.self_id].dead
        return
    assert lab.receiver.peers()[again.self_id] == "ready" and again.peers()[lab.peer] == "ready"
    assert lab.receiver._lives[again.self_id].session == again.session and not lab.receiver._gone


# --- proof for RDMA -------------------------------------------------------------------------------------------------


def test_rdma_has_a_reachable_proof(make_lab):
    """NIC-executed (stand-in): after the sender's death its NIC goes on; our agent's end with its registrations ends it."""
    lab = make_lab(1, executor=WriteExecutor.NIC, parts_max=1, landing=lambda job, part: "hold")
    (operation,) = lab.open()
    lab.ready()
    lab.run(8)
    lab.kill(0)
    lab.receiver.peer_died(lab.senders[0].self_id, PeerEvidence.PROCESS_REAPED)
    lab.run(2)
    assert lab.state(operation) == "IN_DOUBT", "a dead process says nothing about a NIC"
    flying = sum(len(write.flying) for write in lab.world.writes)
    assert flying
    lab.receiver.retire_peer("ctx", "c1")
    lab.run(2)
    assert lab.names()[-1] == "MemoryReleased"
    lab.target[:] = 9
    assert lab.world.land_everything() == 0 and (lab.target == 9).all()


def test_rdma_without_deregistration_is_never_proven(make_lab):
    """The library could not give the registration back: the key still opens the memory, and late bytes land."""
    lab = make_lab(1, executor=WriteExecutor.NIC, parts_max=1, landing=lambda job, part: "hold")
    lab.world.sticky_keys = True
    (operation,) = lab.open()
    lab.ready()
    lab.run(8)
    lab.kill(0)
    lab.receiver.peer_died(lab.senders[0].self_id, PeerEvidence.PROCESS_REAPED)
    lab.receiver.retire_peer("ctx", "c1")
    lab.run(2)
    assert lab.state(operation) == "IN_DOUBT" and "MemoryReleased" not in lab.names()
    lab.clock.advance(11)
    lab.run(2)
    assert lab.names()[-1] == "MemoryQuarantined"


# --- foreign errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, ValueError])
def test_an_end_whose_callback_was_interrupted_is_delivered_again(make_lab, error):
    """Once: the memory's end is not lost, and until it is delivered the session is not quiescent."""
    raised = []

    def callback(event):
        if not raised:
            raised.append(event)
            raise error("once")

    lab = make_lab(1, on_memory=callback)
    lab.open()
    lab.ready()
    with contextlib.suppress(error):
        lab.run()
    assert raised and (error is ValueError or not lab.receiver.drain().quiescent)
    lab.run(3)
    assert lab.names().count("MemoryReleased") == 1
    assert lab.receiver.drain().quiescent


def test_a_callback_may_join_a_thread_that_cancels(make_lab):
    """Callbacks run outside the session's lock."""
    import threading

    cancelled = []

    def callback(event):
        thread = threading.Thread(target=lambda: cancelled.append(lab.receiver.cancel(lab.identity(2))))
        thread.start()
        thread.join(10)
        assert not thread.is_alive(), "the callback holds the session's lock"

    lab = make_lab(1, on_memory=callback)
    lab.open(2)
    lab.run(2)
    lab.open()
    lab.ready()
    lab.run()
    assert cancelled[0] is True


def test_a_poll_from_a_callback_is_refused_and_changes_nothing(make_lab):
    """Re-entrance is the host's mistake: told, and the end is delivered again."""
    lab = make_lab(1, on_memory=lambda event: lab.receiver.poll())
    lab.open()
    lab.ready()
    lab.run()
    assert isinstance(lab.receiver.last_error, _errors.LocalProtocolError)
    lab.receiver._on_memory = None
    lab.run(2)
    assert lab.names()[-1] == "MemoryReleased"


class Bad:
    """A foreign part that raises what it is told to."""

    def __init__(self, error):
        self.error = error

    def encode(self, transfer, operation, base):
        raise self.error

    def check(self, plan, report, operation, base):
        raise self.error


@pytest.mark.parametrize("error", [RuntimeError("codec"), ValueError("too many ranges"), MemoryError()])
def test_a_codec_that_raises_ends_its_operation_and_no_other(make_lab, error):
    """At the sender: unposted, sealed. The other request of the same poll is served."""
    lab = make_lab(1)
    good = lab.senders[0]._reports
    lab.open(1, tier="bounce")
    lab.open(2)
    lab.senders[0]._reports = Bad(error)
    lab.ready(1)
    lab.ready(2)
    lab.run()
    ends = {(event.identity.request_id, type(event).__name__) for event in lab.events if hasattr(event, "identity")}
    assert ends == {
        (1, "TransferFailed"), (1, "MemoryReleased"), (2, "TransferSucceeded"), (2, "MemoryReleased"),
    }  # fmt: skip
    lab.senders[0]._reports = good
    assert lab.arena.statistics().held_bytes == lab.senders[0]._arena.statistics().held_bytes == 0


def test_a_check_that_raises_refuses_the_report(make_lab):
    """At the receiver: whatever a codec raises, the report is not believed."""
    lab = make_lab(1)
    lab.receiver._reports, sender = Bad(ZeroDivisionError("codec")), lab.senders[0]
    lab.open(1, tier="bounce")
    lab.open(2)
    lab.ready(1)
    lab.ready(2)
    lab.run()
    assert {e.identity.request_id for e in lab.events if type(e).__name__ == "TransferSucceeded"} == {2}
    assert sender.statistics()["operations_done"] == 2


class BadHandle:
    def __init__(self, error):
        self.error = error

    def done(self):
        raise self.error

    def wait(self):
        raise self.error


@pytest.mark.parametrize("side", ["receiver", "sender"])
def test_a_copy_handle_that_raises_anything_ends_its_operation(make_lab, side):
    """A device's error in any shape: that transfer fails, the other goes on, nothing of the first is reused."""
    lab = make_lab(1)
    shell = lab.receiver if side == "receiver" else lab.senders[0]
    copier = shell._copier
    submit = copier.submit

    class Copier:
        def prepare(self, *rest):
            return copier.prepare(*rest)

        def submit(self, prepared):
            submit(prepared)
            return BadHandle(OSError("device"))

    shell._copier, shell._errors_prove_idle = Copier(), False
    lab.open(1, tier="bounce")
    lab.open(2)
    lab.ready(1)
    lab.ready(2)
    lab.run()
    names = {(e.identity.request_id, type(e).__name__) for e in lab.events if hasattr(e, "identity")}
    assert (2, "TransferSucceeded") in names and (1, "TransferFailed") in names
    assert (1, "MemoryReleased") not in names or side == "sender"


def test_deadlines_run_whatever_else_fails(make_lab, monkeypatch):
    """A transport whose every poll raises, a channel too: the drain clock still ends in a named quarantine."""
    lab = make_lab(1, parts_max=1, landing=lambda job, part: "hold")
    lab.open()
    lab.ready()
    lab.run(6)

    def broken(*_):
        raise RuntimeError("driver")

    monkeypatch.setattr(lab.receiver._transport, "poll", broken)
    monkeypatch.setattr(lab.receiver._channel, "poll", broken)
    lab.receiver.cancel(lab.identity())
    lab.clock.advance(11)
    lab.run(2)
    assert lab.names() == ["TransferCancelled", "MemoryQuarantined"]
    assert "driver" in str(lab.receiver.last_error)


def test_an_interrupt_in_a_planner_loses_nothing(make_lab):
    """``resolve`` is interrupted once: the operation is asked for again at the next poll."""
    lab = make_lab(1)
    tries = []

    def resolve(request):
        tries.append(request)
        if len(tries) == 1:
            raise KeyboardInterrupt
        return lab.plan(0)

    lab.open()
    lab.run(2)
    lab.senders[0].ready(KEY, resolve)
    with pytest.raises(KeyboardInterrupt):
        lab.senders[0].poll()
    assert lab.run() == ["TransferSucceeded", "MemoryReleased"]


# --- time-outs ------------------------------------------------------------------------------------------------------


def test_a_transfer_that_never_ends_times_out_with_its_state(make_lab):
    """Waiting for a prefill that never comes: failed by name, sealed, free."""
    lab = make_lab(1, config=SessionConfig(operation_timeout_s=50.0, lease_s=None))
    lab.open()
    lab.run(3)
    lab.clock.advance(51)
    lab.run(1, senders=[])
    lab.run(5)
    assert lab.names() == ["TransferFailed", "MemoryReleased"]
    assert lab.events[0].reason == "timed out in EXPOSED"


def test_one_transfer_may_have_a_time_of_its_own(make_lab):
    """``open(timeout_s=...)``; the others keep theirs."""
    lab = make_lab(1)
    lab.open(1)
    lab.open(2, timeout_s=2.0)
    lab.run(3)
    lab.clock.advance(3)
    lab.run(5)
    assert {e.identity.request_id for e in lab.events} == {2}


@pytest.mark.parametrize("state", ["HELD", "WANTED", "GATHERING", "IN_FLIGHT"])
def test_every_pending_state_of_a_sender_times_out_by_name(make_lab, state):
    """Whatever it waits for: the prefill, a grant, a copy, a write."""
    config = SessionConfig(operation_timeout_s=50.0, lease_s=None, drain_deadline_s=20.0, bounce_wait_s=1e9)
    lab = make_lab(1, parts_max=64, landing=lambda job, part: "hold", config=config)
    sender = lab.senders[0]
    if state == "WANTED":
        lab.arena.reserve("somebody", {0: lab.arena.largest_region_bytes()})
        sender.config = SessionConfig(operation_timeout_s=50.0, lease_s=None, gathers_ahead_max=0)

    class Never:
        def prepare(self, *_):
            return None

        def submit(self, prepared):
            return self

        def done(self):
            return False

    if state == "GATHERING":
        sender._copier = Never()
    (operation,) = lab.open(tier="direct" if state in ("HELD", "IN_FLIGHT") else "bounce", timeout_s=1e6)
    lab.run(2)
    if state != "HELD":
        lab.ready()
    lab.run(6)
    assert sender.state_of(operation) == state
    lab.clock.advance(51)
    lab.run(3)
    lab.clock.advance(21)
    lab.run(3)
    (failed,) = [event for event in lab.sent[0] if type(event).__name__ == "OperationFailed"]
    assert failed.reason == f"timed out in {state} after 50 s"
    assert sender.drain().in_doubt == () and sender.state_of(operation) in ("SEALED", "QUARANTINED")


# --- plans at the door ----------------------------------------------------------------------------------------------


def test_plans_are_checked_when_a_session_accepts_them(make_lab):
    """Another rank's plan, two writers of one byte, bytes that are exposed already: refused, nothing taken over."""
    lab = make_lab(2)
    peers = [sender.self_id for sender in lab.senders]
    plans = [lab.plan(rank).writer for rank in (0, 1)]
    with pytest.raises(_errors.LocalProtocolError, match="writer 1's"):
        lab.receiver.open(lab.identity(), [ExpectedOperation(peers[0], 512, b"", plans[1])])
    same = type(plans[0])(1, plans[0].target_addresses + 32, plans[0].sizes, 8, 8)
    with pytest.raises(_errors.LocalProtocolError, match="two writers"):
        lab.receiver.open(
            lab.identity(),
            [ExpectedOperation(peers[0], 512, b"", plans[0]), ExpectedOperation(peers[1], 512, b"", same)],
        )
    lab.open(1)
    with pytest.raises(AddressStillExposed):
        lab.receiver.open(lab.identity(2), [ExpectedOperation(peers[0], 512, b"", plans[0])])
    lab.ready()
    assert lab.run() == ["TransferSucceeded", "MemoryReleased"]
    lab.receiver.open(lab.identity(3), [ExpectedOperation(peers[0], 512, b"", plans[0])])
    assert lab.receiver._ledger._ranges.shape == (3, 8)


def test_the_ledger_agrees_with_a_set_of_bytes():
    """Random ranges entered and taken out, against one entry per byte."""
    rng = np.random.default_rng(5)
    ledger, held = ExposureLedger(), {}
    for number in range(400):
        if held and rng.random() < 0.4:
            gone = rng.choice(sorted(held))
            ledger.leave(TransferIdentity(int(gone), 0, "g", 0), ())
            del held[gone]
            continue
        starts = np.sort(rng.choice(60, rng.integers(1, 4), replace=False)) * 10 + rng.integers(0, 5)
        ends = starts + rng.integers(1, 6)
        wanted = {b for s, e in zip(starts, ends) for b in range(s, e)}
        free = not any(wanted & each for each in held.values())
        try:
            ledger.enter(TransferIdentity(number, 0, "g", 0), (), (starts.astype(np.int64), ends.astype(np.int64)))
        except AddressStillExposed:
            assert not free
        else:
            assert free
            held[number] = wanted
    assert held


def test_settled_requests_leave_by_themselves_and_do_not_count(make_lab):
    """Request 11 of a bound of 10 is served although nobody ever calls ``forget``."""
    lab = make_lab(1, config=SessionConfig(transfers_max=3))
    for request in range(1, 12):
        lab.open(request)
        lab.ready(request)
        lab.run(8)
        lab.senders[0].seal(RequestKey(request, 0))
        lab.run(2)
        assert lab.senders[0].snapshot(RequestKey(request, 0)).outcome == "COMPLETED"
    assert lab.names().count("TransferSucceeded") == 11
    assert len(lab.senders[0]._requests) <= 4
    assert lab.senders[0].pending() == ()


def test_cancelled_requests_are_not_pending(make_lab):
    """``pending`` lists what still waits for a prefill."""
    lab = make_lab(1)
    lab.open(1)
    lab.open(2)
    lab.run(3)
    lab.receiver.cancel(lab.identity(1))
    lab.run(3)
    assert [each.operation.request.request_id for each in lab.senders[0].pending()] == [2]


# --- foreign errors in the shell's own steps --------------------------------------------------------------------------


def test_a_link_event_that_cannot_be_answered_loses_no_frame_and_heals(make_lab, monkeypatch):
    """Up again, and the agent's metadata cannot be had: frames of the same poll count, and the link's return is told again."""
    lab = make_lab(1, linked=True)
    lab.open()
    lab.run(3)
    lab.network.sever(lab.peer, lab.senders[0].self_id)
    lab.run(1)
    original, failures = lab.receiver._transport.agent_info, []

    def broken(peer):
        if not failures:
            failures.append(peer)
            raise OSError("driver")
        return original(peer)

    monkeypatch.setattr(lab.receiver._transport, "agent_info", broken)
    lab.network.heal(lab.peer, lab.senders[0].self_id)
    lab.ready()
    lab.run(20)
    assert failures and "driver" in str(lab.receiver.last_error)
    assert lab.receiver._channel.resets == failures, "the channel would never tell of that link again"
    lab.network.heal(lab.peer, lab.senders[0].self_id)
    lab.run(20)
    assert lab.names()[-2:] == ["TransferSucceeded", "MemoryReleased"]


def test_frames_taken_from_a_channel_survive_its_link_events(make_lab, monkeypatch):
    """The channel hands a frame out once: what raises after it (here the channel itself) may not lose it."""
    lab = make_lab(1, linked=True)
    lab.open()
    lab.run(4)
    lab.ready()
    lab.run(6, receiver=False)
    calls = []

    def broken():
        calls.append(1)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(lab.receiver._channel, "link_events", broken)
        with pytest.raises(KeyboardInterrupt):
            lab.receiver.poll()
    assert calls and lab.run(10)[-2:] == ["TransferSucceeded", "MemoryReleased"]


def test_a_layout_that_cannot_be_looked_up_refuses_by_name_and_is_tried_again(make_lab):
    """A host's look-up raises during an introduction: the transfer fails at once, and the next one works."""
    answers = [LookupError("the catalogue is away")]

    def layouts(peer):
        if answers:
            raise answers.pop()
        return b""

    lab = make_lab(1, introduced=False, handshake=Handshake(layouts=layouts))
    lab.open(1)
    lab.run(6)
    (failed,) = [event for event in lab.events if type(event).__name__ == "TransferFailed"]
    assert "the catalogue is away" in failed.reason
    assert lab.names()[-1] == "MemoryReleased"
    lab.open(2)
    lab.ready(2)
    assert lab.run()[-2:] == ["TransferSucceeded", "MemoryReleased"]


@pytest.mark.parametrize("call", ["peer_died", "retire_peer"])
def test_what_waits_for_the_introduction_of_a_dead_peer_ends_at_once(make_lab, call):
    """Nothing was published, so nothing is in doubt; and no agent is made again for a peer that is gone."""
    lab = make_lab(1, introduced=False)
    lab.open()
    lab.kill(0)
    if call == "peer_died":
        lab.receiver.peer_died(lab.senders[0].self_id, PeerEvidence.PROCESS_REAPED)
    else:
        lab.receiver.retire_peer("ctx", "c1")
    lab.run(2)
    assert lab.names() == ["TransferFailed", "MemoryReleased"]
    if call == "peer_died":
        lab.open(2)
        lab.run(2)
        assert lab.names()[2:] == ["TransferFailed", "MemoryReleased"]
        lab.receiver.retire_peer("ctx", "c1")
    lab.run(2)
    assert lab.receiver.statistics()["peers"] == 0


def test_what_a_transport_says_once_is_not_lost_to_an_interrupt(make_lab, monkeypatch):
    """A finished write comes with one poll of the transport; the interrupt of its step leaves it for the next."""
    lab = make_lab(1, parts_max=1, landing=lambda job, part: "hold", executor=WriteExecutor.SENDER)
    (operation,) = lab.open()
    lab.ready()
    lab.run(8)
    sender = lab.senders[0]
    original, raised = sender._step, []

    def interrupted(record, event):
        if not raised and isinstance(event, Progressed) and event.progress.state == "done":
            raised.append(event)
            raise KeyboardInterrupt
        return original(record, event)

    lab.world.landing = lambda job, part: "land"
    with monkeypatch.context() as patch:
        patch.setattr(sender, "_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            for _ in range(5):
                sender.poll()
    lab.run(10)
    assert raised and sender.state_of(operation) in ("DONE", "ENDED")
    assert lab.names()[-2:] == ["TransferSucceeded", "MemoryReleased"]


def test_a_reset_that_raises_keeps_no_other_peer_waiting(make_lab, monkeypatch):
    """Two silent peers, and the channel cannot give up a link: both links are told as lost, in the same poll."""
    lab = make_lab(2, linked=True, config=SessionConfig(heartbeat_s=1.0, lease_s=2.0, link_timeout_s=50.0))
    lab.open()
    lab.run(3)

    def broken(peer):
        raise OSError("socket")

    monkeypatch.setattr(lab.receiver._channel, "reset", broken)
    for _ in range(6):
        lab.clock.advance(1.1)
        lab.run(1, senders=[])
    assert lab.names().count("LinkLost") == 2


def test_sealing_and_failing_a_request_that_is_over_changes_nothing(make_lab):
    """Settled requests leave by themselves at any time, so a host cannot know whether it comes too late."""
    lab = make_lab(1)
    lab.open()
    lab.ready()
    lab.run()
    sender = lab.senders[0]
    sender.seal(KEY)
    lab.run(2)
    sender.forget(KEY)
    before = sender.statistics()
    sender.seal(KEY)
    sender.fail(KEY, "too late")
    assert sender.statistics() == before and sender.drain().quiescent


# --- what only one branch guards --------------------------------------------------------------------------------------


def test_a_frame_of_an_earlier_life_of_a_peer_says_nothing(make_lab):
    """It is meant for this session and names its operation: but the life that wrote it is not the one that was published to."""
    lab = make_lab(1)
    (operation,) = lab.open()
    lab.run(3)
    sender = lab.senders[0].self_id
    earlier = encode_message(Sealed(operation, "an earlier life"), b"e" * 16, lab.receiver.session)
    lab.network.inject(sender, lab.peer, earlier)
    before = lab.receiver.statistics().get("other_session", 0)
    lab.run(2)
    assert lab.receiver.statistics()["other_session"] == before + 1
    assert "MemoryReleased" not in lab.names() and lab.state(operation) == "EXPOSED"


def test_nothing_is_published_before_every_writer_is_known(make_lab):
    """One of two writers cannot be introduced: the other is asked for nothing, and the memory is free by name."""
    lab = make_lab(2, introduced=False)
    lab.open()
    lab.run(6, senders=[0])
    assert "ReceiveRequested" not in lab.sent_names(0)
    lab.clock.advance(lab.config.introduction_timeout_s + 1)
    lab.run(3, senders=[0])
    assert lab.names()[-2:] == ["TransferFailed", "MemoryReleased"]
    assert "ReceiveRequested" not in lab.sent_names(0)


def test_a_report_that_was_lost_with_its_link_is_sent_again(make_lab):
    """The write lands, the link breaks with exactly the report on it: the receiver asks, and the report comes again."""
    lab = make_lab(1, linked=True)
    lab.open(tier="bounce")
    lab.ready()
    sender = lab.senders[0]

    def under_way():
        frames = lab.network._queues.get((sender.self_id, lab.peer), ())
        return any(isinstance(decode_frame(frame).message, WriterResult) for frame in frames)

    for _ in range(20):
        lab.run(1, receiver=False)
        if under_way():
            break
        lab.run(1, senders=[])
    assert under_way(), "the report never was on the link: the test shows nothing"
    lab.network.sever(lab.peer, sender.self_id)
    lab.run(6)
    assert "TransferSucceeded" not in lab.names()
    lab.network.heal(lab.peer, sender.self_id)
    assert lab.run(20)[-2:] == ["TransferSucceeded", "MemoryReleased"]
    assert lab.receiver.statistics()["operations_bounced"] == 1


def test_a_sign_of_life_that_is_asked_for_is_given(make_lab):
    """Whatever the asked side itself waits for."""
    lab = make_lab(1)
    sender = lab.senders[0]
    lab.inject(lab.peer, sender.self_id, Beat(True))
    at = len(lab.network.log)
    sender.poll()
    answers = [decode_frame(frame).message for source, _, frame in lab.network.log[at:] if source == sender.self_id]
    assert answers == [Beat(False)]


def test_a_callback_that_is_always_interrupted_does_not_hold_up_the_others(make_lab):
    """The end of transfer 1 is never taken; that of transfer 2 is delivered at the next poll."""
    taken = []

    def on_memory(event):
        if event.identity.request_id == 1:
            raise KeyboardInterrupt
        taken.append(event.identity.request_id)

    lab = make_lab(1, on_memory=on_memory)
    lab.open(1)
    lab.open(2)
    lab.ready(1)
    lab.ready(2)
    for _ in range(20):
        with contextlib.suppress(KeyboardInterrupt):
            lab.run(1)
    assert taken == [2]
    assert not lab.receiver.drain().quiescent
    lab.receiver._on_memory = None
    lab.run(2)
    assert lab.receiver.drain().quiescent


def test_an_interrupted_frame_keeps_its_place(make_lab, monkeypatch):
    """Request and cancel of one poll, the request's handling interrupted once: the cancel still comes second."""
    lab = make_lab(1)
    sender = lab.senders[0]
    lab.open()
    lab.receiver.poll()
    lab.receiver.cancel(lab.identity())
    lab.receiver.poll()
    original, order, raised = sender._take, [], []

    def interrupted(life, message):
        if not raised:
            raised.append(message)
            raise KeyboardInterrupt
        order.append(type(message).__name__)
        return original(life, message)

    monkeypatch.setattr(sender, "_take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sender.poll()
    sender.poll()
    assert order == ["ReceiveRequest", "Cancel"]


# --- memory that comes late, hosts that differ ----------------------------------------------------------------------


def announced(lab, source):
    frames = [decode_frame(frame).message for sent_by, _, frame in lab.network.log if sent_by == source]
    return [type(message).__name__ for message in frames]


@pytest.mark.parametrize("tier", ["direct", "bounce", "pull"])
def test_memory_registered_late_is_announced_before_what_names_it(make_lab, tier):
    """A pool of either side that is registered after the introduction: told once, on the same link, first."""
    lab = make_lab(1)
    receiver, sender = lab.receiver, lab.senders[0]
    for session in (receiver, sender):
        session._transport.register([MemoryRegion(4096, 64)])
    lab.open(tier=tier)
    lab.ready()
    lab.run(30)
    assert lab.names() == ["TransferSucceeded", "MemoryReleased"]
    said = announced(lab, lab.peer)
    assert said.count("MemoryChanged") == 1 and said.index("MemoryChanged") < said.index("ReceiveRequest")
    named = [n for n in announced(lab, sender.self_id) if n in ("MemoryChanged", "ReadOffer")]
    assert named == (["MemoryChanged", "ReadOffer"] if tier == "pull" else [])  # a writer names no memory of its own
    assert sender._transport.connected[-1] == (lab.peer, b"fake metadata 1")
    registration = receiver._transport.register([MemoryRegion(8192, 64)])
    receiver._transport.deregister(registration)
    lab.open(2)
    lab.ready(2)
    lab.run(20)
    assert announced(lab, lab.peer).count("MemoryChanged") == 2 and lab.names()[-1] == "MemoryReleased"
    assert sender._transport.connected[-1] == (lab.peer, b"fake metadata 3")


def test_a_link_that_comes_back_brings_what_was_registered_meanwhile(make_lab):
    """An announcement that was lost with its link is in the next introduction; the peer loads it."""
    lab = make_lab(1, linked=True)
    sender = lab.senders[0]
    lab.receiver._transport.register([MemoryRegion(4096, 64)])
    lab.open()
    lab.receiver.poll()
    assert lab.network.sever(lab.peer, sender.self_id) >= 2
    lab.run(2)
    lab.network.heal(lab.peer, sender.self_id)
    lab.ready()
    lab.run(20)
    assert lab.names()[-2:] == ["TransferSucceeded", "MemoryReleased"]
    assert [each for each in sender._transport.connected if each[0] == lab.peer] == [
        (lab.peer, b"fake metadata 0"),
        (lab.peer, b"fake metadata 1"),
    ]


def test_blocks_that_are_added_change_the_layout_and_a_peer_that_plans_with_another_refuses(make_lab):
    """The fingerprint goes with the first message that names memory; whoever expects the earlier one says so by name."""
    expected = {"layout": b"one"}
    lab = make_lab(1)
    lab.senders[0]._handshake = Handshake(layouts=lambda _peer: expected["layout"])
    lab.receiver.update_layout(b"one")
    lab.open()
    lab.ready()
    lab.run()
    assert lab.names() == ["TransferSucceeded", "MemoryReleased"]
    lab.receiver.update_layout(b"two")
    expected["layout"] = b"two"
    lab.open(2)
    lab.ready(2)
    lab.run()
    assert lab.names()[-2:] == ["TransferSucceeded", "MemoryReleased"]
    lab.receiver.update_layout(b"three")
    lab.open(3)
    lab.run()
    refused = [event for event in lab.events if type(event).__name__ == "PeerRefused"]
    assert b"three".hex() in refused[0].reason and "PeerRefused" in lab.sent_names()
    assert lab.names()[-1] == "TransferFailed"
    with pytest.raises(ValueError, match="at most 32 bytes"):
        lab.receiver.update_layout(b"x" * 33)


@pytest.mark.parametrize(
    ("ours", "theirs", "meet"),
    [
        ("ucx:tcp,cma", "ucx:tcp,cma,cuda_ipc,rc", True),
        ("ucx:tcp", "ucx:tcp,cma", True),
        ("ucx:tcp", "ucx:cma", False),
        ("ucx:tcp", "mooncake:tcp", False),
        ("fake:nic", "fake:nic", True),
    ],
)
def test_unlike_hosts_meet_where_they_have_a_transport_in_common(ours, theirs, meet):
    assert TransportClass(ours, frozenset({WriteExecutor.RECEIVER})).meets(theirs) is meet


def test_between_hosts_only_what_the_network_needs_is_asked_as_proof():
    """CMA and shared memory cannot leave a kernel; where either host is unknown everything counts."""
    ours = TransportClass.of_ucx(("tcp", "cma", "self"), "host a")
    both = {Evidence.AGENT_DESTROYED, Evidence.PEER_REAPED}
    assert ours.towards("host b").required == {Evidence.AGENT_DESTROYED}
    assert ours.towards("host a").required == ours.towards("").required == both
    assert TransportClass.of_ucx(("tcp", "cma")).towards("host b").required == both
    gpus = TransportClass.of_ucx(("tcp", "cuda_ipc"), "host a")
    assert gpus.towards("host b").required == both, "multi-node NVLink leaves a host"
    assert TransportClass.of_ucx(("cma",), "host a").towards("host b").required == {Evidence.PEER_REAPED}


@pytest.mark.parametrize("host", ["host b", "host a", ""])
def test_a_peer_on_another_host_is_proven_by_the_networks_rule(make_lab, host):
    """The session takes the class for each peer from what both sides showed of their hosts."""
    lab = make_lab(1, introduced=False, landing=lambda _job, _part: "error")
    executors = frozenset({WriteExecutor.RECEIVER, WriteExecutor.SENDER})
    near = TransportClass("fake:receiver-executed", executors, "host a", frozenset({WriteExecutor.RECEIVER}))
    lab.receiver._transport._class = near
    lab.senders[0]._transport._class = TransportClass("fake:receiver-executed", executors, host)
    lab.introduce()
    lab.open()
    lab.ready()
    lab.run()
    assert lab.names() == ["TransferFailed"]
    lab.receiver.retire_peer("ctx", "c1")  # our agent's end: enough for the network, not for what the hosts share
    assert lab.run(2) == (["MemoryReleased"] if host == "host b" else [])
