"""Run a command so that nothing of it outlives whoever asked for it: not an MPI world, not a service, not a daemon.

    python tools/lifeline.py FD COMMAND …

The asker holds the write end of a pipe, this process the read end FD. When the write end is closed, by the asker or by the
kernel because the asker died of whatever cause, everything that the command started is killed; so is what it left when it has
ended by itself. This process is the "subreaper" of them all: whoever loses its parent becomes its child, so a rank with a
session of its own or a daemon that forked twice is still found below it.

Exit code: the command's (128 + number for a signal), 137 when the line was cut. Standard library only, Linux only.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)
CUT = 128 + signal.SIGKILL


class Tethered:
    """A command on a lifeline, in a session of its own.

    Args:
        command: Program and arguments.
        options: As for ``subprocess.Popen``.
    """

    def __init__(self, command: list[str], **options: Any) -> None:
        read_end, self._line = os.pipe()
        try:
            self.process: subprocess.Popen[str] = subprocess.Popen(
                [sys.executable, "-I", str(Path(__file__).resolve()), str(read_end), *command],
                pass_fds=(read_end,), start_new_session=True, **options,
            )  # fmt: skip
        except BaseException:
            self.cut()
            raise
        finally:
            os.close(read_end)

    def cut(self) -> None:
        """Have everything killed that is still there. Returns at once; ``process.wait()`` returns when all of it is gone."""
        line, self._line = self._line, -1
        if line >= 0:
            os.close(line)


def descendants(root: int) -> list[int]:
    """Processes below one, zombies left out."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                text = Path(entry.path, "stat").read_text("ascii", errors="replace")
            except OSError:
                continue
            state, parent = text[text.rindex(")") + 2 :].split()[:2]
            children.setdefault(int(parent), []).append(int(entry.name) if state not in "ZX" else -int(entry.name))
    found, open_to_visit = [], [root]
    while open_to_visit:
        for child in children.get(open_to_visit.pop(), []):
            open_to_visit.append(abs(child))
            if child > 0:
                found.append(child)
    return found


def sweep() -> None:
    """Kill everything below this process and wait until it is gone.

    Whoever is forked while this goes on is found after the death of its parent: each death that is reaped here starts another
    look.
    """
    while True:
        for pid in descendants(os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _bind_to_parent() -> None:
    """For the command, between fork and exec: it dies with this process, should somebody kill this one."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def run(line: int, command: list[str]) -> int:
    """Run the command until it ends or the line is cut."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wakeup, told = os.pipe()
    os.set_blocking(told, False)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    asked_to_end: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, _frame: asked_to_end.append(received))
    os.set_inheritable(line, False)
    try:
        child = subprocess.Popen(command, preexec_fn=_bind_to_parent)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    with selectors.DefaultSelector() as selector:
        selector.register(line, selectors.EVENT_READ)
        selector.register(wakeup, selectors.EVENT_READ)
        while True:
            ready = {key.fd for key, _ in selector.select()}
            if line in ready or asked_to_end:
                sweep()
                return CUT
            os.read(wakeup, 512)
            while True:
                try:
                    pid, status = os.waitpid(-1, os.WNOHANG)
                except ChildProcessError:
                    pid = 0
                if pid == 0:
                    break
                if pid == child.pid:
                    code = os.waitstatus_to_exitcode(status)
                    sweep()
                    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), sys.argv[2:]))
