"""Three faults that hide in code that runs. Each line: ``file:line: what and why``; exit 1 if there is one.

- dead names: what nothing in the repository uses, its tests included (found by vulture); justified ones stand in
  ``tools/dead_names.txt``, a line each with the reason, and an entry that is not needed any more is a fault, too
- import circles: modules of a package that import each other at run time, in a function too; known ones in ``CIRCLES``
- backtracking: regular expressions whose time can grow faster than the text: a repeat in a repeat or two in a row that take the
  same characters, or a search that begins again inside what a repeat has just run over. A text from outside must not meet
  one; where it cannot, a comment ``regex-ok: REASON`` on its line says why.

    python tools/check_code.py [dead-names] [import-circles] [backtracking]
"""

from __future__ import annotations

import ast
import re
import re._constants as rc
import re._parser as rp
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
#: Circles that stand for now. One that is gone must be removed here.
CIRCLES: frozenset[frozenset[str]] = frozenset()
#: Files whose expressions are still to be mended. One that is clean must be removed here.
SLOW_FILES: frozenset[str] = frozenset()
#: Names that somebody calls by their form.
BY_FORM = ("__*__", "_do_*", "visit_*", "do_[A-Z]*")


# -- dead names ---------------------------------------------------------------------------------------------------------


def _fields(path: Path) -> set[tuple[int, str]]:
    """Annotated fields of classes: records, whose readers may be outside."""
    classes = (node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.ClassDef))
    return {
        (field.lineno, field.target.id)
        for node in classes
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def _justified(path: Path) -> dict[tuple[str, str], int]:
    """(package, name) → line of the list of names that stay."""
    entries = {}
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if line and not line.startswith("#"):
            words, _, reason = line.partition(": ")
            package, name = words.split()
            if not reason:
                raise SystemExit(f"{path.name}:{number}: no reason")
            entries[package, name] = number
    return entries


def check_dead_names(root: Path) -> Iterator[str]:
    """Functions, classes, methods, attributes and enumeration members that nothing uses."""
    import vulture

    scan = vulture.Vulture(ignore_names=list(BY_FORM))
    folders = [*root.glob("packages/*"), root / "tools", root / "integration"]
    scan.scavenge([str(folder) for folder in folders if folder.is_dir()], exclude=["*/tools/template/*"])
    listed = root / "tools" / "dead_names.txt"
    justified = _justified(listed)
    used = set()
    fields: dict[Path, set[tuple[int, str]]] = {}
    for item in scan.get_unused_code(min_confidence=60):
        path = Path(item.filename)
        parts = path.relative_to(root).parts
        if parts[0] != "packages" or "src" not in parts or item.typ in ("import", "unreachable_code"):
            continue
        if item.typ == "variable":
            known = fields.setdefault(path, _fields(path))
            if (item.first_lineno, item.name) in known or item.confidence == 100:
                continue
        used.add((parts[1], item.name))
        if (parts[1], item.name) not in justified:
            yield f"{path.relative_to(root)}:{item.first_lineno}: nothing uses {item.typ} {item.name}"
    for (package, name), number in justified.items():
        if (package, name) not in used:
            yield f"tools/dead_names.txt:{number}: {package} {name} is used, or gone: remove the line"


# -- import circles -----------------------------------------------------------------------------------------------------


def _runtime_imports(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports that run some time: not those for the type checker. One in a function hides a circle, it does not break it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            for other in child.orelse:
                yield from _runtime_imports(other)
        else:
            yield from _runtime_imports(child)


def _module_graph(source: Path) -> dict[str, set[str]]:
    """module → modules of the same package that it imports."""
    names = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph: dict[str, set[str]] = {}
    for module, path in names.items():
        found = graph.setdefault(module, set())
        for node in _runtime_imports(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
                continue
            base = node.module or ""
            if node.level:
                package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [base])])
            found |= {f"{base}.{a.name}" if f"{base}.{a.name}" in names else base for a in node.names}
        found &= set(names)
        found.discard(module)
    return graph


def _circles(graph: dict[str, set[str]]) -> list[frozenset[str]]:
    """The groups of modules that reach each other (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[frozenset[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            if len(stack) - at > 1:
                groups.append(frozenset(stack[at:]))
            del stack[at:]

    for node in graph:
        if node not in index:
            visit(node)
    return groups


def check_import_circles(root: Path) -> Iterator[str]:
    """Modules that import each other at run time."""
    found: set[frozenset[str]] = set()
    for source in sorted(path.parent for path in root.glob("packages/*/src/*/__init__.py")):
        for group in _circles(_module_graph(source)):
            found.add(group)
            if group not in CIRCLES:
                yield f"{source.relative_to(root)}: these import each other at run time: {', '.join(sorted(group))}"
    for group in CIRCLES - found:
        yield f"tools/check_code.py: no circle of {', '.join(sorted(group))} any more: remove it from CIRCLES"


# -- backtracking -------------------------------------------------------------------------------------------------------

#: Beyond Latin-1 one number stands for all digits, one for spaces, one for other word characters, one for the rest.
_DIGIT, _SPACE, _WORD, _REST = range(256, 260)
_ALL = frozenset(range(260))
_CLASSES = {
    rc.CATEGORY_DIGIT: r"\d", rc.CATEGORY_SPACE: r"\s", rc.CATEGORY_WORD: r"\w",
    rc.CATEGORY_NOT_DIGIT: r"\D", rc.CATEGORY_NOT_SPACE: r"\S", rc.CATEGORY_NOT_WORD: r"\W",
}  # fmt: skip
_REPEATS = (rc.MAX_REPEAT, rc.MIN_REPEAT)
#: A repeat up to so often counts as bounded (times).
_FEW = 64
Node = tuple[Any, Any]


def _class(category: Any) -> frozenset[int]:
    matches = re.compile(_CLASSES[category]).fullmatch
    return frozenset(c for c in range(256) if matches(chr(c))) | frozenset(
        stand_in for stand_in, sample in ((_DIGIT, "\u0660"), (_SPACE, "\u2003"), (_WORD, "\u0416"), (_REST, "\u2192"))
        if matches(sample)
    )  # fmt: skip


def _number(code: int) -> int:
    character = chr(code)
    if code < 256:
        return code
    return (
        _DIGIT if character.isdecimal() else _SPACE if character.isspace() else _WORD if character.isalnum() else _REST
    )


def _characters(node: Node) -> frozenset[int]:
    """What one character matched by this node can be; everything a group can hold, for a group."""
    kind, value = node
    if kind is rc.LITERAL:
        return frozenset({_number(value)})
    if kind is rc.NOT_LITERAL:
        return _ALL - {value}  # one of many beyond Latin-1 takes none of them away
    if kind is rc.ANY:
        return _ALL - {10}
    if kind is rc.CATEGORY:
        return _class(value)
    if kind is rc.RANGE:
        beyond = _ALL - frozenset(range(256)) if value[1] > 255 else frozenset()
        return frozenset(range(value[0], min(value[1], 255) + 1)) | beyond
    if kind is rc.IN:
        items = [item for item in value if item[0] is not rc.NEGATE]
        held = frozenset().union(*map(_characters, items))
        return _ALL - held if len(items) < len(value) else held
    return frozenset().union(*(_characters(n) for branch in _inside(node) for n in branch), frozenset())


def _inside(node: Node) -> list[Sequence[Node]]:
    """The sequences inside a node: one, or one for each branch."""
    kind, value = node
    if kind in (*_REPEATS, rc.POSSESSIVE_REPEAT):
        return [list(value[2])]
    if kind is rc.SUBPATTERN:
        return [list(value[3])]
    if kind is rc.ATOMIC_GROUP:
        return [list(value)]
    if kind is rc.BRANCH:
        return [list(branch) for branch in value[1]]
    return []


def _may_be_empty(node: Node) -> bool:
    kind, value = node
    if kind in (*_REPEATS, rc.POSSESSIVE_REPEAT) and value[0] == 0:
        return True
    if kind in (rc.AT, rc.ASSERT, rc.ASSERT_NOT):
        return True
    inside = _inside(node)
    return bool(inside) and any(all(map(_may_be_empty, branch)) for branch in inside)


def _first(sequence: Sequence[Node]) -> frozenset[int]:
    """What the first character of a sequence can be."""
    held: frozenset[int] = frozenset()
    for node in sequence:
        inside = _inside(node)
        held |= frozenset().union(*map(_first, inside)) if inside else _characters(node)
        if not _may_be_empty(node):
            return held
    return held


def _is_long(node: Node) -> bool:
    return node[0] in _REPEATS and (node[1][1] is rc.MAXREPEAT or node[1][1] > _FEW)


def _faults(sequence: Sequence[Node], after: Sequence[Node], around: Sequence[Node] | None) -> Iterator[str]:
    """What can backtrack far: ``after`` follows the sequence; ``around``: the body of the repeat that it ends."""
    for at, node in enumerate(sequence):
        rest = [*sequence[at + 1 :], *after]
        ends = around is not None and all(map(_may_be_empty, sequence[at + 1 :]))
        if ends and _may_be_empty(node) and not _is_long(node) and _characters(node) & _first(around or ()):
            yield "a repeat of something optional takes the same characters in two ways"
        if _is_long(node):
            held = _characters(node)
            own = sequence[at + 1 :]
            again = ends and held & _first(around or ())
            if around is not None and (again or (held & _first(own) and all(held & _characters(n) for n in own))):
                yield "a repeat inside a repeat takes the same characters"
            for following in rest:
                if _is_long(following) and held & _characters(following):
                    yield "two repeats in a row take the same characters"
                    break
                if not _may_be_empty(following) and not held & _characters(following):
                    break
        for branch in _inside(node):
            loop = _is_long(node)
            yield from _faults(
                branch, [] if loop else rest, branch if loop else (around if not sequence[at + 1 :] else None)
            )


def _restarts(sequence: Sequence[Node]) -> bool:
    """Whether a search can begin again inside what a repeat of this pattern has just run over, and fail each time."""
    if not sequence or (sequence[0][0] is rc.AT and sequence[0][1] in (rc.AT_BEGINNING, rc.AT_BEGINNING_STRING)):
        return False

    def flat(nodes: Sequence[Node]) -> Iterator[Node]:
        for node in nodes:
            inside = [] if _is_long(node) else _inside(node)
            if len(inside) == 1:
                yield from flat(inside[0])
            else:
                yield node

    nodes = list(flat(sequence))
    first = _first(nodes)
    return any(_is_long(n) and first & _characters(n) and nodes[at + 1 :] for at, n in enumerate(nodes))


def faults_of(pattern: str, *, searched: bool, flags: int = 0) -> list[str]:
    """Why the time of a pattern can grow faster than its text; empty: it does not.

    Args:
        pattern: The expression.
        searched: Whether a match may begin anywhere (search, sub, split, findall), not only at the beginning.
        flags: As for ``re.compile``.
    """
    nodes = list(rp.parse(pattern, flags))
    found = list(dict.fromkeys(_faults(nodes, [], None)))
    if searched and _restarts(nodes):
        found.append("a search begins again inside what its repeat has run over")
    return found


_SEARCHES = {"search", "sub", "subn", "split", "findall", "finditer"}


def _patterns(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """(line, pattern, whether it is searched) of the constant patterns of a module."""
    used: dict[str, set[str]] = {}
    names: dict[ast.Call, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            used.setdefault(owner, set()).add(node.attr)
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            names[node.value] = target.id if isinstance(target, ast.Name) else getattr(target, "attr", "")
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
            continue
        if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "re"):
            continue
        pattern = node.args[0]
        if isinstance(pattern, ast.Constant) and isinstance(pattern.value, str):
            methods = used.get(names.get(node, ""), {"search"}) if node.func.attr == "compile" else {node.func.attr}
            yield node.lineno, pattern.value, bool(methods & _SEARCHES)


def check_backtracking(root: Path) -> Iterator[str]:
    """Regular expressions of the packages that a long text can make slow."""
    slow: set[str] = set()
    for path in sorted(root.glob("packages/*/src/**/*.py")):
        text = path.read_text("utf-8")
        if "import re\n" not in text:
            continue
        lines = text.splitlines()
        for line, pattern, searched in _patterns(ast.parse(text)):
            if "regex-ok: " not in lines[line - 1]:
                for fault in faults_of(pattern, searched=searched):
                    slow.add(path.relative_to(root).as_posix())
                    if path.relative_to(root).as_posix() not in SLOW_FILES:
                        yield f"{path.relative_to(root)}:{line}: {pattern!r}: {fault}"
    for file in SLOW_FILES - slow:
        yield f"tools/check_code.py: {file} has no slow expression any more: remove it from SLOW_FILES"


CHECKS = {
    "dead-names": check_dead_names,
    "import-circles": check_import_circles,
    "backtracking": check_backtracking,
}


def main(arguments: list[str]) -> int:
    """Exit 0 when nothing was found."""
    unknown = [name for name in arguments if name not in CHECKS]
    if unknown:
        print(f"unknown check {unknown[0]!r}; there are {', '.join(CHECKS)}", file=sys.stderr)
        return 2
    problems = [f"{problem} [{name}]" for name in arguments or CHECKS for problem in CHECKS[name](ROOT)]
    print("\n".join(problems) if problems else "no dead names, import circles or backtracking expressions")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
