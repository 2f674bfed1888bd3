"""Evidence from files: what proves a run, and everything that does not."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meta_executor.evidence.records import DRAINED, EvidenceError, LifetimeRecord, RunRecord, read_record, write_run
from meta_executor.evidence.verify import verify_folder
from meta_executor.executor.account import Lifetime, rank_evidence, rank_statistics
from meta_executor.executor.testing import Pair


@pytest.fixture(scope="module")
def run() -> list[dict[str, Any]]:
    """Evidence of a drained pair: six ranks."""
    pair = Pair()
    try:
        for request_id in (1, 2, 3):
            start(pair, request_id)
        pair.run(lambda: all(pair.generation.finish(r) for r in (1, 2, 3)))
        return drained(pair)
    finally:
        pair.close()


def start(pair: Pair, request_id: int) -> None:
    prompt = [5] * (4 + request_id)
    pair.submit_generation(request_id, prompt, style="generation_first")
    pair.submit_context(request_id, prompt, style="generation_first")


def drained(pair: Pair) -> list[dict[str, Any]]:
    """Drain; what each rank writes then."""
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


LIFETIMES = (
    LifetimeRecord("ctx-0", "i", "context", 4, DRAINED),
    LifetimeRecord("gen-0", "i", "generation", 2, DRAINED),
)


def write(
    folder: Path, records: list[dict[str, Any]], lifetimes: tuple[LifetimeRecord, ...] | None = LIFETIMES
) -> Path:
    """A folder of evidence; ``None``: without the record of its run."""
    for record in records:
        (folder / f"{record['owner_id']}.{record['rank']}.json").write_text(json.dumps(record))
    if lifetimes is not None:
        write_run(folder, RunRecord(run_id="r", lifetimes=list(lifetimes)))
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


def spoil_generation(records: list[dict[str, Any]]) -> None:
    records[1]["generation"] = "another"


def spoil_instance(records: list[dict[str, Any]]) -> None:
    del records[4:]


def spoil_context(records: list[dict[str, Any]]) -> None:
    del records[:4]


def spoil_all(records: list[dict[str, Any]]) -> None:
    records.clear()


def spoil_world(records: list[dict[str, Any]]) -> None:
    del records[5]
    records[4]["world_size"] = 1


def spoil_lifetime(records: list[dict[str, Any]]) -> None:
    for record in records[4:]:
        record["instance_id"] = "an earlier one"


def spoil_quarantine(records: list[dict[str, Any]]) -> None:
    records[4]["kv"]["quarantined_bytes"] = 4096


def spoil_live(records: list[dict[str, Any]]) -> None:
    records[4]["requests"]["live"] = 1


def spoil_story(records: list[dict[str, Any]]) -> None:
    records[3]["stories"] = [{"request_id": 9, "state": "ENDING", "story": []}]


def spoil_taken(records: list[dict[str, Any]]) -> None:
    records[2]["requests"]["taken"] += 1
    records[2]["requests"]["completed"] += 1


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
        (spoil_generation, "generation another, rank 0 says g"),
        (spoil_instance, "gen-0: no evidence of any rank, though it was drained"),
        (spoil_context, "ctx-0: no evidence of any rank, though it was drained"),
        (spoil_all, "there is no evidence"),
        (spoil_world, "one of 1 generation ranks; the run's record says 2 generation ranks"),
        (spoil_lifetime, "gen-0 rank 0: of a lifetime that is in no record of a run here"),
        (spoil_quarantine, "4096 bytes are in quarantine"),
        (spoil_live, "1 are live"),
        (spoil_story, "request 9 in state ENDING"),
        (spoil_taken, "took 4 requests, rank 0 took 3"),
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


@pytest.mark.parametrize(
    ("lifetimes", "words"),
    [
        (None, "there is no record of the run"),
        ((LIFETIMES[0],), "gen-0 rank 0: of a lifetime that is in no record"),
        ((*LIFETIMES, LifetimeRecord("gen-1", "j", "generation", 2, DRAINED)), "gen-1: no evidence of any rank"),
        (
            (*LIFETIMES, LifetimeRecord("ctx-0", "h", "context", 4, "ctx-0 rank 1 (pid 7) died: signal SIGKILL")),
            "ctx-0: a lifetime of it was not drained: ctx-0 rank 1 (pid 7) died",
        ),
    ],
)
def test_what_the_files_cannot_say_the_record_of_the_run_does(
    run: list[dict[str, Any]], tmp_path: Path, lifetimes: tuple[LifetimeRecord, ...] | None, words: str
) -> None:
    """Which instances there were, and how each lifetime of them ended: a killed one leaves nothing that could say so."""
    result = verify_folder(write(tmp_path, run, lifetimes))
    assert not result.ok and words in result.text()


@pytest.mark.parametrize("name", ["ctx-0.1.json", "run.ctx-0+gen-0.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b'{"format": "x", "version": 1}'])
def test_a_file_that_was_cut_or_written_over_is_named(
    run: list[dict[str, Any]], tmp_path: Path, name: str, content: bytes
) -> None:
    """Never taken for one that is not there."""
    (write(tmp_path, run) / name).write_bytes(content)
    result = verify_folder(tmp_path)
    assert not result.ok and any(finding.startswith(name) for finding in result.findings)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_lawful_is_verified(tmp_path: Path, seed: int) -> None:
    """Requests cancelled in any phase by either side, deadlines, a drain among them: ranks may have prepared unlike often."""
    rng = random.Random(seed)
    pair = Pair()
    try:
        for request_id in range(1, 9):
            start(pair, request_id)
            for _ in range(rng.randrange(12)):
                pair.step(rng.choice(pair.ranks))
            if rng.random() < 0.5:
                rng.choice((pair.context, pair.generation)).desk.abort(rng.randrange(1, request_id + 1), "gone")
        if rng.random() < 0.5:
            pair.settle(rng.randrange(40))
        result = verify_folder(write(tmp_path, drained(pair)))
        assert result.ok, result.text()
    finally:
        pair.close()
