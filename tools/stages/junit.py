"""Results per test: read from the live file of a pytest run, merged over reruns, written as JUnit XML."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

#: Signs of the machine, not of the product, in a failure's text.
_INFRASTRUCTURE = (
    "No space left on device", "Cannot allocate memory", "Too many open files", "Address already in use", "No such device",
    "no mpiexec beside", "Temporary failure in name resolution", "was killed by", "did not end within the line's",
    "began and did not end", "CUDA error: out of memory", "worker 'gw", "pytest INTERNALERROR",
)  # fmt: skip
#: How pytest-timeout's message about a test begins.
_TIMED_OUT = ("Failed: Timeout (>", "Timeout (>")


@dataclass(frozen=True)
class CaseResult:
    """One test's result.

    Attributes:
        id: Node id.
        outcome: passed, failed, error, skipped, unfinished; by a line's marker also xfailed or unstable.
        message: The assertion or exception in one line, why it was skipped, or how it ended.
        attempts: Outcome of every attempt, in order; the last one is ``outcome``.
    """

    id: str
    outcome: str
    seconds: float = 0.0
    message: str = ""
    details: str = ""
    attempts: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether it counts against the stage."""
        return self.outcome in ("failed", "error", "unfinished")

    @property
    def timed_out(self) -> bool:
        """Whether it failed because its time was over."""
        return self.message.startswith(_TIMED_OUT)

    @property
    def flaky(self) -> bool:
        """It failed, and passed when it was tried again."""
        return self.outcome == "passed" and any(a not in ("passed", "skipped") for a in self.attempts)


def cause_of(case: CaseResult) -> str:
    """``flaky``, ``infrastructure`` or ``product``: likely, for the reader's order of looking."""
    if case.flaky:
        return "flaky"
    text = f"{case.message}\n{case.details}"
    return "infrastructure" if any(sign in text for sign in _INFRASTRUCTURE) else "product"


@dataclass(frozen=True)
class LiveResult:
    """What a pytest process wrote down.

    Attributes:
        selected: Node ids of what was to run; empty when it did not get that far.
        waived: Node ids of what was taken out because it is waived.
        services, alone: Node ids of what was left to other processes: it wants the machine almost, or quite, for itself.
        exit_code: Of the process; None when it was ended because its time was over.
        end: How it ended, in words.
        tail: The last of its output.
        interrupted: It was stopped from outside.
    """

    cases: tuple[CaseResult, ...]
    selected: tuple[str, ...]
    exit_code: int | None
    waived: tuple[str, ...] = ()
    services: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    end: str = ""
    tail: str = ""
    interrupted: bool = False

    @property
    def not_started(self) -> tuple[str, ...]:
        """What was to run and never began, because the process ended first."""
        begun = {case.id for case in self.cases}
        return tuple(test for test in self.selected if test not in begun)


def read_live(
    path: Path, *, exit_code: int | None = 0, late: str = "", tail: str = "", interrupted: bool = False
) -> LiveResult:
    """Assemble the results. A torn last line is ignored.

    A test that began and never ended is unfinished, or, when the run was stopped from outside, not started.
    """
    reports: dict[str, list[dict[str, Any]]] = {}
    errors: list[CaseResult] = []
    lists: dict[str, tuple[str, ...]] = {}
    internal = ""
    for text in path.read_text("utf-8").splitlines() if path.exists() else []:
        try:
            event = json.loads(text)
        except json.JSONDecodeError:
            continue
        kind = event["event"]
        if kind == "start":
            reports.setdefault(event["id"], [])
        elif kind == "report":
            reports.setdefault(event["id"], []).append(event)
        elif kind == "collect_error":
            errors.append(CaseResult(event["id"], "error", 0.0, event["message"], event["details"], ("error",)))
        elif kind == "internal_error":
            internal = event["message"]
        else:
            lists[kind] = (*lists.get(kind, ()), *event["ids"])
    cases = tuple(_case(test, events) for test, events in reports.items())
    if interrupted:
        cases = tuple(case for case in cases if case.outcome != "unfinished")
    return LiveResult(
        (*errors, *cases), lists.get("selected", ()), exit_code, lists.get("waived", ()), lists.get("services", ()),
        lists.get("alone", ()), late or _end(exit_code, internal, tail), tail, interrupted,
    )  # fmt: skip


def _end(exit_code: int | None, internal: str, tail: str) -> str:
    """How a pytest process ended, in words."""
    lines = [text.strip() for text in tail.splitlines() if text.strip()]
    internal = internal or next((text for text in reversed(lines) if text.startswith("INTERNALERROR>")), "")
    if internal:
        return f"pytest INTERNALERROR: {internal.removeprefix('INTERNALERROR>').strip()}"
    if exit_code is not None and exit_code > 128:
        return f"pytest was killed by signal {exit_code - 128}"
    missing = [text.removeprefix("ERROR: not found: ") for text in lines if text.startswith("ERROR: not found: ")]
    if missing:
        return f"no such test: {', '.join(missing)}"
    said = next((text for text in reversed(lines) if text.lower().startswith(("error", "importerror"))), "")
    said = said or next((text for text in reversed(lines) if "Error" in text or "Warning" in text), "")
    return f"pytest exit {exit_code}" + (f": {said}" if said else "")


def _case(test: str, events: list[dict[str, Any]]) -> CaseResult:
    seconds = sum(e["seconds"] for e in events)
    bad = next((e for e in events if e["outcome"] == "failed"), None)
    if bad is not None:
        # A worker that died under a test leaves no more than this.
        died = "crashed while running" in bad["message"] and bad["message"].startswith("worker ")
        outcome = "unfinished" if died else "failed" if bad["when"] == "call" else "error"
        return CaseResult(test, outcome, seconds, bad["message"], bad["details"], (outcome,))
    if not any(e["when"] == "teardown" for e in events):
        return CaseResult(test, "unfinished", seconds, "began and did not end", "", ("unfinished",))
    skip = next((e for e in events if e["outcome"] == "skipped"), None)
    if skip is not None:
        return CaseResult(test, "skipped", seconds, skip["message"], "", ("skipped",))
    return CaseResult(test, "passed", seconds, attempts=("passed",))


def merge(first: tuple[CaseResult, ...], again: tuple[CaseResult, ...]) -> tuple[CaseResult, ...]:
    """Results after a rerun: the last outcome counts, every attempt stays visible."""
    later = {case.id: case for case in again}
    merged = []
    for case in first:
        second = later.pop(case.id, None)
        if second is None:
            merged.append(case)
        else:
            details = second.details or case.details
            message = second.message or case.message
            attempts = case.attempts + second.attempts
            merged.append(replace(second, message=message, details=details, attempts=attempts))
    return (*merged, *later.values())


#: JUnit's element by outcome; what is not here was skipped, expected or known to be unstable.
_TAGS = {"passed": "", "failed": "failure", "error": "error", "unfinished": "error"}


def write_junit(path: Path, suite: str, cases: tuple[CaseResult, ...]) -> None:
    """A stage's merged results as one file; a flaky test carries its failed attempts in its output."""
    tags = [_TAGS.get(case.outcome, "skipped") for case in cases]
    root = ElementTree.Element("testsuites")
    element = ElementTree.SubElement(
        root, "testsuite", name=suite, tests=str(len(cases)), failures=str(tags.count("failure")),
        errors=str(tags.count("error")), skipped=str(tags.count("skipped")), time=f"{sum(c.seconds for c in cases):.3f}",
    )  # fmt: skip
    for case, tag in zip(cases, tags, strict=True):
        classname, _, name = case.id.partition("::")
        node = ElementTree.SubElement(element, "testcase", classname=classname, name=name, time=f"{case.seconds:.3f}")
        if tag:
            child = ElementTree.SubElement(node, tag, message=_clean(case.message))
            child.text = _clean(case.details)
        if case.flaky:
            ElementTree.SubElement(
                node, "system-out"
            ).text = f"attempts: {', '.join(case.attempts)}\n{_clean(case.details)}"
    path.parent.mkdir(parents=True, exist_ok=True)
    ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def _clean(text: str) -> str:
    """Without the control characters that XML cannot carry."""
    return "".join(c if c in "\t\n\r" or ord(c) >= 32 else "\N{REPLACEMENT CHARACTER}" for c in text)
