"""Evidence, its comparison, and the command line."""

from __future__ import annotations

import copy
import json

import pytest

from pp_agreement import Agreement, AgreementConfig, Domain, InProcessNetwork, Outcome, verify
from pp_agreement.__main__ import main


@pytest.fixture(scope="module")
def lifetime():
    """Evidence of three ranks that committed five and drained."""
    domain = Domain(1, (0, 1, 2))
    network = InProcessNetwork(domain)
    agreements = [Agreement(domain, r, network.transport(r), AgreementConfig(credits=8)) for r in range(3)]
    for agreement in agreements:
        agreement.open()
        for number in range(1, 6):
            agreement.vote_terminal(agreement.admit(number, number, ready=False), Outcome.COMPLETED)
    agreements[0].start_drain(5)
    for _ in range(8):
        for agreement in agreements:
            agreement.poll()
    return [json.loads(json.dumps(a.evidence())) for a in agreements]


def test_equal_ranks_verify(lifetime):
    assert verify(lifetime) == ()
    assert lifetime[0]["committed"] == 5 and lifetime[0]["latency"]["count"] == 5


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("digest", "00"), ("activation_digest", "00"), ("mode", "allgather"), ("admitted", 6), ("committed", 4),
        ("closed", 1), ("activated", 3), ("last_incarnation", 4), ("outcomes", {}), ("package_version", "0"),
    ],
)  # fmt: skip
def test_a_difference_names_rank_and_field(lifetime, field, value):
    records = copy.deepcopy(lifetime)
    records[1][field] = value
    assert any(d.rank == 1 and d.field == field for d in verify(records))


def test_lifetimes_are_not_mixed(lifetime):
    """Another epoch, or one rank twice."""
    records = copy.deepcopy(lifetime)
    records[2]["domain"]["epoch"] = 1
    assert any(d.rank == 2 and d.field == "domain" for d in verify(records))
    assert any("mixed" in d.detail for d in verify([*lifetime, lifetime[0]]))


def test_missing_undrained_faulty_and_foreign_are_told(lifetime):
    assert any(d.rank == 2 and d.field == "evidence" for d in verify(lifetime[:2]))
    records = copy.deepcopy(lifetime)
    records[0]["drained"] = False
    records[1]["fault"] = {"code": "DEATH", "rank": 2, "detail": "gone"}
    records[2]["verdicts"] = [{"kind": "SilenceVerdict", "observer_rank": 2, "suspect_rank": 0}]
    fields = {(d.rank, d.field) for d in verify(records)}
    assert {(0, "drained"), (1, "fault"), (2, "verdict")} <= fields
    assert verify([]) and verify([{"format": "something else"}])
    records[0]["committed"] = None
    assert any(d.field == "counts" for d in verify(records))


def test_command_line(lifetime, tmp_path, capsys):
    files = []
    for record in lifetime:
        path = tmp_path / f"{record['rank']}.json"
        path.write_text(json.dumps(record))
        files.append(str(path))
    assert main(["verify", *files]) == 0
    assert "3 ranks agree: 5 committed + 0 closed of 5 admitted" in capsys.readouterr().out
    assert main(["verify", *files[:2]]) == 1
    assert "rank 2: evidence: missing" in capsys.readouterr().out
    lines = tmp_path / "all.jsonl"
    lines.write_text("\n".join(json.dumps(r) for r in lifetime))
    assert main(["verify", str(lines)]) == 0
    lines.write_text("no json")
    assert main(["verify", str(lines)]) == 2
    assert main(["verify", str(tmp_path / "none")]) == 2
    lines.write_text("[1]")
    assert main(["verify", str(lines)]) == 2
