"""Transfers in slices over fakes: each moves when it is computed, lands, and gives its region back; all share one end."""

from __future__ import annotations

import pytest

from kv_bounce_planner._errors import LocalProtocolError
from kv_bounce_planner.planning import HostCopier, TransportError
from kv_bounce_planner.sessions import (
    DuplicateTransfer,
    ExpectedOperation,
    PeerEvidence,
    RequestKey,
    SessionConfig,
    StaleIdentity,
    free,
)
from kv_bounce_planner.sessions.messages import AFTER_MAX, BounceGrant, Cancel, decode_message

KEY = RequestKey(1, 0)
#: Of one writer.
FRAGMENTS, SIZE = 8, 64


def named(lab, kind):
    return [event for event in lab.events if type(event).__name__ == kind]


# --- each by itself -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["direct", "bounce", "pull"])
@pytest.mark.parametrize("writers", [1, 2])
@pytest.mark.parametrize("slices", [2, 4])
def test_a_slice_lands_while_the_rest_is_computed(make_lab, tier, writers, slices):
    """Exactly its bytes are in place and said to be; success and memory come once, with the last."""
    lab = make_lab(writers)
    cut = lab.in_slices(slices, tier)
    cut.open()
    lab.run(4)
    for through in range(1, slices):
        cut.compute(through)
        assert lab.run() == ["SliceLanded"]
        assert cut.landed() == list(range(through)) and cut.in_place(*range(through))
    cut.compute(slices)
    assert lab.run() == ["SliceLanded", "TransferSucceeded", "MemoryReleased"]
    assert lab.in_place() and free(lab.events[-1].proven) == "blocks"
    (success,) = named(lab, "TransferSucceeded")
    assert success.byte_count == writers * FRAGMENTS * SIZE
    assert [each for _, each, _ in success.tiers] == [tier] * (writers * slices)
    assert lab.receiver.statistics()["slices_landed"] == slices
    assert lab.arena.statistics().held_bytes == 0 and lab.receiver.drain().quiescent
    assert [sent.count("RequestServed") for sent in map(lab.sent_names, range(writers))] == [1] * writers


def test_nothing_moves_before_it_is_computed(make_lab):
    """Neither is a region asked for, nor the planner asked."""
    lab = make_lab(1)
    cut = lab.in_slices(4, "bounce")
    cut.open()
    assert lab.run() == [] and not lab.target.any()
    cut.compute(2)
    assert lab.run() == ["SliceLanded", "SliceLanded"] and cut.in_place(0, 1)
    cut.compute(2)  # said again: nothing new
    assert lab.run() == []


def test_pending_is_what_waits_for_compute(make_lab):
    """Not what is on its way already."""
    lab = make_lab(1)
    lab.world.landing = lambda _job, _part: "hold"
    cut = lab.in_slices(4)
    operations = cut.open()
    lab.run(3)
    assert [request.operation for request in lab.senders[0].pending()] == list(operations)
    cut.compute(2)
    lab.run()
    assert [request.operation for request in lab.senders[0].pending()] == list(operations[2:])
    cut.compute(4)
    assert lab.senders[0].pending() == ()
    lab.world.landing = lambda _job, _part: "land"
    lab.run()
    assert lab.in_place()


def test_the_last_slice_waits_for_the_whole_prompt_however_far_it_is_computed(make_lab):
    """What asks for everything (recurrent state, the first token) is not computed before everything is."""
    lab = make_lab(1)
    cut = lab.in_slices()
    cut.open()
    lab.senders[0].reached(KEY, AFTER_MAX, cut.resolver(0), claim="source")
    assert lab.run() == ["SliceLanded"] and cut.in_place(0)
    cut.compute(2)
    assert lab.run()[-1] == "MemoryReleased"


def test_a_slice_lands_when_its_last_writer_has_written_it(make_lab):
    """Stages compute one after the other; nothing of a slice is scattered before all of them wrote it."""
    lab = make_lab(2)
    cut = lab.in_slices(2, "bounce")
    cut.open()
    cut.compute(1, ranks=[0])
    assert lab.run() == [] and not lab.target.any()
    cut.compute(2, ranks=[0])
    assert lab.run() == [] and not lab.target.any()
    cut.compute(1, ranks=[1])
    assert lab.run() == ["SliceLanded"] and cut.in_place(0)
    cut.compute(2, ranks=[1])
    assert lab.run() == ["SliceLanded", "TransferSucceeded", "MemoryReleased"]


def test_slices_land_in_any_order(make_lab):
    """A late part of the first does not hold the second up."""
    held = {"on": True}
    lab = make_lab(1)
    cut = lab.in_slices()
    first, _ = cut.open()
    lab.world.landing = lambda job, _part: "hold" if held["on"] and job.operation == first else "land"
    cut.compute(1)
    lab.run()
    cut.compute(2)
    assert lab.run() == ["SliceLanded"] and cut.landed() == [1]
    held["on"] = False
    assert lab.run() == ["SliceLanded", "TransferSucceeded", "MemoryReleased"] and cut.landed() == [1, 0]


def test_every_slice_takes_its_own_tier(make_lab):
    lab = make_lab(1)
    cut = lab.in_slices(4, ["direct", "bounce", "pull", "bounce"])
    cut.open()
    cut.compute(4)
    lab.run(30)
    (success,) = named(lab, "TransferSucceeded")
    assert [each for _, each, _ in success.tiers] == ["direct", "bounce", "pull", "bounce"] and lab.in_place()


def test_requests_say_what_they_wait_for_and_which_slice_they_are_of(make_lab):
    """On every message and notification the slice is part of the name."""
    lab = make_lab(1)
    cut = lab.in_slices(4)
    operations = cut.open()
    lab.run(3)
    assert [request.after for request in cut.requests()] == [1, 2, 3, 0]
    assert [operation.transfer.slice_index for operation in operations] == [0, 1, 2, 3]
    assert [request.operation for request in cut.requests()] == list(operations)
    assert {operation.transfer.of_slice(0) for operation in operations} == {lab.identity()}


# --- regions --------------------------------------------------------------------------------------------------------


def test_a_region_goes_back_when_its_slice_has_landed(make_lab):
    """While the prompt is still computed nothing of the arena is held."""
    lab = make_lab(2)
    cut = lab.in_slices(2, "bounce")
    cut.open()
    cut.compute(1, ranks=[0])
    lab.run()
    assert lab.arena.statistics().held_bytes >= FRAGMENTS * SIZE  # both writers' halves
    cut.compute(1, ranks=[1])
    lab.run()
    assert cut.landed() == [0] and lab.arena.statistics().held_bytes == 0


def test_an_arena_of_one_slice_is_enough_for_a_request_of_many(make_lab):
    """Without slices it would be larger than the arena: one slice's region is another's later."""
    room = FRAGMENTS // 4 * SIZE + 64  # 64: its parts begin at multiples of 64
    lab = make_lab(1, arena=room, send_arena=room)
    cut = lab.in_slices(4, "bounce")
    cut.open()
    cut.compute(4)
    lab.run(60)
    (success,) = named(lab, "TransferSucceeded")
    assert [each for _, each, _ in success.tiers] == ["bounce"] * 4 and lab.in_place()


def test_a_refused_region_is_one_slices_alone(make_lab):
    """That slice is written in place; the next one is offered a region of its own."""
    lab = make_lab(1, arena=FRAGMENTS // 2 * SIZE + 64)
    blocker = lab.arena.reserve("somebody else", {0: FRAGMENTS // 2 * SIZE})
    cut = lab.in_slices(2, "bounce")
    cut.open()
    cut.compute(1)
    lab.run(6)
    lab.clock.advance(0.3)
    assert lab.run() == ["SliceLanded"] and cut.in_place(0)
    blocker.abandon()
    cut.compute(2)
    lab.run()
    (success,) = named(lab, "TransferSucceeded")
    assert [(each, why) for _, each, why in success.tiers] == [("direct", "no_space"), ("bounce", "ok")]


@pytest.mark.parametrize("slices", [1, 2])
def test_a_region_that_is_there_when_its_transfer_ends_goes_back(make_lab, slices):
    """One writer's wish and another's failure come in one poll: the region is reserved, and nobody is told of it any more."""
    lab = make_lab(2)
    cut = lab.in_slices(slices, "bounce")
    cut.open()
    lab.run(3)
    cut.compute(1, ranks=[0])
    lab.senders[1].fail(KEY, "out of memory")
    for sender in lab.senders:
        sender.poll()
    assert lab.run(1, senders=[]) == ["TransferFailed"]
    assert lab.arena.statistics().granted_total == 1, "nothing was reserved: it shows nothing"
    assert lab.arena.statistics().held_bytes == 0 and lab.receiver.last_error is None
    lab.senders[0].seal(KEY)
    lab.run()
    assert lab.names() == ["TransferFailed", "MemoryReleased"] and lab.receiver.last_error is None


# --- ends -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["direct", "bounce", "pull"])
@pytest.mark.parametrize("landed", [0, 1, 2, 3])
def test_a_cancel_at_any_slice_keeps_what_landed_and_names_the_rest(make_lab, tier, landed):
    """Logically at once; memory by the proof of every slice; the blocks that landed hold their KV."""
    lab = make_lab(1)
    cut = lab.in_slices(4, tier)
    cut.open()
    if landed:
        cut.compute(landed)
    lab.run()
    assert lab.receiver.cancel(lab.identity())
    lab.run()
    (released,) = named(lab, "MemoryReleased")
    assert released.unfilled == tuple(f"block {index} of 0" for index in range(landed, 4))
    assert cut.in_place(*range(landed)) and len(named(lab, "TransferCancelled")) == 1
    assert lab.arena.statistics().held_bytes == 0
    if landed:
        lab.senders[0].seal(KEY)
        lab.run(3)
        assert lab.sent_names().count("SourceReleased") == 1


@pytest.mark.parametrize("tier", ["direct", "bounce"])
def test_a_cancel_while_a_slice_flies_waits_for_that_slice(make_lab, tier):
    """Slice 0 landed, slice 1 is posted and does not land: nothing is released before it did, or its end is proven."""
    lab = make_lab(1)
    cut = lab.in_slices(4, tier)
    operations = cut.open()
    cut.compute(1)
    lab.run()
    lab.world.landing = lambda _job, _part: "hold"
    cut.compute(2)
    lab.run()
    lab.receiver.cancel(lab.identity())
    lab.run()
    assert named(lab, "MemoryReleased") == [] and lab.state(operations[1]) in ("EXPOSED", "GRANTED")
    assert [lab.state(each) for each in (operations[0], *operations[2:])] == ["PROVEN"] * 3
    lab.world.landing = lambda _job, _part: "land"
    lab.run()
    (released,) = named(lab, "MemoryReleased")
    assert "block 0 of 0" not in released.unfilled and set(released.unfilled) >= {"block 2 of 0", "block 3 of 0"}
    assert lab.arena.statistics().held_bytes == 0


def test_a_region_stays_while_one_of_its_writers_may_write_it(make_lab):
    """Cancelled: one part of the slice's region has landed, the other one is flying. Both go back together, when it landed."""
    lab = make_lab(2)
    lab.world.landing = lambda job, _part: "hold" if job.operation.writer_rank else "land"
    cut = lab.in_slices(2, "bounce")
    operations = cut.open()
    cut.compute(1)
    lab.run()
    lab.receiver.cancel(lab.identity())
    lab.run()
    assert [lab.state(each) for each in operations] == ["PROVEN", "GRANTED", "PROVEN", "PROVEN"]
    assert lab.arena.statistics().held_bytes >= FRAGMENTS * SIZE and lab.receiver.last_error is None
    lab.world.landing = lambda _job, _part: "land"
    lab.run()
    assert lab.arena.statistics().held_bytes == 0 and len(named(lab, "MemoryReleased")) == 1
    assert not lab.target.any()


@pytest.mark.parametrize("landed", [0, 1, 2, 3])
def test_a_prefill_that_fails_after_some_slices_ends_the_transfer_once(make_lab, landed):
    """The rest is sealed unposted; both sides' memory comes back."""
    lab = make_lab(2)
    cut = lab.in_slices(4, "bounce")
    cut.open()
    if landed:
        cut.compute(landed)
    lab.run()
    lab.senders[1].fail(KEY, "out of memory")
    lab.run()
    (failed,) = named(lab, "TransferFailed")
    assert "out of memory" in failed.reason
    lab.senders[0].seal(KEY)
    lab.run()
    (released,) = named(lab, "MemoryReleased")
    assert released.unfilled == tuple(f"block {i} of {rank}" for i in range(landed, 4) for rank in range(2))
    assert cut.in_place(*range(landed))
    if landed:
        assert [lab.sent_names(rank).count("SourceReleased") for rank in range(2)] == [1, 1]


@pytest.mark.parametrize("landed", [1, 2])
def test_a_writer_that_dies_after_some_slices_leaves_the_rest_in_doubt(make_lab, landed):
    """Its landed slices are proven by their notifications; the others by nothing but the end of our agent (tcp)."""
    lab = make_lab(1)
    cut = lab.in_slices(4)
    operations = cut.open()
    cut.compute(landed)
    lab.run()
    lab.kill(0)
    lab.receiver.peer_died(lab.senders[0].self_id, PeerEvidence.PROCESS_REAPED)
    lab.run()
    assert [lab.state(each) for each in operations] == ["PROVEN"] * landed + ["IN_DOUBT"] * (4 - landed)
    assert len(named(lab, "TransferFailed")) == 1 and named(lab, "MemoryReleased") == []
    lab.receiver.retire_peer("ctx", "c1")
    lab.run()
    (released,) = named(lab, "MemoryReleased")
    assert released.unfilled == tuple(f"block {index} of 0" for index in range(landed, 4))


def test_a_late_write_of_one_slice_keeps_all_memory_until_quarantine(make_lab):
    """Blocks are the transfer's: they go together. The region of the slice that landed is back long before."""
    lab = make_lab(1)
    cut = lab.in_slices(2, "bounce")
    cut.open()
    cut.compute(1)
    lab.run()
    lab.world.landing = lambda _job, _part: "hold"
    cut.compute(2)
    lab.run()
    half = FRAGMENTS // 2 * SIZE
    assert half <= lab.arena.statistics().held_bytes < 2 * half
    lab.dead.add(0)
    lab.receiver.cancel(lab.identity())
    lab.clock.advance(11.0)
    lab.run()
    assert len(named(lab, "MemoryQuarantined")) == 1 and named(lab, "MemoryReleased") == []
    assert lab.arena.statistics().quarantined_bytes < 2 * half
    assert lab.receiver.drain().quarantined_bytes >= FRAGMENTS * SIZE + half


def test_a_scatter_that_fails_is_its_slices_alone(make_lab):
    """The transfer fails; what the other slice brought is in its place and not named."""

    class Fails:
        def __init__(self, copier):
            self.copier, self.count = copier, 0

        def prepare(self, *columns):
            return self.copier.prepare(*columns)

        def submit(self, prepared):
            self.count += 1
            if self.count == 2:
                raise TransportError("the copier is broken")
            return self.copier.submit(prepared)

    lab = make_lab(1, copier=Fails(HostCopier()), copier_errors_prove_idle=True)
    cut = lab.in_slices(2, "bounce")
    cut.open()
    cut.compute(1)
    lab.run()
    cut.compute(2)
    lab.run()
    assert lab.names() == ["SliceLanded", "TransferFailed", "MemoryReleased"]
    assert lab.events[-1].unfilled == ("block 1 of 0",) and cut.in_place(0)
    assert lab.arena.statistics().held_bytes == 0


# --- the source -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["direct", "bounce", "pull"])
def test_the_source_belongs_to_the_transfer_from_its_first_slice_on(make_lab, tier):
    """Sealed early, what is under way is waited for, what has not begun never begins; then it goes back, once."""
    lab = make_lab(1)
    cut = lab.in_slices(4, tier)
    cut.open()
    lab.run(3)
    lab.world.landing = lambda _job, _part: "hold"
    cut.compute(1)
    lab.run()
    sender = lab.senders[0]
    sender.fail(KEY, "its client has gone")
    lab.run()
    assert "SourceReleased" not in lab.sent_names() and sender.snapshot(KEY) is None
    lab.world.landing = lambda _job, _part: "land"
    lab.run()
    assert lab.sent_names().count("SourceReleased") == 1
    assert sender.snapshot(KEY).outcome == "FAILED" and sender.drain().quiescent


def test_a_source_that_is_quarantined_counts_with_all_of_its_slices(make_lab):
    """The bound on what is lost is one of bytes: a slice's would be a quarter of them."""
    lab = make_lab(1)
    lab.world.landing = lambda _job, _part: "hold"
    cut = lab.in_slices(4)
    cut.open()
    cut.compute(4)
    lab.run()
    lab.senders[0].fail(KEY, "aborted")
    lab.clock.advance(11.0)
    lab.run()
    assert lab.sent_names().count("SourceQuarantined") == 1
    assert lab.senders[0].drain().quarantined_bytes == FRAGMENTS * SIZE


def test_a_source_of_which_nothing_is_computed_is_not_owned(make_lab):
    """Failed before its first chunk: there is nothing to give back."""
    lab = make_lab(1)
    cut = lab.in_slices()
    cut.open()
    lab.run(3)
    lab.senders[0].fail(KEY, "aborted")
    lab.run()
    assert "SourceReleased" not in lab.sent_names() and lab.senders[0].snapshot(KEY) is not None


def test_a_prompt_is_not_computed_backwards(make_lab):
    """Nor after its end; a refused word changes nothing."""
    lab = make_lab(1)
    cut = lab.in_slices(4)
    cut.open()
    cut.compute(2)
    with pytest.raises(LocalProtocolError, match="computed further"):
        cut.compute(1)
    cut.compute(4)
    with pytest.raises(LocalProtocolError, match="computed further"):
        cut.compute(3)
    with pytest.raises(LocalProtocolError, match="ready before"):
        cut.compute(4)
    lab.run(30)
    assert lab.in_place() and lab.names()[-1] == "MemoryReleased"


@pytest.mark.parametrize("position", [0, -1, True, 1.0, AFTER_MAX + 1])
def test_a_position_is_a_count(make_lab, position):
    lab = make_lab(1)
    with pytest.raises(ValueError, match="position wants an integer"):
        lab.senders[0].reached(KEY, position, lambda asked: None)


@pytest.mark.parametrize(
    ("field", "value"),
    [("slice_index", -1), ("slice_index", 1 << 16), ("slice_index", True), ("after", -1), ("after", AFTER_MAX + 1)],
)
def test_an_operation_names_its_slice_within_bounds(make_lab, field, value):
    with pytest.raises(ValueError, match=f"{field} wants an integer"):
        ExpectedOperation(make_lab(1).senders[0].self_id, 8, **{field: value})


# --- names, links, time ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["open", "over"])
@pytest.mark.parametrize("index", [0, 1])
def test_a_slice_is_opened_once(make_lab, when, index):
    """As part of a transfer or by itself: its name stands for one receive."""
    lab = make_lab(1)
    cut = lab.in_slices()
    cut.open()
    if when == "over":
        cut.compute(2)
        lab.run()
    plan = lab.plan(0, request=2).writer
    again = [ExpectedOperation(lab.senders[0].self_id, plan.total_bytes, b"", plan)]
    with pytest.raises(DuplicateTransfer):
        lab.receiver.open(lab.identity().of_slice(index), again)
    lab.receiver.open(lab.identity().of_slice(2), again)  # a transfer of its own, of the same request


@pytest.mark.parametrize("index", [0, 1])
def test_an_earlier_attempts_slice_is_stale(make_lab, index):
    """Whichever slice of the later attempt it names."""
    lab = make_lab(1)
    writer = lab.senders[0].self_id
    both = [
        ExpectedOperation(writer, 512, b"", lab.plan(0, request=2 + each).writer, slice_index=each) for each in (0, 1)
    ]
    lab.receiver.open(lab.identity(1, 5), both)
    alone = [ExpectedOperation(writer, 512, b"", lab.plan(0, request=4).writer)]
    with pytest.raises(StaleIdentity, match="incarnation 5 is known"):
        lab.receiver.open(lab.identity(1, 4).of_slice(index), alone)
    lab.receiver.open(lab.identity(1, 6).of_slice(index), alone)


@pytest.mark.parametrize("tier", ["direct", "bounce"])
def test_a_link_that_breaks_between_slices_loses_none(make_lab, tier):
    """What is open is asked for again, each slice by its name."""
    lab = make_lab(1, linked=True)
    cut = lab.in_slices(4, tier)
    cut.open()
    cut.compute(1)
    lab.run()
    lab.network.sever(lab.peer, lab.senders[0].self_id)
    cut.compute(2)
    lab.run(3)
    lab.network.heal(lab.peer, lab.senders[0].self_id)
    lab.clock.advance(1.5)
    lab.run()
    cut.compute(4)
    lab.run(40)
    assert lab.in_place() and lab.names().count("MemoryReleased") == 1
    assert cut.landed() == [0, 1, 2, 3]


def test_the_time_limit_is_the_whole_transfers(make_lab):
    """Not renewed by a slice that lands."""
    lab = make_lab(1, config=SessionConfig(operation_timeout_s=5.0, drain_deadline_s=10.0, bounce_wait_s=0.2))
    cut = lab.in_slices()
    cut.open()
    lab.clock.advance(4.0)
    cut.compute(1)
    assert "SliceLanded" in lab.run()
    lab.clock.advance(2.0)
    lab.run()
    (failed,) = named(lab, "TransferFailed")
    assert "timed out" in failed.reason
    (released,) = named(lab, "MemoryReleased")
    assert released.unfilled == ("block 1 of 0",)


def test_a_cancel_names_only_slices_that_are_not_over(make_lab):
    """What landed needs no answer any more."""
    lab = make_lab(1)
    cut = lab.in_slices(4)
    operations = cut.open()
    cut.compute(2)
    lab.run()
    lab.receiver.cancel(lab.identity())
    lab.run()
    peer = lab.senders[0].self_id
    told = [decode_message(frame) for _, target, frame in lab.network.log if target == peer]
    assert [each.operation for each in told if isinstance(each, Cancel)] == list(operations[2:])


def test_a_grant_is_bound_to_its_slice(make_lab):
    """Each of a writer's slices has an address of its own while both are held."""
    lab = make_lab(1)
    lab.world.landing = lambda _job, _part: "hold"
    cut = lab.in_slices(2, "bounce")
    operations = cut.open()
    cut.compute(2)
    lab.run()
    peer = lab.senders[0].self_id
    told = [decode_message(frame) for _, target, frame in lab.network.log if target == peer]
    granted = {each.operation: each.base_address for each in told if isinstance(each, BounceGrant)}
    assert set(granted) == set(operations) and len(set(granted.values())) == 2
