"""The blocking baseline's core, replicated on every rank: any hosts, one exchange after another, the same decisions in each."""

from __future__ import annotations

import random

import pytest

from pp_agreement import (
    Aborted,
    AgreementConfig,
    AgreementCore,
    AgreementEvent,
    Disposition,
    Domain,
    Fault,
    FaultCode,
    Finalized,
    FinalizeMode,
    Key,
    LocalProtocolError,
    Outcome,
    Prepared,
    ReadyState,
    Reason,
    Released,
    TerminalState,
    WouldBlock,
)
from pp_agreement import _events as ev
from pp_agreement._events import Answer, SendFrame
from pp_agreement._state import FENCE, TerminalInput
from pp_agreement._streams import EXCHANGE
from pp_agreement.testing import Monitor

SAID = {1: "publish", 2: "withdraw", 3: "ack", 4: "activate", 5: "abort_ack", 6: "revoke", 8: "terminal"}


class Group:
    """Cores in lockstep: hosts act at random between exchanges; every exchange reaches all of them."""

    def __init__(self, seed, skewed):
        self.draw = draw = random.Random(seed)
        self.skewed = skewed
        self.log = []
        size = draw.choice((1, 2, 3, 4))
        ranks = tuple(range(size))
        self.domain = Domain(1, ranks, scheduling_rank=draw.choice(ranks), coordinator_rank=draw.choice(ranks))
        self.scheduler = self.domain.scheduler_index
        config = AgreementConfig(credits=draw.choice((1, 2, 4)), round_timeout_s=None, doubt_deadline_s=0.0)
        self.cores = [AgreementCore(self.domain, r, config, replicated=True) for r in ranks]
        self.monitor = Monitor(size, self.scheduler)
        self.released, self.schedule, self.followed = [], [], [0] * size
        self.todo = [[] for _ in ranks]
        self.planned = draw.randint(1, 8)
        for me, core in enumerate(self.cores):
            self.listen(me, core)

    def listen(self, me, core):
        said = core.streams.say

        def say(round_, slot, kind, outcome=0, disposition=0, reason=0):
            if kind in SAID:
                key = Key(round_.request_id, round_.incarnation, round_.attempt)
                self.monitor.did(me, SAID[kind], key, (outcome, disposition) if kind == 8 else ())
            said(round_, slot, kind, outcome, disposition, reason)

        core.streams.say = say

    def call(self, me, event):
        effects = self.cores[me].step(event, 0.0)
        return next((e.value for e in effects if isinstance(e, Answer)), None)

    def admit(self):
        """The authority's broadcast; with skew each rank hears it some exchanges later."""
        heard = self.cores[self.scheduler].heard
        if heard < self.planned and self.draw.random() < 0.6 and self.cores[self.scheduler].rounds.last is None:
            event = ev.RequestAdmitted(10 + heard, heard + 1, self.draw.random() < 0.7)
            authority = self.cores[self.scheduler]
            if authority.rounds.open_count < authority.config.credits:
                self.hear(self.scheduler, event)
                self.log.append(event)
            else:
                with pytest.raises(WouldBlock):
                    authority.step(event, 0.0)
        for me, core in enumerate(self.cores):
            while core.heard < len(self.log) and not (self.skewed and self.draw.random() < 0.6):
                self.hear(me, self.log[core.heard])

    def hear(self, me, event):
        key = Key(event.request_id, event.incarnation)
        self.monitor.did(me, "admit", key)
        effects = self.cores[me].step(event, 0.0)
        assert [e.value for e in effects if isinstance(e, Answer)] == [key]
        self.todo[me].append(("publish" if event.ready else "vote", key))
        self.told(me, effects)  # the attempt may have been aborted before this rank heard of it

    def act(self, me, chance):
        for what, key in [*self.todo[me]]:
            if self.draw.random() >= chance:
                continue
            self.todo[me].remove((what, key))
            round_ = self.cores[me].rounds.open.get(key.incarnation)
            if round_ is None:
                continue
            if what == "publish":
                odd = self.draw.random()
                if round_.terminal < TerminalState.VOTED and key.attempt == round_.attempt:
                    if odd < 0.1:
                        self.call(me, ev.WithdrawRequested(key, self.draw.choice((Reason.NOT_READY, Reason.CANCELLED))))
                    elif odd < 0.15 and round_.ready is ReadyState.IDLE:
                        self.vote(me, key)
                    else:
                        self.call(me, ev.ReadyPublished(key))
            elif what == "ack":
                self.call(me, ev.PrepareAcknowledged(key))
            elif what == "abort_ack":
                self.call(me, ev.AbortAcknowledged(key))
            elif what == "vote":
                self.vote(me, key)

    def vote(self, me, key):
        round_ = self.cores[me].rounds.open.get(key.incarnation)
        if round_ is None or round_.terminal >= TerminalState.VOTED:
            return
        outcome = self.draw.choice(list(Outcome))
        vote = ev.TerminalVoted(key, outcome, Disposition.RELEASE, self.draw.choice(list(Reason)))
        if round_.ready in FENCE[TerminalInput.VOTE]:
            self.call(me, vote)
            return
        with pytest.raises(LocalProtocolError, match="attempt is open"):
            self.call(me, vote)
        self.todo[me].append(("vote", key))

    def run_schedule(self):
        for key in [*self.released]:
            if self.draw.random() < 0.2:
                self.call(self.scheduler, ev.RevokeRequested(key, Reason.CANCELLED))
            elif self.draw.random() < 0.5:
                continue
            else:
                self.call(self.scheduler, ev.ScheduleActivated((key,)))
                self.schedule.append(key)
                self.todo[self.scheduler].append(("vote", key))
            self.released.remove(key)
        for me in range(len(self.cores)):
            if me != self.scheduler and self.draw.random() < 0.7:
                for key in self.schedule[self.followed[me] :]:
                    self.call(me, ev.ScheduleActivated((key,)))
                    self.todo[me].append(("vote", key))
                self.followed[me] = len(self.schedule)

    def exchange(self):
        """One lockstep exchange; all ranks decide the same in it."""
        contributions = []
        for core in self.cores:
            sent = [e.frame.records for e in core.step(ev.SlotFreed(EXCHANGE, 0), 0.0) if isinstance(e, SendFrame)]
            contributions.append(sent[0] if sent else ())
        for me, core in enumerate(self.cores):
            self.told(me, core.step(ev.ExchangeCompleted(tuple(contributions)), 0.0))
            core.validate()
        assert len({(c.member.digest, c.member.committed, c.member.closed_rounds, c.drained) for c in self.cores}) == 1
        for incarnation in set.intersection(*[set(c.rounds.open) for c in self.cores]):
            states = {
                (t.phase, t.attempt, t.votes, t.acks, t.activated, t.abort_acks, t.terminal_mask)
                for t in (c.rounds.open[incarnation].tally for c in self.cores)
            }
            assert len(states) == 1, states

    def told(self, me, effects):
        for event in effects:
            if isinstance(event, AgreementEvent):
                assert not isinstance(event, Fault), event
                self.monitor.told(me, event)
                self.react(me, event)

    def react(self, me, event):
        if isinstance(event, Prepared):
            self.todo[me].append(("ack", event.key))
        elif isinstance(event, Released):
            self.released.append(event.key)
        elif isinstance(event, Aborted):
            self.todo[me].append(("abort_ack", event.key))
        elif isinstance(event, Finalized) and event.mode is FinalizeMode.TERMINAL:
            self.todo[me].append(("vote", event.key))
        elif isinstance(event, Finalized) and event.mode is FinalizeMode.REOPEN:
            self.todo[me].append(("publish", event.key._replace(attempt=event.key.attempt + 1)))


@pytest.mark.parametrize("skewed", [False, True], ids=["in step", "skewed"])
@pytest.mark.parametrize("block", range(4))
def test_every_rank_decides_the_same_in_the_same_exchange(block, skewed):
    """replicated coordinators never drift apart, whatever the hosts do in between and whenever each hears of an
    admission; the drain proves it."""
    decided = 0
    for seed in range(block * 100, block * 100 + 100):
        group = Group(seed, skewed)
        for _ in range(40):
            group.admit()
            for me in range(len(group.cores)):
                group.act(me, 0.5)
            group.run_schedule()
            group.exchange()
        last = len(group.log)
        group.released.clear()
        group.call(group.scheduler, ev.DrainRequested(last))
        for _ in range(60):
            group.admit()
            for me in range(len(group.cores)):
                group.act(me, 1.0)
            group.run_schedule()
            group.exchange()
        assert all(core.drained for core in group.cores), f"seed {seed}: {[c.undecided() for c in group.cores]}"
        assert len({core.member.activation_digest for core in group.cores}) == 1
        decided += last
    assert decided > 200


def test_the_baseline_runs_its_timers():
    """A lease that waits too long is revoked, and a round that nobody moves stops the domain, in lockstep as well."""
    domain = Domain(1, (0, 1))
    config = AgreementConfig(credits=2, lease_timeout_s=1.0, round_timeout_s=10.0)
    cores = [AgreementCore(domain, rank, config, replicated=True) for rank in domain.ranks]

    def exchange(now_s):
        sent = [
            [e.frame.records for e in c.step(ev.SlotFreed(EXCHANGE, 0), now_s) if isinstance(e, SendFrame)]
            for c in cores
        ]
        told = [c.step(ev.ExchangeCompleted(tuple(s[0] if s else () for s in sent)), now_s) for c in cores]
        return [(*t, *c.step(ev.SweepCompleted(0), now_s)) for t, c in zip(told, cores)]

    key = Key(7, 1)
    for core in cores:
        core.step(ev.RequestAdmitted(7, 1, True), 0.0)
        core.step(ev.ReadyPublished(key), 0.0)
    exchange(0.1)
    for core in cores:
        core.step(ev.PrepareAcknowledged(key), 0.2)
    exchange(0.3)
    assert [[type(e) for e in told] for told in exchange(0.9)] == [[], []]
    assert [[type(e) for e in told] for told in exchange(1.3)] == [[ev.Revoked], []]
    assert [[type(e) for e in told] for told in exchange(1.4)] == [[ev.Aborted], [ev.Aborted]]
    assert [[type(e) for e in told] for told in exchange(11.5)] == [[Fault], [Fault]]
    assert all(core.fault.code is FaultCode.ROUND_TIMEOUT for core in cores)
