"""API keys from a file, and what each path wants."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from meta_executor import wire
from meta_executor.front.app import NEED_OF
from meta_executor.listener.access import Access, Caller, KeyFile, KeyFileError, Need, keys_of

RUN = "ab" * 32
ALICE, BOB, OPS = "alice-key-0123456789abcdef", "bob-key-0123456789abcdefgh", "ops-key-0123456789abcdefgh"


def file_of(tmp_path: Path, text: str, mode: int = 0o600) -> Path:
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(mode)
    return path


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", b"Bearer " + key.encode())]


def test_keys_have_names(tmp_path: Path) -> None:
    """Several keys, comments, an operator; a wrong one, an empty one and none at all are nobody."""
    keys = KeyFile(file_of(tmp_path, f"# keys\n\nalice {ALICE}\nbob {BOB}\nops {OPS} operator\n"))
    access = Access(RUN, keys)
    assert access.caller(bearer(ALICE), "1.2.3.4") == Caller("alice", "1.2.3.4")
    assert access.caller([(b"authorization", b"bearer  " + BOB.encode() + b" ")], "x") == Caller("bob", "x")
    assert access.caller(bearer(OPS), "x") == Caller("ops", "x", operator=True)
    for headers in ([], bearer(""), bearer(ALICE[:-1]), bearer(ALICE + "x"), [(b"authorization", ALICE.encode())]):
        assert access.caller(headers, "x") == Caller("", "x")
    assert access.caller([(wire.KEY_HEADER.encode(), RUN.encode())], "x").run
    assert not access.caller([(wire.KEY_HEADER.encode(), RUN[:-1].encode())], "x").run


def test_every_key_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of a hundred keys costs as many comparisons as the last, and as none of them; all by the safe function."""
    import hmac

    lines = "".join(f"k{i} {'x' * 20}{i:04d}\n" for i in range(100))
    keys = KeyFile(file_of(tmp_path, lines))
    compared: list[bytes] = []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append(b) or real(a, b))
    for given in ("x" * 20 + "0000", "x" * 20 + "0099", "nothing"):
        compared.clear()
        keys.find(given.encode())
        assert len(compared) == 100


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no key"),
        ("alice", "line 1: want a name, a key"),
        (f"alice {ALICE} admin", "line 1: want a name, a key"),
        (f"al:ice {ALICE}", "line 1: a name has"),
        ("# a\nalice short", "line 2: the key must have 24 to 512"),
        (f"alice {ALICE}\nalice {BOB}", "line 2: the name of line 1 is there twice"),
        (f"# a\nalice {ALICE}\nbob {ALICE}", "line 3: the key of line 2 is there twice"),
        ("alice \xe4" + "x" * 30, "line 1: the key must have"),
        (f"{ALICE} operator", "line 1: a name has 1 to 23 of"),
        (f"{ALICE}{BOB} operator", "line 1: a name has 1 to 23 of"),
        (f"{ALICE} {BOB}", "line 1: a name has 1 to 23 of"),
        (f"{ALICE[:23]} {ALICE[23:]}", "line 1: the key must have"),
        (f"{ALICE[:23]} {BOB}\n{ALICE[:23]} {OPS}", "line 2: the name of line 1 is there twice"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_and_no_key_is_shown(text: str, words: str) -> None:
    """File, line and reason; nothing that the file has, because in a damaged one a name may be (part of) a key."""
    with pytest.raises(KeyFileError, match=words) as caught:
        keys_of(text.encode(), "/etc/keys")
    assert "/etc/keys" in str(caught.value)
    assert not [key for key in (ALICE, BOB, OPS) for at in range(len(key) - 7) if key[at : at + 8] in str(caught.value)]


def test_what_is_taken_for_a_name_is_shorter_than_every_key() -> None:
    """Names are logged and counted under: none may be a key, also where two lines of a file ran together."""
    (key,) = keys_of(f"{'n' * 23} {'k' * 24}".encode(), "keys")
    assert len(key.name) == 23
    with pytest.raises(KeyFileError, match="line 1: a name has"):
        keys_of(f"{'n' * 24} {'k' * 24}".encode(), "keys")


@pytest.mark.parametrize(("mode", "words"), [(0o644, "read by others"), (0o660, "may write to it"), (0o640, "read by")])
def test_a_file_that_others_may_read_is_refused(tmp_path: Path, mode: int, words: str) -> None:
    """As ssh does with its keys."""
    with pytest.raises(KeyFileError, match=words):
        KeyFile(file_of(tmp_path, f"alice {ALICE}", mode))
    link = tmp_path / "link"
    link.symlink_to(file_of(tmp_path, f"alice {ALICE}"))
    with pytest.raises(KeyFileError, match="link"):
        KeyFile(link)
    with pytest.raises(KeyFileError, match="No such file"):
        KeyFile(tmp_path / "gone")


def test_a_key_is_taken_away_while_the_service_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A changed file counts; one that cannot be used leaves the keys as they were and says so, without a key."""
    path = file_of(tmp_path, f"alice {ALICE}\nbob {BOB}\n")
    keys = KeyFile(path)
    assert not keys.refresh()
    path.write_text(f"bob {BOB}\n")
    with caplog.at_level(logging.WARNING):
        assert keys.refresh()
        assert keys.find(ALICE.encode()) is None and keys.find(BOB.encode()) is not None
        path.write_text(f"bob {ALICE} nonsense and more\n")
        assert not keys.refresh()
        os.unlink(path)
        assert not keys.refresh()
    assert keys.find(BOB.encode()) is not None
    assert "bob" in caplog.text and "stay as they were" in caplog.text
    assert ALICE not in caplog.text and BOB not in caplog.text


#: Path → who may, without a key file and with one: n nobody in particular, c a client's key, o an operator's, r the run's.
TABLE = {
    "/health": ("ncor", "ncor"),
    "/live": ("ncor", "ncor"),
    "/v1/models": ("ncor", "cor"),
    "/v1/completions": ("ncor", "cor"),
    "/v1/chat/completions": ("ncor", "cor"),
    "/version": ("ncor", "cor"),
    "/nothing": ("ncor", "cor"),
    "/health/": ("ncor", "cor"),
    "/metrics": ("ncor", "or"),
    "/prometheus/metrics": ("ncor", "or"),
    "/server_info": ("ncor", "or"),
    "/cluster_info": ("ncor", "or"),
    "/debug/routing": ("r", "or"),
    "/debug/reservations": ("r", "or"),
    "/debug/": ("r", "or"),
    "/internal/drain": ("r", "r"),
    "/internal/anything": ("r", "r"),
}


@pytest.mark.parametrize("path", TABLE)
def test_who_may(path: str, tmp_path: Path) -> None:
    """The table of the threat model, by hand."""
    keys = KeyFile(file_of(tmp_path, f"alice {ALICE}\nops {OPS} operator"))
    headers = {"n": [], "c": bearer(ALICE), "o": bearer(OPS), "r": [(wire.KEY_HEADER.encode(), RUN.encode())]}
    for access, wanted in ((Access(RUN), TABLE[path][0]), (Access(RUN, keys), TABLE[path][1])):
        may = {who for who, sent in headers.items() if access.may(access.caller(sent, "x"), NEED_OF(path))}
        assert may == set(wanted), (path, access.keys)


def test_every_need_is_in_the_table() -> None:
    """A new need must be thought about."""
    assert {NEED_OF(path) for path in TABLE} == set(Need)
