"""Shards that take about equally long, and stay the same whatever order the list has.

Longest first, each to the shard with the least time so far; ties go to the line that sorts first, to the shard with the
fewest lines, and to the lowest shard: so no shard is empty while another one holds two lines. Lines that need the GPU are
dealt first, to the shard with the fewest of them: so no shard of a GPU stage goes without one while another one holds two. A
line without a known duration is given the median of the known ones.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from .errors import StageError
from .lists import TestLine

#: Seconds of a line when nothing at all is known.
UNKNOWN_S = 10.0


def read_durations(path: Path) -> dict[str, float]:
    """Seconds by line identity."""
    if not path.exists():
        return {}
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise StageError(f"{path}: {error}") from error
    except json.JSONDecodeError as error:
        raise StageError(f"{path}:{error.lineno}: not JSON: {error.msg}") from error
    if not isinstance(data, dict) or not all(isinstance(v, (int, float)) and v >= 0 for v in data.values()):
        raise StageError(f"{path}: want an object of test line → seconds")
    return {str(k): float(v) for k, v in data.items()}


def shard(lines: Sequence[TestLine], shards: int, durations: Mapping[str, float]) -> tuple[tuple[TestLine, ...], ...]:
    """Split lines over shards; within a shard they keep the order given.

    Returns:
        ``shards`` tuples, disjoint, together all lines. With fewer lines than shards some are empty.
    """
    if shards < 1:
        raise StageError(f"shards: want at least 1, got {shards}")
    known = [durations[line.identity] for line in lines if line.identity in durations]
    default = statistics.median(known) if known else UNKNOWN_S
    seconds = {line.identity: durations.get(line.identity, default) for line in lines}
    totals, counts, on_gpu = [0.0] * shards, [0] * shards, [0] * shards
    home: dict[str, int] = {}
    gpu = {line.identity: int(line.needs_gpu) for line in lines}
    for identity in sorted(seconds, key=lambda i: (-gpu[i], -seconds[i], i)):
        index = min(range(shards), key=lambda i: (on_gpu[i] * gpu[identity], totals[i], counts[i], i))
        on_gpu[index] += gpu[identity]
        totals[index] += seconds[identity]
        counts[index] += 1
        home[identity] = index
    return tuple(tuple(line for line in lines if home[line.identity] == index) for index in range(shards))
