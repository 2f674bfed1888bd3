"""The core of NAME."""

import pytest

from MODULE import Added, Counter, LocalProtocolError, ReportCount, Statistics


def test_what_arrives_is_counted():
    """Each event is answered with the new total."""
    counter = Counter(count_max=3)
    assert counter.step(Added(1), 0.0) == (ReportCount(1),)
    assert counter.step(Added(2), 1.0) == (ReportCount(3),)
    assert counter.statistics() == Statistics(total=3, events=2)


@pytest.mark.parametrize("count", [0, -1, 3])
def test_a_bad_count_is_refused_and_changes_nothing(count):
    """Below one, or beyond the bound: an error that names the value, and the same state as before."""
    counter = Counter(count_max=3)
    counter.step(Added(1), 0.0)
    with pytest.raises(LocalProtocolError, match=str(count)):
        counter.step(Added(count), 1.0)
    assert counter.statistics() == Statistics(total=1, events=1)


def test_a_bound_below_one_is_refused():
    """There is no object without room."""
    with pytest.raises(LocalProtocolError, match="count_max"):
        Counter(count_max=0)
