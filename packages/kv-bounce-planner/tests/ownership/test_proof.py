"""Free without proof is impossible: by type for a checker, and at run time for everybody else."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest

from kv_bounce_planner._errors import LocalProtocolError
from kv_bounce_planner.sessions import (
    OperationIdentity,
    OwnedMemory,
    ProvenMemory,
    TransferIdentity,
    TransportClass,
    free,
    step_retired,
)
from kv_bounce_planner.sessions.proof import (
    BLOCK_TRANSITIONS,
    CLASS_PROOFS,
    BlockState,
    Evidence,
    Proof,
    ProofKind,
    QuarantinedMemory,
    WriteExecutor,
    required_proofs,
)

OPERATION = OperationIdentity(TransferIdentity(1, 0, "g1", 0), 2, 3)


@pytest.mark.parametrize(
    "maker",
    [lambda: Proof(ProofKind.DONE, OPERATION), lambda: ProvenMemory("x", ()), lambda: QuarantinedMemory("x", 1, "y")],
)
def test_proofs_and_proven_memory_cannot_be_made_by_hand(maker):
    """Only the machine that observed a proof makes one."""
    with pytest.raises(LocalProtocolError):
        maker()


def test_memory_is_freed_once_and_only_with_a_proof_per_owner():
    """Two owners (a write and a compute step) need two proofs; freeing twice is refused."""
    memory = OwnedMemory("blocks 1,2", ["step 9", "step 10"])
    with pytest.raises(LocalProtocolError, match="step 10"):
        memory.prove([step_retired("step 9")])
    with pytest.raises(LocalProtocolError, match="not a proof"):
        memory.prove([step_retired("step 9"), "step 10 retired, believe me"])
    proven = memory.prove([step_retired("step 9"), step_retired("step 10")])
    assert free(proven) == "blocks 1,2"
    with pytest.raises(LocalProtocolError, match="before"):
        free(proven)
    with pytest.raises(LocalProtocolError, match="already left"):
        memory.prove([step_retired("step 9"), step_retired("step 10")])


def test_a_steps_proof_is_about_a_step_and_nothing_else():
    """It is the one proof that a host makes: it never covers a transfer's operation, nor anything that is not text."""
    owned = OwnedMemory("blocks", [OPERATION])
    for subject in (OPERATION, 7, None, b"step"):
        with pytest.raises(LocalProtocolError, match="about a str"):
            step_retired(subject)
    with pytest.raises(LocalProtocolError, match="stays owned"):
        owned.prove([step_retired(str(OPERATION))])


def test_memory_and_proofs_exist_once():
    """A copy of proven memory could be freed a second time: no kind of copy is made of any of them."""
    proof = step_retired("step")
    proven = OwnedMemory("x", ["step"]).prove([proof])
    quarantined = OwnedMemory("x", ["step"]).quarantine("no proof")
    for thing in (proof, proven, quarantined, OwnedMemory("x", ["step"])):
        for way in (copy.copy, copy.deepcopy, lambda each: each.__reduce_ex__(4), lambda each: each.__reduce__()):
            with pytest.raises((LocalProtocolError, TypeError)):
                way(thing)
    assert free(proven) == "x"


def test_owned_and_quarantined_memory_cannot_be_freed():
    """OWNED → FREE and QUARANTINED → FREE are no edges."""
    owned = OwnedMemory("x", ["step"])
    with pytest.raises(LocalProtocolError):
        free(owned)  # type: ignore[arg-type]
    quarantined = owned.quarantine("no proof")
    with pytest.raises(LocalProtocolError):
        free(quarantined)  # type: ignore[arg-type]
    with pytest.raises(LocalProtocolError, match="quarantined"):
        owned.prove([step_retired("step")])


@pytest.mark.timeout(600)
def test_a_type_checker_refuses_to_free_owned_memory(tmp_path):
    """The boundary is a type: mypy rejects free(owned), free(quarantined) and abandon() after advertise()."""
    pytest.importorskip("mypy", reason="NO COVERAGE: mypy is not installed")
    source = tmp_path / "user.py"
    source.write_text(
        "from kv_bounce_planner.sessions.arena import AdvertisedReservation, Reservation\n"
        "from kv_bounce_planner.sessions import OwnedMemory, ProvenMemory, free\n"
        "def good(memory: ProvenMemory[int], before: Reservation) -> int:\n"
        "    before.abandon()\n"
        "    return free(memory)\n"
        "def bad(memory: OwnedMemory[int]) -> int:\n"
        "    return free(memory)\n"
        "def late(region: AdvertisedReservation) -> None:\n"
        "    region.abandon()\n"
    )
    answer = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--no-error-summary",
            "--cache-dir",
            str(tmp_path / "cache"),
            str(source),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line.split(": ", 1)[1] for line in answer.stdout.splitlines() if "user.py" in line]
    assert len(lines) == 2, answer.stdout + answer.stderr
    assert 'Argument 1 to "free"' in lines[0]
    assert '"abandon"' in lines[1]


def test_block_states_have_exactly_the_edges_of_the_rule():
    """OWNED → PROVEN → FREE or OWNED → QUARANTINED; no other edge leaves ownership."""
    assert BLOCK_TRANSITIONS[BlockState.OWNED] == {BlockState.PROVEN, BlockState.QUARANTINED}
    assert BLOCK_TRANSITIONS[BlockState.PROVEN] == {BlockState.FREE}
    assert BLOCK_TRANSITIONS[BlockState.QUARANTINED] == frozenset()


def test_class_proofs_are_those_of_the_rule():
    """By executor; several classes need all of their proofs; unknown ones only this process's own exit."""
    assert CLASS_PROOFS[WriteExecutor.RECEIVER] == {Evidence.AGENT_DESTROYED}
    assert CLASS_PROOFS[WriteExecutor.SENDER] == {Evidence.PEER_REAPED}
    assert CLASS_PROOFS[WriteExecutor.NIC] == {Evidence.DEREGISTERED, Evidence.QUEUE_PAIRS_GONE}
    assert required_proofs(WriteExecutor) >= {Evidence.OWN_EXIT}
    assert TransportClass.of_ucx(["tcp"]).required == {Evidence.AGENT_DESTROYED}
    assert TransportClass.of_ucx(["cma"]).required == {Evidence.PEER_REAPED}
    assert TransportClass.of_ucx(["tcp", "cma"]).required == {Evidence.AGENT_DESTROYED, Evidence.PEER_REAPED}
    assert TransportClass.of_ucx(["tcp", "a transport of tomorrow"]).required >= {Evidence.OWN_EXIT}
    assert TransportClass.of_ucx([]).required == {Evidence.OWN_EXIT}
    with pytest.raises(ValueError, match="names no executor"):
        TransportClass("x", frozenset())
