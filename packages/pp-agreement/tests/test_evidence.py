"""Evidence, its comparison, and the command line."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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


NEEDED = (
    "mode", "package_version", "domain", "config", "outcomes", "events", "digest", "activation_digest", "undecided",
    "missing_ranks", "verdicts", "admitted", "committed", "closed", "open_rounds", "quarantined", "activated",
    "last_incarnation", "drained", "fault",
)  # fmt: skip


@pytest.mark.parametrize("field", NEEDED)
@pytest.mark.parametrize("value", ["absent", "x", True, -1, 1.5, [[1]]])
def test_what_every_rank_lacks_alike_is_found(lifetime, field, value):
    """Equal is not enough: fields that are missing, or nonsense, on all ranks prove nothing."""
    records = copy.deepcopy(lifetime)
    for record in records:
        if value == "absent":
            del record[field]
        else:
            record[field] = value
    if (field, value) in [("drained", True), ("package_version", "x")]:
        assert verify(records) == ()
        return
    assert {d.rank for d in verify(records) if field in f"{d.field} {d.detail}"} == {0, 1, 2}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("last_incarnation", 6), ("undecided", [[1, 1, 0]]), ("missing_ranks", [2]), ("open_rounds", 1),
        ("outcomes", {"COMPLETED": 4, "FAILED": 0, "CANCELLED": 0}), ("outcomes", {"COMPLETED": 6, "FAILED": -1}),
        ("events", {"Committed": 4}), ("quarantined", 6), ("fault", "DEATH"), ("fault", {}), ("verdicts", ["x"]),
    ],
)  # fmt: skip
def test_a_record_that_contradicts_itself_is_found(lifetime, field, value):
    """The same contradiction on all ranks: no comparison shows it."""
    records = copy.deepcopy(lifetime)
    for record in records:
        record[field] = value
    assert {d.rank for d in verify(records)} == {0, 1, 2}


def test_foreign_records_are_told_and_never_raise(lifetime):
    for odd in (None, 5, [], "x", {}, {"format": "pp-agreement evidence", "rank": True}):
        assert any(d.field == "format" for d in verify([*lifetime, odd]))
    for ranks in (5, None, "012", {"0": 1}, [[0]]):
        records = copy.deepcopy(lifetime)
        for record in records:
            record["domain"]["ranks"] = ranks
        assert verify(records)
    records = copy.deepcopy(lifetime)
    records[0]["config"] = {"credits": object()}
    assert any(d.rank == 0 and d.field == "config" for d in verify(records))


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n",
        "[]",
        "[" * 100_000,
        '{"a": 1, "a": 2}',
        '{"x": {"rank": 0, "rank": 1}}',
        "[1]",
        "null",
        "{",
        b"\xff\xfe\x00",
    ],
)
def test_files_that_are_none(text, tmp_path, capsys):
    """Empty, cut, nested without end, saying a thing twice, not text: exit 2 with a reason, never a traceback."""
    path = tmp_path / "odd.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert main(["verify", str(path)]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_a_file_without_end_is_refused(capsys):
    assert main(["verify", "/dev/zero"]) == 2
    assert "longer than" in capsys.readouterr().err


def test_every_truncation_of_a_file_is_noticed(lifetime, tmp_path):
    """A file that was cut at any byte never verifies."""
    whole = "\n".join(json.dumps(r) for r in lifetime)
    path = tmp_path / "all.jsonl"
    path.write_text(whole)
    assert main(["verify", str(path)]) == 0
    for length in range(0, len(whole), 37):
        path.write_text(whole[:length])
        assert main(["verify", str(path)]) != 0


def test_foreign_text_does_not_drive_the_terminal(lifetime, tmp_path, capsys):
    """Escapes and halves of surrogate pairs from a file are printed as what they are."""
    records = copy.deepcopy(lifetime)
    records[1]["fault"] = {"code": "\x1b[2J", "rank": 0, "detail": "\ud800\n\x07"}
    path = tmp_path / "all.json"
    path.write_text(json.dumps(records))
    assert main(["verify", str(path)]) == 1
    told = capsys.readouterr().out
    assert told.count("\n") == 1 and "\\x1b[2J" in told and "\\ud800\\n\\x07" in told


def test_a_file_given_twice_is_noticed(lifetime, tmp_path, capsys):
    path = tmp_path / "all.json"
    path.write_text(json.dumps(lifetime))
    assert main(["verify", str(path), str(path)]) == 1
    assert "two records" in capsys.readouterr().out


@given(st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_one_changed_value_never_verifies_by_accident(lifetime, data):
    """Any field of any rank, replaced by anything: never an exception; equal fields and counts are never let through."""
    records = copy.deepcopy(lifetime)
    record = data.draw(st.sampled_from(records))
    field = data.draw(st.sampled_from(sorted(record)))
    value = data.draw(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.floats(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
            max_leaves=5,
        )
    )
    changed = json.dumps(record[field], sort_keys=True) != json.dumps(value, sort_keys=True)
    record[field] = value
    found = verify(records)
    if changed and field in NEEDED:
        assert found
