"""Invariant: no byte without a valid MAC passes the opener, and no bytes make a decoder do other than refuse or return.

Campaigns, in turn: authentic messages altered as a whole (flips, cuts, splices, frames dropped, doubled, swapped,
replayed), every byte of a message altered or cut off one by one, authentic frames with malformed insides, handshakes,
typed bodies, error bodies, pickles, addresses; and messages sent to a live server, which must go on serving. A forgery
is anything accepted that was not sealed by the peer for this very place in the sequence.

    python tools/fuzz.py --count 100000 [--seed 1]

Exit code 0 if the invariant held, 1 with the seed and the case if not.
"""

# ruff: noqa: T201, S311, S108, BLE001 - a command line tool with reproducible randomness
from __future__ import annotations

import argparse
import collections
import os
import pickle
import random
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np

from rpc_local_registry import (
    RpcAddressError,
    RpcClient,
    RpcConfig,
    RpcError,
    RpcProtocolMismatch,
    RpcServer,
    rpc_method,
)
from rpc_local_registry import _codec as codec
from rpc_local_registry import _errors as errors
from rpc_local_registry import _session as session
from rpc_local_registry import _wire as wire
from rpc_local_registry._mac import MACS, HmacSha256, Mac
from rpc_local_registry._methods import methods_of
from rpc_local_registry._zmq import check_address
from rpc_local_registry.testing import RawPeer

LIMITS = {"message_bytes_max": 65536, "buffers_max": 8}
KEY = bytes(range(32))
SESSION = b"s" * wire.SESSION_BYTES
#: Raised if unpickled: loading must never happen.
TOUCHED: list[str] = []


def touch() -> None:
    """What a hostile pickle would run."""
    TOUCHED.append("unpickled")


def expect(holds: object, problem: object) -> None:
    """An assertion that ``python -O`` keeps."""
    if not holds:
        raise AssertionError(problem)


class Bomb:
    """Runs ``touch`` when loaded."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return touch, ()


class Request(msgspec.Struct):
    """Typed argument."""

    request_id: int
    token_ids: np.ndarray
    tags: dict[str, list[float]] = {}
    parent: Request | None = None


class Worker:
    """Methods of many shapes; bodies are never reached by these tests except on the live server."""

    @rpc_method(non_blocking=True)
    def submit(self, request: Request, priority: int = 0) -> int:
        """Typed."""
        return request.request_id

    @rpc_method(non_blocking=True)
    def submit_batch(self, requests: Iterator[Request]) -> list[int]:
        """Lazy."""
        return [request.request_id for request in requests]

    @rpc_method(non_blocking=True)
    def anything(self, value: Any) -> None:
        """Untyped."""


SPECS = methods_of(Worker)


class Fuzzer:
    """One seeded run."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.counts: collections.Counter[str] = collections.Counter()
        self.macs = [make(KEY) for make in MACS.values()]
        self.mac: Mac = self.macs[0]
        self.pickles = [pickle.dumps(Bomb(), protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]

    # ---- material

    def authentic(self, sealer: wire.Sealer) -> list[bytes]:
        """A valid message of any kind."""
        pick = self.random
        arrays = [
            memoryview(pick.randbytes(pick.choice((0, 1, 7, 8, 63, 300))))
            for _ in range(pick.choice((0, 0, 0, 1, 2, 5)))
        ]
        payload = wire.prepare(
            pick.choice((b"", b"submit")), pick.randbytes(pick.choice((0, 1, 30, 200))), arrays, inline_bytes_max=64
        )
        kind, argument = pick.choice(sorted(wire.CLIENT_KINDS)), pick.getrandbits(64)
        frames = sealer.seal(kind, pick.getrandbits(16), argument, payload, pick.getrandbits(2))
        expect(sum(map(len, frames)) == payload.size_bytes, "the size told before sealing is the message's")
        items, size = wire.unpack_credit(argument)
        expect(wire.pack_credit(items, size) == argument, "a credit is what it was packed from")
        return [bytes(frame) for frame in frames]

    def altered(self, frames: list[bytes]) -> list[bytes]:
        """A message changed in some way (it may come out equal; the caller compares)."""
        pick = self.random
        frames = list(frames)
        index = pick.randrange(len(frames))
        frame = frames[index]
        match pick.randrange(12):
            case 0 | 1 | 2 if frame:
                position = pick.randrange(len(frame))
                flipped = bytes((frame[position] ^ (1 << pick.randrange(8)),))
                frames[index] = frame[:position] + flipped + frame[position + 1 :]
            case 3:
                frames[index] = frame[: pick.randrange(len(frame) + 1)]
            case 4:
                frames[index] = frame + pick.randbytes(pick.randrange(1, 40))
            case 5 if len(frames) > 1:
                del frames[index]
            case 6:
                frames.insert(index, frame)
            case 7 if len(frames) > 1:
                other = pick.randrange(len(frames))
                frames[index], frames[other] = frames[other], frames[index]
            case 8:
                frames[index] = pick.randbytes(pick.choice((0, 1, 31, 32, 33, 87, 88, 89, 200)))
            case 9 if len(frame) >= wire.HEADER_BYTES:
                # A header of other numbers under the old MAC.
                offset = pick.randrange(wire.MAC_BYTES, wire.HEADER_BYTES - 8)
                frames[index] = frame[:offset] + struct.pack("<Q", pick.getrandbits(64)) + frame[offset + 8 :]
            case 10:
                start, stop = sorted((pick.randrange(len(frame) + 1), pick.randrange(len(frame) + 1)))
                frames[index] = frame[:start] + frame[stop:]
            case _:
                frames[0] = pick.choice(self.pickles)
        return frames

    def sealed_by_hand(self, rest: bytes, external: list[bytes]) -> list[bytes]:
        """An authentic MAC over any bytes at all: what a hostile holder of the key could send."""
        number = int.from_bytes(rest[32:40], "little") if len(rest) >= 40 else 0
        return [self.mac.tag(number, rest, external) + rest, *external]

    def refused(self, opener: wire.Opener, frames: list[bytes]) -> bool:
        """Open; True if refused with a known reason and the opener is unchanged."""
        before = opener.sequence
        try:
            opener.open(frames)
        except wire.Refused as refusal:
            expect(refusal.reason in wire.REFUSALS, refusal)
            expect(opener.sequence == before, "a refusal moved the sequence")
            return True
        return False

    # ---- campaigns: each handles a number of messages

    def whole(self, count: int) -> None:
        """Altered as a whole, replayed, reflected, from another session, under another key."""
        sealer = wire.Sealer(self.mac, wire.TO_SERVER, SESSION)
        opener = wire.Opener(self.mac, wire.TO_SERVER, SESSION, **LIMITS)
        reflected = wire.Opener(self.mac, wire.TO_CLIENT, SESSION, **LIMITS)
        foreign = wire.Opener(self.mac, wire.TO_SERVER, b"t" * wire.SESSION_BYTES, **LIMITS)
        other_key = wire.Opener(HmacSha256(b"k" * 32), wire.TO_SERVER, SESSION, **LIMITS)
        earlier: list[list[bytes]] = []
        for number in range(count // 4):
            if number % 64 == 0:
                # Each code in turn, from the beginning of a session.
                self.mac = self.random.choice(self.macs)
                sealer = wire.Sealer(self.mac, wire.TO_SERVER, SESSION)
                opener = wire.Opener(self.mac, wire.TO_SERVER, SESSION, **LIMITS)
                reflected = wire.Opener(self.mac, wire.TO_CLIENT, SESSION, **LIMITS)
                foreign = wire.Opener(self.mac, wire.TO_SERVER, b"t" * wire.SESSION_BYTES, **LIMITS)
                earlier.clear()
            good = self.authentic(sealer)
            bad = self.altered(good)
            if bad != good:
                expect(self.refused(opener, bad), f"accepted a forgery: {bad!r} for {good!r}")
            for stranger in (reflected, foreign, other_key):
                expect(self.refused(stranger, good), "accepted by a stranger")
            message = opener.open(good)
            expect(message.kind in wire.CLIENT_KINDS, "message.kind in wire.CLIENT_KINDS")
            expect(self.refused(opener, good), "accepted a replay")
            if earlier:
                expect(self.refused(opener, self.random.choice(earlier)), "accepted an old replay")
            earlier.append(good)
            del earlier[:-50]

    def bytewise(self, count: int) -> None:
        """Each prefix, and each byte altered, of one message after the other."""
        done = 0
        while done < count:
            self.mac = self.random.choice(self.macs)
            sealer = wire.Sealer(self.mac, wire.TO_SERVER, SESSION)
            opener = wire.Opener(self.mac, wire.TO_SERVER, SESSION, **LIMITS)
            good = self.authentic(sealer)
            for index, frame in enumerate(good):
                for position in range(len(frame)):
                    cut = [*good[:index], frame[:position], *good[index + 1 :]]
                    changed = bytes((frame[position] ^ self.random.randrange(1, 256),))
                    flipped = [*good[:index], frame[:position] + changed + frame[position + 1 :], *good[index + 1 :]]
                    held = self.refused(opener, cut) and self.refused(opener, flipped)
                    expect(held, f"accepted a forgery of {good!r}")
                    done += 2
            opener.open(good)

    def insides(self, count: int) -> None:
        """Authentic MAC, malformed structure: refused or opened, never anything else."""
        for _ in range(count):
            self.mac = self.random.choice(self.macs)
            sealer = wire.Sealer(self.mac, wire.TO_SERVER, SESSION)
            opener = wire.Opener(self.mac, wire.TO_SERVER, SESSION, **LIMITS)
            good = self.authentic(sealer)
            rest = bytearray(good[0][wire.MAC_BYTES :])
            for _ in range(self.random.randrange(1, 4)):
                # Leave session and sequence alone half of the time, so that deeper checks are reached.
                low = 0 if self.random.random() < 0.5 else 4
                position = self.random.randrange(low, len(rest))
                if low and 16 <= position < 40:
                    continue
                rest[position] = self.random.choice((0, 1, 2, 127, 128, 255, self.random.randrange(256)))
            if self.random.random() < 0.2:
                rest = rest[: self.random.randrange(len(rest) + 1)]
            frames = self.sealed_by_hand(bytes(rest), good[1:])
            if not self.refused(opener, frames):
                self.counts["insides opened"] += 1

    def terms(self) -> tuple[session.ClientTerms, session.ServerTerms]:
        """Terms of both sides, of any legal size, with codes that may not meet."""
        pick = self.random
        names = [*MACS, "of-tomorrow"]

        def number() -> int:
            return pick.choice((1, 64, 65536, 1 << 30, 1 << 48, pick.randrange(1, 1 << 48)))

        def costs() -> dict[str, int]:
            return {name: number() for name in pick.sample(names, pick.randrange(len(names) + 1))}

        clock = pick.choice((b"", b"here", b"there"))
        return (
            session.ClientTerms(number(), number(), number(), number(), number(), costs(), clock),
            session.ServerTerms(number(), number(), number(), number(), costs(), pick.choice((clock, b"here"))),
        )

    def handshakes(self, count: int) -> None:
        """Hellos and answers, altered; authentic ones with malformed bodies; and two ends that must agree on every term."""
        keys = wire.handshake_keys(KEY)
        for number in range(count):
            mine, yours = self.terms()
            server = session.ServerHandshake(KEY, "server", yours)
            client = session.ClientHandshake(KEY, self.random.randbytes(16), "client", mine)
            hello = [bytes(frame) for frame in client.hello()]
            bad = self.altered(hello)
            if bad != hello:
                self.expect_refused(lambda bad=bad, server=server: server.answer(bad, bytes(16)), bad)
            answer, opened = server.answer(hello, self.random.randbytes(16))
            expect(
                (opened is not None) == bool(set(mine.macs) & set(yours.macs) & set(MACS)),
                "a session needs a common code",
            )
            self.expect_refused(lambda hello=hello, server=server: server.answer(hello, bytes(16)), hello)
            reply = [bytes(frame) for frame in answer]
            bad = self.altered(reply)
            if bad != reply:
                self.expect_refused(lambda bad=bad, client=client: client.answer(bad), bad)
            if opened is not None:
                ours = client.answer(reply)
                expect(
                    (ours.peer, opened.peer, ours.mac_name) == (yours, mine, opened.mac_name), "both ends know the same"
                )
                expect(ours.shared_clock == opened.shared_clock, "both ends agree about the clock")
                if yours.message_bytes_max >= wire.HEADER_BYTES:
                    opened.opener.open(ours.sealer.seal(wire.PING))
            else:
                self.expect_refused(lambda reply=reply, client=client: client.answer(reply), reply)
            if number % 2:
                whole = msgspec.msgpack.encode(session.Hello(bytes(16), 1, 1, "n", mine))
                body = self.mutated_body(
                    self.random.choice(
                        (whole, msgspec.msgpack.encode([bytes(16), bytes(16), 1, "n", yours, "blake2b"]))
                    )
                )
                kind = self.random.choice((wire.WELCOME, wire.REJECT))
                payload = wire.prepare(b"", body)
                forged = wire.Sealer(keys[1], wire.TO_CLIENT, wire.NO_SESSION).seal(kind, payload=payload)
                self.expect_refused(lambda forged=forged, client=client: client.answer(forged), forged)
                forged = wire.Sealer(keys[0], wire.TO_SERVER, wire.NO_SESSION).seal(wire.HELLO, payload=payload)
                try:
                    server.answer(forged, bytes(16))
                except wire.Refused:
                    self.counts["hellos refused"] += 1

    def expect_refused(self, action: Callable[[], object], frames: object) -> None:
        """The action must refuse."""
        try:
            action()
        except (wire.Refused, RpcProtocolMismatch):
            return
        raise AssertionError(f"accepted {frames!r}")

    def mutated_body(self, body: bytes) -> bytes:
        """msgpack with a few bytes changed, cut or inserted; or no msgpack at all."""
        pick = self.random
        if pick.random() < 0.1:
            return pick.choice(
                (*self.pickles, pick.randbytes(pick.randrange(60)), b"\x91" * 3000, b"\xdd\xff\xff\xff\xff")
            )
        data = bytearray(body)
        for _ in range(pick.randrange(1, 5)):
            position = pick.randrange(len(data) + 1)
            match pick.randrange(3):
                case 0 if position < len(data):
                    data[position] = pick.randrange(256)
                case 1 if position < len(data):
                    del data[position:]
                case _:
                    data[position:position] = pick.randbytes(pick.randrange(1, 4))
            if not data:
                break
        return bytes(data)

    def bodies(self, count: int) -> None:
        """Typed arguments, lazy batches, keywords, results and error bodies from malformed msgpack."""
        request = Request(7, np.arange(5, dtype=np.int32), {"a": [1.0]}, Request(8, np.zeros((2, 2))))
        body, buffers = codec.encode((request, 3))
        batch, batch_buffers = codec.encode(([request, request],))
        keywords, keyword_buffers = codec.encode(((request,), {"priority": 4}))
        error, _ = codec.encode(errors.ErrorBody("remote", "ValueError", "text", "trace"))
        error_decode = msgspec.msgpack.Decoder(errors.ErrorBody).decode
        causes = errors.cause_table(())
        for _ in range(count):
            match self.random.randrange(4):
                case 0:
                    self.arguments("submit", self.mutated_body(body), list(buffers), 0)
                case 1:
                    self.arguments("submit_batch", self.mutated_body(batch), list(batch_buffers), 0)
                case 2:
                    self.arguments("submit", self.mutated_body(keywords), list(keyword_buffers), wire.FLAG_KEYWORDS)
                case _:
                    try:
                        rebuilt = errors.rebuild(error_decode(self.mutated_body(error)), causes)
                    except codec.DECODE_ERRORS:
                        continue
                    expect(isinstance(rebuilt, RpcError), "isinstance(rebuilt, RpcError)")

    def arguments(self, name: str, body: bytes, buffers: list[memoryview], flags: int) -> None:
        """Decode a call's arguments."""
        if self.random.random() < 0.3:
            buffers = [memoryview(self.random.randbytes(self.random.choice((0, 3, 4, 20, 32))))]
        message = wire.Message(wire.CALL, flags, 1, 0, name.encode(), memoryview(body), buffers, len(body))
        try:
            args, keywords = SPECS[name].decode_arguments(message)
        except errors.RpcArgumentError:
            return
        for value in (*args, *keywords.values()):
            if isinstance(value, codec.LazyItems):
                while len(value):
                    try:
                        value = self.typed(next(value)) or value
                    except errors.RpcArgumentError:
                        continue
            elif not isinstance(value, int):
                self.typed(value)

    @staticmethod
    def typed(value: object) -> None:
        """What came out has the declared type."""
        expect(isinstance(value, Request) and isinstance(value.request_id, int), value)
        expect(
            isinstance(value.token_ids, np.ndarray) and not value.token_ids.flags.writeable,
            "isinstance(value.token_ids, np.ndarray) and not value.token_ids.flags.writeable",
        )

    def addresses(self, count: int) -> None:
        """Addresses from pieces and noise."""
        pieces = [
            "ipc://",
            "tcp://",
            "inproc://",
            "/tmp/x",
            "127.0.0.1",
            ":",
            "0",
            "99999",
            "[::1]",
            "*",
            "@",
            "\0",
            "é",
            "/" * 120,
        ]
        for _ in range(count):
            text = "".join(self.random.choice(pieces) for _ in range(self.random.randrange(1, 5)))
            try:
                check_address(text, bind=bool(self.random.getrandbits(1)))
            except RpcAddressError:
                self.counts["addresses refused"] += 1

    def live(self, count: int) -> None:
        """A live server under fire from a stranger and from a hostile holder of a session; a good client goes on working."""
        key = os.urandom(32)
        config = RpcConfig(message_bytes_max=65536, buffers_max=8)
        with (
            RpcServer(Worker(), "ipc://", key, config=config) as server,
            RpcClient(server.address, key, config=config, interface=Worker) as client,
        ):
            sent = 0
            while sent < count:
                with (
                    RawPeer(server.address, config, key=key) as stranger,
                    RawPeer(server.address, config, key=key) as holder,
                ):
                    opened = holder.open_session(key)
                    good = [bytes(f) for f in opened.sealer.seal(wire.PING)]
                    holder.send(*good)
                    for _ in range(min(200, count - sent)):
                        stranger.send(*self.altered(good))
                        sent += 1
                    # Authentic and malformed: the session may end, the server may not.
                    for kind in (wire.CALL, wire.ONEWAY, wire.STREAM, wire.CREDIT, wire.CANCEL):
                        name = self.random.choice((b"submit", b"submit_batch", b"anything", b"nothing", b"__init__"))
                        payload = wire.prepare(name, self.mutated_body(b"\x92\x01\x02"))
                        argument, flags = (
                            self.random.getrandbits(self.random.choice((0, 20, 64))),
                            self.random.getrandbits(8),
                        )
                        holder.send(*opened.sealer.seal(kind, self.random.getrandbits(8), argument, payload, flags))
                        sent += 1
                    # Not authentic inside a session: the end of that session, and of nothing else.
                    bad = self.altered(good)
                    if bad != good:
                        holder.send(*bad)
                        sent += 1
                    request = Request(sent, np.arange(3, dtype=np.int32))
                    expect(client.submit(request).remote(timeout_s=20) == sent, "the good client was disturbed")
            refused = sum(server.statistics().refused.values())
            expect(refused > 0, "nothing was refused")
            self.counts["live refused"] += refused

    def run(self, count: int) -> None:
        """All campaigns, in shares of ``count``."""
        shares: list[tuple[Callable[[int], None], float]] = [
            (self.whole, 0.3), (self.bytewise, 0.2), (self.insides, 0.15), (self.handshakes, 0.05), (self.bodies, 0.24),
            (self.addresses, 0.01), (self.live, 0.05),
        ]  # fmt: skip
        for campaign, share in shares:
            number = max(8, round(count * share))
            start_s = time.monotonic()
            campaign(number)
            self.counts[campaign.__name__] += number
            print(f"  {campaign.__name__:<12}{number:>9} messages {time.monotonic() - start_s:7.2f} s", flush=True)
        expect(not TOUCHED, "a pickle was loaded")


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().getrandbits(32) if options.seed is None else options.seed
    print(f"fuzz rpc-local-registry: {options.count} messages, seed {seed}", flush=True)
    fuzzer = Fuzzer(seed)
    try:
        fuzzer.run(options.count)
    except BaseException:
        traceback.print_exc()
        print(f"FAILED: python tools/fuzz.py --count {options.count} --seed {seed}")
        return 1
    print(f"held: no crash, hang or accepted forgery; {dict(fuzzer.counts)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
