"""Every message that a user of a package can meet: errors, log lines, what commands say and their help; to be read once.

    python tools/messages.py                  # all packages, a line each: file:line: kind: words
    python tools/messages.py pp-agreement …   # of these packages
    python tools/messages.py --kind error

What is put in at run time stands in braces, as in the code. Docstrings of commands are their help. Nothing is judged: that is
the part of the reader.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("error", "log", "said", "help")
_LOG = frozenset({"debug", "info", "warning", "error", "exception", "critical", "log", "warn"})
_SAID = frozenset({"_say", "say", "_fail", "echo", "print"})
#: Classes whose instances are what a client or an operator reads, though they are returned and not raised.
_TOLD = frozenset({"ErrorBody", "RequestError", "Leftover", "Fault", "Refusal"})


def words(node: ast.AST) -> str:
    """A string as it stands in the code, its placeholders in braces; "" for what is none."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(
            part.value if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"  # type: ignore[misc, attr-defined]
            for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mod):
        return words(node.left) + (words(node.right) if isinstance(node.op, ast.Add) else "")
    if isinstance(node, ast.IfExp):
        return " | ".join(filter(None, (words(node.body), words(node.orelse))))
    return ""


def _name(function: ast.expr) -> str:
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def _arguments(call: ast.Call) -> Iterator[ast.expr]:
    yield from call.args
    yield from (keyword.value for keyword in call.keywords)


def _kind(call: ast.Call) -> str:
    name = _name(call.func)
    if name in _LOG and isinstance(call.func, ast.Attribute):
        return "log"
    if name in _SAID:
        return "said"
    if name in ("option", "argument", "add_argument"):
        return "help"
    if name.endswith(("Error", "Timeout", "Refused", "Invalid", "Problem", "Exit")) or name in _TOLD:
        return "error"
    return ""


def messages(path: Path) -> Iterator[tuple[int, str, str]]:
    """(line, kind, words) of each message of a file."""
    tree = ast.parse(path.read_text("utf-8"))
    raised = {id(node.exc) for node in ast.walk(tree) if isinstance(node, ast.Raise)}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any(_is_command(decorator) for decorator in node.decorator_list):
            yield node.lineno, "help", ast.get_docstring(node) or ""
        if not isinstance(node, ast.Call):
            continue
        kind = "error" if id(node) in raised else _kind(node)
        if not kind:
            continue
        wanted = [k.value for k in node.keywords if k.arg == "help"] if kind == "help" else list(_arguments(node))
        said = [text for argument in wanted if " " in (text := words(argument))]
        if said:
            yield node.lineno, kind, " … ".join(said)


def _is_command(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Call) and _name(decorator.func) in ("command", "group")


def main() -> int:
    """Exit 0; 1 when a package that is named is not there or nothing was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", metavar="PACKAGE")
    parser.add_argument("--kind", choices=KINDS, action="append", help="only these (repeatable)")
    options = parser.parse_args()
    known = sorted(path.name for path in (ROOT / "packages").iterdir() if (path / "src").is_dir())
    for name in options.packages:
        if name not in known:
            parser.error(f"no package {name!r}; there are {', '.join(known)}")
    count = 0
    for name in options.packages or known:
        for path in sorted((ROOT / "packages" / name / "src").rglob("*.py")):
            for line, kind, text in sorted(messages(path)):
                if not options.kind or kind in options.kind:
                    count += 1
                    print(
                        f"{path.relative_to(ROOT / 'packages' / name / 'src')}:{line}: {kind}: {' '.join(text.split())}"
                    )
    print(f"{count} messages", file=sys.stderr)
    return 0 if count else 1


if __name__ == "__main__":
    sys.exit(main())
