"""pytest plugin: writes what happens as it happens, one JSON line per event, so that a killed run still says what it knew.

The runner loads it with ``-p stage_live`` and names the file in ``STAGE_LIVE_FILE``. Only the controlling process writes
results. In every process it takes out what is waived: the targets in ``STAGE_WAIVED`` (JSON) and what stands below them
(pytest's own ``--deselect`` goes by the beginning of a name, and would take test_more out with test_m); and of a line's parts
those that are not ``STAGE_PART``: tests of MPI worlds, whose ranks spin, and of services on a GPU want the machine for
themselves (``alone``), other services mostly wait and may have one beside them (``services``), all else is ``parallel``.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

import pytest

_DETAILS_MAX = 20_000
_MESSAGE_MAX = 1_000
PARTS = ("parallel", "services", "alone")


class Writer:
    """Appends events."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()
        self._selected = False

    def write(self, **event: Any) -> None:
        """One line, flushed: the next instruction may be the process's last."""
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Nothing more will be written: a file left open is a warning, and where warnings are errors a failed test."""
        self._file.close()

    def pytest_collection_finish(self, session: Any) -> None:
        """What was selected: what of it never began is known after a crash, too."""
        self._select([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        """The same in parallel, where only the workers collect: all of them the same."""
        self._select(list(ids))

    def _select(self, ids: list[str]) -> None:
        if ids and not self._selected:
            self._selected = True
            self.write(event="selected", ids=ids)

    def pytest_collectreport(self, report: Any) -> None:
        """A file that cannot be imported is a failure with a name; one that skips itself whole is a skip with one."""
        if report.failed:
            text = str(report.longrepr)
            lines = [line.removeprefix("E").strip() for line in text.splitlines() if line.startswith("E ")]
            message = f"cannot be collected: {lines[-1] if lines else text.strip().splitlines()[-1:]}"[:_MESSAGE_MAX]
            self.write(event="collect_error", id=report.nodeid, message=message, details=text[-_DETAILS_MAX:])
        elif report.skipped:
            self._report(report.nodeid, "setup", "skipped", 0.0, _skip_reason(report), "")
            self._report(report.nodeid, "teardown", "passed", 0.0, "", "")

    def pytest_internalerror(self, excrepr: Any) -> None:
        """pytest itself, or a plugin of somebody's, failed: no test did."""
        crash = getattr(excrepr, "reprcrash", None)
        self.write(event="internal_error", message=str(crash.message if crash else excrepr)[-_MESSAGE_MAX:])

    def pytest_runtest_logstart(self, nodeid: str, location: object) -> None:
        """From here on the test is unfinished until its teardown is reported."""
        self.write(event="start", id=nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """One phase of one test."""
        message, details = "", ""
        if report.failed:
            details = str(report.longrepr)[-_DETAILS_MAX:]
            message = _failure(report.longrepr, details)
        elif report.skipped:
            message = _skip_reason(report)
        self._report(report.nodeid, report.when, report.outcome, report.duration, message, details)

    def _report(self, test: str, when: str, outcome: str, seconds: float, message: str, details: str) -> None:
        self.write(
            event="report", id=test, when=when, outcome=outcome, seconds=seconds, message=message, details=details
        )

    def pytest_unconfigure(self) -> None:
        """After the last hook that writes."""
        self.close()


def _failure(longrepr: Any, details: str) -> str:
    """The assertion or the exception, not the line that pytest happens to print last."""
    crash = getattr(longrepr, "reprcrash", None)
    lines = (str(crash.message) if crash is not None else details).strip().splitlines()
    if not lines:
        return ""
    return (
        " ".join(line.strip() for line in lines[:4])[:_MESSAGE_MAX] if crash is not None else lines[-1][:_MESSAGE_MAX]
    )


def _skip_reason(report: Any) -> str:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else getattr(report, "wasxfail", "")
    return str(reason).removeprefix("Skipped: ")[:_MESSAGE_MAX]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Take out what is waived of what the expressions left, then the other parts, and write down what that was."""
    if not _ours():
        return
    targets = json.loads(os.environ.get("STAGE_WAIVED", "[]"))
    _take_out(config, items, "waived", [item for item in items if any(_covers(t, item.nodeid) for t in targets)])
    part = os.environ.get("STAGE_PART", "all")
    if part == "all":
        return
    parts = {name: [item for item in items if _part(item) == name] for name in PARTS}
    for name in PARTS:
        if name != part:
            _take_out(config, items, name if part == "parallel" else "", parts[name])
    if part == "services":
        _longest_first(items)


def _part(item: Any) -> str:
    if item.get_closest_marker("mpi"):
        return "alone"
    if item.get_closest_marker("service"):
        return "alone" if item.get_closest_marker("gpu") else "services"
    return "parallel"


def _longest_first(items: list[Any]) -> None:
    """Files in the order of what their tests say that they take, so that none that takes long is left for the end."""
    takes: dict[Any, float] = {}
    for item in items:
        seconds = item.get_closest_marker("service").kwargs.get("seconds", 0.0)
        takes[item.path] = max(seconds, takes.get(item.path, 0.0))
    items.sort(key=lambda item: -takes[item.path])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: Any, log: Any) -> Any:
    """Services share fixtures within a file: each file goes to one worker, and only when that one has nothing left."""
    if not _ours() or os.environ.get("STAGE_PART") != "services":
        return None
    from xdist.scheduler import LoadFileScheduling

    class FilesInTurn(LoadFileScheduling):  # type: ignore[misc]
        """As ``loadfile``, which hands out the next file while up to two tests are left."""

        def _reschedule(self, node: Any) -> None:
            # A worker begins its last test only when it knows what comes next.
            if not self.workqueue or self._pending_of(self.assigned_work[node]) < 2:
                super()._reschedule(node)

    return FilesInTurn(config, log)


def _take_out(config: Any, items: list[Any], what: str, gone: list[Any]) -> None:
    if not gone:
        return
    out = {item.nodeid for item in gone}
    items[:] = [item for item in items if item.nodeid not in out]
    config.hook.pytest_deselected(items=gone)
    # Every worker takes out the same; one of them says so.
    if what and getattr(config, "workerinput", {"workerid": "gw0"})["workerid"] == "gw0":
        with contextlib.closing(Writer(os.environ["STAGE_LIVE_FILE"])) as writer:
            writer.write(event=what, ids=sorted(out))


def _covers(target: str, test: str) -> bool:
    return test == target or test.startswith((target.rstrip("/") + "/", target + "::", target + "["))


def _ours() -> bool:
    """Whether this is the runner's own process or a worker of it: not a rank of a world, not a pytest that a test starts."""
    return os.environ.get("STAGE_LIVE_FILE", "") != "" and not {"PMI_SIZE", "OMPI_COMM_WORLD_SIZE"} & set(os.environ)


def pytest_configure(config: Any) -> None:
    """Register in the controlling process only: not in xdist's workers, not in the ranks of a world."""
    if _ours() and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Writer(os.environ["STAGE_LIVE_FILE"]), "stage_live_writer")
