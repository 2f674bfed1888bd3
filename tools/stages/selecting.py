"""Which blocks of a list a stage's query matches.

Permissive in both directions, as the field's lists expect: a key that the condition has and the query lacks matches, and a
key that only the query has constrains nothing. Terms compare as strings. Ranges compare whole numbers; a query value that is
not one does not match. Wildcards are case-insensitive; a list of patterns matches if any of them does.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass

from .errors import nearest
from .hardware import Hardware
from .lists import Block, Condition, TestLine, TestList, text_of
from .table import Stage
from .words import WORDS, meaning

Query = dict[str, str]


def gpu_family(gpu_type: str) -> str:
    """The family in a stage's first word: H100 of DGX_H100; the word itself where none is known."""
    return next((word for word in gpu_type.split("_") if word in WORDS.gpus), gpu_type)


def prefix_holds(prefix: str | None, stage: Stage) -> bool:
    """Whether a line with ``full:<prefix>/`` runs in a stage: its first word, its GPU family, or that family's architecture."""
    if prefix is None:
        return True
    family = gpu_family(stage.gpu_type)
    return prefix.lower() in {stage.gpu_type.lower(), family.lower(), WORDS.gpus.get(family, family).lower()}


def query_of_stage(stage: Stage, hardware: Hardware | None = None) -> Query:
    """What a stage asks: derived from its name and counts, and from the hardware where that is known."""
    query: Query = {
        "stage": "post_merge" if stage.post_merge else "pre_merge",
        "system_gpu_count": str(stage.gpus * stage.nodes),
        "auto_trigger": meaning(stage.family, WORDS.models) or "others",
        "orchestrator": meaning(stage.family, WORDS.orchestrators) or "mpi",
    }
    if stage.backend is not None:
        query["backend"] = stage.backend
    if stage.gpus:
        query["gpu"] = stage.gpu_type.lower()
    if hardware is not None:
        query["cpu"] = hardware.cpu
        if stage.gpus and hardware.compute_capability:
            query["compute_capability"] = hardware.compute_capability
    return query


def mismatch(condition: Condition, query: Query) -> str | None:
    """Why a condition does not match, or None when it does."""
    for key, wanted in condition.terms.items():
        if key in query and text_of(query[key]) != wanted:
            return f"terms.{key}: wants {wanted}, is {query[key]}"
    for key, (low, high) in condition.ranges.items():
        if key not in query:
            continue
        try:
            value = int(query[key])
        except ValueError:
            return f"ranges.{key}: {query[key]!r} is not a whole number"
        if (low is not None and value < low) or (high is not None and value > high):
            return f"ranges.{key}: wants {'' if low is None else low}..{'' if high is None else high}, is {value}"
    for key, patterns in condition.wildcards.items():
        if key in query and not any(fnmatch.fnmatchcase(query[key].lower(), p.lower()) for p in patterns):
            return f"wildcards.{key}: wants {' or '.join(patterns)}, is {query[key]}"
    return None


def unknown_keys(condition: Condition) -> list[str]:
    """Keys that no query has, with the nearest one that some have."""
    return [
        f"{what}.{key}: no stage has such a key, so it constrains nothing{nearest(key, WORDS.keys)}"
        for what in ("terms", "ranges", "wildcards")
        for key in getattr(condition, what)
        if key not in WORDS.keys and not key.startswith("host_mem_")
    ]


@dataclass(frozen=True)
class Selection:
    """Lines that a stage runs, in the list's order, each once; and the blocks that did not match, with the reason."""

    lines: tuple[TestLine, ...]
    passed_over: tuple[tuple[Block, str], ...]
    warnings: tuple[str, ...]


def select(test_list: TestList, query: Query, stage: Stage | None = None) -> Selection:
    """The lines whose blocks match, without those that a prefix keeps to other hardware than the stage's."""
    lines: dict[tuple[str, str | None, str | None], TestLine] = {}
    passed_over: list[tuple[Block, str]] = []
    warnings: list[str] = []
    for block in test_list.blocks:
        reason = mismatch(block.condition, query)
        if reason is not None:
            passed_over.append((block, reason))
            continue
        doubts = collisions(block.condition) + unknown_keys(block.condition)
        warnings += [f"{test_list.path.name}:{block.line}: {text}" for text in doubts]
        for line in block.tests:
            if stage is not None and not prefix_holds(line.hardware_prefix, stage):
                continue
            first = lines.setdefault(line.selects, line)
            if first is not line:
                warnings.append(
                    f"{test_list.path.name}:{line.line}: {line.identity} is also in line {first.line}; the first one counts"
                )
    return Selection(tuple(lines.values()), tuple(passed_over), tuple(dict.fromkeys(warnings)))


def collisions(condition: Condition) -> list[str]:
    """Wildcards on gpu that match other GPU families than the one they spell (``*a10*`` matches A100)."""
    found = []
    for pattern in condition.wildcards.get("gpu", ()):
        spelt = re.sub(r"[^a-z0-9]", "", pattern.lower())
        hits = [name for name in WORDS.gpus if fnmatch.fnmatchcase(name.lower(), pattern.lower())]
        others = [name for name in hits if name.lower() != spelt]
        if others and spelt in {name.lower() for name in hits}:
            found.append(f"wildcard {pattern!r} also matches {', '.join(others)}")
    return found
