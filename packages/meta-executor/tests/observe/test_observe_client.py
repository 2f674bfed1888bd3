"""The client over scripted HTTP: who is asked, and one line for everything that can go wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from meta_executor import wire
from meta_executor.observe import ObserveError, ServiceClient

FRONT = {
    "role": "front",
    "servers": [
        {"owner_id": "ctx-0", "role": "context", "url": "http://ctx", "status": "ready"},
        {"owner_id": "gen-0", "role": "generation", "url": "http://gen", "status": "unprepared"},
    ],
}
METRICS = 'meta_executor_tokens_returned 5.0\nmeta_executor_rank_steps{rank="1"} 3.0\n'


def client(answers: dict[str, Any], asked: list[str] | None = None, key: str = "") -> ServiceClient:
    def handler(request: httpx.Request) -> httpx.Response:
        url = str(request.url).removeprefix("http://")
        if asked is not None:
            asked.append(f"{url} {request.headers.get(wire.KEY_HEADER, '-')}")
        answer = answers.get(url)
        if answer is None:
            raise httpx.ConnectError("refused", request=request)
        status, body = answer if isinstance(answer, tuple) else (200, answer)
        return httpx.Response(status, content=body if isinstance(body, str) else json.dumps(body))

    return ServiceClient("http://front/", key=key, clock=lambda: 7.0, transport=httpx.MockTransport(handler))


def test_a_sample_has_the_front_and_every_instance_and_says_who_is_gone() -> None:
    """The instances are the ones that the front names; one that does not answer is in it with the reason."""
    answers = {
        "front/server_info": FRONT,
        "front/health": (503, {"status": "unavailable"}),
        "front/metrics": "total_requests_total 4.0\n",
        "ctx/health": {"status": "ok"},
        "ctx/metrics": METRICS,
    }
    with client(answers) as asking:
        sample = asking.sample()
    assert (sample.at_s, sample.url, sample.health) == (7.0, "http://front", "unavailable")
    assert sample.front == {"total_requests_total": 4.0}
    context, generation = sample.instances
    assert (context.owner_id, context.status, context.ranks) == ("ctx-0", "ok", {1: {"steps": 3.0}})
    assert generation.status == "gone: http://gen cannot be asked: refused" and generation.totals == {}


def test_an_instance_that_runs_alone_is_looked_at_directly() -> None:
    """No front: one instance; its routing needs the key, its metrics do not."""
    info = {"role": "context", "owner_id": "ctx-0", "state": "PUBLISHED"}
    routing = {"role": "context", "owner_id": "ctx-0", "policy": "pipeline", "decided": 3, "decisions": []}
    asked: list[str] = []
    answers = {
        "front/server_info": info,
        "front/health": {"status": "ok"},
        "front/metrics": METRICS,
        "front/debug/routing?limit=256": routing,
    }
    with client(answers, asked, key="ab") as asking:
        sample = asking.sample()
        assert (sample.front, [i.owner_id for i in sample.instances]) == (None, ["ctx-0"])
        (alone,) = asking.routing().instances
        assert (alone.policy, alone.decided) == ("pipeline", 3)
    assert asked[-1] == "front/debug/routing?limit=256 ab"


@pytest.mark.parametrize(
    ("answers", "ask", "words"),
    [
        ({}, lambda c: c.sample(), "http://front cannot be asked: refused"),
        ({"front/server_info": "<html>"}, lambda c: c.sample(), "is not one of meta-executor's"),
        ({"front/server_info": {"x": 1}}, lambda c: c.routing(), "is not one of meta-executor's"),
        ({"front/server_info": (404, "no")}, lambda c: c.address(), "/server_info answered HTTP 404: no"),
        (
            {"front/server_info": {"role": "context", "owner_id": "c", "state": "X"}, "front/debug/routing?limit=9": (401, "")},
            lambda c: c.routing(9),
            "wants the run's key",
        ),
        (
            {"front/server_info": FRONT, "front/debug/routing?limit=9": {"policy": 1}},
            lambda c: c.routing(9),
            "/debug/routing?limit=9: ",
        ),
        ({"front/server_info": FRONT, "front/metrics": "", "front/health": "?"}, lambda c: c.sample(), "/health: HTTP 200"),
    ],
)  # fmt: skip
def test_whatever_goes_wrong_is_one_line_that_says_what_was_asked(
    answers: dict[str, Any], ask: Callable[[ServiceClient], Any], words: str
) -> None:
    """Refused, no JSON, another program, a wrong status, no key, a body of another shape."""
    with client(answers) as asking, pytest.raises(ObserveError) as caught:
        ask(asking)
    assert words in str(caught.value) and "\n" not in str(caught.value)
