"""Options, the table and the machine → which stages run which lines here, and why others do not."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .errors import StageError, nearest
from .hardware import Hardware, lacking
from .lists import TestLine, TestList, covers, read_list
from .selecting import Query, Selection, query_of_stage, select
from .sharding import read_durations, shard
from .table import Stage, read_table, select_by_name
from .waivers import Waiver, read_waivers, waived, waived_tests


@dataclass(frozen=True)
class Options:
    """What the person asked for: the options of the command line that have the same names, where they are explained."""

    stage_list: str | None = None
    kind: str | None = None
    extra_stage: str | None = None
    gpu_type: str | None = None
    test_backend: str | None = None
    post_merge: bool = False
    fail_fast: bool = True
    reuse_test: str | None = None
    reuse_pipeline: bool = False
    multi_gpu: str | None = None
    skip_test: str | None = None
    detailed_log: bool = False
    accept_capability: str | None = None


@dataclass(frozen=True)
class StagePlan:
    """One stage on this machine.

    Attributes:
        fingerprint: Hash of what the stage runs: its lines with their markers, and its waivers (hex). Other stages are no
        part of it.
    """

    stage: Stage
    lines: tuple[TestLine, ...]
    selection: Selection
    query: Query
    lacking: str | None
    waived: tuple[tuple[TestLine, Waiver], ...] = ()
    fingerprint: str = ""


@dataclass(frozen=True)
class RunPlan:
    """All stages of a run.

    Attributes:
        partly: Why the run says less than a whole one, or None.
        fingerprint: Hash of the stages' fingerprints (hex).
    """

    stages: tuple[StagePlan, ...]
    partly: str | None
    warnings: tuple[str, ...]
    fingerprint: str
    waivers: tuple[Waiver, ...] = ()
    options: Options = field(default_factory=Options)


def choose(table: tuple[Stage, ...], options: Options) -> tuple[tuple[Stage, ...], str | None, tuple[str, ...]]:
    """The stages that were asked for, in the table's order; why that is not all of them, or None; what had no effect."""
    narrowed: list[str] = []
    warnings: tuple[str, ...] = ()
    if options.stage_list is not None:
        chosen = select_by_name(table, options.stage_list)
        narrowed.append(f"stage list {options.stage_list!r}")
        idle = {
            "--kind": options.kind, "--gpu-type": options.gpu_type, "--test-backend": options.test_backend,
            "--post-merge": options.post_merge, f"--{options.multi_gpu}-multi-gpu-test": options.multi_gpu,
        }  # fmt: skip
        warnings = tuple(
            f"{name.replace('--without', '--disable')} has no effect beside --stage-list"
            for name, on in idle.items()
            if on
        )
    else:
        chosen = _filtered(table, options, narrowed)
    if options.extra_stage is not None:
        more = select_by_name(table, options.extra_stage)
        chosen = tuple(s for s in table if s in chosen or s in more)
    if not chosen:
        raise StageError(
            f"nothing is left of {', '.join(s.name for s in table)} after: {', '.join(narrowed) or 'no option'}"
        )
    if options.skip_test is not None:
        narrowed.append(f"skipping all tests ({options.skip_test})")
    return chosen, ", ".join(narrowed) or None, warnings


def _filtered(table: tuple[Stage, ...], options: Options, narrowed: list[str]) -> tuple[Stage, ...]:
    """What the filters leave; says in ``narrowed`` which there were."""
    ordinary = tuple(s for s in table if not s.on_demand)
    if options.kind is None and not options.post_merge:
        ordinary = tuple(s for s in ordinary if not s.post_merge)
    chosen = ordinary
    if options.kind is not None:
        kinds = {s.hardware for s in table}
        if options.kind not in kinds:
            raise StageError(f"unknown hardware kind {options.kind!r}{nearest(options.kind, kinds)}")
        chosen = tuple(s for s in chosen if s.hardware == options.kind)
        narrowed.append(f"hardware kind {options.kind}")
    if options.gpu_type is not None:
        types = _words(options.gpu_type, "GPU type", {s.gpu_type for s in table})
        chosen = tuple(s for s in chosen if s.gpu_type in types)
        narrowed.append(f"GPU type {options.gpu_type!r}")
    if options.test_backend is not None:
        backends = _words(options.test_backend.lower(), "backend", {s.backend for s in table if s.backend})
        chosen = tuple(s for s in chosen if s.backend is None or s.backend in backends)
        narrowed.append(f"backend {options.test_backend!r}")
    if options.multi_gpu == "only":
        chosen = tuple(s for s in chosen if s.multi_gpu)
        narrowed.append("only stages of several GPUs")
    elif options.multi_gpu == "without":
        chosen = tuple(s for s in chosen if not s.multi_gpu)
        narrowed.append("no stage of several GPUs")
    elif options.multi_gpu == "add":
        chosen = tuple(s for s in ordinary if s in chosen or s.multi_gpu)
    return chosen


def _words(wanted: str, what: str, known: set[str]) -> set[str]:
    words = {word.strip() for word in wanted.split(",") if word.strip()}
    if not words:
        raise StageError(f"{what}: {wanted!r} is empty; there are {', '.join(sorted(known))}")
    for word in sorted(words - known):
        # People type a10 for A10: say so rather than select nothing.
        near = [k for k in sorted(known) if k.lower() == word.lower()]
        hint = f"; did you mean {near[0]}?" if near else nearest(word, known)
        raise StageError(f"unknown {what} {word!r}{hint}; there are {', '.join(sorted(known))}")
    return words


def make_plan(folder: Path, options: Options, hardware: Hardware) -> RunPlan:
    """Read table, lists, waivers and durations of a folder and plan the run.

    Args:
        folder: Where they are.
        options: What was asked for.
        hardware: This machine.
    """
    table = read_table(folder / "stages.yml")
    chosen, partly, idle = choose(table, options)
    durations = read_durations(folder / "durations.json")
    waivers = read_waivers(folder / "waives.txt")
    lists: dict[str, TestList] = {}
    warnings = list(idle)
    plans = []
    for stage in chosen:
        if stage.list_file not in lists:
            lists[stage.list_file] = read_list(folder / stage.list_file)
        plan = plan_stage(stage, lists[stage.list_file], hardware, durations, waivers, options.accept_capability)
        warnings += plan.selection.warnings
        plans.append(plan)
    digest = _hash([(plan.stage.name, plan.fingerprint) for plan in plans])
    return RunPlan(tuple(plans), partly, tuple(dict.fromkeys(warnings)), digest, waivers, options)


def _hash(what: object) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()


def plan_stage(
    stage: Stage,
    test_list: TestList,
    hardware: Hardware,
    durations: Mapping[str, float],
    waivers: tuple[Waiver, ...],
    accept_capability: str | None = None,
) -> StagePlan:
    """One stage's lines: those that match its query, without what other hardware runs, its shard of them."""
    query = query_of_stage(stage, hardware)
    selection = select(test_list, query, stage)
    lines = list(selection.lines)
    if not lines:
        reasons = "".join(f"\n  {test_list.path.name}:{block.line}: {why}" for block, why in selection.passed_over)
        asked = ", ".join(f"{k}={v}" for k, v in sorted(query.items()))
        raise StageError(f"{stage.name}: {test_list.path.name} selects nothing for {asked}{reasons}")
    mine = shard(lines, stage.shards, durations)[stage.shard - 1]
    off = [(line, found) for line in mine if (found := waived(waivers, line, stage)) is not None]
    off += [
        (line, Waiver(line, line.markers["SKIP"] or "no reason given", line.line))
        for line in mine
        if "SKIP" in line.markers
    ]
    out = {line.identity for line, _ in off}
    kept = tuple(line for line in mine if line.identity not in out)
    part = [(line.identity, w.test.identity, w.reason) for line in mine for w in waived_tests(waivers, line, stage)]
    ran = [
        (line.identity, line.timeout_min, line.timeout_given, line.isolated, sorted(line.markers.items()))
        for line in kept
    ]
    fingerprint = _hash([stage, ran, [(line.identity, waiver.reason) for line, waiver in off], part])
    return StagePlan(
        stage, kept, selection, query, lacking(stage, hardware, accept_capability), tuple(off), fingerprint
    )


def stages_of(folder: Path, target: str) -> list[tuple[Stage, TestLine]]:
    """The stages that run a test, file or folder, each with its line."""
    found: list[tuple[Stage, TestLine]] = []
    targets: set[str] = set()
    durations = read_durations(folder / "durations.json")
    for stage in read_table(folder / "stages.yml"):
        plan = plan_stage(stage, read_list(folder / stage.list_file), Hardware(cpu=""), durations, ())
        targets |= {line.target for line in plan.lines}
        found += [(stage, line) for line in plan.lines if covers(line.target, target) or covers(target, line.target)]
    if not found:
        raise StageError(f"no stage runs {target!r}{nearest(target, targets)}")
    return found
