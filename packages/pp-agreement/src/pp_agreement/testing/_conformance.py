"""What every transport owes, as one suite: each member runs it, in a thread or a process of its own.

    check_transport(transport, domain, rank, sync=barrier.wait, frames_outstanding_max=window)

``sync`` is a barrier among the members; it may block, the transport may not.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pp_agreement._agreement import Agreement
from pp_agreement._codec import Codec
from pp_agreement._config import AgreementConfig, Domain
from pp_agreement._errors import WouldBlock
from pp_agreement._events import Frame, Outcome
from pp_agreement._state import Kind
from pp_agreement._transport import Transport

_LIMIT_S = 30.0


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
        _restarted(transport, domain, rank, peers, sync)
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
    """A peer that receives nothing stops its sender within the bound, and that sender still receives.

    Nothing here is judged by how much time has passed: what a transport's own threads do takes as long as the machine likes.
    """
    sent = dict.fromkeys(peers, 0)
    if is_hub:
        for peer in peers:
            _fill(transport, codec, peer, sent, frames_outstanding_max)
    sync()
    until_s = time.monotonic() + _LIMIT_S
    if not is_hub:
        for peer in peers:
            transport.send(peer, codec.encode(peer, _frame(1)))
    else:
        waiting = set(peers)
        while waiting:
            _require(time.monotonic() < until_s, "receiving never depends on send space")
            waiting -= {peer for peer, _data in transport.receive(8).frames}
    sync()
    until_s = time.monotonic() + _LIMIT_S
    if is_hub:  # the last frame says that it is the last one
        unmarked = set(peers)
        while unmarked:
            _require(time.monotonic() < until_s, "a slot is free again once its frame was received")
            for peer in tuple(unmarked):
                if transport.can_send(peer):
                    transport.send(peer, codec.encode(peer, _frame(sent[peer] + 1, 2)))
                    unmarked.discard(peer)
    else:
        got, last = 0, False
        while not last:
            _require(time.monotonic() < until_s, f"waiting frames arrive: {got} came")
            for peer, data in transport.receive(8).frames:
                got += 1
                frame = codec.decode(peer, data)
                _require(frame.sequence == got, "order survives a full window")
                last = len(frame.records) == 2


def _fill(transport: Transport, codec: Codec, peer: int, sent: dict[int, int], frames_outstanding_max: int) -> None:
    """Send until slots stay refused for a while; a transport's threads may free some late, which only continues the sending."""
    refused_s: float | None = None
    while refused_s is None or time.monotonic() - refused_s < 0.2:
        if transport.can_send(peer):
            refused_s = None
            sent[peer] += 1
            transport.send(peer, codec.encode(peer, _frame(sent[peer])))
            _require(
                sent[peer] <= frames_outstanding_max,
                f"bounded window: {sent[peer]} frames left although the peer receives nothing",
            )
            continue
        try:
            transport.send(peer, codec.encode(peer, _frame(sent[peer] + 1)))
        except WouldBlock:
            refused_s = time.monotonic() if refused_s is None else refused_s
            freed = transport.can_send(peer)
            _require(
                freed or transport.outstanding(peer) > 0 or transport.can_send(peer),
                "what was not received is outstanding",
            )
        else:  # a slot became free between the two calls: then it must be seen to be refused later
            sent[peer] += 1
            refused_s = None
            _require(sent[peer] <= frames_outstanding_max, "a send without a slot is refused with WouldBlock")


class _Kept:
    """The transport that is open already, for an agreement that begins or is left while its streams stay."""

    def __init__(self, inner: Transport) -> None:
        self.name = inner.name
        self.outstanding, self.can_send, self.send = inner.outstanding, inner.can_send, inner.send
        self.receive, self.deaths = inner.receive, inner.deaths

    def open(self, peers: tuple[int, ...], frame_bytes_max: int) -> None:
        """It is."""

    def close(self, clean: bool) -> None:
        """Not yet."""


def _restarted(
    transport: Transport, domain: Domain, rank: int, peers: tuple[int, ...], sync: Callable[[], object]
) -> None:
    """A member that begins anew under the same epoch is refused with its first frame, and nothing of it is decided."""
    config = AgreementConfig(frame_bytes_max=4096, heartbeat_s=5.0, silence_s=600.0, startup_s=600.0)
    first = Agreement(domain, rank, _Kept(transport), config)
    first.open()
    for number in (1, 2, 3):
        first.vote_terminal(first.admit(number, number, ready=False), Outcome.COMPLETED)
    until_s = time.monotonic() + _LIMIT_S
    while first.open_rounds:
        _require(time.monotonic() < until_s and first.stopped is None, f"an agreement works: {first.stopped}")
        first.poll()
    _flush(transport, peers, first, until_s)
    sync()
    member = next((i for i in range(domain.size) if i != domain.coordinator_index), None)
    if member is None:
        return
    until_s = time.monotonic() + _LIMIT_S
    if first.is_coordinator:
        first.vote_terminal(first.admit(4, 4, ready=False), Outcome.COMPLETED)
        while first.stopped is None:
            _require(time.monotonic() < until_s, "a restarted member is refused with its first frame")
            first.poll()
        told = first.stopped
        _require(told.suspect_rank == domain.ranks[member] and "restarted" in told.detail, f"it is named: {told}")
        _require(first.drain_state().committed == 3, "nothing of a restarted member is decided")
    elif domain.index_of(rank) == member:
        again = Agreement(domain, rank, _Kept(transport), config)
        again.open()
        again.vote_terminal(again.admit(4, 1, ready=False), Outcome.FAILED)
        again.poll()
        sync()
        return
    sync()


def _flush(transport: Transport, peers: tuple[int, ...], agreement: Agreement, until_s: float) -> None:
    """Until what was said has been received."""
    while any(transport.outstanding(p) for p in peers) and time.monotonic() < until_s:
        agreement.poll()


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
