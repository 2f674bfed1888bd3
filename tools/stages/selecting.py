"""Which blocks of a list a stage's query matches.

Permissive in both directions, as the field's lists expect: a key that the condition has and the query lacks matches, and a
key that only the query has constrains nothing. Terms compare as strings. Ranges compare whole numbers; a query value that is
none does not match. Wildcards are case-insensitive; a list of patterns matches if any of them does.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass

from .hardware import Hardware
from .lists import Block, Condition, TestLine, TestList, text_of
from .table import Stage

Query = dict[str, str]

#: Names of GPU families as the field writes them; a wildcard that matches several of them is suspicious.
GPU_FAMILIES = (
    "A10", "A30", "A100", "A100X", "L40S", "H20", "H100", "H200", "GH200", "B200", "GB200", "B300", "GB300", "RTXPro6000D",
)  # fmt: skip


def query_of_stage(stage: Stage, hardware: Hardware | None = None) -> Query:
    """What a stage asks: derived from its name and counts, and from the hardware where that is known."""
    query: Query = {
        "stage": "post_merge" if stage.post_merge else "pre_merge",
        "system_gpu_count": str(stage.gpus * stage.nodes),
        "auto_trigger": next((w.lower() for w in ("DeepSeek", "GptOss") if f"-{w}-" in f"{stage.family}-"), "others"),
        "orchestrator": "ray" if "-Ray-" in f"{stage.family}-" else "mpi",
    }
    if stage.backend is not None:
        query["backend"] = stage.backend
    if stage.gpus:
        query["gpu"] = stage.gpu_type.lower()
    if hardware is not None:
        query["cpu"] = hardware.cpu
        if hardware.linux_distribution:
            query["linux_distribution_name"] = hardware.linux_distribution
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
            return f"ranges.{key}: {query[key]!r} is no whole number"
        if (low is not None and value < low) or (high is not None and value > high):
            return f"ranges.{key}: wants {'' if low is None else low}..{'' if high is None else high}, is {value}"
    for key, patterns in condition.wildcards.items():
        if key in query and not any(fnmatch.fnmatchcase(query[key].lower(), p.lower()) for p in patterns):
            return f"wildcards.{key}: wants {' or '.join(patterns)}, is {query[key]}"
    return None


@dataclass(frozen=True)
class Selection:
    """Lines that a stage runs, in the list's order, each once; and the blocks that did not match, with the reason."""

    lines: tuple[TestLine, ...]
    passed_over: tuple[tuple[Block, str], ...]
    warnings: tuple[str, ...]


def select(test_list: TestList, query: Query) -> Selection:
    """The lines whose blocks match."""
    lines: dict[str, TestLine] = {}
    passed_over: list[tuple[Block, str]] = []
    warnings: list[str] = []
    for block in test_list.blocks:
        reason = mismatch(block.condition, query)
        if reason is not None:
            passed_over.append((block, reason))
            continue
        warnings += [f"{test_list.path.name}:{block.line}: {text}" for text in collisions(block.condition)]
        for line in block.tests:
            if line.identity in lines:
                warnings.append(
                    f"{test_list.path.name}:{line.line}: {line.identity} stands in line {lines[line.identity].line}, too; "
                    "the first one counts"
                )
            else:
                lines[line.identity] = line
    return Selection(tuple(lines.values()), tuple(passed_over), tuple(dict.fromkeys(warnings)))


def collisions(condition: Condition) -> list[str]:
    """Wildcards on gpu that match other GPU families than the one they spell (``*a10*`` matches A100)."""
    found = []
    for pattern in condition.wildcards.get("gpu", ()):
        spelt = re.sub(r"[^a-z0-9]", "", pattern.lower())
        hits = [name for name in GPU_FAMILIES if fnmatch.fnmatchcase(name.lower(), pattern.lower())]
        others = [name for name in hits if name.lower() != spelt]
        if others and spelt in {name.lower() for name in hits}:
            found.append(f"wildcard {pattern!r} also matches {', '.join(others)}")
    return found
