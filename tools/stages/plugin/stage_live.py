"""pytest plugin: writes what happens as it happens, one JSON line per event, so that a killed run still says what it knew.

The runner loads it with ``-p stage_live`` and names the file in ``STAGE_LIVE_FILE``. Only the controlling process writes.
"""

from __future__ import annotations

import json
import os
from typing import Any

_DETAILS_MAX = 20_000


class Writer:
    """Appends events."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed at the session's end

    def write(self, **event: Any) -> None:
        """One line, flushed: the next instruction may be the process's last."""
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()

    def pytest_collection_finish(self, session: Any) -> None:
        """How many were selected."""
        self.write(event="collected", count=len(session.items))

    def pytest_collectreport(self, report: Any) -> None:
        """A file that cannot be imported is a failure with a name."""
        if report.failed:
            self.write(event="collect_error", id=report.nodeid, details=str(report.longrepr)[-_DETAILS_MAX:])

    def pytest_runtest_logstart(self, nodeid: str, location: object) -> None:
        """From here on the test is unfinished until its teardown is reported."""
        self.write(event="start", id=nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """One phase of one test."""
        message, details = "", ""
        if report.failed:
            details = str(report.longrepr)[-_DETAILS_MAX:]
            message = details.strip().splitlines()[-1] if details.strip() else ""
        elif report.skipped:
            message = report.longrepr[2] if isinstance(report.longrepr, tuple) else getattr(report, "wasxfail", "")
        self.write(
            event="report", id=report.nodeid, when=report.when, outcome=report.outcome, seconds=report.duration,
            message=message, details=details,
        )  # fmt: skip

    def pytest_sessionfinish(self, session: Any, exitstatus: int) -> None:
        """The session came to its own end."""
        self.write(event="end", exit=int(exitstatus))


def pytest_configure(config: Any) -> None:
    """Register in the controlling process only: not in xdist's workers, not in the ranks of a world."""
    path = os.environ.get("STAGE_LIVE_FILE")
    if path and not hasattr(config, "workerinput") and "PMI_SIZE" not in os.environ:
        config.pluginmanager.register(Writer(path), "stage_live_writer")
