"""Sessions over NIXL between two processes: both tiers, both measured transports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("transport", ["tcp", "cma"])
@pytest.mark.parametrize("tier", ["direct", "bounce", "pull"])
def test_a_transfer_lands_exactly_and_both_sides_end_proven(session_pair, together, transport, tier):
    """Every fragment is in place, the tier is the one asked for, memory and source are released exactly once."""
    receiver, sender = session_pair(transport, nbytes=2 << 20, arena=1 << 20)
    sender("fill_pattern", seed=5)
    receiver("open", request=7, incarnation=0, writers=[sender.peer], count=900, size=512, tier=tier)
    together((receiver, "poll", {"count": 5}), (sender, "poll", {"seconds": 5, "until": ["ReceiveRequested"]}))
    sender("ready", request=7)
    received, sent = together(
        (receiver, "poll", {"seconds": 20, "until": ["MemoryReleased"]}),
        (sender, "poll", {"seconds": 20, "until": ["RequestServed"]}),
    )
    names = [event[0] for event in received]
    assert names == ["TransferSucceeded", "MemoryReleased"]
    assert received[0][2] == [tier]
    assert [event[0] for event in sent] == ["OperationDone", "RequestServed"]
    assert sender("snapshot", request=7) is None, "a snapshot before sealing"
    sender("seal", request=7)
    assert [event[0] for event in sender("poll")] == ["SourceReleased"]
    assert sender("snapshot", request=7) == ["COMPLETED", ["done"], False]
    assert receiver(
        "expected_bytes",
        rank=0,
        writers=1,
        index=0,
        request=7,
        count=900,
        size=512,
        base=receiver.base,
        room=2 << 20,
        source_seed=5,
    )
    statistics = receiver("statistics")
    assert statistics["released"] == 1
    assert statistics["operations_bounced"] == (tier == "bounce")
    assert statistics["operations_direct"] == (tier == "direct")
    assert statistics["operations_pulled"] == (tier == "pull")


@pytest.mark.parametrize(
    ("tier", "transport"),
    [
        *(("direct", "tcp"), ("pull", "cma")),
        *(
            pytest.param(tier, transport, marks=pytest.mark.slow)
            for tier, transport in (("direct", "cma"), ("pull", "tcp"))
        ),
    ],
)
def test_pools_registered_after_the_introduction_are_used(session_pair, together, transport, tier):
    """Both sides move on to memory that came late; the peer learns of it by the session, in time."""
    receiver, sender = session_pair(transport, nbytes=1 << 20)
    for request in (1, 2):
        if request == 2:
            receiver.base = receiver("late_pool", nbytes=2 << 20)
            sender("late_pool", nbytes=2 << 20)
        nbytes = request << 20
        sender("fill_pattern", seed=5)
        receiver("open", request=request, incarnation=0, writers=[sender.peer], count=300, size=512, tier=tier)
        sender("ready", request=request)
        received, _ = together(
            (receiver, "poll", {"seconds": 20, "until": ["MemoryReleased"]}),
            (sender, "poll", {"seconds": 20, "until": ["RequestServed"]}),
        )
        assert [event[0] for event in received if "Introduced" not in event[0]] == [
            "TransferSucceeded",
            "MemoryReleased",
        ]
        assert receiver(
            "expected_bytes",
            rank=0,
            writers=1,
            index=0,
            request=request,
            count=300,
            size=512,
            base=receiver.base,
            room=nbytes,
            source_seed=5,
        )


@pytest.mark.parametrize(
    "arguments",
    [pytest.param((), marks=pytest.mark.slow, id="push"), pytest.param(("--pull",), id="pull")],
)
def test_the_example_program_runs_as_it_stands(arguments, tmp_path):
    """Two processes, real NIXL, every byte compared by the program itself."""
    program = Path(__file__).parents[2] / "examples" / "two_processes.py"
    command = [sys.executable, str(program), "--tokens", "2600", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "every byte is in its place" in done.stdout
    assert ("by pull" if arguments else "by bounce") in done.stdout and "SourceReleased" in done.stdout
