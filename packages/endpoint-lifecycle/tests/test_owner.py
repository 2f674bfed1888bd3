"""The owner side: table, stories, the one capability, the byte account, admission, draining, retiring."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from endpoint_lifecycle import (
    TRANSITIONS,
    AlreadyOwned,
    Draining,
    EndpointError,
    EndpointOwner,
    EndpointProfile,
    EndpointSlot,
    EstimationNotClosed,
    InFlight,
    InvalidTransition,
    LocalProtocolError,
    NotFinal,
    NotReady,
    OwnerEvent,
    OwnerState,
    ProtocolViolation,
    PublishCapability,
    RecordInvalid,
    StaleGeneration,
    server_info_body,
)

A = ("tcp://10.0.0.1:7000",)
B = ("tcp://10.0.0.1:7001",)


def new_owner(slot: EndpointSlot | None = None) -> EndpointOwner:
    return EndpointOwner("ctx-0", "i1", "context", slot)


def in_state(state: OwnerState) -> EndpointOwner:
    owner = new_owner()
    if state is OwnerState.NEW:
        return owner
    if state is OwnerState.ESTIMATING:
        owner.begin_estimation().opened("listener")
        return owner
    if state is OwnerState.ESTIMATED:
        with owner.begin_estimation():
            pass
        return owner
    if state is OwnerState.FAILED:
        owner.fail("broken")
        return owner
    capability = owner.finalize()
    if state is OwnerState.FINAL:
        return owner
    record = capability.publish(A)
    if state is OwnerState.PUBLISHED:
        return owner
    owner.start_draining()
    if state is OwnerState.DRAINING:
        return owner
    assert owner.retire(record.generation)
    return owner


#: What a caller does to make each event happen.
DO: dict[OwnerEvent, Any] = {
    OwnerEvent.ESTIMATION_BEGAN: lambda owner: owner.begin_estimation(),
    OwnerEvent.FINALIZED: lambda owner: owner.finalize(),
    OwnerEvent.PUBLISHED: lambda owner: owner._publish(B, EndpointProfile()),
    OwnerEvent.DRAINING_STARTED: lambda owner: owner.start_draining(),
    OwnerEvent.FAILED: lambda owner: owner.fail("x"),
}


@pytest.mark.parametrize("state", list(OwnerState))
@pytest.mark.parametrize("event", list(DO))
def test_every_state_and_event_follows_the_table(state: OwnerState, event: OwnerEvent) -> None:
    """A pair in the table leads where it says; any other raises with the story and changes nothing."""
    owner = in_state(state)
    owner.validate()
    assert owner.state is state
    target = TRANSITIONS.get((state, event))
    before = owner.record()
    if target is not None:
        DO[event](owner)
        assert owner.state is target
    elif (state, event) in {(OwnerState.DRAINING, OwnerEvent.DRAINING_STARTED), (OwnerState.FAILED, OwnerEvent.FAILED)}:
        DO[event](owner)  # repeated: a no-op
        assert owner.state is state
    else:
        with pytest.raises(LocalProtocolError) as caught:
            DO[event](owner)
        assert owner.state is state
        assert owner.record() == before
        if state is not OwnerState.NEW:
            assert caught.value.story == owner.story()
            assert str(caught.value.story[-1]) in str(caught.value)
    owner.validate()


def test_failed_is_reachable_from_any_state_but_retired() -> None:
    sources = {state for (state, event) in TRANSITIONS if event is OwnerEvent.FAILED}
    assert sources == set(OwnerState) - {OwnerState.RETIRED, OwnerState.FAILED}
    owner = in_state(OwnerState.PUBLISHED)
    assert owner.fail("first")
    assert not owner.fail("second")
    assert owner.failure == "first"
    assert owner.record() is None
    with pytest.raises(InvalidTransition):
        in_state(OwnerState.RETIRED).fail("late")


def test_estimation_runtime_never_publishes_and_its_bytes_stay_counted() -> None:
    owner = new_owner()
    with owner.begin_estimation() as runtime:
        runtime.opened("listener tcp://10.0.0.1:9999")
        runtime.opened("kv", size_bytes=1000)
        runtime.opened("bounce", size_bytes=300)
        with pytest.raises(NotFinal) as caught:
            runtime.publish(A, EndpointProfile())
        assert caught.value.state == "estimating"
        runtime.closed("kv")
        runtime.opened("scratch", size_bytes=500)
        for name in ("bounce", "scratch", "listener tcp://10.0.0.1:9999"):
            runtime.closed(name)
    account = owner.estimation_account()
    assert account.peak_bytes == 1300
    assert account.bytes_by_resource["kv"] == 1000
    assert account.open_resources == ()
    owner.finalize().publish(A)
    assert owner.estimation_account().peak_bytes == 1300
    with pytest.raises(NotFinal):
        runtime.publish(A)


def test_estimation_without_proof_of_close_blocks_the_final_runtime() -> None:
    owner = new_owner()
    runtime = owner.begin_estimation()
    runtime.opened("listener")
    with pytest.raises(EstimationNotClosed) as caught:
        runtime.close()
    assert caught.value.resources == ("listener",)
    assert owner.state is OwnerState.ESTIMATING
    with pytest.raises(EstimationNotClosed):
        owner.finalize()
    runtime.closed("listener")
    runtime.close()
    runtime.close()
    owner.finalize()


def test_an_estimation_that_breaks_ends_the_lifetime() -> None:
    owner = new_owner()
    with pytest.raises(MemoryError), owner.begin_estimation() as runtime:
        runtime.opened("kv", 5)
        raise MemoryError("no room")
    assert owner.state is OwnerState.FAILED
    assert owner.failure is not None and "no room" in owner.failure
    with pytest.raises(InvalidTransition):
        owner.finalize()


@pytest.mark.parametrize(
    "misuse",
    [
        lambda r: (r.opened("a"), r.opened("a")),
        lambda r: r.closed("never"),
        lambda r: r.opened("a", -1),
        lambda r: (r.close(), r.opened("late")),
    ],
)
def test_misuse_of_the_account_is_refused(misuse: Any) -> None:
    with pytest.raises(LocalProtocolError):
        misuse(new_owner().begin_estimation())


def test_second_estimation_is_counted_together_with_the_first() -> None:
    owner = new_owner()
    for size in (10, 30, 20):
        with owner.begin_estimation() as runtime:
            runtime.opened("kv", size)
            runtime.closed("kv")
    assert owner.estimation_account().peak_bytes == 30


def test_capability_is_given_once_and_cannot_be_made() -> None:
    owner = new_owner()
    with pytest.raises(AlreadyOwned):
        PublishCapability(owner)
    owner.finalize()
    with pytest.raises(AlreadyOwned):
        owner.finalize()
    with pytest.raises(AlreadyOwned):
        PublishCapability(owner)


def test_publish_is_idempotent_for_the_same_and_refused_for_another_record() -> None:
    owner = new_owner()
    capability = owner.finalize()
    first = capability.publish(A, EndpointProfile(limits={"tokens": 1}))
    assert capability.publish(list(A), EndpointProfile(limits={"tokens": 1})) == first
    for other in ((B, EndpointProfile(limits={"tokens": 1})), (A, EndpointProfile(limits={"tokens": 2})), (A, None)):
        with pytest.raises(ProtocolViolation):
            capability.publish(*other)
    assert owner.record() == first
    owner.start_draining()
    assert capability.publish(A, EndpointProfile(limits={"tokens": 1})).state == "draining"


def test_bad_record_is_not_published() -> None:
    owner = new_owner()
    capability = owner.finalize()
    for addresses in ((), ("tcp://0.0.0.0:1",), A + A, (*A, *B)):
        with pytest.raises(RecordInvalid):
            capability.publish(addresses)
        assert owner.state is OwnerState.FINAL
        assert owner.slot.current() is None
    capability.publish(A)


def test_published_record_is_a_copy_both_ways() -> None:
    owner = new_owner()
    profile = EndpointProfile(details={"layers": [1, 2]})
    record = owner.finalize().publish(A, profile)
    profile.details["layers"].append(3)
    record.profile.details["layers"].append(4)
    current = owner.record()
    assert current is not None and current.profile.details == {"layers": [1, 2]}
    view = owner.slot.current()
    assert view is not None and view.record == current


def test_generation_is_long_random_and_new_per_lifetime() -> None:
    seen = {new_owner().finalize().publish(A).generation for _ in range(200)}
    assert len(seen) == 200
    assert all(g is not None and len(g) == 32 for g in seen)


def test_retire_is_compare_and_delete() -> None:
    slot = EndpointSlot("ctx-0")
    old = new_owner(slot)
    g1 = old.finalize().publish(A).generation
    old.start_draining()
    new = new_owner(slot)
    g2 = new.finalize().publish(A).generation
    assert slot.generation == g2
    assert not new.retire(g1)
    assert not old.retire(g2)
    assert not old.retire(None)
    assert old.retire(g1)
    assert not old.retire(g1)
    assert slot.generation == g2
    assert not slot.delete(g1)
    with pytest.raises(InvalidTransition):
        new.retire(g2)  # it is not draining
    old.validate()
    new.validate()


def test_two_published_lifetimes_in_one_slot_are_refused() -> None:
    slot = EndpointSlot("ctx-0")
    new_owner(slot).finalize().publish(A)
    second = new_owner(slot).finalize()
    with pytest.raises(AlreadyOwned):
        second.publish(B)
    with pytest.raises(LocalProtocolError):
        EndpointOwner("other", "i", "context", slot)


def test_admission_refuses_before_anything_is_touched() -> None:
    owner = new_owner()
    with pytest.raises(NotReady):
        owner.admit(None)
    record = owner.finalize().publish(A)
    with pytest.raises(StaleGeneration) as caught:
        owner.admit("g-old")
    assert (caught.value.expected, caught.value.current) == ("g-old", record.generation)
    with owner.admit(record.generation) as admission:
        assert owner.in_flight == 1
        owner.start_draining()
        with pytest.raises(Draining):
            owner.admit(record.generation)
        continuation = owner.admit(record.generation, new_work=False)
        with pytest.raises(InFlight) as left:
            owner.retire(record.generation)
        assert left.value.count == 2
        assert continuation.finish()
        assert not continuation.finish()
    assert not admission.finish()
    assert owner.in_flight == 0
    assert owner.retire(record.generation)
    with pytest.raises(StaleGeneration):
        owner.admit(record.generation)
    statistics = owner.statistics()
    assert (statistics.admitted, statistics.finished, statistics.abandoned) == (2, 2, 0)
    assert (statistics.refused_stale, statistics.refused_draining, statistics.refused_not_ready) == (2, 1, 1)


def test_drain_deadline_abandons_the_rest_and_counts_it() -> None:
    owner = new_owner()
    g = owner.finalize().publish(A).generation
    admission = owner.admit(g)
    owner.start_draining()
    assert owner.retire(g, abandon=True)
    assert owner.state is OwnerState.RETIRED
    assert not admission.finish()
    owner.validate()
    assert owner.statistics().abandoned == 1


def test_story_keeps_the_latest_and_shows_the_gap() -> None:
    owner = new_owner()
    g = owner.finalize().publish(A).generation
    owner.start_draining()
    for number in range(100):
        owner.retire(f"other-{number}")
    story = owner.story()
    assert len(story) == 64
    assert story[-1].sequence == 103
    assert story[0].sequence == 40
    assert g


def test_racing_publishers_and_readers_see_one_publication() -> None:
    """Threads claim, publish and read at once: one capability, one generation, no torn read."""
    for _ in range(20):
        owner = new_owner()
        claimed: list[PublishCapability] = []
        bodies: list[dict[str, Any]] = []
        start = threading.Barrier(6)

        def claim(
            owner: EndpointOwner = owner, claimed: list[PublishCapability] = claimed, start: threading.Barrier = start
        ) -> None:
            start.wait()
            try:
                capability = owner.finalize()
            except AlreadyOwned:
                return
            claimed.append(capability)
            capability.publish(A, EndpointProfile(limits={"tokens": 7}))

        def read(
            owner: EndpointOwner = owner, bodies: list[dict[str, Any]] = bodies, start: threading.Barrier = start
        ) -> None:
            start.wait()
            for _ in range(50):
                bodies.append(server_info_body(owner))

        threads = [threading.Thread(target=f) for f in (claim, claim, claim, read, read, read)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(claimed) == 1
        for body in bodies:
            if body["ready"]:
                assert body["generation"] == owner.generation
                assert body["control_addresses"] == list(A)
                assert body["profile"]["limits"] == {"tokens": 7}
            else:
                assert "generation" not in body and "control_addresses" not in body


class OwnerMachine(RuleBasedStateMachine):
    """Successive lifetimes in one slot against a dumb model: what may be read is what was published last."""

    def __init__(self) -> None:
        super().__init__()
        self.slot = EndpointSlot("ctx-0")
        self.owners: list[EndpointOwner] = []
        self.runtimes: dict[int, Any] = {}
        self.capabilities: dict[int, PublishCapability] = {}
        self.admissions: list[tuple[EndpointOwner, Any]] = []
        self.ever_published: list[str] = []
        self.epochs: list[int] = []
        self.current: str | None = None  # the model: generation in the slot

    @rule()
    @precondition(lambda self: len(self.owners) < 4)
    def start(self) -> None:
        self.owners.append(EndpointOwner("ctx-0", f"i{len(self.owners)}", "context", self.slot))

    @rule(data=st.data())
    @precondition(lambda self: self.owners)
    def act(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.owners) - 1))
        owner = self.owners[index]
        action = data.draw(
            st.sampled_from(
                ["estimate", "end", "finalize", "publish", "drain", "retire", "retire_other", "fail", "admit"]
            )
        )
        try:
            self.perform(action, index, owner, data)
        except EndpointError:
            pass

    def perform(self, action: str, index: int, owner: EndpointOwner, data: st.DataObject) -> None:
        if action == "estimate":
            runtime = owner.begin_estimation()
            runtime.opened("x", data.draw(st.integers(0, 9)))
            self.runtimes[index] = runtime
        elif action == "end" and index in self.runtimes:
            self.runtimes[index].closed("x")
            self.runtimes[index].close()
        elif action == "finalize":
            self.capabilities[index] = owner.finalize()
        elif action == "publish" and index in self.capabilities:
            before = owner.state
            record = self.capabilities[index].publish(A)
            if before is OwnerState.FINAL:
                assert record.generation is not None
                self.ever_published.append(record.generation)
                self.epochs.append(owner.statistics().epoch)
                self.current = record.generation
        elif action == "drain":
            owner.start_draining()
        elif action == "retire":
            generation = owner.generation
            if owner.retire(generation, abandon=data.draw(st.booleans())) and self.current == generation:
                self.current = None
        elif action == "retire_other" and self.ever_published:
            generation = data.draw(st.sampled_from(self.ever_published))
            if generation != owner.generation:
                assert not owner.retire(generation)
        elif action == "fail":
            generation = owner.generation
            if owner.fail("x") and generation is not None and self.current == generation:
                self.current = None
        elif action == "admit":
            self.admissions.append((owner, owner.admit(owner.generation)))

    @rule(data=st.data())
    @precondition(lambda self: self.admissions)
    def finish(self, data: st.DataObject) -> None:
        owner, admission = self.admissions.pop(data.draw(st.integers(0, len(self.admissions) - 1)))
        before = owner.in_flight
        if admission.finish():
            assert owner.in_flight == before - 1

    @invariant()
    def sound(self) -> None:
        for owner in self.owners:
            owner.validate()
        assert self.slot.generation == self.current
        published = [o for o in self.owners if o.state is OwnerState.PUBLISHED]
        assert len(published) <= 1
        assert len(set(self.ever_published)) == len(self.ever_published)
        assert self.epochs == sorted(set(self.epochs))


OwnerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestOwnerMachine = OwnerMachine.TestCase


@pytest.mark.parametrize("state", [s for s in OwnerState if s not in (OwnerState.RETIRED, OwnerState.FAILED)])
def test_a_failure_ends_every_lifetime(state: OwnerState) -> None:
    """Whatever a lifetime was at: it has failed, for ever, with its reason."""
    owner = in_state(state)
    assert owner.fail("out of memory")
    assert (owner.state, owner.failure) == (OwnerState.FAILED, "out of memory")
    with pytest.raises(LocalProtocolError):
        owner.begin_estimation()
    assert owner.state is OwnerState.FAILED
