"""Request ids: shape, order, bounds, restarts."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from endpoint_lifecycle import (
    ConfigError,
    DurableRequestIds,
    IdSpaceExhausted,
    LocalProtocolError,
    RequestIdGenerator,
    split_request_id,
)
from endpoint_lifecycle._ids import EPOCH_MS, ID_MAX, ID_MIN

NOW_MS = 1_790_000_000_000


class Clock:
    def __init__(self, ms: int = NOW_MS) -> None:
        self.ms = ms

    def __call__(self) -> int:
        return self.ms


def test_ids_are_positive_63_bit_above_two_to_the_forty_and_say_where_they_come_from() -> None:
    clock = Clock()
    ids = RequestIdGenerator(777, now_ms=clock)
    first, second = ids.next_id(), ids.next_id()
    assert ID_MIN <= first < second <= ID_MAX
    assert split_request_id(first) == (NOW_MS, 777, 0)
    assert split_request_id(second) == (NOW_MS, 777, 1)
    assert RequestIdGenerator(0, now_ms=Clock(EPOCH_MS)).next_id() >= ID_MIN
    assert RequestIdGenerator(0, now_ms=Clock(0)).next_id() >= ID_MIN


@pytest.mark.parametrize("node", [-1, 1024, 1.5, "1"])
def test_node_out_of_range_is_refused(node: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        RequestIdGenerator(node)
    assert caught.value.field == "node_id"


def test_burst_borrows_within_its_bound_and_then_refuses_instead_of_repeating() -> None:
    clock = Clock()
    ids = RequestIdGenerator(1, now_ms=clock, ahead_ms_max=3)
    made = []
    with pytest.raises(IdSpaceExhausted):
        for _ in range(10 * 4096):
            made.append(ids.next_id())
    assert len(made) == len(set(made)) == 4 * 4096
    clock.ms += 1
    made += [ids.next_id() for _ in range(4096)]
    assert made == sorted(set(made))


def test_end_of_the_milliseconds_is_an_error() -> None:
    with pytest.raises(IdSpaceExhausted):
        RequestIdGenerator(1, now_ms=Clock(EPOCH_MS + (1 << 41))).next_id()


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from(["make", "step", "back", "restart"]), st.integers(1, 5000)), min_size=1, max_size=30
    )
)
def test_durable_ids_never_repeat_whatever_the_clock_and_the_restarts_do(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[str, int]]
) -> None:
    path = tmp_path_factory.mktemp("ids") / "state"
    clock = Clock()
    seen: list[int] = []
    ids = DurableRequestIds(path, 5, now_ms=clock, ahead_ms_max=100_000)
    for action, amount in actions:
        if action == "make":
            seen += [ids.next_id() for _ in range(amount)]
        elif action == "step":
            clock.ms += amount
        elif action == "back":
            clock.ms -= amount * 1000
        else:
            ids.close()
            ids = DurableRequestIds(path, 5, now_ms=clock, ahead_ms_max=100_000)
    ids.close()
    assert seen == sorted(set(seen))


@pytest.mark.parametrize("back_ms", [0, 1, 3_600_000])
def test_a_new_run_begins_after_the_window_that_the_last_one_wrote(tmp_path: Path, back_ms: int) -> None:
    """Whatever its clock says: not one millisecond of the window is used twice, and none is skipped behind it."""
    clock = Clock()
    with DurableRequestIds(tmp_path / "ids", 5, now_ms=clock, window_ms=3000) as ids:
        last = ids.next_id()
    clock.ms -= back_ms
    with DurableRequestIds(tmp_path / "ids", 5, now_ms=clock, window_ms=3000) as ids:
        first = ids.next_id()
    assert split_request_id(last)[0] == NOW_MS
    assert split_request_id(first) == (NOW_MS + 3000 + 1, 5, 0)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3000), st.integers(0, 50)), min_size=1, max_size=20))
def test_plain_ids_never_repeat_while_the_clock_goes_on_between_starts(runs: list[tuple[int, int, int]]) -> None:
    """Any number of nodes, restarts and bursts, within the bound: a restart comes later than the last id's millisecond."""
    clock = Clock()
    seen: set[int] = set()
    count = 0
    for node, amount, wait_ms in runs:
        ids = RequestIdGenerator(node, now_ms=clock)
        made = [ids.next_id() for _ in range(amount)]
        assert made == sorted(made)
        seen.update(made)
        count += amount
        clock.ms = max(clock.ms, split_request_id(made[-1])[0]) + 1 + wait_ms
    assert len(seen) == count


def test_clock_that_steps_back_while_running_is_harmless() -> None:
    clock = Clock()
    ids = RequestIdGenerator(1, now_ms=clock)
    made = [ids.next_id()]
    for _ in range(50):
        clock.ms -= 1000
        made += [ids.next_id() for _ in range(5000)]
    assert made == sorted(set(made))


def test_state_file_is_locked_checked_and_bounded_in_writes(tmp_path: Path) -> None:
    path = tmp_path / "ids"
    clock = Clock()
    with DurableRequestIds(path, 5, now_ms=clock, window_ms=1000) as ids:
        with pytest.raises(LocalProtocolError, match="in use"):
            DurableRequestIds(path, 5, now_ms=clock)
        ids.next_id()
        before = path.stat().st_mtime_ns
        content = path.read_bytes()
        for _ in range(900):
            clock.ms += 1
            ids.next_id()
        assert path.read_bytes() == content and path.stat().st_mtime_ns == before  # one write per window
        clock.ms += 200
        ids.next_id()
        assert path.read_bytes() != content
    with pytest.raises(LocalProtocolError, match="closed"):
        clock.ms += 10_000
        ids.next_id()
    with pytest.raises(LocalProtocolError, match="belongs to node 5"):
        DurableRequestIds(path, 6)
    path.write_bytes(b"something else entirely\n")
    with pytest.raises(LocalProtocolError, match="something else"):
        DurableRequestIds(path, 5)
    assert os.stat(path).st_mode & 0o077 == 0


def test_threads_share_one_generator_without_a_duplicate() -> None:
    ids = RequestIdGenerator(9)
    results: list[list[int]] = []

    def make() -> None:
        results.append([ids.next_id() for _ in range(20_000)])

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    together = [i for part in results for i in part]
    assert len(set(together)) == 80_000
    assert all(part == sorted(part) for part in results)


KILLED_MAKER = """
import sys, threading
from endpoint_lifecycle import DurableRequestIds
ids = DurableRequestIds(sys.argv[1], 2)
print(*(ids.next_id() for _ in range(10_000)), flush=True)
threading.Event().wait()  # killed here, with the file open
"""


def test_killed_process_leaves_nothing_that_its_successor_repeats(tmp_path: Path) -> None:
    seen: set[int] = set()
    for _ in range(3):
        command = [sys.executable, "-c", KILLED_MAKER, str(tmp_path / "ids")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            seen.update(map(int, process.stdout.readline().split()))
            process.kill()
    assert len(seen) == 30_000


def test_ids_of_this_machine_follow_its_clock() -> None:
    made_ms = split_request_id(RequestIdGenerator(1).next_id())[0]
    assert abs(made_ms - time.time() * 1000) < 60_000
