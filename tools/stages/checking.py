"""Validates table, lists and waivers without importing a test, and, when asked, against pytest's own collection.

Found: a missing file or folder; a line that appears twice, or below another one that runs it anyway; markers that contradict
each other, or say what holds without them; a prefix that no hardware has; a condition on a key that no stage has; a word of a
stage's name that is nearly one with a meaning; a block that no stage reaches; a stage or shard that selects nothing, or, on a
GPU kind, nothing that needs its GPU; a list that no stage names; a package that no stage tests; a waiver of nothing, or of
what another one waives; and everything that the readers refuse. By collection: a line or waiver that selects no test; a test
that no stage runs; a stage of several GPUs without a test that needs them; an id that changes with the process.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import needs
from .errors import StageError, nearest
from .lists import TIMEOUT_DEFAULT_MIN, TestLine, TestList, covers, read_list
from .selecting import gpu_family, mismatch, prefix_holds, query_of_stage, select, unknown_keys
from .sharding import read_durations, shard
from .table import Stage, read_table
from .waivers import read_waivers
from .words import doubtful

#: An object's address in a parameter id.
_ADDRESS = re.compile(r"\bat 0x[0-9a-f]+")
_PLUGIN = Path(__file__).resolve().parent / "plugin"
_COLLECTION_TIMEOUT_S = 900.0
#: Tests that are named where many are meant (count).
_NAMED_MAX = 3


def report(root: Path, folder: Path, *, parity: bool = False) -> int:
    """Print every problem; exit code 0 when there is none."""
    try:
        problems = list(check(root, folder))
        if parity and not problems:
            problems += list(check_parity(root, folder))
    except StageError as error:
        problems = [str(error)]
    for problem in problems:
        print(problem)
    print(f"{len(problems)} problems" if problems else "test lists hold")
    return 1 if problems else 0


def read_lists(folder: Path) -> dict[str, TestList]:
    """Every list of a folder, by file name."""
    return {path.name: read_list(path) for path in sorted(folder.glob("*.yml")) if path.name != "stages.yml"}


def check(root: Path, folder: Path) -> Iterator[str]:
    """All problems that show without an import, each with file and line."""
    stages = read_table(folder / "stages.yml")
    lists = read_lists(folder)
    for family in dict.fromkeys(stage.family for stage in stages):
        yield from (f"stages.yml: {text}" for text in doubtful(family))
    yield from _check_stages(folder, stages, lists)
    for name, test_list in lists.items():
        mine = [stage for stage in stages if stage.list_file == name]
        if not mine:
            yield f"{name}: no stage names this list"
            continue
        for block in test_list.blocks:
            reasons = [mismatch(block.condition, query_of_stage(stage)) for stage in mine]
            if all(reasons):
                yield f"{name}:{block.line}: no stage reaches this block ({reasons[0]})"
            if not block.tests:
                yield f"{name}:{block.line}: the block holds no test"
            for text in unknown_keys(block.condition):
                yield f"{name}:{block.line}: {text}"
        yield from _duplicates(test_list)
        for block in test_list.blocks:
            for line in block.tests:
                problems = [*_path(root, line), *_contradictions(line), *_prefix(line, stages)]
                yield from (f"{name}:{line.line}: {problem}" for problem in problems)
    yield from _check_packages(root, stages, lists)
    yield from _check_waivers(root, folder, stages, lists)


def _check_stages(folder: Path, stages: tuple[Stage, ...], lists: dict[str, TestList]) -> Iterator[str]:
    durations = read_durations(folder / "durations.json")
    for stage in stages:
        if stage.list_file not in lists:
            yield f"stages.yml: {stage.name} names {stage.list_file}, which is missing{nearest(stage.list_file, lists)}"
            continue
        # On a machine of which nothing is known: what a stage may select, it must.
        lines = select(lists[stage.list_file], query_of_stage(stage), stage).lines
        mine = shard(lines, stage.shards, durations)[stage.shard - 1]
        if not lines:
            yield f"stages.yml: {stage.name} selects nothing of {stage.list_file}"
        elif not mine:
            yield f"stages.yml: {stage.name} holds no line: {stage.shards} shards of {len(lines)}"
        elif stage.gpus and not any(line.needs_gpu for line in mine):
            yield f'stages.yml: {stage.name} holds no line that needs its GPU (-m "gpu …")'


def _check_packages(root: Path, stages: tuple[Stage, ...], lists: dict[str, TestList]) -> Iterator[str]:
    """Every package is tested by a stage that runs without being named."""
    daily = {stage.list_file for stage in stages if not stage.on_demand}
    paths = {line.path for name in daily & set(lists) for block in lists[name].blocks for line in block.tests}
    for project in sorted(root.glob("packages/*/pyproject.toml")):
        package = project.parent.relative_to(root).as_posix()
        if not any(covers(package, path) or covers(path, package) for path in paths):
            yield f"{package}: no stage tests this package: add a line to a list, such as l0_cpu.yml"


def _check_waivers(root: Path, folder: Path, stages: tuple[Stage, ...], lists: dict[str, TestList]) -> Iterator[str]:
    listed = [line for test_list in lists.values() for block in test_list.blocks for line in block.tests]
    waivers = read_waivers(folder / "waives.txt")
    for waiver in waivers:
        where = f"waives.txt:{waiver.line}"
        for problem in [*_path(root, waiver.test), *_prefix(waiver.test, stages)]:
            yield f"{where}: {problem}"
        if not any(_waives(waiver.test, line) for line in listed):
            yield f"{where}: {waiver.test.identity} is in no list: nothing to waive"
        for other in waivers:
            everywhere = other is not waiver and other.test.hardware_prefix is None and other.test.bare
            if everywhere and covers(other.test.target, waiver.test.target):
                yield f"{where}: {waiver.test.identity} is also waived by line {other.line}"


def _path(root: Path, line: TestLine) -> Iterator[str]:
    path = root / line.path
    if not path.exists():
        known = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        yield f"{line.path} does not exist{nearest(path.name, known)}"


def _waives(test: TestLine, line: TestLine) -> bool:
    near = covers(line.target, test.target) or covers(test.target, line.target)
    return line.identity == test.identity or (test.bare and near)


def _contradictions(line: TestLine) -> Iterator[str]:
    if len(line.markers) > 1:
        yield f"{' and '.join(line.markers)} contradict each other: say one of them"
    if line.timeout_given and line.timeout_min == TIMEOUT_DEFAULT_MIN:
        yield f"TIMEOUT ({TIMEOUT_DEFAULT_MIN}) is what holds without it: leave it out"


def _prefix(line: TestLine, stages: tuple[Stage, ...]) -> Iterator[str]:
    if line.hardware_prefix is not None and not any(prefix_holds(line.hardware_prefix, stage) for stage in stages):
        known = {stage.gpu_type for stage in stages} | {gpu_family(stage.gpu_type) for stage in stages}
        yield f"full:{line.hardware_prefix}/ is no stage's hardware{nearest(line.hardware_prefix, known)}"


def _duplicates(test_list: TestList) -> Iterator[str]:
    for block in test_list.blocks:
        seen: dict[str, int] = {}
        for line in block.tests:
            if line.identity in seen:
                yield f"{test_list.path.name}:{line.line}: {line.identity} is also in line {seen[line.identity]}"
            seen.setdefault(line.identity, line.line)
            for other in block.tests:
                same = (other.keyword, other.mark) in ((None, None), (line.keyword, line.mark))
                if same and other.target != line.target and covers(other.target, line.target):
                    yield (
                        f"{test_list.path.name}:{line.line}: {line.identity} is run by line {other.line}, "
                        f"too ({other.identity})"
                    )


# -- against pytest's own collection ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Collected:
    """What pytest collects: ids, how many GPUs each needs, which are slow, and what each pair of expressions leaves."""

    ids: tuple[str, ...]
    gpus: tuple[int, ...]
    slow: frozenset[int]
    selected: dict[tuple[str | None, str | None], tuple[int, ...]]

    def of(self, line: TestLine) -> list[int]:
        """Places of the tests that a line selects."""
        return [i for i in self.selected[line.mark, line.keyword] if covers(line.target, self.ids[i])]


def collect(root: Path, lines: list[TestLine]) -> Collected | str:
    """Everything that pytest collects there, in one run; or why it cannot."""
    pairs = list(dict.fromkeys((line.mark, line.keyword) for line in lines))
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch, "collected.json")
        environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "STAGE_EXPRESSIONS": json.dumps(pairs),
                       "STAGE_COLLECTED": str(answer), "PYTHONPATH": needs.python_path(root, str(_PLUGIN))}  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "stage_collect"],
            cwd=root, env=environment, capture_output=True, text=True, errors="replace", timeout=_COLLECTION_TIMEOUT_S,
        )  # fmt: skip
        if done.returncode not in (0, 5) or not answer.exists():
            return f"pytest cannot collect:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        found = json.loads(answer.read_text("utf-8"))
    return Collected(
        tuple(found["ids"]), tuple(found["gpus"]), frozenset(found["slow"]),
        {pair: tuple(places) for pair, places in zip(pairs, found["selected"], strict=True)},
    )  # fmt: skip


def check_parity(root: Path, folder: Path) -> Iterator[str]:
    """What the check above accepts, against what pytest collects."""
    stages, lists = read_table(folder / "stages.yml"), read_lists(folder)
    named = [
        (f"{name}:{line.line}", line) for name, found in lists.items() for block in found.blocks for line in block.tests
    ]
    named += [(f"waives.txt:{waiver.line}", waiver.test) for waiver in read_waivers(folder / "waives.txt")]
    collected = collect(root, [line for _, line in named])
    if isinstance(collected, str):
        yield collected
        return
    run: set[int] = set()
    reported: set[object] = set()
    for where, line in named:
        mine = collected.of(line)
        run |= set(mine) if not where.startswith("waives") else set()
        if not mine and line.selects not in reported:
            reported.add(line.selects)
            yield f"{where}: {line.identity} selects no test{_nearest_test(line, collected.ids)}"
        for test in (collected.ids[i] for i in mine if _ADDRESS.search(collected.ids[i])):
            if test not in reported:
                reported.add(test)
                yield f"{where}: {test}: an address in an id changes with the process: no waiver or rerun finds it again"
    yield from _unlisted(collected, run)
    for stage in stages:
        wanted = stage.gpus * stage.nodes
        lines = select(lists[stage.list_file], query_of_stage(stage), stage).lines
        if wanted > 1 and not any(collected.gpus[i] == wanted for line in lines for i in collected.of(line)):
            yield f"stages.yml: {stage.name} holds no test that needs {wanted} GPUs (pytest.mark.gpus(count={wanted}))"


def _nearest_test(line: TestLine, ids: tuple[str, ...]) -> str:
    if "::" not in line.target:
        return ""
    below = {test for test in ids if covers(line.path, test)} | {
        test.partition("[")[0] for test in ids if covers(line.path, test)
    }
    return nearest(line.target, below)


def _unlisted(collected: Collected, run: set[int]) -> Iterator[str]:
    """Tests that neither a stage nor, being slow, the nightly run would start."""
    forgotten: dict[str, list[str]] = {}
    for place, test in enumerate(collected.ids):
        if place not in run and place not in collected.slow:
            forgotten.setdefault(test.partition("::")[0], []).append(test)
    for path, tests in forgotten.items():
        more = f" and {len(tests) - _NAMED_MAX} more" if len(tests) > _NAMED_MAX else ""
        yield f"{path}: no stage runs {', '.join(tests[:_NAMED_MAX])}{more}"
