"""Runs a plan's stages, one after the other, and says what is known about each whatever happens on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from .junit import CaseResult, LiveResult, cause_of, merge, read_live
from .lists import TIMEOUT_DEFAULT_MIN, TestLine, covers
from .plan import RunPlan, StagePlan
from .verdicts import Verdict, stage_verdict
from .waivers import waived_tests

#: Tests that start worlds or services of their own run one at a time; the others may share the cores.
ALONE = "(mpi or service)"
#: More failures than this in a stage are not tried again: it is broken, not flaky.
RERUN_FAILURES_MAX = 5
#: (seconds of a failed test, reruns): short tests are tried twice more, longer ones once.
RERUN_STEPS = ((300.0, 2), (600.0, 1))
#: More targets than this are handed to pytest in a file, not as arguments.
ARGUMENTS_MAX = 100
_PLUGIN = Path(__file__).resolve().parent / "plugin"


@dataclass(frozen=True)
class Invocation:
    """One pytest process: targets with the same expressions."""

    targets: tuple[str, ...]
    keyword: str | None
    mark: str | None
    parallel: bool
    timeout_s: float
    waived: tuple[str, ...] = ()
    expected_to_fail: str | None = None
    unstable: str | None = None
    lines: tuple[TestLine, ...] = ()
    test_timeout_s: float | None = None

    @property
    def identity(self) -> str:
        """Its lines; the two halves of a plain line, in parallel and alone, have the same."""
        return " + ".join(line.identity for line in self.lines)


def reruns_allowed(case: CaseResult) -> int:
    """How often a failed test is tried again: by how long it took; a very long one once, and only for a machine's failure.

    What began and did not end is never tried again.
    """
    if case.outcome not in ("failed", "error") or "::" not in case.id:
        return 0
    known = 1 if cause_of(case) == "infrastructure" else 0
    return next((reruns for limit_s, reruns in RERUN_STEPS if case.seconds <= limit_s), known)


@dataclass
class Outcome:
    """What an invocation gave."""

    invocation: Invocation
    label: str
    cases: tuple[CaseResult, ...] = ()
    waived: tuple[str, ...] = ()
    not_started: int = 0
    nothing: bool = False


@dataclass
class StageResult:
    """What is known about a stage."""

    name: str
    verdict: Verdict
    reason: str = ""
    cases: tuple[CaseResult, ...] = ()
    seconds: float = 0.0
    line_seconds: dict[str, float] = field(default_factory=dict)
    waived: list[tuple[str, str]] = field(default_factory=list)
    interrupted: bool = False
    not_started: int = 0
    attempts: list[str] = field(default_factory=list)

    def count(self, outcome: str) -> int:
        """Tests that ended that way."""
        return sum(case.outcome == outcome for case in self.cases)


def invocations(plan: StagePlan, run: RunPlan) -> list[Invocation]:
    """Group a stage's lines into pytest processes: plain lines together, what needs its own alone; ISOLATION last."""
    shared: dict[tuple[str | None], list[TestLine]] = {}
    own: list[TestLine] = []
    for line in plan.lines:
        special = line.keyword is not None or line.isolated or line.timeout_min != TIMEOUT_DEFAULT_MIN
        if special or line.markers:
            own.append(line)
        else:
            shared.setdefault((line.mark,), []).append(line)
    made = []
    for (mark,), lines in shared.items():
        # Each line may take its time; one that hangs is ended by its own tests' limits long before.
        limit_s = 60.0 * TIMEOUT_DEFAULT_MIN * len(lines)
        off = tuple(w.test.target for line in lines for w in waived_tests(run.waivers, line, plan.stage))
        targets = tuple(line.target for line in lines)
        made += [
            Invocation(targets, None, _both(mark, f"not {ALONE}"), True, limit_s, off, lines=tuple(lines)),
            Invocation(targets, None, _both(mark, ALONE), False, limit_s, off, lines=tuple(lines)),
        ]
    for line in sorted(own, key=lambda item: item.isolated):
        off = tuple(w.test.target for w in waived_tests(run.waivers, line, plan.stage))
        limit_s = 60.0 * line.timeout_min
        made.append(
            Invocation(
                (line.target,),
                line.keyword,
                line.mark,
                False,
                limit_s,
                off,
                line.markers.get("XFAIL"),
                line.markers.get("UNSTABLE"),
                (line,),
                limit_s if line.timeout_given else None,
            )
        )
    return made


def _both(first: str | None, second: str) -> str:
    return f"({first}) and {second}" if first else second


class Interrupted(Exception):
    """The person, or the machine's owner, stopped the run."""


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
        self._child: subprocess.Popen[str] | None = None

    def run(
        self,
        run: RunPlan,
        folder: Path,
        *,
        reusable: Callable[[StagePlan], str | None] = lambda _plan: None,
        after: Callable[[list[StageResult]], None] = lambda _results: None,
    ) -> list[StageResult]:
        """Run every stage; ``after`` is called with what is known after each of them.

        Stages that cannot run here are NO COVERAGE, stages that were not reached NOT RUN; none is left out.
        """
        results: list[StageResult] = []
        stopped: str | None = None
        for plan in run.stages:
            name = plan.stage.name
            if stopped is not None:
                result = StageResult(name, Verdict.NOT_RUN, stopped)
            elif run.options.skip is not None:
                result = StageResult(name, Verdict.NOT_RUN, f"skipped: {run.options.skip}")
            elif plan.lacking is not None:
                result = StageResult(name, Verdict.NO_COVERAGE, plan.lacking)
            elif plan.resting is not None:
                result = StageResult(name, Verdict.NOT_RUN, f"under maintenance: {plan.resting}")
            elif (source := reusable(plan)) is not None:
                result = StageResult(name, Verdict.REUSED, source)
            elif run.options.reuse_only:
                result = StageResult(
                    name, Verdict.NOT_RUN, "no earlier run passed it at this very commit, clean and with these lists"
                )
            else:
                after([*results, StageResult(name, Verdict.NOT_RUN, "running", interrupted=True)])
                result = self._run_with_retries(plan, run, folder / name)
                if result.interrupted:
                    stopped = "the run was interrupted"
                elif run.options.fail_fast and any(c.failed and cause_of(c) == "product" for c in result.cases):
                    # A machine that failed says nothing about the product: the others still may.
                    stopped = f"{name} failed and fail-fast is on"
            results.append(result)
            self._say(f"{name}: {result.verdict.value}" + (f" ({result.reason})" if result.reason else ""))
            after(results)
        return results

    def _run_with_retries(self, plan: StagePlan, run: RunPlan, folder: Path) -> StageResult:
        """A stage that failed for its machine alone, whole, again, as often as was asked for; every attempt stays visible."""
        result = self.run_stage(plan, run, folder)
        for attempt in range(2, run.options.infra_retries + 2):
            failed = [c for c in result.cases if c.failed]
            if result.interrupted or not failed or any(cause_of(c) != "infrastructure" for c in failed):
                break
            said = [*result.attempts, f"{result.verdict.value}: {result.reason}"]
            self._say(f"{plan.stage.name}: the machine failed, attempt {attempt}")
            again = self.run_stage(plan, run, folder / f"attempt-{attempt}")
            repeated = {c.id for c in again.cases}
            # What stood for a process that died has no test of its own in the next attempt.
            again.cases = merge(tuple(c for c in result.cases if not c.failed or c.id in repeated), again.cases)
            again.attempts = said
            result = _judged(again, plan)
        return result

    def run_stage(self, plan: StagePlan, run: RunPlan, folder: Path) -> StageResult:
        """Run one stage that has its hardware."""
        folder.mkdir(parents=True, exist_ok=True)
        name = plan.stage.name
        result = StageResult(name, Verdict.NOT_RUN)
        result.waived = [(line.identity, waiver.reason) for line, waiver in plan.waived]
        start = time.monotonic()
        outcomes: list[Outcome] = []
        made = invocations(plan, run)
        try:
            for number, invocation in enumerate(made, 1):
                self._say(f"{name}: {number}/{len(made)} {_describe(invocation)}")
                outcomes.append(self._run_invocation(invocation, folder, f"{number}"))
            self._try_again(outcomes, folder)
        except Interrupted:
            result.interrupted = True
        reasons = {w.test.target: w.reason for w in run.waivers}
        for outcome in outcomes:
            result.cases = merge(result.cases, _apply_markers(outcome.cases, outcome.invocation))
            result.not_started += outcome.not_started
            for test in outcome.waived:
                why = next(reasons[t] for t in outcome.invocation.waived if covers(t, test))
                result.waived.append((test, why))
        # A plain line has two halves, in parallel and alone: nothing in one of them is normal, in all is not.
        some = {o.invocation.identity for o in outcomes if not o.nothing}
        nothing = dict.fromkeys(o.invocation.identity for o in outcomes if o.invocation.identity not in some)
        if not result.interrupted:
            result.cases += tuple(CaseResult(line, "error", 0.0, "selects no test", "", ("error",)) for line in nothing)
        result.line_seconds = _line_seconds(outcomes)
        result.seconds = time.monotonic() - start
        return _judged(result, plan)

    def _run_invocation(self, invocation: Invocation, folder: Path, label: str) -> Outcome:
        """One pytest process; what it left undone because it died is begun once more."""
        live = self._pytest(invocation, folder, label)
        outcome = Outcome(invocation, label, live.cases, live.waived)
        if live.exit_code == 5 and not live.cases:
            outcome.nothing = not live.waived
            return outcome
        if live.exit_code not in (0, 1) and not any(c.failed for c in live.cases):
            text = "was killed or ran out of time" if live.exit_code is None else f"pytest exit {live.exit_code}"
            outcome.cases += (CaseResult(invocation.identity, "unfinished", 0.0, text, "", ("unfinished",)),)
        if live.not_started:
            self._say(f"  {len(live.not_started)} had not begun when it ended")
            rest = replace(invocation, targets=live.not_started, keyword=None, mark=None)
            second = self._pytest(rest, folder, f"{label}-rest")
            wanted = set(live.not_started)
            outcome.cases = merge(outcome.cases, tuple(c for c in second.cases if c.id in wanted))
            outcome.not_started = len(wanted - {c.id for c in second.cases})
        return outcome

    def _try_again(self, outcomes: list[Outcome], folder: Path) -> None:
        """Try failed tests again, alone, when the whole stage has few enough of them."""
        open_to_it = [o for o in outcomes if o.invocation.expected_to_fail is None]
        if sum(c.failed for o in open_to_it for c in o.cases) > RERUN_FAILURES_MAX:
            return
        for outcome in open_to_it:
            for attempt in (1, 2):
                failed = [c for c in outcome.cases if reruns_allowed(c) >= attempt]
                if not failed:
                    break
                self._say(f"  trying {len(failed)} failed again ({attempt})")
                wanted = tuple(c.id for c in failed)
                retry = replace(outcome.invocation, targets=wanted, keyword=None, mark=None, parallel=False)
                live = self._pytest(retry, folder, f"{outcome.label}-rerun{attempt}")
                outcome.cases = merge(outcome.cases, tuple(c for c in live.cases if c.id in set(wanted)))

    def _pytest(self, invocation: Invocation, folder: Path, label: str) -> LiveResult:
        live_file = folder / f"{label}.jsonl"
        live_file.unlink(missing_ok=True)
        targets = invocation.targets
        if len(targets) > ARGUMENTS_MAX:
            listed = folder / f"{label}.targets"
            listed.write_text("".join(f"{target}\n" for target in targets), "utf-8")
            targets = (f"@{listed}",)
        command = [sys.executable, "-m", "pytest", *targets, "-p", "stage_live"]
        command += ["-vv", "-rA", "--showlocals"] if self._detailed_log else ["-q"]
        if invocation.mark:
            command += ["-m", invocation.mark]
        if invocation.keyword:
            command += ["-k", invocation.keyword]
        if invocation.parallel and self._workers > 1:
            command += ["-n", str(self._workers)]
        environment = {
            **os.environ,
            "STAGE_LIVE_FILE": str(live_file),
            "STAGE_WAIVED": json.dumps(invocation.waived),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(_PLUGIN), os.environ.get("PYTHONPATH")))),
        }
        if invocation.test_timeout_s is not None:
            # pytest-timeout's own limit for one test would cut short what the line allows.
            environment["PYTEST_TIMEOUT"] = f"{invocation.test_timeout_s:.0f}"
        with (folder / "log.txt").open("a", encoding="utf-8") as log:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            self._child = subprocess.Popen(
                command, cwd=self._root, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
            )  # fmt: skip
            killer = threading.Timer(invocation.timeout_s, self._kill)
            killer.start()
            try:
                for line in self._child.stdout or ():
                    sys.stdout.write(line)
                    sys.stdout.flush()
                    log.write(line)
                self._child.wait()
            except KeyboardInterrupt:
                self._kill()
                self._child.wait()
                raise Interrupted from None
            finally:
                killer.cancel()
                if self._child.stdout is not None:
                    self._child.stdout.close()
        return read_live(live_file)

    def _kill(self) -> None:
        """End the test process and what it started."""
        if self._child is not None and self._child.poll() is None:
            os.killpg(self._child.pid, signal.SIGKILL)


def _describe(invocation: Invocation) -> str:
    targets = invocation.targets
    text = targets[0] if len(targets) == 1 else f"{targets[0]} and {len(targets) - 1} more"
    return text + (" in parallel" if invocation.parallel else ", one at a time")


def _apply_markers(cases: tuple[CaseResult, ...], invocation: Invocation) -> tuple[CaseResult, ...]:
    """XFAIL is strict: failing is expected, passing is not. UNSTABLE may fail without failing the stage."""
    if invocation.expected_to_fail is not None:
        reason = invocation.expected_to_fail or "no reason given"
        return tuple(
            replace(c, outcome="skipped", message=f"expected to fail: {reason}")
            if c.failed
            else replace(c, outcome="failed", message=f"passed, though expected to fail: {reason}")
            if c.outcome == "passed"
            else c
            for c in cases
        )
    if invocation.unstable is not None:
        return tuple(replace(c, outcome="skipped", message=f"unstable: {c.message}") if c.failed else c for c in cases)
    return cases


def _line_seconds(outcomes: list[Outcome]) -> dict[str, float]:
    """How long each line's tests took: a test's time is its nearest line's. What was skipped says nothing about a line."""
    seconds: dict[str, float] = {}
    for outcome in outcomes:
        for case in outcome.cases:
            holders = [line for line in outcome.invocation.lines if covers(line.target, case.id)]
            if holders and case.outcome in ("passed", "failed"):
                identity = max(holders, key=lambda line: len(line.target)).identity
                seconds[identity] = seconds.get(identity, 0.0) + case.seconds
    return seconds


def _judged(result: StageResult, plan: StagePlan) -> StageResult:
    """With its verdict and reason."""
    flaky = sum(c.flaky for c in result.cases)
    result.verdict = stage_verdict(
        passed=result.count("passed") - flaky,
        failed=sum(c.failed for c in result.cases),
        flaky=flaky,
        interrupted=result.interrupted,
    )
    result.reason = _reason(result, plan)
    return result


def _reason(result: StageResult, plan: StagePlan) -> str:
    counts = [f"{result.count('passed')} passed"]
    failed = sum(c.failed for c in result.cases)
    if failed:
        counts.append(f"{failed} failed")
    flaky = sum(c.flaky for c in result.cases)
    if flaky:
        counts.append(f"{flaky} flaky")
    if result.count("skipped"):
        counts.append(f"{result.count('skipped')} skipped")
    if result.waived:
        counts.append(f"{len(result.waived)} waived")
    if result.not_started:
        counts.append(f"{result.not_started} not started")
    if result.attempts:
        counts.append(f"attempt {len(result.attempts) + 1}")
    if result.interrupted:
        counts.append("interrupted")
    if not plan.lines:
        counts.append("this shard holds no line" if not plan.waived else "every line is waived")
    return ", ".join(counts)
