"""Pull: the receiver reads what the sender lends. Who may free what, and when, is the same question from the other side."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kv_bounce_planner.planning import WriterPlan, WriterTransfer
from kv_bounce_planner.sessions import (
    ExpectedOperation,
    ExposureLedger,
    Loan,
    OperationIdentity,
    PeerEvidence,
    PeerId,
    Receiver,
    RequestKey,
    SessionConfig,
    SessionResources,
    TransferIdentity,
    free,
)
from kv_bounce_planner.sessions import receiver as receiver_module
from kv_bounce_planner.sessions.core import Resolve, Resolved
from kv_bounce_planner.sessions.messages import (
    PAYLOAD_BYTES_MAX,
    BounceGrant,
    BounceWanted,
    Cancel,
    Doubt,
    Drained,
    ReadOffer,
    ReadOver,
    ReceiveRequest,
    Sealed,
    decode_frame,
)
from kv_bounce_planner.sessions.proof import ProofKind, WriteExecutor
from kv_bounce_planner.sessions.receive_core import (
    MessageArrived,
    OperationSpec,
    Published,
    ReceiveTransfer,
    StartRead,
)
from kv_bounce_planner.sessions.states import ReceiveState
from kv_bounce_planner.transports.interface import TransferJob

KEY = RequestKey(1, 0)
EXECUTORS = [WriteExecutor.RECEIVER, WriteExecutor.SENDER, WriteExecutor.NIC]


def said(lab, kind, source=None):
    """Messages of a kind that went over the network, oldest first."""
    frames = [decode_frame(frame).message for sent_by, _, frame in lab.network.log if source in (None, sent_by)]
    return [message for message in frames if isinstance(message, kind)]


class Gate:
    """What happens to parts that are asked about: as a test says from now on."""

    def __init__(self, verdict="hold"):
        self.verdict = verdict

    def __call__(self, _job, _part):
        return self.verdict


def reading(lab, turns=6):
    """Opened, lent, and being read, with every part held."""
    (operation,) = lab.open(tier="pull")
    lab.ready()
    lab.run(turns)
    assert lab.state(operation) == "READING" and lab.senders[0].state_of(operation) == "LENT"
    return operation


# --- the whole way --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("writers", [1, 2])
def test_success_comes_once_with_exact_bytes_and_the_source_comes_back(make_lab, writers, executor):
    lab = make_lab(writers, executor=executor)
    operations = lab.open(tier="pull")
    lab.ready()
    lab.run()
    assert lab.names() == ["TransferSucceeded", "MemoryReleased"] and lab.in_place()
    assert [tier for _, tier, _ in lab.events[0].tiers] == ["pull"] * writers
    assert lab.events[1].unfilled == () and free(lab.events[1].proven) == "blocks of 1"
    for rank, sender in enumerate(lab.senders):
        assert lab.sent_names(rank) == ["ReceiveRequested", "OperationDone", "RequestServed"]
        assert lab.sent[rank][1].tier == "pull"
        assert sender.state_of(operations[rank]) == "DONE"
        sender.seal(KEY)
    lab.run(2)
    for rank, sender in enumerate(lab.senders):
        proven = lab.sent[rank][-1].proven
        assert [proof.kind for proof in proven.proofs] == [ProofKind.READ_OVER] and free(proven) == "source of 1"
        assert sender.snapshot(KEY).outcome == "COMPLETED"
    assert lab.receiver.statistics()["operations_pulled"] == writers and not lab.world.writes


def test_pushed_and_pulled_operations_share_a_transfer(make_lab):
    """Written, bounced and read in one transfer: one success, when all three are there."""
    lab = make_lab(3)
    lab.open(tier=["direct", "bounce", "pull"])
    lab.ready()
    lab.run(30)
    assert lab.names() == ["TransferSucceeded", "MemoryReleased"] and lab.in_place()
    assert [tier for _, tier, _ in lab.events[0].tiers] == ["direct", "bounce", "pull"]


def test_nothing_is_read_before_the_prefill_is_over_and_no_address_leaves(make_lab):
    """The receiver exposes nothing: until the loan is there its memory comes back at once."""
    lab = make_lab(1)
    (operation,) = lab.open(tier="pull")
    lab.run()
    assert lab.state(operation) == "ASKED" and not lab.world.writes
    assert lab.senders[0].state_of(operation) == "HELD"
    lab.receiver.cancel(lab.identity())
    assert lab.run(1) == ["TransferCancelled", "MemoryReleased"]
    lab.run(2)
    lab.ready()  # too late: the sender heard that nothing is wanted any more
    lab.run(4)
    assert not said(lab, ReadOffer) and lab.senders[0].state_of(operation) == "SEALED"
    lab.senders[0].seal(KEY)
    lab.run(2)
    assert lab.sent_names()[-1] == "SourceReleased"


# --- the sender's blocks are lent until the reader says so or is dead -----------------------------------------------


def test_a_lent_source_stays_owned_whatever_the_sender_does(make_lab):
    """Seal, fail and time do not bring it back while the reader may still read; its end is quarantine, not reuse."""
    lab = make_lab(1, landing=Gate(), config=SessionConfig(drain_deadline_s=10.0, operation_timeout_s=50.0))
    operation = reading(lab)
    sender = lab.senders[0]
    sender.seal(KEY)
    lab.run(3, receiver=False)
    sender.fail(KEY, "aborted")
    lab.run(3, receiver=False)
    assert sender.state_of(operation) == "RECALLED" and "SourceReleased" not in lab.sent_names()
    assert len(said(lab, Cancel)) == 1
    lab.clock.advance(9.0)
    lab.run(2, receiver=False)
    assert sender.state_of(operation) == "RECALLED"
    lab.clock.advance(1.1)
    lab.run(2, receiver=False)
    assert lab.sent_names()[-1] == "SourceQuarantined" and sender.snapshot(KEY).quarantined


def test_a_loan_that_nobody_takes_up_is_recalled_at_its_time_out_and_answered(make_lab):
    """The reader's process stands still for longer than the operation may take; back, it answers, and nothing was read."""
    lab = make_lab(1, config=SessionConfig(drain_deadline_s=100.0, operation_timeout_s=5.0))
    (operation,) = lab.open(tier="pull", timeout_s=1000.0)
    lab.run(3)
    lab.ready()
    lab.run(2, receiver=False)
    assert lab.senders[0].state_of(operation) == "LENT"
    lab.clock.advance(5.1)
    lab.run(2, receiver=False)
    assert lab.senders[0].state_of(operation) == "RECALLED"
    lab.run(4)
    assert lab.senders[0].state_of(operation) == "DRAINED" and not lab.world.writes
    assert lab.names() == ["TransferFailed", "MemoryReleased"] and "timed out in LENT" in lab.events[0].reason
    lab.senders[0].seal(KEY)
    lab.run(2)
    assert lab.sent_names()[-1] == "SourceReleased" and lab.senders[0].snapshot(KEY).outcome == "FAILED"


def test_a_recall_stops_the_reads_and_waits_for_those_that_began(make_lab):
    gate = Gate()
    lab = make_lab(1, landing=gate, parts_max=1)
    operation = reading(lab)
    lab.senders[0].fail(KEY, "preempted")
    lab.run(2)
    assert lab.state(operation) == "STOPPING" and lab.names() == ["TransferFailed"]
    gate.verdict = "land"
    lab.run(4)
    assert lab.names()[-1] == "MemoryReleased" and lab.senders[0].state_of(operation) == "DRAINED"
    assert said(lab, ReadOver)[-1].complete is False
    assert lab.sent_names()[-1] == "SourceReleased"
    assert lab.events[-1].unfilled == ("block 0", "a shared block")


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_dead_readers_loan_comes_back_with_its_death_on_any_transport(make_lab, executor):
    """Nobody uses what a dead reader read; a reader that only cannot be heard may be alive."""
    lab = make_lab(1, executor=executor, landing=Gate())
    operation = reading(lab)
    sender = lab.senders[0]
    sender.seal(KEY)
    sender.peer_died(lab.peer, PeerEvidence.CONNECTION_LOST)
    lab.run(2, receiver=False)
    assert sender.state_of(operation) == "LENT_IN_DOUBT" and "SourceReleased" not in lab.sent_names()
    lab.world.kill(lab.peer)
    sender.peer_died(lab.peer, PeerEvidence.PROCESS_REAPED)
    lab.run(2, receiver=False)
    assert sender.state_of(operation) == "RESOLVED" and lab.sent_names()[-1] == "SourceReleased"
    assert [proof.kind for proof in lab.sent[0][-1].proven.proofs] == [ProofKind.READER_DEAD]


@pytest.mark.parametrize(
    ("executor", "state"),
    [
        (WriteExecutor.RECEIVER, "RESOLVED"),
        (WriteExecutor.NIC, "RESOLVED"),
        (WriteExecutor.SENDER, "LENT_IN_DOUBT"),
    ],
)
def test_our_agents_end_ends_a_loan_where_our_agent_serves_it(make_lab, executor, state):
    """Over CMA a living reader needs no agent of ours: then only its death counts."""
    lab = make_lab(1, executor=executor, landing=Gate())
    operation = reading(lab)
    lab.senders[0].retire_peer("gen", "g1")
    assert lab.senders[0].state_of(operation) == state
    assert lab.world._can_land(lab.world.writes[0]) is (state != "RESOLVED"), "the fake agrees with the rule"


# --- the reader's memory --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_read_that_ended_in_an_error_may_still_land_until_our_agent_is_gone(make_lab, executor):
    """Neither the error nor the source's death is proof; late bytes land in memory that is still owned."""
    gate = Gate()
    lab = make_lab(1, executor=executor, parts_max=64, landing=gate)
    operation = reading(lab)
    gate.verdict = "error"
    lab.run(4)
    assert lab.state(operation) == "READ_IN_DOUBT" and lab.names() == ["TransferFailed"]
    assert said(lab, Doubt) and lab.senders[0].state_of(operation) == "LENT_IN_DOUBT"
    lab.kill(0)
    lab.receiver.peer_died(lab.senders[0].self_id, PeerEvidence.PROCESS_REAPED)
    assert lab.run(2) == []
    assert lab.world.land_everything() == 1, "the fake lands what had left the source"
    lab.receiver.retire_peer("ctx", "c1")
    assert lab.run(1) == ["MemoryReleased"]
    lab.target[:] = 0xEE
    assert lab.world.land_everything() == 0 and bool((lab.target == 0xEE).all())
    (proof,) = lab.events[-1].proven.proofs
    assert proof.kind is ProofKind.CLASS and lab.events[-1].unfilled == ("block 0", "a shared block")


def test_a_source_that_dies_while_it_is_read_fails_the_transfer_and_its_agents_end_frees_it(make_lab):
    lab = make_lab(1, landing=Gate())
    operation = reading(lab)
    lab.kill(0)
    lab.receiver.peer_died(lab.senders[0].self_id, PeerEvidence.PROCESS_REAPED)
    lab.run(1)
    assert lab.names() == ["TransferFailed"] and lab.state(operation) == "STOPPING"
    lab.receiver.retire_peer("ctx", "c1")
    assert lab.run(1) == ["MemoryReleased"]


def test_without_a_proof_the_readers_memory_is_quarantined_and_its_sender_told(make_lab):
    lab = make_lab(1, landing=Gate())
    operation = reading(lab)
    lab.receiver.cancel(lab.identity())
    lab.run(2)
    lab.clock.advance(10.1)
    lab.run(4)
    assert lab.names() == ["TransferCancelled", "MemoryQuarantined"]
    assert lab.senders[0].state_of(operation) == "LENT_IN_DOUBT"


def test_a_cancel_while_reading_waits_for_what_began_and_stays_cancelled(make_lab):
    gate = Gate()
    lab = make_lab(1, landing=gate)
    operation = reading(lab)
    lab.receiver.cancel(lab.identity())
    lab.run(1)
    assert lab.names() == ["TransferCancelled"] and lab.state(operation) == "STOPPING"
    gate.verdict = "land"
    lab.run(4)
    assert lab.names() == ["TransferCancelled", "MemoryReleased"]
    lab.senders[0].seal(KEY)
    lab.run(2)
    assert lab.senders[0].snapshot(KEY).outcome in ("CANCELLED", "COMPLETED")
    assert lab.sent_names()[-1] == "SourceReleased"


def test_a_session_made_again_waits_for_its_predecessors_reads(make_lab):
    """They land in the same process's memory, whatever the new object knows of it: stopped, named, and then it goes on."""
    gate = Gate()
    lab = make_lab(1, landing=gate, parts_max=1)
    reading(lab, 4)
    lab.receiver = Receiver(
        lab.peer,
        SessionResources(lab.receiver._transport, lab.network.channel(lab.peer), arena=lab.arena, clock=lab.clock),
        lab.config,
        ledger=ExposureLedger(),  # even what is still exposed is not remembered
    )
    lab.introduce()
    lab.open(2)
    lab.run(2)
    assert lab.names()[-2:] == ["TransferFailed", "MemoryReleased"]
    assert "earlier session" in lab.events[-2].reason
    gate.verdict = "land"
    lab.run(20)
    assert 0 < len(lab.world.landed) < 8, "stopped before all was begun"
    lab.open(3)
    lab.ready(3)
    lab.run(20)
    assert lab.names()[-2:] == ["TransferSucceeded", "MemoryReleased"]


def rebuilt(lab, transport):
    """The receiver made again in this process, over that transport."""
    resources = SessionResources(transport, lab.network.channel(lab.peer), arena=lab.arena, clock=lab.clock)
    return Receiver(lab.peer, resources, lab.config, ledger=ExposureLedger())


def test_a_session_made_again_stops_reads_that_nobody_asks_it_about(make_lab):
    """The source's process stands still, so no recall comes: the new session finds what its transport reads, and stops it."""
    gate = Gate()
    lab = make_lab(1, executor=WriteExecutor.SENDER, landing=gate, parts_max=1)
    reading(lab, 4)
    lab.receiver = rebuilt(lab, lab.receiver._transport)
    lab.open(2)
    lab.run(2, senders=[])
    assert lab.names() == ["TransferFailed", "MemoryReleased"] and "earlier session" in lab.events[0].reason
    gate.verdict = "land"
    lab.run(20, senders=[])
    assert 0 < len(lab.world.landed) < 8, "stopped before all was begun"


def test_a_session_made_again_gives_back_what_its_predecessor_was_lent(make_lab):
    """The same agent read it, so the new session can tell: not before the read has ended, and then nothing is quarantined."""
    gate = Gate()
    lab = make_lab(1, landing=gate, parts_max=1)
    operation = reading(lab)
    sender = lab.senders[0]
    lab.receiver = rebuilt(lab, lab.receiver._transport)
    lab.introduce()
    lab.run(10)
    assert sender.state_of(operation) == "LENT_IN_DOUBT" and not said(lab, ReadOver)
    gate.verdict = "land"
    lab.run(10)
    assert 0 < len(lab.world.landed) < 8, "stopped before all was begun"
    assert sender.state_of(operation) == "DRAINED" and said(lab, ReadOver)[-1].complete is False
    sender.seal(KEY)
    lab.run(2)
    assert lab.sent_names()[-1] == "SourceReleased" and not lab.receiver._owed


def test_another_agent_says_nothing_about_what_this_one_reads(make_lab):
    """Made again over another transport, or a process under a restored name: its word is not the reader's, asked or unasked."""
    lab = make_lab(1, landing=Gate())
    operation = reading(lab)
    sender = lab.senders[0]
    lab.receiver = rebuilt(lab, lab.world.transport(lab.peer))
    lab.introduce()
    lab.run(4)
    lab.inject(lab.peer, sender.self_id, ReadOver(operation, False, "trust me"))
    before = sender.statistics().get("foreign", 0)
    lab.run(3)
    assert sender.state_of(operation) == "LENT_IN_DOUBT" and sender.statistics()["foreign"] == before + 1
    assert not said(lab, Cancel)


# --- planners -------------------------------------------------------------------------------------------------------


def test_another_plan_at_the_reader_reads_nothing(make_lab):
    """Fewer bytes, or other places than those it asked for: the operation fails by name and the loan goes back."""
    lab = make_lab(1)
    good = lab.plan(0)
    other = WriterPlan(0, good.writer.target_addresses + 1, good.sizes, 8, 8)
    fewer = WriterPlan(0, good.writer.target_addresses[:7], good.sizes[:7], 7, 7)
    answers = {
        1: (WriterTransfer(other, good.source_addresses, other.target_addresses, good.sizes, 8), "different plans"),
        2: (WriterTransfer(fewer, good.source_addresses[:7], fewer.target_addresses, fewer.sizes, 7), "448 bytes"),
    }
    for request, (answer, reason) in answers.items():
        plan = lab.plan(0, request=1).writer
        asked = ExpectedOperation(
            lab.senders[0].self_id, plan.total_bytes, b"", plan, "pull", resolve=lambda _p, a=answer: a
        )
        lab.receiver.open(lab.identity(request), [asked])
        lab.ready(request)
        lab.run(8)
        assert lab.names()[-2:] == ["TransferFailed", "MemoryReleased"] and reason in lab.events[-2].reason
        assert lab.sent_names()[-2:] == ["OperationFailed", "RequestServed"] and not lab.world.writes


@pytest.mark.parametrize("side", ["reader", "sender", "wrong answer"])
def test_a_planner_that_fails_ends_its_operation_with_nothing_lent_or_read(make_lab, side):
    lab = make_lab(1)

    def fails(_anything):
        raise ZeroDivisionError("no plan")

    plan = lab.plan(0).writer
    resolve = fails if side == "reader" else lambda _payload: lab.plan(0)
    asked = ExpectedOperation(lab.senders[0].self_id, plan.total_bytes, b"", plan, "pull", resolve=resolve)
    (operation,) = lab.receiver.open(lab.identity(), [asked])
    answer = {"sender": fails, "reader": lambda _a: Loan(b""), "wrong answer": lambda _a: lab.plan(0)}[side]
    lab.senders[0].ready(KEY, answer)
    lab.run(8)
    assert lab.names() == ["TransferFailed", "MemoryReleased"] and not lab.world.writes
    assert ("ZeroDivisionError" if side != "wrong answer" else "wants a Loan") in lab.events[0].reason
    assert lab.senders[0].state_of(operation) == ("DRAINED" if side == "reader" else "SEALED")
    assert bool(said(lab, ReadOffer)) is (side == "reader")


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_source_that_would_have_to_serve_reads_lends_only_if_it_is_told_to(make_lab, executor):
    """The library ends a process that serves a reader which dies; where the reader or a NIC reads, nothing is served."""
    lab = make_lab(1, executor=executor)
    lab.senders[0].config = replace(lab.config, serves_reads=False)
    lab.open(tier="pull")
    lab.ready()
    lab.run()
    if executor is WriteExecutor.RECEIVER:
        assert lab.names() == ["TransferFailed", "MemoryReleased"] and "set serves_reads" in lab.events[0].reason
        assert not said(lab, ReadOffer)
    else:
        assert lab.names() == ["TransferSucceeded", "MemoryReleased"]


def test_of_two_offers_the_first_is_read(make_lab):
    """A repeated offer may say something else only by mistake: planned once, from what came first."""
    lab, asked = make_lab(1), []
    plan_by = lab.plan_by
    lab.plan_by = lambda *arguments: asked.append(arguments) or plan_by(*arguments)
    (operation,) = lab.open(tier="pull")
    lab.ready()
    lab.run(1)
    lab.senders[0].poll()
    assert said(lab, ReadOffer)
    lab.inject(lab.senders[0].self_id, lab.peer, ReadOffer(operation, "DRAM", 0, b"other blocks"))
    lab.run()
    assert lab.names() == ["TransferSucceeded", "MemoryReleased"] and lab.in_place() and len(asked) == 1


def test_of_two_offers_before_its_plan_one_is_planned():
    """The core asks for one plan, however often the loan is offered before the planner has answered."""
    operation = OperationIdentity(TransferIdentity(1, 0, "g1", 0), 0, 0)
    request = ReceiveRequest(operation, "c1", 8, b"", False, True, "kv", "DRAM", 0, b"")
    spec = OperationSpec(operation, PeerId("ctx", "c1", 0), request)
    core = ReceiveTransfer(operation.transfer, [spec], required=frozenset(), drain_deadline_s=1.0)
    core.step(Published(), 0.0)
    offer = MessageArrived(ReadOffer(operation, "DRAM", 0, b"blocks"))
    assert core.step(offer, 0.0) == (Resolve(operation),)
    assert core.step(offer, 0.0) == ()
    assert core.step(Resolved(operation), 0.0) == (StartRead(operation),)
    assert core.step(offer, 0.0) == () and core.state_of(operation) is ReceiveState.READING


def test_a_reader_that_gives_a_loan_back_unread_has_cancelled(make_lab):
    """The reader is asked to end before it reads: no failure of the sender, and its snapshot says so."""
    lab = make_lab(1)
    (operation,) = lab.open(tier="pull")
    lab.ready()
    lab.run(1)
    lab.senders[0].poll()
    assert lab.senders[0].state_of(operation) == "LENT"
    lab.receiver.cancel(lab.identity())
    lab.run(3)
    lab.senders[0].seal(KEY)
    lab.run(2)
    assert lab.senders[0].snapshot(KEY).outcome == "CANCELLED" and not lab.world.writes


def test_a_loan_is_no_answer_to_a_push(make_lab):
    lab = make_lab(1)
    lab.open()
    lab.senders[0].ready(KEY, lambda _asked: Loan(b""))
    lab.run(6)
    assert lab.names() == ["TransferFailed", "MemoryReleased"] and "wants a WriterTransfer" in lab.events[0].reason


def test_a_transport_that_cannot_read_fails_the_operation_by_name(make_lab, monkeypatch):
    lab = make_lab(1)

    def refuses(job: TransferJob) -> None:
        raise NotImplementedError("no reads here")

    monkeypatch.setattr(lab.receiver._transport, "start", refuses)
    lab.open(tier="pull")
    lab.ready()
    lab.run(8)
    assert lab.names() == ["TransferFailed", "MemoryReleased"] and "no reads here" in lab.events[0].reason
    assert "OperationFailed" in lab.sent_names()


# --- what is said ---------------------------------------------------------------------------------------------------


def test_a_last_word_that_was_lost_is_said_again_when_the_sender_asks(make_lab):
    """The link breaks with the reader's word under way: the offer is repeated on the next one and answered."""
    lab = make_lab(1, linked=True, executor=WriteExecutor.SENDER)
    (operation,) = lab.open(tier="pull")
    lab.ready()
    lab.run(2)
    lab.run(10, senders=[])
    assert lab.names() == ["TransferSucceeded", "MemoryReleased"]
    assert lab.network.sever(lab.peer, lab.senders[0].self_id) > 0
    lab.run(2)
    assert lab.senders[0].state_of(operation) == "LENT"
    lab.network.heal(lab.peer, lab.senders[0].self_id)
    lab.run(6)
    assert lab.senders[0].state_of(operation) == "DONE"
    assert len(said(lab, ReadOffer)) == 2 and len(said(lab, ReadOver)) == 2


def test_a_recall_that_was_lost_with_its_link_is_repeated_on_the_next_one(make_lab):
    """The reader goes on in the meantime; then it stops, and what had begun is waited for."""
    gate = Gate()
    lab = make_lab(1, linked=True, landing=gate, parts_max=1)
    operation = reading(lab)
    sender = lab.senders[0]
    sender.fail(KEY, "preempted")
    lab.run(1, receiver=False)
    assert sender.state_of(operation) == "RECALLED"
    lab.network.sever(lab.peer, sender.self_id)
    lab.run(2)
    assert lab.state(operation) == "READING"
    lab.network.heal(lab.peer, sender.self_id)
    lab.run(6)
    assert lab.state(operation) == "STOPPING" and said(lab, Cancel)
    gate.verdict = "land"
    lab.run(6)
    assert sender.state_of(operation) in ("DRAINED", "DONE") and lab.names()[-1] == "MemoryReleased"


def test_words_that_do_not_belong_to_a_loan_change_nothing(make_lab):
    """And a loan's words about a write are a contradiction, as any other is."""
    lab = make_lab(1, landing=Gate())
    operation = reading(lab)
    sender = lab.senders[0].self_id
    for message in (
        BounceWanted(operation, 512, b""),
        Drained(operation, 1, 1, ""),
        Doubt(operation, ""),
        ReadOffer(operation, "DRAM", 0, b"other blocks"),
    ):
        lab.inject(sender, lab.peer, message)
    lab.inject(lab.peer, sender, BounceGrant(operation, 4096, 512, "DRAM", 0))
    lab.run(2)
    assert lab.state(operation) == "READING" and lab.senders[0].state_of(operation) == "LENT"
    assert lab.receiver.statistics()["conflicts"] == 3 and lab.senders[0].statistics()["conflicts"] == 1
    (written,) = lab.open(2)
    lab.run(3)
    lab.inject(lab.peer, sender, ReadOver(written, True, ""))
    lab.run(2)
    assert lab.senders[0].statistics()["conflicts"] == 2 and lab.senders[0].state_of(written) == "HELD"
    lab.inject(sender, lab.peer, ReadOffer(written, "DRAM", 0, b""))
    lab.run(2)
    assert lab.state(written) == "CONFLICTED"


def test_a_sender_that_will_not_lend_says_so(make_lab):
    lab = make_lab(1)
    lab.open(tier="pull")
    lab.run(3)
    lab.senders[0].fail(KEY, "prefill failed")
    lab.run(4)
    assert lab.names() == ["TransferFailed", "MemoryReleased"] and said(lab, Sealed)[-1].reason == "prefill failed"


def test_a_planner_whose_fragments_leave_its_own_plan_reads_nothing(make_lab):
    """The digest is the plan's and the bytes add up, but one fragment would land elsewhere in our memory."""
    lab = make_lab(1)
    good = lab.plan(0)
    targets = good.target_addresses.copy()
    targets[3] += 64  # inside the buffer, outside of what was opened
    bent = WriterTransfer(good.writer, good.source_addresses, targets, good.sizes, 8)
    asked = ExpectedOperation(
        lab.senders[0].self_id, good.total_bytes, b"", good.writer, "pull", resolve=lambda _offer: bent
    )
    lab.receiver.open(lab.identity(), [asked])
    lab.ready()
    lab.run(8)
    assert lab.names() == ["TransferFailed", "MemoryReleased"] and "ReportRefused" in lab.events[0].reason
    assert not lab.world.writes and not lab.target.any()


def test_fragments_of_another_segmentation_are_the_same_plan(make_lab):
    """A source that is scattered more finely than the destination is read in more pieces."""
    lab = make_lab(1)
    good = lab.plan(0)
    halves = [np.repeat(each, 2) for each in (good.source_addresses, good.target_addresses)]
    for half in halves:
        half[1::2] += 32
    fine = WriterTransfer(good.writer, *halves, np.full(16, 32, np.int64), 16)
    asked = ExpectedOperation(
        lab.senders[0].self_id, good.total_bytes, b"", good.writer, "pull", resolve=lambda _offer: fine
    )
    lab.receiver.open(lab.identity(), [asked])
    lab.ready()
    lab.run(20)
    assert lab.names() == ["TransferSucceeded", "MemoryReleased"] and lab.in_place()


@pytest.mark.parametrize("tier", ["direct", "bounce", "pull"])
def test_a_planner_that_uses_its_arrays_again_changes_nothing(make_lab, tier):
    """They are looked at until the last part was posted, or scattered: what counts is what they were when they were checked."""
    lab = make_lab(1, parts_max=1)
    good, made = lab.plan(0), []

    def plan(_asked):
        arrays = [each.copy() for each in (good.source_addresses, good.target_addresses, good.sizes)]
        made.extend(arrays)
        own = WriterPlan(0, arrays[1], arrays[2], 8, 8)
        return WriterTransfer(own, *arrays, 8)

    expected = plan(None).writer
    reads = {"resolve": plan} if tier == "pull" else {}
    lab.receiver.open(
        lab.identity(), [ExpectedOperation(lab.senders[0].self_id, good.total_bytes, b"", expected, tier, **reads)]
    )
    lab.senders[0].ready(KEY, lambda asked: Loan(b"") if asked.pulls else plan(asked))
    for _ in range(30):
        lab.run(1)
        for array in made:
            array[:] = array[0]
    assert lab.names() == ["TransferSucceeded", "MemoryReleased"] and lab.in_place()


def test_no_planner_is_asked_about_what_is_over(make_lab):
    """One sender's offer and another one's refusal come in one poll: the blocks are the host's again before a plan is made."""
    lab, asked = make_lab(2), []
    plan_by = lab.plan_by
    lab.plan_by = lambda *arguments: asked.append(arguments) or plan_by(*arguments)
    first, second = lab.open(tier="pull")
    lab.run(3)
    lab.inject(lab.senders[0].self_id, lab.peer, ReadOffer(first, "DRAM", 0, b"blocks of 0"))
    lab.inject(lab.senders[1].self_id, lab.peer, Sealed(second, "prefill failed"))
    lab.run(1, senders=[])
    assert lab.names() == ["TransferFailed", "MemoryReleased"] and not asked


class Interrupt(BaseException):
    pass


@pytest.mark.parametrize("tier", ["direct", "pull"])
def test_an_interrupt_after_a_job_was_handed_over_does_not_deny_it(make_lab, monkeypatch, tier):
    """The transport has the job when the interrupt comes: it is neither begun again nor said to have never begun."""
    lab = make_lab(1, landing=Gate("hold"))
    side = lab.receiver if tier == "pull" else lab.senders[0]
    start, started = side._transport.start, []

    def interrupted(job):
        start(job)
        started.append(job.operation)
        raise Interrupt

    monkeypatch.setattr(side._transport, "start", interrupted)
    (operation,) = lab.open(tier=tier)
    lab.ready()
    with pytest.raises(Interrupt):
        lab.run(6)
    lab.run(3)
    assert started == [operation] and lab.names() == []
    assert side.state_of(operation) in ("READING", "POSTING", "IN_FLIGHT")
    lab.world.landing = Gate("land")
    lab.run(10)
    assert lab.names() == ["TransferSucceeded", "MemoryReleased"] and lab.in_place()


@pytest.mark.parametrize("point", [(receiver_module.heapq, "heappush"), (receiver_module, "bound")])
@pytest.mark.parametrize("tier", ["direct", "pull"])
def test_an_interrupt_while_a_transfer_is_opened_takes_nothing_over(make_lab, monkeypatch, tier, point):
    """The caller never hears an identity, so nothing may be published, and the blocks and addresses are free again."""
    lab = make_lab(1)
    original = getattr(*point)

    def interrupted(*arguments):
        original(*arguments)
        raise Interrupt

    with monkeypatch.context() as patched:
        patched.setattr(*point, interrupted)
        with pytest.raises(Interrupt):
            lab.open(tier=tier, blocks=["a block"])
    assert lab.run(3) == [] and not said(lab, ReceiveRequest) and lab.receiver.drain().quiescent
    lab.open(tier=tier, blocks=["a block"])
    lab.ready()
    lab.run(12)
    assert lab.names() == ["TransferSucceeded", "MemoryReleased"] and lab.in_place()


def test_an_interrupt_in_one_effect_loses_no_other(make_lab, monkeypatch):
    """Two reads are stopped by a cancel; the library is interrupted while it stops the first: the next poll stops both."""
    lab = make_lab(2, landing=Gate("hold"), parts_max=1)
    lab.open(tier="pull")
    lab.ready()
    lab.run(6)
    stop, stopped = lab.receiver._transport.stop, []

    def interrupted(operation):
        stop(operation)
        stopped.append(operation.writer_rank)
        if len(stopped) == 1:
            raise Interrupt

    monkeypatch.setattr(lab.receiver._transport, "stop", interrupted)
    with pytest.raises(Interrupt):
        lab.receiver.cancel(lab.identity())
    lab.world.landing = Gate("land")
    lab.run(12)
    assert stopped == [0, 0, 1] and lab.names() == ["TransferCancelled", "MemoryReleased"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tier": "pull", "resolve": lambda payload: payload}, "needs the plan of where its bytes land"),
        ({"tier": "direct", "resolve": lambda payload: payload}, "needs resolve"),
        ({"tier": "push"}, "tier wants direct, bounce or pull, got 'push'"),
    ],
)
def test_expected_operations_are_validated(make_lab, arguments, message):
    with pytest.raises(ValueError, match=message):
        ExpectedOperation(make_lab(1).senders[0].self_id, 8, **arguments)
    with pytest.raises(ValueError, match="exceeds"):
        Loan(bytes(PAYLOAD_BYTES_MAX + 1))


# --- blocks that were not filled ------------------------------------------------------------------------------------


def test_the_release_names_the_blocks_that_were_not_filled(make_lab):
    """One of three writers fails: its blocks, and those that it shares, are computed again; the others are used."""
    lab = make_lab(3)
    lab.open(tier=["direct", "pull", "direct"])
    lab.ready(ranks=[0, 2])
    lab.run(10)
    lab.senders[1].fail(KEY, "out of memory")
    lab.run(10)
    assert lab.names() == ["TransferFailed", "MemoryReleased"]
    assert lab.events[-1].unfilled == ("block 1", "a shared block")
    for rank in (0, 2):
        share = lab.target[lab._share(rank, 1) : lab._share(rank, 1) + lab.SHARE]
        assert np.count_nonzero(share) == 8 * 64, "what is not named is filled"


def test_bounced_bytes_that_were_never_scattered_are_not_filled(make_lab):
    """Landed in the region, valid report, but the transfer failed before its scatter."""
    lab = make_lab(2)
    lab.open(tier="bounce")
    lab.ready(ranks=[0])
    lab.run(10)
    lab.senders[1].fail(KEY, "no")
    lab.run(10)
    assert lab.names() == ["TransferFailed", "MemoryReleased"]
    assert lab.events[-1].unfilled == ("block 0", "a shared block", "block 1")
