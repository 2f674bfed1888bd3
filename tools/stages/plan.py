"""Options, the table and the machine → which stages run which lines here, and why others do not."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .errors import StageError, nearest
from .hardware import Hardware, lacking
from .lists import TestLine, TestList, read_list
from .selecting import Query, Selection, query_of_stage, select
from .sharding import read_durations, shard
from .table import HARDWARE, Stage, read_table, select_by_name
from .waivers import Waiver, read_waivers, waived


@dataclass(frozen=True)
class Options:
    """What the person asked for.

    Attributes:
        stage_list: Only these stages (comma list, ``*``); overrides the filters below.
        kind: Only stages of this hardware kind.
        extra_stage: These, too.
        gpu_type: Only stages whose name begins with one of these words (comma list).
        test_backend: Only stages of these backends, or of none (comma list).
        post_merge: Post-merge stages, too.
        fail_fast: Stop after the first stage that fails.
        reuse: Take stages over that passed at this very commit.
        accept_capability: A GPU of this compute capability counts as the kind that a stage asks for.
    """

    stage_list: str | None = None
    kind: str | None = None
    extra_stage: str | None = None
    gpu_type: str | None = None
    test_backend: str | None = None
    post_merge: bool = False
    fail_fast: bool = True
    reuse: bool = False
    accept_capability: str | None = None


@dataclass(frozen=True)
class StagePlan:
    """One stage on this machine."""

    stage: Stage
    lines: tuple[TestLine, ...]
    selection: Selection
    query: Query
    lacking: str | None
    waived: tuple[tuple[TestLine, Waiver], ...] = ()


@dataclass(frozen=True)
class RunPlan:
    """All stages of a run.

    Attributes:
        partly: Why the run says less than a whole one, or None.
        fingerprint: Hash of table, lists, waivers and durations (hex).
    """

    stages: tuple[StagePlan, ...]
    partly: str | None
    warnings: tuple[str, ...]
    fingerprint: str
    waivers: tuple[Waiver, ...] = ()
    options: Options = field(default_factory=Options)


def choose(table: tuple[Stage, ...], options: Options) -> tuple[tuple[Stage, ...], str | None]:
    """The stages that were asked for, in the table's order, and why that is not all of them.

    Raises:
        StageError: A name, kind, GPU type or backend matches nothing.
    """
    narrowed = []
    if options.stage_list is not None:
        chosen = select_by_name(table, options.stage_list)
        narrowed.append(f"stage list {options.stage_list!r}")
    else:
        chosen = tuple(s for s in table if not s.on_demand)
        if options.kind is not None:
            if options.kind not in HARDWARE:
                raise StageError(f"unknown hardware kind {options.kind!r}{nearest(options.kind, HARDWARE)}")
            chosen = tuple(s for s in chosen if s.hardware == options.kind)
            narrowed.append(f"hardware kind {options.kind}")
        elif not options.post_merge:
            chosen = tuple(s for s in chosen if not s.post_merge)
        if options.gpu_type is not None:
            chosen = _filter(
                chosen, options.gpu_type, "GPU type", {s.gpu_type for s in table}, lambda s, w: s.gpu_type == w
            )
            narrowed.append(f"GPU type {options.gpu_type!r}")
        if options.test_backend is not None:
            known = {s.backend for s in table if s.backend}
            chosen = _filter(
                chosen, options.test_backend, "backend", known, lambda s, w: s.backend in (w.lower(), None)
            )
            narrowed.append(f"backend {options.test_backend!r}")
    if options.extra_stage is not None:
        more = select_by_name(table, options.extra_stage)
        chosen = tuple(s for s in table if s in chosen or s in more)
    if not chosen:
        raise StageError(
            f"nothing is left of {', '.join(s.name for s in table)} after: {', '.join(narrowed) or 'no option'}"
        )
    return chosen, ", ".join(narrowed) or None


def _filter(stages, wanted, what, known, matches):  # type: ignore[no-untyped-def]
    words = [w.strip() for w in wanted.split(",") if w.strip()]
    folded = {k.lower() for k in known}
    for word in words:
        if word.lower() not in folded:
            raise StageError(f"unknown {what} {word!r}{nearest(word, known)}; there are {', '.join(sorted(known))}")
    return tuple(s for s in stages if any(matches(s, w) for w in words))


def make_plan(folder: Path, options: Options, hardware: Hardware) -> RunPlan:
    """Read table, lists, waivers and durations of a folder and plan the run.

    Raises:
        StageError: Something is not what it should be, or a stage's list selects nothing (its query is in the message).
    """
    table = read_table(folder / "stages.yml")
    chosen, partly = choose(table, options)
    durations = read_durations(folder / "durations.json")
    waivers = read_waivers(folder / "waives.txt")
    lists: dict[str, TestList] = {}
    warnings: list[str] = []
    plans = []
    for stage in chosen:
        if stage.list_file not in lists:
            lists[stage.list_file] = read_list(folder / stage.list_file)
        plan = plan_stage(stage, lists[stage.list_file], hardware, durations, waivers, options.accept_capability)
        warnings += plan.selection.warnings
        plans.append(plan)
    digest = hashlib.sha256()
    for path in sorted({folder / "stages.yml", folder / "waives.txt", *(folder / name for name in lists)}):
        digest.update(path.name.encode() + b"\0" + (path.read_bytes() if path.exists() else b"") + b"\0")
    return RunPlan(tuple(plans), partly, tuple(dict.fromkeys(warnings)), digest.hexdigest(), waivers, options)


def plan_stage(
    stage: Stage,
    test_list: TestList,
    hardware: Hardware,
    durations: Mapping[str, float],
    waivers: tuple[Waiver, ...],
    accept_capability: str | None = None,
) -> StagePlan:
    """One stage's lines: those that match its query, without what other hardware runs, its shard of them.

    Raises:
        StageError: Nothing matches; the message prints the query and why each block was passed over.
    """
    query = query_of_stage(stage, hardware)
    selection = select(test_list, query)
    lines = [line for line in selection.lines if line.hardware_prefix in (None, stage.gpu_type)]
    if not lines:
        reasons = "".join(f"\n  {test_list.path.name}:{block.line}: {why}" for block, why in selection.passed_over)
        asked = ", ".join(f"{k}={v}" for k, v in sorted(query.items()))
        raise StageError(f"{stage.name}: {test_list.path.name} selects nothing for {asked}{reasons}")
    mine = shard(lines, stage.shards, durations)[stage.shard - 1]
    off = [(line, found) for line in mine if (found := waived(waivers, line, stage.gpu_type)) is not None]
    off += [
        (line, Waiver(line, line.markers["SKIP"] or "no reason given", line.line))
        for line in mine
        if "SKIP" in line.markers
    ]
    out = {line.identity for line, _ in off}
    kept = tuple(line for line in mine if line.identity not in out)
    return StagePlan(stage, kept, selection, query, lacking(stage, hardware, accept_capability), tuple(off))
