"""pytest plugin: writes what happens as it happens, one JSON line per event, so that a killed run still says what it knew.

The runner loads it with ``-p stage_live`` and names the file in ``STAGE_LIVE_FILE``. Only the controlling process writes
results. In every process it takes out what is waived: the targets in ``STAGE_WAIVED`` (JSON) and what stands below them.
pytest's own ``--deselect`` goes by the beginning of a name, and would take test_more out with test_m.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

import pytest

_DETAILS_MAX = 20_000


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

    def pytest_unconfigure(self) -> None:
        """After the last hook that writes."""
        self.close()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Take out what is waived of what the expressions left, and write down what that was."""
    targets = json.loads(os.environ.get("STAGE_WAIVED", "[]"))
    if not targets or "PMI_SIZE" in os.environ:
        return
    waived = [item for item in items if any(_covers(target, item.nodeid) for target in targets)]
    if waived:
        out = {item.nodeid for item in waived}
        items[:] = [item for item in items if item.nodeid not in out]
        config.hook.pytest_deselected(items=waived)
        # Every worker takes out the same; one of them says so.
        if getattr(config, "workerinput", {"workerid": "gw0"})["workerid"] == "gw0":
            with contextlib.closing(Writer(os.environ["STAGE_LIVE_FILE"])) as writer:
                writer.write(event="waived", ids=sorted(out))


def _covers(target: str, test: str) -> bool:
    return test == target or test.startswith((target.rstrip("/") + "/", target + "::", target + "["))


def pytest_configure(config: Any) -> None:
    """Register in the controlling process only: not in xdist's workers, not in the ranks of a world."""
    path = os.environ.get("STAGE_LIVE_FILE")
    if path and not hasattr(config, "workerinput") and "PMI_SIZE" not in os.environ:
        config.pluginmanager.register(Writer(path), "stage_live_writer")
