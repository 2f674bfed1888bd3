"""Lanes: several domains on one transport, each with the promises of a transport of its own."""

from __future__ import annotations

import threading

import pytest

from pp_agreement import (
    Agreement,
    AgreementConfig,
    Committed,
    ConfigurationError,
    DeathVerdict,
    Domain,
    FaultCode,
    InProcessNetwork,
    Lanes,
    Outcome,
    SilenceVerdict,
    Sweep,
    TransportError,
    WouldBlock,
    ZmqTransport,
    verify,
)
from pp_agreement._codec import Codec
from pp_agreement._events import Frame
from pp_agreement.testing import check_transport

WORLD = Domain(9, (4, 0, 7, 2))
UP, DOWN, SOME = Domain(1, (0, 2, 4, 7)), Domain(2, (7, 4, 2, 0)), Domain(3, (2, 7), coordinator_rank=2)
DOMAINS = (UP, DOWN, SOME)


class Counting:
    """A transport that counts looks."""

    def __init__(self, inner):
        self._inner = inner
        self.looks = 0

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def receive(self, frames_max):
        self.looks += 1
        return self._inner.receive(frames_max)


class Beside:
    """All ranks of WORLD with their lanes, on one network with a clock of its own."""

    def __init__(self, domains=DOMAINS, *, config=None, window=2, carrier=8, **options):
        self.now_s = 0.0
        self.network = InProcessNetwork(WORLD, carrier, clock=lambda: self.now_s)
        self.carriers = {rank: Counting(self.network.transport(rank)) for rank in WORLD.ranks}
        self.lanes, self.agreements = {}, {}
        for rank in WORLD.ranks:
            mine = [domain for domain in domains if rank in domain.ranks]
            self.lanes[rank] = Lanes(self.carriers[rank], WORLD, rank, mine, window=window, **options)
            for domain in mine:
                lane = self.lanes[rank].transport(domain)
                agreement = Agreement(domain, rank, lane, config, lambda: self.now_s)
                agreement.open()
                self.agreements[rank, domain.domain_id] = agreement

    def settle(self, times=8, without=()):
        found = {place: [] for place in self.agreements}
        for _ in range(times):
            self.now_s += 0.01
            for place, agreement in self.agreements.items():
                if place not in without:
                    found[place] += agreement.poll()
        return found


def test_lanes_decide_beside_one_another():
    """Unlike orders, roles and subsets: every lane decides its own, each with equal evidence, and all close cleanly."""
    beside = Beside()
    for (rank, identity), agreement in beside.agreements.items():
        for number in (1, 2):
            key = agreement.admit(100 * identity + number, number, ready=False)
            agreement.vote_terminal(key, Outcome(min(2, identity - 1)) if rank == 2 else Outcome.COMPLETED)
        if agreement.is_scheduler:
            agreement.start_drain(2)
    for (_rank, identity), events in beside.settle().items():
        commits = [e for e in events if isinstance(e, Committed)]
        assert [e.key.request_id for e in commits] == [100 * identity + 1, 100 * identity + 2]
        assert {e.outcome for e in commits} == {Outcome(identity - 1)}
    for domain in DOMAINS:
        assert verify([beside.agreements[r, domain.domain_id].evidence() for r in domain.ranks]) == ()
    left = dict(beside.agreements)
    for _ in range(20):
        left = {place: agreement for place, agreement in left.items() if not agreement.close(0.0)}
        beside.settle(1, without=set(beside.agreements) - set(left))
    assert not left and all(lanes._carrier.closed is True for lanes in beside.lanes.values())


def test_one_look_serves_all_lanes():
    """A quiet iteration of three lanes looks at the transport once."""
    beside = Beside()
    beside.settle(50)
    assert all(carrier.looks <= 51 for carrier in beside.carriers.values())


def test_a_busy_lane_neither_mutes_nor_starves_another():
    """One lane's frames are always under way; the other lanes' heartbeats still leave, and nobody is called silent."""
    config = AgreementConfig(heartbeat_s=0.2, silence_s=1.0, startup_s=1.0, credits=4000)
    beside = Beside((UP, DOWN), config=config, window=1, carrier=2)
    verdicts = []
    for number in range(1, 160):
        for rank in UP.ranks:
            agreement = beside.agreements[rank, UP.domain_id]
            agreement.vote_terminal(agreement.admit(number, number, ready=False), Outcome.COMPLETED)
        for events in beside.settle(1).values():
            verdicts += [e for e in events if isinstance(e, SilenceVerdict)]
    assert verdicts == []


def test_each_lane_has_a_window_of_its_own():
    """A lane whose peer takes nothing stops at its own window; the next lane's slots are untouched."""
    beside = Beside((UP, DOWN), window=2, carrier=4)
    up, down = (beside.lanes[4].transport(domain) for domain in (UP, DOWN))
    for _ in range(2):
        up.send(3, b"x" * 44)  # to rank 7
    assert (up.can_send(3), up.outstanding(3)) == (False, 2)
    with pytest.raises(WouldBlock, match="2 frames of this lane"):
        up.send(3, b"x" * 44)
    assert down.can_send(0) and down.outstanding(0) == 0


def test_a_lane_that_is_not_polled_bounds_the_others():
    """Its inbox fills, then nothing is received for anybody; nothing is lost, and polling it lets all go on."""
    beside = Beside(
        (UP, DOWN), inbox_frames_max=2, config=AgreementConfig(heartbeat_s=0.01, silence_s=60, startup_s=60)
    )
    idle = (7, DOWN.domain_id)  # coordinates UP and schedules DOWN
    beside.settle(60, without={idle})
    assert max(len(inbox) for inbox in beside.lanes[7].transport(DOWN)._inboxes.values()) <= 2 + 8
    for rank in UP.ranks:
        agreement = beside.agreements[rank, UP.domain_id]
        agreement.vote_terminal(agreement.admit(1, 1, ready=False), Outcome.COMPLETED)
    stuck = beside.settle(20, without={idle})
    assert not any(isinstance(e, Committed) for e in stuck[7, UP.domain_id])
    freed = beside.settle(30)
    assert any(isinstance(e, Committed) for e in freed[7, UP.domain_id])
    assert all(agreement.stopped is None for agreement in beside.agreements.values())


def test_a_ring_is_empty_only_when_nothing_waits_here():
    """What one look brought and this lane did not take yet is no silence, and a look of another lane is as good as its own."""
    beside = Beside((UP, DOWN))
    coordinator, other = (beside.lanes[7].transport(domain) for domain in (UP, DOWN))
    sender = beside.lanes[0].transport(UP)
    for number in (1, 2):
        sender.send(3, Codec(UP, 0, 4096).encode(3, Frame(number, 0, ())))
    assert other.receive(8) == Sweep(
        [], 0b1000
    )  # looks for both: rank 0, the fourth of that lane, has said nothing in it
    first, second, quiet = (coordinator.receive(1) for _ in range(3))
    assert [peer for peer, _data in first.frames + second.frames] == [0, 0] and not quiet.frames
    assert not first.empty & 1 and quiet.empty == 0b0111


def test_the_carrier_stays_until_its_last_lane_is_closed():
    beside = Beside((UP, DOWN))
    beside.lanes[7].transport(UP).close(True)
    assert beside.carriers[7].closed is None
    beside.lanes[7].transport(DOWN).close(False)
    assert beside.carriers[7].closed is False  # cleanly only when every lane was
    beside.lanes[7].transport(DOWN).close(True)
    assert beside.carriers[7].closed is False


def test_what_comes_before_a_lane_is_opened_waits():
    """One rank opens its second lane late; the frames that came meanwhile are its first."""
    now_s = 0.0
    network = InProcessNetwork(WORLD, 8, clock=lambda: now_s)
    agreements = {}
    for rank in UP.ranks:
        lanes = Lanes(network.transport(rank), WORLD, rank, (UP, DOWN))
        for domain in (UP, DOWN):
            agreements[rank, domain.domain_id] = Agreement(domain, rank, lanes.transport(domain), clock=lambda: now_s)
    late = agreements[0, DOWN.domain_id]
    for agreement in agreements.values():
        if agreement is not late:
            agreement.open()
            agreement.vote_terminal(agreement.admit(1, 1, ready=False), Outcome.COMPLETED)
    for _ in range(5):
        for agreement in agreements.values():
            if agreement is not late:
                agreement.poll()
    late.open()
    late.vote_terminal(late.admit(1, 1, ready=False), Outcome.COMPLETED)
    committed = []
    for _ in range(5):
        for agreement in agreements.values():
            committed += [e for e in agreement.poll() if isinstance(e, Committed)]
    assert late.stopped is None and len([e for e in committed if isinstance(e, Committed)]) >= 4


@pytest.mark.parametrize("data", [b"", b"short", b"PPAG\x02" + bytes(60)], ids=["empty", "short", "of no lane"])
def test_a_frame_of_no_lane_stops_every_lane_with_its_sender(data):
    beside = Beside()
    beside.network.inject(0, 7, data)
    beside.settle(1)
    codes = {place: a.stopped.code for place, a in beside.agreements.items() if a.stopped and place[0] == 7}
    assert codes == dict.fromkeys([(7, 1), (7, 2)], FaultCode.BAD_FRAME)
    assert beside.agreements[7, 3].stopped is None  # rank 0 is not in that one


def test_evidence_of_a_death_reaches_every_lane_with_that_rank():
    beside = Beside()
    beside.network.kill(4)
    found = beside.settle(3)
    for (rank, identity), events in found.items():
        named = [e.suspect_rank for e in events if isinstance(e, DeathVerdict)]
        assert rank == 4 or named == ([4] if identity != SOME.domain_id else []), (rank, identity, events)


def test_a_broken_carrier_breaks_every_lane():
    beside = Beside((UP, DOWN))

    raised = []

    def broken(_frames_max):
        if not raised:
            raised.append(True)
            raise TransportError("gone", rank=2)
        return Sweep([], 0)

    beside.carriers[7].receive = broken
    beside.settle(2)
    stopped = {place for place, a in beside.agreements.items() if a.stopped and a.stopped.code is FaultCode.TRANSPORT}
    assert {(7, 1), (7, 2)} <= stopped


def test_a_look_that_is_broken_off_stops_every_lane_and_blames_nobody():
    """Frames of all lanes were in hand: a lane that went on would find a gap, and stop for a fault of the sender."""
    beside = Beside((UP, DOWN))
    for place, agreement in beside.agreements.items():
        agreement.vote_terminal(agreement.admit(1, 1, ready=False), Outcome.COMPLETED)
        if place[0] != 7:
            agreement.poll()
    carrier = beside.carriers[7]
    honest = carrier.receive

    def broken(frames_max):
        carrier.receive = honest
        honest(frames_max)
        raise KeyboardInterrupt

    carrier.receive = broken
    with pytest.raises(KeyboardInterrupt):
        beside.agreements[7, 1].poll()
    beside.settle(3)
    told = {identity: beside.agreements[7, identity].stopped for identity in (1, 2)}
    assert told[1].code is FaultCode.INTERNAL and told[2].code is FaultCode.TRANSPORT
    assert told[1].suspect_rank is told[2].suspect_rank is None


def test_a_carrier_whose_links_are_not_those_of_the_lanes_is_refused(tmp_path):
    """ZMQ links one coordinator with the others; a lane with another coordinator has no link."""
    addresses = {rank: f"ipc://{tmp_path}/{rank}.sock" for rank in WORLD.ranks}
    lanes = Lanes(ZmqTransport(WORLD, 4, addresses), WORLD, 4, (DOWN,))
    with pytest.raises(ConfigurationError, match="has links with rank 2 only"):
        Agreement(DOWN, 4, lanes.transport(DOWN)).open()


def test_what_has_no_room_is_refused_by_name():
    carrier = InProcessNetwork(WORLD).transport(4)
    for field, arguments, options in (
        ("domains", ((UP, UP),), {}),
        ("domains", ((Domain(5, (4, 5)),),), {}),
        ("rank", ((Domain(5, (0, 7)),),), {}),
        ("window", ((UP,),), {"window": 0}),
        ("frame_bytes_max", ((UP,),), {"frame_bytes_max": 1}),
        ("inbox_frames_max", ((UP,),), {"inbox_frames_max": 0}),
    ):
        with pytest.raises(ConfigurationError) as refused:
            Lanes(carrier, WORLD, 4, *arguments, **options)
        assert refused.value.field == field
    lanes = Lanes(carrier, WORLD, 4, (UP,), frame_bytes_max=4096)
    for foreign in (DOWN, Domain(1, (4, 0)), Domain(1, UP.ranks, epoch=1), Domain(1, UP.ranks, coordinator_rank=0)):
        with pytest.raises(ConfigurationError, match="is not a lane of this rank"):
            lanes.transport(foreign)
    with pytest.raises(ConfigurationError, match="8192 of a domain exceeds 4096"):
        lanes.transport(UP).open((3,), 8192)
    with pytest.raises(ConfigurationError, match="are more than"):
        lanes.transport(UP).open((0, 1), 4096)


@pytest.mark.parametrize("carrier", ["in-process", "zmq"])
def test_a_lane_conforms(carrier, tmp_path):
    """A lane keeps every promise of a transport, while another lane of the same carrier exists."""
    hub = 5 if carrier == "zmq" else None  # over ZMQ all lanes share the one coordinator whose links there are
    world, other = Domain(9, (5, 3, 9), coordinator_rank=hub), Domain(2, (9, 5, 3), coordinator_rank=hub)
    lane_of = Domain(1, (3, 9, 5), coordinator_rank=5)
    if carrier == "zmq":
        addresses = {rank: f"ipc://{tmp_path}/{rank}.sock" for rank in world.ranks}
        make, bound = (lambda rank: ZmqTransport(world, rank, addresses, window=8)), 4000
    else:
        network = InProcessNetwork(world, 8)
        make, bound = network.transport, 4
    barrier = threading.Barrier(3, timeout=60)
    failures = []

    def member(rank):
        try:
            lanes = Lanes(make(rank), world, rank, (lane_of, other), window=4)
            check_transport(
                lanes.transport(lane_of), lane_of, rank, sync=barrier.wait, frames_outstanding_max=bound, count=60
            )
            lanes.close(True)
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=member, args=(rank,)) for rank in world.ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    broken = [f for f in failures if not isinstance(f, threading.BrokenBarrierError)]
    assert not failures, broken
