"""Validates table, lists and waivers without importing a test, and, when asked, against pytest's own collection.

Found: a missing file, class, method, function or literal parameter id; a line that stands twice, or below another one that
runs it anyway; markers that contradict each other, or say what holds without them; a prefix that no hardware has; a condition
on a key that no stage has; a block that no stage reaches; a stage or shard that selects nothing; a list that no stage names; a
waiver of nothing, or of what another one waives; and everything that the readers refuse. What cannot be known without an import
is counted as such, with a reason, and is left to ``--parity``; ``strict`` takes it for a problem.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from .errors import StageError, nearest
from .lists import TIMEOUT_DEFAULT_MIN, TestLine, TestList, covers, read_list
from .maintenance import read_maintenance
from .selecting import gpu_family, mismatch, prefix_holds, query_of_stage, select, unknown_keys
from .sharding import read_durations, shard
from .table import Stage, read_table
from .waivers import read_waivers

#: An object's address in a parameter id.
_ADDRESS = re.compile(r"\bat 0x[0-9a-f]+")
#: Valid ids that are named beside a wrong one (count).
IDS_MAX = 8


def report(root: Path, folder: Path, *, parity: bool = False, strict: bool = False) -> int:
    """Print every problem; exit code 0 when there is none."""
    unsure: list[str] = []
    try:
        problems = list(check(root, folder))
        unsure = list(unverifiable(root, folder))
        if strict:
            problems += unsure
        if parity and not problems:
            problems += list(check_parity(root, folder))
    except StageError as error:
        problems = [str(error)]
    for problem in problems:
        print(problem)
    if unsure and not strict:
        print(f"{len(unsure)} cannot be verified without an import (--strict names them)")
    print(f"{len(problems)} problems" if problems else "test lists hold")
    return 1 if problems else 0


def read_lists(folder: Path) -> dict[str, TestList]:
    """Every list of a folder, by file name."""
    return {path.name: read_list(path) for path in sorted(folder.glob("*.yml")) if path.name != "stages.yml"}


def check(root: Path, folder: Path) -> Iterator[str]:
    """All problems, each with file and line.

    Raises:
        StageError: A file cannot be read at all.
    """
    stages = read_table(folder / "stages.yml")
    lists = read_lists(folder)
    read_maintenance(folder / "maintenance_stages.txt", stages)
    durations = read_durations(folder / "durations.json")
    for stage in stages:
        if stage.list_file not in lists:
            yield f"stages.yml: {stage.name} names {stage.list_file}, which is missing{nearest(stage.list_file, lists)}"
            continue
        # On a machine of which nothing is known: what a stage may select, it must.
        lines = [
            line for line in select(lists[stage.list_file], query_of_stage(stage)).lines
            if prefix_holds(line.hardware_prefix, stage)
        ]  # fmt: skip
        if not lines:
            yield f"stages.yml: {stage.name} selects nothing of {stage.list_file}"
        elif not shard(lines, stage.shards, durations)[stage.shard - 1]:
            yield f"stages.yml: {stage.name} holds no line: {stage.shards} shards of {len(lines)}"
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
                problems = [*check_line(root, line), *_contradictions(line), *_prefix(line, stages)]
                yield from (f"{name}:{line.line}: {problem}" for problem in problems)
    listed = [line for test_list in lists.values() for block in test_list.blocks for line in block.tests]
    waivers = read_waivers(folder / "waives.txt")
    for waiver in waivers:
        where = f"waives.txt:{waiver.line}"
        for problem in [*check_line(root, waiver.test), *_prefix(waiver.test, stages)]:
            yield f"{where}: {problem}"
        if not any(_waives(waiver.test, line) for line in listed):
            yield f"{where}: {waiver.test.identity} is in no list: nothing to waive"
        for other in waivers:
            if other is not waiver and other.test.hardware_prefix is None and _waives_all(other.test, waiver.test):
                yield f"{where}: {waiver.test.identity} is waived by line {other.line}, too"


def unverifiable(root: Path, folder: Path) -> Iterator[str]:
    """What of lists and waivers cannot be known without an import, each with file, line and reason."""
    for name, test_list in read_lists(folder).items():
        for block in test_list.blocks:
            for line in block.tests:
                yield from (f"{name}:{line.line}: {text}" for text in examine(root, line).unsure)
    for waiver in read_waivers(folder / "waives.txt"):
        yield from (f"waives.txt:{waiver.line}: {text}" for text in examine(root, waiver.test).unsure)


def _waives(test: TestLine, line: TestLine) -> bool:
    bare = test.keyword is None and test.mark is None
    return line.identity == test.identity or (
        bare and (covers(line.target, test.target) or covers(test.target, line.target))
    )


def _waives_all(test: TestLine, other: TestLine) -> bool:
    return test.keyword is None and test.mark is None and covers(test.target, other.target)


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
                yield f"{test_list.path.name}:{line.line}: {line.identity} stands in line {seen[line.identity]}, too"
            seen.setdefault(line.identity, line.line)
            for other in block.tests:
                same = (other.keyword, other.mark) in ((None, None), (line.keyword, line.mark))
                if same and other.target != line.target and covers(other.target, line.target):
                    yield (
                        f"{test_list.path.name}:{line.line}: {line.identity} is run by line {other.line} "
                        f"({other.identity}), too"
                    )


@dataclass
class Examined:
    """What is wrong with a target, and what cannot be known without an import."""

    wrong: list[str] = field(default_factory=list)
    unsure: list[str] = field(default_factory=list)


def check_line(root: Path, line: TestLine) -> Iterator[str]:
    """What a line's target lacks."""
    yield from examine(root, line).wrong


def examine(root: Path, line: TestLine) -> Examined:
    """Follow a target through its file, without importing it."""
    path = root / line.path
    if not path.exists():
        parent = path.parent
        known = [p.name for p in parent.iterdir()] if parent.is_dir() else []
        return Examined([f"{line.path} does not exist{nearest(path.name, known)}"])
    _, *names = line.target.split("::") if "[" not in line.target else _split_id(line.target)
    if path.is_dir():
        return Examined([f"{line.path} is a folder, it has no {names[0]}"] if names else [])
    try:
        scope = _scope(path)
    except SyntaxError as error:
        return Examined([f"{line.path}:{error.lineno}: not Python: {error.msg}"])
    elsewhere = _elsewhere(path)
    for depth, full in enumerate(names):
        name, _, parameter = full.partition("[")
        if name not in scope:
            if elsewhere is not None:
                return Examined(unsure=[f"{line.target}: {elsewhere}"])
            return Examined([f"{line.path} has no {'::'.join([*names[:depth], name])}{nearest(name, scope)}"])
        node = scope[name]
        if isinstance(node, ast.ClassDef):
            if parameter:
                return Examined([f"{full} is a class: it has no parameters, name its test"])
            scope = {**_bases(path, node), **_members(node.body)}
            foreign = _foreign_base(path, node)
            elsewhere = f"its base {foreign} is made elsewhere" if foreign else None
        elif parameter:
            ids, wanted = literal_ids(node), parameter.removesuffix("]")
            if ids is None:
                return Examined(unsure=[f"{line.target}: the parameter ids are no literals"])
            if wanted not in ids:
                longer = [i for i in ids if i.startswith(wanted)]
                hint = f"; it is the beginning of {', '.join(longer[:3])}" if longer else nearest(wanted, ids)
                return Examined([f"{full}: no such parameter id{hint}; there are {', '.join(ids[:IDS_MAX])}"])
    return Examined()


def _split_id(target: str) -> list[str]:
    """``::`` inside an id's brackets is part of it."""
    head, bracket, parameter = target.partition("[")
    *first, last = head.split("::")
    return [*first, last + bracket + parameter]


def _elsewhere(path: Path) -> str | None:
    """Why a module may have names that its text does not show."""
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            return f"{node.module} may bring it"
    return None


def _foreign_base(path: Path, node: ast.ClassDef) -> str | None:
    for base in node.bases:
        if not isinstance(base, ast.Name) or not isinstance(_scope(path).get(base.id), ast.ClassDef):
            if ast.unparse(base) != "object":
                return ast.unparse(base)
        elif (foreign := _foreign_base(path, _class(path, base.id))) is not None:
            return foreign
    return None


def _class(path: Path, name: str) -> ast.ClassDef:
    found = _scope(path)[name]
    if not isinstance(found, ast.ClassDef):
        raise TypeError(f"{path}: {name} is no class")
    return found


@lru_cache(maxsize=256)
def _scope(path: Path) -> dict[str, ast.AST]:
    return _members(ast.parse(path.read_text("utf-8"), str(path)).body)


def _members(body: list[ast.stmt]) -> dict[str, ast.AST]:
    return {n.name: n for n in body if isinstance(n, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))}


def _bases(path: Path, node: ast.ClassDef) -> dict[str, ast.AST]:
    found: dict[str, ast.AST] = {}
    for base in node.bases:
        if isinstance(base, ast.Name) and isinstance(parent := _scope(path).get(base.id), ast.ClassDef):
            found |= {**_bases(path, parent), **_members(parent.body)}
    return found


def literal_ids(node: ast.AST) -> list[str] | None:
    """Parameter ids of a test with exactly one parametrize of literals; None: they cannot be known without importing."""
    marks = [
        d for d in getattr(node, "decorator_list", ())
        if isinstance(d, ast.Call) and isinstance(d.func, ast.Attribute) and d.func.attr == "parametrize"
    ]  # fmt: skip
    if len(marks) != 1 or len(marks[0].args) < 2 or any(k.arg == "ids" for k in marks[0].keywords):
        return None
    try:
        values = ast.literal_eval(marks[0].args[1])
    except ValueError:
        return None
    ids = []
    for value in values:
        parts = value if isinstance(value, tuple) else (value,)
        if not all(isinstance(p, (str, int, float, bool, type(None))) for p in parts):
            return None
        ids.append("-".join(str(p) for p in parts))
    return ids if len(set(ids)) == len(ids) else None


def check_parity(root: Path, folder: Path) -> Iterator[str]:
    """Every line that the check above accepts selects at least one test in pytest's own collection."""
    targets: dict[tuple[str, str | None, str | None], str] = {}
    for name, test_list in read_lists(folder).items():
        for block in test_list.blocks:
            for line in block.tests:
                targets.setdefault((line.target, line.mark, line.keyword), f"{name}:{line.line}")
    by_expressions: dict[tuple[str | None, str | None], list[tuple[str, str]]] = {}
    for (target, mark, keyword), where in targets.items():
        by_expressions.setdefault((mark, keyword), []).append((target, where))
    for (mark, keyword), lines in by_expressions.items():
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *(t for t, _ in lines)]
        command += [*(["-m", mark] if mark else []), *(["-k", keyword] if keyword else [])]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
        if done.returncode not in (0, 5):
            yield f"{', '.join(where for _, where in lines)}: pytest cannot collect:\n{done.stdout[-2000:]}"
            continue
        collected = [text for text in done.stdout.splitlines() if re.match(r"\S+::", text)]
        for item in filter(_ADDRESS.search, collected):
            where = next(where for target, where in lines if covers(target, item))
            yield f"{where}: {item}: an address in an id changes with the process: no waiver or rerun finds it again"
        for target, where in lines:
            if not any(covers(target, item) for item in collected):
                expressions = "".join(f" {flag} {e!r}" for flag, e in (("-m", mark), ("-k", keyword)) if e)
                yield f"{where}: {target}{expressions} selects no test"
