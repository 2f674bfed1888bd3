"""Compare the evidence of all ranks of one lifetime: what differs, and what every rank should have shown and did not."""

from __future__ import annotations

import json
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


@dataclass(frozen=True, slots=True)
class Difference:
    """One finding: ``rank`` is None where it concerns the group."""

    rank: int | None
    field: str
    detail: str

    def __str__(self) -> str:
        where = "group" if self.rank is None else f"rank {self.rank}"
        return f"{where}: {self.field}: {self.detail}"


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
        rank = record.get("rank")
        if record.get("format") != "pp-agreement evidence" or type(rank) is not int:
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
        values = {rank: json.dumps(record.get(field), sort_keys=True) for rank, record in by_rank.items()}
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
        if isinstance(domain, Mapping):
            members.update(r for r in domain.get("ranks", ()) if type(r) is int)
    found.extend(Difference(rank, "evidence", "missing") for rank in sorted(members - set(by_rank)))
    found.extend(Difference(rank, "domain", "is no member") for rank in sorted(set(by_rank) - members))
    return found


def _judge(rank: int, record: Mapping[str, Any]) -> list[Difference]:
    found: list[Difference] = []
    admitted, committed, closed = (record.get(name) for name in ("admitted", "committed", "closed"))
    if not all(type(v) is int for v in (admitted, committed, closed)):
        found.append(Difference(rank, "counts", "missing"))
    elif committed + closed != admitted:  # type: ignore[operator]
        found.append(Difference(rank, "decided", f"{committed} committed + {closed} closed of {admitted} admitted"))
    if record.get("drained") is not True:
        missing = record.get("missing_ranks")
        found.append(
            Difference(rank, "drained", f"not proven; undecided {record.get('undecided')}, missing ranks {missing}")
        )
    fault = record.get("fault")
    if isinstance(fault, Mapping):
        found.append(
            Difference(rank, "fault", f"{fault.get('code')} at rank {fault.get('rank')}: {fault.get('detail')}")
        )
    for verdict in record.get("verdicts") or ():
        if isinstance(verdict, Mapping):
            told = f"{verdict.get('kind')} of rank {verdict.get('suspect_rank')} by rank {verdict.get('observer_rank')}"
            found.append(Difference(rank, "verdict", told))
    return found


def read_evidence(path: Path) -> list[Mapping[str, Any]]:
    """Records of a file: one JSON object, an array of them, or one per line.

    Raises:
        ValueError: The file holds something else; the message names it.
    """
    text = path.read_text(encoding="utf-8")
    try:
        loaded = json.loads(text)
    except ValueError:
        try:
            loaded = [json.loads(line) for line in text.splitlines() if line.strip()]
        except ValueError as error:
            raise ValueError(f"{path}: neither JSON nor JSON lines: {error}") from error
    records = loaded if isinstance(loaded, list) else [loaded]
    if not all(isinstance(r, dict) for r in records):
        raise ValueError(f"{path}: not every record is an object")
    return records
