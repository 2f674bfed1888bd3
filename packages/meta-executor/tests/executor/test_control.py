"""The control channel over rpc-local-registry passes the planner's conformance suites, on real sockets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kv_bounce_planner.sessions import ChannelError, PeerId, WouldBlock
from kv_bounce_planner.testing import check_control_channel, check_linked_channel
from kv_bounce_planner.transports.interface import LinkedChannel, LinkEvent
from meta_executor.executor import control
from meta_executor.executor.control import ReceiverControl, SenderControl
from rpc_local_registry import new_key

GEN, CTX = PeerId("gen", "g", 0), PeerId("ctx", "c", 0)


@pytest.fixture
def ends() -> Iterator[list[object]]:
    """Channels that a test opens."""
    made: list[object] = []
    yield made
    for end in made:
        end.close()  # type: ignore[attr-defined]


def serve(ends: list[object], key: bytes, address: str = "ipc://", rank: PeerId = CTX) -> SenderControl:
    """A context rank's end that listens."""
    sender = SenderControl(address, key, lambda: None)
    ends.append(sender)
    sender.serve_as(rank)
    sender.start()
    return sender


def call(ends: list[object], key: bytes, address: str, process: str = "") -> ReceiverControl:
    """A generation rank's end that calls it."""
    receiver = ReceiverControl(GEN, key, lambda: None, process=process)
    ends.append(receiver)
    receiver.connect(CTX, address)
    return receiver


def until(condition: Callable[[], object]) -> None:
    """Wait, at most as long as a test may take."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def send(end: LinkedChannel, peer: PeerId, frame: bytes) -> None:
    """Send as soon as the link takes it."""

    def taken() -> bool:
        end.link_events()
        try:
            end.send(peer, frame)
        except (WouldBlock, ChannelError):
            return False
        return True

    until(taken)


def received(end: LinkedChannel) -> tuple[list[bytes], list[LinkEvent]]:
    """What has come to an end until there is something: frames, and what happened to links."""
    frames: list[bytes] = []
    events: list[LinkEvent] = []

    def look() -> bool:
        frames.extend(frame for _, frame in end.poll(8))
        events.extend(end.link_events())
        return bool(frames or events)

    until(look)
    return frames, events


def test_conformance(ends: list[object]) -> None:
    """Order, identity, bounds, binary safety, refusal of the unknown, close."""
    key = new_key()

    def make_pair(one: PeerId, other: PeerId) -> tuple[ReceiverControl, SenderControl]:
        sender = serve(ends, key, rank=other)
        receiver = ReceiverControl(one, key, lambda: None)
        receiver.connect(other, sender.address)
        ends.append(receiver)
        return receiver, sender

    check_control_channel(make_pair, settle=lambda: time.sleep(0.0005))


def test_conformance_of_links(ends: list[object]) -> None:
    """Breaks are events at both ends, links come back, a second caller of one name is noticed."""
    key = new_key()
    made: list[SenderControl] = []

    def caller(one: PeerId) -> ReceiverControl:
        receiver = ReceiverControl(one, key, lambda: None)
        receiver.connect(PeerId("right", "right-generation", 3), made[0].address)
        ends.append(receiver)
        return receiver

    def make_pair(one: PeerId, other: PeerId) -> tuple[ReceiverControl, SenderControl]:
        made.append(serve(ends, key, rank=other))
        return caller(one), made[0]

    check_linked_channel(make_pair, make_again=caller, settle=lambda: time.sleep(0.0005))


def test_an_answer_before_the_stream_is_open_would_block_and_nothing_is_lost(ends: list[object]) -> None:
    """The sender keeps the frame; once the receiver listens it arrives. Both ends wake their loops."""
    key = new_key()
    woken: list[int] = []
    sender = SenderControl("ipc://", key, lambda: woken.append(1))
    ends.append(sender)
    sender.serve_as(CTX)
    sender.start()
    with pytest.raises(WouldBlock):
        sender.send(GEN, b"early")
    receiver = ReceiverControl(GEN, key, lambda: woken.append(2))
    ends.append(receiver)
    receiver.connect(CTX, sender.address)
    with pytest.raises(ChannelError, match="never connected"):
        receiver.send(PeerId("ctx", "c", 9), b"x")
    send(sender, GEN, b"late")
    assert received(receiver) == ([b"late"], [])
    send(receiver, CTX, b"a word")
    assert received(sender) == ([b"a word"], [])
    assert set(woken) == {1, 2}


def test_a_break_is_told_after_what_came_before_it(ends: list[object]) -> None:
    """Once, in a turn of its own; until the link is back nothing is taken, and nothing of the broken one is given."""
    key = new_key()
    sender = serve(ends, key)
    receiver = call(ends, key, sender.address)
    send(sender, GEN, b"its last word")
    until(lambda: len(receiver._order._items) == 1)
    sender.close()
    until(lambda: len(receiver._order._items) == 2)
    assert receiver.poll(8) == [(CTX, b"its last word")]
    assert receiver.link_events() == [], "not in the turn that took frames"
    assert receiver.poll(8) == []
    (event,) = receiver.link_events()
    assert (event.peer, event.up) == (CTX, False) and event.reason
    assert receiver.link_events() == []
    with pytest.raises(ChannelError, match="has ended"):
        receiver.send(CTX, b"too late")


def test_a_link_comes_back_to_the_same_rank_only(ends: list[object], tmp_path: Path) -> None:
    """Where it listened another lifetime answers: not taken for it. Then it is back, and both ends are told."""
    key = new_key()
    address = f"ipc://{tmp_path}/c"
    sender = serve(ends, key, address)
    receiver = call(ends, key, address)
    send(receiver, CTX, b"one")
    assert received(sender) == ([b"one"], [])
    sender.close()
    assert [event.up for event in received(receiver)[1]] == [False]
    other = serve(ends, key, address, PeerId("ctx", "another", 0))
    dialled: list[int] = []
    hung_up = receiver._hang_up

    def count(one: control._Dialled) -> None:
        dialled.append(1)
        hung_up(one)

    receiver._hang_up = count  # type: ignore[method-assign]
    until(lambda: receiver.link_events() or len(dialled) >= 2)
    assert receiver.poll(8) == [] and other.poll(8) == [], "nothing was sent to it"
    other.close()
    again = serve(ends, key, address)
    assert received(receiver) == ([], [LinkEvent(CTX, True)])
    send(receiver, CTX, b"two")
    assert received(again) == ([b"two"], [])
    send(again, GEN, b"three")
    assert received(receiver) == ([b"three"], [])


def test_the_serving_end_is_told_of_breaks_and_returns_and_knows_the_process(ends: list[object]) -> None:
    """Its receiver has gone: told once, and nothing is taken for it. It calls again: told; what is forgotten is forgotten."""
    key = new_key()
    sender = serve(ends, key)
    assert sender.process_of(GEN) == ""
    receiver = call(ends, key, sender.address, process="host/1/2")
    send(receiver, CTX, b"one")
    assert received(sender) == ([b"one"], [])
    assert sender.process_of(GEN) == "host/1/2"
    receiver.close()
    frames, events = received(sender)
    assert frames == [] and [(event.peer, event.up) for event in events] == [(GEN, False)]
    with pytest.raises(ChannelError, match="has ended"):
        sender.send(GEN, b"x")
    again = call(ends, key, sender.address, process="host/1/2")
    assert received(sender) == ([], [LinkEvent(GEN, True)])
    send(sender, GEN, b"two")
    assert received(again) == ([b"two"], [])
    sender.disconnect(GEN)
    assert sender.process_of(GEN) == ""
    assert [event.up for event in received(again)[1]] == [False]
    again.disconnect(CTX)
    with pytest.raises(ChannelError, match="never connected"):
        again.send(CTX, b"x")


def test_a_call_for_a_rank_that_is_not_known_yet_is_refused(ends: list[object]) -> None:
    """A context rank listens before its instance has a generation: it serves nobody until then, and then whoever calls."""
    key = new_key()
    sender = SenderControl("ipc://", key, lambda: None)
    ends.append(sender)
    sender.start()
    receiver = call(ends, key, sender.address)
    frames, events = received(receiver)
    assert frames == [] and [event.up for event in events] == [False] and "not ready" in events[0].reason
    sender.serve_as(CTX)
    assert received(receiver) == ([], [LinkEvent(CTX, True)])
