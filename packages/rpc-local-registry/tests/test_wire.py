"""Frames and handshake, pure: layout, MAC, direction, session, sequence, sizes."""

from __future__ import annotations

import hashlib
import hmac
import random
import struct
from typing import Any

import msgspec
import pytest

from rpc_local_registry import RpcConfig, RpcProtocolMismatch
from rpc_local_registry import _session as session
from rpc_local_registry import _wire as wire
from rpc_local_registry._engine import client_terms
from rpc_local_registry._mac import AES_GMAC, BLAKE2B, BY_SIZE, HMAC_SHA256, MACS, SHORT_BYTES_MAX, HmacSha256, choose
from rpc_local_registry._server import server_terms

LIMITS = {"message_bytes_max": 1 << 20, "buffers_max": 16}
CLIENT = client_terms(RpcConfig(message_bytes_max=1 << 20, buffers_max=16))
SERVER = server_terms(RpcConfig(message_bytes_max=1 << 20, buffers_max=16))
SESSION = b"s" * 16


def ends(direction: int = wire.TO_SERVER, make: Any = HmacSha256) -> tuple[wire.Sealer, wire.Opener]:
    """Both ends of one direction."""
    mac = make(b"k" * 32)
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
    assert HmacSha256(key).tag(7, data[:4], [data[4:]]) == hmac.digest(key, data, "sha256")


def test_round_trip_of_random_messages() -> None:
    """What is sealed comes out, whatever is inline and what is a frame of its own."""
    pick = random.Random(1)
    sealer, opener = ends()
    for _ in range(300):
        arrays = [pick.randbytes(pick.choice((0, 1, 7, 8, 9, 64, 65, 500))) for _ in range(pick.randrange(5))]
        body, name = pick.randbytes(pick.randrange(50)), b"n" * pick.randrange(20)
        kind, call_id, argument = pick.choice(sorted(wire.CLIENT_KINDS)), pick.getrandbits(64), pick.getrandbits(64)
        payload = wire.prepare(name, body, [memoryview(a) for a in arrays], 64)
        frames = sealer.seal(kind, call_id, argument, payload)
        assert payload.size_bytes == sum(map(len, frames))
        assert len(frames) == 1 + sum(len(a) > 64 for a in arrays)
        message = opener.open(frames)
        assert (message.kind, message.call_id, message.argument, message.name) == (kind, call_id, argument, name)
        assert bytes(message.body) == body
        assert [bytes(b) for b in message.buffers] == arrays
        assert message.size_bytes == sum(map(len, frames))


def test_inline_arrays_are_aligned() -> None:
    """Each starts at a multiple of eight bytes from the frame's start."""
    sealer, _ = ends()
    payload = wire.prepare(b"abc", b"12345", [memoryview(b"X"), memoryview(b"Y")], 9)
    frame = sealer.seal(wire.CALL, 1, 0, payload)[0]
    assert frame.index(b"X") % 8 == 0
    assert frame.index(b"Y") % 8 == 0


@pytest.mark.parametrize("mac", MACS)
def test_every_altered_bit_is_refused(mac: str) -> None:
    """Header, name, table, body, padding, inline and external arrays: all under the MAC."""
    sealer, opener = ends(make=MACS[mac])
    frames = sealer.seal(wire.CALL, 1, 2, wire.prepare(b"n", b"body", [memoryview(b"in"), memoryview(b"external")], 4))
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
    back = wire.Opener(HmacSha256(b"k" * 32), wire.TO_CLIENT, SESSION, **LIMITS)
    assert refusal(back, first) == "reflected"


def test_one_message_may_be_missed_where_it_was_dropped_here() -> None:
    """Exactly one, and only before the next that is accepted."""
    sealer, opener = ends()
    messages = [sealer.seal(wire.PING) for _ in range(9)]
    opener.open(messages[0])
    opener.may_miss_one()
    assert refusal(opener, messages[3]) == "gap"
    assert refusal(opener, messages[0]) == "replayed"
    opener.open(messages[2])
    assert refusal(opener, messages[4]) == "gap"
    opener.may_miss_one()
    opener.open(messages[3])
    assert refusal(opener, messages[5]) == "gap"


def test_directions_and_sessions_have_keys_of_their_own() -> None:
    """Nothing derived is equal to anything else derived, so a header cannot be rewritten into another place."""
    key = bytes(32)
    made = [
        *wire.handshake_keys(key),
        *wire.session_keys(key, b"a" * 32, HMAC_SHA256)[1:],
        *wire.session_keys(key, b"b" * 32, HMAC_SHA256)[1:],
    ]
    assert len({mac.tag(0, b"same") for mac in made}) == len(made)


def test_sizes_come_before_the_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    """Truncated and oversized messages cost no MAC at all."""
    sealer, _ = ends()
    opener = wire.Opener(HmacSha256(b"k" * 32), wire.TO_SERVER, SESSION, message_bytes_max=500, buffers_max=2)
    big = sealer.seal(wire.CALL, payload=wire.prepare(b"", bytes(500)))
    many = sealer.seal(wire.CALL, payload=wire.prepare(b"", b"", [memoryview(b"xx")] * 3, 1))
    split = sealer.seal(wire.CALL, payload=wire.prepare(b"", b"", [memoryview(bytes(400))], 1))

    def no_mac(*_: object) -> bytes:
        raise AssertionError("a MAC was computed")

    monkeypatch.setattr(HmacSha256, "tag", no_mac)
    assert refusal(opener, [b"x" * 87]) == "truncated"
    for frames in (big, many, [*split, bytes(100)]):
        assert refusal(opener, frames) == "oversized"


def test_authentic_nonsense_is_refused() -> None:
    """A holder of the key who lies about lengths gets a refusal, not an exception of another kind."""
    mac = HmacSha256(b"k" * 32)
    header = struct.Struct("<2sBBBBHIHH16sQQQ")

    def frames(buffers: int, body: int, name: int, reserved: int, rest: bytes, kind: int = wire.CALL) -> list[bytes]:
        covered = header.pack(b"RL", 1, kind, 0, 0, buffers, body, name, reserved, SESSION, 1, 0, 0) + rest
        return [mac.tag(1, covered) + covered]

    covered = frames(0, 0, 0, 0, b"")[0][wire.MAC_BYTES :]
    two_frames = [mac.tag(1, covered, [b"extra"]) + covered, b"extra"]
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
        return session.ClientHandshake(key, nonce, "client", CLIENT, versions=versions)

    def server(self) -> session.ServerHandshake:
        """The server's half."""
        return session.ServerHandshake(self.KEY, "server", SERVER)

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
        with pytest.raises(
            RpcProtocolMismatch, match=rf"1 to 1; this client speaks versions {versions[0]} to {versions[1]}"
        ):
            client.answer(answer)
        replayed, _ = self.server().answer(self.client(b"z" * 16, versions=versions).hello(), b"m" * 16)
        with pytest.raises(wire.Refused, match="another hello"):
            client.answer(replayed)

    def test_terms_reach_the_other_side(self) -> None:
        """Every number that both sides use is told to the other; the code is the one that is cheapest for both together."""
        mine = msgspec.structs.replace(CLIENT, stream_items=7, stream_bytes=70, macs={HMAC_SHA256: 10, BLAKE2B: 9})
        yours = msgspec.structs.replace(SERVER, pending_calls_max=3, macs={HMAC_SHA256: 10, BLAKE2B: 12, AES_GMAC: 1})
        client = session.ClientHandshake(self.KEY, b"n" * 16, "client", mine)
        answer, theirs = session.ServerHandshake(self.KEY, "server", yours).answer(client.hello(), b"m" * 16)
        ours = client.answer(answer)
        assert theirs is not None
        assert (theirs.peer, ours.peer) == (mine, yours)
        assert (ours.mac_name, theirs.mac_name, ours.shared_clock) == (HMAC_SHA256, HMAC_SHA256, True)

    def test_no_common_code(self) -> None:
        """An authenticated refusal that names the codes of both."""
        mine = msgspec.structs.replace(CLIENT, macs={BLAKE2B: 1})
        yours = msgspec.structs.replace(SERVER, macs={HMAC_SHA256: 1})
        client = session.ClientHandshake(self.KEY, b"n" * 16, "client", mine)
        answer, opened = session.ServerHandshake(self.KEY, "server", yours).answer(client.hello(), b"m" * 16)
        assert opened is None
        with pytest.raises(RpcProtocolMismatch, match=r"hmac-sha256; this client .* blake2b"):
            client.answer(answer)

    def test_every_byte_of_both_hellos_is_in_the_keys(self) -> None:
        """Two clients whose hellos are as long, and answered by the same bytes, have sessions of their own."""
        made = []
        for name in ("client", "tneilc"):
            hello = session.ClientHandshake(self.KEY, b"n" * 16, name, CLIENT).hello()
            answer, opened = self.server().answer(hello, b"m" * 16)
            assert opened is not None
            made.append((list(map(len, hello)), list(map(bytes, answer)), opened.sealer.seal(wire.PING)))
        assert made[0][:2] == made[1][:2]
        assert made[0][2] != made[1][2]

    def test_a_downgrade_is_impossible(self) -> None:
        """Even who could write valid handshake messages under the key of the handshake alone gets two ends that do not meet."""
        mine = msgspec.structs.replace(CLIENT, macs={HMAC_SHA256: 2, BLAKE2B: 1})
        client = session.ClientHandshake(self.KEY, b"n" * 16, "client", mine)
        weaker = session.ClientHandshake(
            self.KEY, b"n" * 16, "client", msgspec.structs.replace(mine, macs={HMAC_SHA256: 2})
        )
        answer, theirs = self.server().answer(weaker.hello(), b"m" * 16)
        ours = client.answer(answer)
        assert theirs is not None
        assert (ours.mac_name, theirs.mac_name) == (HMAC_SHA256, HMAC_SHA256)
        with pytest.raises(wire.Refused, match="session"):
            theirs.opener.open(ours.sealer.seal(wire.PING))

    @pytest.mark.parametrize(
        "change",
        [
            {"stream_items": 0},
            {"stream_bytes": -1},
            {"macs": {"x": 0}},
            {"message_bytes_max": 1 << 60},
            {"clock": b"c" * 65},
        ],
        ids=lambda change: next(iter(change)),
    )
    def test_terms_out_of_range_are_refused(self, change: dict[str, Any]) -> None:
        """Even from a holder of the key."""
        bad = msgspec.structs.replace(CLIENT, **change)
        with pytest.raises(wire.Refused, match="structure"):
            self.server().answer(session.ClientHandshake(self.KEY, b"n" * 16, "client", bad).hello(), b"m" * 16)


def test_the_cheapest_common_code() -> None:
    """By the sum of both costs; names that this process does not know are not chosen; no common name is no code."""
    assert choose({HMAC_SHA256: 5, BLAKE2B: 4}, {HMAC_SHA256: 5, BLAKE2B: 9}) == HMAC_SHA256
    assert choose({HMAC_SHA256: 5, "rot13": 1}, {HMAC_SHA256: 5, "rot13": 1}) == HMAC_SHA256
    assert choose({HMAC_SHA256: 5}, {BLAKE2B: 1}) is None


@pytest.mark.skipif(BY_SIZE not in MACS, reason="needs cryptography")
def test_the_length_says_which_code() -> None:
    """Short messages by BLAKE2b, long ones and those of several frames by AES-GMAC; no key is used for both."""
    tag, key = MACS[BY_SIZE](b"k" * 32).tag, b"k" * 32
    short = hashlib.blake2b(key=key, digest_size=32, person=b"short").digest()
    long = MACS[AES_GMAC](hashlib.blake2b(key=key, digest_size=32, person=b"long").digest()).tag
    for size in (0, 1, SHORT_BYTES_MAX):
        data = bytes(size)
        assert tag(7, data) == hashlib.blake2b(data, key=short, digest_size=32).digest()
        assert tag(7, data, [b"more"]) == long(7, data, [b"more"])
    data = bytes(SHORT_BYTES_MAX + 1)
    assert tag(7, data) == long(7, data)


@pytest.mark.parametrize("mac", MACS)
def test_parts_do_not_matter(mac: str) -> None:
    """One piece or several, as bytes or views: the same tag, of 32 bytes; another number or key, another tag."""
    code, data = MACS[mac](b"k" * 32), bytes(range(256)) * 9
    whole = code.tag(5, data)
    assert len(whole) == 32
    assert code.tag(5, memoryview(data)[:100], [data[100:1000], memoryview(data)[1000:]]) == whole
    assert MACS[mac](b"l" * 32).tag(5, data) != whole
    if mac == AES_GMAC:
        assert code.tag(6, data) != whole


def test_gmac_is_aes_gcm_of_nothing() -> None:
    """Equal to the library's one-shot construction over the same nonce, padded with zeros."""
    aead = pytest.importorskip("cryptography.hazmat.primitives.ciphers.aead")
    tag = MACS[AES_GMAC](b"k" * 32).tag(258, b"data")
    assert tag[16:] == bytes(16)
    assert tag[:16] == aead.AESGCM(b"k" * 32).encrypt((258).to_bytes(12, "little"), b"", b"data")


def test_credit_holds_items_and_bytes() -> None:
    """Packed and unpacked, at the edges of both."""
    for items, size in ((0, 0), (1, 1), ((1 << 20), (1 << 39)), (0, (1 << 40) - 1)):
        assert wire.unpack_credit(wire.pack_credit(items, size)) == (items, size)
