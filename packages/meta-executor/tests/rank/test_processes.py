"""Whether a peer's process has ended: what this host can say, and what it cannot."""

from __future__ import annotations

import subprocess
import sys

import pytest

from meta_executor.rank import startup
from meta_executor.rank.startup import process_is_gone, this_process
from meta_executor.supervise.procfs import ProcessIdentity


def test_a_process_that_cannot_be_seen_from_here_is_never_taken_for_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end is known on its own kernel, in its own namespace of processes; a container next door knows nothing of it."""
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    identity = ProcessIdentity.of(child.pid)
    assert identity is not None
    host, pid, _ = this_process().split("/")
    assert int(pid) != child.pid
    name = f"{host}/{child.pid}/{identity.start_ticks}"
    assert not process_is_gone(name) and not process_is_gone(this_process())
    child.communicate()
    assert process_is_gone(name)
    for no_name in ("", "1", host, f"{host}/", f"{host}/x/1", f"{host}/1", f"{host}/-1/2"):
        assert not process_is_gone(no_name), "what a peer calls itself need not be a name"
    boot, _, space = host.partition(":")
    assert space.startswith("pid:")
    for elsewhere in (f"{boot}:pid:[1]", f"another-{boot}:{space}"):
        assert not process_is_gone(f"{elsewhere}/{child.pid}/{identity.start_ticks}")
    startup._host.cache_clear()
    monkeypatch.setattr("os.readlink", lambda path: "pid:[1]")
    try:
        assert not process_is_gone(name), "seen from another namespace"
    finally:
        startup._host.cache_clear()
