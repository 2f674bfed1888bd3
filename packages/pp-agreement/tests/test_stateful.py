"""Hypothesis drives a group by rules and shrinks what it finds."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from pp_agreement import (
    Aborted,
    Agreement,
    AgreementConfig,
    Disposition,
    Domain,
    Fault,
    Finalized,
    FinalizeMode,
    InProcessNetwork,
    LocalProtocolError,
    Outcome,
    Prepared,
    Reason,
    Released,
    TerminalState,
    WouldBlock,
    verify,
)
from pp_agreement.testing import Monitor

SIZE = 3
members = st.integers(0, SIZE - 1)


class Group(RuleBasedStateMachine):
    """Local calls, single polls, stalled links and time, in any order; then everybody finishes and drains."""

    keys = Bundle("keys")

    @initialize(credits=st.integers(1, 3), coordinator=members, scheduler=members, window=st.integers(1, 3))
    def start(self, credits, coordinator, scheduler, window):
        self.now_s = 0.0
        self.domain = Domain(1, tuple(range(SIZE)), scheduling_rank=scheduler, coordinator_rank=coordinator)
        self.network = InProcessNetwork(self.domain, window, clock=lambda: self.now_s)
        config = AgreementConfig(credits=credits, frame_bytes_max=256, round_timeout_s=None, doubt_deadline_s=0.05)
        self.agreements = [
            Agreement(self.domain, r, self.network.transport(r), config, lambda: self.now_s) for r in range(SIZE)
        ]
        for agreement in self.agreements:
            agreement.open()
        self.scheduler = scheduler
        self.log = []
        self.schedule = []
        self.done = [0] * SIZE
        self.monitor = Monitor(SIZE, scheduler)
        self.released = []

    def poll_one(self, member):
        self.now_s += 0.01
        for event in self.agreements[member].poll():
            assert not isinstance(event, Fault), event
            if isinstance(event, Prepared):
                self.agreements[member].acknowledge_prepare(event.key)
            elif isinstance(event, Aborted):
                self.agreements[member].acknowledge_abort(event.key)
            elif isinstance(event, Released):
                self.released.append(event.key)
            elif isinstance(event, Finalized) and event.mode is FinalizeMode.REOPEN:
                self.agreements[member].withdraw(event.key._replace(attempt=event.key.attempt + 1), Reason.TIMEOUT)

    @rule(target=keys, ready=st.booleans())
    def admit(self, ready):
        authority = self.agreements[self.scheduler]
        number = authority.next_incarnation
        try:
            key = authority.admit(100 + number, number, ready)
        except WouldBlock:
            return (1, 1)
        self.log.append((key.request_id, number, ready))
        return (key.request_id, number)

    @rule(member=members)
    def hear(self, member):
        agreement = self.agreements[member]
        heard = agreement.next_incarnation - 1
        if heard < len(self.log):
            agreement.admit(*self.log[heard])

    @rule(member=members)
    def poll(self, member):
        self.poll_one(member)

    def current(self, member, name):
        from pp_agreement import Key

        key = Key(*name)
        state = self.agreements[member].state(key) if len(self.log) >= key.incarnation else None
        return None if state is None or not state.heard else key._replace(attempt=state.attempt)

    @rule(member=members, name=keys)
    def publish(self, member, name):
        key = self.current(member, name)
        if key is not None and self.log[key.incarnation - 1][0] == key.request_id:
            try:
                self.agreements[member].publish_ready(key)
            except LocalProtocolError as error:
                if "readiness" not in str(error):
                    raise

    @rule(member=members, name=keys, reason=st.sampled_from([Reason.CANCELLED, Reason.NOT_READY]))
    def withdraw(self, member, name, reason):
        key = self.current(member, name)
        if key is not None and self.log[key.incarnation - 1][0] == key.request_id:
            self.agreements[member].withdraw(key, reason)

    @rule(member=members, name=keys, outcome=st.sampled_from(list(Outcome)))
    def vote(self, member, name, outcome):
        key = self.current(member, name)
        if key is not None and self.log[key.incarnation - 1][0] == key.request_id:
            try:
                self.agreements[member].vote_terminal(key, outcome)
            except LocalProtocolError as error:
                if "immutable" not in str(error) and "attempt is open" not in str(error):
                    raise

    @rule(member=members, name=keys, quarantine=st.booleans())
    def doubt(self, member, name, quarantine):
        key = self.current(member, name)
        if key is None or self.log[key.incarnation - 1][0] != key.request_id:
            return
        agreement = self.agreements[member]
        state = agreement.state(key)
        if state.terminal is TerminalState.DOUBTED and quarantine:
            try:
                agreement.vote_terminal(key, Outcome.FAILED, Disposition.QUARANTINE, Reason.DOUBT)
            except LocalProtocolError as error:
                if "deadline" not in str(error):
                    raise
        elif state.terminal < TerminalState.VOTED and state.ready.name in ("NOT_USED", "ACTIVATED", "COMPLETE"):
            agreement.doubt(key)

    @rule(member=members, name=keys, seconds=st.sampled_from([0.0, 0.1, 5.0]))
    def advise(self, member, name, seconds):
        key = self.current(member, name)
        if key is not None and member != self.scheduler and self.log[key.incarnation - 1][0] == key.request_id:
            self.agreements[member].recall(key)
        self.agreements[member].busy(seconds)

    @rule()
    def activate(self):
        for key in self.released:
            state = self.agreements[self.scheduler].state(key)
            if state is not None and state.ready.name == "RELEASED" and state.attempt == key.attempt:
                self.agreements[self.scheduler].activate([key])
                self.schedule.append(key)
        self.released.clear()

    @rule(member=members)
    def follow(self, member):
        if member != self.scheduler and self.done[member] < len(self.schedule):
            self.agreements[member].activate([self.schedule[self.done[member]]])
            self.done[member] += 1

    @rule()
    def revoke(self):
        for key in self.released[:1]:
            self.agreements[self.scheduler].revoke(key)

    @rule(a=members, b=members, stalled=st.booleans())
    def stall(self, a, b, stalled):
        if a != b:
            (self.network.hold if stalled else self.network.release)(a, b)

    @invariant()
    def holds(self):
        for agreement in getattr(self, "agreements", ()):
            agreement.validate()

    def teardown(self):
        if not hasattr(self, "agreements"):
            return
        self.network.held.clear()
        self.activate()
        self.agreements[self.scheduler].start_drain(len(self.log))
        for _ in range(200):
            for member, agreement in enumerate(self.agreements):
                self.hear(member)
                while member != self.scheduler and self.done[member] < len(self.schedule):
                    self.follow(member)
                self.poll_one(member)
                for key in agreement.drain_state().undecided:
                    state = agreement.state(key)
                    if state.heard and state.terminal.name in ("OPEN", "DOUBTED") and state.ready.name in (
                        "NOT_USED", "ACTIVATED", "COMPLETE", "FINALIZED",
                    ):  # fmt: skip
                        agreement.vote_terminal(key, Outcome.COMPLETED)
            if all(a.drain_state().drained for a in self.agreements):
                break
        assert [d for d in verify([a.evidence() for a in self.agreements]) if d.field != "verdict"] == []


Group.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestGroup = Group.TestCase
