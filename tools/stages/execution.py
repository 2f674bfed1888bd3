"""Runs a plan's stages, line by line, and says what is known about each line whatever happens on the way.

A line of a list is the unit: it has pytest processes of its own, reruns of its own and a verdict of its own, and the worst
line is the stage's verdict. So a misspelt name, a crash or an interrupt costs the line that it happens in, and nothing that
another line knows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from lifeline import Tethered

from . import needs
from .junit import CaseResult, LiveResult, cause_of, merge, read_live
from .lists import TestLine, covers
from .plan import RunPlan, StagePlan
from .verdicts import Verdict, worst
from .waivers import waived_tests

#: More failures than this in a stage are not tried again: it is broken, not flaky.
RERUN_FAILURES_MAX = 5
#: (seconds of a failed test, reruns): short tests are tried twice more, longer ones once.
RERUN_STEPS = ((300.0, 2), (600.0, 1))
#: Lines of a pytest process's output that are kept to say why it ended (count).
_TAIL_LINES = 60
#: Files of tests of services that run at once (count).
SERVICES_AT_ONCE = 2
_PLUGIN = Path(__file__).resolve().parent / "plugin"


def reruns_allowed(case: CaseResult) -> int:
    """How often a failed test is tried again, by how long it took. Never what did not end, or ran out of its time."""
    if case.outcome not in ("failed", "error") or "::" not in case.id or case.timed_out:
        return 0
    return next((reruns for limit_s, reruns in RERUN_STEPS if case.seconds <= limit_s), 0)


@dataclass
class LineResult:
    """What is known about a line.

    Attributes:
        cases: Its tests' results.
        waived: Its tests that were taken out, each with the waiver's reason.
        not_started: Tests that were selected and never began (count).
        begun: Whether it was started at all.
        interrupted: It was stopped from outside.
    """

    line: TestLine
    cases: tuple[CaseResult, ...] = ()
    waived: list[tuple[str, str]] = field(default_factory=list)
    not_started: int = 0
    begun: bool = False
    interrupted: bool = False

    @property
    def verdict(self) -> Verdict:
        """A failure counts whatever else happened; what was stopped is not green; where no test ran, nothing is covered."""
        if any(case.failed for case in self.cases):
            return Verdict.FAILED
        if self.interrupted or not self.begun or self.not_started:
            return Verdict.NOT_RUN
        if self.waived and not self.cases:
            return Verdict.WAIVED
        if self.count("unstable") or any(case.flaky for case in self.cases):
            return Verdict.FLAKY
        return Verdict.PASSED if self.count("passed") or self.count("xfailed") else Verdict.NO_COVERAGE

    @property
    def reason(self) -> str:
        """Its counts in words, or why there are none."""
        if not self.begun:
            return "not reached"
        counts = _counts_in_words(self.cases, len(self.waived), self.not_started)
        if self.interrupted:
            return f"interrupted; {counts}"
        if not self.cases and not self.waived:
            return "selects no test"
        if self.verdict is Verdict.NO_COVERAGE:
            why = next((c.message for c in self.cases if c.outcome == "skipped" and c.message), "no reason given")
            return f"every test was skipped ({why}); {counts}"
        return counts

    @property
    def seconds(self) -> float:
        """How long its tests took; what only skipped says nothing."""
        return sum(c.seconds for c in self.cases if c.outcome in ("passed", "failed", "xfailed"))

    def count(self, outcome: str) -> int:
        """Tests that ended that way."""
        return sum(case.outcome == outcome for case in self.cases)


@dataclass
class StageResult:
    """What is known about a stage; its verdict is that of its worst line, or says why no line was begun."""

    name: str
    verdict: Verdict
    reason: str = ""
    lines: list[LineResult] = field(default_factory=list)
    seconds: float = 0.0
    waived: list[tuple[str, str]] = field(default_factory=list)
    interrupted: bool = False

    @property
    def cases(self) -> tuple[CaseResult, ...]:
        """All its tests' results; a test that two lines select is there twice."""
        return tuple(case for line in self.lines for case in line.cases)

    def count(self, outcome: str) -> int:
        """Tests that ended that way."""
        return sum(case.outcome == outcome for case in self.cases)


class Runner:
    """Runs plans.

    Args:
        root: The repository.
        say: Takes a line for the person.
        workers: xdist workers for what is safe to run in parallel (count; 1: no xdist).
        detailed_log: Every test by name, with what it printed, also when it passed.
    """

    def __init__(self, root: Path, *, say: Callable[[str], None], workers: int = 2, detailed_log: bool = False) -> None:
        self._detailed_log = detailed_log
        self._root = root
        self._say = say
        self._workers = workers
        self._tethered: Tethered | None = None
        self._interrupted = False

    def interrupt(self) -> None:
        """End what is running and begin nothing more; what is known stays. Safe in a signal handler, and more than once."""
        self._interrupted = True
        if self._tethered is not None:
            self._tethered.cut()

    def run(
        self,
        run: RunPlan,
        folder: Path,
        *,
        reusable: Callable[[StagePlan], str | None] = lambda _plan: None,
        after: Callable[[list[StageResult]], None] = lambda _results: None,
    ) -> list[StageResult]:
        """Run every stage; ``after`` is called with what is known after each of their lines.

        Stages that cannot run here are NO COVERAGE, stages that were not reached NOT RUN; none is left out.
        """
        results: list[StageResult] = []
        stopped: str | None = None
        for plan in run.stages:
            name = plan.stage.name
            if self._interrupted:
                stopped = "the run was interrupted"
            if stopped is not None:
                result = StageResult(name, Verdict.NOT_RUN, stopped)
            elif run.options.skip_test is not None:
                result = StageResult(name, Verdict.NOT_RUN, f"skipped: {run.options.skip_test}")
            elif plan.lacking is not None:
                result = StageResult(name, Verdict.NO_COVERAGE, plan.lacking)
            elif (source := reusable(plan)) is not None:
                result = StageResult(name, Verdict.REUSED, source)
            elif run.options.reuse_pipeline:
                result = StageResult(
                    name, Verdict.NOT_RUN, "no earlier run passed it at this very commit, clean and with these lines"
                )
            else:
                result = self._run_stage(plan, run, folder / name, lambda known: after([*results, known]))
                if run.options.fail_fast and any(c.failed and cause_of(c) == "product" for c in result.cases):
                    # A machine that failed says nothing about the product: the others still may.
                    stopped = f"{name} failed and fail-fast is on"
            results.append(result)
            self._say(f"{name}: {result.verdict.value}" + (f" ({result.reason})" if result.reason else ""))
            after(results)
        return results

    def _run_stage(
        self, plan: StagePlan, run: RunPlan, folder: Path, after: Callable[[StageResult], None]
    ) -> StageResult:
        if plan.lines:
            self._say(f"{plan.stage.name}: needs {needs.stated(plan.stage)}")
            if lacks := needs.missing(plan.stage):
                return StageResult(plan.stage.name, Verdict.NO_COVERAGE, lacks)
        folder.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        lines = [LineResult(line) for line in sorted(plan.lines, key=lambda line: line.isolated)]

        def known(*, ended: bool) -> StageResult:
            return _judged(plan, lines, time.monotonic() - start, self._interrupted or not ended)

        after(known(ended=False))
        for number, result in enumerate(lines, 1):
            if self._interrupted:
                break
            self._say(f"{plan.stage.name}: {number}/{len(lines)} {result.line.identity}")
            self._run_line(result, plan, run, folder, f"{number}")
            after(known(ended=False))
        self._try_again(lines, folder)
        for result in lines:
            result.cases = _apply_markers(result.cases, result.line)
        return known(ended=True)

    def _run_line(self, result: LineResult, plan: StagePlan, run: RunPlan, folder: Path, label: str) -> None:
        """A line's processes: what is safe in parallel, then services, then what wants the machine for itself."""
        line = result.line
        waivers = waived_tests(run.waivers, line, plan.stage)
        off = tuple(w.test.target for w in waivers)
        result.begun = True
        split = self._workers > 1 and not line.isolated and not line.alone
        live = self._pytest(
            line, (line.target,), folder, label, waived=off, expressions=True,
            part="parallel" if split else "all", workers=self._workers if split else 1,
        )  # fmt: skip
        self._take(result, live, folder, label)
        files = len({test.split("::")[0] for test in live.services})
        for part, left, workers in (
            ("services", live.services, min(files, SERVICES_AT_ONCE)),
            ("alone", live.alone, 1),
        ):
            if left and not self._interrupted:
                more = self._pytest(
                    line,
                    (line.target,),
                    folder,
                    f"{label}-{part}",
                    waived=off,
                    expressions=True,
                    part=part,
                    workers=workers,
                )
                self._take(result, more, folder, f"{label}-{part}")
        reasons = {w.test.target: w.reason for w in waivers}
        result.waived += [
            (test, next(reasons[target] for target in off if covers(target, test)))
            for test in dict.fromkeys(live.waived)
        ]

    def _take(self, result: LineResult, live: LiveResult, folder: Path, label: str) -> None:
        """A process's results; what it left undone because it died is begun once more."""
        known = {c.id for c in result.cases}
        result.cases += tuple(c for c in live.cases if c.id not in known)
        if live.interrupted:
            result.interrupted = True
            result.not_started += len(live.not_started)
            return
        if live.exit_code not in (0, 1, 5) and not any(c.failed for c in live.cases):
            result.cases += (CaseResult(result.line.identity, "unfinished", 0.0, live.end, live.tail, ("unfinished",)),)
        if live.not_started:
            self._say(f"  {len(live.not_started)} had not begun when it ended ({live.end})")
            second = self._pytest(result.line, live.not_started, folder, f"{label}-rest")
            wanted = set(live.not_started)
            result.cases = merge(result.cases, tuple(c for c in second.cases if c.id in wanted))
            result.not_started += len(wanted - {c.id for c in second.cases})
            result.interrupted |= second.interrupted

    def _try_again(self, lines: list[LineResult], folder: Path) -> None:
        """Try failed tests again, alone, each for its own line, when the whole stage has few enough of them."""
        open_to_it = [line for line in lines if "XFAIL" not in line.line.markers]
        if sum(c.failed for line in open_to_it for c in line.cases) > RERUN_FAILURES_MAX:
            return
        for number, result in enumerate(open_to_it, 1):
            for attempt in (1, 2):
                failed = tuple(c.id for c in result.cases if reruns_allowed(c) >= attempt)
                if not failed or self._interrupted:
                    break
                self._say(f"  trying {len(failed)} failed again ({attempt})")
                live = self._pytest(result.line, failed, folder, f"{number}-rerun{attempt}")
                result.cases = merge(result.cases, tuple(c for c in live.cases if c.id in failed))

    def _pytest(
        self, line: TestLine, targets: tuple[str, ...], folder: Path, label: str, *, waived: tuple[str, ...] = (),
        part: str = "all", workers: int = 1, expressions: bool = False,
    ) -> LiveResult:  # fmt: skip
        """One pytest process and what it wrote down."""
        live_file = folder / f"{label}.jsonl"
        live_file.unlink(missing_ok=True)
        if len(targets) > 1:  # there may be thousands
            listed = folder / f"{label}.targets"
            listed.write_text("".join(f"{target}\n" for target in targets), "utf-8")
            targets = (f"@{listed}",)
        command = [sys.executable, "-m", "pytest", *targets, "-p", "stage_live"]
        command += ["-vv", "-rA", "--showlocals"] if self._detailed_log else ["-q"]
        if expressions:
            command += ["-m", line.mark] if line.mark else []
            command += ["-k", line.keyword] if line.keyword else []
        if workers > 1:
            command += ["-p", "xdist", "-n", str(workers)]
            # Whoever has nothing left takes from the other: tests that wait stand in a row, and are handed out in rows.
            # Services go by files, in the order in which the plugin puts them.
            command += (
                ["--dist", "worksteal"] if part == "parallel" else ["--dist", "loadfile", "--no-loadscope-reorder"]
            )
        environment = {
            **os.environ,
            # Plugins of other people's environments are not asked for; the project names its own in its configuration.
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "STAGE_LIVE_FILE": str(live_file),
            "STAGE_WAIVED": json.dumps(waived),
            "STAGE_PART": part,
            "PYTHONPATH": needs.python_path(self._root, str(_PLUGIN)),
        }
        if line.timeout_given:
            # pytest-timeout's own limit for one test would cut short what the line allows.
            environment["PYTEST_TIMEOUT"] = str(60 * line.timeout_min)
        tail: deque[str] = deque(maxlen=_TAIL_LINES)
        late = threading.Event()
        with (folder / "log.txt").open("a", encoding="utf-8") as log:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            tethered = Tethered(
                command, cwd=self._root, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, errors="replace",
            )  # fmt: skip
            self._tethered = tethered
            if self._interrupted:
                tethered.cut()

            def end_it() -> None:
                late.set()
                tethered.cut()

            killer = threading.Timer(60.0 * line.timeout_min, end_it)
            killer.daemon = True
            killer.start()
            try:
                for text in tethered.process.stdout or ():
                    sys.stdout.write(text)
                    sys.stdout.flush()
                    log.write(text)
                    tail.append(text)
                code = tethered.process.wait()
            finally:
                killer.cancel()
                tethered.cut()
                self._tethered = None
                if tethered.process.stdout is not None:
                    tethered.process.stdout.close()
        return read_live(
            live_file,
            exit_code=None if late.is_set() else code,
            late=f"did not end within the line's {line.timeout_min} minutes" if late.is_set() else "",
            tail="".join(tail),
            interrupted=self._interrupted,
        )


def _apply_markers(cases: tuple[CaseResult, ...], line: TestLine) -> tuple[CaseResult, ...]:
    """XFAIL is strict: failing is expected, passing is not. UNSTABLE may fail without failing the stage.

    Both cover what a test itself raises, never a test that does not exist, cannot be set up, crashed or ran out of time.
    """
    marker = next((name for name in ("XFAIL", "UNSTABLE") if name in line.markers), None)
    if marker is None:
        return cases
    reason = line.markers[marker] or "no reason given"
    outcome, why = ("xfailed", "failed as expected") if marker == "XFAIL" else ("unstable", "unstable")

    def marked(case: CaseResult) -> CaseResult:
        if case.outcome == "failed" and not case.timed_out:
            return replace(case, outcome=outcome, message=f"{why} ({reason}): {case.message}")
        if marker == "XFAIL" and case.outcome == "passed":
            return replace(case, outcome="failed", message=f"passed, though expected to fail: {reason}")
        return case

    return tuple(map(marked, cases))


def _judged(plan: StagePlan, lines: list[LineResult], seconds: float, unfinished: bool) -> StageResult:
    """A stage from its lines."""
    waived = [(line.identity, waiver.reason) for line, waiver in plan.waived]
    waived += [entry for line in lines for entry in line.waived]
    counted = [line.verdict for line in lines if line.verdict is not Verdict.WAIVED]
    counts = _counts_in_words(
        tuple(case for line in lines for case in line.cases), len(waived), sum(line.not_started for line in lines)
    )
    verdict = worst(counted)
    reasons = [counts]
    if not plan.lines:
        reasons.append("every line is waived" if plan.waived else "this shard holds no line")
    if verdict in (Verdict.NO_COVERAGE, Verdict.NOT_RUN) and lines:
        reasons += [f"{line.line.identity}: {line.reason}" for line in lines if line.verdict is verdict][:3]
    interrupted = unfinished and any(not line.begun or line.interrupted for line in lines)
    if interrupted:
        reasons.append("interrupted")
    return StageResult(plan.stage.name, verdict, "; ".join(reasons), lines, seconds, waived, interrupted)


def _counts_in_words(cases: tuple[CaseResult, ...], waived: int, not_started: int) -> str:
    counts = {
        "passed": sum(c.outcome == "passed" for c in cases),
        "failed": sum(c.failed for c in cases),
        "flaky": sum(c.flaky for c in cases),
        "unstable": sum(c.outcome == "unstable" for c in cases),
        "failed as expected": sum(c.outcome == "xfailed" for c in cases),
        "skipped": sum(c.outcome == "skipped" for c in cases),
        "waived": waived,
        "not started": not_started,
    }
    return ", ".join(f"{number} {what}" for what, number in counts.items() if number or what == "passed")
