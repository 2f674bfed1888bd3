"""A trial as a trace that Perfetto and Chrome open: the phases of each rank's turns, and the steps of its engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from meta_executor.executor.recording import TURN_COLUMNS, LoopRecord

#: Turns of one rank that a trace shows, the newest (count): more make a file that no viewer opens well.
TURNS_MAX = 20_000
#: Phases shorter than this are left out (ns).
SHORTEST_NS = 1_000
_LOOP, _ENGINE = 1, 2


def trace_of(records: Sequence[LoopRecord], window_ns: tuple[int, int]) -> bytes:
    """JSON of trace events within the window, times in µs since its begin."""
    events = [event for number, record in enumerate(records, 1) for event in _events(number, record, window_ns)]
    return msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": events})


def _events(number: int, record: LoopRecord, window_ns: tuple[int, int]) -> Iterator[dict[str, Any]]:
    yield _named("process_name", number, 0, f"{record.owner_id} rank {record.rank}")
    yield _named("thread_name", number, _LOOP, "loop")
    yield _named("thread_name", number, _ENGINE, "engine")
    begin_ns, end_ns = window_ns
    turns = record.turn_rows()
    turns = turns[(turns[:, 0] >= begin_ns) & (turns[:, 0] < end_ns)][-TURNS_MAX:]
    first_phase = len(TURN_COLUMNS)
    steps_before = -1
    for row in turns.tolist():
        began_ns, ended_ns, worked_ns, core_wait_ns = row[:4]
        if row[7] != steps_before and steps_before >= 0:
            yield {
                "ph": "i",
                "name": "launch",
                "pid": number,
                "tid": _LOOP,
                "ts": (began_ns - begin_ns) / 1e3,
                "s": "t",
            }
        steps_before = row[7]
        waited_us = max(ended_ns - began_ns - worked_ns - core_wait_ns, 0) / 1e3
        told = {"processor_us": worked_ns / 1e3, "core_wait_us": core_wait_ns / 1e3, "other_wait_us": waited_us}
        yield _whole("turn", number, _LOOP, began_ns - begin_ns, ended_ns - began_ns, told)
        at_ns = began_ns
        for name, spent_ns in zip(record.phases, row[first_phase:], strict=True):
            if spent_ns >= SHORTEST_NS:
                yield _whole(name, number, _LOOP, at_ns - begin_ns, spent_ns, None)
            at_ns += spent_ns
    for began_ns, device_end_ns, ended_ns, core_wait_ns in record.step_rows().tolist():
        if begin_ns <= began_ns < end_ns:
            yield _whole("step", number, _ENGINE, began_ns - begin_ns, device_end_ns - began_ns, None)
            if ended_ns - device_end_ns >= SHORTEST_NS:
                told = {"core_wait_us": core_wait_ns / 1e3}
                yield _whole(
                    "wait for the interpreter",
                    number,
                    _ENGINE,
                    device_end_ns - begin_ns,
                    ended_ns - device_end_ns,
                    told,
                )


def _whole(
    name: str, process: int, thread: int, at_ns: int, spent_ns: int, told: dict[str, float] | None
) -> dict[str, Any]:
    event: dict[str, Any] = {
        "ph": "X", "name": name, "pid": process, "tid": thread, "ts": at_ns / 1e3, "dur": spent_ns / 1e3
    }  # fmt: skip
    return event if told is None else event | {"args": told}


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
