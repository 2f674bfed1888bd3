r"""The stage table: hardware kinds, and one family per entry whose shards are the stages.

    hardware:
      cpu: {}
      a10: {gpu: '\bA10\b', needs: [torch, triton]}
    families:
      - {name: A10-PyTorch, hardware: a10, list: l0_a10.yml, shards: 3}

A kind says what the name of a GPU must match (none: no GPU is needed) and which Python modules its tests import; a top-level
``needs`` holds for every kind. A stage's name is ``<family>-<shard>``, shards counted from 1. Names keep the grammar of the
lists' origin, because people type them.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass
from pathlib import Path

from . import _yaml
from .errors import ListError, StageError, nearest
from .words import WORDS, meaning

_NAME = re.compile(r"[-+\w\[\]]+")
_COUNTS = re.compile(r"-(\d+)_(GPUs|Nodes|Ranks)(?=-|$)")
_FAMILY_KEYS = ("name", "hardware", "list", "shards", "gpus", "nodes", "ranks", "on_demand")


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        family: Name without the shard.
        hardware: Kind, as people type it.
        gpus: GPUs per node (count).
        nodes: Nodes (count).
        ranks: MPI ranks that its tests start on one machine (count; 1: none).
        shard: This shard, 1-based; ``shards``: of how many.
        on_demand: Runs only when it is named.
        gpu_pattern: What the name of each of its GPUs must match (regular expression); None: it needs no GPU.
        needs: Python modules that its tests import.
    """

    family: str
    hardware: str
    list_file: str
    shard: int
    shards: int
    gpus: int = 0
    nodes: int = 1
    ranks: int = 1
    on_demand: bool = False
    gpu_pattern: str | None = None
    needs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """As people type it."""
        return f"{self.family}-{self.shard}"

    @property
    def gpu_type(self) -> str:
        """The first word of the name: A10, DGX_H100, CPU."""
        return self.family.split("-")[0]

    @property
    def multi_gpu(self) -> bool:
        """Whether it takes more than one GPU, on one node or several."""
        return self.gpus * self.nodes > 1

    @property
    def post_merge(self) -> bool:
        """Whether it runs after a merge only."""
        return "Post-Merge" in self.family

    @property
    def backend(self) -> str | None:
        """The backend that the name says, or None: any."""
        return meaning(self.family, WORDS.backends)


def read_table(path: Path) -> tuple[Stage, ...]:
    """All stages, in the table's order."""
    top = _yaml.mapping(path, _yaml.load(path), "stage table", ("version", "needs", "hardware", "families"))
    kinds = _kinds(path, top)
    families = top.get("families")
    if families is None or not isinstance(families.value, list) or not families.value:
        raise ListError(path, 1, "want a list of families")
    stages: list[Stage] = []
    for item in families.value:
        entry = _yaml.mapping(path, item, "family", _FAMILY_KEYS)
        for key in ("name", "hardware", "list"):
            if key not in entry:
                raise ListError(path, item.line, f"family: {key} is missing")
        name, hardware = str(entry["name"].value), str(entry["hardware"].value)
        if not _NAME.fullmatch(name):
            raise ListError(path, entry["name"].line, f"name {name!r}: letters, digits, - + _ [ ] only")
        if hardware not in kinds:
            raise ListError(path, entry["hardware"].line, f"hardware {hardware!r}{nearest(hardware, kinds)}")
        if any(stage.family == name for stage in stages):
            raise ListError(path, entry["name"].line, f"family {name!r} appears twice")
        gpu_pattern, needs = kinds[hardware]
        counts = _counts(path, name, gpu_pattern is not None, entry)
        on_demand = entry["on_demand"].value if "on_demand" in entry else False
        if not isinstance(on_demand, bool):
            raise ListError(path, entry["on_demand"].line, f"on_demand: want true or false, got {on_demand!r}")
        stages += [
            Stage(
                family=name, hardware=hardware, list_file=str(entry["list"].value), shard=shard, shards=counts["shards"],
                gpus=counts["gpus"], nodes=counts["nodes"], ranks=counts["ranks"], on_demand=on_demand,
                gpu_pattern=gpu_pattern, needs=needs,
            )
            for shard in range(1, counts["shards"] + 1)
        ]  # fmt: skip
    return tuple(stages)


def _kinds(path: Path, top: dict[str, _yaml.Item]) -> dict[str, tuple[str | None, tuple[str, ...]]]:
    """What the name of a GPU must match, and the modules, by hardware kind."""
    everywhere = _modules(path, top.get("needs"))
    hardware = top.get("hardware")
    if hardware is None or not isinstance(hardware.value, dict) or not hardware.value:
        raise ListError(path, 1, "want hardware: a mapping of hardware kinds")
    kinds = {}
    for kind, item in hardware.value.items():
        entry = _yaml.mapping(path, item, f"hardware kind {kind}", ("gpu", "needs"))
        pattern = entry["gpu"].value if "gpu" in entry else None
        try:
            re.compile(pattern or "")
        except (re.error, TypeError) as error:
            raise ListError(
                path, entry["gpu"].line, f"gpu: {pattern!r} is not a regular expression: {error}"
            ) from error
        kinds[kind] = (pattern, (*everywhere, *_modules(path, entry.get("needs"))))
    return kinds


def _modules(path: Path, item: _yaml.Item | None) -> tuple[str, ...]:
    names = item.plain() if item is not None else []
    if not isinstance(names, list) or not all(isinstance(name, str) and name.isidentifier() for name in names):
        raise ListError(path, item.line if item else 1, f"needs: want a list of Python modules, got {names!r}")
    return tuple(names)


def _counts(path: Path, name: str, has_gpu: bool, entry: dict[str, _yaml.Item]) -> dict[str, int]:
    """Shards, GPUs per node, nodes and ranks: as given, else as the name says; what both say must agree."""
    said = {what: int(number) for number, what in _COUNTS.findall(name)}
    nodes = said.get("Nodes", 1)
    gpus = said["GPUs"] // max(nodes, 1) if "GPUs" in said else int(has_gpu)
    counts = {}
    for key, default, least in (
        ("shards", 1, 1), ("gpus", gpus, 0), ("nodes", nodes, 1), ("ranks", said.get("Ranks", 1), 1),
    ):  # fmt: skip
        value = entry[key].value if key in entry else default
        line = entry[key if key in entry else "name"].line
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ListError(path, line, f"{key}: want a whole number of at least {least}, got {value!r}")
        counts[key] = value
    have = {"GPUs": counts["gpus"] * counts["nodes"], "Nodes": counts["nodes"], "Ranks": counts["ranks"]}
    for what, number in said.items():
        if have[what] != number:
            raise ListError(path, entry["name"].line, f"{name} says {number} {what}, its entry {have[what]}")
    return counts


def select_by_name(stages: tuple[Stage, ...], wanted: str) -> tuple[Stage, ...]:
    """Stages that a comma list names, in the table's order; ``*`` stands for any run of characters, nothing else does."""
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    if not names:
        raise StageError(f"stage list {wanted!r} names no stage")
    chosen: set[str] = set()
    problems = []
    for name in names:
        pattern = "*".join(re.sub(r"([\[?])", r"[\1]", part) for part in name.split("*"))
        found = {stage.name for stage in stages if fnmatch.fnmatchcase(stage.name, pattern)}
        if not found:
            problems.append(f"unknown stage {name!r}{nearest(name, [s.name for s in stages])}")
        chosen |= found
    if problems:
        raise StageError("; ".join(problems) + f"\nstages: {', '.join(s.name for s in stages)}")
    return tuple(stage for stage in stages if stage.name in chosen)
