"""Evidence files of one folder: one per rank, and one of each run that says which ranks there were and how each lifetime ended.

Read, typed as far as the comparison needs, bounded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

FORMAT = "meta-executor evidence"
VERSION = 1
RUN_FORMAT = "meta-executor run"
#: Largest file that is read (bytes).
FILE_BYTES_MAX = 64 * 1024 * 1024


class EvidenceError(Exception):
    """A file is no evidence; the message names it."""


class Requests(msgspec.Struct, frozen=True):
    """Requests of one rank (counts)."""

    taken: int
    completed: int
    failed: int
    cancelled: int
    live: int
    live_peak: int = 0
    prepared_again: int = 0


class Ready(msgspec.Struct, frozen=True):
    """Readiness of one context rank (counts)."""

    votes: int
    prepares: int
    activations: int
    completions: int


class Kv(msgspec.Struct, frozen=True):
    """Blocks of one rank at the end."""

    blocks_total: int
    blocks_used: int
    quarantined_bytes: int
    prefix_hit_tokens: int = 0


class Record(msgspec.Struct, frozen=True):
    """One rank's lifetime."""

    format: str
    version: int
    role: str
    owner_id: str
    instance_id: str
    generation: str
    rank: int
    world_size: int
    modes: dict[str, Any]
    drained: bool
    fault: str
    last_incarnation: int
    requests: Requests
    ready: Ready
    kv: Kv
    transfers: dict[str, Any]
    agreement: dict[str, Any] | None
    stories: list[dict[str, Any]] = []
    path: str = ""

    @property
    def name(self) -> str:
        """Names the rank in a finding."""
        return f"{self.owner_id} rank {self.rank}"


#: How a lifetime ended that was drained.
DRAINED = "drained"


class LifetimeRecord(msgspec.Struct, frozen=True):
    """One lifetime of an instance, as whoever started it knows it; ``ended``: ``DRAINED``, or what ended it."""

    owner_id: str
    instance_id: str
    role: str
    world_size: int
    ended: str


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a run was made of: which files there must be, and which there cannot be."""

    format: str = RUN_FORMAT
    version: int = VERSION
    run_id: str
    lifetimes: list[LifetimeRecord]


#: Files of runs begin with this.
RUN_PREFIX = "run."
_DECODER = msgspec.json.Decoder(Record)
_RUN_DECODER = msgspec.json.Decoder(RunRecord)


def write_run(folder: Path, run: RunRecord) -> None:
    """Write a run's record, under the names of its instances: the same ones started again replace it."""
    owners = "+".join(dict.fromkeys(lifetime.owner_id for lifetime in run.lifetimes)) or "nothing"
    target = folder / f"{RUN_PREFIX}{owners[:200]}.json"
    partial = target.with_suffix(".partial")
    partial.write_bytes(msgspec.json.encode(run))
    partial.replace(target)


def read_runs(folder: Path) -> tuple[list[RunRecord], list[str]]:
    """The records of all runs of a folder, and what could not be read, in words."""
    runs: list[RunRecord] = []
    broken: list[str] = []
    for path in sorted(folder.glob(f"{RUN_PREFIX}*.json")):
        try:
            run = _RUN_DECODER.decode(_bytes_of(path))
        except msgspec.DecodeError as error:
            broken.append(f"{path.name}: no record of a run: {error}")
        except EvidenceError as error:
            broken.append(str(error))
        else:
            if (run.format, run.version) == (RUN_FORMAT, VERSION):
                runs.append(run)
            else:
                broken.append(f"{path.name}: format {run.format!r} version {run.version}, this reads {VERSION}")
    return runs, broken


def _bytes_of(path: Path) -> bytes:
    """A file's content.

    Raises:
        EvidenceError: It cannot be read, or is too large.
    """
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise EvidenceError(f"{path.name}: larger than {FILE_BYTES_MAX} bytes")
        return path.read_bytes()
    except OSError as error:
        raise EvidenceError(f"{path.name}: {error.strerror or error}") from error


def read_record(path: Path) -> Record:
    """One file.

    Raises:
        EvidenceError: It is none of ours.
    """
    try:
        record = _DECODER.decode(_bytes_of(path))
    except msgspec.DecodeError as error:
        raise EvidenceError(f"{path.name}: no evidence of this program: {error}") from error
    if record.format != FORMAT or record.version != VERSION:
        raise EvidenceError(f"{path.name}: format {record.format!r} version {record.version}, this reads {VERSION}")
    return msgspec.structs.replace(record, path=path.name)


def read_folder(folder: Path) -> tuple[list[Record], list[str]]:
    """All records of a folder in (owner, rank) order, and what could not be read, in words."""
    records, broken = [], []
    for path in sorted(folder.glob("*.json")):
        if path.name.startswith(RUN_PREFIX):
            continue
        try:
            records.append(read_record(path))
        except EvidenceError as error:
            broken.append(str(error))
    return sorted(records, key=lambda r: (r.owner_id, r.instance_id, r.rank)), broken
