"""One request's story as a trace that Perfetto and Chrome open: what the front saw of it, and each leg at its instance. Pure.

What is known is what ``/debug/requests/ID`` tells: times on the front's clock. A rank's own times are not in it; where a
request went inside an instance, and why, stands at the leg.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any

import msgspec

from meta_executor import wire

#: The front's own line.
_FRONT = 1


class StoryEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened, so long after the request's head had come (s)."""

    at_s: Annotated[float, msgspec.Meta(ge=0)]
    what: str
    #: Id of the answer that it is about; 0: the whole request.
    answer: int = 0
    leg: str = ""
    server: str = ""


class ToldRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What ``/debug/requests/ID`` answers, as far as it is drawn."""

    request_id: str
    path: str
    events: list[StoryEvent]
    decisions: list[wire.LegDecision] = []
    #: Decisions inside each instance, by its name.
    instances: dict[str, list[wire.RoutingDecision]] = {}


def request_trace(told: ToldRequest) -> bytes:
    """JSON of trace events, times in µs since the request's head had come."""
    events = list(_events(told))
    return msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": events})


def _events(told: ToldRequest) -> Iterator[dict[str, Any]]:
    yield _named("process_name", _FRONT, 0, "front")
    yield _named("thread_name", _FRONT, 0, f"request {told.request_id}")
    end_s = max((event.at_s for event in told.events), default=0.0)
    yield _span(told.path, _FRONT, 0, 0.0, end_s, {"request_id": told.request_id})
    for event in told.events:
        if not event.leg:
            yield {"ph": "i", "name": event.what, "pid": _FRONT, "tid": 0, "ts": event.at_s * 1e6, "s": "t"}
    servers = list(dict.fromkeys(event.server for event in told.events if event.leg))
    for number, server in enumerate(servers, _FRONT + 1):
        yield _named("process_name", number, 0, server)
        mine = [event for event in told.events if event.leg and event.server == server]
        for thread, (answer, leg) in enumerate(dict.fromkeys((event.answer, event.leg) for event in mine), 1):
            yield _named("thread_name", number, thread, f"{leg} leg of {answer:x}")
            yield from _leg(told, number, thread, [e for e in mine if (e.answer, e.leg) == (answer, leg)])


def _leg(told: ToldRequest, number: int, thread: int, events: list[StoryEvent]) -> Iterator[dict[str, Any]]:
    """A leg as a whole with why it went there, and in it what passed between two events."""
    first = events[0]
    why = {
        "instance": [d.why for d in told.decisions if (d.request_id, d.owner_id) == (first.answer, first.server)],
        "inside": [
            f"{'all ranks' if d.rank < 0 else f'rank {d.rank}'}: {d.why}"
            for d in told.instances.get(first.server, ())
            if d.request_id == first.answer
        ],
    }
    yield _span(f"{first.leg} leg", number, thread, first.at_s, events[-1].at_s, why)
    for event, then in pairwise(events):
        yield _span(f"{event.what} … {then.what}", number, thread, event.at_s, then.at_s, {})


def _span(name: str, number: int, thread: int, begin_s: float, end_s: float, told: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "pid": number,
        "tid": thread,
        "ts": begin_s * 1e6,
        "dur": max(end_s - begin_s, 0.0) * 1e6,
        "args": told,
    }


def _named(what: str, number: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": number, "tid": thread, "args": {"name": name}}
