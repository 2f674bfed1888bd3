"""Evidence of a process's end that nobody here started: by pidfd, and never by another process of the same number."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from kv_bounce_planner.sessions import PeerId, ProcessIdentity, ProcessWatch, processes

PEER = PeerId("ctx", "c1", 0)
PROGRAM = """
import sys, msgspec
from kv_bounce_planner.sessions import ProcessIdentity
sys.stdout.buffer.write(msgspec.json.encode(ProcessIdentity.own()) + b"\\n")
sys.stdout.flush()
sys.stdin.read()
"""


@pytest.fixture
def child() -> Iterator[tuple[subprocess.Popen[bytes], ProcessIdentity]]:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield process, msgspec.json.decode(process.stdout.readline(), type=ProcessIdentity)
        process.kill()


def test_an_end_is_told_once_and_only_then(child: tuple[subprocess.Popen[bytes], ProcessIdentity]) -> None:
    """A living process is not told; an ended one is, before anybody waited for it, and once."""
    process, identity = child
    assert identity.pid == process.pid and identity.is_local
    with ProcessWatch() as watch:
        assert watch.watch(PEER, identity) and watch.watch(PEER, identity)
        assert watch.ended() == ()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, and still a zombie: not reaped
        assert watch.ended() == (PEER,)
        assert watch.ended() == ()


def test_a_process_that_is_gone_or_replaced_has_ended(child: tuple[subprocess.Popen[bytes], ProcessIdentity]) -> None:
    """No process of that number, or one that started at another time: the peer's has ended."""
    process, identity = child
    with ProcessWatch() as watch:
        later = msgspec.structs.replace(identity, started=identity.started - 1)
        assert watch.watch(PEER, later) and watch.ended() == (PEER,)
        process.kill()
        process.wait()
        assert watch.watch(PEER, identity), "a peer that was told may be watched again"
        assert watch.ended() == (PEER,)


def test_a_living_process_that_is_hidden_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """``/proc`` may show only one's own processes (hidepid): whose number it is cannot be seen, so nothing is said."""
    own = ProcessIdentity.own()
    before = len(os.listdir("/proc/self/fd"))
    with ProcessWatch() as watch:
        monkeypatch.setattr(processes, "_started", lambda pid: None)
        assert not watch.watch(PEER, own) and watch.ended() == ()
        monkeypatch.undo()
        assert watch.watch(PEER, own), "it may be watched when it can be seen"
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("change", [{"kernel": "another"}, {"namespace": 1}])
def test_another_machines_number_says_nothing(change: dict[str, object]) -> None:
    """A number of another kernel or namespace is not looked up here, whoever has it."""
    there = msgspec.structs.replace(ProcessIdentity.own(), **change)
    with ProcessWatch() as watch:
        assert not there.is_local and not watch.watch(PEER, there)
        assert watch.ended() == ()


@pytest.mark.parametrize("pid", [0, -1, 1 << 31, 1 << 62])
def test_a_number_that_no_process_has_is_not_read(pid: int) -> None:
    """It comes from a peer, or from a client; the kernel's own refusal would be another kind of error."""
    told = msgspec.json.encode(msgspec.structs.replace(ProcessIdentity.own(), pid=pid))
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(told, type=ProcessIdentity)


@pytest.mark.parametrize("call", ["os.pidfd_open", "pathlib.Path.read_text"])
def test_what_could_not_be_watched_is_not_taken_for_watched(
    child: tuple[subprocess.Popen[bytes], ProcessIdentity], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """No descriptor is left: said, nothing is kept, and the next try watches."""
    process, identity = child

    def refused(*_: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    before = len(os.listdir("/proc/self/fd"))
    with ProcessWatch() as watch:
        monkeypatch.setattr(ProcessIdentity, "is_local", True)
        with monkeypatch.context() as full:
            full.setattr(call, refused)
            with pytest.raises(OSError, match="too many"):
                watch.watch(PEER, identity)
        assert len(os.listdir("/proc/self/fd")) == before
        assert watch.watch(PEER, identity) and watch.ended() == ()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert watch.ended() == (PEER,)


def test_close_gives_descriptors_back(child: tuple[subprocess.Popen[bytes], ProcessIdentity]) -> None:
    """One descriptor a peer, and none after the end or after close."""
    process, identity = child
    before = len(os.listdir("/proc/self/fd"))
    watch = ProcessWatch()
    watch.watch(PEER, identity)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    watch.close()
    assert len(os.listdir("/proc/self/fd")) == before
    watch.watch(PEER, identity)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert watch.ended() == (PEER,)
    assert len(os.listdir("/proc/self/fd")) == before
