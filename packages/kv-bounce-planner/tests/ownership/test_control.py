"""Control channels: the conformance suite on every one shipped, and what the ZeroMQ one refuses."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time

import msgspec
import pytest
import zmq

from kv_bounce_planner.sessions import ChannelError, PeerId, WouldBlock, ZmqControlChannel
from kv_bounce_planner.testing import FakeNetwork, check_control_channel, check_linked_channel
from kv_bounce_planner.transports import _zmq
from kv_bounce_planner.transports._zmq import QUEUE_FRAMES_MAX

KEY = b"sixteen bytes ok"
LEFT, RIGHT = PeerId("left", "l1", 0), PeerId("right", "r1", 1)


def pause():
    time.sleep(0.001)


def test_fake_channel_conforms():
    network = FakeNetwork()
    check_control_channel(lambda left, right: (network.channel(left), network.channel(right)))


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_zmq_channel_conforms(scheme, tmp_path):
    """Over tcp and over a local socket; the binding side answers on the link that it was dialled by."""
    bind = "tcp://127.0.0.1:*" if scheme == "tcp" else f"ipc://{tmp_path}/c"

    def make(left, right):
        listener = ZmqControlChannel(right, KEY, bind)
        dialler = ZmqControlChannel(left, KEY)
        dialler.connect(right, listener.address)
        return dialler, listener

    check_control_channel(make, settle=pause)


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_zmq_links_conform(scheme, tmp_path):
    """Breaks are events on both sides, links come back, and a second life of a name is noticed by the first."""
    bind = "tcp://127.0.0.1:*" if scheme == "tcp" else f"ipc://{tmp_path}/c"
    listener = ZmqControlChannel(PeerId("right", "right-generation", 3), KEY, bind)

    def make(left, right):
        dialler = ZmqControlChannel(left, KEY)
        dialler.connect(right, listener.address)
        return dialler, listener

    def again(left):
        return make(left, listener.self_id)[0]

    check_linked_channel(make, make_again=again, settle=pause)
    assert not (tmp_path / "c").exists(), "its ipc file is left"


def test_a_link_comes_back_when_its_listener_does(tmp_path):
    """The listener is closed and made again at the same address: the dialling side finds it by itself."""
    bind = f"ipc://{tmp_path}/c"
    listener, dialler = ZmqControlChannel(RIGHT, KEY, bind), ZmqControlChannel(LEFT, KEY)
    dialler.connect(RIGHT, bind)
    dialler.send(RIGHT, b"one")
    assert receive(listener) == [b"one"]
    listener.close()
    events = []
    for _ in range(3000):
        dialler.poll(4)
        events += dialler.link_events()
        if events:
            break
        pause()
    assert events and not events[0].up
    listener = ZmqControlChannel(RIGHT, KEY, bind)
    for _ in range(5000):
        dialler.poll(4)
        if any(event.up for event in dialler.link_events()):
            try:
                dialler.send(RIGHT, b"two")
            except (WouldBlock, ChannelError):
                pass
        if receive(listener, turns=1) == [b"two"]:
            break
    else:
        raise AssertionError("the link never came back")
    dialler.close()
    listener.close()


def test_fifty_peers_that_came_and_went_leave_no_descriptor():
    """``disconnect`` closes socket and monitor on the dialling side and forgets the peer on the listening one."""

    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    with contextlib.ExitStack() as stack:
        listener = ZmqControlChannel(RIGHT, KEY, "tcp://127.0.0.1:*")
        stack.callback(listener.close)
        dialler = ZmqControlChannel(LEFT, KEY)
        stack.callback(dialler.close)
        counts = []
        for life in range(50):
            peer = PeerId("right", f"life{life}", 1)
            with contextlib.closing(ZmqControlChannel(peer, KEY, "tcp://127.0.0.1:*")) as other:
                dialler.connect(peer, other.address)
                dialler.send(peer, b"x")
                assert receive(other) == [b"x"]
                dialler.disconnect(peer)
            if life >= 10:
                counts.append(descriptors())
        # libzmq's own thread closes what is left, in its own time.
        deadline_s = time.monotonic() + 5
        while descriptors() > min(counts) + 3 and time.monotonic() < deadline_s:
            pause()
        assert descriptors() <= min(counts) + 3, counts
        assert not dialler._links and not dialler._dialled and not dialler._numbers


class Swapping:
    """Breaks one rule of the contract, to see that the suite notices."""

    def __init__(self, inner, fault):
        self.inner, self.fault, self.count = inner, fault, 0

    def send(self, peer, frame):
        self.count += 1
        if self.fault == "drops" and self.count == 5:
            return
        if self.fault == "changes" and self.count == 5:
            frame = frame + b"!"
        if self.fault == "takes unknown":
            try:
                self.inner.send(peer, frame)
            except ChannelError:
                pass
            return
        self.inner.send(peer, frame)
        if self.fault == "doubles" and self.count == 5:
            self.inner.send(peer, frame)

    def poll(self, frames_max):
        frames = list(self.inner.poll(frames_max if self.fault != "too many" else 1000))
        return frames[::-1] if self.fault == "reorders" else frames

    def close(self):
        self.inner.close()


@pytest.mark.parametrize("fault", ["drops", "changes", "doubles", "reorders", "too many", "takes unknown"])
def test_the_suite_notices_a_channel_that_breaks_the_contract(fault):
    network = FakeNetwork()
    with pytest.raises(AssertionError):
        check_control_channel(
            lambda left, right: (
                Swapping(network.channel(left), fault),
                Swapping(network.channel(right), fault),
            ),
            polls_max=500,
        )


@pytest.fixture
def pair():
    listener = ZmqControlChannel(RIGHT, KEY, "tcp://127.0.0.1:*")
    dialler = ZmqControlChannel(LEFT, KEY)
    dialler.connect(RIGHT, listener.address)
    yield dialler, listener
    dialler.close()
    listener.close()


def receive(channel, count=1, turns=3000):
    frames = []
    for _ in range(turns):
        frames += [bytes(frame) for _, frame in channel.poll(16)]
        if len(frames) >= count:
            return frames
        pause()
    return frames


def wait_refused(channel, why):
    for _ in range(3000):
        assert channel.poll(16) == []
        if channel.refused.get(why):
            return channel.refused[why]
        pause()
    raise AssertionError(f"never refused for {why}: {channel.refused}")


def stranger(address, parts, like=None):
    """A socket of our own that sends these parts; ``like`` a channel, which has the key."""
    made = zmq.Context.instance().socket(zmq.DEALER)
    made.setsockopt(zmq.LINGER, 0)
    if like is not None:
        made.setsockopt(zmq.CURVE_SECRETKEY, like._curve_secret)
        made.setsockopt(zmq.CURVE_PUBLICKEY, like._curve_public)
        made.setsockopt(zmq.CURVE_SERVERKEY, like._curve_public)
    made.connect(address)
    made.send_multipart(parts)
    return made


def parts_of(channel, peer, frame):
    """The parts that ``channel`` would send next."""
    taken = []

    class Recorder:
        def send_multipart(self, parts, flags):
            taken.extend(parts)

    link = channel._links[peer]
    original, link.socket = link.socket, Recorder()
    channel.send(peer, frame)
    link.socket = original
    link.sent -= 1
    return taken


def test_a_wrong_key_is_refused_and_said():
    """In the handshake: the listening side counts it and keeps nothing, the dialling one is told, and tries again."""
    listener = ZmqControlChannel(RIGHT, KEY, "tcp://127.0.0.1:*")
    dialler = ZmqControlChannel(LEFT, b"another key of 16")
    dialler.connect(RIGHT, listener.address)
    dialler.send(RIGHT, b"hello")
    assert wait_refused(listener, "handshake") >= 1
    assert listener._links == {} and listener._numbers == {}, "an unauthenticated peer left state behind"
    events, waits = [], set()
    for _ in range(3000):
        dialler.poll(4)
        events += dialler.link_events()
        waits.add(dialler._dialled[RIGHT].wait_s)
        if len([event for event in events if not event.up]) >= 3:
            break
        pause()
    assert not events[0].up and events[0].reason
    assert len(waits) >= 3, "it dials again without waiting longer each time"
    dialler.close()
    listener.close()


def greeting(mechanism):
    """The first 64 bytes of a ZMTP 3.1 connection."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32)


@pytest.mark.parametrize("mechanism", [b"NULL", b"PLAIN", b"CURVE"])
def test_who_has_no_key_has_no_message_gathered(mechanism):
    """A message whose parts never end, sent before anything was proved: the connection is closed, whatever it claims to be."""
    ready = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
    part = b"\x03" + (1 << 16).to_bytes(8, "big") + bytes(1 << 16)  # long, and more follows
    with (
        contextlib.closing(ZmqControlChannel(RIGHT, KEY, "tcp://127.0.0.1:*")) as listener,
        socket.create_connection(("127.0.0.1", int(listener.address.rpartition(":")[2])), timeout=30) as connection,
    ):
        sent = 0
        with contextlib.suppress(ConnectionError):
            connection.sendall(greeting(mechanism) + ready)
            while sent < 4096:  # 256 MiB
                connection.sendall(part)
                sent += 1
        assert sent < 4096, "it took everything"
        assert wait_refused(listener, "handshake") == 1 and listener.refused == {"handshake": 1}


def test_a_connection_that_shows_no_key_is_closed_in_time(monkeypatch):
    """It says nothing at all."""
    monkeypatch.setattr(_zmq, "HANDSHAKE_MS", 50)
    with (
        contextlib.closing(ZmqControlChannel(RIGHT, KEY, "tcp://127.0.0.1:*")) as listener,
        socket.create_connection(("127.0.0.1", int(listener.address.rpartition(":")[2])), timeout=30) as connection,
    ):
        while connection.recv(4096):  # its own greeting, then the end
            pass


def test_what_is_said_does_not_cross_the_wire_in_clear(tmp_path):
    """A relay between the two sees neither names nor content."""
    listener = ZmqControlChannel(RIGHT, KEY, "tcp://127.0.0.1:*")
    dialler = ZmqControlChannel(LEFT, KEY)
    seen = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        relay = threading.Thread(target=_relay, args=(server, int(listener.address.rpartition(":")[2]), seen))
        relay.start()
        dialler.connect(RIGHT, f"tcp://127.0.0.1:{server.getsockname()[1]}")
        dialler.send(RIGHT, b"the content of this frame")
        assert receive(listener) == [b"the content of this frame"]
        dialler.close()
        listener.close()
        relay.join(timeout=30)
    passed = b"".join(seen)
    assert len(passed) > 200 and b"content" not in passed and b"left" not in passed and b"l1" not in passed


def _relay(server, port, seen):
    here, _ = server.accept()
    with here, socket.create_connection(("127.0.0.1", port)) as there, selectors.DefaultSelector() as selector:
        selector.register(here, selectors.EVENT_READ, there)
        selector.register(there, selectors.EVENT_READ, here)
        while True:
            for key, _ in selector.select():
                try:
                    data = key.fileobj.recv(65536)
                    if not data:
                        return
                    seen.append(data)
                    key.data.sendall(data)
                except ConnectionError:
                    return


def test_without_curve_there_is_no_channel(monkeypatch):
    """A ZeroMQ that was built without it is named; frames in clear are no way out."""
    monkeypatch.setattr(zmq, "has", lambda what: what != "curve")
    with pytest.raises(ChannelError, match="built without CURVE"):
        ZmqControlChannel(LEFT, KEY)


@pytest.mark.parametrize("part", range(4))
def test_every_changed_part_is_refused(pair, part):
    """Head, names, content, tag: one flipped bit each."""
    dialler, listener = pair
    parts = parts_of(dialler, RIGHT, b"content")
    parts[part] = parts[part][:-1] + bytes([parts[part][-1] ^ 1])
    other = stranger(listener.address, parts, dialler)
    for _ in range(3000):
        assert listener.poll(4) == []
        if listener.refused:
            break
        pause()
    assert sum(listener.refused.values()) == 1
    other.close()


def test_replayed_reflected_and_foreign_frames_are_refused(pair):
    """The same authentic frame again, from another socket, back to its author, or for somebody else."""
    dialler, listener = pair
    parts = parts_of(dialler, RIGHT, b"once")
    dialler.send(RIGHT, b"once")
    assert receive(listener) == [b"once"]
    thief = stranger(listener.address, parts, dialler)
    assert wait_refused(listener, "replay") == 1
    dialler._links[RIGHT].socket.send_multipart(parts)
    for _ in range(3000):
        assert listener.poll(16) == []
        if listener.refused["replay"] == 2:
            break
        pause()
    assert listener.refused["replay"] == 2 and not listener.link_events(), "a replay touched the link"
    listener._links[LEFT].socket.send_multipart([listener._links[LEFT].route, *parts])
    assert wait_refused(dialler, "address") == 1
    other = ZmqControlChannel(PeerId("other", "o1", 0), KEY, "tcp://127.0.0.1:*")
    second = stranger(other.address, parts, dialler)
    assert wait_refused(other, "address") == 1
    for one in (thief, second):
        one.close()
    other.close()


def test_a_gap_ends_the_link_and_is_an_event(pair):
    """A lost frame is a break, never a silent hole in the order."""
    dialler, listener = pair
    dialler.send(RIGHT, b"0")
    assert receive(listener) == [b"0"]
    dialler._links[RIGHT].sent += 1  # as if the wire had lost one
    dialler.send(RIGHT, b"2")
    wait_refused(listener, "gap")
    (event,) = listener.link_events()
    assert (event.peer, event.up) == (LEFT, False) and "were lost" in event.reason
    with pytest.raises(ChannelError, match="no link"):
        listener.send(LEFT, b"answer")


def test_a_late_frame_of_a_peer_that_was_disconnected_leaves_no_record(pair):
    """It was under way when the listening side forgot its peer: refused, and nothing is kept for a peer that is gone."""
    dialler, listener = pair
    dialler.send(RIGHT, b"one")
    assert receive(listener) == [b"one"]
    dialler.send(RIGHT, b"late")
    listener.disconnect(LEFT)
    wait_refused(listener, "sequence")
    assert not listener._links and not listener._numbers


def test_unstructured_frames_are_counted_and_dropped(pair):
    _, listener = pair
    sockets = [stranger(listener.address, parts, listener) for parts in ([b"x"], [b"x"] * 4, [b""] * 9)]
    for _ in range(3000):
        assert listener.poll(4) == []
        if listener.refused.get("structure", 0) == 3:
            break
        pause()
    assert listener.refused == {"structure": 3}
    for one in sockets:
        one.close()


def test_a_full_link_would_block_and_takes_nothing():
    """Nobody listens at the other end: after the bound nothing more is taken."""
    dialler = ZmqControlChannel(LEFT, KEY)
    dialler.connect(RIGHT, "ipc:///tmp/nobody-listens-here")
    with pytest.raises(WouldBlock):
        for _ in range(QUEUE_FRAMES_MAX + 10):
            dialler.send(RIGHT, b"x")
    with pytest.raises(ChannelError, match="already"):
        dialler.connect(RIGHT, "ipc:///tmp/elsewhere")
    with pytest.raises(ChannelError, match="exceeds"):
        dialler.send(RIGHT, b"x" * (1 << 25))
    dialler.close()


def test_short_keys_are_refused():
    with pytest.raises(ValueError, match="16 bytes"):
        ZmqControlChannel(LEFT, b"short")


def test_peer_names_are_part_of_what_is_authenticated(pair):
    """A peer with the key cannot be impersonated by changing the names in its frame."""
    dialler, listener = pair
    parts = parts_of(dialler, RIGHT, b"content")
    parts[1] = msgspec.msgpack.encode((PeerId("somebody", "else", 0), RIGHT))
    other = stranger(listener.address, parts, dialler)
    assert wait_refused(listener, "authentication") == 1
    other.close()
