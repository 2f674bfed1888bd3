"""Silence is counted in one's own looks: a pause of this rank is nobody else's silence."""

from __future__ import annotations

import pytest

from meta_executor.executor.liveness import LOOK_MAX_S, Liveness


def test_the_longest_silence_is_told_and_ends_with_a_word() -> None:
    """Who was heard begins anew; the others go on."""
    liveness = Liveness((1, 2))
    assert liveness.longest()[1] == 0.0
    for second in range(5):
        liveness.look(float(second), {1})
    assert liveness.longest() == (2, 4.0)
    liveness.look(5.0, {2})
    assert liveness.longest() == (1, 1.0)


def test_a_pause_of_ones_own_is_nobodys_silence() -> None:
    """One look adds at most ``LOOK_MAX_S``, however long it is since the last."""
    liveness = Liveness((1,))
    liveness.look(0.0, {1})
    liveness.look(60.0, set())
    assert liveness.longest() == (1, pytest.approx(LOOK_MAX_S))


def test_a_rank_alone_hears_nobody_and_misses_nobody() -> None:
    """A world of one."""
    liveness = Liveness(())
    liveness.look(0.0, set())
    liveness.look(9.0, set())
    assert liveness.longest() == (-1, 0.0)
