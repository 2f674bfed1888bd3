"""Compare the evidence of all ranks of one lifetime: what differs, and what every rank should have shown and did not."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pp_agreement._evidence import EVIDENCE_VERSION

EQUAL_FIELDS = (
    "version", "package_version", "mode", "domain", "config", "admitted", "committed", "closed", "outcomes",
    "quarantined", "activated", "digest", "activation_digest", "last_incarnation",
)  # fmt: skip
MODES = ("async", "allgather")
FILE_BYTES_MAX = 64 << 20
COUNTS = ("admitted", "committed", "closed", "open_rounds", "quarantined", "activated", "last_incarnation")
_DIGEST = re.compile("[0-9a-f]{32}").fullmatch
_SHAPES: tuple[tuple[str, type | tuple[type, ...]], ...] = (
    ("package_version", str), ("domain", Mapping), ("config", Mapping), ("outcomes", Mapping), ("events", Mapping),
    ("digest", str), ("activation_digest", str), ("undecided", list), ("missing_ranks", list), ("verdicts", list),
)  # fmt: skip
"""Fields that ``_judge`` relies on: a record without them proves nothing, however equal the ranks are in lacking them."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One finding: ``rank`` is None where it concerns the group."""

    rank: int | None
    field: str
    detail: str

    def __str__(self) -> str:
        where = "group" if self.rank is None else f"rank {self.rank}"
        told = f"{where}: {self.field}: {self.detail}"  # of foreign files: nothing in it may drive a terminal
        return "".join([c if c.isprintable() else ascii(c)[1:-1] for c in told])


def verify(evidence: Iterable[Mapping[str, Any]]) -> tuple[Difference, ...]:
    """Compare ranks.

    Args:
        evidence: ``Agreement.evidence()`` of every member of one domain's lifetime, in any order.

    Returns:
        All findings; empty when every member's evidence is there, equal where it must be, decided N of N, drained and
        without fault. Verdicts are reported per observer.
    """
    records = list(evidence)
    found: list[Difference] = []
    if not records:
        return (Difference(None, "evidence", "there is none"),)
    by_rank: dict[int, Mapping[str, Any]] = {}
    for position, record in enumerate(records):
        rank = record.get("rank") if isinstance(record, Mapping) else None
        if not isinstance(record, Mapping) or record.get("format") != "pp-agreement evidence" or type(rank) is not int:
            found.append(Difference(None, "format", f"record {position + 1} is no evidence of this package"))
        elif record.get("version") != EVIDENCE_VERSION:
            found.append(Difference(rank, "version", f"{record.get('version')!r}; this reads {EVIDENCE_VERSION}"))
        elif rank in by_rank:
            found.append(Difference(rank, "rank", "there are two records: lifetimes are mixed"))
        else:
            by_rank[rank] = record
    if not by_rank:
        return tuple(found)
    found.extend(_compare(by_rank))
    for rank, record in sorted(by_rank.items()):
        found.extend(_judge(rank, record))
    return tuple(found)


def _compare(by_rank: Mapping[int, Mapping[str, Any]]) -> list[Difference]:
    found: list[Difference] = []
    for field in EQUAL_FIELDS:
        values = {rank: _canonical(record.get(field)) for rank, record in by_rank.items()}
        counts = Counter(values.values())
        if len(counts) == 1:
            continue
        usual = counts.most_common(1)[0][0]
        for rank, value in sorted(values.items()):
            if value != usual:
                found.append(Difference(rank, field, f"{value}, elsewhere {usual}"))
    members: set[int] = set()
    for record in by_rank.values():
        domain = record.get("domain")
        ranks = domain.get("ranks") if isinstance(domain, Mapping) else None
        if isinstance(ranks, (list, tuple)):
            members.update(r for r in ranks if type(r) is int)
    found.extend(Difference(rank, "evidence", "missing") for rank in sorted(members - set(by_rank)))
    found.extend(Difference(rank, "domain", "is not a member") for rank in sorted(set(by_rank) - members))
    return found


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=repr)


def _judge(rank: int, record: Mapping[str, Any]) -> list[Difference]:
    """What one record must show by itself, and must not contradict."""
    found = [
        Difference(rank, name, f"missing, or malformed: {str(record.get(name))[:60]}")
        for name, shape in _SHAPES
        if not isinstance(record.get(name), shape)
    ]
    for name in ("digest", "activation_digest"):
        value = record.get(name)
        if isinstance(value, str) and not _DIGEST(value):
            found.append(Difference(rank, name, f"no digest: {value[:60]!r}"))
    if record.get("mode") not in MODES:
        found.append(Difference(rank, "mode", f"{str(record.get('mode'))[:60]!r} is none of {MODES}"))
    counts = {name: record.get(name) for name in COUNTS if name != "last_incarnation" or record.get("drained") is True}
    wrong = [name for name, value in counts.items() if type(value) is not int or value < 0]
    if wrong:
        found.append(Difference(rank, "counts", f"missing, or no counts: {', '.join(wrong)}"))
    if not found:
        found.extend(_contradictions(rank, record))
    if record.get("drained") is not True:
        missing = record.get("missing_ranks")
        found.append(
            Difference(rank, "drained", f"not proven; undecided {record.get('undecided')}, missing ranks {missing}")
        )
    fault = record.get("fault", "missing")
    if isinstance(fault, Mapping):
        found.append(
            Difference(rank, "fault", f"{fault.get('code')} at rank {fault.get('rank')}: {fault.get('detail')}")
        )
    elif fault is not None:
        found.append(Difference(rank, "fault", f"missing, or malformed: {str(fault)[:60]}"))
    verdicts = record.get("verdicts")
    for verdict in verdicts if isinstance(verdicts, list) else ():
        if isinstance(verdict, Mapping):
            told = f"{verdict.get('kind')} of rank {verdict.get('suspect_rank')} by rank {verdict.get('observer_rank')}"
        else:
            told = f"malformed among the verdicts: {str(verdict)[:60]}"
        found.append(Difference(rank, "verdict", told))
    return found


def _contradictions(rank: int, record: Mapping[str, Any]) -> list[Difference]:
    found: list[Difference] = []
    admitted, committed, closed = record["admitted"], record["committed"], record["closed"]
    if committed + closed != admitted:
        found.append(Difference(rank, "decided", f"{committed} committed + {closed} closed of {admitted} admitted"))
    if record.get("drained") is True:
        last = record["last_incarnation"]
        if last != admitted:
            found.append(Difference(rank, "last_incarnation", f"drained at {last}, but {admitted} admitted"))
        for name in ("undecided", "missing_ranks"):
            if record[name]:
                found.append(Difference(rank, name, f"drained, yet {str(record[name])[:60]}"))
        if record["open_rounds"]:
            found.append(Difference(rank, "open_rounds", f"drained, yet {record['open_rounds']} are open"))
    values = list(record["outcomes"].values())
    if not all(type(v) is int and v >= 0 for v in values) or sum(values) != committed:
        found.append(Difference(rank, "outcomes", f"{_canonical(record['outcomes'])[:80]} of {committed} committed"))
    told = record["events"].get("Committed", 0)
    if told != committed:
        found.append(Difference(rank, "events", f"{told} Committed of {committed} committed"))
    if record["quarantined"] > committed:
        found.append(Difference(rank, "quarantined", f"{record['quarantined']} of {committed} committed"))
    return found


def read_evidence(path: Path) -> list[Mapping[str, Any]]:
    """Records of a file: one JSON object, an array of them, or one per line.

    Raises:
        ValueError: The file holds something else; the message names it.
    """
    with path.open("rb") as file:
        data = file.read(FILE_BYTES_MAX + 1)
    if len(data) > FILE_BYTES_MAX:
        raise ValueError(f"{path}: longer than {FILE_BYTES_MAX} bytes")
    text = data.decode("utf-8")
    if not text.strip():
        raise ValueError(f"{path}: empty")
    try:
        loaded = _loads(text)
    except ValueError as first:
        try:
            loaded = [_loads(line) for line in text.splitlines() if line.strip()]
        except ValueError as error:
            raise ValueError(f"{path}: neither JSON nor JSON lines: {first}; {error}") from error
    records = loaded if isinstance(loaded, list) else [loaded]
    if not records or not all(isinstance(r, dict) for r in records):
        raise ValueError(f"{path}: no records, or not every one is an object")
    return records


def _loads(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_once)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object that says one thing twice says nothing."""
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        raise ValueError(f"{', '.join(twice)[:80]} stands twice in an object")
    return found
