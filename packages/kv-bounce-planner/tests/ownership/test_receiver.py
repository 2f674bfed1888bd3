"""The receiver's scenarios over fakes: proofs, cancels, failures, bounce reports, scatter, quarantine."""

from __future__ import annotations

import threading

import msgspec
import pytest

from kv_bounce_planner._errors import LocalProtocolError
from kv_bounce_planner.planning import TransportError
from kv_bounce_planner.sessions import (
    AddressStillExposed,
    BounceArena,
    CapacityExceeded,
    DuplicateTransfer,
    ExpectedOperation,
    PeerEvidence,
    PeerId,
    SessionConfig,
    StaleIdentity,
    TransferIdentity,
    TransfersOutstanding,
    free,
    ledgers,
)
from kv_bounce_planner.sessions.messages import (
    BounceGrant,
    BounceRefused,
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

REAPED, LOST = PeerEvidence.PROCESS_REAPED, PeerEvidence.CONNECTION_LOST


def sent_to(lab, peer, kind):
    return [
        m for _, target, frame in lab.network.log if target == peer and isinstance(m := decode_message(frame), kind)
    ]


def grants(lab):
    return sent_to(lab, lab.senders[0].self_id, BounceGrant)


# --- success --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["direct", "bounce"])
@pytest.mark.parametrize("writers", [1, 2, 3])
def test_success_comes_once_with_exact_bytes(make_lab, tier, writers):
    """Every writer's fragments in place, one success, one release, nothing else."""
    lab = make_lab(writers)
    lab.open(tier=tier)
    lab.ready()
    assert lab.run() == ["TransferSucceeded", "MemoryReleased"]
    assert lab.in_place()
    assert [each for _, each, _ in lab.events[0].tiers] == [tier] * writers
    assert free(lab.events[1].proven) == "blocks of 1"
    assert lab.receiver.drain().quiescent
    assert lab.arena.statistics().held_bytes == 0


def test_two_writers_hold_until_both_and_scatter_only_then(make_lab):
    """d2: the first writer's bounce bytes wait in their region; nothing is scattered before the second came."""
    lab = make_lab(2)
    lab.open(tier="bounce")
    lab.ready(ranks=[0])
    assert lab.run() == []
    assert not lab.target.any(), "scattered before every writer succeeded"
    assert lab.arena.statistics().held_bytes > 0
    lab.ready(ranks=[1])
    assert lab.run() == ["TransferSucceeded", "MemoryReleased"]
    assert lab.in_place()


def test_a_second_success_of_one_writer_never_counts_for_another(make_lab):
    """c12: rank 0 reports twice and its notifications come twice; rank 1 has written nothing: no success, no scatter."""
    lab = make_lab(2)
    lab.open(tier="bounce")
    lab.ready(ranks=[0])
    lab.run()
    sender = lab.senders[0].self_id
    (result,) = sent_to(lab, lab.peer, WriterResult)
    lab.inject(sender, lab.peer, result)
    for inbox in lab.world.inbox.values():
        inbox.extend(
            (agent, mark)
            for agent, mark in [
                (name, encoded(result.operation)) for name in (life.agent for life in lab.receiver._lives.values())
            ]
        )
    lab.run()
    assert "TransferSucceeded" not in lab.names()
    assert not lab.target.any()


def encoded(operation):
    from kv_bounce_planner.sessions.identity import Mark, encode_mark

    return encode_mark(Mark(operation, 0, 4))


def test_settling_again_changes_nothing(make_lab):
    """d1: replayed results and marks after the end are counted, not believed."""
    lab = make_lab(1)
    lab.open(tier="bounce")
    lab.ready()
    lab.run()
    for source, target, frame in list(lab.network.log):
        if target == lab.peer:
            lab.network.inject(source, target, frame)
    lab.run(3)
    assert lab.names() == ["TransferSucceeded", "MemoryReleased"]
    assert lab.receiver.statistics()["late"] > 0


# --- cancel ---------------------------------------------------------------------------------------------------------


def test_cancel_before_exposure_releases_at_once_and_tells_nobody(make_lab):
    """d8: no address left, so nothing can land: released in the same turn, no frame about it."""
    lab = make_lab(1)
    lab.open()
    assert lab.receiver.cancel(lab.identity())
    assert lab.run(1) == ["TransferCancelled", "MemoryReleased"]
    assert sent_to(lab, lab.senders[0].self_id, ReceiveRequest | Cancel) == []


def test_cancel_of_an_idle_writer_is_proven_by_its_seal(make_lab):
    """An answer "sealed, never posted" is proof; until it comes the block is owned."""
    lab = make_lab(1)
    lab.open()
    lab.run(3)
    lab.receiver.cancel(lab.identity())
    lab.receiver.poll()
    lab.events.clear()
    assert not lab.receiver.drain().quiescent
    assert lab.run(3)[-1] == "MemoryReleased"
    assert lab.sent_names() == ["ReceiveRequested", "CancelReceived", "OperationFailed"]
    lab.ready()
    lab.run()
    assert not lab.target.any(), "posted after sealed"


def test_cancel_in_progress_stops_posting_and_waits_for_what_was_posted(make_lab):
    """The sender stops after the posted parts, says so, and only then the block is free; the rest never lands."""
    lab = make_lab(1, parts_max=2, landing=lambda job, part: "hold")
    (operation,) = lab.open(count=32)
    lab.ready(count=32)
    lab.run(4)
    lab.receiver.cancel(lab.identity())
    names = lab.run(30)
    assert names == ["TransferCancelled"], "released while parts are in flight"
    assert lab.state(operation) == "EXPOSED"
    lab.world.landing = lambda job, part: "land"
    assert lab.run(10) == ["MemoryReleased"]
    posted = len(lab.world.landed)
    assert 0 < posted < 32, "posting was not stopped"
    assert lab.sent_names()[-2:] == ["OperationFailed", "RequestServed"]
    assert sent_to(lab, lab.peer, Drained)


def test_cancel_of_everything_posted_ends_with_done_and_stays_cancelled(make_lab):
    """A late DONE never revives: the outcome was frozen by the cancel."""
    lab = make_lab(1, parts_max=64, landing=lambda job, part: "hold")
    lab.open()
    lab.ready()
    lab.run(4)
    lab.receiver.cancel(lab.identity())
    lab.run(5)
    lab.world.landing = lambda job, part: "land"
    lab.run(10)
    assert lab.names() == ["TransferCancelled", "MemoryReleased"]
    assert lab.in_place(), "the write that had been posted landed before the release"
    assert not lab.receiver.cancel(lab.identity())


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("why", ["user", "deadline"])
def test_a_cancelled_receive_frees_once_when_the_last_writer_settles(make_lab, last, why):
    """d18: KV or AUX writer last; repeated polls free nothing early; a replacement is untouched by replayed completions."""
    lab = make_lab(2, parts_max=64)
    lab.world.landing = lambda job, part: "land" if job.operation.writer_rank != last else "hold"
    lab.open()
    lab.ready()
    lab.run(5)
    assert lab.names() == []
    assert lab.receiver.cancel(lab.identity(), why)
    lab.run(30)
    assert lab.names() == ["TransferCancelled"]
    with pytest.raises(DuplicateTransfer):
        lab.open()
    lab.world.landing = lambda job, part: "land"
    lab.run(5)
    assert lab.names() == ["TransferCancelled", "MemoryReleased"]
    lab.target[:] = 77
    for source, target, frame in list(lab.network.log):
        lab.network.inject(source, target, frame)
    lab.run(10)
    assert lab.world.land_everything() == 0
    assert (lab.target == 77).all()
    assert lab.names() == ["TransferCancelled", "MemoryReleased"]


def test_a_cancel_never_overtakes_its_request(make_lab):
    """Cancelled in the very turn of publication, the sender sees request, then cancel, in this order."""
    lab = make_lab(1)
    lab.open()
    lab.receiver._publish()
    lab.receiver.cancel(lab.identity())
    lab.run(4)
    kinds = [type(m).__name__ for m in sent_to(lab, lab.senders[0].self_id, ReceiveRequest | Cancel)]
    assert kinds == ["ReceiveRequest", "Cancel"]
    assert lab.names() == ["TransferCancelled", "MemoryReleased"]


def test_publication_and_cancel_from_another_thread_are_ordered_by_one_lock(make_lab):
    """Whatever the interleaving: either nothing left and it is free at once, or request and cancel both left, in order."""
    for round_number in range(60):
        lab = make_lab(1)
        lab.open()
        gate = threading.Barrier(2)

        def cancel(lab=lab, gate=gate):
            gate.wait()
            lab.receiver.cancel(lab.identity())

        thread = threading.Thread(target=cancel)
        thread.start()
        gate.wait()
        lab.receiver.poll()
        thread.join()
        lab.run(5)
        kinds = [type(m).__name__ for m in sent_to(lab, lab.senders[0].self_id, ReceiveRequest | Cancel)]
        assert kinds in ([], ["ReceiveRequest", "Cancel"]), round_number
        assert lab.receiver.drain().quiescent


# --- failures -------------------------------------------------------------------------------------------------------


def test_a_failed_writer_beside_a_successful_one_needs_its_own_proof(make_lab):
    """Results do not count; per-operation proofs do. No scatter, logical failure at once, release with the last proof."""
    lab = make_lab(2, parts_max=64)
    lab.world.landing = lambda job, part: "hold" if job.operation.writer_rank == 0 else "land"
    lab.open(tier="bounce")
    lab.ready(ranks=[0])
    lab.run(6)
    lab.senders[1].fail(lab.identity().request, "out of memory")
    assert lab.run(6) == ["TransferFailed"]
    assert lab.events[0].reason == "out of memory"
    assert lab.receiver.drain().open == (lab.identity(),)
    lab.world.landing = lambda job, part: "land"
    assert lab.run(6) == ["MemoryReleased"]
    assert not lab.target.any(), "scattered although a writer failed"


@pytest.mark.parametrize("executor", list(WriteExecutor)[:2])
def test_an_error_is_no_proof_and_its_late_bytes_do_no_harm(make_lab, executor):
    """The sender's error report leaves the memory owned; the part that erred lands afterwards, into owned memory."""
    lab = make_lab(1, executor=executor, parts_max=64, landing=lambda job, part: "error")
    (operation,) = lab.open()
    lab.ready()
    lab.run(6)
    if executor is WriteExecutor.RECEIVER:
        lab.world.writes[0].error = "broken pipe"  # the fake reports it to the sender, who executes nothing
        lab.run(4)
    assert lab.names() == ["TransferFailed"]
    assert lab.state(operation) == "IN_DOUBT"
    assert lab.world.land_everything() == 1
    assert lab.receiver.drain().in_doubt == (operation,)


def test_a_reaped_sender_is_proof_where_it_executes_its_writes(make_lab):
    """Over CMA the sender's process is gone, so are its stores."""
    lab = make_lab(1, executor=WriteExecutor.SENDER, parts_max=64, landing=lambda job, part: "hold")
    lab.open()
    lab.ready()
    lab.run(4)
    lab.kill(0)
    lab.receiver.peer_died(lab.senders[0].self_id, LOST)
    lab.run(3)
    assert lab.names() == ["TransferFailed"], "a lost connection taken as proof"
    lab.receiver.retire_peer("ctx", "c1")
    lab.run(3)
    assert lab.names() == ["TransferFailed"], "our agent's end taken as proof on CMA"
    lab.receiver.peer_died(lab.senders[0].self_id, REAPED)
    lab.run(1)
    assert lab.names() == ["TransferFailed", "MemoryReleased"]
    assert lab.world.land_everything() == 0


def test_our_agents_end_is_proof_where_the_receiver_executes(make_lab):
    """Over tcp a reaped sender proves nothing, destroying our agent does."""
    lab = make_lab(1, executor=WriteExecutor.RECEIVER, parts_max=64, landing=lambda job, part: "hold")
    (operation,) = lab.open()
    lab.ready()
    lab.run(4)
    lab.kill(0)
    lab.receiver.peer_died(lab.senders[0].self_id, REAPED)
    lab.run(3)
    assert lab.names() == ["TransferFailed"], "a peer's exit taken as proof on tcp"
    assert lab.state(operation) == "IN_DOUBT"
    assert lab.world._can_land(lab.world.writes[0]), "the fake would let it land: so must the session assume"
    lab.receiver.retire_peer("ctx", "c1")
    lab.run(1)
    assert lab.names() == ["TransferFailed", "MemoryReleased"]
    assert lab.world.land_everything() == 0


def test_an_agent_that_cannot_be_destroyed_proves_nothing(make_lab, monkeypatch):
    """retire_peer raises, the memory stays owned, and a retry that succeeds proves it."""
    lab = make_lab(1)
    lab.open()
    lab.run(2, senders=[])
    transport = lab.receiver._transport
    original = transport.destroy_agent

    def fails(_instance):
        raise TransportError("still referenced")

    monkeypatch.setattr(transport, "destroy_agent", fails)
    with pytest.raises(TransportError):
        lab.receiver.retire_peer("ctx", "c1")
    lab.run(2, senders=[])
    assert lab.names() == ["TransferFailed"]
    monkeypatch.setattr(transport, "destroy_agent", original)
    lab.receiver.retire_peer("ctx", "c1")
    lab.run(1, senders=[])
    assert lab.names() == ["TransferFailed", "MemoryReleased"]


def test_a_channel_error_while_publishing_leaves_the_address_exposed(make_lab):
    """An ambiguous send retains: the request may have left."""
    lab = make_lab(1)
    lab.network.cut(lab.peer, lab.senders[0].self_id)
    (operation,) = lab.open()
    assert lab.run(3) == ["LinkLost", "TransferFailed"]
    assert lab.state(operation) == "IN_DOUBT"
    assert not lab.receiver.drain().quiescent


# --- time -----------------------------------------------------------------------------------------------------------


def test_time_is_never_proof(make_lab):
    """The drain clock ends in quarantine: claim and region are given up, counted, and never released; late proof is late."""
    lab = make_lab(1, parts_max=64, landing=lambda job, part: "hold")
    (operation,) = lab.open(tier="bounce")
    lab.ready()
    lab.run(6)
    held = lab.arena.statistics().held_bytes
    lab.receiver.cancel(lab.identity())
    lab.clock.advance(9.9)
    assert lab.run(3) == ["TransferCancelled"]
    lab.clock.advance(0.2)
    assert lab.run(3, senders=[]) == ["MemoryQuarantined"]
    assert lab.arena.statistics().quarantined_bytes == held > 0
    statistics = lab.receiver.statistics()
    assert statistics["quarantined_count"] == 1
    assert statistics["quarantined_bytes"] == held + 512
    lab.world.landing = lambda job, part: "land"
    lab.run(5)
    assert "MemoryReleased" not in lab.names()
    assert lab.arena.statistics().quarantined_bytes == held
    assert lab.state(operation) == "ENDED"


def test_the_drain_clock_is_not_reset(make_lab):
    """Later doubts and repeated cancels do not move the deadline."""
    lab = make_lab(1, parts_max=64, landing=lambda job, part: "hold")
    lab.open()
    lab.ready()
    lab.run(5)
    lab.receiver.cancel(lab.identity())
    for _ in range(9):
        lab.clock.advance(1.0)
        lab.receiver.cancel(lab.identity())
        lab.receiver.peer_died(lab.senders[0].self_id, LOST)
        lab.run(1, senders=[])
    assert "MemoryQuarantined" not in lab.names()
    lab.clock.advance(1.1)
    assert "MemoryQuarantined" in lab.run(1, senders=[])


def test_beyond_its_budget_quarantine_is_a_fatal_diagnosis_and_nothing_is_released_any_more(make_lab):
    """Never a release: after the fatal diagnosis even proven memory stays undelivered, and nothing is admitted."""
    config = SessionConfig(drain_deadline_s=1.0, quarantine_bytes_max=600)
    lab = make_lab(1, config=config, parts_max=64, landing=lambda job, part: "hold")
    for request in (1, 2, 3):
        lab.open(request)
        lab.ready(request)
    lab.run(6)
    for request in (1, 2):
        lab.receiver.cancel(lab.identity(request))
    lab.clock.advance(1.5)
    names = lab.run(2, senders=[])
    assert names.count("FatalDiagnosis") == 1
    fatal = next(event for event in lab.events if type(event).__name__ == "FatalDiagnosis")
    assert "1024 bytes" in fatal.reason
    assert any("deadline" in line for line in fatal.story)
    assert not lab.receiver.healthy
    with pytest.raises(LocalProtocolError, match="admits nothing"):
        lab.open(4)
    lab.world.landing = lambda job, part: "land"
    lab.run(5)
    assert "TransferSucceeded" in lab.names(), "the third transfer went on"
    assert "MemoryReleased" not in lab.names(), "released after a fatal diagnosis"
    assert lab.names().count("MemoryQuarantined") == 2
    assert lab.receiver.statistics()["undelivered"] == 1


# --- bounce ---------------------------------------------------------------------------------------------------------


def test_a_bounce_region_is_granted_when_prefill_ends_not_at_publication(make_lab):
    """X1: 256 published waiters hold no bounce memory at all."""
    lab = make_lab(1)
    for request in range(256):
        lab.open(request, tier="bounce")
    lab.run(20)
    assert lab.arena.statistics().held_bytes == 0
    lab.ready(3)
    assert lab.run(10) == ["TransferSucceeded", "MemoryReleased"]


def test_a_full_arena_falls_back_to_direct_after_the_wait_with_its_reason(make_lab):
    """Before the advertisement every doubt falls back: NO_SPACE after bounce_wait_s, and the transfer succeeds in place."""
    lab = make_lab(1, arena=600)
    lab.open(1, tier="bounce")
    lab.ready(1)
    lab.world.landing = lambda job, part: "hold"
    lab.run(6)
    assert lab.arena.statistics().held_bytes == 512
    lab.world.landing = lambda job, part: "hold" if job.operation.request.request_id == 1 else "land"
    lab.open(2, tier="bounce")
    lab.ready(2)
    assert lab.run(6) == []
    lab.clock.advance(0.3)
    assert lab.run(8) == ["TransferSucceeded", "MemoryReleased"]
    assert lab.events[0].tiers[0][1:] == ("direct", "no_space")


@pytest.mark.parametrize("missing", ["receiver", "sender"])
def test_without_an_arena_everything_goes_direct(make_lab, missing):
    """No arena on either side is a fallback with success, not an error."""
    lab = make_lab(1, **({"arena": 0} if missing == "receiver" else {"send_arena": 0}))
    lab.open(tier="bounce")
    lab.ready()
    assert lab.run() == ["TransferSucceeded", "MemoryReleased"]
    assert lab.events[0].tiers[0][1] == "direct"
    assert lab.in_place()


def test_a_sender_whose_slots_are_too_small_never_asks(make_lab):
    """Oversize at the sender is known before anything is granted: direct."""
    lab = make_lab(1, send_arena=256)
    lab.open(tier="bounce")
    lab.ready()
    assert lab.run() == ["TransferSucceeded", "MemoryReleased"]
    assert grants(lab) == []
    assert lab.senders[0].statistics()["bounce_oversize"] == 1


def corrupt_result(lab, change):
    """Hold the sender's frames to the receiver, change its WriterResult, let everything go."""
    sender = lab.senders[0].self_id
    lab.network.hold(sender, lab.peer)
    lab.run(3)
    queue = lab.network._queues[(sender, lab.peer)]
    for index, frame in enumerate(list(queue)):
        message = decode_message(frame)
        if isinstance(message, WriterResult):
            changed = change(message)
            if changed is None:
                del queue[index]
            else:
                queue[index] = encode_message(changed, lab.senders[0].session, lab.receiver.session)
    lab.network.let(sender, lab.peer)


def bounce_until_granted(lab):
    (operation,) = lab.open(tier="bounce")
    lab.ready()
    sender = lab.senders[0].self_id
    for _ in range(20):
        lab.run(1)
        if grants(lab):
            lab.network.hold(sender, lab.peer)
            return operation
    raise AssertionError("never granted")


def flip(at):
    def change(message):
        report = bytearray(message.report)
        report[at % len(report)] ^= 1 << (at % 8)
        return msgspec.structs.replace(message, report=bytes(report))

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda m: msgspec.structs.replace(m, report=b""),
        lambda m: msgspec.structs.replace(m, report=m.report[:-1]),
        lambda m: msgspec.structs.replace(m, report=m.report + b"\0"),
        lambda m: msgspec.structs.replace(m, base_address=m.base_address + 64),
        *(flip(at) for at in range(0, 72, 3)),
    ],
)
def test_a_corrupt_report_is_refused_and_nothing_is_released(make_lab, change):
    """Fail closed: no scatter, no release of memory or region; the sender's words prove nothing any more."""
    lab = make_lab(1)
    operation = bounce_until_granted(lab)
    corrupt_result(lab, change)
    lab.run(10)
    assert lab.names() == ["TransferFailed"]
    assert lab.state(operation) == "CONFLICTED"
    assert not lab.target.any(), "scattered after a refused report"
    assert lab.arena.statistics().held_bytes == 512
    assert lab.receiver.statistics()["reports_refused"] == 1
    lab.receiver.retire_peer("ctx", "c1")  # the class's own proof still ends it
    lab.run(1)
    assert lab.names() == ["TransferFailed", "MemoryReleased"]
    assert lab.arena.statistics().held_bytes == 0


def test_success_without_a_report_keeps_the_region(make_lab):
    """c8: every byte has landed and no report came: no credit, region held, transfer live."""
    lab = make_lab(1)
    operation = bounce_until_granted(lab)
    corrupt_result(lab, lambda message: None)
    assert lab.run(10) == []
    assert lab.state(operation) == "LANDED"
    assert lab.arena.statistics().held_bytes == 512
    assert not lab.target.any()


def test_a_report_by_another_rank_changes_nothing(make_lab):
    """Rank-bound: an authenticated peer cannot report for another one, neither well nor badly."""
    lab = make_lab(2)
    first, _ = lab.open(tier="bounce")
    lab.ready(ranks=[0])
    lab.run(2)
    stranger = lab.senders[1].self_id
    for message in (
        WriterResult(first, lab.bounce_at, b"x"),
        Sealed(first, "mine"),
        Drained(first, 0, 0, ""),
        Doubt(first, ""),
    ):
        lab.inject(stranger, lab.peer, message)
    lab.run(10)
    assert lab.names() == []
    assert lab.receiver.statistics()["foreign"] == 4
    lab.ready(ranks=[1])
    assert lab.run() == ["TransferSucceeded", "MemoryReleased"]
    assert lab.in_place()


@pytest.mark.parametrize(
    "messages",
    [
        lambda op: [WriterResult(op, 1, b"report without a grant")],
        lambda op: [Drained(op, 3, 2, "not all completed")],
    ],
    ids=["report without grant", "drained with outstanding parts"],
)
def test_a_contradiction_conflicts_and_only_the_class_proves(make_lab, messages):
    """A peer that contradicts the protocol is not believed afterwards, not even when it says sealed."""
    lab = make_lab(1)
    (operation,) = lab.open(tier="bounce")
    lab.run(3)
    sender = lab.senders[0].self_id
    for message in [*messages(operation), Sealed(operation, "never mind")]:
        lab.inject(sender, lab.peer, message)
    lab.run(5)
    assert lab.names() == ["TransferFailed"]
    assert lab.state(operation) == "CONFLICTED"
    assert lab.receiver.statistics()["conflicts"] == 1


def test_a_seal_after_a_part_was_done_is_a_contradiction(make_lab):
    """ "Never posted" beside a notification of a landed part: one of both is untrue, so neither is proof."""
    lab = make_lab(1, parts_max=2)
    lab.world.landing = lambda job, part: "land" if part == 0 else "hold"
    (operation,) = lab.open()
    lab.ready()
    lab.run(6)
    lab.inject(lab.senders[0].self_id, lab.peer, Sealed(operation, "never posted"))
    lab.run(3)
    assert lab.state(operation) == "CONFLICTED"


def test_another_plan_at_the_writer_fails_before_anything_is_posted(make_lab):
    """The digests differ: sealed, never posted, not one byte written; no fallback."""
    lab = make_lab(1)
    lab.open(count=8)
    key = lab.identity().request
    lab.senders[0].ready(key, lambda request: lab.plan(0, count=16, size=32), claim="source")
    assert lab.run() == ["TransferFailed", "MemoryReleased"]
    assert "different plans" in lab.events[0].reason
    assert lab.world.landed == []


# --- scatter --------------------------------------------------------------------------------------------------------


class SlowCopier:
    """Finishes when told to, or fails."""

    def __init__(self):
        self.finished, self.error, self.submitted = False, "", 0

    def prepare(self, source, target, sizes):
        return (source, target, sizes)

    def submit(self, prepared):
        self.submitted += 1
        return self

    def done(self):
        if self.error:
            raise TransportError(self.error)
        return self.finished

    def wait(self):
        raise AssertionError("a session never blocks")


def test_a_scatter_owns_region_and_destination_until_it_ended(make_lab):
    """d6: a cancel during the scatter releases nothing; afterwards the outcome is the cancel's."""
    copier = SlowCopier()
    lab = make_lab(1, copier=copier)
    lab.open(tier="bounce")
    lab.ready()
    assert lab.run() == []
    assert copier.submitted == 1
    assert lab.receiver.cancel(lab.identity())
    assert lab.run(5) == ["TransferCancelled"]
    assert lab.arena.statistics().held_bytes == 512
    copier.finished = True
    assert lab.run(2) == ["MemoryReleased"]
    assert copier.submitted == 1


def test_reports_and_losses_during_a_scatter_are_ignored(make_lab):
    """d5: once every writer is proven, what comes later decides nothing."""
    copier = SlowCopier()
    lab = make_lab(1, copier=copier)
    (operation,) = lab.open(tier="bounce")
    lab.ready()
    lab.run()
    for message in (Doubt(operation, "too late"), WriterResult(operation, 1, b""), Sealed(operation, "too late")):
        lab.inject(lab.senders[0].self_id, lab.peer, message)
    lab.receiver.peer_died(lab.senders[0].self_id, REAPED)
    assert lab.run(3) == []
    copier.finished = True
    assert lab.run(2) == ["TransferSucceeded", "MemoryReleased"]


def test_a_failed_device_scatter_proves_nothing(make_lab):
    """d7: failure is reported at once; an error of the device leaves both memories in doubt for ever: quarantined."""
    copier = SlowCopier()
    lab = make_lab(1, copier=copier)
    lab.open(tier="bounce")
    lab.ready()
    lab.run()
    copier.error = "an illegal memory access was encountered"
    assert lab.run(2) == ["TransferFailed", "MemoryQuarantined"]
    assert lab.arena.statistics().quarantined_bytes == 512
    assert "illegal memory access" in lab.events[0].reason


def test_a_failed_scatter_of_a_copier_that_is_then_idle_releases(make_lab):
    """A copy in this thread that raised is over: failed, and released."""
    copier = SlowCopier()
    lab = make_lab(1, copier=copier, copier_errors_prove_idle=True)
    lab.open(tier="bounce")
    lab.ready()
    lab.run()
    copier.error = "bad table"
    assert lab.run(2) == ["TransferFailed", "MemoryReleased"]


def test_a_queued_scatter_is_not_launched_after_a_cancel(make_lab):
    """4i: with the copy still queued, the cancel purges nothing that runs; the scatter then runs or not, but is owned."""
    lab = make_lab(2, config=SessionConfig(copies_per_poll_max=1, drain_deadline_s=10))
    for request in (1, 2, 3):
        lab.open(request, tier="bounce")
        lab.ready(request)
    lab.run(30)
    assert lab.names().count("MemoryReleased") == 3


# --- callbacks ------------------------------------------------------------------------------------------------------


def test_a_callback_that_raises_is_called_again_and_memory_goes_once(make_lab):
    """d10, d11: the release stays committed, the callback is retried, others are not held up, nothing goes twice."""
    taken, failures = [], {1: 2, 2: 0}

    def on_memory(event):
        request = event.identity.request_id
        if failures[request]:
            failures[request] -= 1
            raise RuntimeError("pool is busy")
        taken.append((request, free(event.proven)))

    lab = make_lab(1, on_memory=on_memory)
    for request in (1, 2):
        lab.open(request)
        lab.ready(request)
    lab.run(20)
    assert sorted(taken) == [(1, "blocks of 1"), (2, "blocks of 2")]
    assert lab.names().count("MemoryReleased") == 2
    assert lab.receiver.statistics()["callback_retries"] == 2
    assert lab.receiver.drain().quiescent


def test_undelivered_memory_counts_as_outstanding(make_lab):
    """close() refuses while a callback has not taken its memory."""

    def never(event):
        raise RuntimeError("no")

    lab = make_lab(1, on_memory=never)
    lab.open()
    lab.receiver.cancel(lab.identity())
    lab.run(3)
    with pytest.raises(TransfersOutstanding):
        lab.receiver.close()


# --- admission ------------------------------------------------------------------------------------------------------


def test_identities_are_checked_before_anything_is_owned(make_lab):
    """Foreign generation or rank, duplicate, older incarnation, bounds: refused, nothing taken over."""
    lab = make_lab(1, config=SessionConfig(transfers_max=2, operations_max=1))
    operation = ExpectedOperation(lab.senders[0].self_id, 64)
    for identity in (TransferIdentity(1, 0, "g0", 0), TransferIdentity(1, 0, "g1", 1)):
        with pytest.raises(StaleIdentity):
            lab.receiver.open(identity, [operation])
    lab.receiver.open(TransferIdentity(1, 5, "g1", 0), [operation])
    with pytest.raises(DuplicateTransfer):
        lab.receiver.open(TransferIdentity(1, 5, "g1", 0), [operation])
    with pytest.raises(StaleIdentity, match="incarnation 5"):
        lab.receiver.open(TransferIdentity(1, 4, "g1", 0), [operation])
    with pytest.raises(CapacityExceeded):
        lab.receiver.open(TransferIdentity(2, 0, "g1", 0), [operation, operation])
    with pytest.raises(CapacityExceeded):
        lab.receiver.open(TransferIdentity(2, 0, "g1", 0), [])
    lab.receiver.open(TransferIdentity(2, 0, "g1", 0), [operation])
    with pytest.raises(CapacityExceeded):
        lab.receiver.open(TransferIdentity(3, 0, "g1", 0), [operation])
    assert lab.receiver.statistics()["opened"] == 2


def test_a_block_is_not_advertised_while_an_earlier_publication_exposes_it(make_lab):
    """A double allocation: refused until the first transfer is proven, then welcome."""
    lab = make_lab(1)
    lab.open(1, blocks=[4, 5])
    with pytest.raises(AddressStillExposed):
        lab.open(2, blocks=[6, 5])
    lab.open(3, blocks=[6])
    lab.ready(1)
    lab.run()
    lab.open(2, blocks=[5])


def test_places_too_many_to_compare_are_counted_and_names_of_blocks_still_decide(make_lab, monkeypatch):
    monkeypatch.setattr(ledgers, "RANGES_MAX", 8)
    lab = make_lab(1)
    lab.open(1, blocks=["a"])
    lab.open(2, blocks=["b"])
    assert lab.receiver.statistics()["addresses_unchecked"] == 1
    with pytest.raises(AddressStillExposed):
        lab.open(3, blocks=["a"])


def test_a_quarantined_block_is_never_advertised_again(make_lab):
    """The ledger keeps it, across transfers and generations."""
    lab = make_lab(1, landing=lambda job, part: "hold")
    lab.open(1, blocks=[4])
    lab.ready(1)
    lab.run(5)
    lab.receiver.cancel(lab.identity(1))
    lab.clock.advance(11)
    assert "MemoryQuarantined" in lab.run(1, senders=[])
    with pytest.raises(AddressStillExposed):
        lab.open(2, blocks=[4])


def test_close_refuses_while_memory_is_owned_and_can_be_retried(make_lab):
    """Admission closes first; everything else goes on until quiescent."""
    lab = make_lab(1)
    lab.open()
    with pytest.raises(TransfersOutstanding) as raised:
        lab.receiver.close()
    assert raised.value.outstanding == (lab.identity(),)
    with pytest.raises(LocalProtocolError):
        lab.open(2)
    lab.ready()
    lab.run()
    lab.receiver.close()


def test_incompatible_peers_are_refused_with_a_proof(make_lab, monkeypatch):
    """Another transport key or version: nothing is published to such a peer, so its memory is free at once."""
    lab = make_lab(1, introduced=False)
    from kv_bounce_planner.sessions import TransportClass

    lab.receiver._transport._class = TransportClass("fake:another", frozenset({WriteExecutor.RECEIVER}))
    lab.open()
    lab.ready()
    assert lab.run() == ["PeerRefused", "TransferFailed", "MemoryReleased"]
    assert "transport" in lab.events[0].reason and "transport" in lab.events[1].reason
    assert lab.sent_names()[0] == "PeerRefused", "the other side was not told"
    assert lab.world.landed == []


def test_malformed_frames_and_strange_messages_change_nothing(make_lab):
    """Counted, dropped; the transfer goes on."""
    lab = make_lab(1)
    (operation,) = lab.open()
    sender = lab.senders[0].self_id
    lab.network.inject(sender, lab.peer, b"garbage")
    lab.inject(sender, lab.peer, BounceGrant(operation, 1, 1, "DRAM", 0))
    lab.inject(sender, lab.peer, BounceRefused(operation, ""))
    stale = msgspec.structs.replace(operation, transfer=TransferIdentity(1, 0, "g0", 0))
    lab.inject(sender, lab.peer, Sealed(stale, ""))
    lab.ready()
    assert lab.run() == ["TransferSucceeded", "MemoryReleased"]
    statistics = lab.receiver.statistics()
    assert (statistics["malformed"], statistics["unexpected"], statistics["stale"]) == (1, 2, 1)


def test_notifications_of_a_foreign_agent_are_not_believed(make_lab):
    """Exact match: operation, part, count and the agent that belongs to that writer."""
    from kv_bounce_planner.sessions.identity import Mark, encode_mark

    lab = make_lab(2)
    first, _ = lab.open()
    lab.run(4)
    agent_of = {peer.rank: life.agent for peer, life in lab.receiver._lives.items()}
    inbox = next(iter(lab.receiver._transport._agents.values())).name
    for operation, agent in ((first, agent_of[1]), (first, "nobody")):
        lab.world.inbox[inbox].append((agent, encode_mark(Mark(operation, 0, 1))))
    lab.run(3)
    assert lab.state(first) == "EXPOSED"
    assert lab.receiver.statistics()["foreign"] == 2


def test_parts_must_agree_on_their_count(make_lab):
    """A notification with another count than before is a contradiction."""
    from kv_bounce_planner.sessions.identity import Mark, encode_mark

    lab = make_lab(1)
    (operation,) = lab.open()
    lab.run(4)
    (agent,) = [life.agent for life in lab.receiver._lives.values()]
    inbox = next(iter(lab.receiver._transport._agents.values())).name
    lab.world.inbox[inbox].append((agent, encode_mark(Mark(operation, 0, 3))))
    lab.world.inbox[inbox].append((agent, encode_mark(Mark(operation, 1, 2))))
    lab.run(2)
    assert lab.state(operation) == "CONFLICTED"


@pytest.mark.parametrize(
    ("marks", "state"),
    [
        (((0, 2), (2, 3)), "PROVEN"),
        (((2, 3), (0, 2)), "PROVEN"),
        (((0, 2), (0, 2), (1, 1), (2, 3)), "PROVEN"),  # replays say nothing new
        (((0, 2), (3, 2)), "EXPOSED"),  # grain 2 is missing
        (((0, 3), (2, 3)), "CONFLICTED"),
        (((1, 2), (0, 5)), "CONFLICTED"),
        (((0, 2), (2, 4)), "CONFLICTED"),  # beyond the last
        (((0, 5),), "PROVEN"),
    ],
)
def test_grains_that_landed_must_tile_the_write(make_lab, marks, state):
    """Posts are of any number of grains: done is every grain, whole; what overlaps others or leaves the write lies."""
    from kv_bounce_planner.sessions import receive_core as rc

    lab = make_lab(1)
    (operation,) = lab.open()
    lab.run(4)
    record = lab.receiver._of_operation[operation]
    for index, extent in marks:
        lab.receiver._step(record, rc.MarkArrived(operation, index, 5, extent))
    assert record.core.state_of(operation).value == state


def test_nothing_is_published_before_both_sides_know_each_other(make_lab):
    """What is published is bound to one life of the writer: until it has shown its number, no address leaves."""
    lab = make_lab(1, introduced=False)
    sender = lab.senders[0].self_id
    lab.network.hold(sender, lab.peer)
    (operation,) = lab.open()
    lab.ready()
    assert lab.run(10) == []
    assert lab.state(operation) == "UNEXPOSED" and not lab.world.writes
    lab.network.let(sender, lab.peer)
    assert lab.run() == ["PeerIntroduced", "TransferSucceeded", "MemoryReleased"]


def test_a_peer_that_never_answers_is_a_failure_by_name_and_memory_is_free_at_once(make_lab):
    """Nothing left this process, so nothing is in doubt: never exposed."""
    lab = make_lab(1, introduced=False, config=SessionConfig(introduction_timeout_s=3.0))
    lab.network.hold(lab.senders[0].self_id, lab.peer)
    lab.open()
    assert lab.run(5) == []
    lab.clock.advance(3.1)
    assert lab.run(2) == ["TransferFailed", "MemoryReleased"]
    assert "introduced" in lab.events[0].reason and "ctx/c1/0" in lab.events[0].reason


def test_aux_and_kv_of_one_peer_are_separate_operations_of_one_transfer(make_lab):
    """Both are owned until both are proven."""
    lab = make_lab(1)
    peer = lab.senders[0].self_id
    kv, aux = lab.plan(0, 8), lab.plan(0, 4, request=2)
    identity = lab.identity()
    lab.receiver.open(
        identity,
        [
            ExpectedOperation(peer, kv.total_bytes, b"kv", kv.writer),
            ExpectedOperation(peer, aux.total_bytes, b"aux", aux.writer, role="AUX"),
        ],
        claim="both",
    )
    lab.world.landing = lambda job, part: "hold" if job.sizes.sum() == aux.total_bytes else "land"
    lab.senders[0].ready(identity.request, lambda request: kv if request.role == "KV" else aux, claim="s")
    assert lab.run(10) == []
    lab.world.landing = lambda job, part: "land"
    assert lab.run(5) == ["TransferSucceeded", "MemoryReleased"]


def test_the_arena_of_another_device_is_named_in_the_grant(make_lab):
    """The grant carries where the region lies, so the sender's descriptors name the right device."""
    lab = make_lab(1)
    lab.receiver._arena = BounceArena(lab.bounce_at, 1 << 14, memory_kind="VRAM", device_id=3)
    lab.open(tier="bounce")
    lab.ready()
    lab.run(4)
    (grant,) = grants(lab)
    assert (grant.memory_kind, grant.device_id, grant.byte_count) == ("VRAM", 3, 512)
    lab.receiver._arena = lab.arena


def test_expected_operations_are_validated():
    """A bounce offer needs a plan, sizes are positive, payloads bounded, byte counts equal the plan's."""
    peer = PeerId("ctx", "c1", 0)
    for arguments in (
        {"byte_count": 0},
        {"byte_count": True},
        {"byte_count": 1, "payload": b"x" * (1 << 21)},
        {"byte_count": 1, "tier": "bounce"},
    ):
        with pytest.raises(ValueError, match=r"wants|exceeds|needs"):
            ExpectedOperation(peer, **arguments)
    with pytest.raises(ValueError, match=">= 1"):
        SessionConfig(transfers_max=0)
    with pytest.raises(ValueError, match="drain_deadline_s"):
        SessionConfig(drain_deadline_s=0)
