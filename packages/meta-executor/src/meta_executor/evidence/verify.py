"""Judge a run from its files: every rank of every instance heard of, decided and gave back everything, and all say the same.

A killed rank leaves no file, or one that says it was not drained: that is recognised as such and is never "verified". Which
files there must be is in the run's own record (``RunRecord``): without it nothing says that an instance is missing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from meta_executor.evidence.records import DRAINED, LifetimeRecord, Record, RunRecord, read_folder, read_runs
from pp_agreement import verify as verify_agreement


@dataclass(frozen=True, slots=True)
class InstanceSummary:
    """What one lifetime of an instance shows, where its ranks agree."""

    owner_id: str
    instance_id: str
    role: str
    ranks: int
    admitted: int
    committed: int
    closed: int
    activations: int
    activation_digest: str
    digest: str


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """The judgement.

    Attributes:
        ok: Nothing was found.
        findings: Everything that is wrong, in words; empty when ok.
        instances: What each instance shows.
    """

    ok: bool
    findings: tuple[str, ...]
    instances: tuple[InstanceSummary, ...]

    @property
    def lines(self) -> tuple[str, ...]:
        """For a person: one line per instance, one per finding, the verdict last."""
        told = []
        for summary in self.instances:
            decided = (
                f"{summary.committed + summary.closed} of {summary.admitted} decided on each of {summary.ranks} ranks"
            )
            if summary.role == "context":
                told.append(
                    f"{summary.owner_id}: {summary.committed} of {summary.admitted} terminal commits, {decided}, "
                    f"{summary.activations} activations, digests {summary.digest[:16]} / {summary.activation_digest[:16]}"
                )
            else:
                told.append(f"{summary.owner_id}: {summary.committed} requests ended on {summary.ranks} ranks")
        told.extend(f"finding: {finding}" for finding in self.findings)
        told.append("verified" if self.ok else f"NOT verified: {len(self.findings)} findings")
        return tuple(told)

    def text(self) -> str:
        """The lines as one text."""
        return "\n".join(self.lines)


def verify_folder(folder: Path) -> VerifyResult:
    """Judge the files of a folder."""
    records, broken = read_folder(folder)
    runs, broken_runs = read_runs(folder)
    result = verify_records(records)
    findings = (*broken, *broken_runs, *_judge_runs(runs, records), *result.findings)
    return VerifyResult(not findings, findings, result.instances)


def _judge_runs(runs: list[RunRecord], records: list[Record]) -> list[str]:
    """Whether the files are those of the runs' lifetimes, and each of these was drained."""
    if not runs:
        return ["there is no record of the run: which instances it had is not known"]
    findings = []
    known: dict[tuple[str, str], LifetimeRecord] = {}
    for lifetime in (lifetime for run in runs for lifetime in run.lifetimes):
        known[lifetime.owner_id, lifetime.instance_id] = lifetime
        if lifetime.ended != DRAINED:
            findings.append(f"{lifetime.owner_id}: a lifetime of it was not drained: {lifetime.ended}")
        elif not any((r.owner_id, r.instance_id) == (lifetime.owner_id, lifetime.instance_id) for r in records):
            findings.append(f"{lifetime.owner_id}: no evidence of any rank, though it was drained")
    for record in records:
        lifetime_of = known.get((record.owner_id, record.instance_id))
        if lifetime_of is None:
            findings.append(f"{record.name}: of a lifetime that is in no record of a run here")
        elif (lifetime_of.world_size, lifetime_of.role) != (record.world_size, record.role):
            findings.append(
                f"{record.name}: one of {record.world_size} {record.role} ranks; "
                f"the run's record says {lifetime_of.world_size} {lifetime_of.role} ranks"
            )
    return findings


def verify_records(records: Iterable[Record]) -> VerifyResult:
    """Judge records: at least one instance, and per lifetime everything that :func:`_judge` asks."""
    lifetimes: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        lifetimes.setdefault((record.owner_id, record.instance_id), []).append(record)
    findings: list[str] = []
    summaries = []
    if not lifetimes:
        findings.append("there is no evidence: the run was killed, or never started")
    for members in lifetimes.values():
        findings.extend(_judge(members))
        first = members[0]
        agreement = first.agreement or {}
        context = first.role == "context"
        ended = sum(r.requests.completed + r.requests.failed + r.requests.cancelled for r in members)
        summaries.append(
            InstanceSummary(
                owner_id=first.owner_id,
                instance_id=first.instance_id,
                role=first.role,
                ranks=len(members),
                admitted=int(agreement.get("admitted", 0)) if context else ended,
                committed=int(agreement.get("committed", 0)) if context else ended,
                closed=int(agreement.get("closed", 0)) if context else 0,
                activations=first.ready.activations,
                activation_digest=str(agreement.get("activation_digest", "")),
                digest=str(agreement.get("digest", "")),
            )
        )
    return VerifyResult(not findings, tuple(findings), tuple(summaries))


def _judge(members: list[Record]) -> list[str]:
    first = members[0]
    findings: list[str] = []
    ranks = [record.rank for record in members]
    missing = sorted(set(range(first.world_size)) - set(ranks))
    if missing:
        findings.append(
            f"{first.owner_id}: no evidence of ranks {missing}: killed, or they left before they could write"
        )
    if len(set(ranks)) != len(ranks):
        findings.append(f"{first.owner_id}: two records of one rank: lifetimes are mixed")
    for record in members:
        findings.extend(_judge_rank(record))
        if record.generation != first.generation:
            findings.append(f"{record.name}: generation {record.generation}, rank {first.rank} says {first.generation}")
        if record.modes != first.modes:
            different = sorted(k for k in {*record.modes, *first.modes} if record.modes.get(k) != first.modes.get(k))
            findings.append(f"{record.name}: modes differ from rank {first.rank}'s: {', '.join(different)}")
    if first.role == "context":
        findings.extend(_judge_context(members))
    return findings


def _judge_rank(record: Record) -> list[str]:
    findings = []
    if record.fault:
        findings.append(f"{record.name}: fault: {record.fault}")
    if not record.drained:
        findings.append(f"{record.name}: not drained: a kill or a deadline ended it, not a proof")
    requests = record.requests
    ended = requests.completed + requests.failed + requests.cancelled
    if requests.live or ended != requests.taken:
        findings.append(f"{record.name}: {ended} of {requests.taken} requests ended, {requests.live} are live")
    if record.kv.blocks_used > 0 and not record.kv.quarantined_bytes:
        findings.append(f"{record.name}: {record.kv.blocks_used} blocks were not given back")
    if record.kv.quarantined_bytes:
        findings.append(f"{record.name}: {record.kv.quarantined_bytes} bytes are in quarantine")
    for told in record.stories:
        findings.append(f"{record.name}: request {told.get('request_id')} in state {told.get('state')}")
    return findings


def _judge_context(members: list[Record]) -> list[str]:
    first = members[0]
    agreements = [record.agreement for record in members if record.agreement is not None]
    findings = [f"{first.owner_id}: agreement: {difference}" for difference in verify_agreement(agreements)]
    for record in members:
        admitted = (record.agreement or {}).get("admitted")
        if admitted is not None and admitted != record.last_incarnation:
            findings.append(f"{record.name}: admitted {admitted}, the drain said {record.last_incarnation}")
        if record.requests.taken != first.requests.taken:
            findings.append(f"{record.name}: took {record.requests.taken} requests, rank 0 took {first.requests.taken}")
        # How often a rank was asked to prepare may differ: what is cancelled meanwhile is not prepared by all.
        for name in ("activations", "completions"):
            value, usual = getattr(record.ready, name), getattr(first.ready, name)
            if value != usual:
                findings.append(f"{record.name}: {value} {name}, rank {first.rank} has {usual}")
    return findings
