"""Frames and handshake, pure: layout, MAC, direction, session, sequence, sizes."""

from __future__ import annotations

import hmac
import random
import struct

import pytest

from rpc_local_registry import RpcProtocolMismatch
from rpc_local_registry import _session as session
from rpc_local_registry import _wire as wire

LIMITS = {"message_bytes_max": 1 << 20, "buffers_max": 16}
SESSION = b"s" * 16


def ends(direction: int = wire.TO_SERVER) -> tuple[wire.Sealer, wire.Opener]:
    """Both ends of one direction."""
    mac = wire.MacKey(b"k" * 32)
    return wire.Sealer(mac, direction, SESSION), wire.Opener(mac, direction, SESSION, **LIMITS)


def refusal(opener: wire.Opener, frames: list) -> str:
    """Reason of a refusal, which must leave the opener as it was."""
    before = opener.sequence
    with pytest.raises(wire.Refused) as caught:
        opener.open(frames)
    assert opener.sequence == before
    return caught.value.reason


@pytest.mark.parametrize("length", [0, 1, 31, 32, 63, 64, 65, 200])
def test_mac_is_hmac_sha256(length: int) -> None:
    """The pre-keyed MAC equals the standard library's, for keys of every length."""
    key, data = bytes(range(256))[:length], b"some data"
    assert wire.MacKey(key).digest(data[:4], [data[4:]]) == hmac.digest(key, data, "sha256")


def test_round_trip_of_random_messages() -> None:
    """What is sealed comes out, whatever is inline and what is a frame of its own."""
    pick = random.Random(1)
    sealer, opener = ends()
    for _ in range(300):
        arrays = [pick.randbytes(pick.choice((0, 1, 7, 8, 9, 64, 65, 500))) for _ in range(pick.randrange(5))]
        body, name = pick.randbytes(pick.randrange(50)), b"n" * pick.randrange(20)
        kind, call_id, argument = pick.choice(sorted(wire.CLIENT_KINDS)), pick.getrandbits(64), pick.getrandbits(64)
        frames = sealer.seal(kind, call_id, argument, name, body, [memoryview(a) for a in arrays], inline_bytes_max=64)
        assert len(frames) == 1 + sum(len(a) > 64 for a in arrays)
        message = opener.open(frames)
        assert (message.kind, message.call_id, message.argument, message.name) == (kind, call_id, argument, name)
        assert bytes(message.body) == body
        assert [bytes(b) for b in message.buffers] == arrays
        assert message.size_bytes == sum(map(len, frames))


def test_inline_arrays_are_aligned() -> None:
    """Each starts at a multiple of eight bytes from the frame's start."""
    sealer, _ = ends()
    frame = sealer.seal(wire.CALL, 1, 0, b"abc", b"12345", [memoryview(b"X"), memoryview(b"Y")], inline_bytes_max=9)[0]
    assert frame.index(b"X") % 8 == 0
    assert frame.index(b"Y") % 8 == 0


def test_every_altered_bit_is_refused() -> None:
    """Header, name, table, body, padding, inline and external arrays: all under the MAC."""
    sealer, opener = ends()
    frames = sealer.seal(
        wire.CALL, 1, 2, b"n", b"body", [memoryview(b"in"), memoryview(b"external")], inline_bytes_max=4
    )
    frames = [bytes(frame) for frame in frames]
    for index, frame in enumerate(frames):
        for bit in range(8 * len(frame)):
            altered = bytearray(frame)
            altered[bit // 8] ^= 1 << bit % 8
            refusal(opener, [*frames[:index], bytes(altered), *frames[index + 1 :]])
    opener.open(frames)


@pytest.mark.parametrize(
    ("reason", "offset", "value"),
    [
        ("magic", 32, b"XX"),
        ("version", 34, b"\x09"),
        ("reflected", 36, b"\x01"),
        ("session", 48, b"t" * 16),
        ("mac", 70, b"\xff"),
    ],
)
def test_each_field_has_its_reason(reason: str, offset: int, value: bytes) -> None:
    """Counters tell what was wrong."""
    sealer, opener = ends()
    frame = bytes(sealer.seal(wire.PING)[0])
    assert refusal(opener, [frame[:offset] + value + frame[offset + len(value) :]]) == reason


def test_replay_gap_and_reflection() -> None:
    """A message counts once, in its place, in its direction."""
    sealer, opener = ends()
    first, second, third = (sealer.seal(wire.PING) for _ in range(3))
    opener.open(first)
    assert refusal(opener, first) == "replayed"
    assert refusal(opener, third) == "gap"
    opener.open(second)
    opener.open(third)
    assert refusal(opener, second) == "replayed"
    back = wire.Opener(wire.MacKey(b"k" * 32), wire.TO_CLIENT, SESSION, **LIMITS)
    assert refusal(back, first) == "reflected"


def test_directions_and_sessions_have_keys_of_their_own() -> None:
    """Nothing derived is equal to anything else derived, so a header cannot be rewritten into another place."""
    key = bytes(32)
    made = [
        *wire.handshake_keys(key),
        *wire.session_keys(key, b"a" * 16, b"b" * 16)[1:],
        *wire.session_keys(key, b"b" * 16, b"a" * 16)[1:],
    ]
    assert len({mac.digest(b"same") for mac in made}) == len(made)


def test_sizes_come_before_the_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    """Truncated and oversized messages cost no MAC at all."""
    sealer, _ = ends()
    opener = wire.Opener(wire.MacKey(b"k" * 32), wire.TO_SERVER, SESSION, message_bytes_max=500, buffers_max=2)
    big = sealer.seal(wire.CALL, body=bytes(500))
    many = sealer.seal(wire.CALL, buffers=[memoryview(b"xx")] * 3, inline_bytes_max=1)
    split = sealer.seal(wire.CALL, buffers=[memoryview(bytes(400))], inline_bytes_max=1)

    def no_mac(*_: object) -> bytes:
        raise AssertionError("a MAC was computed")

    monkeypatch.setattr(wire.MacKey, "digest", no_mac)
    assert refusal(opener, [b"x" * 87]) == "truncated"
    for frames in (big, many, [*split, bytes(100)]):
        assert refusal(opener, frames) == "oversized"


def test_authentic_nonsense_is_refused() -> None:
    """A holder of the key who lies about lengths gets a refusal, not an exception of another kind."""
    mac = wire.MacKey(b"k" * 32)
    header = struct.Struct("<2sBBBBHIHH16sQQQ")

    def frames(buffers: int, body: int, name: int, reserved: int, rest: bytes, kind: int = wire.CALL) -> list[bytes]:
        covered = header.pack(b"RL", 1, kind, 0, 0, buffers, body, name, reserved, SESSION, 1, 0, 0) + rest
        return [mac.digest(covered) + covered]

    covered = frames(0, 0, 0, 0, b"")[0][wire.MAC_BYTES :]
    two_frames = [mac.digest(covered, [b"extra"]) + covered, b"extra"]
    cases = [
        frames(0, 5, 0, 0, b"1234"), frames(0, 3, 0, 0, b"1234"), frames(0, 0, 5, 0, b"1234"), frames(0, 4, 0, 1, b"1234"),
        frames(1, 0, 0, 0, b"1234"), frames(1, 0, 0, 0, struct.pack("<Q", 1 << 62)), frames(17, 0, 0, 0, bytes(8 * 17)),
        frames(1, 0, 0, 0, struct.pack("<Q", 1 << 63 | 5)), frames(0, 0, 300, 0, bytes(300)),
        two_frames,
    ]  # fmt: skip
    for case in cases:
        opener = wire.Opener(mac, wire.TO_SERVER, SESSION, **LIMITS)
        assert refusal(opener, case) == "structure"
    opener = wire.Opener(mac, wire.TO_SERVER, SESSION, **LIMITS)
    for kind in (wire.HELLO, wire.RESULT, 0, 255):
        assert refusal(opener, frames(0, 0, 0, 0, b"", kind)) == "kind"


class TestHandshake:
    """HELLO, WELCOME, REJECT."""

    KEY = b"k" * 32

    def client(
        self, nonce: bytes = b"n" * 16, key: bytes = KEY, versions: tuple[int, int] = (1, 1)
    ) -> session.ClientHandshake:
        """A client's half."""
        return session.ClientHandshake(key, nonce, "client", versions=versions, **LIMITS)

    def server(self) -> session.ServerHandshake:
        """The server's half."""
        return session.ServerHandshake(self.KEY, "server", **LIMITS)

    def test_both_ends_agree(self) -> None:
        """Each side's sealer fits the other's opener, in both directions, and names and limits arrive."""
        client, server = self.client(), self.server()
        answer, theirs = server.answer(client.hello(), b"m" * 16)
        ours = client.answer(answer)
        assert theirs is not None
        assert (ours.peer_name, theirs.peer_name, ours.session_id) == ("server", "client", theirs.session_id)
        theirs.opener.open(ours.sealer.seal(wire.PING))
        ours.opener.open(theirs.sealer.seal(wire.PONG))
        with pytest.raises(wire.Refused):
            ours.opener.open(ours.sealer.seal(wire.PING))

    def test_a_replayed_hello(self) -> None:
        """Refused by its nonce; from a server that forgot it, a new session with other keys."""
        client, server = self.client(), self.server()
        hello = client.hello()
        answer, first = server.answer(hello, b"m" * 16)
        with pytest.raises(wire.Refused, match="replayed"):
            server.answer(hello, b"o" * 16)
        _, second = self.server().answer(hello, b"o" * 16)
        assert first is not None
        assert second is not None
        recorded = client.answer(answer).sealer.seal(wire.PING)
        with pytest.raises(wire.Refused, match="session"):
            second.opener.open(recorded)

    def test_the_nonce_memory_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The oldest are forgotten first."""
        monkeypatch.setattr(session.ServerHandshake, "NONCES_MAX", 2)
        server = self.server()
        hellos = [self.client(bytes([n]) * 16).hello() for n in range(3)]
        for hello in hellos:
            server.answer(hello, b"m" * 16)
        server.answer(hellos[0], b"m" * 16)
        with pytest.raises(wire.Refused, match="replayed"):
            server.answer(hellos[2], b"m" * 16)

    def test_another_key(self) -> None:
        """Neither side accepts the other, and the server has nothing to send."""
        with pytest.raises(wire.Refused, match="mac"):
            self.server().answer(self.client(key=b"x" * 32).hello(), b"m" * 16)
        answer, _ = self.server().answer(self.client().hello(), b"m" * 16)
        with pytest.raises(wire.Refused, match="mac"):
            self.client(key=b"x" * 32).answer(answer)

    def test_an_answer_to_somebody_else(self) -> None:
        """A recorded welcome does not answer a fresh hello."""
        answer, _ = self.server().answer(self.client(b"1" * 16).hello(), b"m" * 16)
        with pytest.raises(wire.Refused, match="another hello"):
            self.client(b"2" * 16).answer(answer)

    @pytest.mark.parametrize("versions", [(2, 3), (0, 0)])
    def test_versions_that_do_not_meet(self, versions: tuple[int, int]) -> None:
        """An authenticated refusal that names both."""
        client = self.client(versions=versions)
        answer, opened = self.server().answer(client.hello(), b"m" * 16)
        assert opened is None
        with pytest.raises(RpcProtocolMismatch, match=rf"1 to 1, this client {versions[0]} to {versions[1]}"):
            client.answer(answer)
        replayed, _ = self.server().answer(self.client(b"z" * 16, versions=versions).hello(), b"m" * 16)
        with pytest.raises(wire.Refused, match="another hello"):
            client.answer(replayed)
