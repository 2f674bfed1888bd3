"""Runs a plan's stages, one after the other, and says what is known about each whatever happens on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from .junit import CaseResult, LiveResult, merge, read_live
from .lists import TIMEOUT_DEFAULT_MIN, TestLine
from .plan import RunPlan, StagePlan
from .verdicts import Verdict, stage_verdict
from .waivers import waived_tests

#: Tests that start worlds or services of their own run one at a time; the others may share the cores.
ALONE = "(mpi or service)"
#: More failures than this in a stage are not tried again: it is broken, not flaky.
RERUN_FAILURES_MAX = 5
#: (seconds of the longest failed test, reruns): short tests are tried twice more, longer ones once, very long ones never.
RERUN_STEPS = ((300.0, 2), (600.0, 1))
_PLUGIN = Path(__file__).resolve().parent / "plugin"


@dataclass(frozen=True)
class Invocation:
    """One pytest process: targets with the same expressions."""

    targets: tuple[str, ...]
    keyword: str | None
    mark: str | None
    parallel: bool
    timeout_s: float
    deselected: tuple[str, ...] = ()
    expected_to_fail: str | None = None
    unstable: str | None = None
    identity: str = ""


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
        limit_s = 60.0 * TIMEOUT_DEFAULT_MIN
        off = tuple(w.test.target for line in lines for w in waived_tests(run.waivers, line, plan.stage.gpu_type))
        targets = tuple(line.target for line in lines)
        identity = " + ".join(line.identity for line in lines)
        made += [
            Invocation(targets, None, _both(mark, f"not {ALONE}"), True, limit_s, off, identity=identity),
            Invocation(targets, None, _both(mark, ALONE), False, limit_s, off, identity=identity),
        ]
    for line in sorted(own, key=lambda item: item.isolated):
        off = tuple(w.test.target for w in waived_tests(run.waivers, line, plan.stage.gpu_type))
        base = Invocation(
            (line.target,), line.keyword, line.mark, False, 60.0 * line.timeout_min, off,
            line.markers.get("XFAIL"), line.markers.get("UNSTABLE"), line.identity,
        )  # fmt: skip
        made.append(base)
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
    """

    def __init__(self, root: Path, *, say: Callable[[str], None], workers: int = 2) -> None:
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
            elif plan.lacking is not None:
                result = StageResult(name, Verdict.NO_COVERAGE, plan.lacking)
            elif (source := reusable(plan)) is not None:
                result = StageResult(name, Verdict.REUSED, source)
            else:
                after([*results, StageResult(name, Verdict.NOT_RUN, "running", interrupted=True)])
                result = self.run_stage(plan, run, folder / name)
                if result.interrupted:
                    stopped = "the run was interrupted"
                elif result.verdict is Verdict.FAILED and run.options.fail_fast:
                    stopped = f"{name} failed and fail-fast is on"
            results.append(result)
            self._say(f"{name}: {result.verdict.value}" + (f" ({result.reason})" if result.reason else ""))
            after(results)
        return results

    def run_stage(self, plan: StagePlan, run: RunPlan, folder: Path) -> StageResult:
        """Run one stage that has its hardware."""
        folder.mkdir(parents=True, exist_ok=True)
        name = plan.stage.name
        result = StageResult(name, Verdict.NOT_RUN)
        result.waived = [(line.identity, waiver.reason) for line, waiver in plan.waived]
        start = time.monotonic()
        empty: dict[str, int] = {}
        made = invocations(plan, run)
        try:
            for number, invocation in enumerate(made, 1):
                self._say(f"{name}: {number}/{len(made)} {_describe(invocation)}")
                live = self._pytest(invocation, folder, f"{number}")
                if live.exit_code == 5 and not live.cases:
                    # A plain line has two halves, parallel and alone: nothing in one of them is normal, in all is not.
                    empty[invocation.identity] = empty.get(invocation.identity, 0) + 1
                    continue
                cases = live.cases
                if live.exit_code not in (0, 1) and not any(c.failed for c in cases):
                    text = (
                        "was killed or ran out of time" if live.exit_code is None else f"pytest exit {live.exit_code}"
                    )
                    cases = (*cases, CaseResult(invocation.identity, "unfinished", 0.0, text, "", ("unfinished",)))
                cases = self._again(cases, invocation, folder, number)
                cases = _apply_markers(cases, invocation)
                result.cases = merge(result.cases, cases)
                seconds = sum(c.seconds for c in live.cases)
                result.line_seconds[invocation.identity] = result.line_seconds.get(invocation.identity, 0.0) + seconds
        except Interrupted:
            result.interrupted = True
        halves = {i.identity: sum(m.identity == i.identity for m in made) for i in made}
        nothing = [identity for identity, count in empty.items() if count == halves[identity]]
        if nothing:
            result.cases += tuple(
                CaseResult(identity, "error", 0.0, "selects no test", "", ("error",)) for identity in nothing
            )
        result.seconds = time.monotonic() - start
        flaky = sum(c.flaky for c in result.cases)
        result.verdict = stage_verdict(
            passed=result.count("passed") - flaky,
            failed=sum(c.failed for c in result.cases),
            flaky=flaky,
            interrupted=result.interrupted,
        )
        result.reason = _reason(result, plan)
        return result

    def _again(
        self, cases: tuple[CaseResult, ...], invocation: Invocation, folder: Path, number: int
    ) -> tuple[CaseResult, ...]:
        """Try failed tests again, alone; what did not finish is never tried again."""
        for attempt in (1, 2):
            failed = [c for c in cases if c.outcome in ("failed", "error") and "::" in c.id]
            if not failed or len(failed) > RERUN_FAILURES_MAX or invocation.expected_to_fail is not None:
                break
            longest = max(c.seconds for c in failed)
            if attempt > next((reruns for limit_s, reruns in RERUN_STEPS if longest <= limit_s), 0):
                break
            self._say(f"  trying {len(failed)} failed again ({attempt})")
            retry = replace(invocation, targets=tuple(c.id for c in failed), keyword=None, mark=None, parallel=False)
            live = self._pytest(retry, folder, f"{number}-rerun{attempt}")
            wanted = {c.id for c in failed}
            cases = merge(cases, tuple(c for c in live.cases if c.id in wanted))
        return cases

    def _pytest(self, invocation: Invocation, folder: Path, label: str) -> LiveResult:
        live_file = folder / f"{label}.jsonl"
        live_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", *invocation.targets, "-q", "-p", "stage_live"]
        if invocation.mark:
            command += ["-m", invocation.mark]
        if invocation.keyword:
            command += ["-k", invocation.keyword]
        for test in invocation.deselected:
            command += ["--deselect", test]
        if invocation.parallel and self._workers > 1:
            command += ["-n", str(self._workers)]
        environment = {
            **os.environ,
            "STAGE_LIVE_FILE": str(live_file),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(_PLUGIN), os.environ.get("PYTHONPATH")))),
        }
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
    if result.interrupted:
        counts.append("interrupted")
    if not plan.lines:
        counts.append("this shard holds no line" if not plan.waived else "every line is waived")
    return ", ".join(counts)
