"""The field's test-list format.

    version: 0.0.1
    l0_a10:
    - condition:
        ranges: {system_gpu_count: {gte: 1, lte: 1}}
        wildcards: {gpu: ['*a10*']}
        terms: {stage: pre_merge}
      tests:
      - unittest/some/dir
      - path/test_x.py::test_y[id] -k "expr" TIMEOUT (90) # comment
      - path/test_z.py ISOLATION,TIMEOUT (30)

A file has one context key, equal to its own stem. A test line is a target, at most one ``-k`` and one ``-m``, and markers.
Existing lists of this format read as they are; what the format does not know is an error with file and line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import _yaml
from .errors import ListError, nearest

MARKERS = ("XFAIL", "SKIP", "UNSTABLE", "TIMEOUT", "ISOLATION")
#: Minutes without a TIMEOUT marker.
TIMEOUT_DEFAULT_MIN = 60
_CONDITION_KEYS = ("terms", "ranges", "wildcards")
_WORD = re.compile(r"-[km](?=\s|$)|[A-Za-z]\w*(?=[\s(,#]|$)")
_EXPRESSION = re.compile(r"""\"(?:[^\"\\]|\\.)*\"|'[^']*'|[^\s\"'#]+""")


@dataclass(frozen=True)
class TestLine:
    """One line of a list.

    Attributes:
        target: File, folder or node id, as pytest takes it.
        keyword: ``-k`` expression; ``mark``: ``-m`` expression.
        timeout_min: Minutes that the line may take.
        isolated: Run alone in a process of its own.
        hardware_prefix: ``full:<this>/`` stood before the target: only on that hardware.
        markers: Reason by XFAIL, SKIP or UNSTABLE ("" without one).
        timeout_given: The line says its minutes itself; each of its tests may take them, too.
    """

    target: str
    keyword: str | None = None
    mark: str | None = None
    timeout_min: int = TIMEOUT_DEFAULT_MIN
    isolated: bool = False
    hardware_prefix: str | None = None
    markers: dict[str, str] = field(default_factory=dict, hash=False)
    line: int = 0
    timeout_given: bool = False

    __test__ = False

    @property
    def identity(self) -> str:
        """What tells it from other lines: prefix, target and expressions, not its markers."""
        parts = [self.target if self.hardware_prefix is None else f"full:{self.hardware_prefix}/{self.target}"]
        if self.keyword is not None:
            parts.append(f'-k "{self.keyword}"')
        if self.mark is not None:
            parts.append(f'-m "{self.mark}"')
        return " ".join(parts)

    @property
    def alone(self) -> bool:
        """Its expression asks for a marker whose tests want the machine for themselves: none of it runs in parallel."""
        marks = set(re.split(r"\s+and\s+", self.mark or ""))
        return bool(marks & {"mpi", "service"}) and not re.search(r"[()]|\bor\b", self.mark or "")

    @property
    def selects(self) -> tuple[str, str | None, str | None]:
        """What it selects, on whatever hardware: two lines with the same run the same tests."""
        return self.target, self.keyword, self.mark

    @property
    def needs_gpu(self) -> bool:
        """Whether its ``-m`` expression is ``gpu``, or ``gpu and …``: it selects nothing but tests marked for a GPU."""
        text = re.sub(r"(?<=\w)\([^()]*\)", "", self.mark or "")
        return all(part.split()[:1] == ["gpu"] for part in re.sub(r"\([^()]*\)", "", text).split(" or "))

    @property
    def bare(self) -> bool:
        """Whether it has no expression."""
        return self.keyword is None and self.mark is None

    @property
    def path(self) -> str:
        """The file or folder of the target."""
        return self.target.split("::", 1)[0]


def covers(target: str, other: str) -> bool:
    """Whether ``other`` (a target or node id) is at or below ``target``: the same, in the folder or file, a parameter of it."""
    return other == target or other.startswith((target.rstrip("/") + "/", target + "::", target + "["))


@dataclass(frozen=True)
class Condition:
    """When a block counts. Each of the three maps is a conjunction, and so are the three together."""

    terms: dict[str, str] = field(default_factory=dict)
    ranges: dict[str, tuple[int | None, int | None]] = field(default_factory=dict)
    wildcards: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Block:
    """A condition and its lines."""

    condition: Condition
    tests: tuple[TestLine, ...]
    line: int


@dataclass(frozen=True)
class TestList:
    """A list file."""

    name: str
    path: Path
    blocks: tuple[Block, ...]

    __test__ = False


def text_of(value: Any) -> str:
    """A scalar as conditions compare it: YAML's quotes make no difference, true is ``true``."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def read_list(path: Path) -> TestList:
    """Read a list file."""
    top = _yaml.load(path)
    if not isinstance(top.value, dict):
        raise ListError(path, top.line, "want a mapping of version and one context")
    contexts = [key for key in top.value if key != "version"]
    if "version" not in top.value:
        raise ListError(path, top.line, f"version is missing{nearest('version', contexts)}")
    if text_of(top.value["version"].value) != "0.0.1":
        raise ListError(path, top.value["version"].line, f"version {top.value['version'].value!r}: only 0.0.1 is known")
    if contexts != [path.stem]:
        raise ListError(path, top.line, f"want exactly one context named {path.stem!r} as the file is, got {contexts}")
    blocks = top.value[path.stem]
    if not isinstance(blocks.value, list):
        raise ListError(path, blocks.line, f"{path.stem}: want a list of blocks")
    return TestList(path.stem, path, tuple(_block(path, item) for item in blocks.value))


def _block(path: Path, item: _yaml.Item) -> Block:
    entry = _yaml.mapping(path, item, "block", ("condition", "tests"))
    if "tests" not in entry:
        raise ListError(path, item.line, f"block: tests is missing{nearest('tests', entry)}")
    tests = entry["tests"]
    if not isinstance(tests.value, list):
        raise ListError(path, tests.line, f"tests: want a list, got {type(tests.value).__name__}")
    lines = []
    for test in tests.value:
        if not isinstance(test.value, str):
            raise ListError(path, test.line, f"test line: want text, got {test.value!r}")
        lines.append(parse_line(test.value, path, test.line))
    condition = _condition(path, entry["condition"]) if "condition" in entry else Condition()
    return Block(condition, tuple(lines), item.line)


def _condition(path: Path, item: _yaml.Item) -> Condition:
    if item.value is None:
        return Condition()
    entry = _yaml.mapping(path, item, "condition", _CONDITION_KEYS)
    terms, ranges, wildcards = {}, {}, {}
    for key, value in _entries(path, entry.get("terms"), "terms"):
        if isinstance(value.value, (dict, list)):
            raise ListError(path, value.line, f"terms.{key}: want one value, got {value.plain()!r}")
        terms[key] = text_of(value.value)
    for key, value in _entries(path, entry.get("ranges"), "ranges"):
        bounds = _yaml.mapping(path, value, f"ranges.{key}", ("gte", "lte"))
        if not bounds:
            raise ListError(path, value.line, f"ranges.{key}: want gte, lte or both")
        for bound in bounds.values():
            if not isinstance(bound.value, int) or isinstance(bound.value, bool):
                raise ListError(path, bound.line, f"ranges.{key}: want whole numbers, got {bound.value!r}")
        low, high = (bounds[k].value if k in bounds else None for k in ("gte", "lte"))
        if low is not None and high is not None and low > high:
            raise ListError(path, value.line, f"ranges.{key}: gte {low} is above lte {high}: nothing can match")
        ranges[key] = (low, high)
    for key, value in _entries(path, entry.get("wildcards"), "wildcards"):
        patterns = value.plain() if isinstance(value.value, list) else [value.value]
        if not patterns or not all(isinstance(p, str) for p in patterns):
            raise ListError(
                path, value.line, f"wildcards.{key}: want a pattern or a list of patterns, got {value.plain()!r}"
            )
        wildcards[key] = tuple(patterns)
    return Condition(terms, ranges, wildcards)


def _entries(path: Path, item: _yaml.Item | None, what: str) -> list[tuple[str, _yaml.Item]]:
    if item is None or item.value is None:
        return []
    if not isinstance(item.value, dict):
        raise ListError(path, item.line, f"{what}: want a mapping, got {type(item.value).__name__}")
    return list(item.value.items())


def parse_line(text: str, path: Path | str = "line", number: int = 1) -> TestLine:
    """Parse one test line.

    Quoted expressions and what stands in a marker's parentheses are opaque: a marker's name, a quote or a # in there is text.
    """
    target, rest = _target(text, path, number)
    prefix = None
    if target.startswith("full:"):
        prefix, _, target = target.removeprefix("full:").partition("/")
        if not prefix or not target:
            raise ListError(path, number, f"want full:<hardware>/<test>, got {text!r}")
    expressions: dict[str, str] = {}
    markers: dict[str, str | None] = {}
    while (rest := rest.lstrip(" \t,")) and not rest.startswith("#"):
        match = _WORD.match(rest)
        if match is None:
            raise ListError(path, number, f"{rest.split()[0]!r} is not a marker in {text!r}")
        word, rest = match[0], rest[match.end() :]
        if word in ("-k", "-m"):
            if word in expressions:
                raise ListError(path, number, f"two {word} in {text!r}")
            expressions[word], rest = _expression(word, rest, text, path, number)
        elif word not in MARKERS:
            raise ListError(path, number, f"{word!r} is not a marker{nearest(word.upper(), MARKERS)} in {text!r}")
        elif word in markers:
            raise ListError(path, number, f"{word} appears twice in {text!r}")
        else:
            markers[word], rest = _argument(word, rest, text, path, number)
            if word == "ISOLATION" and markers[word] is not None:
                raise ListError(path, number, f"ISOLATION takes nothing in parentheses, got {text!r}")
            if word == "TIMEOUT" and not re.fullmatch("0*[1-9][0-9]{0,3}", markers[word] or ""):
                raise ListError(path, number, f"TIMEOUT wants minutes in parentheses, 1 to 9999, got {text!r}")
    timeout = markers.get("TIMEOUT")
    reasons = {name: reason or "" for name, reason in markers.items() if name not in ("ISOLATION", "TIMEOUT")}
    return TestLine(
        target, expressions.get("-k"), expressions.get("-m"), int(timeout or TIMEOUT_DEFAULT_MIN), "ISOLATION" in markers,
        prefix, reasons, number, timeout_given="TIMEOUT" in markers,
    )  # fmt: skip


def _target(text: str, path: Path | str, number: int) -> tuple[str, str]:
    """The target and what follows it. Blanks, quotes and # inside an id's brackets belong to the id."""
    stripped = text.strip()
    depth, end = 0, len(stripped)
    for position, character in enumerate(stripped):
        if depth == 0 and (character.isspace() or character == "#"):
            end = position
            break
        depth = max(depth + (character == "[") - (character == "]"), 0)
    target = stripped[:end]
    if not target or re.split(r"[(,]", target)[0] in MARKERS or target.startswith("-"):
        raise ListError(path, number, f"no test in {text!r}")
    if depth:
        raise ListError(path, number, f"the id's [ is not closed in {text!r}: was it cut short?")
    return target, stripped[end:]


def _expression(option: str, rest: str, text: str, path: Path | str, number: int) -> tuple[str, str]:
    """The expression after ``-k`` or ``-m``, and what follows it."""
    rest = rest.lstrip()
    if not rest or rest.startswith("#"):
        raise ListError(path, number, f"{option} without an expression in {text!r}")
    match = _EXPRESSION.match(rest)
    if match is None:
        raise ListError(path, number, f"unbalanced quote in {text!r}")
    expression = match[0][1:-1] if match[0][0] in "\"'" else match[0]
    if not expression.strip():
        raise ListError(path, number, f"{option} without an expression in {text!r}")
    return expression, rest[match.end() :]


def _argument(marker: str, rest: str, text: str, path: Path | str, number: int) -> tuple[str | None, str]:
    """What stands in parentheses after a marker (None: nothing does), and what follows them."""
    opened = rest.lstrip()
    if not opened.startswith("("):
        return None, rest
    depth = 0
    for position, character in enumerate(opened):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return opened[1:position].strip(), opened[position + 1 :]
    raise ListError(path, number, f"the ( after {marker} is not closed in {text!r}")
