"""The protocol as text: every file under ``scenarios/`` prints exactly what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from pp_agreement import Reason
from pp_agreement.testing import ScenarioMismatch, play, run_scenario
from pp_agreement.testing._scenario import Scenario

FILES = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_scenario(path):
    """``run_scenario(path, rewrite=True)`` regenerates a file after a reviewed change."""
    run_scenario(path)


def test_there_are_scenarios():
    assert len(FILES) >= 55


def test_a_changed_expectation_is_noticed(tmp_path):
    text = next(text for text in map(Path.read_text, FILES) if "Completed" in text)
    changed = tmp_path / "changed.txt"
    changed.write_text(text.replace("Completed", "Committed", 1))
    with pytest.raises(ScenarioMismatch, match="Completed"):
        run_scenario(changed)
    run_scenario(changed, rewrite=True)
    assert changed.read_text() == play(text)


def records():
    """Every phase and kind of ``records.txt``, with what is to become of it."""
    lines = [line.split() for line in (Path(__file__).parent / "records.txt").read_text().splitlines()]
    rows = [words for words in lines if words and words[0] != "#"]
    kinds = rows[0][1:]
    for words in rows[1:]:
        phase, wanted = words[: -len(kinds)], words[-len(kinds) :]
        for kind, what in zip(kinds, wanted):
            if what != "-":
                yield pytest.param(phase[0], phase[1:], kind, what, id=f"{'-'.join(phase)}-{kind}")


def reach(world, phase, more, who):
    """Four ranks, 3 coordinates and 0 schedules: that phase of one attempt, where only ``who`` still owes its word."""
    others = ",".join(str(rank) for rank in range(4) if rank != who)
    voted = ["publish 1 @*", "settle"]
    leased = [*voted, "ack 1 @*", "settle"]
    steps = {
        "GATHERING": [f"publish 1 @{others}"],
        "GRANTING": [*voted, f"ack 1 @{f'{who},2' if more else others}"],
        "RELEASED": [*leased, "activate 1 @0" if more else "settle"],
        "COMPLETE": [*leased, "activate 1 @0", "settle", "activate 1 @1,2,3"],
        "ABORTING": ["publish 1 @2", "withdraw 1 NOT_READY @2"],
        "FINAL": ["publish 1 @2", "settle", "vote 1 FAILED @3", "settle", "abortack 1 @*"],
    }[phase]
    for line in ("world ranks=4 coordinator=3 scheduler=0", "admit 7 1 @*", *steps, "settle"):
        assert not any("Error" in out for out in world.run(line)), line
    world.run(f"stop {who}")
    return others


DECIDED = {"GATHERING": "Prepared", "GRANTING": "Released", "RELEASED": "Completed", "ABORTING": "Finalized"}


def ignored(world):
    return int(world.run("counts 3")[0].split("ignored ")[1].split(",")[0])


@pytest.mark.parametrize(("phase", "more", "kind", "what"), list(records()))
def test_a_record_in_any_phase(phase, more, kind, what):
    """The table of ``records.txt`` against a member that says one thing out of turn."""
    world, who = Scenario(), 0 if kind == "REVOKE" else 1
    others = reach(world, phase, more, who)
    before = ignored(world)
    if phase == "ABORTING" and what == "counted":
        world.run(f"abortack 1 @{others}")
        assert not world.run("settle"), "one acknowledgement is missing"
    world.run(f"inject {who} 3 {kind} reason={int(Reason.CANCELLED)}")
    told = "\n".join(world.run("settle"))
    assert ignored(world) - before == (what == "nothing")
    if what == "fault":
        where = "after an activation" if more and kind == "REVOKE" else f"in phase {phase}"
        assert f"3: Fault PROTOCOL: unexpected {kind} of rank {who} {where}" in told
    elif what == "aborts":
        assert told.count("Aborted 1.0 (request 7) CANCELLED") == 3
    elif what == "advice":
        assert told == f"0: Advice 1.0 (request 7) RECALL of rank {who} CANCELLED"
    elif what == "counted":
        if phase == "RELEASED":
            assert told == ""
            world.run("activate 1 @" + ("2,3" if more else "0,2,3"))
            told = "\n".join(world.run("settle"))
        assert DECIDED[phase] in told and "Fault" not in told
    else:
        assert told == ""
        world.run(f"cont {who}")
        end_well(world, phase, more, what)


def end_well(world, phase, more, what):
    """What was swallowed has changed nothing, and of what was noted only the reason counts: the round ends as it would have."""
    wanted = None
    if phase == "ABORTING":
        world.run("abortack 1 @*")
        wanted = "CLOSED CANCELLED" if what == "noted" else "REOPEN NOT_READY"
    elif phase == "FINAL":
        world.run("vote 1 COMPLETED @0,1,2")
        wanted = "FAILED RELEASE"
    elif phase == "COMPLETE":
        world.run("vote 1 COMPLETED @*")
        wanted = "COMPLETED RELEASE"
    elif phase == "RELEASED":
        for line in ("activate 1 @0", "settle", "activate 1 @1,2,3")[2 if more else 0 :]:
            world.run(line)
        wanted = "Completed"
    if wanted is not None:
        told = world.run("settle")
        assert sum(wanted in line for line in told) == 4, told
