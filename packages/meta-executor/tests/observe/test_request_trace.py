"""One request's story for Perfetto: from what a front tells, over scripted HTTP and from a real front over fakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from meta_executor.cli import main
from meta_executor.observe import ObserveError, ServiceClient
from meta_executor.observe.request_trace import ToldRequest, request_trace

TOLD = {
    "request_id": "mine",
    "path": "/v1/completions",
    "caller": "x",
    "began_unix_s": 5.0,
    "answers": [26],
    "events": [
        {"at_s": 0.001, "what": "given to an instance", "answer": 26, "leg": "context", "server": "ctx-0"},
        {"at_s": 0.002, "what": "sent", "answer": 26, "leg": "context", "server": "ctx-0"},
        {"at_s": 0.5, "what": "first token", "answer": 26, "leg": "context", "server": "ctx-0"},
        {"at_s": 0.501, "what": "sent", "answer": 26, "leg": "generation", "server": "gen-1"},
        {"at_s": 0.9, "what": "ended", "answer": 26, "leg": "generation", "server": "gen-1"},
        {"at_s": 1.0, "what": "answered"},
    ],
    "events_left_out": 0,
    "decisions": [
        {"request_id": 26, "role": "generation", "owner_id": "gen-1", "why": "least loaded of 2", "weight": 7,
         "load_weight": 3, "load_requests": 1},
    ],
    "instances": {"gen-1": [{"request_id": 26, "rank": 1, "why": "fewest tokens", "tokens": 5}], "ctx-0": []},
    "unknown": {},
}  # fmt: skip


def events(body: bytes) -> list[dict[str, Any]]:
    return json.loads(body)["traceEvents"]


def test_the_front_and_each_leg_are_lines_with_their_times_and_reasons() -> None:
    """Times in µs; the whole request, the legs at their instances, and what passed between two events."""
    told = events(request_trace(msgspec.convert(TOLD, ToldRequest)))
    names = {e["pid"]: e["args"]["name"] for e in told if e["name"] == "process_name"}
    assert names == {1: "front", 2: "ctx-0", 3: "gen-1"}
    spans = {(names[e["pid"]], e["name"]): (e["ts"], e["dur"]) for e in told if e["ph"] == "X"}
    assert {key: (round(ts), round(dur)) for key, (ts, dur) in spans.items()} == {
        ("front", "/v1/completions"): (0, 1_000_000),
        ("ctx-0", "context leg"): (1_000, 499_000),
        ("ctx-0", "given to an instance … sent"): (1_000, 1_000),
        ("ctx-0", "sent … first token"): (2_000, 498_000),
        ("gen-1", "generation leg"): (501_000, 399_000),
        ("gen-1", "sent … ended"): (501_000, 399_000),
    }
    (leg,) = [e for e in told if e["name"] == "generation leg"]
    assert leg["args"] == {"instance": ["least loaded of 2"], "inside": ["rank 1: fewest tokens"]}
    assert [(e["name"], e["ts"]) for e in told if e["ph"] == "i"] == [("answered", 1e6)]


def test_a_request_of_which_nothing_happened_yet() -> None:
    empty = ToldRequest(request_id="a", path="/v1/completions", events=[])
    assert [e["dur"] for e in events(request_trace(empty)) if e["ph"] == "X"] == [0.0]


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (404, {"error": {"message": "no request 'a b/c' among the last ones"}}, "no request"),
        (200, {"request_id": "x"}, "missing required field"),
        (401, {}, "wants the run's key"),
    ],
)
def test_what_cannot_be_had_says_why(status: int, body: Any, words: str) -> None:
    """And a name with a slash in it stays one name."""
    asked = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.raw_path)
        return httpx.Response(status, json=body)

    with (
        ServiceClient("http://front", transport=httpx.MockTransport(handler)) as client,
        pytest.raises(ObserveError, match=words),
    ):
        client.request("a b/c")
    assert asked == [b"/debug/requests/a%20b%2Fc"]


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["meta-executor", "explain", *words])
    with pytest.raises(SystemExit) as left:
        main()
    return int(left.value.code or 0)


def test_the_command_writes_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    """One request; a folder that is not there is told, and so are two requests."""

    def asking(url: Any, run_dir: Any) -> ServiceClient:
        return ServiceClient("http://front", transport=httpx.MockTransport(lambda _: httpx.Response(200, json=TOLD)))

    monkeypatch.setattr("meta_executor.cli._client", asking)
    target = tmp_path / "trace.json"
    assert run(monkeypatch, "cmpl-1a", "--trace", str(target)) == 0
    assert any(e["name"] == "generation leg" for e in events(target.read_bytes()))
    assert run(monkeypatch, "a", "b", "--trace", str(target)) == 2
    assert "--trace wants one REQUEST, got 2" in capsys.readouterr().err
    assert run(monkeypatch, "a", "--trace", str(tmp_path / "no" / "t.json")) == 1
    assert "No such file or directory" in capsys.readouterr().err
