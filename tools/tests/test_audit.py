"""The dependency audit: what is asked, what is judged, and that nothing known is never told as nothing wrong."""

import http.server
import json
import threading
import urllib.error

import pytest

import audit


def test_every_pin_of_the_constraints_is_asked_about():
    """Builds of a version are that version; a line that pins nothing is an error, not a gap."""
    pinned = audit.pins((audit.ROOT / "constraints.txt").read_text("utf-8"))
    assert len(pinned) > 100 and pinned["torch"] == "2.13.0"
    assert audit.pins("# x\n\na==1.0+cpu  # why\nb == 2 ; python_version < '4'\n") == {"a": "1.0", "b": "2"}
    for line in ("a>=1", "a==", "==1", "a"):
        with pytest.raises(ValueError, match="line 1"):
            audit.pins(line)


def test_answers_belong_to_their_questions():
    """In order; a version without an advisory has none."""
    asked = []

    def send(body):
        asked.append(json.loads(body))
        return json.dumps({"results": [{}, {"vulns": [{"id": "B"}, {"id": "A"}]}, {"vulns": None}]}).encode()

    assert audit.advisories({"x": "1", "y": "2", "z": "3"}, send) == {"y": ["A", "B"]}
    assert asked[0]["queries"][1] == {"package": {"ecosystem": "PyPI", "name": "y"}, "version": "2"}


@pytest.mark.parametrize(
    "answer", [b"", b"[]", b"{}", b'{"results": [{}]}', b'{"results": [1, {}]}', b'{"results": 5}']
)
def test_an_answer_that_is_none_is_no_answer(answer):
    """A page of a proxy, too few results: nothing is known then."""
    with pytest.raises(audit.Unreachable):
        audit.advisories({"x": "1", "y": "2"}, lambda _: answer)


def test_what_is_accepted_is_said_and_must_be_there():
    """By name and with the reason; an entry that nothing needs is wrong."""
    wrong, taken = audit.judged({"y": "2"}, {"y": ["A", "B"]}, {"A": "not reachable", "C": "gone"})
    assert taken == ["y==2: A, accepted: not reachable"]
    assert [line.partition(":")[0] for line in wrong] == ["y==2", "ACCEPTED has C, which no pin has"]


def test_exit_codes(monkeypatch, capsys):
    """Wrong 1, right 0, not reached 0 by name, or 3 if that is asked for."""
    monkeypatch.setattr(audit, "advisories", lambda pinned: {"torch": ["A"]})
    assert audit.main([]) == 1 and "torch==2.13.0: A" in capsys.readouterr().out
    monkeypatch.setattr(audit, "ACCEPTED", {"A": "why"})
    assert audit.main([]) == 0

    def nobody(pinned):
        raise audit.Unreachable("no route")

    monkeypatch.setattr(audit, "advisories", nobody)
    assert audit.main([]) == 0 and capsys.readouterr().out.endswith("dependency audit: NO COVERAGE: no route\n")
    assert audit.main(["--strict"]) == 3


def test_the_request_itself(monkeypatch):
    """Over a real server: the body goes out whole and the answer comes back; a refusal and a closed port are named."""
    monkeypatch.setenv("no_proxy", "*")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            self.send_response(500 if body == b"bad" else 200)
            self.end_headers()
            self.wfile.write(b"got " + body)

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        monkeypatch.setattr(audit, "DATABASE", f"http://127.0.0.1:{server.server_port}/")
        assert audit.ask(b"q") == b"got q"
        with pytest.raises(audit.Unreachable) as refused:
            audit.ask(b"bad")
        assert isinstance(refused.value.__cause__, urllib.error.HTTPError)
        server.shutdown()
        thread.join()
    with pytest.raises(audit.Unreachable, match="refused"):
        audit.ask(b"q")
