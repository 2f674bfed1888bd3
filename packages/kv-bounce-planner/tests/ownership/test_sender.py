"""The sender's scenarios over fakes: seal, snapshot, source ownership, slots, replays, generations."""

from __future__ import annotations

import pytest

from kv_bounce_planner._errors import LocalProtocolError
from kv_bounce_planner.planning import HostCopier, TransportError
from kv_bounce_planner.sessions import (
    BounceArena,
    CapacityExceeded,
    PeerEvidence,
    RequestKey,
    SessionConfig,
    TransferIdentity,
    TransfersOutstanding,
    free,
)
from kv_bounce_planner.sessions.messages import (
    BounceGrant,
    BounceWanted,
    Cancel,
    Doubt,
    Drained,
    ReceiveRequest,
    Sealed,
    WriterResult,
    decode_message,
    encode_message,
)
from kv_bounce_planner.sessions.proof import WriteExecutor

KEY = RequestKey(1, 0)
#: A send arena for one slot of 512 bytes, wherever the memory happens to begin.
ONE_SLOT = 512 + 64


def answers(lab, kind=Sealed | Drained | Doubt):
    return [m for _, to, frame in lab.network.log if to == lab.peer and isinstance(m := decode_message(frame), kind)]


def last_snapshot(lab, rank=0, key=KEY):
    return lab.senders[rank].snapshot(key)


# --- snapshots and sealing ------------------------------------------------------------------------------------------


def test_a_snapshot_comes_only_sealed_and_quiescent_and_never_changes(make_lab):
    """Asking early freezes nothing; afterwards it is one immutable object, whatever still arrives."""
    lab = make_lab(1)
    lab.open()
    lab.run(2)
    assert last_snapshot(lab) is None
    lab.ready()
    lab.run()
    assert last_snapshot(lab) is None, "unsealed"
    assert lab.sent_names() == ["ReceiveRequested", "OperationDone", "RequestServed"]
    lab.senders[0].seal(KEY)
    first = last_snapshot(lab)
    assert (first.outcome, first.quarantined, [d for _, d in first.operations]) == ("COMPLETED", False, ["done"])
    lab.senders[0].fail(KEY, "too late to matter")
    assert last_snapshot(lab) is first


def test_a_source_is_released_only_when_sealed_and_every_write_is_proven(make_lab):
    """A later receive request could still need it: done is not enough, sealing is needed too, and it goes once."""
    lab = make_lab(1)
    lab.open()
    lab.ready()
    lab.run()
    assert "SourceReleased" not in lab.sent_names()
    for _ in range(3):
        lab.senders[0].seal(KEY)
        lab.run(2)
    assert lab.sent_names().count("SourceReleased") == 1
    released = next(event for event in lab.sent[0] if type(event).__name__ == "SourceReleased")
    assert free(released.proven) == "source of 1"


def test_a_source_in_progress_is_not_released_by_seal_fail_or_cancel(make_lab):
    """The write still reads it. Sealed, failed and cancelled, it stays owned until the completion."""
    lab = make_lab(1, parts_max=64, landing=lambda job, part: "hold")
    lab.open()
    lab.ready()
    lab.run(5)
    lab.senders[0].seal(KEY)
    lab.senders[0].fail(KEY, "aborted")
    lab.receiver.cancel(lab.identity())
    lab.run(20)
    assert "SourceReleased" not in lab.sent_names()
    assert last_snapshot(lab) is None
    assert lab.senders[0].drain().open == (KEY,)
    lab.world.landing = lambda job, part: "land"
    lab.run(5)
    assert lab.sent_names()[-1] == "SourceReleased"
    assert last_snapshot(lab).outcome == "FAILED"


def test_sealing_answers_everything_that_was_not_posted(make_lab):
    """Held, and waiting for a region: sealed, never posted; both receivers' memory is proven."""
    lab = make_lab(1, arena=0)
    lab.open(1)
    lab.run(3)
    lab.senders[0].seal(KEY)
    assert lab.run(4) == ["TransferFailed", "MemoryReleased"]
    assert [type(m).__name__ for m in answers(lab)] == ["Sealed"]
    assert last_snapshot(lab).outcome == "FAILED"
    assert "SourceReleased" not in lab.sent_names(), "no claim was ever given"


def test_a_request_that_arrives_after_the_seal_is_answered_sealed(make_lab):
    """fail() before the receive request: remembered, so the receiver learns it at once."""
    lab = make_lab(1)
    lab.senders[0].fail(KEY, "rejected")
    assert last_snapshot(lab).outcome == "FAILED"
    lab.open()
    assert lab.run(4) == ["TransferFailed", "MemoryReleased"]
    assert lab.events[0].reason == "rejected"


def test_a_forgotten_request_is_over_for_good(make_lab):
    """After the commit: records go, late requests and cancels are still answered truly."""
    lab = make_lab(1)
    lab.open()
    lab.ready()
    lab.run()
    with pytest.raises(LocalProtocolError, match="still owns"):
        lab.senders[0].forget(KEY)
    lab.senders[0].seal(KEY)
    lab.run(2)
    lab.senders[0].forget(KEY)
    lab.senders[0].forget(KEY)
    with pytest.raises(LocalProtocolError, match="not known"):
        lab.senders[0].snapshot(KEY)
    with pytest.raises(LocalProtocolError, match="is over"):
        lab.senders[0].ready(KEY, lambda request: None)
    lab.receiver.open(TransferIdentity(1, 0, "g1", 0, 7), [_expected(lab)], claim="second slice")
    lab.run(4)
    assert lab.names()[-2:] == ["TransferFailed", "MemoryReleased"]
    assert "over" in lab.events[-2].reason


def _expected(lab, rank=0):
    from kv_bounce_planner.sessions import ExpectedOperation

    plan = lab.plan(rank).writer
    return ExpectedOperation(lab.senders[rank].self_id, plan.total_bytes, b"", plan)


def test_outcomes_of_the_snapshot(make_lab):
    """COMPLETED only if every expected operation was delivered; cancelled and failed are told apart."""
    lab = make_lab(1)
    lab.senders[0].expect(KEY, 2)
    lab.open()
    lab.senders[0].ready(KEY, lambda request: lab.plan(0), claim="s")
    lab.run()
    lab.senders[0].seal(KEY)
    assert last_snapshot(lab).outcome == "FAILED", "one of two expected operations"
    lab = make_lab(1)
    lab.open()
    lab.run(3)
    lab.receiver.cancel(lab.identity())
    lab.run(3)
    lab.senders[0].seal(KEY)
    assert last_snapshot(lab).outcome == "CANCELLED"
    lab = make_lab(1)
    lab.senders[0].seal(KEY)
    assert last_snapshot(lab).outcome == "CANCELLED", "nobody ever asked"


def test_snapshots_of_equal_facts_have_equal_digests(make_lab):
    """The digest is over request, outcome and dispositions; another disposition is another digest."""
    digests = []
    for fails in (False, False, True):
        lab = make_lab(1, introduced=False)
        lab.receiver.session = b"the same session"
        lab.introduce()
        lab.open()
        lab.ready()
        lab.run(2 if fails else 20)
        if fails:
            lab.receiver.cancel(lab.identity())
            lab.run(5)
        lab.senders[0].seal(KEY)
        lab.run(2)
        digests.append(last_snapshot(lab).digest)
    assert digests[0] == digests[1] != digests[2]


# --- cancels, replays, generations ----------------------------------------------------------------------------------


def test_a_cancel_that_came_first_leaves_a_tombstone(make_lab):
    """A request that is older than its cancel is never served, the cancel was answered with a proof, and the host was told."""
    lab = make_lab(1)
    (operation,) = lab.open()
    lab.network.hold(lab.peer, lab.senders[0].self_id)
    lab.run(2)
    queue = lab.network._queues[(lab.peer, lab.senders[0].self_id)]
    request = queue.popleft()
    assert isinstance(decode_message(request), ReceiveRequest)
    lab.network.let(lab.peer, lab.senders[0].self_id)
    lab.inject(lab.peer, lab.senders[0].self_id, Cancel(operation, "early"))
    lab.network.inject(lab.peer, lab.senders[0].self_id, request)
    lab.ready()
    lab.run()
    assert lab.world.landed == [], "served after its cancel"
    assert lab.names() == ["TransferFailed", "MemoryReleased"]
    assert lab.senders[0].statistics()["replayed"] == 1
    assert lab.sent_names() == ["CancelReceived"]


def test_a_replayed_request_is_not_served_twice(make_lab):
    """The same frame again, before and after the end: counted, never a second write."""
    lab = make_lab(1)
    lab.open()
    lab.run(3)
    frames = [
        f
        for s, t, f in lab.network.log
        if t == lab.senders[0].self_id and isinstance(decode_message(f), ReceiveRequest)
    ]
    for frame in frames:
        lab.network.inject(lab.peer, lab.senders[0].self_id, frame)
    lab.ready()
    lab.run()
    landed = len(lab.world.landed)
    lab.target[:] = 5
    for frame in frames:
        lab.network.inject(lab.peer, lab.senders[0].self_id, frame)
    lab.run()
    assert len(lab.world.landed) == landed
    assert (lab.target == 5).all()
    assert lab.senders[0].statistics()["repeated"] == 2


def test_a_repeated_cancel_is_answered_alike_before_and_after_forgetting(make_lab):
    """The answer states a fact, so it is the same each time."""
    lab = make_lab(1)
    (operation,) = lab.open()
    lab.run(3)
    lab.receiver.cancel(lab.identity())
    lab.run(3)
    lab.senders[0].seal(KEY)
    lab.run(2)
    for _ in range(2):
        lab.inject(lab.peer, lab.senders[0].self_id, Cancel(operation, "again"))
        lab.run(2)
        lab.senders[0].forget(KEY)
    assert len({encode_message(m) for m in answers(lab)}) == 1
    assert len(answers(lab)) == 3


def test_stale_generations_and_incarnations_are_refused_before_anything_changes(make_lab):
    """A request for this sender's earlier life, or of an earlier incarnation than known: sealed; the newer one is untouched."""
    lab = make_lab(1)
    lab.open(1, incarnation=2)
    lab.run(3)
    (held,) = lab.senders[0].pending()
    import msgspec

    lab.network.hold(lab.senders[0].self_id, lab.peer)
    for change in (
        {"operation": msgspec.structs.replace(held.operation, operation=50, transfer=TransferIdentity(1, 1, "g1", 0))},
        {"operation": msgspec.structs.replace(held.operation, operation=51), "sender_generation": "c0"},
        {"operation": msgspec.structs.replace(held.operation, operation=52, writer_rank=9)},
    ):
        lab.inject(lab.peer, lab.senders[0].self_id, msgspec.structs.replace(held, **change))
    foreign = msgspec.structs.replace(held.operation, operation=53, transfer=TransferIdentity(1, 2, "g9", 0))
    lab.inject(lab.peer, lab.senders[0].self_id, msgspec.structs.replace(held, operation=foreign))
    lab.run(3)
    sealed = {m.operation.operation: m.reason for m in answers(lab, Sealed)}
    assert "newer incarnation" in sealed[50] and "another generation" in sealed[51] and "writer 9" in sealed[52]
    assert 53 not in sealed
    assert lab.senders[0].statistics()["foreign"] == 1
    assert lab.senders[0].pending() == (held,)
    lab.network.let(lab.senders[0].self_id, lab.peer)
    lab.ready(1, incarnation=2)
    lab.run()
    assert lab.names() == ["TransferSucceeded", "MemoryReleased"]


def test_bounds_on_requests_are_answers_not_queues(make_lab):
    """Beyond transfers_max a request is sealed at once."""
    lab = make_lab(1, config=SessionConfig(transfers_max=2))
    lab.senders[0].config = SessionConfig(transfers_max=1)
    lab.open(1)
    lab.run(2)
    lab.open(2)
    assert lab.run(4) == ["TransferFailed", "MemoryReleased"]
    assert lab.events[0].reason == "capacity: open requests"
    with pytest.raises(CapacityExceeded):
        lab.senders[0].ready(RequestKey(9), lambda request: None)


# --- planning failures ----------------------------------------------------------------------------------------------


def test_a_resolver_that_raises_ends_its_operation_unposted(make_lab):
    """The receiver's memory is proven by the seal; the reason travels."""
    lab = make_lab(1)
    lab.open()

    def resolve(request):
        raise KeyError("layer 7")

    lab.senders[0].ready(KEY, resolve, claim="s")
    assert lab.run() == ["TransferFailed", "MemoryReleased"]
    assert "layer 7" in lab.events[0].reason
    assert lab.world.landed == []
    with pytest.raises(LocalProtocolError, match="before"):
        lab.senders[0].ready(KEY, resolve)


def test_a_transport_that_refuses_the_job_is_the_same_as_never_posted(make_lab, monkeypatch):
    """Nothing was handed over: sealed, source releasable."""
    lab = make_lab(1)
    lab.open()

    def refuses(job):
        raise TransportError("not connected")

    monkeypatch.setattr(lab.senders[0]._transport, "start", refuses)
    lab.ready()
    assert lab.run() == ["TransferFailed", "MemoryReleased"]
    lab.senders[0].seal(KEY)
    lab.run(2)
    assert lab.sent_names()[-1] == "SourceReleased"


# --- bounce slots ---------------------------------------------------------------------------------------------------


def asking(lab):
    """A transfer whose region is asked for and not granted: the answer is held back."""
    lab.network.hold(lab.peer, lab.senders[0].self_id)
    (operation,) = lab.open(tier="bounce")
    lab.receiver.poll()
    lab.network.let(lab.peer, lab.senders[0].self_id)
    lab.ready()
    lab.run(1, receiver=False)
    lab.network.hold(lab.peer, lab.senders[0].self_id)
    assert [type(m).__name__ for m in answers(lab, BounceWanted)] == ["BounceWanted"]
    return operation


def test_without_gathering_ahead_a_slot_is_taken_only_after_the_grant(make_lab):
    """Waiting for a region holds no slot."""
    lab = make_lab(1, config=SessionConfig(gathers_ahead_max=0))
    operation = asking(lab)
    lab.run(2)
    assert lab.senders[0].state_of(operation) == "WANTED"
    assert lab.senders[0]._arena.statistics().held_bytes == 0
    lab.network.let(lab.peer, lab.senders[0].self_id)
    assert lab.run() == ["TransferSucceeded", "MemoryReleased"]
    assert lab.senders[0]._arena.statistics().held_bytes == 0


def test_a_grant_that_comes_while_the_gather_runs_is_used_in_the_same_poll(make_lab):
    """The write does not wait for a turn of the host's loop."""
    lab = make_lab(1)
    sender = lab.senders[0]

    class Meanwhile(HostCopier):
        def submit(self, prepared):
            lab.run(1, senders=[])
            return super().submit(prepared)

    sender._copier = Meanwhile()
    (operation,) = lab.open(tier="bounce")
    lab.run(3)
    lab.ready()
    sender.poll()
    assert sender.state_of(operation) in ("POSTING", "IN_FLIGHT") and len(answers(lab, WriterResult)) == 1
    assert lab.run() == ["TransferSucceeded", "MemoryReleased"] and lab.in_place()


def test_a_free_slot_is_gathered_into_while_the_region_is_asked_for(make_lab):
    """The copy runs during the round trip; nothing is written before the grant, and then at once."""
    lab = make_lab(1)
    sender, operation = lab.senders[0], asking(lab)
    lab.run(2)
    assert sender.state_of(operation) == "STAGED"
    assert sender.statistics()["gathers"] == sender.statistics()["gathers_ahead"] == 1
    assert sender._arena.statistics().held_bytes == 512
    assert lab.world.writes == [] and answers(lab, WriterResult) == []
    lab.network.let(lab.peer, sender.self_id)
    sender.poll()
    assert sender.state_of(operation) in ("POSTING", "IN_FLIGHT")
    assert lab.run() == ["TransferSucceeded", "MemoryReleased"]
    assert lab.in_place()
    assert sender.statistics()["gathers"] == 1
    assert sender._arena.statistics().held_bytes == 0


def test_a_refused_region_gives_the_slot_back_and_the_write_goes_in_place(make_lab):
    """Whether the gather had ended or not: it ends first, then the slot is free and the write is direct."""
    for running in (False, True):
        lab = make_lab(1, arena=1 << 15)
        sender, copies = lab.senders[0], Copies()
        if running:
            sender._copier = copies
        held = lab.arena.reserve("somebody", {0: lab.arena.largest_region_bytes()})
        operation = asking(lab)
        lab.run(2)
        assert sender.state_of(operation) == ("AHEAD" if running else "STAGED")
        lab.clock.advance(1)  # the receiver has no space: it refuses
        lab.network.let(lab.peer, sender.self_id)
        lab.run(4)
        if running:
            assert sender.state_of(operation) == "AHEAD"
            assert sender._arena.statistics().held_bytes == 512
            assert lab.world.landed == []
            copies.done_now = True
        lab.run()
        assert lab.names() == ["TransferSucceeded", "MemoryReleased"]
        assert lab.in_place()
        assert sender._arena.statistics().held_bytes == 0
        assert [type(e).__name__ for e in lab.sent[0] if type(e).__name__ == "OperationDone"] == ["OperationDone"]
        assert sender.statistics()["operations_direct"] == 1
        held.abandon()


def test_a_slot_that_was_used_ahead_goes_to_who_was_granted(make_lab):
    """One slot: the first gathers ahead and waits for its region; the second is granted, takes the slot, and both end."""
    lab = make_lab(1, send_arena=ONE_SLOT)
    sender = lab.senders[0]
    first = asking(lab)
    lab.run(2)
    assert sender.state_of(first) == "STAGED"
    queue = lab.network._queues[(lab.peer, sender.self_id)]
    kept = [queue.popleft() for _ in range(len(queue))]  # the first's grant, late
    lab.network.let(lab.peer, sender.self_id)
    lab.open(2, tier="bounce")
    lab.ready(2)
    assert lab.run() == ["TransferSucceeded", "MemoryReleased"]
    assert sender.state_of(first) == "WANTED"
    for frame in kept:
        lab.network.inject(lab.peer, sender.self_id, frame)
    assert lab.run() == ["TransferSucceeded", "MemoryReleased"]
    assert lab.in_place()
    assert sender._arena.statistics().held_bytes == 0


@pytest.mark.parametrize("how", ["seal", "fail", "cancel", "lost"])
@pytest.mark.parametrize("running", [True, False])
def test_an_end_while_gathering_ahead_waits_for_the_gather(make_lab, running, how):
    """The gather reads the source and writes the slot: sealed, never posted, and only then are both free."""
    lab = make_lab(1)
    sender, copies = lab.senders[0], Copies()
    sender._copier, copies.done_now = copies, not running
    held = lab.arena.reserve("somebody", {0: lab.arena.largest_region_bytes()})  # so nothing is granted
    operation = asking(lab)
    lab.run(2)
    assert sender.state_of(operation) == ("AHEAD" if running else "STAGED")
    if how == "seal":
        sender.seal(KEY)
    elif how == "fail":
        sender.fail(KEY, "aborted")
    elif how == "lost":
        sender.peer_died(lab.peer, PeerEvidence.CONNECTION_LOST)
        sender.seal(KEY)
    else:
        lab.receiver.cancel(lab.identity())
        lab.network.let(lab.peer, sender.self_id)
        lab.run(2)
        sender.seal(KEY)
    lab.run(2)
    if running:
        assert sender.state_of(operation) == "SEALING"
        assert "SourceReleased" not in lab.sent_names()
        assert sender._arena.statistics().held_bytes == 512
        copies.done_now = True
        lab.run(2)
    assert sender.state_of(operation) == "SEALED"
    assert lab.sent_names()[-1] == "SourceReleased"
    assert sender._arena.statistics().held_bytes == 0
    assert lab.world.landed == []
    assert sender.snapshot(KEY).operations == ((operation, "sealed"),)
    held.abandon()


def test_a_gather_ahead_that_fails_is_tried_again_after_the_grant(make_lab):
    """Before the grant nothing is lost by a copier's error that proves idle; one that proves nothing keeps everything."""
    lab = make_lab(1)
    sender, copies = lab.senders[0], Copies()
    original, sender._copier, sender._errors_prove_idle = sender._copier, copies, True
    copies.error = "busy"
    operation = asking(lab)
    lab.run(2)
    assert sender.state_of(operation) == "WANTED"
    assert sender._arena.statistics().held_bytes == 0
    sender._copier = original
    lab.network.let(lab.peer, sender.self_id)
    assert lab.run() == ["TransferSucceeded", "MemoryReleased"]
    assert lab.in_place()

    lab = make_lab(1)
    sender, copies = lab.senders[0], Copies()
    sender._copier, sender._errors_prove_idle, copies.error = copies, False, "device lost"
    operation = asking(lab)
    lab.run(2)
    sender.seal(KEY)
    assert sender.state_of(operation) == "SOURCE_IN_DOUBT"
    lab.clock.advance(11)
    lab.run(2)
    assert "SourceQuarantined" in lab.sent_names()
    assert sender._arena.statistics().quarantined_bytes == 512


def test_senders_with_one_slot_each_and_a_small_region_never_deadlock(make_lab):
    """Many transfers, both arenas for one at a time, two writers: all end, all bounced or told why not."""
    lab = make_lab(
        2, arena=512 + ONE_SLOT, send_arena=ONE_SLOT, config=SessionConfig(bounce_wait_s=1e9, drain_deadline_s=1e9)
    )
    for request in range(1, 21):
        lab.open(request, tier="bounce")
    for request in range(20, 0, -1):
        lab.ready(request, ranks=[0])
    for request in range(1, 21):
        lab.ready(request, ranks=[1])
    lab.run(400)
    assert lab.names().count("TransferSucceeded") == 20
    assert lab.arena.statistics().held_bytes == 0
    assert [sender.statistics()["operations_bounced"] for sender in lab.senders] == [20, 20]
    assert any(sender.statistics()["gathers_ahead"] for sender in lab.senders)


class Copies:
    def __init__(self):
        self.done_now, self.error, self.submitted = False, "", 0

    def prepare(self, source, target, sizes):
        return None

    def submit(self, prepared):
        self.submitted += 1
        return self

    def done(self):
        if self.error:
            raise TransportError(self.error)
        return self.done_now

    def wait(self):
        raise AssertionError("a session never blocks")


@pytest.mark.parametrize("end", ["finishes", "fails idle", "fails in doubt"])
def test_a_cancel_during_the_gather_waits_for_the_gather(make_lab, end):
    """The gather reads the source and writes the slot: neither goes before it ended; nothing is posted afterwards."""
    lab = make_lab(1)
    sender, copies = lab.senders[0], Copies()
    sender._copier, sender._errors_prove_idle = copies, end == "fails idle"
    lab.open(tier="bounce")
    lab.ready()
    lab.run(8)
    assert copies.submitted == 1
    lab.receiver.cancel(lab.identity())
    sender.seal(KEY)
    lab.run(5)
    assert answers(lab) == []
    assert sender._arena.statistics().held_bytes == 512
    if end == "finishes":
        copies.done_now = True
    else:
        copies.error = "device lost"
    lab.run(5)
    assert lab.names() == ["TransferCancelled", "MemoryReleased"]
    assert [type(m).__name__ for m in answers(lab)] == ["Sealed"]
    assert lab.world.landed == []
    if end == "fails in doubt":
        assert "SourceReleased" not in lab.sent_names()
        lab.clock.advance(11)
        lab.run(2)
        assert "SourceQuarantined" in lab.sent_names()
        assert sender._arena.statistics().quarantined_bytes == 512
        snapshot = sender.snapshot(KEY)
        assert (snapshot.outcome, snapshot.quarantined) == ("FAILED", True)
    else:
        assert lab.sent_names()[-1] == "SourceReleased"
        assert sender._arena.statistics().held_bytes == 0


def test_a_gather_that_fails_frees_the_slot_and_the_region(make_lab):
    """c20: failure after the grant is no fallback: failed, sealed, slot and region free, the next transfer unharmed."""
    lab = make_lab(1)
    sender, copies = lab.senders[0], Copies()
    original, sender._copier, sender._errors_prove_idle = sender._copier, copies, True
    copies.error = "bad"
    lab.open(1, tier="bounce")
    lab.ready(1)
    assert lab.run() == ["TransferFailed", "MemoryReleased"]
    assert sender._arena.statistics().held_bytes == lab.arena.statistics().held_bytes == 0
    sender._copier = original
    lab.open(2, tier="bounce")
    lab.ready(2)
    assert lab.run() == ["TransferSucceeded", "MemoryReleased"]
    assert lab.in_place()


def test_a_grant_that_is_too_small_is_not_written_to(make_lab):
    """The region must hold what was asked for, or nothing is posted."""
    lab = make_lab(1)
    (operation,) = lab.open(tier="bounce")
    lab.ready()
    lab.network.hold(lab.peer, lab.senders[0].self_id)
    lab.receiver.poll()
    lab.network.let(lab.peer, lab.senders[0].self_id)
    lab.run(1, receiver=False)
    assert [type(m).__name__ for m in answers(lab, BounceWanted)] == ["BounceWanted"]
    lab.inject(lab.peer, lab.senders[0].self_id, BounceGrant(operation, lab.bounce_at, 100, "DRAM", 0))
    lab.run(5)
    assert lab.world.landed == []
    assert lab.names() == ["TransferFailed", "MemoryReleased"]


def test_the_report_is_queued_when_the_write_is_and_describes_it(make_lab):
    """No turn is lost between write and report."""
    lab = make_lab(1)
    lab.open(tier="bounce")
    lab.ready()
    lab.run()
    (result,) = answers(lab, WriterResult)
    assert result.base_address == lab.bounce_at + (-lab.bounce_at % 64)


# --- death ----------------------------------------------------------------------------------------------------------


def test_an_error_with_a_dead_receiver_proves_the_source(make_lab):
    """Error seen, receiver reaped, memory still registered. Either alone is not enough."""
    lab = make_lab(1, parts_max=64, landing=lambda job, part: "hold")
    (operation,) = lab.open()
    lab.ready()
    lab.run(5)
    sender = lab.senders[0]
    sender.seal(KEY)
    sender.peer_died(lab.peer, PeerEvidence.PROCESS_REAPED)
    lab.run(3, receiver=False)
    assert "SourceReleased" not in lab.sent_names(), "released without the error"
    assert sender.state_of(operation) == "IN_FLIGHT"
    lab.world.writes[0].error = "connection reset"
    lab.run(3, receiver=False)
    assert lab.sent_names()[-1] == "SourceReleased"
    assert sender.snapshot(KEY).operations[0][1] == "resolved"


def test_an_error_with_a_live_receiver_proves_nothing_about_the_source(make_lab):
    """The write may still read it: owned until the agent is destroyed."""
    lab = make_lab(1, parts_max=64, landing=lambda job, part: "hold")
    (operation,) = lab.open()
    lab.ready()
    lab.run(5)
    sender = lab.senders[0]
    sender.seal(KEY)
    lab.world.writes[0].error = "timeout"
    lab.run(5)
    assert sender.state_of(operation) == "IN_DOUBT"
    assert {type(m).__name__ for m in answers(lab)} == {"Doubt"}
    assert lab.names() == ["TransferFailed"]
    assert "SourceReleased" not in lab.sent_names()
    sender.retire_peer("gen", "g1")
    lab.run(1, receiver=False)
    assert lab.sent_names()[-1] == "SourceReleased"


def test_one_failed_part_does_not_free_what_its_siblings_still_read(make_lab):
    """A first error with other parts of the same operation in flight: everything stays owned."""
    lab = make_lab(1, parts_max=2, executor=WriteExecutor.SENDER)
    lab.world.landing = lambda job, part: "error" if part == 1 else "hold"
    lab.open()
    lab.ready()
    lab.run(8)
    lab.senders[0].seal(KEY)
    lab.run(5)
    assert "SourceReleased" not in lab.sent_names()
    assert lab.names() == ["TransferFailed"]
    assert lab.world.land_everything() > 0


def test_a_sender_learns_that_its_receiver_died_before_anything_was_posted(make_lab):
    """Held operations of a dead receiver end at once; the request goes on for the others."""
    lab = make_lab(1)
    lab.open()
    lab.run(3)
    lab.senders[0].peer_died(lab.peer, PeerEvidence.PROCESS_REAPED)
    lab.run(2, receiver=False)
    assert lab.sent_names()[-1] == "OperationFailed"
    with pytest.raises(ValueError, match="unknown evidence"):
        lab.senders[0].peer_died(lab.peer, "it looks dead")


def test_a_source_without_proof_is_quarantined_and_the_snapshot_says_so(make_lab):
    """R9: the vote carries QUARANTINE; COMPLETED with QUARANTINE is impossible."""
    lab = make_lab(1, parts_max=64, landing=lambda job, part: "hold")
    lab.open()
    lab.ready()
    lab.run(5)
    lab.senders[0].seal(KEY)
    lab.clock.advance(10.1)
    lab.run(2)
    assert "SourceQuarantined" in lab.sent_names()
    snapshot = last_snapshot(lab)
    assert (snapshot.outcome, snapshot.quarantined) == ("FAILED", True)
    assert {type(m).__name__ for m in answers(lab)} == {"Doubt"}
    assert lab.senders[0].statistics()["quarantined_bytes"] == 512
    lab.world.landing = lambda job, part: "land"
    lab.run(5)
    assert lab.sent_names().count("SourceReleased") == 0


def test_close_refuses_while_a_source_is_owned(make_lab):
    """And refuses new requests from the first call on."""
    lab = make_lab(1)
    lab.open()
    lab.run(3)
    with pytest.raises(TransfersOutstanding):
        lab.senders[0].close()
    lab.open(2)
    lab.run(3)
    assert "admits nothing" in lab.events[0].reason
    lab.senders[0].seal(KEY)
    lab.run(3)
    lab.senders[0].close()


def test_pending_names_the_requests_that_wait_for_their_prefill(make_lab):
    """Generation first: the metadata is here before the compute; ready removes it."""
    lab = make_lab(1)
    for request in (3, 1, 2):
        lab.open(request)
    lab.run(3)
    assert [r.operation.request.request_id for r in lab.senders[0].pending()] == [3, 1, 2]
    assert lab.sent_names() == ["ReceiveRequested"] * 3
    lab.ready(1)
    assert [r.operation.request.request_id for r in lab.senders[0].pending()] == [3, 2]


def test_expect_and_arguments_are_validated(make_lab):
    lab = make_lab(1)
    with pytest.raises(ValueError, match=">= 0"):
        lab.senders[0].expect(KEY, -1)
    with pytest.raises(LocalProtocolError):
        lab.senders[0].snapshot(RequestKey(77))
    assert BounceArena(64, 1024).largest_region_bytes() == 1024 - 448


def test_an_idle_poll_steps_no_machine_however_many_requests_wait(make_lab, monkeypatch):
    """2,000 requests before their prefill cost an idle poll nothing on either side."""
    from kv_bounce_planner.sessions.receive_core import ReceiveTransfer
    from kv_bounce_planner.sessions.send_core import SendTransfer

    lab = make_lab(1, config=SessionConfig(frames_per_poll_max=4096))
    for request in range(2000):
        lab.open(request)
    lab.run(3)
    assert len(lab.senders[0].pending()) == 2000
    steps = []
    for core in (ReceiveTransfer, SendTransfer):
        original = core.step

        def counted(self, event, now_s, original=original):
            steps.append(event)
            return original(self, event, now_s)

        monkeypatch.setattr(core, "step", counted)
    lab.run(5)
    assert steps == []
    lab.ready(77)
    lab.receiver.cancel(lab.identity(78))
    lab.run(10)
    assert 0 < len(steps) < 60
    assert sorted(lab.names()) == ["MemoryReleased", "MemoryReleased", "TransferCancelled", "TransferSucceeded"]
