"""Evidence files of one folder, one per rank: read, typed as far as the comparison needs, bounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

FORMAT = "meta-executor evidence"
VERSION = 1
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


_DECODER = msgspec.json.Decoder(Record)


def read_record(path: Path) -> Record:
    """One file.

    Raises:
        EvidenceError: It is none of ours.
    """
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise EvidenceError(f"{path.name}: larger than {FILE_BYTES_MAX} bytes")
        record = _DECODER.decode(path.read_bytes())
    except OSError as error:
        raise EvidenceError(f"{path.name}: {error.strerror or error}") from error
    except msgspec.DecodeError as error:
        raise EvidenceError(f"{path.name}: no evidence of this program: {error}") from error
    if record.format != FORMAT or record.version != VERSION:
        raise EvidenceError(f"{path.name}: format {record.format!r} version {record.version}, this reads {VERSION}")
    return msgspec.structs.replace(record, path=path.name)


def read_folder(folder: Path) -> tuple[list[Record], list[str]]:
    """All records of a folder in (owner, rank) order, and what could not be read, in words."""
    records, broken = [], []
    for path in sorted(folder.glob("*.json")):
        try:
            records.append(read_record(path))
        except EvidenceError as error:
            broken.append(str(error))
    return sorted(records, key=lambda r: (r.owner_id, r.instance_id, r.rank)), broken
