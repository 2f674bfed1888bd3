"""How durations are counted: late, together, and without a look changing anything."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pp_agreement import Agreement, Domain, InProcessNetwork, Outcome
from pp_agreement._statistics import BUCKETS, WAITING_MAX, Durations

durations_s = st.one_of(st.floats(0.0, 1e7), st.integers(0, 45).map(lambda power: 2.0**power * 1e-6))


@given(st.lists(st.lists(durations_s, max_size=30), max_size=4))
def test_counted_together_they_are_as_one_by_one(batches):
    """The histogram, their number and the longest are those of a plain count, wherever the batches end."""
    durations, buckets = Durations(), [0] * BUCKETS
    for batch in batches:
        durations.waiting.extend(batch)
        durations.count()
        assert durations.waiting == []
    every = [one for batch in batches for one in batch]
    for one in every:
        place = next((power for power in range(BUCKETS - 1) if one < 2.0**power * 1e-6), BUCKETS - 1)
        buckets[place] += 1
    assert durations.buckets == buckets
    assert durations.longest_s == max(every, default=0.0)
    assert abs(durations.sum_s - sum(every)) <= 1e-9 * sum(every)


def test_looking_changes_nothing():
    """A look counts what waits in a copy: a handler may look while another look is made, or counting is under way."""
    durations = Durations()
    durations.waiting.extend([1e-6, 3e-6])
    for _ in range(2):
        seen = durations.counted()
        assert (sum(seen.buckets), seen.longest_s) == (2, 3e-6) and seen.waiting == []
    assert durations.waiting == [1e-6, 3e-6] and sum(durations.buckets) == 0


def test_an_interrupt_while_counting_counts_nothing_twice():
    """What is being counted has left the list: it may be lost, and is never counted again."""

    class Interrupted(Durations):
        __slots__ = ()

        def _add(self, found):
            super()._add(found)
            raise KeyboardInterrupt

    durations = Interrupted()
    durations.waiting.append(1.0)
    with pytest.raises(KeyboardInterrupt):
        durations.count()
    assert sum(durations.buckets) == 1 and durations.waiting == []


def test_what_waits_is_bounded_however_long_a_life_is():
    """Polls and latencies of a long life are counted, and only a bounded number of them waits."""
    domain = Domain(1, (0,))
    agreement = Agreement(domain, 0, InProcessNetwork(domain).transport(0))
    agreement.open()
    lives = 2 * WAITING_MAX + 10
    for number in range(1, lives + 1):
        agreement.vote_terminal(agreement.admit(number, number, ready=False), Outcome.COMPLETED)
        agreement.poll()
        assert len(agreement._spent.waiting) <= WAITING_MAX + 1
        assert len(agreement._core.member.latencies.waiting) <= WAITING_MAX + 1
    statistics = agreement.statistics()
    assert statistics.polls == agreement.polls == sum(statistics.poll_buckets) == lives
    assert statistics.core.latency_count == lives
