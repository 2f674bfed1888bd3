"""Faults planted in Python by syntax: where a fault stands, what it looks for, what it makes of it. Pure: text in, text out.

A *place* is the qualified name of a function, class or table, as much of it as is unique in the package: ``stop``,
``Owner.stop``, ``_owner.Owner.stop``; ``_owner`` alone is that whole module. So a function may move, and its other
statements may change, without touching the fault.

A *pattern* is Python, compared as a syntax tree (layout, comments and line numbers do not matter), which must match exactly
once in its place:

- an expression (``generation != self._generation``) or a statement (``self._n += 1``, ``return``);
- the head of a compound statement alone (``if self._open``, ``except BaseException``, ``async with self._lock``);
- statements in a row, separated by ``;;``;
- ``...`` stands for any expression, for any number of arguments or elements, or for any statements; ``$name`` for an
  expression that the replacement may use again.

A *replacement* is Python of the same sort (a head replaces the head and keeps the body), or one of the operators:

- ``!drop``: without the statement, the operand of and/or, the element, the argument, the handler
- ``!negate``: the condition (of an if or while, or any expression) turned round
- ``!swap``: the branches of an if, or of a conditional expression, exchanged
- ``!body``: the body without its ``if``, ``with``, ``for`` or ``try`` around it
"""

from __future__ import annotations

import ast
import copy
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_META = "_meta_"
_HEADS = ("if", "for", "while", "with", "async", "def", "class")
#: Fields that say nothing about what a node means, or that a pattern may leave out.
_IGNORED = {"ctx", "type_comment", "type_params", "kind"}
_OPTIONAL = {"orelse", "finalbody", "handlers", "decorator_list", "returns", "name"}
_BLOCKS = {"body", *_OPTIONAL}
_DROPPABLE = {"body", "orelse", "finalbody", "handlers", "values", "elts", "args", "keywords"}
OPERATORS = ("!drop", "!negate", "!swap", "!body")


class PlantingError(ValueError):
    """The fault cannot be planted: nothing was changed."""


@dataclass(frozen=True)
class Edit:
    """One change: in ``place``, what matches ``pattern`` becomes ``replacement``."""

    place: str
    pattern: str
    replacement: str


def _parse(text: str) -> list[ast.AST]:
    """The nodes that a pattern or replacement stands for: one expression, one handler, or statements."""
    text = re.sub(r"\$([a-z]\w*)", rf"{_META}\1", text.strip())
    nodes: list[ast.AST] = []
    for part in text.split(";;"):
        part = part.strip()
        try:
            if part.split(" ")[0].rstrip(":") == "except":
                head = part if ":" in part else f"{part}: ..."
                nodes += ast.parse(f"try: ...\n{head}").body[0].handlers  # type: ignore[attr-defined]
            elif part == "try":
                [node] = ast.parse("try: ...\nfinally: ...").body
                node.finalbody = []  # type: ignore[attr-defined]
                nodes.append(node)
            elif part.split(" ")[0] in _HEADS and not _parses(part):
                nodes += ast.parse(f"{part}: ...").body
            else:
                nodes += ast.parse(part).body
        except SyntaxError as error:
            raise PlantingError(f"{part!r} is not Python: {error.msg}") from None
    if len(nodes) == 1 and isinstance(nodes[0], ast.Expr):
        return [nodes[0].value]
    return nodes


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def _is_wildcard(node: Any) -> bool:
    node = node.value if isinstance(node, ast.Expr) else node
    return isinstance(node, ast.Constant) and node.value is Ellipsis


def _match(pattern: Any, node: Any, found: dict[str, ast.AST]) -> bool:
    if _is_wildcard(pattern):
        return True
    if isinstance(pattern, ast.Name) and pattern.id.startswith(_META):
        known = found.setdefault(pattern.id, node)
        return ast.dump(known) == ast.dump(node)
    if isinstance(pattern, list):
        return isinstance(node, list) and _match_list(pattern, node, found)
    if not isinstance(pattern, ast.AST):
        return type(pattern) is type(node) and pattern == node
    if type(pattern) is not type(node):
        return False
    for field, wanted in ast.iter_fields(pattern):
        if field in _IGNORED or (field in _OPTIONAL and not wanted):
            continue
        if field == "keywords" and any(map(_is_wildcard, getattr(pattern, "args", ()))):
            named = {k.arg: k for k in node.keywords}
            if not all(k.arg in named and _match(k.value, named[k.arg].value, found) for k in wanted):
                return False
        elif not _match(wanted, getattr(node, field), found):
            return False
    return True


def _match_list(patterns: list[Any], nodes: list[Any], found: dict[str, ast.AST]) -> bool:
    if not patterns:
        return not nodes
    if _is_wildcard(patterns[0]):
        return any(_match_list(patterns[1:], nodes[skip:], found) for skip in range(len(nodes) + 1))
    return bool(nodes) and _match(patterns[0], nodes[0], found) and _match_list(patterns[1:], nodes[1:], found)


@dataclass
class _Found:
    """Where a pattern matched: ``count`` nodes from ``index`` in a list field of ``parent``, or the field itself."""

    parent: Any
    field: str
    index: int | None
    count: int
    bound: dict[str, ast.AST]

    @property
    def node(self) -> Any:
        value = getattr(self.parent, self.field)
        return value if self.index is None else value[self.index]

    def put(self, nodes: list[Any]) -> None:
        """Set what stands there; an emptied block keeps a ``pass``."""
        if self.index is None:
            if len(nodes) != 1:
                raise PlantingError("an expression can only become one expression")
            setattr(self.parent, self.field, nodes[0])
            return
        held = getattr(self.parent, self.field)
        held[self.index : self.index + self.count] = nodes
        if not held and self.field == "body":
            held.append(ast.Pass())


def _places_of(patterns: list[ast.AST], scope: ast.AST) -> Iterator[_Found]:
    for parent in ast.walk(scope):
        for field, value in ast.iter_fields(parent):
            if isinstance(value, list):
                for index in range(len(value) - len(patterns) + 1):
                    bound: dict[str, ast.AST] = {}
                    if all(_match(p, n, bound) for p, n in zip(patterns, value[index:], strict=False)):
                        yield _Found(parent, field, index, len(patterns), bound)
            elif isinstance(value, ast.AST) and len(patterns) == 1:
                bound = {}
                if _match(patterns[0], value, bound):
                    yield _Found(parent, field, None, 1, bound)


class _Fill(ast.NodeTransformer):
    """Puts what the pattern's ``$names`` stood for into a replacement."""

    def __init__(self, bound: Mapping[str, ast.AST]) -> None:
        self.bound = bound

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id.startswith(_META):
            if node.id not in self.bound:
                raise PlantingError(f"${node.id.removeprefix(_META)} is not in the pattern")
            return copy.deepcopy(self.bound[node.id])
        return node


def _scopes(modules: Mapping[str, ast.Module]) -> Iterator[tuple[str, str, ast.AST]]:
    """(module, qualified name with the module, node) of every module, class, function and assigned name."""

    def inside(module: str, prefix: str, body: list[Any]) -> Iterator[tuple[str, str, ast.AST]]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}.{node.name}"
                yield module, name, node
                yield from inside(module, name, node.body)
            elif isinstance(node, ast.AnnAssign | ast.Assign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                yield from ((module, f"{prefix}.{t.id}", node) for t in targets if isinstance(t, ast.Name))
            else:
                for field in ("body", "orelse", "handlers", "finalbody"):
                    yield from inside(module, prefix, getattr(node, field, []))

    for module, tree in modules.items():
        yield module, module, tree
        yield from inside(module, module, tree.body)


class Sources:
    """The modules of a package: text by module name, relative to the package (``_owner``, ``executor.loop``)."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.texts = dict(texts)
        self.trees = {name: ast.parse(text) for name, text in texts.items()}
        self._places = list(_scopes(self.trees))

    def find(self, place: str) -> tuple[str, ast.AST]:
        """The module and node that a place names.

        Raises:
            PlantingError: No such name, or several: the message lists them.
        """
        found = [(m, name, node) for m, name, node in self._places if f".{name}".endswith(f".{place}")]
        found = [entry for entry in found if entry[1] == place] or found
        found = [entry for entry in found if not isinstance(entry[2], ast.Assign | ast.AnnAssign)] or found
        if len(found) != 1:
            names = ", ".join(name for _, name, _ in found[:5])
            raise PlantingError(f"{place!r} names {len(found)} places{': ' + names if names else ''}")
        return found[0][0], found[0][2]


def _statement_wanted(at: _Found) -> bool:
    """Whether what was found is an expression that is a statement by itself."""
    return isinstance(at.parent, ast.Expr) and at.field == "value"


def _lift(at: _Found, scope: ast.AST) -> _Found:
    for parent in ast.walk(scope):
        for field, value in ast.iter_fields(parent):
            if isinstance(value, list) and at.parent in value:
                return _Found(parent, field, value.index(at.parent), 1, at.bound)
    raise PlantingError("the expression is not a statement")


def _drop(at: _Found, scope: ast.AST) -> None:
    if _statement_wanted(at):
        at = _lift(at, scope)
    if isinstance(at.parent, ast.BoolOp) and len(at.parent.values) == 2 and at.index is not None:
        rest = at.parent.values[1 - at.index]
        [above] = _parents(at.parent, scope)
        above.put([rest])
    elif at.index is None or at.field not in _DROPPABLE:
        raise PlantingError("!drop takes away a statement, an operand of and/or, an element, an argument or a handler")
    elif at.field == "handlers" and len(at.parent.handlers) == 1 and not at.parent.finalbody:
        [above] = _parents(at.parent, scope)
        above.put(at.parent.body)
    else:
        at.put([])


def _parents(node: ast.AST, scope: ast.AST) -> Iterator[_Found]:
    for parent in ast.walk(scope):
        for field, value in ast.iter_fields(parent):
            if value is node:
                yield _Found(parent, field, None, 1, {})
            elif isinstance(value, list):
                yield from (_Found(parent, field, i, 1, {}) for i, item in enumerate(value) if item is node)


def _operate(operator: str, at: _Found, scope: ast.AST) -> None:
    node = at.node
    if operator == "!drop":
        _drop(at, scope)
    elif operator == "!negate":
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            node.test = ast.UnaryOp(ast.Not(), node.test)
        elif isinstance(node, ast.expr):
            at.put([ast.UnaryOp(ast.Not(), node)])
        else:
            raise PlantingError(f"!negate does not fit {type(node).__name__}")
    elif operator == "!swap" and isinstance(node, ast.If | ast.IfExp):
        if isinstance(node, ast.If):
            node.orelse = node.orelse or [ast.Pass()]
        node.body, node.orelse = node.orelse, node.body  # type: ignore[assignment]
    elif operator == "!body" and isinstance(node, ast.stmt) and hasattr(node, "body"):
        at.put(node.body)
    else:
        raise PlantingError(f"{operator} does not fit {type(node).__name__}; operators: {', '.join(OPERATORS)}")


def _replace(at: _Found, text: str, scope: ast.AST) -> None:
    nodes = [_Fill(at.bound).visit(copy.deepcopy(node)) for node in _parse(text)]
    statements = any(isinstance(node, ast.stmt) for node in nodes)
    if statements and _statement_wanted(at):
        at = _lift(at, scope)
    held = getattr(at.parent, at.field)
    matched = [held] if at.index is None else held[at.index : at.index + at.count]
    for old, node in zip(reversed(matched), reversed(nodes), strict=False):
        _keep_body(old, node)
    if isinstance(matched[0], ast.stmt):
        nodes = [ast.Expr(node) if isinstance(node, ast.expr) else node for node in nodes]
    elif statements:
        raise PlantingError("a statement cannot stand for an expression")
    at.put(nodes)


def _keep_body(old: ast.AST, node: ast.AST) -> None:
    """A head replaces a head; what it does not mention stays."""
    body = getattr(node, "body", None)
    if isinstance(body, list) and len(body) == 1 and _is_wildcard(body[0]):
        same = type(old) is type(node)
        for field in _BLOCKS & set(old._fields) if same else {"body"}:
            if field == "body" or not getattr(node, field, None):
                setattr(node, field, getattr(old, field))


def _apply(edit: Edit, scope: ast.AST) -> None:
    found = list(_places_of(_parse(edit.pattern), scope))
    if len(found) != 1:
        raise PlantingError(f"{edit.pattern!r} matches {len(found)} places in {edit.place}")
    before = ast.dump(scope)
    if edit.replacement.startswith("!"):
        _operate(edit.replacement, found[0], scope)
    else:
        _replace(found[0], edit.replacement, scope)
    if ast.dump(scope) == before:
        raise PlantingError(f"{edit.pattern!r} in {edit.place} stays as it was")


def check(sources: Sources, edits: tuple[Edit, ...]) -> None:
    """See that a fault can be planted, without making the planted text: cheap enough for every commit.

    Raises:
        PlantingError: As ``plant``.
    """
    copies: dict[int, ast.AST] = {}
    for edit in edits:
        _, scope = sources.find(edit.place)
        _apply(edit, copies.setdefault(id(scope), copy.deepcopy(scope)))


def plant(sources: Sources, edits: tuple[Edit, ...]) -> dict[str, str]:
    """Plant one fault.

    Args:
        sources: The package; stays as it is.
        edits: What to change, in turn.

    Returns:
        The new text of each module that changed.

    Raises:
        PlantingError: A place or pattern is not there exactly once, or the result is the same, or is not valid Python.
    """
    changed: dict[str, Sources] = {}
    for edit in edits:
        module, _ = sources.find(edit.place)
        own = changed.setdefault(module, Sources({module: sources.texts[module]}))
        _apply(edit, own.find(edit.place)[1])
    return {module: _text(module, own.trees[module]) for module, own in changed.items()}


def _text(module: str, tree: ast.Module) -> str:
    text = ast.unparse(ast.fix_missing_locations(tree))
    try:
        compile(text, module, "exec")
    except SyntaxError as error:
        raise PlantingError(f"the planted {module} is not valid Python: {error}") from None
    return text


def rows_of(sources: Sources, place: str, default: str = "") -> list[str]:
    """The faults that a table of transitions has: for each row one with another target and one without the row.

    A table is a dict display, rows by key or nested by two keys; targets that are sets give one row per element.

    Args:
        sources: The package.
        place: The name that the table is assigned to.
        default: The target that a missing row stands for; such rows are not removed.

    Raises:
        PlantingError: The place is not a table of at least two rows.
    """
    return [name for name, _ in _row_faults(sources.find(place)[1], place, default)]


def plant_row(sources: Sources, place: str, name: str) -> dict[str, str]:
    """Plant one of the faults that ``rows_of`` names; returns the new text by module."""
    module, _ = sources.find(place)
    own = Sources({module: sources.texts[module]})
    dict(_row_faults(own.find(place)[1], place))[name]()
    return {module: _text(module, own.trees[module])}


def _rows(table: ast.Dict, label: str) -> Iterator[tuple[str, Any, str, int]]:
    """(name, holder, its field, index) of each row."""
    for index, (key, value) in enumerate(zip(table.keys, table.values, strict=True)):
        name = f"{label}{ast.unparse(key) if key else '**'}"
        sets = [node for node in ast.walk(value) if isinstance(node, ast.Set)]
        if isinstance(value, ast.Dict):
            yield from _rows(value, f"{name} ")
        elif sets:
            yield from ((f"{name} {ast.unparse(e)}", sets[0], "elts", i) for i, e in enumerate(sets[0].elts))
        elif not (isinstance(value, ast.Call) and not value.args):  # frozenset(): no row
            yield name, table, "values", index


def _row_faults(scope: ast.AST, place: str, default: str = "") -> Iterator[tuple[str, Callable[[], None]]]:
    outer = next((node for node in ast.walk(scope) if isinstance(node, ast.Dict)), None)
    rows = list(_rows(outer, "")) if outer and isinstance(scope, ast.Assign | ast.AnnAssign) else []
    targets = list(dict.fromkeys(ast.unparse(getattr(holder, field)[i]) for _, holder, field, i in rows))
    if len(rows) < 2 or len(targets) < 2:
        raise PlantingError(f"{place} is not a table: it has {len(rows)} rows and {len(targets)} targets")
    for name, holder, field, index in rows:
        held = getattr(holder, field)
        taken = [ast.unparse(e) for e in held] if field == "elts" else [ast.unparse(held[index])]
        at = targets.index(ast.unparse(held[index]))
        other = next((t for t in targets[at:] + targets[:at] if t not in taken), None)
        if other is not None:
            yield f"{name} -> {other}", functools.partial(held.__setitem__, index, ast.parse(other, mode="eval").body)
        if (len(held) > 1 or field == "values") and targets[at] != default:
            yield f"{name} removed", functools.partial(_remove_row, holder, index)


def _remove_row(holder: Any, index: int) -> None:
    for held in (getattr(holder, field, []) for field in ("keys", "values", "elts")):
        del held[index : index + 1]
