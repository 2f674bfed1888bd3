"""Evidence from files: what proves a run, and everything that does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meta_executor.evidence.records import EvidenceError, read_record
from meta_executor.evidence.verify import verify_folder
from meta_executor.executor.account import Lifetime, rank_evidence, rank_statistics
from meta_executor.executor.testing import Pair


@pytest.fixture(scope="module")
def run() -> list[dict[str, Any]]:
    """Evidence of a drained pair: six ranks."""
    pair = Pair()
    try:
        for request_id in (1, 2, 3):
            prompt = [5] * (4 + request_id)
            pair.submit_generation(request_id, prompt, style="generation_first")
            pair.submit_context(request_id, prompt, style="generation_first")
        pair.run(lambda: all(pair.generation.finish(r) for r in (1, 2, 3)))
        for desk in (pair.context.desk, pair.generation.desk):
            desk.drain(pair.now_s + 10)
        pair.run(lambda: all(rank.loop.left for rank in pair.ranks))
        made = []
        for instance, owner in ((pair.context, "ctx-0"), (pair.generation, "gen-0")):
            for rank in instance.ranks:
                statistics = rank_statistics(rank.made, rank.agreement, 64)
                lifetime = Lifetime(owner, "i", "g", len(instance.ranks), {"bounce": False})
                evidence = rank_evidence(rank.made, statistics, rank.agreement, lifetime)
                made.append(json.loads(json.dumps(evidence)))
        return made
    finally:
        pair.close()


def write(folder: Path, records: list[dict[str, Any]]) -> Path:
    for record in records:
        (folder / f"{record['owner_id']}.{record['rank']}.json").write_text(json.dumps(record))
    return folder


def copy(run: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return json.loads(json.dumps(run))


def test_a_drained_run_is_verified_with_n_of_n(run: list[dict[str, Any]], tmp_path: Path) -> None:
    """The summary says how many of how many, on how many ranks."""
    result = verify_folder(write(tmp_path, run))
    assert result.ok and result.findings == ()
    assert "3 of 3 terminal commits, 3 of 3 decided on each of 4 ranks, 3 activations" in result.text()
    assert result.lines[-1] == "verified"


def spoil_missing(records: list[dict[str, Any]]) -> None:
    del records[2]


def spoil_drained(records: list[dict[str, Any]]) -> None:
    records[1]["drained"] = False


def spoil_digest(records: list[dict[str, Any]]) -> None:
    records[1]["agreement"]["activation_digest"] = "0" * 32


def spoil_commits(records: list[dict[str, Any]]) -> None:
    records[3]["agreement"]["committed"] = 2


def spoil_counts(records: list[dict[str, Any]]) -> None:
    records[0]["ready"]["completions"] = 2


def spoil_blocks(records: list[dict[str, Any]]) -> None:
    records[4]["kv"]["blocks_used"] = 1


def spoil_fault(records: list[dict[str, Any]]) -> None:
    records[5]["fault"] = "agreement: DEATH"


def spoil_modes(records: list[dict[str, Any]]) -> None:
    records[2]["modes"] = {"bounce": True}


def spoil_last(records: list[dict[str, Any]]) -> None:
    records[2]["last_incarnation"] = 4


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (spoil_missing, "no evidence of ranks [2]: killed"),
        (spoil_drained, "not drained"),
        (spoil_digest, "activation_digest"),
        (spoil_commits, "committed"),
        (spoil_counts, "3 completions, rank 0 has 2"),
        (spoil_blocks, "blocks were not given back"),
        (spoil_fault, "fault: agreement: DEATH"),
        (spoil_modes, "modes differ from rank 0's: bounce"),
        (spoil_last, "the drain said 4"),
    ],
)
def test_every_kind_of_difference_is_found(
    run: list[dict[str, Any]], tmp_path: Path, spoil: Callable[[list[dict[str, Any]]], None], words: str
) -> None:
    """One change to one rank's file: not verified, and the finding says which rank and what."""
    records = copy(run)
    spoil(records)
    result = verify_folder(write(tmp_path, records))
    assert not result.ok
    assert words in result.text()


def test_an_empty_folder_and_foreign_files_are_not_verified(tmp_path: Path) -> None:
    """No evidence proves nothing; a file that is none is named."""
    assert "there is no evidence" in verify_folder(tmp_path).text()
    (tmp_path / "x.json").write_text('{"format": "something else"}')
    assert not verify_folder(tmp_path).ok
    with pytest.raises(EvidenceError, match=r"x\.json"):
        read_record(tmp_path / "x.json")
