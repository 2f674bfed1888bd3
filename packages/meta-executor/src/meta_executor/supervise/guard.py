"""The guard of one rank: starts it, outlives it, and says how it ended.

``mpiexec`` starts guards, each guard starts its rank. Hydra watches the guard, so the death of a rank does not make it
kill the survivors before they have reached their verdict and written their evidence, and the wait status of the first
death is the real one, not hydra's guess.

A guard ends its rank when whoever it works for is gone: the launcher, or hydra's proxy (its own parent). Its rank ends
with it, by the operating system's parent-death signal. So no order of kills leaves a rank behind.

This file imports nothing heavy: it runs once per rank beside everything else.
"""

from __future__ import annotations

import argparse
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path

from meta_executor.mpi_launcher import rank_of
from meta_executor.supervise.procfs import ProcessIdentity, descends_from, die_with_parent
from meta_executor.supervise.report import Reporter

#: After an abnormal death of its rank a guard stays, so that hydra spares the survivors, for at most this long (s).
LINGER_S = 30.0


def describe_status(status: int) -> str:
    """A wait status as a person reads it: ``exit 3``, ``signal SIGKILL``."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            return f"signal {signal.Signals(number).name}"
        except ValueError:
            return f"signal {number}"
    return f"exit {os.WEXITSTATUS(status)}"


def name_of(pid: int) -> str:
    """A process's short name, for the report."""
    try:
        return Path(f"/proc/{pid}/comm").read_text("utf-8", errors="replace").strip()
    except OSError:
        return f"process {pid}"


def main(arguments: list[str] | None = None) -> int:
    """Run one rank. Exit code: the rank's, or 128 + signal."""
    parser = argparse.ArgumentParser(prog="meta_executor.supervise.guard")
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--owner", required=True)
    parser.add_argument("--instance-id", default="")
    parser.add_argument("--launcher-pid", type=int, default=0)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- command of the rank")
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("no command for the rank")
    rank = rank_of(os.environ)
    reporter = Reporter(options.run_dir, options.owner, rank, options.instance_id)
    parent_pid = os.getppid()
    watched = {pid: name_of(pid) for pid in (options.launcher_pid, parent_pid) if pid > 1}

    with selectors.DefaultSelector() as selector:
        # A signal just before a wait that blocks would be seen after it: each writes a byte, and the byte ends the wait.
        wakeup, woken = os.pipe()
        os.set_blocking(wakeup, False)
        os.set_blocking(woken, False)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        selector.register(wakeup, selectors.EVENT_READ, 0)
        handles: dict[int, int] = {}
        for pid in watched:
            try:
                handles[pid] = os.pidfd_open(pid)
                selector.register(handles[pid], selectors.EVENT_READ, pid)
            except ProcessLookupError:
                return 128 + signal.SIGKILL
        if options.launcher_pid and not descends_from(parent_pid, options.launcher_pid):
            return 128 + signal.SIGKILL  # its world was ended before it began: somebody else adopted it
        # close_fds=False: the rank inherits the launcher's connection (PMI_FD) under the same number.
        child = subprocess.Popen(command, close_fds=False, preexec_fn=die_with_parent)
        identity = ProcessIdentity.of(child.pid)
        reporter.send(
            "started",
            rank_pid=child.pid,
            parent_pid=parent_pid,
            rank_start_ticks=identity.start_ticks if identity else 0,
            guard_start_ticks=getattr(ProcessIdentity.of(os.getpid()), "start_ticks", 0),
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda received, _frame: child.send_signal(received))
        handle = os.pidfd_open(child.pid)
        selector.register(handle, selectors.EVENT_READ, child.pid)
        while True:
            ended = {key.data for key, _ in selector.select()}
            if 0 in ended:
                os.read(wakeup, 512)
            if child.pid in ended:
                break
            for pid in ended & set(watched):
                selector.unregister(handles[pid])
                reporter.send("orphaned", what=watched[pid], gone_pid=pid)
                child.kill()
        _, status = os.waitpid(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        reporter.send("exited", rank_pid=child.pid, status=status, text=describe_status(status))
        if status != 0:
            # The launcher decides when the world ends; without one, or when it does not, the guard leaves by itself.
            selector.unregister(handle)
            selector.unregister(wakeup)
            deadline = time.monotonic() + (LINGER_S if options.launcher_pid else 0.0)
            stop: list[int] = []
            signal.signal(signal.SIGTERM, lambda received, _frame: stop.append(received))
            while not stop and (left := deadline - time.monotonic()) > 0:
                if selector.select(min(left, 0.2)):
                    break
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


if __name__ == "__main__":
    sys.exit(main())
