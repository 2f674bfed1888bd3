"""The control channel over rpc-local-registry passes the planner's conformance suite, on real sockets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from kv_bounce_planner.sessions import ChannelError, PeerId, WouldBlock
from kv_bounce_planner.testing import check_control_channel
from meta_executor.executor.control import ReceiverControl, SenderControl
from rpc_local_registry import new_key


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[list[object]]:
    """Channels that a test opens."""
    made: list[object] = []
    yield made
    for end in made:
        end.close()  # type: ignore[attr-defined]


def test_conformance(ends: list[object]) -> None:
    """Order, identity, bounds, binary safety, refusal of the unknown, close."""
    key = new_key()

    def make_pair(one: PeerId, other: PeerId) -> tuple[ReceiverControl, SenderControl]:
        sender = SenderControl("ipc://", key, lambda: None)
        receiver = ReceiverControl(one, key, lambda: None)
        sender.start()
        receiver.connect(other, sender.address)
        ends.extend((receiver, sender))
        return receiver, sender

    check_control_channel(make_pair, settle=lambda: time.sleep(0.0005))


def test_an_answer_before_the_stream_is_open_would_block_and_nothing_is_lost(ends: list[object]) -> None:
    """The sender keeps the frame; once the receiver listens it arrives."""
    key = new_key()
    woken: list[int] = []
    sender = SenderControl("ipc://", key, lambda: woken.append(1))
    sender.start()
    address = sender.address
    me, peer = PeerId("gen", "g", 0), PeerId("ctx", "c", 0)
    ends.append(sender)
    with pytest.raises(WouldBlock):
        sender.send(me, b"early")
    receiver = ReceiverControl(me, key, lambda: woken.append(2))
    ends.append(receiver)
    receiver.connect(peer, address)
    with pytest.raises(ChannelError, match="never connected"):
        receiver.send(PeerId("ctx", "c", 9), b"x")
    deadline = time.monotonic() + 10
    while True:
        try:
            sender.send(me, b"late")
            break
        except WouldBlock:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    frames: list[tuple[PeerId, bytes]] = []
    while not frames:
        assert time.monotonic() < deadline
        frames = list(receiver.poll(8))
    assert frames == [(peer, b"late")]
    assert woken, "both ends wake their loops"


def test_a_lost_peer_is_reported_once(ends: list[object]) -> None:
    """The link's end says nothing about memory: it is reported, and later sends fail."""
    key = new_key()
    sender = SenderControl("ipc://", key, lambda: None)
    peer = PeerId("ctx", "c", 0)
    receiver = ReceiverControl(PeerId("gen", "g", 0), key, lambda: None)
    ends.extend((receiver, sender))
    sender.start()
    receiver.connect(peer, sender.address)
    receiver.send(peer, b"hello")
    deadline = time.monotonic() + 10
    while not sender.poll(1):
        assert time.monotonic() < deadline
    sender.close()
    lost: list[PeerId] = []
    while not lost:
        assert time.monotonic() < deadline
        lost = receiver.take_lost()
    assert lost == [peer] and receiver.take_lost() == []
    receiver._inbox.append((peer, b"its last word"))
    receiver._lost.append(peer)
    assert receiver.take_lost() == [], "told after what came before"
    assert receiver.poll(1) == [(peer, b"its last word")] and receiver.take_lost() == [peer]
    # The socket may not know yet and would still take a frame; the link takes none.
    known = receiver._clients[peer]
    receiver._clients[peer] = MagicMock()
    with pytest.raises(ChannelError, match="has ended"):
        receiver.send(peer, b"too late")
    receiver._clients[peer].deliver.assert_not_called()
    receiver._clients[peer] = known
