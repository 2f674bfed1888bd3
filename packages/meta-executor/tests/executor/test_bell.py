"""Waits that end by a notification, by another rank's ring, and by time; and how a loop uses them."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meta_executor.executor.bell import RankBell
from meta_executor.executor.drive import AGAIN_S, FIRST_WAIT_S, Turns, drive
from meta_executor.executor.loop import RankLoop
from meta_executor.executor.ownership import Registry
from meta_executor.executor.request import AnswerBook
from meta_executor.executor.transceiver import (
    EXPOSED_CAP_S,
    MOVING_CAP_S,
    RECEIVING_STEP_CAP_S,
    ROUND_CAP_S,
    SENDING_STEP_CAP_S,
)
from meta_executor.executor.work import BroadcastWork


def test_a_notification_and_a_ring_end_a_wait_even_if_they_came_before(tmp_path: Path) -> None:
    """From a thread of its own, from another rank, once each; a rank that is not there, or has left, is no error."""
    bells = [RankBell(lambda rank: tmp_path / f"{rank}.b", rank) for rank in range(2)]
    assert not bells[0].wait(0.0)
    bells[0].notify()
    bells[0].notify()
    assert bells[0].wait(10.0) and not bells[0].wait(0.0)
    for _ in range(2000):  # more than any queue holds
        bells[1].ring(0)
    assert bells[0].wait(10.0) and not bells[0].wait(0.0)
    threading.Timer(0.05, bells[0].notify).start()
    began_s = time.monotonic()
    assert bells[0].wait(20.0) and time.monotonic() - began_s < 10.0
    bells[1].ring(7)
    bells[0].close()
    bells[0].close()
    bells[0].notify()
    bells[1].ring(0)
    bells[1].close()


class Loop:
    """Says what the script says: (moved, cap) per iteration."""

    def __init__(self, script: list[tuple[bool, float | None]]) -> None:
        self._script = script
        self.left = False
        self.fault = ""
        self.poll_cap_s: float | None = None

    def iterate(self, now_s: float) -> bool:
        moved, self.poll_cap_s = self._script.pop(0)
        self.left = not self._script
        return moved


class Bell:
    def __init__(self, rings: set[int]) -> None:
        self.waits: list[float] = []
        self._rings = rings

    def wait(self, timeout_s: float) -> bool:
        self.waits.append(timeout_s)
        return len(self.waits) in self._rings


def run(script: list[tuple[bool, float | None]], rings: tuple[int, ...] = ()) -> list[float]:
    bell = Bell(set(rings))
    loop: Any = Loop(script)
    drive(loop, bell, clock=lambda: 0.0, idle_s=5.0)
    return bell.waits


def test_what_is_told_is_waited_for_and_what_is_not_is_polled() -> None:
    """Nothing open: one long wait. Bytes on their way: ever longer polls up to the cap, from the start after a movement."""
    assert run([(True, None), (False, None), (False, None)]) == [5.0, 5.0]
    moving = (False, MOVING_CAP_S)
    first = FIRST_WAIT_S
    assert run([moving] * 6 + [(True, MOVING_CAP_S), moving]) == [
        first, 2 * first, 4 * first, 8 * first, MOVING_CAP_S, MOVING_CAP_S, first,
    ]  # fmt: skip
    assert run([(False, ROUND_CAP_S)] * 2) == [ROUND_CAP_S] * 2


def test_a_ring_that_brought_nothing_is_looked_at_again_soon() -> None:
    """A long broadcast rings when it begins; the second look is not a whole idle wait later."""
    assert run([(False, None)] * 3, rings=(1,)) == [5.0, AGAIN_S, 5.0]


def test_turns_are_counted_by_how_long_they_took() -> None:
    """Each edge counts what took longer, by the clock and of processor time; the waits between turns count nowhere."""
    times = iter([0.0, 0.0005, 1.0, 1.003, 2.0, 2.06])
    worked = iter([0.0, 0.0004, 0.1, 0.1015, 0.2, 0.207])
    turns = Turns()
    script: Any = Loop([(True, None), (False, None), (True, None)])
    drive(script, Bell(set()), clock=lambda: next(times), worked=lambda: next(worked), turns=turns)
    assert turns.count == 3
    assert turns.longer == [2, 2, 1, 1, 1, 1]
    assert turns.worked_longer == [2, 1, 1, 0, 0, 0]


@pytest.mark.parametrize(("sends", "step_cap_s"), [(False, RECEIVING_STEP_CAP_S), (True, SENDING_STEP_CAP_S)])
def test_while_the_engine_has_a_step_transfers_are_looked_at_less_often(sends: bool, step_cap_s: float) -> None:
    """Nothing that comes could be used before the step's end, which rings; frames of MPI are polled as before. A rank that
    sends is the one that moves the bytes, and looks more often."""
    compute = SimpleNamespace(stepping=False)
    transceiver: Any = SimpleNamespace(poll_cap_s=MOVING_CAP_S)
    link: Any = SimpleNamespace(busy=False)
    loop = RankLoop(
        rank=0,
        registry=Registry("context" if sends else "generation"),
        compute=compute,  # type: ignore[arg-type]
        answers=AnswerBook(),
        link=link,
        work=BroadcastWork(None, 0),
        sending=transceiver if sends else None,
        receiving=None if sends else transceiver,
        desk=None,
        on_fault=lambda diagnosis: None,
    )
    assert loop.poll_cap_s == MOVING_CAP_S
    compute.stepping = True
    for cap_s, polled_s in (
        (MOVING_CAP_S, step_cap_s),
        (EXPOSED_CAP_S, step_cap_s),
        (ROUND_CAP_S, ROUND_CAP_S),
        (None, None),
    ):
        transceiver.poll_cap_s = cap_s
        assert loop.poll_cap_s == polled_s
    link.busy = True
    assert loop.poll_cap_s == MOVING_CAP_S
