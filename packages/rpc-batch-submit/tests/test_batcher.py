"""The pure core: table, scenarios, and random runs against a dumb oracle."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from rpc_batch_submit import (
    FLUSH_REASONS,
    Batcher,
    BatchStatistics,
    BatchSubmitConfig,
    BatchSubmitError,
    BatchUsageError,
    Entry,
    EntryState,
    SendBatch,
)
from rpc_batch_submit._batcher import TRANSITIONS

SCENARIOS = (Path(__file__).parent / "scenarios" / "flushes.txt").read_text().split("\nscenario ")[1:]


def shown(batches: tuple[SendBatch[str], ...]) -> str:
    """Batches as the scenario file writes them."""
    return " ".join(f"{batch.reason}[{' '.join(entry.request for entry in batch.entries)}]" for batch in batches)


def settings(line: str) -> BatchSubmitConfig:
    """The second line of a scenario."""
    words = line.split()
    values: dict[str, Any] = {}
    while words:
        name = words.pop(0)
        if name == "adaptive":
            values["adaptive"] = True
        elif name == "delay":
            values["delay_ms"] = float(words.pop(0))
        else:
            values[name] = int(words.pop(0))
    return BatchSubmitConfig(**values)


@pytest.mark.parametrize("text", SCENARIOS, ids=[text.splitlines()[0] for text in SCENARIOS])
def test_scenario(text: str) -> None:
    """Each step of the file does exactly what stands behind it."""
    lines = [line for line in text.splitlines()[1:] if line and not line.startswith("#")]
    core: Batcher[str] = Batcher(settings(lines[0]))
    entries: dict[str, Entry[str]] = {}
    for line in lines[1:]:
        step, _, wanted = line.partition(" -> ")
        words = step.split()
        now_s = float(words[1]) / 1000 if words[0] == "at" else 0.0
        if words[0] == "at":
            words = words[2:]
        got = ""
        match words:
            case ["add", request, *rest]:
                error = next((word for word in rest if word.startswith("Batch")), "")
                size = next((int(word) for word in rest if word.isdigit()), 0)
                before = core.statistics()
                try:
                    batches = core.add(request, now_s, request_id=request, size_bytes=size, bypass="bypass" in rest)
                except BatchSubmitError as refusal:
                    refused = type(refusal).__name__
                    batches = ()
                else:
                    refused = ""
                assert refused == error, line
                if refused:
                    assert core.statistics() == before, "a refusal changed something"
                    continue
                got = shown(batches)
                entries.update((entry.request, entry) for batch in batches for entry in batch.entries)
            case ["tick"]:
                got = shown(core.tick(now_s))
            case ["flush"]:
                got = shown(core.flush())
            case ["close"]:
                got = shown(core.close())
            case ["over"]:
                got = shown(core.send_over())
            case ["settle", request]:
                assert core.settle(entries[request])
                assert not core.settle(entries[request])
            case ["abort", request, answer]:
                assert (core.abort(request) is not None) is (answer == "yes"), line
            case ["due", when]:
                due_s = core.due_s()
                assert due_s is None if when == "none" else due_s == pytest.approx(float(when) / 1000), line
            case _:
                raise AssertionError(f"unknown step {line!r}")
        assert got == wanted, line
        core.validate()


@pytest.mark.parametrize("start", EntryState)
@pytest.mark.parametrize("end", EntryState)
def test_table_of_moves(start: EntryState, end: EntryState) -> None:
    """Every pair: the table's moves are made, every other raises and leaves the entry as it was."""
    entry = Entry("r", "r", 0, None)
    entry.state = start
    if end in TRANSITIONS[start]:
        Batcher._move(entry, end)
        assert entry.state is end
    else:
        with pytest.raises(BatchUsageError, match=f"{start.value} cannot become {end.value}"):
            Batcher._move(entry, end)
        assert entry.state is start


def test_a_send_cannot_end_twice() -> None:
    """``send_over`` without a send is the driver's mistake, told."""
    core: Batcher[str] = Batcher(BatchSubmitConfig())
    with pytest.raises(BatchUsageError):
        core.send_over()
    core.add("a", 0.0)
    core.send_over()
    with pytest.raises(BatchUsageError):
        core.send_over()


def test_a_forked_child_drops_what_is_the_parents() -> None:
    """Nothing buffered is sent, nothing outstanding is waited for."""
    core: Batcher[str] = Batcher(BatchSubmitConfig(batch_max=3))
    for name in "abcd":
        core.add(name, 0.0, request_id=name)
    assert [entry.request for entry in core.drop()] == ["d"]
    core.validate()
    statistics = core.statistics()
    assert (statistics.outstanding, statistics.buffered, statistics.dropped_in_fork) == (0, 0, 4)
    assert core.flush() == ()


@pytest.mark.parametrize(
    "config",
    [BatchSubmitConfig(batch_max=3, bytes_max=4), BatchSubmitConfig(batch_max=3, adaptive=True)],
    ids=["bytes", "adaptive"],
)
def test_after_a_fork_a_core_is_as_good_as_new(config: BatchSubmitConfig) -> None:
    """No id, byte or send of the parent's changes what the child's own requests do."""
    used, fresh = Batcher[str](config), Batcher[str](config)
    for name in ("a", "b"):
        used.add(name, 0.0, request_id=name, size_bytes=2)
    used.drop()
    used.add("a", 0.0, request_id="a", size_bytes=3)
    used.drop()
    for core in (used, fresh):
        core.validate()
    for name, size_bytes in (("a", 1), ("b", 1), ("c", 3), ("d", 1)):
        got, wanted = (core.add(name, 1.0, request_id=name, size_bytes=size_bytes) for core in (used, fresh))
        assert shown(got) == shown(wanted)
        assert used.due_s() == fresh.due_s()
    assert shown(used.send_over()) == shown(fresh.send_over())


def test_a_request_that_is_registered_while_the_core_closes_leaves_at_once() -> None:
    """Nobody would send it later."""
    core: Batcher[str] = Batcher(BatchSubmitConfig(batch_max=3))
    entry = core.admit("a")
    assert core.close() == ()
    assert shown(core.buffer(entry, 0.0)) == "close[a]"


@pytest.mark.parametrize(
    ("config", "reason"),
    [(BatchSubmitConfig(batch_max=2), "size"), (BatchSubmitConfig(batch_max=3, bytes_max=2), "bytes")],
    ids=["size", "bytes"],
)
def test_a_batch_that_was_lost_on_its_way_leaves_again(config: BatchSubmitConfig, reason: str) -> None:
    """In the order in which its requests were buffered, which need not be that of their admission."""
    core: Batcher[str] = Batcher(config)
    first, second = (core.admit(name, size_bytes=1) for name in ("first", "second"))
    core.buffer(second, 1.0)
    core.buffer(first, 2.0)
    assert shown(core.mend([])) == f"{reason}[second first]"
    core.validate()


def test_every_count() -> None:
    """What ``statistics`` says after one of each."""
    core: Batcher[str] = Batcher(BatchSubmitConfig(batch_max=3))
    core.add("aborted", 0.0, request_id="aborted")
    core.abort("aborted")
    core.withdraw(core.admit("never registered"))
    batches = [*core.add("direct", 0.0, bypass=True)]
    for name in ("served", "failed", "unknown"):
        batches += core.add(name, 1.0)
    entries = {entry.request: entry for batch in batches for entry in batch.entries}
    core.settle_served([entries["served"]])
    core.settle(entries["failed"], failed=True)
    core.settle(entries["unknown"], failed=True, unknown=True)
    core.add("late", 2.0)
    assert core.statistics() == BatchStatistics(
        submitted=6,
        sent=4,
        settled=4,
        aborted=1,
        failed=2,
        unknown=1,
        batches=2,
        flushes=dict.fromkeys(FLUSH_REASONS, 0) | {"bypass": 1, "size": 1},
        buffered=1,
        outstanding=2,
        outstanding_high_water=4,
        batch_high_water=3,
        dropped_in_fork=0,
    )


class Oracle:
    """The dumbest batcher: a list, and every rule written out again from the documentation."""

    def __init__(self, config: BatchSubmitConfig) -> None:
        self.config = config
        self.waiting: list[tuple[int, float, int]] = []
        self.sent: list[list[int]] = []
        self.open_sends = 0

    def send(self) -> None:
        """All of the buffer."""
        if self.waiting:
            self.sent.append([number for number, _, _ in self.waiting])
            self.waiting = []
            self.open_sends += 1

    def add(self, number: int, now_s: float, size: int) -> None:
        """Rules in the documented order."""
        if sum(s for _, _, s in self.waiting) + size > self.config.bytes_max:
            self.send()
        self.waiting.append((number, now_s, size))
        full = len(self.waiting) >= self.config.batch_max or sum(s for _, _, s in self.waiting) >= self.config.bytes_max
        if full or (self.config.adaptive and self.open_sends == 0):
            self.send()

    def tick(self, now_s: float) -> None:
        """Oldest has waited."""
        if self.waiting and now_s >= self.waiting[0][1] + self.config.delay_s:
            self.send()

    def over(self) -> None:
        """A send ended."""
        self.open_sends -= 1
        if self.config.adaptive and self.open_sends == 0:
            self.send()


@pytest.mark.parametrize("seed", range(40))
def test_random_runs_equal_the_oracle(seed: int) -> None:
    """Thousands of random steps: the same batches in the same order, every request exactly once or aborted."""
    pick = random.Random(seed)
    config = BatchSubmitConfig(
        batch_max=pick.choice((1, 2, 3, 8)), delay_ms=pick.choice((0, 0.5, 3)), bytes_max=pick.choice((1, 50, 10**6)),
        adaptive=pick.random() < 0.5,
    )  # fmt: skip
    core: Batcher[int] = Batcher(config)
    oracle = Oracle(config)
    sent: list[list[int]] = []
    open_sends: list[SendBatch[int]] = []
    aborted: set[int] = set()
    now_s = 0.0

    def take(batches: tuple[SendBatch[int], ...]) -> None:
        for batch in batches:
            assert batch.reason in FLUSH_REASONS
            sent.append([entry.request for entry in batch.entries])
            open_sends.append(batch)

    for number in range(600):
        now_s += pick.choice((0.0, 0.0001, 0.001))
        match pick.randrange(6):
            case 0 | 1 | 2:
                size = pick.choice((0, 1, 30, 60))
                take(core.add(number, now_s, request_id=number, size_bytes=size))
                oracle.add(number, now_s, size)
            case 3:
                take(core.tick(now_s))
                oracle.tick(now_s)
            case 4 if open_sends:
                batch = open_sends.pop(pick.randrange(len(open_sends)))
                for entry in batch.entries:
                    core.settle(entry, failed=pick.random() < 0.1)
                take(core.send_over())
                oracle.over()
            case _ if oracle.waiting:
                victim = pick.choice(oracle.waiting)
                assert core.abort(victim[0]) is not None
                oracle.waiting.remove(victim)
                aborted.add(victim[0])
        core.validate()
        assert sent == oracle.sent
    take(core.close())
    oracle.send()
    assert sent == oracle.sent
    flat = [request for batch in sent for request in batch]
    assert flat == sorted(set(flat))
    assert not aborted & set(flat)
    statistics = core.statistics()
    assert statistics.submitted == len(flat) + len(aborted)
    assert sum(statistics.flushes.values()) == statistics.batches == len(sent)
