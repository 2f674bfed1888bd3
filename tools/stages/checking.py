"""Validates table, lists and waivers without importing a test, and, when asked, against pytest's own collection.

Found: a missing file, class, function or literal parameter id; a line that stands twice; a block that no stage reaches; a list
that no stage names; a waiver of nothing; and everything that the readers refuse.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from .errors import StageError, nearest
from .hardware import Hardware
from .lists import TestLine, TestList, read_list
from .selecting import mismatch, query_of_stage
from .table import read_table
from .waivers import read_waivers


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


def check(root: Path, folder: Path) -> Iterator[str]:
    """All problems, each with file and line.

    Raises:
        StageError: A file cannot be read at all.
    """
    stages = read_table(folder / "stages.yml")
    lists = {path.name: read_list(path) for path in sorted(folder.glob("l0_*.yml"))}
    for stage in stages:
        if stage.list_file not in lists:
            yield f"stages.yml: {stage.name} names {stage.list_file}, which is missing{nearest(stage.list_file, lists)}"
    machine = Hardware()
    for name, test_list in lists.items():
        mine = [stage for stage in stages if stage.list_file == name]
        if not mine:
            yield f"{name}: no stage names this list"
            continue
        for block in test_list.blocks:
            queries = [query_of_stage(stage, machine) for stage in mine]
            reasons = [mismatch(block.condition, query) for query in queries]
            if all(reasons):
                yield f"{name}:{block.line}: no stage reaches this block ({reasons[0]})"
            if not block.tests:
                yield f"{name}:{block.line}: the block holds no test"
        yield from _duplicates(test_list)
        for block in test_list.blocks:
            for line in block.tests:
                for problem in check_line(root, line):
                    yield f"{name}:{line.line}: {problem}"
    listed = [line for test_list in lists.values() for block in test_list.blocks for line in block.tests]
    for waiver in read_waivers(folder / "waives.txt"):
        where = f"waives.txt:{waiver.line}"
        for problem in check_line(root, waiver.test):
            yield f"{where}: {problem}"
        if not any(_covers(line, waiver.test) for line in listed):
            yield f"{where}: {waiver.test.identity} is in no list: nothing to waive"


def _covers(line: TestLine, test: TestLine) -> bool:
    return (
        line.identity == test.identity
        or test.target == line.target
        or test.target.startswith((line.target.rstrip("/") + "/", line.target + "::"))
    )


def _duplicates(test_list: TestList) -> Iterator[str]:
    for block in test_list.blocks:
        seen: dict[str, int] = {}
        for line in block.tests:
            if line.identity in seen:
                yield f"{test_list.path.name}:{line.line}: {line.identity} stands in line {seen[line.identity]}, too"
            seen.setdefault(line.identity, line.line)


def check_line(root: Path, line: TestLine) -> Iterator[str]:
    """What a line's target lacks."""
    path = root / line.path
    if not path.exists():
        parent = path.parent
        known = [p.name for p in parent.iterdir()] if parent.is_dir() else []
        yield f"{line.path} does not exist{nearest(path.name, known)}"
        return
    _, *names = line.target.split("::")
    if path.is_dir():
        if names:
            yield f"{line.path} is a folder, it has no {names[0]}"
        return
    try:
        scope = _scope(path)
    except SyntaxError as error:
        yield f"{line.path}:{error.lineno}: not Python: {error.msg}"
        return
    for depth, full in enumerate(names):
        name, _, parameter = full.partition("[")
        if name not in scope:
            yield f"{line.path} has no {'::'.join([*names[:depth], name])}{nearest(name, scope)}"
            return
        node = scope[name]
        if isinstance(node, ast.ClassDef):
            if parameter:
                yield f"{full} is a class: it has no parameters"
                return
            scope = {**_bases(path, node), **_members(node.body)}
        elif parameter:
            ids = literal_ids(node)
            wanted = parameter.removesuffix("]")
            if ids is not None and wanted not in ids:
                yield f"{full}: no such parameter id{nearest(wanted, ids)}"


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
    for path in sorted(folder.glob("l0_*.yml")):
        for block in read_list(path).blocks:
            for line in block.tests:
                targets.setdefault((line.target, line.mark, line.keyword), f"{path.name}:{line.line}")
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
        for target, where in lines:
            wanted = (target, target + "::", target + "[", target.rstrip("/") + "/")
            if not any(item == target or item.startswith(wanted[1:]) for item in collected):
                expressions = "".join(f" {flag} {e!r}" for flag, e in (("-m", mark), ("-k", keyword)) if e)
                yield f"{where}: {target}{expressions} selects no test"
