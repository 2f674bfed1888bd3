"""What a run leaves behind: one JSON, one Markdown summary, one JUnit file per stage, bound to what was tested.

The JSON is rewritten after every stage, whole, by rename: a run that is killed leaves a valid bundle that says ``complete:
false`` and what was running.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .errors import StageError
from .execution import LineResult, StageResult
from .hardware import Hardware, describe_gpus
from .junit import cause_of, write_junit
from .needs import launcher_in_words
from .plan import RunPlan, StagePlan
from .verdicts import EXIT_CODES, Verdict, worst

_PACKAGES = ("torch", "triton", "nixl", "mpi4py", "mpich", "pyzmq", "msgspec", "numpy", "pytest", "nox")


def provenance(root: Path, run: RunPlan, hardware: Hardware) -> dict[str, Any]:
    """What was tested, on what, with which versions."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "commit": git("rev-parse", "HEAD"),
        "dirty": bool(git("status", "--porcelain")),
        "lists": run.fingerprint,
        "hardware": {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(hardware).items()},
        "accept_capability": run.options.accept_capability,
        "python": platform.python_version(),
        "versions": versions,
        "mpi": launcher_in_words(),
    }


def bundle_folder(results: Path, commit: str) -> Path:
    """A folder of its own for a run: the process's number keeps two runs of one commit in one second apart."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    folder = results / f"{stamp}-{commit[:8] or 'uncommitted'}-{os.getpid()}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise StageError(f"results folder {results}: {error}") from error
    return folder


class Bundle:
    """Writes one run's results below a folder."""

    def __init__(self, folder: Path, run: RunPlan, origin: dict[str, Any]) -> None:
        self.folder = folder
        self._run = run
        self._origin = origin
        self._started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, results: list[StageResult], *, complete: bool) -> Verdict:
        """Write everything that is known; returns the run's verdict so far."""
        by_name = {result.name: result for result in results}
        stages = [
            by_name.get(plan.stage.name) or StageResult(plan.stage.name, Verdict.NOT_RUN, "not reached")
            for plan in self._run.stages
        ]
        verdict = worst(result.verdict for result in stages)
        data = {
            "complete": complete and not any(result.interrupted for result in stages),
            "started": self._started,
            "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "verdict": verdict.value,
            "exit_code": EXIT_CODES[verdict],
            "partly_tested": self._run.partly,
            "warnings": list(self._run.warnings),
            **self._origin,
            "stages": [self._stage(plan, result) for plan, result in zip(self._run.stages, stages, strict=True)],
        }
        _replace(self.folder / "results.json", json.dumps(data, indent=1, sort_keys=False) + "\n")
        _replace(self.folder / "summary.md", summary(data))
        for result in stages:
            if result.cases:
                write_junit(self.folder / result.name / "junit.xml", result.name, result.cases)
        return verdict

    @staticmethod
    def _stage(plan: StagePlan, result: StageResult) -> dict[str, Any]:
        return {
            "name": result.name,
            "verdict": result.verdict.value,
            "reason": result.reason,
            "seconds": round(result.seconds, 2),
            "fingerprint": plan.fingerprint,
            "query": plan.query,
            "lines": [_line(line) for line in result.lines] or [{"line": line.identity} for line in plan.lines],
            "waived": [{"line": line, "reason": reason} for line, reason in result.waived],
            "counts": {outcome: result.count(outcome) for outcome in _OUTCOMES},
            "problems": [
                {**asdict(case), "cause": cause_of(case)}
                for case in result.cases
                if case.failed or case.flaky or case.outcome == "unstable"
            ],
            "not_covered": [{"id": c.id, "reason": c.message} for c in result.cases if c.outcome == "skipped"],
        }


_OUTCOMES = ("passed", "failed", "error", "skipped", "unfinished", "xfailed", "unstable")


def _line(result: LineResult) -> dict[str, Any]:
    return {
        "line": result.line.identity,
        "verdict": result.verdict.value,
        "reason": result.reason,
        "passed": result.count("passed"),
        "seconds": round(result.seconds, 2),
    }


def _replace(path: Path, text: str) -> None:
    scratch = path.with_suffix(path.suffix + ".new")
    scratch.write_text(text, "utf-8")
    os.replace(scratch, path)


def summary(data: dict[str, Any]) -> str:
    """The run as Markdown."""
    dirty = ", with uncommitted changes" if data["dirty"] else ""
    lines = [f"# {data['verdict']}" + (" (Partly Tested)" if data["partly_tested"] else ""), ""]
    if not data["complete"]:
        lines += ["**This run did not come to its end.** What was not reached is NOT RUN.", ""]
    lines += [f"Commit `{data['commit'][:12]}`{dirty}; lists `{data['lists'][:12]}`; {_machine(data)}.", ""]
    if data["partly_tested"]:
        lines += [f"Narrowed by {data['partly_tested']}: this run says nothing about the other stages.", ""]
    if data["accept_capability"]:
        lines += [f"GPUs of compute capability {data['accept_capability']} were accepted for the kinds asked for.", ""]
    lines += ["| stage | verdict | why | passed | failed | skipped | s |", "|---|---|---|---|---|---|---|"]
    for stage in data["stages"]:
        counts = stage["counts"]
        failed = counts["failed"] + counts["error"] + counts["unfinished"]
        lines.append(
            f"| {stage['name']} | {stage['verdict']} | {_cell(stage['reason'])} | {counts['passed']} | {failed} | "
            f"{counts['skipped']} | {stage['seconds']:.0f} |"
        )
    problems = [(stage["name"], problem) for stage in data["stages"] for problem in stage["problems"]]
    for cause in ("product", "infrastructure", "flaky"):
        mine = [(name, p) for name, p in problems if p["cause"] == cause]
        if mine:
            lines += ["", f"## Likely {cause}", ""]
            lines += [
                f"- {name}: `{p['id']}` ({', '.join(p['attempts'])}): {_cell(p['message'][:300])}" for name, p in mine
            ]
    if data["warnings"]:
        lines += ["", "## Warnings", "", *(f"- {text}" for text in data["warnings"])]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """Text inside a Markdown table: a bar or a line break in it would end the cell."""
    return " ".join(text.split()).replace("|", "\\|")


def _machine(data: dict[str, Any]) -> str:
    return f"{data['hardware']['cores']} cores, {describe_gpus(data['hardware']['gpu_names'])}"


#: What must be the same for a result to be taken over, beside the machine.
_SAME = ("commit", "versions", "python", "mpi", "accept_capability")
_SAME_MACHINE = ("gpu_names", "compute_capability", "cpu")


def reusable_stage(folders: Iterable[Path], plan: StagePlan, origin: dict[str, Any]) -> str | None:
    """The newest earlier run in which this stage passed at this very commit, with these lines, on such hardware."""
    if origin["dirty"] or not origin["commit"]:
        return None
    for folder in sorted(folders, reverse=True):
        try:
            data = json.loads((folder / "results.json").read_text("utf-8"))
            same = not data["dirty"] and all(data[key] == origin[key] for key in _SAME)
            same = same and all(data["hardware"][key] == origin["hardware"][key] for key in _SAME_MACHINE)
            stages = {(stage["name"], stage["fingerprint"]): stage["verdict"] for stage in data["stages"]}
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if same and stages.get((plan.stage.name, plan.fingerprint)) == Verdict.PASSED.value:
            return f"passed at this commit in {folder.name}"
    return None
