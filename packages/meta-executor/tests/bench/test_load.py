"""The load generator against servers that answer, refuse, cut, close and stall."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from meta_executor.bench.load import LoadConfig, LoadFailed, LoadResult, Outcome, prompt_of, run_generator, run_load
from meta_executor.bench.settings import base_service, trial_service
from meta_executor.config import ConfigError, FrontConfig


def event(*ids: int, reason: str | None = None) -> bytes:
    body = json.dumps({"choices": [{"token_ids": list(ids), "finish_reason": reason}]})
    return f"data: {body}\n\n".encode()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
ANSWER = [
    HEAD + chunk(event(7)),
    chunk(event(8, 9)),
    chunk(event(reason="length") + b"data: [DONE]\n\n") + b"0\r\n\r\n",
]
#: Takes (connection, number of the request on it, the request's body) and answers; False closes the connection.
Answer = Callable[[socket.socket, int, dict[str, object]], bool]


@contextmanager
def server(answer: Answer) -> Iterator[str]:
    """One thread per connection."""
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []

    def serve(connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines:
            count = 0
            while lines.readline():
                length = 0
                while (line := lines.readline().strip()) != b"":
                    if line.lower().startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                if not answer(connection, count, json.loads(lines.read(length))):
                    return
                count += 1

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=serve, args=(connection,), daemon=True))
            threads[-1].start()

    acceptor = threading.Thread(target=accept, daemon=True)
    acceptor.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        acceptor.join(10)
        for thread in threads:
            thread.join(10)


def send(*parts: bytes) -> Answer:
    def answer(connection: socket.socket, number: int, body: dict[str, object]) -> bool:
        for part in parts:
            connection.sendall(part)
        return True

    return answer


def load(answer: Answer, requests: int = 3, **options: float) -> LoadResult:
    config = LoadConfig(requests, int(options.pop("concurrency", 0)), 5, 4, **options)
    with server(answer) as url:
        result = run_load(url, "m", 1000, config)
    assert [one.number for one in result.outcomes] == list(range(requests))
    return result


def test_answers_are_counted_timed_and_parsed() -> None:
    """Tokens, pieces, reason; the request that was sent is the one that was asked for."""
    seen = []

    def answer(connection: socket.socket, number: int, body: dict[str, object]) -> bool:
        seen.append(body)
        return send(*ANSWER)(connection, number, body)

    result = load(answer, requests=4, concurrency=2)
    for one in result.outcomes:
        assert one.ok and one.token_ids == (7, 8, 9) and one.tokens == 3 and one.finish_reason == "length"
        assert len(one.pieces_s) == 3 and 0 < one.first_s == one.pieces_s[0] <= one.pieces_s[-1] <= one.total_s
    assert sorted(body["prompt"] for body in seen) == sorted(prompt_of(n, 5, 1000) for n in range(4))
    assert {(body["max_tokens"], body["stream"], body["model"]) for body in seen} == {(4, True, "m")}
    assert result.cpu_s > 0 and not result.reconnects


def test_concurrency_bounds_what_is_under_way() -> None:
    """Two at once, over two connections that are kept."""
    lock, now, most, connections = threading.Lock(), 0, 0, set()

    def answer(connection: socket.socket, number: int, body: dict[str, object]) -> bool:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
            connections.add(connection)
        with lock:
            now -= 1
        return send(*ANSWER)(connection, number, body)

    assert all(one.ok for one in load(answer, requests=12, concurrency=2).outcomes)
    assert most <= 2 and len(connections) == 2


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_any_cut_of_the_bytes_gives_the_same_answer(size: int) -> None:
    """Heads, chunks and ends may come in pieces of any size."""
    whole = b"".join(ANSWER)
    pieces = [whole[place : place + size] for place in range(0, len(whole), size)]
    assert [one.token_ids for one in load(send(*pieces), requests=2).outcomes] == [(7, 8, 9)] * 2


def refused(status: bytes, text: bytes) -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(text), text)


@pytest.mark.parametrize(
    ("parts", "status", "words"),
    [
        ((refused(b"429 Too Many Requests", b"later"),), 429, "later"),
        ((HEAD + chunk(b'data: {"error": {"message": "a leg died"}}\n\n') + b"0\r\n\r\n",), 200, "a leg died"),
        ((HEAD + chunk(b'data: {"choices": 3}\n\n') + b"0\r\n\r\n",), 200, "cannot be read"),
    ],
)
def test_refusals_and_errors_are_outcomes(parts: tuple[bytes, ...], status: int, words: str) -> None:
    """A status, an error within a stream, an event that is not one: named, and the connection is used on."""
    result = load(send(*parts), requests=3, concurrency=1)
    for one in result.outcomes:
        assert not one.ok and one.status == status and words in (one.error or "")
    assert not result.reconnects


def test_a_stream_that_is_cut_is_an_error_with_what_came() -> None:
    """The server closes after two tokens: not sent again, since the request was begun."""

    def answer(connection: socket.socket, number: int, body: dict[str, object]) -> bool:
        connection.sendall(ANSWER[0])
        return False

    for one in load(answer).outcomes:
        assert one.token_ids == (7,) and "closed before the answer's end" in (one.error or "")


def test_a_kept_connection_that_was_closed_is_no_failure() -> None:
    """The server closes after each answer without saying so: the next request goes over a new connection, and is counted."""

    def answer(connection: socket.socket, number: int, body: dict[str, object]) -> bool:
        if number == 0:
            send(*ANSWER)(connection, number, body)
        return number == 0

    result = load(answer, requests=4, concurrency=1)
    assert all(one.ok for one in result.outcomes) and result.reconnects == 3


def test_said_close_opens_a_new_connection() -> None:
    """``connection: close``: nothing is tried on it again."""
    closing = [ANSWER[0].replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1), *ANSWER[1:]]

    def answer(connection: socket.socket, number: int, body: dict[str, object]) -> bool:
        send(*closing)(connection, number, body)
        return False

    result = load(answer, requests=3, concurrency=1)
    assert all(one.ok for one in result.outcomes) and not result.reconnects


def test_no_answer_ends_by_the_deadline() -> None:
    """A server that takes the request and says nothing."""
    for one in load(lambda connection, number, body: True, requests=2, request_timeout_s=0.2).outcomes:
        assert one.status == 0 and "no end after 0.2 s" in (one.error or "")


def test_no_server_is_an_outcome() -> None:
    """Nobody listens: every request fails, none raises."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    result = run_load(f"http://127.0.0.1:{port}", "m", 1000, LoadConfig(2))
    assert all(one.status == 0 and one.error for one in result.outcomes)


def test_a_rate_spreads_the_requests() -> None:
    """The third of three at 20 a second is not sent before a tenth of a second has passed."""
    result = load(send(*ANSWER), rate_per_s=20.0)
    assert all(one.ok for one in result.outcomes)
    assert result.seconds >= 0.1


def test_what_the_process_cannot_do_is_said() -> None:
    """Another scheme than http: no result, an error."""
    with pytest.raises(LoadFailed, match="exit 1"):
        run_load("https://127.0.0.1:1", "m", 1000, LoadConfig(1))


def test_a_generator_without_time_left_says_so() -> None:
    """From 85 % of a core on, the figures are its own."""
    one = Outcome(0, 200, None, 0.0, 0.1, 0.1, 1, (1,), (0.1,), "stop")
    assert LoadResult((one,), 1.0, 0.86, 0.0, 0).was_limit
    assert not LoadResult((one,), 1.0, 0.5, 0.0, 0).was_limit


def test_device_times_are_of_the_synthetic_engine_alone() -> None:
    load = LoadConfig(4)
    made = trial_service(base_service("front", load, {}, synthetic=True), step_ms=3.0, stagger_ms=2.0)
    assert (made.engine.synthetic.step_ms, made.engine.synthetic.stagger_ms) == (3.0, 2.0)
    with pytest.raises(ConfigError, match="stagger_ms: is of the synthetic engine; this one is llama"):
        trial_service(base_service("front", load, {}), stagger_ms=2.0)


def test_a_trials_service_takes_its_whole_load_from_one_address() -> None:
    """Bounds per client and in all are raised to what the trial sends, and never lowered."""
    base = base_service("front", LoadConfig(), {})
    front = trial_service(base, requests=10_000).front
    assert front.max_requests >= 10_000 <= front.requests_per_client_max
    assert min(front.http.connections_max, front.http.connections_per_client_max) >= 10_000
    small = trial_service(base, requests=1).front
    assert small.http == FrontConfig().http and small.requests_per_client_max == FrontConfig().requests_per_client_max


def test_a_generator_that_ends_well_and_says_nothing_is_a_failure() -> None:
    """It is named as that, with how much came: a cut result is never a result."""
    with pytest.raises(LoadFailed, match="result of 0 bytes cannot be read"):
        run_generator("keyword", b"")
