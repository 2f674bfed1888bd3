"""What every transport owes, as one suite: each member runs it, in a thread or a process of its own.

    check_transport(transport, domain, rank, sync=barrier.wait, frames_outstanding_max=window)

``sync`` is a barrier among the members; it may block, the transport may not.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pp_agreement._codec import Codec
from pp_agreement._config import AgreementConfig, Domain
from pp_agreement._errors import WouldBlock
from pp_agreement._events import Frame
from pp_agreement._state import Kind
from pp_agreement._transport import Transport

_LIMIT_S = 10.0


class NotConforming(AssertionError):
    """A transport does not do what the interface promises; the message names the promise."""


def check_transport(
    transport: Transport,
    domain: Domain,
    rank: int,
    *,
    sync: Callable[[], object],
    frames_outstanding_max: int,
    count: int = 150,
) -> None:
    """Open, exercise and cleanly close a transport.

    Args:
        transport: This member's; not open yet.
        domain: All its members run this at the same time.
        rank: This member.
        sync: A barrier among the members.
        frames_outstanding_max: Frames of one stream that may be under way while the peer receives nothing.
        count: Frames per stream in the ordering check.

    Raises:
        NotConforming: A promise is broken.
    """
    config = AgreementConfig(frame_bytes_max=4096)
    codec = Codec(domain, rank, config.frame_bytes_max)
    me = domain.index_of(rank)
    hub = domain.coordinator_index
    peers = tuple(i for i in range(domain.size) if i != me) if me == hub else (hub,)
    transport.open(peers, config.frame_bytes_max)
    try:
        sync()
        _in_order(transport, codec, peers, count)
        sync()
        _quiet(transport, peers)
        sync()
        _bounded(transport, codec, peers, me == hub, sync, frames_outstanding_max)
        sync()
        for number, records in ((1, 0), (2, config.records_per_frame_max)):
            _size(transport, codec, peers, number, records)
            sync()
        until_s = time.monotonic() + _LIMIT_S
        while any(transport.outstanding(p) for p in peers) and time.monotonic() < until_s:
            transport.receive(16)
        sync()
    except BaseException:
        transport.close(False)
        raise
    transport.close(True)
    transport.close(False)  # nothing is left to let go of


def _frame(number: int, records: int = 1) -> Frame:
    return Frame(number, 0, ((int(Kind.VOTE), 0, 0, 0, 0, number, 1),) * records)


def _require(holds: bool, promise: str) -> None:
    if not holds:
        raise NotConforming(promise)


def _in_order(transport: Transport, codec: Codec, peers: tuple[int, ...], count: int) -> None:
    """Both directions at once, every stream in order and complete."""
    sent = dict.fromkeys(peers, 0)
    got = dict.fromkeys(peers, 0)
    until_s = time.monotonic() + _LIMIT_S
    while min(sent.values()) < count or min(got.values()) < count:
        _require(time.monotonic() < until_s, f"frames arrive: sent {sent}, received {got} of {count} in {_LIMIT_S} s")
        for peer in peers:
            if sent[peer] < count and transport.can_send(peer):
                sent[peer] += 1
                transport.send(peer, codec.encode(peer, _frame(sent[peer], 1 + sent[peer] % 40)))
        for peer, data in transport.receive(8).frames:
            frame = codec.decode(peer, data)
            got[peer] += 1
            _require(frame.sequence == got[peer], f"stream order: frame {frame.sequence} where {got[peer]} was due")
            _require(len(frame.records) == 1 + got[peer] % 40, "frames arrive whole")
        if not any(transport.can_send(p) for p in peers):
            time.sleep(0.0002)


def _quiet(transport: Transport, peers: tuple[int, ...]) -> None:
    """Nothing under way: every ring is reported empty, and the call returns at once."""
    sweep = transport.receive(8)
    _require(not sweep.frames and sweep.empty == sum(1 << p for p in peers), "an empty ring is reported as empty")
    _require(transport.deaths() == (), "nobody died")


def _bounded(
    transport: Transport,
    codec: Codec,
    peers: tuple[int, ...],
    is_hub: bool,
    sync: Callable[[], object],
    frames_outstanding_max: int,
) -> None:
    """A peer that receives nothing stops its sender within the bound, and that sender still receives."""
    sent = dict.fromkeys(peers, 0)
    if is_hub:
        for peer in peers:
            settle_s = time.monotonic() + 0.2
            while time.monotonic() < settle_s:
                while transport.can_send(peer):
                    sent[peer] += 1
                    transport.send(peer, codec.encode(peer, _frame(sent[peer])))
                    _require(
                        sent[peer] <= frames_outstanding_max,
                        f"bounded window: {sent[peer]} frames left although the peer receives nothing",
                    )
            _require(transport.outstanding(peer) > 0, "frames that were not received are outstanding")
            try:
                transport.send(peer, codec.encode(peer, _frame(sent[peer] + 1)))
            except WouldBlock:
                pass
            else:
                raise NotConforming("a send without a slot is refused with WouldBlock")
    sync()
    if not is_hub:
        for peer in peers:
            transport.send(peer, codec.encode(peer, _frame(1)))
    else:
        waiting = set(peers)
        until_s = time.monotonic() + _LIMIT_S
        while waiting:
            _require(time.monotonic() < until_s, "receiving never depends on send space")
            waiting -= {peer for peer, _data in transport.receive(8).frames}
    sync()
    if not is_hub:
        got = 0
        quiet_s = time.monotonic() + 0.3
        while time.monotonic() < quiet_s:
            for peer, data in transport.receive(8).frames:
                got += 1
                _require(codec.decode(peer, data).sequence == got, "order survives a full window")
        _require(got > 0, "waiting frames arrive")
    sync()
    if is_hub:
        until_s = time.monotonic() + _LIMIT_S
        while not all(transport.can_send(p) for p in peers):
            _require(time.monotonic() < until_s, "a slot is free again once its frame was received")


def _size(transport: Transport, codec: Codec, peers: tuple[int, ...], number: int, records: int) -> None:
    """The smallest and the largest frame."""
    for peer in peers:
        until_s = time.monotonic() + _LIMIT_S
        while not transport.can_send(peer):
            _require(time.monotonic() < until_s, "a slot becomes free")
        transport.send(peer, codec.encode(peer, _frame(number, records)))
    waiting = set(peers)
    until_s = time.monotonic() + _LIMIT_S
    while waiting:
        _require(time.monotonic() < until_s, f"a frame of {records} records arrives")
        for peer, data in transport.receive(1).frames:
            _require(len(codec.decode(peer, data).records) == records, "frames arrive whole")
            waiting.discard(peer)
